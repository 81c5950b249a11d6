"""The drivers and passengers of ride-hailing (docs/papers.md: W9), made of nothing but a seed and numbers.

The paper's data are the tracks of a city's drivers and the requests of its passengers; their licence is not an open
one, so these are made up. The city has the extent of the one in the paper. Drivers and passengers are denser towards
its centre. Every driver tells at a fixed interval where it is; it drives from one place near its home to the next, and
takes ten minutes for each way.

A location and a request are hashes of the seed and their number, and never depend on others: so the same ones come in
every run, in any order, from any number of tasks. A driver's way is no sum of earlier steps either: its places are
hashes of the driver and the number of the way.

Records are tuples, (driver, lon, lat, time_ms) and (request, lon, lat, time_ms), because the codec sends lists of these
as msgpack; records of a class would be pickled. Ids are 32 hexadecimal digits and coordinates have five decimals, as in
the paper's data. Times are milliseconds since 1970.
"""

from __future__ import annotations

from collections.abc import Callable
from math import cos, hypot, radians
from typing import Final

from penstock.apps.hashing import GOLDEN, mixed
from penstock.runtime.errors import FlowError

Location = tuple[str, float, float, int]
"""(driver, lon, lat, time_ms)."""

Request = tuple[str, float, float, int]
"""(request, lon, lat, time_ms)."""

ID: Final = 0
LON: Final = 1
LAT: Final = 2
TIME_MS: Final = 3

WEST, EAST = 103.95, 104.17  # degrees of longitude
SOUTH, NORTH = 30.58, 30.76  # degrees of latitude

DRIVERS = 10_000
EVERY_S = 3.0
REQUESTS_PER_S = 100.0
START_MS = 1_700_000_000_000

_WAY_MS = 600_000
_AROUND = 0.02  # degrees from home that a driver drives at most, in each direction
_EARTH_M = 6_371_000
_DRIVER, _REQUEST = 1, 2  # what hashes are about


def distance_m(lon: float, lat: float, other_lon: float, other_lat: float) -> float:
    """Returns the distance of two places in metres.

    It takes the part of the earth around them as flat (the equirectangular projection at their mean latitude). That is
    enough for a city: over 30 km the error is below a metre. It is the same for both directions, to the last bit.
    """
    east = radians(other_lon - lon) * cos(radians((lat + other_lat) / 2))
    return _EARTH_M * hypot(east, radians(other_lat - lat))


