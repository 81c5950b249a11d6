"""The model of multicast: beside an event-by-event one, the closed forms of the paper, and its theorems."""

from __future__ import annotations

import random
from collections import defaultdict
from heapq import heappop, heappush
from itertools import count

import numpy as np
import pytest

from benchmarks import multicast_model
from benchmarks.multicast_simulation import Multicast, Network, Root, Story, Times, saturated, starts, steady
from penstock.runtime.multicast.building import binomial, non_blocking, sequential
from penstock.runtime.multicast.queue_model import Cost, affordable_limit
from penstock.runtime.multicast.reach import reach
from penstock.runtime.multicast.self_adjustment import AdjustmentOptions
from penstock.runtime.multicast.switch_cost import longest_switch_s
from penstock.runtime.multicast.tree import Tree
from penstock.runtime.multicast.tree_switch import Announcement, TreeSwitch
from tests.multicast.queue_theory import affordable_rate, expected_queue
from tests.multicast.sim import changed_parents

US = 1e-6
MS = 1e-3
Q = 1024
TIMES = Times(copy_s=5.2 * US, receive_s=3 * US, link_s=20 * US, control_s=5.2 * US)


def by_events(tree: Tree, times: Times, due: list[float]) -> tuple[list[float], dict[int, list[float]]]:
    """The same network, one event after the other: when the last node has each entry, and when each node has it."""
    queues: dict[tuple[str, int], list[int]] = defaultdict(list)
    busy: set[tuple[str, int]] = set()
    has: dict[int, list[float]] = {node: [] for node in tree.parent}
    serial = count()
    ahead: list[tuple[float, int, str, int, int]] = []

    def happen(at: float, what: str, node: int, entry: int) -> None:
        heappush(ahead, (at, next(serial), what, node, entry))

    def next_of(at: float, thread: str, node: int) -> None:
        """A thread takes its next entry, if there is one."""
        if (thread, node) in busy or not queues[thread, node]:
            return
        entry = queues[thread, node].pop(0)
        busy.add((thread, node))
        if thread == "receive":
            happen(at + times.receive_s, "received", node, entry)
            return
        if node == tree.root:
            at += times.encode_s
        for child in tree.of(node):
            at += times.copy_s
            happen(at + times.link_s, "arrives", child, entry)
        happen(at, "sent", node, entry)

    for entry, at in enumerate(due):
        happen(at, "due", tree.root, entry)
    while ahead:
        at, _, what, node, entry = heappop(ahead)
        if what == "received":
            has[node].append(at)
            busy.discard(("receive", node))
            next_of(at, "receive", node)
        if what == "sent":
            busy.discard(("send", node))
        if what == "arrives":
            queues["receive", node].append(entry)
            next_of(at, "receive", node)
        if what == "due" or (what == "received" and tree.of(node)):
            queues["send", node].append(entry)
        next_of(at, "send", node)
    return [max(times_had) for times_had in zip(*has.values(), strict=True)], has


@pytest.mark.parametrize("seed", range(12))
def test_blocks_are_as_events_one_by_one(seed: int) -> None:
    """Any tree and any times, taken through in blocks of any size."""
    chance = random.Random(seed)
    nodes = chance.randint(1, 20)
    tree = Tree.of_parents(0, [(node, chance.randrange(node)) for node in range(1, nodes + 1)])
    times = Times(*(chance.choice([0.5, 1.0, 3.0]) for _ in range(4)))
    due = np.cumsum([chance.expovariate(0.3) for _ in range(60)])
    complete, has = by_events(tree, times, due.tolist())
    root, network = Root(5), Network(times)
    root.offer(due)
    found = []
    until = 0.0
    while root.begun < len(due):
        until += chance.choice([0.3, 4.0, 40.0])
        _, begins = root.begin(until, times.root_s(len(tree.of(0))))
        if len(begins):
            found += network.carry(tree, begins + times.encode_s, times.copy_s).tolist()
    assert found == pytest.approx(complete)
    for node, had in has.items():
        assert network.has(node) == pytest.approx(had[-1])


@pytest.mark.parametrize(("load", "within"), [(0.5, 0.02), (0.8, 0.04), (0.9, 0.06)])
def test_the_root_s_queue_is_that_of_eq_2(load: float, within: float) -> None:
    """CASES: a load of 0.8 has 2.4 records in the queue and in service."""
    times = Times(copy_s=10 * US)
    found = steady(sequential(0, range(1, 5)), times, load * 25_000, 400_000, seed=3)
    assert found.queue == pytest.approx(expected_queue(load * 25_000, 25_000), rel=within)


