"""Holding a directory: by one process at a time, and by none that is gone."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock as ps
from penstock.runtime.epochs.store import Store
from penstock.runtime.storage.directory_lock import DirectoryLock, DirectoryLocked, is_locked

# Holds a directory in a process of its own, and has a child that outlives it, as one that compacts may for a moment.
_HOLDER = """
import subprocess, sys
from penstock.runtime.epochs.store import Store
store = Store.open(sys.argv[1], "job")
store.lock()
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that holds the store of the job "job" in this directory, and its child."""
    command = [sys.executable, "-c", _HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        yield process, child
        process.kill()
        os.kill(child, 9)


def test_a_killed_holder_frees_its_store_though_its_child_lives(
    tmp_path: Path, holder: tuple[subprocess.Popen[str], int]
) -> None:
    process, child = holder
    store = Store.open(tmp_path, "job")
    assert store.is_locked()
    with pytest.raises(
        DirectoryLocked, match=rf"'job' is running and uses .*{tmp_path}/job.*checkpoints=.*another name"
    ):
        store.lock()
    Store.open(tmp_path, "other").lock()
    process.kill()
    process.wait()
    os.kill(child, 0)
    assert not store.is_locked()
    store.lock()
    assert Store.open(tmp_path, "job").is_locked()


def test_destroying_a_held_store_keeps_it_held(tmp_path: Path) -> None:
    store, other = Store.open(tmp_path, "job"), Store.open(tmp_path, "job")
    store.lock()
    store.put("snapshots/000001-a", [b"x" * 10_000])
    store.destroy()
    assert os.listdir(tmp_path / "job") == []
    with pytest.raises(DirectoryLocked):
        other.lock()
    store.release()
    assert os.listdir(tmp_path) == [], "an empty directory goes with its last holder"
    assert not other.is_locked()
    other.lock()
    with pytest.raises(DirectoryLocked):
        store.lock()


def test_a_store_with_files_stays_when_it_is_released(tmp_path: Path) -> None:
    store = Store.open(tmp_path, "job")
    store.lock()
    store.put("snapshots/000001-a", [b"x" * 10_000])
    store.release()
    assert os.listdir(tmp_path / "job" / "snapshots") == ["000001-a"]
    assert not store.is_locked()


def test_to_look_whether_a_store_is_held_makes_nothing(tmp_path: Path) -> None:
    assert not Store.open(tmp_path / "checkpoints", "job").is_locked()
    assert os.listdir(tmp_path) == []


def test_a_directory_that_was_removed_while_it_was_locked_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder before this one removed it between the two calls: a lock on it would keep nobody out."""
    folder = tmp_path / "folder"
    folder.mkdir()
    opened = os.open

    def open_and_lose(path: str, flags: int) -> int:
        descriptor = opened(path, flags)
        folder.rmdir()
        folder.mkdir()
        return descriptor

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_and_lose)
        with pytest.raises(FileNotFoundError):
            DirectoryLock(str(folder))
    assert not is_locked(str(folder))


def test_who_looks_does_not_keep_a_holder_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looking = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    lock = fcntl.flock
    calls = 0

    def lock_while_somebody_looks(descriptor: int, kind: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            lock(looking, fcntl.LOCK_UN)
        lock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", lock_while_somebody_looks)
    own = DirectoryLock(str(tmp_path))
    assert calls == 5
    with pytest.raises(DirectoryLocked):
        DirectoryLock(str(tmp_path))
    own.close()
    os.close(looking)


@pytest.mark.parametrize("kind", [ps.sinks.Files, ps.sinks.Parquet])
def test_two_jobs_cannot_fill_one_folder(tmp_path: Path, kind: type[ps.sinks.Files]) -> None:
    folder = tmp_path / "out"
    lock = kind(folder).lock()
    assert lock is not None
    with pytest.raises(DirectoryLocked, match=f"another job.*{folder}.*another directory"):
        kind(folder).lock()
    lock.close()
    assert kind(folder).lock() is not None


def test_a_folder_that_cannot_be_made_is_left_to_the_tasks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert ps.sinks.Files(tmp_path / "file" / "out").lock() is None


def test_a_forked_child_leaves_the_lock_to_its_parent(tmp_path: Path) -> None:
    """The parent still has it while both live, and nobody has it when the parent has released it."""
    lock = DirectoryLock(str(tmp_path))
    waits, goes_on = os.pipe()
    told, tells = os.pipe()
    child = os.fork()
    if not child:
        os.close(goes_on)
        os.write(tells, b"1")
        os.read(waits, 1)  # until the parent has closed its end
        os._exit(0)
    try:
        assert os.read(told, 1)
        assert is_locked(str(tmp_path)), "the child has not unlocked it"
        lock.close()
        assert not is_locked(str(tmp_path))
        DirectoryLock(str(tmp_path)).close()
    finally:
        os.close(goes_on)
        os.waitpid(child, 0)
        for descriptor in (waits, told, tells):
            os.close(descriptor)
