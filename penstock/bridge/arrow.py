"""The way of a micro-batch into Spark and out again, as Arrow from end to end (docs/papers.md: D4).

In: the batch is brought into the types that Spark reads, written as an Arrow stream once, and the JVM takes it from
there: through Ray's object store where the executors are RayDP's, through a file in memory where Spark is plain. Out:
the executors write Arrow and the driver passes it on. No row ever becomes a Python object, and pandas is not needed.

    with micro_batch(session, table) as frame:
        counts = to_arrow(frame.groupBy("word").count())

What must never happen:

- Rows changed on the way. A type that Spark lacks is widened where that is exact (uint32 to int64), and refused where
  it is not, with the column's name: a value may not be rounded because there was a burst.
- An object in Ray's store, a file or a cached frame that is never removed. The file has no name, so nothing remains of
it
  even when this process is killed; nothing is ever cached.
- A stream taken for another: batches are given as Arrow objects or as the bytes of an Arrow IPC stream, and damaged
  bytes are refused before Spark sees them.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.bridge.reused_memory import path_of
from penstock.runtime.errors import CodecError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from penstock.bridge.session import Session

#: A part of fewer rows is not worth a task of its own.
MIN_PART_ROWS = 2048


@contextlib.contextmanager
def micro_batch(
    session: Session, batch: pa.Table | pa.RecordBatch | bytes, *, parts: int | None = None
) -> Iterator[DataFrame]:
    """Gives a batch as a DataFrame, for as long as the block lasts; collect within the block. Micro-batches that are in
    flight at the same time come from different threads."""
    held: list[Any] = []
    try:
        yield to_dataframe(session, batch, parts=parts, held=held)
    finally:
        held.clear()


def to_dataframe(
    session: Session,
    batch: pa.Table | pa.RecordBatch | bytes,
    *,
    parts: int | None = None,
    held: list[Any] | None = None,
) -> DataFrame:
    """A batch as a DataFrame, in `parts` partitions: as many as there are cores, or fewer if it is small.

    What the data lives in is added to `held`, and without that is kept by the frame: keep this, not only one made from
    it, until the result has been collected. CodecError names a column that cannot go to Spark.
    """
    from pyspark.sql import DataFrame

    table, schema = spark_form(batch)
    parts = parts or max(1, min(session.cores, table.num_rows // MIN_PART_ROWS))
    rows = max(1, -(-table.num_rows // parts))  # in each part
    refs: list[Any] = []
    if session.put is not None and table.num_rows:
        refs = [_put(session, table.slice(start, rows)) for start in range(0, table.num_rows, rows)]
        jframe = _from_store(session, refs, schema)
    else:
        jframe = _from_memory(session, table, rows, schema)
    frame = DataFrame(jframe, session.spark)
    if held is None:
        frame._penstock_held = refs
    else:
        held += refs
    return frame


def _from_store(session: Session, refs: list[Any], schema: str) -> Any:
    """Returns the frame of streams in Ray's object store, with a partition for each, which executors read there.

    RayDP's own function looks for the owner of every object, and fetches the first one to see what it is. We know both,
    because we have just put the objects there.
    """
    spark: Any = session.spark
    if session.owner is None:
        session.owner = refs[0].owner_address()
    jvm = spark.sparkContext._jvm
    ids = [ref.binary() for ref in refs]
    rdd = jvm.org.apache.spark.rdd.RayDatasetRDD(spark._jsc, ids, [session.owner] * len(ids))
    return jvm.org.apache.spark.sql.raydp.ObjectStoreReader.RayDatasetToDataFrame(spark._jsparkSession, rdd, schema)


def _from_memory(session: Session, table: pa.Table, rows: int, schema: str) -> Any:
    """Returns the frame of a stream that the driver reads at once. Each Arrow batch in it becomes a partition."""
    spark: Any = session.spark
    reader = spark.sparkContext._jvm.PythonSQLUtils
    with session.files.lend() as file:
        _write(table, file, rows)
        batches = reader.readArrowStreamFromFile(path_of(file))  # the JVM has a copy from here on
    return reader.toDataFrame(batches, schema, spark._jsparkSession)


def _write(table: pa.Table, sink: Any, rows: int) -> None:
    # Batches end where chunks do; each would be a partition.
    whole = table.combine_chunks() if any(column.num_chunks > 1 for column in table.columns) else table
    with pa.ipc.new_stream(sink, whole.schema) as writer:
        writer.write_table(whole, max_chunksize=rows)
    sink.truncate()


def _put(session: Session, table: pa.Table) -> Any:
    """Puts a stream into Ray's object store. Returns its reference."""
    assert session.put is not None
    with session.buffers.lend() as buffer:
        _write(table, buffer, max(1, table.num_rows))
        # What the buffer holds is handed out without a copy, and nobody has it any more when the store has copied it:
        # the buffer would be copied if it were written again before.
        return session.put(buffer.getvalue())


