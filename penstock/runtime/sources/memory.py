"""A source of records in memory, for tests, examples and small inputs.

It must never look at the user's iterable a second time: what it held at construction is the input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from penstock.runtime.errors import FlowError, shorten
from penstock.runtime.records.userfunc import check_picklable
from penstock.runtime.sources.base import Reader, SequentialReader, Source, SourceContext, Split, T_co
from penstock.runtime.units import is_whole

_SAMPLE = 100  # records tried for pickling while the flow is built; all of them travel when the job starts


class Memory(Source[T_co]):
    """Reads the records of an iterable, which is consumed once, at construction.

        flow.read(ps.sources.Memory(["to be", "or not", "to be"]))

    `records`: any finite iterable of records that can be pickled; they travel to every worker of the source.
    `splits`: into how many contiguous ranges the records are divided. With None there is one range for each task. With
    one range the order of all records stays.

    Errors: FlowError is raised when `records` is not iterable, or when its records cannot be pickled.

    Offset: the index of the next record in the whole list.
    """

    def __init__(self, records: Iterable[T_co], splits: int | None = None) -> None:
        if splits is not None and not (is_whole(splits) and splits >= 1):
            raise FlowError(f"Memory: splits must be a whole number, 1 or more, got {splits!r}")
        if isinstance(records, str | bytes | Mapping):
            raise FlowError(f"Memory needs a list of records, got one {type(records).__name__}: {shorten(records)}")
        try:
            self._records = list(records)
        except TypeError:
            if isinstance(records, Iterable):
                raise
            raise FlowError(f"Memory needs a list or another iterable of records, got {shorten(records)}") from None
        self._count = splits
        check_picklable(self._records[:_SAMPLE], "Memory")

    def splits(self, parallelism: int) -> list[Split]:
        total = len(self._records)
        count = max(1, min(self._count or parallelism, total))
        bounds = [total * i // count for i in range(count + 1)]
        return [
            Split(f"{first}:{last}", (first, last), weight=float(max(1, last - first)))
            for first, last in pairwise(bounds)
        ]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        return _MemoryReader(self._records, splits)

    def describe(self) -> str:
        return f"Memory({len(self._records):,} records)"


class _MemoryReader(SequentialReader):
    def __init__(self, records: list[Any], splits: list[Split]) -> None:
        super().__init__([split.at(split.payload[0]) if split.offset is None else split for split in splits])
        self._records = records

    def read(self, limit: int) -> list[Any]:
        while self._waiting:
            name, end = self._waiting[0].name, self._waiting[0].payload[1]
            first = self._offsets[name]
            last = min(first + limit, end)
            self._offsets[name] = last
            if last >= end:
                self._waiting.popleft()
                self.finished = not self._waiting
            if last > first:
                self.split = name
                return self._records[first:last]
        self.finished = True
        return []

    def backlog(self) -> int:
        return sum(split.payload[1] - self._offsets[split.name] for split in tuple(self._waiting))
