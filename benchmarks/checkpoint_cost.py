"""What epochs cost: the same jobs with an epoch a second and with none, in turns; see README.md.

Throughput with a state of a million keys and with a small one, latency at fixed rates with a million keys, the bytes
and the time of an epoch, the CPU of an idle job.
"""

from __future__ import annotations

import itertools
import os
import pickle
import random
import re
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic_ns
from typing import Any

import penstock as ps
from benchmarks import text
from benchmarks.common import (
    Bench,
    WrongResult,
    cpu_ns,
    job_processes,
    median,
    quantile,
    ray_cluster,
    run_job,
    scratch,
    wait_until,
)
from benchmarks.idle import Silent
from benchmarks.penstock_parts import StampedSink
from benchmarks.stamps import Counts, arrivals
from benchmarks.wordcount_latency import running
from penstock.jobs.job import Job
from penstock.jobs.run import run as start_job
from penstock.runtime.sinks import SinkContext, SinkWriter
from penstock.runtime.sources import Reader, SourceContext, Split

NS = 1_000_000_000
WORKERS = 2
INTERVAL_S = 1.0
_number = itertools.count()


# --- input ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draws:
    """What a source hands out: every one of `keys` once, then keys drawn at random, all alike or, `zipf`, as words are
    (the n-th 1/n as often as the first), as quickly as they are taken or, with a `rate` (of all tasks together),
    (key, due ns) pairs for `seconds` that begin `settle_s` later."""

    keys: int
    rate: int | None = None
    settle_s: float = 0.0
    seconds: float = 0.0
    zipf: bool = False

    @property
    def paced(self) -> int:
        """Records that are due, over all tasks."""
        return 0 if self.rate is None else int(self.rate / WORKERS * self.seconds) * WORKERS


