"""Groupings: which task of the consumer a record goes to (docs/papers.md: A2, W1).

A grouping is plain data on an edge of the graph. How a list of records is dealt to tasks is
`runtime/exchange/output.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Grouping:
    """Base: `name` is the field's word for it, shown by `flow.explain()`."""

    @property
    def name(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Forward(Grouping):
    """Task i feeds task i; needs equal parallelism; may be fused into one task."""


@dataclass(frozen=True)
class Rebalance(Grouping):
    """Round-robin: every consumer task gets an equal share of each producer task's records."""


@dataclass(frozen=True)
class Shuffle(Grouping):
    """Random: equal shares in the mean, no fixed pattern between neighbouring records."""


@dataclass(frozen=True)
class All(Grouping):
    """Broadcast: every record goes to every consumer task."""


@dataclass(frozen=True)
class Global(Grouping):
    """Every record goes to the consumer's first task."""


@dataclass(frozen=True)
class Key(Grouping):
    """Records with equal keys meet in one task: key -> key group (stable hash) -> task."""

    selector: Callable[[Any], Any]


@dataclass(frozen=True)
class Custom(Grouping):
    """`chooser(record, n_tasks)` returns the index of the consumer task, 0 <= index < n_tasks."""

    chooser: Callable[[Any, int], int]
