"""Faults of the paradigm scheduler, and of the way of its messages: entries of the table of tests/planting.py. What
takes real tasks, deaths and changes of the plan at once to be seen is found by the simulated cluster."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest import mock

from penstock.bridge.burst import BurstDetector
from penstock.bridge.divert_requests import DivertRequests
from penstock.bridge.paradigm_scheduler import ParadigmScheduler
from penstock.bridge.sample_requests import SampleRequests
from penstock.bridge.spark_life import SparkLife
from penstock.host.decide.paradigms import Paradigms
from penstock.runtime.worker.task import Task
from tests.epochs.sim import Faults
from tests.planting import Seeds, Test, planted_fault

_SCHEDULER = "penstock/bridge/paradigm_scheduler.py"
_REQUESTS = "penstock/bridge/divert_requests.py"
_LIFE = "penstock/bridge/spark_life.py"


def _decides(faults: Faults) -> bool:
    return faults.paradigms is not None


def _test(name: str) -> Test:
    return Test(f"tests/bridge/test_paradigm_scheduler.py::{name}")


@planted_fault(_REQUESTS, _test("test_a_worker_that_does_not_come_to_it_finds_one_request"))
def _requests_pile_up() -> Any:
    """A worker that has not answered a request gets the next one at each look."""
    end = DivertRequests.end

    def begin(self: DivertRequests, place: tuple[int, int], asked_s: float) -> int:
        self._number += 1
        self._open[self._number] = place
        return self._number

    def end_if_open(self: DivertRequests, number: int, now: float, *, refused: bool) -> None:
        if number in self._open:
            end(self, number, now, refused=refused)

    return mock.patch.multiple(DivertRequests, _begin=begin, end=end_if_open)


@planted_fault(_REQUESTS, _test("test_a_report_from_before_the_answer_to_a_request_leads_to_no_other"))
def _old_reports_count() -> Any:
    """A worker is told again what it has just done, because its report is older than its answer."""
    begin = DivertRequests._begin
    return mock.patch.object(DivertRequests, "_begin", lambda self, place, _: begin(self, place, math.inf))


@planted_fault(_LIFE, _test("test_a_spark_that_is_silent_is_killed_when_it_exceeds_hang_timeout_s"))
def _short_patience() -> Any:
    """Spark is killed after a silence of five seconds, whatever hang_timeout_s says."""
    init = SparkLife.__init__
    return mock.patch.object(SparkLife, "__init__", lambda self, prepare_s, _: init(self, prepare_s, 5.0))


@planted_fault(_LIFE, _test("test_a_start_that_exceeds_prepare_s_is_given_up"))
def _endless_start() -> Any:
    """Nothing bounds the start of Spark."""
    init = SparkLife.__init__
    return mock.patch.object(SparkLife, "__init__", lambda self, _, silence_s: init(self, math.inf, silence_s))


@planted_fault(_SCHEDULER, _test("test_an_answer_of_an_earlier_spark_says_nothing_of_the_present_one"))
def _any_spark_answers() -> Any:
    """The late answer of a Spark that was given up is taken for one of the present Spark."""

    def answered(self: ParadigmScheduler, life: int) -> list[Any]:
        self._spark.answered()
        return []

    return mock.patch.object(ParadigmScheduler, "spark_answered", answered)


@planted_fault(_SCHEDULER, _test("test_a_dead_bridge_is_lost_for_all_ranges"))
def _diversions_outlive_spark() -> Any:
    """When Spark is lost, only the range that has noticed comes back."""
    return mock.patch.object(ParadigmScheduler, "_lost", return_value=[])


@planted_fault(_SCHEDULER, _test("test_after_a_rescale_of_what_was_fused_no_place_of_the_old_plan_is_told"))
def _stale_ranges() -> Any:
    """The ranges of a plan stay when another plan divides the operators otherwise."""

    def plan_changed(self: ParadigmScheduler, plan: Any) -> list[Any]:
        self._plan = plan
        return []

    return mock.patch.object(ParadigmScheduler, "plan_changed", plan_changed)


@planted_fault("penstock/bridge/sample_requests.py", _test("test_a_late_sample_of_an_old_plan_is_not_tried"))
def _samples_of_any_plan() -> Any:
    """A sample of the records of a chain is taken for one of the chain that has its number in another plan."""
    return mock.patch.object(SampleRequests, "forget", return_value=None)


@planted_fault(_SCHEDULER, _test("test_no_range_is_tried_while_another_one_is_in_spark"))
def _trials_in_bursts() -> Any:
    """A range is tried while others are in Spark."""

    def wants(self: ParadigmScheduler, range_: Any) -> bool:
        return self._spark.number is not None and range_.tried_in != self._spark.number

    return mock.patch.object(ParadigmScheduler, "_wants_trial", wants)


@planted_fault(_SCHEDULER, Seeds(149, lambda faults: _decides(faults) and faults.rescales > 0))
def _spark_of_the_old_plan() -> Any:
    """A Spark that has compiled the ranges of a plan stays when another plan has other ranges."""
    return mock.patch.object(SparkLife, "replace", return_value=None)


@planted_fault(_SCHEDULER, Seeds(2, lambda faults: _decides(faults) and faults.spark_trouble > 0))
def _on_the_way_to_a_lost_spark() -> Any:
    """When Spark is lost, ranges that are on their way there are not told."""
    tell = BurstDetector.happened

    def happened(self: BurstDetector, event: Any, time_s: float, why: str = "") -> Any:
        if event == "bridge lost" and self.state == "SWITCHING":
            return self.state
        return tell(self, event, time_s, why)

    return mock.patch.object(BurstDetector, "happened", happened)


@planted_fault(
    "penstock/runtime/worker/task.py", Seeds(689, lambda faults: _decides(faults) and faults.spark_trouble > 0)
)
def _any_spark_will_do() -> Any:
    """A task that is diverted to a Spark that was given up is taken for one that is diverted to the present one."""
    divert = Task.divert

    def stays(self: Task, request: Any, *rest: Any) -> None:
        if self.diversion is not None:
            self.diversion.divert = replace(self.diversion.divert, life=request.life)
        divert(self, request, *rest)

    return mock.patch.object(Task, "divert", stays)


@planted_fault("penstock/host/decide/paradigms.py", Seeds(27, lambda faults: _decides(faults) and faults.kills > 0))
def _the_dead_never_answer() -> Any:
    """The paradigm scheduler is not told that the worker has died that it waits for."""
    not_done = Paradigms._not_done

    def forgetful(self: Paradigms, command: Any, why: str | None, now: float) -> None:
        if why is not None:
            not_done(self, command, why, now)

    return mock.patch.object(Paradigms, "_not_done", forgetful)
