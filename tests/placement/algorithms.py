"""What must hold of the paper's two algorithms on any graph of a few tasks, by looking at all there is."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np

from penstock.placement.assignment import split
from penstock.placement.consolidation import consolidate_once
from penstock.placement.traffic import TrafficGraph
from tests.placement.small import Pairs


def check_consolidation(tasks: int, pairs: Pairs) -> None:
    """A parent has one task or two that talk; of two that talk not both are left alone; traffic between parents is
    what crosses."""
    graph = TrafficGraph.of(tasks, [(u, v, 1.0 + u + 2 * v) for u, v in pairs])
    level = consolidate_once(graph)
    members = [np.flatnonzero(level.parents == parent).tolist() for parent in range(len(level.graph))]
    assert sorted(itertools.chain(*members)) == list(range(tasks)), pairs
    alone = {them[0] for them in members if len(them) == 1}
    assert all(tuple(them) in pairs for them in members if len(them) == 2), pairs
    assert all(len(them) <= 2 for them in members), pairs
    assert not any(u in alone and v in alone for u, v in pairs), pairs
    assert level.graph.total_traffic == graph.edge_cut(level.parents), pairs


def check_split(tasks: int, pairs: Pairs) -> None:
    """What it gives is within the factor and no better than the best split; it gives something wherever there is a
    split within the factor, as equal tasks can always be gathered one by one. (Of tasks that are not equal it may give
    nothing: it is greedy. That is what `assign` and the refinement are for.)"""
    graph = TrafficGraph.of(tasks, [(u, v, 1.0) for u, v in pairs])
    for target in (0.5, 2 / 3):
        near = [side for side in _sides(tasks) if abs(len(side) / tasks - target) < 0.1]
        found = split(graph, target, 0.1)
        if found is None:
            assert not near, (pairs, target)
        else:
            assert frozenset(found) in near, (pairs, target)
            least = min(sum((u in side) != (v in side) for u, v in pairs) for side in near)
            assert graph.edge_cut(np.isin(np.arange(tasks), list(found))) >= least, (pairs, target)


@cache
def _sides(tasks: int) -> list[frozenset[int]]:
    return [frozenset(side) for size in range(tasks + 1) for side in itertools.combinations(range(tasks), size)]
