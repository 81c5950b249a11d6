"""LocalJob: the host of a job in the process of its program, and the program's link to it.

The JobRunner lives in threads of the program, and the workers are child processes of the program. Only what is in the
job's store outlives the program; `resume` continues the job from it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from penstock.host.carry.carrier import Carrier
from penstock.host.carry.carrier_options import CarrierOptions
from penstock.host.carry.job_link import JobLink
from penstock.host.carry.job_runner import JobRunner
from penstock.host.carry.notes import Notes
from penstock.host.carry.requests import Request
from penstock.host.decide.commands import JobEnd
from penstock.host.process.linger import Driver
from penstock.host.process.reporting import Report
from penstock.local.placing import LocalPlacing
from penstock.local.processes import LocalProcesses
from penstock.local.worker import NODE
from penstock.runtime.errors import JobError, first_line
from penstock.runtime.program.plan import Plan
from penstock.runtime.records.pickling import Program

T = TypeVar("T")


class LocalJob(Carrier, JobLink):
    """The carrier of a JobRunner , and the JobLink to it."""

    is_local = True
    where = "processes of this program"

    def __init__(self, plan: Plan, options: CarrierOptions, program: Program) -> None:
        self.notes = Notes(plan.name, NODE, {})
        self.host: object = self
        self._options = options
        self.driver = Driver.here(NODE)
        self._process = os.getpid()
        self._reporting = threading.Lock()  # the reports of all workers are taken one at a time
        worker = replace(options.worker, network=options.network.secured() if options.network.everywhere else None)
        self._processes = LocalProcesses(plan.name, worker, self._report)
        self._runner = JobRunner(plan, options, self, program)
        self._runner.start()

    def _report(self, worker: int, incarnation: int, number: int, item: Report) -> None:
        with self._reporting:
            self._runner.report(worker, incarnation, number, item)

    # --- the carrier -----------------------------------------------------------------------------------------

    def reserve(self, cancelled: Callable[[], bool], known: str = "") -> tuple[int, LocalProcesses, LocalPlacing]:
        in_turn = self._options.placement.method == "round-robin"
        return self._options.workers, self._processes, LocalPlacing(self._options.workers, in_turn=in_turn)

    def leave(self) -> None:
        self._processes.close()

    # --- the link ----------------------------------------------------------------------------------------------

    def ask(self, request: Request[T]) -> T:
        if os.getpid() != self._process:  # a fork has none of the threads that would answer
            raise JobError(
                f"this process was forked from process {self._process}, which runs the job: only that process can ask "
                "for its status, stop it and read its results"
            )
        answer: T = self._runner.ask(request)
        return answer

    def end_without_host(self, error: BaseException) -> JobEnd:
        return JobEnd("FAILED", f"its host failed: {first_line(error)}")
