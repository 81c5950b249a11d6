"""A source of JSON lines files: one JSON value a line, decoded a block at a time.

It must never take two values on one line, or one value over two lines, for records: the block decoder would,
so its result counts only when every line provably held exactly one object.
"""

from __future__ import annotations

import codecs
from typing import Any

import msgspec

from penstock.runtime.errors import CodecError
from penstock.runtime.sources.files import MAX_LINE, LineFiles
from penstock.runtime.sources.lines import Decoder, Unreadable, split_lines
from penstock.runtime.sources.paths import Patterns

_MALFORMED = (msgspec.MsgspecError, ValueError, RecursionError)  # ValueError: not UTF-8


class JsonLines(LineFiles[Any]):
    """Reads the values of JSON lines files (also called NDJSON): dicts, or whatever each line holds.

        flow.read(ps.sources.JsonLines("events/*.jsonl")).filter(ps.col("event_type") == "view")

    `patterns`, `parallel`, `max_line_bytes`, gzip files, errors and offsets: as in TextFiles. Files are
    UTF-8, a byte order mark is dropped, blank lines are passed over. A line that is not one JSON value is a
    failed record (its bytes) with the file and the byte position in its error: the operator's on_error
    decides about it.
    """

    def __init__(self, patterns: Patterns, *, parallel: bool = True, max_line_bytes: int = MAX_LINE) -> None:
        super().__init__(patterns, parallel=parallel, max_line_bytes=max_line_bytes)

    def decoder(self) -> Decoder:
        return JsonDecoder()


class JsonDecoder:
    """Decodes lines as JSON values. A blank line becomes an Unreadable without an error."""

    def __init__(self) -> None:
        self._json = msgspec.json.Decoder()

    def __call__(self, data: bytes, name: str, base: int) -> tuple[list[Any], bool]:
        if base == 0 and data.startswith(codecs.BOM_UTF8):
            data = data[len(codecs.BOM_UTF8) :]
            base = len(codecs.BOM_UTF8)
        try:
            # "}\n{" is never inside a JSON value (a string holds no raw line end), so where all lines meet so and
            # as many values as lines come out, each line held one.
            if data.startswith(b"{"):
                count = data.count(b"\n") + (not data.endswith(b"\n"))
                if data.count(b"}\n{") == count - 1:
                    records = self._json.decode_lines(data)
                    if len(records) == count:
                        return records, True
            return list(map(self._json.decode, split_lines(data))), True
        except _MALFORMED:
            return self._each(data, name, base)

    def _each(self, data: bytes, name: str, base: int) -> tuple[list[Any], bool]:
        out: list[Any] = []
        for line in split_lines(data):
            try:
                out.append(self._json.decode(line))
            except _MALFORMED as error:
                problem = None
                if line.strip():
                    problem = CodecError(f"{name}, line at byte {base}: not a JSON value: {error}")
                out.append(Unreadable(line, problem))
            base += len(line) + 1
        return out, False
