"""Decodes fields of JSON texts: once a record, only the fields that are needed, and with the answers that Spark's
from_json gives.

The quick way is one decoder for the fields that an operator takes from one text; it makes objects for those fields
only. What it refuses goes the slow way, which reads as Spark does: nothing after the object counts, and half a
surrogate pair becomes a question mark. A text that is no JSON object has no fields.

A number with a fraction or an exponent is written as Java writes doubles (1.0E10). Java before version 19 writes some
doubles with more digits than needed, so compare such fields as numbers: `.cast("double")` gives the same everywhere. Of
equal keys in one object the last counts, also where the field taken is an object itself and is written out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import msgspec

Path = tuple[str, ...]

_JSON_BLANK = " \t\n\r"
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
_ESCAPED = {code: _ESCAPES.get(chr(code), f"\\u{code:04X}") for code in (*range(0x20), ord('"'), ord("\\"))}


def decoder(names: Iterable[str]) -> Callable[[Any], Any]:
    """Makes a function that turns a text into an object with the attributes f0, f1, ...: the values of the named
    fields, and None where a field is absent."""
    fields = {f"f{i}": name for i, name in enumerate(names)}
    record = msgspec.defstruct("Fields", [(field, Any, None) for field in fields], rename=fields, gc=False)
    quick = msgspec.json.Decoder(record).decode
    nothing = record()

    def decode(text: Any) -> Any:
        if type(text) is not str:  # the decoder would take bytes, too, which Spark does not
            if text is None:
                return nothing
            if not isinstance(text, str):
                raise TypeError(f"json takes a string, not {type(text).__name__}; decode it first")
        try:
            return quick(text)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            found = parse(text)
            if not isinstance(found, dict):
                return nothing
            values = {field: found.get(name) for field, name in fields.items()}
            return record(**{f: text_of(v) if isinstance(v, str) else v for f, v in values.items()})

    return decode


def parse(text: str) -> Any:
    """Returns the JSON value that a text begins with, or None if there is none."""
    begin = len(text) - len(text.lstrip(_JSON_BLANK))
    try:
        return _lenient(text, begin)[0]
    except (ValueError, RecursionError, StopIteration):
        return None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_lenient = json.JSONDecoder(parse_constant=_no_number).raw_decode


def walk(value: Any, path: Path) -> str | None:
    """Returns the text of the field at a path inside a JSON value."""
    for step in path:
        if not isinstance(value, dict):
            return None
        value = value.get(step)
    return text_of(value)


def text_of(value: Any) -> str | None:
    """Returns a JSON value as the string that an expression sees."""
    if value is None:
        return None
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    return _written(value)


def _written(value: Any) -> str:
    if value is None:
        return "null"
    if value is True:
        return "true"
    if value is False:
        return "false"
    if isinstance(value, str):
        whole = value if value.isascii() else value.encode("utf-8", "replace").decode()
        return f'"{whole.translate(_ESCAPED)}"'
    if isinstance(value, float):
        return java_double(value) if math.isfinite(value) else f'"{"-" if value < 0 else ""}Infinity"'
    if isinstance(value, dict):
        return "{" + ",".join(f"{_written(key)}:{_written(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return str(value)


def java_double(value: float) -> str:
    """Returns a finite double as Java (19 and later) writes it."""
    if 1e-3 <= abs(value) < 1e7 or value == 0:
        # repr has no exponent between 1e-4 and 1e16.
        return repr(value)
    sign = "-" if value < 0 else ""
    mantissa, _, exponent = f"{abs(value)!r}".partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    power = int(exponent or 0) + len(whole) - 1
    if whole == "0":
        power = int(exponent or 0) - (len(fraction) - len(fraction.lstrip("0"))) - 1
    digits = digits.rstrip("0") or "0"
    return f"{sign}{digits[0]}.{digits[1:] or '0'}E{power}"
