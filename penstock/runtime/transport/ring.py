"""The shared-memory ring between the processes of one node (the papers' OSRBuffer; docs/papers.md: T1 to T8).

The problem: a message that goes from process to process through a socket or pipe is copied into the kernel and out
again, and each message costs system calls. Here many producers write into a ring of shared memory, and one consumer
reads it there: one copy in, at most one copy out, and no system call while both are busy.

The invariant: **a message whose write has returned is read exactly once**, in its producer's order, by a living
consumer. When a consumer dies, the next one gets again what the dead one had drained and not released, and nothing that
it had released. A message whose producer died half-way is either read whole or reported as a `Skip`.

The ring never loses a message silently, never shows a part of a message, never gives up the slot of a producer that
lives (however slow), and leaves nothing in /dev/shm. A full ring is no error: `try_write` returns False, and `write`
waits.

    ring = Ring.create(recommended_capacity(10_000))
    with ring.consumer() as consumer:
        producer = Ring.attach(ring.address).producer()  # in another process, as a rule
        producer.write(7, b"hello")
        for task, payload in consumer.drain(timeout=1.0):
            ...                                           # (7, b"hello")

A message is *released* when the caller does not need it any more. Each `drain()` releases what the one before has
returned as bytes. Messages of at least `zero_copy_min` bytes come as `Message` (read-only, no copy), and keep their
room in the ring until they are released or nothing refers to them.

Differences from the paper:

- Heads stand in a table of their own, not before each message (T2). native/ring.hpp says why.
- A slot stuck in isWriting is skipped only when its producer is dead, and the skip is reported (T5). The paper skips it
  when the read-ahead limit is reached, which loses the message of a slow producer and lets it write over a later one.
- The consumer sleeps on a futex instead of polling. Before that it looks for a short time when this pays (`Wait`).
- A consumer may die, and another one may take its place.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, NamedTuple

from penstock.runtime.errors import PenstockError

if sys.platform != "linux":
    raise ImportError(f"penstock's shared-memory ring needs Linux (futex, /proc, O_TMPFILE); this is {sys.platform}")

from penstock.runtime._native import Consumer, Message, Producer, RingHandle, Skip

__all__ = [
    "Consumer",
    "ConsumerDied",
    "Message",
    "MessageTooLarge",
    "Producer",
    "Ring",
    "RingBusy",
    "RingClosed",
    "RingError",
    "RingForked",
    "RingFull",
    "RingGone",
    "RingNoSpace",
    "RingStats",
    "Skip",
    "Wait",
    "recommended_capacity",
]


class RingError(PenstockError):
    """Base of the ring's errors. Raised as itself when a ring cannot be made or opened as asked."""


class RingFull(RingError):
    """write() has found no room within its timeout. The consumer lives and may still make room (otherwise:
    ConsumerDied)."""


class ConsumerDied(RingError):
    """write() waits for room, and there is no consumer to make any until another one attaches (otherwise: RingFull)."""


class MessageTooLarge(RingError):
    """The message would not fit even into the empty ring, so waiting cannot help (otherwise: RingFull)."""


class RingBusy(RingError):
    """Living processes have the place of the consumer, or all places of producers."""


class RingClosed(RingError):
    """This handle was closed here. The ring itself may still exist in other processes (otherwise: RingGone)."""


class RingGone(RingError):
    """There is no ring at the address: its holder has ended or has closed it (in this process: RingClosed)."""


class RingForked(RingError):
    """This handle came through a fork and belongs to the parent process. Attach anew in the child."""


class RingNoSpace(RingError):
    """The shared memory is too small for a new ring. A ring that exists never runs out of it (otherwise: RingFull)."""


@dataclass(frozen=True)
class Wait:
    """How long a consumer looks for messages before it sleeps.

    Looking finds a message in under a microsecond and keeps a core busy; waking from sleep takes tens of
    microseconds. `adaptive`: look while messages come closer together than waking takes, about as long as they are
    apart; sleep through most of a slower, steady beat (up to about a millisecond) and look around the time at which
    the next message is due; sleep for all others. Otherwise always look for `max_spin_us`.
    """

    max_spin_us: float = 150.0
    adaptive: bool = True

    DEFAULT: ClassVar[Wait]
    SLEEP: ClassVar[Wait]
    SPIN: ClassVar[Wait]

    def __post_init__(self) -> None:
        if not 0 <= self.max_spin_us <= 1e9:
            raise ValueError(f"max_spin_us must be from 0 to 1e9, not {self.max_spin_us}")


