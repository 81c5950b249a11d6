"""Running aggregates for each key: count, sum, min, max, mean and reduce. Where senders combine records, an aggregate
must never count a failed record together with good ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Literal, get_args

from penstock.runtime.operators.base import EXPAND_RECORDS_MAX, KeyedStage, Operator, Stage, StageContext
from penstock.runtime.records.batch import Batch, KeyedBatch
from penstock.runtime.records.key_groups import of_key
from penstock.runtime.records.userfunc import check_function
from penstock.runtime.state.aggregate import Aggregate, add_all
from penstock.runtime.state.keyed import KeyedMap, LoggedMap
from penstock.runtime.units import choice

Emit = Literal["latest", "every", "final"]


def combines(operator: Operator, aggregate: Aggregate) -> bool:
    """Whether senders may combine many records into one partial result. They may not when records may be skipped and
    the aggregate does not accept all values: a partial result that fails would take its good records along, and would
    count as one record."""
    return aggregate.combinable and (operator.on_error == "fail" or aggregate.total)


class Aggregated(Operator):
    """A running aggregate for each key. It emits (key, result).

    `emit` says when it emits. "latest" (the default): after each batch, the newest result of each key in the batch, so
    that a frequent key under load does not flood the operators downstream. "every": one result for each record.
    "final": one result for each key, when the input ends.
    """

    keyed = True
    why_not_in_spark = "its state stays with its tasks; Spark makes partial aggregates for it"

    def __init__(self, aggregate: Aggregate, emit: Emit = "latest", **common: Any) -> None:
        self.kind = aggregate.name
        super().__init__(**common)
        choice(emit, f"{self.name!r}: emit", get_args(Emit))
        if aggregate.selector is not None:
            check_function(aggregate.selector, f"{self.kind} {self.name!r}")
        self.aggregate = aggregate
        self.emit = emit

    @property
    def state_kind(self) -> str:
        return self.aggregate.state_kind

    @property
    def combiner(self) -> Aggregate | None:
        """Returns the aggregate that senders may apply before they send records, or None when every record must
        show."""
        return None if self.emit == "every" or not combines(self, self.aggregate) else self.aggregate

    def stage(self, context: StageContext) -> Stage:
        return _Aggregating(context, self.aggregate, self.emit)


class _Aggregating(KeyedStage):
    def __init__(self, context: StageContext, aggregate: Aggregate, emit: Emit) -> None:
        super().__init__(context)
        self._aggregate = aggregate
        self._emit = emit
        self.state = aggregate.new_state()
        self._map: KeyedMap | LoggedMap
        if aggregate.merging:
            self._map = LoggedMap(self.state, aggregate, context.epochs)
        else:
            self._map = KeyedMap(self.state, context.epochs)
        self.maps = {"state": self._map}

    def run(self, batch: Batch) -> Batch:
        assert isinstance(batch, KeyedBatch)
        keys, values, records = batch.keys, batch.values, batch.values
        aggregate, state = self._aggregate, self.state
        if not batch.partial:
            keys, values = aggregate.prepare(keys, records, self.errors)
        failed = self.errors.skipped
        out: list[Any] = []
        if batch.partial:
            add_all(aggregate.merge, state, keys, values, self.errors)
        elif self._emit == "every":
            out = self._add_and_show(keys, values)
        else:
            add_all(aggregate.add, state, keys, values, self.errors, records)
        kept = self._map
        if isinstance(kept, KeyedMap):
            kept.note(keys)
        elif self.errors.skipped == failed:
            kept.log(keys, values, batch.partial)
        else:
            kept.lose()
        return self._results(keys) if self._emit == "latest" else out

    def _results(self, keys: Iterable[Any]) -> list[Any]:
        """Returns (key, result) of each of these keys, in the order in which they first appear."""
        aggregate, state = self._aggregate, self.state
        if not self.errors.skipped:  # otherwise some key may have no state, or not even a hash
            touched = dict.fromkeys(keys)
            if aggregate.identity_result:
                return list(zip(touched, map(state.__getitem__, touched), strict=True))
            keys = touched
        results: dict[Any, Any] = {}
        for key in keys:
            try:
                if key not in state or key in results:
                    continue
            except TypeError:
                continue  # it has no hash, and its record has failed already
            try:
                results[key] = aggregate.result(state[key])
            except BaseException as error:
                self.errors.handle((key, state[key]), error)
        return list(results.items())

    def _add_and_show(self, keys: list[Any], values: list[Any]) -> list[Any]:
        aggregate, state = self._aggregate, self.state
        out = []
        for key, value in zip(keys, values, strict=True):
            try:
                aggregate.add(state, iter((key,)), iter((value,)))
                result = aggregate.result(state[key])
            except BaseException as error:
                self.errors.handle((key, value), of_key(key, error))
            else:
                out.append((key, result))
        return out

    def finish(self) -> Iterator[Batch]:
        if self._emit != "final":
            return
        keys = iter(self.state)
        while part := list(islice(keys, EXPAND_RECORDS_MAX)):
            if piece := self._results(part):
                yield piece


class Reduce(Operator):
    """The operator reduce(fn): the state of a key is its first record, and then fn(state, record). It emits (key,
    state)."""

    kind = "reduce"
    keyed = True
    why_not_in_spark = "its function sees records in order, so partial results cannot be merged"

    def __init__(self, fn: Callable[[Any, Any], Any], emit: Emit = "latest", **common: Any) -> None:
        super().__init__(**common)
        check_function(fn, f"reduce {self.name!r}", ("state", "record"))
        choice(emit, f"{self.name!r}: emit", get_args(Emit))
        self.fn = fn
        self.emit = emit

    def stage(self, context: StageContext) -> Stage:
        return _Aggregating(context, Reducer(self.fn), self.emit)


class Reducer(Aggregate):
    """A user's reduce function as an aggregate. It never combines records before the exchange: the function sees
    records in the order in which they arrive, and need not be associative, except where sessions become one."""

    name = "reduce"

    def __init__(self, fn: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self._fn = fn

    def add(self, state: dict[Any, Any], keys: Iterator[Any], values: Iterator[Any]) -> None:
        fn = self._fn
        for key, value in zip(keys, values, strict=True):
            state[key] = fn(state[key], value) if key in state else value

    def merge(self, state: dict[Any, Any], keys: Iterator[Any], partials: Iterator[Any]) -> None:
        self.add(state, keys, partials)  # of sessions that become one
