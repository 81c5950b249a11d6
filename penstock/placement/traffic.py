"""The graph of a job's tasks, for planning: tasks with the CPU and memory that they use, and the traffic between them.

An undirected graph over numbered tasks, as arrays (compressed rows, each edge in both directions): planning only asks
what crosses between two places, whichever way it goes. Where tasks may run is part of it: a task may be allowed on some
nodes only, and an *anchor* is a task without weight that stands for something outside of the job, such as the data that
a source reads: it is pinned to its node, so that what reads much of it is drawn there (docs/papers.md: T10 and beyond).

What a task sends to all tasks of an operator is no edge between two tasks: one copy goes to each worker, and one to
each node, however many of the receivers are there (docs/papers.md: W2). Such traffic is a hyperedge, `SharedTraffic`.

Units are the caller's, as long as they are the same throughout: CPU in cores of speed 1, memory in bytes, traffic in
bytes or records a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.placement.shape import SharedTraffic, TrafficEdge

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Node:
    """A machine, as planning sees it. `workers`: how many worker processes of this job it can take; `memory`: bytes
    that the job's tasks may use there; `speed`: of one of its cores, relative to a core of a node whose speed is 1. A
    node's share of the work is its number of workers times its speed."""

    name: str
    workers: int = 1
    memory: float = float("inf")
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.speed < float("inf"):
            raise ValueError(f"node {self.name!r} has speed={self.speed}; it must be above 0, and finite")
        if self.workers < 1:
            raise ValueError(f"node {self.name!r} has workers={self.workers}; leave out nodes that can take none")


