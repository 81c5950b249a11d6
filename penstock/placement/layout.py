"""Where the workers of a job are, as plain data that `actors/nodes.py` makes and the placer reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.placement.groups import Machine
from penstock.placement.placement import workers_of
from penstock.placement.traffic import Node

#: Decides how many workers each of several nodes gets, from the numbers by free CPUs, the numbers for which the nodes
#: have room, and how fast the nodes are.
Share = Callable[[Sequence[int], Sequence[int], Sequence[float]], list[int]]


@dataclass(frozen=True)
class Layout:
    """Where the workers of a job are. A new layout replaces this one as a whole, so its parts fit together in whichever
    thread. `machines`: of `nodes`, and empty when all workers are on the JobMaster's node. `order`: the workers in the
    order of their nodes."""

    nodes: tuple[Node, ...]
    machines: tuple[Machine, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, at: Sequence[Machine]) -> Layout:
        """Returns the layout when each worker is on this machine."""
        counts = Counter(machine.node_id for machine in at)
        found = tuple({machine.node_id: machine for machine in at}.values())
        place = {machine.node_id: index for index, machine in enumerate(found)}
        return cls(
            tuple(Node(machine.name, counts[machine.node_id], speed=machine.speed) for machine in found),
            found,
            tuple(sorted(range(len(at)), key=lambda worker: place[at[worker].node_id])),
        )

    def node_of_workers(self) -> list[int]:
        """Returns the node of each worker, as an index into `nodes`."""
        found = [0] * len(self.order)
        for worker, node in zip(self.order, workers_of(self.nodes), strict=True):
            found[worker] = node
        return found

    def places(self) -> dict[str, int]:
        """Returns the place in `nodes` of each name by which a source may know a node: the node's id, and the name of
        its machine if the job uses only one node there."""
        names = [machine.name for machine in self.machines]
        places = {name: place for place, name in enumerate(names) if names.count(name) == 1}
        return places | {machine.node_id: place for place, machine in enumerate(self.machines)}


class Chosen(Protocol):
    """The nodes that were chosen for a job. Another thread may replace the layout when a node is lost."""

    workers: int
    layout: Layout


def has(machine: Machine, wanted: Mapping[str, str | float]) -> bool:
    """Returns whether a node has these labels and resources, in use or free."""
    return all(
        machine.labels.get(name) == value if isinstance(value, str) else machine.totals.get(name, 0.0) >= value
        for name, value in wanted.items()
    )


def told(wanted: Mapping[str, str | float]) -> str:
    """Describes labels and resources for people."""
    return ", ".join(
        f"{name}={value}" if isinstance(value, str) else f"{value:g} {name}" for name, value in wanted.items()
    )
