"""Runs benchmarks one after the other, each in a process of its own and within a limit of time.

It is for `--quick`, which is to find benchmarks that no longer work, on machines that others use too. So a benchmark
must never keep the others from running, nor leave processes to them, and one that fails is run once more before it
counts as failed. What there is no time for is named and is no failure, because it says nothing about a benchmark.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import NoReturn

import psutil

from benchmarks.common import ROOT

#: The exit code of a benchmark for which this machine lacks something.
SKIPPED = 77

_TRIES = 2
# How often processes are ended that a benchmark has left, and how long one may take to end.
_ROUNDS = 5
_END_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Outcome:
    """Holds the names of benchmarks by how they ended, and the seconds that each try took."""

    failed: list[str] = field(default_factory=list)
    again: list[str] = field(default_factory=list)  # worked when they were run once more
    skipped: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)  # failed, and the time was up
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def words(self) -> Iterator[str]:
        """Generates lines that say what has happened, the failures last."""
        slowest = sorted(self.seconds.items(), key=lambda one: -sum(one[1]))
        yield "seconds: " + ", ".join(f"{name} {' + '.join(f'{s:.0f}' for s in took)}" for name, took in slowest)
        for what, names in (
            ("worked when it was run once more", self.again),
            ("skipped, because something is missing here", self.skipped),
            ("left out, because the time was up", self.left_out),
            ("failed once, and the time was up before the second try", self.undecided),
            ("FAILED", self.failed),
        ):
            if names:
                yield f"{what}: {', '.join(names)}"


def run(names: Sequence[str], command: Sequence[str], *, limit_s: float, within_s: float) -> Outcome:
    """Runs the command for each of the names, which comes last in it. `limit_s`: the time of one run, which then counts
    as failed; `within_s`: the time after which none begins. This process must have no other children: they would end
    too."""
    outcome = Outcome()
    end = time.monotonic() + within_s
    with _ends_all():
        for name in names:
            for number in range(_TRIES):
                left = end - time.monotonic()
                if left <= 0:
                    (outcome.undecided if number else outcome.left_out).append(name)
                    break
                code = _run_one([*command, name], name, limit_s, outcome)
                if code == SKIPPED:
                    outcome.skipped.append(name)
                elif code == 0 and number:
                    outcome.again.append(name)
                if code in (0, SKIPPED):
                    break
            else:
                outcome.failed.append(name)
    return outcome


def _run_one(command: Sequence[str], name: str, limit_s: float, outcome: Outcome) -> int:
    """Runs a benchmark once. Returns its exit code, or 1 after it was ended because of the limit."""
    began = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            print(f"{name}: ended after {limit_s:g} s, its limit", file=sys.stderr, flush=True)
            code = 1
        finally:
            _end_children()
    outcome.seconds.setdefault(name, []).append(time.monotonic() - began)
    return code


@contextmanager
def _ends_all() -> Iterator[None]:
    """Lets this process inherit what processes that end leave behind, and end it when somebody ends this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def terminated(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        _end_children()
        signal.signal(signal.SIGTERM, before)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _end_children() -> None:
    """Ends all processes that this one has started, or has inherited."""
    for _ in range(_ROUNDS):  # the children of a process that has ended come to this one
        children = psutil.Process().children(recursive=True)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=_END_S)
