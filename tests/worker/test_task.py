"""Tasks: bounded steps, back-pressure, and stages opened and closed whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from penstock.runtime.errors import RecordError
from penstock.runtime.operators.process import ProcessContext, ProcessFunction
from penstock.runtime.program.flow import Flow, Stream
from penstock.runtime.sinks.base import Sink, SinkContext, SinkWriter
from penstock.runtime.sinks.call import Call, Null
from penstock.runtime.sources.base import Reader, Source, SourceContext, Split
from penstock.runtime.sources.memory import Memory
from penstock.runtime.sources.threaded import ThreadReader
from penstock.runtime.transport.memory import MemoryNetwork
from penstock.runtime.worker import task as task_module
from penstock.runtime.worker.run_loop import RunLoop
from penstock.runtime.worker.task import Task
from penstock.runtime.worker.wiring import build


def loop_of(flow: Flow, window: int = 1 << 18) -> RunLoop:
    """All tasks of a flow in one worker, with a clock that stands still."""
    transport = MemoryNetwork(1).transport(0)
    plan = flow.plan(1)
    wiring = build(
        plan,
        {task.number: 0 for task in plan.tasks},
        0,
        transport,
        clock=lambda: 0,
        report=lambda reported: None,
        credit_window=window,
    )
    return RunLoop(wiring, transport, lambda: 0)


def tasks_of(build_stream: Callable[[Stream], Any], records: Iterable[Any], **options: Any) -> list[Task]:
    """A flow of separate tasks, opened."""
    flow = Flow("f", chaining=False)
    build_stream(flow.read(Memory(records)))
    tasks = loop_of(flow, **options).tasks
    for task in tasks:
        task.open()
    return tasks


def through(tasks: list[Task]) -> None:
    """Step everybody until all have finished."""
    while not all(task.finished for task in tasks):
        ran = [task.step() for task in tasks if task.runnable()]
        assert ran, "no task can continue"


def test_a_task_that_cannot_send_is_not_run_until_it_can() -> None:
    read, write = tasks_of(lambda s: s.write(Null()), range(1000), window=1)
    while read.runnable():
        read.step()
    assert read.blocked
    assert write.input.queued <= 64, "the first step's records, which used up the window"
    assert sum(log.unsent(channel) for log in read.logs for channel in log.channels) <= 128, "what the second step made"
    write.step()
    assert read.runnable(), "what was taken up made room"
    through([read, write])
    assert write.stages[0].records_in == 1000


def test_steps_get_shorter_when_records_are_slow_and_longer_when_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    cost = 1_000_000  # ns a record

    def stopwatch() -> int:
        return now

    seen: list[int] = []

    def work(batch: list[int]) -> list[int]:
        nonlocal now
        seen.append(len(batch))
        now += cost * len(batch)
        return batch

    monkeypatch.setattr(task_module, "perf_counter_ns", stopwatch)
    read, mapped, write = tasks_of(
        lambda s: s.map_batches(work, batch_size=10**6).write(Null()), range(3000), window=1 << 30
    )
    mapped.stages[0]._fn = work  # type: ignore[attr-defined]  # itself, not a copy that travelled
    while not read.finished:
        read.step()
    while mapped.input.queued > 2000:
        mapped.step()
    assert seen[-1] * cost <= 2 * task_module.STEP_NS
    cost = 100
    through([mapped, write])
    assert max(seen) >= 512
    assert sum(seen) == 3000


def test_an_expansion_stops_at_the_credit_window_and_continues_later() -> None:
    read, spread, write = tasks_of(lambda s: s.flat_map(range).write(Null()), [100_000], window=1000)
    read.step()
    while spread.runnable():
        spread.step()
    assert spread.blocked
    assert spread.stages[0].records_out < 20_000
    assert not spread.finished
    through([read, spread, write])
    assert write.stages[0].records_in == 100_000


def test_an_input_cannot_end_twice() -> None:
    _, write = tasks_of(lambda s: s.write(Null()), [])
    (channel,) = write.input.channels
    write.input.receive_end(channel)
    with pytest.raises(AssertionError, match="ended twice"):
        write.input.receive_end(channel)


# --- open, flush, finish, close -----------------------------------------------------------------------------------

calls: list[str] = []


class Logged(Sink):
    def __init__(self, name: str = "sink", fail_at: str = "") -> None:
        self.name = name
        self.fail_at = fail_at

    def writer(self, context: SinkContext) -> SinkWriter:
        return _LoggedWriter(self)


class _LoggedWriter(SinkWriter):
    def __init__(self, sink: Logged) -> None:
        self._sink = sink

    def _call(self, what: str) -> None:
        calls.append(f"{self._sink.name}.{what}")
        if self._sink.fail_at == what:
            raise OSError(f"cannot {what}")

    def write(self, records: list[Any]) -> None:
        self._call("write")

    def flush(self) -> None:
        self._call("flush")

    def finish(self) -> None:
        self._call("finish")

    def close(self, failed: bool) -> None:
        self._call("close failed" if failed else "close")


class Loud(ProcessFunction):
    def __init__(self, fail_at: str = "") -> None:
        self.fail_at = fail_at

    def _call(self, what: str) -> None:
        calls.append(f"process.{what}")
        if self.fail_at == what:
            raise OSError(f"cannot {what}")

    def open(self, ctx: ProcessContext) -> None:
        self._call("open")

    def process(self, ctx: ProcessContext, key: Any, record: Any) -> list[Any]:
        return [record]

    def close(self) -> None:
        self._call("close")


class Broken(Source):
    """Readers that fail when they are read."""

    def splits(self, parallelism: int) -> list[Split]:
        return [Split("one")]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        return _BrokenReader()


class _BrokenReader(Reader):
    def read(self, limit: int) -> list[Any]:
        raise OSError("gone")

    def offsets(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        calls.append("reader.close")


@pytest.fixture(autouse=True)
def no_calls() -> None:
    calls.clear()
    come.clear()


def logged_flow(source: Source | None = None, process: str = "", sink: str = "") -> Flow:
    flow = Flow("f")
    stream = flow.read(source or Memory([1, 2]))
    stream.key_by(str).process(Loud(process), name="loud").write(Logged(fail_at=sink), name="logged")
    return flow


def test_stages_are_opened_finished_and_closed_once() -> None:
    loop_of(logged_flow()).run()
    assert [call for call in calls if call != "sink.flush"] == [
        "process.open",
        "sink.write",
        "sink.finish",
        "process.close",
        "sink.close",
    ]


def test_an_error_while_opening_names_the_operator_and_finishes_nothing() -> None:
    with pytest.raises(RecordError, match="operator 'loud' failed: OSError: cannot open"):
        loop_of(logged_flow(process="open")).run()
    assert "sink.finish" not in calls


def test_a_stage_that_cannot_be_closed_does_not_keep_others_open() -> None:
    with pytest.raises(RecordError, match="operator 'loud' failed: OSError: cannot close"):
        loop_of(logged_flow(process="close")).run()
    assert calls[-1].startswith("sink.close")


@pytest.mark.parametrize("what", ["write", "finish"])
def test_an_error_of_a_sink_names_the_operator_and_closes_as_failed(what: str) -> None:
    with pytest.raises(RecordError, match=f"operator 'logged' failed: OSError: cannot {what}"):
        loop_of(logged_flow(sink=what)).run()
    assert calls[-1] == "sink.close failed"
    assert "process.close" in calls


def test_a_reader_that_fails_names_the_source_and_is_closed() -> None:
    with pytest.raises(RecordError, match="operator 'read' failed: OSError: gone"):
        loop_of(logged_flow(Broken())).run()
    assert "reader.close" in calls
    assert "sink.close failed" in calls


def test_a_reader_that_fails_may_be_skipped() -> None:
    flow = Flow("f")
    flow.read(Broken(), on_error="skip").write(Logged())
    loop = loop_of(flow)
    loop.run()
    assert loop.tasks[0].stages[0].errors.skipped == 1
    assert calls[-1] == "sink.close"


# --- readers that wait ---------------------------------------------------------------------------------------------


come = threading.Event()


def _let_come(record: str) -> None:
    come.set()


class _Waiting(Source):
    """Its first record comes when `come` is set."""

    def __init__(self, reader: type[_WaitingReader]) -> None:
        self.reader_class = reader

    def splits(self, parallelism: int) -> list[Split]:
        return [Split("one")]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        return self.reader_class(splits[0].offset or 0)


class _WaitingReader(Reader):
    def __init__(self, next: int) -> None:
        self.next = next

    def read(self, limit: int) -> list[Any]:
        assert come.wait(60)
        self.next += 1
        self.finished = self.next == 3
        calls.append(threading.current_thread().name)
        return [self.next]

    def offsets(self) -> dict[str, Any]:
        return {"one": self.next}

    def close(self) -> None:
        calls.append("reader.close")


class _BlockingReader(_WaitingReader):
    blocking = True


def test_a_blocking_reader_lets_the_other_tasks_of_its_worker_run() -> None:
    flow = Flow("f")
    flow.read(_Waiting(_BlockingReader), name="slow").write(Null(), name="out")
    flow.read(Memory(["x"]), name="quick").write(Call(_let_come), name="set")
    loop_of(flow).run()
    assert calls == ["slow reader"] * 3 + ["reader.close"]


def test_a_read_that_takes_long_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    flow = Flow("f")
    come.set()
    flow.read(_Waiting(_WaitingReader), name="slow").write(Null())
    (task,) = loop_of(flow).tasks
    times = iter(range(0, 10**12, 700_000_000))
    task.input.clock = lambda: next(times)
    task.open()
    while not task.finished:
        task.step()
    (record,) = caplog.records
    assert "read() of the _WaitingReader of source 'slow' took 0.7 s in task 0" in record.getMessage()


def threaded(reader: Reader) -> tuple[ThreadReader, threading.Semaphore]:
    """Runs a reader in a thread. The semaphore is released whenever its task is woken."""
    woken = threading.Semaphore(0)
    return ThreadReader(reader, lambda: woken.release(1), "test reader"), woken


def test_offsets_of_a_blocking_reader_are_those_of_what_was_handed_out() -> None:
    reader, woken = threaded(_BlockingReader(0))
    assert (reader.read(10), reader.offsets(), reader.ready_in()) == ([], {"one": 0}, None)
    come.set()
    for expected in (1, 2, 3):
        assert woken.acquire(timeout=60)
        assert (reader.offsets(), reader.ready_in(), reader.finished) == ({"one": expected - 1}, 0.0, False)
        assert (reader.read(10), reader.offsets()) == ([expected], {"one": expected})
    assert reader.finished
    reader.close()
    assert calls[-1] == "reader.close"


def test_what_a_blocking_reader_raises_is_raised_by_read() -> None:
    class Failing(_BrokenReader):
        blocking = True

        def close(self) -> None:
            raise OSError("close")

    reader, woken = threaded(Failing())
    assert woken.acquire(timeout=60)
    with pytest.raises(OSError, match="gone"):
        reader.read(1)
    with pytest.raises(OSError, match="close"):
        reader.close()


def test_a_blocking_reader_that_asks_to_be_woken_is_not_read_before() -> None:
    reads = threading.Semaphore(0)

    class Empty(_BlockingReader):
        def read(self, limit: int) -> list[Any]:
            reads.release()
            return super().read(limit) if come.is_set() else []

        def ready_in(self) -> float | None:
            return None

    reader, woken = threaded(Empty(0))
    assert reads.acquire(timeout=60)
    come.set()
    reader.wake_reader()
    assert woken.acquire(timeout=60)
    assert reader.read(1) == [1]
    reader.close()
