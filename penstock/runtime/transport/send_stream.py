"""The sending half of a stream between two workers: numbers, positions, acknowledgements and resending.

It knows no socket, no thread and no clock, so that a test can cut its connections at any byte. There are three
positions in the send region, in this order: the tail (everything before it is acknowledged), `written` (everything
before it was handed to the present connection), and the head. A new connection begins where the receiver says that it
is, so nothing is lost and nothing comes twice, wherever the last connection was cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.runtime.transport.base import Buffer
from penstock.runtime.transport.framing import (
    ACKNOWLEDGE,
    ACKNOWLEDGEMENT,
    CLOSED,
    FRAME_HEAD,
    HEAD_BYTES,
    LEFT,
    RECEIVED,
    BadFrame,
)
from penstock.runtime.transport.send_region import WRAP, SendRegion

#: A message of up to this size is copied once more, which is quicker than several steps for each of its parts.
SMALL_BYTES = 4096

_pack = FRAME_HEAD.pack


class SendStream:
    """See the module's docstring."""

    __slots__ = ("_asked_at", "_rest", "closed", "left", "number", "over", "region", "resumed", "written")

    def __init__(self, capacity: int, number: int = 0, position: int = 0) -> None:
        self.region = SendRegion(capacity, position)
        self.number = number & WRAP  # of the next frame
        self.written = self.region.head
        self.resumed = False  # the receiver has said on this connection where it is
        self.closed = False  # the receiver takes nothing more
        self.left = False  # LEFT is in the region
        self.over = False  # one of both: nothing more is sent
        self._rest = b""  # the beginning of an acknowledgement
        self._asked_at = -1  # the position after the last ACKNOWLEDGE

    def put(self, task: int, parts: Sequence[Buffer], size: int) -> bool:
        """Appends a frame. `size`: the number of bytes of the parts. Returns False when there is no room."""
        number = self.number
        if not self.region.put((_pack(size, task, number), *parts), size + HEAD_BYTES):
            return False
        self.number = (number + 1) & WRAP
        return True

    def put_small(self, task: int, parts: Sequence[Buffer], size: int) -> bytes | None:
        """As `put`, for a message of up to SMALL_BYTES. Returns the frame, or None when there is no room."""
        number = self.number
        data = b"".join((_pack(size, task, number), *parts))
        if not self.region.append(data):
            return None
        self.number = (number + 1) & WRAP
        return data

    def leave(self) -> bool:
        """Appends, once, the frame that says that nothing more comes. Returns False when there is no room."""
        self.left = self.left or self.put(LEFT, (), 0)
        self.over = self.over or self.left
        return self.left

    def ask(self) -> None:
        """Asks for an acknowledgement of everything, unless there is no need, or no room: an acknowledgement is due
        then."""
        region = self.region
        if region.head not in (region.tail, self._asked_at) and self.put(ACKNOWLEDGE, (), 0):
            self._asked_at = region.head

    def disconnect(self) -> None:
        """The connection is gone. The next one begins where the receiver says."""
        self.resumed = False
        self._rest = b""

    def answered(self, data: bytes) -> None:
        """Takes acknowledgements as they come over the connection. Raises BadFrame for one that cannot be."""
        data = self._rest + data
        size = ACKNOWLEDGEMENT.size
        whole = len(data) - len(data) % size
        self._rest = data[whole:]
        if not whole:
            return
        region = self.region
        if not self.resumed:
            position, said = ACKNOWLEDGEMENT.unpack_from(data)
            if not region.holds(position):
                raise BadFrame(f"the receiver is at {position}, and the sender between {region.tail} and {region.head}")
            self.written = position
            self.resumed = True
        # Acknowledgements are cumulative, so the last one says everything.
        position, said = ACKNOWLEDGEMENT.unpack_from(data, whole - size)
        if ((position - region.tail) & WRAP) > ((self.written - region.tail) & WRAP) or said not in (RECEIVED, CLOSED):
            raise BadFrame(f"an acknowledgement ({said}) of {position}, where only {self.written} was reached")
        region.tail = position
        if said == CLOSED:
            self.closed = self.over = True
