"""The scheduler of the paradigms by its events and commands, in virtual time. What workers and Spark are told is also
checked in each of these tests (scheduled_job.py)."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

import penstock as ps
from penstock.bridge.burst import BurstOptions, Mode, Timing
from penstock.bridge.cost import BatchCost
from penstock.bridge.session import SparkOptions
from penstock.bridge.spark_life import SPARK_LIFE, RangeTrial
from penstock.runtime.errors import FlowError
from penstock.runtime.operators.micro_batch import ROWS_MAX
from penstock.runtime.program.flow import Flow
from penstock.runtime.program.plan import replanned, rescaled
from penstock.runtime.worker.load import DivertLoad
from tests.bridge import scheduled_job
from tests.bridge.flows import fork
from tests.bridge.scheduled_job import DIED, FACTS, HANG_S, PREPARE_S, TRIAL, ScheduledJob, did, ran, reported, story


def start(flow: Flow | None = None, mode: Mode = "spark-only", **burst: Any) -> ScheduledJob:
    """A job whose Spark is ready at the look after the one that asks for it."""
    return ScheduledJob(words() if flow is None else flow, BurstOptions(mode=mode, **burst))


def of_speed(monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    """The Spark of jobs to come processes so many records a second."""
    facts = dataclasses.replace(FACTS, costs={0: BatchCost(0.125, rate)})
    monkeypatch.setattr(scheduled_job, "FACTS", facts)


def words(parallelism: int = 2) -> Flow:
    """One range: chain 0, two tasks."""
    flow = Flow("words", parallelism=parallelism)
    lines = flow.read(ps.sources.Memory(["x"]), name="lines").flat_map(str.split, name="words")
    lines.key_by(str.lower).count(name="count").write(ps.sinks.Null(), name="out")
    return flow


def row() -> Flow:
    """Three ranges, one downstream of the other: chains 0, 1 and 2."""
    flow = Flow("row", parallelism=2)
    lines = flow.read(ps.sources.Memory([]), name="read").map(str.strip, name="strip")
    upper = lines.rebalance().map(str.upper, name="upper")
    upper.rebalance().map(str.lower, name="lower").write(ps.sinks.Null(), name="out")
    return flow


def two() -> Flow:
    """Two ranges that have nothing to do with each other: two sources."""
    flow = Flow("two", parallelism=2)
    flow.read(ps.sources.Memory([]), name="one").map(str.strip, name="strip").write(ps.sinks.Null(), name="a")
    flow.read(ps.sources.Memory([]), name="other").map(str.upper, name="upper").write(ps.sinks.Null(), name="b")
    return flow


NO_PROCESSES = {"bridge": None, "executors": {}}

BOTH = {(0, 0), (1, 0)}  # chain 0 of both workers


# --- status ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "off", "spark-only", "toggle"])
@pytest.mark.parametrize("flow", [words, fork, row, two])
def test_there_is_a_status_before_anything_has_happened(flow: Callable[[], Flow], mode: Mode) -> None:
    job = start(flow(), mode)
    status = json.loads(json.dumps(job.scheduler.status().plain()))
    assert (status["mode"], status["spark"], status["processes"]) == (mode, None, NO_PROCESSES)
    covered = [one["chain"] for one in status["ranges"]]
    assert len(covered) + len(status["stays"]) == len(job.plan.chains)
    assert all(status["stays"].values()), "each has a reason"
    for one in status["ranges"]:
        names = [operator.name for operator in job.plan.chains[one["chain"]].operators]
        assert set(one["operators"]) <= set(names)
        assert (one["state"], one["paradigm"]) == ("RECORD", "record")
        assert (one["reason"], one["extent"]) == ("no task of the range has reported yet", "")
        assert one["failed"] is None
        assert one["records_in_spark"] == 0


def test_status_says_what_spark_is() -> None:
    job = start()
    job.look(2)
    status = job.scheduler.status()
    assert status["spark"] == "a session"
    assert status["processes"] == {"bridge": 4711, "executors": {"1": 4712}}
    assert status["ranges"][0]["operators"] == ["words"]
    assert status["ranges"][0]["partials"]


def test_a_queue_is_with_what_senders_hold_back() -> None:
    """Credit lets only little of a burst inside of a flow into the inboxes of the operator that is too slow for it."""
    job = start(row(), "auto")
    for task in job.chains[0]:
        task["sends"] = [(1, 0, 0, 0)]
    job.look()
    for task in job.chains[0]:
        did(task, 1_000, busy_s=0.1, backlog=100)
        task["sends"] = [(1, 10_000, 2_000, 10**9)]
    for task in job.chains[1]:
        did(task, 500, busy_s=0.25, queued=30)
    job.look()
    assert [job.status(chain)["figures"]["queue"] for chain in (0, 1, 2)] == [200, 2 * (30 + 2_000 + 10 * 100), 0]
    rate = job.status(1)["figures"]["arrival_rate"]
    gone = job.chains[0][1]["number"]
    job.change_plan(rescaled(job.plan, "read", 1))
    del job.tasks[gone]
    job.chains[0][0]["sends"] = [(1, 10_000, 2_000, 2 * 10**9)]
    job.look()
    assert job.status(1)["figures"]["queue"] == 2 * 30 + 2_000 + 10 * 100, "without what the task held that is gone"
    assert job.status(1)["figures"]["arrival_rate"] < rate, "nothing has come"
    job.change_plan(replanned(job.flow.graph, job.plan, "lower", 3, chaining=True))
    job.make_tasks()
    for task in job.chains[0]:
        del job.tasks[task["number"]]  # it has not reported yet
    job.look()
    assert job.status(1)["figures"]["queue"] == 0, "what tasks held is not known of those of another plan"


# --- there -------------------------------------------------------------------------------------------------------


def test_every_worker_is_told_once_and_all_tasks_are_waited_for() -> None:
    job = start()
    job.takes_long = True
    job.look()
    assert job.state() == "PREPARING"
    assert [form.chain for form in job.lives[1].forms] == [0]
    job.settle()
    job.takes_long = False
    job.look()
    assert job.told == []
    job.look()
    assert job.state() == "SWITCHING"
    assert job.status()["paradigm"] == "record"
    assert set(job.diverts()) == BOTH
    assert {divert.position for divert in job.diverts().values()} == {job.lives[1].forms[0].position}
    job.look(20)
    assert (job.state(), job.told) == ("SWITCHING", []), "the tasks wait for a barrier, and need no other message"
    one, other = job.chains[0]
    one["diverted"] = story(1)
    job.look()
    assert job.state() == "SWITCHING"
    other["diverted"] = story(2)
    job.look()
    assert job.state() == "OPERATION"
    assert job.status()["paradigm"] == "operation"
    job.look(20)
    assert job.told == []
    assert len(job.lives) == 1


def test_a_worker_is_told_again_when_its_tasks_do_otherwise_than_they_should() -> None:
    job = start()
    job.into_operation()
    job.restart(1)
    job.look()
    assert job.state() == "OPERATION"
    assert set(job.diverts()) == {(1, 0)}
    job.rebuild(job.chains[0][0])
    job.look()
    assert set(job.diverts()) == {(0, 0)}
    job.look()
    assert job.told == []


def test_a_worker_that_does_not_come_to_it_finds_one_request() -> None:
    job = start()
    job.busy = {1}
    job.look(2)
    assert set(job.diverts()) == BOTH
    for _ in range(40):
        job.look()
        assert job.told == []
    job.busy = set()
    job.look(2)
    job.barrier()
    job.look()
    assert job.state() == "OPERATION"


def test_a_request_ends_with_the_process_that_had_it() -> None:
    job = start()
    job.busy = {1}
    job.look(2)
    job.busy = set()
    job.restart(1)
    job.look()
    assert set(job.diverts()) == {(1, 0)}
    job.barrier()
    job.look()
    assert job.state() == "OPERATION"


def test_a_report_from_before_the_answer_to_a_request_leads_to_no_other() -> None:
    job = start()
    job.look()
    job.now += 1
    loads = {0: [reported(job.chains[0][0])]}
    (command,) = job.scheduler.looked(job.now, job.now, loads)
    assert job.scheduler.done(job.now + 0.5, command.number) == []  # type: ignore[union-attr]
    assert job.scheduler.looked(job.now + 0.6, job.now + 0.4, loads) == []
    again = job.scheduler.looked(job.now + 0.8, job.now + 0.7, loads)
    assert [type(one) for one in again] == [type(command)]


def test_a_refusal_is_told_once_and_tried_again_after_a_while() -> None:
    job = start()
    job.look()
    job.busy = {0, 1}
    job.look()
    assert job.refuse("divert: there is no such actor") == 2
    assert job.warnings == ["divert: there is no such actor"]
    assert job.lives[1].asked, "it may have died"
    job.settle()
    job.look(7)
    assert job.refuse(None) == 0, "not yet"
    job.look(2)
    assert job.refuse("divert: there is no such actor") == 2
    assert len(job.warnings) == 1
    job.settle()
    job.change_plan(replanned(job.flow.graph, job.plan, "words", 3, chaining=False))
    job.make_tasks()
    job.look(3)
    assert job.refuse("divert: there is no such actor") == 2
    assert len(job.warnings) == 2, "of another Spark it is news"


def test_a_worker_that_does_not_report_is_told_when_it_does() -> None:
    job = start()
    job.silent = {1}
    job.look(2)
    assert set(job.diverts()) == {(0, 0)}
    job.silent = set()
    job.look()
    assert set(job.diverts()) == {(1, 0)}


def test_a_task_that_takes_records_one_by_one_is_told_when_it_is_through() -> None:
    job = start()
    one, _ = job.chains[0]
    one["record_by_record"] = True
    job.look(2)
    assert set(job.diverts()) == {(1, 0)}
    job.look(8)
    job.barrier()
    assert (job.state(), job.told) == ("SWITCHING", [])
    one["record_by_record"] = False
    job.look()
    assert set(job.diverts()) == {(0, 0)}


def test_tasks_that_have_finished_are_not_waited_for() -> None:
    job = start()
    one, other = job.chains[0]
    other["finished"] = True
    job.look(2)
    assert set(job.diverts()) == {(0, 0)}
    one["diverted"] = story(1)
    job.look()
    assert job.state() == "OPERATION"


def test_when_all_have_finished_nothing_is_switched() -> None:
    job = start()
    for task in job.chains[0]:
        task["finished"] = True
    job.look(4)
    assert job.state() == "SWITCHING"
    assert job.told == []


@pytest.mark.parametrize(("parallelism", "rows"), [(1, 300_000), (2, 150_000), (3, 100_000), (6, 50_000), (8, 50_000)])
def test_all_micro_batches_under_way_at_a_time_fit_but_none_is_small(
    parallelism: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_speed(monkeypatch, 1e9)
    job = start(words(parallelism))
    job.look(2)
    assert {divert.rows_max for divert in job.diverts().values()} == {rows}
    assert rows <= ROWS_MAX


@pytest.mark.parametrize(("speed", "rows"), [(32_000.0, 65_536), (10_000.0, 32_768), (1_000.0, 2_048), (1.0, 256)])
def test_a_micro_batch_of_slow_records_is_small(speed: float, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not be answered in time."""
    of_speed(monkeypatch, speed)
    job = start(words(1))
    job.look(2)
    assert {divert.rows_max for divert in job.diverts().values()} == {rows}


