"""What a source is: splits with offsets, and readers over them.

A `Source` is a plain description that travels to the workers. Before a job starts it lists its splits, the units
that tasks share among them; each task's `Reader` reads its splits and can tell at any time, for each, the offset
behind the last record that it handed out. Recovery starts a new reader from those offsets. A reader never blocks the
run loop: a source that must wait (a socket) reads in a thread of its own and wakes the task.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic_ns
from typing import Any

from penstock.runtime.mistakes import checks_init
from penstock.runtime.userfunc import ErrorHandler


@dataclass(frozen=True)
class Split:
    """One unit of input. `name` is unique in its source and stable between runs; `offset` is where to start
    (None: at its beginning) in the source's own terms; `weight` is its share of the work (bytes, records); `near` the
    host name, or Ray's id, of the node where its data lies (None: anywhere), which placement by traffic minds."""

    name: str
    payload: Any = None
    offset: Any = None
    weight: float = 1.0
    near: str | None = None

    def at(self, offset: Any) -> Split:
        """The same split, starting at an offset."""
        return replace(self, offset=offset)


@dataclass
class SourceContext:
    """Where a reader runs. `wake` may be called from any thread and makes the task look at its reader at once. `clock`
    is the time that the task goes by, in nanoseconds: of time.monotonic_ns(), but in penstock.testing a made-up one. A
    record that cannot be read goes to `errors.handle(record, error)`, which raises or counts it by the policy."""

    operator: str
    index: int
    parallelism: int
    errors: ErrorHandler
    wake: Callable[[], None] = lambda: None
    clock: Callable[[], int] = monotonic_ns


class Reader(ABC):
    """Reads a task's splits, in one thread. Offsets of records handed out by read() are in offsets() at once."""

    finished = False  # no record will ever come again

    #: When the oldest record of the last read() came into being, in time.monotonic_ns(); None: at the read.
    stamp_ns: int | None = None

    @abstractmethod
    def read(self, limit: int) -> list[Any]:
        """Up to `limit` records that are ready now, maybe none; must not wait."""

    @abstractmethod
    def offsets(self) -> dict[str, Any]:
        """Split name -> offset behind the last record handed out."""

    def ready_in(self) -> float | None:
        """Seconds until read() is worth calling (0: now); None: when `wake` was called. Asked after a read() that
        returned less than its limit."""
        return 0.0

    def behind(self) -> int:
        """How many records are ready beyond those handed out, as far as is known; may be asked at any time."""
        return 0

    def close(self) -> None:
        """Release files, sockets, threads."""


class ColumnReader(Reader):
    """A reader that can hand out its records as Arrow columns, of which Python touches no row: what read() would give,
    as a RecordBatch; plain text in one column "value"."""

    @abstractmethod
    def read_arrow(self, limit: int) -> Any:
        """Up to `limit` records that are ready now, maybe none, as a pyarrow RecordBatch; must not wait."""


def together(batches: list[Any]) -> Any:
    """One RecordBatch of several of one schema; of none, an empty list."""
    if len(batches) < 2:
        return batches[0] if batches else []
    import pyarrow as pa

    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def rows_of(columns: Any) -> list[Any]:
    """The records of a RecordBatch that a ColumnReader gave, as its read() gives them."""
    if columns.schema.names == ["value"]:
        return list(columns.column(0).to_pylist())
    return list(columns.to_pylist())


class Source(ABC):
    """A description of an input; see the module's docstring."""

    bounded = True
    hands_columns = False  # its readers are ColumnReaders

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__module__.startswith("penstock."):  # a user's own __init__ is none of ours
            checks_init(cls)

    @abstractmethod
    def splits(self, parallelism: int) -> list[Split]:
        """The splits, for about `parallelism` readers; raises SourceError when the input cannot be read.
        Called once, before the job starts."""

    @abstractmethod
    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        """A reader over these splits (maybe none)."""

    def fields(self) -> list[str] | None:
        """The names of its records' fields, when they are known before the job runs."""
        return None

    def sample(self, rows: int) -> Any:
        """Up to about `rows` of its records as a RecordBatch, such as its readers' read_arrow() gives, taken without a
        trace: to try a range on before it is needed. None: there are none to be had like that."""
        return None

    def describe(self) -> str:
        """What `flow.explain()` shows."""
        return type(self).__name__


def share(splits: list[Split], parallelism: int) -> list[list[Split]]:
    """The splits of each of `parallelism` tasks: heaviest first, each to the task with the least so far."""
    shares: list[list[Split]] = [[] for _ in range(parallelism)]
    load = [0.0] * parallelism
    for split in sorted(splits, key=lambda s: (-s.weight, s.name)):
        task = min(range(parallelism), key=lambda t: (load[t], t))
        shares[task].append(split)
        load[task] += split.weight
    for mine in shares:
        mine.sort(key=lambda s: s.name)
    return shares
