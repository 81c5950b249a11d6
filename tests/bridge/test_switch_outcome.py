"""What a switch is predicted to do, what it did, and how one that did not pay is remembered."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bridge.cost import BatchCost, Calibration, MicroBatch
from penstock.bridge.switch_outcome import (
    FIRST_S,
    MOST_S,
    OperationModel,
    RecordModel,
    Refusals,
    SwitchStory,
    forecast,
)
from tests.bridge.simulated_range import RECORD_RATE, SPARK, SimulatedRange

KNOWN = Calibration(None, SPARK, prepare_s=1.0, switch_s=0.5)


def operation(cost: BatchCost = SPARK, interval_s: float = 1.0) -> OperationModel:
    return OperationModel(cost, interval_s, 2.0)


# --- the model -----------------------------------------------------------------------------------------------------


def test_without_a_queue_the_latencies_are_those_of_the_paper() -> None:
    """Eq. 1: t_out is 0. Eq. 2 and 3: T/2 + t_s + t_ot + V * T / PO."""
    found = forecast(0.0, 6_000.0, RecordModel(30_000.0), operation(), 0.0)
    assert found.record_s == 0.0
    assert found.operation_s == pytest.approx(0.5 + 0.2 + 6_000 / 120_000, rel=0.05)
    assert found.pays_after_s is None


def test_a_burst_makes_the_time_outside_grow() -> None:
    """60,000/s come for 10 s: as records 30,000/s remain each second, and the last of them wait for 10 s."""
    found = forecast(0.0, 60_000.0, RecordModel(30_000.0), operation(), 1.0)
    assert found.pays_after_s is not None
    assert 1 < found.pays_after_s < 10
    assert found.record_s == pytest.approx(30_000 * 10**2 / 2 / 600_000, rel=0.05)
    assert found.operation_s < found.record_s


@given(
    queue=st.floats(0, 1e6),
    v=st.floats(0, 1e5),
    pd=st.floats(1e3, 1e5),
    po=st.floats(1e3, 1e6),
    more=st.floats(1, 10),
    pause_s=st.floats(0, 5),
)
def test_a_quicker_spark_never_pays_later(
    queue: float, v: float, pd: float, po: float, more: float, pause_s: float
) -> None:
    one = forecast(queue, v, RecordModel(pd), operation(BatchCost(0.2, po)), pause_s)
    quicker = forecast(queue, v, RecordModel(pd), operation(BatchCost(0.2, po * more)), pause_s)
    if one.pays_after_s is not None:
        assert quicker.pays_after_s is not None
        assert quicker.pays_after_s <= one.pays_after_s
        assert one.judged_after_s is not None
        assert one.judged_after_s > one.pays_after_s


# --- what came of a switch -----------------------------------------------------------------------------------------


def story(spark_rate: float, queue: float = 20_000.0, come: float = 40_000.0) -> SwitchStory:
    """A switch at 20,000 waiting records of which 40,000/s come, after 30 s; the tasks would process 30,000/s."""
    record = RecordModel(RECORD_RATE)
    predicted = forecast(queue, come, record, operation(), 0.5)
    made = SwitchStory(0.0, "operation", "", come, queue, RECORD_RATE, predicted, record, 0.2)
    for second in range(1, 31):
        queue = max(0.0, queue + come - spark_rate)
        made.observe(float(second), queue, come, (MicroBatch(spark_rate, 0.5),))
    return made


@pytest.mark.parametrize(
    ("spark_rate", "paid"), [(100_000.0, True), (38_000.0, True), (29_000.0, None), (20_000.0, False)]
)
@pytest.mark.parametrize("queue", [20_000.0, 2_000_000.0])
def test_a_switch_does_not_pay_when_spark_carries_less_than_the_record_tasks(
    spark_rate: float, paid: bool | None, queue: float
) -> None:
    """By a margin, and however much waited before."""
    made = story(spark_rate, queue)
    assert made.does_not_pay(40_000.0) == (paid is False)
    if paid:
        made.judge()
        assert made.paid


def test_no_verdict_before_micro_batches_are_answered() -> None:
    made = story(20_000.0)
    made.answers = 2
    assert not made.does_not_pay(40_000.0)
    made.answers = 3
    assert made.does_not_pay(40_000.0)
    assert not made.does_not_pay(1e6), "it may all be in micro-batches"
    made.observe(31.0, 320_000.0, 40_000.0, (MicroBatch(1_000.0, 11.0),))
    assert not made.does_not_pay(40_000.0), "three of these take 33 s"


def test_prediction_and_outcome_are_told_side_by_side() -> None:
    made = story(20_000.0)
    made.paid = False
    assert "it did not pay" in made.text
    plain = made.plain()
    assert plain["predicted"]["operation_s"] < plain["predicted"]["record_s"]
    assert plain["measured"]["latency_s"] > plain["measured"]["else_s"]


def test_the_steps_of_a_switch_and_its_peak_are_told() -> None:
    """Of a switch at 100 s with 1,000 waiting, at 500 records/s."""
    made = SwitchStory(100.0, "operation", "burst", 500.0, 1_000.0, 400.0, None, None, 0.2)
    assert (made.plain()["switched_s"], made.plain()["answer_s"]) == (None, None)
    assert made.plain()["peak"] == {"queue": 1_000.0, "height_s": 0.0, "seconds": 0.0}
    made.observe(100.0, 1_000.0, 100.0, answered=70.0)
    made.switched_s = 0.25
    for at, queue, answered in (
        (100.5, 1_500.0, 0.0),
        (101.0, 2_000.0, 0.0),
        (101.5, 1_200.0, 800.0),
        (102, 400.0, 9.0),
    ):
        made.observe(at, queue, 250.0, answered=answered)
    plain = made.plain()
    assert plain["answer_s"] == 1.5
    assert plain["peak"] == {"queue": 2_000.0, "height_s": 2.0, "seconds": 1.5}
    assert made.text.endswith(
        "; the last task switched after 0.2 s; Spark's first answer came after 1.5 s; "
        "up to 2.0 s more were waiting, for 1.5 s"
    )


# --- memory --------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=20))
def test_the_memory_decays(loads: list[float]) -> None:
    refusals = Refusals()
    for load in loads:
        refusals.did_not_pay(load, 1_000.0, 0.0, "slow")
    for load in loads:
        assert refusals.refused(load, 1_000.0, 1.0)
        assert refusals.refused(load / 10, 1_000.0, 1.0), "with fewer records Spark pays even less"
        assert refusals.refused(load, 100.0, 1.0) is None, "the record tasks are slower now"
    assert refusals.refused(10 * max(loads), 1_000.0, 1.0) is None
    assert refusals.refused(loads[0], 1_000.0, MOST_S) is None
    assert refusals.refused(loads[0], 1_000.0, 3 * MOST_S) is None
    assert refusals.plain() == [], "forgotten"


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
    refusals.paid(1_000.0, 1_000.0)
    assert refusals.plain() == []


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
    assert held.detector.refusals.plain()
    first = held.detector.switches[0]
    assert first.paid is False
    assert first.predicted is not None
    assert first.predicted.operation_s < first.predicted.record_s
    assert first.measured_s > first.else_s  # type: ignore[operator]

    free = run(None)
    assert free.detector.refusals.plain() == []
    assert free.detector.switches[0].to == "operation"


def test_the_outcome_of_a_switch_is_what_was_predicted() -> None:
    run = SimulatedRange(lambda now: 60_000.0 if 30 <= now < 42 else 5_000.0, prepare_s=1.0, calibration=KNOWN)
    run.run(70)
    there, back = run.detector.switches
    assert there.predicted is not None
    assert there.paid
    assert 0.5 < there.measured_s / there.predicted.operation_s < 2, "the load was not yet known when it switched"
    assert there.else_s is not None
    assert 0.5 < there.else_s / there.predicted.record_s < 2
    assert (back.to, back.paid) == ("record", True)
