"""Files and Parquet in remote file systems: nothing is lost or doubled there either, and no URL becomes a folder."""

from __future__ import annotations

import io
import os
import pickle
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import fs
from pyarrow import parquet as pq

from penstock.runtime import sinks
from penstock.runtime.errors import FlowError, PenstockError
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.sinks import folder, places
from penstock.runtime.sinks.base import SinkContext
from penstock.runtime.storage import filesystems
from tests.epochs.test_store_s3 import bucket, environment, objects, place, serving
from tests.sinks.one_task import OneTask
from tests.sinks.test_files_sink_model import History, Job, Mortal

__all__ = ["bucket", "environment"]  # fixtures

BLOCKS = int(os.environ.get("PENSTOCK_FILES_BLOCKS", "6"))  # of 200 seeds
SCHEMA = pa.schema([("n", pa.int64())])


class Objects:
    """An object store, as pyarrow shows one: objects are there when they are closed, and copied to be renamed."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def open_output_stream(self, path: str) -> Any:
        store = self

        class Stream(io.BytesIO):
            def close(self) -> None:
                if not self.closed:
                    store.put(path, self.getvalue())
                    super().close()

            def __del__(self) -> None:
                """A process that is killed publishes nothing."""

        return Stream()

    def put(self, path: str, data: bytes) -> None:
        self.kept[path] = data

    def copy_file(self, path: str, new: str) -> None:
        self.kept[new] = self.kept[path]

    def delete_file(self, path: str) -> None:
        if self.kept.pop(path, None) is None:
            raise FileNotFoundError(path)

    def get_file_info(self, asked: Any) -> Any:
        if isinstance(asked, str):
            kind = fs.FileType.File if asked in self.kept else fs.FileType.NotFound
            return fs.FileInfo(asked, kind, size=len(self.kept.get(asked, b"")))
        return [
            fs.FileInfo(path, fs.FileType.File) for path in sorted(self.kept) if path.startswith(f"{asked.base_dir}/")
        ]


class MortalThere(Mortal):
    """Kills the process before or after a request."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left = None
        self.late = False
        for name in ("open_output_stream", "put", "copy_file", "delete_file", "get_file_info"):
            patch.setattr(Objects, name, self._wrapped(getattr(Objects, name)))


class ThereJob(Job):
    """The model's job, whose sink writes to an object store."""

    def __init__(self, seed: int, where: Path, patch: pytest.MonkeyPatch) -> None:
        self.objects = Objects()
        remote = filesystems.Remote(self.objects, "bucket/out", "s3://bucket/out")
        patch.setattr(folder, "open_place", lambda *_, **__: places.RemotePlace(remote))
        super().__init__(seed, where, patch)

    def mortal_of(self, patch: pytest.MonkeyPatch) -> Mortal:
        return MortalThere(patch)

    def open(self, index: int, restoring: bool) -> OneTask:
        errors = ErrorHandler("out", policy="fail")
        context = SinkContext("out", index, self.parallelism, epochs=True, restoring=restoring, errors=errors)
        sink = sinks.Files("s3://bucket/out", overwrite=self.rng.random() < 0.5, **self.settings)
        return OneTask(sink, context)

    def names(self) -> list[str]:
        return [path.removeprefix("bucket/out/") for path in sorted(self.objects.kept)]

    def finals(self) -> History:
        found: History = defaultdict(list)
        for name in self.names():
            if name.startswith("part-"):
                data = self.objects.kept[f"bucket/out/{name}"]
                found[int(name[5:10])] += (self.unpacked(data) if self.packed else data).decode().splitlines()
        return found


