"""However a job ends, nothing of it stays: no process, no actor, no segment, no job of its name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

import penstock as ps
from penstock.actors.cluster import find_master, program_has_ended
from penstock.actors.job_master import _RayCarrier
from penstock.actors.ray_link import RayLink
from penstock.host.carry.requests import Records, Release, Request
from penstock.host.process.linger import Driver
from penstock.jobs.job import Job
from tests.e2e.processes import (
    LIMIT_S,
    alive,
    descendants,
    kill,
    penstock_segments,
    ring_mappings,
    wait_gone,
    wait_until,
)

GONE_S = 10.0  # what the design promises for leftovers


def busy_flow(name: str) -> ps.Flow:
    """An endless flow over two exchanges."""
    flow = ps.Flow(name)
    (
        flow.read(ps.sources.Generator(lambda i: f"w{i % 100}", rate=1000))
        .rebalance()
        .map(str.upper)
        .key_by(str.lower)
        .count()
        .write(ps.sinks.Null())
    )
    return flow


def started(flow: ps.Flow, workers: int = 2, **options: Any) -> tuple[ps.Job, list[int]]:
    """The job, running, and the processes of its workers and its JobMaster."""
    import ray

    job = ps.run(flow, workers=workers, **options)
    wait_until(lambda: job.status().get("records_written", 0) > 0, "records flow")
    master = ray.get(job._link.handle.__ray_call__.remote(lambda self: os.getpid()))
    pids = [worker["pid"] for worker in job.status()["workers"]]
    assert all(ring_mappings(pid) >= 1 for pid in pids), "each worker has rings mapped"
    return job, [*pids, master]


def assert_gone(name: str, pids: list[int], limit_s: float = GONE_S) -> None:
    wait_gone(pids, limit_s)
    assert penstock_segments() == []

    def unknown() -> bool:
        try:
            ps.attach(name)
        except ps.JobNotFound:
            return True
        return False

    wait_until(unknown, f"job {name} is unknown", limit_s)


def test_stop_drains(cluster: str, fresh_name: Callable[[], str]) -> None:
    flow = ps.Flow(fresh_name())
    taken = ps.sinks.Collect()
    flow.read(ps.sources.Generator(lambda i: i, rate=2000)).rebalance().map(lambda i: i).write(taken)
    job, pids = started(flow)
    job.stop()
    status = job.wait(LIMIT_S, progress=False)
    assert status["state"] == "FINISHED"
    records = sorted(taken.records())
    assert records, "what was read went through"
    assert len(records) == status["records_read"]
    assert_gone(flow.name, pids)


def test_cancel(cluster: str, fresh_name: Callable[[], str]) -> None:
    flow = busy_flow(fresh_name())
    job, pids = started(flow)
    job.cancel()
    assert job.wait(LIMIT_S, progress=False)["state"] == "CANCELLED"
    assert_gone(flow.name, pids)


def test_cancel_while_a_function_hangs(cluster: str, fresh_name: Callable[[], str]) -> None:
    def hang(record: int) -> int:
        if record == 100:
            threading.Event().wait()
        return record

    flow = ps.Flow(fresh_name())
    flow.read(ps.sources.Generator(lambda i: i, rate=1000)).map(hang).write(ps.sinks.Null())
    job, pids = started(flow, 1)
    job.cancel()
    assert job.wait(LIMIT_S, progress=False)["state"] == "CANCELLED"
    assert_gone(flow.name, pids)


def test_worker_killed_in_a_job_without_epochs(cluster: str, fresh_name: Callable[[], str]) -> None:
    flow = busy_flow(fresh_name())
    job, pids = started(flow, epoch_interval_s=None)
    kill(pids[1])
    with pytest.raises(
        ps.JobFailed, match=rf"worker 1 \(process {pids[1]}\) died|process {pids[1]} died while it wrote"
    ):
        job.wait(LIMIT_S, progress=False)
    assert_gone(flow.name, pids)


def test_a_worker_that_hangs_is_replaced(cluster: str, fresh_name: Callable[[], str]) -> None:
    job, pids = started(busy_flow(fresh_name()), hang_timeout_s=2.0)
    os.kill(pids[1], signal.SIGSTOP)
    wait_gone([pids[1]], LIMIT_S)
    before = job.status()["records_read"]
    wait_until(lambda: job.status()["epochs"]["restarts"] == 1, "it is replaced")
    wait_until(lambda: job.state == "RUNNING" and job.status()["records_read"] > before, "records flow again")
    job.cancel()
    job.wait(progress=False)


def test_a_worker_that_cannot_load_the_program_in_time_fails_the_start(
    cluster: str, fresh_name: Callable[[], str]
) -> None:
    class Hanging:
        """It can be made of its pickled form in the JobMaster, which has a name, and never in a worker."""

        def __call__(self, record: str) -> str:
            return record

        def __setstate__(self, state: dict[str, Any]) -> None:
            import ray

            if not ray.get_runtime_context().get_actor_name():
                threading.Event().wait()

        def __getstate__(self) -> dict[str, Any]:
            return {"anything": "but nothing"}

    for limit_s in (10, 60):
        flow = ps.Flow(fresh_name())
        flow.read(ps.sources.Memory(["a"])).map(Hanging()).write(ps.sinks.Null())
        job = ps.run(flow, epoch_interval_s=None, start_timeout_s=limit_s)
        with pytest.raises((ps.JobFailed, ps.NotEnoughResources)) as failed:
            job.wait(LIMIT_S, progress=False)
        assert_gone(flow.name, [])
        if not isinstance(failed.value, ps.NotEnoughResources):
            break
        # On a busy machine the worker's process may take longer than that to start.
        assert "1 of 1 workers had not started within start_timeout_s=10 seconds, although" in str(failed.value)
    assert f"had not loaded the job's program within start_timeout_s={limit_s} seconds" in str(failed.value)


def test_master_killed_in_a_job_without_epochs(cluster: str, fresh_name: Callable[[], str]) -> None:
    flow = busy_flow(fresh_name())
    job, pids = started(flow, epoch_interval_s=None)
    kill(pids[-1])
    with pytest.raises(ps.JobFailed, match="JobMaster died"):
        job.wait(LIMIT_S, progress=False)
    assert_gone(flow.name, pids)


def test_failing_function(fresh_name: Callable[[], str]) -> None:
    def parse(text: str) -> int:
        return int(text)

    flow = ps.Flow(fresh_name())
    lines = ps.sources.Memory(["1", "2", "three" * 100, "4"])
    flow.read(lines).map(parse, name="parse").write(ps.sinks.Null())
    job = ps.run(flow, workers=2, local=True)
    with pytest.raises(ps.JobFailed) as failed:
        job.wait(LIMIT_S, progress=False)
    assert failed.value.operator == "parse"
    message = str(failed.value)
    assert "ValueError: invalid literal" in message
    assert "record: 'threethree" in message
    assert "characters)" in message
    assert f"{Path(__file__).name}" in message
    assert "return int(text)" in message
    assert job.status()["state"] == "FAILED"
    assert job.status()["epochs"]["restarts"] == 0


DRIVER = """
import json, os, sys, time
import penstock as ps
import ray

