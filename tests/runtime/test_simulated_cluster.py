"""Random flows on random workers in random order: nothing stuck, lost, doubled or out of order, and memory bounded."""

from __future__ import annotations

import os
import random

import pytest

from penstock.runtime.program.flow import Flow
from penstock.runtime.sinks.collect import Collect
from tests.program.random_flows import random_flow
from tests.runtime.sim import Cluster, Trickle, small_steps

SEEDS = int(os.environ.get("PENSTOCK_SIM_SEEDS", "150"))
CHUNKS = 6


def place(tasks: int, rng: random.Random) -> dict[int, int]:
    """Task -> worker: at random, in turn (A-B-A-B), in two halves, or all on one; workers numbered without gaps."""
    workers = rng.randrange(1, 5)
    how = rng.choice(("random", "in turn", "halves"))
    if how == "in turn":
        chosen = [task % workers for task in range(tasks)]
    elif how == "halves":
        chosen = [2 * task // tasks for task in range(tasks)]
    else:
        chosen = [rng.randrange(workers) for _ in range(tasks)]
    number = {worker: i for i, worker in enumerate(sorted(set(chosen)))}
    return {task: number[worker] for task, worker in enumerate(chosen)}


def run_seed(seed: int) -> None:
    rng = random.Random(-seed)
    made = random_flow(seed)
    with small_steps(seed):
        cluster = Cluster(
            made.flow,
            place(len(made.flow.plan().tasks), rng),
            seed=seed,
            capacity=rng.choice((4096, 4096, 20_000, 1 << 20)),
            window=rng.choice((1, 100, 1000, 100_000)),
        )
        try:
            made.check(cluster.run())
        except Exception as error:
            raise AssertionError(f"seed {seed}\n{made.flow.explain()}\n{cluster.dump()}\n{error}") from error


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_flows_deliver_everything_once_and_never_stick(chunk: int) -> None:
    for seed in range(chunk, SEEDS, CHUNKS):
        run_seed(seed)


@pytest.mark.parametrize("window", [1, 100, 10_000])
def test_order_is_kept_through_workers_in_alternation(window: int) -> None:
    """Stages on A, B, A, B: the tasks of a worker wait for each other through the other worker."""
    flow = Flow("alternating", chaining=False)
    stream = flow.read(Trickle([list(range(500))], 1), parallelism=1)
    for _ in range(6):
        stream = stream.map(int, parallelism=1)
    sink = Collect()
    stream.write(sink, parallelism=1)
    with small_steps(3):
        cluster = Cluster(flow, {i: i % 2 for i in range(8)}, seed=3, capacity=1024, window=window)
        assert cluster.run()[sink.channel] == list(range(500))


def test_a_slow_branch_does_not_stop_what_does_not_depend_on_it() -> None:
    """Two flows' worth of tasks share two workers; one sink's task is never stepped until the other is done."""
    flow = Flow("two-lanes", chaining=False)
    slow, quick = Collect(), Collect()
    flow.read(Trickle([list(range(300))], 1), name="a", parallelism=1).map(int, parallelism=1).write(
        slow, name="slow", parallelism=1
    )
    flow.read(Trickle([list(range(300))], 1), name="b", parallelism=1).map(int, parallelism=1).write(
        quick, name="quick", parallelism=1
    )
    with small_steps(5):
        plan = flow.plan(2)
        cluster = Cluster(flow, {t.number: t.number % 2 for t in plan.tasks}, seed=5, capacity=2048, window=50)
        held = next(task for task in cluster.tasks if task.name.startswith("slow"))
        runnable = held.runnable
        held.runnable = lambda: len(cluster.outputs[quick.channel]) == 300 and runnable()  # type: ignore[method-assign]
        outputs = cluster.run()
    assert outputs[quick.channel] == outputs[slow.channel] == list(range(300))


def test_a_record_that_becomes_many_does_not_pile_up() -> None:
    flow = Flow("flood", chaining=False)
    sink = Collect()
    flow.read(Trickle([[20_000]], 1), parallelism=1).flat_map(range, parallelism=1).map(int, parallelism=1).write(
        sink, parallelism=1
    )
    with small_steps(9):
        cluster = Cluster(flow, {0: 0, 1: 1, 2: 0, 3: 1}, seed=9, capacity=4096, window=200)
        assert cluster.run()[sink.channel] == list(range(20_000))


def test_the_same_seed_gives_the_same_run() -> None:
    def steps() -> tuple[int, dict[str, list[object]]]:
        made = random_flow(12)
        with small_steps(12):
            cluster = Cluster(
                made.flow, {t.number: t.number % 2 for t in made.flow.plan().tasks}, seed=12, capacity=4096, window=100
            )
            outputs = cluster.run()
        return cluster.steps, dict(enumerate(outputs.values()))  # type: ignore[arg-type]

    assert steps() == steps()
