"""One record a second through five stages that are all tasks of their own, on two workers; see README.md."""

from __future__ import annotations

import itertools

import penstock as ps
from benchmarks import pacing
from benchmarks.common import Bench, median, run_job, scratch
from benchmarks.grep_latency import shape
from benchmarks.pacing import Latencies, Pacer
from benchmarks.penstock_parts import LatencySink, Paced

_number = itertools.count()


def same(record: tuple[int, str]) -> tuple[int, str]:
    """A stage that does nothing."""
    return record


def run(bench: Bench) -> None:
    """See the module."""
    rate, count = bench.pick((1, 40), (10, 20))
    texts = [f"record {i}" for i in range(count)]

    def once() -> dict[str, float]:
        with scratch() as out:
            flow = ps.Flow(f"bench-low-rate-{next(_number)}", parallelism=1, chaining=False)
            stream = flow.read(Paced(Pacer(texts, rate, count))).map(same).map(same).map(shape)
            stream.write(LatencySink(Latencies(str(out), count)))
            run_job(flow, workers=2)
            return pacing.collect(out, dict.fromkeys(texts, 1), count, "penstock", skip_s=0.0)

    results = bench.take_turns({"penstock": once})["penstock"]
    for what in ("p50", "p99", "max"):
        runs = [result[what] for result in results]
        bench.case(
            f"{what} at {rate}/s",
            median(runs) if what != "max" else max(runs),
            "ms",
            goal="< 5" if what == "p99" else None,
            config="2 workers, 5 tasks, every edge between the workers",
            note=f"{count} records a run",
            runs=runs,
        )
