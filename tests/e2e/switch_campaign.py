"""The switch campaign: jobs that go to Spark and back every few seconds while processes are killed must be exact.

    python -m tests.e2e.switch_campaign --runs 50 --seed 1
    python -m tests.e2e.switch_campaign --runs 1 --seed 7 --flow windows --mode toggle:1 --kinds bridge,worker

Each run has a seed of its own, from which flow, mode, faults and instants follow. Processes are killed at random
instants while the job runs, so also in the middle of a switch: a Spark "executor", the "bridge" that holds the session,
a "worker", or the JobMaster ("master"). As in the kill campaign (tests/e2e/kill_campaign.py) a worker or the JobMaster
is paused for 1 to 30 s, and in half of these cases one is killed meanwhile ("pause"); or one file of the store is
harmed, and then a worker or the JobMaster is killed ("file"). Only processes of this very job are killed and paused, by
their ids. The job must finish, and its output must be that of a plain loop over the same records. When something is
wrong, the command that replays the run is printed, and the exit code is 1.

The flows `burst-socket`, `burst-inside` and `burst-slow` are jobs with bursts (tests/e2e/bursts.py), which go to Spark
by their queue alone (K by hand), and come back when a burst is over. A socket cannot be read again, so neither a worker
nor the JobMaster is killed there.

A run counts only if records went to Spark in it, and if as many processes were killed as were to be; a pause in which
nobody is killed comes on top. So that this does not depend on how busy the machine is, the input waits for it: most of
it until Spark is ready, and its end until the kills are done and Spark has answered records. Until then records
trickle, so that there are some whenever a range is in Spark, even if only for a moment. The campaign continues until so
many runs have counted, says how many did not, and why, and fails when too many did not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import penstock as ps
from penstock.bridge.session import SparkOptions
from penstock.runtime.sources.base import Reader, Source, SourceContext, Split
from tests.e2e import bursts, store_damage
from tests.e2e.kill_campaign import Process, ThisMachine, master_process, pause_and_kill
from tests.e2e.processes import alive

RATE = 8_000.0
LIMIT_S = 600.0
OF_SPARK = ("executor", "bridge")
KINDS = (*OF_SPARK, "worker", "master", "pause", "file")
HOLD_LOOK_S = 0.05  # how often a reader looks whether it may continue
TRICKLE = 5  # records that a reader hands out at such a look while it waits for the kills
IN_SPARK_LEAST = 200  # records that Spark is to answer before the end of the input is let go
MODES = ("toggle:1", "toggle:3", "spark-only")
WORDS = ["be", "To", "or", "not", "that", "is", "the", "Question"]
CAMPAIGNS = [{"ad": f"ad{i}", "campaign": f"c{i // 10}"} for i in range(100)]
BASE_MS = 1_700_000_000_000


def draw(index: int) -> random.Random:
    """Chance that belongs to a record's number."""
    return random.Random(index * 2_654_435_761)


def text_line(index: int) -> str:
    return " ".join(draw(index).choices(WORDS, k=6))


def event_line(index: int) -> str:
    chance = draw(index)
    kind = chance.choice(["view", "click", "purchase"])
    time_ms = BASE_MS + index // 8 + chance.randrange(-50, 51)
    return f'{{"ad": "ad{chance.randrange(110)}", "kind": "{kind}", "time": "{time_ms}"}}'


def has_question(line: str) -> bool:
    return "Question" in line


@dataclass
class Case:
    """A flow over numbered lines, and what must come of the first n."""

    line: Callable[[int], str]
    build: Callable[[Any, Any], Any]  # (lines, sink): adds the flow's operators
    expected: Callable[[int], Any]
    found: Callable[[list[Any]], Any]


def words(lines: Any, sink: Any) -> None:
    counts = lines.flat_map(str.split, name="words").key_by(str.lower).count(emit="final", name="count")
    counts.write(sink, name="out")


def grep(lines: Any, sink: Any) -> None:
    lines.filter(has_question, name="grep").write(sink, name="out")


def fork(lines: Any, sink: Any) -> None:
    """A range of three chains: its parts go to Spark and back together."""
    lower = lines.map(str.lower, name="lower")
    few = lower.filter(begins_well, name="few").key_by(len).count(emit="final", name="lengths")
    many = lower.flat_map(str.split, name="many").key_by(str.strip).count(emit="final", name="words")
    few.union(many).write(sink, name="out")


def begins_well(line: str) -> bool:
    return line.startswith("be")


