"""The transport between workers of different machines, over TCP (docs/papers.md: T8, W8).

Each worker listens at a port of its own. There is one connection for each direction between two workers: the sender
connects, sends frames, and the receiver sends acknowledgements back. (With one connection for both directions, an
acknowledgement would wait behind the data of the other direction, and only one end could mend the connection.) A send
copies the frame into the peer's send region, and hands it to the kernel at once. What the kernel does not take waits in
the region, and leaves when there is room.

When a connection breaks, or its peer does not answer for some time, a new one is made (peer_links.py), and the sender
continues where the receiver is (send_stream.py). So a cut of seconds is a pause. It is no error when a peer cannot be
reached: `silent_links` says so, the JobHost decides which worker is lost, and the others then drop it.

Who connects must prove that it belongs to the job, and names the process that it means (peer_handshake.py). The proof
authenticates the peers when they connect. What they send is neither encrypted nor protected against somebody who
controls the network between them, unless TLS is asked for.

What must not happen: that a message is lost, comes twice or in another order while both processes live; that a stranger
has anything decoded; that a peer that is slow or cut off holds up another peer, or takes memory without a limit.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from penstock.runtime.transport.base import Buffer, LinkLoad, NetworkTransport, SilentLink
from penstock.runtime.transport.endpoint import Ports, listen
from penstock.runtime.transport.framing import (
    ACKNOWLEDGEMENT,
    CLOSED,
    HEAD_BYTES,
    LARGEST_BODY,
    RECEIVED,
    BadFrame,
    FrameDecoder,
)
from penstock.runtime.transport.peer_handshake import INCARNATION_BYTES, Process
from penstock.runtime.transport.peer_links import Connection, Link, PeerLinks, peer_address
from penstock.runtime.transport.send_region import WRAP
from penstock.runtime.transport.send_stream import SMALL_BYTES, SendStream
from penstock.runtime.transport.tls import TlsConnection, TlsContexts

logger = logging.getLogger(__name__)

#: The size of a send region: more than bandwidth x delay of 1 Gbit/s and 10 ms, and of 10 Gbit/s and 3 ms.
REGION_BYTES = 4 * 1024 * 1024
MIN_REGION_BYTES = 4096

# docs/papers.md: T8, as in shared memory: messages aim at this share of the region.
_MESSAGES_PER_REGION = 64
# A receiver acknowledges when it has so large a share of the sender's region.
_ACKNOWLEDGED_SHARE = 16
_ACKNOWLEDGED_AT_LEAST = 1024

# The buffer of a peer's stream. A larger frame gets a buffer of its own while it comes.
_BUFFER_BYTES = 1024 * 1024
# An incomplete frame of so few bytes is moved to the front, which is in the processor's cache.
_MOVED_AT_ONCE = 4096
_EVENTS = 64
_LINKS_PARKED = 4  # for each worker

# Of struct tcp_info: whether the sender had too little to send when the rate was measured (the first bit of a byte);
# how many segments are under way; how many bytes the peer has acknowledged; how many bytes wait to be sent; the rate
# (bytes/s); for how long (us) bytes have waited for room at the peer.
_TCP_INFO = struct.Struct("<7xB16xI92xQ16xI12xQ8xQ")

# For how long `close` waits until the peers have received everything.
CLOSE_S = 5.0

_INCOMING_EVENTS = select.EPOLLIN | select.EPOLLRDHUP
OUTGOING_EVENTS = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET


class TcpTransport(NetworkTransport):
    """The end of one worker; see the module's docstring."""

    def __init__(
        self,
        worker: int,
        key: bytes,
        host: str,
        ports: tuple[int, int] = (0, 0),
        *,
        region_bytes: int | None = None,
        tls: TlsContexts | None = None,
        first: int = 0,
    ) -> None:
        """`key`: the job's secret. `host`: the numeric address at which others connect; `ports`: the first and the last
        port that may be used, 0: any. `region_bytes`: the size of the send region of each peer, which stays so; None:
        REGION_BYTES, and larger for larger messages. `first`: the first number and position of all streams, for tests
        of their wrap."""
        if len(key) < 16:
            raise ValueError("the key of a job has at least 16 bytes")
        self._grows = region_bytes is None
        self._region_bytes = REGION_BYTES if region_bytes is None else _power_of_two(region_bytes)
        self._first = first
        self.target_message = max(256, self._region_bytes // _MESSAGES_PER_REGION)
        self._own = Process(worker, os.urandom(INCARNATION_BYTES))
        self._process = os.getpid()
        listener, at = listen(Ports(host, *ports))
        self._address = f"{at}/{self._own.incarnation.hex()}"
        self._out: dict[int, Outgoing] = {}
        self._in: dict[int, Incoming] = {}
        self._peers: dict[int, Process] = {}
        self._places: dict[int, str] = {}  # the host and port of each peer
        self._parked: dict[int, deque[Link]] = {}  # connections of processes that this worker does not know yet
        self._dropped: set[bytes] = set()  # incarnations
        self._regions: dict[int, int] = {}  # the capacity of each worker's region, if it has grown
        self._closed = False
        self._woken = False
        self._refused = False  # a send has found no room
        self._freed = False  # a peer has received something since then
        self._waking = threading.Lock()
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # there is something in _arrived or _again
        self._arrived: deque[Link] = deque()
        self._again: list[Incoming] = []  # streams with bytes of which the kernel does not know
        self._handlers: dict[int, Callable[[int, list[tuple[int, Buffer]]], None]] = {
            self._wake: self._on_wake,
            self._bell: self._on_bell,
        }
        self._epoll.register(self._wake, select.EPOLLIN)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._links = PeerLinks(self._own, key, listener, self._arrived, self._ring, tls)

    @property
    def address(self) -> str:
        """See PeerTransport."""
        return self._address

    @property
    def ring_bytes(self) -> int:
        """See PeerTransport: here the size of a send region."""
        return self._region_bytes

    def fileno(self) -> int:
        """See NetworkTransport."""
        return self._epoll.fileno()

    def silent_links(self) -> list[SilentLink]:
        """See PeerTransport."""
        return self._links.silent_links()

    def sent_bytes(self) -> dict[int, int]:
        """See PeerTransport."""
        return {peer: (out.stream.region.head - self._first) & WRAP for peer, out in list(self._out.items())}

    def links(self) -> dict[int, LinkLoad]:
        """See PeerTransport."""
        return {peer: load for peer, out in self._out.items() if (load := out.load()) is not None}

    def connect(self, addresses: Mapping[int, str]) -> None:
        """See PeerTransport. It never fails because a worker cannot be reached at present."""
        for worker, address in addresses.items():
            if worker in self._peers:
                continue
            host, port, incarnation = peer_address(address)
            peer = self._peers[worker] = Process(worker, incarnation)
            self._places[worker] = address.rpartition("/")[0]
            capacity = self._regions.get(worker, self._region_bytes)
            self._out[worker] = self._make_outgoing(worker, SendStream(capacity, self._first, self._first))
            self._in[worker] = self._make_incoming(worker, FrameDecoder(LARGEST_BODY, self._first, self._first))
            self._links.want(peer, host, port, capacity)
            for link in self._parked.pop(worker, ()):
                self._adopt(link)

    def _make_outgoing(self, worker: int, stream: SendStream) -> Outgoing:
        return Outgoing(self, worker, stream)

    def _make_incoming(self, worker: int, decoder: FrameDecoder) -> Incoming:
        return Incoming(self, worker, decoder)

    def drop(self, workers: Iterable[int]) -> dict[int, int]:
        """See PeerTransport. A worker's next process needs no inbox of a certain size."""
        for worker in workers:
            self._links.forget(worker)
            peer = self._peers.pop(worker, None)
            if peer is not None:
                self._dropped.add(peer.incarnation)
                self._out.pop(worker).discard()
                self._in.pop(worker).discard()
        return {}

    def forget(self, peers: Iterable[int]) -> None:
        """See PeerTransport."""
        gone = list(peers)
        self.drop(gone)
        for peer in gone:
            self._regions.pop(peer, None)
            self._places.pop(peer, None)
            for link in self._parked.pop(peer, ()):
                link.connection.close()

    def max_message(self, worker: int) -> int:
        out = self._out.get(worker)
        capacity = self._region_bytes if out is None else out.stream.region.capacity
        return min(LARGEST_BODY, capacity // 2 - HEAD_BYTES)

    def largest_message(self, worker: int) -> int:
        return LARGEST_BODY if self._grows else self.max_message(worker)

    def remedy(self, size: int) -> str:
        if not self._grows:
            return super().remedy(size)
        return "the most is a little less than 128 MiB; keep larger things in files"

    def send(self, worker: int, task: int, parts: Sequence[Buffer]) -> bool:
        out = self._out.get(worker)
        if out is None:
            return False
        size = sum(map(len, parts))
        stream = out.stream
        if stream.over:
            return False
        if out.writable and size <= SMALL_BYTES and out.send_now(task, parts, size):
            return True
        if not stream.put(task, parts, size):
            if size <= self.max_message(worker):
                self._refused, self._freed = True, False
                return False
            if size > self.largest_message(worker):
                raise ValueError(f"a message of {size:,} bytes; the most is {self.largest_message(worker):,}")
            self._regions[worker] = _power_of_two(2 * (size + HEAD_BYTES))
            stream.region.grow(self._regions[worker])
            if not stream.put(task, parts, size):
                self._refused, self._freed = True, False
                return False
        if out.writable:
            out.write()
        return True

    def leave(self) -> bool:
        """See Transport. Returns True only when all peers that have not left themselves have received everything."""
        waiting = False
        for worker, out in self._out.items():
            stream = out.stream
            if stream.closed or (self._in[worker].decoder.left and stream.left):
                continue
            waiting = not stream.leave() or stream.region.outstanding > 0 or waiting
            if out.writable:
                out.write()
        self._refused, self._freed = waiting, False
        return not waiting

    def receive(self, timeout: float | None) -> Sequence[tuple[int, Buffer]]:
        """See Transport. When a `send` or `leave` has found no room, this also returns, without messages, as soon as a
        peer has received something."""
        messages: list[tuple[int, Buffer]] = []
        handlers = self._handlers
        poll = self._epoll.poll
        deadline = time.monotonic() + timeout if timeout else None
        self.worked = False
        while True:
            for fd, event in poll(timeout, _EVENTS):
                self.worked = True
                if fd in handlers:
                    handlers[fd](event, messages)
            if messages or self._woken or timeout == 0 or (self._refused and self._freed):
                self._woken = self._refused = False
                return messages
            if deadline is not None:
                timeout = max(0, deadline - time.monotonic())

    def wake(self) -> None:
        with self._waking:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def close(self, wait_s: float = CLOSE_S) -> None:
        """See Transport. After a `leave` that has not found all peers at the end of the streams, waits for those that
        can be reached, at most `wait_s` seconds."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() == self._process:
            for incoming in self._in.values():
                incoming.say_closed()
            self._finish(time.monotonic() + wait_s)
            self._links.close()
        for out in self._out.values():
            out.discard()
        for incoming in self._in.values():
            incoming.discard()
        for link in [*self._arrived, *(link for links in self._parked.values() for link in links)]:
            link.connection.close()
        self._arrived.clear()
        self._parked.clear()
        self._handlers.clear()
        self._epoll.close()
        with self._waking:  # another thread must not write to a file that gets the number of this descriptor
            os.close(self._wake)
            self._wake = -1
        os.close(self._bell)

    def _finish(self, deadline: float) -> None:
        """Sends the outstanding bytes, and drops incoming ones."""
        while True:
            refused = self._links.refused()
            waiting = [
                out
                for worker, out in self._out.items()
                if out.stream.left
                and out.stream.region.outstanding
                and not out.stream.closed
                and not self._in[worker].decoder.left
                and not (out.connection is None and worker in refused)
            ]
            left = deadline - time.monotonic()
            if not waiting or left <= 0:
                return
            for out in waiting:
                out.stream.ask()
                if out.writable:
                    out.write()
            for fd, event in self._epoll.poll(min(left, 0.05), _EVENTS):
                if fd in self._handlers:
                    self._handlers[fd](event, [])

    # --- connections ---------------------------------------------------------------------------------------------

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    def _on_wake(self, event: int, messages: list[tuple[int, Buffer]]) -> None:
        os.eventfd_read(self._wake)
        self._woken = True

    def _on_bell(self, event: int, messages: list[tuple[int, Buffer]]) -> None:
        os.eventfd_read(self._bell)
        while self._arrived:
            self._adopt(self._arrived.popleft())
        again, self._again = self._again, []
        for incoming in again:
            incoming.read(select.EPOLLIN, messages)

    def _adopt(self, link: Link) -> None:
        """Takes over a connection whose peer has proved itself."""
        worker = link.peer.worker
        known = self._peers.get(worker)
        if known == link.peer:
            if link.incoming:
                self._in[worker].adopt(link)
            else:
                self._out[worker].adopt(link.connection)
        elif link.incoming and link.peer.incarnation not in self._dropped:
            # The peer knows this worker already, and this worker is about to be told of the peer.
            parked = self._parked.setdefault(worker, deque())
            parked.append(link)
            if len(parked) > _LINKS_PARKED:
                parked.popleft().connection.close()
        else:
            link.connection.close()

    def watch(
        self, connection: Connection, events: int, handler: Callable[[int, list[tuple[int, Buffer]]], None]
    ) -> None:
        """Calls a handler when something happens on a connection."""
        fd = connection.fileno()
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def watch_also(self, connection: Connection, events: int) -> None:
        """Changes the events to wait for on a connection."""
        self._epoll.modify(connection.fileno(), events)

    def unwatch(self, connection: Connection) -> None:
        """Closes a connection."""
        fd = connection.fileno()
        self._handlers.pop(fd, None)
        if os.getpid() == self._process:
            # A child of this process may hold copies of both.
            with suppress(OSError):
                self._epoll.unregister(fd)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        connection.close()

    def where(self, worker: int) -> str:
        """Returns the host and port of a peer, for the log."""
        return self._places.get(worker, "an unknown address")

    def lost_connection(self, worker: int, connection: Connection, useful: bool) -> None:
        """An outgoing connection is gone. `useful`: the peer has received something over it."""
        self._links.lost(worker, connection, useful)

    def has_room(self) -> None:
        """A peer has received something."""
        self._freed = True

    def read_again(self, incoming: Incoming) -> None:
        """A stream has bytes of which the kernel does not know."""
        self._again.append(incoming)
        self._ring()

    def stop_connecting(self, worker: int) -> None:
        """A peer has closed its inbox."""
        self._links.forget(worker)


class Outgoing:
    """The stream to one peer, and its connection when there is one."""

    __slots__ = ("_began_at", "_owner", "_told", "_worker", "connection", "stream", "writable")

    def __init__(self, owner: TcpTransport, worker: int, stream: SendStream) -> None:
        self._owner = owner
        self._worker = worker
        self.stream = stream
        self.connection: Connection | None = None
        self._began_at = stream.region.tail  # what was acknowledged when the connection came
        self._told = False  # that the peer has sent an acknowledgement that cannot be
        self.writable = False  # the receiver has said where it is, and the kernel takes bytes

    def adopt(self, connection: Connection) -> None:
        self.end()
        self.connection = connection
        self._began_at = self.stream.region.tail
        self._owner.watch(connection, OUTGOING_EVENTS, self.on_event)

    def end(self) -> None:
        """Closes the connection."""
        self.writable = False
        self.stream.disconnect()
        if self.connection is not None:
            connection, self.connection = self.connection, None
            self._owner.unwatch(connection)

    def discard(self) -> None:
        """Ends for good."""
        self.end()

    def lost(self) -> None:
        """The connection cannot be used any more. Another one is made."""
        connection = self.connection
        self.end()
        if connection is not None:
            useful = self.stream.region.tail != self._began_at
            self._owner.lost_connection(self._worker, connection, useful)

    def load(self) -> LinkLoad | None:
        """Returns the system's figures of the connection that carries the stream; None: it says nothing."""
        return None if self.connection is None else _load_of(self.connection)

    def on_event(self, event: int, messages: list[tuple[int, Buffer]]) -> None:
        """Reads acknowledgements, and writes waiting bytes."""
        connection, stream = self.connection, self.stream
        if connection is None:
            return
        if event & ~select.EPOLLOUT:
            try:
                while True:
                    data = connection.recv(4096)
                    if not data:
                        self.lost()
                        return
                    stream.answered(data)
                    if len(data) < 4096 and not event & ~(select.EPOLLIN | select.EPOLLOUT):
                        break
            except BlockingIOError:
                pass
            except OSError:
                self.lost()
                return
            except BadFrame as error:
                if not self._told:
                    self._told = True
                    logger.error(
                        "worker %d at %s does not follow the protocol: %s",
                        self._worker,
                        self._owner.where(self._worker),
                        error,
                    )
                self.lost()
                return
            self._owner.has_room()
            if stream.closed:
                self.end()
                self._owner.stop_connecting(self._worker)
                return
        if stream.resumed and not self.writable:
            self.writable = True
            self.write()

    def send_now(self, task: int, parts: Sequence[Buffer], size: int) -> bool:
        """Sends a small message, when nothing waits before it: the quicker way of what `put` and `write` do. Returns
        False, and does nothing, when there is no room."""
        data = self.stream.put_small(task, parts, size)
        if data is None:
            return False
        connection, stream = self.connection, self.stream
        assert connection is not None
        try:
            sent = connection.send(data)
        except BlockingIOError:
            self.writable = False
            return True
        except OSError:
            self.lost()
            return True
        stream.written = (stream.written + sent) & WRAP
        if sent < len(data):
            self.write()
        return True

    def write(self) -> None:
        """Hands as many bytes to the kernel as it takes."""
        connection, stream = self.connection, self.stream
        assert connection is not None
        region = stream.region
        start = stream.written
        try:
            while size := (region.head - start) & WRAP:
                pieces = region.between(start, region.head)
                sent = connection.send(pieces[0]) if len(pieces) == 1 else connection.sendmsg(pieces)
                start = stream.written = (start + sent) & WRAP
                if sent == size:
                    return
        except BlockingIOError:
            self.writable = False
        except OSError:
            self.lost()


class Incoming:
    """The stream from one peer, and its connection when there is one."""

    def __init__(self, owner: TcpTransport, worker: int, decoder: FrameDecoder) -> None:
        self._owner = owner
        self._worker = worker
        self.decoder = decoder
        self.connection: Connection | None = None
        self._number = -1  # of the connection
        self._usual = self._buffer = memoryview(b"")
        self._start = self._stop = 0  # of what is in the buffer and not decoded
        self._acknowledged = decoder.position
        self._step = 0  # the number of bytes after which an acknowledgement is due
        self._rest = b""  # of an acknowledgement
        self._said = RECEIVED
        self._told = False  # that the peer has sent a bad frame
        self._blocked = False  # acknowledgements wait until the kernel takes them

    def adopt(self, link: Link) -> None:
        """Takes a connection, unless a later one was taken before."""
        if self.taken(link):
            self.begin(link.capacity)

    def taken(self, link: Link) -> bool:
        """Takes a connection, and says whether it was taken."""
        if link.number < self._number:
            link.connection.close()
            return False
        self.end()
        self._number = link.number
        self.connection = link.connection
        self._owner.watch(link.connection, _INCOMING_EVENTS, self.read)
        return True

    def begin(self, capacity: int) -> None:
        """Tells the sender where to go on. `capacity`: of its send region."""
        if not self._usual:
            self._usual = memoryview(bytearray(_BUFFER_BYTES))
        self._step = max(_ACKNOWLEDGED_AT_LEAST, min(capacity, REGION_BYTES) // _ACKNOWLEDGED_SHARE)
        self._acknowledge()

    def discard(self) -> None:
        """Ends for good."""
        self.end()

    def end(self) -> None:
        """Closes the connection. What has come of an incomplete frame will come again."""
        if self.connection is not None:
            connection, self.connection = self.connection, None
            self._owner.unwatch(connection)
        self._buffer = self._usual
        self._start = self._stop = 0
        self._rest = b""
        self._blocked = False

    def read(self, event: int, messages: list[tuple[int, Buffer]]) -> None:
        """Reads once, and appends the messages that are complete."""
        if self._blocked and event & select.EPOLLOUT:
            self._unblock()
        connection, decoder = self.connection, self.decoder
        if connection is None:
            return
        buffer, start, stop = self._buffer, self._start, self._stop
        if start == stop:
            buffer = self._usual
            start = stop = 0
        elif stop - start <= _MOVED_AT_ONCE or start + decoder.wanted > len(buffer):
            buffer, start, stop = self._moved(buffer, start, stop)
        try:
            size = connection.recv_into(buffer[stop:])
        except BlockingIOError:
            self._buffer, self._start, self._stop = buffer, start, stop
            return
        except OSError:
            size = 0
        if not size:
            self.end()
            return
        if size == len(buffer) - stop and isinstance(connection, TlsConnection):
            self._owner.read_again(self)
        stop += size
        try:
            start = decoder.decode(buffer, start, stop, messages)
        except BadFrame as error:
            if not self._told:  # the peer may connect, and send the same, again and again
                self._told = True
                logger.error(
                    "worker %d at %s does not follow the protocol, and is disconnected: %s",
                    self._worker,
                    self._owner.where(self._worker),
                    error,
                )
            self.end()
            return
        self._buffer, self._start, self._stop = buffer, start, stop
        if ((decoder.position - self._acknowledged) & WRAP) >= self._step or decoder.asked:
            self._acknowledge()

    def _moved(self, buffer: memoryview, start: int, stop: int) -> tuple[memoryview, int, int]:
        """Makes room for the rest of an incomplete frame. Views into the buffer are no longer valid."""
        wanted = self.decoder.wanted
        size = stop - start
        if wanted > len(self._usual):
            if len(buffer) == wanted and not start:
                return buffer, start, stop
            own = memoryview(bytearray(wanted))
            own[:size] = buffer[start:stop]
            return own, 0, size
        self._usual[:size] = buffer[start:stop]
        return self._usual, 0, size

    def say_closed(self) -> None:
        """Tells the sender that nothing more is taken."""
        self._said = CLOSED
        self._acknowledge()

    def _acknowledge(self) -> None:
        """Tells the sender the position up to which bytes have come. When the kernel takes no more, because the sender
        does not read, this is called again as soon as it does."""
        connection, rest = self.connection, self._rest
        if connection is None or self._blocked:
            return
        position = self.decoder.position
        data = rest + ACKNOWLEDGEMENT.pack(position, self._said)
        try:
            sent = connection.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.end()
            return
        if sent > len(rest):
            self._rest = data[sent:]
            self._acknowledged = position
            self.decoder.asked = False
        else:
            self._rest = rest[sent:]
        if sent < len(data):
            self._blocked = True
            self._owner.watch_also(connection, _INCOMING_EVENTS | select.EPOLLOUT)

    def _unblock(self) -> None:
        assert self.connection is not None
        self._blocked = False
        self._owner.watch_also(self.connection, _INCOMING_EVENTS)
        self._acknowledge()


def _load_of(connection: Connection) -> LinkLoad | None:
    """Asks the kernel how much a connection carries. Returns None when it does not say."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:  # the connection has broken, which its events will say
        return None
    if len(info) < _TCP_INFO.size:  # an old kernel
        return None
    bits, under_way, acknowledged, waiting, rate, held_us = _TCP_INFO.unpack(info)
    return LinkLoad(acknowledged, rate, not bits & 1 and bool(under_way or waiting), held_us / 1e6)


def _power_of_two(size: int) -> int:
    return 1 << (max(MIN_REGION_BYTES, size) - 1).bit_length()
