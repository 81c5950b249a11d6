"""The Flow API: how a user writes a stream program.

    flow = Flow("wordcount")
    (flow.read(TextFiles("corpus/*.txt"))
         .flat_map(str.split)
         .key_by(str.lower)
         .count()
         .write(Files("counts/")))

A `Stream` is a place in the flow where records can be taken from; each method adds an operator behind it and returns
the stream of its outputs. A stream may be used more than once: every user gets every record. Errors in the program
are raised here, at the line that made them, before anything runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Literal

from penstock.runtime import aggregate, grouping
from penstock.runtime.agg import Agg
from penstock.runtime.columnar import adding, expression_of, filtering, selecting, taking
from penstock.runtime.errors import FlowError
from penstock.runtime.expressions import Aggregation, Expr, named
from penstock.runtime.expressions.tree import Column
from penstock.runtime.graph import Edge, Graph
from penstock.runtime.lookup import Lookup
from penstock.runtime.operators import (
    Aggregated,
    Emit,
    Filter,
    FlatMap,
    Map,
    MapBatches,
    Operator,
    Processing,
    Read,
    Reduce,
    Write,
)
from penstock.runtime.process import Process
from penstock.runtime.sinks.base import Sink
from penstock.runtime.sources.base import Source
from penstock.runtime.userfunc import DEAD_LETTERS, OnError, caller_line, check_function, check_picklable
from penstock.runtime.watermarks import MakeWatermarks
from penstock.runtime.windowing import WindowAggregated, WindowEmit
from penstock.runtime.windows import Sliding

if TYPE_CHECKING:
    from penstock.runtime.plan import Plan

Selector = Callable[[Any], Any] | str | int | Expr
"""How a key or a value is taken from a record: a function, a field name of dict records, an index of tuples, an
expression."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,99}")


class Flow:
    """A stream program under construction; `penstock.run(flow)` runs it.

    `parallelism` is the number of tasks of every operator that does not set its own; None: one a worker.
    `key_groups` is the number of shares that keyed state is kept in, and so the highest parallelism of keyed
    operators over the life of the job. `chaining=False` makes a task of every operator (for measuring, mostly).
    """

    def __init__(self, name: str, parallelism: int | None = None, key_groups: int = 128, chaining: bool = True) -> None:
        if not _NAME.fullmatch(name):
            raise FlowError(
                f"flow name {name!r}: use up to 100 letters, digits, '_', '-' and '.', starting with a letter or digit"
            )
        self.name = name
        self.graph = Graph(name)
        self.parallelism = parallelism
        if not 1 <= key_groups <= 32_768:
            raise FlowError(f"flow {name!r}: key_groups={key_groups}; it must be between 1 and 32,768")
        self.key_groups = key_groups
        self.chaining = chaining

    @property
    def parallelism(self) -> int | None:
        """Tasks of every operator that does not set its own; None: one a worker."""
        return self._parallelism

    @parallelism.setter
    def parallelism(self, value: int | None) -> None:
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise FlowError(f"flow {self.name!r}: parallelism={value!r}; it must be 1 or more, or None")
        self._parallelism = value

    def read(
        self,
        source: Source,
        *,
        name: str | None = None,
        parallelism: int | None = None,
        on_error: OnError = "fail",
    ) -> Stream:
        """The stream of a source's records."""
        operator = Read(source, name=name, parallelism=parallelism, on_error=on_error)
        check_picklable(source, f"source {operator.name!r}")
        return self._add(operator, ())

    def connect(self, stream: Stream, to: str) -> None:
        """Feed a stream into an operator that exists already, beside its other inputs."""
        if not isinstance(stream, Stream):
            raise FlowError(
                f"flow {self.name!r}: connect takes a stream, got {stream!r}; key_by goes with its operator"
            )
        if stream._flow is not self:
            raise FlowError(f"flow {self.name!r}: the stream is of another flow, {stream._flow.name!r}")
        if to in self.graph.operators and self.graph.operators[to].keyed:
            raise FlowError(f"flow {self.name!r}: operator {to!r} takes keyed input; unite the streams before key_by")
        for edge in stream._edges(to):
            self.graph.connect(edge)

    def explain(self, workers: int = 1) -> str:
        """The logical and the physical plan, as text."""
        from penstock.runtime.explain import explain

        return explain(self, workers)

    def plan(self, workers: int = 1, *, list_splits: bool = True, check_sinks: bool = True) -> Plan:
        """The physical plan for a number of workers; raises FlowError when the flow cannot run. A job that goes on from
        what it has saved need not list its sources' splits, nor find its sinks' places empty."""
        from penstock.runtime.plan import make_plan

        return make_plan(
            self.graph,
            parallelism=self.parallelism,
            key_groups=self.key_groups,
            workers=workers,
            chaining=self.chaining,
            list_splits=list_splits,
            check_sinks=check_sinks,
        )

    def _add(self, operator: Operator, inputs: Iterable[Stream]) -> Stream:
        operator.declared_at = caller_line()
        self.graph.add(operator)
        for stream in inputs:
            for edge in stream._edges(operator.name):
                self.graph.connect(edge)
        fields = operator.source.fields() if isinstance(operator, Read) else None
        return Stream(self, (_Tap(operator.name),), fields=fields)


