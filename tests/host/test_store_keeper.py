"""The JobMaster's keeper of the store: which epoch it goes back to."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from penstock.host.carry import store_keeper as keeper_module
from penstock.host.carry.store_keeper import NotSaved, StoreKeeper
from penstock.host.process.collected import Collected, EncodedSinkRecords
from penstock.runtime.epochs.manifest import Blob, Manifest, TaskEntry
from penstock.runtime.epochs.participant import Declined, EpochReport, Participant
from penstock.runtime.epochs.store import INLINE_BYTES, Store, manifest_files
from penstock.runtime.errors import SnapshotDamaged, StoreError, StoreUnreachable
from penstock.runtime.program.flow import Flow
from penstock.runtime.program.graph import SAVEPOINT
from penstock.runtime.records.codec import decode, encode
from penstock.runtime.sinks.call import Null
from penstock.runtime.sources.memory import Memory
from tests.epochs.dict_files import DictFiles


def manifest(epoch: int) -> Manifest:
    return Manifest(job="job", epoch=epoch, created=1.5, final=False, key_groups=8, tasks=[], collected=[])


@pytest.fixture
def keeper(tmp_path: Path) -> StoreKeeper:
    store = Store.open(str(tmp_path), "job")
    for epoch in (1, 2, 3):
        store.write_manifest(manifest(epoch))
    return StoreKeeper(store, Collected(epochs=True), said=lambda reason: None)


def test_an_epoch_that_was_refused_is_not_chosen_again(keeper: StoreKeeper) -> None:
    """Its bytes are as they were written, and yet no task could read them."""
    found = keeper.older(3, "no readable header")
    assert found is not None
    assert found.epoch == 2
    assert list(keeper.store.epochs()) == [2, 1]
    found = keeper.older(2, "no readable header")
    assert found is not None
    assert found.epoch == 1


def test_a_job_does_not_go_back_behind_what_a_sink_has_committed_and_cannot_take_back(keeper: StoreKeeper) -> None:
    keeper.cannot_take_back = ["out"]
    words = r"epoch 2: from it on, records would come again that sink 'out' has committed up to epoch 3, and that it"
    keeper.continue_from(keeper.store.read_manifest(3))
    found = keeper.older(3, "no readable header")  # it can be read after all
    assert found is not None
    assert found.epoch == 3
    with pytest.raises(SnapshotDamaged, match=words):
        keeper.older(3, "no readable header")
    assert list(keeper.store.epochs()) == [3, 2, 1]  # people may put back what is missing
    for name in manifest_files(3):
        (Path(keeper.store.place) / name).write_bytes(b"stale")
    with pytest.raises(SnapshotDamaged, match=words):
        keeper.newest()
    keeper.cannot_take_back = []
    newest = keeper.newest()
    assert newest is not None
    assert newest[0].epoch == 2
    assert keeper.last == newest[0]


def test_the_refused_epoch_itself_is_chosen_when_its_snapshots_were_compacted_meanwhile(tmp_path: Path) -> None:
    """What the manifest refers to is still there, and only the compacted snapshot cannot be read."""
    store = Store.open(str(tmp_path), "job")
    series = [store.put(f"snapshots/{epoch:08d}-0", [bytes([epoch])]) for epoch in (1, 2)]
    whose = {"number": 0, "name": "count[0]", "index": 0, "parallelism": 1, "operators": ["count"]}
    task = TaskEntry(**whose, finished=False, groups=None, blobs=list(series))  # type: ignore[arg-type]
    written = replace(manifest(2), tasks=[task])
    store.write_manifest(manifest(1))
    store.write_manifest(written)
    keeper = StoreKeeper(store, Collected(epochs=True), said=lambda reason: None)
    keeper.continue_from(written)
    written.tasks[0].blobs[:] = [store.put("snapshots/00001002-0-to-2", [b"both"])]
    found = keeper.older(2, "no readable header")
    assert found is not None
    assert (found.epoch, found.tasks[0].blobs) == (2, series)
    found = keeper.older(2, "no readable header")
    assert found is not None
    assert found.epoch == 1, "nobody can read these either"


def test_the_refused_epoch_itself_is_chosen_once_more_when_what_was_damaged_was_written_again(tmp_path: Path) -> None:
    """A worker whose first answer got lost writes the same snapshot a second time."""
    store = Store.open(str(tmp_path), "job")
    store.inline_bytes = 0
    blob = store.put("snapshots/00000001-0", [b"state"])
    whose = {"number": 0, "name": "count[0]", "index": 0, "parallelism": 1, "operators": ["count"]}
    written = replace(manifest(1), tasks=[TaskEntry(**whose, finished=False, groups=None, blobs=[blob])])  # type: ignore[arg-type]
    store.write_manifest(written)
    keeper = StoreKeeper(store, Collected(epochs=True), said=lambda reason: None)
    keeper.continue_from(written)
    (tmp_path / "job" / blob.name).write_bytes(b"stale")
    (tmp_path / "job" / blob.name.replace("snapshots", "copies")).unlink()
    with pytest.raises(SnapshotDamaged, match="epoch 1: it was damaged"):
        keeper.older(1, "it was damaged")
    store.put(blob.name, [b"state"])
    found = keeper.older(1, "it was damaged")
    assert found is not None
    assert found.epoch == 1
    with pytest.raises(SnapshotDamaged, match="nobody can read it"):
        keeper.older(1, "nobody can read it")


def test_without_one_before_it_the_reason_is_told(keeper: StoreKeeper) -> None:
    with pytest.raises(SnapshotDamaged, match="epoch 1: no readable header"):
        keeper.older(1, "no readable header")


# --- looking after what is saved -------------------------------------------------------------------------------------

BIG = bytes(range(256)) * 40


class Watched:
    """A keeper without a thread, of a job with one task, and what it says."""

    def __init__(self, place: Path) -> None:
        self.store = Store.open(str(place), "job")
        self.told: list[tuple[frozenset[str], str]] = []
        self.collected = Collected(epochs=True)
        self.keeper = StoreKeeper(self.store, self.collected, lambda reason: None, self._lost, thread=False)

    def _lost(self, names: frozenset[str], reason: str) -> None:
        self.told.append((names, reason))

    def manifest(self, epoch: int, *blobs: Blob) -> Manifest:
        entry = TaskEntry(
            number=0, name="count[0]", index=0, parallelism=1, operators=["count"], finished=False, groups=None,
            blobs=list(blobs),
        )  # fmt: skip
        return replace(manifest(epoch), tasks=[entry])

    def blob(self, epoch: int) -> Blob:
        return self.store.put(f"snapshots/{epoch:08d}-0-1", [BIG, bytes(epoch)])


@pytest.fixture
def watched(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Watched:
    caplog.set_level(logging.WARNING)
    for name in ("penstock", keeper_module.__name__):  # whatever tests before have done to them
        monkeypatch.setattr(logging.getLogger(name), "disabled", False)
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    return Watched(tmp_path)


def delete(watched: Watched, *names: str) -> None:
    for name in names:
        watched.store._files.delete(name)


def test_a_file_that_is_missing_is_written_again_and_told(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    blob = watched.blob(1)
    assert watched.keeper.save(watched.manifest(1, blob))
    watched.keeper.look()
    assert watched.keeper.damage is None
    delete(watched, blob.name)
    watched.keeper.look()
    assert watched.keeper.damage is not None
    assert f"{blob.name} is missing; 10,241 bytes were written. It was written again from" in watched.keeper.damage
    assert blob.name in caplog.text
    assert watched.store._files.read(blob.name, 1 << 30) == watched.store._files.read("copies/00000001-0-1", 1 << 30)
    assert watched.told == []


def test_a_missing_second_copy_is_written_again_and_is_no_damage(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever writes a file and its copy may die in between."""
    blob = watched.blob(1)
    assert watched.keeper.save(watched.manifest(1, blob))
    for name in ("copies/00000001-0-1", "copies/0000000001.json"):
        delete(watched, name)
        watched.keeper.look()
        assert watched.keeper.damage is None
        assert (
            f"the second copy {watched.store.place}/{name} of a file was missing, and was written again" in caplog.text
        )
        assert watched.store._files.read(name, 1 << 30)
    assert watched.told == []


