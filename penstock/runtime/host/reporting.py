"""What a worker tells the JobMaster: the records of its Collect and Console sinks, and what has become of its tasks'
parts of epochs. A bounded number of reports with records is under way, so a sink that is quicker than the JobMaster
waits.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from penstock.runtime.epochs.participant import EpochReport
from penstock.runtime.host.collected import EncodedSinkRecords
from penstock.runtime.records.codec import encode
from penstock.runtime.worker.wiring import SinkRecords

# How many reports may be under way to the JobMaster before a sink waits: bounds memory on both sides.
_REPORTS_MAX = 8

# Between two tries to write what must be written before the job can end.
_RETRY_S = 1.0

# Between the first snapshot of an epoch in a worker and its writing.
_GATHER_S = 0.005

#: What a worker tells the JobMaster.
Report: TypeAlias = EncodedSinkRecords | list[EpochReport]


class ReportSender(Protocol):
    """How reports get from a worker's process to the JobMaster."""

    def report(self, worker: int, incarnation: int, number: int, item: Report) -> Any:
        """Send a report, and return at once. Returns what `wait` takes."""
        ...

    def wait(self, reports: list[Any]) -> None:
        """Wait until the JobMaster has taken these reports."""
        ...


class Reporter:
    """Carries what goes to the JobMaster, numbered: sinks' records, of which a bounded number of calls is under way,
    and what epochs have to say."""

    def __init__(self, sender: ReportSender, worker: int, incarnation: int) -> None:
        self._sender = sender
        self._worker = worker
        self._incarnation = incarnation
        self._number = 0
        self._lock = threading.Lock()
        self._pending: deque[Any] = deque()

    def report(self, reported: SinkRecords) -> None:
        """Carry a sink's records."""
        channel, task, generation, epoch = reported.channel, reported.task, reported.generation, reported.epoch
        self._pending.append(self.send(EncodedSinkRecords(channel, encode(reported.records), task, generation, epoch)))
        if len(self._pending) > _REPORTS_MAX:
            self._sender.wait([self._pending.popleft()])  # the oldest: later ones wait for it at the other end

    def send(self, item: Report) -> Any:
        """Carry something, after all before it; what `ReportSender.wait` takes."""
        with self._lock:
            number = self._number
            self._number += 1
            return self._sender.report(self._worker, self._incarnation, number, item)

    def drain(self) -> None:
        """Wait until all records have been taken."""
        self._sender.wait(list(self._pending))
        self._pending.clear()


class SnapshotWriter:
    """A thread that does pieces of work one after the other, and one again that returns False; what the participant
    has to say meanwhile goes to the JobMaster in one call, which costs more than to write a small snapshot."""

    def __init__(self, send: Callable[[list[EpochReport]], None]) -> None:
        self._send = send
        self._work: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._said: list[EpochReport] = []
        self._never = threading.Event()
        threading.Thread(target=self._run, name="penstock-snapshots", daemon=True).start()

    def do(self, work: Callable[[], bool]) -> None:
        """Do a piece of work soon."""
        self._work.put(work)

    def say(self, event: EpochReport) -> None:
        """Tell the JobMaster, when the work that there is has been done; for pieces of work."""
        self._said.append(event)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            # The other tasks of the worker save their part of the same epoch, and what came in meanwhile is processed,
            # before this thread takes time from the loop's.
            self._never.wait(_GATHER_S)
            while True:
                while not work():
                    self._tell()
                    self._never.wait(_RETRY_S)
                try:
                    work = self._work.get_nowait()
                except queue.Empty:
                    break
            self._tell()

    def _tell(self) -> None:
        said, self._said = self._said, []
        if said:
            self._send(said)
