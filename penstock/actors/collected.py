"""What Collect sinks have sent to the JobMaster: records that an epoch has committed, and those that wait for theirs.

In a job without epochs all that comes is there at once. It must never show a record whose epoch may yet be undone.
"""

from __future__ import annotations

import pickle
import threading
from collections import defaultdict, deque

from penstock.runtime.build import Reported
from penstock.runtime.codec import pickled


class Collected:
    """See the module's docstring; safe to use from several threads."""

    def __init__(self, epochs: bool) -> None:
        self._epochs = epochs
        self._lock = threading.Lock()
        self._records: dict[str, list[object]] = defaultdict(list)
        self._waiting: dict[int, deque[Reported]] = defaultdict(deque)  # by task
        self._generations: dict[int, int] = {}
        self._saved: dict[str, int] = {}  # how many records of each channel are in the store

    def take(self, reported: Reported) -> None:
        """Take records of a task."""
        with self._lock:
            if not self._epochs:
                self._records[reported.channel] += reported.records
            elif reported.generation >= self._generations.get(reported.task, 0):
                self._waiting[reported.task].append(reported)

    def back(self, tasks: frozenset[int], generation: int) -> None:
        """These tasks have been made again: what they sent for epochs that are not complete is void."""
        with self._lock:
            for task in tasks:
                self._generations[task] = generation
                kept = (waiting for waiting in self._waiting[task] if waiting.generation >= generation)
                self._waiting[task] = deque(kept)

    def due(self, epoch: int) -> bytes | None:
        """What a manifest of this epoch has to hold beside what earlier ones hold, as bytes; None: nothing."""
        with self._lock:
            fresh = {
                channel: records[self._saved.get(channel, 0) :]
                for channel, records in self._records.items()
                if len(records) > self._saved.get(channel, 0)
            }
            for waiting in self._waiting.values():
                for reported in waiting:
                    if reported.epoch <= epoch:
                        fresh.setdefault(reported.channel, [])
                        fresh[reported.channel] = fresh[reported.channel] + reported.records
        if not fresh:
            return None
        return pickled(fresh)

    def everything(self) -> bytes:
        """What is committed, as bytes."""
        with self._lock:
            return pickled({channel: list(records) for channel, records in self._records.items()})

    def commit(self, epoch: int) -> None:
        """An epoch is complete, and what `due` gave is in the store."""
        with self._lock:
            for waiting in self._waiting.values():
                while waiting and waiting[0].epoch <= epoch:
                    reported = waiting.popleft()
                    self._records[reported.channel] += reported.records
            self._saved = {channel: len(records) for channel, records in self._records.items()}

    def restore(self, saved: list[bytes]) -> None:
        """Go on from what manifests held."""
        with self._lock:
            self._records.clear()
            self._waiting.clear()
            for data in saved:
                for channel, records in pickle.loads(data).items():
                    self._records[channel] += records
            self._saved = {channel: len(records) for channel, records in self._records.items()}

    def get(self, channel: str, start: int) -> list[object]:
        """What a Collect sink has sent, from number `start` on."""
        with self._lock:
            return self._records.get(channel, [])[start:]
