"""Between the workers of one node: each worker's inbox is a ring that all others write to (docs/papers.md: T1 to T8).

A message is copied once, by its sender into the ring; small ones are copied out, large ones are decoded in place.

A ring works best at 50 to 100 times the message size (T8). Messages are made small enough for the ring where records
allow it; where single records are larger, the inbox *moves* to a larger ring: its owner makes one and sends each peer
the address; a peer's last message in the old ring says so, and from then on it writes to the new one, which the owner
reads when it has the last message of every peer. So order is kept and nothing waits but for room.

A single message that is too large for a peer's ring is not an error up to LARGEST_MESSAGE: its sender asks the peer to
move to a ring in which it fits, and there is "no room" until that has happened. Where shared memory has no room for
such a ring the sender waits, and the peer says so in its log. The larger ring stays.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from penstock.runtime.transport.base import Buffer, PeerGone, Transport
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

#: The paper's size; 64 messages of 32 KiB.
RING_BYTES = 2 * 1024 * 1024

#: Bytes of the largest message that a ring is made larger for; the ring is twice as large.
LARGEST_MESSAGE = 128 * 1024 * 1024

# Between two tries to make a larger ring that shared memory had no room for.
_ROOM_RETRY_S = 1.0

# "Task" numbers of the transport's own messages.
_LEFT = 0xFFFF_FFFC  # nothing more comes from this sender at all
_WANTED = 0xFFFF_FFFD  # payload: bytes of a message that the sender has and this ring cannot take
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
        self._grows = self._grows_by_itself = ring_bytes is None
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
        self._wanted = 0  # bytes of the largest message that some peer has for this inbox
        self._retry_at = 0.0  # not before this is a larger ring tried to be made again, in monotonic seconds
        self._asked: dict[int, int] = {}  # peers that were asked for a larger ring, and for messages of which size
        self._has_left: set[int] = set()  # peers that send nothing more
        self._left_to: set[int] = set()  # peers that know that this worker sends nothing more

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

    def send(self, worker: int, task: int, parts: Sequence[Buffer]) -> bool:
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

    @property
    def largest_message(self) -> int:
        if not self._grows or self.max_message >= LARGEST_MESSAGE:
            return self.max_message
        room = os.statvfs("/dev/shm")
        # A ring has twice the message's bytes, and its heads.
        return max(self.max_message, min(LARGEST_MESSAGE, room.f_bavail * room.f_frsize // 3))

    def remedy(self, size: int) -> str:
        if not self._grows:
            return super().remedy(size)
        return f"the most is {LARGEST_MESSAGE:,} bytes, or a third of the free /dev/shm; keep larger things in files"

    def leave(self) -> bool:
        for worker, (_, producer) in self._peers.items():
            if worker not in self._left_to:
                if not producer.try_write_parts(_LEFT, (self._worker.to_bytes(4, "little"),)):
                    return False
                self._left_to.add(worker)
        return True

    def receive(self, timeout: float | None) -> Sequence[tuple[int, Buffer]]:
        if self._lent:
            self._give_back()
        if self._next is not None and not self._last_due:
            self._switch(self._next)
        if self._to_tell or self._following:
            self._move_on()
            timeout = 0.001 if timeout is None else min(timeout, 0.001)  # for room; there is no message for it
        if self._wanted > self._ring.max_message:
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
        if wanted > self._ring.capacity and not self._move_to(wanted):
            self._grows_by_itself = False

    def _make_room(self) -> None:
        """Move to a ring in which the largest message fits that a peer has."""
        if self._next is not None or self._absent or time.monotonic() < self._retry_at:
            return
        if not self._move_to(1 << (2 * self._wanted - 1).bit_length()):
            self._retry_at = time.monotonic() + _ROOM_RETRY_S

    def _move_to(self, capacity: int) -> bool:
        """Begin to move; False when there is no room for such a ring."""
        try:
            self._next = Ring.create(capacity)
        except RingNoSpace as error:
            logger.warning("the ring stays at %d bytes although messages call for more: %s", self.ring_bytes, error)
            return False
        self._to_tell = set(self._peers) - self._has_left
        self._last_due = set(self._to_tell)
        return True

    def _ask(self, worker: int, size: int) -> None:
        """Ask a peer to make room for a message of this size, once."""
        if size > self._asked.get(worker, 0):
            parts = (self._worker.to_bytes(4, "little"), size.to_bytes(8, "little"))
            if self._peers[worker][1].try_write_parts(_WANTED, parts):
                self._asked[worker] = size

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
        self._asked.pop(worker, None)
        self._limit()
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
