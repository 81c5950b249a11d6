"""The root of a worker's streams: takes the entries of its logs to the relays of other nodes (docs/papers.md: W2, W6).

Each log of an exchange to all that has receivers on other nodes has a *stream*. Its entries go along a tree of relays,
once to each node. A channel *joins* the stream when it has sent all entries of the log before: from then on, entries
for this channel go through the relay of its worker's node. Channels that have not joined, as at the start of a job and
while they catch up, send straight to their workers (runtime/exchange/log.py).

So no channel ever depends on a relay. When a relay is lost, its channels leave the stream at once. They send straight
to their workers what the relay had not delivered, and join again when the node has another relay. The receivers sort by
number what comes by both ways, and drop what comes twice.

The root keeps no bodies. An entry of a stream is a number in the log, and the body is taken from the log's cache when
it is sent. When the cache has dropped a body, because an epoch is complete, then all receivers have it, and a relay
that still asks gets the entry without the body.

All trees of a worker have the same out-degree limit, because they share its processor and its link. The limit follows
the load (limit_adjuster.py), unless one is given. A stream that would gain nothing from a tree has none, and all its
channels send straight to their workers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.runtime.exchange.channel import LINKS_MAX, OutChannel
from penstock.runtime.exchange.log import OutLog
from penstock.runtime.exchange.message import BadMessage, Destination
from penstock.runtime.multicast import least_change
from penstock.runtime.multicast.reach import binomial_degree
from penstock.runtime.multicast.relay_log import Action, Connected, RootLog, Send
from penstock.runtime.multicast.tree import Tree
from penstock.runtime.multicast.tree_switch import Announcement, SwitchProgress, TreeSwitch
from penstock.runtime.relaying import wire
from penstock.runtime.relaying.hop_probe import HopProbe
from penstock.runtime.relaying.limit_adjuster import LimitAdjuster, Streams, ThreadTimes
from penstock.runtime.relaying.relay_map import RelayMap
from penstock.runtime.relaying.wire import StreamId
from penstock.runtime.status import StreamStatus
from penstock.runtime.transport.base import Buffer, LinkLoad, PeerTransport

# The root announces a tree without the connections of relays that have not made them in this time.
_CONNECT_NS = 1_000_000_000

#: The links on the way to a worker whose relay is a child of the root.
_CHILD_LINKS = 2

#: The only log of a switch: each stream has a tree of its own.
_LOG = 0


@dataclass(frozen=True)
class _Members:
    """An entry that says which channels the later entries are for."""

    payload: bytes


@dataclass
class _Switch:
    """A switch that is under way. `announced`: the number of the announcement, once it is written. `longest_s`: how
    long the switch may take from then on (Theorem 4)."""

    progress: SwitchProgress
    begun_ns: int
    announced: int | None = None
    longest_s: float = math.inf

    @property
    def after(self) -> Tree:
        """The new tree."""
        return self.progress.switch.after


class RootStream:
    """The stream of one log; see the module's docstring."""

    def __init__(self, root: MulticastRoot, number: int, log: OutLog) -> None:
        self.id: StreamId = (root.worker, root.life, number)
        self.out = log
        self.members: list[OutChannel] = []
        self.switches = 0
        self.switch_ns = 0  # how long the last switch took, from its announcement
        self._root = root
        self._tree = Tree(root.worker, {})
        self._log = RootLog(self._tree)
        self._version = 0
        self._members_due = False
        self._wanted: tuple[tuple[int, ...], int] = ((), 1)  # relays and limit of the tree, or of the one to come
        self._switch: _Switch | None = None
        self._taken: dict[int, int] = {}  # by relay: the first entry that it lacks
        self._probe = HopProbe()
        self._why = _why_none(0, 0, 0)  # why there is no tree; empty: there is one
        self._reachable = 0  # the number of channels whose workers have relays in the tree

    # --- called by the log ---------------------------------------------------------------------------------------

    def join(self) -> None:
        """Lets channels join that have sent all entries of the log. Called before an entry is made."""
        if len(self.members) >= self._reachable:
            return
        end = self.out.cache.end
        for channel in self.out.channels:
            if channel.may_join(end) and self._reaches(channel):
                channel.join()
                self.members.append(channel)
                self._members_due = True
                self._measure(channel)

    def channels_moved(self) -> None:
        """Must be called when channels were added, or lead to other workers."""
        self._count()
        self._root.changed(self)

    def _reaches(self, channel: OutChannel) -> bool:
        return not channel.local and self._root.relay_of(channel.worker) in self._tree.parent

    def _measure(self, member: OutChannel) -> None:
        """Tells a member how long its way is: the links of the tree, and from the relay to the worker."""
        relay = self._root.relay_of(member.worker)
        assert relay is not None, "a member's relay is in the tree"
        member.passes(self._tree.depth[relay] - 1 + _CHILD_LINKS)

    def _count(self) -> None:
        self._reachable = sum(map(self._reaches, self.out.channels))

    def leave(self, channel: OutChannel) -> None:
        """Sends nothing more to a channel, because its receiver goes back."""
        channel.leave()
        self.members.remove(channel)
        self._members_due = True

    def push(self, number: int) -> None:
        """Sends an entry of the log to all members."""
        if self._members_due:
            self._members_due = False
            self._append(_Members(wire.write_members(self._channels())))
        root, cache = self._root, self.out.cache
        begun_ns = root.stopwatch()
        self._append(number)
        size = cache.entries[number - cache.first][3]
        took_s = (root.stopwatch() - begun_ns) / 1e9
        if self._probe.free and self._switch is None:
            self._probe.follow(self._tree, self._log.next - 1, root.clock())
        root.adjuster.sent(len(self._tree.of(root.worker)), size + wire.HEAD_BYTES, took_s)

    def oldest(self) -> int:
        """Returns the number of the oldest entry of the log that may have to be sent again."""
        return self._first(self._log.entries)

    def _first(self, entries: Iterable[object]) -> int:
        """Returns the number that the first of these entries of the stream has in the log."""
        return next((entry for entry in entries if isinstance(entry, int)), self.out.cache.end)

    # --- trees ---------------------------------------------------------------------------------------------------

    @property
    def tree(self) -> Tree:
        """The tree of the next entry."""
        return self._tree

    @property
    def limit(self) -> int:
        """The out-degree limit of the tree, or of the one to come."""
        return self._wanted[1]

    @property
    def queued(self) -> int:
        """The number of entries that a child does not have yet."""
        first = min(
            (self._taken.get(child, self._log.next) for child in self._tree.of(self._root.worker)), default=None
        )
        return 0 if first is None else self._log.next - first

    @property
    def idle(self) -> bool:
        """Whether all workers have all entries that are for them. Nobody may be there any more to say that it has an
        announcement: when the workers of a node have ended, the tree is empty, and its relay is told nothing more."""
        return not any(isinstance(entry, int) for entry in self._log.entries)

    def adjust(self, limit: int | None, now_ns: int) -> None:
        """Begins a switch when another tree is wanted, because of the relays that there are, or of the limit. None
        stands for no limit."""
        self.look(now_ns)  # the relay that a switch waited for may be lost
        root = self._root
        workers = {channel.worker for channel in self.out.channels if not channel.local}
        relays = {worker: relay for worker in workers if (relay := root.relay_of(worker)) is not None}
        nodes = tuple(sorted(set(relays.values())))
        self._why = ""
        if not root.tree_pays(len(relays), len(nodes)):
            self._why = _why_none(len(workers), len(relays), len(nodes))
            nodes = ()
        most = max(1, binomial_degree(len(nodes)))
        wanted = (nodes, most if limit is None else min(limit, most))
        switch = self._switch
        if switch is not None and (switch.announced is not None or not self._log.lost & switch.after.destinations):
            return  # one at a time
        if wanted != self._wanted or switch is not None:
            self._wanted = wanted
            self._begin(now_ns)

    def _begin(self, now_ns: int) -> None:
        """Tells relays to connect to their new parents."""
        nodes, limit = self._wanted
        before = self._tree
        after = least_change.adapted(before, nodes, limit)
        self._version += 1
        self._probe.forget()
        lost = frozenset(self._log.lost & before.destinations)
        switch = TreeSwitch(before, Announcement(self._version, after), lost)
        self._switch = _Switch(SwitchProgress(switch, [_LOG]), now_ns)
        self._root.preparing(self, now_ns + _CONNECT_NS)
        for node in switch.connecting:
            self._tell(node, wire.CONNECT, after.parent[node], self._version)
        self.look(now_ns)

    def look(self, now_ns: int) -> None:
        """Announces the new tree when all have connected, and settles the switch when it is over."""
        switch = self._switch
        if switch is None:
            return
        if switch.announced is None:
            if not switch.progress.connected and now_ns - switch.begun_ns < _CONNECT_NS:
                return
            self._announce(switch, now_ns)
        if switch.announced is not None and switch.progress.over:
            self._settle(switch, now_ns)

    def _announce(self, switch: _Switch, now_ns: int) -> None:
        plan = switch.progress.switch
        before, after = plan.before, plan.after
        self._root.prepared(self)
        number = switch.announced = self._log.next
        switch.begun_ns = now_ns
        switch.longest_s = self._root.adjuster.longest_switch_s(self.queued, self._root.window())
        switch.progress.announced({_LOG: number})
        self._tree = after
        self._append(plan.announcement)
        tree = wire.write_tree(after)
        for node in sorted(after.destinations - before.destinations - self._log.lost):
            self._taken.pop(node, None)
            self._tell(node, wire.JOIN, number + 1, plan.announcement.version, tree)
            for relay in sorted(self._log.lost & after.destinations):
                self._tell(node, wire.LOST, relay)
        self._withdraw(
            (member, self._root.relay_of(member.worker)) for member in self.members[:] if not self._reaches(member)
        )
        for member in self.members:
            self._measure(member)
        self._count()

    def _settle(self, switch: _Switch, now_ns: int) -> None:
        nodes, self._switch = self._nodes(), None
        self.switches += 1
        self.switch_ns = now_ns - switch.begun_ns
        self._root.adjuster.switched(self.switch_ns / 1e9, switch.longest_s)
        assert switch.announced is not None
        self._log.settle(switch.announced)
        for node in sorted(nodes - self._log.lost):
            self._tell(node, wire.SETTLE, switch.announced)
        self._root.changed(self)

    # --- relays --------------------------------------------------------------------------------------------------

    def relays_changed(self, before: RelayMap, lost: set[int]) -> None:
        """The relays of some workers have changed, and some relays are lost. Channels whose relays were others leave
        the stream, and are sent straight what their relays may not have delivered."""
        self._withdraw(
            (channel, relay)
            for channel in self.members[:]
            if (relay := before.of_worker.get(channel.worker)) != self._root.relay_of(channel.worker)
        )
        self._probe.forget()
        for relay in lost:
            self._taken.pop(relay, None)
            self._act(self._log.node_lost(relay))
            if self._switch is not None:
                self._switch.progress.node_lost(relay)
        for node in sorted(self._nodes() - self._log.lost):
            for relay in lost & self._nodes():
                self._tell(node, wire.LOST, relay)
        self._count()
        self._root.changed(self)

    def _withdraw(self, members: Iterable[tuple[OutChannel, int | None]]) -> None:
        """Lets channels leave the stream, with their relays. They are sent straight what the relays may not have
        delivered, also by a relay that lives, because it may die before it has."""
        again: dict[int | None, int] = {}
        for channel, relay in members:
            if relay not in again:
                again[relay] = self._first(self._log.undelivered(relay))
            self.leave(channel)
            self.out.repeat(channel, again[relay])
            # Its task may have nothing to send any more, and would not look at its channels again.
            self._root.repeating[channel.number] = self.out, channel

    def take(self, sender: int, kind: int, number: int, place: int) -> None:
        """Takes a message of a relay. Raises BadMessage."""
        log, switch = self._log, self._switch
        if kind == wire.DELIVERED:
            self._taken[sender] = place
            if (hop_s := self._probe.has(sender, place, self._root.clock())) is not None:
                self._root.adjuster.hop(hop_s)
            log.receipt(sender, number - 1)
            if switch is not None:
                switch.progress.receipt(sender, _LOG, number - 1)
        elif kind == wire.ASK:
            self._act(log.asked(sender, number))
        elif kind == wire.CONNECTING:
            self._act(log.connected(sender, place))
        elif kind == wire.CONNECTED:
            self._connected(number, place)
        else:
            raise BadMessage(f"worker {self.id[0]} got a relay's message of the kind {kind}")

    def close(self) -> None:
        """Ends the stream, because the log sends nothing more."""
        for channel in self.members:
            channel.leave()
        self.members.clear()
        for node in sorted(self._nodes() - self._log.lost):
            self._tell(node, wire.CLOSE)

    def _nodes(self) -> frozenset[int]:
        """The relays that know the stream, or will."""
        if self._switch is None:
            return self._tree.destinations
        plan = self._switch.progress.switch
        return plan.before.destinations | plan.after.destinations

    def _connected(self, child: int, version: int) -> None:
        if self._switch is not None:
            self._switch.progress.connection(child, _LOG, version)

    def _channels(self) -> dict[int, dict[int, tuple[Destination, ...]]]:
        found: dict[int, dict[int, tuple[Destination, ...]]] = {}
        for channel in self.members:
            relay = self._root.relay_of(channel.worker)
            assert relay is not None, "a member's relay is in the tree"
            workers = found.setdefault(relay, {})
            workers[channel.worker] = (*workers.get(channel.worker, ()), (channel.number, channel.generation))
        return found

    def _append(self, entry: int | _Members | Announcement) -> None:
        self._act(self._log.append(entry))

    def _act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._root.send(action.to, (self, action.number, action.entry))
            elif isinstance(action, Connected):
                self._connected(action.child, action.version)

    def _tell(self, relay: int, kind: int, number: int = 0, place: int = 0, payload: bytes = b"") -> None:
        self._root.send(relay, (wire.head(kind, self.id, number, place) + payload,))

    def message(self, number: int, entry: object) -> tuple[Buffer, ...]:
        """Returns the message of an entry, in parts."""
        if isinstance(entry, int):
            cache = self.out.cache
            at = entry - cache.first
            if at < 0:
                return (wire.head(wire.SKIPPED, self.id, number),)
            return (wire.head(wire.ENTRY, self.id, number, entry), *cache.parts(cache.entries[at]))
        if isinstance(entry, _Members):
            return (wire.head(wire.MEMBERS, self.id, number) + entry.payload,)
        assert isinstance(entry, Announcement), entry
        return (wire.head(wire.TREE, self.id, number, entry.version) + wire.write_tree(entry.tree),)

    def status(self) -> StreamStatus:
        """Returns the state of the stream for people."""
        return StreamStatus(
            stream=self.id[2],
            tree={node: list(children) for node, children in self._tree.children.items()},
            no_tree=self._why,
            limit=self.limit,
            members=len(self.members),
            channels=len(self.out.channels),
            switching=self._switch is not None,
            switches=self.switches,
            last_switch_ms=self.switch_ns / 1e6,
            undelivered=self._log.kept,
            entries=self.out.cache.end,
            bytes=self.out.bytes,
            encodings=self.out.encoded,
            encoding_ms=self.out.encoding_ns / 1e6,
            load=self._root.adjuster.status(),
        )


