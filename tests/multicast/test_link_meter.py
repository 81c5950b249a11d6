"""What the meter of a root's links finds, over simulated links in virtual time."""

from __future__ import annotations

import random
from collections import deque
from heapq import heappop, heappush

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.multicast.link_meter import LinkMeter

COPY_S = 16 * 1024 * 8 / 100e6  # 16 KiB at 100 Mbit/s
WINDOW = 64  # copies that may be without a receipt


def measured(
    load: float, delay_s: float, children: int, *, jitter_s: float = 0.0, records: int = 1_500, told: bool = True
) -> LinkMeter:
    """Records come at random times and go to all children over one link, whose receipts come after the delay, and up
    to the jitter later. `told`: the meter knows the round trips of small messages."""
    chance = random.Random(5)
    meter = LinkMeter()
    if told:
        for child in range(children):
            meter.round_trip(child, delay_s, 0.0)
    receipts: list[tuple[float, int]] = []
    free_s = due_s = sent_s = 0.0
    last_s = dict.fromkeys(range(children), 0.0)
    under_way = 0
    for _ in range(records):
        due_s += chance.expovariate(load / (children * COPY_S))
        for child in range(children):
            now_s = sent_s = max(due_s, sent_s)
            while receipts and (receipts[0][0] <= now_s or under_way >= WINDOW):
                came_s, from_child = heappop(receipts)
                now_s = sent_s = max(now_s, came_s)
                under_way -= 1
                meter.received(from_child, 1, came_s)
            meter.sent(child, 1, now_s)
            under_way += 1
            free_s = max(free_s, now_s) + COPY_S
            last_s[child] = max(last_s[child], free_s + delay_s + chance.uniform(0, jitter_s))
            heappush(receipts, (last_s[child], child))
    while receipts:
        came_s, from_child = heappop(receipts)
        meter.received(from_child, 1, came_s)
    assert meter.copies == records * children
    return meter


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.01])
@pytest.mark.parametrize("load", [0.05, 0.3, 0.8, 2.0])
@pytest.mark.parametrize("children", [1, 2, 5])
@pytest.mark.parametrize("jitter_s", [0.0, 0.0002])
def test_a_copy_costs_what_the_link_takes_at_every_load_and_delay(
    delay_s: float, load: float, children: int, jitter_s: float
) -> None:
    meter = measured(load, delay_s, children, jitter_s=jitter_s)
    assert meter.copy_s == pytest.approx(COPY_S, rel=0.15)
    assert meter.busy_s / meter.copies == pytest.approx(COPY_S, rel=0.15)


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.01])
@pytest.mark.parametrize("load", [0.05, 0.3, 0.8, 2.0])
def test_copies_that_wait_for_each_other_tell_it_too(delay_s: float, load: float) -> None:
    meter = measured(load, delay_s, 1, told=False)
    assert meter.copy_s == pytest.approx(COPY_S, rel=0.15)
    assert meter.busy_s / meter.copies == pytest.approx(COPY_S, rel=0.15)


def test_a_link_that_gets_slower_is_noticed() -> None:
    meter = LinkMeter()
    now_s, receipts = 0.0, deque[float]()
    free_s = 0.0
    for number in range(2_000):
        if len(receipts) == WINDOW:
            now_s = receipts.popleft()
            meter.received(0, 1, now_s)
        meter.sent(0, 1, now_s)
        free_s = max(free_s, now_s) + (COPY_S if number < 1_000 else 4 * COPY_S)
        receipts.append(free_s + 0.001)
    assert meter.copy_s == pytest.approx(4 * COPY_S, rel=0.05)


def test_copies_that_never_wait_say_nothing() -> None:
    meter = LinkMeter()
    for second in range(10):
        meter.sent(0, 1, float(second))
        meter.received(0, 1, second + 0.5)
    assert meter.copies == 10
    assert meter.busy_s == 0
    assert meter.round_trip_s(0) == 0.5
    assert meter.round_trip_s(1) is None


def test_one_receipt_may_be_for_many_copies() -> None:
    meter = LinkMeter()
    meter.round_trip(0, 0.1, 0.0)
    meter.sent(0, 4, 1.0)
    meter.received(0, 2, 1.3)
    meter.received(0, 2, 1.5)
    meter.received(0, 7, 1.6)  # of copies that were never sent
    assert meter.copies == 4
    assert meter.busy_s == pytest.approx(0.4)


def test_a_child_without_receipts_holds_up_the_measurement_until_it_is_lost() -> None:
    meter = LinkMeter()
    meter.sent(0, 1, 0.0)
    meter.sent(1, 1, 0.0)
    meter.received(1, 1, 0.1)
    assert meter.copies == 0
    meter.lost(0)
    meter.lost(0)
    assert meter.copies == 1
    meter.received(0, 1, 0.2)
    assert meter.copies == 1
    assert meter.round_trip_s(0) is None


def test_a_round_trip_is_forgotten_when_the_route_has_changed() -> None:
    meter = LinkMeter(memory_s=10.0)
    for second in range(40):
        meter.sent(0, 1, float(second))
        meter.received(0, 1, second + (0.1 if second < 10 else 0.3))
        if second == 15:
            assert meter.round_trip_s(0) == pytest.approx(0.1)
    assert meter.round_trip_s(0) == pytest.approx(0.3)


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["sent", "received", "lost", "told"]), st.integers(0, 2), st.integers(1, 5), st.floats(0, 2)
        ),
        max_size=60,
    )
)
def test_figures_only_grow_and_no_copy_is_counted_twice(steps: list[tuple[str, int, int, float]]) -> None:
    meter = LinkMeter()
    now_s, sent = 0.0, 0
    before = (0, 0.0)
    for what, child, copies, wait_s in steps:
        now_s += wait_s
        if what == "sent":
            meter.sent(child, copies, now_s)
            sent += copies
        elif what == "received":
            meter.received(child, copies, now_s)
        elif what == "lost":
            meter.lost(child)
        else:
            meter.round_trip(child, wait_s, now_s)
        figures = (meter.copies, meter.busy_s)
        assert figures[0] >= before[0]
        assert figures[1] >= before[1]
        assert figures[0] <= sent
        before = figures
    for child in range(3):
        meter.lost(child)
    assert not meter._order
