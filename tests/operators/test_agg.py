"""agg: against plain Python's account of the same values, however they come, are parted, fail or are saved."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.runtime.epochs.restore import check, kinds_with_state
from penstock.runtime.epochs.snapshot import Merged, compact, encode_snapshot
from penstock.runtime.errors import FlowError, RecordError
from penstock.runtime.expressions import Aggregation
from penstock.runtime.operators.agg import Agg
from penstock.runtime.operators.aggregated import Aggregated, Emit
from penstock.runtime.operators.base import Stage, StageContext
from penstock.runtime.operators.windowing import WindowAggregated
from penstock.runtime.records.batch import KeyedBatch
from penstock.runtime.records.key_groups import KeyGroups, partition
from penstock.runtime.records.userfunc import DEAD_LETTERS, ErrorHandler, OnError
from penstock.runtime.state.aggregate import merge_of
from penstock.runtime.state.keyed import SavedState
from tests.runtime.sim import Trickle, small_steps

# --- what plain Python makes of the values --------------------------------------------------------------------------


def total(values: list[Any]) -> Any:
    if isinstance(values[0], int):
        return (sum(values) + 2**63) % 2**64 - 2**63
    return sum(values)


def order(value: Any) -> Any:
    """NaN is greater than all numbers."""
    return (math.isnan(value), value) if isinstance(value, float) and math.isnan(value) else (False, value)


def expected(each: Aggregation, records: list[Any]) -> Any:
    """A result by definition, for an aggregation of a field or of all records."""
    if each.input is None:
        return len(records)
    values = [record[each.fields()[0]] for record in records]
    values = [value for value in values if value is not None]
    if each.kind == "count":
        return len(values)
    if not values:
        return None
    if each.kind == "mean":
        return sum(map(float, values)) / len(values)
    return {"sum": total, "min": lambda v: min(v, key=order), "max": lambda v: max(v, key=order)}[each.kind](values)


def model(agg: Agg, records: list[Any]) -> dict[Any, dict[str, Any]]:
    groups: dict[Any, list[Any]] = {}
    for record in records:
        groups.setdefault(record["k"], []).append(record)
    return {
        key: {name: expected(each, some) for name, each in agg.aggregations.items()} for key, some in groups.items()
    }


def same(found: Any, wanted: Any) -> bool:
    """Equal and of one type, at every depth; means may differ in their last digits."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], value) for key, value in wanted.items())
    if isinstance(wanted, float) and type(found) is float:
        return math.isclose(found, wanted, rel_tol=1e-12) or (math.isnan(found) and math.isnan(wanted))
    return bool(type(found) is type(wanted) and found == wanted)


HUGE = st.integers(2**63 - 5, 2**63 - 1) | st.integers(-(2**63), -(2**63) + 5)
EIGHTHS = st.integers(-4000, 4000).map(lambda n: n / 8)  # sums of which are exact
ZONES = st.sampled_from([timezone.utc, timezone(timedelta(hours=5))])
NUMBERS: dict[str, st.SearchStrategy[Any]] = {
    "i": st.integers(-9, 9),
    "f": EIGHTHS | st.sampled_from([math.nan, math.inf]),
    "d": st.integers(-(10**6), 10**6).map(lambda n: Decimal(n).scaleb(-2)),
}
SUMMED = {**NUMBERS, "h": st.integers(-9, 9) | HUGE}  # of which a mean would depend on the order
ORDERED: dict[str, st.SearchStrategy[Any]] = {
    "s": st.text("aéz\U0001f40d", max_size=2),
    "b": st.booleans(),
    "t": st.datetimes(datetime(1990, 1, 1), datetime(2030, 1, 1), timezones=ZONES),
}
FIELDS = SUMMED | ORDERED
RECORDS = st.lists(
    st.fixed_dictionaries({"k": st.sampled_from("abc"), **{name: st.none() | of for name, of in FIELDS.items()}}),
    max_size=30,
)
EVERYTHING = Agg(
    {
        "n": ps.count(),
        **{f"count_{name}": ps.count(name) for name in FIELDS},
        **{f"sum_{name}": ps.sum(name) for name in SUMMED},
        **{f"mean_{name}": ps.mean(name) for name in NUMBERS},
        **{f"min_{name}": ps.min(name) for name in FIELDS},
        **{f"max_{name}": ps.max(name) for name in FIELDS},
    }
)


