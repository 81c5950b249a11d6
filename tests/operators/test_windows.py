"""Windows: their results against DuckDB, late records against a model in plain Python, state that goes with them."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import penstock as ps
from penstock.runtime.epochs.snapshot import Merged, encode_snapshot
from penstock.runtime.errors import FlowError, RecordError
from penstock.runtime.event_time.watermark import END_OF_TIME, IDLE, TIME_MAX
from penstock.runtime.event_time.windows import Sliding, Tumbling
from penstock.runtime.operators.base import Stage, StageContext
from penstock.runtime.operators.late import LATE
from penstock.runtime.operators.windowing import WindowAggregated
from penstock.runtime.records.batch import KeyedBatch
from penstock.runtime.records.key_groups import KeyGroups, partition
from penstock.runtime.records.userfunc import DEAD_LETTERS, OnError
from penstock.runtime.state.aggregate import Aggregate, Count, Max, Mean, Min, Sum
from penstock.runtime.state.keyed import SavedState
from tests.runtime.sim import Cluster, Trickle, small_steps

Record = tuple[int, int, int]  # key, time, value

AGGREGATES = ("count", "sum", "min", "max", "mean")


def window_of(size: int, slide: int, offset: int) -> Sliding:
    """A window of so many milliseconds."""
    if size == slide:
        return Tumbling(size / 1000, offset / 1000)
    return Sliding(size / 1000, slide / 1000, offset / 1000)


@dataclass(frozen=True)
class Windowing:
    """How records are put into windows; all in milliseconds."""

    size: int
    slide: int
    offset: int
    out_of_orderness: int
    lateness: int

    @property
    def window(self) -> Sliding:
        return window_of(self.size, self.slide, self.offset)

    @property
    def grain(self) -> int:
        return math.gcd(self.size, self.slide, self.offset, self.lateness)

    def starts(self, time: int) -> list[int]:
        """The starts of the windows of a time, by looking at all that could be; the last first."""
        near = range(time + 1, time - self.size - 1, -1)
        return [s for s in near if (s - self.offset) % self.slide == 0 and s <= time < s + self.size]


@st.composite
def windowings(draw: st.DrawFn, lateness: st.SearchStrategy[int] | None = None) -> Windowing:
    size = draw(st.integers(1, 40))
    slide = draw(st.integers(1, size)) if draw(st.booleans()) else size
    late = draw(st.integers(0, 60) if lateness is None else lateness)
    return Windowing(size, slide, draw(st.integers(0, 50)), draw(st.integers(0, 60)), late)


records_of = st.lists(st.tuples(st.integers(0, 3), st.integers(-150, 250), st.integers(-9, 9)), max_size=40)


# --- results, by DuckDB --------------------------------------------------------------------------------------------

DUCKDB = duckdb.connect()

RESULTS = """
    with placed as (
        select key, value, "offset" + slide * (floor((time - "offset") / slide)::bigint - step) as start, time, size
        from records, parameters, range(0, 50) as steps(step)
    )
    select key, start, start + any_value(size), {aggregate}
    from placed
    where start <= time and time < start + size
    group by key, start
"""

SQL = {"count": "count(*)", "sum": "sum(value)", "min": "min(value)", "max": "max(value)", "mean": "avg(value)"}


def by_duckdb(how: Windowing, records: Sequence[Record], what: str) -> dict[tuple[int, int], tuple[int, float]]:
    """(key, start) -> (end, result)."""
    columns = list(zip(*records, strict=True)) or [(), (), ()]
    schema = pa.schema([("key", pa.int64()), ("time", pa.int64()), ("value", pa.int64())])
    DUCKDB.register("records", pa.table([pa.array(column, pa.int64()) for column in columns], schema=schema))
    parameters = {"size": [how.size], "slide": [how.slide], "offset": [how.offset]}
    DUCKDB.register("parameters", pa.table(parameters))
    rows = DUCKDB.execute(RESULTS.format(aggregate=SQL[what])).fetchall()
    return {(key, start): (end, result) for key, start, end, result in rows}


def windowed(stream: ps.Stream, how: Windowing, what: str, **options: Any) -> ps.Stream:
    """A stream's results by windows."""
    marked = stream.watermark(1, out_of_orderness_s=how.out_of_orderness / 1000)
    windows = marked.key_by(0).window(how.window, lateness_s=how.lateness / 1000)
    return getattr(windows, what)(*([] if what == "count" else [2]), **options)  # type: ignore[no-any-return]


def last_results(out: list[Any]) -> dict[tuple[int, int], tuple[int, Any]]:
    return {(key, start): (end, result) for key, start, end, result in out}


