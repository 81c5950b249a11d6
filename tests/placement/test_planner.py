"""Plans: within their limits, near the best there is, never worse than the paper's, tasks where people want them."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.placement import planner
from penstock.placement.balance import Infeasible, Limits, limits_of, pack
from penstock.placement.multilevel import papers, partition
from penstock.placement.placement import Placement, workers_of
from penstock.placement.planner import node_by_node, node_limits, plan
from penstock.placement.refinement import Partition
from penstock.placement.relabel import relabelled
from penstock.placement.traffic import Ints, Node, TrafficGraph
from tests.placement.exact import fits, least_cut, least_cut_by_force, least_hop_cost_by_force, limits
from tests.placement.random_topologies import topology
from tests.placement.small import graphs

NO_LIMIT = np.inf


@pytest.mark.parametrize("tasks", range(1, 7))
def test_every_small_graph_against_all_placements(tasks: int) -> None:
    """Of up to six tasks, on two nodes and on three; `make campaign-placement` tries up to eight."""
    for pairs in graphs(tasks):
        graph = TrafficGraph.of(tasks, [(u, v, 1.0) for u, v in pairs])
        for places in (2, 3) if tasks < 6 else (2,):
            bounds = limits(graph, places, 0.1)
            found = partition(graph, np.full(places, 1 / places), 0.1)
            assert fits(graph, found, bounds)
            assert graph.edge_cut(found) == least_cut_by_force(graph, bounds), (pairs, places)


def test_near_the_optimum_and_never_above_the_papers() -> None:
    """10 of the topologies of `make campaign-placement`, which takes 200 of up to 40 tasks."""
    ratios = []
    for seed in range(10):
        chance = random.Random(seed)
        places = chance.choice([2, 3, 4])
        graph = topology(chance, chance.randint(8, 20))
        bounds = limits(graph, places, 0.1)
        fair = np.full(places, 1 / places)
        found, paper = partition(graph, fair, 0.1), papers(graph, fair, 0.1)
        assert fits(graph, found, bounds)
        if fits(graph, paper, bounds):
            assert graph.edge_cut(found) <= graph.edge_cut(paper) + 1e-9
        best = least_cut(graph, bounds)
        assert best is not None
        assert graph.edge_cut(found) >= best - 1e-6
        ratios.append(graph.edge_cut(found) / best if best else 1.0)
    assert median(ratios) <= 1.05, ratios


GRAPHS = st.builds(lambda seed, tasks: topology(random.Random(seed), tasks), st.integers(0, 10_000), st.integers(1, 60))


@settings(max_examples=8, deadline=None)
@given(
    GRAPHS,
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0.5, 1.0, 1.0, 2.0])), min_size=1, max_size=4),
    st.floats(0.01, 0.5),
)
def test_all_nodes_keep_within_their_slots_and_their_share(
    graph: TrafficGraph, kinds: list[tuple[int, float]], factor: float
) -> None:
    """A node's share is that of its workers, each of which counts as its speed."""
    workers = [count for count, _ in kinds]
    nodes = [Node(f"n{i}", count, speed=speed) for i, (count, speed) in enumerate(kinds)]
    placed = plan(graph, nodes, factor=factor)
    fair = np.array([count * speed for count, speed in kinds])
    fair /= fair.sum()
    room = np.full(len(nodes), NO_LIMIT)
    assert fits(graph, placed.node_of, limits_of(graph, fair, factor, room, pack(graph, fair, room)))
    assert placed.workers == tuple(i for i, count in enumerate(workers) for _ in range(count))
    _, alone = node_by_node(graph, nodes, factor=factor, seed=0, tasks=len(graph), running=None)
    for node, count in enumerate(workers):
        part = graph.part(np.flatnonzero(placed.node_of == node))
        inside = placed.worker_of[placed.node_of == node] - placed.workers.index(node)
        if len(nodes) == 1 or sum(workers) == len(nodes):
            assert not len(part) or fits(part, inside, limits(part, count, factor))
    assert fits(graph, placed.worker_of, worker_limits(graph, len(placed.workers), factor, alone, speeds(nodes)))


