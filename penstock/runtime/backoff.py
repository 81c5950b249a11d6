"""How long to wait before something that has failed is tried again.

Whoever tries again at once, and again, takes from others the processor or the network that they need to recover.
Whoever always waits long makes a short failure a long one. So the first wait is short, each wait is twice as long as
the one before, up to a limit, and after a success the first wait counts again.

The run loop, which waits for room in a ring, doubles its wait by itself: it forgets the wait in every pass that has
done something, and a call there would cost more than the rest of the line.
"""

from __future__ import annotations


class Backoff:
    """The waits of one thing that is tried again. It counts failures, and knows no clock."""

    __slots__ = ("_failures", "_first_s", "_free", "_most_s")

    def __init__(self, first_s: float, most_s: float, *, free: int = 0) -> None:
        """`free`: so many failures in a row need no wait."""
        self._first_s = first_s
        self._most_s = most_s
        self._free = free
        self._failures = 0  # since the last success

    def failed(self) -> float:
        """Counts a failure. Returns how many seconds to wait before the next try."""
        doublings = self._failures - self._free
        self._failures += 1
        if doublings < 0:
            return 0.0
        return min(self._most_s, self._first_s * 2.0 ** min(doublings, 60))  # 2.0**1024 is no float

    def succeeded(self) -> None:
        """Lets the next failure count as the first."""
        self._failures = 0
