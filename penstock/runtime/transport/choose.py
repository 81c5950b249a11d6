"""Chooses the transport between two machines by the abilities of both (docs/papers.md: W7), and says why.

Each worker finds out what its machine has (`probe`), and tells it as plain data. The choice is a pure function of what
both have, so both ends choose the same, and the status can show the reason.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal

Kind = Literal["rdma", "tcp"]

#: Opening a device takes milliseconds. One that takes so long is in trouble, and is not waited for.
PROBE_LIMIT_S = 2.0


@dataclass(frozen=True)
class Abilities:
    """The devices and limits of a machine for RDMA. All fields are plain, so that they can be sent."""

    #: The device and the port that are used, such as "mlx5_0 port 1"; empty: there is none.
    rdma: str
    #: Why there is none.
    lacks: str = ""
    #: What the port speaks: "RoCE" or "InfiniBand".
    link: str = ""


@dataclass(frozen=True)
class Choice:
    """A transport, and a sentence that says why it was chosen."""

    kind: Kind
    reason: str


def choose(own: Abilities, other: Abilities, *, tls: bool = False) -> Choice:
    """Returns the transport between two machines, the same at both ends. `tls`: what is sent must be encrypted."""
    first, second = sorted((own, other), key=lambda one: (one.rdma, one.lacks))
    lacks = first.lacks or second.lacks
    if tls:
        return Choice("tcp", "TCP with TLS, because TLS was asked for, and RDMA sends in the clear.")
    if not lacks and first.link != second.link:
        lacks = f"{first.rdma} speaks {first.link}, and {second.rdma} {second.link}"
    if not lacks:
        ports = first.rdma if first.rdma == second.rdma else f"{first.rdma} and {second.rdma}"
        return Choice("rdma", f"RDMA, because both machines have an active device ({ports}).")
    return Choice("tcp", f"TCP, because {lacks}.")


def probe(host: str, limit_s: float = PROBE_LIMIT_S) -> Abilities:
    """Finds out the abilities of this machine at the address to which others connect. Never raises, and takes no longer
    than `limit_s`."""
    found: list[Abilities] = []
    # A driver in trouble can block a system call for ever, so that nothing else than leaving the thread behind helps.
    looking = threading.Thread(target=lambda: found.append(_look(host)), name="penstock-probe", daemon=True)
    looking.start()
    looking.join(limit_s)
    return found[0] if found else Abilities("", f"the devices of {host} have not answered within {limit_s:g} s")


def _look(host: str) -> Abilities:
    try:
        from penstock.runtime.transport.rdma import find_port

        port = find_port(host)
    # A driver, or a version of pyverbs that nobody has tried, may raise anything. The job runs over TCP then.
    except Exception as error:
        return Abilities("", f"{host} has no RDMA: {error}")
    return Abilities(f"{port.device} port {port.number}", "", port.link)