def same(found: dict[Any, tuple[int, Any]], expected: dict[Any, tuple[int, Any]]) -> bool:
    """Means may differ in their last digit."""
    return found.keys() == expected.keys() and all(
        found[at][0] == end and math.isclose(found[at][1], result) for at, (end, result) in expected.items()
    )


@given(
    windowings(lateness=st.integers(600, 700)),
    records_of,
    st.sampled_from(AGGREGATES),
    st.sampled_from(("final", "latest")),
    st.lists(st.integers(1, 4), min_size=3, max_size=3),
    st.booleans(),
    st.integers(1, 1000),
)
def test_last_results_are_those_of_duckdb_when_nothing_is_late(
    how: Windowing,
    records: list[Record],
    what: str,
    emit: str,
    parallelism: list[int],
    chaining: bool,
    seed: int,
) -> None:
    rng = random.Random(seed)
    parts: list[list[Record]] = [[] for _ in range(parallelism[0])]
    for record in records:
        rng.choice(parts).append(record)
    flow = ps.Flow("windows", chaining=chaining)
    stream = flow.read(Trickle(parts, seed), parallelism=parallelism[0])
    if rng.random() < 0.5:
        stream = stream.rebalance().map(tuple, parallelism=parallelism[2])
    results = windowed(stream, how, what, emit=emit, parallelism=parallelism[1])
    results.write(ps.sinks.Null(), name="out", parallelism=1)
    with small_steps(seed):
        out = ps.testing.run(flow, batch_size=rng.choice((1, 3, 50)))["out"]
    expected = by_duckdb(how, records, what)
    found = last_results(out)
    assert same(found, expected), (found, expected)
    if records and emit == "final" and max(r[1] for r in records) - min(r[1] for r in records) < how.out_of_orderness:
        assert len(out) == len(expected), "no window could be closed before all records were there"


@given(windowings(), st.integers(-(10**15), 10**15))
def test_starts_are_all_windows_that_hold_the_time(how: Windowing, time: int) -> None:
    starts = list(how.window.starts(time))
    assert starts == how.starts(time)
    assert how.window.last_starts([time]) == starts[:1]
    assert all(at % how.window.grain == 0 for start in starts for at in (start, start + how.size))


# --- late records, by a model --------------------------------------------------------------------------------------


class Model:
    """One task's windows, record by record. An independent account of what watermarks.py and windowing.py say."""

    def __init__(self, how: Windowing, result: Callable[[list[int]], Any]) -> None:
        self.how = how
        self.result = result
        self.watermark: float = -math.inf
        self.greatest: float = -math.inf
        self.windows: dict[int, dict[int, list[int]]] = {}
        self.fired: set[int] = set()
        self.late: list[Record] = []
        self.out: list[Any] = []

    def take(self, record: Record) -> None:
        key, time, value = record
        how = self.how
        starts = [start for start in how.starts(time) if start + how.size + how.lateness > self.watermark]
        if not starts:
            self.late.append(record)
        for start in starts:
            self.windows.setdefault(start, {}).setdefault(key, []).append(value)
            if start + how.size <= self.watermark:
                self.fired.add(start)
                self.say(start, key)
        self.greatest = max(self.greatest, time)
        mark = self.greatest - how.out_of_orderness
        self.advance(mark - mark % how.grain)

    def advance(self, watermark: float) -> None:
        self.watermark = max(self.watermark, watermark)
        for start in sorted(self.windows):
            if start + self.how.size <= self.watermark and start not in self.fired:
                self.fired.add(start)
                for key in self.windows[start]:
                    self.say(start, key)
            if start + self.how.size + self.how.lateness <= self.watermark:
                del self.windows[start]

    def say(self, start: int, key: int) -> None:
        self.out.append((key, start, start + self.how.size, self.result(self.windows[start][key])))


RESULT: dict[str, Callable[[list[int]], Any]] = {
    "count": len,
    "sum": sum,
    "min": min,
    "max": max,
    "mean": lambda values: sum(values) / len(values),
}


@pytest.mark.parametrize("taken", [False, True])
def test_late_records_that_nobody_takes_are_told(caplog: pytest.LogCaptureFixture, taken: bool) -> None:
    flow = ps.Flow("twice")
    twice = [{"ms": ms} for ms in [*range(0, 100_000, 1000)] * 2]
    rows = flow.read(ps.sources.Memory(twice, splits=1)).watermark("ms")
    counts = rows.key_by(lambda row: 0).window(ps.Tumbling(10)).count(name="counts")
    counts.write(ps.sinks.Collect(), name="out")
    if taken:
        counts.side_output("late").write(ps.sinks.Collect(), name="late")
    out = ps.testing.run(flow)
    assert sum(row[3] for row in out["out"]) + 90 == 200
    assert len(caplog.messages) == (not taken)
    if taken:
        assert len(out["late"]) == 90
    else:
        assert "dropped: 90 at operator 'counts'. Give watermark() a larger out_of_orderness_s" in caplog.messages[0]
    ps.testing.run(flow, [{"ms": 1}])
    assert len(caplog.messages) == (not taken), "nothing was late"


