"""What a user is told of a job that starts, that cannot start, and that a program's end takes along."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.actors.nodes import check_fits
from penstock.jobs import farewell, progress
from penstock.placement.groups import Machine, NotPlaced
from penstock.runtime.status import JobStatus

NODE = Machine("ab12cd34ef", "host", 3.0, 1.0, 1e9, {}, {}, {})


def test_what_can_never_fit_is_refused_with_figures() -> None:
    with pytest.raises(
        NotPlaced, match=r"8 x 1 = 8 CPUs, and the cluster has fewer: host \(ab12cd34\) has 3 in all, 1 free"
    ) as error:
        check_fits([NODE], 8, 1.0)
    assert error.value.nodes == ("ab12cd34ef",)
    with pytest.raises(NotPlaced, match=r"2 x 1\.6 = 3\.2 CPUs"):
        check_fits([NODE], 2, 1.6)


def test_what_others_hold_now_may_come_free() -> None:
    check_fits([NODE], 3, 1.0)
    check_fits([NODE], 30, 0.1)
    check_fits([NODE], 8, 0.0)


def test_a_job_that_starts_says_what_it_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    shown = progress.Progress("job", shown=True, where="the Ray cluster at 1.2.3.4:5")
    status = JobStatus(name="job", state="STARTING", uptime_s=3.2)
    shown.update(status)
    shown.update(status.changed(waits_for="1 of 2 workers have started"))
    assert capsys.readouterr().err == (
        "job starting on the Ray cluster at 1.2.3.4:5 3 s: its JobMaster\n"
        "job starting on the Ray cluster at 1.2.3.4:5 3 s: 1 of 2 workers have started\n"
    )


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "No space left on device")])
def test_progress_that_nobody_can_read_does_not_end_the_wait(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `python program.py 2>&1 | head -1`."""
    tries: list[str] = []

    def write(text: str) -> int:
        tries.append(text)
        raise error

    shown = progress.Progress("job", shown=True)
    monkeypatch.setattr(progress.sys, "stderr", SimpleNamespace(write=write, flush=lambda: None))
    status = JobStatus(name="job", state="STARTING", uptime_s=3.2)
    shown.update(status)
    assert tries
    assert not shown.due()
    assert shown.wait_s(None) is None
    tries.clear()
    shown.finish(status)
    assert not tries, "it is not tried again"


class Running:
    def __init__(self, name: str, running: bool = True, fails: bool = False) -> None:
        self.name, self.running, self.fails = name, running, fails

    def ends_unasked(self) -> bool:
        return self.running

    def status(self) -> JobStatus:
        if self.fails:
            raise RuntimeError("no cluster any more")
        return JobStatus(name=self.name, state="RUNNING", records_read=1234, records_written=56)


def test_the_end_of_a_program_names_the_jobs_that_go_with_it() -> None:
    lines: list[str] = []
    farewell.said([Running("broken", fails=True), Running("over", running=False), Running("lost")], lines.append)
    (line,) = lines
    assert "'lost' is RUNNING (1,234 records read, 56 written)" in line
    assert "job.wait()" in line
    assert "detached=True" in line