class Keys(ps.sources.Source):
    """Draws in WORKERS tasks."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        self.bounded = draws.rate is not None

    def splits(self, parallelism: int) -> list[Split]:
        return [Split(f"keys {i}", i) for i in range(WORKERS)]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        (split,) = splits
        return _KeysReader(self._draws, split)


class _KeysReader(Reader):
    def __init__(self, draws: Draws, split: Split) -> None:
        self._draws = draws
        self._name = split.name
        keys = [f"key-{i:07d}" for i in range(draws.keys)]
        self._fill = keys[split.payload :: WORKERS]
        weights = list(itertools.accumulate(1 / n for n in range(1, len(keys) + 1))) if draws.zipf else None
        self._pool = random.Random(split.payload).choices(keys, cum_weights=weights, k=2 * draws.keys)
        self._made = 0  # of both parts
        self._start: int | None = None
        self._rate = 0 if draws.rate is None else draws.rate // WORKERS
        self._end = len(self._fill) + draws.paced // WORKERS

    def read(self, limit: int) -> list[Any]:
        made, fill, pool = self._made, self._fill, self._pool
        paced = self._draws.rate is not None
        if made < len(fill):
            keys = fill[made : made + limit]
            self._made += len(keys)
            return list(zip(keys, itertools.repeat(0))) if paced else keys
        at = (made - len(fill)) % len(pool)
        if not paced:
            keys = pool[at : at + limit]
            self._made += len(keys)
            return keys
        now = monotonic_ns()
        if self._start is None:
            self._start = now + int(self._draws.settle_s * NS)
        start, rate, drawn = self._start, self._rate, made - len(fill)
        limit = min(limit, self._end - made, (now - start) * rate // NS + 1 - drawn)
        if limit <= 0:
            return []
        keys = pool[at : at + limit]
        self._made += len(keys)
        self.finished = self._made >= self._end
        self.stamp_ns = start + drawn * NS // rate
        return [(key, start + i * NS // rate) for i, key in enumerate(keys, drawn)]

    def ready_in(self) -> float:
        if self._start is None:
            return 0.0
        due = self._start + (self._made - len(self._fill)) * NS // self._rate
        return max(0, due - monotonic_ns()) / 1e9

    def offsets(self) -> dict[str, Any]:
        return {self._name: self._made}


class Sentences(ps.sources.Source):
    """The same sentences over and over, as quickly as they are taken, in WORKERS tasks."""

    bounded = False

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def splits(self, parallelism: int) -> list[Split]:
        return [Split(f"sentences {i}") for i in range(WORKERS)]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        (split,) = splits
        return _SentencesReader(self._lines, split.name)

    def expected(self, made: list[int]) -> Counter[str]:
        """The counts of the words when the tasks have made so many sentences each."""
        counts: Counter[str] = Counter()
        for n in made:
            whole, rest = divmod(n, len(self._lines))
            for times, lines in ((whole, self._lines), (1, self._lines[:rest])):
                for word, found in text.count_words(lines).items():
                    counts[word] += found * times
        return +counts


class _SentencesReader(Reader):
    def __init__(self, lines: list[str], name: str) -> None:
        self._lines = lines
        self._name = name
        self._made = 0

    def read(self, limit: int) -> list[Any]:
        at = self._made % len(self._lines)
        lines = self._lines[at : at + limit]
        self._made += len(lines)
        return lines

    def offsets(self) -> dict[str, Any]:
        return {self._name: self._made}


# --- output --------------------------------------------------------------------------------------------------------


class Tally(ps.sinks.Sink):
    """Takes (key, count) at the end, and leaves the number of keys and the sum of the counts."""

    def __init__(self, out: str) -> None:
        self._out = out

    def writer(self, context: SinkContext) -> SinkWriter:
        return _TallyWriter(self._out)


class _TallyWriter(SinkWriter):
    def __init__(self, out: str) -> None:
        self._out = out
        self._keys = 0
        self._records = 0

    def write(self, records: list[Any]) -> None:
        self._keys += len(records)
        self._records += sum(count for _, count in records)

    def close(self, failed: bool) -> None:
        Path(self._out, f"tally-{os.getpid()}-{monotonic_ns()}").write_bytes(pickle.dumps((self._keys, self._records)))


class Delays(ps.sinks.Sink):
    """Takes (key, due, count) and leaves due and delay of each whose due time is not 0."""

    def __init__(self, out: str) -> None:
        self._out = out

    def writer(self, context: SinkContext) -> SinkWriter:
        return _DelaysWriter(self._out)


class _DelaysWriter(SinkWriter):
    def __init__(self, out: str) -> None:
        self._out = out
        self._came = 0
        self._due = array("q")
        self._took = array("q")

    def write(self, records: list[Any]) -> None:
        now = monotonic_ns()
        self._came += len(records)
        due = [due for _, due, _ in records if due]
        self._due.extend(due)
        self._took.extend([now - then for then in due])

    def close(self, failed: bool) -> None:
        kept = pickle.dumps((self._came, self._due, self._took))
        Path(self._out, f"delays-{os.getpid()}-{monotonic_ns()}").write_bytes(kept)


def _left(out: Path) -> list[Any]:
    """What the sinks of the job that has just ended have left."""
    paths = sorted(out.iterdir())
    left = [pickle.loads(path.read_bytes()) for path in paths]
    for path in paths:
        path.unlink()
    return left


# --- epochs, watched -----------------------------------------------------------------------------------------------


def note_commands(master: Any) -> None:
    """Runs in the JobMaster: note from now on when the coordinator commands what, and when processes are started and
    ready."""
    notes: list[tuple[str, int | None, int]] = []
    master.notes_of_benchmark = notes
    runner = master._runner

    def decided(command: Any) -> None:
        notes.append((type(command).__name__, getattr(command, "epoch", None), monotonic_ns()))

    def noted(name: str) -> None:
        method = getattr(runner._processes, name)

        def wrapped(*arguments: Any) -> Any:
            notes.append((name, None, monotonic_ns()))
            return method(*arguments)

        setattr(runner._processes, name, wrapped)

    runner._host._decided = decided
    for name in ("_start", "_ready"):
        noted(name)


def notes_of(job: Job) -> list[tuple[str, int | None, int]]:
    """What `note_commands` has noted: command or step, its epoch, monotonic ns."""
    import ray

    notes: list[tuple[str, int | None, int]] = ray.get(
        job._link.handle.__ray_call__.remote(lambda master: list(master.notes_of_benchmark))
    )
    return notes


def watch(job: Job) -> None:
    """Begin to note."""
    import ray

    ray.get(job._link.handle.__ray_call__.remote(note_commands))


@dataclass
class Measured:
    """One run of a job: records a second, CPU us of all its processes a record, and what its epochs took."""

    rate: float
    cpu_us: float
    seconds: list[float] = field(default_factory=list)  # of each epoch, from its beginning until it is complete
    bytes: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        epochs = f", {len(self.seconds)} epochs of {median(self.seconds):.3f} s" if self.seconds else ""
        size = f", {median(self.bytes) / 1e6:,.2f} MB" if self.bytes else ""
        return f"{self.rate:,.0f}, {self.cpu_us:.3f} us of CPU a record{epochs}{size}"


def epoch_bytes(checkpoints: Path) -> dict[int, int]:
    """Epoch -> bytes of its snapshots and manifest that are there."""
    sizes: Counter[int] = Counter()
    for path in checkpoints.glob("*/*/[0-9]*"):
        if "-to-" in path.name:  # snapshots of earlier epochs put together
            continue
        number = re.match(r"\d+", path.name)
        assert number is not None
        try:
            sizes[int(number.group())] += path.stat().st_size
        except FileNotFoundError:  # collected meanwhile
            continue
    return sizes


def rate_of(job: Job, checkpoints: Path | None, seconds: float) -> Measured:
    """The records that a running job reads in the next seconds; what its epochs in that time take."""
    if checkpoints is not None:
        watch(job)
    pids = job_processes(job)
    since, before, used = monotonic_ns(), job.status()["records_read"], sum(map(cpu_ns, pids))
    sizes: dict[int, int] = {}
    while (left := seconds - (monotonic_ns() - since) / 1e9) > 0:
        time.sleep(min(0.4, left))
        if checkpoints is not None:  # manifests are not kept for long
            for epoch, size in epoch_bytes(checkpoints).items():
                sizes[epoch] = max(size, sizes.get(epoch, 0))
    read = job.status()["records_read"] - before
    used = sum(map(cpu_ns, pids)) - used
    measured = Measured(read / ((monotonic_ns() - since) / 1e9), used / 1e3 / max(1, read))
    if checkpoints is not None:
        begun: dict[int, int] = {}
        for what, number, at in notes_of(job):
            if number is None:
                continue
            if what == "Trigger":
                begun[number] = at
            elif what == "Complete" and number in begun:
                measured.seconds.append((at - begun[number]) / 1e9)
                if number in sizes:
                    measured.bytes.append(sizes[number])
    return measured


@contextmanager
def store(kind: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Options of a job: no epochs ("none"), epochs in memory ("epochs") or on a disk ("disk")."""
    if kind == "none":
        yield {"epoch_interval_s": None}
        return
    with TemporaryDirectory(prefix="bench-epochs-", dir="/var/tmp" if kind == "disk" else folder) as checkpoints:
        yield {"epoch_interval_s": INTERVAL_S, "checkpoints": checkpoints}


