"""A manifest: what one epoch of a job consists of, in one small file that is written last.

An epoch is complete exactly when its manifest is there and whole, so a reader must never take a damaged manifest for a
whole one: the file carries a checksum over all of its bytes, and is accepted only when it is byte for byte what
`encode` makes. It must never hold what only this release can read without saying so: it carries its format's version.

    {"checksum":"5f0c1a2b","manifest":{"version":2,"job":"wordcount","epoch":12,...}}

It is JSON, of one line, and not msgpack: whoever looks for what went wrong has `jq` or `python -m json.tool` and no
Penstock, and a manifest is too small and too rare for the difference in size and speed to matter. Bytes are base64.

CRC-32 finds every change of up to 32 bits in a row and misses one in four billion others. It guards against disks and
half-written files, not against people: whoever can write to the store can also compute checksums.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from penstock.runtime.errors import SnapshotDamaged, StoreError

#: The version of the format that this release writes, and the only one that it reads. It counts all that is saved: the
#: manifests, the snapshots that they refer to, and the flow with its options, from which `resume` starts a job.
FORMAT = 2

# The frame stays as it is in all versions: with another one a manifest of a newer release would look damaged.
_FRAME = b'{"checksum":"%08x","manifest":%b}\n'
_BEFORE = len(_FRAME % (0, b"")) - 2
_AFTER = 2


@dataclass(frozen=True)
class Blob:
    """A piece of a snapshot. Its bytes are in the store's file `name`, or right here when `data` is not None."""

    name: str
    size: int
    checksum: int  # CRC-32
    data: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class TaskEntry:
    """What one task has saved."""

    number: int
    name: str
    index: int
    parallelism: int
    operators: list[str]
    finished: bool  # it had come to its end before the epoch
    groups: list[int] | None  # the key groups that it owns; None where records have no keys
    blobs: list[Blob]  # a base and the deltas upon it, oldest first


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What an epoch consists of."""

    version: int = FORMAT
    job: str
    epoch: int
    created: float  # wall time
    final: bool  # the job had come to its end
    key_groups: int
    tasks: list[TaskEntry]
    collected: list[Blob] = field(default_factory=list)  # records of Collect sinks
    program: Blob | None = None  # what the job was started with, to start it again from nothing but the store
    extra: dict[str, str | int | float] = field(default_factory=dict)

    def blobs(self) -> Iterator[Blob]:
        """All that it refers to; a blob that several tasks share comes several times."""
        for task in self.tasks:
            yield from task.blobs
        yield from self.collected
        if self.program is not None:
            yield self.program


@dataclass(frozen=True)
class _Version:
    version: int


_to_json = msgspec.json.Encoder().encode
_read_version = msgspec.json.Decoder(_Version).decode
_read_manifest = msgspec.json.Decoder(Manifest).decode


def encode(manifest: Manifest) -> bytes:
    """The bytes of a manifest. StoreError when it holds a value that would not come back as it is."""
    try:
        body = _to_json(manifest)
        same = _read_manifest(body) == manifest
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise StoreError(f"the manifest of epoch {manifest.epoch} cannot be written as JSON: {error}") from error
    if not same:  # a float that is not finite, a value of another type than declared
        raise StoreError(
            f"the manifest of epoch {manifest.epoch} would not come back from JSON as it is. "
            "Give it finite numbers and str only."
        )
    return _frame(body)


def decode(data: bytes, where: str) -> Manifest:
    """The manifest of these bytes; `where` they came from is for messages.

    SnapshotDamaged when they are not exactly what `encode` made; StoreError when a release with another format made
    them.
    """
    body = data[_BEFORE:-_AFTER]
    if _frame(body) != data:
        raise SnapshotDamaged(f"{where} is damaged: its {len(data):,} bytes do not have the checksum that they should.")
    try:
        version = _read_version(body).version
        if version == FORMAT:
            return _read_manifest(body)
    except msgspec.MsgspecError as error:
        raise SnapshotDamaged(f"{where} is whole, but no manifest: {error}.") from error
    raise StoreError(
        f"{where} has format {version}, and this release of Penstock reads format {FORMAT}. Nothing was changed. Go on "
        "with the release of Penstock that wrote it, or start the job anew with another checkpoints= place, or another "
        "name."
    )


def _frame(body: bytes) -> bytes:
    return _FRAME % (zlib.crc32(body), body)