def count_fork(n: int) -> dict[int | str, int]:
    counts: Counter[int | str] = Counter()
    for line in map(str.lower, map(text_line, range(n))):
        counts.update(line.split())
        if begins_well(line):
            counts[len(line)] += 1
    return dict(counts)


def windows(lines: Any, sink: Any) -> None:
    value = ps.col("value")
    fields = {name: value.json(name) for name in ("ad", "kind")}
    events = lines.select(**fields, time=value.json("time").cast("bigint"), name="parse")
    views = events.filter(ps.col("kind") == "view", name="views").select("ad", "time", name="project")
    joined = views.lookup(CAMPAIGNS, on="ad", name="join").watermark("time", out_of_orderness_s=0.1, name="times")
    counts = joined.key_by("campaign").window(ps.Tumbling(0.5), lateness_s=600).count(name="count")
    counts.write(sink, name="out")


def count_windows(n: int) -> dict[tuple[str, int], int]:
    counts: Counter[tuple[str, int]] = Counter()
    campaigns = {row["ad"]: row["campaign"] for row in CAMPAIGNS}
    for index in range(n):
        event = json.loads(event_line(index))
        if event["kind"] == "view" and event["ad"] in campaigns:
            counts[campaigns[event["ad"]], int(event["time"]) // 500 * 500] += 1
    return dict(counts)


CASES: dict[str, Case] = {
    "words": Case(
        text_line,
        words,
        lambda n: dict(Counter(word.lower() for index in range(n) for word in text_line(index).split())),
        dict,
    ),
    "grep": Case(
        text_line,
        grep,
        lambda n: Counter(line for index in range(n) if has_question(line := text_line(index))),
        Counter,
    ),
    "fork": Case(text_line, fork, count_fork, dict),
    "windows": Case(
        event_line,
        windows,
        count_windows,
        lambda records: {(key, start): count for key, start, _, count in records},
    ),
}


BURSTS = tuple(f"burst-{kind}" for kind in bursts.KINDS)
SOCKET = "burst-socket"  # its input cannot be read again
FLOWS = (*sorted(CASES), *BURSTS)
PAPER = "on,k=0.2"  # to Spark whether it pays or not


class Held(Source):
    """A Generator of which a reader hands out no more than so many records for each of its splits, all splits together,
    as long as a file is not there; for each of several files. A file that was there stays. When only the last of the
    files is missing, TRICKLE records pass every HOLD_LOOK_S."""

    def __init__(
        self,
        generator: ps.sources.Generator,
        holds: dict[Path, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.generator = generator
        self.holds = holds
        self.clock = clock
        self.bounded = generator.bounded

    def splits(self, parallelism: int) -> list[Split]:
        return self.generator.splits(parallelism)

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        holds = {path: most * len(splits) for path, most in self.holds.items()}
        return _HeldReader(self.generator.reader(splits, context), holds, self.clock)


class _HeldReader(Reader):
    def __init__(self, reader: Reader, holds: dict[Path, int], clock: Callable[[], float]) -> None:
        self._reader = reader
        self._last = list(holds)[-1]
        self._holds = holds
        self._clock = clock
        self._trickles_at = 0.0  # not before
        self._held = False

    def read(self, limit: int) -> list[Any]:
        self._holds = {path: most for path, most in self._holds.items() if not path.exists()}
        made = sum(self._reader.offsets().values())  # of a Generator: how many there were
        left = min([limit, *(most - made for most in self._holds.values())])
        if left <= 0 and list(self._holds) == [self._last] and self._clock() >= self._trickles_at:
            left, self._trickles_at = min(limit, TRICKLE), self._clock() + HOLD_LOOK_S
        self._held = left <= 0 and not self._reader.finished
        records = [] if left <= 0 else self._reader.read(left)
        self.stamp_ns = self._reader.stamp_ns if records else None
        self.finished = self._reader.finished
        return records

    def offsets(self) -> dict[str, Any]:
        return self._reader.offsets()

    def ready_in(self) -> float | None:
        return HOLD_LOOK_S if self._held else self._reader.ready_in()

    def backlog(self) -> int:
        return 0 if self._held else self._reader.backlog()

    def close(self) -> None:
        self._reader.close()


@dataclass
class Run:
    """What a run did."""

    flow: str
    mode: str
    kills: list[str] = field(default_factory=list)  # one for each process
    pauses: list[str] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)  # to the store
    switches: int = 0  # seen in the status
    in_spark: int = 0
    seconds: float = 0.0

    def note(self, status: dict[str, Any]) -> None:
        """Take from a job's status what has gone to Spark so far."""
        ranges = (status.get("dual") or {"ranges": []})["ranges"]
        self.in_spark = max(self.in_spark, sum(one["records_in_spark"] for one in ranges))

    def missed(self, kills: int) -> str | None:
        """Why the run does not count, when so many processes were to be killed; None: it does."""
        if self.mode != "off" and not self.in_spark:
            return "no record went to Spark"
        if len(self.kills) < kills:
            return f"{len(self.kills)} of {kills} processes were killed"
        return None


@dataclass
class Tally:
    """What came of the runs of a campaign."""

    wanted: int
    counted: list[Run] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)  # why each of the others did not count
    failed: list[str] = field(default_factory=list)

    @property
    def tries(self) -> int:
        return len(self.counted) + len(self.missed) + len(self.failed)

    @property
    def tries_max(self) -> int:
        """More runs than these are not begun."""
        return self.wanted + max(2, self.wanted // 4)

    def over(self, under_way: int = 0) -> bool:
        """Whether no more runs are begun while so many are under way."""
        done = len(self.counted) + len(self.failed) + under_way
        return done >= self.wanted or self.tries + under_way >= self.tries_max

    @property
    def good(self) -> bool:
        """All that were wanted did what they are for, and were exact."""
        return len(self.counted) >= self.wanted and not self.failed

    def summary(self) -> str:
        kills = Counter(kill.split()[0] for run in self.counted for kill in run.kills)
        why = ", ".join(f"{reason} ({times})" for reason, times in Counter(self.missed).items())
        not_counted = f"{len(self.missed)} did not count{f': {why}' if why else ''}"
        switches = sum(run.switches for run in self.counted)
        return (
            f"{len(self.counted)} of {self.wanted} runs counted, {len(self.failed)} failed, {not_counted}; "
            f"{switches} times to Spark; {kills.total()} processes killed: {dict(kills)}; "
            f"{sum(len(run.pauses) for run in self.counted)} pauses, "
            f"{sum(len(run.damage) for run in self.counted)} times the store was harmed"
        )


def campaign(
    wanted: int,
    first_seed: int,
    kills: int,
    one: Callable[[int], Run],
    told: Callable[[int, Run | Exception, str | None], None] = lambda seed, run, missed: None,
    jobs: int = 1,
) -> Tally:
    """Runs, each with the next seed and so many at a time, until so many have counted or failed, or too many have not
    counted. `told` hears of each: its seed, what it did or what went wrong, and why it does not count."""
    tally = Tally(wanted)
    seeds = itertools.count(first_seed)
    under_way: dict[Future[Run], int] = {}
    with ThreadPoolExecutor(jobs) as pool:
        while True:
            while len(under_way) < jobs and not tally.over(len(under_way)):
                seed = next(seeds)
                under_way[pool.submit(one, seed)] = seed
            if not under_way:
                return tally
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                seed = under_way.pop(future)
                error = future.exception()
                if error is None:
                    run = future.result()
                    missed = run.missed(kills)
                    if missed is None:
                        tally.counted.append(run)
                    else:
                        tally.missed.append(missed)
                    told(seed, run, missed)
                elif isinstance(error, Exception):
                    tally.failed.append(f"seed {seed}: {type(error).__name__}: {error}")
                    told(seed, error, None)
                else:
                    raise error


def run_once(
    seed: int, *, flow: str | None, mode: str | None, kinds: tuple[str, ...], seconds: float, kills: int, kind: str
) -> Run:
    """One run; raises AssertionError or what the job raised."""
    rng = random.Random(seed)
    flow = flow or rng.choice(FLOWS)
    if flow in BURSTS:
        return _run_bursts(seed, rng, flow, mode or PAPER, kinds, kills, kind)
    run = Run(flow, mode or rng.choice(MODES))
    case = CASES[flow]
    n = int(RATE * seconds)
    graph = ps.Flow(f"switch-{seed}", parallelism=rng.choice((1, 2, 3)))
    with TemporaryDirectory(prefix="switch-") as checkpoints, TemporaryDirectory(prefix="switch-holds-") as holds:
        ready, end = Path(holds) / "Spark is ready", Path(holds) / "the kills are done"
        tasks = graph.parallelism or 1
        generator = ps.sources.Generator(case.line, RATE, limit=n)
        source = Held(generator, {ready: n // 20 // tasks, end: n // 4 * 3 // tasks})
        sink = ps.sinks.Collect()
        case.build(graph.read(source, name="lines"), sink)
        began = time.monotonic()
        job = ps.run(
            graph,
            workers=rng.choice((1, 2)),
            dual=run.mode,
            spark=None if run.mode == "off" else SparkOptions(kind=kind, cores=2),  # type: ignore[arg-type]
            checkpoints=checkpoints,
            epoch_interval_s=0.5,
            max_restarts=100,
        )
        try:
            _torment(job, run, rng, kinds, kills, began, ready, end)
            run.note(job.wait(LIMIT_S, progress=False))
            found = case.found(list(sink.records()))
        finally:
            if job.state not in ("FINISHED", "CANCELLED", "FAILED"):
                job.cancel()
        run.seconds = time.monotonic() - began
    expected = case.expected(n)
    if found != expected:
        missing = {key: value for key, value in expected.items() if found.get(key) != value}
        raise AssertionError(
            f"{len(missing)} of {len(expected)} results are wrong, such as {list(missing.items())[:3]}"
        )
    return run


def kinds_for_a_socket(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Those that harm a job that cannot read its input again, and some of which kill."""
    left = tuple(kind for kind in kinds if kind in (*OF_SPARK, "pause"))
    return left if set(left) & set(OF_SPARK) else (*left, *OF_SPARK)


def _run_bursts(
    seed: int, rng: random.Random, flow: str, mode: str, kinds: tuple[str, ...], kills: int, kind: str
) -> Run:
    """One run of a job with bursts: they follow each other until the kills are done and Spark has answered."""
    run = Run(flow, mode)
    with TemporaryDirectory(prefix="switch-") as checkpoints, TemporaryDirectory(prefix="switch-burst-") as folder:
        case = bursts.Case(flow.removeprefix("burst-"), Path(folder), rng.choice((1, 2)))
        ready, end = Path(folder) / "Spark is ready", Path(folder) / "the kills are done"
        if case.kind == "socket":
            kinds = kinds_for_a_socket(kinds)
        began = time.monotonic()
        job = bursts.started(
            case,
            kind,
            dual=mode,
            cores=2,
            workers=rng.choice((1, 2)),
            checkpoints=checkpoints,
            epoch_interval_s=0.5,
            max_restarts=100,
        )
        over = threading.Event()
        waves = threading.Thread(target=_waves, args=(case, ready, over, random.Random(seed)), daemon=True)
        waves.start()
        try:
            _torment(job, run, rng, kinds, kills, began, ready, end)
            over.set()
            waves.join()
            wrong = case.wrong(case.end(job))
        finally:
            over.set()
            case.close()
            if job.state not in ("FINISHED", "CANCELLED", "FAILED"):
                job.cancel()
        run.seconds = time.monotonic() - began
    if wrong is not None:
        raise AssertionError(wrong)
    return run


def _waves(case: bursts.Case, ready: Path, over: threading.Event, rng: random.Random) -> None:
    """Has bursts begin and end once Spark is ready."""
    flag = Path(case.flag.path)
    while not over.wait(0.1):
        if ready.exists():
            flag.touch()
            over.wait(rng.uniform(2.0, 6.0))
            flag.unlink()
            over.wait(rng.uniform(1.0, 4.0))


def _torment(
    job: Any, run: Run, rng: random.Random, kinds: tuple[str, ...], kills: int, began: float, ready: Path, end: Path
) -> None:
    """Harm the job once Spark is there, at random distances, until it has ended or enough processes were killed. The
    input is let go when Spark is ready, and its end when the kills are done and the status counts records that Spark
    has answered: that a range is in Spark is not enough, because it may have come back since. At last it is let go in
    any case."""
    state = ""
    due: float | None = None
    left = kills
    while job.state not in ("FINISHED", "CANCELLED", "FAILED"):
        status = job.status()
        dual = status["dual"]
        states = [one["state"] for one in dual["ranges"]]
        run.note(status)
        now = next((one for one in states if one != "RECORD"), states[0] if states else state)
        if now != state:
            run.switches += now == "OPERATION"
            state = now
        begin = dual["processes"]["bridge"] is not None or run.mode == "off"
        late = time.monotonic() - began >= LIMIT_S
        if begin or late:
            ready.touch()
        if late or (not left and (run.mode == "off" or run.in_spark >= IN_SPARK_LEAST)):
            end.touch()
        if late or (end.exists() and run.flow in BURSTS):  # these jobs have no end of their own
            return
        if due is None and begin:
            due = time.monotonic() + rng.uniform(0.0, 3.0)
        if left and due is not None and time.monotonic() >= due:
            killed = harm(job, run, rng, rng.choice(kinds), status, state)
            left -= min(killed, left)
            due = time.monotonic() + rng.uniform(1.0, 6.0)
        time.sleep(0.1)


def harm(job: Any, run: Run, rng: random.Random, kind: str, status: dict[str, Any], state: str) -> int:
    """Do to a job with this status what the kind says; the number of processes that were killed."""
    place = ThisMachine()
    dual = status["dual"]["processes"]
    known: list[Process] = sorted((worker["node_id"], worker["pid"]) for worker in status["workers"])
    workers = [worker for worker in known if alive(worker[1])]  # after the JobMaster's death the last status is old
    spare = run.flow == SOCKET
    if kind in OF_SPARK:
        pids = list(dual["executors"].values()) if kind == "executor" else [dual["bridge"]]
        pids = [pid for pid in pids if pid is not None]
        return _kill(place, run, ("", rng.choice(pids)), f"{kind} in {state}") if pids else 0
    try:
        master = master_process(job)
    except Exception:  # whatever Ray says of a JobMaster that is just being replaced, or has ended
        return 0
    if not workers:
        return 0
    victim, who = rng.choice([(rng.choice(workers), "worker"), (master, "master")])
    if kind == "pause":
        chosen, killed, told = pause_and_kill(place, rng, victim, workers, master, spare=spare)
        run.pauses.append(f"{who} {told} in {state}")
        run.kills += [f"{'master' if chosen == master else 'worker'} in a pause in {state}"] * killed
        return killed
    if kind == "file":
        if status["epochs"]["store"] is None:
            return 0
        run.damage.append(f"{store_damage.harm_one(Path(status['epochs']['store']), rng)} in {state}")
    else:
        victim, who = (master, kind) if kind == "master" else (rng.choice(workers), kind)
    return _kill(place, run, victim, f"{who} in {state}")


def _kill(place: ThisMachine, run: Run, victim: Process, told: str) -> int:
    killed = place.kill([victim])
    run.kills += [told] * killed
    return killed


@contextmanager
def own_cluster(cpus: int) -> Iterator[None]:
    """A Ray cluster of this process."""
    import ray

    from penstock.actors import cluster

    cluster.connect("local", cpus=cpus)
    try:
        yield
    finally:
        ray.shutdown()


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50, help="that count")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--flow", choices=FLOWS)
    parser.add_argument("--mode", help="off, on, spark-only, toggle:SECONDS (drawn)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="faults, of " + ",".join(KINDS))
    parser.add_argument("--kills", type=int, default=3, help="processes to be killed in a run")
    parser.add_argument("--seconds", type=float, default=20.0, help="of records in a run")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--spark", choices=("auto", "raydp", "pyspark"), default="pyspark")
    options = parser.parse_args()
    kinds = tuple(options.kinds.split(","))
    if wrong := set(kinds) - set(KINDS):
        parser.error(f"--kinds: {', '.join(sorted(wrong))}; there are {', '.join(KINDS)}")

    def one(seed: int) -> Run:
        return run_once(
            seed,
            flow=options.flow,
            mode=options.mode,
            kinds=kinds,
            seconds=options.seconds,
            kills=options.kills,
            kind=options.spark,
        )

    def told(seed: int, run: Run | Exception, missed: str | None) -> None:
        if isinstance(run, Run):
            done = (("killed", run.kills or ["nothing"]), ("paused", run.pauses), ("store", run.damage))
            print(
                f"seed {seed}: {run.flow} {run.mode}: exact in {run.seconds:.0f} s, {run.switches} times to Spark, "
                f"{run.in_spark:,} records there; "
                f"{'; '.join(f'{what}: ' + ', '.join(texts) for what, texts in done if texts)}"
                f"{f'; does not count: {missed}' if missed else ''}",
                flush=True,
            )
            return
        print(f"seed {seed}: {type(run).__name__}: {run}", flush=True)
        given = [f"--{name} {value}" for name in ("flow", "mode") if (value := getattr(options, name))]
        again = f"--runs 1 --seed {seed} --kinds {options.kinds} --kills {options.kills}"
        print(f"  again: python -m tests.e2e.switch_campaign {again} --seconds {options.seconds} "
              f"--spark {options.spark} {' '.join(given)}", flush=True)  # fmt: skip

    with own_cluster(cpus=8 * options.jobs):
        tally = campaign(options.runs, options.seed, options.kills, one, told, options.jobs)
    print(tally.summary())
    return 0 if tally.good else 1


if __name__ == "__main__":
    sys.exit(main())
