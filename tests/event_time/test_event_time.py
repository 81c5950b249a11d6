"""Watermarks: what they are worth, that they never overtake records, and that nobody forgets one."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.runtime.epochs.manifest import Blob, TaskEntry
from penstock.runtime.epochs.restore import read_changed
from penstock.runtime.epochs.snapshot import encode_snapshot
from penstock.runtime.errors import FlowError
from penstock.runtime.event_time.watermark import END_OF_TIME, IDLE, TIME_MAX, Watermark, Watermarks, as_ms, duration_ms
from penstock.runtime.exchange.inbox import Inbox
from penstock.runtime.exchange.log import OutLog
from penstock.runtime.exchange.message import WATERMARK, address, signal
from penstock.runtime.exchange.output_cache import OutputCaches
from penstock.runtime.operators.base import Stage, StageContext
from penstock.runtime.operators.process import ProcessContext, ProcessFunction
from penstock.runtime.operators.watermarks import MakeWatermarks
from penstock.runtime.program.plan import rescaled
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.sources.base import Reader, Source, SourceContext, Split
from penstock.runtime.state.keyed import SavedState
from tests.exchange.test_channel import Wire, one_log, read
from tests.runtime.sim import Cluster, Trickle, small_steps

# --- a task's watermark --------------------------------------------------------------------------------------------

marks_of = st.lists(
    st.tuples(st.integers(0, 2), st.integers(-50, 50) | st.sampled_from((IDLE, END_OF_TIME))), max_size=40
)


@given(marks_of, st.integers(1, 3))
def test_a_tasks_watermark_is_the_least_of_its_channels(said: list[tuple[int, int]], channels: int) -> None:
    """Whatever they say: of those that are neither idle nor ended, and it never goes back. When none of these is left
    it comes to the greatest that was said, and then falls silent."""
    marks, last, greatest, most = Watermarks(), {}, -math.inf, -math.inf
    for channel, value in said:
        channel %= channels  # noqa: PLW2901
        if last.get(channel) == END_OF_TIME:
            continue
        last[channel] = value
        if value not in (IDLE, END_OF_TIME):
            most = max(most, value)
        before = marks.current
        changed = marks.take(channel, value, range(channels))
        expected: int | None
        again = False
        if len(last) < channels:
            expected = None
        elif all(mark == END_OF_TIME for mark in last.values()):
            expected = END_OF_TIME
        elif active := [mark for mark in last.values() if mark not in (IDLE, END_OF_TIME)]:
            greatest = max(greatest, min(active))
            expected = int(greatest)
        elif most > greatest:
            expected, greatest, again = int(most), most, True
        else:
            expected = IDLE
        assert marks.current == expected
        assert changed == (expected != before)
        assert marks.again == again
        if again:
            assert marks.take(channel, value, range(channels))
            assert marks.current == IDLE
            assert not marks.again


def test_an_idle_channel_keeps_the_end_of_time_away() -> None:
    """It may yet have records, which would all be late."""
    marks = Watermarks()
    marks.take(0, 10, (0, 1))
    marks.take(1, 20, (0, 1))
    assert marks.current == 10
    assert marks.take(0, IDLE, (0, 1))
    assert marks.current == 20
    assert marks.take(1, END_OF_TIME, (0, 1))
    assert marks.current == IDLE
    assert marks.take(0, 15, (0, 1))
    assert marks.current == 20, "not back to what was before the silence"
    assert marks.take(0, END_OF_TIME, (0, 1))
    assert marks.current == END_OF_TIME


# --- times and durations -------------------------------------------------------------------------------------------

BEFORE_1970 = datetime(1969, 12, 31, 23, 59, 59, 999_500, timezone.utc)


@pytest.mark.parametrize(
    ("time", "ms"),
    [
        (0, 0),
        (-5, -5),
        (TIME_MAX, TIME_MAX),
        (1.9, 1),
        (-0.5, -1),
        (datetime(1970, 1, 1, tzinfo=timezone.utc), 0),
        (datetime(1970, 1, 1, 1, tzinfo=timezone(timedelta(hours=1))), 0),
        (datetime(2024, 2, 29, 12, 0, 0, 1999, timezone.utc), 1709208000001),
        (BEFORE_1970, -1),
    ],
)
def test_a_time_in_milliseconds(time: Any, ms: int) -> None:
    assert as_ms(time) == ms
    assert type(as_ms(time)) is int


@pytest.mark.parametrize(
    ("time", "error", "message"),
    [
        (None, TypeError, "must be milliseconds since 1970 or a datetime with a time zone, not None"),
        (True, TypeError, "not True"),
        ("2024-01-01", TypeError, "not '2024-01-01'"),
        (datetime(2024, 1, 1), TypeError, "has no time zone; use an aware datetime, or milliseconds since 1970"),
        (math.nan, ValueError, "the time nan is not one in milliseconds since 1970"),
        (-math.inf, ValueError, "the time -inf"),
        (TIME_MAX + 1, ValueError, "is not one in milliseconds"),
        (-(10**30), ValueError, "is not one in milliseconds"),
    ],
)
def test_what_is_no_time(time: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_ms(time)


def test_every_whole_millisecond_can_be_given_in_seconds() -> None:
    """Also 1.001, which times 1000 is not quite 1001."""
    for ms in [*range(1, 20_000), *range(86_400_000, 86_400_500), 10**12 + 1]:
        assert duration_ms(ms / 1000, "it") == ms
        assert duration_ms(timedelta(milliseconds=ms), "it") == ms


@pytest.mark.parametrize(
    ("duration", "message"),
    [
        (0, "it: 0; it must be whole milliseconds, at least 1"),
        (-1, "at least 1"),
        (0.0004, "it: 0.0004; it must be whole milliseconds"),
        (1.0005, "whole milliseconds"),
        (timedelta(microseconds=1500), "whole milliseconds"),
        (math.nan, "whole milliseconds"),
        (math.inf, "whole milliseconds"),
        (1e30, "whole milliseconds"),
        (True, "it: True; give seconds or a timedelta"),
        ("5", "give seconds or a timedelta"),
        (None, "give seconds or a timedelta"),
    ],
)
def test_what_is_no_duration(duration: Any, message: str) -> None:
    with pytest.raises(FlowError, match=message):
        duration_ms(duration, "it")
    assert duration_ms(0, "it", least=0) == 0


# --- order ---------------------------------------------------------------------------------------------------------


def test_in_the_inbox_watermarks_keep_their_place_and_are_held_with_what_follows_a_barrier() -> None:
    inbox = Inbox()
    inbox.open = {1, 2}
    inbox.put(1, ["a"], 0, 1)
    inbox.put(1, Watermark(5), 0, 0)
    inbox.put(1, ["b"], 0, 1)
    inbox.put_barrier(1, 7)
    inbox.put(1, Watermark(6), 0, 0)
    inbox.put(1, ["c"], 0, 1)
    inbox.put(2, Watermark(3), 0, 0)

    def ready() -> list[Any]:
        found = [e[1].value if isinstance(e[1], Watermark) else e[1] for e in inbox.ready]
        inbox.ready.clear()
        return found

    inbox.put_barrier(2, 7)
    assert not inbox.aligned, "the watermarks before it are still to be taken up"
    assert ready() == [["a"], 5, ["b"], 3]
    assert inbox.aligned
    inbox.release()
    assert ready() == [6, ["c"]]


class Target:
    """A receiving task: what it is told."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def receive(self, channel: int, batch: list[Any], stamp: int, cost: int) -> None:
        self.got += batch

    def receive_watermark(self, channel: int, value: int) -> None:
        self.got.append(Watermark(value))

    def receive_barrier(self, channel: int, epoch: int) -> None:
        self.got.append(("barrier", epoch))

    def receive_end(self, channel: int) -> None:
        self.got.append("end")

    def said(self) -> list[Any]:
        got, self.got = self.got, []
        return [one.value if isinstance(one, Watermark) else one for one in got]


