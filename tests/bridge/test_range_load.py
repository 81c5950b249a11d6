"""What is measured of the tasks between two looks."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.bridge.burst import BurstOptions
from penstock.bridge.cost import MicroBatch
from penstock.bridge.range_load import OperatorCounts, RangeMeter
from penstock.runtime.worker.load import TaskLoad
from tests.bridge.scheduled_job import LOOK_S, ChangingLoad, ScheduledJob, did, ran, reported, story


def map_reported(tasks: list[ChangingLoad]) -> list[TaskLoad]:
    return [reported(task) for task in tasks]


def tasks(parallelism: int = 2) -> list[ChangingLoad]:
    """The tasks of one chain, of the operators `lines` and `words`; each returned list is as the workers report it."""
    flow = ps.Flow("words", parallelism=parallelism)
    lines = flow.read(ps.sources.Memory(["x"]), name="lines").flat_map(str.split, name="words")
    lines.key_by(str.lower).count(name="count").write(ps.sinks.Null(), name="out")
    return ScheduledJob(flow, BurstOptions()).chains[0]


# --- the load of a range -----------------------------------------------------------------------------------------


def test_records_wait_in_the_inbox_at_the_source_and_in_spark() -> None:
    one, other = both = tasks()
    meter = RangeMeter()
    did(one, 1_000, queued=10)
    did(other, 0, backlog=200)
    first = meter.observe(map_reported(both), 100.0)
    assert (first.queue, first.arrivals, first.processed) == (210, 0, 0), "counting begins here"
    did(one, 100, busy_s=0.2, queued=5, under_way=40)
    did(other, 50, busy_s=0.1, backlog=180)
    second = meter.observe(map_reported(both), 100.0 + LOOK_S)
    assert second.queue == 225
    assert second.arrivals == 150 + 15
    assert second.processed == 150
    assert second.busy_s == pytest.approx(0.15), "on average"
    assert second.time_s == 100.0 + LOOK_S


def test_what_senders_hold_back_waits_too() -> None:
    one, other = both = tasks()
    meter = RangeMeter()
    did(one, 1_000, queued=10)
    first = meter.observe(map_reported(both), 100.0, held_back=5_000)
    assert (first.queue, first.arrivals) == (5_010, 0), "counting begins here"
    did(one, 300, queued=20)
    second = meter.observe(map_reported(both), 100.0 + LOOK_S, held_back=5_500)
    assert (second.queue, second.arrivals, second.processed) == (5_520, 300 + 10 + 500, 300)
    did(one, 300)
    did(other, 200)
    third = meter.observe(map_reported(both), 100.0 + 2 * LOOK_S, held_back=5_000)
    assert (third.queue, third.arrivals, third.processed) == (5_020, 0, 500)


def test_what_a_step_has_begun_with_and_not_taken_up_waits_still() -> None:
    """A step that is interrupted by back-pressure may have much before it."""
    one, _ = both = tasks()
    meter = RangeMeter()
    did(one, 1_000)
    meter.observe(map_reported(both), 1.0)
    did(one, 8_000, begun=6_000)
    seen = meter.observe(map_reported(both), 2.0)
    assert (seen.queue, seen.arrivals, seen.processed) == (6_000, 8_000, 2_000)
    did(one, 0, begun=1_000)
    seen = meter.observe(map_reported(both), 3.0)
    assert (seen.queue, seen.arrivals, seen.processed) == (1_000, 0, 5_000)


def test_what_spark_has_answered_is_not_the_record_tasks_merit() -> None:
    one, other = both = tasks()
    meter = RangeMeter()
    meter.observe(map_reported(both), 1.0)
    did(one, 300, answered=300)
    did(other, 20)
    one["diverted"] = story(7, (1, 50, 3.0), (2, 50, 3.5), (3, 200, 1.0))
    seen = meter.observe(map_reported(both), 2.0)
    assert seen.processed == 20
    assert seen.arrivals == 320
    assert meter.records_in_spark == 300
    assert seen.batches == (MicroBatch(200, 1.0),), "the first one loads and compiles, and the second waits for it"
    did(one, 50, answered=350)
    one["diverted"] = story(7, (1, 50, 3.0), (2, 50, 3.5), (3, 200, 1.0), (4, 50, 0.5))
    assert meter.observe(map_reported(both), 3.0).batches == (MicroBatch(50, 0.5),), "each once"
    assert meter.records_in_spark == 350


def test_what_spark_answered_while_a_range_was_led_is_not_the_record_tasks_merit_later() -> None:
    one, other = both = tasks()
    meter = RangeMeter()
    meter.observe(map_reported(both), 1.0)
    for n in range(1, 51):
        did(one, 100, answered=100 * n)
        one["diverted"] = story(1, *((i, 100, 0.1) for i in range(max(1, n - 31), n + 1)))
        meter.take_answers(map_reported(both))
    assert meter.records_in_spark == 5_000
    did(other, 70, busy_s=0.1)
    one["diverted"] = None
    seen = meter.observe(map_reported(both), 2.0)
    assert (seen.processed, seen.arrivals) == (70, 5_070)


def test_another_diversion_counts_from_one_again() -> None:
    one, _ = both = tasks()
    meter = RangeMeter()
    one["diverted"] = story(7, *((n, 10, 1.0) for n in range(1, 6)))
    assert len(meter.observe(map_reported(both), 1.0).batches) == 3
    one["diverted"] = story(8)
    meter.observe(map_reported(both), 2.0)
    one["diverted"] = story(8, (2, 1_000, 9.0), (3, 2_000, 1.0))
    assert meter.observe(map_reported(both), 3.0).batches == (MicroBatch(2_000, 1.0),)


def test_the_last_answers_count_that_came_before_a_diversion_ended() -> None:
    one, _ = both = tasks()
    meter = RangeMeter()
    meter.observe(map_reported(both), 1.0)
    one["diverted"] = story(7)
    meter.observe(map_reported(both), 2.0)
    did(one, 500, answered=500)
    one["diverted"], one["finished"] = None, True
    assert meter.observe(map_reported(both), 3.0).processed == 0
    assert meter.records_in_spark == 500


def test_answers_to_a_task_that_was_built_again_count_from_its_start() -> None:
    one, _ = both = tasks()
    meter = RangeMeter()
    for taken, answered in ((500, 500), (-100, 0), (30, 30)):
        did(one, taken, answered=answered)
        meter.observe(map_reported(both), 1.0)
    assert meter.records_in_spark == 530


def test_records_that_failed_in_spark_are_counted_through_all_diversions() -> None:
    one, other = both = tasks()
    meter = RangeMeter()
    for failed in ((3, 0), (3, 2), (5, 2), (1, 2)):  # the first task is built again before the last look
        one["unprocessed"], other["unprocessed"] = failed
        meter.take_answers(map_reported(both))
    assert meter.unprocessed == 5 + 1 + 2


def test_micro_batches_beside_each_other_share_spark() -> None:
    one, other = both = tasks()
    one["diverted"] = story(7, (2, 1, 1.0), (3, 600, 3.0), under_way=2)
    other["diverted"] = story(8, (2, 1, 1.0), (3, 900, 1.5), under_way=1)
    batches = RangeMeter().observe(map_reported(both), 1.0).batches
    assert batches == (MicroBatch(600, 1.5), MicroBatch(900, 0.75)), "those of one task share their time already"


def test_the_way_of_a_micro_batch_is_what_spark_has_not_had_it_for() -> None:
    one, _ = both = tasks()
    known = story(7, (1, 1, 1.0))
    known["recent"] = [(2, 1, 9.0, 8.0), (3, 600, 3.0, 2.25), (4, 600, 3.0, None), (5, 600, 3.0, 3.5)]
    one["diverted"] = known
    assert [batch.way_s for batch in RangeMeter().observe(map_reported(both), 1.0).batches] == [0.75, None, 0.0]


def test_counters_that_go_back_are_no_records() -> None:
    """A task that was built again begins with what was saved."""
    one, other = both = tasks()
    meter = RangeMeter()
    did(one, 1_000, busy_s=10.0)
    did(other, 1_000, busy_s=10.0)
    meter.observe(map_reported(both), 1.0)
    did(one, -600, busy_s=-10.0, backlog=600)
    did(other, 30, busy_s=0.1)
    seen = meter.observe(map_reported(both), 2.0)
    assert seen.processed == 30
    assert seen.busy_s == pytest.approx(0.05)
    assert seen.arrivals == 630, "what has to be read again waits again"
    did(one, 100, busy_s=0.2, backlog=500)
    seen = meter.observe(map_reported(both), 3.0)
    assert (seen.arrivals, seen.processed) == (0, 100)
    assert seen.busy_s == pytest.approx(0.1)


def test_a_worker_that_misses_a_look_is_no_burst() -> None:
    """All that it has done since the job began would count as done within one look."""
    one, other = both = tasks()
    meter = RangeMeter()
    did(one, 1_000_000, busy_s=100.0)
    did(other, 1_000_000, busy_s=100.0)
    meter.observe(map_reported(both), 1.0)
    did(one, 100, busy_s=0.2)
    assert meter.observe(map_reported([one]), 2.0).processed == 100
    did(one, 100, busy_s=0.2)
    did(other, 200, busy_s=0.4)
    seen = meter.observe(map_reported(both), 3.0)
    assert (seen.arrivals, seen.processed) == (300, 300)
    assert seen.busy_s == pytest.approx(0.3)


# --- what operators receive and emit -----------------------------------------------------------------------------


def test_counts_of_operators_are_those_of_the_last_looks() -> None:
    one, other = both = tasks()
    counts = OperatorCounts()
    ran(one, words=(10, 40))
    ran(other, words=(20, 20))
    counts.take(map_reported(both))
    assert counts.lately["words"] == pytest.approx((30, 60))
    counts.take(map_reported(both))
    assert counts.lately["words"] == pytest.approx((0.975 * 30, 0.975 * 60))
    ran(one, words=(100, 0))
    counts.take(map_reported(both))
    assert counts.lately["words"] == pytest.approx((0.975**2 * 30 + 100, 0.975**2 * 60))


@pytest.mark.parametrize("parallelism", [1, 8])
def test_counts_last_as_long_whatever_the_parallelism(parallelism: int) -> None:
    all_ = tasks(parallelism)
    counts = OperatorCounts()
    ran(all_[0], words=(80, 160))
    for _ in range(21):
        counts.take(map_reported(all_))
    assert counts.lately["words"] == pytest.approx((0.975**20 * 80, 0.975**20 * 160))


def test_counts_of_diverted_tasks_say_nothing() -> None:
    """They know of their range's ends only, until the look at which they have been seen back."""
    one, other = both = tasks()
    counts = OperatorCounts()
    other["finished"] = True
    counts.take(map_reported(both))
    ran(one, words=(10, 40))
    counts.take(map_reported(both))
    before = counts.lately["words"]
    one["diverted"] = story(1)
    for _ in range(3):
        ran(one, lines=(1000, 1000), words=(0, 17))
        counts.take(map_reported(both))
    ran(one, lines=(1000, 1000), words=(0, 17))
    one["diverted"] = None
    counts.take(map_reported(both))
    taken, given = counts.lately["words"]
    assert given / taken == pytest.approx(before[1] / before[0])
    ran(one, words=(1000, 0))
    counts.take(map_reported(both))
    assert counts.lately["words"][0] > 1000


def test_counts_that_go_back_say_nothing() -> None:
    one, _ = both = tasks()
    counts = OperatorCounts()
    counts.take(map_reported(both))
    ran(one, words=(100, 400))
    counts.take(map_reported(both))
    ran(one, words=(-50, -200))
    counts.take(map_reported(both))
    taken, given = counts.lately["words"]
    assert 90 < taken <= 100
    assert given == pytest.approx(4 * taken)
    ran(one, words=(10, 0))
    counts.take(map_reported(both))
    assert counts.lately["words"][0] == pytest.approx(0.975 * taken + 10)


def test_tasks_that_have_other_numbers_begin_anew() -> None:
    one, _ = both = tasks()
    counts = OperatorCounts()
    ran(one, words=(100, 400))
    counts.take(map_reported(both))
    counts.forget_tasks()
    ran(one, words=(-90, -390))
    counts.take(map_reported(both))
    assert counts.lately["words"] == pytest.approx((0.975 * 100 + 10, 0.975 * 400 + 10))
