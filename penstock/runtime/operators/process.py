"""Keyed state for users' own functions: `keyed_stream.process(fn)`.

`fn(ctx, key, record)` returns None or an iterable of outputs, and may call `ctx.emit`, `ctx.output`, `ctx.get`,
`ctx.set` and `ctx.clear`, and ask for further states by their names (runtime/state/named.py). Each key has its own
state, and only the task that owns the key sees it. A subclass of `ProcessFunction` may also have open, on_timer,
on_event_timer, finish and close. `CoProcessFunction` and `BroadcastProcessFunction` take two inputs
(`a.connect(b).process(...)`).

There are two kinds of timers. A *timer* is due by the clock, and an *event timer* is due when the watermark has reached
its time, so that no record of an earlier time comes after it, unless the record is late.

Each epoch saves state and timers, and they come back after a failure. So the state must be picklable, and what an
object keeps outside `ctx` is lost with its process. A function must never see the state of another key.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Any, NoReturn, TypeVar

from penstock.runtime.errors import PenstockError
from penstock.runtime.event_time.watermark import TIME_MAX, as_ms, other_unit
from penstock.runtime.operators.side_outputs import send
from penstock.runtime.state.broadcast import BroadcastState
from penstock.runtime.state.named import ListState, MapState, NamedStates, ValueState
from penstock.runtime.state.timers import Timers
from penstock.runtime.units import seconds

F = TypeVar("F", bound=Callable[..., Any])


def _shown_by_name(method: F) -> F:
    """Marks a method whose `*unnamed` exists only for an error message that is better than Python's. help() leaves it
    out."""
    signature = inspect.signature(method)
    named = [each for each in signature.parameters.values() if each.kind is not each.VAR_POSITIONAL]
    method.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    return method


class _NoKey:
    """Stands for the current key where there is none. Whatever asks for the state of a key needs its hash."""

    def __hash__(self) -> int:
        raise PenstockError(
            "there is no current key here: state and timers belong to keys, and process_broadcast, open and finish are "
            "called for no key. Use ctx.broadcast in process_broadcast. What ctx.set has set for the keys of this task "
            "is in the dict ctx.state, in process_broadcast and finish, for reading"
        )

    def __repr__(self) -> str:
        return "no key"


NO_KEY = _NoKey()


class ProcessContext:
    """The methods that a process function may use while it has a record. The function must never keep the context, or
    its key, for later calls."""

    def __init__(
        self, operator: str, index: int, parallelism: int, side: dict[str, list[Any]], tracked: bool = False
    ) -> None:
        self.operator = operator
        self.index = index
        self.parallelism = parallelism
        self.key: Any = NO_KEY
        #: What `set` has set for the keys of this task, by key, for reading: also where there is no current key, as in
        #: process_broadcast and finish. Only get, set and clear may change it, for the current key.
        self.state: dict[Any, Any] = {}
        self.cleared = False  # whether `clear` was called since the state was last saved
        self.emitted: list[Any] = []
        self.clock: Callable[[], float] = time.time  # the job's clock, in seconds since 1970
        self.timers: Timers | None = None  # None: the operator has no on_timer
        self.event_timers: Timers | None = None  # None: the operator has no on_event_timer
        self.mark: int | None = None  # the greatest watermark so far
        self.broadcast = BroadcastState(operator)
        self.named = NamedStates(operator, tracked, lambda: self.key, self._seconds)
        self._side = side

    def _seconds(self) -> float:
        return self.clock()

    def watermark(self) -> int | None:
        """The watermark, in milliseconds since 1970: records of earlier times are late. None: none has come so far, for
        example because no .watermark(...) is upstream. When all input has ended, it is later than any time. Watermarks
        are multiples of 100 ms here, unless the operator has event timers."""
        return self.mark

    def value_state(self, name: str, *, ttl_s: float | timedelta | None = None) -> ValueState:
        """A further value of the current key: `.get(default)`, `.set(value)`, `.clear()`. With `ttl_s` it is removed
        this long after it was set last."""
        state: ValueState = self.named.get("value", name, ttl_s)
        return state

    def list_state(self, name: str, *, ttl_s: float | timedelta | None = None) -> ListState:
        """A list of the current key: `.append(*values)`, `.get()`, `.set(values)`, `.clear()`, len() and iteration. An
        epoch saves only what was added. With `ttl_s` each value is removed this long after it was added."""
        state: ListState = self.named.get("list", name, ttl_s)
        return state

    def map_state(self, name: str, *, ttl_s: float | timedelta | None = None) -> MapState:
        """A map of the current key, to be used like a dict. An epoch saves only the entries that have changed. With
        `ttl_s` each entry is removed this long after it was set last."""
        state: MapState = self.named.get("map", name, ttl_s)
        return state

    def now_ms(self) -> int:
        """The current time of the job's clock, in milliseconds since 1970. The clock advances while no records
        come, too."""
        return int(self.clock() * 1000)

    @_shown_by_name
    def set_timer(
        self, *unnamed: NoReturn, at_ms: int | datetime | None = None, after_s: float | timedelta | None = None
    ) -> int:
        """Set a timer for the current key, at which `on_timer` is called. Returns its time, in milliseconds since 1970.

        Give one of two times. `at_ms`: milliseconds since 1970, or a datetime with a time zone; a timer whose time has
        passed fires as soon as possible. `after_s`: seconds from now, or a timedelta. A key may have several timers;
        setting the same time again changes nothing.
        """
        if unnamed or (at_ms is None) == (after_s is None):
            raise PenstockError(
                f"operator {self.operator!r}: set_timer takes one time, by its name: set_timer(after_s=...), seconds "
                "from now or a timedelta, or set_timer(at_ms=...), milliseconds since 1970 or a datetime with a time "
                f"zone; it was given {unnamed or (at_ms, after_s)!r}"
            )
        if self.timers is None:
            raise PenstockError(
                f"operator {self.operator!r}: set_timer was called, and there is nothing to call when the timer is "
                "due; give process(fn, on_timer=...), or the class of the ProcessFunction a method on_timer(self, ctx, "
                "key, at_ms)"
            )
        if at_ms is not None:
            at = self._time_ms("set_timer", at_ms)
            if (unit := other_unit(at_ms)) is not None:
                raise PenstockError(
                    f"operator {self.operator!r}: set_timer(at_ms={at_ms!r}): the time is most likely in {unit} since "
                    "1970; give milliseconds, or a datetime with a time zone"
                )
        else:
            assert after_s is not None
            wait_s = seconds(after_s, f"operator {self.operator!r}: set_timer: after_s")
            if wait_s * 1000 > TIME_MAX:
                raise PenstockError(f"operator {self.operator!r}: set_timer(after_s={after_s!r}): that is too far away")
            at = math.ceil((self.clock() + wait_s) * 1000)
        self.timers.set(self.key, at / 1000)
        return at

    @_shown_by_name
    def cancel_timer(self, *unnamed: NoReturn, at_ms: int | datetime | None = None) -> None:
        """Remove the current key's timer of this time (as in `set_timer`), or without a time all of its timers."""
        if unnamed:
            raise PenstockError(
                f"operator {self.operator!r}: cancel_timer takes its time by name, cancel_timer(at_ms=...), in "
                f"milliseconds since 1970; it was given {unnamed!r}"
            )
        if self.timers is not None:
            self.timers.cancel(self.key, None if at_ms is None else self._time_ms("cancel_timer", at_ms) / 1000)

    def set_event_timer(self, at_ms: int | datetime) -> int:
        """Set an event timer for the current key: `on_event_timer` is called when the watermark has reached `at_ms`, in
        milliseconds since 1970 or a datetime with a time zone. A timer whose time has passed is called as soon as
        possible. Returns its time in milliseconds. Setting the same time again changes nothing."""
        if self.event_timers is None:
            raise PenstockError(
                f"operator {self.operator!r}: set_event_timer was called, and there is nothing to call when the timer "
                "is due; give process(fn, on_event_timer=...), or the class of the ProcessFunction a method "
                "on_event_timer(self, ctx, key, at_ms)"
            )
        at = self._time_ms("set_event_timer", at_ms)
        self.event_timers.set(self.key, at)
        return at

    def cancel_event_timer(self, at_ms: int | datetime | None = None) -> None:
        """Remove the current key's event timer of this time, or without a time all of its event timers."""
        if self.event_timers is not None:
            at = None if at_ms is None else self._time_ms("cancel_event_timer", at_ms)
            self.event_timers.cancel(self.key, at)

    def _time_ms(self, what: str, time: int | datetime) -> int:
        try:
            return as_ms(time)
        except (TypeError, ValueError) as error:
            raise PenstockError(f"operator {self.operator!r}: {what}(at_ms={time!r}): {error}") from None

    def get(self, default: Any = None) -> Any:
        """Returns the state of the current key, or `default` when it has none."""
        return self.state.get(self.key, default)

    def set(self, value: Any) -> None:
        """Sets the state of the current key."""
        self.state[self.key] = value

    def clear(self) -> None:
        """Removes the state of the current key."""
        if self.key in self.state:
            del self.state[self.key]
            self.cleared = True

    def emit(self, *records: Any) -> None:
        """Sends records to the main output."""
        self.emitted.extend(records)

    def output(self, tag: str, *records: Any) -> None:
        """Sends records to a side output. The tag must be one of the operator's `outputs`."""
        send(self._side, tag, records, self.operator)


