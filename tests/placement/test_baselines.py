"""Storm's, JStorm's, T-Storm's and METIS's placements: worked examples of each rule, and what always holds."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.placement.baselines import jstorm, metis, metis_parts, round_robin, traffic_greedy
from penstock.placement.placement import Placement, shares
from penstock.placement.shape import TrafficEdge
from penstock.placement.topology import Topology
from penstock.placement.traffic import Node, TrafficGraph

FACTOR = 0.1


def machines(*workers: int, memory: float = math.inf) -> list[Node]:
    return [Node(chr(ord("a") + place), count, memory) for place, count in enumerate(workers)]


def job(sizes: Sequence[int], inputs: Mapping[int, tuple[int, ...]] | None = None) -> Topology:
    """Components of so many tasks each, without traffic."""
    components = tuple(component for component, size in enumerate(sizes) for _ in range(size))
    return of(TrafficGraph.of(len(components), []), components, inputs)


def of(
    graph: TrafficGraph, components: tuple[int, ...] | None = None, inputs: Mapping[int, tuple[int, ...]] | None = None
) -> Topology:
    if components is None:
        components = (0,) * len(graph)
    taken = dict.fromkeys(components, ()) | dict(inputs or {})
    return Topology(graph, components, taken, tuple(f"task-{v}" for v in range(len(graph))))


def all_to_all(tasks: int) -> Topology:
    return of(TrafficGraph.of(tasks, [(a, b, 1.0) for a, b in combinations(range(tasks), 2)]))


def counts(placement: Placement) -> list[int]:
    """Tasks of each worker."""
    had = Counter(placement.tasks)
    return [had[worker] for worker in range(len(placement.workers))]


node_lists = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(lambda workers: machines(*workers))


@st.composite
def topologies(draw: st.DrawFn, *, unit_cpu: bool = False) -> Topology:
    sizes = draw(st.lists(st.integers(1, 6), max_size=4))
    inputs = {
        component: tuple(sorted(draw(st.sets(st.integers(0, component - 1), max_size=2)))) if component else ()
        for component in range(len(sizes))
    }
    topology = job(sizes, inputs)
    tasks = len(topology)
    edges: list[TrafficEdge] = []
    cpu: list[float] | None = None
    if tasks:
        number = st.integers(0, tasks - 1)
        edges = draw(st.lists(st.tuples(number, number, st.floats(0, 1e6)), max_size=40))
        if not unit_cpu:
            cpu = draw(st.lists(st.floats(0, 100), min_size=tasks, max_size=tasks))
    return of(TrafficGraph.of(tasks, edges, cpu=cpu), topology.components, topology.inputs)


# --- the paper's deployments ---


@pytest.mark.parametrize("place", [round_robin, jstorm])
@pytest.mark.parametrize(
    ("nodes", "workers", "expected"),
    [(4, 8, 1 / 7), (2, 8, 3 / 7), (2, 4, 1 / 3), (8, 8, 0.0), (4, 4, 0.0), (1, 2, 1.0)],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_the_intra_node_share_of_a_deployment(
    place: Callable[[Topology, Sequence[Node]], Placement], nodes: int, workers: int, expected: float
) -> None:
    """A task on each of W workers spread evenly over N nodes, each talking to the W - 1 others: of these W/N - 1 are
    on its own node."""
    topology = all_to_all(workers)
    placement = place(topology, machines(*[workers // nodes] * nodes))
    assert counts(placement) == [1] * workers
    assert placement.intra_node_share(topology.graph) == pytest.approx(expected)


# --- round_robin ---


def test_round_robin_spreads_over_nodes_before_it_comes_back() -> None:
    """Turn 1: a, b, c; b has one worker only, so turn 2: a, c; turn 3: c. The tasks go round the six workers, across
    components."""
    placement = round_robin(job([3, 5]), machines(2, 1, 3))
    assert placement.workers == (0, 1, 2, 0, 2, 2)
    assert placement.tasks == (0, 1, 2, 3, 4, 5, 0, 1)


@settings(deadline=None)
@given(topologies(), node_lists)
def test_round_robin_is_even(topology: Topology, nodes: list[Node]) -> None:
    placement = round_robin(topology, nodes)
    assert Counter(placement.workers) == {place: node.workers for place, node in enumerate(nodes)}
    assert len(placement.tasks) == len(topology)
    assert max(counts(placement)) - min(counts(placement)) <= 1


# --- jstorm: workers ---


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        # Most free slots first: b, c, a. a is full at once, c in the second turn, b in the third.
        pytest.param((1, 3, 2), (1, 2, 0, 1, 2, 1), id="most free first"),
        # (0 + 6) / 3 + 1 = 3 slots a node: c is left out with its fourth, which it gets when no other has room.
        pytest.param((1, 1, 4), (2, 0, 2, 1, 2, 2), id="beyond the limit"),
        # Turn 1: a, b, which is full and gone, so that c is not seen in this turn: a again.
        pytest.param((2, 1, 1), (0, 1, 0, 2), id="passed over after a full one"),
    ],
)
def test_the_workers_of_jstorm(nodes: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert jstorm(job([1]), machines(*nodes)).workers == expected


# --- jstorm: tasks. Each rule decides in one test what those below it would decide otherwise. With nodes (2, 2) the
# workers 0 and 2 are on a, 1 and 3 on b; with (3, 1) worker 1 is on b and the others on a; with (1, 2) workers 0 and 2
# are on b, which has more free slots, and 1 on a.


def test_jstorm_spreads_a_component_over_workers_first() -> None:
    """Five tasks on four workers. Task 0 goes to worker 0. Tasks 1 to 3 of the other component go to empty workers: 1,
    as b is empty, then 2 and 3. The last goes to worker 0, the only one without its component, though b has fewer of
    them (1) than a (2)."""
    assert jstorm(job([1, 4]), machines(3, 1)).tasks == (0, 1, 2, 3, 0)


def test_jstorm_spreads_a_component_over_nodes_second() -> None:
    """Tasks 0 and 1 go to workers 0 and 1, task 2 of the other component to an empty worker, 2. Of workers 0, 1 and 3,
    which have none of its component, task 3 goes to 1, as b has none either, though worker 3 is empty. Of five tasks on
    four workers only one worker may have two, so worker 3 is all that is left for task 4."""
    assert jstorm(job([2, 3]), machines(3, 1)).tasks == (0, 1, 2, 1, 3)


def test_jstorm_fills_empty_workers_third() -> None:
    """Tasks 0 to 2 go to worker 0, to 1 on the other node, and to 2. Task 3 goes to the empty worker 3, though a has
    two tasks and b one. For task 4 b has none of its component."""
    assert jstorm(job([3, 2]), machines(3, 1)).tasks == (0, 1, 2, 3, 1)


def test_jstorm_fills_empty_nodes_fourth() -> None:
    """Two tasks on three workers: none gets a second. Task 0 goes to worker 0 on b. Of the empty workers 1 and 2 task 1
    takes that on a, which is empty, though its input is on b."""
    assert jstorm(job([1, 1], {1: (0,)}), machines(1, 2)).tasks == (0, 1)


def test_jstorm_counts_the_tasks_of_a_node_before_inputs() -> None:
    """Task 0 goes to worker 0 on b, task 1 to the empty node, task 2 to the empty worker. All workers have one task
    then, and none of the component of task 3: it goes to a, which has one task, though its input is on worker 0."""
    assert jstorm(job([1, 2, 1], {2: (0,)}), machines(1, 2)).tasks == (0, 1, 2, 1)


def test_jstorm_looks_for_inputs_on_the_worker_fifth() -> None:
    """Tasks 0 to 2 go to workers 0 (on b), 1 (on a, which is empty) and 2 (which is empty). Task 3 goes to a, which has
    fewer tasks. For task 4 there are workers 0 and 2 of b, equal but for its input, which is on 2."""
    assert jstorm(job([1, 2, 2], {2: (1,)}), machines(1, 2)).tasks == (0, 1, 2, 1, 2)


def test_jstorm_looks_for_inputs_on_the_node_sixth() -> None:
    """Three tasks on four workers: none gets a second. Tasks 0 and 1 go to workers 0 on a and 1 on b. For task 2
    workers 2 and 3 are empty, with one task on either node; its input is on b."""
    assert jstorm(job([1, 1, 1], {2: (1,)}), machines(2, 2)).tasks == (0, 1, 3)


def test_jstorm_looks_for_what_a_source_puts_out() -> None:
    """As before, but task 2 is a source whose output goes to the component of task 1."""
    assert jstorm(job([1, 1, 1], {1: (0, 2)}), machines(2, 2)).tasks == (0, 1, 3)


def test_jstorm_looks_at_the_worker_before_the_node_for_inputs() -> None:
    """Workers 0, 2 and 4 are on a, 1 and 3 on b; seven tasks on five workers: two of them have two. Tasks 0 to 2 (a
    source nobody reads) go to workers 0, 1 and 2; task 3 to 3 on b, which has fewer tasks; task 4 to the empty worker
    4. Task 5, of the same component, goes to b, which has none of it: worker 3 has task 3, which reads it. So both
    nodes have three tasks when task 6 comes, and the open workers 0, 1, 2 and 4 one each. Its inputs are the components
    of task 3, and of 4 and 5. b has two of these, but on worker 3, which is closed; a has one, on worker 4."""
    topology = job([3, 1, 2, 1], {1: (2,), 3: (1, 2)})
    assert jstorm(topology, machines(3, 2)).tasks == (0, 1, 2, 3, 4, 3, 4)


def test_jstorm_closes_workers_at_the_even_share_when_the_larger_ones_are_full() -> None:
    """Sixteen tasks on five workers, of which one may have four. Workers 0, 2 and 4 are on a, 1 and 3 on b; after
    twelve tasks they have 2, 3, 2, 3 and 2. Of the last component task 12 goes to the first of those with two, 0, and
    task 13 to b, which has none: worker 1 has four. So all that have three are closed, 0 and 3, and the last two tasks
    go to workers 2 and 4, though a has more of the component than b by then."""
    topology = job([4, 4, 4, 4])
    assert jstorm(topology, machines(3, 2)).tasks == (0, 1, 2, 3, 4, 1, 0, 3, 2, 1, 4, 3, 0, 1, 2, 4)


@settings(deadline=None)
@given(topologies(), node_lists)
def test_jstorm_is_even(topology: Topology, nodes: list[Node]) -> None:
    slots = sum(node.workers for node in nodes)
    placement = jstorm(topology, nodes)
    assert len(placement.workers) == slots
    assert all(count <= nodes[place].workers for place, count in Counter(placement.workers).items())
    assert len(placement.tasks) == len(topology)
    share, larger = divmod(len(topology), len(placement.workers))
    had = counts(placement)
    assert set(had) <= {share, share + 1}
    assert had.count(share + 1) == larger


@settings(deadline=None)
@given(topologies(), node_lists)
def test_jstorm_and_round_robin_know_nothing_of_traffic(topology: Topology, nodes: list[Node]) -> None:
    silent = of(TrafficGraph.of(len(topology), []), topology.components, topology.inputs)
    assert jstorm(topology, nodes) == jstorm(silent, nodes)
    assert round_robin(topology, nodes) == round_robin(silent, nodes)


# --- traffic_greedy ---


def test_greedy_puts_together_what_talks() -> None:
    """Four tasks in a row, with little traffic between 1 and 2. By their traffic: 1 (11) to a, 0 (10) to its neighbour,
    2 (9) would be drawn there too, but a may have 2.2 only; 3 (8) to 2."""
    topology = of(TrafficGraph.of(4, [(0, 1, 10), (1, 2, 1), (2, 3, 8)]))
    assert traffic_greedy(topology, machines(1, 1)).tasks == (0, 0, 1, 1)


def test_greedy_takes_the_busiest_first() -> None:
    """1 (6) goes to a, 2 (5) joins it, and there is no room for 0 (1): a node may have 1.5 x 1.5 = 2.25. In the order
    of their numbers 0 would go first and 2 would be left over."""
    topology = of(TrafficGraph.of(3, [(0, 1, 1), (1, 2, 5)]))
    assert traffic_greedy(topology, machines(1, 1), factor=0.5).tasks == (1, 0, 0)


def test_greedy_counts_only_what_is_placed() -> None:
    """0 (9) to a and 1 (8) to b, as allowed. 2 (7) has 3 with 0 and 2 with 1; what it has with 3, which nobody has
    placed yet, is on no node. 3 (2) follows it. (With as much room as they want.)"""
    allowed = np.array([[True, False], [False, True], [True, True], [True, True]])
    topology = of(TrafficGraph.of(4, [(0, 1, 6), (0, 2, 3), (1, 2, 2), (2, 3, 2)], allowed=allowed))
    assert traffic_greedy(topology, machines(1, 1), factor=3).tasks == (0, 1, 0, 0)


def test_greedy_spreads_what_is_equal_by_what_nodes_can_take() -> None:
    """No traffic, and as much room as they want: 0 to a, the first; then b and its three workers have less for their
    share, until they have three."""
    assert traffic_greedy(job([4]), machines(1, 3), factor=10).tasks == (0, 1, 2, 3)


def test_greedy_goes_to_the_least_loaded_when_no_node_has_room() -> None:
    """Fair shares of 12 are 4 and 8. 0 fits a. 1 weighs 9 and fits nowhere: to b, which has nothing yet, not to 0."""
    topology = of(TrafficGraph.of(2, [(0, 1, 5)], cpu=[3, 9]))
    assert traffic_greedy(topology, machines(1, 2)).tasks == (0, 1)


def test_greedy_goes_to_the_least_loaded_worker_of_the_node() -> None:
    """By their traffic: 3, which weighs nothing, and 0 to worker 0, which has 3 of the CPU then; 1 and 2 to worker 1,
    which has 0 and 1 when they come."""
    topology = of(TrafficGraph.of(4, [(0, 3, 5), (1, 3, 4), (2, 3, 3)], cpu=[3, 1, 1, 0]))
    assert traffic_greedy(topology, machines(2)).tasks == (0, 1, 1, 0)


def test_greedy_does_not_take_rounding_for_traffic() -> None:
    """What 4 talks to is 0 and 1 on a, with 0.1 + 0.2, and 2 on b, with 0.3: equal, so b has it, where there is less
    load. (3 only makes 2 busier than 4.)"""
    allowed = np.array([[True, False], [True, False], [False, True], [False, True], [True, True]])
    edges = [(0, 1, 10), (2, 3, 10), (4, 0, 0.1), (4, 1, 0.2), (4, 2, 0.3)]
    topology = of(TrafficGraph.of(5, edges, cpu=[1, 1, 1, 0, 1], allowed=allowed))
    assert traffic_greedy(topology, machines(1, 1), factor=1).tasks == (0, 0, 1, 1, 1)


def test_greedy_does_not_take_rounding_for_load() -> None:
    """The fair share is 0.3, which 0.2 + 0.1 is more than in floating point: 2 joins 1 nevertheless."""
    topology = of(TrafficGraph.of(3, [(1, 2, 1)], cpu=[0.3, 0.2, 0.1]))
    assert traffic_greedy(topology, machines(1, 1), factor=0).tasks == (1, 0, 0)


def test_greedy_does_not_take_rounding_for_business() -> None:
    """0 and 1 have as much traffic, which added up in the order of their neighbours would be less for 0."""
    edges = [(0, 2, 0.3), (0, 3, 0.2), (0, 4, 0.1), (1, 2, 0.1), (1, 3, 0.2), (1, 4, 0.3)]
    assert traffic_greedy(of(TrafficGraph.of(5, edges)), machines(1, 1)).tasks[:2] == (0, 1)


def test_greedy_puts_tasks_where_they_may_run() -> None:
    allowed = np.array([[True, False], [False, True]])
    topology = of(TrafficGraph.of(2, [(0, 1, 1)], allowed=allowed))
    assert traffic_greedy(topology, machines(1, 1), factor=1).tasks == (0, 1)


def test_greedy_names_the_task_that_may_run_nowhere() -> None:
    allowed = np.array([[True, True], [False, False]])
    with pytest.raises(ValueError, match="task-1 may run on none"):
        traffic_greedy(of(TrafficGraph.of(2, [], allowed=allowed)), machines(1, 1))


def test_greedy_keeps_to_the_memory() -> None:
    """The two talk, and there is CPU for both on a, but not memory."""
    topology = of(TrafficGraph.of(2, [(0, 1, 1)], memory=[8, 8]))
    assert traffic_greedy(topology, machines(1, 1, memory=10), factor=1).tasks == (0, 1)
    assert traffic_greedy(topology, machines(1, 1, memory=16), factor=1).tasks == (0, 0)


def test_greedy_names_the_task_that_there_is_no_memory_for() -> None:
    topology = of(TrafficGraph.of(3, [(0, 1, 1)], memory=[8, 8, 3]))
    with pytest.raises(ValueError, match="3 bytes of memory left that task task-2"):
        traffic_greedy(topology, machines(1, 1, memory=10))


@settings(deadline=None)
@given(topologies(unit_cpu=True), node_lists, st.floats(0, 1))
def test_greedy_keeps_the_balance_when_that_can_be(topology: Topology, nodes: list[Node], factor: float) -> None:
    """Of tasks of 1 each, each node can take the whole part of its limit. While that is enough for all of them there is
    room on some node for each."""
    placement = traffic_greedy(topology, nodes, factor=factor)
    assert len(placement.tasks) == len(topology)
    limits = np.floor(shares(nodes) * len(topology) * (1 + factor) + 1e-6)
    if limits.sum() >= len(topology):
        assert (topology.graph.loads(placement.node_of, len(nodes)) <= limits).all()


@settings(deadline=None)
@given(topologies(), node_lists, st.data())
def test_greedy_never_breaks_what_nodes_allow(topology: Topology, nodes: list[Node], data: st.DataObject) -> None:
    tasks = len(topology)
    bits = st.lists(st.booleans(), min_size=len(nodes), max_size=len(nodes))
    allowed = np.array(data.draw(st.lists(bits, min_size=tasks, max_size=tasks)), dtype=np.bool_)
    memory = np.array(data.draw(st.lists(st.integers(0, 10), min_size=tasks, max_size=tasks)), dtype=np.float64)
    room = data.draw(st.integers(0, 100))
    nodes = [Node(node.name, node.workers, room) for node in nodes]
    graph = topology.graph
    limited = of(
        TrafficGraph(
            graph.starts, graph.neighbours, graph.traffic, graph.cpu, memory, allowed.reshape(tasks, len(nodes))
        )
    )
    try:
        placement = traffic_greedy(limited, nodes)
    except ValueError as error:
        assert "may run on none" in str(error) or "bytes of memory left" in str(error)  # noqa: PT017 - or none at all
        return
    assert limited.graph.allowed is not None
    assert all(limited.graph.allowed[v, node] for v, node in enumerate(placement.node_of))
    assert (np.bincount(placement.node_of, memory, len(nodes)) <= room).all()


# --- metis ---


def groups(places: Sequence[int]) -> list[list[int]]:
    """The tasks of each place, whatever its number."""
    return sorted([v for v, at in enumerate(places) if at == place] for place in set(places))


def test_metis_finds_two_clusters() -> None:
    """Twice four tasks that all talk to each other, with one thin edge between."""
    pytest.importorskip("pymetis")
    edges = [(a, b, 5) for cluster in ((0, 2, 4, 6), (1, 3, 5, 7)) for a, b in combinations(cluster, 2)]
    topology = of(TrafficGraph.of(8, [*edges, (0, 1, 1)]))
    placement = metis(topology, machines(2, 2))
    assert groups(placement.node_of.tolist()) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    # To the workers of a node in turn.
    assert groups(placement.tasks) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def row(tasks: int, cpu: Sequence[float] | None = None) -> TrafficGraph:
    return TrafficGraph.of(tasks, [(v, v + 1, 1) for v in range(tasks - 1)], cpu=cpu)


def test_metis_deals_by_what_nodes_can_take() -> None:
    """Eight in a row to one worker and three: two at an end, and the rest."""
    pytest.importorskip("pymetis")
    places = metis_parts(row(8), shares(machines(1, 3)), FACTOR, 0)
    assert groups(places.tolist()) in ([[0, 1], [2, 3, 4, 5, 6, 7]], [[0, 1, 2, 3, 4, 5], [6, 7]])
    assert np.bincount(places).tolist() == [2, 6]


def test_metis_deals_cpu_not_tasks() -> None:
    pytest.importorskip("pymetis")
    places = metis_parts(row(4, cpu=[3e-3, 1e-3, 1e-3, 1e-3]), np.array([0.5, 0.5]), FACTOR, 0)
    assert groups(places.tolist()) == [[0], [1, 2, 3]]


@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e12])
def test_metis_takes_traffic_of_any_unit(unit: float) -> None:
    """Four rows of eight tasks. By the number of edges they are cut across the rows, into four and four columns; as
    there is ten times as much traffic within rows, that would be 40 units, and 8 between the second row and the third.
    """
    pytest.importorskip("pymetis")
    within = [(v, v + 1, 10 * unit) for v in range(32) if v % 8 != 7]
    graph = TrafficGraph.of(32, [*within, *((v, v + 8, unit) for v in range(24))])
    places = metis_parts(graph, np.array([0.5, 0.5]), FACTOR, 0)
    assert groups(places.tolist()) == [list(range(16)), list(range(16, 32))]


def test_metis_takes_edges_without_traffic_for_none() -> None:
    pytest.importorskip("pymetis")
    silent = TrafficGraph.of(12, [(a, b, 0) for a, b in combinations(range(12), 2) if (a + b) % 3])
    fair = np.full(3, 1 / 3)
    assert metis_parts(silent, fair, FACTOR, 0).tolist() == metis_parts(job([12]).graph, fair, FACTOR, 0).tolist()


def test_metis_sees_traffic_that_is_next_to_nothing() -> None:
    """Four pairs, of which one has all the traffic but a trillionth: the others are not torn apart either."""
    pytest.importorskip("pymetis")
    graph = TrafficGraph.of(8, [(0, 4, 1e12), (1, 5, 1), (2, 6, 1), (3, 7, 1)])
    assert graph.edge_cut(metis_parts(graph, np.full(4, 0.25), FACTOR, 0)) == 0


def test_metis_needs_no_cpu_figures() -> None:
    """Tasks without weight are dealt evenly."""
    pytest.importorskip("pymetis")
    assert groups(metis_parts(row(4, cpu=[0] * 4), np.array([0.5, 0.5]), FACTOR, 0).tolist()) == [[0, 1], [2, 3]]


def test_metis_depends_on_the_seed_alone() -> None:
    pytest.importorskip("pymetis")
    graph = all_to_all(12).graph
    fair = np.full(3, 1 / 3)
    found = [tuple(metis_parts(graph, fair, FACTOR, seed).tolist()) for seed in range(8)]
    assert found == [tuple(metis_parts(graph, fair, FACTOR, seed).tolist()) for seed in range(8)]
    assert len(set(found)) > 1


def layers(width: int, count: int) -> TrafficGraph:
    """Layers of tasks, each of which sends to all of the next."""
    between = product(range(count - 1), range(width), range(width))
    edges = [(layer * width + a, (layer + 1) * width + b, 1.0) for layer, a, b in between]
    return TrafficGraph.of(width * count, edges)


@pytest.mark.parametrize("graph", [layers(25, 4), layers(10, 4)], ids=len)
def test_metis_keeps_to_the_factor_and_is_at_its_best(graph: TrafficGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that METIS answers the one with the least traffic across is taken: of 100 tasks the k-way scheme's. Of 40
    tasks bisection puts 15 on one of three places, where 14.67 would be the most, also when it is asked for half the
    imbalance and for none; with less traffic across than k-way, but that is not taken."""
    pymetis = pytest.importorskip("pymetis")
    asked: dict[bool, list[int]] = {True: [], False: []}
    answers: list[list[int]] = []
    part_graph = pymetis.part_graph

    def spy(*args: Any, recursive: bool, options: Any, **more: Any) -> Any:
        asked[recursive].append(options.ufactor)
        answer = part_graph(*args, recursive=recursive, options=options, **more)
        answers.append(list(answer.vertex_part))
        return answer

    monkeypatch.setattr(pymetis, "part_graph", spy)
    limit = len(graph) / 3 * (1 + FACTOR)
    for seed in range(4):
        answers.clear()
        places = metis_parts(graph, np.full(3, 1 / 3), FACTOR, seed)
        assert np.bincount(places).max() <= limit
        balanced = [answer for answer in answers if np.bincount(answer).max() <= limit]
        assert graph.edge_cut(places) == min(graph.edge_cut(answer) for answer in balanced)
    first = [100, 50, 1] if len(graph) == 40 else [100]
    assert asked == {True: first * 4, False: [100] * 4}


