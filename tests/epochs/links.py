"""The network of the simulated cluster (tests/epochs/sim.py): memory that processes of one node share, and TCP
connections between processes of different nodes.

Within a node a process has an inbox of limited room, in which the others put their messages, as in a ring. Between
nodes each process has the real TcpTransport, over connections that are simulated: bytes arrive after a delay, a
connection breaks at any byte, and a *line*, which is one direction between two nodes, may be cut for a while, or for
good. What is written to a connection meanwhile arrives later, or the connection is replaced by another one. Nothing
that the two ends have promised may depend on which of both happens: while both processes live, every message comes
once, and in order. Each process knows which of its peers do not answer.

The network has a list of what will happen and when. It has no clock of its own.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import random
import select
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.runtime.transport.base import Buffer, LinkLoad, SilentLink, Transport
from penstock.runtime.transport.framing import FrameDecoder
from penstock.runtime.transport.peer_handshake import INCARNATION_BYTES
from penstock.runtime.transport.peer_handshake import Process as Peer
from penstock.runtime.transport.peer_links import Link
from penstock.runtime.transport.tcp import Incoming, TcpTransport

if TYPE_CHECKING:
    from tests.epochs.sim import Faults

#: The "descriptor" that is readable when a connection has come.
BELL = -2
#: A frame that is larger gets a buffer of its own.
BUFFER_BYTES = 4096
REGION_MOST = 1 << 16
#: The silence after which a process knows of it, as a share of the one after which a node is lost.
TOLD_SHARE = 0.3


@dataclass(eq=False)
class Node:
    """A machine: its processes share memory. `ahead_ns`: how far its clock is ahead of the cluster's."""

    number: int
    ahead_ns: int = 0
    slow: float = 0.0
    paused_until: float = 0.0
    died_at: float | None = None


@dataclass(eq=False)
class Line:
    """One direction between two nodes."""

    delay_s: float
    cut_until: float = 0.0
    cut_since: float = 0.0


class Inbox:
    """One process's memory: what has come, by the life of the process that sent it."""

    __slots__ = ("capacity", "dead", "queues", "quiet", "used")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.queues: dict[int, deque[tuple[int, bytes]]] = {}
        self.dead: bool | None = None  # its process has died: True when it seems to take messages all the same
        self.quiet = False  # its process has nothing to do until something comes


