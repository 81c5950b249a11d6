"""Finding processes that hang. The JobMaster and its workers watch each other, because nobody else notices a process
that is stopped, or that does not come back from native code.

Silence counts only while the watching process itself runs. A process that was paused, alone or with its machine, has
answers waiting that it has not read yet, and must not take its own pause for silence of the others.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Hashable
from contextlib import suppress
from typing import Generic, TypeVar

from penstock.host.process.reaper import start_time

logger = logging.getLogger(__name__)

Who = TypeVar("Who", bound=Hashable)

# The number of looks within the limit.
_LOOKS = 4


class SilenceDetector(Generic[Who]):
    """Measures for how long other processes have been silent. `look` must be called every `period_s` seconds."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic, *, looks: int = _LOOKS) -> None:
        """`looks`: the number of looks within the limit."""
        self.limit_s = limit_s
        self.period_s = limit_s / looks
        self._clock = clock
        self._last = clock()
        self._waited: dict[Who, float] = {}

    def look(self, silent: Collection[Who]) -> list[Who]:
        """`silent`: those that have said nothing since the last look. Returns those of them that have been silent for
        the limit."""
        now = self._clock()
        # When a look comes late, this process was paused or got no CPU, and the others may have spoken meanwhile.
        passed = min(now - self._last, self.period_s)
        self._last = now
        self._waited = {who: self._waited.get(who, 0.0) + passed for who in silent}
        return [who for who, waited in self._waited.items() if waited >= self.limit_s]


class Process:
    """A process of this machine that may have to be killed. It is known by its start time, so that no other process
    with the same process id is killed in its place."""

    def __init__(self, pid: int) -> None:
        """Must be made while the process lives."""
        self.pid = pid
        self._started = start_time(pid)

    def kill(self) -> None:
        """Kills the process. Whatever carries the job may start it again."""
        if self._started is not None and start_time(self.pid) == self._started:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def watch_master(master: Process, heard: Callable[[], int], limit_s: float, job: str) -> None:
    """In a worker, start a thread that kills the job's JobMaster when it has sent no request for `limit_s` seconds.

    A JobMaster that lives sends several requests within this time; `heard` returns their number so far. The worker
    processes end with the JobMaster, and if the job has epochs, Ray starts a new JobMaster. Every worker watches,
    because each of them may hang too.
    """

    def silent() -> None:
        # It must have been heard once: while a job starts many workers, the first ones get no request for a while.
        if heard():
            logger.warning(
                "job %s: its JobMaster (process %d) has not been heard of for %g s, and is killed",
                job,
                master.pid,
                limit_s,
            )
            master.kill()

    on_silence(heard, limit_s, silent, threading.Event())


def on_silence(
    heard: Callable[[], int], limit_s: float, silent: Callable[[], None], over: threading.Event, *, looks: int = _LOOKS
) -> None:
    """Starts a thread that calls `silent` when `heard`, the number of messages so far, has not grown for `limit_s`
    seconds, and again at each look until it grows. The thread ends when `over` is set. `looks`: see SilenceDetector."""

    def watch() -> None:
        silence: SilenceDetector[None] = SilenceDetector(limit_s, looks=looks)
        before = heard()
        while not over.wait(silence.period_s):
            count = heard()
            if silence.look([None] if count == before else []):
                silent()
            before = count

    threading.Thread(target=watch, name="penstock-watch", daemon=True).start()
