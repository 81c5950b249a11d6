"""Finds the function of a user that changes records which other tasks have too.

All branches of a stream get the same records, and so do the tasks of an operator after `broadcast()` that run in one
worker (runtime/exchange/log.py). A function that changes a record changes it for all of them, and which of them see the
change depends on where tasks run and when. The runtime itself never changes a batch that it was given.

`SharedBatches` remembers what the last shared batches were, as bytes, and compares after each call of a stage, and
after each call of a key function. That costs far more than the calls, so only `penstock.testing.run` does it, and jobs
that are run with `check_shared`. In `penstock.testing.run` records travel between tasks as copies; a copy of a shared
record counts as shared too, because the tasks of a job may be in one worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from penstock.runtime.errors import CodecError
from penstock.runtime.exchange.message import NUMBERS_MASK
from penstock.runtime.operators.base import Stage
from penstock.runtime.operators.batches import Gathering
from penstock.runtime.records.batch import Batch, KeyedBatch
from penstock.runtime.records.codec import encode
from penstock.runtime.records.userfunc import ErrorHandler

# How many batches are compared. A function that keeps a record and changes it much later is not found.
_BATCHES = 16

_CONSTANTS = frozenset({int, float, bool, str, bytes, type(None)})

_ADVICE = (
    "the function has changed a record that other tasks have too: all branches of a stream share each record, "
    "and so do the tasks behind broadcast(). Change a copy, or return a new record"
)


class SharedBatches:
    """The last batches of a worker that several tasks have."""

    def __init__(self) -> None:
        # Of each batch its records, what all of them were, and what each of them was.
        self._batches: deque[tuple[list[Any], tuple[int, bytes], list[tuple[int, bytes]]]] = deque(maxlen=_BATCHES)
        self._sent: set[tuple[int, int]] = set()  # by channel and number: the entries that are copies of shared records

    def add(self, batch: Batch) -> None:
        """Notes that several tasks have got this batch."""
        records = [each for each in (batch.values if isinstance(batch, KeyedBatch) else batch) if not _constant(each)]
        if records:
            with suppress(CodecError):  # it cannot leave its worker, and fails where it has to
                self._batches.append((records, encode(records), [encode([record]) for record in records]))

    def has(self, batch: Batch) -> bool:
        """Whether other tasks have a record of this batch too."""
        if not self._batches:
            return False
        noted = {id(record) for records, _, _ in self._batches for record in records}
        return not noted.isdisjoint(map(id, batch.values if isinstance(batch, KeyedBatch) else batch))

    def sends(self, channels: Iterable[int], number: int, batch: Batch) -> None:
        """Notes that an entry of this number is sent as a copy."""
        entries = {(channel, number & NUMBERS_MASK) for channel in channels}
        if self.has(batch):
            self._sent |= entries
        else:
            self._sent -= entries

    def came(self, channel: int, number: int, batch: Batch) -> None:
        if (channel, number) in self._sent:
            self.add(batch)

    def check(self, errors: ErrorHandler) -> None:
        """Raises RecordError when a record has changed. `errors` are of the function that was called last."""
        for records, whole, before in self._batches:
            if not _changed(records, whole):
                continue
            for record, was in zip(records, before, strict=True):
                if _changed([record], was):
                    self._batches.clear()
                    raise errors.failure(record, TypeError(_ADVICE))

    def watch(self, stage: Stage) -> None:
        """Compares after each call of a stage from now on."""
        if stage.expands:
            _replace(stage, "expand", self._after_each)
        else:
            _replace(stage, "run", self._after)
        for name in ("fire", "advance", "finish", *(("let_go",) if isinstance(stage, Gathering) else ())):
            _replace(stage, name, self._after_each)

    def _after(self, stage: Stage, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any) -> Any:
            result = call(*arguments)
            self.check(stage.errors)
            return result

        return watched

    def _after_each(self, stage: Stage, call: Callable[..., Iterator[Batch]]) -> Callable[..., Iterator[Batch]]:
        def watched(*arguments: Any) -> Iterator[Batch]:
            for piece in call(*arguments):
                self.check(stage.errors)
                yield piece
            self.check(stage.errors)

        return watched


def _replace(stage: Stage, name: str, wrap: Callable[[Stage, Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(stage, name, wrap(stage, getattr(stage, name)))


def _constant(record: Any) -> bool:
    kind = type(record)
    return kind in _CONSTANTS or (kind is tuple and all(map(_constant, record)))


def _changed(records: list[Any], before: tuple[int, bytes]) -> bool:
    try:
        return encode(records) != before
    except Exception:  # they could be encoded before
        return True
