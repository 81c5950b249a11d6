"""CSV files as a source: dicts, one a row, or Arrow columns.

A quoted field may hold line ends, so a file is divided into blocks of whole rows from its beginning on, and is one
split. pyarrow parses a block at once. If a row of it cannot be read, the block is halved until this row is alone: it is
a failed record of its own. An offset is a position in bytes after a row, as in TextFiles.

It must never lose or change another row on account of a bad one, nor let one file's first rows say what a column is
when another file's first rows say something else.
"""

from __future__ import annotations

import codecs
import datetime as dt
import decimal
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import compute, csv

from penstock.runtime.errors import CodecError, FlowError, SourceError, shorten
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.sources.base import ColumnReader, Source, SourceContext, Split, together
from penstock.runtime.sources.blocks import FileRange, LineBlocks
from penstock.runtime.sources.csv_rows import RowBlocks, RowEnds, is_packed
from penstock.runtime.sources.files import TEXT_RATIO, LineReader
from penstock.runtime.sources.gunzip import CorruptGzip
from penstock.runtime.sources.lines import Block, Unreadable, readable
from penstock.runtime.sources.marks import mark_of
from penstock.runtime.sources.paths import Patterns, as_patterns, find_files
from penstock.runtime.sources.rows import check_schemas
from penstock.runtime.units import flag, whole

