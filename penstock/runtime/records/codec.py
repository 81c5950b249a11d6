"""The codec: turns lists of records into bytes and back, with one call for a whole list (docs/papers.md: T4).

The result must equal the input, and have the same types at every depth: a tuple never becomes a list, nor an IntEnum an
int. So the fast format (msgpack) is used only for lists whose types it keeps, which the native pass that packs a list
finds out. Everything else is pickled. Each list has its own format, and a small number beside the bytes says which. So
the two ends of a channel need not agree on anything in advance.

Decoding copies: nothing that is returned may refer to the payload, which can be shared memory that is reused. An object
that two records of a list refer to may come back as two equal objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeAlias

import msgspec

from penstock.runtime._native import pack, pack_frames, pack_part, pack_value_frames
from penstock.runtime.errors import CodecError, describe, is_interrupt, shorten
from penstock.runtime.records.pickling import dumps, loads, unhashable

Buffer: TypeAlias = bytes | bytearray | memoryview

# The kinds of lists, as the native pack() numbers them. They are the low bits of a code. Codes travel in messages and
# have 16 bits. All kinds except PICKLE are msgpack.
PICKLE = 0  # anything that can be pickled
TEXT = 1  # only str
SCALARS = 2  # None, bool, int of 64 bits, float, str, bytes
TUPLES = 3  # tuples of the same arity, with scalars or nested values; the higher bits of the code are the arity
NESTED = 4  # lists, and dicts from str, of scalars or of such lists and dicts
MAP = 5  # no list: a dict from scalars to nested values
KIND_BITS = 3
MOST_ARITY = 255

#: The approximate number of bytes in a frame. A frame has more when a single record has more. Reading frames takes
#: little more memory than their contents.
FRAME_BYTES = 2 << 20
_FIRST_RECORDS = 256  # of a frame, until the size of the records is known

#: A list or a dict as bytes, after the code that says how to decode it.
Encoded: TypeAlias = tuple[int, bytes]

_Decode: TypeAlias = Callable[[Buffer], list[Any]]

_decode_any: _Decode = msgspec.msgpack.Decoder(list[Any]).decode
_decode_map: Callable[[Buffer], dict[Any, Any]] = msgspec.msgpack.Decoder(dict[Any, Any]).decode
# Has one decoder for each arity that was seen, up to MOST_ARITY.
_decoders: dict[int, _Decode] = {
    PICKLE: loads,
    TEXT: msgspec.msgpack.Decoder(list[str]).decode,
    SCALARS: _decode_any,
    NESTED: _decode_any,
}


def encode(records: list[Any], *, saved: bool = False) -> tuple[int, bytes]:
    """Encodes a list of records. Returns the code to decode with and the payload. `saved`: it is state, which a later
    program may read.

    Raises CodecError naming the first record that cannot be encoded.
    """
    packed = pack(records)
    if packed is not None:
        return packed
    try:
        return PICKLE, dumps(records, saved=saved)
    except Exception as error:  # the classes of the records decide what pickling them raises
        raise _unsendable(records, error) from error


def encode_map(entries: dict[Any, Any]) -> list[Encoded]:
    """Encodes a dict in frames, in its order, each of them for `decode_map`. Raises what pickling the dict raises.

    It does not build two lists from the dict, because touching all objects of a large dict once more would double the
    cost.
    """
    found = pack_frames(entries, FRAME_BYTES)
    return _pickled(len(entries), iter(entries), iter(entries.values())) if found is None else found


def encode_values(entries: dict[Any, Any]) -> list[Encoded]:
    """Encodes the values of a dict in frames, in its order, each of them for `decode`. Raises what pickling them
    raises."""
    found = pack_value_frames(entries, FRAME_BYTES)
    return _pickled(len(entries), iter(entries.values())) if found is None else found


def _pickled(size: int, *columns: Iterator[Any]) -> list[Encoded]:
    found = []
    frames = _Frames(size)
    for at, end in frames:
        parts = [list(islice(column, end - at)) for column in columns]
        data = dumps(parts if len(parts) > 1 else parts[0], saved=True)
        frames.took = len(data)
        found.append((PICKLE, data))
    return found


def encode_columns(*columns: list[Any]) -> Iterator[list[Encoded]]:
    """Encodes lists of the same length in frames. Each frame has the same number of records of every list. Raises what
    pickling them raises."""
    frames = _Frames(len(columns[0]))
    for at, end in frames:
        parts = [pack_part(column, at, end) or (PICKLE, dumps(column[at:end], saved=True)) for column in columns]
        frames.took = sum(len(data) for _, data in parts)
        yield parts


class _Frames:
    """Divides this many records into frames, by the number of bytes that the last frame has `took`."""

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
    """Keys of a map that were different when it was encoded have become equal, because their class compares them in
    another way now."""

    def __init__(self, keys: list[Any]) -> None:
        stored: dict[Any, Any] = {}
        self.key = next((key for key in keys if stored.setdefault(key, key) is not key), None)  # one of the equal keys
        super().__init__(f"several keys of a map have become equal, to {shorten(self.key)}")


def decode_map(code: int, payload: Buffer) -> dict[Any, Any]:
    """Returns the dict that `encode_map` has encoded in this frame. Raises KeysNowEqual when keys have become equal."""
    keys: list[Any] = []
    try:
        if code == MAP:
            return _decode_map(payload)
        keys, values = loads(payload)
        found = dict(zip(keys, values, strict=True))
    except CodecError:
        raise
    except BaseException as error:  # the classes of keys and values decide what unpickling them raises
        if is_interrupt(error):
            raise
        if code == PICKLE:
            raise _unreadable("entries of a map", error, saved=True, keys=keys) from error
        raise CodecError(f"{memoryview(payload).nbytes} bytes are no map of code {code}: {describe(error)}") from error
    if len(found) != len(keys):
        raise KeysNowEqual(keys)
    return found


def decode(code: int, payload: Buffer, *, saved: bool = False) -> list[Any]:
    """Decodes the result of `encode`. `saved`: it is state, for errors."""
    decoder = _decoders.get(code)
    if decoder is None:
        decoder = _decoder_of_tuples(code)
    try:
        return decoder(payload)
    except CodecError:
        raise
    except BaseException as error:  # the classes of the records decide what unpickling them raises
        if is_interrupt(error):
            raise
        if code == PICKLE:
            raise _unreadable("records", error, saved) from error
        size = memoryview(payload).nbytes
        raise CodecError(f"received {size} bytes that are no list of code {code}: {describe(error)}") from error


def decode_value(payload: Buffer) -> Any:
    """Returns the value from which `dumps` made these bytes. Raises CodecError that names the object which cannot be
    made again."""
    try:
        return loads(payload)
    except CodecError:
        raise
    except BaseException as error:  # as in `decode`
        if is_interrupt(error):
            raise
        raise _unreadable("a value", error, saved=True) from error


def _unreadable(what: str, error: BaseException, saved: bool, keys: Iterable[Any] = ()) -> CodecError:
    what = f"{what} cannot be unpickled here: {describe(error)}."
    if unfit := unhashable(keys):
        what += f" {unfit.words}."
    if saved:
        return CodecError(
            f"{what} The class of an object may have been another one when the object was saved: keep the class as it "
            "was, give it a __setstate__ method that takes what was saved, or give the new class another name and "
            "convert the objects in a function of the flow; or start the job without the savepoint"
        )
    return CodecError(
        f"{what} The modules of their classes must be installed, in the same version, in every worker. Give a class "
        "whose objects cannot be made again a __reduce__ method, or emit plain data in their stead (numbers, text, "
        "tuples, dicts, dataclasses). The error policy of an operator does not apply, because no operator has the "
        "record"
    )


def _decoder_of_tuples(code: int) -> _Decode:
    arity = code >> KIND_BITS
    if code & ((1 << KIND_BITS) - 1) != TUPLES or not 1 <= arity <= MOST_ARITY:
        raise CodecError(
            f"unknown codec {code}: the sender may run another release of Penstock; use one release in all processes"
        )
    # A typed decoder makes tuples directly; an untyped one would make lists.
    record_type = tuple.__class_getitem__((Any,) * arity)
    decoder: _Decode = msgspec.msgpack.Decoder(list.__class_getitem__(record_type)).decode
    _decoders[code] = decoder
    return decoder


def _unsendable(records: list[Any], cause: Exception) -> CodecError:
    """Returns the error for a list that cannot be pickled. It names the first record that cannot."""
    for index, record in enumerate(records):
        try:
            dumps(record)
        except Exception as error:  # as in `encode`
            raise CodecError(
                f"record {index} of {len(records)}, of type {type(record).__qualname__}, cannot be sent to "
                f"another task: {describe(error)}. Emit plain data in its stead (numbers, "
                "text, tuples, dicts, dataclasses), or give its class a __reduce__ method. "
                f"The record: {shorten(record)}"
            ) from error
    raise CodecError(f"a list of {len(records)} records cannot be encoded: {describe(cause)}") from cause
