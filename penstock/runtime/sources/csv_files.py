"""CSV files as a source: dicts, one a row, or Arrow columns.

pyarrow parses them, block by block. A quoted field may hold line ends, so nobody can tell where a row begins without
having read all before it: a file is one split, and an offset is a number of rows, which a recovery reads over. Nothing
but the file's content shows whether these are the rows that were read, so an offset has a digest of that content.

A row that cannot be read is a failed record of its own and counts as a row, so that offsets are the same whatever the
policy. pyarrow reports rows of a wrong length; but one value that is not of its column's type ends its reading. From
there on a file is read as text, and the types are tried block by block, and row by row in a block where that fails.
It must never lose or change another row on account of a bad one.
"""

from __future__ import annotations

import codecs
import datetime as dt
import decimal
import io
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import compute, csv

from penstock.runtime.errors import CodecError, FlowError, SourceError, shorten
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.sources.base import ColumnReader, SequentialReader, Source, SourceContext, Split, together
from penstock.runtime.sources.files import LINE_BYTES, TEXT_RATIO
from penstock.runtime.sources.marks import (
    Beginning,
    Content,
    FileMark,
    Recorded,
    RowPosition,
    check_beginning,
    find_again,
    mark_of,
)
from penstock.runtime.sources.paths import Patterns, as_patterns, find_files
from penstock.runtime.sources.rows import check_schemas
from penstock.runtime.units import whole

_TYPES: dict[Any, pa.DataType] = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    bytes: pa.binary(),
    decimal.Decimal: pa.decimal128(38, 18),
    dt.date: pa.date32(),
    dt.datetime: pa.timestamp("us"),
}
_RECORD_BYTES = 1 << 20
_HAS_OFFSET = r"^\s*\d{4}-\d{2}-\d{2}[ T]\d{2}.*(Z|[+-]\d{2}(:?\d{2})?)\s*$"  # a time such as "2024-03-01 12:30+02:00"
_WHERE = re.compile(r"In CSV column #(\d+): (?:Row #\d+: )?(.*)", re.DOTALL)


