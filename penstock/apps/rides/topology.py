"""Ride-hailing (docs/papers.md: W9): the nearest driver within a radius for every request of a passenger.

    locations -> (by driver) -+
    posts ---> (by post) -----+-> match -> (by request) -> best -> matches
    requests -> (to all) -----+

Locations are divided among the tasks of `match` by driver, and each request goes to all of these tasks. Each task
answers with the best of its own drivers, and says so too when it has none. `best` takes the best of all answers.

A driver is where its last location up to the time of the request says. So a task answers when the watermark has passed
this time, and it keeps the locations of each driver that may still be needed. An answer must never depend on the order
in which locations and requests arrive, on the number of tasks, or on a failure.

**Posts.** A task is told of the watermark by event timers, which belong to keys, and a task without drivers has no
keys. So there is a post in every key group: a key that is no driver, and whose task answers for it. The state of a post
is the time up to which it has answered. `best` has all answers to a request when the answers of all posts have come.
This holds too when the number of tasks changes while a request waits. A task calculates one answer for all its posts.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, Final

import penstock as ps
from penstock.apps.rides.city import TIME_MS, Location, Request, distance_m
from penstock.runtime.event_time.watermark import END_OF_TIME
from penstock.runtime.program.flow import Flow, Stream
from penstock.runtime.records.key_groups import DEFAULT_KEY_GROUPS, key_groups
from penstock.runtime.sinks import Sink
from penstock.runtime.sources import Memory, Source

Match = tuple[str, str | None, float | None, int]
"""(request, driver, distance_m, time_ms of the request); driver and distance are None where no driver is near."""

Answer = tuple[str, str | None, float | None, int, int]
"""A Match, and the number of posts whose drivers were considered."""

RADIUS_M = 1_500.0
POSTS: Final = DEFAULT_KEY_GROUPS

_POST = "post "
_NEVER: Final = -1  # the time of the records that set up posts
_TICK_MS = 50  # a task answers together what falls into so many milliseconds
_KEEP_MS = 60_000  # answered requests stay in the broadcast map for this long, because one task saves it for all
_PURGE = 256  # requests in the map that are too few to look for old ones
_CELL = 0.01  # degrees; the side of the cells by which drivers are found
_DEGREE_M = 111_194.9  # of latitude
_ROUNDING = 1e-9  # degrees

Place = tuple[int, float, float]
"""(time_ms, lon, lat)."""


def topology(
    locations: Source,
    requests: Source,
    sink: Sink,
    *,
    radius_m: float = RADIUS_M,
    lateness_s: float = 0.0,
    lines: tuple[Callable[[str], Location], Callable[[str], Request]] | None = None,
    name: str = "rides",
) -> Flow:
    """Builds the flow: (driver, lon, lat, time_ms) and (request, lon, lat, time_ms) go in, and a Match for each request
    comes out. Both may be out of order by `lateness_s`. The sources of `lines` give lines, of which these functions
    make locations and requests; each source is then one file, which one task reads."""
    flow = Flow(name, key_groups=POSTS)
    tasks = None if lines is None else 1
    located = flow.read(locations, name="locations", parallelism=tasks)
    asked = flow.read(requests, name="requests", parallelism=tasks)
    if lines is not None:
        located = located.map(lines[0], name="parse locations", parallelism=1)
        asked = asked.map(lines[1], name="parse requests", parallelism=1)
    matches(flow, located, asked, radius_m=radius_m, lateness_s=lateness_s).write(sink, name="matches")
    return flow


def matches(
    flow: Flow, located: Stream, asked: Stream, *, radius_m: float = RADIUS_M, lateness_s: float = 0.0
) -> Stream:
    """Returns the stream of a Match for each request. The streams must come from their sources directly, and the flow
    must have POSTS key groups."""
    located = located.watermark(TIME_MS, out_of_orderness_s=lateness_s, name="locations in time")
    asked = asked.watermark(TIME_MS, out_of_orderness_s=lateness_s, name="requests in time")
    records = [(post, 0.0, 0.0, _NEVER) for post in all_posts()]
    posts = flow.read(Memory(records), name="posts", parallelism=1)
    return (
        located.union(posts)
        .key_by(0)
        .connect(asked.broadcast())
        .process(Matcher(radius_m), name="match")
        .key_by(0)
        .process(_Best(), name="best")
    )


@lru_cache
def all_posts() -> tuple[str, ...]:
    """Returns a key for each key group, in order of the groups."""
    found: dict[int, str] = {}
    number = 0
    while len(found) < POSTS:
        names = [f"{_POST}{number + more}" for more in range(1024)]
        for name, group in zip(names, memoryview(key_groups(names, POSTS)).cast("H"), strict=True):
            found.setdefault(group, name)
        number += len(names)
    return tuple(found[group] for group in range(POSTS))


class Matcher(ps.BroadcastProcessFunction):
    """Answers each request with the best of the drivers of this task.

    The state of a driver is the list of its places, in order of time: the last one up to the watermark, and all later
    ones. The broadcast map has the requests by their ids. It keeps them for a minute longer than it needs them, because
    when the first task saves the map, another task may be a little behind. Old requests in the map have no effect.
    """

    def __init__(self, radius_m: float) -> None:
        self.radius_m = radius_m
        self._ready = False

    def _prepare(self, ctx: ps.ProcessContext) -> None:
        """Makes the indexes of this task from the state that every epoch saves."""
        self._ready = True
        self._cells: dict[tuple[int, int], dict[str, int]] = {}  # the drivers of each cell, and how many places there
        self._posts: Counter[int] = Counter()  # how many posts of this task have answered up to a time
        self._waiting: list[tuple[int, str]] = []  # the requests that some post of this task has not answered
        self._purge_at = _PURGE
        self._asked: set[tuple[int, int]] = set()  # of the present watermark: from when, up to when
        for key, state in ctx.state.items():
            if key.startswith(_POST):
                self._posts[state] += 1
            else:
                for place in state:
                    self._enter(key, place)
        answered = self._answered()
        for request, _, _, time_ms in ctx.broadcast.values():
            if time_ms >= answered:
                insort(self._waiting, (time_ms, request))

    def process(self, ctx: ps.ProcessContext, key: str, location: Location) -> None:
        if not self._ready:
            self._prepare(ctx)
        _, lon, lat, time_ms = location
        if time_ms == _NEVER:
            self._posts[_NEVER] += 1
            self._asked.clear()  # what was answered at this watermark was not for this post
            ctx.set(_NEVER)
            ctx.set_event_timer(0)
            return
        places: list[Place] = ctx.get([])
        if not places:
            ctx.set(places)
        place = (time_ms, lon, lat)
        # Of two places at one time the one that came later counts.
        places.insert(bisect_right(places, time_ms, key=_time_of), place)
        self._enter(key, place)
        # All requests before a time have been answered. Of the places before it, the last one may still be needed.
        old = bisect_right(places, self._answered() - 1, key=_time_of) - 1
        if old > 0:
            for past in places[:old]:
                self._leave(key, past)
            del places[:old]

    def process_broadcast(self, ctx: ps.ProcessContext, request: Request) -> Iterable[Answer] | None:
        if not self._ready:
            self._prepare(ctx)
        identity, _, _, time_ms = request
        ctx.broadcast[identity] = request
        if len(ctx.broadcast) >= self._purge_at:
            self._purge(ctx)
        # A request that comes too late is answered by what is still known.
        late = sum(posts for upto, posts in self._posts.items() if upto > time_ms)
        if self._answered() <= time_ms:
            insort(self._waiting, (time_ms, identity))
        return (self._answer(ctx, request, late),) if late else None

    def on_event_timer(self, ctx: ps.ProcessContext, key: str, at_ms: int) -> Iterable[Answer]:
        """Answers the requests that the watermark has passed since this post has answered last.

        The posts of a task have the same timers, so the first one answers for all whose last time is the same.
        """
        if not self._ready:
            self._prepare(ctx)
        watermark = ctx.watermark()
        assert watermark is not None
        since: int = ctx.get()
        upto = max(watermark // _TICK_MS * _TICK_MS, since)
        answers: list[Answer] = []
        if (since, upto) not in self._asked:
            if any(at != upto for _, at in self._asked):
                self._asked.clear()
            self._asked.add((since, upto))
            posts = self._posts[since]  # of these, none has fired at this watermark
            first = bisect_right(self._waiting, (since, ""))
            for time_ms, request in self._waiting[first:]:
                if time_ms >= upto:
                    break
                answers.append(self._answer(ctx, ctx.broadcast[request], posts))
        self._posts[since] -= 1
        if not self._posts[since]:
            del self._posts[since]
        self._posts[upto] += 1
        ctx.set(upto)
        if watermark < END_OF_TIME:
            ctx.set_event_timer(upto + _TICK_MS)
        del self._waiting[: bisect_right(self._waiting, (self._answered(), ""))]
        return answers

    def _answered(self) -> int:
        """Returns up to when all posts of this task have answered."""
        return min(self._posts, default=_NEVER)

    def _purge(self, ctx: ps.ProcessContext) -> None:
        old = self._answered() - _KEEP_MS
        for request in [request for request, known in ctx.broadcast.items() if known[TIME_MS] < old]:
            del ctx.broadcast[request]
        self._purge_at = max(_PURGE, 2 * len(ctx.broadcast))

    def _answer(self, ctx: ps.ProcessContext, request: Request, posts: int) -> Answer:
        """Returns the best of the drivers of this task: the nearest, and of equally near ones that of the least id."""
        identity, lon, lat, time_ms = request
        best: tuple[float, str] | None = None
        for driver in self._near(lon, lat):
            places: list[Place] = ctx.state[driver]
            known = bisect_right(places, time_ms, key=_time_of)
            if known:
                _, there_lon, there_lat = places[known - 1]
                distance = distance_m(lon, lat, there_lon, there_lat)
                if distance <= self.radius_m and (best is None or (distance, driver) < best):
                    best = (distance, driver)
        if best is None:
            return identity, None, None, time_ms, posts
        return identity, best[1], best[0], time_ms, posts

    # --- cells -------------------------------------------------------------------------------------------------

    def _near(self, lon: float, lat: float) -> Iterator[str]:
        """Gives all drivers that have a place within the radius, and others, each once."""
        north = self.radius_m / _DEGREE_M + _ROUNDING
        east = north / max(math.cos(math.radians(min(abs(lat) + north, 90.0))), _ROUNDING) + _ROUNDING
        seen: set[str] = set()
        west_cell, south_cell = _cell(lon - east, lat - north)
        east_cell, north_cell = _cell(lon + east, lat + north)
        for column in range(west_cell, east_cell + 1):
            for row in range(south_cell, north_cell + 1):
                seen.update(self._cells.get((column, row), ()))
        return iter(seen)

    def _enter(self, driver: str, place: Place) -> None:
        drivers = self._cells.setdefault(_cell(place[1], place[2]), {})
        drivers[driver] = drivers.get(driver, 0) + 1

    def _leave(self, driver: str, place: Place) -> None:
        cell = _cell(place[1], place[2])
        drivers = self._cells[cell]
        drivers[driver] -= 1
        if not drivers[driver]:
            del drivers[driver]
            if not drivers:
                del self._cells[cell]


def _cell(lon: float, lat: float) -> tuple[int, int]:
    return math.floor(lon / _CELL), math.floor(lat / _CELL)


def _time_of(place: Place) -> int:
    return place[0]


class _Best(ps.ProcessFunction):
    """Emits the best answer to a request when the answers of all posts have come."""

    def process(self, ctx: ps.ProcessContext, key: str, answer: Answer) -> Iterable[Match] | None:
        _, driver, distance, time_ms, posts = answer
        best, seen = ctx.get((None, 0))
        seen += posts
        if driver is not None and distance is not None and (best is None or (distance, driver) < best):
            best = (distance, driver)
        if seen < POSTS:
            ctx.set((best, seen))
            return None
        ctx.clear()
        found: tuple[Any, Any] = (None, None) if best is None else (best[1], best[0])
        return ((key, *found, time_ms),)
