"""Ends the processes of a Ray cluster that a driver has started and that are left when that driver is killed.

When the driver dies the kernel kills the cluster's main processes with it, and their workers follow, but two of Ray's
agents first try for a minute to report the death to a server that is dead too. This small process, started beside the
cluster, sleeps until its standard input closes, which the kernel does however the driver ends, gives the cluster a
moment to go by itself, and then kills, by process id and start time, those of the processes it was told of that
are left. It is run as a script by a bare interpreter and imports only what starts quickly.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

_GRACE_S = 4.0  # a cluster that is shut down in order is gone within a second or two


def start(pids: list[int]) -> subprocess.Popen[bytes]:
    """Start the reaper for these processes; it lives as long as this process, plus the grace time."""
    known = [f"{pid}:{started}" for pid in pids if (started := start_time(pid)) is not None]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", os.path.abspath(__file__), *known],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )


def start_time(pid: int) -> int | None:
    """Returns when a process started, in clock ticks since boot; None when the process has ended.

    Not psutil's `create_time()`: it adds the time of boot by the system clock, which may be set between two looks, and
    two processes that compare start times would disagree. The reaper could not load psutil either, and workers would
    take 20 ms longer to start.
    """
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def main(arguments: list[str]) -> None:
    """Waits for the end of standard input, then for the processes "pid:start time", then kills the processes that are
    left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while os.read(0, 1):
        pass
    known = [(int(pid), int(started)) for pid, started in (argument.split(":") for argument in arguments)]
    deadline = time.monotonic() + _GRACE_S
    while known and time.monotonic() < deadline:
        known = [(pid, started) for pid, started in known if start_time(pid) == started]
        time.sleep(0.2)
    for pid, started in known:
        if start_time(pid) == started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
