"""The processes that tests of local jobs look for."""

from __future__ import annotations

from contextlib import suppress

import psutil


def workers_here() -> list[int]:
    """The process ids of the workers of this process's local jobs. This process may have other children, such as the
    cluster of other tests, and workers that have died and wait for their exit code to be read."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if any("start_worker" in word for word in child.cmdline()):
                found.append(child.pid)
    return found
