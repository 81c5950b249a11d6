"""Random flows together with what plain Python makes of the same records.

Every stream of a flow under construction stands beside the list of all its records, whatever their order; an operator
is added to both. What a flow must deliver is then known without running it.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from inspect import isawaitable
from typing import Any

from penstock.runtime.event_time.windows import CountWindow, GlobalWindow, Session, Sliding, Tumbling
from penstock.runtime.operators.asynchronous import MapAsync
from penstock.runtime.operators.callers import Attempt, Caller
from penstock.runtime.operators.process import BroadcastProcessFunction, CoProcessFunction, ProcessContext
from penstock.runtime.program.flow import Flow, Stream
from penstock.runtime.sinks.collect import Collect
from tests.runtime.sim import Trickle

RECORDS_MAX = 1500  # in a stream: a flow should take milliseconds


def mix(record: Any, salt: int) -> int:
    """A number that depends on all of a record and is the same in every run."""
    return zlib.crc32(repr((record, salt)).encode())


@dataclass
class Place:
    """A stream and all records that will pass there."""

    stream: Stream
    records: list[Any]
    used: bool = False


@dataclass
class RandomFlow:
    """A flow, and for each of its sinks what must reach it. `last` sinks get results that grow: the greatest counts;
    the (key, number) records of `sums` sinks must add up to these numbers, by key."""

    flow: Flow
    places: list[Place] = field(default_factory=list)
    expected: dict[str, tuple[str, Counter[Any]]] = field(default_factory=dict)
    last: dict[str, tuple[str, dict[Any, int]]] = field(default_factory=dict)
    sums: dict[str, tuple[str, dict[Any, int]]] = field(default_factory=dict)

    def check(self, outputs: dict[str, list[Any]]) -> None:
        for channel, (name, records) in self.expected.items():
            got = Counter(outputs.get(channel, []))
            assert got == records, f"{name}: lost {records - got}, too much {got - records}"
        for channel, (name, counts) in self.last.items():
            greatest: dict[Any, int] = {}
            for key, count in outputs.get(channel, []):
                greatest[key] = max(count, greatest.get(key, 0))
            assert greatest == counts, name
        for channel, (name, totals) in self.sums.items():
            assert added(outputs.get(channel, [])) == totals, name


def added(records: list[Any]) -> dict[Any, int]:
    """The sums of (key, number) records."""
    totals: dict[Any, int] = defaultdict(int)
    for key, number in records:
        totals[key] += number
    return dict(totals)


def random_flow(seed: int) -> RandomFlow:
    """A flow of the seed's choosing; every operator sets its own parallelism."""
    rng = random.Random(seed)
    made = RandomFlow(Flow(f"random-{seed}", key_groups=rng.choice((4, 16)), chaining=rng.random() < 0.7))
    for _ in range(rng.choice((1, 1, 2, 3))):
        made.places.append(_read(made.flow, rng, seed))
    for _ in range(rng.randrange(1, 8)):
        place = rng.choice(made.places)
        place.used = True
        if rng.random() < 0.2:
            place = _union(place, rng.choice(made.places))
        made.places += rng.choice(_OPERATORS)(made, place, rng)
    for place in made.places:
        if not place.used or rng.random() < 0.1:
            _write(made, place, rng)
    windows = random.Random(f"windows {seed}")  # of its own: the rest of a seed's flow stays as it was
    if windows.random() < 0.5:
        windows.choice(_WINDOWS)(made, windows.choice(made.places), windows, seed)
    inputs = random.Random(f"inputs {seed}")
    if inputs.random() < 0.5:
        place, other = inputs.choice(made.places), inputs.choice(made.places)
        inputs.choice(_TWO_INPUTS)(made, place, other, inputs)
    calls = random.Random(f"calls {seed}")
    if calls.random() < 0.4:
        calls.choice(_CALLS)(made, calls.choice(made.places), calls, seed)
    timed = random.Random(f"timed {seed}")
    if timed.random() < 0.5:
        timed.choice(_TIMED)(made, timed, seed)
    return made


