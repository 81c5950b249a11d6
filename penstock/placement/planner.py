"""Decides where the tasks of a job should run: TurboStream's scheduler (docs/papers.md: T9 to T11), with improvements.

`plan` assigns tasks to nodes first, because traffic between nodes costs most, and then the tasks of each node to its
workers, between which a record goes through a ring instead of a function call. (The paper assigns the tasks of a node
to its workers in turn.) `placement/multilevel.py` does both.

The result must never be worse than that of the paper's own algorithm where that one keeps the balance. For up to 150
tasks the paper's result is one of the beginnings of the search. For more tasks it costs too much, and only parents
begin with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.placement.multilevel import partition
from penstock.placement.placement import Placement, shares, workers_of
from penstock.placement.relabel import relabelled
from penstock.placement.traffic import Ints, Node, TrafficGraph

#: By how much a node may have more than its fair share, unless its tasks cannot be assigned so evenly.
FACTOR = 0.1


def plan(
    graph: TrafficGraph,
    nodes: Sequence[Node],
    *,
    factor: float = FACTOR,
    seed: int = 0,
    tasks: int | None = None,
    running: Placement | None = None,
) -> Placement:
    """Returns where each of the first `tasks` tasks should run (None: all tasks; the tasks after them are anchors).
    `factor`: see FACTOR. `running` says where the tasks run now, on the same nodes, with the workers of each node
    numbered consecutively: the result then lets no more traffic across, and names workers such that few tasks move.
    Raises Infeasible when a task may run on no node, or when the nodes have too little memory."""
    count = len(graph) if tasks is None else tasks
    memory = np.array([node.memory for node in nodes])
    start: Ints | None = None
    if running is not None:
        start = np.zeros(len(graph), dtype=np.int64)
        start[:count] = running.node_of
    node_of = partition(graph, shares(nodes), factor, memory=memory, seed=seed, start=start)[:count]
    workers = workers_of(nodes)
    worker_of = np.zeros(count, dtype=np.int64)
    for place, node in enumerate(nodes):
        here = np.flatnonzero(node_of == place)
        first = workers.index(place)
        if running is not None:
            start = np.where(running.node_of[here] == place, running.worker_of[here] - first, 0)
        fair = np.full(node.workers, 1 / node.workers)
        worker_of[here] = first + partition(graph.part(here).anywhere(), fair, factor, seed=seed, start=start)
    found = Placement(tuple(nodes), workers, tuple(worker_of.tolist()))
    return found if running is None else relabelled(running, found, keep_nodes=graph.allowed is not None)
