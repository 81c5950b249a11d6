"""Spark columns give what closures give: for random expressions and records, and for all that is easily got wrong."""

from __future__ import annotations

import math
import random
import shutil
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest

from penstock.bridge.columns import (
    column_types,
    compile_all,
    filter_rows,
    partial_columns,
    select_columns,
    to_column,
    with_columns,
)
from penstock.bridge.session import Session
from penstock.runtime.errors import FlowError
from penstock.runtime.expressions import (
    Expr,
    col,
    compile_filter,
    compile_select,
    compile_with_columns,
    concat,
    count,
    lit,
    max_,
    mean,
    min_,
    sum_,
    when,
)
from penstock.runtime.expressions.aggregates import Aggregation
from penstock.runtime.operators.agg import Agg
from penstock.runtime.records.userfunc import ErrorHandler
from tests.expressions.random_expressions import (
    INSTANTS,
    NUMBERS,
    PATTERNS,
    SCHEMA,
    STRINGS,
    TEXTS,
    VALUES,
    expression,
    record,
    same_value,
)

pytest.importorskip("pyspark", reason="pyspark is not installed: the columns cannot be tested")

pytestmark = pytest.mark.skipif(shutil.which("java") is None, reason="there is no Java, so Spark cannot be started")

UTC = timezone.utc
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@pytest.fixture
def spark(session: Session) -> Any:
    return session.spark


def frame(spark: Any, records: list[dict[str, Any]], schema: dict[str, str] | None = None) -> Any:
    """Records as a DataFrame of the schema."""
    schema = schema or SCHEMA
    text = ", ".join(f"`{name.replace('`', '``')}` {kind}" for name, kind in schema.items())
    # Spark takes datetimes by utctimetuple(), which knows folds; Python's own arithmetic is not asked.
    return spark.createDataFrame([tuple(each[name] for name in schema) for each in records], text)


def rows(table: Any) -> list[dict[str, Any]]:
    """A DataFrame's rows as records; timestamps and dates by their numbers, as Python's own conversion is by local time
    and by another calendar."""
    from pyspark.sql import functions as F  # noqa: N812

    columns = []
    kinds = {field.name: field.dataType.simpleString() for field in table.schema.fields}
    for name, kind in kinds.items():
        column = F.col(f"`{name.replace('`', '``')}`")
        if kind == "timestamp":
            column = F.unix_micros(column)
        if kind == "date":
            column = F.unix_date(column)
        columns.append(column.alias(name))
    found = [each.asDict() for each in table.select(*columns).collect()]
    for each in found:
        for name, value in each.items():
            if value is not None and kinds[name] == "timestamp":
                each[name] = EPOCH + timedelta(microseconds=value)
            if value is not None and kinds[name] == "date":
                each[name] = date(1970, 1, 1) + timedelta(days=value)
    return found


def check(
    spark: Any, exprs: dict[str, Expr], records: list[dict[str, Any]], schema: dict[str, str] | None = None
) -> None:
    """Both paradigms give the same, of the same types, for all expressions and records."""
    schema = schema or SCHEMA
    table = select_columns(frame(spark, records, schema), exprs)
    types = {name: "void" if (t := expr.type(schema)) == "null" else t for name, expr in exprs.items()}
    assert {field.name: field.dataType.simpleString() for field in table.schema.fields} == types
    found = rows(table)
    typed = compile_select(exprs, schema)(records)
    for name, expr in exprs.items():
        for each, spark_row, closure_row in zip(records, found, typed, strict=True):
            used = {field: each[field] for field in expr.fields()}
            assert same_value(closure_row[name], spark_row[name]), (
                f"{expr!r} of {used}: the closure gives {closure_row[name]!r}, Spark {spark_row[name]!r}"
            )


# --- everything at once -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_random_expressions_give_the_same(spark: Any, seed: int) -> None:
    rng = random.Random(seed)
    kinds = list(VALUES)
    exprs = {f"e{i}": expression(rng, kinds[i % len(kinds)], rng.choice([1, 1, 2, 3])) for i in range(50)}
    check(spark, exprs, [record(rng) for _ in range(30)])


@pytest.mark.parametrize("seed", range(3))
def test_random_filters_keep_the_same(spark: Any, seed: int) -> None:
    rng = random.Random(1000 + seed)
    records = [{**record(rng), "i": i} for i in range(60)]
    table = frame(spark, records).cache()
    for _ in range(5):
        condition = expression(rng, "boolean", 3)
        kept = [each["i"] for each in compile_filter(condition)(records)]
        assert [row["i"] for row in filter_rows(table, condition).select("i").collect()] == kept, condition
    table.unpersist()