def test_micro_batches_grow_with_each_task_that_finishes(monkeypatch: pytest.MonkeyPatch) -> None:
    of_speed(monkeypatch, 1e9)
    job = start(words(4))
    job.look(2)
    assert {divert.rows_max for divert in job.diverts().values()} == {75_000}
    for task in job.chains[0][:2]:
        task["finished"] = True
    job.look()
    assert {divert.rows_max for divert in job.diverts().values()} == {150_000}


def test_a_range_takes_the_chains_downstream_along() -> None:
    job = start(fork())
    few, many = job.index("few"), job.index("many")
    job.look(2)
    assert set(job.diverts()) == {(worker, chain) for worker in (0, 1) for chain in (0, few, many)}
    # Six tasks share what Spark processes within two seconds.
    assert {divert.rows_max for divert in job.diverts().values()} == {32_768}
    job.barrier(0, few)
    job.look()
    assert job.state() == "SWITCHING", "a chain's tasks are missing"
    job.barrier(many)
    job.look()
    assert job.state() == "OPERATION"


def test_what_a_trial_has_cost_is_known_of_its_range_alone() -> None:
    job = start(two(), mode="auto", ahead=True)
    other = job.index("other")
    for _ in range(4):
        for task in (*job.chains[0], *job.chains[other]):
            did(task, 100, busy_s=0.1)
        job.look()
    assert job.status(0)["figures"]["operation_rate"] == FACTS.costs[0].rate  # type: ignore[union-attr]
    assert job.status(other)["figures"]["operation_rate"] > FACTS.costs[0].rate  # type: ignore[union-attr]


