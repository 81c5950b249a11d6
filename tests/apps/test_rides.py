"""Ride-hailing: each request has the driver that the slow checker finds, whatever the order and the number of tasks."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

import penstock as ps
from penstock.apps import cli
from penstock.apps.app import packaged
from penstock.apps.rides import app
from penstock.apps.rides.city import TIME_MS, Location, Locations, Request, Requests
from penstock.apps.rides.topology import POSTS, all_posts, matches, topology
from penstock.runtime.errors import FlowError
from penstock.runtime.records.key_groups import key_groups
from tests.apps.parsed import parsed
from tests.apps.rides_checker import expected

SKEW_MS = 2_000
RADIUS_M = 1_500.0
LOCATIONS = list(map(Locations(1, drivers=120, every_s=2), range(1_500)))
REQUESTS = list(map(Requests(2, per_s=5), range(120)))


def shuffled(records: list[Any], seed: int) -> list[Any]:
    """The records in another order, of which none is more than the skew behind one before it."""
    rng = random.Random(seed)
    return sorted(records, key=lambda record: record[TIME_MS] + rng.uniform(0, 0.99 * SKEW_MS))


def right(locations: list[Location], requests: list[Request]) -> list[tuple[Any, ...]]:
    times = {request[0]: request[TIME_MS] for request in requests}
    return sorted(
        (request, *((match.driver, match.distance_m) if match else (None, None)), times[request])
        for request, match in expected(locations, requests, RADIUS_M).items()
    )


def run(locations: list[Location], requests: list[Request], **options: Any) -> list[tuple[Any, ...]]:
    flow = topology(
        ps.sources.Memory([]), ps.sources.Memory([]), ps.sinks.Collect(), radius_m=RADIUS_M, lateness_s=SKEW_MS / 1000
    )
    return ps.testing.run(flow, {"locations": locations, "requests": requests}, **options)["matches"]


@pytest.fixture(scope="module")
def answers() -> list[tuple[Any, ...]]:
    found = right(LOCATIONS, REQUESTS)
    near = sum(match[1] is not None for match in found)
    assert 30 < near < len(found), "some requests have a driver, and some have none"
    return found


@pytest.mark.parametrize("parallelism", [1, 2, 4])
def test_matches_are_those_of_the_checker(parallelism: int, answers: list[tuple[Any, ...]]) -> None:
    found = run(
        shuffled(LOCATIONS, parallelism),
        shuffled(REQUESTS, parallelism),
        parallelism=parallelism,
        batch_size=10 * parallelism,
    )
    assert sorted(found) == answers


def test_matches_are_the_same_after_failures(answers: list[tuple[Any, ...]]) -> None:
    found = run(
        shuffled(LOCATIONS, 5),
        shuffled(REQUESTS, 6),
        parallelism=3,
        batch_size=7,
        fail_at={"locations": [400, 1_200], "requests": [20, 90]},
    )
    assert sorted(found) == answers


def test_matches_are_the_same_in_every_way_in_which_a_job_may_go() -> None:
    locations, requests = LOCATIONS[:300], REQUESTS[:20]

    def build(located: ps.Stream, asked: ps.Stream) -> ps.Stream:
        return matches(located._flow, located, asked, radius_m=RADIUS_M, lateness_s=SKEW_MS / 1000)

    expect = right(locations, requests)
    ps.testing.torment(build, shuffled(locations, 1), shuffled(requests, 2), runs=6, expect=expect)


@pytest.mark.parametrize("order", [["requests"] * 30, ["locations"] * 400])
def test_one_source_may_be_far_ahead_of_the_other(order: list[str]) -> None:
    found = run(LOCATIONS[:400], REQUESTS[:30], parallelism=2, batch_size=5, order=order)
    assert sorted(found) == right(LOCATIONS[:400], REQUESTS[:30])


def test_a_city_without_drivers_answers_too() -> None:
    assert run([], REQUESTS[:3], parallelism=2) == [
        (request[0], None, None, request[TIME_MS]) for request in REQUESTS[:3]
    ]


def test_a_request_that_comes_too_late_is_answered_by_what_is_known() -> None:
    """It has no driver, because the first location of the only driver is forgotten by then."""
    driver = [("d" * 32, 104.0, 30.6, time) for time in (1_000, 50_000, 99_000, 100_000, 101_000)]
    requests = [("1" * 32, 104.0, 30.6, 60_000), ("2" * 32, 104.0, 30.6, 100_000), ("3" * 32, 104.0, 30.6, 2_000)]
    posts = [(post, 0.0, 0.0, -1) for post in all_posts()]
    order = [*["posts"] * POSTS, *["locations"] * 4, "requests", "requests", "locations", "requests"]
    flow = topology(ps.sources.Memory([]), ps.sources.Memory([]), ps.sinks.Collect(), lateness_s=SKEW_MS / 1000)
    inputs = {"posts": posts, "locations": driver, "requests": requests}
    found = ps.testing.run(flow, inputs, order=order)["matches"]
    assert sorted(found) == [
        ("1" * 32, "d" * 32, 0.0, 60_000),
        ("2" * 32, "d" * 32, 0.0, 100_000),
        ("3" * 32, None, None, 2_000),
    ]


def test_many_requests_are_forgotten_when_they_are_old() -> None:
    requests = [(f"{number:032}", 104.0, 30.6, 1_000_000 + 1_000 * number) for number in range(500)]
    driver = [("d" * 32, 104.0, 30.6, 1_000_000 + 1_000 * number) for number in range(500)]
    found = run(driver, requests, parallelism=2, order=["locations", "requests"] * 500, fail_at=[751])
    assert sorted(found) == [(request, "d" * 32, 0.0, time) for request, _, _, time in requests]


def test_every_key_group_has_a_post() -> None:
    assert list(memoryview(key_groups(list(all_posts()), POSTS)).cast("H")) == list(range(POSTS))


# --- the command -----------------------------------------------------------------------------------------------


def options(*arguments: str) -> SimpleNamespace:
    return parsed(app.APP, *arguments)


def test_lines_have_two_forms() -> None:
    assert app.parse_location("d,1.5,2.5,7000") == app.parse_location("d,order,7,1.5,2.5") == ("d", 1.5, 2.5, 7000)
    assert app.parse_request("r,1.5,2.5,7000") == app.parse_request("r,7,9,1.5,2.5,3,4") == ("r", 1.5, 2.5, 7000)
    for parse in (app.parse_location, app.parse_request):
        with pytest.raises(ValueError, match="this one has 2 fields"):
            parse("a,b")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--locations", "a.csv"],
        ["--sample", "--locations", "a.csv", "--requests", "b.csv"],
        ["--sample", "--duration", "3"],
        ["--rate", "max", "--duration", "0"],
        ["--every", "0"],
    ],
)
def test_options_that_make_no_sense(arguments: list[str]) -> None:
    with pytest.raises(FlowError):
        app.APP.build(options(*arguments))


@pytest.mark.parametrize("parallelism", [1, 4])
def test_the_files_of_the_package(parallelism: int) -> None:
    lines = [packaged(f"rides_{name}.csv").read_text().splitlines() for name in ("locations", "requests")]
    locations, requests = list(map(app.parse_location, lines[0])), list(map(app.parse_request, lines[1]))
    flow = topology(
        *(ps.sources.TextFiles(str(packaged(f"rides_{name}.csv"))) for name in ("locations", "requests")),
        ps.sinks.Collect(),
        lines=(app.parse_location, app.parse_request),
    )
    found = ps.testing.run(flow, parallelism=parallelism, batch_size=20)["matches"]
    assert sorted(found) == right(locations, requests)
    assert sum(driver is not None for _, driver, _, _ in found) > 30


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "rides", "--sample", "--local", "--no-progress", "--epoch-interval", "0"]) == 0
    assert capsys.readouterr().out.startswith("80 requests answered, ")


def test_generated_requests_end_with_the_duration() -> None:
    built = app.APP.build(options("--rate", "max", "--drivers", "30", "--duration", "2", "--every", "2"))
    out = ps.testing.run(built.flow, parallelism=2, batch_size=10)["matches"]
    assert len({request for request, *_ in out}) == len(out) == 200
