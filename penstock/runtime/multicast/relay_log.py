"""The actions of a relay for a numbered log: it takes entries from its parent and sends them to its children
(docs/papers.md: W6).

A relay takes nothing but the next number, and only from its parent. It keeps each entry until all of its children have
it. For each child it has a `Cursor`: the next number to send. When a relay takes an announcement (tree_switch.py), its
parent and its children change for the entries after it:

- A child that is no longer a child gets the announcement as its last entry. Its cursor stays until its receipt for the
  announcement comes, because a connection that breaks may lose what was sent.
- A new child gets a cursor just after the announcement. If it has connected before, then it is sent entries at once;
  otherwise when it asks. From here on the relay keeps what the child will ask for, so the child never asks for
  something that is gone.
- A child that stays a child is not touched.
- A relay that itself gets another parent takes the entries after the announcement from the new one. The new parent may
  be ahead of the old one: what comes early is held until the announcement has come. If the relay was not connected, it
  asks for the next number. The new parent may also be late: then it notes who has connected or asked.

No entry waits for a later one, even when two nodes change places: entries up to an announcement arrive by the old tree
whatever the new one is. So nothing waits in a circle.

The root keeps each entry until all nodes have it, not only its children. So it can take the place of a lost node: the
children of the lost node ask the root for the next number instead. This also bounds the memory of a log: its sender
stops when the root keeps too many entries, and no relay has an entry that the root has not sent.

At most one switch may be under way: its announcements follow the end of the switch before (`SwitchProgress.over`).
Otherwise a child could have two cursors at one relay.

What the root tells a node (that it is to connect, which nodes are lost, which switch is over) it tells again when their
connection was broken. Each of these may come twice.

Nothing here waits, and nothing is sent: the methods return what is to be sent or processed, in this order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from penstock.runtime.multicast.tree import Tree
from penstock.runtime.multicast.tree_switch import Announcement


@dataclass(frozen=True)
class Send:
    """An entry is to be sent to a child."""

    to: int
    number: int
    entry: object


@dataclass(frozen=True)
class Ask:
    """A parent is to be asked for the entries from a number on."""

    to: int
    number: int


@dataclass(frozen=True)
class Connect:
    """A future parent must hear that this node is its child from the announcement of a version on."""

    to: int
    version: int


@dataclass(frozen=True)
class Connected:
    """The root must hear that a future child has connected."""

    to: int
    child: int
    version: int


@dataclass(frozen=True)
class Receipt:
    """A node must hear that this node has all entries up to a number."""

    to: int
    through: int


@dataclass(frozen=True)
class Process:
    """An entry is for the tasks of this node."""

    number: int
    entry: object


Action: TypeAlias = Send | Ask | Connect | Connected | Receipt | Process


@dataclass
class Cursor:
    """How far a child is. `since`: the version that made it a child. `last`: the announcement that made it another
    node's child, once that has been sent."""

    next: int
    received: int
    since: int
    asked: bool = False
    last: int | None = None


