"""Divides a CSV file into blocks of whole rows, and rows into fields, by the csv module.

A quoted field may hold line ends, so nobody can tell where a row begins without having read all before it: a file is
read from its beginning, or from the end of a row. It must never return part of a row, nor a row that is longer than
allowed.
"""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterator
from io import FileIO
from itertools import pairwise
from typing import Any

from penstock.runtime.errors import SourceError
from penstock.runtime.sources.blocks import FileRange, LineBlocks
from penstock.runtime.sources.gunzip import Gunzip


def is_packed(path: str) -> bool:
    """Says whether a file is a gzip file, by its name."""
    return path.lower().endswith(".gz")


class Dialect:
    """Tells fields and rows apart. Raises ValueError or TypeError for characters that cannot be used together.
    Penstock's data are UTF-8, in which no other character has the byte of an ASCII one."""

    def __init__(self, delimiter: str, quote: str | None, escape: str | None) -> None:
        self._options: dict[str, Any] = {
            "delimiter": delimiter,
            "quotechar": quote,
            "doublequote": escape is None,
            "escapechar": escape,
            "quoting": csv.QUOTE_NONE if quote is None else csv.QUOTE_MINIMAL,
        }
        self._special = [each.encode() for each in (quote, escape) if each is not None]
        csv.reader((), **self._options)

    def rows(self, text: str) -> list[list[str]]:
        """Returns the fields of each row. A blank line has none."""
        rows = list(csv.reader(io.StringIO(text, newline=""), **self._options))
        escape = self._options["escapechar"]
        if escape is not None and (len(text) - len(text.rstrip(escape))) % 2:
            rows[-1][-1] = rows[-1][-1][:-1]  # the line end that csv finds after an escape at the very end
        return rows

    def ends(self, data: bytes) -> list[int]:
        """Returns the ends of all rows and blank lines. The last one may lack its line end."""
        ends = self._whole(data)
        return ends if not data or ends[-1:] == [len(data)] else [*ends, len(data)]

    def last(self, data: bytes) -> int:
        """Returns the end of the last row that has its line end, or 0. A "\\r" at the end may be half of one."""
        if not any(special in data for special in self._special):
            return max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1)) + 1
        ends = self._whole(data)
        if ends and ends[-1] == len(data) and not data.endswith(b"\n"):
            ends.pop()
        return ends[-1] if ends else 0

    def of(self, data: bytes) -> list[tuple[int, int]]:
        """Returns the beginnings and ends of all rows, without blank lines."""
        return [(start, end) for start, end in pairwise([0, *self.ends(data)]) if data[start:end].strip(b"\r\n")]

    def _whole(self, data: bytes) -> list[int]:
        """Returns the ends of all rows but one that ends in quotes, or after an escape."""
        read, over = 0, False

        def lines() -> Iterator[str]:
            nonlocal read, over
            for line in io.StringIO(data.decode("latin-1"), newline=""):  # a character for each byte
                read += len(line)
                yield line
            over = True

        return [read for _ in csv.reader(lines(), **self._options) if not over]


class RowBlocks(LineBlocks):
    """Reads the rows of one file, block by block, as UTF-8, without a byte order mark and the header."""

    def __init__(
        self, part: FileRange, offset: int | None, dialect: Dialect, has_header: bool, encoding: str, max_row: int
    ) -> None:
        self.header = b""
        self._dialect = dialect
        self._encoding = encoding
        csv.field_size_limit(max(csv.field_size_limit(), max_row))  # the limit of this process: rows have their own
        super().__init__(part, offset, max_row, "Csv")
        self._at_header = has_header and self.position == 0

    def next(self) -> bytes:
        """Returns some whole rows, or b"" at the end. Only the last row of a file may lack its line end."""
        while True:
            block = self._whole_rows()
            if not self._at_header or not block:
                return block
            if rows := block.lstrip(b"\r\n"):
                end, self._at_header = self._dialect.ends(rows)[0], False
                self.header = rows[:end]
                if end < len(rows):
                    return rows[end:]

    def _skip_byte_order_mark(self) -> None:
        while self._stream is not None and len(self._tail) < len(codecs.BOM_UTF8):
            more = self._read(len(self._tail))
            if not more:
                break
            self._tail += more
        if self._tail.startswith(codecs.BOM_UTF8):
            self._tail = self._tail[len(codecs.BOM_UTF8) :]
            self.position = len(codecs.BOM_UTF8)

    def _whole_rows(self) -> bytes:
        if self.position == 0:
            self._skip_byte_order_mark()
        data, ended = self._tail, False
        self._tail = b""
        while not self._too_long:
            end = len(data) if ended else self._dialect.last(data)
            if end or ended:
                self._tail = data[end:]
                return self._allowed(data[:end])
            if len(data) > self._max_line:
                break
            more = b"" if self._stream is None else self._read(self.position + len(data))
            data += more
            ended = not more
            if ended and self._stream is not None:
                self._check_size(self.position + len(data))
                self.close()
        self._too_long = True
        raise self._line_too_long()

    def _allowed(self, block: bytes) -> bytes:
        """Returns the rows of a block that begin in the file as it was listed, and before a row that is too long."""
        listed = self._part.end
        if (listed is not None and self.position + len(block) >= listed) or len(block) > self._max_line:
            kept = 0
            for start, end in pairwise([0, *self._dialect.ends(block)]):
                if end - start > self._max_line:
                    self._too_long = True
                    break
                kept = end
                if listed is not None and self.position + end >= listed:
                    self._tail = b""
                    self.close()
                    break
            if self._too_long and not kept:
                raise self._line_too_long()
            block = block[:kept]
        self.position += len(block)
        return block

    def _line_too_long(self) -> SourceError:
        self.close()
        return SourceError(
            f"Csv: the row at byte {self.position} of {self._part.path!r} is longer than {self._max_line:,} bytes. Is "
            "a quote missing there, or is quote=None right? If it is that long, raise max_record_bytes."
        )

    def _content(self, path: str) -> Any:
        file: Any = Gunzip(path) if is_packed(path) else FileIO(path)
        return file if codecs.lookup(self._encoding).name == "utf-8" else _Utf8(file, path, self._encoding)


class _Utf8:
    """Reads text in another encoding as UTF-8."""

    def __init__(self, file: Any, path: str, encoding: str) -> None:
        self._file = file
        self._path = path
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self.close = file.close

    def read(self, size: int) -> bytes:
        """Returns some bytes, or b"" at the end."""
        while True:
            data = self._file.read(size)
            try:
                text = self._decoder.decode(data, final=not data).encode()
            except UnicodeError as error:
                raise SourceError(f"Csv: cannot read {self._path!r}: {error}") from error
            if text or not data:
                return text