def add(agg: Agg, state: dict[Any, Any], records: list[Any]) -> None:
    keys, values = agg.prepare([record["k"] for record in records], records, ErrorHandler("agg"))
    agg.add(state, iter(keys), iter(values))


def merge(agg: Agg, state: dict[Any, Any], partials: dict[Any, Any]) -> None:
    keys, values = agg.shipped(partials)
    merge_of(agg.merging)(state, iter(keys), iter(values))


def results(agg: Agg, state: dict[Any, Any]) -> dict[Any, Any]:
    return {key: agg.result(partial) for key, partial in state.items()}


def cut(rng: random.Random, records: list[Any], parts: int) -> list[list[Any]]:
    edges = sorted(rng.randrange(len(records) + 1) for _ in range(parts - 1))
    return [records[a:b] for a, b in pairwise([0, *edges, len(records)])]


@given(RECORDS, st.integers(1, 5), st.integers(0, 10**6))
def test_records_and_partials_of_any_parts_give_what_python_makes_of_all(
    records: list[Any], parts: int, seed: int
) -> None:
    """Any part comes as records, as partials of all or of each of its records, in any order of the parts."""
    rng = random.Random(seed)
    state: dict[Any, Any] = {}
    several = cut(rng, records, parts)
    rng.shuffle(several)
    for part in several:
        how = rng.choice(("records", "partials", "each"))
        if how == "records":
            add(EVERYTHING, state, part)
        elif how == "partials":
            partials: dict[Any, Any] = {}
            add(EVERYTHING, partials, part)
            merge(EVERYTHING, state, partials)
        else:
            keys, values = EVERYTHING.prepare([r["k"] for r in part], part, ErrorHandler("agg"))
            EVERYTHING.merge(state, iter(keys), iter(EVERYTHING.partials(values)))
    wanted = model(EVERYTHING, records)
    found = results(EVERYTHING, state)
    assert same(found, wanted), (found, wanted)


NUMPYS = {
    "i": [np.int8, np.int16, np.int32, np.int64],
    "h": [np.int64],
    "f": [np.float64],
    "b": [np.bool_],
}


@given(RECORDS, st.integers(1, 5), st.integers(0, 10**6))
def test_numpy_numbers_count_as_the_numbers_that_they_equal(records: list[Any], parts: int, seed: int) -> None:
    rng = random.Random(seed)
    agg = Agg(
        {
            **{name: each for name, each in EVERYTHING.aggregations.items() if name[-2:] in ("_i", "_h", "_f", "_b")},
            "twice": ps.sum(ps.col("i") * 2 + 1),
            "half": ps.max(ps.col("i") / 2),
            "more": ps.min(ps.when(ps.col("i") > ps.col("f"), ps.col("i").cast("double")).otherwise(ps.col("f"))),
            "read": ps.count(ps.when(ps.col("b"), ps.col("i").cast("string"))),
        }
    )
    scalars = [
        {
            name: rng.choice(NUMPYS[name])(value)
            if name in NUMPYS and value is not None and rng.random() < 0.7
            else value
            for name, value in record.items()
        }
        for record in records
    ]
    state: dict[Any, Any] = {}
    wanted: dict[Any, Any] = {}
    for part in cut(rng, scalars, parts):
        partials: dict[Any, Any] = {}
        add(agg, partials, part)
        merge(agg, state, partials)
    add(agg, wanted, records)
    found = results(agg, state)
    assert same(found, results(agg, wanted)), (found, results(agg, wanted))


