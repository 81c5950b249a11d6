"""Operators that keep no state: map, filter, flat_map and key_by. They must never drop a record whose
function fails, except by the operator's error policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from operator import length_hint
from typing import Any

from penstock.runtime.errors import FlowError
from penstock.runtime.operators.base import EXPAND_RECORDS_MAX, CallingStage, Operator, Stage, StageContext
from penstock.runtime.records.batch import Batch, KeyedBatch
from penstock.runtime.records.key_groups import without_bad_keys
from penstock.runtime.records.userfunc import (
    apply,
    check_function,
    exhausted,
    no_list,
    no_value,
    of_no_list,
    returns_nothing,
    select,
)
from penstock.runtime.scalars import python_keys


class _Calls(CallingStage):
    """The loop `over` (map, filter) with a user's function, which is one C-level loop over the batch."""

    def __init__(self, context: StageContext, over: Callable[..., Iterable[Any]], fn: Callable[[Any], Any]) -> None:
        super().__init__(context, fn)
        # A mistake in the program shows in the first batch. To check every result would cost as much as a short
        # function.
        self._loop = partial(over, self._looked_at)
        self._later = partial(over, self._own.fn)

    def run(self, batch: Batch) -> Batch:
        assert isinstance(batch, list)
        loop, self._loop = self._loop, self._later
        return apply(loop, batch, self.errors)

    def _looked_at(self, record: Any) -> Any:
        """Returns the result of the function, if it can be a value."""
        result = self._own.fn(record)
        if slip := no_value(result):  # the mistake is the program's, and not this record's
            raise self.errors.failure(record, TypeError(slip))
        return result


class Map(Operator):
    """One output for each record."""

    kind = "map"
    one_to_one = True
    why_not_in_spark = None

    yields = False  # whether its function may be a generator function
    # Whether None is accepted from a lambda, which says what it returns; a function without `return` has forgotten it.
    none_on_purpose = True
    forgotten = (
        "so there would be a None for each record; return what is to be sent downstream, as in: return record. To "
        "call a function for what it does only, write to a sink: .write(penstock.sinks.Call(function))"
    )

    def __init__(self, fn: Callable[[Any], Any], **common: Any) -> None:
        super().__init__(**common)
        check_function(fn, f"{self.kind} {self.name!r}", yields=self.yields, opens=True)
        if returns_nothing(fn) and not (self.none_on_purpose and getattr(fn, "__name__", "") == "<lambda>"):
            raise FlowError(
                f"{self.kind} {self.name!r}: its function never returns anything but None, {self.forgotten}"
            )
        self.fn = fn

    def stage(self, context: StageContext) -> Stage:
        return _Calls(context, map, self.fn)


class Filter(Map):
    """The records for which the function is true."""

    kind = "filter"
    one_to_one = False
    none_on_purpose = False
    forgotten = 'so no record would pass; return whether the record is to pass, as in: return record["price"] > 5'

    def stage(self, context: StageContext) -> Stage:
        return _Calls(context, filter, self.fn)


class FlatMap(Map):
    """Any number of outputs for each record. The function returns an iterable, which is read lazily."""

    kind = "flat_map"
    one_to_one = False
    yields = True
    forgotten = "so nothing would come out; return the list of outputs (it may be empty), or yield them"

    def stage(self, context: StageContext) -> Stage:
        return _Expand(context, self.fn)


class _Expand(CallingStage):
    expands = True

    def __init__(self, context: StageContext, fn: Callable[[Any], Iterable[Any]]) -> None:
        super().__init__(context, fn)
        self._seen = False
        self._records: Iterator[Any] = iter(())  # of the present batch

    @property
    def left(self) -> int:
        return length_hint(self._records)

    def _looked_at(self, record: Any) -> Iterable[Any]:
        """Returns the result of the function, if it can be several records."""
        result = self._own.fn(record)
        if result is None:
            raise TypeError(no_list(result))
        if slip := no_list(result):  # the mistake is the program's, and not this record's
            raise self.errors.failure(record, TypeError(slip))
        return result  # type: ignore[no-any-return]

    def expand(self, batch: Batch) -> Iterator[Batch]:
        assert isinstance(batch, list)
        records = self._records = iter(batch)
        # A mistake in the program shows in the first batch. To check every result would cost as much as a short
        # function.
        fn = self._own.fn if self._seen else self._looked_at
        self._seen = True
        outputs = chain.from_iterable(map(fn, records))
        while True:
            out: list[Any] = []
            try:
                out.extend(islice(outputs, EXPAND_RECORDS_MAX))
            except BaseException as error:
                self.errors.handle(batch[len(batch) - length_hint(records) - 1], of_no_list(error))
                outputs = chain.from_iterable(map(fn, records))
                if out:
                    yield out
                continue
            if out:
                yield out
            if len(out) == EXPAND_RECORDS_MAX:
                continue
            if exhausted(records):
                return
            stopped = RuntimeError("the function raised StopIteration")
            self.errors.handle(batch[len(batch) - length_hint(records) - 1], stopped)
            outputs = chain.from_iterable(map(fn, records))


class KeyBy(Operator):
    """The key function of a grouping by key that was fused into a task: turns records into a keyed batch."""

    kind = "key_by"
    one_to_one = True

    def __init__(self, selector: Callable[[Any], Any], **common: Any) -> None:
        super().__init__(**common)
        self.selector = selector

    def stage(self, context: StageContext) -> Stage:
        return _KeyBy(context, self.selector)


class _KeyBy(Stage):
    def __init__(self, context: StageContext, selector: Callable[[Any], Any]) -> None:
        super().__init__(context)
        self._selector = selector

    def run(self, batch: Batch) -> Batch:
        assert isinstance(batch, list)
        records, keys = select(self._selector, batch, self.errors)
        # A key that no other task could be found by fails here too, although this task needs none.
        keys, records = without_bad_keys(python_keys(keys), records, self.errors)
        return KeyedBatch(keys, records)
