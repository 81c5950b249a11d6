"""Operators whose logic is an expression: filter, select, with_columns (docs/papers.md: D1).

Records are dicts, or `fields.Rows` turns them into dicts: objects with attributes, and texts, which count as {"value":
text}. An expression runs as a compiled Python function in a task, and as native Spark columns in the operation stream.
The two must never give different answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

from penstock.runtime.expressions import Closure, Expr, col, compile_value
from penstock.runtime.expressions.tree import Column
from penstock.runtime.operators.base import Operator, Stage, StageContext
from penstock.runtime.operators.fields import Field, Rows, record_of
from penstock.runtime.records.batch import Batch
from penstock.runtime.records.userfunc import ListSelector, apply


class Columnar(Operator):
    """An operator of expressions. `closure` says which kind it is."""

    why_not_in_spark = None

    def __init__(self, closure: Closure, **common: Any) -> None:
        self.kind = closure.shape
        self.one_to_one = closure.shape != "filter"
        super().__init__(**common)
        self.closure = closure

    def stage(self, context: StageContext) -> Stage:
        return _Columnar(context, self.closure)


class _Columnar(Stage):
    def __init__(self, context: StageContext, closure: Closure) -> None:
        super().__init__(context)
        self._closure = closure
        self._rows = Rows(closure.exprs.values(), every=closure.shape == "with_columns")
        self._filters = closure.shape == "filter"

    def run(self, batch: Batch) -> Batch:
        assert isinstance(batch, list)
        plain = type(batch[0]) is dict
        try:
            out = self._closure(batch if plain else self._rows.many(batch))
        except Exception:  # whatever the error's class, the same error comes again at the record that causes it
            return apply(self._one_by_one, batch, self.errors)
        return out if plain or not self._filters else list(map(record_of, out))

    def _one_by_one(self, records: Iterator[Any]) -> Iterator[Any]:
        out = self._closure.iterate(map(self._rows, records))
        return map(record_of, out) if self._filters else out


class Taken(ListSelector):
    """A selector that evaluates an expression."""

    def __init__(self, expr: Expr) -> None:
        self.expr = expr
        self._closure = compile_value(expr)
        self._rows = Rows([expr])

    def __call__(self, record: Any) -> Any:
        return self._closure.evaluate(self._rows(record))

    def many(self, records: list[Any]) -> list[Any]:
        return self._closure(self._rows.many(records))

    def __repr__(self) -> str:
        return repr(self.expr)


class TakenTogether(ListSelector):
    """A selector that evaluates several expressions, and gives a tuple of their values."""

    def __init__(self, exprs: Sequence[Expr]) -> None:
        self._closures = list(map(compile_value, exprs))
        self._rows = Rows(exprs)

    def __call__(self, record: Any) -> tuple[Any, ...]:
        row = self._rows(record)
        return tuple(closure.evaluate(row) for closure in self._closures)

    def many(self, records: list[Any]) -> list[Any]:
        rows = self._rows.many(records)
        return list(zip(*(closure(rows) for closure in self._closures), strict=True))


def taking(expr: Expr) -> Callable[[Any], Any]:
    """Returns a selector of an expression's value. For a plain field it is the fastest one."""
    return Field(expr.name) if isinstance(expr, Column) and not expr.optional else Taken(expr)


def expression_of(selector: Any) -> Expr | None:
    """Returns the expression that a selector evaluates, or None when the selector is a user's function."""
    if isinstance(selector, Taken):
        return selector.expr
    if isinstance(selector, Field):
        return col(selector.name) if isinstance(selector.name, str) else None
    if isinstance(selector, itemgetter):
        names: Any = selector.__reduce__()[1]
        if len(names) == 1 and isinstance(names[0], str):
            return col(names[0])
    return None
