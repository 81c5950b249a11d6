"""The JobHost in single scenes, event by event. The simulated cluster (tests/epochs) has it in whole jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from penstock.host.carry.processes import RelayHandle
from penstock.host.carry.relay_runner import RelayRunner
from penstock.host.decide.commands import (
    Call,
    CopySavepoint,
    CopySavepointAndStop,
    EndJob,
    HostCommand,
    JobEnd,
    KillProcess,
    MakeRoom,
    Reply,
    SaveManifest,
    StartProcess,
    StartRelay,
    TellAll,
)
from penstock.host.decide.death import Death
from penstock.host.decide.job_host import (
    CoordinatorEvent,
    Found,
    HostOptions,
    JobHost,
    RelayEvent,
    RequestEvent,
)
from penstock.host.decide.process_commands import Build, ExpectRelay, Remove, Removed, Stop, TellRelay, UseRelays
from penstock.runtime.epochs.coordinator import Complete, EpochOptions, Trigger
from penstock.runtime.epochs.manifest import Blob, Manifest
from penstock.runtime.epochs.participant import Acknowledged, Declined
from penstock.runtime.epochs.store import Store
from penstock.runtime.errors import JobError, PenstockError
from penstock.runtime.lifecycle import InvalidTransition
from penstock.runtime.program.flow import Flow
from penstock.runtime.program.plan import Plan
from penstock.runtime.relaying.relay_map import RelayMap
from penstock.runtime.sinks.call import Null
from penstock.runtime.sources.memory import Memory
from penstock.runtime.worker.blackbox import Note

KILLED = Death("it was killed")


def plan_of(workers: int) -> Plan:
    """read > last, which are two tasks, on the workers in turn."""
    flow = Flow("job", chaining=False)
    flow.read(Memory([1]), name="read", parallelism=1).write(Null(), name="last", parallelism=1)
    return flow.plan(workers)


class InTurn:
    """Places tasks on workers in turn."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def first(self, plan: Plan) -> dict[int, int]:
        return self.grown(plan, {})

    def known(self) -> str:
        return ""

    def stays(self, plan: Plan) -> dict[int, int]:
        """See Placing."""
        return {}

    def grown(self, plan: Plan, before: dict[int, int]) -> dict[int, int]:
        return {task.number: before.get(task.number, task.number % self.workers) for task in plan.tasks}

    def moved(self, tasks: int) -> None: ...

    def forget(self) -> None: ...


