"""Adjusts the out-degree limit of a root's trees to its load (docs/papers.md: W5, W6).

The server of the queue model is what the root sends with: its processor, and the link of its machine. The queue are the
entries that the root's children do not have yet. So a slow task is not taken for a slow link: its relay has the entry.
All figures count entries. The capacity is what the credit windows allow, in entries of the present size.

Theorem 4 is watched at each switch: where a switch takes longer than the queue has room for, the sources wait, and
`waited_s` adds up for how long. Nothing is looked at while nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.runtime.multicast.link_meter import LinkMeter
from penstock.runtime.multicast.load_monitor import Counters, LoadMonitor
from penstock.runtime.multicast.reach import binomial_degree
from penstock.runtime.multicast.self_adjustment import AdjustmentOptions, Verdict, decide, look_is_due
from penstock.runtime.multicast.switch_cost import wait_s

#: What a switch is taken to cost before the first one has been measured.
_SWITCH_S = 0.01
# Of the mean size of entries.
_SIZE_WEIGHT = 0.05


class LimitAdjuster:
    """See the module's docstring. Times are in seconds."""

    def __init__(self, options: AdjustmentOptions | None = None) -> None:
        self.meter = LinkMeter()
        self.verdict: Verdict | None = None
        self.waited_s = 0.0
        self._options = options or AdjustmentOptions()
        self._monitor = LoadMonitor(
            self._options.interval_s, self._options.alpha, self._options.early, self._options.memory_s
        )
        self._arrived = 0
        self._copies = 0
        self._sending_s = 0.0
        self._size = 0.0
        self._switch_s = _SWITCH_S
        self._load: dict[str, float] = {}

    def sent(self, copies: int, size: int, seconds: float) -> None:
        """The root has sent an entry of `size` bytes to so many children, which took its processor so long."""
        self._arrived += 1
        self._copies += copies
        self._sending_s += seconds
        self._size += _SIZE_WEIGHT * (size - self._size) if self._size else size

    def switched(self, seconds: float, queued: int, window_bytes: int) -> None:
        """A switch took so long."""
        self._switch_s = seconds
        rate = self._load.get("rate", 0.0)
        self.waited_s += wait_s(seconds, self._capacity(window_bytes), queued, rate)

    def look(
        self, now_s: float, queued: int, window_bytes: int, encoded: int, encoding_s: float, limit: int, nodes: int
    ) -> int | None:
        """Looks at the queue, if it is time. Returns the limit that the trees should have, or None for the one that
        they have. `encoded`, `encoding_s`: how many entries were encoded so far, and how long that took. `limit`: of
        the trees, which have so many destinations."""
        options, monitor = self._options, self._monitor
        capacity = self._capacity(window_bytes)
        if not look_is_due(monitor, now_s, self._arrived, queued, capacity, options):
            return None
        # The meter knows what the copies with receipts took of the link. The processor's share is that of these copies.
        meter = self.meter
        processor_s = self._sending_s * meter.copies / self._copies if self._copies else 0.0
        counters = Counters(self._arrived, meter.copies, max(processor_s, meter.busy_s), encoded, encoding_s)
        load = monitor.look(now_s, counters, queued)
        if load is None or not nodes:
            return None
        self._load = {"rate": load.rate, "copy_us": load.cost.copy_s * 1e6, "encode_us": load.cost.encode_s * 1e6}
        self.verdict = decide(load, limit, nodes, capacity, self._switch_s, options)
        return self.verdict.limit if self.verdict.limit != limit else None

    def _capacity(self, window_bytes: int) -> float:
        return max(2.0, window_bytes / self._size) if self._size else 2.0

    def status(self) -> dict[str, Any]:
        """Returns what is known of the load, as plain data."""
        verdict = self.verdict
        return {
            **self._load,
            "waited_s": self.waited_s,
            "reason": "" if verdict is None else verdict.reason,
            "overloaded": verdict is not None and verdict.overloaded,
        }


class LimitToggle(LimitAdjuster):
    """Changes the limit every `every_s` seconds in which something is sent, between 1 and none, whatever the load: the
    trees are chains, and binomial ones, in turn."""

    def __init__(self, every_s: float) -> None:
        super().__init__()
        self._every_s = every_s
        self._due_s = 0.0

    def look(
        self, now_s: float, queued: int, window_bytes: int, encoded: int, encoding_s: float, limit: int, nodes: int
    ) -> int | None:
        """See LimitAdjuster."""
        if now_s < self._due_s:
            return None
        self._due_s = now_s + self._every_s
        other = binomial_degree(nodes) if limit == 1 else 1
        return None if other == limit else other


@dataclass(frozen=True)
class TreeOptions:
    """Which out-degree limit the trees of a job have. `limit`: this one. `toggle_s`: see LimitToggle. Without both, the
    limit follows the load."""

    limit: int | None = None
    toggle_s: float | None = None

    def adjuster(self) -> LimitAdjuster:
        """Returns what adjusts the limit of a root's trees, if `limit` gives none."""
        return LimitAdjuster() if self.toggle_s is None else LimitToggle(self.toggle_s)
