"""Bursts of four kinds in real jobs: seen where they are, answered as the model says, over, and exact.

    python -m tests.e2e.bursts --kind inside --spark raydp
    python -m tests.e2e.bursts --kind slow --tasks 2 --spin --dual on

The operator "work" asks a service for each record, and so takes time but no processor (`--spin`: it computes). The
kinds:

- socket: a server suddenly sends ten times as many lines;
- inside: behind a quiet source, a function suddenly makes ten records of one;
- slow: the service, and with it the operator, becomes 20 times slower;
- hot: the server sends ten times as many lines, and all lines of the burst have one key. What each core of Spark got of
  it is printed: each is to have about as much as any other.

With several cores of Spark beside one task, a switch pays by the model; with as many tasks as cores, it does not, and
then the range must not switch. What the model says follows from the figures that the status showed during the burst
(`Model`), unless `--switches` says it. Everything that was seen is printed; the exit code is 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import penstock as ps
from penstock.bridge.session import SparkOptions
from tests.e2e.processes import wait_until

KINDS = ("socket", "inside", "slow")  # those of the switch campaign
ALL_KINDS = (*KINDS, "hot")
RATE = 200  # records of the world a second
MORE = 10  # times as many in a burst
SLOWER = 20
EACH_S = 0.001  # what a record takes in "work"
LASTS_S = {"socket": 8.0, "inside": 8.0, "slow": 20.0, "hot": 8.0}
HOT = -1  # the number that all lines of a burst have, which is its key
SEEN_S = 1.5  # within which a burst is to be seen
ANSWERED_S = 4.0  # within which Spark's first answer is to come
LIMIT_S = 300.0
_LOOK_S = 0.05  # how often a function looks whether there is a burst
_LOOKS_S = 1.0  # within which a status shows the figures of a decision
_LEAST_A_CORE = 32  # records of a list, the least that can be divided (bridge/forms.py)
_HOT_SHARE = 0.9  # of a micro-batch of the hot key


class Flag:
    """Whether a file is there, which several processes may ask often."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._looked_s = 0.0
        self._is_there = False

    def __bool__(self) -> bool:
        now = time.monotonic()
        if now - self._looked_s >= _LOOK_S:
            self._looked_s, self._is_there = now, os.path.exists(self.path)
        return self._is_there


class Work:
    """Asks a service, which is slow while the flag is there; or computes. With `shares`, each part of a micro-batch in
    Spark adds a line to this file: the stage, the part, the process, and how many records it got, and of these hot."""

    def __init__(self, slow: Flag | None, spin: bool, shares: Path | None = None) -> None:
        self.slow = slow
        self.spin = spin
        self.shares = shares
        self.got = self.hot = 0

    def open(self) -> None:
        self.got = self.hot = 0

    def close(self) -> None:
        """Notes what it got, when it has run in Spark."""
        if self.shares is None or not self.got or "pyspark" not in sys.modules:
            return
        from pyspark import TaskContext

        part = TaskContext.get()
        if part is not None:
            with open(self.shares, "a", encoding="utf-8") as file:
                file.write(f"{part.stageId()} {part.partitionId()} {os.getpid()} {self.got} {self.hot}\n")

    def __call__(self, number: int) -> int:
        each_s = EACH_S * (SLOWER if self.slow else 1)
        if self.spin:
            end = time.thread_time() + each_s
            while time.thread_time() < end:
                pass
        else:
            time.sleep(each_s)
        self.got += 1
        self.hot += number == HOT
        return number


class Several:
    """Makes several records of one while the flag is there."""

    def __init__(self, flag: Flag) -> None:
        self.flag = flag

    def __call__(self, number: int) -> list[int]:
        return [number] * (MORE if self.flag else 1)


