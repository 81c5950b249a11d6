"""The servers that an entry passes on its way along a tree, and the entries a second that each of them lets through
(docs/papers.md: W4).

- *The root's thread* takes the time of the queue model (queue_model.py), of the part of all time for which it gets a
  processor at all.
- *The root's link* takes a copy for each child. Bytes leave it while the thread does other things.
- *The credit windows.* No more than these may be under way. A longer way has more of them, but not without end. So a
  long chain may carry less than a tree whose root is busier.

A tree carries what the narrowest server does. A lower limit relieves the thread and the link, and makes the way longer.
Figures that are not known do not count: such a server lets everything through.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from penstock.runtime.multicast.queue_model import Affordable, Cost, affordable_limit
from penstock.runtime.multicast.reach import units_to_reach

# Receivers grant credit in lots, so a part of the windows is always on its way back.
_GRANTED = 0.85


@dataclass(frozen=True)
class Servers:
    """See the module's docstring. `pace`: the part of the time that the thread gets a processor when it wants one;
    `link_s`: what a copy takes of the link; `window`: the entries of a credit window, of which a way has one for each
    link and `windows_most` at most; `hop_s`: how long an entry takes from one relay to the next. 0: unknown."""

    cost: Cost
    pace: float = 1.0
    link_s: float = 0.0
    window: float = 0.0
    windows_most: int = 1
    hop_s: float = 0.0

    def by_windows(self, limit: int, destinations: int) -> float:
        """Returns how many entries a second the credit windows let through on the longest way of a tree."""
        hops = units_to_reach(destinations, limit)
        if not self.window * self.hop_s * hops:
            return math.inf
        return _GRANTED * self.window * min(hops + 1, self.windows_most) / (hops * self.hop_s)

    def rate(self, limit: int, destinations: int) -> float:
        """Returns how many entries a second a tree carries."""
        thread = self.pace / self.cost.record_s(limit)
        link = 1 / (limit * self.link_s) if self.link_s else math.inf
        return min(thread, link, self.by_windows(limit, destinations))

    def affordable(self, rate: float, capacity: float, most: int) -> Affordable:
        """Returns how many children the root's thread and its link can afford at a rate (W4's d*)."""
        found = affordable_limit(rate / self.pace, self.cost, capacity, most)
        if self.link_s:
            by_link = affordable_limit(rate, Cost(self.link_s), capacity, most)
            found = min(found, by_link, key=lambda one: one.exact)
        return found

    def widest(self, limits: Collection[int], destinations: int, gain: float) -> int:
        """Returns which of some limits carries most. One that carries less by a part `gain` at most is as good, and of
        those that are, the highest reaches the last node soonest."""
        rates = {limit: self.rate(limit, destinations) for limit in limits}
        most = max(rates.values())
        return max(limit for limit, rate in rates.items() if rate >= (1 - gain) * most)
