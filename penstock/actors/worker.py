"""Worker: the Ray actor around a worker's process.

The run loop is in the actor's main thread, and the call of `run` stays pending for the life of the job. The call's
failure tells the JobMaster that the process has died. Data does not pass through Ray, except what Collect and Console
sinks send to the driver.
"""

from __future__ import annotations

from typing import Any

import ray

from penstock.actors.raylet import end_with_raylet
from penstock.host.process.hangs import Process
from penstock.host.process.machine import machine_id
from penstock.host.process.reporting import Report
from penstock.host.process.worker_process import Outcome, Watched, WorkerOptions, WorkerProcess
from penstock.runtime.operators.micro_batch import Bridge


class Worker:
    """See the module's docstring. Calls come in the order warm and answer (of a spare process only), prepare, connect,
    run."""

    def __init__(self) -> None:
        end_with_raylet()
        self._process = WorkerProcess(_connect_bridge)

    def warm(self, program: bytes) -> None:
        """See WorkerProcess, also for the methods that follow."""
        self._process.warm(program)

    def answer(self) -> None:
        """Returns, which shows that this process runs."""

    def prepare(self, index: int, options: WorkerOptions, ring_at_least: int = 0) -> dict[str, Any]:
        node = ray.get_runtime_context().get_node_id()
        return self._process.prepare(index, options, ring_at_least, node, ray.util.get_node_ip_address())

    def connect(self, program: bytes, master: Any, incarnation: int, watched: tuple[int, str, float]) -> Outcome:
        """See WorkerProcess. `watched`: the process and the machine of the JobMaster `master`, and the number of
        seconds of silence after which a worker of the same machine kills it."""
        pid, machine, limit_s = watched
        here = Watched(Process(pid), limit_s) if machine == machine_id() else None
        return self._process.connect(program, _RayReports(master), incarnation, here)

    def run(self) -> Outcome:
        """Runs the run loop until the job has ended or this worker has failed."""
        return self._process.run()


class _RayReports:
    """Carries reports as calls of the JobMaster."""

    def __init__(self, master: Any) -> None:
        self._master = master

    def report(self, worker: int, incarnation: int, number: int, item: Report) -> Any:
        return self._master.report.remote(worker, incarnation, number, item)

    def wait(self, reports: list[Any]) -> None:
        ray.get(reports)


def _connect_bridge(name: str, node: str) -> Bridge:
    from penstock.actors.spark_bridge import BridgeLink  # loads pyarrow

    return BridgeLink(name, node)
