"""Mistakes that people make in their first week, and the words that they are told.

Each is a few lines as somebody would write them who has read docs/flows.md; the message has to name what was written
and what to write instead. What is known when the flow is built is a FlowError at that line, the rest a RecordError.
"""

from __future__ import annotations

import contextvars
import functools
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd
import pytest

import penstock as ps
from penstock.runtime.operators.base import StageContext
from penstock.runtime.operators.ends import Write

ORDERS = [{"user": "ann", "price": 3}, {"user": "bob", "price": 4}]
held = threading.Lock()


@dataclass
class Order:
    user: str
    price: int


class Counting(ps.ProcessFunction):
    def process(self, ctx: ps.ProcessContext, key: Any, record: Any) -> None:
        ctx.emit(record)


class Idle(ps.ProcessFunction):
    """A process without a process method."""


class Enrich:
    def __call__(self, record: Any) -> Any:
        return record


class Opening(Enrich):
    def open(self) -> None:
        """Never called."""


class Client:
    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:")

    def send(self, record: Any) -> Any:
        return record


class Full(ps.sinks.Sink):
    """A sink whose disk is full."""

    def writer(self, context: ps.sinks.SinkContext) -> ps.sinks.SinkWriter:
        return _FullWriter()


class _FullWriter(ps.sinks.SinkWriter):
    def write(self, records: list[Any]) -> None:
        raise OSError(28, "No space left on device")


def forgetful(record: Any) -> Any:
    if record:
        print(record)


async def asking(record: Any) -> Any:
    return record


def unawaited(record: Any) -> Any:
    return asking(record)


def yielding(record: Any) -> Iterator[Any]:
    yield record


def guarded(record: Any) -> Any:
    with held:
        return record


def opened() -> IO[str]:
    return Path(__file__).open()


def guarded_method(self: Any, record: Any) -> Any:
    with held:
        return record


def refused(record: Any) -> Any:
    raise ConnectionRefusedError(111, "Connection refused")


def wrapped(record: Any) -> Any:
    try:
        return refused(record)
    except OSError as error:
        raise RuntimeError("could not be sent") from error


def dispatching() -> Any:
    chosen = functools.singledispatch(lambda record: record)
    chosen.register(int, closing_over(held))
    return chosen


def closing_over(value: Any) -> Callable[[Any], Any]:
    return lambda record: (value, record)


def some(records: Any = (1, 2, 3)) -> Any:
    """A stream; of any type, as most of what is done with it here does not pass a type check."""
    return ps.Flow("f").read(ps.sources.Memory(records))


def keyed() -> Any:
    return some(ORDERS).key_by("user")


def timed() -> Any:
    return some(ORDERS).watermark("price").key_by("user")


def two(method: str, *arguments: Any, **options: Any) -> Any:
    """What a method of a keyed stream makes of it and another one of the same flow."""
    flow = ps.Flow("f")
    a, b = (flow.read(ps.sources.Memory(ORDERS), name=name).watermark("price").key_by("user") for name in "ab")
    return getattr(a, method)(b, *arguments, **options)


class Longest(ps.AggregateFunction):
    """An aggregate that does not say how two of it become one."""

    def create(self) -> int:
        return 0

    def add(self, accumulator: int, record: Any) -> int:
        return max(accumulator, len(record))


def two_sinks() -> object:
    stream = some()
    stream.write(ps.sinks.Files("out/"), name="one")
    stream.write(ps.sinks.Files("out"), name="other")
    return stream._flow.plan()


def ruled(broadcast: bool = True) -> Any:
    flow = ps.Flow("f")
    records, models = (flow.read(ps.sources.Memory([1])) for _ in range(2))
    return records.key_by(str).connect(models.broadcast() if broadcast else models.key_by(str))


class NoBatch(ps.BroadcastProcessFunction):
    def process(self, ctx: Any, key: Any, record: Any) -> None:
        pass

    def process_broadcast(self, ctx: Any, record: Any) -> None:
        pass


BATCH_MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "two keyed streams": (lambda: ruled(False).process_batches(NoBatch()), r"needs a second stream that is broadcast"),
    "no method": (
        lambda: ruled().process_batches(NoBatch()),
        r"NoBatch has no method process_batch\(self, ctx, records\)",
    ),
    "one function": (
        lambda: ruled().process_batches(lambda ctx, records: records),
        r"process_batches\(\) got one function",
    ),
    "a key": (
        lambda: ruled().process_batches(lambda ctx, key, record: [], lambda ctx, record: None),
        r"calls its function with \(ctx, records\)",
    ),
    "size": (lambda: ruled().process_batches(NoBatch(), batch_size=0), r"process_batches: batch_size=0"),
    "option": (lambda: ruled().process_batches(NoBatch(), batchsize=9), r"did you mean 'batch_size'\?"),
}


@pytest.mark.parametrize("what", BATCH_MISTAKES)
def test_mistakes_with_lists_beside_a_broadcast(what: str) -> None:
    make, words = BATCH_MISTAKES[what]
    with pytest.raises(ps.FlowError, match=words):
        make()