def _place(options: dict[str, Any]) -> Path | None:
    return Path(options["checkpoints"]) if "checkpoints" in options else None


# --- the jobs ------------------------------------------------------------------------------------------------------


def keyed_throughput(kind: str, keys: int, seconds: float, settle_s: float, *, zipf: bool = False) -> Measured:
    """Random keys, counted, with a count for each key in the state from the start."""
    with scratch() as folder, store(kind, folder) as options:
        out = folder / "out"
        out.mkdir()
        flow = ps.Flow(f"bench-epochs-{next(_number)}", parallelism=WORKERS)
        flow.read(Keys(Draws(keys, zipf=zipf))).key_by(same).count(emit="final").write(Tally(str(out)))
        job = start_job(flow, workers=WORKERS, **options)
        try:
            wait_until(lambda: job.status().get("records_read", 0) >= 2 * keys, "the state is filled", every_s=0.1)
            time.sleep(settle_s)
            measured = rate_of(job, _place(options), seconds)
            job.stop()
            read = job.wait(120, progress=False)["records_read"]
        finally:
            job.cancel()
        left = _left(out)
        found = sum(n for n, _ in left), sum(n for _, n in left)
        if found != (keys, read):
            raise WrongResult(f"{kind}: {found} keys and records counted, not {(keys, read)}")
        return measured


