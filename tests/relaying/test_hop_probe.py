"""How long a hop takes is measured on the longest way of a tree."""

from __future__ import annotations

import pytest

from penstock.runtime.multicast.building import non_blocking, sequential
from penstock.runtime.relaying.hop_probe import HopProbe

MS = 1_000_000


def test_a_hop_of_a_chain_is_what_lies_between_its_first_and_its_last_relay() -> None:
    probe = HopProbe()
    probe.follow(non_blocking(0, range(1, 6), 1), 7, 0)
    first, *_, last = range(1, 6)
    assert not probe.free
    assert probe.has(first, 7, 1 * MS) is None, "it lacks the entry"
    assert probe.has(first, 8, 2 * MS) is None
    assert probe.has(3, 8, 3 * MS) is None
    assert probe.has(first, 9, 5 * MS) is None, "a later word of the first relay does not count"
    assert probe.has(last, 8, 10 * MS) == pytest.approx(0.002)
    assert probe.free
    assert probe.has(last, 9, 20 * MS) is None


def test_where_all_are_children_of_the_root_the_hop_is_that_from_the_root() -> None:
    probe = HopProbe()
    probe.follow(sequential(0, [1, 2]), 3, 5 * MS)
    found = [probe.has(relay, 4, 7 * MS) for relay in (1, 2)]
    assert [one for one in found if one is not None] == [pytest.approx(0.002)]


def test_nothing_is_measured_while_the_tree_changes() -> None:
    probe = HopProbe()
    tree = non_blocking(0, range(1, 4), 1)
    probe.follow(tree, 1, 0)
    probe.has(1, 2, MS)
    probe.forget()
    assert probe.has(3, 2, 2 * MS) is None
    probe.follow(tree, 5, 10 * MS)
    assert probe.has(3, 6, 11 * MS) is None, "the first relay has not said yet that it has the entry"
    assert probe.free, "what the last one says later says nothing of hops"
