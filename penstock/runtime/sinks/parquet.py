"""A sink that writes Parquet files: a table that grows by the records of each complete epoch.

A reader must never see a file that is not whole, or of an epoch that may yet be undone.
"""

from __future__ import annotations

import contextlib
import os
from functools import partial

import pyarrow as pa
from pyarrow import parquet

from penstock.runtime.errors import FlowError, shorten
from penstock.runtime.sinks import schema as table_schema
from penstock.runtime.sinks.base import SinkContext
from penstock.runtime.sinks.folder import PartFolder
from penstock.runtime.sinks.parts import PartFile
from penstock.runtime.sinks.places import LOCAL, Place, failed_write
from penstock.runtime.sinks.rows import Rows, nullable
from penstock.runtime.sinks.text import Formatter

# A row group is what a reader takes at a time, and what a task holds and writes at once.
_GROUP_ROWS = 1 << 15
_GROUP_BYTES = 16 << 20
# At a low rate batches have single records. So many batches are joined.
_PIECES = 64

CODECS = ("snappy", "zstd", "gzip", "lz4", "none")


class Parquet(PartFolder):
    """Writes a table: Parquet files in a directory, one for each task and epoch.

        stream.write(ps.sinks.Parquet("orders/", schema=pa.schema([("id", pa.int64()), ("price", pa.float64())])))

    `directory`: a directory, which is made if it does not exist, or a URL such as s3://bucket/prefix, as for
    `run(checkpoints=)`; with a URL `schema` must be given. All nodes that run tasks of the sink, and the readers of the
    table, must share it.
    `schema`: the columns, a pyarrow.Schema. None: the first records decide, with integers as int64 and decimals as
    decimal(38, 18). Give a schema when a field may be None in the first records, and for every table that must last.
    `overwrite`: delete the part files that are in the directory when the job starts. `codec`: how columns are
    compressed, "snappy", "zstd", "gzip", "lz4" or "none".

    The fields of a dict are its columns; a missing field is null. The items of a tuple or list are the columns, in the
    order of `schema`, or named `_1`, `_2` and so on. A named tuple, a dataclass and a msgspec.Struct have their fields
    as columns. Any other record is the value of the column `value`. A member of an Enum is written as its value.

    In a job with epochs each record is in the table exactly once, whatever fails. In each epoch, each task that had
    records writes a file, which appears when the epoch is complete: "part-00002-0000000061.parquet" is the file of task
    2 in epoch 61. So `run(epoch_interval_s=)` and the sink's parallelism determine the number of files. Without epochs
    a task writes one file, which appears at the end. A file that has appeared is removed only if its epoch turns out to
    be damaged after it was complete; its name is not used again.

    Do not delete files while the job runs, or a recovery may not find them.

    Errors: FlowError before the start when the directory holds part files, cannot be made or cannot be written to, and
    for a schema that is none. A record with a field that the table does not have, or a value that its column does not
    take exactly, is a failed record: so is a datetime without a time zone in a column of UTC, and one with a time zone
    in a column without. PenstockError when the disk is full or fails, when the first records do not show the type of a
    field, or when files from which a job continues are gone.
    """

    title = "Parquet"
    by_epoch = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        schema: pa.Schema | None = None,
        overwrite: bool = False,
        codec: str = "snappy",
    ) -> None:
        if schema is not None and not isinstance(schema, pa.Schema):
            raise FlowError(f"{self.title}: schema must be a pyarrow.Schema, or None, got {shorten(schema)}")
        if codec not in CODECS:
            raise FlowError(f"{self.title}: codec must be one of {', '.join(CODECS)}, got {codec!r}")
        super().__init__(directory, ".parquet", overwrite)
        if self._url is not None and schema is None:
            raise FlowError(
                f"{self.title}: say what the columns of {self.directory!r} are, schema=pyarrow.schema(...): in a "
                "directory the tasks agree on the schema of the first records, which a remote file system does not let "
                "them do"
            )
        self.schema = None if schema is None else nullable(schema)
        self.codec = codec

    def formatter(self) -> Formatter:
        return Rows(self.schema, partial(table_schema.agree, self.directory, sink=self.title))

    def open_part(self, path: str, context: SinkContext, *, place: Place) -> PartFile:
        epochs = context.epochs
        return ParquetPart(path, self.codec, exclusive=epochs, epochs=epochs, sink=self.title, place=place)

    def begin(self, context: SinkContext, place: Place) -> None:
        super().begin(context, place)
        if context.index == 0 and not place.remote:
            table_schema.forget(self.directory)

    def describe(self) -> str:
        return f"Parquet({self.directory!r})"

    def __repr__(self) -> str:
        return self.describe()


