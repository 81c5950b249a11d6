"""The interface of sources: splits with offsets, and readers over them.

A `Source` is a plain description that travels to the workers. Before a job starts it lists its splits, the units
that tasks share among them; each task's `Reader` reads its splits and can tell at any time, for each, the offset
after the last record that it handed out. Recovery starts a new reader from those offsets. A reader never blocks the
run loop: a source that must wait (a socket) reads in a thread of its own and wakes the task.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.runtime.mistakes import checks_init
from penstock.runtime.patience import Kinds
from penstock.runtime.records.batch import approximate_bytes
from penstock.runtime.records.userfunc import ErrorHandler

#: The type of a source's records.
if TYPE_CHECKING:
    from typing_extensions import TypeVar as WithDefault

    T_co = WithDefault("T_co", covariant=True, default=Any)
else:
    T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Split:
    """One unit of input, which one task reads. `name` is unique in its source and stable between runs. `offset` is
    where to start in the source's own terms (None: at the beginning). `weight` is the split's share of the work (bytes,
    records). `near` is the host name, or Ray's id, of the node where its data lies (None: anywhere), which placement by
    traffic considers."""

    name: str
    payload: Any = None
    offset: Any = None
    weight: float = 1.0
    near: str | None = None

    def at(self, offset: Any) -> Split:
        """Returns the same split, starting at an offset."""
        return replace(self, offset=offset)


@dataclass
class SourceContext:
    """Says where a reader runs. `wake` may be called from any thread, and makes the task look at its reader at once.
    `clock` is the time by which the task runs, in nanoseconds: that of time.monotonic_ns(), but in penstock.testing a
    simulated time. A record that cannot be read goes to `errors.handle(record, error)`, which raises the error or
    counts the record, as the error policy says."""

    operator: str
    index: int
    parallelism: int
    errors: ErrorHandler
    wake: Callable[[], None] = lambda: None
    clock: Callable[[], int] = monotonic_ns


class Reader(ABC):
    """Reads a task's splits, in one thread. When read() has handed out records, offsets() includes them at once.

    Three attributes are looked at after each read(). `finished`: set it to True when no record will ever come again;
    the task then ends. A reader that never does so makes the source endless: such a job ends by `job.stop()`.
    `stamp_ns`: when the oldest record of the last read() came into being, by the context's clock, from which its
    latency counts (None: at the read). `split`: the name of the split that all records of the last read came from
    (None: it is not said; "": from all of them, in the order of their times). A reader of several splits should say
    this, and answer `has_ended`. A watermark in the tasks of the source then waits for each split that has not ended,
    whichever task reads it, and whether it has begun or not. Otherwise records of one split may be late because another
    split is ahead, and a warning says so.

    `blocking` = True, set in the class, says that read() waits for records, as many client libraries do. All of the
    reader's methods but `backlog` and `is_full` are then called in a thread of its own, one batch ahead, so that the
    other tasks of the worker go on meanwhile. Let read() return from time to time, as it does not end while it waits.

    `passing_errors` names the classes of errors that may pass by themselves, beside those that Penstock knows:
    ConnectionError, TimeoutError, what the system says of a busy or unreachable place, a locked SQLite. After such an
    error read() is called again, with waits that double, for a minute, if it has changed no offset; then the error is a
    failure. So change offsets when the records are there, as the last thing before they are returned.
    """

    finished = False
    blocking = False
    passing_errors: Kinds = ()
    stamp_ns: int | None = None
    split: str | None = None

    @abstractmethod
    def read(self, limit: int) -> list[Any]:
        """Returns up to `limit` records that are ready now, maybe none. It must not wait, unless the reader is
        `blocking`. Whatever it raises is a failure of the source, about which `on_error` of flow.read() decides: "fail"
        fails the job, any other policy ends this reader. A SourceError always fails the job."""

    @abstractmethod
    def offsets(self) -> dict[str, Any]:
        """Returns, for each split name, the offset after the last record that was handed out. It is called at each
        epoch. After a failure, `Source.reader` gets the splits with these offsets in `split.offset`. An offset may be
        anything that can be pickled."""

    def by_split(self, records: list[Any]) -> list[tuple[str | None, list[Any]]]:
        """Divides the records of the last read() by their splits. Only a reader that sets no `split`, although it knows
        the split of each record, needs a method of its own."""
        return [(self.split, records)]

    def has_ended(self, split: str) -> bool:
        """Returns whether no record of a split will come any more, so that watermarks need not wait for the split. It
        is asked about all splits of the reader, also about those of which it has read nothing yet."""
        return False

    def ready_in(self) -> float | None:
        """Returns the seconds until read() is worth calling (0: now), or None when it is worth calling only after
        `wake`. It is asked after a read() that returned less than its limit."""
        return 0.0

    def backlog(self) -> int | None:
        """Returns the backlog: how many records are ready that were not handed out, or None, the default, when the
        reader cannot tell. An estimate will do, such as bytes over the mean size of a record. It is asked a few times a
        second, at any time and by another thread than the one that reads. Of a bounded reader at full speed it is the
        rest of its input. A burst at a reader that cannot tell is not seen, and the status of the job says so."""
        return None

    def is_full(self) -> bool:
        """Returns whether the reader's buffers are full, so that more records wait than `backlog` can count. It is
        asked like `backlog`. Records then come faster than the tasks take them, however short the backlog is."""
        return False

    def close(self) -> None:
        """Releases files, sockets and threads."""


class SequentialReader(Reader):
    """A reader that reads its splits one after the other: `_split` is the present one, and `_waiting` are the next
    ones. It names the present one in `split` whenever it hands out records."""

    def __init__(self, splits: list[Split]) -> None:
        self._waiting = deque(splits)
        self._split: Split | None = None
        self._offsets: dict[str, Any] = {split.name: split.offset for split in splits}
        self.finished = not splits

    def offsets(self) -> dict[str, Any]:
        return dict(self._offsets)

    def close(self) -> None:
        self._waiting.clear()
        self.finished = True

    def has_ended(self, split: str) -> bool:
        present = self._split
        # The watermark asks again and again about the last one that waits.
        return (present is None or present.name != split) and all(one.name != split for one in reversed(self._waiting))


class ColumnReader(Reader):
    """A reader that can hand out its records as Arrow columns without touching a row in Python: the records that read()
    would give, as a RecordBatch. Plain text is one column "value"."""

    @abstractmethod
    def read_arrow(self, limit: int) -> Any:
        """Returns up to `limit` records that are ready now, maybe none, as a pyarrow RecordBatch. It must not wait."""


def together(batches: list[Any]) -> Any:
    """Joins several record batches of one schema into one RecordBatch. Of no batches it makes an empty list."""
    if len(batches) < 2:
        return batches[0] if batches else []
    import pyarrow as pa

    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def bytes_of(part: Any) -> int:
    """Returns about how many bytes a RecordBatch or a list of records has."""
    return approximate_bytes(part) if isinstance(part, list) else int(part.nbytes)


def rows_of(columns: Any) -> list[Any]:
    """Returns the records of a RecordBatch that a ColumnReader gave, as its read() gives them."""
    if columns.schema.names == ["value"]:
        return list(columns.column(0).to_pylist())
    return list(columns.to_pylist())


class Source(ABC, Generic[T_co]):
    """A plain description of an input, which travels to the workers. A source of your own has `splits` and `reader`.

    Before the job starts, `splits` lists the splits, the units that tasks share among them. In each task, `reader`
    makes a Reader over the task's splits. It can tell at any time, for each split, the offset after the last record
    that it handed out. Recovery makes a new reader from these offsets, which must hand out the same records again. A
    reader never waits: one that must wait for something (a socket) does so in a thread of its own, and calls
    `context.wake()`.

    `bounded` = False says that the input never ends, so that penstock.testing asks for records in its place.
    """

    bounded = True
    hands_columns = False  # its readers are ColumnReaders

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__module__.startswith("penstock."):  # a user's own __init__ is none of ours
            checks_init(cls)

    @abstractmethod
    def splits(self, parallelism: int) -> list[Split]:
        """Lists the splits, for about `parallelism` readers, once, before the job starts. Raises SourceError when the
        input cannot be read."""

    @abstractmethod
    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        """Makes a reader over these splits, which may be none."""

    def fields(self) -> list[str] | None:
        """Returns the names of the records' fields, when they are known before the job runs."""
        return None

    def sample(self, rows: int) -> Any:
        """Returns up to about `rows` records as a RecordBatch, such as a reader's read_arrow() gives, to try a range
        before it is needed. Taking them has no effect on the source. None means that the source has no such records."""
        return None

    def describe(self) -> str:
        """Returns the text that `flow.explain()` shows."""
        return type(self).__name__

    def __repr__(self) -> str:
        return self.describe()


