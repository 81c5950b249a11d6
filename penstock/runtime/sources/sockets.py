"""A source of lines from a TCP connection.

The reader's thread reads the socket only while it holds few lines, so that TCP holds the sender back. It must never
hold more lines than one read of the socket brings beyond that.
"""

from __future__ import annotations

import logging
import socket
import struct
import termios
from collections import deque
from fcntl import ioctl
from time import monotonic
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
_WAIT_S = 0.5  # for how long a read waits for data


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
    """Receives in the thread of a ThreadReader. It reads the socket only while it holds few lines."""

    blocking = True

    def __init__(self, source: SocketLines, splits: list[Split], context: SourceContext) -> None:
        self._source = source
        self._names = [split.name for split in splits]
        self._received = sum(split.offset or 0 for split in splits)
        self._errors = context.errors
        self._decode = TextDecoder(source.encoding)
        self._name = f"{source.host}:{source.port}"
        self._lines: deque[Any] = deque()
        self._lines_seen = self._bytes_seen = 0  # of all whole lines so far
        self._parts: list[bytes] = []  # of a line that has not ended
        self._held = 0  # their bytes
        self._position = 0
        self._connection: socket.socket | None = None
        self._backoff = Backoff(*_RETRY_S)
        self._not_before = 0.0  # when to connect again
        self._ended: bool | SourceError = False  # no more lines will be received; the error after them, if any
        self.finished = not splits

    def read(self, limit: int) -> list[Any]:
        if not self._ended and not self.finished:
            self._receive()
        if not self._lines and self._ended:
            if isinstance(self._ended, SourceError):
                raise self._ended
            self.finished = True
        records = [self._lines.popleft() for _ in range(min(limit, len(self._lines)))]
        self._received += len(records)
        return readable(records, self._errors)

    def offsets(self) -> dict[str, Any]:
        return dict.fromkeys(self._names, self._received)

    def ready_in(self) -> float | None:
        return max(0.0, self._not_before - monotonic()) if self._connection is None else 0.0

    def backlog(self) -> int:
        """Returns how many lines are held here, and about how many wait in the kernel. What waits in the sender's
        machine is not known."""
        connection = self._connection  # read once, because the thread may change it meanwhile
        kernel = _in_kernel(connection) if connection is not None and self._lines_seen else 0
        return len(self._lines) + (kernel and kernel * self._lines_seen // self._bytes_seen)

    def is_full(self) -> bool:
        """Returns whether lines are held up to the limit: then the kernel's buffer and that of the sender fill as well,
        and nobody knows how much waits there."""
        return len(self._lines) >= self._source.max_buffered and not self._ended

    def close(self) -> None:
        self.finished = True
        self._lines.clear()
        self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _receive(self) -> None:
        """Receives lines from the socket. Waits for a moment when no line is held."""
        connected = self._connection is not None
        try:
            if self._connection is None:
                if monotonic() < self._not_before:
                    return
                self._connection = socket.create_connection((self._source.host, self._source.port), _CONNECT_S)
                self._backoff.succeeded()
                connected = True
            while len(self._lines) < self._source.max_buffered:
                self._connection.settimeout(0 if self._lines else _WAIT_S)
                if not self._take(self._connection.recv(_RECEIVE)):
                    return
        except SourceError as error:  # a line that is too long
            self._disconnect()
            self._ended = error
        except OSError as error:
            waited = isinstance(error, TimeoutError) and error.errno is None  # no error of the connection
            if isinstance(error, BlockingIOError) or (connected and waited):
                return
            self._leave_out()
            self._lost(self._failure(error, connected))
            if isinstance(self._ended, SourceError):
                self._ended.__cause__ = error

    def _lost(self, ended: bool | SourceError) -> None:
        """Notes that the connection has ended, or was never made."""
        self._disconnect()
        self._parts, self._held, self._position = [], 0, 0
        if self._source.reconnect:
            self._not_before = monotonic() + self._backoff.failed()
        else:
            self._ended = ended

    def _take(self, data: bytes) -> bool:
        """Takes bytes of the connection. Returns False at its end."""
        if not data:
            if self._source.reconnect:
                self._leave_out()
            elif self._parts:
                self._put(b"".join(self._parts))
            self._lost(True)
            return False
        limit = self._source.max_line_bytes
        end = data.rfind(b"\n") + 1
        if end:
            block = b"".join([*self._parts, data[:end]])
            allowed = up_to_long_line(block, limit)
            if allowed:
                self._put(allowed)
            if len(allowed) < len(block):
                raise self._too_long()
            self._parts, self._held = [], 0
        if end < len(data):
            self._parts.append(data[end:])
            self._held += len(data) - end
            if self._held - data.endswith(b"\r") > limit:
                raise self._too_long()
        return True

    def _put(self, data: bytes) -> None:
        lines = self._decode(data, self._name, self._position)[0]
        self._position += len(data)
        self._bytes_seen += len(data)
        self._lines_seen += len(lines)
        self._lines.extend(lines)

    def _leave_out(self) -> None:
        """Says that a line broke off, with the connection."""
        if self._held:
            logger.warning(
                "SocketLines: the connection to %s ended in the middle of a line, and the %s bytes of this line that "
                "had arrived were left out. The server must send the end of a line before it closes the connection",
                self._name,
                f"{self._held:,}",
            )

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
