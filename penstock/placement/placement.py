"""Says which worker has which tasks and which node has which workers, and how good this placement is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.placement.traffic import Floats, Ints, Node, TrafficGraph


@dataclass(frozen=True)
class Placement:
    """A placement: `tasks[v]` is the worker of task v, and `workers[w]` is the node of worker w, as an index into
    `nodes`."""

    nodes: tuple[Node, ...]
    workers: tuple[int, ...]
    tasks: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(not 0 <= node < len(self.nodes) for node in self.workers):
            raise ValueError(f"a worker is on a node beyond 0 to {len(self.nodes) - 1}")
        if any(not 0 <= worker < len(self.workers) for worker in self.tasks):
            raise ValueError(f"a task is on a worker beyond 0 to {len(self.workers) - 1}")

    @cached_property
    def worker_of(self) -> Ints:
        """Returns the worker of each task."""
        return np.array(self.tasks, dtype=np.int64)

    @cached_property
    def node_of(self) -> Ints:
        """Returns the node of each task."""
        return np.array(self.workers, dtype=np.int64)[self.worker_of]

    @cached_property
    def worker_speeds(self) -> Floats:
        """Returns the speed of each worker."""
        return speeds(self.nodes, self.workers)

    def between_nodes(self, graph: TrafficGraph) -> float:
        """Returns the traffic that crosses nodes."""
        return graph.edge_cut(self.node_of)

    def between_workers(self, graph: TrafficGraph) -> float:
        """Returns the traffic that crosses workers, on the same node or not."""
        return graph.edge_cut(self.worker_of)

    def intra_node_share(self, graph: TrafficGraph) -> float:
        """Returns which part of the traffic between different workers stays on its node (the paper's Table II); 1 when
        there is no such traffic."""
        crossing = self.between_workers(graph)
        return 1 - self.between_nodes(graph) / crossing if crossing else 1.0

    def imbalance(self, graph: TrafficGraph) -> float:
        """Returns the load of the fullest node over its fair share, less 1. The result 0 is perfect balance."""
        total = graph.total_cpu
        if not total:
            return 0.0
        return float((graph.loads(self.node_of, len(self.nodes)) / (shares(self.nodes) * total)).max()) - 1


def shares(nodes: Sequence[Node]) -> Floats:
    """Returns each node's fair share of the work: its part of the workers, each of which counts as its speed."""
    work = np.array([node.workers * node.speed for node in nodes], dtype=np.float64)
    fair: Floats = work / work.sum()
    return fair


def speeds(nodes: Sequence[Node], workers: Sequence[int]) -> Floats:
    """Returns the speed of each worker, which is that of its node."""
    return np.array([nodes[place].speed for place in workers], dtype=np.float64)


def spread(workers: int, free: Sequence[int], most: Sequence[int]) -> list[int]:
    """Returns how many of the workers each node gets. `free` is the number of workers for which each node has room now,
    and `most` that for which it has room when nobody else uses it.

    Each node gets one, because it was asked for. The others go where the part of the free room that is taken stays
    smallest; so nodes with equal room get equally many. When no node has free room left, they go to nodes where room
    can become free, in the same way; and what fits nowhere goes to the nodes with the fewest workers, so that the error
    of the reservation says what is missing. Of equal nodes the first comes first."""
    if workers < len(free):
        raise ValueError(f"{workers} workers for {len(free)} nodes; each node gets at least one")
    counts = [1] * len(free)
    for _ in range(workers - len(free)):
        for room in (free, most):
            fit = [place for place, count in enumerate(counts) if count < room[place]]
            if fit:
                counts[min(fit, key=lambda place: (counts[place] + 1) / room[place])] += 1
                break
        else:
            counts[min(range(len(counts)), key=counts.__getitem__)] += 1
    return counts


def workers_of(nodes: Sequence[Node]) -> tuple[int, ...]:
    """Returns the node of each worker when all workers that the nodes can take are started. The workers of a node are
    consecutive."""
    return tuple(place for place, node in enumerate(nodes) for _ in range(node.workers))