class Refused(PenstockError):
    """A worker's refusal as a carrier brings it, with what was raised."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def name_of(call: Call) -> str:
    return type(call.command).__name__


class Job:
    """A JobHost whose carrier does at once what it is told, and says so, but for what `silent` names."""

    def __init__(
        self, workers: int = 2, *, epochs: bool = True, max_restarts: int = 10, plan: Plan | None = None
    ) -> None:
        """`plan`: of a job whose workers are on a machine each, so that it may have relays."""
        options = EpochOptions(interval_s=1.0 if epochs else None, max_restarts=max_restarts)
        host_options = HostOptions(workers, options, has_store=epochs, relays=plan is not None)
        self.host = JobHost(plan or plan_of(workers), host_options, InTurn(workers))
        self.now = 100.0
        self.silent: set[str] = set()
        self.calls: list[Call] = []  # that have no answer yet
        self.starts: list[StartProcess] = []  # likewise
        self.saves: list[SaveManifest] = []
        self.others: list[HostCommand] = []
        self.maps: dict[int, RelayMap] = {}  # by worker: which relays it was told of last
        self.take(self.host.start(self.now))

    def take(self, commands: list[HostCommand]) -> None:
        for command in commands:
            if isinstance(command, Call):
                if name_of(command) in self.silent:
                    self.calls.append(command)
                else:
                    self.answer(command)
            elif isinstance(command, StartProcess):
                self.starts.append(command)
                if "start" not in self.silent:
                    self.start()
            elif isinstance(command, SaveManifest):
                self.saves.append(command)
            else:
                self.others.append(command)

    def start(self) -> None:
        """The first process that was to be started is ready."""
        command = self.starts.pop(0)
        worker = command.worker
        address = f"{worker}/{command.incarnation}"
        info = {"index": worker, "pid": 1000 + worker, "node_id": "n", "machine": f"m{worker}", "address": address}
        info |= {"name": f"host-{worker}", "host": f"10.0.0.{worker}"}
        self.take(self.host.process_ready(worker, command.incarnation, info, self.now))

    def answer(self, call: Call) -> None:
        answer: Any = None
        if isinstance(call.command, Remove):
            answer = Removed(f"{call.worker}/{call.incarnation}", {})
        elif isinstance(call.command, Complete):
            answer = 1 << 20
        elif isinstance(call.command, ExpectRelay):
            answer = f"{call.worker}/{call.incarnation}"
        elif isinstance(call.command, UseRelays):
            self.maps[call.worker] = call.command.relays
        self.take(self.host.answered(call.worker, call.incarnation, call.number, answer, self.now))

    def dies(self, worker: int) -> None:
        incarnation = self.host.lives.incarnation(worker)
        self.take(self.host.process_died(worker, incarnation, KILLED, self.now))

    def asks(self, event: RequestEvent) -> None:
        self.take(self.host.of_requests(event, self.now))

    def hears(self, event: CoordinatorEvent) -> None:
        """The coordinator hears of the store."""
        self.take(self.host.of_coordinator(event, self.now))

    def relays_hear(self, event: RelayEvent) -> None:
        self.take(self.host.of_relays(event, self.now))

    def acknowledge(self, epoch: int, *, finished: bool = False, parked: bool = False) -> None:
        """All tasks acknowledge an epoch."""
        for task, generation in sorted(self.host.coordinator._generations.items()):
            blob = Blob(f"snapshots/{epoch:08d}-{task}-{generation}", 1, 0)
            self.said(Acknowledged(task, generation, epoch, finished, True, blob, parked=parked))

    def said(self, what: Any) -> None:
        worker = self.host.present.placed[what.task]
        self.take(self.host.said(worker, self.host.lives.incarnation(worker), what, self.now))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.host.tick(self.now))

    def saved(self) -> None:
        """The first manifest that was to be saved is written."""
        self.hears(lambda coordinator, _: coordinator.saved(self.saves.pop(0).manifest.epoch))

    @property
    def ends(self) -> list[JobEnd]:
        return [command.end for command in self.others if isinstance(command, EndJob)]


def running(workers: int = 2) -> Job:
    job = Job(workers)
    assert job.host.life.state == "RUNNING"
    job.others.clear()
    return job


def test_a_job_starts_completes_an_epoch_and_finishes() -> None:
    job = running()
    job.tick(1.5)
    job.acknowledge(1)
    job.saved()
    assert job.host.coordinator.epoch == 1
    job.acknowledge(2, finished=True)
    job.saved()
    assert job.host.coordinator.state == "ENDED"
    assert not job.ends, "the run loops have not ended"
    for worker in (0, 1):
        job.take(job.host.run_ended(worker, 1, None, None, job.now))
    assert job.ends == [JobEnd("FINISHED")]
    assert job.host.due() is None


def test_a_job_whose_last_worker_dies_while_a_manifest_is_saved_has_not_finished() -> None:
    """The coordinator puts the death off until it knows whether the manifest is there; nothing runs meanwhile."""
    job = running(workers=1)
    job.tick(1.5)
    job.acknowledge(1)
    job.silent.add("start")
    job.dies(0)
    assert not job.host.lives.running
    assert job.ends == []
    job.saved()
    assert job.ends == []
    assert [start.incarnation for start in job.starts] == [2]
    job.start()
    assert job.host.life.state == "RUNNING"


def test_processes_start_and_tasks_are_built_when_all_have_removed_theirs() -> None:
    job = running(workers=3)
    job.silent |= {"Remove", "Build"}
    job.dies(1)
    assert job.host.life.state == "RECOVERING"
    assert [call.worker for call in job.calls] == [0, 2]
    assert job.starts == []
    job.answer(job.calls.pop(0))
    assert job.starts == [], "worker 2 may still send what the new process must not get"
    job.answer(job.calls.pop(0))
    assert job.calls
    assert {name_of(call) for call in job.calls} == {"Build"}
    assert {call.incarnation for call in job.calls if call.worker == 1} == {2}
    assert all(call.command.addresses[1] == "1/2" for call in job.calls if isinstance(call.command, Build)), (
        "the new address of worker 1"
    )


def test_who_dies_before_it_has_removed_its_tasks_holds_up_nobody() -> None:
    job = running(workers=3)
    job.silent.add("Remove")
    job.dies(1)
    job.dies(0)
    (call,) = (call for call in job.calls if call.worker == 2 and call.command.dead == [0, 1])
    job.answer(next(one for one in job.calls if one.worker == 2 and one is not call))
    assert job.host.life.state == "RECOVERING", "it has answered an earlier removal"
    job.answer(call)
    job.tick(1.0)  # the second restart without an epoch between waits
    assert job.host.life.state == "RUNNING"
    assert [life.incarnation for life in job.host.lives._lives.values()] == [2, 2, 1]


def test_what_an_earlier_process_says_late_has_no_effect() -> None:
    job = running()
    job.silent |= {"Build"}
    job.dies(1)
    job.dies(1)
    job.tick(1.0)
    (of_one,) = (call for call in job.calls if call.worker == 1 and call.incarnation == 3)
    before = job.host.coordinator.generation
    assert job.host.process_died(1, 2, KILLED, job.now) == []
    assert job.host.said(1, 1, Declined(0, 99, 1, "no", True), job.now) == []
    assert job.host.answered(1, 2, of_one.number, None, job.now) == []
    assert job.host.run_ended(1, 1, "boom", None, job.now) == []
    assert job.host.coordinator.generation == before
    assert job.host.coordinator.restarts == 2


def test_a_death_of_which_nothing_is_known_is_not_guessed_at(caplog: pytest.LogCaptureFixture) -> None:
    job = running()
    incarnation = job.host.lives.incarnation(1)
    job.take(job.host.process_died(1, incarnation, Death("it has gone", known=False), job.now))
    assert "it has gone; the agent of its node cannot say how" in caplog.text
    assert "for want of memory" not in caplog.text


def test_a_task_that_was_running_at_two_deaths_is_said_to_take_its_records_one_by_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = running()
    for deaths in (1, 2):
        incarnation = job.host.lives.incarnation(1)
        job.take(job.host.process_died(1, incarnation, Death("it was killed", Note(1)), job.now))
        job.tick(10.0)
        said = "job job: task last[0] was running at two deaths, so until 10 epochs have completed it takes its records"
        assert caplog.text.count(said) == deaths - 1


def test_a_process_is_not_ready_twice() -> None:
    job = running()
    with pytest.raises(InvalidTransition, match="'ready' came in state RUNNING"):
        job.host.process_ready(0, 1, {}, job.now)
    with pytest.raises(InvalidTransition, match="the present one is 1"):
        job.host.process_not_started(0, 7, "late", job.now)


def test_a_task_that_could_not_write_has_room_made_when_that_may_help() -> None:
    job = running()
    job.tick(1.5)
    generation = job.host.coordinator.generation
    job.said(Declined(0, generation, 1, "full", may_pass=False))
    assert job.others == []
    job.said(Declined(1, generation, 1, "full", may_pass=True))
    assert job.others == [MakeRoom()]


def test_a_plan_that_was_changed_while_it_was_planned_anew_is_not_taken_up() -> None:
    job = running()
    plan, placed = job.host.present.plan, dict(job.host.present.placed)
    wanted = dict.fromkeys(placed, 0)
    elsewhere = dict.fromkeys(placed, 1)
    for known, at in ((plan_of(2), placed), (plan, elsewhere)):  # the plan is another one; tasks have moved meanwhile
        assert job.host.of_requests(lambda r, _, known=known, at=at: r.better_placed(known, at, wanted), job.now) == []  # type: ignore[misc]
    job.asks(lambda requests, _: requests.migrate(1, {"last[0]": 1}))
    assert job.others == [Reply(1)], "it is there already"
    job.asks(lambda requests, _: requests.better_placed(plan, placed, wanted))
    assert job.host.coordinator.migrating


def test_tasks_that_placement_wants_elsewhere_wait_until_an_epoch_is_saved() -> None:
    """They stayed where they were, until the next period of placement."""
    job = running()
    job.tick(1.5)
    job.acknowledge(1)
    placed = dict(job.host.present.placed)
    wanted = dict.fromkeys(placed, 0)
    job.asks(lambda requests, _: requests.better_placed(job.host.present.plan, placed, wanted))
    assert not job.host.coordinator.migrating
    job.saved()
    assert job.host.coordinator.migrating
    job.acknowledge(2, parked=True)
    job.saved()
    assert job.host.present.placed == wanted
    job.tick(1.5)
    assert not job.host.coordinator.migrating, "once is enough"


def test_the_number_of_a_rescale_holds_for_the_job_itself_and_not_for_one_that_starts_from_its_savepoint(
    tmp_path: Path,
) -> None:
    """Whether the program names the number or leaves it open, `explain` has told the user what will run."""
    flow = Flow("job")
    numbers = flow.read(Memory([1]), name="read", parallelism=1)
    given = numbers.key_by(lambda n: n).count(name="count", parallelism=4).filter(bool, name="fused", parallelism=4)
    given.key_by(lambda n: n).count(name="open").write(Null(), name="last")
    saved = Manifest(
        job="job",
        epoch=3,
        created=0.0,
        final=False,
        key_groups=128,
        tasks=[],
        extra={"parallelism": '{"count": 5, "open": 3, "gone": 2}'},
    )
    own = replace(saved, extra={"parallelism": '{"count": 5, "open": 3}'})

    def tasks(found: Found) -> dict[str, int]:
        host = JobHost(flow.plan(2), HostOptions(2, EpochOptions(1.0), has_store=True, flow=flow), InTurn(2), found)
        return {
            name: host.present.plan.chain_of(name).parallelism for name in ("read", "count", "fused", "open", "last")
        }

    assert tasks(Found(own)) == {"read": 1, "count": 5, "fused": 5, "open": 3, "last": 3}
    origin = Store.open(tmp_path, "savepoint")
    assert tasks(Found(saved, origin)) == {"read": 1, "count": 4, "fused": 4, "open": 2, "last": 2}


def test_where_tasks_are_is_known_after_they_have_moved() -> None:
    job = running()
    job.asks(lambda requests, _: requests.migrate(1, {"last[0]": 0}))
    job.acknowledge(1, parked=True)
    job.saved()
    assert Reply(1) in job.others
    assert set(job.host.present.placed.values()) == {0}
    job.dies(1)
    assert job.host.life.state == "RUNNING", "it had no task any more"


def test_requests_are_refused_with_what_is_wrong_and_end_with_the_job() -> None:
    job = running()
    job.asks(lambda requests, _: requests.migrate(1, {"nobody[0]": 1}))
    job.asks(lambda requests, _: requests.migrate(2, {"last[0]": 9}))
    job.asks(lambda requests, _: requests.rescale(3, "nobody", 2))
    job.asks(lambda requests, _: requests.savepoint(4, "place"))
    job.take(job.host.cancel(job.now))
    job.asks(lambda requests, _: requests.savepoint(5, "place"))
    replies = {command.request: str(command.error) for command in job.others if isinstance(command, Reply)}
    assert "has no task 'nobody[0]'; it has: last[0], read[0]" in replies[1]
    assert "there is no worker 9; the job has 0 to 1" in replies[2]
    assert "nobody" in replies[3]
    assert "has ended" in replies[4]
    assert "has ended" in replies[5]
    assert job.ends == [JobEnd("CANCELLED")]
    without = Job(epochs=False)
    (reply,) = without.host.of_requests(lambda requests, _: requests.savepoint(1, "place"), without.now)
    assert isinstance(reply, Reply)
    assert isinstance(reply.error, JobError)
    assert "run it with epochs (epoch_interval_s=1," in str(reply.error)


def test_a_savepoint_is_given_up_with_what_it_waits_for() -> None:
    job = running()
    job.asks(lambda requests, _: requests.savepoint(1, "place"))
    assert job.host.requests.give_up_savepoint(1) == "epoch 1, which waits for read[0], last[0]"
    assert job.host.requests.give_up_savepoint(1) is None
    job.asks(lambda requests, _: requests.savepoint(2, "place"))
    job.acknowledge(1)
    assert job.host.requests.give_up_savepoint(2) == "epoch 2, which waits for read[0], last[0]"
    job.saved()
    job.silent.add("start")
    job.dies(1)
    job.asks(lambda requests, _: requests.savepoint(3, "place"))
    assert job.host.requests.give_up_savepoint(3) == "the tasks to run, and the job is RECOVERING"
    assert not any(isinstance(command, CopySavepoint | Reply) for command in job.others)


def test_a_stop_is_told_once_also_when_it_is_asked_for_twice() -> None:
    job = running()
    job.take(job.host.stop(job.now))
    job.take(job.host.stop(job.now))
    assert job.others == [TellAll(Stop())]
    assert job.host.life.state == "STOPPING"
    job.dies(1)
    assert job.host.life.state == "STOPPING"


def test_the_cause_of_a_failure_is_waited_for() -> None:
    job = Job(epochs=False)
    job.take(job.host.run_ended(0, 1, "worker 1 has gone", None, job.now))
    assert job.ends == []
    assert job.host.due() is not None
    job.take(job.host.run_ended(1, 1, "ValueError in last", "last", job.now))
    assert job.ends == [JobEnd("FAILED", "ValueError in last", "last")]
    alone = Job(epochs=False)
    alone.take(alone.host.run_ended(0, 1, "worker 1 has gone", None, alone.now))
    alone.tick(1.0)
    assert alone.ends == [JobEnd("FAILED", "worker 1 has gone")]


def test_a_process_that_hangs_is_killed_and_counts_as_a_crash_unless_somebody_stopped_it() -> None:
    job = running()
    job.take(job.host.process_hangs(1, 1, True, job.now))
    assert job.others == [KillProcess(1, 1)]
    assert job.host.process_hangs(1, 0, True, job.now) == [], "an earlier process"
    job.dies(1)
    assert job.host.coordinator.restarts == 1


def test_what_cannot_be_started_ends_the_job_or_costs_a_restart() -> None:
    job = Job.__new__(Job)
    for kind, ends in (("resources", True), ("program", True), ("died", False)):
        job = running()
        job.silent.add("start")
        job.dies(1)
        (start,) = job.starts
        job.take(job.host.process_not_started(1, start.incarnation, "no", job.now, kind=kind))  # type: ignore[arg-type]
        job.tick(1.0)
        assert bool(job.ends) == (kind == "resources"), "a program that could be loaded once can be again"
        first = Job.__new__(Job)
        first.__dict__.update(host=JobHost(plan_of(1), job.host._options, InTurn(1)), now=1.0, others=[])
        first.silent, first.calls, first.starts, first.saves = {"start"}, [], [], []
        first.take(first.host.start(1.0))
        first.take(first.host.process_not_started(0, 1, "no", 1.0, kind=kind))  # type: ignore[arg-type]
        first.tick(1.0)
        assert bool(first.ends) == ends


def test_a_worker_that_refuses_ends_the_job_with_its_reason() -> None:
    job = running()
    job.silent.add("Trigger")
    job.tick(1.5)
    call = job.calls[0]
    job.take(job.host.refused(call.worker, call.incarnation, call.number, Refused(ValueError("no")), job.now))
    job.tick(1.0)
    assert job.ends == [JobEnd("FAILED", "no")]


def test_a_status_says_that_a_job_has_ended_only_when_its_carrier_has_ended_it() -> None:
    """A host that died in between would have to continue the job's end, and drivers would have seen the end."""
    job = running()
    job.take(job.host.cancel(job.now))
    assert job.ends == [JobEnd("CANCELLED")]
    assert job.host.build_status([], {}, job.now, job.now)["state"] == "RUNNING"