class ProcessFunction:
    """Base class of process operators that need more than a function. Each task has one instance. Keep state in
    `ctx`."""

    def open(self, ctx: ProcessContext) -> None:
        """Called once in the worker before the first record."""

    def process(self, ctx: ProcessContext, key: Any, record: Any) -> Iterable[Any] | None:
        """Called for every record of the task's keys."""
        raise NotImplementedError

    def on_timer(self, ctx: ProcessContext, key: Any, at_ms: int) -> Iterable[Any] | None:
        """Called when a timer of the key is due; `at_ms` is the timer's time, in milliseconds since 1970. When the
        input ends, all remaining timers fire at once, in the order of their times. Of timers that are set then, those
        fire whose time the clock has reached; the others are dropped, and a warning says how many."""
        return None

    def on_event_timer(self, ctx: ProcessContext, key: Any, at_ms: int) -> Iterable[Any] | None:
        """Called when the watermark has reached the time of an event timer of the key. An event timer that is set here
        for a time that the watermark has reached fires too, before those of later times. When the input ends, the
        watermark has reached all times, so that all event timers fire, before the other timers. A timer that would then
        set another one for ever must look at `ctx.watermark()`: after a million in a row the job fails."""
        return None

    def finish(self, ctx: ProcessContext) -> Iterable[Any] | None:
        """Called when all input has ended and the last timers have fired; may emit. There is no current key, and
        `ctx.state` has what `ctx.set` has set for the keys of the task, for reading."""
        return None

    def close(self) -> None:
        """Called once at the end, also after an error."""


