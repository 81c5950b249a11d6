"""Adapts a tree to another out-degree limit or to other nodes, so that few nodes get another parent
(docs/papers.md: W6).

The new tree has the *shape* of a fresh non-blocking tree: after t time units, as many nodes have a record as the
recurrence L(t) allows. The paper's rules, by which nodes get to earlier layers, end there too. All layers but the last
are full, so the places in them are known before it is known which node takes which place. Each place lies below its
parent's place, and a node keeps its parent when both of their places fit. A child may get another place in the sending
order of its parent, since no connection changes by that.

The paper takes one node after the other, which leads to the right shape but may change more nodes than necessary: a
whole subtree that gets to an earlier layer costs one change, as a leaf does. Here the places are filled from the first
to the last by a rule (`_filled`), which looks ahead no further than one place, twice, and the better result counts. It
takes about a millisecond for 60 nodes. Trees of three nodes change as few parents as possible; larger ones change some
in vain (docs/papers.md: W6).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from penstock.runtime.multicast.change_problem import Problem
from penstock.runtime.multicast.tree import Tree


def adapted(tree: Tree, destinations: Sequence[int], limit: int) -> Tree:
    """Returns the tree of these destinations, in which few nodes have another parent than in the given tree. Nodes that
    are new join where there is room; children of nodes that have left get another parent."""
    if len(set(destinations)) < len(destinations) or tree.root in destinations:
        raise ValueError("the destinations name a node twice, or the root")
    if not destinations:
        return Tree(tree.root, {})
    problem = Problem.of(tree, destinations, limit)
    return problem.tree(max((_filled(problem, great) for great in (False, True)), key=problem.kept))


def changed_parents(before: Tree, after: Tree) -> frozenset[int]:
    """Returns the nodes of both trees that have another parent in `after`."""
    return frozenset(node for node, parent in after.parent.items() if before.parent.get(node, parent) != parent)


def _filled(problem: Problem, great: bool) -> list[int]:
    """Fills the places by a rule.

    A place goes to a child of the node above it, if that has one left: to the one that was in the same layer, or else
    to the one with the most nodes below it. Otherwise the place goes to the greatest subtree whose old parent is gone
    or has more children than it may keep; `great` says whether such a parent gives up its greatest subtrees or its
    least ones. If there is none, one of the last nodes comes forward.
    """
    p = problem
    occupants = [p.root]
    placed = {p.root}
    left: dict[int, list[int]] = {}
    last = iter(sorted(p.nodes[1:], key=lambda node: (-p.old_layer[node], p.weight[node])))

    def rank(node: int) -> tuple[int, int, int]:
        return (-p.weight[node], p.old_layer[node], node)

    def keep_kids(node: int, layer: int) -> None:
        """A node that has its place keeps as many children as the layers below have places for them."""
        kids = sorted((kid for kid in p.kids[node] if kid not in placed), key=rank)
        surplus = max(0, len(kids) - min(p.limit, p.units - layer))
        left[node] = kids[surplus:] if great else kids[: len(kids) - surplus]
        for kid in kids[:surplus] if great else kids[len(kids) - surplus :]:
            heappush(homeless, rank(kid))

    homeless = [rank(node) for node in p.nodes[1:] if node not in p.parent]
    heapify(homeless)
    keep_kids(p.root, 0)
    for place in range(1, p.full):
        own = [kid for kid in left[occupants[p.above[place]]] if kid not in placed]
        while homeless and homeless[0][-1] in placed:
            heappop(homeless)
        if own:
            chosen = next((kid for kid in own if p.old_layer[kid] == p.layer[place]), own[0])
        elif homeless:
            chosen = heappop(homeless)[-1]
        else:
            chosen = next(node for node in last if node not in placed)
        occupants.append(chosen)
        placed.add(chosen)
        keep_kids(chosen, p.layer[place])
    return occupants
