"""Computes the aggregates of `agg(n=count(), total=sum_("price"))` over a group of records, in parts that can be
merged.

The *partial* of a group is a tuple of *parts*: one an aggregation, but a mean has two, the sum as a double and the
number of values. A part is that of a single record, or two parts merged, wherever they are: records in the data stream,
a group of rows in Spark (`bridge.columns` makes the same parts as columns). Partials of any parts of a group merge, in
any order, to that of the whole; a result is made of it. So the records of a group may be divided between both
paradigms (docs/papers.md: D1, D4).

As in SQL, nulls are not counted, added or compared, and of no values the sum, least, greatest and mean are null. A sum
of integers wraps at 64 bits. A mean is a double, of decimals too. Sums of doubles may differ in their last digits with
the order of adding.

Functions over lists are written as Python text, as those of expressions are: what is the same for values of one simple
class stands in line, everything else is a call of `kernels`. A value that cannot be counted in must never be counted in
by half: it raises, and the partial stays what it was.

The names end in an underscore where Python's own would be hidden; `AGGREGATIONS` has them by the short ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from typing import Any

from penstock.runtime.errors import FlowError, shorten
from penstock.runtime.expressions import kernels, tree
from penstock.runtime.expressions.operations import infer
from penstock.runtime.expressions.tree import BIGINT_MAX, BIGINT_MIN, DECIMAL_DIGITS, Expr, bare, col
from penstock.runtime.expressions.typed import (
    BIGINT,
    BOOLEAN,
    DATE,
    DOUBLE,
    NULL,
    STRING,
    TIMESTAMP,
    Schema,
    Type,
    decimal_size,
    decimal_type,
    kind,
)
from penstock.runtime.scalars import python_number

#: Adds records or partials to those of their keys: function(state, keys, values).
Adder = Callable[[dict[Any, Any], Iterator[Any], Iterator[Any]], None]

_NUMBERS = (BIGINT, DOUBLE, "decimal")
_ORDERED = (*_NUMBERS, BOOLEAN, STRING, TIMESTAMP, DATE)


@dataclass(frozen=True, eq=False, repr=False)
class Aggregation:
    """One aggregation: its kind (count, sum, min, max or mean) and what it takes from each record.

    `input` is the expression; None for count() of records.
    """

    kind: str
    input: Expr | None = None

    def __repr__(self) -> str:
        return f"{self.kind}({'' if self.input is None else bare(self.input)})"

    def same(self, other: object) -> bool:
        """Tells whether the other aggregation computes the same."""
        if not isinstance(other, Aggregation) or self.kind != other.kind:
            return False
        return other.input is None if self.input is None else self.input.same(other.input)

    def fields(self) -> tuple[str, ...]:
        """Returns the record's fields that it reads."""
        return () if self.input is None else self.input.fields()

    def type(self, schema: Schema | None = None) -> Type:
        """Returns the type of its result. Raises FlowError when it cannot take values of its input's type."""
        found = None if self.input is None else infer(self.input, schema)
        if self.kind == "count":
            return BIGINT
        if found not in (None, NULL) and kind(found) not in (_ORDERED if self.kind in ("min", "max") else _NUMBERS):
            raise FlowError(f"{self!r}: there is no {self.kind} of a {found}")
        size = decimal_size(found)
        if self.kind == "sum" and size is not None:
            return decimal_type(min(size[0] + 10, DECIMAL_DIGITS), size[1])
        return DOUBLE if self.kind == "mean" else found

    @property
    def parts(self) -> tuple[str, ...]:
        """Returns how each of its parts merges: as a count, a sum, a min or a max."""
        return ("sum", "count") if self.kind == "mean" else (self.kind,)

    def columns(self, name: str) -> tuple[str, ...]:
        """Returns the columns that hold its parts in a table of partials, when its result is called `name`."""
        return tuple(f"{name}__{part}" for part in self.parts) if len(self.parts) > 1 else (name,)


