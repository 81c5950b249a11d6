"""Where the time of a Yahoo event goes, by operator, in the form of the DO paper's tables (docs/papers.md: D7).

The paper splits the latency of each operator into outside wait / process / wait / schedule / transmission. What can be
split here, and how:

- **process**, records: the CPU of all processes of a job that ends after the operator, an event, minus that of the job
  that ends before it; each job unpaced, on one worker. In Spark operators are compiled into one loop: the whole range
  is one figure, n / PO of its measured fit (Eq. 5).
- **outside wait**: from due to taken up. Records: the age of events when the first chain of operators is through with
  them, minus what it took. Micro-batches: half the interval T for which they gather.
- **wait** and **transmission** of records, in the ring and in the inbox, come as one: the age after the exchange minus
  the age before it and the processing. Within a chain there are none.
- **schedule** and **transmission** of micro-batches come as one: the fixed cost of the fit, t_s + t_ot. Records are not
  scheduled.
- Structured Streaming says itself how long a micro-batch was planned and committed (schedule) and executed (process,
  which has the transmission in it); outside wait is from the due times to the batch's begin.

Medians at 5,000 events a second; "-": there is none; "*": within the figure to its left.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from benchmarks import ysb_job, ysb_stream
from benchmarks.checkpoint_cost import rate_of
from benchmarks.common import Bench, median, print_table, ray_cluster, scratch, wait_until
from benchmarks.ysb_job import CORES, Form
from benchmarks.ysb_load import NS, Load, UpdateSink, quantiles
from penstock.apps import ysb
from penstock.apps.ysb_events import SKEW_MS, Events, EventSource
from penstock.jobs.run import run as start_job

RATE = 5_000
FIRST_CHAIN = ("receive", "parse", "filter", "project+join", "watermark, combine")
AFTER = ("count", "store")
_COLUMNS = ("operator", "outside wait", "process", "wait", "schedule", "transmission")

_number = count()

Parts = dict[str, float]
Table = list[tuple[str, ...]]


def _until(operator: str, folder: Path) -> ps.Flow:
    """The topology up to an operator, and nothing after it."""
    events = Events()
    flow = ps.Flow(f"bench-ysb-until-{next(_number)}")
    stream: Any = flow.read(EventSource(events), name="receive")
    if operator == "receive":
        return _ended(flow, stream)
    stream = stream.select(*ysb.PARSED, name="parse")
    if operator == "parse":
        return _ended(flow, stream)
    stream = stream.filter(ysb.IS_VIEW, name="filter")
    if operator == "filter":
        return _ended(flow, stream)
    stream = stream.select(*ysb.PROJECTED, name="project").lookup(events.campaigns(), on="ad_id", name="join")
    if operator == "project+join":
        return _ended(flow, stream)
    stream = stream.watermark("event_time", out_of_orderness_s=2 * SKEW_MS / 1000)
    counts = stream.key_by("campaign_id").window(ps.Tumbling(ysb.WINDOW_MS / 1000)).count(emit="latest")
    counts.write(ps.sinks.Null() if operator == "count" else UpdateSink(str(folder)))
    return flow


def _ended(flow: ps.Flow, stream: Any) -> ps.Flow:
    stream.write(ps.sinks.Null())
    return flow


def cpu_us(operator: str, seconds: float) -> float:
    """CPU of all processes of the job that ends after this operator, in us an event."""
    ray_cluster()
    with scratch() as folder:
        job = start_job(_until(operator, folder), workers=1, epoch_interval_s=None)
        try:
            wait_until(lambda: job.status().get("records_read", 0) > 100_000, "events flow")
            return rate_of(job, None, seconds).cpu_us
        finally:
            ysb_job.end(job)


def _last(run: ysb_job.Run, load: Load) -> dict[str, Any]:
    """The last status while the load was on."""
    return [sample.status for sample in run.samples if sample.at < load.seconds][-1]


def records(load: Load) -> Parts:
    """Median ages in ms of a job of records."""
    run = ysb_job.play(load, Form(), every_s=1.0)
    operators = _last(run, load)["operators"]
    ages = {name: operators[name]["latency_ms"]["p50"] for name in ("join", "count", "store")}
    return {**ages, "delay": quantiles(run.results.delays()[1])["p50"]}


def operations(load: Load) -> Parts:
    """What a job that runs in Spark altogether says of its micro-batches, in ms."""
    run = ysb_job.play(load, Form(dual="spark-only"), every_s=1.0)
    figures = _last(run, load)["dual"]["ranges"][0]["figures"]
    gathered = RATE * figures["interval_s"]
    return {
        "outside wait": 1e3 * figures["interval_s"] / 2,
        "process": 1e3 * gathered / figures["operation_rate"],
        "schedule, transmission": 1e3 * figures["fixed_s"],
        "delay": quantiles(run.results.delays()[1])["p50"],
    }


def streaming(load: Load) -> Parts:
    """What Structured Streaming says of its micro-batches, in ms."""
    run = ysb_stream.play(load)
    batches = run.batches[len(run.batches) // 4 :]
    seen = list(accumulate((batch.rows for batch in run.batches), initial=0))[-len(batches) - 1 :]
    waits = []
    for (first, upto), batch in zip(pairwise(seen), batches, strict=True):
        due = load.events.due_ns(np.array([(first + upto) // 2])) - load.events.start_ms * 1_000_000
        waits.append(1e3 * (batch.began - int(due[0]) / NS))
    process = [batch.ms["addBatch"] for batch in batches]
    schedule = [batch.ms["triggerExecution"] - batch.ms["addBatch"] for batch in batches]
    return {
        "outside wait": median(waits),
        "process": median(process),
        "schedule": median(schedule),
        "delay": quantiles(run.results.delays()[1])["p50"],
    }


def _ms(value: float) -> str:
    return f"{value:.3g} ms"


def _records_table(costs: Parts, ages: Parts) -> Table:
    took_us = sum(costs[name] for name in FIRST_CHAIN if name in costs)
    between = max(0.0, ages["count"] - ages["join"] - costs["count"] / 1e3)
    rows: Table = []
    for name in ("receive", "parse", "filter", "project+join", "count", "store"):
        outside = _ms(max(0.0, ages["join"] - took_us / 1e3)) if name == "receive" else "-"
        exchange = (_ms(between), "-", "*") if name == "count" else ("-", "-", "-")
        rows.append((name, outside, f"{costs[name]:.2f} us", *exchange))
    return rows


def run(bench: Bench) -> None:
    """See the module."""
    seconds, rounds = bench.pick((3.0, max(1, bench.runs // 2)), (0.5, 1))
    names = ("receive", "parse", "filter", "project+join", "count", "store")
    jobs: dict[str, Callable[[], float]] = {name: partial(cpu_us, name, seconds) for name in names}
    upto = {
        name: median(runs) for name, runs in bench.take_turns(jobs, rounds, "us of CPU an event until here").items()
    }
    costs = {"receive": upto["receive"]} | {b: max(0.0, upto[b] - upto[a]) for a, b in pairwise(names)}
    for name, cost in costs.items():
        bench.case(f"process, {name}, as records", cost, "us an event", config="1 worker, unpaced")
    load = Load(f"{RATE}:{bench.pick(15, 3)}s")
    ages = records(load)
    print_table(f"Penstock, records, {RATE:,}/s: median {_ms(ages['delay'])}", _COLUMNS, _records_table(costs, ages))
    for name in ("join", "count", "store"):
        bench.case(f"age after {name}, as records", ages[name], "ms", config=f"{RATE:,}/s, {Form()}")
    if bench.quick:
        return
    spark, stream = operations(load), streaming(load)
    print_table(
        f"Penstock, everything in Spark, {RATE:,}/s: median {_ms(spark['delay'])}",
        _COLUMNS,
        [
            (
                "receive to count's partials",
                _ms(spark["outside wait"]),
                _ms(spark["process"]),
                "*",
                _ms(spark["schedule, transmission"]),
                "*",
            ),
            ("count, store: as records", "-", *(f"{costs['count'] + costs['store']:.2f} us a row", "-", "-", "-")),
        ],
    )
    print_table(
        f"Structured Streaming, {RATE:,}/s: median {_ms(stream['delay'])}",
        _COLUMNS,
        [("receive to store", _ms(stream["outside wait"]), _ms(stream["process"]), "*", _ms(stream["schedule"]), "*")],
    )
    for who, parts in (("everything in Spark", spark), ("Structured Streaming", stream)):
        for name, value in parts.items():
            bench.case(f"{name}, {who}", value, "ms", config=f"{RATE:,}/s, {CORES} cores of Spark")
