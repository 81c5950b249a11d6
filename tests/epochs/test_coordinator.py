"""The coordinator's decisions: events in, commands out; and that no order of events leaves it waiting for nobody."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from penstock.runtime.epochs.coordinator import (
    FINAL_TRIES,
    QUIET_INTERVALS,
    BuildTasks,
    Command,
    Complete,
    ConnectTasks,
    Coordinator,
    End,
    EpochOptions,
    Fail,
    FallBack,
    RemoveTasks,
    Save,
    SaveWholeState,
    Start,
    Trigger,
    Unpark,
    tasks_on,
)
from penstock.runtime.epochs.manifest import Blob, Manifest
from penstock.runtime.lifecycle import InvalidTransition
from penstock.runtime.program.flow import Flow
from penstock.runtime.program.plan import Plan
from penstock.runtime.sinks.collect import Collect
from tests.epochs.checks import downstream
from tests.runtime.sim import Trickle

# a > b > c on workers 0, 1, 2, and beside them x > y on worker 3.
A, X, B, Y, C = range(5)
PLACED = {A: 0, B: 1, C: 2, X: 3, Y: 3}
WORKERS = 4
ALL = frozenset(range(5))


def plan() -> Plan:
    flow = Flow("two-lanes", chaining=False)
    a = flow.read(Trickle([[1]], 1), name="a", parallelism=1)
    x = flow.read(Trickle([[1]], 1), name="x", parallelism=1)
    a.map(int, name="b", parallelism=1).write(Collect(), name="c", parallelism=1)
    x.write(Collect(), name="y", parallelism=1)
    made = flow.plan(WORKERS)
    names = {task.number: made.task_name(task) for task in made.tasks}
    assert names == {A: "a[0]", X: "x[0]", B: "b[0]", C: "c[0]", Y: "y[0]"}, names
    return made


PLAN = plan()
OPTIONS = EpochOptions(
    interval_s=1.0, timeout_s=5.0, max_restarts=3, restart_window_s=100.0, backoff_first_s=0.5, backoff_max_s=1.0
)


def blob(task: int, epoch: int, generation: int) -> Blob:
    return Blob(f"snapshots/{epoch:08d}-{task}-{generation}", 1, 0)


class Job:
    """A coordinator, and the events in short."""

    def __init__(self, options: EpochOptions = OPTIONS, manifest: Manifest | None = None) -> None:
        self.c = Coordinator(PLAN, PLACED, WORKERS, options, manifest)
        self.now = 0.0

    def start(self) -> list[Command]:
        self.c.start()
        out: list[Command] = []
        for worker in range(WORKERS):
            out = self.c.started(worker)
        return out

    def built(self) -> list[Command]:
        out: list[Command] = []
        for worker in range(WORKERS):
            out = self.c.built(worker, self.c.generation, self.now)
        return out

    def ack(self, *tasks: int, epoch: int, finished: bool = False, whole: bool = False) -> list[Command]:
        out: list[Command] = []
        for task in tasks:
            generation = self.c._generations[task]
            out += self.c.acknowledged(
                task, generation, epoch, finished=finished, whole=whole, blob=blob(task, epoch, generation)
            )
        return out

    def running(self, *epochs: int) -> Job:
        """Running, with these epochs complete."""
        self.start()
        self.built()
        for epoch in epochs:
            self.now += 1
            assert self.c.tick(self.now) == [Trigger(epoch)]
            (save,) = self.ack(*ALL, epoch=epoch, whole=epoch == 1)
            assert isinstance(save, Save)
            assert self.c.saved(epoch) == [Complete(epoch, False)]
        return self

    def finished(self) -> Job:
        """Every task has ended, and the last manifest is being written."""
        (save,) = self.ack(*ALL, epoch=self.c.epoch + 1, finished=True)
        assert isinstance(save, Save)
        assert save.manifest.final
        return self

    def chain(self, task: int) -> list[str] | None:
        chain = self.c._chains[task]
        return None if chain is None else [one.name[10:18].lstrip("0") for one in chain]


def build(command: Command) -> BuildTasks:
    assert isinstance(command, BuildTasks)
    return command


# --- the course of a job -----------------------------------------------------------------------------------


def test_the_start_is_a_recovery_of_all_tasks_to_nothing() -> None:
    job = Job()
    assert job.c.start() == [Start(worker) for worker in range(WORKERS)]
    assert [job.c.started(worker) for worker in range(3)] == [[], [], []]
    assert job.c.started(3) == [BuildTasks(ALL, 1, 0, {})]
    assert job.c.state == "BUILDING"
    assert [job.c.built(worker, 1, 0.0) for worker in range(3)] == [[], [], []]
    assert job.c.built(3, 1, 0.0) == [ConnectTasks(ALL, 1, ())]
    assert job.c.state == "RUNNING"


def test_an_epoch_is_complete_when_its_manifest_is_written() -> None:
    job = Job()
    job.start()
    job.built()
    assert job.c.tick(0.5) == []
    assert job.c.tick(1.0) == [Trigger(1)]
    assert job.ack(A, B, C, X, epoch=1, whole=True) == []
    assert job.c.late(1) == "waits for y[0]"
    (save,) = job.ack(Y, epoch=1, whole=True)
    assert job.c.late(1) == "waits for its manifest to be written"
    assert isinstance(save, Save)
    assert [entry.number for entry in save.manifest.tasks] == [0, 1, 2, 3, 4]
    assert (save.manifest.epoch, save.manifest.final, save.manifest.extra) == (1, False, {"generation": 1})
    assert job.c.epoch == 0
    assert job.c.saved(1) == [Complete(1, False)]
    assert job.c.epoch == 1


def test_a_job_ends_when_all_have_committed_its_last_epoch() -> None:
    job = Job().running(1).finished()
    assert job.c.saved(2) == [Complete(2, True)]
    assert job.c.state == "FINISHING"
    assert [job.c.committed(worker, 2) for worker in range(WORKERS)] == [[], [], [], [End()]]
    assert job.c.state == "ENDED"
    assert job.c.worker_lost(0, 9.0) == []


def test_a_task_that_has_ended_has_its_part_in_all_later_epochs() -> None:
    job = Job().running(1)
    job.ack(X, Y, epoch=2, finished=True)
    assert job.c.tick(9.0) == [Trigger(2)]
    (save,) = job.ack(A, B, C, epoch=2)
    assert isinstance(save, Save)
    assert [entry.finished for entry in save.manifest.tasks] == [False, True, False, True, False]


def test_the_manifest_has_what_was_acknowledged_when_the_task_passed_the_barrier() -> None:
    """And not its end, which came later."""
    job = Job().running(1)
    job.c.tick(9.0)
    job.ack(A, B, X, Y, epoch=2)
    job.ack(X, epoch=3, finished=True)
    (save,) = job.ack(C, epoch=2)
    assert isinstance(save, Save)
    assert not any(entry.finished for entry in save.manifest.tasks)


def test_going_on_from_a_manifest() -> None:
    first = Job().running(1, 2)
    first.c.tick(9.0)
    (save,) = first.ack(*ALL, epoch=3)
    assert isinstance(save, Save)
    job = Job(manifest=save.manifest)
    command = build(job.start()[0])
    assert (command.epoch, command.tasks, command.generation) == (3, ALL, 2)
    assert command.entries == {entry.number: entry for entry in save.manifest.tasks}
    job.built()
    assert job.c.tick(1.0) == [Trigger(4)]


# --- when epochs are due -------------------------------------------------------------------------------------


def test_epochs_begin_an_interval_apart_and_wait_for_each_other() -> None:
    job = Job().running(1)
    assert job.c.due() == 2.0
    job.c.tick(2.0)
    assert job.c.due() == 7.0, "while an epoch is under way: after the time-out"
    job.ack(*ALL, epoch=2)
    job.c.saved(2)
    assert job.c.due() == 3.0


def test_a_late_epoch_is_told_of_and_the_next_begins_beside_it() -> None:
    job = Job().running()
    job.c.tick(1.0)
    job.ack(A, epoch=1)
    assert job.c.tick(6.0) == [Trigger(2)]
    assert job.c.last_failure == "epoch 1 did not complete within 5 s: it waits for x[0], b[0], y[0], c[0]"
    job.ack(B, C, X, Y, A, epoch=2)
    assert job.c.epoch == 0
    assert job.c.saved(2) == [Complete(2, False)]
    assert job.ack(B, C, X, Y, epoch=1) == [], "the older one is of no use any more"


def test_epochs_that_take_longer_than_the_time_out_do_not_pile_up() -> None:
    """Each would make all others slower, and none would ever be complete."""
    job = Job().running()
    begun = []
    for tick in range(1, 1000):
        begun += [tick] * len(job.c.tick(float(tick)))
    assert begun == [1, 6, 16, 36, 76, 156, 316, 636]


def test_a_declined_epoch_does_not_hold_the_next_up() -> None:
    job = Job().running(1)
    job.c.tick(2.0)
    job.c.declined(B, 1, 2, "no room")
    assert job.c.due() == 3.0
    assert job.c.last_failure == "epoch 2: b[0]: no room"
    assert job.ack(*ALL, epoch=2) == []
    assert job.c.tick(3.0) == [Trigger(3)]


def test_without_an_interval_nothing_is_due() -> None:
    job = Job(EpochOptions(interval_s=None)).running()
    assert job.c.due() is None
    assert job.c.tick(1e9) == []


@pytest.mark.parametrize("state", ["STARTING", "BUILDING", "FALLING_BACK", "FINISHING", "saving the last"])
def test_nothing_is_due_while_something_else_is_waited_for(state: str) -> None:
    job = Job().running(1)
    if state in ("FINISHING", "saving the last"):
        job.finished()
        if state == "FINISHING":
            job.c.saved(2)
    else:
        job.c.worker_lost(1, 1.0)
        if state != "STARTING":
            job.c.started(1)
        if state == "FALLING_BACK":
            job.c.not_built(1, job.c.generation, "damaged", True, 1.0)
    assert job.c.state == state or state == "saving the last"
    assert job.c.due() is None
    assert job.c.tick(1e9) == []


# --- recovery ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("worker", "back"),
    [(0, {A, B, C}), (1, {B, C}), (2, {C}), (3, {X, Y})],
)
def test_who_goes_back_when_a_worker_is_lost(worker: int, back: set[int]) -> None:
    job = Job().running(1)
    assert job.c.worker_lost(worker, 5.0) == [RemoveTasks(frozenset(back), 1), Start(worker, 0.0)]
    (command,) = job.c.started(worker)
    assert build(command).tasks == back
    assert build(command).entries.keys() == back
    assert build(command).epoch == 1
    assert job.built() == [ConnectTasks(frozenset(back), build(command).generation, ())]


def test_a_worker_without_tasks_takes_nobody_back() -> None:
    c = Coordinator(PLAN, dict.fromkeys(ALL, 0), 2, OPTIONS)
    c.start()
    c.started(0)
    c.started(1)
    c.built(0, 1, 0.0)
    c.built(1, 1, 0.0)
    assert c.worker_lost(1, 1.0) == [RemoveTasks(frozenset(), 0), Start(1, 0.0)]
    assert c.started(1) == [BuildTasks(frozenset(), 3, 0, {})]


def test_a_worker_lost_while_another_starts_joins_the_same_recovery() -> None:
    job = Job().running(1)
    job.c.worker_lost(2, 5.0)
    assert job.c.worker_lost(3, 5.1) == [RemoveTasks(frozenset({C, X, Y}), 1), Start(3, 0.0)]
    assert job.c.started(2) == []
    (command,) = job.c.started(3)
    assert build(command).tasks == {C, X, Y}


def test_a_worker_lost_while_tasks_are_made_has_them_made_anew() -> None:
    job = Job().running(1)
    job.c.worker_lost(2, 5.0)
    first = build(job.c.started(2)[0])
    job.c.built(0, first.generation, 5.0)
    assert job.c.worker_lost(1, 5.1) == [RemoveTasks(frozenset({B, C}), 1), Start(1, 0.0)]
    assert job.c.built(1, first.generation, 5.1) == [], "of an older generation"
    second = build(job.c.started(1)[0])
    assert second.tasks == {B, C}
    assert second.generation > first.generation
    assert [job.c.built(worker, first.generation, 5.2) for worker in range(WORKERS)] == [[]] * WORKERS
    assert job.built() == [ConnectTasks(frozenset({B, C}), second.generation, ())]


def test_epochs_under_way_outlive_a_recovery() -> None:
    job = Job().running(1)
    job.c.tick(2.0)
    job.ack(A, B, C, X, epoch=2)
    job.c.worker_lost(1, 2.1)
    job.c.started(1)
    job.now = 3.0
    (join,) = job.built()
    assert isinstance(join, ConnectTasks)
    assert join.triggers == (2,)
    assert job.ack(Y, B, epoch=2) == [], "what went back acknowledges again"
    (save,) = job.ack(C, epoch=2)
    assert isinstance(save, Save)


def test_messages_of_an_older_generation_are_passed_over() -> None:
    job = Job().running(1)
    job.c.tick(2.0)
    old = job.c._generations[B]
    job.c.worker_lost(1, 2.1)
    job.c.started(1)
    job.built()
    job.ack(A, C, X, Y, epoch=2)
    assert job.c.acknowledged(B, old, 2, finished=False, whole=False, blob=blob(B, 2, old)) == []
    assert job.c.acknowledged(B, old, 3, finished=True, whole=False, blob=blob(B, 3, old)) == []
    assert job.c.declined(B, old, 2, "late") == []
    assert job.chain(B) == ["1"]
    assert job.c.last_failure is None
    assert len(job.ack(B, epoch=2)) == 1


def test_what_has_ended_ends_again_when_it_goes_back() -> None:
    job = Job().running(1)
    job.ack(B, C, epoch=2, finished=True)
    job.c.worker_lost(1, 2.0)
    job.c.started(1)
    job.built()
    assert job.ack(A, X, Y, epoch=2, finished=True) == []
    assert len(job.ack(B, C, epoch=2, finished=True)) == 1


def test_all_may_have_acknowledged_again_before_they_join() -> None:
    """Tasks that had ended say so as soon as they are made; nobody else will speak, and still the epoch completes."""
    job = Job().running(1)
    job.ack(X, Y, epoch=2, finished=True)
    job.c.tick(2.0)
    job.ack(A, B, C, epoch=2)
    job.c.saved(2)
    job.c.tick(3.0)
    job.ack(A, B, epoch=3)
    job.c.worker_lost(3, 3.1)
    job.ack(C, epoch=3)
    job.c.started(3)
    assert job.ack(X, Y, epoch=3, finished=True) == []
    join, save = job.built()
    assert isinstance(join, ConnectTasks)
    assert isinstance(save, Save)
    assert save.manifest.epoch == 3


def test_a_store_that_does_not_answer_is_tried_again() -> None:
    job = Job().running(1)
    job.c.worker_lost(2, 5.0)
    first = build(job.c.started(2)[0])
    removal, again = job.c.not_built(2, first.generation, "no answer", False, 5.5)
    assert removal == RemoveTasks(frozenset({C}), 1)
    assert build(again).after_s == 0.5
    assert build(again).tasks == {C}
    assert job.c.not_built(1, first.generation, "no answer", False, 5.6) == [], "the others' answers to the same"
    _, again = job.c.not_built(2, build(again).generation, "no answer", False, 6.5)
    assert build(again).after_s == 1.0


# --- the budget ----------------------------------------------------------------------------------------------


def test_restarts_wait_longer_and_longer_and_then_the_job_fails() -> None:
    job = Job().running(1)
    waits = []
    for n in range(3):
        commands = job.c.worker_lost(2, 10.0 + n)
        assert isinstance(commands[1], Start)
        waits.append(commands[1].after_s)
        job.c.started(2)
        job.built()
    assert waits == [0.0, 0.5, 1.0]
    (fail,) = job.c.worker_lost(2, 20.0, "killed by SIGSEGV")
    assert isinstance(fail, Fail)
    assert fail.reason == (
        "killed by SIGSEGV. The job has been restarted 3 times in the last 100 s, "
        "which is all that max_restarts=3 allows; correct the cause, and resume the job"
    )
    assert job.c.state == "FAILED"
    assert job.c.worker_lost(1, 21.0) == []
    assert job.c.started(1) == []


def test_the_budget_comes_back_with_time() -> None:
    job = Job().running(1)
    for n in range(8):
        commands = job.c.worker_lost(2, 50.0 * n)
        assert isinstance(commands[0], RemoveTasks)
        job.c.started(2)
        job.built()
    assert job.c.restarts == 8


def test_workers_that_are_lost_together_count_once() -> None:
    job = Job(EpochOptions(max_restarts=2)).running(1)
    for n in range(2):
        for worker in (1, 2):
            commands = job.c.worker_lost(worker, 10.0 * n)
            assert not any(isinstance(command, Fail) for command in commands)
        job.c.started(2)
        job.c.started(1)
        job.built()
        assert job.c.state == "RUNNING"
        assert job.c.restarts == n + 1
    (fail,) = job.c.worker_lost(1, 30.0, "killed")
    assert isinstance(fail, Fail)


def test_a_worker_that_is_lost_again_counts_again() -> None:
    job = Job(EpochOptions(max_restarts=2)).running(1)
    job.c.worker_lost(1, 10.0)
    job.c.worker_lost(2, 10.0)
    job.c.worker_lost(2, 11.0)
    assert job.c.restarts == 2
    (fail,) = job.c.worker_lost(1, 12.0)
    assert isinstance(fail, Fail)


def test_a_budget_without_an_end_does_not_run_out() -> None:
    job = Job(EpochOptions(max_restarts=10**6)).running(1)
    job.c.worker_lost(2, 5.0)
    job.c.started(2)
    for _ in range(1200):
        _, again = job.c.not_built(2, job.c.generation, "no answer", False, 6.0)
    assert build(again).after_s == 10.0


@pytest.mark.parametrize("options", [EpochOptions(interval_s=None), EpochOptions(max_restarts=0)])
def test_a_job_that_may_not_restart_fails_with_the_cause(options: EpochOptions) -> None:
    job = Job(options).running()
    assert job.c.worker_lost(2, 1.0, "out of memory") == [Fail("out of memory")]
    assert job.c.restarts == 0


def test_a_store_that_does_not_answer_for_long_uses_up_nothing() -> None:
    job = Job().running(1)
    job.c.worker_lost(2, 5.0)
    job.c.started(2)
    for n in range(50):
        assert len(job.c.not_built(2, job.c.generation, "no answer", False, 6.0 + n)) == 2
    assert job.c.restarts == 1
    assert job.c.last_failure == "tasks could not be built: no answer"


# --- snapshots and their chains ------------------------------------------------------------------------------


def test_chains_grow_by_what_has_changed_and_begin_anew_with_what_is_whole() -> None:
    job = Job().running(1, 2, 3)
    assert job.chain(B) == ["1", "2", "3"]
    job.c.tick(9.0)
    job.ack(B, epoch=4, whole=True)
    assert job.chain(B) == ["4"]


def test_what_builds_on_a_snapshot_that_was_lost_is_declined() -> None:
    job = Job().running(1)
    job.c.tick(2.0)
    job.c.declined(B, 1, 2, "no room")
    job.c.tick(3.0)
    assert job.ack(*ALL, epoch=3) == []
    assert job.c.last_failure == "epoch 3: b[0]: it builds on a snapshot that could not be written"
    assert job.chain(B) is None
    job.c.tick(4.0)
    assert len(job.ack(A, C, X, Y, epoch=4)) == 0
    (save,) = job.ack(B, epoch=4, whole=True)
    assert isinstance(save, Save)
    assert job.chain(B) == ["4"]


def test_a_chain_goes_back_with_its_task() -> None:
    job = Job().running(1)
    job.c.tick(2.0)
    job.ack(B, epoch=2)
    job.c.declined(C, 1, 2, "no room")
    job.c.worker_lost(1, 2.5)
    assert job.chain(B) == ["1"]
    assert job.chain(C) == ["1"]


def test_a_compacted_snapshot_replaces_its_series() -> None:
    job = Job().running(1, 2)
    chain = job.c._chains[B]
    assert chain is not None
    job.c.tick(9.0)
    job.c.replace_chain(B, list(chain), Blob("both", 1, 0))
    job.ack(B, epoch=3)
    assert [one.name for one in job.c._chains[B] or []] == ["both", "snapshots/00000003-2-1"]
    assert [one.name for one in job.c.entries()[B].blobs] == ["both"]
    job.c.worker_lost(1, 9.5)
    assert [one.name for one in build(job.c.started(1)[0]).entries[B].blobs] == ["both"]


# --- manifests -----------------------------------------------------------------------------------------------


def test_a_manifest_that_was_not_written_costs_an_epoch() -> None:
    job = Job().running(1)
    job.c.tick(2.0)
    job.ack(*ALL, epoch=2)
    assert job.c.not_saved(2, "no room") == []
    assert job.c.last_failure == "epoch 2: its manifest could not be written: no room"
    assert job.c.epoch == 1
    assert job.c.tick(3.0) == [Trigger(3)]
    (save,) = job.ack(*ALL, epoch=3)
    assert isinstance(save, Save)
    assert job.chain(B) == ["1", "2", "3"], "the snapshots themselves are there"


def test_an_epoch_that_became_ready_meanwhile_is_saved_next() -> None:
    job = Job().running()
    job.c.tick(1.0)
    job.ack(A, B, C, X, epoch=1)
    job.c.tick(6.0)
    (save,) = job.ack(Y, epoch=1)
    assert isinstance(save, Save)
    assert job.ack(*ALL, epoch=2) == [], "one at a time"
    (save,) = job.c.not_saved(1, "no room")
    assert isinstance(save, Save)
    assert save.manifest.epoch == 2


def test_the_last_manifest_is_tried_an_interval_apart_until_the_job_fails() -> None:
    job = Job().running(1).finished()
    for n in range(2, FINAL_TRIES + 1):
        assert job.c.not_saved(n, "no room") == []
        assert job.c.due() is not None
        (save,) = job.c.tick(float(n))
        assert isinstance(save, Save)
        assert save.manifest.epoch == n + 1
        assert save.manifest.final
    (fail,) = job.c.not_saved(FINAL_TRIES + 1, "no room")
    assert fail == Fail(f"the last epoch {FINAL_TRIES + 1}: its manifest could not be written: no room")
    assert job.c.state == "FAILED"


@pytest.mark.parametrize("written", [True, False])
def test_a_worker_lost_while_a_manifest_is_written_goes_back_to_what_came_of_it(written: bool) -> None:
    job = Job().running(1)
    job.c.tick(2.0)
    job.ack(*ALL, epoch=2)
    assert job.c.worker_lost(2, 2.1) == []
    assert job.c.worker_lost(3, 2.2) == []
    commands = job.c.saved(2) if written else job.c.not_saved(2, "no room")
    epoch = 2 if written else 1
    assert commands == [
        *([Complete(2, False)] if written else []),
        RemoveTasks(frozenset({C}), epoch),
        Start(2, 0.0),
        RemoveTasks(frozenset({C, X, Y}), epoch),
        Start(3, 0.0),
    ]


def test_a_worker_lost_while_the_last_epoch_is_committed_commits_it_again() -> None:
    job = Job().running(1).finished()
    job.c.saved(2)
    job.c.committed(0, 2)
    assert job.c.worker_lost(2, 5.0) == [RemoveTasks(frozenset({C}), 2), Start(2, 0.0)]
    assert job.c.committed(1, 2) == []
    command = build(job.c.started(2)[0])
    assert command.entries[C].finished
    job.built()
    (save,) = job.ack(C, epoch=3, finished=True)
    assert isinstance(save, Save)
    assert save.manifest.final
    assert job.c.saved(3) == [Complete(3, True)]
    assert job.c.committed(0, 2) == [], "of the epoch before"
    assert [job.c.committed(worker, 3) for worker in range(WORKERS)] == [[], [], [], [End()]]


# --- what is lost while the job lives ------------------------------------------------------------------------


def names(job: Job, *tasks: int, epoch: int) -> frozenset[str]:
    return frozenset(blob(task, epoch, job.c._generations[task]).name for task in tasks)


def test_tasks_whose_snapshots_are_lost_save_everything_anew() -> None:
    job = Job().running(1, 2)
    lost = names(job, B, epoch=1)
    assert job.c.lost(lost, "the disk is empty", 2.5) == [SaveWholeState(frozenset({B})), Trigger(3)]
    assert job.c.last_failure == "the disk is empty"
    assert job.c.lost(lost, "the disk is empty", 2.6) == [], "it is said again until no epoch needs it"
    assert job.ack(A, C, X, Y, epoch=3) == []
    (save,) = job.ack(B, epoch=3, whole=True)
    assert isinstance(save, Save)
    assert {entry.number: len(entry.blobs) for entry in save.manifest.tasks} == {A: 3, B: 1, C: 3, X: 3, Y: 3}
    job.c.saved(3)
    assert job.c.last_failure is None
    assert job.c.lost(lost, "the disk is empty", 3.5) == []


def test_what_a_task_adds_to_what_is_lost_is_not_taken() -> None:
    """Its snapshot was on its way, or it has not heard yet."""
    job = Job().running(1)
    job.now = 2.0
    job.c.tick(job.now)
    job.ack(A, B, epoch=2)
    assert job.c.lost(names(job, A, B, epoch=1), "gone", 2.1) == [SaveWholeState(frozenset({A, B})), Trigger(3)]
    assert job.ack(C, X, Y, epoch=2) == [], "epoch 2 builds on what is gone"
    assert job.ack(A, epoch=3, whole=True) == []
    assert job.ack(B, epoch=3) == []
    assert job.ack(C, X, Y, epoch=3) == [], "b had not heard when it saved its part"
    assert job.c.begin(4.0) == [Trigger(4)]
    assert job.ack(A, C, X, Y, epoch=4) == []
    (save,) = job.ack(B, epoch=4, whole=True)
    assert isinstance(save, Save)
    assert save.manifest.epoch == 4


def test_a_manifest_that_refers_to_what_is_lost_is_not_written() -> None:
    job = Job().running(1)
    job.now = 2.0
    job.c.tick(job.now)
    (save,) = job.ack(*ALL, epoch=2)
    assert isinstance(save, Save)
    assert job.c.lost(names(job, C, epoch=1), "gone", 2.1) == [SaveWholeState(frozenset({C})), Trigger(3)]
    assert job.c.not_saved(2, "it builds on what is lost") == []
    (save,) = [*job.ack(A, B, X, Y, epoch=3), *job.ack(C, epoch=3, whole=True)]
    assert isinstance(save, Save)
    assert save.manifest.epoch == 3


def test_a_task_that_has_ended_says_so_again_when_its_end_is_lost() -> None:
    job = Job().running(1)
    job.ack(X, Y, epoch=2, finished=True)
    assert job.c.lost(names(job, X, epoch=2), "gone", 2.0) == [SaveWholeState(frozenset({X})), Trigger(2)]
    assert job.c.finished() == {Y}
    assert job.ack(A, B, C, epoch=2) == []
    (save,) = job.ack(X, epoch=2, finished=True)
    assert isinstance(save, Save)


def test_losses_that_are_found_one_after_the_other_begin_no_epochs_beside_each_other() -> None:
    """Each epoch would make all others slower, as epochs that take longer than the time-out do."""
    job = Job().running(1)
    assert job.c.lost(names(job, A, epoch=1), "gone", 1.1) == [SaveWholeState(frozenset({A})), Trigger(2)]
    assert job.c.lost(names(job, A, B, epoch=1), "gone", 1.2) == [SaveWholeState(frozenset({B}))]
    assert job.c.lost(names(job, A, B, C, epoch=1), "gone", 1.3) == [SaveWholeState(frozenset({C}))]
    (save,) = job.ack(*ALL, epoch=2, whole=True)
    assert isinstance(save, Save)
    assert save.manifest.epoch == 2


def test_an_end_that_is_told_to_be_lost_again_and_again_begins_one_epoch() -> None:
    job = Job().running(1)
    job.ack(X, Y, epoch=2, finished=True)
    begun = []
    for tenth in range(20, 60):
        begun += [one for one in job.c.lost(names(job, X, epoch=2), "gone", tenth / 10) if isinstance(one, Trigger)]
        assert job.ack(X, epoch=2, finished=True) == []
    assert begun == [Trigger(2)]
    assert job.c.last_failure == "gone"
    (save,) = job.ack(A, B, C, epoch=2)
    assert isinstance(save, Save)


def test_an_epoch_under_way_that_builds_on_what_is_lost_is_followed_by_another_at_once() -> None:
    """A task has passed the barrier before it hears that it is to save its whole state."""
    job = Job(replace(OPTIONS, interval_s=600.0))
    job.start()
    job.built()
    job.c.begin(0.0)
    job.ack(*ALL, epoch=1, whole=True)
    job.c.saved(1)
    job.c.begin(2.0)
    assert job.c.lost(names(job, B, epoch=1), "gone", 2.1) == [SaveWholeState(frozenset({B}))]
    assert job.c.tick(2.2) == [], "epoch 2 may do"
    assert job.ack(B, epoch=2) == []
    assert job.c.tick(2.3) == [Trigger(3)]
    assert job.c.declined(B, job.c._generations[B], 3, "the store is full") == []
    assert job.c.due() == 602.3, "once for what is lost"


def test_tasks_that_go_back_find_out_for_themselves_what_is_lost() -> None:
    job = Job().running(1)
    job.c.worker_lost(2, 2.0)
    lost = names(job, A, epoch=1) | {blob(C, 1, 1).name}
    assert job.c.lost(lost, "gone", 2.1) == [SaveWholeState(frozenset({A}))]
    job.c.started(2)
    job.built()  # it could be read after all
    assert job.c.lost(lost, "gone", 2.2) == [SaveWholeState(frozenset({C})), Trigger(2)]


def test_no_other_plan_continues_from_lost_state() -> None:
    job = Job().running(1)
    job.c.lost(names(job, B, epoch=1), "gone", 1.5)
    assert job.c.replan(PLAN, PLACED) == []
    assert job.c.state == "RUNNING"


# --- damage --------------------------------------------------------------------------------------------------


def damaged(*epochs: int) -> tuple[Job, list[Manifest]]:
    job = Job(EpochOptions(max_restarts=100, backoff_first_s=0.0))
    job.start()
    job.built()
    manifests = []
    for epoch in epochs:
        job.now += 1
        job.c.tick(job.now)
        (save,) = job.ack(*ALL, epoch=epoch, whole=epoch == 1)
        assert isinstance(save, Save)
        manifests.append(save.manifest)
        job.c.saved(epoch)
    job.c.worker_lost(2, job.now)
    job.c.started(2)
    assert job.c.not_built(2, job.c.generation, "rot", True, job.now) == [FallBack(epochs[-1], "rot")]
    return job, manifests


def test_when_the_last_epoch_is_damaged_all_go_back_to_an_older_one() -> None:
    job, manifests = damaged(1, 2, 3)
    removal, command = job.c.rewind(manifests[1], job.now)
    assert removal == RemoveTasks(ALL, 2)
    assert (build(command).tasks, build(command).epoch) == (ALL, 2)
    assert build(command).entries == {entry.number: entry for entry in manifests[1].tasks}
    job.built()
    assert job.c.tick(job.now + 1) == [Trigger(4)], "a number is used once"
    assert job.chain(B) == ["1", "2"]


def test_when_all_epochs_are_damaged_all_begin_anew() -> None:
    job, _ = damaged(1, 2)
    removal, command = job.c.rewind(None, job.now)
    assert removal == RemoveTasks(ALL, 0)
    assert (build(command).tasks, build(command).epoch, build(command).entries) == (ALL, 0, {})
    job.built()
    assert job.c.tick(job.now + 1) == [Trigger(3)]


def test_a_worker_lost_while_falling_back_is_started_and_waited_for() -> None:
    job, manifests = damaged(1, 2)
    assert job.c.worker_lost(1, job.now) == [Start(1)]
    assert job.c.not_built(0, job.c.generation, "rot", True, job.now) == [], "told once"
    assert job.c.rewind(manifests[0], job.now) == [RemoveTasks(ALL, 1)]
    (command,) = job.c.started(1)
    assert build(command).tasks == ALL


def test_a_worker_that_starts_before_it_is_known_where_to_go_back_to() -> None:
    job, manifests = damaged(1, 2)
    job.c.worker_lost(1, job.now)
    assert job.c.started(1) == []
    commands = job.c.rewind(manifests[0], job.now)
    assert build(commands[-1]).tasks == ALL


def test_what_all_found_damaged_is_told_once() -> None:
    job, _ = damaged(1, 2)
    generation = job.c.generation
    assert job.c.not_built(0, generation, "no answer", False, job.now) == []
    assert job.c.built(3, generation, job.now) == []
    assert job.c.state == "FALLING_BACK"


# --- events that do not fit ----------------------------------------------------------------------------------


def test_an_older_epoch_that_nobody_has_asked_for_is_refused() -> None:
    job = Job().running(1)
    with pytest.raises(InvalidTransition, match="'rewind' came in state RUNNING"):
        job.c.rewind(None, 2.0)
    assert job.c.epoch == 1
    assert job.c.state == "RUNNING"


def test_nothing_comes_before_the_start_and_it_comes_once() -> None:
    job = Job()
    for event in (lambda: job.c.started(0), lambda: job.c.worker_lost(0, 0.0), lambda: job.c.begin(0.0)):
        with pytest.raises(InvalidTransition, match="in state CREATED, where only 'start' can come"):
            event()
    job.c.start()
    with pytest.raises(InvalidTransition, match="'start' came in state STARTING"):
        job.c.start()


def test_a_worker_that_nobody_has_started_or_asked_is_refused_with_what_led_there() -> None:
    job = Job()
    job.c.start()
    job.c.started(0)
    with pytest.raises(InvalidTransition, match=r"started \(worker 0 has answered before, or was not asked\)"):
        job.c.started(0)
    job = Job().running(1)
    with pytest.raises(InvalidTransition) as caught:
        job.c.started(2)
    assert str(caught.value).startswith("coordinator of job 'two-lanes': 'started' came in state RUNNING, where only")
    assert "\n  STARTING --build--> BUILDING\n  BUILDING --connect--> RUNNING\n  since then: begin x 1" in str(
        caught.value
    )
    job.c.worker_lost(2, 2.0)
    job.c.started(2)
    job.c.built(1, job.c.generation, 2.1)
    with pytest.raises(InvalidTransition, match=r"built \(worker 1 has answered before"):
        job.c.built(1, job.c.generation, 2.1)


def test_a_manifest_that_is_not_being_written_has_no_outcome() -> None:
    job = Job().running(1)
    with pytest.raises(InvalidTransition, match=r"saved \(no manifest of epoch 1 is being written\)"):
        job.c.saved(1)
    job.c.tick(2.0)
    job.ack(*ALL, epoch=2)
    with pytest.raises(InvalidTransition, match=r"not saved \(no manifest of epoch 1 is being written\)"):
        job.c.not_saved(1, "no room")


def test_an_answer_to_the_commit_of_an_epoch_that_was_given_up_is_late_in_any_state() -> None:
    job = Job().running(1).finished()
    job.c.saved(2)
    job.c.worker_lost(2, 5.0)
    assert [job.c.state, job.c.committed(0, 2)] == ["STARTING", []]
    job.c.started(2)
    assert [job.c.state, job.c.committed(0, 2)] == ["BUILDING", []]
    job.built()
    assert [job.c.state, job.c.committed(0, 2)] == ["RUNNING", []]


def test_after_the_end_nothing_has_an_effect() -> None:
    job = Job().running(1).finished()
    job.c.saved(2)
    for worker in range(WORKERS):
        job.c.committed(worker, 2)
    assert job.c.state == "ENDED"
    assert job.ack(X, epoch=3, finished=True) == []
    assert job.c.declined(X, job.c._generations[X], 3, "late") == []
    assert job.c.committed(0, 1) == job.c.built(0, 0, 9.0) == job.c.lost({"any"}, "late", 9.0) == []
    assert job.c.begin(9.0) == job.c.migrate(PLACED, 9.0) == job.c.replan(PLAN, PLACED) == []
    assert job.c.worker_lost(1, 9.0) == []
    with pytest.raises(InvalidTransition, match="'saved' came in state ENDED"):
        job.c.saved(2)


def test_workers_that_have_not_heard_of_the_failure_have_no_effect() -> None:
    job = Job(EpochOptions(max_restarts=1)).running(1)
    job.c.worker_lost(2, 2.0)
    job.c.started(2)
    assert isinstance(job.c.worker_lost(2, 3.0)[0], Fail)
    generation = job.c.generation
    assert job.c.built(0, generation, 3.1) == job.c.not_built(1, generation, "no answer", False, 3.1) == []
    assert job.c.not_built(3, generation, "rot", True, 3.1) == job.c.started(2) == []
    assert job.ack(A, epoch=2) == job.c.lost(names(job, A, epoch=1), "gone", 3.1) == []
    assert job.c.state == "FAILED"


# --- any order of events -------------------------------------------------------------------------------------


class Host:
    """Does at random what it is told to, with all that can go wrong, and keeps account of what it still has to do."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        options = EpochOptions(
            interval_s=rng.choice((0.1, 1.0)),
            timeout_s=rng.choice((0.1, 5.0)),
            max_restarts=rng.choice((2, 10**6)),
            backoff_first_s=0.0,
        )
        self.c = Coordinator(PLAN, PLACED, WORKERS, options)
        self.now = 0.0
        self.downstream = downstream(PLAN)
        self.starting: set[int] = set()
        self.alive: set[int] = set()
        self.making: list[tuple[int, int]] = []  # worker, generation
        self.committing: list[tuple[int, int]] = []  # worker, epoch
        self.saving: Manifest | None = None
        self.falling = False
        self.manifests: dict[int, Manifest] = {}
        self.generations = dict.fromkeys(ALL, -1)
        self.todo: dict[int, list[int]] = {task: [] for task in ALL}  # epochs to be acknowledged
        self.ended: set[int] = set()
        self.said_end: set[int] = set()
        self.whole: set[int] = set()
        self.complete = 0
        self.ending = False  # all tasks end
        self.story: list[Any] = []
        self.done(self.c.start())

    def done(self, commands: list[Command]) -> None:
        for command in commands:
            self.story.append(command)
            if isinstance(command, Start):
                assert command.worker not in self.alive | self.starting
                self.starting.add(command.worker)
            elif isinstance(command, RemoveTasks):
                self.making.clear()
                self.committing.clear()
                for task in command.tasks:
                    self.generations[task] = -1
            elif isinstance(command, BuildTasks):
                assert not self.starting
                self.making = [(worker, command.generation) for worker in self.alive]
                for task in command.tasks:
                    self.generations[task] = command.generation
                    self.todo[task] = []
                    self.said_end.discard(task)
                    entry = command.entries.get(task)
                    self.ended.discard(task)
                    self.whole.add(task)
                    if entry is not None:
                        self.whole.discard(task)
                    if self.ending or (entry is not None and entry.finished):
                        self.ended.add(task)
            elif isinstance(command, ConnectTasks):
                for task in command.tasks:
                    self.todo[task] += command.triggers
            elif isinstance(command, Trigger):
                for task in ALL:
                    self.todo[task].append(command.epoch)
            elif isinstance(command, Save):
                assert self.saving is None
                self.saving = command.manifest
            elif isinstance(command, Complete):
                assert command.epoch > self.complete
                assert command.epoch in self.manifests
                self.complete = command.epoch
                if command.final:
                    self.committing = [(worker, command.epoch) for worker in self.alive]
            elif isinstance(command, FallBack):
                self.falling = True

    @property
    def over(self) -> bool:
        return self.c.state in ("ENDED", "FAILED")

    def choices(self) -> list[str]:
        """What can happen next."""
        can = []
        if self.starting:
            can.append("started")
        if self.making:
            can.append("built")
        if self.committing:
            can.append("committed")
        if self.saving is not None:
            can.append("saved")
        if self.falling:
            can.append("rewind")
        if any(self.may_speak(task) for task in ALL):
            can += ["speak", "speak"]
        if self.c.due() is not None:
            can.append("tick")
        return can

    def may_speak(self, task: int) -> bool:
        if self.generations[task] < 0 or task in self.said_end:
            return False
        return task in self.ended or bool(self.todo[task])

    def do(self, what: str, faults: bool) -> None:
        rng, c = self.rng, self.c
        bad = faults and rng.random() < 0.2
        self.now += rng.random() * 0.1
        if what == "started":
            worker = rng.choice(sorted(self.starting))
            self.starting.discard(worker)
            if bad:
                self.done(c.worker_lost(worker, self.now))
                return
            self.alive.add(worker)
            self.done(c.started(worker))
        elif what == "built":
            worker, generation = self.making.pop(rng.randrange(len(self.making)))
            if bad:
                self.done(c.not_built(worker, generation, "no", rng.random() < 0.3, self.now))
            else:
                self.done(c.built(worker, generation, self.now))
        elif what == "committed":
            self.done(c.committed(*self.committing.pop(rng.randrange(len(self.committing)))))
        elif what == "saved":
            manifest, self.saving = self.saving, None
            assert manifest is not None
            if bad:
                self.done(c.not_saved(manifest.epoch, "no"))
            else:
                self.manifests[manifest.epoch] = manifest
                self.done(c.saved(manifest.epoch))
        elif what == "rewind":
            self.falling = False
            older = [self.manifests[epoch] for epoch in sorted(self.manifests) if epoch < c.epoch]
            self.done(c.rewind(rng.choice([None, *older]), self.now))
        elif what == "speak":
            self.speak(rng.choice([task for task in sorted(ALL) if self.may_speak(task)]), bad)
        elif what == "tick":
            self.now = max(self.now, c.due() or 0.0)
            self.done(c.tick(self.now))
        elif what == "end":
            # A source ends, or a task that has nobody before it who has not.
            before = {task for task in ALL if any(task in self.downstream[other] for other in ALL - self.ended)}
            self.ended |= {rng.choice(sorted(ALL - before - self.ended))} if ALL - before - self.ended else set()
        elif what == "die":
            worker = rng.choice(sorted(self.alive))
            self.alive.discard(worker)
            self.making = [item for item in self.making if item[0] != worker]
            self.committing = [item for item in self.committing if item[0] != worker]
            for task, placed in PLACED.items():
                if placed == worker:
                    self.generations[task] = -1
            self.done(c.worker_lost(worker, self.now))
        elif what == "late":
            task = rng.choice(sorted(ALL))
            old = rng.randrange(c._generations[task])
            epoch = rng.randrange(1, c.begun + 2)
            if rng.random() < 0.5:
                self.done(c.declined(task, old, epoch, "late"))
            else:
                finished = rng.random() < 0.3
                late = blob(task, epoch, old)
                self.done(c.acknowledged(task, old, epoch, finished=finished, whole=False, blob=late))

    def speak(self, task: int, bad: bool) -> None:
        generation = self.generations[task]
        finished = not self.todo[task] or (task in self.ended and self.rng.random() < 0.5)
        epoch = 0 if finished else self.todo[task].pop(0)
        if bad:
            self.whole.add(task)
            self.done(self.c.declined(task, generation, epoch, "no"))
            return
        if finished:
            self.said_end.add(task)
        whole = task in self.whole
        self.whole.discard(task)
        saved = blob(task, epoch, generation)
        self.done(self.c.acknowledged(task, generation, epoch, finished=finished, whole=whole, blob=saved))


