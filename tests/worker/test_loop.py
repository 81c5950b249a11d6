"""The run loop: ends, stops, cancels, sleeps when there is nothing to do, and lets sinks write when they may."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.runtime.errors import RecordError
from penstock.runtime.exchange.channel import OutOfStep
from penstock.runtime.exchange.delivery import MessagesLost
from penstock.runtime.exchange.message import (
    ADDRESS_BYTES,
    BARRIER,
    DESTINATION_BYTES,
    FIRST,
    BadMessage,
    address,
    credit,
    signal,
)
from penstock.runtime.exchange.output_cache import OutputCaches
from penstock.runtime.program.flow import Flow
from penstock.runtime.sinks.base import Sink, SinkContext, SinkWriter
from penstock.runtime.sinks.call import Call, Null
from penstock.runtime.sinks.collect import Collect
from penstock.runtime.sources.base import Reader, Source, SourceContext, Split
from penstock.runtime.sources.memory import Memory
from penstock.runtime.transport.base import Buffer, Transport
from penstock.runtime.transport.memory import MemoryNetwork, MemoryTransport
from penstock.runtime.worker.run_loop import RunLoop
from penstock.runtime.worker.wiring import Wiring, WiringOptions, build

WATCHDOG_S = 60  # a test that takes so long hangs


class Scripted(Source):
    """Readers that a test drives: `read(limit)` of the test's own; endless unless it says otherwise."""

    bounded = False

    def __init__(self, script: str) -> None:
        self.script = script

    def splits(self, parallelism: int) -> list[Split]:
        return [Split("script")]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        return _ScriptedReader(scripts[self.script], context)


class _ScriptedReader(Reader):
    def __init__(self, script: Callable[[_ScriptedReader], list[Any]], context: SourceContext) -> None:
        self.context = context
        self.wait: float | None = None
        self.reads = 0
        self._script = script

    def read(self, limit: int) -> list[Any]:
        self.reads += 1
        return self._script(self)

    def offsets(self) -> dict[str, Any]:
        return {}

    def ready_in(self) -> float | None:
        return self.wait


scripts: dict[str, Callable[[_ScriptedReader], list[Any]]] = {}


class Held(Sink):
    """Holds back what it is given until it is flushed."""

    def writer(self, context: SinkContext) -> SinkWriter:
        return _HeldWriter(context)


class _HeldWriter(SinkWriter):
    def __init__(self, context: SinkContext) -> None:
        self._held: list[Any] = []
        self._context = context

    def write(self, records: list[Any]) -> None:
        self._held += records

    def flush(self) -> None:
        self._context.report("held", self._held)
        self._held = []


class Watched(MemoryTransport):
    """Tells for how long the loop wanted to wait; returns at once."""

    def __init__(self, network: MemoryNetwork, worker: int) -> None:
        super().__init__(network, worker)
        self.waits: list[float | None] = []
        self.on_wait: Callable[[], None] = lambda: None

    def receive(self, timeout: float | None) -> Sequence[tuple[int, Buffer]]:
        if timeout != 0:
            self.waits.append(timeout)
            self.on_wait()
        return super().receive(0)


def loop_of(
    flow: Flow,
    transport: Transport | None = None,
    placed: dict[int, int] | None = None,
    worker: int = 0,
    **options: Any,
) -> tuple[RunLoop, dict[str, list[Any]]]:
    transport = transport or MemoryNetwork(1).transport(0)
    plan = flow.plan(1)
    reports: dict[str, list[Any]] = {}
    wiring = build(
        plan,
        placed or {task.number: 0 for task in plan.tasks},
        worker,
        transport,
        clock=time.monotonic_ns,
        report=lambda reported: reports.setdefault(reported.channel, []).extend(reported.records),
        **options,
    )
    return RunLoop(wiring, transport, time.monotonic_ns), reports


def test_it_returns_when_all_tasks_have_finished() -> None:
    sink = Collect()
    flow = Flow("f")
    flow.read(Memory(range(100))).rebalance().map(str).write(sink)
    loop, reports = loop_of(flow)
    loop.run()
    assert reports[sink.channel] == [str(n) for n in range(100)]
    assert all(status["finished"] for status in loop.load())


