"""The fewest nodes that must get another parent, found by trying everything, or by an integer programme."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from penstock.runtime.multicast.reach import reach, units_to_reach
from penstock.runtime.multicast.tree import Tree


def profile(nodes: int, limit: int) -> list[int]:
    """How many nodes are in each layer of a tree of so many destinations."""
    reached = [min(reach(units, limit), nodes + 1) for units in range(units_to_reach(nodes, limit) + 1)]
    return [now - before for before, now in zip([0, *reached], reached, strict=False)]


def every_tree(root: int, nodes: Sequence[int], limit: int) -> Iterator[Tree]:
    """All trees, with children in all orders, that have the right number of nodes in each layer."""
    right = profile(len(nodes), limit)
    for parents in product([root, *nodes], repeat=len(nodes)):
        among: dict[int, list[int]] = {}
        for node, parent in zip(nodes, parents, strict=True):
            among.setdefault(parent, []).append(node)
        if max(map(len, among.values())) > limit:
            continue
        for orders in product(*(permutations(children) for children in among.values())):
            try:
                tree = Tree(root, dict(zip(among, orders, strict=True)))
            except ValueError:
                break  # no order makes a tree of it
            if [list(tree.layer.values()).count(layer) for layer in range(len(right))] == right:
                yield tree
                break  # the other orders have the same parents


def by_integer_programme(tree: Tree, nodes: Sequence[int], limit: int) -> int:
    """The fewest changes: each node gets a layer, and a node keeps its parent when there is a place for it there.

    x[v, t]: node v is in layer t. y[v, s, t]: v is in layer t and keeps its parent, which is in layer s.
    """
    right = profile(len(nodes), limit)
    layers = range(len(right))
    everybody = [tree.root, *nodes]
    there = set(everybody)
    kept = [(node, parent) for node, parent in tree.parent.items() if {node, parent} <= there]
    x = {(node, layer): place for place, (node, layer) in enumerate(product(everybody, layers))}
    y = {
        (node, parent, above, layer): len(x) + place
        for place, ((node, parent), above, layer) in enumerate(
            (edge, above, layer) for edge in kept for above in layers for layer in layers if 1 <= layer - above <= limit
        )
    }
    rows: list[tuple[dict[int, float], float, float]] = [({x[tree.root, 0]: 1}, 1, 1)]
    rows += [({x[node, layer]: 1 for layer in layers}, 1, 1) for node in everybody]
    rows += [({x[node, layer]: 1 for node in everybody}, right[layer], right[layer]) for layer in layers]
    below: dict[tuple[int, int, int], dict[int, float]] = {}
    own: dict[tuple[int, int], dict[int, float]] = {}
    for (node, parent, above, layer), variable in y.items():
        below.setdefault((parent, above, layer), {})[variable] = 1
        own.setdefault((node, layer), {})[variable] = 1
    # A node has one child in each layer below it.
    rows += [({**terms, x[parent, above]: -1}, -np.inf, 0) for (parent, above, _), terms in below.items()]
    rows += [({**terms, x[at]: -1}, -np.inf, 0) for at, terms in own.items()]
    entries = [(row, column, value) for row, (terms, _, _) in enumerate(rows) for column, value in terms.items()]
    at_row, at_column, values = (np.array(column) for column in zip(*entries, strict=True))
    matrix = coo_array((values, (at_row, at_column)), shape=(len(rows), len(x) + len(y)))
    solved = milp(
        np.concatenate([np.zeros(len(x)), -np.ones(len(y))]),
        constraints=LinearConstraint(matrix.tocsr(), [row[1] for row in rows], [row[2] for row in rows]),
        integrality=np.ones(len(x) + len(y)),
        bounds=Bounds(0, 1),
    )
    assert solved.status == 0, solved.message
    return len(tree.destinations & there) - round(-solved.fun)
