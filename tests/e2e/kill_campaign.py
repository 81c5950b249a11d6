"""The kill campaign: jobs whose processes are killed at random instants must come to exact results.

    python -m tests.e2e.kill_campaign --kills 200 --seed 1
    python -m tests.e2e.kill_campaign --kills 30 --seed 7 --flow timers --workers 2 --kinds worker,again
    python -m tests.e2e.kill_campaign --kills 50 --moving       tasks move between workers all the time, too
    python -m tests.e2e.kill_campaign --kills 30 --local        jobs in processes of this program, without Ray

A campaign is a row of jobs ("runs"), each with a seed of its own, from which flow, victims and instants follow. Each
reads 20,000 records a second, and several faults happen to it. Processes are killed: a worker, the JobMaster, two of
its processes in the same moment, or a second one while the job recovers from the first ("again"). Or a worker
("pause") or the JobMaster ("pause-master") is paused for 1 to 30 s, mostly for few, by SIGSTOP and SIGCONT; in half of
these cases one is killed meanwhile: the paused process, another worker, or the JobMaster. Only processes of this very
job are killed and paused, by their ids. Or the store is harmed before a process is killed (tests/e2e/store_damage.py):
one file is deleted, shortened or changed ("file"); a file and its copy, or all, and the process is killed when the job
says that it has saved everything anew ("store"); or the process is killed while the disk is "read-only" or "full",
which takes the right to mount one. After all that the job must have FINISHED, its output must be that of a plain loop
over the same records (tests/e2e/recovery_flows.py), and nothing may be left over: hidden files, processes, segments,
epochs.

`--kills` counts the processes that were killed: a pause in which nobody was killed is none of them. The last line says
how many processes were killed, how often one was paused and the store was harmed, and what was left out. A campaign
that killed fewer than it was to has not done what it is for, and its exit code is 1.

Measured of each fault, and from the end of each pause, by a status every 50 ms: how long until the job is RUNNING with
new processes, how long until its sources read at full rate again and what waits in front of tasks is gone; and the
longest time without progress in source tasks that stand before the failure, which are not to notice it, beside that of
tasks downstream of it.

When something is wrong the command that replays the run is printed, and the exit code is 1. The instants come again
only as far as the machine's load does.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.runtime.epochs.coordinator import _tasks_downstream, tasks_on
from tests.e2e import store_damage
from tests.e2e.processes import alive, penstock_segments, wait_gone
from tests.e2e.recovery_flows import FLOWS, RecoveryFlow, hidden_files

RATE = 20_000.0
SECONDS = 12.0  # of records in a run
FAULTS_A_RUN = 8
EMPTY_RUNS = 3  # in a row, without a fault, after which a campaign gives up
KINDS = ("worker", "master", "two", "again", "pause", "pause-master", *store_damage.KINDS)
PAUSE_S = (1.0, 30.0)
SAMPLE_S = 0.05
WINDOW_S = 0.5  # over which a rate is taken
FULL = 0.95  # of the rate that is due
BACKLOG_S = 0.1  # records that wait are gone when they are those of so much time
RUN_LIMIT_S = 300.0
KILL_LIMIT_S = 90.0
GONE_S = 15.0


Process = tuple[str, int]
"""A process of a job: the id of its Ray node, and its process id there."""


@dataclass
class Fault:
    """What was done to a job: words for it, the processes that are gone by it, the workers' processes before it, when
    it began and when it was over, and how many processes were killed."""

    names: list[str]
    going: set[Process]
    before: set[Process]
    began: float
    over: float
    killed: int = 0


@dataclass
class Outcome:
    """One fault and what followed. Times in seconds from the fault; None: could not be seen."""

    kind: str
    names: list[str]
    killed: int  # processes
    at_s: float  # since the job's start
    read: int = 0  # records until then
    running_s: float | None = None
    full_s: float | None = None
    gap_before_s: float | None = None  # the longest time without progress, of tasks before the failure
    gap_downstream_s: float | None = None
    rate_before: float | None = None  # of the sources before the failure while it was dealt with; 1: as always
    gap_status_s: float = 0.0  # between two samples: what can be seen
    node_dead_s: float | None = None  # until Ray said that a node was dead
    replaced: int = 0  # worker processes that others have taken the place of


@dataclass
class Sample:
    """A status, and when it came."""

    at: float
    asked: float
    status: dict[str, Any]

    @property
    def processes(self) -> set[Process]:
        return set(self.workers.values())

    @property
    def workers(self) -> dict[int, Process]:
        return {w["index"]: (w["node_id"], w["pid"]) for w in self.status.get("workers", ())}

    @property
    def progress(self) -> dict[int, int]:
        """The records that each task has made. A task that has not done anything yet is left out."""
        tasks = self.status["tasks"]
        return {task["number"]: task["records_out"] for task in tasks if task["records_in"] or task["records_out"]}


@dataclass
class Run:
    """A run and its faults."""

    flow: str
    seed: int
    faults: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    restarts: int = 0
    error: str | None = None

    @property
    def killed(self) -> int:
        """Processes."""
        return sum(outcome.killed for outcome in self.faults)


class Watch:
    """Looks at a job's status all the time, in a thread of its own."""

    def __init__(self, job: ps.Job) -> None:
        self._job = job
        self.samples: list[Sample] = []
        self._changed = threading.Condition()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(SAMPLE_S):
            asked = time.monotonic()
            try:
                status = self._job.status()
            except Exception as error:
                status = {"state": f"no status: {error!r}", "tasks": []}
            with self._changed:
                self.samples.append(Sample(time.monotonic(), asked, status))
                self._changed.notify_all()

    def wait(self, condition: Callable[[Sample], bool], since: float, limit_s: float) -> Sample:
        """The first sample that was asked for after `since` of which the condition holds, or that shows the job's end.
        TimeoutError."""
        deadline = time.monotonic() + limit_s
        number = 0
        with self._changed:
            while True:
                while number < len(self.samples):
                    sample = self.samples[number]
                    number += 1
                    if sample.asked >= since and (condition(sample) or ended(sample)):
                        return sample
                left = deadline - time.monotonic()
                if left <= 0:
                    last = self.samples[-1].status.plain() if self.samples else {}
                    raise TimeoutError(f"not within {limit_s:g} s; the last status: {json.dumps(last)[:3000]}")
                self._changed.wait(left)

    def close(self) -> None:
        self._over.set()
        self._thread.join(10.0)