class Server:
    """Sends numbers as lines to whoever connects, more of them while the flag is there, until it is closed. With `hot`,
    all of these have one number."""

    def __init__(self, flag: Flag, hot: bool = False) -> None:
        self.flag = flag
        self.with_hot = hot
        self.sent = 0  # different numbers
        self.hot = 0
        self._closed = threading.Event()
        self._listening = socket.create_server(("localhost", 0))
        self.port = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the stream."""
        self._closed.set()
        with suppress(OSError):  # somebody has connected
            self._listening.shutdown(socket.SHUT_RDWR)  # else a server to which nobody came would wait on
        self._listening.close()
        self._thread.join()

    def _serve(self) -> None:
        with suppress(OSError), self._listening.accept()[0] as connection:  # it may end before it was read
            due, then = 0.0, time.monotonic()
            while not self._closed.wait(0.01):
                now, burst = time.monotonic(), bool(self.flag)
                due += (now - then) * RATE * (MORE if burst else 1)
                then = now
                count = int(due)
                due -= count
                lines: Iterable[int] = range(self.sent, self.sent + count)
                if burst and self.with_hot:
                    lines = [HOT] * count
                    self.hot += count
                else:
                    self.sent += count
                connection.sendall("".join(f"{number}\n" for number in lines).encode())


@dataclass
class Sample:
    """What the status said, `at` seconds after the burst began."""

    at: float
    ranges: dict[str, dict[str, Any]]  # by the first operator


@dataclass
class Seen:
    """What was seen of one burst. Times are in seconds since it began; None: it did not happen."""

    lasts_s: float
    samples: list[Sample] = field(default_factory=list)

    def first(self, operator: str, what: Any) -> float | None:
        """When something was true of the range of an operator for the first time."""
        return next((one.at for one in self.samples if operator in one.ranges and what(one.ranges[operator])), None)

    def last(self, operator: str, what: Any) -> float | None:
        """When something was true of the range of an operator for the last time."""
        return max(
            (one.at for one in self.samples if operator in one.ranges and what(one.ranges[operator])), default=None
        )

    @property
    def operators(self) -> set[str]:
        """The first operators of all ranges."""
        return {operator for one in self.samples for operator in one.ranges}

    @property
    def seen_at(self) -> dict[str, float]:
        """When a burst was seen at each range that saw one."""
        found = {operator: self.first(operator, is_burst) for operator in self.operators}
        return {operator: at for operator, at in found.items() if at is not None}

    @property
    def switched_at(self) -> float | None:
        """When the range had decided to switch."""
        return self.first("work", lambda one: one["state"] in ("SWITCHING", "OPERATION"))

    @property
    def answered_at(self) -> float | None:
        """When Spark's first answer was there."""
        before = self.samples[0].ranges["work"]["records_in_spark"]
        return self.first("work", lambda one: one["records_in_spark"] > before)

    @property
    def back_at(self) -> float | None:
        """When the range was in the record paradigm for good."""
        away = self.last("work", lambda one: one["state"] != "RECORD")
        return None if away is None or away == self.samples[-1].at else away

    @property
    def most(self) -> float:
        """The most records that waited."""
        return max(float(one.ranges["work"]["figures"].get("queue", 0.0)) for one in self.samples)

    @property
    def refusals(self) -> list[str]:
        """The reasons why the range did not switch although there was a burst."""
        found = (one.ranges["work"]["reason"] for one in self.samples)
        return list(
            dict.fromkeys(reason.split(":")[1].split(" would")[0] for reason in found if reason.startswith("not "))
        )

    def story(self) -> str:
        """Everything in some lines."""
        switches = self.samples[-1].ranges["work"]["switches"]
        reasons = dict.fromkeys(one.ranges["work"]["reason"] for one in self.samples if is_burst(one.ranges["work"]))
        shown = list(reasons)
        lines = [
            f"  seen at {self.seen_at}, switched {self.switched_at}, first answer {self.answered_at}, "
            f"burst over {self.lasts_s:g}, back {self.back_at}, most waiting {self.most:,.0f}",
            *(f"    because {reason}" for reason in [*shown[:2], *shown[-1:]]),
            *(f"    {one}" for one in switches),
        ]
        return "\n".join(lines)


def is_burst(one: dict[str, Any]) -> bool:
    """Whether a range says that it has a burst, or does anything about one."""
    return bool(one["burst"]) or one["state"] != "RECORD"


