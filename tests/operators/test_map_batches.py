"""What calls of map_batches and others get, in a worker whose time passes only where a function says that it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from penstock import testing
from penstock.runtime.errors import FlowError
from penstock.runtime.event_time.windows import Tumbling
from penstock.runtime.exchange.output_cache import OutputCaches
from penstock.runtime.program.flow import Flow, Stream
from penstock.runtime.sinks.base import Sink, SinkContext, SinkWriter
from penstock.runtime.sinks.call import Null
from penstock.runtime.sources.base import Reader, Source, SourceContext, Split
from penstock.runtime.sources.memory import Memory
from penstock.runtime.transport.memory import MemoryNetwork
from penstock.runtime.worker.run_loop import RunLoop
from penstock.runtime.worker.task import Snapshot, Steps, Task
from penstock.runtime.worker.wiring import build

MS = 1_000_000
S = 1000 * MS


class World:
    """One worker in virtual time."""

    def __init__(self) -> None:
        self.now = 0
        self.calls: list[tuple[int, int, int]] = []  # (records, when it began, age of its first record), in ns
        self.snapshots: list[Snapshot] = []

    def costs(self, fixed_ns: float, each_ns: float = 0.0) -> Callable[[list[Any]], list[Any]]:
        """A function from batch to batch that takes so long; records are the times at which they were due."""

        def work(batch: list[Any]) -> list[Any]:
            self.calls.append((len(batch), self.now, self.now - batch[0]))
            self.now += int(fixed_ns + each_ns * len(batch))
            return batch

        return work

    def run(
        self, build_stream: Callable[[Stream], Any], source: Source, *, chaining: bool, epochs: bool = False
    ) -> None:
        """A flow, to its end."""
        tasks = self.tasks(build_stream, source, chaining=chaining, epochs=epochs)
        while not all(task.finished for task in tasks):
            self.turn(tasks)

    def tasks(
        self, build_stream: Callable[[Stream], Any], source: Source, *, chaining: bool, epochs: bool = False
    ) -> list[Task]:
        flow = Flow("f", chaining=chaining)
        build_stream(flow.read(source))
        plan = flow.plan(1)
        transport = MemoryNetwork(1).transport(0)
        wiring = build(
            plan,
            {task.number: 0 for task in plan.tasks},
            0,
            transport,
            clock=lambda: self.now,
            report=lambda reported: None,
            credit_window=1 << 40,
            wall=lambda: self.now / 1e9,
            output_caches=OutputCaches() if epochs else None,
            on_snapshot=self.snapshots.append if epochs else None,
            steps=Steps(stopwatch=lambda: self.now),
        )
        tasks = RunLoop(wiring, transport, lambda: self.now).tasks
        for task in tasks:
            task.open()
        return tasks

    def turn(self, tasks: list[Task]) -> None:
        """A step of each task that can do one; when none can, time passes until one may."""
        ran = False
        for task in tasks:
            if task.runnable():
                task.step()
                ran = True
        if not ran:
            waits = [wait for task in tasks if (wait := task.ready_in()) is not None]
            assert waits, "no task can continue"
            self.now += max(1, int(min(waits) * 1e9))


class Paced(Source):
    """`rate` records a second for some time; each is the time at which it was due, in ns."""

    def __init__(self, world: World, rate: float, seconds: float, largest: int = 1 << 60) -> None:
        self.world, self.rate, self.seconds, self.largest = world, rate, seconds, largest

    def splits(self, parallelism: int) -> list[Split]:
        return [Split("all")]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        return _PacedReader(self)


class _PacedReader(Reader):
    def __init__(self, source: Paced) -> None:
        self._source = source
        self._next = 0
        self._total = int(source.rate * source.seconds)

    def read(self, limit: int) -> list[Any]:
        source = self._source
        due = min(self._total, int(source.world.now * source.rate / S) + 1)
        count = min(limit, due - self._next, source.largest)
        records = [int((self._next + i) * S / source.rate) for i in range(count)]
        self._next += count
        self.stamp_ns = records[0] if records else 0
        self.finished = self._next >= self._total
        return records

    def ready_in(self) -> float | None:
        source = self._source
        return max(0.0, self._next / source.rate - source.world.now / 1e9)

    def offsets(self) -> dict[str, Any]:
        return {"all": self._next}


@pytest.mark.parametrize("chaining", [True, False])
@pytest.mark.parametrize("rate", [1000, 10_000])
def test_calls_of_20_ms_keep_up(rate: int, chaining: bool) -> None:
    world = World()
    world.run(
        lambda s: s.map_batches(world.costs(20 * MS), batch_size=256).write(Null()),
        Paced(world, rate, 30),
        chaining=chaining,
    )
    late = [call for call in world.calls if S < call[1] < 29 * S]
    assert sum(records for records, _, _ in world.calls) == 30 * rate
    assert max(age for _, _, age in late) <= 45 * MS, "a call under way, and the next"
    assert max(records for records, _, _ in late) <= 256
    assert sum(records for records, _, _ in late) / len(late) >= rate * 0.019


@pytest.mark.parametrize("chaining", [True, False])
def test_what_waits_fills_calls_however_it_came(chaining: bool) -> None:
    """The batches of the inbox are of another size than the calls; each call is full while that many wait."""
    world = World()
    tasks = world.tasks(
        lambda s: s.map_batches(world.costs(20 * MS), batch_size=300).write(Null()),
        Paced(world, 1_000_000_000, 0.0001, largest=70),
        chaining=chaining,
    )
    world.now = S  # all are due
    while not (tasks[0].finished or chaining):
        tasks[0].step()
    while not all(task.finished for task in tasks):
        world.turn(tasks)
    sizes = [records for records, _, _ in world.calls]
    assert sum(sizes) == 100_000
    assert set(sizes[20:-1]) == {300}


def test_calls_after_operators_that_expand_and_drop_are_full() -> None:
    world = World()
    world.run(
        lambda s: (
            s.filter(lambda n: n % 7 == 0)
            .flat_map(lambda n: [n] * (n % 5))
            .map_batches(world.costs(20 * MS), batch_size=256)
            .write(Null())
        ),
        Paced(world, 1_000_000_000, 0.0003, largest=1000),
        chaining=True,
    )
    sizes = [records for records, _, _ in world.calls]
    assert sum(sizes) == sum(n % 5 for n in range(300_000) if n % 7 == 0)
    assert set(sizes[20:-1]) == {256}


def test_records_that_cost_much_come_in_small_batches_so_that_tasks_of_a_worker_do_not_stall_each_other() -> None:
    world = World()
    world.run(
        lambda s: s.map_batches(world.costs(0, 2 * MS), batch_size=1024).write(Null()),
        Paced(world, 1_000_000, 0.002),
        chaining=False,
    )
    assert max(records for records, _, _ in world.calls[2:]) <= 4


def test_an_expensive_operator_after_a_cheap_one_gets_small_batches_and_one_of_fixed_cost_does_not() -> None:
    """Fused into one task: its steps are as short as the expensive one asks for, and calls of fixed cost full."""
    world = World()

    def slow(n: int) -> int:
        world.now += 2 * MS
        return n

    stepped: list[int] = []
    tasks = world.tasks(
        lambda s: s.map(lambda n: n).map(slow).write(Null()), Paced(world, 1_000_000, 0.002), chaining=True
    )
    while not all(task.finished for task in tasks):
        began = world.now
        world.turn(tasks)
        stepped.append(world.now - began)
    assert max(stepped[2:]) <= 9 * MS
    world = World()
    world.run(
        lambda s: s.map(lambda n: n).map_batches(world.costs(20 * MS), batch_size=256).map(lambda n: n).write(Null()),
        Paced(world, 1_000_000, 0.02),
        chaining=True,
    )
    assert {records for records, _, _ in world.calls[10:-1]} == {256}


class Slow(Sink):
    """A write costs 20 ms, whatever it writes."""

    def __init__(self, world: World) -> None:
        self.world = world

    def writer(self, context: SinkContext) -> SinkWriter:
        return _SlowWriter(self.world)


class _SlowWriter(SinkWriter):
    def __init__(self, world: World) -> None:
        self._work = world.costs(20 * MS)

    def write(self, records: list[Any]) -> None:
        self._work(records)


class SlowToRead(Paced):
    """A read costs 20 ms, whatever it brings."""

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        return _SlowReader(self)


class _SlowReader(_PacedReader):
    def read(self, limit: int) -> list[Any]:
        records = super().read(limit)
        if records:
            self._source.world.costs(20 * MS)(records)
        return records


@pytest.mark.parametrize("chaining", [True, False])
@pytest.mark.parametrize("what", ["sink", "source"])
def test_sinks_and_sources_whose_calls_cost_20_ms_keep_up(what: str, chaining: bool) -> None:
    world = World()
    make = SlowToRead if what == "source" else Paced
    world.run(lambda s: s.write(Slow(world) if what == "sink" else Null()), make(world, 10_000, 10), chaining=chaining)
    assert max(age for _, at, age in world.calls if at > S) <= 45 * MS
    assert sum(records for records, _, _ in world.calls) == 100_000


# --- min_batch ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chaining", [True, False])
def test_records_wait_for_a_batch_and_no_longer_than_asked_for(chaining: bool) -> None:
    world = World()

    def stream(s: Stream) -> Any:
        return s.map_batches(world.costs(MS), batch_size=200, min_batch=100, linger_s=0.05).write(Null())

    world.run(stream, Paced(world, 10_000, 2), chaining=chaining)
    assert sum(records for records, _, _ in world.calls) == 20_000
    assert {records for records, _, _ in world.calls[:-1]} == {100}, "each takes 10 ms to come together"
    slow = world = World()
    slow.run(stream, Paced(slow, 200, 2), chaining=chaining)
    assert sum(records for records, _, _ in slow.calls) == 400
    assert {records for records, _, _ in slow.calls[:-1]} <= {10, 11}, "what comes in 50 ms"
    assert all(50 * MS <= age <= 56 * MS for _, _, age in slow.calls[:-1])


def test_records_that_waited_are_as_old_as_they_are() -> None:
    """The latency that is shown is that of each call's oldest record."""
    world = World()
    tasks = world.tasks(
        lambda s: s.map_batches(world.costs(0), batch_size=200, min_batch=100, linger_s=9.0).write(Null()),
        Paced(world, 1000, 10),
        chaining=False,
    )
    while not all(task.finished for task in tasks):
        world.turn(tasks)
    write = tasks[-1].latency.whole()
    assert write.total == 10_000
    p50 = write.quantile(0.5)
    assert p50 is not None
    assert 90_000 <= p50 <= 110_000, "us: the first of 100 records has waited for the last"