def test_two_workers_in_two_threads() -> None:
    sink = Collect()
    flow = Flow("f", chaining=False)
    flow.read(Memory(range(3000))).flat_map(lambda n: [n] * 3).key_by(lambda n: n % 7).count(emit="final").write(sink)
    network = MemoryNetwork(2, 8192)
    tasks = len(flow.plan(1).tasks)
    placed = {task: task % 2 for task in range(tasks)}
    made = [loop_of(flow, network.transport(w), placed, w, credit_window=2000) for w in range(2)]
    threads = [threading.Thread(target=loop.run, daemon=True) for loop, _ in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WATCHDOG_S)
        assert not thread.is_alive(), "a worker hangs"
    counts = made[0][1].get(sink.channel, []) + made[1][1].get(sink.channel, [])
    assert dict(counts) == {k: 3 * len(range(k, 3000, 7)) for k in range(7)}


def test_stop_lets_through_what_was_read() -> None:
    flow = Flow("f", chaining=False)
    sink = Collect()
    flow.read(Scripted("until stopped")).write(sink)
    loop, reports = loop_of(flow)

    def script(reader: _ScriptedReader) -> list[Any]:
        if reader.reads == 5:
            loop.stop()
        reader.wait = 0.0
        return [reader.reads]

    scripts["until stopped"] = script
    # The reader holds the function by name, so that the flow can be pickled.
    loop.tasks[0].input.reader._script = script  # type: ignore[attr-defined]
    loop.run()
    assert reports[sink.channel] == [1, 2, 3, 4, 5]


def test_a_source_that_is_being_made_hears_of_a_stop() -> None:
    """The worker was told between the making of its tasks and their joining: the job read on for ever."""
    flow = Flow("f", chaining=False)
    flow.read(Memory(range(3))).write(Null())
    plan = flow.plan(1)
    numbers = {task.number for task in plan.tasks}
    transport = MemoryNetwork(1).transport(0)
    options = WiringOptions(time.monotonic_ns, lambda reported: None)
    wiring = Wiring(plan, dict.fromkeys(numbers, 0), 0, transport, options)
    loop = RunLoop(wiring, transport, time.monotonic_ns)
    loop.build_tasks(numbers, 1, 0, {number: ({}, False, True, None) for number in numbers})
    loop.stop()
    loop.connect_tasks(numbers, 1)
    assert [task.input.stopping for task in loop.tasks if task.input.is_read] == [True]


scripts["until stopped"] = scripts["quiet"] = scripts["busy"] = scripts["once"] = lambda reader: []


def test_a_task_that_has_come_to_rest_tells_of_its_next_record_once() -> None:
    """Epochs are rare while nothing moves: without this the first record after a pause would wait for its commit."""
    flow = Flow("f", chaining=False)
    flow.read(Scripted("once"), name="in").write(Null(), name="out")
    quiet: list[tuple[str, bool]] = []
    moved: list[tuple[str, int]] = []
    loop, _ = loop_of(
        flow,
        on_snapshot=lambda snapshot: quiet.append((loop.wiring.plan.task_name(snapshot.task), snapshot.quiet)),
        on_motion=lambda task, generation: moved.append((loop.wiring.plan.task_name(task), generation)),
    )
    reader: Any = loop.tasks[0].input.reader  # type: ignore[attr-defined]
    for task in loop.tasks:
        task.open()

    def run(epoch: int | None, *records: str) -> None:
        reader._script = lambda reader: [records[reader.reads - 1]] if reader.reads <= len(records) else []
        reader.reads, reader.wait = 0, 0.0
        if epoch is not None:
            loop.trigger(epoch)
        for _ in range(8):
            for task in loop.tasks:
                if task.runnable():
                    task.step()

    run(1, "a")
    assert moved == [], "epochs are as frequent as ever"
    run(2)
    run(3)
    assert quiet[-2:] == [("in[0]", True), ("out[0]", True)]
    run(None, "b", "c")
    assert moved == [("in[0]", 0), ("out[0]", 0)]


def test_halt_ends_at_once_and_closes_as_failed() -> None:
    flow = Flow("f")
    flow.read(Scripted("quiet")).write(Null())
    network = MemoryNetwork(1)
    transport = Watched(network, 0)
    loop, _ = loop_of(flow, transport)
    failed: list[bool] = []
    loop.tasks[0].close = failed.append  # type: ignore[method-assign]
    transport.on_wait = loop.halt
    loop.run()
    assert failed == [True]
    assert not loop.tasks[0].finished