@settings(deadline=None)
@given(topologies(unit_cpu=True), st.integers(2, 5), st.sampled_from([0.05, 0.1, 0.3]), st.integers(0, 1000))
def test_metis_keeps_the_balance_but_for_a_task(topology: Topology, count: int, factor: float, seed: int) -> None:
    """In one case of some thousands there is a task too many somewhere."""
    pytest.importorskip("pymetis")
    graph = topology.graph
    places = metis_parts(graph, np.full(count, 1 / count), factor, seed)
    assert len(places) == len(graph)
    fair = len(graph) / count
    if len(graph) >= count:
        assert np.bincount(places, minlength=count).max() <= max(math.floor(fair * (1 + factor)), math.ceil(fair)) + 1


@settings(deadline=None)
@given(topologies(), node_lists)
def test_metis_places_every_task(topology: Topology, nodes: list[Node]) -> None:
    pytest.importorskip("pymetis")
    placement = metis(topology, nodes)
    assert len(placement.tasks) == len(topology)
    for place in range(len(nodes)):
        had = [count for worker, count in enumerate(counts(placement)) if placement.workers[worker] == place]
        assert max(had) - min(had) <= 1


def test_metis_is_not_asked_about_one_node_or_no_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymetis", None)
    assert metis(job([3]), machines(2)).tasks == (0, 1, 0)
    assert metis(job([]), machines(1, 1)).tasks == ()


def test_without_pymetis_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(ImportError, match="pip install pymetis"):
        metis(job([3]), machines(1, 1))
