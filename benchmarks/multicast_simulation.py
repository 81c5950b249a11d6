"""A discrete-event model of one-to-many multicast: a source, its transfer queue, and the nodes of a tree
(docs/papers.md: W10). It is pure: it knows no clock, no file and no process, and chance comes from a seed.

Each node has two threads, as in the paper. One receives (`receive_s` an entry), and the other sends to the node's
children, one after the other (`copy_s` each). The root also encodes each entry once (`encode_s`). An entry needs
`link_s` from the end of its copy until it is at the child. Both threads take entries in the order of their numbers.

The root's transfer queue holds `capacity` entries, with the one that is being sent. When it is full, the source waits;
nothing is dropped. The latency of an entry counts from the time when it was due, so a source that waits pays.
Relays have queues without a limit. No node of these trees has more children than the root, and no relay encodes, so
entries come to a relay at least as far apart as the relay needs for one. A switch over long links is the exception: a
node whose way gets shorter has early entries from its new parent, and waits for those that its old parent still has to
send. Then they all go on at once. Where memory is bounded, the root would have to wait instead, which is not modelled.
`longest_relay_queue` shows how much a relay would have to keep.

All entries that the root begins between two events are a block. A block is computed node by node, not entry by entry:
the k-th entry begins at the latest of the times when it is there and when the one before is done, which is a running
maximum. The events are the looks of the load monitor and the steps of a switch. As the run-time does, the root asks
often whether it should look before the interval is over. The decisions, the new trees and the steps of a switch come
from penstock/runtime/multicast; here is only what they cost.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count

import numpy as np
import numpy.typing as npt

from penstock.runtime.multicast.least_change import adapted
from penstock.runtime.multicast.load_monitor import Counters, LoadMonitor
from penstock.runtime.multicast.queue_model import Cost
from penstock.runtime.multicast.self_adjustment import AdjustmentOptions, decide, look_is_due
from penstock.runtime.multicast.switch_cost import longest_switch_s
from penstock.runtime.multicast.tree import Tree
from penstock.runtime.multicast.tree_switch import Announcement, SwitchProgress, TreeSwitch

Floats = npt.NDArray[np.float64]

_LOG = 0  # there is one numbered log
_ASKS = 2  # how often the root asks in the least time between two looks whether it should look


@dataclass(frozen=True)
class Times:
    """What things take, in seconds. `control_s`: to send a control message, and to handle one."""

    copy_s: float
    encode_s: float = 0.0
    receive_s: float = 0.0
    link_s: float = 0.0
    control_s: float = 0.0

    def root_s(self, children: int) -> float:
        """Returns what an entry takes at the root."""
        return Cost(self.copy_s, self.encode_s).record_s(children)


def starts(ready: Floats, service_s: float, free_s: float) -> Floats:
    """Returns when a thread begins each entry. `ready`: when each is there; `free_s`: when the thread is free for the
    first one."""
    ahead = np.arange(len(ready)) * service_s
    begun: Floats = np.maximum.accumulate(np.maximum(ready - ahead, free_s)) + ahead
    return begun


class Network:
    """The nodes below the root: when their threads are free, and when they have which entry."""

    def __init__(self, times: Times) -> None:
        self.times = times
        self.longest_relay_queue = 0
        self.gaps: dict[int, float] | None = None  # by node: the longest time between two entries; None: not wanted
        self._has: dict[int, float] = defaultdict(lambda: -math.inf)  # when each node had its last entry
        self._free: dict[int, float] = defaultdict(lambda: -math.inf)  # when its sending thread is free

    def has(self, node: int) -> float:
        """Returns when a node had the last entry."""
        return self._has[node]

    def busy(self, node: int, at_s: float) -> None:
        """A relay sends a control message."""
        self._free[node] = max(self._free[node], at_s) + self.times.control_s

    def carry(self, tree: Tree, ready: Floats, copy_s: float) -> Floats:
        """Takes a block of entries through a tree. `ready`: when the root begins with the first copy of each. Returns
        when the last node has each."""
        complete: Floats = ready.copy()
        relaying = [(tree.root, ready)]
        while relaying:
            node, begun = relaying.pop()
            for place, child in enumerate(tree.of(node), 1):
                received = self._receive(child, begun + (place * copy_s + self.times.link_s))
                np.maximum(complete, received, out=complete)
                if tree.of(child):
                    relaying.append((child, self._relay(child, received, len(tree.of(child)) * copy_s)))
        return complete

    def _receive(self, node: int, arrives: Floats) -> Floats:
        """Returns when a node has each entry of a block."""
        before = self._has[node]
        received: Floats = starts(arrives, self.times.receive_s, before) + self.times.receive_s
        self._has[node] = float(received[-1])
        if self.gaps is not None:
            longest = max(float(received[0]) - before, float(np.diff(received).max(initial=0)))
            self.gaps[node] = max(self.gaps.get(node, 0.0), longest)
        return received

    def _relay(self, node: int, received: Floats, service_s: float) -> Floats:
        """Returns when a node begins with the first copy of each entry of a block."""
        begun = starts(received, service_s, self._free[node])
        self._free[node] = float(begun[-1]) + service_s
        if service_s:
            waited = float((begun - received).max())
            self.longest_relay_queue = max(self.longest_relay_queue, math.ceil(waited / service_s - 1e-6))
        return begun


class Root:
    """The source, the transfer queue and the sending thread of the root."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free_s = 0.0
        self.begun = 0
        self.longest_wait_s = 0.0  # of the source, for room in the queue
        self._offered = 0
        self._waiting: deque[Floats] = deque()  # when the entries are due that have not begun
        self._ends = np.full(capacity, -math.inf)  # of the last entries that have begun, one for each place

    def offer(self, due: Floats) -> None:
        """The source has entries that are due at these times."""
        if len(due):
            self._offered += len(due)
            self._waiting.append(due)

    def begin(self, until_s: float, service_s: float) -> tuple[Floats, Floats]:
        """Begins what can begin before a time. Returns when the entries were due, and when they begin."""
        most = max(0, math.ceil((until_s - self.free_s) / service_s) + 1)
        due = self._take(most)
        begins = starts(due, service_s, self.free_s)
        number = int(np.searchsorted(begins, until_s))
        if number < len(due):
            self._waiting.appendleft(due[number:])
        due, begins = due[:number], begins[:number]
        if number:
            ends = np.concatenate([self._ends, begins + service_s])
            # An entry gets into the queue when the one that is `capacity` before it has left.
            self.longest_wait_s = max(self.longest_wait_s, float((ends[:number] - due).max()))
            self._ends = ends[-self.capacity :]
            self.free_s = float(ends[-1])
            self.begun += number
        return due, begins

    def _take(self, most: int) -> Floats:
        taken: list[Floats] = []
        while most and self._waiting:
            block = self._waiting.popleft()
            if len(block) > most:
                self._waiting.appendleft(block[most:])
                block = block[:most]
            taken.append(block)
            most -= len(block)
        return np.concatenate(taken) if taken else np.empty(0)

    def busy(self, at_s: float, seconds: float) -> float:
        """The sending thread does something else as soon as it is free. Returns when this is done."""
        self.free_s = max(self.free_s, at_s) + seconds
        return self.free_s

    def backlog(self, now_s: float) -> tuple[int, int]:
        """Returns how many entries are in the queue, and how many the source holds back, when all have begun that can
        begin before now."""
        unfinished = self._offered - self.begun + int(self._ends[-1] > now_s)
        queued = min(self.capacity, unfinished)
        return queued, unfinished - queued

    def taken_in(self, now_s: float) -> int:
        """Returns how many entries have come into the queue."""
        return self.begun - int(self._ends[-1] > now_s) + self.backlog(now_s)[0]


