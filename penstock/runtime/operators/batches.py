"""The operator `map_batches`, whose function gets many records at a time. It must never drop a record whose function
fails, except by the operator's error policy, nor hold records back from a barrier or a watermark.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from typing import Any, Literal, get_args

from penstock.runtime.errors import FlowError
from penstock.runtime.mistakes import called
from penstock.runtime.operators.base import EXPAND_RECORDS_MAX, CallingStage, Operator, Stage, StageContext
from penstock.runtime.operators.step_size import STEP_NS, StepSize
from penstock.runtime.records.batch import Batch
from penstock.runtime.records.userfunc import check_function, no_list, of_no_list
from penstock.runtime.units import choice, is_whole, number_above_zero, seconds, whole

BatchFormat = Literal["list", "numpy", "pandas", "arrow"]


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
        return Gathering(context, self)


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


class Gathering(CallingStage):
    """A stage that may hold records from one batch to the next, so that a call of the user's function gets more of
    them. Its task says when the stage must process what it holds. Without a task (in Spark) the stage holds nothing."""

    expands = True
    holds = False  # whether records that are too few for a call stay when `expand` ends
    stamp = 0  # the stamp of the records that come next
    oldest = 0  # the least stamp of the records that are held
    waits_until = 0  # the clock time until which the first of the held records may wait
    more_until = 0  # the same while more records come, which make the call larger

    def __init__(self, context: StageContext, operator: MapBatches) -> None:
        super().__init__(context, operator.fn)
        fn, batch_format = self._own.fn, operator.batch_format
        self._fn = fn if batch_format == "list" else _through(fn, batch_format)
        self._batch_size = operator.batch_size
        self.least = operator.min_batch  # the least number of records for a call
        self._linger_ns = 0 if operator.linger_s is None else int(operator.linger_s * 1e9)
        self._size = StepSize(operator.batch_size)
        self._held: list[Any] = []
        self._came: deque[tuple[int, int, int]] = deque()  # of the held records: number, stamp, and when they came
        self._mark: int | None = None
        self._clock: Callable[[], int] = lambda: 0
        self._stopwatch: Callable[[], int] = lambda: 0

    def gather(self, clock: Callable[[], int], stopwatch: Callable[[], int]) -> None:
        """Tells the stage that it is part of a task, and gives it the task's clocks, in ns."""
        self._clock, self._stopwatch = clock, stopwatch

    @property
    def held(self) -> int:
        """The number of records that it holds."""
        return len(self._held)

    def wants(self) -> tuple[int, int]:
        """Returns how many more records make the next call full, and how many records a full call has."""
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
        """Yields the outputs for the held records, if there are at least this many."""
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
