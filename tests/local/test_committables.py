"""Sinks that wait for an outside system, in whole jobs: what they prepare is there once, and nothing else waits."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.runtime.sinks.base import Committable, Guarantee, SinkCommitter, SinkContext, SinkWriter
from tests.e2e.processes import LIMIT_S, wait_until

RATE = 500


class Log(ps.sinks.Sink):
    """Rows in SQLite, as in a log: what is committed stays. Its `prepare` and `commit` wait while these files exist."""

    guarantee: Guarantee = "exactly once"
    takes_back = False

    def __init__(self, file: Path, *, prepares: Path | None = None, commits: Path | None = None, every: float = 0.0):
        self.file, self.prepares, self.commits, self.commit_interval_s = file, prepares, commits, every

    def writer(self, context: SinkContext) -> SinkWriter:
        assert context.job
        assert context.run
        return LogWriter(self, context)

    def committer(self, context: SinkContext) -> SinkCommitter:
        return LogCommitter(self)


class LogWriter(SinkWriter):
    def __init__(self, sink: Log, context: SinkContext) -> None:
        self.sink, self.context = sink, context
        self.rows: list[int] = []

    def write(self, records: list[Any]) -> None:
        self.rows += records

    def prepare(self, epoch: int) -> Any:
        rows, self.rows = self.rows, []
        if self.sink.prepares is None:
            return rows or None

        def flush() -> list[int]:
            waits_for(self.sink.prepares)
            return rows

        return self.context.beside("flushing", flush)


class LogCommitter(SinkCommitter):
    def __init__(self, sink: Log) -> None:
        self.sink = sink

    def commit(self, committables: list[Committable]) -> None:
        waits_for(self.sink.commits)
        with sqlite3.connect(self.sink.file) as connection:
            connection.execute("create table if not exists done (epoch, task, primary key (epoch, task))")
            connection.execute("create table if not exists rows (row)")
            for one in committables:
                new = connection.execute("insert or ignore into done values (?, ?)", (one.epoch, one.index))
                if new.rowcount:
                    connection.executemany("insert into rows values (?)", [(row,) for row in one.data])


def waits_for(gone: Path | None) -> None:
    """Waits as long as this file is there."""
    wait_until(lambda: gone is None or not gone.exists(), "the outage is over")


def rows(file: Path) -> list[int]:
    with sqlite3.connect(file) as connection:
        return sorted(row for (row,) in connection.execute("select row from rows"))


def numbers(job: str, sink: ps.sinks.Sink, name: str = "log") -> ps.Flow:
    flow = ps.Flow(job)
    flow.read(ps.sources.Generator(int, rate=RATE), parallelism=1).write(sink, parallelism=1, name=name)
    return flow


@pytest.mark.parametrize("what", ["flushing", "commit()"])
def test_a_sink_that_waits_holds_up_neither_its_worker_nor_the_records(
    what: str, fresh_name: Callable[[], str], tmp_path: Path
) -> None:
    outage = tmp_path / "outage"
    outage.touch()
    waits = {"prepares": outage} if what == "flushing" else {"commits": outage}
    flow = numbers(fresh_name(), Log(tmp_path / "rows", **waits))
    job = ps.run(flow, workers=1, local=True, epoch_interval_s=0.05)
    status = job.wait_for(lambda status: status.state == "STALLED", LIMIT_S)
    assert (status.stalled[0].what, status.stalled[0].worker) == (f"{what} of log[0]", 0)
    assert status.waits_for.startswith(f"{what} of log[0], which has not returned for ")
    written = status.records_written
    later = job.wait_for(lambda status: status.records_written > written + RATE // 2, LIMIT_S)
    assert later.state == "STALLED"
    assert (later.epochs.complete > status.epochs.complete) == (
        what == "commit()"
    )  # without its answer no epoch completes
    assert not (tmp_path / "rows").exists()
    outage.unlink()
    job.wait_for(lambda status: status.state == "RUNNING" and not status.stalled, LIMIT_S)
    job.stop()
    status = job.wait(LIMIT_S, progress=False)
    assert status.stalled == []
    assert status.epochs.restarts == 0
    assert rows(tmp_path / "rows") == list(range(status.records_written))


def test_what_a_savepoint_holds_is_committed_by_the_next_job_under_the_same_name_only(
    fresh_name: Callable[[], str], tmp_path: Path
) -> None:
    name, place = fresh_name(), tmp_path / "savepoint"
    log = Log(tmp_path / "rows", every=3600.0)  # nothing is committed before the end
    job = ps.run(numbers(name, log), workers=1, local=True, epoch_interval_s=0.05)
    job.wait_for(lambda status: status.records_written > 100, LIMIT_S)
    job.savepoint(place)
    job.cancel()
    job.wait(LIMIT_S, progress=False)
    committed = rows(tmp_path / "rows")  # those of complete epochs, as the job will not be resumed
    (tmp_path / "rows").unlink()
    with pytest.raises(ps.FlowError, match="has no sinks 'log', and records of these were prepared"):
        ps.run(numbers(fresh_name(), log, "other"), workers=1, local=True, savepoint=place)
    again = ps.run(numbers(fresh_name(), log), workers=1, local=True, savepoint=place, epoch_interval_s=0.05)
    again.wait_for(lambda status: status.records_written > 0, LIMIT_S)
    before = rows(tmp_path / "rows")  # committed when the job started, and nothing since
    assert before == list(range(len(before)))
    assert 0 < len(before) <= len(committed)
    again.stop()
    again.wait(LIMIT_S, progress=False)
    after = rows(tmp_path / "rows")
    assert len(after) > len(before)
    assert after == list(range(len(after)))