@given(windowings(), records_of, st.sampled_from(AGGREGATES))
@example(Windowing(10, 10, 0, 0, 0), [(0, 9, 1), (0, 10, 1), (0, 9, 1), (0, 25, 1)], "count")
@example(Windowing(10, 3, 1, 0, 5), [(0, 9, 1), (0, 30, 1), (0, 19, 1), (0, 16, 1)], "sum")
def test_record_by_record_results_leave_when_they_must_and_late_records_are_told(
    how: Windowing, records: list[Record], what: str
) -> None:
    flow = ps.Flow("late")
    results = windowed(flow.read(Trickle([], 1), name="in"), how, what)
    results.write(ps.sinks.Null(), name="out")
    results.side_output("late").write(ps.sinks.Null(), name="late")
    found = ps.testing.run(flow, {"in": records})
    model = Model(how, RESULT[what])
    for record in records:
        model.take(record)
    model.advance(math.inf)
    assert found["late"] == model.late
    assert found["out"] == model.out
    assert not model.windows


# --- a stage alone -------------------------------------------------------------------------------------------------


def stage_of(
    how: Windowing,
    aggregate: Aggregate | None = None,
    emit: Any = "final",
    on_error: OnError = "fail",
    **context: Any,
) -> Stage:
    operator = WindowAggregated(
        aggregate or Count(), how.window, lambda record: record[1], how.lateness / 1000, emit, on_error=on_error
    )
    stage = operator.stage(StageContext(operator, **context))
    stage.open()
    return stage


def keyed(records: Sequence[Any]) -> KeyedBatch:
    return KeyedBatch([record[0] for record in records], list(records))


def advance(stage: Stage, watermark: int | None) -> list[Any]:
    pieces = list(stage.advance(watermark))
    assert all(pieces), "no piece is empty"
    return [result for piece in pieces for result in piece]


@given(windowings(), records_of, st.integers(0, 10**6))
def test_a_stage_counts_late_records_and_forgets_closed_windows(
    how: Windowing, records: list[Record], seed: int
) -> None:
    rng = random.Random(seed)
    stage, model = stage_of(how), Model(how, len)
    for record in records:
        model.out.clear()
        out = list(stage.run(keyed([record])))
        model.take(record)  # advances too
        mark = int(model.watermark)
        out += advance(stage, mark)
        if rng.random() < 0.2:
            assert advance(stage, rng.choice((None, IDLE, mark, mark - 1))) == []
        assert out == model.out
        assert stage.late == len(model.late)
        assert dict(stage._map.windows) == {
            start: {key: len(values) for key, values in window.items()} for start, window in model.windows.items()
        }
    model.out.clear()
    model.advance(math.inf)
    assert advance(stage, END_OF_TIME) == model.out
    assert not stage._map.windows
    assert stage.context.side[LATE] == model.late


@given(windowings(), records_of)
def test_partials_do_what_their_records_do(how: Windowing, records: list[Record]) -> None:
    """Also for windows of a record that are closed while others are open."""
    whole, combined = stage_of(how), stage_of(how)
    combiner = combined.context.operator.windowed
    for at in range(0, len(records), 3):
        some = keyed(records[at : at + 3])
        state = combiner.new_state()
        keys, values = combiner.prepare(some.keys, some.values, combined.errors)
        combiner.add(state, iter(keys), iter(values))
        keys, partials = combiner.shipped(state)
        assert sorted(combined.run(KeyedBatch(keys, partials, True))) == sorted(whole.run(some))
        mark = max(record[1] for record in records[: at + 3]) - how.out_of_orderness
        assert Counter(advance(combined, mark)) == Counter(advance(whole, mark))
        assert combined._map.windows == whole._map.windows
        assert combined.late or not whole.late


def test_results_leave_in_bounded_pieces() -> None:
    stage = stage_of(Windowing(10, 10, 0, 0, 0))
    stage.run(keyed([(key, 1, 0) for key in range(10_000)]))
    pieces = list(stage.advance(10))
    assert max(map(len, pieces)) <= 4096
    assert sorted(result for piece in pieces for result in piece) == [(key, 0, 10, 1) for key in range(10_000)]


def test_a_late_batch_makes_each_of_its_keys_leave_once() -> None:
    stage = stage_of(Windowing(10, 10, 0, 0, 100))
    assert stage.run(keyed([("a", 1), ("b", 2), ("a", 3)])) == []
    assert advance(stage, 10) == [("a", 0, 10, 2), ("b", 0, 10, 1)]
    assert stage.run(keyed([("a", 4), ("a", 5), ("c", 6), ("c", 11)])) == [("a", 0, 10, 4), ("c", 0, 10, 1)]
    assert advance(stage, 15) == []
    assert advance(stage, 20) == [("c", 10, 20, 1)]


