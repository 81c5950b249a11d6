"""Algorithm 1 of the TurboStream paper (docs/papers.md: T9): joins the tasks that exchange most records into parent
tasks.

Tasks are visited in order. Each task that is not joined yet is joined with one of its neighbours that are not joined
either, the one with the most traffic, and the two become a parent. A task without such a neighbour becomes a parent by
itself. The traffic between two parents is the traffic between their tasks. The same is done again with the parents,
until no more than `taskNumThreshold` are left, or until no two can be joined. The levels form a binary tree, by which
`expand` turns a placement of the last parents into a placement of the tasks.

(The paper's listing says in line 16 that u becomes a parent by itself. It is v that is left alone.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.placement.traffic import Ints, TrafficGraph


@dataclass(frozen=True)
class Level:
    """Holds the result of one round: `parents[v]` is the number of the parent of v, a task of the level before, and
    `graph` is the graph of the parents."""

    parents: Ints
    graph: TrafficGraph


def consolidate_once(
    graph: TrafficGraph, order: Sequence[int] | None = None, most_cpu: float | None = None, only_in: Ints | None = None
) -> Level:
    """Runs Algorithm 1 once. Two tasks that may not run on the same node are never joined. Three parameters go beyond
    the paper: `order` is the order in which tasks are visited, `most_cpu` limits the CPU of a parent of two tasks, and
    with `only_in` only tasks with the same number there are joined."""
    count = len(graph)
    starts, neighbours, traffic = graph.starts.tolist(), graph.neighbours.tolist(), graph.traffic.tolist()
    cpu = graph.cpu.tolist()
    groups = None if only_in is None else only_in.tolist()
    allowed = graph.allowed
    parents = [-1] * count
    made = 0
    for v in range(count) if order is None else order:
        if parents[v] >= 0:
            continue
        best, most = -1, -1.0
        for place in range(starts[v], starts[v + 1]):
            u = neighbours[place]
            if parents[u] >= 0 or traffic[place] <= most:  # of equal neighbours the first
                continue
            if most_cpu is not None and cpu[u] + cpu[v] > most_cpu:
                continue
            if groups is not None and groups[u] != groups[v]:
                continue
            if allowed is not None and not (allowed[u] & allowed[v]).any():
                continue
            best, most = u, traffic[place]
        parents[v] = made
        if best >= 0:
            parents[best] = made
        made += 1
    merged = np.array(parents, dtype=np.int64)
    return Level(merged, graph.merged(merged, made))


def consolidate(graph: TrafficGraph, task_num_threshold: int) -> list[Level]:
    """Repeats Algorithm 1 until at most `task_num_threshold` parents are left, or no two of them exchange records."""
    levels: list[Level] = []
    while len(graph) > max(1, task_num_threshold):
        level = consolidate_once(graph)
        if len(level.graph) == len(graph):
            break
        levels.append(level)
        graph = level.graph
    return levels


def expand(levels: Sequence[Level], places: Ints) -> Ints:
    """Returns the place of each task, given the place of each parent of the last level."""
    for level in reversed(levels):
        places = places[level.parents]
    return places
