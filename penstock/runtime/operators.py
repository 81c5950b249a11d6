"""Operators: what the user adds to a flow (plain, picklable data), and the stage each becomes inside a task.

An `Operator` describes; `stage()` makes the running form, one a task, which works on whole batches. A stage either
maps a batch to one batch of bounded size (`run`) or *expands* it, yielding outputs in bounded pieces (`expand`), so
that a record that becomes a million never takes memory for a million (invariant 1). Stages know nothing of tasks,
channels, Ray or time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import chain, islice
from operator import length_hint
from time import time
from typing import Any, Literal, get_args

from penstock.runtime.aggregate import Aggregate
from penstock.runtime.batch import Batch, KeyedBatch
from penstock.runtime.errors import FlowError, KeyTypeError, RecordError
from penstock.runtime.mistakes import called
from penstock.runtime.partition import stable_hash, without_bad_keys
from penstock.runtime.pickling import copied
from penstock.runtime.process import Process, ProcessContext
from penstock.runtime.sinks.base import Sink, SinkContext, SinkWriter
from penstock.runtime.sources.base import Source
from penstock.runtime.state import KeyedMap, LoggedMap, SavedState, StageState
from penstock.runtime.step_size import STEP_NS, StepSize
from penstock.runtime.timers import Timers
from penstock.runtime.units import is_whole, seconds
from penstock.runtime.userfunc import (
    DEAD_LETTERS,
    POLICIES,
    ErrorHandler,
    OnError,
    OwnFunction,
    apply,
    check_function,
    describe,
    exhausted,
    no_list,
    no_value,
    returns_nothing,
    select,
    user_line,
)

# An expanding stage yields pieces of at most this many records. Smaller pieces cost a call into each later stage per
# piece; larger ones hold more memory and let a task run longer before it looks at its channels again.
EXPAND_RECORDS_MAX = 4096

Emit = Literal["latest", "every", "final"]


class StageContext:
    """What a stage knows of where it runs; made by the task that hosts it."""

    def __init__(
        self,
        operator: Operator,
        index: int = 0,
        parallelism: int = 1,
        sink_context: SinkContext | None = None,
        epochs: bool = False,
        wall: Callable[[], float] = time,
    ) -> None:
        self.operator = operator
        self.wall = wall  # the time for timers
        self.epochs = epochs  # the job saves state
        self.time_grain = 1  # ms: watermarks are multiples of it
        self.index = index
        self.parallelism = parallelism
        self.sink_context = sink_context
        self.side: dict[str, list[Any]] = {tag: [] for tag in operator.outputs}
        self.errors = ErrorHandler(operator.name, operator.on_error, operator.declared_at, self.side.get(DEAD_LETTERS))


class Stage:
    """The running form of one operator in one task."""

    expands = False
    timed = False  # it may have timers
    event_time = False  # it makes watermarks or waits for them

    def __init__(self, context: StageContext) -> None:
        self.context = context
        self.errors = context.errors
        self.records_in = 0
        self.records_out = 0
        self.late = 0  # records that no window took

    def open(self) -> None:
        """Called once, in the worker, before the first batch."""

    def run(self, batch: Batch) -> Batch:
        """The outputs for a batch; only for stages that do not expand."""
        raise NotImplementedError

    def expand(self, batch: Batch) -> Iterator[Batch]:
        """The outputs for a batch in pieces of at most EXPAND_RECORDS_MAX; only for stages that expand."""
        raise NotImplementedError

    def next_timer(self) -> float | None:
        """When the first timer is due, in time.time(); None: there is none. Only for stages that are timed."""
        return None

    def fire(self, now: float) -> Iterator[Batch]:
        """The outputs of all timers that are due; only for stages that are timed."""
        return iter(())

    def advance(self, watermark: int | None) -> Iterator[Batch]:
        """The outputs that a watermark lets go; None: none is known. Only for stages with event time."""
        return iter(())

    def watermark(self, watermark: int | None) -> int | None:
        """What goes on behind the stage, once it has taken a watermark. Only for stages with event time."""
        return watermark

    def observe(self, greatest: int) -> None:
        """Records up to this time have passed in the operation stream. Only for stages with event time."""

    def finish(self) -> Iterator[Batch]:
        """The last outputs, after the last batch of every input."""
        return iter(())

    def flush(self) -> None:
        """Nothing more is ready now: what was held back for larger writes should leave."""

    def close(self, failed: bool) -> None:
        """Called once at the end, also after an error; must not raise for what open() never made."""

    # --- epochs, in jobs that have them ----------------------------------------------------------------------

    def wants_whole(self) -> bool:
        """It costs less to save everything at the next barrier than what has changed."""
        return False

    def snapshot(self, epoch: int, whole: bool) -> StageState | None:
        """The state at the barrier of `epoch`: what has changed since the last snapshot, or everything. None: the
        stage has no state. The caller encodes it before the stage runs again."""
        return None

    def restore(self, epoch: int, saved: SavedState) -> None:
        """Called behind open(): go on from what was saved at a complete epoch."""

    def commit(self, epoch: int) -> None:
        """Epochs up to this one are complete."""


def run_stages(stages: Sequence[Stage], batch: Batch, first: int) -> Iterator[Batch]:
    """The outputs of the stages from `first` on for a batch that is not empty: in bounded pieces, none empty."""
    for i in range(first, len(stages)):
        stage = stages[i]
        stage.records_in += len(batch)
        if stage.expands:
            for piece in stage.expand(batch):
                stage.records_out += len(piece)
                yield from run_stages(stages, piece, i + 1)
            return
        batch = stage.run(batch)
        if not batch:
            return
        stage.records_out += len(batch)
    yield batch


class Operator(ABC):
    """What an operator is: kind, name, parallelism (None: the flow's), the policy for records that fail."""

    kind: str
    keyed = False  # takes KeyedBatch
    is_sink = False
    stays: str | None = "it has no batch form"  # why it cannot run in the operation stream; None: it can
    time_grain: int | None = None  # ms of which all times are multiples at which it waits for a watermark

    def __init__(self, name: str | None = None, parallelism: int | None = None, on_error: OnError = "fail") -> None:
        if name is not None and (not isinstance(name, str) or not name):
            raise FlowError(f"an operator's name must be a text, not {name!r}")
        if on_error not in POLICIES:
            raise FlowError(f"on_error={on_error!r}: the policies are {', '.join(map(repr, POLICIES))}")
        if parallelism is not None and (
            not isinstance(parallelism, int) or isinstance(parallelism, bool) or parallelism < 1
        ):
            raise FlowError(f"operator {name or self.kind!r}: parallelism={parallelism!r}; it must be 1 or more")
        self.name = name or self.kind
        self.explicit_name = name is not None
        self.parallelism = parallelism
        self.on_error = on_error
        self.declared_at: str | None = None
        self.outputs: tuple[str, ...] = (DEAD_LETTERS,) if on_error == "dead_letter" else ()

    @property
    def state_kind(self) -> str:
        """What its state is, in words: only an operator of the same goes on with what it has saved."""
        return self.kind

    @abstractmethod
    def stage(self, context: StageContext) -> Stage:
        """The running form for one task."""


class _Loop(Stage):
    """A stage that is one C-level loop over the batch."""

    def __init__(self, context: StageContext, loop: Callable[[Iterator[Any]], Iterable[Any]]) -> None:
        super().__init__(context)
        self._loop = loop

    def run(self, batch: Batch) -> Batch:
        assert isinstance(batch, list)
        return apply(self._loop, batch, self.errors)


class _Calls(_Loop):
    """The loop `over` (map, filter) with a function of the user's."""

    def __init__(self, context: StageContext, over: Callable[..., Iterable[Any]], fn: Callable[[Any], Any]) -> None:
        self._own = OwnFunction(fn)
        super().__init__(context, partial(over, self._own.fn))
        self._over = over
        self._seen = False

    def open(self) -> None:
        self._own.open()

    def run(self, batch: Batch) -> Batch:
        if self._seen:
            return super().run(batch)
        # A slip of the program shows in the first batch; to look at every result would cost as much as short functions.
        self._seen = True
        assert isinstance(batch, list)
        return apply(partial(self._over, self._looked_at), batch, self.errors)

    def _looked_at(self, record: Any) -> Any:
        """What the function returns, if that can be a value."""
        result = self._own.fn(record)
        if slip := no_value(result):  # of the program, and not of this record
            raise self.errors.failure(record, TypeError(slip))
        return result

    def close(self, failed: bool) -> None:
        self._own.close()


class Map(Operator):
    """One output a record."""

    kind = "map"
    stays = None

    yields = False  # its function may be a generator function
    none_on_purpose = True  # of a lambda, which says what it returns; a function without `return` has forgotten it
    forgotten = (
        "so there would be a None for each record; return what is to go on, as in: return record. To call a function "
        "for what it does only, write to a sink: .write(penstock.sinks.Call(function))"
    )

    def __init__(self, fn: Callable[[Any], Any], **common: Any) -> None:
        super().__init__(**common)
        check_function(fn, f"{self.kind} {self.name!r}", yields=self.yields, opens=True)
        if returns_nothing(fn) and not (self.none_on_purpose and getattr(fn, "__name__", "") == "<lambda>"):
            raise FlowError(
                f"{self.kind} {self.name!r}: its function never returns anything but None, {self.forgotten}"
            )
        self.fn = fn

    def stage(self, context: StageContext) -> Stage:
        return _Calls(context, map, self.fn)


class Filter(Map):
    """The records for which the function is true."""

    kind = "filter"
    none_on_purpose = False
    forgotten = 'so no record would pass; return whether the record is to pass, as in: return record["price"] > 5'

    def stage(self, context: StageContext) -> Stage:
        return _Calls(context, filter, self.fn)


class FlatMap(Map):
    """Any number of outputs a record; the function returns an iterable, which is read lazily."""

    kind = "flat_map"
    yields = True
    forgotten = "so nothing would come out; return the list of outputs (it may be empty), or yield them"

    def stage(self, context: StageContext) -> Stage:
        return _Expand(context, self.fn)


class _Expand(Stage):
    expands = True

    def __init__(self, context: StageContext, fn: Callable[[Any], Iterable[Any]]) -> None:
        super().__init__(context)
        self._own = OwnFunction(fn)
        self._seen = False

    def open(self) -> None:
        self._own.open()

    def close(self, failed: bool) -> None:
        self._own.close()

    def _looked_at(self, record: Any) -> Iterable[Any]:
        """What the function returns, if that can be several records."""
        result = self._own.fn(record)
        if result is None:
            raise TypeError(no_list(result))
        if slip := no_list(result):  # of the program, and not of this record
            raise self.errors.failure(record, TypeError(slip))
        return result  # type: ignore[no-any-return]

    def expand(self, batch: Batch) -> Iterator[Batch]:
        assert isinstance(batch, list)
        records = iter(batch)
        # A slip of the program shows in the first batch; to look at every result would cost as much as short functions.
        fn = self._own.fn if self._seen else self._looked_at
        self._seen = True
        outputs = chain.from_iterable(map(fn, records))
        while True:
            out: list[Any] = []
            try:
                out.extend(islice(outputs, EXPAND_RECORDS_MAX))
            except BaseException as error:
                self.errors.handle(batch[len(batch) - length_hint(records) - 1], _of_no_list(error))
                outputs = chain.from_iterable(map(fn, records))
                if out:
                    yield out
                continue
            if out:
                yield out
            if len(out) == EXPAND_RECORDS_MAX:
                continue
            if exhausted(records):
                return
            stopped = RuntimeError("the function raised StopIteration")
            self.errors.handle(batch[len(batch) - length_hint(records) - 1], stopped)
            outputs = chain.from_iterable(map(fn, records))


def _of_no_list(error: BaseException) -> BaseException:
    """The error of a function that is to return several records: where Python only says that something is not
    iterable, what that was."""
    words = describe(error) if isinstance(error, TypeError) else ""
    if words.endswith(" object is not iterable") and user_line(error) is None:
        name = words.split("'")[1]
        return TypeError(
            no_list(None) if name == "NoneType" else f"the function returned one {name}, not a list of outputs"
        )
    return error


class MapBatches(Operator):
    """A function from a batch to a batch: lists of records, or pyarrow Tables of dict records.

    `batch_size` is the most records a call gets; it gets what is ready, up to this, unless records are so slow that
    other tasks would wait too long for the call to end. With `min_batch` a call gets at least so many, unless the first
    of them has waited for `linger_s` seconds, or something may not wait behind them: a barrier (each epoch has one), a
    watermark, the end of the input. When the function raises, the records of that call are the culprit together.
    """

    kind = "map_batches"
    stays = None

    def __init__(
        self,
        fn: Callable[[Any], Any],
        batch_size: int = 1024,
        batch_format: Literal["list", "arrow"] = "list",
        min_batch: int = 1,
        linger_s: float | timedelta | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        what = f"map_batches {self.name!r}"
        check_function(fn, what, ("batch",), yields=True, opens=True)
        if not is_whole(batch_size) or batch_size < 1:
            raise FlowError(f"{what}: batch_size={batch_size!r}; it must be a whole number, 1 or more")
        if batch_format not in ("list", "arrow"):
            raise FlowError(f"{what}: batch_format={batch_format!r}; use 'list' or 'arrow'")
        if not is_whole(min_batch) or not 1 <= min_batch <= batch_size:
            raise FlowError(
                f"{what}: min_batch={min_batch!r}; it must be a whole number from 1 to batch_size={batch_size}"
            )
        if (min_batch > 1) != (linger_s is not None):
            raise FlowError(
                f"{what}: min_batch={min_batch}, linger_s={linger_s}; give both or neither: linger_s is how many "
                "seconds a record may wait for a call of min_batch records, 2 or more, to come together"
            )
        linger_s = None if linger_s is None else seconds(linger_s, f"{what}: linger_s")
        if linger_s is not None and not 0 < linger_s < math.inf:
            raise FlowError(f"{what}: linger_s={linger_s}; it must be a number of seconds above 0")
        self.fn = fn
        self.batch_size = batch_size
        self.batch_format = batch_format
        self.min_batch = min_batch
        self.linger_s = linger_s

    def stage(self, context: StageContext) -> Stage:
        return _Batches(context, self.fn, self.batch_size, self.batch_format, self.min_batch, self.linger_s)


def _through_arrow(fn: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any] | None]:
    import pyarrow as pa

    def run(records: list[Any]) -> list[Any] | None:
        if set(map(type, records)) != {dict}:
            for record in records:
                if not isinstance(record, Mapping):
                    raise TypeError(f"batch_format='arrow' takes records that are dicts, not {called(record)}")
        names = dict.fromkeys(name for record in records for name in record)
        if names:
            table = pa.table({name: [record.get(name) for record in records] for name in names})
        else:  # a table without columns that still has a row for each record
            table = pa.Table.from_struct_array(pa.array(records, pa.struct([])))
        result = fn(table)
        if result is not None and not hasattr(result, "to_pylist"):
            raise TypeError(
                f"the function returned a {type(result).__name__}; with batch_format='arrow' return a pyarrow Table"
            )
        return None if result is None else list(result.to_pylist())

    return run


class Gathering(Stage):
    """A stage that may hold records from one batch to the next, so that a call of the user's function gets more of
    them. Its task says when it must let them go; without one (in Spark) it holds nothing."""

    holds = False  # whether what is too little for a call stays when `expand` ends
    stamp = 0  # of the records that come next
    oldest = 0  # the least stamp of the records held
    waits_until = 0  # by the clock; when the first record held should wait no longer
    more_until = 0  # the same while more records come: they make the call worth more
    least = 1  # records that a call should get at least

    @abstractmethod
    def gather(self, clock: Callable[[], int], stopwatch: Callable[[], int]) -> None:
        """It is part of a task: with its clocks, in ns."""

    @property
    @abstractmethod
    def held(self) -> int:
        """The number of records that it holds."""

    @abstractmethod
    def wants(self) -> tuple[int, int]:
        """(records that make the next call full, records of a full call)."""

    @abstractmethod
    def let_go(self, least: int) -> Iterator[Batch]:
        """The outputs for what is held, if that is so many records or more."""


class _Batches(Gathering):
    expands = True

    def __init__(
        self,
        context: StageContext,
        fn: Callable[[Any], Any],
        batch_size: int,
        batch_format: str,
        min_batch: int,
        linger_s: float | None,
    ) -> None:
        super().__init__(context)
        self._own = OwnFunction(fn)
        self._fn = _through_arrow(self._own.fn) if batch_format == "arrow" else self._own.fn
        self._batch_size = batch_size
        self.least = min_batch
        self._linger_ns = 0 if linger_s is None else int(linger_s * 1e9)
        self._size = StepSize(batch_size)
        self._held: list[Any] = []
        self._came: deque[tuple[int, int, int]] = deque()  # of what is held: records, their stamp, when they came
        self._mark: int | None = None
        self._clock: Callable[[], int] = lambda: 0
        self._stopwatch: Callable[[], int] = lambda: 0

    def gather(self, clock: Callable[[], int], stopwatch: Callable[[], int]) -> None:
        self._clock, self._stopwatch = clock, stopwatch

    @property
    def held(self) -> int:
        return len(self._held)

    def wants(self) -> tuple[int, int]:
        call = self._call_size()
        return max(1, call - len(self._held)), call

    def _call_size(self) -> int:
        return max(self._size.limit, self.least)

    def open(self) -> None:
        self._own.open()

    def close(self, failed: bool) -> None:
        self._own.close()

    def expand(self, batch: Batch) -> Iterator[Batch]:
        assert isinstance(batch, list)
        if not self.holds:
            for i in range(0, len(batch), self._batch_size):
                yield from self._call(batch[i : i + self._batch_size], more=False)
            return
        now = self._clock()
        if self._held:
            self._held += batch
        else:
            self._held = batch  # others may have it too: `_calls` copies what stays of it
            self.more_until = now + self._linger_ns + STEP_NS
        self._came.append((len(batch), self.stamp, now))
        yield from self._calls(self._batch_size + 1)

    def let_go(self, least: int) -> Iterator[Batch]:
        if self._held:
            yield from self._calls(least)

    def advance(self, watermark: int | None) -> Iterator[Batch]:
        if watermark != self._mark:
            self._mark = watermark
            yield from self.let_go(1)

    def finish(self) -> Iterator[Batch]:
        return self.let_go(1)

    def _calls(self, least: int) -> Iterator[Batch]:
        """Call the function with full batches of what is held, and with the rest if that is so many or more."""
        held, at = self._held, 0
        while True:
            left, call = len(held) - at, self._call_size()
            if left < call and (not left or left < least):
                break
            part = held[at : at + call]
            at += len(part)
            yield from self._call(part, more=left > call)
        self._held = held[at:]
        came = self._came
        called = at > 0
        while at and came:
            records, stamp, when = came[0]
            if records > at:
                came[0] = records - at, stamp, when
                break
            at -= records
            came.popleft()
        if came:
            self.oldest = min(stamp for _, stamp, _ in came)
            self.waits_until = came[0][2] + self._linger_ns
            if called:
                # What a call left over has waited for its end, which says nothing of how soon more come.
                self.more_until = max(self.waits_until, self._clock()) + STEP_NS

    def _call(self, part: list[Any], more: bool) -> Iterator[Batch]:
        records = len(part)
        began, took = self._stopwatch(), 0
        try:
            result = self._fn(part)
            if slip := no_list(result):
                raise TypeError(slip)
            assert result is not None
            outputs = iter(result)
            while piece := list(islice(outputs, EXPAND_RECORDS_MAX)):
                took += self._stopwatch() - began
                yield piece
                began = self._stopwatch()
        except BaseException as error:
            self.errors.handle(part, _of_no_list(error), records)
        self._size.measure(records, took + self._stopwatch() - began, more or records >= self._call_size())


class KeyBy(Operator):
    """The key function of a key grouping that was fused into a task: records become a keyed batch."""

    kind = "key_by"

    def __init__(self, selector: Callable[[Any], Any], **common: Any) -> None:
        super().__init__(**common)
        self.selector = selector

    def stage(self, context: StageContext) -> Stage:
        return _KeyBy(context, self.selector)


class _KeyBy(Stage):
    def __init__(self, context: StageContext, selector: Callable[[Any], Any]) -> None:
        super().__init__(context)
        self._selector = selector

    def run(self, batch: Batch) -> Batch:
        assert isinstance(batch, list)
        records, keys = select(self._selector, batch, self.errors)
        # A key that no other task could be found by fails here, too.
        keys, records = without_bad_keys(keys, records, self.errors)
        return KeyedBatch(keys, records)


def combines(operator: Operator, aggregate: Aggregate) -> bool:
    """Whether senders may make one partial of many records. Not where records may be let go and the aggregate does not
    take all values: a partial that fails would take the good records in it along, and would be counted as one."""
    return operator.on_error == "fail" or aggregate.total


class Aggregated(Operator):
    """A running aggregate per key; emits (key, result).

    `emit` says when: "latest" (default) the newest result of each key that a batch touched, once a batch, so that a
    hot key under load does not flood what comes behind; "every": one for each record; "final": one a key, when the
    input ends.
    """

    keyed = True
    stays = "its state stays with its tasks; Spark makes partial aggregates for it"

    def __init__(self, aggregate: Aggregate, emit: Emit = "latest", **common: Any) -> None:
        self.kind = aggregate.name
        super().__init__(**common)
        if emit not in get_args(Emit):
            raise FlowError(f"{self.name!r}: emit={emit!r}; use 'latest', 'every' or 'final'")
        if aggregate.selector is not None:
            check_function(aggregate.selector, f"{self.kind} {self.name!r}")
        self.aggregate = aggregate
        self.emit = emit

    @property
    def state_kind(self) -> str:
        return self.aggregate.state_kind

    @property
    def combiner(self) -> Aggregate | None:
        """The aggregate that senders may apply before records travel; None when every record must show."""
        return None if self.emit == "every" or not combines(self, self.aggregate) else self.aggregate

    def stage(self, context: StageContext) -> Stage:
        return _Aggregating(context, self.aggregate, self.emit)


def add_all(
    add: Callable[[dict[Any, Any], Iterator[Any], Iterator[Any]], None],
    state: dict[Any, Any],
    keys: list[Any],
    values: list[Any],
    errors: ErrorHandler,
    records: list[Any] | None = None,
) -> None:
    """add(state, keys, values) over whole lists; records that fail go to `errors`, the others are added.

    `records`: what the values were taken from, to name what has failed; without them, or when they are not as many as
    the values, the values are named."""
    named = values if records is None or len(records) != len(values) else records
    key_iterator, value_iterator = iter(keys), iter(values)
    while True:
        try:
            add(state, key_iterator, value_iterator)
        except BaseException as error:
            failed = len(keys) - length_hint(key_iterator) - 1
            errors.handle((keys[failed], named[failed]), of_key(keys[failed], error))
        else:
            return


def of_key(key: Any, error: BaseException) -> BaseException:
    """The error of a key and its record: in place of one that only says "unhashable type", what can be a key."""
    if isinstance(error, TypeError) and not isinstance(error, KeyTypeError):
        try:
            hash(key)
        except TypeError:
            try:
                stable_hash(key)
            except KeyTypeError as better:
                return better
    return error


class _Aggregating(Stage):
    def __init__(self, context: StageContext, aggregate: Aggregate, emit: Emit) -> None:
        super().__init__(context)
        self._aggregate = aggregate
        self._emit = emit
        self.state = aggregate.new_state()
        self._map: KeyedMap | LoggedMap
        if aggregate.merging:
            self._map = LoggedMap(self.state, aggregate, context.epochs)
        else:
            self._map = KeyedMap(self.state, context.epochs)

    def run(self, batch: Batch) -> Batch:
        assert isinstance(batch, KeyedBatch)
        keys, values, records = batch.keys, batch.values, batch.values
        aggregate, state = self._aggregate, self.state
        if not batch.partial:
            keys, values = aggregate.prepare(keys, records, self.errors)
        failed = self.errors.skipped
        out: list[Any] = []
        if batch.partial:
            add_all(aggregate.merge, state, keys, values, self.errors)
        elif self._emit == "every":
            out = self._add_and_show(keys, values)
        else:
            add_all(aggregate.add, state, keys, values, self.errors, records)
        kept = self._map
        if isinstance(kept, KeyedMap):
            kept.note(keys)
        elif self.errors.skipped == failed:
            kept.log(keys, values, batch.partial)
        else:
            kept.lose()
        return self._results(keys) if self._emit == "latest" else out

    def _results(self, keys: Iterable[Any]) -> list[Any]:
        """(key, result) of each of these keys, in order of their first place."""
        aggregate, state = self._aggregate, self.state
        if not self.errors.skipped:  # else some key may have no state, or not even a hash
            touched = dict.fromkeys(keys)
            if aggregate.identity_result:
                return list(zip(touched, map(state.__getitem__, touched), strict=True))
            keys = touched
        results: dict[Any, Any] = {}
        for key in keys:
            try:
                if key in state and key not in results:
                    results[key] = aggregate.result(state[key])
            except TypeError:
                continue  # no hash: its record has been handled
            except BaseException as error:
                self.errors.handle((key, state[key]), error)
        return list(results.items())

    def _add_and_show(self, keys: list[Any], values: list[Any]) -> list[Any]:
        aggregate, state = self._aggregate, self.state
        out = []
        for key, value in zip(keys, values, strict=True):
            try:
                aggregate.add(state, iter((key,)), iter((value,)))
            except BaseException as error:
                self.errors.handle((key, value), of_key(key, error))
            else:
                out.append((key, aggregate.result(state[key])))
        return out

    def finish(self) -> Iterator[Batch]:
        if self._emit != "final":
            return
        keys = iter(self.state)
        while part := list(islice(keys, EXPAND_RECORDS_MAX)):
            if piece := self._results(part):
                yield piece

    def wants_whole(self) -> bool:
        return self._map.wants_whole

    def snapshot(self, epoch: int, whole: bool) -> StageState:
        return StageState({"state": self._map.delta(whole)})

    def restore(self, epoch: int, saved: SavedState) -> None:
        self._map.restore(saved.maps.get("state", {}))


class Reduce(Operator):
    """reduce(fn): the state of a key is its first record, then fn(state, record); emits (key, state)."""

    kind = "reduce"
    keyed = True
    stays = "its function sees records in order, so partial results cannot be merged"

    def __init__(self, fn: Callable[[Any, Any], Any], emit: Emit = "latest", **common: Any) -> None:
        super().__init__(**common)
        check_function(fn, f"reduce {self.name!r}", ("state", "record"))
        if emit not in get_args(Emit):
            raise FlowError(f"{self.name!r}: emit={emit!r}; use 'latest', 'every' or 'final'")
        self.fn = fn
        self.emit = emit

    def stage(self, context: StageContext) -> Stage:
        return _Aggregating(context, _Reducer(self.fn), self.emit)


class _Reducer(Aggregate):
    """A user's reduce function in the form of an aggregate. Never combined before the exchange: the function sees
    records in the order in which they arrive, and need not be associative."""

    name = "reduce"

    def __init__(self, fn: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self._fn = fn

    def add(self, state: dict[Any, Any], keys: Iterator[Any], values: Iterator[Any]) -> None:
        fn = self._fn
        for key, value in zip(keys, values, strict=True):
            state[key] = fn(state[key], value) if key in state else value

    def merge(self, state: dict[Any, Any], keys: Iterator[Any], partials: Iterator[Any]) -> None:
        raise AssertionError("a user's reduce is never combined")


class Processing(Operator):
    """process(fn): the user's function with keyed state, timers and side outputs."""

    kind = "process"
    keyed = True
    stays = "its state and timers are the function's own"

    def __init__(
        self,
        process: Process | Callable[..., Any],
        outputs: Iterable[str] = (),
        on_timer: Callable[..., Any] | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        if not isinstance(process, Process):
            if isinstance(process, type) and issubclass(process, Process):
                raise FlowError(f"process {self.name!r} needs a Process, got {called(process)}")
            check_function(process, f"process {self.name!r}", ("ctx", "key", "record"), yields=True)
        elif type(process).process is Process.process:
            raise FlowError(
                f"process {self.name!r}: {type(process).__name__} has no method process(self, ctx, key, record)"
            )
        if on_timer is not None:
            if isinstance(process, Process):
                raise FlowError(f"process {self.name!r}: a Process has its own on_timer method; do not give another")
            check_function(on_timer, f"process {self.name!r}: on_timer", ("ctx", "key", "at"), yields=True)
        if isinstance(outputs, str):
            raise FlowError(f"process {self.name!r}: outputs={outputs!r}; give a tuple of names: ({outputs!r},)")
        outputs = tuple(outputs)
        if DEAD_LETTERS in outputs or len(set(outputs)) != len(outputs):
            raise FlowError(f"process {self.name!r}: outputs={outputs}: names must be unique, not {DEAD_LETTERS!r}")
        self.process = process
        self.on_timer = on_timer
        self.outputs = (*outputs, *self.outputs)

    def stage(self, context: StageContext) -> Stage:
        return _Processing(context, self.process, self.on_timer)


class _Processing(Stage):
    """Calls the user's process for one record after the other; outputs leave in bounded pieces."""

    expands = True
    timed = True

    def __init__(
        self,
        context: StageContext,
        process: Process | Callable[..., Any],
        on_timer: Callable[..., Any] | None,
    ) -> None:
        super().__init__(context)
        # A copy: tasks of one worker must not share what the user keeps in it, nor change the flow's own.
        self._process = copied(process) if isinstance(process, Process) else process
        self._on_timer = self._process.on_timer if isinstance(self._process, Process) else on_timer
        self._timers = Timers(context.epochs)
        self.user = ProcessContext(context.operator.name, context.index, context.parallelism, context.side)
        self.user.clock = context.wall
        if self._on_timer is not None:
            self.user.timers = self._timers
        self._map = KeyedMap(self.user.state, context.epochs)

    def open(self) -> None:
        if isinstance(self._process, Process):
            self._process.open(self.user)

    def expand(self, batch: Batch) -> Iterator[Batch]:
        assert isinstance(batch, KeyedBatch)
        process = self._process.process if isinstance(self._process, Process) else self._process
        user = self.user
        out = user.emitted
        for key, record in zip(batch.keys, batch.values, strict=True):
            user.key = key
            try:
                result = process(user, key, record)
                if type(result) is list or type(result) is tuple:
                    out += result
                elif result is not None:
                    yield from _taken(result, out)
            except BaseException as error:
                self.errors.handle(record, of_key(key, _of_no_list(error)))
            if len(out) >= EXPAND_RECORDS_MAX:
                yield from _full_pieces(out)
        self._note(batch.keys)
        yield from _rest(out)

    def next_timer(self) -> float | None:
        return self._timers.next()

    def fire(self, now: float) -> Iterator[Batch]:
        user = self.user
        out = user.emitted
        for at, key in self._timers.due(now):
            if not self._timers.take(key, at):
                continue
            user.key = key
            assert self._on_timer is not None
            try:
                result = self._on_timer(user, key, round(at * 1000))
                if result is not None:
                    yield from _taken(result, out)
            except BaseException as error:
                self.errors.handle(("timer", key, round(at * 1000)), _of_no_list(error))
            self._note((key,))
            yield from _full_pieces(out)
        yield from _rest(out)

    def _note(self, keys: Collection[Any]) -> None:
        if self.user.cleared:
            self.user.cleared = False
            self._map.removed()
        self._map.note(keys)

    def finish(self) -> Iterator[Batch]:
        yield from self.fire(math.inf)
        if not isinstance(self._process, Process):
            return
        out = self.user.emitted
        try:
            result = self._process.finish(self.user)
            if result is not None:
                yield from _taken(result, out)
        except BaseException as error:
            raise self.errors.failure("(finishing)", _of_no_list(error), user_line(error)) from error
        yield from _full_pieces(out)
        yield from _rest(out)

    def wants_whole(self) -> bool:
        return self._map.wants_whole or self._timers.saved.wants_whole

    def snapshot(self, epoch: int, whole: bool) -> StageState:
        return StageState({"state": self._map.delta(whole), "timers": self._timers.saved.delta(whole)})

    def restore(self, epoch: int, saved: SavedState) -> None:
        self._map.restore(saved.maps.get("state", {}))
        self._timers.restore(saved.maps.get("timers", {}))

    def close(self, failed: bool) -> None:
        if isinstance(self._process, Process):
            self._process.close()


_NO_LISTS = frozenset((str, bytes, dict))


def _taken(result: Iterable[Any], out: list[Any]) -> Iterator[list[Any]]:
    """Add what a user's function returned to `out`, and take full pieces off meanwhile."""
    if type(result) in _NO_LISTS:  # as `no_list` does, at a cost that each record can bear
        raise TypeError(no_list(result))
    outputs = iter(result)
    while more := list(islice(outputs, EXPAND_RECORDS_MAX)):
        out += more
        yield from _full_pieces(out)


def _rest(out: list[Any]) -> Iterator[list[Any]]:
    """Take all off a list that is no full piece."""
    if out:
        yield out[:]
        out.clear()


def _full_pieces(out: list[Any]) -> Iterator[list[Any]]:
    """Take full pieces off the front of a list."""
    while len(out) >= EXPAND_RECORDS_MAX:
        yield out[:EXPAND_RECORDS_MAX]
        del out[:EXPAND_RECORDS_MAX]


class Read(Operator):
    """A source at the head of a flow; its stage is a reader that the source task drives."""

    kind = "read"
    stays = "it reads; its raw input goes to Spark"

    def __init__(self, source: Source, **common: Any) -> None:
        super().__init__(**common)
        if not isinstance(source, Source):
            raise FlowError(f"flow.read() needs a source such as penstock.sources.TextFiles(...), got {called(source)}")
        self.source = source

    def stage(self, context: StageContext) -> Stage:
        return _Pass(context)


class _Pass(Stage):
    def run(self, batch: Batch) -> Batch:
        return batch


class Write(Operator):
    """A sink at the end of a flow."""

    kind = "write"
    is_sink = True
    stays = "it writes, by epochs"

    def __init__(self, sink: Sink, **common: Any) -> None:
        super().__init__(**common)
        if not isinstance(sink, Sink):
            raise FlowError(f"write() needs a sink such as penstock.sinks.Files(...), got {called(sink)}")
        self.sink = sink

    def stage(self, context: StageContext) -> Stage:
        return _Writing(context, self.sink)


class _Writing(Stage):
    def __init__(self, context: StageContext, sink: Sink) -> None:
        super().__init__(context)
        self._sink = sink
        self._writer: SinkWriter | None = None

    def open(self) -> None:
        context = self.context.sink_context
        if context is None:
            context = SinkContext(self.context.operator.name, self.context.index, self.context.parallelism)
        context.errors = self.errors
        self._writer = self._sink.writer(context)

    def run(self, batch: Batch) -> Batch:
        assert isinstance(batch, list)
        assert self._writer is not None
        with self._blamed(batch):
            self._writer.write(batch)
        return []

    def flush(self) -> None:
        if self._writer is not None:
            with self._blamed("(flushing)"):
                self._writer.flush()

    def finish(self) -> Iterator[Batch]:
        if self._writer is not None:
            with self._blamed("(finishing)"):
                self._writer.finish()
        return iter(())

    @contextmanager
    def _blamed(self, what: Any) -> Iterator[None]:
        """What a writer raises for more than one record (a full disk) is this operator's failure."""
        try:
            yield
        except RecordError:
            raise
        except BaseException as error:
            raise self.errors.failure(what, error, user_line(error)) from error

    def snapshot(self, epoch: int, whole: bool) -> StageState:
        assert self._writer is not None
        with self._blamed(f"(preparing epoch {epoch})"):
            return StageState(own=self._writer.prepare(epoch))

    def restore(self, epoch: int, saved: SavedState) -> None:
        assert self._writer is not None
        with self._blamed(f"(going back to epoch {epoch})"):
            self._writer.restore(epoch, saved.own)

    def commit(self, epoch: int) -> None:
        if self._writer is not None:
            with self._blamed(f"(committing epoch {epoch})"):
                self._writer.commit(epoch)

    def close(self, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close(failed)
