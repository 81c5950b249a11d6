"""The child processes of a local job: how they start, how they end, and that none outlives the program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

import penstock as ps
from penstock.host.carry.processes import CannotStart, ProcessDied
from penstock.host.process.worker_process import WorkerOptions
from penstock.local import processes as module
from penstock.local.processes import LocalProcesses
from penstock.runtime.records.pickling import Program
from tests.e2e.processes import LIMIT_S, alive, wait_until
from tests.local.workers import workers_here

OPTIONS = WorkerOptions(ring_bytes=None, window_bytes=1 << 18)


def program() -> bytes:
    flow = ps.Flow("local-processes")
    flow.read(ps.sources.Memory([1, 2])).write(ps.sinks.Collect())
    plan = flow.plan(1)
    return Program().dumps((plan, {task.number: 0 for task in plan.tasks}, None, "run"))


def soon() -> float:
    return time.monotonic() + LIMIT_S


@pytest.fixture
def processes() -> Iterator[LocalProcesses]:
    made = LocalProcesses("test", OPTIONS, lambda worker, incarnation, number, report: None)
    yield made
    made.close()


def test_a_worker_that_is_ready_says_where_it_is(processes: LocalProcesses) -> None:
    handle = processes.start(0, 1, 0, program(), soon())
    assert handle.info["index"] == 0
    assert psutil.Process(handle.info["pid"]).ppid() == os.getpid()
    # Ctrl-C in the terminal of the program goes to all processes of its session.
    assert os.getsid(handle.info["pid"]) != os.getsid(0)


@pytest.mark.parametrize("before_it_runs", [True, False])
def test_the_death_of_a_worker_is_told_with_its_signal(processes: LocalProcesses, before_it_runs: bool) -> None:
    handle = processes.start(0, 1, 0, program(), soon())
    if before_it_runs:
        os.kill(handle.info["pid"], signal.SIGTERM)
        wait_until(lambda: psutil.Process(handle.info["pid"]).status() == psutil.STATUS_ZOMBIE, "the worker died")
    else:
        threading.Timer(0.1, lambda: os.kill(handle.info["pid"], signal.SIGTERM)).start()
    with pytest.raises(ProcessDied, match="SIGTERM"):
        handle.run()


def test_a_program_that_cannot_be_loaded_says_why(processes: LocalProcesses) -> None:
    with pytest.raises(CannotStart, match="UnpicklingError") as caught:
        processes.start(0, 1, 0, b"no program", soon())
    assert caught.value.kind == "program"


def test_a_worker_that_is_not_ready_in_time_is_killed(processes: LocalProcesses) -> None:
    with pytest.raises(CannotStart, match="not ready in time") as caught:
        processes.start(0, 1, 0, program(), time.monotonic())
    assert caught.value.kind == "died"
    processes.close()
    assert not workers_here()


def test_a_worker_that_ends_while_it_starts_says_how(
    processes: LocalProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    with pytest.raises(CannotStart, match="exit code 1") as caught:
        processes.start(0, 1, 0, program(), soon())
    assert caught.value.kind == "died"
    monkeypatch.setattr(module.sys, "executable", "/no/such/python")
    with pytest.raises(CannotStart, match="No such file") as caught:
        processes.start(0, 1, 0, program(), soon())
    assert caught.value.kind == "resources"


def test_after_the_end_there_are_no_processes_and_no_new_ones(processes: LocalProcesses) -> None:
    handle = processes.start(0, 1, 0, program(), soon())
    processes.close()
    assert not psutil.pid_exists(handle.info["pid"])
    with pytest.raises(CannotStart, match="has ended"):
        processes.start(0, 2, 0, program(), soon())


def test_workers_end_with_the_program_however_it_ends() -> None:
    """Also when a child of the program keeps the sockets of its workers open."""
    script = """
        import os, sys, time
        from tests.local.test_processes import *
        worker = LocalProcesses("test", OPTIONS, print).start(0, 1, 0, program(), soon())
        if os.fork():
            print(worker.info["pid"], flush=True)
        time.sleep(1000)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        try:
            assert running.stdout is not None
            worker = int(running.stdout.readline())
            running.kill()
            wait_until(lambda: not alive(worker), "the worker has ended")
        finally:
            os.killpg(running.pid, signal.SIGKILL)