def test_latest_results_leave_with_every_batch_and_not_again_at_the_end() -> None:
    stage = stage_of(Windowing(10, 5, 0, 0, 0), emit="latest")
    assert stage.run(keyed([("a", 7), ("a", 8)])) == [("a", 5, 15, 2), ("a", 0, 10, 2)]
    assert advance(stage, 10) == []
    assert stage.run(keyed([("a", 9)])) == [("a", 5, 15, 3)], "the other window is closed"
    assert stage.late == 0
    assert advance(stage, END_OF_TIME) == []
    assert not stage._map.windows


# --- snapshots -----------------------------------------------------------------------------------------------------

GROUPS = 8


class Saved:
    """What a stage has saved so far, as bytes."""

    def __init__(self) -> None:
        self.snapshots: list[bytes] = []

    def save(self, stage: Stage, whole: bool) -> None:
        whole = whole or not self.snapshots or stage.wants_whole()
        states = {"w": (stage.snapshot(len(self.snapshots) + 1, whole), (0, 0, 0, 0))}
        if whole:
            self.snapshots.clear()
        self.snapshots.append(b"".join(encode_snapshot(states, GROUPS)))


def owned(table: bytes, index: int) -> set[int]:
    return {group for group, owner in enumerate(memoryview(table).cast("H")) if owner == index}


def put_back(saved: list[Saved], groups: set[int] | None) -> SavedState:
    merged = Merged(GROUPS)
    for one in saved:
        merged.add_task(one.snapshots, groups)
    return merged.operators.get("w", SavedState())


@given(windowings(), records_of, st.integers(1, 3), st.integers(1, 3), st.integers(0, 10**6))
def test_a_job_that_goes_back_says_nothing_twice_and_forgets_nothing(
    how: Windowing, records: list[Record], before: int, after: int, seed: int
) -> None:
    """Tasks save at random, and at some point another number of tasks continues from what was saved."""
    rng = random.Random(seed)
    model = Model(how, len)
    stages = [stage_of(how, index=i, parallelism=before, epochs=True) for i in range(before)]
    saved = [Saved() for _ in stages]
    cut = rng.randrange(len(records) + 1)
    table = KeyGroups(GROUPS).table(before)
    out: list[Any] = []
    for i, record in enumerate(records):
        if i == cut or rng.random() < 0.2:
            for one, stage in zip(saved, stages, strict=True):
                one.save(stage, rng.random() < 0.2)
        if i == cut:
            old, table = table, KeyGroups(GROUPS).table(after)
            stages = [stage_of(how, index=i, parallelism=after, epochs=True) for i in range(after)]
            for index, stage in enumerate(stages):
                mine = owned(table, index)
                stage.restore(1, put_back([one for j, one in enumerate(saved) if mine & owned(old, j)], mine))
            saved = [Saved() for _ in stages]
        owner = task_of(record[0], table)
        out += stages[owner].run(keyed([record]))
        model.take(record)
        for stage in stages:
            out += advance(stage, int(model.watermark))
    for stage in stages:
        out += advance(stage, END_OF_TIME)
        assert not stage._map.windows
    model.advance(math.inf)
    assert Counter(out) == Counter(model.out)


def task_of(key: int, table: bytes) -> int:
    shares = partition([key], (), table, len(set(memoryview(table).cast("H"))))
    return next(i for i, share in enumerate(shares) if share[0])


def test_a_window_that_one_task_has_closed_and_another_not_leaves_once_after_a_rescale() -> None:
    """Channels that fall silent in different orders leave tasks with different watermarks at a barrier."""
    how = Windowing(10, 10, 0, 0, 0)
    ahead, behind = (stage_of(how, index=i, parallelism=2, epochs=True) for i in range(2))
    saved = [Saved(), Saved()]
    ahead.run(keyed([(0, 1)]))
    behind.run(keyed([(1, 2)]))
    assert advance(ahead, 10) == [(0, 0, 10, 1)]
    assert advance(behind, 0) == []
    for one, stage in zip(saved, (ahead, behind), strict=True):
        one.save(stage, True)
    both = stage_of(how, epochs=True)
    both.restore(1, put_back(saved, None))
    assert both.run(keyed([(0, 3)])) == []
    assert both.late == 1, "its window has said its result"
    assert advance(both, 10) == [(1, 0, 10, 1)]
    assert advance(both, 20) == []


