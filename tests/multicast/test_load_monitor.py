"""The monitor: counters and virtual time in, smoothed estimates out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.multicast.load_monitor import Counters, LoadMonitor


def counters(arrived: int, children: int = 2, copy_s: float = 5e-6, encode_s: float = 4e-6) -> Counters:
    """Counters of a root that has sent all that arrived."""
    copies = arrived * children
    return Counters(arrived, copies, copies * copy_s, arrived, arrived * encode_s)


def test_alpha_weighs_the_past() -> None:
    monitor = LoadMonitor(1.0, 0.8)
    assert monitor.look(10.0, counters(0), 0) is None
    first = monitor.look(11.0, counters(30_000), 3)
    assert first is not None
    assert first.rate == pytest.approx(30_000)
    second = monitor.look(12.0, counters(90_000), 5)
    assert second is not None
    assert second.rate == pytest.approx(36_000)
    assert (second.queued_before, second.queued) == (3, 5)


def test_times_of_copies_and_encodings_are_told_apart() -> None:
    monitor = LoadMonitor(1.0, 0.8)
    monitor.look(0.0, counters(0), 0)
    load = monitor.look(1.0, counters(1000), 0)
    assert load is not None
    assert load.cost.copy_s == pytest.approx(5e-6)
    assert load.cost.encode_s == pytest.approx(4e-6)


def test_an_interval_without_copies_says_nothing_of_their_cost() -> None:
    monitor = LoadMonitor(1.0, 0.5)
    monitor.look(0.0, counters(0), 0)
    assert monitor.look(1.0, counters(0), 0) is None, "the cost of a copy is not known yet"
    monitor.look(2.0, counters(1000), 0)
    idle = monitor.look(3.0, counters(1000), 0)
    assert idle is not None
    assert idle.cost.copy_s == pytest.approx(5e-6)
    # The first look that counts found no arrivals: 0, 1,000 and 0, each with half of the past.
    assert idle.rate == pytest.approx(250)


def test_a_look_at_the_same_time_has_no_effect() -> None:
    monitor = LoadMonitor(1.0, 0.8)
    monitor.look(0.0, counters(0), 0)
    assert monitor.look(0.0, counters(100), 1) is None
    load = monitor.look(1.0, counters(200), 1)
    assert load is not None
    assert load.rate == pytest.approx(200)
    assert load.queued_before == 0


def test_a_new_relay_counts_from_0() -> None:
    monitor = LoadMonitor(1.0, 0.5)
    monitor.look(0.0, counters(0), 0)
    monitor.look(1.0, counters(1000), 0)
    assert monitor.look(2.0, counters(10), 0) is None
    load = monitor.look(3.0, counters(1010), 0)
    assert load is not None
    assert load.rate == pytest.approx(1000)


@pytest.mark.parametrize("what", ["arrived", "copies", "copying_s", "encoded", "encoding_s"])
def test_a_task_that_was_removed_takes_its_counts_along(what: str) -> None:
    """The sums of the tasks that are left may be less than before, and no cost may be below 0."""
    monitor = LoadMonitor(1.0, 0.5)
    monitor.look(0.0, Counters(100, 200, 2.0, 100, 3.0), 0)
    less = replace(Counters(150, 300, 3.0, 150, 4.0), **{what: 1})
    assert monitor.look(1.0, less, 0) is None
    load = monitor.look(2.0, Counters(200, 400, 4.0, 200, 5.0), 0)
    assert load is not None
    assert load.cost.copy_s > 0
    assert load.cost.encode_s >= 0


def test_the_last_rate_is_that_of_the_last_interval() -> None:
    monitor = LoadMonitor(1.0, 0.8)
    monitor.look(0.0, counters(0), 0)
    monitor.look(1.0, counters(30_000), 0)
    load = monitor.look(2.0, counters(110_000), 0)
    assert load is not None
    assert load.last_rate == pytest.approx(80_000)
    assert load.rate == pytest.approx(40_000)


def test_the_last_rate_of_an_early_look_counts_from_when_the_queue_was_short() -> None:
    """30,000 a second for half an interval, and then 80,000."""
    monitor = LoadMonitor(1.0, 0.8, early=0.1)
    monitor.look(0.0, counters(0), 0)
    for tenth in range(1, 6):
        monitor.glance(tenth / 10, 3_000 * tenth, 3)
    monitor.glance(0.52, 16_600, 1)  # too soon after the one before
    monitor.glance(0.55, 19_000, 400)
    load = monitor.look(0.6, counters(23_000), 800)
    assert load is not None
    assert load.last_rate == pytest.approx(80_000)
    # A queue that was never short, or only a moment ago, tells the rate since the first glance that is kept.
    monitor.glance(0.63, 25_400, 900)
    monitor.glance(0.66, 27_800, 4)
    load = monitor.look(0.7, counters(31_000), 1000)
    assert load is not None
    assert load.last_rate == pytest.approx(80_000)


def test_the_highest_rate_is_forgotten_after_some_time() -> None:
    monitor = LoadMonitor(1.0, 0.8, memory_s=3.0)
    monitor.look(0.0, counters(0), 0)
    highest, arrived = [], 0
    for second, rate in enumerate((50, 90, 60, 70, 40, 40, 40, 40), 1):
        arrived += rate
        load = monitor.look(float(second), counters(arrived), 0)
        assert load is not None
        highest.append(round(load.highest_rate))
    assert highest == [50, 90, 90, 90, 70, 70, 40, 40]


@given(alpha=st.floats(0, 0.99), looks=st.integers(1, 20), rate=st.integers(1, 10**6))
def test_a_late_look_weighs_as_much_as_those_left_out(alpha: float, looks: int, rate: int) -> None:
    often, once = LoadMonitor(1.0, alpha), LoadMonitor(1.0, alpha)
    for monitor in (often, once):
        monitor.look(0.0, counters(0), 0)
        monitor.look(1.0, counters(1000), 0)
    for look in range(1, looks + 1):
        last = often.look(1.0 + look, counters(1000 + rate * look), 0)
    late = once.look(1.0 + looks, counters(1000 + rate * looks), 0)
    assert last is not None
    assert late is not None
    assert late.rate == pytest.approx(last.rate)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="alpha=1"):
        LoadMonitor(1.0, 1.0)
    with pytest.raises(ValueError, match="interval_s=0"):
        LoadMonitor(0.0, 0.8)


def used(second: float, arrived: int, thread_s: float, core_wait_s: float = 0.0) -> tuple[float, Counters]:
    """A time, and the counters of a root with copies of 10 us and encodings of 5 us."""
    return second, Counters(arrived, arrived, arrived * 10e-6, arrived, arrived * 5e-6, thread_s, core_wait_s)


def test_other_work_is_what_is_left_of_the_thread_s_processor_time() -> None:
    monitor = LoadMonitor(0.1, 0.8)
    monitor.look(*used(0.0, 0, 3.0), 0)
    load = monitor.look(*used(0.1, 1_000, 3.08), 0)
    assert load is not None
    assert load.cost.other_s == pytest.approx(65e-6)
    assert load.busy == pytest.approx(0.8)
    assert load.long_busy == 0, "half a second is not over"
    assert LoadMonitor(0.1, 0.8).look(*used(0.0, 0, 0.0), 0) is None


def test_a_thread_that_waits_for_a_processor_is_not_idle() -> None:
    monitor = LoadMonitor(0.1, 0.8)
    for tenth in range(7):
        load = monitor.look(*used(tenth / 10, 1_000 * tenth, 0.04 * tenth, 0.06 * tenth), 0)
    assert load is not None
    assert load.long_busy == pytest.approx(1.0)
    assert load.pace == pytest.approx(0.4)
    assert load.long_rate == pytest.approx(10_000)
    monitor.begin_anew()
    load = monitor.look(*used(0.7, 7_000, 0.28, 0.42), 0)
    assert load is not None
    assert load.long_busy == 0


def test_a_thread_that_got_no_processor_still_has_a_pace() -> None:
    monitor = LoadMonitor(0.1, 0.8)
    monitor.look(*used(0.0, 0, 0.0), 0)
    monitor.look(*used(0.1, 100, 0.05), 0)
    monitor.begin_anew()
    load = monitor.look(*used(0.2, 100, 0.05, 0.1), 0)
    assert load is not None
    assert 0 < load.pace < 0.1


def test_the_calm_rate_is_that_of_times_with_idle_time_in_which_nothing_waits() -> None:
    monitor = LoadMonitor(0.1, 0.0)
    looks = [(1_000, 0.05, False), (3_000, 0.15, False), (4_000, 0.2, True), (5_500, 0.27, False)]
    monitor.look(*used(0.0, 0, 0.0), 0)
    found = []
    for tenth, (arrived, thread_s, waiting) in enumerate(looks, 1):
        load = monitor.look(*used(tenth / 10, arrived, thread_s), 0, waiting)
        assert load is not None
        found.append(round(load.calm_rate))
    assert found == [10_000, 10_000, 10_000, 15_000], (
        "the second one had no idle time, and in the third something waited"
    )


def test_a_moment_without_records_is_not_taken_for_the_load() -> None:
    monitor = LoadMonitor(0.1, 0.8)
    monitor.look(*used(0.0, 0, 0.0), 0)
    for tenth in range(1, 31):
        monitor.look(*used(tenth / 10, 1_000 * tenth, 0.05 * tenth), 0)
    load = monitor.look(*used(3.3, 30_000, 1.5), 0)
    assert load is not None
    assert load.calm_rate > 9_500
    assert load.rate < 5_500
    assert load.highest_smoothed == pytest.approx(10_000)
