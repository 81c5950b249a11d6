"""Chooses the nodes of a job, on which its workers run, and reserves room on them (docs/papers.md: T10).

Other jobs choose at the same time, from the same figures, so room is certain only when a placement group holds it
(`placement/groups.py`). While a group waits for room that another job has taken, nodes are chosen again as soon as
other nodes have more room.

In this version all workers run on one machine, because rings are memory of one machine. The nodes of a simulated Ray
cluster may be on one machine.
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
    """The nodes of a job. The JobMaster's supervising thread calls `reserve` once, before it calls anything else."""

    def __init__(self, options: PlacementOptions, workers: int) -> None:
        self._options = options
        self.workers = workers  # the number of workers; less than was asked for if the job may be smaller
        self.nodes: tuple[Node, ...] = (Node("here", workers),)
        self.machines: list[Machine] = []  # of `nodes`; empty when all workers are on the JobMaster's node
        self._group: Group | None = None

    def reserve(self, job: str, cpus: float, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        """Chooses nodes, and reserves room on them for the workers, each of which takes `cpus` CPUs. Raises
        NotPlaced."""
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
                logger.warning("job %s starts on the nodes that there are: %s", job, error)
        until = time.monotonic() + timeout_s
        while True:
            chosen = self._choose(wanted, cpus, grown)
            counts = [self.workers // len(chosen) + (n < self.workers % len(chosen)) for n in range(len(chosen))]

            def in_vain(chosen: list[Machine] = chosen) -> bool:
                """Returns whether the job was cancelled, or other nodes have more room by now and there is time to wait
                for it."""
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
        """Returns the greatest number of workers on a node, when the workers are spread over so many nodes."""
        return -(-self.workers // nodes)

    def _choose(self, count: int, cpus: float, grown: list[str]) -> list[Machine]:
        """Returns the nodes to use: first a node for each pinned operator, then nodes that the cluster has added for
        the job, then those with the most room. Returns fewer than `count` when the cluster has fewer and the job may be
        smaller."""
        here = ray.get_runtime_context().get_node_id()
        known = machines()
        host = next((machine.name for machine in known if machine.node_id == here), "")
        near = [machine for machine in known if machine.name == host]
        if len(near) < count:
            if self._options.at_least is None:
                raise NotPlaced(
                    f"the job is to run on {count} nodes; the cluster has {len(near)} on the JobMaster's machine, and "
                    f"{len(known) - len(near)} on other machines, to which this version cannot send records. Give "
                    "fewer nodes, or PlacementOptions(at_least=...) to allow fewer, or PlacementOptions(grow=True) to "
                    "wait for more"
                )
            count = len(near)
        most = cpus * self._most(count)
        # A node that is too small comes last, however much of it is free.
        near.sort(key=lambda m: (m.node_id not in grown, m.cpus < most, -min(m.free_cpus, most)))
        chosen: list[Machine] = []
        for operator, wanted in self._options.pin.items():
            fit = [machine for machine in near if has(machine, wanted)]
            if not fit:
                raise NotPlaced(
                    f"operator {operator!r} is pinned to nodes with {told(wanted)}, and no node of the JobMaster's "
                    "machine has that; add such a node, or change PlacementOptions(pin=...)"
                )
            if not any(machine in fit for machine in chosen):
                chosen.append(fit[0])
        if len(chosen) > count:
            raise NotPlaced(
                f"the job's operators are pinned to {len(chosen)} different nodes, and the job is to run on {count}; "
                f"give nodes={len(chosen)} or more, or change PlacementOptions(pin=...)"
            )
        return [*chosen, *(machine for machine in near if machine not in chosen)][:count]

    def strategy(self, worker: int) -> Any:
        """Returns Ray's scheduling strategy for a worker's actor. Raises NotPlaced when the worker's node has died,
        because Ray would wait without end for it to come back."""
        if self._group is None:
            return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        if worker in self._group.lost():
            raise NotPlaced(
                f"the node of worker {worker} has died, with the room that the job had there; resume the job, and "
                "it continues from its last complete epoch on the nodes that are left"
            )
        return self._group.strategy(worker)

    def close(self) -> None:
        """Gives the reserved room back."""
        if self._group is not None:
            self._group.remove()
            self._group = None

    def places(self) -> dict[str, int]:
        """Returns the place in `nodes` of each name by which a source may know a node: the node's id, and the name of
        its machine if the job uses only one node there."""
        names = [machine.name for machine in self.machines]
        places = {name: place for place, name in enumerate(names) if names.count(name) == 1}
        return places | {machine.node_id: place for place, machine in enumerate(self.machines)}


def check_fits(machine: Machine, workers: int, cpus: float) -> None:
    """Raises NotPlaced when a node has too few CPUs for so many workers, even if nobody else used any. Waiting would
    not help."""
    if workers * cpus > machine.cpus + 1e-6:
        raise NotPlaced(
            f"the job asks for {workers} x {cpus:g} = {workers * cpus:g} CPUs on one node, and the node on which it "
            f"is to run, {machine}, has {machine.cpus:g} in all, {machine.free_cpus:g} free. Use fewer workers or a "
            "smaller cpus_per_worker, spread the workers over several nodes (nodes=...), or start Ray with more CPUs "
            "(ray start --num-cpus; a cluster that a program has started for itself has as many as its first job "
            "needed)",
            (machine.node_id,),
        )


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


def _with_room(chosen: list[Machine], counts: list[int], cpus: float) -> list[int]:
    """Returns, for each node, how many of its workers it has room for now."""
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
