"""Divides a CSV file into blocks of whole rows.

A quoted field may hold line ends, so nobody can tell where a row begins without having read all before it: a file is
read from its beginning, or from the end of a row. It must never return part of a row, nor a row that is longer than
allowed, and always find the same rows as pyarrow, which parses them.
"""

from __future__ import annotations

import codecs
import re
from io import FileIO
from typing import Any

import numpy as np

from penstock.runtime.errors import SourceError
from penstock.runtime.sources.blocks import FileRange, LineBlocks
from penstock.runtime.sources.gunzip import Gunzip


def is_packed(path: str) -> bool:
    """Says whether a file is a gzip file, by its name."""
    return path.lower().endswith(".gz")


class RowEnds:
    """Finds the ends of rows in bytes that begin with a row. A line end in quotes, or escaped, does not end a row."""

    def __init__(self, delimiter: str, quote: str | None, escape: str | None) -> None:
        self._delimiter, self._quote, self._escape = ((one or "").encode() for one in (delimiter, quote, escape))
        self._pattern = self._compiled()

    def _compiled(self) -> re.Pattern[bytes]:
        delimiter, quote, escape = map(re.escape, (self._delimiter, self._quote, self._escape))
        pattern = rb"(\r\n?|\n)"
        if escape:  # a quote that follows is no quote, even where the escaped character is a delimiter
            pattern += b"|" + escape + b"." + (quote + b"*" if quote else b"")
        if quote:
            inner = b"[^" + quote + escape + b"]*"
            pair = escape + b"." if escape else quote + quote
            pattern += b"|(?:^|(?<=[" + delimiter + rb"\r\n]))" + quote + inner
            pattern += b"(?:" + pair + inner + b")*(?:" + quote + rb"|.?\Z)"
        return re.compile(pattern, re.DOTALL)

    def ends(self, data: bytes) -> Any:
        """Returns the ends of all rows and blank lines as a NumPy array. The last row may lack its line end."""
        ends = self._with_line_end(data)
        return ends if not data or (len(ends) and ends[-1] == len(data)) else np.append(ends, len(data))

    def last(self, data: bytes) -> int:
        """Returns the end of the last row that has its line end, or 0. A "\\r" at the end may be half of one."""
        ends = self._with_line_end(data)
        ends = ends[: len(ends) - 1] if len(ends) and ends[-1] == len(data) and data.endswith(b"\r") else ends
        return int(ends[-1]) if len(ends) else 0

    def of(self, data: bytes) -> list[tuple[int, int]]:
        """Returns the beginnings and ends of all rows, without blank lines."""
        ends = self.ends(data).tolist()
        return [(start, end) for start, end in zip([0, *ends], ends, strict=False) if data[start:end].strip(b"\r\n")]

    def _with_line_end(self, data: bytes) -> Any:
        bytes_ = np.frombuffer(data, np.uint8)
        before = np.append(np.uint8(ord("\n")), bytes_)
        quotes = np.flatnonzero(bytes_ == self._quote[0]) if self._quote else np.empty(0, np.intp)
        # As long as each quote that opens follows another field, or doubles a quote, what has an odd number before it
        # is in quotes. With an escape there are no doubled quotes.
        may_open = np.frombuffer(self._delimiter + b"\r\n" + (b"" if self._escape else self._quote), np.uint8)
        if (self._escape and self._escape in data) or not np.isin(before[quotes[::2]], may_open).all():
            return np.array([match.end() for match in self._pattern.finditer(data) if match[1]], np.intp)
        half = (bytes_ == ord("\r")) & (np.append(bytes_[1:], np.uint8(0)) == ord("\n"))
        ends = np.flatnonzero(((bytes_ == ord("\n")) | (bytes_ == ord("\r"))) & ~half) + 1
        return ends[np.searchsorted(quotes, ends) % 2 == 0] if len(quotes) else ends


class RowBlocks(LineBlocks):
    """Reads the rows of one file, block by block, as UTF-8, without a byte order mark and the header."""

    def __init__(
        self, part: FileRange, offset: int | None, rows: RowEnds, has_header: bool, encoding: str, max_row: int
    ) -> None:
        self.rows = rows
        self.header = b""
        self._encoding = encoding
        super().__init__(part, offset, max_row, "Csv")
        self._at_header = has_header and self.position == 0

    def next(self) -> bytes:
        """Returns some whole rows, or b"" at the end. Only the last row of a file may lack its line end."""
        while True:
            block = self._whole_rows()
            if not self._at_header or not block:
                return block
            rows = self.rows.of(block)
            if rows:
                (start, end), self._at_header = rows[0], False
                self.header = block[start:end]
                if end < len(block):
                    return block[end:]

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
            end = len(data) if ended else self.rows.last(data)
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
        end = self._part.end
        beyond = end is not None and self.position + len(block) >= end
        if block and (beyond or len(block) > self._max_line):
            ends = self.rows.ends(block)
            for i in np.flatnonzero(np.diff(ends, prepend=0) > self._max_line)[:1]:
                self._too_long = True
                if i == 0:
                    raise self._line_too_long()
                ends = ends[:i]
            block = block[: ends[-1]] if len(ends) else block
            if end is not None and self.position + len(block) >= end:
                block = block[: ends[np.searchsorted(ends, end - self.position)]]
                self._tail = b""
                self.close()
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
