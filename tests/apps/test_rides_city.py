"""Ride-hailing: locations and requests are pure functions of seed and number, and the oracle's answers to small cases
are those of the rules, worked out by hand."""

from __future__ import annotations

import itertools
import pickle
import random
from math import asin, cos, radians, sin, sqrt

import pytest

import penstock as ps
from penstock.apps.rides.city import (
    EAST,
    ID,
    LAT,
    LON,
    NORTH,
    SOUTH,
    START_MS,
    TIME_MS,
    WEST,
    Location,
    Locations,
    Request,
    Requests,
    distance_m,
)
from penstock.runtime.errors import FlowError
from tests.apps.rides_checker import able, expected

# --- the city --------------------------------------------------------------------------------------------------


def test_a_location_is_a_function_of_seed_and_number() -> None:
    locations = Locations(1, drivers=100)
    made = [locations(number) for number in range(2_000)]
    assert [Locations(1, drivers=100)(number) for number in reversed(range(2_000))] == made[::-1]
    copy = pickle.loads(pickle.dumps(locations))
    assert [copy(number) for number in range(300)] == made[:300]
    assert Locations(2, drivers=100)(0) != made[0]


def test_a_request_is_a_function_of_seed_and_number() -> None:
    requests = Requests(1)
    made = [requests(number) for number in range(500)]
    copy = pickle.loads(pickle.dumps(requests))
    assert [copy(number) for number in reversed(range(500))] == made[::-1]
    assert Requests(2)(0) != made[0]


def test_records_are_plain_tuples_with_ids_of_32_digits_within_the_city() -> None:
    made = [*map(Locations(1), range(3_000)), *map(Requests(1), range(3_000))]
    for record in made:
        assert tuple(map(type, record)) == (str, float, float, int)
        assert len(record[ID]) == 32
        assert int(record[ID], 16) >= 0
        assert WEST <= record[LON] <= EAST
        assert SOUTH <= record[LAT] <= NORTH
        assert round(record[LON], 5) == record[LON]
        assert round(record[LAT], 5) == record[LAT]
    assert len({record[ID] for record in made}) == len(made)


def test_each_driver_tells_where_it_is_at_the_fixed_interval() -> None:
    locations = Locations(1, drivers=40, every_s=2)
    made = [locations(number) for number in range(400)]
    assert len({record[ID] for record in made}) == 40
    for turn in range(40):
        own = made[turn::40]
        assert len({record[ID] for record in own}) == 1
        assert [record[TIME_MS] for record in own] == [START_MS + 50 * turn + 2_000 * time for time in range(10)]


def test_times_of_requests_follow_the_rate() -> None:
    requests = Requests(per_s=4, start_ms=1000)
    assert [requests(number)[TIME_MS] for number in (0, 1, 2, 40)] == [1000, 1250, 1500, 11_000]


def test_drivers_move_at_the_speed_of_a_city() -> None:
    locations = Locations(3, drivers=50, every_s=10)
    made = [locations(number) for number in range(50 * 200)]
    speeds = []
    for turn in range(50):
        own = made[turn::50]
        steps = [distance_m(*one[1:3], *two[1:3]) / 10 for one, two in itertools.pairwise(own)]
        assert max(steps) < 12  # metres a second; the ways are straight, streets are not
        speeds += steps
        assert distance_m(*own[0][1:3], *own[-1][1:3]) < 7_000
    assert 2 < sum(speeds) / len(speeds) < 6


def test_the_centre_is_denser() -> None:
    made = list(map(Requests(1), range(4_000)))
    west, south = (EAST - WEST) / 4, (NORTH - SOUTH) / 4
    middle = [r for r in made if WEST + west < r[LON] < EAST - west and SOUTH + south < r[LAT] < NORTH - south]
    assert len(middle) / len(made) == pytest.approx(0.75**2, abs=0.03)


def test_most_requests_have_a_driver_near() -> None:
    locations, requests = Locations(1, drivers=500), Requests(1, per_s=10)
    found = expected(map(locations, range(1_500)), [requests(number) for number in range(30, 60)], radius_m=1_500)
    assert len(found) == 30
    assert sum(match is not None for match in found.values()) > 20


