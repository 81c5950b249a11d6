"""Lists of records as bytes and back, one call for a whole list.

What comes out equals what went in and has the same types, at every depth: a tuple never becomes a list, an
IntEnum never an int. So the quick format (msgpack) is used only for lists whose types it keeps, which the
native pass that packs a list finds out; everything else is pickled. The choice is made for each list and travels
beside it as a small number, so the two ends of an edge need not agree on anything beforehand.

Decoding copies: nothing returned may refer to the payload, which can be shared memory about to be reused.
One object referred to by two records of a list may come out as two equal objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeAlias

import msgspec

from penstock.runtime._native import pack, pack_frames, pack_part, pack_value_frames
from penstock.runtime.errors import CodecError, shorten
from penstock.runtime.records.pickling import dumps, loads

Buffer: TypeAlias = bytes | bytearray | memoryview

# Kinds of lists, as the native pack() numbers them: the low bits of a code. Codes travel in messages and
# fit 16 bits. All but PICKLE are msgpack.
PICKLE = 0  # anything that can be pickled
TEXT = 1  # all str
SCALARS = 2  # None, bool, int of 64 bits, float, str, bytes
TUPLES = 3  # tuples of one arity, of scalars or nested values; the arity is in the code's higher bits
NESTED = 4  # lists of, and dicts from str to, scalars or such lists and dicts
MAP = 5  # not a list: a dict from scalars to nested values
KIND_BITS = 3
MOST_ARITY = 255

#: What is encoded in frames has about so many bytes in each (more, where a single record has), so that who reads it has
#: little more in memory than what comes out.
FRAME_BYTES = 2 << 20
_FIRST_RECORDS = 256  # of a frame, while it is not known how large they are

#: A list or a dict as bytes, behind the code to decode it with.
Encoded: TypeAlias = tuple[int, bytes]

_Decode: TypeAlias = Callable[[Buffer], list[Any]]

_decode_any: _Decode = msgspec.msgpack.Decoder(list[Any]).decode
_decode_map: Callable[[Buffer], dict[Any, Any]] = msgspec.msgpack.Decoder(dict[Any, Any]).decode
# Grows by one decoder for each arity seen, at most MOST_ARITY.
_decoders: dict[int, _Decode] = {
    PICKLE: loads,
    TEXT: msgspec.msgpack.Decoder(list[str]).decode,
    SCALARS: _decode_any,
    NESTED: _decode_any,
}


def encode(records: list[Any]) -> tuple[int, bytes]:
    """Encode a list of records; returns the code to decode with and the payload.

    Raises CodecError naming the first record that cannot be encoded.
    """
    packed = pack(records)
    if packed is not None:
        return packed
    try:
        return PICKLE, dumps(records)
    except Exception as error:  # the records' classes decide what pickling them raises
        raise _unsendable(records, error) from error


def encode_map(entries: dict[Any, Any]) -> list[Encoded]:
    """Encode a dict in frames, in its order, each for `decode_map`; raises what pickling it raises.

    Not by way of lists: two that are made of a large dict would cost as much again for each time that all its objects
    are touched.
    """
    found = pack_frames(entries, FRAME_BYTES)
    return _pickled(len(entries), iter(entries), iter(entries.values())) if found is None else found


def encode_values(entries: dict[Any, Any]) -> list[Encoded]:
    """Encode the values of a dict in frames, in its order, each for `decode`; raises what pickling it raises."""
    found = pack_value_frames(entries, FRAME_BYTES)
    return _pickled(len(entries), iter(entries.values())) if found is None else found


def _pickled(size: int, *columns: Iterator[Any]) -> list[Encoded]:
    found = []
    frames = _Frames(size)
    for at, end in frames:
        parts = [list(islice(column, end - at)) for column in columns]
        data = dumps(parts if len(parts) > 1 else parts[0])
        frames.took = len(data)
        found.append((PICKLE, data))
    return found


def encode_columns(*columns: list[Any]) -> Iterator[list[Encoded]]:
    """Encode lists of one length in frames, each of which has as many records of every list; raises what pickling them
    raises."""
    frames = _Frames(len(columns[0]))
    for at, end in frames:
        parts = [pack_part(column, at, end) or (PICKLE, dumps(column[at:end])) for column in columns]
        frames.took = sum(len(data) for _, data in parts)
        yield parts


class _Frames:
    """From where to where of so many records frames go, by how many bytes the last `took`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.took = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        at, count = 0, _FIRST_RECORDS
        while at < self._size:
            end = min(at + count, self._size)
            yield at, end
            count = max(1, min(count * FRAME_BYTES // max(1, self.took), 16 * count))
            at = end


class KeysNowEqual(CodecError):
    """Keys of a map that were different when it was encoded have become equal: their class compares otherwise now."""

    def __init__(self, keys: list[Any]) -> None:
        stored: dict[Any, Any] = {}
        self.key = next((key for key in keys if stored.setdefault(key, key) is not key), None)  # one of them
        super().__init__(f"several keys of a map have become equal, to {shorten(self.key)}")


def decode_map(code: int, payload: Buffer) -> dict[Any, Any]:
    """The dict of which `encode_map` made this frame, or an equal one. KeysNowEqual when there is none."""
    try:
        if code == MAP:
            return _decode_map(payload)
        keys, values = loads(payload)
        found = dict(zip(keys, values, strict=True))
    except CodecError:
        raise
    except Exception as error:  # the keys' and values' classes decide what unpickling them raises
        raise CodecError(f"{memoryview(payload).nbytes} bytes are no map of code {code}: {error}") from error
    if len(found) != len(keys):
        raise KeysNowEqual(keys)
    return found


def decode(code: int, payload: Buffer) -> list[Any]:
    """Decode what `encode` returned."""
    decoder = _decoders.get(code)
    if decoder is None:
        decoder = _decoder_of_tuples(code)
    try:
        return decoder(payload)
    except CodecError:
        raise
    except Exception as error:  # the records' classes decide what unpickling them raises
        if code == PICKLE:
            raise CodecError(
                f"records cannot be unpickled here: {type(error).__name__}: {error}. The modules of their "
                "classes must be installed, in the same version, in every worker"
            ) from error
        size = memoryview(payload).nbytes
        raise CodecError(f"received {size} bytes that are no list of code {code}: {error}") from error


def _decoder_of_tuples(code: int) -> _Decode:
    arity = code >> KIND_BITS
    if code & ((1 << KIND_BITS) - 1) != TUPLES or not 1 <= arity <= MOST_ARITY:
        raise CodecError(f"unknown codec {code}; the peer may run another version of Penstock")
    # A typed decoder makes tuples at once, where an untyped one would make lists.
    record_type = tuple.__class_getitem__((Any,) * arity)
    decoder: _Decode = msgspec.msgpack.Decoder(list.__class_getitem__(record_type)).decode
    _decoders[code] = decoder
    return decoder


def _unsendable(records: list[Any], cause: Exception) -> CodecError:
    """The error for a list that cannot be pickled: it names the first record that is to blame."""
    for index, record in enumerate(records):
        try:
            dumps(record)
        except Exception as error:  # as above, in `encode`
            raise CodecError(
                f"record {index} of {len(records)}, of type {type(record).__qualname__}, cannot be sent to "
                f"another task: {type(error).__name__}: {error}. Emit plain data in its stead (numbers, "
                "text, tuples, dicts, dataclasses), or give its class a __reduce__ method. "
                f"The record: {shorten(record)}"
            ) from error
    raise CodecError(f"a list of {len(records)} records cannot be encoded: {cause}") from cause
