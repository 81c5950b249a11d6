"""A sink that keeps the newest value of each key: running results come in, and one line for each key goes out."""

from __future__ import annotations

from typing import Any

from penstock.apps.at_end import AtEnd, Kept


class Latest(AtEnd):
    """Keeps the newest value of each key of (key, value) records, and writes these values to another sink when the
    input ends.

    An aggregate that emits every update keeps its latency low and measurable, and yet what is left at the end is one
    record a key. Memory is that of one value a key, as in the aggregate itself,
    and all of it is saved with every epoch. Needs all records of a key in one
    task, as they come from a keyed operator of the same parallelism.
    """

    def kept(self) -> Kept:
        newest: dict[Any, Any] = {}
        return Kept(newest, newest.update, newest.items)

    def describe(self) -> str:
        return f"newest value of each key, at the end to {self.sink.describe()}"