def speeds(nodes: list[Node]) -> list[float]:
    return [node.speed for node in nodes for _ in range(node.workers)]


def worker_limits(
    graph: TrafficGraph, workers: int, factor: float, alone: Ints, speed: list[float] | None = None
) -> Limits:
    """What workers may take: their share of all by their speed, or what they have in the plan node by node."""
    fair = np.ones(workers) if speed is None else np.array(speed)
    fair /= fair.sum()
    room = np.full(workers, NO_LIMIT)
    bounds = limits_of(graph, fair, factor, room, pack(graph, fair, room))
    return Limits(np.maximum(bounds.cpu, graph.loads(alone, workers)), room)


@settings(max_examples=5, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 2), st.sampled_from([0.25, 0.5, 1.0, 2.0])), min_size=2, max_size=4),
    st.integers(0, 1_000),
)
def test_load_is_proportional_to_speed(kinds: list[tuple[int, float]], seed: int) -> None:
    """With many small tasks every node has its part of the work to within FACTOR, from above and so from below too."""
    nodes = [Node(f"n{i}", count, speed=speed) for i, (count, speed) in enumerate(kinds)]
    chance = random.Random(seed)
    edges = [(v, chance.randrange(v), chance.random()) for v in range(1, 240)]
    placed = plan(TrafficGraph.of(240, edges), nodes, factor=0.1)
    total = sum(count * speed for count, speed in kinds)
    loads = np.bincount(placed.node_of, minlength=len(nodes))
    for load, (count, speed) in zip(loads, kinds, strict=True):
        assert load <= 240 * count * speed / total * 1.1 + 1


def test_a_fast_node_gets_more_of_a_ring() -> None:
    """Golden: of eight equal tasks in a ring, six go to the node that is three times as fast, in one piece."""
    ring = TrafficGraph.of(8, [(v, (v + 1) % 8, 1.0) for v in range(8)])
    placed = plan(ring, [Node("slow", speed=0.5), Node("fast", speed=1.5)])
    assert np.bincount(placed.node_of).tolist() == [2, 6]
    assert placed.between_nodes(ring) == 2
    assert placed.imbalance(ring) == pytest.approx(0)


def test_workers_of_a_slow_node_get_less_each() -> None:
    """Golden: two workers of speed 1 and two of speed 2, with twelve tasks that exchange nothing."""
    placed = plan(TrafficGraph.of(12, []), [Node("slow", 2, speed=1.0), Node("fast", 2, speed=2.0)])
    assert np.bincount(placed.worker_of).tolist() == [2, 2, 4, 4]


def test_nodes_that_differ_in_speed_keep_their_names() -> None:
    """Otherwise few tasks would migrate, and the slow node would have the work of the fast one."""
    nodes = (Node("a", speed=1.0), Node("b", speed=2.0))
    running = Placement(nodes, (0, 1), (0, 0, 0, 0, 1, 1))
    new = Placement(nodes, (0, 1), (1, 1, 1, 1, 0, 0))
    assert relabelled(running, new).tasks == new.tasks
    alike = (Node("a"), Node("b"))
    assert relabelled(replace(running, nodes=alike), replace(new, nodes=alike)).tasks == running.tasks


def test_what_a_hop_between_nodes_costs_decides() -> None:
    """Three tasks send to task 4. It is alone if all hops cost the same, and near them if nodes are far apart."""
    edges = [(3, 0, 3.0), (3, 1, 2.0), (4, 0, 5.0), (4, 2, 5.0), (4, 3, 5.0)]
    graph, nodes = TrafficGraph.of(5, edges), [Node("a", 2), Node("b", 2)]
    near, far = (plan(graph, nodes, node_cost=cost) for cost in (1.0, 8.0))
    assert (near.between_workers(graph), far.between_workers(graph)) == (12, 15)
    assert far.between_nodes(graph) == 7


