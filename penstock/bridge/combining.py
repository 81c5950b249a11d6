"""Combines the results of several partitions for a group, before the rows become Python objects (docs/papers.md: D1).

The record tasks merge partial results of one group in any case, so that combining them here is never needed: it saves
time, because Arrow adds numbers many times as fast as Python. It must never change a result: where Arrow compares
otherwise than the record tasks do, or not at all, the rows stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

# How Arrow merges parts. Counts are added.
_FUNCTIONS = {"count": "sum", "sum": "sum", "min": "min", "max": "max"}


def combined(rows: pa.Table, groups: list[str], ways: Mapping[str, str]) -> pa.Table:
    """Returns a table with one row for each group, or the same table when Arrow cannot combine its rows exactly.
    `groups`: the columns that name a group. `ways`: how the values of any other column become one, by its name."""
    compared = [name for name, way in ways.items() if way in ("min", "max")]
    if rows.num_rows < 2 or any(_has_nan(rows.column(name)) for name in compared):
        return rows  # NaN is the greatest double to Spark and to the record tasks, and nothing to Arrow
    wanted = [(name, _FUNCTIONS[way]) for name, way in ways.items()]
    names = [*groups, *ways]
    try:
        found = rows.group_by(groups, use_threads=False).aggregate(wanted)
        found = found.select([*groups, *(f"{name}_{function}" for name, function in wanted)]).rename_columns(names)
        return found.cast(rows.select(names).schema)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):  # keys or values that it cannot hash, compare or add
        return rows


def _has_nan(column: pa.ChunkedArray) -> bool:
    return pa.types.is_floating(column.type) and bool(pc.any(pc.is_nan(column)).as_py())
