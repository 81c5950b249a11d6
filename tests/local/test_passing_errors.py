"""Sources and sinks that fail for an instant, in whole jobs: the job continues, and every record is there once."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.runtime.sinks.base import Committable, Guarantee, SinkCommitter, SinkContext, SinkWriter
from penstock.runtime.sources.base import Reader, SourceContext, Split
from tests.e2e.processes import LIMIT_S

RECORDS = 2000


class Unavailable(Exception):
    """A client library's own error."""


def fails_until(gone: Path, error: Exception) -> None:
    """Fails as long as this file is there."""
    if gone.exists():
        raise error


class Numbers(Reader):
    passing_errors = (Unavailable,)

    def __init__(self, source: Table, splits: list[Split]) -> None:
        self.source = source
        self.offset = splits[0].offset or 0

    def read(self, limit: int) -> list[Any]:
        if self.offset >= RECORDS // 2:
            if self.source.loses:
                self.offset += 1
            fails_until(self.source.outage, self.source.error)
        upto = min(self.offset + min(limit, 100), RECORDS)
        records = list(range(self.offset, upto))
        self.offset = upto
        self.finished = upto == RECORDS
        return records

    def offsets(self) -> dict[str, Any]:
        return {"table": self.offset}


class Waiting(Numbers):
    blocking = True


class Table(ps.sources.Source):
    """Numbers from a table that cannot be read for a while. `loses`: its reader has moved on when it fails."""

    def __init__(self, outage: Path, error: Exception, reader: type[Numbers] = Numbers, *, loses: bool = False) -> None:
        self.outage, self.error, self.kind, self.loses = outage, error, reader, loses

    def splits(self, parallelism: int) -> list[Split]:
        return [Split("table")]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        return self.kind(self, splits)


class Rows(ps.sinks.Sink):
    """Writes rows into SQLite with each epoch, whose commits fail for a while."""

    guarantee: Guarantee = "exactly once"

    def __init__(self, file: Path, outage: Path) -> None:
        self.file, self.outage = file, outage

    def writer(self, context: SinkContext) -> SinkWriter:
        return RowsWriter()

    def committer(self, context: SinkContext) -> SinkCommitter:
        return RowsCommitter(self)


class RowsCommitter(SinkCommitter):
    def __init__(self, sink: Rows) -> None:
        self.sink = sink

    def commit(self, committables: list[Committable]) -> None:
        for one in committables:
            with sqlite3.connect(self.sink.file) as connection:
                connection.execute("create table if not exists rows (epoch, row)")
                connection.executemany("insert into rows values (?, ?)", [(one.epoch, row) for row in one.data])
                fails_until(self.sink.outage, sqlite3.OperationalError("database is locked"))


class RowsWriter(SinkWriter):
    def __init__(self) -> None:
        self.rows: list[int] = []

    def write(self, records: list[Any]) -> None:
        self.rows += records

    def prepare(self, epoch: int) -> Any:
        rows, self.rows = self.rows, []
        return rows or None

    def restore(self, epoch: int, states: list[Any]) -> None:
        raise AssertionError("the job has gone back")


def rows(file: Path) -> list[int]:
    with sqlite3.connect(file) as connection:
        return sorted(row for (row,) in connection.execute("select row from rows"))


def run_through_an_outage(flow: ps.Flow, outage: Path, what: str) -> dict[str, Any]:
    """Run a job until the outage shows in its status, end the outage, and return the job's last status."""
    outage.touch()
    job = ps.run(flow, workers=1, local=True, epoch_interval_s=0.1)
    status = job.wait_for(lambda status: "failed for" in str(status["waits_for"]), LIMIT_S)
    assert status["waits_for"].startswith(f"{what}, which has failed for "), status["waits_for"]
    assert "is tried again until 60 s have passed" in status["waits_for"]
    outage.unlink()
    status = job.wait(LIMIT_S, progress=False)
    assert status["waits_for"] is None
    assert status["epochs"]["restarts"] == 0
    return status


@pytest.mark.parametrize("reader", [Numbers, Waiting])
@pytest.mark.parametrize("error", [sqlite3.OperationalError("database is locked"), Unavailable("it restarts")])
def test_a_source_that_fails_for_a_while_is_read_again_from_where_it_was(
    error: Exception, reader: type[Numbers], fresh_name: Callable[[], str], tmp_path: Path
) -> None:
    if isinstance(error, sqlite3.OperationalError):
        error.sqlite_errorcode = 5  # type: ignore[attr-defined]
    collected = ps.sinks.Collect()
    flow = ps.Flow(fresh_name())
    table = Table(tmp_path / "outage", ConnectionResetError("reset") if reader is Waiting else error, reader)
    flow.read(table, name="rows").write(collected, name="out")
    run_through_an_outage(flow, tmp_path / "outage", "read() of rows[0]")
    assert sorted(collected.records()) == list(range(RECORDS))


def test_a_commit_that_fails_for_a_while_is_repeated(fresh_name: Callable[[], str], tmp_path: Path) -> None:
    flow = ps.Flow(fresh_name())
    numbers = flow.read(ps.sources.Generator(lambda number: number, 1000, limit=RECORDS // 2), name="numbers")
    numbers.write(Rows(tmp_path / "rows.db", tmp_path / "outage"), name="out")
    run_through_an_outage(flow, tmp_path / "outage", "commit() of out[0]")
    assert rows(tmp_path / "rows.db") == list(range(RECORDS // 2))


def test_a_reader_that_may_have_left_out_records_fails_at_once(fresh_name: Callable[[], str], tmp_path: Path) -> None:
    (tmp_path / "outage").touch()
    flow = ps.Flow(fresh_name())
    flow.read(Table(tmp_path / "outage", ConnectionResetError("reset"), loses=True)).write(ps.sinks.Null())
    with pytest.raises(ps.JobFailed, match="ConnectionResetError: reset"):
        ps.run(flow, workers=1, local=True).wait(LIMIT_S, progress=False)


class Positionless(Numbers):
    def offsets(self) -> dict[str, Any]:
        raise NotImplementedError("this job has no epochs")


def test_a_reader_that_does_not_say_where_it_is_works_in_a_job_without_epochs(
    fresh_name: Callable[[], str], tmp_path: Path
) -> None:
    collected = ps.sinks.Collect()
    flow = ps.Flow(fresh_name())
    flow.read(Table(tmp_path / "none", ValueError(), Positionless)).write(collected)
    ps.run(flow, workers=1, local=True, epoch_interval_s=None).wait(LIMIT_S, progress=False)
    assert len(collected.records()) == RECORDS