@dataclass(frozen=True)
class _Tap:
    """One place where records leave an operator, and how they are grouped towards the next."""

    operator: str
    output: str | None = None
    grouping: grouping.Grouping | None = None


class Stream:
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

    def _edges(self, target: str) -> list[Edge]:
        return [Edge(tap.operator, target, tap.grouping, tap.output) for tap in self._taps]

    def _grouped(self, how: grouping.Grouping) -> Stream:
        taps = tuple(replace(tap, grouping=how) for tap in self._taps)
        return Stream(self._flow, taps, self._fields, self._time)

    # --- one record at a time ------------------------------------------------------------------------------

    def map(self, fn: Callable[[Any], Any], **options: Any) -> Stream:
        """One output for each record: fn(record). Options: name, parallelism, on_error."""
        return self._flow._add(Map(fn, **options), (self,))

    def flat_map(self, fn: Callable[[Any], Iterable[Any]], **options: Any) -> Stream:
        """Any number of outputs for each record: fn(record) returns an iterable, which is read lazily."""
        return self._flow._add(FlatMap(fn, **options), (self,))

    def filter(self, fn: Callable[[Any], Any] | Expr, **options: Any) -> Stream:
        """The records for which fn(record), or an expression such as ps.col("price") > 5, is true."""
        operator: Operator
        if isinstance(fn, Expr):
            self._check_fields("filter", {"": fn})
            operator = filtering(fn, **options)
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
    ) -> Stream:
        """Dict records of these fields alone: names of fields, expressions with .alias(name), or name=expression. A
        record that is a text is taken for {"value": text}. `name`, `parallelism` and `on_error` are the operator's."""
        wanted = {**named(list(fields)), **named(exprs)}
        self._check_fields("select", wanted)
        operator = selecting(wanted, name=name, parallelism=parallelism, on_error=on_error)
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
    ) -> Stream:
        """Dict records with these fields added or replaced, all computed from the record as it was."""
        wanted = named(exprs)
        self._check_fields("with_columns", wanted)
        operator = adding(wanted, name=name, parallelism=parallelism, on_error=on_error)
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
                    raise FlowError(
                        f"{method}({name!r}): the records have no such field; they have: {', '.join(self._fields)}"
                    )

    def _like(self, stream: Stream) -> Stream:
        """Another stream whose records are like this one's."""
        stream._fields, stream._time = self._fields, self._time
        return stream

    def map_batches(
        self,
        fn: Callable[[Any], Any],
        *,
        batch_size: int = 1024,
        batch_format: Literal["list", "arrow"] = "list",
        **options: Any,
    ) -> Stream:
        """fn(list of records) -> iterable of records; batches hold what is ready, at most `batch_size`.
        With batch_format="arrow", fn gets and returns a pyarrow Table of dict records."""
        return self._flow._add(MapBatches(fn, batch_size, batch_format, **options), (self,))

    def lookup(
        self,
        table: Any,
        on: str | tuple[str, str],
        *,
        how: Literal["inner", "left"] = "inner",
        columns: Iterable[str] | None = None,
        **options: Any,
    ) -> Stream:
        """Dict records with the columns of the row of a static table that has the same key: dicts or a pyarrow Table,
        unique in its key. `on`: the field of both, or (record's, table's); `how`: "inner" drops records without a row,
        "left" gives them None; `columns`: of the table, None: all but the key."""
        operator = Lookup(table, on, how, columns, **options)
        if self._fields is not None and operator.left not in self._fields:
            raise FlowError(
                f"lookup(on={operator.left!r}): the records have no such field; they have: {', '.join(self._fields)}"
            )
        both = [name for name in operator.columns if name in (self._fields or ())]
        if both:
            raise FlowError(
                f"lookup {operator.name!r}: the records have a field {both[0]!r} already; leave it out: columns=[...]"
            )
        stream = self._like(self._flow._add(operator, (self,)))
        if self._fields is not None:
            stream._fields = [*self._fields, *operator.columns]
        return stream

    # --- event time ----------------------------------------------------------------------------------------

    def watermark(
        self,
        time: Selector,
        *,
        out_of_orderness_s: float | timedelta = 0.0,
        idle_s: float | timedelta | None = None,
        **options: Any,
    ) -> Stream:
        """The same records, with event time: `time` takes a record's time, in milliseconds since 1970 or as an aware
        datetime. Windows behind it close when records of their end have come, and `out_of_orderness_s` more. A task
        without input for `idle_s` holds up no window (None: it does)."""
        selector = _selector(time, "watermark", self._fields)
        stream = self._flow._add(MakeWatermarks(selector, out_of_orderness_s, idle_s, **options), (self,))
        stream._fields, stream._time = self._fields, selector
        return stream

    # --- where records go ----------------------------------------------------------------------------------

    def key_by(self, selector: Selector) -> KeyedStream:
        """The same records, each with a key: records with equal keys meet in one task."""
        return KeyedStream(self, _selector(selector, "key_by", self._fields))

    def rebalance(self) -> Stream:
        """Deal records to the next operator's tasks in turn."""
        return self._grouped(grouping.Rebalance())

    def shuffle(self) -> Stream:
        """Deal records to the next operator's tasks at random."""
        return self._grouped(grouping.Shuffle())

    def broadcast(self) -> Stream:
        """Every record to every task of the next operator (all grouping)."""
        return self._grouped(grouping.All())

    def forward(self) -> Stream:
        """Task i to task i of the next operator, which must have the same parallelism."""
        return self._grouped(grouping.Forward())

    def to_first(self) -> Stream:
        """Every record to the first task of the next operator (global grouping)."""
        return self._grouped(grouping.Global())

    def partition_by(self, chooser: Callable[[Any, int], int]) -> Stream:
        """chooser(record, number of tasks) says which task of the next operator gets a record."""
        check_function(chooser, "partition_by")
        return self._grouped(grouping.Custom(chooser))

    def union(self, *others: Stream) -> Stream:
        """The records of this stream and of others, in the order in which they come."""
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

    def side_output(self, tag: str) -> Stream:
        """The stream of a side output of the operator that this stream leaves."""
        if len(self._taps) != 1 or self._taps[0].output is not None:
            raise FlowError(f"side_output({tag!r}): ask the stream that the operator returned")
        operator = self._flow.graph.operators[self._taps[0].operator]
        if tag not in operator.outputs:
            known = ", ".join(map(repr, operator.outputs)) or "none"
            raise FlowError(f"operator {operator.name!r} has no side output {tag!r}; it has: {known}")
        return Stream(self._flow, (_Tap(operator.name, tag),))

    def dead_letters(self) -> Stream:
        """The records that failed in the operator that this stream leaves, which needs on_error="dead_letter"."""
        if len(self._taps) == 1:
            operator = self._flow.graph.operators[self._taps[0].operator]
            if DEAD_LETTERS not in operator.outputs:
                raise FlowError(f"operator {operator.name!r} keeps no dead letters; give it on_error='dead_letter'")
        return self.side_output(DEAD_LETTERS)

    def write(self, sink: Sink, **options: Any) -> Stream:
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
        **options: Any,
    ) -> Stream:
        """End the stream in a table, and call fn(DataFrame, epoch) in this process for each of its complete epochs.

            orders.to_spark(lambda df, epoch: df.write.insertInto("orders"), spark=spark, folder="/shared/orders")

        The records go to `folder` as Parquet (what they become, and `schema` and `overwrite`, are as in sinks.Parquet);
        Spark's executors, the job's workers and this program share it. When an epoch is complete, fn gets its records
        as a DataFrame of your session, `spark`, in a thread of this process; epochs come one after the other, in order,
        those without records are left out, and no recovery takes one back. `keep=False` deletes an epoch's files when
        fn has returned.

        Guarantee: once for each epoch as long as this process lives. Otherwise fn is called again for the epoch that
        was under way, with the same number and the same records, by `penstock.bridge.follow`, which goes on in another
        program. (Only an epoch that turns out to be damaged after it was complete comes again under other numbers.)

        `job.wait()` returns when fn has been called for all epochs. When fn raises, it is called no more, wait() raises
        JobError, and the job goes on writing to the folder. The job needs epochs. Options: name, parallelism, on_error.

        Errors: FlowError for arguments that cannot work, and before the start for a folder that another job has used.
        """
        from penstock.runtime.sinks.to_spark import ToSpark

        sink = ToSpark(fn, spark=spark, folder=folder, schema=schema, keep=keep, overwrite=overwrite)
        return self.write(sink, **options)


