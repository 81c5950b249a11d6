"""The Flow API: every mistake in a program is told at the line that makes it, before anything runs."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import Any

import pytest

from penstock.runtime import testing
from penstock.runtime.errors import FlowError
from penstock.runtime.operators.process import ProcessContext, ProcessFunction
from penstock.runtime.program.flow import Flow, Stream
from penstock.runtime.sinks import Files
from penstock.runtime.sinks.call import Null
from penstock.runtime.sources.base import Reader, Source, SourceContext, Split
from penstock.runtime.sources.memory import Memory

lock = threading.Lock()


class Table(Source):
    """Dict records whose fields are known."""

    def splits(self, parallelism: int) -> list[Split]:
        return []

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        raise NotImplementedError

    def fields(self) -> list[str] | None:
        return ["name", "price"]


class Locked(ProcessFunction):
    def __init__(self) -> None:
        self.lock = lock

    def process(self, ctx: ProcessContext, key: Any, record: Any) -> None:
        """Never called."""


def numbers(flow: Flow | None = None, **options: Any) -> Stream:
    return (flow or Flow("f")).read(Memory([1, 2, 3]), **options)


def table() -> Stream:
    return Flow("f").read(Table())


def of_another_flow() -> None:
    numbers(Flow("g")).union(numbers(Flow("h")))


def with_held_lock() -> Callable[[Any], Any]:
    held = threading.Lock()
    return lambda record, tasks=1: (held, record)


def _two_tables() -> Stream:
    flow = Flow("f")
    return flow.read(Table()).union(flow.read(Table()))


def _twice() -> Stream:
    stream = numbers()
    return stream.union(stream)


def _twice_grouped() -> Stream:
    stream = numbers()
    return stream.rebalance().union(stream)


def _union() -> Stream:
    flow = Flow("f")
    return numbers(flow).union(numbers(flow))


def _planned(workers: Any) -> Any:
    flow = Flow("f")
    numbers(flow).write(Null())
    return flow.plan(workers)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "flow name of savepoints": (lambda: Flow("savepoint"), "a job of this name would overwrite it"),
    "flow name": (lambda: Flow("no spaces"), "flow name 'no spaces': use up to 100 letters"),
    "empty flow name": (lambda: Flow(""), "flow name ''"),
    "flow parallelism": (lambda: Flow("f", parallelism=0), "parallelism=0; it must be 1 or more"),
    "flow parallelism of a wrong type": (lambda: Flow("f", parallelism="2"), "parallelism='2'"),  # type: ignore[arg-type]
    "key groups": (lambda: Flow("f", key_groups=0), "key_groups=0; it must be between 1 and 32,768"),
    "key groups true": (lambda: Flow("f", key_groups=True), "key_groups=True; it must be between 1 and 32,768"),
    "chaining": (lambda: Flow("f", chaining="no"), "chaining='no'; it must be True or False"),  # type: ignore[arg-type]
    "overwrite": (lambda: Files("out", overwrite="no"), "Files: overwrite='no'; it must be True or False"),  # type: ignore[arg-type]
    "workers of a wrong type": (lambda: _planned("2"), "workers='2'; it must be a whole number"),
    "no source": (lambda: Flow("f").read([1, 2]), "needs a source such as"),  # type: ignore[arg-type]
    "no sink": (lambda: numbers().write("out/"), "needs a sink such as"),  # type: ignore[arg-type]
    "parallelism 0": (lambda: numbers().map(str, parallelism=0), "parallelism=0; it must be a whole number"),
    "parallelism true": (
        lambda: numbers().map(str, parallelism=True),
        "parallelism=True; it must be a whole number, 1 or more",
    ),
    "duplicate name": (lambda: numbers().map(str, name="m").map(str, name="m"), "two operators are named 'm'"),
    "not a function": (lambda: numbers().map("upper"), "map 'map' needs a function, got 'upper'"),  # type: ignore[arg-type]
    "closure over a lock": (lambda: numbers().map(with_held_lock()), "cannot be pickled"),
    "chooser over a lock": (lambda: numbers().partition_by(with_held_lock()), "partition_by: .* cannot be pickled"),  # type: ignore[arg-type]
    "key over a lock": (lambda: numbers().key_by(with_held_lock()), "key_by: .* cannot be pickled"),
    "process over a lock": (lambda: numbers().key_by(str).process(Locked()), "process: .* cannot be pickled"),
    "records that cannot travel": (lambda: Flow("f").read(Memory([lock])), "Memory: .* cannot be pickled"),
    "unknown field": (lambda: table().key_by("cost"), r"key_by\('cost'\): .* they have: name, price"),
    "unknown field after a filter": (lambda: table().filter(bool).key_by("cost"), "no such field"),
    "unknown field after a union": (lambda: _two_tables().key_by("cost"), "no such field"),
    "unknown field of a value": (lambda: table().key_by("name").sum("cost"), r"sum\('cost'\): .* no such field"),
    "index of named fields": (lambda: table().key_by(0), "the records have named fields: name, price"),
    "key of no kind": (lambda: numbers().key_by(1.5), "give a function, a field name or an index"),  # type: ignore[arg-type]
    "key true": (lambda: numbers().key_by(True), "give a function, a field name or an index"),
    "policy": (
        lambda: numbers().map(str, on_error="ignore"),
        "operator 'map': on_error='ignore'; it must be 'fail', 'skip'",
    ),
    "union of flows": (of_another_flow, "two flows: 'g' and 'h'"),
    "union with itself": (_twice, "would double its records"),
    "union with itself otherwise grouped": (_twice_grouped, "would double its records"),
    "union with a keyed stream": (lambda: numbers().union(numbers().key_by(str)), "apply key_by after the union"),  # type: ignore[arg-type]
    "side output": (
        lambda: numbers().key_by(str).process(print, outputs=("odd",)).side_output("even"),
        "operator 'process' has no side output 'even'; it has: 'odd'",
    ),
    "side output of none": (lambda: numbers().map(str).side_output("x"), "it has: none"),
    "side output of a union": (lambda: _union().side_output("x"), "ask the stream that the operator returned"),
    "dead letters without the policy": (lambda: numbers().map(str).dead_letters(), "give it on_error='dead_letter'"),
    "dead letters of a union": (lambda: _union().dead_letters(), "ask the stream that the operator returned"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_at_its_line(mistake: str) -> None:
    make, message = MISTAKES[mistake]
    with pytest.raises(FlowError) as caught:
        make()
    assert re.search(message, str(caught.value)), str(caught.value)


# --- connect ----------------------------------------------------------------------------------------------------


def connected() -> tuple[Flow, Stream, Stream]:
    flow = Flow("f")
    first = numbers(flow).map(str, name="first")
    second = first.map(str, name="second")
    return flow, first, second


def test_connect_refuses_a_cycle() -> None:
    flow, _, second = connected()
    with pytest.raises(FlowError, match="makes a cycle: first -> second -> first"):
        flow.connect(second, to="first")


def test_connect_refuses_an_unknown_operator() -> None:
    flow, _, second = connected()
    with pytest.raises(FlowError, match="no operator 'third'; it has: read, first, second"):
        flow.connect(second, to="third")


def test_connect_refuses_a_keyed_operator() -> None:
    flow, first, _ = connected()
    first.key_by(str).count()
    with pytest.raises(FlowError, match="'count' takes keyed input; unite the streams before key_by"):
        flow.connect(first, to="count")


def test_connect_refuses_a_stream_of_another_flow() -> None:
    flow, _, _ = connected()
    with pytest.raises(FlowError, match="'g'"):
        flow.connect(numbers(Flow("g")), to="first")


def test_connect_refuses_to_feed_a_source() -> None:
    flow, _, _ = connected()
    with pytest.raises(FlowError, match="source"):
        flow.connect(numbers(flow), to="read")


def test_connect_refuses_a_keyed_stream() -> None:
    flow, first, _ = connected()
    with pytest.raises(FlowError, match="key"):
        flow.connect(first.key_by(str), to="second")  # type: ignore[arg-type]


def test_connect_refuses_what_is_connected_already() -> None:
    flow, first, _ = connected()
    with pytest.raises(FlowError, match="double"):
        flow.connect(first, to="second")


def test_connect_feeds_an_operator_beside_its_other_inputs() -> None:
    flow, _, second = connected()
    flow.connect(flow.read(Memory([7]), name="more"), to="second")
    second.write(Null())
    assert sorted(testing.run(flow)["write"]) == ["1", "2", "3", "7"]


# --- what works -------------------------------------------------------------------------------------------------


class ByField:
    """A key function that compares by value, and so has no hash."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByField) and other.name == self.name

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, record: dict[str, int], n: int = 0) -> int:
        return record[self.name]


