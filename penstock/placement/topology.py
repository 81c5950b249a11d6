"""Describes a job as the planner takes it: its tasks by component, and the expected traffic between them.

`of_plan` is the paper's off-line mode (docs/papers.md: T11): nothing has been measured yet, so traffic follows from the
data dependencies alone. Each source emits one unit, each operator as much as it receives, and an exchange divides it
among its receivers by its grouping, or sends all of it to each of them, which is shared traffic. Measured figures
(`placement/monitor.py`) replace these as soon as there are any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.placement.traffic import SharedTraffic, TrafficEdge, TrafficGraph
from penstock.runtime.exchange.grouping import All
from penstock.runtime.program.plan import Exchange, Plan


@dataclass(frozen=True)
class Topology:
    """Describes a job's tasks, numbered from 0 in the order of its plan. `components[v]` is the chain of task v;
    `inputs` has, for each component, the components that it takes input from; `names[v]` is for people."""

    graph: TrafficGraph
    components: tuple[int, ...]
    inputs: Mapping[int, tuple[int, ...]]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.components)


def of_plan(plan: Plan) -> Topology:
    """Returns the topology of a physical plan, with traffic estimated from the plan's shape: a source puts out a unit a
    second, and an operator as much as it takes in."""
    number = {task.number: position for position, task in enumerate(plan.tasks)}
    out = _rates(plan)
    edges: list[TrafficEdge] = []
    shared: list[SharedTraffic] = []
    for exchange in plan.exchanges:
        for sender in range(exchange.senders):
            targets = [number[plan.task(exchange.target, target).number] for target in exchange.targets(sender)]
            sent = out[exchange.source] / exchange.senders
            here = number[plan.task(exchange.source, sender).number]
            if isinstance(exchange.grouping, All) and len(targets) > 1:
                shared.append(SharedTraffic((here, *targets), sent))
            else:
                edges += [(here, target, sent / len(targets)) for target in targets]
    inputs = {
        chain.index: tuple(sorted({e.source for e in plan.exchanges if e.target == chain.index}))
        for chain in plan.chains
    }
    return Topology(
        TrafficGraph.of(len(plan.tasks), edges, shared=shared),
        tuple(task.chain for task in plan.tasks),
        inputs,
        tuple(plan.task_name(task) for task in plan.tasks),
    )


def with_data(plan: Plan, topology: Topology, places: Mapping[str, int]) -> TrafficGraph:
    """Returns the topology's graph with an anchor for the data of each split that says where its data lies. The traffic
    between the anchor and the task is what the source sends, divided by the weights of its splits. `places` maps each
    name that splits may use to a node. The anchors are numbered after the tasks."""
    graph, copies = topology.graph, topology.graph.pairs()
    anchors: list[tuple[int, int, float]] = []
    for task, name in enumerate(plan.tasks):
        splits = plan.chains[name.chain].splits
        mine = splits[name.index] if name.index < len(splits) else []
        sent = float(copies.traffic[copies.starts[task] : copies.starts[task + 1]].sum())
        weight = sum(split.weight for split in mine) or 1.0
        anchors += [
            (task, places[split.near], sent * split.weight / weight)
            for split in mine
            if split.near is not None and split.near in places
        ]
    return graph.with_anchors(anchors, 1 + max(places.values())) if anchors else graph


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
