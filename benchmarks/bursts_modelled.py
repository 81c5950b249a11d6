"""Two bursts beside a Spark whose executors have cores of their own, which is modelled (docs/papers.md: D2, D7).

The benchmark `ysb_bursts` has its executors on the cores of the record tasks, where a switch can hardly pay. Here K =
PD / PO is below 1: a record takes the record task 1 / PD seconds, and the modelled Spark (modelled_spark.py) takes
fixed_s + n / PO seconds for n records, and none of our processors. Everything else is the product on Ray: worker,
diversion, bridge, scheduler and their clocks, with all settings at their defaults.

Calm, burst, calm, burst, calm; the same records for three forms, which take turns: records only (dual="off"), Spark
only (dual="spark-only"), and the hybrid (dual="on").

The n-th record of a key has its result with the first update of the key that counts n records or more. Its *delay* is
the time of this update minus the time at which the record was due. *Waiting* at a time are the records that were due
and have no result. Both are computed of all records, and not sampled. Every update is compared with what it must be.
"""

from __future__ import annotations

import itertools
import json
import pickle
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import penstock as ps
from benchmarks.common import Bench, WrongResult, median, quantile, ray_cluster, scratch, wait_until
from benchmarks.modelled_spark import Costly, ModelledSpark, value_of
from penstock.bridge.burst import switch_length
from penstock.bridge.cost import BatchCost, interval
from penstock.bridge.session import SparkOptions
from penstock.jobs.job import Job
from penstock.jobs.run import run as start_job
from penstock.runtime.sinks import Sink, SinkContext, SinkWriter
from penstock.runtime.sources.pace import Schedule

if TYPE_CHECKING:
    import numpy.typing as npt

    Doubles = npt.NDArray[np.float64]

HYBRID, RECORDS, SPARK = "hybrid", "records only", "Spark only"
FORMS = {HYBRID: "on", RECORDS: "off", SPARK: "spark-only"}
PD = 4_000.0
CALM = 0.4  # times PD
KEYS = 50
ONE = 1 << 40  # a sum holds the number of its records above this bit
_PREPARE_S = 2.0
_BEGIN_S = 3.0  # at the beginning, which do not count
_SETTLE_NS = 2_000_000_000  # until the start, from the time when everything is ready
_LOOK_NS = 5_000_000  # how often the source looks for the start
_BIN_S = 0.25
_PAYS_FROM = 1.5  # PO / PD: from here on a burst of 20 s is to be better in the hybrid than in either paradigm
_WATCH_S = 0.1
_number = itertools.count()


@dataclass(frozen=True)
class Setting:
    """A Spark and a burst: PO and V in multiples of PD."""

    operation: float
    burst: float
    fixed_s: float = 0.25
    calm_s: float = 10.0
    burst_s: float = 20.0
    after_s: float = 30.0
    record_rate: float = PD
    waits: bool = False  # the record tasks wait in place of working: for machines that are busy otherwise

    def __str__(self) -> str:
        return (
            f"PO = {self.operation:g} PD, {self.fixed_s:g} s fixed, bursts of {self.burst:g} PD for {self.burst_s:g} s"
        )

    @property
    def cost(self) -> BatchCost:
        """What a micro-batch costs."""
        return BatchCost(self.fixed_s, self.operation * self.record_rate)

    @property
    def steps(self) -> list[tuple[float, float]]:
        """(records a second, seconds)."""
        calm, burst = CALM * self.record_rate, self.burst * self.record_rate
        return [
            (calm, _BEGIN_S + self.calm_s),
            (burst, self.burst_s),
            (calm, self.after_s),
            (burst, self.burst_s),
            (calm, self.after_s),
        ]

    @property
    def number(self) -> int:
        """How many records there are."""
        return round(sum(rate * seconds for rate, seconds in self.steps))

    @property
    def bursts(self) -> list[tuple[float, float, float]]:
        """(begin, end, begin of the next one or end of the load) of each burst, in seconds since the start."""
        times = [0.0, *itertools.accumulate(seconds for _, seconds in self.steps)]
        return [(times[1], times[2], times[3]), (times[3], times[4], times[5])]


# --- the job -------------------------------------------------------------------------------------------------------


