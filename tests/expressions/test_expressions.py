"""Expressions: what users write, what closures make of it against a slow evaluator, and what errors say.

tests/bridge/test_columns.py compares the same with Spark.
"""

from __future__ import annotations

import copy
import math
import pickle
import random
import re
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal, localcontext
from functools import reduce
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.bridge.columns import WRITTEN_HERE
from penstock.runtime.errors import FlowError, PenstockError, RecordError
from penstock.runtime.expressions import (
    Closure,
    EvaluationError,
    Expr,
    MissingField,
    coalesce,
    col,
    compile_filter,
    compile_select,
    compile_value,
    compile_with_columns,
    concat,
    count,
    jsontext,
    kernels,
    lit,
    max_,
    mean,
    named,
    sum_,
    tree,
    when,
)
from penstock.runtime.expressions.operations import OPERATIONS
from penstock.runtime.expressions.tree import BINARY, Call
from penstock.runtime.records.userfunc import ErrorHandler, apply
from tests.expressions.random_expressions import SCHEMA, VALUES, evaluate, expression, record, same_value

# Also of what is generated; but not that garbage of other tests is collected here.
pytestmark = pytest.mark.filterwarnings("error", "ignore::ResourceWarning")

UTC = timezone.utc
a, b, s, t = col("a"), col("b"), col("s"), col("t")


def value(expr: Expr, **fields: Any) -> Any:
    """An expression's value for one record, by the closure."""
    [found] = compile_value(expr)([fields])
    return found


# --- against the slow evaluator ---------------------------------------------------------------------------------

seeds = st.randoms(use_true_random=False)
kinds = st.sampled_from(list(VALUES))
large = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@given(rng=seeds, kind=kinds, depth=st.integers(1, 4))
@large
def test_closures_that_know_the_types_give_what_the_slow_evaluator_gives(
    rng: random.Random, kind: str, depth: int
) -> None:
    expr = expression(rng, kind, depth)
    records = [record(rng) for _ in range(8)]
    closure = compile_value(expr, SCHEMA)
    for each, found in zip(records, closure(records), strict=True):
        assert same_value(found, evaluate(expr, each, SCHEMA)), (expr, each)
        assert same_value(closure.evaluate(each), found)


def brings_to_double(expr: Expr) -> bool:
    """Whether a value's type depends on that of values not taken, which only a schema tells."""
    return any(
        isinstance(node, Call)
        and node.op in ("when", "coalesce")
        and node.type(SCHEMA) == "double"
        and any(arg.type(SCHEMA) not in ("double", "boolean") for arg in node.args)
        for node in expr.walk()
    )


@given(rng=seeds, kind=kinds, depth=st.integers(1, 4))
@large
def test_closures_that_do_not_know_the_types_give_the_same(rng: random.Random, kind: str, depth: int) -> None:
    expr = expression(rng, kind, depth)
    if brings_to_double(expr):
        return
    records = [record(rng) for _ in range(8)]
    with localcontext() as context:
        context.prec = 3  # the user's own, which must not matter
        found = compile_value(expr)(records)
    for each, one in zip(records, found, strict=True):
        assert same_value(one, evaluate(expr, each, SCHEMA)), (expr, each)


@given(rng=seeds, depth=st.integers(1, 4), typed=st.booleans())
@large
def test_filters_keep_what_is_true(rng: random.Random, depth: int, typed: bool) -> None:
    condition = expression(rng, "boolean", depth)
    if not typed and brings_to_double(condition):
        return
    records = [record(rng) for _ in range(8)]
    before = copy.deepcopy(records)
    for expr in (condition, ~condition):
        keep = compile_filter(expr, SCHEMA if typed else None)
        kept = [each for each in records if evaluate(expr, each, SCHEMA) is True]
        found = keep(records)
        assert len(found) == len(kept)
        assert all(one is other for one, other in zip(found, kept, strict=True))
        assert [one for one in keep.iterate(iter(records))] == found  # noqa: C416  NaN is the same object, not equal
        assert [keep.evaluate(each) for each in records] == [evaluate(expr, each, SCHEMA) is True for each in records]
    assert repr(records) == repr(before)


@given(rng=seeds, kind=kinds, depth=st.integers(1, 4))
@large
def test_expressions_travel_and_are_written_as_python(rng: random.Random, kind: str, depth: int) -> None:
    expr = expression(rng, kind, depth)
    assert pickle.loads(pickle.dumps(expr)).same(expr)
    names = {"col": col, "lit": lit, "when": when, "coalesce": coalesce, "concat": concat, "Decimal": Decimal}
    names |= {"inf": math.inf, "nan": math.nan, "datetime": __import__("datetime"), "zoneinfo": ZoneInfo}
    assert eval(repr(expr), names).same(expr)


