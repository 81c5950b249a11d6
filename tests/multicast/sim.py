"""A simulated tree of relays: numbered logs, connections with any delay, and switches while all this goes wrong.

There is no clock. In each turn the seed chooses what happens next: a message arrives on some connection, the root has
another entry, the tree gets another limit, nodes join or leave, a node dies, a connection breaks and loses what is on
it. So every order of events that a network allows can come up. A slow node takes its messages seldom.

A `Cluster` drives the code of penstock/runtime/multicast as relays would, and checks at each step that every node gets
every entry of every log once and in order. At the end it lets everything come to rest and checks that nothing is
missing.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass

from penstock.runtime.multicast import least_change
from penstock.runtime.multicast.building import non_blocking
from penstock.runtime.multicast.reach import reaches, units_to_reach
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

ROOT = 0
#: The entries of a log that the root keeps at most; a sender waits beyond.
KEPT_MOST = 40
#: Announcements do not wait, and receipts take a while to a relay.
SLACK = 10


@dataclass(frozen=True)
class Faults:
    """What may happen to a cluster of a seed."""

    dies: bool
    breaks: bool
    slow: bool


def faults_of(seed: int) -> Faults:
    """Each seed has its own mix; one in eight has none."""
    return Faults(bool(seed & 1), bool(seed & 2), bool(seed & 4))


@dataclass(frozen=True)
class Begin:
    """The root tells a node that joins where its logs begin, and in which tree."""

    log: int
    tree: Tree
    next: int
    version: int


@dataclass(frozen=True)
class Reconnect:
    """The root tells a node to which parent it is to connect, for a version of the tree."""

    parent: int
    version: int


@dataclass(frozen=True)
class Lost:
    """The root tells a node that another one is lost."""

    node: int


@dataclass(frozen=True)
class Settle:
    """The root tells a node that a switch is over."""

    log: int
    number: int


@dataclass(frozen=True)
class OfLog:
    """What a relay sends about a log."""

    log: int
    action: Send | Ask | Connect | Connected | Receipt


Message = Begin | Reconnect | Lost | Settle | OfLog


def _is_announcement(message: Message) -> bool:
    return (
        isinstance(message, OfLog)
        and isinstance(message.action, Send)
        and isinstance(message.action.entry, Announcement)
    )


def reached_in(tree: Tree, units: int) -> int:
    """How many nodes, the root among them, have a record after a number of time units."""
    return sum(layer <= units for layer in tree.layer.values())


def changed_parents(before: Tree, after: Tree) -> frozenset[int]:
    """The nodes of both trees that have another parent in `after`."""
    return frozenset(node for node, parent in after.parent.items() if before.parent.get(node, parent) != parent)


def reconnected(log: RelayLog, peer: int) -> list[Action]:
    """A connection to a node broke, and is there again. What was sent before may be lost. The transports of jobs lose
    nothing between two processes that live, but what a relay keeps, and for how long, holds for any connection."""
    actions: list[Action] = []
    if log._future is not None and log._future[1] == peer:
        actions += log.connect(peer, log._future[0])
    if (cursor := log.cursors.get(peer)) is not None:
        cursor.asked = False  # it asks again, and says from where on
    if peer == log.parent:
        actions += log._ask()
    if peer == log._tree.root and log.node != peer:
        actions.append(Receipt(peer, log.next - 1))
    return actions


def check_shape(tree: Tree, nodes: set[int], limit: int) -> None:
    """A tree spans its nodes, keeps its limit, and reaches in each unit as many nodes as the recurrence says."""
    assert tree.destinations == nodes, "the tree does not span its nodes"
    assert tree.out_degree <= limit, f"a node has {tree.out_degree} children; {limit} are allowed"
    for units, reached in zip(range(units_to_reach(len(nodes), limit) + 1), reaches(limit), strict=False):
        assert reached_in(tree, units) == min(reached, len(nodes) + 1), f"{tree} is late in unit {units}"


class Cluster:
    """See the module's docstring."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.chance = random.Random(seed)
        self.faults = faults
        self.counts: Counter[str] = Counter()
        self.story: list[str] = []
        chance = self.chance
        self.limit = chance.randint(1, 4)
        self.logs = range(chance.choice([1, 1, 2, 3]))
        self.wanted = set(range(1, chance.randint(1, 9) + 1))
        self.tree = non_blocking(ROOT, sorted(self.wanted), self.limit)
        self.relays: dict[int, dict[int, RelayLog]] = {}
        self.roots = [RootLog(self.tree) for _ in self.logs]
        self.links: dict[tuple[int, int], deque[Message]] = {}
        self.may_ask: set[tuple[int, int]] = set()  # nodes and logs: without faults only those with another parent
        self.payloads: list[list[int]] = [[] for _ in self.logs]  # the entries' numbers of each log, without trees
        self.got: dict[int, list[int]] = {}  # by node: the place of the next payload of each log
        self.slow: set[int] = set()
        self.dead: set[int] = set()
        self.unnoticed: list[int] = []  # dead nodes of which the root does not know
        self.known_lost: list[int] = []
        self.progress: SwitchProgress | None = None
        self.numbers: dict[int, int] | None = None  # of the announcements, once they are written
        self.settled: list[int] | None = None
        self.changed = False  # the tree is to change
        self.ending = False
        self.version = 0
        self.names = max(self.wanted)
        for node in self.wanted:
            self._start(node, [0] * len(self.logs))
            for log in self.logs:
                self._begin(node, log, self.tree, 0, 0)

    # What happens

    def run(self, turns: int) -> None:
        """Lets so many things happen, and then all that must."""
        for _ in range(turns):
            self._turn()
        self.ending = True
        self._rest()
        self._check_end()

    def _turn(self) -> None:
        chance = self.chance
        what = chance.random()
        if what < 0.72:
            self._deliver()
        elif what < 0.90:
            self._emit()
        elif what < 0.93:
            self._switch(hasty=what < 0.905)
        elif what < 0.96:
            self._want()
        elif what < 0.975 and self.faults.breaks:
            self._break()
        elif what < 0.985 and self.faults.dies:
            self._die()
        elif what < 0.99 and self.unnoticed:
            self._notice()
        elif self.faults.slow and self.wanted:
            self.slow = set(chance.sample(sorted(self.wanted), min(2, len(self.wanted))))

    def _rest(self) -> None:
        """Ends switches, and lets all messages arrive."""
        self.slow = set()
        for _ in range(200_000):
            if self.unnoticed:
                self._notice()
            elif any(self.links.values()):
                self._deliver()
            elif self.progress is None and self.changed:
                self._switch()
            elif self.progress is not None and self.numbers is None:
                assert self.progress.connected, f"a node never connects for version {self.version}"
                self._switch()
            else:
                break
        else:
            raise AssertionError("messages go back and forth without end")
        assert self.progress is None, f"the switch to version {self.version} is never over"

    def _emit(self) -> None:
        """The root has another entry, unless it keeps too many."""
        log = self.chance.choice(self.logs)
        root = self.roots[log]
        if root.kept < KEPT_MOST:
            number = root.next
            self.payloads[log].append(number)
            self._act(ROOT, log, root.append(("payload", log, len(self.payloads[log]) - 1)))
            self.counts["entries"] += 1

    def _want(self) -> None:
        """Something about the tree should change."""
        chance = self.chance
        kind = chance.choice(["limit", "join", "leave"])
        if kind == "limit":
            self.limit = chance.randint(1, 4)
        elif kind == "join" and len(self.wanted) < 14:
            self.names += 1
            self.wanted.add(self.names)
        elif kind == "leave" and self.wanted:
            self.wanted.remove(chance.choice(sorted(self.wanted)))
        self.counts[kind] += 1
        self.changed = True

    def _switch(self, hasty: bool = False) -> None:
        """The root begins a switch, or announces the tree when nodes have connected: if it is hasty, without them."""
        if self.progress is None:
            if self.changed:
                self._prepare()
        elif self.numbers is None:
            if hasty and self.changed:  # what it should be is something else by now
                self._prepare()
            elif hasty or self.progress.connected:
                self._announce(self.progress.switch)

    def _prepare(self) -> None:
        """The root tells the nodes that get another parent to connect."""
        self.changed = False
        after = least_change.adapted(self.tree, sorted(self.wanted), self.limit)
        check_shape(after, self.wanted, self.limit)
        self.version += 1
        lost = frozenset(self.known_lost) & self.tree.destinations
        switch = TreeSwitch(self.tree, Announcement(self.version, after), lost)
        self.progress = SwitchProgress(switch, self.logs)
        for node in switch.connecting:
            self._send(ROOT, node, Reconnect(after.parent[node], self.version))

    def _tell_to_connect(self, at: int) -> None:
        """The root repeats what it has told of connections at a node."""
        if self.progress is not None and self.numbers is None:
            parent = self.progress.switch.after.parent
            for node in self.progress.switch.connecting:
                if at in {node, parent[node]}:
                    self._send(ROOT, node, Reconnect(parent[node], self.version))

    def _announce(self, switch: TreeSwitch) -> None:
        """The root writes the new tree into all logs."""
        assert self.progress is not None
        before, after = self.tree, switch.after
        self.tree = after
        self.numbers = {log: self.roots[log].next for log in self.logs}
        self.progress.announced(self.numbers)
        self.story.append(f"version {self.version}: {dict(after.children)}, numbers {self.numbers}")
        new = sorted(after.destinations - before.destinations)
        for node in new:
            self._start(node, [len(payloads) for payloads in self.payloads])
        for log, number in self.numbers.items():
            self._act(ROOT, log, self.roots[log].append(switch.announcement))
            for node in new:
                self._send(ROOT, node, Begin(log, after, number + 1, self.version))
        self.may_ask |= {(handover.node, log) for handover in switch.handovers for log in self.logs}
        self.counts["switches"] += 1
        self.counts["in advance" if self.progress.connected else "hasty"] += 1
        self.counts["handovers"] += len(changed_parents(before, after))
        self._look()

    def _die(self) -> None:
        """A node is gone with all its connections. The root learns it later."""
        alive = sorted(self.relays.keys() - self.dead)
        if not alive:
            return
        node = self.chance.choice(alive)
        self.story.append(f"node {node} dies")
        self.dead.add(node)
        for link in self.links:
            if node in link:
                self.links[link].clear()
        self.unnoticed.append(node)
        self.counts["deaths"] += 1

    def _notice(self) -> None:
        """The root finds out that a node is lost."""
        node = self.unnoticed.pop(0)
        self.story.append(f"the root knows that node {node} is lost")
        self.known_lost.append(node)
        self.wanted.discard(node)
        self.changed = True
        for log in self.logs:
            self._act(ROOT, log, self.roots[log].node_lost(node))
        for other in sorted(self.relays.keys() - self.dead):
            self._send(ROOT, other, Lost(node))
        if self.progress is not None:
            self.progress.node_lost(node)
            self._look()

    def _break(self) -> None:
        """A connection breaks, loses what is on it in both directions, and is made again."""
        among = [
            link
            for link, messages in self.links.items()
            if messages and link[0] != link[1] and not set(link) & self.dead
        ]
        # What is lost is seldom an announcement, which is where it matters most.
        announcing = [link for link in among if any(map(_is_announcement, self.links[link]))]
        if announcing and self.chance.random() < 0.5:
            among = announcing
        if not among:
            return
        one, other = sorted(self.chance.choice(sorted(among)))
        self.story.append(f"the connection of {one} and {other} breaks")
        self.counts["broken"] += 1
        lost = [*self.links.get((one, other), ()), *self.links.get((other, one), ())]
        self.links[one, other] = deque()
        self.links[other, one] = deque()
        if one == ROOT:  # what the root has to tell does not get lost: it tells it again
            for node in self.known_lost:
                self._send(ROOT, other, Lost(node))
            for message in lost:
                if isinstance(message, Begin):
                    self._send(ROOT, other, message)
            self._tell_to_connect(other)
            for log, number in enumerate(self.settled or ()):
                self._send(ROOT, other, Settle(log, number))
        for node, peer in ((one, other), (other, one)):
            for log in self.logs:
                relay = self._log(node, log)
                if relay is not None:
                    self._act(node, log, reconnected(relay, peer))

    # Messages

    def _send(self, sender: int, to: int, message: Message) -> None:
        if to not in self.dead and sender not in self.dead:
            self.links.setdefault((sender, to), deque()).append(message)

    def _deliver(self) -> None:
        """The oldest message of some connection arrives."""
        busy = sorted(link for link, messages in self.links.items() if messages)
        if not busy:
            return
        link = self.chance.choice(busy)
        if link[1] in self.slow and self.chance.random() < 0.9:
            return
        sender, node = link
        message = self.links[link].popleft()
        if isinstance(message, Begin):
            self._begin(node, message.log, message.tree, message.next, message.version)
            return
        logs = self.logs if isinstance(message, Lost | Reconnect) else [message.log]
        for log in logs:
            relay = self._log(node, log)
            if relay is None:
                # It has not begun: its connection accepts nothing yet. What is lost then, it will be told again.
                if not (isinstance(message, OfLog) and node not in self.dead and node in self.got):
                    continue
                self.links[link].appendleft(message)
                return
            if isinstance(message, Lost):
                self._act(node, log, relay.node_lost(message.node))
            elif isinstance(message, Reconnect):
                self._act(node, log, relay.connect(message.parent, message.version))
            elif isinstance(message, Settle):
                relay.settle(message.number)
            elif isinstance(message.action, Send):
                self._act(node, log, relay.take(sender, message.action.number, message.action.entry))
            elif isinstance(message.action, Ask):
                self._act(node, log, relay.asked(sender, message.action.number))
            elif isinstance(message.action, Connect):
                self._act(node, log, relay.connected(sender, message.action.version))
            elif isinstance(message.action, Connected):
                if self.progress is not None:
                    self.progress.connection(message.action.child, log, message.action.version)
            else:
                relay.receipt(sender, message.action.through)
                if node == ROOT and self.progress is not None:
                    self.progress.receipt(sender, log, message.action.through)
                    self._look()

    def _act(self, node: int, log: int, actions: list[Action]) -> None:
        """Does what a relay says, in its order."""
        for action in actions:
            if isinstance(action, Process):
                self._process(node, log, action.entry)
                continue
            if isinstance(action, Ask) and not (self.faults.dies or self.faults.breaks):
                assert (node, log) in self.may_ask, f"node {node} asks, although it keeps its parent"
                self.may_ask.remove((node, log))
            self._send(node, action.to, OfLog(log, action))

        relay = self._log(node, log)
        assert relay is None or relay.kept <= KEPT_MOST + SLACK, f"node {node} keeps {relay.kept} entries"

    def _process(self, node: int, log: int, entry: object) -> None:
        expected = ("payload", log, self.got[node][log])
        assert entry == expected, f"node {node} gets {entry}, where {expected} should come"
        self.got[node][log] += 1

    def _look(self) -> None:
        """The root settles a switch that is over."""
        if self.progress is None or self.numbers is None or not self.progress.over:
            return
        numbers, self.numbers, self.progress = self.numbers, None, None
        self.settled = [numbers[log] for log in self.logs]
        self.story.append(f"version {self.version} is settled")
        for log, number in numbers.items():
            self.roots[log].settle(number)
            for node in sorted(self.relays.keys() - self.dead):
                self._send(ROOT, node, Settle(log, number))

    # Nodes

    def _start(self, node: int, places: list[int]) -> None:
        self.got[node] = list(places)
        self.relays[node] = {}

    def _begin(self, node: int, log: int, tree: Tree, number: int, version: int) -> None:
        if log in self.relays[node]:
            return
        self.may_ask.add((node, log))
        relay = self.relays[node][log] = RelayLog(node, tree, number, version)
        actions: list[Action] = []
        for lost in self.known_lost:
            actions += relay.node_lost(lost)
        self._act(node, log, [*actions, *relay.begin()])

    def _log(self, node: int, log: int) -> RelayLog | None:
        return self.roots[log] if node == ROOT else self.relays[node].get(log)

    # The end

    def _check_end(self) -> None:
        """All nodes of the tree have all entries, and nobody keeps what nobody needs."""
        assert self.tree.destinations == self.wanted
        for node in sorted(self.tree.destinations):
            for log in self.logs:
                missing = len(self.payloads[log]) - self.got[node][log]
                assert not missing, f"node {node} lacks the last {missing} entries of log {log}"
        for log in self.logs:
            kept = {
                node: relay.kept
                for node in (ROOT, *sorted(self.relays.keys() - self.dead))
                if (relay := self._log(node, log)) is not None and relay.kept
            }
            assert not kept, f"entries of log {log} are still kept: {kept}"
        gone = self.relays.keys() - self.dead - self.tree.destinations
        assert all(relay.idle for node in gone for relay in self.relays[node].values()), "a node that left cannot end"


def run_seed(seed: int, turns: int = 400) -> Counter[str]:
    """Runs a seed: what happened, counted. AssertionError, with the story, when something is wrong."""
    cluster = Cluster(seed, faults_of(seed))
    try:
        cluster.run(turns)
    except Exception as error:
        story = "\n  ".join(cluster.story[-20:])
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}\n  {story}") from error
    return cluster.counts
