"""Measures the load and the traffic of a running job's tasks (docs/papers.md: T12): turns the counters of workers into
a graph for planning.

Workers count anyway: each log counts its records, bytes and messages once, however many tasks receive them, and each
task counts its processor time, the time for which its functions wait, and the processor time of threads that its
functions have started (`runtime/worker/processor_time.py`). So measuring costs only a question once in each period.
The load of a task is what it takes from other tasks: its processor time, and the time for which it waits, because its
worker has only one thread. A function usually waits for its threads, so of their processor time and the time that it
waits only the greater one counts. The time for which the worker waits for a core is no load of its tasks.

There are the rates of the last period, and smoothed rates, with a weight that halves in `half_life_s`: one odd period
moves no task, and a lasting change is most of the figure after two half-lives.

Counters begin anew when a task is built again, after a death or a migration. What is then counted twice, because it was
sent again, is little compared with a period.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import add, mul
from typing import Any

import numpy as np

from penstock.placement.shape import SharedTraffic, TrafficEdge
from penstock.placement.topology import Topology, of_plan
from penstock.placement.traffic import Floats, TrafficGraph
from penstock.runtime.program.plan import Plan
from penstock.runtime.worker.load import TaskLoad

#: The cores that each task counts in addition to its load, so that tasks that do nothing yet are assigned
#: evenly too.
AT_REST = 0.01

# To encode and decode a record costs about as much as so many of its bytes (benchmarks/record_path.py). What a message
# costs, in which many records may be, is measured (placement/hop_costs.py).
RECORD_BYTES = 100.0


#: Records, bytes and messages a second.
_Rates = tuple[float, float, float]

#: The tasks that receive what a log has.
_Targets = tuple[int, ...]


@dataclass
class _Seen:
    """Holds the last counters of a task, and its smoothed rates a second."""

    generation: int
    at_ns: int
    used_ns: tuple[int, int, int]  # its processor time, the time that it waits, the processor time of its threads
    sent: dict[_Targets, tuple[int, int, int]]
    used: tuple[float, float, float] = (0.0, 0.0, 0.0)  # the same, in seconds a second
    queued: float = 0.0
    rates: dict[_Targets, _Rates] = field(default_factory=dict)
    spans: int = 0  # that the rates are of
    used_now: tuple[float, float, float] = (0.0, 0.0, 0.0)  # in the last period alone
    rates_now: dict[_Targets, _Rates] = field(default_factory=dict)

    def load(self, speed: float, *, smooth: bool) -> float:
        """Returns the task's load in cores of speed 1, when it runs on a core of this speed."""
        cpu, waits, threads = self.used if smooth else self.used_now
        return cpu * speed + max(waits, threads * speed)

    def by_target(self) -> dict[int, _Rates]:
        """Returns the traffic from this task to each other task, smoothed."""
        found: dict[int, _Rates] = {}
        for targets, rates in self.rates.items():
            for target in targets:
                records, size, messages = map(add, rates, found.get(target, (0.0, 0.0, 0.0)))
                found[target] = records, size, messages
        return found


