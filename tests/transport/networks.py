"""Workers that are connected by a transport, for the tests that all transports pass.

To add a transport, derive from Network and enter the class in NETWORKS.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from penstock.runtime.transport.base import PeerTransport, Transport
from penstock.runtime.transport.memory import MemoryNetwork
from penstock.runtime.transport.rdma import RdmaTransport
from penstock.runtime.transport.routed import RoutedTransport
from penstock.runtime.transport.shm import ShmTransport
from penstock.runtime.transport.tcp import TcpTransport

#: The number of bytes that an inbox, or the send region of a peer, has in these tests.
INBOX_BYTES = 256 * 1024
#: A test that takes so long hangs.
LIMIT_S = 60.0
#: The address of the device for RDMA. Only guests have one (tests/guests/).
RDMA_HOST = os.environ.get("GUEST_ADDRESS", "")
KEY = b"the secret of one job, 32 bytes."


class End:
    """One worker's end, and what it has received, copied."""

    def __init__(self, transport: Any) -> None:
        self.transport: Any = transport
        self.mail: list[tuple[int, bytes]] = []
        self.asleep = False  # this worker does not receive

    def receive(self) -> None:
        """Takes what there is."""
        self.mail += [(task, bytes(message)) for task, message in self.transport.receive(0)]


class Network:
    """Workers 0 to n-1, each connected to all others."""

    #: Whether a worker can be replaced by its next process.
    replaces = True
    #: Whether a process that was dropped, and lives, can send nothing more.
    refuses_dropped = True
    #: The number of bytes that may be under way to a worker that does not receive.
    most_under_way = 2 * INBOX_BYTES
    #: Whether a message may wait until its sender calls `receive`, as run loops do all the time.
    sender_serves = False

    def __init__(self, workers: int = 2) -> None:
        self.ends = [End(transport) for transport in self.make(workers)]
        self.a, self.b = self.ends[:2]
        self._connect(range(workers))

    def make(self, workers: int) -> Sequence[Transport]:
        """Returns the ends, not connected yet."""
        return [self.make_one(worker) for worker in range(workers)]

    def make_one(self, worker: int) -> Transport:
        """Returns the end of a worker's process, not connected yet."""
        raise NotImplementedError

    def _connect(self, workers: Sequence[int]) -> None:
        addresses = {worker: self.ends[worker].transport.address for worker in workers if self.replaces}
        for own, end in enumerate(self.ends):
            if isinstance(end.transport, PeerTransport):
                end.transport.connect({worker: address for worker, address in addresses.items() if worker != own})

    def replace(self, worker: int, old_ends: bool = True) -> End:
        """Starts the next process of a worker, and connects all to it. Returns the old end, which is closed then."""
        old = self.ends[worker]
        if old_ends:
            old.transport.close()
        for end in self.ends:
            if end is not old:
                end.transport.drop([worker])
        self.ends[worker] = End(self.make_one(worker))
        self.a, self.b = self.ends[:2]
        self._connect(range(len(self.ends)))
        return old

    def until(self, condition: Callable[[], object], what: str, ends: Sequence[End] | None = None) -> None:
        """Lets all ends, or some, receive until the condition holds."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s: {what}"
            for end in self.ends if ends is None else ends:
                if not end.asleep:
                    end.receive()

    def take(self, end: End, count: int) -> list[tuple[int, bytes]]:
        """Returns the messages of an end when it has `count`, and takes them from its mail."""
        self.until(lambda: len(end.mail) >= count, f"{count} messages")
        mail, end.mail = end.mail, []
        return mail

    def send(self, sender: End, worker: int, task: int, parts: Sequence[Any]) -> None:
        """Sends a message, when there is room."""
        self.until(lambda: sender.transport.send(worker, task, parts), "room")

    def wait_for_room(self) -> None:
        """Sends to worker 1, which does not receive, until there is no room. Then worker 0 does nothing but wait, and
        sends one more message when worker 1 receives."""
        self.b.asleep = True
        while self.a.transport.send(1, 0, (b"x" * 1000,)):
            self.a.receive()
        over = threading.Event()

        def take() -> None:
            while not over.is_set():
                self.b.receive()

        thread = threading.Thread(target=take)
        thread.start()
        try:
            while not self.a.transport.send(1, 0, (b"x" * 1000,)):
                begun = time.monotonic()
                assert self.a.transport.receive(LIMIT_S) == []
                assert time.monotonic() - begun < LIMIT_S, "nobody says that there is room"
        finally:
            over.set()
            thread.join()

    def settle(self) -> None:
        """Returns when a message from each worker to each other one has come: all earlier ones have come before."""
        for number, sender in enumerate(self.ends):
            for worker, receiver in enumerate(self.ends):
                if receiver is not sender:
                    self.send(sender, worker, 0xFFFF, (b"settle", bytes([number])))
        for worker, receiver in enumerate(self.ends):
            for number in range(len(self.ends)):
                if number != worker:
                    last = (0xFFFF, b"settle" + bytes([number]))
                    self.until(lambda last=last, mail=receiver.mail: last in mail, "the last message")
                    receiver.mail.remove(last)

    def close(self) -> None:
        """Closes all ends."""
        for end in self.ends:
            end.transport.close()


class Memory(Network):
    replaces = False

    def make(self, workers: int) -> Sequence[Transport]:
        network = MemoryNetwork(workers, INBOX_BYTES)
        return [network.transport(worker) for worker in range(workers)]


class SharedMemory(Network):
    refuses_dropped = False

    def make_one(self, worker: int) -> Transport:
        return ShmTransport(worker, INBOX_BYTES)


class Tcp(Network):
    # The kernel's buffers of a connection hold some megabytes.
    most_under_way = 64 * 1024 * 1024

    def make_one(self, worker: int) -> Transport:
        return TcpTransport(worker, KEY, "127.0.0.1", region_bytes=INBOX_BYTES)


class Routed(Tcp):
    """Workers with even numbers are on one machine, the others on another one."""

    refuses_dropped = False

    def make_one(self, worker: int) -> Transport:
        tcp = TcpTransport(worker, KEY, "127.0.0.1", region_bytes=INBOX_BYTES)
        return RoutedTransport(ShmTransport(worker, INBOX_BYTES), {"tcp": tcp}, f"machine {worker % 2}")


class Rdma(Network):
    sender_serves = True

    def make_one(self, worker: int) -> Transport:
        return RdmaTransport(worker, KEY, RDMA_HOST, region_bytes=INBOX_BYTES)


NETWORKS: dict[str, type[Network]] = {"memory": Memory, "shm": SharedMemory, "tcp": Tcp, "routed": Routed}
if RDMA_HOST:  # a guest has no native core
    NETWORKS = {"rdma": Rdma}
