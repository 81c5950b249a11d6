"""Jobs in processes of the program, as users see them: without Ray, and as exact as on Ray."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import penstock as ps
from penstock.bridge.session import SparkOptions
from penstock.host.carry import store_keeper, store_runner, worker_runner
from penstock.host.carry.requests import Migrate, Rescale
from penstock.host.process.network import Network, TransportName
from penstock.host.process.worker_process import WorkerOptions
from penstock.jobs import run as run_module
from penstock.local.processes import LocalProcesses
from penstock.runtime.epochs.files import LocalFiles
from penstock.runtime.epochs.manifest import FORMAT, decode, encode
from penstock.runtime.epochs.store import Store
from penstock.runtime.sinks.base import SinkContext, SinkWriter
from penstock.runtime.status import EpochsStatus
from tests.e2e.processes import LIMIT_S, alive, wait_until
from tests.local.workers import workers_here

DEAD_OR_STOPPED = (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
WORDS = ["a b", "b c", "c c"] * 200


def counting(name: str, parallelism: int = 2) -> ps.Flow:
    flow = ps.Flow(name, parallelism=parallelism)
    flow.read(ps.sources.Memory(WORDS)).flat_map(str.split).key_by(lambda word: word).count().write(
        ps.sinks.Collect(), name="out"
    )
    return flow


def ticking(name: str, records: int, rate: float = 1000.0) -> ps.Flow:
    """Numbers that come at a rate, counted by their last digit."""
    flow = ps.Flow(name, parallelism=2)
    source = ps.sources.Generator(lambda number: number, rate, limit=records)
    flow.read(source).key_by(lambda number: number % 10).count().write(ps.sinks.Collect(), name="out")
    return flow


def pids(job: ps.Job) -> dict[int, int]:
    return {worker["index"]: worker["pid"] for worker in job.status()["workers"]}


def kill_after(job: ps.Job, worker: int, epochs: int) -> None:
    """Kill a worker after more than so many epochs, and wait until the job runs again."""
    wait_until(lambda: job.status().get("epochs", {}).get("complete", 0) > epochs, "an epoch is complete")
    victim = pids(job)[worker]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: pids(job)[worker] != victim and job.state == "RUNNING", "the worker is back")


def tens(records: int) -> dict[int, int]:
    return dict.fromkeys(range(10), records // 10)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("epoch_interval_s", [0.2, None])
def test_results_are_those_of_a_loop(
    fresh_name: Callable[[], str], workers: int, epoch_interval_s: float | None
) -> None:
    job = ps.run(counting(fresh_name()), workers=workers, local=True, epoch_interval_s=epoch_interval_s)
    status = job.wait(LIMIT_S, progress=False)
    assert status["state"] == "FINISHED"
    assert dict(job.records("out")) == {"a": 200, "b": 400, "c": 800 - 200}
    assert len({task["worker"] for task in status["tasks"]}) == workers
    assert not workers_here()


def test_a_killed_worker_comes_back_while_the_disk_of_the_store_is_full(
    fresh_name: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, write = threading.Event(), LocalFiles.write

    def written(files: LocalFiles, name: str, *rest: Any) -> None:
        if full.is_set() and name.startswith("manifests/"):  # the JobMaster, which writes them, is in this process
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(files, name, *rest)

    monkeypatch.setattr(LocalFiles, "write", written)
    monkeypatch.setattr(store_keeper, "_RETRY_S", 0.05)
    flow = ticking(fresh_name(), 100_000)
    job = ps.run(flow, workers=2, local=True, epoch_interval_s=0.1, checkpoints=str(tmp_path))
    wait_until(lambda: job.status()["epochs"]["complete"] > 1, "an epoch is complete")
    full.set()
    wait_until(lambda: "No space left" in str(job.status()["epochs"]["last_failure"]), "the disk is full")
    kill_after(job, 1, 0)
    full.clear()
    job.stop()
    status = job.wait(LIMIT_S, progress=False)
    counts = dict(job.records("out"))
    assert sum(counts.values()) == status["records_read"]
    for numbers in ([0, 2, 4, 6, 8], [1, 3, 5, 7, 9]):  # of one source task each
        assert max(counts[one] for one in numbers) - min(counts[one] for one in numbers) <= 1
    assert status["epochs"]["restarts"] == 1


def test_a_job_can_be_cancelled_while_its_store_hangs(
    fresh_name: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a network mount hangs whose server is gone. The status says why no epoch completes, and `wait` returns."""
    hangs, over, write = threading.Event(), threading.Event(), LocalFiles.write

    def written(files: LocalFiles, *rest: Any) -> None:
        if hangs.is_set():
            over.wait(4 * LIMIT_S)
        write(files, *rest)

    monkeypatch.setattr(LocalFiles, "write", written)
    monkeypatch.setattr(store_runner, "_END_S", 1.0)
    monkeypatch.setattr(store_runner, "_SILENT_S", 0.5)
    job = ps.run(ticking(fresh_name(), 1 << 40), local=True, epoch_interval_s=0.1, checkpoints=str(tmp_path))
    try:
        wait_until(lambda: job.status()["epochs"]["complete"] > 1, "an epoch is complete")
        hangs.set()
        wait_until(
            lambda: (
                f"store {tmp_path}" in str(job.status()["epochs"]["last_failure"])
                and "has not answered for" in job.status()["epochs"]["last_failure"]
            ),
            "the status says that the store does not answer",
        )
        job.cancel()
        assert job.wait(LIMIT_S, progress=False)["state"] == "CANCELLED"
    finally:
        over.set()
    assert not workers_here()