class Csv(Source[dict[str, Any]]):
    """Reads the rows of CSV files, each as a dict.

        flow.read(ps.sources.Csv("orders/*.csv"))
        flow.read(ps.sources.Csv("prices.csv.gz", columns=["id", "price"], types={"id": str, "price": float}))
        flow.read(ps.sources.Csv("old.txt", header=["id", "name"], delimiter="\\t", quote=None, encoding="latin-1"))

    `patterns`: a path, a pattern or a list of them, as in TextFiles. A file has one task, and keeps its order. A task
    reads its files one after the other; as in TextFiles, mind this before a `watermark`. A name that ends with ".gz" is
    a gzip file.
    `header`: True: the first row has the names of the columns; a list: these are the names, and the first row is data;
    False: the same, and the names are `_1`, `_2` and so on.
    `columns`: the names of those to read (None: all).
    `types`: of columns by name: str, int, float, bool, bytes, date, datetime, Decimal or a pyarrow.DataType; or one
    type for all. What is not named has the type that the first rows of the first file show: whole numbers, numbers,
    true and false, dates and times are such, all else is text. Say what must stay: "007" is the number 7.
    A column of the type datetime has aware datetimes in UTC if any of the first values has an offset ("Z", "+02:00"),
    and then a value without one is a failed record; else it has naive datetimes, which `watermark` refuses, and a value
    with an offset is a failed record. pyarrow.timestamp("us", "UTC") and pyarrow.timestamp("us") leave no choice.
    `null_values`: the words that stand for None, where they are not quoted, in all columns (None: an empty field is
    None in columns that are not text, and "" in those that are).
    `delimiter`, `quote` (None: there are no quotes), `escape` (None: a quote in quotes is doubled): one character each.
    `encoding`: of the files; a byte order mark of UTF-8 is dropped.
    `max_record_bytes`: the longest row, so that memory stays bounded.

    Blank lines are passed over. A quoted field may hold delimiters, doubled quotes and line ends, which are "\\n",
    "\\r\\n" or "\\r".

    Errors: SourceError before the start when a file is missing, has no header or other columns than the first one, or a
    column is unknown; while running when one is damaged, or when a job that goes back finds another file under its name
    (one that was only renamed, in its directory, is read on). A row with too many or too few fields is a failed record
    (its text), and so is one with a value that is not of its column's type (a dict of text): the operator's on_error
    decides, and the error names the file and the row, counted from 1 without blank lines.

    Offset: the number of rows that were read, failed ones included, with a digest of the part of the file that holds
    them. A recovery reads this part again.
    """

    hands_columns = True

    def __init__(
        self,
        patterns: Patterns,
        *,
        header: bool | Sequence[str] = True,
        columns: Sequence[str] | None = None,
        types: Mapping[str, Any] | Any | None = None,
        delimiter: str = ",",
        quote: str | None = '"',
        escape: str | None = None,
        null_values: Sequence[str] | None = None,
        encoding: str = "utf-8",
        max_record_bytes: int = _RECORD_BYTES,
    ) -> None:
        self.patterns = as_patterns(patterns, "Csv")
        if not isinstance(header, bool):
            header = _names(header, "header", "True, False or the names of the columns")
        self.header = header
        self.columns = None if columns is None else _names(columns, "columns", "a list of names, or None for all")
        self.types = _types(types)
        given = types if isinstance(types, Mapping) else {}
        # Those of which the first values show whether they have offsets; None: all columns.
        self._datetimes = None if types is dt.datetime else {name for name in given if given[name] is dt.datetime}
        for name, value, least in (("delimiter", delimiter, 1), ("quote", quote, 0), ("escape", escape, 0)):
            if value is None and not least:
                continue
            if not isinstance(value, str) or len(value) != 1 or not value.isascii() or value in "\r\n":
                raise FlowError(f"Csv: {name} must be one ASCII character, got {value!r}")
        words = () if null_values is None else null_values
        known = isinstance(words, Iterable) and not isinstance(words, str)
        if not known or not all(isinstance(word, str) for word in words):
            raise FlowError(f"Csv: null_values must be a list of texts, or None, got {shorten(null_values)}")
        try:
            "".encode(encoding)
        except (LookupError, TypeError):
            raise FlowError(
                f"Csv: encoding={shorten(encoding)}; it must be a text encoding that Python knows, such as 'utf-8'"
            ) from None
        self.delimiter = delimiter
        self.quote = quote
        self.escape = escape
        self.null_values = None if null_values is None else list(null_values)
        self.encoding = encoding
        self.max_record_bytes = whole(max_record_bytes, "Csv: max_record_bytes")

    def splits(self, parallelism: int) -> list[Split]:
        files = find_files(self.patterns, "Csv")
        shown = self._shown(files[0])
        found: dict[str, list[str]] = {path: self._names_of(path) for path in files[1:]}
        found[files[0]] = shown.names
        check_schemas("Csv", {path: pa.schema([(name, pa.null()) for name in found[path]]) for path in files})
        unknown = [name for name in [*(self.columns or ()), *self._asked()] if name not in shown.names]
        if unknown:
            raise SourceError(
                f"Csv: {files[0]!r} has no column {', '.join(map(repr, unknown))}; it has {', '.join(shown.names)}"
            )
        splits = []
        for path in files:
            mark = mark_of(path, "Csv")
            bytes_ = mark.size * TEXT_RATIO if _is_packed(path) else mark.size
            splits.append(Split(path, CsvFile(path, shown, mark), weight=float(max(1, bytes_))))
        return splits

    def reader(self, splits: list[Split], context: SourceContext) -> CsvReader:
        return CsvReader(self, splits, context.errors)

    def fields(self) -> list[str]:
        """Returns the columns that are read. Raises SourceError when the first file cannot be read."""
        return self.columns or self._names_of(find_files(self.patterns, "Csv")[0])

    def sample(self, rows: int) -> Any:
        """Returns a sample of the rows; see Source.sample."""
        reader = self.reader(self.splits(1)[:1], SourceContext("sample", 0, 1, ErrorHandler("sample", "skip")))
        parts: list[Any] = []
        try:
            while rows > 0 and not reader.finished:
                if len(part := reader.read_arrow(rows)):
                    parts.append(part)
                    rows -= len(part)
        finally:
            reader.close()
        return together(parts) if parts else None

    def describe(self) -> str:
        text = ", ".join(map(repr, self.patterns))
        if self.columns is not None:
            text += f", columns={self.columns!r}"
        return f"Csv({text})"

    def __repr__(self) -> str:
        return self.describe()

    # --- how files are read --------------------------------------------------------------------------------------

    def parse_options(self, bad: Callable[[Any], str] | None = None) -> csv.ParseOptions:
        """Returns pyarrow's options that say how rows are told apart. `bad` is called for rows of a wrong length."""
        return csv.ParseOptions(
            delimiter=self.delimiter,
            quote_char=self.quote or False,
            double_quote=self.quote is not None and self.escape is None,
            escape_char=self.escape or False,
            newlines_in_values=self.quote is not None or self.escape is not None,
            invalid_row_handler=bad,
        )

    def convert_options(self, schema: pa.Schema, *, typed: bool) -> csv.ConvertOptions:
        """Returns pyarrow's options that say what becomes of fields. Without `typed`, fields become their bytes, or
        null where a field may be None."""
        return csv.ConvertOptions(
            column_types=schema if typed else {name: pa.binary() for name in schema.names},
            null_values=[""] if self.null_values is None else self.null_values,
            strings_can_be_null=not typed or self.null_values is not None,
            quoted_strings_can_be_null=False,
            include_columns=self.columns if typed else None,
        )

    def open(
        self,
        path: str,
        place: str,
        parse: csv.ParseOptions,
        convert: csv.ConvertOptions,
        known: list[str] | None = None,
        keep: Callable[[Recorded], object] = lambda recorded: None,
    ) -> Any:
        """Opens a reader of the record batches of a file, which lies at `place`. `known` has its columns, as they were
        found before. `keep` gets what records the content as it is read."""
        with _content(path, place) as looked:
            head = looked.read(self.max_record_bytes)
            whole = not looked.read(1)
        recorded = Recorded(io.BytesIO(head) if whole else _content(path, place))
        keep(recorded)
        if whole and not head.strip() and self.header is not True:
            names = ["_1"] if self.header is False else self.header
            return pa.RecordBatchReader.from_batches(pa.schema([(name, pa.null()) for name in names]), [])
        # Where the only line has no end, pyarrow sees no row. A blank line more is none.
        file: Any = io.BytesIO(recorded.read() + self._line_end) if whole else recorded
        if codecs.lookup(self.encoding).name != "utf-8":
            file = pa.transcoding_input_stream(pa.PythonFile(file, mode="r"), self.encoding, "utf8")
        read = csv.ReadOptions(
            use_threads=False,
            block_size=max(self.max_record_bytes, len(head) + 4),
            column_names=None if self.header is True else known or self.header or None,
            autogenerate_column_names=self.header is False and known is None,
        )
        return csv.open_csv(_WholeLineEnds(file), read, parse, convert)

    @property
    def _line_end(self) -> bytes:
        """Returns the bytes of a line end in the encoding, without the byte order mark that some put first."""
        return "\n\n".encode(self.encoding)[len("\n".encode(self.encoding)) :]

    def _names_of(self, path: str) -> list[str]:
        return list(self._shown(path).names)

    def _shown(self, path: str) -> pa.Schema:
        """Returns all columns of a file, with the types that the user gave or that the first rows show."""
        asked = self.types if isinstance(self.types, dict) else {}
        convert = csv.ConvertOptions(
            column_types={name: type for name, type in asked.items() if not self._is_datetime(name)},
            null_values=[""] if self.null_values is None else self.null_values,
            strings_can_be_null=self.null_values is not None,
            quoted_strings_can_be_null=False,
        )
        parse = self.parse_options(lambda row: "skip")
        try:
            with reading(path, self.max_record_bytes):
                found = self.open(path, path, parse, convert)
        except _Mistyped:  # the types that were asked for do not fit the first rows; what others are is to be found out
            convert.column_types = {name: pa.binary() for name in self._asked()}
            with reading(path, self.max_record_bytes):
                found = self.open(path, path, parse, convert)
        fields = self._named(found.schema)
        texts = [i for i, field in enumerate(fields) if self._is_datetime(field.name) and _is_text(field.type)]
        if texts:  # not all of the first values are of one kind: maybe a bad one is among them
            with reading(path, self.max_record_bytes):
                first = found.read_next_batch()
            for i in texts:
                if compute.any(compute.match_substring_regex(first.column(i), _HAS_OFFSET)).as_py():
                    fields[i] = fields[i].with_type(pa.timestamp("us", "UTC"))
        return pa.schema([(field.name, self._type_of(field)) for field in fields])

    def _named(self, schema: pa.Schema) -> list[pa.Field]:
        if self.header is not False:
            return list(schema)
        return [field.with_name(f"_{i}") for i, field in enumerate(schema, 1)]

    def _is_datetime(self, name: str) -> bool:
        return self._datetimes is None or name in self._datetimes

    def _type_of(self, field: pa.Field) -> pa.DataType:
        if self._is_datetime(field.name):
            return pa.timestamp("us", "UTC" if pa.types.is_timestamp(field.type) and field.type.tz else None)
        if isinstance(self.types, dict):
            asked = self.types.get(field.name)
        else:
            asked = self.types
        if asked is not None:
            return asked
        is_ = pa.types
        if is_.is_null(field.type) or is_.is_binary(field.type):  # no value, or one that is not valid text
            return pa.string()
        if is_.is_timestamp(field.type) and field.type.unit == "ns":  # which Python does not have
            return pa.string()
        return field.type

    def _asked(self) -> list[str]:
        return list(self.types) if isinstance(self.types, dict) else []


