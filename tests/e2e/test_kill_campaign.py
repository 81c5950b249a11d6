"""What the kill campaign counts, and when it has not done what it is for; without jobs."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e import kill_campaign, store_damage
from tests.e2e.kill_campaign import EMPTY_RUNS, Figures, Outcome, ThisMachine, Tormentor, campaign, paused
from tests.e2e.processes import wait_until

Script = list[list[tuple[str, int]] | Exception]
"""Of each run the kinds of its faults, with how many processes they killed; or how it ends."""


def options_of(*, kills: int, kinds: str = "worker,pause,file", **more: Any) -> argparse.Namespace:
    settings = {"flow": "few", "seed": 7, "rate": 10.0, "seconds": 1.0, "workers": 2, "interval": 1.0, "runs": 0}
    options = {**settings, "per_run": 8, "moving": False, "local": True, "go_on": False, **more}
    return argparse.Namespace(kills=kills, kinds=kinds, **options)


def campaign_of(script: Script, options: argparse.Namespace, place: Path, of_faults: bool = False) -> Figures:
    runs = iter(script)

    class Scripted(Tormentor):
        def run(self, faults: int, kills: float = 0.0, wait_s: float = 0.0) -> None:
            found = next(runs)
            if isinstance(found, Exception):
                raise found
            for kind, killed in found:
                self.told(Outcome(kind, [kind], killed, 0.0))

    return campaign(options, place, Scripted, Figures(of_faults=of_faults))


def test_a_campaign_continues_until_enough_processes_are_killed(tmp_path: Path) -> None:
    """Pauses in which nobody is killed are no kills."""
    script: Script = [[("worker", 1), ("pause", 0), ("pause-master", 0)], [("pause", 1), ("file", 2)], [("two", 2)], []]
    figures = campaign_of(script, options_of(kills=6), tmp_path)
    assert len(figures.runs) == 3
    assert figures.good
    assert figures.verdict() == (
        "good: 3 runs, 0 failed, 6 of 6 processes killed, 3 pauses, 1 times the store was harmed"
    )
    assert figures.summary()["killed"] == 6


def test_a_campaign_that_killed_fewer_is_not_good(tmp_path: Path) -> None:
    figures = campaign_of([[("worker", 1), ("pause", 0)]], options_of(kills=2, runs=1), tmp_path)
    assert not figures.good
    assert figures.verdict().startswith("NOT GOOD: 1 runs, 0 failed, 1 of 2 processes killed, 1 pauses")


def test_a_campaign_of_faults_counts_those_that_kill_nobody(tmp_path: Path) -> None:
    figures = campaign_of([[("pause", 0), ("worker", 1)]], options_of(kills=2), tmp_path, of_faults=True)
    assert figures.good
    assert figures.verdict().startswith("good: 1 runs, 0 failed, 2 of 2 faults, 1 processes killed, 1 pauses")


def test_a_campaign_gives_up_after_some_runs_without_a_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = campaign_of([[], [("worker", 1)], *([[]] * EMPTY_RUNS)], options_of(kills=2), tmp_path)
    assert len(figures.runs) == 2 + EMPTY_RUNS
    assert not figures.good
    assert "no fault fell into this run; give more --seconds" in capsys.readouterr().out


def test_a_run_that_fails_is_not_made_up_for(tmp_path: Path) -> None:
    figures = campaign_of([AssertionError("wrong"), [("worker", 1)], []], options_of(kills=1, go_on=True), tmp_path)
    assert [run.error for run in figures.runs] == ["AssertionError: wrong", None]
    assert not figures.good
    assert figures.verdict().startswith("NOT GOOD: 2 runs, 1 failed, 1 of 1 processes killed")


@pytest.mark.parametrize("kinds", ["worker,read-only,full", "full"])
def test_a_campaign_says_what_it_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: str) -> None:
    monkeypatch.setattr(store_damage, "can_mount", lambda place: False)
    figures = campaign_of([[("worker", 1)]], options_of(kills=1, kinds=kinds), tmp_path)
    assert figures.good == ("worker" in kinds)
    assert figures.verdict().endswith(f"; without {' and '.join(figures.left_out)}: no disk can be mounted here")
    assert figures.left_out == (("read-only", "full") if "worker" in kinds else ("full",))


@pytest.mark.parametrize("killed", [1, 2])
def test_the_command_ends_with_1_when_too_few_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], killed: int
) -> None:
    def run(self: Tormentor, faults: int, kills: float, wait_s: float = 0.0) -> None:
        assert (faults, kills) == (8, 2)
        self.told(Outcome("worker", ["worker 0"], killed, 0.0))

    monkeypatch.setattr(Tormentor, "run", run)
    monkeypatch.setattr(sys, "argv", ["kill_campaign", "--kills", "2", "--runs", "1", "--local", "--kinds", "worker"])
    assert kill_campaign.main() == (0 if killed == 2 else 1)
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"{'good' if killed == 2 else 'NOT GOOD'}: 1 runs, 0 failed, {killed} of 2 processes killed, 0 pauses, "
        "0 times the store was harmed"
    )


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def test_only_processes_that_were_there_count_as_killed(sleeper: subprocess.Popen[bytes]) -> None:
    assert ThisMachine().kill([("node", sleeper.pid)]) == 1
    sleeper.wait()
    assert ThisMachine().kill([("node", sleeper.pid)]) == 0


def test_a_paused_process_continues(sleeper: subprocess.Popen[bytes]) -> None:
    def stopped() -> bool:
        return bool(psutil.Process(sleeper.pid).status() == psutil.STATUS_STOPPED)

    with paused(sleeper.pid):
        wait_until(stopped, "the process is stopped")
    wait_until(lambda: not stopped(), "the process continues")
    os.kill(sleeper.pid, signal.SIGKILL)
