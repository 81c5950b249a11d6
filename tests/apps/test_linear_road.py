"""Linear Road: the answers are those of the slow checker, in both directions, whatever the order of the records."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

import penstock as ps
from penstock.apps import cli
from penstock.apps.app import packaged
from penstock.apps.linear_road import app
from penstock.apps.linear_road.source import TrafficSource
from penstock.apps.linear_road.topology import topology
from penstock.apps.linear_road.traffic import TIME, History, Pace, Record, Traffic, parse
from penstock.runtime.errors import FlowError
from tests.apps import linear_road_checker as checker
from tests.apps.parsed import parsed

SKEW_S = 4
#: A rush hour on few segments, with many short accidents, so that a short run has all kinds of answers.
PACE = Pace(cars_per_s=8, limit=30, first_seg=40, last_seg=43, accident_every_s=60, accident_lasts_s=200)
HISTORY = History(5)
KINDS = {"toll": "tolls", "alert": "alerts", "balance": "balances", "expenses": "expenses"}


def shuffled(records: list[Record], seed: int) -> list[Record]:
    """The records in another order, of which none is more than the skew behind one before it."""
    rng = random.Random(seed)
    return sorted(records, key=lambda record: record[TIME] + rng.uniform(0, 0.99 * SKEW_S))


def check(found: list[tuple[Any, ...]], right: checker.Answers) -> None:
    for kind, name in KINDS.items():
        mine = Counter(answer[1:] for answer in found if answer[0] == kind)
        theirs: Counter[Any] = getattr(right, name)
        assert mine == theirs, (
            f"{name}: lost {list((theirs - mine).items())[:3]}, more {list((mine - theirs).items())[:3]}"
        )
    assert {answer[0] for answer in found} <= KINDS.keys()


@pytest.fixture(scope="module")
def traffic() -> tuple[list[Record], checker.Answers]:
    records = list(Traffic(3, seconds=560, pace=PACE))
    right = checker.expected(records, HISTORY)
    assert sum(toll.toll > 0 for toll in right.tolls) > 100
    assert sum(balance.balance > 0 for balance in right.balances) > 3
    assert right.alerts
    assert any(accident.last is not None for accident in right.accidents)
    assert right.expenses
    return records, right


@pytest.mark.parametrize("parallelism", [1, 2, 4])
def test_answers_are_those_of_the_checker(traffic: tuple[list[Record], checker.Answers], parallelism: int) -> None:
    records, right = traffic
    flow = topology(ps.sources.Memory([]), ps.sinks.Collect(), HISTORY, lateness_s=SKEW_S)
    flow.graph.operators["records"].parallelism = 1  # so that the records are in the order that was given
    given = shuffled(records, parallelism)
    check(ps.testing.run(flow, given, parallelism=parallelism, batch_size=100 * parallelism)["answers"], right)


def test_answers_are_the_same_after_failures(traffic: tuple[list[Record], checker.Answers]) -> None:
    records, right = traffic
    flow = topology(ps.sources.Memory([]), ps.sinks.Collect(), HISTORY, lateness_s=SKEW_S)
    flow.graph.operators["records"].parallelism = 1
    fail_at = [len(records) // 4, len(records) // 2, len(records) - 20]
    check(ps.testing.run(flow, shuffled(records, 9), parallelism=3, batch_size=200, fail_at=fail_at)["answers"], right)


@pytest.mark.parametrize("parallelism", [1, 3])
def test_the_source_gives_all_of_the_traffic(parallelism: int) -> None:
    traffic = Traffic(3, xways=3, seconds=120, pace=PACE)
    flow = topology(TrafficSource(traffic, speed=None), ps.sinks.Collect(), HISTORY)
    found = ps.testing.run(flow, parallelism=parallelism, batch_size=100)["answers"]
    check(found, checker.expected(list(traffic), HISTORY))


def test_the_file_of_the_package() -> None:
    records = list(map(parse, packaged("linear_road.dat").read_text().splitlines()))
    flow = topology(ps.sources.TextFiles(str(packaged("linear_road.dat"))), ps.sinks.Collect(), HISTORY, parse=parse)
    found = ps.testing.run(flow, parallelism=2, batch_size=100)["answers"]
    check(found, checker.expected(records, HISTORY))
    assert {answer[0] for answer in found} == KINDS.keys()


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "linear-road", "--sample", "--local", "--no-progress", "--epoch-interval", "0"]) == 0
    assert capsys.readouterr().out.startswith("898 answers, ")


def options(*arguments: str) -> SimpleNamespace:
    return parsed(app.APP, *arguments)


def test_delays_are_told_of_generated_traffic() -> None:
    built = app.APP.build(options("--speed", "600", "--seconds", "120"))
    assert "120 s of traffic (slow) on 1 expressways, at 600 times" in built.intro
    lines = list(app.about_delays([(("toll", 40, 9), 98), (("toll", 70, 9), 1), (("toll", 6000, 9), 1)], 0.0))
    assert lines == ["delay of answers: p50 40 ms, p99 70 ms, max 6,000 ms, of 100", "1 answers were later than 5 s"]


@pytest.mark.parametrize("arguments", [["--sample", "--input", "x"], ["--input", "/nowhere/*.dat"]])
def test_options_that_make_no_sense(arguments: list[str]) -> None:
    with pytest.raises(FlowError):
        app.APP.build(options(*arguments))
