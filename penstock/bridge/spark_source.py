"""`from_spark`: the rows of a Spark DataFrame as a source.

A job must be able to read its input again, from any row, after any process has died, Spark's too. So the frame is
computed once and written down as Parquet, and the source is those files: from then on neither Spark nor this process is
needed.

What must never happen:

- A part of the rows taken for all of them, because executors have written where this process cannot see it: Spark
  counts the rows as it writes them, and the files must have as many.
- A value that is another one here than in Spark. An instant that Spark has written without a time zone (it does so by
  default) is one in UTC.

Rejected: handing the rows over in Ray's object store, as RayDP can. Its objects end with the executors that own them,
when Spark is stopped or one of them dies, and nothing makes them again; all rows would have to fit in it at once; and
they would have to be written to a disk to be replayable after that.
"""

from __future__ import annotations

import atexit
import glob
import logging
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.bridge.session.diagnosis import essence, text_of
from penstock.runtime.errors import FlowError, SourceError, shorten
from penstock.runtime.sources.base import Split
from penstock.runtime.sources.parquet import Parquet
from penstock.runtime.storage import filesystems

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger(__name__)

# Row groups are what tasks share: Spark's own, of 128 MB, would leave most tasks without any. But the job saves its
# place in each of them with every epoch.
_GROUP_BYTES = 2 << 20

# In the footer of a file whose session was set to the hybrid calendar.
_OLD_CALENDAR = b"org.apache.spark.legacy"

# Spark tells how many rows it has written a moment after it has.
_COUNT_S = 60.0


def from_spark(df: DataFrame, folder: str | os.PathLike[str] | None = None) -> SparkRows:
    """The rows of a DataFrame as dicts, for `flow.read`.

        flow.read(penstock.bridge.from_spark(spark.table("rides").where("fare > 0")))

    The frame is computed now, once, and written to `folder` as Parquet, which stays; None: to a directory of ours below
    TMPDIR, which goes when this process ends. Nothing of Spark is needed after that. Give a folder where Spark or the
    job's workers run on other machines (all must share it), and for a job that is detached, or that you may want to
    resume from another program. It must be empty, or not exist.

    Values: integers, floats, texts, bytes, booleans and dates are Python's; a decimal is a Decimal, a timestamp a
    datetime in UTC (one without time zone a datetime without), an interval of days a timedelta; an array is a list, a
    struct a dict, a map a list of (key, value). The order of the rows is not kept. The source's `schema` has the
    columns as a pyarrow.Schema, such as `to_spark(schema=...)` takes.

    Tasks share the rows in pieces of a few megabytes, at least one for each partition that has rows: repartition(n) a
    small frame that is to be read by n tasks.

    Errors: FlowError for what is not a DataFrame, for a stream, for a frame of Spark Connect (its server may write
    where nobody here can read), and for a folder that is not empty or cannot be made. SourceError when Spark cannot
    compute or write the frame, or when it has written more rows than can be seen here.
    """
    _check(df)
    place = _place(folder)
    try:
        rows = _written(df, place)
        source = SparkRows(place, df.schema.jsonValue(), rows)
    except BaseException:
        if folder is None:
            shutil.rmtree(place, ignore_errors=True)
        raise
    if folder is None:
        atexit.register(shutil.rmtree, place, ignore_errors=True)
    return source


class SparkRows(Parquet):
    """Parquet files that Spark has written, with the types of the frame. `schema`: the frame's schema, in Spark's JSON;
    `rows`: the number of rows that Spark has written."""

    def __init__(self, folder: str, schema: dict[str, Any], rows: int) -> None:
        super().__init__(os.path.join(glob.escape(folder), "*.parquet"))
        self.folder = folder
        self.rows = rows
        from pyarrow import parquet

        files = sorted(glob.glob(self.patterns[0]))
        footers = [parquet.read_metadata(file) for file in files]
        seen = sum(footer.num_rows for footer in footers)
        if not files or seen != rows:
            raise SourceError(
                f"from_spark: Spark wrote {rows:,} rows to {folder!r}, and this process sees {seen:,} there. Its "
                "executors run on other machines: give a folder that they, this program and the job's workers share"
            )
        if any(key.startswith(_OLD_CALENDAR) for footer in footers for key in footer.metadata or ()):
            raise SourceError(
                f"from_spark: Spark wrote {folder!r} with dates as Spark 2 had them, which are others before 1900. Set "
                "spark.sql.parquet.datetimeRebaseModeInWrite and spark.sql.parquet.int96RebaseModeInWrite to CORRECTED"
            )
        found = _open(files[0])
        self.schema = pa.schema(
            [
                pa.field(field.name, _as_in_spark(field.type, theirs["type"]))
                for field, theirs in zip(found, schema["fields"], strict=True)
            ]
        )
        self._casts = self.schema.types != found.types

    def fields(self) -> list[str]:
        return list(self.schema.names)

    def describe(self) -> str:
        return f"from_spark({self.rows:,} rows in {self.folder!r})"

    def _batches(self, split: Split) -> Iterator[pa.RecordBatch]:
        for batch in super()._batches(split):
            if self._casts:
                yield from pa.Table.from_batches([batch]).cast(self.schema).to_batches()
            else:
                yield batch


