"""How long hops take, put together from what workers have noted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.placement.hop_latencies import HOP_S_MOST, HopLatencies, told_latencies
from penstock.runtime.transport.hop_times import HopTimes, TimesReport

MS = 1_000_000


def reports(
    ways: dict[tuple[int, int], list[int]], inside: list[int] | None = None, workers: int = 4
) -> list[TimesReport]:
    """Reports of workers in which the messages of each way (from worker to worker) took so many ns."""
    found = [TimesReport(worker, [], [], inside or []) for worker in range(workers)]
    for (one, other), took in ways.items():
        channel = 10 * one + other
        for number, ns in enumerate(took):
            found[one].sent.append((channel, 1, 16 * number, 1_000 * number))
            found[other].came.append((channel, 1, 16 * number, 1_000 * number + ns))
    return found


def test_each_kind_of_hop_has_its_own_latency() -> None:
    ways = {(0, 1): [MS] * 20, (0, 2): [3 * MS] * 20, (2, 0): [5 * MS] * 20}
    found = HopLatencies.of(reports(ways, inside=[2_000] * 20), [0, 0, 1, 1])
    assert found == HopLatencies(2e-6, 1e-3, 4e-3)
    assert told_latencies(found) == pytest.approx({"worker": 2.0, "node": 1_000.0, "network": 4_000.0})


def test_clocks_that_are_apart_change_nothing_when_records_go_both_ways() -> None:
    """The clock of node 1 is 50 ms ahead of what is known, so that some messages came before they were sent."""
    ways = {(0, 2): [51 * MS] * 20, (2, 0): [-49 * MS] * 20}
    assert HopLatencies.of(reports(ways), [0, 0, 1, 1]).network == pytest.approx(1e-3)
    one_way = {(2, 0): [-49 * MS] * 20}
    assert HopLatencies.of(reports(one_way), [0, 0, 1, 1]).network == 0


def test_messages_that_had_to_wait_for_a_busy_receiver_count_little() -> None:
    took = [MS, 40 * MS, 2 * MS, 60 * MS, MS, MS, 90 * MS, 80 * MS] * 5
    assert HopLatencies.of(reports({(0, 1): took}), [0, 0, 1, 1]).node == pytest.approx(1e-3)


def test_a_message_that_one_end_alone_has_noted_does_not_count() -> None:
    said = reports({(0, 1): [MS] * 20})
    other_generation = [(channel, 2, number, at_ns) for channel, _, number, at_ns in said[0].sent]
    said[0] = said[0]._replace(sent=other_generation)
    assert HopLatencies.of(said, [0, 0, 1, 1]) == HopLatencies()
    assert HopLatencies.of(reports({(0, 1): [MS] * 5}), [0, 0, 1, 1]).node is None, "too few"


def test_workers_that_no_node_has_do_not_count() -> None:
    """The job has fewer workers now than when they were asked."""
    assert HopLatencies.of(reports({(0, 3): [MS] * 20}), [0, 0, 1]) == HopLatencies()


def test_what_was_measured_before_stays_until_it_is_measured_anew() -> None:
    before = HopLatencies(1e-6, 2e-3, 3e-3)
    assert HopLatencies(node=1e-3).or_else(before) == HopLatencies(1e-6, 1e-3, 3e-3)
    assert HopLatencies(worker=0.0).or_else(before).worker == 0


@given(st.lists(st.integers(-(10**12), 10**12), min_size=10))
def test_no_measurement_leaves_the_limits(took: list[int]) -> None:
    found = HopLatencies.of(reports({(0, 1): took, (0, 2): took, (3, 1): took}), [0, 0, 1, 1])
    assert found.node is not None
    assert found.network is not None
    assert 0 <= found.node <= HOP_S_MOST
    assert 0 <= found.network <= HOP_S_MOST


def test_the_latest_messages_are_kept() -> None:
    now = [0]
    times = HopTimes(lambda: now[0])
    for number in range(2_000):
        times.sent(7, 1, number, number)
        now[0] = 10 * number
        times.came(8, 1, number, 5)
        times.inside(10 * number - 3)
    report = times.report(2)
    assert report.worker == 2
    assert report.sent[-1] == (7, 1, 1_999, 1_999)
    assert report.came[-1] == (8, 1, 1_999, 19_995)
    assert len(report.sent) == len(report.came) == len(report.inside_ns) == 512
    assert set(report.inside_ns) == {3}
