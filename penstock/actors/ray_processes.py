"""Runs the processes of a job's workers as Ray actors, on the nodes that were reserved for them."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError

from penstock.actors.elsewhere import process_of
from penstock.actors.nodes import Nodes
from penstock.actors.worker import Worker
from penstock.placement.groups import NotPlaced
from penstock.runtime.host.job_runner import first_line
from penstock.runtime.host.processes import CannotStart, ProcessDied
from penstock.runtime.host.worker_process import Outcome, WorkerOptions


class RayWorker:
    """An actor that is ready to run. See WorkerHandle."""

    def __init__(self, actor: Any, info: dict[str, Any]) -> None:
        self.info = info
        self._actor = actor
        self._process = process_of(info["pid"], info["node_id"], actor)

    def run(self) -> Outcome:
        """See WorkerHandle."""
        try:
            outcome: Outcome = ray.get(self._actor.run.remote())
        except Exception as error:  # whatever Ray makes of a process's end
            raise ProcessDied(first_line(error)) from error
        return outcome

    def kill(self) -> None:
        """See WorkerHandle."""
        self._process.kill()


class RayProcesses:
    """See Processes. `master`: the handle of the JobMaster's actor."""

    def __init__(
        self,
        nodes: Nodes,
        master: Any,
        workers: int,
        cpus_per_worker: float,
        options: WorkerOptions,
        start_timeout_s: float,
        hang_timeout_s: float,
    ) -> None:
        self._nodes = nodes
        self._master = master
        self._workers = workers
        self._cpus = cpus_per_worker
        self._options = options
        self._start_timeout_s = start_timeout_s
        self._hang_timeout_s = hang_timeout_s
        self._node = ray.get_runtime_context().get_node_id()
        self._lock = threading.Lock()
        self._closed = False
        self._actors: dict[int, Any] = {}
        # Workers that have never had a process that was there, and those whose first process loads the program.
        self._not_there = set(range(workers))
        self._loading: set[int] = set()

    def start(self, worker: int, incarnation: int, ring_bytes: int, program: bytes, deadline: float) -> RayWorker:
        """See Processes."""
        actor = self._new_actor(worker)
        try:
            return self._started(actor, worker, incarnation, ring_bytes, program, deadline)
        except CannotStart:
            ray.kill(actor)
            raise

    def _new_actor(self, worker: int) -> Any:
        try:
            strategy = self._nodes.strategy(worker)
        except NotPlaced as error:  # and never will be
            raise CannotStart(str(error), "resources") from error
        actor = ray.remote(Worker).options(num_cpus=self._cpus, scheduling_strategy=strategy).remote(worker)
        with self._lock:
            self._actors[worker] = actor
            closed = self._closed
        if closed:  # the job has ended meanwhile
            ray.kill(actor)
        return actor

    def _started(
        self, actor: Any, worker: int, incarnation: int, ring_bytes: int, program: bytes, deadline: float
    ) -> RayWorker:
        first = worker in self._not_there
        try:
            info = _get(actor.prepare.remote(self._options, ring_bytes), deadline)
        except GetTimeoutError as error:
            if first:
                with self._lock:
                    late = len(self._not_there)
                raise CannotStart(self._missing(late), "resources") from error
            raise CannotStart(
                f"its process was not ready within start_timeout_s={self._start_timeout_s:g} seconds", "died"
            ) from error
        except ActorUnschedulableError as error:
            raise CannotStart(self._missing(self._workers), "resources") from error
        except RayActorError as error:
            raise CannotStart(first_line(error), "died") from error
        except Exception as error:  # of the worker's own
            raise CannotStart(f"a worker could not start: {first_line(error)}", "program") from error
        with self._lock:
            if first:
                self._loading.add(worker)
            self._not_there.discard(worker)
        watched = (os.getpid(), self._node, self._hang_timeout_s)
        try:
            outcome = _get(actor.connect.remote(program, self._master, incarnation, watched), deadline)
        except GetTimeoutError as error:
            text = (
                f"its process had not loaded the job's program within start_timeout_s={self._start_timeout_s:g} seconds"
            )
            raise CannotStart(text, "died") from error
        except RayActorError as error:
            raise CannotStart(first_line(error), "died") from error
        finally:
            with self._lock:
                self._loading.discard(worker)
        if outcome.error is not None:
            raise CannotStart(outcome.error, "program", outcome.operator)
        return RayWorker(actor, info)

    def waits_for(self) -> str:
        """Returns what the job waits for while its first processes start, for the status."""
        with self._lock:
            late, loading = len(self._not_there), len(self._loading)
        if not late:
            return f"{loading} of {self._workers} workers load the job's program"
        have, free = _cpus()
        return (
            f"{self._workers - late} of {self._workers} workers have started, each takes {self._cpus:g} CPUs; "
            f"{free:g} of the cluster's {have:g} are free"
        )

    def _missing(self, late: int) -> str:
        have, free = _cpus()
        return (
            f"{late} of {self._workers} workers could not be placed within {self._start_timeout_s:g} s. "
            f"The job asks for {self._workers} x {self._cpus:g} CPUs on one node; the cluster has "
            f"{have:g} CPUs, {free:g} free. Use fewer workers or a smaller cpus_per_worker, or stop other jobs."
        )

    def close(self) -> None:
        """See Processes."""
        with self._lock:
            self._closed = True
            actors = list(self._actors.values())
        for actor in actors:
            ray.kill(actor)
        self._nodes.close()


def _get(call: Any, deadline: float) -> Any:
    return ray.get(call, timeout=max(0.0, deadline - time.monotonic()))


def _cpus() -> tuple[float, float]:
    """Returns the number of CPUs of the cluster, and how many of them are free."""
    return ray.cluster_resources().get("CPU", 0.0), ray.available_resources().get("CPU", 0.0)
