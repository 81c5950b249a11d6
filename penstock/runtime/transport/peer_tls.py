"""TLS between the workers of different machines, when it is asked for: both ends show a certificate.

A TlsConnection behaves as a non-blocking TCP socket as far as TcpTransport uses one. In particular, it raises
BlockingIOError when nothing can be read or written now.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.runtime.transport.base import Buffer

# What one call encrypts at most: a call that was interrupted must be repeated with as many bytes.
_WRITTEN_AT_ONCE = 64 * 1024


@dataclass(frozen=True)
class PeerTls:
    """The contexts of the connecting end and of the end that was connected to."""

    client: ssl.SSLContext
    server: ssl.SSLContext

    @classmethod
    def from_files(cls, certificate: str, key: str, authority: str) -> PeerTls:
        """Both ends show this certificate, and accept those that the authority has signed. The names in certificates do
        not matter, because each process proves besides that it is the one that is meant."""
        contexts = []
        for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
            context = ssl.SSLContext(protocol)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(certificate, key)
            context.load_verify_locations(authority)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            contexts.append(context)
        return cls(*contexts)

    def connecting(self, connection: socket.socket, host: str) -> TlsConnection:
        """Returns the connecting end over a socket that connects."""
        return TlsConnection(connection, self.client, host if self.client.check_hostname else None)

    def accepting(self, connection: socket.socket) -> TlsConnection:
        """Returns the other end."""
        return TlsConnection(connection, self.server, None, server=True)


class TlsConnection:
    """See the module's docstring. The handshake is to be done first."""

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext, host: str | None, *, server: bool = False
    ) -> None:
        self._plain = connection
        self._context = context
        self._host = host
        self._server = server
        self._tls: Any = None

    def shake_hands(self) -> int:
        """Goes on with the handshake. Returns the event to wait for, or 0 at its end. Raises OSError."""
        if self._tls is None:  # only a socket that is connected can be wrapped
            self._tls = self._context.wrap_socket(
                self._plain, server_side=self._server, server_hostname=self._host, do_handshake_on_connect=False
            )
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return select.EPOLLIN
        except ssl.SSLWantWriteError:
            return select.EPOLLOUT
        return 0

    def fileno(self) -> int:
        """As the method of a socket; so are those that follow."""
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
