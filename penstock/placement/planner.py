"""Where the tasks of a job should run: TurboStream's scheduler (PAPERS rows T9 to T11), and what makes it better.

`plan` deals tasks to nodes, between which traffic is dearest, and then those of each node to its workers, between which
it is a ring instead of a function call (the paper deals the tasks of a node to its workers in turn). `placement/
multilevel.py` does both.

It must never be worse than the paper's own algorithm where that keeps the balance: up to 150 tasks that is one of the
beginnings; above, its cost forbids it, and it begins on the parents only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.placement.multilevel import partition
from penstock.placement.placement import Placement, shares, workers_of
from penstock.placement.traffic import Node, TrafficGraph

#: By how much a node may have more than its fair share, unless its tasks cannot be dealt so evenly.
FACTOR = 0.1


def plan(
    graph: TrafficGraph, nodes: Sequence[Node], *, factor: float = FACTOR, seed: int = 0, tasks: int | None = None
) -> Placement:
    """Where each of the first `tasks` tasks (None: all; those behind them are anchors) should run. `factor`: see
    FACTOR. Raises Infeasible when a task may run on no node, or the nodes' memory is too small."""
    count = len(graph) if tasks is None else tasks
    memory = np.array([node.memory for node in nodes])
    node_of = partition(graph, shares(nodes), factor, memory=memory, seed=seed)[:count]
    workers = workers_of(nodes)
    worker_of = np.zeros(count, dtype=np.int64)
    for place, node in enumerate(nodes):
        here = np.flatnonzero(node_of == place)
        inside = partition(graph.part(here).anywhere(), np.full(node.workers, 1 / node.workers), factor, seed=seed)
        worker_of[here] = workers.index(place) + inside
    return Placement(tuple(nodes), workers, tuple(worker_of.tolist()))
