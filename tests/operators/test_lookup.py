"""Lookup joins: against DuckDB, and what a table must not be."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.runtime.errors import FlowError, RecordError
from penstock.runtime.operators.base import StageContext
from penstock.runtime.operators.outside_lookup import OutsideLookup, Reloaded
from tests.runtime.sim import Trickle

CAMPAIGNS = [{"ad": 1, "campaign": "a", "budget": 5}, {"ad": 2, "campaign": "b", "budget": None}]


def joined(records: list[Any], table: Any, on: Any, parallelism: int = 1, **options: Any) -> list[Any]:
    """What comes out of a lookup, by penstock.testing.run."""
    flow = ps.Flow("lookup")
    looked = flow.read(Trickle([], 1), name="in").rebalance().lookup(table, on, **options)
    looked.write(ps.sinks.Null(), name="out")
    if options.get("on_error") == "dead_letter":
        looked.dead_letters().map(lambda letter: letter.record).write(ps.sinks.Null(), name="letters")
    found = ps.testing.run(flow, {"in": records}, parallelism=parallelism, batch_size=3)
    return found["out"] + found.get("letters", [])


def test_a_record_gets_the_columns_of_its_row() -> None:
    records = [{"ad": 2, "n": 1}, {"ad": 3, "n": 2}, {"ad": 1, "n": 3}, {"ad": None, "n": 4}]
    first = {"ad": 2, "n": 1, "campaign": "b", "budget": None}
    last = {"ad": 1, "n": 3, "campaign": "a", "budget": 5}
    nothing = {"campaign": None, "budget": None}
    left = [first, {**records[1], **nothing}, last, {**records[3], **nothing}]
    assert joined(records, CAMPAIGNS, "ad") == [first, last]
    assert joined(records, CAMPAIGNS, "ad", how="left") == left
    assert joined(records[:1], CAMPAIGNS, "ad", columns=["budget"]) == [{"ad": 2, "n": 1, "budget": None}]
    assert joined(records, CAMPAIGNS, "ad", columns=[]) == [records[0], records[2]], "as a filter"
    assert list(records[0]) == ["ad", "n"], "the records themselves are not changed"


def test_the_fields_may_have_different_names() -> None:
    table = [{"id": 1, "campaign": "a"}]
    assert joined([{"ad": 1}], table, ("ad", "id")) == [{"ad": 1, "campaign": "a"}]
    assert joined([{"ad": 1}], table, ("ad", "id"), columns=["id"]) == [{"ad": 1, "id": 1}]


def test_as_in_sql_nothing_equals_null() -> None:
    table = [{"ad": None, "campaign": "x"}, {"ad": None, "campaign": "y"}, *CAMPAIGNS[:1]]
    assert joined([{"ad": None}], table, "ad", columns=["campaign"]) == []
    assert joined([{"ad": None}], table, "ad", how="left", columns=["campaign"]) == [{"ad": None, "campaign": None}]


def test_what_a_record_has_under_a_columns_name_gives_way() -> None:
    """Where the fields are not known before; where they are, the flow is refused."""
    assert joined([{"ad": 1, "budget": 9}], CAMPAIGNS, "ad") == [{"ad": 1, "budget": 5, "campaign": "a"}]
    assert joined([{"ad": 7, "budget": 9}], CAMPAIGNS, "ad", how="left")[0]["budget"] is None


keys = st.none() | st.integers(0, 6)
tables = st.dictionaries(st.integers(0, 6), st.tuples(st.none() | st.integers(), st.text(max_size=3)), max_size=7)


@given(st.lists(keys, max_size=30), tables, st.booleans(), st.integers(0, 2), st.sampled_from(("inner", "left")))
def test_random_tables_join_as_duckdb_joins_them(
    records: list[int | None], table: dict[int, Any], arrow: bool, nulls: int, how: str
) -> None:
    schema = pa.schema([("k", pa.int64()), ("a", pa.int64()), ("b", pa.string())])
    rows = [{"k": key, "a": a and a % 1000, "b": b} for key, (a, b) in table.items()]
    rows += [{"k": None, "a": 1, "b": "null"}] * nulls
    left = pa.table({"i": pa.array(range(len(records)), pa.int64()), "k": pa.array(records, pa.int64())})
    right = pa.Table.from_pylist(rows, schema)
    query = f"select i, l.k, a, b from l {how} join r on l.k = r.k"
    with duckdb.connect() as connection:
        connection.register("l", left)
        connection.register("r", right)
        expected = Counter(connection.execute(query).fetchall())
    if not arrow and not rows:
        return  # a list without rows does not say what columns it has
    out = joined(left.to_pylist(), right if arrow else rows, "k", how=how, parallelism=len(records) % 3 + 1)
    assert Counter((r["i"], r["k"], r["a"], r["b"]) for r in out) == expected


def test_an_empty_arrow_table_still_has_columns() -> None:
    table = pa.table({"k": pa.array([], pa.int64()), "a": pa.array([], pa.int64())})
    assert joined([{"k": 1}], table, "k", how="left") == [{"k": 1, "a": None}]
    with pytest.raises(FlowError, match="the table has no column 'x'; it has: k, a"):
        joined([], table, "x")


@pytest.mark.parametrize(
    ("table", "on", "options", "message"),
    [
        (CAMPAIGNS, "ad", {"how": "outer"}, "how='outer'; it must be 'inner' or 'left'"),
        (CAMPAIGNS, 7, {}, "on=7; give a field's name, or the record's and the table's as a pair"),
        (CAMPAIGNS, ("a", "b", "c"), {}, "on="),
        (CAMPAIGNS, "id", {}, "the table has no column 'id'; it has: ad, campaign, budget"),
        (CAMPAIGNS, "ad", {"columns": ["x"]}, "the table has no column 'x'; it has: ad, campaign, budget"),
        (CAMPAIGNS, "ad", {"columns": "budget"}, "columns='budget'; give a list of names"),
        ([*CAMPAIGNS, {"ad": 1, "campaign": 0}], "ad", {}, "the table has two rows for ad=1; its key must be unique"),
        ([*CAMPAIGNS, {"ad": 3}], "ad", {}, "the table's row for 3 has no column 'campaign'"),
        ([{"ad": [1], "c": 1}], "ad", {}, r"ad=\[1\] in the table cannot be a key: unhashable type: 'list'"),
        ({"ad": 1}, "ad", {}, "the table must be rows as dicts, or a pyarrow Table"),
        ("ads.csv", "ad", {}, "the table must be rows as dicts, or a pyarrow Table"),
        ([("ad", 1)], "ad", {}, r"the table's rows must be dicts, not \('ad', 1\)"),
    ],
)
def test_a_table_that_cannot_be_looked_up_is_refused(table: Any, on: Any, options: Any, message: str) -> None:
    with pytest.raises(FlowError, match=f"lookup 'ads': {message}"):
        ps.Flow("refused").read(Trickle([], 1)).lookup(table, on, name="ads", **options)


def test_fields_that_are_known_before_are_checked_before() -> None:
    class Known(Trickle):
        def fields(self) -> list[str]:
            return ["ad", "n"]

    read = ps.Flow("known").read(Known([], 1))
    with pytest.raises(FlowError, match=r"lookup\(on='id'\): the records have no such field; they have: ad, n"):
        read.lookup(CAMPAIGNS, ("id", "ad"))
    with pytest.raises(FlowError, match="the records have a field 'n' already; leave it out: columns="):
        read.lookup([{"ad": 1, "n": 2}], "ad", name="again")
    looked = read.lookup(CAMPAIGNS, "ad", columns=["budget"])
    with pytest.raises(FlowError, match=r"key_by\('campaign'\): the records have no such field; they have: ad, n, bud"):
        looked.key_by("campaign")
    looked.key_by("budget")


@pytest.mark.parametrize("bad", [{"n": 1}, {"ad": [1]}, ("ad", 1), None], ids=repr)
def test_a_record_that_cannot_be_looked_up_fails_by_the_policy(bad: Any) -> None:
    good = {"ad": 1}
    found = [{"ad": 1, "campaign": "a", "budget": 5}] * 2
    with pytest.raises(RecordError, match="operator 'lookup' failed") as caught:
        joined([good, bad, good], CAMPAIGNS, "ad")
    assert caught.value.record == repr(bad)
    assert joined([good, bad, good], CAMPAIGNS, "ad", on_error="skip") == found
    assert joined([good, bad, good], CAMPAIGNS, "ad", on_error="dead_letter", how="left") == [*found, bad]


def test_the_time_of_records_stays_known_after_a_lookup() -> None:
    flow = ps.Flow("timed")
    stream = flow.read(Trickle([], 1), name="in").watermark("at").lookup(CAMPAIGNS, "ad")
    stream.key_by("campaign").window(ps.Tumbling(1)).count().write(ps.sinks.Null(), name="out")
    records = [{"ad": ad, "at": at} for ad, at in ((1, 0), (2, 999), (3, 1), (1, 1000), (1, 5))]
    assert ps.testing.run(flow, records)["out"] == [("a", 0, 1000, 1), ("b", 0, 1000, 1), ("a", 1000, 2000, 1)]


def test_the_plan_tells_of_the_table() -> None:
    flow = ps.Flow("told")
    flow.read(Trickle([], 1)).lookup(CAMPAIGNS, "ad", how="left").write(ps.sinks.Null())
    assert "left lookup of 2 rows on ad  <- read" in flow.explain()


# --- tables that change ----------------------------------------------------------------------------------------------


class Prices:
    """Answers like an outside system, and counts how often it is asked in the process that asks."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def open(self) -> None:
        self.asked = []

    def __call__(self, key: str) -> dict[str, Any] | None:
        self.asked.append(key)
        return {"item": key, "price": len(key), "asked": len(self.asked)} if key != "none" else None