def channel_of(local: bool, window: int, output_caches: OutputCaches | None) -> tuple[OutLog, Callable[[], list[Any]]]:
    """The log of a channel, and a function that says what has come by it since it was asked last: records, barriers as
    pairs, watermarks as numbers."""
    errors = ErrorHandler("a -> b", "fail", None, None)
    cache = output_caches.cache() if output_caches is not None else None
    target = Target()
    if local:
        return one_log(Wire(), errors, window, cache, receiver=target), target.said
    wire = Wire()

    def said() -> list[Any]:
        for _, message in wire.receive(0):
            kind, channel, stamp, _, batch = read(message)
            if batch is not None:
                target.receive(channel, batch, stamp, 0)  # type: ignore[arg-type]
            else:
                (target.receive_watermark if kind == WATERMARK else target.receive_barrier)(channel, stamp)
        return target.said()

    return one_log(wire, errors, window, cache), said


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("window", [1, 60, 100_000])
def test_a_watermark_overtakes_no_records_that_wait_for_credit(local: bool, window: int) -> None:
    channel, said = channel_of(local, window, None)
    pushed: list[Any] = []
    for i in range(10):
        channel.push(["a" * 30, f"b{i}"], 0)
        channel.watermark(i)
        pushed += ["a" * 30, f"b{i}", i]
    got: list[Any] = []
    for _ in range(100):
        done = channel.flush()
        got += said()
        assert got == pushed[: len(got)]
        if done:
            break
        channel.channels[0].outstanding = 0
    assert got == pushed