@pytest.mark.parametrize("chunk", range(10))
def test_no_order_of_events_leaves_it_waiting_for_nobody(chunk: int) -> None:
    for seed in range(chunk, 300, 10):
        host = Host(seed)
        try:
            for _ in range(host.rng.randrange(300)):
                if host.over:
                    break
                can = host.choices() + ["end"] * (host.rng.random() < 0.05)
                can += ["die"] * (bool(host.alive) and host.rng.random() < 0.1)
                can += ["late"] * (host.c.generation > 3)
                host.do(host.rng.choice(can), faults=True)
            host.ending, host.ended = True, set(ALL)
            for _ in range(2000):  # from here on nothing goes wrong
                if host.over:
                    break
                can = host.choices()
                host.do(host.rng.choice([what for what in can if what != "tick"] or can), faults=False)
            assert host.over, "it never ends"
            assert host.c.state == "ENDED" or host.c.options.max_restarts == 2
        except Exception as error:
            story = "\n".join(map(str, host.story[-30:]))
            raise AssertionError(f"seed {seed}: {error!r}, {host.c.state}, can {host.choices()}\n{story}") from error


def quiet_epoch(job: Job, *, quiet: bool = True, moves_after: int | None = None) -> float:
    """Run the next epoch, of which all tasks say that nothing moved; when it began. `moves_after`: a task to which a
    record comes when it has said so, before the epoch is complete."""
    now = job.c.due()
    assert now is not None
    job.c.tick(now)
    for task in ALL:
        generation = job.c._generations[task]
        epoch = job.c.begun
        job.c.acknowledged(
            task, generation, epoch, finished=False, whole=True, blob=blob(task, epoch, generation), quiet=quiet
        )
        if task == moves_after:
            job.c.no_longer_quiet(task, generation)
    job.c.saved(job.c.begun)
    return now