def test_what_was_fired_before_the_snapshot_is_not_fired_again() -> None:
    how = Windowing(10, 10, 0, 0, 100)
    stage, saved = stage_of(how, epochs=True), Saved()
    stage.run(keyed([("a", 1)]))
    assert advance(stage, 10) == [("a", 0, 10, 1)]
    saved.save(stage, True)
    again = stage_of(how, epochs=True)
    again.restore(1, put_back([saved], None))
    assert advance(again, None) == advance(again, 10) == advance(again, 20) == []
    assert again.run(keyed([("a", 2)])) == [("a", 0, 10, 2)]
    assert again._map.windows
    assert advance(again, 110) == []
    assert not again._map.windows


# --- records that fail ---------------------------------------------------------------------------------------------

BAD_TIMES = [None, "noon", True, math.nan, math.inf, datetime(2020, 1, 1), TIME_MAX + 1, 10**30, -(10**30)]


def flow_of(on_error: OnError, parallelism: int = 1) -> ps.Flow:
    """Records are (key, time, value); the watermark does not depend on the time that the windows take."""
    flow = ps.Flow("bad", parallelism=parallelism)
    stream = flow.read(Trickle([], 1), name="in", parallelism=1).watermark(lambda record: 0)
    windows = stream.key_by(0).window(Sliding(0.01, 0.005), time=1)
    results = windows.sum(2, on_error=on_error, name="sums")
    results.write(ps.sinks.Null(), name="out", parallelism=1)
    if on_error == "dead_letter":
        results.dead_letters().write(ps.sinks.Null(), name="letters", parallelism=1)
    return flow


GOOD = [(0, 0, 1), (0, 3, 2), (1, 12, 3)]
GOOD_RESULTS = {(0, 0): (10, 3), (0, -5): (5, 3), (1, 10): (20, 3), (1, 5): (15, 3)}


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize("bad", BAD_TIMES, ids=repr)
def test_a_record_whose_time_is_none_fails_by_the_policy(bad: Any, parallelism: int) -> None:
    records = [GOOD[0], (0, bad, 5), *GOOD[1:]]
    with pytest.raises(RecordError, match=r"'sums(\.key_by)?' failed") as caught:
        ps.testing.run(flow_of("fail", parallelism), records, parallelism=parallelism, batch_size=4)
    assert caught.value.record == repr((0, records[1])), "it names the record"
    for batch_size in (1, 4):
        for policy in ("skip", "dead_letter"):
            flow = flow_of(policy, parallelism)  # type: ignore[arg-type]
            found = ps.testing.run(flow, records, parallelism=parallelism, batch_size=batch_size)
            assert last_results(found["out"]) == GOOD_RESULTS
            if policy == "dead_letter":
                (letter,) = found["letters"]
                assert repr(letter.record) == repr((0, records[1]))


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_record_whose_value_cannot_be_had_fails_once_whatever_windows_it_has(parallelism: int) -> None:
    records = [GOOD[0], (0, 1), *GOOD[1:]]
    found = ps.testing.run(flow_of("dead_letter", parallelism), records, parallelism=parallelism, batch_size=4)
    assert last_results(found["out"]) == GOOD_RESULTS
    (letter,) = found["letters"]
    assert letter.record == (0, (0, 1))
    assert "the record has no element 2; it has 2, counted from 0" in letter.error
    assert ps.testing.run(flow_of("skip"), records)["out"]
    with pytest.raises(RecordError, match="no element 2; it has 2"):
        ps.testing.run(flow_of("fail"), records)


@pytest.mark.parametrize("bad", BAD_TIMES, ids=repr)
@pytest.mark.parametrize("company", [0, 1, 5])
def test_the_watermark_operator_tells_a_bad_time_whatever_batch_it_is_in(bad: Any, company: int) -> None:
    """A batch's greatest time alone would not show it."""
    good = [(i, i) for i in range(company)]
    for records in ([(9, bad), *good], [*good, (9, bad)]):
        flow = ps.Flow("bad-marks")
        stream = flow.read(Trickle([], 1), name="in")
        marked = stream.watermark(1, on_error="dead_letter")
        marked.key_by(0).window(Tumbling(1)).count().write(ps.sinks.Null(), name="out")
        marked.dead_letters().write(ps.sinks.Null(), name="letters")
        found = ps.testing.run(flow, records, batch_size=10)
        assert sorted(found["out"]) == [(i, 0, 1000, 1) for i in range(company)]
        assert [repr(letter.record) for letter in found["letters"]] == [repr((9, bad))]