@pytest.mark.parametrize("value", [0, -1, 1_700_000_000_123, -(1 << 61), IDLE, END_OF_TIME])
def test_a_watermark_on_the_wire(value: int) -> None:
    assert read(address([(7, 9)], 1) + signal(WATERMARK, value)) == (WATERMARK, 7, value, 9, None)


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("sent", [True, False])
def test_a_receiver_that_goes_back_learns_the_last_watermark_of_a_complete_epoch(local: bool, sent: bool) -> None:
    channel, said = channel_of(local, 100_000, OutputCaches())
    channel.push(["a"], 0)
    channel.watermark(4)
    channel.watermark(5)
    channel.push(["b"], 0)
    channel.barrier(1)
    channel.push(["c"], 0)
    channel.watermark(8)
    if sent:
        channel.flush()
        assert said() == ["a", 4, 5, "b", ("barrier", 1), "c", 8]
    else:
        channel.disconnect(channel.channels[0])
        channel.flush()
    channel.complete(1)
    for generation in (2, 3):
        channel.disconnect(channel.channels[0])
        channel.connect(channel.channels[0], generation)
        assert channel.flush()
        assert said() == [5, "c", 8]
    channel.barrier(2)
    channel.barrier(3)
    channel.flush()
    channel.complete(3)
    channel.disconnect(channel.channels[0])
    channel.connect(channel.channels[0], 4)
    channel.flush()
    assert [one for one in said() if not isinstance(one, tuple)] == [8], "also when it is epochs old"


def test_watermarks_and_records_keep_their_order_through_workers_and_rings() -> None:
    """The ledger of the simulation compares what each channel was given and what came out of it."""
    for seed in range(20):
        rng = random.Random(seed)
        parts = [[(i % 5, 10 * i + rng.randrange(30), i) for i in range(80)] for _ in range(3)]
        flow = ps.Flow("ordered", parallelism=2, chaining=rng.random() < 0.5)
        stream = flow.read(Trickle(parts, seed), parallelism=3).watermark(1, out_of_orderness_s=0.03, parallelism=3)
        stream = stream.rebalance().map(tuple).filter(bool, parallelism=1)
        keyed = stream.key_by(0).window(ps.Tumbling(0.05), time=1)
        counts = keyed.count(parallelism=3)
        counts.write(sink := ps.sinks.Collect(), parallelism=1)
        counts.side_output("late").write(late := ps.sinks.Collect(), parallelism=1)
        with small_steps(seed):
            placed = {task.number: rng.randrange(3) for task in flow.plan().tasks} | {0: 0, 1: 1, 2: 2}
            cluster = Cluster(flow, placed, seed=seed, capacity=4096, window=rng.choice((1, 100)))
            outputs = cluster.run()
        assert outputs[late.channel] == [], f"seed {seed}"
        assert sum(n for *_, n in outputs[sink.channel]) == 240, f"seed {seed}"
        assert len({result[:2] for result in outputs[sink.channel]}) == len(outputs[sink.channel]), f"seed {seed}"


def test_a_flow_without_windows_has_watermarks_to_no_effect() -> None:
    """They are not sent: nobody would take them."""
    flow = ps.Flow("unused", parallelism=2, chaining=False)
    flow.read(Trickle([[1, 2, 3], [4, 5]], 1)).watermark(lambda record: record).rebalance().map(
        lambda record: -record
    ).write(ps.sinks.Null(), name="out", parallelism=1)
    assert sorted(ps.testing.run(flow)["out"]) == [-5, -4, -3, -2, -1]