# --- writing expressions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        ((a == "view") & ~(b > 5) | a.is_null(), '((col("a") == "view") & ~(col("b") > 5)) | col("a").is_null()'),
        (1 - a * 2, 'lit(1) - (col("a") * 2)'),
        (-a // 3 % b, '(-col("a") // 3) % col("b")'),
        (col("x", optional=True).between(1, 2), 'col("x", optional=True).between(1, 2)'),
        (a.isin(["x", None]), 'col("a").isin(["x", None])'),
        (when(a > 1, "x").when(b, s).otherwise(None), 'when(col("a") > 1, "x").when(col("b"), col("s"))'),
        (when(a, 1).otherwise(2), 'when(col("a"), 1).otherwise(2)'),
        (coalesce(a, 0).alias("n"), 'coalesce(col("a"), 0).alias("n")'),
        (s.json("o.k").cast("bigint"), 'col("s").json("o.k").cast("bigint")'),
        (s.str.split(",").list[2].str.upper(), 'col("s").str.split(",").list[2].str.upper()'),
        (concat("a'b", s), 'concat("a\'b", col("s"))'),
        (t.dt.truncate("hour"), 'col("t").dt.truncate("hour")'),
        ((a + b).cast("decimal( 10 , 2)"), '(col("a") + col("b")).cast("decimal(10,2)")'),
        (lit("x").str.length(), 'lit("x").str.length()'),
        (s.regexp_matches(r"\d"), r'col("s").regexp_matches("\\d")'),
    ],
)
def test_repr_is_what_the_user_wrote(expr: Expr, text: str) -> None:
    assert repr(expr) == text


def test_an_expression_is_neither_true_nor_false() -> None:
    with pytest.raises(FlowError, match=r'col\("a"\) == 1 is an expression.*Use & \| ~'):
        bool(a == 1)
    for trap in (
        lambda: a > 1 and b > 1,
        lambda: not a,
        lambda: 1 < a < 5,
        lambda: a in [1, b],
        lambda: "x" in s,
        lambda: list(s),
        lambda: [*s.str.split(",").list],
    ):
        with pytest.raises(FlowError):
            trap()
    with pytest.raises(TypeError, match="no hash"):
        {a: 1}


def test_same_is_structural() -> None:
    assert ((a + 1) * 2).same((col("a") + 1) * 2)
    assert not (a + 1).same(a + 1.0)
    assert not lit(True).same(lit(1))
    assert not lit(0.0).same(lit(-0.0))
    assert not lit(Decimal("1.0")).same(lit(Decimal("1.00")))
    assert not a.same(col("a", optional=True))
    assert not a.same("a")
    assert lit(math.nan).same(lit(math.nan))
    assert a.isin([1, 2]).same(a.isin((1, 2)))


def test_fields_are_those_that_it_reads() -> None:
    assert (when(b > a, s.json("x")).otherwise(coalesce(a, t))).fields() == ("b", "a", "s", "t")
    assert lit(1).fields() == ()


