"""Micro-batches through real Spark: what goes in comes out, and nothing stays behind."""

from __future__ import annotations

import datetime as dt
import decimal
import gc
import io
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from penstock.bridge import arrow, follow, from_spark
from penstock.bridge.arrow import micro_batch, spark_form, to_arrow, to_dataframe
from penstock.bridge.reused_memory import ReusedMemory, shared_file
from penstock.bridge.session import Session
from penstock.runtime.errors import CodecError
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.sinks import Parquet, SinkContext
from penstock.runtime.sources.base import SourceContext
from tests.sinks.one_task import OneTask

pytest.importorskip("pyspark", reason="PySpark is not installed")

UTC = dt.timezone.utc
WHEN = dt.datetime(2024, 2, 29, 12, 30, 15, 123456)


def columns() -> dict[str, pa.Array]:
    """A column of each type that keeps its type, with a null."""
    struct = pa.struct([("x", pa.int32()), ("y", pa.string())])
    return {
        "bool": pa.array([True, None, False]),
        "int8": pa.array([-128, None, 127], pa.int8()),
        "int16": pa.array([-(2**15), None, 2**15 - 1], pa.int16()),
        "int32": pa.array([-(2**31), None, 2**31 - 1], pa.int32()),
        "int64": pa.array([-(2**63), None, 2**63 - 1], pa.int64()),
        "float32": pa.array([-1.5, None, float("inf")], pa.float32()),
        "float64": pa.array([0.1, None, 1e308], pa.float64()),
        "string": pa.array(["", None, "zażółć 🦆"]),
        "binary": pa.array([b"", None, bytes(range(256))]),
        "decimal": pa.array([decimal.Decimal("-1.50"), None, decimal.Decimal("9" * 36 + ".99")], pa.decimal128(38, 2)),
        "instant": pa.array([WHEN.replace(tzinfo=UTC), None, dt.datetime(1900, 1, 1, tzinfo=UTC)]).cast(
            pa.timestamp("us", "UTC")
        ),
        "naive": pa.array([WHEN, None, dt.datetime(1970, 1, 1)], pa.timestamp("us")),
        "date": pa.array([dt.date(2024, 2, 29), None, dt.date(1, 1, 1)], pa.date32()),
        "duration": pa.array([dt.timedelta(days=-1), None, dt.timedelta(microseconds=1)], pa.duration("us")),
        "null": pa.array([None, None, None], pa.null()),
        "list": pa.array([[1, None], None, []], pa.list_(pa.field("element", pa.int64()))),
        "struct": pa.array([{"x": 1, "y": "a"}, None, {"x": None, "y": None}], struct),
        "map": pa.array([[("a", 1)], None, []], pa.map_(pa.string(), pa.int64())),
        "nested": pa.array([[{"x": 1, "y": "a"}], None, [None]], pa.list_(pa.field("element", struct))),
    }


def through(session: Session, batch: Any, **options: Any) -> pa.Table:
    with micro_batch(session, batch, **options) as frame:
        return to_arrow(frame)


def test_all_types_come_back_as_they_went(session: Session) -> None:
    table = pa.table(columns())
    back = through(session, table)
    assert back.to_pylist() == table.to_pylist()
    # Whether a map's values may be null is said otherwise by Spark.
    assert [str(t) for t in back.schema.types] == [str(t) for t in table.schema.types]


@pytest.mark.parametrize(
    ("array", "to"),
    [
        (pa.array([1, None], pa.uint8()), pa.int16()),
        (pa.array([65535, None], pa.uint16()), pa.int32()),
        (pa.array([2**32 - 1, None], pa.uint32()), pa.int64()),
        (pa.array(["a", None], pa.large_string()), pa.string()),
        (pa.array([b"a", None], pa.large_binary()), pa.binary()),
        (pa.array([b"ab", None], pa.binary(2)), pa.binary()),
        (pa.array(["a", "b", "a", None]).dictionary_encode(), pa.string()),
        (pa.array([7, 7, None]).dictionary_encode(), pa.int64()),
        (pa.array([[1], None], pa.large_list(pa.int8())), pa.list_(pa.int8())),
        (pa.array([[1, 2], None], pa.list_(pa.int8(), 2)), pa.list_(pa.int8())),
        (pa.array([dt.date(2024, 1, 1), None], pa.date64()), pa.date32()),
        (pa.array([1, None], pa.timestamp("s")), pa.timestamp("us")),
        (pa.array([WHEN], pa.timestamp("ns", "America/New_York")), pa.timestamp("us", "UTC")),
        (pa.array([1, None], pa.duration("s")), pa.duration("us")),
    ],
    ids=lambda value: str(getattr(value, "type", value)),
)
def test_types_that_spark_lacks_are_widened_exactly(array: pa.Array, to: pa.DataType) -> None:
    table, _ = spark_form(pa.table({"c": array}))
    assert str(table["c"].type).replace("element:", "item:") == str(to)
    expected = array.cast(to) if pa.types.is_timestamp(to) else array
    assert table["c"].to_pylist() == expected.to_pylist()