@settings(max_examples=6, deadline=None)
@given(GRAPHS, st.lists(st.integers(1, 2), min_size=2, max_size=3), st.floats(1.0, 8.0))
def test_plans_cost_no_more_than_one_that_does_not_know_the_costs(
    graph: TrafficGraph, workers: list[int], node_cost: float
) -> None:
    """It minimises the traffic between nodes first."""
    nodes = [Node(f"n{i}", count) for i, count in enumerate(workers)]
    node_of = np.array(workers_of(nodes))
    _, alone = node_by_node(graph, nodes, factor=0.1, seed=0, tasks=len(graph), running=None)
    found = plan(graph, nodes, node_cost=node_cost)
    costs = [graph.hop_cost(at, node_of[at], node_cost) for at in (found.worker_of, alone)]
    assert costs[0] <= costs[1] + 1e-9


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 100_000), st.floats(1.0, 8.0))
def test_a_running_placement_is_not_made_worse(seed: int, node_cost: float) -> None:
    """It was planned when hops cost something else."""
    graph, nodes = topology(random.Random(seed), 20), [Node("a", 2), Node("b", 2)]
    running = plan(graph, nodes, node_cost=1 + 8 / node_cost, seed=1)
    found = plan(graph, nodes, node_cost=node_cost, running=running)
    assert fits(graph, running.node_of, node_limits(graph, nodes, 0.1))
    _, alone = node_by_node(graph, nodes, factor=0.1, seed=0, tasks=20, running=running)
    if fits(graph, running.worker_of, worker_limits(graph, 4, 0.1, alone)):
        costs = [graph.hop_cost(placed.worker_of, placed.node_of, node_cost) for placed in (found, running)]
        assert costs[0] <= costs[1] + 1e-9


def test_a_search_that_ends_elsewhere_keeps_what_it_began_with() -> None:
    """The running plan is better here than what is found without it."""
    nodes = [Node("a", 2), Node("b", 2)]
    node_of = np.array(workers_of(nodes))
    graph = topology(random.Random(34), 44)

    def cost(placed: Placement) -> float:
        return graph.hop_cost(placed.worker_of, node_of[placed.worker_of], 2.0)

    running = min((plan(graph, nodes, node_cost=2.0, seed=seed) for seed in (1, 2)), key=cost)
    assert cost(plan(graph, nodes, node_cost=2.0, running=running)) <= cost(running) + 1e-9


def test_near_the_cheapest_of_all_placements_over_nodes() -> None:
    """Two nodes of two workers: at most a third above the least, and at the least in nine of ten cases."""
    nodes = [Node("a", 2), Node("b", 2)]
    node_of = np.array(workers_of(nodes))
    ratios = []
    for seed in range(10):
        chance = random.Random(seed)
        graph = topology(chance, chance.randint(3, 7), widest=3)
        node_cost = chance.choice([1.0, 1.5, 2.0, 4.0])
        _, alone = node_by_node(graph, nodes, factor=0.1, seed=0, tasks=len(graph), running=None)
        bounds = worker_limits(graph, 4, 0.1, alone), node_limits(graph, nodes, 0.1)
        best = least_hop_cost_by_force(graph, *bounds, node_of, node_cost)
        assert best is not None
        placed = plan(graph, nodes, node_cost=node_cost)
        found = graph.hop_cost(placed.worker_of, placed.node_of, node_cost)
        assert best - 1e-9 <= found
        ratios.append(found / best if best else 1 + found)
    assert max(ratios) < 4 / 3
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) >= 9


@pytest.mark.parametrize("workers", [(1,), (4,), (1, 1, 1)])
def test_where_all_hops_are_alike_nothing_more_is_searched(
    workers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "partition_over_nodes", None)
    graph, nodes = topology(random.Random(3), 30), [Node(f"n{i}", count) for i, count in enumerate(workers)]
    plans = [plan(graph, nodes, node_cost=cost) for cost in (1.0, 9.0)]
    assert plans[0] == plans[1]
    _, alone = node_by_node(graph, nodes, factor=planner.FACTOR, seed=0, tasks=30, running=None)
    assert plans[0].tasks == tuple(alone.tolist())


