"""The Flow API: how a user writes a stream program.

    flow = Flow("wordcount")
    (flow.read(TextFiles("corpus/*.txt"))
         .flat_map(str.split)
         .key_by(str.lower)
         .count()
         .write(Files("counts/")))

A `Stream` is a place in the flow where records can be taken from; each method adds an operator downstream and returns
the stream of its outputs. A stream may be used more than once: every user gets every record. Errors in the program
are raised here, at the line that made them, before anything runs.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from operator import attrgetter, itemgetter
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypedDict, TypeVar, get_args, overload

from penstock.runtime.errors import FlowError
from penstock.runtime.event_time.windows import CountWindow, Sliding, Window
from penstock.runtime.exchange import grouping
from penstock.runtime.expressions import Aggregation, Expr, compile_filter, compile_select, compile_with_columns, named
from penstock.runtime.expressions.tree import Column
from penstock.runtime.mistakes import called, checks_options, nearest, no_method
from penstock.runtime.operators.agg import Agg
from penstock.runtime.operators.aggregated import Aggregated, Emit, Reduce, Reducer
from penstock.runtime.operators.asynchronous import MapAsync, RetryOn
from penstock.runtime.operators.base import Operator
from penstock.runtime.operators.batches import BatchFormat, MapBatches
from penstock.runtime.operators.columnar import Columnar, expression_of, taking
from penstock.runtime.operators.ends import Read, Write
from penstock.runtime.operators.fields import Field
from penstock.runtime.operators.joins import IntervalHow, IntervalJoin, TemporalHow, TemporalJoin
from penstock.runtime.operators.lookup import Lookup
from penstock.runtime.operators.outside_lookup import OutsideLookup, Reloaded
from penstock.runtime.operators.process import ProcessContext, ProcessFunction
from penstock.runtime.operators.processing import Processing
from penstock.runtime.operators.stateless import Filter, FlatMap, Map
from penstock.runtime.operators.watermarks import MakeWatermarks
from penstock.runtime.operators.window_functions import (
    AggregateFunction,
    Aggregating,
    Collected,
    Joined,
    JoinHow,
    OwnAggregate,
    Processed,
    Top,
    WindowContext,
    WindowFunction,
)
from penstock.runtime.operators.windowing import WindowAggregated, WindowEmit
from penstock.runtime.operators.windows import Updates, Windows
from penstock.runtime.program.graph import SAVEPOINT, Edge, Graph
from penstock.runtime.records.userfunc import (
    DEAD_LETTERS,
    DeadLetter,
    OnError,
    caller_line,
    check_function,
    check_picklable,
    constructed,
)
from penstock.runtime.sinks.base import Sink
from penstock.runtime.sources.base import Source
from penstock.runtime.state import aggregate as aggregates
from penstock.runtime.units import flag, is_whole, whole

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from penstock.runtime.program.connected import ConnectedStreams
    from penstock.runtime.program.plan import Plan


# What a stream's records are, a keyed stream's keys, and what becomes of them. Streams are read only, so they are
# covariant: a stream of dogs is one of animals.
if TYPE_CHECKING:  # in a type that says nothing of its records they are Any
    from typing_extensions import TypeVar as WithDefault

    T_co = WithDefault("T_co", covariant=True, default=Any)
    K_co = WithDefault("K_co", covariant=True, default=Any)
    # The start and the end of a window: numbers of ms or of records. Only the global window has None.
    Bound_co = WithDefault("Bound_co", covariant=True, default=int)
else:
    T_co = TypeVar("T_co", covariant=True)
    K_co = TypeVar("K_co", covariant=True)
    Bound_co = TypeVar("Bound_co", covariant=True)
logger = logging.getLogger(__name__)

U = TypeVar("U")
V = TypeVar("V")
Key = TypeVar("Key")
Bound = TypeVar("Bound")
_Record_contra = TypeVar("_Record_contra", contravariant=True)
_Result_co = TypeVar("_Result_co", covariant=True)


class _Called(Protocol[_Record_contra, _Result_co]):
    """An object that is called like a function of a record."""

    def __call__(self, record: _Record_contra, /) -> _Result_co: ...


#: A record of fields by name.
Row = dict[str, Any]


class Options(TypedDict, total=False):
    """The options of every operator: its name, how many tasks it has, what becomes of records that fail in it, and what
    each task needs of its worker: GPUs, or other resources of Ray."""

    name: str | None
    parallelism: int | None
    on_error: OnError
    num_gpus: float
    resources: Mapping[str, float] | None


Selector = Callable[[Any], Any] | str | int | Expr
"""How a key or a value is taken from a record: a function, a field name of dict records, an index of tuples, an
expression."""


class FunctionOptions(Options, total=False):
    """The options of the operators whose function may be a class."""

    fn_constructor_args: Iterable[Any] | None
    fn_constructor_kwargs: Mapping[str, Any] | None


class BatchOptions(FunctionOptions, total=False):
    """The options of `map_batches` beside its function and the format of batches."""

    batch_size: int
    min_batch: int
    linger_s: float | timedelta | None


class AsyncOptions(FunctionOptions, total=False):
    """The options of `map_async` beside its function."""

    concurrency: int
    timeout_s: float | timedelta | None
    ordered: bool
    retries: int
    retry_wait_s: float | timedelta
    retry_on: RetryOn


class JoinOptions(Options, total=False):
    """The options of every join: how the times of the records of its two streams are taken."""

    time: Selector | None
    other_time: Selector | None


class WindowJoinOptions(JoinOptions, total=False):
    """The options of `join`: those of every join, and how late records may be."""

    lateness_s: float | timedelta


class IntervalOptions(JoinOptions):
    """The options of `interval_join`."""

    lower_s: float | timedelta
    upper_s: float | timedelta


class ProcessOptions(Options, total=False):
    """The options of `process` beside its function."""

    outputs: tuple[str, ...]
    on_timer: Callable[..., Iterable[Any] | None] | None
    on_event_timer: Callable[..., Iterable[Any] | None] | None
    hold_s: float | timedelta


class WindowOptions(TypedDict, total=False):
    """The options of `window`: how the time of a record is taken, and when the results of a window leave."""

    time: Selector | None
    lateness_s: float | timedelta
    early_s: float | timedelta | None
    early_count: int | None


# What a user writes for the groupings that an operator does not choose itself.
_METHODS: dict[type[grouping.Grouping], str] = {
    grouping.Rebalance: "rebalance",
    grouping.Shuffle: "shuffle",
    grouping.All: "broadcast",
    grouping.Forward: "forward",
    grouping.Global: "to_first",
    grouping.Custom: "partition_by",
    grouping.Key: "key_by",
}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,99}")


@checks_options
class Flow:
    """A stream program under construction; `penstock.run(flow)` runs it.

    `parallelism` is the number of tasks of every operator that does not set its own; None means one for each worker.
    (`watermark` has as many tasks as its input.)
    `key_groups` is the number of parts into which keyed state is divided. It is also the highest parallelism that keyed
    operators can have during the life of the job. `chaining=False` makes separate tasks of all operators, which helps
    with measurements.
    """

    def __init__(self, name: str, parallelism: int | None = None, key_groups: int = 128, chaining: bool = True) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise FlowError(
                f"flow name {name!r}: use up to 100 letters, digits, '_', '-' and '.', starting with a letter or digit"
            )
        if name == SAVEPOINT:
            raise FlowError(
                f"flow name {name!r}: a savepoint has this name in the directory where it lies, and a job of this name "
                "would overwrite it; give the flow another name"
            )
        self.name = name
        self.graph = Graph(name)
        self.parallelism = parallelism
        if not is_whole(key_groups) or not 1 <= key_groups <= 32_768:
            raise FlowError(f"flow {name!r}: key_groups={key_groups!r}; it must be between 1 and 32,768")
        self.key_groups = key_groups
        self.chaining = flag(chaining, f"flow {name!r}: chaining")

    @property
    def parallelism(self) -> int | None:
        """The number of tasks of every operator that does not set its own; None means one for each worker."""
        return self._parallelism

    @parallelism.setter
    def parallelism(self, value: int | None) -> None:
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise FlowError(f"flow {self.name!r}: parallelism={value!r}; it must be 1 or more, or None")
        self._parallelism = value

    def read(
        self,
        source: Source[U],
        *,
        name: str | None = None,
        parallelism: int | None = None,
        on_error: OnError = "fail",
    ) -> Stream[U]:
        """The stream of a source's records."""
        operator = Read(source, name=name, parallelism=parallelism, on_error=on_error)
        check_picklable(source, f"source {operator.name!r}")
        return self._add(operator)

    def connect(self, stream: Stream[Any], to: str) -> None:
        """Make a stream a further input of an operator that exists already."""
        if not isinstance(stream, Stream):
            raise FlowError(f"flow {self.name!r}: connect takes a stream, got {stream!r}")
        if stream._flow is not self:
            raise FlowError(f"flow {self.name!r}: the stream is of another flow, {stream._flow.name!r}")
        if to in self.graph.operators and self.graph.operators[to].keyed:
            raise FlowError(f"flow {self.name!r}: operator {to!r} takes keyed input; unite the streams before key_by")
        for edge in stream._edges(to):
            self.graph.connect(edge)

    def explain(self, workers: int = 1) -> str:
        """The logical and the physical plan, as text."""
        from penstock.runtime.program.explain import explain

        return explain(self, self.plan(workers, check_sinks=False), workers)

    def plan(self, workers: int = 1, *, list_splits: bool = True, check_sinks: bool = True) -> Plan:
        """The physical plan for a number of workers; raises FlowError when the flow cannot run. A resumed job
        does not list its sources' splits. A job that continues from what it has saved, and a plan that is only shown,
        do not need empty places for their sinks."""
        from penstock.runtime.program.plan import make_plan

        return make_plan(
            self.graph,
            parallelism=self.parallelism,
            key_groups=self.key_groups,
            workers=workers,
            chaining=self.chaining,
            list_splits=list_splits,
            check_sinks=check_sinks,
        )

    def __repr__(self) -> str:
        return f"<Flow {self.name!r}: {_listed(self.graph.operators) or 'no operators yet'}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            begin = "a flow begins with flow.read(source), which gives a stream that has it"
            raise no_method(self, name, dict.fromkeys(_methods(Stream), begin))

    def _add(self, operator: Operator, *inputs: Iterable[Stream[Any]]) -> Stream[Any]:
        """Adds an operator with the streams of each of its inputs."""
        operator.declared_at = caller_line()
        self.graph.add(operator)
        for port, streams in enumerate(inputs):
            for stream in streams:
                for edge in stream._edges(operator.name, port):
                    self.graph.connect(edge)
        fields = operator.source.fields() if isinstance(operator, Read) else None
        return Stream(self, (_Tap(operator.name),), fields=fields)


