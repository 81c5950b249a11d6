"""Decides which worker has which task, on the nodes that `actors/nodes.py` has chosen, and whether a running job should
move tasks (docs/papers.md: T10 to T12).

The computation is in `placement/`; a Placer keeps what it needs from one plan to the next. The JobMaster's supervising
thread calls its methods, except `look`, which has a thread of its own, and `status`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.placement import baselines
from penstock.placement.adoption import Verdict
from penstock.placement.at_start import plan_at_start
from penstock.placement.balance import Infeasible
from penstock.placement.groups import NotPlaced
from penstock.placement.hop_costs import CORE_BYTES_PER_S, MESSAGE_BYTES, NODE_COST, HopCosts, Volume
from penstock.placement.hop_latencies import HopLatencies, told_latencies
from penstock.placement.known_load import KnownLoad
from penstock.placement.layout import Chosen, Layout, Share, has, told
from penstock.placement.monitor import Monitor
from penstock.placement.options import PlacementOptions
from penstock.placement.placement import Placement, speeds, workers_of
from penstock.placement.planner import plan as planned
from penstock.placement.replanning import Look, Measured, Replanner
from penstock.placement.shape import shape_of
from penstock.placement.sharing import shared
from penstock.placement.topology import Topology, of_plan, with_data
from penstock.placement.traffic import Bools, TrafficGraph
from penstock.runtime.program.bound_tasks import bound_tasks
from penstock.runtime.program.plan import Plan
from penstock.runtime.status import NodeStatus, PlacementStatus
from penstock.runtime.worker.load import TrafficReport
from penstock.runtime.worker.metrics import Histogram

logger = logging.getLogger(__name__)

# Measured rates follow a change mostly within one period, so that a job whose traffic changes gets a new plan within
# two periods.
_HALF_LIVES_A_PERIOD = 2.0


class Placer:
    """Assigns tasks to workers; see the module's docstring."""

    def __init__(self, options: PlacementOptions, at: Chosen) -> None:
        """`at`: the nodes of the workers, for jobs with options of placement."""
        self._options = options
        self._at = at
        self._replanner = Replanner(options.adoption)
        self.forget()
        self._moves = 0
        self._verdict: Verdict | None = None
        # The traffic between nodes and between workers, as measured last; None until it is measured.
        self._seen = PlacementStatus()
        self._hops: HopCosts | None = None  # as measured last
        self._latencies = HopLatencies()  # in the same way
        self._volume = Volume(0.0, 0.0, 0.0)
        self._told: list[dict[str, Any]] = []  # what tasks use and send, as measured last
        self._left = False
        self._known = ""  # the same by chain, for the next start
        self._before: KnownLoad | None = None  # what was measured before this start

    def remember(self, known: str) -> None:
        """Takes the measurements of `known`, which were made before this start."""
        try:
            self._before = KnownLoad.loads(known)
            self._known = known
        except (ValueError, KeyError, TypeError) as error:  # another release may have written it
            logger.warning("what is known of the job's traffic cannot be read, and does not count: %s", error)

    def known(self) -> str:
        """See Placing."""
        return self._known

    def share(self, plan: Plan) -> Share | None:
        """Returns the object that decides how many workers each node gets, or None when no plan is made before the
        start, or when pins decide."""
        if self._options.pin or not (self._plans_first(plan) or self._options.method == "traffic"):
            return None
        graph = self._expected(plan).graph
        found: dict[Any, list[int]] = {}  # nodes are chosen again and again while the job waits for room

        def share(even: Sequence[int], rooms: Sequence[int], speeds: Sequence[float]) -> list[int]:
            asked = tuple(even), tuple(rooms), tuple(speeds)
            if asked not in found:
                found[asked] = shared(graph, even, rooms, speeds, self._node_cost())
            return found[asked]

        return share

    def _plans_first(self, plan: Plan) -> bool:
        """Returns whether tasks begin where a plan from earlier measurements would move them."""
        return (
            self._options.period_s is not None and self._before is not None and self._before.topology(plan) is not None
        )

    def _expected(self, plan: Plan) -> Topology:
        """Returns the topology with the load and the traffic that were measured before, or else with estimates from the
        shape of the flow."""
        before = None if self._before is None else self._before.topology(plan)
        return of_plan(plan) if before is None else before

    def first(self, plan: Plan) -> dict[int, int]:
        """Returns the worker of each task of a job that starts. The plan shows which traffic to expect."""
        at = self._at.layout
        allowed = self._allowed(plan, at)
        try:
            found = self._first(plan, at, allowed)
        except (Infeasible, ImportError) as error:
            logger.warning("job %s: its tasks are assigned to workers in turn: %s", plan.name, error)
            found = baselines.in_turn(len(plan.tasks), at.nodes)
        workers = self._in_order(found)
        if allowed is not None:
            workers = self._where_allowed(allowed, at, workers)
        return {task.number: worker for task, worker in zip(plan.tasks, workers, strict=True)} | self.stays(plan)

    def stays(self, plan: Plan) -> dict[int, int]:
        """See Placing."""
        return bound_tasks(plan, self._at.workers)

    def _allowed(self, plan: Plan, at: Layout) -> Bools | None:
        """Returns the nodes on which each task may run, or None when every task may run on all nodes."""
        if not self._options.pin:
            return None
        allowed = np.ones((len(plan.tasks), len(at.nodes)), dtype=np.bool_)
        for operator, wanted in self._options.pin.items():
            fit = np.array([has(machine, wanted) for machine in at.machines])
            chain = plan.chain_of(operator).index
            for place, task in enumerate(plan.tasks):
                if task.chain == chain:
                    allowed[place] &= fit
                    if not allowed[place].any():
                        raise NotPlaced(
                            f"{plan.chains[chain].name!r} is pinned to nodes with {told(wanted)}, and none of the "
                            "job's nodes has this and what the operators fused with it are pinned to; give one of "
                            "these operators another parallelism, or use Flow(chaining=False), so that each runs by "
                            "itself"
                        )
        return allowed

    def _where_allowed(self, allowed: Bools, at: Layout, workers: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the worker of each task, after moving tasks from nodes on which they may not run to the worker with
        the fewest tasks on an allowed node. Most methods of placement do not know which nodes are allowed."""
        nodes, found = workers_of(at.nodes), list(workers)
        for task, worker in enumerate(found):
            if not allowed[task, nodes[worker]]:
                found[task] = min((w for w in range(len(nodes)) if allowed[task, nodes[w]]), key=found.count)
        return tuple(found)

    def _first(self, plan: Plan, at: Layout, allowed: Bools | None) -> Placement:
        method, nodes = self._options.method, at.nodes
        topology = _bound(self._expected(plan), allowed)
        drawn = with_data(plan, topology, at.places())
        draws = len(drawn) > len(topology)
        if method == "traffic" or (method == "auto" and draws) or self._plans_first(plan):
            return planned(drawn, nodes, tasks=len(topology), node_cost=self._node_cost())
        if method == "auto" and allowed is None and not self.stays(plan):
            return plan_at_start(shape_of(plan), nodes)
        if method in {"auto", "round-robin"}:
            return baselines.round_robin(topology, nodes)
        if method == "turbostream":
            return baselines.turbostream(topology, nodes)
        if method == "t-storm":
            return baselines.traffic_greedy(topology, nodes)
        if method == "jstorm":
            return baselines.jstorm(topology, nodes)
        return baselines.metis(topology, nodes)

    def _in_order(self, found: Placement) -> tuple[int, ...]:
        """Returns the worker of each task, with workers numbered in the order of their nodes, as in the placement
        group."""
        order = sorted(range(len(found.workers)), key=lambda worker: found.workers[worker])
        name = {worker: place for place, worker in enumerate(order)}
        return tuple(name[worker] for worker in found.tasks)

    def forget(self) -> None:
        """Begins new measurements, because the tasks have changed, and new tasks may have the numbers of old ones."""
        self._monitor = Monitor((self._options.period_s or 1.0) / _HALF_LIVES_A_PERIOD)

    def grown(self, plan: Plan, before: dict[int, int]) -> dict[int, int]:
        """Returns the worker of each task of a plan that has changed. Tasks that run stay where they are; each new task
        goes to the worker with the fewest tasks."""
        placed = {task.number: before[task.number] for task in plan.tasks if task.number in before}
        load = np.bincount(list(placed.values()), minlength=self._at.workers).astype(np.float64)
        at = self._at.layout
        allowed = self._allowed(plan, at)
        nodes = np.array(at.node_of_workers())
        for place, task in enumerate(plan.tasks):
            if task.number not in placed:
                open_ = load if allowed is None else np.where(allowed[place, nodes], load, np.inf)
                placed[task.number] = int(open_.argmin())
                load[placed[task.number]] += 1
        return placed

    def look(self, plan: Plan, placed: dict[int, int], reports: Iterable[TrafficReport]) -> dict[int, int] | None:
        """Returns where tasks should run, computed from the workers' newest reports, or None when tasks should stay
        where they are."""
        monitor = self._monitor  # the supervising thread may replace the monitor, when the plan has changed
        taken: list[TrafficReport] = []
        for report in reports:
            monitor.take(report.at_ns, report.tasks)
            taken.append(report)
        # The workers of today have measured nothing of one that was lost, so the last figures stay until they have.
        self._hops = HopCosts.of(report.rows for report in taken) or self._hops
        node_of = self._at.layout.node_of_workers()
        self._latencies = HopLatencies.of([report.times for report in taken], node_of).or_else(self._latencies)
        monitor.forget(plan)
        if monitor is not self._monitor or not monitor.ready(plan):
            return None
        at = self._at.layout  # another thread may replace it
        nodes, order = at.nodes, at.order
        slot = {worker: place for place, worker in enumerate(order)}
        running = Placement(nodes, workers_of(nodes), tuple(slot[placed[task.number]] for task in plan.tasks))
        # What a task takes of a slow core is less work than what it takes of a fast one.
        speed = speeds(nodes, running.workers)[running.worker_of]
        allowed = self._allowed(plan, at)
        topology = _bound(monitor.topology(plan, speed), allowed)
        last = _bound(monitor.topology(plan, speed, smooth=False), allowed)
        messages = monitor.messages(plan)
        costs = topology.graph.plus(messages, self._message_bytes())
        self._volume = Volume(messages.total_traffic, monitor.size(plan), costs.total_traffic)
        self._told = monitor.told(plan)
        self._known = KnownLoad.of(plan, topology).dumps()
        self._seen = PlacementStatus(
            between_nodes=running.between_nodes(topology.graph),
            between_workers=running.between_workers(topology.graph),
            total=topology.graph.total_traffic,
            intra_node_share=running.intra_node_share(topology.graph),
        )

        def draw(graph: TrafficGraph) -> TrafficGraph:
            return with_data(plan, replace(topology, graph=graph), at.places())

        seen = Look(
            running,
            Measured(last.graph, monitor.records(plan, smooth=False), monitor.messages(plan, smooth=False)),
            Measured(topology.graph, monitor.records(plan), messages),
            self._node_cost(),
            self._core_bytes_per_s(),
            self._message_bytes(),
            self._latencies,
            draw,
            _latency_s(taken),
        )
        new, verdict = self._replanner.look(time.monotonic(), seen)
        if self._left:
            new, verdict = None, Verdict(False, "tasks run where job.migrate has put them")
        if self._verdict is None or verdict.reason != self._verdict.reason:
            logger.info("job %s: %s", plan.name, verdict.reason)
        self._verdict = verdict
        if new is None:
            return None
        return {task.number: order[place] for task, place in zip(plan.tasks, new.tasks, strict=True)}

    def _node_cost(self) -> float:
        """Returns the cost of traffic between nodes, relative to traffic between workers of a node: what the user says,
        else what was measured."""
        given = self._options.adoption.node_cost
        if given is not None:
            return given
        return NODE_COST if self._hops is None else self._hops.node_cost(self._volume)

    def _message_bytes(self) -> float:
        """Returns how many bytes cost as much as a message, as far as that is measured."""
        return MESSAGE_BYTES if self._hops is None else self._hops.message_bytes

    def _core_bytes_per_s(self) -> float:
        """Returns how many bytes a second a core takes from one worker of a node to another, in the same way."""
        given = self._options.adoption.core_bytes_per_s
        if given is not None:
            return given
        return CORE_BYTES_PER_S if self._hops is None else self._hops.core_bytes_per_s(self._volume)

    def leave(self) -> None:
        """Leaves all tasks where they are from now on, because somebody has said where tasks are to run."""
        self._left = True

    def traffic(self) -> list[dict[str, Any]]:
        """Returns the load and the traffic of tasks, as measured last."""
        return self._told

    def moved(self, count: int) -> None:
        """Notes that a number of tasks have migrated."""
        self._moves += count
        self._replanner.moved(time.monotonic())

    def status(self) -> PlacementStatus:
        """Returns the part of the status about placement: the nodes, the traffic between nodes and between workers as
        measured last (bytes a second), what hops cost and how long they take, the number of tasks that have migrated,
        and the last decision."""
        hops, at = self._hops, self._at.layout
        kinds = None if hops is None else {"worker": hops.worker, "node": hops.node, "network": hops.network}
        return self._seen.changed(
            method=self._options.method,
            nodes=[NodeStatus(name=node.name, workers=node.workers, speed=node.speed) for node in at.nodes],
            node_ids=[machine.node_id for machine in at.machines],
            moves=self._moves,
            last=None if self._verdict is None else self._verdict.reason,
            node_cost=self._node_cost(),
            hop_ns_per_kib=kinds and {kind: hop and 1024 * hop.byte_ns for kind, hop in kinds.items()},
            hop_ns_per_message=kinds and {kind: hop and hop.message_ns for kind, hop in kinds.items()},
            hop_us=told_latencies(self._latencies),
        )


def _latency_s(reports: Iterable[TrafficReport]) -> float | None:
    """Returns the median age of the records that have reached the end of the flow lately, or None when there are
    none."""
    ages = Histogram()
    for report in reports:
        for task in report.tasks:
            if not task.sent and not task.finished:
                ages.merge(Histogram.from_sparse(task.latency_us))
    median_us = ages.quantile(0.5)
    return None if median_us is None else median_us / 1e6


def _bound(topology: Topology, allowed: Bools | None) -> Topology:
    """Returns the same topology, with the nodes on which each task may run."""
    return replace(topology, graph=replace(topology.graph, allowed=allowed))
