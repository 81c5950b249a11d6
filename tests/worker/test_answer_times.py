"""What micro-batches cost that are under way at the same time."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.worker.answer_times import TOGETHER_MAX, AnswerTimes

FIXED_S, RATE = 0.25, 12_000.0
S = 1_000_000_000


def one_after_the_other(batches: list[tuple[float, int]]) -> list[tuple[int, float, float | None]]:
    """What is measured of micro-batches (when it leaves, records) in a Spark that takes one after the other."""
    times, found = AnswerTimes(), []
    under_way: deque[tuple[float, float, int]] = deque()

    def answer() -> None:
        done, left, records = under_way.popleft()
        cost = times.answered(round(done * S), records, round(left * S), done - left)
        if cost is not None:
            found.append(cost)

    free_at = 0.0
    for left, records in sorted(batches):
        while under_way and under_way[0][0] <= left:
            answer()
        times.submitted(round(left * S))
        free_at = max(free_at, left) + FIXED_S + records / RATE
        under_way.append((free_at, left, records))
    while under_way:
        answer()
    return found


def test_a_small_micro_batch_does_not_cost_what_the_large_one_before_it_does() -> None:
    """The first ones of a burst: what waited, and what came while Spark worked on it."""
    ((records, seconds, of_spark),) = one_after_the_other([(0.0, 15_000), (0.5, 3_000)])
    assert records == 9_000
    assert seconds == pytest.approx(FIXED_S + 9_000 / RATE)
    assert of_spark == pytest.approx(seconds), "it was on no way"


def test_micro_batches_that_are_alone_are_measured_alone() -> None:
    found = one_after_the_other([(0.0, 12_000), (2.0, 3_000)])
    assert [records for records, *_ in found] == [12_000, 3_000]
    assert [seconds for _, seconds, _ in found] == pytest.approx([1.25, 0.5])


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 40_000)), min_size=1, max_size=30))
def test_all_costs_are_those_of_spark(batches: list[tuple[float, int]]) -> None:
    found = one_after_the_other(batches)
    assert found
    for records, seconds, _ in found:
        assert seconds == pytest.approx(FIXED_S + records / RATE, abs=1e-4), "but for the rounding of the records"


def test_a_long_queue_is_measured_while_it_lasts() -> None:
    found = one_after_the_other([(0.0, 6_000) for _ in range(2 * TOGETHER_MAX)])
    assert found == [pytest.approx((6_000, 0.75, 0.75))] * 2


def test_the_first_one_is_measured_apart() -> None:
    times = AnswerTimes()
    times.submitted(0)
    times.submitted(1 * S)
    assert times.answered(5 * S, 100, 0, 4.0, alone=True) == (100, 5.0, 4.0)
    assert times.answered(6 * S, 200, 1 * S, None) == (200, 1.0, None)
