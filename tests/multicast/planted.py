"""Faults of multicast trees that somebody might write in good faith (tests/planting.py)."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

from penstock.runtime.multicast import least_change, queue_model, self_adjustment
from penstock.runtime.multicast.relay_log import Connected, Cursor, RelayLog, RootLog
from penstock.runtime.multicast.tree_switch import Announcement, SwitchProgress
from tests.planting import Test, planted_fault

RELAY = "penstock/runtime/multicast/relay_log.py"
SWITCH = "penstock/runtime/multicast/tree_switch.py"
CLUSTERS = Test("tests/multicast/test_simulated.py::test_every_node_gets_every_entry_once_and_in_order")
LEAST = "penstock/runtime/multicast/least_change.py"


@planted_fault(RELAY, CLUSTERS)
def _a_parent_s_word_is_enough() -> Any:
    """A relay takes whatever its parent sends, whether or not it is the next number."""
    return mock.patch.object(RelayLog, "_is_next", lambda self, sender, number: sender == self.parent)


@planted_fault(RELAY, CLUSTERS)
def _former_children_are_forgotten_at_the_announcement() -> Any:
    """A relay drops the cursor of a former child when it has sent the announcement, without the child's receipt."""
    take_next = RelayLog._take_next

    def forgetful(self: Any, sender: int, entry: object) -> Any:
        actions = take_next(self, sender, entry)
        self.settle(self.next)
        return actions

    return mock.patch.object(RelayLog, "_take_next", forgetful)


@planted_fault(
    RELAY,
    Test(
        "tests/multicast/test_relay_log.py::test_a_child_that_connects_after_the_next_announcement_is_sent_what_was_for_it"
    ),
)
def _only_the_newest_tree_has_children() -> Any:
    """A relay ignores who connects as its child by a version before its own."""
    connected = RelayLog.connected

    def strict(self: Any, child: int, version: int) -> Any:
        late = child in self.cursors and version < self._version
        return [Connected(self._tree.root, child, version)] if late else connected(self, child, version)

    return mock.patch.object(RelayLog, "connected", strict)


@planted_fault(RELAY, CLUSTERS)
def _new_children_begin_where_they_ask() -> Any:
    """A relay keeps nothing for a new child before it asks."""
    return mock.patch.object(
        RelayLog,
        "_needed_from",
        lambda self: min((cursor.received + 1 for cursor in self.cursors.values() if cursor.asked), default=self.next),
    )


@planted_fault(RELAY, CLUSTERS)
def _the_root_keeps_for_its_children_only() -> Any:
    """The root drops entries that its own children have, so that it cannot take the place of a lost node."""
    return mock.patch.object(RootLog, "_needed_from", RelayLog._needed_from)


@planted_fault(RELAY, CLUSTERS)
def _sent_is_received() -> Any:
    """A connection that broke continues where it was, instead of at the number for which the child asks."""

    def rewind(self: Any, cursor: Cursor, number: int) -> None:
        cursor.next, cursor.asked, cursor.last = max(cursor.next, number), True, None
        cursor.received = max(cursor.received, number - 1)

    return mock.patch.object(RelayLog, "_rewind", rewind)


@planted_fault(RELAY, CLUSTERS)
def _nobody_takes_a_lost_node_s_place() -> Any:
    """The children of a lost node wait for the next tree."""
    return mock.patch.object(RelayLog, "_parent_of", lambda self, node, tree: tree.parent.get(node))


@planted_fault(RELAY, Test("tests/multicast/test_pauses.py::test_no_entry_is_late_when_nodes_connect_in_advance"))
def _early_entries_are_not_held() -> Any:
    """A node drops what its new parent sends before the announcement has come, and asks for it again."""
    connect = RelayLog.connect

    def forgetful(self: Any, parent: int, version: int) -> Any:
        actions = connect(self, parent, version)
        self._future = None
        return actions

    return mock.patch.object(RelayLog, "connect", forgetful)


@planted_fault(RELAY, CLUSTERS)
def _everybody_asks_after_an_announcement() -> Any:
    """A node asks its parent again after each announcement, also when it keeps its parent."""
    take_next = RelayLog._take_next

    def eager(self: Any, sender: int, entry: object) -> Any:
        actions = take_next(self, sender, entry)
        return [*actions, *self._ask()] if isinstance(entry, Announcement) else actions

    return mock.patch.object(RelayLog, "_take_next", eager)


@planted_fault(SWITCH, CLUSTERS)
def _a_switch_is_over_when_it_is_announced() -> Any:
    """The root settles a switch, and begins the next one, before the nodes have the announcement."""
    return mock.patch.object(SwitchProgress, "over", property(lambda self: self._numbers is not None))


@planted_fault(LEAST, Test("tests/multicast/test_least_change.py::test_an_integer_programme_finds_no_fewer_changes"))
def _the_first_answer_is_taken() -> Any:
    """A tree is adapted by the quick rule alone."""
    return mock.patch.object(least_change, "_SEARCHED", 0)


@planted_fault(LEAST, Test("tests/multicast/test_least_change.py::test_nothing_changes_when_nothing_must"))
def _a_fresh_tree_each_time() -> Any:
    """A tree is built anew instead of adapted: the right shape, and as many changes as it may be."""

    def fresh(tree: Any, destinations: Any, limit: int, rounds: int = 0) -> Any:
        return least_change.non_blocking(tree.root, sorted(destinations, reverse=True), limit)

    return mock.patch.object(least_change, "adapted", fresh)


@planted_fault(
    "penstock/runtime/multicast/queue_model.py", Test("tests/multicast/test_queue_model.py::test_the_affordable_limit")
)
def _the_sign_as_printed() -> Any:
    """Eq. 3 as it is printed: 2Q / (lambda t_e (Q + 1 - sqrt(Q^2 + 1)))."""
    return mock.patch.object(
        queue_model, "greatest_load", lambda capacity: 2 * capacity / (capacity + 1 - math.hypot(capacity, 1))
    )


@planted_fault(
    "penstock/runtime/multicast/self_adjustment.py",
    Test("tests/multicast/test_self_adjustment.py::test_scale_up_must_pay"),
)
def _every_scale_up_pays() -> Any:
    """A tree gets a higher limit as soon as it is affordable."""
    return mock.patch.object(self_adjustment, "records_to_pay", return_value=-1.0)
