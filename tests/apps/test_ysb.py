"""The Yahoo benchmark: its events are a pure function of seed and index, its counts are SQL's."""

from __future__ import annotations

import json
import pickle
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.apps import ysb
from penstock.apps.ysb_events import (
    AD_TYPES,
    EVENT_TYPES,
    LATE_MS,
    LATE_SHARE,
    SKEW_MS,
    START_MS,
    EventReader,
    Events,
    EventSource,
)
from penstock.runtime.errors import FlowError, PenstockError
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.sinks import SinkContext, SinkWriter
from penstock.runtime.sources import SourceContext
from penstock.runtime.sources.base import share
from penstock.runtime.status import JobStatus, OperatorStatus
from tests.apps.parsed import parsed

S = 1_000_000_000
SEEDS = st.sampled_from([0, 1, 7])
RATES = st.sampled_from([50_000, 0.5, "5000:10s,60000:10s", [(100, 0.1), (0, 5), (7, None)]])


def drawn(events: Events, count: int, first: int = 0) -> list[dict[str, str]]:
    return [json.loads(line) for line in events.events(first, count)]


# --- the events ------------------------------------------------------------------------------------------------


def test_an_event_is_as_the_benchmark_s() -> None:
    events = Events(3)
    line = events.events(0, 1)[0]
    assert line == json.dumps(json.loads(line))
    event = json.loads(line)
    assert list(event) == ["user_id", "page_id", "ad_id", "ad_type", "event_type", "event_time", "ip_address"]
    assert event["ip_address"] == "1.2.3.4"
    assert event["ad_type"] in AD_TYPES
    assert event["event_type"] in EVENT_TYPES
    assert abs(int(event["event_time"]) - START_MS) <= SKEW_MS
    assert all(len(event[name]) == 36 for name in ("user_id", "page_id", "ad_id"))


def test_the_first_event_of_seed_1_stays_as_it_is() -> None:
    """What is measured on one version can be compared with what is measured on the next."""
    assert Events(1).events(12_345, 1)[0] == FIRST


FIRST = (
    '{"user_id": "d86f2a2e-4259-48f8-9c0f-5e75d3b87e67", "page_id": "b489e049-6805-48ca-95ac-f156cd96e6dd", '
    '"ad_id": "16d8e80e-9cc9-40d3-ac13-9c1966ad51fd", "ad_type": "sponsored-search", '
    '"event_type": "click", "event_time": "1700000000248", "ip_address": "1.2.3.4"}'
)


@given(
    SEEDS,
    RATES,
    st.integers(0, 1 << 31),
    st.integers(0, 300),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([0.0, LATE_SHARE, 0.5, 1.0]),
    st.sampled_from([0, 999_999, START_MS]),
)
def test_both_forms_are_the_same_text(
    seed: int, rate: Any, first: int, count: int, step: int, skew: bool, late_share: float, start_ms: int
) -> None:
    events = Events(seed, rate=rate, start_ms=start_ms, skew=skew, late_share=late_share)
    lines = events.events(first, count, step)
    batch = events.events_arrow(first, count, step)
    assert batch.schema.names == ["value"]
    assert batch.schema.types == [pa.string()]
    assert batch.column(0).to_pylist() == lines
    assert batch.num_rows == len(lines) == count


