"""The campaign of the applications: jobs that are killed, rescaled and moved must give exactly their references.

    python -m tests.apps.campaign --runs 60 --seed 1
    python -m tests.apps.campaign --runs 1 --seed 7 --case q5        one run again
    python -m tests.apps.campaign --runs 25 --spark toggle:1         on Ray, forced to Spark and back

Each run is a job of real worker processes (without Ray) with an application of its own: a Nexmark query, ride-hailing
or the stock exchange. Its records come at a rate, for some seconds. Meanwhile workers are killed, operators get another
number of tasks, and tasks migrate, at instants that the seed chooses. At the end what the job has collected must be the
answer of the reference, which is computed from the same records without Penstock. The exit code is 1 when a run was
wrong, or when fewer runs than asked for were disturbed.

With --spark the jobs run on a Ray of their own, and whatever of them can go to Spark is forced there and back, also
while workers are killed. Most of a job's records come when Spark is ready, and its last ones when Spark has answered.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.apps.nexmark.events import Events
from penstock.apps.nexmark.queries import QUERIES
from penstock.apps.rides.city import Locations, Requests
from penstock.apps.rides.topology import topology as rides
from penstock.apps.stock.orders import Orders, is_valid
from penstock.apps.stock.topology import topology as stock
from penstock.bridge.session import SparkOptions
from penstock.runtime.sources.base import Source
from tests.apps import nexmark_reference, rides_checker, stock_checker
from tests.e2e.switch_campaign import Held, own_cluster

RATE = 800  # records a second
SECONDS = 8.0
FAULTS_A_RUN = 3
LIMIT_S = 600.0
KINDS = ("kill", "kill", "rescale", "migrate")
IN_SPARK_LEAST = 200  # records
CPUS = 8  # of the Ray with Spark


@dataclass
class Case:
    """A job and what must come out of it."""

    flow: ps.Flow
    check: Callable[[], None]


def equal(found: Counter[Any], expected: Counter[Any]) -> None:
    """AssertionError with what is different."""
    assert expected, "these records have no answer, so they show nothing"
    lost, more = list((expected - found).items()), list((found - expected).items())
    assert not [*lost, *more], f"lost {len(lost)}: {lost[:3]}, too much {len(more)}: {more[:3]}"


@dataclass
class Holds:
    """The files for which sources wait: with few records until Spark is ready, and with the last ones until it has
    answered."""

    ready: Path
    answered: Path

    @classmethod
    def in_folder(cls, folder: str) -> Holds:
        return cls(Path(folder, "Spark is ready"), Path(folder, "Spark has answered"))


def paced(fn: Callable[[int], Any], n: int, holds: Holds | None, tasks: int) -> Source[Any]:
    source = ps.sources.Generator(fn, rate=n / SECONDS, limit=n)
    if holds is None:
        return source
    return Held(source, {holds.ready: n // 20 // tasks, holds.answered: n // 4 * 3 // tasks})


def nexmark(query: str, seed: int, holds: Holds | None) -> Case:
    n = int(RATE * SECONDS)
    events = Events(seed=seed % 50, rate=150)
    flow = ps.Flow(f"nexmark-{query}")
    # Two tasks read every other event each, so one may be behind the other by what a failure takes.
    read = flow.read(paced(events, n, holds, 2), name="events", parallelism=2)
    sink = ps.sinks.Collect()
    QUERIES[query](read.watermark("date_time")).write(sink)

    def check() -> None:
        found = nexmark_reference.settled(query, sink.records())
        equal(found, nexmark_reference.answers(query, [events(i) for i in range(n)]))

    return Case(flow, check)


def ride_hailing(seed: int, holds: Holds | None) -> Case:
    drivers, passengers = Locations(seed, drivers=60, every_s=2), Requests(seed + 1, per_s=5)
    n_locations, n_requests = 900, 150
    sink = ps.sinks.Collect()
    located, asked = paced(drivers, n_locations, holds, 1), paced(passengers, n_requests, holds, 1)
    flow = rides(located, asked, sink)

    def check() -> None:
        best = rides_checker.expected(map(drivers, range(n_locations)), map(passengers, range(n_requests)), 1_500.0)
        expected = Counter((name, match and match.driver) for name, match in best.items())
        equal(Counter((name, driver) for name, driver, *_ in sink.records()), expected)

    return Case(flow, check)


def stock_exchange(seed: int, holds: Holds | None) -> Case:
    n = int(RATE * SECONDS)
    orders = Orders(seed, symbols=40, rate=200)
    volumes, best, trades = ps.sinks.Collect(), ps.sinks.Collect(), ps.sinks.Collect()
    flow = stock(paced(orders, n, holds, 1), volumes, best, trades, lifetime_s=10.0)

    def check() -> None:
        expected = stock_checker.expected(filter(is_valid, map(orders, range(n))), 10_000)
        equal(Counter(map(tuple, trades.records())), Counter(map(tuple, expected)))
        right = stock_checker.volumes(expected, 1_000)
        equal(Counter({(symbol, start): amount for symbol, start, _, amount in volumes.records()}), Counter(right))

    return Case(flow, check)


CASES: dict[str, Callable[[int, Holds | None], Case]] = {
    **{query: (lambda seed, holds, query=query: nexmark(query, seed, holds)) for query in QUERIES},  # type: ignore[misc]
    "rides": ride_hailing,
    "stock": stock_exchange,
}


class Disturbance:
    """Does something to a job now and then, for as long as its records come."""

    def __init__(self, job: Any, flow: ps.Flow, rng: random.Random, holds: Holds | None) -> None:
        self._job, self._flow, self._rng, self._holds = job, flow, rng, holds
        self.done: Counter[str] = Counter()
        self._in_spark = 0

    def run(self) -> None:
        """Waits for the job to be under way, and then disturbs it."""
        self._until(lambda status: status["state"] == "RUNNING" and status["records_read"] > 0)
        if self._holds is not None:
            self._until(lambda status: status["dual"]["processes"]["bridge"] is not None)
            self._holds.ready.touch()
        for kind in self._rng.choices(KINDS, k=FAULTS_A_RUN):
            time.sleep(self._rng.uniform(0.2, SECONDS / FAULTS_A_RUN))
            status = self._job.status()
            if status["state"] != "RUNNING":
                return
            with suppress(ps.JobError, ps.FlowError):  # it ends, or is already doing something of the kind
                if getattr(self, f"_{kind}")(status):
                    self.done[kind] += 1
            self._until(lambda status: status["state"] != "RECOVERING" and status["state"] != "STARTING")
        if self._holds is not None:
            self._until(self._has_answered)
            self._holds.answered.touch()

    def _has_answered(self, status: dict[str, Any]) -> bool:
        """Whether Spark has answered, as far as anything can go there. A range counts anew after a restart of the
        JobMaster only."""
        ranges = status["dual"]["ranges"]
        self._in_spark = max(self._in_spark, sum(one["records_in_spark"] for one in ranges))
        if ranges:
            self.done["records in Spark"] = self._in_spark
        return not ranges or self._in_spark >= IN_SPARK_LEAST

    def _until(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition(status := self._job.status()):
            if status["state"] in ("FINISHED", "FAILED", "CANCELLED"):
                return
            assert time.monotonic() < deadline, f"the job is {status['state']} for long"
            time.sleep(0.05)

    def _kill(self, status: dict[str, Any]) -> bool:
        worker = self._rng.choice(status["workers"])
        with suppress(ProcessLookupError):
            os.kill(worker["pid"], signal.SIGKILL)
            return True
        return False

    def _rescale(self, status: dict[str, Any]) -> bool:
        keyed = [name for name, operator in self._flow.graph.operators.items() if operator.keyed]
        if not keyed:
            return False
        self._job.rescale(self._rng.choice(keyed), self._rng.randrange(1, 5))
        return True

    def _migrate(self, status: dict[str, Any]) -> bool:
        task = self._rng.choice(status["tasks"])
        self._job.migrate({task["name"]: 1 - task["worker"]})
        return True


def run_case(name: str, seed: int, spark: str | None = None) -> Counter[str]:
    """One run, with Spark in this mode. Returns what was done to it."""
    rng = random.Random(f"{name} {seed}")
    with (
        tempfile.TemporaryDirectory(prefix="penstock-apps-") as folder,
        tempfile.TemporaryDirectory(prefix="penstock-holds-") as held,
    ):
        holds = None if spark is None else Holds.in_folder(held)
        case = CASES[name](seed, holds)
        where: dict[str, Any] = {"local": True}
        if spark is not None:
            where = {"dual": spark, "spark": SparkOptions(kind="pyspark", cores=2), "max_restarts": 100}
        job: Any = ps.run(
            case.flow, workers=2, checkpoints=folder, epoch_interval_s=rng.choice((0.1, 0.3, 1.0)), **where
        )
        disturbance = Disturbance(job, case.flow, rng, holds)
        try:
            disturbance.run()
            job.wait(timeout_s=LIMIT_S)
        finally:
            if job.state not in ("FINISHED", "CANCELLED", "FAILED"):
                job.cancel()
    case.check()
    return disturbance.done


def chosen(runs: int, seed: int, only: str | None) -> Iterator[tuple[str, int]]:
    """The cases of a campaign: all of them in turn, from a place that the seed decides."""
    names = list(CASES)
    for i in range(runs):
        yield only or names[(seed + i) % len(names)], seed + i


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60, metavar="N", help="how many jobs (60)")
    parser.add_argument("--seed", type=int, default=1, metavar="SEED", help="the first one's (1)")
    parser.add_argument("--case", choices=sorted(CASES), metavar="NAME", help=f"only this one of {', '.join(CASES)}")
    parser.add_argument("--spark", metavar="MODE", help="with Spark in this mode, such as toggle:1 or spark-only")
    options = parser.parse_args()
    if options.spark is None:
        return campaign(options)
    with own_cluster(CPUS):
        return campaign(options)


def campaign(options: argparse.Namespace) -> int:
    """Runs the jobs. Returns the exit code."""
    failed = disturbed = 0
    total: Counter[str] = Counter()
    for name, seed in chosen(options.runs, options.seed, options.case):
        begin = time.monotonic()
        try:
            done = run_case(name, seed, options.spark)
        except Exception:
            failed += 1
            traceback.print_exc()
            print(f"FAILED {name}: python -m tests.apps.campaign --runs 1 --seed {seed} --case {name}", flush=True)
            continue
        total += done
        disturbed += bool(done)
        what = ", ".join(f"{n} {kind}" for kind, n in sorted(done.items())) or "undisturbed"
        print(f"{name}, seed {seed}: exact in {time.monotonic() - begin:.0f} s; {what}", flush=True)
    print(f"{options.runs} runs, {failed} failed, {disturbed} disturbed: {dict(sorted(total.items()))}")
    return int(failed > 0 or 2 * disturbed < options.runs)


if __name__ == "__main__":
    sys.exit(main())