class CoProcessFunction(ProcessFunction):
    """Base class of process operators with two keyed inputs: `a.connect(b).process(MyCoProcess())`. Records of both
    inputs with equal keys see the same state."""

    def process1(self, ctx: ProcessContext, key: Any, record: Any) -> Iterable[Any] | None:
        """Called for every record of the first input, the stream whose `connect` was called."""
        raise NotImplementedError

    def process2(self, ctx: ProcessContext, key: Any, record: Any) -> Iterable[Any] | None:
        """Called for every record of the second input, the stream that was given to `connect`."""
        raise NotImplementedError


class BroadcastProcessFunction(ProcessFunction):
    """Base class of process operators with a keyed input, for which `process` is called, and one that goes to all
    tasks: `a.connect(rules.broadcast()).process(MyProcess())`.

    `ctx.broadcast` is a map that all tasks have alike. Only `process_broadcast` may change it, and what it does must
    depend on nothing but its record and this map; so all tasks do the same. Records of several sender tasks may come in
    another order to each task: where order matters, let the second stream have parallelism 1. Values must be replaced
    and not changed in place. The first task saves the map for all."""

    def process_batch(self, ctx: ProcessContext, records: list[Any]) -> Iterable[Any] | None:
        """Called for lists of records of the first input, when the operator was made by `process_batches`, in place of
        `process`. There is no current key."""
        raise NotImplementedError

    def process_broadcast(self, ctx: ProcessContext, record: Any) -> Iterable[Any] | None:
        """Called in every task for every record of the second input. There is no current key, so state and timers of
        a key raise an error. `ctx.state` has what `ctx.set` has set for the keys of the task, for reading."""
        raise NotImplementedError
