"""What a program is told that ends while its jobs still run: they end with it, and nothing else would say so.

A hook at the interpreter's exit, which runs before Ray's own, as it is registered later. It changes nothing: the exit
code stays, and the jobs end as they would.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol


class _Running(Protocol):
    """What is wanted of a job."""

    name: str

    def ends_unasked(self) -> bool:
        """Whether it runs, and nobody has cancelled it."""
        ...

    def status(self) -> dict[str, Any]:
        """What it does now."""
        ...


_jobs: weakref.WeakSet[Any] = weakref.WeakSet()  # that end with this process


def remember(job: _Running) -> None:
    """Say it when this process ends before the job does. Once for each job that is not detached."""
    if not _jobs:
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
    _jobs.add(job)


def _at_exit() -> None:
    said(list(_jobs), lambda text: print(text, file=sys.stderr, flush=True))


def said(jobs: Iterable[_Running], say: Callable[[str], None]) -> None:
    """Say of each of these jobs that still runs what is lost with it."""
    for job in jobs:
        with suppress(Exception):  # the program ends: nothing may stand in its way
            if job.ends_unasked():
                status = job.status()
                say(
                    f"penstock: this program ends while its job {job.name!r} is {status['state']} "
                    f"({status.get('records_read', 0):,} records read, {status.get('records_written', 0):,} written), "
                    "and the job ends with it. Call job.wait() to wait for its end, or start it with detached=True on "
                    "a cluster that outlives the program"
                )
