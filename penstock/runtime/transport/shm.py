"""The transport between the workers of one node: the inbox of each worker is a ring that all others write to
(docs/papers.md: T1 to T8).

The sender copies a message once into the ring. The receiver copies small messages out of it, and decodes large ones in
place.

A ring works best at 50 to 100 times the message size (T8). Messages are made small enough for the ring if their records
allow it. When single records are larger, the inbox *grows*. Its owner creates a larger ring and sends the address to
each peer. A peer writes a last message into the old ring, and from then on writes to the new one. The owner reads the
new ring when it has the last message of every peer. So the order is kept, and a sender never waits except for room.

A message that is too large for a peer's ring is no error up to LARGEST_MESSAGE. Its sender asks the peer to grow, and
gets the answer "no room" until the peer has done so. When shared memory has no room for the larger ring, the sender
waits, and the log of the peer says so. A ring that has grown stays as it is.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from penstock.runtime.transport.base import Buffer, PeerGone, PeerTransport
from penstock.runtime.transport.ring import (
    Message,
    MessageTooLarge,
    Producer,
    Ring,
    RingClosed,
    RingGone,
    RingNoSpace,
    Wait,
    recommended_capacity,
)

logger = logging.getLogger(__name__)

#: T8: messages aim at this share of the ring.
MESSAGES_PER_RING = 64

#: The size in the paper: 64 messages of 32 KiB.
RING_BYTES = 2 * 1024 * 1024

#: The number of bytes of the largest message for which a ring grows. The ring then has twice this size.
LARGEST_MESSAGE = 128 * 1024 * 1024

# The time between two tries to create a larger ring for which shared memory has no room.
_ROOM_RETRY_S = 1.0

# The "task" numbers of the transport's own messages.
_LEFT = 0xFFFF_FFFC  # this sender sends nothing more
_WANTED = 0xFFFF_FFFD  # payload: the size of a message that the sender has and this ring cannot take
_GREW = 0xFFFF_FFFE  # payload: the index of the sender's worker, and then the address of its new ring
_LAST = 0xFFFF_FFFF  # this sender sends nothing more by this ring

_DRAIN_MESSAGES = 256
# The number of receives with messages between two looks at the message size. A large message counts for several: where
# they come slowly, and several at once, the ring should have grown before a still larger one comes.
_LOOK_EVERY = 512
_LARGE_COUNTS = 8


class ShmTransport(PeerTransport):
    """The end of one worker: its own ring, and a producer for the ring of each peer.

    `ring_bytes`: the size of the ring; None: the size in the paper (or `at_least`), and larger when the messages call
    for it. `keeps_size`: this inbox gets small messages only and keeps its size, and those of peers may grow.
    """

    def __init__(
        self,
        worker: int,
        ring_bytes: int | None = None,
        wait: Wait = Wait.DEFAULT,
        *,
        at_least: int = RING_BYTES,
        keeps_size: bool = False,
    ) -> None:
        self._worker = worker
        self._wait = wait
        self._grows = ring_bytes is None  # the inbox of each peer
        self._keeps_size = keeps_size or not self._grows
        self._grows_by_itself = not self._keeps_size
        self._ring = Ring.create(ring_bytes or at_least)
        self._consumer = self._ring.consumer(wait=wait)
        self._peers: dict[int, tuple[Ring, Producer]] = {}
        self.target_message = max(256, self._ring.capacity // MESSAGES_PER_RING)
        # Large messages of the last receive that are still in the ring.
        self._lent: list[tuple[memoryview, Message]] = []
        self._excused: set[int] = set()  # processes, of which nothing is told as lost
        self._lost: list[str] = []  # in a ring that this inbox no longer uses
        self._unlooked = 0
        self._seen = (0, 0)  # the numbers of messages and bytes of the ring at the last look
        self._next: Ring | None = None  # the larger ring, while the inbox grows
        self._to_tell: set[int] = set()  # peers that do not know of it yet
        self._last_due: set[int] = set()  # peers whose last message in the old ring has not come yet
        self._absent: set[int] = set()  # peers that have died and are being replaced
        # The new rings of peers, until the old one has this worker's last message.
        self._following: dict[int, tuple[Ring, Producer]] = {}
        self._wanted = 0  # the number of bytes of the largest message that some peer has for this inbox
        self._retry_at = 0.0  # no larger ring is created before this time, in monotonic seconds
        self._asked: dict[int, int] = {}  # peers that were asked to grow, and for which message size
        self._has_left: set[int] = set()  # peers that send nothing more
        self._left_to: set[int] = set()  # peers that know that this worker sends nothing more

    @property
    def address(self) -> str:
        """See PeerTransport."""
        return (self._next or self._ring).address

    @property
    def ring_bytes(self) -> int:
        """See PeerTransport."""
        return self._ring.capacity

    def connect(self, addresses: Mapping[int, str]) -> None:
        """See PeerTransport."""
        for worker, address in addresses.items():
            if worker not in self._peers:
                try:
                    ring = Ring.attach(address)
                except RingGone as error:
                    raise PeerGone(f"worker {worker} cannot be reached: {error}") from error
                self._peers[worker] = (ring, ring.producer())
                self._absent.discard(worker)

    def drop(self, workers: Iterable[int]) -> dict[int, int]:
        """See PeerTransport. The inbox does not grow until the workers are replaced."""
        sizes: dict[int, int] = {}
        for worker in workers:
            self._absent.add(worker)
            self._asked.pop(worker, None)
            self._has_left.discard(worker)
            self._to_tell.discard(worker)
            self._last_due.discard(worker)
            for where in (self._peers, self._following):
                peer = where.pop(worker, None)
                if peer is not None:
                    sizes[worker] = max(peer[0].capacity, sizes.get(worker, 0))
                    peer[1].close()
                    peer[0].close()
        return sizes

    def forget(self, peers: Iterable[int]) -> None:
        """See PeerTransport. The inbox may grow again."""
        gone = list(peers)
        self.drop(gone)
        self._absent.difference_update(gone)

    def send(self, worker: int, task: int, parts: Sequence[Buffer]) -> bool:
        meter = self.meter
        if meter is None or not meter.due("send near"):
            return self._send(worker, task, parts)
        begun_ns = meter.clock()
        sent = self._send(worker, task, parts)
        if sent:
            meter.note("send near", 1, sum(map(len, parts)), begun_ns)
        return sent

    def _send(self, worker: int, task: int, parts: Sequence[Buffer]) -> bool:
        if self._following and worker in self._following and not self._follow(worker):
            return False
        peer = self._peers.get(worker)
        try:
            return peer is not None and peer[1].try_write_parts(task, parts)
        except MessageTooLarge:
            if not self._grows:
                raise
            self._ask(worker, sum(map(len, parts)))
            return False

    def max_message(self, worker: int) -> int:
        peer = self._peers.get(worker)
        return self._ring.max_message if peer is None else peer[0].max_message

    def largest_message(self, worker: int) -> int:
        present = self.max_message(worker)
        if not self._grows or present >= LARGEST_MESSAGE:
            return present
        room = os.statvfs("/dev/shm")
        # A ring has twice the bytes of the message, and its heads.
        return max(present, min(LARGEST_MESSAGE, room.f_bavail * room.f_frsize // 3))

    def remedy(self, size: int) -> str:
        if not self._grows:
            return super().remedy(size)
        return (
            "the most is a little less than 128 MiB, or than a third of the free /dev/shm; keep larger things in files"
        )

    def leave(self) -> bool:
        for worker, (_, producer) in self._peers.items():
            if worker not in self._left_to:
                if not producer.try_write_parts(_LEFT, (self._worker.to_bytes(4, "little"),)):
                    return False
                self._left_to.add(worker)
        return True

    def receive(self, timeout: float | None) -> Sequence[tuple[int, Buffer]]:
        # One who waits for a message polls first, which is no part of what the message costs.
        meter = None if timeout != 0 or self.meter is None or not self.meter.due("receive") else self.meter
        begun_ns = 0 if meter is None else meter.clock()
        if self._lent:
            self._give_back()
        if self._next is not None and not self._last_due:
            self._switch(self._next)
        if self._to_tell or self._following:
            self._keep_growing()
            # To see when there is room, for which there is no message.
            timeout = 0.001 if timeout is None else min(timeout, 0.001)
        if self._wanted > self._ring.max_message and not self._keeps_size:
            self._make_room()
            timeout = _ROOM_RETRY_S if timeout is None else min(timeout, _ROOM_RETRY_S)
        drained = self._consumer.drain(_DRAIN_MESSAGES, timeout)
        if not drained:
            return ()
        messages: list[tuple[int, Buffer]] = []
        for task, payload in drained:
            if task >= _LEFT:
                self._take_own(task, payload)
            else:
                messages.append((task, payload if isinstance(payload, bytes) else self._lend(payload)))
        if meter is not None and messages:
            meter.note("receive near", len(messages), sum(len(message) for _, message in messages), begun_ns)
        self._unlooked += 1
        if self._unlooked >= _LOOK_EVERY:
            self._unlooked = 0
            if self._grows_by_itself:
                self._look()
        return messages

    def wake(self) -> None:
        while True:
            ring = self._ring
            with suppress(RingClosed):
                ring.wake()
            if ring is self._ring:
                return  # otherwise the inbox has grown meanwhile, and its reader may sleep on the new ring

    def excuse(self, pid: int) -> None:
        """See PeerTransport."""
        self._excused.add(pid)

    def lost(self) -> list[str]:
        before, self._lost = self._lost, []
        return before + [
            f"process {skip.producer_pid} died while it wrote {skip.bytes:,} bytes to process {os.getpid()}"
            for skip in self._consumer.skips()
            if skip.producer_pid not in self._excused
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

    # --- growing -------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Grows when the messages since the last look call for a larger ring."""
        stats = self._ring.stats()
        messages, size = stats.written - self._seen[0], stats.bytes - self._seen[1]
        self._seen = (stats.written, stats.bytes)
        if self._next is not None or not messages or not self._peers or self._absent:
            return
        wanted = recommended_capacity(size / messages)
        if wanted > self._ring.capacity and not self._grow_to(wanted):
            self._grows_by_itself = False

    def _make_room(self) -> None:
        """Grows so that the largest message that a peer has fits."""
        if self._next is not None or self._absent or time.monotonic() < self._retry_at:
            return
        if not self._grow_to(1 << (2 * self._wanted - 1).bit_length()):
            self._retry_at = time.monotonic() + _ROOM_RETRY_S

    def _grow_to(self, capacity: int) -> bool:
        """Begins to grow. Returns False when there is no room for such a ring."""
        try:
            self._next = Ring.create(capacity)
        except RingNoSpace as error:
            logger.warning(
                "a worker's ring of %d bytes is too small for its messages, and could not grow: %s",
                self.ring_bytes,
                error,
            )
            return False
        self._to_tell = set(self._peers) - self._has_left
        self._last_due = set(self._to_tell)
        return True

    def _ask(self, worker: int, size: int) -> None:
        """Asks a peer once to make room for a message of this size."""
        if size > self._asked.get(worker, 0):
            parts = (self._worker.to_bytes(4, "little"), size.to_bytes(8, "little"))
            if self._peers[worker][1].try_write_parts(_WANTED, parts):
                self._asked[worker] = size

    def _keep_growing(self) -> None:
        """Tells peers of the new ring, and changes to theirs, as far as there is room."""
        for worker in list(self._to_tell):
            assert self._next is not None
            if self.send(worker, _GREW, (self._worker.to_bytes(4, "little"), self._next.address.encode())):
                self._to_tell.remove(worker)
        for worker in list(self._following):
            self._follow(worker)

    def _follow(self, worker: int) -> bool:
        """Writes the last message into a peer's old ring, and changes to its new one. Returns False when there is no
        room."""
        ring, producer = self._peers[worker]
        if not producer.try_write_parts(_LAST, (self._worker.to_bytes(4, "little"),)):
            return False
        producer.close()
        ring.close()
        self._peers[worker] = self._following.pop(worker)
        self._asked.pop(worker, None)
        return True

    def _take_own(self, task: int, payload: bytes | Message) -> None:
        assert isinstance(payload, bytes)
        worker = int.from_bytes(payload[:4], "little")
        if task == _WANTED:
            self._wanted = max(self._wanted, int.from_bytes(payload[4:12], "little"))
        elif task in (_LAST, _LEFT):
            self._last_due.discard(worker)
            if task == _LEFT:
                self._has_left.add(worker)
                self._to_tell.discard(worker)
        elif worker in self._peers:
            try:
                ring = Ring.attach(payload[4:].decode())
            except RingGone:
                return  # the peer has died since, and its watcher will report that
            self._following[worker] = (ring, ring.producer())

    def _switch(self, ring: Ring) -> None:
        """Reads from the new ring, because the last message of every peer in the old one has come."""
        self._lost = self.lost()
        self._consumer.close()
        self._ring.close()
        self._ring, self._next = ring, None
        self._consumer = ring.consumer(wait=self._wait)
        self.target_message = max(256, ring.capacity // MESSAGES_PER_RING)
        self._seen = (0, 0)
