"""The transport of a worker in a job that spans several machines: shared memory to the workers of its own machine, and
to each other worker the best that both machines have (docs/papers.md: T1, W7).

The run loop sleeps in the ring, where the messages of its own machine arrive. So a thread waits for the networks in its
place, and wakes the ring. The run loop *arms* the thread before it sleeps, and while it does not sleep it looks at the
networks itself. A message must never wait for a run loop that sleeps.
"""

from __future__ import annotations

import json
import os
import select
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from penstock.runtime.transport.base import Buffer, LinkLoad, NetworkTransport, PeerTransport, SilentLink
from penstock.runtime.transport.choose import Abilities, Kind, choose
from penstock.runtime.transport.hop_meter import HopMeter, Step
from penstock.runtime.transport.shm import ShmTransport

_SHARED = "Shared memory, because both workers run on one machine."
_NO_RDMA = Abilities("", "nobody has looked for RDMA")


@dataclass(frozen=True)
class WorkerPlace:
    """Where a worker is, as its address says: the id of its machine, the address of each of its transports, and what
    its machine has for RDMA."""

    machine: str
    memory: str
    networks: dict[Kind, str]
    abilities: Abilities

    @classmethod
    def of(cls, address: str) -> WorkerPlace:
        """Returns the place that an address names."""
        found = json.loads(address)
        return cls(found["machine"], found["memory"], found["networks"], Abilities(**found["abilities"]))

    @property
    def address(self) -> str:
        """The address that names this place."""
        return json.dumps(asdict(self))


