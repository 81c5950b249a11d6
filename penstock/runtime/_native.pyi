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
        Write one message if there is room now. Returns False, and writes nothing, if there is not.
        """

    def write(self, target: int, payload: Buffer, /, timeout: float | None = None) -> None:
        """
        Write one message, and wait for room. Raises RingFull after `timeout` seconds, and ConsumerDied.
        """

    def try_write_parts(self, target: int, parts: Sequence[Buffer]) -> bool:
        """
        Like try_write, with the payload gathered from several buffers, in one copy.
        """

    def write_parts(self, target: int, parts: Sequence[Buffer], timeout: float | None = None) -> None:
        """Like write, with the payload gathered from several buffers."""

    def close(self) -> None:
        """Give up the producer's place in the ring."""

    def __enter__(self) -> Producer: ...

    def __exit__(self, *exc: object) -> None: ...

class Message:
    """
    A large message where it lies in the ring, read-only. It keeps its room in the ring until release(), or until nothing refers to it. Messages may be released in any order.
    """

    def view(self) -> memoryview:
        """
        Returns the payload, without a copy. Release the view before the message.
        """

    def release(self) -> None:
        """
        Give the message's room back to the ring. Raises BufferError while views of it are in use.
        """

    def __len__(self) -> int: ...

class Skip:
    """
    A slot that was given up, because its producer died while it wrote the message.
    """

    @property
    def seq(self) -> int: ...

    @property
    def producer_pid(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    def __repr__(self) -> str: ...

class Consumer:
    """
    Reads a ring's messages. Made by Ring.consumer(); a ring has one consumer at a time.
    """

    def drain(self, max_messages: int = 1024, timeout: float | None = 0.0) -> list[tuple[int, bytes | Message]]:
        """
        Returns the messages that have come, as (target, payload). Releases the messages that the call before
        returned as bytes.

        Waits up to `timeout` seconds (None: without limit) for the first message. An empty list means that the
        time is up, that Ring.wake() was called, or that skips() has news.
        """

    def release(self) -> None:
        """
        Release all messages that were drained as bytes, so that no later consumer gets them again.
        """

    def skips(self) -> list[Skip]:
        """Returns the slots that were given up since the last call."""

    def close(self) -> None:
        """
        Leave the ring. The next consumer gets again what was drained and not released.
        """

    def __enter__(self) -> Consumer: ...

    def __exit__(self, *exc: object) -> None: ...

class RingHandle:
    """
    A share of a ring's memory. The class Ring of penstock.runtime.transport.ring wraps it.
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

    def consumer(self, max_spin_us: float, adaptive: bool, read_ahead: int, zero_copy_min: int) -> Consumer: ...

    def wake(self) -> None: ...

    def stats(self) -> dict[str, Any]: ...

    def close(self) -> None: ...

def stable_hash(key: object, /) -> int:
    """
    stable_hash(key) -> int

    Returns a key's 64-bit hash, which is the same in every process, and the same for equal keys.
    """

def key_groups(keys: list[Any], n_groups: int, /) -> bytes:
    """
    key_groups(keys, n_groups) -> bytes

    Returns each key's group, stable_hash(key) % n_groups, as native unsigned 16-bit numbers.
    """

def partition(
    keys: list[Any], columns: tuple[list[Any], ...], table: Buffer, n_tasks: int, /
) -> list[tuple[list[Any], ...]]:
    """
    partition(keys, columns, table, n_tasks) -> list

    Splits keys and columns (lists of the same length) by key: for each task the tuple
    (keys, *columns) of the task's own keys, in order. `table` has the task of each key group as
    native unsigned 16-bit numbers. The exception for a key that cannot be hashed has the key's
    position as its attribute `index`.
    """

def pack(records: list[Any], /) -> tuple[int, bytes] | None:
    """
    pack(records) -> (code, msgpack) or None

    Packs a list as msgpack. Returns a code for the types of all records: 1 all str, 2 scalars,
    3 tuples of one arity of scalars or nested values (plus 8 times the arity), 4 nested lists and
    dicts. Returns None when msgpack would not keep the types.
    """

def pack_part(records: list[Any], begin: int, end: int, /) -> tuple[int, bytes] | None:
    """
    pack_part(records, begin, end) -> (code, msgpack) or None

    Packs records[begin:end] as `pack` does.
    """

def pack_frames(entries: dict[Any, Any], full: int, /) -> list[tuple[int, bytes]] | None:
    """
    pack_frames(entries, full) -> [(code, msgpack)] or None

    Packs a dict from scalars to nested values as several dicts of code 5, in the dict's order. Each of
    them ends soon after `full` bytes.
    """

def pack_value_frames(entries: dict[Any, Any], full: int, /) -> list[tuple[int, bytes]] | None:
    """
    pack_value_frames(entries, full) -> [(code, msgpack)] or None

    Packs the values of a dict as several lists, in the dict's order. Each of them ends soon after `full`
    bytes.
    """
