"""Histograms: how far off a quantile may be, and what is recent."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.worker.metrics import Histogram, LeastAges, RecentHistogram

values = st.lists(st.integers(0, 2**62) | st.integers(0, 40), min_size=1, max_size=60)


def histogram(numbers: list[int]) -> Histogram:
    made = Histogram()
    for number in numbers:
        made.add(number)
    return made


@given(values, st.floats(0, 1))
def test_a_quantile_is_right_within_a_bucket(numbers: list[int], q: float) -> None:
    exact = sorted(numbers)[max(0, math.ceil(q * len(numbers)) - 1)]
    found = histogram(numbers).quantile(q)
    assert found is not None
    assert abs(found - exact) <= exact / 32 + 0.5


@given(st.integers(0, 2**62))
def test_small_numbers_are_exact_and_large_ones_within_a_32nd(number: int) -> None:
    found = histogram([number]).quantile(0.5)
    assert found is not None
    assert found == number if number < 32 else abs(found - number) <= number / 32


@given(values, values)
def test_merging_and_the_wire_keep_all_counts(a: list[int], b: list[int]) -> None:
    both = histogram(a)
    both.merge(Histogram.from_sparse(histogram(b).sparse()))
    assert both.counts == histogram(a + b).counts
    assert both.total == len(a) + len(b)


def test_nothing_counted_has_no_quantile_and_negatives_count_as_nothing() -> None:
    assert Histogram().quantile(0.5) is None
    assert histogram([-5]).quantile(0.5) == 0


def test_times_counts_so_often() -> None:
    made = Histogram()
    made.add(3, 99)
    made.add(30)
    assert made.total == 100
    assert made.quantile(0.5) == made.quantile(0.99) == 3
    assert made.quantile(1) == 30


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 5)), min_size=1, max_size=60))
def test_recent_is_a_period_to_two_and_all_is_all(steps: list[tuple[int, int]]) -> None:
    period = 100
    recent = RecentHistogram(period)
    now = 1
    seen: list[tuple[int, int]] = []
    for gap, times in steps:
        now += gap
        recent.add(len(seen) % 16, times, now)
        seen += [(now, len(seen) % 16)] * times
        counted = recent.recent()
        assert counted.total >= sum(1 for when, _ in seen if when > now - period), "the last period is there"
        assert counted.total <= sum(1 for when, _ in seen if when >= now - 2 * period), "nothing older than two"
    assert recent.whole().total == len(seen)


def test_the_least_ages_are_those_of_a_period_to_two() -> None:
    ages = LeastAges(100)
    assert ages.recent(1_000) is None, "nothing was processed yet"
    ages.taken, ages.done = 5, 7
    assert ages.recent(1_050) == (5, 7)
    assert ages.recent(1_110) == (5, 7), "a new period begins"
    ages.taken, ages.done = 8, 6
    assert ages.recent(1_200) == (5, 6), "of both periods"
    assert ages.recent(1_220) == (5, 6)
    assert ages.recent(1_250) == (8, 6), "only of the period before"
    assert ages.recent(1_330) == (8, 6)
    assert ages.recent(1_340) is None, "nothing was processed lately"


def test_copies_do_not_change_with_the_original() -> None:
    recent = RecentHistogram(100)
    recent.add(1, 1, 1)
    copy = recent.recent()
    recent.add(1, 1, 2)
    assert copy.total == 1