@settings(max_examples=60, deadline=None)
@given(GRAPHS, st.lists(st.integers(1, 3), min_size=2, max_size=4), st.integers(0, 2**32), st.floats(1.0, 8.0))
def test_refinement_over_nodes_keeps_its_books(
    graph: TrafficGraph, workers: list[int], seed: int, node_cost: float
) -> None:
    chance = np.random.default_rng(seed)
    count, node_of = sum(workers), np.repeat(np.arange(len(workers)), workers)
    graph = replace(graph, memory=chance.random(len(graph)))
    fair = graph.total_cpu / count * 1.2
    bounds = Limits(np.full(count, fair), np.full(count, NO_LIMIT))
    memory = graph.memory.sum() / len(workers) * 1.3
    nodes = Limits(np.array(workers) * fair * 0.9, np.full(len(workers), memory))
    refined = Partition(graph, bounds, chance.integers(0, count, len(graph)), node_of, nodes, node_cost)
    before = refined.overload, refined.cost
    for v in range(min(5, len(graph))):
        for place in range(count):
            moved = refined.places
            moved[v] = place
            gain = Partition(graph, bounds, moved, node_of, nodes, node_cost).cost
            if place != refined.places[v]:
                assert refined._gain(v, place)[0] == pytest.approx(refined.cost - gain)
    refined.improve()
    assert (refined.overload, refined.cost) <= (
        before[0] + 1e-9,
        before[1] + 1e-9 if before[0] == 0 else float("inf"),
    )
    after = Partition(graph, bounds, refined.places, node_of, nodes, node_cost)
    assert refined.overload == pytest.approx(after.overload)


def test_the_memory_of_a_node_is_for_all_its_workers() -> None:
    """Three tasks that talk to each other have room on two workers, but not in the memory of their node."""
    edges = [(0, 1, 9.0), (1, 2, 9.0), (0, 2, 9.0), (3, 4, 1.0)]
    graph = TrafficGraph.of(5, edges, memory=[4, 4, 4, 0, 0])
    nodes = [Node("a", 2, memory=8), Node("b", 2, memory=8)]
    placed = plan(graph, nodes, factor=0.5)
    assert max(np.bincount(placed.node_of, weights=graph.memory)) == 8


@settings(max_examples=60, deadline=None)
@given(GRAPHS, st.integers(2, 5), st.integers(0, 2**32), st.booleans())
def test_refinement_never_makes_it_worse(graph: TrafficGraph, places: int, seed: int, anywhere: bool) -> None:
    chance = np.random.default_rng(seed)
    if not anywhere:
        allowed = chance.random((len(graph), places)) < 0.6
        allowed[np.arange(len(graph)), chance.integers(0, places, len(graph))] = True
        graph = TrafficGraph(graph.starts, graph.neighbours, graph.traffic, graph.cpu, graph.memory, allowed)
    at = chance.integers(0, places, len(graph))
    if graph.allowed is not None:
        at = np.array([chance.choice(np.flatnonzero(row)) for row in graph.allowed])
    bounds = Limits(np.full(places, graph.total_cpu / places * 1.2), np.full(places, NO_LIMIT))
    refined = Partition(graph, bounds, at)
    before = (refined.overload, refined.cost)
    refined.improve()
    assert (refined.overload, refined.cost) <= (
        before[0] + 1e-9,
        before[1] + 1e-9 if before[0] == 0 else float("inf"),
    )
    after = Partition(graph, bounds, refined.places)
    assert refined.overload == pytest.approx(after.overload), "its own books are right"
    if graph.allowed is not None:
        assert graph.allowed[np.arange(len(graph)), refined.places].all()


