"""agg in Spark: the partials of a micro-batch are those of the record form, or it is left to the record form."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock.bridge.forms import RangeForm, as_columns
from penstock.bridge.native import NotTheSame, native
from penstock.bridge.operation import Operations
from penstock.bridge.session import Session
from penstock.runtime.errors import FlowError
from penstock.runtime.operators.micro_batch import MicroBatchResult
from penstock.runtime.program.flow import Stream
from penstock.runtime.records.batch import KeyedBatch
from tests.bridge.spark.test_operations import form_of, here, joined, merged, text_lines

pytestmark = pytest.mark.skipif(shutil.which("java") is None, reason="there is no Java")


UTC = timezone.utc
SCHEMA = pa.schema(
    [
        ("k", pa.string()),
        ("at", pa.int64()),
        ("i", pa.int64()),
        ("small", pa.int16()),
        ("f", pa.float64()),
        ("single", pa.float32()),
        ("d", pa.decimal128(12, 2)),
        ("wide", pa.decimal128(38, 4)),
        ("s", pa.string()),
        ("b", pa.bool_()),
        ("t", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("nothing", pa.null()),
    ]
)


def rows(rng: random.Random, n: int) -> list[dict[str, Any]]:
    """Records with nulls, NaN, infinities, integers at the ends of 64 bits. The doubles are such that sums of them are
    exact in any order."""

    def row(i: int) -> dict[str, Any]:
        made = {
            "i": rng.choice((rng.randrange(-9, 9), 2**63 - 1, -(2**63), 2**62)),
            "small": rng.randrange(-(2**15), 2**15),
            "f": rng.choice((rng.randrange(-4000, 4000) / 8, rng.randrange(100) / 4, math.nan, math.inf)),
            "single": rng.randrange(-100, 100) / 8,
            "d": Decimal(25 * rng.randrange(-(10**10), 10**10)).scaleb(-2),
            "wide": Decimal(rng.randrange(-(10**27), 10**27)).scaleb(-4),
            "s": rng.choice(("", "a", "é", "zz", "\uffff", "\U0001f40d")),
            "b": rng.random() < 0.5,
            "t": datetime(2024, 1, 1, tzinfo=UTC) + timedelta(microseconds=rng.randrange(10**12)),
            "day": date(2024, 1, 1) + timedelta(days=rng.randrange(-(10**5), 10**5)),
            "nothing": None,
        }
        made = {name: None if rng.random() < 0.3 else value for name, value in made.items()}
        return {"k": rng.choice("abcdef"), "at": 1_000_000 + 37 * i, **made}

    return [row(i) for i in range(n)]


def batch(records: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(records, SCHEMA)


NUMBERS = ("i", "small", "f", "single", "d", "wide")
MEANS = ("small", "f", "single", "d")  # of the others a mean depends on the order
FIELDS = SCHEMA.names[2:]
OF_FIELDS = {
    "n": ps.count(),
    **{f"count_{name}": ps.count(name) for name in FIELDS},
    **{f"sum_{name}": ps.sum(name) for name in (*NUMBERS, "nothing")},
    **{f"mean_{name}": ps.mean(name) for name in (*MEANS, "nothing")},
    **{f"min_{name}": ps.min(name) for name in FIELDS},
    **{f"max_{name}": ps.max(name) for name in FIELDS},
}
COMPUTED = {
    "n": ps.count(ps.col("s").str.startswith("z")),
    "twice": ps.sum(ps.col("small") * 2),
    "wrapped": ps.sum(ps.col("i") * 3),
    "money": ps.sum(ps.col("d") * Decimal("1.5")),
    "longest": ps.max(ps.col("s").str.length()),
    "share": ps.mean(ps.when(ps.col("b"), 1.0).otherwise(0.0)),
    "hour": ps.min(ps.col("t").dt.hour()),
    "first": ps.min(ps.coalesce(ps.col("small"), 7)),
}


def of_rows(stream: Stream) -> Stream:
    """Something native before it."""
    return stream.filter(ps.col("k") != "f").watermark("at", out_of_orderness_s=1)


NATIVE: dict[str, Callable[[Stream], Any]] = {
    "fields": lambda s: of_rows(s).key_by("k").agg(**OF_FIELDS),
    "computed": lambda s: of_rows(s).key_by("k").agg(**COMPUTED),
    "count alone": lambda s: of_rows(s).key_by("k").agg(n=ps.count()),
    "a computed key": lambda s: of_rows(s).key_by(ps.col("small") % 3).agg(low=ps.min("small"), n=ps.count()),
    "tumbling": lambda s: of_rows(s).key_by("k").window(ps.Tumbling(0.7, offset_s=0.1)).agg(**OF_FIELDS),
    "sliding": lambda s: of_rows(s).key_by("k").window(ps.Sliding(1, 0.3)).agg(**COMPUTED),
}


def plain(answer: MicroBatchResult) -> Any:
    """Partials by key, in no order; a NaN equals a NaN, and types count."""
    found: dict[Any, list[Any]] = {}
    for each in answer.batches:
        assert isinstance(each, KeyedBatch)
        assert each.partial
        for key, value in zip(each.keys, each.values, strict=True):
            found.setdefault(key, []).append(comparable(value))
    return {key: sorted(values, key=repr) for key, values in found.items()}, answer.greatest


def state(form: RangeForm, answer: MicroBatchResult) -> Any:
    """What the partial results of an answer lead to: each partition may have found something for a key."""
    found, greatest = merged(form, answer)
    return {key: comparable(value) for key, value in found.items()}, greatest


def comparable(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(comparable, value))
    if isinstance(value, datetime):
        return ("timestamp", value.astimezone(UTC))
    return (type(value).__name__, "nan" if isinstance(value, float) and math.isnan(value) else value)


@pytest.mark.parametrize("name", NATIVE)
def test_partials_of_spark_are_those_of_the_record_form(name: str, session: Session) -> None:
    form = form_of(lambda s: NATIVE[name](s).write(ps.sinks.Null()), [{"k": "a"}])
    compiled = native(form, session, SCHEMA.names)
    assert compiled is not None
    assert compiled.rest is None, "not native to its end"
    operations = Operations(session, [form])
    for seed in range(2):
        some = batch(
            [row for row in rows(random.Random(seed), 300) if name != "a computed key" or row["small"] is not None]
        )
        found = operations.answer(form.chain, form.position, some)
        assert state(form, found) == state(form, here(form, some.to_pylist())), seed
    nothing = operations.answer(form.chain, form.position, batch([]))
    assert nothing.batches == []


def test_json_texts_of_several_results(session: Session) -> None:
    value = ps.col("value")
    totals = {
        "n": ps.count(value.json("n")),
        "total": ps.sum(value.json("n").cast("bigint")),
        "ad": ps.max(value.json("ad")),
    }
    form = form_of(
        lambda s: (
            s.filter(value != "")
            .with_columns(more=value.json("kind"))
            .key_by("more")
            .agg(**totals)
            .write(ps.sinks.Null())
        ),
        ["x"],
    )
    lines = [line for line in text_lines(random.Random(3), 300) if '"kind"' in line and line.endswith("}")]
    compiled = native(form, session, ["value"])
    assert compiled is not None
    assert compiled.rest is None
    found = Operations(session, [form]).answer(form.chain, form.position, pa.record_batch([pa.array(lines)], ["value"]))
    assert plain(found) == plain(here(form, lines))
    assert len(found.batches[0]) == 2


def short(record: dict[str, Any]) -> bool:
    return len(record["ad"] or "") < 4


@pytest.mark.parametrize("windowed", [False, True])
def test_behind_a_python_function_it_is_combined_by_the_record_form_s_own_code(
    session: Session, windowed: bool
) -> None:
    totals = {"n": ps.count(), "total": ps.sum("n"), "mean": ps.mean("weight")}

    def build(stream: Stream) -> Any:
        by_campaign = joined(stream).filter(short).key_by("campaign")
        keyed: Any = by_campaign.window(ps.Tumbling(0.7), time="time") if windowed else by_campaign
        return keyed.agg(**totals).write(ps.sinks.Null())

    form = form_of(build, ["x"])
    lines = text_lines(random.Random(1), 300)
    operations = Operations(session, [form])
    whole = results_of(form, [here(form, lines)])
    for input_ in (pa.record_batch([pa.array(lines)], ["value"]), as_columns(lines)):
        assert results_of(form, [operations.answer(form.chain, form.position, input_)]) == whole


def results_of(form: RangeForm, answers: list[MicroBatchResult]) -> dict[Any, Any]:
    """What tasks make of answers, by key (and start)."""
    combiner: Any = form.combiner
    inner = getattr(combiner, "inner", combiner)
    state: dict[Any, Any] = {}
    for answer in answers:
        for each in answer.batches:
            assert isinstance(each, KeyedBatch)
            if inner is combiner:
                inner.merge(state, iter(each.keys), iter(each.values))
            else:
                places = [(key, start) for key, (start, _) in zip(each.keys, each.values, strict=True)]
                inner.merge(state, iter(places), iter([partial for _, partial in each.values]))
    return {
        key: {name: comparable(each) for name, each in inner.result(partial).items()} for key, partial in state.items()
    }


@pytest.mark.parametrize("name", ["fields", "tumbling"])
def test_the_records_of_a_group_may_be_dealt_out_between_both(name: str, session: Session) -> None:
    form = form_of(lambda s: NATIVE[name](s).write(ps.sinks.Null()), [{"k": "a"}])
    operations = Operations(session, [form])
    records = batch(rows(random.Random(5), 300)).to_pylist()
    answers = [
        here(form, records[:100]),
        operations.answer(form.chain, form.position, batch(records[100:250])),
        here(form, records[250:]),
    ]
    assert results_of(form, answers) == results_of(form, [here(form, records)])


@pytest.mark.parametrize("value", [Decimal(10**25), Decimal(-(10**25))])
def test_sums_of_decimals_that_might_have_too_many_digits_are_left_to_python(value: Decimal, session: Session) -> None:
    records = [{"k": "a", "wide": value}, {"k": "a", "wide": None}]
    for result, fits in ((ps.sum("wide"), False), (ps.mean("wide"), True), (ps.max("wide"), True), (ps.sum("d"), True)):
        form = form_of(
            lambda s, r=result: s.filter(ps.col("k") == "a").key_by("k").agg(r=r).write(ps.sinks.Null()), records
        )
        operations = Operations(session, [form])
        if fits:
            operations.answer(form.chain, form.position, batch(records))
        else:
            with pytest.raises(NotTheSame, match="more than 38 digits"):
                operations.answer(form.chain, form.position, batch(records), "columns")


def test_what_has_no_such_aggregate_is_no_answer(session: Session) -> None:
    """The record form says which record it is."""
    form = form_of(lambda s: s.filter(ps.col("k") == "a").key_by("k").agg(r=ps.sum("s")).write(ps.sinks.Null()), [])
    with pytest.raises(FlowError, match=r'sum\(col\("s"\)\): there is no sum of a string'):
        Operations(session, [form]).answer(form.chain, form.position, batch(rows(random.Random(1), 9)))
