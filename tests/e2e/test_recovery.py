"""Jobs whose processes are killed continue from their last epoch, and come to exact results."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray

import penstock as ps
from penstock.actors.cluster import NAMESPACE, master_name
from penstock.host.carry.requests import Cancel, Stop
from penstock.jobs.job import Job
from penstock.runtime.transport.shm import ShmTransport
from penstock.runtime.worker.blackbox import Watcher
from tests.e2e.jobs import Carrier, run
from tests.e2e.kill_campaign import Tormentor, master_pid
from tests.e2e.processes import LIMIT_S, alive, command, descendants, kill, penstock_segments, wait_gone, wait_until
from tests.e2e.recovery_flows import FLOWS, parts

LOCAL = pytest.mark.parametrize("carrier", ["local"], indirect=True)

RATE = 2_000.0


def seed() -> int:
    """A seed for random instants, which is printed."""
    chosen = random.randrange(2**32)
    print(f"seed {chosen}")
    return chosen


def worker_pids(job: Any) -> dict[int, int]:
    return {worker["index"]: worker["pid"] for worker in job.status()["workers"]}


def restarts(job: Any) -> int:
    found: int = job.status()["epochs"]["restarts"]
    return found


def complete(job: Any) -> int:
    """The last complete epoch."""
    found: int = job.status().get("epochs", {"complete": 0})["complete"]
    return found


def flowing(job: Any) -> None:
    wait_until(lambda: job.status().get("records_written", 0) > 0, "records flow")


def running_again(job: Any, gone: set[int]) -> None:
    """Wait until the job runs without these processes."""

    def runs() -> bool:
        status = job.status()
        if status["state"] in ("FINISHED", "FAILED"):  # on a slow machine: before anybody looked
            return True
        return status["state"] in ("RUNNING", "STOPPING") and not gone & {w["pid"] for w in status["workers"]}

    wait_until(runs, "the job runs again")


def kill_worker(job: Any, worker: int) -> int:
    """Kill a worker's process; its id."""
    pid = worker_pids(job)[worker]
    kill(pid)
    return pid


