"""Theorems 4 and 5: how long a switch may take, and when it pays."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.multicast.queue_model import Cost
from penstock.runtime.multicast.switch_cost import longest_switch_s, multicast_rate, records_to_pay


def test_how_long_a_switch_may_take() -> None:
    """Theorem 4."""
    assert longest_switch_s(1024, 700, 60_000) == pytest.approx(5.4e-3)
    assert longest_switch_s(1024, 0, 80_000) == pytest.approx(12.8e-3)
    assert longest_switch_s(1024, 2000, 80_000) == 0
    assert longest_switch_s(1024, 0, 0) == math.inf


def test_when_a_switch_pays() -> None:
    """Theorem 5."""
    assert records_to_pay(100_000, 120_000, 0.020) == pytest.approx(12_000)
    assert records_to_pay(50_000, 100_000, 0.126) == pytest.approx(12_600)
    assert records_to_pay(100_000, 100_000, 0.020) == math.inf
    assert records_to_pay(100_000, 90_000, 0.020) == math.inf


@given(before=st.floats(1, 1e5), more=st.floats(1.01, 10), switch_s=st.floats(1e-4, 1))
def test_that_many_records_take_the_same_time_with_and_without_a_switch(
    before: float, more: float, switch_s: float
) -> None:
    after = before * more
    records = records_to_pay(before, after, switch_s)
    assert records / before == pytest.approx(records / after + switch_s)


def test_the_multicast_rate_is_that_of_the_last_layer() -> None:
    """Seven destinations: four units with a limit of 2, three with 3."""
    cost = Cost(5e-6, 4e-6)
    assert multicast_rate(7, 2, cost) == pytest.approx(1 / 24e-6)
    assert multicast_rate(7, 3, cost) == pytest.approx(1 / 19e-6)