class Gate:
    """A clock that stands still until the start, which a file of a folder names in ns since 1970."""

    def __init__(self, folder: str) -> None:
        self._file = Path(folder, "start")
        self._still_at: int | None = None
        self._start = self._looked = 0

    def __call__(self) -> int:
        if self._still_at is None:
            self._still_at = time.monotonic_ns()
        now = time.time_ns()
        if not self._start and now - self._looked > _LOOK_NS:
            self._looked = now
            if self._file.exists():
                self._start = int(self._file.read_text())
        return self._still_at + (max(0, now - self._start) if self._start else 0)


def number(index: int) -> int:
    """Makes a record."""
    return index


class UpdateSink(Sink):
    """Notes updates (key, sum) and when they came."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def writer(self, context: SinkContext) -> SinkWriter:
        return _UpdateWriter(self._folder)


class _UpdateWriter(SinkWriter):
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._columns = array("q"), array("q"), array("q")

    def write(self, records: list[Any]) -> None:
        keys, sums, at = self._columns
        now = time.time_ns()
        for key, total in records:
            keys.append(key)
            sums.append(total)
            at.append(now)

    def close(self, failed: bool) -> None:
        if self._columns[0]:
            Path(self._folder, "updates").write_bytes(pickle.dumps(self._columns))


def flow_of(setting: Setting, folder: str) -> ps.Flow:
    """Numbers, the costly function, and sums by key."""
    flow = ps.Flow(f"bench-modelled-{next(_number)}", parallelism=1)
    steps = ",".join(f"{rate:g}:{seconds:g}s" for rate, seconds in setting.steps)
    source = ps.sources.Generator(number, rate=steps, limit=setting.number, clock=Gate(folder))
    work = Costly(1 / setting.record_rate, KEYS, ONE, waits=setting.waits)
    flow.read(source).map(work, name="work").key_by(itemgetter(0)).sum(itemgetter(1)).write(UpdateSink(folder))
    return flow


@dataclass
class Sample:
    """What the status said of the range at a time, in seconds since 1970."""

    at: float
    state: str
    figures: dict[str, Any]
    switches: list[dict[str, Any]]


@dataclass
class Run:
    """A run that has ended. Times are in seconds since the start."""

    setting: Setting
    due: Doubles
    delay: Doubles  # of each record
    samples: list[Sample]
    batches: Doubles  # (came, done, records) of each micro-batch
    notes: list[str] = field(default_factory=list)

    def quantiles(self, begin: float, end: float = np.inf) -> dict[str, float]:
        """The p50, p99 and greatest delay of the records that were due in a time."""
        ordered = np.sort(self.delay[(self.due >= begin) & (self.due < end)])
        return {"p50": quantile(ordered, 0.5), "p99": quantile(ordered, 0.99), "max": float(ordered[-1])}

    def waiting(self, begin: float, end: float) -> list[tuple[float, float]]:
        """How many records waited at the times of a grid."""
        grid = np.arange(begin, end, 0.05)
        done = np.sort(self.due + self.delay)
        number = np.searchsorted(self.due, grid, side="right") - np.searchsorted(done, grid, side="right")
        return list(zip(grid.tolist(), number.astype(float).tolist(), strict=True))

    @property
    def seconds(self) -> float:
        """Until the last result."""
        return float(np.max(self.due + self.delay))

    def delays(self) -> list[tuple[float, float]]:
        """The greatest delay by due time, in bins."""
        edges = np.arange(0.0, self.due[-1] + _BIN_S, _BIN_S)
        pieces = itertools.pairwise(np.searchsorted(self.due, edges).tolist())
        return [(at, float(self.delay[a:b].max())) for at, (a, b) in zip(edges.tolist(), pieces, strict=False) if b > a]

    def first_answer(self, begin: float, end: float) -> float | None:
        """Seconds from a burst's begin until Spark has answered the first records of it."""
        done = [done for came, done, _ in self.batches.tolist() if begin <= came < end]
        return min(done) - begin if done else None

    def peak(self, begin: float, end: float) -> tuple[float, float, float]:
        """(height, length, settled) of the delay of a burst: the greatest delay, the seconds from the burst's begin
        until no delay is a quarter above what it settles at, and that. In Spark the delay swings between two
        micro-batches, so it settles at what is above nine tenths of the second half's bins."""
        bins = [(at, high) for at, high in self.delays() if begin <= at < end]
        settled = quantile(sorted(high for at, high in bins if at >= (begin + end) / 2), 0.9)
        above = [at for at, high in bins if high > 1.25 * settled]
        return max(high for _, high in bins), max(above) + _BIN_S - begin if above else 0.0, settled


