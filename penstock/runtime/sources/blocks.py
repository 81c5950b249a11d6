"""Divides a file into blocks of whole lines, and into byte ranges that tasks read side by side.

A line belongs to the range that its first byte is in: a range that does not begin at 0 starts after the
first line end at or after the byte before it, and reads its last line to its end beyond the range. So no line
is read twice or by nobody, wherever the ranges meet. It must never return part of a line, nor a line that is
longer than allowed, nor hold more than one block and one line.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from io import FileIO
from itertools import pairwise
from typing import Any

from penstock.runtime.errors import SourceError
from penstock.runtime.sources.gunzip import Gunzip
from penstock.runtime.sources.lines import up_to_long_line
from penstock.runtime.sources.marks import BEFORE, FileMark, FilePosition, find_again, replaced
from penstock.runtime.sources.paths import unreadable

BLOCK = 256 << 10  # bytes read at a time; larger blocks fall out of the cache between decoding and splitting
_BEYOND = 16 << 10  # the same for the rest of a range's last line
ABANDONED = -1  # the offset of a file whose rest cannot be read


@dataclass(frozen=True)
class FileRange:
    """Names the bytes [start, end) of a plain file. A gzip file has no end that is known."""

    path: str
    start: int = 0
    end: int | None = None
    mark: FileMark | None = None


class LineBlocks:
    """Reads the lines of one file range, block by block, from an offset (None: from the range's beginning). Raises
    SourceError when the file at its path is not the file that was listed, or that was read up to the offset."""

    def __init__(self, part: FileRange, offset: int | None, max_line: int, source: str) -> None:
        self._part = part
        self._max_line = max_line
        self._source = source
        self._stream: Any = None  # has read and close
        self._tail = b""  # read, but not handed out
        self._too_long = False  # whether the next line is longer than allowed
        self.position = part.start if offset is None else offset  # the byte after the last line handed out
        if offset == ABANDONED or (part.end is not None and self.position >= part.end):
            return
        try:
            self._open(offset)
        except OSError as error:
            self.close()
            raise unreadable(part.path, source, error) from error
        except BaseException:
            self.close()
            raise

    def next(self) -> bytes:
        """Returns some whole lines, or b"" at the end. Only the last line of a file may lack its line end."""
        if self._too_long:
            raise self._line_too_long()
        if self._stream is None:
            return b""
        parts = [self._tail]
        held = len(self._tail)
        while True:
            data = self._read(self.position + held)
            if not data:
                self._check_size(self.position + held)
                self.close()
                return self._give(b"".join(parts))
            end = data.rfind(b"\n") + 1
            if end:
                parts.append(data[:end])
                self._tail = data[end:]
                return self._give(b"".join(parts))
            parts.append(data)
            held += len(data)
            if held - data.endswith(b"\r") > self._max_line:
                raise self._line_too_long()

    def close(self) -> None:
        """Closes the file. After this, next() reads nothing more."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _give(self, block: bytes) -> bytes:
        """Returns `block` without the lines that begin after the range, and up to a line that is too long."""
        end = self._part.end
        if end is not None and self.position + len(block) >= end:
            line_end = block.find(b"\n", end - 1 - self.position) + 1
            if line_end:
                block = block[:line_end]
            self.close()
        allowed = up_to_long_line(block, self._max_line)
        self.position += len(allowed)
        if len(allowed) < len(block):
            self.close()
            self._too_long = True
            if not allowed:
                raise self._line_too_long()
        return allowed

    def _line_too_long(self) -> SourceError:
        return SourceError(
            f"{self._source}: the line at byte {self.position} of {self._part.path!r} is longer than "
            f"{self._max_line:,} bytes. Is this a text file? If it is, raise max_line_bytes."
        )

    def _open(self, offset: int | None) -> None:
        part = self._part
        path = find_again(part.path, part.mark, self._source)
        before = offset.before if isinstance(offset, FilePosition) else b""
        if part.end is None:
            self._stream = self._content(path)
            self._skip(self.position, before)
            return
        self._stream = FileIO(path)
        self._check_size(os.fstat(self._stream.fileno()).st_size)
        self._check_before(os.pread(self._stream.fileno(), len(before), self.position - len(before)), before)
        if offset is not None or part.start == 0:
            self._stream.seek(self.position)
        else:
            self._stream.seek(part.start - 1)
            self._find_line()

    def _content(self, path: str) -> Any:
        """Opens the content of a file without an end that is known."""
        return Gunzip(path)

    def _find_line(self) -> None:
        """Goes from the byte before the range to the first line that begins in it."""
        position = self._part.start - 1
        end = self._part.end
        assert end is not None
        while position < end:
            data = self._read(position)
            if not data:
                self._check_size(position)
            line_end = data.find(b"\n") + 1
            if line_end:
                self._tail = data[line_end:]
                position += line_end
                break
            position += len(data)
        self.position = position
        if position >= end:
            self.close()

    def _check_before(self, found: bytes, before: bytes) -> None:
        if found != before:
            raise replaced(self._part.path, self._source, f"it has other bytes before byte {self.position:,}")

    def _skip(self, count: int, before: bytes) -> None:
        """Skips the first bytes of a gzip file's content, and checks that they end with the expected bytes."""
        position = 0
        last = b""
        while position < count:
            data = self._read(position)
            if not data:
                raise self._shrunk(position, count)
            position += len(data)
            over = max(0, position - count)
            self._tail = data[len(data) - over :]
            last = (last + data[max(0, len(data) - over - BEFORE) : len(data) - over])[-BEFORE:]
        self._check_before(last[len(last) - len(before) :], before)

    def _read(self, position: int) -> bytes:
        """Reads the bytes that follow the `position`-th, where the stream stands."""
        end = self._part.end
        size = BLOCK if end is None else min(BLOCK, end - position) if position < end else _BEYOND
        assert self._stream is not None
        try:
            return bytes(self._stream.read(size))
        except OSError as error:
            raise unreadable(self._part.path, self._source, error) from error

    def _check_size(self, size: int) -> None:
        if self._part.end is not None and size < self._part.end:
            raise self._shrunk(size, self._part.end)

    def _shrunk(self, size: int, expected: int) -> SourceError:
        return SourceError(
            f"{self._source}: {self._part.path!r} has {size} bytes now, at least {expected} were there "
            "before: it was "
            "shortened or replaced while the job ran. Start the job again when nothing writes to its input "
            "any more."
        )


def ranges(path: str, size: int, count: int, smallest: int) -> list[FileRange]:
    """Returns at most `count` ranges that make up a plain file. None is shorter than `smallest` bytes, unless it is the
    only one."""
    count = max(1, min(count, size // max(1, smallest)))
    bounds = [size * i // count for i in range(count + 1)]
    return [FileRange(path, start, end) for start, end in pairwise(bounds)]