class Model:
    """Keeps the newest model that has come by the broadcast."""

    def __init__(self) -> None:
        self.model: Any = None

    def __call__(self, record: Any) -> Any:
        return record

    def batch(self, records: list[Any]) -> list[Any]:
        return records

    async def wait(self, record: Any) -> Any:
        return record


HALF_BROADCAST: dict[str, Callable[[Any], Any]] = {
    "map of a class": lambda s: s.map(Model),
    "map of an object": lambda s: s.map(Model()),
    "map of a method": lambda s: s.map(Model().__call__),
    "map of a partial": lambda s: s.map(functools.partial(Model())),
    "map_batches": lambda s: s.map_batches(Model),
    "map_batches of a method": lambda s: s.map_batches(Model().batch),
    "filter": lambda s: s.filter(Model()),
    "flat_map": lambda s: s.flat_map(Model()),
    "map_async": lambda s: s.map_async(Model().wait),
    "behind a map": lambda s: s.map(lambda record: record).map(Model),
    "behind a watermark": lambda s: s.watermark(lambda record: 1).map_batches(Model),
}


def with_models(then: Callable[[Any], Any]) -> ps.Flow:
    flow = ps.Flow("f")
    records, models = (flow.read(ps.sources.Memory([1])) for _ in range(2))
    then(records.union(models.broadcast())).write(ps.sinks.Null(), name="out")
    return flow


@pytest.mark.parametrize("what", HALF_BROADCAST)
def test_an_object_that_may_keep_what_all_tasks_get_is_refused(what: str) -> None:
    flow = with_models(HALF_BROADCAST[what])
    for run in (ps.testing.run, lambda flow: flow.plan(2)):
        with pytest.raises(ps.FlowError) as caught:
            run(flow)
        for word in (
            "gets records of broadcast() beside others",
            "process_batches",
            "BroadcastProcessFunction",
            "saved with",
        ):
            assert word in str(caught.value)


@pytest.mark.parametrize(
    "then",
    [
        lambda s: s.map(lambda record: record),
        lambda s: s.map(str),
        lambda s: s.map_batches(list),
        lambda s: s.map(lambda record: record).rebalance().map(Model),
        lambda s: s.map(str).key_by(str).count().map(Model),
    ],
)
def test_functions_and_what_lies_behind_another_grouping_are_not(then: Callable[[Any], Any]) -> None:
    ps.testing.run(with_models(then))


def test_an_object_of_which_all_records_are_broadcast_is_not_refused() -> None:
    flow = ps.Flow("f")
    flow.read(ps.sources.Memory([1])).broadcast().map(Model).write(ps.sinks.Null(), name="out")
    assert ps.testing.run(flow)["out"] == [1]


def broadcast_in_a_union() -> object:
    flow = ps.Flow("f")
    numbers, rules = (flow.read(ps.sources.Memory([1])) for _ in range(2))
    return numbers.union(rules.broadcast()).key_by(str)


any_ps: Any = ps

