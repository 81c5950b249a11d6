"""The CPU that a job with nothing to do uses: all its processes, in percent of one core; see README.md."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import penstock as ps
from benchmarks.common import Bench, cpu_ns, job_processes, median, ray_cluster, wait_until
from penstock.jobs.run import run as start_job
from penstock.runtime.sources import Reader, SourceContext, Split

_number = itertools.count()
WORKERS = 4


class Silent(ps.sources.Source):
    """An input in which nothing comes: a few records at the start, then never one, and no timer either."""

    bounded = False

    def splits(self, parallelism: int) -> list[Split]:
        return [Split(str(i)) for i in range(parallelism)]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        return _SilentReader(len(splits))


class _SilentReader(Reader):
    def __init__(self, count: int) -> None:
        self._left = count

    def read(self, limit: int) -> list[Any]:
        records = [f"record {i}" for i in range(self._left)]
        self._left = 0
        return records

    def ready_in(self) -> float | None:
        return None

    def offsets(self) -> dict[str, Any]:
        return {}


def share_of_core(pids: list[int], seconds: float) -> float:
    """Percent of one core that the processes use over the next seconds."""
    before = [cpu_ns(pid) for pid in pids]
    started = time.monotonic_ns()
    time.sleep(seconds)
    used = sum(cpu_ns(pid) - was for pid, was in zip(pids, before, strict=True))
    return 100 * used / (time.monotonic_ns() - started)


def run(bench: Bench) -> None:
    """See the module."""
    import ray

    ray_cluster()
    seconds = bench.pick(30.0, 2.0)
    settle = bench.pick(3.0, 0.5)
    split: list[float] = []

    def job() -> float:
        flow = ps.Flow(f"bench-idle-{next(_number)}")
        flow.read(Silent()).rebalance().map(str.upper).key_by(str.lower).count().write(ps.sinks.Null())
        job = start_job(flow, workers=WORKERS)
        try:
            wait_until(lambda: job.status().get("records_written", 0) >= 1, "records flow")
            pids = job_processes(job)
            time.sleep(settle)
            workers = [cpu_ns(pid) for pid in pids[:-1]]
            total = share_of_core(pids, seconds)
            used = sum(cpu_ns(pid) - was for pid, was in zip(pids[:-1], workers, strict=True))
            split.append(used / 1e7 / seconds)
            return total
        finally:
            job.cancel()
            job.wait(60, progress=False)

    def actors() -> float:
        made = [ray.remote(_Idle).options(num_cpus=1).remote() for _ in range(WORKERS + 1)]
        try:
            pids = ray.get([actor.pid.remote() for actor in made])
            time.sleep(settle)
            return share_of_core(pids, seconds)
        finally:
            for actor in made:
                ray.kill(actor)

    contestants: dict[str, Callable[[], float]] = {"penstock": job, "ray actors": actors}
    results = bench.take_turns(contestants, unit="% of a core")
    bench.case(
        f"idle job of {WORKERS} workers",
        median(results["penstock"]),
        "% of a core",
        peer=f"{WORKERS + 1} idle plain Ray actors",
        peer_figure=median(results["ray actors"]),
        config=f"4 workers and the JobMaster, over {seconds:g} s",
        runs=results["penstock"],
        peer_runs=results["ray actors"],
    )
    bench.case("the 4 workers without the JobMaster", median(split), "% of a core", runs=split)


class _Idle:
    def pid(self) -> int:
        return os.getpid()
