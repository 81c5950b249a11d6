"""Faults of the paradigm scheduler: entries of the table of tests/planting.py."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

from penstock.bridge.divert_requests import DivertRequests
from penstock.bridge.paradigm_scheduler import ParadigmScheduler
from penstock.bridge.spark_life import SparkLife
from tests.planting import Test, planted_fault

_SCHEDULER = "penstock/bridge/paradigm_scheduler.py"
_REQUESTS = "penstock/bridge/divert_requests.py"
_LIFE = "penstock/bridge/spark_life.py"


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


@planted_fault(_LIFE, _test("test_a_start_that_exceeds_prepare_seconds_is_given_up"))
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
