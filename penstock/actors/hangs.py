"""Who has hung: the JobMaster and its workers watch each other, as nobody else notices a process that is stopped, or
that does not come out of native code.

Silence is counted only while the watching process itself runs: one that was paused, with its machine or alone, finds
answers that it has not read yet, and must not take its own pause for the others'.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Hashable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import ray

from penstock.actors.reaper import start_time

logger = logging.getLogger(__name__)

Who = TypeVar("Who", bound=Hashable)

# How many times one looks within the limit.
_LOOKS = 4


class Silence(Generic[Who]):
    """Counts how long others have been silent. Look every `period_s` seconds."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self.period_s = limit_s / _LOOKS
        self._clock = clock
        self._last = clock()
        self._waited: dict[Who, float] = {}

    def look(self, silent: Collection[Who]) -> list[Who]:
        """`silent`: those who have said nothing since the last look. Who of them has been silent for the limit."""
        now = self._clock()
        # A look that comes late says that this process has been paused, or starved: the others may have spoken.
        passed = min(now - self._last, self.period_s)
        self._last = now
        self._waited = {who: self._waited.get(who, 0.0) + passed for who in silent}
        return [who for who, waited in self._waited.items() if waited >= self.limit_s]


class Process:
    """A process of the job that may have to be killed: where it is, so that no other one is killed in its place."""

    def __init__(self, pid: int, node: str, actor: Any) -> None:
        """Made while the process lives; `actor`: its handle, `node`: its Ray node."""
        self.pid = pid
        self._actor = actor
        self._here = node == ray.get_runtime_context().get_node_id()
        self._started = start_time(pid) if self._here else None

    def kill(self) -> None:
        """End it without a word. Ray may start the actor again."""
        if not self._here:
            ray.kill(self._actor, no_restart=False)
        elif self._started is not None and start_time(self.pid) == self._started:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def watch_master(master: Process, heard: Callable[[], int], limit_s: float, job: str) -> None:
    """In a worker: kill the job's JobMaster when it has asked for nothing for `limit_s` seconds, which it does several
    times within them (`heard`: how often so far). With its worker processes, which end with it, Ray makes a new one
    if the job has epochs. Every worker does so, as each of them may hang too."""

    def watch() -> None:
        silence: Silence[int] = Silence(limit_s)
        before = 0
        never = threading.Event()
        while True:
            never.wait(silence.period_s)
            count = heard()
            # It must have been there once: a job that starts many workers asks nothing of the first for a while.
            if silence.look([master.pid] if 0 < count == before else []):
                logger.warning(
                    "job %s: its JobMaster (process %d) has not been heard of for %g s: killed",
                    job,
                    master.pid,
                    limit_s,
                )
                master.kill()
            before = count

    threading.Thread(target=watch, name="penstock-watch", daemon=True).start()
