"""Event time: what a watermark is, and how a task knows its own.

A *watermark* of t says: from here on, records of times before t are late. It goes from a `MakeWatermarks` operator
(runtime/operators/watermarks.py) down every channel, in order with the records, so it never overtakes one. A task's
watermark is the least of those of its channels; channels whose sender is *idle*, because its input has fallen silent,
do not count, nor do those that have ended. When none is left that counts it comes to the greatest that any has said,
and then the task is idle itself. It never goes back, and comes to the end of time when all channels have ended: one
that is idle may yet have records.

Times are whole milliseconds since 1970, UTC. Nothing in the runtime needs finer watermarks than the windows of the
flow have ends and cleanings: all of them are multiples of the flow's *grain*, so watermarks are cut down to one, and a
job with windows of ten seconds sends one in ten seconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from datetime import datetime, timedelta, timezone
from numbers import Integral
from typing import Any

from penstock.runtime.errors import FlowError

#: The watermark of a channel by which no record will come.
END_OF_TIME = 1 << 62

#: Times are between this and its negative, durations below it, so that no sum of a few comes near the marks around it.
TIME_MAX = 1 << 60

#: What a channel says instead of a watermark while its sender's input is silent.
IDLE = -(1 << 62)

# Seconds since 1970 of times that records most likely have: from September 2001 to the end of 2100.
_SECONDS_FROM, _SECONDS_TO = 1_000_000_000, 4_133_980_800

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MS = timedelta(milliseconds=1)


class Watermark:
    """A watermark among batches."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value

    def __len__(self) -> int:
        """It has no records."""
        return 0


class Watermarks:
    """The watermarks of a task's channels, and the task's."""

    def __init__(self) -> None:
        self.current: int | None = None  # None: nothing is known yet; IDLE: no input
        self.again = False  # what was taken last is to be taken once more, behind what it has let go now
        self._of: dict[int, int] = {}
        self._greatest = IDLE  # that the task's own has been
        self._said = IDLE  # the greatest of any channel

    def take(self, channel: int, value: int, channels: Collection[int]) -> bool:
        """A channel's watermark, of all the task's channels; True when the task's own has changed."""
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
    """A record's time in whole milliseconds since 1970: of a number, as it is; of a datetime with a time zone."""
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
    """The unit in which a number is a time of the years 2001 to 2100, where that unit is not milliseconds."""
    if isinstance(time, int | float | Integral) and not isinstance(time, bool):
        for unit, a_second in (("seconds", 1), ("microseconds", 10**6)):  # nanoseconds are above TIME_MAX, or nearly
            if _SECONDS_FROM * a_second <= float(time) < _SECONDS_TO * a_second:
                return unit
    return None


def are_plain(times: list[Any]) -> bool:
    """Whether these are times for which as_ms would do nothing: whole numbers, none far out."""
    return set(map(type, times)) == {int} and min(times) >= -TIME_MAX and max(times) <= TIME_MAX


def duration_ms(duration: float | timedelta, what: str, least: int = 1) -> int:
    """A duration in seconds, or a timedelta, in whole milliseconds; FlowError when it is not at least `least`."""
    if isinstance(duration, timedelta):
        ms = duration / _MS
    elif isinstance(duration, int | float) and not isinstance(duration, bool):
        ms = duration * 1000
    else:
        raise FlowError(f"{what}: {duration!r}; give seconds or a timedelta")
    # 1.001 s times 1000 is not quite 1001.
    if not (ms < TIME_MAX and (whole := round(ms)) >= least and abs(ms - whole) <= 1e-9 * max(1, whole)):
        raise FlowError(f"{what}: {duration!r}; it must be whole milliseconds, at least {least}")
    return whole