@dataclass(frozen=True)
class TrafficGraph:
    """See the module's docstring. The neighbours of task v are `neighbours[starts[v]:starts[v + 1]]`, in ascending
    order, and `traffic` at the same places; both directions hold the same figure, and nothing is its own neighbour.
    These are the edges between two tasks; `shared` has the hyperedges."""

    starts: Ints  # (tasks + 1,)
    neighbours: Ints  # (2 * edges,)
    traffic: Floats  # (2 * edges,)
    cpu: Floats  # (tasks,)
    memory: Floats  # (tasks,)
    allowed: Bools | None = None  # (tasks, nodes): where each may run; None: anywhere
    shared: tuple[SharedTraffic, ...] = ()

    @classmethod
    def of(
        cls,
        tasks: int,
        edges: Iterable[TrafficEdge],
        *,
        cpu: Sequence[float] | Floats | None = None,
        memory: Sequence[float] | Floats | None = None,
        allowed: Bools | None = None,
        shared: Iterable[SharedTraffic] = (),
    ) -> TrafficGraph:
        """Makes a graph of `tasks` tasks. Edges between the same two tasks, in either direction, are added up, and so
        are hyperedges of the same tasks. Without `cpu` every task weighs 1; without `memory` every task needs 0
        bytes."""
        listed = list(edges)
        ends = np.array([edge[:2] for edge in listed], dtype=np.int64).reshape(-1, 2)
        weight = np.array([edge[2] for edge in listed], dtype=np.float64)
        if len(ends) and (ends.min() < 0 or ends.max() >= tasks):
            raise ValueError(f"an edge names a task beyond 0 to {tasks - 1}")
        if (weight < 0).any() or not np.isfinite(weight).all():
            raise ValueError("traffic must be 0 or more, and finite")
        weights = np.ones(tasks) if cpu is None else np.array(cpu, dtype=np.float64)
        bytes_ = np.zeros(tasks) if memory is None else np.array(memory, dtype=np.float64)
        for name, values in (("cpu", weights), ("memory", bytes_)):
            if values.shape != (tasks,) or (values < 0).any() or not np.isfinite(values).all():
                raise ValueError(f"{name} must be {tasks} figures of 0 or more")
        return cls(*_rows(tasks, ends[:, 0], ends[:, 1], weight), weights, bytes_, allowed, _added_up(shared))

    def __len__(self) -> int:
        return len(self.cpu)

    @cached_property
    def total_cpu(self) -> float:
        """Returns the CPU of all tasks."""
        return float(self.cpu.sum())

    @cached_property
    def total_traffic(self) -> float:
        """Returns the traffic that would cross if each task were at a place of its own."""
        copies = sum(one.traffic * (len(one.tasks) - 1) for one in self.shared)
        return float(self.traffic.sum()) / 2 + copies

    @cached_property
    def vertices(self) -> Ints:
        """Returns the vertex to which each entry of `neighbours` belongs."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    @cached_property
    def near(self) -> list[list[tuple[int, float]]]:
        """Returns the neighbours of each task, with the traffic to each of them, as lists."""
        pairs = list(zip(self.neighbours.tolist(), self.traffic.tolist(), strict=True))
        starts = self.starts.tolist()
        return [pairs[begin:end] for begin, end in pairwise(starts)]

    def edge_cut(self, places: npt.ArrayLike) -> float:
        """Returns the edge cut: the traffic between tasks at different places. `places[v]` is any number that names the
        place of v. Of shared traffic a copy goes to each place besides the sender's that has a receiver."""
        at = np.asarray(places)
        return float(self.traffic[at[self.vertices] != at[self.neighbours]].sum()) / 2 + self._copies(at)

    def _copies(self, at: npt.NDArray[Any]) -> float:
        """Returns the shared traffic between different places."""
        if not self.shared:
            return 0.0
        _, place = np.unique(at, return_inverse=True)
        edges, tasks, traffic = self._ends_of_shared
        count = len(self) + 1
        reached = np.unique(edges * count + place.reshape(-1)[tasks]) // count
        return float((traffic * (np.bincount(reached, minlength=len(traffic)) - 1)).sum())

    @cached_property
    def _ends_of_shared(self) -> tuple[Ints, Ints, Floats]:
        """Returns the hyperedge and the task of each end of a hyperedge, and the traffic of each hyperedge."""
        edges = np.repeat(np.arange(len(self.shared)), [len(one.tasks) for one in self.shared])
        tasks = np.array([task for one in self.shared for task in one.tasks], dtype=np.int64)
        return edges, tasks, np.array([one.traffic for one in self.shared], dtype=np.float64)

    def pairs(self) -> TrafficGraph:
        """Returns the same traffic as edges between two tasks only, as if each receiver got a copy of its own. Searches
        that know only edges use it; what a placement costs is more in it than in truth."""
        if not self.shared:
            return self
        edges = [(one.tasks[0], task, one.traffic) for one in self.shared for task in one.tasks[1:]]
        others = TrafficGraph.of(len(self), edges)
        return replace(self, shared=()).plus(others, 1.0)

    def hop_cost(self, workers: npt.ArrayLike, nodes: npt.ArrayLike, node_cost: float) -> float:
        """Returns the traffic between workers of a node, and `node_cost` times the traffic between nodes. `workers[v]`
        and `nodes[v]` name the worker and the node of v."""
        return self.edge_cut(workers) + (node_cost - 1) * self.edge_cut(nodes)

    def loads(self, places: npt.ArrayLike, count: int) -> Floats:
        """Returns the CPU at each of the places 0 to count - 1."""
        return _summed(np.asarray(places), self.cpu, count)

    def merged(self, parents: Ints, count: int) -> TrafficGraph:
        """Returns the graph of `count` parents, where task v becomes part of `parents[v]`. Traffic inside a parent
        disappears, and a parent may run where all of its tasks may."""
        rows = _rows(count, parents[self.vertices], parents[self.neighbours], self.traffic / 2)
        allowed = None
        if self.allowed is not None:
            allowed = np.ones((count, self.allowed.shape[1]), dtype=np.bool_)
            np.logical_and.at(allowed, parents, self.allowed)
        return TrafficGraph(
            *rows,
            _summed(parents, self.cpu, count),
            _summed(parents, self.memory, count),
            allowed,
            _renamed(self.shared, parents),
        )

    def part(self, tasks: Ints) -> TrafficGraph:
        """Returns the graph of these tasks alone, numbered in the given order."""
        number = np.full(len(self), -1, dtype=np.int64)
        number[tasks] = np.arange(len(tasks))
        a, b = number[self.vertices], number[self.neighbours]
        inside = (a >= 0) & (b >= 0)
        rows = _rows(len(tasks), a[inside], b[inside], self.traffic[inside] / 2)
        allowed = None if self.allowed is None else self.allowed[tasks]
        return TrafficGraph(*rows, self.cpu[tasks], self.memory[tasks], allowed, _renamed(self.shared, number))

    def with_anchors(self, anchors: Iterable[tuple[int, int, float]], nodes: int) -> TrafficGraph:
        """Returns the graph with an anchor for each (task, node, traffic): what the task reads or writes at a node. The
        anchors are numbered after the tasks, and have a fixed place in every plan."""
        drawn = list(anchors)
        count = len(self)
        edges = [(task, count + i, traffic) for i, (task, _, traffic) in enumerate(drawn)]
        allowed = np.ones((count + len(drawn), nodes), dtype=np.bool_)
        if self.allowed is not None:
            allowed[:count] = self.allowed
        for i, (_, node, _) in enumerate(drawn):
            allowed[count + i] = np.arange(nodes) == node
        ends: Any = np.array([edge[:2] for edge in edges], dtype=np.int64).reshape(-1, 2)
        rows = _rows(
            len(allowed),
            np.concatenate([self.vertices, ends[:, 0]]),
            np.concatenate([self.neighbours, ends[:, 1]]),
            np.concatenate([self.traffic / 2, [edge[2] for edge in edges]]),
        )
        nothing = np.zeros(len(drawn))
        cpu, memory = (np.concatenate([values, nothing]) for values in (self.cpu, self.memory))
        return TrafficGraph(*rows, cpu, memory, allowed, self.shared)

    def plus(self, other: TrafficGraph, times: float) -> TrafficGraph:
        """Returns the graph of the same tasks with a multiple of the traffic of another graph added."""
        rows = _rows(
            len(self),
            np.concatenate([self.vertices, other.vertices]),
            np.concatenate([self.neighbours, other.neighbours]),
            np.concatenate([self.traffic / 2, times * other.traffic / 2]),
        )
        shared = _added_up([*self.shared, *(replace(one, traffic=times * one.traffic) for one in other.shared)])
        return TrafficGraph(*rows, self.cpu, self.memory, self.allowed, shared)

    def anywhere(self) -> TrafficGraph:
        """Returns the same tasks without any restriction on where they run."""
        return replace(self, allowed=None)


