"""A range in Spark's Python workers, without a plan of Spark SQL (docs/papers.md: D1, D4).

The stages of the record tasks run unchanged over the records of a partition. Where the Python workers run on the
machine of this process, a micro-batch lies in shared memory, and the JVM passes on only where each partition begins. To
other machines a micro-batch travels as Arrow streams that the JVM passes on without looking into them: it makes no row
of them, and no plan. Answers come back as bytes in the same way.

It must never give a partition's records to the stages all at once: the stages are quick with lists that fit into the
processor's caches, as the record tasks have them.
"""

from __future__ import annotations

import io
import logging
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from penstock.bridge.forms import ENCODED, RangeRun, answer_of, answer_rows, as_records
from penstock.bridge.reused_memory import path_of, shared_file
from penstock.bridge.session import Session
from penstock.runtime.errors import PenstockError
from penstock.runtime.operators.micro_batch import MicroBatchResult
from penstock.runtime.records.pickling import join

logger = logging.getLogger(__name__)

# What a Python worker gets for a partition in shared memory: this text, the offset and the size of the Arrow stream in
# the file, the first bytes of the file, and the file's path.
_SHARED = b"penstock:shared:"
_SHARED_AT = struct.Struct(f"!{len(_SHARED)}sqq16s")
_ALIGNED = 64  # as Arrow has its buffers

# What a Python worker answers that cannot read this file, because the file is on another machine.
_NOT_HERE = b"penstock:not here"

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
        self._shares = True  # as long as no Python worker has said that it runs on another machine

    def answer(self, batch: pa.RecordBatch) -> MicroBatchResult:
        """Returns the results of a micro-batch."""
        parts = min(self._session.cores, batch.num_rows) or 1
        rows = max(1, -(-batch.num_rows // parts))
        slices = [batch.slice(start, rows) for start in range(0, max(1, batch.num_rows), rows)]
        answers = self._answers_to_shared(slices) if self._shares else None
        if answers is None:
            answers = self._answers_to_sent(slices)
        tables = []
        for answer in answers:
            with pa.ipc.open_stream(answer) as stream:
                tables.append(stream.read_all())
        return answer_of(pa.concat_tables(tables))

    def _answers_to_shared(self, slices: Sequence[pa.RecordBatch]) -> list[bytes] | None:
        """Returns the answers to partitions in shared memory, or None when a Python worker could not read it."""
        # When one fails, other Python workers may still read their partitions: the file is not written again.
        with self._session.files.lend() as file:
            answers = self._run(self._from_memory(_in_file(file, slices)))
        if _NOT_HERE not in answers:
            return answers
        logger.info("executors run on other machines, and get micro-batches over the network")
        self._shares = False
        return None

    def _answers_to_sent(self, slices: Sequence[pa.RecordBatch]) -> list[bytes]:
        """Returns the answers to partitions that the JVM passes on."""
        held: list[Any] = []
        try:
            cells = list(map(_cell, slices))
            return self._run(self._from_memory(cells) if self._session.put is None else self._from_store(cells, held))
        finally:
            held.clear()

    def _run(self, data: Any) -> list[bytes]:
        """Runs the range over an RDD of cells. Raises RangeFailed."""
        from py4j.protocol import Py4JJavaError
        from pyspark import rdd
        from pyspark.serializers import NoOpSerializer

        module: Any = rdd
        context: Any = self._session.spark.sparkContext
        lines = context._jvm.PythonRDD(data, self._function, False, False)
        try:
            found = context._jvm.PythonRDD.collectAndServe(lines.asJavaRDD().rdd())
        except Py4JJavaError as error:  # its own text would have to be asked of the JVM later
            raise RangeFailed(str(error.java_exception.getMessage())) from None
        return list(module._load_from_socket(found, NoOpSerializer()))

    def _from_memory(self, cells: Sequence[pa.Buffer | bytes]) -> Any:
        context: Any = self._session.spark.sparkContext
        with shared_file("penstock-cells") as file:
            for cell in cells:
                file.write(struct.pack("!i", len(memoryview(cell))))
                file.write(cell)
            file.flush()
            return context._jvm.PythonRDD.readRDDFromFile(context._jsc, path_of(file), len(cells)).rdd()

    def _from_store(self, cells: Sequence[pa.Buffer], held: list[Any]) -> Any:
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


def _in_file(file: io.BufferedWriter, slices: Sequence[pa.RecordBatch]) -> list[bytes]:
    """Writes partitions to a file in shared memory, and returns the references for the Python workers."""
    token, path = secrets.token_bytes(16), path_of(file).encode()
    file.write(token)
    cells = []
    for part in slices:
        start = -(-file.tell() // _ALIGNED) * _ALIGNED
        file.seek(start)
        with pa.ipc.new_stream(file, part.schema) as stream:
            stream.write_batch(part)
        cells.append(_SHARED_AT.pack(_SHARED, start, file.tell() - start, token) + path)
    file.truncate()
    return cells


def _in_shared_memory(cell: bytes) -> pa.Buffer | None:
    """Returns the Arrow stream of a partition in shared memory, or None when the file is none of this machine."""
    _, start, size, token = _SHARED_AT.unpack_from(cell)
    try:
        file = pa.memory_map(cell[_SHARED_AT.size :].decode())
    except OSError:
        return None
    with file:
        if file.size() < start + size or file.read(len(token)) != token:  # another process has the same number there
            return None
        file.seek(start)
        return file.read_buffer(size)


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
        streams: list[pa.Buffer]
        if cell.startswith(_SHARED):
            shared = _in_shared_memory(cell)
            if shared is None:
                yield _NOT_HERE
                return
            streams = [shared]
        else:
            column = pa.ipc.read_record_batch(pa.ipc.read_message(cell), _CELL).column(0)
            streams = [stream.as_buffer() for stream in column]
        for stream in streams:
            with pa.ipc.open_stream(stream) as batches:
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