def test_a_burst_seen_while_spark_prepares_is_judged_by_what_the_trial_has_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The burst is worth a switch by the figures that are assumed before any trial, and not by the measured ones."""
    of_speed(monkeypatch, 1_000)
    job = start(mode="auto", ahead=True)
    job.takes_long = True
    for look in range(40):
        for task in job.chains[0]:
            did(task, 1_000, busy_s=scheduled_job.LOOK_S)
            task["queued"] = 10_000 * look
        job.look()
    assert job.state() == "PREPARING"
    job.takes_long = False
    for _ in range(8):
        job.look()
        assert job.state() == "RECORD"
    assert "Spark would process" in job.status()["reason"]


def test_a_range_whose_source_cannot_tell_what_waits_says_so() -> None:
    job = start(mode="auto", ahead=True)
    job.look()
    assert "Reader.backlog" not in job.status()["reason"]
    job.chains[0][0]["backlog_known"] = False
    job.look()
    assert "its source cannot tell how many records wait there (Reader.backlog)" in job.status()["reason"]


def test_a_rescale_forgets_the_speed_of_the_record_tasks() -> None:
    job = start(mode="auto", ahead=True)
    for _ in range(4):
        for task in job.chains[0]:
            did(task, 100, busy_s=0.1)
        job.look()
    assert job.status()["figures"]["record_rate"] is not None
    job.change_plan(words(parallelism=4).plan(1))
    job.make_tasks()
    job.look()
    assert job.status()["figures"]["record_rate"] is None


# --- and back ----------------------------------------------------------------------------------------------------


def test_a_range_comes_back_when_nobody_is_diverted_any_more() -> None:
    job = start(mode="toggle", toggle_s=2.0)
    job.look(2)
    assert job.state() == "RECORD"
    assert job.told == [], "it is prepared, and has to wait for its turn"
    job.look(every=2.0)
    assert job.state() == "SWITCHING", "it was prepared ahead"
    job.barrier()
    job.look()
    assert job.state() == "OPERATION"
    job.look(every=2.0)
    assert job.state() == "RETURNING"
    assert job.status()["paradigm"] == "operation"
    assert job.undiverts() == BOTH
    job.chains[0][0]["diverted"] = None
    job.look(4)
    assert job.state() == "RETURNING", "one is missing yet"
    assert job.told == [], "it knows"
    job.answers()
    job.look()
    assert job.state() == "RECORD"
    job.look()
    assert job.told == []


def test_who_is_diverted_while_he_should_not_be_is_told() -> None:
    """As after a JobMaster's death: the next one finds tasks that its predecessor has sent to Spark."""
    job = start(mode="toggle")
    task = job.chains[0][1]
    task["diverted"], task["divert"] = story(1), DivertLoad(1.0, 100, 1)
    job.look()
    assert job.state() == "RECORD"
    assert job.undiverts() == {(1, 0)}
    job.answers()
    job.look()
    assert job.told == []


def test_a_task_beside_one_whose_micro_batch_has_failed_is_taken_back_too() -> None:
    job = start(mode="toggle", toggle_s=2.0)
    job.look(2)
    job.look(every=2.0)
    assert set(job.diverts()) == BOTH
    job.lives[1].state = "DEAD"
    job.barrier()
    job.fail(job.chains[0][0], "Lost: gone")
    job.look()
    assert job.undiverts() == {(1, 0)}
    assert job.state() == "RETURNING"
    job.answers()
    job.look()
    assert job.state() == "RECORD"
    assert job.diverted() == set()


# --- micro-batches that fail -------------------------------------------------------------------------------------


def test_a_failed_micro_batch_brings_its_range_back_and_counts_once() -> None:
    job = start(two())
    other = job.index("other")
    job.into_operation()
    job.fail(job.chains[0][0], "Lost: gone")
    job.look()
    assert job.state() == "RETURNING"
    assert job.status()["failed"] == "Lost: gone"
    assert job.undiverts() == {(1, 0)}
    assert job.state(other) == "OPERATION", "the bridge lives"
    job.answers()
    job.look()
    assert job.state() == "RECORD"
    job.look(4)
    assert "next try in 9 s" in job.status()["reason"], "counted once, though the task still tells of it"
    assert job.status(other)["failed"] is None
    assert [life.state for life in job.lives.values()] == ["READY"]


def test_records_that_fail_in_spark_are_told_of_and_the_range_stays_there() -> None:
    job = start()
    job.into_operation()
    task = job.chains[0][0]
    assert task["diverted"] is not None
    task["diverted"]["failed"], task["unprocessed"] = "OSError: no such file", 3
    job.look()
    assert (job.status()["failed"], job.status()["unprocessed"]) == ("OSError: no such file", 3)
    assert job.state() == "OPERATION"


def test_a_range_that_left_spark_because_records_failed_does_not_say_that_spark_was_lost() -> None:
    job = start()
    job.into_operation()
    for task in job.chains[0]:
        job.fail(task, "137 of 185 records failed in Spark, the last ones by: OSError")
    job.look(5)
    assert job.state() == "RECORD"
    told = "the range does not use Spark for now (137 of 185 records failed in Spark, the last ones by: OSError"
    assert job.status()["reason"].startswith(f"not switched: {told}")
    assert job.warnings[0].startswith(told)
    assert job.scheduler.status()["spark"] == "a session"


def test_tasks_that_notice_the_same_loss_later_do_not_make_it_another() -> None:
    """Each would double the time until Spark is tried again."""
    job = start(words(4))
    job.into_operation()
    for task in job.chains[0]:
        job.fail(task, "Lost: gone")
        job.look()
    job.look()
    assert job.state() == "RECORD"
    assert "next try in 9 s" in job.status()["reason"]