# --- one kind of operation at a time, over all values ---------------------------------------------------------------


def test_every_cast_of_every_text(spark: Any) -> None:
    texts = [*NUMBERS, *STRINGS, *(sign + text for text in NUMBERS for sign in ("-", " ", "0"))]
    targets = ["int", "bigint", "double", "boolean", "timestamp", "date", "decimal(10,2)", "decimal(38,0)"]
    check(
        spark,
        {target: col("n").cast(target) for target in targets},
        [{"n": text} for text in texts],
        {"n": "string"},
    )


def test_every_number_cast_and_compared(spark: Any) -> None:
    from tests.expressions.random_expressions import DOUBLES, INTEGERS

    records = [{"i": i, "x": x} for i in INTEGERS for x in DOUBLES]
    exprs: dict[str, Expr] = {}
    for target in ("int", "bigint", "double", "boolean", "decimal(20,0)", "decimal(10,3)"):
        exprs[f"i {target}"] = col("i").cast(target)
        exprs[f"x {target}"] = col("x").cast(target)
    i, x = col("i"), col("x")
    exprs |= {"==": i == x, "<": i < x, "<=": i <= x, "isin": x.isin([0, 1, 2**53 + 1, None]), "%": i % x, "/": i / x}
    for n in (2**53, 2**53 + 1, -(2**53), 0):
        exprs |= {f"i == {n}.0": i == float(n), f"x == {n}": x == n, f"i < {n}.0": i < float(n), f"x >= {n}": x >= n}
        exprs |= {f"i in {n}.0": i.isin([float(n), 0.5]), f"x in {n}": x.isin([n])}
    exprs |= {"> lit": x > 1, "!= lit": x != 2.5, "lit <=": lit(0.1) <= i, "nan": x == lit(math.nan), "+": i + x}
    check(spark, exprs, records, {"i": "bigint", "x": "double"})


def test_decimals_of_doubles_agree_in_their_first_15_digits(spark: Any) -> None:
    """Java before 19 writes some doubles with other last digits than the shortest."""
    rng = random.Random(3)
    records = [{"x": rng.choice([-1, 1]) * rng.random() * 10.0 ** rng.randrange(-8, 19)} for _ in range(300)]
    exprs = {"d": col("x").cast("decimal(38,18)")}
    found = rows(select_columns(frame(spark, records, {"x": "double"}), exprs))
    for ours, theirs in zip(compile_select(exprs)(records), found, strict=True):
        assert abs(ours["d"] - theirs["d"]) <= abs(theirs["d"]) * Decimal("1e-15") + Decimal("1e-18")