def test_widened_types_reach_spark(session: Session) -> None:
    words = pa.chunked_array([pa.array(["a", "b"]).dictionary_encode(), pa.array(["c", None]).dictionary_encode()])
    table = pa.table({"word": words, "n": pa.array([1, 2, 3, 2**32 - 1], pa.uint32())})
    back = through(session, table)
    assert back.to_pylist() == [{"word": w, "n": n} for w, n in zip("abc", (1, 2, 3), strict=True)] + [
        {"word": None, "n": 2**32 - 1}
    ]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (pa.table({"a": pa.array([1], pa.uint64())}), r"'a' of type uint64.*cast it to int64"),
        (pa.table({"a": pa.array([1], pa.time32("s"))}), r"'a' of type time32.*no such type"),
        (pa.table({"a": pa.array([None], pa.decimal256(50, 2))}), "at most 38 digits"),
        (pa.table({"a": pa.array([1], pa.timestamp("ns"))}), "'a' cannot go to Spark as timestamp"),
        (pa.table({"a": pa.array([{}], pa.struct([]))}), "no such type"),
        (pa.table({}), "without columns"),
        (pa.table([[1], [2]], names=["a", "a"]), "two columns of one name: 'a'"),
        (b"", "no whole Arrow IPC stream"),
        (b"x" * 100, "no whole Arrow IPC stream"),
        ([1, 2], "no whole Arrow IPC stream"),
    ],
)
def test_what_cannot_go_to_spark_is_refused(batch: Any, words: str) -> None:
    with pytest.raises(CodecError, match=words):
        spark_form(batch)


