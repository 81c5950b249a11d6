"""When the first record was read and the last result arrived, and what the results were, from whatever process.

A contestant's sources and sinks leave one small file each in a folder; `collect` reads them. CLOCK_MONOTONIC is the
same for all processes of a machine, so the time between the first read anywhere and the last result anywhere is
measured alike for every system, and none pays for its start. The CPU time that a process used in between, in the
kernel too, is noted in the same places.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns, process_time_ns
from typing import Any

from benchmarks.common import WrongResult


class FirstRead:
    """Remembers when it was told first."""

    def __init__(self, out: str) -> None:
        self._out = out
        self._first: int | None = None

    def now(self) -> None:
        """To be called before every read."""
        if self._first is None:
            self._first = monotonic_ns()
            self._cpu = process_time_ns()

    def save(self) -> None:
        """Leave the file."""
        if self._first is not None:
            _save(self._out, "source", self._first, self._cpu)
            self._first = None


class Counts:
    """A sink's end: the newest count of each key, when the last came, how many came."""

    def __init__(self, out: str) -> None:
        self._out = out
        self._counts: dict[Any, int] = {}
        self._received = 0
        self._last = 0

    def write(self, records: list[tuple[Any, int]]) -> None:
        """Take (key, count) records."""
        self._counts.update(records)
        self._received += len(records)
        self._last = monotonic_ns()

    def save(self) -> None:
        """Leave the file."""
        _save(self._out, "sink", (self._last, self._counts, self._received))


class Lines:
    """A sink's end for records of which only the number matters."""

    def __init__(self, out: str) -> None:
        self._out = out
        self._received = 0
        self._last = 0

    def write(self, records: list[Any]) -> None:
        """Take records."""
        self._received += len(records)
        self._last = monotonic_ns()

    def save(self) -> None:
        """Leave the file."""
        _save(self._out, "sink", (self._last, {}, self._received))


@dataclass
class Outcome:
    """What all sources and sinks of one run left."""

    seconds: float
    counts: dict[Any, int]
    received: int
    cpu_s: float  # of all processes that read

    def check(self, expected: Counter[str], who: str) -> None:
        """WrongResult unless the counts are as expected."""
        if self.counts != dict(expected):
            wrong = sum(self.counts.get(word) != n for word, n in expected.items())
            raise WrongResult(f"{who}: {wrong} of {len(expected)} counts are wrong")


def _save(out: str, kind: str, what: Any, cpu: int | None = None) -> None:
    """`cpu`: of this process when it read first."""
    name = f"{kind}-{socket.gethostname()}-{os.getpid()}-{monotonic_ns()}"
    now = process_time_ns()
    partial = Path(out, f".{name}")
    partial.write_bytes(pickle.dumps((what, (socket.gethostname(), os.getpid()), now if cpu is None else cpu, now)))
    partial.rename(Path(out, name))


def arrivals(out: Path) -> list[tuple[int, dict[Any, int], int]]:
    """Returns what each sink of a run left: when its last record came, its counts, and how many records came. The files
    are removed."""
    paths = sorted(out.glob("sink-*"))
    found = [pickle.loads(path.read_bytes())[0] for path in paths]
    for path in paths:
        path.unlink()
    return found


def collect(out: Path) -> Outcome:
    """Read and remove what a run left."""
    first: list[int] = []
    last: list[int] = []
    counts: dict[Any, int] = {}
    received = 0
    used: dict[tuple[str, int], tuple[int, int]] = {}
    for path in sorted(out.iterdir()):
        what, process, before, after = pickle.loads(path.read_bytes())
        least, most = used.get(process, (before, after))
        used[process] = min(least, before), max(most, after)
        if path.name.startswith("source"):
            first.append(what)
        else:
            at, part, n = what
            if counts.keys() & part.keys():
                raise WrongResult("two sinks got the same key")
            counts.update(part)
            received += n
            if n:
                last.append(at)
        path.unlink()
    if not first or not last:
        raise WrongResult(f"nothing was read or nothing arrived ({len(first)} sources, {len(last)} sinks)")
    cpu_s = sum(most - least for least, most in used.values()) / 1e9
    return Outcome((max(last) - min(first)) / 1e9, counts, received, cpu_s)
