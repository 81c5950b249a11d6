"""Burst detection: the paper's equations, what is measured, when a range moves, and a burst under a virtual clock."""

from __future__ import annotations

import itertools
import math
import pickle
import random
import re
from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from penstock.bridge.burst import (
    RANGE,
    WANTED,
    BurstDetector,
    BurstOptions,
    Decision,
    Event,
    Observation,
    RangeState,
    Timing,
    switch_length,
    thresholds,
)
from penstock.bridge.cost import BatchCost, BatchSpeed, Calibration, MicroBatch, RecordSpeed, SustainedSpeed, interval
from penstock.runtime.errors import FlowError
from penstock.runtime.lifecycle import InvalidTransition
from tests.bridge.simulated_range import RECORD_RATE, SPARK, SimulatedRange, decided

# The load and the speeds of the simulated burst.
KNOWN = Calibration(RECORD_RATE, SPARK, prepare_s=5.0, switch_s=1.0)

FIELDS = [field.name for field in fields(BurstOptions) if field.name != "timing"]

speeds = st.floats(100, 1e6)
seconds = st.floats(0, 10)


def detector(
    options: BurstOptions | None = None, calibration: Calibration = KNOWN, *, rate: float = 10_000.0
) -> BurstDetector:
    """One that has seen a while of a load at which nothing waits."""
    made = BurstDetector(options, calibration)
    for tenth in range(50):
        made.observe(Observation(tenth / 10, 0, rate / 10))
    return made


def after(made: BurstDetector, time_s: float, queue: float, rate: float = 10_000.0, passed: float = 0.1) -> Decision:
    return made.observe(Observation(time_s, queue, rate * passed))


# --- the equations -------------------------------------------------------------------------------------------------


@given(v=st.floats(0, 1e6), pd=speeds, po=speeds, t=st.floats(0.01, 10), t_s=seconds, t_ot=seconds, t_dt=seconds)
def test_the_switch_length_is_where_both_latencies_are_equal(
    v: float, pd: float, po: float, t: float, t_s: float, t_ot: float, t_dt: float
) -> None:
    """Equations 4 to 6, written down again: at L_switch LatencyD = LatencyO."""
    assume(t / 2 + t_s + t_ot >= t_dt)
    length = switch_length(v, pd, po, t, t_s + t_ot - t_dt)
    latency_d = 0 + length / pd + t_dt
    latency_o = 0 + t / 2 + t_s + (v * t) / po + t_ot
    assert latency_d == pytest.approx(latency_o)
    k, c = pd / po, t / 2 + t_s + t_ot - t_dt
    assert length == pytest.approx(k * (v * t) + c * pd)


@given(length=st.floats(0, 1e9), delta=st.floats(0.01, 0.99))
def test_hysteresis_lies_around_it(length: float, delta: float) -> None:
    up, down = thresholds(length, delta)
    assert (up, down) == ((1 + delta) * length, (1 - delta) * length)
    assert down <= length <= up


def test_with_the_paper_s_k_and_its_second() -> None:
    """K = 0.2, T = 1 s, at the Yahoo benchmark's burst of 76,000/s and a record path of 30,000/s."""
    assert switch_length(76_000, 30_000, 150_000, 1.0, 0.012 + 0.22 - 0.061) == pytest.approx(15_200 + 0.671 * 30_000)


def test_with_k_by_hand_it_decides_by_the_length_alone_as_the_paper_does() -> None:
    slower = Calibration(RECORD_RATE, BatchCost(0.2, RECORD_RATE / 2), prepare_s=5.0, switch_s=1.0)
    measured = detector(BurstOptions(), slower)
    refused = after(measured, 5.0, 1_000_000)
    assert refused.state == "RECORD"
    by_hand = detector(BurstOptions(k=0.2), slower)
    figures = after(by_hand, 5.0, 1_000).figures
    assert figures.interval_s is not None
    expected = switch_length(10_000, RECORD_RATE, 1e9, figures.interval_s, 0.2, k=0.2)
    assert figures.queue_switch == pytest.approx(expected)
    assert by_hand.state == "RECORD"
    decision = after(by_hand, 5.1, 2 * expected)
    assert decision.state == "PREPARING"
    by_hand.happened("ready", 6.0)
    by_hand.happened("switched", 7.0)
    for tenth in range(71, 400):
        after(by_hand, tenth / 10, 0)
    assert by_hand.state == "RETURNING"
    assert "over: at most 0 records wait" in by_hand.story[-1]


def test_how_long_results_are_on_their_way_does_not_decide() -> None:
    """t_dt of Table 2, of which queues are a part: by the letter, C would be -0.95 s, and the length negative."""
    assert 0.2 * 40_000 + (0.5 + 0.039 + 0.044 - 1.533) * 20_000 < 0
    figures = []
    for way_s in (None, 1.533):
        made = detector()
        decision = made.observe(Observation(5.0, 10, 1_000, way_s=way_s))
        figures.append(decision.figures)
    assert [one.record_transmit_s for one in figures] == [None, 1.533]
    assert figures[0].queue_switch == figures[1].queue_switch
    assert figures[0].queue_switch is not None
    assert figures[0].queue_switch > 0


# --- what is measured ----------------------------------------------------------------------------------------------


@given(
    fixed_s=st.floats(0.02, 1.0),
    rate=st.floats(5_000, 5e6),
    seed=st.integers(0, 2**32),
)
def test_the_fit_finds_the_fixed_cost_and_the_rate_in_noise(fixed_s: float, rate: float, seed: int) -> None:
    """5 % noise, and of nine batches of a size two that take up to ten times as long."""
    rng = random.Random(seed)
    speed = BatchSpeed()
    even = fixed_s * rate  # the size at which both costs are equal
    sizes = [even * 2.0**k for k in range(-4, 4)]
    batches = []
    for size in sizes:
        times = [(fixed_s + size / rate) * rng.gauss(1, 0.05) for _ in range(9)]
        for slow in rng.sample(range(9), 2):
            times[slow] *= rng.uniform(2, 10)
        batches += [MicroBatch(size, max(taken, 1e-6)) for taken in times]
    rng.shuffle(batches)
    speed.add(batches)
    cost = speed.cost
    assert cost is not None
    assert cost.fixed_s == pytest.approx(fixed_s, rel=0.2)
    assert cost.rate == pytest.approx(rate, rel=0.2)


