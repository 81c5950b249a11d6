"""From the SIGKILL of one worker of four until its job runs, and runs at full rate, again; see README.md.

A fresh job for every kill: the coordinator makes the restarts of one job wait longer and longer. Records are due by an
absolute schedule, which survives the kill with the sources' offsets, so what a recovery delays shows in the latency of
the records after it until the job has caught up.
"""

from __future__ import annotations

import itertools
import os
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median as middle
from time import monotonic_ns
from typing import Any

import penstock as ps
from benchmarks import pacing, text
from benchmarks.checkpoint_cost import notes_of, watch
from benchmarks.common import Bench, median, quantile, ray_cluster, scratch, wait_until
from benchmarks.wordcount_latency import running
from penstock.jobs.job import Job
from penstock.jobs.run import run as start_job
from penstock.runtime.sinks import SinkContext, SinkWriter
from penstock.runtime.sources import Reader, SourceContext, Split

NS = 1_000_000_000
WORKERS = 4
RATE = 20_000  # sentences a second, over all sources
WORDS = 2  # a sentence
_BIN_NS = 100_000_000
_STEADY_BINS = 5  # so long the delays must be as before to say that they are so again
_PATIENCE_S = 60.0  # for the delays to be as before, which takes longer on a machine that does other work
_LEAST_MS = 5.0  # below this a delay counts as usual: the machine does other work too
_SHARE = 0.99  # of the delays: when a task catches up, its batches are few among those of the others
_GAP_NS = 2_000_000  # the sources note when they were not asked for longer than this
_PAIR = struct.Struct("<qq")  # ns: when a batch came and its median delay; when a read came and how long after the last
_number = itertools.count()


class Scheduled(ps.sources.Source):
    """(due ns, text) records by an absolute schedule, which the offsets carry over a recovery. Its readers append to
    a file, a process each: when a read came late, and by how much."""

    bounded = False

    def __init__(self, texts: list[str], rate: int, out: str) -> None:
        self._out = out
        self._texts = texts
        self._rate = rate  # of each task

    def splits(self, parallelism: int) -> list[Split]:
        return [Split(f"schedule {i}") for i in range(parallelism)]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        (split,) = splits
        return _ScheduledReader(self._texts, self._rate, split, f"{self._out}/{os.getpid()}")


