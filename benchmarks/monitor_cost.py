"""What it costs to measure what tasks use and send: WordCount with the monitor and without; see README.md."""

from __future__ import annotations

import itertools

import penstock as ps
from benchmarks import text
from benchmarks.common import Bench, median, run_job, scratch
from benchmarks.placement_latency import NEVER
from benchmarks.throughput import Input
from benchmarks.wordcount_throughput import build
from penstock.placement.options import PlacementOptions

_PERIOD_S = 0.5
_number = itertools.count()


def run(bench: Bench) -> None:
    """See the module."""
    with scratch() as folder:
        lines = text.sentences(bench.pick(2_000_000, 20_000))
        data = Input(folder, text.write_text(folder, lines), len(lines), text.count_words(lines), None)
        del lines

        def wordcount(replan_s: float | None) -> float:
            flow: ps.Flow = build("final")(data, f"bench-monitor-{next(_number)}")
            placement = PlacementOptions(replan_s=replan_s, adoption=NEVER)
            run_job(flow, workers=2, parallelism=2, placement=placement)
            return data.rate("penstock")

        results = bench.take_turns(
            {"watched": lambda: wordcount(_PERIOD_S), "not watched": lambda: wordcount(None)}, unit="sentences/s"
        )
    pairs = [one / other for one, other in zip(results["watched"], results["not watched"], strict=True)]
    bench.case(
        "WordCount, watched",
        median(results["watched"]),
        "sentences/s",
        peer="not watched",
        peer_figure=median(results["not watched"]),
        goal=">= 0.99",
        config=f"2 workers, epochs each second; asked and planned anew every {_PERIOD_S:g} s",
        note="pairs: " + ", ".join(f"{pair:.3f}" for pair in pairs),
        runs=results["watched"],
        peer_runs=results["not watched"],
    )
