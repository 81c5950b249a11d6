"""Makes new plans for a running job, and moves its tasks when a plan is worth it (docs/papers.md: T12).

What is measured in a period is never exact, and in the period of a change it is partly of the time before. A job must
not move its tasks for either. So Penstock plans with the mean of all periods since what was measured changed last, and
only when there are two of them or more. Where every period differs from the one before, as when windows fire now and
then, it plans with what the Monitor has smoothed, and a plan is adopted only when that of the next period would be
adopted too.

A job moves its tasks once for the same load and traffic. A plan must not make any worker too full, so a measurement
that is off by little may allow a plan that another one forbids, and each of many plans in a row may save something.

A job tells how old its records are when they reach the end of the flow. When they are older after a move than before
it, under the same traffic and no greater load, the tasks move back, and stay there. What the plan did not know is then
in this figure: that workers share cores, for example, or caches.

Nothing is planned while what is measured stays as it was when a plan was refused. This keeps chance from being asked
until it agrees, and makes replanning cheap for a job that runs as it should: planning takes from some hundredths of a
second to some seconds, and comparing takes a few thousandths of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.placement.adoption import AdoptionOptions, Verdict, cost, decide, hopeless, resting, room
from penstock.placement.hop_costs import CORE_BYTES_PER_S, MESSAGE_BYTES, NODE_COST
from penstock.placement.hop_latencies import HopLatencies
from penstock.placement.placement import Placement
from penstock.placement.planner import plan
from penstock.placement.traffic import TrafficGraph

# A measurement is as before when its figures differ by less than this part of their sum.
_SAME = 0.2
# What was measured is as it was when tasks moved when it differs by less than this, and its hops cost less than so many
# times as much. Both are more than what chance does.
_SAME_AS_AT_MOVE = 0.3
_DEARER = 1.5
# What hops cost has changed when a hop between nodes costs so many times as much, or as little, as when tasks moved. It
# is measured all the time, so that it changes a little by chance.
_OTHER_HOPS = 2.0
# After so many periods in a row that differ, what was smoothed counts.
_UNSTEADY = 6
# Tasks move back when records are older by more than this part, and in each period of a second rest, or in each of so
# many periods if these are longer, older than in each of at most so many periods before the move. Another program that
# is busy for some seconds must move nothing.
_SLOWER = 0.08
_PERIODS_AFTER = 2
_PERIODS_BEFORE = 4
_LATENCIES = 30  # are kept, of the last periods


@dataclass(frozen=True)
class Measured:
    """Holds the load and the traffic of a job: bytes, records and messages a second. How many messages there are
    depends on where tasks run and on how busy workers are, so whether a job has changed is decided without them."""

    graph: TrafficGraph
    records: TrafficGraph
    messages: TrafficGraph

    def costs(self, message_bytes: float) -> TrafficGraph:
        """Returns the costs with which plans are made: the traffic, with so many bytes for each message."""
        return self.graph.plus(self.messages, message_bytes)


@dataclass(frozen=True)
class Look:
    """Holds the places of tasks, the measurements of this period alone, and the measurements smoothed over the last
    ones. `draw` adds the anchors of data to a graph. `latency_s`: how old records were at the end of the flow, the
    median of the last five to ten seconds. None: no record came there."""

    running: Placement
    now: Measured
    smooth: Measured
    node_cost: float = NODE_COST
    core_bytes_per_s: float = CORE_BYTES_PER_S
    message_bytes: float = MESSAGE_BYTES
    hops: HopLatencies | None = None
    draw: Callable[[TrafficGraph], TrafficGraph] = lambda graph: graph
    latency_s: float | None = None


@dataclass(frozen=True)
class Move:
    """Holds the gain for which tasks move, the cost of hops afterwards, and the assumed cost of a hop between nodes.
    `before`: where the tasks are before the move. `latencies`: how old records were in each period there; empty when
    nothing is to be compared. `back`: the tasks go back to where they were before their last move, and stay there."""

    measured: Measured
    cost: float
    node_cost: float
    before: Placement
    latencies: tuple[float, ...] = ()
    back: bool = False

    def is_slower(self, after: Sequence[float]) -> bool:
        """Returns whether records are older after the move than before it."""
        before = self.latencies
        return min(after) > max(before) and sum(after) / len(after) > (1 + _SLOWER) * sum(before) / len(before)


class Replanner:
    """Decides once in each period; see the module's docstring."""

    def __init__(self, options: AdoptionOptions) -> None:
        self._options = options
        self._moved_at_s: float | None = None
        self._mean: Measured | None = None  # of the periods since the last change
        self._periods = 0  # how many these are
        self._change = ""  # what began them, for people
        self._unsteady = 0  # the number of changes since there were two of them
        self._wanted = False  # whether the last plan from what was smoothed would have been adopted
        self._latencies: list[float] = []  # in the periods since the last change, or since the rest after a move
        self._proposed: Move | None = None
        self._moved_for: Move | None = None  # the last move
        self._outcome = ""  # what became of it, for people; empty until it is known
        self._refused: tuple[Placement, Measured, float, Verdict] | None = None

    def moved(self, now_s: float) -> None:
        """Notes that tasks have moved. What they load their workers with may be another now."""
        self._moved_at_s = now_s
        self._moved_for, self._proposed = self._proposed, None
        self._outcome = ""
        self._mean, self._periods = None, 0
        self._latencies = []
        self._refused = None
        self._wanted = False

    def look(self, now_s: float, seen: Look) -> tuple[Placement | None, Verdict]:
        """Returns where tasks should run from now on (None: where they are), and why."""
        options = self._options
        self._follow(seen.now)
        measured = self._measured(seen)
        if measured is None:
            return None, Verdict(False, f"{self._change}; tasks can move when two periods in a row agree")
        since_s = None if self._moved_at_s is None else now_s - self._moved_at_s
        costs = measured.costs(seen.message_bytes)
        told = resting(since_s, options)
        if told is None:
            if seen.latency_s is not None:
                self._latencies = [*self._latencies[-_LATENCIES:], seen.latency_s]
            back = None if since_s is None else self._back(since_s, seen, measured)
            if back is not None:
                return back
            if self._has_moved_for(seen, measured.graph):
                self._wanted = False
                what = "gone back" if self._moved_for and self._moved_for.back else "moved"
                return None, Verdict(False, f"tasks have {what} for this load and this traffic{self._outcome}")
            told = hopeless(
                seen.running, costs, options, seen.node_cost, seen.core_bytes_per_s, measured.records, seen.hops
            )
        if told is not None:
            self._wanted = False
            return None, told
        if self._refused is not None and self._is_refused(seen, measured):
            return None, self._refused[3]
        new = plan(
            seen.draw(costs),
            seen.running.nodes,
            factor=room(seen.running, costs, options),
            node_cost=seen.node_cost,
            tasks=len(costs),
            running=seen.running,
        )
        verdict = decide(
            seen.running,
            new,
            costs,
            options,
            seen.node_cost,
            seen.core_bytes_per_s,
            records=measured.records,
            measured=seen.hops,
        )
        if not verdict.adopt:
            self._refused = seen.running, measured, seen.node_cost, verdict
            self._wanted = False
            return None, verdict
        self._refused = None
        if self._periods >= 2 or self._wanted:
            crosses = cost(new, measured.graph, seen.node_cost)
            ages = tuple(self._latencies[-_PERIODS_BEFORE:])
            self._proposed = Move(measured, crosses, seen.node_cost, seen.running, ages)
            return new, verdict
        self._wanted = True
        return None, replace(verdict, adopt=False, reason=f"{verdict.reason}; tasks move if the next plan says so too")

    def _follow(self, now: Measured) -> None:
        """Takes the measurements of a period."""
        before = self._mean
        if before is None or len(before.graph) != len(now.graph):
            change: str | None = "the load and the traffic were measured for one period"
        else:
            change = self._change_between(before.graph, now.graph)
        if before is not None and change is None:
            self._periods += 1
            new = 1 / self._periods
            self._mean = Measured(
                _mixed(before.graph, now.graph, new),
                _mixed(before.records, now.records, new),
                _mixed(before.messages, now.messages, new),
            )
            self._unsteady = 0
        else:
            self._mean, self._periods, self._change = now, 1, change or ""
            self._unsteady += 1
            self._latencies = []

    def _measured(self, seen: Look) -> Measured | None:
        """Returns the measurements to plan with, or None when nothing is certain yet."""
        if self._periods >= 2:
            return self._mean
        return seen.smooth if self._unsteady > _UNSTEADY else None

    def _back(self, since_s: float, seen: Look, measured: Measured) -> tuple[Placement, Verdict] | None:
        """Returns the places of tasks before they moved, when records are older since, and otherwise None. The load may
        be less than it was, because a job that has just started uses more processor time."""
        move, after = self._moved_for, self._latencies
        if self._outcome or move is None or not move.latencies:
            return None
        if len(after) < _PERIODS_AFTER or since_s < 2 * self._options.rest_s:
            return None
        was, now = move.measured.graph, measured.graph
        if len(was) != len(now) or _other_traffic(was, now, _SAME_AS_AT_MOVE):
            return None
        if now.total_cpu - was.total_cpu > _SAME_AS_AT_MOVE * max(was.total_cpu, self._options.busy):
            return None
        ages = f"{_ms(after)} in the median, for {_ms(move.latencies)} before"
        if not move.is_slower(after) or move.before.nodes != seen.running.nodes:
            self._outcome = f"; records take {ages}"
            return None
        crosses = cost(move.before, now, seen.node_cost)
        self._proposed = Move(measured, crosses, seen.node_cost, seen.running, back=True)
        self._wanted = False
        moves = int((move.before.worker_of != seen.running.worker_of).sum())
        return move.before, Verdict(True, f"records take {ages} tasks moved, so tasks move back", moves)

    def _has_moved_for(self, seen: Look, now: TrafficGraph) -> bool:
        """Returns whether the last move was for the same load and traffic."""
        move = self._moved_for
        if move is None:
            return False
        if max(move.node_cost, seen.node_cost) > _OTHER_HOPS * min(move.node_cost, seen.node_cost):
            return False
        before = move.measured.graph
        if len(before) != len(now) or self._change_between(before, now, _SAME_AS_AT_MOVE) is not None:
            return False
        least = _SAME_AS_AT_MOVE * now.total_traffic  # traffic that is little beside all of it
        return cost(seen.running, now, move.node_cost) <= max(_DEARER * move.cost, least)

    def _change_between(self, before: TrafficGraph, now: TrafficGraph, by: float = _SAME) -> str | None:
        """Returns None when the load of all tasks, the load of each task and the traffic differ by less than this part
        of the whole, and otherwise the difference, for people. The load of a task is measured less exactly than the
        traffic."""
        busy = max(before.total_cpu, now.total_cpu, self._options.busy)
        if abs(before.total_cpu - now.total_cpu) > by * busy:
            return f"the load of all tasks changed from {before.total_cpu:.2f} to {now.total_cpu:.2f} cores"
        of_one = float(np.abs(before.cpu - now.cpu).max(initial=0.0))
        if of_one > by * busy:
            return f"the load of a task changed by {of_one:.2f} cores"
        if traffic := _other_traffic(before, now, by):
            return (
                f"the traffic changed by {traffic / 1e6:.3g} MB/s, from {before.total_traffic / 1e6:.3g} to "
                f"{now.total_traffic / 1e6:.3g} MB/s in all"
            )
        return None

    def _is_refused(self, seen: Look, now: Measured) -> bool:
        """Returns whether a plan was refused for the same placement and the same load."""
        assert self._refused is not None
        running, before, node_cost, _ = self._refused
        more = 1 + self._options.margin
        if running != seen.running or len(before.graph) != len(now.graph):
            return False
        if not 1 / more < seen.node_cost / node_cost < more:
            return False
        crosses = cost(running, now.graph, node_cost), cost(running, before.graph, node_cost)
        return crosses[0] <= more * crosses[1] and self._change_between(before.graph, now.graph) is None


