"""What hops cost, put together from what workers have measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.placement.hop_costs import (
    CORE_BYTES_PER_S_LEAST,
    CORE_BYTES_PER_S_MOST,
    NODE_COST_LEAST,
    NODE_COST_MOST,
    HopCosts,
)
from penstock.runtime.transport.hop_meter import EVERY, HopMeter, Row, Step

KIB = 1024


def step(name: Step, ns: float, size: int = 8 * KIB, messages: int = 100) -> Row:
    """So many messages of this size, at so many ns a byte."""
    return name, size.bit_length(), messages, messages * size, messages * size * ns


def rows(near: float = 0.5, far: float = 2.0) -> list[Row]:
    return [
        step("encode", 3.0),
        step("send near", near),
        step("send far", far),
        step("receive near", near),
        step("receive far", far),
        step("decode", 1.0),
    ]


def test_each_kind_of_hop_is_the_sum_of_its_steps() -> None:
    assert HopCosts.of([rows()[:3], rows()[3:]]) == HopCosts(3.0, 5.0, 8.0)
    found = HopCosts.of([rows()])
    assert found is not None
    assert found.node_cost == 2.5, "5 ns a byte more than inside a worker, beside 2"


def test_messages_of_like_size_are_compared() -> None:
    """What goes to other nodes are small messages here, which cost more for each byte in any case."""
    small = [
        step("send near", 4.0, 2 * KIB, 20),
        step("send far", 6.0, 2 * KIB, 2_000),
        step("send near", 0.01, 512 * KIB, 500),
    ]
    sends = [row for row in rows() if row[0] not in ("send near", "send far")]
    found = HopCosts.of([sends + small])
    assert found is not None
    assert found.network - found.node == pytest.approx(6.0 - 4.0 + 2.0 - 0.5)


def test_signals_say_nothing_of_records() -> None:
    signals = [step("send near", 100.0, 60, 10_000), step("send far", 900.0, 60, 10_000)]
    assert HopCosts.of([rows() + signals]) == HopCosts.of([rows()])


def test_work_of_the_network_without_messages_is_divided_among_them() -> None:
    alone: Row = ("receive far", 0, 0.0, 0.0, 2 * 100 * 8 * KIB * 1.0)
    found = HopCosts.of([[*rows(), alone]])
    assert found is not None
    assert found.network == pytest.approx(3.0 + 1.0 + 4.0 * 1.5)


@pytest.mark.parametrize("missing", ["encode", "send near", "send far", "receive near", "receive far", "decode"])
def test_too_little_was_measured(missing: str) -> None:
    some = [row for row in rows() if row[0] != missing]
    assert HopCosts.of([some]) is None
    few = [(*row[:2], 3.0, row[3], row[4]) if row[0] == missing else row for row in rows()]
    assert HopCosts.of([few]) is None
    assert HopCosts.of([]) is None


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_no_measurement_leaves_the_limits(near: float, far: float) -> None:
    found = HopCosts.of([rows(near, far)])
    assert found is not None
    assert NODE_COST_LEAST <= found.node_cost <= NODE_COST_MOST
    assert CORE_BYTES_PER_S_LEAST <= found.core_bytes_per_s <= CORE_BYTES_PER_S_MOST


def test_one_in_some_is_measured_and_the_latest_count_most() -> None:
    now = [0]
    meter = HopMeter(lambda: now[0])
    assert [meter.due("send near") for _ in range(2 * EVERY)].count(True) == 2
    assert not meter.due("receive"), "each kind has its own turn"
    for ns in (10, 1_000):
        for _ in range(10_000):
            begun = now[0]
            now[0] += ns
            meter.note("send near", 1, 10, begun)
    ((name, digits, messages, size, total),) = meter.report()
    assert (name, digits) == ("send near", 4)
    assert size == 10 * messages <= 10 * 5_000
    assert total / messages > 700