def test_a_manifest_that_is_no_file_any_more_is_written_again_and_told(watched: Watched) -> None:
    whole = watched.manifest(1, watched.blob(1))
    assert watched.keeper.save(whole)
    watched.keeper.look()
    assert watched.keeper.damage is None
    root = Path(watched.store.place)
    for name in ("manifests/0000000001.json", "copies/0000000001.json"):
        (root / name).unlink()
        (root / name).symlink_to("/dev/null")
        watched.keeper.damage = None
        watched.keeper.look()
        assert f"{name} is a pipe, a device or a directory" in str(watched.keeper.damage)
        assert watched.store.read_manifest(1) == watched.keeper.last


def test_a_changed_byte_is_found_by_reading(watched: Watched) -> None:
    blob = watched.blob(1)
    watched.keeper.save(watched.manifest(1, blob))
    data = bytearray(watched.store._files.read(blob.name, 1 << 30))
    data[5] ^= 1
    watched.store._files.write(blob.name, [bytes(data)], False)
    watched.keeper.look()
    assert watched.keeper.damage is None, "its size is as it was"
    assert sum(watched.keeper.examine()) == 2 * blob.size
    assert "has changed since it was written" in (watched.keeper.damage or "")
    assert watched.store.get(blob) == watched.store._files.read(blob.name, 1 << 30)


