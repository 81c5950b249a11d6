"""A multicast tree as a value: which node forwards to which nodes, and in which order (docs/papers.md: W3).

The *root* is the node on which the records begin. A node forwards a record to its children one after the other. If each
copy takes one time unit, then the first child has the record one unit after its parent, the second child two units
after, and so on. The *layer* of a node is the number of units after which it has the record. The *depth* of a node is
the number of links between the root and the node, which is another number: all children of a node have one depth, and
no two of them have one layer.

A tree never changes. A tree that is not one (a node with two parents, a node that the root does not reach) cannot be
made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Tree:
    """See the module's docstring. `children` has the children of each node in sending order; nodes without children
    may be left out."""

    root: int
    children: Mapping[int, tuple[int, ...]]

    def __post_init__(self) -> None:
        named = {node for among in self.children.values() for node in among}
        if self.root in named or len(named) < sum(map(len, self.children.values())):
            raise ValueError("a node of the tree has two parents, or the root has one")
        object.__setattr__(self, "children", {node: tuple(among) for node, among in self.children.items() if among})
        if unreached := (named | self.children.keys()) - self.parent.keys() - {self.root}:
            raise ValueError(f"the root {self.root} does not reach the nodes {sorted(unreached)}")

    @classmethod
    def of_parents(cls, root: int, parents: Iterable[tuple[int, int]]) -> Tree:
        """Makes a tree of (node, parent) pairs. Each parent sends to its children in the order of the pairs."""
        children: dict[int, list[int]] = {}
        for node, parent in parents:
            children.setdefault(parent, []).append(node)
        return cls(root, {node: tuple(among) for node, among in children.items()})

    def of(self, node: int) -> tuple[int, ...]:
        """Returns the children of a node in sending order."""
        return self.children.get(node, ())

    @cached_property
    def parent(self) -> dict[int, int]:
        """The parent of each node except the root. Parents come before their children."""
        found: dict[int, int] = {}
        ahead = [self.root]
        for node in ahead:
            for child in self.of(node):
                found[child] = node
                ahead.append(child)
        return found

    @cached_property
    def destinations(self) -> frozenset[int]:
        """All nodes except the root."""
        return frozenset(self.parent)

    @cached_property
    def layer(self) -> dict[int, int]:
        """The layer of each node."""
        found = {self.root: 0}
        for node in (self.root, *self.parent):
            for place, child in enumerate(self.of(node), 1):
                found[child] = found[node] + place
        return found

    @cached_property
    def depth(self) -> dict[int, int]:
        """The number of links between the root and each node."""
        found = {self.root: 0}
        for node, parent in self.parent.items():
            found[node] = found[parent] + 1
        return found

    @cached_property
    def last_layer(self) -> int:
        """The number of time units after which all nodes have a record."""
        return max(self.layer.values())

    @cached_property
    def out_degree(self) -> int:
        """The greatest number of children that a node has."""
        return max(map(len, self.children.values()), default=0)

    def __len__(self) -> int:
        """Returns the number of nodes, the root among them."""
        return len(self.parent) + 1
