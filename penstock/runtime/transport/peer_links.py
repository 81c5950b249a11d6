"""Makes the connections of a TcpTransport, in a thread of its own: connecting, accepting, the handshakes, and looking
for peers that do not answer.

So neither the run loop nor another peer ever waits for a stranger, and connections are made while the run loop is busy
in a user's function. What must not happen: that strangers take memory, descriptors or time without a limit, or that a
process that has not proved itself reaches the run loop.

The sender connects, for each stream. It knows best what is outstanding, and each direction mends itself. Whether a peer
answers is what the kernel knows about the connection: bytes and probes that have had no acknowledgement. So an idle
connection costs no message of its own, and a peer whose run loop is busy for minutes does not look like one that is cut
off. Nor does a peer whose process is stopped: its kernel takes connections, and only their handshakes wait.

While a peer does not answer, new connections are tried again and again beside the old one, because TCP itself asks
after ever longer times. The first one that the peer answers replaces the old one, unless that is answered again too.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.runtime.backoff import Backoff
from penstock.runtime.transport.base import SilentLink
from penstock.runtime.transport.endpoint import family, host_and_port, send_at_once, tcp_address
from penstock.runtime.transport.handshake import NotProved
from penstock.runtime.transport.peer_handshake import Admitting, Introducing, Process
from penstock.runtime.transport.strangers import Told, refusal
from penstock.runtime.transport.tls import TlsConnection, TlsContexts, said

logger = logging.getLogger(__name__)

# How many strangers may be in their handshake, for how long, and how many are accepted at once.
_STRANGERS_MAX = 64
_HANDSHAKE_S = 3.0
_ACCEPTED_AT_ONCE = 64
# The pause when no connection can be accepted, because the process has too many open files.
_ACCEPT_AGAIN_S = 0.1

# How often connections are looked at, and the silence after which a new connection is tried.
_LOOK_S = 0.5
_SILENT_S = 0.6
# The silence after which a link is told of.
_TOLD_S = 1.5
# Connections are tried in an interval that grows with the time since the peer was last heard, up to a limit. Each one
# has _TRY_S, for peers that are far away, so several are tried at once.
_AGAIN_FIRST_S = 0.01
_AGAIN_MAX_S = 1.0
_AGAIN_WHILE_SILENT_S = 0.2
_AGAIN_SHARE = 0.08
_TRY_S = 2.0
# So many connections in a row that were of no use need no pause.
_USELESS_FREE = 3
_TRIES_MAX = 8

# BBR lets a busy connection send four segments a round trip for 200 ms, every ten seconds, to see how short the round
# trip can be. Records would be 200 ms late wherever a round trip takes some milliseconds.
_WITH_PAUSES = b"bbr"
_WITHOUT_PAUSES = b"cubic"

# The kernel may send so many probes in vain, so that it never ends a connection: this module does.
_PROBES = 100

# Of struct tcp_info: retransmits and probes without an answer; the times (ms) since data and since an acknowledgement
# came; the round trip (us).
_TCP_INFO = struct.Struct("<2xBB48xII8xI")

Connection: TypeAlias = "socket.socket | TlsConnection"


@dataclass(frozen=True)
class Link:
    """A connection whose ends have proved themselves. `incoming`: the peer sends over it. `number`: higher for a later
    connection of the same process. `capacity`: of the sender's region."""

    peer: Process
    connection: Connection
    incoming: bool
    number: int
    capacity: int


class _Meeting:
    """A connection in its handshake."""

    def __init__(
        self, connection: Connection, talk: Admitting | Introducing, host: str, target: _Target | None
    ) -> None:
        self.connection = connection
        self.talk = talk
        self.host = host
        self.target = target
        self.deadline = time.monotonic() + (_HANDSHAKE_S if target is None else _TRY_S)
        self.events = 0
        self.leaving = False  # it is closed as soon as the peer knows that it was no stranger's
        self._connecting = target is not None
        self._tls = connection if isinstance(connection, TlsConnection) else None  # until the hands are shaken
        self._got = b""

    def go_on(self) -> int:
        """Takes each step that is possible now. Returns the event to wait for; 0: both ends have proved themselves.
        Raises OSError or EOFError when the peer has not."""
        if self._connecting:
            error = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            self._connecting = False
        talk = self.talk
        try:
            if self._tls is not None:
                events = self._tls.shake_hands()
                if events:
                    return events
                talk.bind(self._tls.binding)
                self._tls = None
            while True:
                while talk.output:
                    talk.output = talk.output[self.connection.send(talk.output) :]
                if not talk.need:
                    return 0
                more = self.connection.recv(talk.need - len(self._got))
                if not more:
                    raise EOFError("it has gone")
                self._got += more
                if len(self._got) == talk.need:
                    got, self._got = self._got, b""
                    talk.take(got)
        except BlockingIOError:
            return select.EPOLLOUT if talk.output else select.EPOLLIN

    @property
    def taken(self) -> bool:
        """Whether the peer's machine has taken the connection, so that only its process has yet to answer."""
        return not self._connecting

    @property
    def unknown(self) -> bool:
        """Whether a peer cannot know yet that this end is no stranger, because TLS comes before its first word."""
        return self.target is not None and self._tls is not None

    def say_hello(self) -> None:
        """Lets a peer know, before this end hangs up, that it is no stranger."""
        talk = self.talk
        if self.target is not None and self._tls is None and talk.need and talk.output:
            with suppress(OSError):
                self.connection.send(talk.output)


