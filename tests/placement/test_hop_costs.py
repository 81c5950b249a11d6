"""What hops cost, put together from what workers have measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.placement.hop_costs import (
    CORE_BYTES_PER_S,
    CORE_BYTES_PER_S_LEAST,
    CORE_BYTES_PER_S_MOST,
    MESSAGE_BYTES,
    MESSAGE_BYTES_MOST,
    NODE_COST,
    NODE_COST_LEAST,
    NODE_COST_MOST,
    HopCost,
    HopCosts,
    Volume,
)
from penstock.runtime.transport.hop_meter import EVERY, HopMeter, Row, Step

KIB = 1024
#: A job that sends messages of 1 KiB.
SENDS = Volume(1_000.0, 1_000.0 * KIB, 2_000.0 * KIB)


def step(name: Step, byte_ns: float, message_ns: float = 0.0, sizes: tuple[int, ...] = (256, 8 * KIB)) -> list[Row]:
    """A hundred messages of each size, at so many ns a byte and a message."""
    return [(name, size.bit_length(), 100.0, 100.0 * size, 100.0 * (message_ns + size * byte_ns)) for size in sizes]


def rows(near: float = 0.5, far: float = 2.0, near_message: float = 500.0, far_message: float = 4_000.0) -> list[Row]:
    return [
        *step("encode", 3.0, 1_000.0),
        *step("send near", near, near_message),
        *step("send far", far, far_message),
        *step("receive near", near, near_message),
        *step("receive far", far, far_message),
        *step("decode", 1.0, 700.0),
    ]


def test_each_kind_of_hop_is_the_sum_of_its_steps() -> None:
    """What a message costs is told from what its bytes cost, by the sizes of messages."""
    found = HopCosts.of([rows()[:5], rows()[5:]])
    assert found is not None
    assert found.node is not None
    assert found.network is not None
    kinds = (found.worker, found.node, found.network)
    assert [kind.message_ns for kind in kinds] == pytest.approx([1_000, 2_700, 9_700])
    assert [kind.byte_ns for kind in kinds] == pytest.approx([3.0, 5.0, 8.0])


def test_what_a_hop_costs_depends_on_how_many_messages_there_are() -> None:
    found = HopCosts.of([rows()])
    assert found is not None
    assert found.message_bytes == pytest.approx(1_700 / 2), "1700 ns more than inside a worker, at 2 ns a byte"
    assert found.node_cost(SENDS) == pytest.approx((8_700 + 5 * KIB) / (1_700 + 2 * KIB))
    large = Volume(1.0, 1e9, 1e9)
    assert found.node_cost(large) == pytest.approx(2.5, rel=1e-3)
    small = Volume(1e6, 1.0, 1e6)
    assert found.node_cost(small) == pytest.approx(8_700 / 1_700, rel=1e-3)
    assert found.core_bytes_per_s(SENDS) == pytest.approx(2 * KIB / (1_700 + 2 * KIB) * 1e9)
    assert found.node_cost(Volume(0.0, 0.0, 0.0)) > 1, "a job that sends nothing now"


def test_messages_of_one_size_divide_by_what_is_assumed() -> None:
    same = (4 * KIB, 5 * KIB)
    steps: list[Step] = ["encode", "send near", "receive near", "decode"]
    found = HopCosts.of([[row for name in steps for row in step(name, 1.0, sizes=same)]])
    assert found is not None
    assert found.message_bytes == pytest.approx(MESSAGE_BYTES)
    assert found.node is not None
    assert found.node.ns(200, 100 * sum(same)) == pytest.approx(4 * 100 * sum(same)), "the sum is as measured"


def test_a_size_of_which_few_messages_came_says_nothing() -> None:
    odd: list[Row] = [("send near", 20, 3.0, 3e6, 3e12)]
    assert HopCosts.of([rows() + odd]) == HopCosts.of([rows()])


def test_work_of_the_network_without_messages_is_divided_among_them() -> None:
    far = [row for row in rows() if row[0].endswith("far")]
    alone: Row = ("receive far", 0, 0.0, 0.0, sum(row[4] for row in far) / 2)
    found, without = HopCosts.of([[*rows(), alone]]), HopCosts.of([rows()])
    assert found is not None
    assert without is not None
    assert found.network is not None
    assert found.network.byte_ns == pytest.approx(3.0 + 1.0 + 4.0 * 1.5)
    assert found.network.message_ns == pytest.approx(1_700 + 8_000 * 1.5)


def test_a_job_on_one_node_measures_its_hops_too() -> None:
    found = HopCosts.of([[row for row in rows() if not row[0].endswith("far")]])
    assert found is not None
    assert found.network is None
    assert found.message_bytes == pytest.approx(850)
    assert found.node_cost(SENDS) == NODE_COST, "until it is measured"
    assert found.core_bytes_per_s(SENDS) != CORE_BYTES_PER_S


def test_a_job_with_one_worker_a_node_measures_its_hops_too() -> None:
    found = HopCosts.of([[row for row in rows() if not row[0].endswith("near")]])
    assert found is not None
    assert found.node is None
    assert found.message_bytes == pytest.approx(8_700 / 5)
    assert found.node_cost(SENDS) == NODE_COST
    assert found.core_bytes_per_s(SENDS) == pytest.approx(NODE_COST * 2 * KIB / (8_700 + 5 * KIB) * 1e9)


@pytest.mark.parametrize("missing", [["encode"], ["decode"], ["send near", "send far"], ["receive near", "send far"]])
def test_too_little_was_measured(missing: list[Step]) -> None:
    some = [row for row in rows() if row[0] not in missing]
    assert HopCosts.of([some]) is None
    few = [(*row[:2], 3.0, row[3], row[4]) if row[0] in missing else row for row in rows()]
    assert HopCosts.of([few]) is None
    assert HopCosts.of([]) is None


figures = st.floats(0, 1e6)


@given(figures, figures, figures, figures)
def test_no_measurement_leaves_the_limits(near: float, far: float, near_message: float, far_message: float) -> None:
    found = HopCosts.of([rows(near, far, near_message, far_message)])
    assert found is not None
    assert NODE_COST_LEAST <= found.node_cost(SENDS) <= NODE_COST_MOST
    assert CORE_BYTES_PER_S_LEAST <= found.core_bytes_per_s(SENDS) <= CORE_BYTES_PER_S_MOST
    assert 0 <= found.message_bytes <= MESSAGE_BYTES_MOST


@given(st.lists(st.tuples(st.integers(6, 20), st.integers(10, 1_000), st.floats(0, 1e7)), min_size=1))
def test_no_part_of_the_cost_is_below_0(measured: list[tuple[int, int, float]]) -> None:
    steps: list[Step] = ["encode", "send near", "receive near", "decode"]
    found = HopCosts.of(
        [[(name, digits, n, n * 2.0 ** (digits - 1), n * ns) for name in steps for digits, n, ns in measured]]
    )
    assert found is not None
    assert min(found.worker.message_ns, found.worker.byte_ns) >= 0
    assert HopCost(1.0, 2.0) + HopCost(2.0, 3.0) - HopCost(3.0, 5.0) == HopCost()


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
