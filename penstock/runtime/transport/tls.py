"""TLS between the processes of a job on different machines, when it is asked for: both ends show a certificate.

A TlsConnection behaves as a non-blocking TCP socket as far as TcpTransport uses one. In particular, it raises
BlockingIOError when nothing can be read or written now. A TlsStream behaves as a blocking one, as far as control
connections use it. Both need their handshake first.

Who has a certificate proves besides that it knows the job's secret, and that its end of the TLS connection is the one
of its peer (`binding`): somebody else with a certificate of the same authority cannot sit between the two.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from penstock.runtime.transport.base import Buffer
from penstock.runtime.transport.certificates import BadCertificate, Credentials, JobCertificate, Tls

logger = logging.getLogger(__name__)

# What one call encrypts at most: a call that was interrupted must be repeated with as many bytes.
_WRITTEN_AT_ONCE = 64 * 1024
_READ_AT_ONCE = 64 * 1024

# X509_V_FLAG_NO_CHECK_TIME. The certificate that a job has made for itself is good for as long as the job, and the
# clocks of the job's machines need not agree.
_AT_ANY_TIME = 0x200000
# X509_V_ERR_*: who has signed a certificate is not known.
_OF_NO_AUTHORITY = (2, 18, 19, 20, 21)
_FOR_SOMETHING_ELSE = 26


class TlsContexts:
    """The contexts of both ends of connections. Safe to use from several threads."""

    def __init__(self, credentials: Credentials) -> None:
        """Raises BadCertificate."""
        self._credentials = credentials
        self._lock = threading.Lock()
        self._read = _versions(credentials)
        self._contexts = _contexts(credentials)

    def connecting(self, connection: socket.socket) -> TlsConnection:
        """Returns the connecting end over a socket that connects."""
        return TlsConnection(connection, self.context(server=False), server=False)

    def accepting(self, connection: socket.socket) -> TlsConnection:
        """Returns the end that was connected to."""
        return TlsConnection(connection, self.context(server=True), server=True)

    def stream(self, connection: socket.socket, *, server: bool) -> TlsStream:
        """Returns one end over a connected socket, for threads that wait."""
        return TlsStream(connection, self.context(server=server), server=server)

    @staticmethod
    def refused(error: Exception) -> bool:
        """Whether an error says that one end does not accept the other one."""
        return isinstance(error, ssl.SSLError)

    @staticmethod
    def said(error: Exception) -> str:
        """Returns the text of an error, for people."""
        return said(error)

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Returns the context of one end. Files that have changed are read again; while they cannot be used, what was
        read before is."""
        with self._lock:
            found = _versions(self._credentials)
            if found != self._read:
                self._read = found
                try:
                    self._contexts = _contexts(self._credentials)
                except BadCertificate as error:
                    logger.warning(
                        "the certificate that was replaced cannot be used, and the last one stays: %s", error
                    )
            return self._contexts[server]


@lru_cache(maxsize=16)
def contexts_of(credentials: Credentials) -> TlsContexts:
    """Returns the contexts for these credentials, of which a process needs one. Raises BadCertificate."""
    return TlsContexts(credentials)


def _versions(credentials: Credentials) -> list[object]:
    """Returns a value that changes when one of the files is replaced."""
    if isinstance(credentials, JobCertificate):
        return []
    found: list[object] = []
    for path in (credentials.certificate, credentials.key, credentials.authority):
        try:
            now = os.stat(path)
            found.append((now.st_ino, now.st_size, now.st_mtime_ns))
        except OSError:
            found.append(None)
    return found


