"""How many entries a second the thread, the link and the credit windows of a root let through."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.multicast.queue_model import Cost, affordable_limit
from penstock.runtime.multicast.reach import binomial_degree, units_to_reach
from penstock.runtime.multicast.servers import Servers

COST = Cost(20e-6, 10e-6, 50e-6)
Q = 64.0


def test_other_work_of_the_thread_is_part_of_the_time_of_an_entry() -> None:
    assert COST.record_s(2) == pytest.approx(100e-6)
    assert Servers(COST).rate(2, 29) == pytest.approx(10_000)
    assert affordable_limit(9_000, COST, 1e9, 5).limit == 2
    assert affordable_limit(9_000, Cost(20e-6, 10e-6), 1e9, 5).limit == 5, "what the paper's model says"


def test_a_thread_that_must_share_its_processor_carries_less() -> None:
    half = Servers(COST, pace=0.5)
    assert half.rate(2, 29) == pytest.approx(5_000)
    assert half.affordable(4_500, 1e9, 5).limit == 2


def test_the_link_and_the_thread_do_not_wait_for_each_other() -> None:
    servers = Servers(Cost(20e-6, 0.0, 500e-6), link_s=1.3e-3)
    assert servers.rate(1, 7) == pytest.approx(1 / 1.3e-3)
    assert servers.rate(3, 7) == pytest.approx(1 / 3.9e-3)
    assert servers.affordable(500, 1e9, 3).limit == 1
    assert servers.affordable(200, 1e9, 3).limit == 3


def test_a_long_chain_has_fewer_windows_than_hops() -> None:
    """64 hops of 0.2 ms take 12.8 ms, in which 16 windows of 9 entries may be under way."""
    servers = Servers(COST, window=9.0, windows_most=16, hop_s=0.2e-3)
    chain = 16 * 9 / 12.8e-3
    assert 0.8 * chain < servers.by_windows(1, 64) < 0.9 * chain
    hops = units_to_reach(64, 7)
    assert servers.by_windows(7, 64) > 9 / 0.2e-3 * 0.8, f"a way of {hops} hops has a window for each"
    assert Servers(COST).by_windows(1, 64) == math.inf, "nothing is known of hops"


def test_the_widest_tree_is_neither_always_a_chain_nor_long_for_little() -> None:
    quick = Cost(20e-6)
    chain_is_slow = Servers(quick, window=9.0, windows_most=16, hop_s=0.3e-3)
    assert chain_is_slow.rate(1, 64) < chain_is_slow.rate(2, 64)
    assert chain_is_slow.widest(range(1, 8), 64, 0.03) == 2
    assert Servers(quick).widest(range(1, 8), 64, 0.03) == 1
    assert Servers(Cost(20e-6, 0.0, 10e-3)).widest(range(1, 8), 64, 0.03) == 7, "3 % are no reason for a chain"
    assert Servers(quick).widest([2, 3], 64, 0.03) == 2


@given(
    copy_s=st.floats(1e-6, 1e-3),
    other_s=st.floats(0, 1e-2),
    hop_s=st.floats(0, 1e-2),
    link_s=st.floats(0, 1e-2),
    destinations=st.integers(2, 200),
)
def test_the_widest_tree_carries_what_the_best_one_does(
    copy_s: float, other_s: float, hop_s: float, link_s: float, destinations: int
) -> None:
    servers = Servers(Cost(copy_s, 0.0, other_s), 1.0, link_s, 9.0, 16, hop_s)
    limits = range(1, binomial_degree(destinations) + 1)
    best = max(servers.rate(limit, destinations) for limit in limits)
    widest = servers.widest(limits, destinations, 0.03)
    assert servers.rate(widest, destinations) >= 0.97 * best
    assert all(servers.rate(limit, destinations) < 0.97 * best for limit in limits if limit > widest)