def new_workers(before: set[int]) -> int:
    """A process that is started for a worker, and was not there before."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for pid in descendants(os.getpid()):
            if pid not in before and ("ray::Worker" in command(pid) or "start_worker" in command(pid)):
                return pid
        time.sleep(0.002)
    raise AssertionError("no process was started")


def placed(job: Any, operator: str) -> list[int]:
    """The workers that run the tasks of an operator."""
    return [task["worker"] for task in job.status()["tasks"] if operator in task["name"]]


# --- two flows, under fire -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("carrier", "name", "kinds"),
    [
        ("local", "wordcount", ("worker", "again", "two")),
        ("local", "main", ("worker",)),
        ("local", "few", ("worker",)),
        pytest.param("ray", "timers", ("two", "master"), marks=pytest.mark.ray),
    ],
    indirect=["carrier"],
)
def test_killed_at_random(
    carrier: Carrier, fresh_name: Callable[[], str], tmp_path: Path, name: str, kinds: tuple[str, ...]
) -> None:
    chosen = seed()
    made = FLOWS[name](fresh_name(), tmp_path / "out", int(2 * len(kinds) * RATE), RATE, chosen)
    place = tmp_path / "epochs"
    tormentor = Tormentor(made, 2, iter(kinds), random.Random(chosen), RATE, place, local=carrier.local)
    tormentor.run(len(kinds), wait_s=1.0)
    assert tormentor.killed
    assert all(recovered.gap_before_s is None or recovered.gap_before_s < 5.0 for recovered in tormentor.faults)


def test_receivers_of_all_records_are_killed(fresh_name: Callable[[], str], tmp_path: Path) -> None:
    """Five tasks in three workers get every record. Those that go back are sent it again alone, the others are not."""
    chosen = seed()
    made = FLOWS["to all"](fresh_name(), tmp_path / "out", 20_000, 5_000.0, chosen)
    kinds = iter(("worker", "worker"))
    tormentor = Tormentor(made, 3, kinds, random.Random(chosen), 5_000.0, tmp_path / "epochs", local=True)
    tormentor.run(2, wait_s=0.7)
    assert tormentor.killed


# --- at awkward moments --------------------------------------------------------------------------------------------


@LOCAL
def test_a_worker_before_the_first_epoch(carrier: Carrier, fresh_name: Callable[[], str], tmp_path: Path) -> None:
    """That the JobMaster dies before it: test_a_master_before_the_first_epoch_and_right_after_stop."""
    made = FLOWS["wordcount"](fresh_name(), tmp_path / "out", int(3 * RATE), RATE, 1)
    job = carrier.run(made.flow, workers=2, epoch_interval_s=600.0)
    flowing(job)
    running_again(job, {kill_worker(job, 1)})
    status = job.status()
    assert status["epochs"]["complete"] == 0 or status["state"] == "FINISHED"
    assert job.wait(LIMIT_S, progress=False)["state"] == "FINISHED"
    made.check()


@LOCAL
def test_a_worker_while_another_recovers(carrier: Carrier, fresh_name: Callable[[], str], tmp_path: Path) -> None:
    """The second dies while the first is being started, and then a process that is just being started."""
    made = FLOWS["timers"](fresh_name(), tmp_path / "out", int(4 * RATE), RATE, 1)
    job = carrier.run(made.flow, workers=2)
    wait_until(lambda: complete(job) >= 1, "an epoch is complete")
    gone = set(worker_pids(job).values())
    kill_worker(job, 0)
    wait_until(lambda: job.status()["state"] == "RECOVERING", "the job recovers")
    before = set(descendants(os.getpid()))
    kill_worker(job, 1)
    new = new_workers(before)
    kill(new)
    running_again(job, {*gone, new})
    assert job.wait(LIMIT_S, progress=False)["state"] == "FINISHED"
    made.check()


@LOCAL
def test_a_worker_whose_address_is_known_before_others_have_reached_it(
    carrier: Carrier, fresh_name: Callable[[], str], tmp_path: Path
) -> None:
    """It dies at the very instant at which another attaches to its ring."""
    deadly = Deadly(tmp_path / "done")
    flow, numbers = ps.Flow(fresh_name()), ps.sinks.Collect()
    source = ps.sources.Generator(lambda i: i, rate=1000, limit=4000)
    flow.read(source).rebalance().map(deadly).write(numbers)
    job = carrier.run(flow, workers=2, parallelism=2)
    wait_until(lambda: complete(job) >= 1, "an epoch is complete")
    gone = set(worker_pids(job).values())
    kill_worker(job, 1)
    running_again(job, gone)
    assert deadly.done.exists()
    assert job.wait(LIMIT_S, progress=False)["state"] == "FINISHED"
    assert sorted(numbers.records()) == list(range(4000))


class Deadly:
    """Passes numbers on, in a worker whose first peer to be replaced dies as soon as its address is known."""

    def __init__(self, done: Path) -> None:
        self.done = done
        self._planted = False

    def __call__(self, number: int) -> int:
        if not self._planted and not self.done.exists():
            connect = ShmTransport.connect

            def deadly(transport: ShmTransport, addresses: Mapping[int, str]) -> None:
                if transport._worker == 0 and not self.done.exists():
                    self.done.touch()
                    ring = Path(addresses[1])  # /proc/PID/fd/N
                    os.kill(int(ring.parts[2]), signal.SIGKILL)
                    wait_until(lambda: not ring.exists(), "its ring is gone")
                connect(transport, addresses)

            ShmTransport.connect = deadly  # type: ignore[method-assign]
        self._planted = True
        return number


@pytest.mark.parametrize(
    ("carrier", "born"),
    [("local", "first"), pytest.param("ray", "again", marks=pytest.mark.ray)],
    indirect=["carrier"],
)
def test_a_worker_while_the_job_starts(
    carrier: Carrier, fresh_name: Callable[[], str], tmp_path: Path, born: str
) -> None:
    """A process that is just being started for the job, or for the job whose JobMaster was killed."""
    made = FLOWS["grep"](fresh_name(), tmp_path / "out", int(2 * RATE), RATE, 1)
    before = set(descendants(os.getpid()))
    job = carrier.run(made.flow, workers=2)
    master = -1
    if born == "again":
        flowing(job)
        master = master_pid(job)
        before = set(descendants(os.getpid()))
        kill(master)
    new = new_workers(before)
    kill(new)
    running_again(job, {new, master})
    assert job.wait(LIMIT_S, progress=False)["state"] == "FINISHED"
    made.check()


def numbers_flow(name: str, directory: Path) -> tuple[ps.Flow, Callable[[], None]]:
    """A flow that reads until it is stopped, and what checks its output: each of the two tasks of the source has then
    written its numbers without a gap, each once."""
    flow = ps.Flow(name, parallelism=2)
    taken = ps.sinks.Collect()
    numbers = flow.read(ps.sources.Generator(lambda i: i, rate=RATE))
    numbers.rebalance().map(lambda i: i).write(ps.sinks.Files(directory))
    numbers.rebalance().filter(lambda i: i % 10 == 0).write(taken)

    def check() -> None:
        written = sorted(int(text) for lines in parts(directory).values() for text in lines)
        assert written
        for split in (0, 1):
            mine = [i for i in written if i % 2 == split]
            assert mine == list(range(split, split + 2 * len(mine), 2))
        assert sorted(taken.records()) == [i for i in written if i % 10 == 0]

    return flow, check


@LOCAL
def test_a_worker_right_after_stop(carrier: Carrier, fresh_name: Callable[[], str], tmp_path: Path) -> None:
    flow, check = numbers_flow(fresh_name(), tmp_path / "out")
    job = carrier.run(flow, workers=2)
    wait_until(lambda: complete(job) >= 1, "an epoch is complete")
    pids = {*worker_pids(job).values()}
    job.stop()
    kill(max(pids))
    assert job.wait(LIMIT_S, progress=False)["state"] == "FINISHED"
    check()
    wait_gone(sorted(pids), 10.0)


def test_a_master_before_the_first_epoch_and_right_after_stop(
    cluster: str, fresh_name: Callable[[], str], tmp_path: Path
) -> None:
    flow, check = numbers_flow(fresh_name(), tmp_path / "out")
    job = run(flow, workers=2, epoch_interval_s=600.0)
    flowing(job)
    gone = {*worker_pids(job).values(), master_pid(job)}
    kill(master_pid(job))
    running_again(job, gone)
    assert complete(job) == 0
    flowing(job)
    job.savepoint(tmp_path / "saved")
    gone |= {*worker_pids(job).values(), master_pid(job)}
    job.stop()
    kill(master_pid(job))
    assert job.wait(LIMIT_S, progress=False)["state"] == "FINISHED"
    check()
    wait_gone(sorted(gone), 10.0)


@pytest.mark.parametrize(("request_", "end"), [(Stop(), "FINISHED"), (Cancel(), "CANCELLED")], ids=["stop", "cancel"])
def test_what_somebody_asked_for_who_has_gone(
    cluster: str, fresh_name: Callable[[], str], tmp_path: Path, request_: Stop | Cancel, end: str
) -> None:
    """The JobMaster dies before the workers have heard of it; its next life knows."""
    flow, check = numbers_flow(fresh_name(), tmp_path / "out")
    job = run(flow, workers=1, checkpoints=tmp_path / "epochs")
    wait_until(lambda: complete(job) >= 1, "an epoch is complete")
    pids = {*worker_pids(job).values()}
    master = master_pid(job)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    ray.get(job._link.handle.ask.options(max_task_retries=0).remote(request_))  # nothing of it is pending now
    for pid in (master, *pids):
        kill(pid)
    assert job.wait(LIMIT_S, progress=False)["state"] == end
    if end == "FINISHED":
        check()
    assert not list((tmp_path / "epochs").rglob("*"))


@LOCAL
def test_after_a_source_has_ended(carrier: Carrier, fresh_name: Callable[[], str], tmp_path: Path) -> None:
    """One of two sources is long at its end: it says so again to those that come back, or comes back and says so."""
    flow = ps.Flow(fresh_name())
    short = flow.read(ps.sources.Memory([f"short {i}" for i in range(1000)]), name="short")
    long = flow.read(ps.sources.Generator(lambda i: f"long {i}", rate=5000), name="long")
    counts = ps.sinks.Collect()
    both = short.rebalance().map(str.upper, name="upper")
    (both.union(long).rebalance().map(str.lower).key_by(lambda text: text.split()[0]).count(emit="final").write(counts))
    both.write(ps.sinks.Files(tmp_path / "out"))
    job = carrier.run(flow, workers=2, parallelism=2)

    def ended() -> bool:
        tasks = [task for task in job.status()["tasks"] if "short" in task["name"] or "upper" in task["name"]]
        return bool(tasks) and all(task.get("finished") for task in tasks) and complete(job) >= 1

    for worker in (0, 1):
        wait_until(ended, "the short source has ended, and what is downstream of it alone")
        running_again(job, {kill_worker(job, worker)})
    job.stop()
    status = job.wait(LIMIT_S, progress=False)
    assert status["epochs"]["restarts"] == 2
    assert dict(counts.records()) == {"short": 1000, "long": status["operators"]["long"]["records_out"]}
    written = Counter(text for lines in parts(tmp_path / "out").values() for text in lines)
    assert written == Counter(f"SHORT {i}" for i in range(1000))


@LOCAL
def test_timers_that_are_set_at_the_end(carrier: Carrier, fresh_name: Callable[[], str]) -> None:
    """Timers are state: those that are far off survive a death, and fire once at the end."""

    def work(ctx: ps.ProcessContext, key: int, record: int) -> None:
        count = ctx.get(0) + 1
        ctx.set(count)
        if count == 1:
            ctx.set_timer(at_ms=4_000_000_000_000 + key)
            ctx.set_timer(at_ms=5_000_000_000_000)
        if count == 20:
            ctx.cancel_timer(at_ms=5_000_000_000_000)

    flow = ps.Flow(fresh_name())
    fired = ps.sinks.Collect()
    (
        flow.read(ps.sources.Generator(lambda i: i, rate=5000, limit=30_000))
        .key_by(lambda i: i % 1000)
        .process(work, on_timer=lambda ctx, key, at_ms: [(key, at_ms, ctx.get())])
        .write(fired)
    )
    job = carrier.run(flow, workers=2, epoch_interval_s=0.5)
    wait_until(lambda: complete(job) >= 2, "two epochs are complete")
    kill_worker(job, 1)
    job.wait(LIMIT_S, progress=False)
    assert Counter(fired.records()) == Counter((key, 4_000_000_000_000 + key, 30) for key in range(1000))


def test_rings_that_had_grown(cluster: str, fresh_name: Callable[[], str]) -> None:
    """Records that fitted the rings of the dead fit those of the processes that come after them, be it all workers that
    have died, or the JobMaster, which knew how large the rings were."""

    def record(i: int) -> tuple[int, bytes]:
        return i, bytes(150_000 if i < 200 else 1_500_000 if i % 101 == 0 else 1000)

    flow = ps.Flow(fresh_name())
    sizes = ps.sinks.Collect()
    (
        flow.read(ps.sources.Generator(record, rate=500), name="source")
        .rebalance()
        .map(lambda pair: (pair[0], len(pair[1])))
        .write(sizes)
    )
    job = run(flow, workers=2, epoch_interval_s=0.5)
    wait_until(lambda: job.status().get("records_written", 0) >= 500, "large records flow")
    wait_until(
        lambda: all(worker["ring_bytes"] >= 4 << 20 for worker in job.status()["workers"]), "the rings have grown"
    )
    for victims in ("workers", "master"):
        epoch = complete(job)
        wait_until(lambda epoch=epoch: complete(job) >= epoch + 2, "an epoch is complete since")
        gone = set(worker_pids(job).values())
        for pid in gone if victims == "workers" else [master_pid(job)]:
            kill(pid)
        running_again(job, gone)
    read = job.status()["records_read"]
    wait_until(lambda: job.status()["records_read"] >= read + 101, "another large record was read")
    job.stop()
    status = job.wait(LIMIT_S, progress=False)
    assert status["state"] == "FINISHED"
    found = sizes.records()
    assert len(found) == len({i for i, _ in found}) == status["operators"]["source"]["records_out"]
    assert all(size == len(record(i)[1]) for i, size in found)


# --- when the job cannot continue -------------------------------------------------------------------------------------


def endless(name: str) -> ps.Flow:
    flow = ps.Flow(name)
    flow.read(ps.sources.Generator(lambda i: i, rate=2000)).rebalance().map(str).write(ps.sinks.Null())
    return flow


@LOCAL
def test_too_many_deaths(carrier: Carrier, fresh_name: Callable[[], str]) -> None:
    job = carrier.run(endless(fresh_name()), workers=2, max_restarts=1)
    flowing(job)
    seen = set(worker_pids(job).values())
    running_again(job, {kill_worker(job, 0)})
    seen |= set(worker_pids(job).values())
    last = kill_worker(job, 1)
    with pytest.raises(ps.JobFailed) as failed:
        job.wait(LIMIT_S, progress=False)
    message = str(failed.value)
    assert f"worker 1 (process {last}) died" in message
    assert "restarted once in the last 600 s, which is all that max_restarts=1 allows" in message
    assert "Traceback" not in message
    wait_gone(sorted(seen), 10.0)


@pytest.mark.parametrize(
    ("carrier", "victim"),
    [("local", "worker"), pytest.param("ray", "master", marks=pytest.mark.ray)],
    indirect=["carrier"],
)
def test_no_restarts_wanted(carrier: Carrier, fresh_name: Callable[[], str], victim: str) -> None:
    job = carrier.run(endless(fresh_name()), workers=1, max_restarts=0)
    flowing(job)
    pids = worker_pids(job)
    killed = pids[0] if victim == "worker" else master_pid(job)
    kill(killed)
    expected = rf"worker 0 \(process {pids[0]}\) died" if victim == "worker" else "JobMaster died"
    with pytest.raises(ps.JobFailed, match=expected):
        job.wait(LIMIT_S, progress=False)
    wait_gone([*pids.values(), killed], 10.0)
    assert penstock_segments() == []


def poisoned(name: str, at: int) -> ps.Flow:
    def parse(i: int) -> int:
        if i == at:
            raise ValueError(f"no {i} today")
        return i

    flow = ps.Flow(name)
    (
        flow.read(ps.sources.Generator(lambda i: i, rate=2000))
        .rebalance()
        .map(parse, name="parse")
        .write(ps.sinks.Null())
    )
    return flow


@LOCAL
def test_a_function_that_raises_in_a_job_that_has_recovered(carrier: Carrier, fresh_name: Callable[[], str]) -> None:
    """It would raise again: going back would not help. In a job without deaths: tests/e2e/test_ends.py."""
    at = 6000
    job = carrier.run(poisoned(fresh_name(), at), workers=2)
    flowing(job)
    pids = worker_pids(job)
    running_again(job, {kill_worker(job, 1)})
    with pytest.raises(ps.JobFailed) as failed:
        job.wait(LIMIT_S, progress=False)
    assert failed.value.operator == "parse"
    message = str(failed.value)
    assert f"ValueError: no {at} today" in message
    assert f"record: {at}" in message
    assert f"{Path(__file__).name}" in message
    assert 'raise ValueError(f"no {i} today")' in message
    assert job.status()["state"] == "FAILED"
    assert job.status()["epochs"]["restarts"] == 1
    wait_gone(list(pids.values()), 10.0)


@pytest.mark.parametrize("what", ["state", "sink"])
@LOCAL
def test_state_that_cannot_be_saved(carrier: Carrier, fresh_name: Callable[[], str], what: str) -> None:
    def work(ctx: ps.ProcessContext, key: int, record: int) -> None:
        ctx.set(threading.Lock() if what == "state" else record)

    class Stubborn(ps.sinks.Null):
        def writer(self, context: Any) -> Any:
            writer = super().writer(context)
            writer.prepare = lambda epoch: threading.Lock()  # type: ignore[method-assign]
            return writer

    flow = ps.Flow(fresh_name())
    (
        flow.read(ps.sources.Generator(lambda i: i, rate=100))
        .key_by(lambda i: i % 10)
        .process(work, name="keeper")
        .write(ps.sinks.Null() if what == "state" else Stubborn(), name="out")
    )
    job = carrier.run(flow, workers=1)
    with pytest.raises(ps.JobFailed) as failed:
        job.wait(LIMIT_S, progress=False)
    message = str(failed.value)
    print(message)
    assert failed.value.operator == ("keeper" if what == "state" else "out")
    assert "cannot be saved" in message
    assert "lock" in message
    assert "Traceback" not in message


# --- what is told of the dead --------------------------------------------------------------------------------------


def test_what_a_process_that_is_gone_was_doing_is_not_known() -> None:
    assert Watcher(f"/proc/{2**22 + 1}/fd/3").read() is None


# --- kills from outside, and records that kill ---------------------------------------------------------------------


@LOCAL
def test_equal_records_outlive_kills_from_outside(
    carrier: Carrier, fresh_name: Callable[[], str], tmp_path: Path
) -> None:
    """A worker is killed again and again while a task has one of many equal records, and epochs complete between. By
    the rule that knows a record by its value and its operator alone it is poison from the fifth death on."""

    def slow(record: str) -> str:
        time.sleep(0.01)
        return record

    flow = ps.Flow(fresh_name(), parallelism=1)
    out, kept = ps.sinks.Collect(), ps.sinks.Collect()
    words = flow.read(ps.sources.Memory(["the"] * 900), name="read").rebalance()
    words.map(slow, name="skipping", on_error="skip").write(out)
    words.map(slow, name="failing").write(kept)
    job = carrier.run(flow, workers=2, epoch_interval_s=0.2, max_restarts=1000, checkpoints=tmp_path)
    flowing(job)
    slowest = placed(job, "failing")[0]
    for i in range(6):
        before = complete(job)
        wait_until(lambda before=before: job.state == "FINISHED" or complete(job) > before, "an epoch completes")
        if job.state == "FINISHED":  # on a slow machine it takes fewer deaths
            break
        pid = worker_pids(job)[slowest]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM if i % 3 == 2 else signal.SIGKILL)
        running_again(job, {pid})
    status = job.wait(LIMIT_S, progress=False)
    assert status["skipped"] == 0
    assert out.records() == kept.records() == ["the"] * 900


# --- what can be seen ----------------------------------------------------------------------------------------------


@LOCAL
def test_what_status_says_of_epochs(carrier: Carrier, fresh_name: Callable[[], str], tmp_path: Path) -> None:
    name = fresh_name()
    job = carrier.run(endless(name), workers=2, checkpoints=tmp_path, epoch_interval_s=0.3)
    flowing(job)
    wait_until(lambda: complete(job) >= 3, "epochs follow each other")
    epochs = job.status()["epochs"]
    assert set(epochs) == {"complete", "begun", "age_s", "restarts", "last_failure", "damage", "store"}
    assert epochs["complete"] <= epochs["begun"] <= epochs["complete"] + 2
    assert 0 <= epochs["age_s"] < LIMIT_S
    assert epochs["restarts"] == 0
    assert epochs["last_failure"] is None
    assert epochs["store"] == str(tmp_path / name)
    assert len(list((tmp_path / name / "manifests").iterdir())) >= 1
    running_again(job, {kill_worker(job, 0)})
    wait_until(lambda: complete(job) > epochs["begun"], "epochs continue, with new numbers")
    assert restarts(job) == 1
    job.cancel()
    assert job.wait(LIMIT_S, progress=False)["state"] == "CANCELLED"
    assert not list(tmp_path.rglob("*"))


@LOCAL
def test_without_epochs_there_is_nothing_to_say(
    carrier: Carrier, fresh_name: Callable[[], str], tmp_path: Path
) -> None:
    job = carrier.run(endless(fresh_name()), epoch_interval_s=None, checkpoints=tmp_path / "none")
    flowing(job)
    assert job.status()["epochs"]["store"] is None
    job.cancel()
    job.wait(LIMIT_S, progress=False)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("end", ["FINISHED", "CANCELLED"])
def test_a_job_that_has_ended_is_not_run_again(
    end: str, cluster: str, fresh_name: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its JobMaster is killed while it waits for drivers that may ask: Ray starts it again."""
    monkeypatch.setattr(Job, "_finish", lambda self: None)  # a driver that has gone
    name, calls = fresh_name(), tmp_path / "calls"

    def note(record: int) -> None:
        with open(calls, "a") as file:
            file.write(f"{record}\n")

    flow = ps.Flow(name)
    limit = 500 if end == "FINISHED" else None
    flow.read(ps.sources.Generator(lambda i: i, rate=1000.0, limit=limit)).write(ps.sinks.Call(note))
    job = run(flow, detached=True, checkpoints=tmp_path / "epochs", epoch_interval_s=0.1)
    wait_until(lambda: complete(job) >= 1, "an epoch is complete")
    if end == "CANCELLED":
        job.cancel()
    wait_until(lambda: job.status()["state"] == end, "the job has ended")
    master = master_pid(job)
    came = calls.read_text()
    assert end != "FINISHED" or sorted(map(int, came.split())) == list(range(500))
    kill(master)

    def gone() -> bool:
        try:
            ray.get_actor(master_name(name), namespace=NAMESPACE)
        except ValueError:
            return True
        return False

    wait_until(gone, "the job's name is free")
    assert calls.read_text() == came
    assert not list((tmp_path / "epochs").rglob("*"))


