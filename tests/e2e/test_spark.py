"""The door for users of Spark, real Spark and real jobs: frames in, epochs out, exact while processes are killed."""

from __future__ import annotations

import datetime as dt
import decimal
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock.bridge import follow, from_spark, spark_source
from penstock.bridge.session import Session
from penstock.runtime.errors import FlowError, JobError, SourceError
from tests.e2e.jobs import run
from tests.e2e.processes import LIMIT_S, kill, wait_until

pytest.importorskip("pyspark", reason="PySpark is not installed")

UTC = dt.timezone.utc
ROWS = 6_000


@pytest.fixture
def spark(spark_session: Session) -> Any:
    """A session as a user has it: nothing in it is set for Penstock."""
    mine = spark_session.spark.newSession()
    mine.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    return mine


def read(source: ps.sources.Source) -> list[Any]:
    """All records of a source."""
    flow = ps.Flow("read")
    flow.read(source).write(ps.sinks.Null(), name="out")
    return ps.testing.run(flow)["out"]


def slowly(record: Any) -> Any:
    time.sleep(0.0003)
    return record


class Epochs:
    """What the user's function has got, as plain values."""

    def __init__(self, *columns: str) -> None:
        self.columns = columns
        self.calls: list[tuple[int, list[tuple[Any, ...]]]] = []

    def __call__(self, frame: Any, epoch: int) -> None:
        self.calls.append((epoch, [tuple(row) for row in frame.selectExpr(*self.columns).collect()]))

    def rows(self) -> list[tuple[Any, ...]]:
        """All rows; each epoch came once, in order, and had some."""
        epochs = [epoch for epoch, _ in self.calls]
        assert epochs == sorted(set(epochs))
        assert all(rows for _, rows in self.calls)
        return sorted(row for _, rows in self.calls for row in rows)


def complete(job: Any) -> int:
    found: int = job.status().get("epochs", {"complete": 0})["complete"]
    return found


# --- there and back ------------------------------------------------------------------------------------------------


def test_a_frame_through_a_job_whose_worker_is_killed(
    fresh_name: Callable[[], str], tmp_path: Path, spark: Any
) -> None:
    columns = ("id", "unix_micros(at) at", "cast(price as string) price", "tags")
    frame = spark.range(ROWS).selectExpr(
        "id", "timestamp_seconds(id * 3600) at", "cast(id / 8 as decimal(12, 3)) price", "array('a', string(id)) tags"
    )
    expected = sorted(tuple(row) for row in frame.selectExpr(*columns).collect())
    flow = ps.Flow(fresh_name(), parallelism=2)
    epochs = Epochs(*columns)
    source = from_spark(frame.repartition(4), tmp_path / "in")
    flow.read(source).map(slowly).to_spark(epochs, spark=spark, folder=tmp_path / "out", schema=source.schema)
    job = run(flow, workers=2, epoch_interval_s=0.4, local=True)
    wait_until(lambda: complete(job) >= 1, "an epoch is complete")
    kill(job.status()["workers"][1]["pid"])
    status = job.wait(LIMIT_S, progress=False)
    assert status["state"] == "FINISHED"
    assert status["epochs"]["restarts"] == 1
    assert len(epochs.calls) >= 2
    assert epochs.rows() == expected
    assert spark.read.parquet(str(tmp_path / "out")).count() == ROWS


def test_a_query_reads_the_table_that_a_job_writes(fresh_name: Callable[[], str], tmp_path: Path, spark: Any) -> None:
    """Also while it is being written."""
    table = tmp_path / "table"
    schema = pa.schema([("i", pa.int64()), ("text", pa.string())])
    flow = ps.Flow(fresh_name(), parallelism=2)
    rows = ps.sources.Generator(lambda i: {"i": i, "text": f"text {i}"}, rate=2000)
    numbers = flow.read(rows, parallelism=1)
    numbers.rebalance().write(ps.sinks.Parquet(table, schema=schema))
    job = run(flow, workers=2, epoch_interval_s=0.3, local=True)
    epochs = Epochs("i", "text")

    def query() -> None:
        stream = spark.readStream.schema("i bigint, text string").parquet(str(table))
        writing = stream.writeStream.foreachBatch(epochs).option("checkpointLocation", str(tmp_path / "query"))
        assert writing.trigger(availableNow=True).start().awaitTermination(LIMIT_S)

    wait_until(lambda: list(table.glob("part-*")), "there is a part")
    query()
    seen = len(epochs.rows())
    assert seen > 0
    kill(job.status()["workers"][0]["pid"])
    wait_until(lambda: job.status()["epochs"]["restarts"] == 1 and job.state == "RUNNING", "it continues")
    epoch = job.status()["epochs"]["complete"]
    wait_until(lambda: job.status()["epochs"]["complete"] > epoch + 1, "an epoch is complete since")
    job.stop()
    read = job.wait(LIMIT_S, progress=False)["records_read"]
    query()
    assert read > seen
    assert epochs.rows() == [(i, f"text {i}") for i in range(read)]