Wait.DEFAULT = Wait()
Wait.SLEEP = Wait(max_spin_us=0.0, adaptive=False)
Wait.SPIN = Wait(max_spin_us=600.0, adaptive=False)  # more than the time between messages at 3,000 messages a second


class RingStats(NamedTuple):
    """The counts of all processes since the ring was made, and the ring's present state."""

    written: int  # messages whose write has returned
    bytes: int  # their payload
    delivered: int  # messages that a consumer got; counted twice when it died before it released them
    flushes: int  # how often the ring wrapped before its end (T6)
    skips: int  # slots given up because their producer died
    stalled: int  # slots whose living producer was slow enough to be noticed
    used_bytes: int
    used_slots: int
    producers: int  # attached and alive
    consumer_pid: int | None


#: The least and the greatest capacity of a ring. native/ring.hpp has the same numbers.
MIN_CAPACITY, MAX_CAPACITY = 1024, 1 << 34


def recommended_capacity(message_bytes: float) -> int:
    """Returns the capacity for a ring with messages of this size: a power of two, 50 to 100 times the size (T8).

    The result is never below 256 KiB or above 256 MiB. In a smaller ring the two sides wait for each other; a larger
    one wastes memory and cache.
    """
    if message_bytes < 0:
        raise ValueError(f"message_bytes must not be negative, but is {message_bytes}")
    wanted = max(256 * 1024, -int(-50 * message_bytes // 1))
    return min(1 << (wanted - 1).bit_length(), 256 * 1024 * 1024)


def _default_slots(capacity: int) -> int:
    # One for every 128 bytes, so that small messages fill the payload before they use up the slots.
    return min(max(capacity // 128, 64), 1 << 24)


class Ring:
    """A process's share of a ring, made by `create` or `attach`. Other processes attach by its `address`.

    The memory exists as long as any process has a handle, producer or consumer of it. A forked child cannot use the
    handles of its parent, and has to attach anew.
    """

    def __init__(self, handle: RingHandle) -> None:
        self._handle = handle
        self.capacity = handle.capacity
        self.slots = handle.slots
        self.max_message = handle.max_message

    @classmethod
    def create(cls, capacity: int = 2 * 1024 * 1024, *, slots: int | None = None, directory: str = "/dev/shm") -> Ring:
        """Creates a new, empty ring of `capacity` payload bytes and room for `slots` messages, both powers of two."""
        if not 0 < capacity < 1 << 63:
            raise RingError(f"a ring's capacity must be a positive number of bytes, not {capacity}")
        slots = _default_slots(capacity) if slots is None else slots
        if not 0 < slots < 1 << 63:
            raise RingError(f"a ring's slots must be a positive number, not {slots}")
        return cls(RingHandle.create(capacity, slots, directory))

    @classmethod
    def attach(cls, address: str) -> Ring:
        """Returns a handle of the ring at this address, which another handle on this machine has."""
        return cls(RingHandle.attach(address))

    @property
    def address(self) -> str:
        """The address at which other processes can attach while this handle is open and this process lives."""
        return self._handle.address

    def producer(self) -> Producer:
        """Returns a producer, which writes into the ring. A process should use one; its threads may share it."""
        return self._handle.producer()

    def consumer(
        self, wait: Wait = Wait.DEFAULT, *, read_ahead: int | None = None, zero_copy_min: int | None = 8 * 1024
    ) -> Consumer:
        """Returns the ring's only consumer. It replaces a dead consumer, and gets again what that one had not released.

        `read_ahead` limits how many slots it reads ahead of a slot that is still being written (docs/papers.md: T5);
        None: all slots. Messages of at least `zero_copy_min` bytes come as `Message`; None: no messages do.
        """
        if read_ahead is not None and read_ahead < 1:
            raise ValueError(f"read_ahead must be at least 1, not {read_ahead}")
        lend_from = 1 << 63 if zero_copy_min is None else zero_copy_min
        return self._handle.consumer(wait.max_spin_us, wait.adaptive, min(read_ahead or 0, self.slots), lend_from)

    def wake(self) -> None:
        """Make the consumer's drain() return: the call that is waiting, or else the next one that would wait."""
        self._handle.wake()

    def stats(self) -> RingStats:
        counts: dict[str, Any] = self._handle.stats()
        return RingStats(**counts)

    def close(self) -> None:
        """End this handle and its address; its producers and consumers can be used until they are closed."""
        self._handle.close()

    def __enter__(self) -> Ring:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Ring of {self.capacity} bytes, {self.slots} slots>"
