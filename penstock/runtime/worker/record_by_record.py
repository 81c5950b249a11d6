"""Record-by-record mode: a suspected task takes one record at a time, and notes each before an operator gets it.

A task that was running at two deaths runs record by record, and refuses records that were found to be *poison*. Such a
record is a failed one, about which its operator's policy decides.

A record is known by its *place*: how many records had come through one channel (or from the source) since the epoch
from which the task continued. Equal records at other places have nothing to do with it. As long as the sender of a
channel lives, it sends the same records in the same order again. A sender that goes back too may produce them in
another order, so the digest of the record must agree too. At worst, a poison record is not recognised, which costs
further deaths. Another record must never be taken for it.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from penstock.runtime.errors import PenstockError
from penstock.runtime.records.batch import Batch, KeyedBatch
from penstock.runtime.records.codec import encode
from penstock.runtime.worker.blackbox import NOWHERE, SOURCE, BlackBox, Note, RecordPlace

#: An operator, the digest of a record, and its place.
Spot = tuple[int, int, RecordPlace]

#: After this many epochs without a death, a task is no longer suspect. One epoch is not enough, because the record may
#: not have come yet.
CALM_EPOCHS = 10


class Poison(PenstockError):
    """The record has killed its worker's process as often as the job allows."""


class RecordByRecordMode(NamedTuple):
    """How a task runs record by record: until `epochs` more epochs have completed. It refuses poison records, and says
    why: at one place, by (operator, digest, place), or wherever they come, by (operator, digest)."""

    epochs: int = CALM_EPOCHS
    places: dict[Spot, str] = {}  # noqa: RUF012 - never written to
    values: dict[tuple[int, int], str] = {}  # noqa: RUF012


class RecordByRecord:
    """Runs a task record by record: counts records by their origins, notes each one, and refuses poison records. It is
    made when the task has gone back to `epoch`, before the task gets its first record."""

    def __init__(self, box: BlackBox, task: int, mode: RecordByRecordMode, epoch: int) -> None:
        self.origin = SOURCE  # the origin of the input that the task has taken up last
        self._box = box
        self._task = task
        self._mode = mode
        self._epochs_left = mode.epochs
        self._epoch = epoch
        self._counts: dict[int, int] = {}
        self._at: dict[int, dict[int, int]] = {}  # by epoch that is not complete: the counts at its barrier
        self._complete = epoch
        self._complete_at: dict[int, int] = {}
        self._place = self._later = NOWHERE
        self._nth: dict[int, int] = {}

    def next(self, origin: int) -> None:
        """Notes that the next record from this origin is at hand."""
        sequence = self._counts.get(origin, 0)
        self._counts[origin] = sequence + 1
        self._place = RecordPlace(self._epoch, origin, sequence, 0)
        self._later = RecordPlace(self._complete, origin, sequence - self._complete_at.get(origin, 0), 0)
        self._nth.clear()

    def check(self, operator: int, batch: Batch) -> None:
        """Notes that an operator is about to get a batch of one record. Raises Poison when it must not get it."""
        nth = self._nth.get(operator, 0)
        self._nth[operator] = nth + 1
        place = self._place._replace(nth=nth)
        try:
            digest = digest_of(batch)
        except Exception:  # within a chain records may be of any kind, and a record without a digest is never poison
            digest = 0
        mode = self._mode
        why = mode.places.get((operator, digest, place)) or mode.values.get((operator, digest))
        if why is not None:
            raise Poison(why)
        self._box.record(Note(self._task, operator, digest, place, self._later._replace(nth=nth)))

    def passed(self, epoch: int) -> None:
        """Notes that the task has saved its state at the barrier of an epoch, and that later records belong to the next
        epoch."""
        self._at[epoch] = dict(self._counts)

    def completed(self, epoch: int) -> bool:
        """Notes that an epoch is complete. Returns False when the task leaves record-by-record mode."""
        if epoch > self._complete:
            if epoch in self._at:
                self._complete, self._complete_at = epoch, self._at[epoch]
                self._at = {later: counts for later, counts in self._at.items() if later > epoch}
            self._epochs_left -= 1
        return self._epochs_left > 0


def digest_of(batch: Batch) -> int:
    """Returns the digest of a batch of one record. Equal records have the same digest in every process, and it is never
    0."""
    record: Any = (batch.keys[0], batch.values[0]) if isinstance(batch, KeyedBatch) else batch[0]
    digest = hashlib.blake2b(encode([record])[1], digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1