@pytest.mark.parametrize("name", ["n", "count_i", "sum_h", "mean_f", "min_s", "max_t"])
@given(records=RECORDS)
def test_one_alone(name: str, records: list[Any]) -> None:
    agg = Agg({name: EVERYTHING.aggregations[name]})
    state: dict[Any, Any] = {}
    add(agg, state, records)
    merge(agg, state, {"a": agg.partials([None if agg.selector is None else (None,)])[0]})
    wanted = model(agg, [*records, {"k": "a", **dict.fromkeys(FIELDS)}])
    assert same(results(agg, state), wanted)


def test_expressions_and_what_they_share() -> None:
    price = ps.col("price")
    agg = Agg({"n": ps.count(price > 2), "top": ps.max(price * 2), "all": ps.sum(price), "again": ps.mean("price")})
    records = [{"k": 1, "price": 3}, {"k": 1, "price": None}, {"k": 1, "price": 0.5}]
    state: dict[Any, Any] = {}
    add(agg, state, records)
    assert results(agg, state) == {1: {"n": 2, "top": 6, "all": 3.5, "again": 1.75}}
    assert agg.prepare([1], records[:1], ErrorHandler("agg"))[1] == [(True, 6, 3)], "the price is taken once"
    copied = pickle.loads(pickle.dumps(agg))
    assert results(copied, state) == results(agg, state)
    assert (str(copied), copied.merging, copied.state_kind) == (str(agg), agg.merging, agg.state_kind)


def test_a_text_is_a_record_with_a_value() -> None:
    flow = ps.Flow("texts")
    value = ps.col("value")
    lines = flow.read(ps.sources.Memory(["a 1", "b 2", "a 3"])).key_by(value.str.substr(1, 1))
    lines.agg(total=ps.sum(value.str.substr(3, 1).cast("bigint")), last=ps.max("value"), emit="final").write(
        ps.sinks.Null(), name="out"
    )
    assert sorted(ps.testing.run(flow)["out"]) == [
        ("a", {"total": 4, "last": "a 3"}),
        ("b", {"total": 2, "last": "b 2"}),
    ]


# --- records that fail ----------------------------------------------------------------------------------------------


def stage_of(agg: Agg, emit: Emit = "latest", on_error: OnError = "fail", **context: Any) -> Stage:
    operator = Aggregated(agg, emit, on_error=on_error)
    stage = operator.stage(StageContext(operator, **context))
    stage.open()
    return stage


def keyed(records: Sequence[Any]) -> KeyedBatch:
    return KeyedBatch([record["k"] for record in records], list(records))


PRICES = Agg({"n": ps.count(), "top": ps.max(ps.col("price")), "total": ps.sum(ps.col("price") * 2)})


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([1, 2, None, "x", [], "none"])), max_size=12))
@pytest.mark.parametrize("emit", ["latest", "every", "final"])
def test_only_the_records_that_fail_are_let_go(emit: Emit, pairs: list[tuple[str, Any]]) -> None:
    records = [{"k": k} if price == "none" else {"k": k, "price": price} for k, price in pairs]
    good = [r for r in records if "price" in r and (r["price"] is None or isinstance(r["price"], int))]
    stage = stage_of(PRICES, emit, "dead_letter")
    assert isinstance(stage, Stage)
    out = list(stage.run(keyed(records))) + [pair for piece in stage.finish() for pair in piece]
    totals = {key: {**row, "total": row["total"] and 2 * row["total"]} for key, row in totalled(good).items()}
    assert dict(out) == totals
    letters = [letter.record for letter in stage.context.side[DEAD_LETTERS]]
    assert letters == [(r["k"], r) for r in records if r not in good]
    assert stage.errors.skipped == len(letters)


def totalled(records: list[Any]) -> dict[Any, dict[str, Any]]:
    return model(Agg({"n": ps.count(), "top": ps.max("price"), "total": ps.sum("price")}), records)


