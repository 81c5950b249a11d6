"""`job.stop(savepoint=...)`: one epoch at which everything stops, and from which another job continues exactly."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from penstock.jobs.job import Job
from tests.e2e.processes import LIMIT_S, wait_until

RECORDS = 2000
RATE = 1000.0
WINDOW_S = 0.7  # so that windows are half full whenever the job stops


class Reminder(ps.ProcessFunction):
    """Emits a record for each one that it gets, by a timer half a second of event time later."""

    def process(self, ctx: ps.ProcessContext, key: int, record: int) -> list[object] | None:
        ctx.set_event_timer(record + 500)
        return None

    def on_event_timer(self, ctx: ps.ProcessContext, key: int, at_ms: int) -> list[tuple[int, int]]:
        return [(key, at_ms)]


def windows_and_timers(name: str, tmp_path: Path, parallelism: int = 2) -> ps.Flow:
    """Numbers, whose times are milliseconds, counted in windows, and one timer for each number."""
    flow = ps.Flow(name, parallelism=parallelism)
    numbers = flow.read(ps.sources.Generator(lambda number: number, RATE, limit=RECORDS), name="numbers")
    timed = numbers.watermark(lambda number: number / 1000, name="timed")
    keyed = timed.key_by(lambda number: number % 4)
    keyed.window(ps.Tumbling(WINDOW_S)).count(name="windows").write(ps.sinks.Files(tmp_path / "windows"), name="counts")
    keyed.process(Reminder(), name="timers").write(ps.sinks.Files(tmp_path / "timers"), name="reminders")
    return flow


def lines(folder: Path) -> list[str]:
    parts = sorted(folder.glob("part-*"))
    return sorted(line for part in parts for line in part.read_text().splitlines())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """What a job without any stop writes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ps.run(windows_and_timers("undisturbed", folder), workers=1, local=True).wait(progress=False)
    return lines(folder / "windows"), lines(folder / "timers")


def start(flow: ps.Flow, **options: object) -> Job:
    return ps.run(flow, workers=2, local=True, epoch_interval_s=0.1, **options)  # type: ignore[arg-type]


def test_open_windows_and_timers_are_kept_and_another_job_continues_exactly(
    fresh_name: Callable[[], str], tmp_path: Path, expected: tuple[list[str], list[str]]
) -> None:
    name = fresh_name()
    job = start(windows_and_timers(name, tmp_path))
    job.wait_for(lambda status: status["records_read"] >= RECORDS // 3, LIMIT_S)
    place = job.stop(savepoint=tmp_path / "saved")
    assert place == str(tmp_path / "saved")
    status = job.status()
    assert status["state"] == "FINISHED", "it has ended when stop() returns"
    assert RECORDS // 3 <= status["records_read"] < RECORDS, "it has read on to the end"
    again = start(windows_and_timers(name, tmp_path, parallelism=1), savepoint=place)
    assert again.wait(LIMIT_S, progress=False)["records_read"] == RECORDS
    assert (lines(tmp_path / "windows"), lines(tmp_path / "timers")) == expected


def test_a_death_during_the_stop_changes_nothing(
    fresh_name: Callable[[], str], tmp_path: Path, expected: tuple[list[str], list[str]]
) -> None:
    name = fresh_name()
    job = start(windows_and_timers(name, tmp_path))
    job.wait_for(lambda status: status["records_read"] >= RECORDS // 4, LIMIT_S)
    victim = job.status()["workers"][1]["pid"]
    os.kill(victim, signal.SIGSTOP)  # so that no epoch completes, nor that of the stop
    job.wait_for(lambda status: status["epochs"]["begun"] > status["epochs"]["complete"], LIMIT_S)
    begun = job.status()["epochs"]["begun"]
    stopping = threading.Thread(target=job.stop, kwargs={"savepoint": tmp_path / "saved"}, daemon=True)
    stopping.start()
    wait_until(lambda: job.status()["epochs"]["begun"] > begun, "the epoch of the stop has begun")
    os.kill(victim, signal.SIGKILL)
    stopping.join(LIMIT_S)
    assert job.wait(LIMIT_S, progress=False)["epochs"]["restarts"] == 1
    start(windows_and_timers(name, tmp_path), savepoint=tmp_path / "saved").wait(LIMIT_S, progress=False)
    assert (lines(tmp_path / "windows"), lines(tmp_path / "timers")) == expected


def test_a_job_goes_on_when_its_savepoint_cannot_be_written(
    fresh_name: Callable[[], str], tmp_path: Path, expected: tuple[list[str], list[str]]
) -> None:
    name = fresh_name()
    job = start(windows_and_timers(name, tmp_path))
    job.savepoint(tmp_path / "taken")
    with pytest.raises(ps.StoreError, match="holds a savepoint already"):
        job.stop(savepoint=tmp_path / "taken")
    with pytest.raises(ps.FlowError, match="is no place"):
        job.stop(savepoint="")
    job.wait_for(lambda status: status["state"] == "RUNNING", LIMIT_S)
    assert job.wait(LIMIT_S, progress=False)["records_read"] == RECORDS
    assert (lines(tmp_path / "windows"), lines(tmp_path / "timers")) == expected


def test_what_cannot_stop_with_a_savepoint_says_so(fresh_name: Callable[[], str], tmp_path: Path) -> None:
    job = ps.run(windows_and_timers(fresh_name(), tmp_path), workers=1, local=True, epoch_interval_s=None)
    with pytest.raises(ps.JobError, match="a savepoint needs epochs"):
        job.stop(savepoint=tmp_path / "saved")
    job.cancel()
    job.wait(LIMIT_S, progress=False)
    stopping = start(windows_and_timers(fresh_name(), tmp_path / "other"))
    stopping.wait_for(lambda status: status["records_read"] > 0, LIMIT_S)
    stopping.stop()
    with pytest.raises(ps.JobError, match=r"is stopping already, without a savepoint|has ended: finished"):
        stopping.stop(savepoint=tmp_path / "saved")
    stopping.wait(LIMIT_S, progress=False)