_TYPES: dict[Any, pa.DataType | None] = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    bytes: pa.binary(),
    decimal.Decimal: pa.decimal128(38, 18),
    dt.date: pa.date32(),
    dt.datetime: None,  # the first values show whether they have offsets
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
    type for all. What is not named has the type that the first rows of all files show (256 KiB of each): whole numbers,
    numbers, true and false, dates and times are such, all else is text. Say what must stay: "007" is the number 7. A
    column without a value in all these rows is None, and a later value in it is a failed record.
    A column of the type datetime has aware datetimes in UTC if any of the first values has an offset ("Z", "+02:00"),
    and then a value without one is a failed record; else it has naive datetimes, which `watermark` refuses, and a value
    with an offset is a failed record. pyarrow.timestamp("us", "UTC") and pyarrow.timestamp("us") leave no choice.
    `widen`: what happens when the first rows of a file do not fit the type that those of the files before it show.
    False: a SourceError before the start. True: the column has the wider type: whole numbers become numbers, dates
    become times, and all else becomes text.
    `null_values`: the words that stand for None, where they are not quoted, in all columns (None: an empty field is
    None in columns that are not text, and "" in those that are).
    `delimiter`, `quote` (None: there are no quotes), `escape` (None: a quote in quotes is doubled): one character each.
    `encoding`: of the files; a byte order mark of UTF-8 is dropped.
    `max_record_bytes`: the longest row, so that memory stays bounded.

    Blank lines are passed over. A quoted field may hold delimiters, doubled quotes and line ends, which are "\\n",
    "\\r\\n" or "\\r". What is appended to a file after the job started is not read, save the rest of a row that was
    begun, and what is appended to a gzip file or one in another encoding than UTF-8.

    Errors: SourceError before the start when a file is missing or has other columns than the first one, all files lack
    a header, or a column is unknown; while running when one has a row that is too long, or when a job that goes back
    finds another file under its name (one that was only renamed, in its directory, is read on). A row with too many or
    too few fields is a failed record (its text), and so is one with a value that is not of its column's type (a dict of
    text), and, as a whole, the rest of a gzip file after a damaged place (the file's path): the operator's on_error
    decides, and the error names the file and the position of the row in bytes.

    Offset: the position in bytes after the last row; in a gzip file or one in another encoding than UTF-8 that in the
    content as UTF-8, which a recovery reads up to it again; -1 after a damaged place.
    """

    hands_columns = True

    def __init__(
        self,
        patterns: Patterns,
        *,
        header: bool | Sequence[str] = True,
        columns: Sequence[str] | None = None,
        types: Mapping[str, Any] | Any | None = None,
        widen: bool = False,
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
        self.widen = flag(widen, "Csv: widen")
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
        files = self._files()
        names, schema = self._columns(files)
        splits = []
        for file in files:
            assert file.mark is not None
            weight = file.mark.size * (TEXT_RATIO if is_packed(file.path) else 1)
            payload = CsvFile(file.path, file.start, file.end, file.mark, names, schema)
            splits.append(Split(file.path, payload, weight=float(max(1, weight))))
        return splits

    def reader(self, splits: list[Split], context: SourceContext) -> CsvReader:
        return CsvReader(self, splits, context)

    def fields(self) -> list[str]:
        """Returns the columns that are read. Raises SourceError when no file shows which columns there are."""
        if self.columns is not None:
            return self.columns
        files = self._files()
        return next((names for names, _ in map(self._beginning, files) if names), None) or self._nameless(files)

    def sample(self, rows: int) -> Any:
        """Returns a sample of the rows; see Source.sample."""
        reader = self.reader(self.splits(1), SourceContext("sample", 0, 1, ErrorHandler("sample", "skip")))
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

    # --- how rows are parsed -------------------------------------------------------------------------------------

    def parse(
        self,
        data: bytes,
        names: list[str] | None,
        types: Any,
        columns: list[str] | None = None,
        bad: Callable[[Any], str] | None = None,
    ) -> pa.RecordBatch:
        """Parses whole rows. `names` are of all columns (None: the first row has them), `columns` of those that are
        wanted (None: all), `types` of those that have a type already; `bad` is called for rows of a wrong length.
        Raises pyarrow.ArrowInvalid when a row cannot be read."""
        binary = types is _BYTES
        if data.startswith(codecs.BOM_UTF8):
            data = b"\n" + data  # a row may begin with what is no byte order mark here, and would be dropped
        table = csv.read_csv(
            io.BytesIO(data),
            csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=names),
            csv.ParseOptions(
                delimiter=self.delimiter,
                quote_char=self.quote or False,
                double_quote=self.quote is not None and self.escape is None,
                escape_char=self.escape or False,
                newlines_in_values=self.quote is not None or self.escape is not None,
                invalid_row_handler=bad,
            ),
            csv.ConvertOptions(
                column_types={name: pa.binary() for name in names or ()} if binary else types,
                null_values=[""] if self.null_values is None else self.null_values,
                strings_can_be_null=binary or self.null_values is not None,
                quoted_strings_can_be_null=False,
                include_columns=columns,
            ),
        )
        batches = table.combine_chunks().to_batches()
        return batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)

    # --- which columns there are, and of which types -------------------------------------------------------------

    def _files(self) -> list[FileRange]:
        utf8 = codecs.lookup(self.encoding).name == "utf-8"
        marks = {path: mark_of(path, "Csv") for path in find_files(self.patterns, "Csv")}
        return [
            FileRange(path, 0, mark.size if utf8 and not is_packed(path) else None, mark)
            for path, mark in marks.items()
        ]

    def _columns(self, files: list[FileRange]) -> tuple[list[str], pa.Schema]:
        """Returns the names of all columns, and the types of the columns to read, as the first rows of all files show
        them."""
        known: dict[str, pa.Schema] = {}  # of the first file that has columns
        shown: dict[str, _Shown] = {}
        for file in files:
            names, rows = self._beginning(file)
            if not names:
                continue
            mine = {file.path: pa.schema([(name, pa.null()) for name in names])}
            if not known:
                self._check_columns(file.path, names)
                known = mine
                shown = {name: _Shown(name) for name in self.columns or names}
            check_schemas("Csv", known | mine)
            for name, type in self._types_in(file.path, names, rows):
                if self._asked(name) is None:
                    shown[name].add(type, file.path, self.widen)
                elif _has_zone(type):
                    shown[name].type = type
        if not known:
            names = self._nameless(files)
            return names, pa.schema([(name, pa.null()) for name in names])
        schema = pa.schema([(name, self._type(name, one.type)) for name, one in shown.items()])
        return next(iter(known.values())).names, schema

    def _nameless(self, files: list[FileRange]) -> list[str]:
        """Returns the names of the columns when no file has a row."""
        if self.header is False:
            return ["_1"]
        raise SourceError(
            f"Csv: {files[0].path!r} is empty, and so has no header; narrow the pattern, or give header=[names]"
        )

    def _check_columns(self, path: str, names: list[str]) -> None:
        asked = list(self.types) if isinstance(self.types, dict) else []
        unknown = [name for name in [*(self.columns or ()), *asked] if name not in names]
        if unknown:
            raise SourceError(f"Csv: {path!r} has no column {', '.join(map(repr, unknown))}; it has {', '.join(names)}")

    def _beginning(self, file: FileRange) -> tuple[list[str], bytes]:
        """Returns the names of a file's columns (none: nothing is in it), and its first rows."""
        blocks = self.blocks(file, None)
        rows = b""
        try:
            rows = blocks.next()
        except CorruptGzip as error:  # a failed record of the job, if at least the header is there
            if not blocks.header:
                raise SourceError(f"Csv: cannot read {file.path!r}: {error}") from error
        finally:
            blocks.close()
        if isinstance(self.header, list):
            return self.header, rows
        row = blocks.header if self.header else next((rows[start:end] for start, end in blocks.rows.of(rows)), b"")
        if not row:
            return [], b""
        try:
            names = self.parse(row + b"\n", None, None).schema.names
        except (pa.ArrowException, UnicodeError) as error:
            raise SourceError(f"Csv: cannot read the first row of {file.path!r}: {error}") from error
        return list(names) if self.header else [f"_{i + 1}" for i in range(len(names))], rows

    def _types_in(self, path: str, names: list[str], rows: bytes) -> Iterable[tuple[str, pa.DataType]]:
        """Finds the types that the first rows of a file show, of columns whose type is to be found out."""
        given = {name: pa.binary() for name in names if self._asked(name) not in (None, dt.datetime)}
        if not rows.strip(b"\r\n") or len(given) == len(names):
            return
        try:
            found = self.parse(rows, names, given, self.columns, lambda row: "skip")
        except (pa.ArrowException, UnicodeError) as error:
            raise SourceError(f"Csv: cannot read the first rows of {path!r}: {error}") from error
        for name, column in zip(found.schema.names, found.columns, strict=True):
            type = column.type
            if self._asked(name) is dt.datetime:
                # Where not all are times, maybe a bad value is among them.
                if pa.types.is_string(type) and compute.any(compute.match_substring_regex(column, _HAS_OFFSET)).as_py():
                    type = pa.timestamp("us", "UTC")
            elif pa.types.is_binary(type) or (pa.types.is_timestamp(type) and type.unit == "ns"):
                type = pa.string()  # text that is not valid, or nanoseconds, which Python does not have
            yield name, type

    def _asked(self, name: str) -> Any:
        """Returns the type that the user gave for a column: a pyarrow.DataType, datetime or None."""
        return self.types.get(name) if isinstance(self.types, dict) else self.types

    def _type(self, name: str, shown: pa.DataType) -> pa.DataType:
        asked = self._asked(name)
        if asked is dt.datetime:
            return pa.timestamp("us", "UTC" if _has_zone(shown) else None)
        return asked or shown

    def blocks(self, file: FileRange, offset: int | None) -> RowBlocks:
        """Opens a file."""
        ends = RowEnds(self.delimiter, self.quote, self.escape)
        return RowBlocks(file, offset, ends, self.header is True, self.encoding, self.max_record_bytes)


_BYTES: Any = object()  # as types: fields become their bytes, or None where a field may be None


class _Shown:
    """Gathers the type of one column from the first rows of files."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._where = ""
        self.type = pa.null()

    def add(self, type: pa.DataType, path: str, widen: bool) -> None:
        """Adds the types that the first rows of one more file show. Raises SourceError when they do not fit."""
        wider = _wider(self.type, type)
        if wider != self.type and not pa.types.is_null(self.type) and not widen:
            known = {type: kind.__name__ for kind, type in _TYPES.items()} | {pa.timestamp("s"): "datetime"}
            raise SourceError(
                f"Csv: column {self._name!r} has the type {self.type} in the first rows of {self._where!r}, and "
                f"{type} in those of {path!r}. Say which type it has, as in types={{{self._name!r}: "
                f"{known.get(wider, wider)}}}, or let the column have the wider type of all files with widen=True."
            )
        if wider != self.type:
            self.type, self._where = wider, path


def _has_zone(type: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(type) and type.tz)


def _wider(a: pa.DataType, b: pa.DataType) -> pa.DataType:
    """Returns the type that has the values of both types."""
    if a == b or pa.types.is_null(b):
        return a
    if pa.types.is_null(a):
        return b
    for both in ({pa.int64(), pa.float64()}, {pa.timestamp("s"), pa.date32()}):
        if {a, b} == both:
            return pa.float64() if pa.float64() in both else pa.timestamp("s")
    return pa.string()


@dataclass(frozen=True)
class CsvFile(FileRange):
    """Names one file, all of its columns, and the types of the columns to read."""

    names: list[str] | None = None
    schema: pa.Schema | None = None


class CsvReader(LineReader, ColumnReader):
    """Reads files one after the other."""

    def __init__(self, source: Csv, splits: list[Split], context: SourceContext) -> None:
        super().__init__(splits, context, None, source.max_record_bytes, "Csv")
        self._csv = source
        self._rows = RowEnds(source.delimiter, source.quote, source.escape)

    def read_arrow(self, limit: int) -> Any:
        """Returns rows as a RecordBatch; see ColumnReader.read_arrow."""
        while not self.finished:
            block, split = self._block, self._split
            if block is not None and split is not None and self._next < len(block.records):
                rows = self._take(block, limit)
                if not isinstance(rows, list):
                    return rows
                return pa.RecordBatch.from_pylist(readable(rows, self._context.errors), split.payload.schema)
            self._advance()
        return pa.RecordBatch.from_pylist([])

    def _open(self, split: Split) -> LineBlocks:
        return self._csv.blocks(split.payload, split.offset)

    def _decoded(self, split: Split, data: bytes, base: int, columns: bool) -> Block:
        try:
            return Block(base, data, self._parse(split.payload, data), clean=True, ends=self._ends)
        except pa.ArrowInvalid:
            records = self._each(split.payload, data, base, self._rows.of(data))
            return Block(base, data, records, clean=False, ends=self._ends)
        except pa.ArrowException as error:  # a type that no text can be turned into
            raise SourceError(f"Csv: cannot read {split.payload.path!r}: {error}") from error

    def _ends(self, data: bytes) -> list[int]:
        return [end for _, end in self._rows.of(data)]

    def _parse(self, file: CsvFile, rows: bytes) -> pa.RecordBatch:
        if not rows.strip(b"\r\n"):
            return pa.RecordBatch.from_pylist([], file.schema)
        return self._csv.parse(rows, file.names, file.schema, self._csv.columns)

    def _each(self, file: CsvFile, data: bytes, base: int, rows: list[tuple[int, int]]) -> list[Any]:
        """Returns the rows that can be read, and an Unreadable for each of the others."""
        if not rows:
            return []
        try:
            return list(self._parse(file, data[rows[0][0] : rows[-1][1]]).to_pylist())
        except pa.ArrowInvalid as error:
            if len(rows) > 1:
                half = len(rows) // 2
                return self._each(file, data, base, rows[:half]) + self._each(file, data, base, rows[half:])
            (start, end) = rows[0]
            record, problem = self._bad(file, data[start:end], error)
            where = f"{file.path}, row at byte {base + start}"
            return [Unreadable(record, CodecError(f"{where}: {problem}"))]

    def _bad(self, file: CsvFile, row: bytes, error: Exception) -> tuple[Any, str]:
        """Returns the record that stands for an unreadable row, and the error in the row."""
        assert file.schema is not None
        lengths: list[Any] = []

        def bad(row: Any) -> str:
            lengths.append((row.actual_columns, row.expected_columns))
            return "skip"

        try:
            fields = self._csv.parse(row, file.names, _BYTES, bad=bad).to_pylist()
        except pa.ArrowInvalid:
            fields = []
        if lengths or not fields:
            problem = f"it has {lengths[0][0]} fields, and the file {lengths[0][1]} columns" if lengths else str(error)
            return row.rstrip(b"\r\n").decode("utf-8", "replace"), problem
        # An empty field is a text where the column has texts, as in the rows that can be read.
        texts = [] if self._csv.null_values is not None else file.schema
        nothing = {field.name: "" for field in texts if pa.types.is_string(field.type)}
        record = {
            name: nothing.get(name) if value is None else value.decode("utf-8", "replace")
            for name, value in fields[0].items()
        }
        return record, _said(error, file.schema)


def _said(error: Exception, schema: pa.Schema) -> str:
    match = _WHERE.fullmatch(str(error))
    if match is None:
        return str(error)
    name, said = schema.names[int(match.group(1))], match.group(2)
    if pa.types.is_null(schema.field(name).type):
        return (
            f"column {name!r}: it had no value in the first rows of the files, so that its type is not known; give it, "
            f"as in types={{{name!r}: str}}"
        )
    for wrong, where, right in (
        ("expected no zone offset in", "where values have one", 'pyarrow.timestamp("us", "UTC")'),
        ("expected a zone offset in", "where values have none", 'pyarrow.timestamp("us")'),
    ):
        if wrong in said:
            said = f"{said.split('. If these timestamps')[0]}; {where}, give types={{{name!r}: {right}}}"
    return f"column {name!r}: {said}"


def _names(names: Any, option: str, wanted: str) -> list[str]:
    given = [] if isinstance(names, str) or not isinstance(names, Sequence) else list(names)
    if not given or not all(isinstance(name, str) and name for name in given) or len(set(given)) != len(given):
        raise FlowError(f"Csv: {option} must be {wanted}, each once, got {shorten(names)}")
    return given


def _types(types: Any) -> Any:
    if types is None:
        return None
    if isinstance(types, Mapping):
        return {name: _type(type, f"types[{name!r}]") for name, type in types.items()}
    return _type(types, "types")


def _type(type: Any, what: str) -> Any:
    if isinstance(type, pa.DataType):
        return type
    try:
        return _TYPES[type] or type
    except (KeyError, TypeError):
        known = ", ".join(known.__name__ for known in _TYPES)
        raise FlowError(f"Csv: {what} must be a pyarrow.DataType or one of {known}, got {shorten(type)}") from None
