"""Adapts a tree to another out-degree limit or to other nodes, so that few nodes get another parent
(docs/papers.md: W6).

The new tree has the *shape* of a fresh non-blocking tree: after t time units, as many nodes have a record as the
recurrence L(t) allows. All layers but the last are full, so the *places* in them are known before it is known which
node takes which place. Each place lies below its parent's place, and a node keeps its parent when both of their places
fit. A child may get another place in the sending order of its parent, since no connection changes by that.

The paper takes one node after the other, which leads to the right shape but may change more nodes than necessary: a
whole subtree that gets to an earlier layer costs one change, as a leaf does. Here the places are filled from the first
to the last by a rule, twice, and the better result counts. It takes about a millisecond for 60 nodes. Trees of three
nodes change as few parents as possible; larger ones change some in vain (docs/papers.md: W6).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from penstock.runtime.multicast.building import non_blocking
from penstock.runtime.multicast.reach import reach, units_to_reach
from penstock.runtime.multicast.tree import Tree


def adapted(tree: Tree, destinations: Sequence[int], limit: int) -> Tree:
    """Returns the tree of these destinations, in which few nodes have another parent than in the given tree. Nodes that
    are new join where there is room; children of nodes that have left get another parent."""
    if len(set(destinations)) < len(destinations) or tree.root in destinations:
        raise ValueError("the destinations name a node twice, or the root")
    if not destinations:
        return Tree(tree.root, {})
    change = _Change(tree, destinations, limit)
    return Tree.of_parents(tree.root, max(map(change.parents, (False, True)), key=change.kept))


class _Change:
    """The change of a tree. Its nodes and their old parents are those that are still there."""

    def __init__(self, tree: Tree, destinations: Sequence[int], limit: int) -> None:
        there = {tree.root, *destinations}
        self._limit = limit
        self._units = units_to_reach(len(destinations), limit)  # the last layer
        self._shape = non_blocking(0, range(1, reach(self._units - 1, limit)), limit)  # of the full layers
        self._root = tree.root
        self._nodes = list(dict.fromkeys((*(node for node in tree.parent if node in there), *destinations)))
        self._parent = {node: above for node, above in tree.parent.items() if node in there and above in there}
        self._children = {node: [child for child in tree.of(node) if child in there] for node in there}
        self._layer = {node: tree.layer.get(node, tree.last_layer + 1) for node in self._nodes}
        self._weight = dict.fromkeys(there, 1)  # the nodes below a node, and itself
        for node in reversed(self._nodes):
            if node in self._parent:
                self._weight[self._parent[node]] += self._weight[node]

    def kept(self, pairs: Iterable[tuple[int, int]]) -> int:
        """Returns how many nodes keep their parent."""
        return sum(self._parent.get(node) == above for node, above in pairs)

    def parents(self, great: bool) -> list[tuple[int, int]]:
        """Returns each node with its new parent. `great`: see `_filled`."""
        shape = self._shape
        occupants = self._filled(great)
        pairs = [(occupants[place], occupants[above]) for place, above in sorted(shape.parent.items())]
        placed = set(occupants)
        room = []  # in the last layer
        for place, above in enumerate(occupants):
            if self._units - shape.layer[place] <= self._limit:
                own = next((child for child in self._children[above] if child not in placed), None)
                if own is None:
                    room.append(above)
                else:
                    pairs.append((own, above))
        placed.update(node for node, _ in pairs)
        return pairs + list(zip((node for node in self._nodes if node not in placed), room, strict=False))

    def _filled(self, great: bool) -> list[int]:
        """Returns the nodes in the places of the full layers.

        A place goes to a child of the node above it, if that has one left: to the one that was in the same layer, or
        else to the one with the most nodes below it. Otherwise the place goes to the greatest subtree whose old parent
        is gone or has more children than it may keep; `great` says whether such a parent gives up its greatest subtrees
        or its least ones. If there is none, one of the last nodes comes forward.
        """
        shape, layer, weight = self._shape, self._layer, self._weight
        occupants = [self._root]
        placed = {self._root}
        left: dict[int, list[int]] = {}
        last = iter(sorted(self._nodes, key=lambda node: (-layer[node], weight[node])))

        def rank(node: int) -> tuple[int, int, int]:
            return (-weight[node], layer[node], node)

        def keep_children(node: int, units: int) -> None:
            """A node that has its place keeps as many children as the layers below have places for them."""
            own = sorted((child for child in self._children[node] if child not in placed), key=rank)
            surplus = max(0, len(own) - min(self._limit, self._units - units))
            left[node] = own[surplus:] if great else own[: len(own) - surplus]
            for child in own[:surplus] if great else own[len(own) - surplus :]:
                heappush(homeless, rank(child))

        homeless = [rank(node) for node in self._nodes if node not in self._parent]
        heapify(homeless)
        keep_children(self._root, 0)
        for place in range(1, len(shape)):
            own = [child for child in left[occupants[shape.parent[place]]] if child not in placed]
            while homeless and homeless[0][-1] in placed:
                heappop(homeless)
            if own:
                chosen = next((child for child in own if layer[child] == shape.layer[place]), own[0])
            elif homeless:
                chosen = heappop(homeless)[-1]
            else:
                chosen = next(node for node in last if node not in placed)
            occupants.append(chosen)
            placed.add(chosen)
            keep_children(chosen, shape.layer[place])
        return occupants
