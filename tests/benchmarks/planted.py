"""Faults of the model of multicast that somebody might write in good faith (tests/planting.py)."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np

from benchmarks import multicast_simulation
from benchmarks.multicast_simulation import Multicast, Network, Root
from tests.planting import Test, planted_fault

MODEL = "benchmarks/multicast_simulation.py"
TESTS = "tests/benchmarks/test_multicast_model.py"


@planted_fault(MODEL, Test(f"{TESTS}::test_blocks_are_as_events_one_by_one"))
def _a_block_begins_with_idle_threads() -> Any:
    """The first entry of a block does not wait for the last one of the block before."""
    starts = multicast_simulation.starts
    return mock.patch.object(multicast_simulation, "starts", lambda ready, service, free: starts(ready, service, 0.0))


@planted_fault(MODEL, Test(f"{TESTS}::test_blocks_are_as_events_one_by_one"))
def _a_relay_sends_to_all_children_at_once() -> Any:
    """A relay needs no time for its copies."""
    return mock.patch.object(Network, "_relay", lambda self, node, received, service_s: received)


@planted_fault(MODEL, Test(f"{TESTS}::test_the_root_s_queue_is_that_of_eq_2"))
def _records_come_at_equal_distances() -> Any:
    """The source has no chance in it, so that hardly a record ever waits."""
    chance = mock.Mock()
    chance.exponential = lambda mean, number: np.full(number, mean)
    return mock.patch.object(np.random, "default_rng", return_value=chance)


@planted_fault(MODEL, Test(f"{TESTS}::test_a_switch_that_stops_the_root_makes_the_source_wait_as_theorem_4_says"))
def _the_queue_takes_everything() -> Any:
    """The source never waits for room in the queue."""
    init = Root.__init__

    def endless(self: Any, capacity: int) -> None:
        init(self, 1_000_000)

    return mock.patch.object(Root, "__init__", endless)


@planted_fault(MODEL, Test(f"{TESTS}::test_a_switch_stops_nobody_while_nodes_connect"))
def _control_messages_take_the_root_no_time() -> Any:
    """The root sends and handles the messages of a switch beside its records."""
    return mock.patch.object(Root, "busy", lambda self, at_s, seconds: at_s)


@planted_fault(MODEL, Test(f"{TESTS}::test_the_tree_follows_the_rate_steps_of_the_paper"))
def _a_switch_changes_the_limit_alone() -> Any:
    """The announcement comes, and the records take the old tree for ever."""
    announce = Multicast._announce

    def forgetful(self: Any, now_s: float) -> None:
        before = self.tree
        announce(self, now_s)
        self.tree = before

    return mock.patch.object(Multicast, "_announce", forgetful)