def stream(table: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def test_a_stream_cut_short_is_refused() -> None:
    whole = stream(pa.table({"a": list(range(1000))}))
    with pytest.raises(CodecError, match="no whole Arrow IPC stream"):
        spark_form(whole[: len(whole) // 2])


@pytest.mark.parametrize(
    "give",
    [
        pytest.param(lambda t: t, id="table"),
        pytest.param(lambda t: t.to_batches()[0], id="record batch"),
        pytest.param(stream, id="IPC"),
        pytest.param(lambda t: stream(t, compression="zstd"), id="compressed IPC"),
        pytest.param(lambda t: pa.concat_tables([t.slice(0, 7), t.slice(7)]), id="chunks"),
    ],
)
def test_forms_of_a_batch(session: Session, give: Callable[[pa.Table], Any]) -> None:
    # A slice: its buffers begin elsewhere than its rows.
    table = pa.table({"i": list(range(40)), "s": [None if i % 3 else str(i) for i in range(40)]}).slice(5, 30)
    assert through(session, give(table)).to_pylist() == table.to_pylist()


def test_empty_batches_keep_their_types(session: Session) -> None:
    table = pa.table(columns()).slice(0, 0)
    for batch in (table, stream(table)):
        back = through(session, batch)
        assert back.num_rows == 0
        assert [str(t) for t in back.schema.types] == [str(t) for t in table.schema.types]
    with micro_batch(session, table) as frame:
        assert to_arrow(frame.groupBy("string").count()).num_rows == 0


def test_large_batches_are_cut_for_all_cores_and_stay_in_order(session: Session) -> None:
    rows = 50_001
    table = pa.table({"i": range(rows), "key": [i % 100 for i in range(rows)]})
    for parts, expected in ((None, session.cores), (5, 5), (1, 1)):
        with micro_batch(session, table, parts=parts) as frame:
            assert frame._jdf.rdd().getNumPartitions() == expected
            back = to_arrow(frame)
        assert back.equals(table)
    with micro_batch(session, table) as frame:
        counts = to_arrow(frame.filter("i % 2 = 0").groupBy("key").count())
    even = table.filter(pc.equal(pc.bit_wise_and(table["i"], 1), 0))
    expected_counts = even.group_by("key").aggregate([("key", "count")])
    assert dict(zip(*(c.to_pylist() for c in counts.columns), strict=True)) == dict(
        zip(*(c.to_pylist() for c in expected_counts.select(["key", "key_count"]).columns), strict=True)
    )


def test_small_batches_are_not_cut(session: Session) -> None:
    with micro_batch(session, pa.table({"i": range(arrow.MIN_PART_ROWS)})) as frame:
        assert frame._jdf.rdd().getNumPartitions() == 1


def test_names_differ_by_case(session: Session) -> None:
    with micro_batch(session, pa.table({"a": [1], "A": [2]})) as frame:
        assert to_arrow(frame.select("A")).to_pylist() == [{"A": 2}]


def test_a_frame_keeps_its_data_without_the_block(session: Session) -> None:
    frame = to_dataframe(session, pa.table({"i": [1, 2, 3]}))
    gc.collect()
    assert to_arrow(frame)["i"].to_pylist() == [1, 2, 3]


def test_a_job_that_fails_says_why_and_leaves_the_session_well(session: Session) -> None:
    table = pa.table({"i": [1, 2, 3]})
    with micro_batch(session, table) as frame, pytest.raises(Exception, match="bad luck"):
        to_arrow(frame.selectExpr("raise_error('bad luck')"))
    with micro_batch(session, table) as frame, pytest.raises(Exception, match="no_such_column"):
        to_arrow(frame.select("no_such_column"))
    assert through(session, table).equals(table)


def test_several_micro_batches_in_flight(session: Session) -> None:
    def one(n: int) -> int:
        with micro_batch(session, pa.table({"i": range(n * 1000)})) as frame:
            (row,) = to_arrow(frame.groupBy().sum("i")).to_pylist()
            return int(row["sum(i)"])

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(one, range(1, 9))) == [sum(range(n * 1000)) for n in range(1, 9)]


def memory_files() -> list[str]:
    found = []
    for file in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(file))
        except OSError:
            continue
    return [name for name in found if "penstock-batch" in name]


def test_nothing_stays_behind(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    context: Any = session.spark.sparkContext
    table = pa.table({"i": range(10_000)})
    through(session, table)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        through(session, table)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert context._jsc.getPersistentRDDs().size() == 0

    def fail(*_: object) -> None:
        raise OSError("no room")

    session.files.close()
    monkeypatch.setattr(arrow, "_write", fail)
    with pytest.raises(OSError, match="no room"):
        to_dataframe(session, table)
    assert memory_files() == []


def test_micro_batches_of_all_sizes_are_written_into_the_same_memory(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def counted(make: Callable[[], Any]) -> Callable[[], Any]:
        def make_one() -> Any:
            made.append(make())
            return made[-1]

        return make_one

    files = ReusedMemory(counted(lambda: shared_file("penstock-batch")))
    buffers = ReusedMemory(counted(io.BytesIO))
    monkeypatch.setattr(session, "files", files)
    monkeypatch.setattr(session, "buffers", buffers)
    for rows in (100_000, 3, 50_000, 1, 100_001):
        table = pa.table({"i": range(rows)})
        assert through(session, table).equals(table), rows
    assert len(made) == 1
    files.close()
    buffers.close()
    assert made[0].closed


def test_frames_of_users(session: Session, tmp_path: Path) -> None:
    """Through files, whose other end is in executors that are processes of their own."""
    if session.kind != "raydp":
        pytest.skip("tests/e2e/test_spark.py has plain sessions")
    rows = [{"id": i, "text": str(i)} for i in range(100)]
    source = from_spark(session.spark.range(100).selectExpr("id", "string(id) text").repartition(3))
    reader = source.reader(source.splits(1), SourceContext("read", 0, 1, ErrorHandler("read")))
    found: list[Any] = []
    while not reader.finished:
        found += reader.read(1000)
    assert sorted(found, key=lambda row: row["id"]) == rows
    writer = OneTask(Parquet(tmp_path), SinkContext("write", 0, 1, epochs=True))
    epochs: dict[int, list[Any]] = {}
    for epoch in (1, 2):
        writer.write(rows[50 * epoch - 50 : 50 * epoch])
        writer.prepare(epoch)
        writer.commit(epoch)

    def take(frame: Any, epoch: int) -> None:
        epochs[epoch] = to_arrow(frame).to_pylist()

    follow(None, take, spark=session.spark, folder=tmp_path).wait(60)
    assert epochs == {1: rows[:50], 2: rows[50:]}


def test_the_executor_is_known(session: Session) -> None:
    (executor,) = session.executors()
    assert executor.pid is not None
    assert Path(f"/proc/{executor.pid}/comm").read_text().strip() == "java"
    assert {"raydp": "RayDP on ray://", "pyspark": "PySpark on local[2]"}[session.kind] in session.describe()
