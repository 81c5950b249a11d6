"""What the switch campaign counts, and the source that waits for it; without Ray and Spark."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.sources.base import SourceContext
from tests.e2e import switch_campaign
from tests.e2e.processes import alive, wait_until
from tests.e2e.switch_campaign import (
    HOLD_LOOK_S,
    KINDS,
    TRICKLE,
    Held,
    Run,
    Tally,
    campaign,
    harm,
    kinds_for_a_socket,
)


def a_run(in_spark: int = 10, kills: int = 3, mode: str = "toggle:1") -> Run:
    """A run with a pause, in which nobody was killed."""
    return Run("words", mode, ["worker in OPERATION"] * kills, ["master for 3 s"], switches=1, in_spark=in_spark)


def test_a_run_counts_when_it_did_what_it_is_for() -> None:
    assert a_run().missed(3) is None
    assert a_run(in_spark=0).missed(3) == "no record went to Spark"
    assert a_run(kills=0).missed(3) == "0 of 3 processes were killed"
    assert a_run(kills=0).missed(0) is None
    assert a_run(in_spark=0, mode="off").missed(3) is None


def tally_of(wanted: int, runs: list[Run | Exception]) -> tuple[Tally, list[int]]:
    seeds: list[int] = []

    def one(seed: int) -> Run:
        seeds.append(seed)
        run = runs[len(seeds) - 1]
        if isinstance(run, Exception):
            raise run
        return run

    return campaign(wanted, 7, 3, one), seeds


def test_a_campaign_continues_until_enough_runs_count() -> None:
    tally, seeds = tally_of(3, [a_run(), a_run(in_spark=0), a_run(), a_run(kills=1), a_run(), a_run()])
    assert seeds == [7, 8, 9, 10, 11]
    assert tally.good
    assert tally.summary() == (
        "3 of 3 runs counted, 0 failed, 2 did not count: no record went to Spark (1), 1 of 3 processes were killed "
        "(1); 3 times to Spark; 9 processes killed: {'worker': 9}; 3 pauses, 0 times the store was harmed"
    )


def test_a_campaign_fails_when_too_many_runs_do_not_count() -> None:
    tally, seeds = tally_of(3, [a_run(in_spark=0)] * 3 + [a_run()] * 10)
    assert len(seeds) == tally.tries_max == 5
    assert len(tally.counted) == 2
    assert not tally.good
    assert Tally(50).tries_max == 62


def test_several_runs_at_a_time_are_no_more_than_wanted() -> None:
    begun: list[int] = []
    together = threading.Barrier(3, timeout=60)

    def one(seed: int) -> Run:
        begun.append(seed)
        together.wait()
        return a_run(in_spark=0 if seed == 8 else 10)

    tally = campaign(5, 7, 3, one, jobs=3)
    assert sorted(begun) == [7, 8, 9, 10, 11, 12]
    assert tally.good
    assert len(tally.missed) == 1


def test_a_run_that_fails_is_not_made_up_for() -> None:
    tally, seeds = tally_of(3, [a_run(), AssertionError("wrong"), a_run(), a_run()])
    assert len(seeds) == 3
    assert tally.failed == ["seed 8: AssertionError: wrong"]
    assert not tally.good


@pytest.fixture
def processes() -> Iterator[dict[str, int]]:
    """Processes that stand for those of a job."""
    with ExitStack() as last:
        pids = {}
        for name in ("worker", "master", "executor", "bridge"):
            process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            last.callback(process.wait)
            last.callback(process.kill)
            pids[name] = process.pid
        yield pids


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_does_what_it_says(
    kind: str, processes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[tuple[int, bool]] = []

    def pause(place: Any, rng: Any, victim: tuple[str, int], *others: Any, spare: bool) -> tuple[None, int, str]:
        pauses.append((victim[1], spare))
        return None, 0, "for 1.0 s"

    monkeypatch.setattr(switch_campaign, "master_process", lambda job: ("node", processes["master"]))
    monkeypatch.setattr(switch_campaign, "pause_and_kill", pause)
    file = tmp_path / "manifests" / "1.json"
    file.parent.mkdir()
    file.write_bytes(bytes(1000))
    status = {
        "workers": [{"node_id": "node", "pid": processes["worker"]}],
        "epochs": {"store": str(tmp_path)},
        "dual": {"processes": {"bridge": processes["bridge"], "executors": {"1": processes["executor"]}}},
    }
    run = Run("burst-socket", "toggle:1")
    killed = harm(None, run, random.Random(1), kind, status, "OPERATION")
    wait_until(lambda: sum(map(alive, processes.values())) == len(processes) - killed, "the victim is gone")
    gone = {name for name, pid in processes.items() if not alive(pid)}
    assert killed == len(run.kills) == len(gone)
    if kind == "pause":
        assert gone == set()
        (pause_of,) = pauses
        assert pause_of in [(processes["worker"], True), (processes["master"], True)]
        assert run.pauses[0].endswith(" for 1.0 s in OPERATION")
        return
    assert gone == {kind} if kind != "file" else gone in ({"worker"}, {"master"})
    assert run.kills == [f"{name} in OPERATION" for name in gone]
    assert (not file.exists() or file.read_bytes() != bytes(1000)) == bool(run.damage) == (kind == "file")


@pytest.mark.parametrize("kind", ["worker", "pause", "file"])
def test_nothing_is_done_to_workers_of_an_old_status(
    kind: str, processes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status is the last one that was known when the JobMaster has just died with its workers."""
    monkeypatch.setattr(switch_campaign, "master_process", lambda job: ("node", processes["master"]))
    os.kill(processes["worker"], signal.SIGKILL)
    wait_until(lambda: not alive(processes["worker"]), "the worker is gone")
    status = {
        "workers": [{"node_id": "node", "pid": processes["worker"]}],
        "epochs": {"store": str(tmp_path)},
        "dual": {"processes": {"bridge": None, "executors": {}}},
    }
    run = Run("words", "toggle:1")
    assert harm(None, run, random.Random(1), kind, status, "RECORD") == 0
    assert not run.kills + run.pauses + run.damage
    assert alive(processes["master"])


