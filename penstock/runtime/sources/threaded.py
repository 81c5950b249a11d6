"""Runs a reader whose read() waits in a thread of its own, so that the other tasks of its worker go on meanwhile.

The thread reads one batch ahead. A batch is handed out as a whole, with the offsets after it: what an epoch saves must
never include a record that was read ahead, nor leave out one that was handed out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.runtime.patience import may_pass
from penstock.runtime.sources.base import Reader

_FIRST = 256  # records of the first read, before the task has said how many it takes
_CLOSE_S = 1.0  # for how long close() waits for the thread


@dataclass
class _Batch:
    records: list[Any]
    offsets: dict[str, Any]
    split: str | None
    parts: list[tuple[str | None, list[Any]]]  # the records by their splits
    ended: set[str]  # splits of which nothing follows
    stamp_ns: int | None
    last: bool
    error: BaseException | None = None


class ThreadReader(Reader):
    """Reads from another reader in a thread. `wake` makes the task look again."""

    def __init__(self, reader: Reader, wake: Callable[[], None], name: str) -> None:
        self.reader = reader
        self.wake = wake
        self.passing_errors = reader.passing_errors
        self._offsets = self._known = dict(reader.offsets())  # after what was handed out, and after what was read
        self.repeats = False  # whether read() may be called again after its last error
        self._ended: set[str] = set()
        self._parts: list[tuple[str | None, list[Any]]] = []
        self._close_error: BaseException | None = None
        self._limit = _FIRST
        self._changed = threading.Condition()
        self._batch: _Batch | None = None  # what was read and is not handed out
        self._wanted = False  # the reader has been woken
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake_reader(self) -> None:
        """Notes that the reader may have records. Any thread may call it."""
        with self._changed:
            self._wanted = True
            self._changed.notify_all()

    def read(self, limit: int) -> list[Any]:
        with self._changed:
            self._limit = limit
            batch, self._batch = self._batch, None
            self._changed.notify_all()
        if batch is None:
            return []
        if batch.error is not None:
            self.repeats = not batch.last
            raise batch.error
        self._offsets, self._ended, self._parts = batch.offsets, batch.ended, batch.parts
        self.split, self.stamp_ns, self.finished = batch.split, batch.stamp_ns, batch.last
        return batch.records

    def offsets(self) -> dict[str, Any]:
        return dict(self._offsets)

    def by_split(self, records: list[Any]) -> list[tuple[str | None, list[Any]]]:
        return self._parts

    def has_ended(self, split: str) -> bool:
        return split in self._ended

    def ready_in(self) -> float | None:
        with self._changed:
            return None if self._batch is None else 0.0

    def backlog(self) -> int | None:
        batch, left = self._batch, self.reader.backlog()  # the batch is read once, because the thread changes it
        return left if left is None or batch is None else left + len(batch.records)

    def is_full(self) -> bool:
        return self.reader.is_full()

    def close(self) -> None:
        """Has the thread close the reader. A read() that still waits is left to itself."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)
        if self._close_error is not None:
            raise self._close_error

    def _run(self) -> None:
        batch: _Batch | None = None
        while not self._closed and (batch is None or not batch.last):
            self._wanted = False
            try:
                batch = self._read_once()
                wait = 0.0 if batch.records or batch.last else self.reader.ready_in()
            except BaseException as error:  # of the source, which may also have called sys.exit(); read() raises it
                batch = _Batch([], {}, None, [], set(), None, not self._repeats(self.reader, error), error)
            with self._changed:
                if not (batch.records or batch.last or batch.error is not None):
                    self._ended = batch.ended
                    self._changed.wait_for(lambda: self._closed or self._wanted, wait)
                    continue
                self._batch = batch
            self.wake()
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._batch is None)
        try:
            self.reader.close()
        except BaseException as error:  # as above; close() raises it
            self._close_error = error

    def _repeats(self, reader: Reader, error: BaseException) -> bool:
        """Whether read() may be called again after an error. If not, it is a failure for whoever takes it."""
        try:
            return may_pass(error, reader.passing_errors) and self._known == dict(reader.offsets())
        except Exception:  # of the source's code, about which nothing is known then
            return False

    def _read_once(self) -> _Batch:
        reader = self.reader
        records = reader.read(self._limit)
        offsets = self._known = dict(reader.offsets())
        ended = {split for split in offsets if reader.has_ended(split)}
        return _Batch(records, offsets, reader.split, reader.by_split(records), ended, reader.stamp_ns, reader.finished)