def play(setting: Setting, who: str) -> Run:
    """Runs the load in one of the forms."""
    ray_cluster()
    with scratch() as folder:
        flow = flow_of(setting, str(folder))
        dual = FORMS[who]
        spark = None
        if dual != "off":
            spark = SparkOptions(kind="pyspark", stand_in=ModelledSpark(setting.cost, _PREPARE_S, str(folder)))
        job = start_job(flow, workers=1, checkpoints=folder / "epochs", dual=dual, spark=spark)
        try:
            wait_until(lambda: _is_ready(job, dual), "the job and its Spark are ready", 120)
            start_ns = time.time_ns() + _SETTLE_NS
            partial_file = folder / ".start"
            partial_file.write_text(str(start_ns))
            partial_file.rename(folder / "start")
            samples = list(_watch(job))
            job.wait(60, progress=False)
        finally:
            job.cancel()
            job.wait(60, progress=False)
        start = start_ns / 1e9
        batches = folder / "micro-batches"
        found = np.loadtxt(batches, ndmin=2) if batches.exists() else np.empty((0, 3))
        found[:, :2] -= start
        for sample in samples:
            sample.at -= start
        due, delay = delays_of(setting, pickle.loads((folder / "updates").read_bytes()), start)
        return Run(setting, due, delay, samples, found)


def _is_ready(job: Job, dual: str) -> bool:
    status = job.status()
    if status["state"] != "RUNNING" or dual == "off":
        return bool(status["state"] == "RUNNING")
    one = status["dual"]["ranges"][0] if status["dual"]["ranges"] else None
    return status["dual"]["spark"] is not None and one is not None and (dual == "on" or one["state"] == "OPERATION")


def _watch(job: Job) -> Iterator[Sample]:
    while True:
        status = job.status()
        ranges = status.plain()["dual"]["ranges"]
        one = ranges[0] if ranges else {"state": "RECORD", "figures": {}, "switches": []}
        yield Sample(time.time(), one["state"], one["figures"], one["switches"])
        if status["state"] not in ("RUNNING", "STOPPING"):
            return
        time.sleep(_WATCH_S)


def due_times(setting: Setting) -> Doubles:
    """Returns when each record is due, in seconds since the start."""
    times: Doubles = Schedule(setting.steps).due_ns(np.arange(setting.number, dtype=np.float64)) / 1e9
    return times


def delays_of(setting: Setting, columns: tuple[array[int], ...], start: float) -> tuple[Doubles, Doubles]:
    """(when it was due, its delay) of each record. Compares every update with what it must be."""
    number = setting.number
    due = due_times(setting)
    done = np.full(number, np.nan)
    keys, sums, at = (np.frombuffer(column, np.int64) for column in columns)
    values = np.array([value_of(i) for i in range(number)], np.int64)
    for key in range(KEYS):
        mine = np.cumsum(values[key::KEYS] + ONE)
        here = sums[keys == key]
        counted = here >> 40
        if len(here) == 0 or counted[-1] != len(mine):
            raise WrongResult(f"key {key}: {counted[-1] if len(here) else 0} records of {len(mine)}")
        if (np.diff(counted) <= 0).any() or (here != mine[counted - 1]).any():
            raise WrongResult(f"key {key}: an update is not the sum of the first records of this key")
        first = np.searchsorted(counted, np.arange(1, len(mine) + 1))
        done[key::KEYS] = at[keys == key][first] / 1e9 - start
    return due, np.maximum(0.0, done - due)  # the first record comes before the start


