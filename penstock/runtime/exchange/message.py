"""Messages between workers: batches, barriers, watermarks, ends and grants of credit as bytes.

A message is a head and then the payload:

    kind u8 | flags u8 | codec u16 | channel u32 | stamp i64 | count u32 | generation u32
    (keyed: key codec u16 | key bytes u32)

`stamp` is the time at which the oldest record of the batch entered the job, by time.monotonic_ns() of this machine. For
a barrier it is the epoch, for a watermark its time, for a grant the number of bytes. One head for a list of records is
docs/papers.md: T4.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from penstock.runtime.records.batch import Batch, KeyedBatch
from penstock.runtime.records.codec import decode, encode
from penstock.runtime.records.userfunc import DeadLetter, ErrorHandler
from penstock.runtime.transport.base import Buffer

if TYPE_CHECKING:
    pass


DATA, END, CREDIT, BARRIER, WATERMARK = 1, 2, 3, 4, 5


KEYED, PARTIAL = 1, 2


HEAD = struct.Struct("<BBHIqII")


KEY_HEAD = struct.Struct("<HI")


GENERATION = struct.Struct("<I")


GENERATION_AT = HEAD.size - GENERATION.size


def encode_batch(
    channel: int, batch: Batch, stamp: int, errors: ErrorHandler, generation: int = 0
) -> tuple[Batch, tuple[bytes, ...]]:
    """Returns the records that can be encoded, and the parts of a data message of them. The others go to `errors`; when
    none is left, the message is of an empty batch."""
    try:
        return batch, _encode(channel, batch, stamp, generation)
    except Exception:  # the classes of the records decide what pickling them raises
        rest = _encodable(batch, errors)
        return rest, _encode(channel, rest, stamp, generation)


def _encode(channel: int, batch: Batch, stamp: int, generation: int) -> tuple[bytes, ...]:
    if isinstance(batch, KeyedBatch):
        flags = KEYED | (PARTIAL if batch.partial else 0)
        key_codec, keys = encode(batch.keys)
        codec, values = encode(batch.values)
        head = HEAD.pack(DATA, flags, codec, channel, stamp, len(batch), generation)
        return head + KEY_HEAD.pack(key_codec, len(keys)), keys, values
    codec, payload = encode(batch)
    return HEAD.pack(DATA, 0, codec, channel, stamp, len(batch), generation), payload


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


class Decoded(NamedTuple):
    """A decoded message. A message without records has no batch, and `stamp` is its epoch or the number of granted
    bytes."""

    kind: int
    channel: int
    stamp: int
    generation: int
    batch: Batch | None


def decode_batch(message: Buffer) -> Decoded:
    """Decodes a message. Nothing that is returned refers to the message's memory."""
    kind, flags, codec, channel, stamp, count, generation = HEAD.unpack_from(message)
    if kind != DATA:
        return Decoded(kind, channel, stamp, generation, None)
    view = memoryview(message)
    batch: Batch
    if flags & KEYED:
        key_codec, key_bytes = KEY_HEAD.unpack_from(message, HEAD.size)
        start = HEAD.size + KEY_HEAD.size
        keys = decode(key_codec, view[start : start + key_bytes])
        batch = KeyedBatch(keys, decode(codec, view[start + key_bytes :]), bool(flags & PARTIAL))
    else:
        batch = decode(codec, view[HEAD.size :])
    if len(batch) != count:
        raise AssertionError(f"channel {channel}: a message of {count} records decoded to {len(batch)}")
    return Decoded(kind, channel, stamp, generation, batch)
