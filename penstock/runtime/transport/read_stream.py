"""A stream that the receiver reads out of the sender's memory (docs/papers.md: W7, W8), as two state machines.

The sender puts frames into its send region, which is all that it does for a message. The receiver fetches them with
READs of that region, in which the sender's process takes no part. Beside the region stand the *words*: how far the
sender has published, and how many messages of the receiver it has processed. A READ of data is followed by a READ of
the words, so a receiver that is busy always knows how to go on. Only a receiver that has read everything must be told
of more, and it never asks by READs in a loop: it *arms* itself, and the sender answers an armed receiver once, as soon
as it has published more.

    receiver: READ data, READ words ... nothing more   -> ARMED, position
    sender:   (puts frames)                            -> head
    receiver: READ data, READ words ...

A READ leaves at once when none is under way. Otherwise it leaves when MMS_BYTES wait, or when the oldest byte has
waited WTL_S. (In the paper the sender cuts slices. Here it is the receiver, because it is the receiver that posts the
READs.)

What the receiver has decoded, it acknowledges in messages of the same kind as over TCP. Each message takes one of the
receives that the other end has posted. The receiver counts what the sender has processed, and stops before the receives
are used up, so no message ever finds none. The sender needs no count: it answers once for each ARMED.

Nothing here knows verbs, a socket, a thread or a clock, so that a test can let anything happen at any time. A
connection that breaks costs nothing but what was under way: `resume` begins again at the last frame that is complete.

The words are written after the bytes that they speak of. So a READ of the words that began after these stores sees
both, if the processor keeps the order of stores, as x86-64 does. On other processors the sender says that its words are
not to be trusted. Their receiver arms itself whenever it has read what it was told of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock.runtime.transport.base import Buffer
from penstock.runtime.transport.framing import ACKNOWLEDGEMENT, CLOSED, RECEIVED, BadFrame, FrameDecoder
from penstock.runtime.transport.send_region import WRAP
from penstock.runtime.transport.send_stream import SendStream

#: W8: a READ leaves when so many bytes wait (MMS in the paper), or when the oldest one has waited so long (WTL).
MMS_BYTES = 256 * 1024
WTL_S = 0.001

#: The receives that a sender posts for the receiver's messages. Acknowledgements are at least a 16th of the region
#: apart, and ARMED is answered before the next one: twice as many messages are never on their way.
RECEIVES = 64
#: So many READs may be under way. Each one takes a resource of the other end's device, which has 16 or more.
READS_MAX = 4

#: The words: the head, the number of messages that the sender has processed, and a check, because a READ is not bound
#: to copy all of them at the same instant.
WORDS = 3
WORDS_BYTES = 8 * WORDS
_CHECK = 0x9E37_79B9_7F4A_7C15

#: Added to RECEIVED or CLOSED: the receiver has read everything that it knows of, and must be told of more.
ARMED = 2


class Published:
    """The sending half, beside the SendStream that has the frames."""

    __slots__ = ("_words", "armed", "processed", "stream")

    def __init__(self, stream: SendStream, words: memoryview) -> None:
        """`words`: WORDS numbers of 64 bits, which the receiver can read."""
        self.stream = stream
        self._words = words
        self.armed = False
        self.processed = 0  # messages of the receiver, on this connection

    def disconnect(self) -> None:
        """The connection is gone."""
        self.armed = False
        self.processed = 0
        self.stream.disconnect()

    def publish(self) -> None:
        """Writes the words, after frames were put."""
        words, head, processed = self._words, self.stream.region.head, self.processed
        words[0] = head
        words[1] = processed
        words[2] = head ^ processed ^ _CHECK

    def take(self, position: int, said: int) -> None:
        """Takes a message of the receiver. Raises BadFrame for one that cannot be."""
        stream = self.stream
        stream.written = stream.region.head  # the receiver may have read everything
        stream.answered(ACKNOWLEDGEMENT.pack(position, said & ~ARMED))
        self.processed += 1
        self.armed = said & ARMED != 0
        self.publish()

    def answer(self) -> tuple[int, int] | None:
        """Returns the head and the number of messages processed, when the receiver needs a newer number."""
        region = self.stream.region
        # The receiver has acknowledged everything that it has read when it arms itself.
        if not self.armed or region.head == region.tail:
            return None
        self.armed = False
        return region.head, self.processed


class Read(NamedTuple):
    """A READ to be posted: so many bytes from a position of the stream, to a place in the landing buffer."""

    position: int
    size: int
    place: int


class ReadStream:
    """The receiving half. Bytes land in a buffer, in the order of the stream, and frames are decoded there."""

    def __init__(self, decoder: FrameDecoder, landing: memoryview) -> None:
        self.decoder = decoder
        self.closed = False  # this end takes nothing more
        self._landing = landing
        self.resume(0, False)

    def resume(self, capacity: int, words_trusted: bool) -> int:
        """Begins on a new connection, and returns the position from which the stream goes on. `capacity`: of the
        sender's region. `words_trusted`: whether the sender's processor keeps the order of stores."""
        position = self.decoder.position
        self._capacity = capacity
        self._words_trusted = words_trusted
        self._step = max(1, capacity // 16)
        self._known = self._requested = self._acknowledged = position
        self._under_way: deque[Read] = deque()
        self._start = self._stop = 0  # of what has landed and is not decoded
        self._waiting_since = 0.0
        self._armed = self._close_said = False
        self._sent = self._processed = 0  # messages to the sender
        return position

    @property
    def under_way(self) -> int:
        """The number of READs that are not complete."""
        return len(self._under_way)

    @property
    def waiting(self) -> int:
        """The number of bytes that are published, as far as is known, and that no READ was made for."""
        return (self._known - self._requested) & WRAP

    @property
    def landing_wanted(self) -> int:
        """The size of the landing buffer that the next frame needs, if the present one is too small."""
        wanted = self.decoder.wanted
        return wanted if wanted > len(self._landing) else 0

    def land_at(self, landing: memoryview) -> None:
        """Takes a larger landing buffer. No READ may be under way. Earlier messages are no longer valid."""
        assert not self._under_way
        size = self._stop - self._start
        landing[:size] = self._landing[self._start : self._stop]
        self._landing = landing
        self._start, self._stop = 0, size

    def told(self, head: int, processed: int, now: float) -> None:
        """The sender has answered ARMED. Raises BadFrame for an answer that cannot be."""
        if not self._armed:
            raise BadFrame("the sender has told of more without being asked")
        self._armed = False
        self._processed = processed
        self._learn(head, now)

    def saw(self, words: Sequence[int], now: float) -> None:
        """A READ of the words is complete."""
        head, processed, check = words
        if self._words_trusted and head ^ processed ^ _CHECK == check:
            self._processed = processed
            self._learn(head, now)

    def _learn(self, head: int, now: float) -> None:
        # What comes over one connection comes in order, so a head never goes back.
        more = (head - self._known) & WRAP
        if more > self._capacity - ((self._known - self.decoder.position) & WRAP) or self._processed > self._sent:
            raise BadFrame(
                f"the sender claims to be at {head}, with a region of {self._capacity:,} bytes, and to have processed "
                f"{self._processed} of {self._sent} messages; the receiver is at {self.decoder.position}"
            )
        if more and not self.waiting:
            self._waiting_since = now
        self._known = head

    def make_room(self) -> None:
        """Moves the beginning of a frame to the front, if the landing buffer has little room behind it. Earlier
        messages are no longer valid."""
        start, stop = self._start, self._stop
        if not self._under_way and start and len(self._landing) - stop < min(self.waiting, MMS_BYTES):
            self._landing[: stop - start] = bytes(self._landing[start:stop])
            self._start, self._stop = 0, stop - start

    def next_read(self, now: float) -> Read | None:
        """Returns the READ that leaves now, which is under way from then on."""
        waiting, under_way = self.waiting, self._under_way
        if not waiting or len(under_way) >= READS_MAX:
            return None
        if under_way and waiting < MMS_BYTES and now - self._waiting_since < WTL_S:
            return None
        size = min(waiting, MMS_BYTES, self._room())
        if size <= 0:
            return None
        read = Read(self._requested, size, len(self._landing) - self._room())
        under_way.append(read)
        self._requested = (self._requested + size) & WRAP
        self._waiting_since = now
        return read

    def due(self) -> float | None:
        """Returns the time at which a READ may leave that does not leave yet; None: it waits for something else."""
        waits = self.waiting and 0 < len(self._under_way) < READS_MAX and self._room() > 0
        return self._waiting_since + WTL_S if waits else None

    def _room(self) -> int:
        """Returns the number of free bytes after the bytes that have landed and the reads under way."""
        under_way = self._under_way
        last = under_way[-1].place + under_way[-1].size if under_way else self._stop
        return len(self._landing) - last

    def completed(self, messages: list[tuple[int, Buffer]]) -> None:
        """The oldest READ is complete. Appends the messages that are complete. Raises BadFrame."""
        self._stop += self._under_way.popleft().size
        self._start = self.decoder.decode(self._landing, self._start, self._stop, messages)

    def message(self) -> tuple[int, int] | None:
        """Returns a position and its flags, if the sender needs them now."""
        decoder = self.decoder
        position = decoder.position
        # No READ is under way then, whose words may tell of more.
        arm = not (self._armed or self.closed) and position == self._known
        close = self.closed and not self._close_said
        if not (arm or close or decoder.asked or ((position - self._acknowledged) & WRAP) >= self._step):
            return None
        if self._sent - self._processed >= RECEIVES:
            return None  # the sender processes what it has, and what comes later says all of it
        self._sent += 1
        self._acknowledged = position
        decoder.asked = False
        self._armed = self._armed or arm
        self._close_said = self.closed
        return position, (CLOSED if self.closed else RECEIVED) | (ARMED if arm else 0)
