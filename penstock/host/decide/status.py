"""The status of a job: the counters of its workers combined into one plain dict, with rates from the difference to
earlier ones.

    {name, state, error, waits_for, started_ms (since 1970), uptime_s, running_s (since all workers had started),
     master_silent_s, spares, relays, links, epochs, placement, dual,
     operators: {name: {parallelism, records_in, records_out, in_per_s, out_per_s, skipped, late, queued, waiting,
                        busy, cpu, latency_ms: {p50, p99}}},
     tasks:   [{number, name, worker, finished, blocked, queued, unsent, busy, cpu, records_in, records_out}],
     workers: [{index, pid, node_id, tasks, queued, ring_bytes, transports, sent_bytes, streams, cpu, cpu_wait,
               cpu_threads, silent_s}],
     records_read, records_written, read_per_s, skipped, late_dropped: {operator: late},
     mixing: {watermark operator: [exchange]}, latency_ms: {p50, p99}, latency_all_ms: {p50, p99}}

Every status has all of these keys, also before anything is known of the job (`no_status`), so that nobody who looks at
them must know what the job has and how far it is. The parts of which a job has none stay as they are in `no_status`.

`waits_for` says what a job that starts waits for. Later it is None, unless the open() or close() of an operator does
not return (`hook_words`). `spares` is the number of spare processes that are ready. `relays` has a dict for each relay
(docs/cluster.md), and `links` one for each link between workers that is silent (host/broken_links.py). `queued` is the
number of records in the inboxes of an operator's tasks, and `waiting` that of all records that wait for the operator,
with those that its source has not read and those that its senders hold back (runtime/worker/waiting.py). Operators that
are fused into one chain share both, which stand at the first of them. `busy` is the share of the time since the last
look in which its task ran, and `cpu` the cores that it used, with the threads that its functions have started
(runtime/worker/processor_time.py). Of a worker, `cpu` and `cpu_wait` are the parts of the time in which its thread used
a core and waited for one, and `cpu_threads` is the number of cores that threads of the job's functions used. The
`latency_ms` of an operator is the age of records, since they entered the job, when its task had processed them, over
the last five to ten seconds; that of the job is the same for its sinks. A batch counts with the age of its oldest
record. `silent_s` says for how long a worker has not answered, when a status had to do without its answer, and is 0.0
when it has answered. The counters of a silent worker are those that it reported last. `mixing` is what
runtime/program/mixing.py finds in the plan.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from penstock.runtime.operators.base import Operator
from penstock.runtime.operators.ends import Read
from penstock.runtime.operators.windowing import LATE
from penstock.runtime.program.mixing import mixing
from penstock.runtime.program.plan import Plan
from penstock.runtime.worker.metrics import Histogram
from penstock.runtime.worker.waiting import WaitingRecords

# Rates are measured over at least this time, once it has passed. Over shorter times they depend on single batches.
_RATE_SPAN_NS = 500_000_000

_NOBODY: Mapping[int, float] = MappingProxyType({})


def no_status(name: str, state: str, error: str | None = None) -> dict[str, Any]:
    """Returns the status of a job of which nothing else is known. It defines the keys of every status."""
    return {
        "name": name,
        "state": state,
        "error": error,
        "waits_for": None,
        "started_ms": 0,
        "uptime_s": 0.0,
        "running_s": 0.0,
        "master_silent_s": 0.0,
        "operators": {},
        "tasks": [],
        "workers": [],
        "relays": [],
        "links": [],
        "spares": 0,
        "epochs": {
            "complete": 0,
            "begun": 0,
            "age_s": None,
            "restarts": 0,
            "last_failure": None,
            "damage": None,
            "store": None,
        },
        "placement": {
            "method": None,
            "nodes": [],
            "node_ids": [],
            "moves": 0,
            "last": None,
            "node_cost": None,
            "hop_ns_per_kib": None,
            "hop_ns_per_message": None,
            "hop_us": None,
            "between_nodes": None,
            "between_workers": None,
            "total": None,
            "intra_node_share": None,
            "machines": [],
        },
        "dual": {
            "mode": None,
            "spark": None,
            "spark_state": None,
            "processes": {"bridge": None, "executors": {}},
            "ranges": [],
            "stays": {},
        },
        "records_read": 0,
        "records_written": 0,
        "read_per_s": 0.0,
        "skipped": 0,
        "late_dropped": {},
        "mixing": {},
        "latency_ms": {"p50": None, "p99": None},
        "latency_all_ms": {"p50": None, "p99": None},
    }


def outage_words(reports: list[dict[str, Any]]) -> str | None:
    """Returns the thing for which a job waits when a step of a source or sink fails by an error that may pass."""
    outages = [(outage, report["index"]) for report in reports for outage in report.get("outages", ())]
    if not outages:
        return None
    outage, worker = max(outages, key=lambda each: each[0]["for_s"])
    more = f", as have {len(outages) - 1} more steps" if len(outages) > 1 else ""
    return (
        f"{outage['what']}, which has failed for {outage['for_s']:.1f} s in worker {worker}{more}, and is tried again "
        f"until {outage['limit_s']:.0f} s have passed: {outage['error']}"
    )


def hook_words(reports: list[dict[str, Any]], workers: list[dict[str, Any]], patience_s: float) -> str | None:
    """Returns the thing for which a job waits when an open() or close() has not returned for a while, by the reports of
    its workers and their rows in the status. Returns None when there is no such call. A worker in such a call answers,
    so it is not taken for one that hangs."""
    stuck = [report for report in reports if report["hook"] and report["hook"]["for_s"] > patience_s]
    if not stuck:
        return None
    report = max(stuck, key=lambda report: report["hook"]["for_s"])
    worker, hook = report["index"], report["hook"]
    pid = next((f" (process {row['pid']})" for row in workers if row["index"] == worker), "")
    more = f", nor have calls in {len(stuck) - 1} more of the workers" if len(stuck) > 1 else ""
    failure = f"; what failed before: {hook['failure'].rstrip('.')}" if hook["failure"] else ""
    return (
        f"{hook['name']}() of operator {hook['operator']!r}, which has not returned for {hook['for_s']:.0f} s in "
        f"worker {worker}{pid}{more}{failure}. Correct what it waits for; to end the job without it, cancel the job."
    )


#: What is known of a relay that has not said anything of itself yet.
NO_RELAY_REPORT: Mapping[str, int] = MappingProxyType(
    {"streams": 0, "kept_bytes": 0, "behind": 0, "forwarded": 0, "handed_over": 0}
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
        self._last: dict[str, Any] | None = None
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

    def last(self) -> dict[str, Any]:
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
    ) -> dict[str, Any]:
        """Builds the status from the newest reports of these workers. `silent` has the workers that owe an answer, and
        for how many seconds they have owed it."""
        answered = {report["index"] for report in reports}
        for report in reports:
            self.take(report)
        tasks: dict[int, dict[str, Any]] = {}
        for report in self._reports.values():
            for task in report["tasks"]:
                # A task that has migrated may also be in the last report of a silent worker.
                if task["number"] not in tasks or self._placed.get(task["number"]) == report["index"]:
                    tasks[task["number"]] = task
                    self._told_by[task["number"]] = report["index"]
        for task in tasks.values():
            self._waiting.look(task, task["operators"][0]["records_in"])  # type: ignore[arg-type]
        operators = {}
        for chain in self._plan.chains:
            waiting = self._waiting.of_chain(chain.index)
            numbers = [task.number for task in self._plan.tasks if task.chain == chain.index]
            for position, operator in enumerate(chain.operators):
                operators[operator.name] = self._operator(operator, position, numbers, tasks)
                operators[operator.name]["waiting"] = 0 if position else waiting
            for key_by, keyed in pairwise(chain.operators):
                if key_by.kind == "key_by":  # its failures count for the operator for which it finds the keys
                    operators[keyed.name]["skipped"] += operators[key_by.name]["skipped"]
                    operators[key_by.name]["skipped"] = 0
        for task in tasks.values():
            for name, skipped in task["skipped_on_the_way"].items():
                operators[name]["skipped"] += skipped
        self._last = {
            **no_status(self._plan.name, state),
            "started_ms": int(self._started * 1000),
            "uptime_s": now - self._started,
            "running_s": now - self._running if self._running is not None else 0.0,
            "operators": operators,
            "tasks": [self._task(task.number, tasks.get(task.number)) for task in self._plan.tasks],
            "workers": [
                {
                    **self._worker(info, tasks),
                    "silent_s": 0.0 if info["index"] in answered else silent.get(info["index"], 0.0),
                }
                for info in self._workers
            ],
            **self._totals(operators, tasks),
            "mixing": self._mixing,
        }
        return self._last

    def _is_known(self, task: dict[str, Any]) -> bool:
        """Whether a task in a worker's report belongs to this plan. While the plan changes, it may be a task of the
        plan before, with the same number and other operators."""
        known = self._plan.by_number.get(task["number"])
        if known is None:
            return False
        names = [operator.name for operator in self._plan.chains[known.chain].operators]
        return names == [operator["name"] for operator in task["operators"]]

    def _operator(
        self, operator: Operator, position: int, numbers: list[int], tasks: dict[int, dict[str, Any]]
    ) -> dict[str, Any]:
        counts = {"records_in": 0, "records_out": 0, "skipped": 0, "late": 0}
        rates = {"in_per_s": 0.0, "out_per_s": 0.0}
        queued, busy, cpu = 0, 0.0, 0.0
        latency = Histogram()
        for number in numbers:
            task = tasks.get(number)
            if task is None:
                continue
            mine = task["operators"][position]
            for what in counts:
                counts[what] += mine[what]
            before, seconds = self._earlier(number)
            if before is not None:
                then = before["operators"][position]
                # The counters of a task that went back to an epoch are smaller than before.
                rates["in_per_s"] += max(0, mine["records_in"] - then["records_in"]) / seconds
                rates["out_per_s"] += max(0, mine["records_out"] - then["records_out"]) / seconds
            queued += task["queued"] if position == 0 else 0
            busy = max(busy, min(1.0, self._cores(number, task, "busy_ns")))
            cpu = max(cpu, self._cores(number, task, "cpu_ns", "threads_ns"))
            latency.merge(Histogram.from_sparse(task["latency_us"]))
        return {
            "parallelism": len(numbers),
            **counts,
            **rates,
            "queued": queued,
            "busy": busy,
            "cpu": cpu,
            "latency_ms": _quantiles(latency),
        }

    def _earlier(self, number: int) -> tuple[dict[str, Any] | None, float]:
        """Returns the task's counters in an earlier report of the worker that has reported them last, and the seconds
        between that report and the newest one. Returns None when that worker has not reported them before."""
        worker = self._told_by[number]
        before, now = self._history[worker][0], self._reports[worker]
        if now["time_ns"] <= before["time_ns"]:
            return None, 0.0
        for task in before["tasks"]:
            if task["number"] == number:
                return task, (now["time_ns"] - before["time_ns"]) / 1e9
        return None, 0.0

    def _cores(self, number: int, task: dict[str, Any], *counters: str) -> float:
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

    def _task(self, number: int, task: dict[str, Any] | None) -> dict[str, Any]:
        entry = {"number": number, "name": self._plan.task_name(self._plan.by_number[number])}
        entry["worker"] = self._placed.get(number)
        if task is None:  # its worker has not reported it yet
            return {
                **entry,
                "finished": False,
                "blocked": False,
                "queued": 0,
                "unsent": 0,
                "busy": 0.0,
                "cpu": 0.0,
                "records_in": 0,
                "records_out": 0,
            }
        return {
            **entry,
            **{what: task[what] for what in ("finished", "blocked", "queued", "unsent")},
            "busy": min(1.0, self._cores(number, task, "busy_ns")),  # a step counts when it has ended
            "cpu": self._cores(number, task, "cpu_ns", "threads_ns"),
            "records_in": task["operators"][0]["records_in"],
            "records_out": task["operators"][-1]["records_out"],
        }

    def _worker(self, info: dict[str, Any], tasks: dict[int, dict[str, Any]]) -> dict[str, Any]:
        mine = [number for number, worker in self._placed.items() if worker == info["index"]]
        return {
            "index": info["index"],
            "pid": info["pid"],
            "state": info["state"],
            "node_id": info["node_id"],
            "tasks": mine,
            "queued": sum(tasks[number]["queued"] for number in mine if number in tasks),
            "ring_bytes": self._reports.get(info["index"], {}).get("ring_bytes", 0),
            "transports": self._reports.get(info["index"], {}).get("transports", {}),
            "sent_bytes": self._reports.get(info["index"], {}).get("sent_bytes", {}),
            "streams": self._reports.get(info["index"], {}).get("streams", []),
            "cpu": self._cores_of_worker(info["index"], "loop_ns"),
            "cpu_wait": self._cores_of_worker(info["index"], "core_wait_ns"),
            "cpu_threads": self._cores_of_worker(info["index"], "threads_ns"),
        }

    def _totals(self, operators: dict[str, Any], tasks: dict[int, dict[str, Any]]) -> dict[str, Any]:
        recent, whole = Histogram(), Histogram()
        totals: dict[str, Any] = {"records_read": 0, "records_written": 0, "read_per_s": 0.0, "skipped": 0}
        totals["late_dropped"] = {}
        for chain in self._plan.chains:
            for operator in chain.operators:
                counts = operators[operator.name]
                totals["skipped"] += counts["skipped"]
                if counts["late"] and (operator.name, LATE) not in self._plan.side_outputs:
                    totals["late_dropped"][operator.name] = counts["late"]
                if isinstance(operator, Read):
                    totals["records_read"] += counts["records_out"]
                    totals["read_per_s"] += counts["out_per_s"]
                if operator.is_sink:
                    totals["records_written"] += counts["records_in"]
            for task in self._plan.tasks:
                if task.chain == chain.index and chain.operators[-1].is_sink and task.number in tasks:
                    recent.merge(Histogram.from_sparse(tasks[task.number]["latency_us"]))
                    whole.merge(Histogram.from_sparse(tasks[task.number]["latency_all_us"]))
        return {**totals, "latency_ms": _quantiles(recent), "latency_all_ms": _quantiles(whole)}


def _grown_ns(before: dict[str, Any], now: dict[str, Any], *counters: str) -> int:
    """Returns by how much some counters have grown together. In a process that was just started they begin with 0."""
    return sum(max(0, now.get(counter, 0) - before.get(counter, 0)) for counter in counters)


def _quantiles(histogram: Histogram) -> dict[str, float | None]:
    p50, p99 = histogram.quantile(0.5), histogram.quantile(0.99)
    return {"p50": None if p50 is None else p50 / 1000, "p99": None if p99 is None else p99 / 1000}