def test_a_status_never_has_the_state_before_a_restart_and_the_number_of_restarts_after_it() -> None:
    """The two used to be read one after the other, so a program that waited for a restarted job that runs could go on
    before the job had noticed the death."""
    job = running()
    before = job.host.build_status([], {}, job.now, job.now)
    assert (before["state"], before["epochs"]["restarts"]) == ("RUNNING", 0)
    job.silent.add("start")
    job.take(job.host.process_died(0, 1, KILLED, job.now))
    after = job.host.build_status([], {}, job.now, job.now)
    assert (after["state"], after["epochs"]["restarts"]) == ("RECOVERING", 1)


# --- relays -----------------------------------------------------------------------------------------------------------


def with_relays() -> tuple[Job, list[int]]:
    """A job on two machines with a relay on each, and the numbers of the relays."""
    flow = Flow("to_all")
    read = flow.read(Memory([1]), parallelism=2)
    read.broadcast().map(lambda record: record, parallelism=2).write(Null(), parallelism=2)
    job = Job(plan=flow.plan(2))
    started = [command.number for command in job.others if isinstance(command, StartRelay)]
    assert len(started) == 2
    job.others.clear()
    for number in started:
        relay_gets_ready(job, number)
    assert all(told.addresses == {number: f"at {number}" for number in started} for told in job.maps.values())
    assert job.maps[0].of_worker == job.maps[1].of_worker == dict(enumerate(started))
    return job, started