def test_after_a_failure_it_goes_there_again_by_the_same_bridge() -> None:
    job = start()
    job.into_operation()
    for task in job.chains[0]:
        job.fail(task, "Lost: gone")
    job.look()
    assert job.state() == "RECORD", "nobody is diverted any more"
    job.look(every=11.0)
    assert job.state() == "SWITCHING"
    job.barrier()
    job.look()
    assert job.state() == "OPERATION"
    assert len(job.lives) == 1


def test_a_dead_bridge_is_lost_for_all_ranges() -> None:
    job = start(two())
    other = job.index("other")
    job.into_operation()
    job.lives[1].state = "DEAD"
    job.fail(job.chains[0][0], "Died: the actor is dead")
    job.look()
    assert job.states() == {"RETURNING"}
    why = f"Died: the actor is dead; {DIED}; what Spark wrote is in {FACTS.log}"
    assert (job.lives[1].state, job.lives[1].reason) == ("GIVEN_UP", why)
    assert job.scheduler.status()["spark"] == f"lost: {why}"
    assert job.scheduler.status()["processes"] == NO_PROCESSES
    job.look()
    assert job.undiverts() == {(0, other), (1, other)}
    job.answers()
    job.look(2)
    assert job.states() == {"RECORD"}
    assert job.diverted() == set()
    for chain in (0, other):
        assert "next try in 9 s" in job.status(chain)["reason"], "each has lost Spark once"
    assert len(job.warnings) == 1, "and one tells of it"

    job.look(every=30.0)
    job.look()
    assert len(job.lives) == 2
    assert job.states() == {"SWITCHING"}
    assert {divert.life for divert in job.diverts().values()} == {2}
    assert job.scheduler.status()["spark"] == "a session"


def test_a_bridge_that_died_before_anything_went_there_is_found_by_the_worker_that_seeks_it() -> None:
    job = start()
    job.look()
    job.lives[1].state = "DEAD"
    job.busy = {0, 1}
    job.look()
    assert job.state() == "SWITCHING"
    job.refuse("there is no such actor")
    job.busy = set()
    job.settle()
    job.look()
    assert job.lives[1].state == "GIVEN_UP"
    job.look()
    assert job.state() == "RECORD"
    job.look(every=11.0)
    job.look()
    job.barrier()
    job.look()
    assert job.state() == "OPERATION"


def test_a_switch_that_waits_for_its_barrier_is_not_given_up() -> None:
    job = start()
    job.look(20, every=10.0)
    assert job.state() == "SWITCHING"
    assert [life.state for life in job.lives.values()] == ["READY"]
    assert not job.lives[1].asked


# --- a Spark that is silent --------------------------------------------------------------------------------------


def test_a_spark_that_is_silent_is_killed_when_it_exceeds_hang_timeout_s() -> None:
    job = start()
    job.into_operation()
    job.lives[1].state = "PAUSED"
    for task in job.chains[0]:
        task["diverted"] = story(1, under_way=2)
    job.look(int(HANG_S))
    assert job.lives[1].asked, "it owes an answer for more than ten seconds"
    job.look(int(HANG_S))
    assert job.lives[1].state == "PAUSED", "not yet"
    job.look(int(4 * HANG_S))
    assert job.lives[1].state == "GIVEN_UP"
    assert job.lives[1].reason == (
        "Spark has not answered for hang_timeout_s=60 seconds, after: no micro-batch was answered for 10 s; what Spark "
        f"wrote is in {FACTS.log}"
    )
    assert "hang_timeout_s=60" in job.scheduler.status()["spark"]
    assert job.state() == "RETURNING"


def test_a_pause_of_the_job_master_is_no_silence_of_spark() -> None:
    job = start()
    job.into_operation()
    job.lives[1].state = "PAUSED"
    job.fail(job.chains[0][0], "Lost: gone")
    job.look()
    job.look(every=10 * HANG_S)
    assert job.lives[1].state == "PAUSED"


def test_a_spark_that_takes_long_but_lives_is_left_alone() -> None:
    job = start()
    job.into_operation()
    for task in job.chains[0]:
        task["diverted"] = story(1, under_way=2)
    job.look(1000)
    assert job.state() == "OPERATION"
    assert [life.state for life in job.lives.values()] == ["READY"]
    assert 0 < job.checks <= 25, "it is asked every ten seconds"


def test_a_slow_start_is_no_part_of_a_silence() -> None:
    job = start()
    job.takes_long = True
    job.look(int(3 * PREPARE_S))
    job.takes_long = False
    job.settle()
    job.into_operation()
    job.lives[1].state = "PAUSED"
    job.fail(job.chains[0][0], "Lost: gone")
    job.look(int(3 * HANG_S))
    assert job.lives[1].state == "PAUSED"


def test_an_answer_of_an_earlier_spark_says_nothing_of_the_present_one() -> None:
    job = start()
    job.into_operation()
    job.lives[1].state = "PAUSED"
    job.fail(job.chains[0][0], "Lost: gone")
    job.look()
    assert job.lives[1].asked
    job.change_plan(replanned(job.flow.graph, job.plan, "words", 3, chaining=False))
    job.make_tasks()
    job.takes_long = True
    job.look()
    assert len(job.lives) == 2
    job.do(job.scheduler.spark_answered(1))
    job.do(job.scheduler.spark_failed(job.now, 1, "killed"))
    job.takes_long = False
    job.into_operation()
    assert len(job.lives) == 2


def test_a_task_that_was_diverted_to_an_earlier_spark_comes_back_before_it_goes_to_the_present_one() -> None:
    job = start(timing=Timing(backoff_first_s=1.0))
    job.look(2)
    job.barrier()
    job.look()
    assert job.state() == "OPERATION"
    late = job.chains[0][1]
    job.silent, job.lives[1].state = {1}, "DEAD"  # its worker is paused, so it has nothing under way that could fail
    job.fail(job.chains[0][0], DIED)
    job.look(12)
    assert len(job.lives) == 2
    assert job.state() == "SWITCHING", "all tasks that are known of have come back"
    job.barrier()
    job.silent = set()
    job.look()
    assert job.state() == "SWITCHING", "one is diverted to the Spark that was lost"
    assert set(job.diverts()) == {(1, 0)}
    assert late["divert"] is None
    assert late["diverted"] is not None
    job.answers()
    job.look()
    job.barrier()
    job.look()
    assert late["divert"] is not None
    assert late["divert"].life == 2
    assert job.state() == "OPERATION"


