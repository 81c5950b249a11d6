"""How the processes of a job reach each other: shared memory on one machine, a network between machines."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

from penstock.runtime.errors import OptionError, PenstockError

if TYPE_CHECKING:  # the command's --help needs no sockets and no rings
    from penstock.runtime.transport.base import NetworkTransport, PeerTransport
    from penstock.runtime.transport.endpoint import Ports

logger = logging.getLogger(__name__)

#: What carries messages between machines. "auto": the best that both have.
TransportName = Literal["auto", "tcp", "rdma"]
TRANSPORTS: tuple[TransportName, ...] = get_args(TransportName)

#: The silence after which a node is lost, by default. Ray itself declares a node that it cannot reach dead after about
#: the same time.
NODE_TIMEOUT_S = 5.0

_PORT_MAX = 65_535
_SECRET_BYTES = 32


class NoTransport(PenstockError):
    """A machine does not have the transport that was asked for."""


@dataclass(frozen=True)
class Network:
    """How the processes of a job reach each other over a network.

    `transport`: what carries messages between machines. When it is named, and not "auto", workers of one machine use it
    too, in place of shared memory. `first_port`, `last_port`: the ports at which processes may listen (0: any).
    `node_timeout_s`: the silence after which a node is lost. `secret`: by which the workers of a job know each other.
    It is empty in the options of a job, which are saved in the job's store.
    """

    transport: TransportName = "auto"
    first_port: int = 0
    last_port: int = 0
    node_timeout_s: float = NODE_TIMEOUT_S
    secret: bytes = field(default=b"", repr=False)

    def ports(self, host: str) -> Ports:
        """Returns where a process of the machine with this address may listen."""
        from penstock.runtime.transport.endpoint import Ports

        return Ports(host, self.first_port, self.last_port)

    def secured(self) -> Network:
        """Returns the same with a new secret, for whoever starts the workers of a job."""
        return replace(self, secret=os.urandom(_SECRET_BYTES))

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

    ports = network.first_port, network.last_port
    abilities = probe(host) if network.transport != "tcp" else None
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
    networks["tcp"] = TcpTransport(worker, network.secret, host, ports)
    if network.everywhere:
        return networks["tcp"]
    from penstock.runtime.host.machine import machine_id
    from penstock.runtime.transport.routed import RoutedTransport

    assert abilities is not None
    near = ShmTransport(worker, ring_bytes, at_least=at_least, keeps_size=keeps_size)
    return RoutedTransport(near, networks, machine_id(), abilities)


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