address, name, detached = sys.argv[1], sys.argv[2], sys.argv[3] == "detached"
flow = ps.Flow(name)
table = {i: f"{i:01000d}" for i in range(1000)} if "large" in sys.argv else {}
(flow.read(ps.sources.Generator(lambda i: f"w{i % 100}", rate=1000))
     .rebalance().map(lambda word: (word + table.get(word, "")).upper())
     .key_by(str.lower).count().write(ps.sinks.Null()))
job = ps.run(flow, workers=2, address=address, detached=detached)
while not job.status().get("records_written"):
    time.sleep(0.05)
master = ray.get(job._link.handle.__ray_call__.remote(lambda self: os.getpid()))
print(json.dumps([*(w["pid"] for w in job.status()["workers"]), master]), flush=True)
job.wait(progress=False)
"""


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Callable[..., tuple[Any, list[int]]]]:
    """Starts drivers in processes of their own: (process, pids of its workers and JobMaster)."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    running: list[subprocess.Popen[str]] = []

    def start(address: str, name: str, *kind: str) -> tuple[Any, list[int]]:
        process = subprocess.Popen(
            [sys.executable, str(script), address, name, *(kind or ("attached",))],
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        running.append(process)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("["):
                return process, json.loads(line)
        raise AssertionError("the driver ended before its job ran")

    yield start
    for process in running:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_driver_killed_on_a_shared_cluster(
    cluster: str, fresh_name: Callable[[], str], driver: Callable[..., tuple[Any, list[int]]]
) -> None:
    name = fresh_name()
    process, pids = driver(cluster, name)
    assert ps.attach(name).state == "RUNNING"
    kill(process.pid)
    assert_gone(name, pids)


@pytest.mark.ray
def test_driver_killed_with_its_own_cluster(
    fresh_name: Callable[[], str], driver: Callable[..., tuple[Any, list[int]]]
) -> None:
    process, pids = driver("local", fresh_name())
    started_by_it = descendants(process.pid)
    assert set(pids) <= set(started_by_it)
    kill(process.pid)
    wait_gone([*pids, *started_by_it], GONE_S)
    assert penstock_segments() == []


def test_detached_job_outlives_its_driver(
    cluster: str, fresh_name: Callable[[], str], driver: Callable[..., tuple[Any, list[int]]]
) -> None:
    """The JobMaster of a large flow can even start again: what Ray keeps of large arguments goes with the driver."""
    name = fresh_name()
    process, pids = driver(cluster, name, "detached", "large")
    job = ps.attach(name)
    wait_until(lambda: (job.status().get("epochs") or {}).get("complete"), "an epoch is complete")
    programs = {entry["DriverPid"]: entry["JobID"] for entry in ray._private.state.jobs()}
    assert not program_has_ended(programs[process.pid])
    kill(process.pid)
    process.wait()
    # A JobMaster on another node learns from Ray that nobody wants the outcome any more.
    wait_until(lambda: program_has_ended(programs[process.pid]), "Ray knows that the driver has ended")
    master = object.__new__(_RayCarrier)
    master._node = "another node"
    assert not master.driver_lives(Driver("of the driver", "node", process.pid, None, programs[process.pid]))
    assert master.driver_lives(Driver("of this process", "node", os.getpid(), None, programs[os.getpid()]))
    before = job.status()["records_written"]
    wait_until(lambda: job.status()["records_written"] > before, "the job continues")
    with pytest.raises(ps.JobExists, match=name):
        ps.run(busy_flow(name))
    assert all(map(alive, pids))
    kill(pids[-1])

    def goes_on() -> bool:
        status = job.status()
        return (
            status["state"] == "RUNNING"
            and status.get("records_written", 0) > 0
            and not set(pids) & {worker["pid"] for worker in status["workers"]}
        )

    wait_until(goes_on, "the job continues", LIMIT_S)
    job.stop()
    assert job.wait(LIMIT_S, progress=False)["state"] == "FINISHED"
    assert_gone(name, pids)


def test_a_job_cannot_wait_longer_for_a_node_than_ray(cluster: str, fresh_name: Callable[[], str]) -> None:
    with pytest.raises(ps.FlowError, match=r"node_timeout_s=16.0 is longer than Ray itself waits .* which is 15 s"):
        ps.run(busy_flow(fresh_name()), node_timeout_s=16)


def test_not_enough_resources(cluster: str, fresh_name: Callable[[], str]) -> None:
    flow = busy_flow(fresh_name())
    job = ps.run(flow, workers=2, cpus_per_worker=1000, start_timeout_s=3)
    with pytest.raises(ps.NotEnoughResources, match=r"2 x 1000 = 2000 CPUs, and the cluster has fewer: .* has"):
        job.wait(LIMIT_S, progress=False)
    assert_gone(flow.name, [])


def test_idle_job_uses_little_cpu(cluster: str, fresh_name: Callable[[], str]) -> None:
    """Not a measurement (benchmarks/ has that): a loop that spins instead of sleeping would show at once."""
    flow = ps.Flow(fresh_name())
    source = ps.sources.Generator(lambda i: i, rate=[(1000, 1.0), (0.001, 3600.0)])
    flow.read(source).rebalance().map(str).key_by(str).count().write(ps.sinks.Null())
    job, pids = started(flow)

    def cpu_s() -> float:
        times = [psutil.Process(pid).cpu_times() for pid in pids]
        return sum(each.user + each.system for each in times)

    wait_until(lambda: job.status()["read_per_s"] < 1, "the burst is over")
    before = cpu_s()
    time.sleep(3.0)
    used = (cpu_s() - before) / 3.0
    job.cancel()
    job.wait(LIMIT_S, progress=False)
    assert used < 0.25, f"an idle job of 2 workers used {used:.0%} of a core"


def test_a_jobmaster_hears_however_many_handles_wait_for_the_end(cluster: str, fresh_name: Callable[[], str]) -> None:
    """Each handle waits for the job's end, and waits further in the JobMaster when its driver has died."""
    job, _ = started(busy_flow(fresh_name()), workers=1)
    assert ps.attach(job.name) is job
    handles = [Job(job.name, RayLink(job.name, find_master(job.name)), {}) for _ in range(100)]
    status = handles[-1].status()
    assert (status["state"], status["master_silent_s"]) == ("RUNNING", 0.0)
    handles[0].cancel()
    assert [handle.wait(LIMIT_S, progress=False)["state"] for handle in handles] == ["CANCELLED"] * len(handles)


@pytest.mark.parametrize(
    ("kind", "sent"),
    [(Records, signal.SIGKILL), (Records, signal.SIGSTOP), (Release, signal.SIGSTOP)],
)
def test_a_jobmaster_that_dies_or_hangs_after_the_end_of_its_job_is_replaced(
    kind: type[Request[Any]],
    sent: signal.Signals,
    cluster: str,
    fresh_name: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Between the end and the release there are no workers that could kill a JobMaster which hangs. Another JobMaster
    must come to the end again before it tells what the Collect sinks have."""
    original = RayLink.ask
    masters: list[int] = []

    def signalled(self: RayLink, request: Request[Any]) -> Any:
        if masters and isinstance(request, kind) and getattr(request, "last", True):
            os.kill(masters.pop(), sent)
        return original(self, request)

    monkeypatch.setattr(RayLink, "ask", signalled)
    begin = tmp_path / "begin"

    def held(i: int) -> int:
        while not begin.exists():
            time.sleep(0.01)
        return i

    flow, out = ps.Flow(fresh_name()), ps.sinks.Collect()
    flow.read(ps.sources.Memory(range(3000))).map(held).rebalance().map(lambda i: i + 1).write(out)
    job = ps.run(flow, workers=2, epoch_interval_s=0.3, hang_timeout_s=2, checkpoints=tmp_path / "epochs")
    masters.append(ray.get(job._link.handle.__ray_call__.remote(lambda self: os.getpid())))
    begin.touch()
    assert job.wait(LIMIT_S, progress=False)["state"] == "FINISHED"
    assert sorted(out.records()) == list(range(1, 3001))
    assert_gone(flow.name, [], LIMIT_S)


class Unloadable:
    """A function that the process which has made it can unpickle, and no other process."""

    def __init__(self, how: str) -> None:
        self.state = os.getpid(), how

    def __call__(self, i: int) -> int:
        return 2 * i

    def __getstate__(self) -> tuple[int, str]:
        return self.state

    def __setstate__(self, state: tuple[int, str]) -> None:
        self.state = state
        if os.getpid() != state[0]:
            if state[1] == "dies":
                os._exit(3)
            {"raises": int, "exits": sys.exit}[state[1]]("3x")


@pytest.mark.parametrize(
    ("how", "epochs", "said"),
    [
        ("raises", True, "ValueError: invalid literal for int() with base 10: '3x'"),
        ("exits", False, "called sys.exit('3x')"),
        # In a job with epochs, Ray starts a JobMaster that dies again as often as it dies, and the job stays STARTING.
        ("dies", False, "its JobMaster died"),
    ],
)
def test_a_program_that_cannot_be_loaded_fails_with_its_cause_and_frees_its_name(
    how: str, epochs: bool, said: str, cluster: str, fresh_name: Callable[[], str], tmp_path: Path
) -> None:
    """Ray does not tell why an actor could not be made, and its name stays taken while the driver has its handle."""
    options: dict[str, Any] = {"checkpoints": tmp_path / "epochs"} if epochs else {"epoch_interval_s": None}
    name, jobs = fresh_name(), []
    for _ in range(2):
        flow = ps.Flow(name)
        flow.read(ps.sources.Memory([1, 2])).map(Unloadable(how)).write(ps.sinks.Null())
        jobs.append(ps.run(flow, **options))
        with pytest.raises(ps.JobFailed) as failed:
            jobs[-1].wait(LIMIT_S, progress=False)
        assert said in str(failed.value)
        if how != "dies":
            assert "the job's program cannot be loaded in the JobMaster: " in str(failed.value)
            assert "in __setstate__" in str(failed.value)
            assert jobs[-1].status()["state"] == "FAILED"
            assert jobs[-1].status()["error"] in str(failed.value)
    flow, out = ps.Flow(name), ps.sinks.Collect()
    flow.read(ps.sources.Memory([1, 2])).map(lambda i: 3 * i).write(out)
    jobs.append(ps.run(flow, **options))
    assert jobs[-1].wait(LIMIT_S, progress=False)["state"] == "FINISHED"
    assert out.records() == [3, 6]
    assert_gone(name, [], LIMIT_S)