def test_a_spare_process_takes_the_place_of_a_killed_worker(
    fresh_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next worker is the process that was there before, and another spare process comes. One that was killed or
    stopped is none, and nobody waits for it."""
    monkeypatch.setattr(worker_runner, "_SPARES_AFTER_S", 0.5)
    flow = ticking(fresh_name(), 1 << 40)
    job = ps.run(flow, local=True, workers=2, epoch_interval_s=0.2, start_timeout_s=10 * LIMIT_S)
    for ending in (None, signal.SIGKILL, signal.SIGSTOP):
        wait_until(lambda: job.status()["spares"], "a spare process is ready")
        (spare,) = set(workers_here()) - set(pids(job).values())
        if ending is not None:
            os.kill(spare, ending)
            wait_until(lambda pid=spare: psutil.Process(pid).status() in DEAD_OR_STOPPED, "the signal has come")  # type: ignore[misc]
        kill_after(job, 1, 0)
        assert (pids(job)[1] == spare) is (ending is None)
    everybody = {*pids(job).values(), *workers_here()}
    job.cancel()
    job.wait(LIMIT_S, progress=False)
    wait_until(lambda: not any(map(alive, everybody)), "no process is left, no spare process either")


def test_without_spares_there_are_none(fresh_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_runner, "_SPARES_AFTER_S", 0.5)
    job = ps.run(ticking(fresh_name(), 1 << 40), local=True, workers=2, epoch_interval_s=0.2, spares=False)
    kill_after(job, 0, 20)
    assert job.status()["spares"] == 0
    assert set(workers_here()) == set(pids(job).values())
    job.cancel()
    job.wait(LIMIT_S, progress=False)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_killed_worker_is_started_again(transport: TransportName, fresh_name: Callable[[], str]) -> None:
    flow = ticking(fresh_name(), 4000)
    job = ps.run(flow, workers=2, local=True, epoch_interval_s=0.2, transport=transport)
    for worker in (0, 1):
        kill_after(job, worker, epochs=worker)
    status = job.wait(LIMIT_S, progress=False)
    assert status["epochs"]["restarts"] == 2
    assert dict(job.records("out")) == tens(4000)


def test_without_epochs_the_death_of_a_worker_ends_the_job(fresh_name: Callable[[], str]) -> None:
    job = ps.run(ticking(fresh_name(), 10**6), workers=2, local=True, epoch_interval_s=None)
    wait_until(lambda: job.status().get("records_read", 0) > 0, "the job runs")
    os.kill(pids(job)[1], signal.SIGKILL)
    with pytest.raises(ps.JobFailed, match=r"worker 1 \(process \d+\) died: signal SIGKILL"):
        job.wait(LIMIT_S, progress=False)
    assert job.status().epochs == EpochsStatus()


def test_a_job_is_rescaled_and_its_tasks_migrate(fresh_name: Callable[[], str]) -> None:
    job = ps.run(ticking(fresh_name(), 5000), workers=2, local=True, epoch_interval_s=0.2)
    wait_until(lambda: job.status().get("records_written", 0) > 0, "records come through")
    for mistake, words in (
        (lambda: job.rescale("count", "3"), "rescale 'count': parallelism='3'; it must be a whole number, 1 or more"),
        (lambda: job.rescale("count", 2.5), "parallelism=2.5; it must be a whole number"),
        (
            lambda: job.migrate({"count[0]": 0.5}),
            r"the worker of 'count\[0\]'=0.5; it must be a whole number, 0 or more",
        ),
        (lambda: job.migrate(["count[0]"]), "is no mapping; give the worker of each task"),
        (lambda: job.savepoint(None), "savepoint: None is no place; give a directory or a URL"),
        (lambda: job.savepoint(""), "savepoint: '' is no place; give a directory or a URL"),
    ):
        with pytest.raises(ps.PenstockError, match=words):
            mistake()
    job.rescale("count", 3)
    tasks = {task["name"]: task["worker"] for task in job.plan()}
    moved = next(name for name in tasks if name.startswith("count"))
    job.migrate({moved: 1 - tasks[moved]})
    assert {task["name"]: task["worker"] for task in job.plan()}[moved] == 1 - tasks[moved]
    assert job.wait(LIMIT_S, progress=False)["operators"]["count"]["parallelism"] == 3
    assert dict(job.records("out")) == tens(5000)


def test_a_program_waits_for_something_of_the_status(fresh_name: Callable[[], str]) -> None:
    job = ps.run(ticking(fresh_name(), 5000), local=True)
    status = job.wait_for(lambda status: status["records_written"] > 0, timeout_s=LIMIT_S)
    assert status["records_written"] > 0
    for mistake, error, words in (
        (lambda: job.wait_for(True), ps.FlowError, "wait_for: True is no function; give one that gets a status"),
        (lambda: job.wait_for(lambda status: 1, "1"), ps.FlowError, "wait_for: timeout_s='1'"),
        (lambda: job.wait_for(lambda status: False, 0.01), TimeoutError, "condition of wait_for.. is not true after"),
        (lambda: job.wait_for(lambda status: status["red"]), KeyError, "red"),
    ):
        with pytest.raises(error, match=words):
            mistake()
    job.cancel()
    assert job.wait_for(lambda status: status["state"] == "CANCELLED")["state"] == "CANCELLED"
    with pytest.raises(ps.JobError, match=r"has ended: cancelled; the condition of wait_for\(\) was not true"):
        job.wait_for(lambda status: status["records_written"] > 10_000)


def test_who_waits_for_something_hears_that_the_job_failed(fresh_name: Callable[[], str]) -> None:
    flow = ps.Flow(fresh_name())
    flow.read(ps.sources.Memory([1, 0])).map(lambda n: 1 // n, name="divide").write(ps.sinks.Collect())
    job = ps.run(flow, local=True)
    with pytest.raises(ps.JobFailed, match="ZeroDivisionError") as caught:
        job.wait_for(lambda status: status["records_written"] >= 100, LIMIT_S)
    assert caught.value.operator == "divide"
    assert "ZeroDivisionError" in job.wait_for(lambda status: status["state"] == "FAILED")["error"]


def test_a_failing_function_fails_the_job_with_its_operator(fresh_name: Callable[[], str]) -> None:
    flow = ps.Flow(fresh_name())
    flow.read(ps.sources.Memory([1, 0])).map(lambda n: 1 // n, name="divide").write(ps.sinks.Collect())
    with pytest.raises(ps.JobFailed, match="ZeroDivisionError") as caught:
        ps.run(flow, local=True).wait(LIMIT_S, progress=False)
    assert caught.value.operator == "divide"


def test_the_secret_of_a_job_is_not_among_its_options_which_are_saved(
    fresh_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Network] = []
    used: list[Network | None] = []
    secured = Network.secured
    monkeypatch.setattr(Network, "secured", lambda network: saved.append(network) or secured(network))
    started = LocalProcesses.__init__

    def start(self: LocalProcesses, job: str, options: WorkerOptions, report: Any) -> None:
        used.append(options.network)
        started(self, job, options, report)

    monkeypatch.setattr(LocalProcesses, "__init__", start)
    job = ps.run(ticking(fresh_name(), 10), local=True, transport="tcp")
    assert job.wait(LIMIT_S, progress=False)["state"] == "FINISHED"
    assert [network.secret for network in saved] == [b""]
    assert [network is not None and len(network.secret) for network in used] == [32]


def test_a_transport_that_the_machine_does_not_have(fresh_name: Callable[[], str]) -> None:
    job = ps.run(ticking(fresh_name(), 10), local=True, workers=2, transport="rdma")
    with pytest.raises(ps.JobFailed, match=r'transport="rdma" was given, but .*\. docs/rdma\.md says what RDMA needs'):
        job.wait(LIMIT_S, progress=False)


def test_the_store_of_a_running_job_does_not_grow_with_its_compactions(
    fresh_name: Callable[[], str], tmp_path: Path
) -> None:
    """A key of 40 is set in each epoch, and all snapshots are too large to be part of a manifest."""
    flow = ps.Flow(fresh_name(), parallelism=1)

    def remember(ctx: ps.ProcessContext, key: int, i: int) -> None:
        ctx.set(os.urandom(10_000))

    numbers = flow.read(ps.sources.Generator(lambda i: i, rate=200), name="numbers")
    numbers.key_by(lambda i: i // 10 % 40).process(remember, name="remember").write(ps.sinks.Null())
    job = ps.run(flow, local=True, checkpoints=str(tmp_path), epoch_interval_s=0.05)
    files = tmp_path / flow.name / "snapshots"
    compacted: set[str] = set()

    def many() -> bool:
        compacted.update(path.name for path in files.glob("*-to-*"))
        return len(compacted) >= 12

    wait_until(many, "twelve compactions")
    after = job.status()["epochs"]["complete"] + 6  # old files are deleted at every fifth epoch
    wait_until(lambda: job.status()["epochs"]["complete"] > after, "old files were deleted")
    left = [path.name for path in files.glob("*-to-*")]
    job.cancel()
    assert job.wait(LIMIT_S, progress=False)["state"] == "CANCELLED"
    assert len(left) <= 8, left


def test_a_job_is_stopped_and_cancelled(fresh_name: Callable[[], str]) -> None:
    for word, state in (("stop", "FINISHED"), ("cancel", "CANCELLED")):
        job = ps.run(ticking(fresh_name(), 10**6), workers=2, local=True)
        wait_until(lambda job=job: job.status()["records_read"] > 0, "the job runs")  # type: ignore[misc]
        getattr(job, word)()
        status = job.wait(LIMIT_S, progress=False)
        assert status["state"] == state


def test_what_is_committed_can_be_read_after_a_cancel(fresh_name: Callable[[], str], tmp_path: Path) -> None:
    """Epochs have an interval in which the test cannot know whether another one is complete, so the parts must have at
    least what was complete before the cancel, without a gap."""

    def numbers(name: str) -> ps.Flow:
        flow = ps.Flow(name)
        flow.read(ps.sources.Generator(lambda i: i, rate=1000)).write(ps.sinks.Files(tmp_path / "out"))
        return flow

    def cancelled(job: ps.Job) -> None:
        job.cancel()
        assert job.wait(LIMIT_S, progress=False)["state"] == "CANCELLED"

    name = fresh_name()
    job = ps.run(numbers(name), local=True, checkpoints=tmp_path / "epochs", epoch_interval_s=0.1)
    wait_until(lambda: job.status().get("epochs", {}).get("complete", 0) >= 3, "some epochs are complete")
    cancelled(job)
    (part,) = (tmp_path / "out").iterdir()
    lines = part.read_text().split()
    assert len(lines) > 100
    assert lines == [str(i) for i in range(len(lines))]
    part.rename(tmp_path / "out" / ".part-00000-0000000001.0123abcd.txt.inprogress")
    with pytest.raises(ps.FlowError, match=f"nothing can resume it: rename .* has no epoch of a job '{name}'"):
        ps.run(numbers(name), local=True, checkpoints=tmp_path / "epochs")


class Dying(ps.sinks.Files):
    """Files whose worker dies when it is told to cancel."""

    def writer(self, context: SinkContext) -> SinkWriter:
        writer = ps.sinks.Files.writer(self, context)
        writer.cancel = lambda epoch: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        return writer


def test_files_that_nobody_could_name_at_a_cancel_are_told(
    fresh_name: Callable[[], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flow = ps.Flow(fresh_name())
    flow.read(ps.sources.Generator(lambda i: i, rate=1000)).write(Dying(tmp_path / "out"))
    job = ps.run(flow, local=True, checkpoints=tmp_path / "epochs", epoch_interval_s=0.1)
    wait_until(lambda: job.status().get("epochs", {}).get("complete", 0) >= 2, "some epochs are complete")
    job.cancel()
    assert job.wait(LIMIT_S, progress=False)["state"] == "CANCELLED"
    (hidden,) = os.listdir(tmp_path / "out")
    (told,) = [record.getMessage() for record in caplog.records if "is cancelled" in record.getMessage()]
    assert f"'{tmp_path}/out' still holds unfinished files (1: {hidden}, ...)" in told


def test_a_running_job_has_one_handle_in_its_program(fresh_name: Callable[[], str]) -> None:
    flow = ticking(fresh_name(), 10**6)
    job = ps.run(flow, local=True)
    try:
        assert ps.attach(flow.name) is job
        with pytest.raises(ps.JobExists, match="is running in this program"):
            ps.run(flow, local=True)
    finally:
        job.cancel()
        job.wait(LIMIT_S, progress=False)
    assert ps.run(counting(flow.name), local=True).wait(LIMIT_S, progress=False)["state"] == "FINISHED"


@pytest.mark.parametrize(
    "option",
    [
        {"detached": True},
        {"address": "auto"},
        {"cpus_per_worker": 2},
        {"dual": "on"},
        {"spark": SparkOptions()},
        {"placement": "traffic"},
        {"nodes": 2},
        {"replan_s": 1.0},
        {"ports": (20000, 20100)},
        {"node_timeout_s": 8.0},
    ],
    ids=lambda option: next(iter(option)),
)
def test_what_needs_ray_says_so(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(ps.FlowError, match=rf"^{name}=.* is not for local jobs"):
        ps.run(counting("local"), local=True, **option)


def test_traffic_needs_ray(fresh_name: Callable[[], str]) -> None:
    job = ps.run(ticking(fresh_name(), 10**6), local=True)
    with pytest.raises(ps.JobError, match="only jobs on Ray measure their traffic"):
        job.traffic()
    job.cancel()
    job.wait(LIMIT_S, progress=False)


def program(script: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A program of a user, whose classes are those of its main script."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


SLOW = """
    import sys, time, penstock as ps
    from tests.local.test_local_job import ticking
    if __name__ == "__main__":
        name, place, records = sys.argv[1:]
        job = ps.run(ticking(name, int(records)), workers=2, local=True, epoch_interval_s=0.2, checkpoints=place)
        while job.status().get("epochs", {}).get("complete", 0) < 2:
            time.sleep(0.05)
        print(*[worker["pid"] for worker in job.status()["workers"]], flush=True)
        print(job.wait(progress=False)["state"], flush=True)
"""


@pytest.mark.parametrize("epochs", [0.2, None])
@pytest.mark.parametrize("end", ["cancel", "fail"])
def test_the_last_status_of_a_job_that_has_not_finished_has_its_last_counts(
    end: str, epochs: float | None, fresh_name: Callable[[], str], tmp_path: Path
) -> None:
    """It used to be the status that somebody had asked for last."""

    def at_2000(i: int) -> int:
        if i == 2000:
            (tmp_path / "there").touch()
            if end == "fail":
                raise ValueError("no")
        return i

    flow = ps.Flow(fresh_name())
    flow.read(ps.sources.Generator(lambda i: i, rate=2000), parallelism=1).map(at_2000).write(ps.sinks.Null())
    job = ps.run(flow, local=True, workers=2, epoch_interval_s=epochs, checkpoints=None if epochs is None else tmp_path)
    job.wait_for(lambda status: status["records_read"] >= 10, LIMIT_S)
    wait_until((tmp_path / "there").exists, "record 2000 has come", LIMIT_S)
    if end == "cancel":
        job.cancel()
        assert job.wait(LIMIT_S, progress=False)["state"] == "CANCELLED"
    else:
        with pytest.raises(ps.JobFailed):
            job.wait(LIMIT_S, progress=False)
    assert job.status()["records_read"] >= 2000


SAVED = """
    import enum, sys, penstock as ps
    from dataclasses import dataclass

    class Light(enum.Enum):
        RED = 1

    @dataclass
    class Kept:
        light: Light
        text: str

    what, place, keys, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

    def remember(ctx, key, i):
        kept = ctx.get()
        if kept is None:
            ctx.set(Kept(Light.RED, "x" * size))
        elif i >= 6000:
            same = Kept(Light.RED, "x" * size)
            return [(type(kept) is Kept, isinstance(kept, Kept), kept.light is Light.RED, kept == same)]

    if __name__ == "__main__":
        flow, out = ps.Flow("saved"), ps.sinks.Collect()
        numbers = flow.read(ps.sources.Generator(lambda i: i, rate=4000, limit=6000 + keys), name="numbers")
        numbers.key_by(lambda i: i % keys).process(remember, name="remember").write(out)
        options = {"checkpoints": f"{place}/epochs", "local": True, "epoch_interval_s": 0.1}
        if what == "save":
            job = ps.run(flow, **options)
            job.wait_for(lambda status: status["operators"]["remember"]["records_in"] > keys)
            epochs = job.status()["epochs"]["complete"]
            job.wait_for(lambda status: status["epochs"]["complete"] > epochs + 2)  # there is more than one snapshot
            job.savepoint(f"{place}/saved")
            job.cancel()
            job.wait(progress=False)
        else:
            ps.run(flow, savepoint=f"{place}/saved", **options).wait(progress=False)
            print(len(out.records()), set(out.records()))
"""


@pytest.mark.parametrize("epochs", ["0.1", "None"])
def test_a_file_that_was_opened_after_the_flow_was_written_is_named(epochs: str) -> None:
    script = f"""
        import os, penstock as ps
        def read(record):
            return words.readline()
        if __name__ == "__main__":
            flow = ps.Flow("reads-a-file")
            flow.read(ps.sources.Memory([1])).map(read, name="lines").write(ps.sinks.Collect(), name="out")
            words = open(os.devnull)
            try:
                ps.run(flow, workers=1, local=True, epoch_interval_s={epochs}).wait(progress=False)
            except ps.PenstockError as error:
                print(error)
    """
    with program(script) as running:
        said, _ = running.communicate(timeout=LIMIT_S)
    assert "operator 'lines': " in said
    assert (
        "the global variable 'words' that it uses of the value at 'fn' is <_io.TextIOWrapper name='/dev/null'" in said
    )


@pytest.mark.parametrize(("keys", "size"), [(3, 10), (1500, 2000)])
def test_a_savepoint_of_a_local_job_has_the_classes_of_the_main_script(keys: int, size: int, tmp_path: Path) -> None:
    """The program that hosts the job compacts the snapshots, or a process that it starts, when they are large. Neither
    has joined the program of the job, so the classes were saved as strays, and were others in the next program."""
    for what in ("save", "load"):
        with program(SAVED, what, str(tmp_path), str(keys), str(size)) as running:
            said, _ = running.communicate(timeout=LIMIT_S)
        assert running.returncode == 0
    assert said == f"{keys} {{(True, True, True, True)}}\n"


EDITED = """
    import asyncio, enum, sys, msgspec, penstock as ps
    from typing import NamedTuple

    class Light(enum.Enum):
        RED = enum.auto()
        GREEN = enum.auto()

    class Span(msgspec.Struct, frozen=True):
        low: int
        high: int

    class Seen(NamedTuple):
        first: Span
        light: Light

    what, place = sys.argv[1:]

    def remember(ctx, key, i):
        last, seen = ctx.value_state("last"), ctx.list_state("seen")
        if last.get() is None:
            last.set(Span(low=key, high=10 + key))
            seen.append(Seen(first=Span(low=20 + key, high=30 + key), light=Light.GREEN))
            ctx.set([Seen(first=last.get(), light=Light.GREEN)])
        elif i >= 6000:
            return [(key, last.get(), list(seen), ctx.get())]

    async def asked(span):
        await asyncio.sleep(0.05)  # some calls are under way when the job is saved
        assert span.high == -span.low
        return span

    if __name__ == "__main__":
        flow, out = ps.Flow("edited"), ps.sinks.Collect()
        numbers = flow.read(ps.sources.Generator(lambda i: i, rate=4000, limit=6003), name="numbers")
        spans = numbers.map(lambda i: Span(low=i, high=-i), name="spans")
        spans = spans.map_async(asked, concurrency=400, name="asked")
        keyed = spans.key_by(lambda span: span.low % 3)
        keyed.process(lambda ctx, key, span: remember(ctx, key, span.low), name="remember").write(out)
        options = {"checkpoints": f"{place}/epochs", "local": True, "epoch_interval_s": 0.1}
        if what == "save":
            job = ps.run(flow, **options)
            job.wait_for(lambda status: status["operators"]["remember"]["records_in"] > 10)
            job.savepoint(f"{place}/saved")
            job.cancel()
            job.wait(progress=False)
        else:
            try:
                ps.run(flow, savepoint=f"{place}/saved", **options).wait(progress=False)
            except ps.JobFailed as error:
                print(error)
            for key, last, seen, others in sorted(out.records()):
                print(key, last.low, last.high, [(s.first.low, s.first.high, s.light.name) for s in seen + others])
"""


def test_a_program_that_has_changed_its_classes_takes_each_value_under_its_name(tmp_path: Path) -> None:
    """Where pickle has the places of values only, and the values of members."""
    with program(EDITED, "save", str(tmp_path)) as running:
        assert running.wait(LIMIT_S) == 0
    changes = {
        "        low: int\n        high: int\n": "        high: int\n        more: str\n        low: int\n",
        "high=": "more='x', high=",
        "        first: Span\n        light: Light": "        light: Light\n        first: Span\n        n: int = 5",
        "        RED = enum.auto()\n        GREEN": "        GREEN",
    }
    script = EDITED
    for before, now in changes.items():
        assert before in script
        script = script.replace(before, now)
    with program(script, "load", str(tmp_path)) as running:
        said = running.communicate(timeout=LIMIT_S)[0]
    assert "Span (a class of module __main__) has the field 'more', which objects of that class did not have" in said
    assert "start the job without the savepoint" in said
    script = script.replace("more: str\n        low: int\n", "low: int\n        more: str = ''\n")
    with program(script, "load", str(tmp_path)) as running:
        said = running.communicate(timeout=LIMIT_S)[0]
    expected = [
        f"{key} {key} {10 + key} [({20 + key}, {30 + key}, 'GREEN'), ({key}, {10 + key}, 'GREEN')]" for key in (0, 1, 2)
    ]
    assert said.splitlines() == expected
    with program(script.replace("GREEN", "BLUE"), "load", str(tmp_path)) as running:
        said = running.communicate(timeout=LIMIT_S)[0]
    assert "operator 'remember': its saved state, in " in said
    assert "Light (a class of module __main__) has no member 'GREEN', which an earlier program has saved" in said


def test_the_death_of_the_program_ends_its_workers_and_the_job_can_be_resumed(
    fresh_name: Callable[[], str], tmp_path: Path
) -> None:
    name = fresh_name()
    with program(SLOW, name, str(tmp_path), "5000") as running:
        assert running.stdout is not None
        workers = [int(pid) for pid in running.stdout.readline().split()]
        assert len(workers) == 2
        with pytest.raises(ps.JobExists):
            ps.run(counting(name), local=True, checkpoints=tmp_path)
        running.kill()
        wait_until(lambda: not any(map(alive, workers)), "the workers have ended")
    job = ps.resume(name, local=True, checkpoints=tmp_path)
    job.wait(LIMIT_S, progress=False)
    assert dict(job.records("out")) == tens(5000)


def test_the_job_of_another_program_cannot_be_resumed_or_attached_to(
    fresh_name: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    connected = ray.is_initialized()
    name = fresh_name()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    place = tmp_path / "penstock"
    with program(SLOW, name, str(place), "1000000") as running:
        assert running.stdout is not None
        assert running.stdout.readline()
        try:
            with pytest.raises(ps.JobExists):
                ps.resume(name, local=True, checkpoints=place)
            with pytest.raises(ps.JobNotFound, match=r"A local job .* belongs to the program that runs it"):
                ps.attach(name)
        finally:
            running.kill()
            if not connected:  # it stays connected to the last cluster of this machine in which it has looked
                ray.shutdown()


def test_nothing_of_ray_or_spark_is_loaded() -> None:
    script = """
        import json, sys, penstock as ps
        class Word(str): ...
        flow = ps.Flow("unloaded", parallelism=2)
        words = flow.read(ps.sources.Memory(["a", "b"])).map(Word)
        words.key_by(lambda word: word).count().write(ps.sinks.Collect(), name="out")
        job = ps.run(flow, workers=2, local=True)
        job.wait(progress=False)
        print(json.dumps([sorted(sys.modules), sorted(type(word) is Word for word, _ in job.records("out"))]))
    """
    with program(script) as running:
        modules, same_class = json.loads(running.communicate(timeout=LIMIT_S)[0])
    assert not {"ray", "pyspark", "pyarrow", "numpy", "pandas", "rich"} & set(modules)
    plain = {"penstock.bridge", "penstock.bridge.commands"}  # data that a JobHost knows, also of a job without Spark
    assert not [
        one for one in modules if one.startswith(("penstock.bridge", "penstock.actors.ray")) and one not in plain
    ]
    assert same_class == [True, True]


def test_ctrl_c_stops_the_sources_and_what_was_read_comes_through() -> None:
    """The terminal sends it to all processes of the foreground, so to the whole process group."""
    command = ["run", "sol", "--local", "--rate", "500", "--no-progress", "--workers", "2"]
    with subprocess.Popen(
        [sys.executable, "-m", "penstock.apps.cli", *command],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as running:
        assert running.stderr is not None
        wait_until(lambda: len(psutil.Process(running.pid).children()) == 2, "there are workers")
        workers = psutil.Process(running.pid).children()
        wait_until(lambda: all(w.num_threads() > 6 for w in workers), "the workers run")
        os.killpg(running.pid, signal.SIGINT)
        said = running.stderr.read()
    assert running.returncode == 0, said
    assert "finished" in said
    assert "restarted" not in said


def test_a_class_of_the_main_script_is_one_class_in_all_that_the_host_sends() -> None:
    """A rescale sends the plan, with the functions of the script, to workers that have loaded it before."""
    script = """
        import time, penstock as ps
        class Order:
            def __init__(self, user, cents): self.user, self.cents = user, cents
        def add(ctx, key, order):
            assert type(order) is Order
            assert type(ctx.get(order)) is Order
            ctx.set(Order(key, ctx.get(Order(key, 0)).cents + order.cents))
            return [ctx.get()]
        if __name__ == "__main__":
            flow = ps.Flow("one-class", parallelism=2)
            orders = flow.read(ps.sources.Generator(lambda n: Order(n, 1), 1000, limit=3000))
            orders.key_by(lambda order: order.user % 3).process(add, name="add").write(ps.sinks.Collect(), name="out")
            job = ps.run(flow, workers=2, local=True, epoch_interval_s=0.1)
            while job.status().get("records_written", 0) == 0:
                time.sleep(0.05)
            job.rescale("add", 3)
            job.wait(progress=False)
            found = job.records("out")
            print(all(type(order) is Order for order in found), max(order.cents for order in found))
    """
    with program(script) as running:
        assert running.communicate(timeout=LIMIT_S)[0].split() == ["True", "1000"]


FORKING = """
import os, sys
import penstock as ps

flow = ps.Flow("forking")
flow.read(ps.sources.Generator(lambda i: i, rate=1000)).write(ps.sinks.Null())
if __name__ == "__main__":
    job = ps.run(flow, workers=1, local=True, checkpoints=sys.argv[1])
    child = os.fork()
    if not child:
        try:
            job.status()
        except ps.JobError as error:
            print("refused", error, flush=True)
        sys.exit(0)
    _, ended = os.waitpid(child, 0)
    print("ended", ended, job.state in ("STARTING", "RUNNING"), flush=True)
    job.cancel()
    job.wait(progress=False)
"""


def test_a_fork_of_the_program_is_told_whose_the_job_is_and_ends(tmp_path: Path) -> None:
    ran = script(tmp_path, FORKING)
    assert "refused this process was forked from process" in ran.stdout
    assert "ended 0 True" in ran.stdout
    assert "this program ends while" not in ran.stderr, "the fork's end is not the job's"
    assert ran.returncode == 0


FORKED = """
import os, sys
import penstock as ps

def forks(i):
    if i == 500:
        os.fork()  # and the child comes back out of the function
    return i

flow = ps.Flow("forked")
numbers = flow.read(ps.sources.Memory(range(1000))).map(forks)
numbers.key_by(lambda i: i % 7).count().write(ps.sinks.Collect(), name="out")
numbers.map(str, parallelism=WORKERS).write(ps.sinks.Files(sys.argv[1] + "-files", part_s=0))
if __name__ == "__main__":
    job = ps.run(flow, workers=WORKERS, local=True, checkpoints=sys.argv[1])
    job.wait(progress=False)
    print("counted", sum(dict(job.records("out")).values()), flush=True)
"""


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("how", ["os.fork()", "os.fork() or sys.exit()", "os.fork() or 1 / 0"])
def test_a_fork_of_a_worker_does_nothing_in_its_name_and_ends(tmp_path: Path, workers: int, how: str) -> None:
    ran = script(tmp_path, FORKED.replace("WORKERS", str(workers)).replace("os.fork()", how))
    assert "counted 1000" in ran.stdout, ran.stderr
    written = [line for part in (tmp_path / "epochs-files").iterdir() for line in part.read_text().splitlines()]
    assert sorted(map(int, written)) == list(range(1000))


def test_nothing_is_printed_into_another_file_that_has_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    code = """
import sys
sys.stdout = None  # as Python does when it starts without a standard output, whose number another file gets later
from penstock.runtime import standard_streams
standard_streams.open_closed()
standard_streams.outlive_readers()
print("hello", flush=True)
"""
    with (tmp_path / "another").open("wb") as another:
        subprocess.run([sys.executable, "-c", code], stdout=another, check=True, timeout=LIMIT_S)
    assert (tmp_path / "another").read_bytes() == b""


PRINTS = """
import sys
import penstock as ps

def said(i):
    print("number", i)
    return i

flow = ps.Flow("prints")
flow.read(ps.sources.Generator(said, 2000, limit=3000)).map(said).write(ps.sinks.Collect(), name="out")
if __name__ == "__main__":
    job = ps.run(flow, workers=2, local=True, checkpoints=sys.argv[1])
    job.wait(progress=False)
    print(len(job.records("out")), file=sys.stderr)
"""


def test_functions_may_print_though_the_reader_has_gone(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PRINTS)
    command = f'"{sys.executable}" program.py "{tmp_path}/epochs" | head -1'
    ran = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert ran.stdout.startswith("number")
    assert "3000" in ran.stderr


CLOSED = """
import sys
import penstock as ps

flow = ps.Flow("closed")
flow.read(ps.sources.Memory(range(1000))).write(ps.sinks.Collect(), name="out")
if __name__ == "__main__":
    job = ps.run(flow, workers=1, local=True, checkpoints=sys.argv[1])
    job.wait()
    with open(sys.argv[1] + ".result", "w") as result:
        result.write(str(sorted(job.records("out")) == list(range(1000))))
"""


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_program_without_standard_streams_runs_local_jobs(tmp_path: Path, closed: str) -> None:
    (tmp_path / "program.py").write_text(CLOSED)
    command = f'exec "{sys.executable}" program.py "{tmp_path}/epochs" {closed}'
    assert subprocess.run(["bash", "-c", command], cwd=tmp_path, check=False, timeout=LIMIT_S).returncode == 0
    assert (tmp_path / "epochs.result").read_text() == "True"


def script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Run a program, whose argument is a place for its epochs."""
    (folder / "program.py").write_text(text)
    command = [sys.executable, "program.py", str(folder / "epochs")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT_S)


def test_saved_timers_need_the_on_timer_that_they_were_set_for(fresh_name: Callable[[], str], tmp_path: Path) -> None:
    def remind(ctx: ps.ProcessContext, key: int, number: int) -> None:
        ctx.set_timer(at_ms=4_000_000_000_000)

    def reminded(ctx: ps.ProcessContext, key: int, at: int) -> list[int]:
        return [key]

    def reminding(**options: Any) -> ps.Flow:
        flow = ps.Flow(fresh_name())
        numbers = flow.read(ps.sources.Generator(lambda number: number % 7, 500.0))
        numbers.key_by(lambda number: number).process(remind, name="remind", **options).write(ps.sinks.Null())
        return flow

    job = ps.run(reminding(on_timer=reminded), workers=2, local=True, epoch_interval_s=0.2)
    wait_until(lambda: job.status().get("records_read", 0) > 100, "timers are set")
    job.savepoint(tmp_path / "saved")
    job.cancel()
    job.wait(LIMIT_S, progress=False)
    with pytest.raises(ps.JobFailed, match=r"process 'remind' continues with . saved timers, and has no on_timer"):
        ps.run(reminding(), workers=2, local=True, savepoint=tmp_path / "saved").wait(LIMIT_S, progress=False)


def test_a_store_with_any_epoch_of_another_format_is_left_alone(fresh_name: Callable[[], str], tmp_path: Path) -> None:
    name = fresh_name()
    options: dict[str, Any] = {"workers": 2, "local": True, "checkpoints": tmp_path}
    job = ps.run(ticking(name, 10**6), epoch_interval_s=0.1, max_restarts=0, **options)
    wait_until(lambda: job.status().get("epochs", {}).get("complete", 0) > 2, "epochs are complete")
    os.kill(pids(job)[1], signal.SIGKILL)
    with pytest.raises(ps.JobFailed):
        job.wait(LIMIT_S, progress=False)
    oldest, *later = sorted((tmp_path / name / "manifests").glob("*.json"))
    assert later, "the newest epoch is of this format"
    for path in (oldest, tmp_path / name / "copies" / oldest.name):
        path.write_bytes(encode(replace(decode(path.read_bytes(), str(path)), version=FORMAT + 1)))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for start in (
        lambda: ps.resume(name, checkpoints=tmp_path, local=True),
        lambda: ps.run(ticking(name, 1), **options),
    ):
        with pytest.raises(ps.StoreError, match=f"has format {FORMAT + 1}, and .* reads format {FORMAT}"):
            start()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_the_status_says_which_worker_has_no_process(fresh_name: Callable[[], str]) -> None:
    job = ps.run(ticking(fresh_name(), 10**6), workers=2, local=True, epoch_interval_s=0.1)
    wait_until(lambda: job.status().get("epochs", {}).get("complete", 0) > 0, "an epoch is complete")

    def row() -> dict[str, Any]:
        found: dict[str, Any] = job.status()["workers"][1]
        return found

    before = row()
    assert before["state"] == "RUNNING"
    os.kill(before["pid"], signal.SIGKILL)
    seen = []

    def runs_again() -> bool:
        seen.append(row())
        return bool(seen[-1]["pid"] != before["pid"])

    wait_until(runs_again, "the worker has another process")
    assert seen[-1]["state"] == "RUNNING"
    assert {entry["state"] for entry in seen} & {"NONE", "STARTING"}
    job.cancel()
    job.wait(LIMIT_S, progress=False)


def test_what_a_job_that_has_ended_is_asked_names_it_and_its_state(
    fresh_name: Callable[[], str], tmp_path: Path
) -> None:
    flow = counting(fresh_name())
    job = ps.run(flow, local=True, spares=False, checkpoints=tmp_path)
    job.wait(LIMIT_S, progress=False)
    message = f"job '{flow.name}' has ended: finished"
    for ask in (lambda: job.rescale("count", 3), lambda: job.savepoint(tmp_path / "saved")):
        with pytest.raises(ps.JobError, match=message):
            ask()
    # Another program reaches the host before it hears of the job's end.
    for ask in (lambda: job._link.ask(Rescale("count", 3)), lambda: job._link.ask(Migrate({"count[0]": 0}))):
        with pytest.raises(ps.JobError, match=message):
            ask()


def fails(word: str) -> str:
    raise ValueError(word)


def test_the_repr_of_a_job_says_what_it_does_and_how_it_ended(fresh_name: Callable[[], str], tmp_path: Path) -> None:
    name = fresh_name()
    job = ps.run(ticking(name, 10_000_000), workers=2, local=True, spares=False, checkpoints=tmp_path)
    wait_until(lambda: job.status()["records_written"] > 0 and job.status()["uptime_s"] >= 1, "records come through")
    running = rf"<Job '{name}': RUNNING for [\d,]+ s on 2 workers, [\d,]+ records read, [\d,]+ written>"
    assert re.fullmatch(running, repr(job))
    job.cancel()
    job.wait(LIMIT_S, progress=False)
    assert re.fullmatch(running.replace("RUNNING for", "CANCELLED after"), repr(job))


def test_the_repr_of_a_job_that_has_failed_says_why_in_one_line(fresh_name: Callable[[], str], tmp_path: Path) -> None:
    flow = ps.Flow(name := fresh_name())
    flow.read(ps.sources.Memory(["a"])).map(fails, name="failing").write(ps.sinks.Null())
    job = ps.run(flow, local=True, spares=False, checkpoints=tmp_path)
    with pytest.raises(ps.JobFailed):
        job.wait(LIMIT_S, progress=False)
    assert re.fullmatch(rf"<Job '{name}': FAILED.*: operator 'failing' failed: ValueError: a>", repr(job))


def test_a_job_that_fails_before_its_first_epoch_leaves_no_directory(
    fresh_name: Callable[[], str], tmp_path: Path
) -> None:
    flow = ps.Flow(fresh_name())
    flow.read(ps.sources.Memory(WORDS)).map(fails).write(ps.sinks.Null())
    job = ps.run(flow, local=True, spares=False, checkpoints=tmp_path, epoch_interval_s=60)
    with pytest.raises(ps.JobFailed):
        job.wait(LIMIT_S, progress=False)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ps.JobNotFound, match=r"run it with that savepoint again \(savepoint=..., or --savepoint\)"):
        ps.resume(flow.name, checkpoints=tmp_path, local=True)


