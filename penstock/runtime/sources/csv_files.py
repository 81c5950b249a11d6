"""CSV files as a source: dicts, one a row, or Arrow columns.

A quoted field may hold line ends, so a file is divided into blocks of whole rows from its beginning on, and is one
split. The csv module divides the rows of a block into fields, and pyarrow turns each column of texts into values. If
one of them is no value of its type, the rows are taken one by one: a row that cannot be read is a failed record of its
own. An offset is a position in bytes after a row, as in TextFiles.

It must never lose or change another row on account of a bad one, nor let one file's first rows say what a column is
when another file's first rows say something else.
"""

from __future__ import annotations

import codecs
import datetime as dt
import decimal
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import pyarrow as pa
from pyarrow import compute

from penstock.runtime.errors import CodecError, FlowError, SourceError, shorten
from penstock.runtime.sources.base import ColumnReader, SourceContext, Split, sampled
from penstock.runtime.sources.blocks import FileRange, LineBlocks
from penstock.runtime.sources.csv_rows import Dialect, RowBlocks, is_packed
from penstock.runtime.sources.file_source import FileSource
from penstock.runtime.sources.files import TEXT_RATIO, LineReader
from penstock.runtime.sources.gunzip import CorruptGzip
from penstock.runtime.sources.lines import Block, Unreadable, readable
from penstock.runtime.sources.marks import mark_of
from penstock.runtime.sources.paths import Patterns, find_files
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
_AWARE = pa.timestamp("us", "UTC")
_HAS_OFFSET = re.compile(r"\d{4}-\d{2}-\d{2}[ T]\d{2}.*(Z|[+-]\d{2}(:?\d{2})?)")  # such as "2024-03-01 12:30+02:00"
#: The types that have the values of two others.
_WIDER = ((pa.float64(), {pa.int64(), pa.float64()}), (pa.timestamp("s"), {pa.timestamp("s"), pa.date32()}))
#: The types that texts may show, the narrowest first.
_SHOWN = (
    *(pa.int64(), pa.bool_(), pa.date32(), pa.time32("s"), pa.timestamp("s"), pa.timestamp("s", "UTC"), pa.float64()),
)


