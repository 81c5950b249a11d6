"""Batches: divided and joined without changing them; their size is estimated, for whatever a record may be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.records.batch import Batch, KeyedBatch, approximate_bytes, concat, split

records = st.lists(st.integers(), max_size=20)


def content(batch: Batch) -> Any:
    return batch if isinstance(batch, list) else (batch.keys, batch.values, batch.partial)


@given(records, st.integers(0, 25), st.booleans(), st.booleans())
def test_split_and_concat_are_inverse(values: list[int], n: int, keyed: bool, partial: bool) -> None:
    batch: Batch = KeyedBatch([v % 3 for v in values], values, partial) if keyed else values
    first, rest = split(batch, n)
    assert len(first) == min(n, len(values))
    assert content(concat([first, rest])) == content(batch)


@given(st.lists(records, min_size=2, max_size=5))
def test_concat_makes_a_list_of_its_own(lists: list[list[int]]) -> None:
    before = [list(part) for part in lists]
    merged = concat(lists)
    assert isinstance(merged, list)
    merged.append(1)
    assert lists == before


@pytest.mark.parametrize(
    "record",
    [1, "text", b"", None, (1, 2), [], {"a": 1}, {1, 2}, object(), int, np.zeros(3), np.float64(1), (int, str), [dict]],
    ids=lambda record: type(record).__name__,
)
def test_any_record_has_a_size(record: Any) -> None:
    assert approximate_bytes([record]) >= 56
    assert approximate_bytes(KeyedBatch(["k"], [record])) >= 56


def test_the_size_follows_the_records() -> None:
    assert approximate_bytes([]) == 0
    assert approximate_bytes(["x" * 10_000] * 5) >= 50_000
    assert approximate_bytes([{"payload": b"x" * 10_000}]) >= 10_000
    assert approximate_bytes([("id", "x" * 10_000)]) >= 10_000
    assert approximate_bytes([np.zeros(1000)]) >= 8000
    assert approximate_bytes([[0] * 10_000]) >= 80_000
