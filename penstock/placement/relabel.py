"""Names the workers of a new placement such that few tasks migrate.

A placement says which tasks are together, but not on which of several equal workers. The workers of a node are equal,
and so are nodes that take as many workers, have as much memory and are as fast. Each worker of the new placement gets
the name of the running worker with which it has most tasks in common.
"""

from __future__ import annotations

import numpy as np

from penstock.placement.placement import Placement
from penstock.placement.traffic import Ints


def relabelled(running: Placement, new: Placement, *, keep_nodes: bool = False) -> Placement:
    """Returns the new placement, of the same tasks on the same nodes, with workers named such that few tasks move. With
    `keep_nodes` the nodes keep their names, because some tasks are bound to certain nodes."""
    workers = len(running.workers)
    overlap = np.zeros((workers, workers), dtype=np.int64)
    np.add.at(overlap, (new.worker_of, running.worker_of), 1)
    node_names = {node: node for node in range(len(new.nodes))} if keep_nodes else _nodes(running, new, overlap)
    names = np.full(workers, -1, dtype=np.int64)
    for node in range(len(new.nodes)):
        mine = [w for w, of in enumerate(new.workers) if of == node]
        theirs = [w for w, of in enumerate(running.workers) if of == node_names[node]]
        for one, other in _pairs(overlap, mine, theirs):
            names[one] = other
    return Placement(running.nodes, running.workers, tuple(names[new.worker_of].tolist()))


def _nodes(running: Placement, new: Placement, overlap: Ints) -> dict[int, int]:
    """Returns, for each node of the new placement, the node of the running placement that it is to be."""
    count = len(new.nodes)
    between = np.zeros((count, count), dtype=np.int64)
    np.add.at(between, (np.array(new.workers)[:, None], np.array(running.workers)[None, :]), overlap)
    names: dict[int, int] = {}
    kinds = [(node.workers, node.memory, node.speed) for node in new.nodes]
    for kind in set(kinds):
        alike = [place for place, other in enumerate(kinds) if other == kind]
        names.update(_pairs(between, alike, alike))
    return names


def _pairs(overlap: Ints, ones: list[int], others: list[int]) -> list[tuple[int, int]]:
    """Pairs each item of one list with one of the other; pairs with the most in common come first."""
    found: list[tuple[int, int]] = []
    left, right = list(ones), list(others)
    while left:
        one, other = max(((a, b) for a in left for b in right), key=lambda pair: (overlap[pair], pair[0] == pair[1]))
        left.remove(one)
        right.remove(other)
        found.append((one, other))
    return found
