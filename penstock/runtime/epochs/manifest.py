"""Manifests: the small file that lists what an epoch of a job consists of, and that is written last.

An epoch is complete exactly when its manifest is there and undamaged. So a reader must never accept a damaged manifest:
the file has a checksum over all its bytes, and counts only when it is byte for byte what `encode` makes. A manifest
must also never contain anything that only this release can read without saying so: it has the version of its format.

    {"checksum":"5f0c1a2b","manifest":{"version":3,"job":"wordcount","epoch":12,...}}

A manifest is one line of JSON, and not msgpack: people who look for the cause of a problem have `jq` or `python -m
json.tool`, and perhaps no Penstock. Manifests are so small and rare that size and speed do not matter. Bytes are
encoded as base64.

CRC-32 finds every change of up to 32 bits in a row, and misses one in four billion others. It protects against disks
and half-written files, and not against people: whoever can write to the store can also compute checksums.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from penstock.runtime.errors import SnapshotDamaged, StoreError

#: The version of the format that this release writes, and the only one that it reads. It counts all that is saved: the
#: manifests, the snapshots that they refer to, and the flow with its options, from which `resume` starts a job.
FORMAT = 3

#: No manifest has more bytes. A reader refuses a longer file without reading it.
MANIFEST_BYTES_MAX = 256 << 20

# The frame is the same in all versions of the format. With another frame, a manifest of a newer release would look
# damaged.
_FRAME = b'{"checksum":"%08x","manifest":%b}\n'
_BEGIN, _END = _FRAME.split(b"%b")
_BEFORE = len(_BEGIN % 0)
_AFTER = len(_END)


@dataclass(frozen=True)
class Blob:
    """A piece of a snapshot. Its bytes are in the store's file `name`, or in `data` if this is not None."""

    name: str
    size: int
    checksum: int  # CRC-32
    data: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class TaskEntry:
    """The saved state of one task."""

    number: int
    name: str
    index: int
    parallelism: int
    operators: list[str]
    finished: bool  # the task had ended before the epoch
    groups: list[int] | None  # the key groups that it owns; None when its records have no keys
    blobs: list[Blob]  # a base, and then the changes since, oldest first
    uncommitted: list[str] = field(default_factory=list)  # the sinks of which the last blob has committables


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The parts of an epoch."""

    version: int = FORMAT
    job: str
    epoch: int
    created: float  # wall-clock time
    final: bool  # the job had ended
    key_groups: int
    tasks: list[TaskEntry]
    collected: list[Blob] = field(default_factory=list)  # the records of Collect sinks
    program: Blob | None = None  # what the job was started with, so that it can be started again from the store alone
    extra: dict[str, str | int | float] = field(default_factory=dict)

    def blobs(self) -> Iterator[Blob]:
        """Yields all blobs of the epoch. A blob that several tasks share appears several times."""
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
    """Returns the bytes of a manifest. Raises StoreError when it has a value that would not come back unchanged."""
    try:
        body = _to_json(manifest)
        same = _read_manifest(body) == manifest
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise StoreError(f"the manifest of epoch {manifest.epoch} cannot be written as JSON: {error}") from error
    if not same:  # for example a float that is not finite, or a value of another type than declared
        raise StoreError(
            f"the manifest of epoch {manifest.epoch} would not come back from JSON as it is. "
            "Its values must be finite numbers and str."
        )
    data = _frame(body)
    if len(data) > MANIFEST_BYTES_MAX:
        raise StoreError(
            f"the manifest of epoch {manifest.epoch} would have {len(data):,} bytes, and a manifest has at most "
            f"{MANIFEST_BYTES_MAX:,}: {len(manifest.tasks):,} tasks are too many for one job. Use less parallelism."
        )
    return data


def decode(data: bytes, where: str) -> Manifest:
    """Returns the manifest of these bytes. `where` says where they came from, for messages.

    Raises SnapshotDamaged when they are not exactly what `encode` made, and StoreError when a release with another
    format made them.
    """
    body = memoryview(data)[_BEFORE:-_AFTER]  # no copy, because a damaged file may be large
    if data[:_BEFORE] != _BEGIN % zlib.crc32(body) or data[-_AFTER:] != _END:
        raise SnapshotDamaged(f"{where} is damaged: its {len(data):,} bytes do not have the checksum that they should.")
    try:
        version = _read_version(body).version
        if version == FORMAT:
            return _read_manifest(body)
    except msgspec.MsgspecError as error:
        raise SnapshotDamaged(f"{where} has the right checksum, but is no manifest: {error}.") from error
    raise StoreError(
        f"{where} has format {version}, and this release of Penstock reads format {FORMAT}. Nothing was changed. "
        "Continue with the release of Penstock that wrote it, or start the job anew with another checkpoint store "
        "(checkpoints=..., or --checkpoints) or another name."
    )


def _frame(body: bytes) -> bytes:
    return _FRAME % (zlib.crc32(body), body)
