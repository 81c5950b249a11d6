"""The process that holds Spark: what Spark writes does not go where the job's own messages are shown."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from penstock.actors import spark_bridge
from penstock.actors.spark_bridge import BridgeLink, NotAnswered
from penstock.bridge.forms import as_records
from penstock.runtime.operators.micro_batch import MicroBatchResult

PROGRAM = """
import logging, os, subprocess, sys
from penstock.actors.spark_bridge import write_apart
print("before")
path = write_apart(sys.argv[1])
os.write(2, b"native code\\n")
print("python code", flush=True)
subprocess.run("echo a child; echo its errors >&2", shell=True, check=True)
logging.getLogger("py4j").error("a library")
logging.getLogger("penstock.bridge.session").warning("a warning of %s", "Penstock")
logging.getLogger("penstock.bridge.session").info("no warning")
sys.stderr.write(path)
"""


def test_what_spark_and_its_libraries_write_goes_to_a_file_of_its_own(tmp_path: Path) -> None:
    out, err = tmp_path / "worker-1.out", tmp_path / "worker-1.err"
    with out.open("w") as stdout, err.open("w") as stderr:
        subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=stdout, stderr=stderr, check=True)
    assert out.read_text() == "before\n"
    assert err.read_text() == "a warning of Penstock\n"
    (log,) = tmp_path.glob("penstock-spark-*.log")
    lines = set(log.read_text().splitlines())
    assert lines == {"native code", "python code", "a child", "its errors", "a library", str(log)}
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_worker_writes_into_memory_of_which_the_bridge_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a micro-batch that is under way, or that has failed, may still be read."""
    read: list[tuple[int, list[Any], Future[MicroBatchResult]]] = []

    def answer(chain: int, position: int, path: str) -> Any:
        with pa.memory_map(path) as source:
            (batch,) = pa.ipc.open_stream(source)
            records = as_records(batch)
            assert source.tell() == source.size(), "nothing follows the micro-batch"
        future: Future[MicroBatchResult] = Future()
        read.append((Path(path).stat().st_ino, records, future))
        return SimpleNamespace(future=lambda: future)

    actor = SimpleNamespace(answer=SimpleNamespace(remote=answer))
    context = SimpleNamespace(get_node_id=lambda: "here")
    ray = SimpleNamespace(get_actor=lambda *_, **__: actor, get_runtime_context=lambda: context)
    monkeypatch.setattr(spark_bridge, "ray", ray)
    link = BridgeLink("bridge", "here")

    def submit(records: list[Any]) -> Future[MicroBatchResult]:
        answered = link.submit(0, 1, records)
        assert read[-1][1] == records
        return answered

    for records in ([*range(5_000)], ["a"], [*range(9_000)]):
        answered = submit(records)
        read[-1][2].set_result(MicroBatchResult([]))
        assert answered.result(10).batches == []
    assert len({inode for inode, *_ in read}) == 1

    submit(["under way"])
    failed = submit(["fails"])
    read[-1][2].set_exception(OSError("lost"))
    with pytest.raises(NotAnswered, match="lost"):
        failed.result(10)
    open_inodes = {path.stat().st_ino for path in Path("/proc/self/fd").iterdir() if path.exists()}
    assert read[-1][0] not in open_inodes
    submit(["next"])
    assert len({inode for inode, *_ in read[-3:]}) == 3
