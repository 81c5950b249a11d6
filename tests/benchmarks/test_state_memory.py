"""The memory of a real job's JobMaster while its state is compacted, copied and restored; see
benchmarks/state_memory.py."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.common import run_script
from benchmarks.state_memory_peer import KINDS, _check, memory, number_of

KEYS = 100_000
SIZE = 1000


def test_each_key_is_made_once_before_any_is_changed() -> None:
    made = Counter(number_of(i, task, 2, 1001) for task in range(2) for i in range(501 - task))
    assert made == Counter(range(1001))
    later = [number_of(i, task, 2, 1001) for task in range(2) for i in range(600, 3000)]
    assert set(later) <= set(range(1001))
    assert len(set(later)) > 900


def test_a_wrong_count_is_found(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for task in range(2):
        (tmp_path / f"made-{task}").write_text("5")
    (tmp_path / "out" / "part").write_text("".join(f"{key:010d} 1\n" for key in range(10)))
    _check(tmp_path, 10)
    (tmp_path / "out" / "part").write_text("".join(f"{key:010d} {1 + (key == 7)}\n" for key in range(10)))
    with pytest.raises(SystemExit, match="0000000007 has 2 records, and must have 1"):
        _check(tmp_path, 10)
    (tmp_path / "out" / "part").write_text("".join(f"{key:010d} 1\n" for key in range(9)))
    with pytest.raises(SystemExit, match="9 keys have state, and there are 10"):
        _check(tmp_path, 10)


def test_the_memory_of_a_process_is_read() -> None:
    assert 1 << 20 < memory(os.getpid()) <= memory(os.getpid(), "VmHWM")
    assert memory(2**22 + 1) == 0


def test_no_process_has_more_than_its_share_of_the_state() -> None:
    """The JobMaster has none of 100 MB, through compactions, a savepoint and a recovery. A worker that restores its
    half has it once."""
    settings = {"what": "large", "local": True, "keys": KEYS, "size": SIZE, "rate": 4000, "interval_s": 1.0}
    found = json.loads(run_script("benchmarks.state_memory_peer", settings, timeout=1800))
    assert found["state"] > KEYS * SIZE
    assert found["compactions"] >= 6
    assert found["compaction"] > found["master"]
    assert found["worker"] - found["worker_at_first"] > KEYS * SIZE / 2
    grown = found["master"] - found["master_at_first"]
    # A worker that had its share twice would have half of the state more. What it has besides varies by a quarter.
    most = found["worker"] + 0.4 * KEYS * SIZE
    assert found["restoring"] < most, f"a new worker has {found['restoring']:,} bytes, of {found['worker']:,}"
    assert found["going_back"] < most, f"a worker goes back with {found['going_back']:,} bytes, of {found['worker']:,}"
    assert grown < KEYS * SIZE / 4, f"the JobMaster has {grown:,} bytes more for {found['state']:,} bytes of state"


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_key_costs_is_measured(kind: str) -> None:
    settings = {"what": kind, "keys": 50_000}
    found = json.loads(run_script("benchmarks.state_memory_peer", settings, timeout=1800))
    assert 50 < found["memory"] < 1000
    assert 10 < found["snapshot"] < 100