@dataclass(frozen=True)
class CsvFile:
    """Names one file and all of its columns."""

    path: str
    schema: pa.Schema
    mark: FileMark


@dataclass(frozen=True)
class _Bad:
    """Stands for a row that cannot be read."""

    row: int  # counted from 0, without the header
    record: Any
    problem: str


class _Mistyped(Exception):
    """A value is not of its column's type."""


class CsvReader(SequentialReader, ColumnReader):
    """Reads files one after the other."""

    paced = False

    def __init__(self, source: Csv, splits: list[Split], errors: ErrorHandler) -> None:
        self._source = source
        self._errors = errors
        self._header_rows = 1 if source.header is True else 0
        self._waiting = deque(splits)
        self._offsets: dict[str, Any] = {split.name: split.offset for split in splits}
        self._split: Split | None = None
        self._batches: Generator[pa.RecordBatch, None, None] = self._read()
        self._batch: pa.RecordBatch | None = None
        self._at = 0  # the first row of the batch that was not taken
        self._row = 0  # the same, counted in the file
        self._recorded: Recorded | None = None  # the content of the file
        self._known: Beginning | None = None  # what the file must begin with, because it was read before
        self._blocks = 0  # the number of batches that the file has given
        self._rows_read = self._bytes_read = 0  # of whole batches
        self._skip = 0  # rows before this were read by who read the file before
        self._bad: deque[_Bad] = deque()  # rows that are still to be passed, in order
        self._typed = True
        self.finished = not splits

    def read(self, limit: int) -> list[Any]:
        piece = self._next(limit)
        return [] if piece is None else list(piece.to_pylist())

    def read_arrow(self, limit: int) -> Any:
        """Returns rows as a RecordBatch; see ColumnReader.read_arrow."""
        piece = self._next(limit)
        return pa.RecordBatch.from_pylist([]) if piece is None else piece

    def backlog(self) -> int:
        # Read once, because the loop's thread may change it meanwhile.
        split, batch, recorded, bad = self._split, self._batch, self._recorded, len(self._bad)
        mean = self._bytes_read / self._rows_read if self._rows_read else LINE_BYTES
        left = sum(max(0.0, one.weight / mean - (one.offset or 0)) for one in tuple(self._waiting))
        if split is not None and recorded is not None:
            size = recorded.size if recorded.ended else split.weight
            here = max(0.0, size - self._consumed(recorded)) / mean + bad
            if batch is not None:
                here += max(0, batch.num_rows - self._at)
            left += max(0.0, here - max(0, self._skip - self._row))
        return int(left)

    def _consumed(self, recorded: Recorded) -> int:
        """Returns about how many bytes the batches had that the file has given. More may have been read ahead."""
        return min(recorded.size, self._blocks * self._source.max_record_bytes)

    def offsets(self) -> dict[str, Any]:
        self._mark_offset()
        return dict(self._offsets)

    def _mark_offset(self) -> None:
        """Adds to the present file's offset what the file begins with, if the offset is of rows that were read here."""
        split, recorded = self._split, self._recorded
        if split is None or recorded is None:
            return
        rows = self._offsets[split.name]
        if type(rows) is int and rows <= self._row:
            self._offsets[split.name] = RowPosition.of(rows, recorded.beginning())

    def close(self) -> None:
        self._mark_offset()  # offsets() must still be right afterwards
        self._batches.close()
        self._batch = None
        self._waiting.clear()
        self.finished = True

    def _next(self, limit: int) -> pa.RecordBatch | None:
        while not self.finished:
            if self._split is None:
                self._begin()
                continue
            self._pass_bad()
            batch = self._batch
            if batch is None or self._at == batch.num_rows:
                self._advance()
                continue
            count = batch.num_rows - self._at
            if self._bad:
                count = min(count, self._bad[0].row - self._row)
            if self._row < self._skip:
                count = min(count, self._skip - self._row)
                self._at += count
                self._row += count
                continue
            piece = batch.slice(self._at, min(count, limit))
            self._at += piece.num_rows
            self._row += piece.num_rows
            self.split = self._split.name
            self._offsets[self.split] = self._row
            return piece
        return None

    def _begin(self) -> None:
        if not self._waiting:
            self.finished = True
            return
        self._split = split = self._waiting.popleft()
        self._typed = True
        self._known = split.offset.beginning if isinstance(split.offset, RowPosition) else None
        self._start(split.offset or 0)

    def _start(self, skip: int) -> None:
        """Reads the file from its beginning."""
        self._skip = skip
        self._row = 0
        self._batch = None
        self._recorded = None
        self._blocks = 0
        self._bad.clear()
        self._batches = self._read()

    def _advance(self) -> None:
        """Prepares the next batch, or ends the file."""
        self._batch = None
        self._at = 0
        try:
            batch = next(self._batches, None)
        except _Mistyped as error:
            if not self._typed:
                assert self._split is not None
                raise SourceError(f"Csv: cannot read {self._split.payload.path!r}: {error}") from error
            self._typed = False
            if self._recorded is not None and (self._known is None or self._known.size < self._recorded.size):
                self._known = self._recorded.beginning()
            self._start(max(self._row, self._skip))
            return
        if batch is None:
            if self._bad:  # all rows that are left
                self._row = self._bad[0].row
            else:
                self._mark_offset()
                self._split = self._recorded = None
            return
        self._count(batch)
        passed_over = self._row + batch.num_rows + len(self._bad) <= self._skip
        self._batch = batch if self._typed or passed_over else self._with_types(batch)

    def _count(self, batch: pa.RecordBatch) -> None:
        recorded = self._recorded
        assert recorded is not None
        before = self._consumed(recorded)
        self._blocks += 1
        self._bytes_read += self._consumed(recorded) - before
        self._rows_read += batch.num_rows + len(self._bad)

    def _pass_bad(self) -> None:
        """Hands over the unreadable rows that come next to the error policy."""
        assert self._split is not None
        while self._bad and self._bad[0].row <= self._row:
            bad = self._bad.popleft()
            self._row = bad.row + 1
            if bad.row >= self._skip:
                self._offsets[self._split.name] = self._row
                where = f"{self._split.payload.path}, row {bad.row + 1 + self._header_rows}"
                self._errors.handle(bad.record, CodecError(f"{where}: {bad.problem}"))

    def _read(self) -> Generator[pa.RecordBatch, None, None]:
        assert self._split is not None
        file: CsvFile = self._split.payload
        source = self._source
        place = find_again(file.path, file.mark, "Csv")

        def bad(row: Any) -> str:
            problem = f"it has {row.actual_columns} fields, and the file {row.expected_columns} columns"
            self._bad.append(_Bad(row.number - 1 - self._header_rows, row.text, problem))
            return "skip"

        def keep(recorded: Recorded) -> None:
            self._recorded = recorded

        convert = source.convert_options(file.schema, typed=self._typed)
        with reading(file.path, source.max_record_bytes):
            if self._known is not None:
                with _content(file.path, place) as content:
                    check_beginning(content, self._known, file.path, "Csv")
            yield from source.open(file.path, place, source.parse_options(bad), convert, file.schema.names, keep)

    # --- where a value is not of its column's type ---------------------------------------------------------------

    def _with_types(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the rows of a batch of bytes that have the types of their columns. The other rows become bad rows."""
        assert self._split is not None
        good: list[pa.RecordBatch] = []
        wrong: list[tuple[int, str]] = []

        def part(first: int, count: int) -> None:
            try:
                good.append(self._converted(batch.slice(first, count)))
            except _Mistyped as error:
                if count == 1:
                    wrong.append((first, str(error)))
                else:
                    part(first, count // 2)
                    part(first + count // 2, count - count // 2)

        part(0, batch.num_rows)
        if wrong:
            self._bad = deque(self._merged(batch, wrong))
        return together(good) if good else batch.slice(0, 0)

    def _merged(self, batch: pa.RecordBatch, wrong: list[tuple[int, str]]) -> list[_Bad]:
        """Merges the bad rows with those of a batch that begins at the present row."""
        assert self._split is not None
        # An empty field is a text where the column has texts, as in the rows that can be read.
        texts = [] if self._source.null_values is not None else self._split.payload.schema
        nothing = {field.name: "" for field in texts if pa.types.is_string(field.type)}
        out = list(self._bad)
        known = {bad.row for bad in out}
        row, passed = self._row - 1, -1
        for index, problem in wrong:
            while passed < index:
                row += 1
                passed += row not in known
            record = {
                name: nothing.get(name) if value is None else value.decode("utf-8", "replace")
                for name, value in batch.slice(index, 1).to_pylist()[0].items()
            }
            out.append(_Bad(row, record, problem))
        return sorted(out, key=lambda bad: bad.row)

    def _converted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the same rows with their types. The rows are written as text again, because pyarrow converts only
        what it parses."""
        assert self._split is not None
        schema: pa.Schema = self._split.payload.schema
        source = self._source
        null = (source.null_values or [""])[0].encode()
        data = b"".join(
            b",".join(null if value is None else b'"' + value.replace(b'"', b'""') + b'"' for value in row.values())
            + b"\n"
            for row in batch.to_pylist()
        )
        try:
            table = csv.read_csv(
                io.BytesIO(data),
                csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=schema.names),
                csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
                source.convert_options(schema, typed=True),
            )
        except pa.ArrowInvalid as error:
            raise _Mistyped(_said(error, schema)) from error
        assert table.num_rows == batch.num_rows
        batches = table.combine_chunks().to_batches()
        return batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)


