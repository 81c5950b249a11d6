"""How soon the tree follows a step of the rate, over a simulated M/D/1 queue.

The times are in virtual seconds, and chance comes from a seed. During a switch the root sends nothing, which is the
worst case that Theorem 4 is about.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.runtime.multicast.load_monitor import Counters, LoadMonitor
from penstock.runtime.multicast.queue_model import Cost, affordable_limit
from penstock.runtime.multicast.self_adjustment import AdjustmentOptions, decide, look_is_due
from penstock.runtime.multicast.switch_cost import longest_switch_s
from tests.multicast.queue_theory import affordable_rate, service_rate

Q = 1024
COST = Cost(5.2e-6)
NODES = 29
OPTIONS = AdjustmentOptions()
SWITCH_S = 0.002
TICK_S = 0.0005


@dataclass(frozen=True)
class Change:
    """A decision: when, the limits, the queue then, and how long a switch may take by Theorem 4."""

    at_s: float
    limits: tuple[int, int]
    queued: float
    allowed_s: float


class Root:
    """A root with random arrivals of batches, a fixed time of service, and a source that waits when the queue is
    full."""

    def __init__(self, limit: int, seed: int, batch: int = 1, switch_s: float = SWITCH_S) -> None:
        self.limit = limit
        self.now_s = 0.0
        self.changes: list[Change] = []
        self.waited_s = 0.0  # of the source
        self._batch = batch
        self._switch_s = switch_s
        self._chance = np.random.default_rng(seed)
        self._monitor = LoadMonitor(OPTIONS.interval_s, OPTIONS.alpha, OPTIONS.early, OPTIONS.memory_s)
        self._counters = Counters()
        self._tick = 0
        self._queued = self._held = 0
        self._served = 0.0  # what the root could have sent beyond what it has sent
        self._switch_to: tuple[float, int] | None = None

    def run(self, rate: float, seconds: float, regular: bool = False) -> None:
        for _ in range(round(seconds / TICK_S)):
            self._tick += 1
            self.now_s = self._tick * TICK_S
            self._send()
            if self._switch_to is None and self._due():
                self._look(rate)
            batches = rate * TICK_S / self._batch
            if regular:
                come = math.floor(self._tick * batches) - math.floor((self._tick - 1) * batches)
            else:
                come = int(self._chance.poisson(batches))
            self._take_in(come * self._batch)
            self.waited_s += TICK_S * (self._held > 0)

    def _send(self) -> None:
        if self._switch_to is not None:
            until_s, limit = self._switch_to
            if self.now_s < until_s:
                return
            self.limit, self._switch_to = limit, None
        self._served += TICK_S * service_rate(self.limit, COST)
        sent = min(self._queued, int(self._served))
        self._served = self._served - sent if self._queued > sent else min(1.0, self._served - sent)
        self._queued -= sent
        copies = sent * self.limit
        c = self._counters
        self._counters = replace(c, copies=c.copies + copies, copying_s=c.copying_s + copies * COST.copy_s)
        self._take_in(0)

    def _take_in(self, due: int) -> None:
        taken = min(self._held + due, Q - self._queued)
        self._held += due - taken
        self._queued += taken
        self._counters = replace(self._counters, arrived=self._counters.arrived + taken)

    def _due(self) -> bool:
        return look_is_due(self._monitor, self.now_s, self._counters.arrived, self._queued, Q, OPTIONS)

    def _look(self, rate: float) -> None:
        load = self._monitor.look(self.now_s, self._counters, self._queued)
        if load is None:
            return
        verdict = decide(load, self.limit, NODES, Q, self._switch_s, OPTIONS)
        if verdict.limit != self.limit:
            allowed_s = longest_switch_s(Q, self._queued, rate)
            self.changes.append(Change(self.now_s, (self.limit, verdict.limit), self._queued, allowed_s))
            self._switch_to = (self.now_s + self._switch_s, verdict.limit)


def settled(rate: float) -> int:
    """The limit that a root has after some time at a rate."""
    return affordable_limit(rate * (1 + OPTIONS.margin), COST, Q, 5).limit


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_each_step_of_the_paper_is_followed_at_once(seed: int) -> None:
    """30,000, 60,000, 80,000, 100,000 and 80,000 records a second, at any time between two looks. The queue calls for a
    change when it has filled to 0.45 of its capacity, and this takes the longer the less the rate is above what the
    root can send."""
    root = Root(settled(30_000), seed)
    root.run(30_000, 1.0 + 0.0331 * seed)
    assert not root.changes
    for rate, limit in ((60_000, 3), (80_000, 2), (100_000, 1)):
        step_s, mu = root.now_s, service_rate(root.limit, COST)
        root.run(rate, 3.0 + 0.0171 * seed)
        (change,) = root.changes[-1:]
        assert change.at_s - step_s <= 2 * 0.45 * Q / (rate - mu) + OPTIONS.early * OPTIONS.interval_s
        assert change.limits[1] == limit
        assert change.allowed_s > SWITCH_S, "the decision was too late for a switch during which nothing is lost"
    step_s = root.now_s
    root.run(80_000, 4.0)
    assert root.limit == 2
    assert root.changes[-1].at_s - step_s <= OPTIONS.memory_s + 2 * OPTIONS.interval_s
    assert len(root.changes) == 4, "one change for each step"
    assert not root.waited_s


@settings(max_examples=30, deadline=None)
@given(
    before=st.floats(20_000, 90_000),
    after=st.floats(30_000, 160_000),
    wait_s=st.floats(0, 0.1),
    batch=st.sampled_from([1, 8, 16]),
)
def test_the_source_waits_only_where_theorem_4_fails(before: float, after: float, wait_s: float, batch: int) -> None:
    """Whenever a step comes, and unless it fills the queue before its rate can be known."""
    limit = settled(before)
    grows = after - service_rate(limit, COST)
    assume(before < affordable_rate(limit, COST, Q) and grows * OPTIONS.early * OPTIONS.interval_s / 2 < 0.45 * Q)
    root = Root(limit, 0, batch)
    root.run(before, 0.25 + wait_s, regular=True)
    assume(not root.changes)
    root.run(after, 0.5, regular=True)
    if all(change.allowed_s > SWITCH_S for change in root.changes):
        assert not root.waited_s
    assert root.limit <= max(1.0, 1.1 * affordable_limit(after, COST, Q, 5).exact)
    if grows > 0:
        assert all(change.limits[1] < change.limits[0] for change in root.changes)


@pytest.mark.parametrize("rate", [30_000, 60_000, 64_000, 80_000, 96_000])
@pytest.mark.parametrize("batch", [1, 16])
def test_a_steady_rate_does_not_flap(rate: float, batch: int) -> None:
    root = Root(settled(rate), 4, batch)
    root.run(rate, 10)
    assert len(root.changes) <= 1


def test_bursts_that_come_again_change_the_tree_once() -> None:
    """A burst of 0.1 s in each second needs a lower limit than the mean rate. The tree keeps it between bursts, and
    gets the higher one back when they are over."""
    root = Root(settled(30_000), 5)
    for _ in range(6):
        root.run(30_000, 0.9)
        root.run(90_000, 0.1)
    assert [change.limits for change in root.changes] == [(5, 2)]
    root.run(30_000, 3)
    assert root.limit == 5
