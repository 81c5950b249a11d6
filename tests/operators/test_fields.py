"""Fields by name: of dicts, of objects with attributes, of texts; and what a callable object may keep open."""

from __future__ import annotations

import pickle
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import penstock as ps
from penstock.runtime.errors import FlowError
from penstock.runtime.expressions import MissingField
from penstock.runtime.operators.fields import Field
from penstock.runtime.records.userfunc import ErrorHandler, select


@dataclass(frozen=True)
class Order:
    user: str
    price: int
    items: int = 0

    @property
    def broken(self) -> int:
        return self.nothing  # type: ignore[attr-defined, no-any-return]


class Slotted:
    __slots__ = ("price", "user")

    def __init__(self, user: str, price: int) -> None:
        self.user = user
        self.price = price


class OneSlot:
    __slots__ = "user"  # noqa: PLC0205 - as somebody may write it

    def __init__(self, user: str) -> None:
        self.user = user


class Colour(str, Enum):
    RED = "red"


class Struct(msgspec.Struct):
    user: str
    price: int


Named = namedtuple("Named", "user price")


def as_dict(user: str, price: int) -> dict[str, Any]:
    return {"user": user, "price": price}


def ordered(user: str, price: int) -> Mapping[str, Any]:
    return OrderedDict(as_dict(user, price))


def mapping(user: str, price: int) -> Mapping[str, Any]:
    return UserDict(as_dict(user, price))


def namespace(user: str, price: int) -> Any:
    return SimpleNamespace(user=user, price=price)