def test_epochs_are_rarer_while_nothing_moves() -> None:
    job = Job(EpochOptions(interval_s=1.0)).running(1)
    for quiet, intervals in ((True, QUIET_INTERVALS), (False, 1)):
        assert quiet_epoch(job, quiet=quiet) + intervals == job.c.due()


def test_the_first_record_after_a_pause_brings_the_next_epoch() -> None:
    job = Job(EpochOptions(interval_s=1.0)).running(1)
    began = quiet_epoch(job)
    job.c.no_longer_quiet(A, job.c._generations[A] + 1)  # by a process that is not the task's
    assert job.c.due() == began + QUIET_INTERVALS
    job.c.no_longer_quiet(A, job.c._generations[A])
    assert job.c.due() == began + 1
    assert job.c.tick(began + 30) == [Trigger(3)], "at once, if it was due before"


def test_a_record_while_the_quiet_epoch_is_under_way_is_not_forgotten() -> None:
    job = Job(EpochOptions(interval_s=1.0)).running(1)
    assert quiet_epoch(job, moves_after=A) + 1 == job.c.due()


def test_tasks_that_were_made_again_are_not_quiet() -> None:
    """They tell of no motion before they have had a quiet epoch."""
    job = Job(EpochOptions(interval_s=1.0)).running(1)
    job.now = quiet_epoch(job) + 2
    job.c.worker_lost(0, job.now)
    job.c.started(0)
    job.built()
    assert job.c.due() == job.now + 1


