"""Computes how much CPU and memory each place may take, and assigns tasks within these limits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.placement.traffic import Floats, Ints, TrafficGraph
from penstock.runtime.errors import PenstockError


class Infeasible(PenstockError):
    """No placement meets all conditions."""


@dataclass(frozen=True)
class Limits:
    """Holds how much CPU and memory each place may take."""

    cpu: Floats
    memory: Floats


def pack(graph: TrafficGraph, fair: Floats, memory: Floats) -> Ints:
    """Assigns tasks to places as evenly as a greedy method can, without regard to traffic. The heaviest task comes
    first, and goes to the place with the least load for its share. `fair` has each place's share, and the shares add up
    to 1. Raises Infeasible when a task fits nowhere."""
    load, used = np.zeros(len(fair)), np.zeros(len(fair))
    places = np.zeros(len(graph), dtype=np.int64)
    for v in np.lexsort((-graph.memory, -graph.cpu)):
        roomy = used + graph.memory[v] <= memory
        if graph.allowed is not None:
            if not graph.allowed[v].any():
                raise Infeasible(f"task {v} may run on none of the nodes; change what its operator is pinned to")
            roomy &= graph.allowed[v]
        if not roomy.any():
            raise Infeasible(
                f"no node that task {v} may run on has {graph.memory[v]:,.0f} bytes of memory left for it: give the "
                "job more nodes, or its tasks less memory"
            )
        place = int(np.where(roomy, (load + graph.cpu[v]) / fair, np.inf).argmin())
        places[v] = place
        load[place] += graph.cpu[v]
        used[place] += graph.memory[v]
    return places


def limits_of(graph: TrafficGraph, fair: Floats, factor: float, memory: Floats, packed: Ints) -> Limits:
    """Returns the limits of the places. A place may take its fair share of the CPU and `factor` more. It may take more
    than this only if the assignment `packed` needs it, because tasks cannot be divided."""
    total = graph.total_cpu or 1.0
    reached = float((graph.loads(packed, len(fair)) / (fair * total)).max()) - 1
    return Limits(fair * total * (1 + max(factor, reached)), memory)
