"""What the meter of a root's link finds, from what a simulated system says of its connections."""

from __future__ import annotations

import math
import random

import pytest

from penstock.runtime.relaying.link_meter import LinkMeter
from penstock.runtime.transport.base import LinkLoad

LINK = 12.5e6  # bytes/s
INTERVAL_S = 0.1


class Link:
    """A link that carries some bytes a second for all connections together. What is sent and does not fit waits."""

    def __init__(self, children: int, rate: float = LINK, *, memory_s: float = 300.0) -> None:
        self.meter = LinkMeter(memory_s)
        self.rate = rate
        self.now_s = 0.0
        self.waiting = [0.0] * children
        self.acknowledged = [0.0] * children
        self.held_s = [0.0] * children
        self.chance = random.Random(3)

    def run(self, load: float, seconds: float, *, slow: tuple[int, ...] = ()) -> None:
        """Sends so large a part of what the link carries. `slow`: the children who take nothing, but hold bytes up."""
        children = len(self.waiting)
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            step_s = INTERVAL_S * self.chance.choice([0.1, 1.0, 1.0])
            self.now_s += step_s
            room = self.rate * step_s
            for child in range(children):
                self.waiting[child] += load * self.rate * step_s / children
            for child in self.chance.sample(range(children), children):
                if child in slow:
                    self.held_s[child] += step_s
                    continue
                carried = min(self.waiting[child], room)
                room -= carried
                self.waiting[child] -= carried
                self.acknowledged[child] += carried
            self.look()

    def look(self) -> None:
        children = len(self.waiting)
        fast = [child for child in range(children) if not self.held_s[child]]
        self.meter.look(
            self.now_s,
            {
                child: LinkLoad(
                    int(self.acknowledged[child]),
                    # A sample of a connection that is not full says nothing of the link.
                    self.chance.uniform(0.8, 1.2) * self.rate / len(fast or [0]) if self.waiting[child] > 1 else 1e9,
                    self.waiting[child] > 1,
                    self.held_s[child],
                )
                for child in range(children)
            },
        )


@pytest.mark.parametrize("children", [1, 2, 7])
@pytest.mark.parametrize("load", [1.1, 3.0])
def test_a_full_link_takes_what_it_carries(children: int, load: float) -> None:
    link = Link(children)
    link.run(load, 2.0)
    assert link.meter.full
    assert link.meter.rate(link.now_s) == pytest.approx(LINK, rel=0.05)


@pytest.mark.parametrize("load", [0.01, 0.9])
def test_nothing_is_known_of_a_link_that_was_never_full(load: float) -> None:
    link = Link(3)
    link.run(load, 2.0)
    assert not link.meter.full
    assert link.meter.rate(link.now_s) == math.inf


def test_the_rate_is_known_for_some_time_after_the_link_was_full() -> None:
    link = Link(3, memory_s=20.0)
    link.run(1.5, 1.0)
    link.waiting = [0.0] * 3
    link.run(0.2, 15.0)
    assert not link.meter.full
    assert link.meter.rate(link.now_s) == pytest.approx(LINK, rel=0.05)
    link.run(0.2, 10.0)
    assert link.meter.rate(link.now_s) == math.inf


def test_a_link_that_changes_is_noticed() -> None:
    link = Link(2)
    link.run(1.5, 1.0)
    link.rate = LINK / 5
    link.run(1.5, 2.0)
    assert link.meter.rate(link.now_s) == pytest.approx(LINK / 5, rel=0.1)
    link.rate = 2 * LINK
    link.waiting = [0.0] * 2
    link.run(0.9, 2.0)
    assert not link.meter.full
    assert link.meter.rate(link.now_s) == pytest.approx(1.8 * LINK, rel=0.05), "it carries more than was known"


def test_a_child_that_has_no_room_is_no_slow_link() -> None:
    link = Link(3)
    link.run(0.3, 2.0, slow=(1,))
    assert not link.meter.full
    assert link.meter.rate(link.now_s) == math.inf


def test_the_first_look_at_a_full_link_believes_the_system() -> None:
    meter = LinkMeter()
    meter.look(0.0, {1: LinkLoad(0, 0.0, False, 0.0), 2: LinkLoad(0, 0.0, False, 0.0)})
    meter.look(0.1, {1: LinkLoad(1000, 5e6, True, 0.0), 2: LinkLoad(1000, 7e6, True, 0.0)})
    assert meter.rate(0.1) == pytest.approx(12e6)


def test_a_connection_that_was_made_again_counts_from_its_beginning() -> None:
    meter = LinkMeter()
    meter.look(0.0, {1: LinkLoad(10_000_000, 5e6, False, 9.0)})
    meter.look(0.1, {1: LinkLoad(1000, 4e6, True, 0.0)})
    assert meter.rate(0.1) == pytest.approx(4e6)