# name -> (what is written, what must be told)
BUILDING: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    # options
    "option of map": (lambda: some().map(str, nmae="m"), ("map() has no option 'nmae'", "did you mean 'name'?")),
    "option of no likeness": (
        lambda: some().map(str, z=1),
        ("map() has no option 'z'", "it takes: fn, ", "name, parallelism, on_error, num_gpus, resources"),
    ),
    "option of read": (
        lambda: any_ps.Flow("f").read(ps.sources.Memory([1]), paralelism=2),
        ("read() has no option 'paralelism'", "'parallelism'?"),
    ),
    "option of an aggregate": (lambda: keyed().count(emits="final"), ("count() has no option 'emits'", "'emit'?")),
    "option of select": (lambda: some().select("user", nmae="x"), ("select() has no option 'nmae'", "'name'?")),
    "option of agg": (
        lambda: keyed().agg(n=ps.count(), onerror="skip"),
        ("agg() has no option 'onerror'", "'on_error'?"),
    ),
    "option without its unit": (
        lambda: some().watermark("t", out_of_orderness=3),
        ("watermark() has no option 'out_of_orderness'", "'out_of_orderness_s'?"),
    ),
    "option of a flow": (
        lambda: any_ps.Flow("f", paralelism=2),
        ("Flow() has no option 'paralelism'", "'parallelism'?"),
    ),
    "option of a sink": (lambda: any_ps.sinks.Files("out/", formt=str), ("Files() has no option 'formt'", "'format'?")),
    "option of a source": (
        lambda: any_ps.sources.Memory([1], split=2),
        ("Memory() has no option 'split'", "'splits'?"),
    ),
    "option of a window": (lambda: any_ps.Tumbling(sizes_s=2), ("Tumbling() has no option 'sizes_s'", "'size_s'?")),
    "option of testing.run": (
        lambda: any_ps.testing.run(some()._flow, paralelism=2),
        ("run() has no option 'paralelism'", "'parallelism'?"),
    ),
    "option of run": (lambda: any_ps.run(some()._flow, worker=2), ("run() has no option 'worker'", "'workers'?")),
    "too many arguments": (
        lambda: some().key_by("a", "b"),
        ("key_by(): too many positional arguments", "it takes: selector"),
    ),
    "an argument left out": (lambda: some().key_by(), ("key_by(): missing a required argument: 'selector'",)),
    "a result without a name": (lambda: keyed().agg(ps.count()), ("agg(): too many", "name=result")),
    # classes and calls
    "class of a source": (lambda: any_ps.Flow("f").read(ps.sources.Memory), ("the class Memory itself", "Memory(...)")),
    "a list as a source": (lambda: any_ps.Flow("f").read([1, 2]), ("penstock.sources.Memory(records)", "[1, 2]")),
    "the list as a source": (lambda: any_ps.Flow("f").read(list), ("penstock.sources.Memory(records)",)),
    "a range as a source": (lambda: any_ps.Flow("f").read(range(3)), ("penstock.sources.Memory(records)",)),
    "a DataFrame as a source": (lambda: any_ps.Flow("f").read(pd.DataFrame({"a": [1]})), ("penstock.sources.Memory(",)),
    "an array as a source": (lambda: any_ps.Flow("f").read(np.arange(3)), ("penstock.sources.Memory(records)",)),
    "a generator as a source": (
        lambda: any_ps.Flow("f").read(n for n in range(3)),
        ("penstock.sources.Memory(list(records))",),
    ),
    "a path as a source": (lambda: any_ps.Flow("f").read("in.txt"), ("penstock.sources.TextFiles(path)", "'in.txt'")),
    "print as a sink": (lambda: some().write(print), ("penstock.sinks.Console()", "penstock.sinks.Call(fn)")),
    "a function as a sink": (lambda: some().write(lambda record: None), ("penstock.sinks.Call(fn)",)),
    "a list as a sink": (lambda: some().write([]), ("penstock.sinks.Collect()",)),
    "the list as a sink": (lambda: some().write(list), ("penstock.sinks.Collect()",)),
    "an array as a sink": (
        lambda: some().write(np.arange(3)),
        ("penstock.sinks.Call(fn) or penstock.sinks.Console()",),
    ),
    "a path as a sink": (lambda: some().write(Path("out")), ("penstock.sinks.Files(folder)",)),
    "a number as a sink": (lambda: some().write(3), ("penstock.sinks.Call(fn) or penstock.sinks.Console()",)),
    "class of a sink": (lambda: some().write(ps.sinks.Collect), ("the class Collect itself", "Collect(...)")),
    "class of a process": (lambda: keyed().process(Counting), ("the class Counting itself", "Counting(...)")),
    "class of callable objects": (lambda: some().filter(Enrich), ("the class Enrich", "give it one, Enrich(...)")),
    "class of a window": (lambda: timed().window(ps.Tumbling), ("the class Tumbling itself", "Tumbling(...)")),
    "aggregation not called": (
        lambda: keyed().agg(n=ps.count),
        ("agg(n=...)", "the function count itself", "brackets"),
    ),
    "Python's own sum": (lambda: keyed().agg(n=sum), ("agg(n=...)", "Python's own function", "penstock.sum(...)")),
    "field in place of an aggregation": (lambda: keyed().agg(n="price"), ("agg(n=...)", "'price' of type str")),
    "result of a function": (lambda: some().map(print()), ("got None", "f(), instead of given, f?")),
    "text in place of a condition": (lambda: some().filter("x > 3"), ("got 'x > 3'", "penstock.col('price') > 3")),
    "text in place of a function": (lambda: some().map("upper"), ("needs a function, got 'upper' of type str",)),
    "expression in map": (lambda: some().map(ps.col("x")), ('col("x")', "expressions are for filter, select")),
    "function in select": (lambda: some().select(str), ("use map(fn)",)),
    "function in with_columns": (lambda: some().with_columns(a=lambda row: row["b"]), ("of type function", "map(fn)")),
    "a stream is run": (
        lambda: ps.testing.run(some().write(ps.sinks.Null())),
        ("the flow itself", "a Stream", "Flow 'f'"),
    ),
    "a class is run": (lambda: any_ps.testing.run(ps.Flow), ("needs a penstock.Flow", "the class Flow itself")),
    "a stream is run on Ray": (
        lambda: ps.run(some().write(ps.sinks.Null())),
        ("run() needs the flow itself", "Flow 'f'"),
    ),
    # methods that are not there
    "map with a key": (
        lambda: keyed().map(str),
        ("no method 'map'", "process(fn)", "put .map(...) before .key_by(...)"),
    ),
    # numbers
    "text for a number of records": (lambda: ps.sources.Generator(str, limit="5"), ("limit must be a whole", "'5'")),
    "part of a record": (lambda: ps.sources.Generator(str, limit=2.5), ("limit must be a whole number", "2.5")),
    "text for a number of splits": (lambda: ps.sources.Memory([], splits="2"), ("splits must be a whole number",)),
    "text for a limit": (lambda: ps.sinks.Collect(limit="5"), ("limit must be a whole number of records", "'5'")),
    "part of a line": (lambda: ps.sinks.Console(limit=2.5), ("limit must be a whole number of records", "2.5")),
    "half a split": (lambda: ps.sources.Generator(str, splits=1.5), ("splits must be a whole number",)),
    "endless duration": (lambda: ps.sources.Generator(str, duration_s=float("inf")), ("leave it out",)),
    "text for a batch": (
        lambda: some().map_batches(list, min_batch="3", linger_s=1),
        ("min_batch='3'; it must be a whole number",),
    ),
    "truth for a batch": (lambda: some().map_batches(list, batch_size=True), ("batch_size=True",)),
    # methods
    "write with a key": (lambda: keyed().write(ps.sinks.Null()), ("no method 'write'", "count, sum")),
    "count without a key": (lambda: some().count(), ("no method 'count'", "put .key_by(...) before it")),
    "window without a key": (
        lambda: some().window(ps.Tumbling(1)),
        ("no method 'window'", "put .key_by(...) before it"),
    ),
    "map of windows": (
        lambda: timed().window(ps.Tumbling(1)).map(str),
        ("no method 'map'", "stream of results has .map"),
    ),
    "connect of windows": (lambda: timed().window(ps.Tumbling(1)).connect(1), ("no method 'connect'", "count, sum")),
    "join with a stream without keys": (lambda: timed().join(some(), ps.Tumbling(1)), ("b.key_by(...)", "Stream")),
    "join in a count window": (
        lambda: two("join", ps.CountWindow(3)),
        ("windows of event time", "CountWindow(3 records, every 3)"),
    ),
    "join of an unknown kind": (lambda: two("join", ps.Tumbling(1), how="outer"), ("how='outer'", "'full'")),
    "interval that is empty": (
        lambda: two("interval_join", lower_s=5, upper_s=-5),
        ("lower_s=5 is above upper_s=-5", "nothing would match"),
    ),
    "two streams that are not told apart": (lambda: timed().connect(some()), ("b.broadcast()", "b.key_by(...)")),
    "one function for two inputs": (
        lambda: two("connect").process(lambda ctx, key, record: None),
        ("one function", "CoProcessFunction"),
    ),
    "a ProcessFunction for two inputs": (
        lambda: two("connect").process(ps.ProcessFunction()),
        ("CoProcessFunction", "ProcessFunction is none"),
    ),
    "a CoProcessFunction for one input": (lambda: timed().process(ps.CoProcessFunction()), ("no method process",)),
    "early results of a count window": (
        lambda: timed().window(ps.CountWindow(3), early_count=1).count(),
        ("no early results", "GlobalWindow()"),
    ),
    "newest results with signs": (
        lambda: timed().window(ps.Tumbling(3), updates="retract").count(emit="latest"),  # type: ignore[call-arg]
        (
            "emit='latest' is not possible here: its results have no signs",
            "updates='retract'",
            "leave emit out",
            "early_count=1",
        ),
    ),
    "newest results of a count window": (
        lambda: timed().window(ps.CountWindow(3)).count(emit="latest"),
        ("CountWindow(3 records, every 3) has no result before it is full; leave emit out",),
    ),
    "newest results with signs of a count window": (
        lambda: timed().window(ps.CountWindow(3), updates="retract").count(emit="latest"),  # type: ignore[call-arg]
        ("CountWindow(3 records, every 3) has no result before it is full; leave emit out",),
    ),
    "newest results of a session": (
        lambda: timed().window(ps.Session(3)).sum("price", emit="latest"),
        ("it is for tumbling and sliding windows, and this is Session(3000 ms)", "early_count=1"),
    ),
    "newest results beside early ones": (
        lambda: timed().window(ps.Tumbling(3), early_s=1).agg(n=ps.count(), emit="latest"),
        ("window(early_s=...) says already", "leave emit or early_s out"),
    ),
    "emit of running aggregates for windows with signs": (
        lambda: timed().window(ps.Tumbling(3), updates="retract").count(emit="every"),  # type: ignore[call-arg]
        ("emit='every'; of windows use 'final' or 'latest'",),
    ),
    "signs of rows": (
        lambda: timed().window(ps.Session(3), updates="retract").process(lambda ctx, key, window, records: []),
        ("cannot be taken back",),
    ),
    "sessions of an AggregateFunction that cannot merge": (
        lambda: timed().window(ps.Session(3)).aggregate(Longest()),
        ("two sessions may become one", "merge(self, a, b)"),
    ),
    "an AggregateFunction without a method": (lambda: timed().aggregate(ps.AggregateFunction()), ("no method create",)),
    "map of a flow": (lambda: any_ps.Flow("f").map(str), ("no method 'map'", "begins with flow.read(source)")),
    "name of another library": (lambda: some().groupby("user"), ("no method 'groupby'", ".key_by(selector)")),
    "misspelt method": (lambda: some().fliter(bool), ("no method 'fliter'", "did you mean 'filter'?")),
    "method of no likeness": (lambda: some().zzz(), ("no method 'zzz'", "it has: ", "key_by")),
    # functions of the wrong kind
    "async function": (lambda: some().map(asking), ("asking is an async function", "asyncio.run")),
    "async filter": (lambda: some().filter(asking), ("asking is an async function",)),
    "async batches": (lambda: some().map_batches(asking), ("asking is an async function",)),
    "async sink": (lambda: ps.sinks.Call(asking), ("asking is an async function",)),
    "partial of an async function": (lambda: some().map(functools.partial(asking)), ("asking is an async function",)),
    "filter without a return": (
        lambda: some().filter(forgetful),
        ("its function never returns anything but None", "return record["),
    ),
    "map without a return": (
        lambda: some().map(forgetful),
        ("map 'map': its function never returns anything but None", "return record", "penstock.sinks.Call"),
    ),
    "map of a partial without a return": (
        lambda: some().map(functools.partial(forgetful)),
        ("never returns anything but None",),
    ),
    "flat_map without a return": (
        lambda: some().flat_map(forgetful),
        ("flat_map 'flat_map': its function never returns anything but None", "return the list of outputs"),
    ),
    "generator in map": (lambda: some().map(yielding), ("yielding is a generator function", "flat_map")),
    "generator in a sink": (lambda: ps.sinks.Call(yielding), ("yielding is a generator function",)),
    "two arguments": (
        lambda: some().map(lambda a, b: a),
        ("with (record)", "(a, b)", "missing a required argument: 'b'"),
    ),
    "reduce of one": (lambda: keyed().reduce(lambda a: a), ("with (state, record)", "(a)")),
    "process of two": (
        lambda: keyed().process(lambda key, record: record),
        ("with (ctx, key, record)", "(key, record)"),
    ),
    "timer of one": (lambda: keyed().process(print, on_timer=lambda ctx: 1), ("on_timer", "with (ctx, key, at)")),
    "chooser of one": (lambda: some().partition_by(lambda record: 0), ("partition_by", "with (record, tasks)")),
    "generator source of none": (lambda: ps.sources.Generator(lambda: 1), ("Generator", "with (i)")),  # type: ignore[arg-type, misc]
    "process without its method": (
        lambda: keyed().process(Idle()),
        ("Idle has no method process(self, ctx, key, record)",),
    ),
    "outputs as a text": (lambda: keyed().process(print, outputs="late"), ("outputs='late'", "('late',)")),
    "open of a key": (lambda: some().key_by(Opening()), ("open() of a Opening would not be called here",)),
    # options of sources
    "line size as a text": (
        lambda: ps.sources.TextFiles("a.txt", max_line_bytes="3"),  # type: ignore[arg-type]
        ("TextFiles: max_line_bytes='3'; it must be a whole number, 1 or more",),
    ),
    "line size of none": (
        lambda: ps.sources.JsonLines("a.txt", max_line_bytes=0),
        ("JsonLines: max_line_bytes=0; it must be a whole number, 1 or more",),
    ),
    "flag as a text": (
        lambda: ps.sources.TextFiles("a.txt", parallel="no"),  # type: ignore[arg-type]
        ("TextFiles: parallel='no'; it must be True or False",),
    ),
    "encoding as a number": (
        lambda: ps.sources.TextFiles("a.txt", encoding=8),  # type: ignore[arg-type]
        ("encoding=8; it must be a text encoding that Python knows, such as 'utf-8'",),
    ),
    "encoding of csv as a number": (
        lambda: ps.sources.Csv("a.csv", encoding=8),  # type: ignore[arg-type]
        ("Csv: encoding=8; it must be a text encoding",),
    ),
    "nulls as a number": (
        lambda: ps.sources.Csv("a.csv", null_values=0),  # type: ignore[arg-type]
        ("Csv: null_values must be a list of texts, or None, got 0",),
    ),
    "row size as a text": (
        lambda: ps.sources.Csv("a.csv", max_record_bytes="3"),  # type: ignore[arg-type]
        ("Csv: max_record_bytes='3'; it must be a whole number",),
    ),
    "columns as a number": (
        lambda: ps.sources.Parquet("a.parquet", columns=3),  # type: ignore[arg-type]
        ("Parquet: columns must be a list of column names, or None for all, got 3",),
    ),
    "filters as a dict": (
        lambda: ps.sources.Parquet("a.parquet", filters={"fare": 3}),  # type: ignore[arg-type]
        ("Parquet: filters must be a list of tuples such as ('fare', '>', 0)",),
    ),
    "port as a text": (
        lambda: ps.sources.SocketLines("localhost", "80"),  # type: ignore[arg-type]
        ("SocketLines: port='80'; it must be a whole number from 1 to 65535",),
    ),
    "host as a number": (
        lambda: ps.sources.SocketLines(1, 80),  # type: ignore[arg-type]
        ("SocketLines: host=1; it must be a name or an address",),
    ),
    "buffer as a text": (
        lambda: ps.sources.SocketLines("localhost", 80, max_buffered="9"),  # type: ignore[arg-type]
        ("SocketLines: max_buffered='9'; it must be a whole number",),
    ),
    "seed as a text": (
        lambda: ps.sources.Generator(int, seed="1"),  # type: ignore[arg-type]
        ("Generator: seed='1'; it must be a whole number, 0 or more",),
    ),
    # what cannot travel
    "closure": (
        lambda: some().map(closing_over(threading.Lock())),
        ("cannot be pickled", "the variable 'value'", "lock"),
    ),
    "closure of a client": (
        lambda: some().map(closing_over(Client())),
        ("the attribute 'connection' of the variable 'value'", "of type Connection"),
    ),
    "global": (lambda: some().map(_in_main(guarded)), ("the global variable 'held'", "of type lock")),
    "method": (lambda: some().map(Client().send), ("the attribute 'connection' of the object whose method it is",)),
    "partial": (
        lambda: some().map(functools.partial(lambda lock, record: record, held)),
        ("argument 1 of the partial",),
    ),
    "default": (lambda: some().map(lambda record, lock=held: record), ("the default of a parameter",)),
    "open file": (
        lambda: some().map(_in_main(guarded, opened())),
        ("the global variable 'held' that it uses is <_io.TextIOWrapper", "cannot pickle the open file", __file__),
    ),
    "open file of a class": (
        lambda: some().map(_class_in_main(log=opened())()),
        (
            "the class attribute 'log' of its class Logging is",
            "Open it in the worker: in the function, or in open() or",
        ),
    ),
    "open file of a base class": (
        lambda: some().map(type("Sub", (_class_in_main(log=opened()),), {"__module__": "__main__"})()),
        ("the class attribute 'log' of the base class Logging of its class Sub is <_io.TextIOWrapper",),
    ),
    "open file of a function": (
        lambda: some().map(_with_attribute(_in_main(guarded, 1), opened())),
        ("the attribute 'log' is <_io.TextIOWrapper",),
    ),
    "open file of a class that tasks make": (
        lambda: some().map(_class_in_main(log=opened())),
        ("the class attribute 'log' of", "cannot pickle the open file"),
    ),
    "open file that a method uses": (
        lambda: some().map(_class_in_main(__call__=_in_main(guarded_method, opened()))()),
        ("the global variable 'held' that it uses of the class attribute '__call__' of its class Logging is",),
    ),
    "context variable": (
        lambda: some().map(closing_over(contextvars.ContextVar("user"))),
        (
            "the variable 'value'",
            "of type ContextVar",
            "or in another module, where the function finds it as module.name",
        ),
    ),
    "registered function": (
        lambda: some().map(dispatching()),
        ("the variable 'value' that it closes over of the function that is registered for int", "of type lock"),
    ),
    "records": (
        lambda: ps.sources.Memory([{"a": [1, held]}]),
        ("element 1 of the value at 'a' of element 0", "of type lock"),
    ),
    # order and kind of calls
    "no watermark": (lambda: keyed().window(ps.Tumbling(10)), ("needs event time", ".watermark(")),
    "watermark after the key": (lambda: keyed().watermark("t"), ("put .watermark(...) before .key_by(...)",)),
    "window of a text": (
        lambda: timed().window("10s"),
        ("needs windows, one of penstock.Tumbling(...)", "'10s' of type str"),
    ),
    "broadcast and key": (
        lambda: some().broadcast().key_by(str),
        ("key_by() directly after broadcast()", "leave one of them out"),
    ),
    "broadcast in a union": (broadcast_in_a_union, ("key_by() directly after broadcast()",)),
    "partition and rebalance": (
        lambda: some().partition_by(lambda record, n: 0).rebalance(),
        ("rebalance() directly after partition_by()",),
    ),
    "after a sink": (
        lambda: some().write(ps.sinks.Null()).map(str),
        ("only dead letters leave the sink 'write'", "variable"),
    ),
    "nothing written": (
        lambda: ps.testing.run(some()._flow),
        ("nothing uses the main output of operator 'read'", ".write(sink)"),
    ),
    "nothing read": (lambda: ps.testing.run(ps.Flow("f")), ("reads nothing", "flow.read(source)")),
    "two sinks in one place": (two_sinks, ("the sinks 'one' and 'other' both write to", "out")),
    "keys as a list": (
        lambda: some().key_by(["a", "b"]),
        ("key_by(['a', 'b'])", "a function, a field name or an index"),
    ),
    "name that is no text": (lambda: some().map(str, name=3), ("an operator's name must be a text, not 3",)),
    "name that is empty": (lambda: some().map(str, name=""), ("an operator's name must be a text, not ''",)),
    "flow without a name": (lambda: any_ps.Flow(None), ("flow name None",)),
    "key groups as a text": (lambda: any_ps.Flow("f", key_groups="8"), ("key_groups='8'",)),
    "negative parallelism": (lambda: some().map(str, parallelism=-1), ("parallelism=-1", "1 or more")),
    "batch size as a text": (lambda: some().map_batches(list, batch_size="8"), ("batch_size='8'", "1 or more")),
    "one text as records": (lambda: ps.sources.Memory("abc"), ("Memory needs a list of records, got one str",)),
    "one dict as records": (lambda: ps.sources.Memory({"a": 1}), ("Memory needs a list of records, got one dict",)),
}


