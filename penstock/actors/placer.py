"""The JobMaster's dealings with placement: which nodes the workers run on, which worker has which task, and whether a
running job should move some (PAPERS rows T10 to T12).

Workers of one machine only, for now: rings are its shared memory. Several Ray nodes of a simulated cluster are on one.
Planning itself is pure (`placement/`); this object keeps what it needs from one time to the next. Used by the
JobMaster's supervising thread, but for `look`, which has one of its own, and `status`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.actors import cluster
from penstock.placement import baselines
from penstock.placement.adoption import Verdict, decide, resting
from penstock.placement.balance import Infeasible
from penstock.placement.groups import Group, Machine, NotPlaced, PlacingCancelled, machines
from penstock.placement.monitor import Monitor
from penstock.placement.options import PlacementOptions
from penstock.placement.placement import Placement, workers_of
from penstock.placement.planner import plan as planned
from penstock.placement.topology import Topology, of_plan, with_data
from penstock.placement.traffic import Bools, Node
from penstock.runtime.plan import Plan

logger = logging.getLogger(__name__)

# Rates are to be most of what they will be within a period: a job whose traffic changes is planned anew within two.
_HALF_LIVES_A_PERIOD = 2.0


class Placer:
    """See the module's docstring."""

    def __init__(self, options: PlacementOptions, workers: int) -> None:
        self._options = options
        self._workers = workers
        self._nodes: tuple[Node, ...] = (Node("here", workers),)
        self._machines: list[Machine] = []  # that the nodes are; none where the workers are just here
        self._group: Group | None = None
        self._monitor = Monitor((options.replan_s or 1.0) / _HALF_LIVES_A_PERIOD)
        self._moved_at: float | None = None
        self._moves = 0
        self._verdict: Verdict | None = None
        self._seen: dict[str, float] = {}  # what crosses, as last measured
        self._told: list[dict[str, Any]] = []  # what tasks use and send

    # --- nodes -------------------------------------------------------------------------------------------------------

    def start(self, job: str, cpus: float, timeout_s: float, cancelled: Callable[[], bool]) -> int:
        """Choose the nodes and reserve room on them for the workers; how many these are. Raises NotPlaced."""
        options = self._options
        if options.nodes is None and not options.pin and options.at_least is None:
            return self._workers

        name = cluster.workers_group(job)

        def reserve(counts: list[int]) -> None:
            self._machines = [machine for machine, count in zip(chosen, counts, strict=True) if count]
            self._nodes = tuple(Node(m.name, count) for m, count in zip(chosen, counts, strict=True) if count)
            where = [self._machines[node].node_id for node in workers_of(self._nodes)]
            self._group = Group.reserve(where, cpus=cpus, name=name, timeout_s=timeout_s, cancelled=cancelled)

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
        chosen = self._choose(wanted, cpus, grown)
        even = [self._workers // len(chosen) + (place < self._workers % len(chosen)) for place in range(len(chosen))]
        try:
            reserve(even)
        except PlacingCancelled:
            raise
        except NotPlaced as error:
            free = {machine.node_id: machine.free_cpus for machine in machines()}
            rooms = [int(free.get(m.node_id, 0.0) / cpus + 1e-6) if cpus else self._workers for m in chosen]
            fewer = [min(room, count) for room, count in zip(rooms, even, strict=True)]
            if options.at_least is None or sum(fewer) < options.at_least:
                raise
            logger.warning("job %s starts with %d workers, not %d: %s", job, sum(fewer), self._workers, error)
            self._workers = sum(fewer)
            reserve(fewer)
        return self._workers

    def _most(self, nodes: int) -> int:
        """How many workers a node has, if there are so many nodes."""
        return -(-self._workers // nodes)

    def _choose(self, count: int, cpus: float, grown: list[str]) -> list[Machine]:
        """Nodes that came because the job asked for them, and those with most room; and for each operator that is
        pinned one where it may run. Fewer where there are not so many, if the job may be smaller."""
        here = ray.get_runtime_context().get_node_id()
        known = machines()
        host = next((machine.name for machine in known if machine.node_id == here), "")
        near = [machine for machine in known if machine.name == host]
        if len(near) < count:
            missing = (
                f"the job is to run on {count} nodes; the cluster has {len(near)} on the JobMaster's machine, and "
                f"{len(known) - len(near)} on others, between which this version cannot carry records"
            )
            if self._options.at_least is None:
                raise NotPlaced(f"{missing}. PlacementOptions(at_least=...) allows fewer, grow=True waits for more")
            logger.warning("%s", missing)
            count = len(near)
        most = cpus * self._most(count)
        near.sort(key=lambda machine: (machine.node_id not in grown, -min(machine.free_cpus, most)))
        chosen: list[Machine] = []
        for operator, wanted in self._options.pin.items():
            fit = [machine for machine in near if _has(machine, wanted)]
            if not fit:
                raise NotPlaced(f"operator {operator!r} is pinned to nodes with {_told(wanted)}, and no node has that")
            if not any(machine in fit for machine in chosen):
                chosen.append(fit[0])
        if len(chosen) > count:
            raise NotPlaced(f"what operators are pinned to takes {len(chosen)} nodes, and the job is to run on {count}")
        return [*chosen, *(machine for machine in near if machine not in chosen)][:count]

    def strategy(self, worker: int) -> Any:
        """Ray's scheduling strategy for a worker's actor. Raises NotPlaced when its node has died: Ray would wait for
        that to come back, which it never does."""
        if self._group is not None:
            if worker in self._group.lost():
                raise NotPlaced(
                    f"the node of worker {worker} has died, with the room that the job had there; start the job again, "
                    "and it goes on from its last epoch on the nodes that are left"
                )
            return self._group.strategy(worker)
        return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)

    def close(self) -> None:
        """Give the reserved room back."""
        if self._group is not None:
            self._group.remove()
            self._group = None

    # --- tasks -------------------------------------------------------------------------------------------------------

    def first(self, plan: Plan) -> dict[int, int]:
        """The worker of each task of a job that starts, by what its plan lets expect."""
        allowed = self._allowed(plan)
        try:
            found = self._first(plan, allowed)
        except (Infeasible, ImportError) as error:
            logger.warning("job %s is placed in turn: %s", plan.name, error)
            found = baselines.dealt(len(plan.tasks), self._nodes)
        workers = self._in_order(found)
        if allowed is not None:
            workers = self._where_allowed(allowed, workers)
        return {task.number: worker for task, worker in zip(plan.tasks, workers, strict=True)}

    def _allowed(self, plan: Plan) -> Bools | None:
        """The nodes on which each task may run; None: all."""
        if not self._options.pin:
            return None
        allowed = np.ones((len(plan.tasks), len(self._nodes)), dtype=np.bool_)
        for operator, wanted in self._options.pin.items():
            fit = np.array([_has(machine, wanted) for machine in self._machines])
            chain = plan.chain_of(operator).index
            for place, task in enumerate(plan.tasks):
                if task.chain == chain:
                    allowed[place] &= fit
                    if not allowed[place].any():
                        raise NotPlaced(
                            f"{plan.chains[chain].name!r} is pinned to nodes with {_told(wanted)}, and none of the "
                            "job's nodes has that and what its other operators are pinned to; fused operators run "
                            "together: give one another parallelism, or use Flow(chaining=False)"
                        )
        return allowed

    def _where_allowed(self, allowed: Bools, workers: tuple[int, ...]) -> tuple[int, ...]:
        """Tasks that are where they may not run, as most placements know nothing of that, go to the worker with the
        fewest tasks where they may."""
        nodes, found = workers_of(self._nodes), list(workers)
        for task, worker in enumerate(found):
            if not allowed[task, nodes[worker]]:
                found[task] = min((w for w in range(len(nodes)) if allowed[task, nodes[w]]), key=found.count)
        return tuple(found)

    def _first(self, plan: Plan, allowed: Bools | None) -> Placement:
        method, nodes = self._options.method, self._nodes
        if method == "round-robin":
            return baselines.dealt(len(plan.tasks), nodes)  # what to expect of the traffic is nothing to it
        topology = _bound(of_plan(plan), allowed)
        if method == "traffic":
            return planned(with_data(plan, topology, self._places()), nodes, tasks=len(topology))
        if method == "turbostream":
            return baselines.turbostream(topology, nodes)
        if method == "t-storm":
            return baselines.traffic_greedy(topology, nodes)
        if method == "jstorm":
            return baselines.jstorm(topology, nodes)
        return baselines.metis(topology, nodes)

    def _places(self) -> dict[str, int]:
        """The node of each name by which sources may know one: its host's, if that is one node's alone, and its id."""
        names = [machine.name for machine in self._machines]
        places = {name: place for place, name in enumerate(names) if names.count(name) == 1}
        return places | {machine.node_id: place for place, machine in enumerate(self._machines)}

    def _in_order(self, found: Placement) -> tuple[int, ...]:
        """The worker of each task, when the workers of a node are in a row, as they are in the group."""
        order = sorted(range(len(found.workers)), key=lambda worker: found.workers[worker])
        name = {worker: place for place, worker in enumerate(order)}
        return tuple(name[worker] for worker in found.tasks)

    def grown(self, plan: Plan, before: dict[int, int]) -> dict[int, int]:
        """The same for a plan that has changed: tasks that are placed stay, others go where there are the fewest."""
        placed = {task.number: before[task.number] for task in plan.tasks if task.number in before}
        load = np.bincount(list(placed.values()), minlength=self._workers).astype(np.float64)
        allowed = self._allowed(plan)
        nodes = np.array(workers_of(self._nodes))
        for place, task in enumerate(plan.tasks):
            if task.number not in placed:
                open_ = load if allowed is None else np.where(allowed[place, nodes], load, np.inf)
                placed[task.number] = int(open_.argmin())
                load[placed[task.number]] += 1
        return placed

    def look(
        self, plan: Plan, placed: dict[int, int], reports: Iterable[tuple[int, list[dict[str, Any]]]]
    ) -> dict[int, int] | None:
        """Where tasks should run, by what the workers say now; None: where they do."""
        for at_ns, tasks in reports:
            self._monitor.take(at_ns, tasks)
        self._monitor.forget(plan)
        if not self._monitor.ready(plan):
            return None
        topology = _bound(self._monitor.topology(plan), self._allowed(plan))
        running = Placement(self._nodes, workers_of(self._nodes), tuple(placed[task.number] for task in plan.tasks))
        self._told = self._monitor.told(plan)
        self._seen = {
            "between_nodes": running.between_nodes(topology.graph),
            "between_workers": running.between_workers(topology.graph),
            "total": topology.graph.total_traffic,
            "intra_node_share": running.intra_node_share(topology.graph),
        }
        options = self._options.adoption
        since = None if self._moved_at is None else time.monotonic() - self._moved_at
        rest = resting(since, options)
        if rest is not None:
            self._verdict = rest
            return None
        new = planned(
            with_data(plan, topology, self._places()),
            self._nodes,
            factor=options.factor,
            tasks=len(topology),
            running=running,
        )
        verdict = decide(running, new, topology.graph, options)
        if self._verdict is None or verdict.reason != self._verdict.reason:
            logger.info("job %s: %s", plan.name, verdict.reason)
        self._verdict = verdict
        if not verdict.adopt:
            return None
        return {task.number: worker for task, worker in zip(plan.tasks, new.tasks, strict=True)}

    def traffic(self) -> list[dict[str, Any]]:
        """What tasks use and send, as last measured."""
        return self._told

    def moved(self, count: int) -> None:
        """So many tasks have been moved."""
        self._moves += count
        self._moved_at = time.monotonic()

    def status(self) -> dict[str, Any]:
        """For people: the nodes, what crosses between them and between workers as last measured (bytes a second), how
        many tasks have moved, and what was decided last."""
        return {
            "method": self._options.method,
            "nodes": [{"name": node.name, "workers": node.workers} for node in self._nodes],
            "node_ids": [machine.node_id for machine in self._machines],
            "moves": self._moves,
            "last": None if self._verdict is None else self._verdict.reason,
            **self._seen,
        }


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


def _bound(topology: Topology, allowed: Bools | None) -> Topology:
    """The same, with the nodes on which each task may run."""
    return replace(topology, graph=replace(topology.graph, allowed=allowed))


def _has(machine: Machine, wanted: Mapping[str, str | float]) -> bool:
    """Whether a node has these labels and resources, whoever holds them now."""
    return all(
        machine.labels.get(name) == value if isinstance(value, str) else machine.totals.get(name, 0.0) >= value
        for name, value in wanted.items()
    )


def _told(wanted: Mapping[str, str | float]) -> str:
    return ", ".join(
        f"{name}={value}" if isinstance(value, str) else f"{value:g} {name}" for name, value in wanted.items()
    )
