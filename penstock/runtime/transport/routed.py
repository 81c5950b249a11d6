"""The transport of a worker in a job that spans several machines: shared memory to the workers of its own machine, and
a network to all others (docs/papers.md: T1, W7).

The run loop sleeps in the ring, where the messages of its own machine arrive. So a thread waits for the network in its
place, and wakes the ring. The run loop *arms* the thread before it sleeps, and while it does not sleep it looks at the
network itself. A message must never wait for a run loop that sleeps.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterable, Mapping, Sequence

from penstock.runtime.transport.base import Buffer, NetworkTransport, PeerTransport
from penstock.runtime.transport.shm import ShmTransport


class RoutedTransport(PeerTransport):
    """The end of one worker; see the module's docstring. `machine`: the id of the worker's machine."""

    def __init__(self, near: ShmTransport, far: NetworkTransport, machine: str) -> None:
        self._near = near
        self._far = far
        self._machine = machine
        self._by_worker: dict[int, PeerTransport] = {}
        self.target_message = min(near.target_message, far.target_message)
        self._armed = False
        self._closed = False
        self._end = os.eventfd(0, os.EFD_CLOEXEC)  # readable when the thread is to end
        self._epoll = select.epoll()
        self._epoll.register(self._end, select.EPOLLIN)
        self._epoll.register(far.fileno(), 0)
        self._bell = threading.Thread(target=self._watch, name="penstock-bell", daemon=True)
        self._bell.start()

    @property
    def address(self) -> str:
        """See PeerTransport, also for the methods that follow."""
        return f"{self._machine} {self._near.address} {self._far.address}"

    @property
    def ring_bytes(self) -> int:
        return self._near.ring_bytes

    def connect(self, addresses: Mapping[int, str]) -> None:
        near: dict[int, str] = {}
        far: dict[int, str] = {}
        for worker, address in addresses.items():
            machine, in_memory, at_port = address.split(" ")
            here = machine == self._machine
            (near if here else far)[worker] = in_memory if here else at_port
            self._by_worker[worker] = self._near if here else self._far
        self._near.connect(near)
        self._far.connect(far)

    def drop(self, workers: Iterable[int]) -> dict[int, int]:
        gone = list(workers)
        for worker in gone:
            self._by_worker.pop(worker, None)
        return {**self._far.drop(gone), **self._near.drop(gone)}

    def max_message(self, worker: int) -> int:
        return self._by_worker.get(worker, self._near).max_message(worker)

    def largest_message(self, worker: int) -> int:
        return self._by_worker.get(worker, self._near).largest_message(worker)

    def remedy(self, size: int) -> str:
        return self._near.remedy(size)

    def leave(self) -> bool:
        near, far = self._near.leave(), self._far.leave()
        return near and far

    def send(self, worker: int, task: int, parts: Sequence[Buffer]) -> bool:
        transport = self._by_worker.get(worker)
        return transport is not None and transport.send(worker, task, parts)

    def receive(self, timeout: float | None) -> Sequence[tuple[int, Buffer]]:
        far = self._far.receive(0)
        if far or timeout == 0:
            near = self._near.receive(0)
            return [*far, *near] if far and near else far or near
        if not self._armed:
            self._armed = True
            # A descriptor that is readable already rings at once.
            self._epoll.modify(self._far.fileno(), select.EPOLLIN | select.EPOLLONESHOT)
        near = self._near.receive(timeout)
        self.target_message = min(self._near.target_message, self._far.target_message)
        if self._armed:
            return near
        far = self._far.receive(0)
        return [*far, *near] if far and near else far or near

    def wake(self) -> None:
        self._near.wake()

    def lost(self) -> list[str]:
        return self._near.lost() + self._far.lost()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._end, 1)
        self._bell.join()
        self._epoll.close()
        os.close(self._end)
        self._far.close()
        self._near.close()

    def _watch(self) -> None:
        while not self._closed:
            self._epoll.poll()
            self._armed = False
            self._near.wake()
