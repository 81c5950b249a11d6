"""How long tasks stand still that move to another worker, and whether the others notice; see README.md."""

from __future__ import annotations

import itertools
import os
import struct
from functools import partial
from pathlib import Path
from time import monotonic_ns
from typing import Any

import penstock as ps
from benchmarks.common import Bench, median, quantile, ray_cluster, scratch, wait_until
from penstock.jobs.run import run as start_job
from penstock.placement.adoption import AdoptionOptions
from penstock.placement.options import PlacementOptions

RATE = 5_000
_HOT_RATE = 2_000
KEYS = 10_000
_GAP_NS = 5_000_000  # what is longer between two records of a task is noted
_TIME = struct.Struct("<q")
_ENTRY = struct.Struct("<qq")
_number = itertools.count()


class Beats:
    """A function that notes when its task was given no record for a while: when it was given one again, and how long
    after the last one, which may have been in another process. The lane is in the records."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._last: dict[int, int] = {}
        self._files: dict[int, int] = {}  # with the time of each lane's last record, for the next process

    def __call__(self, record: tuple[int, int]) -> tuple[int, int]:
        lane, now = record[0], monotonic_ns()
        last = self._last.get(lane)
        if last is None:
            self._files[lane] = os.open(f"{self._folder}/last-{lane}", os.O_RDWR | os.O_CREAT)
            written = os.pread(self._files[lane], 8, 0)
            last = _TIME.unpack(written)[0] if written else now
        if now - last > _GAP_NS:
            with open(f"{self._folder}/{lane}-{os.getpid()}", "ab") as file:
                file.write(_ENTRY.pack(now, now - last))
        os.pwrite(self._files[lane], _TIME.pack(now), 0)
        self._last[lane] = now
        return record


def gaps(folder: Path, lane: int, since: int) -> list[float]:
    """The gaps of a lane that ended after `since`, in ms."""
    found = []
    for path in folder.glob(f"{lane}-*"):
        data = path.read_bytes()
        found += [gap / 1e6 for at, gap in _ENTRY.iter_unpack(data) if at >= since]
    return found


def lane_of(record: tuple[int, Any], tasks: int) -> int:
    """The task of a record: its lane's."""
    return record[0] % tasks


def run(bench: Bench) -> None:
    """Two lanes through a keyed count each; the count of the second lane moves to and fro between two workers."""
    ray_cluster()
    moves = bench.pick(10 * bench.runs, 3)
    with scratch() as folder:
        flow = ps.Flow(f"bench-migration-{next(_number)}", chaining=False)
        records = flow.read(ps.sources.Generator(_record, RATE), name="in", parallelism=1).partition_by(lane_of)
        records.map(Beats(str(folder)), name="moved", parallelism=2).key_by(lambda r: r[1]).count(
            name="count", parallelism=1
        ).write(ps.sinks.Null(), name="out", parallelism=1)
        job = start_job(flow, workers=3, epoch_interval_s=1.0, checkpoints=str(folder / "epochs"))
        pauses: list[float] = []
        others: list[float] = []
        usual: list[float] = []
        try:
            wait_until(lambda: job.status().get("records_written", 0) > RATE, "records flow")
            for number in range(moves):
                quiet_from = monotonic_ns()
                done = job.status()["records_written"]
                wait_until(lambda done=done: job.status()["records_written"] > done + RATE // 2, "more records")
                usual += [max(gaps(folder, lane, quiet_from), default=0.0) for lane in (0, 1)]
                before = monotonic_ns()
                job.migrate({"moved[1]": 2 * (number % 2)})
                done = job.status()["records_written"]
                wait_until(lambda done=done: job.status()["records_written"] > done + RATE // 2, "more records")
                pauses.append(max(gaps(folder, 1, before), default=0.0))
                others.append(max(gaps(folder, 0, before), default=0.0))
                bench.say(f"migration {number + 1}/{moves}: {pauses[-1]:.0f} ms, the other task {others[-1]:.0f} ms")
        finally:
            job.cancel()
            job.wait(60, progress=False)
    config = f"{RATE:,} records a second in two lanes, 3 workers, an epoch a second; {moves} moves"
    ordered, beside = sorted(pauses), sorted(others)
    note = f"a task that is left alone has gaps of up to {max(usual):.0f} ms too (median {median(usual):.0f})"
    bench.case("a task that moves stands still, median", median(pauses), "ms", config=config, note=note, runs=pauses)
    bench.case("a task that moves stands still, p99", quantile(ordered, 0.99), "ms", goal="< 500", config=config)
    bench.case("the task beside it, longest gap, median", median(others), "ms", config=config, note=note, runs=others)
    bench.case("the task beside it, longest gap, p99", quantile(beside, 0.99), "ms", config=config)

    _replans(bench)


def _replans(bench: Bench) -> None:
    """From the change of what tasks send each other until the job has moved tasks for it, in periods."""
    period = bench.pick(2.0, 0.5)
    found: list[float] = []
    runs = max(1, bench.runs)
    for number in range(runs):
        before = int(_HOT_RATE * (4 + number / runs) * period)  # at another time within a period in each
        flow = ps.Flow(f"bench-replan-{next(_number)}", chaining=False)
        texts = flow.read(ps.sources.Generator(partial(_hot, before), _HOT_RATE), name="in", parallelism=2)
        texts.partition_by(lane_of).map(_same, name="next", parallelism=2).write(ps.sinks.Null(), parallelism=2)
        keen = AdoptionOptions(horizon_s=1e6, rest_s=period)  # the traffic of a benchmark is little
        placement = PlacementOptions("round-robin", replan_s=period, adoption=keen)
        job = start_job(flow, workers=2, epoch_interval_s=0.5, placement=placement)
        try:
            wait_until(lambda job=job, n=before: job.status().get("records_read", 0) >= n, "the traffic changes", 60)
            changed, moves = monotonic_ns(), job.status()["placement"]["moves"]
            wait_until(lambda job=job, moves=moves: job.status()["placement"]["moves"] > moves, "tasks move", 60)
            found.append((monotonic_ns() - changed) / 1e9 / period)
        finally:
            job.cancel()
            job.wait(60, progress=False)
        bench.say(f"replan {number + 1}: {found[-1]:.2f} periods")
    bench.case(
        "from a change of the hot edges until tasks have moved",
        max(found),
        "periods",
        goal="<= 2",
        config=f"2 sources of texts of 2,000 letters, 2 workers, a period of {period:g} s",
        note="the longest of the runs; the change comes at another time within a period in each",
        runs=found,
    )


def _record(index: int) -> tuple[int, int]:
    return index % 2, index % KEYS


def _hot(before: int, index: int) -> tuple[int, str]:
    """A text for one of two lanes: each source's for its own, and after `before` records for the other's."""
    return (index % 2) ^ (index >= before), "x" * 2_000


def _same(record: tuple[int, str]) -> tuple[int, str]:
    return record
