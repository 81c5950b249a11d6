"""Lists of records as bytes and back: types and values are kept, and nothing refers to the payload."""

from __future__ import annotations

import contextlib
import itertools
import math
import struct
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.runtime._native import pack, pack_frames, pack_value_frames
from penstock.runtime.errors import CodecError
from penstock.runtime.records import codec
from penstock.runtime.records.codec import (
    KIND_BITS,
    MAP,
    NESTED,
    PICKLE,
    SCALARS,
    TEXT,
    TUPLES,
    decode,
    decode_map,
    encode,
    encode_columns,
    encode_map,
    encode_values,
)


def in_frames(entries: dict[Any, Any]) -> dict[Any, Any]:
    """What becomes of a dict that is encoded."""
    frames = [decode_map(code, memoryview(payload)) for code, payload in encode_map(entries)]
    return {key: value for frame in frames for key, value in frame.items()}


class Level(IntEnum):
    LOW = 1


class Colour(Enum):
    RED = "r"


class Word(str):
    __slots__ = ()


class Count(int):
    pass


Point = namedtuple("Point", "x y")


@dataclass
class Reading:
    sensor: str
    values: list[float]


def same(a: Any, b: Any) -> bool:
    """Equal with the same types at every depth; NaN is the same as NaN, 0.0 is not the same as -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, Decimal):
        return a.as_tuple() == b.as_tuple()
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, set | frozenset):
        return a == b and sorted(map(repr, a)) == sorted(map(repr, b))
    if is_dataclass(a):
        return all(same(getattr(a, field.name), getattr(b, field.name)) for field in fields(a))
    return bool(a == b)


def round_trip(records: list[Any]) -> tuple[int, list[Any]]:
    """Through a buffer that is wiped afterwards, as a ring's is."""
    code, payload = encode(records)
    assert 0 <= code < 65_536
    buffer = bytearray(b"##" + payload + b"##")
    decoded = decode(code, memoryview(buffer)[2:-2])
    for i in range(len(buffer)):
        buffer[i] = 0xC1
    buffer.append(0)  # fails if anything still refers to the buffer
    return code, decoded


ANY_TEXT = st.text(alphabet=st.characters(codec=None, exclude_categories=()))
SIMPLE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 2**60, -(2**60), 2**62]),
    st.floats(),
    ANY_TEXT,
    st.binary(),
)
ODD = st.one_of(
    st.decimals(),
    st.datetimes(),
    st.just(datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=2)))),
    st.sampled_from([Level.LOW, Colour.RED, Word("w"), Count(3), np.float64(2.5), np.int32(4), 3 + 4j]),
    st.binary().map(bytearray),
    st.frozensets(st.integers()),
    st.sets(st.text()),
    st.builds(Reading, st.text(), st.lists(st.floats())),
    st.builds(Point, st.integers(), st.text()),
    st.lists(st.integers(0, 9)).map(np.array),
    st.just(OrderedDict(a=1)),
    st.just(defaultdict(list, a=[1])),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(ANY_TEXT, inner, max_size=4),
        st.dictionaries(st.integers() | st.text(), inner, max_size=4),
    )


RECORDS = st.recursive(SIMPLE | ODD, containers, max_leaves=8)
PLAIN = st.recursive(
    SIMPLE,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=8,
)


@given(st.lists(RECORDS, max_size=5))
@example([])
@example([None])
@example([[]])
@example([()])
@example([(), ()])
@example([(1,), (1, 2)])
@example([math.nan, math.inf, -math.inf, -0.0, 0.0])
def test_values_and_types_are_kept(records: list[Any]) -> None:
    _, decoded = round_trip(records)
    assert same(decoded, records)


@given(st.lists(PLAIN, max_size=5))
def test_plain_values_are_kept(records: list[Any]) -> None:
    _, decoded = round_trip(records)
    assert same(decoded, records)