def _contexts(credentials: Credentials) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Returns the contexts of the connecting end and of the other end. Raises BadCertificate."""
    if isinstance(credentials, JobCertificate):
        return _context(credentials, server=False), _context(credentials, server=True)
    for what in ("certificate", "key", "authority"):
        _check_file(what, getattr(credentials, what))
    try:
        client, server = _context(credentials, server=False), _context(credentials, server=True)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise BadCertificate(
                f"the key {_name(credentials.key)} is not that of the certificate {_name(credentials.certificate)}"
            ) from None
        raise BadCertificate(
            f"the certificate {_name(credentials.certificate)}, the key {_name(credentials.key)} and the authority "
            f"{_name(credentials.authority)} cannot be used together: {said(error)}"
        ) from None
    _check_together(credentials, client, server)
    return client, server


def _context(credentials: Credentials, *, server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if server:
        context.num_tickets = 0  # nobody continues a connection
    if isinstance(credentials, JobCertificate):
        with os.fdopen(os.memfd_create("penstock", os.MFD_CLOEXEC), "w") as memory:  # ssl reads keys from files only
            memory.write(credentials.key + credentials.certificate)
            memory.flush()
            context.load_cert_chain(f"/proc/self/fd/{memory.fileno()}")
        context.load_verify_locations(cadata=credentials.certificate)
        context.verify_flags |= _AT_ANY_TIME
    else:
        context.load_cert_chain(credentials.certificate, credentials.key, lambda: _refuse_password(credentials.key))
        context.load_verify_locations(credentials.authority)
    return context


def _check_file(what: str, path: str | os.PathLike[str]) -> None:
    """Raises BadCertificate when a file has nothing of the kind that it is meant to have."""
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError as error:
        raise BadCertificate(f"the {what} {_name(path)} cannot be read: {error.strerror}") from None
    if (b"PRIVATE KEY-----" if what == "key" else b"-----BEGIN CERTIFICATE-----") not in text:
        kind = "private key" if what == "key" else "certificate"
        raise BadCertificate(f"the {what} {_name(path)} contains no {kind} in PEM format")


def _refuse_password(path: str | os.PathLike[str]) -> str:
    raise BadCertificate(f"the key {_name(path)} is encrypted with a password; give one that is not")


def _check_together(tls: Tls, client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """Lets the two ends meet. Raises BadCertificate when they refuse each other, as the job's processes would."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)]
    while ends:
        for end in ends[:]:
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                raise BadCertificate(
                    f"the certificate {_name(tls.certificate)} cannot be used: {_why(tls, error)}"
                ) from None


def _why(tls: Tls, error: ssl.SSLError) -> str:
    code = getattr(error, "verify_code", 0)
    if code in _OF_NO_AUTHORITY:
        return f"the authority {_name(tls.authority)} has not signed it"
    if code == _FOR_SOMETHING_ELSE:
        return "it is not for both ends of connections (extendedKeyUsage = serverAuth, clientAuth)"
    return said(error)


def said(error: Exception) -> str:
    """Returns the text of an error, for people."""
    if isinstance(error, ssl.SSLError):
        text = getattr(error, "verify_message", "") or (error.reason or "").replace("_", " ").lower()
        return f"TLS: {text}" if text else str(error)
    return str(error) or type(error).__name__


def _name(path: str | os.PathLike[str]) -> str:
    return repr(os.fspath(path))


