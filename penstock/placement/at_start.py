"""Decides where the tasks of a job begin that says nothing about its placement, before anything is measured. `run` and
`penstock plan` both ask here, so that the plan which is printed is the one that runs.

On one node, tasks are exchanged only as long as each operator stays even (`placement/even.py`), because a hop costs
little there and nobody knows what the operators cost. Between nodes it costs more. So a plan of the paper's scheduler
(`placement/planner.py`; docs/papers.md: T9 to T11), which takes all tasks for equally heavy, is used where much less
crosses between nodes in it.

No plan may ever let more across between nodes than tasks in turn. Nobody knows how much each operator emits before it
runs either. So no exchange may let more across than in turn: then this holds however much crosses each of them. Where
the paper's scheduler finds a plan in which an exchange does, it plans again, with more traffic in this exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from penstock.placement.even import improved, small
from penstock.placement.hop_costs import NODE_COST
from penstock.placement.placement import Placement, workers_of
from penstock.placement.planner import FACTOR, all_in_turn, node_by_node, plan
from penstock.placement.shape import ExchangeTraffic, Shape
from penstock.placement.traffic import Node, TrafficGraph

# Which part of the traffic between nodes a plan must save in which operators may be less even than in turn.
_WORTH = 0.2
# For more pairs of tasks, tasks are assigned to nodes first and then to workers, by a quicker search.
_QUICK_PAIRS = 100
# How often the paper's scheduler plans, and how much more traffic it sees each time where too much has crossed.
_TRIES, _MORE = 4, 1.3
# The relative error that sums of floats may have.
_LEAST = 1 + 1e-9


def plan_at_start(shape: Shape, nodes: Sequence[Node], *, factor: float = FACTOR) -> Placement:
    """Returns where each task runs. The workers of each node are numbered consecutively. `factor`: see FACTOR."""
    turns = Placement(tuple(nodes), workers_of(nodes), tuple(all_in_turn(nodes, len(shape.components)).tolist()))
    if len(turns.workers) < 2 or not small(shape):
        return turns
    seen = _Crossing(shape, turns)
    hops = [
        [0.0 if a == b else 1.0 if here == there else NODE_COST for b, there in enumerate(turns.workers)]
        for a, here in enumerate(turns.workers)
    ]
    even = seen.cheaper(replace(turns, tasks=tuple(improved(shape, turns.tasks, hops))), turns)
    return even if len(nodes) == 1 else seen.planned(factor, even)


class _Crossing:
    """Compares plans with tasks in turn."""

    def __init__(self, shape: Shape, turns: Placement) -> None:
        self._count = len(shape.components)
        self._exchanges = shape.exchanges
        self._turns = turns
        self._graphs = [self._graph([exchange]) for exchange in shape.exchanges]
        self._in_turn = [turns.between_nodes(graph) for graph in self._graphs]
        self.graph = self._graph(shape.exchanges)

    def _graph(self, exchanges: Sequence[ExchangeTraffic]) -> TrafficGraph:
        edges = chain.from_iterable(one.edges for one in exchanges)
        return TrafficGraph.of(self._count, edges, shared=chain.from_iterable(one.shared for one in exchanges))

    def too_much(self, placed: Placement) -> list[int]:
        """Returns the exchanges that let more across between nodes than with tasks in turn."""
        return [
            number
            for number, (graph, most) in enumerate(zip(self._graphs, self._in_turn, strict=True))
            if placed.between_nodes(graph) > most * _LEAST
        ]

    def cheaper(self, found: Placement, before: Placement) -> Placement:
        """Returns `found` if its hops cost less and no exchange lets more across, else `before`."""
        costs = [self.graph.hop_cost(one.worker_of, one.node_of, NODE_COST) for one in (found, before)]
        return found if costs[0] * _LEAST < costs[1] and not self.too_much(found) else before

    def planned(self, factor: float, even: Placement) -> Placement:
        """Returns a plan of the paper's scheduler in which no exchange lets more across, or `even` when it finds none
        in which much less crosses."""
        most = (1 - _WORTH) * even.between_nodes(self.graph)
        weights = [1.0] * len(self._exchanges)
        for _ in range(_TRIES):
            weighted = [_times(one, weight) for one, weight in zip(self._exchanges, weights, strict=True)]
            found = _planned(self._graph(weighted), self._turns.nodes, factor)
            if found.between_nodes(self.graph) >= most:
                break
            over = self.too_much(found)
            if not over:
                return found
            for number in over:
                before, crosses = self._in_turn[number], found.between_nodes(self._graphs[number])
                weights[number] *= _MORE * (crosses / before if before else _MORE)
        return even


def _times(exchange: ExchangeTraffic, weight: float) -> ExchangeTraffic:
    """Returns an exchange with its traffic multiplied."""
    return ExchangeTraffic(
        tuple((one, other, weight * traffic) for one, other, traffic in exchange.edges),
        tuple(replace(one, traffic=weight * one.traffic) for one in exchange.shared),
    )


def _planned(graph: TrafficGraph, nodes: Sequence[Node], factor: float) -> Placement:
    """Returns the plan of the paper's scheduler."""
    pairs = graph.pairs()
    if len(pairs.neighbours) // 2 <= _QUICK_PAIRS:
        return plan(graph, nodes, factor=factor)
    _, worker_of = node_by_node(pairs, nodes, factor=factor, seed=0, tasks=len(graph), running=None, quick=True)
    return Placement(tuple(nodes), workers_of(nodes), tuple(worker_of.tolist()))