def test_single_moves_would_stay_in_this_hollow() -> None:
    """Two triangles, each with one task of the other's place: no single move gains, the swap does."""
    pairs = [(0, 1), (0, 2), (1, 2), (3, 4), (3, 5), (4, 5)]
    graph = TrafficGraph.of(6, [(u, v, 1.0) for u, v in pairs])
    stuck = Partition(graph, Limits(np.array([3.0, 3.0]), np.array([NO_LIMIT] * 2)), np.array([0, 0, 1, 0, 1, 1]))
    stuck.improve()
    assert stuck.cost == 0


def test_swaps_where_there_is_no_room_at_all() -> None:
    graph = TrafficGraph.of(4, [(0, 3, 1.0), (1, 2, 1.0)])
    full = Partition(graph, Limits(np.array([2.0, 2.0]), np.array([NO_LIMIT] * 2)), np.array([0, 0, 1, 1]))
    full.improve()
    assert full.cost == 0
    assert full.overload == 0


def test_an_overfull_place_gives_first() -> None:
    graph = TrafficGraph.of(4, [(0, 1, 9.0), (1, 2, 9.0), (2, 3, 9.0)])
    full = Partition(graph, Limits(np.array([2.0, 2.0]), np.array([NO_LIMIT] * 2)), np.array([0, 0, 0, 0]))
    full.improve()
    assert full.overload == 0
    assert full.cost == 9


def test_memory_is_a_limit_too() -> None:
    """Three tasks that talk to each other would be on one node, if their memory were there."""
    edges = [(0, 1, 9.0), (1, 2, 9.0), (3, 4, 1.0)]
    graph = TrafficGraph.of(5, edges, cpu=[1, 1, 1, 1.5, 1.5], memory=[4, 4, 4, 0, 0])
    assert plan(graph, [Node("a"), Node("b")]).between_nodes(graph) == 0
    small = [Node("a", memory=8), Node("b", memory=8)]
    placed = plan(graph, small, factor=0.5)
    assert max(np.bincount(placed.node_of, weights=graph.memory)) == 8
    with pytest.raises(Infeasible, match="no node that task 2 may run on has 4 bytes of memory left"):
        plan(graph, [Node("a", memory=4), Node("b", memory=4)])


def test_tasks_run_where_they_are_pinned() -> None:
    allowed = np.ones((4, 2), dtype=np.bool_)
    allowed[0] = [False, True]
    graph = TrafficGraph.of(4, [(0, 1, 1.0), (2, 3, 1.0)], allowed=allowed)
    placed = plan(graph, [Node("a"), Node("b")])
    assert placed.node_of.tolist() == [1, 1, 0, 0]
    allowed[3] = False
    with pytest.raises(Infeasible, match="task 3 may run on none"):
        plan(TrafficGraph.of(4, [], allowed=allowed), [Node("a"), Node("b")])


def test_sources_run_near_their_data() -> None:
    """Two sources and their maps; the data of the first is on node b, of the second on node a."""
    graph = TrafficGraph.of(4, [(0, 2, 1.0), (1, 3, 1.0)]).with_anchors([(0, 1, 5.0), (1, 0, 5.0)], nodes=2)
    assert plan(graph, [Node("a"), Node("b")], tasks=4).node_of.tolist() == [1, 0, 1, 0]


def test_inside_a_node_tasks_that_talk_share_a_worker() -> None:
    """The paper deals them in turn: a hop between two workers costs a ring, and inside a worker nothing."""
    graph = TrafficGraph.of(4, [(0, 2, 1.0), (1, 3, 1.0)])
    assert plan(graph, [Node("a", workers=2)]).between_workers(graph) == 0


def test_the_same_graph_gives_the_same_plan() -> None:
    graph = topology(random.Random(7), 300, widest=12)
    nodes = [Node(f"n{i}", 2) for i in range(4)]
    assert plan(graph, nodes, seed=3) == plan(graph, nodes, seed=3)