def test_a_barrier_lets_records_go_and_no_snapshot_holds_any() -> None:
    world = World()
    tasks = world.tasks(
        lambda s: s.map_batches(world.costs(0), batch_size=200, min_batch=200, linger_s=1000.0).write(Null()),
        Paced(world, 1000, 1),
        chaining=False,
        epochs=True,
    )
    source, batches, write = tasks
    assert source.input.is_read
    while world.now < 50 * MS:
        world.turn(tasks)
    assert batches.passage.held == batches.stages[0].records_in >= 50
    assert not world.calls
    source.trigger(1)
    while len(world.snapshots) < 3:
        world.turn(tasks)
    assert [records for records, _, _ in world.calls] == [batches.stages[0].records_in]
    counters = {name: counts for snapshot in world.snapshots for name, (_, counts) in snapshot.states.items()}
    assert counters["map_batches"][0] == counters["map_batches"][1] == counters["write"][0]
    while not write.finished:
        world.turn(tasks)
    assert write.stages[0].records_in == 1000


def test_a_watermark_does_not_pass_records_that_wait() -> None:
    flow = Flow("f")
    stream = flow.read(Memory([]), name="in").watermark(lambda n: n * 1000)
    waited = stream.map_batches(lambda batch: batch, batch_size=50, min_batch=50, linger_s=1000.0)
    waited.key_by(lambda n: n % 2).window(Tumbling(10), time=lambda n: n * 1000).count().write(Null(), name="out")
    out = testing.run(flow, {"in": range(100)})["out"]
    assert [result[-1] for result in out] == [5] * 20, "none was late"


