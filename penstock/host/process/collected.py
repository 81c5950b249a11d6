"""The records that Collect sinks have sent to the driver's side: records that an epoch has committed, and records that
wait for their epoch.

In a job without epochs all records are there at once. A record must never be shown while its epoch may still be undone.
The records stay as the bytes that the workers made, because only the driver may unpickle them.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Container
from dataclasses import dataclass
from typing import TypeAlias

from penstock.runtime.records.pickling import dumps, loads

#: A list of records, in the form in which `codec.encode` returns it.
Encoded: TypeAlias = tuple[int, bytes]


@dataclass(frozen=True)
class EncodedSinkRecords:
    """Records that a task of a sink sends, and the epoch with which they are committed."""

    channel: str
    records: Encoded
    task: int
    generation: int
    epoch: int


class Collected:
    """See the module's docstring. Safe to use from several threads."""

    def __init__(self, epochs: bool) -> None:
        self._epochs = epochs
        self._lock = threading.Lock()
        self._records: dict[str, list[Encoded]] = defaultdict(list)
        self._waiting: dict[int, deque[EncodedSinkRecords]] = defaultdict(deque)  # by task
        self._generations: dict[int, int] = {}
        self._there: Container[int] = ()
        self._saved: dict[str, int] = {}  # the number of lists of each channel that are in the store

    def take(self, sent: EncodedSinkRecords) -> None:
        """Takes records of a task."""
        with self._lock:
            if not self._epochs:
                self._records[sent.channel].append(sent.records)
            elif sent.task in self._there and sent.generation >= self._generations.get(sent.task, 0):
                self._waiting[sent.task].append(sent)

    def back(self, tasks: frozenset[int], generation: int, there: Container[int]) -> None:
        """Drops the records that these tasks, which have been built again, had sent for epochs that are not complete.
        Drops also everything from tasks that are not `there` any more."""
        with self._lock:
            self._there = there
            for task in [task for task in self._waiting if task not in there]:
                del self._waiting[task]
            for task in tasks:
                self._generations[task] = generation
                kept = (waiting for waiting in self._waiting[task] if waiting.generation >= generation)
                self._waiting[task] = deque(kept)

    def due(self, epoch: int) -> bytes | None:
        """Returns, as bytes, the records that the manifest of this epoch must have in addition to earlier manifests, or
        None when there are none."""
        with self._lock:
            fresh = {
                channel: lists[self._saved.get(channel, 0) :]
                for channel, lists in self._records.items()
                if len(lists) > self._saved.get(channel, 0)
            }
            for waiting in self._waiting.values():
                for sent in waiting:
                    if sent.epoch <= epoch:
                        fresh.setdefault(sent.channel, []).append(sent.records)
        if not fresh:
            return None
        return dumps(fresh)

    def everything(self) -> bytes:
        """Returns everything that is committed, as bytes."""
        with self._lock:
            return dumps(dict(self._records))

    def commit(self, epoch: int) -> None:
        """Commits the records of an epoch, which is complete, and whose result of `due` is in the store."""
        with self._lock:
            for waiting in self._waiting.values():
                while waiting and waiting[0].epoch <= epoch:
                    sent = waiting.popleft()
                    self._records[sent.channel].append(sent.records)
            self._saved = {channel: len(lists) for channel, lists in self._records.items()}

    def restore(self, saved: list[bytes]) -> None:
        """Starts from the records of manifests."""
        with self._lock:
            self._records.clear()
            self._waiting.clear()
            for data in saved:
                for channel, lists in loads(data).items():
                    self._records[channel] += lists
            self._saved = {channel: len(lists) for channel, lists in self._records.items()}

    def get(self, channel: str) -> list[Encoded]:
        """Returns the records that a Collect sink has sent."""
        with self._lock:
            return list(self._records.get(channel, ()))