def test_who_waits_for_a_spark_that_is_lost_waits_before_the_next_try() -> None:
    job = start(two())
    other = job.index("other")
    job.into_operation()
    job.fail(job.chains[other][0], "a record that Spark cannot process")
    job.look()
    job.answers()
    job.look(36)
    job.lives[1].state = "PAUSED"
    job.fail(job.chains[0][0], "Lost: gone")
    job.look(8)
    assert job.state(other) == "PREPARING", "it waits for what Spark says"
    job.lives[1].state = "DEAD"
    job.settle()
    assert job.state(other) == "RECORD"
    job.look()
    assert len(job.lives) == 1


def test_nothing_is_asked_of_a_spark_that_answers_or_has_nothing_to_do() -> None:
    job = start()
    job.into_operation()
    job.lives[1].state = "PAUSED"  # it would owe the answer for good
    job.look(200)
    assert not job.lives[1].asked
    for n in range(1, 200):
        did(job.chains[0][0], 10, answered=10 * n)
        job.chains[0][0]["diverted"] = story(1, under_way=2)
        job.look()
    assert not job.lives[1].asked


# --- no Spark ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flow", [words, two, fork])
def test_without_spark_the_job_goes_on_and_says_so_once(flow: Callable[[], Flow]) -> None:
    job = start(flow())
    job.why_not = "there is no Java"
    job.look(50)
    job.look(50, every=30.0)
    assert job.scheduler.status()["spark"] == "not to be had: there is no Java"
    assert job.scheduler.status()["processes"] == NO_PROCESSES
    assert job.state() in ("RECORD", "PREPARING")
    assert "there is no Java" in job.status()["reason"] or job.state() == "PREPARING"
    assert len(job.warnings) == 1
    assert "there is no Java" in job.warnings[0]
    assert len(job.lives) > 1, "it is tried again"


def test_it_is_tried_again_less_and_less_often() -> None:
    job = start()
    job.why_not = "no"
    job.look(4 * 75)
    assert len(job.lives) == 4, "at 0, 10, 30 and 70 s"


@pytest.mark.parametrize("mode", ["auto", "spark-only", "toggle"])
def test_while_spark_starts_the_status_says_so_and_no_reason_pretends(mode: Mode) -> None:
    job = start(two(), mode, ahead=True)
    job.takes_long = True
    before = {one["chain"]: one["figures"].keys() for one in job.scheduler.status()["ranges"]}
    for _ in range(8):
        for task in job.tasks.values():
            did(task, 500, busy_s=0.1)
        job.look()
    status = job.scheduler.status()
    assert status["spark"] == "Spark is starting, and 2 ranges are being tried in it, for 2 s now"
    for one in status["ranges"]:
        assert one["reason"] == "Spark is starting, and ranges are being tried in it; 0 records wait"
        assert one["figures"].keys() == before[one["chain"]], "the same keys as before the first look"
        assert not one["figures"]["operation_measured"]
    job.takes_long = False
    job.look(2)
    status = job.scheduler.status()
    assert status["spark"] == "a session"
    assert [one["figures"]["operation_measured"] for one in status["ranges"]] == [True, False], "one could be tried"
    assert not any("is starting" in one["reason"] for one in status["ranges"])


def test_without_spark_no_reason_says_from_when_on_spark_is_sooner() -> None:
    job = start(words(), "auto", ahead=True)
    job.why_not = "there is no Java"
    for _ in range(8):
        for task in job.chains[0]:
            did(task, 500, busy_s=0.1)
        job.look()
    assert job.scheduler.status()["spark"] == "not to be had: there is no Java"
    assert job.status()["reason"] == "there is no Spark now; 0 records wait"
    job.takes_long = True
    job.why_not = None
    job.look(every=11.0)
    job.look()
    assert job.scheduler.status()["spark"].endswith("; the time before, Spark was not to be had: there is no Java")


def test_it_is_started_once_however_long_that_takes() -> None:
    job = start(two())
    job.takes_long = True
    job.look(int(PREPARE_S))
    assert len(job.lives) == 1
    assert job.scheduler.status()["spark"] == "Spark is starting, and 2 ranges are being tried in it, for 30 s now"
    job.takes_long = False
    job.look(2)
    assert len(job.lives) == 1
    assert job.state() == "SWITCHING"


def test_a_start_that_exceeds_prepare_s_is_given_up() -> None:
    job = start(two())
    job.takes_long = True
    job.look(int(4 * PREPARE_S) + 1)
    assert job.lives[1].state == "GIVEN_UP"
    assert job.scheduler.status()["spark"] == "not to be had: Spark was not ready within prepare_s=120 seconds"
    assert len(job.warnings) == 1
    assert "prepare_s=120" in job.warnings[0]
    job.do(job.scheduler.spark_ready(job.now, 1, FACTS))
    assert job.told == [], "too late"
    job.takes_long = False
    job.look(every=11.0)
    job.look()
    assert len(job.lives) == 2
    assert job.state() == "SWITCHING"


def test_the_limit_of_a_start_is_named_in_the_options() -> None:
    assert SparkOptions().prepare_limit_s == 600.0
    assert SparkOptions(start_s=3).prepare_limit_s == 30.0
    assert SparkOptions(prepare_s=7).prepare_limit_s == 7.0
    with pytest.raises(FlowError, match="prepare_s"):
        SparkOptions(prepare_s=0)


# --- ranges that lead --------------------------------------------------------------------------------------------


def test_a_range_that_is_led_waits_and_says_where_its_leader_is() -> None:
    job = start(row())
    job.into_operation()
    job.look(2)
    leader = job.status(0)
    assert leader["state"] == "OPERATION"
    assert leader["operators"] == ["strip", "upper", "lower"]
    for chain in (1, 2):
        led = job.status(chain)
        assert [led[key] for key in ("state", "paradigm", "reason", "extent", "figures")] == [
            leader[key] for key in ("state", "paradigm", "reason", "extent", "figures")
        ]
        assert led["failed"] is None
    assert job.told == []


