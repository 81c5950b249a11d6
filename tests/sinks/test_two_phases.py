"""The two phases of one task of a sink: nothing is forgotten before it is committed, and nothing waits in the loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from penstock.runtime.epochs.snapshot import begin_snapshot, encode_snapshot
from penstock.runtime.errors import PenstockError
from penstock.runtime.patience import Patience
from penstock.runtime.sinks.base import Committable, Sink, SinkCommitter, SinkContext, SinkWriter
from penstock.runtime.sinks.beside import BesideThread, Closed, InLine
from penstock.runtime.sinks.two_phases import SavedSink, TwoPhases, commit_saved
from penstock.runtime.state.keyed import StageState

LIMIT_S = 10.0


class Outside(Sink):
    """What stays of its records, and how its methods were called."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.committed: list[list[tuple[int, Any]]] = []
        self.failures: list[Exception] = []
        self.answer: Callable[[int, list[Any]], Any] = lambda epoch, records: records or None

    def writer(self, context: SinkContext) -> SinkWriter:
        self.calls.append("writer")
        return Writer(self)

    def committer(self, context: SinkContext) -> SinkCommitter:
        self.calls.append("committer")
        return Committer(self)


class Writer(SinkWriter):
    def __init__(self, sink: Outside) -> None:
        self.sink = sink
        self.records: list[Any] = []

    def write(self, records: list[Any]) -> None:
        self.records += records

    def prepare(self, epoch: int) -> Any:
        records, self.records = self.records, []
        return self.sink.answer(epoch, records)

    def committed(self, epoch: int) -> None:
        self.sink.calls.append(("committed", epoch))

    def restore(self, epoch: int, states: list[Any]) -> None:
        self.sink.calls.append(("restore", epoch, states))

    def close(self, failed: bool) -> None:
        self.sink.calls.append("close writer")


class Committer(SinkCommitter):
    def __init__(self, sink: Outside) -> None:
        self.sink = sink

    def commit(self, committables: list[Committable]) -> None:
        if self.sink.failures:
            raise self.sink.failures.pop()
        self.sink.committed.append([(one.epoch, one.data) for one in committables])

    def close(self) -> None:
        self.sink.calls.append("close committer")


class Loop:
    """The loop's thread of the test: what others have it do, and what it does when it is told to."""

    def __init__(self) -> None:
        self.asked: list[Callable[[], None]] = []
        self.more = threading.Semaphore(0)

    def on_loop(self, function: Callable[[], None]) -> None:
        self.asked.append(function)
        self.more.release()

    def turn(self) -> None:
        assert self.more.acquire(timeout=LIMIT_S)
        self.asked.pop(0)()


def prepared(phases: TwoPhases, epoch: int) -> Any:
    return phases.prepare(epoch, lambda step: step())


def data(saved: SavedSink) -> list[tuple[int, Any]]:
    return [(one.epoch, one.data) for one in saved.committables]


def test_what_is_prepared_is_saved_with_every_epoch_until_it_is_committed() -> None:
    sink = Outside()
    phases = TwoPhases(sink, SinkContext("out", 3, 4))
    phases.writer.write(["a"])
    assert prepared(phases, 1) == SavedSink(None, [Committable(1, 3, ["a"])])
    phases.writer.write(["b"])
    assert data(prepared(phases, 2)) == [(1, ["a"]), (2, ["b"])]
    assert phases.complete(1).done()
    assert data(prepared(phases, 3)) == [(2, ["b"])]
    phases.complete(3)  # 2 was passed over
    assert prepared(phases, 4) is None
    assert sink.committed == [[(1, ["a"])], [(2, ["b"])]]
    assert [call for call in sink.calls if call[0] == "committed"] == [("committed", 1), ("committed", 3)]


def test_an_epoch_waits_for_an_answer_and_the_next_one_too() -> None:
    sink, answers = Outside(), {1: Future[Any](), 2: Future[Any]()}
    sink.answer = lambda epoch, records: answers[epoch]
    loop = Loop()
    phases = TwoPhases(sink, SinkContext("out", 0, 1, on_loop=loop.on_loop))
    first, second = prepared(phases, 1), prepared(phases, 2)
    order: list[int] = []
    first.add_done_callback(lambda _: order.append(1))
    second.add_done_callback(lambda _: order.append(2))
    answers[2].set_result("b")
    assert not loop.asked
    answers[1].set_result("a")
    loop.turn()
    loop.turn()
    assert data(first.result(0)) == [(1, "a")]
    assert data(second.result(0)) == [(1, "a"), (2, "b")]
    assert order == [1, 2]  # snapshots of a task are written in order


def test_a_failed_answer_fails_in_the_loop() -> None:
    sink: Outside = Outside()
    answer: Future[Any] = Future()
    sink.answer = lambda epoch, records: answer
    loop = Loop()
    phases = TwoPhases(sink, SinkContext("out", 0, 1, on_loop=loop.on_loop))
    prepared(phases, 1)
    answer.set_exception(PenstockError("the server says no"))
    with pytest.raises(PenstockError, match="the server says no"):
        loop.turn()