def test_what_is_lost_is_told_until_no_epoch_needs_it_and_no_epoch_builds_on_it(watched: Watched) -> None:
    first, second = watched.blob(1), watched.blob(2)
    watched.keeper.save(watched.manifest(1, first))
    delete(watched, first.name, "copies/00000001-0-1")
    watched.keeper.look()
    ((names, reason),) = watched.told
    assert names == {first.name}
    assert f"has lost snapshots or records: {watched.store.place}/{first.name} is missing" in reason
    with pytest.raises(SnapshotDamaged, match=r"count\[0\] builds on a snapshot that is lost: .*-0-1 is missing"):
        watched.keeper.save(watched.manifest(2, first, second))
    assert list(watched.store.epochs()) == [1]
    watched.told.clear()
    watched.keeper.look()
    assert len(watched.told) == 1
    assert watched.keeper.save(watched.manifest(2, second))
    assert watched.keeper.save(watched.manifest(3, second))
    watched.told.clear()
    watched.keeper.look()
    assert watched.told == []


def test_what_is_there_again_is_not_lost(watched: Watched) -> None:
    """A task that has ended writes its last snapshot again, under its name; or a disk is mounted again."""
    blob = watched.blob(1)
    watched.keeper.save(watched.manifest(1, blob))
    for file in (blob.name, "copies/00000001-0-1"):
        watched.store._files.write(file, [BIG[::-1], bytes(1)], False)
    assert sum(watched.keeper.examine()) == 2 * blob.size
    assert len(watched.told) == 1
    assert watched.blob(1) == blob
    assert watched.keeper.save(watched.manifest(2, blob))


@pytest.mark.parametrize("again", [StoreKeeper.look, lambda keeper: list(keeper.examine())])
def test_what_is_written_again_is_told_to_be_lost_no_more(
    watched: Watched, again: Callable[[StoreKeeper], Any]
) -> None:
    """Each time that it is told, a task that has ended saves its end once more, and no epoch is complete meanwhile."""
    first, second = watched.blob(1), watched.blob(2)
    watched.keeper.save(watched.manifest(1, first, second))
    for file in (first.name, "copies/00000001-0-1"):
        watched.store._files.write(file, [BIG[::-1], bytes(1)], False)
    delete(watched, second.name, "copies/00000002-0-1")
    list(watched.keeper.examine())
    watched.keeper.look()
    assert watched.told[-1][0] == {first.name, second.name}, "they are as they were"
    watched.told.clear()
    assert watched.blob(1) == first
    again(watched.keeper)
    assert watched.told[-1][0] == {second.name}
    assert watched.blob(2) == second
    watched.told.clear()
    again(watched.keeper)
    assert watched.told == []


def test_the_program_and_collected_records_are_written_again(watched: Watched) -> None:
    keeper = watched.keeper
    keeper.program = keeper.put_program(BIG)
    watched.collected.back(frozenset({0}), 1, {0})
    watched.collected.take(EncodedSinkRecords("sink", encode([BIG]), 0, 1, 1))
    keeper.save(watched.manifest(1))
    watched.collected.commit(1)
    assert keeper.last is not None
    lost = {blob.name for blob in keeper.last.blobs()}
    assert len(lost) == 2
    for path in Path(watched.store.place).rglob("*-*"):
        path.unlink()
    keeper.look()
    assert "What the job's processes still have of it is saved again" in (keeper.damage or "")
    keeper.save(watched.manifest(2))
    assert keeper.last is not None
    watched.store.verify(watched.store.read_manifest(2))
    assert not lost & {blob.name for blob in keeper.last.blobs()}
    again = StoreKeeper(watched.store, Collected(epochs=True), lambda reason: None, thread=False)
    again.continue_from(watched.store.read_manifest(2))
    assert [decode(*records) for records in again._collected.get("sink")] == [[BIG]]
    assert watched.store.get(again.program or keeper.last.collected[0]) == BIG