class Locations:
    """Makes the location of a number, for a `Generator`:

        flow.read(ps.sources.Generator(Locations(seed=1, drivers=5000), rate=20_000))

    `drivers`: how many there are. `every_s`: the seconds of event time between two locations of a driver; the drivers
    take turns. `start_ms`: the time of location 0. Numbers are in the order of times. `Locations` travels to workers as
    these few values; there it holds about half a kilobyte for each driver that it was asked for.
    """

    def __init__(
        self, seed: int = 0, *, drivers: int = DRIVERS, every_s: float = EVERY_S, start_ms: int = START_MS
    ) -> None:
        if drivers < 1:
            raise FlowError(f"Locations need at least one driver, got drivers={drivers}")
        if not every_s > 0:
            raise FlowError(f"Locations: every_s must be above 0 seconds, got {every_s}")
        if start_ms < 0:
            raise FlowError(f"Locations: start_ms must not be negative, got {start_ms}")
        self.seed = seed
        self.drivers = drivers
        self.every_s = every_s
        self.start_ms = start_ms
        self._key = _key(seed, _DRIVER)
        # What does not change: of each driver that was asked for, its id and home; and its last way.
        self._known: dict[int, tuple[str, float, float, int]] = {}
        self._ways: dict[int, tuple[int, float, float, float, float]] = {}

    def __reduce__(self) -> tuple[Callable[..., Locations], tuple[int, int, float, int]]:
        return _locations, (self.seed, self.drivers, self.every_s, self.start_ms)

    def __call__(self, number: int) -> Location:
        driver = number % self.drivers
        time_ms = self.start_ms + int(number * 1000 * self.every_s / self.drivers)
        lon, lat = self.place(driver, time_ms)
        return self._home(driver)[0], round(lon, 5), round(lat, 5), time_ms

    def place(self, driver: int, time_ms: int) -> tuple[float, float]:
        """Returns where a driver (by its number) is at a time: (lon, lat)."""
        way, passed = divmod(time_ms + self._home(driver)[3], _WAY_MS)
        line = self._ways.get(driver)
        if line is None or line[0] != way:  # the last one is kept, because the next location is likely to need it
            lon, lat = self._stop(driver, way)
            to_lon, to_lat = self._stop(driver, way + 1)
            line = self._ways[driver] = (way, lon, lat, (to_lon - lon) / _WAY_MS, (to_lat - lat) / _WAY_MS)
        return line[1] + line[3] * passed, line[2] + line[4] * passed

    def _home(self, driver: int) -> tuple[str, float, float, int]:
        """Returns a driver's id and home, and when its ways begin."""
        known = self._known.get(driver)
        if known is None:
            word = mixed(self._key + (driver + 1) * GOLDEN)
            lon, lat = _central(word)
            known = self._known[driver] = (_id(word), lon, lat, mixed(word + 3) % _WAY_MS)
        return known

    def _stop(self, driver: int, way: int) -> tuple[float, float]:
        """Returns where a way of a driver begins."""
        word = mixed(mixed(self._key ^ (driver + 1) * GOLDEN) + way)
        _, lon, lat, _ = self._home(driver)
        lon += _AROUND * ((word >> 32) / (1 << 31) - 1)
        lat += _AROUND * ((word & 0xFFFFFFFF) / (1 << 31) - 1)
        return min(max(lon, WEST), EAST), min(max(lat, SOUTH), NORTH)


class Requests:
    """Makes the request of a number, for a `Generator`:

        flow.read(ps.sources.Generator(Requests(seed=1), rate=100))

    `per_s`: requests a second of event time, from `start_ms` on; numbers are in the order of times. `Requests` travels
    to workers as these few values.
    """

    def __init__(self, seed: int = 0, *, per_s: float = REQUESTS_PER_S, start_ms: int = START_MS) -> None:
        if not per_s > 0:
            raise FlowError(f"Requests: per_s must be above 0, got {per_s}")
        if start_ms < 0:
            raise FlowError(f"Requests: start_ms must not be negative, got {start_ms}")
        self.seed = seed
        self.per_s = per_s
        self.start_ms = start_ms
        self._key = _key(seed, _REQUEST)

    def __reduce__(self) -> tuple[Callable[..., Requests], tuple[int, float, int]]:
        return _requests, (self.seed, self.per_s, self.start_ms)

    def __call__(self, number: int) -> Request:
        word = mixed(self._key + (number + 1) * GOLDEN)
        lon, lat = _central(word)
        return _id(word), round(lon, 5), round(lat, 5), self.start_ms + int(number * 1000 / self.per_s)


def _locations(seed: int, drivers: int, every_s: float, start_ms: int) -> Locations:
    return Locations(seed, drivers=drivers, every_s=every_s, start_ms=start_ms)


def _requests(seed: int, per_s: float, start_ms: int) -> Requests:
    return Requests(seed, per_s=per_s, start_ms=start_ms)


def _central(word: int) -> tuple[float, float]:
    """Returns a place of the city, by a hash. Each coordinate is a mean of two, so that the middle is the likeliest."""
    one, two = mixed(word + 1), mixed(word + 2)
    east = (one >> 32) + (one & 0xFFFFFFFF)
    north = (two >> 32) + (two & 0xFFFFFFFF)
    return WEST + (EAST - WEST) * east / (1 << 33), SOUTH + (NORTH - SOUTH) * north / (1 << 33)


def _id(word: int) -> str:
    return f"{word:016x}{mixed(word + 4):016x}"


def _key(seed: int, about: int) -> int:
    return mixed(mixed(seed * GOLDEN + GOLDEN) + about)
