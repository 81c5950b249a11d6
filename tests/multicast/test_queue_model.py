"""The root's queue as M/D/1: worked cases of the paper's Eq. 1 to 5, and what must hold between them."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.multicast.queue_model import Cost, affordable_limit, greatest_load
from penstock.runtime.multicast.reach import binomial_degree
from tests.multicast.queue_theory import affordable_rate, expected_queue, service_rate

US = 1e-6
MOST = 100


def test_service_rate_and_expected_queue() -> None:
    """Eq. 1 and 2."""
    first, second = service_rate(4, Cost(10 * US)), service_rate(3, Cost(5.2 * US))
    assert first == pytest.approx(25_000)
    assert second == pytest.approx(64_103, abs=1)
    assert expected_queue(20_000, first) == pytest.approx(2.4)
    assert expected_queue(60_000, second) == pytest.approx(7.7805, abs=1e-4)
    assert expected_queue(first, first) == math.inf
    assert expected_queue(0, first) == 0


@pytest.mark.parametrize(
    ("rate", "cost", "capacity", "exact", "limit"),
    [
        (24_000, Cost(20 * US), 1, 1.2204, 1),
        (80_000, Cost(5.2 * US), 1024, 2.4027, 2),
        (10_000, Cost(20 * US, 30 * US), 10, 3.25, 3),
        (50_000, Cost(5.2 * US, 4 * US), 1024, 3.075, 3),
        (200_000, Cost(5.2 * US), 1024, 0.961, 1),
    ],
)
def test_the_affordable_limit(rate: float, cost: Cost, capacity: float, exact: float, limit: int) -> None:
    """Eq. 3, with the sign that Eq. 5 has: as printed, the second case would allow 4,925 children."""
    found = affordable_limit(rate, cost, capacity, MOST)
    assert found.exact == pytest.approx(exact, rel=1e-3)
    assert found.limit == limit
    assert found.overloaded == (exact < 1)


def test_the_queue_is_part_of_the_answer() -> None:
    """1 / (lambda t_e) alone would give 2 children, with a queue of 12.48 where 1 is the most."""
    assert math.floor(1 / (24_000 * 20 * US)) == 2
    assert expected_queue(24_000, service_rate(2, Cost(20 * US))) == pytest.approx(12.48)
    # Without the time of encoding there would be room for a fourth child.
    assert affordable_limit(10_000, Cost(20 * US), 10, MOST).limit == 4


def test_the_affordable_rate() -> None:
    """Eq. 4 and 5."""
    assert affordable_rate(2, Cost(5.2 * US), 1024) == pytest.approx(96_107, abs=1)
    assert affordable_rate(3, Cost(5.2 * US), 1024) == pytest.approx(64_071, abs=1)


def test_a_non_blocking_tree_affords_more_than_a_binomial_one() -> None:
    """Theorem 1: the rate is inversely proportional to the root's children, 9 of them for 480 destinations."""
    cost = Cost(5.2 * US)
    ratio = affordable_rate(3, cost, 1024) / affordable_rate(binomial_degree(480), cost, 1024)
    assert ratio == pytest.approx(9 / 3)


@pytest.mark.parametrize("capacity", [0.5, 1, 10, 1024, 1e6])
def test_both_forms_of_the_greatest_load_agree(capacity: float) -> None:
    assert greatest_load(capacity) == pytest.approx(capacity + 1 - math.sqrt(capacity**2 + 1), rel=1e-6)


def test_a_very_long_queue_allows_a_load_of_1() -> None:
    """The form with the difference gives 0 here."""
    assert 1e16 + 1 - math.sqrt(1e16**2 + 1) == 0
    assert greatest_load(1e16) == pytest.approx(1)
    assert greatest_load(1e200) == pytest.approx(1)


def test_an_idle_root_can_afford_the_most() -> None:
    found = affordable_limit(0, Cost(5.2 * US), 1024, 9)
    assert found.limit == 9
    assert not found.overloaded


COSTS = st.builds(Cost, st.floats(1e-7, 1e-3), st.one_of(st.just(0.0), st.floats(0, 1e-3)))


@given(cost=COSTS, capacity=st.floats(1, 1e6), children=st.integers(1, 50))
def test_limit_and_rate_are_inverse(cost: Cost, capacity: float, children: int) -> None:
    """What is exactly affordable is afforded, and the expected queue is the capacity then."""
    rate = affordable_rate(children, cost, capacity)
    assert affordable_limit(rate, cost, capacity, MOST).limit == children
    assert affordable_limit(rate * 1.001, cost, capacity, MOST).exact < children
    assert expected_queue(rate * (1 - 1e-9), service_rate(children, cost)) <= capacity * (1 + 1e-2)


@given(cost=COSTS, capacity=st.floats(1, 1e5), rate=st.floats(1, 1e6))
def test_the_expected_queue_fits_exactly_up_to_the_limit(cost: Cost, capacity: float, rate: float) -> None:
    found = affordable_limit(rate, cost, capacity, MOST)
    if not found.overloaded:
        assert expected_queue(rate, service_rate(found.limit, cost)) <= capacity * (1 + 1e-3)
    if found.limit < MOST:
        assert expected_queue(rate, service_rate(found.limit + 1, cost)) > capacity * (1 - 1e-3)


def test_the_model_describes_a_queue() -> None:
    """Random arrivals and a fixed time of service, by Lindley's recurrence: the time average is that of Eq. 2."""
    chance = random.Random(1)
    service_s, rate = 40 * US, 20_000.0  # a load of 0.8, as in the case above
    wait_s = total_s = 0.0
    arrivals = 300_000
    for _ in range(arrivals):
        total_s += wait_s + service_s
        wait_s = max(0.0, wait_s + service_s - chance.expovariate(rate))
    in_system = rate * total_s / arrivals  # Little's law
    assert in_system == pytest.approx(expected_queue(rate, 1 / service_s), rel=0.05)


def test_what_is_no_queue_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity 0"):
        greatest_load(0)
    with pytest.raises(ValueError, match="a copy must take"):
        Cost(0)
    with pytest.raises(ValueError, match="-1"):
        affordable_limit(-1, Cost(1), 1, 1)
    with pytest.raises(ValueError, match="1 or more"):
        affordable_limit(1, Cost(1), 1, 0)