def test_a_job_that_cannot_read_again_keeps_its_workers() -> None:
    assert kinds_for_a_socket(KINDS) == ("executor", "bridge", "pause")
    assert kinds_for_a_socket(("worker", "pause")) == ("pause", "executor", "bridge")


@pytest.mark.parametrize("splits", [1, 2])
def test_a_held_source_hands_out_no_more_until_its_file_is_there(tmp_path: Path, splits: int) -> None:
    ready, end = tmp_path / "ready", tmp_path / "end"
    now = 100.0
    source = Held(ps.sources.Generator(lambda i: i, limit=40, splits=splits), {ready: 2, end: 8}, lambda: now)
    reader = source.reader(source.splits(splits), SourceContext("held", 0, 1, ErrorHandler("held")))

    def all_there_is() -> list[int]:
        records: list[int] = []
        while some := reader.read(7):
            records += some
        return records

    assert len(all_there_is()) == 2 * splits
    assert reader.ready_in() == HOLD_LOOK_S
    assert reader.backlog() == 0
    assert not reader.finished
    ready.touch()
    assert len(all_there_is()) == 6 * splits + TRICKLE
    assert reader.read(7) == []
    assert reader.ready_in() == HOLD_LOOK_S
    now += HOLD_LOOK_S
    assert len(all_there_is()) == TRICKLE
    again = source.reader(
        [split.at(reader.offsets()[split.name]) for split in source.splits(splits)],
        SourceContext("held", 0, 1, ErrorHandler("held")),
    )
    assert len(again.read(7)) == TRICKLE
    assert again.read(7) == []
    end.touch()
    assert len(all_there_is()) == 40 - 8 * splits - 2 * TRICKLE
    assert reader.finished
    reader.close()