@pytest.mark.parametrize(
    ("each", "bad"),
    [
        (ps.sum("v"), ["x", True, Decimal(10) ** 40, datetime(2020, 1, 1)]),
        (ps.mean("v"), ["1", True, 10**400]),
        (ps.min("v"), [[], {}, datetime(2020, 1, 1), Decimal("nan")]),
        (ps.max("v"), [[], "x", True]),
    ],
    ids=lambda value: value.kind if isinstance(value, Aggregation) else "",
)
@pytest.mark.parametrize("first", [False, True])
def test_a_value_that_cannot_be_aggregated_is_no_part_of_anything(
    each: Aggregation, bad: list[Any], first: bool
) -> None:
    """Not even of the count beside it; whether or not its key has had values before."""
    agg = Agg({"n": ps.count(), "v": each})
    kept = [] if first else [{"k": "a", "v": 3}, {"k": "a", "v": 5}]
    for value in bad:
        if first and agg.aggregations["v"].kind == "max" and value != []:
            continue  # alone it has an order
        stage = stage_of(agg, on_error="skip")
        stage.run(keyed([*kept, {"k": "a", "v": value}]))
        assert stage.errors.skipped == 1, value
        assert same(results(agg, stage.state), model(agg, kept))  # type: ignore[attr-defined]


def test_a_failing_expression_names_operator_record_and_reason() -> None:
    stage = stage_of(PRICES)
    with pytest.raises(RecordError, match=r"operator 'agg' failed: MissingField: the record has no field 'price'"):
        stage.run(keyed([{"k": 1, "price": 2}, {"k": 1, "cost": 3}]))
    with pytest.raises(RecordError, match=r"cannot multiply 'x' \(str\) and 2") as caught:
        stage.run(keyed([{"k": 1, "price": "x"}]))
    assert "'price': 'x'" in caught.value.record


def test_results_that_were_emitted_never_change() -> None:
    stage = stage_of(PRICES, "every")
    out = stage.run(keyed([{"k": 1, "price": price} for price in (3, 1, 4)]))
    stage.run(keyed([{"k": 1, "price": 9}]))
    assert out == [
        (1, {"n": 1, "top": 3, "total": 6}),
        (1, {"n": 2, "top": 3, "total": 8}),
        (1, {"n": 3, "top": 4, "total": 16}),
    ]


# --- whole flows ----------------------------------------------------------------------------------------------------


@given(RECORDS, st.lists(st.integers(1, 4), min_size=2, max_size=2), st.booleans(), st.integers(0, 10**6))
def test_a_flow_gives_what_python_makes_of_its_records(
    records: list[Any], parallelism: list[int], chaining: bool, seed: int
) -> None:
    rng = random.Random(seed)
    flow = ps.Flow("flow", chaining=chaining)
    parts = cut(rng, records, parallelism[0])
    stream = flow.read(Trickle(parts, seed), parallelism=parallelism[0])
    emit: Any = rng.choice(("latest", "every", "final"))
    out = stream.key_by("k").agg(emit=emit, name="totals", parallelism=parallelism[1], **EVERYTHING.aggregations)
    out.write(ps.sinks.Null(), name="out", parallelism=1)
    with small_steps(seed):
        found = ps.testing.run(flow, batch_size=rng.choice((1, 3, 50)))["out"]
    assert same(dict(found), model(EVERYTHING, records))
    assert emit != "every" or len(found) == len(records)
    assert emit != "final" or len(found) == len(dict(found))


@given(
    RECORDS,
    st.sampled_from([ps.Tumbling(0.01), ps.Tumbling(0.02, 0.003), ps.Sliding(0.02, 0.007)]),
    st.sampled_from(("final", "latest")),
    st.lists(st.integers(1, 3), min_size=2, max_size=2),
    st.integers(0, 10**6),
)
def test_windows_give_what_python_makes_of_theirs(
    records: list[Any], window: ps.Sliding, emit: Any, parallelism: list[int], seed: int
) -> None:
    rng = random.Random(seed)
    records = [{**record, "at": rng.randrange(60)} for record in records]
    flow = ps.Flow("windows")
    stream = flow.read(Trickle(cut(rng, records, parallelism[0]), seed), parallelism=parallelism[0])
    keyed = stream.watermark("at", out_of_orderness_s=0.1).key_by("k").window(window, lateness_s=1)
    out = keyed.agg(emit=emit, parallelism=parallelism[1], **EVERYTHING.aggregations)
    out.write(ps.sinks.Null(), name="out", parallelism=1)
    with small_steps(seed):
        found = ps.testing.run(flow, batch_size=rng.choice((1, 5, 50)))["out"]
    assert all(end == start + window.size for _, start, end, _ in found)
    starts = {start for record in records for start in window.starts(record["at"])}
    wanted = {
        (key, start): result
        for start in starts
        for key, result in model(EVERYTHING, [r for r in records if start in window.starts(r["at"])]).items()
    }
    assert same({(key, start): result for key, start, _, result in found}, wanted)


