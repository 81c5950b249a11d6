"""The limit of a root's trees follows what the root's link can carry."""

from __future__ import annotations

import math
import random

import pytest

from penstock.runtime.multicast.self_adjustment import AdjustmentOptions
from penstock.runtime.relaying.limit_adjuster import LimitAdjuster, Streams, ThreadTimes
from penstock.runtime.relaying.tree_options import LimitToggle, TreeOptions
from penstock.runtime.transport.base import LinkLoad

SIZE = 16 * 1024
WINDOW = 256 * 1024
#: What 16 KiB take on a link of 100 Mbit/s.
COPY_S = 0.00131
DELAY_S = 0.0002
NODES = 7


class Link:
    """A root that sends entries at a rate to as many children as the limit says, one copy after the other. `late_s`:
    how much later than the link a child may be, which has other things to do."""

    def __init__(self, *, copy_s: float = COPY_S, late_s: float = 0.0) -> None:
        self.adjuster = LimitAdjuster()
        self.limit = 3
        self.now_s = 0.0
        self.free_s = 0.0
        self.copy_s = copy_s
        self.late_s = late_s
        self.chance = random.Random(5)
        self.queue: list[tuple[float, int, int]] = []  # when the receipt comes, the child, and the entry
        self.leaves: list[tuple[float, int]] = []  # when a copy has left, and its child
        self.entries = 0
        self.taken: dict[int, int] = {}
        self.carried = dict.fromkeys(range(NODES), 0)
        self.limits: list[int] = []

    def run(self, rate: float, seconds: float) -> None:
        end_s, due_s = self.now_s + seconds, self.now_s
        while self.now_s < end_s:
            self.now_s += 0.0002
            for receipt in [receipt for receipt in self.queue if receipt[0] <= self.now_s]:
                self.queue.remove(receipt)
                _, child, entry = receipt
                self.taken[child] = max(entry, self.taken.get(child, 0))
            while self.leaves and self.leaves[0][0] <= self.now_s:
                self.carried[self.leaves.pop(0)[1]] += SIZE
            queued = self.queued()
            while due_s <= self.now_s and queued * SIZE < WINDOW:
                due_s += 1 / rate
                queued += 1
                self.send()
            due_s = max(due_s, self.now_s - 0.05)
            found = self.adjuster.look(self.now_s, Streams(self.queued(), WINDOW, 0.0, self.limit, NODES), self.links)
            if found is not None:
                self.limit = found
                self.limits.append(found)

    def links(self) -> dict[int, LinkLoad]:
        """What the system says: a connection is full when more of its copies wait than are on the wire."""
        waiting = [child for _, child in self.leaves]
        full = {child for child in range(NODES) if waiting.count(child) > 1}
        rate = SIZE / self.copy_s / max(1, len(full))
        return {child: LinkLoad(self.carried[child], rate, child in full, 0.0) for child in range(NODES)}

    def queued(self) -> int:
        return self.entries - min((self.taken.get(child, 0) for child in range(self.limit)), default=0)

    def send(self) -> None:
        self.entries += 1
        for child in range(NODES):
            if child < self.limit:
                self.free_s = max(self.free_s, self.now_s) + self.copy_s
                self.leaves.append((self.free_s, child))
                late_s = self.chance.uniform(0, self.late_s)
                self.queue.append((self.free_s + 2 * DELAY_S + late_s, child, self.entries))
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


def test_a_burst_after_a_stall_of_the_source_makes_no_chain() -> None:
    """Its rate is one that a single child alone can be sent, for a moment. Two looks must see it."""
    link = Link()
    link.run(100, 1.0)
    for _ in range(3):
        link.run(1, 0.5)
        link.run(2_000, 0.01)
        link.run(100, 1.0)
    assert link.limit == 3
    assert 1 not in link.limits
    link.run(600, 2.0)
    assert link.limit == 1


