"""A switch as data: who changes its parent, in which order, and what the root waits for."""

from __future__ import annotations

from penstock.runtime.multicast.building import non_blocking
from penstock.runtime.multicast.least_change import adapted
from penstock.runtime.multicast.tree import Tree
from penstock.runtime.multicast.tree_switch import Announcement, Handover, SwitchProgress, TreeSwitch
from tests.multicast.sim import changed_parents

SEVEN = range(1, 8)


def switch_of(before: Tree, after: Tree, lost: frozenset[int] = frozenset()) -> TreeSwitch:
    return TreeSwitch(before, Announcement(5, after), lost)


def test_the_steps_of_the_paper_s_scale_down() -> None:
    before = non_blocking(0, SEVEN, 3)
    switch = switch_of(before, adapted(before, SEVEN, 2))
    assert switch.handovers == (Handover(4, 0, 2),)
    assert switch.connecting == (4,)
    assert switch.leaving == ()


def test_handovers_are_sorted_by_new_layers() -> None:
    """From a star to a chain: a node's new parent comes before the node."""
    before = Tree(0, {0: (4, 3, 2, 1)})
    after = Tree(0, {0: (4,), 4: (1,), 1: (3,), 3: (2,)})
    assert [handover.node for handover in switch_of(before, after).handovers] == [1, 3, 2]


def test_all_that_change_and_nobody_else_is_handed_over() -> None:
    before = non_blocking(0, range(1, 30), 3)
    after = adapted(before, [*range(2, 30), 40, 41], 2)
    switch = switch_of(before, after)
    assert {handover.node for handover in switch.handovers} == changed_parents(before, after) | {40, 41}
    assert switch.leaving == (1,)
    assert set(switch.connecting) <= changed_parents(before, after)


def test_nodes_that_join_connect_after_the_announcement_and_so_do_their_children() -> None:
    before = Tree(0, {0: (1,), 1: (2,)})
    after = Tree(0, {0: (3, 1), 3: (2,)})
    switch = switch_of(before, after)
    assert switch.handovers == (Handover(3, None, 0), Handover(2, 1, 3))
    assert switch.connecting == ()


def test_the_root_is_the_old_parent_in_place_of_a_lost_node() -> None:
    before = Tree(0, {0: (1,), 1: (2, 3)})
    after = Tree(0, {0: (2,), 2: (3,)})
    switch = switch_of(before, after, lost=frozenset({1}))
    assert switch.handovers == (Handover(2, 0, 0), Handover(3, 0, 2))
    assert switch.connecting == (3,), "node 2 keeps the parent that it has had since the loss"
    assert switch.leaving == ()


def test_a_switch_waits_for_every_log_of_every_node_that_changes_or_leaves() -> None:
    before = Tree(0, {0: (1, 2), 1: (3,)})
    after = Tree(0, {0: (2,), 2: (3,)})
    progress = SwitchProgress(switch_of(before, after), [0, 1])
    progress.connection(3, 0, version=4)
    progress.connection(3, 1, version=5)
    assert not progress.connected, "the connection of log 0 is of another version"
    progress.connection(3, 0, version=5)
    assert progress.connected
    progress.receipt(3, 0, 100)
    progress.announced({0: 10, 1: 20})
    assert not progress.over
    for node, log, through in ((3, 0, 10), (3, 1, 19), (1, 0, 11), (1, 1, 20), (2, 0, 50)):
        progress.receipt(node, log, through)
        assert not progress.over
    progress.receipt(3, 1, 20)
    assert progress.over


def test_nothing_waits_for_a_node_that_is_lost() -> None:
    before = Tree(0, {0: (1, 2), 1: (3,)})
    after = Tree(0, {0: (2,), 2: (3,)})
    progress = SwitchProgress(switch_of(before, after), [0])
    progress.node_lost(2)
    assert progress.connected, "nobody can connect to a node that is lost"
    progress.announced({0: 10})
    progress.receipt(3, 0, 10)
    assert not progress.over
    progress.node_lost(1)
    assert progress.over


def test_a_switch_that_hands_nobody_over_is_over_at_once() -> None:
    tree = non_blocking(0, SEVEN, 2)
    progress = SwitchProgress(switch_of(tree, tree), [0])
    assert progress.connected
    assert not progress.over
    progress.announced({0: 3})
    assert progress.over
