"""Loads a job's program in a process of the job, and answers drivers in the name of a job whose program cannot be
loaded.

A program fails to load when a module of the user's is missing on a machine, or raises when it is imported there. The
JobMaster must not fail for this while Ray creates it: Ray tells nobody the cause then, and a second job of the same
name would wait for the first one without limit. So an `UnloadedRunner` takes the place of the JobRunner, tells each
driver how the job has ended, and leaves when they have heard it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from penstock.host.decide.commands import JobEnd
from penstock.host.decide.status import no_status
from penstock.host.process.collected import Encoded
from penstock.host.process.linger import Driver, Drivers
from penstock.runtime.errors import JobError, ProgramNotLoaded, describe
from penstock.runtime.records.pickling import join
from penstock.runtime.records.userfunc import user_line

_HANG_TIMEOUT_S = 60.0  # the job's own is among what cannot be loaded


def load_program(data: bytes, process: str) -> Any:
    """Returns the result of `pickling.join`. Raises ProgramNotLoaded when the user's modules cannot be imported here.
    `process`: the name of this process, for the error."""
    try:
        return join(data)
    except (Exception, SystemExit) as error:  # a user's module may raise anything when it is imported
        line = user_line(error)
        raise ProgramNotLoaded(
            f"the job's program cannot be loaded in {process}: {describe(error)}{f' ({line})' if line else ''}. Each "
            "process of the job imports the modules that the program has imported, from the program's sys.path. "
            "Install the missing module on all machines of the job, or correct what it does when it is imported."
        ) from error


class UnloadedRunner:
    """Has the methods of a JobRunner that drivers call, for a job that has failed before its program was loaded."""

    def __init__(
        self, name: str, error: ProgramNotLoaded, driver_lives: Callable[[Driver], bool], leave: Callable[[], None]
    ) -> None:
        """`leave`: called in a thread of its own when no driver needs this any more."""
        self._end = JobEnd("FAILED", str(error))
        self._status = no_status(name, "FAILED", str(error))
        self._drivers = Drivers(driver_lives, _HANG_TIMEOUT_S)
        self._leave = leave
        self._words = self._end.words(name)

    def start(self) -> None:
        """See JobRunner, also for the methods that follow."""
        threading.Thread(target=self._linger, name="penstock-unloaded", daemon=True).start()

    def outcome(self, driver: Driver) -> JobEnd:
        self._drivers.came(driver)
        return self._end

    def ping(self, driver: Driver) -> None:
        self._drivers.came(driver)

    def status(self) -> dict[str, Any]:
        return self._status

    def stop(self) -> None:
        """Does nothing, because the job has ended."""

    def cancel(self) -> None:
        """Does nothing, because the job has ended."""

    def release(self, driver: Driver) -> None:
        if self._drivers.has_all(driver):
            self._drivers.wake()

    def last_status(self) -> dict[str, Any]:
        return self._status

    def collected(self, channel: str, last: bool = False) -> list[Encoded]:
        return []

    def console(self, driver: Driver, seen: int | None, timeout: float) -> tuple[int, list[str]]:
        return 0, []

    def savepoint(self, url: str, timeout_s: float | None = None) -> None:
        raise JobError(f"{self._words}; a savepoint needs a running job")

    def stop_with_savepoint(self, url: str) -> None:
        raise JobError(f"{self._words}; a savepoint needs a running job")

    def rescale(self, operator: str, parallelism: int) -> None:
        raise JobError(f"{self._words}; rescale needs a running job")

    def migrate(self, tasks: dict[str, int]) -> None:
        raise JobError(f"{self._words}; migrate needs a running job")

    def traffic(self) -> list[dict[str, Any]]:
        raise JobError(f"{self._words}; traffic needs a running job")

    def _linger(self) -> None:
        self._drivers.wait()
        self._leave()