def test_a_function_that_raises_stop_iteration_loses_no_record() -> None:
    def time(record: tuple[int, int]) -> int:
        if record[1] == 3:
            raise StopIteration
        return record[1]

    flow = ps.Flow("stops")
    stream = flow.read(Trickle([], 1), name="in").watermark(time, on_error="skip")
    stream.key_by(0).window(Tumbling(0.01)).count().write(ps.sinks.Null(), name="out")
    assert ps.testing.run(flow, [(0, i) for i in range(6)], batch_size=6)["out"] == [(0, 0, 10, 5)]


@pytest.mark.parametrize("emit", ["final", "latest"])
@pytest.mark.parametrize("key", [[1], ([1],)], ids=repr)
def test_a_key_without_a_hash_is_skipped_and_counted(key: Any, emit: str) -> None:
    stage = stage_of(Windowing(10, 10, 0, 0, 100), emit=emit, on_error="skip", epochs=True)
    advance(stage, 10)
    out = stage.run(KeyedBatch(["a", key, "b"], [("a", 1), (key, 2), ("b", 3)]))
    assert out == [("a", 0, 10, 1), ("b", 0, 10, 1)]
    assert stage.errors.skipped == 1
    state = stage.snapshot(1, False)
    assert state is not None
    assert state.maps["windows"].keys in (["a", "b"], ["b", "a"])


def test_a_value_that_cannot_be_added_is_skipped_and_the_others_count() -> None:
    stage = stage_of(Windowing(10, 10, 0, 0, 0), Sum(lambda record: record[2]), on_error="dead_letter")
    stage.run(keyed([("a", 1, 1), ("a", 2, "one"), ("a", 3, 2)]))
    assert advance(stage, 10) == [("a", 0, 10, 3)]
    assert [letter.record for letter in stage.context.side[DEAD_LETTERS]] == [("a", "one")]


def test_times_may_be_dates_or_fractions() -> None:
    at = datetime(1969, 12, 31, 23, 59, 59, 999_500, timezone.utc)  # half a millisecond before 1970
    flow = ps.Flow("dates")
    stream = flow.read(Trickle([], 1), name="in").watermark(1)
    stream.key_by(0).window(Tumbling(0.01)).count().write(ps.sinks.Null(), name="out")
    records = [("a", at), ("a", -0.5), ("a", 0.5), ("a", at + timedelta(milliseconds=1))]
    assert ps.testing.run(flow, records)["out"] == [("a", -10, 0, 2), ("a", 0, 10, 2)]


# --- whole jobs ----------------------------------------------------------------------------------------------------


def test_a_job_shows_late_records_and_watermarks_in_its_status() -> None:
    """The window's task is one of its own, and gets records, as the flow uses the side output."""
    records = [(0, time, 1) for time in (5, 30, 7, 31, 8, 60)]
    flow = ps.Flow("status", parallelism=1, chaining=False)
    how = Windowing(10, 10, 0, 0, 0)
    results = windowed(flow.read(Trickle([records], 1), parallelism=1), how, "count", parallelism=2, name="counts")
    results.write(ps.sinks.Collect(), parallelism=1)
    results.side_output("late").write(late := ps.sinks.Collect(), parallelism=1)
    with small_steps(1):
        cluster = Cluster(flow, {task.number: 0 for task in flow.plan().tasks}, seed=1, capacity=4096, window=100)
        outputs = cluster.run()
    status = cluster.loops[0].load()
    counted = [op["late"] for task in status for op in task["operators"] if op["name"] == "counts"]
    assert sum(counted) == len(outputs[late.channel])
    assert [task["watermark_ms"] for task in status] == [None] * len(status), "all are at the end of time"


def cascade(parallelism: int, chaining: bool) -> tuple[ps.Flow, ps.sinks.Collect]:
    flow = ps.Flow("cascade", parallelism=1, chaining=chaining)
    stream = flow.read(Trickle([[(i % 3, i, 1) for i in range(100)]], 3), parallelism=1).watermark(1)
    small = stream.key_by(0).window(Tumbling(0.005)).sum(2, parallelism=max(1, parallelism - 1))
    large = small.key_by(0).window(Tumbling(0.02), time=1).sum(3, parallelism=parallelism)
    large.write(sink := ps.sinks.Collect(), parallelism=1)
    return flow, sink


@pytest.mark.parametrize("chaining", [False, True])
@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_windows_of_windows_leave_once_and_whole(parallelism: int, chaining: bool) -> None:
    flow, sink = cascade(parallelism, chaining)
    with small_steps(parallelism):
        tasks = flow.plan().tasks
        cluster = Cluster(flow, {t.number: t.number % 2 for t in tasks}, seed=1, capacity=4096, window=100)
        out = cluster.run()[sink.channel]
    expected = Counter((i % 3, i - i % 20) for i in range(100))
    assert sorted(out) == sorted((key, start, start + 20, n) for (key, start), n in expected.items())


