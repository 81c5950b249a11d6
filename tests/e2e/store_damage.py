"""What goes wrong with the checkpoint store of a running job: files that somebody else changes, and disks."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: One file, which loses nothing; a file and its copy, or everything, which is saved anew while the job lives; and a
#: disk that takes nothing for a while.
KINDS = ("file", "store", "read-only", "full")
#: Those that need a disk of their own, and so the right to mount one.
MOUNTED = ("read-only", "full")


def can_mount(place: Path) -> bool:
    """Whether a small disk can be mounted here."""
    place.mkdir(parents=True, exist_ok=True)
    try:
        with small_disk(place):
            return True
    except OSError:
        return False


@contextmanager
def small_disk(place: Path, size: str = "64m") -> Iterator[None]:
    """A disk of its own at this place; OSError when none can be mounted."""
    place.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        raise OSError(mounted.stderr.strip() or "mount failed")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], capture_output=True, check=False)


def _harm(path: Path, rng: random.Random) -> str:
    way = rng.choice(("delete", "truncate", "flip", "replace"))
    data = bytearray(path.read_bytes())
    if way == "delete" or not data:
        path.unlink()
        return way
    if way == "truncate":
        del data[rng.randrange(len(data)) :]
    elif way == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    else:
        data[:] = rng.randbytes(len(data))
    path.write_bytes(data)
    return way


def _files(store: Path) -> list[Path]:
    return sorted(path for path in store.glob("*/*") if path.is_file() and not path.name.startswith("."))


def harm_one(store: Path, rng: random.Random) -> str:
    """Damage one file; what was done."""
    for path in rng.sample(files := _files(store), len(files)):
        with suppress(FileNotFoundError):  # nobody needs it any more
            return f"{_harm(path, rng)} {path.parent.name}/{path.name}"
    return "no file yet"


def harm_much(store: Path, rng: random.Random) -> str:
    """Remove everything, or snapshots with their copies; what was done."""
    if rng.random() < 0.5:
        shutil.rmtree(store, ignore_errors=True)
        return "remove all"
    harmed = 0
    for path in [path for path in _files(store) if path.parent.name == "snapshots"]:
        for one in (path, store / "copies" / path.name):
            with suppress(FileNotFoundError):
                one.unlink()
                harmed += 1
    return f"delete {harmed} files, copies too"


@contextmanager
def closed(disk: Path, how: str) -> Iterator[None]:
    """A disk that is mounted at this place takes nothing for a while."""
    if how == "read-only":
        remount = ["mount", "-o", "remount,{}", str(disk)]
        # Somebody may be writing just then.
        while subprocess.run([part.format("ro") for part in remount], capture_output=True, check=False).returncode:
            time.sleep(0.01)
        try:
            yield
        finally:
            subprocess.run([part.format("rw") for part in remount], check=True)
        return
    filler = disk / "filler"
    try:
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass
        yield
    finally:
        os.unlink(filler)
