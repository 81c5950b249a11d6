"""Processes that are stopped for a while, and others that hang for good: nothing is lost, and the job can be told."""

from __future__ import annotations

import ctypes
import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import penstock as ps
from penstock.jobs.progress import trouble
from tests.e2e.jobs import run
from tests.e2e.kill_campaign import master_pid
from tests.e2e.processes import LIMIT_S, wait_gone, wait_until

pytestmark = pytest.mark.ray


def numbers(name: str, limit: int | None = None) -> tuple[ps.Flow, ps.sinks.Collect]:
    flow = ps.Flow(name)
    taken = ps.sinks.Collect()
    flow.read(ps.sources.Generator(lambda i: i, rate=500, limit=limit)).rebalance().map(lambda i: i).write(taken)
    return flow, taken


def running(flow: ps.Flow, **options: Any) -> tuple[Any, list[int], int]:
    """A job through which records flow, the processes of its workers, and that of its JobMaster."""
    job = run(flow, workers=2, **options)
    wait_until(lambda: job.status().get("records_written", 0) > 0, "records flow")
    return job, [worker["pid"] for worker in job.status()["workers"]], master_pid(job)


def silent(job: Any) -> list[int]:
    return [worker["index"] for worker in job.status()["workers"] if worker["silent_s"] > 0]


def test_a_worker_that_was_paused_and_one_in_native_code_can_be_told_to_stop(
    cluster: str, fresh_name: Callable[[], str]
) -> None:
    """It answers nothing meanwhile, not even what many ask of it, and everything after."""
    flow = ps.Flow(fresh_name())
    taken = ps.sinks.Collect()

    def work(i: int) -> int:
        if i == 200:
            ctypes.PyDLL(None).sleep(3)  # one call into native code, which keeps the interpreter for seconds
        return i

    source = ps.sources.Generator(lambda i: i, rate=500)
    flow.read(source, parallelism=1).rebalance().map(work).write(taken)
    job = run(flow, workers=2, epoch_interval_s=0.5)
    wait_until(lambda: job.status().get("records_read", 0) > 200, "records flow")
    wait_until(lambda: not silent(job) and job.status()["records_written"] > 1000, "the long call is over")
    pids = [worker["pid"] for worker in job.status()["workers"]]
    os.kill(pids[1], signal.SIGSTOP)
    wait_until(lambda: silent(job) == [1], "the status says who is silent")
    before = job.status()
    wait_until(lambda: job.status()["workers"][1]["silent_s"] > 6, "it stays silent")
    status = job.status()
    assert "worker 1 has not answered for" in trouble(status)
    assert status["workers"][0]["silent_s"] == 0.0
    assert status["records_read"] >= before["records_read"] > 0, "what it said last is shown"
    job.stop()
    os.kill(pids[1], signal.SIGCONT)
    end = job.wait(LIMIT_S, progress=False)
    assert end["state"] == "FINISHED"
    assert end["epochs"]["restarts"] == 0
    assert sorted(taken.records()) == list(range(end["records_read"]))


def test_a_job_with_a_paused_worker_can_be_cancelled(cluster: str, fresh_name: Callable[[], str]) -> None:
    flow, _ = numbers(fresh_name())
    job, pids, master = running(flow)
    os.kill(pids[0], signal.SIGSTOP)
    job.cancel()
    assert job.wait(LIMIT_S, progress=False)["state"] == "CANCELLED"
    wait_gone([*pids, master], LIMIT_S)


def test_a_master_that_was_paused_continues(cluster: str, fresh_name: Callable[[], str]) -> None:
    flow, taken = numbers(fresh_name(), 2000)
    job, pids, master = running(flow, epoch_interval_s=0.5)
    os.kill(master, signal.SIGSTOP)
    wait_until(lambda: job.status()["master_silent_s"] > 6, "the status says that it does not answer")
    assert "JobMaster has not answered for" in trouble(job.status())
    assert job.status()["state"] == "RUNNING", "the last that is known"
    os.kill(master, signal.SIGCONT)
    wait_until(lambda: job.status()["master_silent_s"] == 0.0, "it answers")
    assert [worker["pid"] for worker in job.status()["workers"]] == pids
    end = job.wait(LIMIT_S, progress=False)
    assert end["epochs"]["restarts"] == 0
    assert Counter(taken.records()) == Counter(range(2000))


def test_a_master_that_hangs_is_replaced(cluster: str, fresh_name: Callable[[], str]) -> None:
    """Its workers see to it: no driver need live."""
    flow, taken = numbers(fresh_name(), 2000)
    job, pids, master = running(flow, epoch_interval_s=0.5, hang_timeout_s=6.0, detached=True)
    wait_until(lambda: job.status()["epochs"]["complete"] >= 1, "an epoch is complete")
    os.kill(master, signal.SIGSTOP)
    wait_gone([master, *pids], LIMIT_S)
    assert job.wait(LIMIT_S, progress=False)["state"] == "FINISHED"
    assert Counter(taken.records()) == Counter(range(2000))


def test_a_master_that_hangs_ends_a_job_without_epochs(cluster: str, fresh_name: Callable[[], str]) -> None:
    flow, _ = numbers(fresh_name())
    job, pids, master = running(flow, epoch_interval_s=None, hang_timeout_s=4.0)
    for pid in (*pids, master):  # its workers cannot notice it, but this program does
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(ps.JobExists):
        run(flow)
    with pytest.raises(ps.JobFailed, match=r"JobMaster died: it had not answered for \d+ s, as it was stopped or hung"):
        job.wait(LIMIT_S, progress=False)
    wait_gone([master, *pids], LIMIT_S)


def test_a_worker_that_hangs_ends_a_job_without_epochs(cluster: str, fresh_name: Callable[[], str]) -> None:
    flow, _ = numbers(fresh_name())
    job, pids, master = running(flow, epoch_interval_s=None, hang_timeout_s=3.0)
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(ps.JobFailed, match=rf"worker 1 \(process {pids[1]}\) did not answer for hang_timeout_s=3 sec"):
        job.wait(LIMIT_S, progress=False)
    wait_gone([master, *pids], LIMIT_S)