def ended(sample: Sample) -> bool:
    return sample.status["state"] in ("FINISHED", "CANCELLED", "FAILED")


def master_process(job: Any) -> Process:
    """The process of a job's JobMaster."""
    import ray

    def where(_: Any) -> Process:
        return ray.get_runtime_context().get_node_id(), os.getpid()

    found: Process = ray.get(job._link.handle.__ray_call__.remote(where), timeout=60)
    return found


def master_pid(job: Any) -> int:
    """The id of this process."""
    return master_process(job)[1]


def silent(status: dict[str, Any]) -> bool:
    """Whether the JobMaster or a worker did not answer."""
    workers = status.get("workers", ())
    return status.get("master_silent_s", 0.0) > 0 or any(worker["silent_s"] > 0 for worker in workers)


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """Stop a process for as long as the block runs; it continues then, unless it was killed."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def pause_and_kill(
    place: Any, rng: random.Random, victim: Process, workers: Sequence[Process], master: Process | None, *, spare: bool
) -> tuple[Process | None, int, str]:
    """Pause a process for a while, mostly a short one, and in half of the cases kill one meanwhile: itself, a worker or
    the JobMaster, if there is one. Returns the one that was to be killed, how many were, and what was done. `place`:
    see ThisMachine; `spare`: nobody is killed."""
    shortest, longest = PAUSE_S
    length_s = shortest + (longest - shortest) * rng.random() ** 3
    also = rng.choice(("nobody", "nobody", "nobody", "itself", "a worker", "JobMaster"))
    at_s = rng.uniform(0.0, min(length_s, 3.0))
    a_worker = rng.choice(workers)
    if also == "JobMaster" and master is None:
        also = "a worker"
    if spare:
        also = "nobody"
    chosen = {"nobody": None, "itself": victim, "a worker": a_worker, "JobMaster": master}[also]
    killed = 0
    with place.paused(victim):
        time.sleep(at_s)
        if chosen is not None:
            killed = place.kill([chosen])
        time.sleep(length_s - at_s)
    return chosen, killed, f"for {length_s:.1f} s" + (f", {also} killed" if killed else "")


class DidNotStart(AssertionError):
    """A job has failed before its first record."""


class ThisMachine:
    """Where the processes of a job are: all on this machine."""

    def kill(self, processes: Iterable[Process]) -> int:
        """End them at once; the number of those that were still there."""
        killed = 0
        for _, pid in processes:
            was_there = alive(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += was_there
        return killed

    def paused(self, process: Process) -> AbstractContextManager[None]:
        """Stop a process for as long as the block runs."""
        return paused(process[1])

    def check_empty(self, seen: set[Process]) -> None:
        """AssertionError, when something of a job that has ended is still there after some seconds."""
        assert penstock_segments() == []
        wait_gone(sorted(pid for _, pid in seen), GONE_S)


class Tormentor:
    """Runs one flow as a job and kills its processes."""

    place: Any = ThisMachine()

    def __init__(
        self,
        made: RecoveryFlow,
        workers: int,
        kinds: Iterator[str],
        rng: random.Random,
        rate: float,
        checkpoints: Path,
        told: Callable[[Outcome], None] = lambda outcome: None,
        moving: bool = False,
        **options: Any,
    ) -> None:
        self.made = made
        self.workers = workers
        self.kinds = kinds
        self.rng = rng
        self.rate = rate
        self.checkpoints = checkpoints
        self.told = told
        self.options = options
        self.local = bool(options.get("local"))  # then there is no JobMaster to kill
        self.moving = moving
        self.moves = 0  # tasks that were moved
        self.faults: list[Outcome] = []
        self.seen: set[Process] = set()
        self.restarts = 0

    @property
    def killed(self) -> int:
        """Processes."""
        return sum(outcome.killed for outcome in self.faults)

    def run(self, faults: int, kills: float = math.inf, wait_s: float = 2.0) -> None:
        """Run the job, with up to so many faults, each after a random wait, until so many processes are killed; then
        look at everything."""
        plan = self.made.flow.plan(self.workers)
        self._downstream = _tasks_downstream(plan)
        self._sources = {task.number for task in plan.tasks if plan.chains[task.chain].source is not None}
        self._placed = {task.number: task.number % self.workers for task in plan.tasks}
        self.started = time.monotonic()
        job = ps.run(
            self.made.flow,
            workers=self.workers,
            max_restarts=1000,
            checkpoints=self.checkpoints,
            **{"placement": "round-robin", **self.options},
        )
        watch = Watch(job)
        try:
            first = watch.wait(lambda s: s.status.get("records_written", 0) > 0, self.started, KILL_LIMIT_S).status
            if first["state"] == "FAILED":
                raise DidNotStart(f"the job did not start: {first['error']}")
            self._note(watch, job)
            if self.moving:
                names = sorted(task["name"] for task in watch.samples[-1].status["tasks"])
                threading.Thread(target=self._move, args=(job, names), daemon=True).start()
            for _ in range(faults):
                if self.killed >= kills or not self._wait(watch, self.rng.uniform(0, wait_s)):
                    break
                self._harm_job(job, watch)
            status = job.wait(RUN_LIMIT_S, progress=False)
            assert status["state"] == "FINISHED", f"the job ended {status['state']}: {status['error']}"
        except BaseException:
            watch.close()
            if watch.samples:  # for whoever looks for the cause
                text = json.dumps(watch.samples[-1].status.plain(), indent=1)
                self.made.directory.parent.mkdir(parents=True, exist_ok=True)
                self.made.directory.with_name("status.json").write_text(text)
            with suppress(Exception):
                job.cancel()
                job.wait(30, progress=False)
            raise
        watch.close()
        for sample in watch.samples:
            self.seen |= sample.processes
        self.made.check()
        self._finished(watch)
        left = hidden_files(self.made.directory)
        assert not left, f"hidden files are left: {left}"
        stored = [str(path) for path in self.checkpoints.rglob("*")]
        assert not stored, f"epochs are left: {stored[:10]}"
        self.place.check_empty(self.seen)

    def _finished(self, watch: Watch) -> None:
        """Looks at what a job was like that has finished and was exact."""

    def _note(self, watch: Watch, job: Any) -> None:
        last = watch.samples[-1]
        placed = {task["number"]: task["worker"] for task in last.status["tasks"]}
        assert placed == self._placed, f"tasks are placed otherwise: {placed}"
        self.seen |= last.processes | self._masters(job)

    def _masters(self, job: Any) -> set[Process]:
        return set() if self.local else {master_process(job)}

    def _move(self, job: Any, names: list[str]) -> None:
        """Move tasks to other workers all the time, until the job has ended."""
        chance = random.Random(self.rng.random())
        over = threading.Event()
        while job.state not in ("FINISHED", "CANCELLED", "FAILED"):
            wanted = {name: chance.randrange(self.workers) for name in chance.sample(names, chance.randint(1, 3))}
            with suppress(ps.JobError):  # the JobMaster was killed, or the tasks have ended
                job.migrate(wanted)
                self.moves += len(wanted)
            over.wait(chance.uniform(0.0, 0.5))

    def _wait(self, watch: Watch, seconds: float) -> bool:
        """Wait; False when the job has ended meanwhile."""
        since = time.monotonic()
        return not ended(watch.wait(lambda s: s.at - since >= seconds, since, KILL_LIMIT_S))

    def _choose(self, job: Any, watch: Watch, kind: str) -> tuple[list[str], list[Process], set[Process]]:
        """Names of the victims, the victims, and the processes that end with them."""
        workers = watch.samples[-1].workers
        pick = self.rng.sample(sorted(workers), min(2, len(workers)))
        if self.local and kind == "master":
            kind = "worker"
        with_master = kind == "master" or (
            kind == "two" and not self.local and (len(workers) < 2 or self.rng.random() < 0.5)
        )
        chosen = [] if kind == "master" else pick[:1] if with_master or kind != "two" else pick
        names = [f"worker {worker}" for worker in chosen]
        victims = [workers[worker] for worker in chosen]
        going = set(victims)
        if with_master:
            try:
                victims.append(master_process(job))
            except Exception:
                if job.status()["state"] != "FINISHED":
                    raise
                return names, victims, going  # it has ended in this moment
            names.append("JobMaster")
            going = {*workers.values(), *victims}
        self.seen |= going
        self.rng.shuffle(victims)
        return names, victims, going

    def _harm_job(self, job: Any, watch: Watch) -> None:
        before = watch.samples[-1]
        if ended(before):
            return
        kind = next(self.kinds)
        fault = self._fault(job, watch, kind)
        if fault is None:
            return
        at_s, read = fault.began - self.started, before.status.get("records_read", 0)
        outcome = Outcome(kind, fault.names, fault.killed, at_s, read)
        self.faults.append(outcome)
        self._follow(job, watch, outcome, fault)
        self.told(outcome)

    def _fault(self, job: Any, watch: Watch, kind: str) -> Fault | None:
        """Do to the job what the kind says. None: it was about to end, and nothing was done."""
        aim = {"again": "worker", "pause": "worker", "pause-master": "master"}.get(kind, kind)
        if kind in store_damage.KINDS:
            aim = self.rng.choice(("worker", "worker", "two", "master"))
        names, victims, going = self._choose(job, watch, aim)
        if not victims:
            return None
        before = watch.samples[-1].processes
        if kind.startswith("pause"):
            going, killed, told = self._pause_one(job, watch, victims[0])
            at = time.monotonic()
            return Fault([f"{names[0]} {told}"], going, before, at, at, killed)
        killed = 0
        if kind in store_damage.KINDS:
            harmed = self._harm_store(watch, kind, victims)
            if harmed is None:
                return None
            killed, told = harmed
            names = [f"{told}, {' + '.join(names)}"]
        at = began = time.monotonic()
        killed += self.place.kill(victims)  # of a process that is dead already nothing is known
        if kind == "again":
            delay = self.rng.uniform(0, 1.5)
            then = self.rng.choice(("worker", "master", "worker"))
            if not ended(watch.wait(lambda s: s.at - began >= delay, began, KILL_LIMIT_S)):
                more, victims, also = self._choose(job, watch, then)
                at = time.monotonic()
                killed += self.place.kill(victims)
                going |= also
                names.append(f"{at - began:.2f} s later {', '.join(more)}")
        return Fault(names, going, before, began, at, killed)

    def _follow(self, job: Any, watch: Watch, outcome: Outcome, fault: Fault) -> None:
        """Measure what follows a fault, until the job runs at full rate again."""
        at, going = fault.over, fault.going

        def running(sample: Sample) -> bool:
            return (
                sample.status["state"] == "RUNNING"
                and not sample.processes & going
                and len(sample.processes) == self.workers
                and not self._sources - sample.progress.keys()
                and not silent(sample.status)
            )

        back = watch.wait(running, at, KILL_LIMIT_S)
        if running(back):
            outcome.running_s = back.at - at
            outcome.replaced = len(fault.before - back.processes)
            full = watch.wait(lambda s: running(s) and self._full(watch, s, back.at), at, KILL_LIMIT_S)
            if running(full) and self._full(watch, full, back.at) and not self._ending(full):
                outcome.full_s = full.at - at
            if outcome.kind in ("worker", "two") and "JobMaster" not in fault.names and not self.moving:
                self._gaps(watch, outcome, at, back, [int(name.split()[1]) for name in fault.names])

    def _harm_store(self, watch: Watch, kind: str, victims: list[Process]) -> tuple[int, str] | None:
        """Harm the store, so that these processes may be killed; how many were already, and what was done. None: the
        job has ended meanwhile."""
        store = self.checkpoints / self.made.flow.name
        if kind in store_damage.MOUNTED:
            length_s = self.rng.uniform(1.0, 3.0)
            with store_damage.closed(self.checkpoints, kind):
                time.sleep(length_s / 2)
                killed = self.place.kill(victims)
                time.sleep(length_s / 2)
            return killed, f"{kind} for {length_s:.1f} s"
        if kind == "file":
            return 0, store_damage.harm_one(store, self.rng)
        before = watch.samples[-1].status.get("epochs", {})
        told = store_damage.harm_much(store, self.rng)
        at = time.monotonic()

        def noticed(sample: Sample) -> bool:
            epochs = sample.status.get("epochs", {})
            return epochs.get("damage") != before.get("damage")

        seen = watch.wait(noticed, at, KILL_LIMIT_S)
        complete = seen.status.get("epochs", {}).get("complete", 0)

        def anew(sample: Sample) -> bool:
            return bool(sample.status.get("epochs", {}).get("complete", 0) > complete)

        return None if ended(watch.wait(anew, at, KILL_LIMIT_S)) else (0, told)

    def _pause_one(self, job: Any, watch: Watch, victim: Process) -> tuple[set[Process], int, str]:
        """Pause a process, and perhaps kill one meanwhile; the processes that have gone with that, how many were
        killed, and what was done. What is waited for here is part of the fault."""
        workers = sorted(watch.samples[-1].processes)
        masters = self._masters(job)
        master = next(iter(masters), None)
        self.seen |= {*workers, *masters}
        chosen, killed, told = pause_and_kill(self.place, self.rng, victim, workers, master, spare=False)
        going = set() if chosen is None else {*workers, chosen} if chosen == master else {chosen}
        return going, killed, told

    def _unfinished(self, sample: Sample) -> set[int]:
        return {t["number"] for t in sample.status["tasks"] if t["number"] in self._sources and not t.get("finished")}

    def _ending(self, sample: Sample) -> bool:
        return not self._unfinished(sample)

    def _full(self, watch: Watch, sample: Sample, since: float) -> bool:
        """Whether sources read at the rate that is due, and nothing much waits; or the sources have ended."""
        if self._ending(sample):
            return True
        number = watch.samples.index(sample)
        earlier = next(s for s in reversed(watch.samples[:number]) if sample.at - s.at >= WINDOW_S)
        left = self._unfinished(sample)
        if earlier.asked < since or self._unfinished(earlier) != left:
            return False
        due = self.rate * len(left) / len(self._sources)
        rate = (sample.status["records_read"] - earlier.status["records_read"]) / (sample.at - earlier.at)
        waiting = sum(task.get("queued", 0) + task.get("unsent", 0) for task in sample.status["tasks"])
        return rate >= FULL * due and waiting <= BACKLOG_S * self.rate

    def _gaps(self, watch: Watch, outcome: Outcome, at: float, back: Sample, victims: list[int]) -> None:
        """How long tasks made no progress, until half a second after the job ran again."""
        lost = tasks_on(self._placed, victims)
        going_back = lost.union(*(self._downstream[task] for task in lost))
        until = back.at + 0.5
        watch.wait(lambda s: s.at >= until, at, KILL_LIMIT_S)
        samples = [s for s in watch.samples if at - 2 * SAMPLE_S <= s.at <= until]
        active = self._unfinished(samples[-1])
        if not active or len(samples) < 3:
            return
        outcome.gap_status_s = max(b.at - a.at for a, b in pairwise(samples))
        staying = active - going_back
        if staying:
            outcome.gap_before_s = max(_longest_gap(samples, task) for task in staying)
            spent = samples[-1].at - samples[0].at
            made, usual = 0, 0.0
            for task in staying:
                made += samples[-1].progress[task] - samples[0].progress[task]
                usual += self._usual(watch, task, at) * spent
            outcome.rate_before = made / usual if usual else None
        downstream = going_back - self._sources
        if downstream and not self._ending(samples[-1]):
            outcome.gap_downstream_s = max(_longest_gap(samples, task) for task in downstream)

    def _usual(self, watch: Watch, task: int, at: float) -> float:
        """The records a second that a task makes of the records due to it."""
        last = [s for s in watch.samples if s.at <= at and task in s.progress][-1]
        read = last.status["operators"][self.made.sources[0]]["records_out"]
        made = sum(last.progress[source] for source in self._sources if source in last.progress)
        return self.rate / len(self._sources) * made / read if read else 0.0


def _longest_gap(samples: list[Sample], task: int) -> float:
    last: int | None = None
    since = samples[0].at
    longest = 0.0
    for sample in samples:
        count = sample.progress.get(task)
        if count is not None and count != last:
            longest = max(longest, sample.at - since)
            last, since = count, sample.at
    return max(longest, samples[-1].at - since)


# --- the campaign --------------------------------------------------------------------------------------------------


@dataclass
class Figures:
    """What comes of a campaign. `wanted`: so many processes are to be killed; or, where not all faults are kills, so
    many faults are to happen (`of_faults`). `left_out`: kinds that cannot be had here."""

    kinds: tuple[str, ...] = KINDS
    wanted: int = 0
    of_faults: bool = False
    runs: list[Run] = field(default_factory=list)
    left_out: tuple[str, ...] = ()

    def faults(self) -> list[Outcome]:
        return [outcome for run in self.runs for outcome in run.faults]

    def count(self, *kinds: str) -> int:
        """The faults of these kinds."""
        return sum(outcome.kind in kinds for outcome in self.faults())

    @property
    def killed(self) -> int:
        """Processes."""
        return sum(run.killed for run in self.runs)

    @property
    def done(self) -> int:
        """How much has happened of what was wanted."""
        return len(self.faults()) if self.of_faults else self.killed

    @property
    def failed(self) -> int:
        """Runs."""
        return sum(run.error is not None for run in self.runs)

    @property
    def good(self) -> bool:
        """All that was wanted has happened, and each run was exact."""
        return self.done >= self.wanted and not self.failed

    def verdict(self) -> str:
        """All that in a line."""
        of = f" of {self.wanted}"
        parts = [
            f"{len(self.runs)} runs, {self.failed} failed",
            *([f"{len(self.faults())}{of} faults"] if self.of_faults else []),
            f"{self.killed}{'' if self.of_faults else of} processes killed",
            f"{self.count('pause', 'pause-master')} pauses",
            f"{self.count(*store_damage.KINDS)} times the store was harmed",
        ]
        without = f"; without {' and '.join(self.left_out)}: no disk can be mounted here" if self.left_out else ""
        return f"{'good' if self.good else 'NOT GOOD'}: {', '.join(parts)}{without}"

    def summary(self) -> dict[str, Any]:
        faults = self.faults()
        groups = {"all": faults}
        for kind in self.kinds:
            groups[kind] = [outcome for outcome in faults if outcome.kind == kind]
        return {
            "runs": len(self.runs),
            "failed": self.failed,
            "good": self.good,
            "faults": len(faults),
            "killed": self.killed,
            "left_out": self.left_out,
            **{
                name: {
                    "faults": len(group),
                    "killed": sum(outcome.killed for outcome in group),
                    "running_s": quantiles(outcome.running_s for outcome in group),
                    "full_s": quantiles(outcome.full_s for outcome in group),
                    "node_dead_s": quantiles(outcome.node_dead_s for outcome in group),
                    "replaced": sum(outcome.replaced for outcome in group),
                }
                for name, group in groups.items()
                if group
            },
            "gap_before_s": quantiles(outcome.gap_before_s for outcome in faults),
            "gap_downstream_s": quantiles(outcome.gap_downstream_s for outcome in faults),
            "gap_status_s": quantiles(outcome.gap_status_s or None for outcome in faults),
            "rate_before": quantiles(outcome.rate_before for outcome in faults),
        }


def quantiles(values: Any) -> dict[str, float | int] | None:
    """Median, 99th percentile and extremes of the numbers among them."""
    numbers = sorted(value for value in values if value is not None)
    if not numbers:
        return None
    return {
        "n": len(numbers),
        "min": round(numbers[0], 3),
        "p50": round(statistics.median(numbers), 3),
        "p99": round(numbers[min(len(numbers) - 1, int(0.99 * len(numbers)))], 3),
        "max": round(numbers[-1], 3),
    }


def machine() -> dict[str, Any]:
    import ray

    with open("/proc/cpuinfo") as cpus:
        model = next((line.split(":", 1)[1].strip() for line in cpus if line.startswith("model name")), "unknown")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "ray": ray.__version__,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


@contextmanager
def own_cluster(workers: int) -> Iterator[None]:
    """A Ray cluster of this process."""
    import ray

    from penstock.actors.cluster import NAMESPACE

    ray.init(
        address="local",
        num_cpus=2 * workers + 4,
        namespace=NAMESPACE,
        include_dashboard=False,
        object_store_memory=128 * 1024 * 1024,
        logging_level="error",
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()


def rotate(kinds: list[str], rng: random.Random) -> Iterator[str]:
    """The kinds again and again, in an order that is not always the same."""
    while True:
        yield from rng.sample(kinds, len(kinds))


def seconds(value: float | None) -> str:
    return "     -" if value is None else f"{value:6.2f}"


def replayed(options: argparse.Namespace, name: str, seed: int, left: int) -> str:
    return (
        f"python -m tests.e2e.kill_campaign --seed {seed} --runs 1 --kills {left} --flow {name} "
        f"--workers {options.workers} --kinds {options.kinds} --rate {options.rate:g} --seconds {options.seconds:g} "
        f"--interval {options.interval:g} --per-run {options.per_run}{' --moving' * options.moving}"
        f"{' --local' * options.local}"
    )


def campaign(
    options: argparse.Namespace,
    place: Path,
    make: Callable[..., Tormentor] = Tormentor,
    figures: Figures | None = None,
    replay: Callable[[argparse.Namespace, str, int, int], str] = replayed,
    flows: Sequence[str] = tuple(FLOWS),
) -> Figures:
    """Run jobs until there were as many kills (or faults, see Figures) as wanted, or EMPTY_RUNS in a row without a
    fault. `make`: of what runs one of them; `replay`: the command that repeats a run; `flows`: those that take turns
    when the options name none."""
    figures = figures or Figures()
    figures.wanted = options.kills
    kinds = options.kinds.split(",")
    if (mounted := set(kinds) & set(store_damage.MOUNTED)) and not store_damage.can_mount(place / "disk"):
        figures.left_out = tuple(kind for kind in kinds if kind in mounted)
        kinds = [kind for kind in kinds if kind not in mounted]
        mounted = set()
    flows = [options.flow] if options.flow else flows
    begun = time.monotonic()
    number = empty = 0
    while kinds and empty < EMPTY_RUNS and figures.done < options.kills and number < (options.runs or math.inf):
        seed = options.seed + number
        name = flows[number % len(flows)]
        number += 1
        left = options.kills - figures.done
        run = Run(name, seed)
        figures.runs.append(run)
        rng = random.Random(f"{name} {seed}")
        directory = place / f"run-{number}"
        made = FLOWS[name](
            f"campaign-{os.getpid()}-{number}",
            directory / "out",
            int(options.rate * options.seconds),
            options.rate,
            seed,
        )

        def told(outcome: Outcome, run: Run = run) -> None:
            run.faults.append(outcome)
            print(
                f"[{figures.done:4}/{options.kills}] {time.monotonic() - begun:6.0f} s  {run.flow} seed "
                f"{run.seed} at {outcome.at_s:5.1f} s: {outcome.kind:6} {' + '.join(outcome.names):34} running "
                f"{seconds(outcome.running_s)} s  full rate {seconds(outcome.full_s)} s  sources elsewhere stood "
                f"{seconds(outcome.gap_before_s)} s, tasks downstream {seconds(outcome.gap_downstream_s)} s"
                f"{f'  {outcome.replaced} workers replaced' if outcome.replaced else ''}"
                f"{f'  Ray noticed after {outcome.node_dead_s:.1f} s' if outcome.node_dead_s else ''}",
                flush=True,
            )

        tormentor = make(
            made,
            options.workers,
            rotate(kinds, rng),
            rng,
            options.rate,
            directory / "epochs",
            told,
            moving=options.moving,
            epoch_interval_s=options.interval,
            local=options.local,
        )
        since = time.monotonic()
        try:
            with store_damage.small_disk(directory / "epochs") if mounted else nullcontext():
                if figures.of_faults:
                    tormentor.run(min(options.per_run, left))
                else:
                    tormentor.run(options.per_run, left)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            run.error = f"{type(error).__name__}: {error}"
            traceback.print_exc(file=sys.stdout)
            print(
                f"FAILED: {name} seed {seed}; files in {directory}. To replay:\n    "
                f"{replay(options, name, seed, left)}",
                flush=True,
            )
        else:
            shutil.rmtree(directory, ignore_errors=True)
            print(
                f"            {name} seed {seed}: exact after {len(run.faults)} faults, {run.killed} processes killed"
                f"{f' and {tormentor.moves} moves' if options.moving else ''}, {made.records:,} records, "
                f"{time.monotonic() - since:.0f} s",
                flush=True,
            )
        run.seconds = time.monotonic() - since
        if run.error is not None and not options.go_on:
            break
        empty = 0 if run.faults or run.error is not None else empty + 1
        if empty:
            print("no fault fell into this run; give more --seconds", flush=True)
    return figures


def show(figures: Figures) -> None:
    summary = figures.summary()
    print(f"\n{'s from the fault':34} {'n':>5} {'min':>8} {'median':>8} {'p99':>8} {'max':>8}")

    def line(title: str, found: dict[str, float] | None) -> None:
        if found is not None:
            numbers = " ".join(f"{found[what]:8.2f}" for what in ("min", "p50", "p99", "max"))
            print(f"{title:34} {found['n']:5} {numbers}")

    for kind in ("all", *figures.kinds):
        if kind in summary:
            line(f"RUNNING again: {kind}", summary[kind]["running_s"])
            line(f"full rate again: {kind}", summary[kind]["full_s"])
            line(f"Ray said that the node was dead: {kind}", summary[kind]["node_dead_s"])
    print("\nlongest time without progress, s")
    line("sources before the failure", summary["gap_before_s"])
    line("tasks downstream", summary["gap_downstream_s"])
    line("(between two looks)", summary["gap_status_s"])
    line("rate of those sources, 1 = as due", summary["rate_before"])
    print(f"\n{figures.verdict()}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.kill_campaign", description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="processes to be killed")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; the next one's is one more")
    parser.add_argument("--flow", choices=list(FLOWS), help="default: all in turn")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {','.join(KINDS)}")
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of records in a run")
    parser.add_argument("--interval", type=float, default=1.0, help="between epochs, s")
    parser.add_argument("--per-run", type=int, default=FAULTS_A_RUN, help="faults in a run, at most")
    parser.add_argument("--runs", type=int, default=0, help="at most; 0: as many as the kills take")
    parser.add_argument("--moving", action="store_true", help="move tasks between workers all the time, too")
    parser.add_argument("--local", action="store_true", help="jobs in processes of this program, without Ray")
    parser.add_argument("--go-on", action="store_true", help="after a run that failed, too")
    parser.add_argument("--json", type=Path, help="append the figures to this file, as one line")
    options = parser.parse_args()
    wrong = set(options.kinds.split(",")) - set(KINDS)
    if wrong:
        parser.error(f"--kinds: {', '.join(sorted(wrong))}; there are {', '.join(KINDS)}")
    if options.local:
        kept = [kind for kind in options.kinds.split(",") if kind not in ("master", "pause-master")]
        options.kinds = ",".join(kept) or parser.error("--local: there is no JobMaster to kill")
    place = Path(tempfile.mkdtemp(prefix="penstock-kills-"))
    before = machine()
    print(f"{before['cpu']}, {before['cores']} cores, load {before['load'][0]:.1f}; files in {place}", flush=True)
    with nullcontext() if options.local else own_cluster(options.workers):
        figures = campaign(options, place)
    show(figures)
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        line = {
            "campaign": "kill",
            "machine": before,
            "options": settings,
            "summary": figures.summary(),
            "runs": [asdict(run) for run in figures.runs],
        }
        with options.json.open("a") as out:
            out.write(json.dumps(line) + "\n")
    if not figures.failed:
        shutil.rmtree(place, ignore_errors=True)
    return 0 if figures.good else 1


if __name__ == "__main__":
    sys.exit(main())
