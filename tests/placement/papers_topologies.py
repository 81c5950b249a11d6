"""SOL and the Throughput test on the nodes and workers of the TurboStream paper's Table II."""

from __future__ import annotations

from penstock.apps import sol, throughput
from penstock.placement.topology import Topology, of_plan
from penstock.placement.traffic import Node
from penstock.runtime.sources import Generator

#: Nodes and workers of all entries of Table II.
DEPLOYMENTS = ((8, 8), (4, 8), (2, 8), (1, 1), (4, 4), (2, 4), (2, 2), (1, 2))
TOPOLOGIES = ("SOL", "Throughput")


def topology(name: str, workers: int) -> Topology:
    """The topology as the off-line mode sees it: SOL has five tasks in each bolt, and the operators of the Throughput
    test have as many tasks as there are workers."""
    source = Generator(int, 1)
    if name == "SOL":
        return of_plan(sol.topology(source, levels=5, tasks=5).plan(workers))
    flow = throughput.topology(source)
    flow.parallelism = workers
    return of_plan(flow.plan(workers))


def machines(nodes: int, workers: int) -> list[Node]:
    """So many equal nodes for so many workers in all."""
    return [Node(f"n{place}", workers // nodes) for place in range(nodes)]