@dataclass(frozen=True)
class Switched:
    """A switch of the tree that is over. `stopped_s`: for how long the root's thread was at control messages instead of
    records. `gaps`: the longest time between two records at each node during the switch. `longest_s`: what Theorem 4
    allows when the root sends nothing at all."""

    at_s: float
    limits: tuple[int, int]
    announced_s: float
    took_s: float
    messages: int
    stopped_s: float
    handed_over: frozenset[int]
    gaps: dict[int, float]
    longest_s: float


@dataclass(frozen=True)
class Sample:
    """What is so at the end of an interval; latencies are those of the records that the root began in the interval."""

    at_s: float
    rate: float
    limit: int
    queued: int
    held: int
    p50_s: float
    p99_s: float


@dataclass
class Story:
    """What has happened. `completed`: the records that the last node had in each interval."""

    interval_s: float
    samples: list[Sample] = field(default_factory=list)
    switches: list[Switched] = field(default_factory=list)
    completed: list[int] = field(default_factory=list)
    longest_wait_s: float = 0.0
    longest_relay_queue: int = 0


@dataclass
class _Switching:
    """A switch under way."""

    at_s: float
    limits: tuple[int, int]
    progress: SwitchProgress
    longest_s: float
    announced_s: float = math.inf
    messages: int = 0
    stopped_s: float = 0.0


