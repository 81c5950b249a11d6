"""Reports of several workers come back into each worker's order, however Ray delivers them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.host.decide.resequencer import Resequencer

MESSAGES = [(sender, number) for sender in range(3) for number in range(5)]


@given(st.permutations(MESSAGES))
def test_any_order_of_arrival_gives_each_sender_s_order(arrivals: list[tuple[int, int]]) -> None:
    order: Resequencer[int, Any] = Resequencer()
    out = [item for sender, number in arrivals for item in order.take(sender, number, (sender, number))]
    for sender in range(3):
        assert [number for who, number in out if who == sender] == list(range(5))
    assert len(out) == len(MESSAGES)
