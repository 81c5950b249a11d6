"""Linear Road: how many expressways get all their answers within five seconds? See README.md.

The benchmark's run takes three hours, and its rate rises nearly all the time. Here the last minute of its highest rate
is run, at the speed of the clock, for more and more expressways: until the first answer comes too late. The generator
simulates what was before without giving it, so that the job knows nothing of earlier tolls and speeds. It runs on the
same cores.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

from benchmarks.common import Bench, print_table, quantile
from penstock.apps.few import Few
from penstock.apps.linear_road.app import LIMIT_S, UNKNOWN, Delays, Histogram
from penstock.apps.linear_road.source import TrafficSource
from penstock.apps.linear_road.topology import topology
from penstock.apps.linear_road.traffic import DURATION_S, History, Traffic
from penstock.jobs.run import run as start_job
from penstock.runtime.sinks import Collect
from penstock.runtime.sources import Split

WORKERS = 2
_SECONDS = 60
_SIMULATED_S = 4.0  # to simulate what was before, for each expressway of a worker
_MOST = 128  # expressways
_number = itertools.count()


class LateTraffic(TrafficSource):
    """Gives the traffic from a second on."""

    def __init__(self, traffic: Traffic, first: int, start_ms: float) -> None:
        super().__init__(traffic, speed=1.0, start_ms=start_ms)
        self._first = first

    def splits(self, parallelism: int) -> list[Split]:
        return [Split(split.name, split.payload, (self._first, 0)) for split in super().splits(parallelism)]


@dataclass(frozen=True)
class Run:
    """What came of a run of so many expressways."""

    xways: int
    rate: float  # records a second
    answers: int
    p50_ms: int
    p99_ms: int
    max_ms: int
    late: int

    def row(self) -> tuple[str, ...]:
        """Returns the run as a row of a table."""
        return (
            f"{self.xways}",
            f"{self.rate:,.0f}",
            f"{self.answers:,}",
            *(f"{ms:,}" for ms in (self.p50_ms, self.p99_ms, self.max_ms)),
            f"{self.late:,}",
        )


def once(xways: int, seconds: int, first: int) -> Run:
    """Runs so many expressways for so many seconds, from a second of the traffic on."""
    traffic = Traffic(0, xways=xways, seconds=first + seconds)
    lead_s = 10.0 + _SIMULATED_S * first / DURATION_S * -(-xways // WORKERS)
    start_ms = (time.time() + lead_s - first) * 1000
    counted = Collect()
    flow = topology(
        LateTraffic(traffic, first, start_ms),
        Few(Collect()),
        History(0),
        stamp=Histogram(Delays(1.0, start_ms), counted),
        name=f"bench-linear-road-{next(_number)}",
    )
    flow.parallelism = WORKERS
    job = start_job(flow, workers=WORKERS, local=True, epoch_interval_s=1.0)
    job.wait(lead_s + seconds + 300, progress=False)
    delays: list[int] = []
    for (_, delay_ms, _), number in counted.records():
        assert delay_ms != UNKNOWN
        delays += [delay_ms] * number
    delays.sort()
    read = job.status()["records_read"]
    late = sum(delay > LIMIT_S * 1000 for delay in delays)
    shown = (quantile(delays, 0.5), quantile(delays, 0.99), delays[-1])
    return Run(xways, read / seconds, len(delays), *map(int, shown), late)


def run(bench: Bench) -> None:
    """See the module."""
    seconds = bench.pick(_SECONDS, 5)
    first = bench.pick(DURATION_S - 600, 600) - seconds
    runs: list[Run] = []

    def in_time(xways: int) -> bool:
        runs.append(once(xways, seconds, first))
        bench.say(
            "{} expressways, {} records/s: {} answers, p50 {} ms, p99 {} ms, max {} ms, late {}".format(*runs[-1].row())
        )
        return runs[-1].late == 0

    good, bad = 0, bench.pick(_MOST, 3) + 1
    xways = bench.pick(8, 1)
    while bad - good > max(1, good // 8):
        if in_time(xways):
            good = xways
        else:
            bad = xways
        xways = min(2 * good, (good + bad) // 2) if bad > _MOST else (good + bad) // 2
        xways = max(xways, good + 1)
    best = max((one for one in runs if not one.late), key=lambda one: one.xways, default=None)
    bench.case(
        "the most expressways of which all answers come within 5 s",
        0.0 if best is None else best.xways,
        "expressways",
        config=f"{WORKERS} workers, local, epochs each second, {seconds} s from second {first:,} on",
        note=None if best is None else f"{best.rate:,.0f} records/s, p99 {best.p99_ms:,} ms, max {best.max_ms:,} ms",
    )
    columns = ("expressways", "records/s", "answers", "p50 ms", "p99 ms", "max ms", "later than 5 s")
    print_table(
        "Linear Road, delay of answers", columns, [one.row() for one in sorted(runs, key=lambda one: one.xways)]
    )
