"""How large steps and calls become, against made-up costs: a fixed part, a part a record, noise, and change."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from penstock.runtime.operators.step_size import LIMIT_MAX, STEP_NS, StepSize

MS = 1_000_000

Cost = Callable[[int], float]


class World:
    """Steps of a task that never lacks input, or has only so much ready at a time."""

    def __init__(self, most: int | None = None, noise: float = 0.2, seed: int = 1) -> None:
        self.size = StepSize(most)
        self.noise = noise
        self.rng = random.Random(seed)

    def run(self, cost: Cost, steps: int, ready: int = 1 << 60) -> list[tuple[int, float]]:
        """(records, ns) of each step."""
        done = []
        for _ in range(steps):
            records = min(self.size.limit, ready)
            elapsed = int(cost(records) * (1 + self.noise * self.rng.random()))
            self.size.measure(records, elapsed, records >= self.size.limit)
            done.append((records, elapsed))
        return done


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fixed_ms", [5, 20, 500])
def test_a_fixed_cost_does_not_make_steps_small(fixed_ms: int, seed: int) -> None:
    world = World(256, seed=seed)
    world.run(lambda n: fixed_ms * MS, 10)
    assert {records for records, _ in world.run(lambda n: fixed_ms * MS, 2000)} == {256}


@pytest.mark.parametrize("seed", range(5))
def test_records_that_cost_much_make_steps_small(seed: int) -> None:
    world = World(seed=seed)
    world.run(lambda n: n * MS, 3)
    steps = world.run(lambda n: n * MS, 2000)
    assert max(ns for _, ns in steps) <= 2.5 * STEP_NS
    slow = World(seed=seed)
    slow.run(lambda n: 20 * n * MS, 3)
    steps = slow.run(lambda n: 20 * n * MS, 2000)
    assert sorted(n for n, _ in steps)[1900] == 1, "larger steps are tried once in a while only"


def test_cheap_records_make_large_steps() -> None:
    world = World()
    world.run(lambda n: 10_000 + 1000 * n, 20)
    assert world.size.limit >= 2048
    world.run(lambda n: 10_000 + 10 * n, 20)
    assert world.size.limit == LIMIT_MAX


@pytest.mark.parametrize("seed", range(5))
def test_of_a_fixed_cost_and_records_that_cost_much_the_records_are_a_few_times_the_fixed_cost(seed: int) -> None:
    world = World(seed=seed)
    world.run(lambda n: 20 * MS + n * MS, 20)
    steps = world.run(lambda n: 20 * MS + n * MS, 500)
    records = sum(n for n, _ in steps)
    seconds = sum(ns for _, ns in steps) / 1e9
    assert records / seconds >= 500, "half of what is possible, with the noise"
    assert max(ns for _, ns in steps) <= 300 * MS


@pytest.mark.parametrize("each_ms", [0, 20])
def test_a_step_that_never_had_more_than_one_record_finds_out_when_more_come(each_ms: int) -> None:
    """What was measured at a low rate says nothing of larger steps."""

    def cost(n: int) -> float:
        return 20 * MS if not each_ms else n * each_ms * MS

    world = World(256)
    world.run(cost, 1000, ready=1)
    steps = world.run(cost, 300)
    if each_ms:
        assert sorted(n for n, _ in steps)[280] == 1
    else:
        assert [n for n, _ in steps[10:]] == [256] * 290


@pytest.mark.parametrize("seed", range(5))
def test_a_change_is_noticed(seed: int) -> None:
    world = World(seed=seed)
    world.run(lambda n: 20 * MS, 100)
    assert world.size.limit == LIMIT_MAX
    world.run(lambda n: n * MS, 300, ready=1000)
    assert max(ns for _, ns in world.run(lambda n: n * MS, 100)) <= 3 * STEP_NS
    world.run(lambda n: 20 * MS, 300)
    assert world.size.limit >= 256
    world.run(lambda n: 1000 * n, 300)
    assert world.size.limit >= 1024


def test_a_machine_that_stops_for_a_while_changes_little() -> None:
    world = World(256)
    rng = random.Random(3)

    def cost(n: int) -> float:
        return 20 * MS + (200 * MS if rng.random() < 0.02 else 0)

    world.run(cost, 20)
    steps = world.run(cost, 2000)
    assert sum(n == 256 for n, _ in steps) >= 1980


def test_a_step_that_took_no_time_is_no_error() -> None:
    world = World()
    world.run(lambda n: 0, 30)
    assert world.size.limit == LIMIT_MAX