class KeyedStream:
    """Records with keys; its operators keep state by key."""

    def __init__(self, stream: Stream, selector: Callable[[Any], Any]) -> None:
        self._stream = stream._grouped(grouping.Key(selector))
        self._fields = stream._fields

    def count(self, *, emit: Emit = "latest", **options: Any) -> Stream:
        """(key, number of its records so far). `emit`: "latest" (the newest result of each key that a batch touched),
        "every" (one for each record), "final" (one a key, when the input ends)."""
        return self._aggregate(aggregate.Count(), emit, options)

    def sum(self, value: Selector | None = None, *, emit: Emit = "latest", **options: Any) -> Stream:
        """(key, sum of the values so far); `value` takes the value from a record, None: the record itself."""
        return self._aggregate(aggregate.Sum(self._value(value, "sum")), emit, options)

    def min(self, value: Selector | None = None, *, emit: Emit = "latest", **options: Any) -> Stream:
        """(key, least value so far)."""
        return self._aggregate(aggregate.Min(self._value(value, "min")), emit, options)

    def max(self, value: Selector | None = None, *, emit: Emit = "latest", **options: Any) -> Stream:
        """(key, greatest value so far)."""
        return self._aggregate(aggregate.Max(self._value(value, "max")), emit, options)

    def mean(self, value: Selector | None = None, *, emit: Emit = "latest", **options: Any) -> Stream:
        """(key, mean of the values so far)."""
        return self._aggregate(aggregate.Mean(self._value(value, "mean")), emit, options)

    def agg(
        self,
        *,
        emit: Emit = "latest",
        name: str | None = None,
        parallelism: int | None = None,
        on_error: OnError = "fail",
        **results: Aggregation,
    ) -> Stream:
        """(key, {name: result, ...}): name=penstock.count(), name=penstock.sum("price") and so on, of fields or
        expressions. Nulls are not counted in, as in SQL. `emit`, `name`, `parallelism` and `on_error` are the
        operator's."""
        options = {"name": name, "parallelism": parallelism, "on_error": on_error}
        return self._aggregate(_agg(self._stream, results, emit=emit, **options), emit, options)

    def window(
        self, window: Sliding, *, time: Selector | None = None, lateness_s: float | timedelta = 0.0
    ) -> WindowedStream:
        """The records by key and window of event time: Tumbling or Sliding. `time` takes a record's time; None: as the
        watermark operator before said. Windows take late records for `lateness_s` behind the watermark."""
        if not isinstance(window, Sliding):
            raise FlowError(f"window({window!r}): give penstock.Tumbling(...) or penstock.Sliding(...)")
        taken = self._stream._time if time is None else _selector(time, "window", self._fields)
        flow = self._stream._flow
        if not all(flow.graph.has_before(tap.operator, MakeWatermarks) for tap in self._stream._taps):
            raise FlowError("window() needs event time; put .watermark(time, ...) before it, for each of its inputs")
        if taken is None:
            raise FlowError("window(): records have changed since .watermark(); say where their time is: time=...")
        return WindowedStream(self._stream, window, taken, lateness_s)

    def reduce(self, fn: Callable[[Any, Any], Any], *, emit: Emit = "latest", **options: Any) -> Stream:
        """(key, state), where the state is the key's first record and then fn(state, record)."""
        return self._stream._flow._add(Reduce(fn, emit, **options), (self._stream,))

    def process(
        self,
        process: Process | Callable[..., Iterable[Any] | None],
        *,
        outputs: tuple[str, ...] = (),
        on_timer: Callable[..., Iterable[Any] | None] | None = None,
        **options: Any,
    ) -> Stream:
        """fn(ctx, key, record), or a Process, with state by key; `outputs` names its side outputs. `on_timer(ctx, key,
        at)` is called for each timer that `ctx.set_timer(at)` set, when it is due."""
        if isinstance(process, Process):
            check_picklable(process, "process")
        return self._stream._flow._add(Processing(process, outputs, on_timer, **options), (self._stream,))

    def _value(self, value: Selector | None, method: str) -> Callable[[Any], Any] | None:
        return None if value is None else _selector(value, method, self._fields)

    def _aggregate(self, what: aggregate.Aggregate, emit: Emit, options: dict[str, Any]) -> Stream:
        return self._stream._flow._add(Aggregated(what, emit, **options), (self._stream,))