class LastWords(ProcessFunction):
    """Says at the end what it has had."""

    def process(self, ctx: ProcessContext, key: Any, record: Any) -> None:
        ctx.set([*ctx.get([]), record])

    def finish(self, ctx: ProcessContext) -> list[Any]:
        return [record for records in ctx.state.values() for record in records]


@pytest.mark.parametrize("parallelism", [1, 2])
@pytest.mark.parametrize("chaining", [True, False])
def test_what_is_said_at_the_end_of_the_input_is_not_late(parallelism: int, chaining: bool) -> None:
    """The end of time comes after the last outputs of all tasks, and of all stages of one task."""
    flow = ps.Flow("last", parallelism=parallelism, chaining=chaining)
    stream = flow.read(Trickle([], 1), name="in", parallelism=1).key_by(0).process(LastWords())
    counts = stream.watermark(1).key_by(0).window(ps.Tumbling(0.01)).count(name="counts")
    counts.write(ps.sinks.Null(), name="out", parallelism=1)
    counts.side_output("late").write(ps.sinks.Null(), name="late", parallelism=1)
    found = ps.testing.run(flow, {"in": [("a", 1), ("b", 2), ("a", 3)]}, parallelism=parallelism)
    assert sorted(found["out"]) == [("a", 0, 10, 2), ("b", 0, 10, 1)]
    assert found["late"] == []


# --- silence -------------------------------------------------------------------------------------------------------


