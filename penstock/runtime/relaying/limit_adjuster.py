"""Adjusts the out-degree limit of a root's trees to its load (docs/papers.md: W5, W6).

What an entry passes are the root's thread, which also runs functions of users, the link of its machine (link_meter.py),
and the credit windows on its way (multicast/servers.py). The queue are the entries that the root's children do not have
yet. So a slow task is not taken for a slow link: its relay has the entry. What waits in front of the root is not in
this queue, so a load has also outgrown the tree when the thread has had no idle time for long, or when a log has waited
for credit or room at all looks. All figures count entries. The capacity is what the credit windows allow, in entries of
the present size.

A tree of relays costs a hop more. It pays when it saves copies, which it does not where each node has one worker and
the nodes are few. Then it pays only while the link is too short for a copy to each worker (`crowded`).

A limit of 1 makes the longest way to the last node, and only the highest rates need it. A source that has stood still
sends at such a rate for a moment. So the limit becomes 1 only when a second look says so, an interval after the first
one at least, and the queue has not shrunk meanwhile.

Theorem 4 is watched at each switch, with the queue and the rate at its announcement: `overrun_s` adds up by how much
switches took longer than the queue then had room for. The paper's sender, which sends nothing during a switch, would
have to make its sources wait so long. Nothing is looked at while nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from penstock.runtime.multicast.limit_trials import LimitTrials
from penstock.runtime.multicast.load_monitor import Counters, Load, LoadMonitor
from penstock.runtime.multicast.self_adjustment import (
    AdjustmentOptions,
    Sign,
    Verdict,
    catching_up_s,
    decide,
    look_is_due,
    sign_of,
)
from penstock.runtime.multicast.servers import Servers
from penstock.runtime.multicast.switch_cost import longest_switch_s
from penstock.runtime.relaying.link_meter import LinkMeter
from penstock.runtime.status import TreeLoad
from penstock.runtime.transport.base import LinkLoad

#: What a switch is taken to cost before the first one has been measured.
_SWITCH_S = 0.01
# Of the mean size of entries, and of the mean time of a hop.
_SIZE_WEIGHT = 0.05
_HOP_WEIGHT = 0.05


class Streams(NamedTuple):
    """The state of a root's streams at a look. `queued`: the entries that a child does not have yet; `window_bytes`:
    how many bytes may be under way to the children; `encoding_s`: the processor time that encodings have taken so far;
    `limit`: of the trees, which have at most so many `nodes`; `waiting`: whether a log cannot send what it has;
    `credit_bytes`: a credit window of each stream, of which a way has `windows_most` at most."""

    queued: int
    window_bytes: int
    encoding_s: float
    limit: int
    nodes: int
    waiting: bool = False
    credit_bytes: int = 0
    windows_most: int = 1


class ThreadTimes(NamedTuple):
    """The processor time of the root's thread so far, and for how long it has waited for a processor, in seconds."""

    used_s: float = 0.0
    core_wait_s: float = 0.0