def _class_in_main(**members: Any) -> type[Any]:
    """A class as if the main script had defined it, whose objects are functions."""
    found = type("Logging", (), {"__call__": _in_main(lambda self, record: record), **members})
    found.__module__ = "__main__"
    return found


def _with_attribute(function: Any, log: Any) -> Any:
    function.log = log
    return function


def _in_main(function: Callable[..., Any], held: Any = held) -> Callable[..., Any]:
    """The function as if the main script or a notebook had defined it: it travels with the globals that it uses."""
    copy: Any = type(function)(function.__code__, {"held": held, "__name__": "__main__"}, function.__name__)  # type: ignore[attr-defined, call-arg]
    copy.__module__ = "__main__"
    return copy  # type: ignore[no-any-return]


@pytest.mark.parametrize("mistake", BUILDING)
def test_a_mistake_is_named_where_it_is_made(mistake: str) -> None:
    make, words = BUILDING[mistake]
    with pytest.raises(ps.FlowError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


SECONDS = [{"user": "ann", "t": 1_700_000_000 + i} for i in range(3)]
SKIP = "on_error='skip'"

# name -> (the stream that runs, what must be told)
RUNNING: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "missing key": (
        lambda: some(ORDERS).key_by("usr").count(),
        ("no field 'usr'; did you mean 'user'? it has: user, price",),
    ),
    "missing value": (lambda: keyed().sum("prize"), ("no field 'prize'; did you mean 'price'?",)),
    "missing attribute": (
        lambda: some([Order("a", 1)]).key_by("user").mean("prize"),
        ("no field 'prize'", "user, price"),
    ),
    "missing element": (lambda: some([(1, 2)]).key_by(2).count(), ("no element 2; it has 2",)),
    "missing time": (lambda: some(ORDERS).watermark("ts"), ("no field 'ts'; it has: user, price",)),
    "missing field of a lookup": (lambda: some(ORDERS).lookup([{"ad": 1}], on="ad"), ("no field 'ad'; it has: user",)),
    "field of a text": (lambda: some(["a b"]).key_by("user").count(), ("type str", 'a text has the one field "value"')),
    "field of a tuple": (
        lambda: some([(1, 2)]).key_by("user").count(),
        ("type tuple", "by its index, as in key_by(0)"),
    ),
    "lookup of objects": (
        lambda: some([Order("a", 1)]).lookup([{"user": 1, "x": 2}], on="user"),
        ("a lookup takes records that are dicts, not Order",),
    ),
    "lookup by a list": (
        lambda: some([{"a": [1]}]).lookup([{"a": 1, "x": 2}], on="a"),
        ("a key of type list", "tuple(key)"),
    ),
    "list as a key": (
        lambda: some(ORDERS).key_by(lambda row: [row["user"]]).count(),
        ("a key of type list", "tuple(key)"),
    ),
    "list as a key of windows": (
        lambda: some(ORDERS).watermark("price").key_by(lambda row: [1]).window(ps.Tumbling(1)).count(),
        ("a key of type list", "tuple(key)"),
    ),
    "dict as a key of a process": (
        lambda: some(ORDERS).key_by(lambda row: row).process(lambda ctx, key, row: ctx.set(row)),
        ("a key of type dict", "tuple(sorted(key.items()))"),
    ),
    "None of flat_map": (
        lambda: some().flat_map(lambda record: None),
        ("the function returned None", "return the list"),
    ),
    "None of flat_map later": (
        lambda: some(range(30)).flat_map(lambda i: [i] if i < 20 else None),
        ("the function returned None", "record: 20"),
    ),
    "number of flat_map": (lambda: some().flat_map(lambda record: record), ("returned one int, not a list",)),
    "text of flat_map": (lambda: some(["ab"]).flat_map(lambda text: text), ("returned a str, whose characters",)),
    "dict of flat_map": (lambda: some(ORDERS).flat_map(lambda row: row), ("returned a dict, whose keys",)),
    "dict of map_batches": (lambda: some().map_batches(lambda batch: {"a": 1}), ("returned a dict, whose keys",)),
    "text of map_batches": (lambda: some().map_batches(lambda batch: "abc"), ("returned a str, whose characters",)),
    "bytes of map_batches": (lambda: some().map_batches(lambda batch: b"abc"), ("returned a bytes",)),
    "None of map_batches": (lambda: some().map_batches(lambda batch: None), ("the function returned None",)),
    "number of map_batches": (lambda: some().map_batches(len), ("returned one int, not a list",)),
    "dict in place of a table": (
        lambda: some(ORDERS).map_batches(lambda table: {"a": [1]}, batch_format="arrow"),
        ("of type dict; with batch_format='arrow' return a pyarrow Table",),
    ),
    "number of process": (lambda: keyed().process(lambda ctx, key, row: 1), ("returned one int, not a list",)),
    "text of process": (lambda: keyed().process(lambda ctx, key, row: "abc"), ("returned a str, whose characters",)),
    "coroutine of map": (lambda: some().map(unawaited), ("returned a coroutine", "asyncio.run")),
    "text of a timer": (
        lambda: keyed().process(lambda ctx, key, row: soon(ctx), on_timer=lambda ctx, key, at_ms: "abc"),
        ("returned a str, whose characters",),
    ),
    "number of a timer": (
        lambda: keyed().process(lambda ctx, key, row: soon(ctx), on_timer=lambda ctx, key, at_ms: 1),
        ("returned one int, not a list",),
    ),
    "timer without a function": (
        lambda: keyed().process(lambda ctx, key, row: soon(ctx)),
        ("set_timer was called, and there is nothing to call when the timer is due", "process(fn, on_timer=...)"),
    ),
    "timer without a method": (
        lambda: keyed().process(_Forgetting()),
        ("set_timer was called, and there is nothing to call when the timer is due", "on_timer(self, ctx, key, at_ms)"),
    ),
    "dict of finish": (lambda: keyed().process(_Finishing()), ("returned a dict, whose keys",)),
    "texts as a table": (
        lambda: some(["abc"]).map_batches(lambda table: table, batch_format="arrow"),
        ("takes records that are dicts, not 'abc' of type str",),
    ),
    "coroutine of filter": (lambda: some().filter(unawaited), ("returned a coroutine", "asyncio.run")),
    "coroutine of flat_map": (lambda: some().flat_map(unawaited), ("returned a coroutine",)),
    "coroutine of map_batches": (lambda: some().map_batches(unawaited), ("returned a coroutine",)),
    "seconds as milliseconds": (
        lambda: some(SECONDS).watermark("t"),
        ("the time 1700000000 is most likely in seconds since 1970", "milliseconds or datetimes"),
    ),
    "seconds as a float": (lambda: some([time.time()]).watermark(lambda t: t), ("most likely in seconds",)),
    "seconds of numpy": (lambda: some([np.int64(1_700_000_000)]).watermark(lambda t: t), ("most likely in seconds",)),
    "microseconds": (lambda: some([1_700_000_000_000_000]).watermark(lambda t: t), ("most likely in microseconds",)),
    "time without a zone": (lambda: some([datetime(2024, 1, 1)]).watermark(lambda t: t), ("has no time zone",)),
    "time as a text": (lambda: some(["2024-01-01"]).watermark(lambda t: t), ("not '2024-01-01'",)),
    "sum of records": (lambda: some([*ORDERS, *ORDERS]).key_by("user").sum(), ('sum("price")',)),
    "opening that fails": (
        lambda: some().map(_Refusing()),
        ("operator 'map' failed: ConnectionRefusedError", "(opening)"),
    ),
}