class ParquetPart:
    """A Parquet file that is being written, of record batches of one schema. Its rows and its index are on the disk
    only when `sync` has closed it."""

    def __init__(
        self, path: str, codec: str, *, exclusive: bool, epochs: bool, sink: str, place: Place = LOCAL
    ) -> None:
        self.path = path
        self.length = 0
        self._codec = codec
        self._epochs = epochs
        self._sink = sink
        self._pieces: list[pa.RecordBatch] = []
        self._whole: list[pa.RecordBatch] = []  # pieces that were joined
        self._rows = 0
        self._bytes = 0
        self._writer: parquet.ParquetWriter | None = None
        try:
            self._file = place.create(path, exclusive)
        except OSError as error:
            raise failed_write(path, error, epochs, sink) from error

    def append(self, data: pa.RecordBatch) -> None:
        """Takes rows, which are held back until they make a row group."""
        self._pieces.append(data)
        self._rows += data.num_rows
        self._bytes += data.nbytes
        if self._rows >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self._write_group(data.schema)
        elif len(self._pieces) >= _PIECES:
            table = pa.Table.from_batches(self._pieces).combine_chunks()
            self._whole += table.to_batches()
            self._pieces.clear()

    def end_member(self, last: bool = False) -> None:
        """Does nothing: a Parquet file that is truncated is never whole."""

    def flush(self) -> None:
        """Does nothing: nobody could read a file that is not closed."""

    def deleted(self) -> bool:
        """Tells whether somebody has deleted or moved the file."""
        return self._file.deleted()

    def sync(self) -> None:
        """Writes the rest, makes sure that all of it is on the disk, and closes the file."""
        self._write_group((self._pieces or self._whole)[0].schema if self._rows else None)
        try:
            if self._writer is not None:
                self._writer.close()
            self.length = self._file.tell()
            self._file.sync()
        except OSError as error:
            raise failed_write(self.path, error, self._epochs, self._sink) from error

    def close(self) -> None:
        """Closes the file such that it does not look like a whole one."""
        self._pieces.clear()
        self._whole.clear()
        self._rows = self._bytes = 0
        if self._file.closed:
            return
        with contextlib.suppress(OSError, pa.ArrowException):
            if self._writer is not None:
                self._writer.close()  # it would do so by itself later, into a file that is closed
        with contextlib.suppress(OSError):
            self._file.truncate(0)
            self._file.close()

    def _write_group(self, schema: pa.Schema | None) -> None:
        if not self._rows:
            return
        try:
            if self._writer is None:
                codec = self._codec.upper()
                # Spark knows no nanoseconds.
                self._writer = parquet.ParquetWriter(
                    self._file, schema, compression=codec, coerce_timestamps="us", use_deprecated_int96_timestamps=False
                )
            table = pa.Table.from_batches([*self._whole, *self._pieces])
            self._writer.write_table(table, row_group_size=self._rows)
        except OSError as error:
            raise failed_write(self.path, error, self._epochs, self._sink) from error
        self._pieces.clear()
        self._whole.clear()
        self._rows = self._bytes = 0