def wordcount(kind: str, source: Sentences, seconds: float, settle_s: float) -> Measured:
    """Sentences split and counted: a small state."""
    with scratch() as folder, store(kind, folder) as options:
        out = folder / "out"
        out.mkdir()
        flow = ps.Flow(f"bench-epochs-{next(_number)}", parallelism=WORKERS)
        words = flow.read(source, name="read").flat_map(str.split).key_by(text.key)
        words.count(emit="latest").write(StampedSink(Counts, str(out)))
        job = start_job(flow, workers=WORKERS, **options)
        try:
            wait_until(lambda: job.status().get("records_written", 0) > 0, "records flow")
            time.sleep(settle_s)
            measured = rate_of(job, _place(options), seconds)
            job.stop()
            status = job.wait(120, progress=False)
        finally:
            job.cancel()
        counts: dict[Any, int] = {}
        for _, part, _ in arrivals(out):
            counts.update(part)
        if counts != source.expected([task["records_in"] for task in status["tasks"] if "read" in task["name"]]):
            raise WrongResult(f"{kind}: the counts are wrong")
        return measured


def delays(kind: str, draws: Draws) -> dict[str, float]:
    """{p50, p99, max} in ms of paced records of random keys, from due to the sink."""
    with scratch() as folder, store(kind, folder) as options:
        out = folder / "out"
        out.mkdir()
        run_job(_delayed(draws, str(out)), workers=WORKERS, **options)
        left = _left(out)
        came = sum(n for n, _, _ in left)
        if came != draws.keys + draws.paced:
            raise WrongResult(f"{kind}: {came} records arrived, not {draws.keys + draws.paced}")
        first = min(min(due) for _, due, _ in left) + int(draws.seconds / 4 * NS)
        kept = [t for _, due, took in left for d, t in zip(due, took, strict=True) if d >= first]
        took = sorted(map(float, kept))
        return {"p50": quantile(took, 0.5) / 1e6, "p99": quantile(took, 0.99) / 1e6, "max": took[-1] / 1e6}


def most(keys: int, seconds: float) -> float:
    """Records a second that the job of `delays` takes when all are due, without epochs."""
    with scratch() as folder:
        job = start_job(
            _delayed(Draws(keys, 100_000_000, 0.0, 100.0), str(folder)), workers=WORKERS, epoch_interval_s=None
        )
        try:
            wait_until(lambda: job.status().get("records_read", 0) >= 1.5 * keys, "the state is filled", every_s=0.1)
            return rate_of(job, None, seconds).rate
        finally:
            job.cancel()
            job.wait(60, progress=False)


def _delayed(draws: Draws, out: str) -> ps.Flow:
    flow = ps.Flow(f"bench-epochs-{next(_number)}", parallelism=WORKERS)
    flow.read(Keys(draws)).key_by(first_of).process(running).write(Delays(out))
    return flow


def same(key: str) -> str:
    """The key of a key."""
    return key


def first_of(pair: tuple[str, int]) -> str:
    """The key of (key, due)."""
    return pair[0]


def idle(kind: str, seconds: float, settle_s: float) -> tuple[float, float]:
    """CPU of the 4 workers and of the JobMaster of a job to which nothing comes, in percent of one core."""
    with scratch() as folder, store(kind, folder) as options:
        flow = ps.Flow(f"bench-epochs-{next(_number)}")
        flow.read(Silent()).rebalance().map(str.upper).key_by(str.lower).count().write(ps.sinks.Null())
        job = start_job(flow, workers=4, **options)
        try:
            wait_until(lambda: job.status().get("records_written", 0) >= 1, "records flow")
            *workers, master = job_processes(job)
            time.sleep(settle_s)
            before, since = [sum(map(cpu_ns, workers)), cpu_ns(master)], monotonic_ns()
            time.sleep(seconds)
            after, took = [sum(map(cpu_ns, workers)), cpu_ns(master)], monotonic_ns() - since
            of_workers, of_master = (100 * (b - a) / took for a, b in zip(before, after, strict=True))
            return of_workers, of_master
        finally:
            job.cancel()
            job.wait(60, progress=False)


# --- the benchmark -------------------------------------------------------------------------------------------------


def run(bench: Bench) -> None:
    """See the module."""
    ray_cluster()
    keys = bench.pick(1_000_000, 50_000)
    seconds, settle_s = bench.pick((10.0, 3.0), (2.0, 1.0))
    kinds = bench.pick(("none", "epochs", "disk"), ("none", "epochs"))
    config = f"{WORKERS} workers, {WORKERS} counting tasks, an epoch every {INTERVAL_S:g} s"
    drawn = ((f"{keys:,} keys", False), (f"{keys:,} keys, drawn as words are", True))
    for name, zipf in bench.pick(drawn, drawn[:1]):
        _throughput(
            bench,
            name,
            {kind: partial(keyed_throughput, kind, keys, seconds, settle_s, zipf=zipf) for kind in kinds},
            config,
        )
    source = Sentences(text.sentences(20_000))
    _throughput(
        bench, "wordcount", {kind: partial(wordcount, kind, source, seconds, settle_s) for kind in kinds}, config
    )
    _latency(bench, keys, config)
    _idle(bench, config)


