"""How the processes of a job reach each other: shared memory on one machine, a network between machines."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

from penstock.runtime.errors import OptionError, PenstockError, shorten
from penstock.runtime.units import any_seconds

if TYPE_CHECKING:  # the command's --help needs no sockets and no rings
    from datetime import timedelta

    from penstock.runtime.transport.base import NetworkTransport, PeerTransport
    from penstock.runtime.transport.certificates import Credentials, JobCertificate, Tls
    from penstock.runtime.transport.endpoint import Ports

logger = logging.getLogger(__name__)

#: What carries messages between machines. "auto": the best that both have.
TransportName = Literal["auto", "tcp", "rdma"]
TRANSPORTS: tuple[TransportName, ...] = get_args(TransportName)

#: The silence after which a node is lost, by default. Ray itself declares a node that it cannot reach dead after about
#: the same time.
NODE_TIMEOUT_S = 5.0
# Four heartbeats: a machine that is only a little late must not be taken for lost. The most is longer than any cut of
# a network that a job should sit through.
_NODE_TIMEOUT_LEAST_S = 1.0
_NODE_TIMEOUT_MOST_S = 600.0

_PORT_MAX = 65_535
_SECRET_BYTES = 32


class NoTransport(PenstockError):
    """A machine does not have the transport that was asked for."""


@dataclass(frozen=True)
class Network:
    """How the processes of a job reach each other over a network.

    `transport`: what carries messages between machines. When it is named, and not "auto", workers of one machine use it
    too, in place of shared memory. `first_port`, `last_port`: the ports at which processes may listen (0: any).
    `node_timeout_s`: the silence after which a node is lost. `tls`: whether what goes over the network is encrypted, or
    by which certificates of the user. `secret`: by which the workers of a job know each other. `certificate`: what the
    job has made for itself when it encrypts without certificates of the user. Both are missing in the options of a job,
    which are saved in the job's store.
    """

    transport: TransportName = "auto"
    first_port: int = 0
    last_port: int = 0
    node_timeout_s: float = NODE_TIMEOUT_S
    tls: bool | Tls = False
    secret: bytes = field(default=b"", repr=False)
    certificate: JobCertificate | None = field(default=None, repr=False)

    def ports(self, host: str) -> Ports:
        """Returns where a process of the machine with this address may listen."""
        from penstock.runtime.transport.endpoint import Ports

        return Ports(host, self.first_port, self.last_port, self.credentials)

    def secured(self) -> Network:
        """Returns the same with a new secret, for the process that starts the workers of a job, and with a new
        certificate when the job needs one of its own. Raises BadCertificate, also for certificates of the user."""
        made = replace(self, secret=os.urandom(_SECRET_BYTES))
        if not self.tls:
            return made
        from penstock.runtime.transport.certificates import JobCertificate
        from penstock.runtime.transport.tls import contexts_of

        made = replace(made, certificate=JobCertificate.make() if self.tls is True else None)
        assert made.credentials is not None
        contexts_of(made.credentials)
        return made

    @property
    def credentials(self) -> Credentials | None:
        """The credentials that the processes of the job show each other; None: nothing is encrypted."""
        if not self.tls:
            return None
        found = self.certificate if self.tls is True else self.tls
        if found is None:
            raise ValueError("a network has no certificate before it is secured")
        return found

    @property
    def everywhere(self) -> bool:
        """Whether workers of one machine use the transport too."""
        return self.transport != "auto"


def make_transport(
    worker: int,
    ring_bytes: int | None,
    at_least: int,
    network: Network | None,
    host: str,
    *,
    keeps_size: bool = False,
) -> PeerTransport:
    """Returns the transport of a worker or a relay. `ring_bytes`, `at_least` and `keeps_size`: see ShmTransport.
    `network`: None when all workers share memory. `host`: the numeric address of this machine."""
    from penstock.runtime.transport.shm import ShmTransport

    if network is None:
        return ShmTransport(worker, ring_bytes, at_least=at_least)
    from penstock.runtime.transport.choose import Abilities, Kind, probe  # most jobs do not span machines
    from penstock.runtime.transport.tcp import TcpTransport
    from penstock.runtime.transport.tls import contexts_of

    ports = network.first_port, network.last_port
    credentials = network.credentials
    if credentials is not None and network.transport == "rdma":
        raise NoTransport('transport="rdma" was given with TLS, but RDMA sends in the clear')
    tls = None if credentials is None else contexts_of(credentials)
    abilities = probe(host) if network.transport != "tcp" and tls is None else None
    if network.transport == "rdma" and abilities is not None and not abilities.rdma:
        raise NoTransport(f'transport="rdma" was given, but {abilities.lacks}. docs/rdma.md says what RDMA needs')
    networks: dict[Kind, NetworkTransport] = {}
    if abilities is not None and abilities.rdma:
        from penstock.runtime.transport.rdma import RdmaTransport

        try:
            networks["rdma"] = RdmaTransport(worker, network.secret, host, ports)
        except Exception as error:  # a driver may raise anything
            if network.transport == "rdma":
                raise
            logger.warning("worker %d uses TCP, because RDMA could not be opened: %s", worker, error)
            abilities = Abilities("", f"RDMA could not be opened at {host}: {error}")
    if network.transport == "rdma":
        return networks["rdma"]
    networks["tcp"] = TcpTransport(worker, network.secret, host, ports, tls=tls)
    if network.everywhere:
        return networks["tcp"]
    from penstock.host.process.machine import machine_id
    from penstock.runtime.transport.routed import RoutedTransport

    near = ShmTransport(worker, ring_bytes, at_least=at_least, keeps_size=keeps_size)
    return RoutedTransport(near, networks, machine_id(), abilities, tls=tls is not None)


def checked_tls(given: object, transport: TransportName) -> bool | Tls:
    """Returns the value that a user has given as `tls`, with absolute paths. Raises OptionError, also when this machine
    cannot use the files."""
    if isinstance(given, bool):
        found: bool | Tls = given
    else:
        found = _certificates(given)
    if found and transport == "rdma":
        raise OptionError(
            "{transport=} sends in the clear, and {tls} asks for encryption; leave out one of the two",
            {"transport": transport},
        )
    return found


def _certificates(given: object) -> Tls:
    from penstock.runtime.transport.certificates import BadCertificate, Tls

    if not isinstance(given, Tls):
        raise OptionError(
            "{tls=}; it must be True, False or penstock.Tls(certificate=, key=, authority=)", {"tls": given}
        )
    paths = {"certificate": given.certificate, "key": given.key, "authority": given.authority}
    for name, path in paths.items():
        if not isinstance(path, str | os.PathLike):
            raise OptionError("{tls}: {name}={path}; it must be the path of a file", name=name, path=shorten(path))
    found = Tls(**{name: os.path.abspath(path) for name, path in paths.items()})
    from penstock.runtime.transport.tls import TlsContexts

    try:
        TlsContexts(found)
    except BadCertificate as error:
        raise OptionError("{tls}: {problem}", problem=error) from None
    return found


def checked_node_timeout(given: float | timedelta) -> float:
    """Returns the silence in seconds after which a node is lost, as a user has given it. Raises FlowError."""
    found = any_seconds(given, "node_timeout_s")
    if not _NODE_TIMEOUT_LEAST_S <= found <= _NODE_TIMEOUT_MOST_S:
        raise OptionError(
            "{node_timeout_s=}; it must be {least:g} to {most:g} seconds: heartbeats come four times a second, and "
            "with less a machine that is just late would be lost; with more the job would stand still for long after "
            "a machine is gone",
            {"node_timeout_s": given},
            least=_NODE_TIMEOUT_LEAST_S,
            most=_NODE_TIMEOUT_MOST_S,
        )
    return found


def checked_ports(given: object) -> tuple[int, int]:
    """Returns the range of ports that a user has given as (first, last); None: any ports. Raises OptionError."""
    if given is None:
        return 0, 0
    ports = tuple(given) if isinstance(given, tuple | list) else ()
    if (
        len(ports) != 2
        or not all(isinstance(port, int) and not isinstance(port, bool) for port in ports)
        or not 1 <= ports[0] <= ports[1] <= _PORT_MAX
    ):
        raise OptionError(
            "{ports=}; it must be the first and the last port at which processes of the job may listen, such as "
            "(20000, 20999), from 1 to 65535",
            {"ports": given},
        )
    return ports[0], ports[1]