class Csv(FileSource[dict[str, Any]]):
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
    `null_values`: the words that stand for None in all columns (None: an empty field is None in columns that are not
    text, and "" in those that are).
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
        super().__init__(patterns)
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
        self._dialect_of = delimiter, quote, escape
        try:
            self.dialect()
        except (TypeError, ValueError) as error:
            raise FlowError(f"Csv: delimiter, quote and escape cannot be used together: {error}") from None
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
        return sampled(self, self.splits(1), rows)

    def dialect(self) -> Dialect:
        """Returns how the files tell fields and rows apart."""
        return Dialect(*self._dialect_of)

    def nulls(self, type: pa.DataType) -> frozenset[str]:
        """Returns the words that stand for None in a column of this type."""
        of_text = pa.types.is_string(type) or pa.types.is_binary(type)
        return frozenset(self.null_values if self.null_values is not None else () if of_text else ("",))

    def converted(self, texts: Sequence[str], type: pa.DataType) -> Any:
        """Returns the values of a column, as a list of texts or an Arrow array. Raises ValueError when a text is no
        value of the type."""
        nulls = self.nulls(type)
        if not nulls.isdisjoint(texts):
            texts = [None if text in nulls else text for text in texts]  # type: ignore[misc]
        if pa.types.is_string(type):
            return texts
        if pa.types.is_binary(type):
            return pa.array([text and text.encode("utf-8", "surrogateescape") for text in texts], type)
        column = compute.utf8_trim_whitespace(pa.array(texts, pa.string()))
        if pa.types.is_null(type):
            if column.null_count < len(column):
                raise ValueError("it had no value in the first rows of the files, so that its type is not known")
            return pa.nulls(len(column))
        if pa.types.is_time(type):  # which Arrow makes of times with a date only
            column = compute.binary_join_element_wise("1970-01-01T", column, "").cast(pa.timestamp(type.unit))
        return column.cast(type)

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
        names: list[str] = []
        nothing = (pa.null(), "")
        shown: dict[str, tuple[pa.DataType, str]] = {}  # the type of a column, and the file that shows it
        first: dict[str, pa.Schema] = {}
        for file in files:
            mine, rows = self._beginning(file)
            if not mine:
                continue
            schema = {file.path: pa.schema([(name, pa.null()) for name in mine])}
            if not names:
                self._check_columns(file.path, mine)
                names, first = mine, schema
            check_schemas("Csv", first | schema)
            for name, type in self._types_in(names, rows):
                shown[name] = self._wider(name, shown.get(name, nothing), (type, file.path))
        names = names or self._nameless(files)
        return names, pa.schema([(each, self._type(each, *shown.get(each, nothing))) for each in self.columns or names])

    def _wider(self, name: str, a: tuple[pa.DataType, str], b: tuple[pa.DataType, str]) -> tuple[pa.DataType, str]:
        """Returns the type that has the values of both types, which two files show of a column, and one of the files.
        Raises SourceError when the first type does not."""
        if a[0] == b[0] or pa.types.is_null(b[0]):
            return a
        if pa.types.is_null(a[0]):
            return b
        wider = next((each for each, both in _WIDER if {a[0], b[0]} == both), pa.string())
        if wider != a[0] and not self.widen:
            known = {type: kind.__name__ for kind, type in _TYPES.items()} | {pa.timestamp("s"): "datetime"}
            raise SourceError(
                f"Csv: column {name!r} has the type {a[0]} in the first rows of {a[1]!r}, and {b[0]} in those of "
                f"{b[1]!r}. Say which type it has, as in types={{{name!r}: {known.get(wider, wider)}}}, or let the "
                "column have the wider type of all files with widen=True."
            )
        return a if wider == a[0] else (wider, b[1])

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
        dialect = self.dialect()
        try:
            data = blocks.header if self.header else rows
            row = next(filter(None, dialect.rows(data.decode("utf-8", "strict" if self.header else "replace"))), [])
        except UnicodeError as error:
            raise SourceError(f"Csv: cannot read the first row of {file.path!r}: {error}") from error
        return row if self.header else [f"_{i + 1}" for i in range(len(row))], rows

    def _types_in(self, names: list[str], rows: bytes) -> Iterator[tuple[str, pa.DataType]]:
        """Finds the types that the first rows of a file show, of columns whose type is to be found out."""
        found = self.dialect().rows(rows.decode("utf-8", "surrogateescape"))
        columns = dict(zip(names, zip(*(row for row in found if len(row) == len(names)), strict=True), strict=False))
        for name in self.columns or names:
            if name in columns and self._asked(name) in (None, dt.datetime):
                yield name, self._type_of(columns[name], self._asked(name))

    def _type_of(self, texts: Sequence[str], asked: Any) -> pa.DataType:
        """Returns the type that the texts of a column show."""
        nulls = self.nulls(pa.null())
        texts = [text for text in texts if text not in nulls]
        if asked is dt.datetime:  # where not all are times, maybe a bad value is among them
            return _AWARE if any(_HAS_OFFSET.fullmatch(text.strip()) for text in texts) else pa.null()
        for type in _SHOWN if texts else (pa.null(),):
            try:
                self.converted(texts, type)
            except ValueError:
                continue
            return type
        return pa.string()

    def _asked(self, name: str) -> Any:
        """Returns the type that the user gave for a column: a pyarrow.DataType, datetime or None."""
        return self.types.get(name) if isinstance(self.types, dict) else self.types

    def _type(self, name: str, shown: pa.DataType, where: str) -> pa.DataType:
        asked = self._asked(name)
        if asked is dt.datetime:
            return shown if where else pa.timestamp("us")
        return asked or shown

    def blocks(self, file: FileRange, offset: int | None) -> RowBlocks:
        """Opens a file."""
        return RowBlocks(file, offset, self.dialect(), self.header is True, self.encoding, self.max_record_bytes)


@dataclass(frozen=True)
class CsvFile(FileRange):
    """Names one file, all of its columns, and the types of the columns to read."""

    names: Sequence[str] = ()
    schema: Any = None


