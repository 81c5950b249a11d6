"""Describes a job as the planner takes it: its tasks by component, and the expected traffic between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.placement.shape import shape_of
from penstock.placement.traffic import TrafficGraph
from penstock.runtime.program.plan import Plan


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
    """Returns the topology of a physical plan, with the traffic that its shape shows."""
    shape = shape_of(plan)
    inputs = {
        chain.index: tuple(sorted({e.source for e in plan.exchanges if e.target == chain.index}))
        for chain in plan.chains
    }
    return Topology(
        TrafficGraph.of(len(plan.tasks), shape.edges, shared=shape.shared),
        shape.components,
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