def test_children_that_answer_late_are_no_slow_link() -> None:
    link = Link(copy_s=0.00001, late_s=0.02)
    link.run(100, 2.0)
    link.run(2_000, 2.0)  # fills the window, because the children are late
    assert link.limit == 3
    status = link.adjuster.status()
    assert not status["overloaded"]
    assert status["copy_us"] < 100


def test_a_link_that_is_full_without_a_tree_is_crowded_until_it_could_carry_a_copy_to_each_worker() -> None:
    link = Link()
    adjuster = link.adjuster
    link.limit = NODES
    found = []
    for _step in range(40):
        link.now_s += 0.05
        for _ in range(15):  # 300 a second, of which the link carries 109
            link.send()
        while link.leaves and link.leaves[0][0] <= link.now_s:
            link.carried[link.leaves.pop(0)[1]] += SIZE
        found.append(adjuster.look_at_links(link.now_s, link.links))
        assert sum(found) <= 1, "it becomes crowded once"
    assert adjuster.crowded
    link.leaves, link.queue, link.limit = [], [], 1
    link.free_s, link.taken = link.now_s, dict.fromkeys(range(NODES), link.entries)
    link.run(300, 2.0)
    assert adjuster.crowded, "a copy to each worker would fill the link"
    link.run(30, 3.0)
    assert not adjuster.crowded


def test_nothing_is_said_of_a_root_without_relays() -> None:
    adjuster = LimitAdjuster()
    assert all(adjuster.look(now / 10, Streams(0, WINDOW, 0.0, 1, 0), dict) is None for now in range(10))
    assert adjuster.status()["reason"] == ""


def test_a_toggle_changes_the_limit_by_the_clock() -> None:
    toggle, limit, changed_at = LimitToggle(1.0), NODES, []
    for step in range(40):
        now_s = 5.0 + step / 10
        found = toggle.look(now_s, Streams(0, WINDOW, 0.0, limit, NODES), dict)
        if found is not None:
            limit = found
            changed_at.append((round(now_s, 1), limit))
    assert changed_at == [(5.0, 1), (6.0, 3), (7.0, 1), (8.0, 3)]
    assert toggle.look(20.0, Streams(0, WINDOW, 0.0, 1, 1), dict) is None, "one destination has one tree"


def sent_evenly(adjuster: LimitAdjuster, encoding_s: float) -> None:
    """Sends 1,000 entries a second to two children for half a second, each copy in 10 us. `encoding_s`: of all."""
    for number in range(500):
        adjuster.sent(2, SIZE, 20e-6)
        adjuster.look(number / 1_000, Streams(0, WINDOW, encoding_s * number / 500, 2, NODES), dict)


def test_what_encoding_costs_counts_for_each_entry() -> None:
    """Watermarks and barriers are entries as well, and nothing is encoded for them. Before, the time of an encoding
    counted for each of them."""
    adjuster = LimitAdjuster()
    sent_evenly(adjuster, 250 * 40e-6)  # every second entry has records
    status = adjuster.status()
    assert status["encode_us"] == pytest.approx(20, rel=0.01)
    assert status["copy_us"] == pytest.approx(10, rel=0.01)
    assert status["rate"] == pytest.approx(1_000, rel=0.01)


def test_copies_that_waited_for_room_cost_time_too() -> None:
    adjuster = LimitAdjuster()
    for number in range(500):
        adjuster.sent(2, SIZE, 0.0)
        adjuster.sent_later(20e-6)
        adjuster.look(number / 1_000, Streams(0, WINDOW, 0.0, 2, NODES), dict)
    assert adjuster.status()["copy_us"] == pytest.approx(10, rel=0.01)


