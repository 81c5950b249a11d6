"""Control of a running Worker over sockets: the JobMaster asks for the status, says stop or cancel, and sends the
commands of the coordinator.

The JobMaster does not call the Ray actor for this. The main thread of a Ray actor that can answer calls beside a
pending one looks for signals a hundred times a second, which costs half a percent of a core in every idle worker. So a
Worker runs its loop in the main thread, where Ray leaves it alone, and answers here in threads that sleep in the
kernel. The server listens for processes of its own machine, or of all machines of a job that spans several
(runtime/transport/endpoint.py). Both sides prove that they know the server's key, which Ray has carried, before
anything is unpickled (runtime/transport/handshake.py). When a job asks for TLS, everything between two machines goes
over it, also the proofs.

Every request has a number, and an answer names the request that it belongs to. So silence is never taken for an answer:
a worker that was paused, or kept its interpreter busy, answers late, and its answer is matched with its request, or
dropped when nobody waits for it any more. When a connection breaks, it is made again, and all requests without an
answer are sent again. The worker recognises by the number what it has done already, and does nothing twice. Only
whoever watches the worker's process knows that it has gone, and closes the line.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.runtime.backoff import Backoff
from penstock.runtime.errors import PenstockError
from penstock.runtime.records.pickling import Program, copied, dumps, loads
from penstock.runtime.transport.endpoint import Ports, connect, listen, new_socket, notice_silence
from penstock.runtime.transport.handshake import (
    Connection,
    NotAsAgreed,
    admit,
    bound,
    introduce,
    of_this_user,
    receive_frame,
    send_frame,
)
from penstock.runtime.transport.strangers import Told, refusal

if TYPE_CHECKING:
    from penstock.runtime.transport.certificates import Credentials
    from penstock.runtime.transport.tls import TlsContexts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class End:
    """Where a process answers: the address of its socket, the key that both sides must know, and by what connections
    are encrypted, if they are."""

    address: str
    key: bytes = field(repr=False)
    tls: Credentials | None = None


# How long the handshake may take. When a worker was paused meanwhile, the JobMaster connects again.
_HANDSHAKE_S = 10.0
# How many connections may be in their handshake. One more connection ends the oldest one.
_STRANGERS_MAX = 64

# The pause between two tries to accept when the process can take no more connections, and the first and the longest
# pause between two tries to connect.
_ACCEPT_AGAIN_S = 0.05
_CONNECT_AGAIN_FIRST_S = 0.01
_CONNECT_AGAIN_MAX_S = 1.0

_KEY_BYTES = 32
_SESSION_BYTES = 16
# The head of a request: its number, and the number below which all requests have been answered. The head of an answer:
# the number of its request.
_REQUEST = struct.Struct("<QQ")
_ANSWER = struct.Struct("<Q")


class Refused(PenstockError):
    """The worker could not carry out a request. `error` is what its handler raised, if that could travel."""

    def __init__(self, message: str, error: Exception | None = None) -> None:
        super().__init__(message)
        self.error = error


class Gone(PenstockError):
    """There will be no answer: the worker's process has gone, or the job has ended."""


# --- numbers, without sockets and threads -----------------------------------------------------------------------------


class OpenRequests:
    """The memory of the asking end: the requests that have no answer yet, by number. Used under a lock."""

    def __init__(self) -> None:
        self._next = 0
        self._open: dict[int, tuple[bytes, Future[Any], str]] = {}

    def add(self, kind: str, body: bytes, future: Future[Any]) -> bytes:
        """Add a request. Returns its message."""
        number = self._next
        self._next += 1
        self._open[number] = (body, future, kind)
        return self._message(number)

    def again(self) -> list[bytes]:
        """The messages of all requests without an answer, in order, for a new connection."""
        return [self._message(number) for number in sorted(self._open)]

    def answered(self, number: int) -> tuple[str, Future[Any]] | None:
        """Take out the request of this number, because its answer has come. Returns its kind and future, or None when
        the request had an answer before."""
        found = self._open.pop(number, None)
        return None if found is None else (found[2], found[1])

    def give_up(self) -> list[Future[Any]]:
        """Take out all requests, because no answers will come any more. Returns their futures."""
        futures = [future for _, future, _ in self._open.values()]
        self._open.clear()
        return futures

    def _message(self, number: int) -> bytes:
        return _REQUEST.pack(number, min(self._open)) + self._open[number][0]