def test_a_range_that_was_led_does_not_go_by_itself_when_its_leader_comes_back() -> None:
    job = start(row(), mode="auto", k=0.2)

    def work(looks: int, taken: int, queued: int) -> None:
        for _ in range(looks):
            for task in job.tasks.values():
                did(task, taken, busy_s=0.25, queued=queued)
            job.look()
            job.barrier()

    work(8, 100, 10**6)
    assert job.states() == {"OPERATION"}, "all three were about to go, and the first has taken the others along"
    work(80, 0, 0)
    assert job.state(0) == "RETURNING"
    job.answers()
    job.look()
    assert job.states() == {"RECORD"}


def test_a_failure_anywhere_in_a_range_brings_all_of_it_back() -> None:
    job = start(row())
    job.into_operation()
    job.fail(job.chains[2][1], "Lost: gone")
    job.look()
    assert job.state(0) == "RETURNING"
    assert job.status(0)["failed"] == "Lost: gone"
    assert job.undiverts() == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)}


def test_records_of_a_range_that_is_led_are_in_spark_too() -> None:
    job = start(row(), mode="toggle", toggle_s=2.0)
    job.look(2)
    job.look(every=2.0)
    assert {chain for _, chain in job.diverts()} == {0, 1, 2}
    job.barrier()
    task = job.chains[1][0]
    for n in range(1, 51):
        did(task, 100, answered=100 * n)
        task["diverted"] = story(1, *((i, 100, 0.1) for i in range(max(1, n - 31), n + 1)))
        job.look(every=0.01)
    assert job.status(1)["records_in_spark"] == 5_000
    assert job.status(0)["records_in_spark"] == 0


def of_one_task() -> Flow:
    """As `row`, but the source has one task, on worker 0."""
    flow = Flow("one", parallelism=2)
    lines = flow.read(ps.sources.Memory([]), name="read", parallelism=1).map(str.strip, name="strip", parallelism=1)
    upper = lines.rebalance().map(str.upper, name="upper")
    upper.rebalance().map(str.lower, name="lower").write(ps.sinks.Null(), name="out")
    return flow


def test_a_chain_is_in_one_range_only() -> None:
    """Else one takes its tasks back while the other sends them there, and neither ends."""
    job = start(of_one_task())
    job.silent = {0}
    for _ in range(4):
        job.look()
        job.barrier()
    assert job.state(1) == "OPERATION", "it goes by itself while nothing is known of the first"
    job.silent = set()
    job.into_operation()
    assert job.status(0)["operators"] == ["strip"]
    assert job.status(1)["operators"] == ["upper", "lower"]


def test_tasks_come_back_also_while_nothing_is_known_of_the_first_of_their_range() -> None:
    job = start(of_one_task())
    job.into_operation()
    job.silent, job.lives[1].state = {0}, "DEAD"
    for task in job.chains[1]:
        assert task["diverted"] is not None
        task["diverted"]["under_way"] = 1
    job.look(42)
    assert job.lives[1].state == "GIVEN_UP"
    assert {
        task["number"] for task in job.tasks.values() if task["divert"] and job.workers[task["number"]] == 1
    } == set()
    assert job.state(0) == "RETURNING"


# --- magnifications ----------------------------------------------------------------------------------------------


def test_a_range_ends_where_the_magnifications_say() -> None:
    job = start(fork(), range_below=1.0)
    few, many = job.index("few"), job.index("many")
    ran(job.chains[0][0], read=(10, 10), parse=(10, 10))
    ran(job.chains[few][0], few=(10, 1))
    ran(job.chains[many][0], many=(10, 100))
    job.look(2)
    assert {chain: divert.position for (_, chain), divert in job.diverts().items()} == {0: 2, few: 1, many: 1}
    assert "'number' is handed 0.1 of what came" in job.status()["extent"]
    assert job.status()["operators"] == ["parse", "few", "many"]


def test_nothing_is_started_that_is_never_needed() -> None:
    job = start(mode="off")
    job.look(20)
    assert job.lives == {}
    assert job.told == []


# --- another plan ------------------------------------------------------------------------------------------------


def test_after_a_rescale_of_what_was_fused_no_place_of_the_old_plan_is_told() -> None:
    """One task of everything becomes a chain of the source's and one of the aggregate's."""
    flow = words(parallelism=1)
    job = start(flow)
    job.into_operation()
    job.change_plan(replanned(flow.graph, job.plan, "count", 2, chaining=True))
    assert job.lives[1].state == "GIVEN_UP", "it has compiled the old plan's range"
    assert job.scheduler.status()["spark"] is None
    job.look()  # the workers have the old plan still
    assert job.told == []
    job.make_tasks()
    job.into_operation()
    assert len(job.lives) == 2
    assert job.status(0)["operators"] == ["words"]


def test_a_rescale_that_leaves_the_chains_as_they_are_changes_nothing() -> None:
    job = start()
    job.into_operation()
    job.change_plan(rescaled(job.plan, "count", 3))
    job.look()
    assert job.state() == "OPERATION"
    assert len(job.lives) == 1


def test_spark_that_was_started_for_an_old_plan_is_not_used() -> None:
    flow = words(parallelism=1)
    job = start(flow)
    job.takes_long = True
    job.look()
    job.change_plan(replanned(flow.graph, job.plan, "count", 2, chaining=True))
    job.make_tasks()
    job.do(job.scheduler.spark_ready(job.now, 1, FACTS))
    assert job.scheduler.status()["spark"] is None
    job.takes_long = False
    job.into_operation()
    assert [life.state for life in job.lives.values()] == ["GIVEN_UP", "READY"]


def test_every_state_of_spark_says_what_it_is() -> None:
    assert SPARK_LIFE.ends() == set()
    for state in SPARK_LIFE.states:
        assert state.sentence.endswith(".")


# --- trials --------------------------------------------------------------------------------------------------------


