"""A relay of a job as a Ray actor (docs/papers.md: W2). The JobMaster owns it, so Ray ends it when the JobMaster dies.

Which relays there are, and what becomes of one that has died, is decided in host/decide/relay_keeper.py.
"""

from __future__ import annotations

from typing import Any

import ray

from penstock.actors.raylet import end_with_raylet
from penstock.host.process.network import Network
from penstock.host.process.node_agent import leave_process
from penstock.host.process.relay_process import RelayProcess


class Relay:
    """The Ray actor around a RelayProcess. Its loop is in the actor's main thread, as that of a worker is."""

    def __init__(self) -> None:
        end_with_raylet()
        self._process = RelayProcess(leave_process)

    def prepare(self, number: int, job: str, network: Network, ring_bytes: int | None) -> dict[str, Any]:
        """See RelayProcess, also for the method that follows."""
        node = ray.get_runtime_context().get_node_id()
        return self._process.prepare(number, job, network, ring_bytes, ray.util.get_node_ip_address(), node)

    def run(self) -> None:
        self._process.run()
