"""The checkpoint store on file systems that work: what was put comes back, or it says that it is damaged."""

from __future__ import annotations

import errno
import os
import pickle
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.epochs.files import ArrowFiles
from penstock.runtime.epochs.manifest import FORMAT, Blob, Manifest, encode
from penstock.runtime.epochs.store import INLINE_BYTES, Store, manifest_files, result_of
from penstock.runtime.errors import SnapshotDamaged, StoreError, StoreUnreachable
from tests.epochs.dict_files import DictFiles, accepted

BIG = bytes(range(256)) * 40  # too large to be kept in a manifest


def manifest(epoch: int, *blobs: Blob, job: str = "job", final: bool = False) -> Manifest:
    return Manifest(job=job, epoch=epoch, created=1.5, final=final, key_groups=8, tasks=[], collected=list(blobs))


def files(store: Store) -> set[str]:
    return {name for folder in ("snapshots", "manifests") for name in store._files.names(folder)}


@pytest.fixture(params=["directory", "memory", "arrow"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A directory by system calls; an object store by fsspec; a file system that pyarrow renames files in."""
    if request.param == "directory":
        return Store.open(tmp_path / "checkpoints", "job")
    if request.param == "memory":
        pytest.importorskip("fsspec")
        return Store.open(f"memory://{tmp_path}", "job")
    from pyarrow.fs import LocalFileSystem

    system = LocalFileSystem()
    return Store(ArrowFiles(system, f"{tmp_path}/job", f"{tmp_path}/job", rename=system.move), "job")


IN_A_DIRECTORY = pytest.mark.parametrize("store", ["directory"], indirect=True)


def overwrite(store: Store, name: str, data: bytes) -> None:
    """Change a file without the store's knowledge."""
    store._files.write(name, [memoryview(data)], False)


def spoil(store: Store, name: str, data: bytes | None) -> None:
    """Change a file and its copy without the store's knowledge, or delete them."""
    for one in (name, f"copies/{name.rpartition('/')[2]}"):
        if data is None:
            store._files.delete(one)
        else:
            overwrite(store, one, data)


def test_nothing_is_made_by_opening(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "a" / "b", "job")
    assert store.epochs() == []
    assert store.latest() is None
    assert store.collect(1) == 0
    store.destroy()
    assert list(tmp_path.iterdir()) == []


@given(parts=st.lists(st.binary(max_size=3000), max_size=6))
def test_what_is_put_comes_back(parts: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    data = b"".join(parts)
    stores = [Store.open(tmp_path_factory.getbasetemp() / "roundtrip", "job")]
    if find_spec("fsspec"):
        stores.append(Store.open("memory://roundtrip", "job"))
    for store in stores:
        blob = store.put("snapshots/000001-1-0", [bytearray(part) for part in parts])
        assert (blob.size, blob.checksum) == (len(data), zlib.crc32(data))
        assert (blob.data is not None) == (len(data) <= INLINE_BYTES)
        assert store.get(blob) == data
        store.write_manifest(manifest(1, blob))
        assert store.read_manifest(1) == manifest(1, blob)
        store.destroy()


def test_parts_can_be_any_buffers(store: Store) -> None:
    import array

    import numpy as np

    parts = [BIG, bytearray(BIG), memoryview(BIG)[1:7], array.array("q", [1, 2]), np.arange(5), b""]
    blob = store.put("snapshots/000001-1-0", parts)
    assert store.get(blob) == b"".join(bytes(part) for part in parts)


def test_a_blob_is_replaced_whole(store: Store) -> None:
    first = store.put("snapshots/000001-1-0", [BIG])
    second = store.put("snapshots/000001-1-0", [BIG, b"more"])
    assert store.get(second) == BIG + b"more"
    with pytest.raises(SnapshotDamaged, match=r"snapshots/000001-1-0 has 10,244 bytes; 10,240 bytes were written"):
        store.get(first)


@pytest.mark.parametrize(
    "name", ["x", "000001-1", "snapshots/1-1", "manifests/000001-1", "snapshots/../000001-1", "/a"]
)
def test_names_that_collect_would_not_know_are_refused(store: Store, name: str) -> None:
    with pytest.raises(AssertionError):
        store.put(name, [BIG])


def test_every_change_of_a_bit_and_every_shortened_blob_is_seen(store: Store) -> None:
    store.inline_bytes = 0
    data = b"a small blob\0\xff"
    blob = store.put("snapshots/000001-1-0", [data])
    assert blob.data is None
    damaged = [data[:size] for size in range(len(data))] + [data + b"\0"]
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            damaged.append(bytes(changed))
    for other in damaged:
        spoil(store, blob.name, other)
        with pytest.raises(SnapshotDamaged, match=r"snapshots/000001-1-0 has") as caught:
            store.get(blob)
        assert not isinstance(caught.value, StoreUnreachable)
    overwrite(store, blob.name, data)
    assert store.get(blob) == data


def test_inline_blobs_are_verified_too(store: Store) -> None:
    blob = store.put("snapshots/000001-1-0", [b"abc"])
    assert files(store) == set()
    for other in (b"abd", b"ab", b""):
        with pytest.raises(SnapshotDamaged):
            store.get(Blob(blob.name, blob.size, blob.checksum, other))


def test_every_damage_of_a_manifest_is_passed_over(store: Store) -> None:
    store.write_manifest(manifest(1))
    store.write_manifest(manifest(2))
    data = encode(manifest(2))
    name = "manifests/0000000002.json"
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        for other in (bytes(flipped), data[:position]):
            spoil(store, name, other)
            found = store.latest()
            assert found is not None
            assert found[0] == manifest(1)
            assert len(found[1]) == 1
            assert found[1][0].startswith("epoch 2: ")
            assert name in found[1][0]
    store.write_manifest(manifest(2))  # a damaged one may be written again
    assert store.latest() == (manifest(2), [])


def test_a_missing_blob_is_damage_and_an_older_epoch_is_used(store: Store) -> None:
    one = store.put("snapshots/000001-1-0", [BIG])
    two = store.put("snapshots/000002-1-0", [BIG])
    store.write_manifest(manifest(1, one))
    store.write_manifest(manifest(2, one, two))
    assert store.latest(store.verify) == (manifest(2, one, two), [])
    spoil(store, two.name, None)
    assert store.latest() == (manifest(2, one, two), [])  # only who asks has the blobs read
    found = store.latest(store.verify)
    assert found is not None
    assert found[0] == manifest(1, one)
    assert "000002-1-0 is missing; 10,240 bytes were written" in found[1][0]


def ways(data: bytes) -> dict[str, bytes | None]:
    """How a file may be damaged."""
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 0x10
    return {"delete": None, "truncate": data[: len(data) // 2], "flip": bytes(flipped), "replace": data[::-1]}


@IN_A_DIRECTORY
def test_damage_of_any_one_file_loses_nothing(store: Store) -> None:
    """Neither an epoch nor a byte; and whoever looks after the store has it as it was."""
    store.inline_bytes = 100
    contents = {f"snapshots/{epoch:06d}-{task}-0": os.urandom(500) for epoch in (1, 2, 3) for task in (1, 2)}
    blobs = {name: store.put(name, [data]) for name, data in contents.items()}
    manifests = [manifest(epoch, *list(blobs.values())[: 2 * epoch]) for epoch in (1, 2, 3)]
    for each in manifests:
        store.write_manifest(each)
    whole = {name: store._files.read(name, 1 << 30) for name in store._ours()}
    assert len(whole) == 2 * (6 + 3)
    for name, data in whole.items():
        for way, other in ways(data).items():
            if other is None:
                store._files.delete(name)
            else:
                overwrite(store, name, other)
            assert store.latest(store.verify) == (manifests[2], []), f"{way} {name}"
            assert all(store.get(blob) == contents[blob.name] for blob in blobs.values())
            found = [store.mend(blob, store.sizes()) for blob in blobs.values()]
            seen_by_size = not name.endswith(".json") and way in ("delete", "truncate")
            seen_by_size &= (name.partition("/")[0], way) != ("copies", "delete")  # it is mended, and no damage
            assert sum(what is not None for what in found) == seen_by_size, f"{way} {name}: {found}"
            for blob in blobs.values():
                deque(store.examine(blob), maxlen=0)
            for each in manifests:
                store.mend_manifest(each)
            assert {name: store._files.read(name, 1 << 30) for name in store._ours()} == whole, f"{way} {name}"


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def grown(path: Path) -> None:
    os.truncate(path, 1 << 40)  # it has holes in place of bytes, and nobody has the memory to read it


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def full_directory(path: Path) -> None:
    directory(path)
    (path / "theirs").touch()


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/null")


@pytest.mark.parametrize("harm", [pipe, grown, directory, full_directory, loop, device])
def test_a_file_that_nobody_should_read_is_damaged(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    """Reading a pipe waits for ever, and reading a huge file takes all memory."""
    store = Store.open(str(tmp_path), "job")
    blob = store.put("snapshots/000001-1-0", [BIG])
    store.write_manifest(manifest(1, blob))
    names = store._ours()
    assert len(names) == 4
    told: list[str] = []
    store.second_copy_read = told.append
    for name in names:
        harm(tmp_path / "job" / name)
        assert store.latest(store.verify) == (manifest(1, blob), [])
        assert store.get(blob) == BIG
        assert b"".join(store.pieces(blob)) == BIG
        assert bool(told) != name.startswith("copies"), told
        told.clear()
        found = [store.mend(blob, store.sizes()), store.mend_manifest(manifest(1, blob))]
        words = ("is a pipe, a device or a directory", "is a link that leads nowhere", "has 1,099,511,627,776 bytes")
        assert any(word in str(found) for word in words), found
        assert (tmp_path / "job" / name).is_file()
        assert (tmp_path / "job" / name).stat().st_size < 1 << 20
    store.end("FINISHED")
    harm(tmp_path / "job" / "manifests" / "ended")
    assert store.ended() is None


@IN_A_DIRECTORY
def test_what_has_no_whole_copy_is_not_mended(store: Store) -> None:
    blob = store.put("snapshots/000001-1-0", [BIG])
    store._files.delete(blob.name)
    overwrite(store, "copies/000001-1-0", BIG[::-1])
    with pytest.raises(SnapshotDamaged, match=r"snapshots/000001-1-0 is missing.*copies/000001-1-0 has changed"):
        store.mend(blob, store.sizes())
    with pytest.raises(SnapshotDamaged, match=r"snapshots/000001-1-0 is missing.*copies/000001-1-0 has changed"):
        deque(store.examine(blob), maxlen=0)
    assert store._files.names("snapshots") == []
    assert store._files.read("copies/000001-1-0", 1 << 30) == BIG[::-1]


@IN_A_DIRECTORY
def test_a_copy_that_does_not_answer_is_not_taken_for_damaged(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a job would continue from an older epoch, and delete the newer one, as soon as one file is damaged and
    the other cannot be read for a moment."""
    blob = store.put("snapshots/000001-1-0", [BIG])
    store.write_manifest(manifest(1, blob))
    store.write_manifest(manifest(2, blob))
    read, pieces = store._files.read, store._files.pieces

    def silent(name: str) -> None:
        if name.startswith("copies/"):
            raise TimeoutError(110, "timed out")

    def silent_read(name: str, most: int) -> bytes:
        silent(name)
        return read(name, most)

    def silent_pieces(name: str, most: int) -> Iterator[bytes]:
        silent(name)
        yield from pieces(name, most)

    monkeypatch.setattr(store._files, "read", silent_read)
    monkeypatch.setattr(store._files, "pieces", silent_pieces)
    store.verify(manifest(2, blob))
    overwrite(store, "manifests/0000000002.json", b"{}")
    with pytest.raises(StoreUnreachable):
        store.latest()
    overwrite(store, blob.name, BIG[::-1])
    for use in (store.get, lambda blob: list(store.pieces(blob)), lambda blob: store.verify(manifest(2, blob))):
        with pytest.raises(StoreUnreachable):
            use(blob)
    with pytest.raises(StoreUnreachable):
        store.mend(blob, {})


@IN_A_DIRECTORY
def test_a_file_that_a_disk_cannot_read_is_written_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad sector gives an error and no bytes; the copy is elsewhere on the disk."""
    blob = store.put("snapshots/000001-1-0", [BIG])
    pieces, bad = store._files.pieces, {blob.name}

    def bad_sector(name: str, most: int) -> Iterator[bytes]:
        if name in bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        yield from pieces(name, most)

    monkeypatch.setattr(store._files, "pieces", bad_sector)
    store.verify(manifest(1, blob))
    overwrite(store, blob.name, BIG[::-1])
    assert "It was written again from" in (result_of(store.examine(blob)) or "")
    assert store._files.read(blob.name, 1 << 30) == BIG


@pytest.mark.parametrize("remote", [False, True])
def test_large_blobs_come_in_pieces(store: Store, monkeypatch: pytest.MonkeyPatch, remote: bool) -> None:
    """Whatever is damaged before the first piece is seen before it is given."""
    monkeypatch.setattr(type(store._files), "remote", remote)
    data = os.urandom(5 << 20)
    blob = store.put_pieces("snapshots/000001-1-0", (data[at : at + 70_000] for at in range(0, len(data), 70_000)))
    assert blob == store.put("snapshots/000001-1-0", [data])
    assert b"".join(store.pieces(blob)) == data
    flipped = bytearray(data)
    flipped[-1] ^= 1
    overwrite(store, blob.name, bytes(flipped))
    if not remote:
        assert b"".join(store.pieces(blob)) == data
        overwrite(store, "copies/000001-1-0", data[:-1])
    says = r"has changed since" if remote else r"has changed since.*copies/000001-1-0 has 5,242,879 bytes"
    with pytest.raises(SnapshotDamaged, match=says):
        next(store.pieces(blob))


@pytest.mark.parametrize("store", ["memory", "arrow"], indirect=True)
def test_an_object_store_has_each_blob_once_and_each_manifest_twice(store: Store) -> None:
    one, two = (store.put(f"snapshots/00000{epoch}-1-0", [BIG]) for epoch in (1, 2))
    store.write_manifest(manifest(1, one))
    store.write_manifest(manifest(2, one, two))
    names = {one.name, two.name, *manifest_files(1), *manifest_files(2)}
    assert set(store._ours()) == names
    assert store.mend(two, store.sizes()) is None
    assert result_of(store.examine(two)) is None
    store._files.delete(manifest_files(2)[0])
    assert store.latest(store.verify) == (manifest(2, one, two), [])
    assert store.mend_manifest(manifest(2, one, two)) is not None
    assert set(store._ours()) == names
    store._files.delete(two.name)
    for use in (store.get, lambda blob: result_of(store.examine(blob)), lambda blob: store.mend(blob, store.sizes())):
        with pytest.raises(SnapshotDamaged, match=r"snapshots/000002-1-0 is missing; 10,240 bytes were written"):
            use(two)
    found = store.latest(store.verify)
    assert found is not None
    assert found[0] == manifest(1, one)


@pytest.mark.parametrize("pieces", [1, 8])
def test_pieces_that_cannot_be_made_say_nothing_of_the_store(store: Store, pieces: int) -> None:
    def made() -> Iterator[bytes]:
        yield from [bytes(1 << 20)] * pieces
        raise ModuleNotFoundError("No module named 'theirs'")

    with pytest.raises(ModuleNotFoundError, match="theirs"):
        store.put_pieces("snapshots/000001-1-0", made())


def test_only_the_owner_can_read_what_is_saved(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = Store.open(tmp_path / "new" / "epochs", "job", durable=True)
        store.write_manifest(manifest(1, store.put("snapshots/000001-1-0", [BIG])))
        store.end("CANCELLED")
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "new").rglob("*")}
    assert modes
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_epochs_none_of_which_can_be_used_are_not_nothing(store: Store) -> None:
    for epoch in (1, 2):
        store.write_manifest(manifest(epoch))
        spoil(store, f"manifests/{epoch:010d}.json", b"{}")
    with pytest.raises(SnapshotDamaged, match=r"none of the 2 epochs.*epoch 2: .*epoch 1: .*start the job anew"):
        store.latest()


def test_what_does_not_answer_is_not_passed_over(store: Store) -> None:
    store.write_manifest(manifest(1))
    store.write_manifest(manifest(2))

    def unreachable(manifest: Manifest) -> None:
        raise StoreUnreachable("asleep")

    with pytest.raises(StoreUnreachable, match="asleep"):
        store.latest(unreachable)


@pytest.mark.parametrize("other", [FORMAT - 1, FORMAT + 7])
def test_another_format_is_not_passed_over_and_not_touched(store: Store, other: int) -> None:
    store.write_manifest(manifest(1))
    body = encode(replace(manifest(2), version=other))[34:-2]
    overwrite(store, "manifests/0000000002.json", b'{"checksum":"%08x","manifest":%b}\n' % (zlib.crc32(body), body))
    for use in (store.latest, store.check_format):
        with pytest.raises(StoreError, match=f"has format {other}"):
            use()
    assert store.collect(1) == 0
    assert store.epochs() == [2, 1]


def test_a_directory_that_another_job_has_just_removed_is_made_again_by_check(monkeypatch: pytest.MonkeyPatch) -> None:
    files = DictFiles()
    store = Store(files, "job")
    gone = [True]
    write = files.write

    def vanishes(name: str, parts: Any, flush: bool) -> None:
        if gone:
            gone.pop()
            raise FileNotFoundError(name)
        write(name, parts, flush)

    monkeypatch.setattr(files, "write", vanishes)
    store.check()
    assert not files.files
    gone += [True, True]
    with pytest.raises(StoreUnreachable, match="cannot write in nowhere"):
        store.check()


def test_the_same_manifest_again_is_fine_and_another_is_not(store: Store) -> None:
    store.write_manifest(manifest(1))
    store.write_manifest(manifest(1))
    with pytest.raises(StoreError, match=r"epoch 1 is complete already.*Two runs of job 'job'"):
        store.write_manifest(manifest(1, final=True))
    assert store.read_manifest(1) == manifest(1)


def test_a_renamed_manifest_is_not_trusted(store: Store) -> None:
    overwrite(store, "manifests/0000000007.json", encode(manifest(6)))
    overwrite(store, "manifests/0000000008.json", encode(manifest(8, job="other")))
    for epoch in (7, 8):
        with pytest.raises(SnapshotDamaged, match="somebody renamed or copied it"):
            store.read_manifest(epoch)


def test_epochs_are_told_newest_first_and_only_manifests_count(store: Store) -> None:
    for epoch in (9, 10, 100000, 2):
        store.write_manifest(manifest(epoch))
    for name in ("manifests/notes.txt", "manifests/3.json", "manifests/.0000000004.json.0123456789ab.tmp"):
        overwrite(store, name, b"x")
    assert store.epochs() == [100000, 10, 9, 2]
    assert store.collect(1) == 7  # three epochs with their copies, and what was left half-written
    assert files(store) == {"manifests/0000100000.json", "manifests/notes.txt", "manifests/3.json"}


def test_check_leaves_no_file(store: Store) -> None:
    store.check()
    assert files(store) == set()


def test_only_the_job_s_own_files_are_destroyed(store: Store) -> None:
    blob = store.put("snapshots/000001-1-0", [BIG])
    store.write_manifest(manifest(1, blob))
    for name in ("snapshots/mine.txt", "manifests/.hidden", "other/000001-1-0"):
        overwrite(store, name, b"x")
    store.destroy()
    assert files(store) == {"snapshots/mine.txt", "manifests/.hidden"}
    assert store._files.names("other") == ["other/000001-1-0"]
    for name in ("snapshots/mine.txt", "manifests/.hidden", "other/000001-1-0"):
        store._files.delete(name)
    overwrite(store, "snapshots/.000001-1-0.0123456789ab.tmp", b"x")
    store.destroy()
    store.destroy()
    assert files(store) == set()


def test_the_note_that_a_job_has_ended_stays_until_all_else_is_gone(store: Store) -> None:
    """A JobMaster that is started again at any moment of it must not run the job anew."""
    blob = store.put("snapshots/000001-1-0", [BIG])
    store.write_manifest(manifest(1, blob))
    assert store.ended() is None
    store.end("CANCELLED")
    assert store.ended() == "CANCELLED"
    store.verify(store.read_manifest(1))
    assert store.collect(1) == 0
    assert store.ended() == "CANCELLED"
    delete = store._files.delete
    left: list[str | None] = []

    def watched(name: str) -> None:
        left.append(store.ended())
        delete(name)

    store._files.delete = watched  # type: ignore[method-assign]
    store.destroy()
    assert set(left) <= {"CANCELLED"}
    assert store.ended() is None
    assert files(store) == set()


def test_nothing_is_left_of_a_destroyed_directory(tmp_path: Path) -> None:
    store = Store.open(tmp_path, "job")
    other = Store.open(tmp_path, "other")
    for each in (store, other):
        each.write_manifest(manifest(1, each.put("snapshots/000001-1-0", [BIG]), job=each.job))
    store.destroy()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    other.verify(other.read_manifest(1))


def test_a_store_can_be_sent_to_another_process(tmp_path: Path) -> None:
    store = Store.open(tmp_path, "job", durable=True)
    blob = store.put("snapshots/000001-1-0", [BIG])
    again: Store = pickle.loads(pickle.dumps(store))
    assert again.get(blob) == BIG
    assert again._files._durable  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="only a store from"):
        pickle.dumps(Store(again._files, "job"))


@pytest.mark.parametrize("folder", ["manifests", "snapshots"])
def test_a_file_in_place_of_a_folder_may_pass(tmp_path: Path, folder: str) -> None:
    """Reading a copy in a file's stead must not hide what the file system has said of the file."""
    store = Store.open(tmp_path, "job")
    blob = store.put("snapshots/00000001-1-1", [BIG])
    store.write_manifest(manifest(1, blob))
    (tmp_path / "job" / folder).rename(tmp_path / "aside")
    (tmp_path / "job" / folder).write_text("in the way")
    (tmp_path / "job" / "copies").rename(tmp_path / "copies aside")
    (tmp_path / "job" / "copies").write_text("in the way, too")
    calls = [lambda: store.get(blob)] if folder == "snapshots" else [lambda: store.write_manifest(manifest(2, blob))]
    for call in calls:
        with pytest.raises(StoreError, match="Something else has that name") as caught:
            call()
        assert caught.value.may_pass
        assert pickle.loads(pickle.dumps(caught.value)).may_pass, "a worker says it to the JobMaster"


@pytest.mark.parametrize("durable", [False, True])
def test_what_is_flushed_to_the_disk(durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        flushed.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    store = Store.open(tmp_path, "job", durable=durable)
    blob = store.put("snapshots/000001-1-0", [BIG])
    # A new directory always: with it a power cut would take what was flushed in it.
    assert {".", "job"} <= set(flushed)
    assert any("000001-1-0" in name for name in flushed) == durable
    flushed.clear()
    store.put("snapshots/000001-2-0", [BIG])
    assert len(flushed) == (4 if durable else 0)
    store.write_manifest(manifest(1, blob))
    flushed.clear()
    store.write_manifest(manifest(2, blob))
    assert len(flushed) == (4 if durable else 2)
    assert flushed[0].startswith("job/manifests/.0000000002.json.")
    assert flushed[1] == "job/manifests"


def refused(name: str) -> Exception | None:
    return PermissionError(13, "no") if "3" in name else None


steps = st.lists(
    st.tuples(
        st.sampled_from(["complete", "complete", "complete", "abandon", "begin", "damage", "collect", "stuck"]),
        st.lists(st.sampled_from(["delta", "delta", "base", "same"]), min_size=3, max_size=3),
        st.integers(1, 3),
    ),
    max_size=25,
)


@given(steps=steps)
def test_collect_never_deletes_what_is_needed(steps: list[tuple[str, list[str], int]]) -> None:
    """Three tasks with chains of deltas; epochs are completed, abandoned, damaged, and the store is collected."""
    disk = DictFiles()
    store = Store(disk, "job")
    chains: list[list[Blob]] = [[], [], []]  # of the newest complete epoch, from which the tasks continue
    whole: dict[int, Manifest] = {}
    making: list[Blob] = []
    epoch = 0
    for step, kinds, keep in steps:
        if step in ("complete", "abandon", "begin"):
            epoch += 1
            extended = []
            for task, (kind, chain) in enumerate(zip(kinds, chains, strict=True)):
                if kind == "same" and chain:
                    extended.append(chain)
                    continue
                content = f"{epoch} {task}".encode() * INLINE_BYTES
                blob = store.put(f"snapshots/{epoch:06d}-{task}-0", [content])
                extended.append([blob] if kind == "base" else [*chain, blob])
            if step == "complete":
                whole[epoch] = manifest(epoch, *(blob for chain in extended for blob in chain))
                store.write_manifest(whole[epoch])
                chains = extended
                making = []
            elif step == "begin":
                chains = extended  # later deltas build upon it whether or not it is ever complete
                making += [blob for chain in extended for blob in chain]
            disk.files[f"snapshots/.{epoch:06d}-0-0.0123456789ab.tmp"] = b"left by a process that was killed"
        elif step == "damage" and len(whole) > 1:
            worst = max(whole)
            disk.files[f"manifests/{worst:010d}.json"] = disk.files[f"copies/{worst:010d}.json"] = b"{}"
            del whole[worst]
            if making:
                chains, making = [[], [], []], []
        elif step in ("collect", "stuck"):
            disk.broken = refused if step == "stuck" else accepted
            before = set(disk.files)
            deleted = store.collect(keep)
            assert deleted == len(before) - len(disk.files)
            newest = sorted(whole, reverse=True)[:keep]
            for each in newest:
                store.verify(store.read_manifest(each))
            for blob in making:
                if newest and int(blob.name[10:16]) > newest[0]:
                    store.get(blob)
            if step == "collect" and newest:
                needed = {blob.name for each in newest for blob in whole[each].blobs()}
                left = {name for name in disk.files if name.startswith("snapshots/")}
                assert all(name in needed or int(name[-len(name) + 10 :].lstrip(".")[:6]) > newest[0] for name in left)
                assert {name.replace("snapshots/", "copies/") for name in needed} <= disk.files.keys()
                assert [each for each in store.epochs() if each <= newest[0]] == newest
                whole = {each: whole[each] for each in newest}
            elif step == "stuck":
                whole = {each: whole[each] for each in whole if each in store.epochs()}
    if whole:
        found = store.latest(store.verify)
        assert found is not None
        assert found[0] == whole[max(whole)]


def test_a_snapshot_older_than_the_manifest_before_it_is_kept(store: Store) -> None:
    early = store.put("snapshots/000002-1-0", [BIG])
    store.write_manifest(manifest(1, store.put("snapshots/000001-1-0", [BIG])))
    overwrite(store, "snapshots/.000002-2-0.0123456789ab.tmp", b"in the making")
    assert store.collect(1) == 0
    assert store.get(early) == BIG
    store.write_manifest(manifest(2, early))
    assert store.collect(1) == (4 if store.remote else 5)
    store.verify(store.read_manifest(2))


def test_what_cannot_be_deleted_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    disk = DictFiles()
    store = Store(disk, "job")
    for epoch in range(1, 6):
        store.put(f"snapshots/{epoch:06d}-1-0", [BIG])
        store.write_manifest(manifest(epoch))
    disk.broken = lambda name: PermissionError(13, "Permission denied")
    assert store.collect(1) == 0
    assert len(disk.asked) == 8  # the manifests; blobs stay as long as a manifest may need them
    assert store.collect(1) == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "job job: old snapshots could not be deleted" in caplog.text
    assert "Give the user" in caplog.text
    disk.broken = lambda name: TimeoutError(110, "timed out")
    disk.asked.clear()
    assert store.collect(1) == 0
    assert len(disk.asked) == 1  # who does not answer is not asked again
    disk.broken = accepted
    assert store.collect(1) == 18
    assert set(disk.files) == {"manifests/0000000005.json", "copies/0000000005.json"}


def test_collect_survives_a_store_that_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    class Silent(DictFiles):
        def names(self, folder: str) -> list[str]:
            raise TimeoutError(110, "timed out")

    assert Store(Silent(), "job").collect(1) == 0
    assert "timed out" in caplog.text
    with pytest.raises(StoreUnreachable, match="cannot list nowhere/manifests: timed out"):
        Store(Silent(), "job").latest()
