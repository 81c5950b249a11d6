"""map_async whose calls wait for 50 ms: how near does one worker come to the calls that fit into the time, and what
part of a core does it take? See README.md."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import psutil

import penstock as ps
from benchmarks.common import Bench, WrongResult, median

_number = itertools.count()
_CALL_S = 0.05


async def wait(number: int) -> int:
    """A call of a coroutine function."""
    await asyncio.sleep(_CALL_S)
    return number


def block(number: int) -> int:
    """A call of a blocking function."""
    time.sleep(_CALL_S)
    return number


def run(bench: Bench) -> None:
    """See the module."""
    seconds = bench.pick(10.0, 2.0)
    contestants: dict[str, tuple[Any, int]] = {"coroutines": (wait, 500), "blocking functions": (block, 50)}
    results = bench.take_turns(
        {
            name: lambda fn=fn, concurrency=concurrency: _once(fn, concurrency, seconds)
            for name, (fn, concurrency) in contestants.items()
        }
    )
    for name, (_, concurrency) in contestants.items():
        limit = concurrency / _CALL_S
        config = f"1 worker without Ray, {concurrency} at a time, in order"
        runs = [result["calls/s"] for result in results[name]]
        bench.case(
            f"calls/s, {name} of 50 ms",
            median(runs),
            "calls/s",
            config=config,
            note=f"{100 * median(runs) / limit:.0f} % of the limit of {limit:,.0f}",
            runs=runs,
        )
        cores = [result["cores"] for result in results[name]]
        bench.case(f"CPU of the worker, {name} of 50 ms", median(cores), "cores", config=config, runs=cores)
        each = [result["cores"] / result["calls/s"] * 1e6 for result in results[name]]
        bench.case(f"CPU a call, {name} of 50 ms", median(each), "us", config=config, runs=each)


def _once(fn: Any, concurrency: int, seconds: float) -> dict[str, float]:
    """Calls per second, and the cores that the worker takes, after a second at full speed."""
    flow = ps.Flow(f"bench-map-async-{next(_number)}", parallelism=1)
    sink = ps.sinks.Collect()
    stream = flow.read(ps.sources.Generator(lambda i: i, rate=2 * concurrency / _CALL_S))
    stream.map_async(fn, concurrency=concurrency).filter(lambda number: number % 1000 == 0).write(sink)
    job = ps.run(flow, local=True, workers=1)
    while not _called(job):
        time.sleep(0.01)
    time.sleep(1.0)
    worker = psutil.Process(job.status()["workers"][0]["pid"])
    began, calls, cpu = time.monotonic(), _called(job), sum(worker.cpu_times()[:2])
    time.sleep(seconds)
    took, calls, cpu = time.monotonic() - began, _called(job) - calls, sum(worker.cpu_times()[:2]) - cpu
    job.stop()
    job.wait(progress=False)
    if (found := sink.records()) != [1000 * i for i in range(len(found))]:
        raise WrongResult(f"results are missing or out of order: {found[:20]}")
    return {"calls/s": calls / took, "cores": cpu / took}


def _called(job: Any) -> int:
    """The number of results so far."""
    return int(job.status()["operators"]["map_async"]["records_out"])
