"""Worker: one Ray actor process that runs its share of a job's tasks in one run loop.

`prepare` makes the ring, `connect` attaches to the others', `run` is the run loop, in the actor's main thread, and
stays pending for the life of the job (its failure tells the JobMaster that the process died); status, stop and cancel
are answered beside it by a control thread (actors/control.py says why). Data never passes through Ray, but for what
Collect and Console sinks send to the driver.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
import traceback
from collections import deque
from dataclasses import dataclass
from typing import Any

import ray

from penstock.actors.control import ControlServer
from penstock.runtime.build import build
from penstock.runtime.errors import RecordError
from penstock.runtime.loop import MessagesLost, RunLoop
from penstock.runtime.plan import Plan
from penstock.runtime.transport.shm import ShmTransport

# How many reports may be under way to the JobMaster before a sink waits: bounds memory on both sides.
_REPORTS_MAX = 8

_PR_SET_TIMERSLACK = 29  # <linux/prctl.h>; the argument is in ns


@dataclass(frozen=True)
class WorkerOptions:
    """What `run()` was told that concerns a worker."""

    ring_bytes: int | None  # None: the default, and larger when records call for it
    window_bytes: int


@dataclass(frozen=True)
class Outcome:
    """How a worker's run ended; `error` is None when all its tasks finished or it was cancelled."""

    worker: int
    error: str | None = None
    operator: str | None = None
    lost: bool = False  # the error is another process's death


class Worker:
    """See the module's docstring. Calls come in the order prepare, connect, run."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._loop: RunLoop | None = None
        self._transport: ShmTransport | None = None
        self._cancelled = False
        self._stopped = False

    def prepare(self, options: WorkerOptions) -> dict[str, Any]:
        """Make the ring; where this worker is."""
        self._options = options
        self._transport = ShmTransport(self._index, options.ring_bytes)
        self._control = ControlServer({"status": self.status, "stop": self.stop, "cancel": self.cancel})
        context = ray.get_runtime_context()
        return {
            "index": self._index,
            "pid": os.getpid(),
            "node_id": context.get_node_id(),
            "address": self._transport.address,
            "control": (self._control.address, self._control.key),
        }

    def connect(self, plan: Plan, workers: dict[int, int], addresses: dict[int, str], master: Any) -> Outcome:
        """Attach to the other workers and make this worker's tasks."""
        assert self._transport is not None
        try:
            self._transport.connect({i: a for i, a in addresses.items() if i != self._index})
            self._reporter = _Reporter(master, self._index)
            wiring = build(
                plan,
                workers,
                self._index,
                self._transport,
                clock=time.monotonic_ns,
                report=self._reporter.report,
                window=self._options.window_bytes,
            )
            self._loop = RunLoop(wiring, self._transport, time.monotonic_ns)
        except Exception as error:
            return self._outcome(error)
        return Outcome(self._index)

    def run(self) -> Outcome:
        """The run loop, until all tasks of this worker have finished or the job ends otherwise."""
        assert self._loop is not None
        # What exists now lives as long as the job: without this each full collection walks all of it, which shows
        # as pauses of tens of milliseconds in every record's latency.
        gc.collect()
        gc.freeze()
        _wake_on_time()
        # How long the control thread waits for the interpreter beside a busy loop, several times a call.
        sys.setswitchinterval(0.001)
        if self._cancelled:
            self._loop.cancel()
        if self._stopped:
            self._loop.stop()
        try:
            self._loop.run()
            self._reporter.drain()
        except Exception as error:
            return self._outcome(error)
        return Outcome(self._index)

    def status(self) -> dict[str, Any]:
        """Counters of this worker's tasks."""
        tasks = self._loop.status() if self._loop is not None else []
        ring_bytes = self._transport.ring_bytes if self._transport is not None else 0
        return {"index": self._index, "time_ns": time.monotonic_ns(), "tasks": tasks, "ring_bytes": ring_bytes}

    def stop(self) -> None:
        """End the sources; what they have read goes through."""
        self._stopped = True
        if self._loop is not None:
            self._loop.stop()

    def cancel(self) -> None:
        """End at once."""
        self._cancelled = True
        if self._loop is not None:
            self._loop.cancel()

    def _outcome(self, error: Exception) -> Outcome:
        if isinstance(error, RecordError):
            return Outcome(self._index, str(error), error.operator)
        if isinstance(error, MessagesLost):
            return Outcome(self._index, str(error), lost=True)
        text = "".join(traceback.format_exception(error))
        return Outcome(self._index, f"worker {self._index} failed: {type(error).__name__}: {error}\n{text}")


def _wake_on_time() -> None:
    """Let this thread's timed waits end when they are due: by default the kernel adds up to 50 us, which shows in the
    latency of every paced record."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)


class _Reporter:
    """Carries sinks' records to the JobMaster, numbered, a bounded number of calls at a time."""

    def __init__(self, master: Any, worker: int) -> None:
        self._master = master
        self._worker = worker
        self._number = 0
        self._pending: deque[Any] = deque()

    def report(self, channel: str, records: list[Any]) -> None:
        self._pending.append(self._master.report.remote(self._worker, self._number, channel, records[:]))
        self._number += 1
        if len(self._pending) > _REPORTS_MAX:
            ray.get(self._pending.popleft())  # the oldest: later ones wait for it at the other end

    def drain(self) -> None:
        ray.get(list(self._pending))
        self._pending.clear()