class TlsConnection:
    """See the module's docstring."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, server: bool) -> None:
        self._plain = connection
        self._context = context
        self._server = server
        self._tls: Any = None

    def shake_hands(self) -> int:
        """Goes on with the handshake. Returns the event to wait for, or 0 at its end. Raises OSError."""
        if self._tls is None:  # only a socket that is connected can be wrapped
            self._tls = self._context.wrap_socket(self._plain, server_side=self._server, do_handshake_on_connect=False)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return select.EPOLLIN
        except ssl.SSLWantWriteError:
            return select.EPOLLOUT
        return 0

    @property
    def binding(self) -> bytes:
        """See the module's docstring. Known after the handshake."""
        return _binding(self._tls)

    def fileno(self) -> int:
        """Acts like the method of a socket, as do the methods that follow."""
        return (self._tls or self._plain).fileno()

    def getsockopt(self, level: int, option: int, size: int = 0) -> Any:
        plain = self._tls or self._plain
        return plain.getsockopt(level, option, size) if size else plain.getsockopt(level, option)

    def shutdown(self, how: int) -> None:
        (self._tls or self._plain).shutdown(how)

    def close(self) -> None:
        (self._tls or self._plain).close()

    def send(self, data: Buffer) -> int:
        try:
            return self._tls.send(data[:_WRITTEN_AT_ONCE])  # type: ignore[no-any-return]
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def sendmsg(self, parts: Sequence[Buffer]) -> int:
        return self.send(parts[0])

    def recv(self, size: int) -> bytes:
        data = bytearray(size)
        with memoryview(data) as view:
            got = self.recv_into(view)
        return bytes(data[:got])

    def recv_into(self, view: memoryview) -> int:
        """Reads until the view is full or nothing more has come: the kernel does not know what TLS has decrypted."""
        got = 0
        try:
            while got < len(view):
                more = self._tls.recv_into(view[got:])
                if not more:
                    break
                got += more
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not got:
                raise BlockingIOError from None
        return got


class TlsStream:
    """See the module's docstring. One thread may read while others write. (A socket of the ssl module may not be used
    so: both would work on one state of OpenSSL at the same time. So TLS works in memory here, under a lock under which
    nobody waits.)"""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, server: bool) -> None:
        self._plain = connection
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._came, self._goes, server_side=server)
        self._lock = threading.Lock()  # of the three above
        self._sending = threading.Lock()  # what was encrypted first is sent first

    def shake_hands(self, deadline: float) -> None:
        """Does the handshake. Raises OSError, also at the deadline, or EOFError."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the peer has not said in time who it is")
            self._plain.settimeout(left)
            try:
                self._tls.do_handshake()
                self._send_encrypted()
                return
            except ssl.SSLWantReadError:
                self._send_encrypted()
            except ssl.SSLError:
                self._send_encrypted()  # which tells the peer why
                raise
            data = self._plain.recv(_READ_AT_ONCE)
            if not data:
                raise EOFError("the peer has gone before it had proved itself")
            self._came.write(data)

    @property
    def binding(self) -> bytes:
        """See the module's docstring. Known after the handshake."""
        return _binding(self._tls)

    @property
    def family(self) -> int:
        """As of a socket; so are the methods that follow."""
        return self._plain.family

    def fileno(self) -> int:
        return self._plain.fileno()

    def settimeout(self, limit_s: float | None) -> None:
        self._plain.settimeout(limit_s)

    def shutdown(self, how: int) -> None:
        self._plain.shutdown(how)

    def sendall(self, data: Buffer) -> None:
        with memoryview(data) as view:
            for start in range(0, len(view), _WRITTEN_AT_ONCE):
                self._send_encrypted(view[start : start + _WRITTEN_AT_ONCE])

    def recv(self, size: int) -> bytes:
        data = bytearray(size)
        with memoryview(data) as view:
            got = self.recv_into(view)
        return bytes(data[:got])

    def recv_into(self, view: memoryview) -> int:
        while True:
            with self._lock:
                try:
                    return self._tls.read(len(view), view)  # type: ignore[return-value]
                except ssl.SSLWantReadError:
                    answers = self._goes.pending
                except ssl.SSLZeroReturnError:
                    return 0
            if answers:
                self._send_encrypted()
            data = self._plain.recv(_READ_AT_ONCE)
            if not data:
                return 0
            with self._lock:
                self._came.write(data)

    def _send_encrypted(self, data: Buffer = b"") -> None:
        """Sends TLS's own messages, and data."""
        with self._sending:
            with self._lock:
                while data:  # one call may take a part
                    data = data[self._tls.write(data) :]
                encrypted = self._goes.read()
            if encrypted:
                self._plain.sendall(encrypted)


def _binding(tls: Any) -> bytes:
    found: bytes | None = tls.get_channel_binding("tls-unique")
    assert found, "the handshake is not over"
    return found
