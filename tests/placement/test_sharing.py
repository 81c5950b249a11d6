"""How many workers each node gets, by the traffic between tasks."""

from __future__ import annotations

import random

import pytest

from penstock.placement.planner import plan
from penstock.placement.shape import TrafficEdge
from penstock.placement.sharing import shared
from penstock.placement.traffic import Node, TrafficGraph
from tests.placement.random_topologies import topology


def groups(*sizes: int) -> TrafficGraph:
    """Groups of so many tasks that talk to each other, and hardly to others."""
    edges: list[TrafficEdge] = []
    first = 0
    for size in sizes:
        edges += [(a, b, 100.0) for a in range(first, first + size) for b in range(first, a)]
        edges += [(first, 0, 1.0)] * (first > 0)
        first += size
    return TrafficGraph.of(first, edges)


def test_workers_that_belong_together_share_a_node() -> None:
    """Six tasks of one group and two of the other, on as many workers. Free CPUs alone would make halves."""
    graph = groups(6, 2)
    assert sorted(shared(graph, [4, 4], [8, 8], [1.0, 1.0])) == [2, 6]
    assert shared(graph, [4, 4], [5, 8], [1.0, 1.0]) == [2, 6], "only the second node has room for six"


@pytest.mark.parametrize(
    ("even", "rooms"),
    [
        ([4, 4], [4, 4]),  # no room
        ([4, 4], [3, 8]),  # the job waits for room as it is
        ([8], [8]),
        ([1, 1], [8, 8]),  # each node gets one
    ],
)
def test_free_cpus_decide_where_nothing_else_can(even: list[int], rooms: list[int]) -> None:
    assert shared(groups(6, 2), even, rooms, [1.0] * len(even)) == even


def test_halves_stay_halves() -> None:
    assert shared(groups(4, 4), [4, 4], [8, 8], [1.0, 1.0]) == [4, 4]


@pytest.mark.parametrize("seed", range(2))
def test_no_plan_gets_worse(seed: int) -> None:
    chance = random.Random(seed)
    graph = topology(chance, 8)
    rooms = [chance.randint(2, 3), 4]
    found = shared(graph, [2, 2], rooms, [1.0, 1.0])
    assert sum(found) == 4
    assert all(1 <= count <= room for count, room in zip(found, rooms, strict=True))
    costs = []
    for counts in ([2, 2], found):
        placed = plan(graph, [Node(str(at), count) for at, count in enumerate(counts)])
        costs.append(graph.hop_cost(placed.worker_of, placed.node_of, 4.0))
    assert costs[1] <= costs[0]
