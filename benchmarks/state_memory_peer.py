"""A program that runs a job with much keyed state, in a process of its own, and looks at the memory of the job's
processes: `python -m benchmarks.state_memory_peer JSON`. It prints what it has found, and ends with an error when the
results of the job are wrong.

In a local job the JobMaster's part is played by this very process, so it has nothing in memory but its program. All
waiting is for conditions, so a busy machine makes a run longer, and not wrong.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import penstock as ps
from penstock.runtime.sources import Reader, SourceContext, Split

if TYPE_CHECKING:
    from penstock.jobs.job import Job

WORKERS = 2
LIMIT_S = 1800.0
_EVERY_S = 0.02  # between two looks at the memory of processes that come and go
_COMPACTION = b"penstock.runtime.epochs.compaction"
_COMPACTED = 3  # so many compactions are waited for before the savepoint, and again before the end
_PRIME = 2_654_435_761
_BEGAN = time.monotonic()


# --- the flow ------------------------------------------------------------------------------------------------------


def number_of(made: int, task: int, tasks: int, keys: int) -> int:
    """The number of the key of the record that a source task makes after so many others: each key of the task once,
    and then keys of all tasks, which look like random ones."""
    before = made * tasks + task
    return before if before < keys else (before * _PRIME >> 7) % keys


class Numbers(ps.sources.Source):
    """Makes each key once, as fast as possible, and then changes keys at a rate (records a second and task), until a
    file says that it is enough. At the end of its life each reader writes down how many records it has made."""

    bounded = True

    def __init__(self, keys: int, rate: int, place: str, make: Callable[[int], Any]) -> None:
        self._keys = keys
        self._rate = rate
        self._place = place
        self._make = make

    def splits(self, parallelism: int) -> list[Split]:
        return [Split(str(task), (task, parallelism)) for task in range(parallelism)]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        (split,) = splits
        return _NumbersReader(self._keys, self._rate, self._place, self._make, split)


class _NumbersReader(Reader):
    def __init__(self, keys: int, rate: int, place: str, make: Callable[[int], Any], split: Split) -> None:
        self._keys, self._rate, self._place, self._make = keys, rate, place, make
        self._split = split.name
        self._task, self._tasks = split.payload
        self._fill = (keys - self._task + self._tasks - 1) // self._tasks
        self._made: int = split.offset or 0
        self._paced_from = (self._made, time.monotonic())

    def read(self, limit: int) -> list[Any]:
        if not os.path.exists(f"{self._place}/begin"):
            return []
        if os.path.exists(f"{self._place}/enough"):
            draft = Path(self._place, f"made-{self._split}.{os.getpid()}")
            draft.write_text(str(self._made))
            draft.rename(Path(self._place, f"made-{self._split}"))
            self.finished = True
            return []
        began, at = self._paced_from
        if self._made < self._fill:
            until = min(self._fill, self._made + limit)
            self._paced_from = (until, time.monotonic())
        else:
            until = min(self._made + limit, began + int((time.monotonic() - at) * self._rate))
        make, task, tasks, keys = self._make, self._task, self._tasks, self._keys
        records = [make(number_of(made, task, tasks, keys)) for made in range(self._made, until)]
        self._made = max(self._made, until)
        return records

    def ready_in(self) -> float:
        return 0.0 if 0 < self._made < self._fill else 0.01

    def offsets(self) -> dict[str, Any]:
        return {self._split: self._made}


def text_of(number: int) -> str:
    """A key of ten characters."""
    return f"{number:010d}"


def value_of(key: str, count: int, size: int) -> str:
    """The text of this many characters that a key has in its state after this many records."""
    return f"{key}-{count}-".ljust(size, "x")


class Kept(ps.ProcessFunction):
    """Has, for each key, the number of its records and a text; at the end, emits the numbers, and whether the texts are
    those that they must be."""

    def __init__(self, size: int) -> None:
        self._size = size

    def process(self, ctx: ps.ProcessContext, key: str, record: str) -> None:
        count = ctx.get((0, ""))[0] + 1
        ctx.set((count, value_of(key, count, self._size)))

    def finish(self, ctx: ps.ProcessContext) -> Iterator[str]:
        for key, (count, text) in ctx.state.items():
            yield f"{key} {count if text == value_of(key, count, self._size) else 'wrong'}"


def same(record: str) -> str:
    """The key of a record that is one."""
    return record


# --- memory --------------------------------------------------------------------------------------------------------


def memory(pid: int, which: str = "VmRSS") -> int:
    """The memory of a process in bytes: VmRSS is what it has now, VmHWM the most that it ever had. 0: it is gone."""
    with suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith(which):
                return int(line.split()[1]) << 10
    return 0


def forget_peak(pid: int) -> None:
    """Lets the VmHWM of a process begin again at what it has now."""
    with open(f"/proc/{pid}/clear_refs", "w") as file:
        file.write("5")


class Watch(threading.Thread):
    """Looks at the most memory that the JobMaster, and the processes that it starts to compact snapshots, have had."""

    def __init__(self, master: int) -> None:
        super().__init__(name="watch", daemon=True)
        self.master = 0
        self.compactions: dict[int, int] = {}  # by process id
        self._pid = master
        self._over = threading.Event()

    def run(self) -> None:
        others: set[int] = set()
        while not self._over.wait(_EVERY_S):
            self.look(others)

    def look(self, others: set[int]) -> None:
        """Looks once. `others`: children that do not compact."""
        self.master = max(self.master, memory(self._pid, "VmHWM"))
        for pid in self._children() - others:
            if pid not in self.compactions and not (compacts := _compacts(pid, self._pid)):
                if compacts is False:
                    others.add(pid)
                continue
            self.compactions[pid] = max(self.compactions.get(pid, 0), memory(pid, "VmHWM"))

    def end(self) -> None:
        """Looks a last time, and no more."""
        self._over.set()
        self.join()
        self.master = max(self.master, memory(self._pid, "VmHWM"))

    def _children(self) -> set[int]:
        found: set[int] = set()
        for children in Path(f"/proc/{self._pid}/task").glob("*/children"):
            with suppress(OSError):
                found |= set(map(int, children.read_text().split()))
        return found


def _compacts(pid: int, parent: int) -> bool | None:
    """Whether a child compacts snapshots. None: it has gone, or does not run its own program yet."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        same_program = command == Path(f"/proc/{parent}/cmdline").read_bytes()
    except OSError:
        return None
    return None if same_program or not command else _COMPACTION in command


