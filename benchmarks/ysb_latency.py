"""The Yahoo benchmark at low rates: what a bridge costs that is ready, and what is gained by not using it.

Four contestants take turns over the same events: Penstock with the bridge on (Spark started ahead, idle beside the
record tasks, the scheduler of the paradigms looking), with the bridge off, with everything in Spark, and Spark
Structured Streaming. In one run the rates follow each other, and the first quarter of each is not counted. Delay: from
an event's due time to the first update of its campaign's and window's count that has it (ysb_load.py has the exact
definition, and what is checked).

Structured Streaming gets the events as files, one every 0.1 s, so 0.05 s of its median are its input's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks import ysb_job, ysb_stream
from benchmarks.common import Bench, median
from benchmarks.ysb_job import CORES, Form
from benchmarks.ysb_load import Load, Results, quantiles

ON, OFF, SPARK, STREAM = "bridge on", "bridge off", "everything in Spark", "Structured Streaming"
FORMS = {ON: Form(dual="on"), OFF: Form(), SPARK: Form(dual="spark-only")}
_WARM_SHARE = 0.25  # of each step, which is not counted
_PAPER = "the paper: its data stream answers 5 times as soon as its operation stream at low rates"
_PAPER_GOAL = ">= 5"

Quantiles = dict[str, float]


def by_rate(results: Results) -> dict[str, Quantiles]:
    """Rate -> p50, p99, max in ms."""
    due, delays = results.delays()
    found: dict[str, Quantiles] = {}
    for begin, end, rate in results.expected.load.times:
        counted = (due >= begin + _WARM_SHARE * (end - begin)) & (due < end)
        found[f"{rate:,.0f}/s"] = quantiles(delays[counted])
    return found


def _case(
    bench: Bench,
    name: str,
    runs: dict[str, list[float]],
    who: str,
    peer: str,
    config: dict[str, str],
    goal: str,
    note: str,
) -> None:
    pairs = [mine / theirs for mine, theirs in zip(runs[who], runs[peer], strict=True)]
    bench.case(
        f"{name}, {who}",
        median(runs[who]),
        "ms",
        peer=peer,
        peer_figure=median(runs[peer]),
        goal=goal,
        config=config[who],
        peer_config=config[peer],
        note=f"ratios of the rounds: {', '.join(f'{pair:.3g}' for pair in pairs)}{note}",
        runs=runs[who],
        peer_runs=runs[peer],
    )


def run(bench: Bench) -> None:
    """See the module."""
    seconds = bench.pick(12, 2)
    load = Load(f"1000:{seconds}s,5000:{seconds}s")

    def job(form: Form) -> dict[str, Quantiles]:
        return by_rate(ysb_job.play(load, form).results)

    def stream() -> dict[str, Quantiles]:
        return by_rate(ysb_stream.play(load).results)

    contestants: dict[str, Callable[[], dict[str, Quantiles]]] = {
        **{who: partial(job, form) for who, form in FORMS.items() if who in bench.pick(FORMS, (ON, OFF))},
        STREAM: stream,
    }
    results = bench.take_turns(contestants, unit="ms")
    config = {**{who: str(form) for who, form in FORMS.items()}, STREAM: f"{CORES} cores, default trigger"}
    for rate in results[ON][0]:
        for what in ("p50", "p99"):
            runs = {who: [result[rate][what] for result in mine] for who, mine in results.items()}
            _case(bench, f"{what} at {rate}", runs, ON, OFF, config, "<= 1.05", "")
            for who in (SPARK, STREAM):
                if who in runs:
                    _case(bench, f"{what} at {rate}", runs, who, ON, config, _PAPER_GOAL, f"; {_PAPER}")
    bench.plot(
        "ysb_latency.png",
        "Yahoo benchmark at low rates",
        {
            f"{who} {what}": [
                (load.times[i][2], median(result[rate][what] for result in mine)) for i, rate in enumerate(mine[0])
            ]
            for who, mine in results.items()
            for what in ("p50", "p99")
        },
        "events/s",
        "ms from due to result",
        log_x=True,
        log_y=True,
    )