def test_a_city_is_two_sources() -> None:
    flow = ps.Flow("rides")
    flow.read(ps.sources.Generator(Locations(1), limit=50)).write(ps.sinks.Collect(), name="locations")
    flow.read(ps.sources.Generator(Requests(1), limit=50)).write(ps.sinks.Collect(), name="requests")
    out = ps.testing.run(flow)
    assert out["locations"] == list(map(Locations(1), range(50)))
    assert out["requests"] == list(map(Requests(1), range(50)))


@pytest.mark.parametrize("wrong", [{"drivers": 0}, {"every_s": 0}, {"start_ms": -1}])
def test_locations_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(FlowError):
        Locations(**wrong)


@pytest.mark.parametrize("wrong", [{"per_s": 0}, {"start_ms": -1}])
def test_requests_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(FlowError):
        Requests(**wrong)


# --- the distance ----------------------------------------------------------------------------------------------


def on_the_sphere(lon: float, lat: float, other_lon: float, other_lat: float) -> float:
    """The distance along the surface, by the haversine formula."""
    north, east = radians(other_lat - lat), radians(other_lon - lon)
    part = sin(north / 2) ** 2 + cos(radians(lat)) * cos(radians(other_lat)) * sin(east / 2) ** 2
    return 2 * 6_371_000 * asin(sqrt(part))


def test_the_distance_is_that_on_the_sphere_to_a_metre() -> None:
    assert distance_m(104.0, 30.6, 104.0, 31.6) == pytest.approx(111_195, abs=1)
    draw = random.Random(1)
    for _ in range(1_000):
        place = draw.uniform(WEST, EAST), draw.uniform(SOUTH, NORTH)
        other = draw.uniform(WEST, EAST), draw.uniform(SOUTH, NORTH)
        assert distance_m(*place, *other) == pytest.approx(on_the_sphere(*place, *other), abs=1)
        assert distance_m(*place, *other) == distance_m(*other, *place)


# --- the oracle, by hand ---------------------------------------------------------------------------------------

# A hundredth of a degree of latitude is 1,112 metres.
ASKED: Request = ("r", 104.0, 30.60, 1_000)


def at(driver: str, lat: float, time_ms: int = 0) -> Location:
    return (driver, 104.0, lat, time_ms)


def best(locations: list[Location], radius_m: float = 5_000) -> str | None:
    match = expected(locations, [ASKED], radius_m)["r"]
    return None if match is None else match.driver


def test_the_nearest_driver_is_the_best() -> None:
    locations = [at("a", 30.62), at("b", 30.61), at("c", 30.63)]
    assert best(locations) == "b"
    matches = able(locations, [ASKED], 5_000)["r"]
    assert [match.driver for match in matches] == ["b", "a", "c"]
    assert [round(match.distance_m) for match in matches] == [1112, 2224, 3336]


def test_of_equally_near_drivers_the_least_id_is_the_best() -> None:
    assert best([at("c", 30.61), at("b", 30.61), at("d", 30.61)]) == "b"


def test_a_driver_beyond_the_radius_is_not_able_and_one_on_it_is() -> None:
    assert best([at("a", 30.61)], radius_m=1_111) is None
    assert best([at("a", 30.61)], radius_m=distance_m(104.0, 30.60, 104.0, 30.61)) == "a"


def test_the_last_location_up_to_the_request_counts() -> None:
    assert best([at("a", 30.60, 500), at("a", 30.70, 1_000)]) is None
    assert best([at("a", 30.60, 500), at("a", 30.70, 1_001)]) == "a"
    assert best([at("a", 30.70, 1_000), at("a", 30.60, 500)]) is None  # whatever their order
    assert best([at("a", 30.60, 1_001)]) is None


def test_of_two_locations_at_one_time_the_later_in_the_list_counts() -> None:
    assert best([at("a", 30.60, 500), at("a", 30.70, 500)]) is None
    assert best([at("a", 30.70, 500), at("a", 30.60, 500)]) == "a"


def test_each_request_has_an_answer_of_its_own_time() -> None:
    locations = [at("a", 30.61, 0), at("b", 30.60, 2_000)]
    found = expected(locations, [ASKED, ("s", 104.0, 30.60, 2_000), ("t", 104.0, 35.0, 2_000)], 5_000)
    assert {request: match and match.driver for request, match in found.items()} == {"r": "a", "s": "b", "t": None}
