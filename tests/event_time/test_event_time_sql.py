"""Windows and joins beside DuckDB, which gets the same records as tables: out of order, equal, late and null ones.

Each example is a flow that runs in this process with 1 to 3 tasks, and a query. `make campaign-properties` tries
thousands of examples.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps

# (key, time, value): keys and values may be null, times are in ms and lie close together.
Row = tuple[Any, int, Any]

SPAN = 60

rows = st.lists(
    st.tuples(st.sampled_from(("a", "b", "c", None)), st.integers(0, SPAN), st.one_of(st.none(), st.integers(-3, 3))),
    max_size=14,
)
tasks = st.integers(1, 3)

_SCHEMA = pa.schema([("id", pa.int64()), ("key", pa.string()), ("time", pa.int64()), ("value", pa.int64())])


def sql(query: str, **tables: list[tuple[int, Any, int, Any]]) -> Counter[Any]:
    """The rows of a query over tables of (id, key, time, value), as a multiset."""
    connection = duckdb.connect(":memory:", config={"threads": 1})
    try:
        for name, table in tables.items():
            columns = list(zip(*table, strict=True)) or [(), (), (), ()]
            arrays = [pa.array(column, kind.type) for column, kind in zip(columns, _SCHEMA, strict=True)]
            connection.register(name, pa.table(arrays, schema=_SCHEMA))
        return Counter(connection.execute(query).fetchall())
    finally:
        connection.close()


def numbered(records: list[Row]) -> list[tuple[int, Any, int, Any]]:
    return [(i, *record) for i, record in enumerate(records)]


def run(flow: ps.Flow, parallelism: int, **inputs: list[Any]) -> list[Any]:
    return ps.testing.run(flow, inputs, parallelism=parallelism)["out"]


def stream(flow: ps.Flow, name: str, out_of_orderness_s: float = SPAN / 1000) -> Any:
    read = flow.read(ps.sources.Memory([]), name=name, parallelism=1)
    return read.watermark(2, out_of_orderness_s=out_of_orderness_s, name=f"watermark {name}")


WINDOWS: dict[str, tuple[Any, int, int]] = {
    "tumbling": (ps.Tumbling(0.01), 10, 10),
    "sliding": (ps.Sliding(0.02, 0.005), 20, 5),
    "sliding unevenly": (ps.Sliding(0.02, 0.015), 20, 15),
}


def in_windows(size: int, slide: int, table: str = "records") -> str:
    """A query for each record with the start of each of its windows."""
    first = -(-size // slide) * -slide  # windows begin at multiples of the slide
    return f"""
        SELECT r.*, w.start FROM {table} r, (SELECT unnest(range({first}, {SPAN + 1}, {slide})) AS start) w
        WHERE w.start <= r.time AND r.time < w.start + {size}
    """


@pytest.mark.parametrize("kind", WINDOWS)
@given(records=rows, parallelism=tasks)
def test_aggregates_of_windows(kind: str, records: list[Row], parallelism: int) -> None:
    window, size, slide = WINDOWS[kind]
    flow = ps.Flow("windows")
    windowed = stream(flow, "in").key_by(1).window(window)
    windowed.count().write(ps.sinks.Collect(), name="out")
    found = Counter((key, start, n) for key, start, _, n in run(flow, parallelism, **{"in": numbered(records)}))
    query = f"SELECT key, start, count(*) FROM ({in_windows(size, slide)}) GROUP BY key, start"
    assert found == sql(query, records=numbered(records))


@pytest.mark.parametrize("kind", WINDOWS)
@given(records=rows, parallelism=tasks)
def test_functions_of_windows(kind: str, records: list[Row], parallelism: int) -> None:
    """Functions that see all records, the best of a window, and an aggregate of the user's, of one flow."""
    window, size, slide = WINDOWS[kind]
    flow = ps.Flow("windows")
    windowed = stream(flow, "in").filter(lambda row: row[3] is not None).key_by(1).window(window, time=2)
    collected = windowed.collect().map(lambda r: ("collect", r[0], r[1], sum(row[3] for row in r[3])))
    reduced = windowed.reduce(lambda a, b: (*a[:3], a[3] + b[3])).map(lambda r: ("reduce", r[0], r[1], r[3][3]))
    best = windowed.top(2, by=3).map(lambda r: ("top", r[0], r[1], sum(row[3] for row in r[3])))
    own = windowed.aggregate(Total()).map(lambda r: ("aggregate", r[0], r[1], r[3]))
    made = windowed.process(lambda ctx, key, w, some: [("process", key, w[0], max(row[3] for row in some))])
    collected.union(reduced, best, own, made).write(ps.sinks.Collect(), name="out")
    query = f"""
        WITH records_in AS ({in_windows(size, slide)} AND r.value IS NOT NULL),
        ranked AS (SELECT *, row_number() OVER (PARTITION BY key, start ORDER BY value DESC) AS place FROM records_in)
        SELECT 'collect', key, start, sum(value)::BIGINT FROM records_in GROUP BY key, start UNION ALL
        SELECT 'reduce', key, start, sum(value)::BIGINT FROM records_in GROUP BY key, start UNION ALL
        SELECT 'aggregate', key, start, sum(value)::BIGINT FROM records_in GROUP BY key, start UNION ALL
        SELECT 'process', key, start, max(value) FROM records_in GROUP BY key, start UNION ALL
        SELECT 'top', key, start, sum(value)::BIGINT FROM ranked WHERE place <= 2 GROUP BY key, start
    """
    found = Counter(run(flow, parallelism, **{"in": numbered(records)}))
    assert found == sql(query, records=numbered(records))