def to_arrow(frame: DataFrame) -> pa.Table:
    """Runs a DataFrame, and returns its rows in order. Spark's own exceptions come through.

    PySpark 3.5 would go through pandas, and lose the schema when there are no rows.
    """
    from pyspark.errors.exceptions.captured import unwrap_spark_exception
    from pyspark.java_gateway import local_connect_and_auth

    jframe: Any = frame._jdf
    port, secret, server = jframe.collectAsArrowToPython()
    with unwrap_spark_exception():
        try:
            stream, socket = local_connect_and_auth(port, secret)
            try:
                socket.settimeout(None)  # a job may take its time before the first byte comes
                table = _collect(stream)
            finally:
                with contextlib.suppress(OSError):
                    stream.close()
                socket.close()
        finally:
            server.getResult()  # raises what made the job fail; the reason why a stream ended early
    return plain_types(table)


def plain_types(table: pa.Table) -> pa.Table:
    """Returns a table that Spark has made, with the types in which batches go to Spark."""
    plain, _ = _spark_schema(table.schema)
    return table if plain == table.schema else table.cast(plain)


def _collect(stream: Any) -> pa.Table:
    """Returns Arrow batches in the order in which they were ready, and then the place of each."""
    with pa.ipc.open_stream(stream) as reader:
        schema, batches = reader.schema, list(reader)
    (count,) = struct.unpack("!i", stream.read(4))
    if count < 0:  # the job failed, and its server says how
        return schema.empty_table()
    order = struct.unpack(f"!{count}i", stream.read(4 * count))
    return pa.Table.from_batches([batches[i] for i in order], schema)


def spark_form(batch: pa.Table | pa.RecordBatch | bytes) -> tuple[pa.Table, str]:
    """Returns the batch with the types that Spark reads, and their schema in Spark's JSON."""
    if isinstance(batch, pa.RecordBatch):
        table = pa.Table.from_batches([batch])
    elif isinstance(batch, pa.Table):
        table = batch
    else:
        try:
            with pa.ipc.open_stream(batch) as reader:
                table = reader.read_all()
            table.validate()
        except (pa.ArrowException, OSError, TypeError, EOFError) as error:
            raise CodecError(f"a batch for Spark is no whole Arrow IPC stream: {error}") from error
    target, schema = _spark_schema(table.schema)
    if target == table.schema:
        return table, schema
    columns = []
    for name, column, to in zip(table.column_names, table.columns, target.types, strict=True):
        try:
            columns.append(column if column.type == to else column.cast(to))
        except pa.ArrowException as error:
            raise CodecError(f"column {name!r} cannot go to Spark as {to}: {error}") from error
    return pa.Table.from_arrays(columns, schema=target), schema


@functools.lru_cache(maxsize=256)
def _spark_schema(schema: pa.Schema) -> tuple[pa.Schema, str]:
    """Returns the schema that Spark can read, and the same in Spark's JSON."""
    from pyspark.sql.pandas.types import from_arrow_schema

    if not len(schema):
        raise CodecError("a batch without columns cannot go to Spark: keep at least one")
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise CodecError(f"a batch for Spark has two columns of one name: {', '.join(map(repr, twice))}; rename one")
    fields = []
    for column in schema:
        try:
            # Nullable whatever the batch says: Spark would read a null that should not be there as a zero.
            fields.append(pa.field(column.name, _spark_type(column.type)))
        except _NotInSpark as error:
            raise CodecError(f"column {column.name!r} of type {column.type} cannot go to Spark: {error}") from None
    target = pa.schema(fields)
    return target, from_arrow_schema(target, prefer_timestamp_ntz=True).json()


class _NotInSpark(Exception):
    """A type has no exact counterpart in Spark; the text is the remedy."""


_SAME = frozenset(
    (
        pa.bool_(),
        *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()),
        *(pa.string(), pa.binary(), pa.date32(), pa.null()),
        *(pa.duration("us"), pa.timestamp("us"), pa.timestamp("us", "UTC")),
    )
)
_WIDENED = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.float16(): pa.float32(),
    pa.large_string(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.date64(): pa.date32(),
}


def _spark_type(type: pa.DataType) -> pa.DataType:
    """Returns the Arrow type that Spark reads for a type."""
    is_ = pa.types
    to = _WIDENED.get(type, type)
    if is_.is_timestamp(type):
        to = pa.timestamp("us", "UTC" if type.tz else None)  # an instant is the same one in any zone
    elif is_.is_duration(type):
        to = pa.duration("us")
    elif is_.is_fixed_size_binary(type):
        to = pa.binary()
    elif is_.is_dictionary(type):
        return _spark_type(type.value_type)
    if to in _SAME:
        return to
    if is_.is_decimal(type):
        if type.precision > 38 or not 0 <= type.scale <= type.precision:
            raise _NotInSpark("a decimal there has at most 38 digits, and a scale within them")
        return pa.decimal128(type.precision, type.scale)
    if is_.is_list(type) or is_.is_large_list(type) or is_.is_fixed_size_list(type):
        # The field's name as Spark writes it, so that a batch that comes back has the same type.
        return pa.list_(pa.field("element", _spark_type(type.value_type)))
    if is_.is_map(type):
        return pa.map_(_spark_type(type.key_type), _spark_type(type.item_type))
    if is_.is_struct(type) and type.num_fields:
        return pa.struct([(type.field(i).name, _spark_type(type.field(i).type)) for i in range(type.num_fields)])
    if is_.is_uint64(type):
        raise _NotInSpark("it has no unsigned 64-bit numbers; cast it to int64 or decimal128(20, 0)")
    raise _NotInSpark("it has no such type; cast the column to one that it has, or leave it out")