def test_a_switch_may_take_as_long_as_the_queue_has_room_for_when_it_begins() -> None:
    """Theorem 4. Before, the queue at the end of the switch counted."""
    adjuster = LimitAdjuster()
    sent_evenly(adjuster, 0.0)
    longest_s = adjuster.longest_switch_s(6, WINDOW)
    assert longest_s == pytest.approx((WINDOW / SIZE - 6) / 1_000, rel=0.01)
    adjuster.switched(0.5 * longest_s, longest_s)
    assert adjuster.status()["overrun_s"] == 0
    adjuster.switched(longest_s + 0.2, longest_s)
    assert adjuster.status()["overrun_s"] == pytest.approx(0.2)


def test_a_benchmark_sets_what_the_paper_varies() -> None:
    given = AdjustmentOptions(alpha=0.5, down=0.5, up=0.3, warning=0.8)
    assert TreeOptions(adjustment=given).adjuster()._options is given


class Thread:
    """A root whose thread sends entries as quickly as it can, or at a rate. `slow`: the limits with which relays cannot
    keep up, by the entries a second that they take."""

    def __init__(self, *, limit: int = 3, other_s: float = 0.0, slow: dict[int, float] | None = None) -> None:
        self.adjuster = LimitAdjuster()
        self.limit = limit
        self.now_s = self.used_s = self.encoding_s = 0.0
        self.other_s = other_s
        self.slow = slow or {}
        self.limits: list[int] = []

    def run(self, rate: float, seconds: float) -> float:
        """Offers so many entries a second, in tenths of a second. Returns how many were sent in the last one."""
        sent = 0.0
        for _ in range(round(10 * seconds)):
            entry_s = self.other_s + 10e-6 + self.limit * 20e-6
            most = self.slow.get(self.limit, math.inf)
            sent = min(rate, 1 / entry_s, most)
            for _ in range(round(sent / 10)):
                self.adjuster.sent(self.limit, SIZE, self.limit * 20e-6)
            self.now_s += 0.1
            self.used_s += round(sent / 10) * entry_s
            self.encoding_s += round(sent / 10) * 10e-6
            waiting = sent == most < rate
            streams = Streams(0, WINDOW, self.encoding_s, self.limit, NODES, waiting)
            thread = ThreadTimes(self.used_s)
            found = self.adjuster.look(self.now_s, streams, dict, lambda thread=thread: thread)  # type: ignore[misc]
            if found is not None:
                self.limit = found
                self.limits.append(found)
        return sent


def test_a_busy_source_gets_fewer_children() -> None:
    """With 50 us of other work, three children let 8,333 entries a second through, and two 10,000. Before, the model
    left out the other work, and the tree stayed as it was."""
    thread = Thread(other_s=50e-6)
    thread.run(4_000, 2.0)
    assert thread.run(9_000, 8.0) == 9_000
    assert thread.limits in ([1], [1, 2])
    assert thread.adjuster.status()["other_us"] == pytest.approx(50, rel=0.01)


def test_a_load_that_falls_gets_the_children_back_that_are_affordable() -> None:
    thread = Thread(other_s=50e-6)
    thread.run(20_000, 3.0)
    assert thread.limit == 1
    assert thread.adjuster.status()["overloaded"]
    thread.run(5_000, 5.0)
    assert thread.limits == [1, 3]
    assert not thread.adjuster.status()["overloaded"]


def test_a_scale_up_after_which_the_rate_falls_is_undone_and_not_tried_again() -> None:
    """Relays that send to three others each take no more than 3,000 entries a second, which nobody measures."""
    thread = Thread(limit=1, slow={3: 3_000.0})
    thread.run(5_000, 20.0)
    assert thread.limits[:2] == [3, 1]
    assert thread.limits in ([3, 1], [3, 1, 2])
    assert thread.run(5_000, 1.0) == 5_000
    thread.run(2_000, 5.0)
    assert thread.limit == 3, "a lower load may be carried"


def test_sources_that_wait_for_slow_tasks_change_no_tree() -> None:
    thread = Thread(slow=dict.fromkeys((1, 2, 3), 1_000.0))
    thread.run(5_000, 10.0)
    assert not thread.limits
    assert "the sources wait" in thread.adjuster.status()["reason"]