def test_without_noise_it_is_exact() -> None:
    speed = BatchSpeed()
    speed.add(MicroBatch(n, 0.1 + n / 50_000) for n in (1_000, 10_000, 80_000))
    assert speed.cost is not None
    assert speed.cost.fixed_s == pytest.approx(0.1)
    assert speed.cost.rate == pytest.approx(50_000)


def test_errors_of_the_fit_are_relative() -> None:
    """0.3 s too much for a large batch leaves the fixed cost, which small ones tell, as it is."""
    speed = BatchSpeed()
    speed.add([MicroBatch(1_000, 0.11), MicroBatch(100_000, 1.1 * 1.3), MicroBatch(1_000_000, 10.1)])
    assert speed.cost is not None
    assert speed.cost.fixed_s == pytest.approx(0.1, rel=0.1)


def test_batches_of_one_size_tell_nothing_but_how_wrong_the_calibration_is() -> None:
    alone, known = BatchSpeed(), BatchSpeed(BatchCost(0.1, 100_000))
    for speed in (alone, known):
        speed.add(MicroBatch(10_000, 0.4) for _ in range(20))
    assert alone.cost is None
    assert known.cost is not None
    assert known.cost.fixed_s == pytest.approx(0.2)
    assert known.cost.rate == pytest.approx(50_000)


def test_a_steady_load_does_not_make_the_fit_forget_small_batches() -> None:
    speed = BatchSpeed()
    speed.add(MicroBatch(n, 0.2 + n / 120_000) for n in (500, 2_000, 8_000))
    rng = random.Random(1)
    for _ in range(500):
        speed.add([MicroBatch(60_000, (0.2 + 0.5) * rng.uniform(0.95, 1.05))])
    assert speed.cost is not None
    assert speed.cost.fixed_s == pytest.approx(0.2, rel=0.1)


def test_the_fit_follows_a_spark_that_became_slower() -> None:
    speed = BatchSpeed()
    sizes = (1_000, 10_000, 100_000)
    speed.add(MicroBatch(n, 0.1 + n / 100_000) for n in sizes * 9)
    speed.add(MicroBatch(n, 0.3 + n / 40_000) for n in sizes * 9)
    assert speed.cost is not None
    assert speed.cost.fixed_s == pytest.approx(0.3)
    assert speed.cost.rate == pytest.approx(40_000)


def test_a_fixed_cost_that_hides_the_rate_promises_no_boundless_speed() -> None:
    """Spark took the same for 1,000 records as for 100,000; ten times that is not free."""
    speed = BatchSpeed()
    speed.add(MicroBatch(n, 0.107) for n in (1_000, 10_000, 100_000))
    assert speed.cost is not None
    assert speed.cost.seconds(1_000_000) > 1.8 * 0.107


@given(st.lists(st.tuples(st.floats(0, 1e7), st.floats(0, 100)), max_size=60))
def test_whatever_is_measured_costs_are_costs(measured: list[tuple[float, float]]) -> None:
    for speed in (BatchSpeed(), BatchSpeed(SPARK)):
        for records, taken in measured:
            speed.add([MicroBatch(records, taken)])
            cost = speed.cost
            assert cost is None or (cost.fixed_s >= 0 and 0 < cost.rate < math.inf)


def test_record_speed_is_of_busy_time() -> None:
    speed = RecordSpeed()
    assert speed.rate is None
    speed.add(10, 0.001, 1.0)  # hardly busy: taken for want of better
    assert speed.rate == pytest.approx(10_000)
    for _ in range(50):
        speed.add(27_000, 0.9, 1.0)
    speed.add(10, 0.001, 1.0)
    assert speed.rate == pytest.approx(30_000)


def test_record_speed_leaves_its_calibration_behind() -> None:
    speed = RecordSpeed(100_000)
    for _ in range(60):
        speed.add(3_000, 0.1, 0.1)
    assert speed.rate == pytest.approx(30_000, rel=0.35)
    for _ in range(300):
        speed.add(3_000, 0.1, 0.1)
    assert speed.rate == pytest.approx(30_000, rel=0.01)


# --- the interval --------------------------------------------------------------------------------------------------


@given(
    v=st.floats(0, 200_000),
    fixed_s=st.floats(0, 1.5),
    rate=st.floats(1_000, 500_000),
    epoch_s=st.one_of(st.none(), st.floats(0.05, 30)),
)
@example(v=60_000, fixed_s=0.2, rate=120_000, epoch_s=1.0)
def test_the_interval_is_the_shortest_in_which_spark_keeps_up(
    v: float, fixed_s: float, rate: float, epoch_s: float | None
) -> None:
    cost = BatchCost(fixed_s, rate)
    chosen = interval(v, cost, epoch_s=epoch_s)
    assert 0.2 * 0.999 <= chosen <= 2.0 * 1.001

    def keeps_up(t: float, error: float) -> bool:
        return cost.seconds(v * t) <= 0.8 * t * (1 + error)

    candidates = [0.2, 2.0]
    if epoch_s is not None:
        in_epoch = epoch_s / chosen
        assert min(abs(x - round(x)) for x in (in_epoch, 1 / in_epoch)) < 1e-6
        candidates = [epoch_s / k for k in range(1, 400)] + [epoch_s * k for k in range(2, 60)]
        shorter = [t for t in candidates if 0.2 <= t < chosen * (1 - 1e-6)]
        assert not any(keeps_up(t, -1e-6) for t in shorter)
    longest = max(t for t in candidates if t <= 2.0)
    assert keeps_up(chosen, 1e-6) or not keeps_up(longest, -1e-6), "none is long enough"


@given(v=st.floats(0, 100_000), more=st.floats(0, 100_000))
def test_more_load_never_shortens_the_interval(v: float, more: float) -> None:
    assert interval(v, SPARK) <= interval(v + more, SPARK)
    assert interval(v, SPARK) <= interval(v, SPARK, backlog=more)


