"""Builds the status of a job from the reports of its workers: sums of their counters, and rates from the difference to
earlier ones. penstock/runtime/status.py has the fields of a status."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from penstock.runtime.operators.ends import Read
from penstock.runtime.operators.late import LATE
from penstock.runtime.program.mixing import mixing
from penstock.runtime.program.plan import Plan
from penstock.runtime.status import JobStatus, Latency, OperatorStatus, StallStatus, TaskStatus, WorkerStatus
from penstock.runtime.worker.load import TaskLoad
from penstock.runtime.worker.metrics import Histogram
from penstock.runtime.worker.waiting import WaitingRecords

# Rates are measured over at least this time, once it has passed. Over shorter times they depend on single batches.
_RATE_SPAN_NS = 500_000_000

_NOBODY: Mapping[int, float] = MappingProxyType({})


def stalls_of(reports: list[dict[str, Any]]) -> list[StallStatus]:
    """Returns the steps of sources and sinks that wait for an outside system, the longest wait first."""
    found = [stall.changed(worker=report["index"]) for report in reports for stall in report.get("outages", ())]
    return sorted(found, key=lambda stall: -stall.for_s)


def stall_words(stalls: list[StallStatus]) -> str | None:
    """Returns the thing for which a job waits when steps of sources and sinks are stalled."""
    if not stalls:
        return None
    first = stalls[0]
    more = f", as have {len(stalls) - 1} more steps" if len(stalls) > 1 else ""
    if first.error is None:
        return f"{first.what}, which has not returned for {first.for_s:.1f} s in worker {first.worker}{more}"
    return (
        f"{first.what}, which has failed for {first.for_s:.1f} s in worker {first.worker}{more}, and is tried again "
        f"until {first.limit_s:.0f} s have passed: {first.error}"
    )


def hook_words(reports: list[dict[str, Any]], workers: Iterable[WorkerStatus], patience_s: float) -> str | None:
    """Returns the thing for which a job waits when an open() or close() has not returned for a while, by the reports of
    its workers and their rows in the status. Returns None when there is no such call. A worker in such a call answers,
    so it is not taken for one that hangs."""
    stuck = [report for report in reports if report["hook"] and report["hook"]["for_s"] > patience_s]
    if not stuck:
        return None
    report = max(stuck, key=lambda report: report["hook"]["for_s"])
    worker, hook = report["index"], report["hook"]
    pid = next((f" (process {row.pid})" for row in workers if row.index == worker), "")
    more = f", nor have calls in {len(stuck) - 1} more of the workers" if len(stuck) > 1 else ""
    failure = f"; what failed before: {hook['failure'].rstrip('.')}" if hook["failure"] else ""
    return (
        f"{hook['name']}() of operator {hook['operator']!r}, which has not returned for {hook['for_s']:.0f} s in "
        f"worker {worker}{pid}{more}{failure}. Correct what it waits for; to end the job without it, cancel the job."
    )


class StatusBuilder:
    """Keeps the last report of each worker, and builds the status of the job from them. Only one thread at a time may
    use this, or it is used under a lock."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._started = time.time()
        self._running: float | None = None
        self._placed: dict[int, int] = {}
        self._workers: list[dict[str, Any]] = []
        self._reports: dict[int, dict[str, Any]] = {}
        # For each worker, oldest first: the reports from which rates are computed.
        self._history: dict[int, deque[dict[str, Any]]] = {}
        self._told_by: dict[int, int] = {}  # the worker whose report a task's counters come from
        self._last: JobStatus | None = None
        self._mixing = mixing(plan)
        self._waiting = WaitingRecords()

    def of(self, plan: Plan) -> StatusBuilder:
        """Returns a builder for another plan of the same job."""
        other = StatusBuilder(plan)
        other._started, other._running = self._started, self._running
        return other

    def place(self, placed: dict[int, int], workers: list[dict[str, Any]]) -> None:
        """Takes the workers on which tasks run."""
        self._placed = placed
        self._workers = workers

    def running(self) -> None:
        """Notes that all workers have started: the job runs from now on."""
        self._running = time.time()

    def last(self) -> JobStatus:
        """The last status that was built, or an empty one."""
        return self._last or self.build("STARTING", [], time.time())

    def take(self, report: dict[str, Any]) -> None:
        """Takes a report of a worker."""
        worker = report["index"]
        report = {**report, "tasks": [task for task in report["tasks"] if self._is_known(task)]}
        self._reports[worker] = report
        history = self._history.setdefault(worker, deque())
        history.append(report)
        while len(history) > 2 and report["time_ns"] - history[1]["time_ns"] >= _RATE_SPAN_NS:
            history.popleft()

    def build(
        self, state: str, reports: list[dict[str, Any]], now: float, silent: Mapping[int, float] = _NOBODY
    ) -> JobStatus:
        """Builds the status from the newest reports of these workers. `silent` has the workers that owe an answer, and
        for how many seconds they have owed it."""
        answered = {report["index"] for report in reports}
        for report in reports:
            self.take(report)
        tasks: dict[int, TaskLoad] = {}
        for report in self._reports.values():
            for task in report["tasks"]:
                # A task that has migrated may also be in the last report of a silent worker.
                if task.number not in tasks or self._placed.get(task.number) == report["index"]:
                    tasks[task.number] = task
                    self._told_by[task.number] = report["index"]
        for task in tasks.values():
            self._waiting.look(task, task.operators[0].records_in)
        skipped = self._skipped(tasks)
        operators = {}
        for chain in self._plan.chains:
            numbers = [task.number for task in self._plan.tasks if task.chain == chain.index]
            for position, operator in enumerate(chain.operators):
                operators[operator.name] = self._operator(position, numbers, tasks).changed(
                    skipped=skipped[operator.name],
                    waiting=0 if position else self._waiting.of_chain(chain.index),
                )
        self._last = JobStatus(
            name=self._plan.name,
            state=state,
            started_ms=int(self._started * 1000),
            uptime_s=now - self._started,
            running_s=now - self._running if self._running is not None else 0.0,
            operators=operators,
            tasks=[self._task(task.number, tasks.get(task.number)) for task in self._plan.tasks],
            workers=[
                self._worker(info, tasks, 0.0 if info["index"] in answered else silent.get(info["index"], 0.0))
                for info in self._workers
            ],
            skipped=sum(skipped.values()),
            mixing=self._mixing,
            **self._totals(operators, tasks),
        )
        return self._last

    def _skipped(self, tasks: Mapping[int, TaskLoad]) -> Counter[str]:
        """Returns how many records were skipped, by operator. Failures of a function that finds keys count for the
        operator for which it finds them."""
        keyed_by = {
            key_by.name: keyed.name
            for chain in self._plan.chains
            for key_by, keyed in pairwise(chain.operators)
            if key_by.kind == "key_by"
        }
        found: Counter[str] = Counter()
        for task in tasks.values():
            for operator in task.operators:
                found[keyed_by.get(operator.name, operator.name)] += operator.skipped
            found.update(task.skipped_on_the_way)
        return found

    def _is_known(self, task: TaskLoad) -> bool:
        """Whether a task in a worker's report belongs to this plan. While the plan changes, it may be a task of the
        plan before, with the same number and other operators."""
        known = self._plan.by_number.get(task.number)
        if known is None:
            return False
        names = [operator.name for operator in self._plan.chains[known.chain].operators]
        return names == [operator.name for operator in task.operators]

    def _operator(self, position: int, numbers: list[int], tasks: Mapping[int, TaskLoad]) -> OperatorStatus:
        found = OperatorStatus(parallelism=len(numbers))
        latency = Histogram()
        for number in numbers:
            task = tasks.get(number)
            if task is None:
                continue
            mine = task.operators[position]
            before, seconds = self._earlier(number)
            # The counters of a task that went back to an epoch are smaller than before.
            in_per_s, out_per_s = (
                0.0 if before is None else max(0, mine[what] - before.operators[position][what]) / seconds
                for what in ("records_in", "records_out")
            )
            found = found.changed(
                records_in=found.records_in + mine.records_in,
                records_out=found.records_out + mine.records_out,
                late=found.late + mine.late,
                in_per_s=found.in_per_s + in_per_s,
                out_per_s=found.out_per_s + out_per_s,
                queued=found.queued + (0 if position else task.queued),
                busy=max(found.busy, min(1.0, self._cores(number, task, "busy_ns"))),
                cpu=max(found.cpu, self._cores(number, task, "cpu_ns", "threads_ns")),
            )
            latency.merge(Histogram.from_sparse(task.latency_us))
        return found.changed(latency_ms=_quantiles(latency))

    def _earlier(self, number: int) -> tuple[TaskLoad | None, float]:
        """Returns the task's counters in an earlier report of the worker that has reported them last, and the seconds
        between that report and the newest one. Returns None when that worker has not reported them before."""
        worker = self._told_by[number]
        before, now = self._history[worker][0], self._reports[worker]
        if now["time_ns"] <= before["time_ns"]:
            return None, 0.0
        for task in before["tasks"]:
            if task.number == number:
                return task, (now["time_ns"] - before["time_ns"]) / 1e9
        return None, 0.0

    def _cores(self, number: int, task: TaskLoad, *counters: str) -> float:
        """Returns by how many seconds a second some counters of a task grow together."""
        before, seconds = self._earlier(number)
        return 0.0 if before is None else _grown_ns(before, task, *counters) / 1e9 / seconds

    def _cores_of_worker(self, worker: int, counter: str) -> float:
        """Returns by how many seconds a second a counter of a worker grows."""
        if worker not in self._history:
            return 0.0
        before, now = self._history[worker][0], self._reports[worker]
        passed_ns = now["time_ns"] - before["time_ns"]
        return _grown_ns(before, now, counter) / passed_ns if passed_ns > 0 else 0.0

    def _task(self, number: int, task: TaskLoad | None) -> TaskStatus:
        name = self._plan.task_name(self._plan.by_number[number])
        known = TaskStatus(number=number, name=name, worker=self._placed.get(number))
        if task is None:  # its worker has not reported it yet
            return known
        return known.changed(
            finished=task.finished,
            blocked=task.blocked,
            queued=task.queued,
            unsent=task.unsent,
            busy=min(1.0, self._cores(number, task, "busy_ns")),  # a step counts when it has ended
            cpu=self._cores(number, task, "cpu_ns", "threads_ns"),
            records_in=task.operators[0].records_in,
            records_out=task.operators[-1].records_out,
        )

    def _worker(self, info: dict[str, Any], tasks: Mapping[int, TaskLoad], silent_s: float) -> WorkerStatus:
        worker = info["index"]
        mine = [number for number, at in self._placed.items() if at == worker]
        report = self._reports.get(worker, {})
        return WorkerStatus(
            index=worker,
            pid=info["pid"],
            state=info["state"],
            node_id=info["node_id"],
            tasks=mine,
            queued=sum(tasks[number].queued for number in mine if number in tasks),
            **{
                known: report[known]
                for known in ("ring_bytes", "transports", "sent_bytes", "streams")
                if known in report
            },
            cpu=self._cores_of_worker(worker, "loop_ns"),
            cpu_wait=self._cores_of_worker(worker, "core_wait_ns"),
            cpu_threads=self._cores_of_worker(worker, "threads_ns"),
            silent_s=silent_s,
        )

    def _totals(self, operators: Mapping[str, OperatorStatus], tasks: Mapping[int, TaskLoad]) -> dict[str, Any]:
        """Returns the figures of the job over its sources and sinks."""
        all_of = [operator for chain in self._plan.chains for operator in chain.operators]
        read = [operators[operator.name] for operator in all_of if isinstance(operator, Read)]
        late = {operator.name: operators[operator.name].late for operator in all_of}
        recent, whole = Histogram(), Histogram()
        for task in self._plan.tasks:
            if self._plan.chains[task.chain].operators[-1].is_sink and task.number in tasks:
                recent.merge(Histogram.from_sparse(tasks[task.number].latency_us))
                whole.merge(Histogram.from_sparse(tasks[task.number].latency_all_us))
        return {
            "records_read": sum(operator.records_out for operator in read),
            "read_per_s": sum(operator.out_per_s for operator in read),
            "records_written": sum(operators[operator.name].records_in for operator in all_of if operator.is_sink),
            "late_dropped": {
                name: count for name, count in late.items() if count and (name, LATE) not in self._plan.side_outputs
            },
            "latency_ms": _quantiles(recent),
            "latency_all_ms": _quantiles(whole),
        }


def _grown_ns(before: Mapping[str, Any] | TaskLoad, now: Mapping[str, Any] | TaskLoad, *counters: str) -> int:
    """Returns by how much some counters have grown together. In a process that was just started they begin with 0."""
    return sum(max(0, now.get(counter, 0) - before.get(counter, 0)) for counter in counters)


def _quantiles(histogram: Histogram) -> Latency:
    p50, p99 = histogram.quantile(0.5), histogram.quantile(0.99)
    return Latency(None if p50 is None else p50 / 1000, None if p99 is None else p99 / 1000)
