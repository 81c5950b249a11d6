"""Turns Python values into an Arrow column of a given type, exactly.

pyarrow by itself takes 2.5 for an int64 column and makes a 2 of it, drops the fields that a struct does not have, and
makes dates of numbers. It also lets the first values say what the others are: after a datetime with a time zone, one
without is taken as UTC. No value must ever change on its way, and whether it is taken must depend on it alone.
"""

from __future__ import annotations

import builtins
import datetime as dt
import uuid
from collections.abc import Mapping
from decimal import Decimal
from itertools import chain
from typing import Any

import msgspec
import pyarrow as pa

_ITEMS = (list, tuple, set, frozenset)
# What pyarrow takes as it is.
_PLAIN = (bytes, bytearray, dt.datetime, dt.date, dt.time, dt.timedelta, Decimal, uuid.UUID)


def column(values: list[Any], type: pa.DataType) -> pa.Array:
    """Returns the values as a column of this type. Raises TypeError for values of another kind, and ValueError (of
    which pyarrow's errors are subclasses) for values that the type does not hold."""
    has_map = _has_map(type)  # of which values do not show that they are one
    _check_kinds(values, type, 1 if has_map else 2)
    if has_map:
        return array(values, type)
    found = array(values)
    if found.type == type:
        return found
    if not _is_kind_of(found.type, type):
        raise TypeError(f"the value is {found.type}")
    if pa.types.is_integer(found.type) and pa.types.is_decimal(type):
        return array(values, type)  # the cast asks for room for the greatest int64
    return found.cast(type)


def array(values: list[Any], type: pa.DataType | None = None) -> pa.Array:
    """Returns the values as an array of pyarrow, in which members of an Enum count as their values, and dataclasses and
    msgspec's structs as dicts, as in JSON lines."""
    try:
        return pa.array(values, type)
    except pa.ArrowException as error:
        try:
            plain = [msgspec.to_builtins(value, builtin_types=_PLAIN) for value in values]
        except Exception:  # a value's own: msgspec lets through whatever an object raises
            what = "map it to a number, a text, a date, or a list or dict of these"
            raise TypeError(f"{error}; {what}") from error
        return pa.array(plain, type)


def _check_kinds(values: list[Any], type: pa.DataType, least: int) -> None:
    """Raises TypeError when the values are of `least` kinds or more, and one of them is wrong for this type."""
    is_ = pa.types
    if is_.is_dictionary(type):
        return _check_kinds(values, type.value_type, least)
    if _is_list(type):
        items = chain.from_iterable(one for one in values if isinstance(one, _ITEMS))
        return _check_kinds(list(items), type.value_type, least)
    if is_.is_map(type):
        pairs = [pair for one in values if one for pair in (one.items() if isinstance(one, Mapping) else one)]
        _check_kinds([key for key, _ in pairs], type.key_type, least)
        return _check_kinds([value for _, value in pairs], type.item_type, least)
    if is_.is_struct(type):
        rows = [one if isinstance(one, Mapping) else _attributes(one) for one in values if one is not None]
        for field in type:
            _check_kinds([row.get(field.name) for row in rows], field.type, least)
        return None
    classes = set(map(builtins.type, values)) - {builtins.type(None)}
    if len(classes) < least and not any(issubclass(one, (dt.datetime, dt.time)) for one in classes):
        return None
    kinds = {(one.__class__, _zone(one)): one for one in values if one is not None}
    for (kind, zone), one in kinds.items():
        if zone and issubclass(kind, dt.time):
            raise TypeError(f"a time of day has no time zone there, and {one!r} has one; remove it")
        if len(kinds) >= least and not _is_kind_of(found := array([one]).type, type):
            raise TypeError(f"the value {one!r} is {found}")
    return None


def _zone(value: Any) -> bool:
    return isinstance(value, (dt.datetime, dt.time)) and value.tzinfo is not None


def _attributes(value: Any) -> Mapping[str, Any]:
    try:
        plain = msgspec.to_builtins(value, builtin_types=_PLAIN)
    except Exception:  # a value's own, which `array` says
        return {}
    return plain if isinstance(plain, Mapping) else {}


def _is_kind_of(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Tells whether a value of the one type may be one of the other type. The cast then decides whether it fits."""
    is_ = pa.types
    if is_.is_null(found):
        return True
    if is_.is_dictionary(wanted):
        return _is_kind_of(found, wanted.value_type)
    if is_.is_timestamp(wanted):
        # A time without a zone is not the same instant everywhere.
        return is_.is_timestamp(found) and (found.tz is None) == (wanted.tz is None)
    if is_.is_struct(wanted):
        theirs = {wanted.field(i).name: wanted.field(i).type for i in range(wanted.num_fields)}
        return is_.is_struct(found) and all(
            found.field(i).name in theirs and _is_kind_of(found.field(i).type, theirs[found.field(i).name])
            for i in range(found.num_fields)
        )
    if _is_list(wanted):
        return is_.is_list(found) and _is_kind_of(found.value_type, wanted.value_type)
    if is_.is_integer(found):
        return any(test(wanted) for test in (is_.is_integer, is_.is_floating, is_.is_decimal))
    return found == wanted or any(test(found) and test(wanted) for test in _KINDS)


def _is_text(type: pa.DataType) -> bool:
    return bool(pa.types.is_string(type) or pa.types.is_large_string(type))


def _is_bytes(type: pa.DataType) -> bool:
    is_ = pa.types
    return bool(is_.is_binary(type) or is_.is_large_binary(type) or is_.is_fixed_size_binary(type))


def _is_list(type: pa.DataType) -> bool:
    is_ = pa.types
    return bool(is_.is_list(type) or is_.is_large_list(type) or is_.is_fixed_size_list(type))


_KINDS = (
    pa.types.is_floating,
    pa.types.is_decimal,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_duration,
    _is_text,
    _is_bytes,
)


def _has_map(type: pa.DataType) -> bool:
    is_ = pa.types
    if is_.is_struct(type):
        return any(_has_map(type.field(i).type) for i in range(type.num_fields))
    return bool(is_.is_map(type)) or (_is_list(type) and _has_map(type.value_type))