def test_one_encoding_is_part_of_the_queue() -> None:
    """The worker-oriented form: 1 / (d t_d + t_s)."""
    times = Times(copy_s=20 * US, encode_s=30 * US)
    tree = non_blocking(0, range(1, 30), 3)
    cost = Cost(times.copy_s, times.encode_s)
    assert affordable_limit(10_000, cost, 10, 5).limit == 3
    assert steady(tree, times, 10_000, 200_000).queue <= 10 * 1.05
    assert steady(non_blocking(0, range(1, 30), 4), times, 10_000, 200_000).queue > 10


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_a_record_reaches_as_many_nodes_as_the_recurrence_says(limit: int) -> None:
    network = Network(Times(copy_s=1.0))
    tree = non_blocking(0, range(1, 60), limit)
    network.carry(tree, np.zeros(1), 1.0)
    for units in range(tree.last_layer):
        assert 1 + sum(network.has(node) <= units for node in tree.parent) == reach(units, limit)


def test_the_root_s_link_is_shared_by_its_children() -> None:
    """Seven destinations, links of 100 Mbit/s, bodies of 16 KiB."""
    body = 16 * 1024 * 8
    times = Times(copy_s=body / 100e6, link_s=MS)
    among = range(1, 8)
    trees = [sequential(0, among), binomial(0, among), non_blocking(0, among, 2), non_blocking(0, among, 1)]
    rates = [saturated(tree, times, 300) * body / 1e6 for tree in trees]
    assert rates == pytest.approx([100 / 7, 100 / 3, 50, 100], rel=1e-6)


@pytest.mark.parametrize("limit", [1, 2, 3, 10])
def test_the_root_is_the_bottleneck_of_a_large_tree(limit: int) -> None:
    """So relays need no limit of their queues: hardly an entry waits there."""
    tree = non_blocking(0, range(1, 1000), limit)
    rate = saturated(tree, TIMES, 300)
    assert rate == pytest.approx(1 / (limit * TIMES.copy_s))
    assert affordable_rate(limit, Cost(TIMES.copy_s), Q) == pytest.approx(rate, rel=1e-3)
    assert steady(tree, TIMES, 0.9 * rate, 1000).longest_relay_queue <= 1


BEFORE = non_blocking(0, range(1, 30), 2)


def switched(link_s: float, stops: bool, queue: int = Q) -> Multicast:
    """A tree that goes from two children to three after half a second, while 50,000 records a second come at equal
    distances for a second and a half."""
    times = Times(copy_s=5 * US, receive_s=1 * US, link_s=link_s, control_s=5 * US)
    model = Multicast(BEFORE, 2, times, queue, stops=stops, regular=True)
    model.run([(0.5, 50_000)])
    model.switch(0.5, 3, 50_000)
    model.run([(1.0, 50_000), (0.5, 0)])
    return model


@pytest.mark.parametrize(("link_s", "queue"), [(10 * MS, Q), (10 * MS, 100), (0.1 * MS, Q)])
def test_a_switch_that_stops_the_root_makes_the_source_wait_as_theorem_4_says(link_s: float, queue: int) -> None:
    """The source waits from when the queue is full until the root continues and has sent one record."""
    model = switched(link_s, True, queue)
    (found,) = model.story.switches
    stopped = found.announced_s - found.at_s
    expected = max(0.0, stopped - longest_switch_s(queue, 1, 50_000))
    assert found.longest_s == pytest.approx((queue - 1) / 50_000, rel=0.02)
    assert (expected > 0) == (stopped > found.longest_s)
    assert max(0.0, model.story.longest_wait_s) == pytest.approx(expected, abs=0.3 * MS)


def test_a_switch_stops_nobody_while_nodes_connect() -> None:
    """The root is away only while it handles control messages, whatever the delay of the links."""
    running, stopping = (switched(10 * MS, stops).story for stops in (False, True))
    (found,), (other,) = running.switches, stopping.switches
    assert found.took_s > 5 * 10 * MS
    assert other.stopped_s > 3 * 10 * MS
    assert 29 * 5 * US < found.stopped_s < 1 * MS
    assert running.longest_wait_s <= 0
    # A path is at most one link longer than before.
    assert max(found.gaps.values()) < 10 * MS + 1 * MS
    assert max(other.gaps.values()) > 3 * 10 * MS


def test_the_messages_of_a_switch() -> None:
    """The announcement and SETTLE go to all. A node with another parent is told and asks; a parent that is not the root
    tells the root; each such node sends a receipt."""
    model = switched(1 * MS, False)
    (found,) = model.story.switches
    change = TreeSwitch(BEFORE, Announcement(1, model.tree))
    assert found.handed_over == changed_parents(BEFORE, model.tree)
    to_root = sum(model.tree.parent[node] == 0 for node in found.handed_over)
    assert found.messages == 2 * 29 + len(change.connecting) + 2 * len(found.handed_over) - to_root + len(
        found.handed_over
    )
    assert model.tree.out_degree == 3


