"""The problem of changing a tree with few changes of parents, as plain data (least_change.py).

The new tree has known *places*. Places 0 to `full` - 1 are those of the full layers, in the order in which Algorithm 1
fills them; place 0 is the root's. A solution is the list of the nodes in these places, the *occupants*. All other nodes
are in the last layer. Each of them keeps its parent if that has a place from which the last layer can be reached, and
no other child there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.runtime.multicast.building import non_blocking
from penstock.runtime.multicast.reach import reach, units_to_reach
from penstock.runtime.multicast.tree import Tree


@dataclass(frozen=True)
class Problem:
    """See the module's docstring."""

    root: int
    limit: int
    units: int  # the last layer
    layer: list[int]  # of each place of the full layers
    above: list[int]  # the parent's place, of each place of the full layers
    nodes: list[int]  # all of them, the root first, the others as in the old tree
    parent: dict[int, int]  # the old parent, where there still is one
    kids: dict[int, list[int]]  # the old children that are still there, in sending order
    old_layer: dict[int, int]
    weight: dict[int, int]  # the nodes below a node in the old tree, and itself

    @classmethod
    def of(cls, tree: Tree, destinations: Sequence[int], limit: int) -> Problem:
        units = units_to_reach(len(destinations), limit)
        shape = non_blocking(0, range(1, reach(units - 1, limit)), limit)
        wanted = set(destinations)
        stay = [tree.root, *(node for node in tree.parent if node in wanted)]
        there = set(stay)
        parent = {node: tree.parent[node] for node in stay[1:] if tree.parent[node] in there}
        kids = {node: [child for child in tree.of(node) if child in there] for node in stay}
        new = [node for node in destinations if node not in there]
        kids.update((node, []) for node in new)
        weight = dict.fromkeys([*stay, *new], 1)
        for node in reversed(stay):
            weight[node] += sum(weight[child] for child in kids[node])
        old_layer = {node: tree.layer.get(node, tree.last_layer + 1) for node in (*stay, *new)}
        return cls(
            tree.root,
            limit,
            units,
            [shape.layer[place] for place in range(len(shape))],
            [shape.parent.get(place, -1) for place in range(len(shape))],
            [*stay, *new],
            parent,
            kids,
            old_layer,
            weight,
        )

    @property
    def full(self) -> int:
        """The number of places in the full layers."""
        return len(self.layer)

    def last_layer(self, occupants: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
        """Returns (node, parent) of nodes that keep their parent in the last layer, and the places that then still have
        room there. `occupants` are the nodes in the places of the full layers."""
        placed = set(occupants)
        keep, room = [], []
        for place, node in enumerate(occupants):
            if self.units - self.layer[place] <= self.limit:
                own = next((child for child in self.kids[node] if child not in placed), None)
                if own is None:
                    room.append(place)
                else:
                    keep.append((own, node))
        return keep, room

    def kept(self, occupants: Sequence[int]) -> int:
        """Returns how many nodes keep their parent."""
        kept = sum(self.parent.get(occupants[place]) == occupants[self.above[place]] for place in range(1, self.full))
        return kept + len(self.last_layer(occupants)[0])

    def tree(self, occupants: Sequence[int]) -> Tree:
        """Returns the tree in which these nodes have the places of the full layers."""
        pairs = [(occupants[place], occupants[self.above[place]]) for place in range(1, self.full)]
        keep, room = self.last_layer(occupants)
        placed = {*occupants, *(node for node, _ in keep)}
        rest = [node for node in self.nodes if node not in placed]
        pairs += keep
        pairs += [(node, occupants[place]) for node, place in zip(rest, room, strict=False)]
        return Tree.of_parents(self.root, pairs)