class Clock:
    """The time, as the test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def marking(clock: Clock, grain: int = 1, **options: Any) -> Stage:
    operator = MakeWatermarks(lambda record: record, **options)
    context = StageContext(operator, wall=clock)
    context.time_grain = grain
    stage = operator.stage(context)
    stage.open()
    return stage


def test_a_task_without_input_falls_silent_and_comes_back() -> None:
    clock = Clock()
    stage = marking(clock, out_of_orderness=0.002, idle=5)
    assert stage.watermark(None) is None
    stage.run([7])
    assert stage.watermark(None) == 5
    assert stage.next_timer() == 105.0
    clock.now = 104.0
    stage.run([3])
    list(stage.fire(clock.now))
    clock.now = 109.0
    assert stage.next_timer() == clock.now
    for _ in range(2):  # between the two an input that waited would have had its turn
        assert list(stage.fire(clock.now)) == []
    assert stage.watermark(None) == IDLE
    assert stage.next_timer() is None
    stage.run([1])
    assert stage.watermark(None) == 5
    assert stage.watermark(END_OF_TIME) == END_OF_TIME


@given(st.data(), st.integers(1, 5), st.booleans())
def test_no_record_is_late_that_was_not_late_in_its_split(data: st.DataObject, count: int, one_by_one: bool) -> None:
    """Splits are read in any order, and come to other tasks at any moment. The times within a split are in order. A
    split may be empty."""
    times = {f"s{n}": sorted(data.draw(st.lists(st.integers(0, 100), max_size=12))) for n in range(count)}
    at = dict.fromkeys(times, 0)
    tasks: list[tuple[Any, list[str]]] = []
    reached: int | None = None  # the watermark of who receives from all tasks

    def place(saved: SavedState | None) -> None:
        shares: list[list[str]] = [[] for _ in range(data.draw(st.integers(1, 3)))]
        for name in times:
            data.draw(st.sampled_from(shares)).append(name)
        tasks.clear()
        for mine in shares:
            stage: Any = marking(Clock())
            stage.reads(mine)
            if saved is not None:
                stage.restore(1, saved)
            tasks.append((stage, mine))

    def has_ended(name: str) -> bool:
        return at[name] == len(times[name])

    def marks() -> list[int | None]:
        ended = [all(map(has_ended, mine)) for _, mine in tasks]
        return [END_OF_TIME if end else stage.watermark(None) for end, (stage, _) in zip(ended, tasks, strict=True)]

    place(None)
    while not all(map(has_ended, times)):
        if data.draw(st.integers(0, 4)) == 0:
            own = [pickle.loads(pickle.dumps(stage.snapshot(1, True))).own for stage, _ in tasks]
            place(SavedState(own=own))
        stage, mine = data.draw(st.sampled_from(tasks))
        left = [name for name in mine if not has_ended(name)]
        if not left:
            continue
        name = left[0] if one_by_one else data.draw(st.sampled_from(left))
        size = data.draw(st.integers(1, 4))
        records = times[name][at[name] : at[name] + size]
        assert reached is None or records[0] >= reached, "a record is late"
        at[name] += len(records)
        stage.come_from(name, has_ended)
        stage.run(records)
        now = marks()
        if None not in now:
            least = min(mark for mark in now if mark is not None)
            reached = least if reached is None else max(reached, least)
    assert all(mark == END_OF_TIME for mark in marks())


@pytest.mark.parametrize("endless", [True, False])
def test_a_silent_split_of_an_endless_source_holds_up_no_window(endless: bool) -> None:
    """The splits of a bounded source are read one after the other, so one of which no record comes is not idle."""
    clock = Clock()
    stage: Any = marking(clock, idle=5)
    stage.reads(["a", "b"], endless=endless)

    def comes(split: str, time: int, now: float) -> int | None:
        clock.now = now
        stage.come_from(split, lambda name: False)
        stage.run([time])
        mark: int | None = stage.watermark(None)
        return mark

    assert comes("a", 7, 104.0) is None
    assert comes("a", 9, 106.0) == (9 if endless else None)
    assert comes("b", 3, 107.0) == (9 if endless else 3)
    assert comes("a", 12, 108.0) == (9 if endless else 3)
    assert comes("a", 20, 113.0) == (20 if endless else 3)


def test_a_task_that_was_kept_from_reading_is_not_silent() -> None:
    clock = Clock()
    stage = marking(clock, idle=5)
    stage.run([7])
    clock.now = 200.0  # blocked meanwhile
    list(stage.fire(clock.now))
    assert stage.watermark(None) == 7
    stage.run([8])
    list(stage.fire(clock.now))
    assert stage.watermark(None) == 8


def test_without_idle_s_silence_holds_the_windows_up() -> None:
    stage = marking(Clock())
    assert not stage.timed
    assert stage.next_timer() is None
    stage.run([7])
    assert stage.watermark(None) == 7


class Silent(Source):
    """Has nothing, and does not end before the test says so."""

    bounded = True

    def __init__(self, over: Callable[[], bool]) -> None:
        self.over = over

    def splits(self, parallelism: int) -> list[Split]:
        return [Split("silent")]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        return _SilentReader(self.over)


class _SilentReader(Reader):
    def __init__(self, over: Callable[[], bool]) -> None:
        self._over = over

    @property
    def finished(self) -> bool:  # type: ignore[override]
        return self._over()

    def read(self, limit: int) -> list[Any]:
        return []

    def ready_in(self) -> float | None:
        return 0.001

    def offsets(self) -> dict[str, Any]:
        return {}


OUT: list[Any] = []


def test_one_silent_source_of_two_holds_up_no_window() -> None:
    """It ends when it sees that the other's windows have closed: it would else never be."""
    OUT.clear()
    flow = ps.Flow("silent", parallelism=1)
    full = flow.read(Trickle([[(0, i) for i in range(100)]], 1)).watermark(1)
    silent = flow.read(Silent(lambda: len(OUT) >= 5)).watermark(1, idle_s=0.005)
    counts = full.union(silent).key_by(0).window(ps.Tumbling(0.01), time=1).count()
    counts.map(lambda result: OUT.append(result) or result).write(sink := ps.sinks.Collect())
    with small_steps(1):
        cluster = Cluster(flow, {task.number: 0 for task in flow.plan().tasks}, seed=1, capacity=4096, window=1000)
        ticks = count(1)
        for task in cluster.tasks:
            task.passage.wall = lambda: next(ticks) / 1000  # whoever looks at the clock finds a millisecond gone
            for stage in task.stages:
                stage.context.wall = task.passage.wall
        outputs = cluster.run()
    assert outputs[sink.channel] == [(0, start, start + 10, 10) for start in range(0, 100, 10)]


