"""Which range of a flow goes to Spark when records pile up inside of it: real tasks in virtual time, whose loads a
paradigm scheduler looks at. Nothing is diverted: queues grow on, and still no other range may want to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import penstock as ps
from penstock.bridge.burst import BurstOptions
from penstock.bridge.commands import PrepareSpark
from penstock.bridge.cost import BatchCost
from penstock.bridge.paradigm_scheduler import DualOptions, ParadigmScheduler
from penstock.bridge.session import SparkOptions
from penstock.bridge.spark_life import SparkFacts
from tests.runtime.timed_job import BURST, RATE, Job, S, burst_inside

COST = BatchCost(0.1, 200_000.0)


def burst_at(job: Job, seconds: float) -> dict[str, float]:
    """Lets the job run. Returns when each range wanted to go to Spark, by its first operator; the others are absent."""
    scheduler = ParadigmScheduler(job.plan, DualOptions(BurstOptions(), SparkOptions()), 60.0)
    found: dict[str, float] = {}
    for _ in job.looks(seconds):
        now = job.now / S
        reports = {worker: loop.load() for worker, loop in enumerate(job.loops)}
        for command in scheduler.looked(now, now, reports):
            if isinstance(command, PrepareSpark):
                costs = {form.chain: COST for form in command.forms}
                scheduler.spark_ready(now, command.life, SparkFacts("a session", costs, 1, "", {}, "a bridge", "here"))
        for one in scheduler.status()["ranges"]:
            if one["state"] != "RECORD":
                found.setdefault(job.plan.chains[one["chain"]].operators[0].name, now)
    return found


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("apart", [False, True], ids=["fused with the source", "apart"])
def test_a_burst_inside_a_flow_is_answered_where_it_is(workers: int, apart: bool) -> None:
    """A flat_map suddenly makes twenty records of one, behind a quiet source, and its followers are too slow."""
    begins_s = BURST.start / RATE
    found = burst_at(Job(lambda takes: burst_inside(takes, apart), workers), begins_s + 4)
    assert list(found) == ["slow"]
    assert begins_s < found["slow"] < begins_s + 1.5


def slow_for_a_while(takes: Callable[[int], None], from_s: float, until_s: float, now: Callable[[], int]) -> ps.Flow:
    """An operator that takes 20 times as long from a time until another, between two others that are quick."""

    def slow(record: Any) -> Any:
        takes(5_000_000 if from_s <= now() / S < until_s else 250_000)
        return record

    flow = ps.Flow("slow_for_a_while", parallelism=1)
    numbers = flow.read(ps.sources.Generator(lambda i: f"{i:0100}", rate=RATE), name="numbers").map(str, name="text")
    numbers.rebalance().map(slow, name="slow").rebalance().map(str, name="after").write(ps.sinks.Null())
    return flow


def test_an_operator_that_becomes_slow_is_answered_where_it_is() -> None:
    """Its senders stand still, and what they would send waits at the source."""
    job: Job
    job = Job(lambda takes: slow_for_a_while(takes, 1, 21, lambda: job.now), 2)
    found = burst_at(job, 5)
    assert list(found) == ["slow", "after"], "what follows goes along"
    assert 1 < found["slow"] < 2.5


def test_a_range_whose_queue_others_hold_up_says_so() -> None:
    """Spark for the range before them would only make more of what they cannot take."""
    job = Job(lambda takes: burst_inside(takes, apart=True), 1)
    scheduler = ParadigmScheduler(job.plan, DualOptions(BurstOptions(), SparkOptions()), 60.0)
    held_up = []
    for _ in job.looks(3.5):
        now = job.now / S
        scheduler.looked(now, now, {0: job.loops[0].load()})
        (one,) = (one for one in scheduler.status()["ranges"] if "several" in one["operators"])
        assert one["state"] == "RECORD"
        if one["figures"]["queue"] > 300:
            held_up.append(one["figures"]["held_up"] / one["figures"]["queue"])
    assert held_up
    assert held_up[-1] == 1.0