class Total(ps.AggregateFunction):
    def create(self) -> int:
        return 0

    def add(self, accumulator: int, record: Any) -> int:
        return accumulator + int(record[3])

    def merge(self, a: int, b: int) -> int:
        return a + b


@given(records=rows, gap=st.sampled_from((1, 4, 11)), parallelism=tasks)
def test_sessions(records: list[Row], gap: int, parallelism: int) -> None:
    flow = ps.Flow("sessions")
    windowed = stream(flow, "in").key_by(1).window(ps.Session(gap / 1000))
    counted = windowed.count().map(lambda r: ("count", *r))
    collected = windowed.collect().map(lambda r: ("collect", *r[:3], len(r[3])))
    counted.union(collected).write(ps.sinks.Collect(), name="out")
    query = f"""
        WITH steps AS (
            SELECT *, coalesce(time - lag(time) OVER (PARTITION BY key ORDER BY time, id) >= {gap}, true) AS first
            FROM records),
        sessions AS (
            SELECT *, sum(first::INT) OVER (PARTITION BY key ORDER BY time, id ROWS UNBOUNDED PRECEDING) AS session
            FROM steps),
        counts AS (
            SELECT key, min(time) AS start, max(time) + {gap} AS until, count(*) AS n
            FROM sessions GROUP BY key, session)
        SELECT 'count', * FROM counts UNION ALL SELECT 'collect', * FROM counts
    """
    assert Counter(run(flow, parallelism, **{"in": numbered(records)})) == sql(query, records=numbered(records))


@given(records=rows, disorder=st.sampled_from((0, 5, 20)), lateness=st.sampled_from((0, 10, 30)), slide=st.booleans())
def test_late_records(records: list[Row], disorder: int, lateness: int, slide: bool) -> None:
    """A record counts unless the watermark, which is that of all records before it, has closed all of its windows."""
    size, step = (20, 10) if slide else (10, 10)
    window = ps.Sliding(0.02, 0.01) if slide else ps.Tumbling(0.01)
    flow = ps.Flow("late")
    windowed = stream(flow, "in", disorder / 1000).key_by(1).window(window, lateness_s=lateness / 1000)
    for name, counted in (("count", windowed.count()), ("collect", windowed.collect())):
        counted.write(ps.sinks.Collect(), name=name)
        counted.side_output("late").write(ps.sinks.Collect(), name=f"late {name}")
    grain = flow.plan().time_grain
    assert grain == 10
    out = ps.testing.run(flow, {"in": numbered(records)})
    marked = f"""
        WITH marked AS (
            SELECT *, (max(time) OVER (ORDER BY id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) - {disorder})
                AS greatest FROM records),
        known AS (SELECT * EXCLUDE greatest, greatest - ((greatest % {grain}) + {grain}) % {grain} AS mark FROM marked),
        kept AS (
            SELECT r.*, w.start FROM known r, (SELECT unnest(range(-{size}, {SPAN + 1}, {step})) AS start) w
            WHERE w.start <= r.time AND r.time < w.start + {size}
            AND (r.mark IS NULL OR w.start + {size} + {lateness} > r.mark))
    """
    counts = sql(f"{marked} SELECT key, start, count(*) FROM kept GROUP BY key, start", records=numbered(records))
    late = sql(f"{marked} SELECT id FROM records WHERE id NOT IN (SELECT id FROM kept)", records=numbered(records))
    last: dict[Any, Any] = {}
    for key, start, _, n in out["count"]:
        last[key, start] = n
    assert Counter((*place, n) for place, n in last.items()) == counts
    last = {}
    for key, start, _, some in out["collect"]:
        last[key, start] = len(some)
    assert Counter((*place, n) for place, n in last.items()) == counts
    for name in ("late count", "late collect"):
        assert Counter((record[0],) for record in out[name]) == late