@dataclass(frozen=True)
class Model:
    """What the model says about a switch, by the figures of a status (docs/papers.md: D2)."""

    k: float | None = None  # of Eq. 6, by hand: then the queue alone decides
    margin: float = 0.2
    dwell_min_s: float = 2.0
    dwell_costs: float = 3.0

    @classmethod
    def of(cls, dual: str) -> Model | None:
        """Returns the model by which a job with these settings decides, or None if it decides by none."""
        mode, *settings = dual.split(",")
        if mode not in ("on", "auto"):
            return None
        known = dict(setting.split("=", 1) for setting in settings)
        return cls(**{name: float(known[name]) for name in vars(cls()) if name in known})

    def pays(self, one: dict[str, Any]) -> bool | None:
        """Returns whether a range should be in Spark, which is ready. None: by its figures it should, but it remembers
        what they do not say. A range of which the figures are not known should not."""
        f = one["figures"]
        names = ("queue_up", "record_rate", "operation_capacity", "fixed_s", "interval_s", "switch_s")
        if any(f.get(name) is None for name in names):
            return False
        own = max(0.0, f["queue"] - f["held_up"])
        if (own if f["queue_soon"] is None else f["queue_soon"]) <= f["queue_up"]:
            return False
        if self.k is not None:
            return True
        arrives, record, spark = f["arrival_rate"], f["record_rate"], f["operation_capacity"]
        if spark <= (1 + self.margin) * record:
            return False
        if arrives < record:  # they will be through with the queue, and Spark has to be sooner
            in_spark_s = (own + arrives * f["switch_s"]) / (spark - arrives) + f["interval_s"] + f["fixed_s"]
            if f["switch_s"] + in_spark_s >= own / (record - arrives):
                return False
        return None if one["did_not_pay"] or one["failed"] else True

    def stays_s(self, one: dict[str, Any]) -> float:
        """Returns for how long a range may stay where it is, whatever its figures are, because it has just come."""
        f = one["figures"]
        return max(self.dwell_min_s, self.dwell_costs * ((f.get("switch_s") or 0.0) + (f.get("return_s") or 0.0)))

    def wrong(self, seen: Seen) -> str | None:
        """Returns what the range should have done by its own figures, and has not, or None."""
        at = seen.switched_at
        if at is not None:
            before = [one for one in seen.samples if at - _LOOKS_S <= one.at <= at]
            if all(self.pays(one.ranges["work"]) is False for one in before):
                return f"switched at {at} s, against its figures: {_figures(before[-1].ranges['work'])}"
            return None
        since: float | None = None
        for sample in seen.samples:
            one = sample.ranges["work"]
            if not self.pays(one):
                since = None
            elif since is None:
                since = sample.at
            elif sample.at - since > self.stays_s(one) + _LOOKS_S:
                return f"not switched, although its figures say so since {since} s: {_figures(one)}"
        return None


def _figures(one: dict[str, Any]) -> str:
    names = ("queue", "queue_soon", "queue_switch", "arrival_rate", "record_rate", "operation_rate")
    figures = {name: one["figures"].get(name) for name in (*names, "operation_capacity")}
    return ", ".join(f"{name} {'?' if value is None else f'{value:,.0f}'}" for name, value in figures.items())


@dataclass(frozen=True)
class Shares:
    """What the parts of micro-batches of the hot key got, by micro-batch and part, and what each process got."""

    parts: dict[int, dict[int, tuple[int, int]]]  # by stage and part: records, and of these hot
    processes: dict[int, int]  # hot records

    @classmethod
    def of(cls, lines: Iterable[str]) -> Shares:
        """Reads what `Work` has noted."""
        parts: dict[int, dict[int, tuple[int, int]]] = {}
        processes: Counter[int] = Counter()
        for line in lines:
            stage, part, process, got, hot = map(int, line.split())
            parts.setdefault(stage, {})[part] = got, hot
            processes[process] += hot
        return cls(parts, dict(processes))

    def largest(self, cores: int) -> float | None:
        """Returns the largest share that one part got of a micro-batch that was of the hot key, among those with enough
        records for all cores. None: there was no such micro-batch."""
        found = []
        for parts in self.parts.values():
            got, hot = (sum(column) for column in zip(*parts.values(), strict=True))
            if got >= _LEAST_A_CORE * cores and hot >= _HOT_SHARE * got:
                found.append(max(hot for _, hot in parts.values()) / hot)
        return max(found, default=None)

    def wrong(self, cores: int) -> str | None:
        """Returns what is wrong with how the hot key was divided among the cores, or None. A part may have twice what
        it would have if all parts were equal."""
        largest = self.largest(cores)
        if largest is None:
            return "no micro-batch of the hot key had enough records for all cores"
        return None if largest <= 2 / cores else f"a part got {largest:.0%} of the hot key, of {cores} cores"

    def story(self, cores: int) -> str:
        """Returns who got how much, in a line."""
        total = max(1, sum(self.processes.values()))
        shares = sorted((hot / total for hot in self.processes.values()), reverse=True)
        largest = self.largest(cores)
        return (
            f"  hot key: {total:,} records in {len(self.parts)} micro-batches of Spark; "
            f"of its {len(shares)} processes {', '.join(f'{share:.1%}' for share in shares)}; "
            f"largest share of a part {'?' if largest is None else f'{largest:.1%}'} (of {cores} cores)"
        )


