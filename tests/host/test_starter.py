"""Child processes that end with the program, whichever thread has asked for them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from penstock.host.process.starter import started
from tests.e2e.processes import alive, wait_gone

# It says so when the kernel is told to kill it with the thread that has started it.
BOUND = """
import ctypes, signal, sys
ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
print("bound", flush=True)
sys.stdin.read()
"""


def bound_process() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", BOUND], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def of_a_thread_that_ends(start: Callable[[], subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """Starts a process in a thread, and returns it when it is bound to its starter, and the thread has ended."""
    made: list[subprocess.Popen[str]] = []

    def in_thread() -> None:
        made.append(start())
        assert made[0].stdout is not None
        made[0].stdout.readline()

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    return made[0]


def test_a_process_outlives_the_thread_that_has_asked_for_it() -> None:
    bound = of_a_thread_that_ends(bound_process)
    wait_gone([bound.pid], 30.0)  # as it would be for every process, and at this moment for the next one too
    kept = of_a_thread_that_ends(lambda: started(bound_process))
    after = of_a_thread_that_ends(bound_process)
    wait_gone([after.pid], 30.0)
    assert alive(kept.pid)
    for process in (bound, kept, after):
        process.communicate()
    assert kept.returncode == 0
    assert (bound.returncode, after.returncode) == (-signal.SIGKILL, -signal.SIGKILL)


def test_what_cannot_be_started_is_told() -> None:
    with pytest.raises(FileNotFoundError):
        started(lambda: subprocess.Popen(["/there/is/no/such/program"]))


def test_a_fork_starts_its_own() -> None:
    program = (
        "import os, subprocess\n"
        "from penstock.host.process.starter import started\n"
        "started(lambda: subprocess.run(['true'], check=True))\n"
        "if fork := os.fork():\n"
        "    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]))\n"
        "os._exit(started(lambda: 7))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], timeout=180, check=False)
    assert ended.returncode == 7