@pytest.mark.parametrize("block", range(BLOCKS))
def test_parts_are_the_committed_history(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(200 * block, 200 * block + 200):
        with monkeypatch.context() as patch:
            job: Any = ThereJob(seed, tmp_path, patch)
            try:
                job.run()
                job.check_finals(job.history)
                assert [name for name in job.names() if not name.startswith("part-")] == []
            except BaseException:
                print(f"seed {seed}: {job.settings}")
                raise
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def there() -> Iterator[str]:
    """An empty place of fsspec's."""
    pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem.store.clear()
    yield "memory://out"
    MemoryFileSystem.store.clear()


def context(index: int = 0, *, epochs: bool = True, restoring: bool = False) -> SinkContext:
    return SinkContext("out", index, 2, epochs=epochs, restoring=restoring)


def contents(url: str) -> dict[str, bytes]:
    found = filesystems.open_remote(url)
    there = found.system.get_file_info(fs.FileSelector(found.root, allow_not_found=True))
    return {entry.base_name: found.system.open_input_file(entry.path).read() for entry in there}


def write_two_epochs(sink: Any) -> None:
    """Two tasks and two epochs: the second task dies between saving the first one and hearing that it is complete."""
    sink.check()
    sink = pickle.loads(pickle.dumps(sink))  # as workers get it
    writers = [OneTask(sink, context(index)) for index in (0, 1)]
    for index, writer in enumerate(writers):
        writer.write([{"n": 10 + index}, {"n": 20 + index}])
    states = [writer.prepare(1) for writer in writers]
    writers[0].commit(1)
    writers[0].commit(1)
    writers[1].write([{"n": 666}])
    again = OneTask(sink, context(1, restoring=True))
    again.restore(1, [states[1]])
    again.restore(1, [states[1]])
    writers.pop().close(True)  # what it has begun is seen when it is closed
    again.write([{"n": 30}])
    again.finish()
    writers[0].finish()
    for writer in (*writers, again):
        writer.prepare(2)
        writer.commit(2)
        writer.close(False)


FILES = {
    "part-00000-0000000001.jsonl": b'{"n":10}\n{"n":20}\n',
    "part-00001-0000000001.jsonl": b'{"n":11}\n{"n":21}\n',
    "part-00001-0000000002.jsonl": b'{"n":30}\n',
}


def test_epochs_on_fsspec(there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_two_epochs(sinks.Files(there, format="jsonl"))
    assert contents(there) == FILES
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("bucket")
def test_epochs_on_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with serving() as port:
        sink = sinks.Files(place(port), format="jsonl")
        write_two_epochs(sink)
        assert objects() == {f"some/prefix/{name}": data for name, data in FILES.items()}
        with pytest.raises(FlowError, match=r"'s3://bucket/some/prefix' already holds 3 part files"):
            sink.check()
        assert "secret" not in f"{sink} {sink.describe()}"
        over = sinks.Files(place(port), format="jsonl", overwrite=True)
        over.check()
        for index in (0, 1):
            over.writer(context(index)).close(True)
        assert objects() == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("bucket")
def test_a_table_on_s3() -> None:
    with serving() as port:
        write_two_epochs(sinks.Parquet(place(port), schema=SCHEMA))
        found = objects()
    assert sorted(found) == [f"some/prefix/{name[:-6]}.parquet" for name in FILES]
    rows = {name: pq.read_table(pa.BufferReader(data))["n"].to_pylist() for name, data in found.items()}
    assert list(rows.values()) == [[10, 20], [11, 21], [30]]


@pytest.mark.parametrize("failed", [False, True])
def test_without_epochs_a_task_writes_one_part(there: str, failed: bool) -> None:
    writer = sinks.Files(there).writer(context(epochs=False))
    writer.write(["a", "b"])
    writer.finish()
    writer.close(failed)
    assert contents(there) == ({} if failed else {"part-00000.txt": b"a\nb\n"})


@pytest.mark.usefixtures("bucket")
def test_a_server_that_goes_away_is_named() -> None:
    with serving() as port:
        sink = sinks.Files(place(port, "&attempts=1"))
        writer = OneTask(sink, context())
        writer.write(["a"])
        state = writer.prepare(1)
    with pytest.raises(PenstockError, match=r"s3://bucket/some/prefix/.*can be reached from the node") as caught:
        writer.commit(1)
    assert "secret" not in str(caught.value)
    with pytest.raises(PenstockError, match="s3://bucket/some/prefix"):
        sink.check()
    with serving(port):
        again = OneTask(sink, context(restoring=True))
        again.restore(1, [state])
        assert objects() == {"some/prefix/part-00000-0000000001.txt": b"a\n"}


@pytest.mark.usefixtures("bucket")
def test_no_bucket() -> None:
    with serving() as port, pytest.raises(FlowError, match="Files: s3://other/x: there is no bucket 'other'; make it"):
        sinks.Files(place(port).replace("@bucket/some/prefix", "@other/x")).check()


def test_a_failed_write_is_not_forgotten() -> None:
    class Full(io.BytesIO):
        def write(self, data: Any, /) -> int:
            raise OSError("AWS Error SLOW_DOWN")

    file = places.RemoteFile(Full(), "s3://b/x")
    for act in (lambda: file.write(b"a"), file.sync):
        with pytest.raises(OSError, match="SLOW_DOWN"):
            act()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sinks.Files("s3:/bucket/out"), r"Files: 's3:/bucket/out': a URL has '//' after s3:"),
        (lambda: sinks.Files(Path("s3://bucket/out")), "a URL has '//' after s3:"),
        (lambda: sinks.Files("file://host/x"), "write file:///path, with three slashes"),
        (lambda: sinks.Parquet("s3://bucket/out"), r"'s3://bucket/out' are, schema=pyarrow.schema"),
        (lambda: sinks.Files("s3://bucket/out?colour=red").check(), "S3 has no option 'colour'"),
        (lambda: sinks.Files("nosuch://me:hush@x/y?password=hush").check(), "Files: nosuch://x/y"),
    ],
)
def test_names_that_are_no_places(make: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FlowError, match=words) as caught:
        make()
    assert "hush" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_file_url_is_a_directory(tmp_path: Path) -> None:
    assert sinks.Files(f"file://{tmp_path}/a%20b").directory == f"{tmp_path}/a b"


def test_the_model_has_kills(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The seeds above do end processes on their way."""
    dead = 0
    for seed in range(20):
        with monkeypatch.context() as patch:
            job: Any = ThereJob(seed, tmp_path, patch)
            job.run()
            dead += len(job.dead)
    assert dead > 10