def test_commits_are_made_beside_the_loop_one_at_a_time_for_all_that_is_complete() -> None:
    sink, loop = Outside(), Loop()
    goes_on, is_there = threading.Event(), threading.Event()
    context = SinkContext("out", 0, 1, steps=BesideThread("test-commits"), on_loop=loop.on_loop)
    phases = TwoPhases(sink, context)
    blocked = context.beside("waiting", lambda: (is_there.set(), goes_on.wait(LIMIT_S)))
    assert is_there.wait(LIMIT_S)
    for epoch in (1, 2, 3):
        phases.writer.write([epoch])
        prepared(phases, epoch)
        assert not (settled := phases.complete(epoch)).done()
    assert not sink.committed
    goes_on.set()
    blocked.result(LIMIT_S)
    loop.turn()
    assert not settled.done()
    loop.turn()
    assert settled.done()
    assert sink.committed == [[(1, [1])], [(2, [2]), (3, [3])]]
    assert phases.close(failed=False).result(LIMIT_S) is None
    assert sink.calls[-2:] == ["close writer", "close committer"]


def test_a_commit_is_tried_again_and_its_last_error_fails_in_the_loop() -> None:
    sink = Outside()
    sink.failures = [ConnectionResetError("it restarts")] * 2
    context = SinkContext("out", 0, 1, patience=Patience(LIMIT_S))
    phases = TwoPhases(sink, context)
    phases.writer.write(["a"])
    prepared(phases, 1)
    phases.complete(1)
    assert sink.committed == [[(1, ["a"])]]
    sink.failures = [PenstockError("the transaction is lost")]
    phases.writer.write(["b"])
    prepared(phases, 2)
    with pytest.raises(PenstockError, match="the transaction is lost"):
        phases.complete(2)


def test_nothing_is_committed_before_the_interval_has_passed_unless_it_is_the_last() -> None:
    sink, now = Outside(), 0.0
    sink.commit_interval_s = 10.0
    phases = TwoPhases(sink, SinkContext("out", 0, 1), clock=lambda: now)
    for epoch in (1, 2, 3):
        phases.writer.write([epoch])
        prepared(phases, epoch)
        now += 5.0
        assert phases.complete(epoch).done()
    assert sink.committed == [[(1, [1]), (2, [2])]]
    assert [call for call in sink.calls if call[0] == "committed"] == [("committed", 2)]
    phases.complete(3, last=True)
    assert sink.committed[1:] == [[(3, [3])]]


def test_nothing_begins_after_the_end_and_a_late_answer_is_nobodys() -> None:
    sink, loop = Outside(), Loop()
    steps = BesideThread("test-closed")
    context = SinkContext("out", 0, 1, steps=steps, on_loop=loop.on_loop)
    phases = TwoPhases(sink, context)
    goes_on = threading.Event()
    context.beside("waiting", lambda: goes_on.wait(LIMIT_S))
    phases.writer.write(["a"])
    prepared(phases, 1)
    phases.complete(1)
    closed = phases.close(failed=True)
    assert not closed.done()
    goes_on.set()
    closed.result(LIMIT_S)
    loop.turn()
    assert not sink.committed
    with pytest.raises(Closed):
        steps.do(lambda: None).result(0)
    closed_too = InLine()
    closed_too.close()
    with pytest.raises(Closed):
        closed_too.do(lambda: None).result(0)


def test_what_several_tasks_have_prepared_is_committed_at_once_and_before_any_writer_is_made() -> None:
    sink = Outside()
    saved = [SavedSink(None, [Committable(5, 0, "a"), Committable(7, 0, "c")]), SavedSink(1, [Committable(6, 9, "b")])]
    commit_saved(sink, SinkContext("out", 0, 1), saved)
    commit_saved(sink, SinkContext("out", 0, 1), [SavedSink(2, [])])
    assert sink.committed == [[(5, "a"), (6, "b"), (7, "c")]]
    assert sink.calls == ["committer", "close committer"]
    phases = TwoPhases(sink, SinkContext("out", 0, 1, restoring=True))
    phases.restore(7, saved)
    assert sink.calls[2:] == ["writer", ("restore", 7, [1])]


def test_a_cancelled_job_commits_what_is_complete() -> None:
    sink = Outside()
    sink.commit_interval_s = 1e9
    phases = TwoPhases(sink, SinkContext("out", 0, 1))
    for epoch in (1, 2):
        phases.writer.write([epoch])
        prepared(phases, epoch)
    phases.cancel(1)
    assert sink.committed == [[(1, [1])]]


def test_a_sink_without_a_committer_prepares_nothing() -> None:
    sink = Outside()
    sink.committer = lambda context: None  # type: ignore[method-assign, assignment, return-value]
    phases = TwoPhases(sink, SinkContext("out", 0, 1))
    phases.writer.write(["a"])
    prepared(phases, 1)
    with pytest.raises(PenstockError, match=r"Outside: a writer's prepare\(\) has returned something"):
        phases.complete(1)


def test_a_writer_that_commits_by_itself_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Old\.commit: a writer only prepares"):
        type("Old", (SinkWriter,), {"commit": lambda self, epoch: None})


def test_a_snapshot_is_encoded_at_the_barrier_and_ends_with_the_answer() -> None:
    later: Future[Any] = Future()
    rest = begin_snapshot({"out": (StageState(own=later), (1, 2, 3, 4)), "map": (None, (5, 6, 7, 8))}, 4)
    later.set_result(SavedSink("state", [Committable(1, 0, b"data")]))
    whole = {"out": (StageState(own=later.result()), (1, 2, 3, 4)), "map": (None, (5, 6, 7, 8))}
    assert b"".join(rest()) == b"".join(encode_snapshot(whole, 4))  # type: ignore[arg-type]
