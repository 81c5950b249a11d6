"""Watermarks: what a watermark is, and how a task finds its own.

A *watermark* of t says that records of times before t are late from here on. The stage of a watermark operator
(runtime/operators/watermarks.py) sends it into every channel, in order with the records, so a watermark must never
overtake a record. A task's watermark is the least watermark of its channels. Two kinds of channels do not count: those
that have ended, and those whose sender is *idle* because its input has stopped. When no channel counts any more, the
task takes the greatest watermark of all channels, and becomes idle itself. A task's watermark never goes back. It is
the end of time only when all channels have ended, because an idle channel may have records again.

Joins, windows and process functions emit records whose times are before their own watermark. So they *hold back* the
watermark that follows downstream by what they may still emit, or these records would be late there.

Times are whole milliseconds since 1970, UTC. A flow needs no watermarks between the times at which its windows end or
are removed. All of these are multiples of the flow's *grain*, so watermarks are rounded down to the grain: a job with
windows of ten seconds sends one watermark in ten seconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from datetime import datetime, timedelta, timezone
from numbers import Integral
from typing import Any

from penstock.runtime.errors import FlowError

#: The watermark of a channel on which no more records will come.
END_OF_TIME = 1 << 62

#: All times lie between this number and its negative, and all durations are below it. So the sum of a few of them stays
#: away from the special values near the limits of 64 bits.
TIME_MAX = 1 << 60

#: What a channel carries instead of a watermark while its sender's input is idle.
IDLE = -(1 << 62)

# The times that records most likely have, in seconds since 1970: from September 2001 to the end of 2100.
_SECONDS_FROM, _SECONDS_TO = 1_000_000_000, 4_133_980_800

# By how much a second is counted in each unit. Times in nanoseconds are above TIME_MAX, or nearly.
_UNITS = {"seconds": 1, "milliseconds": 10**3, "microseconds": 10**6}

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MS = timedelta(milliseconds=1)


def held_back(watermark: int | None, ms: int) -> int | None:
    """Returns the watermark that follows an operator whose outputs have times up to `ms` milliseconds before its own
    watermark. At the end of time it emits no more, and while its input is idle it emits nothing."""
    return watermark if watermark in (None, IDLE, END_OF_TIME) else watermark - ms


class Watermark:
    """A watermark among the batches of an inbox."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value

    def __len__(self) -> int:
        """A watermark has no records."""
        return 0


class Watermarks:
    """The watermarks of a task's channels, and the watermark of the task."""

    def __init__(self) -> None:
        self.current: int | None = None  # None: no watermark is known yet; IDLE: no channel has input
        # The task must take its last watermark a second time, after the outputs that the watermark has released.
        self.again = False
        self._of: dict[int, int] = {}
        self._greatest = IDLE  # the greatest watermark that the task has had
        self._said = IDLE  # the greatest watermark of any channel

    def take(self, channel: int, value: int, channels: Collection[int]) -> bool:
        """Takes a watermark of one of the task's channels. Returns True when the task's own watermark has changed."""
        self._of[channel] = value
        self.again = False
        if value != END_OF_TIME:
            self._said = max(self._said, value)
        if len(self._of) < len(channels):
            return False
        marks = self._of.values()
        active = [value for value in marks if value not in (IDLE, END_OF_TIME)]
        if active:
            now = self._greatest = max(self._greatest, min(active))
        elif IDLE not in marks:
            now = END_OF_TIME
        elif self._said > self._greatest:
            now = self._greatest = self._said
            self.again = True
        else:
            now = IDLE
        if now == self.current:
            return False
        self.current = now
        return True


def as_ms(time: Any) -> int:
    """Returns a record's time in whole milliseconds since 1970. A number stays as it is; a datetime must have a time
    zone."""
    if isinstance(time, datetime):
        if time.tzinfo is None:
            raise TypeError(f"the time {time!r} has no time zone; use an aware datetime, or milliseconds since 1970")
        return (time - _EPOCH) // _MS
    if not isinstance(time, int | float | Integral) or isinstance(time, bool):
        raise TypeError(f"a record's time must be milliseconds since 1970 or a datetime with a time zone, not {time!r}")
    ms = int(time) if isinstance(time, Integral) else time  # some whole numbers are numpy's
    if not -TIME_MAX <= ms <= TIME_MAX:
        raise ValueError(f"the time {time!r} is not one in milliseconds since 1970")
    return math.floor(ms)


def other_unit(time: Any) -> str | None:
    """Returns the unit in which a number is a time of the years 2001 to 2100, if this unit is not milliseconds."""
    if isinstance(time, int | float | Integral) and not isinstance(time, bool):
        return unit_between(float(time), float(time))
    return None


def unit_between(first: float, last: float) -> str | None:
    """Returns the unit in which some number from `first` to `last` is a time of the years 2001 to 2100, or None when
    this unit may be milliseconds, or there is none."""
    units = [
        unit for unit, a_second in _UNITS.items() if first < _SECONDS_TO * a_second and last >= _SECONDS_FROM * a_second
    ]
    return None if not units or "milliseconds" in units else units[0]


def is_recent(time: int) -> bool:
    """Returns whether a time in milliseconds is one of the years 2001 to 2100."""
    return _SECONDS_FROM * 1000 <= time < _SECONDS_TO * 1000


def wrong_unit(times: Collection[int], span: int, watermark: int, where: str) -> ValueError | None:
    """Returns an error when times that are compared with a watermark are most likely not in milliseconds. They lie from
    `times` to a `span` after them. Times that are wrong together with the watermarks are found there; and where the
    watermark is not of our time either, as in a simulation, any time may be meant. `where`: what gives the times."""
    units = {unit_between(time, time + span) for time in times} if is_recent(watermark) else {None}
    if None in units:
        return None
    first, later = next(iter(times)), " or a little later" if span else ""
    return ValueError(
        f"the time {first}{later} is most likely in {units.pop()} since 1970, and was taken for milliseconds: the "
        f"watermark is at {watermark}; let {where} give milliseconds or datetimes with a time zone, as the time of "
        "watermark() does"
    )


def are_plain(times: list[Any]) -> bool:
    """Whether as_ms would leave these times unchanged: they are whole numbers within the limits."""
    return set(map(type, times)) == {int} and min(times) >= -TIME_MAX and max(times) <= TIME_MAX


def duration_ms(duration: float | timedelta, what: str, least: int = 1) -> int:
    """Returns a duration, given in seconds or as a timedelta, in whole milliseconds. Raises FlowError when it is less
    than `least`."""
    if isinstance(duration, timedelta):
        ms = duration / _MS
    elif isinstance(duration, int | float) and not isinstance(duration, bool):
        ms = duration * 1000
    else:
        raise FlowError(f"{what}: {duration!r}; give seconds or a timedelta")
    # 1.001 s times 1000 is not quite 1001.
    if not (ms < TIME_MAX and (whole := round(ms)) >= least and abs(ms - whole) <= 1e-9 * max(1, abs(whole))):
        bound = "" if least == -TIME_MAX else f", at least {least}"
        raise FlowError(f"{what}: {duration!r}; it must be whole milliseconds{bound}")
    return whole