def test_names_of_results() -> None:
    assert list(named([a, "b", (a + b).alias("c")])) == ["a", "b", "c"]
    with pytest.raises(FlowError, match="has no name of its own"):
        named([a + b])
    with pytest.raises(FlowError, match="the same name"):
        named([a, b.alias("a")])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: a == None, r"use is_null\(\)"),  # noqa: E711
        (lambda: lit(2**63), "does not fit a bigint"),
        (lambda: lit(datetime(2024, 1, 1)), "has no time zone"),
        (lambda: lit(Decimal("NaN")), "not a number that a decimal can hold"),
        (lambda: lit(Decimal("1" * 39)), "more than 38 digits"),
        (lambda: lit([1]), "cannot be part of an expression"),
        (lambda: lit("\ud800"), "half a surrogate pair"),
        (lambda: col(1), "col takes a field name, got 1"),
        (lambda: a.cast("float"), "cast to int, bigint"),
        (lambda: a.cast("decimal(39,0)"), "p up to 38"),
        (lambda: a.cast("decimal(3,4)"), "s up to p"),
        (lambda: a.json("x..y"), "a path is field names"),
        (lambda: a.isin("abc"), "takes a list of values"),
        (lambda: a.isin([math.nan]), "NaN"),
        (lambda: s.str.substr(0, 1), "start=0"),
        (lambda: s.str.replace("", "x"), "a text to look for"),
        (lambda: s.str.split(",").list[-1], "index=-1"),
        (lambda: s.str.strip(""), "name the characters"),
        (lambda: t.dt.truncate("decade"), "the units are"),
        (lambda: when(True, 1), "an expression as its condition"),
        (coalesce, "at least one"),
        (lambda: sum_(3), "takes an expression or a field name"),
    ],
)
def test_what_cannot_be_written_is_refused_where_it_is_written(make: Any, message: str) -> None:
    with pytest.raises(FlowError, match=message):
        make()


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        (col("i") == "x", "bigint and string have no common type"),
        (col("s") + 1, "add takes bigint or double or decimal, not string"),
        (col("b") & col("i"), "and takes boolean, not bigint"),
        (col("p") / col("q"), "no div that is exact"),
        (col("x") // 2, "idiv takes bigint, not double"),
        (col("x").cast("string"), r"cast to decimal\(p,s\) first"),
        (col("i").cast("timestamp"), "from_epoch_ms"),
        (col("at") == col("d"), "timestamp and date have no common type"),
        (col("p").cast("decimal(38,18)") * col("p"), "needs 49 digits"),
        (col("p").cast("decimal(38,0)") < col("q"), "needs 42 digits"),
        (when(col("b"), 1).otherwise("x"), "have no common type"),
        (col("nothing"), "there is no field 'nothing'; there are: i, j"),
        (col("i").str.upper(), "takes string"),
    ],
)
def test_types_that_do_not_fit_are_refused_when_the_flow_is_built(expr: Expr, message: str) -> None:
    with pytest.raises(FlowError, match=message):
        compile_value(expr, SCHEMA)


def test_types_follow_those_of_fields() -> None:
    assert (col("p") * col("q")).type(SCHEMA) == "decimal(23,6)"
    assert (col("p") + 1).type(SCHEMA) == "decimal(11,2)"
    assert (col("i") / 2).type(SCHEMA) == (col("i") + col("x")).type(SCHEMA) == "double"
    assert col("i").cast("int").type(SCHEMA) == "bigint"
    assert (col("i") == 1).type() == "boolean"
    assert (col("i") + 1).type() is None
    assert col("new", optional=True).type(SCHEMA) == "null"
    with pytest.raises(FlowError, match="a filter needs a condition"):
        compile_filter(col("i") + 1, SCHEMA)


# --- functions, one by one --------------------------------------------------------------------------------------

