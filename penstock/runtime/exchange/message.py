"""Messages between workers: batches, barriers, watermarks, ends and grants of credit as bytes.

A message says for whom it is, and then what it is:

    address   destinations u16 | marks u16 | number u32, and then for each destination
              channel u32 | generation u32
    body      kind u8 | flags u8 | codec u16 | count u32 | stamp i64
              (keyed: key codec u16 | key bytes u32)
              payload

The *body* does not depend on the receiver. It is made once, however many tasks, workers and nodes it goes to, and is
kept and sent as it is (docs/papers.md: W2). The *address* is made for each send. It names the channels of one worker,
or of one node, for which the body is, each with the generation in which its receiver expects it: 8 bytes a task. Who
forwards a message can read the address alone (`read_address`) and pass the body on unread.

`number` counts the entries of the log that the message comes from (runtime/exchange/log.py), modulo 2**32. So each
receiver sees when a message is missing or comes twice. The first message of a generation has the mark FIRST, because
the receiver cannot know at which number a replay begins. The same mark says that entries before this one were dropped,
because an epoch is complete and nobody needs them. A body that is larger than its receiver can take comes in
*pieces*, which have the same number. All pieces but the last have the mark MORE, and the upper byte of the marks counts
the pieces. The mark ANY_WAY says that the messages of this channel may come by several ways, straight from their sender
and through a relay. They may come twice and in another order then, and the receiver sorts them by their numbers.

`stamp` is the time at which the oldest record of the batch entered the job, by time.monotonic_ns() of the machine of
the task that sends the batch. The receiver translates the stamp to the clock of its own machine. For
a barrier it is the epoch, for a watermark its time, for a grant the number of bytes. One head for a list of records is
docs/papers.md: T4.

Messages may come over networks. So a message that does not keep to this format raises BadMessage, and nothing of it is
used.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from penstock.runtime.errors import CodecError
from penstock.runtime.records.batch import Batch, KeyedBatch
from penstock.runtime.records.codec import decode, encode
from penstock.runtime.records.userfunc import DeadLetter, ErrorHandler
from penstock.runtime.transport.base import Buffer

DATA, END, CREDIT, BARRIER, WATERMARK = 1, 2, 3, 4, 5
KEYED, PARTIAL = 1, 2
FIRST, MORE, ANY_WAY = 1, 2, 4

BODY = struct.Struct("<BBHIq")
_KEYS = struct.Struct("<HI")
_ADDRESS = struct.Struct("<HHI")
_DESTINATION = struct.Struct("<II")
#: The address of a message with one destination: 1, marks, number, channel, generation.
ADDRESS_OF_ONE = struct.Struct("<HHIII")
#: The same, and then the head of the body: kind, flags, codec, count, stamp.
WHOLE = struct.Struct("<HHIIIBBHIq")

#: The number of bytes of an address: the fixed part, and what each destination adds.
ADDRESS_BYTES, DESTINATION_BYTES = _ADDRESS.size, _DESTINATION.size

#: The bits of a number in a message.
NUMBERS_MASK = 0xFFFF_FFFF

#: The greatest number of pieces of a body.
PIECES_MAX = 256

#: A channel and a generation.
Destination = tuple[int, int]


class BadMessage(CodecError):
    """A message does not keep to the format. Its sender may run another release of Penstock, or is no Penstock."""


def address(destinations: Sequence[Destination], number: int, marks: int = 0, piece: int = 0) -> bytes:
    fields = [field for destination in destinations for field in destination]
    head = _ADDRESS.pack(len(destinations), marks | piece << 8, number & NUMBERS_MASK)
    return head + struct.pack(f"<{len(fields)}I", *fields)


def pack_destinations(destinations: Sequence[Destination]) -> bytes:
    """Returns the part of an address that names the destinations."""
    return b"".join(_DESTINATION.pack(*destination) for destination in destinations)


def packed_address(count: int, destinations: bytes, number: int, marks: int) -> bytes:
    return _ADDRESS.pack(count, marks, number) + destinations


def signal(kind: int, stamp: int) -> bytes:
    return BODY.pack(kind, 0, 0, 0, stamp)


def credit(channel: int, generation: int, granted: int) -> tuple[bytes, ...]:
    """Returns the parts of a message that grants credit for this many bytes."""
    return (WHOLE.pack(1, 0, 0, channel, generation, CREDIT, 0, 0, 0, granted),)


def encode_body(batch: Batch, stamp: int, errors: ErrorHandler) -> tuple[Batch, tuple[bytes, ...]]:
    """Returns the records that can be encoded, and the parts of a body of them. The others go to `errors`; when none is
    left, the body is of an empty batch."""
    try:
        return batch, _encode(batch, stamp)
    except Exception:  # the classes of the records decide what pickling them raises
        rest = _encodable(batch, errors)
        return rest, _encode(rest, stamp)


def _encode(batch: Batch, stamp: int) -> tuple[bytes, ...]:
    if isinstance(batch, KeyedBatch):
        flags = KEYED | (PARTIAL if batch.partial else 0)
        key_codec, keys = encode(batch.keys)
        codec, values = encode(batch.values)
        head = BODY.pack(DATA, flags, codec, len(batch), stamp)
        return head + _KEYS.pack(key_codec, len(keys)), keys, values
    codec, payload = encode(batch)
    return BODY.pack(DATA, 0, codec, len(batch), stamp), payload


def _encodable(batch: Batch, errors: ErrorHandler) -> Batch:
    """Returns the records that can be encoded one by one. A dead letter whose record cannot be encoded gets a
    description of the record instead."""
    kept: list[int] = []
    values = list(batch.values if isinstance(batch, KeyedBatch) else batch)
    for i, value in enumerate(values):
        if isinstance(value, DeadLetter):
            values[i] = _travelling(value)
        try:
            encode([values[i]])
            if isinstance(batch, KeyedBatch):
                encode([batch.keys[i]])
        except Exception as error:  # the class of the record decides what pickling it raises
            errors.handle(value, error)
        else:
            kept.append(i)
    if isinstance(batch, KeyedBatch):
        return KeyedBatch([batch.keys[i] for i in kept], [values[i] for i in kept], batch.partial)
    return [values[i] for i in kept]


def _travelling(letter: DeadLetter) -> DeadLetter:
    try:
        encode([letter])
    except Exception:  # the failed record in the dead letter may be anything
        return letter.shortened()
    return letter


class Head(NamedTuple):
    """The head of a message, before its payload. `body_bytes` is the size of the body, which is what the message costs
    of a credit window. The payload begins at `payload_at`."""

    kind: int
    stamp: int
    number: int
    marks: int
    piece: int
    destinations: tuple[Destination, ...]
    flags: int
    codec: int
    records: int
    body_bytes: int
    payload_at: int


def read_address(message: Buffer) -> tuple[tuple[Destination, ...], int]:
    """Returns the destinations of a message, and where its body begins."""
    size = len(message)
    if size < ADDRESS_BYTES:
        raise BadMessage(f"a message of {size} bytes is too short for an address")
    count, marks, _ = _ADDRESS.unpack_from(message)
    at = ADDRESS_BYTES + count * DESTINATION_BYTES
    if not count:
        raise BadMessage("a message is for nobody")
    if at + BODY.size > size:
        raise BadMessage(f"a message of {size} bytes says that it has {count:,} destinations")
    if marks & 0xFF & ~(FIRST | MORE | ANY_WAY) or (marks > 0xFF and marks & FIRST):
        raise BadMessage(f"a message has the marks {marks:#x}")
    fields = struct.unpack_from(f"<{2 * count}I", message, ADDRESS_BYTES)
    return tuple(zip(fields[::2], fields[1::2], strict=True)), at


def read_head(message: Buffer) -> Head:
    """Reads a message up to its payload. Raises BadMessage for what is no message."""
    destinations, body_at = read_address(message)
    _, marks, number = _ADDRESS.unpack_from(message)
    kind, flags, codec, records, stamp = BODY.unpack_from(message, body_at)
    payload_at = body_at + BODY.size
    size = len(message)
    if kind != DATA and (not END <= kind <= WATERMARK or flags or codec or records or size != payload_at):
        raise BadMessage(f"a message of kind {kind} and {size} bytes has the flags {flags} and {records:,} records")
    return Head(
        kind,
        stamp,
        number,
        marks & 0xFF,
        marks >> 8,
        destinations,
        flags,
        codec,
        records,
        size - body_at,
        payload_at,
    )


def decode_payload(message: Buffer, head: Head) -> Batch:
    """Decodes the records of a message. Nothing that is returned refers to the message's memory."""
    return decode_records(message, head.flags, head.codec, head.records, head.payload_at)


