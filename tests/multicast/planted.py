"""Faults of multicast trees that somebody might write in good faith (tests/planting.py)."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

from penstock.runtime.multicast import (
    least_change,
    limit_trials,
    load_monitor,
    queue_model,
    self_adjustment,
    servers,
)
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


@planted_fault(LEAST, Test("tests/multicast/test_least_change.py::test_few_more_nodes_change_than_must"))
def _the_last_nodes_come_forward_first() -> Any:
    """The places of a new tree are filled with leaves of the old one, whoever was the parent."""
    filled = least_change._Change._filled

    def by_layer(self: Any, great: bool) -> list[int]:
        found = filled(self, great)
        return [found[0], *sorted(found[1:], key=lambda node: -self._layer[node])]

    return mock.patch.object(least_change._Change, "_filled", by_layer)


@planted_fault(LEAST, Test("tests/multicast/test_least_change.py::test_nothing_changes_when_nothing_must"))
def _a_fresh_tree_each_time() -> Any:
    """A tree is built anew instead of adapted: the right shape, and as many changes as it may be."""

    def fresh(tree: Any, destinations: Any, limit: int) -> Any:
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


BUSY = "tests/relaying/test_limit_adjuster.py::"
DECISION = "penstock/runtime/multicast/self_adjustment.py"


@planted_fault(
    "penstock/runtime/multicast/queue_model.py",
    Test("tests/multicast/test_servers.py::test_other_work_of_the_thread_is_part_of_the_time_of_an_entry"),
)
def _the_root_s_thread_does_nothing_else() -> Any:
    """The time of an entry leaves out the other work of the root's thread, as in the paper."""
    return mock.patch.object(
        queue_model.Cost, "record_s", lambda self, children: children * self.copy_s + self.encode_s
    )


@planted_fault("penstock/runtime/multicast/load_monitor.py", Test(f"{BUSY}test_a_busy_source_gets_fewer_children"))
def _a_thread_without_idle_time_is_no_sign() -> Any:
    """Only a queue that grows calls for fewer children."""
    return mock.patch.object(load_monitor, "_wanted_s", return_value=0.0)


@planted_fault(
    DECISION,
    Test(
        "tests/multicast/test_self_adjustment.py::test_a_load_that_has_outgrown_its_tree_gets_the_widest_one_in_one_step"
    ),
)
def _one_child_less_at_a_time() -> Any:
    """A tree that the load has outgrown gets the limit that the model affords at the rate that comes through."""

    def step(self: Any, limits: Any, destinations: int, gain: float) -> int:
        return max(1, max(limits) - 1)

    return mock.patch.object(servers.Servers, "widest", step)


@planted_fault(
    "penstock/runtime/multicast/servers.py",
    Test("tests/multicast/test_servers.py::test_the_widest_tree_is_neither_always_a_chain_nor_long_for_little"),
)
def _windows_without_end() -> Any:
    """A chain is taken to carry whatever its root can send, however long it is."""
    return mock.patch.object(servers.Servers, "by_windows", return_value=math.inf)


@planted_fault(
    "penstock/runtime/multicast/limit_trials.py",
    Test(f"{BUSY}test_a_scale_up_after_which_the_rate_falls_is_undone_and_not_tried_again"),
)
def _no_change_is_undone() -> Any:
    """A tree keeps a limit after which less comes through, as long as the model affords it."""
    return mock.patch.object(limit_trials.LimitTrials, "undone", return_value=None)


@planted_fault(
    "penstock/runtime/multicast/limit_trials.py",
    Test(f"{BUSY}test_a_scale_up_after_which_the_rate_falls_is_undone_and_not_tried_again"),
)
def _what_failed_is_tried_again() -> Any:
    """A limit that made things worse is tried again as soon as the model affords it."""
    return mock.patch.object(limit_trials.LimitTrials, "refused", return_value=set())


@planted_fault(
    DECISION, Test("tests/multicast/test_self_adjustment.py::test_sources_that_wait_for_somebody_else_change_no_tree")
)
def _every_wait_is_the_root_s() -> Any:
    """Sources that wait for a slow task count as waiting for the root."""
    return mock.patch.object(self_adjustment, "_EXPLAINED", 0.0)


@planted_fault(
    DECISION, Test("tests/multicast/test_self_adjustment.py::test_a_load_is_given_the_time_that_catching_up_takes")
)
def _a_pause_is_a_burst() -> Any:
    """A load that the tree has carried is given no time to catch up after a pause."""
    return mock.patch.object(self_adjustment, "catching_up_s", return_value=0.0)