class LimitAdjuster:
    """See the module's docstring. Times are in seconds."""

    def __init__(self, options: AdjustmentOptions | None = None) -> None:
        self.meter = LinkMeter()
        self.verdict: Verdict | None = None
        self.crowded = False  # whether the link is too short for a copy to each worker
        self.overrun_s = 0.0
        self._options = options or AdjustmentOptions()
        given = self._options
        self._monitor = LoadMonitor(
            given.interval_s, given.alpha, given.early, given.memory_s, given.long_s, given.busy
        )
        self._trials = LimitTrials(given.trial_s, given.refused_s, given.chance)
        self._looked_s = -math.inf  # at links without a tree
        self._free_s = -math.inf  # when no log waited, or the tree was another one, for the last time
        self._wide_s = -math.inf  # when the tree was wide enough for the last time
        self._hop_s = 0.0
        self._lowest_s: float | None = None  # when a look was for a limit of 1; None: the queue has shrunk since
        self._arrived = 0
        self._copies = 0
        self._sending_s = 0.0
        self._size = 0.0
        self._switch_s = _SWITCH_S
        self._load: Load | None = None
        self._servers: Servers | None = None

    def sent(self, copies: int, size: int, seconds: float) -> None:
        """The root has sent `copies` copies of an entry of `size` bytes, with this much processor time."""
        self._arrived += 1
        self._copies += copies
        self._sending_s += seconds
        self._size += _SIZE_WEIGHT * (size - self._size) if self._size else size

    def sent_later(self, seconds: float) -> None:
        """The root has sent copies that had waited for room, which took its processor so long."""
        self._sending_s += seconds

    def hop(self, seconds: float) -> None:
        """An entry has taken so long from one relay to the next. One that was under way while the root stood still
        counts little."""
        known_s = self._hop_s or seconds
        self._hop_s = known_s + _HOP_WEIGHT * (min(seconds, 2 * known_s) - known_s)

    def longest_switch_s(self, queued: int, window_bytes: int) -> float:
        """Returns how long a switch that begins now may take, by Theorem 4."""
        rate = 0.0 if self._load is None else self._load.rate
        return longest_switch_s(self._capacity(window_bytes), queued, rate)

    def switched(self, seconds: float, longest_s: float) -> None:
        """A switch took so long. `longest_s`: what `longest_switch_s` said when it began."""
        self._switch_s = seconds
        self.overrun_s += max(0.0, seconds - longest_s)

    def may_look(self, now_s: float) -> bool:
        """Returns whether it may be time to look at the queue. The root asks before it finds out how long that is."""
        return self._monitor.glance_is_due(now_s)

    def look_at_links(self, now_s: float, links: Callable[[], Mapping[int, LinkLoad]]) -> bool:
        """Looks at the connections of a root without trees, if it is time. Returns whether it has become crowded."""
        if self.crowded or now_s - self._looked_s < self._options.interval_s:
            return False
        self._looked_s = now_s
        was_full = self.meter.full
        self.meter.look(now_s, links())
        self.crowded = was_full and self.meter.full
        return self.crowded

    def look(
        self,
        now_s: float,
        streams: Streams,
        links: Callable[[], Mapping[int, LinkLoad]],
        thread: Callable[[], ThreadTimes] = ThreadTimes,
    ) -> int | None:
        """Looks at the queue, if it is time. Returns the limit that the trees should have, or None for the one that
        they have. `links`: tells the load of the connections to relays; `thread`: what the thread has done."""
        queued, limit, nodes = streams.queued, streams.limit, streams.nodes
        options, monitor = self._options, self._monitor
        capacity = self._capacity(streams.window_bytes)
        if not look_is_due(monitor, now_s, self._arrived, queued, capacity, options):
            return None
        self.meter.look(now_s, links())
        # Entries without records are not encoded, and count with what they cost: nothing.
        counters = Counters(
            self._arrived,
            self._copies,
            self._sending_s,
            self._arrived,
            streams.encoding_s,
            *thread(),
        )
        if not streams.waiting:
            self._free_s = now_s
        load = monitor.look(now_s, counters, queued, streams.waiting)
        if load is None or not nodes:
            return None
        load = self._load = replace(load, outgrown=self._outgrown(now_s, load))
        servers = self._servers = self._found(now_s, load, streams)
        former = self._trials.undone(now_s, limit, load.long_rate, load.pace) if load.outgrown else None
        if former is None:
            self.verdict = self._decide(now_s, load, servers, streams, capacity)
        else:
            self.verdict = Verdict(former, f"{load.long_rate:,.0f} entries/s are less than with a limit of {former}")
        if self.crowded or self.meter.full:
            rate = max(load.rate * (1 + options.margin), load.highest_rate)
            self.crowded = servers.affordable(rate, capacity, nodes).exact < nodes
        if self.verdict.limit == limit:
            return None
        if former is None:
            rate = load.long_rate if load.outgrown else load.rate
            self._trials.changed(now_s, limit, self.verdict.limit, rate, load.pace)
        self._free_s = now_s
        monitor.begin_anew()
        return self.verdict.limit

    def _outgrown(self, now_s: float, load: Load) -> bool:
        """Whether the load has outgrown the tree, and the sources are not only catching up."""
        options = self._options
        waits = now_s - self._free_s >= options.long_s
        if not load.long_rate or not (waits or load.long_busy >= options.busy):
            self._wide_s = now_s
        return now_s - self._wide_s > catching_up_s(load, options)

    def _found(self, now_s: float, load: Load, streams: Streams) -> Servers:
        # The load is smoothed. What a copy takes of the link is not, because it is known only when the link is full.
        link_s = self._size / self.meter.rate(now_s)
        window = streams.credit_bytes / self._size if self._size else 0.0
        return Servers(load.cost, load.pace, link_s, window, streams.windows_most, self._hop_s)

    def _decide(self, now_s: float, load: Load, servers: Servers, streams: Streams, capacity: float) -> Verdict:
        limit, options = streams.limit, self._options
        rate = math.inf if load.outgrown else max(load.highest_smoothed, load.highest_rate)
        refused = self._trials.refused(now_s, rate)
        verdict = decide(load, limit, streams.nodes, capacity, self._switch_s, options, servers, refused)
        sign = sign_of(load.queued_before, load.queued, capacity, options)
        return verdict if load.outgrown else self._twice(now_s, verdict, limit, sign)

    def _twice(self, now_s: float, verdict: Verdict, limit: int, sign: Sign) -> Verdict:
        """Returns a verdict, or one for the present limit when the verdict is for a limit of 1 and too early."""
        if sign is Sign.UP:
            self._lowest_s = None
        if not verdict.limit == 1 < limit:
            return verdict
        if self._lowest_s is None:
            self._lowest_s = now_s
        if now_s - self._lowest_s >= self._options.interval_s:
            return verdict
        return replace(verdict, limit=limit, reason=f"{verdict.reason}, if a later look says so too")

    def _capacity(self, window_bytes: int) -> float:
        return max(2.0, window_bytes / self._size) if self._size else 2.0

    def status(self) -> TreeLoad:
        """Returns the measured load."""
        load, servers, verdict = self._load, self._servers, self.verdict
        if load is None or servers is None or verdict is None:
            return TreeLoad(overrun_s=self.overrun_s)
        return TreeLoad(
            overrun_s=self.overrun_s,
            reason=verdict.reason,
            overloaded=verdict.overloaded,
            rate=load.rate,
            copy_us=max(load.cost.copy_s, servers.link_s) * 1e6,
            encode_us=load.cost.encode_s * 1e6,
            other_us=load.cost.other_s * 1e6,
            busy=load.long_busy,
        )