def test_with_nothing_to_do_it_waits_until_something_comes() -> None:
    flow = Flow("f")
    flow.read(Scripted("quiet")).write(Null())
    transport = Watched(MemoryNetwork(1), 0)
    loop, _ = loop_of(flow, transport)
    transport.on_wait = loop.halt
    loop.run()
    assert transport.waits == [None], "no time limit, so no polling"


def test_it_waits_until_the_next_source_is_due() -> None:
    flow = Flow("f")
    flow.read(Scripted("quiet")).write(Null())
    transport = Watched(MemoryNetwork(1), 0)
    loop, _ = loop_of(flow, transport)
    loop.tasks[0].input.reader.wait = 30.0  # type: ignore[attr-defined]
    transport.on_wait = loop.halt
    loop.run()
    (wait,) = transport.waits
    assert wait is not None
    assert 0 < wait <= 30.0


def test_a_wake_up_makes_it_read_again() -> None:
    flow = Flow("f")
    sink = Collect()
    flow.read(Scripted("once")).write(sink)
    transport = Watched(MemoryNetwork(1), 0)
    loop, reports = loop_of(flow, transport)
    reader = loop.tasks[0].input.reader  # type: ignore[attr-defined]

    def script(reader: _ScriptedReader) -> list[Any]:
        if reader.reads < 3:
            return []
        reader.finished = True
        return ["woken"]

    reader._script = script
    transport.on_wait = reader.context.wake
    loop.run()
    assert reports[sink.channel] == ["woken"]
    assert transport.waits == [None, None]


def test_sinks_are_flushed_when_there_is_nothing_else_to_do() -> None:
    flow = Flow("f")
    flow.read(Scripted("once")).write(Held())
    transport = Watched(MemoryNetwork(1), 0)
    loop, reports = loop_of(flow, transport)
    loop.tasks[0].input.reader._script = lambda reader: ["x"] if reader.reads == 1 else []  # type: ignore[attr-defined]
    transport.on_wait = loop.halt
    loop.run()
    assert reports["held"] == ["x"]


def test_sinks_are_flushed_while_other_tasks_of_the_worker_are_busy() -> None:
    """A quiet branch beside one that never rests: its sink may hold records back, but not for ever."""
    flow = Flow("f")
    flow.read(Scripted("once"), name="quiet").write(Held(), name="held")
    flow.read(Scripted("busy"), name="busy").write(Null(), name="null")
    loop, reports = loop_of(flow)

    def never_rests(reader: _ScriptedReader) -> list[Any]:
        reader.wait = 0.0
        if reader.reads == 500:
            loop.halt()
        return ["more"]

    for task in loop.tasks:
        quiet = "quiet" in task.name
        task.input.reader._script = (lambda r: ["x"] if r.reads == 1 else []) if quiet else never_rests  # type: ignore[attr-defined]
    loop.run()
    assert reports.get("held") == ["x"]


