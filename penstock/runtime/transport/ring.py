"""The shared-memory ring between the processes of one node (the papers' OSRBuffer; docs/papers.md: T1 to T8).

The problem: a message that goes from process to process through a socket or pipe is copied into the kernel and
out again, and every one costs system calls. Here many producers write straight into a ring of shared memory and
one consumer reads it there: one copy in, at most one copy out, and no system call while both are busy.

The invariant: **a message whose write returned is read exactly once**, in its producer's order, by a living
consumer; what a consumer drained and had not released when it died is handed to the next one again, what it
released never is. A message whose producer died half-way is either read whole or reported as a `Skip`.

The ring never: loses a message silently, shows a torn one, gives up the slot of a producer that lives (however
slow), lets a full ring be an error (`try_write` says False, `write` waits), or leaves anything in /dev/shm.

    ring = Ring.create(recommended_capacity(10_000))
    with ring.consumer() as consumer:
        producer = Ring.attach(ring.address).producer()  # in another process, as a rule
        producer.write(7, b"hello")
        for task, payload in consumer.drain(timeout=1.0):
            ...                                           # (7, b"hello")

*Released* means: the caller has done with it. The next `drain()` releases what the last one gave as bytes;
messages of at least `zero_copy_min` bytes come as `Message` (read-only, no copy) and hold their room until
they are released or forgotten.

Where the paper (row) says otherwise:

- heads stand in a table of their own, not before each message (T2): see native/ring.hpp for why;
- a slot stuck in isWriting is skipped only when its producer is dead, and that is reported (T5). The paper skips
  when the window is full, which loses the message of a slow producer and lets it write over a later one;
- the consumer sleeps on a futex instead of polling, and looks a little while first when that pays (`Wait`);
- a consumer may die and another take its place.
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
    """Base of the ring's errors; by itself: a ring cannot be made or opened as asked."""


class RingFull(RingError):
    """write() found no room within its timeout; the consumer lives and may yet make some (else: ConsumerDied)."""


class ConsumerDied(RingError):
    """write() waits for room and nobody is left to make any, until another consumer attaches (else: RingFull)."""


class MessageTooLarge(RingError):
    """The message would not fit even into the empty ring: waiting cannot help (else: RingFull)."""


class RingBusy(RingError):
    """A place is taken by a living process: the one consumer's, or all of the producers'."""


class RingClosed(RingError):
    """This handle was closed here; the ring itself may live on in other processes (else: RingGone)."""


class RingGone(RingError):
    """There is no ring at the address: its holder has ended or closed it (here: RingClosed)."""


class RingForked(RingError):
    """This handle came through a fork and is the parent's: attach anew in the child."""


class RingNoSpace(RingError):
    """The shared memory is too small for a new ring; a ring that exists never runs out of it (else: RingFull)."""


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
Wait.SPIN = Wait(max_spin_us=600.0, adaptive=False)  # above the gaps of 3,000 messages a second


class RingStats(NamedTuple):
    """Counts since the ring was made, by whichever processes, and how it stands now."""

    written: int  # messages whose write returned
    bytes: int  # their payload
    delivered: int  # handed to a consumer; twice when it died before it released them
    flushes: int  # how often the ring wrapped before its end (T6)
    skips: int  # slots given up because their producer died
    stalled: int  # slots whose living producer was slow enough to be noticed
    used_bytes: int
    used_slots: int
    producers: int  # attached and alive
    consumer_pid: int | None


#: Between them is every capacity of a ring; native/ring.hpp has the same.
MIN_CAPACITY, MAX_CAPACITY = 1024, 1 << 34


def recommended_capacity(message_bytes: float) -> int:
    """The ring capacity for messages of this size: a power of two, 50 to 100 times it (T8).

    Never below 256 KiB or above 256 MiB. Smaller rings make the two sides wait for each other, larger ones
    waste memory and cache.
    """
    if message_bytes < 0:
        raise ValueError(f"message_bytes must not be negative, but is {message_bytes}")
    wanted = max(256 * 1024, -int(-50 * message_bytes // 1))
    return min(1 << (wanted - 1).bit_length(), 256 * 1024 * 1024)


def _default_slots(capacity: int) -> int:
    # One for every 128 bytes, so that small messages fill the payload before they use up the slots.
    return min(max(capacity // 128, 64), 1 << 24)


class Ring:
    """One process's share of a ring. Make with `create` or `attach`, and pass `address` to other processes.

    The memory lives as long as any process has a handle, producer or consumer of it. Not for forked children:
    they attach anew.
    """

    def __init__(self, handle: RingHandle) -> None:
        self._handle = handle
        self.capacity = handle.capacity
        self.slots = handle.slots
        self.max_message = handle.max_message

    @classmethod
    def create(cls, capacity: int = 2 * 1024 * 1024, *, slots: int | None = None, directory: str = "/dev/shm") -> Ring:
        """A new, empty ring of `capacity` payload bytes and room for `slots` messages, both powers of two."""
        if not 0 < capacity < 1 << 63:
            raise RingError(f"a ring's capacity must be a positive number of bytes, not {capacity}")
        slots = _default_slots(capacity) if slots is None else slots
        if not 0 < slots < 1 << 63:
            raise RingError(f"a ring's slots must be a positive number, not {slots}")
        return cls(RingHandle.create(capacity, slots, directory))

    @classmethod
    def attach(cls, address: str) -> Ring:
        """A handle of a ring that another handle, anywhere on this machine, has the address of."""
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