ATTACHED = """
import json, sys
import penstock as ps
job = ps.attach(sys.argv[1], address=sys.argv[2])
print("attached", flush=True)
status = job.wait(60, progress=False)
print(json.dumps([status["state"], status["records_written"]]), flush=True)
"""


def test_a_detached_job_s_master_is_killed(cluster: str, fresh_name: Callable[[], str], tmp_path: Path) -> None:
    """Its name stays, and others can wait for it: a driver that had attached before, and a handle that comes after."""
    name = fresh_name()
    flow, check = numbers_flow(name, tmp_path / "out")
    job = run(flow, workers=1, detached=True)
    wait_until(lambda: complete(job) >= 1, "an epoch is complete")
    gone = set(worker_pids(job).values())
    master = master_pid(job)
    start = [sys.executable, "-c", ATTACHED, name, cluster]
    driver = subprocess.Popen(start, stdout=subprocess.PIPE, text=True, cwd=os.getcwd())
    try:
        assert driver.stdout is not None
        assert any(line == "attached\n" for line in driver.stdout)
        kill(master)
        late = ps.attach(name)
        running_again(job, gone)
        assert not alive(master)
        late.stop()
        out, _ = driver.communicate(timeout=LIMIT_S)
        state, written = json.loads(out.splitlines()[-1])
        assert state == "FINISHED"
        assert written > 0
        assert late.wait(LIMIT_S, progress=False)["state"] == "FINISHED"
        assert job.wait(LIMIT_S, progress=False)["state"] == "FINISHED"
    finally:
        driver.kill()
        driver.wait()
        if driver.stdout is not None:
            driver.stdout.close()
    check()
    wait_gone([*gone, master], 10.0)