def warned_of_event_timers(operator: Processing, stream: Stream[U]) -> Stream[U]:
    """Returns the outputs of a new operator, and warns if it calls event timers and gets no watermarks."""
    graph = stream._flow.graph
    bare = [edge.source for edge in graph.incoming(operator.name) if not graph.has_before(edge.source, MakeWatermarks)]
    if operator.on_event_timer is not None and bare:
        logger.warning(
            "flow %r: the event timers of %s %r fire only at the end of the input, because no watermarks come from %s; "
            "put .watermark(time, ...) directly after the source of each of its inputs",
            stream._flow.name,
            operator.kind,
            operator.name,
            " and ".join(map(repr, bare)),
        )
    return stream


@dataclass(frozen=True)
class _Tap:
    """One place where records leave an operator, and how they are grouped towards the next."""

    operator: str
    output: str | None = None
    grouping: grouping.Grouping | None = None


@checks_options
class Stream(Generic[T_co]):
    """Records that leave one operator, or several united ones."""

    def __init__(
        self,
        flow: Flow,
        taps: tuple[_Tap, ...],
        fields: list[str] | None = None,
        time: Callable[[Any], Any] | None = None,
    ) -> None:
        self._flow = flow
        self._taps = taps
        self._fields = fields  # of dict records, where known before running
        self._time = time  # takes a record's time from it, where a watermark operator has said how

    def __repr__(self) -> str:
        fields = f", of fields {_listed(self._fields)}" if self._fields is not None else ""
        return f"<Stream of flow {self._flow.name!r}: {self._places()}{fields}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            keyed = "it is of streams with keys; put .key_by(...) before it"
            raise no_method(self, name, dict.fromkeys(_methods(KeyedStream), keyed))

    def _places(self) -> str:
        """Where its records come from, in words."""
        return ", ".join(
            f"from {tap.operator!r}"
            + (f", side output {tap.output!r}" if tap.output is not None else "")
            + (f", by {_METHODS[type(tap.grouping)]}()" if tap.grouping is not None else "")
            for tap in self._taps
        )

    def _edges(self, target: str, port: int = 0) -> list[Edge]:
        return [Edge(tap.operator, target, tap.grouping, tap.output, port) for tap in self._taps]

    def _grouped(self, how: grouping.Grouping) -> Stream[T_co]:
        for tap in self._taps:
            # To spread records otherwise than was said changes no result; to send them elsewhere does.
            if tap.grouping is not None and not isinstance(tap.grouping, grouping.Rebalance | grouping.Shuffle):
                raise FlowError(
                    f"{_METHODS[type(how)]}() directly after {_METHODS[type(tap.grouping)]}(): there is no operator "
                    "between the two to which the first could send records; leave one of them out"
                )
        taps = tuple(replace(tap, grouping=how) for tap in self._taps)
        return Stream(self._flow, taps, self._fields, self._time)

    # --- one record at a time ------------------------------------------------------------------------------

    @overload
    def map(self, fn: type[_Called[T_co, U]], **options: Unpack[FunctionOptions]) -> Stream[U]: ...

    @overload
    def map(self, fn: Callable[[T_co], U], **options: Unpack[FunctionOptions]) -> Stream[U]: ...

    def map(
        self,
        fn: Callable[[T_co], U] | type[_Called[T_co, U]],
        *,
        fn_constructor_args: Iterable[Any] | None = None,
        fn_constructor_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> Stream[U]:
        """One output for each record: fn(record). Options: name, parallelism, on_error, num_gpus, resources.

        `num_gpus` and `resources` ({"fpga": 1}): what each task needs. On Ray, the task's worker reserves the resources
        on a node that has them. A local job reserves nothing.

        `fn` may be a class with __call__, for what takes long to load: each task makes one object of it, with
        `fn_constructor_args` and `fn_constructor_kwargs`, and calls the object's open() and close() if it has them."""
        fn = constructed(fn, fn_constructor_args, fn_constructor_kwargs, "map")
        return self._flow._add(Map(fn, **options), (self,))

    @overload
    def flat_map(self, fn: type[_Called[T_co, Iterable[U]]], **options: Unpack[FunctionOptions]) -> Stream[U]: ...

    @overload
    def flat_map(self, fn: Callable[[T_co], Iterable[U]], **options: Unpack[FunctionOptions]) -> Stream[U]: ...

    def flat_map(
        self,
        fn: Callable[[T_co], Iterable[U]] | type[_Called[T_co, Iterable[U]]],
        *,
        fn_constructor_args: Iterable[Any] | None = None,
        fn_constructor_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> Stream[U]:
        """Any number of outputs for each record: fn(record) returns an iterable, which is read lazily. `fn` may be a
        class, as in `map`."""
        fn = constructed(fn, fn_constructor_args, fn_constructor_kwargs, "flat_map")
        return self._flow._add(FlatMap(fn, **options), (self,))

    def filter(self, fn: Callable[[T_co], Any] | Expr, **options: Unpack[Options]) -> Stream[T_co]:
        """The records for which fn(record), or an expression such as ps.col("price") > 5, is true."""
        operator: Operator
        if isinstance(fn, Expr):
            self._check_fields("filter", {"": fn})
            operator = Columnar(compile_filter(fn), **options)
        else:
            operator = Filter(fn, **options)
        return self._like(self._flow._add(operator, (self,)))

    def select(
        self,
        *fields: str | Expr,
        name: str | None = None,
        parallelism: int | None = None,
        on_error: OnError = "fail",
        **exprs: Expr,
    ) -> Stream[Row]:
        """Dict records with only these fields: names of fields, expressions with .alias(name), or name=expression. A
        text counts as {"value": text}. `name`, `parallelism` and `on_error` are options of the operator."""
        wanted = {**named(list(fields)), **named(exprs)}
        self._check_fields("select", wanted)
        operator = Columnar(compile_select(wanted), name=name, parallelism=parallelism, on_error=on_error)
        stream = self._flow._add(operator, (self,))
        stream._fields = list(wanted)
        stream._time = self._time_through(wanted)
        return stream

    def with_columns(
        self,
        *,
        name: str | None = None,
        parallelism: int | None = None,
        on_error: OnError = "fail",
        **exprs: Expr,
    ) -> Stream[Row]:
        """Dict records with these fields added or replaced. All expressions see the original record."""
        wanted = named(exprs)
        self._check_fields("with_columns", wanted)
        operator = Columnar(compile_with_columns(wanted), name=name, parallelism=parallelism, on_error=on_error)
        stream = self._flow._add(operator, (self,))
        stream._fields = None if self._fields is None else list(dict.fromkeys([*self._fields, *wanted]))
        changed = expression_of(self._time)
        stream._time = self._time if changed is not None and not set(changed.fields()) & set(wanted) else None
        return stream

    def _time_through(self, wanted: dict[str, Expr]) -> Callable[[Any], Any] | None:
        """How to take a record's time when only these fields are left."""
        time = expression_of(self._time)
        if isinstance(time, Column) and isinstance(kept := wanted.get(time.name), Column) and kept.same(time):
            return self._time
        return None

    def _check_fields(self, method: str, exprs: dict[str, Expr]) -> None:
        for expr in exprs.values():
            for name in expr.fields():
                if self._fields is not None and name not in self._fields:
                    raise _no_field(f"{method}({name!r})", name, self._fields)

    def _like(self, stream: Stream[U]) -> Stream[U]:
        """Another stream whose records are like this one's."""
        stream._fields, stream._time = self._fields, self._time
        return stream

    @overload
    def map_batches(
        self,
        fn: type[_Called[list[T_co], Iterable[U]]],
        *,
        batch_format: Literal["list"] = "list",
        **options: Unpack[BatchOptions],
    ) -> Stream[U]: ...

    @overload
    def map_batches(
        self,
        fn: Callable[[list[T_co]], Iterable[U]],
        *,
        batch_format: Literal["list"] = "list",
        **options: Unpack[BatchOptions],
    ) -> Stream[U]: ...

    @overload
    def map_batches(
        self,
        fn: Callable[[Any], Any] | type[_Called[Any, Any]],
        *,
        batch_format: Literal["numpy", "pandas", "arrow"],
        **options: Unpack[BatchOptions],
    ) -> Stream[Row]: ...

    def map_batches(
        self,
        fn: Callable[[Any], Any] | type[_Called[Any, Any]],
        *,
        batch_size: int = 1024,
        batch_format: BatchFormat = "list",
        min_batch: int = 1,
        linger_s: float | timedelta | None = None,
        fn_constructor_args: Iterable[Any] | None = None,
        fn_constructor_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> Stream[Any]:
        """fn(list of records) -> iterable of records; batches hold the records that are ready, at most `batch_size`.

        With another `batch_format` records are dicts, and fn gets and returns them as columns: "arrow" a pyarrow Table,
        "pandas" a DataFrame, "numpy" a dict of arrays by name. `fn` may be a class, as in `map`: each task loads a
        model once. With `min_batch`, fn is called when at least that many records are ready, or when the first has
        waited for `linger_s` seconds. The barrier of an epoch, a watermark and the end of the input end the wait. When
        fn raises an error, all records of that call fail together: one dead letter has the list of them, and `skipped`
        counts each of them."""
        fn = constructed(fn, fn_constructor_args, fn_constructor_kwargs, "map_batches", "batch")
        return self._flow._add(MapBatches(fn, batch_size, batch_format, min_batch, linger_s, **options), (self,))

    @overload
    def map_async(self, fn: type[_Called[T_co, Awaitable[U]]], **options: Unpack[AsyncOptions]) -> Stream[U]: ...

    @overload
    def map_async(self, fn: type[_Called[T_co, U]], **options: Unpack[AsyncOptions]) -> Stream[U]: ...

    @overload
    def map_async(self, fn: Callable[[T_co], Awaitable[U]], **options: Unpack[AsyncOptions]) -> Stream[U]: ...

    @overload
    def map_async(self, fn: Callable[[T_co], U], **options: Unpack[AsyncOptions]) -> Stream[U]: ...

    def map_async(
        self,
        fn: Callable[[Any], Any] | type[_Called[Any, Any]],
        *,
        concurrency: int = 100,
        timeout_s: float | timedelta | None = None,
        ordered: bool = True,
        retries: int = 0,
        retry_wait_s: float | timedelta = 0.0,
        retry_on: RetryOn = None,
        fn_constructor_args: Iterable[Any] | None = None,
        fn_constructor_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> Stream[Any]:
        """One output a record: what fn(record) returns, in calls that wait for something else, such as a service.

        `fn` is a coroutine function, which runs on an asyncio loop in one thread of each task, or any other function,
        which runs in threads of the task and must not return a coroutine. It may be an object with open() and close(),
        which a coroutine function may have as coroutine functions too, or a class with __call__, as for `map`. Each
        task has at most `concurrency` records under way, and takes no more input meanwhile. A result that waits for its
        turn counts too.

        `ordered`: results leave in the order of their records; False: as they are ready. No watermark overtakes a
        record that came before it, so a window misses no result. The order among tasks, and so for each key, is kept
        only if the records of a key go to one task, and not over a change of the parallelism.

        `timeout_s`: a call that takes longer has failed (None: no limit). A coroutine is cancelled. One that blocks the
        loop, as time.sleep() does, holds up all calls of its task, so that others fail by their timeouts; their errors
        then say so. A thread cannot be ended from outside: its result is dropped, and another thread takes its place.
        So a function that never returns costs one more thread for each such call, with its stack and whatever the
        function holds, until the worker ends. Give such functions a timeout of their own.

        `retries`: how often a call that has failed is made again, before `on_error` decides. The first wait is
        `retry_wait_s` long and each further one twice as long as the one before, up to a minute or `retry_wait_s`.
        `retry_on`: a class of errors, or a tuple of them, after which a call is made again (None: all); other errors,
        which would come again, are handled at once. A call that has taken too long has failed by a TimeoutError.

        Epochs do not wait for calls. They save the records that are under way, and a job that goes back makes their
        calls again. So a call may be made twice, and its result leaves once."""
        fn = constructed(fn, fn_constructor_args, fn_constructor_kwargs, "map_async")
        operator = MapAsync(fn, concurrency, timeout_s, ordered, retries, retry_wait_s, retry_on, **options)
        return self._flow._add(operator, (self,))

    def lookup(
        self,
        table: Any,
        on: str | tuple[str, str],
        *,
        how: Literal["inner", "left"] = "inner",
        columns: Iterable[str] | None = None,
        cache_s: float | timedelta = 60.0,
        cache_rows: int = 10_000,
        **options: Unpack[Options],
    ) -> Stream[Row]:
        """Join each dict record with the row of a table that has the same key.

        `table`: dicts or a pyarrow Table, which stay as they are; `penstock.Reloaded(load, every_s)`, which is loaded
        again and again; or fn(key), which returns a row as a dict, or None. What the function has returned is kept for
        `cache_s` seconds, and `cache_rows` rows at most. No two rows may have the same key. `on`: the field that both
        have, or (the record's field, the table's). `how`: "inner" drops records without a row, "left" gives them None.
        `columns`: the columns of the table to add (None: all but the key)."""
        if isinstance(table, Reloaded) or callable(table):
            outside = OutsideLookup(table, on, how, columns, cache_s, cache_rows, **options)
            self._check_lookup(outside.left, outside.name, outside.columns or ())
            stream: Stream[Row] = self._like(self._flow._add(outside, (self,)))
            both = self._fields is not None and outside.columns is not None
            stream._fields = [*(self._fields or ()), *(outside.columns or ())] if both else None
            return stream
        operator = Lookup(table, on, how, columns, **options)
        self._check_lookup(operator.left, operator.name, operator.columns)
        stream = self._like(self._flow._add(operator, (self,)))
        if self._fields is not None:
            stream._fields = [*self._fields, *operator.columns]
        return stream

    def _check_lookup(self, left: str, name: str, columns: Iterable[str]) -> None:
        if self._fields is not None and left not in self._fields:
            raise _no_field(f"lookup(on={left!r})", left, self._fields)
        both = [column for column in columns if column in (self._fields or ())]
        if both:
            raise FlowError(
                f"lookup {name!r}: the records have a field {both[0]!r} already; leave it out: columns=[...]"
            )

    # --- event time ----------------------------------------------------------------------------------------

    def watermark(
        self,
        time: Selector,
        *,
        out_of_orderness_s: float | timedelta = 0.0,
        idle_s: float | timedelta | None = None,
        max_drift_s: float | timedelta | None = None,
        **options: Unpack[Options],
    ) -> Stream[T_co]:
        """The same records, with event time: `time` takes a record's time, in milliseconds since 1970 or as a datetime
        with a time zone. A later window closes when a record has come whose time is `out_of_orderness_s` past the end
        of the window. A task without input for `idle_s` does not hold up windows (None: it does). Put it directly after
        the source: without a `parallelism` it has that of its input, so that each of its tasks sees the records of one
        task, in their order. With `max_drift_s` a source reads no further ahead of the slowest source of the job that
        has a `max_drift_s` too, so that joins and windows need not keep what it would bring. Times are known only when
        records were read, so this is no hard bound: a read has as many records as should fit by the times of the last
        ones, but at least one. It ends later when its records lie further apart than these. Sources are told of each
        other ten times a second, so none advances by more than about ten times `max_drift_s` in a second."""
        selector = _selector(time, "watermark", self._fields)
        stream = self._flow._add(MakeWatermarks(selector, out_of_orderness_s, idle_s, max_drift_s, **options), (self,))
        stream._fields, stream._time = self._fields, selector
        return stream

    # --- where records go ----------------------------------------------------------------------------------

    @overload
    def key_by(self, selector: Callable[[T_co], Key]) -> KeyedStream[Key, T_co]: ...

    @overload
    def key_by(self, selector: str | int | Expr) -> KeyedStream[Any, T_co]: ...

    def key_by(self, selector: Selector) -> KeyedStream[Any, T_co]:
        """The same records, each with a key: records with equal keys go to the same task."""
        return KeyedStream(self, _selector(selector, "key_by", self._fields))

    def rebalance(self) -> Stream[T_co]:
        """Send records to the next operator's tasks in turn."""
        return self._grouped(grouping.Rebalance())

    def shuffle(self) -> Stream[T_co]:
        """Send each record to a random task of the next operator."""
        return self._grouped(grouping.Shuffle())

    def broadcast(self) -> Stream[T_co]:
        """Send every record to every task of the next operator (all grouping)."""
        return self._grouped(grouping.All())

    def forward(self) -> Stream[T_co]:
        """Send records from task i to task i of the next operator, which must have the same parallelism."""
        return self._grouped(grouping.Forward())

    def to_first(self) -> Stream[T_co]:
        """Send every record to the first task of the next operator (global grouping)."""
        return self._grouped(grouping.Global())

    def partition_by(self, chooser: Callable[[T_co, int], int]) -> Stream[T_co]:
        """chooser(record, number of tasks) says which task of the next operator gets a record."""
        check_function(chooser, "partition_by", ("record", "tasks"))
        return self._grouped(grouping.Custom(chooser))

    def union(self, *others: Stream[U]) -> Stream[T_co | U]:
        """The records of this stream and of others, in the order in which they arrive."""
        taps = list(self._taps)
        for other in others:
            if not isinstance(other, Stream):
                raise FlowError(f"union takes streams, got {other!r}; apply key_by after the union")
            if other._flow is not self._flow:
                raise FlowError(f"union of streams of two flows: {self._flow.name!r} and {other._flow.name!r}")
            taps += other._taps
        places = [(tap.operator, tap.output) for tap in taps]
        if len(set(places)) != len(places):
            raise FlowError("union of a stream with itself would double its records")
        fields = self._fields if all(other._fields == self._fields for other in others) else None
        time = self._time if all(other._time is self._time for other in others) else None
        return Stream(self._flow, tuple(taps), fields, time)

    def side_output(self, tag: str) -> Stream[Any]:
        """The stream of a side output of the operator that made this stream."""
        if len(self._taps) != 1 or self._taps[0].output is not None:
            raise FlowError(f"side_output({tag!r}): ask the stream that the operator returned")
        operator = self._flow.graph.operators[self._taps[0].operator]
        if tag not in operator.outputs:
            known = ", ".join(map(repr, operator.outputs)) or "none"
            raise FlowError(f"operator {operator.name!r} has no side output {tag!r}; it has: {known}")
        return Stream(self._flow, (_Tap(operator.name, tag),))

    def dead_letters(self) -> Stream[DeadLetter]:
        """The failed records of the operator that made this stream, which needs on_error="dead_letter"."""
        if len(self._taps) == 1:
            operator = self._flow.graph.operators[self._taps[0].operator]
            if DEAD_LETTERS not in operator.outputs:
                raise FlowError(f"operator {operator.name!r} keeps no dead letters; give it on_error='dead_letter'")
        return self.side_output(DEAD_LETTERS)

    def write(self, sink: Sink, **options: Unpack[Options]) -> Stream[Any]:
        """End the stream in a sink. Returns a stream only for `.dead_letters()` of the sink."""
        operator = Write(sink, **options)
        check_picklable(sink, f"sink {operator.name!r}")
        return self._flow._add(operator, (self,))

    def to_spark(
        self,
        fn: Callable[[Any, int], object],
        *,
        spark: Any,
        folder: str | os.PathLike[str],
        schema: Any = None,
        keep: bool = True,
        overwrite: bool = False,
        **options: Unpack[Options],
    ) -> Stream[Any]:
        """End the stream in a table, and call fn(DataFrame, epoch) in this process for each of its complete epochs.

            orders.to_spark(lambda df, epoch: df.write.insertInto("orders"), spark=spark, folder="/shared/orders")

        The records go to `folder` as Parquet (what they become, and `schema` and `overwrite`, are as in sinks.Parquet);
        Spark's executors, the job's workers and this program share it. When an epoch is complete, fn gets its records
        as a DataFrame of your session, `spark`, in a thread of this process; epochs come one after the other, in order,
        those without records are left out, and no recovery takes one back. `keep=False` deletes an epoch's files when
        fn has returned.

        Guarantee: once for each epoch as long as this process lives. Otherwise fn is called again for the epoch that
        was under way, with the same number and the same records, by `penstock.bridge.follow`, which continues in
        another program. (Only an epoch that turns out to be damaged after it was complete comes again under other
        numbers.)

        `job.wait()` returns when fn has been called for all epochs. When fn raises, it is called no more, wait() raises
        JobError, and the job continues to write to the folder. The job needs epochs. Options: name, parallelism,
        on_error.

        Errors: FlowError for arguments that cannot work, and before the start for a folder that another job has used.
        """
        from penstock.runtime.sinks.to_spark import ToSpark

        sink = ToSpark(fn, spark=spark, folder=folder, schema=schema, keep=keep, overwrite=overwrite)
        return self.write(sink, **options)


@checks_options
class KeyedStream(Generic[K_co, T_co]):
    """Records with keys; its operators keep state by key."""

    def __init__(self, stream: Stream[T_co], selector: Callable[[Any], Any]) -> None:
        self._stream = stream._grouped(grouping.Key(selector))
        self._fields = stream._fields
        self._selector = selector

    def __repr__(self) -> str:
        name = getattr(self._selector, "__qualname__", None) or repr(self._selector)
        return f"<KeyedStream of flow {self._stream._flow.name!r}: {self._stream._places()}, of {name}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            own = f"a stream with keys goes to one of {_listed(_methods(KeyedStream))}"
            before = f"{own} (process(fn) has each record with its key); put .{name}(...) before .key_by(...)"
            raise no_method(self, name, dict.fromkeys(_methods(Stream), before))

    def count(self, *, emit: Emit = "latest", **options: Unpack[Options]) -> Stream[tuple[K_co, int]]:
        """(key, number of its records so far). `emit`: "latest" (the newest result of each key in a batch), "every"
        (one result for each record), "final" (one result for each key, at the end of the input)."""
        return self._aggregate(aggregates.Count(), emit, options)

    def sum(
        self, value: Selector | None = None, *, emit: Emit = "latest", **options: Unpack[Options]
    ) -> Stream[tuple[K_co, Any]]:
        """(key, sum of the values so far); `value` takes the value from a record, None: the record itself."""
        return self._aggregate(aggregates.Sum(self._value(value, "sum")), emit, options)

    def min(
        self, value: Selector | None = None, *, emit: Emit = "latest", **options: Unpack[Options]
    ) -> Stream[tuple[K_co, Any]]:
        """(key, least value so far)."""
        return self._aggregate(aggregates.Min(self._value(value, "min")), emit, options)

    def max(
        self, value: Selector | None = None, *, emit: Emit = "latest", **options: Unpack[Options]
    ) -> Stream[tuple[K_co, Any]]:
        """(key, greatest value so far)."""
        return self._aggregate(aggregates.Max(self._value(value, "max")), emit, options)

    def mean(
        self, value: Selector | None = None, *, emit: Emit = "latest", **options: Unpack[Options]
    ) -> Stream[tuple[K_co, Any]]:
        """(key, mean of the values so far)."""
        return self._aggregate(aggregates.Mean(self._value(value, "mean")), emit, options)

    def agg(
        self,
        *,
        emit: Emit = "latest",
        name: str | None = None,
        parallelism: int | None = None,
        on_error: OnError = "fail",
        **results: Aggregation,
    ) -> Stream[tuple[K_co, Row]]:
        """(key, {name: result, ...}): name=penstock.count(), name=penstock.sum("price") and so on, of fields or
        expressions. Nulls are left out, as in SQL. `emit`, `name`, `parallelism` and `on_error` are options of
        the operator."""
        options = {"name": name, "parallelism": parallelism, "on_error": on_error}
        return self._aggregate(_agg(self._stream, results, emit=emit, **options), emit, options)

    @overload
    def window(
        self, window: Window[Bound], *, updates: Literal["replace"] = "replace", **options: Unpack[WindowOptions]
    ) -> WindowedStream[K_co, T_co, Bound]: ...

    @overload
    def window(
        self, window: Window[Bound], *, updates: Literal["retract"], **options: Unpack[WindowOptions]
    ) -> SignedWindows[K_co, T_co, Bound]: ...

    def window(
        self,
        window: Window,
        *,
        time: Selector | None = None,
        lateness_s: float | timedelta = 0.0,
        early_s: float | timedelta | None = None,
        early_count: int | None = None,
        updates: Updates = "replace",
    ) -> WindowedStream[K_co, T_co, Any] | SignedWindows[K_co, T_co, Any]:
        """The records by key and by window: Tumbling, Sliding, Session, CountWindow or GlobalWindow.

        `time` takes a record's time; None: as in the watermark operator upstream. A window accepts late records until
        the watermark is `lateness_s` past its end. Results before the end of a window leave after each `early_count`
        records, and `early_s` seconds after the first record that no result shows. They have the bounds of the window
        as it is then, so those of a session may change until its end. `updates="retract"` gives each result a sign:
        before a result that has changed comes what was said before, with the sign -1."""
        taken = self._time(window, time, "window")
        options = _Leaving(lateness_s, early_s, early_count, updates)
        return WindowedStream(self._stream, window, taken, options)

    def _time(self, window: Window | None, time: Selector | None, method: str) -> Callable[[Any], Any] | None:
        """Returns how to take a record's time, for windows of a kind (None: for times alone). Raises FlowError when
        that is not known."""
        if window is not None and not isinstance(window, Window):
            raise FlowError(
                f"{method}() needs windows, one of penstock.Tumbling(...), Sliding(...), Session(...), "
                f"CountWindow(...) and GlobalWindow(), got {called(window)}"
            )
        taken = self._stream._time if time is None else _selector(time, method, self._fields)
        if window is not None and not window.in_event_time:
            return None
        flow = self._stream._flow
        if not all(flow.graph.has_before(tap.operator, MakeWatermarks) for tap in self._stream._taps):
            raise FlowError(f"{method}() needs event time; put .watermark(time, ...) before it, for each of its inputs")
        if taken is None:
            raise FlowError(f"{method}(): records have changed since .watermark(); say where their time is: time=...")
        return taken

    def _times(
        self, other: object, window: Window | None, time: Selector | None, other_time: Selector | None, method: str
    ) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        """Returns the functions that take the times of this stream's records and of the records of the second stream of
        a join. Raises FlowError when the stream cannot be the second one."""
        if not isinstance(other, KeyedStream):
            raise FlowError(f"{method}() joins with a stream that has keys, b.key_by(...), got {called(other)}")
        if other._stream._flow is not self._stream._flow:
            names = f"{self._stream._flow.name!r} and {other._stream._flow.name!r}"
            raise FlowError(f"{method}() of streams of two flows: {names}")
        first, second = self._time(window, time, method), other._time(window, other_time, method)
        assert first is not None
        assert second is not None
        return first, second

    @overload
    def join(
        self,
        other: KeyedStream[Any, V],
        window: Window,
        *,
        how: Literal["inner"] = "inner",
        fn: None = None,
        **options: Unpack[WindowJoinOptions],
    ) -> Stream[tuple[T_co, V]]: ...

    @overload
    def join(
        self,
        other: KeyedStream[Any, V],
        window: Window,
        *,
        how: Literal["left"],
        fn: None = None,
        **options: Unpack[WindowJoinOptions],
    ) -> Stream[tuple[T_co, V | None]]: ...

    @overload
    def join(
        self,
        other: KeyedStream[Any, V],
        window: Window,
        *,
        how: Literal["right"],
        fn: None = None,
        **options: Unpack[WindowJoinOptions],
    ) -> Stream[tuple[T_co | None, V]]: ...

    @overload
    def join(
        self,
        other: KeyedStream[Any, V],
        window: Window,
        *,
        how: Literal["full"],
        fn: None = None,
        **options: Unpack[WindowJoinOptions],
    ) -> Stream[tuple[T_co | None, V | None]]: ...

    @overload
    def join(
        self,
        other: KeyedStream[Any, Any],
        window: Window,
        *,
        how: JoinHow = "inner",
        fn: Callable[[Any, Any], U],
        **options: Unpack[WindowJoinOptions],
    ) -> Stream[U]: ...

    def join(
        self,
        other: KeyedStream[Any, Any],
        window: Window,
        *,
        how: JoinHow = "inner",
        fn: Callable[[Any, Any], Any] | None = None,
        time: Selector | None = None,
        other_time: Selector | None = None,
        lateness_s: float | timedelta = 0.0,
        **options: Unpack[Options],
    ) -> Stream[Any]:
        """Each record of this stream with each of `other` that has the same key and is in the same window (Tumbling,
        Sliding or Session): (left, right), or fn(left, right). `how` keeps records that find no other: "left", "right"
        or "full"; the missing one is None. `time` and `other_time` take the times (None: as in the watermark operators
        upstream). Records that come too late go to the side output "late"."""
        _check_how(how, JoinHow, "join")
        if isinstance(window, Window) and not window.in_event_time:
            raise FlowError(f"join() needs windows of event time: Tumbling, Sliding or Session, not {window!r}")
        if fn is not None:
            check_function(fn, "join", ("left", "right"))
        times = self._times(other, window, time, other_time, "join")
        own = any(taken is not each._stream._time for taken, each in zip(times, (self, other), strict=True))
        operator = Windows(Joined(how, fn), window, times, lateness_s, own_time=own, **options)
        return self._stream._flow._add(operator, (self._stream,), (other._stream,))

    @overload
    def interval_join(
        self,
        other: KeyedStream[Any, V],
        *,
        how: Literal["inner"] = "inner",
        fn: None = None,
        **options: Unpack[IntervalOptions],
    ) -> Stream[tuple[T_co, V]]: ...

    @overload
    def interval_join(
        self, other: KeyedStream[Any, V], *, how: Literal["left"], fn: None = None, **options: Unpack[IntervalOptions]
    ) -> Stream[tuple[T_co, V | None]]: ...

    @overload
    def interval_join(
        self, other: KeyedStream[Any, V], *, how: Literal["right"], fn: None = None, **options: Unpack[IntervalOptions]
    ) -> Stream[tuple[T_co | None, V]]: ...

    @overload
    def interval_join(
        self, other: KeyedStream[Any, V], *, how: Literal["full"], fn: None = None, **options: Unpack[IntervalOptions]
    ) -> Stream[tuple[T_co | None, V | None]]: ...

    @overload
    def interval_join(
        self,
        other: KeyedStream[Any, Any],
        *,
        how: IntervalHow = "inner",
        fn: Callable[[Any, Any], U],
        **options: Unpack[IntervalOptions],
    ) -> Stream[U]: ...

    def interval_join(
        self,
        other: KeyedStream[Any, Any],
        *,
        lower_s: float | timedelta,
        upper_s: float | timedelta,
        how: IntervalHow = "inner",
        fn: Callable[[Any, Any], Any] | None = None,
        time: Selector | None = None,
        other_time: Selector | None = None,
        **options: Unpack[Options],
    ) -> Stream[Any]:
        """Each record of this stream with each of `other` that has the same key and whose time is from `lower_s` to
        `upper_s` seconds after its own (both may be negative, and both ends belong to it): (left, right), or fn(left,
        right). The rest is as in `join`."""
        times = self._times(other, None, time, other_time, "interval_join")
        operator = IntervalJoin(times, lower_s, upper_s, how, fn, **options)
        return self._stream._flow._add(operator, (self._stream,), (other._stream,))

    @overload
    def temporal_join(
        self,
        versions: KeyedStream[Any, V],
        *,
        how: Literal["inner"] = "inner",
        fn: None = None,
        **options: Unpack[JoinOptions],
    ) -> Stream[tuple[T_co, V]]: ...

    @overload
    def temporal_join(
        self, versions: KeyedStream[Any, V], *, how: Literal["left"], fn: None = None, **options: Unpack[JoinOptions]
    ) -> Stream[tuple[T_co, V | None]]: ...

    @overload
    def temporal_join(
        self,
        versions: KeyedStream[Any, Any],
        *,
        how: TemporalHow = "inner",
        fn: Callable[[Any, Any], U],
        **options: Unpack[JoinOptions],
    ) -> Stream[U]: ...

    def temporal_join(
        self,
        versions: KeyedStream[Any, Any],
        *,
        how: TemporalHow = "inner",
        fn: Callable[[Any, Any], Any] | None = None,
        time: Selector | None = None,
        other_time: Selector | None = None,
        **options: Unpack[Options],
    ) -> Stream[Any]:
        """Each record of this stream with the version that holds at its time: the record of `versions` with the same
        key that is the last one up to this time. It emits (left, right), or fn(left, right), when the watermark has
        passed the time of the record. `how="left"` keeps records that have no version, with None."""
        times = self._times(versions, None, time, other_time, "temporal_join")
        operator = TemporalJoin(times, how, fn, **options)
        return self._stream._flow._add(operator, (self._stream,), (versions._stream,))

    def aggregate(
        self, aggregator: AggregateFunction, *, emit: Emit = "latest", **options: Unpack[Options]
    ) -> Stream[tuple[K_co, Any]]:
        """(key, result) of an aggregate of your own, a `penstock.AggregateFunction`."""
        what = OwnAggregate(aggregator, "aggregate()")
        check_picklable(aggregator, "aggregate()")
        return self._aggregate(what, emit, options)

    def reduce(
        self, fn: Callable[[Any, T_co], Any], *, emit: Emit = "latest", **options: Unpack[Options]
    ) -> Stream[tuple[K_co, Any]]:
        """(key, state), where the state is the key's first record and then fn(state, record)."""
        return self._stream._flow._add(Reduce(fn, emit, **options), (self._stream,))

    @overload
    def process(
        self, process: ProcessFunction | Callable[[ProcessContext, K_co, T_co], None], **options: Unpack[ProcessOptions]
    ) -> Stream[Any]: ...

    @overload
    def process(
        self, process: Callable[[ProcessContext, K_co, T_co], Iterable[U] | None], **options: Unpack[ProcessOptions]
    ) -> Stream[U]: ...

    def process(
        self,
        process: ProcessFunction | Callable[..., Iterable[Any] | None],
        *,
        outputs: tuple[str, ...] = (),
        on_timer: Callable[..., Iterable[Any] | None] | None = None,
        on_event_timer: Callable[..., Iterable[Any] | None] | None = None,
        hold_s: float | timedelta = 0.0,
        **options: Unpack[Options],
    ) -> Stream[Any]:
        """fn(ctx, key, record), or a ProcessFunction, with state by key; `outputs` names its side outputs.
        `on_timer(ctx, key, at_ms)` is called for each timer that `ctx.set_timer` has set, when it is due, and
        `on_event_timer(ctx, key, at_ms)` for each that `ctx.set_event_timer` has set, when the watermark has reached
        its time. What an event timer emits with its own time, or a later one, is not late downstream. A function that
        emits records whose times are further back, such as stored ones, says by how much: the watermark downstream is
        `hold_s` earlier."""
        if isinstance(process, ProcessFunction):
            check_picklable(process, "process")
        operator = Processing(process, outputs, on_timer, on_event_timer, hold_s, **options)
        return warned_of_event_timers(operator, self._stream._flow._add(operator, (self._stream,)))

    def connect(self, other: KeyedStream[Any, V] | Stream[V]) -> ConnectedStreams[K_co, T_co, V]:
        """This stream and another one, as the two inputs of one operator. The other one has keys too, so that records
        of both with equal keys meet, or it is for all tasks: `a.key_by("user").connect(rules.broadcast())`."""
        from penstock.runtime.program.connected import ConnectedStreams

        return ConnectedStreams(self, other)

    def _value(self, value: Selector | None, method: str) -> Callable[[Any], Any] | None:
        return None if value is None else _selector(value, method, self._fields)

    def _aggregate(self, what: aggregates.Aggregate, emit: Emit, options: Mapping[str, Any]) -> Stream[Any]:
        return self._stream._flow._add(Aggregated(what, emit, **options), (self._stream,))


@dataclass(frozen=True)
class _Leaving:
    """How the results of windows leave."""

    lateness: float | timedelta
    early_s: float | timedelta | None
    early_count: int | None
    updates: Updates

    @property
    def any_early(self) -> bool:
        """Whether results leave before the end of a window, or with a sign."""
        return self.early_s is not None or self.early_count is not None or self.updates != "replace"


def _check_how(how: object, hows: Any, method: str) -> None:
    if how not in get_args(hows):
        raise FlowError(f"{method}(how={how!r}): use one of {', '.join(map(repr, get_args(hows)))}")


@checks_options
class WindowedStream(Generic[K_co, T_co, Bound_co]):
    """Records by key and window; each aggregate emits (key, start, end, result), and with `updates="retract"` a sign
    behind these. Start and end are in milliseconds since 1970; of a CountWindow they are numbers of records, and of the
    GlobalWindow None. `emit`: "final" (when the watermark has reached the window's end, and again for late records) or
    "latest" (after each batch, the results that the batch has changed). The side output "late" has the records that
    came too late."""

    def __init__(
        self, stream: Stream[T_co], window: Window, time: Callable[[Any], Any] | None, options: _Leaving
    ) -> None:
        self._stream = stream
        self._window = window
        self._time = time
        self._options = options

    def __repr__(self) -> str:
        return f"<WindowedStream of flow {self._stream._flow.name!r}: {self._stream._places()}, in {self._window!r}>"

    if not TYPE_CHECKING:
        __class_getitem__ = classmethod(GenericAlias)  # of two or three types, as for a type checker

        def __getattr__(self, name: str) -> Any:
            own = f"windows go to one of {_listed(_methods(WindowedStream))}"
            others = dict.fromkeys(_methods(KeyedStream), own)
            others.update(dict.fromkeys(_methods(Stream), f"{own}, and the stream of results has .{name}(...)"))
            raise no_method(self, name, others)

    def count(
        self, *, emit: WindowEmit = "final", **options: Unpack[Options]
    ) -> Stream[tuple[K_co, Bound_co, Bound_co, int]]:
        """The number of records."""
        return self._aggregate(aggregates.Count(), emit, options)

    def sum(
        self, value: Selector | None = None, *, emit: WindowEmit = "final", **options: Unpack[Options]
    ) -> Stream[tuple[K_co, Bound_co, Bound_co, Any]]:
        """The sum of the values; `value` takes the value from a record, None: the record itself."""
        return self._aggregate(aggregates.Sum(self._value(value, "sum")), emit, options)

    def min(
        self, value: Selector | None = None, *, emit: WindowEmit = "final", **options: Unpack[Options]
    ) -> Stream[tuple[K_co, Bound_co, Bound_co, Any]]:
        """The least value."""
        return self._aggregate(aggregates.Min(self._value(value, "min")), emit, options)

    def max(
        self, value: Selector | None = None, *, emit: WindowEmit = "final", **options: Unpack[Options]
    ) -> Stream[tuple[K_co, Bound_co, Bound_co, Any]]:
        """The greatest value."""
        return self._aggregate(aggregates.Max(self._value(value, "max")), emit, options)

    def mean(
        self, value: Selector | None = None, *, emit: WindowEmit = "final", **options: Unpack[Options]
    ) -> Stream[tuple[K_co, Bound_co, Bound_co, Any]]:
        """The mean of the values."""
        return self._aggregate(aggregates.Mean(self._value(value, "mean")), emit, options)

    def agg(
        self,
        *,
        emit: WindowEmit = "final",
        name: str | None = None,
        parallelism: int | None = None,
        on_error: OnError = "fail",
        **results: Aggregation,
    ) -> Stream[tuple[K_co, Bound_co, Bound_co, Row]]:
        """{name: result, ...}, as `KeyedStream.agg` has them."""
        options = {"name": name, "parallelism": parallelism, "on_error": on_error}
        return self._aggregate(_agg(self._stream, results, emit=emit, **options), emit, options)

    def reduce(
        self, fn: Callable[[Any, T_co], Any], **options: Unpack[Options]
    ) -> Stream[tuple[K_co, Bound_co, Bound_co, Any]]:
        """The first record, and then fn(state, record). Of sessions that become one, fn(state, state)."""
        check_function(fn, "reduce", ("state", "record"))
        return self._computed(Aggregating(Reducer(fn)), options)

    def aggregate(
        self, aggregator: AggregateFunction, **options: Unpack[Options]
    ) -> Stream[tuple[K_co, Bound_co, Bound_co, Any]]:
        """The result of an aggregate of your own, a `penstock.AggregateFunction`."""
        what = OwnAggregate(aggregator, "aggregate()")
        check_picklable(aggregator, "aggregate()")
        return self._aggregate(what, "final", options)

    def top(
        self, n: int, by: Selector | None = None, *, largest: bool = True, **options: Unpack[Options]
    ) -> Stream[tuple[K_co, Bound_co, Bound_co, list[T_co]]]:
        """A list of the `n` records with the greatest values (`largest=False`: the least), the best first. `by` takes
        the value from a record, None: the record itself. Of equal values the records that came first are kept. A NaN
        has no order, so a record with such a value fails."""
        what = Top(whole(n, "top(n)"), self._value(by, "top"), flag(largest, "top(largest)"))
        return self._aggregate(what, "final", options)

    def collect(self, **options: Unpack[Options]) -> Stream[tuple[K_co, Bound_co, Bound_co, list[T_co]]]:
        """A list of the records, by their times. All records of open windows are kept: an aggregate needs less."""
        return self._computed(Collected(), options)

    def process(
        self,
        fn: Callable[[WindowContext, K_co, tuple[Bound_co, Bound_co], list[T_co]], Iterable[U] | None],
        *,
        outputs: tuple[str, ...] = (),
        **options: Unpack[Options],
    ) -> Stream[U]:
        """Applies fn(ctx, key, window, records) to each window when it has results: `window` is its (start, end), and
        `records` is the list of its records, by their times. `ctx` has `watermark()`, `output(tag, record)` for the
        side outputs that `outputs` names, and `get` and `set` for something that the next call for the same window
        gets. All records of open windows are kept."""
        return self._computed(Processed(fn, "process"), {**options, "outputs": outputs})

    def _value(self, value: Selector | None, method: str) -> Callable[[Any], Any] | None:
        return None if value is None else _selector(value, method, self._stream._fields)

    def _aggregate(self, what: aggregates.Aggregate, emit: WindowEmit, options: Mapping[str, Any]) -> Stream[Any]:
        window = self._window
        if not isinstance(window, Sliding) or self._options.any_early or not what.combinable:
            if emit != "final":
                raise self._only_final(emit)
            return self._computed(Aggregating(what), options)
        own = self._time is not self._stream._time
        assert self._time is not None
        operator = WindowAggregated(what, window, self._time, self._options.lateness, emit, own_time=own, **options)
        return self._stream._flow._add(operator, (self._stream,))

    def _only_final(self, emit: WindowEmit) -> FlowError:
        """Returns the error of an `emit` that does not fit the windows or their options."""
        how = self._options
        if emit not in get_args(WindowEmit):
            return FlowError(f"emit={emit!r}; of windows use 'final' or 'latest'")
        if isinstance(self._window, CountWindow):
            why, remedy = f"{self._window!r} has no result before it is full", "leave emit out"
        elif how.updates == "retract":
            why = "its results have no signs, and window(updates='retract') wants a sign for each result"
            remedy = (
                "leave emit out, and for results with signs before the end of a window give "
                "window(..., updates='retract', early_count=1); or leave updates out"
            )
        elif how.any_early:
            given = "early_s" if how.early_s is not None else "early_count"
            why = f"window({given}=...) says already when results leave before the end of a window"
            remedy = f"leave emit or {given} out"
        else:
            why = f"it is for tumbling and sliding windows, and this is {self._window!r}"
            remedy = "leave emit out, and for results before the end of a window give window(..., early_count=1)"
        return FlowError(f"emit={emit!r} is not possible here: {why}; {remedy}")

    def _computed(self, function: WindowFunction, options: Mapping[str, Any]) -> Stream[Any]:
        how = self._options
        operator = Windows(
            function,
            self._window,
            () if self._time is None else (self._time,),
            how.lateness,
            early_s=how.early_s,
            early_count=how.early_count,
            updates=how.updates,
            own_time=self._time is not self._stream._time,
            **options,
        )
        return self._stream._flow._add(operator, (self._stream,))


if TYPE_CHECKING:

    class SignedWindows(Generic[K_co, T_co, Bound_co]):
        """A WindowedStream with `updates="retract"`, for type checkers: each result has a sign, and what has no sign,
        rows and results of `emit="latest"`, is missing."""

        def count(self, **options: Unpack[Options]) -> Stream[tuple[K_co, Bound_co, Bound_co, int, int]]: ...

        def sum(
            self, value: Selector | None = None, **options: Unpack[Options]
        ) -> Stream[tuple[K_co, Bound_co, Bound_co, Any, int]]: ...

        min = max = mean = sum

        def agg(
            self,
            *,
            name: str | None = None,
            parallelism: int | None = None,
            on_error: OnError = "fail",
            **results: Aggregation,
        ) -> Stream[tuple[K_co, Bound_co, Bound_co, Row, int]]: ...

        def reduce(
            self, fn: Callable[[Any, T_co], Any], **options: Unpack[Options]
        ) -> Stream[tuple[K_co, Bound_co, Bound_co, Any, int]]: ...

        def aggregate(
            self, aggregator: AggregateFunction, **options: Unpack[Options]
        ) -> Stream[tuple[K_co, Bound_co, Bound_co, Any, int]]: ...

        def top(
            self, n: int, by: Selector | None = None, *, largest: bool = True, **options: Unpack[Options]
        ) -> Stream[tuple[K_co, Bound_co, Bound_co, list[T_co], int]]: ...

        def collect(self, **options: Unpack[Options]) -> Stream[tuple[K_co, Bound_co, Bound_co, list[T_co], int]]: ...


def _agg(stream: Stream[Any], results: dict[str, Aggregation], **options: object) -> Agg:
    for option, value in options.items():
        if isinstance(value, Aggregation):
            raise FlowError(
                f"agg({option}={value!r}): {option} is an option of the operator; give the result another name"
            )
    what = Agg(results)
    stream._check_fields("agg", {name: each.input for name, each in results.items() if each.input is not None})
    return what


def _no_field(what: str, name: str, fields: list[str]) -> FlowError:
    return FlowError(
        f"{what}: the records have no such field{nearest(name, fields) or ';'} they have: {_listed(fields)}"
    )


def _methods(cls: type) -> list[str]:
    return [name for name in vars(cls) if not name.startswith("_")]


def _listed(names: Iterable[object]) -> str:
    return ", ".join(map(str, names))


def check_flow(flow: object, what: str) -> None:
    """Raise FlowError unless it is a flow that was given."""
    if isinstance(flow, Stream | KeyedStream | WindowedStream):
        of = flow._flow if isinstance(flow, Stream) else flow._stream._flow
        raise FlowError(
            f"{what} needs the flow itself, got a {type(flow).__name__} of it; give it the Flow {of.name!r}"
        )
    if not isinstance(flow, Flow):
        raise FlowError(f"{what} needs a penstock.Flow, got {called(flow)}")


def _selector(selector: Selector, method: str, fields: list[str] | None) -> Callable[[Any], Any]:
    if isinstance(selector, Expr):
        for name in selector.fields():
            if fields is not None and name not in fields:
                raise _no_field(f"{method}({name!r})", name, fields)
        return taking(selector)
    if isinstance(selector, str):
        if fields is not None and selector not in fields:
            raise _no_field(f"{method}({selector!r})", selector, fields)
        return Field(selector)
    if isinstance(selector, int) and not isinstance(selector, bool):
        if fields is not None:
            raise FlowError(f"{method}({selector}): the records have named fields: {', '.join(fields)}")
        return Field(selector)
    if not callable(selector):
        raise FlowError(f"{method}({selector!r}): give a function, a field name or an index")
    if not isinstance(selector, itemgetter | attrgetter):
        check_function(selector, method)
    return selector
