"""An oracle for ride-hailing (docs/papers.md: W9): the driver of each request, slowly, by the rules.

It looks at every location for every request. The rules:

- A driver is where its last location up to the time of the request says, also if that one has the very same time. Of
  two locations of a driver at one time the later one in the list counts. A driver without such a location is nowhere.
- A driver is able if the distance is at most the radius. Of the able ones the nearest is the best; of several that are
  equally near, the one with the least id.
- The distance is that of the equirectangular projection at the mean latitude of the two places, the earth being a
  sphere of 6,371 km.

The lists may be in any order, but for locations of one driver at one time: times are event times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

Located = tuple[str, float, float, int]
"""(driver or request, lon, lat, time_ms)."""


class Match(NamedTuple):
    """A driver who is able to take a request."""

    request: str
    driver: str
    distance_m: float


def able(locations: Iterable[Located], requests: Iterable[Located], radius_m: float) -> dict[str, list[Match]]:
    """Returns all matches of each request, the best one first."""
    locations = list(locations)
    found: dict[str, list[Match]] = {}
    for request, lon, lat, time_ms in requests:
        assert request not in found, f"two requests have the id {request}"
        last: dict[str, Located] = {}
        for location in locations:
            driver, at = location[0], location[3]
            if at <= time_ms and (driver not in last or last[driver][3] <= at):
                last[driver] = location
        matches = [
            Match(request, driver, distance)
            for driver, where_lon, where_lat, _ in last.values()
            if (distance := distance_of(lon, lat, where_lon, where_lat)) <= radius_m
        ]
        found[request] = sorted(matches, key=lambda match: (match.distance_m, match.driver))
    return found


def expected(locations: Iterable[Located], requests: Iterable[Located], radius_m: float) -> dict[str, Match | None]:
    """Returns the best match of each request, None where no driver is near enough."""
    return {
        request: matches[0] if matches else None for request, matches in able(locations, requests, radius_m).items()
    }


def distance_of(lon: float, lat: float, other_lon: float, other_lat: float) -> float:
    """Returns the metres between two places."""
    east = math.radians(other_lon - lon) * math.cos(math.radians((lat + other_lat) / 2))
    return 6_371_000 * math.hypot(east, math.radians(other_lat - lat))