# --- what cannot be built ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sliding(1, 2), "Sliding: slide 2000 ms is above size 1000 ms; records between windows would be lost"),
        (lambda: Tumbling(0), r"Tumbling\(size_s\): 0; it must be whole milliseconds, at least 1"),
        (lambda: Tumbling(0.0005), r"Tumbling\(size_s\): 0.0005; it must be whole milliseconds"),
        (lambda: Tumbling(1, -1), r"Tumbling\(offset_s\): -1; it must be whole milliseconds, at least 0"),
        (lambda: Sliding("1", 1), r"Sliding\(size_s\): '1'; give seconds or a timedelta"),  # type: ignore[arg-type]
        (lambda: Sliding(1, math.nan), r"Sliding\(slide_s\): nan"),
    ],
)
def test_windows_that_make_no_sense_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(FlowError, match=message):
        make()


def test_windows_tell_what_they_are() -> None:
    assert repr(Tumbling(10)) == "Tumbling(10000 ms)"
    assert repr(Sliding(timedelta(minutes=1), 0.5)) == "Sliding(60000 ms, every 500 ms)"


def test_aggregates_other_than_count_have_the_same_windows() -> None:
    """Each by the same model; DuckDB's comparison has lateness that covers all."""
    how = Windowing(10, 4, 1, 3, 4)
    records = [(i % 2, (i * 7) % 50, i) for i in range(40)]
    for aggregate in (Sum, Min, Max, Mean):
        stage, model = stage_of(how, aggregate(lambda record: record[2])), Model(how, RESULT[aggregate.name])
        out: list[Any] = []
        for record in records:
            out += stage.run(keyed([record]))
            model.take(record)
            out += advance(stage, int(model.watermark))
        assert out == model.out


class Listed(ps.AggregateFunction):
    """The records in a list, which `add` and `merge` change in place, as help(ps.AggregateFunction) allows."""

    def create(self) -> list[Any]:
        return []

    def add(self, accumulator: list[Any], record: Any) -> list[Any]:
        accumulator.append(record[1])
        return accumulator

    def merge(self, a: list[Any], b: list[Any]) -> list[Any]:
        a.extend(b)
        return a


def test_a_result_does_not_change_with_its_accumulator() -> None:
    """What was said before could otherwise not be taken back, because it would be what is said now."""
    flow = ps.Flow("listed", parallelism=1)
    keyed = flow.read(ps.sources.Memory([]), name="in").key_by(0)
    early = keyed.window(ps.GlobalWindow(), early_count=1, updates="retract")
    early.aggregate(Listed(), name="early").write(ps.sinks.Collect(), name="out")
    keyed.aggregate(Listed(), emit="every", name="every").write(ps.sinks.Collect(), name="all")
    found = ps.testing.run(flow, [("k", 0), ("k", 1), ("k", 2)])
    assert [(result, sign) for _, _, _, result, sign in found["out"]] == [
        ([0], 1),
        ([0], -1),
        ([0, 1], 1),
        ([0, 1], -1),
        ([0, 1, 2], 1),
    ]
    assert found["all"] == [("k", [0]), ("k", [0, 1]), ("k", [0, 1, 2])]


class Unmergeable(Listed):
    def merge(self, a: list[Any], b: list[Any]) -> list[Any]:
        a.append("merged")
        if 5 in a or 5 in b:
            raise ValueError("five stays alone")
        a.pop()
        return super().merge(a, b)


@pytest.mark.parametrize("policy", ["skip", "dead_letter"])
def test_a_record_that_would_make_one_session_of_two_fails_when_they_cannot_be_merged(policy: Any) -> None:
    """And the sessions stay as they were."""
    flow = ps.Flow("unmergeable", parallelism=1)
    times = flow.read(ps.sources.Memory([]), name="in").watermark(
        lambda record: record[1] * 1000, out_of_orderness_s=99
    )
    sessions = times.key_by(0).window(ps.Session(7)).aggregate(Unmergeable(), name="sessions", on_error=policy)
    sessions.write(ps.sinks.Collect(), name="out")
    if policy == "dead_letter":
        sessions.dead_letters().write(ps.sinks.Collect(), name="dead")
    records = [("k", 5), ("k", 15), ("k", 30), ("k", 40), ("k", 35), ("k", 10), ("k", 16)]
    for batch_size in (1, 4):  # with 4, records 10 and 16 come as one run
        found = ps.testing.run(flow, records, batch_size=batch_size)
        assert sorted(result for *_, result in found["out"]) == [[5], [15, 16], [30, 40, 35]], batch_size
        if policy == "dead_letter":
            (dead,) = found["dead"]
            assert (dead.operator, dead.record) == ("sessions", ("k", ("k", 10)))
            assert "five stays alone" in dead.error