def test_every_record_is_complete_once() -> None:
    model = switched(1 * MS, False)
    assert sum(model.story.completed) == model.root.begun == 75_000


def test_the_tree_follows_the_rate_steps_of_the_paper() -> None:
    """A tenth of the paper's rates, with ten times the paper's copies. The adjusting tree keeps up at each rate. A
    binomial tree does not, and a chain has the longest way."""
    seconds, per = 4.0, 40
    profile = [(seconds, rate / 10) for rate in (30_000, 60_000, 80_000, 100_000, 80_000)]
    times = Times(copy_s=52 * US, receive_s=30 * US, link_s=50 * US, control_s=52 * US)
    nodes = range(1, 30)
    adjusting = Multicast(non_blocking(0, nodes, 1), 1, times, Q, adjusting=True).run(profile)
    wide = Multicast(binomial(0, nodes), 5, times, Q).run(profile)
    chain = Multicast(non_blocking(0, nodes, 1), 1, times, Q).run(profile)
    limits = [adjusting.samples[per * (step + 1) - 1].limit for step in range(5)]
    assert limits[0] == 5
    assert limits[1] in {2, 3}
    assert limits[2:] == [2, 1, 2]
    for step, (_, rate) in enumerate(profile):
        window = slice(per * (step + 1) - 20, per * (step + 1))  # the last two seconds
        assert sum(adjusting.completed[window]) / 2 > 0.97 * rate
        assert adjusting.samples[per * (step + 1) - 1].held == 0
    assert sum(wide.completed[3 * per - 20 : 3 * per]) / 2 == pytest.approx(1 / (5 * times.copy_s), rel=0.01)
    assert wide.samples[3 * per - 1].held > 5_000
    assert adjusting.samples[per - 1].p50_s < 0.5 * chain.samples[per - 1].p50_s
    assert 4 <= len(adjusting.switches) <= 8
    assert all(switch.took_s < 10 * MS for switch in adjusting.switches)


def test_a_look_before_the_interval_is_over_saves_the_source_from_waiting() -> None:
    """The queue is full 25 ms after the rate has gone up. The root looks at once, and has the right tree by one
    switch. If it looks at the end of the interval, the source waits, and the monitor sees only what the root serves."""
    times = Times(copy_s=5.2 * US, receive_s=3 * US, link_s=5 * US, control_s=5.2 * US)
    tree = non_blocking(0, range(1, 30), 5)

    def after_a_step(early: float) -> Story:
        options = AdjustmentOptions(early=early)
        return Multicast(tree, 5, times, Q, adjusting=True, options=options).run([(1.0, 30_000), (1.0, 80_000)])

    soon, late = after_a_step(0.1), after_a_step(1.0)
    assert [switch.limits for switch in soon.switches] == [(5, 2)]
    assert 1.0 < soon.switches[0].at_s < 1.03
    assert soon.longest_wait_s <= 0
    assert late.longest_wait_s > 50 * MS
    assert len(late.switches) > 1


def test_what_a_source_sends() -> None:
    """The tasks on the source's node are not sent anything; a body is sent once to each worker or child."""
    measured = multicast_model.Measured(2 * US, 5 * US, 7 * US, 4 * US, 10 * US, 150)
    every = multicast_model.designs(measured, 480)
    tasks, workers = every["to tasks, sequential"], every["to workers, sequential"]
    assert len(tasks.tree.parent) == 464
    assert tasks.record_s == pytest.approx(464 * 7 * US)
    assert workers.record_s == pytest.approx(2 * US + 29 * 5 * US)
    assert workers.sent_bytes <= 29 * (150 + 64) + 8 * 464
    assert tasks.sent_bytes > 464 * 150
    tree = every["non-blocking, d*=2"]
    assert tree.record_s == pytest.approx(2 * US + 2 * 5 * US)
    assert 2 * (150 + 8 * 464) < tree.sent_bytes <= 2 * (150 + 64 + 8 * 464)
    slow = multicast_model.designs(measured, 480, link_bits=1e6)["binomial tree"]
    assert slow.times.copy_s == pytest.approx(150 * 8 / 1e6)


def test_the_times_of_this_machine_are_measured() -> None:
    found = multicast_model.measure(150, 4)
    assert 100 <= found.bytes <= 200
    assert 0 < found.t_s < found.t_e
    assert min(found.t_d, found.t_r) > 0
    assert found.link >= 0


def test_a_thread_begins_when_it_is_free_and_the_entry_is_there() -> None:
    assert starts(np.array([0.0, 1.0, 1.5, 9.0]), 2.0, 1.0).tolist() == [1.0, 3.0, 5.0, 9.0]