def _throughput(bench: Bench, name: str, contestants: dict[str, Callable[[], Measured]], config: str) -> None:
    results = bench.take_turns(contestants, unit="records/s")
    without = [result.rate for result in results["none"]]
    for kind, runs in results.items():
        if kind == "none":
            continue
        where = {"epochs": "in /dev/shm", "disk": "on a disk"}[kind]
        rates = [result.rate for result in runs]
        pairs = [with_ / none for with_, none in zip(rates, without, strict=True)]
        bench.case(
            f"throughput, {name}, epochs {where}",
            median(rates),
            "records/s",
            peer="no epochs",
            peer_figure=median(without),
            goal=">= 0.95",
            config=config,
            note=f"ratios of the rounds: {', '.join(f'{pair:.3f}' for pair in pairs)}",
            runs=rates,
            peer_runs=without,
        )
        # What it comes to when the cores are shared with others too: time in which a process waited is not in it.
        bench.case(
            f"CPU a record, {name}, epochs {where}",
            median(result.cpu_us for result in runs),
            "us",
            peer="no epochs",
            peer_figure=median(result.cpu_us for result in results["none"]),
            config=config,
            runs=[result.cpu_us for result in runs],
            peer_runs=[result.cpu_us for result in results["none"]],
        )
        took = [one for result in runs for one in result.seconds]
        sizes = [one / 1e6 for result in runs for one in result.bytes]
        if took:
            note = f"longest {max(took):.3f} s of {len(took)}"
            bench.case(f"an epoch under full load, {name}, {where}", median(took), "s", note=note, runs=took)
        if sizes:
            note = f"largest {max(sizes):.2f} MB"
            bench.case(f"bytes of an epoch, {name}, {where}", median(sizes), "MB", note=note, runs=sizes)


def _latency(bench: Bench, keys: int, config: str) -> None:
    seconds, settle_s = bench.pick((12.0, 4.0), (2.0, 1.0))
    rates = [(f"{20_000:,}/s", 20_000)]
    if not bench.quick:
        rates.append(("half of the most", int(most(keys, 8.0) / 2)))
    for name, rate in rates:
        draws = Draws(keys, rate, settle_s, seconds)
        contestants: dict[str, Callable[[], dict[str, float]]] = {
            kind: partial(delays, kind, draws) for kind in ("none", "epochs")
        }
        results = bench.take_turns(contestants)
        for what in ("p50", "p99"):
            bench.case(
                f"{what} at {name}, {keys:,} keys",
                median(result[what] for result in results["epochs"]),
                "ms",
                peer="no epochs",
                peer_figure=median(result[what] for result in results["none"]),
                goal="<= 2" if what == "p99" else None,
                config=f"{config}; {rate:,} records/s",
                note=f"max {max(r['max'] for r in results['epochs']):.1f} ms, "
                f"without epochs {max(r['max'] for r in results['none']):.1f} ms",
                runs=[result[what] for result in results["epochs"]],
                peer_runs=[result[what] for result in results["none"]],
            )


def _idle(bench: Bench, config: str) -> None:
    seconds, settle_s = bench.pick((30.0, 3.0), (2.0, 0.5))
    contestants: dict[str, Callable[[], tuple[float, float]]] = {
        kind: partial(idle, kind, seconds, settle_s) for kind in ("none", "epochs")
    }
    results = bench.take_turns(contestants, unit="% of a core, workers and JobMaster")
    for i, who in enumerate(("the 4 workers", "the JobMaster")):
        bench.case(
            f"idle job: {who}",
            median(result[i] for result in results["epochs"]),
            "% of a core",
            peer="no epochs",
            peer_figure=median(result[i] for result in results["none"]),
            config=f"4 workers, an epoch every {INTERVAL_S:g} s, over {seconds:g} s",
            runs=[result[i] for result in results["epochs"]],
            peer_runs=[result[i] for result in results["none"]],
        )
