"""The plain data of a diversion: what travels between a task and the micro-batches of Spark (docs/papers.md: D1).

It must never be pickled by anything but records/pickling.py, because it contains users' records.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from penstock.runtime.records.batch import Batch, KeyedBatch
from penstock.runtime.records.pickling import dumps, loads

# The greatest number of records in a micro-batch. Spark's fixed cost of some tenths of a second is small against this
# many.
ROWS_MAX = 500_000


# A micro-batch takes no more records when it has about so many bytes.
BYTES_MAX = 64 * 1024 * 1024


# The number of micro-batches of a task that are under way at the same time: Spark works on one, and the next is on its
# way.
UNDER_WAY_MAX = 2


# The number of micro-batches whose times a task remembers for the paradigm scheduler, which looks a few times a second.
_RECENT = 32


@dataclass(frozen=True)
class Unprocessed:
    """Records that Spark could not process, as they were before stage `position`, and the first reason. The task
    processes them from there on, by the error policies of its operators."""

    position: int
    records: list[Any]
    why: str

    def __len__(self) -> int:
        return len(self.records)


@dataclass
class MicroBatchResult:
    """The result of a range for a micro-batch: batches in order, among them what Spark could not process, and the
    greatest time that its watermark operator has seen. `spark_s`: how long Spark has had it; the rest of the time until
    the answer is its way there and back. `counts`: how many records the stages at these positions of the chain have
    received and emitted in Spark, as far as they ran as in a task, without the records that came back."""

    batches: list[Batch | Unprocessed]
    greatest: int | None = None
    spark_s: float | None = None
    counts: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray carries results from the bridge to workers, and would otherwise pickle the records by its own means.
        return _answer, (dumps((self.batches, self.greatest, self.spark_s, self.counts)),)

    @property
    def unprocessed(self) -> list[Unprocessed]:
        """Returns the records that Spark could not process."""
        return [batch for batch in self.batches if isinstance(batch, Unprocessed)]

    def counted(self, one_to_one: Sequence[bool], records: int) -> list[tuple[int, int]]:
        """Returns how many of a micro-batch's records each stage of the range has received and emitted in Spark.
        `one_to_one` says of each stage whether it emits one record for each that it receives. What nobody has counted
        and what does not follow from the counts of the stages beside it is 0, but partial results count as what the
        last stage has emitted."""
        came_back = [0] * (len(one_to_one) + 1)  # to each position
        made, partial = 0, False
        for batch in self.batches:
            if isinstance(batch, Unprocessed):
                came_back[batch.position] += len(batch)
            else:
                made += len(batch)
                partial = partial or isinstance(batch, KeyedBatch)
        received: list[int | None] = [None] * len(one_to_one)
        emitted: list[int | None] = [None] * len(one_to_one)
        for position, (taken, given) in self.counts.items():
            received[position], emitted[position] = taken, given
        known: int | None = records
        for position, alike in enumerate(one_to_one):
            if received[position] is None and known is not None:
                received[position] = known - came_back[position]
            if emitted[position] is None and alike:
                emitted[position] = received[position]
            known = emitted[position]
        known = None if partial else made + came_back[-1]
        for position in reversed(range(len(one_to_one))):
            if emitted[position] is None:
                emitted[position] = known
            if received[position] is None and one_to_one[position]:
                received[position] = emitted[position]
            taken_here = received[position]
            known = None if taken_here is None else taken_here + came_back[position]
        if partial and emitted and emitted[-1] is None:
            emitted[-1] = made
        return [(taken or 0, given or 0) for taken, given in zip(received, emitted, strict=True)]


def _answer(data: bytes) -> MicroBatchResult:
    return MicroBatchResult(*loads(data))


@dataclass(frozen=True)
class DivertRequest:
    """Asks for a diversion: the operators of a chain before stage `position` are to run in Spark. A micro-batch is sent
    every `interval_s` seconds. With `columns`, raw input is sent as columns of its source where this is possible.
    `operators` names the operators of the chain, so that a worker with another plan ignores the request; empty: there
    is only one plan. `life`: the number of the start of Spark that the micro-batches go to."""

    chain: int
    position: int
    interval_s: float
    columns: bool
    rows_max: int = ROWS_MAX
    operators: tuple[str, ...] = ()
    life: int = 0

    def concerns(self, chain: int, operators: Iterable[str]) -> bool:
        """Whether this request is for the tasks of this chain, with these operators."""
        return chain == self.chain and self.operators in ((), tuple(operators))


class Bridge(ABC):
    """The bridge as a worker sees it."""

    @abstractmethod
    def submit(self, chain: int, position: int, input_: Any) -> Future[MicroBatchResult]:
        """Sends a micro-batch to the part of the range before a position. `input_` is a pyarrow RecordBatch of the
        source's columns, or a list of records."""

    def greet(self) -> None:
        """Prepares everything for which only the first micro-batch would wait: connects, and loads what it takes."""


@dataclass
class DiversionStats:
    """The counters of a diversion, for the status and for decisions."""

    id: int  # distinguishes it from other diversions of the task
    batches: int = 0
    records: int = 0
    under_way: int = 0  # the number of micro-batches without an answer
    failed: str | None = None  # why the task had to process a micro-batch, or records of one, the last time
    unprocessed: int = 0  # the number of records that Spark could not process, and the task has
    recent: deque[tuple[int, int, float, float | None]] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def plain(self) -> dict[str, Any]:
        """Returns the counters as plain data. `recent` is (number, records, seconds, of these in Spark) of
        micro-batches; those that were under way together are one entry, with their averages
        (worker/answer_times.py)."""
        return {**vars(self), "recent": list(self.recent)}
