"""What travels between a task and the micro-batches of Spark: the plain data of a diversion."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.runtime.records.batch import Batch
from penstock.runtime.records.pickling import dumps, loads

if TYPE_CHECKING:
    pass


# What a micro-batch holds at most: Spark's fixed cost of some tenths of a second is small against that many records.
ROWS_MAX = 500_000


# Micro-batches of a task that are under way at a time: while Spark works on one the next is on its way.
UNDER_WAY_MAX = 2


# Micro-batches of which a task remembers how long they took, for who looks a few times a second.
_RECENT = 32


@dataclass
class MicroBatchResult:
    """What the range has made of a micro-batch: batches in order, and the greatest time that its watermark operator has
    seen."""

    batches: list[Batch]
    greatest: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray carries answers from the bridge to workers, and would pickle records by other means.
        return _answer, (dumps((self.batches, self.greatest)),)


def _answer(data: bytes) -> MicroBatchResult:
    return MicroBatchResult(*loads(data))


@dataclass(frozen=True)
class DivertRequest:
    """A range of a chain goes to the operation stream: operators before stage `position`. `interval_s` is that of the
    micro-batches; `columns`: raw input is handed over as columns of its source where that can. `operators`: those of
    the chain, by name, so that nobody with another plan takes it for his; empty: there is one plan only."""

    chain: int
    position: int
    interval_s: float
    columns: bool
    rows_max: int = ROWS_MAX
    operators: tuple[str, ...] = ()

    def concerns(self, chain: int, operators: Iterable[str]) -> bool:
        """Whether a task of this chain, of these operators, is meant."""
        return chain == self.chain and self.operators in ((), tuple(operators))


class Bridge(ABC):
    """What a worker knows of the bridge."""

    @abstractmethod
    def submit(self, chain: int, position: int, input_: Any) -> Future[MicroBatchResult]:
        """Have a micro-batch of the range before a position answered: a pyarrow RecordBatch of the source's columns, or
        a list of records."""


@dataclass
class DiversionStats:
    """What a diverted task has to tell: for status and for decisions."""

    id: int  # tells it from the task's other diversions
    batches: int = 0
    records: int = 0
    under_way: int = 0  # micro-batches, now
    failed: str | None = None  # why the last micro-batch had to be run here
    recent: deque[tuple[int, int, float]] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def plain(self) -> dict[str, Any]:
        """As plain data; `recent`: (number, records, seconds from the hand-over to the answer) of each micro-batch."""
        return {**vars(self), "recent": list(self.recent)}
