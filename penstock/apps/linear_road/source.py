"""The source of Linear Road's traffic (docs/papers.md: A10). Each expressway is a split, and seconds are due in time.

The records are those of `traffic.py`, which depend on the seed alone. So a reader that goes back simulates the seconds
before its offset again. It must never give a record of one second before all of the second before it: a task of several
expressways gives them second by second, so that its watermark holds for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from penstock.apps.linear_road.traffic import Record, Traffic
from penstock.runtime.errors import FlowError
from penstock.runtime.sources import Source, SourceContext, Split
from penstock.runtime.sources.base import Reader

_CATCH_UP_S = 0.02  # so long a read simulates what is given no more


class TrafficSource(Source):
    """Gives the records of `traffic`, second by second.

    `speed`: so many seconds of the traffic in one of the clock; 1 is the benchmark's. None: as fast as possible.
    `start_ms`: when second 0 is due, in milliseconds since 1970. That is an appointment: a job that starts later, or
    continues after a failure, finds waiting what was due meanwhile. `clock`: nanoseconds since 1970, for tests.

    Offset: (second, how many of its records were given).
    """

    def __init__(
        self,
        traffic: Traffic,
        *,
        speed: float | None = None,
        start_ms: float = 0.0,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        if speed is not None and not speed > 0:
            raise FlowError(f"TrafficSource: speed must be above 0, got {speed}")
        self.traffic = traffic
        self.speed = speed
        self.start_ms = start_ms
        self.clock = clock

    def splits(self, parallelism: int) -> list[Split]:
        return [Split(f"expressway {xway}", xway) for xway in range(self.traffic.xways)]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        return _TrafficReader(self, splits, context.clock)

    def due_ns(self, second: int) -> int:
        """Returns when a second is due, in nanoseconds since 1970."""
        if self.speed is None:
            return 0
        return round(self.start_ms * 1e6 + second * 1e9 / self.speed)

    def describe(self) -> str:
        traffic = self.traffic
        pace = "as fast as possible" if self.speed is None else f"{self.speed:g} s in a second"
        return f"TrafficSource({traffic.xways} expressways, {traffic.seconds:,} s, {pace})"


class _Way:
    """Holds the position in the traffic of an expressway."""

    def __init__(self, traffic: Traffic, split: Split) -> None:
        self.name = split.name
        position: tuple[int, int] = split.offset or (0, 0)
        self.second, self.given = position
        self.simulated = traffic.expressway(split.payload)
        self.records: list[Record] | None = None  # of the second


class _TrafficReader(Reader):
    split = ""  # of all expressways, second by second

    def __init__(self, source: TrafficSource, splits: list[Split], clock: Callable[[], int]) -> None:
        self._source = source
        self._ways = [_Way(source.traffic, split) for split in splits]
        self._clock = clock
        self._catches_up = True
        self.paced = source.speed is not None
        self._finish()

    def read(self, limit: int) -> list[Any]:
        self.stamp_ns = None
        if self._catches_up and not self._catch_up():
            return []
        now = self._source.clock()
        out: list[Record] = []
        while len(out) < limit and not self.finished:
            way = self._next()
            due = self._source.due_ns(way.second)
            if self.paced and due > now:
                break
            if way.records is None:
                way.records = way.simulated.next_second()
            more = way.records[way.given : way.given + limit - len(out)]
            if more and self.paced and self.stamp_ns is None:
                self.stamp_ns = self._clock() - (now - due)
            out += more
            way.given += len(more)
            if way.given == len(way.records):
                way.second, way.given, way.records = way.second + 1, 0, None
                self._finish()
        return out

    def ready_in(self) -> float:
        if not self.paced or self.finished or self._catches_up:
            return 0.0
        return max(0, self._source.due_ns(self._next().second) - self._source.clock()) / 1e9

    def backlog(self) -> int:
        """Returns the approximate number of records that are due, by the number of the present second."""
        if self.finished or not self.paced:
            return 0
        now, speed = self._source.clock(), self._source.speed or 1.0
        count = 0.0
        for way in self._ways:
            late_s = min((now - self._source.due_ns(way.second)) / 1e9 * speed, self._source.traffic.seconds)
            count += max(0.0, late_s) * len(way.records or ())
        return int(count)

    def offsets(self) -> dict[str, Any]:
        return {way.name: (way.second, way.given) for way in self._ways}

    def _catch_up(self) -> bool:
        """Simulates the seconds before the offsets, for a short time. Returns whether all is done."""
        until = time.monotonic() + _CATCH_UP_S
        for way in self._ways:
            while way.simulated.time < way.second:
                if time.monotonic() >= until:
                    return False
                way.simulated.skip()
        self._catches_up = False
        return True

    def _next(self) -> _Way:
        """Returns the expressway whose next record is the earliest."""
        return min((way for way in self._ways if self._goes_on(way)), key=lambda way: way.second)

    def _goes_on(self, way: _Way) -> bool:
        seconds: int = self._source.traffic.seconds
        return way.second < seconds

    def _finish(self) -> None:
        self.finished = not any(map(self._goes_on, self._ways))
