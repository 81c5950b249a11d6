"""Estimates the traffic of a plan from its shape, before anything is measured: the paper's off-line mode
(docs/papers.md: T11).

Each source emits one unit, each operator as much as it receives, and an exchange divides it among its receivers by its
grouping, or sends all of it to each of them, which is shared traffic. Measured figures (`placement/monitor.py`) replace
these as soon as there are any.

A local job plans in the program of its user. So this module must never load numpy, which takes longer than such a plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from penstock.runtime.exchange.grouping import All
from penstock.runtime.program.plan import Exchange, Plan

#: (task, task, traffic between them)
TrafficEdge = tuple[int, int, float]


@dataclass(frozen=True)
class SharedTraffic:
    """Traffic of which each place gets one copy: `tasks` are the sender and then the receivers, without repetition."""

    tasks: tuple[int, ...]
    traffic: float


@dataclass(frozen=True)
class ExchangeTraffic:
    """The traffic of one exchange."""

    edges: tuple[TrafficEdge, ...]
    shared: tuple[SharedTraffic, ...]


@dataclass(frozen=True)
class Shape:
    """Describes the traffic of a plan, whose tasks are numbered from 0 in its order. `components[v]` is the chain of
    task v."""

    components: tuple[int, ...]
    exchanges: tuple[ExchangeTraffic, ...]

    @cached_property
    def edges(self) -> tuple[TrafficEdge, ...]:
        """Returns the edges of all exchanges."""
        return tuple(edge for exchange in self.exchanges for edge in exchange.edges)

    @cached_property
    def shared(self) -> tuple[SharedTraffic, ...]:
        """Returns the shared traffic of all exchanges."""
        return tuple(one for exchange in self.exchanges for one in exchange.shared)


def shape_of(plan: Plan) -> Shape:
    """Returns the shape of a physical plan: a source puts out a unit a second, and an operator as much as it takes
    in."""
    number = {task.number: position for position, task in enumerate(plan.tasks)}
    out = _rates(plan)
    found: list[ExchangeTraffic] = []
    for exchange in plan.exchanges:
        edges: list[TrafficEdge] = []
        shared: list[SharedTraffic] = []
        for sender in range(exchange.senders):
            targets = [number[plan.task(exchange.target, target).number] for target in exchange.targets(sender)]
            sent = out[exchange.source] / exchange.senders
            here = number[plan.task(exchange.source, sender).number]
            if isinstance(exchange.grouping, All) and len(targets) > 1:
                shared.append(SharedTraffic((here, *targets), sent))
            else:
                edges += [(here, target, sent / len(targets)) for target in targets]
        found.append(ExchangeTraffic(tuple(edges), tuple(shared)))
    return Shape(tuple(task.chain for task in plan.tasks), tuple(found))


def _rates(plan: Plan) -> dict[int, float]:
    """Returns the output of each chain, in units a second."""
    known: dict[int, float] = {}
    into: dict[int, list[Exchange]] = {chain.index: [] for chain in plan.chains}
    for exchange in plan.exchanges:
        into[exchange.target].append(exchange)

    def out(chain: int) -> float:
        if chain not in known:
            received = sum(out(e.source) * (e.receivers if isinstance(e.grouping, All) else 1) for e in into[chain])
            known[chain] = received if into[chain] else 1.0
        return known[chain]

    for chain in plan.chains:
        out(chain.index)
    return known
