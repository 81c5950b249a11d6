"""How many children the root can afford: its queue of records as an M/D/1 queue (docs/papers.md: W4).

Records arrive at random times (M), each takes the same time (D), and one thread (1) sends them. A record is encoded
once (t_s) and then sent once to each child (t_d each), so with d children the root processes 1 / (d t_d + t_s) records
a second (the paper's section 4). Without t_s this is the paper's Eq. 1, with t_e for t_d. The paper's thread does
nothing else. Penstock's also makes the records, in the functions of users, so what this takes (t_o) is part of the time
of a record: 1 / (d t_d + t_s + t_o).

The *load* of the root is the part of its time that arriving records take. The expected queue (Eq. 2) stays within the
capacity Q as long as the load is at most Q + 1 - sqrt(Q^2 + 1). Eq. 3 as printed has the wrong sign before its root,
and Eq. 5 has the right one. The code uses 2Q / (Q + 1 + sqrt(Q^2 + 1)), which is the same and subtracts no two large
numbers: the difference is 0 for a Q of 1e16.

Rate, times and capacity must be in one unit: all for a record, or all for a message of a fixed size. The time of a
record falls when batches grow, so a mix of both is wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# A limit that is within this part of the next whole number is that number. The inputs are measured, and a rate that is
# exactly affordable must not lose a child to rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Cost:
    """The cost of a record for the node that sends it, in seconds: `copy_s` for each child, and once `encode_s` and
    `other_s`, which is for all other work of the thread."""

    copy_s: float
    encode_s: float = 0.0
    other_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.copy_s < math.inf and 0 <= self.encode_s < math.inf and 0 <= self.other_s < math.inf):
            raise ValueError(f"{self}: a copy must take more than 0 s, and encoding and other work 0 s or more")

    def record_s(self, children: int) -> float:
        """Returns the cost of a record with a number of children."""
        return children * self.copy_s + self.encode_s + self.other_s


@dataclass(frozen=True)
class Affordable:
    """The answer of the model. `exact` is the limit before it is rounded down; below 1, not even one child can be
    afforded, and the root is overloaded whatever the tree."""

    limit: int
    exact: float

    @property
    def overloaded(self) -> bool:
        """Whether the root cannot keep up even with one child."""
        return self.exact < 1 - _ROUNDING


def greatest_load(capacity: float) -> float:
    """Returns the greatest load at which the expected queue is within the capacity: below 1, and close to 1 for a long
    queue."""
    if not 0 < capacity < math.inf:
        raise ValueError(f"a queue of capacity {capacity} is no queue; it must be above 0 and finite")
    return 2 * capacity / (capacity + 1 + math.hypot(capacity, 1))


def affordable_limit(rate: float, cost: Cost, capacity: float, most: int) -> Affordable:
    """Returns the best out-degree limit d* at a rate (Eq. 3): a whole number from 1 to `most`."""
    if not 0 <= rate < math.inf:
        raise ValueError(f"a rate of {rate} records a second")
    if most < 1:
        raise ValueError(f"the greatest out-degree limit must be 1 or more, not {most}")
    once_s = cost.encode_s + cost.other_s
    exact = (greatest_load(capacity) / rate - once_s) / cost.copy_s if rate else math.inf
    if exact >= most:
        return Affordable(most, exact)
    return Affordable(max(1, math.floor(exact + _ROUNDING * max(1.0, exact))), exact)