class WindowedStream:
    """Records by key and window; each aggregate emits (key, start, end, result), start and end in milliseconds since
    1970. `emit`: "final" (when the watermark has reached the window's end, and again for late records) or "latest"
    (whatever a batch has changed). The stream's side output "late" has the records that came too late."""

    def __init__(
        self, stream: Stream, window: Sliding, time: Callable[[Any], Any], lateness: float | timedelta
    ) -> None:
        self._stream = stream
        self._window = window
        self._time = time
        self._lateness = lateness

    def count(self, *, emit: WindowEmit = "final", **options: Any) -> Stream:
        """The number of records."""
        return self._aggregate(aggregate.Count(), emit, options)

    def sum(self, value: Selector | None = None, *, emit: WindowEmit = "final", **options: Any) -> Stream:
        """The sum of the values; `value` takes the value from a record, None: the record itself."""
        return self._aggregate(aggregate.Sum(self._value(value, "sum")), emit, options)

    def min(self, value: Selector | None = None, *, emit: WindowEmit = "final", **options: Any) -> Stream:
        """The least value."""
        return self._aggregate(aggregate.Min(self._value(value, "min")), emit, options)

    def max(self, value: Selector | None = None, *, emit: WindowEmit = "final", **options: Any) -> Stream:
        """The greatest value."""
        return self._aggregate(aggregate.Max(self._value(value, "max")), emit, options)

    def mean(self, value: Selector | None = None, *, emit: WindowEmit = "final", **options: Any) -> Stream:
        """The mean of the values."""
        return self._aggregate(aggregate.Mean(self._value(value, "mean")), emit, options)

    def agg(
        self,
        *,
        emit: WindowEmit = "final",
        name: str | None = None,
        parallelism: int | None = None,
        on_error: OnError = "fail",
        **results: Aggregation,
    ) -> Stream:
        """{name: result, ...}, as `KeyedStream.agg` has them."""
        options = {"name": name, "parallelism": parallelism, "on_error": on_error}
        return self._aggregate(_agg(self._stream, results, emit=emit, **options), emit, options)

    def _value(self, value: Selector | None, method: str) -> Callable[[Any], Any] | None:
        return None if value is None else _selector(value, method, self._stream._fields)

    def _aggregate(self, what: aggregate.Aggregate, emit: WindowEmit, options: dict[str, Any]) -> Stream:
        operator = WindowAggregated(what, self._window, self._time, self._lateness, emit, **options)
        return self._stream._flow._add(operator, (self._stream,))


