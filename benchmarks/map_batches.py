"""map_batches whose call takes 20 ms whatever it is given: does it keep up, and what do calls get? And one whose
call takes 1 us a record: what is lost beside the function? See README.md."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import penstock as ps
from benchmarks import pacing
from benchmarks.common import Bench, median, run_job, run_script, scratch
from benchmarks.grep_latency import shape
from benchmarks.map_batches_peer import batch_cost
from benchmarks.pacing import Latencies, Pacer
from benchmarks.penstock_parts import LatencySink, Paced

_number = itertools.count()
_CALL_S = 0.02


class Slow:
    """Notes how many records each call gets."""

    def __init__(self, out: Path) -> None:
        self.file = str(out / "calls")

    def __call__(self, batch: list[Any]) -> list[Any]:
        time.sleep(_CALL_S)
        with open(self.file, "a") as file:
            file.write(f"{len(batch)}\n")
        return batch


def run(bench: Bench) -> None:
    """See the module."""
    _expensive_calls(bench)
    _cheap_records(bench)


def _cheap_records(bench: Bench) -> None:
    """Calls that take 1 us a record, beside a loop that calls the same function with lists of the same size."""
    count = bench.pick(4_000_000, 100_000)
    for size in (256, 1024):
        settings = {"count": count, "batch_size": size, "options": {"local": True}}

        def penstock(settings: dict[str, Any] = settings) -> dict[str, float]:
            found: dict[str, float] = json.loads(run_script("benchmarks.map_batches_peer", settings))
            return found

        def plain(size: int = size) -> dict[str, float]:
            began, began_cpu = time.monotonic_ns(), time.thread_time_ns()
            for at in range(0, count, size):
                batch_cost(list(range(at, min(at + size, count))))
            took, cpu = time.monotonic_ns() - began, time.thread_time_ns() - began_cpu
            return {"records/s": count / took * 1e9, "CPU a record": cpu / count}

        results = bench.take_turns({"penstock": penstock, "plain loop": plain})
        for what, unit in (("records/s", "records/s"), ("CPU a record", "ns")):
            ours, theirs = ([result[what] for result in results[who]] for who in ("penstock", "plain loop"))
            bench.case(
                f"{what}, 1 us a record, batch_size {size}",
                median(ours),
                unit,
                peer="plain loop",
                peer_figure=median(theirs),
                config="1 worker, without epochs",
                runs=ours,
                peer_runs=theirs,
            )
        calls = [result["records a call"] for result in results["penstock"]]
        name = f"records a call, 1 us a record, batch_size {size}"
        bench.case(name, median(calls), "records", config="1 worker, without epochs", runs=calls)


def _expensive_calls(bench: Bench) -> None:
    """Calls that take 20 ms whatever they are given, up to 256 records each."""
    for rate in (1000, 10_000):
        count = rate * bench.pick(20, 3)
        texts = [f"record {i}" for i in range(count)]

        def once(rate: int = rate, count: int = count, texts: list[str] = texts) -> dict[str, float]:
            with scratch() as out:
                flow = ps.Flow(f"bench-map-batches-{next(_number)}", parallelism=1)
                stream = flow.read(Paced(Pacer(texts, rate, count))).map_batches(Slow(out), batch_size=256)
                stream.map(shape).write(LatencySink(Latencies(str(out), count)))
                run_job(flow, workers=1)
                sizes = [int(line) for line in (out / "calls").read_text().split()]
                (out / "calls").unlink()
                found = pacing.collect(out, dict.fromkeys(texts, 1), count, "penstock", skip_s=1.0)
                return {**found, "records a call": median(sizes[len(sizes) // 4 :])}

        results = bench.take_turns({"penstock": once})["penstock"]
        for what, unit, goal in (("p50", "ms", None), ("p99", "ms", "< 100"), ("records a call", "records", None)):
            runs = [result[what] for result in results]
            bench.case(f"{what} at {rate}/s, 20 ms a call", median(runs), unit, goal=goal, config="1 worker", runs=runs)