def test_a_record_that_fails_in_a_window_is_let_go_alone() -> None:
    operator = WindowAggregated(PRICES, ps.Tumbling(1), lambda record: record["at"], on_error="dead_letter")
    stage = operator.stage(StageContext(operator))
    stage.open()
    prices: list[Any] = [1, "x", None, 4]
    records = [{"k": "a", "at": at, "price": price} for at, price in enumerate(prices)]
    stage.run(keyed(records))
    assert list(stage.advance(1000)) == [[("a", 0, 1000, {"n": 3, "top": 4, "total": 10})]]
    assert [letter.record for letter in stage.context.side[DEAD_LETTERS]] == [("a", records[1])]


# --- state that is saved and moved ----------------------------------------------------------------------------------

GROUPS = 8


class Saved:
    """What a stage has saved so far, as bytes; some of it put together meanwhile."""

    def __init__(self) -> None:
        self.snapshots: list[bytes] = []

    def save(self, stage: Stage, rng: random.Random) -> None:
        whole = not self.snapshots or rng.random() < 0.1 or stage.wants_whole()
        if whole:
            self.snapshots.clear()
        states = {"agg": (stage.snapshot(1, whole), (0, 0, 0, 0))}
        self.snapshots.append(b"".join(encode_snapshot(states, GROUPS)))
        if rng.random() < 0.3:
            first = rng.randrange(len(self.snapshots))
            self.snapshots[first:] = [b"".join(compact(self.snapshots[first:], GROUPS))]


def owned(table: bytes, index: int) -> set[int]:
    return {group for group, owner in enumerate(memoryview(table).cast("H")) if owner == index}


def put_back(saved: list[Saved], groups: set[int]) -> SavedState:
    merged = Merged(GROUPS)
    for one in saved:
        merged.add_task(one.snapshots, groups)
    return merged.operators.get("agg", SavedState())


@given(RECORDS, st.integers(1, 3), st.integers(1, 3), st.integers(0, 10**6))
def test_state_comes_back_by_key_to_any_number_of_tasks(records: list[Any], before: int, after: int, seed: int) -> None:
    """Tasks take records and partials and save at random; now and then other tasks continue from what was saved."""
    rng = random.Random(seed)
    made = lambda tasks: [stage_of(EVERYTHING, epochs=True, index=i, parallelism=tasks) for i in range(tasks)]
    tasks, stages = before, made(before)
    saved = [Saved() for _ in stages]
    done: list[Any] = []
    with small_steps(seed):
        for part in cut(rng, records, 8):
            shares = partition([r["k"] for r in part], (part,), KeyGroups(GROUPS).table(tasks), tasks)
            for stage, (keys, some) in zip(stages, shares, strict=True):
                if keys and rng.random() < 0.5:
                    partials: dict[Any, Any] = {}
                    add(EVERYTHING, partials, some)
                    stage.run(KeyedBatch(*EVERYTHING.shipped(partials), True))
                elif keys:
                    stage.run(KeyedBatch(keys, some))
            done += part
            if rng.random() < 0.6:
                for one, stage in zip(saved, stages, strict=True):
                    one.save(stage, rng)
                if rng.random() < 0.4:
                    tasks = rng.choice((before, after))
                    stages = made(tasks)
                    table = KeyGroups(GROUPS).table(tasks)
                    for index, stage in enumerate(stages):
                        stage.restore(1, put_back(saved, owned(table, index)))
                    saved = [Saved() for _ in stages]
    found = {key: partial for stage in stages for key, partial in stage.state.items()}  # type: ignore[attr-defined]
    assert same(results(EVERYTHING, found), model(EVERYTHING, done))


