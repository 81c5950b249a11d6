"""The thread of a worker that writes snapshots: what it says in one call, and work that has to be done again."""

from __future__ import annotations

import queue

import pytest

from penstock.host.process import reporting
from penstock.host.process.reporting import SnapshotWriter
from penstock.runtime.epochs.participant import Declined, EpochReport

LIMIT_S = 60


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[list[EpochReport]]:
    monkeypatch.setattr(reporting, "_GATHER_S", 0.2)
    monkeypatch.setattr(reporting, "_RETRY_S", 0.01)
    return queue.Queue()


def said(task: int) -> Declined:
    return Declined(task, 1, 1, "why")


def test_what_the_tasks_of_a_worker_have_to_say_of_an_epoch_is_one_call(told: queue.Queue[list[EpochReport]]) -> None:
    writer = SnapshotWriter(told.put)
    for task in range(3):
        writer.do(lambda task=task: writer.say(said(task)) is None)  # type: ignore[misc]
    assert told.get(timeout=LIMIT_S) == [said(0), said(1), said(2)]
    writer.do(lambda: True)  # nothing to say
    writer.do(lambda: writer.say(said(3)) is None)
    assert told.get(timeout=LIMIT_S) == [said(3)]
    assert told.empty()


def test_work_that_must_be_done_again_says_so_and_holds_up_later_work(told: queue.Queue[list[EpochReport]]) -> None:
    writer = SnapshotWriter(told.put)
    tries: list[int] = []

    def third_time() -> bool:
        tries.append(1)
        writer.say(said(len(tries)))
        return len(tries) == 3

    writer.do(third_time)
    writer.do(lambda: writer.say(said(9)) is None)
    assert [told.get(timeout=LIMIT_S) for _ in range(3)] == [[said(1)], [said(2)], [said(3), said(9)]]