@given(st.integers(1, 6), st.data())
def test_tuples_are_kept(arity: int, data: st.DataObject) -> None:
    records = data.draw(st.lists(st.tuples(*[PLAIN] * arity), max_size=5))
    _, decoded = round_trip(records)
    assert same(decoded, records)


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("records", "code"),
    [
        ([], TEXT),
        (["a", "\u4e2d", "\U0001f600", "\xe9"], TEXT),
        (["a", "\ud800"], PICKLE),
        (["a", "\U0001f600\udfff"], PICKLE),
        ([Word("a")], PICKLE),
        (["a", 1], SCALARS),
        ([None, True, 1, 1.5, b"x", "a"], SCALARS),
        ([-(2**63), 2**64 - 1], SCALARS),
        ([2**64], PICKLE),
        ([-(2**63) - 1], PICKLE),
        ([Level.LOW], PICKLE),
        ([np.float64(1)], PICKLE),
        ([bytearray(b"x")], PICKLE),
        ([("a", 1), ("b", None)], TUPLES | 2 << KIND_BITS),
        ([("a", {"b": [1]}), ("b", [])], TUPLES | 2 << KIND_BITS),
        ([("a",), ("b", 1)], PICKLE),
        ([("a",), "b"], PICKLE),
        (["a", ("b",)], PICKLE),
        ([("a", ("b",))], PICKLE),
        ([()], PICKLE),
        ([(0,) * 255], TUPLES | 255 << KIND_BITS),
        ([(0,) * 256], PICKLE),
        ([Point(1, 2)], PICKLE),
        ([("\ud800",)], PICKLE),
        ([{"a": [1, {"b": None}]}, 3, "x"], NESTED),
        ([{"a": (1,)}], PICKLE),
        ([{1: "a"}], PICKLE),
        ([{Word("a"): 1}], PICKLE),
        ([{"\ud800": 1}], PICKLE),
        ([OrderedDict(a=1)], PICKLE),
        ([{1}], PICKLE),
        ([deep(6)], NESTED),
        ([deep(60)], PICKLE),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_the_quick_format_is_chosen_exactly_when_it_keeps_the_types(records: list[Any], code: int) -> None:
    packed = pack(records)
    assert (PICKLE if packed is None else packed[0]) == code
    chosen, decoded = round_trip(records)
    assert chosen == code
    assert same(decoded, records)


def test_a_record_that_contains_itself_survives() -> None:
    record: list[Any] = [1]
    record.append(record)
    code, ((one, inner),) = round_trip([record])
    assert code == PICKLE
    assert one == 1
    assert inner[1] is inner


def test_classes_that_only_exist_here_travel_by_value() -> None:
    # As in a worker, where the classes of the user's script belong to a `__main__` that has no such names.
    source = "class Trade:\n    def __init__(self, price): self.price = price\n"
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(source, namespace)
    trade = namespace["Trade"](5)
    code, (decoded,) = round_trip([trade])
    assert code == PICKLE
    assert type(decoded) is type(trade)
    assert decoded.price == 5


def test_a_record_that_cannot_be_sent_is_named() -> None:
    expected = r"record 2 of 4, of type lock, .*cannot pickle.*The record: <unlocked"
    with pytest.raises(CodecError, match=expected) as caught:
        encode(["a", "b", threading.Lock(), "c"])
    assert isinstance(caught.value.__cause__, TypeError)

    class Huge:
        def __repr__(self) -> str:
            return "x" * 10_000

        def __reduce__(self) -> str:
            raise RuntimeError("no")

    with pytest.raises(CodecError, match="Huge") as caught:
        encode([Huge()])
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize("code", [5, 7, TUPLES, TUPLES | 256 << KIND_BITS, TEXT | 1 << KIND_BITS, 8, 65_535, -1])
def test_unknown_codes_are_refused(code: int) -> None:
    with pytest.raises(CodecError, match="unknown codec"):
        decode(code, b"\x90")


@pytest.mark.parametrize("code", [TEXT, SCALARS, NESTED, TUPLES | 2 << KIND_BITS])
@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x91", b"\x91\x91", b"\x80", b"\x90\x00", b"\x91\x93\x01\x02"])
def test_broken_bytes_are_refused(code: int, payload: bytes) -> None:
    with pytest.raises(CodecError, match=f"{len(payload)} bytes that are no list of code {code}"):
        decode(code, payload)


@given(st.binary(max_size=40), st.sampled_from([TEXT, SCALARS, NESTED, TUPLES | 2 << KIND_BITS]))
def test_noise_decodes_to_a_list_or_a_codec_error(payload: bytes, code: int) -> None:
    with contextlib.suppress(CodecError):
        assert type(decode(code, payload)) is list


def test_a_class_that_is_not_installed_is_explained() -> None:
    with pytest.raises(CodecError, match=r"cannot be unpickled here: ModuleNotFoundError.*in every worker"):
        decode(PICKLE, b"cno_such_module_at_all\nThing\n.")


class Refused(Exception):
    """It is pickled as a call with one argument, and takes two."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code} {reason}")


class Moody:
    """Its objects do not take their state back."""

    def __setstate__(self, state: object) -> None:
        raise ValueError("not today")


def leave() -> None:
    sys.exit("enough")


class Leaving:
    """Making its objects again would end the process."""

    def __reduce__(self) -> object:
        return leave, ()


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (Refused(404, "gone"), r"TypeError: Refused\.__init__\(\) missing 1 required positional argument: 'reason'"),
        (Leaving(), r"called sys\.exit\('enough'\)\."),
        ({"deep": [Moody()]}, r"ValueError: not today\."),
    ],
)
def test_a_record_that_cannot_be_made_again_is_an_error(record: object, words: str) -> None:
    if isinstance(record, dict):
        vars(record["deep"][0])["a"] = 1
    code, payload = encode([{1}, record, {2}])
    with pytest.raises(CodecError, match=f"records cannot be unpickled here: {words}.*__reduce__ method"):
        decode(code, payload)


class Edited:
    """What the class was when its objects were saved, and what it is now, is set by the test."""


def class_of_kind(kind: str) -> Any:
    namespace = {"__module__": __name__, "__qualname__": "Edited"}
    if kind == "dataclass":
        namespace["__annotations__"] = {"n": int}  # type: ignore[assignment]
        return dataclass(type("Edited", (), namespace))
    if kind == "not hashable":
        return type("Edited", (), {**namespace, "__hash__": None})
    bases = {"list": list, "dict": dict, "set": set, "struct": msgspec.Struct, "plain": object, "deque": deque}
    return type(bases[kind])("Edited", (bases[kind],), namespace)


@pytest.mark.parametrize(
    ("before", "value", "now"),
    [
        ("dict", lambda made: made(a=1), "dataclass"),
        ("dict", lambda made: made(a=1, b=2), "list"),
        ("list", lambda made: made([1]), "dict"),
        ("list", lambda made: made([1, 2]), "plain"),
        ("plain", lambda made: made(), "struct"),
        ("dict", lambda made: made(a=1), "struct"),
        ("plain", lambda made: {made(): 1}, "not hashable"),
        ("plain", lambda made: {1: 1, (1, made()): 1}, "dataclass"),
        ("plain", lambda made: {made()}, "not hashable"),
        ("plain", lambda made: frozenset([made()]), "not hashable"),
    ],
)
def test_a_class_that_has_become_another_kind_of_class_is_an_error(
    before: str, value: Any, now: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Edited", class_of_kind(before))
    code, payload = encode(["x", {"deep": [value(Edited)]}])
    monkeypatch.setattr(sys.modules[__name__], "Edited", class_of_kind(now))
    with pytest.raises(CodecError, match=r"records cannot be unpickled here: .* keep the class as it was, give it a"):
        decode(code, payload, saved=True)


def test_a_class_of_keys_that_is_not_hashable_any_more_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    [(code, payload)] = encode_map({1: 1, (2, Edited()): 2})
    monkeypatch.setattr(sys.modules[__name__], "Edited", class_of_kind("not hashable"))
    with pytest.raises(
        CodecError, match=r"Edited .* is not hashable, and objects of it were saved as keys\. .* keep the"
    ):
        decode_map(code, payload)


EDGES = [n + d for n in (0, 32, 128, 2**8, 2**15, 2**16, 2**31, 2**32, 2**63) for d in (-1, 0, 1)]


@pytest.mark.parametrize("size", [0, 1, 15, 16, 31, 32, 255, 256, 65_535, 65_536, 200_000])
def test_lengths_and_numbers_are_msgpack_at_every_edge(size: int) -> None:
    texts = ["x" * size, "\xe9" * size, "\u4e2d" * size, "\U0001f600" * size]
    numbers = [n for edge in EDGES for n in (edge, -edge) if -(2**63) <= n < 2**64]
    for records in (texts, [*texts, b"x" * size], numbers, [1.5] * size, [[None] * size, {"a": [True] * size}]):
        packed = pack(records)
        assert packed is not None
        assert msgspec.msgpack.decode(packed[1]) == records
    entries = dict(zip(map(str, range(size)), itertools.cycle(numbers), strict=False))
    assert in_frames(entries) == entries


def test_texts_of_every_short_length_keep_every_byte() -> None:
    alphabet = "".join(map(chr, range(32, 127)))
    texts = [(alphabet * 4)[shift : shift + size] for size in range(300) for shift in (0, 1, 7)]
    assert round_trip(texts)[1] == texts
    pairs = [(text, len(text)) for text in texts]
    assert round_trip(pairs)[1] == pairs
    assert in_frames(dict(pairs)) == dict(pairs)
    values = list(dict(pairs).values())
    assert [value for frame in encode_values(dict(pairs)) for value in decode(*frame)] == values


def test_only_lists_and_maps_are_packed() -> None:
    with pytest.raises(TypeError, match="records must be a list, not tuple"):
        encode(("a",))  # type: ignore[arg-type]


def test_a_decoder_is_made_once_for_each_arity() -> None:
    code, payload = encode([(1, 2, 3, 4, 5, 6, 7)])
    decode(code, payload)
    made = codec._decoders[code]
    decode(code, payload)
    assert codec._decoders[code] is made
    assert msgspec.msgpack.decode(payload) == [[1, 2, 3, 4, 5, 6, 7]]


@given(
    st.dictionaries(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
        st.recursive(
            st.none() | st.integers() | st.floats() | st.text() | st.tuples(st.integers()),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
            max_leaves=5,
        ),
        max_size=8,
    ),
    st.sampled_from([dict, Counter]),
)
def test_maps_come_back_as_they_were(entries: dict[Any, Any], kind: type[dict[Any, Any]]) -> None:
    assert same(in_frames(kind(entries)), entries)


def test_a_map_of_plain_values_is_not_pickled() -> None:
    assert encode_map(Counter({"a": 1, 2: 3, b"x": 4, 1.5: -1}))[0][0] == MAP
    assert encode_map({("a", 1): 1})[0][0] == PICKLE
    assert encode_map({"a": (1, 2)})[0][0] == PICKLE
    assert encode_map({"a": 1 << 64})[0][0] == PICKLE


@pytest.mark.parametrize("value", [1, "x" * 100, [1, "a"], (1, 2), "x" * 100_000, frozenset(["a" * 5000])])
@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 5000])
def test_large_maps_come_in_frames_in_their_order(value: Any, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    full = 1 << 18
    monkeypatch.setattr(codec, "FRAME_BYTES", full)
    entries = {f"key {i * 7919 % size}": value for i in range(size if len(str(value)) < 1000 else size // 10)}
    frames, values = encode_map(entries), encode_values(entries)
    found = [pair for code, payload in frames for pair in decode_map(code, memoryview(payload)).items()]
    assert found == list(entries.items())
    assert [value for frame in values for value in decode(*frame)] == list(entries.values())
    columns = [[decode(*part) for part in parts] for parts in encode_columns(list(entries), list(entries.values()))]
    assert [pair for keys, values in columns for pair in zip(keys, values, strict=True)] == found
    one = len(encode_map({"key 1": value})[0][1]) + 10
    first = one * 256  # records whose size is not known, where lists are pickled
    for frame in (*frames, *values):
        assert len(frame[1]) <= full + max(one, full // 8, first if frame[0] == PICKLE else 8 * one)


def test_only_maps_are_packed_in_frames() -> None:
    with pytest.raises(TypeError):
        codec.pack_frames([1], 100)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        codec.pack_value_frames({1: 1}, "x")  # type: ignore[arg-type]


@pytest.mark.parametrize("full", [1, 6, 7])
def test_a_frame_that_its_header_fills_has_an_entry(full: int) -> None:
    entries = {i: str(i) for i in range(20)}
    frames = pack_frames(entries, full)
    assert frames is not None
    assert {key: value for code, data in frames for key, value in decode_map(code, data).items()} == entries
    frames = pack_value_frames(entries, full)
    assert frames is not None
    assert [value for code, data in frames for value in decode(code, data)] == list(entries.values())