# --- what is shown -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """What Eq. 1 to 6 say of a setting, in seconds: the delay that a burst ends with in records, the mean and the
    greatest delay in Spark when it has lasted, and the queue length that decides."""

    records_s: float
    mean_s: float
    most_s: float
    interval_s: float
    switch: float

    @staticmethod
    def of(setting: Setting) -> Model:
        """Computes it."""
        rate, pd, cost = setting.burst * setting.record_rate, setting.record_rate, setting.cost
        seconds = interval(rate, cost)
        batch_s = cost.seconds(rate * seconds)
        return Model(
            (rate - pd) * setting.burst_s / pd,
            seconds / 2 + batch_s,
            seconds + batch_s,
            seconds,
            switch_length(rate, pd, cost.rate, seconds, cost.fixed_s),
        )


def _figures(run: Run) -> dict[str, tuple[float, str]]:
    """Name -> figure and unit, of what every form has."""
    bursts = run.setting.bursts
    found: dict[str, tuple[float, str]] = {}
    whole = run.quantiles(_BEGIN_S)
    for what in ("p50", "p99"):
        found[f"{what} delay"] = whole[what], "s"
    found["most that wait"] = max(n for _, n in run.waiting(_BEGIN_S, run.seconds)), "records"
    calm = run.quantiles(_BEGIN_S, bursts[0][0])
    found["p50 delay before the bursts"], found["p99 delay before the bursts"] = (calm["p50"], "s"), (calm["p99"], "s")
    for name, (begin, end, following) in zip(("first", "second"), bursts, strict=True):
        inside = run.quantiles(begin, end)
        for what in ("p50", "p99"):
            found[f"{what} delay in the {name} burst"] = inside[what], "s"
        found[f"most that wait in the {name} burst"] = max(n for _, n in run.waiting(begin, following)), "records"
        high, length, settled = run.peak(begin, end)
        found[f"peak of the delay in the {name} burst"] = high, "s"
        found[f"length of this peak ({name} burst)"] = length, "s"
        found[f"delay at which the {name} burst settles"] = settled, "s"
        after = run.quantiles((end + following) / 2, following)
        found[f"p99 delay in the second half of the calm after the {name} burst"] = after["p99"], "s"
        back = [at for at, high in run.delays() if end <= at < following and high > 2 * max(calm["p99"], 0.05)]
        found[f"end of the {name} burst to a calm delay"] = max(back) + _BIN_S - end if back else 0.0, "s"
    return found


def _switch_cases(bench: Bench, who: str, runs: list[Run], config: str) -> None:
    for index, name in enumerate(("first", "second")):
        begin, end, _ = runs[0].setting.bursts[index]
        answers = [at for run in runs if (at := run.first_answer(begin, end)) is not None]
        bench.case(
            f"{who}: runs in which the {name} burst went to Spark", len(answers), f"of {len(runs)}", config=config
        )
        if answers:
            bench.case(
                f"{who}: begin of the {name} burst to Spark's first answer",
                median(answers),
                "s",
                goal="< 4",
                config=config,
                runs=answers,
            )
    last = runs[-1].samples[-1]
    for story in last.switches:
        if story["to"] == "operation":
            bench.case(
                f"{who}: latency of a switch to Spark, as measured by the product",
                story["measured"]["latency_s"],
                "s",
                config=config,
                note=f"taken back: {story['taken_back']}; {story['reason']}",
                checked=False,
            )


def _shown(run: Run) -> str:
    """A line for the progress."""
    found = _figures(run)
    text = ", ".join(
        f"{name} {found[name][0]:,.2f}"
        for name in ("p50 delay", "p99 delay", "most that wait", "p99 delay before the bursts")
    )
    for name, (begin, end, _) in zip(("first", "second"), run.setting.bursts, strict=True):
        answer = run.first_answer(begin, end)
        text += (
            f"; {name} burst: p99 {found[f'p99 delay in the {name} burst'][0]:.2f}, peak "
            f"{found[f'peak of the delay in the {name} burst'][0]:.2f} for "
            f"{found[f'length of this peak ({name} burst)'][0]:.2f}, settles at "
            f"{found[f'delay at which the {name} burst settles'][0]:.2f}, Spark "
            + ("never" if answer is None else f"after {answer:.2f}")
        )
    return text


def _plot(bench: Bench, setting: Setting, runs: dict[str, Run], file: str) -> None:
    if (plt := bench.pyplot(file)) is None:
        return
    last = max(run.seconds for run in runs.values())
    figure, (delay, queue, state) = plt.subplots(
        3, 1, figsize=(10, 9), sharex=True, gridspec_kw={"height_ratios": [4, 4, 1]}
    )
    for who, run in runs.items():
        delay.plot(*zip(*run.delays(), strict=True), label=who)
        queue.plot(*zip(*run.waiting(0.0, last), strict=True), label=who)
    for axes in (delay, queue, state):
        for begin, end, _ in setting.bursts:
            axes.axvspan(begin, end, color="orange", alpha=0.15)
    model = Model.of(setting)
    delay.axhline(model.most_s, linestyle=":", color="grey", label="Spark's greatest delay by the model")
    delay.set(ylabel="greatest delay, s", yscale="log", title=f"{setting}; PD = {setting.record_rate:,.0f} records/s")
    queue.set(ylabel="records waiting", yscale="symlog")
    for axes in (delay, queue):
        axes.grid(visible=True, alpha=0.3)
        axes.legend(loc="upper left", fontsize=8)
    names = ["RECORD", "PREPARING", "SWITCHING", "OPERATION", "RETURNING"]
    samples = runs[HYBRID].samples if HYBRID in runs else []
    state.step([one.at for one in samples], [names.index(one.state) for one in samples], where="post")
    state.set_yticks(range(len(names)), [name.lower() for name in names], fontsize=7)
    state.set(xlabel="s since the start", xlim=(0, last))
    figure.tight_layout()
    figure.savefig(bench.path(file), dpi=110)
    plt.close(figure)


SETTINGS = [Setting(3.0, 1.5), Setting(3.0, 2.0), Setting(10.0, 3.0, 0.1), Setting(1.1, 2.0)]
_QUICK = Setting(3.0, 1.5, calm_s=2.0, burst_s=4.0, after_s=2.0, record_rate=2_000.0)


def run(bench: Bench) -> None:
    """See the module."""
    for number, setting in enumerate(bench.pick(SETTINGS, [_QUICK])):
        model = Model.of(setting)
        bench.say(f"{setting}: {model}")
        contestants = {who: partial(_told, bench, setting, who) for who in FORMS}
        results = bench.take_turns(contestants, runs=max(1, bench.runs // 5))
        _cases(bench, setting, model, results)
        _plot(bench, setting, {who: runs[-1] for who, runs in results.items()}, f"bursts_modelled-{number}.png")
        with bench.path(f"bursts_modelled-{number}-samples.jsonl").open("w") as file:
            for sample in results[HYBRID][-1].samples:
                file.write(json.dumps(vars(sample)) + "\n")


def _told(bench: Bench, setting: Setting, who: str) -> Run:
    found = play(setting, who)
    bench.say(f"{who}: {_shown(found)}")
    return found


def _cases(bench: Bench, setting: Setting, model: Model, results: dict[str, list[Run]]) -> None:
    config = str(setting)
    bench.case("K", 1 / setting.operation, "PD / PO", config=config, checked=False)
    bench.case("model: delay at the end of a burst in records", model.records_s, "s", config=config, checked=False)
    bench.case("model: mean delay in Spark", model.mean_s, "s", config=config, checked=False)
    bench.case("model: greatest delay in Spark", model.most_s, "s", config=config, checked=False)
    bench.case("model: L_switch in a burst", model.switch, "records", config=config, checked=False)
    figures = {who: [_figures(one) for one in runs] for who, runs in results.items()}
    # A switch to a Spark that is hardly quicker than the record tasks cannot pay for what micro-batches cost.
    pays = setting.operation >= _PAYS_FROM
    for name, (_, unit) in figures[HYBRID][0].items():
        mine = [found[name][0] for found in figures[HYBRID]]
        for peer in (RECORDS, SPARK):
            theirs = [found[name][0] for found in figures[peer]]
            goal = "<= 1" if pays and name in ("p99 delay", "most that wait") else None
            bench.case(
                f"{HYBRID}: {name}",
                median(mine),
                unit,
                peer=peer,
                peer_figure=median(theirs),
                goal=goal,
                config=config,
                runs=mine,
                peer_runs=theirs,
            )
    for name in ("p99 delay in the {} burst", "peak of the delay in the {} burst"):
        first, second = ([found[name.format(which)][0] for found in figures[HYBRID]] for which in ("first", "second"))
        bench.case(
            f"{HYBRID}: {name.format('second')}, beside the first",
            median(second),
            "s",
            peer="the first burst",
            peer_figure=median(first),
            # The bursts are alike, and the queue is seen every quarter of a second.
            goal="<= 1.25" if pays else None,
            config=config,
            runs=second,
            peer_runs=first,
        )
    _switch_cases(bench, HYBRID, results[HYBRID], config)
