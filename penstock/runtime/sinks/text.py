"""Turns records into the bytes of lines: the formats of the Files sink.

A formatter takes a whole list and works on it in one call; only when that fails it goes record by record, to find the
one at fault. It must never write a record over two lines.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from penstock.runtime.records.userfunc import ErrorHandler, apply

#: format(records, errors) -> what to append to the file, of length 0 when that is nothing
Formatter = Callable[[list[Any], ErrorHandler], Any]


def text_lines(records: list[Any], errors: ErrorHandler) -> bytes:
    """Formats a str as it is, a tuple or list with tabs between its items, and anything else by str()."""
    try:
        text = "\n".join(records)
        if text.count("\n") == len(records) - 1:
            return (text + "\n").encode()
    except (TypeError, UnicodeEncodeError):
        pass
    return b"".join(apply(partial(map, _text_line), records, errors))


def json_lines(records: list[Any], errors: ErrorHandler) -> bytes:
    """Formats one JSON value a line."""
    try:
        return _JSON.encode_lines(records)
    except Exception:  # some record's own: msgspec lets through whatever an object raises
        return b"".join(apply(partial(map, _json_line), records, errors))


def formatted(fn: Callable[[Any], str | bytes], records: list[Any], errors: ErrorHandler) -> bytes:
    """Formats records by the user's function: a str is a line, and bytes are written as they are."""
    return b"".join(apply(partial(map, partial(_formatted_one, fn)), records, errors))


_JSON = msgspec.json.Encoder()


def _text_line(record: Any) -> bytes:
    if isinstance(record, str):
        return _line(record)
    if isinstance(record, (tuple, list)):
        return _line("\t".join(map(str, record)))
    return _line(str(record))


def _json_line(record: Any) -> bytes:
    return _JSON.encode(record) + b"\n"


def _formatted_one(fn: Callable[[Any], str | bytes], record: Any) -> bytes:
    out = fn(record)
    if isinstance(out, str):
        return _line(out)
    if isinstance(out, bytes):
        return out
    raise TypeError(f"the format function must return str or bytes, it returned {type(out).__name__}")


def _line(text: str) -> bytes:
    if "\n" in text:
        raise ValueError(
            "the text has a line end in it and would become several lines; write it with format='jsonl', "
            "or replace the line ends before"
        )
    return text.encode() + b"\n"
