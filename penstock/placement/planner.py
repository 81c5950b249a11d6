"""Decides where the tasks of a job should run: TurboStream's scheduler (docs/papers.md: T9 to T11), with improvements.

`node_by_node` assigns tasks to nodes first, and then the tasks of each node to its workers, between which a record goes
through a ring instead of a function call. (The paper assigns the tasks of a node to its workers in turn.) This is best
if traffic between nodes costs infinitely more than traffic inside a node. What it really costs is measured
(`placement/hop_costs.py`). So where nodes have several workers, `plan` continues from there with a search over the
workers of all nodes (`multilevel.partition_over_nodes`), which may let more traffic cross between nodes if this saves
more inside. `placement/multilevel.py` does the searches.

The result must cost no more than the plan with nodes first, and must never be worse than that of the paper's own
algorithm where that one keeps the balance. For up to 150 tasks the paper's result is one of the
beginnings of the search. For more tasks it costs too much, and only parents begin with it.

The searches know edges between two tasks only, and what a task sends to all tasks of an operator is none
(`SharedTraffic`). A job with such traffic is planned twice: as if each receiver got a copy of its own, which draws the
receivers to their senders, and without this traffic, which is best when the receivers are everywhere in any case. Of
these two plans, of the running placement and of tasks assigned in turn, the one that costs least in truth is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.placement.balance import Limits, limits_of, pack
from penstock.placement.baselines import in_turn
from penstock.placement.hop_costs import NODE_COST
from penstock.placement.multilevel import Workers, partition, partition_over_nodes
from penstock.placement.placement import Placement, shares, speeds, workers_of
from penstock.placement.refinement import Partition
from penstock.placement.relabel import relabelled
from penstock.placement.traffic import Ints, Node, TrafficGraph

#: By how much a node may have more than its fair share, unless its tasks cannot be assigned so evenly.
FACTOR = 0.1


def plan(
    graph: TrafficGraph,
    nodes: Sequence[Node],
    *,
    factor: float = FACTOR,
    node_cost: float = NODE_COST,
    seed: int = 0,
    tasks: int | None = None,
    running: Placement | None = None,
) -> Placement:
    """Returns where each of the first `tasks` tasks should run (None: all tasks; the tasks after them are anchors).
    `factor`: see FACTOR. `node_cost`: see HopCosts. `running` says where the tasks run now, on the same nodes, with the
    workers of each node numbered consecutively: the result then costs no more, if the running placement keeps the
    balance, and names workers such that few tasks move. Raises Infeasible when a task may run on no node, or when the
    nodes have too little memory."""
    count = len(graph) if tasks is None else tasks
    workers = workers_of(nodes)
    if graph.shared:
        views = (graph.pairs(), replace(graph, shared=()))
        begun = [_searched(view, nodes, factor, node_cost, seed, count, running) for view in views]
        worker_of = _cheapest(graph, nodes, factor, node_cost, begun, count, running)[:count]
    else:
        worker_of = _searched(graph, nodes, factor, node_cost, seed, count, running)[:count]
    found = Placement(tuple(nodes), workers, tuple(worker_of.tolist()))
    return found if running is None else relabelled(running, found, keep_nodes=graph.allowed is not None)


def _searched(
    graph: TrafficGraph,
    nodes: Sequence[Node],
    factor: float,
    node_cost: float,
    seed: int,
    count: int,
    running: Placement | None,
) -> Ints:
    """Returns the worker of each task and of each anchor, for a graph without shared traffic. The parameters are those
    of `plan`."""
    workers = workers_of(nodes)
    node_of, worker_of = node_by_node(graph, nodes, factor=factor, seed=seed, tasks=count, running=running)
    found = _with_anchors(graph, worker_of, node_of, workers)
    if 1 < len(nodes) < len(workers):
        starts = [found]
        if running is not None:
            starts.append(_with_anchors(graph, running.worker_of, node_of, workers))
        at = Workers(np.array(workers), node_limits(graph, nodes, factor), speeds(nodes, workers))
        found = partition_over_nodes(graph, at, factor, node_cost, seed=seed, starts=starts)
    return found


def _cheapest(
    graph: TrafficGraph,
    nodes: Sequence[Node],
    factor: float,
    node_cost: float,
    begun: Sequence[Ints],
    tasks: int,
    running: Placement | None,
) -> Ints:
    """Returns the cheapest placement of tasks and anchors among the placements that keep the balance best: one of
    `begun`, the running one, or that of tasks assigned in turn."""
    workers = np.array(workers_of(nodes))
    known = [all_in_turn(nodes, tasks)] if running is None else [all_in_turn(nodes, tasks), running.worker_of]
    anchors = begun[0][tasks:]
    candidates = [*begun, *(np.concatenate([places, anchors]) for places in known)]
    if graph.allowed is not None:
        everyone = np.arange(len(graph))
        candidates = [places for places in candidates if graph.allowed[everyone, workers[places]].all()]
    fair = speeds(nodes, workers.tolist()) / speeds(nodes, workers.tolist()).sum()
    room = np.full(len(workers), np.inf)
    anywhere = graph.anywhere()
    even = limits_of(anywhere, fair, factor, room, pack(anywhere, fair, room))
    most = Limits(np.maximum(even.cpu, graph.loads(candidates[0], len(workers))), room)
    on_nodes = node_limits(graph, nodes, factor)

    def badness(places: Ints) -> tuple[float, float]:
        return Partition(graph, most, places, workers, on_nodes, node_cost).badness

    return min(candidates, key=badness)


def all_in_turn(nodes: Sequence[Node], tasks: int) -> Ints:
    """Returns the worker of each task when tasks are assigned in turn, with the workers of each node numbered
    consecutively."""
    found = in_turn(tasks, nodes)
    names = np.argsort(np.argsort(found.workers, kind="stable"))
    return names[found.worker_of].astype(np.int64)


def node_by_node(
    graph: TrafficGraph,
    nodes: Sequence[Node],
    *,
    factor: float,
    seed: int,
    tasks: int,
    running: Placement | None,
    quick: bool = False,
) -> tuple[Ints, Ints]:
    """Returns the node of each task and of each anchor, and the worker of each task. Traffic between nodes is minimised
    first, and then that between the workers of each node. `quick`: see `partition`. The other parameters are those of
    `plan`."""
    memory = np.array([node.memory for node in nodes])
    start: Ints | None = None
    if running is not None:
        start = np.zeros(len(graph), dtype=np.int64)
        start[:tasks] = running.node_of
    node_of = partition(graph, shares(nodes), factor, memory=memory, seed=seed, start=start, quick=quick)
    workers = workers_of(nodes)
    worker_of = np.zeros(tasks, dtype=np.int64)
    for place, node in enumerate(nodes):
        here = np.flatnonzero(node_of[:tasks] == place)
        first = workers.index(place)
        if running is not None:
            start = np.where(running.node_of[here] == place, running.worker_of[here] - first, 0)
        fair = np.full(node.workers, 1 / node.workers)
        part = graph.part(here).anywhere()
        worker_of[here] = first + partition(part, fair, factor, seed=seed, start=start, quick=quick)
    return node_of, worker_of


def node_limits(graph: TrafficGraph, nodes: Sequence[Node], factor: float) -> Limits:
    """Returns the limit of each node."""
    memory = np.array([node.memory for node in nodes])
    return limits_of(graph, shares(nodes), factor, memory, pack(graph, shares(nodes), memory))


def _with_anchors(graph: TrafficGraph, worker_of: Ints, node_of: Ints, workers: Sequence[int]) -> Ints:
    """Returns the worker of each task and of each anchor. An anchor is on a worker of its node: on that of the task
    which reads its data, if this task is there, so that this hop costs nothing."""
    found = np.zeros(len(graph), dtype=np.int64)
    found[: len(worker_of)] = worker_of
    for anchor in range(len(worker_of), len(graph)):
        reader = int(worker_of[graph.neighbours[graph.starts[anchor]]])
        at = int(node_of[anchor])
        found[anchor] = reader if workers[reader] == at else workers.index(at)
    return found