class CsvReader(LineReader, ColumnReader):
    """Reads files one after the other."""

    def __init__(self, source: Csv, splits: list[Split], context: SourceContext) -> None:
        super().__init__(splits, context, None, source.max_record_bytes, "Csv")
        self._csv = source
        self._dialect = source.dialect()

    def read_arrow(self, limit: int) -> Any:
        """Returns rows as a RecordBatch; see ColumnReader.read_arrow."""
        while not self.finished:
            block, split = self._block, self._split
            if block is not None and split is not None and self._next < len(block.records):
                rows = self._take(block, limit)
                if not isinstance(rows, list):
                    return rows
                return pa.RecordBatch.from_pylist(readable(rows, self._context.errors), split.payload.schema)
            self._advance(columns=True)
        return pa.RecordBatch.from_pylist([])

    def _open(self, split: Split) -> LineBlocks:
        return self._csv.blocks(split.payload, split.offset)

    def _decoded(self, split: Split, data: bytes, base: int, columns: bool) -> Block:
        file = split.payload
        try:
            records, clean = self._converted(file, self._rows(data.decode()), columns), True
        except ValueError:
            places = zip(self._rows(data.decode("utf-8", "surrogateescape")), self._dialect.of(data), strict=True)
            records, clean = [self._row(file, row, data[at:end], base + at) for row, (at, end) in places], False
        except pa.ArrowException as error:  # a type that no text can be turned into
            raise SourceError(f"Csv: cannot read {file.path!r}: {error}") from error
        return Block(base, data, records, clean, ends=self._ends)

    def _rows(self, text: str) -> list[list[str]]:
        return [row for row in self._dialect.rows(text) if row]  # blank lines have no fields

    def _ends(self, data: bytes) -> list[int]:
        return [end for _, end in self._dialect.of(data)]

    def _converted(self, file: CsvFile, rows: list[list[str]], as_columns: bool) -> Any:
        """Returns rows as dicts, or as a RecordBatch. Raises ValueError when one of them cannot be read."""
        names, schema = file.names, file.schema
        if odd := set(map(len, rows)) - {len(names)}:
            raise ValueError(f"it has {odd.pop()} fields, and the file {len(names)} columns")
        found = dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(names, ())
        columns = []
        for field in schema:
            try:
                if len(rows) == 1 and not pa.types.is_binary(field.type):
                    found[field.name][0].encode()  # blocks are valid, and of others each row comes alone
                columns.append(self._csv.converted(found[field.name], field.type))
            except ValueError as error:
                said = "invalid UTF8 data" if isinstance(error, UnicodeError) else f"{error}{_remedy(field, error)}"
                raise ValueError(f"column {field.name!r}: {said}") from error
        if as_columns:
            arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
            return pa.RecordBatch.from_arrays(arrays, schema=schema)
        values = [column.to_pylist() if isinstance(column, pa.Array) else column for column in columns]
        return list(map(dict, map(zip, repeat(schema.names), zip(*values, strict=True))))

    def _row(self, file: CsvFile, row: list[str], data: bytes, at: int) -> Any:
        """Returns the record of a row, or an Unreadable."""
        try:
            return self._converted(file, [row], False)[0]
        except ValueError as error:
            record: Any = data.rstrip(b"\r\n").decode("utf-8", "replace")
            if len(row) == len(file.names):
                texts = dict(zip(file.names, row, strict=True))
                record = {
                    field.name: None if text in self._csv.nulls(field.type) else _replaced(text)
                    for field in file.schema
                    for text in (texts[field.name],)
                }
            return Unreadable(record, CodecError(f"{file.path}, row at byte {at}: {error}"))


def _replaced(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _remedy(field: pa.Field, error: ValueError) -> str:
    """Returns the end of the error of a column's value."""
    for wrong, where, right in (
        ("its type is not known", "give it", "str"),
        ("expected no zone offset", "where values have one, give it", 'pyarrow.timestamp("us", "UTC")'),
        ("expected a zone offset", "where values have none, give it", 'pyarrow.timestamp("us")'),
    ):
        if wrong in str(error):
            return f"; {where}, as in types={{{field.name!r}: {right}}}"
    return ""


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
