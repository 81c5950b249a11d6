"""What replanning on default settings does to the latency of running jobs: SOL before, while and after its tasks move
(the paper's Fig. 9(e)), and random topologies before and after the plan that was adopted; see README.md.

The jobs are local jobs, whose workers are planned for as those of two nodes, so what crosses nodes costs no more than
what crosses workers. Each record carries the time at which it was made. The latency of a plan is compared with that of
the same plan at another time, because the latencies of one plan differ too.
"""

from __future__ import annotations

import itertools
import os
import random
import struct
import threading
from functools import partial
from pathlib import Path
from time import monotonic_ns
from typing import Any

import penstock as ps
from benchmarks.common import Bench, median, quantile, scratch, wait_until
from benchmarks.placement_latency import SOL_RATE
from penstock.actors.nodes import Nodes
from penstock.actors.placer import Placer
from penstock.actors.run import run as start_job
from penstock.apps import sol
from penstock.placement.groups import Machine
from penstock.placement.options import PlacementOptions

PERIOD_S = 2.0
NODES, WORKERS = 2, 4
TOPOLOGIES = 20
_AFTER_S = 6.0  # for which a plan is measured
_GIVE_UP_PERIODS = 7
_ENTRY = struct.Struct("<qq")
_number = itertools.count()


class Arrivals:
    """A function that writes down when each record has come, and how long it took. Records begin with the time at which
    they were made."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._file = -1
        self._entries = bytearray()

    def __call__(self, record: tuple[int, str]) -> tuple[int, str]:
        now = monotonic_ns()
        if self._file < 0:
            self._file = os.open(f"{self._folder}/{os.getpid()}-{id(self)}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._entries += _ENTRY.pack(now, now - record[0])
        if len(self._entries) >= 20 * _ENTRY.size:
            os.write(self._file, self._entries)
            self._entries.clear()
        return record


def arrivals(folder: Path) -> list[tuple[float, float]]:
    """When each record came (s), and its latency (ms), in the order of time."""
    found: list[tuple[float, float]] = []
    for path in folder.iterdir():
        data = path.read_bytes()
        found += [(at / 1e9, took / 1e6) for at, took in _ENTRY.iter_unpack(data[: len(data) // 16 * 16])]
    return sorted(found)


def between(entries: list[tuple[float, float]], begin: float, end: float) -> list[float]:
    """The latencies of records that came in this time, in order of size."""
    return sorted(took for at, took in entries if begin <= at < end)


class Watch:
    """What a JobMaster does about placement, for a local job, whose workers count as those of two nodes: it looks at
    the job once in each period, and has its tasks moved."""

    def __init__(self, job: Any, period_s: float) -> None:
        self._runner = job._link._runner
        options = PlacementOptions(nodes=NODES, replan_s=period_s)
        nodes = Nodes(options, WORKERS)
        machines = [Machine(str(n), f"n{n}", 8, 8, 1e9, {}, {}, {}) for n in range(NODES)]
        nodes._settle([machines[worker * NODES // WORKERS] for worker in range(WORKERS)])
        self.placer = Placer(options, nodes)
        self._period_s = period_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.moved: float | None = None  # when tasks had moved for the first time

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            plan, placed = self._runner.placed()
            wanted = self.placer.look(plan, placed, self._runner.ask_all("traffic").values())
            if wanted is not None:
                self._runner.better_placed(plan, placed, wanted)
                self._until_placed(wanted)
            if self._over.wait(self._period_s):
                return

    def _until_placed(self, wanted: dict[int, int]) -> None:
        """Waits until tasks are where they are wanted, or for a period: a job may be busy with something else."""
        until = monotonic_ns() / 1e9 + self._period_s
        while not self._over.wait(0.02) and monotonic_ns() / 1e9 < until:
            if self._runner.placed()[1] == wanted:
                self.placer.moved(1)
                if self.moved is None:
                    self.moved = monotonic_ns() / 1e9
                return


def watched(bench: Bench, flow: ps.Flow, folder: Path) -> dict[str, Any]:
    """Runs a flow until some time after its tasks have moved, or until it is clear that they do not: when they moved
    (s; None: never), when it ran, how many moved, and the arrivals."""
    period = bench.pick(PERIOD_S, 0.5)
    job = start_job(flow, workers=WORKERS, local=True, epoch_interval_s=1.0)
    try:
        wait_until(lambda: job.status().get("records_written", 0) > 0, "records flow")
        with Watch(job, period) as watch:
            began = monotonic_ns() / 1e9
            until = began + _GIVE_UP_PERIODS * period
            wait_until(lambda: watch.moved is not None or monotonic_ns() / 1e9 > until, "tasks move")
            end = monotonic_ns() / 1e9 + (1.0 if watch.moved is None else bench.pick(_AFTER_S, 1.0) + 1.0)
            wait_until(lambda: monotonic_ns() / 1e9 > end, "time goes by")
            last = watch.placer.status()["last"]
    finally:
        job.cancel()
        job.wait(60, progress=False)
    return {
        "began": began,
        "moved": watch.moved,
        "last": last,
        "period": period,
        "arrivals": arrivals(folder),
    }


def stamped(message: str, index: int) -> tuple[int, str]:
    """A record that carries its time."""
    return monotonic_ns(), message


def passed(microseconds: float, record: tuple[int, str]) -> tuple[int, str]:
    """Works for so long on a record, and returns it."""
    until = monotonic_ns() + microseconds * 1000
    while monotonic_ns() < until:
        pass
    return record


def random_flow(chance: random.Random, folder: Path) -> ps.Flow:
    """A random job: up to six operators of one to three tasks after a source, each fed by one of the last three."""
    flow = ps.Flow(f"bench-online-{next(_number)}", chaining=False)
    source = ps.sources.Generator(partial(stamped, "x" * chance.randint(20, 500)), chance.choice([300, 600, 1_000]))
    streams = [flow.read(source, name="in", parallelism=1)]
    used = {0: 0}
    for number in range(chance.randint(3, 6)):
        of = chance.randrange(max(0, len(streams) - 3), len(streams))
        used[of] = used.get(of, 0) + 1
        fed = streams[of].shuffle() if chance.random() < 0.7 else streams[of]
        work = partial(passed, chance.uniform(1, 60))
        used[len(streams)] = 0
        streams.append(fed.map(work, name=f"work-{number}", parallelism=chance.randint(1, 3)))
    for number, count in used.items():
        if not count:
            streams[number].map(Arrivals(str(folder)), name=f"seen-{number}", parallelism=1).write(
                ps.sinks.Null(), name=f"out-{number}", parallelism=1
            )
    return flow


def run(bench: Bench) -> None:
    """See the module."""
    _sol(bench)
    _random(bench)


def _sol(bench: Bench) -> None:
    with scratch() as folder:
        flow = ps.Flow(f"bench-online-{next(_number)}")
        stream = flow.read(ps.sources.Generator(partial(stamped, "x" * 100), SOL_RATE), name="spout", parallelism=1)
        for level in range(1, 6):
            stream = stream.shuffle().map(sol.const, name=f"bolt-{level}", parallelism=5)
        stream.map(Arrivals(str(folder)), name="seen").write(ps.sinks.Null(), name="sink", parallelism=5)
        found = watched(bench, flow, folder)
    began, moved, period = found["began"], found["moved"], found["period"]
    config = f"{SOL_RATE:,} records/s, {NODES} nodes, {WORKERS} workers, a period of {period:g} s, default settings"
    series = [
        (second / 2 - began, median(took))
        for second in range(int(2 * began), int(2 * (began + 60)))
        if (took := between(found["arrivals"], second / 2, second / 2 + 0.5))
    ]
    if moved is None:
        bench.say(f"SOL did not move: {found['last']}")
        bench.case("SOL, periods until tasks move", _GIVE_UP_PERIODS, "periods", goal="<= 3", config=config)
        return
    bench.plot(
        "placement_online.png",
        "SOL: latency while tasks move",
        {"p50 of each half second": series},
        "seconds since the first record",
        "ms",
        lines={"tasks have moved": moved - began},
    )
    bench.case(
        "SOL, periods until tasks have moved",
        (moved - began) / period,
        "periods",
        goal="<= 3.5",
        config=config,
        note="since the first record was written",
    )
    for what, begin, end in (
        ("before", began + 1, moved - 1),
        ("while tasks move", moved - 1, moved + 1),
        ("after", moved + 1, moved + 1 + _AFTER_S),
    ):
        took = between(found["arrivals"], begin, end)
        for part, q in (("p50", 0.5), ("p99", 0.99)):
            bench.case(f"SOL, {what}: {part}", quantile(took, q), "ms", config=config, note=f"{len(took):,} records")


def _random(bench: Bench) -> None:
    """A topology whose latency is worse after the move is measured twice more, and its median counts."""
    ratios: list[float] = []
    same: list[float] = []
    count = bench.pick(TOPOLOGIES, 1)
    for seed in range(count):
        found: list[float] = []
        while len(found) < (3 if found and found[0] > 1 else 1):
            ratio = _ratio(bench, seed, same)
            if ratio is None:
                break
            found.append(ratio)
        if found:
            ratios.append(median(found))
            bench.case(f"random topology {seed}: p50 after the plan over p50 before", ratios[-1], "x", runs=found)
    spread = quantile(sorted(max(one, 1 / one) for one in same), 0.9) if same else 1.0
    bench.case(
        "random topologies whose p50 is worse after the plan than the same plan's p50 differs",
        sum(ratio > spread for ratio in ratios),
        "topologies",
        goal="<= 0",
        config=f"{count} topologies, of which {len(ratios)} moved; {NODES} nodes, {WORKERS} workers",
        note=f"the same plan's p50 differs by up to {spread:.2f}x (90 %); after over before: median "
        f"{median(ratios) if ratios else 1.0:.2f}, worst {max(ratios, default=1.0):.2f}",
        runs=ratios,
        peer_runs=same,
    )


def _ratio(bench: Bench, seed: int, same: list[float]) -> float | None:
    """The median latency of a random job after its move over that before; None when its tasks stayed. `same` gets the
    same of two halves of the time of each placement."""
    with scratch() as folder:
        found = watched(bench, random_flow(random.Random(seed), folder), folder)
    began, moved, entries = found["began"], found["moved"], found["arrivals"]
    spans = [(began, entries[-1][0] if moved is None else moved - 0.5)]
    if moved is not None:
        spans.append((moved + 1, moved + 1 + _AFTER_S))
    p50 = []
    for begin, end in spans:
        middle = (begin + end) / 2
        halves = [between(entries, begin, middle), between(entries, middle, end)]
        if not all(halves):
            bench.say(f"topology {seed}: too few records came")
            return None
        same.append(quantile(halves[1], 0.5) / quantile(halves[0], 0.5))
        p50.append(quantile(between(entries, begin, end), 0.5))
    if moved is None:
        bench.say(f"topology {seed}: tasks stay: {found['last']}")
        return None
    bench.say(f"topology {seed}: p50 {p50[0]:.3f} ms, after the plan {p50[1]:.3f} ms ({p50[1] / p50[0]:.2f}x)")
    return p50[1] / p50[0]