def _is_packed(path: str) -> bool:
    return path.lower().endswith(".gz")


class _WholeLineEnds(Content):
    """Content in UTF-8 of which no piece but the last one ends with a carriage return.

    pyarrow's reader drops a line feed at the beginning of a piece when the piece before ended with a carriage return,
    even where both belong to a value in quotes.
    """

    def __init__(self, content: Any) -> None:
        super().__init__(content)
        self._kept = b""

    def read(self, size: int) -> bytes:
        """Reads on. `size` is at least 2, and at least one byte is returned before the end."""
        data = self._kept + bytes(self._content.read(size - len(self._kept)))
        while data.endswith(b"\r"):
            # The rest may be a carriage return alone, so that nothing would be left to return.
            if len(data) > 1:
                self._kept = b"\r"
                return data[:-1]
            more = bytes(self._content.read(size - 1))
            if not more:
                break
            data += more
        self._kept = b""
        return data


def _content(path: str, place: str) -> Any:
    """Opens the content of a file, which lies at `place`."""
    return pa.input_stream(place, compression="gzip" if _is_packed(path) else None)


@contextmanager
def reading(path: str, max_record_bytes: int | None = None) -> Iterator[None]:
    """Raises pyarrow's errors as Penstock's errors, and as _Mistyped where reading the file as text may help."""
    try:
        yield
    except pa.ArrowInvalid as error:
        text = str(error)
        if "In CSV column #" in text or "invalid UTF8" in text:  # "CSV conversion error" is not said of decimals
            raise _Mistyped(text) from error
        if "straddles two block boundaries" in text:
            raise SourceError(
                f"Csv: a row of {path!r} is longer than {max_record_bytes or _RECORD_BYTES:,} bytes. Is a quote "
                "missing there, or is quote=None right? If it is that long, raise max_record_bytes."
            ) from error
        if "Empty CSV file" in text:
            raise SourceError(
                f"Csv: {path!r} is empty, and so has no header; narrow the pattern, or give header=[names]"
            ) from error
        raise SourceError(f"Csv: cannot read {path!r}: {text}") from error
    except (pa.ArrowException, OSError, UnicodeError) as error:
        raise SourceError(f"Csv: cannot read {path!r}: {error}") from error