@dataclass
class _Target:
    """A peer to which this worker connects."""

    peer: Process
    address: tuple[str, int]
    capacity: int
    heard_at: float  # the last time at which it was known to answer
    worked: bool = False  # it has answered
    connection: Connection | None = None
    silent: bool = True
    refused: bool = False  # nobody listens at its address
    next_at: float = 0.0  # of the next try
    tries: list[_Meeting] = field(default_factory=list)
    useless: Backoff = field(default_factory=lambda: Backoff(_AGAIN_FIRST_S, _AGAIN_MAX_S, free=_USELESS_FREE))


class PeerLinks:
    """See the module's docstring.

    `arrived`: where links are put, and `ring` is called after each one. The methods may be called by any thread.
    """

    def __init__(
        self,
        own: Process,
        key: bytes,
        listener: socket.socket,
        arrived: deque[Link],
        ring: Callable[[], None],
        tls: TlsContexts | None = None,
    ) -> None:
        self._own = own
        self._key = key
        self._listener = listener
        self._arrived = arrived
        self._ring = ring
        self._tls = tls
        self._host = listener.getsockname()[0]
        self._targets: dict[int, _Target] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._strangers: dict[_Meeting, None] = {}  # the oldest first
        self._told = Told()
        self._number = 0
        self._listen_at = 0.0  # when accepting goes on after a failure; 0: it goes on
        self._look_at = 0.0
        self._closed = False
        self._by_fd: dict[int, _Meeting] = {}
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._bell, select.EPOLLIN)
        listener.setblocking(False)
        self._epoll.register(listener, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="penstock-peers", daemon=True)
        self._thread.start()

    # --- called by other threads ---------------------------------------------------------------------------------

    def want(self, peer: Process, host: str, port: int, capacity: int) -> None:
        """Connects to a peer, and again whenever the connection is lost."""
        target = _Target(peer, (host, port), capacity, time.monotonic())
        self._do(lambda: self._begin(target))

    def forget(self, worker: int) -> None:
        """Connects to a worker no more."""
        self._do(lambda: self._end(worker))

    def lost(self, worker: int, connection: Connection, useful: bool) -> None:
        """This connection to a worker is gone. `useful`: the peer has received something over it. After several that
        were not, as with a peer that does not keep to the protocol, there are pauses."""
        self._do(lambda: self._lost(worker, connection, useful))

    def silent_links(self) -> list[SilentLink]:
        """See PeerTransport."""
        now = time.monotonic()
        found = []
        for worker, target in list(self._targets.items()):
            for_s = now - target.heard_at
            taken = any(meeting.taken for meeting in target.tries[:])
            if target.silent and for_s >= _TOLD_S and not taken:
                process = target.peer.incarnation.hex()
                at = tcp_address(*target.address).removeprefix("tcp://")
                found.append(SilentLink(worker, process, at, target.worked, target.refused, for_s))
        return found

    def refused(self) -> set[int]:
        """Returns the workers whose addresses refuse connections."""
        return {worker for worker, target in list(self._targets.items()) if target.refused}

    def close(self) -> None:
        """Ends the thread and all connections that it has not handed over."""
        if not self._closed:
            self._do(self._stop)
            self._thread.join()

    def _do(self, command: Callable[[], None]) -> None:
        if self._closed:
            return
        self._commands.append(command)
        with suppress(OSError, ValueError):  # it is closed
            os.eventfd_write(self._bell, 1)

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed:
                for fd, _ in self._epoll.poll(self._wait(), 64):
                    if fd == self._bell:
                        os.eventfd_read(self._bell)
                    elif fd in self._by_fd:
                        self._go_on(self._by_fd[fd])
                    elif fd == self._listener.fileno():
                        self._accept()
                while self._commands:
                    self._commands.popleft()()
                if not self._closed:
                    self._keep_time(time.monotonic())
        finally:
            for meeting in list(self._by_fd.values()):
                self._hang_up(meeting)
            self._listener.close()
            self._epoll.close()
            os.close(self._bell)

    def _wait(self) -> float | None:
        """For how many seconds there is nothing to do unless something comes."""
        due = [meeting.deadline for meeting in self._by_fd.values()]
        if self._listen_at:
            due.append(self._listen_at)
        if self._targets:
            due.append(self._look_at)
            due += [target.next_at for target in self._targets.values() if _wants_tries(target)]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _keep_time(self, now: float) -> None:
        for meeting in list(self._by_fd.values()):
            if meeting.deadline <= now:
                self._fail(meeting, TimeoutError("it has not proved in time that it knows the job's key"))
        if self._listen_at and now >= self._listen_at:
            self._listen_at = 0.0
            self._epoll.register(self._listener, select.EPOLLIN)
        if self._targets and now >= self._look_at:
            self._look_at = now + _LOOK_S
            for target in self._targets.values():
                self._look(target, now)
        for target in self._targets.values():
            if _wants_tries(target) and now >= target.next_at:
                self._try(target, now)

    def _stop(self) -> None:
        self._closed = True

    def _begin(self, target: _Target) -> None:
        self._end(target.peer.worker)
        self._targets[target.peer.worker] = target

    def _end(self, worker: int) -> None:
        target = self._targets.pop(worker, None)
        if target is not None:
            for meeting in target.tries[:]:
                self._leave(meeting)

    def _lost(self, worker: int, connection: Connection, useful: bool) -> None:
        target = self._targets.get(worker)
        if target is not None and target.connection is connection:
            now = time.monotonic()
            target.connection = None
            target.silent = True
            target.heard_at = max(target.heard_at, now - _LOOK_S)
            if useful:
                target.useless.succeeded()
            target.next_at = now + target.useless.failed()

    def _look(self, target: _Target, now: float) -> None:
        """Asks the kernel whether a peer answers."""
        if target.connection is None:
            return
        try:
            info = target.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except OSError:
            return  # the run loop has closed it, and will say so
        retransmits, probes, data_ms, acknowledgement_ms, round_trip_us = _TCP_INFO.unpack_from(info)
        silent_s = min(data_ms, acknowledgement_ms) / 1e3
        if not (retransmits or probes) or silent_s < 2e-6 * round_trip_us:
            target.silent = False
            target.heard_at = now
        else:
            target.heard_at = max(target.heard_at, now - silent_s)
            if not target.silent and silent_s > _SILENT_S:
                target.silent = True
                target.next_at = now
        if not target.silent:
            for meeting in target.tries[:]:
                self._leave(meeting)

    def _try(self, target: _Target, now: float) -> None:
        """Begins to connect to a peer."""
        since = now - target.heard_at
        # Where nobody listens, the answer comes at once. Silence calls for another try beside those under way.
        first = _AGAIN_FIRST_S if target.refused else _AGAIN_WHILE_SILENT_S
        target.next_at = now + min(_AGAIN_MAX_S, max(first, since * _AGAIN_SHARE))
        if len(target.tries) >= _TRIES_MAX:
            self._leave(target.tries[0])
        host = target.address[0]
        connection = socket.socket(family(host), socket.SOCK_STREAM)
        self._number += 1
        talk = Introducing(self._key, self._own, target.peer, self._number, target.capacity)
        try:
            prepare(connection)
            error = connection.connect_ex(target.address)
            if error not in (0, errno.EINPROGRESS):
                raise OSError(error, os.strerror(error))
        except OSError as error:  # there is no route, or no descriptor
            logger.debug("cannot connect to %s: %s", target.address, error)
            connection.close()
            return
        secured = connection if self._tls is None else self._tls.connecting(connection)
        meeting = _Meeting(secured, talk, host, target)
        target.tries.append(meeting)
        self._watch(meeting, select.EPOLLOUT)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, (host, *_) = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._epoll.unregister(self._listener)
                    self._listen_at = time.monotonic() + _ACCEPT_AGAIN_S
                    return
                continue  # the stranger has gone
            try:
                prepare(connection)
            except OSError:
                connection.close()
                continue
            secured = connection if self._tls is None else self._tls.accepting(connection)
            meeting = _Meeting(secured, Admitting(self._key, self._own), host, None)
            self._strangers[meeting] = None
            if len(self._strangers) > _STRANGERS_MAX:
                # The oldest one of the machine with the most: those of other machines are not held up by it.
                ((busiest, _),) = Counter(one.host for one in self._strangers).most_common(1)
                oldest = next(one for one in self._strangers if one.host == busiest)
                self._fail(oldest, NotProved("there are too many that have not proved themselves"))
            if meeting in self._strangers:
                self._watch(meeting, select.EPOLLIN)

    # --- handshakes ----------------------------------------------------------------------------------------------

    def _watch(self, meeting: _Meeting, events: int) -> None:
        fd = meeting.connection.fileno()
        if meeting.events:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
            self._by_fd[fd] = meeting
        meeting.events = events

    def _unwatch(self, meeting: _Meeting) -> None:
        self._strangers.pop(meeting, None)
        if meeting.target is not None and meeting in meeting.target.tries:
            meeting.target.tries.remove(meeting)
        fd = meeting.connection.fileno()
        if self._by_fd.get(fd) is meeting:
            del self._by_fd[fd]
            with suppress(OSError):
                self._epoll.unregister(fd)

    def _hang_up(self, meeting: _Meeting) -> None:
        self._unwatch(meeting)
        meeting.say_hello()
        meeting.connection.close()

    def _leave(self, meeting: _Meeting) -> None:
        """Closes a healthy connection to a peer, but not before the peer is known."""
        if not meeting.unknown:
            self._hang_up(meeting)
            return
        assert meeting.target is not None
        meeting.target.tries.remove(meeting)
        meeting.leaving = True

    def _go_on(self, meeting: _Meeting) -> None:
        if meeting.target is not None and not meeting.leaving:
            # A peer that was only held up has answered on the old connection by now, which stays then. The new one
            # would replace it with the proof that is sent here.
            self._look(meeting.target, time.monotonic())
            if meeting not in meeting.target.tries:
                return
        try:
            events = meeting.go_on()
        except (OSError, EOFError, ValueError) as error:  # TLS raises ValueError for contexts that do not fit
            self._fail(meeting, error)
            return
        if meeting.leaving and not meeting.unknown:
            self._hang_up(meeting)
            return
        if events:
            if events != meeting.events:
                self._watch(meeting, events)
            return
        self._unwatch(meeting)
        talk, connection, target = meeting.talk, meeting.connection, meeting.target
        if target is None:
            assert isinstance(talk, Admitting)
            self._arrived.append(Link(talk.peer, connection, True, talk.number, talk.capacity))
        else:
            for other in target.tries[:]:
                self._leave(other)
            target.connection = connection
            target.silent = target.refused = False
            target.worked = True
            target.heard_at = time.monotonic()
            self._arrived.append(Link(target.peer, connection, False, 0, target.capacity))
        self._ring()

    def _fail(self, meeting: _Meeting, error: Exception) -> None:
        """Ends a handshake that has failed, and tells so when it was a stranger's."""
        self._hang_up(meeting)
        target = meeting.target
        if target is not None:
            if isinstance(error, ConnectionRefusedError):
                target.refused = True
            elif isinstance(error, NotProved) and self._told.may_tell(meeting.host):
                logger.warning(
                    "worker %d is not at %s: who answers there does not know the job's key",
                    target.peer.worker,
                    target.address,
                )
            return
        assert isinstance(meeting.talk, Admitting)
        if meeting.talk.known and not isinstance(error, NotProved):
            return  # a peer that means an earlier process, or has connected in another way meanwhile
        if self._told.may_tell(meeting.host):
            logger.warning(
                "a process of %s has connected to worker %d at %s %s (%s); further ones of that machine are refused "
                "without a word for a while",
                meeting.host,
                self._own.worker,
                self._host,
                refusal(error),
                said(error),
            )


def _wants_tries(target: _Target) -> bool:
    return target.connection is None or target.silent


def prepare(connection: socket.socket) -> None:
    """Sets the options that all connections between peers have: they send at once, an idle one is probed by the kernel,
    and none is under BBR where the kernel lets us choose."""
    connection.setblocking(False)
    send_at_once(connection, _PROBES)
    control = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
    if control == _WITH_PAUSES:
        with suppress(OSError):  # the machine does not have the other one, or does not let its users choose it
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _WITHOUT_PAUSES)


def peer_address(address: str) -> tuple[str, int, bytes]:
    """Returns the host, the port and the incarnation of a TcpTransport's address."""
    at, _, incarnation = address.rpartition("/")
    host, port = host_and_port(at)
    return host, port, bytes.fromhex(incarnation)