# --- grain ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-10_000, 10_000), min_size=1), st.integers(1, 500), st.integers(0, 300))
def test_watermarks_are_rounded_to_the_grain_and_delay_no_window(times: list[int], grain: int, slack: int) -> None:
    stage = marking(Clock(), grain, out_of_orderness=slack / 1000)
    for i, time in enumerate(times):
        stage.run([time])
        mark = stage.watermark(None)
        exact = max(times[: i + 1]) - slack
        assert mark is not None
        assert mark % grain == 0
        assert mark <= exact < mark + grain, "an end that is a multiple of the grain is reached at the same record"


def test_the_grain_is_that_of_all_windows_of_the_flow() -> None:
    flow = ps.Flow("grain")
    assert flow.read(Trickle([], 1)).watermark(0).write(ps.sinks.Null()) is not None
    assert flow.plan().time_grain is None
    stream = flow.read(Trickle([], 1)).watermark(0)
    stream.key_by(0).window(ps.Sliding(12, 4, 8)).count().write(ps.sinks.Null())
    assert flow.plan().time_grain == 4000
    stream.key_by(0).window(ps.Tumbling(12, 6), lateness_s=10).count().write(ps.sinks.Null())
    assert flow.plan().time_grain == 2000


# --- going back ----------------------------------------------------------------------------------------------------


def entries_of(plan: Any, greatest: dict[int, int | None], ended: set[int]) -> list[TaskEntry]:
    """What the tasks of the marking chain saved."""
    entries = []
    for task in plan.tasks:
        chain = plan.chains[task.chain]
        stage = MakeWatermarks(lambda record: record).stage(StageContext(chain.operators[-1]))
        if (time := greatest[task.index]) is not None:
            stage.run([time])
        states = {"marks": (stage.snapshot(1, True), (0, 0, 0, 0))}
        data = b"".join(encode_snapshot(states, plan.key_groups))
        entries.append(
            TaskEntry(
                number=task.number,
                name="marks",
                index=task.index,
                parallelism=chain.parallelism,
                operators=["marks"],
                finished=task.index in ended,
                groups=None,
                blobs=[Blob(f"snapshots/1-{task.number}", len(data), 0, data)],
            )
        )
    return entries


@pytest.mark.parametrize(
    ("greatest", "ended", "expected"),
    [
        ({0: 50, 1: 30}, set(), 30),
        ({0: 50, 1: 30}, {1}, 50),
        ({0: 50, 1: None}, set(), None),
        ({0: None, 1: None}, set(), None),
        ({0: 50, 1: 30}, {0, 1}, None),
    ],
)
def test_after_a_rescale_watermarks_continue_from_the_task_with_the_least_one(
    greatest: dict[int, int | None], ended: set[int], expected: int | None
) -> None:
    flow = ps.Flow("rescaled", chaining=False)
    flow.read(Trickle([], 1), parallelism=1).watermark(0, name="marks", parallelism=2).write(
        ps.sinks.Null(), parallelism=1
    )
    plan = flow.plan()
    chain = plan.chain_of("marks").index
    plan.tasks = [task for task in plan.tasks if task.chain == chain]
    entries = entries_of(plan, greatest, ended)
    after = rescaled(plan, "marks", 3)
    for task in after.tasks:
        states, *_ = read_changed(after, task, entries, lambda blob: bytes(blob.data or b""))
        stage = marking(Clock())
        stage.restore(1, states["marks"])
        assert stage.watermark(None) == expected


def test_a_task_that_goes_back_says_its_watermark_again() -> None:
    before, again = marking(Clock()), marking(Clock())
    before.run([41])
    state = before.snapshot(1, True)
    assert state is not None
    again.restore(1, SavedState(own=[state.own]))
    assert again.watermark(None) == 41
    fresh = marking(Clock())
    fresh.restore(1, SavedState())
    assert fresh.watermark(None) is None


# --- programs that make no sense, and what they look like ----------------------------------------------------------


