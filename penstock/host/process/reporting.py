"""Reports: what a worker tells the JobMaster. These are the records of its Collect and Console sinks, what has become
of its tasks' parts of epochs, and which links to other workers are silent.

Only a limited number of reports with records is under way, so a sink that is faster than the JobMaster waits. Reports
must never overtake each other, so they are numbered.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from penstock.host.process.collected import EncodedSinkRecords
from penstock.runtime.epochs.participant import EpochReport
from penstock.runtime.records.codec import encode
from penstock.runtime.transport.base import SilentLink
from penstock.runtime.worker.wiring import SinkRecords

# The number of reports with records that may be under way to the JobMaster before a sink waits. It limits the memory on
# both sides.
_REPORTS_MAX = 8

# The time between two tries to write what must be written before the job can end.
_RETRY_S = 1.0

# The time between a worker's first snapshot of an epoch and the writing of it.
_GATHER_S = 0.005


@dataclass(frozen=True)
class LinksReport:
    """The peers that do not answer; all others do."""

    links: list[SilentLink]


#: What a worker tells the JobMaster.
Report: TypeAlias = EncodedSinkRecords | LinksReport | list[EpochReport]


class ReportSender(Protocol):
    """Carries reports from a worker's process to the JobMaster."""

    def report(self, worker: int, incarnation: int, number: int, item: Report) -> Any:
        """Sends a report, and returns at once with the ticket that `wait` takes."""
        ...

    def wait(self, reports: list[Any]) -> None:
        """Waits until the JobMaster has taken these reports."""
        ...


class Reporter:
    """Numbers and sends all reports of a worker: the records of sinks, of which only a limited number is under way, and
    what has become of the parts of epochs."""

    def __init__(self, sender: ReportSender, worker: int, incarnation: int) -> None:
        self._sender = sender
        self._worker = worker
        self._incarnation = incarnation
        self._number = 0
        self._lock = threading.Lock()
        self._pending: deque[Any] = deque()

    def report(self, reported: SinkRecords) -> None:
        """Sends the records of a sink."""
        channel, task, generation, epoch = reported.channel, reported.task, reported.generation, reported.epoch
        self._pending.append(
            self.send(EncodedSinkRecords(channel, encode(reported.records, saved=True), task, generation, epoch))
        )
        if len(self._pending) > _REPORTS_MAX:
            # The oldest one, because later ones wait for it at the other end.
            self._sender.wait([self._pending.popleft()])

    def send(self, item: Report) -> Any:
        """Sends a report after all earlier ones. Returns what `ReportSender.wait` takes."""
        with self._lock:
            number = self._number
            self._number += 1
            return self._sender.report(self._worker, self._incarnation, number, item)

    def drain(self) -> None:
        """Waits until the JobMaster has taken all records."""
        self._sender.wait(list(self._pending))
        self._pending.clear()


class SnapshotWriter:
    """A thread that does pieces of work one after the other, and repeats a piece that returns False. What the
    participant reports meanwhile goes to the JobMaster in one call, because a call costs more than writing a small
    snapshot."""

    def __init__(self, send: Callable[[list[EpochReport]], None]) -> None:
        self._send = send
        self._work: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._said: list[EpochReport] = []
        self._never = threading.Event()
        threading.Thread(target=self._run, name="penstock-snapshots", daemon=True).start()

    def do(self, work: Callable[[], bool]) -> None:
        """Has a piece of work done soon."""
        self._work.put(work)

    def say(self, event: EpochReport) -> None:
        """Reports something to the JobMaster when all present work is done. Pieces of work call this."""
        self._said.append(event)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            # The other tasks of the worker first save their parts of the same epoch, and the records that have arrived
            # meanwhile are processed, before this thread takes time from the loop's thread.
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