def of(**results: Aggregation) -> ps.Flow:
    """A flow of one agg."""
    flow = ps.Flow("restored")
    flow.read(ps.sources.Memory([])).key_by("k").agg(name="totals", **results).write(ps.sinks.Null())
    return flow


@pytest.mark.parametrize(
    "other",
    [
        of(n=ps.count(), total=ps.sum("v"), top=ps.max("v")),
        of(n=ps.count()),
        of(n=ps.count(), total=ps.max("v")),
        of(total=ps.sum("v"), n=ps.count()),
        of(n=ps.count(), sum=ps.sum("v")),
    ],
)
def test_other_results_do_not_continue_with_saved_state(other: ps.Flow) -> None:
    saved = kinds_with_state(of(n=ps.count(), total=ps.sum("v")).plan())
    check(of(n=ps.count(), total=ps.sum(ps.col("v") * 2)).plan(), saved, 128)
    with pytest.raises(FlowError, match=r"is the state of a agg of n=count, total=sum\. Give the new operator another"):
        check(other.plan(), saved, 128)


# --- what is refused at once, and shown -----------------------------------------------------------------------------


def stream() -> Any:
    """Keyed records of known fields."""
    return ps.Flow("refused").read(ps.sources.Memory([])).select("k", "v", "at")


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s: s.agg(), r"at least one result, such as n=penstock.count\(\)"),
        (lambda s: s.agg(emit="latest", name="x"), "at least one result"),
        (
            lambda s: s.agg(top=ps.col("v")),
            r"agg\(top=...\): .*penstock.count\(...\), penstock.sum.*; got col\(\"v\"\)",
        ),
        (lambda s: s.agg(n=ps.count), "a result is an aggregation of the records, made by one of"),
        (lambda s: s.agg(n=max), "a result is an aggregation"),
        (lambda s: s.agg(n=ps.sum("w")), r"agg\('w'\): the records have no such field; they have: k, v, at"),
        (lambda s: s.agg(n=ps.sum(ps.col("v") > 1)), "there is no sum of a boolean"),
        (lambda s: s.agg(n=ps.count(), name=ps.max("v")), r"agg\(name=max\(col\(\"v\"\)\)\): name is an option of the"),
        (lambda s: s.agg(n=ps.count(), parallelism=ps.count()), "parallelism is an option of the operator"),
        (lambda s: s.agg(n=ps.count(), emit="sometimes"), "emit='sometimes'"),
        (lambda s: s.agg(n=ps.count(), on_error="ignore"), "'fail', 'skip' or 'dead_letter'"),
        (lambda s: ps.sum(3), "sum takes an expression or a field name, got 3"),
    ],
)
def test_what_cannot_run_is_refused(make: Callable[[Any], Any], message: str, windowed: bool) -> None:
    records = stream()
    keyed = records.watermark("at").key_by("k").window(ps.Tumbling(1)) if windowed else records.key_by("k")
    with pytest.raises(FlowError, match=message):
        make(keyed)


def test_it_is_explained() -> None:
    records = stream().watermark("at").key_by("k")
    windows = records.window(ps.Tumbling(10), lateness_s=1).agg(n=ps.count(), top=ps.max(ps.col("v") * 2))
    flow = windows._flow
    records.agg(low=ps.min("v"), emit="final", parallelism=2, name="lows").write(ps.sinks.Null())
    windows.write(ps.sinks.Null())
    text = flow.explain()
    assert 'agg n=count(), top=max(col("v") * 2) in Tumbling(10000 ms), 1000 ms late, emits final' in text
    assert 'lows        agg low=min(col("v")), emits final' in text
    assert "agg combined before sending" in text
    assert "window_agg  stays: its windows stay with its tasks; Spark makes partial aggregates for them" in text
