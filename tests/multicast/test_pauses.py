"""How long records stop during a switch: not at all, where nodes connect in advance.

Here each message takes one time unit, the root has an entry in every unit, and a relay sends at once. So an entry
needs as many units as its node has links to the root.
"""

from __future__ import annotations

import random
from collections import defaultdict
from heapq import heappop, heappush
from itertools import count, pairwise

import pytest

from penstock.runtime.multicast.building import non_blocking
from penstock.runtime.multicast.least_change import adapted
from penstock.runtime.multicast.relay_log import (
    Action,
    Ask,
    Connect,
    Connected,
    Process,
    Receipt,
    RelayLog,
    RootLog,
    Send,
)
from penstock.runtime.multicast.tree import Tree
from penstock.runtime.multicast.tree_switch import Announcement, SwitchProgress, TreeSwitch
from tests.multicast.sim import changed_parents

ROOT = 0
ENTRIES = 60


class Timeline:
    """Relays in virtual time."""

    def __init__(self, tree: Tree) -> None:
        self.now = 0
        self.root = RootLog(tree)
        self.relays: dict[int, RelayLog] = {ROOT: self.root}
        self.arrived: dict[int, dict[int, int]] = defaultdict(dict)  # by node and number: when
        self.emitted: dict[int, int] = {}
        self.asked: set[int] = set()
        self.progress: SwitchProgress | None = None
        self._ahead: list[tuple[int, int, int, int, Action | None]] = []
        self._serial = count()
        self._tree = tree
        self._rest = ENTRIES
        for node in tree.parent:
            self._start(node, tree, 0)

    def _start(self, node: int, tree: Tree, number: int) -> None:
        self.relays[node] = RelayLog(node, tree, number)
        self._act(node, self.relays[node].begin())

    def _act(self, node: int, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Process):
                self.arrived[node][action.number] = self.now
            else:
                heappush(self._ahead, (self.now + 1, next(self._serial), node, action.to, action))

    def run(self, after: Tree, in_advance: bool) -> int:
        """Sends all entries, and switches to another tree at time 20: the number of the announcement."""
        announcement = Announcement(1, after)
        number = -1
        while self._rest or self._ahead:
            self.now += 1
            while self._ahead and self._ahead[0][0] == self.now:
                _, _, sender, node, action = heappop(self._ahead)
                self._receive(sender, node, action)
            if self.now == 20:
                switch = TreeSwitch(self._tree, announcement)
                self.progress = SwitchProgress(switch, [0])
                for node in switch.connecting if in_advance else ():
                    self._act(node, self.relays[node].connect(after.parent[node], 1))
            if self.progress is not None and number < 0 and (self.progress.connected or not in_advance):
                number = self.root.next
                self.progress.announced({0: number})
                self.asked.clear()
                self._act(ROOT, self.root.append(announcement))
                for node in after.destinations - self._tree.destinations:
                    self._start(node, after, number + 1)
            if self._rest:
                self._rest -= 1
                self.emitted[self.root.next] = self.now
                self._act(ROOT, self.root.append("entry"))
        return number

    def _receive(self, sender: int, node: int, action: Action | None) -> None:
        relay = self.relays[node]
        if isinstance(action, Send):
            self._act(node, relay.take(sender, action.number, action.entry))
        elif isinstance(action, Ask):
            self.asked.add(sender)
            self._act(node, relay.asked(sender, action.number))
        elif isinstance(action, Connect):
            self._act(node, relay.connected(sender, action.version))
        elif isinstance(action, Connected):
            assert self.progress is not None
            self.progress.connection(action.child, 0, action.version)
        elif isinstance(action, Receipt):
            relay.receipt(sender, action.through)
            if self.progress is not None:
                self.progress.receipt(sender, 0, action.through)


def some_switch(seed: int, joins: bool) -> tuple[Tree, Tree]:
    chance = random.Random(seed)
    nodes = list(range(1, chance.randint(3, 30) + 1))
    before = non_blocking(ROOT, nodes, chance.randint(1, 4))
    if chance.random() < 0.4:
        nodes.remove(chance.choice(nodes))
    if joins:
        nodes += range(50, 50 + chance.randint(1, 4))
    return before, adapted(before, nodes, chance.randint(1, 4))


@pytest.mark.parametrize("seed", range(30))
def test_no_entry_is_late_when_nodes_connect_in_advance(seed: int) -> None:
    """Each entry arrives after as many units as its path has links, except that it never overtakes the one before: not
    at its node, and not at a node on its path."""
    before, after = some_switch(seed, joins=False)
    timeline = Timeline(before)
    announced = timeline.run(after, in_advance=True)
    assert timeline.progress is not None
    assert timeline.progress.over
    assert not timeline.asked, "somebody had to ask"
    first = {ROOT: 0}  # how long the first entry after the announcement, which leaves in the same unit, takes
    for node, parent in after.parent.items():
        first[node] = max(first[parent] + 1, before.depth[node])
    for node in after.destinations:
        arrived = timeline.arrived[node]
        assert list(arrived) == list(timeline.emitted)
        latest = 0
        for number, emitted in timeline.emitted.items():
            if number == announced + 1:
                latest = max(latest, emitted + first[node])
            depth = (before if number < announced else after).depth[node]
            on_time = max(emitted + depth, latest)
            if number > before.last_layer:  # the first ones wait until all have connected
                assert arrived[number] <= on_time, f"node {node} has entry {number} late"
            latest = arrived[number]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("joins", [False, True])
def test_a_pause_is_at_most_one_round_trip_when_nobody_has_connected(seed: int, joins: bool) -> None:
    """A node that gets another parent asks when it has the announcement; a node that joins asks at once."""
    before, after = some_switch(seed, joins)
    timeline = Timeline(before)
    announced = timeline.run(after, in_advance=False)
    handed = changed_parents(before, after)
    assert timeline.asked == handed | (after.destinations - before.destinations)
    round_trip = 2
    first = {ROOT: 0}  # how long the first entry after the announcement takes at most
    for node, parent in after.parent.items():
        first[node] = max(
            first[parent] + 1, before.depth.get(node, 0) + (0 if parent == before.parent.get(node) else round_trip)
        )
    for node in after.destinations:
        arrived = timeline.arrived[node]
        latest = 0
        for number, emitted in timeline.emitted.items():
            if number > announced or (number > before.last_layer and node in before.layer):
                depth = (before if number < announced else after).depth[node]
                latest = max(latest, emitted + (first[node] if number == announced + 1 else depth))
                assert arrived[number] <= latest, f"node {node} has entry {number} late"
                latest = arrived[number]


@pytest.mark.parametrize("in_advance", [False, True])
def test_who_keeps_its_whole_path_has_an_entry_in_every_unit(in_advance: bool) -> None:
    before = non_blocking(ROOT, range(1, 30), 3)
    after = adapted(before, range(1, 30), 2)
    timeline = Timeline(before)
    announced = timeline.run(after, in_advance)
    handed = changed_parents(before, after)
    same = {ROOT}
    for node in after.parent:
        if node not in handed and after.parent[node] in same:
            same.add(node)
    assert len(same) > 5
    for node in same - {ROOT}:
        times = [when for number, when in timeline.arrived[node].items() if number > announced - 10]
        assert all(later == sooner + 1 for sooner, later in pairwise(times))
