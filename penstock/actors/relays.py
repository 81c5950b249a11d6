"""The relays of a job as Ray actors (docs/papers.md: W2). The JobMaster owns them, so Ray ends them when it dies.

Which relays there are, and what becomes of one that has died, is decided in host/decide/relay_keeper.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import ray

from penstock.actors.ray_actor import RayActor, on_node
from penstock.actors.raylet import end_with_raylet
from penstock.host.process.network import Network
from penstock.host.process.node_agent import leave_process
from penstock.host.process.relay_process import RelayProcess
from penstock.host.process.watched_process import WatchedProcess


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


class RayRelays:
    """Starts the relays of a job, and ends them. `watched`: returns who looks after a process that has said this of
    itself, before a deadline. `node_name`: see RelayStarter. Safe to use from several threads."""

    def __init__(
        self,
        job: str,
        network: Network,
        ring_bytes: int | None,
        watched: Callable[[dict[str, Any], float], WatchedProcess],
        node_name: Callable[[str], str],
    ) -> None:
        self._job = job
        self._network = network
        self._ring_bytes = ring_bytes
        self._watched = watched
        self.node_name = node_name
        self._lock = threading.Lock()
        self._closed = False
        self._actors: dict[int, Any] = {}
        self._ready: dict[int, RayActor] = {}

    def start_relay(self, number: int, node_id: str, deadline: float) -> RayActor:
        actor = on_node(Relay, node_id).remote()
        with self._lock:
            self._actors[number] = actor
            closed = self._closed
        try:
            if closed:
                raise RuntimeError("the job has ended")
            prepared = actor.prepare.remote(number, self._job, self._network, self._ring_bytes)
            info = ray.get(prepared, timeout=max(0.0, deadline - time.monotonic()))
            handle = _RayRelay(actor, info, self._watched(info, deadline), lambda: self._forget(number))
        except Exception:
            self._forget(number)
            ray.kill(actor)
            raise
        with self._lock:
            self._ready[number] = handle
        return handle

    def lose(self, node_id: str, reason: str) -> None:
        """Takes all relays of a node for dead."""
        with self._lock:
            lost = [handle for handle in self._ready.values() if handle.info["node_id"] == node_id]
        for handle in lost:
            handle.lose(reason)

    def kill_all(self) -> None:
        """Kills all relays, without Ray."""
        with self._lock:
            handles = list(self._ready.values())
        for handle in handles:
            handle.process.kill()

    def close(self) -> None:
        """Ends all relays. One that is stopped must have been killed before, as Ray waits for it in vain."""
        with self._lock:
            self._closed = True
            actors, self._actors = list(self._actors.values()), {}
        for actor in actors:
            ray.kill(actor)

    def _forget(self, number: int) -> None:
        with self._lock:
            self._actors.pop(number, None)
            self._ready.pop(number, None)


class _RayRelay(RayActor):
    """A relay that is ready. `killed` is called when it is to end."""

    def __init__(self, actor: Any, info: dict[str, Any], process: WatchedProcess, killed: Callable[[], None]) -> None:
        super().__init__(actor, info, process)
        self._killed = killed

    def kill(self) -> None:
        self._killed()
        super().kill()
        ray.kill(self._actor)  # the process may have returned from its loop, and live
