"""Decides when the tree should get another out-degree limit (docs/papers.md: W5).

The root's queue is watched. Two signs call for a change:

- *Negative scale-down*: the queue grows, and what it grew by is a large part of what is left up to the warning line.
- *Active scale-up*: the queue shrinks, and what it shrank by is a large part of what it was; or it is empty at two
  looks in a row.

The sign only says that it is time to ask. What the limit should be is the answer of the queue model (queue_model.py),
so the limit does not creep up and down by ones. Penstock adds to the paper's rules:

- A queue that is full cannot grow, because the sources wait. It counts as one that grows.
- A scale-down cannot wait: at 80,000 records/s and five children, a queue of 1,024 records is full after 25 ms. So the
  root looks as soon as the queue says so (`look_is_due`), not at the end of the interval, and the limit is what the
  model affords at the smoothed rate or at the last rate (load_monitor.py), whichever is higher.
- A scale-up can wait. A higher limit must be affordable at a rate that is `margin` higher than the smoothed one, and at
  the highest rate of the last `memory_s` seconds. Without the first, a rate between two limits would change the tree
  again and again, and without the second, each burst would change it twice.
- A higher limit must pay within `horizon_s` by Theorem 5 (switch_cost.py). So an idle root leaves its tree as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from penstock.runtime.multicast.queue_model import Affordable, affordable_limit
from penstock.runtime.multicast.reach import binomial_degree
from penstock.runtime.multicast.switch_cost import multicast_rate, records_to_pay
from penstock.runtime.units import Seconds

if TYPE_CHECKING:
    from penstock.runtime.multicast.load_monitor import Load, LoadMonitor


@dataclass(frozen=True)
class AdjustmentOptions:
    """Says when a tree gets another out-degree limit. Durations are in seconds, or timedeltas. The first four are for
    the LoadMonitor."""

    interval_s: Seconds = Seconds(0.1)  # between two looks at the queue
    alpha: float = 0.8  # the weight of the past in measurements
    early: float = 0.1  # the part of the interval after which the root may look again at a queue that grows
    memory_s: Seconds = Seconds(2.0)  # for how long a high rate keeps the limit down
    down: float = 0.8  # of the room below the warning line that the queue took in one interval
    up: float = 0.6  # of the queue that went away in one interval
    warning: float = 0.9  # of the capacity
    margin: float = 0.1
    horizon_s: Seconds = Seconds(10.0)


class Sign(str, Enum):
    """What the queue says."""

    DOWN = "down"
    UP = "up"
    NONE = "none"


@dataclass(frozen=True)
class Verdict:
    """Which limit the tree should have, with the reason for people. `overloaded`: the root cannot keep up with any
    tree, so its sources wait."""

    limit: int
    reason: str
    overloaded: bool = False


def sign_of(queued_before: float, queued: float, capacity: float, options: AdjustmentOptions) -> Sign:
    """Returns what two looks at the queue say."""
    if queued > queued_before or queued >= capacity:
        to_line = options.warning * capacity - queued
        grown = queued - queued_before
        return Sign.DOWN if to_line <= 0 or grown >= options.down * to_line else Sign.NONE
    if queued == queued_before:
        return Sign.NONE if queued else Sign.UP
    return Sign.UP if queued_before - queued >= options.up * queued_before else Sign.NONE


def look_is_due(
    monitor: LoadMonitor, now_s: float, arrived: int, queued: int, capacity: float, options: AdjustmentOptions
) -> bool:
    """Returns whether the root should look now: when the interval is over, or earlier when the queue calls for a
    scale-down. The root asks often, at best each time before it takes in what has come."""
    if monitor.seen is None:
        return True
    looked_s, queued_before = monitor.seen
    if now_s - looked_s >= options.interval_s:
        return True
    monitor.glance(now_s, arrived, queued)
    return now_s - looked_s >= monitor.early_s and sign_of(queued_before, queued, capacity, options) is Sign.DOWN


def decide(
    load: Load, limit: int, destinations: int, capacity: float, switch_s: float, options: AdjustmentOptions
) -> Verdict:
    """Decides which limit a tree of so many destinations should have, which has `limit` now. `switch_s`: how long a
    switch takes."""
    most = max(1, binomial_degree(destinations))  # a higher limit is the same tree
    sign = sign_of(load.queued_before, load.queued, capacity, options)
    if sign is Sign.DOWN:
        rate = max(load.rate, load.last_rate)
        return _down(rate, min(limit, most), affordable_limit(rate, load.cost, capacity, most))
    best = affordable_limit(load.rate, load.cost, capacity, most)
    if sign is Sign.UP and best.limit > limit:
        rate = max(load.rate * (1 + options.margin), load.highest_rate)
        roomy = affordable_limit(rate, load.cost, capacity, most).limit
        return _up(load, limit, roomy, destinations, switch_s, options)
    return Verdict(limit, "the queue is steady" if sign is Sign.NONE else "no more is affordable", best.overloaded)


def _down(rate: float, limit: int, best: Affordable) -> Verdict:
    """The verdict on a tree whose queue grows."""
    entries = f"{rate:,.0f} entries/s"
    if best.overloaded:
        return Verdict(1, f"{entries} are more than one child can be sent; the sources wait", True)
    if best.limit >= limit:
        return Verdict(limit, f"{limit} children are affordable at {entries}")
    return Verdict(best.limit, f"the queue grows, and {best.limit} children are affordable at {entries}")


def _up(load: Load, limit: int, roomy: int, destinations: int, switch_s: float, options: AdjustmentOptions) -> Verdict:
    """The verdict on a tree whose queue shrinks or is empty."""
    if roomy <= limit:
        return Verdict(limit, f"{limit + 1} children would be affordable only just")
    before = multicast_rate(destinations, limit, load.cost)
    after = multicast_rate(destinations, roomy, load.cost)
    if not after > before:
        return Verdict(limit, f"{roomy} children would not reach the last node sooner")
    needed, expected = records_to_pay(before, after, switch_s), load.rate * options.horizon_s
    if not expected > needed:
        return Verdict(limit, f"{roomy} children would pay after {needed:,.0f} entries; {expected:,.0f} are expected")
    return Verdict(roomy, f"the queue is short, and {roomy} children are affordable at {load.rate:,.0f} entries/s")
