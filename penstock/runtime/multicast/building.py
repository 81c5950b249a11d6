"""Builds multicast trees of a root and its destinations: sequential, binomial and non-blocking ones
(docs/papers.md: W3).

The three differ in how many children a node may have, its *out-degree limit*:

- In a sequential tree the root sends to all destinations itself.
- In a binomial tree every node that has the record sends it, in every time unit, to one that does not have it.
- A non-blocking tree is a binomial tree in which no node may have more children than the limit, so that each node is
  soon free for the next record.

The paper's Algorithm 1 adds a whole round of nodes before it looks whether there are enough (line 14). Here the last
round ends with the last destination.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.runtime.multicast.tree import Tree


def sequential(root: int, destinations: Sequence[int]) -> Tree:
    """Returns the tree in which the root sends to all destinations itself, in their order."""
    return Tree(root, {root: tuple(destinations)})


def binomial(root: int, destinations: Sequence[int]) -> Tree:
    """Returns the tree that reaches all destinations in the fewest time units."""
    return non_blocking(root, destinations, max(1, len(destinations)))


def non_blocking(root: int, destinations: Sequence[int], limit: int) -> Tree:
    """Returns the tree that reaches all destinations in the fewest time units if no node has more than `limit`
    children. Destinations join in their order."""
    if limit < 1:
        raise ValueError(f"an out-degree limit of {limit} is below 1: the root could send to nobody")
    children: dict[int, list[int]] = {root: []}
    with_room = [root]  # in the order in which they joined
    waiting = iter(destinations)
    left = len(destinations)
    while left:
        joined = []
        for node in with_room[:left]:
            child = next(waiting)
            children[node].append(child)
            children[child] = []
            joined.append(child)
        left -= len(joined)
        with_room = [node for node in with_room if len(children[node]) < limit] + joined
    return Tree(root, {node: tuple(among) for node, among in children.items()})
