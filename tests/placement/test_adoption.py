"""A plan is adopted for its latency too, and a job never moves to and fro while its load stays the same."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.placement.adoption import AdoptionOptions, Verdict, cost, decide, waiting
from penstock.placement.baselines import round_robin
from penstock.placement.hop_latencies import HopLatencies
from penstock.placement.monitor import RECORD_BYTES
from penstock.placement.placement import Placement, workers_of
from penstock.placement.planner import plan
from penstock.placement.replanning import Look, Measured, Replanner
from penstock.placement.traffic import Node, TrafficGraph
from tests.placement import random_topologies
from tests.placement.exact import edges_of
from tests.placement.papers_topologies import machines, topology

OPTIONS = AdoptionOptions()
NODES = (Node("a", 2), Node("b", 2))
NOISE = 0.1


def measured(records: TrafficGraph, record_bytes: float, cpu: list[float] | None = None) -> TrafficGraph:
    """The graph that plans are made with, for tasks that exchange so many records a second of this size."""
    edges = [(a, b, rate * (record_bytes + RECORD_BYTES)) for a, b, rate in edges_of(records)]
    return TrafficGraph.of(len(records), edges, cpu=[0.05] * len(records) if cpu is None else cpu)


def sol(rate: float) -> TrafficGraph:
    """SOL on eight workers, in records a second. Off-line, its source puts out one unit a second."""
    shape = topology("SOL", 8).graph
    return TrafficGraph.of(len(shape), [(a, b, rate * part) for a, b, part in edges_of(shape)])


def placed_in_turn(graph: TrafficGraph) -> Placement:
    """SOL on two nodes of four workers, which runs in turn."""
    nodes = machines(2, 8)
    turns = round_robin(replace(topology("SOL", 8), graph=graph), nodes)
    order = sorted(range(len(turns.workers)), key=lambda worker: turns.workers[worker])
    return Placement(tuple(nodes), workers_of(nodes), tuple(order.index(worker) for worker in turns.tasks))


def judged(rate: float, options: AdoptionOptions = OPTIONS, *, latency: bool = True) -> Verdict:
    """The verdict on the plan for SOL on two nodes of four workers, which runs in turn."""
    records = sol(rate)
    graph = measured(records, 100.0)
    running = placed_in_turn(graph)
    new = plan(graph, running.nodes, factor=options.factor, running=running)
    return decide(running, new, graph, options, records=records if latency else None)


def test_sol_at_5000_a_second_moves() -> None:
    """It saves next to no processor time, but each record waits for less."""
    verdict = judged(5_000)
    assert verdict.adopt, verdict.reason
    assert "records wait" in verdict.reason
    assert not judged(5_000, latency=False).adopt


def test_sol_at_5000_a_second_moves_within_three_periods() -> None:
    """On default settings. What is measured differs from period to period by as much as it did in a real job on a busy
    machine: a task's traffic by 5 %, and its processor time by a quarter."""
    chance = random.Random(5)
    replanner = Replanner(OPTIONS)
    running = placed_in_turn(measured(sol(5_000), 100.0))
    told = []
    for period in range(1, 4):
        edges = [(a, b, rate * chance.uniform(0.95, 1.05)) for a, b, rate in edges_of(sol(5_000))]
        seen = TrafficGraph.of(len(running.tasks), edges)
        cpu = [chance.uniform(0.02, 0.03) for _ in running.tasks]
        now = Measured(measured(seen, 100.0, cpu), seen, TrafficGraph.of(len(seen), []))
        new, verdict = replanner.look(10.0 * period, Look(running, now, now))
        told.append(verdict.reason)
        if new is not None:
            assert cost(new, now.graph, 4.0) < 0.6 * cost(running, now.graph, 4.0)
            return
    pytest.fail(f"tasks have not moved: {told}")


def test_what_a_pause_delays_counts_against_a_move() -> None:
    """Both the waiting that is saved and the waiting for the pause grow with the rate, but not with the pause."""
    assert not judged(5_000, replace(OPTIONS, pause_s=1.0)).adopt
    assert not judged(5_000, replace(OPTIONS, node_hop_s=0.0, network_hop_s=0.0)).adopt


def test_a_few_records_move_nothing() -> None:
    """At such rates chance decides how many records a period has, and no margin holds against this."""
    assert not judged(10).adopt
    assert judged(200).adopt


def test_a_hop_waits_by_its_kind() -> None:
    records = TrafficGraph.of(2, [(0, 1, 1_000.0)])
    found = [waiting(Placement(NODES, workers_of(NODES), (0, to)), records, OPTIONS) for to in (0, 1, 2)]
    assert found == pytest.approx([0, 1_000 * OPTIONS.node_hop_s, 1_000 * OPTIONS.network_hop_s])


def test_a_hop_waits_as_long_as_was_measured() -> None:
    """What is not known of a kind is as the options say."""
    records = TrafficGraph.of(2, [(0, 1, 1_000.0)])
    at = [Placement(NODES, workers_of(NODES), (0, to)) for to in (0, 1, 2)]
    found = [waiting(placed, records, OPTIONS, HopLatencies(1e-6, 4e-4, 6e-4)) for placed in at]
    assert found == pytest.approx([1e-3, 0.4, 0.6])
    found = [waiting(placed, records, OPTIONS, HopLatencies(node=4e-4)) for placed in at]
    assert found == pytest.approx([0, 0.4, 1_000 * OPTIONS.network_hop_s])


