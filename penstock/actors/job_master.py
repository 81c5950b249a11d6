"""JobMaster: the one Ray actor a job that starts its Workers, watches them, and ends the job, however it ends.

It owns the Workers: when it dies Ray ends them, and it ends itself soon after the job. A driver that is not detached
owns it in turn. It never touches records, but for those on their way from Collect and Console sinks to the driver.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.exceptions import ActorUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.actors.control import ControlClients
from penstock.actors.in_order import InOrder
from penstock.actors.status import StatusBuilder
from penstock.actors.worker import Outcome, Worker, WorkerOptions
from penstock.placement.round_robin import round_robin
from penstock.runtime.plan import Plan

State = Literal["STARTING", "RUNNING", "STOPPING", "FINISHED", "CANCELLED", "FAILED"]
ENDED: tuple[State, ...] = ("FINISHED", "CANCELLED", "FAILED")

# The Ray concurrency group, of one thread, in which reports are taken.
REPORTS = "reports"

# After the end the JobMaster stays this long for drivers that still ask for its outcome, unless told to go before.
_LINGER_S = 5.0
# A cancelled run loop ends within one step of each task; a worker that does not (a user function that hangs) is killed.
_CANCEL_S = 2.0
# A worker's control thread waits for the interpreter while a user's function holds it; longer than this is a hang.
_CONTROL_S = 5.0
_CONSOLE_LINES_MAX = 10_000


@dataclass(frozen=True)
class JobOptions:
    """What `run()` was told; plain data."""

    workers: int
    cpus_per_worker: float
    start_timeout_s: float
    worker: WorkerOptions


@dataclass
class JobEnd:
    """How a job ended. `kind` tells which error the driver raises."""

    state: State
    error: str | None = None
    operator: str | None = None
    kind: Literal["failed", "resources"] = "failed"


class JobMaster:
    """See the module's docstring."""

    def __init__(self, plan: Plan, options: JobOptions) -> None:
        self._plan = plan
        self._options = options
        self._state: State = "STARTING"
        self._end: JobEnd | None = None
        self._ended = threading.Event()
        self._released = threading.Event()
        self._drivers = 0  # that wait for the outcome, or have it and still ask
        self._lock = threading.Lock()
        self._workers: list[Any] = []
        self._runs: dict[Any, int] = {}
        self._infos: list[dict[str, Any]] = []
        self._control: ControlClients | None = None  # once the workers run
        self._cancelling = False
        self._reports: InOrder[tuple[str, list[Any]]] = InOrder()  # used in the one thread of their group
        self._collected: dict[str, list[Any]] = {}
        self._console: deque[str] = deque(maxlen=_CONSOLE_LINES_MAX)
        self._console_total = 0
        self._console_more = threading.Condition()
        self._status = StatusBuilder(plan)
        self._status_lock = threading.Lock()
        self._last_status: dict[str, Any] | None = None
        self._handle = ray.get_runtime_context().current_actor
        threading.Thread(target=self._supervise, name="supervise", daemon=True).start()

    # --- asked by drivers ----------------------------------------------------------------------------------

    def outcome(self) -> JobEnd:
        """Wait for the end of the job."""
        with self._lock:
            self._drivers += 1
        self._ended.wait()
        assert self._end is not None
        return self._end

    def status(self) -> dict[str, Any]:
        """The job's status as plain data; the last one before the end once it has ended."""
        if self._last_status is not None:
            return self._last_status
        return self._build_status()

    def stop(self) -> None:
        """End the sources; the job finishes when what they read has gone through."""
        with self._lock:
            if self._state in ENDED:
                return
            self._state = "STOPPING"
        if self._control is not None:
            self._control.call("stop", _CONTROL_S)

    def cancel(self) -> None:
        """End the job at once."""
        with self._lock:
            if self._state in ENDED:
                return
            self._cancelling = True
        if self._control is not None:
            self._control.call("cancel", _CONTROL_S)

    def release(self) -> None:
        """A driver that asked for the outcome has what it wants: with the last, there is no need to linger."""
        with self._lock:
            self._drivers -= 1
            if self._drivers == 0:
                self._released.set()

    def collected(self, channel: str, start: int) -> list[Any]:
        """What a Collect sink has sent, from number `start` on."""
        with self._lock:
            return self._collected.get(channel, [])[start:]

    def console(self, seen: int, timeout: float) -> tuple[int, list[str]]:
        """(number of lines so far, the lines after the first `seen` that are still kept), waiting for the first."""
        with self._console_more:
            self._console_more.wait_for(lambda: self._console_total > seen or self._ended.is_set(), timeout)
            new = min(self._console_total - seen, len(self._console))
            return self._console_total, list(self._console)[len(self._console) - new :]

    # --- told by workers -----------------------------------------------------------------------------------

    @ray.method(concurrency_group=REPORTS)  # type: ignore[untyped-decorator]
    def report(self, worker: int, number: int, channel: str, records: list[Any]) -> None:
        """Take a worker's report number `number` of a Collect or Console sink; calls may come in any order."""
        for to, some in self._reports.take(worker, number, (channel, records)):
            self._keep(to, some)

    def _keep(self, channel: str, records: list[Any]) -> None:
        if channel == "console":
            with self._console_more:
                self._console.extend(records)
                self._console_total += len(records)
                self._console_more.notify_all()
            return
        with self._lock:
            self._collected.setdefault(channel, []).extend(records)

    # --- the job's life ------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        try:
            end = self._start() or self._watch()
        except Exception as error:
            end = JobEnd("FAILED", f"JobMaster failed: {error}\n{traceback.format_exc()}")
        if end.state == "FINISHED":
            self._last_status = self._build_status()
        self._end_workers()
        with self._lock:
            self._state = end.state
            self._end = end
        self._last_status = {
            **(self._last_status or self._status.last()),
            "state": end.state,
            "error": end.error,
        }
        self._ended.set()
        with self._console_more:
            self._console_more.notify_all()
        self._released.wait(_LINGER_S)
        ray.kill(self._handle)

    def _start(self) -> JobEnd | None:
        """Start all workers and connect them; an end when that fails."""
        options = self._options
        here = ray.get_runtime_context().get_node_id()
        actor = ray.remote(Worker).options(
            num_cpus=options.cpus_per_worker,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        )
        self._workers = [actor.remote(index) for index in range(options.workers)]
        prepared = [worker.prepare.remote(options.worker) for worker in self._workers]
        _, late = ray.wait(prepared, num_returns=len(prepared), timeout=options.start_timeout_s)
        if late:
            return JobEnd("FAILED", self._missing(len(late)), kind="resources")
        try:
            self._infos = ray.get(prepared)
        except ActorUnschedulableError:
            return JobEnd("FAILED", self._missing(options.workers), kind="resources")
        except Exception as error:
            return JobEnd("FAILED", f"a worker could not start: {_cause(error)}")
        addresses = {info["index"]: info["address"] for info in self._infos}
        placed = round_robin(len(self._plan.tasks), options.workers)
        self._status.place(placed, self._infos)
        connected = [worker.connect.remote(self._plan, placed, addresses, self._handle) for worker in self._workers]
        try:
            failed = [outcome for outcome in ray.get(connected) if outcome.error is not None]
        except Exception as error:
            return JobEnd("FAILED", f"a worker died while the job started: {_cause(error)}")
        if failed:
            return JobEnd("FAILED", failed[0].error, failed[0].operator)
        control = ControlClients([info["control"] for info in self._infos])
        self._runs = {worker.run.remote(): index for index, worker in enumerate(self._workers)}
        with self._lock:
            self._control = control
            if self._state == "STARTING":
                self._state = "RUNNING"
            self._status.running()
            stopping = self._state == "STOPPING"
            cancelling = self._cancelling
        if cancelling or stopping:  # said before there was anybody to tell
            control.call("cancel" if cancelling else "stop", _CONTROL_S)
        return None

    def _missing(self, late: int, detail: str = "") -> str:
        have, free = ray.cluster_resources(), ray.available_resources()
        options = self._options
        return (
            f"{late} of {options.workers} workers could not be placed within {options.start_timeout_s:g} s. "
            f"The job asks for {options.workers} x {options.cpus_per_worker:g} CPUs on one node; the cluster has "
            f"{have.get('CPU', 0):g} CPUs, {free.get('CPU', 0):g} free. Use fewer workers, a smaller "
            f"cpus_per_worker, or stop other jobs. {detail}"
        ).strip()

    def _watch(self) -> JobEnd:
        """Wait until all workers have finished, or one has failed or died."""
        pending = list(self._runs)
        while pending:
            done, pending = ray.wait(pending, num_returns=1)
            end = self._judge(done[0])
            if end is not None and end.operator is None and pending:
                # A death is often seen by a neighbour first; the others' outcomes may hold the cause.
                end = self._first_cause(end, pending)
            if end is not None:
                return JobEnd("CANCELLED") if self._cancelling else end
        return JobEnd("CANCELLED" if self._cancelling else "FINISHED")

    def _judge(self, run: Any) -> JobEnd | None:
        index = self._runs[run]
        try:
            outcome: Outcome = ray.get(run)
        except Exception as error:
            pid = self._infos[index]["pid"]
            return JobEnd("FAILED", f"worker {index} (process {pid}) died: {_cause(error)}")
        if outcome.error is not None:
            return JobEnd("FAILED", outcome.error, outcome.operator)
        return None

    def _first_cause(self, end: JobEnd, pending: list[Any]) -> JobEnd:
        done, _ = ray.wait(pending, num_returns=len(pending), timeout=0.1)
        for run in done:
            other = self._judge(run)
            if other is not None and other.operator is not None:
                return other
        return end

    def _end_workers(self) -> None:
        """Cancel what still runs, give it a moment to close its files, then end every worker process."""
        running = list(self._runs)
        if self._control is not None:
            self._control.call("cancel", _CONTROL_S)
        if running:
            ray.wait(running, num_returns=len(running), timeout=_CANCEL_S)
        if self._control is not None:
            self._control.close()
        for worker in self._workers:
            ray.kill(worker)

    def _build_status(self) -> dict[str, Any]:
        # A worker that died just now answers nothing: its run reference tells, and the status shows what it last said.
        answers = self._control.call("status", _CONTROL_S) if self._control is not None else []
        reports = [report for report in answers if report is not None]
        with self._lock:
            state = self._state
        with self._status_lock:
            return self._status.build(state, reports, time.time())


def _cause(error: Exception) -> str:
    """What went wrong, without Ray's traceback of where it was noticed."""
    cause = getattr(error, "cause", None) or error
    text = str(cause).strip()
    return text.splitlines()[0] if text else type(cause).__name__