def test_testing_gives_the_same_calls_each_time() -> None:
    def calls(records: Iterable[int], at_a_time: int, **options: Any) -> list[int]:
        flow = Flow("f")
        flow.read(Memory([])).map_batches(lambda batch: [len(batch)], **options).write(Null())
        return list(testing.run(flow, records, batch_size=at_a_time)["write"])

    assert calls(range(100), 1, batch_size=20, min_batch=10, linger_s=5.0) == [10] * 10
    assert calls(range(95), 1, batch_size=20, min_batch=10, linger_s=5.0) == [10] * 9 + [5]
    once = calls(range(100_000), 10_000, batch_size=700)
    assert once == calls(range(100_000), 10_000, batch_size=700)
    assert sum(once) == 100_000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_batch": 10}, "give both or neither"),
        ({"linger_s": 1.0}, "give both or neither"),
        ({"min_batch": 11, "batch_size": 10, "linger_s": 1.0}, "from 1 to batch_size=10"),
        ({"min_batch": 0, "linger_s": 1.0}, "from 1 to batch_size"),
        ({"min_batch": 2, "linger_s": 0.0}, "must be a number above 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(FlowError, match=words):
        Flow("f").read(Memory([])).map_batches(list, **options)


def test_dicts_without_fields_are_rows_of_a_table_too() -> None:
    flow = Flow("f")
    flow.read(Memory([])).map_batches(lambda table: table, batch_format="arrow").write(Null())
    assert testing.run(flow, [{}, {}], batch_size=2) == {"write": [{}, {}]}
