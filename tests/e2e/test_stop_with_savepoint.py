"""A job on Ray stops with a savepoint while its JobMaster is killed, and another job continues exactly."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import penstock as ps
from tests.e2e.jobs import run
from tests.e2e.kill_campaign import master_pid
from tests.e2e.processes import LIMIT_S, kill, wait_until
from tests.local.test_stop_with_savepoint import RECORDS, lines, windows_and_timers


@pytest.mark.parametrize("moment", ["never", "at once", "when it is written"])
def test_the_stop_is_carried_out_whatever_becomes_of_the_master(
    moment: str, cluster: str, fresh_name: Callable[[], str], tmp_path: Path
) -> None:
    name = fresh_name()
    saved = tmp_path / "saved"
    job = run(windows_and_timers(name, tmp_path), workers=2, epoch_interval_s=0.1, checkpoints=tmp_path / "epochs")
    job.wait_for(lambda status: status["records_read"] > RECORDS // 10 and status["epochs"]["complete"] > 0, LIMIT_S)
    master = master_pid(job)
    places: list[str | None] = []
    stopping = threading.Thread(target=lambda: places.append(job.stop(savepoint=saved)), daemon=True)
    stopping.start()
    if moment == "when it is written":
        wait_until(lambda: any(saved.glob("savepoint/manifests/*.json")), "the savepoint is written")
    if moment != "never":
        with suppress(ProcessLookupError):  # it may have ended by itself when the savepoint is written
            kill(master)
    stopping.join(LIMIT_S)
    assert places == [str(saved)]
    status = job.wait(LIMIT_S, progress=False)
    assert status["state"] == "FINISHED"
    again = ps.run(windows_and_timers(name, tmp_path), workers=1, local=True, savepoint=saved)
    assert again.wait(LIMIT_S, progress=False)["records_read"] == RECORDS
    ps.run(windows_and_timers("undisturbed", tmp_path / "undisturbed"), workers=1, local=True).wait(progress=False)
    for folder in ("windows", "timers"):
        assert lines(tmp_path / folder) == lines(tmp_path / "undisturbed" / folder)