def _why_none(workers: int, reached: int, nodes: int) -> str:
    """Says why a stream has no tree. `workers`: on other nodes; `reached`: how many of them have relays."""
    if reached < min(workers, 2):
        return f"relays of {workers} workers on other nodes are not ready"
    if reached <= 1:
        return "one worker alone is sent to straight" if reached else "no worker on another node receives"
    return f"{nodes} nodes with one worker each are sent to straight, because a tree would save few copies"


#: What waits for room: a message in parts, or an entry of a stream, whose parts are made when there is room.
_Waiting = tuple[bytes] | tuple[RootStream, int, object]


class MulticastRoot:
    """The streams of one worker's process; see the module's docstring. `life`: the number of the process among those of
    this worker."""

    def __init__(
        self,
        worker: int,
        life: int,
        transport: PeerTransport,
        clock: Callable[[], int],
        limit: int | None = None,
        adjuster: LimitAdjuster | None = None,
        *,
        stopwatch: Callable[[], int] | None = None,
        core_wait: Callable[[], int] | None = None,
    ) -> None:
        """`stopwatch`: tells the processor time of the thread in ns; without it, the clock says what sending takes, and
        nothing is known of the thread's other work. `core_wait`: tells for how many ns the thread has waited for a
        processor."""
        self.worker = worker
        self.life = life
        self._transport = transport
        self.clock = clock  # the time in ns
        self.stopwatch = clock if stopwatch is None else stopwatch
        self._measures = stopwatch is not None
        self._core_wait = core_wait
        self.adjuster = adjuster or LimitAdjuster()
        self._adjusts = limit is None
        self._limit = limit
        self._map = RelayMap()
        self._streams: dict[int, RootStream] = {}
        self._next = 0
        self._outbox: dict[int, deque[_Waiting]] = {}
        self._to_adjust: dict[RootStream, None] = {}
        self._preparing: dict[RootStream, int] = {}  # with the time until which the stream waits for connections
        #: Channels that repeat entries, by number. The run loop flushes their logs, and removes those that have.
        self.repeating: dict[int, tuple[OutLog, OutChannel]] = {}

    def stream(self, log: OutLog) -> RootStream:
        """Begins a stream for a log, whose channels follow."""
        stream = self._streams[self._next] = RootStream(self, self._next, log)
        self._next += 1
        self._to_adjust[stream] = None
        return stream

    def close(self, stream: RootStream) -> None:
        """Ends a stream."""
        if self._streams.pop(stream.id[2], None) is not None:
            self._to_adjust.pop(stream, None)
            self._preparing.pop(stream, None)
            stream.close()

    def use(self, relays: RelayMap) -> None:
        """Knows these relays, and no others."""
        before, self._map = self._map, relays
        lost = set(before.addresses.keys() - relays.addresses.keys())
        for relay in lost:
            self._outbox.pop(relay, None)
        for stream in self._streams.values():
            stream.relays_changed(before, lost)
        self.tick()

    def tree_pays(self, workers: int, nodes: int) -> bool:
        """Returns whether a tree of relays should carry the entries for this many workers on this many other nodes.
        With a tree, the root sends at most as many copies as its out-degree, and every entry takes a hop more."""
        if workers <= 1:
            return False
        saves = workers > nodes or nodes >= 2 * binomial_degree(nodes)
        return saves or not self._adjusts or self.adjuster.crowded

    def limit(self, limit: int) -> None:
        """Gives all trees this out-degree limit, and leaves it so."""
        self._adjusts = False
        self._set_limit(limit)

    def _set_limit(self, limit: int) -> None:
        self._limit = limit
        self.reconsider()
        self.tick()

    def reconsider(self) -> None:
        """Another tree may be wanted for every stream."""
        for stream in self._streams.values():
            self._to_adjust[stream] = None

    def changed(self, stream: RootStream) -> None:
        """Another tree may be wanted for a stream."""
        self._to_adjust[stream] = None

    def preparing(self, stream: RootStream, until_ns: int) -> None:
        """A stream waits for relays to connect, until a time at most."""
        self._preparing[stream] = until_ns

    def prepared(self, stream: RootStream) -> None:
        """A stream waits no longer."""
        self._preparing.pop(stream, None)

    def relay_of(self, worker: int) -> int | None:
        """Returns the relay of a worker on another node, if it has one."""
        relay = self._map.of_worker.get(worker)
        return None if relay == self._map.of_worker.get(self.worker) else relay

    def take(self, sender: int, message: Buffer) -> None:
        """Takes a message of a relay. Raises BadMessage."""
        head = wire.read(message)
        _, life, number = head.stream
        stream = self._streams.get(number)
        if life != self.life or stream is None or sender not in self._map.addresses:
            return  # of a process before, of a stream that has ended, or of a relay that was lost
        stream.take(sender, head.kind, head.number, head.place)
        stream.look(self.clock())

    def send(self, relay: int, message: _Waiting) -> None:
        """Sends a message to a relay, after all that wait for room."""
        waiting = self._outbox.get(relay)
        if waiting:
            waiting.append(message)
        elif relay in self._map.addresses and not self._send(relay, message):
            self._outbox.setdefault(relay, deque()).append(message)

    def _send(self, relay: int, message: _Waiting) -> bool:
        parts = message[0].message(*message[1:]) if isinstance(message[0], RootStream) else message
        return self._transport.send(relay, self.worker, parts)

    @property
    def waiting(self) -> bool:
        """Whether something waits for room, so that `tick` must be called again."""
        return any(self._outbox.values())

    @property
    def idle(self) -> bool:
        """Whether all workers have everything that was sent through relays."""
        return all(stream.idle for stream in self._streams.values())

    def tick(self) -> None:
        """Takes the steps that are due. The run loop calls this in each pass."""
        if self._outbox:
            begun_ns = self.stopwatch()
            for relay, waiting in list(self._outbox.items()):
                while waiting and self._send(relay, waiting[0]):
                    waiting.popleft()
                if not waiting:
                    del self._outbox[relay]
            self.adjuster.sent_later((self.stopwatch() - begun_ns) / 1e9)
        if self._to_adjust:
            now_ns = self.clock()
            to_adjust, self._to_adjust = self._to_adjust, {}
            for stream in to_adjust:
                stream.adjust(self._limit, now_ns)
        if self._preparing:
            now_ns = self.clock()
            for stream, until_ns in list(self._preparing.items()):
                if now_ns >= until_ns:
                    del self._preparing[stream]
                    stream.look(now_ns)
        if self._adjusts and self._map.addresses:
            self._look()

    def _look(self) -> None:
        """Gives the trees another limit, or streams a tree or none, if the load calls for a change."""
        adjuster, now_s = self.adjuster, self.clock() / 1e9
        if not adjuster.may_look(now_s):
            return
        streams = [stream for stream in self._streams.values() if stream.members]
        if not streams:
            if self._streams and adjuster.look_at_links(now_s, self._transport.links):
                self.reconsider()
            return
        crowded = adjuster.crowded
        window_bytes = self.window()
        now = Streams(
            sum(stream.queued for stream in streams),
            window_bytes,
            sum(stream.out.encoding_ns for stream in streams) / 1e9,
            max(stream.limit for stream in streams),
            max(len(stream.tree.destinations) for stream in streams),
            any(stream.out.queue for stream in streams),
            window_bytes // _CHILD_LINKS,
            LINKS_MAX,
        )
        limit = adjuster.look(now_s, now, self._relay_links, self._thread)
        if limit is not None:
            self._set_limit(limit)
        if adjuster.crowded != crowded:
            self.reconsider()

    def _relay_links(self) -> dict[int, LinkLoad]:
        return {peer: load for peer, load in self._transport.links().items() if peer in self._map.addresses}

    def _thread(self) -> ThreadTimes:
        if not self._measures:
            return ThreadTimes()
        core_wait_ns = 0 if self._core_wait is None else self._core_wait()
        return ThreadTimes(self.stopwatch() / 1e9, core_wait_ns / 1e9)

    def window(self) -> int:
        """Returns how many bytes may be under way in all streams, to the children of the root."""
        windows = sum(stream.members[0].credit_window for stream in self._streams.values() if stream.members)
        return _CHILD_LINKS * windows

    def due_s(self) -> float | None:
        """Returns in how many seconds `tick` must be called; None: when there is something new."""
        if not self._preparing:
            return None
        return max(0, min(self._preparing.values()) - self.clock()) / 1e9

    def status(self) -> list[StreamStatus]:
        """Returns the state of each stream for people. Any thread may call this."""
        return [stream.status() for stream in list(self._streams.values())]
