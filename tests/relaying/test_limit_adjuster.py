"""The limit of a root's trees follows what the root's link can carry."""

from __future__ import annotations

import pytest

from penstock.runtime.relaying.limit_adjuster import LimitAdjuster, LimitToggle

SIZE = 16 * 1024
WINDOW = 256 * 1024
#: What 16 KiB take on a link of 100 Mbit/s.
COPY_S = 0.00131
DELAY_S = 0.0002
NODES = 7


class Link:
    """A root that sends entries at a rate to as many children as the limit says, one copy after the other."""

    def __init__(self) -> None:
        self.adjuster = LimitAdjuster()
        self.limit = 3
        self.now_s = 0.0
        self.free_s = 0.0
        self.queue: list[tuple[float, int, int]] = []  # when the receipt comes, the child, and the entry
        self.entries = 0
        self.taken: dict[int, int] = {}
        self.limits: list[int] = []
        for child in range(NODES):
            self.adjuster.meter.round_trip(child, 2 * DELAY_S, 0.0)

    def run(self, rate: float, seconds: float) -> None:
        end_s, due_s = self.now_s + seconds, self.now_s
        while self.now_s < end_s:
            self.now_s += 0.0002
            for at_s, child, entry in [receipt for receipt in self.queue if receipt[0] <= self.now_s]:
                self.queue.remove((at_s, child, entry))
                self.taken[child] = entry
                self.adjuster.meter.received(child, 1, self.now_s)
            queued = self.queued()
            while due_s <= self.now_s and queued * SIZE < WINDOW:
                due_s += 1 / rate
                queued += 1
                self.send()
            due_s = max(due_s, self.now_s - 0.05)
            found = self.adjuster.look(self.now_s, self.queued(), WINDOW, 0, 0.0, self.limit, NODES)
            if found is not None:
                self.limit = found
                self.limits.append(found)

    def queued(self) -> int:
        return self.entries - min((self.taken.get(child, 0) for child in range(self.limit)), default=0)

    def send(self) -> None:
        self.entries += 1
        for child in range(NODES):
            if child < self.limit:
                self.free_s = max(self.free_s, self.now_s) + COPY_S
                self.queue.append((self.free_s + 2 * DELAY_S, child, self.entries))
                self.adjuster.meter.sent(child, 1, self.now_s)
            else:
                self.taken[child] = self.entries
        self.adjuster.sent(self.limit, SIZE, 0.00001)


def test_a_slow_link_gets_fewer_children_and_then_more_again() -> None:
    link = Link()
    link.run(100, 1.0)
    assert link.limit == 3
    link.run(600, 2.0)  # one child takes 763 copies a second
    assert link.limit == 1
    assert link.adjuster.status()["copy_us"] == pytest.approx(1e6 * COPY_S, rel=0.2)
    changes = len(link.limits)
    link.run(100, 6.0)
    assert link.limit == 3
    assert len(link.limits) - changes <= 2, f"the limit flaps: {link.limits}"


def test_nothing_is_said_of_a_root_without_relays() -> None:
    adjuster = LimitAdjuster()
    assert all(adjuster.look(now / 10, 0, WINDOW, 0, 0.0, 1, 0) is None for now in range(10))
    assert adjuster.status()["reason"] == ""


def test_a_toggle_changes_the_limit_by_the_clock() -> None:
    toggle, limit, changed_at = LimitToggle(1.0), NODES, []
    for step in range(40):
        now_s = 5.0 + step / 10
        found = toggle.look(now_s, 0, WINDOW, 0, 0.0, limit, NODES)
        if found is not None:
            limit = found
            changed_at.append((round(now_s, 1), limit))
    assert changed_at == [(5.0, 1), (6.0, 3), (7.0, 1), (8.0, 3)]
    assert toggle.look(20.0, 0, WINDOW, 0, 0.0, 1, 1) is None, "one destination has one tree"
