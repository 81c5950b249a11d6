"""Placements of other systems, for comparison (docs/papers.md: T13) and for users to choose.

`round_robin` is Storm's even scheduler, and `jstorm` that of JStorm, with which the paper compares itself. Both assign
tasks evenly and consider neither traffic, nor the cost of tasks, nor where tasks may run. `traffic_greedy` is like
T-Storm: it takes the busiest task first, and assigns each task to where it adds the least traffic between nodes.
`metis` is the partitioner with which others are compared, from the optional package pymetis.

None of these systems knows traffic of which each machine gets one copy, so they plan as if each task got its own.

All functions are pure functions of a topology, whose graph has the job's tasks and no anchors, and of the nodes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from math import fsum, inf

import numpy as np

from penstock.placement.multilevel import papers
from penstock.placement.placement import Placement, shares, workers_of
from penstock.placement.topology import Topology
from penstock.placement.traffic import Floats, Ints, Node, TrafficGraph

# The relative error that sums of floats may have.
_EPSILON = 1e-9

# METIS takes whole numbers, of 32 bits in some builds: all weights of a kind add up to about this.
_METIS_TOTAL = 100_000_000


def round_robin(topology: Topology, nodes: Sequence[Node]) -> Placement:
    """Storm's even scheduler: assigns tasks, in the order of the plan, in turn to all workers that the nodes can
    take."""
    return in_turn(len(topology), nodes)


def in_turn(tasks: int, nodes: Sequence[Node]) -> Placement:
    """Assigns `tasks` tasks in turn to all workers that the nodes can take. Workers are numbered across the nodes: the
    first of each node comes before the second of any."""
    turns = range(max(node.workers for node in nodes))
    workers = tuple(place for turn in turns for place, node in enumerate(nodes) if turn < node.workers)
    return Placement(tuple(nodes), workers, tuple(task % len(workers) for task in range(tasks)))


def jstorm(topology: Topology, nodes: Sequence[Node]) -> Placement:
    """JStorm's default placement (`schedule/default_assign` of alibaba/jstorm), with all workers that the nodes can
    take."""
    workers = _jstorm_workers(nodes)
    return Placement(tuple(nodes), workers, _jstorm_tasks(topology, workers))


def _jstorm_workers(nodes: Sequence[Node]) -> tuple[int, ...]:
    """Returns the node of each worker. Nodes get a worker in turn, and the nodes with the most free slots come first.
    Nodes that already have more than an even share of all slots come last."""
    free = [node.workers for node in nodes]
    held = [0] * len(nodes)
    count = sum(free)
    even = count // len(nodes) + 1
    workers: list[int] = []

    def deal(order: list[int], limit: float) -> list[int]:
        """Assigns tasks to the nodes in this order. Returns the tasks that are left because of the limit."""
        left_out = []
        turn = 0
        while order and len(workers) < count:
            if turn >= len(order):
                turn = 0
            node = order[turn]
            if held[node] >= limit:
                left_out.append(order.pop(turn))
                continue
            workers.append(node)
            free[node] -= 1
            held[node] += 1
            if not free[node]:
                order.pop(turn)
            turn += 1  # also after a pop, as in JStorm: whoever comes after a node that became full is passed over
        return left_out

    left_out = deal(sorted(range(len(nodes)), key=lambda node: -free[node]), even)
    deal(sorted(left_out, key=lambda node: -free[node]), inf)
    return tuple(workers)


def _jstorm_tasks(topology: Topology, workers: Sequence[int]) -> tuple[int, ...]:
    """Returns the worker of each task. It prefers a worker with few tasks of the same component, then one with few
    tasks, then one with many of the components that the task exchanges records with."""
    talks_to = _talks_to(topology)
    share, larger = divmod(len(topology), len(workers))
    on_worker: list[Counter[int]] = [Counter() for _ in workers]
    on_node: Mapping[int, Counter[int]] = {node: Counter() for node in workers}
    open_ = list(range(len(workers)))
    tasks: list[int] = []

    def rank(worker: int, component: int) -> tuple[int, ...]:
        here, around = on_worker[worker], on_node[workers[worker]]
        others = talks_to[component]
        return (
            here[component],
            around[component],
            here.total(),
            around.total(),
            -sum(here[other] for other in others),
            -sum(around[other] for other in others),
        )

    for component in topology.components:
        worker = min((rank(worker, component), worker) for worker in open_)[1]
        tasks.append(worker)
        on_worker[worker][component] += 1
        on_node[workers[worker]][component] += 1
        if on_worker[worker].total() > share:
            larger -= 1
        most = share + 1 if larger else share
        open_ = [worker for worker in open_ if on_worker[worker].total() < most]
    return tuple(tasks)


def _talks_to(topology: Topology) -> dict[int, Collection[int]]:
    """Returns, for each component, the components that it takes input from. A component without inputs gets those that
    take its output."""
    outputs: dict[int, set[int]] = defaultdict(set)
    for component, inputs in topology.inputs.items():
        for source in inputs:
            outputs[source].add(component)
    return {
        component: set(topology.inputs.get(component, ())) or outputs[component]
        for component in set(topology.components)
    }


def traffic_greedy(topology: Topology, nodes: Sequence[Node], *, factor: float = 0.1) -> Placement:
    """Like T-Storm: the tasks with most traffic first, each to the node where it adds the least traffic between nodes
    to what is placed already, and there to the least loaded worker. A node takes no more than its fair share of the
    CPU and `factor` of it more; when none can, the one that is least loaded for its share does. Of nodes that are
    equally good it is also the one least loaded, and of workers and nodes that are equal the first.

    Nothing is moved again, so a task may find no room that other choices before would have left. Raises ValueError
    when a task may run on none of the nodes, or none of those has the memory left that it needs.
    """
    graph = topology.graph.pairs()
    size = np.array([node.workers for node in nodes], dtype=np.float64)
    memory = np.array([node.memory for node in nodes])
    most = shares(nodes) * graph.total_cpu * (1 + factor) * (1 + _EPSILON)
    rows = [slice(*graph.starts[v : v + 2]) for v in range(len(graph))]
    traffic = [fsum(graph.traffic[row]) for row in rows]  # exact: equals must not differ by how they were added up
    load, used = np.zeros(len(nodes)), np.zeros(len(nodes))
    worker_load = [np.zeros(node.workers) for node in nodes]
    workers = workers_of(nodes)
    first = np.searchsorted(workers, np.arange(len(nodes)))
    at = np.full(len(graph), -1, dtype=np.int64)
    tasks = np.zeros(len(graph), dtype=np.int64)
    for v in sorted(range(len(graph)), key=lambda v: -traffic[v]):
        may = np.ones(len(nodes), dtype=np.bool_) if graph.allowed is None else graph.allowed[v]
        if not may.any():
            raise ValueError(f"task {topology.names[v]} may run on none of the nodes")
        may = may & (used + graph.memory[v] <= memory)
        if not may.any():
            raise ValueError(
                f"no node has the {graph.memory[v]:,.0f} bytes of memory left that task {topology.names[v]} needs"
            )
        open_ = may & (load + graph.cpu[v] <= most)
        if open_.any():
            neighbours = graph.neighbours[rows[v]]
            placed = at[neighbours] >= 0
            saved = np.bincount(at[neighbours[placed]], graph.traffic[rows[v]][placed], len(nodes))
            may = open_ & (saved >= saved[open_].max() - _EPSILON * traffic[v])
        node = int(np.where(may, load / size, inf).argmin())
        worker = int(worker_load[node].argmin())
        at[v] = node
        tasks[v] = first[node] + worker
        load[node] += graph.cpu[v]
        used[node] += graph.memory[v]
        worker_load[node][worker] += graph.cpu[v]
    return Placement(tuple(nodes), workers, tuple(tasks.tolist()))


def metis(topology: Topology, nodes: Sequence[Node], *, factor: float = 0.1, seed: int = 0) -> Placement:
    """Assigns tasks to nodes by METIS (see `metis_parts`), and the tasks of each node to its workers in turn. It
    ignores memory, and where tasks may run."""
    return _in_turn(metis_parts(topology.graph.pairs(), shares(nodes), factor, seed), nodes)


def _in_turn(at: Ints, nodes: Sequence[Node]) -> Placement:
    """Assigns the tasks of each node to the workers of the node in turn."""
    workers = workers_of(nodes)
    tasks = np.zeros(len(at), dtype=np.int64)
    for place, node in enumerate(nodes):
        here = np.flatnonzero(at == place)
        tasks[here] = workers.index(place) + np.arange(len(here)) % node.workers
    return Placement(tuple(nodes), workers, tuple(tasks.tolist()))


def metis_parts(graph: TrafficGraph, shares: Floats, factor: float, seed: int) -> Ints:
    """Returns the place of each task, found by METIS. There are as many places as shares, and the shares add up to 1.

    METIS does not keep to the imbalance that it is given: recursive bisection adds up what each split is off by, and
    the k-way scheme leaves places empty when tasks are few. So both are tried, and again with half the imbalance and
    with as good as none where a place got more than its share and `factor` of it more. Taken is the result with the
    least traffic across of those that keep to that, or what comes nearest to it.

    Raises ImportError when pymetis is not installed.
    """
    if len(shares) == 1 or not len(graph):
        return np.zeros(len(graph), dtype=np.int64)
    try:
        from pymetis import CSRAdjacency, Options, part_graph
    except ImportError as error:
        raise ImportError("placement by METIS needs pymetis 2025.2 or later: pip install pymetis") from error

    talking = graph.traffic > 0  # METIS may crash on edges that weigh 0
    before = np.concatenate([[0], np.cumsum(talking)])
    adjacency = CSRAdjacency(before[graph.starts].tolist(), graph.neighbours[talking].tolist())
    cpu = graph.cpu if graph.total_cpu else np.ones(len(graph))
    weights = np.rint(cpu / cpu.sum() * _METIS_TOTAL).astype(np.int64).tolist()
    scaled = graph.traffic[talking] / graph.total_traffic * _METIS_TOTAL
    traffic = np.maximum(1, np.rint(scaled)).astype(np.int64).tolist()
    fair = shares / shares.sum()
    best: tuple[float, float] | None = None
    places = np.zeros(len(graph), dtype=np.int64)
    for recursive in (True, False):
        for imbalance in (factor, factor / 2, 0.0):
            found = np.array(
                part_graph(
                    len(fair),
                    adjacency,
                    vweights=weights,
                    eweights=traffic,
                    tpwgts=fair.tolist(),
                    recursive=recursive,
                    options=Options(ufactor=max(1, round(1000 * imbalance)), seed=seed),
                ).vertex_part,
                dtype=np.int64,
            )
            reached = float((graph.loads(found, len(fair)) / fair).max()) / (graph.total_cpu or 1.0) - 1
            score = (max(0.0, reached - factor - _EPSILON), graph.edge_cut(found))
            if best is None or score < best:
                best, places = score, found
            if not score[0]:
                break
    return places


def turbostream(topology: Topology, nodes: Sequence[Node], *, factor: float = 0.1) -> Placement:
    """The paper's own scheduler: Algorithms 1 and 2 assign tasks to nodes, with the best of all thresholds of Algorithm
    1, and the tasks of a node go to its workers in turn. It considers neither memory nor where tasks may run. Its cost
    grows with the third power of the number of parents, up to 100."""
    return _in_turn(papers(topology.graph.pairs(), shares(nodes), factor), nodes)


def all_of(topology: Topology, nodes: Sequence[Node], *, factor: float = 0.1) -> dict[str, Placement]:
    """Returns all of these placements by name, with METIS only where it is installed."""
    found = {
        "TurboStream": turbostream(topology, nodes, factor=factor),
        "T-Storm-like": traffic_greedy(topology, nodes, factor=factor),
        "JStorm": jstorm(topology, nodes),
        "round-robin": round_robin(topology, nodes),
    }
    with suppress(ImportError):
        found["METIS"] = metis(topology, nodes, factor=factor)
    return found