def _read(flow: Flow, rng: random.Random, seed: int) -> Place:
    n = rng.choice((0, 1, 10, 60))
    source = rng.randrange(1000)
    records = [(source, i, "x" * rng.choice((0, 3, 60))) for i in range(n)]
    cut = rng.randrange(n + 1)
    parallelism = rng.randrange(1, 4)
    return Place(flow.read(Trickle([records[:cut], records[cut:]], seed), parallelism=parallelism), records)


def _union(a: Place, b: Place) -> Place:
    taps = {(tap.operator, tap.output) for tap in a.stream._taps}
    if taps & {(tap.operator, tap.output) for tap in b.stream._taps} or len(a.records + b.records) > RECORDS_MAX:
        return a
    b.used = True
    return Place(a.stream.union(b.stream), a.records + b.records)


def _grouped(place: Place, rng: random.Random) -> tuple[Stream, list[Any], int]:
    """A stream with some grouping, its records, and the next operator's parallelism."""
    stream, records = place.stream, place.records
    parallelism = rng.randrange(1, 4)
    how = rng.choice(("as it is", "rebalance", "shuffle", "broadcast", "to_first", "partition_by", "forward"))
    if how == "broadcast" and len(records) * parallelism <= RECORDS_MAX:
        return stream.broadcast(), records * parallelism, parallelism
    if how == "partition_by":
        salt = rng.randrange(100)
        return stream.partition_by(lambda record, n: mix(record, salt) % n), records, parallelism
    if how == "forward":
        tasks = {stream._flow.graph.operators[tap.operator].parallelism for tap in stream._taps}
        if len(tasks) == 1:
            return stream.forward(), records, tasks.pop() or 1
    if how in ("rebalance", "shuffle", "to_first"):
        return getattr(stream, how)(), records, parallelism
    return stream, records, parallelism


def _map(made: RandomFlow, place: Place, rng: random.Random) -> list[Place]:
    stream, records, parallelism = _grouped(place, rng)
    salt = rng.randrange(100)
    return [Place(stream.map(lambda r: (salt, r), parallelism=parallelism), [(salt, r) for r in records])]


def _filter(made: RandomFlow, place: Place, rng: random.Random) -> list[Place]:
    stream, records, parallelism = _grouped(place, rng)
    salt = rng.randrange(100)
    keep = lambda r: mix(r, salt) % 3
    return [Place(stream.filter(keep, parallelism=parallelism), [r for r in records if keep(r)])]


def _flat_map(made: RandomFlow, place: Place, rng: random.Random) -> list[Place]:
    stream, records, parallelism = _grouped(place, rng)
    salt = rng.randrange(100)
    most = rng.choice((2, 4, RECORDS_MAX))
    if len(records) * most // 2 > RECORDS_MAX:
        most = 2

    def spread(record: Any) -> Iterator[Any]:
        return ((i, record) for i in range(mix(record, salt) % most))

    return [Place(stream.flat_map(spread, parallelism=parallelism), [out for r in records for out in spread(r)])]


