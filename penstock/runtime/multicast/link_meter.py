"""Measures what a copy costs a root whose links are slow (docs/papers.md: W5): the time for which its sending is busy.

The CPU time of a send says nothing of a slow link, because the network takes the bytes later. What the root knows is
when it sent each copy and when the child's receipt came. A copy *left* one round trip of a small message before its
receipt came. It took the link from when it was sent, or from when the copy ahead of it left, until it left itself. So
the figure is the same at a low and at a full load, and however many copies are under way on a long link. The root tells
the round trips of small messages (`round_trip`), such as those by which a child joins, or what its transport knows.

Without them, the smallest round trip of a copy is taken, which contains what the copy took. Then a copy that found the
link idle says nothing, and is taken to cost what the others cost. One that was sent before the copy ahead of it was
half through went out right after it, and so says what a copy takes. This needs a child that is sometimes the first to
be sent a record; the round trips to other children seem longer than they are.

Copies go out in the order in which they were sent, to whichever child. A child that sends no receipts holds up the
measurement, but not for longer than the root goes on sending to it, which its credit ends; `lost` ends it too.

The meter knows no clock: times are given, in seconds. Copies should be of about the same size.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

# What a copy costs is the mean of about so many measured ones.
_COPIES = 100


@dataclass
class _Copy:
    """A copy that has been sent. `left_s`: when it left; None: not known yet, infinite: never known. `exact`: whether
    this is known from the round trip of a small message."""

    sent_s: float
    left_s: float | None = None
    exact: bool = False


@dataclass
class _Child:
    """The copies without a receipt, and the smallest round trip of this and of the last period of memory."""

    copies: deque[_Copy] = field(default_factory=deque)
    since_s: float | None = None
    smallest_s: float = math.inf
    smallest_before_s: float = math.inf
    exact: bool = False

    @property
    def round_trip_s(self) -> float:
        return min(self.smallest_s, self.smallest_before_s)

    def seen(self, round_trip_s: float, now_s: float, memory_s: float) -> None:
        """Takes in a round trip."""
        if self.since_s is None:
            self.since_s = now_s
        elif now_s - self.since_s >= memory_s:
            self.smallest_before_s, self.smallest_s, self.since_s = self.smallest_s, math.inf, now_s
        self.smallest_s = min(self.smallest_s, round_trip_s)


class LinkMeter:
    """See the module's docstring. `copies` have been measured or estimated, and took `busy_s` in all. Both only grow,
    so they may stand in Counters (load_monitor.py) where the CPU time is less."""

    def __init__(self, memory_s: float = 30.0) -> None:
        """`memory_s`: a smallest round trip is forgotten after one to two times this, because routes change, unless no
        other one has been told."""
        self.copies = 0
        self.busy_s = 0.0
        self._memory_s = memory_s
        self._children: dict[int, _Child] = {}
        self._order: deque[_Copy] = deque()
        self._left_s = -math.inf  # of the last copy that was taken
        self._measured_s = self._measured = 0.0  # of the last copies

    @property
    def copy_s(self) -> float:
        """What a copy costs; 0 as long as it is not known."""
        return self._measured_s / self._measured if self._measured else 0.0

    def round_trip_s(self, child: int) -> float | None:
        """Returns the smallest round trip to a child. None: not known."""
        found = self._children.get(child)
        return None if found is None or found.round_trip_s == math.inf else found.round_trip_s

    def round_trip(self, child: int, seconds: float, now_s: float) -> None:
        """A small message to a child and its answer took so long."""
        at = self._children.setdefault(child, _Child())
        at.exact = True
        at.seen(seconds, now_s, self._memory_s)

    def sent(self, child: int, copies: int, now_s: float) -> None:
        """The root has sent copies to a child."""
        waiting = self._children.setdefault(child, _Child()).copies
        for _ in range(copies):
            copy = _Copy(now_s)
            waiting.append(copy)
            self._order.append(copy)

    def received(self, child: int, copies: int, now_s: float) -> None:
        """A child has sent the receipt for so many more copies. Copies that were never sent have no effect."""
        at = self._children.get(child)
        if at is None or not (came := [at.copies.popleft() for _ in range(min(copies, len(at.copies)))]):
            return
        took_s = now_s - came[-1].sent_s
        if not at.exact or took_s < at.round_trip_s:
            at.seen(took_s, now_s, self._memory_s)
        left_s = now_s - at.round_trip_s
        for copy in came:
            copy.left_s, copy.exact = left_s, at.exact
        self._settle()

    def lost(self, child: int) -> None:
        """A child is lost, or is no child any more: its receipts are not waited for."""
        at = self._children.pop(child, None)
        if at is not None:
            for copy in at.copies:
                copy.left_s = math.inf
            self._settle()

    def _settle(self) -> None:
        """Takes the copies of which it is known when they left, in the order in which they were sent."""
        while self._order and (left_s := self._order[0].left_s) is not None:
            copy = self._order.popleft()
            if left_s < math.inf:
                self._take(copy, max(left_s, self._left_s))

    def _take(self, copy: _Copy, left_s: float) -> None:
        before_s, self._left_s = self._left_s, left_s
        self.copies += 1
        if copy.exact:
            took_s = max(0.0, left_s - max(before_s, copy.sent_s))
        elif before_s > -math.inf and copy.sent_s - before_s <= (left_s - before_s) / 2:
            took_s = left_s - before_s
        else:
            self.busy_s += self.copy_s
            return
        kept = 1 - 1 / _COPIES
        self._measured_s, self._measured = kept * self._measured_s + took_s, kept * self._measured + 1
        self.busy_s += took_s