def test_no_new_plan_for_a_job_that_is_at_its_end() -> None:
    """All tasks have ended and one of them is made again: nobody would finish what a new plan begins."""
    job = Job().running(1).finished()
    job.c.saved(job.c.begun)
    job.c.worker_lost(0, 5.0)
    job.c.started(0)
    job.built()
    assert job.c.state in ("RUNNING", "FINISHING")
    assert job.c.replan(PLAN, PLACED) == []


# --- migration -----------------------------------------------------------------------------------------------------


def moving(job: Job, **to: int) -> dict[int, int]:
    """Where all tasks are to run, of which some move, by letter."""
    return {**job.c.placed, **{{"a": A, "b": B, "c": C, "x": X, "y": Y}[name]: worker for name, worker in to.items()}}


def acknowledged(job: Job, epoch: int, *tasks: int, parked: bool = False) -> list[Command]:
    out: list[Command] = []
    for task in tasks:
        generation = job.c._generations[task]
        saved = blob(task, epoch, generation)
        out += job.c.acknowledged(task, generation, epoch, finished=False, whole=False, blob=saved, parked=parked)
    return out


def test_a_task_that_has_stopped_moves_alone() -> None:
    job = Job().running(1)
    target = (PLACED[B] + 1) % WORKERS
    assert job.c.migrate(moving(job, b=target), 1.5) == [Trigger(2, frozenset({B}))]
    assert job.c.migrating
    acknowledged(job, 2, B, parked=True)
    (save,) = acknowledged(job, 2, *(ALL - {B}))
    assert isinstance(save, Save)
    complete, removal, build = job.c.saved(2)
    assert complete == Complete(2, False)
    assert removal == RemoveTasks(frozenset({B}), 2, planned=True)
    assert isinstance(build, BuildTasks)
    assert build.tasks == {B}
    assert build.change is not None
    assert build.change.placed[B] == target
    assert not build.changed
    assert list(build.entries) == [B]
    assert build.entries[B].blobs[-1].name == blob(B, 2, 1).name
    job.built()
    assert job.c.state == "RUNNING"
    assert job.c.placed[B] == target
    assert job.c.restarts == 0
    assert B in tasks_on(job.c.placed, [target])