def test_intervals_of_the_simulated_burst() -> None:
    # T >= 0.2 / (0.8 - V / 120,000)
    assert interval(5_000, SPARK) == pytest.approx(1 / 3)  # 0.264 s
    assert interval(60_000, SPARK) == pytest.approx(1.0)  # 0.667 s
    assert interval(80_000, SPARK) == pytest.approx(2.0)  # 1.5 s: two epochs
    assert interval(5_000, SPARK, backlog=500_000) == pytest.approx(1.0)  # as of 55,000/s
    assert interval(100_000, SPARK) == pytest.approx(2.0)  # none is long enough
    assert interval(60_000, None) == pytest.approx(1.0)  # the paper's


# --- the table -----------------------------------------------------------------------------------------------------


def test_every_state_has_a_paradigm_and_bears_the_loss_of_the_bridge() -> None:
    assert set(WANTED) == set(RangeState)
    for state in RangeState:
        assert "bridge lost" in RANGE.possible(state)


def test_an_invalid_transition_tells_what_led_there() -> None:
    made = detector(rate=60_000)
    after(made, 5.0, 1e6, 60_000)
    made.happened("ready", 9.5)
    with pytest.raises(InvalidTransition) as caught:
        made.happened("returned", 9.75)
    assert made.state == "SWITCHING"
    expected = "'returned' came in state SWITCHING, where only 'switched', 'calm', 'bridge lost' can come"
    assert expected in str(caught.value)
    assert "RECORD --burst--> PREPARING (5.000 s: burst: 1,000,000 records wait" in str(caught.value)
    assert "PREPARING --ready--> SWITCHING (9.500 s)" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# --- deciding ------------------------------------------------------------------------------------------------------


def test_a_burst_goes_up_and_comes_back() -> None:
    made = detector(rate=60_000)
    decision = after(made, 5.0, 60_000, 60_000)
    assert (decision.state, decision.wanted, decision.prepare) == ("PREPARING", "operation", True)
    assert decision.reason.startswith("burst: 60,000 records wait, 96,000 when Spark could answer, above ")
    assert made.happened("ready", 10.0) == "SWITCHING"
    assert after(made, 10.1, 100_000, 60_000).wanted == "operation"
    assert made.happened("switched", 11.0) == "OPERATION"
    assert made.dwell_s == pytest.approx(6.0)  # three times what there and back take: a second each
    time_s = 11.0
    while made.state == "OPERATION":
        time_s += 0.5
        decision = after(made, time_s, 0, 5_000, 0.5)
    assert time_s >= 17.0
    assert (decision.state, decision.wanted) == ("RETURNING", "record")
    assert decision.reason.startswith("over: at most 0 records wait")
    assert made.happened("returned", time_s + 0.5) == "RECORD"


def test_the_reason_of_a_switch_tells_of_the_time_when_spark_was_ready() -> None:
    """The load may have changed since the burst was seen, and the figures of the switch are those of its time."""
    made = detector(rate=60_000)
    reason = after(made, 5.0, 60_000, 60_000).reason
    after(made, 24.9, 90_000, 50_000)
    made.happened("ready", 25.0)
    story = made.switches[-1].status()
    assert story["queue"] == 90_000
    assert story["reason"].startswith(f"{reason}; Spark was ready 20 s later: 90,000 records wait")
    again = detector(rate=25_000)
    again.happened("ready", 5.0)
    reason = after(again, 7.2, 100_000, 60_000).reason
    assert again.switches[-1].status()["reason"] == reason


def test_prepared_ahead_it_switches_at_once() -> None:
    made = detector(rate=25_000)
    decision = after(made, 5.0, 10, 25_000)
    assert (decision.state, decision.prepare) == ("RECORD", True)
    made.happened("ready", 7.0)
    assert not after(made, 7.1, 10, 25_000, 2.1).prepare
    assert after(made, 7.2, 100_000, 60_000).state == "SWITCHING"


def test_far_from_a_burst_nothing_is_prepared() -> None:
    decision = after(detector(), 5.0, 10)
    assert not decision.prepare
    assert decision.reason.startswith("calm: 10 records wait; Spark answers sooner above ")


def test_a_burst_is_told_at_once_where_spark_would_answer_late() -> None:
    """More comes than the record tasks process, and the queue grows, but Spark takes seconds for any micro-batch."""
    made = detector(calibration=Calibration(1000, BatchCost(8.0, 5000)), rate=500)
    decision = after(made, 5.0, 10, 500)
    assert not decision.burst
    for tick in range(1, 6):
        decision = after(made, 5.0 + 0.25 * tick, 500.0 * tick, 3000, 0.25)
        if decision.burst:
            break
    assert decision.burst
    assert tick * 0.25 <= 1.0, "a second after it began"
    assert decision.state == "RECORD"
    assert decision.figures.queue_up is not None
    assert decision.figures.own < decision.figures.queue_up
    said = r"not switched: ([\d,]+) records come a second, and the record tasks process 1,000, but "
    found = re.match(said, decision.reason)
    assert found is not None
    assert int(found[1].replace(",", "")) > 1000
    calm = after(made, 8.0, 10, 500, 1.75)
    assert not calm.burst
    assert calm.reason.startswith("calm: ")


def test_what_waits_for_a_moment_is_no_burst() -> None:
    made = detector(calibration=Calibration(1000, BatchCost(8.0, 5000)), rate=500)
    after(made, 5.0, 10, 500)
    decision = after(made, 5.5, 190, 3000, 0.5)
    assert decision.figures.arrival_rate > 1000
    assert decision.figures.growth > 0
    assert not decision.burst, "less than 0.2 s of work waits"
    after(made, 6.0, 900, 3000, 0.5)
    decision = after(made, 6.5, 300, 3000, 0.5)
    assert decision.figures.growth < 0
    assert not decision.burst, "the queue gets shorter"


def test_a_spark_that_is_slower_is_refused_with_the_figures() -> None:
    slow = Calibration(240_000, BatchCost(0.0, 210_000))
    decision = after(detector(calibration=slow), 5.0, 1e7, 300_000)
    assert (decision.state, decision.prepare) == ("RECORD", False)
    assert decision.reason == "not switched: Spark would process 210,000 records/s, the record tasks 240,000"


def test_the_fixed_cost_counts_in_what_spark_can_do() -> None:
    """Without it Spark has twice the speed; of each interval of 2 s it takes 1.2 s."""
    fixed = Calibration(30_000, BatchCost(1.2, 60_000))
    decision = after(detector(calibration=fixed), 5.0, 1e7, 60_000)
    assert decision.reason == "not switched: Spark would process 24,000 records/s, the record tasks 30,000"
    assert decision.figures.operation_rate == 60_000


