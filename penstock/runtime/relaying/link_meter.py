"""Measures how many bytes a second the link of a root takes (docs/papers.md: W5).

The CPU time of a send says nothing of a slow link, because the network takes the bytes later. When the receipts of
relays come says as little, because a relay may have waited for a processor. So the meter asks the system, whose
acknowledgements wait for no process. At each look, a connection is *full* if bytes wait because the network takes no
more at present. While connections are full, what all connections carry together is what the link takes. While none is,
nothing is known but that the link takes at least what they carry.

The rate is remembered, because a root that sends less for a while should not forget that its link is slow. After
`memory_s` without a full connection the rate is unknown again, because routes change.

The meter knows no clock: times are given, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from penstock.runtime.transport.base import LinkLoad

# A look weighs as much as what was known before when so much time has passed.
_HALF_S = 0.2

_NOTHING = LinkLoad(0, 0.0, False, 0.0)


class LinkMeter:
    """See the module's docstring. `full`: whether a connection was full at the last look."""

    def __init__(self, memory_s: float = 300.0) -> None:
        self.full = False
        self._memory_s = memory_s
        self._rate = 0.0  # bytes/s; 0: unknown
        self._full_s = -math.inf  # when a connection was full for the last time
        self._seen_s = -math.inf
        self._before: Mapping[int, LinkLoad] = {}

    def rate(self, now_s: float) -> float:
        """Returns how many bytes a second the link takes; infinite: unknown."""
        known = self._rate and now_s - self._full_s <= self._memory_s
        return self._rate if known else math.inf

    def look(self, now_s: float, links: Mapping[int, LinkLoad]) -> None:
        """Takes in the system's figures of the connections to the root's children."""
        elapsed_s = now_s - self._seen_s
        if elapsed_s <= 0:
            return
        if elapsed_s == math.inf:  # nothing to compare with
            self._seen_s, self._before = now_s, dict(links)
            return
        carried = could = 0.0  # bytes/s: what the connections carried, and what they could have
        full = full_before = False
        for peer, load in links.items():
            before = self._before.get(peer)
            if before is None or load.acknowledged < before.acknowledged:  # another connection
                before = _NOTHING
                moved = 0.0
            else:
                moved = (load.acknowledged - before.acknowledged) / elapsed_s
            # Bytes that wait for the peer say nothing of the link.
            waits = load.full and load.held_s - before.held_s <= elapsed_s / 2
            full |= waits
            full_before |= waits and before.full
            carried += moved
            could += max(moved, load.rate) if waits else moved
        # A link that was full at both looks is taken to have been full all the time.
        rate = carried if full_before else could
        self.full = full
        self._seen_s, self._before = now_s, dict(links)
        if self.full and now_s - self._full_s > self._memory_s:
            self._rate = rate
        elif self.full or rate > self._rate > 0:
            self._rate += (1 - 0.5 ** (elapsed_s / _HALF_S)) * (rate - self._rate)
        if self.full:
            self._full_s = now_s