def count(of: Expr | str | None = None) -> Aggregation:
    """Counts the records, or the values of an expression that are not null."""
    return Aggregation("count", None if of is None else _input(of, "count"))


def sum_(of: Expr | str) -> Aggregation:
    """Returns the sum of an expression or a field."""
    return Aggregation("sum", _input(of, "sum"))


def min_(of: Expr | str) -> Aggregation:
    """Returns the least value. NaN is greater than all numbers."""
    return Aggregation("min", _input(of, "min"))


def max_(of: Expr | str) -> Aggregation:
    """Returns the greatest value. NaN is greater than all numbers."""
    return Aggregation("max", _input(of, "max"))


def mean(of: Expr | str) -> Aggregation:
    """Returns the mean, as a double."""
    return Aggregation("mean", _input(of, "mean"))


#: The functions by the names that users know them by.
AGGREGATIONS: dict[str, Callable[..., Aggregation]] = {
    "count": count,
    "sum": sum_,
    "min": min_,
    "max": max_,
    "mean": mean,
}


def _input(of: object, what: str) -> Expr:
    if isinstance(of, str):
        return col(of)
    if isinstance(of, Expr):
        return of
    raise FlowError(f"{what} takes an expression or a field name, got {shorten(of)}")


# --- functions over lists -------------------------------------------------------------------------------------

_SIMPLE = frozenset({int, float, str, bool, date})  # classes of which < is the order, but for NaN

# The part of one value {b}.
_FIRST = {
    "count": "(0 if {b} is None else 1)",
    "sum": "({b} if {b} is None or {b}.__class__ in REALS else number({b}))",
    "min": "({b} if {b} is None or {b}.__class__ in SIMPLE else ordered({b}))",
    "max": "({b} if {b} is None or {b}.__class__ in SIMPLE else ordered({b}))",
    "mean": "({b} if {b} is None or {b}.__class__ is float else double({b}))",  # its sum
}

# The parts {a} and {b} merged. NaN is the greatest of numbers.
_MERGED = {
    "count": "{a} + {b}",
    "sum": (
        "({a} + {b} if {a}.__class__ is {b}.__class__ is float else t if {a}.__class__ is {b}.__class__ is int "
        f"and {BIGINT_MIN} <= (t := {{a}} + {{b}}) <= {BIGINT_MAX} else total({{a}}, {{b}}))"
    ),
    "min": (
        "(({b} if {b} < {a} or {a} != {a} else {a}) if {a}.__class__ is {b}.__class__ and {a}.__class__ in SIMPLE "
        "else least({a}, {b}))"
    ),
    "max": (
        "(({b} if {a} < {b} or {b} != {b} else {a}) if {a}.__class__ is {b}.__class__ and {a}.__class__ in SIMPLE "
        "else greatest({a}, {b}))"
    ),
}

# The part {a} with one value {b} more.
_ADDED = {
    **_MERGED,
    "count": "({a} if {b} is None else {a} + 1)",
    "mean": "({a} + {b} if {a}.__class__ is float and {b}.__class__ in REALS else total({a}, double({b})))",
}


def inputs_of(aggregations: Iterable[Aggregation]) -> list[Expr]:
    """Returns the inputs that the aggregations take from each record, in order and without repetition."""
    return list({tree.key(each.input): each.input for each in aggregations if each.input is not None}.values())


def add_function(aggregations: Sequence[Aggregation]) -> Adder:
    """Makes a function that adds records to the partials of their keys. A record's value is the tuple of its
    `inputs_of`; where there are none, the value may be anything."""
    first, added = _codes(aggregations, _FIRST, "1"), _codes(aggregations, _ADDED, "{a} + 1")
    return _loop(_values(aggregations), first, added)


def partials_function(aggregations: Sequence[Aggregation]) -> Callable[[list[Any]], list[tuple[Any, ...]]]:
    """Makes a function that returns the partial of each single record, from the values that `add_function` takes."""
    first = ", ".join(_codes(aggregations, _FIRST, "1"))
    return _function(f"def made(values):\n    return [({first},) for {_values(aggregations)} in values]\n")