def test_a_spark_that_is_hardly_quicker_is_refused() -> None:
    hardly = Calibration(30_000, BatchCost(0, 33_000))
    decision = after(detector(calibration=hardly), 5.0, 1e6, 60_000)
    assert decision.reason == (
        "not switched: Spark would process 33,000 records/s, the record tasks 30,000, and must be 20% above them"
    )


def test_a_backlog_that_is_gone_before_spark_is_there_stays() -> None:
    decision = after(detector(rate=1_000), 5.0, 100_000, 1_000)
    assert decision.state == "RECORD"
    assert decision.reason.startswith(
        "not switched: the record tasks are through with 100,000 waiting records in 3.4 s, Spark would be in 6."
    )
    assert after(detector(rate=1_000), 5.0, 1_000_000, 1_000).state == "PREPARING"


@pytest.mark.parametrize(
    ("calibration", "missing"),
    [
        (Calibration(), "the record tasks' and Spark's"),
        (Calibration(record_rate=30_000), "Spark's"),
        (Calibration(batch=SPARK), "the record tasks'"),
    ],
)
def test_without_measurements_it_asks_for_them(calibration: Calibration, missing: str) -> None:
    decision = after(detector(calibration=calibration, rate=60_000), 5.0, 1e9, 60_000)
    assert decision.figures.queue_switch is None
    assert decision.wanted == "record"
    assert decision.reason == f"calibrate first: {missing} speed on this range is not known"
    assert decision.prepare == (calibration.record_rate is not None)  # a trial needs Spark


def test_measurements_take_the_place_of_a_calibration() -> None:
    made = detector(calibration=Calibration())
    trial = tuple(MicroBatch(n, SPARK.seconds(n)) for n in (1_000, 10_000, 50_000))
    slow = made.observe(Observation(5.0, 1e6, 6_000, processed=300, busy_s=0.1, batches=trial))
    assert slow.reason == "not switched yet: the range processes records only now, and stays 1.0 s more"
    decision = made.observe(Observation(6.1, 1e6, 66_000, processed=33_000, busy_s=1.1))
    assert decision.figures.queue_switch is not None
    assert decision.state == "PREPARING"
    assert decision.figures.record_rate == pytest.approx(30_000)
    assert decision.figures.operation_rate == pytest.approx(120_000)


def test_after_a_failure_it_waits_ever_longer_and_warns_once() -> None:
    made = detector()
    warnings, tries = [], []
    time_s = 5.0
    while time_s < 200:
        decision = after(made, time_s, 1e7, 60_000)
        warnings.append(decision.warning)
        if decision.state == "PREPARING":
            tries.append(time_s)
            made.happened("prepare failed", time_s, "no Java found")
        time_s += 0.1
    waits = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert waits == [pytest.approx(wait, abs=0.2) for wait in (10, 20, 40, 80)]
    assert [warning for warning in warnings if warning] == [
        "Spark could not be made ready (no Java found); the range runs record by record, next try in 10 s"
    ]
    assert "not switched: Spark could not be made ready (no Java found); next try in" in decision.reason
    assert not decision.prepare


def test_a_lost_bridge_is_left_and_not_taken_again_at_once() -> None:
    made = detector(rate=60_000)
    after(made, 5.0, 60_000, 60_000)
    for event, time_s in (("ready", 6.0), ("switched", 7.0), ("bridge lost", 8.0)):
        made.happened(event, time_s)
    assert after(made, 8.1, 1e6, 60_000).wanted == "record"
    made.happened("returned", 9.0)
    decision = after(made, 17.5, 1e6, 60_000)
    assert decision.state == "RECORD"
    assert decision.reason == "not switched: the range does not use Spark for now; next try in 0 s"
    decision = after(made, 18.1, 1e6, 60_000)
    assert decision.state == "PREPARING"
    assert decision.prepare


def test_a_burst_that_is_over_before_spark_is_ready_is_left_alone() -> None:
    made = detector(rate=60_000)
    assert after(made, 5.0, 60_000, 60_000).state == "PREPARING"
    decision = after(made, 7.0, 100, 5_000, 2.0)
    assert decision.state == "RECORD"
    assert "over before Spark was ready" in decision.reason
    assert made.happened("ready", 8.0) == "RECORD"  # what was begun is there for the next one


def test_a_source_whose_buffers_stay_full_has_a_burst_however_short_its_queue_is() -> None:
    """The buffers take as much as the tasks do, so that neither the queue nor the arrivals show the burst."""
    made = detector()
    states = []
    for tenth in range(1, 31):
        decision = made.observe(Observation(5 + tenth / 10, 500, 3_000, 3_000, 0.1, full=True))
        states.append(decision.state)
    assert decision.figures.queue_up is not None
    assert decision.figures.queue < decision.figures.queue_up
    assert states[10] == "RECORD", "a moment's pause of the tasks is no burst"
    assert states[-1] == "PREPARING"


def test_buffers_that_are_full_for_moments_are_no_burst() -> None:
    made = detector()
    for tenth in range(1, 101):
        decision = made.observe(Observation(5 + tenth / 10, 500, 3_000, 3_000, 0.1, full=tenth % 15 != 0))
        assert decision.state == "RECORD"


def test_the_speed_of_the_record_tasks_is_forgotten_when_their_number_changes() -> None:
    made = detector()
    assert after(made, 5.0, 10).figures.record_rate is not None
    made.rescaled()
    assert after(made, 5.1, 10).figures.record_rate is None
    made.observe(Observation(5.2, 10, 500, 500, 0.1))
    assert made.observe(Observation(5.3, 10, 500, 500, 0.1)).figures.record_rate == pytest.approx(5_000)


def test_a_burst_that_is_fading_is_still_prepared_for() -> None:
    made = detector(rate=60_000)
    decision = after(made, 5.0, 60_000, 60_000)
    figures = decision.figures
    assert figures.queue_switch is not None
    for tenth in range(1, 30):
        decision = after(made, 5 + tenth / 10, figures.queue_switch, 60_000)
        assert decision.state == "PREPARING"


