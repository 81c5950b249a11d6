"""How the two ends of a connection prove to each other that they know the job's key, and how they send frames later.

Any process that can reach the socket may connect. Until a peer has proved that it knows the key, nothing that it sends
is decoded, only a fixed number of bytes is read, and the peer has a deadline. So a stranger can neither have a message
of its own decoded nor make the process hold much memory. The handshake works for every family of sockets. It
authenticates the peer when it connects; it does not encrypt. TLS does (tls.py), and then the handshake goes over it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import time
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from penstock.runtime.transport.tls import TlsStream

_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size

_LENGTH = struct.Struct("<Q")
#: The number of bytes of the largest frame. The largest that there are carry programs.
LARGEST_FRAME = 1 << 31
_PIECE_BYTES = 256 * 1024
# SO_PEERCRED's struct ucred: pid, uid, gid.
_CREDENTIALS = struct.Struct("3i")


#: A connection whose reads and writes wait.
Connection: TypeAlias = "socket.socket | TlsStream"


class NotProved(OSError):
    """The peer does not know the key, or has not proved in time that it does."""


class NotAsAgreed(OSError):
    """A peer that has proved itself sent a message that cannot be part of the conversation. The connection is of no
    use."""


def of_this_user(connection: socket.socket) -> bool:
    """Whether the peer's process belongs to this process's user, or to root. Returns True when the kernel does not know
    the peer's user, as over TCP."""
    if connection.family != socket.AF_UNIX:
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return user in (os.geteuid(), 0)


def admit(connection: Connection, key: bytes, limit_s: float) -> None:
    """The handshake of the end that was connected to: both ends prove within `limit_s` seconds that they know the key.
    Raises OSError or EOFError when they do not."""
    deadline = time.monotonic() + limit_s
    own = os.urandom(_NONCE_BYTES)
    _send_until(connection, own, deadline)
    said = _receive_until(connection, _NONCE_BYTES + _PROOF_BYTES, deadline)
    theirs, claim = said[:_NONCE_BYTES], said[_NONCE_BYTES:]
    if not hmac.compare_digest(claim, proof(key, b"client", own, theirs)):
        raise NotProved("the peer does not know the job's key")
    _send_until(connection, proof(key, b"server", own, theirs), deadline)
    connection.settimeout(None)


def introduce(connection: Connection, key: bytes, limit_s: float) -> None:
    """The handshake of the end that has connected; otherwise like `admit`."""
    deadline = time.monotonic() + limit_s
    theirs = _receive_until(connection, _NONCE_BYTES, deadline)
    own = os.urandom(_NONCE_BYTES)
    _send_until(connection, own + proof(key, b"client", theirs, own), deadline)
    claim = _receive_until(connection, _PROOF_BYTES, deadline)
    if not hmac.compare_digest(claim, proof(key, b"server", theirs, own)):
        raise NotProved("the peer does not know the job's key")
    connection.settimeout(None)


def bound(key: bytes, binding: bytes) -> bytes:
    """Returns the key for a handshake over a TLS connection with this binding. So a handshake that is passed on from
    one TLS connection to another proves nothing."""
    return proof(key, b"tls", binding)


def proof(key: bytes, end: bytes, *said: bytes) -> bytes:
    """Returns the proof of an end, which cannot be computed without the key. `end` names the end, so that a proof sent
    back proves nothing. `said`: what both ends have said so far, with a nonce of each; its parts have fixed sizes."""
    return hmac.digest(key, end + b"".join(said), "sha256")


def _receive_until(connection: Connection, size: int, deadline: float) -> bytes:
    """Receive exactly `size` bytes. The deadline is for all of them together, however slowly they come."""
    data = b""
    while len(data) < size:
        _allow_until(connection, deadline)
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError("the peer has gone before it had proved itself")
        data += more
    return data


def _send_until(connection: Connection, data: bytes, deadline: float) -> None:
    _allow_until(connection, deadline)
    connection.sendall(data)


def _allow_until(connection: Connection, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise NotProved("the peer has not proved in time that it knows the job's key")
    connection.settimeout(left)


def send_frame(connection: Connection, *parts: bytes) -> None:
    """Send one frame, to a peer that has proved itself."""
    data = b"".join(parts)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_frame(connection: Connection) -> bytes:
    """Receive the next frame. Raises EOFError when the peer has gone, and NotAsAgreed for a frame that is too large."""
    (size,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    if size > LARGEST_FRAME:
        raise NotAsAgreed(f"a frame claims {size:,} bytes; the most is {LARGEST_FRAME:,}")
    return _receive(connection, size)


def _receive(connection: Connection, size: int) -> bytes:
    """Receives a given number of bytes. Memory is taken as they come: at most twice as much as has come, and a
    piece."""
    data = bytearray()
    came = 0
    while came < size:
        if came == len(data):
            data += bytes(min(size - came, max(came, _PIECE_BYTES)))
        with memoryview(data) as view:
            read = connection.recv_into(view[came:])
        if not read:
            raise EOFError("the peer has gone")
        came += read
    return bytes(data)