def test_every_pair_of_integers(spark: Any) -> None:
    from tests.expressions.random_expressions import INTEGERS

    i, j = col("i"), col("j")
    exprs = {"+": i + j, "-": i - j, "*": i * j, "//": i // j, "%": i % j, "/": i / j, "neg": -i, "lit": i + 2**62}
    check(spark, exprs, [{"i": a, "j": b} for a in INTEGERS for b in INTEGERS], {"i": "bigint", "j": "bigint"})


def test_decimals_are_exact_to_the_last_of_38_digits(spark: Any) -> None:
    schema = {"p": "decimal(18,9)", "q": "decimal(19,9)", "r": "decimal(38,18)"}
    most = [Decimal("9" * 9 + "." + "9" * 9), Decimal("1E-9"), Decimal(0), Decimal("-12345.678901234"), None]
    records = [
        {"p": p, "q": None if q is None else q * 10, "r": None if p is None else p * 99_999_999_999}
        for p in most
        for q in most
    ]
    p, q, r = col("p"), col("q"), col("r")
    exprs = {"*": p * q, "+": p + q, "-": p - q, "<": p < q, "==": p == q, "r": r.cast("decimal(30,3)"), "neg": -r}
    exprs |= {"text": r.cast("string"), "double": r.cast("double"), "lit": p * Decimal("0.10"), "int": p * 7}
    exprs |= {"mixed": r > 0.5, "whole": r >= 1, "when": when(p > q, p).otherwise(0)}
    check(spark, exprs, records, schema)


def test_strings_and_json(spark: Any) -> None:
    s, js = col("s"), col("js")
    paths = ["a", "n", "o.k", "o", "o.k.z", "l", "A"]
    exprs: dict[str, Expr] = {f"json {path}": js.json(path) for path in paths}
    exprs |= {f"re {pattern}": s.regexp_matches(pattern) for pattern in PATTERNS}
    exprs |= {f"split {i}": s.str.split(",").list[i] for i in range(4)}
    exprs |= {"parts": s.str.split("$^\\E").list.len(), "order": s < "\uffff", "same": s == "e\u0301"}
    exprs |= {"inner": concat(lit('{"in":'), js, lit("}")).json("in").json("a"), "double": js.json("n").cast("double")}
    records = [{"s": s, "js": js} for s, js in zip([*STRINGS, None], [*TEXTS, None] * 3, strict=False)]
    check(spark, exprs, records + [{"s": "x", "js": js} for js in TEXTS], {"s": "string", "js": "string"})


def test_times(spark: Any) -> None:
    at = col("at")
    exprs: dict[str, Expr] = {
        f"{unit} start": at.dt.truncate(unit) for unit in ("year", "week", "month", "day", "hour")
    }
    exprs |= {part: getattr(at.dt, part)() for part in ("year", "month", "day", "hour", "minute", "second", "epoch_ms")}
    exprs |= {
        "text": at.cast("string"),
        "date": at.cast("date"),
        "seconds": at.cast("bigint"),
        "back": at.dt.epoch_ms(),
    }
    exprs |= {f"== {i}": at == instant for i, instant in enumerate(INSTANTS)}
    exprs |= {"isin": at.isin(INSTANTS[:5]), "since": at >= INSTANTS[5], "round": at.dt.epoch_ms().dt.from_epoch_ms()}
    check(spark, exprs, [{"at": at} for at in [*INSTANTS, None]], {"at": "timestamp"})


def test_upper_and_lower_of_every_character(spark: Any) -> None:
    """They may differ only where one of the two languages does not know the character, or its other case, yet."""
    characters = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000 and chr(c) != ","]
    lines = [{"s": ",".join(characters[i : i + 1024])} for i in range(0, len(characters), 1024)]
    exprs = {"upper": col("s").str.upper(), "lower": col("s").str.lower()}
    found = rows(select_columns(frame(spark, lines, {"s": "string"}), exprs))
    ours = compile_select(exprs)(lines)
    for line, spark_row, row in zip(lines, found, ours, strict=True):
        for name in exprs:
            for c, theirs, mine in zip(
                *(each.split(",") for each in (line["s"], spark_row[name], row[name])), strict=True
            ):
                assert theirs == mine or c in (theirs, mine), (name, c, theirs, mine)


# --- the functions on tables -------------------------------------------------------------------------------------


def test_json_is_parsed_once_for_all_fields(spark: Any) -> None:
    table = frame(spark, [{"js": text} for text in TEXTS], {"js": "string"})
    js = col("js")
    exprs = {
        "a": js.json("a"),
        "n": js.json("n").cast("bigint") + 1,
        "k": js.json("o.k"),
        "w": when(js.json("a") == "x", 1),
    }
    plan = select_columns(table, exprs)._jdf.queryExecution().optimizedPlan().toString()
    assert plan.count("from_json") == 1, plan
    both = select_columns(table, {"k": js.json("o.k"), "o": js.json("o")})._jdf.queryExecution().optimizedPlan()
    assert both.toString().count("from_json") == 2, "one path leads through the other's end"
    assert [set(stage) for stage in compile_all(exprs, table.schema).stages] == [{"__json0"}]


def test_with_columns_replaces_and_adds(spark: Any) -> None:
    records = [{"a b`.c": i, "i": 2 * i} for i in range(5)]
    table = frame(spark, records, {"a b`.c": "bigint", "i": "bigint"})
    exprs = {"i": col("a b`.c") + col("i"), "k": col("i") * 2}
    found = with_columns(table, exprs)
    assert found.columns == ["a b`.c", "i", "k"]
    assert rows(found) == compile_with_columns(exprs)(records)


def test_columns_of_other_widths_and_missing_ones(spark: Any) -> None:
    table = spark.sql(
        "select 2147483647 as i, cast(3 as tinyint) as t, cast(0.1 as float) as f, array('x') as l, X'00' as b"
    )
    assert column_types(table.schema) == {
        "i": "bigint",
        "t": "bigint",
        "f": "double",
        "l": "array<string>",
        "b": "binary",
    }
    exprs = {
        "i": col("i") + 1,
        "t": col("t") * 100,
        "f": col("f"),
        "l": col("l").list[0],
        "b": col("b").is_null(),
        "m": col("m", optional=True).is_null(),
    }
    [row] = rows(select_columns(table, exprs))
    assert row == {"i": 2**31, "t": 300, "f": 0.10000000149011612, "l": "x", "b": False, "m": True}
    for wrong, message in (
        (col("m"), "there is no field 'm'; there are: i, t, f, l, b"),
        (col("b") == "x", "a binary cannot be compared"),
        (col("i").str.upper(), "str.upper takes string, not bigint"),
    ):
        with pytest.raises(FlowError, match=message):
            to_column(wrong, table.schema)
    with pytest.raises(FlowError, match="a filter needs a condition"):
        filter_rows(table, col("i"))


