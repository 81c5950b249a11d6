"""Faults of the order between switches to Spark, deaths, rescales and migrations: entries of the table of
tests/planting.py. All of them are events of one JobHost, so the simulated cluster finds them."""

from __future__ import annotations

from typing import Any
from unittest import mock

from penstock.bridge.commands import DivertTasks, WorkerCommand
from penstock.bridge.paradigm_scheduler import ParadigmScheduler
from penstock.host.decide.job_host import JobHost
from penstock.host.decide.paradigms import Paradigms, SparkEvent
from tests.epochs.sim import Faults
from tests.planting import Seeds, Test, planted_fault

_HOST = "penstock/host/decide/job_host.py"
_PARADIGMS = "penstock/host/decide/paradigms.py"
_SCHEDULER = "penstock/bridge/paradigm_scheduler.py"


def _patch(owner: Any, name: str, new: Any) -> Any:
    return mock.patch.object(owner, name, new)


def _decides(faults: Faults) -> bool:
    return faults.paradigms is not None


def _switches(faults: Faults) -> bool:
    return faults.diversions > 0 or _decides(faults)


# --- a switch and a death ---------------------------------------------------------------------------------------------


@planted_fault(_PARADIGMS, Seeds(33, lambda faults: _switches(faults) and faults.kills > 0))
def _messages_to_the_dead() -> Any:
    """A worker that has died since it told its load is sent the scheduler's message, which nobody answers."""
    call = Paradigms._call

    def whoever(self: Paradigms, command: WorkerCommand, now: float) -> None:
        everyone = self._lives.running | set(self._lives.without_run())
        with mock.patch.object(self._lives, "running", everyone):
            call(self, command, now)

    return _patch(Paradigms, "_call", whoever)


@planted_fault(_PARADIGMS, Seeds(5, lambda faults: faults.diversions > 0 and faults.kills > 0))
def _a_death_is_an_answer() -> Any:
    """A worker that dies before it has diverted its tasks counts as one that has."""
    not_done = Paradigms._not_done

    def done(self: Paradigms, command: WorkerCommand, why: str | None, now: float) -> None:
        if why is None and isinstance(command, DivertTasks):
            self.take(lambda scheduler, now: scheduler.done(now, command.number), now)
        not_done(self, command, why, now)

    return _patch(Paradigms, "_not_done", done)


# --- switches among each other, and the end ---------------------------------------------------------------------------


@planted_fault(_HOST, Seeds(2, _decides))
def _decisions_after_the_end() -> Any:
    """The scheduler goes on when the job has ended."""

    def always(self: JobHost, event: SparkEvent, now: float) -> Any:
        assert self._paradigms is not None
        self._paradigms.take(event, now)
        return self._settled(now)

    return _patch(JobHost, "of_scheduler", always)


@planted_fault(_SCHEDULER, Seeds(2, lambda faults: _decides(faults) and faults.spark_trouble > 0))
def _a_late_failure_counts() -> Any:
    """The failure of a Spark that was given up is taken for one of the present Spark."""
    failed = ParadigmScheduler.spark_failed

    def whichever(self: ParadigmScheduler, now: float, life: int, why: str) -> Any:
        present = self._spark.number
        return failed(self, now, life if present is None else present, why)

    return _patch(ParadigmScheduler, "spark_failed", whichever)


@planted_fault(_PARADIGMS, Test("tests/host/test_spark_runner.py::test_a_fault_of_the_scheduler_does_not_end_the_job"))
def _a_fault_of_the_scheduler_ends_the_job() -> Any:
    """An error in the scheduler is an error of the JobHost."""

    def carelessly(self: Paradigms, event: SparkEvent, now: float) -> None:
        event(self._scheduler, now)

    return _patch(Paradigms, "take", carelessly)