def relay_gets_ready(job: Job, number: int) -> None:
    job.relays_hear(lambda relays, now: relays.relay_ready(number, {"pid": number, "address": f"at {number}"}, now))
    relays_obey(job)


def relays_obey(job: Job) -> list[TellRelay]:
    """The relays do all that they are told. Returns what they were told."""
    told: list[TellRelay] = []
    while tells := [command for command in job.others if isinstance(command, TellRelay)]:
        job.others = [command for command in job.others if not isinstance(command, TellRelay)]
        told += tells
        for tell in tells:
            job.relays_hear(lambda relays, now, tell=tell: relays.relay_knows(tell.number, now))  # type: ignore[misc]
    return told


class NoRelays:
    """Starts no relay."""

    def node_name(self, node_id: str) -> str:
        return f"host-1 ({node_id})"

    def start_relay(self, number: int, node_id: str, deadline: float) -> RelayHandle:
        raise OSError("no room")


def test_the_message_of_a_lost_relay_names_its_node_as_that_of_a_lost_worker_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job, (first, _) = with_relays()
    events: SimpleQueue[Callable[[JobHost], list[HostCommand]]] = SimpleQueue()
    runner = RelayRunner(NoRelays(), events.put, 10.0, 10.0)
    runner.carry_out(StartRelay(first, "28a2fe3f"))
    job.take(events.get(timeout=60.0)(job.host))
    runner.close()
    assert "job to_all: a relay of node host-1 (28a2fe3f) is lost: it could not be started: no room" in caplog.text