def _agg(stream: Stream, results: dict[str, Aggregation], **options: object) -> Agg:
    for option, value in options.items():
        if isinstance(value, Aggregation):
            raise FlowError(f"agg({option}={value!r}): {option} is the operator's option; give the result another name")
    what = Agg(results)
    stream._check_fields("agg", {name: each.input for name, each in results.items() if each.input is not None})
    return what


def _selector(selector: Selector, method: str, fields: list[str] | None) -> Callable[[Any], Any]:
    if isinstance(selector, Expr):
        for name in selector.fields():
            if fields is not None and name not in fields:
                raise FlowError(f"{method}({name!r}): the records have no such field; they have: {', '.join(fields)}")
        return taking(selector)
    if isinstance(selector, str):
        if fields is not None and selector not in fields:
            raise FlowError(f"{method}({selector!r}): the records have no such field; they have: {', '.join(fields)}")
        return itemgetter(selector)
    if isinstance(selector, int) and not isinstance(selector, bool):
        if fields is not None:
            raise FlowError(f"{method}({selector}): the records have named fields: {', '.join(fields)}")
        return itemgetter(selector)
    if not callable(selector):
        raise FlowError(f"{method}({selector!r}): give a function, a field name or an index")
    if not isinstance(selector, itemgetter | attrgetter):
        check_function(selector, method)
    return selector
