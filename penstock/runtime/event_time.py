"""Event time: what a watermark is, and how a task knows its own.

A *watermark* of t says: from here on, records of times before t are late. It goes from a `Watermarks` operator
(runtime/watermarks.py) down every channel, in order with the records, so it never overtakes one. A task's watermark is
the least of those of its channels; channels whose sender is *idle*, because its input has fallen silent, do not count,
those that have ended stand at the end of time. It never goes back.

Times are whole milliseconds since 1970, UTC. Nothing in the runtime needs finer watermarks than the windows of the
flow have ends and cleanings: all of them are multiples of the flow's *grain*, so watermarks are cut down to one, and a
job with windows of ten seconds sends one in ten seconds.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta, timezone
from typing import Any

from penstock.runtime.errors import FlowError

#: The watermark of a channel by which no record will come.
END_OF_TIME = 1 << 62

#: What a channel says instead of a watermark while its sender's input is silent.
IDLE = -(1 << 62)

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
        self._of: dict[int, int] = {}

    def take(self, channel: int, value: int, channels: Collection[int]) -> bool:
        """A channel's watermark, of all the task's channels; True when the task's own has changed."""
        self._of[channel] = value
        if len(self._of) < len(channels):
            return False
        active = [value for value in self._of.values() if value != IDLE]
        now = min(active) if active else IDLE
        if now == self.current or (now != IDLE and self.current not in (None, IDLE) and now < self.current):
            return False
        self.current = now
        return True


def as_ms(time: Any) -> int:
    """A record's time in whole milliseconds since 1970: of a number, as it is; of a datetime with a time zone."""
    if isinstance(time, int) and not isinstance(time, bool):
        return time
    if isinstance(time, float):
        return int(time)
    if isinstance(time, datetime):
        if time.tzinfo is None:
            raise TypeError(f"the time {time!r} has no time zone; use an aware datetime, or milliseconds since 1970")
        return (time - _EPOCH) // _MS
    raise TypeError(f"a record's time must be milliseconds since 1970 or a datetime with a time zone, not {time!r}")


def duration_ms(duration: float | timedelta, what: str, least: int = 1) -> int:
    """A duration in seconds, or a timedelta, in whole milliseconds; FlowError when it is not at least `least`."""
    if isinstance(duration, timedelta):
        ms = duration / _MS
    elif isinstance(duration, int | float) and not isinstance(duration, bool):
        ms = duration * 1000
    else:
        raise FlowError(f"{what}: {duration!r}; give seconds or a timedelta")
    if not (ms >= least and ms == ms // 1 and ms < END_OF_TIME):
        raise FlowError(f"{what}: {duration!r}; it must be whole milliseconds, at least {least}")
    return int(ms)