def test_a_function_that_raises_and_another_that_continues(
    cluster: str, fresh_name: Callable[[], str], tmp_path: Path, spark: Any
) -> None:
    failed: list[int] = []

    def fails(frame: Any, epoch: int) -> None:
        failed.append(epoch)
        frame.select("no such column").collect()

    flow = ps.Flow(fresh_name())
    numbers = flow.read(ps.sources.Generator(lambda i: i, rate=1000), name="numbers")
    numbers.to_spark(fails, spark=spark, folder=tmp_path / "out", keep=False)
    job = run(flow, epoch_interval_s=0.3)
    with pytest.raises(JobError, match="fails failed for epoch") as raised:
        job.wait(LIMIT_S, progress=False)
    assert "no such column" in str(raised.value)
    assert job.state == "RUNNING"
    assert len(failed) == 1
    epochs = Epochs("value")
    following = follow(ps.attach(flow.name), epochs, spark=spark, folder=tmp_path / "out", keep=False)
    wait_until(lambda: len(epochs.calls) >= 2, "it continues")
    job.stop()
    read_ = job.wait(LIMIT_S, progress=False)["records_read"]
    assert following.wait(LIMIT_S) == epochs.calls[-1][0]
    assert epochs.calls[0][0] == failed[0]
    assert epochs.rows() == [(i,) for i in range(read_)]
    assert not list((tmp_path / "out").glob("part-*"))


# --- what a frame becomes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timestamps", ["INT96", "TIMESTAMP_MICROS"])
def test_values_are_what_they_were_in_spark(spark: Any, timestamps: str) -> None:
    moment = "timestamp'2024-01-01 09:00:00.123456'"  # in Tokyo
    instant = dt.datetime(2024, 1, 1, 0, 0, 0, 123456, tzinfo=UTC)
    values: dict[str, tuple[str, Any]] = {
        "i": ("1", 1),
        "b": ("cast(2 as tinyint)", 2),
        "x": ("1.5D", 1.5),
        "d": ("cast(2.5 as decimal(10, 2))", decimal.Decimal("2.50")),
        "s": ("'x'", "x"),
        "yes": ("true", True),
        "raw": ("X'01ff'", b"\x01\xff"),
        "day": ("date'2024-02-29'", dt.date(2024, 2, 29)),
        "t": (moment, instant),
        "n": ("timestamp_ntz'2024-01-01 09:00:00'", dt.datetime(2024, 1, 1, 9)),
        "old": ("timestamp_seconds(-9000000000)", dt.datetime(1970, 1, 1, tzinfo=UTC) - dt.timedelta(seconds=9e9)),
        "took": ("interval 1 day 2 seconds", dt.timedelta(days=1, seconds=2)),
        "list": (f"array({moment}, null)", [instant, None]),
        "map": (f"map('k', {moment})", [("k", instant)]),
        "struct": (f"named_struct('a', 1, 'in', named_struct('t', {moment}))", {"a": 1, "in": {"t": instant}}),
        "none": ("cast(null as string)", None),
    }
    before = spark.conf.get("spark.sql.parquet.outputTimestampType")
    spark.conf.set("spark.sql.parquet.outputTimestampType", timestamps)
    for kind in ("int96", "datetime"):
        spark.conf.set(f"spark.sql.parquet.{kind}RebaseModeInWrite", "CORRECTED")
    try:
        source: Any = from_spark(spark.range(1).selectExpr(*[f"{text} `{name}`" for name, (text, _) in values.items()]))
    finally:
        spark.conf.set("spark.sql.parquet.outputTimestampType", before)
        for kind in ("int96", "datetime"):
            spark.conf.unset(f"spark.sql.parquet.{kind}RebaseModeInWrite")
    assert source.fields() == list(values)
    assert read(source) == [{name: value for name, (_, value) in values.items()}]