def test_relays_start_with_a_job_and_are_replaced_when_they_die() -> None:
    job, (first, second) = with_relays()
    job.relays_hear(lambda relays, now: relays.relay_died(first, "left", "it was killed", now))
    assert job.maps[0].of_worker == job.maps[1].of_worker == {1: second}
    due = job.host.due()
    assert due is not None
    job.tick(due - job.now)
    (start,) = [command for command in job.others if isinstance(command, StartRelay)]
    assert start.number not in (first, second)
    relay_gets_ready(job, start.number)
    assert job.maps[0].of_worker == job.maps[1].of_worker == {0: start.number, 1: second}
    assert [relay.state for relay in job.host.build_status([], {}, 0.0, job.now).relays] == ["ready", "ready"]


def test_the_next_process_of_a_worker_is_served_when_its_tasks_are_connected() -> None:
    job, (first, second) = with_relays()
    job.silent = {"start"}
    job.dies(1)
    job.tick(10.0)
    assert all(1 not in tell.workers for tell in relays_obey(job))
    assert 1 not in job.maps[0].of_worker
    del job.maps[1]
    job.start()
    job.tick(1.0)
    assert [tell.workers[1] for tell in relays_obey(job) if 1 in tell.workers] == [("1/2", 2)] * 2
    assert job.maps[0].of_worker == job.maps[1].of_worker == {0: first, 1: second}


