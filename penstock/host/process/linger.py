"""How long a JobMaster stays after its job's end: until the drivers that want the outcome have what they want.

After the end, a driver fetches the last status and the records of Collect sinks, which may take long through a slow
Ray. So a driver that lives holds the JobMaster, up to a limit. A driver that has died, or that has never called the
JobMaster, must not hold it: while the JobMaster stays, the job's name stays taken and its epochs stay in the store.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from penstock.host.process.reaper import start_time

# How long the JobMaster waits for drivers that may still come, when it knows of no driver that lives.
_LINGER_S = 5.0
# The least time for which a driver that lives can hold the JobMaster.
_PATIENCE_S = 60.0
# The time between two looks whether the drivers still live.
_LOOK_S = 0.5


@dataclass(frozen=True)
class Driver:
    """One handle of a job, and the process that holds this handle. `program`: the id that Ray has given to the program
    of this process."""

    handle: str
    node: str  # the Ray node of the process
    pid: int
    started: int | None
    program: str = ""

    @classmethod
    def here(cls, node: str, program: str = "") -> Driver:
        """Makes a new handle, held by this process on this Ray node."""
        return cls(uuid.uuid4().hex, node, os.getpid(), start_time(os.getpid()), program)

    def lives(self) -> bool:
        """Returns whether the process is still there, which must be on this node."""
        return start_time(self.pid) == self.started


class Drivers:
    """The drivers that want a job's outcome, and the drivers among them that have confirmed that they have it."""

    def __init__(
        self, lives: Callable[[Driver], bool], hang_timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lives = lives
        self._limit_s = max(hang_timeout_s, _PATIENCE_S)
        self._clock = clock
        self._waiting: set[Driver] = set()
        self._served: set[Driver] = set()  # those that have said that they have what they want
        self._changed = threading.Condition()

    def came(self, driver: Driver) -> None:
        """The driver wants the outcome. It says so many times, and one of its calls may arrive after `has_all`."""
        with self._changed:
            if driver not in self._served:
                self._waiting.add(driver)

    def has_all(self, driver: Driver) -> bool:
        """The driver has the outcome. Returns whether it was the last of those that live."""
        with self._changed:
            self._waiting.discard(driver)
            self._served.add(driver)
            return not self._living()

    def may_go(self, after_s: float) -> bool:
        """Whether the JobMaster is needed no more, `after_s` seconds after the job's end."""
        with self._changed:
            if self._living():
                return after_s >= self._limit_s
            return bool(self._served) or after_s >= _LINGER_S

    def wait(self) -> None:
        """Called at the job's end: return when the JobMaster may go."""
        passed, last = 0.0, self._clock()
        while True:
            with self._changed:
                if self.may_go(passed):
                    return
                self._changed.wait(_LOOK_S)
            now = self._clock()
            # A pause of this process does not count, because no driver can fetch anything meanwhile.
            passed += min(now - last, 2 * _LOOK_S)
            last = now

    def lives(self, driver: Driver) -> bool:
        """Returns whether a driver lives."""
        return self._lives(driver)

    def wake(self) -> None:
        """Make `wait` look at once."""
        with self._changed:
            self._changed.notify_all()

    def _living(self) -> set[Driver]:
        self._waiting = {driver for driver in self._waiting if self._lives(driver)}
        return self._waiting
