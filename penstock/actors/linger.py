"""How long a JobMaster stays after its job's end: until the drivers that asked for the outcome have what they want.

A driver fetches the last status and the records of Collect sinks after the end, and through a slow Ray that takes
longer than any short time. So a driver that lives holds the JobMaster, up to a limit. A driver that has died, or that
nobody has heard of, must not: the job's name stays taken, and its epochs stay in the store, for as long.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from penstock.actors.reaper import start_time

# For drivers that ask late, where none is known that lives.
_LINGER_S = 5.0
# The least limit for drivers that live.
_PATIENCE_S = 60.0
# Between two looks whether they live.
_LOOK_S = 0.5


@dataclass(frozen=True)
class Driver:
    """One of the handles of a job, and the process that holds it."""

    handle: str
    node: str  # its Ray node
    pid: int
    started: int | None

    @classmethod
    def here(cls, node: str) -> Driver:
        """A new handle of this process, on this Ray node."""
        return cls(uuid.uuid4().hex, node, os.getpid(), start_time(os.getpid()))

    def lives(self, node: str) -> bool:
        """Whether the process is still there, seen from a Ray node. Of one on another node nothing is known: True."""
        return self.node != node or start_time(self.pid) == self.started


class Drivers:
    """The drivers that have asked for a job's outcome, and have not said yet that they have what they want."""

    def __init__(
        self, lives: Callable[[Driver], bool], hang_timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lives = lives
        self._limit_s = max(hang_timeout_s, _PATIENCE_S)
        self._clock = clock
        self._waiting: set[Driver] = set()
        self._served = False  # one has said that it has what it wants
        self._changed = threading.Condition()

    def came(self, driver: Driver) -> None:
        """It has asked for the outcome; Ray may ask again for it."""
        with self._changed:
            self._waiting.add(driver)

    def has_all(self, driver: Driver) -> bool:
        """It has what it wants; whether it was the last of those that live."""
        with self._changed:
            self._waiting.discard(driver)
            self._served = True
            return not self._living()

    def may_go(self, after_s: float) -> bool:
        """Whether nobody needs the JobMaster any more, so long after the end."""
        with self._changed:
            if self._living():
                return after_s >= self._limit_s
            return self._served or after_s >= _LINGER_S

    def wait(self) -> None:
        """From the job's end until the JobMaster may go."""
        passed, last = 0.0, self._clock()
        while True:
            with self._changed:
                if self.may_go(passed):
                    return
                self._changed.wait(_LOOK_S)
            now = self._clock()
            # While this process is paused no driver can fetch anything.
            passed += min(now - last, 2 * _LOOK_S)
            last = now

    def wake(self) -> None:
        """Let `wait` look now."""
        with self._changed:
            self._changed.notify_all()

    def _living(self) -> set[Driver]:
        self._waiting = {driver for driver in self._waiting if self._lives(driver)}
        return self._waiting