class RelayLog:
    """See the module's docstring."""

    def __init__(self, node: int, tree: Tree, next_number: int, version: int = 0) -> None:
        """`tree` is valid for the next number, which is the first that the relay takes."""
        self.node = node
        self.next = next_number
        self.lost: set[int] = set()
        self.cursors: dict[int, Cursor] = {}
        self._tree = tree
        self._version = version
        self._entries: deque[object] = deque()  # the last ones before `next`
        self._asked_early: dict[int, int] = {}  # numbers, by future child
        self._connected: dict[int, int] = {}  # versions, by future child
        self._future: tuple[int, int] | None = None  # the version and the parent to which this node has connected
        self._held: dict[int, object] = {}  # by number: what the future parent has sent early
        self._add_cursors()

    @property
    def parent(self) -> int | None:
        """The node from which the next entry comes: the root in place of a lost node, and None when this node is the
        root or has left."""
        return self._parent_of(self.node, self._tree)

    @property
    def kept(self) -> int:
        """The number of entries that the relay keeps."""
        return len(self._entries)

    @property
    def entries(self) -> deque[object]:
        """The entries that the relay keeps: the last ones before `next`."""
        return self._entries

    @property
    def idle(self) -> bool:
        """Whether no other node depends on this relay any more. A node that has left may end then."""
        return self.parent is None and not self.cursors

    def begin(self) -> list[Action]:
        """Asks the parent for the first entry, and tells the root that this node is there."""
        return [*self._ask(), Receipt(self._tree.root, self.next - 1)]

    def take(self, sender: int, number: int, entry: object) -> list[Action]:
        """Takes an entry that has come. What is not next, or not from the parent, has no effect: it is there already,
        or will come again."""
        if self._future is not None and sender == self._future[1] != self.parent:
            self._held[number] = entry
            return []
        if not self._is_next(sender, number):
            return []
        actions = self._take_next(sender, entry)
        while self.next in self._held:
            assert self.parent is not None, "only a parent's entries are held"
            actions += self._take_next(self.parent, self._held.pop(self.next))
        return actions

    def connect(self, parent: int, version: int) -> list[Action]:
        """Connects to the node that is the parent from the announcement of a version on."""
        self._forget_future()
        if parent in self.lost:
            return []
        if parent == self.parent:  # the root, since the old parent was lost
            return [Connected(self._tree.root, self.node, version)]
        self._future = (version, parent)
        return [Connect(parent, version)]

    def connected(self, child: int, version: int) -> list[Action]:
        """A node says that it is a child from the announcement of a version on."""
        cursor = self.cursors.get(child)
        actions: list[Action] = [Connected(self._tree.root, child, version)]
        if cursor is None or cursor.last is not None:
            self._connected[child] = version
        elif version == cursor.since:  # also when this node has taken later announcements meanwhile
            self._rewind(cursor, cursor.received + 1)
            actions += self._to(child, cursor)
        return actions

    def asked(self, child: int, number: int) -> list[Action]:
        """A node asks for the entries from a number on, for the first time or because its connection broke."""
        cursor = self.cursors.get(child)
        if cursor is None or (cursor.last is not None and number > cursor.last):
            self._asked_early[child] = number
            return []
        self._rewind(cursor, number)
        self._drop()
        return list(self._to(child, cursor))

    def receipt(self, child: int, through: int) -> None:
        """A child has all entries up to a number."""
        cursor = self.cursors.get(child)
        if cursor is not None:
            cursor.received = max(cursor.received, through)
            if cursor.last is not None and through >= cursor.last:
                del self.cursors[child]
            self._drop()

    def node_lost(self, node: int) -> list[Action]:
        """A node no longer answers, and will not come back."""
        before = self.parent
        self.lost.add(node)
        self.cursors.pop(node, None)
        self._asked_early.pop(node, None)
        self._connected.pop(node, None)
        if self._future is not None and self._future[1] == node:
            self._forget_future()
        self._drop()
        return self._ask() if self.parent != before else []

    def settle(self, number: int) -> None:
        """The switch with the announcement of this number is over: its former children have all that was for them."""
        for child, cursor in list(self.cursors.items()):
            if cursor.last is not None and cursor.last <= number:
                del self.cursors[child]
        self._drop()

    def _is_next(self, sender: int, number: int) -> bool:
        return number == self.next and sender == self.parent

    def _take_next(self, sender: int, entry: object) -> list[Action]:
        """Takes the next entry."""
        # The receipt goes to the node that sent the entry, also when the entry is an announcement of another parent.
        actions: list[Action] = [Receipt(to, self.next) for to in dict.fromkeys((sender, self._tree.root))]
        if not isinstance(entry, Announcement):
            actions.append(Process(self.next, entry))
        before = self.parent
        actions += self._append(entry)
        if isinstance(entry, Announcement):
            in_advance = self._future == (entry.version, self.parent)
            if not in_advance:
                self._held.clear()
            self._future = None
            if self.parent != before and not in_advance:
                actions += self._ask()
        return actions

    def _forget_future(self) -> None:
        """Gives up the connection to a future parent, and the messages that it has sent."""
        self._future = None
        self._held.clear()

    def _append(self, entry: object) -> list[Action]:
        """Keeps an entry, and sends it to the children."""
        self._entries.append(entry)
        self.next += 1
        actions: list[Action] = []
        for child, cursor in self.cursors.items():
            actions += self._to(child, cursor)
        if isinstance(entry, Announcement):
            self._tree, self._version = entry.tree, entry.version
            actions += self._add_cursors()
        self._drop()
        return actions

    def _add_cursors(self) -> list[Action]:
        """Gives the children of a new tree their cursors, except children that have one."""
        actions: list[Action] = []
        for child in self._tree.of(self.node):
            cursor = self.cursors.get(child)
            if child in self.lost or (cursor is not None and cursor.last is None):
                continue
            cursor = self.cursors[child] = Cursor(self.next, self.next - 1, self._version)
            cursor.asked = self._connected.pop(child, None) == self._version
            if (number := self._asked_early.pop(child, None)) is not None:
                self._rewind(cursor, number)
            actions += self._to(child, cursor)
        return actions

    def _rewind(self, cursor: Cursor, number: int) -> None:
        """A child asks from a number on: it has what is before, and may not have what was sent since."""
        cursor.next, cursor.asked, cursor.last = number, True, None
        cursor.received = max(cursor.received, number - 1)

    def _to(self, child: int, cursor: Cursor) -> Iterator[Send]:
        """The entries that a child can be sent now."""
        first = self.next - len(self._entries)
        while cursor.asked and cursor.last is None and cursor.next < self.next:
            number = cursor.next
            assert number >= first, f"node {self.node} has dropped entry {number}, for which node {child} asks"
            entry = self._entries[number - first]
            cursor.next += 1
            if isinstance(entry, Announcement) and self._parent_of(child, entry.tree) != self.node:
                cursor.last = number
            yield Send(child, number, entry)

    def _parent_of(self, node: int, tree: Tree) -> int | None:
        """The node that sends to a node in a tree, in which some nodes may be lost."""
        parent = tree.parent.get(node)
        return tree.root if parent in self.lost else parent

    def _ask(self) -> list[Action]:
        return [] if self.parent is None else [Ask(self.parent, self.next)]

    def _needed_from(self) -> int:
        """The least number that somebody may still need from this node."""
        return min((cursor.received + 1 for cursor in self.cursors.values()), default=self.next)

    def _drop(self) -> None:
        """Drops the entries that no other node needs any more."""
        needed = self._needed_from()
        while self._entries and self.next - len(self._entries) < needed:
            self._entries.popleft()