def test_the_swing_of_the_queue_between_two_batches_is_not_calm() -> None:
    """The queue is nearly empty whenever a batch was cut; the record tasks could bear this load, but not sooner."""
    made = detector(BurstOptions(timing=Timing(interval_min_s=1.0)), rate=24_000)
    after(made, 5.0, 1e7, 24_000)
    made.happened("ready", 6.0)
    made.happened("switched", 7.0)
    for tenth in range(1, 400):
        decision = after(made, 7 + tenth / 10, 2_400 * (tenth % 10 + 1), 24_000)
        assert decision.state == "OPERATION"
    assert decision.reason.startswith("burst: up to 24,000 records wait")


def test_it_does_not_come_back_to_what_the_record_tasks_cannot_bear() -> None:
    made = detector(calibration=Calibration(30_000, BatchCost(0.01, 1_000_000), prepare_s=5.0))
    after(made, 5.0, 1e6, 40_000)
    made.happened("ready", 6.0)
    made.happened("switched", 7.0)
    for tenth in range(1, 400):
        decision = after(made, 7 + tenth / 10, 0, 29_000)
    assert decision.state == "OPERATION"
    assert "the record tasks, with 30,000 records/s, would not bear with 20% to spare" in decision.reason


def test_it_comes_back_from_a_spark_that_does_not_pay_any_more() -> None:
    made = detector(rate=60_000)
    after(made, 5.0, 60_000, 60_000)
    made.happened("ready", 6.0)
    made.happened("switched", 7.0)
    batches = tuple(MicroBatch(n, 0.2 + n / 20_000) for n in (1_000, 10_000, 60_000) * 9)
    made.observe(Observation(10.0, 1e6, 180_000, batches=batches))
    decision = after(made, 20.0, 1e6, 60_000, 10.0)
    assert decision.state == "RETURNING"
    assert decision.reason.startswith("Spark does not pay any more: Spark would process 18,000 records/s")


def test_the_way_to_spark_is_measured_apart_from_what_spark_does() -> None:
    """t_ot is 0.05 s and a second for 500,000 records; t_s is 0.15 s."""
    made = detector()
    assert after(made, 5.0, 10).figures.transmit_s is None, "it is not known yet"

    def batch(records: int) -> MicroBatch:
        way_s = 0.05 + records / 500_000
        return MicroBatch(records, 0.15 + records / 200_000 + way_s, way_s)

    made.observe(Observation(5.1, 0, 1_000, batches=tuple(batch(n) for n in (1_000, 10_000, 50_000) * 9)))
    figures = after(made, 5.2, 10).figures
    assert figures.transmit_s == pytest.approx(0.05, rel=0.01)
    assert figures.transmit_rate == pytest.approx(500_000, rel=0.01)
    assert figures.schedule_s == pytest.approx(0.15, rel=0.01)
    assert figures.fixed_s == pytest.approx(0.2, rel=0.01)
    assert (figures.prepare_s, figures.switch_s, figures.return_s) == (5.0, 1.0, 1.0)


def test_the_way_of_results_to_the_next_tasks_is_the_median_of_the_last() -> None:
    made = detector()
    assert after(made, 5.0, 10).figures.record_transmit_s is None, "it is not known yet"
    for tenth, way_s in enumerate([0.004, None, 0.002, 9.0, 0.003]):
        made.observe(Observation(5.1 + tenth / 10, 0, 1_000, way_s=way_s))
    assert after(made, 6.0, 10).figures.record_transmit_s == 0.0035, "what was measured remains while nothing is"


def test_off_is_off() -> None:
    made = detector(BurstOptions(mode="off"))
    assert after(made, 5.0, 1e9, 1e6).reason == "the bridge is off"
    made.mode = "spark-only"
    assert after(made, 6.0, 0).state == "PREPARING"
    made.happened("ready", 7.0)
    made.happened("switched", 8.0)
    made.mode = "off"
    assert after(made, 9.0, 1e9, 1e6).state == "RETURNING"


def test_spark_only_needs_no_figures_and_stays() -> None:
    made = detector(BurstOptions(mode="spark-only"), Calibration())
    assert made.state == "PREPARING"
    made.happened("ready", 7.0)
    made.happened("switched", 8.0)
    decision = after(made, 1_000.0, 0, 0, 992)
    assert (decision.state, decision.wanted, decision.interval_s) == ("OPERATION", "operation", 1.0)


def test_toggling_goes_to_and_fro_whatever_the_load() -> None:
    made = BurstDetector(BurstOptions(mode="toggle", toggle_s=3.0), Calibration())
    switches: list[tuple[float, str]] = []
    for tenth in range(200):
        after(made, tenth / 10, 0, 0)
        doing: dict[str, Event] = {"PREPARING": "ready", "SWITCHING": "switched", "RETURNING": "returned"}
        while made.state in doing:
            event = doing[made.state]
            if made.happened(event, tenth / 10) in ("RECORD", "OPERATION"):
                switches.append((tenth / 10, made.state))
    assert [paradigm for _, paradigm in switches] == ["OPERATION", "RECORD"] * 3
    assert [time_s for time_s, _ in switches] == pytest.approx([3, 6, 9, 12, 15, 18])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"delta": 1.0}, "delta=1.0; it must be a number, above 0 and below 1"),
        ({"mode": "on"}, "mode='on'; it must be 'auto', 'off', 'spark-only' or 'toggle'"),
        ({"mode": "on"}, "'auto' is what dual='on' means"),
        ({"mode": "automatic"}, "or 'toggle'$"),
        ({"margin": -0.1}, "margin=-0.1"),
        *(
            ({name: wrong}, rf"^{name}={re.escape(repr(wrong))}; it must be above 0")
            for name in ("toggle_s", "epoch_s")
            for wrong in (0.0, -1, math.nan)
        ),
        ({"epoch_s": math.inf}, "^epoch_s=inf; it must be finite"),
        *(({name: "x"}, f"^{name}='x'; ") for name in FIELDS),
        *(({name: True}, f"^{name}=True; ") for name in FIELDS if name != "ahead"),
        *(
            ({name: wrong}, f"^{name}={wrong!r}; it must be a number")
            for name in ("delta", "k", "margin", "range_below")
            for wrong in (-1, math.nan, math.inf)
        ),
        ({"margin": None}, "margin=None; it must be a number, 0 or more"),
        ({"k": 0.0}, "k=0.0; it must be a number above 0"),
    ],
)
def test_options_that_cannot_be_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        BurstOptions(**wrong)
    assert isinstance(caught.value, FlowError)