def test_an_error_ends_the_loop_and_closes_everything_as_failed() -> None:
    flow = Flow("f", chaining=False)
    flow.read(Memory([1, 0])).write(Call(lambda n: 1 // n))
    loop, _ = loop_of(flow)
    closed: list[bool] = []
    for task in loop.tasks:
        task.close = closed.append  # type: ignore[method-assign]
    with pytest.raises(RecordError, match="ZeroDivisionError"):
        loop.run()
    assert closed == [True, True]


def test_lost_messages_end_the_loop() -> None:
    class Lossy(MemoryTransport):
        def lost(self) -> list[str]:
            return ["process 7 died"]

    flow = Flow("f")
    flow.read(Memory([1])).write(Null())
    loop, _ = loop_of(flow, Lossy(MemoryNetwork(1), 0))
    with pytest.raises(MessagesLost, match="process 7 died"):
        loop.run()


def two_workers(epochs: bool) -> tuple[RunLoop, RunLoop, list[tuple[int, bytes]]]:
    """A sender in worker 0 that has sent three batches to both tasks of worker 1; what came there."""
    flow = Flow("f", chaining=False)
    flow.read(Memory([]), parallelism=1).broadcast().write(Collect(), parallelism=2)
    plan = flow.plan(1)
    network = MemoryNetwork(2)
    caches = OutputCaches if epochs else lambda: None
    loops = []
    for worker in (0, 1):
        wiring = build(
            plan,
            {0: 0, 1: 1, 2: 1},
            worker,
            network.transport(worker),
            clock=time.monotonic_ns,
            report=lambda _: None,
            output_caches=caches(),
        )
        loops.append(RunLoop(wiring, wiring._transport, time.monotonic_ns))
    (log,) = loops[0].tasks[0].logs
    for i in range(3):
        log.push([[i]], 0)
        assert log.flush()
    return loops[0], loops[1], list(loops[1].transport.receive(0))  # type: ignore[arg-type]


def test_credit_of_another_generation_has_no_effect() -> None:
    """The receiver that grants it has been taken back, and the channel has forgotten what it had sent to it."""
    loop, _, _ = two_workers(True)
    channel, other = loop.tasks[0].outputs.channels
    sent = channel.outstanding
    assert sent == other.outstanding > 10
    for generation, left in ((1, sent), (0, sent - 10)):
        loop.deliver([(0, b"".join(credit(channel.number, generation, 10)))])
        assert (channel.outstanding, other.outstanding) == (left, sent)


def test_messages_of_channels_that_the_plan_has_no_more_are_dropped() -> None:
    _, loop, messages = two_workers(True)
    body = messages[0][1][ADDRESS_BYTES + 2 * DESTINATION_BYTES :]
    for destinations in ([(999, 0)], [(999, 0), (1, 0)]):
        loop.deliver([(1, address(destinations, 0, FIRST) + body), (1, address(destinations, 1) + signal(BARRIER, 1))])
    assert [len(task.input.inbox.ready) for task in loop.tasks] == [0, 1], "only those who have the channel get it"


def test_a_message_for_several_tasks_is_decoded_once() -> None:
    _, loop, messages = two_workers(False)
    assert len(messages) == 3
    loop.deliver(messages)
    one, other = (task.input.inbox.ready for task in loop.tasks)
    assert [batch for _, batch, _, _ in one] == [[[0]], [[1]], [[2]]]
    assert all(mine[1] is theirs[1] for mine, theirs in zip(one, other, strict=True))
    assert [cost for *_, cost in one] == [cost for *_, cost in other]


@pytest.mark.parametrize("which", ["missing", "twice"])
def test_a_message_that_is_missing_or_comes_twice_is_told_with_both_tasks(which: str) -> None:
    _, loop, messages = two_workers(True)
    wrong = [messages[0], messages[2]] if which == "missing" else [messages[0], messages[1], messages[1]]
    with pytest.raises(OutOfStep, match=r"write\[0\] expected message \d from read\[0\] .* and got message \d"):
        loop.deliver(wrong)


def test_messages_that_the_transport_has_lost_are_left_to_recovery() -> None:
    _, loop, messages = two_workers(True)
    loop.transport.lost = lambda: ["process 7 died"]  # type: ignore[method-assign]
    loop.deliver([messages[0], messages[2]])
    assert [len(task.input.inbox.ready) for task in loop.tasks] == [1, 1], "what follows the gap is not taken"
    assert loop.wiring.delivery.lost
    loop.transport.lost = list  # type: ignore[method-assign]
    loop.connect_tasks(set(), 2)
    assert not loop.wiring.delivery.lost, "after the recovery, a gap is an error again"


def test_what_is_no_message_is_refused() -> None:
    _, loop, messages = two_workers(False)
    for garbage in (b"", b"x" * 10, b"x" * 100, messages[0][1][:20]):
        with pytest.raises(BadMessage):
            loop.deliver([(1, garbage)])


def test_status_is_plain_and_complete() -> None:
    flow = Flow("f", chaining=False)
    flow.read(Memory(range(10))).map(lambda n: 1 // n, on_error="skip").write(Null())
    loop, _ = loop_of(flow)
    loop.run()
    read, mapped, write = loop.load()
    assert read["operators"] == [{"name": "read", "records_in": 10, "records_out": 10, "skipped": 0, "late": 0}]
    assert mapped["operators"] == [{"name": "map", "records_in": 10, "records_out": 9, "skipped": 1, "late": 0}]
    assert write["operators"][0]["records_in"] == 9
    assert write["queued"] == mapped["unsent"] == 0
    assert sum(write["latency_all_us"].values()) == 9
