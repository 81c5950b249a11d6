"""Between the workers of one node: each worker's inbox is an OSRBuffer ring, written by all the others (PAPERS T1-T8).

A message is copied once, by its sender into the ring; small ones are copied out, large ones are decoded in place.

A ring works best at 50 to 100 times the message size (T8). Messages are made small enough for the ring where records
allow it; where single records are larger, the inbox *moves* to a larger ring: its owner makes one and sends each peer
the address; a peer's last message in the old ring says so, and from then on it writes to the new one, which the owner
reads when it has the last message of every peer. So order is kept and nothing waits but for room.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from penstock.runtime.ring import Message, Producer, Ring, RingClosed, RingGone, RingNoSpace, Wait, recommended_capacity
from penstock.runtime.transport.base import Buffer, PeerGone, Transport

logger = logging.getLogger(__name__)

#: T8: messages aim at this share of the ring.
MESSAGES_PER_RING = 64

#: The paper's size; 64 messages of 32 KiB.
RING_BYTES = 2 * 1024 * 1024

# "Task" numbers of the transport's own messages.
_MOVED = 0xFFFF_FFFE  # payload: sender's worker index, then the address of its new ring
_LAST = 0xFFFF_FFFF  # nothing more comes from this sender by this ring

_DRAIN_MESSAGES = 256
# Between two looks at the message size: receives that brought something. A large message counts for more: where they
# come slowly, and several at once, one that is larger yet should not come before the ring has grown.
_LOOK_EVERY = 512
_LARGE_COUNTS = 8


class ShmTransport(Transport):
    """One worker's end: its own ring, and a producer on the ring of each peer.

    `ring_bytes` None: the paper's size (or `at_least`), and larger when the messages that come call for it.
    """

    def __init__(
        self, worker: int, ring_bytes: int | None = None, wait: Wait = Wait.DEFAULT, *, at_least: int = RING_BYTES
    ) -> None:
        self._worker = worker
        self._wait = wait
        self._grows = ring_bytes is None
        self._ring = Ring.create(ring_bytes or at_least)
        self._consumer = self._ring.consumer(wait=wait)
        self._peers: dict[int, tuple[Ring, Producer]] = {}
        self.max_message = self._ring.max_message
        self.target_message = max(256, self._ring.capacity // MESSAGES_PER_RING)
        self._lent: list[tuple[memoryview, Message]] = []  # large messages of the last receive, still in the ring
        self._lost: list[str] = []  # in a ring that this inbox has left
        self._unlooked = 0
        self._seen = (0, 0)  # messages and bytes of the ring at the last look
        self._next: Ring | None = None  # where this inbox is moving to
        self._to_tell: set[int] = set()  # peers that have not been told of it
        self._last_due: set[int] = set()  # peers whose last message in the old ring is still to come
        self._absent: set[int] = set()  # peers that have died and are being replaced
        self._following: dict[int, tuple[Ring, Producer]] = {}  # peers' new rings, until the old one has our last

    @property
    def address(self) -> str:
        """Where others attach, while this process lives."""
        return (self._next or self._ring).address

    @property
    def ring_bytes(self) -> int:
        """The size of this worker's ring now."""
        return self._ring.capacity

    def connect(self, addresses: Mapping[int, str]) -> None:
        """Attach to the rings of other workers, by worker index; a worker that is connected stays so. PeerGone when
        one has died since its address was known; those before it are connected then."""
        for worker, address in addresses.items():
            if worker not in self._peers:
                try:
                    ring = Ring.attach(address)
                except RingGone as error:
                    raise PeerGone(f"worker {worker} is gone: {error}") from error
                self._peers[worker] = (ring, ring.producer())
                self._absent.discard(worker)
        self._limit()

    def drop(self, workers: Iterable[int]) -> dict[int, int]:
        """These workers have died: let go of their rings, and stay in this one until they are replaced. How large
        their rings were, by worker index: messages may have been made for that."""
        sizes: dict[int, int] = {}
        for worker in workers:
            self._absent.add(worker)
            self._to_tell.discard(worker)
            self._last_due.discard(worker)
            for where in (self._peers, self._following):
                peer = where.pop(worker, None)
                if peer is not None:
                    sizes[worker] = max(peer[0].capacity, sizes.get(worker, 0))
                    peer[1].close()
                    peer[0].close()
        return sizes

    def send(self, worker: int, task: int, parts: Sequence[Buffer]) -> bool:
        if self._following and worker in self._following and not self._follow(worker):
            return False
        peer = self._peers.get(worker)
        return peer is not None and peer[1].try_write_parts(task, parts)

    def receive(self, timeout: float | None) -> Sequence[tuple[int, Buffer]]:
        if self._lent:
            self._give_back()
        if self._next is not None and not self._last_due:
            self._switch(self._next)
        if self._to_tell or self._following:
            self._move_on()
            timeout = 0.001 if timeout is None else min(timeout, 0.001)  # for room; there is no message for it
        drained = self._consumer.drain(_DRAIN_MESSAGES, timeout)
        if not drained:
            return ()
        messages: list[tuple[int, Buffer]] = []
        for task, payload in drained:
            if task >= _MOVED:
                self._take_own(task, payload)
            else:
                messages.append((task, payload if isinstance(payload, bytes) else self._lend(payload)))
        self._unlooked += 1
        if self._unlooked >= _LOOK_EVERY:
            self._unlooked = 0
            if self._grows:
                self._look()
        return messages

    def wake(self) -> None:
        while True:
            ring = self._ring
            with suppress(RingClosed):
                ring.wake()
            if ring is self._ring:
                return  # else the inbox moved meanwhile, and its reader may sleep on the new ring

    def lost(self) -> list[str]:
        before, self._lost = self._lost, []
        return before + [
            f"process {skip.producer_pid} died while it wrote {skip.bytes:,} bytes to process {os.getpid()}"
            for skip in self._consumer.skips()
        ]

    def close(self) -> None:
        self._give_back()
        for ring, producer in [*self._peers.values(), *self._following.values()]:
            producer.close()
            ring.close()
        self._consumer.close()
        self._ring.close()
        if self._next is not None:
            self._next.close()

    def _lend(self, message: Message) -> memoryview:
        self._unlooked += _LARGE_COUNTS
        view = message.view()
        self._lent.append((view, message))
        return view

    def _give_back(self) -> None:
        for view, message in self._lent:
            view.release()
            message.release()
        self._lent.clear()

    def _limit(self) -> None:
        """The largest message that every peer's ring takes."""
        self.max_message = min([self._ring.max_message, *(ring.max_message for ring, _ in self._peers.values())])

    # --- moving to a larger ring -------------------------------------------------------------------------------

    def _look(self) -> None:
        """Move to a larger ring when the messages since the last look call for one."""
        stats = self._ring.stats()
        messages, size = stats.written - self._seen[0], stats.bytes - self._seen[1]
        self._seen = (stats.written, stats.bytes)
        if self._next is not None or not messages or not self._peers or self._absent:
            return
        wanted = recommended_capacity(size / messages)
        if wanted <= self._ring.capacity:
            return
        try:
            self._next = Ring.create(wanted)
        except RingNoSpace as error:
            self._grows = False
            logger.warning("the ring stays at %d bytes although messages call for more: %s", self.ring_bytes, error)
            return
        self._to_tell = set(self._peers)
        self._last_due = set(self._peers)

    def _move_on(self) -> None:
        """Tell peers of the new ring, and follow theirs, as far as there is room."""
        for worker in list(self._to_tell):
            assert self._next is not None
            if self.send(worker, _MOVED, (self._worker.to_bytes(4, "little"), self._next.address.encode())):
                self._to_tell.remove(worker)
        for worker in list(self._following):
            self._follow(worker)

    def _follow(self, worker: int) -> bool:
        """Write the last message into a peer's old ring and change to its new one; False when there is no room."""
        ring, producer = self._peers[worker]
        if not producer.try_write_parts(_LAST, (self._worker.to_bytes(4, "little"),)):
            return False
        producer.close()
        ring.close()
        self._peers[worker] = self._following.pop(worker)
        self._limit()
        return True

    def _take_own(self, task: int, payload: bytes | Message) -> None:
        assert isinstance(payload, bytes)
        worker = int.from_bytes(payload[:4], "little")
        if task == _LAST:
            self._last_due.discard(worker)
        elif worker not in self._absent:
            try:
                ring = Ring.attach(payload[4:].decode())
            except RingGone:
                return  # it died since; whoever watches it will say so
            self._following[worker] = (ring, ring.producer())

    def _switch(self, ring: Ring) -> None:
        """Every peer's last message in the old ring has come: read the new one."""
        self._lost = self.lost()
        self._consumer.close()
        self._ring.close()
        self._ring, self._next = ring, None
        self._consumer = ring.consumer(wait=self._wait)
        self.target_message = max(256, ring.capacity // MESSAGES_PER_RING)
        self._seen = (0, 0)
        self._limit()
