"""Decides how many workers each node gets, by the traffic between the tasks that will run there (docs/papers.md: T10).

Room on nodes must be reserved before workers start, and by free CPUs alone four workers that belong together may end up
as three and one. So the tasks are assigned to workers first, whatever their nodes, and workers that exchange much are
put on one node, as far as it has room. Nodes get workers by free CPUs (`placement.spread`) unless a plan for other
numbers lets less across.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.placement.balance import Infeasible
from penstock.placement.hop_costs import NODE_COST
from penstock.placement.multilevel import partition
from penstock.placement.placement import Placement
from penstock.placement.planner import FACTOR, plan
from penstock.placement.traffic import Node, TrafficGraph

# By how much more than an even part of the free CPUs a node may get, where it has room.
_UNEVEN = 0.5
# The part of the cost of hops that other numbers of workers must save.
_WORTH = 0.05


def shared(
    graph: TrafficGraph,
    even: Sequence[int],
    rooms: Sequence[int],
    speeds: Sequence[float],
    node_cost: float = NODE_COST,
) -> list[int]:
    """Returns the number of workers for each node. `even` are the numbers by free CPUs, `rooms` the numbers of workers
    for which the nodes have room, and `speeds` how fast the nodes are. Returns `even` when nothing is better."""
    even = list(even)
    workers = sum(even)
    if len(even) < 2 or workers == len(even) or any(count > room for count, room in zip(even, rooms, strict=True)):
        return even
    pairs = graph.anywhere().pairs()
    found = partition(pairs, np.full(workers, 1 / workers), FACTOR, quick=True)
    contents = replace(pairs.merged(found, workers), cpu=np.ones(workers), memory=np.ones(workers))
    start = np.repeat(np.arange(len(even)), even)
    try:
        at = partition(
            contents, np.array(even) / workers, _UNEVEN, memory=np.array(rooms, dtype=np.float64), start=start
        )
    except Infeasible:
        return even
    counts = np.bincount(at, minlength=len(even)).tolist()
    if counts == even or min(counts) < 1:
        return even
    costs = [_cost(graph, wanted, speeds, node_cost) for wanted in (even, counts)]
    return counts if costs[1] < (1 - _WORTH) * costs[0] else even


def _cost(graph: TrafficGraph, counts: Sequence[int], speeds: Sequence[float], node_cost: float) -> float:
    """Returns the cost of hops in the plan for these numbers of workers on the nodes."""
    nodes = [Node(str(place), count, speed=speeds[place]) for place, count in enumerate(counts)]
    placed: Placement = plan(graph, nodes, node_cost=node_cost)
    return graph.hop_cost(placed.worker_of, placed.node_of, node_cost)