@dataclass
class Case:
    """One job with bursts of one kind."""

    kind: str
    folder: Path
    tasks: int = 1
    spin: bool = False

    def __post_init__(self) -> None:
        self.flag = Flag(self.folder / "burst")
        self.sink = ps.sinks.Collect()
        self.server: Server | None = None

    def flow(self, name: str) -> ps.Flow:
        """The flow of the kind."""
        flow = ps.Flow(name, parallelism=self.tasks)
        if self.kind in ("socket", "hot"):
            self.server = Server(self.flag, self.kind == "hot")
            lines = flow.read(ps.sources.SocketLines("localhost", self.server.port), name="source", parallelism=1)
            numbers = lines.map(int, name="parse", parallelism=1)
            numbers = numbers if self.tasks == 1 else numbers.rebalance()
        else:
            numbers = flow.read(ps.sources.Generator(int, RATE), name="source", parallelism=1)
            if self.kind == "inside":
                numbers = numbers.flat_map(Several(self.flag), name="several", parallelism=1)
            numbers = numbers.rebalance()
        shares = self.folder / "shares" if self.kind == "hot" else None
        work = Work(self.flag if self.kind == "slow" else None, self.spin, shares)
        numbers.map(work, name="work").key_by(int).count(emit="final", name="count").write(self.sink, name="out")
        return flow

    def wrong(self, read: int) -> str | None:
        """What is wrong with the results of so many records, or None."""
        counts = Counter(dict(self.sink.records()))
        if self.server is not None and counts.pop(HOT, 0) != self.server.hot:
            found = dict(self.sink.records()).get(HOT, 0)
            return f"of {self.server.hot:,} records of the hot key {found:,} were counted"
        right = {1, MORE} if self.kind == "inside" else {1}
        wrong = {number: count for number, count in counts.items() if count not in right}
        missing = [number for number in range(read) if number not in counts]
        if not wrong and not missing and len(counts) == read:
            return None
        return f"of {read:,} records {len(missing)} are missing ({missing[:3]}), {len(wrong)} are wrong ({wrong})"[:300]

    def shares(self) -> Shares:
        """What each core of Spark got of the hot key so far."""
        path = self.folder / "shares"
        return Shares.of(path.read_text().splitlines() if path.exists() else [])

    def close(self) -> None:
        """Ends what the case has started beside the job."""
        if self.server is not None:
            self.server.close()

    def end(self, job: Any) -> int:
        """Ends the input and the job. Returns the number of records that the source has read."""
        if self.server is not None:
            self.server.close()
            job.wait(LIMIT_S, progress=False)
            return self.server.sent
        job.stop()
        return int(job.wait(LIMIT_S, progress=False)["records_read"])


