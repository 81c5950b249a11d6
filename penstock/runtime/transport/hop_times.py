"""Notes when messages are sent and when they have come, so that placement knows how long a hop takes
(docs/papers.md: T12).

Both ends of a channel know the number of each message, so they note the same ones, those whose number has the last
binary digits 0. Whoever has the reports of two workers finds the messages that both have noted, and subtracts
(`placement/hop_latencies.py`). So messages need not carry the time, and no record costs anything: a message that is not
noted costs a comparison. A hop inside a worker is a call, whose time is noted in the worker itself. Messages to several
tasks at once, and those that pass relays, are not noted.

A worker notes nothing before its first report is asked for, which only a job does that replans. Only the worker's run
loop notes. Any thread may ask for the report.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic_ns
from typing import NamedTuple

#: A message whose number has one of these binary digits is not noted: one in 16 is.
NOT_NOTED = 15

# So many of the latest messages are kept of each kind.
_KEPT = 512

#: (channel, generation, number of the message, time in ns by the clock of the sender's machine)
Noted = tuple[int, int, int, int]


class TimesReport(NamedTuple):
    """The recent notes of a worker: what it has sent, what has come to it, and how long hops inside it took (ns)."""

    worker: int
    sent: list[Noted]
    came: list[Noted]
    inside_ns: list[int]


class HopTimes:
    """See the module's docstring."""

    def __init__(self, clock: Callable[[], int] = monotonic_ns) -> None:
        self.clock = clock
        self._sent: deque[Noted] = deque(maxlen=_KEPT)
        self._came: deque[Noted] = deque(maxlen=_KEPT)
        self._inside: deque[int] = deque(maxlen=_KEPT)

    def sent(self, channel: int, generation: int, number: int, at_ns: int) -> None:
        """Notes a message that was sent, with the time at which sending it began."""
        self._sent.append((channel, generation, number, at_ns))

    def came(self, channel: int, generation: int, number: int, ahead_ns: int) -> None:
        """Notes a message that lies in the inbox of its task now. The sender's clock is ahead by so much."""
        self._came.append((channel, generation, number, self.clock() + ahead_ns))

    def inside(self, begun_ns: int) -> None:
        """Notes that a batch lies in the inbox of a task of the sender's own worker now."""
        self._inside.append(self.clock() - begun_ns)

    def report(self, worker: int) -> TimesReport:
        """Returns the recent notes."""
        return TimesReport(worker, list(self._sent), list(self._came), list(self._inside))
