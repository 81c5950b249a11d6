"""A warning for a program that ends while its jobs still run: the jobs end with it, and nothing else would say so.

The warning is printed by a hook at the interpreter's exit. The hook runs before Ray's own hook, because it is
registered later. It changes neither the exit code nor how the jobs end.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.jobs.job import Job

_jobs: weakref.WeakSet[Job] = weakref.WeakSet()  # the jobs that end with this process
_process: list[int] = []  # the id of this process, once it has jobs: they are not those of its forks


def remember(job: Job) -> None:
    """Warn when this process ends before the job. To be called once for each job that is not detached."""
    if not _jobs:
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
        _process[:] = [os.getpid()]
    _jobs.add(job)


def _at_exit() -> None:
    if _process != [os.getpid()]:
        return
    said(list(_jobs), lambda text: print(text, file=sys.stderr, flush=True))


def said(jobs: Iterable[Job], say: Callable[[str], None]) -> None:
    """Warn about each of these jobs that still runs, with the number of records that it has read and written."""
    for job in jobs:
        with suppress(Exception):  # nothing may keep the program from ending
            if job.ends_unasked():
                status = job.status()
                say(
                    f"penstock: this program ends while its job {job.name!r} is {status.state} "
                    f"({status.records_read:,} records read, {status.records_written:,} written), "
                    "and the job ends with it. Call job.wait() to wait for its end, or start it with detached=True, "
                    "and without local=True, on a cluster that outlives the program"
                )