def test_large_graphs_are_not_worse_than_the_papers_way() -> None:
    """1,000 tasks, more than the paper's algorithm is let begin with."""
    graph = topology(random.Random(1), 1_000, widest=20)
    fair = np.full(4, 0.25)
    found = partition(graph, fair, 0.1)
    assert fits(graph, found, limits(graph, 4, 0.1))
    assert graph.edge_cut(found) < graph.edge_cut(papers(graph, fair, 0.1))


@pytest.mark.parametrize("tasks", [0, 1, 2])
def test_fewer_tasks_than_workers(tasks: int) -> None:
    placed = plan(TrafficGraph.of(tasks, []), [Node("a", 2), Node("b", 2)])
    assert len(placed.tasks) == tasks
    assert len(set(placed.tasks)) == tasks


def test_what_rounding_errors_gain_is_no_gain() -> None:
    """Passes over pairs of places once ran for all rounds on swaps that gained nothing but the last bit of a sum."""
    chance = random.Random(1)
    edges = [(chance.randrange(v), v, chance.expovariate(1)) for v in range(1, 120) for _ in range(3)]
    graph = TrafficGraph.of(120, edges)
    found = Partition(graph, limits(graph, 8, 0.05), np.array([chance.randrange(8) for _ in range(120)]))
    gains = []
    for _ in range(6):
        for a in range(8):
            for b in range(a + 1, 8):
                before = found.overload, found.cost
                if found._improve_pair(a, b) and found.overload == before[0]:
                    gains.append(before[1] - found.cost)
    assert len(gains) > 20
    assert min(gains) > 1e-10 * graph.total_traffic


@pytest.mark.parametrize("seed", range(4))
def test_large_graphs_keep_within_all_limits(seed: int) -> None:
    """Above the size up to which the packed tasks are a beginning: unequal nodes, little memory, pinned tasks."""
    chance = np.random.default_rng(seed)
    tasks = 400
    edges = topology(random.Random(seed), tasks, widest=16)
    allowed = chance.random((tasks, 5)) < 0.7
    allowed[np.arange(tasks), chance.integers(0, 5, tasks)] = True
    graph = TrafficGraph(
        edges.starts,
        edges.neighbours,
        edges.traffic,
        chance.uniform(0.5, 2, tasks),
        chance.integers(1, 9, tasks).astype(np.float64),
        allowed,
    )
    fair = np.array([1, 1, 2, 3, 1]) / 8
    room = fair * graph.memory.sum() * (1.3, 1.05)[seed % 2]
    found = partition(graph, fair, 0.05, memory=room, seed=seed)
    bounds = limits_of(graph, fair, 0.05, room, pack(graph, fair, room))
    assert fits(graph, found, bounds)
    assert (np.bincount(found, weights=graph.memory, minlength=5) <= room).all()
    assert allowed[np.arange(tasks), found].all()
    assert graph.edge_cut(found) < 0.8 * graph.edge_cut(pack(graph, fair, room))


def test_the_papers_way_is_no_excuse_for_a_task_where_it_may_not_run() -> None:
    """Algorithm 2 knows nothing of pins, and was a beginning as it came."""
    for seed in range(10):
        chance = np.random.default_rng(seed)
        graph = topology(random.Random(seed), 20)
        allowed = chance.random((20, 3)) < 0.6
        allowed[np.arange(20), chance.integers(0, 3, 20)] = True
        graph = TrafficGraph(graph.starts, graph.neighbours, graph.traffic, graph.cpu, graph.memory, allowed)
        found = partition(graph, np.full(3, 1 / 3), 0.1)
        assert allowed[np.arange(20), found].all(), seed


def test_of_equal_plans_the_one_that_deals_every_operator_evenly_is_taken() -> None:
    """Two senders, two maps, two receivers, each with each: {0, 1, 2} and {3, 4, 5} would cut as little, with all
    senders on one node."""
    edges = [(a, b, 1.0) for first in (0, 2) for a in (first, first + 1) for b in (first + 2, first + 3)]
    placed = plan(TrafficGraph.of(6, edges), [Node("a"), Node("b")])
    assert all(placed.node_of[task] != placed.node_of[task + 1] for task in (0, 2, 4))