def _map_batches(made: RandomFlow, place: Place, rng: random.Random) -> list[Place]:
    stream, records, parallelism = _grouped(place, rng)
    size = rng.choice((1, 7, 1000))
    # Of the records' own making, so that the rest of a seed's flow does not depend on it.
    choice = mix((len(records), size), 7)
    least = (1, min(size, 5), size)[choice % 3]
    linger = (0.00005, 0.002, 1000.0)[choice // 3 % 3]

    def work(batch: list[Any]) -> list[Any]:
        assert 1 <= len(batch) <= size
        return [("b", r) for r in batch]

    out = stream.map_batches(
        work,
        batch_size=size,
        min_batch=least,
        linger_s=linger if least > 1 else None,
        parallelism=parallelism,
    )
    return [Place(out, [("b", r) for r in records])]


def _failing(made: RandomFlow, place: Place, rng: random.Random) -> list[Place]:
    """A map that fails for some records, which become dead letters or are skipped."""
    stream, records, parallelism = _grouped(place, rng)
    salt = rng.randrange(100)

    def fail(record: Any) -> Any:
        if mix(record, salt) % 4 == 0:
            raise ValueError(record)
        return ("f", record)

    passed = [("f", r) for r in records if mix(r, salt) % 4]
    if rng.random() < 0.3:
        return [Place(stream.map(fail, parallelism=parallelism, on_error="skip"), passed)]
    out = stream.map(fail, parallelism=parallelism, on_error="dead_letter")
    return [Place(out, passed), _letters(out, [r for r in records if mix(r, salt) % 4 == 0], rng)]


def _letters(stream: Stream, failed: list[Any], rng: random.Random) -> Place:
    name = stream._taps[0].operator
    expected = [("letter", r) for r in failed]
    letters = stream.dead_letters().map(lambda d: ("letter", d.record), parallelism=rng.randrange(1, 3))
    assert name in stream._flow.graph.operators
    return Place(letters, expected)


def _keyed(made: RandomFlow, place: Place, rng: random.Random) -> list[Place]:
    stream, records = place.stream, place.records
    parallelism = rng.randrange(1, 4)
    keys, salt = rng.choice((1, 3, 50)), rng.randrange(100)
    key = lambda r: mix(r, salt) % keys
    groups: dict[int, list[Any]] = defaultdict(list)
    for record in records:
        groups[key(record)].append(record)
    keyed = stream.key_by(key)
    what = rng.choice(("count", "every", "sum", "max", "reduce", "latest"))
    if what == "count":
        out = keyed.count(emit="final", parallelism=parallelism)
        return [Place(out, [(k, len(rs)) for k, rs in groups.items()])]
    if what == "every":
        out = keyed.count(emit="every", parallelism=parallelism)
        return [Place(out, [(k, i + 1) for k, rs in groups.items() for i in range(len(rs))])]
    if what == "sum":
        out = keyed.sum(lambda r: mix(r, 1), emit="final", parallelism=parallelism)
        return [Place(out, [(k, sum(mix(r, 1) for r in rs)) for k, rs in groups.items()])]
    if what == "max":
        out = keyed.max(lambda r: mix(r, 1), emit="final", parallelism=parallelism)
        return [Place(out, [(k, max(mix(r, 1) for r in rs)) for k, rs in groups.items()])]
    if what == "reduce":
        least: Callable[[Any, Any], Any] = lambda a, b: min(a, b, key=repr)
        out = keyed.reduce(least, emit="final", parallelism=parallelism)
        return [Place(out, [(k, min(rs, key=repr)) for k, rs in groups.items()])]
    sink = Collect()
    keyed.count(parallelism=parallelism).write(sink, parallelism=rng.randrange(1, 3))
    made.last[sink.channel] = ("latest counts", {k: len(rs) for k, rs in groups.items()})
    return []


def _process(made: RandomFlow, place: Place, rng: random.Random) -> list[Place]:
    """Keyed state, two outputs a record at most, a side output, and keys that fail on the way."""
    parallelism = rng.randrange(1, 4)
    salt = rng.randrange(100)

    def key(record: Any) -> int:
        return 12 // (mix(record, salt) % 5)  # fails for a fifth of the records

    def work(ctx: ProcessContext, key: int, record: Any) -> list[Any]:
        ctx.set(ctx.get(0) + 1)
        if mix(record, salt + 1) % 2:
            ctx.output("odd", ("odd", record))
        ctx.emit(("seen", key, ctx.get()))
        return [record] if mix(record, salt + 2) % 3 == 0 else []

    passed = [r for r in place.records if mix(r, salt) % 5]
    seen = Counter(key(r) for r in passed)
    main = [("seen", k, i + 1) for k, n in seen.items() for i in range(n)]
    main += [r for r in passed if mix(r, salt + 2) % 3 == 0]
    out = place.stream.key_by(key).process(work, outputs=("odd",), parallelism=parallelism, on_error="dead_letter")
    odd = Place(out.side_output("odd"), [("odd", r) for r in passed if mix(r, salt + 1) % 2])
    return [Place(out, main), odd, _letters(out, [r for r in place.records if mix(r, salt) % 5 == 0], rng)]


_OPERATORS: tuple[Callable[[RandomFlow, Place, random.Random], list[Place]], ...] = (
    _map,
    _filter,
    _flat_map,
    _map_batches,
    _failing,
    _keyed,
    _keyed,
    _process,
)


# --- windows -------------------------------------------------------------------------------------------------------

SPAN = 400  # ms of event time in a flow


def _window(rng: random.Random) -> Sliding:
    size = rng.choice((5, 20, 70, 200))
    if rng.random() < 0.5:
        return Tumbling(size / 1000, rng.choice((0, 3)) / 1000)
    return Sliding(size / 1000, rng.randrange((size + 1) // 2, size + 1) / 1000)


def _on_the_way(stream: Stream, rng: random.Random) -> Stream:
    """Something between watermarks and windows."""
    if rng.random() < 0.5:
        stream = stream.rebalance().filter(lambda record: True, parallelism=rng.randrange(1, 4))
    return stream


def _disordered(made: RandomFlow, place: Place, rng: random.Random, seed: int) -> None:
    """Records of any order and silent inputs, and lateness that covers all: the last results are whole."""
    salt, keys = rng.randrange(100), rng.choice((1, 3, 50))
    time = lambda record: mix(record, salt) % SPAN
    key = lambda record: mix(record, salt + 1) % keys
    marked = place.stream.watermark(
        time,
        out_of_orderness_s=rng.choice((0.0, 0.03, 0.2)),
        idle_s=rng.choice((None, 0.001, 0.01)),
        parallelism=rng.randrange(1, 4),
    )
    window = _window(rng)
    late = 2 * SPAN / 1000
    emit: Any = rng.choice(("final", "final", "latest"))
    keyed = _on_the_way(marked, rng).key_by(key).window(window, time=time, lateness_s=late)
    counts = keyed.count(emit=emit, parallelism=rng.randrange(1, 4))
    sink = Collect()
    counts.map(lambda result: ((result[0], result[1]), result[3]), parallelism=rng.randrange(1, 3)).write(
        sink, parallelism=rng.randrange(1, 3)
    )
    expected = Counter((key(record), start) for record in place.records for start in window.starts(time(record)))
    made.last[sink.channel] = (f"last counts in {window}", dict(expected))
    if rng.random() < 0.4:
        sink = Collect()
        counts.side_output("late").write(sink, parallelism=1)
        made.expected[sink.channel] = (f"late for {window}", Counter())


def _dropped(made: RandomFlow, place: Place, rng: random.Random, seed: int) -> None:
    """Records of any order, of which many are late: each is in one result or late."""
    salt, keys = rng.randrange(100), rng.choice((1, 3, 50))
    time = lambda record: mix(record, salt) % SPAN
    key = lambda record: mix(record, salt + 1) % keys
    marked = place.stream.watermark(
        time,
        out_of_orderness_s=rng.choice((0.0, 0.1, 0.3)),
        idle_s=rng.choice((None, 0.001, 0.01)),
        parallelism=rng.randrange(1, 4),
    )
    window = Tumbling(rng.choice((0.005, 0.02, 0.07)))
    counts = _on_the_way(marked, rng).key_by(key).window(window, time=time).count(parallelism=rng.randrange(1, 4))
    late = counts.side_output("late").map(lambda record: (key(record), 1), parallelism=rng.randrange(1, 3))
    sink = Collect()
    counts.map(lambda result: (result[0], result[3]), parallelism=rng.randrange(1, 3)).union(late).write(
        sink, parallelism=1
    )
    made.sums[sink.channel] = (f"in {window} or late", dict(Counter(map(key, place.records))))


def _ordered(made: RandomFlow, place: Place, rng: random.Random, seed: int) -> None:
    """Sources whose records are no further out of order than they say: each result leaves once, and none is late."""
    streams, records = [], []
    disorder = rng.choice((0, 10, 50))
    for source in range(rng.randrange(1, 3)):
        n = rng.choice((1, 40, 120))
        times = [i * SPAN // n + rng.randrange(-disorder, disorder + 1) // 2 for i in range(n)]
        some = [(source, i, time) for i, time in enumerate(times)]
        records += some
        # One split: those that a task reads must not be further apart than they say.
        read = made.flow.read(Trickle([some], seed), parallelism=rng.randrange(1, 3))
        parallelism = made.flow.graph.operators[read._taps[0].operator].parallelism
        streams.append(read.forward().watermark(2, out_of_orderness_s=disorder / 1000, parallelism=parallelism))
    stream = streams[0].union(*streams[1:]) if len(streams) > 1 else streams[0]
    salt, keys = rng.randrange(100), rng.choice((1, 3, 50))
    key = lambda record: mix(record, salt) % keys
    window = _window(rng)
    lateness = rng.choice((0.0, 0.015, 0.1))
    keyed = _on_the_way(stream, rng).key_by(key).window(window, time=2, lateness_s=lateness)
    counts = keyed.count(parallelism=rng.randrange(1, 4))
    expected = Counter((key(record), start) for record in records for start in window.starts(record[2]))
    results = [(k, start, start + window.size, n) for (k, start), n in expected.items()]
    if rng.random() < 0.4:
        counts.side_output("late").write(sink := Collect(), parallelism=1)
        made.expected[sink.channel] = (f"late for {window} of ordered records", Counter())
    _write(made, Place(counts, results), rng)


_WINDOWS: tuple[Callable[[RandomFlow, Place, random.Random, int], None], ...] = (_disordered, _dropped, _ordered)


# --- calls ---------------------------------------------------------------------------------------------------------


class Chance(Caller):
    """Makes calls at once in the task's thread. A seed decides after how many looks there is an answer, and which of
    the first tries fail."""

    def __init__(
        self,
        function: Any,
        name: str,
        wake: Callable[[], None],
        *,
        seed: str,
        flaky: int,
        looks: tuple[int, ...] = (0, 0, 1, 2, 5),
    ) -> None:
        super().__init__(function, name, wake)
        self._looks = looks
        self._rng = random.Random(seed)
        self._flaky = flaky
        self._later: list[list[Any]] = []  # [looks until then, attempt, value, error]

    def begin(self, attempts: list[Attempt]) -> None:
        self.running += len(attempts)
        for attempt in attempts:
            value, error = None, None
            try:
                value = self.call(attempt)
            except Exception as raised:
                error = raised
            if attempt.call.tries <= self._rng.randrange(self._flaky + 1):
                error = ConnectionError("this try fails")
            self._later.append([self._rng.choice(self._looks), attempt, value, error])

    @property
    def answered(self) -> int:
        later, self._later = self._later, []
        for looks, attempt, value, error in later:
            if looks:
                self._later.append([looks - 1, attempt, value, error])
            else:
                self.settle(attempt, value, error)
        return super().answered

    def answer_in(self) -> float | None:
        return 0.0 if self._later else None

    def call(self, attempt: Attempt) -> Any:
        result = self._function.fn(attempt.record)
        if not isawaitable(result):
            return result
        try:
            result.send(None)  # type: ignore[attr-defined]
        except StopIteration as end:
            return end.value
        raise AssertionError("the function waits for something")

    def _end_calls(self) -> None:
        self._later.clear()


class Changing:
    """A record that a call changes. What it was made of says whether it is equal to another."""

    def __init__(self, made_of: Any) -> None:
        self.made_of = made_of
        self.changes = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Changing) and self.made_of == other.made_of

    __hash__ = None  # type: ignore[assignment]


def _called(stream: Stream, fn: Callable[[Any], Any], rng: random.Random, seed: int, **options: Any) -> Stream:
    retries = rng.choice((0, 0, 2))

    async def wait(record: Any) -> Any:
        return fn(record)

    out = stream.map_async(
        rng.choice((fn, wait)),
        concurrency=rng.choice((1, 3, 16)),
        ordered=rng.random() < 0.5,
        retries=retries,
        retry_wait_s=rng.choice((0.0, 0.00001)),  # twice as long for the second retry; the simulator waits no longer
        **options,
    )
    operator = out._flow.graph.operators[out._taps[0].operator]
    assert isinstance(operator, MapAsync)
    operator.caller = partial(Chance, seed=f"{seed} {operator.name}", flaky=retries)
    return out


def _calls(made: RandomFlow, place: Place, rng: random.Random, seed: int) -> None:
    """Calls that change their records, and of which some fail whenever they are made."""
    salt, fails = rng.randrange(100), rng.random() < 0.4

    def change(record: Changing) -> tuple[int, Any]:
        record.changes += 1
        if fails and mix(record.made_of, salt) % 4 == 0:
            raise ValueError(record)
        return record.changes, record.made_of

    on_error: Any = "skip" if fails else "fail"
    cells = place.stream.map(Changing, parallelism=rng.randrange(1, 4))
    out = _called(cells, change, rng, seed, parallelism=rng.randrange(1, 4), on_error=on_error)
    if rng.random() < 0.3:
        cells = out.map(lambda record: Changing(record[1]), parallelism=rng.randrange(1, 4))
        out = _called(cells, change, rng, seed, parallelism=rng.randrange(1, 4))
    expected = [(1, record) for record in place.records if not (fails and mix(record, salt) % 4 == 0)]
    _write(made, Place(out, expected), rng)


def _calls_before_windows(made: RandomFlow, place: Place, rng: random.Random, seed: int) -> None:
    """No watermark overtakes a record whose call is under way: no record is late."""
    n, disorder = rng.choice((1, 40, 120)), rng.choice((0, 10, 50))
    times = [i * SPAN // n + rng.randrange(-disorder, disorder + 1) // 2 for i in range(n)]
    records = [("called", i, time) for i, time in enumerate(times)]
    read = made.flow.read(Trickle([records], seed), parallelism=1)
    # Not with idle_s: a task that was idle holds nobody up before its own watermark has come, wherever its records are.
    marked = read.watermark(2, out_of_orderness_s=disorder / 1000, parallelism=1)
    called = _called(marked, lambda record: record, rng, seed, parallelism=rng.randrange(1, 4))
    key = lambda record: record[1] % 3
    window = _window(rng)
    counts = called.key_by(key).window(window, time=2).count(parallelism=rng.randrange(1, 4))
    expected = Counter((key(record), start) for record in records for start in window.starts(record[2]))
    counts.side_output("late").write(sink := Collect(), parallelism=1)
    made.expected[sink.channel] = (f"late for {window} after calls", Counter())
    _write(made, Place(counts, [(k, start, start + window.size, n) for (k, start), n in expected.items()]), rng)


_CALLS: tuple[Callable[[RandomFlow, Place, random.Random, int], None], ...] = (_calls, _calls, _calls_before_windows)


# --- two inputs ----------------------------------------------------------------------------------------------------


class Pairs(CoProcessFunction):
    """Each record of one input with each of the other that has the same key."""

    def process1(self, ctx: ProcessContext, key: Any, record: Any) -> list[Any]:
        ctx.list_state("first").append(record)
        return [(record, other) for other in ctx.list_state("second")]

    def process2(self, ctx: ProcessContext, key: Any, record: Any) -> list[Any]:
        ctx.list_state("second").append(record)
        return [(other, record) for other in ctx.list_state("first")]


def _pairs(made: RandomFlow, a: Place, b: Place, rng: random.Random) -> None:
    """All pairs of two inputs, or of a stream with itself."""
    salt, keys = rng.randrange(100), rng.choice((3, 50))
    key = lambda record: mix(record, salt) % keys
    expected = [(x, y) for x in a.records for y in b.records if key(x) == key(y)]
    if len(expected) > RECORDS_MAX:
        return
    out = a.stream.key_by(key).connect(b.stream.key_by(key)).process(Pairs(), parallelism=rng.randrange(1, 4))
    _write(made, Place(out, expected), rng)


class Told(BroadcastProcessFunction):
    """Notes all that it is told; each task says at the end what it knows. Keyed records are counted."""

    def process(self, ctx: ProcessContext, key: Any, record: Any) -> list[Any]:
        count = ctx.value_state("count")
        count.set(count.get(0) + 1)
        return [("counted", key, count.get())]

    def process_broadcast(self, ctx: ProcessContext, record: Any) -> None:
        part = mix(record, 0) % 7
        ctx.broadcast[part] = ctx.broadcast.get(part, 0) + 1

    def finish(self, ctx: ProcessContext) -> list[Any]:
        return [("told", tuple(sorted(ctx.broadcast.items())))]


def _told(made: RandomFlow, a: Place, b: Place, rng: random.Random) -> None:
    """A map that all tasks have alike."""
    salt, keys, parallelism = rng.randrange(100), rng.choice((3, 50)), rng.randrange(1, 4)
    key = lambda record: mix(record, salt) % keys
    out = a.stream.key_by(key).connect(b.stream.broadcast()).process(Told(), parallelism=parallelism)
    counts = Counter(map(key, a.records))
    told = Counter(mix(record, 0) % 7 for record in b.records)
    expected = [("counted", k, i + 1) for k, n in counts.items() for i in range(n)]
    expected += [("told", tuple(sorted(told.items())))] * parallelism
    _write(made, Place(out, expected), rng)


_TWO_INPUTS: tuple[Callable[[RandomFlow, Place, Place, random.Random], None], ...] = (_pairs, _told)


def _timed_streams(made: RandomFlow, rng: random.Random, seed: int, several: int = 1) -> list[tuple[Stream, list[Any]]]:
    """Streams of (source, number, time) records, no further out of order than they say."""
    found = []
    for source in range(several):
        n, disorder = rng.choice((0, 1, 30, 60)), rng.choice((0, 10, 50))
        times = [i * SPAN // max(1, n) + rng.randrange(-disorder, disorder + 1) // 2 for i in range(n)]
        some = [(source, i, time) for i, time in enumerate(times)]
        read = made.flow.read(Trickle([some], seed), parallelism=1)
        stream = read.forward().watermark(2, out_of_orderness_s=disorder / 1000, parallelism=1)
        found.append((_on_the_way(stream, rng), some))
    return found


def _sessions(made: RandomFlow, rng: random.Random, seed: int) -> None:
    """Sessions of one stream, as all kinds of window functions see them."""
    stream, records = _timed_streams(made, rng, seed)[0]
    salt, keys, gap = rng.randrange(100), rng.choice((1, 3, 20)), rng.choice((1, 7, 40))
    key = lambda record: mix(record, salt) % keys
    sessions: list[tuple[int, list[Any]]] = []
    for k in range(keys):
        mine = sorted((r for r in records if key(r) == k), key=lambda r: r[2])
        for record in mine:
            if sessions and sessions[-1][0] == k and record[2] - sessions[-1][1][-1][2] < gap:
                sessions[-1][1].append(record)
            else:
                sessions.append((k, [record]))
    window = stream.key_by(key).window(Session(gap / 1000), time=2, lateness_s=rng.choice((0.0, 0.02)))
    parallelism = rng.randrange(1, 4)
    ends = [(k, some[0][2], some[-1][2] + gap) for k, some in sessions]
    what = rng.choice(("count", "reduce", "collect", "process"))
    if what == "count":
        out = window.count(parallelism=parallelism)
        results: list[Any] = [len(some) for _, some in sessions]
    elif what == "reduce":
        out = window.reduce(max, parallelism=parallelism)
        results = [max(some) for _, some in sessions]
    else:
        work = lambda ctx, key, window, records: [(key, *window, tuple(sorted(records)))]
        out = (
            window.process(work, parallelism=parallelism)
            if what == "process"
            else window.collect(parallelism=parallelism).map(
                lambda r: (*r[:3], tuple(sorted(r[3]))), parallelism=parallelism
            )
        )
        results = [tuple(sorted(some)) for _, some in sessions]
    _write(made, Place(out, [(*end, result) for end, result in zip(ends, results, strict=True)]), rng)


def _by_count(made: RandomFlow, rng: random.Random, seed: int) -> None:
    """Windows of so many records of a key, and how many early results the global window has."""
    stream, records = _timed_streams(made, rng, seed)[0]
    salt, keys, size = rng.randrange(100), rng.choice((1, 3, 20)), rng.choice((1, 2, 7))
    key = lambda record: mix(record, salt) % keys
    counts = Counter(map(key, records))
    if rng.random() < 0.5:
        slide = rng.randrange(1, size + 1)
        out = stream.key_by(key).window(CountWindow(size, slide)).count(parallelism=rng.randrange(1, 4))
        expected = [(k, at, at + size, size) for k, n in counts.items() for at in range(0, n, slide) if at + size <= n]
    else:
        window = stream.key_by(key).window(GlobalWindow(), early_count=size, updates="retract")
        out = window.count(parallelism=rng.randrange(1, 4))
        expected = []
        for k, n in counts.items():
            said = [*range(size, n + 1, size), *([n] if n % size else [])]
            expected += [(k, None, None, m, 1) for m in said] + [(k, None, None, m, -1) for m in said[:-1]]
    _write(made, Place(out, expected), rng)


def _joined(made: RandomFlow, rng: random.Random, seed: int) -> None:
    """A join of two streams, in windows, at intervals or with versions."""
    (a, lefts), (b, rights) = _timed_streams(made, rng, seed, several=2)
    salt, keys, parallelism = rng.randrange(100), rng.choice((1, 3, 20)), rng.randrange(1, 4)
    key = lambda record: mix(record[1], salt) % keys
    first, second = a.key_by(key), b.key_by(key)
    what = rng.choice(("window", "interval", "temporal"))
    how: Any = rng.choice(("inner", "left") if what == "temporal" else ("inner", "left", "right", "full"))
    if what == "temporal":
        out = first.temporal_join(second, how=how, time=2, other_time=2, parallelism=parallelism)
        pairs: list[Any] = []
        for left in lefts:
            versions = [right for right in rights if key(right) == key(left) and right[2] <= left[2]]
            last = max((right[2] for right in versions), default=None)
            # Of versions of one time any may be the last that came.
            pairs.append((left, last))
        pairs = [pair for pair in pairs if pair[1] is not None or how == "left"]
        out = out.map(lambda pair: (pair[0], None if pair[1] is None else pair[1][2]), parallelism=parallelism)
        _write(made, Place(out, pairs), rng)
        return
    if what == "window":
        window = _window(rng)
        out = first.join(second, window, how=how, time=2, other_time=2, parallelism=parallelism)
        match = lambda x, y: [start for start in window.starts(x[2]) if start in window.starts(y[2])]
        alone_left = lambda x: [
            s for s in window.starts(x[2]) if not any(key(x) == key(y) and s in match(x, y) for y in rights)
        ]
        alone_right = lambda y: [
            s for s in window.starts(y[2]) if not any(key(x) == key(y) and s in match(x, y) for x in lefts)
        ]
    else:
        lower, upper = sorted(rng.choice((-100, -20, 0, 5, 50)) for _ in range(2))
        out = first.interval_join(
            second, lower_s=lower / 1000, upper_s=upper / 1000, how=how, time=2, other_time=2, parallelism=parallelism
        )
        match = lambda x, y: [0] if lower <= y[2] - x[2] <= upper else []
        alone_left = lambda x: [] if any(key(x) == key(y) and match(x, y) for y in rights) else [0]
        alone_right = lambda y: [] if any(key(x) == key(y) and match(x, y) for x in lefts) else [0]
    expected: list[Any] = [(x, y) for x in lefts for y in rights if key(x) == key(y) for _ in match(x, y)]
    if how in ("left", "full"):
        expected += [(x, None) for x in lefts for _ in alone_left(x)]
    if how in ("right", "full"):
        expected += [(None, y) for y in rights for _ in alone_right(y)]
    _write(made, Place(out, expected), rng)


_TIMED: tuple[Callable[[RandomFlow, random.Random, int], None], ...] = (_sessions, _by_count, _joined, _joined)


def _write(made: RandomFlow, place: Place, rng: random.Random) -> None:
    stream, records, parallelism = _grouped(place, rng)
    sink = Collect()
    stream.write(sink, parallelism=parallelism)
    place.used = True
    made.expected[sink.channel] = (f"sink of {[tap.operator for tap in place.stream._taps]}", Counter(records))