def sampled(source: Source[Any], splits: list[Split], rows: int) -> Any:
    """Returns about this many rows of splits that a ColumnReader reads; see Source.sample."""
    reader: Any = source.reader(splits, SourceContext("sample", 0, 1, ErrorHandler("sample", "skip")))
    parts: list[Any] = []
    try:
        while rows > 0 and not reader.finished:
            if len(part := reader.read_arrow(rows)):
                parts.append(part)
                rows -= len(part)
    finally:
        reader.close()
    return together(parts) if parts else None


def share(splits: list[Split], parallelism: int) -> list[list[Split]]:
    """Returns the splits of each of `parallelism` tasks. The heaviest split comes first, and goes to the task with the
    least weight so far."""
    shares: list[list[Split]] = [[] for _ in range(parallelism)]
    load = [0.0] * parallelism
    for split in sorted(splits, key=lambda s: (-s.weight, s.name)):
        task = min(range(parallelism), key=lambda t: (load[t], t))
        shares[task].append(split)
        load[task] += split.weight
    for mine in shares:
        mine.sort(key=_natural_order)
    return shares


def _natural_order(split: Split) -> list[Any]:
    """Orders names by the numbers in them, so that part 10 of a file does not come before part 2."""
    words, numbers = re.split(r"[0-9]+", split.name), re.findall(r"[0-9]+", split.name)
    return [words[0], *((int(number), word) for number, word in zip(numbers, words[1:], strict=True)), split.name]
