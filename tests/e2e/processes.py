"""Watching processes and waiting for conditions, for tests that kill."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import psutil

# Generous: conditions that hold within a second on an idle machine may take long on a busy one. Ray gives its workers
# the niceness 15, so that they wait for all other processes of the machine.
LIMIT_S = 180.0


def wait_until(condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    """Return when the condition holds; fail the test when it does not within the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s:g} s: {what}")
        time.sleep(0.1)  # most conditions ask the job, which takes some milliseconds of several processes


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    return [process.pid for process in psutil.Process(pid).children(recursive=True)]


def kill(pid: int) -> None:
    """SIGKILL one process, by id."""
    os.kill(pid, signal.SIGKILL)


def command(pid: int) -> str:
    """What a process runs."""
    try:
        return " ".join(psutil.Process(pid).cmdline())[:100]
    except psutil.NoSuchProcess:
        return ""


def wait_gone(pids: list[int], limit_s: float) -> None:
    """Return when none of the processes is alive any more."""
    deadline = time.monotonic() + limit_s
    while left := [pid for pid in pids if alive(pid)]:
        if time.monotonic() > deadline:
            raise AssertionError(f"after {limit_s:g} s still there: {[(pid, command(pid)) for pid in left]}")
        time.sleep(0.05)


def penstock_segments() -> list[str]:
    """Segments with a name that Penstock might have left."""
    return [name for name in os.listdir("/dev/shm") if "penstock" in name.lower()]


def ring_mappings(pid: int) -> int:
    """How many shared-memory rings a process has mapped: anonymous files in /dev/shm."""
    try:
        return sum("/dev/shm/#" in mapping.path for mapping in psutil.Process(pid).memory_maps(grouped=False))
    except psutil.NoSuchProcess:
        return 0