def test_manifests_are_written_again(watched: Watched) -> None:
    watched.keeper.save(watched.manifest(1))
    watched.keeper.save(watched.manifest(2))
    delete(watched, "manifests/0000000001.json", "manifests/0000000002.json", "copies/0000000002.json")
    watched.keeper.look()
    assert list(watched.store.epochs()) == [2, 1]
    assert watched.store.read_manifest(2) == watched.keeper.last
    watched.store._files.write("manifests/0000000002.json", [b"{}"], False)
    assert sum(watched.keeper.examine()) == 0
    assert watched.store._read_manifest(2, "manifests/0000000002.json") == watched.keeper.last


def test_the_snapshots_of_a_damaged_manifest_are_kept_until_it_is_written_again(watched: Watched) -> None:
    """Both files of the newest manifest but one are damaged when old epochs are deleted."""
    blobs = {epoch: watched.store.put(f"snapshots/{epoch:08d}-0", [BIG]) for epoch in (1, 2, 3)}
    for epoch, blob in blobs.items():
        watched.keeper.save(watched.manifest(epoch, blob))
    for name in manifest_files(2):
        watched.store._files.write(name, [b"damaged"], False)
    watched.keeper._collect()
    watched.keeper.look()
    assert watched.told == []
    assert watched.store.get(watched.store.read_manifest(2).tasks[0].blobs[0]) == BIG


