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
- A scale-up can wait. A higher limit must be affordable at a rate that is `margin` higher than the smoothed one, now
  and before a pause, and at the highest rate of the last `memory_s` seconds. Without the first, a rate between two
  limits would change the tree again and again, and so would pauses. Without the second, each burst would change it
  twice.
- A higher limit must pay within `horizon_s` by Theorem 5 (switch_cost.py). So an idle root leaves its tree as it is.
- What is counted is what comes through. While the root's thread has no idle time, or sources wait, this says nothing of
  the load that is offered, and the queue of a busy thread need not grow: the sources stand in front of it. So when this
  has been so for `long_s`, the load has *outgrown* the tree, and the limit becomes the one with which the root carries
  most (servers.py), in one step. A load that the tree has carried may only be catching up after a pause
  (`catching_up_s`). When the sources have caught up, the load is known, and a scale-up finds the limit for it. Less
  than `gain` is no reason for a change, since long chains are slow.
- A change after which less comes through is undone (limit_trials.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from penstock.runtime.multicast.reach import binomial_degree
from penstock.runtime.multicast.servers import Servers
from penstock.runtime.multicast.switch_cost import multicast_rate, records_to_pay
from penstock.runtime.units import Seconds

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.runtime.multicast.load_monitor import Load, LoadMonitor


# Sources that wait do not wait for the root, if less comes through than this part of what it could send.
_EXPLAINED = 0.75


@dataclass(frozen=True)
class AdjustmentOptions:
    """Says when a tree gets another out-degree limit. Durations are in seconds, or timedeltas. The first five and
    `busy` are for the LoadMonitor."""

    interval_s: Seconds = Seconds(0.1)  # between two looks at the queue
    alpha: float = 0.8  # the weight of the past in measurements
    early: float = 0.1  # the part of the interval after which the root may look again at a queue that grows
    memory_s: Seconds = Seconds(2.0)  # for how long a high rate keeps the limit down
    long_s: Seconds = Seconds(0.5)  # for how long a tree must be too narrow for the load
    down: float = 0.8  # of the room below the warning line that the queue took in one interval
    up: float = 0.6  # of the queue that went away in one interval
    warning: float = 0.9  # of the capacity
    margin: float = 0.1
    horizon_s: Seconds = Seconds(10.0)
    pause_s: Seconds = Seconds(0.5)  # for which a source may stand still without consequences
    catch_up_s: Seconds = Seconds(3.0)  # that its catching up may take at most
    busy: float = 0.95  # the part of its time from which on a thread has no idle time
    gain: float = 0.03  # that is no reason for a change
    trial_s: Seconds = Seconds(4.0)  # for how long a change is on trial
    chance: float = 0.1  # by which part fewer entries may come through after a change
    refused_s: Seconds = Seconds(300.0)  # for how long a limit is not tried again that made things worse


class Sign(str, Enum):
    """The direction in which the queue points."""

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
    """Returns the sign of two looks at the queue."""
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


def catching_up_s(load: Load, options: AdjustmentOptions) -> float:
    """Returns the seconds for which the root catches up when its sources have stood still for `pause_s`, and the load
    is the same as before: with half of what the root carries, as long as the pause was, and with nearly all of it,
    long."""
    if not load.long_rate:
        return options.catch_up_s
    part = load.calm_rate / load.long_rate
    return min(options.catch_up_s, options.pause_s * part / (1 - part)) if part < 1 else options.catch_up_s


def decide(
    load: Load,
    limit: int,
    destinations: int,
    capacity: float,
    switch_s: float,
    options: AdjustmentOptions,
    servers: Servers | None = None,
    refused: Collection[int] = (),
) -> Verdict:
    """Decides which limit a tree with a number of destinations should have, which has `limit` now. `switch_s`: how long
    a switch takes; `servers`: what entries pass, else the root's thread alone; `refused`: limits that are not to be
    tried."""
    if servers is None:
        servers = Servers(load.cost, load.pace)
    most = max(1, binomial_degree(destinations))  # a higher limit is the same tree
    verdict = _decided(load, min(limit, most), most, destinations, capacity, switch_s, options, servers, refused)
    return replace(verdict, limit=limit) if verdict.limit == min(limit, most) else verdict


def _decided(
    load: Load,
    limit: int,
    most: int,
    destinations: int,
    capacity: float,
    switch_s: float,
    options: AdjustmentOptions,
    servers: Servers,
    refused: Collection[int],
) -> Verdict:
    allowed = [one for one in range(1, most + 1) if one == limit or one not in refused]
    if load.outgrown:
        return _outgrown(load, limit, servers, allowed, destinations, options)
    if load.busy >= options.busy:
        return Verdict(limit, "the root's thread has no idle time at the moment")
    sign = sign_of(load.queued_before, load.queued, capacity, options)
    if sign is Sign.DOWN:
        rate = max(load.rate, load.last_rate)
        best = servers.affordable(rate, capacity, most)
        verdict = _down(rate, limit, best.limit, best.overloaded)
        if verdict.limit < limit and servers.by_windows(verdict.limit, destinations) < rate:
            return replace(verdict, limit=servers.widest(allowed, destinations, options.gain))
        return verdict
    best = servers.affordable(load.rate, capacity, most)
    if sign is Sign.UP and best.limit > limit:
        rate = max(max(load.rate, load.highest_smoothed) * (1 + options.margin), load.highest_rate)
        roomy = servers.affordable(rate, capacity, most).limit
        roomy = max(one for one in allowed if one <= max(roomy, limit))
        cost = replace(load.cost, copy_s=max(load.cost.copy_s, servers.link_s))
        return _up(replace(load, cost=cost), limit, roomy, destinations, switch_s, options)
    return Verdict(limit, "the queue is steady" if sign is Sign.NONE else "no more is affordable", best.overloaded)


def _outgrown(
    load: Load, limit: int, servers: Servers, allowed: list[int], destinations: int, options: AdjustmentOptions
) -> Verdict:
    """The verdict on a tree that carries less than is offered."""
    carries = servers.rate(limit, destinations)
    entries = f"{load.long_rate:,.0f} entries/s"
    if load.long_rate < _EXPLAINED * carries:
        return Verdict(limit, f"the sources wait at {entries}, and the root could send {carries:,.0f}")
    widest = servers.widest(allowed, destinations, options.gain)
    if servers.rate(widest, destinations) <= (1 + options.gain) * carries:
        return Verdict(limit, f"no tree carries more than {entries}; the sources wait", True)
    return Verdict(widest, f"more is offered than {entries}, and trees with a limit of {widest} carry most")


def _down(rate: float, limit: int, best: int, overloaded: bool) -> Verdict:
    """The verdict on a tree whose queue grows."""
    entries = f"{rate:,.0f} entries/s"
    if overloaded:
        return Verdict(1, f"{entries} are more than one child can be sent; the sources wait", True)
    if best >= limit:
        return Verdict(limit, f"{limit} children are affordable at {entries}")
    return Verdict(best, f"the queue grows, and {best} children are affordable at {entries}")


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
