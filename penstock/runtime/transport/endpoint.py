"""Where a control server listens: an abstract Unix socket of this machine, or a TCP port for the machines of a job.

An abstract Unix socket has no file, so nothing is left of it, however its process ends. A TCP port is opened at one
numeric address of this machine, never at all of them. A TCP connection whose peer has gone without a word, because its
machine has died or was cut off, ends within seconds: then its user connects again.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.runtime.errors import PenstockError

if TYPE_CHECKING:
    from penstock.runtime.transport.certificates import Credentials

_TCP = "tcp://"
# A process that is stopped for a minute gets some connections a second from each peer: as long as they find room here,
# its machine does not look like one that is cut off.
_BACKLOG = 1024

# An idle connection is probed after this time, and then in this interval. It ends when as many probes, or the bytes
# that were sent, have had no answer for _SILENT_S.
_PROBE_S = 1
_SILENT_S = 3
_CONNECT_S = 1.0


class NoPort(PenstockError):
    """No port of the given range is free."""


@dataclass(frozen=True)
class Ports:
    """Where a process may listen for other machines: at this numeric address, at a free port from `first` to `last`
    (0: at any free port). `tls`: by what its connections are encrypted; None: they are not."""

    host: str
    first: int = 0
    last: int = 0
    tls: Credentials | None = None


def listen(ports: Ports | None) -> tuple[socket.socket, str]:
    """Returns a socket that listens, and the address for `connect`. None: only processes of this machine connect.
    Raises NoPort."""
    if ports is None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address = f"\0penstock-{os.getpid()}-{os.urandom(8).hex()}"
        listener.bind(address)
    else:
        listener = _bound(ports)
        address = tcp_address(*listener.getsockname()[:2])
    listener.listen(_BACKLOG)
    return listener, address


def new_socket(address: str) -> socket.socket:
    """Returns a socket that can be connected to this address."""
    if not address.startswith(_TCP):
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    host, _ = host_and_port(address)
    connection = socket.socket(family(host), socket.SOCK_STREAM)
    notice_silence(connection)
    return connection


def connect(connection: socket.socket, address: str) -> None:
    """Connects a socket of `new_socket` to its address, within its time limit and about a second. Raises OSError."""
    if not address.startswith(_TCP):
        connection.connect(address)
        return
    limit = connection.gettimeout()
    # The kernel asks a silent machine again after ever longer times. A caller who tries again soon is quicker.
    connection.settimeout(_CONNECT_S if limit is None else min(limit, _CONNECT_S))
    connection.connect(host_and_port(address))
    connection.settimeout(limit)


def notice_silence(connection: socket.socket) -> None:
    """Lets a TCP connection send at once, and end soon when its peer is silent. Does nothing to other sockets."""
    if connection.family == socket.AF_UNIX:
        return
    send_at_once(connection, _SILENT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENT_S)


def send_at_once(connection: socket.socket, probes: int) -> None:
    """Lets a TCP connection send at once. The kernel probes it every second while it is idle, and ends it after so many
    probes without an answer."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)


def tcp_address(host: str, port: int) -> str:
    """Returns the address of a TCP port."""
    return f"{_TCP}[{host}]:{port}" if ":" in host else f"{_TCP}{host}:{port}"


def host_and_port(address: str) -> tuple[str, int]:
    """Returns the numeric host and the port of an address of `tcp_address`."""
    host, _, port = address.removeprefix(_TCP).rpartition(":")
    return host.strip("[]"), int(port)


def family(host: str) -> socket.AddressFamily:
    """Returns the family of sockets for a numeric address."""
    return socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET


def _bound(ports: Ports) -> socket.socket:
    """Returns a socket that is bound to a free port of the range. Ports are tried in a random order, because the
    processes of a job look for ports at the same time."""
    numbers = list(range(ports.first, ports.last + 1)) if ports.first else [0]
    random.SystemRandom().shuffle(numbers)
    for number in numbers:
        listener = socket.socket(family(ports.host), socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((ports.host, number))
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return listener
    raise NoPort(
        f"all ports from {ports.first} to {ports.last} of {ports.host} are in use; a job needs two ports for each of "
        "its workers on a machine, and three more for each machine: give a wider range"
    )