class RootLog(RelayLog):
    """A log where it begins. It numbers the entries, and keeps each until all nodes of the tree have it."""

    def __init__(self, tree: Tree) -> None:
        self._through = dict.fromkeys(tree.parent, -1)  # by node, also by nodes that are leaving
        self._announced = -1  # the number of the last announcement
        super().__init__(tree.root, tree, 0)

    def append(self, entry: object) -> list[Action]:
        """Gives the next number to an entry, and sends it to the children."""
        if isinstance(entry, Announcement):
            self._announced = self.next
            for node in entry.tree.destinations - self.lost:
                self._through.setdefault(node, self.next)
        return self._append(entry)

    def asked(self, child: int, number: int) -> list[Action]:
        """A child asks, or a child of a lost node, which the root then takes as its own."""
        if child not in self._through:
            return []
        cursor = self.cursors.setdefault(child, Cursor(number, number - 1, self._version))
        self._rewind(cursor, number)
        return list(self._to(child, cursor))

    def receipt(self, child: int, through: int) -> None:
        """A node of the tree has all entries up to a number."""
        if child in self._through:
            self._through[child] = max(self._through[child], through)
        super().receipt(child, through)
        self._drop()

    def node_lost(self, node: int) -> list[Action]:
        """A node no longer answers. Its children will ask the root."""
        self._through.pop(node, None)
        return super().node_lost(node)

    def undelivered(self, node: int | None) -> Iterator[object]:
        """Yields the entries of which a node of the tree has given no receipt."""
        through = self._through.get(node) if node is not None else None
        if through is not None:
            first = self.next - len(self._entries)
            yield from islice(self._entries, max(0, through + 1 - first), None)

    def settle(self, number: int) -> None:
        """The switch with the announcement of this number is over. Nodes that have left need nothing any more."""
        if number == self._announced:
            self._through = {node: at for node, at in self._through.items() if node in self._tree.parent}
        super().settle(number)

    def _needed_from(self) -> int:
        return min((through + 1 for through in self._through.values()), default=self.next)