HOWS = {"inner": "JOIN", "left": "LEFT JOIN", "right": "RIGHT JOIN", "full": "FULL JOIN"}
hows: Any = st.sampled_from(list(HOWS))


@given(lefts=rows, rights=rows, how=hows, kind=st.sampled_from(list(WINDOWS)), parallelism=tasks)
def test_joins_in_windows(lefts: list[Row], rights: list[Row], how: Any, kind: str, parallelism: int) -> None:
    window, size, slide = WINDOWS[kind]
    flow = ps.Flow("join")
    joined = stream(flow, "left").key_by(1).join(stream(flow, "right").key_by(1), window, how=how, fn=ids)
    joined.write(ps.sinks.Collect(), name="out")
    query = f"""
        WITH l AS ({in_windows(size, slide, "lefts")}),
        r AS ({in_windows(size, slide, "rights")})
        SELECT l.id, r.id FROM l {HOWS[how]} r ON l.key IS NOT DISTINCT FROM r.key AND l.start = r.start
    """
    found = Counter(run(flow, parallelism, left=numbered(lefts), right=numbered(rights)))
    assert found == sql(query, lefts=numbered(lefts), rights=numbered(rights))


def ids(left: Any, right: Any) -> tuple[Any, Any]:
    return None if left is None else left[0], None if right is None else right[0]


@given(
    lefts=rows,
    rights=rows,
    how=hows,
    bounds=st.tuples(st.integers(-30, 30), st.integers(-30, 30)).map(sorted),
    parallelism=tasks,
)
def test_interval_joins(lefts: list[Row], rights: list[Row], how: Any, bounds: list[int], parallelism: int) -> None:
    lower, upper = bounds
    flow = ps.Flow("join")
    joined = (
        stream(flow, "left")
        .key_by(1)
        .interval_join(stream(flow, "right").key_by(1), lower_s=lower / 1000, upper_s=upper / 1000, how=how, fn=ids)
    )
    joined.write(ps.sinks.Collect(), name="out")
    query = f"""
        SELECT l.id, r.id FROM lefts l {HOWS[how]} rights r
        ON l.key IS NOT DISTINCT FROM r.key AND r.time - l.time BETWEEN {lower} AND {upper}
    """
    found = Counter(run(flow, parallelism, left=numbered(lefts), right=numbered(rights)))
    assert found == sql(query, lefts=numbered(lefts), rights=numbered(rights))


@pytest.mark.parametrize("how", ["inner", "full"])
def test_an_interval_join_keeps_a_record_until_the_last_time_that_matches(how: Any) -> None:
    """Records of the time of the watermark may still come. Another record, which nothing can match any more, is
    dropped meanwhile."""
    flow = ps.Flow("join")
    joined = (
        stream(flow, "left", 0.0)
        .key_by(1)
        .interval_join(stream(flow, "right", 0.0).key_by(1), lower_s=0, upper_s=0.005, how=how, fn=ids)
    )
    joined.write(ps.sinks.Collect(), name="out")
    inputs = {"left": [(1, "b", 0), (2, "a", 1), (3, "c", 6)], "right": [(4, "d", 6), (5, "a", 6)]}
    order = ["left", "left", "left", "right", "right"]
    found = ps.testing.run(flow, inputs, order=order, batch_size=1)["out"]
    outer = [(1, None), (3, None), (None, 4)] if how == "full" else []
    assert sorted(found, key=str) == sorted([(2, 5), *outer], key=str)


@given(lefts=rows, rights=rows, how=st.sampled_from(("inner", "left")), parallelism=tasks)
def test_temporal_joins(lefts: list[Row], rights: list[Row], how: Any, parallelism: int) -> None:
    rights = list({(key, time): (key, time, value) for key, time, value in rights}.values())  # one version for a time
    flow = ps.Flow("join")
    joined = stream(flow, "left").key_by(1).temporal_join(stream(flow, "right").key_by(1), how=how, fn=ids)
    joined.write(ps.sinks.Collect(), name="out")
    query = f"""
        SELECT l.id, r.id FROM lefts l {HOWS[how]} rights r
        ON l.key IS NOT DISTINCT FROM r.key AND r.time = (
            SELECT max(v.time) FROM rights v WHERE v.key IS NOT DISTINCT FROM l.key AND v.time <= l.time)
    """
    found = Counter(run(flow, parallelism, left=numbered(lefts), right=numbered(rights)))
    assert found == sql(query, lefts=numbered(lefts), rights=numbered(rights))