@pytest.mark.parametrize(
    "right",
    [{"mode": mode} for mode in ("auto", "off", "spark-only", "toggle")]
    + [
        {"margin": 0, "range_below": 2, "k": 0.2, "epoch_s": None},
        {"toggle_s": math.inf},
        {"delta": 0.999, "ahead": True},
        {"epoch_s": timedelta(seconds=2)},
    ],
)
def test_options_that_are_right(right: dict[str, Any]) -> None:
    made = BurstOptions(**right)
    for name, value in right.items():
        assert getattr(made, name) == (value.total_seconds() if isinstance(value, timedelta) else value)


def test_a_trial_of_spark_leaves_what_is_known_of_the_record_tasks() -> None:
    made = detector(calibration=Calibration(RECORD_RATE))
    assert after(made, 5.0, 10).figures.operation_rate is None
    made.tried(SPARK)
    figures = after(made, 5.1, 10).figures
    assert figures.record_rate == pytest.approx(RECORD_RATE)
    assert figures.operation_rate == pytest.approx(SPARK.rate)


def test_without_a_trial_a_core_of_spark_is_taken_for_as_quick_as_a_record_task() -> None:
    """Else a slow function would seem a thousand times as quick in Spark."""
    made = detector(calibration=Calibration(batch=SPARK))
    made.untried(SPARK, cores_a_task=4.0)
    assert made.observe(Observation(5.0, 10, 1_000)).figures.operation_rate == pytest.approx(SPARK.rate)
    for tenth in range(51, 90):  # 100/s, of which half of the time is that of another task
        figures = made.observe(Observation(tenth / 10, 1_000, 100, processed=10, busy_s=0.05)).figures
    assert figures.record_rate == pytest.approx(100)
    assert figures.operation_rate == pytest.approx(800)
    assert figures.fixed_s == pytest.approx(SPARK.fixed_s)
    for tenth in range(90, 170):  # it becomes slower
        figures = made.observe(Observation(tenth / 10, 1_000, 100, processed=1, busy_s=0.1)).figures
    assert figures.operation_rate == pytest.approx(40, rel=0.4)
    made.observe(Observation(17.1, 1_000, 0, batches=(MicroBatch(1_000, 3.0),)))
    figures = made.observe(Observation(17.2, 1_000, 100, processed=10, busy_s=0.01)).figures
    assert figures.operation_rate != pytest.approx(4_000), "what was measured counts"


def test_one_slow_micro_batch_is_no_reason_to_come_back() -> None:
    made = detector()
    made.prepared = True
    assert after(made, 5.0, 200_000, rate=100_000).state == "SWITCHING"
    made.happened("switched", 5.5)
    assert made.switches[-1].status()["switched_s"] == 0.5
    slow = MicroBatch(20_000, 8.0)
    for number in range(2):
        decision = made.observe(Observation(10.0 + number, 400_000, 100_000, batches=(slow,)))
        assert decision.state == "OPERATION", decision.reason
    decision = made.observe(Observation(12.0, 500_000, 100_000, batches=(slow,)))
    assert decision.state == "RETURNING"
    assert decision.reason.startswith("Spark does not pay any more")


def test_an_untried_range_that_was_slow_in_spark_is_judged_anew() -> None:
    """Its function may have been slow for a while, in Spark as in the record tasks."""
    made = detector(calibration=Calibration(RECORD_RATE))
    made.untried(SPARK, cores_a_task=4.0)
    made.prepared = True
    assert after(made, 5.0, 200_000, rate=100_000).state == "SWITCHING"
    made.happened("switched", 5.5)
    for number in range(3):
        slow = MicroBatch(20_000, 60.0)
        decision = made.observe(Observation(10.0 + number, 4_000_000, 100_000, batches=(slow,)))
    assert decision.state == "RETURNING"
    assert decision.figures.operation_rate is not None
    assert decision.figures.operation_rate < RECORD_RATE
    made.happened("returned", 13.0)
    decision = after(made, 20.0, 200_000, rate=100_000)
    assert decision.figures.operation_rate == pytest.approx(4 * RECORD_RATE)
    assert decision.state == "RECORD"
    assert "did not pay" in decision.reason, "until more is known, the load is refused"


def test_a_trial_takes_the_place_of_a_guess() -> None:
    made = detector(calibration=Calibration(RECORD_RATE, SPARK))
    made.untried(SPARK, cores_a_task=0.5)
    assert after(made, 5.0, 10).figures.operation_rate == pytest.approx(RECORD_RATE / 2)
    made.tried(SPARK)
    assert after(made, 5.1, 10).figures.operation_rate == pytest.approx(SPARK.rate)


def test_time_does_not_go_back() -> None:
    made = detector()
    with pytest.raises(ValueError, match="time went back"):
        after(made, 1.0, 0)


def test_observations_of_one_instant_count_together() -> None:
    made = BurstDetector(calibration=KNOWN)
    for time_s in (0.0, 1.0, 1.0, 2.0):
        decision = made.observe(Observation(time_s, 0, 10_000))
    assert 10_000 < decision.figures.arrival_rate < 30_000


# --- what holds for any load ---------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.05, 1.0)), min_size=1, max_size=80), st.booleans())
def test_between_the_thresholds_nothing_moves(steps: list[tuple[float, float]], in_spark: bool) -> None:
    """Wherever in between the queue goes, and however long: the paradigm stays what it is."""
    made = detector(rate=20_000)
    time_s = 5.0
    if in_spark:
        after(made, time_s, 1e6, 20_000)
        made.happened("ready", time_s)
        made.happened("switched", time_s)
    state = made.state
    assert state == ("OPERATION" if in_spark else "RECORD")
    decision = after(made, time_s + 0.1, 25_000, 20_000)
    time_s += 0.1
    for share, passed in steps:
        up, down = decision.figures.queue_up, decision.figures.queue_down
        assert up is not None
        assert down is not None
        time_s += passed
        # just within, so that V's last digits do not matter
        decision = after(made, time_s, down * 1.01 + share * (up * 0.99 - down * 1.01), 20_000, passed)
        assert decision.state == state, decision.reason


