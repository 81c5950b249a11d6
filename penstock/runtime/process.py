"""The user's door to keyed state: `keyed_stream.process(fn)`.

`fn(ctx, key, record)` returns None or an iterable of outputs, and may call `ctx.emit`, `ctx.output`, `ctx.get`,
`ctx.set` and `ctx.clear`; state is per key and seen only by the task that owns the key. A `Process` subclass adds
open, finish and close.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.runtime.errors import PenstockError


class ProcessContext:
    """What a process function may do for the record at hand. Never keep one, or its key, between calls."""

    def __init__(self, operator: str, index: int, parallelism: int, side: dict[str, list[Any]]) -> None:
        self.operator = operator
        self.index = index
        self.parallelism = parallelism
        self.key: Any = None
        self.state: dict[Any, Any] = {}
        self.emitted: list[Any] = []
        self._side = side

    def get(self, default: Any = None) -> Any:
        """The state of the current key, or `default` when it has none."""
        return self.state.get(self.key, default)

    def set(self, value: Any) -> None:
        """Set the state of the current key."""
        self.state[self.key] = value

    def clear(self) -> None:
        """Forget the state of the current key."""
        self.state.pop(self.key, None)

    def emit(self, *records: Any) -> None:
        """Send records to the main output."""
        self.emitted.extend(records)

    def output(self, tag: str, *records: Any) -> None:
        """Send records to a side output; the tag must be one of the operator's `outputs`."""
        try:
            self._side[tag].extend(records)
        except KeyError:
            known = ", ".join(map(repr, self._side)) or "none"
            raise PenstockError(
                f"operator {self.operator!r} has no side output {tag!r} (it has: {known}); "
                f"declare it: process(..., outputs=({tag!r},))"
            ) from None


class Process:
    """Base of process operators that need more than a function. One instance a task; state belongs in `ctx`."""

    def open(self, ctx: ProcessContext) -> None:
        """Called once in the worker before the first record."""

    def process(self, ctx: ProcessContext, key: Any, record: Any) -> Iterable[Any] | None:
        """Called for every record of the task's keys."""
        raise NotImplementedError

    def finish(self, ctx: ProcessContext) -> Iterable[Any] | None:
        """Called when all input has ended; may emit."""
        return None

    def close(self) -> None:
        """Called once at the end, also after an error."""