class _ScheduledReader(Reader):
    def __init__(self, texts: list[str], rate: int, split: Split, path: str) -> None:
        self._texts = texts
        self._rate = rate
        self._name = split.name
        self._start: int
        self._made: int
        self._read = monotonic_ns()
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - whoever kills the process keeps what was written
        self._start, self._made = split.offset or (monotonic_ns() + NS // 10, 0)

    def read(self, limit: int) -> list[Any]:
        start, rate, made, texts = self._start, self._rate, self._made, self._texts
        now = monotonic_ns()
        if now - self._read > _GAP_NS:
            self._file.write(_PAIR.pack(now, now - self._read))
        self._read = now
        until = min(made + limit, (now - start) * rate // NS + 1)
        if until <= made:
            return []
        self._made = until
        n = len(texts)
        records = [(start + i * NS // rate, texts[i % n]) for i in range(made, until)]
        self.stamp_ns = records[0][0]
        return records

    def ready_in(self) -> float:
        return max(0, self._start + self._made * NS // self._rate - monotonic_ns()) / 1e9

    def offsets(self) -> dict[str, Any]:
        return {self._name: (self._start, self._made)}

    def close(self) -> None:
        self._file.close()


class Delays(ps.sinks.Sink):
    """Takes (word, due ns, count) and appends to a file, a process each: when a batch came and its median delay."""

    def __init__(self, out: str) -> None:
        self._out = out

    def writer(self, context: SinkContext) -> SinkWriter:
        return _DelaysWriter(f"{self._out}/{context.index}-{os.getpid()}-{monotonic_ns()}")


class _DelaysWriter(SinkWriter):
    def __init__(self, path: str) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - whoever kills the process keeps what was written

    def write(self, records: list[Any]) -> None:
        now = monotonic_ns()
        self._file.write(_PAIR.pack(now, now - int(middle(due for _, due, _ in records))))

    def close(self, failed: bool) -> None:
        self._file.close()


@dataclass
class Recovery:
    """What one kill came to, in seconds; `phases` follow each other from the kill on."""

    running: float  # until the job is told to continue
    full: float  # until records come with the delays that they had before, of at most twice that
    pause: float  # longest between two reads of a source task that is not downstream of the killed worker
    quiet: float  # the same, of the same tasks, before the kill
    phases: dict[str, float]
    delays: list[tuple[float, float]] = field(default_factory=list)  # (s since the kill, ms), p99 of 0.1 s

    def __str__(self) -> str:
        return (
            f"running {self.running:.2f}, full rate {self.full:.2f}, others' sources paused {self.pause:.3f} "
            f"(before the kill {self.quiet:.3f}); "
            + ", ".join(f"{name} {took:.3f}" for name, took in self.phases.items())
        )


def once(number: int, settle_s: float, after_s: float) -> Recovery:
    """Start a job, kill one of its workers, see what follows."""
    with scratch() as folder:
        out, reads = folder / "out", folder / "reads"
        out.mkdir()
        reads.mkdir()
        texts = [" ".join(line.split()[:WORDS]) for line in text.sentences(2_000)]
        flow = ps.Flow(f"bench-recovery-{next(_number)}", parallelism=WORKERS)
        words = flow.read(Scheduled(texts, RATE // WORKERS, str(reads))).flat_map(pacing.split)
        words.key_by(pacing.word_of).process(running).write(Delays(str(out)))
        job = start_job(flow, workers=WORKERS, checkpoints=folder / "epochs")
        try:
            wait_until(lambda: job.status().get("epochs", {}).get("complete", 0) >= 2, "epochs complete")
            wait_until(lambda: job.status()["spares"], "a spare process is ready")
            watch(job)
            pids = [worker["pid"] for worker in job.status()["workers"]]
            victim = pids.pop(number % WORKERS)
            time.sleep(settle_s)
            killed = monotonic_ns()
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda: _runs_again(job), "the job runs again", every_s=0.2)
            time.sleep(after_s)
            phases = _phases(notes_of(job), killed)
            took = sum(phases.values())
            found: list[Any] = []

            def is_as_before() -> bool:
                found[:] = _as_before(out, killed, settle_s, took)
                return found[1] is not None

            wait_until(is_as_before, "the delays are as they were before the kill", _PATIENCE_S, 0.5)
            if job.status()["epochs"]["restarts"] != 1:
                raise AssertionError(f"one kill, and {job.status()['epochs']}")
        finally:
            job.cancel()
            job.wait(60, progress=False)
        # A source task has nothing before it, so the source tasks of the other workers are downstream of nothing that
        # is lost.
        gaps = [gap for pid in pids for gap in _pairs(reads / str(pid))]
        delays, full = found
    end = killed + int((took + after_s) * NS)
    pause = max((gap for at, gap in gaps if killed <= at - gap < end or killed <= at < end), default=_GAP_NS)
    quiet = max((gap for at, gap in gaps if killed - settle_s * NS <= at - gap and at < killed), default=_GAP_NS)
    return Recovery(took, full, pause / NS, quiet / NS, phases, delays)


def _as_before(
    out: Path, killed: int, settle_s: float, running_s: float
) -> tuple[list[tuple[float, float]], float | None]:
    """The delays, and when they were as before the kill again; None when they are not yet."""
    delays = _delays(out, killed)
    before = median(took for at, took in delays if -settle_s <= at < 0)
    return delays, _steady(delays, max(2 * before, _LEAST_MS), running_s)


def _runs_again(job: Job) -> bool:
    status = job.status()
    return bool(status["state"] == "RUNNING" and status["epochs"]["restarts"])


def _steady(delays: list[tuple[float, float]], most_ms: float, running_s: float) -> float | None:
    """When, in seconds since the kill, records come all the time again and their delays are not above the limit. That
    is not before the job runs again: until then the records that are missing have no delay."""
    good = {round(at * NS / _BIN_NS) for at, took in delays if took <= most_ms}
    for number in sorted(good):
        if (number + 1) * _BIN_NS > running_s * NS and all(number + i in good for i in range(_STEADY_BINS)):
            return max(running_s, number * _BIN_NS / NS)
    return None


def _phases(notes: list[tuple[str, int | None, int]], killed: int) -> dict[str, float]:
    """The steps between the kill and the command to continue, in seconds."""
    names = {
        "RemoveTasks": "detected",
        "_start": "tasks removed",
        "_ready": "process connected",
        "BuildTasks": "building commanded",
        "ConnectTasks": "tasks built",
    }
    phases: dict[str, float] = {}
    last = killed
    for what, _, at in notes:
        if at >= killed and what in names and names[what] not in phases:
            phases[names[what]] = (at - last) / NS
            last = at
    if len(phases) != len(names):
        raise AssertionError(f"no whole recovery: {phases}")
    return phases


def _pairs(path: Path) -> list[tuple[int, int]]:
    """What a process appended."""
    data = path.read_bytes()
    return list(_PAIR.iter_unpack(data[: len(data) // _PAIR.size * _PAIR.size]))


def _delays(out: Path, killed: int) -> list[tuple[float, float]]:
    """(s since the kill, p99 in ms of what came in 0.1 s), of all sinks."""
    bins: dict[int, list[int]] = {}
    for path in out.iterdir():
        for at, took in _pairs(path):
            bins.setdefault((at - killed) // _BIN_NS, []).append(took)
    return [(number * _BIN_NS / NS, quantile(sorted(took), _SHARE) / 1e6) for number, took in sorted(bins.items())]


def run(bench: Bench) -> None:
    """See the module."""
    ray_cluster()
    kills = itertools.count()
    settle_s, after_s = bench.pick((2.0, 4.0), (1.0, 3.0))
    rounds = bench.pick(3 * bench.runs, 2)
    contestants: dict[str, Callable[[], Recovery]] = {"kill": lambda: once(next(kills), settle_s, after_s)}
    results = bench.take_turns(contestants, runs=rounds)["kill"]
    config = f"{WORKERS} workers, {RATE:,} sentences of {WORDS} words a second, an epoch a second in /dev/shm"
    figures: dict[str, list[float]] = {
        "SIGKILL to running": [result.running for result in results],
        "SIGKILL to full rate": [result.full for result in results],
        "pause of sources that stay": [result.pause for result in results],
    }
    for name, runs in figures.items():
        note = None
        if name.startswith("pause"):
            usual = median(result.quiet for result in results)
            note = f"before the kill {usual:.3f} s in {settle_s:g} s; gaps of {_GAP_NS / 1e6:g} ms and more are noted"
        goal = "< 2" if name == "SIGKILL to running" else None
        bench.case(f"{name}, median", median(runs), "s", goal=goal, config=config, note=note, runs=runs)
        bench.case(f"{name}, p99", quantile(sorted(runs), 0.99), "s", config=config, note=note, runs=runs)
    for phase in results[0].phases:
        runs = [result.phases[phase] for result in results]
        bench.case(f"of it until {phase}", median(runs), "s", config=config, runs=runs)
    typical = sorted(results, key=lambda result: result.full)[len(results) // 2]
    bench.plot(
        "recovery_time.png",
        f"SIGKILL of one worker of {WORKERS} at {RATE:,}/s",
        {"delay, p99": [(at, took) for at, took in typical.delays if -2 <= at <= after_s]},
        "s since the kill",
        "ms",
        log_y=True,
        lines={"running": typical.running, "full rate": typical.full},
    )