@pytest.mark.parametrize("with_side_output", [False, True])
@pytest.mark.parametrize("fail_at", [None, {"right": 5}])
def test_late_versions_that_no_record_could_get_are_late_records(
    with_side_output: bool, fail_at: Any, caplog: pytest.LogCaptureFixture
) -> None:
    flow = ps.Flow("join")
    left, right = stream(flow, "left", 0.0).key_by(1), stream(flow, "right", 0.0).key_by(1)
    joined = left.temporal_join(right, fn=ids, name="priced")
    joined.write(ps.sinks.Collect(), name="out")
    if with_side_output:
        joined.side_output("late").map(lambda row: row[0]).write(ps.sinks.Collect(), name="late")
    versions = [(1, "a", 0), (2, "a", 1000), (3, "z", 50_000)]
    late = [
        (4, "a", 500),  # version 2 holds from 1000 on
        (5, "a", 2000),  # holds at 50000, when all that is known is that no record of an earlier time will come
        (6, "a", 1500),  # version 5 holds
        (7, "a", 2000),  # takes the place of version 5
        (8, "c", 100),  # the first one of its key
    ]
    inputs = {"left": [(11, "a", 49_000), (12, "a", 60_000), (13, "c", 60_000)], "right": [*versions, *late]}
    order = ["right", "right", "left", "left", "left", *["right"] * 6]
    out = ps.testing.run(flow, inputs, order=order, batch_size=1, fail_at=fail_at)
    assert sorted(out["out"]) == [(11, 2), (12, 7), (13, 8)]
    if with_side_output:
        assert out["late"] == [4, 6]
    assert ("2 at operator 'priced'" in caplog.text) is not with_side_output


@given(records=rows, size=st.integers(1, 4), data=st.data(), parallelism=tasks)
def test_count_windows(records: list[Row], size: int, data: st.DataObject, parallelism: int) -> None:
    slide = data.draw(st.integers(1, size))
    flow = ps.Flow("count")
    read = flow.read(ps.sources.Memory([]), name="in", parallelism=1)
    windowed = read.key_by(1).window(ps.CountWindow(size, slide))
    windowed.collect().map(lambda r: (r[0], r[1], sum(row[0] for row in r[3]))).write(ps.sinks.Collect(), name="out")
    query = f"""
        WITH places AS (SELECT *, row_number() OVER (PARTITION BY key ORDER BY id) - 1 AS place FROM records)
        SELECT p.key, w.start, sum(p.id)::BIGINT FROM places p, (SELECT unnest(range(0, 20, {slide})) AS start) w
        WHERE w.start <= p.place AND p.place < w.start + {size} GROUP BY p.key, w.start HAVING count(*) = {size}
    """
    assert Counter(run(flow, parallelism, **{"in": numbered(records)})) == sql(query, records=numbered(records))


@given(records=rows, every=st.integers(1, 4), gap=st.sampled_from((3, 9)), parallelism=tasks)
def test_signs_add_up_to_the_last_results(records: list[Row], every: int, gap: int, parallelism: int) -> None:
    """What is taken back was said before, and what is left are the results without early ones."""
    flow = ps.Flow("early")
    keyed = stream(flow, "in").key_by(1)
    kinds = {"session": ps.Session(gap / 1000), "tumbling": ps.Tumbling(0.02), "all": ps.GlobalWindow()}
    for name, window in kinds.items():
        early = keyed.window(window, early_count=every, updates="retract").collect()
        early.map(lambda r: (r[0], r[1], r[2], tuple(r[3]), r[4])).write(ps.sinks.Collect(), name=f"early {name}")
        plain = keyed.window(window).collect()
        plain.map(lambda r: (r[0], r[1], r[2], tuple(r[3]))).write(ps.sinks.Collect(), name=name)
    out = ps.testing.run(flow, {"in": numbered(records)}, parallelism=parallelism)
    for name in kinds:
        left: Counter[Any] = Counter()
        for *result, sign in out[f"early {name}"]:
            left[tuple(result)] += sign
            assert left[tuple(result)] in (0, 1), "what is taken back must have been said"
        assert +left == Counter(out[name])