MOMENT = datetime(2024, 3, 31, 2, 59, 58, 120_000, tzinfo=timezone(timedelta(hours=1)))


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (lit(None) & False, False),
        (lit(None) & True, None),
        (lit(None) | True, True),
        (lit(None) | False, None),
        (~lit(None), None),
        (lit(None) == 1, None),
        (lit(-7) // 2, -3),
        (lit(-7) % 2, -1),
        (lit(7) / 0, None),
        (lit(7.0) % 0.0, None),
        (lit(7) // 0, None),
        (lit(2**63 - 1) + 1, -(2**63)),
        (-lit(-(2**63)), -(2**63)),
        (lit(-(2**63)) // -1, -(2**63)),
        (lit(math.nan) == lit(math.nan), True),
        (lit(math.nan) > math.inf, True),
        (lit(-0.0) == 0, True),
        (lit(2**53 + 1) == 2.0**53, True),
        (lit(1).isin([]), False),
        (lit(None).isin([1]), None),
        (lit(1).isin([2, None]), None),
        (lit(1).isin([1, None]), True),
        (lit(Decimal("0.1")) == 0.1, True),
        (lit(Decimal("0.1")) + Decimal("0.25"), Decimal("0.35")),
        (lit(Decimal("2.345")).cast("decimal(3,2)"), Decimal("2.35")),
        (lit(Decimal("-2.345")).cast("decimal(3,2)"), Decimal("-2.35")),
        (lit(Decimal("9.999")).cast("decimal(3,2)"), None),
        (lit(Decimal("1.5")).cast("decimal(6,3)").cast("string"), "1.500"),
        (lit(True).cast("string"), "true"),
        (lit("ab").str.upper(), "AB"),
        (lit("ẞ").str.lower(), "ß"),
        (lit("😀é").str.length(), 2),
        (lit("\t a\u00a0").str.strip(), "a\u00a0"),
        (lit("xxaxx").str.lstrip("x"), "axx"),
        (lit("xxaxx").str.rstrip("x"), "xxa"),
        (lit("abc").str.contains("b"), True),
        (lit("abc").str.startswith("b"), False),
        (lit("abc").str.endswith("bc"), True),
        (lit("abcd").str.substr(2, 2), "bc"),
        (lit("abcd").str.substr(9, 2), ""),
        (lit("aXbX").str.replace("X", "--"), "a--b--"),
        (lit("a|b|").str.split("|").list[2], ""),
        (lit("a|b|").str.split("|").list.get(3), None),
        (lit("a|b|").str.split("|").list.len(), 3),
        (lit("abc").regexp_matches("^b"), False),
        (lit("x\n").regexp_matches("x$"), True),
        (concat("a", lit("b"), "c"), "abc"),
        (concat("a", None), None),
        (coalesce(None, 2, 3), 2),
        (when(lit(None), 1), None),
        (when(lit(False), 1).when(lit(True), 2).otherwise(3), 2),
        (lit(5).between(5, 6), True),
        (lit(MOMENT).dt.hour(), 1),
        (lit(MOMENT).dt.truncate("week"), datetime(2024, 3, 25, tzinfo=UTC)),
        (lit(MOMENT).dt.epoch_ms(), 1_711_850_398_120),
        (lit(-1).dt.from_epoch_ms(), datetime(1969, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)),
        (lit(2**60).dt.from_epoch_ms(), None),
        (lit(MOMENT).cast("string"), "2024-03-31 01:59:58.12"),
        (lit("2024-02-29 10:00:00+01:00").cast("timestamp"), datetime(2024, 2, 29, 9, tzinfo=UTC)),
        (lit("2023-02-29").cast("date"), None),
        (lit(date(2024, 2, 29)).dt.day(), 29),
        (lit('{"a": {"b": [1, 2.50]}}').json("a.b"), "[1,2.5]"),
        (lit('{"a": {"b": [1, 2.50]}}').json("a.c"), None),
        (lit('{"a": 1').json("a"), None),
    ],
)
def test_what_operations_give(expr: Expr, expected: Any) -> None:
    found = value(expr)
    assert type(found) is type(expected)
    assert found == expected
    is_condition = isinstance(expected, bool)
    kept = compile_filter(expr if is_condition else expr.is_null())([{}])
    assert kept == ([{}] if (expected if is_condition else expected is None) else [])


def test_clocks_that_go_back_do_not_confuse_instants() -> None:
    berlin = ZoneInfo("Europe/Berlin")
    first, again = (datetime(2024, 10, 27, 2, 30, fold=fold, tzinfo=berlin) for fold in (0, 1))
    assert first == again, "Python compares datetimes of one zone by their clocks"
    assert value(a == b, a=first, b=again) is False
    assert value(a < b, a=first, b=again) is True
    assert value(a == again, a=datetime(2024, 10, 27, 1, 30, tzinfo=UTC)) is True
    assert value(a.isin([again]), a=first) is False


def test_optional_fields_are_null_where_they_are_absent() -> None:
    assert value(col("x", optional=True).is_null(), a=1) is True
    keep = compile_filter(col("x", optional=True) == 1)
    assert keep([{"x": 1}, {}, {"x": None}, {"x": 2}]) == [{"x": 1}]


def test_select_with_columns_and_values() -> None:
    records = [{"a": 1, "b": None}, {"a": 2, "b": 5}]
    assert compile_select({"x": a + 1, "b": b})(records) == [{"x": 2, "b": None}, {"x": 3, "b": 5}]
    assert compile_select(["a", (a * 2).alias("twice")])(records) == [{"a": 1, "twice": 2}, {"a": 2, "twice": 4}]
    swap = compile_with_columns({"a": b, "b": a})
    assert swap(records) == [{"a": None, "b": 1}, {"a": 5, "b": 2}]
    assert compile_value(b)(records) == [None, 5]
    assert records == [{"a": 1, "b": None}, {"a": 2, "b": 5}]
    assert compile_value(a)([]) == []


def test_field_names_may_be_anything() -> None:
    name = 'it\'s "x"\\\n{0} {p} é'
    assert compile_with_columns({name + "!": col(name) == name})([{name: name}]) == [{name: name, name + "!": True}]


def test_json_is_decoded_once_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    make = jsontext.decoder

    def counting(names: Any) -> Any:
        decode = make(names)
        return lambda text: decoded.append(text) or decode(text)

    monkeypatch.setattr(jsontext, "decoder", counting)
    select = compile_select({"x": s.json("a"), "y": s.json("b").cast("int") + 1, "z": when(s.json("c") == "q", 1)})
    texts = ['{"a":"1","b":2,"c":"q"}', "no", None]
    assert select([{"s": text} for text in texts]) == [
        {"x": "1", "y": 3, "z": 1},
        {"x": None, "y": None, "z": None},
        {"x": None, "y": None, "z": None},
    ]
    assert decoded == texts
    decoded.clear()
    inner = compile_select({"p": s.json("in").json("a"), "q": s.json("in").json("b")})
    assert inner([{"s": '{"in":"{\\"a\\":1,\\"b\\":[]}"}'}]) == [{"p": "1", "q": "[]"}]
    assert len(decoded) == 2


@given(number=st.floats(allow_nan=False, allow_infinity=False))
def test_doubles_are_written_as_java_writes_them(number: float) -> None:
    text = jsontext.java_double(number)
    assert float(text) == number
    mantissa, e, exponent = text.partition("E")
    assert "." in mantissa
    assert not e or (
        1 <= abs(float(mantissa)) < 10 and not 1e-3 <= abs(number) < 1e7 and str(int(exponent)) == exponent
    )


@pytest.mark.parametrize(
    "pattern", ["a|b", r"^\d{2,}(?:\.\d+)?$", r"[^\]a-z\-]*?x", "(?=a)(?!b).+", r"\$\{x\}", r"\[.\]", "", "(a|)+", "$"]
)
def test_patterns_that_mean_the_same_everywhere(pattern: str) -> None:
    compile_value(s.regexp_matches(pattern))([{"s": "x"}])


@pytest.mark.parametrize(
    "pattern",
    [
        r"\bx",
        r"(?i)x",
        r"(?P<n>x)",
        r"(a)\1",
        r"(?<=a)b",
        r"\p{L}",
        "a++",
        "a*+",
        "[a[b]]",
        "[a&&b]",
        "[]a]",
        "*a",
        "(+)",
        "a{,3}",
        "x{",
        "]",
        "}",
        "(a",
        "a)",
        r"\Z",
        r"\x41",
        "[a",
        "a\\",
        "[z-a]",
        "[a-]",
        "^*",
        "$+",
        "(?>a)",
        r"[\d-x]",
    ],
)
def test_patterns_that_might_not_are_refused(pattern: str) -> None:
    with pytest.raises(FlowError, match="regexp_matches"):
        s.regexp_matches(pattern)


def test_deep_and_long_expressions() -> None:
    deep = reduce(lambda expr, _: (expr + 1) * 1, range(60), a)
    assert value(deep, a=1) == 61
    deep = reduce(lambda expr, i: when(b == i, expr).otherwise(s.json(f"f{i % 3}")), range(60), s.json("f0"))
    assert value(deep, b=59, s='{"f0":"x","f1":"y"}') == "y"
    long = reduce(lambda expr, i: expr | (a == i), range(1, 300), a == 0)
    assert compile_filter(long)([{"a": 299}, {"a": 300}, {"a": None}]) == [{"a": 299}]
    many = when(a == 0, "0")
    for i in range(1, 150):
        many = many.when(a == i, str(i))
    assert value(many, a=149) == "149"


# --- errors and travel ------------------------------------------------------------------------------------------


def test_a_missing_field_is_named_with_those_that_there_are() -> None:
    for closure in (compile_filter(a == 1), compile_select({"x": s.str.upper(), "y": a + b}), compile_value(-a)):
        good = {"a": 1, "b": 1, "s": "x"}
        bad = [good, {"b": 1, "s": "x"}, good]
        with pytest.raises(MissingField, match=r"no field 'a'; it has: b, s. Write col\(\"a\", optional=True\)"):
            closure(bad)
        with pytest.raises(MissingField):
            list(closure.iterate(iter(bad)))


def test_an_error_has_the_expression_and_the_reason() -> None:
    for expr, fields, reason in (
        (
            a < b,
            {"a": 1, "b": "x"},
            r"cannot compare 'x' \(str\) and 1 \(int\)|cannot compare 1 \(int\) and 'x' \(str\)",
        ),
        (a + 1, {"a": "x"}, r"cannot add 'x' \(str\) and 1 \(int\)"),
        (a & b, {"a": 1, "b": True}, r"cannot take as a boolean 1 \(int\)"),
        (a.dt.hour(), {"a": datetime(2024, 1, 1)}, "has no time zone"),
        (a.dt.hour(), {"a": date(2024, 1, 1)}, "cannot take as a timestamp"),
        (a.cast("string"), {"a": 1.5}, r"cast it to decimal\(p,s\)"),
        (a / b, {"a": Decimal(1), "b": 2}, "cast both to double"),
        (a * b, {"a": Decimal("1" * 30), "b": Decimal("1" * 30)}, "more than the 38 digits"),
        (a.json("x"), {"a": b"{}"}, "json takes a string, not bytes"),
    ):
        with pytest.raises(EvaluationError, match=reason) as caught:
            compile_select({"other": lit(1), "it": expr})([fields])
        assert f"it = {expr!r}: " in str(caught.value)
    with pytest.raises(EvaluationError, match=r"take records that are dicts, not tuple: \(1, 2\)"):
        compile_filter(a == 1)([(1, 2)])


@pytest.mark.parametrize("shape", [compile_filter(a + 1 > 1), compile_select({"n": a + 1}), compile_value(a + 1)])
def test_the_operator_can_tell_which_record_failed_and_continue(shape: Closure) -> None:
    records = [{"a": 1}, {"a": "bad"}, {"a": 2}, {}, {"a": 3}]
    good = shape([{"a": 1}, {"a": 2}, {"a": 3}])
    letters: list[Any] = []
    handler = ErrorHandler("op", "dead_letter", dead_letters=letters)
    assert apply(shape.iterate, records, handler) == good
    assert [letter.record for letter in letters] == [{"a": "bad"}, {}]
    assert all(letter.location is None for letter in letters), "no line of the user's is to blame"
    with pytest.raises(RecordError, match="'bad'"):
        apply(shape.iterate, records, ErrorHandler("op"))
    failures = []
    for each in records:
        try:
            shape.evaluate(each)
        except PenstockError:
            failures.append(each)
    assert failures == [{"a": "bad"}, {}]


def test_closures_travel_without_what_was_built() -> None:
    keep = compile_filter(s.json("k").isin(["x", "y"]) & s.regexp_matches("k"), {"s": "string"})
    records = [{"s": '{"k":"x"}'}, {"s": '{"k":"z"}'}]
    assert keep(records) == records[:1]
    there = pickle.loads(pickle.dumps(keep))
    assert there._functions is None
    assert there(records) == records[:1]
    assert "def batch(records)" in there.source
    assert repr(there) == '<filter col("s").json("k").isin(["x", "y"]) & col("s").regexp_matches("k")>'


def test_an_expression_cannot_smuggle_code_into_the_function() -> None:
    evil = "']); __import__('os').abort(); (['"
    assert value(col(evil) == evil, **{evil: evil}) is True
    assert value(s.json(evil + ".x").is_null(), s="{}") is True
    assert compile_select({evil: s.str.replace(evil, evil)})([{"s": evil}]) == [{evil: evil}]


def test_every_operation_that_users_can_write_has_one_whole_row() -> None:
    written = re.findall(r'(?:Call|When|_both_ways|_comparison|_strip)\("([\w.]+)"', Path(tree.__file__).read_text())
    assert set(written) == set(OPERATIONS)
    assert {op for op, operation in OPERATIONS.items() if operation.spark is None} == set(WRITTEN_HERE)
    for op in set(BINARY) & set(vars(kernels)):
        assert getattr(kernels, op).__name__ == op  # the name that generated code calls it by


# --- aggregations -----------------------------------------------------------------------------------------------


def test_aggregations() -> None:
    assert repr(sum_(col("a") * 2)) == 'sum(col("a") * 2)'
    assert repr(count()) == "count()"
    assert pickle.loads(pickle.dumps(mean("v"))).same(mean(col("v")))
    assert not mean("v").same(sum_("v"))
    assert not count().same(count("v"))
    assert sum_(col("a") + col("b")).fields() == ("a", "b")
    assert mean("v").columns("m") == ("m__sum", "m__count")
    assert max_("v").columns("m") == ("m",)
    assert sum_("p").type(SCHEMA) == "decimal(20,2)"
    assert mean("i").type(SCHEMA) == "double"
    assert (count().type(SCHEMA), max_("s").type(SCHEMA)) == ("bigint", "string")
    with pytest.raises(FlowError, match="there is no sum of a string"):
        sum_("s").type(SCHEMA)
