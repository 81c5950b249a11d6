"""What replanning on default settings does to the latency of running jobs: SOL before, while and after its tasks move
(the paper's Fig. 9(e)), and random topologies in the plan that was adopted and in the placement before it; see
README.md.

SOL runs twice: as a job on two nodes of a simulated Ray cluster, which replans by itself, and as a local job. The other
jobs are local jobs, whose workers are planned for as those of two nodes. What crosses nodes costs no more than what
crosses workers in either. Each record carries the time at which it was made.

When a random job has moved its tasks, it compares how old its records are with how old they were before, and may move
its tasks back. Then they go back and forth between the two placements several times. A plan that stands looks worse
when its median latency was above that of the placement before in every window. By chance alone, one plan in 70
does so that is as good as the placement before, so a plan that looks worse is measured again in a new run of its job,
and counts when it looks worse again.
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
from benchmarks.placement_latency import SOL_RATE, simulated
from penstock.actors.nodes import Nodes
from penstock.apps import sol
from penstock.host.decide.process_commands import GetTraffic
from penstock.jobs.run import run as start_job
from penstock.placement.adoption import AdoptionOptions
from penstock.placement.groups import Machine
from penstock.placement.options import PlacementOptions
from penstock.placement.placer import Placer

PERIOD_S = 2.0
NODES, WORKERS = 2, 4
TOPOLOGIES = 20
_AFTER_S = 6.0  # for which SOL is measured after its tasks have moved
_GIVE_UP_PERIODS = 7
_GIVE_UP_S = 10.0  # at the least
_WINDOWS = 4  # in which each of two placements is measured
_WINDOW_S = 4.0
_SETTLE_S = 1.5  # after tasks have moved
_REST_S = 10.0  # in which half of what is measured belongs to the time before, with such periods
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
    the job once in each period, and has its tasks moved. `rest_s`: how long tasks rest after a move, when the job is to
    be watched until it has compared its records before the move and after it."""

    def __init__(self, job: Any, period_s: float, rest_s: float | None = None) -> None:
        self._runner = job._link._runner
        adoption = AdoptionOptions() if rest_s is None else AdoptionOptions(rest_s=rest_s)
        options = PlacementOptions(nodes=NODES, replan_s=period_s, adoption=adoption)
        nodes = Nodes(options, WORKERS)
        machines = [Machine(str(n), f"n{n}", 8, 8, 1e9, {}, {}, {}) for n in range(NODES)]
        nodes._settle([machines[worker * NODES // WORKERS] for worker in range(WORKERS)])
        self.placer = Placer(options, nodes)
        self._period_s = period_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._compares = rest_s is not None
        self.moved: float | None = None  # when tasks had moved for the first time
        self.outcome: str | None = None  # what the job has found when it compared
        self.back = False  # whether its tasks have moved back then
        self.before: dict[str, int] = {}  # the workers of the tasks that then moved, by name, and those after it
        self.after: dict[str, int] = {}

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            plan, placed = self._runner.placed()
            wanted = self.placer.look(plan, placed, self._runner.ask_all(GetTraffic()).values())
            if wanted is not None:
                self._runner.better_placed(plan, placed, wanted)
                compared = self.moved is not None
                self._until_placed(wanted)
                if compared:
                    self.back = True
                    self.outcome = self.placer.status()["last"]
                    return
                if self.moved is not None:
                    names = {task.number: plan.task_name(task) for task in plan.tasks}
                    self.before = {names[n]: worker for n, worker in placed.items() if worker != wanted[n]}
                    self.after = {names[n]: wanted[n] for n, worker in placed.items() if worker != wanted[n]}
                    if not self._compares:
                        return
            elif self.moved is not None and "records take" in (last := self.placer.status()["last"]):
                self.outcome = last
                return
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


def watched(bench: Bench, flow: ps.Flow, folder: Path, back_and_forth: int = 0) -> dict[str, Any]:
    """Runs a flow until some time after its tasks have moved, or until it is clear that they do not. Returns when they
    moved (s; None: never), when it ran, the arrivals, and the windows in which the tasks were as in the plan and as
    before it, when they go back and forth so many times."""
    period = bench.pick(PERIOD_S, 0.5)
    job = start_job(flow, workers=WORKERS, local=True, epoch_interval_s=1.0)
    windows: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    try:
        wait_until(lambda: job.status().get("records_written", 0) > 0, "records flow")
        rest_s = bench.pick(_REST_S, 1.0) if back_and_forth else None
        with Watch(job, period, rest_s) as watch:
            began = monotonic_ns() / 1e9
            until = began + max(_GIVE_UP_PERIODS * period, _GIVE_UP_S)
            wait_until(lambda: watch.moved is not None or monotonic_ns() / 1e9 > until, "tasks move")
            last = watch.placer.status()["last"]
            if watch.moved is not None and rest_s is not None:
                until = watch.moved + 2 * rest_s + max(_GIVE_UP_PERIODS * period, _GIVE_UP_S)
                wait_until(lambda: watch.outcome is not None or monotonic_ns() / 1e9 > until, "the job has compared")
        # Nothing moves by itself any more.
        if watch.moved is not None and not back_and_forth:
            _passes(bench.pick(_AFTER_S, 1.0) + 1.0)
        for planned in (True, False) * back_and_forth if watch.moved is not None else ():
            job.migrate(watch.after if planned else watch.before)
            _passes(bench.pick(_SETTLE_S, 0.5))
            begin = monotonic_ns() / 1e9
            _passes(bench.pick(_WINDOW_S, 0.5))
            windows[planned].append((begin, monotonic_ns() / 1e9))
        hops = watch.placer.status()["hop_us"]
    finally:
        job.cancel()
        job.wait(60, progress=False)
    return {
        "began": began,
        "moved": watch.moved,
        "back": watch.back,
        "last": last if watch.outcome is None else f"{last}; then {watch.outcome}",
        "period": period,
        "hops": hops,
        "windows": windows,
        "arrivals": arrivals(folder),
    }


def on_ray(bench: Bench, flow: ps.Flow, folder: Path) -> dict[str, Any]:
    """The same for a job on two nodes of a Ray cluster, which replans by itself, and whose tasks do not go back."""
    period = bench.pick(PERIOD_S, 0.5)
    with simulated(NODES, WORKERS // NODES + 1):
        job = start_job(flow, workers=WORKERS, nodes=NODES, replan_s=period, epoch_interval_s=1.0)
        try:
            wait_until(lambda: job.status().get("records_written", 0) > 0, "records flow")
            began = monotonic_ns() / 1e9
            until = began + max(_GIVE_UP_PERIODS * period, _GIVE_UP_S)
            wait_until(
                lambda: job.status()["placement"]["moves"] or monotonic_ns() / 1e9 > until, "tasks move", every_s=0.1
            )
            moved = monotonic_ns() / 1e9 if job.status()["placement"]["moves"] else None
            _passes(bench.pick(_AFTER_S, 1.0) + 1.0)
            placement = job.status()["placement"]
        finally:
            job.cancel()
            job.wait(60, progress=False)
    return {
        "began": began,
        "moved": moved,
        "last": placement["last"],
        "period": period,
        "hops": placement["hop_us"],
        "arrivals": arrivals(folder),
    }


def _passes(seconds: float) -> None:
    """Lets time go by."""
    end = monotonic_ns() / 1e9 + seconds
    wait_until(lambda: monotonic_ns() / 1e9 > end, "time goes by")


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


def sol_flow(folder: Path) -> ps.Flow:
    """SOL, whose records carry their time and are noted when they come."""
    flow = ps.Flow(f"bench-online-{next(_number)}")
    stream = flow.read(ps.sources.Generator(partial(stamped, "x" * 100), SOL_RATE), name="spout", parallelism=1)
    for level in range(1, 6):
        stream = stream.shuffle().map(sol.const, name=f"bolt-{level}", parallelism=5)
    stream.map(Arrivals(str(folder)), name="seen").write(ps.sinks.Null(), name="sink", parallelism=5)
    return flow


def run(bench: Bench) -> None:
    """See the module."""
    for name, how in (("SOL on Ray", on_ray), ("SOL", watched)):
        with scratch() as folder:
            _moving(bench, name, how(bench, sol_flow(folder), folder))
    _random(bench)


def _moving(bench: Bench, name: str, found: dict[str, Any]) -> None:
    """Tells what a job did whose tasks should move: when they did, and the latency before, meanwhile and after."""
    began, moved, period = found["began"], found["moved"], found["period"]
    config = f"{SOL_RATE:,} records/s, {NODES} nodes, {WORKERS} workers, a period of {period:g} s, default settings"
    hops = ", ".join(f"{kind} {us:,.0f} us" for kind, us in found["hops"].items() if us is not None)
    series = [
        (second / 2 - began, median(took))
        for second in range(int(2 * began), int(2 * (began + 60)))
        if (took := between(found["arrivals"], second / 2, second / 2 + 0.5))
    ]
    if moved is None:
        bench.say(f"{name} did not move: {found['last']}")
        periods = f"{name}, periods until tasks have moved"
        bench.case(periods, _GIVE_UP_PERIODS, "periods", goal="<= 3", config=config, note=found["last"])
        return
    bench.plot(
        f"placement_online_{'ray' if name != 'SOL' else 'local'}.png",
        f"{name}: latency while tasks move",
        {"p50 of each half second": series},
        "seconds since the first record",
        "ms",
        lines={"tasks have moved": moved - began},
    )
    bench.case(
        f"{name}, periods until tasks have moved",
        (moved - began) / period,
        "periods",
        goal="<= 3",
        config=config,
        note=f"since the first record was written; hops: {hops}",
    )
    for what, begin, end in (
        ("before", began + bench.pick(1.0, 0.0), moved - 1),
        ("while tasks move", moved - 1, moved + 1),
        ("after", moved + 1, moved + 1 + _AFTER_S),
    ):
        took = between(found["arrivals"], begin, end)
        if not took:
            bench.say(f"{name}, {what}: too few records came")
            continue
        for part, q in (("p50", 0.5), ("p99", 0.99)):
            bench.case(f"{name}, {what}: {part}", quantile(took, q), "ms", config=config, note=f"{len(took):,} records")


def _random(bench: Bench) -> None:
    """The plans that random jobs adopt, each beside the placement before it."""
    ratios: list[float] = []
    worse: list[int] = []
    back: list[int] = []
    count = bench.pick(TOPOLOGIES, 2)
    for seed in range(count):
        found = _beside(bench, seed)
        if found is None:
            continue
        looks_worse, moved_back, ratio, after, before = found
        again = _beside(bench, seed) if looks_worse and not moved_back else None
        if again is not None and again[0] and not again[1]:
            worse.append(seed)
        if moved_back:
            back.append(seed)
        ratios.append(ratio)
        bench.case(
            f"random topology {seed}: p50 in the plan over p50 before",
            ratio,
            "x",
            note="its tasks moved back"
            if moved_back
            else "every window was worse; again: " + ("none moved" if again is None else f"{again[2]:.2f}x, {again[0]}")
            if looks_worse
            else None,
            runs=after,
            peer_runs=before,
        )
    bench.case(
        "random topologies whose p50 is worse in a plan that stands than before it, in every window of two runs",
        len(worse),
        "topologies",
        goal="<= 0",
        config=f"{count} topologies, of which {len(ratios)} moved, and {len(back)} of these back; {NODES} nodes, "
        f"{WORKERS} workers; {bench.pick(_WINDOWS, 2)} windows of {bench.pick(_WINDOW_S, 0.5):g} s of each placement "
        "in turn",
        note=f"p50 in the plan over p50 before: median {median(ratios) if ratios else 1.0:.2f}, worst "
        f"{max(ratios, default=1.0):.2f}; worse: {worse}; moved back: {back}",
        runs=ratios,
    )


def _beside(bench: Bench, seed: int) -> tuple[bool, bool, float, list[float], list[float]] | None:
    """Whether the plan of a random job looks worse than the placement before it, whether the job has moved its tasks
    back, the ratio of the medians of the windows in both, and the p50 of each window in ms; None when its tasks
    stay."""
    with scratch() as folder:
        found = watched(bench, random_flow(random.Random(seed), folder), folder, bench.pick(_WINDOWS, 2))
    if found["moved"] is None:
        bench.say(f"topology {seed}: tasks stay: {found['last']}")
        return None
    p50: dict[bool, list[float]] = {}
    for planned, windows in found["windows"].items():
        took = [between(found["arrivals"], *window) for window in windows]
        if not all(took):
            bench.say(f"topology {seed}: too few records came")
            return None
        p50[planned] = [quantile(each, 0.5) for each in took]
    after, before = p50[True], p50[False]
    ratio = median(after) / median(before)
    shown = ["/".join(f"{each:.2f}" for each in placement) for placement in (before, after)]
    bench.say(f"topology {seed}: p50 before {shown[0]} ms, in the plan {shown[1]} ms ({ratio:.2f}x); {found['last']}")
    return min(after) > max(before), found["back"], ratio, after, before