def test_a_task_that_has_not_stopped_takes_downstream_tasks_along() -> None:
    job = Job().running(1)
    job.c.migrate(moving(job, a=(PLACED[A] + 1) % WORKERS), 1.5)
    acknowledged(job, 2, *ALL)
    _, removal, build = job.c.saved(2)
    assert removal == RemoveTasks(frozenset({A, B, C}), 2, planned=True)
    assert isinstance(build, BuildTasks)
    assert build.tasks == {A, B, C}


def test_an_epoch_that_cannot_complete_lets_tasks_stay() -> None:
    job = Job().running(1)
    job.c.migrate(moving(job, b=(PLACED[B] + 1) % WORKERS), 1.5)
    assert job.c.declined(A, job.c._generations[A], 2, "the store is away") == [Unpark()]
    assert not job.c.migrating
    assert job.c.placed == PLACED
    late = Job().running(1)
    late.c.migrate(moving(late, b=(PLACED[B] + 1) % WORKERS), 1.5)
    assert late.c.tick(2.0 + OPTIONS.timeout_s) == [Unpark(), Trigger(3)]


def test_a_manifest_that_was_not_written_lets_tasks_stay() -> None:
    job = Job().running(1)
    job.c.migrate(moving(job, b=(PLACED[B] + 1) % WORKERS), 1.5)
    acknowledged(job, 2, *ALL, parked=True)
    assert job.c.not_saved(2, "disk full")[0] == Unpark()
    assert not job.c.migrating


