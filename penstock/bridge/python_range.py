"""A range in Spark's Python workers, without a plan of Spark SQL (docs/papers.md: D1, D4).

The stages of the record tasks run unchanged over the records of a partition. A micro-batch travels as Arrow streams
that the JVM passes on without looking into them: it makes no row of them, and no plan. Answers come back as bytes in
the same way.

It must never give a partition's records to the stages all at once: the stages are quick with lists that fit into the
processor's caches, as the record tasks have them.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa

from penstock.bridge.forms import ENCODED, RangeRun, answer_of, answer_rows, as_records
from penstock.bridge.session import Session
from penstock.runtime.errors import PenstockError
from penstock.runtime.operators.micro_batch import MicroBatchResult
from penstock.runtime.records.pickling import join

# A partition is one cell, which holds an Arrow stream: RayDP passes record batches on, and would drop dictionaries.
_CELL = pa.schema([("stream", pa.binary())])


class RangeFailed(PenstockError):
    """A record, or a function of the user's, has failed in Spark."""


class PythonRange:
    """A range that is ready to run in the Python workers of a session. `form`: the range, pickled."""

    def __init__(self, session: Session, form: bytes) -> None:
        from pyspark import rdd
        from pyspark.serializers import NoOpSerializer

        module: Any = rdd
        self._session = session
        plain = NoOpSerializer()
        # Made once: the function's bytes stay in the JVM from now on.
        self._function = module._wrap_function(session.spark.sparkContext, partial(_serve, form), plain, plain, None)

    def answer(self, batch: pa.RecordBatch) -> MicroBatchResult:
        """Returns the results of a micro-batch."""
        from py4j.protocol import Py4JJavaError
        from pyspark import rdd
        from pyspark.serializers import NoOpSerializer

        module: Any = rdd
        context: Any = self._session.spark.sparkContext
        parts = min(self._session.cores, batch.num_rows) or 1
        rows = max(1, -(-batch.num_rows // parts))
        cells = [_cell(batch.slice(start, rows)) for start in range(0, max(1, batch.num_rows), rows)]
        held: list[Any] = []
        try:
            if self._session.put is not None:
                data = self._from_store(cells, held)
            else:
                data = self._from_memory(cells)
            lines = context._jvm.PythonRDD(data, self._function, False, False)
            try:
                found = context._jvm.PythonRDD.collectAndServe(lines.asJavaRDD().rdd())
            except Py4JJavaError as error:  # its own text would have to be asked of the JVM later
                raise RangeFailed(str(error.java_exception.getMessage())) from None
            answers = list(module._load_from_socket(found, NoOpSerializer()))
        finally:
            held.clear()
        tables = []
        for answer in answers:
            with pa.ipc.open_stream(answer) as stream:
                tables.append(stream.read_all())
        return answer_of(pa.concat_tables(tables))

    def _from_memory(self, cells: list[pa.Buffer]) -> Any:
        context: Any = self._session.spark.sparkContext
        file = os.memfd_create("penstock-batch", os.MFD_CLOEXEC)
        try:
            with os.fdopen(file, "wb", closefd=False) as sink:
                for cell in cells:
                    sink.write(struct.pack("!i", cell.size))
                    sink.write(cell)
            path = f"/proc/{os.getpid()}/fd/{file}"
            return context._jvm.PythonRDD.readRDDFromFile(context._jsc, path, len(cells)).rdd()
        finally:
            os.close(file)

    def _from_store(self, cells: list[pa.Buffer], held: list[Any]) -> Any:
        session = self._session
        context: Any = session.spark.sparkContext
        assert session.put is not None
        for cell in cells:
            message = pa.ipc.read_message(cell)
            out = pa.BufferOutputStream()
            with pa.ipc.new_stream(out, _CELL) as stream:
                stream.write_batch(pa.ipc.read_record_batch(message, _CELL))
            held.append(session.put(out.getvalue().to_pybytes()))
        if session.owner is None:
            session.owner = held[0].owner_address()
        ids = [ref.binary() for ref in held]
        return context._jvm.org.apache.spark.rdd.RayDatasetRDD(context._jsc, ids, [session.owner] * len(ids))


def _cell(batch: pa.RecordBatch) -> pa.Buffer:
    """Returns a partition as the message of one cell."""
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, batch.schema) as stream:
        stream.write_batch(batch)
    data = out.getvalue()
    offsets = pa.py_buffer(struct.pack("=ii", 0, data.size))
    column = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, data])
    return pa.record_batch([column], schema=_CELL).serialize()


def _serve(form: bytes, _: int, cells: Iterator[bytes]) -> Iterator[bytes]:
    """Runs in an executor's Python worker."""
    run = RangeRun(join(form))
    for cell in cells:
        column = pa.ipc.read_record_batch(pa.ipc.read_message(cell), _CELL).column(0)
        for stream in column:
            with pa.ipc.open_stream(stream.as_buffer()) as batches:
                for batch in batches:
                    take_in_pieces(run, batch, as_records)
    rows = answer_rows(run.answer())
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, rows.schema) as writer:
        writer.write_batch(rows)
    yield out.getvalue().to_pybytes()


def take_in_pieces(run: RangeRun, batch: pa.RecordBatch, records: Callable[[pa.RecordBatch], list[Any]]) -> None:
    """Runs the rows of a record batch through a range, some at a time."""
    if batch.schema.names != [ENCODED]:
        for start in range(0, batch.num_rows, run.piece):
            run.take(records(batch.slice(start, run.piece)))
        return
    read: list[Any] = []
    for row in range(batch.num_rows):
        read += records(batch.slice(row, 1))
        while len(read) >= run.piece:
            run.take(read[: run.piece])
            del read[: run.piece]
    run.take(read)
