"""Streams that are read out of the sender's memory, over verbs that a model plays: READs and messages take their time,
the sender stands still, connections break anywhere. Everything arrives once and in order, no message finds no receive,
and no READ touches bytes that the sender may overwrite."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from penstock.runtime.transport import read_stream
from penstock.runtime.transport.base import Buffer
from penstock.runtime.transport.framing import FRAME_HEAD, HEAD_BYTES, RECEIVED, BadFrame, FrameDecoder
from penstock.runtime.transport.read_stream import ARMED, MMS_BYTES, RECEIVES, WTL_S, Published, Read, ReadStream
from penstock.runtime.transport.send_region import WRAP
from penstock.runtime.transport.send_stream import SendStream

STEPS = 400
#: Positions begin here in half of the seeds, so that they wrap soon.
NEAR_THE_END = WRAP - 5000


@dataclass
class Posted:
    """A READ of data and words, as a device carries it out: it copies at one time and completes later."""

    read: Read
    words: list[int] | None = None


@dataclass
class Wire:
    """A sender, a receiver and the connection between them."""

    chance: random.Random
    trusted: bool = True
    first: int = 0
    capacity: int = 4096
    landing: int = 1024
    now: float = 0.0
    sent: int = 0
    received: list[tuple[int, bytes]] = field(default_factory=list)
    expected: list[tuple[int, bytes]] = field(default_factory=list)
    standing: bool = False  # the sender's process is stopped

    def __post_init__(self) -> None:
        self.stream = SendStream(self.capacity, self.first, self.first)
        self.words = memoryview(bytearray(read_stream.WORDS_BYTES)).cast("Q")
        self.sender = Published(self.stream, self.words)
        self.receiver = ReadStream(FrameDecoder(1 << 20, self.first, self.first), memoryview(bytearray(self.landing)))
        self.connect()

    def connect(self) -> None:
        """Begins a connection; what was on its way is gone."""
        self.sender.disconnect()
        self.sender.publish()
        self.reads: deque[Posted] = deque()
        self.to_sender: deque[tuple[int, int]] = deque()
        self.to_receiver: deque[tuple[int, int]] = deque()
        self.receiver.resume(self.stream.region.capacity, self.trusted)
        self.act()

    def put(self, size: int) -> bool:
        body = self.chance.randbytes(size)
        task = self.chance.randrange(1000)
        if not self.stream.put(task, (body[: size // 3], body[size // 3 :]), size):
            return False
        self.expected.append((task, body))
        self.sender.publish()
        self.tell()
        return True

    def tell(self) -> None:
        answer = self.sender.answer()
        if answer is not None:
            self.to_receiver.append(answer)
            assert len(self.to_receiver) == 1, "the receiver has one receive for an answer"

    def act(self) -> None:
        """The receiver posts what is due."""
        while (read := self.receiver.next_read(self.now)) is not None:
            self.reads.append(Posted(read))
        while (message := self.receiver.message()) is not None:
            self.to_sender.append(message)
            assert len(self.to_sender) <= RECEIVES, "a message finds no receive"

    def copy(self, posted: Posted) -> None:
        """The sender's device answers a READ."""
        read = posted.read
        region = self.stream.region
        assert ((read.position - region.tail) & WRAP) + read.size <= region.outstanding, "a READ of bytes that are free"
        content = b"".join(region.between(read.position, (read.position + read.size) & WRAP))
        self.receiver._landing[read.place : read.place + read.size] = content
        # A processor that does not keep the order of stores may show the words before the bytes.
        posted.words = list(self.words if self.trusted else words(region.head + 50))

    def turn(self) -> None:
        """What a call of the transport's `receive` does with one completion."""
        messages: list[tuple[int, Buffer]] = []
        self.receiver.make_room()
        if self.receiver.landing_wanted and not self.receiver.under_way:
            self.receiver.land_at(memoryview(bytearray(2 * self.receiver.landing_wanted)))
        if self.reads and self.reads[0].words is not None:
            posted = self.reads.popleft()
            self.receiver.completed(messages)
            self.receiver.saw(posted.words, self.now)
        elif self.to_receiver:
            self.receiver.told(*self.to_receiver.popleft(), self.now)
        self.received += [(task, bytes(body)) for task, body in messages]
        self.act()

    def serve(self) -> None:
        """What the sender's process does with one message."""
        if self.to_sender and not self.standing:
            self.sender.take(*self.to_sender.popleft())
            self.tell()

    def step(self) -> None:
        """Lets something happen."""
        kind = self.chance.random()
        if kind < 0.3 and not self.standing:
            self.put(self.chance.choice((0, 1, 17, 100, 700, 1900)))
        elif kind < 0.5:
            waiting = [posted for posted in self.reads if posted.words is None]
            if waiting:
                self.copy(waiting[0])
        elif kind < 0.7:
            self.turn()
        elif kind < 0.9:
            self.serve()
        elif kind < 0.96:
            self.now += self.chance.random() * 2 * WTL_S
            self.act()
        elif kind < 0.98:
            self.standing = not self.standing
        elif kind < 0.985:
            self.connect()

    def settle(self) -> None:
        """Lets everything happen that can, without the sender's process if it stands still."""
        for _ in range(100_000):
            before = (len(self.received), len(self.reads), len(self.to_sender), len(self.to_receiver))
            for posted in self.reads:
                if posted.words is None:
                    self.copy(posted)
            self.now += 2 * WTL_S
            self.turn()
            self.serve()
            after = (len(self.received), len(self.reads), len(self.to_sender), len(self.to_receiver))
            if before == after and not self.reads and not self.to_receiver:
                return
        raise AssertionError("it does not come to rest")


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_everything_arrives_once_and_in_order(seed: int, trusted: bool) -> None:
    chance = random.Random(seed)
    wire = Wire(chance, trusted, first=chance.choice((0, NEAR_THE_END)), landing=chance.choice((64, 1024, 16384)))
    for _ in range(STEPS):
        wire.step()
    wire.standing = False
    wire.settle()
    assert wire.received == wire.expected
    assert wire.stream.region.outstanding <= max(1, wire.capacity // 16)
    for size in (5, 1500, 9):  # and it goes on
        assert wire.put(size)
        wire.settle()
    assert wire.received == wire.expected


def test_what_is_published_arrives_while_the_sender_stands_still() -> None:
    wire = Wire(random.Random(1), capacity=1 << 20, landing=1 << 16)
    wire.settle()
    assert wire.put(100)
    wire.standing = True
    # The receiver was told of the first frame only. The words of its READs tell it of the others.
    while wire.put(2000):
        pass
    wire.settle()
    assert len(wire.received) > 500
    assert wire.received == wire.expected


def told(receiver: ReadStream, head: int, now: float) -> None:
    assert receiver.message() == (0, ARMED)
    receiver.told(head, 0, now)


def receiver() -> ReadStream:
    made = ReadStream(FrameDecoder(), memoryview(bytearray(4 * MMS_BYTES)))
    made.resume(64 * MMS_BYTES, True)
    return made


def test_a_read_leaves_at_once_when_none_is_under_way() -> None:
    one = receiver()
    told(one, 17, 5.0)
    assert one.next_read(5.0) == Read(0, 17, 0)
    assert one.next_read(5.0) is None


def words(head: int) -> tuple[int, int, int]:
    return head, 0, head ^ read_stream._CHECK


def test_while_one_is_under_way_a_read_waits_for_mms_or_wtl() -> None:
    one = receiver()
    told(one, 2 * MMS_BYTES + 10, 5.0)
    assert one.next_read(5.0) == Read(0, MMS_BYTES, 0)
    assert one.next_read(5.0) == Read(MMS_BYTES, MMS_BYTES, MMS_BYTES)  # MMS bytes were waiting
    assert one.next_read(5.0) is None
    assert one.due() == 5.0 + WTL_S
    assert one.next_read(5.0 + 0.9 * WTL_S) is None
    assert one.next_read(5.0 + WTL_S) == Read(2 * MMS_BYTES, 10, 2 * MMS_BYTES)
    assert one.due() is None


def test_the_wait_begins_with_the_oldest_byte() -> None:
    one = receiver()
    told(one, 100, 5.0)
    one.next_read(5.0)
    one.saw(words(200), 6.0)
    one.saw(words(300), 6.0 + 0.9 * WTL_S)
    assert one.next_read(6.0 + WTL_S) == Read(100, 200, 100)


def test_torn_words_are_not_believed() -> None:
    one = receiver()
    told(one, 100, 5.0)
    head, processed, check = words(200)
    one.saw((head + 1, processed, check), 5.0)
    assert one.waiting == 100


@pytest.mark.parametrize("head", [64 * MMS_BYTES + 1, WRAP])
def test_a_head_that_cannot_be_is_refused(head: int) -> None:
    one = receiver()
    with pytest.raises(BadFrame, match="claims to be at"):
        told(one, head, 5.0)


def test_an_answer_that_nobody_asked_for_is_refused() -> None:
    one = receiver()
    told(one, 17, 5.0)
    with pytest.raises(BadFrame, match="without being asked"):
        one.told(18, 0, 5.0)


def test_an_acknowledgement_of_bytes_that_were_not_published_is_refused() -> None:
    wire = Wire(random.Random(1))
    wire.settle()
    assert wire.put(100)
    with pytest.raises(BadFrame):
        wire.sender.take(500, 0)


def test_a_receiver_that_is_never_idle_acknowledges_each_16th_of_the_region() -> None:
    one = receiver()
    told(one, 8 * MMS_BYTES, 5.0)
    for number in range(4):
        while one.next_read(5.0) is not None:
            pass
        one._landing[number * MMS_BYTES :][:HEAD_BYTES] = FRAME_HEAD.pack(MMS_BYTES - HEAD_BYTES, 3, number)
        one.completed([])
        assert one.message() == (None if number < 3 else (4 * MMS_BYTES, RECEIVED))


def test_the_end_of_the_inbox_is_said_once() -> None:
    wire = Wire(random.Random(1))
    wire.settle()
    wire.receiver.closed = True
    wire.act()
    wire.settle()
    assert wire.stream.closed
    assert wire.receiver.message() is None