@lru_cache(maxsize=256)
def merge_function(parts: tuple[str, ...]) -> Adder:
    """Makes a function that adds partials of such parts to the partials of their keys."""
    news = [f"b{i}" for i in range(len(parts))]
    merged = [_MERGED[part].format(a=f"a{i}", b=f"b{i}") for i, part in enumerate(parts)]
    return _loop(f"({', '.join(news)},)", news, merged)


def _codes(aggregations: Sequence[Aggregation], codes: Mapping[str, str], of_records: str) -> list[str]:
    """Returns the code of each part. `of_records` is the code of the part that counts records."""
    inputs = [tree.key(each) for each in inputs_of(aggregations)]
    found: list[str] = []
    for each in aggregations:
        v = "" if each.input is None else f"v{inputs.index(tree.key(each.input))}"
        for part in each.parts:
            code = codes["mean" if part == "sum" and each.kind == "mean" else part] if v else of_records
            found.append(code.format(a=f"a{len(found)}", b=v))
    return found


def _values(aggregations: Sequence[Aggregation]) -> str:
    """Returns the names of the values of a record."""
    names = "".join(f"v{i}, " for i in range(len(inputs_of(aggregations))))
    return f"({names})" if names else "_"


def _loop(target: str, first: Sequence[str], more: Sequence[str]) -> Adder:
    """A function that adds the values in `target` to a state by key: the first makes a partial, the next changes it, of
    which the parts are a0, a1 and so on. New tuples, so that nothing half done can stay."""
    parts = "".join(f"a{i}, " for i in range(len(first)))
    return _function(
        "def made(state, keys, values):\n"
        "    get = state.get\n"
        f"    for key, {target} in zip(keys, values, strict=True):\n"
        "        old = get(key)\n"
        "        if old is None:\n"
        f"            state[key] = ({', '.join(first)},)\n"
        "        else:\n"
        f"            ({parts}) = old\n"
        f"            state[key] = ({', '.join(more)},)\n"
    )


def result_function(aggregations: Mapping[str, Aggregation]) -> Callable[[tuple[Any, ...]], dict[str, Any]]:
    """Makes a function that turns a partial into the results by their names."""
    codes, at = [], 0
    for name, each in aggregations.items():
        code = f"p[{at}] / p[{at + 1}] if p[{at + 1}] else None" if each.kind == "mean" else f"p[{at}]"
        codes.append(f"{name!a}: {code}")
        at += len(each.parts)
    return _function(f"def made(p):\n    return {{{', '.join(codes)}}}\n")


def _function(text: str) -> Callable[..., Any]:
    """Returns the function `made` that a text defines."""
    names: dict[str, Any] = dict(_NAMES)
    exec(compile(text, _GENERATED, "exec"), names)
    made: Callable[..., Any] = names["made"]
    return made


def _number(value: Any) -> Any:
    return kernels.add(0, value)


def _ordered(value: Any) -> Any:
    value = python_number(value)
    kernels.lt(value, value)  # raises when there is no order
    return value


def _double(value: Any) -> float | None:
    value = python_number(value)
    if isinstance(value, str | bool):
        raise TypeError(f"there is no mean of {shorten(value, 80)} ({type(value).__name__})")
    return kernels.to_double(value)


def _total(a: Any, b: Any) -> Any:
    return _number(b) if a is None else a if b is None else kernels.add(a, b)


def _least(a: Any, b: Any) -> Any:
    return _ordered(b) if a is None or kernels.lt(b, a) else a


def _greatest(a: Any, b: Any) -> Any:
    return _ordered(b) if a is None or kernels.lt(a, b) else a


_GENERATED = __file__.removesuffix(".py") + ".generated"  # in tracebacks, so that nobody takes it for the user's code
_NAMES = {
    "REALS": kernels.REALS,
    "SIMPLE": _SIMPLE,
    "number": _number,
    "ordered": _ordered,
    "double": _double,
    "total": _total,
    "least": _least,
    "greatest": _greatest,
}