def test_nulls_of_no_type(spark: Any) -> None:
    n = lit(None)
    exprs = {
        "and": n & col("b"),
        "not": ~n,
        "add": n + 1,
        "div": n / 2,
        "eq": n == 1,
        "upper": n.str.upper(),
        "when": when(n, 1).otherwise(2),
        "json": n.json("a"),
        "first": n.str.split(",").list[0],
        "year": n.dt.year(),
        "re": n.regexp_matches("a"),
        "isin": n.isin([1, None]),
        "none": col("b").isin([]),
        "null": n,
        "cast": n.cast("date"),
        "coalesce": when(col("b"), n).otherwise("x"),
    }
    check(spark, exprs, [{"b": b} for b in (True, False, None)], {"b": "boolean"})


def test_without_a_schema_columns_are_taken_as_they_are(spark: Any) -> None:
    table = frame(spark, [{"i": 3, "s": "x"}], {"i": "bigint", "s": "string"})
    [row] = table.select(to_column((col("i") + 1) / 2).alias("h"), to_column(col("s") == "x").alias("e")).collect()
    assert (row.h, row.e) == (2.0, True)


def aggregated(table: Any, keys: dict[str, Expr], aggregations: dict[str, Aggregation]) -> Any:
    """The partial results of the aggregations for each group of rows with equal keys."""
    inputs = {f"in_{name}": each.input for name, each in aggregations.items() if each.input is not None}
    selected = select_columns(table, {**keys, **inputs})
    parts = []
    for name, each in aggregations.items():
        over = None if each.input is None else col(f"in_{name}")
        parts += partial_columns(name, Aggregation(each.kind, over), column_types(selected.schema))
    return selected.groupBy(*keys).agg(*parts)


def test_partial_aggregates_merge_with_those_of_closures(spark: Any) -> None:
    rng = random.Random(5)
    records = [
        {**record(rng), "s": rng.choice("ab"), "x": rng.choice([1.5, -0.25, None, 8.0, float("nan")])}
        for _ in range(80)
    ]
    records = [{**each, "js": f'{{"v":{i}}}'} for i, each in enumerate(records)]
    aggregations = {
        "n": count(),
        "there": count("i"),
        "total": sum_("i"),
        "money": sum_(col("p") * 2),
        "low": min_("x"),
        "high": max_("x"),
        "last": max_("at"),
        "first": min_("t"),
        "mean": mean("p"),
        "json": mean(col("js").json("v").cast("bigint")),
    }
    keys = {"g": col("s").str.upper()}
    halves = records[:50], records[50:]
    table = aggregated(frame(spark, halves[0]), keys, aggregations)
    spark_part = {row["g"]: row for row in rows(table)}
    agg = Agg(aggregations)

    def add(state: dict[str, Any], part: list[dict[str, Any]]) -> dict[str, Any]:
        keys, values = agg.prepare([each["s"].upper() for each in part], part, ErrorHandler("agg"))
        agg.add(state, iter(keys), iter(values))
        return state

    expected = add({}, records)
    columns = [column for name, each in aggregations.items() for column in each.columns(name)]
    state = {group: tuple(row[column] for column in columns) for group, row in spark_part.items()}
    add(state, halves[1])
    for group in "AB":
        whole = agg.result(expected[group])
        for name, merged in agg.result(state[group]).items():
            if isinstance(merged, float) and not math.isnan(merged):
                assert merged == pytest.approx(whole[name]), name
            else:
                assert same_value(merged, whole[name]), (name, merged, whole[name])


def test_a_mean_of_nothing_and_wrapping_sums(spark: Any) -> None:
    table = frame(spark, [{"i": 2**63 - 1}, {"i": 5}, {"i": None}], {"i": "bigint"})
    [row] = rows(aggregated(table, {"k": lit(1)}, {"s": sum_("i"), "m": mean(lit(None).cast("bigint"))}))
    assert (row["s"], row["m__sum"], row["m__count"]) == (-(2**63) + 4, None, 0)
