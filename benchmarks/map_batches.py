"""map_batches whose call takes 20 ms whatever it is given: does it keep up, and what do calls get? See README.md."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import penstock as ps
from benchmarks import pacing
from benchmarks.common import Bench, median, run_job, scratch
from benchmarks.grep_latency import shape
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