class Network:
    """See the module's docstring. `now`: returns the time."""

    def __init__(self, seed: int, faults: Faults, now: Callable[[], float], counts: Counter[str]) -> None:
        self.rng = random.Random(f"links {seed}")
        self.faults = faults
        self.now = now
        self.counts = counts
        self.lives: dict[str, Ends] = {}  # by address
        self.of: dict[bytes, Ends] = {}  # by incarnation
        self.pipes: list[Pipe] = []
        self.numbers = itertools.count(1)
        self._lines: dict[tuple[int, int], Line] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def line(self, a: Node, b: Node) -> Line:
        """The line from a node to another one."""
        found = self._lines.get((a.number, b.number))
        if found is None:
            found = Line(self.faults.delay_s * self.rng.uniform(0.5, 1.5))
            self._lines[a.number, b.number] = self._lines[b.number, a.number] = found
            self._lines[b.number, a.number] = Line(found.delay_s)
        return found

    def lines(self) -> Iterable[Line]:
        """All lines."""
        return self._lines.values()

    def is_cut(self, a: Node, b: Node) -> bool:
        """Whether nothing gets from a node to another one now."""
        return a is not b and self.line(a, b).cut_until > self.now()

    def silent_s(self, a: Node, b: Node) -> float:
        """For how long a node has had no answer of another one; 0: it has."""
        now = self.now()
        lines = (self.line(a, b), self.line(b, a))
        cut = [now - line.cut_since for line in lines if line.cut_until > now]
        return max([*cut, 0.0 if b.died_at is None else now - b.died_at, 0.0])

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Does something at this time, which may be never."""
        if when == math.inf:
            return
        heapq.heappush(self._due, (when, next(self.numbers), action))

    def next(self) -> float | None:
        """When something happens next."""
        return self._due[0][0] if self._due else None

    def run(self) -> None:
        """Lets happen what is due."""
        now = self.now()
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()

    # --- what goes wrong -----------------------------------------------------------------------------------------

    def cut(self, a: Node, b: Node, until: float) -> None:
        """Lets nothing through from a node to another one, perhaps for good. Afterwards connections go on, or are
        replaced."""
        line = self.line(a, b)
        if line.cut_until <= self.now():
            line.cut_since = self.now()
        line.cut_until = max(line.cut_until, until)
        for pipe in list(self.pipes):
            for side in (pipe.dialer, pipe.answerer):
                if side.other.own.node is a and side.own.node is b:
                    side.hold_back(line)
        self.at(line.cut_until, lambda: self._healed(a, b))

    def _healed(self, a: Node, b: Node) -> None:
        for pipe in list(self.pipes):
            ends = (pipe.dialer.own.node, pipe.answerer.own.node)
            if ends in ((a, b), (b, a)) and self.rng.random() < 0.5:
                self.counts["connections replaced"] += 1
                pipe.dialer.own.far_links.dial(pipe.answerer.own.peer, beside=True)

    def break_some(self) -> bool:
        """A connection breaks. Returns False when there is none."""
        if not self.pipes:
            return False
        pipe = self.rng.choice(self.pipes)
        under_way = len(pipe.dialer.incoming) + len(pipe.answerer.incoming)
        self.counts["connections broken"] += 1
        self.counts["connections broken with bytes under way"] += under_way > 0
        pipe.break_()
        return True

    def ended(self, ends: Ends, with_node: bool) -> None:
        """A process has ended. The last of what it has sent may not have left; with its node, nothing says so."""
        for pipe in list(self.pipes):
            for side in (pipe.dialer, pipe.answerer):
                if side.own is ends:
                    if with_node:
                        side.other.lose_some()
                        pipe.close()
                    else:
                        pipe.break_()
        ends.over = True


class Pipe:
    """A connection, from the process that has dialled to the one that has answered."""

    def __init__(self, network: Network, dialer: Ends, answerer: Ends) -> None:
        self.network = network
        self.dialer = Side(self, dialer, network.line(dialer.node, answerer.node))
        self.answerer = Side(self, answerer, network.line(answerer.node, dialer.node))
        self.dialer.other, self.answerer.other = self.answerer, self.dialer
        self.limit = network.rng.choice((200, 2000, 100_000))
        network.pipes.append(self)

    def break_(self) -> None:
        """Ends the connection. Of the bytes under way some still arrive."""
        if self.close():
            network = self.network
            for side in (self.dialer, self.answerer):
                side.lose_some()
                side.ended_at = network.now() + network.rng.random() * 0.002
                network.at(side.ended_at, side.own.ring)

    def close(self) -> bool:
        """Nobody takes care of the connection any more. Returns False when it is known already."""
        if self not in self.network.pipes:
            return False
        self.network.pipes.remove(self)
        return True


class Side:
    """A process's end of a connection, as a socket."""

    other: Side

    def __init__(self, pipe: Pipe, own: Ends, line: Line) -> None:
        self.pipe = pipe
        self.own = own
        self.line = line  # by which it sends
        self.incoming: deque[tuple[float, bytes]] = deque()  # when it arrives, and what
        self.size = 0  # of this
        self.ended_at: float | None = None
        self.events = 0  # those that are waited for
        self._full = False
        self._edge = True
        self._last = 0.0  # when the last bytes arrive
        self._number = next(pipe.network.numbers)

    def fileno(self) -> int:
        return self._number

    def ready(self, now: float) -> int:
        """The events that have happened, as epoll tells them."""
        found = 0
        if (self.incoming and self.incoming[0][0] <= now) or self._has_ended(now):
            found |= select.EPOLLIN
        if self.events & select.EPOLLOUT and not self._full and (self._edge or not self.events & select.EPOLLET):
            found |= select.EPOLLOUT
        return found & (self.events | select.EPOLLIN)

    def told(self) -> None:
        """What is ready was told."""
        self._edge = False

    def _has_ended(self, now: float) -> bool:
        return self.ended_at is not None and self.ended_at <= now

    def send(self, data: Any) -> int:
        network = self.pipe.network
        now = network.now()
        if self.ended_at is not None:
            if self._has_ended(now):
                raise ConnectionResetError
            return len(data)  # into the void
        size = min(len(data), self.pipe.limit - self.other.size)
        if size <= 0:
            self._full = True
            raise BlockingIOError
        line = self.line
        arrives = max(now, line.cut_until) + line.delay_s * (1 + network.rng.random())
        self._last = arrives = max(arrives, self._last)
        self.other.incoming.append((arrives, bytes(data[:size])))
        self.other.size += size
        network.at(arrives, self.other.own.ring)
        return size

    def sendmsg(self, parts: Any) -> int:
        return self.send(b"".join(parts))

    def recv(self, most: int) -> bytes:
        now = self.pipe.network.now()
        incoming = self.incoming
        taken = bytearray()
        while incoming and incoming[0][0] <= now and len(taken) < most:
            arrives, data = incoming.popleft()
            piece = data[: most - len(taken)]
            if len(piece) < len(data):
                incoming.appendleft((arrives, data[len(piece) :]))
            taken += piece
        if taken:
            self.size -= len(taken)
            if self.other._full:
                self.other._full, self.other._edge = False, True
                self.pipe.network.at(now + self.line.delay_s, self.other.own.ring)
            return bytes(taken)
        if self._has_ended(now):
            return b""
        raise BlockingIOError

    def recv_into(self, view: memoryview) -> int:
        data = self.recv(len(view))
        view[: len(data)] = data
        return len(data)

    def shutdown(self, how: int) -> None:
        """The end is told when it is closed."""

    def close(self) -> None:
        self.pipe.break_()

    def hold_back(self, line: Line) -> None:
        """The line by which bytes come is cut."""
        now = self.pipe.network.now()
        held = [(max(at, line.cut_until + line.delay_s) if at > now else at, data) for at, data in self.incoming]
        self.incoming = deque(held)
        if held:
            self.other._last = max(self.other._last, held[-1][0])
            self.pipe.network.at(held[-1][0], self.own.ring)

    def lose_some(self) -> None:
        """Only some of the bytes under way arrive, and none of those that have not left."""
        now = self.pipe.network.now()
        data = b"".join(data for _, data in self.incoming)
        data = data[: self.pipe.network.rng.randint(0, len(data))]
        self.incoming = deque([(now, data)] if data else ())
        self.size = len(data)


