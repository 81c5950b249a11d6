"""Finds a tree with few changes of parents by prices for layers (least_change.py).

What makes the problem hard is that each layer of the new tree has room for so many nodes and no more. Without this
rule, the best layer of each node would follow from those of its children, from the leaves upwards. So each layer gets a
price, which a node in this layer pays, and the rule is left out (a Lagrangian relaxation). Where too many nodes want to
be, the price rises; where too few want to be, it falls. In each round the wishes guide a solution that keeps the rule,
and they also give a bound that no solution can exceed. The rounds end when both meet. For most changes of up to some
sixty nodes they meet after a few rounds, which take milliseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.runtime.multicast.change_problem import Problem


@dataclass(frozen=True)
class Wishes:
    """What nodes would choose at some prices: the layer of each, and who keeps its parent. `bound`: no solution lets
    more nodes keep their parent."""

    layer: dict[int, int]
    keep: frozenset[int]
    bound: float


def by_prices(problem: Problem, found: list[int], rounds: int) -> tuple[list[int], int]:
    """Improves a solution. Returns the best one, and a bound on the nodes that can keep their parent."""
    prices = [0.0] * (problem.units + 1)
    kept, bound = problem.kept(found), problem.most
    for _ in range(rounds):
        if kept >= bound:
            break
        wishes = _wishes(problem, prices)
        bound = min(bound, math.floor(wishes.bound + 1e-6))
        other = _fulfilled(problem, wishes)
        if (better := problem.kept(other)) > kept:
            found, kept = other, better
        too_many = [-size for size in problem.sizes]
        for layer in wishes.layer.values():
            too_many[layer] += 1
        if not any(too_many):
            break
        # Polyak's step for subgradients.
        step = max(wishes.bound - kept, 0.5) / sum(number * number for number in too_many)
        prices = [price + step * number for price, number in zip(prices, too_many, strict=True)]
    return found, bound


def _wishes(problem: Problem, prices: list[float]) -> Wishes:
    """What each node would choose, from the leaves of the old tree upwards."""
    p = problem
    layers = range(1, p.units + 1)
    value: dict[int, dict[int, float]] = {}  # by node and layer: what the node and those below it gain, less the prices
    picks: dict[int, dict[int, dict[int, int]]] = {}  # by node and layer: the layers of the children that it keeps
    alone: dict[int, int] = {}  # the layer that a node would choose without its parent
    for node in reversed(p.nodes):
        kids = p.kids[node]
        base = sum(value[kid][alone[kid]] for kid in kids)
        value[node], picks[node] = {}, {}
        for layer in (0,) if node == p.root else layers:
            gain, pick = _matched(kids, range(layer + 1, min(layer + p.limit, p.units) + 1), value, alone)
            value[node][layer] = base + gain - prices[layer]
            picks[node][layer] = pick
        alone[node] = max(value[node], key=value[node].__getitem__)
    chosen: dict[int, int] = {}
    keep: set[int] = set()
    for node in p.nodes:
        layer = chosen.setdefault(node, alone[node])
        chosen.update(picks[node][layer])
        keep.update(picks[node][layer])
    bound = sum(value[node][alone[node]] for node in p.nodes if node not in p.parent)
    bound += sum(price * size for price, size in zip(prices, p.sizes, strict=True))
    return Wishes(chosen, frozenset(keep), bound)


def _matched(
    kids: list[int], layers: range, value: dict[int, dict[int, float]], alone: dict[int, int]
) -> tuple[float, dict[int, int]]:
    """Which children a node keeps, and in which layers, at most one in each: the greatest gain, and the layers."""
    best: dict[int, tuple[float, dict[int, int]]] = {0: (0.0, {})}  # by the set of layers that are taken, as bits
    alike: dict[tuple[tuple[int, float], ...], int] = {}
    for kid in kids:
        apart = value[kid][alone[kid]]
        gains = tuple((layer, gain) for layer in layers if (gain := value[kid][layer] + 1 - apart) > 0)
        alike[gains] = alike.get(gains, 0) + 1
        if not gains or alike[gains] > len(layers):
            continue  # there is no room for so many that are alike
        for taken, (total, pick) in list(best.items()):
            for layer, gain in gains:
                more = taken | 1 << layer
                if more != taken and (more not in best or best[more][0] < total + gain):
                    best[more] = (total + gain, {**pick, kid: layer})
    return max(best.values(), key=lambda found: found[0])


def _fulfilled(problem: Problem, wishes: Wishes) -> list[int]:
    """A solution that follows wishes as far as there is room.

    A place goes to a child that its parent keeps there. If there is none, it goes to the greatest subtree that is to
    have another parent by now, unless the parent needs the place for its own children; then to the child that comes
    closest; and then to the node that comes closest.
    """
    p = problem
    occupants = [p.root]
    unplaced = dict.fromkeys(p.nodes[1:])  # a set that keeps its order
    for place in range(1, p.full):
        layer, above = p.layer[place], occupants[p.above[place]]
        own = [kid for kid in p.kids[above] if kid in unplaced]
        here = [kid for kid in own if kid in wishes.keep and wishes.layer[kid] == layer]
        others = [node for node in unplaced if node not in wishes.keep and wishes.layer[node] <= layer]
        later = min(p.limit, p.units - p.layer[p.above[place]]) - (layer - p.layer[p.above[place]])
        if here:
            chosen = here[0]
        elif others and sum(kid in wishes.keep for kid in own) <= later:
            chosen = max(others, key=lambda node: (node in own, p.weight[node]))
        elif own:
            chosen = max(
                own, key=lambda kid: (wishes.layer[kid] <= layer, -abs(wishes.layer[kid] - layer), p.weight[kid])
            )
        else:
            chosen = min(
                unplaced, key=lambda node: (node in wishes.keep, abs(wishes.layer[node] - layer), -p.weight[node])
            )
        occupants.append(chosen)
        del unplaced[chosen]
    return occupants
