"""The costs that a change of the tree may have: Theorems 4 and 5 of the paper (docs/papers.md: W6).

Theorem 4 says how long a switch may take before the root's queue overflows. It takes the worst case, in which the root
sends nothing during the switch. The paper's own switch of 126 ms breaks this bound at the rates of its figures. In
Penstock the root goes on sending, and nothing overflows.

Theorem 5 says how many records must come before a switch to a quicker tree has paid for itself: X > g g' T / (g - g'),
where g' and g are the multicast rates before and after, and T is the time of the switch. (The proof has X / (g + T) and
means X / g + T.) The *multicast rate* is the number of records a second that reach all nodes if each is sent after the
last node has the one before. The paper counts the destinations of these records instead; then X counts them too, and
both sides of the inequality grow by the same factor.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from penstock.runtime.multicast.reach import units_to_reach

if TYPE_CHECKING:
    from penstock.runtime.multicast.queue_model import Cost


def longest_switch_s(capacity: float, queued: float, rate: float) -> float:
    """Returns the time that a switch must stay below so that the queue cannot overflow (Theorem 4)."""
    room = max(0.0, capacity - queued)
    return room / rate if rate > 0 else math.inf


def multicast_rate(destinations: int, limit: int, cost: Cost) -> float:
    """Returns how many records a second reach all destinations of a non-blocking tree, one record after the other."""
    return 1 / (units_to_reach(destinations, limit) * cost.copy_s + cost.encode_s) if destinations else math.inf


def records_to_pay(before: float, after: float, switch_s: float) -> float:
    """Returns the number of records that must exceed for a switch between two multicast rates to pay (Theorem 5). It
    is infinite when the new rate is not higher."""
    return before * after * switch_s / (after - before) if after > before else math.inf
