"""A change of the tree as data: who gets another parent, in which order, and after which numbers (docs/papers.md: W6).

Records travel in *numbered logs*, one for each sender and exchange, and every node gets every entry of a log once, in
the order of the numbers. A tree is valid from a number on. The root writes an *announcement* of the new tree into each
log: entries up to the announcement, and the announcement itself, take the old tree, and all later entries take the new
one. So each entry has one tree, whoever is how far, and there is no time at which the records must stop.

The phases are those of the paper's section 4, in its order, without the first one, in which all nodes are told that
there will be another tree. Nothing stops here, so a node that keeps its parent need not know. Records take the old tree
in phases 1 and 2:

1. RECONNECT: the nodes that get another parent are told to connect to it, so that it can send to them as soon as it has
   the announcement. They are sorted by their layer in the new tree. Nodes that join come later, and so do their
   children: nobody can connect to a node that does not yet know where its logs begin.
2. CONNECTED: the root waits until they have connected. This is the paper's wait for ACKs. The root may continue without
   some of them: a node that is not connected when it gets the announcement asks its new parent then, and waits for the
   answer.
3. ANNOUNCE: the root writes the announcement into each log. It reaches the other nodes among the records, so nobody
   waits for it. The nodes that join are told the number of the announcement, after which their logs begin.
4. RECEIPTS: the switch is over when every node that gets another parent has the announcements, and so has all that its
   old parent had for it. The same holds for a node that leaves.
5. SETTLE: the others are told that it is over. A former parent may forget its former children, and a node that leaves
   may end.

A node that keeps its parent does nothing in any of these steps, and nothing waits for it.

When a node is lost, its children get from the root itself what the lost node would have sent, until the next
announcement gives them another parent (relay_log.py). A node is known by a number, and a node that was lost comes back
under another one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.runtime.multicast.tree import Tree


@dataclass(frozen=True)
class Announcement:
    """The entry of a log from which on a tree is valid, for the entries after this one."""

    version: int
    tree: Tree


@dataclass(frozen=True)
class Handover:
    """A node gets another parent. `old_parent` sends it the entries up to the announcement: the root in place of a
    node that is lost, and None for a node that joins."""

    node: int
    old_parent: int | None
    new_parent: int


@dataclass(frozen=True)
class TreeSwitch:
    """See the module's docstring. `lost` are the nodes of the old tree that no longer answer."""

    before: Tree
    announcement: Announcement
    lost: frozenset[int] = frozenset()

    @property
    def after(self) -> Tree:
        """The new tree."""
        return self.announcement.tree

    @cached_property
    def handovers(self) -> tuple[Handover, ...]:
        """The nodes that get another parent, or their first one, sorted by their new layers."""
        found = []
        for node in sorted(self.after.parent, key=self.after.layer.__getitem__):
            old, new = self.before.parent.get(node), self.after.parent[node]
            if old != new:
                found.append(Handover(node, self.before.root if old in self.lost else old, new))
        return tuple(found)

    @property
    def connecting(self) -> tuple[int, ...]:
        """The nodes that can connect to their new parents before the announcement."""
        return tuple(
            handover.node
            for handover in self.handovers
            if handover.old_parent not in {None, handover.new_parent} and handover.new_parent in self.before.layer
        )

    @property
    def leaving(self) -> tuple[int, ...]:
        """The nodes that have no place in the new tree, and that are not lost."""
        return tuple(sorted(self.before.destinations - self.after.destinations - self.lost))


class SwitchProgress:
    """The answers for which the root still waits before it may announce the new tree, and before the switch is over."""

    def __init__(self, switch: TreeSwitch, logs: Collection[int]) -> None:
        self.switch = switch
        self._connecting = {(node, log) for node in switch.connecting for log in logs}
        changing = (*(handover.node for handover in switch.handovers), *switch.leaving)
        self._taking = {(node, log) for node in changing for log in logs}
        self._numbers: Mapping[int, int] | None = None

    @property
    def connected(self) -> bool:
        """Whether no node will have to wait for a new parent's answer."""
        return not self._connecting

    @property
    def over(self) -> bool:
        """Whether every node that gets another parent, or leaves, has all that its old parent had for it."""
        return self._numbers is not None and not self._taking

    def connection(self, node: int, log: int, version: int) -> None:
        """A node has connected to its new parent."""
        if version == self.switch.announcement.version:
            self._connecting.discard((node, log))

    def announced(self, numbers: Mapping[int, int]) -> None:
        """The announcements have these numbers, by log."""
        self._numbers = numbers

    def receipt(self, node: int, log: int, through: int) -> None:
        """A node has all entries of a log up to a number."""
        if self._numbers is not None and through >= self._numbers[log]:
            self._taking.discard((node, log))

    def node_lost(self, node: int) -> None:
        """A node no longer answers, so nothing waits for it, nor for connections to it."""
        unanswered = {handover.node for handover in self.switch.handovers if handover.new_parent == node} | {node}
        self._connecting = {(other, log) for other, log in self._connecting if other not in unanswered}
        self._taking = {(other, log) for other, log in self._taking if other != node}
