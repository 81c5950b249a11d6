"""
Penstock's native core: the OSRBuffer ring, and hashing, partitioning and packing of whole lists.
"""

from collections.abc import Sequence
from typing import Any

from typing_extensions import Buffer


class Producer:
    """Writes messages into a ring. Made by Ring.producer()."""

    def try_write(self, target: int, payload: Buffer, /) -> bool:
        """
        Write one message if there is room now; False, and nothing written, if there is not.
        """

    def write(self, target: int, payload: Buffer, /, timeout: float | None = None) -> None:
        """
        Write one message, waiting for room. RingFull after `timeout` seconds; ConsumerDied.
        """

    def try_write_parts(self, target: int, parts: Sequence[Buffer]) -> bool:
        """
        Like try_write, with the payload gathered from several buffers: still one copy.
        """

    def write_parts(self, target: int, parts: Sequence[Buffer], timeout: float | None = None) -> None:
        """Like write, with the payload gathered from several buffers."""

    def close(self) -> None:
        """Give up the producer's place in the ring."""

    def __enter__(self) -> Producer: ...

    def __exit__(self, *exc: object) -> None: ...

class Message:
    """
    A large message where it lies in the ring, read-only. It holds its room until release() or until nothing refers to it; out of order is fine.
    """

    def view(self) -> memoryview:
        """The payload, without a copy. Release the view before the message."""

    def release(self) -> None:
        """Give the room back; BufferError while views of it are in use."""

    def __len__(self) -> int: ...

class Skip:
    """A slot given up because the producer that was writing it died."""

    @property
    def seq(self) -> int: ...

    @property
    def producer_pid(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    def __repr__(self) -> str: ...

class Consumer:
    """Reads a ring's messages. Made by Ring.consumer(); one at a time."""

    def drain(self, max_messages: int = 1024, timeout: float | None = 0.0) -> list[tuple[int, bytes | Message]]:
        """
        Take what is there, as (target, payload). Releases what the call before gave as bytes.

        Waits up to `timeout` seconds (None: for ever) for the first message; an empty list means that the time is up, that Ring.wake() was called, or that skips() has news.
        """

    def release(self) -> None:
        """
        Release everything drained as bytes, so that no later consumer sees it again.
        """

    def skips(self) -> list[Skip]:
        """The slots given up since the last call."""

    def close(self) -> None:
        """
        Leave the ring; what was drained and not released stays for the next consumer.
        """

    def __enter__(self) -> Consumer: ...

    def __exit__(self, *exc: object) -> None: ...

class RingHandle:
    """
    A share of a ring's memory; wrapped by penstock.runtime.transport.ring.Ring.
    """

    @staticmethod
    def create(capacity: int, slots: int, directory: str) -> RingHandle: ...

    @staticmethod
    def attach(address: str) -> RingHandle: ...

    @property
    def address(self) -> str: ...

    @property
    def capacity(self) -> int: ...

    @property
    def slots(self) -> int: ...

    @property
    def max_message(self) -> int: ...

    def producer(self) -> Producer: ...

    def consumer(self, max_spin_us: float, adaptive: bool, window: int, zero_copy_min: int) -> Consumer: ...

    def wake(self) -> None: ...

    def stats(self) -> dict[str, Any]: ...

    def close(self) -> None: ...

def stable_hash(key: object, /) -> int:
    """
    stable_hash(key) -> int

    A key's 64-bit hash, the same in every process; equal keys hash alike.
    """

def key_groups(keys: list[Any], n_groups: int, /) -> bytes:
    """
    key_groups(keys, n_groups) -> bytes

    Each key's group, stable_hash(key) % n_groups, as native unsigned 16-bit numbers.
    """

def partition(
    keys: list[Any], columns: tuple[list[Any], ...], table: Buffer, n_tasks: int, /
) -> list[tuple[list[Any], ...]]:
    """
    partition(keys, columns, table, n_tasks) -> list

    Splits keys and columns (lists of the same length) by key: for each task the tuple
    (keys, *columns) of what is its own, in order. `table` gives the task of each key group as
    native unsigned 16-bit numbers. The exception for a key that cannot be hashed has the key's
    position as its attribute `index`.
    """

def pack(records: list[Any], /) -> tuple[int, bytes] | None:
    """
    pack(records) -> (code, msgpack) or None

    A list as msgpack, with the code of what keeps the types of all records: 1 all str, 2 scalars,
    3 tuples of one arity of scalars or nested values (plus 8 times the arity), 4 nested lists and
    dicts. None: msgpack would not keep them.
    """

def pack_part(records: list[Any], begin: int, end: int, /) -> tuple[int, bytes] | None:
    """
    pack_part(records, begin, end) -> (code, msgpack) or None

    A part of a list, as `pack` does it.
    """

def pack_frames(entries: dict[Any, Any], full: int, /) -> list[tuple[int, bytes]] | None:
    """
    pack_frames(entries, full) -> [(code, msgpack)] or None

    A dict from scalars to nested values as several, of code 5, in its order, each of which ends soon
    behind `full` bytes.
    """

def pack_value_frames(entries: dict[Any, Any], full: int, /) -> list[tuple[int, bytes]] | None:
    """
    pack_value_frames(entries, full) -> [(code, msgpack)] or None

    The values of a dict as several lists, in its order, each of which ends soon behind `full` bytes.
    """