class _Poll:
    """A process's epoll."""

    def __init__(self, own: Ends) -> None:
        self._own = own
        self.sides: dict[int, Side] = {}

    def poll(self, timeout: float | None, most: int) -> list[tuple[int, int]]:
        own = self._own
        found = [(BELL, int(select.EPOLLIN))] if own.far is not None and own.far._arrived else []
        now = own.network.now()
        for number, side in list(self.sides.items()):
            ready = side.ready(now)
            if not ready or (own.mixes() and own.network.rng.random() < 0.3):
                continue
            side.told()
            found.append((number, ready))
        return found

    def register(self, number: int, events: int) -> None:
        self.sides[number] = self._own.known_sides[number]
        self.sides[number].events = events

    def modify(self, number: int, events: int) -> None:
        self.sides[number].events = events

    def unregister(self, number: int) -> None:
        self.sides.pop(number, None)
        self._own.known_sides.pop(number, None)


class _FarLinks:
    """Makes the connections of a process, as PeerLinks does."""

    def __init__(self, own: Ends) -> None:
        self._own = own
        self._wanted: dict[int, tuple[Peer, int]] = {}
        self._worked: set[Peer] = set()

    def want(self, peer: Peer, host: str, port: int, capacity: int) -> None:
        self._wanted[peer.worker] = (peer, capacity)
        self.dial(peer)

    def forget(self, worker: int) -> None:
        self._wanted.pop(worker, None)

    def lost(self, worker: int, connection: Any, useful: bool) -> None:
        if worker in self._wanted:
            self.dial(self._wanted[worker][0], self._own.network.rng.random() ** 2 * self._own.network.faults.again_s)

    def dial(self, peer: Peer, pause_s: float = 0.0, beside: bool = False) -> None:
        """Connects to a process, after a pause. `beside`: beside a connection that there is."""
        own, network = self._own, self._own.network
        answerer = network.of[peer.incarnation]
        there, back = network.line(own.node, answerer.node), network.line(answerer.node, own.node)
        when = max(network.now(), there.cut_until, back.cut_until) + there.delay_s + back.delay_s + pause_s

        def answered() -> None:
            wanted = self._wanted.get(peer.worker)
            if wanted is None or wanted[0] != peer or own.over or answerer.over:
                return
            if max(there.cut_until, back.cut_until) > network.now():
                self.dial(peer, pause_s, beside)
                return
            assert answerer.far is not None
            assert own.far is not None
            if own.peer.incarnation in answerer.far._dropped:
                return
            out = own.far._out.get(peer.worker)
            if out is not None and out.connection is not None and not beside:
                return
            pipe = Pipe(network, own, answerer)
            self._worked.add(peer)
            network.counts["connections"] += 1
            capacity = wanted[1] if out is None else out.stream.region.capacity
            answerer.arrives(Link(own.peer, pipe.answerer, True, next(network.numbers), capacity))  # type: ignore[arg-type]
            own.arrives(Link(peer, pipe.dialer, False, 0, capacity))  # type: ignore[arg-type]

        network.at(when, answered)

    def silent_links(self) -> list[SilentLink]:
        own, network = self._own, self._own.network
        found = []
        for worker, (peer, _) in self._wanted.items():
            other = network.of[peer.incarnation]
            for_s = network.silent_s(own.node, other.node)
            if for_s > network.faults.node_timeout_s * TOLD_SHARE:
                at = f"node {other.node.number}"
                found.append(SilentLink(worker, other.address, at, peer in self._worked, False, for_s))
        return found

    def refused(self) -> set[int]:
        return set()

    def close(self) -> None:
        """No thread is to be ended."""


