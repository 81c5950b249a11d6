"""Rows of several partitions for one group become one, and only where Arrow merges them as the record tasks do."""

from __future__ import annotations

import math
from decimal import Decimal

import pyarrow as pa

from penstock.bridge.combining import combined


def test_rows_of_a_group_become_one() -> None:
    rows = pa.table(
        {
            "k": ["a", "b", "a", "a"],
            "w": [0, 0, 10, 0],
            "n": [1, 2, 3, 4],
            "sum": [0.5, 1.0, 2.0, 4.0],
            "least": ["x", "y", "z", "q"],
            "greatest": pa.array([1, None, 3, 7], pa.int64()),
            "money": pa.array([Decimal("1.25"), None, Decimal("2.00"), Decimal("0.05")], pa.decimal128(20, 2)),
        }
    )
    ways = {"n": "count", "sum": "sum", "greatest": "max", "money": "sum"}
    found = combined(rows, ["k", "w"], ways)
    assert found.schema == rows.select(["k", "w", *ways]).schema
    assert sorted(found.to_pylist(), key=lambda row: (row["k"], row["w"])) == [
        {"k": "a", "w": 0, "n": 5, "sum": 4.5, "greatest": 7, "money": Decimal("1.30")},
        {"k": "a", "w": 10, "n": 3, "sum": 2.0, "greatest": 3, "money": Decimal("2.00")},
        {"k": "b", "w": 0, "n": 2, "sum": 1.0, "greatest": None, "money": None},
    ]


def test_doubles_are_compared_by_the_record_tasks() -> None:
    """The greatest of NaN and 1 is NaN to them, and 1 to Arrow."""
    rows = pa.table({"k": ["a", "a"], "greatest": [math.nan, 1.0]})
    assert combined(rows, ["k"], {"greatest": "max"}) is rows


def test_keys_that_arrow_cannot_group_stay_as_they_are() -> None:
    rows = pa.table({"k": [{"x": [1]}, {"x": [1]}], "n": [1, 2]})
    assert combined(rows, ["k"], {"n": "sum"}) is rows


def test_sums_that_leave_their_type_stay_as_they_are() -> None:
    big = Decimal(9 * 10**18)
    rows = pa.table({"k": ["a", "a"], "sum": pa.array([big, big], pa.decimal128(19, 0))})
    assert combined(rows, ["k"], {"sum": "sum"}) is rows
