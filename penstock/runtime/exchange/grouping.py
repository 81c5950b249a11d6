"""Groupings: the rules that choose the receiving task of a record (docs/papers.md: A2, W1).

A grouping is plain data on an edge of the graph. `runtime/exchange/output.py` divides lists of records by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Grouping:
    """The base class. `name` is the usual word for the grouping, which `flow.explain()` shows."""

    @property
    def name(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Forward(Grouping):
    """Task i sends to task i. Both operators need the same parallelism, and may be fused into one task."""


@dataclass(frozen=True)
class Rebalance(Grouping):
    """In turn: each receiving task gets an equal share of each sending task's records."""


@dataclass(frozen=True)
class Shuffle(Grouping):
    """At random: equal shares on average, without a fixed pattern between neighbouring records."""


@dataclass(frozen=True)
class All(Grouping):
    """To all: every record goes to every receiving task (broadcast)."""


@dataclass(frozen=True)
class Global(Grouping):
    """Every record goes to the first receiving task."""


@dataclass(frozen=True)
class Key(Grouping):
    """By key: records with equal keys go to the same task. A stable hash maps the key to a key group, which belongs to
    a task."""

    selector: Callable[[Any], Any]


@dataclass(frozen=True)
class Custom(Grouping):
    """By a function of the user: `chooser(record, n_tasks)` returns the index of the receiving task, 0 <= index <
    n_tasks."""

    chooser: Callable[[Any, int], int]
