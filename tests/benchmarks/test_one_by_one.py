"""Benchmarks that run one after the other: none keeps the others from running, and one failure is none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.__main__ import BENCHMARKS, _means, main
from benchmarks.common import Bench, Skipped
from benchmarks.one_by_one import SKIPPED
from tests.e2e.processes import LIMIT_S, wait_until

# What a benchmark of this name does. The helper of one that hangs has a session of its own, as Ray's processes have.
FAKE = """
import pathlib, subprocess, sys, time

folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
with open(folder / "ran", "a") as file:
    print(name, file=file)
times = (folder / "ran").read_text().split().count(name)
if name == "hangs":
    helper = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    (folder / f"helper-{times}").write_text(str(helper.pid))
    time.sleep(1000)
sys.exit({"fails": 1, "skips": 77}.get(name, 1 if name == "once" and times == 1 else 0))
"""

RUN = """
import dataclasses, json, sys
from benchmarks import one_by_one

folder, limit_s, within_s, *names = sys.argv[1:]
command = [sys.executable, "-c", FAKE, folder]
outcome = one_by_one.run(names, command, limit_s=float(limit_s), within_s=float(within_s))
print(json.dumps({**dataclasses.asdict(outcome), "words": list(outcome.words())}))
""".replace("FAKE", repr(FAKE))


def start(folder: Path, names: list[str], limit_s: float, within_s: float) -> subprocess.Popen[str]:
    given = [str(folder), str(limit_s), str(within_s), *names]
    return subprocess.Popen([sys.executable, "-c", RUN, *given], stdout=subprocess.PIPE, text=True)


def outcome_of(folder: Path, *names: str, limit_s: float = LIMIT_S, within_s: float = LIMIT_S) -> dict[str, Any]:
    with start(folder, list(names), limit_s, within_s) as process:
        out, _ = process.communicate(timeout=LIMIT_S)
    found: dict[str, Any] = json.loads(out)
    return found


def test_each_runs_and_one_that_fails_runs_once_more(tmp_path: Path) -> None:
    found = outcome_of(tmp_path, "fine", "fails", "once", "skips", "fine-too")
    assert (tmp_path / "ran").read_text().split() == ["fine", "fails", "fails", "once", "once", "skips", "fine-too"]
    assert (found["failed"], found["again"], found["skipped"]) == (["fails"], ["once"], ["skips"])
    assert found["left_out"] == found["undecided"] == []
    assert found["words"][-1] == "FAILED: fails"
    assert len(found["seconds"]["once"]) == 2


def test_one_that_hangs_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    found = outcome_of(tmp_path, "hangs", "fine", limit_s=3.0)
    assert found["failed"] == ["hangs"]
    assert (tmp_path / "ran").read_text().split() == ["hangs", "hangs", "fine"]
    for helper in tmp_path.glob("helper-*"):
        assert not psutil.pid_exists(int(helper.read_text()))


def test_what_there_is_no_time_for_has_not_failed(tmp_path: Path) -> None:
    found = outcome_of(tmp_path, "fine", within_s=0.0)
    assert found["left_out"] == ["fine"]
    assert found["failed"] == []


def test_who_ends_the_run_ends_the_benchmark_too(tmp_path: Path) -> None:
    with start(tmp_path, ["hangs"], LIMIT_S, LIMIT_S) as process:
        wait_until(lambda: (tmp_path / "helper-1").exists() and (tmp_path / "helper-1").read_text(), "it hangs")
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert not psutil.pid_exists(int((tmp_path / "helper-1").read_text()))


def test_one_that_lacks_something_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacking(bench: Bench) -> None:
        raise Skipped("no wheels here")

    monkeypatch.setattr("benchmarks.idle.run", lacking)
    assert main(["--quick", "--out", str(tmp_path), "idle"]) == SKIPPED
    assert "idle is skipped: no wheels here" in capsys.readouterr().err


def test_a_whole_name_means_one_benchmark() -> None:
    """So that a run in a process of its own is never another one."""
    assert [[name for name in BENCHMARKS if _means(given, name)] for given in BENCHMARKS] == [[n] for n in BENCHMARKS]
    assert [name for name in BENCHMARKS if _means("ring", name)] == ["ring_peers", "ring_paper"]


@pytest.mark.parametrize("status", [0, 1, 124])
def test_ci_runs_the_slow_tier_after_the_tests(status: int, tmp_path: Path) -> None:
    """And fails when it fails or does not end in time."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, does in (
        ("make", f'echo "make $@" >> {tmp_path}/done; [ "$1" != slow ] || exit {status}'),
        ("timeout", f'echo "timeout $1" >> {tmp_path}/done; shift; "$@"'),
        ("apt-get", "exit 0"),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{does}\n")
        (tools / name).chmod(0o755)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    ran = subprocess.run([root / ".ci" / "run"], env=environment, check=False)
    assert ran.returncode == status
    assert (tmp_path / "done").read_text().splitlines()[-3:] == ["make test", "timeout 60m", "make slow"]