def test_a_death_ends_the_attempt() -> None:
    job = Job().running(1)
    job.c.migrate(moving(job, y=(PLACED[Y] + 1) % WORKERS), 1.5)
    removal = job.c.worker_lost(PLACED[A], 1.6)[0]
    assert isinstance(removal, RemoveTasks)
    assert removal.tasks >= {A}
    assert not job.c.migrating
    assert job.c.placed == PLACED
    # And one that is told of while the manifest is being written.
    other = Job().running(1)
    other.c.migrate(moving(other, y=(PLACED[Y] + 1) % WORKERS), 1.5)
    acknowledged(other, 2, *ALL, parked=True)
    assert other.c.worker_lost(PLACED[A], 1.6) == []
    complete, removal, *_ = other.c.saved(2)
    assert complete == Complete(2, False)
    assert isinstance(removal, RemoveTasks)
    assert removal.tasks == {A, B, C}
    assert other.c.placed == PLACED


def test_after_a_move_a_death_takes_back_what_is_there_now() -> None:
    job = Job().running(1)
    target = (PLACED[Y] + 1) % WORKERS
    job.c.migrate(moving(job, y=target), 1.5)
    acknowledged(job, 2, *ALL, parked=True)
    job.c.saved(2)
    job.built()
    removal = job.c.worker_lost(target, 3.0)[0]
    assert isinstance(removal, RemoveTasks)
    assert Y in removal.tasks
    before = Job().running(1)
    assert Y not in before.c._downstream[A]


