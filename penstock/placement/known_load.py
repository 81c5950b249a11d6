"""Remembers the load and the traffic of a job by operator, for its next start (docs/papers.md: T11).

When a job starts for the first time, only the shape of its flow shows what to expect. When it is resumed, it was
measured before. What was measured of its tasks is added up by chain, because the job may be resumed with another
parallelism, and so that it takes little room in the manifest of each epoch.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from penstock.placement.monitor import AT_REST
from penstock.placement.shape import SharedTraffic, TrafficEdge
from penstock.placement.topology import Topology, of_plan
from penstock.placement.traffic import TrafficGraph
from penstock.runtime.program.plan import Plan


@dataclass(frozen=True)
class KnownLoad:
    """Holds the load of each chain, in cores of speed 1, and the traffic of each two chains, in the unit of
    `Monitor.topology`. `shared` has what the tasks of the first of two chains send to all tasks of the second one, once
    and not for each receiver. Chains go by their names."""

    load: dict[str, float]
    traffic: dict[tuple[str, str], float]
    shared: dict[tuple[str, str], float]

    @classmethod
    def of(cls, plan: Plan, measured: Topology) -> KnownLoad:
        """Adds up a Monitor's measurements of a plan."""
        names = [chain.name for chain in plan.chains]
        graph = measured.graph
        load: dict[str, float] = defaultdict(float)
        traffic: dict[tuple[str, str], float] = defaultdict(float)
        for task, chain in enumerate(measured.components):
            load[names[chain]] += max(0.0, float(graph.cpu[task]) - AT_REST)
            for place in range(graph.starts[task], graph.starts[task + 1]):
                other = measured.components[graph.neighbours[place]]
                if chain <= other:  # the rows have each edge twice; those between tasks of one chain count as one
                    half = 2 if chain == other else 1
                    traffic[names[chain], names[other]] += float(graph.traffic[place]) / half
        shared: dict[tuple[str, str], float] = defaultdict(float)
        for one in graph.shared:
            shared[_chains(one, measured, names)] += one.traffic
        return cls(dict(load), dict(traffic), dict(shared))

    def topology(self, plan: Plan) -> Topology | None:
        """Returns the topology of a plan as it was measured, or None when the plan has other chains."""
        shape = of_plan(plan)
        names = [chain.name for chain in plan.chains]
        if any(name not in self.load for name in names):
            return None
        graph, at = shape.graph, shape.components
        edges: list[tuple[int, int, tuple[str, str]]] = []
        for task in range(len(shape)):
            for other in graph.neighbours[graph.starts[task] : graph.starts[task + 1]].tolist():
                if task < other:
                    first, second = sorted((at[task], at[other]))
                    edges.append((task, other, (names[first], names[second])))
        counts = Counter(pair for _, _, pair in edges)
        divided: list[TrafficEdge] = [(a, b, self.traffic.get(pair, 0.0) / counts[pair]) for a, b, pair in edges]
        senders = Counter(_chains(one, shape, names) for one in graph.shared)
        shared = []
        for one in graph.shared:
            ends = _chains(one, shape, names)
            shared.append(SharedTraffic(one.tasks, self.shared.get(ends, 0.0) / senders[ends]))
        tasks = Counter(at)
        load = [AT_REST + self.load[names[chain]] / tasks[chain] for chain in at]
        return replace(shape, graph=TrafficGraph.of(len(shape), divided, cpu=load, shared=shared))

    def dumps(self) -> str:
        """Returns the same as text."""
        traffic, shared = ([[*pair, size] for pair, size in sizes.items()] for sizes in (self.traffic, self.shared))
        return json.dumps({"load": self.load, "traffic": traffic, "shared": shared})

    @classmethod
    def loads(cls, text: str) -> KnownLoad | None:
        """Returns the object whose text `dumps` has written, or None for an empty text."""
        if not text:
            return None
        found = json.loads(text)
        traffic, shared = ({(one, other): size for one, other, size in found[which]} for which in ("traffic", "shared"))
        return cls(found["load"], traffic, shared)


def _chains(shared: SharedTraffic, topology: Topology, names: list[str]) -> tuple[str, str]:
    """Returns the names of the chains of the sender and of the receivers."""
    sender, receiver = (names[topology.components[task]] for task in shared.tasks[:2])
    return sender, receiver