def untried(monkeypatch: pytest.MonkeyPatch, *chains: int) -> None:
    """The Spark of jobs to come has nothing to try the ranges of these chains on."""
    facts = dataclasses.replace(FACTS, costs=dict.fromkeys(chains), untried=frozenset(chains), cores=2)
    monkeypatch.setattr(scheduled_job, "FACTS", facts)


def calm_job(flow: Flow | None = None) -> ScheduledJob:
    """A job whose Spark is ready, and does not have to do anything."""
    job = start(flow, "auto", ahead=True)
    job.look(2)
    assert job.present is not None
    assert job.present.state == "READY"
    return job


def records_come(job: ScheduledJob, looks: int, *chains: int) -> None:
    """Some looks, before each of which the tasks of the chains have taken records."""
    for _ in range(looks):
        for chain in chains:
            for task in job.chains[chain]:
                did(task, 100, busy_s=0.001)
        job.look()


@pytest.mark.parametrize("flow", [words, row, fork])
def test_ranges_without_a_sample_are_tried_on_records_of_their_tasks(
    flow: Callable[[], Flow], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any burst, also those behind an exchange."""
    chains = [status["chain"] for status in start(flow()).scheduler.status()["ranges"]]
    untried(monkeypatch, *chains)
    job = calm_job(flow())
    job.look(20)
    assert job.questions == [], "no records come"
    records_come(job, 40, *chains)
    assert sorted(one.chain for one in job.trials) == chains
    for chain in chains:
        status = job.status(chain)
        assert (status["way"], status["state"]) == ("in some way", "RECORD")
        assert status["figures"]["operation_measured"]
        assert status["figures"]["operation_rate"] == 32_000
    questions = len(job.questions)
    assert questions <= 4 * len(chains)
    records_come(job, 40, *chains)
    assert (len(job.trials), len(job.questions)) == (len(chains), questions), "each is tried once"


def test_records_that_come_while_spark_starts_are_tried_by_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    job = start(None, "auto", ahead=True)
    job.takes_long = True
    records_come(job, 20, 0)
    ((life, chain),) = {(one.life, one.chain) for one in job.trials}
    assert (life, chain) == (1, 0)
    job.takes_long = False
    records_come(job, 20, 0)
    assert job.status()["figures"]["operation_measured"]
    assert len(job.trials) == 1

    untried(monkeypatch, 0)  # they have come too late
    job = start(None, "auto", ahead=True)
    job.takes_long = True
    records_come(job, 20, 0)
    job.takes_long = False
    records_come(job, 20, 0)
    assert len(job.trials) == 2
    assert job.status()["way"] == "in some way"


def test_who_has_given_no_records_is_asked_again_and_then_another(monkeypatch: pytest.MonkeyPatch) -> None:
    untried(monkeypatch, 0)
    job = calm_job()
    job.has_records = False
    records_come(job, 60, 0)
    assert job.trials == []
    assert len(job.questions) <= 16, "about one a second"
    assert [one.request.least for one in job.questions[:6]] == [2000, 2000, 2000, 2000, 1, 1]
    for _ in range(60):
        did(job.chains[0][1], 100)
        job.look()
    assert {one.worker for one in job.questions[-3:]} == {1}, "the one that records come to"
    job.has_records = True
    records_come(job, 12, 0)
    assert job.status()["figures"]["operation_measured"]


def test_a_worker_that_dies_before_it_answers_leaves_the_range_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    untried(monkeypatch, 0)
    job = calm_job()
    job.busy = {0, 1}
    records_come(job, 3, 0)
    (question,) = job.questions
    records_come(job, 40, 0)
    assert len(job.questions) == 1, "it finds one question when it continues"
    job.restart(question.worker)
    job.busy = {question.worker}
    assert job.status()["figures"]["operation_measured"] is False
    for _ in range(20):
        did(job.chains[0][1 - question.worker], 100)
        job.look()
    assert job.questions[-1].worker == 1 - question.worker
    assert job.status()["figures"]["operation_measured"]


def test_records_that_cannot_travel_are_asked_for_no_more_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    untried(monkeypatch, 0)
    job = calm_job()
    job.cannot_sample = "worker 0: a record cannot be pickled"
    records_come(job, 120, 0)
    assert len(job.questions) == 1
    assert job.warnings == []
    job.cannot_sample = None
    records_come(job, 160, 0)
    assert job.status()["figures"]["operation_measured"]


def test_a_late_sample_of_an_old_plan_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chain 0 is another one now, and still begins a range."""
    untried(monkeypatch, 0)
    flow = Flow("steps", parallelism=2)
    lines = flow.read(ps.sources.Memory([]), name="lines").map(str.strip, name="strip")
    lines.map(str.upper, name="upper").write(ps.sinks.Null(), name="out")
    job = calm_job(flow)
    records_come(job, 3, 0)
    job.busy = {0, 1}
    records_come(job, 10, 0)
    assert len(job.questions) == 2, "the answer to the second one will be a sample"
    job.change_plan(replanned(job.flow.graph, job.plan, "upper", 3, chaining=True))
    assert job.status(0)["operators"] == ["strip"]
    job.make_tasks()
    job.takes_long = True
    job.look(2)
    assert job.present is not None
    job.busy = set()
    job.look()
    assert job.trials == []
    job.takes_long = False
    records_come(job, 60, *job.chains)
    assert {one.life for one in job.trials} == {2}


def test_no_range_is_tried_while_another_one_is_in_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = dataclasses.replace(FACTS, costs={0: BatchCost(0.125, 1e6)}, cores=2)
    job = start(two(), "auto", ahead=True)
    other = job.index("other")
    monkeypatch.setattr(scheduled_job, "FACTS", dataclasses.replace(facts, untried=frozenset([other])))
    for _ in range(40):
        for task in job.chains[0]:
            did(task, 500, busy_s=0.25, queued=task["queued"] + 5_000)
        job.look()
        job.barrier()
    assert [job.state(chain) for chain in (0, other)] == ["OPERATION", "RECORD"]
    records_come(job, 40, other)
    assert (job.questions, job.trials) == ([], [])
    for task in job.chains[0]:
        task["queued"] = 0
    for _ in range(60):
        records_come(job, 1, other)
        job.answers()
    assert job.state(0) == "RECORD"
    assert [one.chain for one in job.trials] == [other]


def test_no_switch_waits_for_a_trial() -> None:
    job = start()
    job.takes_long = True
    records_come(job, 4, 0)
    assert job.questions
    job.silent = job.busy = set()
    job.takes_long = False
    job.has_records = False
    job.into_operation()
    assert job.trials == []


def test_a_trial_that_was_given_up_is_made_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    untried(monkeypatch, 0)
    job = calm_job()
    job.trial = RangeTrial(again=True)
    records_come(job, 24, 0)
    assert len(job.trials) == 1
    assert job.status()["figures"]["operation_measured"] is False
    job.trial = TRIAL
    records_come(job, 60, 0)
    assert len(job.trials) == 2
    assert job.status()["figures"]["operation_measured"]


def test_a_trial_of_a_moment_in_which_the_machines_were_busy_does_not_count_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By it, Spark could never be quicker, and no micro-batch would show that it can."""
    slow = BatchCost(2.5, 32_000.0)
    monkeypatch.setattr(scheduled_job, "FACTS", dataclasses.replace(FACTS, costs={0: slow}))
    job = calm_job()
    job.trial = RangeTrial(slow, "in some way")
    assert job.status()["figures"]["operation_capacity"] == 0
    records_come(job, 200, 0)
    assert job.trials == [], "it is still busy"
    records_come(job, 60, 0)
    assert len(job.trials) == 1
    records_come(job, 400, 0)
    assert len(job.trials) == 1, "the next wait is twice as long"
    job.trial = TRIAL
    records_come(job, 120, 0)
    assert len(job.trials) == 2
    assert job.status()["figures"]["operation_capacity"] > 20_000
    records_come(job, 400, 0)
    assert len(job.trials) == 2


def test_a_range_that_cannot_be_tried_is_tried_once_in_each_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    untried(monkeypatch, 0)
    job = calm_job()
    job.trial = RangeTrial()
    records_come(job, 100, 0)
    assert len(job.trials) == 1
    assert job.status()["figures"]["operation_measured"] is False
    job.change_plan(replanned(job.flow.graph, job.plan, "words", 3, chaining=False))
    job.make_tasks()
    untried(monkeypatch, *(status["chain"] for status in job.scheduler.status()["ranges"]))
    records_come(job, 40, *job.chains)
    assert {one.life for one in job.trials} == {1, 2}


def test_a_spark_that_dies_while_it_tries_a_range_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    untried(monkeypatch, 0)
    job = calm_job()
    assert job.present is not None
    job.present.state = "DEAD"
    records_come(job, 12, 0)
    assert len(job.trials) == 1
    assert job.checks == 1
    records_come(job, 80, 0)
    assert len(job.lives) == 2
    assert {one.life for one in job.trials} == {1, 2}
    assert job.status()["figures"]["operation_measured"]


# --- all together ------------------------------------------------------------------------------------------------


def torment(job: ScheduledJob, rng: random.Random) -> None:
    """One look at a job to which anything may happen meanwhile."""
    for task in job.tasks.values():
        did(task, rng.randrange(1000), busy_s=rng.random() / 4, queued=rng.randrange(10_000))
        story = task["diverted"]
        if story is not None:
            story["under_way"] = rng.randrange(3)
            if rng.random() < 0.02:
                job.fail(task, "Lost: gone")
        if rng.random() < 0.01:
            job.rebuild(task)
        task["record_by_record"] = rng.random() < 0.02
    if rng.random() < 0.02:
        job.restart(rng.randrange(2))
    job.silent = {rng.randrange(2)} if rng.random() < 0.1 else set()
    job.busy = {rng.randrange(2)} if rng.random() < 0.2 else set()
    job.why_not = "no" if rng.random() < 0.1 else None
    job.takes_long = rng.random() < 0.2
    job.has_records = rng.random() < 0.8
    job.cannot_sample = "no" if rng.random() < 0.02 else None
    job.trial = rng.choice([TRIAL, TRIAL, RangeTrial(), RangeTrial(again=True)])
    if (spark := job.present) is not None and rng.random() < 0.02:
        spark.state = rng.choice(["DEAD", "PAUSED"]) if spark.was_ready else "DEAD"
    elif spark is not None and spark.state == "PAUSED" and rng.random() < 0.1:
        spark.state = "READY"
    if job.flow.name == "words" and rng.random() < 0.02:
        operator, parallelism = rng.choice(["words", "count"]), rng.choice([1, 2, 3])
        job.change_plan(replanned(job.flow.graph, job.plan, operator, parallelism, chaining=True))
    if rng.random() < 0.1 and len(job.plan.tasks) != len(job.tasks):
        job.make_tasks()
    job.look(every=rng.choice([0.25, 0.25, 2.0]))
    if rng.random() < 0.5:
        job.barrier()
    if rng.random() < 0.5:
        job.answers()


@pytest.mark.parametrize("mode", ["spark-only", "toggle", "auto"])
def test_whatever_happens_to_workers_tasks_plans_and_spark(mode: Mode) -> None:
    """Who is left alone after any story gets to where he should be; and when there is no Spark any more, nobody is
    diverted."""
    for seed in range(20):
        print(f"seed {seed}")
        rng = random.Random(seed)
        job = start(rng.choice([words, fork, row, two])(), mode, toggle_s=2.0, timing=Timing(1.0, 8.0))
        for _ in range(120):
            torment(job, rng)
        job.calm()
        job.make_tasks()
        states = set()
        for _ in range(80):
            job.look(every=2.0)
            job.barrier()
            job.answers()
            states |= job.states()
        if mode == "auto":
            assert job.states() == {"RECORD"}
        elif mode == "spark-only":
            assert job.states() == {"OPERATION"}
        else:
            assert {"OPERATION", "RECORD"} <= states
        if job.diverted():
            lose_spark(job)
            assert job.diverted() == set()


def lose_spark(job: ScheduledJob) -> None:
    """Spark dies for good, and one task notices."""
    assert job.present is not None
    job.present.state, job.why_not = "DEAD", "it is gone"
    job.barrier()
    job.fail(next(task for task in job.tasks.values() if task["diverted"] is not None), DIED)
    for _ in range(6):
        job.look()
        job.answers()
