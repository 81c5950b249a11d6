"""Says which trees the streams of a job have (docs/papers.md: W5): those that the load calls for, or fixed ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.runtime.multicast.reach import binomial_degree
from penstock.runtime.multicast.self_adjustment import AdjustmentOptions
from penstock.runtime.relaying.limit_adjuster import LimitAdjuster, Streams, ThreadTimes
from penstock.runtime.transport.base import LinkLoad


@dataclass(frozen=True)
class TreeOptions:
    """Which out-degree limit the trees of a job have. `limit`: this one. `toggle_s`: see LimitToggle. Without both, the
    limit follows the load, as `adjustment` says. Benchmarks vary this as the paper does; users need not."""

    limit: int | None = None
    toggle_s: float | None = None
    adjustment: AdjustmentOptions = field(default_factory=AdjustmentOptions)

    def adjuster(self) -> LimitAdjuster:
        """Returns the object that adjusts the limit of a root's trees, if `limit` gives none."""
        return LimitAdjuster(self.adjustment) if self.toggle_s is None else LimitToggle(self.toggle_s)


class LimitToggle(LimitAdjuster):
    """Changes the limit every `every_s` seconds with traffic, between 1 and none, at any load: the trees are chains,
    and binomial ones, in turn. All streams have trees."""

    def __init__(self, every_s: float) -> None:
        super().__init__()
        self.crowded = True
        self._every_s = every_s
        self._due_s = 0.0

    def may_look(self, now_s: float) -> bool:
        """See LimitAdjuster."""
        return now_s >= self._due_s

    def look(
        self,
        now_s: float,
        streams: Streams,
        links: Callable[[], Mapping[int, LinkLoad]],
        thread: Callable[[], ThreadTimes] = ThreadTimes,
    ) -> int | None:
        """See LimitAdjuster."""
        if now_s < self._due_s:
            return None
        self._due_s = now_s + self._every_s
        other = binomial_degree(streams.nodes) if streams.limit == 1 else 1
        return None if other == streams.limit else other
