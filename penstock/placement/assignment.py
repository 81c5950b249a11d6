"""Algorithm 2 of the TurboStream paper (docs/papers.md: T10): assigns parent tasks to nodes by splitting the tasks in
two again and again.

`split` begins at each task in turn and gathers the tasks around it, breadth first, as long as that brings their share
of the work nearer to the target. Of the results within `factor` of the target it takes the one with the least traffic
across. `assign` splits the nodes in halves, ceil(N/2) and the rest, with targets by what the nodes can take, until each
part has one node. Both use the names of the paper's listing.

The paper consolidates the tasks first, until `taskNumThreshold` of them are left, and leaves open which threshold is
good. A threshold that was chosen for large graphs does nothing on small ones, and without consolidation the gathering
tears tasks apart that exchange most. So `assign_from_each_level` tries all thresholds that make a difference, of which
there are as many as consolidation has levels, and the caller takes the best result.

This is the paper's algorithm as it is otherwise. It considers neither memory nor where tasks may run.
`placement/planner.py` uses its results as some of several beginnings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from penstock.placement.consolidation import Level, consolidate, expand
from penstock.placement.traffic import Floats, Ints, TrafficGraph


def split(graph: TrafficGraph, target: float, factor: float) -> set[int] | None:
    """Returns the tasks of the first part (RES_SET), whose share of the CPU is within `factor` of `target`, or None
    when no starting task gives such a part."""
    return _least(graph, target, factor)[0]


def assign(graph: TrafficGraph, shares: Floats, factor: float, task_num_threshold: int) -> Ints:
    """Returns the node of each task, by consolidation and then by splits. When no split is within `factor`, it takes
    the split that comes nearest to its target, a case for which the paper has no rule."""
    return _assigned(graph, consolidate(graph, task_num_threshold), shares, factor)


def assign_from_each_level(graph: TrafficGraph, shares: Floats, factor: float, parents_most: int) -> Iterator[Ints]:
    """Generates the results of `assign` for all thresholds that make a difference, the largest first. The thresholds
    are at most `parents_most`, because the time grows with the third power of the parents, and at least the number of
    nodes, because each node is to get a parent. There is always a result, also where no threshold is between both."""
    levels = consolidate(graph, 1)
    sizes = [len(graph), *(len(level.graph) for level in levels)]
    largest = next((count for count, size in enumerate(sizes) if size <= parents_most), len(levels))
    for count in range(largest, len(sizes)):
        if count == largest or sizes[count] >= len(shares):
            yield _assigned(graph, levels[:count], shares, factor)


def _assigned(graph: TrafficGraph, levels: Sequence[Level], shares: Floats, factor: float) -> Ints:
    parents = levels[-1].graph if levels else graph
    places = np.zeros(len(parents), dtype=np.int64)
    _assign(parents, np.arange(len(parents)), list(range(len(shares))), shares, factor, places)
    return expand(levels, places)


def _assign(
    graph: TrafficGraph, tasks: Ints, nodes: Sequence[int], shares: Floats, factor: float, places: Ints
) -> None:
    if len(nodes) == 1 or not len(tasks):
        places[tasks] = nodes[0]
        return
    half = -(-len(nodes) // 2)
    target = float(shares[list(nodes[:half])].sum() / shares[list(nodes)].sum())
    part = graph.part(tasks)
    found, nearest = _least(part, target, factor)
    first = np.zeros(len(part), dtype=np.bool_)
    first[list(nearest if found is None else found)] = True
    _assign(graph, tasks[first], nodes[:half], shares, factor, places)
    _assign(graph, tasks[~first], nodes[half:], shares, factor, places)


def _least(graph: TrafficGraph, target: float, factor: float) -> tuple[set[int] | None, set[int]]:
    """Returns RES_SET, and the gathered tasks that come nearest to the target."""
    starts, neighbours, traffic = graph.starts.tolist(), graph.neighbours.tolist(), graph.traffic.tolist()
    weight = graph.cpu.tolist()
    total_weight = graph.total_cpu or 1.0
    res_set: set[int] | None = None
    nearest: set[int] = set()
    distance = float("inf")
    min_data_stream = float("inf")
    for start in range(len(graph)):
        travel_queue = deque([start])
        seen = {start}  # visited, or in the queue
        unvisited = iter(range(len(graph)))
        gather_tasks: set[int] = set()
        gather_weig = balance = cut_data_stream = 0.0
        while travel_queue and balance < target:
            c_task = travel_queue.popleft()
            temp_weig = weight[c_task] + gather_weig
            if abs(temp_weig / total_weight - target) < abs(balance - target):
                gather_tasks.add(c_task)
                gather_weig, balance = temp_weig, temp_weig / total_weight
                for place in range(starts[c_task], starts[c_task + 1]):
                    neighbour = neighbours[place]
                    cut_data_stream += -traffic[place] if neighbour in gather_tasks else traffic[place]
                    if neighbour not in seen:
                        seen.add(neighbour)
                        travel_queue.append(neighbour)
            if not travel_queue and abs(balance - target) > factor:
                other = next((task for task in unvisited if task not in seen), None)
                if other is not None:
                    seen.add(other)
                    travel_queue.append(other)
        if abs(balance - target) < factor and cut_data_stream < min_data_stream:
            min_data_stream, res_set = cut_data_stream, gather_tasks
        if abs(balance - target) < distance:
            distance, nearest = abs(balance - target), gather_tasks
    return res_set, nearest