class ControlSession:
    """The memory of the answering end, also when a connection breaks: each answer, until the asking end has received
    it. Safe to use from several threads: requests are done one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[int, bytes] = {}
        self._settled = 0

    def take(self, message: bytes, do: Callable[[bytes], bytes]) -> bytes | None:
        """Carries out the request in a message, unless that is done already. Returns the message of the answer, or None
        when nobody waits for it. Raises NotAsAgreed."""
        number, settled = _head(_REQUEST, message, "request")
        with self._lock:  # what a connection had begun that broke must end before anything is done again
            if settled > self._settled:
                self._settled = settled
                self._answers = {at: answer for at, answer in self._answers.items() if at >= settled}
            if number < self._settled:
                return None
            if number not in self._answers:
                self._answers[number] = _ANSWER.pack(number) + do(message[_REQUEST.size :])
            return self._answers[number]


def _head(layout: struct.Struct, message: bytes, kind: str) -> tuple[int, ...]:
    if len(message) < layout.size:
        raise NotAsAgreed(f"a {kind} of {len(message)} bytes came, and its head alone has {layout.size}")
    return layout.unpack_from(message)


# --- the worker's end -------------------------------------------------------------------------------------------------


class ControlServer:
    """Answers requests: each is a command, which `obey` carries out. Each connection has a daemon thread of its own,
    which answers its requests one after the other.

    Nothing that a stranger does ends the accepting thread or holds it up.
    """

    def __init__(self, obey: Callable[[Any], Any], ports: Ports | None = None) -> None:
        """`ports`: where processes of other machines connect; None: only processes of this machine do."""
        self._obey = obey
        self.heard = 0  # the number of requests so far: while it grows, the JobMaster lives
        self._lock = threading.Lock()
        self._strangers: list[socket.socket] = []  # connections in their handshake, the oldest first
        self._sessions: dict[bytes, ControlSession] = {}
        self._closed = threading.Event()
        self._told = Told()
        tls = None if ports is None else ports.tls
        self._tls = _contexts(tls)
        self._listener, address = listen(ports)
        self.end = End(address, os.urandom(_KEY_BYTES), tls)
        threading.Thread(target=self._serve, name="penstock-control", daemon=True).start()

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                connection, address = self._listener.accept()
            except OSError:  # the server is closed, the client has gone, or the process has too many open files
                self._closed.wait(_ACCEPT_AGAIN_S)
                continue
            try:
                self._let_in(connection, address)
            except Exception:  # no thread can be started; the client will try again
                self._show_out(connection)
                self._closed.wait(_ACCEPT_AGAIN_S)

    def _let_in(self, connection: socket.socket, address: Any) -> None:
        if not of_this_user(connection):
            connection.close()
            return
        notice_silence(connection)
        with self._lock:
            self._strangers.append(connection)
            if len(self._strangers) > _STRANGERS_MAX:
                _hang_up(self._strangers.pop(0))  # its thread closes it
        threading.Thread(target=self._talk, args=(connection, address), name="penstock-control", daemon=True).start()

    def _show_out(self, connection: socket.socket) -> None:
        with self._lock, suppress(ValueError):
            self._strangers.remove(connection)
        connection.close()

    def _talk(self, connection: socket.socket, address: Any) -> None:
        deadline = time.monotonic() + _HANDSHAKE_S
        try:
            stream, key = _encrypted(connection, self.end.key, self._tls, deadline, server=True)
            admit(stream, key, deadline - time.monotonic())
            with self._lock:
                self._strangers.remove(connection)  # raises ValueError when `_let_in` has just ended it
        except (OSError, EOFError, ValueError) as error:
            if connection.family != socket.AF_UNIX:
                self._tell(address[0], error)
            self._show_out(connection)
            return
        with connection, self._until_the_client_goes():
            name = receive_frame(stream)[:_SESSION_BYTES]
            with self._lock:
                session = self._sessions.setdefault(name, ControlSession())
            while True:
                message = receive_frame(stream)
                if _has_gone(connection):
                    return
                self.heard += 1
                answer = session.take(message, self._do)
                if answer is not None:
                    send_frame(stream, answer)

    @contextmanager
    def _until_the_client_goes(self) -> Iterator[None]:
        try:
            yield
        except NotAsAgreed as error:
            logger.error("the connection of a process of the job with %s is closed: %s", self.end.address, error)
        except (EOFError, OSError):
            pass

    def _tell(self, machine: str, error: Exception) -> None:
        """Tells in the log, once in a while for each machine, that a stranger has connected over the network. Those
        that use the socket of this machine are not told: they are processes of this user."""
        if not self._told.may_tell(machine):
            return
        logger.warning(
            "a process of %s has connected to %s %s (%s); further processes of that machine are refused without a word "
            "for a while",
            machine,
            self.end.address,
            refusal(error),
            (str(error) if self._tls is None else self._tls.said(error)) or type(error).__name__,
        )

    def _do(self, body: bytes) -> bytes:
        try:
            return dumps((True, self._obey(loads(body))))
        except Exception as error:  # whatever it is, who has asked waits for an answer
            return dumps((False, _portable(error)))

    def close(self) -> None:
        """Accept no more connections."""
        self._closed.set()
        _hang_up(self._listener)
        self._listener.close()


def _contexts(credentials: Credentials | None) -> TlsContexts | None:
    if credentials is None:
        return None
    from penstock.runtime.transport.tls import contexts_of  # most jobs do not span machines

    return contexts_of(credentials)


def _encrypted(
    connection: socket.socket, key: bytes, tls: TlsContexts | None, deadline: float, *, server: bool
) -> tuple[Connection, bytes]:
    """Returns the connection over TLS, if there is TLS, and the key for the proofs over it. Raises OSError or
    EOFError."""
    if tls is None:
        return connection, key
    stream = tls.stream(connection, server=server)
    stream.shake_hands(deadline)
    return stream, bound(key, stream.binding)


def _portable(error: Exception) -> Exception:
    """The error, or one with the same text when the error itself cannot be pickled."""
    try:
        copied(error)
    except Exception:  # its class decides what pickling it raises
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _has_gone(connection: socket.socket) -> bool:
    """Whether the peer has closed its end. Its requests must not be done any more: a worker that was paused while its
    JobMaster died would do them among the worker processes of the next JobMaster. When only the connection broke, the
    peer sends them again."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