def test_a_function_is_asked_once_for_each_key_that_it_knows_or_not() -> None:
    flow = ps.Flow("asked")
    stream = flow.read(ps.sources.Memory([]))
    stream.lookup(Prices(), "item").write(ps.sinks.Collect(), name="inner")
    stream.lookup(Prices(), "item", how="left", columns=["price"]).write(ps.sinks.Collect(), name="left")
    orders = [{"item": item} for item in ("tea", "none", "tea", "jam", "none", "jam")]
    out = ps.testing.run(flow, orders)
    assert out["inner"] == [
        {"item": "tea", "price": 3, "asked": 1},
        {"item": "tea", "price": 3, "asked": 1},
        {"item": "jam", "price": 3, "asked": 3},
        {"item": "jam", "price": 3, "asked": 3},
    ]
    assert [(row["item"], row["price"]) for row in out["left"]] == [
        (item, None if item == "none" else 3) for item in ("tea", "none", "tea", "jam", "none", "jam")
    ]


def test_a_row_of_a_function_that_lacks_a_column_says_which_it_has() -> None:
    flow = ps.Flow("f")
    rows = flow.read(ps.sources.Memory([])).lookup(lambda key: {"id": key, "w": 1}, on="id", columns=["v"])
    rows.write(ps.sinks.Null())
    with pytest.raises(RecordError, match="has no column 'v'; it has: 'id', 'w'"):
        ps.testing.run(flow, [{"id": 1}])


