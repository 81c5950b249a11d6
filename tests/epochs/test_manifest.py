"""Manifests: what is read is what was written, or an error that says what it is."""

from __future__ import annotations

import json
import math
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.epochs.manifest import FORMAT, Blob, Manifest, TaskEntry, decode, encode
from penstock.runtime.errors import SnapshotDamaged, StoreError, StoreUnreachable

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.integers(0, 2**63 - 1)
blobs = st.builds(
    Blob, name=text, size=numbers, checksum=st.integers(0, 2**32 - 1), data=st.none() | st.binary(max_size=50)
)
entries = st.builds(
    TaskEntry,
    number=numbers,
    name=text,
    index=numbers,
    parallelism=numbers,
    operators=st.lists(text, max_size=3),
    finished=st.booleans(),
    groups=st.none() | st.lists(st.integers(0, 32767), max_size=5),
    blobs=st.lists(blobs, max_size=3),
)
manifests = st.builds(
    Manifest,
    job=text,
    epoch=numbers,
    created=st.floats(allow_nan=False, allow_infinity=False),
    final=st.booleans(),
    key_groups=numbers,
    tasks=st.lists(entries, max_size=3),
    collected=st.lists(blobs, max_size=3),
    extra=st.dictionaries(text, text | st.integers() | st.floats(allow_nan=False, allow_infinity=False), max_size=3),
)


def sample(**changes: Any) -> Manifest:
    entry = TaskEntry(
        number=3,
        name="count[0]",
        index=0,
        parallelism=2,
        operators=["count", "out"],
        finished=False,
        groups=[0, 2],
        blobs=[Blob("snapshots/000001-3-0", 9000, 17), Blob("snapshots/000002-3-0", 3, zlib.crc32(b"abc"), b"abc")],
    )
    given = {"job": "words", "epoch": 2, "created": 1.5, "final": False, "key_groups": 128, "tasks": [entry]}
    return Manifest(**(given | {"extra": {"note": "é", "rate": 0.1, "n": 1}} | changes))


def framed(body: bytes) -> bytes:
    return b'{"checksum":"%08x","manifest":%b}\n' % (zlib.crc32(body), body)


@given(manifests)
def test_what_is_written_comes_back(manifest: Manifest) -> None:
    data = encode(manifest)
    back = decode(data, "it")
    assert back == manifest
    assert [type(value) for value in back.extra.values()] == [type(value) for value in manifest.extra.values()]
    assert data.count(b"\n") == 1
    assert json.loads(data)["manifest"]["epoch"] == manifest.epoch


def test_every_change_of_a_bit_is_seen() -> None:
    data = encode(sample())
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            with pytest.raises(SnapshotDamaged):
                decode(bytes(changed), "it")


def test_every_shortened_and_every_lengthened_file_is_seen() -> None:
    data = encode(sample())
    for size in range(len(data)):
        for cut in (data[:size], data[size + 1 :], data[:size] + b"\0" * (len(data) - size)):
            if cut != data:
                with pytest.raises(SnapshotDamaged):
                    decode(cut, "it")
    for more in (b"\n", b" ", b"\0", data):
        with pytest.raises(SnapshotDamaged):
            decode(data + more, "it")


@given(st.binary(max_size=300))
def test_no_other_bytes_are_a_manifest(data: bytes) -> None:
    with pytest.raises(SnapshotDamaged):
        decode(data, "it")
    with pytest.raises(SnapshotDamaged):
        decode(framed(data), "it")


@pytest.mark.parametrize("other", [FORMAT - 1, FORMAT + 1])
def test_another_format_is_named_and_is_no_damage(other: int) -> None:
    for body in (b'{"version":%d}' % other, encode(sample(version=other))[34:-2]):
        with pytest.raises(StoreError, match=f"/m.json has format {other}, and .* reads format {FORMAT}") as caught:
            decode(framed(body), "/m.json")
        assert not isinstance(caught.value, SnapshotDamaged | StoreUnreachable)


def test_fields_that_a_later_release_adds_to_this_format_are_passed_over() -> None:
    body = encode(sample())[34:-2]
    assert decode(framed(body[:-1] + b',"mood":"good"}'), "it") == sample()


@pytest.mark.parametrize(
    "changes",
    [
        {"created": math.nan},
        {"extra": {"x": math.inf}},
        {"extra": {"x": None}},
        {"extra": {"x": object()}},
        {"extra": {"x": True}},
        {"job": "\ud800"},
        {"tasks": [object()]},
    ],
)
def test_what_json_cannot_keep_is_refused_when_it_is_written(changes: Any) -> None:
    with pytest.raises(StoreError, match="manifest of epoch 2"):
        encode(sample(**changes))


def test_blobs_are_all_that_it_refers_to() -> None:
    assert [blob.name for blob in sample(collected=[Blob("c", 1, 1)]).blobs()] == [
        "snapshots/000001-3-0",
        "snapshots/000002-3-0",
        "c",
    ]
