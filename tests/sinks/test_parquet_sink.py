"""The Parquet sink: what records become, that nothing changes on the way, and that its files are whole epochs."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import itertools
import os
import pickle
import uuid
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.runtime import sinks, sources
from penstock.runtime.errors import FlowError, PenstockError, RecordError
from penstock.runtime.records.userfunc import ErrorHandler, OnError
from penstock.runtime.sinks import parquet
from penstock.runtime.sinks.base import SinkContext
from penstock.runtime.sinks.columns import column
from tests.sinks.one_task import OneTask

ONE = pa.schema([("value", pa.string())])
UTC = dt.timezone.utc
WHEN = dt.datetime(2024, 2, 29, 12, 30, 15, 123456)


def begin(
    where: Path,
    index: int = 0,
    parallelism: int = 1,
    *,
    restoring: bool = False,
    epochs: bool = True,
    policy: OnError = "fail",
    **settings: Any,
) -> Any:
    errors = ErrorHandler("out", policy=policy)
    context = SinkContext("out", index, parallelism, epochs=epochs, restoring=restoring, errors=errors)
    sink = sinks.Parquet(where, **settings)
    return OneTask(sink, context) if epochs else sink.writer(context)


def commit(writer: OneTask, epoch: int) -> Any:
    state = writer.prepare(epoch)
    writer.commit(epoch)
    return state


def rows(where: Path) -> dict[str, list[Any]]:
    return {part.name: pq.read_table(part).to_pylist() for part in sorted(where.glob("part-*"))}


def written(where: Path, records: list[Any], **settings: Any) -> list[Any]:
    """The rows that a table has after one epoch of these records."""
    writer = begin(where, **settings)
    writer.write(records)
    commit(writer, 1)
    return [row for part in rows(where).values() for row in part]


# --- records and columns -------------------------------------------------------------------------------------------


def test_what_records_become(tmp_path: Path) -> None:
    pair = namedtuple("pair", "word count")
    cases: list[tuple[list[Any], list[Any]]] = [
        ([{"a": 1, "b": "x"}, {"a": 2}], [{"a": 1, "b": "x"}, {"a": 2, "b": None}]),
        ([("to", 2), ("be", 1)], [{"_1": "to", "_2": 2}, {"_1": "be", "_2": 1}]),
        ([["to", 2]], [{"_1": "to", "_2": 2}]),
        ([pair("to", 2)], [{"word": "to", "count": 2}]),
        (["to", "be"], [{"value": "to"}, {"value": "be"}]),
        ([1, 2.5], [{"value": 1.0}, {"value": 2.5}]),
    ]
    for number, (records, expected) in enumerate(cases):
        assert written(tmp_path / str(number), records) == expected
    schema = pa.schema([("word", pa.string()), ("count", pa.int32())])
    assert written(tmp_path / "named", [("to", 2)], schema=schema) == [{"word": "to", "count": 2}]


class Colour(enum.Enum):
    RED = "r"
    BLUE = "b"


@dataclass
class Size:
    width: int
    colour: Colour


@dataclass(frozen=True)
class Item:
    id: uuid.UUID
    price: decimal.Decimal
    colour: Colour
    sizes: list[Size]
    when: dt.datetime | None = None


class Point(msgspec.Struct):
    x: int
    colour: Colour = Colour.RED


def test_dataclasses_structs_and_enums(tmp_path: Path) -> None:
    item = Item(uuid.UUID(int=7), decimal.Decimal("1.5"), Colour.RED, [Size(3, Colour.BLUE)], WHEN)
    plain = {"price": item.price, "colour": "r", "sizes": [{"width": 3, "colour": "b"}], "when": WHEN}
    (row, later) = written(tmp_path / "items", [item, Item(item.id, item.price, Colour.BLUE, [])])
    assert str(row.pop("id")) == str(item.id)
    assert row == plain
    assert (later["colour"], later["sizes"], later["when"]) == ("b", [], None)
    assert written(tmp_path / "structs", [Point(1), Point(2, Colour.BLUE)]) == [
        {"x": 1, "colour": "r"},
        {"x": 2, "colour": "b"},
    ]
    schema = pa.schema([("x", pa.int8()), ("colour", pa.string())])
    assert written(tmp_path / "typed", [{"x": 1, "colour": Colour.RED}], schema=schema) == [{"x": 1, "colour": "r"}]
    assert written(tmp_path / "one", [Colour.RED]) == [{"value": "r"}]


@pytest.mark.parametrize("schema", [None, pa.schema([("a", pa.int64())])])
def test_a_value_of_no_type_that_tables_have(tmp_path: Path, schema: Any) -> None:
    with pytest.raises(RecordError, match=r"'a'.*Could not convert.*type object.*; map it to a number, a text"):
        begin(tmp_path, schema=schema).write([{"a": object()}])


def test_the_first_records_say_what_the_columns_are(tmp_path: Path) -> None:
    first = {
        "i": 1,
        "x": 1.5,
        "t": WHEN.replace(tzinfo=dt.timezone(dt.timedelta(hours=9))),
        "n": WHEN,
        "d": decimal.Decimal("1.5"),
        "day": dt.date(2024, 2, 29),
        "l": [1, 2],
        "s": {"a": "x", "t": WHEN.replace(tzinfo=UTC)},
        "b": b"x",
        "yes": True,
    }
    later = {**first, "d": decimal.Decimal("123456789012345678.123456789012345678"), "i": 2**62, "l": []}
    writer = begin(tmp_path)
    writer.write([dict.fromkeys(first), first])
    writer.write([later])
    commit(writer, 1)
    (part,) = tmp_path.glob("part-*")
    found = pq.read_schema(part)
    assert dict(zip(found.names, map(str, found.types), strict=True)) == {
        "i": "int64",
        "x": "double",
        "t": "timestamp[us, tz=UTC]",
        "n": "timestamp[us]",
        "d": "decimal128(38, 18)",
        "day": "date32[day]",
        "l": "list<element: int64>",
        "s": "struct<a: string, t: timestamp[us, tz=UTC]>",
        "b": "binary",
        "yes": "bool",
    }
    assert pq.read_table(part).to_pylist() == [dict.fromkeys(first), first, later]


def test_all_tasks_have_the_columns_of_the_first(tmp_path: Path) -> None:
    """Whoever is first, in whatever process; and after a failure."""
    one, two = begin(tmp_path, 0, 2), begin(tmp_path, 1, 2)
    two.write([{"a": 1.5}])
    one.write([{"a": 1}])
    states = [one.prepare(1), two.prepare(1)]
    again = begin(tmp_path, 1, 2, restoring=True)
    again.restore(1, pickle.loads(pickle.dumps(states[1:])))
    one.commit(1)
    again.write([{"a": 2}])
    commit(again, 2)
    assert rows(tmp_path) == {
        "part-00000-0000000001.parquet": [{"a": 1.0}],
        "part-00001-0000000001.parquet": [{"a": 1.5}],
        "part-00001-0000000002.parquet": [{"a": 2.0}],
    }
    begin(tmp_path, 1, 2, overwrite=True)
    new = begin(tmp_path, 0, 2, overwrite=True)  # of another job
    new.write([{"b": "x"}])
    commit(new, 1)
    assert rows(tmp_path) == {"part-00000-0000000001.parquet": [{"b": "x"}]}


@pytest.mark.parametrize("record", [{"a": None}, {"a": []}, {"a": {}}, {"a": {"b": None}}])
def test_a_field_whose_type_does_not_show(tmp_path: Path, record: Any) -> None:
    """Not a matter of one record, and so not of its policy."""
    with pytest.raises(PenstockError, match=r"field 'a.*schema=pyarrow\.schema"):
        begin(tmp_path, policy="skip").write([record])


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"a": 2.5}, "column 'a' is int64: the value is double"),
        ({"a": "2"}, "the value is string"),
        ({"a": 2**70}, "too big|too large"),
        ({"a": 1, "z": 1}, "no column 'z'; it has: a, s"),
        ((1, 2, 3), "3 items, and the table the columns a, s"),
        ("text", "no column 'value'"),
        ({"a": 1, "s": {"x": 1, "y": 2}}, "column 's'"),
        ({"a": object()}, "Could not convert|object"),
    ],
)
def test_a_record_that_does_not_fit_is_a_failed_record(tmp_path: Path, bad: Any, reason: str) -> None:
    schema = pa.schema([("a", pa.int64()), ("s", pa.struct([("x", pa.int64())]))])
    with pytest.raises(RecordError, match=reason):
        begin(tmp_path, schema=schema).write([{"a": 1}, bad])
    writer = begin(tmp_path, schema=schema, policy="skip")
    writer.write([{"a": 1}, bad, {"a": 2, "s": {"x": 3}}])
    commit(writer, 1)
    assert writer._errors.skipped == 1
    assert rows(tmp_path)["part-00000-0000000001.parquet"] == [{"a": 1, "s": None}, {"a": 2, "s": {"x": 3}}]


def test_first_records_that_do_not_go_together(tmp_path: Path) -> None:
    assert written(tmp_path, [{"a": 1}, {"a": "x"}, {}, {"a": 2}], policy="skip") == [{"a": 1}, {"a": None}, {"a": 2}]


def test_values_stay_what_they_are() -> None:
    moment = WHEN.replace(tzinfo=UTC)
    for value, type, expected in [
        (3, pa.float64(), 3.0),
        (3, pa.int8(), 3),
        (3, pa.decimal128(10, 1), decimal.Decimal(3)),
        (None, pa.int64(), None),
        ([1], pa.list_(pa.float64()), [1.0]),
        ([], pa.list_(pa.string()), []),
        ({"a": None}, pa.struct([("a", pa.string()), ("b", pa.int64())]), {"a": None, "b": None}),
        ("x", pa.large_string(), "x"),
        ("x", pa.dictionary(pa.int32(), pa.string()), "x"),
        ({"k": 1}, pa.map_(pa.string(), pa.int64()), [("k", 1)]),
        (moment, pa.timestamp("us", "UTC"), moment),
        (b"x", pa.large_binary(), b"x"),
    ]:
        assert column([value], type).to_pylist() == [expected], type
    for value, type in [
        (2.5, pa.int64()),
        (3.0, pa.int64()),
        (300, pa.int8()),
        (2**53 + 1, pa.float64()),
        (True, pa.int64()),
        (1, pa.bool_()),
        ("2", pa.int64()),
        (2, pa.string()),
        (b"x", pa.string()),
        (moment, pa.timestamp("us")),
        (WHEN, pa.timestamp("us", "UTC")),
        (WHEN, pa.timestamp("ms")),
        (WHEN, pa.date32()),
        (3, pa.timestamp("us")),
        (3, pa.date32()),
        (decimal.Decimal("2.55"), pa.decimal128(10, 1)),
        ([1.5], pa.list_(pa.int64())),
        ({"z": 1}, pa.struct([("a", pa.int64())])),
    ]:
        with pytest.raises((TypeError, ValueError)):
            column([value], type)


ODD = [
    *(1, 2.5, True, "a", b"b", bytearray(b"c"), decimal.Decimal("1.5"), None),
    *(WHEN, WHEN.replace(tzinfo=UTC), WHEN.date(), WHEN.time(), WHEN.time().replace(tzinfo=UTC), dt.timedelta(1)),
]
PLAIN_TYPES = [
    *(pa.int64(), pa.float64(), pa.bool_(), pa.string(), pa.binary(), pa.decimal128(38, 18)),
    *(pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.date32(), pa.time64("us"), pa.duration("us")),
]
NESTED: list[tuple[Any, Any, Any]] = [
    (lambda a, b: [a, b], lambda t: t, lambda c: c),
    (lambda a, b: [[a, b]], pa.list_, lambda c: c[0]),
    (lambda a, b: [{"x": a}, {"x": b}], lambda t: pa.struct([("x", t)]), lambda c: [row["x"] for row in c]),
    (lambda a, b: [{"k": a}, {"k": b}], lambda t: pa.map_(pa.string(), t), lambda c: [row[0][1] for row in c]),
]


@pytest.mark.parametrize("type", PLAIN_TYPES, ids=str)
@pytest.mark.parametrize("nested", NESTED, ids=["plain", "list", "struct", "map"])
def test_whether_a_value_is_taken_does_not_depend_on_its_neighbours(type: Any, nested: Any) -> None:
    """pyarrow lets the first values say what the others are: a naive datetime is UTC, and a number a date."""
    together, type_of, apart = nested

    def taken(values: list[Any], kind: Any) -> Any:
        try:
            return column(values, kind).to_pylist()
        except (TypeError, ValueError, OverflowError):
            return None

    for a, b in itertools.permutations(ODD, 2):
        alone = taken([a], type), taken([b], type)
        found = taken(together(a, b), type_of(type))
        expected = None if None in alone else [alone[0][0], alone[1][0]]
        assert (found if found is None else apart(found)) == expected, (a, b)


def test_a_naive_datetime_in_a_column_of_utc_fails_alone(tmp_path: Path) -> None:
    good = WHEN.replace(tzinfo=UTC)
    for place in range(3):
        records = [good, good]
        records.insert(place, WHEN)
        path = tmp_path / str(place)
        schema = pa.schema([("t", pa.timestamp("us", "UTC"))])
        assert written(path, [{"t": one} for one in records], policy="skip", schema=schema) == [{"t": good}] * 2


# --- files ---------------------------------------------------------------------------------------------------------


def test_a_part_is_the_records_of_an_epoch(tmp_path: Path) -> None:
    writer = begin(tmp_path, 2, 3, schema=ONE)
    writer.write(["a"])
    writer.write(["b"])
    writer.flush()
    assert rows(tmp_path) == {}
    state = writer.prepare(3)  # 1 and 2 were before a restart
    assert rows(tmp_path) == {}
    assert pickle.loads(pickle.dumps(state)) == state
    writer.write(["c"])
    writer.commit(3)
    assert rows(tmp_path) == {"part-00002-0000000003.parquet": [{"value": "a"}, {"value": "b"}]}
    commit(writer, 4)
    commit(writer, 5)  # nothing came
    writer.finish()
    commit(writer, 6)
    writer.close(False)
    assert sorted(rows(tmp_path)) == ["part-00002-0000000003.parquet", "part-00002-0000000004.parquet"]
    assert [name for name in os.listdir(tmp_path) if not name.startswith("part-")] == []


def test_names_are_not_used_again_when_an_epoch_was_damaged(tmp_path: Path) -> None:
    """Readers take a name that they know for what they have read."""
    writer = begin(tmp_path, schema=ONE)
    states = []
    for epoch in (1, 2, 3):
        writer.write([str(epoch)])
        states.append(commit(writer, epoch))
    again = begin(tmp_path, restoring=True, schema=ONE)
    again.restore(1, states[:1])
    assert sorted(rows(tmp_path)) == ["part-00000-0000000001.parquet"]
    again.write(["2", "3"])
    commit(again, 4)  # numbers of epochs are used once
    assert sorted(rows(tmp_path)) == ["part-00000-0000000001.parquet", "part-00000-0000000004.parquet"]


def test_a_writer_that_is_given_up_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    writer = begin(tmp_path, schema=ONE)
    writer.write(["a"])
    file = writer._file
    file._write_group(ONE)
    path = file.path
    file.close()
    assert Path(path).read_bytes() == b""
    writer.close(True)
    assert os.listdir(tmp_path) == []


def test_without_epochs(tmp_path: Path) -> None:
    whole = begin(tmp_path, 0, 2, epochs=False)
    idle = begin(tmp_path, 1, 2, epochs=False)
    whole.write([{"a": 1}])
    whole.write([{"a": 2}])
    for writer in (whole, idle):
        writer.finish()
        writer.close(False)
    assert rows(tmp_path) == {"part-00000.parquet": [{"a": 1}, {"a": 2}]}
    failed = begin(tmp_path / "failed", epochs=False)
    failed.write([{"a": 1}])
    failed.close(True)
    assert rows(tmp_path / "failed") == {}


def test_rows_come_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_GROUP_ROWS", 100)
    monkeypatch.setattr(parquet, "_PIECES", 7)
    writer = begin(tmp_path)
    for i in range(250):
        writer.write([{"i": i}])
    commit(writer, 1)
    (part,) = tmp_path.glob("part-*")
    footer = pq.read_metadata(part)
    assert [footer.row_group(i).num_rows for i in range(footer.num_row_groups)] == [100, 100, 50]
    assert pq.read_table(part).to_pylist() == [{"i": i} for i in range(250)]
    table = sources.Parquet(str(tmp_path / "part-*"))
    assert len(table.splits(1)) == 3


def test_spark_can_read_its_times(tmp_path: Path) -> None:
    schema = pa.schema([("t", pa.timestamp("ns", "UTC"))])
    moment = WHEN.replace(tzinfo=UTC)
    assert written(tmp_path, [{"t": moment}], schema=schema)[0]["t"] == moment
    (part,) = tmp_path.glob("part-*")
    assert "microseconds" in str(pq.ParquetFile(part).schema)


def test_what_is_told_before_the_start(tmp_path: Path) -> None:
    for settings, reason in [
        ({"schema": "a int"}, "must be a pyarrow.Schema"),
        ({"schema": pa.schema([])}, "no columns"),
        ({"schema": pa.schema([("a", pa.int64()), ("a", pa.string())])}, "two columns of the name 'a'"),
        ({"codec": "zip"}, "one of snappy, zstd, gzip, lz4, none"),
    ]:
        with pytest.raises(FlowError, match=reason):
            sinks.Parquet(tmp_path, **settings)
    with pytest.raises(FlowError, match="Parquet needs a directory"):
        sinks.Parquet("")
    written(tmp_path, ["a"])
    with pytest.raises(FlowError, match=r"Parquet: .* already holds 1 part files"):
        sinks.Parquet(tmp_path).check()
    sinks.Parquet(tmp_path, overwrite=True).check()


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    writer = begin(tmp_path, schema=ONE)
    os.symlink("/dev/full", tmp_path / f".part-00000-0000000001.{writer._writer}.parquet.inprogress")
    writer._open_part = lambda path: parquet.ParquetPart(path, "snappy", exclusive=False, epochs=True, sink="Parquet")
    writer.write(["a"])
    with pytest.raises(PenstockError, match=r"Parquet: cannot write .*No space left"):
        writer.prepare(1)
