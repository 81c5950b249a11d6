"""The JobMaster's dealings with placement: which nodes the workers run on, which worker has which task, and whether a
running job should move some (PAPERS rows T10 to T12).

Workers of one machine only, for now: rings are its shared memory. Several Ray nodes of a simulated cluster are on one.
Planning itself is pure (`placement/`); this object keeps what it needs from one time to the next. Used by the
JobMaster's supervising thread, but for `look`, which has one of its own, and `status`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.actors import cluster
from penstock.placement import baselines
from penstock.placement.adoption import Verdict, decide
from penstock.placement.balance import Infeasible
from penstock.placement.groups import Group, Machine, NotPlaced, machines
from penstock.placement.monitor import Monitor
from penstock.placement.options import PlacementOptions
from penstock.placement.placement import Placement, workers_of
from penstock.placement.planner import plan as planned
from penstock.placement.topology import Topology, of_plan
from penstock.placement.traffic import Node
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
        self._node_ids: list[str] = []  # of the nodes
        self._group: Group | None = None
        self._monitor = Monitor((options.replan_s or 1.0) / _HALF_LIVES_A_PERIOD)
        self._moved_at: float | None = None
        self._moves = 0
        self._verdict: Verdict | None = None
        self._seen: dict[str, float] = {}  # what crosses, as last measured

    # --- nodes -------------------------------------------------------------------------------------------------------

    def start(self, job: str, cpus: float, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        """Choose the nodes and reserve room on them for the workers; raises NotPlaced."""
        if self._options.nodes is None:
            return
        chosen = self._choose(self._options.nodes, cpus)
        self._nodes = tuple(Node(machine.name, count) for machine, count in chosen)
        self._node_ids = [machine.node_id for machine, _ in chosen]
        where = [self._node_ids[node] for node in workers_of(self._nodes)]
        self._group = Group.reserve(
            where, cpus=cpus, name=cluster.workers_group(job), timeout_s=timeout_s, cancelled=cancelled
        )

    def _choose(self, count: int, cpus: float) -> list[tuple[Machine, int]]:
        """The nodes with most room, and how many workers each gets."""
        here = ray.get_runtime_context().get_node_id()
        known = machines()
        host = next((machine.name for machine in known if machine.node_id == here), "")
        near = [machine for machine in known if machine.name == host]
        if len(near) < count:
            raise NotPlaced(
                f"the job is to run on {count} nodes; the cluster has {len(near)} on the JobMaster's machine, and "
                f"{len(known) - len(near)} on others, between which this version cannot carry records"
            )
        most = -(-self._workers // count)
        near.sort(key=lambda machine: -min(machine.free_cpus, most * cpus))
        each = [self._workers // count + (place < self._workers % count) for place in range(count)]
        return list(zip(near[:count], each, strict=True))

    def strategy(self, worker: int) -> Any:
        """Ray's scheduling strategy for a worker's actor."""
        if self._group is not None:
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
        topology = of_plan(plan)
        try:
            found = self._first(topology)
        except (Infeasible, ImportError) as error:
            logger.warning("job %s is placed in turn: %s", plan.name, error)
            found = baselines.round_robin(topology, self._nodes)
        return {task.number: worker for task, worker in zip(plan.tasks, self._in_order(found), strict=True)}

    def _first(self, topology: Topology) -> Placement:
        method, nodes = self._options.method, self._nodes
        if method == "traffic":
            return planned(topology.graph, nodes)
        if method == "turbostream":
            return baselines.turbostream(topology, nodes)
        if method == "t-storm":
            return baselines.traffic_greedy(topology, nodes)
        if method == "jstorm":
            return baselines.jstorm(topology, nodes)
        if method == "metis":
            return baselines.metis(topology, nodes)
        return baselines.round_robin(topology, nodes)

    def _in_order(self, found: Placement) -> tuple[int, ...]:
        """The worker of each task, when the workers of a node are in a row, as they are in the group."""
        order = sorted(range(len(found.workers)), key=lambda worker: found.workers[worker])
        name = {worker: place for place, worker in enumerate(order)}
        return tuple(name[worker] for worker in found.tasks)

    def grown(self, plan: Plan, before: dict[int, int]) -> dict[int, int]:
        """The same for a plan that has changed: tasks that are placed stay, others go where there are the fewest."""
        placed = {task.number: before[task.number] for task in plan.tasks if task.number in before}
        load = np.bincount(list(placed.values()), minlength=self._workers)
        for task in plan.tasks:
            if task.number not in placed:
                placed[task.number] = int(load.argmin())
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
        topology = self._monitor.topology(plan)
        running = Placement(self._nodes, workers_of(self._nodes), tuple(placed[task.number] for task in plan.tasks))
        options = self._options.adoption
        new = planned(topology.graph, self._nodes, factor=options.factor, running=running)
        since = None if self._moved_at is None else time.monotonic() - self._moved_at
        verdict = decide(running, new, topology.graph, since, options)
        if self._verdict is None or verdict.reason != self._verdict.reason:
            logger.info("job %s: %s", plan.name, verdict.reason)
        self._verdict = verdict
        self._seen = {
            "between_nodes": running.between_nodes(topology.graph),
            "between_workers": running.between_workers(topology.graph),
            "total": topology.graph.total_traffic,
            "intra_node_share": running.intra_node_share(topology.graph),
        }
        if not verdict.adopt:
            return None
        return {task.number: worker for task, worker in zip(plan.tasks, new.tasks, strict=True)}

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
            "node_ids": list(self._node_ids),
            "moves": self._moves,
            "last": None if self._verdict is None else self._verdict.reason,
            **self._seen,
        }