def _ms(latencies: Sequence[float]) -> str:
    """Returns the mean of latencies, for people."""
    return f"{1000 * sum(latencies) / len(latencies):.3g} ms"


def _mixed(one: TrafficGraph, other: TrafficGraph, new: float) -> TrafficGraph:
    """Returns the mean of two graphs of the same tasks, in which the other one counts for the part `new`."""
    parts = ((one, 1 - new), (other, new))
    edges = [
        (a, b, part * size / 2)
        for graph, part in parts
        for a, b, size in zip(graph.vertices.tolist(), graph.neighbours.tolist(), graph.traffic.tolist(), strict=True)
    ]
    shared = [replace(each, traffic=part * each.traffic) for graph, part in parts for each in graph.shared]
    cpu = (1 - new) * one.cpu + new * other.cpu
    return TrafficGraph.of(len(one), edges, cpu=cpu, memory=one.memory, allowed=other.allowed, shared=shared)


def _other_traffic(before: TrafficGraph, now: TrafficGraph, by: float) -> float:
    """Returns by how much the traffic differs when that is more than this part of the whole, and otherwise 0."""
    traffic = _difference(before, now)
    return traffic if traffic > by * max(before.total_traffic, now.total_traffic) else 0.0


def _difference(one: TrafficGraph, other: TrafficGraph) -> float:
    """Returns by how much the traffic of two graphs of the same tasks differs, over all edges."""
    one, other = one.pairs(), other.pairs()
    keys = [graph.vertices * len(one) + graph.neighbours for graph in (one, other)]
    every = np.union1d(*keys)
    traffic = np.zeros((2, len(every)))
    for row, key, graph in zip(traffic, keys, (one, other), strict=True):
        row[np.searchsorted(every, key)] = graph.traffic
    return float(np.abs(traffic[0] - traffic[1]).sum()) / 2
