"""Operators that keep no state: map, filter, flat_map, map_batches and key_by. They must never drop a record whose
function fails, except by the operator's error policy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, islice
from operator import length_hint
from typing import Any, Literal, get_args

from penstock.runtime.errors import FlowError
from penstock.runtime.mistakes import called
from penstock.runtime.operators.base import EXPAND_RECORDS_MAX, CallingStage, Gathering, Operator, Stage, StageContext
from penstock.runtime.operators.step_size import STEP_NS, StepSize
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
from penstock.runtime.units import choice, is_whole, number_above_zero, seconds, whole

BatchFormat = Literal["list", "numpy", "pandas", "arrow"]


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


class MapBatches(Operator):
    """A function from a batch to a batch: lists of records, or pyarrow Tables of dict records.

    `batch_size` is the most records a call gets; it gets what is ready, up to this, unless records are so slow that
    other tasks would wait too long for the call to end. With `min_batch` a call gets at least so many, unless the first
    of them has waited for `linger_s` seconds, or something may not wait until later: a barrier (each epoch has one), a
    watermark, the end of the input. When the function raises, the records of that call are the culprit together.
    """

    kind = "map_batches"
    why_not_in_spark = None

    def __init__(
        self,
        fn: Callable[[Any], Any],
        batch_size: int = 1024,
        batch_format: BatchFormat = "list",
        min_batch: int = 1,
        linger_s: float | timedelta | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        what = f"map_batches {self.name!r}"
        check_function(fn, what, ("batch",), yields=True, opens=True)
        self.batch_size = whole(batch_size, f"{what}: batch_size")
        choice(batch_format, f"{what}: batch_format", get_args(BatchFormat))
        if batch_format == "pandas" and find_spec("pandas") is None:
            raise FlowError(f"{what}: batch_format='pandas' needs pandas, which is not installed: pip install pandas")
        if not is_whole(min_batch) or not 1 <= min_batch <= batch_size:
            raise FlowError(
                f"{what}: min_batch={min_batch!r}; it must be a whole number from 1 to batch_size={batch_size}"
            )
        if (min_batch > 1) != (linger_s is not None):
            raise FlowError(
                f"{what}: min_batch={min_batch}, linger_s={linger_s}; give both or neither: linger_s is how many "
                "seconds a record may wait for a call of min_batch records, 2 or more, to come together"
            )
        where = f"{what}: linger_s"
        self.linger_s = None if linger_s is None else number_above_zero(seconds(linger_s, where), where)
        self.fn = fn
        self.batch_format = batch_format
        self.min_batch = min_batch

    def stage(self, context: StageContext) -> Stage:
        return _Batches(context, self)


def _columns(records: list[Any], batch_format: str) -> dict[str, list[Any]]:
    """Returns the columns of dict records. A field that a record does not have is None."""
    if set(map(type, records)) != {dict}:
        for record in records:
            if not isinstance(record, Mapping):
                raise TypeError(f"batch_format={batch_format!r} takes records that are dicts, not {called(record)}")
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [record.get(name) for record in records] for name in names}


#: A format of batches: how one is made of records, how its records are taken (None: it is none), and its name.
_Format = tuple[Callable[[list[Any]], Any], Callable[[Any], list[Any] | None], str]


def _numpy() -> _Format:
    import numpy as np

    def rows(result: Any) -> list[Any] | None:
        if not isinstance(result, Mapping):
            return None
        columns = [column.tolist() if hasattr(column, "tolist") else list(column) for column in result.values()]
        if len(set(map(len, columns))) > 1:
            sizes = ", ".join(f"{name}: {len(column)}" for name, column in zip(result, columns, strict=True))
            raise ValueError(f"the function returned arrays of different lengths ({sizes})")
        return [dict(zip(result, row, strict=True)) for row in zip(*columns, strict=True)]

    def batch(records: list[Any]) -> Any:
        return {name: np.array(column) for name, column in _columns(records, "numpy").items()}

    return batch, rows, "dict of arrays by name"


def _pandas() -> _Format:
    pd: Any = import_module("pandas")

    def batch(records: list[Any]) -> Any:
        return pd.DataFrame(_columns(records, "pandas"), index=range(len(records)))

    return (
        batch,
        lambda table: table.to_dict("records") if isinstance(table, pd.DataFrame) else None,
        "pandas DataFrame",
    )


def _arrow() -> _Format:
    import pyarrow as pa

    def batch(records: list[Any]) -> Any:
        columns = _columns(records, "arrow")
        # A table without columns still has a row for each record.
        return pa.table(columns) if columns else pa.Table.from_struct_array(pa.array(records, pa.struct([])))

    return batch, lambda table: table.to_pylist() if hasattr(table, "to_pylist") else None, "pyarrow Table"


_FORMATS = {"arrow": _arrow, "numpy": _numpy, "pandas": _pandas}


def _through(fn: Callable[[Any], Any], batch_format: str) -> Callable[[list[Any]], list[Any] | None]:
    """Returns a function of lists of records that calls a function of batches of a format."""
    batch, rows, name = _FORMATS[batch_format]()

    def run(records: list[Any]) -> list[Any] | None:
        result = fn(batch(records))
        found = None if result is None else rows(result)
        if found is None and result is not None:
            raise TypeError(
                f"the function returned {called(result)}; with batch_format={batch_format!r} return a {name}"
            )
        return found

    return run


class _Batches(CallingStage, Gathering):
    expands = True

    def __init__(self, context: StageContext, operator: MapBatches) -> None:
        super().__init__(context, operator.fn)
        fn, batch_format = self._own.fn, operator.batch_format
        self._fn = fn if batch_format == "list" else _through(fn, batch_format)
        self._batch_size = operator.batch_size
        self.least = operator.min_batch
        self._linger_ns = 0 if operator.linger_s is None else int(operator.linger_s * 1e9)
        self._size = StepSize(operator.batch_size)
        self._held: list[Any] = []
        self._came: deque[tuple[int, int, int]] = deque()  # of the held records: number, stamp, and when they came
        self._mark: int | None = None
        self._clock: Callable[[], int] = lambda: 0
        self._stopwatch: Callable[[], int] = lambda: 0

    def gather(self, clock: Callable[[], int], stopwatch: Callable[[], int]) -> None:
        self._clock, self._stopwatch = clock, stopwatch

    @property
    def held(self) -> int:
        return len(self._held)

    def wants(self) -> tuple[int, int]:
        call = self._call_size()
        return max(1, call - len(self._held)), call

    def _call_size(self) -> int:
        return max(self._size.limit, self.least)

    def expand(self, batch: Batch) -> Iterator[Batch]:
        assert isinstance(batch, list)
        if not self.holds:
            for i in range(0, len(batch), self._batch_size):
                yield from self._call(batch[i : i + self._batch_size], more=False)
            return
        now = self._clock()
        if self._held:
            self._held += batch
        else:
            self._held = batch  # others may have this list too, so `_calls` copies what stays of it
            self.more_until = now + self._linger_ns + STEP_NS
        self._came.append((len(batch), self.stamp, now))
        yield from self._calls(self._batch_size + 1)

    def let_go(self, least: int) -> Iterator[Batch]:
        if self._held:
            yield from self._calls(least)

    def advance(self, watermark: int | None) -> Iterator[Batch]:
        if watermark != self._mark:
            self._mark = watermark
            yield from self.let_go(1)

    def finish(self) -> Iterator[Batch]:
        return self.let_go(1)

    def _calls(self, least: int) -> Iterator[Batch]:
        """Calls the function with full batches of the held records, and then with the rest if it has at least this many
        records."""
        held, at = self._held, 0
        while True:
            left, call = len(held) - at, self._call_size()
            if left < call and (not left or left < least):
                break
            part = held[at : at + call]
            at += len(part)
            yield from self._call(part, more=left > call)
        self._held = held[at:]
        came = self._came
        called = at > 0
        while at and came:
            records, stamp, when = came[0]
            if records > at:
                came[0] = records - at, stamp, when
                break
            at -= records
            came.popleft()
        if came:
            self.oldest = min(stamp for _, stamp, _ in came)
            self.waits_until = came[0][2] + self._linger_ns
            if called:
                # Records that were left over by a call have waited for its end, which says nothing about how soon more
                # records come.
                self.more_until = max(self.waits_until, self._clock()) + STEP_NS

    def _call(self, part: list[Any], more: bool) -> Iterator[Batch]:
        records = len(part)
        began, took = self._stopwatch(), 0
        try:
            result = self._fn(part)
            if slip := no_list(result):
                raise TypeError(slip)
            assert result is not None
            outputs = iter(result)
            while piece := list(islice(outputs, EXPAND_RECORDS_MAX)):
                took += self._stopwatch() - began
                yield piece
                began = self._stopwatch()
        except BaseException as error:
            self.errors.handle(part, of_no_list(error), records)
        self._size.measure(records, took + self._stopwatch() - began, more or records >= self._call_size())


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