def test_the_rows_are_shared_among_tasks(spark: Any) -> None:
    assert len(from_spark(spark.range(100).repartition(5)).splits(2)) == 5
    one = from_spark(spark.range(60_000).selectExpr("id", "repeat(uuid(), 4) text").coalesce(1))
    assert len(one.splits(4)) >= 2
    assert len(read(one)) == 60_000


def test_frames_without_rows(spark: Any) -> None:
    for empty in (spark.createDataFrame([], "a int"), spark.range(10).where("id > 100"), spark.range(0)):
        source = from_spark(empty)
        assert source.fields() == empty.columns
        assert read(source) == []


def test_folders(spark: Any, tmp_path: Path) -> None:
    place = tmp_path / "with space [1]" / "in"
    source = from_spark(spark.range(3), place)
    assert sorted(row["id"] for row in read(source)) == [0, 1, 2]
    assert f"from_spark(3 rows in {str(place)!r})" == source.describe()
    with pytest.raises(FlowError, match="is not empty"):
        from_spark(spark.range(3), place)
    (tmp_path / "file").write_text("")
    with pytest.raises(FlowError, match="cannot make the directory"):
        from_spark(spark.range(3), tmp_path / "file" / "in")
    with pytest.raises(FlowError, match="is a URL"):
        from_spark(spark.range(3), "s3://bucket/in")


def test_what_cannot_be_read(spark: Any, tmp_path: Path) -> None:
    class DataFrame:
        __module__ = "pyspark.sql.connect.dataframe"

    for wrong, reason in [
        (3, "needs a Spark DataFrame, got 3 of type int"),
        (spark, "needs a Spark DataFrame"),
        (spark.readStream.format("rate").load(), "is a stream"),
        (DataFrame(), "Spark Connect"),
    ]:
        with pytest.raises(FlowError, match=reason):
            from_spark(wrong)
    for frame, reason in [
        (spark.range(3).selectExpr("id", "null nothing"), "VOID"),
        (spark.range(3).selectExpr("id a", "id a"), "already exists"),
        (spark.range(3).selectExpr("string(raise_error('no luck')) a"), "no luck"),
        (spark.range(3).selectExpr("timestamp_seconds(-9000000000) t"), "RebaseModeInWrite"),
    ]:
        with pytest.raises(SourceError, match=reason):
            from_spark(frame, tmp_path / reason)


def test_old_dates_that_spark_writes_as_others(spark: Any) -> None:
    spark.conf.set("spark.sql.parquet.datetimeRebaseModeInWrite", "LEGACY")
    try:
        with pytest.raises(SourceError, match=r"as Spark 2 had them.*CORRECTED"):
            from_spark(spark.range(1).selectExpr("date'1500-01-01' day"))
    finally:
        spark.conf.unset("spark.sql.parquet.datetimeRebaseModeInWrite")


def test_rows_that_were_written_where_nobody_sees_them(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by executors on other machines: a part of the rows must not pass for all."""
    real = spark_source._written

    def lost(df: Any, place: str) -> int:
        rows = real(df, place)
        min(Path(place).glob("*.parquet")).unlink()
        return rows

    monkeypatch.setattr(spark_source, "_written", lost)
    with pytest.raises(SourceError, match=r"wrote 100 rows .* sees [1-9]\d there.* run on other machines"):
        from_spark(spark.range(100).repartition(3), tmp_path / "in")


def test_a_folder_of_ours_ends_with_the_process(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr(spark_source.atexit, "register", lambda f, *a, **k: ends.append(lambda: f(*a, **k)))
    source: Any = from_spark(spark.range(3))
    assert os.path.isdir(source.folder)
    ends[0]()
    assert not os.path.exists(source.folder)


def test_nothing_is_left_of_a_frame_that_could_not_be_computed(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(spark_source.tempfile, "tempdir", None)
    with pytest.raises(SourceError):
        from_spark(spark.range(3).selectExpr("string(raise_error('x')) a"))
    assert [name for name in os.listdir(tmp_path) if name.startswith("penstock-from")] == []
