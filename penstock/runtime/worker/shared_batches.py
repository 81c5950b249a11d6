"""Finds the function of a user that changes records which other tasks have too.

The tasks of an operator after `broadcast()` that run in one worker get the same batch (runtime/exchange/log.py). A
function that changes a record changes it for all of them, and which of them see the change depends on where tasks run
and when. The runtime itself never changes a batch that it was given.

`SharedBatches` remembers what the last shared batches were, as bytes, and compares after each call of a stage. That
costs far more than the calls, so only `penstock.testing.run` does it, and jobs that are run with `check_shared`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from penstock.runtime.operators.base import Gathering, Stage
from penstock.runtime.records.batch import Batch, KeyedBatch
from penstock.runtime.records.codec import encode

# How many batches are compared. A function that keeps a record and changes it much later is not found.
_BATCHES = 16

_ADVICE = (
    "the function has changed a record that other tasks have too: after broadcast(), the tasks of a worker share each "
    "record. Change a copy, or return a new record"
)


class SharedBatches:
    """The last batches of a worker that several tasks have."""

    def __init__(self) -> None:
        self._batches: deque[tuple[list[Any], list[tuple[int, bytes]]]] = deque(maxlen=_BATCHES)

    def add(self, batch: Batch) -> None:
        """Notes that several tasks have got this batch."""
        records = list(batch.values if isinstance(batch, KeyedBatch) else batch)
        self._batches.append((records, [encode([record]) for record in records]))

    def check(self, stage: Stage) -> None:
        """Raises RecordError when a record has changed. `stage` has run last."""
        for records, before in self._batches:
            for record, code_and_bytes in zip(records, before, strict=True):
                if _changed(record, code_and_bytes):
                    self._batches.clear()
                    raise stage.errors.failure(record, TypeError(_ADVICE))

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
            self.check(stage)
            return result

        return watched

    def _after_each(self, stage: Stage, call: Callable[..., Iterator[Batch]]) -> Callable[..., Iterator[Batch]]:
        def watched(*arguments: Any) -> Iterator[Batch]:
            for piece in call(*arguments):
                self.check(stage)
                yield piece
            self.check(stage)

        return watched


def _replace(stage: Stage, name: str, wrap: Callable[[Stage, Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(stage, name, wrap(stage, getattr(stage, name)))


def _changed(record: Any, before: tuple[int, bytes]) -> bool:
    try:
        return encode([record]) != before
    except Exception:  # it could be encoded before
        return True
