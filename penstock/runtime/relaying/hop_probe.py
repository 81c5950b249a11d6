"""Measures how long an entry takes from one relay of a tree to the next.

Of all entries, the probe follows one at a time along the longest way of the tree. It notes when the first relay of this
way says that it has the entry, and when the last one does. What is between the two, divided by the hops between them,
is the time of a hop. How late the root takes in what relays say is in both, and so in neither. Where all relays are
children of the root, the only hop is that from the root.
"""

from __future__ import annotations

from penstock.runtime.multicast.tree import Tree


class HopProbe:
    """See the module's docstring. One stream has one. Times are in ns."""

    def __init__(self) -> None:
        self.free = True  # no entry is followed
        self._tree: Tree | None = None
        self._first = self._last = -1  # relays
        self._hops = 0
        self._number = 0
        self._since_ns: int | None = None

    def follow(self, tree: Tree, number: int, now_ns: int) -> None:
        """Follows an entry of the stream, which is sent along a tree."""
        if tree is not self._tree:
            self._tree = tree
            self._last = max(tree.depth, key=lambda node: tree.depth[node])
            self._first = self._last
            while tree.parent[self._first] != tree.root:
                self._first = tree.parent[self._first]
            self._hops = tree.depth[self._last] - 1
        self.free = False
        self._number = number
        self._since_ns = None if self._hops else now_ns

    def has(self, relay: int, first: int, now_ns: int) -> float | None:
        """A relay lacks the entries from `first` on. Returns how many seconds a hop takes, if this is known now."""
        if self.free or first <= self._number:
            return None
        since_ns = self._since_ns
        if relay == self._last:
            self.free = True
            if since_ns is not None:  # else the last relay's word came first
                return max(1, now_ns - since_ns) / max(1, self._hops) / 1e9
        elif relay == self._first and since_ns is None:
            self._since_ns = now_ns
        return None

    def forget(self) -> None:
        """Follows no entry, because the tree changes or a relay is lost."""
        self.free = True