def test_ended_tasks_stay_and_so_do_those_that_are_where_they_should_be() -> None:
    job = Job().running(1)
    assert job.c.migrate(dict(PLACED), 1.5) == []
    job.ack(X, Y, epoch=2, finished=True)
    assert job.c.finished() == {X, Y}
    assert job.c.migrate(moving(job, x=(PLACED[X] + 1) % WORKERS), 1.5) == []
    assert not job.c.migrating


def test_one_move_at_a_time() -> None:
    job = Job().running(1)
    assert job.c.migrate(moving(job, b=(PLACED[B] + 1) % WORKERS), 1.5)
    assert job.c.migrate(moving(job, y=(PLACED[Y] + 1) % WORKERS), 1.5) == []
    assert job.c.replan(PLAN, PLACED) == []


def test_tasks_that_end_before_they_could_move_hold_up_nothing() -> None:
    """All end by the epoch at which one was to move: the last epoch is written at once."""
    job = Job().running(1)
    job.c.migrate(moving(job, y=(PLACED[Y] + 1) % WORKERS), 1.5)
    acknowledged(job, 2, *(ALL - {Y}), parked=True)
    (save,) = job.ack(Y, epoch=2, finished=True)
    assert isinstance(save, Save)
    job.ack(*(ALL - {Y}), epoch=2, finished=True)
    complete, unpark, last = job.c.saved(2)
    assert (complete, unpark) == (Complete(2, False), Unpark())
    assert isinstance(last, Save)
    assert last.manifest.final
    assert not job.c.migrating


def test_an_epoch_that_was_begun_before_the_move_completes_without_it() -> None:
    job = Job().running(1)
    assert job.c.tick(2.0) == [Trigger(2)]
    assert job.c.migrate(moving(job, b=(PLACED[B] + 1) % WORKERS), 2.1) == [Trigger(3, frozenset({B}))]
    (save,) = acknowledged(job, 2, *ALL)
    assert isinstance(save, Save)
    assert job.c.saved(2) == [Complete(2, False)]
    assert job.c.migrating
    acknowledged(job, 3, *ALL, parked=True)
    assert job.c.saved(3)[1] == RemoveTasks(frozenset({B}), 3, planned=True)
