"""What `agg(n=count(), total=sum_("price"))` computes of a group of records, in parts that can be merged.

Each aggregation reduces the values of its input expression to a partial, wherever they are: a list in the data stream,
a group of rows in Spark (`bridge.columns`). Partials of any parts of a group merge, in any order, to that of the whole;
`result` makes the answer of it. So the records of a group may be dealt out between both paradigms (D1, D4).

As in SQL, nulls are not counted, added or compared, and of no values the sum, least, greatest and mean are null. A sum
of integers wraps at 64 bits. A mean is a double, of decimals too; its partial is (sum as a double, number of values).
Sums of doubles may differ in their last digits with the order of adding.

The names end in an underscore where Python's own would be hidden; `AGGREGATIONS` has them by the short ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from penstock.runtime.errors import FlowError, shorten
from penstock.runtime.expressions import kernels
from penstock.runtime.expressions.tree import DECIMAL_DIGITS, Expr, bare, col
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
    infer,
    kind,
)

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
        """Whether the other computes the same."""
        if not isinstance(other, Aggregation) or self.kind != other.kind:
            return False
        return other.input is None if self.input is None else self.input.same(other.input)

    def fields(self) -> tuple[str, ...]:
        """The record's fields that it reads."""
        return () if self.input is None else self.input.fields()

    def type(self, schema: Schema | None = None) -> Type:
        """The type of its result; raises FlowError when it cannot take values of its input's type."""
        found = None if self.input is None else infer(self.input, schema)
        if self.kind == "count":
            return BIGINT
        if found not in (None, NULL) and kind(found) not in (_ORDERED if self.kind in ("min", "max") else _NUMBERS):
            raise FlowError(f"{self!r}: there is no {self.kind} of a {found}")
        size = decimal_size(found)
        if self.kind == "sum" and size is not None:
            return decimal_type(min(size[0] + 10, DECIMAL_DIGITS), size[1])
        return DOUBLE if self.kind == "mean" else found

    # --- partials -------------------------------------------------------------------------------------------

    def partial(self, values: Iterable[Any]) -> Any:
        """The partial of the input's values for some records (of the records themselves for count())."""
        if self.input is None:
            return sum(1 for _ in values)
        present = [value for value in values if value is not None]
        if self.kind == "count":
            return len(present)
        if self.kind == "mean":
            return (float(sum(map(_double, present))), len(present))
        return _fold(_STEPS[self.kind], present)

    def merge(self, left: Any, right: Any) -> Any:
        """The partial of the records of two partials."""
        if self.kind == "mean":
            return (left[0] + right[0], left[1] + right[1])
        if left is None or right is None:
            return right if left is None else left
        return _STEPS[self.kind](left, right)

    def result(self, partial: Any) -> Any:
        """What the user sees."""
        if self.kind == "mean":
            total, n = partial
            return total / n if n else None
        return partial

    def parts(self, name: str) -> tuple[str, ...]:
        """The names of the columns that hold the partial of a result called `name`, in a table of partials."""
        return (f"{name}__sum", f"{name}__count") if self.kind == "mean" else (name,)

    def from_parts(self, values: Iterable[Any]) -> Any:
        """The partial that such columns hold: the values in the order of `parts`."""
        found = tuple(values)
        return (found[0] or 0.0, found[1]) if self.kind == "mean" else found[0]


def count(of: Expr | str | None = None) -> Aggregation:
    """How many records there are; of an expression, how many of its values are not null."""
    return Aggregation("count", None if of is None else _input(of, "count"))


def sum_(of: Expr | str) -> Aggregation:
    """The sum of an expression or a field."""
    return Aggregation("sum", _input(of, "sum"))


def min_(of: Expr | str) -> Aggregation:
    """The least value; NaN is greater than all numbers."""
    return Aggregation("min", _input(of, "min"))


def max_(of: Expr | str) -> Aggregation:
    """The greatest value; NaN is greater than all numbers."""
    return Aggregation("max", _input(of, "max"))


def mean(of: Expr | str) -> Aggregation:
    """The mean, as a double."""
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


def _double(value: Any) -> float:
    found = kernels.to_double(value) if not isinstance(value, str | bool) else None
    if found is None:
        raise TypeError(f"there is no mean of {shorten(value, 80)} ({type(value).__name__})")
    return found


def _fold(step: Callable[[Any, Any], Any], values: list[Any]) -> Any:
    rest = iter(values)
    found = next(rest, None)
    for value in rest:
        found = step(found, value)
    return found


_STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "count": lambda a, b: a + b,
    "sum": kernels.add,
    "min": lambda a, b: b if kernels.lt(b, a) else a,
    "max": lambda a, b: b if kernels.lt(a, b) else a,
}