KINDS = [as_dict, ordered, mapping, namespace, Order, Slotted, Struct, Named]
PRICES = [("ann", 3), ("bob", 4), ("ann", 5)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_is_taken_from_every_kind_of_record(kind: Any) -> None:
    flow = ps.Flow("fields")
    records = [kind(user, price) for user, price in PRICES]
    times = flow.read(ps.sources.Memory(records)).watermark("price")
    times.key_by("user").sum("price", emit="final").write(ps.sinks.Collect(), name="sums")
    times.key_by(ps.col("user")).window(ps.Tumbling(1)).max(ps.col("price")).write(ps.sinks.Collect(), name="tops")
    out = ps.testing.run(flow, parallelism=2, batch_size=3)
    assert dict(out["sums"]) == {"ann": 8, "bob": 4}
    assert sorted(out["tops"]) == [("ann", 0, 1000, 5), ("bob", 0, 1000, 4)]


@pytest.mark.parametrize("kind", KINDS)
def test_expressions_read_every_kind_of_record(kind: Any) -> None:
    flow = ps.Flow("expressions")
    records = [kind(user, price) for user, price in PRICES]
    orders = flow.read(ps.sources.Memory(records))
    price, none = ps.col("price"), ps.col("nothing", optional=True)
    orders.filter(price > 3).write(ps.sinks.Collect(), name="dear")
    orders.select("user", double=price * 2, none=none).write(ps.sinks.Collect(), name="selected")
    orders.with_columns(double=price * 2).write(ps.sinks.Collect(), name="added")
    orders.key_by(ps.col("user").str.upper()).agg(top=ps.max("price"), emit="final").write(
        ps.sinks.Collect(), name="top"
    )
    out = ps.testing.run(flow, batch_size=3)
    dear = out["dear"]
    assert [type(record) for record in dear] == [type(records[1])] * 2
    assert [Field("price")(record) for record in dear] == [4, 5]
    assert out["selected"] == [{"user": user, "double": 2 * price, "none": None} for user, price in PRICES]
    assert [(row["user"], row["price"], row["double"]) for row in out["added"]] == [(u, p, 2 * p) for u, p in PRICES]
    assert {type(row) for row in out["added"]} == {dict}
    assert dict(out["top"]) == {"ANN": {"top": 5}, "BOB": {"top": 4}}


def test_a_record_that_fails_in_an_expression_stays_as_it_was() -> None:
    flow = ps.Flow("expressions")
    records = [Order("ann", 3), SimpleNamespace(user="bob"), "text", {"price": 4}, 5]
    dear = flow.read(ps.sources.Memory(records)).filter(ps.col("price") > 2, on_error="dead_letter")
    dear.write(ps.sinks.Collect(), name="out")
    dear.dead_letters().map(attrgetter("record")).write(ps.sinks.Collect(), name="letters")
    out = ps.testing.run(flow, batch_size=5)
    assert out["out"] == [Order("ann", 3), {"price": 4}]
    assert out["letters"] == [SimpleNamespace(user="bob"), "text", 5]


def test_kinds_may_be_mixed_in_any_order() -> None:
    for first in KINDS:
        records = [first("ann", 1), *(kind("bob", 2) for kind in KINDS), first("ann", 3)]
        same, users = select(Field("user"), records, ErrorHandler("mixed"))
        assert users == ["ann", *["bob"] * len(KINDS), "ann"]
        assert same == records


def test_a_method_of_dicts_is_none_of_their_fields() -> None:
    field = Field("items")
    assert field.many([Order("ann", 1, 2), {"items": 3}]) == [2, 3]
    with pytest.raises(MissingField, match="no field 'items'; it has: user"):
        field.many([Order("ann", 1, 2), {"user": "bob"}])


def test_the_field_of_a_text() -> None:
    assert Field("value").many(["a", "b"]) == ["a", "b"]


def test_the_field_of_a_text_among_dicts() -> None:
    records = ["a", {"value": "b"}, Order("ann", 1), "c"]
    failed = ErrorHandler("mixed", "skip")
    assert select(Field("value"), records, failed) == (["a", {"value": "b"}, "c"], ["a", "b", "c"])
    assert failed.skipped == 1


def test_a_text_of_another_class_is_its_own_field() -> None:
    assert Field("value").many([Colour.RED, "blue"]) == ["red", "blue"]
    assert Field("value")(Colour.RED) is Colour.RED


def test_the_names_of_slots_that_are_one_text() -> None:
    with pytest.raises(MissingField, match=r"no field 'usr'; did you mean 'user'\? it has: user$"):
        Field("usr")(OneSlot("ann"))


def test_an_error_of_the_record_s_own_code_stays_as_it_is() -> None:
    with pytest.raises(AttributeError, match="'Order' object has no attribute 'nothing'"):
        Field("broken")(Order("ann", 1))


def test_a_field_travels() -> None:
    field = pickle.loads(pickle.dumps(Field("user")))
    assert field.many([as_dict("ann", 1)]) == ["ann"]


def test_records_without_the_field_are_let_go_alone() -> None:
    flow = ps.Flow("fields")
    prices = [Order("ann", 3), {"price": 1}, {"user": "ann", "price": 5}]
    counted = flow.read(ps.sources.Memory(prices)).key_by("user").count(emit="final", on_error="dead_letter")
    counted.write(ps.sinks.Collect(), name="out")
    counted.dead_letters().map(attrgetter("record")).write(ps.sinks.Collect(), name="letters")
    out = ps.testing.run(flow, batch_size=3)
    assert out["out"] == [("ann", 2)]
    assert out["letters"] == [{"price": 1}]


# --- objects that are called like functions --------------------------------------------------------------------

events: list[tuple[str, int]] = []


class Enrich:
    """Adds what it looked up when it was opened; says in `events` what is called, and on which object."""

    def __init__(self) -> None:
        self.table: dict[int, str] | None = None

    def open(self) -> None:
        assert self.table is None, "opened once, and not the flow's own"
        self.table = {1: "one", 2: "two"}
        events.append(("open", id(self)))

    def close(self) -> None:
        events.append(("close", id(self)))

    def __call__(self, record: Any) -> Any:
        assert self.table is not None
        if isinstance(record, list):
            return [self.table[each] for each in record]
        return self.table[record]


def flow_of(method: str, enrich: Any) -> ps.Flow:
    flow = ps.Flow("opened")
    getattr(flow.read(ps.sources.Memory([1, 2, 1])), method)(enrich).write(ps.sinks.Collect(), name="out")
    return flow


@pytest.mark.parametrize(
    ("method", "out"),
    [
        ("map", ["one", "two", "one"]),
        ("filter", [1, 2, 1]),
        ("map_batches", ["one", "two", "one"]),
    ],
)
@pytest.mark.parametrize("tasks", [1, 3])
def test_a_callable_object_is_opened_once_a_task(method: str, out: list[Any], tasks: int) -> None:
    enrich = Enrich()
    flow = flow_of(method, enrich)
    events.clear()
    assert sorted(ps.testing.run(flow, parallelism=tasks)["out"], key=str) == sorted(out, key=str)
    opened = [who for what, who in events if what == "open"]
    closed = [who for what, who in events if what == "close"]
    assert len(opened) == tasks
    assert sorted(opened) == sorted(closed)
    assert events[0][0] == "open"
    assert enrich.table is None
    assert ps.testing.run(flow, parallelism=tasks)["out"]  # a second time, too


def test_a_flat_map_s_object_is_opened_too() -> None:
    class Words(Enrich):
        def __call__(self, record: Any) -> list[Any]:
            return [super().__call__(record)]

    assert ps.testing.run(flow_of("flat_map", Words()))["out"] == ["one", "two", "one"]


def test_an_object_is_closed_after_an_error() -> None:
    events.clear()
    flow = ps.Flow("opened")
    flow.read(ps.sources.Memory([1, 9])).map(Enrich()).write(ps.sinks.Collect())
    with pytest.raises(ps.RecordError, match="KeyError: 9"):
        ps.testing.run(flow)
    assert [what for what, _ in events] == ["open", "close"]


class Closing:
    def __call__(self, record: Any) -> Any:
        return record

    def close(self) -> None:
        events.append(("close", 0))


def test_an_object_that_only_closes_is_closed() -> None:
    events.clear()
    flow = ps.Flow("closed")
    flow.read(ps.sources.Memory([1])).map(Closing()).write(ps.sinks.Collect())
    ps.testing.run(flow)
    assert events == [("close", 0)]


# --- what they say of themselves --------------------------------------------------------------------------------


def test_flows_and_streams_say_what_they_are() -> None:
    flow = ps.Flow("orders")
    assert repr(flow) == "<Flow 'orders': no operators yet>"
    orders = flow.read(ps.sources.Memory([]), name="in").select("user", "price", name="cut")
    assert repr(orders) == "<Stream of flow 'orders': from 'cut', of fields user, price>"
    keyed = orders.watermark("price").key_by("user")
    assert repr(keyed) == "<KeyedStream of flow 'orders': from 'watermark', by key_by(), of 'user'>"
    windows = keyed.window(ps.Tumbling(1))
    assert repr(windows).startswith("<WindowedStream of flow 'orders': from 'watermark', by key_by(), in Tumbling(")
    late = windows.count().side_output("late")
    both = late.union(orders.broadcast())
    assert repr(both) == (
        "<Stream of flow 'orders': from 'window_count', side output 'late', from 'cut', by broadcast()>"
    )
    assert repr(flow) == "<Flow 'orders': in, cut, watermark, window_count>"


def test_a_broadcast_in_a_union_stays_one() -> None:
    flow = ps.Flow("union")
    numbers, rules = (flow.read(ps.sources.Memory([name]), name=name) for name in ("number", "rule"))
    numbers.union(rules.broadcast()).map(str, parallelism=3).write(ps.sinks.Collect(), name="out")
    assert sorted(ps.testing.run(flow)["out"]) == ["number", "rule", "rule", "rule"]


def test_to_spread_records_before_a_key_changes_nothing() -> None:
    flow = ps.Flow("spread")
    stream = flow.read(ps.sources.Memory(["a", "b", "a"]))
    stream.rebalance().key_by(str).count(emit="final").write(ps.sinks.Collect(), name="out")
    assert dict(ps.testing.run(flow)["out"]) == {"a": 2, "b": 1}


def test_a_cell_that_is_run_again_says_what_to_do() -> None:
    flow = ps.Flow("cell")
    numbers = flow.read(ps.sources.Memory([1]))

    def cell() -> None:
        numbers.map(str, name="texts")

    cell()
    with pytest.raises(FlowError, match=r"two operators are named 'texts'.*make the Flow in the same cell"):
        cell()
