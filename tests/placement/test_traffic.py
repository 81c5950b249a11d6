"""The graph of tasks: what it adds up, what of it is left in parts and parents, and what is anchored."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.placement.placement import Placement, shares, spread, workers_of
from penstock.placement.shape import SharedTraffic, TrafficEdge
from penstock.placement.traffic import Node, TrafficGraph

TASKS = 9
EDGES = st.lists(
    st.tuples(st.integers(0, TASKS - 1), st.integers(0, TASKS - 1), st.integers(0, 9).map(float)), max_size=30
)
PLACES = st.lists(st.integers(0, 3), min_size=TASKS, max_size=TASKS)


def crossing(edges: list[TrafficEdge], places: list[int]) -> float:
    return sum(traffic for a, b, traffic in edges if places[a] != places[b])


@given(EDGES, PLACES)
def test_what_crosses_is_the_sum_of_the_edges_whose_ends_are_apart(edges: list[TrafficEdge], places: list[int]) -> None:
    graph = TrafficGraph.of(TASKS, edges)
    assert graph.edge_cut(places) == crossing(edges, places)
    assert graph.total_traffic == crossing(edges, list(range(TASKS)))


@given(EDGES, PLACES)
def test_each_row_has_its_neighbours_once_in_order_and_both_directions(
    edges: list[TrafficEdge], places: list[int]
) -> None:
    graph = TrafficGraph.of(TASKS, edges)
    rows = {
        v: dict(
            zip(
                graph.neighbours[graph.starts[v] : graph.starts[v + 1]].tolist(),
                graph.traffic[graph.starts[v] : graph.starts[v + 1]].tolist(),
                strict=True,
            )
        )
        for v in range(TASKS)
    }
    for v, row in rows.items():
        assert list(row) == sorted(set(row))
        assert v not in row
        assert all(rows[u][v] == traffic for u, traffic in row.items())


@given(EDGES, PLACES, PLACES)
def test_parents_have_what_crosses_between_their_tasks(
    edges: list[TrafficEdge], parents: list[int], places: list[int]
) -> None:
    graph = TrafficGraph.of(TASKS, edges, cpu=list(range(TASKS)))
    merged = graph.merged(np.array(parents), 4)
    of_tasks = [places[parent] for parent in parents]
    assert merged.edge_cut(places[:4]) == graph.edge_cut(of_tasks)
    assert merged.loads(places[:4], 4).tolist() == graph.loads(of_tasks, 4).tolist()


@given(EDGES, st.sets(st.integers(0, TASKS - 1), min_size=1), PLACES)
def test_a_part_has_the_edges_inside(edges: list[TrafficEdge], some: set[int], places: list[int]) -> None:
    listed = sorted(some, reverse=True)
    part = TrafficGraph.of(TASKS, edges, cpu=list(range(TASKS))).part(np.array(listed))
    inside = [edge for edge in edges if edge[0] in some and edge[1] in some]
    assert part.edge_cut([places[v] for v in listed]) == crossing(inside, places)
    assert part.cpu.tolist() == listed


SHARED = st.lists(
    st.builds(
        SharedTraffic,
        st.lists(st.integers(0, TASKS - 1), min_size=1, max_size=5, unique=True).map(tuple),
        st.integers(0, 9).map(float),
    ),
    max_size=6,
)


def copies(shared: list[SharedTraffic], places: list[int]) -> float:
    return sum(one.traffic * (len({places[task] for task in one.tasks}) - 1) for one in shared)


@given(EDGES, SHARED, PLACES, PLACES)
def test_shared_traffic_crosses_once_to_each_other_place(
    edges: list[TrafficEdge], shared: list[SharedTraffic], places: list[int], parents: list[int]
) -> None:
    graph = TrafficGraph.of(TASKS, edges, shared=shared)
    assert graph.edge_cut(places) == crossing(edges, places) + copies(shared, places)
    assert graph.total_traffic == graph.edge_cut(range(TASKS)) == graph.pairs().total_traffic
    assert graph.edge_cut(places) <= graph.pairs().edge_cut(places)
    of_tasks = [places[parent] for parent in parents]
    assert graph.merged(np.array(parents), 4).edge_cut(places[:4]) == graph.edge_cut(of_tasks)
    assert graph.plus(graph, 2.0).edge_cut(places) == 3 * graph.edge_cut(places)
    assert graph.with_anchors([(0, 1, 0.0)], 4).edge_cut([*places, 1]) == graph.edge_cut(places)
    listed = list(range(0, TASKS, 2))[::-1]
    inside = [
        SharedTraffic(tuple(v for v in one.tasks if v % 2 == 0), one.traffic) for one in shared if not one.tasks[0] % 2
    ]
    kept = [edge for edge in edges if edge[0] % 2 == edge[1] % 2 == 0]
    expected = crossing(kept, places) + copies(inside, places)
    assert graph.part(np.array(listed)).edge_cut([places[v] for v in listed]) == expected


def test_an_anchor_stands_for_what_is_outside_and_stays_where_it_is() -> None:
    graph = TrafficGraph.of(2, [(0, 1, 5.0)]).with_anchors([(0, 1, 3.0), (1, 0, 2.0)], nodes=3)
    assert len(graph) == 4
    assert graph.cpu.tolist() == [1, 1, 0, 0]
    assert graph.edge_cut([1, 1, 1, 0]) == 2.0
    assert graph.allowed is not None
    assert graph.allowed.tolist() == [[True] * 3, [True] * 3, [False, True, False], [True, False, False]]


def test_a_parent_may_run_where_all_of_its_tasks_may() -> None:
    allowed = np.array([[True, True, False], [False, True, True], [True, True, True]])
    merged = TrafficGraph.of(3, [], allowed=allowed).merged(np.array([0, 0, 1]), 2)
    assert merged.allowed is not None
    assert merged.allowed.tolist() == [[False, True, False], [True, True, True]]


@pytest.mark.parametrize("edges", [[(0, 3, 1.0)], [(-1, 0, 1.0)], [(0, 1, -1.0)], [(0, 1, float("nan"))]])
def test_wrong_edges_are_refused(edges: list[TrafficEdge]) -> None:
    with pytest.raises(ValueError, match=r"edge names a task|traffic must be"):
        TrafficGraph.of(3, edges)


def test_figures_of_another_number_of_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="cpu must be 3 figures"):
        TrafficGraph.of(3, [], cpu=[1.0])
    with pytest.raises(ValueError, match="memory must be 3 figures"):
        TrafficGraph.of(3, [], memory=[1.0, 1.0, -1.0])


def test_how_good_a_placement_is() -> None:
    """Four tasks in a row, 1, 2 and 4 between them, on three workers of two nodes."""
    graph = TrafficGraph.of(4, [(0, 1, 1.0), (1, 2, 2.0), (2, 3, 4.0)])
    nodes = (Node("a", workers=2), Node("b"))
    placed = Placement(nodes, workers_of(nodes), (0, 1, 2, 2))
    assert placed.workers == (0, 0, 1)
    assert placed.node_of.tolist() == [0, 0, 1, 1]
    assert placed.between_workers(graph) == 3.0
    assert placed.between_nodes(graph) == 2.0
    assert placed.intra_node_share(graph) == pytest.approx(1 / 3)
    assert shares(nodes).tolist() == pytest.approx([2 / 3, 1 / 3])
    assert placed.imbalance(graph) == pytest.approx(0.5), "b has 2 of the 4/3 tasks that are its share"


def test_a_task_is_on_a_worker_and_a_worker_on_a_node() -> None:
    with pytest.raises(ValueError, match="a task is on a worker"):
        Placement((Node("a"),), (0,), (1,))
    with pytest.raises(ValueError, match="a worker is on a node"):
        Placement((Node("a"),), (1,), (0,))
    with pytest.raises(ValueError, match="workers=0"):
        Node("a", workers=0)
    for speed in (0.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="speed="):
            Node("a", speed=speed)


ROOMS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=5)


@given(ROOMS, st.integers(0, 20))
def test_no_node_gets_more_workers_than_it_has_free_slots(rooms: list[tuple[int, int]], more: int) -> None:
    """Unless it got its one worker without a slot, or the free slots of all nodes are too few."""
    free, most = [slots for slots, _ in rooms], [slots + used for slots, used in rooms]
    workers = len(rooms) + more
    counts = spread(workers, free, most)
    assert sum(counts) == workers
    assert min(counts) >= 1
    room = sum(max(1, slots) for slots in free)
    if workers <= room:
        assert all(count <= max(1, slots) for count, slots in zip(counts, free, strict=True))
    else:
        assert all(count >= slots for count, slots in zip(counts, free, strict=True)), "no free slot is left"
    if workers <= sum(max(1, slots) for slots in most):
        assert all(count <= max(1, slots) for count, slots in zip(counts, most, strict=True))


@given(st.integers(1, 5), st.integers(0, 20), st.integers(0, 8))
def test_equal_nodes_get_equally_many_workers(nodes: int, more: int, slots: int) -> None:
    counts = spread(nodes + more, [slots] * nodes, [slots + 1] * nodes)
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(
    ("workers", "free", "most", "counts"),
    [
        (4, [2, 6], [8, 8], [1, 3]),  # a fourth of the room of each is left alone
        (6, [2, 6], [2, 6], [1, 5]),  # five sixths are less than all
        (8, [2, 6], [2, 6], [2, 6]),
        (6, [2, 2], [4, 2], [4, 2]),  # two of them wait for room
        (3, [0, 4], [1, 4], [1, 2]),
        (6, [2, 2, 1], [2, 2, 1], [2, 2, 2]),  # which cannot be, and the reservation says why
        (5, [1 << 30, 1 << 30], [1 << 30, 1 << 30], [3, 2]),
    ],
)
def test_where_workers_go(workers: int, free: list[int], most: list[int], counts: list[int]) -> None:
    assert spread(workers, free, most) == counts


def test_fewer_workers_than_nodes() -> None:
    with pytest.raises(ValueError, match="1 workers for 2 nodes"):
        spread(1, [1, 1], [1, 1])
