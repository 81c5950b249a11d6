"""The user's door to keyed state: `keyed_stream.process(fn)`.

`fn(ctx, key, record)` returns None or an iterable of outputs, and may call `ctx.emit`, `ctx.output`, `ctx.get`,
`ctx.set` and `ctx.clear`; state is per key and seen only by the task that owns the key. A `Process` subclass adds
open, on_timer, finish and close.

State and timers are saved with each epoch and come back after a failure: state must be something that can be pickled,
and what an object keeps beside `ctx` is lost with its process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from penstock.runtime.errors import PenstockError
from penstock.runtime.timers import Timers


class ProcessContext:
    """What a process function may do for the record at hand. Never keep one, or its key, between calls."""

    def __init__(self, operator: str, index: int, parallelism: int, side: dict[str, list[Any]]) -> None:
        self.operator = operator
        self.index = index
        self.parallelism = parallelism
        self.key: Any = None
        #: All keys' state, to look at; only get, set and clear, for the current key, may change it.
        self.state: dict[Any, Any] = {}
        self.cleared = False  # since whoever saves the state has last looked
        self.emitted: list[Any] = []
        #: The time, in seconds since 1970.
        self.now: Callable[[], float] = time.time
        self.timers: Timers | None = None  # None: the operator could not be called when one is due
        self._side = side

    def set_timer(self, at: float) -> None:
        """Have `on_timer` called for the current key at this time (seconds since 1970; one that has passed: as soon
        as can be). A key may have several timers; setting the same time again changes nothing."""
        if not isinstance(at, (int, float)) or math.isnan(at):
            raise PenstockError(f"operator {self.operator!r}: set_timer({at!r}): give seconds since 1970")
        if self.timers is None:
            raise PenstockError(
                f"operator {self.operator!r} has nothing to call when a timer is due; give process(fn, on_timer=...)"
            )
        self.timers.set(self.key, float(at))

    def cancel_timer(self, at: float | None = None) -> None:
        """Forget the current key's timer of this time, or all of its timers."""
        if self.timers is not None:
            self.timers.cancel(self.key, at)

    def get(self, default: Any = None) -> Any:
        """The state of the current key, or `default` when it has none."""
        return self.state.get(self.key, default)

    def set(self, value: Any) -> None:
        """Set the state of the current key."""
        self.state[self.key] = value

    def clear(self) -> None:
        """Forget the state of the current key."""
        if self.key in self.state:
            del self.state[self.key]
            self.cleared = True

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

    def on_timer(self, ctx: ProcessContext, key: Any, at: float) -> Iterable[Any] | None:
        """Called when a timer of the key is due; `at` is the time that it was set for. When the input ends, the timers
        that are set fire at once, in order of their times; those that they set are dropped."""
        return None

    def finish(self, ctx: ProcessContext) -> Iterable[Any] | None:
        """Called when all input has ended and the last timers have fired; may emit."""
        return None

    def close(self) -> None:
        """Called once at the end, also after an error."""
