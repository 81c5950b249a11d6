"""The send region: where a worker keeps what it has sent to a peer until the peer has received it (docs/papers.md: W7).

A region is a ring of bytes with two positions. `head` is where the next byte goes, and `tail` is the first byte that
the peer has not acknowledged. A message is copied into the region once. The transport sends it from there, or the peer
reads it from there, and after a broken connection it is sent from there again. So nothing refers to the caller's
buffers after a send, memory is bounded, and a region without room is the back-pressure of a slow peer.

Positions count bytes since the first one, modulo 2**64, so head and tail of the same value mean an empty region. The
capacity is a power of two, because only then does the byte at a position have one place, also where positions begin
anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.runtime.transport.base import Buffer

#: Positions and numbers are taken modulo 2**64.
WRAP = (1 << 64) - 1


class SendRegion:
    """See the module's docstring. Both positions begin at `position`."""

    __slots__ = ("_index", "_view", "capacity", "head", "tail")

    def __init__(self, capacity: int, position: int = 0) -> None:
        """`capacity`: a power of two."""
        if capacity <= 0 or capacity & (capacity - 1):
            raise ValueError(f"the capacity of a send region must be a power of two, not {capacity:,}")
        self.capacity = capacity
        self.head = self.tail = position & WRAP
        self._index = capacity - 1
        self._view = memoryview(bytearray(capacity))

    @property
    def view(self) -> memoryview:
        """All bytes of the region. Growing replaces them."""
        return self._view

    @property
    def outstanding(self) -> int:
        """The number of bytes that the peer has not acknowledged."""
        return (self.head - self.tail) & WRAP

    def put(self, parts: Sequence[Buffer], size: int) -> bool:
        """Appends parts of `size` bytes in all. Returns False, and appends nothing, when there is no room."""
        head = self.head
        if size > self.capacity - ((head - self.tail) & WRAP):
            return False
        at = head & self._index
        if at + size > self.capacity:
            self._put_around(at, parts)
        else:
            view = self._view
            for part in parts:
                stop = at + len(part)
                view[at:stop] = part
                at = stop
        self.head = (head + size) & WRAP
        return True

    def append(self, data: bytes) -> bool:
        """Appends some bytes; as `put`, but quicker for few of them."""
        head = self.head
        size = len(data)
        if size > self.capacity - ((head - self.tail) & WRAP):
            return False
        at = head & self._index
        if at + size <= self.capacity:
            self._view[at : at + size] = data
        else:
            self._put_around(at, (data,))
        self.head = (head + size) & WRAP
        return True

    def _put_around(self, at: int, parts: Sequence[Buffer]) -> None:
        view, capacity = self._view, self.capacity
        for part in parts:
            rest = memoryview(part)
            while rest:
                size = min(len(rest), capacity - at)
                view[at : at + size] = rest[:size]
                rest = rest[size:]
                at = (at + size) & self._index

    def between(self, start: int, stop: int) -> list[memoryview]:
        """Returns the bytes between two positions, in at most two pieces."""
        size = (stop - start) & WRAP
        at = start & self._index
        if not size:
            return []
        if at + size <= self.capacity:
            return [self._view[at : at + size]]
        return [self._view[at:], self._view[: at + size - self.capacity]]

    def holds(self, position: int) -> bool:
        """Whether a position is between tail and head."""
        return ((position - self.tail) & WRAP) <= ((self.head - self.tail) & WRAP)

    def grow(self, capacity: int) -> None:
        """Takes a larger capacity, and keeps positions and content."""
        grown = SendRegion(capacity, self.tail)
        grown.put(pieces := self.between(self.tail, self.head), sum(map(len, pieces)))
        self.capacity, self._index, self._view = capacity, grown._index, grown._view
