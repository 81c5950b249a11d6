"""Faults of the order between switches to Spark, deaths, rescales and migrations: entries of the table of
tests/planting.py. All of them are events of one JobHost, so the simulated cluster finds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from penstock.bridge.commands import DivertTasks, WorkerCommand
from penstock.bridge.paradigm_scheduler import ParadigmScheduler
from penstock.host.decide.job_host import JobHost
from tests.epochs.sim import Faults
from tests.planting import Seeds, Test, planted_fault

_HOST = "penstock/host/decide/job_host.py"
_SCHEDULER = "penstock/bridge/paradigm_scheduler.py"


def _patch(owner: Any, name: str, new: Any) -> Any:
    return mock.patch.object(owner, name, new)


def _decides(faults: Faults) -> bool:
    return faults.paradigms is not None


def _switches(faults: Faults) -> bool:
    return faults.diversions > 0 or _decides(faults)


# --- a switch and a death ---------------------------------------------------------------------------------------------


@planted_fault(_HOST, Seeds(5, lambda faults: _switches(faults) and faults.kills > 0))
def _messages_to_the_dead() -> Any:
    """A worker that has died since it told its load is sent the scheduler's message, which nobody answers."""
    call = JobHost._call_for_scheduler

    def whoever(self: JobHost, command: WorkerCommand, now: float) -> None:
        running = set(range(self._options.workers))
        with mock.patch.object(JobHost, "running", running):
            call(self, command, now)

    return _patch(JobHost, "_call_for_scheduler", whoever)


@planted_fault(_HOST, Seeds(5, lambda faults: faults.diversions > 0 and faults.kills > 0))
def _a_death_is_an_answer() -> Any:
    """A worker that dies before it has diverted its tasks counts as one that has."""
    not_done = JobHost._not_done

    def done(self: JobHost, command: WorkerCommand, why: str | None, now: float) -> None:
        if why is None and isinstance(command, DivertTasks):
            self._schedule(lambda scheduler: scheduler.done(now, command.number), now)
        not_done(self, command, why, now)

    return _patch(JobHost, "_not_done", done)


# --- switches among each other, and the end ---------------------------------------------------------------------------


@planted_fault(_HOST, Seeds(2, _decides))
def _decisions_after_the_end() -> Any:
    """The scheduler goes on when the job has ended."""

    def always(self: JobHost, event: Callable[[ParadigmScheduler], Any], now: float) -> Any:
        self._schedule(event, now)
        return self._settled(now)

    return _patch(JobHost, "_of_scheduler", always)


@planted_fault(_SCHEDULER, Seeds(2, lambda faults: _decides(faults) and faults.spark_trouble > 0))
def _a_late_failure_counts() -> Any:
    """The failure of a Spark that was given up is taken for one of the present Spark."""
    failed = ParadigmScheduler.spark_failed

    def whichever(self: ParadigmScheduler, now: float, life: int, why: str) -> Any:
        present = self._spark.number
        return failed(self, now, life if present is None else present, why)

    return _patch(ParadigmScheduler, "spark_failed", whichever)


@planted_fault(_HOST, Test("tests/host/test_spark_runner.py::test_a_fault_of_the_scheduler_does_not_end_the_job"))
def _a_fault_of_the_scheduler_ends_the_job() -> Any:
    """An error in the scheduler is an error of the JobHost."""

    def carelessly(self: JobHost, event: Callable[[ParadigmScheduler], Any], now: float) -> None:
        assert self._scheduler is not None
        event(self._scheduler)

    return _patch(JobHost, "_schedule", carelessly)