@pytest.mark.parametrize("carrier", [pytest.param("ray", marks=pytest.mark.ray)], indirect=True)
def test_no_pause_before_the_failure(carrier: Carrier, fresh_name: Callable[[], str]) -> None:
    """Of a flow in two halves, one on each worker, the half without the failure notices nothing."""
    flow = ps.Flow(fresh_name())
    for half in (0, 1):  # dealt to the workers in turn
        source = ps.sources.Generator(lambda i: i, rate=2000)
        flow.read(source, name=f"read{half}", parallelism=1).map(str).write(ps.sinks.Null(), name=f"write{half}")
    job = carrier.run(flow, workers=2, parallelism=1)
    wait_until(lambda: complete(job) >= 1, "an epoch is complete")
    assert placed(job, "read0") == [0]
    assert placed(job, "read1") == [1]

    def written(half: int) -> int:
        count: int = job.status()["operators"][f"write{half}"]["records_in"]
        return count

    pid = kill_worker(job, 1)
    since = time.monotonic()
    before = written(0)
    running_again(job, {pid})
    took = time.monotonic() - since
    after = written(0)
    wait_until(lambda: written(1) > 0, "the other half comes again")
    job.cancel()
    job.wait(LIMIT_S, progress=False)
    assert after - before >= 0.5 * took * 2000, f"{after - before} records in {took:.1f} s"
