"""Measures the processor time of a worker: of each task, and of threads that the job's functions have started
(docs/papers.md: T12).

The time that a step runs (`Task.busy_ns`) is not processor time. A function may wait in a step, and a busy machine lets
the thread wait for a core. So placement must not take it for work. To read the clock of a thread costs about as much as
a small step, so only the steps of one in `EVERY` passes of the run loop are measured. They tell which part of a task's
steps is processor time. The processor time of the whole thread is known exactly, and is divided among the tasks by
these parts. What the loop itself does for the tasks is in it.

What remains of a step is waiting, for a core or in the function. The kernel says how long the thread has waited for a
core. A function that waits takes no core, but it does take the worker's one thread, so placement needs this time too.

The functions of a job may start threads, as numpy and torch do. Their processor time is that of the process less that
of the loop and of the threads of Penstock and Ray, which are those from before the program was loaded and those whose
names begin with "penstock". It is divided among the tasks by the time that their steps run, because a step usually
waits for the threads that work for it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.runtime.worker.task import Task

#: A prime, so that no pattern in the order of steps decides which of them are measured.
EVERY = 17

# What was measured of steps half of this time ago counts half as much.
_HALF_LIFE_NS = 10e9
_OWN = "penstock"


@dataclass(frozen=True)
class Clocks:
    """How to ask for the processor time of the calling thread, of all threads of this process, and of one of them
    (None: it has ended); and for how long a thread has waited for a core. All are in ns."""

    own: Callable[[], int]
    process: Callable[[], int]
    thread: Callable[[int], int | None]
    core_wait: Callable[[int], int]


def _thread_ns(thread: int) -> int | None:
    # The kernel's number of the clock of a thread (MAKE_THREAD_CPUCLOCK in <linux/posix-timers.h>). Python only makes
    # those of its own threads.
    try:
        return time.clock_gettime_ns((~thread << 3) | 6)
    except OSError:
        return None


def _core_wait_ns(thread: int) -> int:
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1])
    except (OSError, IndexError):  # it has ended, or this kernel does not count
        return 0


CLOCKS = Clocks(time.thread_time_ns, time.process_time_ns, _thread_ns, _core_wait_ns)


def present_threads() -> set[int]:
    """Returns the threads that this process has now."""
    return {int(name) for name in os.listdir("/proc/self/task")}


@dataclass
class _Of:
    """Holds the times of a task: the measured time of its steps, the part of it that was processor time, and what its
    counters were when the thread's time was divided last."""

    steps_ns: float = 0.0
    cpu_ns: float = 0.0
    busy_ns: int = 0

    @property
    def part(self) -> float:
        """Returns which part of the time of its steps is processor time: all of it, until something is measured."""
        return min(1.0, self.cpu_ns / self.steps_ns) if self.steps_ns else 1.0


class ProcessorTime:
    """See the module's docstring. The thread of the run loop calls `begin` and `note`; any thread may call `divide`,
    and ask for the counters of the worker."""

    def __init__(self, own_threads: Iterable[int], clocks: Clocks = CLOCKS) -> None:
        """`own_threads`: the threads of Penstock and Ray."""
        self.clock = clocks.own
        self.loop_ns = 0  # the processor time of the loop
        self.core_wait_ns = 0  # for which the loop has waited for a core
        self.threads_ns = 0  # the processor time of threads that the job's functions have started
        self._clocks = clocks
        self._loop: int | None = None
        self._own = dict.fromkeys(own_threads, 0)  # the processor time of each, as seen last
        self._of: dict[Task, _Of] = {}
        self._divided_ns = 0
        self._left_ns = [0, 0, 0]  # of the loop, waiting for a core, and threads: to be divided when a step has ended
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Measures the calling thread, and all that happens from now on."""
        with self._lock:
            loop = self._loop = threading.get_native_id()
            self._own.pop(loop, None)
            self._look_at_own()
            self._threads_before = self._clocks.process() - (self._clocks.thread(loop) or 0) - sum(self._own.values())
            self._loop_before = self._clocks.thread(loop) or 0
            self._wait_before = self._clocks.core_wait(loop)
            self._divided_ns = time.monotonic_ns()

    def note(self, task: Task, steps_ns: int, cpu_ns: int) -> None:
        """Notes a step that has run for `steps_ns`, and has taken `cpu_ns` of processor time."""
        of = self._of.setdefault(task, _Of())
        of.steps_ns += steps_ns
        of.cpu_ns += cpu_ns

    def forget(self, tasks: Iterable[Task]) -> None:
        """Forgets tasks that were removed. Whoever refers to a task keeps its state in memory."""
        with self._lock:
            for task in tasks:
                self._of.pop(task, None)

    def divide(self, tasks: Iterable[Task]) -> None:
        """Divides the work of the threads since the last call among these tasks."""
        with self._lock:
            loop = self._loop
            total_ns = None if loop is None else self._clocks.thread(loop)
            if loop is None or total_ns is None:
                return
            loop_ns = max(0, total_ns - self._loop_before - self.loop_ns)
            core_wait_ns = max(0, self._clocks.core_wait(loop) - self._wait_before - self.core_wait_ns)
            self._look_at_own()
            others_ns = self._clocks.process() - total_ns - sum(self._own.values()) - self._threads_before
            threads_ns = max(0, others_ns - self.threads_ns)
            self.loop_ns += loop_ns
            self.core_wait_ns += core_wait_ns
            self.threads_ns += threads_ns
            now_ns = time.monotonic_ns()
            old = 0.5 ** ((now_ns - self._divided_ns) / _HALF_LIFE_NS)
            self._divided_ns = now_ns
            known = {task: self._of.get(task) or _Of() for task in tasks}
            self._of = known
            busy = {task: max(0, task.busy_ns - of.busy_ns) for task, of in known.items()}
            self._left_ns = [
                left + more for left, more in zip(self._left_ns, (loop_ns, core_wait_ns, threads_ns), strict=True)
            ]
            self._give(known, busy)
            for task, of in known.items():
                of.busy_ns += busy[task]
                of.steps_ns *= old
                of.cpu_ns *= old

    def _give(self, known: dict[Task, _Of], busy: dict[Task, int]) -> None:
        all_busy = sum(busy.values())
        if not all_busy:  # a long step may run
            return
        (loop_ns, core_wait_ns, threads_ns), self._left_ns = self._left_ns, [0, 0, 0]
        works = {task: busy[task] * of.part for task, of in known.items()}
        all_works = sum(works.values())
        stands = all_busy - all_works
        in_functions = max(0.0, stands - core_wait_ns) / stands if stands > 0 else 0.0
        for task in known:
            task.cpu_ns += round(loop_ns * (works[task] / all_works if all_works else busy[task] / all_busy))
            task.waits_ns += round((busy[task] - works[task]) * in_functions)
            task.threads_ns += round(threads_ns * busy[task] / all_busy)

    def _look_at_own(self) -> None:
        """Reads the clocks of the threads of Penstock and Ray, of which some are new. What those had used that have
        ended stays part of the sum."""
        for thread in threading.enumerate():
            number = thread.native_id
            if number is not None and number != self._loop and thread.name.startswith(_OWN):
                self._own.setdefault(number, 0)
        for number, before in self._own.items():
            self._own[number] = max(before, self._clocks.thread(number) or 0)