def test_the_cache_of_a_lookup_is_bounded_and_forgets() -> None:
    now = 0.0
    operator = OutsideLookup(Prices(), "item", cache_s=10, cache_rows=2)
    stage = operator.stage(StageContext(operator, wall=lambda: now))
    stage.open()

    def asked(item: str) -> int:
        (row,) = stage.run([{"item": item}])
        return int(row["asked"])

    assert [asked(item) for item in "aba"] == [1, 2, 1]
    assert [asked(item) for item in "cb"] == [3, 4]  # c takes the place of b, which was not used for longest
    now = 11.0
    assert asked("b") == 5


def test_a_table_is_loaded_again_while_records_pass() -> None:
    now, loads, begun, go_on = 0.0, 0, threading.Event(), threading.Event()

    def load() -> list[dict[str, Any]]:
        nonlocal loads
        loads += 1
        if loads == 2:
            begun.set()
            go_on.wait(60)
        if loads == 3:
            raise OSError("the table is not there")
        return [{"item": "tea", "price": loads}]

    operator = OutsideLookup(Reloaded(list, 1), "item")  # a function of this test cannot be pickled
    operator.table.load = load  # type: ignore[union-attr]
    stage = operator.stage(StageContext(operator, wall=lambda: now))
    stage.open()

    def price() -> Any:
        (row,) = stage.run([{"item": "tea"}])
        return row["price"]

    assert [price(), price()] == [1, 1]
    now = 2.0
    assert price() == 1
    assert begun.wait(60)
    assert price() == 1, "records do not wait for the new table"
    go_on.set()
    until(lambda: price() == 2)
    now = 4.0
    until(lambda: price() == 2 and loads == 3 and stage._loading is None)  # type: ignore[attr-defined]
    now = 6.0
    until(lambda: price() == 4)


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError

    __repr__ = __str__


def test_loads_that_fail_or_take_long_are_told(caplog: pytest.LogCaptureFixture) -> None:
    now, loads, go_on = 0.0, 0, threading.Event()

    def load() -> list[dict[str, Any]]:
        nonlocal loads
        loads += 1
        if loads == 2:
            raise NoText
        if loads == 3:
            go_on.wait()
        return [{"item": "tea", "price": loads}]

    operator = OutsideLookup(Reloaded(list, 1), "item", name="prices")
    operator.table.load = load  # type: ignore[union-attr]
    stage = operator.stage(StageContext(operator, index=2, wall=lambda: now))
    stage.open()

    def price() -> Any:
        (row,) = stage.run([{"item": "tea"}])
        return row["price"]

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records]

    now = 1.0
    until(lambda: price() == 1 and len(told()) == 1)
    assert told()[0] == (
        "lookup 'prices', task 2: the table could not be loaded again, which is tried once more in 1 s (NoText (its "
        "text cannot be shown: its __str__ raises ValueError)); until then the rows that were loaded before hold"
    )
    now = 1.9
    assert [price(), loads] == [1, 2]
    now = 2.0
    until(lambda: price() == 1 and loads == 3)
    now = 2.9
    assert [price(), len(told())] == [1, 1]
    now = 3.0
    assert [price(), price()] == [1, 1]
    now = 9.0
    assert [price(), loads, len(told())] == [1, 3, 2]
    assert "'prices', task 2: loading the table again takes longer than every_s=1; until then the rows" in told()[1]
    go_on.set()
    until(lambda: price() == 3)
    now = 9.9
    assert [price(), loads] == [3, 3]
    now = 1000.0
    assert price() == 3, "after a pause of the input, the first record gets a row from before it"
    until(lambda: price() == 4)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "this should have happened long ago"
        time.sleep(0.001)
