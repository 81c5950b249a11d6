"""Measures the cost of a worker's messages, for placement: how long the worker's thread works to encode, send, receive
and decode them, by the kind of hop (docs/papers.md: T12).

A worker whose peers are all on its node measures nothing before its first report is asked for, which only a job does
that replans. Only one in `EVERY` operations is measured, because the clock of a thread's processor time takes as long
as sending a small message through shared memory. That clock does not count the time for which the thread sleeps or
another process has the processor. Messages are counted by size, so that what each message costs can be told from what
each byte costs (`placement/hop_costs.py`).

Only the worker's run loop measures. Any thread may ask for the report.
"""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time_ns
from typing import Literal

#: A prime, so that no pattern in the order of messages decides which of them are measured.
EVERY = 17

# A size has at most so many measurements: then they are halved, so that what is new counts.
_COUNT_MAX = 4096

Step = Literal["encode", "send near", "send far", "receive near", "receive far", "decode"]

#: (step, binary digits of the size, messages, bytes, ns)
Row = tuple[Step, int, float, float, float]


class HopMeter:
    """See the module's docstring. `due` tells whether to measure the next operation of a kind. If so, the caller reads
    the `clock` before and after it, and calls `note`."""

    def __init__(self, clock: Callable[[], int] = thread_time_ns) -> None:
        self.clock = clock
        self._rows: dict[tuple[Step, int], list[float]] = {}
        self._wait: dict[str, int] = {}
        self._reading_ns = min(-clock() + clock() for _ in range(10))  # what it takes to read the clock

    def due(self, what: str) -> bool:
        """Tells whether this operation is to be measured."""
        left = self._wait.get(what, EVERY) - 1
        self._wait[what] = left or EVERY
        return not left

    def note(self, step: Step, messages: int, size: int, begun_ns: int) -> None:
        """Notes an operation on a number of messages with `size` bytes in all, which has just ended. Of no messages:
        work that belongs to others."""
        ns = max(0, self.clock() - begun_ns - self._reading_ns)
        digits = (size // messages).bit_length() if messages else 0
        row = self._rows.setdefault((step, digits), [0.0, 0.0, 0.0])
        if row[0] >= _COUNT_MAX:
            row[:] = [figure / 2 for figure in row]
        row[0] += messages
        row[1] += size
        row[2] += ns

    def report(self) -> list[Row]:
        """Returns the measurements."""
        return [(step, digits, *row) for (step, digits), row in list(self._rows.items())]  # type: ignore[misc]