def test_a_job_that_fails_after_an_epoch_keeps_it(fresh_name: Callable[[], str], tmp_path: Path) -> None:
    flow = ps.Flow(fresh_name())
    flow.read(ps.sources.Generator(lambda i: 1 / (300 - i), 1000.0)).write(ps.sinks.Null())
    job = ps.run(flow, local=True, spares=False, checkpoints=tmp_path, epoch_interval_s=0.05)
    with pytest.raises(ps.JobFailed, match="division"):
        job.wait(LIMIT_S, progress=False)
    assert list((tmp_path / flow.name / "manifests").iterdir())


def test_a_job_that_cannot_be_started_leaves_no_directory(
    fresh_name: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ps.JobError("no")

    monkeypatch.setattr(run_module, "_local_link", refuse)
    flow = counting(fresh_name())
    with pytest.raises(ps.JobError, match="no"):
        ps.run(flow, local=True, checkpoints=tmp_path)
    assert list(tmp_path.iterdir()) == []
    kept = Store.open(tmp_path, flow.name)
    kept.lock()
    with pytest.raises(ps.JobError, match="no"):
        ps.run(flow, local=True, checkpoints=tmp_path)
    assert (tmp_path / flow.name / "snapshots").exists(), "a job that runs may be about to write there"
    kept.release()
