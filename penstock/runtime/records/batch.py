"""What moves between operators inside a process: lists, and for keyed streams two parallel lists.

Operators are written for one record; the runtime moves what is ready now (docs/papers.md: A1). A plain batch is a
Python list. A `KeyedBatch` is columnar: keys[i] belongs to values[i]; when `partial` is set, values are partial
aggregates that the sender combined, at most one a key.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any


class KeyedBatch:
    """Parallel lists of keys and values; len() is the number of records."""

    __slots__ = ("keys", "partial", "values")

    def __init__(self, keys: list[Any], values: list[Any], partial: bool = False) -> None:
        self.keys = keys
        self.values = values
        self.partial = partial

    def __len__(self) -> int:
        return len(self.keys)

    def split(self, n: int) -> tuple[KeyedBatch, KeyedBatch]:
        """The first n records and the rest."""
        return (
            KeyedBatch(self.keys[:n], self.values[:n], self.partial),
            KeyedBatch(self.keys[n:], self.values[n:], self.partial),
        )


Batch = list[Any] | KeyedBatch


def split(batch: Batch, n: int) -> tuple[Batch, Batch]:
    """The first n records of a batch and the rest."""
    if isinstance(batch, list):
        return batch[:n], batch[n:]
    return batch.split(n)


def singly(batch: Batch) -> Iterator[Batch]:
    """A batch of each record, in order."""
    if isinstance(batch, list):
        for record in batch:
            yield [record]
        return
    for key, value in zip(batch.keys, batch.values, strict=True):
        yield KeyedBatch([key], [value], batch.partial)


def concat(batches: list[Batch]) -> Batch:
    """One batch of all records in order; the batches are all plain or all keyed alike."""
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    if isinstance(first, list):
        merged: list[Any] = []
        for batch in batches:
            merged += batch  # type: ignore[arg-type]
        return merged
    keys: list[Any] = []
    values: list[Any] = []
    for batch in batches:
        assert isinstance(batch, KeyedBatch)
        keys += batch.keys
        values += batch.values
    return KeyedBatch(keys, values, first.partial)


# An object header, a small payload: what a record costs at least when nothing better is known.
_FLOOR_BYTES = 56
_SAMPLED_FIELDS = 16


def approximate_bytes(batch: Batch) -> int:
    """A batch's size in memory, from its first and last record; bounds queues of batches that were never encoded.

    An estimate is enough: it decides when a sender waits, not whether memory is safe to touch.
    """
    records = batch if isinstance(batch, list) else batch.values
    if not records:
        return 0
    return len(records) * max(_size(records[0]), _size(records[-1]))


def _size(record: Any) -> int:
    size = sys.getsizeof(record)
    if isinstance(record, tuple | list):
        for field in record[:_SAMPLED_FIELDS]:
            size += sys.getsizeof(field)
        size += _FLOOR_BYTES * max(0, len(record) - _SAMPLED_FIELDS)
    elif isinstance(record, dict):
        for field in islice(record.values(), _SAMPLED_FIELDS):
            size += sys.getsizeof(field)
    elif isinstance(nbytes := getattr(record, "nbytes", None), int):
        size = max(size, nbytes)
    return max(size, _FLOOR_BYTES)
