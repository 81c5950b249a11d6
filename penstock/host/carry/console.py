"""Console: the lines of Console sinks on their way to the drivers that print them.

While a driver that prints lives, no line is left out: the sinks wait for the slowest one. Without a driver only the
newest lines are kept.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from penstock.host.process.linger import Driver, Drivers

# The number of lines that sinks may be ahead of a driver that prints them, or that are kept when no driver does; the
# time between two looks whether such a driver lives; and the time in which the first one may begin to print.
_LINES_MAX = 10_000
_LOOK_S = 0.5
_FIRST_S = 30.0


class Console:
    """See the module's docstring. `ended`: set when the job has ended. Safe to use from several threads."""

    def __init__(self, drivers: Drivers, ended: threading.Event) -> None:
        self._drivers = drivers
        self._ended = ended
        self._lines: deque[str] = deque()  # the newest last
        self._total = 0
        self._printed: dict[Driver, int] = {}  # how many lines each driver that prints them has printed
        self._has_printed = False  # whether a driver has ever asked for lines
        self._more = threading.Condition()

    def lines(self, driver: Driver, seen: int | None, timeout_s: float) -> tuple[int, list[str]]:
        """Returns the answer to the request `Lines`."""
        with self._more:
            self._has_printed = True
            if seen is None:
                self._printed.pop(driver, None)
                self._more.notify_all()
                return self._total, []
            # A driver may have seen more lines than there are, from a JobMaster that has died.
            seen = self._printed[driver] = min(seen, self._total)
            self._more.notify_all()
            self._more.wait_for(lambda: self._total > seen or self._ended.is_set(), timeout_s)
            new = min(self._total - seen, len(self._lines))
            return self._total, list(self._lines)[len(self._lines) - new :]

    def take(self, lines: list[str]) -> None:
        """Takes lines of a sink. Waits while drivers have too many of them to print."""
        with self._more:
            self._lines.extend(lines)
            self._total += len(lines)
            self._more.notify_all()
            until = None if self._has_printed else time.monotonic() + _FIRST_S
            while not self._ended.is_set() and (unprinted := self._unprinted(until)) > _LINES_MAX:
                self._more.wait(_LOOK_S)
            if not self._ended.is_set():
                for _ in range(len(self._lines) - max(_LINES_MAX, unprinted)):
                    self._lines.popleft()

    def wake(self) -> None:
        """Called when the job has ended."""
        with self._more:
            self._more.notify_all()

    def _unprinted(self, until: float | None) -> int:
        """Returns how many lines the slowest driver that prints has yet to print; 0 when no driver prints. Before the
        first driver has asked, which it may do `until` this time, it has yet to print all lines."""
        if not self._has_printed:
            return self._total if until is not None and time.monotonic() < until else 0
        late = {d for d, seen in self._printed.items() if self._total - seen > _LINES_MAX}
        for driver in late:
            if not self._drivers.lives(driver):
                del self._printed[driver]
        return max((self._total - seen for seen in self._printed.values()), default=0)