# --- a job whose state is large ------------------------------------------------------------------------------------


@dataclass
class Found:
    """What a run has found, in bytes unless said otherwise."""

    state: int  # of all keys, as a savepoint has them
    keys: int
    master: int  # the most that the JobMaster had
    master_at_first: int  # what it had before the first record
    compaction: int  # the most that a process that compacts had
    compactions: int  # number of them
    worker: int  # what the larger worker had with all keys
    worker_at_first: int
    running: int  # the most that a worker had until the kill
    restoring: int  # the most that the worker of the killed process had until the job ran again, in a new process
    going_back: int  # the most that the other worker, which goes back, too, had from the kill until the job ran again
    restored_s: float


def wait_for(job: Job, condition: Callable[[dict[str, Any]], object], what: str) -> dict[str, Any]:
    """Waits until a condition holds of the job's status, and returns this status."""
    say(f"waits until {what}")
    until = time.monotonic() + LIMIT_S
    while not condition(status := job.status()):
        if status["state"] in ("FINISHED", "FAILED", "CANCELLED") or time.monotonic() > until:
            raise SystemExit(f"the job has ended, or {LIMIT_S:g} s were not enough until {what}: {status}")
        time.sleep(0.1)
    return status


def say(what: str) -> None:
    """Tells on stderr how far the program is."""
    print(f"{time.monotonic() - _BEGAN:.1f} s: {what}", file=sys.stderr, flush=True)


def _master_pid(job: Job, local: bool) -> int:
    if local:
        return os.getpid()
    ray = importlib.import_module("ray")
    return int(ray.get(job._link.handle.__ray_call__.remote(lambda self: os.getpid())))


def _pids(job: Job) -> list[int]:
    return [worker["pid"] for worker in job.status()["workers"]]


def _filled(status: dict[str, Any], keys: int) -> bool:
    return bool(status["operators"]["kept"]["records_in"] >= keys)


def _wait_for_epochs(job: Job) -> None:
    """Waits until epochs are complete that began after this."""
    begun = int(job.status()["epochs"]["begun"])
    wait_for(job, lambda status: status["epochs"]["complete"] >= begun + 2, f"epoch {begun + 2} is complete")


def large(local: bool, place: str, keys: int, size: int, rate: int, interval_s: float) -> Found:
    """Runs a job with this state; kills one of its workers after compactions and a savepoint; checks its results."""
    flow = ps.Flow("bench-state-memory", parallelism=WORKERS)
    records = flow.read(Numbers(keys, rate, place, text_of), name="numbers")
    records.key_by(same).process(Kept(size), name="kept").write(ps.sinks.Files(f"{place}/out"))
    options: dict[str, Any] = {"local": True} if local else {"address": "local"}
    job = ps.run(flow, workers=WORKERS, epoch_interval_s=interval_s, checkpoints=f"{place}/epochs", **options)
    wait_for(job, lambda status: status["state"] == "RUNNING" and status["epochs"]["complete"], "an epoch is complete")
    master = _master_pid(job, local)
    watch = Watch(master)
    watch.start()
    at_first, worker_at_first = memory(master), max(map(memory, _pids(job)))
    Path(place, "begin").touch()
    wait_for(job, lambda status: _filled(status, keys), "all keys have state")
    _wait_for_epochs(job)
    wait_for(job, lambda _: len(watch.compactions) >= _COMPACTED, f"there were {_COMPACTED} compactions")
    pids = _pids(job)
    worker = max(map(memory, pids))
    say("takes a savepoint")
    saved = Path(job.savepoint(f"{place}/saved"), "savepoint", "snapshots")
    state = sum(path.stat().st_size for path in saved.iterdir())
    running = max(memory(pid, "VmHWM") for pid in pids)
    for pid in pids:
        forget_peak(pid)
    say(f"kills a worker; the workers have {[memory(pid) for pid in pids]} bytes")
    killed = time.monotonic()
    os.kill(pids[0], signal.SIGKILL)
    wait_for(job, _runs_again, "the job runs again")
    restored_s = time.monotonic() - killed
    peaks = {pid: memory(pid, "VmHWM") for pid in _pids(job)}
    say(f"runs again; the workers had {peaks} bytes at most")
    _wait_for_epochs(job)
    seen = len(watch.compactions)
    wait_for(job, lambda _: len(watch.compactions) >= seen + _COMPACTED, f"there were {_COMPACTED} more compactions")
    say("ends")
    Path(place, "enough").touch()
    status = job.wait(LIMIT_S, progress=False)
    watch.end()
    if status["epochs"]["restarts"] != 1:
        raise SystemExit(f"one kill, and {status['epochs']}")
    _check(Path(place), keys)
    return Found(
        state=state,
        keys=keys,
        master=watch.master,
        master_at_first=at_first,
        compaction=max(watch.compactions.values()),
        compactions=len(watch.compactions),
        worker=worker,
        worker_at_first=worker_at_first,
        running=running,
        restoring=max(peak for pid, peak in peaks.items() if pid not in pids),
        going_back=max(peak for pid, peak in peaks.items() if pid in pids),
        restored_s=restored_s,
    )


