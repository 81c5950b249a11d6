"""The driver's end of to_spark: each complete epoch once, in order, none too early; and what it does when that fails.

The job and the session are played; tests/e2e/test_spark.py has real ones.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.bridge import follow
from penstock.runtime.errors import FlowError, JobError, PenstockError
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.sinks import follower
from penstock.runtime.sinks.base import SinkContext
from penstock.runtime.sinks.to_spark import ToSpark
from penstock.runtime.status import EpochsStatus, JobStatus
from tests.sinks.one_task import OneTask

LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "_LOOK_S", 0.005)


class PlayedJob:
    """A job whose state the test sets."""

    name = "played"

    def __init__(self, state: str = "RUNNING", complete: int = 0) -> None:
        self.state = state
        self.complete = complete
        self.looks = 0
        self.looked = threading.Condition()
        self.troubles: list[PenstockError] = []

    def status(self) -> JobStatus:
        with self.looked:
            self.looks += 1
            self.looked.notify_all()
        return JobStatus(name=self.name, state=self.state, epochs=EpochsStatus(complete=self.complete))

    def trouble(self, error: PenstockError) -> None:
        self.troubles.append(error)

    def is_seen(self) -> None:
        """Wait until what the job is now has been looked at and acted upon."""
        with self.looked:
            before = self.looks
            assert self.looked.wait_for(lambda: self.looks >= before + 2, LIMIT_S)


class Frame:
    schema = "the schema"

    def __init__(self, paths: list[str]) -> None:
        self.paths = [path.removeprefix("file://") for path in paths]

    def rows(self) -> list[Any]:
        return [row["value"] for path in self.paths for row in pq.read_table(path).to_pylist()]


class PlayedSpark:
    """A session, of which only `read` is wanted."""

    def __init__(self) -> None:
        self.schemas: list[Any] = []

    @property
    def read(self) -> PlayedSpark:
        return self

    def schema(self, schema: Any) -> PlayedSpark:
        self.schemas.append(schema)
        return self

    def parquet(self, *paths: str) -> Frame:
        return Frame(list(paths))


def nothing(frame: Any, epoch: int) -> None:
    pass


def sink(folder: Path, fn: Callable[[Any, int], object] = nothing, **settings: Any) -> ToSpark:
    return ToSpark(fn, spark=PlayedSpark(), folder=folder, **settings)


def writer(folder: Path, index: int = 0, parallelism: int = 1, *, restoring: bool = False, **settings: Any) -> Any:
    """A worker's end, which has got the sink as bytes."""
    context = SinkContext("out", index, parallelism, epochs=True, restoring=restoring, errors=ErrorHandler("out"))
    travelled: ToSpark = pickle.loads(cloudpickle.dumps(sink(folder, **settings)))
    return OneTask(travelled, context)