class Row:
    def __init__(self, x: int) -> None:
        self.x = x

    def __getitem__(self, name: Any) -> int:
        return self.x


@pytest.mark.parametrize("selector", ["x", 0, itemgetter("x"), attrgetter("x"), lambda row: row.x, ByField("x")])
def test_keys_are_selected_by_name_index_or_function(selector: Any) -> None:
    flow = Flow("f")
    flow.read(Memory([])).key_by(selector).count(emit="final").write(Null())
    assert testing.run(flow, [Row(1), Row(2), Row(1)])["write"] == [(1, 2), (2, 1)]


def test_a_chooser_needs_no_hash() -> None:
    flow = Flow("f")
    chosen = flow.read(Memory([])).partition_by(ByField("x"))
    chosen.union(flow.read(Memory([]), name="more")).write(Null(), parallelism=2)
    assert testing.run(flow, {"read": [{"x": 1}, {"x": 0}]})["write"] == [{"x": 1}, {"x": 0}]


def test_a_stream_used_twice_gives_every_record_to_both() -> None:
    flow = Flow("f")
    stream = numbers(flow)
    stream.map(str).write(Null(), name="a")
    stream.write(Null(), name="b")
    assert testing.run(flow) == {"a": ["1", "2", "3"], "b": [1, 2, 3]}


def test_parallelism_can_be_changed_and_is_checked_then_too() -> None:
    flow = Flow("f")
    flow.parallelism = 3
    with pytest.raises(FlowError, match="parallelism=-1"):
        flow.parallelism = -1
    assert flow.parallelism == 3


def test_an_operator_knows_where_it_was_declared() -> None:
    flow = Flow("f")
    numbers(flow).map(str)
    declared = flow.graph.operators["map"].declared_at
    assert declared is not None
    assert declared.startswith(f"{__file__}:")


def test_a_refused_operator_leaves_the_flow_as_it_was() -> None:
    flow = Flow("f")
    stream = numbers(flow)
    with pytest.raises(FlowError):
        stream.map(str, on_error="ignore")
    with pytest.raises(FlowError):
        stream.map(str, name="read")
    assert list(flow.graph.operators) == ["read"]
