"""Batches: what passes between operators inside a process (docs/papers.md: A1).

Users write operators for one record; the runtime passes on all records that are ready. A plain batch is a Python list.
A `KeyedBatch` has two lists: keys[i] belongs to values[i]. When `partial` is set, the values are partial results that
the sender has combined, at most one for each key. The two lists must always have the same length.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any


class KeyedBatch:
    """Two parallel lists of keys and values. len() is the number of records."""

    __slots__ = ("keys", "partial", "values")

    def __init__(self, keys: list[Any], values: list[Any], partial: bool = False) -> None:
        self.keys = keys
        self.values = values
        self.partial = partial

    def __len__(self) -> int:
        return len(self.keys)

    def split(self, n: int) -> tuple[KeyedBatch, KeyedBatch]:
        """Returns the first n records and the rest."""
        return (
            KeyedBatch(self.keys[:n], self.values[:n], self.partial),
            KeyedBatch(self.keys[n:], self.values[n:], self.partial),
        )


Batch = list[Any] | KeyedBatch


def split(batch: Batch, n: int) -> tuple[Batch, Batch]:
    """Returns the first n records of a batch and the rest."""
    if isinstance(batch, list):
        return batch[:n], batch[n:]
    return batch.split(n)


def singly(batch: Batch) -> Iterator[Batch]:
    """Yields a batch for each record, in order."""
    if isinstance(batch, list):
        for record in batch:
            yield [record]
        return
    for key, value in zip(batch.keys, batch.values, strict=True):
        yield KeyedBatch([key], [value], batch.partial)


def concat(batches: list[Batch]) -> Batch:
    """Returns one batch of all records in order. The batches are all plain, or all keyed in the same way."""
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


# An object header and a small payload: the least size of a record when nothing better is known.
_FLOOR_BYTES = 56
_SAMPLED_FIELDS = 16


def approximate_bytes(batch: Batch) -> int:
    """Estimates a batch's size in memory from its first and last record, to limit queues of batches that are not
    encoded.

    An estimate is enough, because it decides when a sender waits, and not whether memory is safe to touch.
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
