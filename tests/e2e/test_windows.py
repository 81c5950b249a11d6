"""Windows on real processes: a worker that is killed in the middle changes no result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from tests.e2e.jobs import Carrier
from tests.e2e.processes import LIMIT_S, kill, wait_until

RECORDS = 16_000
RATE = 4_000.0  # a second; the times of records go ten times as fast


@pytest.mark.parametrize("carrier", ["local"], indirect=True)
def test_a_windowed_count_is_exact_though_a_worker_is_killed(
    carrier: Carrier, fresh_name: Callable[[], str], tmp_path: Path
) -> None:
    def record(i: int) -> tuple[int, int]:
        """Key and time; up to 50 ms out of order."""
        return i * 7919 % 13, i * 10 // 4 - i * 31 % 50

    flow = ps.Flow(fresh_name())
    sink, late = ps.sinks.Collect(), ps.sinks.Collect()
    counts = (
        flow.read(ps.sources.Generator(record, rate=RATE, limit=RECORDS), name="source", parallelism=2)
        .watermark(1, out_of_orderness_s=1.0, idle_s=30, parallelism=2)
        .key_by(0)
        .window(ps.Sliding(2, 1))
        .count(parallelism=2)
    )
    counts.write(sink)
    counts.side_output("late").write(late)
    job = carrier.run(flow, workers=2, epoch_interval_s=0.3, checkpoints=tmp_path)
    wait_until(lambda: job.status().get("epochs", {"complete": 0})["complete"] >= 1, "an epoch is complete")
    victim = job.status()["workers"][1]["pid"]
    kill(victim)
    status = job.wait(LIMIT_S, progress=False)
    assert status["state"] == "FINISHED"
    assert status["epochs"]["restarts"] >= 1
    window = ps.Sliding(2, 1)
    expected = Counter((key, start) for key, time in map(record, range(RECORDS)) for start in window.starts(time))
    assert late.records() == []
    assert sorted(sink.records()) == sorted((key, start, start + 2000, n) for (key, start), n in expected.items())
