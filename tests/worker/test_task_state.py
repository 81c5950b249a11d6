"""The states of a task: what it is told in one that excludes it is refused, and what is late is passed over."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from penstock.runtime.lifecycle import InvalidTransition
from penstock.runtime.operators.micro_batch import Bridge, DivertRequest, MicroBatchResult
from penstock.runtime.program.flow import Flow
from penstock.runtime.sinks.call import Null
from penstock.runtime.sources.memory import Memory
from penstock.runtime.transport.memory import MemoryNetwork
from penstock.runtime.worker.task import Snapshot, Task
from penstock.runtime.worker.wiring import build

DIVERT = DivertRequest(0, 1, 0.0, False, 10)


class Silent(Bridge):
    """A bridge that answers when a test does."""

    def __init__(self) -> None:
        self.given: list[Future[MicroBatchResult]] = []

    def submit(self, chain: int, position: int, input_: Any) -> Future[MicroBatchResult]:
        self.given.append(Future())
        return self.given[-1]


def made(records: int = 3, saved: Callable[[Snapshot], None] = lambda snapshot: None) -> Task:
    """A task that reads, maps and writes, with its operators not open yet."""
    flow = Flow("f")
    flow.read(Memory(range(records))).map(str).write(Null())
    plan = flow.plan(1)
    placed = {task.number: 0 for task in plan.tasks}
    transport = MemoryNetwork(1).transport(0)
    wiring = build(
        plan, placed, 0, transport, clock=lambda: 0, report=lambda reported: None, on_snapshot=saved, wall=lambda: 0.0
    )
    (task,) = wiring.tasks.values()
    assert task.input.is_read
    return task


def stepped(task: Task) -> Task:
    """The task after a step."""
    assert task.runnable()
    task.step()
    return task


def opened(records: int = 3, saved: Callable[[Snapshot], None] = lambda snapshot: None) -> Task:
    task = made(records, saved)
    task.open()
    return task


def divert(task: Task, bridge: Bridge) -> None:
    task.divert(DIVERT, bridge, lambda: None)


def test_a_task_runs_from_its_first_step_to_its_end() -> None:
    ends: list[bool] = []
    task = made(saved=lambda snapshot: ends.append(snapshot.finished))
    states = [task.state]
    assert not task.opened
    assert not task.runnable()
    task.open()
    assert task.opened
    while not task.finished:
        states.append(task.state)
        stepped(task)
    assert [*dict.fromkeys(states), task.state] == ["MADE", "READY", "RUNNING", "ENDING", "FINISHED"]
    assert ends == [True]
    assert not task.runnable()
    task.close(False)
    assert task.finished, "what has finished stays so when it is closed"


def test_a_task_continues_from_an_epoch_only_before_its_first_step() -> None:
    with pytest.raises(InvalidTransition, match="'restore' came in state MADE, where only 'open', 'close' can come"):
        made().restore(1, {}, finished=False, whole_next=True)
    task = opened()
    task.restore(1, {}, finished=False, whole_next=True)
    stepped(task)
    with pytest.raises(InvalidTransition, match="'restore' came in state RUNNING"):
        task.restore(1, {}, finished=False, whole_next=True)


def test_records_are_taken_one_by_one_from_the_first_on() -> None:
    task = stepped(opened())
    with pytest.raises(InvalidTransition, match="'take records one by one' came in state RUNNING"):
        task.run_record_by_record(None)  # type: ignore[arg-type]
    assert task.passage.record_by_record is None
    ended = opened()
    ended.restore(1, {}, finished=True, whole_next=True)
    ended.run_record_by_record(None)  # type: ignore[arg-type]
    assert ended.state == "ENDING"


def test_a_task_that_had_ended_reads_nothing_and_says_so_again() -> None:
    told: list[Snapshot] = []
    task = opened(saved=told.append)
    task.restore(7, {}, finished=True, whole_next=True)
    task.trigger(8)
    while not task.finished:
        stepped(task)
    assert [(snapshot.epoch, snapshot.finished) for snapshot in told] == [(8, True)]
    assert task.stages[0].records_in == 0


def test_a_task_is_opened_and_removed_once() -> None:
    task = opened()
    with pytest.raises(InvalidTransition, match="'open' came in state READY"):
        task.open()
    task.close(True)
    assert task.state == "CLOSED"
    assert not task.runnable()
    with pytest.raises(InvalidTransition, match="'close' came in state CLOSED"):
        task.close(True)


def test_a_task_stops_after_the_barrier_at_which_it_is_to_migrate() -> None:
    told: list[Snapshot] = []
    task = opened(1000, told.append)
    task.park(2)
    for epoch in (1, 2):
        task.trigger(epoch)
        while not (told and told[-1].epoch == epoch):
            stepped(task)
    assert [(snapshot.epoch, snapshot.parked) for snapshot in told] == [(1, False), (2, True)]
    assert task.state == "PARKED"
    assert not task.runnable()
    divert(task, Silent())
    assert (task.state, task.told_to_divert()) == ("PARKED", None), "a task that is to move is not diverted"
    task.unpark()
    assert task.state == "RUNNING"
    assert task.runnable()


def test_a_request_to_stop_is_taken_back_before_its_barrier() -> None:
    told: list[Snapshot] = []
    task = opened(1000, told.append)
    task.park(1)
    task.unpark()
    task.trigger(1)
    while not told:
        stepped(task)
    assert not told[0].parked


def test_a_task_comes_back_from_spark_when_all_is_answered() -> None:
    bridge = Silent()
    task = opened(25)
    divert(task, bridge)
    assert task.state == "DIVERTED"
    stepped(task)
    assert bridge.given
    task.undivert()
    assert (task.state, task.told_to_divert()) == ("RETURNING", None)
    divert(task, bridge)
    assert task.state == "RETURNING", "the answers on their way belong to the range before"
    while task.runnable():
        stepped(task)
    assert task.state == "RETURNING"
    for answer in bridge.given:
        answer.set_result(MicroBatchResult([["0", "1"]]))
    while task.state == "RETURNING":
        stepped(task)
    assert task.state == "RUNNING"
    assert task.diversion is None


def test_a_task_without_input_is_not_diverted_and_not_parked() -> None:
    task = opened(0)
    while not task.finished:
        divert(task, Silent())
        stepped(task)
    task.park(1)
    task.undivert()
    assert (task.told_to_divert(), task.park_at) == (None, None)