def test_a_store_that_does_not_answer_has_lost_nothing(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = watched.blob(1)
    watched.keeper.save(watched.manifest(1, blob))

    def silent(*arguments: Any) -> Any:
        raise TimeoutError(110, "timed out")

    for method in ("sizes", "names", "read", "pieces"):
        monkeypatch.setattr(watched.store._files, method, silent)
    watched.keeper._watch()
    assert watched.told == []
    assert watched.keeper.damage is None


def test_what_a_list_does_not_show_and_can_be_read_is_not_lost(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared file system may show a directory as it was some seconds ago, but opens what is there."""
    blob = watched.blob(1)
    watched.keeper.save(watched.manifest(1, blob))
    monkeypatch.setattr(watched.store._files, "sizes", lambda folder: {})
    watched.keeper.look()
    assert watched.told == []
    assert watched.keeper.damage is None


def test_what_is_lost_stays_so_when_the_store_falls_silent(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that ends half-way has not found that what was lost is there."""
    first, second = watched.blob(1), watched.blob(2)
    watched.keeper.save(watched.manifest(1, first, second))
    delete(watched, second.name, "copies/00000002-0-1")
    watched.keeper.look()
    delete(watched, first.name)

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(watched.store._files, "write", full)
        with pytest.raises(StoreUnreachable):
            watched.keeper.look()
    with pytest.raises(SnapshotDamaged, match="builds on a snapshot that is lost"):
        watched.keeper.save(watched.manifest(2, first, second))


def test_a_store_that_is_silent_when_something_is_lost_is_waited_for(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look at what a manifest refers to may fail as writing it may, and ends no job either."""
    monkeypatch.setattr(keeper_module, "_RETRY_S", 0.0)
    first, second = watched.blob(1), watched.blob(2)
    watched.keeper.save(watched.manifest(1, first))
    delete(watched, first.name, "copies/00000001-0-1")
    watched.keeper.look()
    sizes, said = watched.store._files.sizes, []
    silent = iter([True, True, False])

    def at_times_silent(folder: str) -> dict[str, int]:
        if next(silent, False):
            raise TimeoutError(110, "timed out")
        return sizes(folder)

    monkeypatch.setattr(watched.store._files, "sizes", at_times_silent)
    monkeypatch.setattr(watched.keeper, "_said", said.append)
    assert watched.keeper.save(watched.manifest(2, second))
    assert len(said) == 3, said
    assert said[-1] is None


def test_what_is_deleted_while_it_is_read_is_not_lost(watched: Watched) -> None:
    """The keeper reads slowly, and deletes what no epoch needs any more in between."""
    blob = watched.store.put("snapshots/00000001-0-1", [BIG * 300])
    watched.keeper.save(watched.manifest(1, blob))
    reading = watched.keeper.examine()
    next(reading)
    for epoch in (2, 3):
        watched.keeper.save(watched.manifest(epoch, watched.blob(epoch)))
    assert watched.store.collect(2) == 4
    assert sum(reading) > 0
    assert watched.told == []
    assert watched.keeper.damage is None


def test_a_keeper_that_is_closed_ends_and_writes_nothing_more(keeper: StoreKeeper) -> None:
    keeper.continue_from(manifest(3))
    keeper.close()
    keeper.wait(60)
    assert keeper._thread is not None
    assert not keeper._thread.is_alive()


# --- a full store ----------------------------------------------------------------------------------------------------


def full_store(monkeypatch: pytest.MonkeyPatch) -> tuple[DictFiles, StoreKeeper, list[str | None]]:
    """A keeper without a thread, of a store with room for three epochs and a half, and why it could not write."""
    monkeypatch.setattr(keeper_module, "_RETRY_S", 0.0)
    files, said = DictFiles(), list[str | None]()

    def say(reason: str | None) -> None:
        said.append(reason)
        if len(said) > 100:
            keeper.close()  # what is tried so often is tried for ever

    keeper = StoreKeeper(Store(files, "job"), Collected(epochs=True), say, thread=False)
    keeper.save(manifest(1))
    files.room = 7 * len(files.files["manifests/0000000001.json"]) + 50
    return files, keeper, said


def test_epochs_that_are_not_needed_make_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk no epoch completes, and so it must not take a complete epoch to delete the old ones."""
    _, keeper, said = full_store(monkeypatch)
    for epoch in range(2, 12):
        assert keeper.save(manifest(epoch)), said[-1]
        assert keeper.store.epochs()[:2] == [epoch, epoch - 1]
    assert any(said)
    keeper.store.verify(keeper.store.read_manifest(10))


def test_an_epoch_that_a_full_directory_does_not_take_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nothing else could be done: a dead worker would get no new process before there is room."""
    files, keeper, said = full_store(monkeypatch)
    for epoch in (2, 3):
        assert keeper.save(manifest(epoch))
    room, files.room, collected, collect = files.room, 0, list[int](), keeper.store.collect

    def count(keep: int, spare: list[str]) -> int:
        collected.append(collect(keep, spare))
        return collected[-1]

    monkeypatch.setattr(keeper.store, "collect", count)
    said.clear()
    keeper._collected.take(EncodedSinkRecords("out", encode([1]), 0, 1, 4))
    with pytest.raises(NotSaved, match="No space left"):
        keeper.save(manifest(4))
    assert collected == [2, *[0] * (len(collected) - 1)]
    assert len(said) == len(collected)
    assert None not in said
    assert keeper.store.epochs() == [3, 2]
    assert keeper.collected_blobs == []  # the next epoch has its own with the same records
    files.room = room
    assert keeper.save(manifest(5))


@pytest.mark.parametrize("which", ["of a distant store", "the last one"])
def test_a_manifest_that_may_still_come_or_is_the_last_is_tried_for_ever(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, keeper, said = full_store(monkeypatch)
    monkeypatch.setattr(files, "remote", which == "of a distant store")
    files.room = 0
    assert not keeper.save(replace(manifest(2), final=which == "the last one"))
    assert len(said) > 100


def test_a_manifest_of_which_only_the_copy_is_missing_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever continues from this store finds it."""
    files, keeper, said = full_store(monkeypatch)
    said.clear()
    monkeypatch.setattr(keeper_module, "_TRIES", 1)
    files.room = len(files.files["manifests/0000000001.json"]) * 3 + 20
    assert keeper.save(manifest(2))
    assert "copies/0000000002.json" not in " ".join(files.files)
    assert len(said) == 2


def test_tasks_that_could_not_write_have_old_epochs_deleted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, keeper, _ = full_store(monkeypatch)
    assert keeper.save(manifest(2))
    for epoch in (3, 4):
        assert keeper.save(manifest(epoch))
        assert keeper.store.epochs() == [epoch, epoch - 1, epoch - 2]
        keeper.make_room()
        keeper.make_room()
        keeper._work.get_nowait()()
        assert keeper._work.empty()
        assert keeper.store.epochs() == [epoch, epoch - 1]


def test_a_task_that_could_not_write_says_whether_that_may_pass() -> None:
    files, said = DictFiles(), list[EpochReport]()
    participant = Participant(Store(files, "job"), 8, said.append, lambda work: None)
    participant.loop = Mock()
    snapshot = Mock(task=Mock(number=3), epoch=7, generation=1, finished=True)
    files.room = 0
    assert not participant._write(snapshot, [BIG])
    (declined,) = said
    assert isinstance(declined, Declined)
    assert declined.may_pass


# --- its threads -----------------------------------------------------------------------------------------------------


def test_an_error_that_nobody_has_thought_of_is_told_and_the_keeper_continues(tmp_path: Path) -> None:
    """Without its thread no epoch would complete any more, and the job would run on without a word."""
    told: list[Exception] = []
    keeper = StoreKeeper(
        Store.open(str(tmp_path), "job"), Collected(epochs=True), lambda reason: None, failed=told.append
    )

    def fail() -> None:
        raise ValueError("unheard of")

    goes_on = threading.Event()
    keeper.do(fail)
    keeper.do(goes_on.set)
    assert goes_on.wait(60)
    assert [str(error) for error in told] == ["unheard of"]
    keeper.close()


def test_a_series_that_was_replaced_meanwhile_is_compacted_as_it_was(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The JobMaster changes the chains of the last epoch when it hears what was put together before."""
    blobs = [Blob(f"snapshots/{n:08d}-0-1", 10, 0) for n in range(8)]
    first = watched.manifest(9, *blobs).tasks[0]
    watched.keeper.last = replace(manifest(9), tasks=[first, replace(first, number=1, blobs=list(blobs))])
    tasks = watched.keeper.last.tasks

    def together(*_: Any) -> Blob:
        tasks[1].blobs[:] = [Blob("all", 80, 0)]
        return Blob("all", 80, 0)

    monkeypatch.setattr(keeper_module, "compact_snapshots", together)
    monkeypatch.setattr(watched.keeper, "_watch", lambda: None)
    replaced: list[tuple[int, list[Blob]]] = []
    both = threading.Event()

    def hear(task: int, old: list[Blob], new: Blob) -> None:
        replaced.append((task, old))
        if task == 1:
            both.set()

    watched.keeper.tidy(9, hear)
    assert both.wait(60)
    assert replaced == [(0, blobs), (1, blobs)]


def test_what_was_replaced_and_deleted_before_its_compaction_is_not_lost(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task may save its whole state while the compaction of its earlier snapshots waits for its turn."""
    keeper = watched.keeper
    blobs = [watched.blob(n) for n in range(1, 9)]
    whole = watched.blob(9)

    def deleted(store: Store, *_: Any) -> Blob:
        for epoch in (9, 10):
            keeper.save(watched.manifest(epoch, whole))
        store.collect(2)
        return store.get(blobs[0])  # type: ignore[return-value]  # it raises

    monkeypatch.setattr(keeper_module, "compact_snapshots", deleted)
    keeper.save(watched.manifest(8, *blobs))
    keeper._compact_all({0: blobs}, 8, 8, Mock())
    keeper._work.get(timeout=60)()
    keeper.look()
    assert watched.told == []
    assert keeper.damage is None


def test_a_savepoint_that_nobody_waits_for_any_more_is_not_completed(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = Flow("job")
    flow.read(Memory([1])).write(Null())
    monkeypatch.setattr(keeper_module, "compact_snapshots", lambda *_: Blob("snapshots/00000001-0", 1, 0, b"1"))
    assert watched.keeper.save(watched.manifest(1))
    place = tmp_path / "saved"
    for wanted in range(3):
        answers = iter([True] * wanted + [False])
        watched.keeper.savepoint(flow.plan(1), str(place), partial(next, answers))
        assert next(answers, None) is None, "it has asked after each step"
    assert Store.open(place, SAVEPOINT).epochs() == []
    watched.keeper.savepoint(flow.plan(1), str(place))
    assert Store.open(place, SAVEPOINT).epochs() == [1]


def test_a_compacted_snapshot_lives_as_long_as_a_manifest_may_refer_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays while it is made, and until no epoch that is kept builds on what it was made of. Then references
    decide, and nothing of it is left in the store."""
    store = Store.open(tmp_path, "job")
    keeper = StoreKeeper(store, Collected(epochs=True), lambda reason: None, thread=False)
    content = b"x" * (INLINE_BYTES + 1)

    def save(epoch: int, blobs: list[Blob]) -> Manifest:
        task = TaskEntry(
            number=0, name="t", index=0, parallelism=1, operators=[], finished=False, groups=None, blobs=blobs
        )
        written = replace(manifest(epoch), tasks=[task])
        keeper.save(written)
        keeper._collect()
        return written

    def files() -> set[str]:
        return {path.name for folder in ("snapshots", "copies") for path in (tmp_path / "job" / folder).iterdir()}

    old = [store.put(f"snapshots/00000001-0-{n}", [content]) for n in range(2)]
    save(1, old)
    made: list[Blob] = []

    def compact(origin: Store, blobs: list[Blob], key_groups: int, target: Store, name: str) -> Blob:
        half_written = tmp_path / "job" / f"snapshots/.{name.rpartition('/')[2]}.0123456789ab.tmp"
        half_written.write_bytes(content)
        save(2, old)
        assert half_written.exists()
        half_written.unlink()
        return target.put(name, [content])

    monkeypatch.setattr(keeper_module, "compact_snapshots", compact)
    keeper._compact_all({0: list(old)}, 8, 2, lambda task, blobs, new: made.append(new))
    (new,) = made
    save(3, old)  # it was put together before the coordinator heard of the compaction
    assert store.get(new) == content
    for epoch in (4, 5):
        save(epoch, [new])
    assert not files() & {blob.name.rpartition("/")[2] for blob in old}
    assert store.get(new) == content
    for epoch in (6, 7):
        save(epoch, [])
    assert not {name for name in files() if not name.endswith(".json")}


def test_a_compaction_that_fails_leaves_nothing_that_is_spared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store.open(tmp_path, "job")
    keeper = StoreKeeper(store, Collected(epochs=True), lambda reason: None, thread=False)
    content = b"x" * (INLINE_BYTES + 1)

    def fails(origin: Store, blobs: list[Blob], key_groups: int, target: Store, name: str) -> Blob:
        target.put(name, [content])
        raise StoreError("on purpose")

    monkeypatch.setattr(keeper_module, "compact_snapshots", fails)
    old = [store.put("snapshots/00000001-0-0", [content])]
    keeper._compact_all({0: old}, 8, 1, lambda task, blobs, new: None)
    keeper.save(manifest(2))
    keeper._collect()
    assert list((tmp_path / "job" / "snapshots").iterdir()) == []


def test_what_is_compacted_from_a_compacted_snapshot_in_no_manifest_yet_is_spared(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The JobMaster changes the series of the last manifest, from which the next compaction takes it."""
    keeper, store = watched.keeper, watched.store
    monkeypatch.setattr(keeper_module, "compact_snapshots", lambda *given: store.put(given[4], [BIG]))
    series = [watched.blob(1), watched.blob(2)]
    keeper.save(watched.manifest(2, *series))
    made: list[Blob] = []
    for old in (series, made):
        keeper._compact_all({0: list(old)}, 8, 2, lambda task, old, new: made.append(new))
    for epoch in (3, 4):
        keeper._collect()
        assert [store.get(blob) for blob in made] == [BIG, BIG]
        keeper.save(watched.manifest(epoch, made[1]))
    keeper._collect()
    assert made[0].name not in store.sizes()
    for epoch in (5, 6):
        assert store.get(made[1]) == BIG
        keeper.save(watched.manifest(epoch))
        keeper._collect()
    assert made[1].name not in store.sizes()


def test_a_compaction_that_begins_while_files_are_deleted_is_spared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is known before its file is there, so that whoever lists the file knows it."""
    store = Store.open(tmp_path, "job")
    keeper = StoreKeeper(store, Collected(epochs=True), lambda reason: None, thread=False)
    content = b"x" * (INLINE_BYTES + 1)
    old = [store.put("snapshots/00000001-0-0", [content])]
    keeper.save(manifest(2))
    made: list[Blob] = []
    list_ours = store._ours
    monkeypatch.setattr(keeper_module, "compact_snapshots", lambda *given: store.put(given[4], [content]))

    def compacts_first() -> list[str]:
        keeper._compact_all({0: list(old)}, 8, 2, lambda task, blobs, new: made.append(new))
        return list_ours()

    monkeypatch.setattr(store, "_ours", compacts_first)
    keeper._collect()
    assert store.get(made[0]) == content
