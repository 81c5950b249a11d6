"""Adapts a tree to another out-degree limit or to other nodes, so that the fewest nodes get another parent
(docs/papers.md: W6).

The new tree has the *shape* of a fresh non-blocking tree: after t time units, as many nodes have a record as the
recurrence L(t) allows. The paper's rules, by which nodes get to earlier layers, end there too. All layers but the last
are full, so the places in them are known before it is known which node takes which place. Each place lies below its
parent's place, and a node keeps its parent when both of their places fit. A child may get another place in the sending
order of its parent, since no connection changes by that.

The paper takes one node after the other, which leads to the right shape but may change more nodes than necessary: a
whole subtree that gets to an earlier layer costs one change, as a leaf does. Here the places are filled from the first
to the last, three times, each time better, until a bound says that nothing better is possible:

1. by a rule that is quick (`_quick`),
2. by the same rule, after another choice for any single place (`_improved`),
3. by a search of all choices, which leaves out those that cannot be better (`_Search`).

The search finds the best answer unless its effort ends first. The effort is enough for trees of some ten nodes. A
larger tree may change some parents more than necessary, but always has the right shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush

from penstock.runtime.multicast.building import non_blocking
from penstock.runtime.multicast.reach import reach, units_to_reach
from penstock.runtime.multicast.tree import Tree

# How many places the search fills, empties and fills again, at most: some tens of milliseconds for ten nodes, and 0.1 s
# for thirty.
EFFORT = 5_000

# A run of the rule takes about as long as so many places of the search.
_RUN = 20

# A larger tree gets the rule alone.
_SEARCHED = 200


def adapted(tree: Tree, destinations: Sequence[int], limit: int, effort: int = EFFORT) -> Tree:
    """Returns the tree of these destinations that differs least from a tree. Nodes that are new join where there is
    room; children of nodes that have left get another parent."""
    if len(set(destinations)) < len(destinations) or tree.root in destinations:
        raise ValueError("the destinations name a node twice, or the root")
    if not destinations:
        return Tree(tree.root, {})
    problem = _Problem.of(tree, destinations, limit)
    found = max((_quick(problem, heavy) for heavy in (False, True)), key=problem.kept)
    if effort and len(destinations) <= _SEARCHED:
        found = _improved(problem, found, effort // _RUN)
        found = _Search(problem, found, effort).best
    return problem.tree(found)


def changed_parents(before: Tree, after: Tree) -> frozenset[int]:
    """Returns the nodes of both trees that have another parent in `after`."""
    return frozenset(node for node, parent in after.parent.items() if before.parent.get(node, parent) != parent)


@dataclass(frozen=True)
class _Problem:
    """The places of the new tree, and who would like to keep whom. Places 0 to `full` - 1 are those of the full layers,
    in the order in which Algorithm 1 fills them; place 0 is the root's."""

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
    by_weight: dict[int, list[int]]  # `kids`, the greatest subtree first
    from_last: list[int]  # the nodes except the root, the last leaves first

    @classmethod
    def of(cls, tree: Tree, destinations: Sequence[int], limit: int) -> _Problem:
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
            {node: sorted(among, key=lambda kid: (-weight[kid], old_layer[kid])) for node, among in kids.items()},
            sorted([*stay[1:], *new], key=lambda node: (-old_layer[node], weight[node])),
        )

    def rank(self, node: int) -> tuple[int, int, int]:
        """Orders nodes without a parent: the greatest subtree comes first."""
        return (-self.weight[node], self.old_layer[node], node)

    @property
    def full(self) -> int:
        """The number of places in the full layers."""
        return len(self.layer)

    @cached_property
    def most(self) -> int:
        """A bound on the nodes that can keep their parent: every node keeps as many children as its layer allows, if
        those with many children are in early layers."""
        layers = [*self.layer, *[self.units] * (len(self.nodes) - self.full)]
        root, *others = (len(self.kids[node]) for node in self.nodes)
        degrees = [root, *sorted(others, reverse=True)]
        return sum(min(degree, self.limit, self.units - layer) for degree, layer in zip(degrees, layers, strict=True))

    def last_layer(self, occupants: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
        """Returns (node, parent) of those that keep their parent in the last layer, and the places that then still
        have room there. `occupants` are the nodes in the places of the full layers."""
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


def _quick(problem: _Problem, heavy: bool, start: Sequence[int] = ()) -> list[int]:
    """Fills the places by a rule, the first of them with the nodes of `start`.

    A place goes to a child of the node above it, if that has one left: to the one that was in the same layer, or else
    to the one with the most nodes below it. Otherwise the place goes to the greatest subtree whose old parent is gone
    or has more children than it may keep; `heavy` says whether such a parent gives up its greatest subtrees or its
    least ones. If there is none, one of the last nodes comes forward.
    """
    p = problem
    occupants = [p.root]
    placed = {p.root}
    left: dict[int, list[int]] = {}
    homeless = [p.rank(node) for node in p.nodes[1:] if node not in p.parent]
    heapify(homeless)
    last = iter(p.from_last)

    def keep_kids(node: int, layer: int) -> None:
        """A node that has its place keeps as many children as the layers below have places for them."""
        kids = [kid for kid in p.by_weight[node] if kid not in placed]
        surplus = max(0, len(kids) - min(p.limit, p.units - layer))
        left[node] = kids[surplus:] if heavy else kids[: len(kids) - surplus]
        for kid in kids[:surplus] if heavy else kids[len(kids) - surplus :]:
            heappush(homeless, p.rank(kid))

    keep_kids(p.root, 0)
    for place in range(1, p.full):
        own = [kid for kid in left[occupants[p.above[place]]] if kid not in placed]
        while homeless and homeless[0][-1] in placed:
            heappop(homeless)
        if place <= len(start):
            chosen = start[place - 1]
        elif own:
            chosen = next((kid for kid in own if p.old_layer[kid] == p.layer[place]), own[0])
        elif homeless:
            chosen = heappop(homeless)[-1]
        else:
            chosen = next(node for node in last if node not in placed)
        occupants.append(chosen)
        placed.add(chosen)
        keep_kids(chosen, p.layer[place])
    return occupants


def _improved(problem: _Problem, found: list[int], runs: int) -> list[int]:
    """Tries another node in each place, and the rule for the places after it, until no single change is better."""
    p = problem
    kept = p.kept(found)
    since = 0  # places without a better answer
    place = 0
    while since < p.full - 1 and kept < p.most:
        place = place % (p.full - 1) + 1
        since += 1
        for node in _alike_once(p, found[:place]):
            for heavy in (False, True):
                if not runs:
                    return found
                runs -= 1
                other = _quick(p, heavy, [*found[1:place], node])
                if (better := p.kept(other)) > kept:
                    found, kept, since = other, better, 0
    return found


def _alike_once(problem: _Problem, occupants: Sequence[int]) -> Iterator[int]:
    """The nodes that are not among these, without nodes that differ from another one in their names only."""
    placed = set(occupants)
    seen = set()
    for node in problem.nodes:
        key = (problem.parent.get(node), problem.weight[node], len(problem.kids[node]))
        if node not in placed and key not in seen:
            seen.add(key)
            yield node


class _Search:
    """Fills the places in all ways that may keep more parents than the best way found."""

    def __init__(self, problem: _Problem, first: list[int], effort: int) -> None:
        self.best = first
        self._p = problem
        self._most = problem.kept(first)
        self._effort = effort
        self._occupants = [problem.root]
        self._placed = {problem.root}
        self._unplaced_kids = {node: len(kids) for node, kids in problem.kids.items()}
        if self._most < problem.most:
            self._fill(0)

    def _fill(self, kept: int) -> None:
        p = self._p
        place = len(self._occupants)
        if place == p.full:
            kept += len(p.last_layer(self._occupants)[0])
            if kept > self._most:
                self._most, self.best = kept, list(self._occupants)
            return
        if kept + self._bound(place) <= self._most:
            return
        above, units = self._occupants[p.above[place]], p.layer[place]
        for node in self._candidates(above, units):
            if not self._effort or self._most == p.most:
                return
            self._effort -= 1
            parent = p.parent.get(node)
            self._occupants.append(node)
            self._placed.add(node)
            if parent is not None:
                self._unplaced_kids[parent] -= 1
            self._fill(kept + (parent == above))
            if parent is not None:
                self._unplaced_kids[parent] += 1
            self._placed.remove(node)
            self._occupants.pop()

    def _bound(self, place: int) -> int:
        """The most nodes that can still keep their parent when the places from `place` on are open."""
        p = self._p
        units = p.layer[place]
        total = 0
        # A node in a place may have one child in each of the layers that are still open to it.
        for at, node in enumerate(self._occupants):
            if kids := self._unplaced_kids[node]:
                end = min(p.layer[at] + p.limit, p.units)
                start = max(units, p.layer[at] + 1)
                if start == units and at < p.above[place]:
                    start += 1  # places of one layer are filled in the order of the places above them
                total += max(0, min(kids, end - start + 1))
        degrees = sorted((self._unplaced_kids[node] for node in p.nodes if node not in self._placed), reverse=True)
        for degree, at in zip(degrees, range(place, p.full), strict=False):
            if not degree:
                break
            total += min(degree, p.limit, p.units - p.layer[at])
        return total

    def _candidates(self, above: int, units: int) -> list[int]:
        """The nodes to try in a place, the most promising first; of nodes that are alike, one."""
        p = self._p
        shapes: dict[int, int] = {}
        numbers: dict[tuple[int, ...], int] = {}
        for node in reversed(p.nodes):
            if node not in self._placed:
                below = tuple(sorted(shapes[kid] for kid in p.kids[node] if kid not in self._placed))
                shapes[node] = numbers.setdefault(below, len(numbers))
        found: dict[tuple[int | None, int], int] = {}
        for node in p.nodes:
            if node not in self._placed:
                found.setdefault((p.parent.get(node), shapes[node]), node)
        return sorted(
            found.values(),
            key=lambda node: (p.parent.get(node) != above, p.old_layer[node] != units, -p.weight[node]),
        )