class Multicast:
    """A source with a profile of rates, and a tree: fixed, or adjusted by `options`."""

    def __init__(
        self,
        tree: Tree,
        limit: int,
        times: Times,
        capacity: int,
        *,
        adjusting: bool = False,
        options: AdjustmentOptions | None = None,
        stops: bool = False,
        seed: int = 1,
        regular: bool = False,
    ) -> None:
        """`stops`: the root sends no records from the beginning of a switch to its announcement, as in the paper.
        `regular`: the records are due at equal distances instead of at random times."""
        self.tree = tree
        self.limit = limit
        self.times = times
        self.root = Root(capacity)
        self.network = Network(times)
        self.options = options or AdjustmentOptions()
        self.story = Story(self.options.interval_s)
        self._adjusting = adjusting
        # The root asks in each part of an interval whether it should look. It glances at its queue when it asks.
        early = self.options.early
        self._parts = math.ceil(_ASKS / early) if adjusting and early < 1 else 1
        self._stops = stops
        self._regular = regular
        self._chance = np.random.default_rng(seed)
        self._monitor = LoadMonitor(
            self.options.interval_s, self.options.alpha, self.options.early, self.options.memory_s
        )
        self._counters = Counters()
        self._switching: _Switching | None = None
        self._version = 0
        # Until a switch has been seen: the messages to all nodes twice, and four ways.
        self._switch_s = 2 * len(tree.parent) * times.control_s + 4 * (times.link_s + 2 * times.control_s)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._serial = count()
        self._latencies: list[Floats] = []
        self._completed: dict[int, int] = defaultdict(int)

    # --- records -------------------------------------------------------------------------------------------------

    def run(self, profile: Sequence[tuple[float, float]]) -> Story:
        """Continues for a profile of (seconds, records a second)."""
        interval = self.options.interval_s
        for seconds, rate in profile:
            for _ in range(round(seconds / interval)):
                begin = len(self.story.samples) * interval
                due = self._due(begin, begin + interval, rate)
                for part in range(1, self._parts + 1):
                    until = begin + interval * part / self._parts
                    there = len(due) if part == self._parts else int(np.searchsorted(due, until))
                    self.root.offer(due[:there])
                    due = due[there:]
                    while self._events and self._events[0][0] < until:
                        at, _, action = heappop(self._events)
                        self._advance(at)
                        action(at)
                    self._advance(until)
                    if self._adjusting:
                        self._look(until)
                self._sample(until, rate)
        self.story.completed = [self._completed[index] for index in range(len(self.story.samples))]
        self.story.longest_wait_s = self.root.longest_wait_s
        self.story.longest_relay_queue = self.network.longest_relay_queue
        return self.story

    def _due(self, begin_s: float, end_s: float, rate: float) -> Floats:
        """When the records of an interval are due."""
        if self._regular:
            number = round((end_s - begin_s) * rate)
            return begin_s + np.arange(number) / rate
        number = int(self._chance.poisson((end_s - begin_s) * rate))
        return np.sort(self._chance.uniform(begin_s, end_s, number))

    def _advance(self, until_s: float) -> None:
        """Begins all records that can begin before a time, and takes them through the tree."""
        children = len(self.tree.of(self.tree.root))
        due, begins = self.root.begin(until_s, self.times.root_s(children))
        if not len(due):
            return
        complete = self.network.carry(self.tree, begins + self.times.encode_s, self.times.copy_s)
        self._latencies.append(complete - due)
        for index, number in enumerate(np.bincount((complete / self.options.interval_s).astype(np.int64))):
            if number:
                self._completed[index] += int(number)
        c, copies = self._counters, len(due) * children
        self._counters = replace(
            c,
            copies=c.copies + copies,
            copying_s=c.copying_s + copies * self.times.copy_s,
            encoded=c.encoded + len(due),
            encoding_s=c.encoding_s + len(due) * self.times.encode_s,
        )

    # --- looks and switches --------------------------------------------------------------------------------------

    def _sample(self, now_s: float, rate: float) -> None:
        queued, held = self.root.backlog(now_s)
        latencies = np.concatenate(self._latencies) if self._latencies else np.full(1, math.nan)
        self._latencies.clear()
        p50, p99 = np.quantile(latencies, [0.5, 0.99])
        self.story.samples.append(Sample(now_s, rate, self.limit, queued, held, float(p50), float(p99)))

    def _look(self, now_s: float) -> None:
        """Looks at the queue, if it is time."""
        queued, _ = self.root.backlog(now_s)
        arrived, capacity, options = self.root.taken_in(now_s), self.root.capacity, self.options
        # With one part, each is an interval.
        if self._parts > 1 and not look_is_due(self._monitor, now_s, arrived, queued, capacity, options):
            return
        self._counters = replace(self._counters, arrived=arrived)
        load = self._monitor.look(now_s, self._counters, queued)
        if load is None or self._switching is not None:
            return
        nodes = len(self.tree.parent)
        verdict = decide(load, self.limit, nodes, capacity, self._switch_s, options)
        if verdict.limit != self.limit:
            self.switch(now_s, verdict.limit, load.rate)

    def switch(self, now_s: float, limit: int, rate: float) -> None:
        """Begins to change the tree."""
        after = adapted(self.tree, sorted(self.tree.destinations), limit)
        self._version += 1
        change = TreeSwitch(self.tree, Announcement(self._version, after))
        queued, _ = self.root.backlog(now_s)
        allowed = longest_switch_s(self.root.capacity, queued, rate)
        under_way = _Switching(now_s, (self.limit, limit), SwitchProgress(change, [_LOG]), allowed)
        self._switching = under_way
        self.network.gaps = {}
        if self._stops:  # the paper's sender tells all nodes first that there will be another tree
            self._tell(now_s, len(self.tree.destinations | after.destinations))
        latest = 0.0
        for node in change.connecting:
            latest = max(latest, self._reconnect(node, after.parent[node], self._tell(now_s, 1)))
        if self._stops:
            under_way.stopped_s += max(0.0, latest - self.root.free_s)
            self.root.free_s = max(self.root.free_s, latest)
        if under_way.progress.connected:
            self._at(self.root.free_s, self._announce)

    def _tell(self, now_s: float, messages: int) -> float:
        """The root sends control messages. Returns when it has sent them."""
        assert self._switching is not None
        seconds = messages * self.times.control_s
        self._switching.messages += messages
        self._switching.stopped_s += seconds
        return self.root.busy(now_s, seconds)

    def _hop(self, at_s: float) -> float:
        """When a control message has been handled that was sent at a time."""
        return at_s + self.times.link_s + self.times.control_s

    def _reconnect(self, node: int, parent: int, told_s: float) -> float:
        """A node connects to its new parent, which tells the root. Returns when the root knows."""
        assert self._switching is not None
        asked = self._hop(told_s)
        self.network.busy(node, asked)
        answered = self._hop(asked + self.times.control_s)
        version, progress = self._version, self._switching.progress
        if parent == self.tree.root:
            known = answered
        else:
            self.network.busy(parent, answered)
            known = self._hop(answered + self.times.control_s)

        def connected(now_s: float) -> None:
            assert self._switching is not None
            self._switching.messages += 1 if parent == self.tree.root else 2
            if not self._stops:
                self._switching.stopped_s += self.times.control_s
                self.root.busy(now_s, self.times.control_s)
            progress.connection(node, _LOG, version)
            if progress.connected:
                self._at(max(now_s, self.root.free_s), self._announce)

        self._at(known, connected)
        return known

    def _announce(self, now_s: float) -> None:
        """The announcement takes the old tree, and all later entries take the new one."""
        under_way = self._switching
        assert under_way is not None
        change, progress = under_way.progress.switch, under_way.progress
        begins = max(now_s, self.root.free_s)
        under_way.announced_s = begins
        self._tell(now_s, len(self.tree.of(self.tree.root)))
        under_way.messages += len(self.tree.parent) - len(self.tree.of(self.tree.root))
        self.network.carry(self.tree, np.array([begins]), self.times.control_s)
        progress.announced({_LOG: self.root.begun})
        number = self.root.begun
        self.tree, self.limit = change.after, under_way.limits[1]
        last = begins

        def receipt(node: int) -> Callable[[float], None]:
            def came(now_s: float) -> None:
                under_way.messages += 1
                under_way.stopped_s += self.times.control_s
                self.root.busy(now_s, self.times.control_s)
                progress.receipt(node, _LOG, number)
                if progress.over:
                    self._settle(now_s)

            return came

        for handover in change.handovers:
            has = self.network.has(handover.node)
            self.network.busy(handover.node, has)
            last = self._hop(has + self.times.control_s)
            self._at(last, receipt(handover.node))
        if progress.over:
            self._settle(last)

    def _settle(self, now_s: float) -> None:
        under_way = self._switching
        assert under_way is not None
        over = self._tell(now_s, len(self.tree.parent))
        self._switching = None
        self._switch_s = over - under_way.at_s
        self.story.switches.append(
            Switched(
                under_way.at_s,
                under_way.limits,
                under_way.announced_s,
                self._switch_s,
                under_way.messages,
                under_way.stopped_s,
                frozenset(handover.node for handover in under_way.progress.switch.handovers),
                self.network.gaps or {},
                under_way.longest_s,
            )
        )
        self.network.gaps = None

    def _at(self, at_s: float, action: Callable[[float], None]) -> None:
        heappush(self._events, (at_s, next(self._serial), action))