def test_windows_of_another_size_do_not_continue_from_saved_ones() -> None:
    def kinds(*windows: Any) -> set[str]:
        found: set[str] = set()
        for window in windows:
            flow = ps.Flow("sizes")
            times = flow.read(ps.sources.Memory([]), name="in").watermark(0)
            times.key_by(0).window(window).count(name="counts").write(ps.sinks.Null())
            plan = flow.plan(1, check_sinks=False)
            found |= {
                operator.state_kind
                for chain in plan.chains
                for operator in chain.operators
                if operator.name == "counts"
            }
        return found

    sessions = ps.Session(5), ps.Session(6)
    different = ps.Tumbling(5), ps.Tumbling(2), ps.Tumbling(5, offset_s=1), ps.Sliding(5, 1), *sessions
    assert len(kinds(*different)) == len(different)
    assert len(kinds(ps.Tumbling(5), ps.Tumbling(5.0))) == 1


class _Sorted(ps.AggregateFunction):
    """Changes its accumulators in place."""

    def create(self) -> list[int]:
        return []

    def add(self, accumulator: list[int], record: tuple[str, int, int]) -> list[int]:
        accumulator.append(record[2])
        return accumulator

    def result(self, accumulator: list[int]) -> list[int]:
        return sorted(accumulator)


class _MergedSorted(_Sorted):
    def merge(self, a: list[int], b: list[int]) -> list[int]:
        a.extend(b)
        b.clear()
        return a


def _own_flow(aggregate: ps.AggregateFunction, parallelism: int, records: list[tuple[str, int, int]]) -> ps.Flow:
    flow = ps.Flow("own-aggregate", parallelism=parallelism)
    timed = flow.read(ps.sources.Memory(records)).watermark(1, out_of_orderness_s=1000)
    keyed = timed.key_by(0)
    keyed.window(ps.Sliding(10, 5)).aggregate(aggregate, name="windows").write(ps.sinks.Collect(), name="out")
    keyed.window(ps.Tumbling(10)).top(2, by=2, name="best").write(ps.sinks.Collect(), name="top")
    keyed.aggregate(aggregate, emit="final", name="running").write(ps.sinks.Collect(), name="all")
    return flow


@pytest.mark.parametrize("parallelism", [1, 2, 4])
@pytest.mark.parametrize("aggregate", [_Sorted(), _MergedSorted()])
def test_an_own_aggregate_and_top_give_the_same_when_senders_combine(
    aggregate: ps.AggregateFunction, parallelism: int
) -> None:
    chosen = random.Random(7)
    records = [(chosen.choice("abcde"), chosen.randrange(60_000), i) for i in range(2000)]
    out = ps.testing.run(_own_flow(aggregate, parallelism, records))
    slides: dict[tuple[str, int], list[int]] = {}
    tumbling: dict[tuple[str, int], list[int]] = {}
    for key, time, value in records:
        first = time - time % 5000
        for start in (first, first - 5000):
            slides.setdefault((key, start), []).append(value)
        tumbling.setdefault((key, time - time % 10_000), []).append(value)
    assert sorted(out["out"]) == sorted((key, start, start + 10_000, sorted(v)) for (key, start), v in slides.items())
    best = [(key, start, [record[2] for record in records]) for key, start, _, records in out["top"]]
    assert sorted(best) == sorted((key, start, sorted(v)[-2:][::-1]) for (key, start), v in tumbling.items())
    assert sorted(out["all"]) == [(key, [v for k, _, v in records if k == key]) for key in "abcde"]


def test_senders_combine_for_an_own_aggregate_only_when_it_merges_and_each_record_need_not_show() -> None:
    def combined(flow: ps.Flow) -> dict[str, bool]:
        plan = flow.plan()
        return {plan.chains[each.target].operators[0].name: each.combiner is not None for each in plan.exchanges}

    assert combined(_own_flow(_Sorted(), 2, [])) == {"windows": False, "best": True, "running": False}
    assert combined(_own_flow(_MergedSorted(), 2, [])) == {"windows": True, "best": True, "running": True}
    flow = ps.Flow("shown", parallelism=2)
    keyed = flow.read(ps.sources.Memory([("a", 1, 2)])).watermark(1).key_by(0)
    late = keyed.window(ps.Tumbling(10)).aggregate(_MergedSorted(), name="late")
    late.write(ps.sinks.Collect(), name="out")
    late.side_output("late").write(ps.sinks.Collect(), name="too late")
    keyed.aggregate(_MergedSorted(), emit="every", name="every").write(ps.sinks.Collect(), name="each")
    keyed.window(ps.Tumbling(10)).top(1, by=2, name="skips", on_error="skip").write(ps.sinks.Collect(), name="top")
    assert combined(flow) == {"late": False, "too late": False, "every": False, "skips": False}
