"""The frames of a stream between two workers, and the strict decoder of their heads.

A stream is what one worker sends to one other worker's process: frames one after the other, each with a head and a
body. The head has the length of the body, the task that the body is for, and the number of the frame. Numbers have no
gaps, so a frame that is missing or comes twice is seen. A head that does not fit ends the connection before any memory
is taken for its frame. Nothing of a body is decoded here.

The receiver answers with acknowledgements: the position in the stream up to which it has received everything. The first
acknowledgement of each connection is the position from which the sender continues.
"""

from __future__ import annotations

import struct

from penstock.runtime.errors import PenstockError
from penstock.runtime.transport.base import Buffer
from penstock.runtime.transport.send_region import WRAP

#: The length of the body, the task, the number of the frame.
FRAME_HEAD = struct.Struct("<IIQ")
HEAD_BYTES = FRAME_HEAD.size

#: A position, and what it says: RECEIVED or CLOSED.
ACKNOWLEDGEMENT = struct.Struct("<QQ")
RECEIVED = 0
CLOSED = 1  # the receiver takes nothing more

#: The number of bytes of the largest body.
LARGEST_BODY = 128 * 1024 * 1024

#: The "tasks" of the transport's own frames, which have no body. Those of workers are smaller.
FIRST_OWN = 0xFFFF_FFF0
LEFT = 0xFFFF_FFFC  # the sender sends nothing more
ACKNOWLEDGE = 0xFFFF_FFFB  # the sender waits for an acknowledgement

# A body of up to this size is copied, because a view costs more.
_SMALL_BYTES = 4096


class BadFrame(PenstockError):
    """A peer has sent a frame, or an acknowledgement, that cannot be part of its stream. Its connection is closed."""


class FrameDecoder:
    """The bytes received of one stream: the number of the next frame, and the position after the last one."""

    __slots__ = ("asked", "left", "limit", "number", "position", "wanted")

    def __init__(self, limit: int = LARGEST_BODY, number: int = 0, position: int = 0) -> None:
        """`limit`: the number of bytes of the largest body."""
        self.limit = limit
        self.number = number & WRAP
        self.position = position & WRAP
        self.wanted = 0  # the size of the frame that is not complete yet; 0: not known
        self.asked = False  # the sender waits for an acknowledgement; who sends it sets this to False
        self.left = False

    def decode(self, view: memoryview, start: int, stop: int, messages: list[tuple[int, Buffer]]) -> int:
        """Appends the (task, body) of each frame that is complete between `start` and `stop`. Returns where the first
        frame begins that is not complete. Raises BadFrame for a head that cannot be."""
        unpack, head_bytes, limit, append = FRAME_HEAD.unpack_from, HEAD_BYTES, self.limit, messages.append
        begin, expected = start, self.number
        self.wanted = 0
        try:
            while stop - start >= head_bytes:
                length, task, number = unpack(view, start)
                if number != expected or length > limit or task >= FIRST_OWN:
                    self._check(length, task, number, expected)
                body = start + head_bytes
                end = body + length
                if end > stop:
                    self.wanted = head_bytes + length
                    break
                if task >= FIRST_OWN:
                    self._take_own(task)
                else:
                    append((task, view[body:end].tobytes() if length <= _SMALL_BYTES else view[body:end]))
                expected = (expected + 1) & WRAP
                start = end
        finally:  # what came before a bad frame has been received, and must not come again
            self.number = expected
            self.position = (self.position + start - begin) & WRAP
        return start

    def _check(self, length: int, task: int, number: int, expected: int) -> None:
        if number != expected:
            raise BadFrame(f"frame {number} came where frame {expected} was due")
        if length > self.limit:
            raise BadFrame(f"a frame claims {length:,} bytes; the most is {self.limit:,}")
        if task not in (LEFT, ACKNOWLEDGE) or length:
            raise BadFrame(f"a frame of {length:,} bytes is for task {task:,}, which cannot be")

    def _take_own(self, task: int) -> None:
        self.asked = True
        if task == LEFT:
            self.left = True
