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
2. by what the nodes wish at prices for layers (change_prices.py),
3. by a search of all choices (change_search.py), which ends when its effort ends.

The answer is the best one for trees of some ten nodes. A larger tree may change some parents more than necessary, but
always gets the right shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from penstock.runtime.multicast.change_prices import by_prices
from penstock.runtime.multicast.change_problem import Problem
from penstock.runtime.multicast.change_search import Search
from penstock.runtime.multicast.tree import Tree

# The work of all rounds of prices together, in nodes times layers: some tens of milliseconds.
_WORK = 30_000

# The rounds of prices, and the places that the search fills, empties and fills again, at most.
ROUNDS = 60
_EFFORT = 2_000

# The same for a prompt answer, which takes a few milliseconds.
_PROMPT_WORK = 1_000
_PROMPT_EFFORT = 100

# A larger tree gets the rule alone.
_SEARCHED = 200


def adapted(tree: Tree, destinations: Sequence[int], limit: int, rounds: int = ROUNDS, *, prompt: bool = False) -> Tree:
    """Returns the tree of these destinations that differs least from a tree. Nodes that are new join where there is
    room; children of nodes that have left get another parent. With 0 `rounds`, the quick rule alone decides. `prompt`:
    records wait for the answer, so less work is done, and of some fifteen nodes or more, a few may move in vain."""
    if len(set(destinations)) < len(destinations) or tree.root in destinations:
        raise ValueError("the destinations name a node twice, or the root")
    if not destinations:
        return Tree(tree.root, {})
    problem = Problem.of(tree, destinations, limit)
    found = max((_quick(problem, great) for great in (False, True)), key=problem.kept)
    if rounds and len(destinations) <= _SEARCHED:
        size = len(problem.nodes) * problem.units
        work, effort = (_PROMPT_WORK, _PROMPT_EFFORT) if prompt else (_WORK, _EFFORT)
        found, bound = by_prices(problem, found, min(rounds, max(1, work // size)))
        if problem.kept(found) < bound:
            found = Search(problem, found, bound, effort).best
    return problem.tree(found)


def changed_parents(before: Tree, after: Tree) -> frozenset[int]:
    """Returns the nodes of both trees that have another parent in `after`."""
    return frozenset(node for node, parent in after.parent.items() if before.parent.get(node, parent) != parent)


def _quick(problem: Problem, great: bool) -> list[int]:
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
