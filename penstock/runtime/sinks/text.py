"""Turns records into the bytes of lines: the formats of the Files sink.

A formatter takes a whole list and works on it in one call; only when that fails it goes record by record, to find the
one at fault. It must never write a record over two lines, nor a line that is read as another text.
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
        text = "\n".join(records) + "\n"
        if text.count("\n") == len(records) and "\r\n" not in text:
            return text.encode()
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
        text = record
    elif isinstance(record, (tuple, list)):
        text = "\t".join(map(str, record))
    else:
        text = str(record)
    if text.endswith("\r"):
        raise ValueError(
            "the text ends with '\\r', which readers would take for a part of the line end; write it with "
            "format='jsonl', or remove the '\\r' before"
        )
    return _line(text)


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