def _said(error: Exception, schema: pa.Schema) -> str:
    match = _WHERE.fullmatch(str(error))
    if match is None:
        return str(error)
    name, said = schema.names[int(match.group(1))], match.group(2)
    for wrong, where, right in (
        ("expected no zone offset in", "where values have one", 'pyarrow.timestamp("us", "UTC")'),
        ("expected a zone offset in", "where values have none", 'pyarrow.timestamp("us")'),
    ):
        if wrong in said:
            said = f"{said.split('. If these timestamps')[0]}; {where}, give types={{{name!r}: {right}}}"
    return f"column {name!r}: {said}"


def _is_text(type: pa.DataType) -> bool:
    return bool(pa.types.is_string(type) or pa.types.is_binary(type))


def _names(names: Any, option: str, wanted: str) -> list[str]:
    given = [] if isinstance(names, str) or not isinstance(names, Sequence) else list(names)
    if not given or not all(isinstance(name, str) and name for name in given) or len(set(given)) != len(given):
        raise FlowError(f"Csv: {option} must be {wanted}, each once, got {shorten(names)}")
    return given


def _types(types: Any) -> dict[str, pa.DataType] | pa.DataType | None:
    if types is None:
        return None
    if isinstance(types, Mapping):
        return {name: _type(type, f"types[{name!r}]") for name, type in types.items()}
    return _type(types, "types")


def _type(type: Any, what: str) -> pa.DataType:
    if isinstance(type, pa.DataType):
        return type
    try:
        return _TYPES[type]
    except (KeyError, TypeError):
        known = ", ".join(known.__name__ for known in _TYPES)
        raise FlowError(f"Csv: {what} must be a pyarrow.DataType or one of {known}, got {shorten(type)}") from None
