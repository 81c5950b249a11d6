"""The parts of a stream: the send region, the frames and their decoder, and what happens when connections are cut."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.transport.base import Buffer
from penstock.runtime.transport.framing import (
    ACKNOWLEDGE,
    ACKNOWLEDGEMENT,
    FRAME_HEAD,
    HEAD_BYTES,
    LEFT,
    RECEIVED,
    BadFrame,
    FrameDecoder,
)
from penstock.runtime.transport.send_region import WRAP, SendRegion
from penstock.runtime.transport.send_stream import SendStream
from tests.transport import stream_model

NEAR_THE_END = (1 << 64) - 100

# --- the send region --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0, -8, 3, 1000])
def test_a_capacity_is_a_power_of_two(capacity: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        SendRegion(capacity)


@given(st.integers(0, 1 << 32), st.sampled_from((0, 77, NEAR_THE_END)))
def test_a_region_gives_back_what_was_put_into_it(seed: int, first: int) -> None:
    """Beside a plain string of bytes, also where positions begin anew."""
    rng = random.Random(seed)
    region = SendRegion(64, first)
    kept, tail = b"", first
    for _ in range(200):
        parts = [rng.randbytes(rng.randint(0, 12)) for _ in range(rng.randint(0, 4))]
        new = b"".join(parts)
        assert region.put(parts, len(new)) is (len(kept) + len(new) <= region.capacity)
        if len(kept) + len(new) <= region.capacity:
            kept += new
        assert region.outstanding == len(kept)
        start, stop = sorted(rng.randint(0, len(kept)) for _ in range(2))
        pieces = region.between(tail + start & WRAP, tail + stop & WRAP)
        assert len(pieces) <= 2
        assert b"".join(pieces) == kept[start:stop]
        if rng.random() < 0.5:
            size = rng.randint(0, len(kept))
            kept, tail = kept[size:], tail + size & WRAP
            region.tail = tail
        if rng.random() < 0.02 and region.capacity < 1024:
            region.grow(2 * region.capacity)


def test_what_the_region_holds() -> None:
    region = SendRegion(64, NEAR_THE_END)
    region.put((b"abc",), 3)
    for position in (NEAR_THE_END - 1, NEAR_THE_END + 4, 0):
        assert not region.holds(position)
    assert region.holds(NEAR_THE_END + 3)


# --- frames -----------------------------------------------------------------------------------------------------------


def frame(number: int, task: int = 0, body: bytes = b"", claimed: int | None = None) -> bytes:
    """One frame. `claimed`: the length that its head says."""
    return FRAME_HEAD.pack(len(body) if claimed is None else claimed, task, number & WRAP) + body


def decode(decoder: FrameDecoder, data: bytes) -> tuple[int, list[tuple[int, bytes]]]:
    """The number of bytes that were decoded, and the messages."""
    messages: list[tuple[int, Buffer]] = []
    stop = decoder.decode(memoryview(data), 0, len(data), messages)
    return stop, [(task, bytes(body)) for task, body in messages]


@given(st.lists(st.binary(max_size=40), max_size=20), st.data(), st.sampled_from((0, NEAR_THE_END + 90)))
def test_frames_come_out_as_they_went_in_wherever_they_are_split(
    bodies: list[bytes], data: st.DataObject, first: int
) -> None:
    decoder = FrameDecoder(1000, first, first)
    stream = b"".join(frame(first + i, i, body) for i, body in enumerate(bodies))
    got: list[tuple[int, bytes]] = []
    rest = b""
    at = 0
    while at < len(stream):
        size = data.draw(st.integers(1, len(stream) - at))
        rest += stream[at : at + size]
        at += size
        stop, messages = decode(decoder, rest)
        got += messages
        rest = rest[stop:]
        if len(rest) >= HEAD_BYTES:
            assert decoder.wanted == HEAD_BYTES + FRAME_HEAD.unpack_from(rest)[0]
    assert got == list(enumerate(bodies))
    assert decoder.number == (first + len(bodies)) & WRAP
    assert decoder.position == (first + len(stream)) & WRAP


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (frame(8), "frame 8 came where frame 7 was due"),
        (frame(6), "frame 6 came where frame 7 was due"),
        (frame(7, claimed=1001), "claims 1,001 bytes"),
        (frame(7, claimed=0xFFFF_FFFF), "claims 4,294,967,295 bytes"),
        (frame(7, task=0xFFFF_FFFF), "which cannot be"),
        (frame(7, task=LEFT, body=b"x"), "which cannot be"),
    ],
)
def test_a_head_that_cannot_be_is_refused(wrong: bytes, why: str) -> None:
    """What came before it has been received, so that it does not come again."""
    decoder = FrameDecoder(1000, 6, 100)
    messages: list[tuple[int, Buffer]] = []
    data = memoryview(frame(6, 1, b"good") + wrong)
    with pytest.raises(BadFrame, match=why):
        decoder.decode(data, 0, len(data), messages)
    assert messages == [(1, b"good")]
    assert (decoder.number, decoder.position, decoder.wanted) == (7, 120, 0)


@given(st.binary(max_size=200), st.integers(0, 3))
def test_random_bytes_are_refused_or_wait_for_more(noise: bytes, good: int) -> None:
    """Nothing is ever decoded that has not the number that is due, and a frame never waits for more than the limit."""
    decoder = FrameDecoder(64)
    messages: list[tuple[int, Buffer]] = []
    data = memoryview(b"".join(frame(i) for i in range(good)) + noise)
    with suppress(BadFrame):
        decoder.decode(data, 0, len(data), messages)
    assert decoder.wanted <= 64 + HEAD_BYTES
    assert len(messages) >= good
    at = 0
    for number, (task, body) in enumerate(messages):
        assert FRAME_HEAD.unpack_from(data, at) == (len(body), task, number)
        at += HEAD_BYTES + len(body)


def test_the_transports_own_frames_are_no_messages() -> None:
    decoder = FrameDecoder()
    assert decode(decoder, frame(0, 5, b"x") + frame(1, ACKNOWLEDGE) + frame(2, 6, b"y"))[1] == [(5, b"x"), (6, b"y")]
    assert decoder.asked
    assert not decoder.left
    decode(decoder, frame(3, LEFT))
    assert decoder.left


# --- acknowledgements -------------------------------------------------------------------------------------------------


def connected(first: int = 0) -> SendStream:
    """A stream with three frames of 20 bytes, of which the connection has taken two."""
    stream = SendStream(4096, first, first)
    for _ in range(3):
        stream.put(0, (b"1234",), 4)
    stream.answered(ACKNOWLEDGEMENT.pack(first, RECEIVED))
    stream.written = (first + 40) & WRAP
    return stream


@pytest.mark.parametrize("first", [0, NEAR_THE_END + 70])
def test_an_acknowledgement_frees_the_region(first: int) -> None:
    stream = connected(first)
    stream.answered(ACKNOWLEDGEMENT.pack(first + 40 & WRAP, RECEIVED))
    assert stream.region.outstanding == 20


@pytest.mark.parametrize(
    ("position", "said"), [(41, RECEIVED), (60, RECEIVED), (WRAP, RECEIVED), (1 << 40, 0), (20, 7)]
)
def test_an_acknowledgement_that_cannot_be_is_refused(position: int, said: int) -> None:
    """Of bytes that were not sent, or of something that it cannot say."""
    stream = connected()
    with pytest.raises(BadFrame):
        stream.answered(ACKNOWLEDGEMENT.pack(position, said))
    assert stream.region.outstanding == 60


@pytest.mark.parametrize("position", [61, WRAP])
def test_a_receiver_that_is_where_the_stream_never_was_is_refused(position: int) -> None:
    stream = connected()
    stream.disconnect()
    with pytest.raises(BadFrame):
        stream.answered(ACKNOWLEDGEMENT.pack(position, RECEIVED))


def test_a_new_connection_goes_on_where_the_receiver_is() -> None:
    """It has received more than it had acknowledged."""
    stream = connected()
    stream.answered(ACKNOWLEDGEMENT.pack(20, RECEIVED)[:10])
    stream.disconnect()
    stream.answered(ACKNOWLEDGEMENT.pack(40, RECEIVED))
    assert b"".join(stream.region.between(stream.written, stream.region.head)) == frame(2, 0, b"1234")
    assert stream.region.outstanding == 20


# --- connections that are cut -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(4))
def test_nothing_is_lost_doubled_or_reordered_wherever_connections_are_cut(block: int) -> None:
    base = random.SystemRandom().randrange(1 << 30)
    for seed in range(base, base + 60):
        stream_model.check(seed)
