"""When a running job is planned anew, and when its tasks move."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.placement import replanning
from penstock.placement.adoption import AdoptionOptions
from penstock.placement.monitor import RECORD_BYTES
from penstock.placement.placement import Placement, workers_of
from penstock.placement.replanning import Look, Measured, Replanner
from penstock.placement.traffic import Node, TrafficGraph
from tests.placement.settling import migrations

NODES = (Node("a", 2), Node("b", 2))
CROSSED = Placement(NODES, workers_of(NODES), (0, 1, 2, 3, 0, 1, 2, 3))
#: Which tasks talk to which: across at first, and then as the tasks lie in CROSSED.
ACROSS = ((0, 3), (1, 2), (4, 7), (5, 6))
STRAIGHT = ((0, 4), (1, 5), (2, 6), (3, 7))
PERIOD_S = 10.0


def in_tens(tasks: int, records: Sequence[tuple[int, int, float]]) -> TrafficGraph:
    """The messages of so many records a second, with ten in each."""
    return TrafficGraph.of(tasks, [(a, b, rate / 10) for a, b, rate in records])


def measured(pairs: Sequence[tuple[int, int]], rate: float, cores: float = 0.1) -> Measured:
    records = [(a, b, rate) for a, b in pairs]
    size = 100.0 + RECORD_BYTES
    graph = TrafficGraph.of(8, [(a, b, size * rate) for a, b, rate in records], cpu=[cores] * 8)
    return Measured(graph, TrafficGraph.of(8, records), in_tens(8, records))


def look(now: Measured, running: Placement = CROSSED) -> Look:
    return Look(running, now, now)


class Job:
    """A job that is looked at once in each period, and moves its tasks as it is told."""

    def __init__(self) -> None:
        self.replanner = Replanner(AdoptionOptions())
        self.running = CROSSED
        self.now_s = 0.0
        self.told: list[str] = []

    def seen(self, now: Measured) -> Look:
        return look(now, self.running)

    def goes_on(self, *periods: Measured) -> list[int]:
        """Returns the periods in which tasks moved, from 0."""
        moved = []
        for period, now in enumerate(periods):
            self.now_s += PERIOD_S
            new, verdict = self.replanner.look(self.now_s, self.seen(now))
            self.told.append(verdict.reason)
            assert verdict.adopt == (new is not None)
            if new is not None:
                self.running = new
                self.replanner.moved(self.now_s)
                moved.append(period)
        return moved


def test_tasks_move_in_the_second_period_that_says_so() -> None:
    job = Job()
    assert job.goes_on(*[measured(ACROSS, 20_000)] * 8) == [1]
    one_period = "the load and the traffic were measured for one period; tasks can move when two periods in a row agree"
    assert job.told[0] == one_period
    assert job.told[2] == one_period, "tasks load their workers otherwise now"


def test_a_busy_job_gets_a_plan_that_fills_no_worker_too_much() -> None:
    """Least would cross if two workers had seven of the tasks, each of which takes 0.085 cores: too much for one. With
    six of them each, less crosses than now, too."""
    groups = (range(7), range(7, 14), range(14, 19), range(19, 24))
    sent = [(a, b, 20_000.0) for group in groups for a in group for b in group if a < b]
    graph = TrafficGraph.of(24, [(a, b, 200 * rate) for a, b, rate in sent], cpu=[0.085] * 24)
    now = Measured(graph, TrafficGraph.of(24, sent), in_tens(24, sent))
    running = Placement(NODES, workers_of(NODES), tuple(task % 4 for task in range(24)))
    replanner = Replanner(AdoptionOptions())
    assert replanner.look(PERIOD_S, look(now, running))[0] is None
    new, verdict = replanner.look(2 * PERIOD_S, look(now, running))
    assert new is not None, verdict
    assert np.bincount(new.worker_of).tolist() == [6, 6, 6, 6]
    assert new.between_workers(graph) < 0.7 * running.between_workers(graph)


def test_what_sends_more_messages_is_nearer() -> None:
    """Task 0 sends as many bytes to 1 as to 2, but to 2 in a hundred times as many messages. There is room for two
    tasks in each worker."""
    records = [(0, 1, 20_000.0), (0, 2, 20_000.0), (1, 3, 100.0)]
    graph = TrafficGraph.of(4, [(a, b, 200 * rate) for a, b, rate in records], cpu=[0.2] * 4)
    messages = TrafficGraph.of(4, [(0, 1, 200.0), (0, 2, 20_000.0), (1, 3, 1.0)])
    running = Placement(NODES[:1], workers_of(NODES[:1]), (0, 0, 1, 1))
    now = Measured(graph, TrafficGraph.of(4, records), messages)
    replanner = Replanner(AdoptionOptions())
    looks = [replanner.look(PERIOD_S * period, look(now, running)) for period in (1, 2)]
    new, verdict = looks[1]
    assert new is not None, verdict
    assert new.worker_of[0] == new.worker_of[2] != new.worker_of[1]
    without = Replanner(AdoptionOptions())
    free = [without.look(PERIOD_S * at, replace(look(now, running), message_bytes=0.0)) for at in (1, 2)]
    assert free[1][0] is None, "their bytes alone say nothing"


def test_other_sizes_of_messages_are_no_change_of_a_job() -> None:
    """How many records come in a message depends on where tasks run, and on how busy their workers are."""
    job = Job()
    assert job.goes_on(*[measured(ACROSS, 20_000)] * 6) == [1]
    single = replace(measured(ACROSS, 20_000), messages=measured(ACROSS, 20_000).records)
    assert job.goes_on(*[single] * 6) == []
    assert "what is measured has just changed" not in job.told[6:]


@pytest.mark.parametrize(("cost", "moves"), [(6.0, []), (1.0, [1])])
def test_a_hop_that_costs_a_little_more_is_no_change_of_a_job(cost: float, moves: list[int]) -> None:
    """It is measured anew in each period, and differs by chance. A hop that costs a quarter is another matter."""
    job = Job()
    assert job.goes_on(*[measured(ACROSS, 20_000)] * 6) == [1]
    move = job.replanner._moved_for
    assert move is not None
    assert move.node_cost == 4.0
    other = replace(look(measured(ACROSS, 20_000), CROSSED), node_cost=cost)
    told = job.replanner._has_moved_for(replace(other, running=job.running), move.measured.graph)
    assert told is not bool(moves)
    assert move.cost == 0


@pytest.mark.parametrize(
    ("pairs", "rate", "cores", "said"),
    [
        (ACROSS, 20_000, 0.3, "the load of all tasks changed from 0.80 to 2.40 cores"),
        (STRAIGHT, 20_000, 0.1, "the traffic changed by "),
        (ACROSS, 40_000, 0.1, "the traffic changed by "),
    ],
)
def test_the_verdict_says_what_has_changed(pairs: Any, rate: float, cores: float, said: str) -> None:
    job = Job()
    job.goes_on(*[measured(ACROSS, 20_000)] * 6)
    job.goes_on(measured(pairs, rate, cores))
    assert job.told[-1].startswith(said)
    assert job.told[-1].endswith("tasks can move when two periods in a row agree")


class Aged(Job):
    """A job whose records are so many ms old at the end of the flow before its tasks have moved, and after it."""

    def __init__(self, before: Sequence[float | None], after: Sequence[float]) -> None:
        super().__init__()
        self.ages = {True: itertools.cycle(before), False: itertools.cycle(after)}

    def seen(self, now: Measured) -> Look:
        age_ms = next(self.ages[self.running == CROSSED])
        return replace(super().seen(now), latency_s=None if age_ms is None else age_ms / 1000)


STEADY = measured(ACROSS, 20_000)


def test_tasks_move_back_when_records_are_older_than_before_and_stay_there() -> None:
    job = Aged([0.11], [0.21])
    assert job.goes_on(*[STEADY] * 30) == [1, 5], job.told
    assert job.running == CROSSED
    assert job.told[5] == "records take 0.21 ms in the median, for 0.11 ms before tasks moved, so tasks move back"
    assert job.told[-1] == "tasks have gone back for this load and this traffic"
    # Another load is another question.
    assert job.goes_on(*[measured(ACROSS, 40_000)] * 30) == [1, 5], job.told


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([0.21], [0.11]),
        ([0.20], [0.21]),  # less than what chance does
        ([0.11], [0.31, 0.31, 0.10]),  # in two periods of three
        ([0.10, 0.22], [0.21]),  # in a period before as well
    ],
)
def test_tasks_stay_when_records_are_not_older_in_each_period(before: list[float], after: list[float]) -> None:
    job = Aged(before, after)
    assert job.goes_on(*[STEADY] * 30) == [1], job.told
    told = re.fullmatch(
        r"tasks have moved for this load and this traffic; records take 0\.\d+ ms in the median, for 0\.\d+ ms before",
        job.told[-1],
    )
    assert told, job.told[-1]


def test_what_other_traffic_makes_of_records_says_nothing_of_a_move() -> None:
    """Records are older after the move because there is twice as much of them."""
    job = Aged([0.11], [0.21])
    assert job.goes_on(STEADY, STEADY, *[measured(ACROSS, 40_000)] * 20) == [1], job.told
    assert job.running != CROSSED


def test_tasks_move_back_when_the_load_is_less_than_when_the_job_had_just_started() -> None:
    job = Aged([0.11], [0.21])
    assert job.goes_on(measured(ACROSS, 20_000, 0.16), measured(ACROSS, 20_000, 0.16), *[STEADY] * 20) == [1, 5], (
        job.told
    )
    assert job.running == CROSSED


def test_what_more_load_makes_of_records_says_nothing_of_a_move() -> None:
    job = Aged([0.11], [0.21])
    assert job.goes_on(STEADY, STEADY, *[measured(ACROSS, 20_000, 0.16)] * 20) == [1], job.told


@pytest.mark.parametrize("job", [Job(), Aged([None], [0.21])])
def test_a_move_without_records_at_the_end_is_not_judged(job: Job) -> None:
    assert job.goes_on(*[STEADY] * 20) == [1]
    assert job.told[-1] == "tasks have moved for this load and this traffic"


def test_tasks_do_not_move_back_to_workers_on_other_nodes() -> None:
    """A node was lost after the move, and its workers have got room elsewhere."""
    job = Aged([0.11], [0.21])
    assert job.goes_on(STEADY, STEADY) == [1]
    elsewhere = (Node("a", 2), Node("c", 2))
    job.running = Placement(elsewhere, workers_of(elsewhere), job.running.tasks)
    assert job.goes_on(*[STEADY] * 20) == [], job.told


def test_a_period_of_a_change_moves_nothing() -> None:
    """Half of the period belongs to the time before, so a plan for it fits neither. Each change is answered once."""
    job = Job()
    job.goes_on(*[measured(ACROSS, 20_000)] * 6)
    half = measured((*ACROSS, *STRAIGHT), 10_000)
    assert job.goes_on(half, *[measured(STRAIGHT, 20_000)] * 6) == [2]


def test_traffic_that_never_rests_moves_tasks_by_what_is_smoothed() -> None:
    """Every second period is ten times as strong. What is smoothed says twice that tasks should move."""
    job = Job()
    smooth = measured(ACROSS, 11_000)
    moved = []
    for period in range(16):
        now = replace(look(measured(ACROSS, 2_000 if period % 2 else 20_000), job.running), smooth=smooth)
        new, verdict = job.replanner.look(PERIOD_S * period, now)
        if new is not None:
            moved.append(period)
            job.running = new
            job.replanner.moved(PERIOD_S * period)
        job.told.append(verdict.reason)
    assert moved == [7], job.told
    assert job.told[6].endswith("; tasks move if the next plan says so too")


def test_nothing_is_planned_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []

    def plan(*arguments: object, **more: object) -> Placement:
        planned.append(arguments)
        return CROSSED

    monkeypatch.setattr(replanning, "plan", plan)
    job = Job()
    assert job.goes_on(*[measured(ACROSS, 20_000)] * 6) == []
    assert len(planned) == 1
    job.goes_on(*[measured(ACROSS, 40_000)] * 4)
    assert len(planned) == 2, "the traffic has changed"


def test_a_job_in_which_hardly_anything_crosses_is_never_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replanning, "plan", None)
    job = Job()
    assert job.goes_on(*[measured(ACROSS, 1.0)] * 4) == []
    assert "so little crosses that no plan could save" in job.told[-1]


def test_a_worker_that_becomes_too_full_gives_tasks_away_although_they_have_moved() -> None:
    job = Job()
    assert job.goes_on(*[measured(ACROSS, 20_000)] * 3) == [1]
    heavy = measured(ACROSS, 20_000).graph.cpu * 0
    heavy[:] = 0.1
    here = [task for task in range(8) if job.running.tasks[task] == job.running.tasks[0]]
    assert len(here) == 2
    heavy[here] = 0.7
    full = measured(ACROSS, 20_000)
    full = replace(full, graph=replace(full.graph, cpu=heavy))
    assert job.goes_on(*[full] * 3) == [1]


def test_a_job_moves_once_for_each_change() -> None:
    """This job moved tasks twice when each plan was adopted that was worth it: measurements that are off allow plans
    that others forbid."""
    assert [phase.moves for phase in migrations(4, 8)] == [1, 1, 1]


@pytest.mark.parametrize("seed", range(10))
def test_a_job_moves_tasks_back_exactly_where_records_are_older(seed: int) -> None:
    phases = migrations(seed, 8)
    assert all(phase.settled for phase in phases), phases