def test_slow_hops_make_a_move_pay() -> None:
    """10 records a second do not wait long enough for a move by what is assumed, and do by what was measured."""
    records = TrafficGraph.of(2, [(0, 1, 10.0)])
    graph = measured(records, 100.0)
    apart, together = (Placement(NODES, workers_of(NODES), tasks) for tasks in ((0, 1), (0, 0)))
    assert not decide(apart, together, graph, OPTIONS, records=records).adopt
    assert decide(apart, together, graph, OPTIONS, records=records, measured=HopLatencies(1e-6, 4e-4)).adopt
    assert not decide(apart, together, graph, OPTIONS, records=records, measured=HopLatencies(4e-4, 4e-4)).adopt


def test_slow_hops_do_not_move_a_few_records() -> None:
    """However long they wait, chance decides how many records each two tasks exchange in a period."""
    records = sol(10)
    graph = measured(records, 100.0)
    running = placed_in_turn(graph)
    new = plan(graph, running.nodes, factor=OPTIONS.factor, running=running)
    slow = HopLatencies(1e-6, 0.01, 0.01)
    verdict = decide(running, new, graph, OPTIONS, records=records, measured=slow)
    assert not verdict.adopt, verdict.reason
    assert decide(running, new, graph, OPTIONS, records=sol(200), measured=slow).adopt


def noisy(chance: random.Random, records: TrafficGraph) -> TrafficGraph:
    """Every two tasks exchange up to a tenth more or less."""
    edges = [(a, b, rate * chance.uniform(1 - NOISE, 1 + NOISE)) for a, b, rate in edges_of(records)]
    return TrafficGraph.of(len(records), edges)


@st.composite
def loads(draw: st.DrawFn) -> tuple[random.Random, TrafficGraph, list[float]]:
    """The records a second of a random job, and the cores that its tasks use."""
    chance = random.Random(draw(st.integers(0, 2**32)))
    shape = random_topologies.topology(chance, draw(st.integers(4, 14)))
    rate = 10 ** draw(st.floats(2, 6))
    cores = draw(st.sampled_from([0.01, 0.1, 0.3]))
    records = TrafficGraph.of(len(shape), [(a, b, rate * traffic) for a, b, traffic in edges_of(shape)])
    return chance, records, [cores * weight for weight in shape.cpu.tolist()]


@given(loads(), st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([0.2, 1.0]))
def test_of_two_placements_one_at_most_is_adopted_over_the_other(
    load: tuple[random.Random, TrafficGraph, list[float]], pause_s: float, differ: float
) -> None:
    """Whatever is measured in between, as long as it is off by a tenth at most."""
    chance, records, cpu = load
    options = replace(OPTIONS, pause_s=pause_s)
    one = chance.choices(range(4), k=len(cpu))
    # Placements that differ in few tasks cost about the same.
    other = [chance.randrange(4) if chance.random() < differ else worker for worker in one]
    at = [Placement(NODES, workers_of(NODES), tuple(tasks)) for tasks in (one, other)]
    found: set[int] = set()
    for _ in range(10):
        seen = noisy(chance, records)
        for new in (0, 1):
            if decide(at[1 - new], at[new], measured(seen, 100.0, cpu), options, records=seen).adopt:
                found.add(new)
    assert len(found) <= 1


def test_what_noise_alone_can_save_is_not_enough() -> None:
    """Task 0 sends as much to 1 as to 2, and one of the two is measured a tenth too low and the other too high."""
    graph = TrafficGraph.of(3, [(0, 1, 0.9e9), (0, 2, 1.1e9)], cpu=[0.01] * 3)
    with_one, with_two = (Placement(NODES, workers_of(NODES), tasks) for tasks in ((0, 0, 1), (1, 0, 1)))
    assert not decide(with_one, with_two, graph, replace(OPTIONS, pause_s=0.0)).adopt


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("seed", [1, 3, 6])
def test_plans_settle(seed: int, noise: bool) -> None:
    """No placement comes back, and after the first periods nothing moves any more."""
    chance = random.Random(seed)
    shape = random_topologies.topology(chance, 8)
    records = TrafficGraph.of(8, [(a, b, 20_000 * traffic) for a, b, traffic in edges_of(shape)])
    cpu = [0.1 * weight for weight in shape.cpu.tolist()]
    running = Placement(NODES, workers_of(NODES), tuple(task % 4 for task in range(8)))
    had = [running.tasks]
    moved_in: list[int] = []
    for period in range(6):
        seen = noisy(chance, records) if noise else records
        graph = measured(seen, 100.0, cpu)
        new = plan(graph, NODES, factor=OPTIONS.factor, running=running)
        if decide(running, new, graph, OPTIONS, records=seen).adopt:
            assert new.tasks not in had
            running = new
            had.append(running.tasks)
            moved_in.append(period)
    assert moved_in, "or the test says nothing"
    assert max(moved_in) < 4, moved_in
