"""The operator `agg(n=count(), total=sum("price"))`: several aggregations of a key's records in one aggregate.

Compiled expressions take the inputs from a list of records, column by column. Partial results are flat tuples, and a
function that is compiled for their kinds merges them (`expressions.aggregates`). A snapshot names these kinds, so
partial results can be merged without the flow. What was saved under some names and kinds of results must never be taken
for results of other names or kinds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import isbuiltin
from typing import Any

from penstock.runtime.errors import FlowError
from penstock.runtime.expressions import AGGREGATIONS, Aggregation
from penstock.runtime.expressions.aggregates import (
    add_function,
    inputs_of,
    merge_function,
    partials_function,
    result_function,
)
from penstock.runtime.mistakes import called
from penstock.runtime.operators.columnar import TakenTogether
from penstock.runtime.state.aggregate import Aggregate, merging_parts


class Agg(Aggregate):
    """Aggregations by the names of their results. A result is a dict of them."""

    name = "agg"
    identity_result = False

    def __init__(self, aggregations: Mapping[str, Any]) -> None:
        if not aggregations:
            raise FlowError("agg() needs at least one result, such as n=penstock.count()")
        for name, each in aggregations.items():
            if not isinstance(each, Aggregation):
                kinds = ", ".join(f"penstock.{kind}(...)" for kind in AGGREGATIONS)
                got = "Python's own function" if isbuiltin(each) else called(each)
                raise FlowError(
                    f"agg({name}=...): a result is an aggregation of the records, made by one of {kinds}; got {got}"
                )
            each.type()
        self.aggregations: dict[str, Aggregation] = dict(aggregations)
        several = list(self.aggregations.values())
        inputs = inputs_of(several)
        super().__init__(TakenTogether(inputs) if inputs else None)
        parts = tuple(part for each in several for part in each.parts)
        self.merging = merging_parts(parts)
        self.total = all(part == "count" for part in parts)
        self._add = add_function(several)
        self._partials = partials_function(several)
        self._merge = merge_function(parts)
        self._result = result_function(self.aggregations)

    def __reduce__(self) -> tuple[Any, ...]:
        return Agg, (self.aggregations,)

    def __str__(self) -> str:
        return "agg " + ", ".join(f"{name}={each!r}" for name, each in self.aggregations.items())

    @property
    def state_kind(self) -> str:
        return "agg of " + ", ".join(f"{name}={each.kind}" for name, each in self.aggregations.items())

    def add(self, state: dict[Any, Any], keys: Iterator[Any], values: Iterator[Any]) -> None:
        self._add(state, keys, values)

    def merge(self, state: dict[Any, Any], keys: Iterator[Any], partials: Iterator[Any]) -> None:
        self._merge(state, keys, partials)

    def partials(self, values: list[Any]) -> list[Any]:
        return self._partials(values)

    def result(self, partial: Any) -> dict[str, Any]:
        return self._result(partial)