def stream_of() -> ps.Stream:
    return ps.Flow("wrong").read(Trickle([], 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: stream_of().watermark(None), r"watermark\(None\): give a function, a field name or an index"),
        (lambda: stream_of().watermark(0, out_of_orderness_s=-1), "watermark': out_of_orderness_s: -1"),
        (lambda: stream_of().watermark(0, idle_s=0), "watermark': idle_s: 0; it must be whole milliseconds"),
        (lambda: stream_of().watermark(0).key_by(0).window(10), r"window\(\) needs windows, one of penstock.Tumbling"),
        (lambda: stream_of().key_by(0).window(ps.Tumbling(1)), r"window\(\) needs event time; put .watermark\(time"),
        (
            lambda: stream_of().watermark(0).map(int).key_by(0).window(ps.Tumbling(1)),
            r"records have changed since .watermark\(\); say where their time is: time=...",
        ),
        (
            lambda: stream_of().watermark(0).key_by(0).window(ps.Tumbling(1), lateness_s=-1).count(),
            "lateness_s: -1; it must be whole milliseconds, at least 0",
        ),
        (
            lambda: stream_of().watermark(0).key_by(0).window(ps.Tumbling(1)).count(emit="every"),
            "emit='every'; it must be 'final' or 'latest', of windows",
        ),
    ],
)
def test_event_time_that_makes_no_sense_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(FlowError, match=message):
        make()


@pytest.mark.parametrize("deep", [False, True])
def test_an_input_without_watermarks_would_hold_up_all_windows_and_is_refused(deep: bool) -> None:
    flow = ps.Flow("half")
    both = flow.read(Trickle([], 1)).watermark(0).union(flow.read(Trickle([], 1)))
    if deep:
        both = both.map(tuple)
    with pytest.raises(FlowError, match=r"put .watermark.* before it, for each of its inputs"):
        both.key_by(0).window(ps.Tumbling(1), time=0)
    both.watermark(0).key_by(0).window(ps.Tumbling(1)).count().write(ps.sinks.Null())


def test_the_plan_tells_of_watermarks_and_windows() -> None:
    flow = ps.Flow("told")
    stream = flow.read(Trickle([], 1)).watermark("at", out_of_orderness_s=2)
    windows = stream.key_by("ad").window(ps.Sliding(10, 5), time="at", lateness_s=timedelta(minutes=1))
    windows.sum("n", emit="latest").write(ps.sinks.Null())
    stream.key_by("ad").window(ps.Tumbling(10)).count().write(ps.sinks.Null())
    text = flow.explain(2)
    assert "watermark 'at' less 2000 ms  <- read" in text
    assert "sum in Sliding(10000 ms, every 5000 ms), 60000 ms late, emits latest  <- watermark (key)" in text
    assert "count in Tumbling(10000 ms), emits final  <- watermark (key)" in text
    assert "sum combined before sending" in text


# --- operators that emit records of earlier times ------------------------------------------------------------------


class Stored(ProcessFunction):
    """Emits each record 40 ms later, with its own time."""

    def process(self, ctx: ProcessContext, key: Any, record: Any) -> None:
        ctx.map_state("stored")[ctx.set_event_timer(record[1] + 40)] = record[1]

    def on_event_timer(self, ctx: ProcessContext, key: Any, at_ms: int) -> list[int]:
        return [ctx.map_state("stored").pop(at_ms)]


class Reminded(Stored):
    """Emits the times of timers."""

    def on_event_timer(self, ctx: ProcessContext, key: Any, at_ms: int) -> list[int]:
        return [at_ms]


async def _time_of(record: Any) -> int:
    time: int = record[1]
    return time


def _earliest(left: Any, right: Any) -> int:
    return min(_both(left, right))


def _both(left: Any, right: Any) -> list[int]:
    return [record[1] for record in (left, right) if record is not None]


def _unmatched(stream: Any) -> Any:
    return stream.filter(lambda pair: pair[1] is None).map(lambda pair: pair[0][1])


def _start(stream: Any) -> Any:
    return stream.map(lambda result: result[1])


