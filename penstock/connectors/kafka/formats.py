"""How the bytes of Kafka's keys and values become Python objects, and back.

A format works on whole lists. Bytes that do not fit a format belong to one record, and must never fail another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from penstock.runtime.errors import FlowError, shorten

Format = Literal["bytes", "text", "json"] | Callable[[Any], Any]
NAMES = ("bytes", "text", "json")


def _same(data: Any) -> Any:
    return data


def _text(data: bytes) -> str:
    return data.decode()


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    raise TypeError(
        f"Kafka takes bytes or a str here, and not a {type(value).__name__}; use value='json' or a function"
    )


def check(format_: object, what: str) -> None:
    """Raises FlowError unless it is a format."""
    if not callable(format_) and format_ not in NAMES:
        raise FlowError(f"{what}={shorten(format_)}; it must be 'bytes', 'text', 'json', or a function")


def decoder(format_: Format) -> Callable[[bytes], Any]:
    """Returns the function that makes an object of the bytes of a key or value. It is not called for None."""
    if callable(format_):
        return format_
    known: dict[str, Callable[[bytes], Any]] = {"bytes": _same, "text": _text, "json": msgspec.json.decode}
    return known[format_]


def encoder(format_: Format) -> Callable[[Any], bytes | None]:
    """Returns the function that makes the bytes of a key or value. It is not called for None, which stays None: a
    value of None is a tombstone."""
    if callable(format_):
        return format_
    known: dict[str, Callable[[Any], bytes]] = {"bytes": _bytes_of, "text": _bytes_of, "json": msgspec.json.encode}
    return known[format_]