class Monitor:
    """Measures the tasks of a job; see the module's docstring. Only one thread at a time may use a Monitor."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._seen: dict[int, _Seen] = {}

    def take(self, at_ns: int, tasks: Iterable[TaskLoad]) -> None:
        """Takes a worker's report: its clock, and its tasks. Those that have ended count no more."""
        for task in tasks:
            if task.finished:
                continue
            number, generation = task.number, task.generation
            sent: dict[_Targets, tuple[int, int, int]] = {}
            for receivers, *counts in task.sent:
                targets = tuple(target for target in receivers if target is not None)
                records, size, messages = map(add, counts, sent.get(targets, (0, 0, 0)))
                sent[targets] = records, size, messages
            before = self._seen.get(number)
            used_ns = task.cpu_ns, task.waits_ns, task.threads_ns
            now = _Seen(generation, at_ns, used_ns, sent)
            if before is not None:
                now.used, now.queued, now.rates, now.spans = before.used, before.queued, before.rates, before.spans
                now.used_now, now.rates_now = before.used_now, before.rates_now
                if before.generation == generation and at_ns > before.at_ns:
                    self._smooth(now, before, task.queued)
            self._seen[number] = now

    def _smooth(self, now: _Seen, before: _Seen, queued: int) -> None:
        seconds = (now.at_ns - before.at_ns) / 1e9
        new = 1 - 0.5 ** (seconds / self._half_life_s) if before.spans else 1.0
        now.spans = before.spans + 1
        cpu, waits, threads = (
            (ns - ns_before) / 1e9 / seconds for ns, ns_before in zip(now.used_ns, before.used_ns, strict=True)
        )
        now.used_now = cpu, waits, threads
        cpu, waits, threads = (was + new * (is_ - was) for was, is_ in zip(before.used, now.used_now, strict=True))
        now.used = cpu, waits, threads
        now.queued = before.queued + new * (queued - before.queued)
        rates = {}
        now.rates_now = {}
        for targets in now.sent.keys() | before.rates.keys():
            counts = now.sent.get(targets, (0, 0, 0))
            counts_before = before.sent.get(targets, (0, 0, 0))
            if counts[0] < counts_before[0]:  # a migration gives a task new channels
                counts_before = (0, 0, 0)
            was = before.rates.get(targets, (0.0, 0.0, 0.0))
            records, size, messages = (
                max(0, count - count_before) / seconds
                for count, count_before in zip(counts, counts_before, strict=True)
            )
            is_ = now.rates_now[targets] = records, size, messages
            records, size, messages = (old + new * (rate - old) for old, rate in zip(was, is_, strict=True))
            rates[targets] = records, size, messages
        now.rates = rates

    def ready(self, plan: Plan) -> bool:
        """Tells whether every task of a plan has been measured."""
        return all(task.number in self._seen and self._seen[task.number].spans for task in plan.tasks)

    def forget(self, plan: Plan) -> None:
        """Forgets all tasks that are not in this plan."""
        self._seen = {number: seen for number, seen in self._seen.items() if number in plan.by_number}

    def told(self, plan: Plan) -> list[dict[str, Any]]:
        """Describes each measured task for people: the cores that it uses, those that its functions' threads use,
        the part of the time in which its functions wait, the records that wait for it, and what it sends to each other
        task, all smoothed."""
        names = {task.number: plan.task_name(task) for task in plan.tasks}
        return [
            {
                "name": names[number],
                "cores": seen.used[0],
                "waits": seen.used[1],
                "threads": seen.used[2],
                "queued": seen.queued,
                "sent": {
                    names[target]: {"records_per_s": records, "bytes_per_s": size, "messages_per_s": messages}
                    for target, (records, size, messages) in sorted(seen.by_target().items())
                    if target in names
                },
            }
            for number, seen in sorted(self._seen.items())
            if number in names and seen.spans
        ]

    def topology(self, plan: Plan, speed: Floats | float = 1.0, *, smooth: bool = True) -> Topology:
        """Returns the topology of the plan with measured load (cores of speed 1) and traffic (bytes a second, with
        RECORD_BYTES for each record). `speed`: that of each task's node. `smooth`: smoothed, and otherwise of the last
        period alone."""
        loads = [
            self._seen[task.number].load(of, smooth=smooth) if task.number in self._seen else 0.0
            for task, of in zip(plan.tasks, np.broadcast_to(speed, len(plan.tasks)).tolist(), strict=True)
        ]
        graph = self._graph(plan, (RECORD_BYTES, 1.0, 0.0), np.array(loads) + AT_REST, smooth=smooth)
        return replace(of_plan(plan), graph=graph)

    def records(self, plan: Plan, *, smooth: bool = True) -> TrafficGraph:
        """Returns the graph of the plan's tasks with the records a second that they exchange as traffic."""
        return self._graph(plan, (1.0, 0.0, 0.0), None, smooth=smooth)

    def messages(self, plan: Plan, *, smooth: bool = True) -> TrafficGraph:
        """Returns the graph of the plan's tasks with the messages a second that they exchange as traffic. Between tasks
        of one worker, the batches count that would be messages elsewhere."""
        return self._graph(plan, (0.0, 0.0, 1.0), None, smooth=smooth)

    def size(self, plan: Plan) -> float:
        """Returns the bytes a second that all tasks send, smoothed."""
        return self._graph(plan, (0.0, 1.0, 0.0), None, smooth=True).total_traffic

    def _graph(self, plan: Plan, weights: _Rates, cpu: Floats | None, *, smooth: bool) -> TrafficGraph:
        """Returns the graph whose traffic is the sum of records, bytes and messages with these weights."""
        number = {task.number: place for place, task in enumerate(plan.tasks)}
        edges: list[TrafficEdge] = []
        shared: list[SharedTraffic] = []
        for task, seen in self._seen.items():
            for targets, rates in (seen.rates if smooth else seen.rates_now).items():
                there = [number[target] for target in targets if target in number]
                traffic = sum(map(mul, weights, rates))
                if task in number and len(there) == 1:
                    edges.append((number[task], there[0], traffic))
                elif task in number and there:
                    shared.append(SharedTraffic((number[task], *there), traffic))
        return TrafficGraph.of(len(plan.tasks), edges, cpu=cpu, shared=shared)
