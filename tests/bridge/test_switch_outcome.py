"""What a switch did, and how one that did not pay is remembered."""

from __future__ import annotations

import itertools

import pytest

from penstock.bridge.cost import Calibration, MicroBatch
from penstock.bridge.switch_outcome import FIRST_S, MOST_S, Refusals, SwitchStory
from tests.bridge.simulated_range import RECORD_RATE, SPARK, SimulatedRange

KNOWN = Calibration(None, SPARK, prepare_s=1.0, switch_s=0.5)


# --- what came of a switch -----------------------------------------------------------------------------------------


def story(spark_rate: float, queue: float = 20_000.0, come: float = 40_000.0) -> SwitchStory:
    """A switch at 20,000 waiting records of which 40,000/s come, after 30 s; the tasks would process 30,000/s."""
    made = SwitchStory(0.0, "operation", "", come, queue, RECORD_RATE, 0.2)
    for second in range(1, 31):
        queue = max(0.0, queue + come - spark_rate)
        made.observe(float(second), queue, come, (MicroBatch(spark_rate, 0.5),))
    return made


@pytest.mark.parametrize(
    ("spark_rate", "pays"), [(100_000.0, True), (38_000.0, True), (29_000.0, True), (20_000.0, False)]
)
@pytest.mark.parametrize("queue", [20_000.0, 2_000_000.0])
def test_a_switch_does_not_pay_when_spark_carries_less_than_the_record_tasks(
    spark_rate: float, pays: bool, queue: float
) -> None:
    """By a margin, and however much waited before."""
    assert story(spark_rate, queue).does_not_pay(40_000.0) == (not pays)


def test_no_verdict_before_micro_batches_are_answered() -> None:
    made = story(20_000.0)
    made.answers = 2
    assert not made.does_not_pay(40_000.0)
    made.answers = 3
    assert made.does_not_pay(40_000.0)
    assert not made.does_not_pay(1e6), "it may all be in micro-batches"
    made.observe(31.0, 320_000.0, 40_000.0, (MicroBatch(1_000.0, 11.0),))
    assert not made.does_not_pay(40_000.0), "three of these take 33 s"


def test_the_outcome_is_told() -> None:
    made = story(20_000.0)
    made.taken_back = True
    assert "it did not pay" in made.text
    assert made.status()["measured"]["latency_s"] == pytest.approx(
        (20_000 + 620_000) * 15 / (20_000 + 30 * 40_000), rel=0.1
    )


def test_the_steps_of_a_switch_and_its_peak_are_told() -> None:
    """Of a switch at 100 s with 1,000 waiting, at 500 records/s."""
    made = SwitchStory(100.0, "operation", "burst", 500.0, 1_000.0, 400.0, 0.2)
    assert (made.status()["switched_s"], made.status()["answer_s"]) == (None, None)
    assert made.status()["peak"] == {"queue": 1_000.0, "height_s": 0.0, "seconds": 0.0}
    made.observe(100.0, 1_000.0, 100.0, answered=70.0)
    made.switched_s = 0.25
    for at, queue, answered in (
        (100.5, 1_500.0, 0.0),
        (101.0, 2_000.0, 0.0),
        (101.5, 1_200.0, 800.0),
        (102, 400.0, 9.0),
    ):
        made.observe(at, queue, 250.0, answered=answered)
    plain = made.status()
    assert plain["answer_s"] == 1.5
    assert plain["peak"] == {"queue": 2_000.0, "height_s": 2.0, "seconds": 1.5}
    assert made.text.endswith(
        "; the last task switched after 0.2 s; Spark's first answer came after 1.5 s; "
        "up to 2.0 s more were waiting, for 1.5 s"
    )


# --- memory --------------------------------------------------------------------------------------------------------


def test_the_memory_decays() -> None:
    refusals = Refusals()
    refusals.did_not_pay(5_000.0, 1_000.0, 0.0, "slow")
    assert refusals.refused(5_000.0, 1_000.0, 1.0)
    assert refusals.refused(500.0, 1_000.0, 1.0), "with fewer records Spark pays even less"
    assert refusals.refused(5_000.0, 100.0, 1.0) is None, "the record tasks are slower now"
    assert refusals.refused(50_000.0, 1_000.0, 1.0) is None
    assert refusals.remembered()[0]["why"] == "slow"
    assert refusals.refused(5_000.0, 1_000.0, FIRST_S) is None
    assert refusals.remembered(), "the next wait would be twice as long"
    assert refusals.refused(5_000.0, 1_000.0, 2 * FIRST_S) is None
    assert refusals.remembered() == [], "forgotten"


def test_a_load_at_which_switches_never_pay_is_tried_ever_more_rarely() -> None:
    refusals, now, waits = Refusals(), 0.0, []
    for _ in range(10):
        refusals.did_not_pay(1_000.0, 1_000.0, now, "slow")
        began = now
        while refusals.refused(1_000.0, 1_000.0, now):
            now += 1.0
        waits.append(now - began)
    assert waits[0] == FIRST_S
    assert all(later == min(2 * earlier, MOST_S) for earlier, later in itertools.pairwise(waits))
    refusals.paid()
    assert refusals.remembered() == []


# --- under a virtual clock -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [32_000.0, 60_000.0])
def test_a_switch_that_does_not_pay_is_taken_back_and_remembered(load: float) -> None:
    """Micro-batches are quick, but what follows takes fewer of their answers than the record tasks would give it."""

    def run(follows: float | None) -> SimulatedRange:
        made = SimulatedRange(
            lambda now: load if 30 <= now < 330 else 5_000.0, prepare_s=1.0, calibration=KNOWN, follows=follows
        )
        made.run(330)
        return made

    held = run(20_000.0)
    switched = [at for at, name in held.states if name == "SWITCHING"]
    back = next(at for at, name in held.states if name == "RETURNING")
    assert back < switched[0] + 45, "some micro-batches of half a million records must be answered"
    assert len(switched) <= 3, "after one minute, then after two"
    assert len(switched) == 1 or switched[1] >= back + FIRST_S
    assert held.detector.refusals.remembered()
    first = held.detector.switches[0]
    assert first.taken_back

    free = run(None)
    assert free.detector.refusals.remembered() == []
    assert free.detector.switches[0].to == "operation"
