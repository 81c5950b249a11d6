"""One relay and one log: what it takes, sends, keeps and asks for."""

from __future__ import annotations

from penstock.runtime.multicast.relay_log import Ask, Connect, Connected, Process, Receipt, RelayLog, RootLog, Send
from penstock.runtime.multicast.tree import Tree
from penstock.runtime.multicast.tree_switch import Announcement
from tests.multicast.sim import reconnected

CHAIN = Tree(0, {0: (1,), 1: (2,), 2: (3,)})
#: Node 3 leaves node 2 for node 1.
SHORTER = Announcement(1, Tree(0, {0: (1,), 1: (2, 3)}))


def relay(node: int, tree: Tree = CHAIN) -> RelayLog:
    """A relay whose children have asked."""
    made = RelayLog(node, tree, 0)
    for child in tree.of(node):
        made.asked(child, 0)
    return made


def test_an_entry_is_processed_sent_on_and_acknowledged() -> None:
    one = relay(2)
    assert one.begin() == [Ask(1, 0), Receipt(0, -1)]
    assert one.take(1, 0, "a") == [Receipt(1, 0), Receipt(0, 0), Process(0, "a"), Send(3, 0, "a")]
    assert relay(1).take(0, 0, "a") == [Receipt(0, 0), Process(0, "a"), Send(2, 0, "a")]


def test_only_the_next_number_and_only_from_the_parent() -> None:
    one = relay(2)
    one.take(1, 0, "a")
    assert one.take(1, 0, "a") == [], "it is there already"
    assert one.take(1, 2, "c") == [], "the one before is missing"
    assert one.take(0, 1, "b") == [], "not from the parent"
    assert one.next == 1


def test_entries_are_kept_until_the_children_have_them() -> None:
    one = relay(2)
    for number in range(5):
        one.take(1, number, "a")
    assert one.kept == 5
    one.receipt(3, 2)
    assert one.kept == 2
    reconnected(one, 3)
    assert one.take(1, 5, "b") == [Receipt(1, 5), Receipt(0, 5), Process(5, "b")], "it waits for the child's question"
    assert one.asked(3, 4) == [Send(3, 4, "a"), Send(3, 5, "b")]
    assert one.kept == 2


def test_a_connection_that_breaks_is_asked_over_again() -> None:
    one = relay(2)
    one.take(1, 0, "a")
    assert reconnected(one, 1) == [Ask(1, 1)]
    assert reconnected(one, 0) == [Receipt(0, 0)]
    assert reconnected(relay(1), 0) == [Ask(0, 0), Receipt(0, -1)]


def test_the_announcement_is_the_last_entry_of_the_old_parent() -> None:
    old = relay(2)
    assert Send(3, 0, SHORTER) in old.take(1, 0, SHORTER)
    assert not any(isinstance(action, Send) for action in old.take(1, 1, "a"))
    assert old.kept == 2, "node 3 may not have got the announcement"
    old.receipt(3, 0)
    assert (old.kept, old.cursors) == (0, {})


def test_a_former_child_whose_connection_broke_gets_the_announcement_again() -> None:
    old = relay(2)
    old.take(1, 0, SHORTER)
    old.take(1, 1, "a")
    assert old.asked(3, 0) == [Send(3, 0, SHORTER)]
    old.settle(0)
    assert old.cursors == {}


def test_the_new_parent_keeps_what_the_child_will_ask_for() -> None:
    new = relay(1)
    new.take(0, 0, SHORTER)
    new.take(0, 1, "a")
    new.receipt(2, 1)
    assert new.kept == 1
    assert new.asked(3, 1) == [Send(3, 1, "a")]


def test_a_question_that_comes_before_the_announcement_is_answered_after_it() -> None:
    new = relay(1)
    assert new.asked(3, 1) == []
    assert Send(3, 0, SHORTER) not in new.take(0, 0, SHORTER)
    assert Send(3, 1, "a") in new.take(0, 1, "a")


def test_a_child_that_is_connected_is_sent_entries_without_asking() -> None:
    new = relay(1)
    assert new.connected(3, 1) == [Connected(0, 3, 1)]
    new.take(0, 0, SHORTER)
    assert Send(3, 1, "a") in new.take(0, 1, "a")


def test_a_connection_for_another_version_is_no_connection() -> None:
    new = relay(1)
    new.connected(3, 7)
    new.take(0, 0, SHORTER)
    assert Send(3, 1, "a") not in new.take(0, 1, "a")
    assert new.connected(3, 1) == [Connected(0, 3, 1), Send(3, 1, "a")]


def test_a_child_that_connects_after_the_next_announcement_is_sent_what_was_for_it() -> None:
    """Its message took longer than the announcement that makes it the child of another node again."""
    new = relay(1)
    new.take(0, 0, SHORTER)
    new.take(0, 1, "a")
    longer = Announcement(2, CHAIN)
    assert not any(isinstance(action, Send) and action.to == 3 for action in new.take(0, 2, longer))
    sent = [Send(3, 1, "a"), Send(3, 2, longer)]
    assert new.connected(3, 1) == [Connected(0, 3, 1), *sent]
    new.take(0, 3, "b")
    new.receipt(2, 3)
    assert new.kept == 3, "until node 3 has the announcement, too"
    new.receipt(3, 2)
    assert new.kept == 0