class Took:
    """What the function was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, list[Any]]] = []

    def __call__(self, frame: Any, epoch: int) -> None:
        self.calls.append((epoch, frame.rows()))


def test_epochs_are_handed_over_when_all_tasks_have_committed(tmp_path: Path) -> None:
    took = Took()
    one, two = writer(tmp_path, 0, 2), writer(tmp_path, 1, 2)
    made = sink(tmp_path, took)
    job = PlayedJob()
    made.started(job)
    one.write(["a"])
    two.write(["b"])
    one.prepare(1)
    two.prepare(1)
    job.is_seen()
    assert took.calls == []
    job.complete = 1
    job.is_seen()
    assert took.calls == []  # complete, and without names
    one.commit(1)
    job.is_seen()
    assert took.calls == []  # would be half of it
    two.commit(1)
    job.is_seen()
    assert took.calls == [(1, ["a", "b"])]
    two.write(["c"])  # one has no records: its part is passed over
    two.prepare(2)
    two.commit(2)
    one.write(["d"])
    one.prepare(3)
    one.commit(3)
    job.complete = 2  # older than that; an epoch is complete when all tasks have prepared it
    job.is_seen()
    assert took.calls[1:] == [(2, ["c"])]
    job.state = "FINISHED"
    assert made.ended(LIMIT_S)
    assert took.calls[1:] == [(2, ["c"]), (3, ["d"])]
    assert job.troubles == []


def test_the_schema_is_asked_for_once(tmp_path: Path) -> None:
    """Spark would run a job for each epoch to find it out."""
    task = writer(tmp_path)
    for epoch in (1, 2, 3):
        task.write(["a"])
        task.prepare(epoch)
        task.commit(epoch)
    spark = PlayedSpark()
    assert follow(PlayedJob("FINISHED", 3), nothing, spark=spark, folder=tmp_path).wait(LIMIT_S) == 3
    assert spark.schemas == [Frame.schema, Frame.schema]


def test_a_dead_writer_is_not_waited_for(tmp_path: Path) -> None:
    """What it was writing is of no epoch; the writer that comes after it has taken it away, or it came later."""
    task = writer(tmp_path)
    task.write(["a"])
    task.prepare(1)
    task.commit(1)
    (tmp_path / ".part-00000-0000000001.0a1b2c3d.parquet.inprogress").write_bytes(b"PAR1 half of it")
    assert follow(PlayedJob("CANCELLED", 1), nothing, spark=PlayedSpark(), folder=tmp_path).wait(LIMIT_S) == 1


def test_a_function_that_raises(tmp_path: Path) -> None:
    calls: list[int] = []

    def fails_at_two(frame: Any, epoch: int) -> None:
        calls.append(epoch)
        if epoch == 2:
            raise KeyError("no such table")

    task = writer(tmp_path)
    for epoch in (1, 2, 3):
        task.write([str(epoch)])
        task.prepare(epoch)
        task.commit(epoch)
    made = sink(tmp_path, fails_at_two)
    job = PlayedJob(complete=3)
    made.started(job)
    assert made.ended(LIMIT_S)
    (trouble,) = job.troubles
    assert isinstance(trouble, JobError)
    assert isinstance(trouble.__cause__, KeyError)
    message = str(trouble)
    for part in ("fails_at_two failed for epoch 2", "no such table", Path(__file__).name, "continues", "follow("):
        assert part in message
    assert calls == [1, 2]
    # Another program, another function: the same epoch, with the same records.
    took = Took()
    following = follow(PlayedJob("FINISHED", 3), took, spark=PlayedSpark(), folder=tmp_path)
    assert following.wait(LIMIT_S) == 3
    assert took.calls == [(2, ["2"]), (3, ["3"])]


def test_a_job_that_cannot_be_asked(tmp_path: Path) -> None:
    class Gone(PlayedJob):
        def status(self) -> JobStatus:
            raise SystemExit("this process leaves the cluster")

    job = Gone()
    following = follow(job, nothing, spark=PlayedSpark(), folder=tmp_path)
    with pytest.raises(JobError, match=r"no more epochs of job 'played'.*leaves the cluster"):
        following.wait(LIMIT_S)
    assert len(job.troubles) == 1


def test_waiting_and_stopping(tmp_path: Path) -> None:
    asked, go = threading.Event(), threading.Event()

    def slow(frame: Any, epoch: int) -> None:
        asked.set()
        assert go.wait(LIMIT_S)

    task = writer(tmp_path)
    for epoch in (1, 2):
        task.write([str(epoch)])
        task.prepare(epoch)
        task.commit(epoch)
    made = sink(tmp_path, slow)
    job = PlayedJob(complete=2)
    made.started(job)
    assert asked.wait(LIMIT_S)
    assert not made.ended(0.01)
    following = made._follower
    assert following is not None
    with pytest.raises(TimeoutError, match="job 'played'"):
        following.wait(0.01)
    following.stop(0.0)
    go.set()
    assert following.wait(LIMIT_S) == 1
    held: list[follower.Follower] = []
    held_now = threading.Event()

    def stops_itself(frame: Any, epoch: int) -> None:
        assert held_now.wait(LIMIT_S)
        held[0].stop()

    task.write(["3"])
    task.prepare(3)
    task.commit(3)
    job.complete = 3
    held.append(follow(job, stops_itself, spark=PlayedSpark(), folder=tmp_path))
    held_now.set()
    assert held[0].wait(LIMIT_S) == 2


def test_files_that_are_not_kept(tmp_path: Path) -> None:
    """They go when the function has returned, and a recovery does not miss them."""
    took = Took()
    task = writer(tmp_path, keep=False)
    task.write(["a"])
    state = task.prepare(1)
    task.commit(1)
    made = sink(tmp_path, took, keep=False)
    job = PlayedJob(complete=1)
    made.started(job)
    job.is_seen()
    assert took.calls == [(1, ["a"])]
    assert not list(tmp_path.glob("part-*"))
    again = writer(tmp_path, restoring=True, keep=False)
    again.restore(1, [state])
    again.write(["b"])
    again.finish()
    again.prepare(2)
    again.commit(2)
    job.state = "FINISHED"
    assert made.ended(LIMIT_S)
    assert took.calls == [(1, ["a"]), (2, ["b"])]
    assert not list(tmp_path.glob("part-*"))


def test_files_that_a_program_died_over_are_removed_by_the_next(tmp_path: Path) -> None:
    task = writer(tmp_path, keep=False)
    for epoch in (1, 2):
        task.write([str(epoch)])
        task.prepare(epoch)
        task.commit(epoch)
    follower.note_progress(str(tmp_path), 1)
    took = Took()
    follow(PlayedJob("FINISHED", 2), took, spark=PlayedSpark(), folder=tmp_path, keep=False).wait(LIMIT_S)
    assert took.calls == [(2, ["2"])]
    assert not list(tmp_path.glob("part-*"))


def test_what_an_ended_job_has_left(tmp_path: Path) -> None:
    task = writer(tmp_path)
    task.write(["a"])
    task.prepare(1)
    task.commit(1)
    task.write(["b"])
    task.prepare(2)
    took = Took()
    with pytest.raises(JobError, match="did not end well"):
        follow(None, took, spark=PlayedSpark(), folder=tmp_path).wait(LIMIT_S)
    assert took.calls == []
    task.commit(2)
    assert follow(None, took, spark=PlayedSpark(), folder=tmp_path).wait(LIMIT_S) == 2
    assert took.calls == [(1, ["a"]), (2, ["b"])]


def test_a_job_that_failed_hands_over_what_is_complete_everywhere(tmp_path: Path) -> None:
    one, two = writer(tmp_path, 0, 2), writer(tmp_path, 1, 2)
    for epoch in (1, 2):
        one.write([f"one {epoch}"])
        two.write([f"two {epoch}"])
        one.prepare(epoch)
        two.prepare(epoch)
        one.commit(epoch)
    two.commit(1)  # and its process died
    took = Took()
    assert follow(PlayedJob("FAILED", 2), took, spark=PlayedSpark(), folder=tmp_path).wait(LIMIT_S) == 1
    assert took.calls == [(1, ["one 1", "two 1"])]


def test_another_job_begins_anew(tmp_path: Path) -> None:
    """Its numbers are those of the job before: they must not pass for handed over."""
    task = writer(tmp_path, keep=False)
    task.write(["a"])
    task.prepare(7)
    task.commit(7)
    follow(PlayedJob("FINISHED", 7), nothing, spark=PlayedSpark(), folder=tmp_path, keep=False).wait(LIMIT_S)
    with pytest.raises(FlowError, match="epoch 7 was the last"):
        sink(tmp_path).check()
    sink(tmp_path, overwrite=True).check()
    task = writer(tmp_path, overwrite=True)
    task.write(["b"])
    task.prepare(1)
    task.commit(1)
    took = Took()
    follow(PlayedJob("FINISHED", 1), took, spark=PlayedSpark(), folder=tmp_path).wait(LIMIT_S)
    assert took.calls == [(1, ["b"])]


def test_going_back_to_a_savepoint(tmp_path: Path) -> None:
    task = writer(tmp_path)
    states = []
    for epoch in (1, 2, 3):
        task.write([str(epoch)])
        states.append(task.prepare(epoch))
        task.commit(epoch)
    follow(PlayedJob("CANCELLED", 3), nothing, spark=PlayedSpark(), folder=tmp_path).wait(LIMIT_S)
    again = writer(tmp_path, restoring=True)
    again.restore(1, states[:1])
    again.write(["other"])
    again.prepare(2)
    again.commit(2)
    took = Took()
    follow(PlayedJob("FINISHED", 2), took, spark=PlayedSpark(), folder=tmp_path).wait(LIMIT_S)
    assert took.calls == [(2, ["other"])]


def test_a_sink_that_has_travelled_follows_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    resumed: ToSpark = pickle.loads(cloudpickle.dumps(sink(tmp_path)))
    resumed.started(PlayedJob())
    assert resumed.ended(0.0)
    assert "penstock.bridge.follow" in caplog.text
    assert resumed.describe() == f"to_spark(nothing, {str(tmp_path)!r})"


def test_what_is_told_at_once(tmp_path: Path) -> None:
    spark: Any = PlayedSpark()
    for arguments, reason in [
        ({"fn": 3}, "needs a function"),
        ({"spark": "local"}, "needs your Spark session"),
        ({"folder": "s3://bucket/table"}, "'://'"),
        ({"folder": tmp_path / "a*b"}, r"'\*'"),
        ({"schema": {"a": int}}, "to_spark: schema must be"),
    ]:
        with pytest.raises(FlowError, match=reason):
            ToSpark(**{"fn": nothing, "spark": spark, "folder": tmp_path, **arguments})  # type: ignore[arg-type]
    with pytest.raises(FlowError, match="there is no directory"):
        follow(None, nothing, spark=spark, folder=tmp_path / "missing")
    with pytest.raises(FlowError, match="epoch_interval_s"):
        sink(tmp_path).writer(SinkContext("out", 0, 1, epochs=False))
    (tmp_path / "file").write_text("")
    with pytest.raises(FlowError, match="is a file"):
        sink(tmp_path / "file").check()


def test_in_a_flow(tmp_path: Path) -> None:
    flow = ps.Flow("orders")
    orders = flow.read(ps.sources.Memory(["a"]))
    orders.to_spark(nothing, spark=PlayedSpark(), folder=tmp_path / "orders", name="save", parallelism=2)
    assert f"to_spark(nothing, {os.fspath(tmp_path / 'orders')!r})" in flow.explain()
    assert ps.testing.run(flow) == {"save": ["a"]}
