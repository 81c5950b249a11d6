"""Turns bytes into lines: one record a line, in the lines' order, with the byte at which each line ended.

A line ends with "\\n" or "\\r\\n" and with nothing else: form feeds, U+2028 and their like are part of it. A
decoder turns a block of whole lines into a list with exactly one entry a line: a line that cannot be decoded
becomes an `Unreadable`, so that indices and byte offsets always correspond. It must never call the error
policy itself: that happens when the entry is handed out, so that recovery from an offset counts each bad line
once.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from penstock.runtime.errors import CodecError, FlowError, shorten
from penstock.runtime.records.userfunc import ErrorHandler

#: decode(block, name of the input, its byte position there) -> (one entry a line, whether none is Unreadable)
Decoder = Callable[[bytes, str, int], tuple[list[Any], bool]]

_BOM = codecs.BOM_UTF8


class Unreadable:
    """Stands in a list of records for a line that gave none; without an error it is passed over in
    silence."""

    __slots__ = ("error", "record")

    def __init__(self, record: Any, error: Exception | None) -> None:
        self.record = record
        self.error = error


def line_ends(data: bytes) -> Any:
    """Returns the ends of the lines of a block as a NumPy array."""
    import numpy as np

    return np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + 1


class Block:
    """Holds whole lines of one input: their bytes, their records and where they lie. `ends` finds where each record
    ends."""

    __slots__ = ("_ends", "_find_ends", "after", "base", "clean", "data", "records")

    def __init__(
        self,
        base: int,
        data: bytes,
        records: Any,
        clean: bool,
        after: int | None = None,
        ends: Callable[[bytes], Sequence[int]] = line_ends,
    ) -> None:
        self.base = base
        self.data = data
        self.records = records  # a list, or an Arrow column
        self.clean = clean  # no Unreadable among the records
        self.after = base + len(data) if after is None else after
        self._find_ends = ends
        self._ends: Sequence[int] | None = None

    def offset(self, index: int) -> int:
        """Returns the byte position after the first `index` lines. Lines are measured only when this is called."""
        if index >= len(self.records):
            return self.after
        if index == 0:
            return self.base
        if self._ends is None:
            self._ends = self._find_ends(self.data)
        return self.base + int(self._ends[index - 1])


def readable(records: list[Any], errors: ErrorHandler) -> list[Any]:
    """Returns the records without the lines that gave none. These lines go to the error policy."""
    good: list[Any] = []
    for record in records:
        if type(record) is not Unreadable:
            good.append(record)
        elif record.error is not None:
            errors.handle(record.record, record.error)
    return good


def split_lines(data: bytes) -> list[bytes]:
    """Splits a block into its lines, without "\\n"."""
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def up_to_long_line(data: bytes, limit: int) -> bytes:
    """Returns the lines of a block before the first one that has more than `limit` bytes without its line end."""
    if len(data) > limit:
        start = 0
        end = len(data)
        for line in data.split(b"\n"):
            after = start + len(line)
            # The last line of an input may lack its "\n"; a "\r" there is not part of a line end.
            if len(line) - (after < end and line.endswith(b"\r")) > limit:
                return data[:start]
            start = after + 1
    return data


class TextDecoder:
    """Decodes lines as str."""

    def __init__(self, encoding: str) -> None:
        try:
            newline = "\n".encode(encoding).removeprefix(_BOM)
            name = codecs.lookup(encoding).name
        except (LookupError, TypeError):
            raise FlowError(
                f"encoding={shorten(encoding)}; it must be a text encoding that Python knows, such as 'utf-8'"
            ) from None
        if newline != b"\n":
            raise FlowError(
                f"encoding={encoding!r}: text in this encoding does not end its lines with the byte 0x0A, by which "
                f"files are divided into lines; convert the files first, as in: iconv -f {encoding} -t utf-8"
            )
        self._strip_bom = name == "utf-8-sig"
        self._encoding = "utf-8" if self._strip_bom else name
        # In these a byte 0x0A is always a line end and nothing else decodes to one, so whole blocks decode at once.
        self._whole = self._encoding in ("utf-8", "ascii") or self._encoding.startswith(("iso8859", "cp125"))

    def __call__(self, data: bytes, name: str, base: int) -> tuple[list[Any], bool]:
        if base == 0 and self._strip_bom and data.startswith(_BOM):
            data = data[len(_BOM) :]
            base = len(_BOM)
            if not data:
                return [], True
        if self._whole:
            try:
                text = data.decode(self._encoding)
            except UnicodeDecodeError:
                return self._each(data, name, base)
            if "\r" in text:
                text = text.replace("\r\n", "\n")
            lines = text.split("\n")
            if not lines[-1]:
                lines.pop()
            return lines, True
        return self._each(data, name, base)

    def column(self, data: bytes, base: int) -> Any:
        """Returns the lines of a block as an Arrow column, or None when they have to be decoded one by one."""
        if self._encoding != "utf-8" or self._strip_bom or b"\r" in data:
            return None
        import pyarrow as pa
        from pyarrow import compute

        try:
            text = pa.array([data.removesuffix(b"\n")], pa.large_binary()).cast(pa.large_string())
        except pa.ArrowInvalid:
            return None  # not UTF-8: which line?
        return compute.split_pattern(text, "\n").values.cast(pa.string())

    def _each(self, data: bytes, name: str, base: int) -> tuple[list[Any], bool]:
        out: list[Any] = []
        clean = True
        end = base + len(data)
        for line in split_lines(data):
            after = base + len(line)
            # The last line of an input may lack its "\n"; a "\r" there is not part of a line end.
            content = line[:-1] if after < end and line.endswith(b"\r") else line
            try:
                out.append(content.decode(self._encoding))
            except UnicodeError as error:
                reason = str(error)
                if isinstance(error, UnicodeDecodeError):
                    reason = f"{error.reason} at byte {error.start} of the line"
                where = f"{name}, line at byte {base}"
                problem = CodecError(f"{where}: not valid {self._encoding}: {reason}")
                out.append(Unreadable(content, problem))
                clean = False
            base = after + 1
        return out, clean
