"""The nodes of a job: which nodes its workers run on, and the room that is reserved there (docs/papers.md: T10).

Other jobs choose at the same time, by the same figures: room is only what a group holds (`placement/groups.py`). While
a group waits for room that somebody else has taken, nodes are chosen again as soon as others have more.

Workers of one machine only, for now: rings are its shared memory. Several Ray nodes of a simulated cluster are on one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.actors import cluster
from penstock.placement.groups import Group, Machine, NotPlaced, PlacingCancelled, machines
from penstock.placement.options import PlacementOptions
from penstock.placement.placement import workers_of
from penstock.placement.traffic import Node

logger = logging.getLogger(__name__)


class Nodes:
    """See the module's docstring. Chosen once, by the JobMaster's supervising thread, before anything else is asked."""

    def __init__(self, options: PlacementOptions, workers: int) -> None:
        self._options = options
        self.workers = workers  # how many there are; fewer than were asked for if the job may be smaller
        self.nodes: tuple[Node, ...] = (Node("here", workers),)
        self.machines: list[Machine] = []  # that the nodes are; none where the workers are just here
        self._group: Group | None = None

    def reserve(self, job: str, cpus: float, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        """Choose nodes, and reserve room on them for the workers, each of so many CPUs. Raises NotPlaced."""
        options = self._options
        if options.nodes is None and not options.pin and options.at_least is None and not options.grow:
            here = ray.get_runtime_context().get_node_id()
            for machine in machines():
                if machine.node_id == here:
                    check_fits(machine, self.workers, cpus)
            return
        name = cluster.workers_group(job)
        wanted = options.nodes or 1
        grown: list[str] = []
        if options.grow:
            try:
                grown = _grown(wanted, cpus * self._most(wanted), name, timeout_s, cancelled)
            except PlacingCancelled:
                raise
            except NotPlaced as error:
                if options.at_least is None:
                    raise
                logger.warning("job %s starts on what there is: %s", job, error)
        until = time.monotonic() + timeout_s
        while True:
            chosen = self._choose(wanted, cpus, grown)
            counts = [self.workers // len(chosen) + (n < self.workers % len(chosen)) for n in range(len(chosen))]

            def in_vain(chosen: list[Machine] = chosen) -> bool:
                """The job was cancelled, or there is more room elsewhere by now, and time to wait for it."""
                if cancelled():
                    return True
                if time.monotonic() >= until:
                    return False
                better = self._choose(wanted, cpus, grown)
                return {machine.node_id for machine in better} != {machine.node_id for machine in chosen}

            try:
                self._take(chosen, counts, cpus, name, max(0.0, until - time.monotonic()), in_vain)
                break
            except PlacingCancelled:
                if cancelled():
                    raise
            except NotPlaced as error:
                fewer = _with_room(chosen, counts, cpus)
                if options.at_least is None or sum(fewer) < options.at_least:
                    raise
                logger.warning("job %s starts with %d workers, not %d: %s", job, sum(fewer), self.workers, error)
                self.workers = sum(fewer)
                self._take(chosen, fewer, cpus, name, timeout_s, cancelled)
                break
        if len(self.nodes) < wanted:
            logger.warning("job %s runs on %d nodes, not %d", job, len(self.nodes), wanted)

    def _take(
        self,
        chosen: list[Machine],
        counts: list[int],
        cpus: float,
        name: str,
        timeout_s: float,
        cancelled: Callable[[], bool],
    ) -> None:
        self.machines = [machine for machine, count in zip(chosen, counts, strict=True) if count]
        self.nodes = tuple(Node(m.name, count) for m, count in zip(chosen, counts, strict=True) if count)
        where = [self.machines[node].node_id for node in workers_of(self.nodes)]
        self._group = Group.reserve(where, cpus=cpus, name=name, timeout_s=timeout_s, cancelled=cancelled)

    def _most(self, nodes: int) -> int:
        """How many workers a node has, if there are so many nodes."""
        return -(-self.workers // nodes)

    def _choose(self, count: int, cpus: float, grown: list[str]) -> list[Machine]:
        """Nodes that came because the job asked for them, and those with most room; and for each operator that is
        pinned one where it may run. Fewer where there are not so many, if the job may be smaller."""
        here = ray.get_runtime_context().get_node_id()
        known = machines()
        host = next((machine.name for machine in known if machine.node_id == here), "")
        near = [machine for machine in known if machine.name == host]
        if len(near) < count:
            if self._options.at_least is None:
                raise NotPlaced(
                    f"the job is to run on {count} nodes; the cluster has {len(near)} on the JobMaster's machine, and "
                    f"{len(known) - len(near)} on others, between which this version cannot carry records. "
                    "PlacementOptions(at_least=...) allows fewer, grow=True waits for more"
                )
            count = len(near)
        most = cpus * self._most(count)
        # One that is too small comes last, however much of it is free.
        near.sort(key=lambda m: (m.node_id not in grown, m.cpus < most, -min(m.free_cpus, most)))
        chosen: list[Machine] = []
        for operator, wanted in self._options.pin.items():
            fit = [machine for machine in near if has(machine, wanted)]
            if not fit:
                raise NotPlaced(f"operator {operator!r} is pinned to nodes with {told(wanted)}, and no node has that")
            if not any(machine in fit for machine in chosen):
                chosen.append(fit[0])
        if len(chosen) > count:
            raise NotPlaced(f"what operators are pinned to takes {len(chosen)} nodes, and the job is to run on {count}")
        return [*chosen, *(machine for machine in near if machine not in chosen)][:count]

    def strategy(self, worker: int) -> Any:
        """Ray's scheduling strategy for a worker's actor. Raises NotPlaced when its node has died: Ray would wait for
        that to come back, which it never does."""
        if self._group is None:
            return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        if worker in self._group.lost():
            raise NotPlaced(
                f"the node of worker {worker} has died, with the room that the job had there; start the job again, and "
                "it goes on from its last epoch on the nodes that are left"
            )
        return self._group.strategy(worker)

    def close(self) -> None:
        """Give the reserved room back."""
        if self._group is not None:
            self._group.remove()
            self._group = None

    def places(self) -> dict[str, int]:
        """The node of each name by which sources may know one: its host's, if that is one node's alone, and its id."""
        names = [machine.name for machine in self.machines]
        places = {name: place for place, name in enumerate(names) if names.count(name) == 1}
        return places | {machine.node_id: place for place, machine in enumerate(self.machines)}


def check_fits(machine: Machine, workers: int, cpus: float) -> None:
    """Raise NotPlaced where a node cannot take so many workers, even if nobody else had anything of it: no time brings
    CPUs to a node."""
    if workers * cpus > machine.cpus + 1e-6:
        raise NotPlaced(
            f"the job asks for {workers} x {cpus:g} = {workers * cpus:g} CPUs on one node, and the node where it is to "
            f"run, {machine}, has {machine.cpus:g} in all, {machine.free_cpus:g} free. Use fewer workers or a smaller "
            "cpus_per_worker, spread the workers over several nodes (nodes=...), or start Ray with more CPUs (ray "
            "start --num-cpus; a cluster that a program has started for itself has as many as its first job needed)",
            (machine.node_id,),
        )


def has(machine: Machine, wanted: Mapping[str, str | float]) -> bool:
    """Whether a node has these labels and resources, whoever holds them now."""
    return all(
        machine.labels.get(name) == value if isinstance(value, str) else machine.totals.get(name, 0.0) >= value
        for name, value in wanted.items()
    )


def told(wanted: Mapping[str, str | float]) -> str:
    """Labels and resources, for people."""
    return ", ".join(
        f"{name}={value}" if isinstance(value, str) else f"{value:g} {name}" for name, value in wanted.items()
    )


def _with_room(chosen: list[Machine], counts: list[int], cpus: float) -> list[int]:
    """How many of the workers that each node should have it has room for now."""
    if not cpus:
        return counts
    free = {machine.node_id: machine.free_cpus for machine in machines()}
    rooms = [int(free.get(machine.node_id, 0.0) / cpus + 1e-6) for machine in chosen]
    return [min(room, count) for room, count in zip(rooms, counts, strict=True)]


def _grown(count: int, cpus: float, name: str, timeout_s: float, cancelled: Callable[[], bool]) -> list[str]:
    """The ids of so many nodes, each with so many CPUs free, as soon as the cluster has them: what waits for room is
    what Ray's autoscaler adds nodes for. Raises NotPlaced when they do not come in time."""
    hold = Group.reserve_anywhere(
        count, cpus=cpus, name=name, strategy="STRICT_SPREAD", timeout_s=timeout_s, cancelled=cancelled
    )
    try:
        return hold.where()
    finally:
        hold.remove()  # for the workers, who are reserved room for on the same nodes