def _added_up(shared: Iterable[SharedTraffic]) -> tuple[SharedTraffic, ...]:
    """Returns the hyperedges that connect several tasks. Those of the same tasks are added up."""
    traffic: dict[tuple[int, ...], float] = {}
    for one in shared:
        if len(one.tasks) > 1:
            traffic[one.tasks] = traffic.get(one.tasks, 0.0) + one.traffic
    return tuple(SharedTraffic(tasks, sum_) for tasks, sum_ in traffic.items())


def _renamed(shared: Iterable[SharedTraffic], names: Ints) -> tuple[SharedTraffic, ...]:
    """Returns the hyperedges with `names[v]` for each task v. A receiver whose name is below 0 is left out, and so is
    all that such a sender sends."""
    return _added_up(
        SharedTraffic(tuple(dict.fromkeys(name for name in names[list(one.tasks)].tolist() if name >= 0)), one.traffic)
        for one in shared
        if names[one.tasks[0]] >= 0
    )


def _summed(places: Ints, values: Floats, count: int) -> Floats:
    """Returns the sum of the values at each of the places 0 to count - 1."""
    return np.bincount(places, weights=values, minlength=count).astype(np.float64, copy=False)


def _rows(tasks: int, a: Ints, b: Ints, traffic: Floats) -> tuple[Ints, Ints, Floats]:
    """Returns compressed rows of the edges (a[i], b[i]) in both directions. Parallel edges are added up."""
    apart = a != b
    a, b, traffic = a[apart], b[apart], traffic[apart]
    keys, place = np.unique(np.concatenate([a * tasks + b, b * tasks + a]), return_inverse=True)
    sums = _summed(place.reshape(-1), np.concatenate([traffic, traffic]), len(keys))
    rows = keys // max(1, tasks)
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=tasks))])
    return starts.astype(np.int64), keys % max(1, tasks), sums
