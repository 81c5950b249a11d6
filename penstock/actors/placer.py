"""The JobMaster's dealings with placement: which worker has which task, on nodes that are chosen in `actors/nodes.py`,
and whether a running job should move some (docs/papers.md: T10 to T12).

Planning itself is pure (`placement/`); this object keeps what it needs from one time to the next. Used by the
JobMaster's supervising thread, but for `look`, which has one of its own, and `status`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.actors.nodes import Nodes, has, told
from penstock.placement import baselines
from penstock.placement.adoption import Verdict, decide, resting
from penstock.placement.balance import Infeasible
from penstock.placement.groups import NotPlaced
from penstock.placement.monitor import Monitor
from penstock.placement.options import PlacementOptions
from penstock.placement.placement import Placement, workers_of
from penstock.placement.planner import plan as planned
from penstock.placement.topology import Topology, of_plan, with_data
from penstock.placement.traffic import Bools
from penstock.runtime.program.plan import Plan

logger = logging.getLogger(__name__)

# Rates are to be most of what they will be within a period: a job whose traffic changes is planned anew within two.
_HALF_LIVES_A_PERIOD = 2.0


class Placer:
    """See the module's docstring."""

    def __init__(self, options: PlacementOptions, at: Nodes) -> None:
        """`at`: the nodes that the workers are on, when any of this is asked for."""
        self._options = options
        self._at = at
        self.forget()
        self._moved_at: float | None = None
        self._moves = 0
        self._verdict: Verdict | None = None
        self._seen: dict[str, float] = {}  # what crosses, as last measured
        self._told: list[dict[str, Any]] = []  # what tasks use and send

    def first(self, plan: Plan) -> dict[int, int]:
        """Returns the worker of each task of a job that starts. The plan shows which traffic to expect."""
        allowed = self._allowed(plan)
        try:
            found = self._first(plan, allowed)
        except (Infeasible, ImportError) as error:
            logger.warning("job %s is placed in turn: %s", plan.name, error)
            found = baselines.in_turn(len(plan.tasks), self._at.nodes)
        workers = self._in_order(found)
        if allowed is not None:
            workers = self._where_allowed(allowed, workers)
        return {task.number: worker for task, worker in zip(plan.tasks, workers, strict=True)}

    def _allowed(self, plan: Plan) -> Bools | None:
        """The nodes on which each task may run; None: all."""
        if not self._options.pin:
            return None
        allowed = np.ones((len(plan.tasks), len(self._at.nodes)), dtype=np.bool_)
        for operator, wanted in self._options.pin.items():
            fit = np.array([has(machine, wanted) for machine in self._at.machines])
            chain = plan.chain_of(operator).index
            for place, task in enumerate(plan.tasks):
                if task.chain == chain:
                    allowed[place] &= fit
                    if not allowed[place].any():
                        raise NotPlaced(
                            f"{plan.chains[chain].name!r} is pinned to nodes with {told(wanted)}, and none of the "
                            "job's nodes has that and what its other operators are pinned to; fused operators run "
                            "together: give one another parallelism, or use Flow(chaining=False)"
                        )
        return allowed

    def _where_allowed(self, allowed: Bools, workers: tuple[int, ...]) -> tuple[int, ...]:
        """Tasks that are where they may not run, as most placements know nothing of that, go to the worker with the
        fewest tasks where they may."""
        nodes, found = workers_of(self._at.nodes), list(workers)
        for task, worker in enumerate(found):
            if not allowed[task, nodes[worker]]:
                found[task] = min((w for w in range(len(nodes)) if allowed[task, nodes[w]]), key=found.count)
        return tuple(found)

    def _first(self, plan: Plan, allowed: Bools | None) -> Placement:
        method, nodes = self._options.method, self._at.nodes
        if method == "round-robin":
            return baselines.in_turn(len(plan.tasks), nodes)  # what to expect of the traffic is nothing to it
        topology = _bound(of_plan(plan), allowed)
        if method == "traffic":
            return planned(with_data(plan, topology, self._at.places()), nodes, tasks=len(topology))
        if method == "turbostream":
            return baselines.turbostream(topology, nodes)
        if method == "t-storm":
            return baselines.traffic_greedy(topology, nodes)
        if method == "jstorm":
            return baselines.jstorm(topology, nodes)
        return baselines.metis(topology, nodes)

    def _in_order(self, found: Placement) -> tuple[int, ...]:
        """The worker of each task, when the workers of a node are in a row, as they are in the group."""
        order = sorted(range(len(found.workers)), key=lambda worker: found.workers[worker])
        name = {worker: place for place, worker in enumerate(order)}
        return tuple(name[worker] for worker in found.tasks)

    def forget(self) -> None:
        """Measure anew, because tasks have changed, though some may have the same numbers as before."""
        self._monitor = Monitor((self._options.replan_s or 1.0) / _HALF_LIVES_A_PERIOD)

    def grown(self, plan: Plan, before: dict[int, int]) -> dict[int, int]:
        """The same for a plan that has changed: tasks that are placed stay, others go where there are the fewest."""
        placed = {task.number: before[task.number] for task in plan.tasks if task.number in before}
        load = np.bincount(list(placed.values()), minlength=self._at.workers).astype(np.float64)
        allowed = self._allowed(plan)
        nodes = np.array(workers_of(self._at.nodes))
        for place, task in enumerate(plan.tasks):
            if task.number not in placed:
                open_ = load if allowed is None else np.where(allowed[place, nodes], load, np.inf)
                placed[task.number] = int(open_.argmin())
                load[placed[task.number]] += 1
        return placed

    def look(
        self, plan: Plan, placed: dict[int, int], reports: Iterable[tuple[int, list[dict[str, Any]]]]
    ) -> dict[int, int] | None:
        """Where tasks should run, by the workers' newest reports; None when they should stay where they are."""
        monitor = self._monitor  # the supervising thread may put a new one in its place, for tasks of another plan
        for at_ns, tasks in reports:
            monitor.take(at_ns, tasks)
        monitor.forget(plan)
        if monitor is not self._monitor or not monitor.ready(plan):
            return None
        topology = _bound(monitor.topology(plan), self._allowed(plan))
        running = Placement(
            self._at.nodes, workers_of(self._at.nodes), tuple(placed[task.number] for task in plan.tasks)
        )
        self._told = monitor.told(plan)
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
            with_data(plan, topology, self._at.places()),
            self._at.nodes,
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
            "nodes": [{"name": node.name, "workers": node.workers} for node in self._at.nodes],
            "node_ids": [machine.node_id for machine in self._at.machines],
            "moves": self._moves,
            "last": None if self._verdict is None else self._verdict.reason,
            **self._seen,
        }


def _bound(topology: Topology, allowed: Bools | None) -> Topology:
    """The same, with the nodes on which each task may run."""
    return replace(topology, graph=replace(topology.graph, allowed=allowed))