# --- fixed trees under a steady load ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steady:
    """A fixed tree under a steady load. `queue`: the mean number of records in the queue and in service."""

    records_s: float
    queue: float
    p50_s: float
    p99_s: float
    longest_relay_queue: int


def saturated(tree: Tree, times: Times, records: int) -> float:
    """Returns how many records a second the last node has when the source always has one more."""
    children = len(tree.of(tree.root))
    begins: Floats = np.arange(records, dtype=np.float64) * times.root_s(children)
    complete = Network(times).carry(tree, begins + times.encode_s, times.copy_s)
    return (records - 1) / float(complete[-1] - complete[0])


def steady(tree: Tree, times: Times, rate: float, records: int, seed: int = 1) -> Steady:
    """Sends records that come at random times. The first quarter is not counted."""
    due = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, records))
    service = times.root_s(len(tree.of(tree.root)))
    begins = starts(due, service, 0.0)
    network = Network(times)
    complete = network.carry(tree, begins + times.encode_s, times.copy_s)
    warm = records // 4
    latency = (complete - due)[warm:]
    p50, p99 = np.quantile(latency, [0.5, 0.99])
    queue = float((begins + service - due)[warm:].sum() / (due[-1] - due[warm]))  # Little's law
    served = (len(latency) - 1) / float(complete[-1] - complete[warm])
    return Steady(served, queue, float(p50), float(p99), network.longest_relay_queue)