def _check(df: Any) -> None:
    kind = type(df)
    if kind.__module__.startswith("pyspark.sql.connect"):
        raise FlowError(
            "from_spark: the frame is one of Spark Connect, whose server may write where nobody here can read. Write "
            "it to a folder that all share (df.write.parquet), and read that: ps.sources.Parquet('/shared/*.parquet')"
        )
    if not kind.__module__.startswith("pyspark.sql") or not hasattr(df, "_jdf"):
        raise FlowError(
            f"from_spark needs a Spark DataFrame, got {shorten(df)} of type {kind.__name__}; make one with "
            "spark.createDataFrame(...), or read records with ps.sources.Memory(...)"
        )
    if df.isStreaming:
        raise FlowError(
            "from_spark: the frame is a stream, which has no end and cannot be read again. Let its query write to a "
            "table (df.writeStream.format('parquet')), and read what there is of that with from_spark"
        )


def _place(folder: str | os.PathLike[str] | None) -> str:
    """Returns the directory to write to, which exists and is empty."""
    if folder is None:
        return tempfile.mkdtemp(prefix="penstock-from-spark-")
    name = os.fspath(folder)
    if "://" in name:
        raise FlowError(f"from_spark: {name!r} is a URL; give a directory that Spark and the job's workers share")
    place = os.path.abspath(os.path.expanduser(name))
    try:
        if not os.path.isdir(place):
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.mkdir(place, 0o700)  # what is in it are the user's records
        there = sorted(os.listdir(place))
    except OSError as error:
        raise FlowError(
            f"from_spark: cannot make the directory {place!r}: {error.strerror}. Give another folder, or none for one "
            "that ends with this process."
        ) from error
    if there:
        raise FlowError(
            f"from_spark: {place!r} is not empty, there is {there[0]!r}. Give an empty directory, or one that does not "
            "exist; to read what is there: ps.sources.Parquet(...)"
        )
    if reason := filesystems.not_writable(place):
        raise FlowError(f"from_spark: {reason}, or give another folder.")
    return place


def _written(df: DataFrame, place: str) -> int:
    """Returns how many rows Spark has written there."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as F  # noqa: N812

    counter = Observation(f"penstock-{uuid.uuid4().hex}")
    try:
        writer = df.observe(counter, F.count(F.lit(1)).alias("rows")).write.mode("append")
        writer.option("parquet.block.size", _GROUP_BYTES).parquet(f"file://{place}")
    except Exception as error:  # Spark's and py4j's errors have no class of their own in common
        raise SourceError(
            f"from_spark: Spark could not write the frame to {place!r}: {essence(text_of(error))}"
        ) from error
    counted: list[int] = []

    def count() -> None:
        counted.append(int(counter.get["rows"]))

    # In a thread, as it has no limit of its own, and Spark may drop what it has to say when it is very busy.
    thread = threading.Thread(target=count, name="penstock-from-spark", daemon=True)
    thread.start()
    thread.join(_COUNT_S)
    if not counted:
        raise SourceError(
            f"from_spark: Spark has written the frame to {place!r}, and did not say within {_COUNT_S:g} s how many "
            "rows it has. Try again, or read what is there: ps.sources.Parquet(...)"
        )
    return counted[0]


def _open(file: str) -> pa.Schema:
    from pyarrow import parquet

    with parquet.ParquetFile(file, coerce_int96_timestamp_unit="us") as opened:
        return opened.schema_arrow


def _as_in_spark(type: pa.DataType, spark: Any) -> pa.DataType:
    """Returns the Arrow type of a column. Spark's JSON says more about it than the file does."""
    if isinstance(spark, str):
        if spark == "timestamp":
            return pa.timestamp("us", "UTC")
        if spark.startswith("interval ") and pa.types.is_int64(type):  # of days; one of months is an int32
            return pa.duration("us")
        return type
    kind = spark["type"]
    if kind == "udt":
        return _as_in_spark(type, spark["sqlType"])
    if kind == "array":
        return pa.list_(type.value_field.with_type(_as_in_spark(type.value_type, spark["elementType"])))
    if kind == "map":
        key = type.key_field.with_type(_as_in_spark(type.key_type, spark["keyType"]))
        return pa.map_(key, type.item_field.with_type(_as_in_spark(type.item_type, spark["valueType"])))
    inner = [type.field(i) for i in range(type.num_fields)]
    return pa.struct(
        [
            field.with_type(_as_in_spark(field.type, theirs["type"]))
            for field, theirs in zip(inner, spark["fields"], strict=True)
        ]
    )