def decode_body(body: Buffer) -> Batch:
    """Decodes the records of a body that this process has made."""
    _, flags, codec, count, _ = BODY.unpack_from(body)
    return decode_records(body, flags, codec, count, BODY.size)


def decode_records(message: Buffer, flags: int, codec: int, count: int, at: int) -> Batch:
    """Decodes the records of a message, of which the head of the body says flags, codec and number. The payload begins
    at `at`."""
    view = memoryview(message)
    batch: Batch
    if flags:
        if flags not in (KEYED, KEYED | PARTIAL):
            raise BadMessage(f"a message has the flags {flags}")
        if at + _KEYS.size > len(view):
            raise BadMessage(f"a message of {len(view)} bytes is too short for keys")
        key_codec, key_bytes = _KEYS.unpack_from(message, at)
        at += _KEYS.size
        if at + key_bytes > len(view):
            raise BadMessage(f"a message of {len(view)} bytes says that its keys have {key_bytes:,} bytes")
        keys = decode(key_codec, view[at : at + key_bytes])
        values = decode(codec, view[at + key_bytes :])
        if len(keys) != len(values):
            raise BadMessage(f"a message has {len(keys):,} keys and {len(values):,} values")
        batch = KeyedBatch(keys, values, bool(flags & PARTIAL))
    else:
        batch = decode(codec, view[at:])
    if len(batch) != count:
        raise BadMessage(f"a message of {count:,} records decoded to {len(batch):,}")
    return batch
