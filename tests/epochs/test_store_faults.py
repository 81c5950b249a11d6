"""The checkpoint store when things go wrong: killed at any step, a full disk, no permission."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.epochs import files as module
from penstock.runtime.epochs.files import ArrowFiles, LocalFiles
from penstock.runtime.epochs.manifest import Blob, Manifest
from penstock.runtime.epochs.store import Store
from penstock.runtime.errors import SnapshotDamaged, StoreError, StoreUnreachable

BIG = bytes(range(256)) * 40
HELPERS = """
    import os, sys
    from penstock.runtime.epochs.manifest import Manifest
    from penstock.runtime.epochs.store import Store
    from penstock.runtime.errors import SnapshotDamaged, StoreError, StoreUnreachable
    def manifest(epoch, *blobs):
        return Manifest(job="job", epoch=epoch, created=1.5, final=False, key_groups=8, tasks=[], collected=list(blobs))
    def leftovers(path):
        return [name for _, _, names in os.walk(path) for name in names if name.endswith(".tmp")]
"""


def manifest(epoch: int, *blobs: Blob) -> Manifest:
    return Manifest(job="job", epoch=epoch, created=1.5, final=False, key_groups=8, tasks=[], collected=list(blobs))


class Killed(BaseException):
    """The process ends here: nothing of it runs any more, not even what cleans up."""


class Faulty:
    """Lets calls of an object's methods through but for the `at`-th and, when it `kills`, all later ones."""

    def __init__(self, inner: Any, names: set[str], fault: Fault) -> None:
        self._inner = inner
        self._names = names
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in self._names:
            return value

        def call(*args: Any, **options: Any) -> Any:
            self._fault.step(name, self._inner, args)
            result = value(*args, **options)
            return Faulty(result, self._names, self._fault) if name == "open_output_stream" else result

        return call

    def __enter__(self) -> Faulty:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Fault:
    def __init__(self, at: int, make: Callable[[], BaseException], kills: bool) -> None:
        self.at = at
        self.make = make
        self.kills = kills
        self.steps = 0

    def step(self, name: str, inner: Any, args: tuple[Any, ...]) -> None:
        self.steps += 1
        if self.steps == self.at and name == "write":
            with suppress(Exception):  # half of it has reached the disk
                half = memoryview(args[-1])
                inner.write(*args[:-1], half[: len(half) // 2])
        if self.steps == self.at or (self.kills and self.steps > self.at):
            raise self.make()


SYSTEM_CALLS = {"open", "write", "fsync", "close", "replace", "unlink", "mkdir"}
ARROW_CALLS = {"open_output_stream", "open_input_file", "write", "close", "move", "delete_file", "create_dir"}

FAULTS: dict[str, tuple[Callable[[], BaseException], bool]] = {
    "killed": (Killed, True),
    "interrupted": (KeyboardInterrupt, False),
    "error": (lambda: OSError(errno.EIO, "Input/output error"), False),
    "full": (lambda: OSError(errno.ENOSPC, "No space left on device"), False),
    "refused": (lambda: PermissionError(errno.EACCES, "Permission denied"), False),
}


def directory(root: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(module, "os", Faulty(os, SYSTEM_CALLS, fault))
    return Store(LocalFiles(f"{root}/job", True), "job")


def arrow(root: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> Store:
    from pyarrow.fs import LocalFileSystem

    system = Faulty(LocalFileSystem(), ARROW_CALLS, fault)
    return Store(ArrowFiles(system, f"{root}/job", f"{root}/job", rename=system.move), "job")


def objects(root: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> Store:
    files: Any = Store.open(f"memory://{root}", "job")._files
    system = Faulty(files._system, ARROW_CALLS, fault)
    return Store(ArrowFiles(system, files._root, files.place, refresh=files._refresh), "job")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("make", [directory, arrow, objects], ids=lambda make: make.__name__)
@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_a_fault_at_any_step(
    fault: str, make: Callable[..., Store], first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older epoch stays readable, the newer is absent or whole, and the next one goes well and tidies up."""
    if make is objects:
        pytest.importorskip("fsspec")
    for at in range(1, 100):
        root = tmp_path / str(at)
        root.mkdir()
        healthy = Fault(0, Killed, False)
        calm = make(root, healthy, monkeypatch)
        epochs = {}
        if not first:
            epochs[1] = manifest(1, calm.put("snapshots/000001-1-0", [BIG]))
            calm.write_manifest(epochs[1])
        broken = Fault(at, *FAULTS[fault])
        store = make(root, broken, monkeypatch)
        with suppress(Killed, KeyboardInterrupt, StoreError):
            blob = store.put("snapshots/000002-1-0", [BIG, BIG])
            epochs[2] = manifest(2, blob)
            store.write_manifest(epochs[2])
        calm = make(root, healthy, monkeypatch)
        found = None
        with suppress(SnapshotDamaged):
            found = calm.latest(calm.verify)
        if found is not None:
            assert found[0] == epochs[found[0].epoch]
            assert make is objects or found[1] == []  # a directory never shows a half-written manifest
        else:
            assert first
        if make is not objects:
            for epoch in calm.epochs():
                assert calm.read_manifest(epoch) == epochs[epoch]
        if fault in ("error", "full") and make is directory and broken.steps >= at:
            left = [name for name in calm._ours() if name.endswith(".tmp")]
            assert left == [], f"step {at}"  # what lives on tidies up at once
        last = manifest(3, calm.put("snapshots/000003-1-0", [BIG]))
        calm.write_manifest(last)
        assert calm.latest(calm.verify) == (last, [])
        calm.collect(1)
        mine = {"snapshots/000003-1-0", "manifests/0000000003.json", "copies/0000000003.json"}
        assert set(calm._ours()) == (mine | {"copies/000003-1-0"} if make is directory else mine)
        if broken.steps < at:
            return
    raise AssertionError("there are no so many steps")


@pytest.mark.parametrize("make", [directory, arrow], ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOSPC, StoreUnreachable, "No space left on device. Free some space or raise the quota"),
        (errno.EDQUOT, StoreUnreachable, "Free some space or raise the quota"),
        (errno.EIO, StoreUnreachable, "Look whether it is up and can be reached"),
        (errno.ESTALE, StoreUnreachable, "a later try may work"),
        (errno.EACCES, StoreError, "Give the user or the keys that run the job the right"),
        (errno.EROFS, StoreError, "Mount it for writing, or use another directory"),
        (errno.EFBIG, StoreError, "ulimit -f"),
        (errno.ENAMETOOLONG, StoreError, "use another directory"),
    ],
)
def test_errors_say_what_to_do(
    number: int, kind: type, words: str, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = make(tmp_path, Fault(0, Killed, False), monkeypatch).put("snapshots/000001-1-0", [BIG])
    store = make(tmp_path, Fault(1, lambda: OSError(number, os.strerror(number)), False), monkeypatch)
    with pytest.raises(
        StoreError, match=f"cannot write {tmp_path}/job/(snapshots|copies)/000002-1-0: .*{words}"
    ) as caught:
        store.put("snapshots/000002-1-0", [BIG])
    assert type(caught.value) is kind
    store = make(tmp_path, Fault(0, Killed, False), monkeypatch)
    failing: Any = OSError(number, os.strerror(number))

    def read(name: str, most: int) -> bytes:
        raise failing

    monkeypatch.setattr(store._files, "read", read)
    for action in (lambda: store.get(blob), lambda: store.read_manifest(1), lambda: store.write_manifest(manifest(1))):
        with pytest.raises(StoreError) as caught:
            action()
        assert type(caught.value) is kind  # above all, no damage


def run_child(
    program: str, *arguments: object, before: tuple[str, ...] = (), **options: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-c", textwrap.dedent(HELPERS) + textwrap.dedent(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def passed(child: subprocess.CompletedProcess[str]) -> None:
    assert child.returncode == 0, child.stdout + child.stderr


@pytest.fixture
def namespace() -> tuple[str, ...]:
    """What to start a command with, to give it mounts of its own."""
    command = ("unshare", "--user", "--map-root-user", "--mount")
    if not shutil.which("unshare") or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user and mount namespaces here, so no small disk of our own can be mounted")
    return command


def test_a_disk_that_is_full(namespace: tuple[str, ...], tmp_path: Path) -> None:
    program = """
        root = sys.argv[1]
        store = Store.open(root, "job")
        first = manifest(1, store.put("snapshots/000001-1-0", [b"a" * 50_000]))
        store.write_manifest(first)
        for name in ("000002-1-0", "000002-2-0"):
            try:
                store.put(f"snapshots/{name}", [b"b" * 30_000] * 20)
            except StoreUnreachable as error:
                assert "No space left on device. Free some space" in str(error), error
                assert f"{root}/job/snapshots/{name}" in str(error), error
            else:
                raise AssertionError("it fitted")
        assert leftovers(root) == []  # so there is room again
        assert store.latest(store.verify) == (first, [])
        with open(f"{root}/other", "wb", buffering=0) as other:
            try:
                while other.write(b"c" * 4096):
                    pass
            except OSError:
                pass
            small = manifest(2, store.put("snapshots/000002-1-0", [b"inline" * 600]))
            try:
                store.write_manifest(small)
            except StoreUnreachable as error:
                assert "No space left" in str(error), error
            else:
                raise AssertionError("it fitted")
            assert leftovers(root) == []
            assert store.latest(store.verify) == (first, [])
            other.truncate(0)
        store.write_manifest(small)
        assert store.latest(store.verify) == (small, [])
        assert store.collect(1) == 4
    """
    mount = ("sh", "-c", 'mount -t tmpfs -o size=256k none "$0" && exec "$@"', str(tmp_path))
    passed(run_child(program, tmp_path, before=(*namespace, *mount)))


def test_a_disk_that_is_read_only(namespace: tuple[str, ...], tmp_path: Path) -> None:
    program = """
        root = sys.argv[1]
        store = Store.open(root, "job")
        first = manifest(1, store.put("snapshots/000001-1-0", [b"a" * 50_000]))
        store.write_manifest(first)
        assert os.system(f"mount -o remount,ro {root}") == 0
        for action in (
            lambda: store.put("snapshots/000002-1-0", [b"b" * 9000]), lambda: store.write_manifest(manifest(2)),
            store.check, store.destroy,
        ):
            try:
                action()
            except StoreError as error:
                assert type(error) is StoreError, error
                assert "Read-only file system. Mount it" in str(error), error
            else:
                raise AssertionError("it was written")
        assert store.latest(store.verify) == (first, [])
        try:
            Store.open(root, "job")
        except StoreError as error:
            assert "Read-only file system. Mount it" in str(error), error
        else:
            raise AssertionError("open saw nothing")
    """
    mount = ("sh", "-c", 'mount -t tmpfs -o size=256k none "$0" && exec "$@"', str(tmp_path))
    passed(run_child(program, tmp_path, before=(*namespace, *mount)))


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    program = """
        store = Store.open(sys.argv[1], "job")
        try:
            store.put("snapshots/000001-1-0", [b"b" * 100_000])
        except StoreError as error:
            assert "File too large. Raise the limit on the size of files" in str(error), error
        else:
            raise AssertionError("it was written")
        assert leftovers(sys.argv[1]) == []
    """
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    passed(run_child(program, tmp_path, preexec_fn=limit))


def powerless() -> None:
    """In a child before it starts: root's right to pass over permissions is gone."""
    if os.geteuid() == 0:
        for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
            if ctypes.CDLL(None).prctl(24, capability, 0, 0, 0):  # PR_CAPBSET_DROP
                raise OSError("root cannot give up rights here")


def test_no_permission(tmp_path: Path) -> None:
    place = tmp_path / "mine"
    store = Store.open(place, "job")
    blob = store.put("snapshots/000001-1-0", [BIG])
    store.write_manifest(manifest(1, blob))
    for path in (place / "job").glob("*/*"):
        path.chmod(0)
    for folder in (*(place / "job").iterdir(), place / "job", place):
        folder.chmod(0o555)
    program = """
        place = sys.argv[1]
        for url in (place, f"file://{place}/new/deep"):
            try:
                Store.open(url, "job")
            except StoreError as error:
                assert "no permission to write in" in str(error) and "Give the user" in str(error), error
            else:
                raise AssertionError("open saw nothing")
        from penstock.runtime.epochs.manifest import Blob
        from penstock.runtime.epochs.files import LocalFiles
        store = Store(LocalFiles(f"{place}/job", False), "job")  # as if the rights were taken away later
        actions = (
            lambda: store.get(Blob("snapshots/000001-1-0", 10240, 0)), lambda: store.read_manifest(1), store.latest,
            lambda: store.put("snapshots/000002-1-0", [b"b" * 9000]), lambda: store.write_manifest(manifest(2)),
            store.check, store.destroy,
        )
        for action in actions:
            try:
                action()
            except StoreError as error:
                assert type(error) is StoreError, repr(error)
                assert "Permission denied. Give the user" in str(error), error
            else:
                raise AssertionError("it was done")
        assert store.collect(1) == 0
    """
    try:
        passed(run_child(program, place, preexec_fn=powerless))
    finally:
        for folder in (place, place / "job", *(place / "job").iterdir()):
            folder.chmod(0o755)


def test_something_else_has_the_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for url in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="file is not a directory"):
            Store.open(url, "job")
    store = Store.open(tmp_path, "job")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "snapshots").write_text("")
    (tmp_path / "job" / "manifests").write_text("")
    for action in (lambda: store.put("snapshots/000001-1-0", [BIG]), store.check, store.epochs):
        with pytest.raises(StoreError, match="Something else has that name; use another directory"):
            action()


def test_a_process_killed_at_random(tmp_path: Path) -> None:
    """A real one, by SIGKILL: the newest epoch is always whole, and collecting leaves no stray files."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    program = """
        store = Store.open(sys.argv[1], "job")
        epoch = store.epochs()[0] if store.epochs() else 0
        while True:
            epoch += 1
            blobs = [store.put(f"snapshots/{epoch:06d}-{task}-0", [os.urandom(20_000)] * 20) for task in range(3)]
            store.write_manifest(manifest(epoch, *blobs))
            store.collect(2)
            print(epoch, flush=True)
    """
    newest = 0
    for _ in range(5):
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(HELPERS) + textwrap.dedent(program), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        lines = [child.stdout.readline()]
        time.sleep(draw.random() * 0.1)
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.read().split()
        child.wait()
        child.stdout.close()
        told = max(int(line) for line in lines if line.strip())
        store = Store.open(tmp_path, "job")
        found = store.latest(store.verify)
        assert found is not None
        assert found[1] == []
        assert found[0].epoch >= told > newest
        newest = found[0].epoch
    store.write_manifest(manifest(newest + 2))  # what was in the making is older than this
    store.collect(1)
    assert set(store._ours()) == {f"{folder}/{newest + 2:010d}.json" for folder in ("manifests", "copies")}