def _runs_again(status: dict[str, Any]) -> bool:
    return bool(status["state"] == "RUNNING" and status["epochs"]["restarts"])


def _check(place: Path, keys: int) -> None:
    """Compares the number of records of each key with what the sources have made."""
    counts = [0] * keys
    for task in range(WORKERS):
        for made in range(int((place / f"made-{task}").read_text())):
            counts[number_of(made, task, WORKERS, keys)] += 1
    seen = 0
    for part in (place / "out").iterdir():
        with part.open() as lines:
            for line in lines:
                key, count = line.split()
                if count != str(counts[int(key)]):
                    raise SystemExit(f"key {key} has {count} records, and must have {counts[int(key)]}")
                seen += 1
    if seen != keys:
        raise SystemExit(f"{seen:,} keys have state, and there are {keys:,}")


# --- what a key costs ----------------------------------------------------------------------------------------------


def _count(stream: ps.Stream) -> ps.Stream:
    return stream.map(text_of).key_by(same).count(name="kept")


def _sum(stream: ps.Stream) -> ps.Stream:
    return stream.map(_with_number).key_by(_first).sum(_second, name="kept")


def _mean(stream: ps.Stream) -> ps.Stream:
    return stream.map(_with_text).key_by(_first).mean(_second, name="kept")


def _process(stream: ps.Stream) -> ps.Stream:
    return stream.map(text_of).key_by(same).process(_keep_fields, name="kept")


def _with_number(number: int) -> tuple[int, float]:
    return number, number / 7


def _with_text(number: int) -> tuple[str, float]:
    return text_of(number), number / 7


def _first(record: tuple[Any, float]) -> Any:
    return record[0]


def _second(record: tuple[Any, float]) -> float:
    return record[1]


def _keep_fields(ctx: ps.ProcessContext, key: str, record: str) -> None:
    number = int(record)
    ctx.set({"visits": number, "spent": number / 7, "last": record[::-1]})


KINDS: dict[str, Callable[[ps.Stream], ps.Stream]] = {
    "count": _count,
    "sum": _sum,
    "mean": _mean,
    "process": _process,
}


def a_key(kind: str, place: str, keys: int) -> dict[str, float]:
    """What a key of this kind of state takes in the memory of a worker, and in a whole snapshot, in bytes."""
    flow = ps.Flow(f"bench-state-{kind}", parallelism=1)
    numbers = flow.read(Numbers(keys, 0, place, int), name="numbers")
    KINDS[kind](numbers).write(ps.sinks.Null())
    job = ps.run(flow, workers=1, local=True, epoch_interval_s=3600, checkpoints=f"{place}/epochs")
    wait_for(job, lambda status: status["state"] == "RUNNING", "the job runs")
    job.savepoint(f"{place}/empty")
    (pid,) = _pids(job)
    before = memory(pid)
    Path(place, "begin").touch()
    wait_for(job, lambda status: _filled(status, keys), "all keys have state")
    after = memory(pid)
    saved = Path(job.savepoint(f"{place}/saved"), "savepoint", "snapshots")
    size = sum(path.stat().st_size for path in saved.iterdir())
    Path(place, "enough").touch()
    status = job.wait(LIMIT_S, progress=False)
    if status["operators"]["kept"]["records_in"] != keys:
        raise SystemExit(f"{keys:,} records, and {status['operators']['kept']}")
    return {"memory": (after - before) / keys, "snapshot": size / keys}


def main(what: str, **settings: Any) -> None:
    """Measure, print."""
    with TemporaryDirectory(prefix="bench-state-") as place:
        found = asdict(large(place=place, **settings)) if what == "large" else a_key(what, place, **settings)
    print(json.dumps(found))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