def ranges_of(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The ranges by the operator that gives them their work: a fused source and its parser are the range of "work"."""
    found = {}
    for one in status.get("dual", {}).get("ranges", []):
        found["work" if "work" in one["operators"] else one["operators"][0]] = one
    return found


def watch(job: Any, case: Case, lasts_s: float, calm_s: float = 3.0) -> Seen:
    """One burst, from its beginning until the range has been in the record paradigm, with a short queue, for some
    seconds after its end."""
    seen = Seen(lasts_s)
    flag = Path(case.flag.path)
    flag.touch()
    began = time.monotonic()
    calm_since: float | None = None
    try:
        while True:
            status = job.status()
            at = time.monotonic() - began
            assert status["state"] == "RUNNING", status
            seen.samples.append(Sample(round(at, 2), ranges_of(status)))
            if at >= lasts_s and flag.exists():
                flag.unlink()
            one = seen.samples[-1].ranges["work"]
            calm = at > lasts_s and one["state"] == "RECORD" and one["figures"].get("queue", 0.0) < 2 * RATE
            calm_since = (calm_since or at) if calm else None
            if calm_since is not None and at - calm_since >= calm_s:
                return seen
            assert at < lasts_s + LIMIT_S, f"the burst is not over: {one}"
            time.sleep(0.05)
    finally:
        flag.unlink(missing_ok=True)


def await_calm(job: Any, calm_s: float = 4.0) -> None:
    """Returns when Spark is ready and the job has run as records, without a burst, for a while."""
    since: float | None = None

    def calm() -> bool:
        nonlocal since
        status = job.status()
        assert status["state"] in ("STARTING", "RUNNING", "RECOVERING"), status
        found = ranges_of(status)
        ready = status["dual"]["processes"]["bridge"] is not None and found["work"]["state"] == "RECORD"
        if not ready or (calm_s and is_burst(found["work"])):
            since = None
        elif since is None:
            since = time.monotonic()
        return since is not None and time.monotonic() - since >= calm_s

    wait_until(calm, "Spark is ready, and the job is calm", 2 * LIMIT_S)


def started(case: Case, kind: str, *, dual: Any = "on", cores: int = 8, workers: int = 1, **options: Any) -> Any:
    """The running job of a case."""
    spark = SparkOptions(kind=kind, cores=cores, cpus=0, start_s=LIMIT_S)  # type: ignore[arg-type]
    spark_if_used = None if dual == "off" else spark
    return ps.run(
        case.flow(f"burst-{case.kind}-{time.time_ns():x}"), workers=workers, dual=dual, spark=spark_if_used, **options
    )


def _wrong(
    seen: Seen, model: Model | None, switches: bool | None = None, answered_s: float = ANSWERED_S
) -> Iterator[str]:
    """What was not as it should be. `switches`: whether the range is to switch, in place of what the model says."""
    if set(seen.seen_at) - {"work", "count"}:
        yield f"seen at {seen.seen_at}"
    if seen.seen_at.get("work", 99.0) > SEEN_S:
        yield f"seen only after {seen.seen_at.get('work')} s"
    if switches is not None:
        if (seen.switched_at is not None) != switches:
            yield f"{'not ' if switches else ''}switched"
    elif model is not None and (wrong := model.wrong(seen)) is not None:
        yield wrong
    if seen.switched_at is not None and seen.back_at is None:
        yield "not back"
    if seen.switched_at is not None:
        if seen.answered_at is None:
            yield "no answer from Spark"
        elif seen.answered_at >= answered_s:
            yield f"first answer from Spark only after {seen.answered_at} s"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default=",".join(ALL_KINDS), help="of " + ",".join(ALL_KINDS))
    parser.add_argument("--spark", choices=("raydp", "pyspark"), default="pyspark")
    parser.add_argument("--cores", type=int, default=8, help="of Spark")
    parser.add_argument("--tasks", type=int, default=1)
    parser.add_argument("--spin", action="store_true", help="the operator computes")
    parser.add_argument("--dual", default="on")
    parser.add_argument("--bursts", type=int, default=2)
    parser.add_argument(
        "--switches", choices=("yes", "no"), help="whether the range is to switch; else the model says it"
    )
    parser.add_argument(
        "--answer-s", type=float, default=ANSWERED_S, help="within which Spark's first answer is to come"
    )
    options = parser.parse_args()
    from tests.e2e.switch_campaign import own_cluster

    bad = False
    expected = None if options.switches is None else options.switches == "yes"
    model = Model.of(options.dual)
    with own_cluster(cpus=8):
        for kind in options.kind.split(","):
            with TemporaryDirectory(prefix="bursts-") as folder:
                case = Case(kind, Path(folder), options.tasks, options.spin)
                job = started(case, options.spark, dual=options.dual, cores=options.cores, workers=options.tasks)
                wrong: list[str | None] = []
                in_spark = False
                try:
                    began = time.monotonic()
                    await_calm(job)
                    print(f"{kind}: ready after {time.monotonic() - began:.1f} s", flush=True)
                    for number in range(options.bursts):
                        seen = watch(job, case, LASTS_S[kind])
                        print(f"{kind} on {options.spark}, burst {number + 1}\n{seen.story()}", flush=True)
                        wrong += _wrong(seen, model, expected, options.answer_s)
                        in_spark = in_spark or seen.switched_at is not None
                    wrong.append(case.wrong(case.end(job)))
                    if kind == "hot" and in_spark:
                        shares = case.shares()
                        print(shares.story(options.cores), flush=True)
                        wrong.append(shares.wrong(options.cores))
                finally:
                    job.cancel()
                found = [one for one in wrong if one is not None]
                print(f"{kind}: {'; '.join(found) or 'exact, and as it should be'}", flush=True)
                bad |= bool(found)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