# What is made of two keyed streams with times: a stream of times. None of them may be late.
EMITTERS: dict[str, Callable[[Any, Any], Any]] = {
    **{
        f"interval join from {lower} to {upper}": (
            lambda a, b, lower=lower, upper=upper: a.interval_join(
                b, lower_s=lower, upper_s=upper, how="full", fn=_both, name="emit"
            ).flat_map(list)
        )
        for lower, upper in ((0, 0.1), (-0.1, 0), (-0.03, 0.07), (0.02, 0.08), (-0.09, -0.04))
    },
    "anti-join": lambda a, b: _unmatched(a.interval_join(b, lower_s=0, upper_s=0.1, how="left", name="emit")),
    "temporal join": lambda a, b: a.temporal_join(b, how="left", fn=lambda left, right: left[1], name="emit"),
    "sessions": lambda a, b: _start(a.window(ps.Session(0.03)).count(name="emit")),
    "early sessions": lambda a, b: _start(a.window(ps.Session(0.03), early_count=1).count(name="emit")),
    "records of sessions": lambda a, b: a.window(ps.Session(0.03)).process(
        lambda ctx, key, window, records: [record[1] for record in records], name="emit"
    ),
    "tumbling windows": lambda a, b: _start(a.window(ps.Tumbling(0.07)).count(name="emit")),
    "sliding windows": lambda a, b: _start(a.window(ps.Sliding(0.07, 0.03, 0.01)).sum(1, name="emit")),
    "records of sliding windows": lambda a, b: a.window(ps.Sliding(0.07, 0.03)).process(
        lambda ctx, key, window, records: [record[1] for record in records], name="emit"
    ),
    "window join": lambda a, b: a.join(b, ps.Tumbling(0.07), how="full", fn=_earliest, name="emit"),
    "join of sessions": lambda a, b: a.join(b, ps.Session(0.03), how="full", fn=_earliest, name="emit"),
    "timers": lambda a, b: a.process(Reminded(), name="emit"),
    "stored records": lambda a, b: a.process(Stored(), hold_s=0.04, name="emit"),
    "stored records of two": lambda a, b: a.connect(b).process(
        lambda ctx, key, record: Stored().process(ctx, key, record),
        lambda ctx, key, record: Stored().process(ctx, key, record),
        on_event_timer=lambda ctx, key, at_ms: Stored().on_event_timer(ctx, key, at_ms),
        hold_s=0.04,
        name="emit",
    ),
}

# windows, and of how many of them each record is
BEHIND: dict[str, tuple[Any, int]] = {
    "tumbling": (ps.Tumbling(0.02), 1),
    "sliding": (ps.Sliding(0.02, 0.01), 2),
    "sessions": (ps.Session(0.01), 1),
}

# times of a source's records that are at most 30 ms out of order
out_of_order = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 30)), max_size=12).map(
    lambda drawn: [max(0, time - back) for time, back in sorted(drawn)]
)


@pytest.mark.parametrize("emitter", EMITTERS)
@settings(max_examples=settings.default.max_examples // 6)
@given(times=st.tuples(out_of_order, out_of_order), behind=st.sampled_from(sorted(BEHIND)), seed=st.integers())
def test_what_an_operator_emits_is_not_late_for_a_window(
    emitter: str, times: tuple[list[int], list[int]], behind: str, seed: int
) -> None:
    chance = random.Random(seed)
    flow = ps.Flow("behind")
    inputs = {name: [(chance.randrange(2), time) for time in each] for name, each in zip("ab", times, strict=True)}
    a, b = (
        flow.read(ps.sources.Memory([]), name=name)
        .watermark(1, out_of_orderness_s=0.03, name=f"{name} times")
        .key_by(0)
        for name in "ab"
    )
    for keyed in (a, b):
        keyed.process(lambda ctx, key, record: None).write(ps.sinks.Null())
    emitted = EMITTERS[emitter](a, b)
    emitted.write(ps.sinks.Collect(), name="emitted")
    window, of_window = BEHIND[behind]
    counts = emitted.key_by(lambda time: 0).window(window, time=lambda time: time).count(name="count")
    counts.write(ps.sinks.Collect(), name="counts")
    counts.side_output("late").write(ps.sinks.Collect(), name="late")
    order = chance.sample(["a"] * len(times[0]) + ["b"] * len(times[1]), sum(map(len, times)))
    out = ps.testing.run(flow, inputs, order=order)
    assert out["late"] == []
    assert sum(count for *_, count in out["counts"]) == of_window * len(out["emitted"])


@pytest.mark.parametrize("ordered", [True, False])
def test_the_results_of_calls_are_not_late_for_a_window(ordered: bool) -> None:
    flow = ps.Flow("behind")
    times = flow.read(ps.sources.Memory([]), name="in").watermark(1).map_async(_time_of, ordered=ordered)
    counts = times.key_by(lambda time: 0).window(ps.Tumbling(0.01), time=lambda time: time).count(name="count")
    counts.write(ps.sinks.Collect(), name="counts")
    assert ps.testing.run(flow, [(0, time) for time in range(100)])["counts"] == [
        (0, start, start + 10, 10) for start in range(0, 100, 10)
    ]