def soon(ctx: ps.ProcessContext) -> None:
    ctx.set_timer(after_s=1)


class _Forgetting(ps.ProcessFunction):
    def process(self, ctx: ps.ProcessContext, key: Any, record: Any) -> None:
        soon(ctx)


class _Finishing(Counting):
    def finish(self, ctx: ps.ProcessContext) -> Any:
        return {"a": 1}


class _Refusing(Enrich):
    def open(self) -> None:
        refused(None)


def ran(stream: Any, sink: ps.sinks.Sink | None = None) -> dict[str, list[Any]]:
    stream.write(sink or ps.sinks.Collect(), name="out")
    return ps.testing.run(stream._flow, batch_size=8)


@pytest.mark.parametrize("mistake", RUNNING)
def test_a_mistake_that_shows_in_the_records_is_named(mistake: str) -> None:
    make, words = RUNNING[mistake]
    with pytest.raises(ps.RecordError) as caught:
        ran(make())
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("fail", [refused, wrapped])
def test_nobody_is_told_to_skip_records_where_the_place_is_at_fault(fail: Callable[[Any], Any]) -> None:
    with pytest.raises(ps.RecordError) as caught:
        ran(some().map(fail))
    assert SKIP not in str(caught.value)
    assert "the records are not at fault" in str(caught.value)


def test_nobody_is_told_to_skip_records_where_the_disk_is_full() -> None:
    operator = Write(Full())
    stage = operator.stage(StageContext(operator))
    stage.open()
    with pytest.raises(ps.RecordError) as caught:
        stage.run([1, 2])
    assert "No space left" in str(caught.value)
    assert SKIP not in str(caught.value)
    assert "the records are not at fault" in str(caught.value)


def test_a_record_at_fault_may_be_skipped() -> None:
    with pytest.raises(ps.RecordError) as caught:
        ran(some(["/no/such/file"]).map(open))
    assert SKIP in str(caught.value)
    assert "not at fault" not in str(caught.value)


def sometimes(record: Any) -> Any:
    if record:
        return record
    return None


def test_none_may_be_a_result_on_purpose() -> None:
    for fn in (sometimes, lambda record: None, print):
        assert ran(some([0]).map(fn))["out"] == [None]
