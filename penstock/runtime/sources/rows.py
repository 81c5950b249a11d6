"""Reads Arrow record batches as records: dicts of plain Python values, one a row.

It must never hold more than one record batch and the rows made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import pyarrow as pa

from penstock.runtime.errors import SourceError
from penstock.runtime.sources.base import SequentialReader, Split

BATCH_ROWS = 8192


def check_schemas(source: str, schemas: dict[str, pa.Schema]) -> None:
    """Raises SourceError unless all files have the same fields, and no two fields have one name."""
    first: tuple[str, pa.Schema] | None = None
    for path, schema in schemas.items():
        names = schema.names
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise SourceError(f"{source}: {path!r} has several columns of the name {', '.join(twice)}; rename them")
        if first is None:
            first = path, schema
        elif not schema.equals(first[1], check_metadata=False):
            ours = {f"{field.name}: {field.type}" for field in schema}
            theirs = {f"{field.name}: {field.type}" for field in first[1]}
            raise SourceError(
                f"{source}: the files do not have the same fields, in the same order. "
                f"{first[0]!r} has ({', '.join(sorted(theirs - ours)) or 'the same in another order'}) "
                f"where {path!r} has ({', '.join(sorted(ours - theirs)) or 'the same in another order'}). "
                "Read them with one source each."
            )


class RowReader(SequentialReader):
    """Reads the record batches of its splits one after the other. A split's offset counts the rows that were handed
    out. `rows` says how many rows a split has at most; without it, the backlog is what was read of the files."""

    def __init__(
        self,
        splits: list[Split],
        batches: Callable[[Split], Iterator[pa.RecordBatch]],
        rows: Callable[[Split], int] | None = None,
    ) -> None:
        super().__init__(splits)
        self._open = batches
        self._rows_of = rows
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._skip = 0
        self._rows: list[Any] = []
        self._next = 0

    def read(self, limit: int) -> list[Any]:
        while not self.finished:
            if self._next < len(self._rows):
                rows = self._rows[self._next : self._next + limit]
                self._next += len(rows)
                assert self._split is not None
                name = self.split = self._split.name
                self._offsets[name] = (self._offsets[name] or 0) + len(rows)
                return rows
            self._advance()
        return []

    def _advance(self) -> None:
        """Goes to the next record batch, in this split or the next one."""
        self._rows = []
        self._next = 0
        if self._split is None:
            if not self._waiting:
                self.finished = True
                return
            self._split = self._waiting.popleft()
            self._skip = self._split.offset or 0
            self._batches = self._open(self._split)
        batch = next(self._batches, None)
        if batch is None:
            self._split = None
        elif batch.num_rows <= self._skip:
            self._skip -= batch.num_rows
        else:
            self._rows = batch.slice(self._skip).to_pylist()
            self._skip = 0

    def backlog(self) -> int:
        rows_of, split = self._rows_of, self._split  # read once, because the loop's thread may change it meanwhile
        if rows_of is None:
            return max(0, len(self._rows) - self._next)
        splits = [*tuple(self._waiting), *([] if split is None else [split])]
        return sum(max(0, rows_of(one) - (self._offsets[one.name] or 0)) for one in splits)

    def close(self) -> None:
        super().close()
        if isinstance(self._batches, Generator):
            self._batches.close()
        self._batches = iter(())
        self._rows = []
