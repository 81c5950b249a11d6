"""UnloadedRunner: answers drivers in the name of a job whose program cannot be loaded.

The JobMaster must not fail for this while Ray creates it: Ray tells nobody the cause then, and a second job of the same
name would wait for the first one without limit. So an UnloadedRunner takes the place of the JobRunner, tells each
driver how the job has ended, and leaves when they have heard it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from penstock.host.carry import requests
from penstock.host.carry.requests import Request
from penstock.host.decide.commands import JobEnd
from penstock.host.process.linger import Driver, Drivers
from penstock.runtime.errors import JobError, ProgramNotLoaded
from penstock.runtime.status import JobStatus

_HANG_TIMEOUT_S = 60.0  # the job's own is among what cannot be loaded


class UnloadedRunner:
    """Stands for the JobRunner of a job that has failed before its program was loaded."""

    def __init__(
        self, name: str, error: ProgramNotLoaded, driver_lives: Callable[[Driver], bool], leave: Callable[[], None]
    ) -> None:
        """`leave`: called in a thread of its own when no driver needs this any more."""
        self._name = name
        self._end = JobEnd("FAILED", str(error))
        self._drivers = Drivers(driver_lives, _HANG_TIMEOUT_S)
        self._leave = leave

    def start(self) -> None:
        """See JobRunner."""
        threading.Thread(target=self._linger, name="penstock-unloaded", daemon=True).start()

    def ask(self, request: Request[Any]) -> Any:
        """See JobRunner."""
        match request:
            case requests.Ping(driver):
                self._drivers.came(driver)
                return None
            case requests.Outcome(driver):
                self._drivers.came(driver)
                return self._end
            case requests.Status() | requests.LastStatus():
                return JobStatus(name=self._name, state="FAILED", error=self._end.error)
            case requests.Stop() | requests.Cancel():
                return None
            case requests.Records():
                return []
            case requests.Lines():
                return 0, []
            case requests.Release(driver):
                if self._drivers.has_all(driver):
                    self._drivers.wake()
                return None
        raise JobError(f"{self._end.words(self._name)}; {request.verb} needs a running job")

    def _linger(self) -> None:
        self._drivers.wait()
        self._leave()