def test_a_job_without_an_exchange_to_all_has_no_relays() -> None:
    job = Job(plan=plan_of(2))
    assert job.host.life.state == "RUNNING"
    assert not any(isinstance(command, StartRelay) for command in job.others)
    assert job.host.build_status([], {}, 0.0, job.now).relays == []


@pytest.mark.parametrize("mixes", [False, True])
def test_a_rescale_after_which_records_of_several_tasks_meet_before_watermarks_is_warned_of(
    mixes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def same(number: int) -> int:
        return number

    flow = Flow("job", parallelism=4)
    source = flow.read(Memory(range(8)), name="source")
    read = source.map_async(same, name="same") if mixes else source.map(abs, name="same")
    read.watermark(lambda n: n, name="watermark").write(Null(), name="last")
    job = Job(plan=flow.plan(2))
    job.asks(lambda requests, _: requests.rescale(1, "source", 2))
    said = "records of several tasks or splits meet before they get watermarks: before 'watermark'"
    assert (said in caplog.text) == mixes
    assert ("after rescale('source', 2)" in caplog.text) == mixes


def stopping() -> Job:
    """A job that a driver has asked to stop with a savepoint, and whose tasks have stopped."""
    job = running()
    job.asks(lambda requests, _: requests.stop_with_savepoint(1, "place"))
    job.acknowledge(1, parked=True)
    assert job.saves[0].manifest.extra["stop"] == "place"
    return job


def test_no_barrier_of_a_stop_begins_before_all_workers_know_which_tasks_stop_after_it() -> None:
    job = running()
    job.silent = {"Park", "Trigger"}
    job.asks(lambda requests, _: requests.stop_with_savepoint(1, "place"))
    assert [name_of(call) for call in job.calls] == ["Park", "Park"]
    job.answer(job.calls.pop())
    assert [name_of(call) for call in job.calls] == ["Park"]
    job.answer(job.calls.pop())
    assert [call.command.epoch for call in job.calls if isinstance(call.command, Trigger)] == [1, 1]


def test_a_stop_is_decided_when_its_epoch_is_complete_and_ends_when_its_savepoint_is_written() -> None:
    job = stopping()
    job.saved()
    assert job.host.life.state == "STOPPING"
    copy = next(command for command in job.others if isinstance(command, CopySavepointAndStop))
    assert copy.place == "place"
    assert job.host.due() is None, "no epoch follows"
    job.hears(lambda coordinator, _: coordinator.copied(copy.generation))
    for worker in (0, 1):
        job.take(job.host.run_ended(worker, 1, None, None, job.now))
    assert job.ends == [JobEnd("FINISHED")]
    assert Reply(1) in job.others
    assert job.host.requests.has_stopped_with("place")


def test_after_a_death_all_tasks_are_built_again_and_none_runs_before_the_job_has_stopped() -> None:
    job = stopping()
    job.saved()
    copy = next(command for command in job.others if isinstance(command, CopySavepointAndStop))
    job.others.clear()
    connected: list[Call] = []
    job.silent.add("ConnectTasks")
    job.dies(1)
    job.tick(1.0)
    connected += job.calls
    again = next(command for command in job.others if isinstance(command, CopySavepointAndStop))
    assert not connected, "a task would emit what the savepoint does not have"
    earlier = job.host.of_coordinator(lambda coordinator, _: coordinator.copied(copy.generation), job.now)
    assert earlier == [], "the answer to an earlier command"
    job.hears(lambda coordinator, _: coordinator.copied(again.generation))
    assert job.host.coordinator.state == "ENDED"


def test_whoever_continues_from_the_epoch_of_a_stop_ends_the_job_there() -> None:
    """The host has died after the epoch was complete: the next one must not let the sources read on."""
    job = stopping()
    manifest = job.saves[0].manifest
    after = Job.__new__(Job)
    options = replace(job.host._options)
    host = JobHost(plan_of(2), options, InTurn(2), Found(manifest, None, 1), earlier=100)
    after.__dict__.update(
        host=host, now=1.0, others=[], silent={"ConnectTasks"}, calls=[], starts=[], saves=[], maps={}
    )
    after.take(host.start(1.0))
    copy = next(command for command in after.others if isinstance(command, CopySavepointAndStop))
    assert copy.place == "place"
    assert not after.calls, "no task runs"
    after.asks(lambda requests, _: requests.stop_with_savepoint(7, "place"))
    after.hears(lambda coordinator, _: coordinator.copied(copy.generation))
    for worker in (0, 1):
        after.take(host.run_ended(worker, host.lives.incarnation(worker), None, None, after.now))
    assert Reply(7) in after.others, "the driver that asks again hears that it is done"


def test_a_savepoint_that_cannot_be_written_lets_the_job_go_on() -> None:
    job = stopping()
    job.saved()
    copy = next(command for command in job.others if isinstance(command, CopySavepointAndStop))
    job.silent.add("Unpark")
    error = OSError("the place takes nothing")
    job.asks(lambda requests, now: requests.not_copied(copy.generation, error, now))
    assert [name_of(call) for call in job.calls] == ["Unpark", "Unpark"]
    assert Reply(1, error) in job.others
    assert job.host.life.state == "RUNNING"
    job.tick(1.5)
    job.acknowledge(2)
    job.saved()
    assert job.host.coordinator.epoch == 2


def test_a_death_before_its_epoch_is_complete_lets_the_stop_be_tried_again() -> None:
    job = running()
    job.asks(lambda requests, _: requests.stop_with_savepoint(1, "place"))
    job.dies(0)
    job.tick(1.5)
    job.tick(1.5)
    epoch = job.host.coordinator.begun
    job.acknowledge(epoch, parked=True)
    assert job.saves[-1].manifest.extra["stop"] == "place"
    assert epoch > 1


def test_a_job_that_ends_by_itself_during_a_stop_tries_its_last_epoch_again() -> None:
    job = running()
    job.asks(lambda requests, _: requests.stop_with_savepoint(1, "place"))
    job.acknowledge(5, finished=True)
    last = job.saves.pop(0).manifest
    assert last.final
    job.hears(lambda coordinator, _: coordinator.not_saved(last.epoch, "the store takes nothing"))
    job.tick(1.5)
    assert job.saves[0].manifest.final
    job.saved()
    for worker in (0, 1):
        job.take(job.host.run_ended(worker, 1, None, None, job.now))
    (reply,) = [command for command in job.others if isinstance(command, Reply)]
    assert "has ended: finished" in str(reply.error)