def _hang_up(connection: Connection) -> None:
    """Wake the thread that waits on this socket, which closing the socket would not do."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


# --- the JobMaster's end ----------------------------------------------------------------------------------------------


class ControlClient:
    """The asking end of the connection with one worker's process. Safe to use from several threads.

    A thread of its own connects, connects again when the connection breaks, and reads the answers. Another one sends
    the requests again that had no answer when the connection broke. While a worker has not started yet, is paused or
    is busy, requests wait until it answers or the line is closed.
    """

    def __init__(self, end: End, name: str, program: Program | None = None) -> None:
        """`program`: see pickling.dumps."""
        self._program = program
        self._end = end
        self._tls = _contexts(end.tls)
        self._told = False  # that there is something wrong with a certificate, or with an answer
        #: Why one end does not accept the certificate of the other one; None when nothing is known of that.
        self.refused: str | None = None
        self._session = os.urandom(_SESSION_BYTES)
        self._asked = OpenRequests()
        self._connection: Connection | None = None
        self._connecting: socket.socket | None = None
        self._lock = threading.Lock()  # of the three above; nobody waits for anything under it
        self._sending = threading.Lock()  # frames are sent one after the other
        self._closed = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def ask(self, command: object) -> Future[Any]:
        """Send a command. The future gets the worker's answer, Refused when its handler raised an error, or Gone when
        the line was closed."""
        kind, body = type(command).__name__, dumps(command, self._program)
        future: Future[Any] = Future()
        with self._lock:
            if self._closed.is_set():
                future.set_exception(Gone(f"{kind}: nobody talks with the worker any more"))
                return future
            message = self._asked.add(kind, body, future)
            connection = self._connection
        if connection is not None:  # else the request is sent, with all others, as soon as there is a connection
            try:
                with self._sending:
                    send_frame(connection, message)
            except OSError:
                _hang_up(connection)
        return future

    def close(self) -> None:
        """End the connection. Requests without an answer fail with Gone."""
        with self._lock:
            self._closed.set()
            futures = self._asked.give_up()
            for connection in (self._connection, self._connecting):
                if connection is not None:
                    _hang_up(connection)
        for future in futures:
            future.set_exception(Gone("nobody talks with the worker any more"))

    def _run(self) -> None:
        backoff = Backoff(_CONNECT_AGAIN_FIRST_S, _CONNECT_AGAIN_MAX_S)
        while not self._closed.is_set():
            with suppress(OSError, EOFError), new_socket(self._end.address) as connection:
                try:
                    stream = self._connect(connection)
                    backoff.succeeded()
                    self._read(stream)
                except OSError as error:
                    self._tell(error)
                finally:
                    with self._lock:
                        self._connection = self._connecting = None
                    _hang_up(connection)  # who is sending must not wait for a peer that is not read any more
            self._closed.wait(backoff.failed())

    def _tell(self, error: OSError) -> None:
        """Logs once that one end does not accept the certificate, or a message, of the other one."""
        refused = self._tls is not None and self._tls.refused(error)
        if refused and self._tls is not None:
            self.refused = self._tls.said(error)
        if (refused or isinstance(error, NotAsAgreed)) and not self._told and not self._closed.is_set():
            self._told = True
            said = str(error) if self._tls is None else self._tls.said(error)
            logger.warning("the process at %s cannot be asked for anything: %s", self._end.address, said)

    def _connect(self, connection: socket.socket) -> Connection:
        with self._lock:
            self._connecting = connection
        connection.settimeout(_HANDSHAKE_S)
        connect(connection, self._end.address)
        deadline = time.monotonic() + _HANDSHAKE_S
        stream, key = _encrypted(connection, self._end.key, self._tls, deadline, server=False)
        introduce(stream, key, deadline - time.monotonic())
        send_frame(stream, self._session)
        # In a thread of its own, because the worker takes no more requests while nobody reads its answers.
        arguments = (connection, stream)
        threading.Thread(target=self._send_again, args=arguments, name="penstock-ask-again", daemon=True).start()
        return stream

    def _send_again(self, connection: socket.socket, stream: Connection) -> None:
        """Sends the requests without an answer over a new connection, and lets later ones follow them."""
        try:
            with self._sending:
                with self._lock:
                    if self._closed.is_set() or self._connecting is not connection:  # it is over already
                        return
                    self._connection = stream
                    messages = self._asked.again()
                for message in messages:
                    send_frame(stream, message)
        except OSError:
            _hang_up(stream)

    def _read(self, connection: Connection) -> None:
        while True:
            answer = receive_frame(connection)
            (number,) = _head(_ANSWER, answer, "answer")
            with self._lock:
                found = self._asked.answered(number)
            self.refused = None
            if found is None:
                continue
            kind, future = found
            try:
                good, result = loads(answer[_ANSWER.size :])
            except Exception as error:  # its class may not load here, and other answers are still to come
                good, result = False, error
            if good:
                future.set_result(result)
            else:
                future.set_exception(Refused(f"{kind}: {type(result).__name__}: {result}", result))