@given(
    record_rate=st.floats(1_000, 1e6),
    share=st.floats(0.01, 1.0),
    fixed_s=st.floats(0, 1),
    loads=st.lists(st.tuples(st.floats(0, 1e8), st.floats(0, 2e6)), min_size=1, max_size=30),
)
def test_it_never_switches_to_a_spark_that_is_not_quicker(
    record_rate: float, share: float, fixed_s: float, loads: list[tuple[float, float]]
) -> None:
    made = BurstDetector(calibration=Calibration(record_rate, BatchCost(fixed_s, record_rate * share)))
    for number, (queue, rate) in enumerate(loads):
        decision = after(made, number * 0.5, queue, rate, 0.5)
        assert (decision.wanted, decision.prepare) == ("record", False)


@given(
    rate=st.floats(0, 100_000),
    low=st.floats(0, 1e6),
    more=st.floats(0, 1e6),
    prepared=st.booleans(),
    record_rate=st.floats(10_000, 60_000),
)
def test_more_waiting_never_speaks_for_the_record_tasks(
    rate: float, low: float, more: float, prepared: bool, record_rate: float
) -> None:
    decisions = []
    for queue in (low, low + more):
        made = detector(calibration=Calibration(record_rate, SPARK, 5.0, 1.0), rate=rate)
        if prepared:
            made.happened("ready", 5.0)
        decisions.append(after(made, 5.1, queue, rate))
    assert (decisions[0].wanted, decisions[1].wanted) != ("operation", "record")


# --- a burst under a virtual clock ---------------------------------------------------------------------------------


def burst(now: float) -> float:
    """5,000/s, for a minute 60,000/s, then 5,000/s again."""
    return 60_000.0 if 30 <= now < 90 else 5_000.0


@pytest.mark.parametrize("calibration", [KNOWN, Calibration()], ids=["calibrated", "from nothing"])
def test_a_burst_is_handed_to_spark_and_taken_back(calibration: Calibration) -> None:
    """From nothing: Spark is made ready because the record tasks are near what they can, and tried; then it is known
    that it pays, and it is ready."""
    run = SimulatedRange(burst, calibration=calibration)
    run.run(150)
    assert run.came == pytest.approx(run.done + run.left)
    names = [name for _, name in run.states]
    preparing = ["PREPARING"] if calibration is KNOWN else []
    assert names == ["RECORD", *preparing, "SWITCHING", "OPERATION", "RETURNING", "RECORD"]
    times = {name: at for at, name in run.states[1:-1]}
    assert 30 < times.get("PREPARING", 33) < 34
    assert times["OPERATION"] < 38  # five seconds of preparing begin ahead of the decision
    assert 90 < times["RETURNING"] < 100
    # without Spark 60 s of it would leave 1,800,000 waiting
    assert max(run.queues) < 320_000
    assert max(run.queues[int(60 / run.step_s) : int(90 / run.step_s)]) < 130_000
    assert run.queues[-1] < 3_000


def test_a_slower_spark_is_never_taken() -> None:
    run = SimulatedRange(burst, spark=BatchCost(0.2, 25_000), calibration=Calibration(30_000, BatchCost(0.2, 25_000)))
    run.run(150)
    assert run.states == [(0.0, "RECORD")]


def test_a_slower_spark_that_was_calibrated_too_well_is_left_again() -> None:
    run = SimulatedRange(burst, spark=BatchCost(0.2, 25_000), calibration=KNOWN)
    run.run(150)
    names = [name for _, name in run.states]
    assert names == ["RECORD", "PREPARING", "SWITCHING", "OPERATION", "RETURNING", "RECORD"]


def test_a_load_that_comes_and_goes_quickly_does_not_make_it_flap() -> None:
    """Three seconds of each, for five minutes: between two switches there is at least the dwell, unless a burst begins
    just when the range has come back for a probe."""
    run = SimulatedRange(lambda now: 60_000.0 if now % 6 < 3 else 5_000.0, calibration=KNOWN)
    run.run(300)
    phases = [at for at, name in run.states if name in ("OPERATION", "RECORD")]
    short = [at for at, later in itertools.pairwise(phases[1:]) if later - at < 2.0]
    assert len(short) <= 2
    assert len(phases) < 60
    assert max(run.queues) < 320_000


@pytest.mark.parametrize("spark_rate", [300_000.0, 1_000_000.0, 45_000.0])
def test_record_tasks_that_are_held_up_are_not_taken_for_quick(spark_rate: float) -> None:
    """The record tasks could do 250,000 records/s alone, and sustain 50,000, because of what follows or of tasks beside
    them. A Spark of 300,000/s is hardly quicker than the first figure, and six times as quick as the second."""
    spark = BatchCost(0.2, spark_rate)
    run = SimulatedRange(
        lambda now: 100_000.0 if now >= 10 else 5_000.0,
        record_rate=50_000.0,
        alone=250_000.0,
        spark=spark,
        calibration=Calibration(None, spark, prepare_s=3.0, switch_s=0.5),
    )
    run.run(40)
    if spark_rate < 50_000:
        assert run.states == [(0.0, "RECORD")]
    else:
        assert 10 < run.states[1][0] < 12
        assert run.detector.state == "OPERATION"
    assert run.decision is not None
    assert run.decision.figures.record_rate == pytest.approx(50_000)
    assert run.decision.figures.record_rate_alone == pytest.approx(250_000)


def test_only_what_is_processed_while_records_wait_is_sustained() -> None:
    speed = SustainedSpeed()
    speed.add(500, 0, 1.0)  # the records of the period
    speed.add(500, 100, 1.0)
    speed.add(100, 100, 1.0)  # perhaps within a moment
    assert speed.rate is None
    speed.add(0, 3_000, 0.5)  # a pause of half a second
    speed.add(1_000, 3_000, 0.5)
    assert speed.rate == pytest.approx(1_000)
    for _ in range(30):
        speed.add(2_000, 3_000, 1.0)
    assert speed.rate == pytest.approx(2_000)
    speed.add(500, 0, 1.0)  # the queue is over
    assert speed.rate == pytest.approx(2_000)
    speed.add(100, 3_000, 1.0)  # another queue
    assert speed.rate == pytest.approx(100)