def test_a_node_that_is_not_connected_asks_after_the_announcement() -> None:
    child = relay(3)
    assert child.take(2, 0, SHORTER) == [Receipt(2, 0), Receipt(0, 0), Ask(1, 1)]
    assert child.take(2, 1, "a") == [], "node 2 is not the parent any more"
    assert Process(1, "a") in child.take(1, 1, "a")


def test_what_the_new_parent_sends_early_is_held() -> None:
    child = relay(3)
    assert child.connect(1, 1) == [Connect(1, 1)]
    assert child.take(1, 2, "b") == []
    assert child.take(1, 3, "c") == []
    assert child.take(2, 0, "a") == [Receipt(2, 0), Receipt(0, 0), Process(0, "a")]
    assert child.take(2, 1, SHORTER) == [
        *(Receipt(2, 1), Receipt(0, 1)),
        *(Receipt(1, 2), Receipt(0, 2), Process(2, "b")),
        *(Receipt(1, 3), Receipt(0, 3), Process(3, "c")),
    ]


def test_a_future_parent_that_is_lost_is_forgotten() -> None:
    child = relay(3)
    child.connect(1, 1)
    child.take(1, 1, "b")
    assert child.node_lost(1) == []
    assert child.take(2, 0, SHORTER)[-1] == Ask(0, 1), "the root takes its place"
    assert child.connect(1, 2) == []


def test_a_child_that_the_root_has_taken_as_its_own_is_connected_already() -> None:
    child = relay(3)
    child.node_lost(2)
    assert child.connect(0, 1) == [Connected(0, 3, 1)]


def test_an_old_settlement_takes_nothing_from_a_node_that_leaves_later() -> None:
    root = RootLog(CHAIN)
    root.append(SHORTER)
    for node in (1, 2, 3):
        root.receipt(node, 0)
    root.append(Announcement(2, Tree(0, {0: (1,), 1: (2,)})))
    root.settle(0)
    root.node_lost(1)
    assert root.asked(3, 1), "node 3 still lacks the announcement"
    root.settle(1)
    assert root.asked(3, 1) == []


def test_a_future_parent_whose_connection_broke_sends_again() -> None:
    child, new = relay(3), relay(1)
    child.connect(1, 1)
    new.connected(3, 1)
    new.take(0, 0, SHORTER)
    new.take(0, 1, "a")  # and this is lost
    reconnected(new, 3)
    assert reconnected(child, 1) == [Connect(1, 1)]
    assert new.connected(3, 1) == [Connected(0, 3, 1), Send(3, 1, "a")]


def test_children_of_a_lost_node_get_the_rest_from_the_root() -> None:
    root = RootLog(CHAIN)
    root.asked(1, 0)
    for entry in "abc":
        root.append(entry)
    for node, through in ((1, 2), (2, 1), (3, 0)):
        root.receipt(node, through)
    assert root.kept == 2, "node 3 lacks two entries"
    root.node_lost(2)
    child = relay(3)
    child.take(2, 0, "a")
    assert child.node_lost(2) == [Ask(0, 1)]
    assert root.asked(3, 1) == [Send(3, 1, "b"), Send(3, 2, "c")]
    # Until the next tree.
    sent = root.append(Announcement(1, Tree(0, {0: (1,), 1: (3,)})))
    assert sent == [Send(1, 3, root_entry(sent)), Send(3, 3, root_entry(sent))]
    assert root.append("d") == [Send(1, 4, "d")]


def root_entry(sent: object) -> object:
    assert isinstance(sent, list)
    assert isinstance(sent[0], Send)
    return sent[0].entry


def test_the_root_keeps_what_the_last_node_lacks() -> None:
    root = RootLog(CHAIN)
    root.asked(1, 0)
    for entry in "abc":
        root.append(entry)
    root.receipt(1, 2)
    root.receipt(2, 2)
    assert root.kept == 3
    root.receipt(3, 1)
    assert root.kept == 1
    root.node_lost(3)
    assert root.kept == 0
    assert root.asked(9, 0) == [], "node 9 is no node of the tree"


def test_a_node_that_left_may_end_when_nobody_depends_on_it() -> None:
    leaving = relay(2)
    assert not leaving.idle
    leaving.take(1, 0, Announcement(1, Tree(0, {0: (1,), 1: (3,)})))
    assert leaving.parent is None
    assert not leaving.idle, "node 3 may not have got the announcement"
    leaving.settle(0)
    assert leaving.idle


def test_two_nodes_can_change_places() -> None:
    """Each waits for the announcement by the old tree; neither waits for the other."""
    turned = Announcement(1, Tree(0, {0: (2,), 2: (1,), 1: (3,)}))
    one, two = relay(1), relay(2)
    assert Send(2, 0, turned) in one.take(0, 0, turned)
    assert two.take(1, 0, turned)[-1] == Ask(0, 1)
    assert two.asked(1, 1) == []
    assert Send(1, 1, "a") in two.take(0, 1, "a")
    assert Process(1, "a") in one.take(2, 1, "a")