class RoutedTransport(PeerTransport):
    """The end of one worker; see the module's docstring. `machine`: the id of the worker's machine. `abilities`: what
    it has for RDMA. `networks`: the transports to other machines, by kind; TCP is always among them. `tls`: whether
    they encrypt."""

    def __init__(
        self,
        near: ShmTransport,
        networks: Mapping[Kind, NetworkTransport],
        machine: str,
        abilities: Abilities | None = None,
        *,
        tls: bool = False,
    ) -> None:
        self.meter: HopMeter = HopMeter()
        self._near = near
        self._networks = dict(networks)
        self._far = list(networks.values())
        self._machine = machine
        self._abilities = abilities or _NO_RDMA
        self._tls = tls
        self._by_worker: dict[int, PeerTransport] = {}
        self._reasons: dict[int, str] = {}
        self.target_message = self._target()
        self._near_target = near.target_message
        self._armed = False
        # Nothing had come over a network when the run loop awoke, so that the next pass need not ask the networks.
        self._quiet = False
        self._closed = False
        self._end = os.eventfd(0, os.EFD_CLOEXEC)  # readable when the thread is to end
        self._epoll = select.epoll()
        self._epoll.register(self._end, select.EPOLLIN)
        for far in self._far:
            self._epoll.register(far.fileno(), 0)
        self._bell = threading.Thread(target=self._watch, name="penstock-bell", daemon=True)
        self._bell.start()

    @property
    def address(self) -> str:
        """See PeerTransport, also for the methods that follow."""
        networks = {kind: far.address for kind, far in self._networks.items()}
        return WorkerPlace(self._machine, self._near.address, networks, self._abilities).address

    @property
    def ring_bytes(self) -> int:
        return self._near.ring_bytes

    def connect(self, addresses: Mapping[int, str]) -> None:
        for worker, address in addresses.items():
            if worker in self._by_worker:
                continue
            place = WorkerPlace.of(address)
            if place.machine == self._machine:
                self._near.connect({worker: place.memory})
                self._by_worker[worker] = self._near
                self._reasons[worker] = _SHARED
                continue
            choice = choose(self._abilities, place.abilities, tls=self._tls)
            far = self._networks[choice.kind]
            far.connect({worker: place.networks[choice.kind]})
            self._by_worker[worker] = far
            self._reasons[worker] = choice.reason

    def reasons(self) -> dict[int, str]:
        """See PeerTransport."""
        return dict(self._reasons)

    def sent_bytes(self) -> dict[int, int]:
        """See PeerTransport."""
        return {peer: sent for far in self._far for peer, sent in far.sent_bytes().items() if sent}

    def links(self) -> dict[int, LinkLoad]:
        return {peer: load for far in self._far for peer, load in far.links().items()}

    def silent_links(self) -> list[SilentLink]:
        return [link for far in self._far for link in far.silent_links()]

    def drop(self, workers: Iterable[int]) -> dict[int, int]:
        gone = list(workers)
        sizes: dict[int, int] = {}
        for transport in (*self._far, self._near):
            sizes |= transport.drop(gone)
        for worker in gone:
            self._by_worker.pop(worker, None)
            self._reasons.pop(worker, None)
        return sizes

    def forget(self, peers: Iterable[int]) -> None:
        gone = list(peers)
        self.drop(gone)
        for transport in (*self._far, self._near):
            transport.forget(gone)

    def max_message(self, worker: int) -> int:
        return self._by_worker.get(worker, self._near).max_message(worker)

    def largest_message(self, worker: int) -> int:
        return self._by_worker.get(worker, self._near).largest_message(worker)

    def remedy(self, size: int) -> str:
        return self._near.remedy(size)

    def leave(self) -> bool:
        left = [transport.leave() for transport in (self._near, *self._far)]
        return all(left)

    def send(self, worker: int, task: int, parts: Sequence[Buffer]) -> bool:
        transport = self._by_worker.get(worker)
        if transport is None:
            return False
        step: Step = "send near" if transport is self._near else "send far"
        meter = self.meter
        if not meter.due(step):
            return transport.send(worker, task, parts)
        begun_ns = meter.clock()
        sent = transport.send(worker, task, parts)
        if sent:
            meter.note(step, 1, sum(map(len, parts)), begun_ns)
        return sent

    def receive(self, timeout: float | None) -> Sequence[tuple[int, Buffer]]:
        if self._quiet:
            self._quiet = False
            if timeout == 0:
                return self._near.receive(0)
        meter = self.meter if self.meter.due("receive") else None
        begun_ns = 0 if meter is None else meter.clock()
        far = self._receive_far()
        sleeps = not far and timeout != 0
        if meter is not None:
            if far or any(transport.worked for transport in self._far):
                meter.note("receive far", len(far), sum(len(message) for _, message in far), begun_ns)
            begun_ns = meter.clock()
        near = self._sleep(timeout) if sleeps else self._near.receive(0)
        if meter is not None and near:
            meter.note("receive near", len(near), sum(len(message) for _, message in near), begun_ns)
        if sleeps and not self._quiet:
            far = self._receive_far()
        return [*far, *near] if far and near else far or near

    def _sleep(self, timeout: float | None) -> Sequence[tuple[int, Buffer]]:
        """Receives messages of this machine, until a network rings. Sets `_quiet`."""
        if not self._armed:
            self._arm()
        near = self._near.receive(timeout)
        if self._near.target_message != self._near_target:
            self._near_target = self._near.target_message
            self.target_message = self._target()
        self._quiet = self._armed
        return near

    def _arm(self) -> None:
        self._armed = True
        for transport in self._far:
            # A descriptor that is readable already rings at once.
            self._epoll.modify(transport.fileno(), select.EPOLLIN | select.EPOLLONESHOT)

    def _target(self) -> int:
        return min(transport.target_message for transport in (self._near, *self._far))

    def _receive_far(self) -> Sequence[tuple[int, Buffer]]:
        if len(self._far) == 1:
            return self._far[0].receive(0)
        return [message for transport in self._far for message in transport.receive(0)]

    def wake(self) -> None:
        self._near.wake()

    def excuse(self, pid: int) -> None:
        self._near.excuse(pid)

    def lost(self) -> list[str]:
        return [what for transport in (self._near, *self._far) for what in transport.lost()]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._end, 1)
        self._bell.join()
        self._epoll.close()
        os.close(self._end)
        for transport in (*self._far, self._near):
            transport.close()

    def _watch(self) -> None:
        while not self._closed:
            self._epoll.poll()
            self._armed = False
            self._near.wake()