def test_what_is_sustained_is_also_known_per_busy_second() -> None:
    speed = SustainedSpeed()
    assert speed.alone is None
    speed.add(0, 3_000, 0.5, 0.25)  # busy with what is processed only then
    speed.add(1_000, 3_000, 0.5, 0.25)
    assert speed.alone == pytest.approx(2_000)
    for _ in range(30):
        speed.add(100, 3_000, 1.0, 1.0)
    assert speed.alone == pytest.approx(100, rel=1e-3)


def test_record_tasks_sustain_what_they_do_without_a_queue() -> None:
    speed = SustainedSpeed()
    speed.add(50, 1_000, 0.25)  # when a job begins, for example
    assert speed.rate == pytest.approx(200)
    for _ in range(3):
        speed.add(400, 10, 0.25)
    assert speed.rate == pytest.approx(200), "a moment is not enough"
    for _ in range(5):
        speed.add(400, 10, 0.25)
    assert speed.rate == pytest.approx(1_600)
    for _ in range(9):
        speed.add(100, 10, 0.25)
    assert speed.rate == pytest.approx(1_600), "fewer have come"


def test_a_queue_that_does_not_grow_is_no_burst_although_the_speed_known_is_too_low() -> None:
    """The record tasks were slow in the only queue that was seen."""
    made = BurstDetector(BurstOptions(), Calibration(None, SPARK, prepare_s=1.0, switch_s=1.0))
    for tenth in range(20):
        made.observe(Observation(tenth / 10, 500, 100, processed=100))
    for tenth in range(20, 26):
        decision = made.observe(Observation(tenth / 10, 20, 1_000, processed=1_000))
    assert decision.figures.record_rate == pytest.approx(1_000)
    assert decision.figures.arrival_rate > 4_000
    assert decision.figures.soon == 20
    assert decision.wanted == "record"


@pytest.mark.parametrize("lasts_s", [20, 60])
def test_a_range_comes_back_after_an_operator_was_slow(lasts_s: float) -> None:
    """Its record tasks took 20 times as long for a while. Nothing in Spark tells that this is over."""
    run = SimulatedRange(
        lambda now: 10_000.0,
        prepare_s=1.0,
        calibration=Calibration(None, SPARK, prepare_s=1.0, switch_s=0.5),
        slowness=lambda now: 20.0 if 30 <= now < 30 + lasts_s else 1.0,
    )
    run.run(60 + 2 * lasts_s)
    first = next(at for at, name in run.states if name == "SWITCHING")
    assert 30 < first < 31.5 + 1.0, "a second to prepare"
    assert run.detector.state == "RECORD"
    assert run.states[-1][0] < 30 + 1.8 * lasts_s + 12, "the wait before a probe doubles"
    assert max(run.queues[-50:]) <= 1_000, "nothing waits at the end"
    assert max(run.queues) < 50_000, "a probe is short: two seconds of what comes"
    assert sum(name == "OPERATION" for _, name in run.states) <= 2 + lasts_s / 30


def test_a_range_comes_back_from_a_spark_that_answers_later_than_the_figures_say() -> None:
    """After the burst, more records wait than a micro-batch that gathers and one that is under way could hold by the
    figures, and more than L_down, for ever: micro-batches of other tasks share Spark."""
    run = SimulatedRange(
        lambda now: 60_000.0 if 10 <= now < 15 else 2_000.0,
        record_rate=9_000.0,
        calibration=Calibration(9_000.0, SPARK, prepare_s=1.0, switch_s=0.5),
        longer=8.0,
    )
    run.run(80)
    there = [at for at, name in run.states if name == "OPERATION"]
    back = [at for at, name in run.states if name == "RECORD" and at > 10]
    assert len(there) == len(back) == 1
    assert there[0] < 16, "Spark takes 5 s to be ready"
    assert back[0] < 60
    assert max(run.queues[-10:]) < 1_000


def test_probes_become_rare_while_the_record_tasks_stay_slow() -> None:
    run = SimulatedRange(
        lambda now: 10_000.0,
        prepare_s=1.0,
        calibration=Calibration(None, SPARK, prepare_s=1.0, switch_s=0.5),
        slowness=lambda now: 20.0 if now >= 30 else 1.0,
    )
    run.run(1_000)
    probes = [at for at, name in run.states if name == "RETURNING"]
    assert 4 <= len(probes) <= 6, "after 10, 20, 40, 80, 160, 320 seconds"
    waits = [later - earlier for earlier, later in itertools.pairwise(probes)]
    assert all(later > 1.7 * earlier for earlier, later in itertools.pairwise(waits))


def test_a_burst_that_the_record_tasks_have_never_borne_is_hardly_probed() -> None:
    run = SimulatedRange(lambda now: 60_000.0 if now >= 30 else 5_000.0, calibration=KNOWN)
    run.run(85)
    assert [name for _, name in run.states] == ["RECORD", "PREPARING", "SWITCHING", "OPERATION"]


def test_few_decisions_cost_more_than_the_better_choice() -> None:
    """`python -m tests.bridge.simulated_range` decides many more cases."""
    cases = [decided(seed) for seed in range(20)]
    assert sum(case.more > 1.1 for case in cases) <= 1
    assert not any(case.taken_back for case in cases)
    assert any("OPERATION" in case.states for case in cases)
    assert any("OPERATION" not in case.states for case in cases)


def test_micro_batches_are_short_again_after_a_backlog() -> None:
    """The switch takes long. What gathers and what is under way is no backlog, or micro-batches stay long for ever,
    because more gathers in long ones."""
    spark = BatchCost(0.25, 12_000.0)
    run = SimulatedRange(
        lambda now: 6_000.0 if now >= 20 else 1_600.0,
        record_rate=4_000.0,
        spark=spark,
        switch_s=2.5,
        calibration=Calibration(None, spark, prepare_s=2.0, switch_s=0.5),
        under_way_max=2,
    )
    run.run(50)
    assert run.detector.state == "OPERATION"
    intervals = [seconds for at, seconds in run.intervals if at >= 20]
    assert max(intervals) == 2.0, "there was a backlog"
    assert set(intervals[-100:]) == {interval(6_000.0, spark)} == {1.0}