@settings(max_examples=40)
@given(SEEDS, RATES, st.integers(0, 1 << 31), st.integers(1, 500), st.data())
def test_an_event_depends_on_its_index_alone(seed: int, rate: Any, first: int, count: int, data: Any) -> None:
    events = Events(seed, rate=rate, late_share=0.1)
    whole = events.events(first, count)
    at = data.draw(st.integers(0, count - 1))
    some = data.draw(st.integers(0, count - at))
    assert events.events(first + at, some) == whole[at : at + some]
    assert Events(seed, rate=rate, late_share=0.1).events(first + at, 1) == [whole[at]]
    assert events.events(first, -(-count // 3), 3) == whole[::3]


def test_seeds_make_other_events_and_other_ids() -> None:
    one, two = Events(1), Events(2)
    assert {row["ad_id"] for row in one.campaigns()}.isdisjoint(row["ad_id"] for row in two.campaigns())
    types = [[event["event_type"] for event in drawn(events, 200)] for events in (one, two)]
    assert types[0] != types[1]
    assert Events(-1).events(0, 1) != Events(1).events(0, 1)
    assert one.campaigns() == Events(1).campaigns()


def test_the_table_of_the_join() -> None:
    rows = Events(5).campaigns()
    assert len(rows) == len({row["ad_id"] for row in rows}) == 1_000
    assert set(Counter(row["campaign_id"] for row in rows).values()) == {10}
    assert len({row["campaign_id"] for row in rows}) == 100


def test_all_is_drawn_evenly() -> None:
    """Chi squared of each field, and of pairs of fields; 5 standard deviations of it are never seen by chance."""
    n = 120_000
    events = drawn(Events(11), n)
    sizes = {"user_id": 100, "page_id": 100, "ad_id": 1_000, "ad_type": 5, "event_type": 3}
    pairs = [("user_id", "page_id"), ("ad_type", "event_type"), ("user_id", "event_type"), ("page_id", "ad_type")]
    for names in [(name,) for name in sizes] + pairs:
        cells = int(np.prod([sizes[name] for name in names]))
        counts = Counter(tuple(event[name] for name in names) for event in events)
        assert len(counts) <= cells
        expected = n / cells
        squares = sum((found - expected) ** 2 for found in counts.values()) + (cells - len(counts)) * expected**2
        freedom = cells - 1
        assert abs(squares / expected - freedom) < 5 * (2 * freedom) ** 0.5, names
    known = {row["ad_id"] for row in Events(11).campaigns()}
    assert {event["ad_id"] for event in events} == known


def test_times_follow_the_schedule() -> None:
    events = Events(1, rate="10:1s,1000:1s", start_ms=START_MS, skew=False, late_share=0.0)
    times = [int(event["event_time"]) for event in drawn(events, 1_020)]
    assert times[:11] == [START_MS + i * 100 for i in range(11)]
    assert times[1_009] == START_MS + 1_999
    assert times[1_010:] == [START_MS + 2_000 + i * 100 for i in range(10)]
    assert events.count_before(1) == 10
    assert events.count_before(2) == 1_010
    assert events.count_before(2.05) == 1_011
    assert Events(1, rate=1e6).count_before(1e6) == 10**12
    due = events.due_ns(np.arange(3_000)) - START_MS * 1_000_000
    for passed in (-1, 0, 1, 10**8, 2 * 10**9 - 1, 2 * 10**9, 3 * 10**9 + 1):
        count = int((due <= passed).sum())
        for least in (0, 1, count // 2, max(0, count - 1), count, count + 1, count + 7):
            assert events.count_due(passed, least) == max(count, least)


def test_events_are_a_little_out_of_order() -> None:
    n = 200_000
    numbers = np.arange(n)
    behind = Events(2, late_share=0.0).times_of(numbers) - Events(2, skew=False, late_share=0.0).times_of(numbers)
    counts = Counter(behind.tolist())
    assert sorted(counts) == list(range(-SKEW_MS + 1, SKEW_MS + 1))
    assert max(abs(found - n / 100) for found in counts.values()) < 5 * (n / 100) ** 0.5


@pytest.mark.parametrize(("late_share", "n"), [(LATE_SHARE, 2_000_000), (0.01, 400_000)])
def test_few_events_are_late(late_share: float, n: int) -> None:
    numbers = np.arange(n)
    on_time = Events(2, late_share=0.0).times_of(numbers)
    by = on_time - Events(2, late_share=late_share).times_of(numbers)
    late = by[by != 0]
    assert abs(len(late) - n * late_share) < 5 * (n * late_share) ** 0.5
    assert late.min() > 0
    assert late.max() < LATE_MS
    assert abs(late.mean() - LATE_MS / 2) < 5 * LATE_MS / (12 * len(late)) ** 0.5
    skewed = Events(2, late_share=late_share).times_of(numbers)
    unskewed = Events(2, skew=False, late_share=late_share).times_of(numbers)
    assert abs(skewed - unskewed).max() <= SKEW_MS, "the same events are late, in the same degree"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Events(late_share=1.5),
        lambda: Events(start_ms=-1),
        lambda: Events(rate="fast"),
        lambda: EventSource(Events(), limit=-1),
        lambda: EventSource(Events(), duration_s=0),
        lambda: EventSource(Events(), splits=0),
        lambda: EventSource(Events(), limit=1, duration_s=1),
    ],
)
def test_what_makes_no_sense(make: Any) -> None:
    with pytest.raises(FlowError):
        make()


# --- the source ------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self, now: int = START_MS * 1_000_000) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now


def context() -> SourceContext:
    return SourceContext("receive", 0, 1, ErrorHandler("receive"))


def readers(source: EventSource, parallelism: int = 1, offsets: dict[str, Any] | None = None) -> list[EventReader]:
    splits = [split.at((offsets or {}).get(split.name)) for split in source.splits(parallelism)]
    return [source.reader(mine, context()) for mine in share(splits, parallelism)]


def take(reader: EventReader, limit: int, arrow: bool) -> list[str]:
    lines: list[str] = reader.read_arrow(limit).column(0).to_pylist() if arrow else reader.read(limit)
    assert len(lines) <= limit
    return lines


@given(
    st.integers(0, 3_000),
    st.integers(1, 4),
    st.none() | st.integers(1, 7),
    st.lists(st.tuples(st.integers(1, 1_500), st.booleans()), min_size=1, max_size=5),
    st.integers(0, 4),
    st.integers(1, 4),
)
def test_every_event_once_also_after_going_back(
    limit: int, tasks: int, splits: int | None, sizes: list[tuple[int, bool]], turns: int, later_tasks: int
) -> None:
    events = Events(1, late_share=0.01)
    source = EventSource(events, limit=limit, splits=splits or tasks)
    got: list[str] = []
    offsets: dict[str, Any] = {}
    before = readers(source, tasks)
    for turn in range(turns):
        for task, reader in enumerate(before):
            got += take(reader, *sizes[(turn + task) % len(sizes)])
    for reader in before:
        offsets |= reader.offsets()
        take(reader, 100, False)  # what came after the offsets is read again
        reader.close()
        assert reader.read(10) == []
    for task, reader in enumerate(readers(source, later_tasks, offsets)):
        turn = task
        while not reader.finished:
            got += take(reader, *sizes[turn % len(sizes)])
            turn += 1
        assert reader.read(10) == []
    assert sorted(got) == sorted(events.events(0, limit))


def test_one_task_gives_its_splits_in_order_of_index() -> None:
    events = Events(1)
    source = EventSource(events, limit=5_000, splits=5)
    (reader,) = readers(source)
    assert reader.read(1_000) == events.events(0, 1_000)
    assert set(reader.offsets().values()) == {200}
    assert reader.read_arrow(3_000).column(0).to_pylist() == events.events(1_000, 3_000)
    assert reader.read(3_000) == events.events(4_000, 1_000)
    assert reader.finished
    (reader,) = readers(source, offsets={"0 of 5": 300, "1 of 5": 2})
    lines = reader.read(5_000)
    assert len(lines) == 5_000 - 302
    assert lines[:3] == events.events(2, 3)  # 0 and 1 are gone, as are 5 and 6, and 10
    assert lines[3:6] == events.events(7, 3)
    assert lines[6:10] == events.events(11, 4)
    assert lines[-1:] == events.events(4_999, 1)


@pytest.mark.parametrize("arrow", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
def test_paced_events_keep_their_appointments(arrow: bool, splits: int) -> None:
    clock = Clock(START_MS * 1_000_000 - S)
    source = EventSource(Events(1, rate="100:1s,1000:1s"), duration_s=3, paced=True, splits=splits, clock=clock)
    assert source.limit == 1_200
    (reader,) = readers(source)
    assert take(reader, 10, arrow) == []
    assert reader.ready_in() == 1.0
    got: list[str] = []
    at: list[float] = []
    while not reader.finished:
        clock.now += round(reader.ready_in() * S)
        lines = take(reader, 10, arrow)
        assert len(lines) == 1
        assert reader.stamp_ns == pytest.approx(time.monotonic_ns(), abs=S)
        got += lines
        at.append((clock.now - START_MS * 1_000_000) / S)
    assert got == Events(1, rate="100:1s,1000:1s").events(0, 1_200)
    assert at == pytest.approx([i / 100 for i in range(100)] + [1 + i / 1000 for i in range(1_000)] + at[1_100:])
    assert at[1_100:] == pytest.approx([2 + i / 100 for i in range(100)])


def test_a_late_start_finds_all_that_was_due() -> None:
    clock = Clock(START_MS * 1_000_000 + 5 * S)
    source = EventSource(Events(1, rate=1_000), duration_s=6, paced=True, clock=clock)
    (reader,) = readers(source)
    assert len(reader.read(10_000)) == 5_001
    stamp = reader.stamp_ns
    assert stamp is not None
    assert (time.monotonic_ns() - stamp) / S == pytest.approx(5, abs=0.5)
    assert reader.read(1) == []
    assert reader.stamp_ns is None


@pytest.mark.parametrize("splits", [1, 3])
def test_the_backlog_of_a_reader(splits: int) -> None:
    clock = Clock(START_MS * 1_000_000 - S)
    source = EventSource(Events(1, rate=1_000), duration_s=6, paced=True, splits=splits, clock=clock)
    tasks = readers(source, 2)
    assert [reader.backlog() for reader in tasks] == [0, 0]
    clock.now += 3 * S
    assert sum(reader.backlog() for reader in tasks) == 2_001
    assert len(tasks[0].read(100)) == 100
    assert sum(reader.backlog() for reader in tasks) == 1_901
    clock.now += 60 * S
    assert sum(reader.backlog() for reader in tasks) == 5_900
    while not tasks[0].finished:
        tasks[0].read_arrow(1_000)
    assert tasks[0].backlog() == 0
    (reader,) = readers(EventSource(Events(1), limit=100, splits=splits))
    reader.read(10)
    assert reader.backlog() == 90
    assert readers(EventSource(Events(1), splits=splits))[0].backlog() == 0


def test_the_source_travels_as_a_few_values() -> None:
    source = EventSource(Events(4, rate=10), duration_s=60, paced=True)
    source.events.events(0, 1)
    data = pickle.dumps(source)
    assert len(data) < 2_000
    assert pickle.loads(data).events.events(0, 5) == source.events.events(0, 5)
    assert repr(source) == "EventSource(10/s, limit=600)"
    assert repr(EventSource(Events(rate="5:1s,6"))) == "EventSource(5/s for 1 s, 6/s, of event time)"
    assert not EventSource(Events()).bounded


# --- the topology ----------------------------------------------------------------------------------------------

SQL = """
    with events as (
        select json_extract_string(value, '$.event_type') as event_type,
               json_extract_string(value, '$.ad_id') as ad_id,
               cast(json_extract_string(value, '$.event_time') as bigint) as event_time
        from lines
    )
    select campaign_id, event_time // 10000 * 10000 as window_start, count(*) as seen_count
    from events join campaigns using (ad_id)
    where event_type = 'view'
    group by campaign_id, window_start
"""


def by_sql(lines: list[str], events: Events) -> ysb.Counts:
    with duckdb.connect() as db:
        db.register("lines", pa.table({"value": lines}))
        db.register("campaigns", pa.Table.from_pylist(events.campaigns()))
        return {(campaign, start): views for campaign, start, views in db.execute(SQL).fetchall()}


def counted(records: list[Any]) -> ysb.Counts:
    assert all(end == start + ysb.WINDOW_MS and start % ysb.WINDOW_MS == 0 for _, start, end, _ in records)
    return {(campaign, start): views for campaign, start, _, views in records}


@pytest.fixture(scope="module")
def disordered() -> tuple[Events, int, ysb.Counts]:
    """Two minutes of events, one in a hundred late, and SQL's answer."""
    events, n = Events(9, rate="100:20s,1000:20s", late_share=0.01), 60_000
    return events, n, by_sql(events.events(0, n), events)


@pytest.mark.parametrize("parallelism", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [50, 1000])
@pytest.mark.parametrize("updates", [False, True])
def test_counts_equal_sql_s(
    disordered: tuple[Events, int, ysb.Counts], parallelism: int, batch_size: int, updates: bool
) -> None:
    events, n, right = disordered
    flow = ysb.topology(EventSource(events, limit=n), events.campaigns(), ps.sinks.Collect(), updates=updates)
    records = ps.testing.run(flow, parallelism=parallelism, batch_size=batch_size)["store"]
    assert counted(records) == right
    assert len(records) > len(right), "late events change what was there"


def test_the_recount_equals_sql_s(disordered: tuple[Events, int, ysb.Counts]) -> None:
    events, n, right = disordered
    assert ysb.recount(events, n) == right


@settings(max_examples=10)
@given(st.integers(0, 2**32), st.integers(0, 3_000), st.sampled_from([20, 300, 50_000]), st.booleans())
def test_counts_of_any_seed(seed: int, n: int, rate: int, skew: bool) -> None:
    events = Events(seed, rate=rate, skew=skew)
    flow = ysb.topology(EventSource(events, limit=n), events.campaigns(), ps.sinks.Collect())
    out = ps.testing.run(flow, parallelism=2, batch_size=100)
    assert counted(out["store"]) == by_sql(events.events(0, n), events) == ysb.recount(events, n)


def test_every_step_is_an_operator_of_its_own() -> None:
    flow = ysb.topology(EventSource(Events(), limit=1), Events().campaigns(), ps.sinks.Null())
    steps = ["receive", "parse", "filter", "project", "join", "watermark", "count", "store"]
    assert list(flow.graph.ordered()) == steps
    assert [chain.name for chain in flow.plan(2).chains] == [" > ".join(steps[:6]), " > ".join(steps[6:])]


def test_events_of_no_campaign_are_not_counted() -> None:
    events = Events(1)
    flow = ysb.topology(ps.sources.Memory([]), events.campaigns()[:500], ps.sinks.Null())
    lines = events.events(0, 2_000)
    known = {row["ad_id"] for row in events.campaigns()[:500]}
    right = sum(event["event_type"] == "view" and event["ad_id"] in known for event in map(json.loads, lines))
    assert sum(views for *_, views in ps.testing.run(flow, lines)["store"]) == right


def test_a_line_that_is_no_event_is_no_view() -> None:
    """As in Spark: of a text that is not JSON every field is null, and a filter lets only through what is true."""
    flow = ysb.topology(ps.sources.Memory([]), Events().campaigns(), ps.sinks.Null())
    assert ps.testing.run(flow, ['{"event_type": "view"', "", "[1]"])["store"] == []


# --- the store -------------------------------------------------------------------------------------------------


class SecondsClock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def writer(every_s: float, clock: SecondsClock) -> tuple[SinkWriter, list[Any]]:
    rows: list[Any] = []
    store = ysb.Store(ps.sinks.Collect(), every_s, clock)
    return store.writer(SinkContext("store", 0, 1, lambda channel, records: rows.extend(records))), rows


def test_rows_are_stamped_as_they_are_emitted() -> None:
    clock = SecondsClock()
    store, rows = writer(0.0, clock)
    store.write([("a", 0, 10_000, 1), ("b", 0, 10_000, 2)])
    clock.now += 0.25
    store.write([("a", 0, 10_000, 3)])
    store.flush()
    store.finish()
    assert rows == [("a", 0, 1, 1_000_000), ("b", 0, 2, 1_000_000), ("a", 0, 3, 1_000_250)]
    assert ysb.stored(rows) == {("a", 0): 3, ("b", 0): 2}


def test_rows_leave_once_a_second_the_newest_of_each() -> None:
    clock = SecondsClock()
    store, rows = writer(1.0, clock)
    for views in (1, 2, 3):
        store.write([("a", 0, 10_000, views)])
        clock.now += 0.25
    store.flush()
    assert rows == []
    clock.now += 0.25
    store.flush()
    assert rows == [("a", 0, 3, 1_001_000)]
    clock.now += 3.5
    store.flush()
    assert len(rows) == 1, "nothing has changed"
    store.write([("a", 0, 10_000, 4)])
    assert len(rows) == 1, "the last turn, for nothing, was just now"
    clock.now += 1
    store.write([("b", 0, 10_000, 1)])
    assert rows[1:] == [("a", 0, 4, 1_005_500), ("b", 0, 1, 1_005_500)]
    store.write([("b", 0, 10_000, 2)])
    store.finish()
    assert rows[3:] == [("b", 0, 2, 1_005_500)]
    store.close(False)


def test_the_turns_of_tasks_are_spread() -> None:
    clock = SecondsClock()
    store = ysb.Store(ps.sinks.Null(), 1.0, clock)
    turns = [store.writer(SinkContext("store", index, 4))._next - clock.now for index in range(4)]  # type: ignore[attr-defined]
    assert turns == [0.25, 0.5, 0.75, 1.0]


def test_rows_that_wait_are_saved_with_an_epoch() -> None:
    clock = SecondsClock()
    store, rows = writer(1.0, clock)
    store.write([("a", 0, 10_000, 1)])
    assert store.prepare(1) is None
    prepared = store.state()
    store.write([("a", 0, 10_000, 2)])
    store.committed(1)
    again, rows = writer(1.0, clock)
    again.restore(1, [prepared])
    again.finish()
    assert [row[:3] for row in rows] == [("a", 0, 1)]


@pytest.mark.parametrize(
    ("sink", "guarantee"),
    [
        (ps.sinks.Collect(), "exactly once"),
        (ps.sinks.Call(print), "idempotent"),
        (ps.sinks.Null(), "idempotent"),
    ],
)
def test_writing_a_row_again_does_no_harm(sink: Any, guarantee: str) -> None:
    assert ysb.Store(sink).guarantee == guarantee
    assert ysb.Store(sink, 1).describe().startswith("rows every 1 s to ")


def test_latencies_of_rows() -> None:
    rows = [("a", 0, 1, 10_100), ("b", 0, 1, 10_050), ("a", 0, 2, 45_000), ("a", 10_000, 1, 15_000)]
    assert ysb.latencies(rows, first=True) == [50, 100]
    assert ysb.latencies(rows, first=False) == [50, 35_000]
    assert ysb.latencies(rows, first=True, since_ms=1) == []


@pytest.mark.parametrize(
    ("begin_ms", "line"),
    [
        (-3_000, "latency after the window's end: p50 8 ms, p99 8 ms, of 2 counts"),
        (
            4_000,
            "latency after the window's end: p50 8 ms, p99 8 ms, of 1 counts, without the windows that began before "
            "the job ran, 4.0 s after its schedule",
        ),
        (25_000, "latency: none, as the job ran only 25.0 s after its schedule had begun, and no window that began"),
    ],
)
def test_what_waited_for_the_job_s_start_is_no_latency(begin_ms: int, line: str) -> None:
    source = source_of("--rate", "10", "--duration", "20")
    start = source.events.start_ms
    rows = [("a", start, 1, start + 10_007 + max(0, begin_ms)), ("a", start + 10_000, 1, start + 20_008)]
    if begin_ms < 0:
        rows[0] = ("a", start, 1, start + 10_007)
    running = JobStatus(
        name="job", state="FINISHED", started_ms=start + begin_ms - 2_000, uptime_s=40.0, running_s=38.0
    )
    assert ysb._latency(running, rows, source, SimpleNamespace(store_every=0.0)).startswith(line)


# --- the command -----------------------------------------------------------------------------------------------


def built(*arguments: str) -> Any:
    return ysb.APP.build(parsed(ysb.APP, *arguments))


def source_of(*arguments: str) -> EventSource:
    source: EventSource = built(*arguments).flow.graph.operators["receive"].source
    return source


@pytest.mark.parametrize(
    ("arguments", "limit", "paced"),
    [
        ((), 150_000, True),
        (("--rate", "10"), 300, True),
        (("--rate", "10", "--duration", "2"), 20, True),
        (("--duration", "0"), None, True),
        (("--rate", "max"), 1_500_000, False),
        (("--rate", "max", "--events", "7"), 7, False),
        (("--burst",), 750_000, True),
        (("--burst", "10:1s,20:2s"), 50, True),
        (("--burst", "10:1s,20:2s", "--duration", "4"), 60, True),
        (("--burst", "10:1s,20", "--events", "5"), 5, True),
    ],
)
def test_what_the_options_ask_for(arguments: tuple[str, ...], limit: int | None, paced: bool) -> None:
    source = source_of(*arguments)
    assert (source.limit, source.paced) == (limit, paced)
    assert source.events.start_ms % ysb.WINDOW_MS == 0
    if paced:
        assert 2_000 < source.events.start_ms - time.time() * 1000 <= 13_000
    assert source.events.skew
    assert source.events.late_share == LATE_SHARE


def test_events_in_order() -> None:
    source = source_of("--no-skew", "--seed", "5")
    assert not source.events.skew
    assert source.events.late_share == 0
    assert source.events.seed == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "5", "--burst"), "how fast"),
        (("--events", "5", "--duration", "3"), "when to end"),
        (("--burst", "5:1s,7"), "last step holds for ever"),
        (("--burst", "max"), "not of the form"),
    ],
)
def test_options_that_do_not_go_together(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(FlowError, match=message):
        built(*arguments)


def test_a_wrong_count_is_noticed() -> None:
    events = Events(1)
    right = ysb.recount(events, 3_000)
    assert ysb.compared(dict(right), right, 3_000).startswith(f"check: all {len(right):,} counts equal")
    key = next(iter(right))
    for wrong in ({**right, key: right[key] + 1}, {k: n for k, n in right.items() if k != key}, {**right, ("x", 0): 1}):
        with pytest.raises(PenstockError, match="check: 1 of"):
            ysb.compared(wrong, right, 3_000)


def test_only_a_whole_run_is_checked() -> None:
    status = JobStatus(name="job", state="FINISHED", operators={"join": OperatorStatus(records_out=5)}, records_read=20)
    options = SimpleNamespace(check=True, store_every=0.0)
    lines = list(ysb._results(status, [], EventSource(Events(), limit=30), options))
    assert lines[-1] == "check: left out, as the job was stopped before its end"
    assert "5 views came too late" in lines[-2]
