"""A source of lines from a TCP connection.

A thread reads the socket into a bounded buffer and stops reading when it is full, so that TCP holds the
sender back. It must never block the run loop, nor outlive close().
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import termios
import threading
from collections import deque
from collections.abc import Callable
from fcntl import ioctl
from typing import Any

from penstock.runtime.backoff import Backoff
from penstock.runtime.errors import FlowError, SourceError, shorten
from penstock.runtime.sources.base import Reader, Source, SourceContext, Split
from penstock.runtime.sources.files import MAX_LINE
from penstock.runtime.sources.lines import TextDecoder, readable, up_to_long_line
from penstock.runtime.units import flag, is_whole, whole

logger = logging.getLogger(__name__)

_RECEIVE = 64 << 10
_CONNECT_S = 10.0
_RETRY_S = (0.1, 5.0)  # the first and the longest pause between attempts to connect
_JOIN_S = 2.0


class SocketLines(Source[str]):
    """Reads the lines that a TCP server sends, each a str without its line end ("\\n" or "\\r\\n").

        flow.read(ps.sources.SocketLines("localhost", 9999))     # e.g. of: nc -lk 9999

    `host`, `port`: where to connect to; one task does it. `encoding`: as in TextFiles. `reconnect`: connect
    again when the server cannot be reached or closes (what was sent meanwhile is lost), and so never end;
    False: the source ends when the server closes the connection. `max_buffered`: lines held for the job
    before the socket is left unread. `max_line_bytes`: the longest line allowed, without its line end.

    The last line needs no line end when `reconnect` is False and the server closes the connection. In every other
    case a line that breaks off with its connection is left out, because nobody knows whether it was whole: with
    `reconnect`, and when the connection is reset. The log says how many bytes were left out.

    Errors: SourceError while running when the server cannot be reached or breaks off and `reconnect` is
    False, and when a line is longer than `max_line_bytes`; the lines before it are handed out first. A line that
    is not valid in the encoding is a failed record (its bytes).

    Offset: the number of lines handed out. A socket cannot be replayed: lines that were received but whose
    effects were not yet part of a checkpoint are lost when the job recovers. Put a file or a log between
    where that matters.
    """

    bounded = False

    def __init__(
        self,
        host: str,
        port: int,
        *,
        encoding: str = "utf-8",
        reconnect: bool = False,
        max_buffered: int = 65_536,
        max_line_bytes: int = MAX_LINE,
    ) -> None:
        if not isinstance(host, str) or not host:
            raise FlowError(f"SocketLines: host={shorten(host)}; it must be a name or an address, such as 'localhost'")
        if not is_whole(port) or not 0 < port < 65_536:
            raise FlowError(f"SocketLines: port={shorten(port)}; it must be a whole number from 1 to 65535")
        self.host = host
        self.port = int(port)
        self.encoding = encoding
        self.reconnect = flag(reconnect, "SocketLines: reconnect")
        self.max_buffered = whole(max_buffered, "SocketLines: max_buffered")
        self.max_line_bytes = whole(max_line_bytes, "SocketLines: max_line_bytes")
        TextDecoder(encoding)  # refuses an encoding that will not do

    def splits(self, parallelism: int) -> list[Split]:
        return [Split(f"{self.host}:{self.port}")]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        return _SocketReader(self, splits, context)

    def describe(self) -> str:
        return f"SocketLines({self.host!r}, {self.port})"


class _SocketReader(Reader):
    def __init__(self, source: SocketLines, splits: list[Split], context: SourceContext) -> None:
        self._names = [split.name for split in splits]
        self._received = sum(split.offset or 0 for split in splits)
        self._errors = context.errors
        self._feed: _Feed | None = None
        self.finished = not splits
        if splits:
            self._feed = _Feed(source, context.wake)

    def read(self, limit: int) -> list[Any]:
        if self._feed is None or self.finished:
            return []
        records = self._feed.take(limit)
        if not records:
            self.finished = self._feed.at_end()
            return []
        self._received += len(records)
        return readable(records, self._errors)

    def offsets(self) -> dict[str, Any]:
        return dict.fromkeys(self._names, self._received)

    def ready_in(self) -> float | None:
        return 0.0 if self.finished or self._feed is None or self._feed.has_news() else None

    def backlog(self) -> int:
        return 0 if self._feed is None or self.finished else self._feed.backlog()

    def is_full(self) -> bool:
        return self._feed is not None and not self.finished and self._feed.is_full()

    def close(self) -> None:
        self.finished = True
        if self._feed is not None:
            self._feed.close()


class _Feed:
    """Runs the thread that receives, and holds the buffer between this thread and the run loop."""

    def __init__(self, source: SocketLines, wake: Callable[[], None]) -> None:
        self._source = source
        self._decode = TextDecoder(source.encoding)
        self._name = f"{source.host}:{source.port}"
        self._wake = wake
        self._changed = threading.Condition()
        self._lines: deque[Any] = deque()
        self._outside = 0  # lines that were received and wait for room in the buffer
        self._lines_seen = self._bytes_seen = 0  # of all whole lines so far
        self._closed = False
        self._ended = False
        self._error: SourceError | None = None
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name=f"penstock-socket-{self._name}", daemon=True)
        self._thread.start()

    def take(self, limit: int) -> list[Any]:
        with self._changed:
            count = min(limit, len(self._lines))
            lines = [self._lines.popleft() for _ in range(count)]
            if count:
                self._changed.notify_all()
            return lines

    def at_end(self) -> bool:
        """Tells whether no more lines will come. Raises the error that ended the connection, if it was an error."""
        with self._changed:
            if self._lines or not self._ended:
                return False
            if self._error is not None:
                raise self._error
            return True

    def has_news(self) -> bool:
        with self._changed:
            return bool(self._lines) or self._ended

    def backlog(self) -> int:
        """Returns how many lines are held here, and about how many wait in the kernel. What waits in the sender's
        machine is not known."""
        with self._changed:
            waiting = len(self._lines) + self._outside
            if self._socket is not None and self._lines_seen:
                waiting += _in_kernel(self._socket) * self._lines_seen // self._bytes_seen
            return waiting

    def is_full(self) -> bool:
        """Tells whether received lines wait for room in the buffer: then the kernel's buffer and that of the sender
        fill as well, and nobody knows how much waits there."""
        with self._changed:
            return self._outside > 0 and not self._ended

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._lines.clear()
            self._changed.notify_all()
            if self._socket is not None:
                _shut(self._socket)
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        error: SourceError | None = None
        try:
            self._receive_all()
        except SourceError as failure:
            error = failure
        except Exception as failure:  # the run loop must hear of it, whatever it is
            error = SourceError(f"SocketLines: receiving from {self._name} failed: {failure!r}")
            error.__cause__ = failure
        with self._changed:
            self._ended = True
            self._error = error
        self._wake()

    def _receive_all(self) -> None:
        backoff = Backoff(*_RETRY_S)
        while not self._closed:
            connected = False
            try:
                with self._connect() as connection:
                    connected = True
                    backoff.succeeded()
                    try:
                        self._receive(connection)
                    finally:
                        with self._changed:
                            self._socket = None  # before its number is that of another file
            except OSError as error:
                if not self._source.reconnect and not self._closed:
                    raise self._failure(error, connected) from error
            if not self._source.reconnect:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._closed, backoff.failed())

    def _connect(self) -> socket.socket:
        last: OSError | None = None
        source = self._source
        for family, kind, protocol, _, address in socket.getaddrinfo(source.host, source.port, type=socket.SOCK_STREAM):
            connection = socket.socket(family, kind, protocol)
            with self._changed:
                if self._closed:
                    connection.close()
                    raise OSError("closed")
                self._socket = connection
            try:
                connection.settimeout(_CONNECT_S)
                connection.connect(address)
                connection.settimeout(None)
                return connection
            except OSError as error:
                last = error
                connection.close()
        raise last or OSError("the name has no address")

    def _receive(self, connection: socket.socket) -> None:
        parts: list[bytes] = []  # of a line that has not ended
        held = 0
        position = 0
        limit = self._source.max_line_bytes
        while not self._closed:
            try:
                data = connection.recv(_RECEIVE)
            except OSError:
                self._leave_out(held)
                raise
            if not data:
                if self._source.reconnect:
                    self._leave_out(held)
                elif parts:
                    self._put(self._decode(b"".join(parts), self._name, position)[0], held)
                return
            end = data.rfind(b"\n") + 1
            if end:
                block = b"".join([*parts, data[:end]])
                allowed = up_to_long_line(block, limit)
                if allowed:
                    self._put(self._decode(allowed, self._name, position)[0], len(allowed))
                if len(allowed) < len(block):
                    raise self._too_long()
                position += len(block)
                parts, held = [], 0
            if end < len(data):
                parts.append(data[end:])
                held += len(data) - end
                if held - data.endswith(b"\r") > limit:
                    raise self._too_long()

    def _leave_out(self, size: int) -> None:
        """Says that a line broke off after `size` bytes, with the connection."""
        if size and not self._closed:
            logger.warning(
                "SocketLines: the connection to %s ended in the middle of a line, and the %s bytes of this line that "
                "had arrived were left out. The server must send the end of a line before it closes the connection",
                self._name,
                f"{size:,}",
            )

    def _put(self, lines: list[Any], size: int) -> None:
        """Appends to the buffer as room becomes free. The lines were `size` bytes."""
        with self._changed:
            self._outside = len(lines)
            self._lines_seen += len(lines)
            self._bytes_seen += size
        done = 0
        while done < len(lines):
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._lines) < self._source.max_buffered)
                if self._closed:
                    return
                was_empty = not self._lines
                room = self._source.max_buffered - len(self._lines)
                self._lines.extend(lines[done : done + room])
                done += room
                self._outside = max(0, len(lines) - done)
            if was_empty:
                self._wake()

    def _too_long(self) -> SourceError:
        return SourceError(
            f"SocketLines: {self._name} sent a line of more than {self._source.max_line_bytes:,} bytes. Does it send "
            "lines of text? If it does, raise max_line_bytes."
        )

    def _failure(self, error: OSError, connected: bool) -> SourceError:
        reason = error.strerror or str(error) or type(error).__name__
        if connected:
            return SourceError(
                f"SocketLines: the connection to {self._name} broke: {reason}. Give reconnect=True to connect again "
                "after such failures."
            )
        return SourceError(
            f"SocketLines: cannot connect to {self._name}: {reason}. Start the server before the job (a "
            "test server: "
            f"nc -lk {self._source.port}), check host and port, or give reconnect=True to wait for it. "
            "The task that connects may run on any node."
        )


def _in_kernel(connection: socket.socket) -> int:
    """Returns the number of bytes that the kernel has received and that are not read yet."""
    try:
        return int(struct.unpack("i", ioctl(connection.fileno(), termios.FIONREAD, b"\0\0\0\0"))[0])
    except (OSError, ValueError):  # it was closed meanwhile
        return 0


def _shut(connection: socket.socket) -> None:
    """Wakes the thread that waits in recv or connect, and closes the socket."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