class _Tcp(TcpTransport):
    """The real transport, without sockets and threads."""

    def __init__(self, own: Ends, region_bytes: int) -> None:
        self._grows = True
        self._region_bytes = region_bytes
        self._first = 0
        self.target_message = max(1, region_bytes // 128)
        self._own = own.peer
        self._process = os.getpid()
        self._address = f"127.0.0.1:{own.life}/{own.peer.incarnation.hex()}"
        self._out, self._in, self._peers, self._places = {}, {}, {}, {}
        self._parked, self._dropped, self._regions = {}, set(), {}
        self._closed = self._woken = self._refused = self._freed = False
        self._arrived = deque()
        self._again = []
        self._handlers = {BELL: self._take_arrived}
        self._epoll = _Poll(own)  # type: ignore[assignment]
        self._links = own.far_links  # type: ignore[assignment]

    def _take_arrived(self, event: int, messages: list[tuple[int, Buffer]]) -> None:
        while self._arrived:
            self._adopt(self._arrived.popleft())

    def _make_incoming(self, worker: int, decoder: FrameDecoder) -> Incoming:
        incoming = super()._make_incoming(worker, decoder)
        incoming._usual = memoryview(bytearray(BUFFER_BYTES))
        return incoming


class Ends(Transport):
    """One process's end of the network."""

    def __init__(
        self, network: Network, number: int, life: int, node: Node, capacity: int, rng: random.Random, *, far: bool
    ) -> None:
        """`number`: of the worker, or relay. `rng`: for the memory. `far`: there are other nodes."""
        self.network = network
        self.number = number
        self.life = life
        self.node = node
        self.inbox = Inbox(capacity)
        self.stalled: dict[int, int] = {}  # how often to look away from what a process has sent
        self.over = False
        self.no_room = 0.0  # the chance that there is none in another's memory
        self.target_message = max(1, capacity // 64)
        self.peer = Peer(number, life.to_bytes(INCARNATION_BYTES, "big"))
        self.known_sides: dict[int, Side] = {}
        self.far_links = _FarLinks(self)
        self.far: _Tcp | None = None
        self._near: dict[int, Ends] = {number: self}  # by number: the processes that it has connected to
        self._rng = rng
        self._mixed = network.faults.mixed
        self.address = f"<{number}/{life}>"  # no part of another one
        if far:
            self.far = _Tcp(self, min(REGION_MOST, max(4096, 1 << (2 * capacity - 1).bit_length())))
        network.lives[self.address] = network.of[self.peer.incarnation] = self

    @property
    def ring_bytes(self) -> int:
        return self.inbox.capacity

    def links(self) -> dict[int, LinkLoad]:
        """There is no system to ask."""
        return {}

    def silent_links(self) -> list[SilentLink]:
        """See PeerTransport."""
        return self.far_links.silent_links()

    def ring(self) -> None:
        """There may be something to do."""
        self.inbox.quiet = False

    def arrives(self, link: Link) -> None:
        """A connection has been made."""
        assert self.far is not None
        side: Any = link.connection
        self.known_sides[side.fileno()] = side
        self.far._arrived.append(link)
        self.ring()

    def mixes(self) -> bool:
        """Whether what different processes send passes each other."""
        return self._mixed

    def waits(self) -> bool:
        """Whether there is something that was not taken yet."""
        if self.inbox.queues:
            return True
        if self.far is None:
            return False
        now = self.network.now()
        return bool(self.far._arrived) or any(side.ready(now) for side in self.far._epoll.sides.values())  # type: ignore[attr-defined]

    def max_message(self, worker: int) -> int:
        return self.inbox.capacity // 2

    def send(self, worker: int, task: int, parts: Sequence[Buffer]) -> bool:
        near = self._near.get(worker)
        if near is None:
            return self.far is not None and self.far.send(worker, task, parts)
        inbox = near.inbox
        if inbox.dead is not None:
            return inbox.dead
        if self.no_room and self._rng.random() < self.no_room:
            return False
        message = b"".join(parts)
        if inbox.used + len(message) > inbox.capacity:
            return False
        inbox.used += len(message)
        queue = inbox.queues.get(self.life)
        if queue is None:
            queue = inbox.queues[self.life] = deque()
        queue.append((task, message))
        inbox.quiet = False
        return True

    def receive(self, timeout: float | None) -> Sequence[tuple[int, Buffer]]:
        messages: list[tuple[int, Buffer]] = []
        if self.far is not None:
            messages += self.far.receive(0)
        inbox = self.inbox
        queues = inbox.queues
        if not queues:
            return messages
        random_ = self._rng.random
        used = 0
        for sender in list(queues):
            queue = queues[sender]
            if self._mixed and (drawn := random_()) < 0.5:
                if drawn < 0.005:
                    self.stalled[sender] = int(2000 * drawn * 8)
                if self.stalled.get(sender):
                    self.stalled[sender] -= 1
                    continue
                taken = [queue.popleft() for _ in range(int(2 * drawn * (len(queue) + 1)))]
            else:
                taken = list(queue)
                queue.clear()
            messages += taken
            used += sum(len(message) for _, message in taken)
            if not queue:
                del queues[sender]
        inbox.used -= used
        return messages

    def all(self) -> Sequence[tuple[int, Buffer]]:
        """All that has been sent, and has arrived."""
        mixed, self._mixed = self._mixed, False
        messages = self.receive(0)
        self._mixed = mixed
        self.stalled.clear()
        return messages

    def connect(self, addresses: Mapping[int, str]) -> None:
        """Send to these workers at these addresses from now on. Who is connected already stays so."""
        for worker, address in addresses.items():
            other = self.network.lives[address]
            if worker in self._near or (self.far is not None and worker in self.far._peers):
                continue
            if other.node is self.node:
                self._near[worker] = other
            else:
                assert self.far is not None
                assert other.far is not None
                self.far.connect({worker: other.far.address})

    def drop(self, workers: Iterable[int]) -> dict[int, int]:
        """Send nothing more to these workers, which have died."""
        gone = list(workers)
        for worker in gone:
            self._near.pop(worker, None)
        if self.far is not None:
            self.far.drop(gone)
        return {}

    def forget(self, peers: Iterable[int]) -> None:
        """As `drop`: nobody will take their places."""
        gone = list(peers)
        self.drop(gone)
        if self.far is not None:
            self.far.forget(gone)

    def wake(self) -> None:
        """Nobody sleeps."""

    def close(self) -> None:
        """Nothing is held."""
