"""Finds the schema of a table from its first records. It is the same for all files of the table.

The first task that has records writes it into the table's directory, the others read it there, as do the tasks that
come after a failure. It must never differ between two files of a table.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from itertools import chain
from typing import Any

import pyarrow as pa

from penstock.runtime.errors import PenstockError
from penstock.runtime.sinks.columns import array
from penstock.runtime.sinks.places import LOCAL, failed_write

_NAME = "_schema"  # readers of tables pass over names that begin so

# What Spark, too, takes for decimals of which only some values are known.
_DECIMAL = pa.decimal128(38, 18)


def infer(rows: list[Mapping[str, Any]]) -> pa.Schema:
    """Returns the schema of these rows. Raises PenstockError for a field that has no value in any row, or whose values
    have no fields; raises ValueError or TypeError (of which pyarrow's errors are subclasses) when the rows have no
    schema."""
    names = list(dict.fromkeys(chain.from_iterable(rows)))
    if not names:
        raise ValueError("the record has no fields")
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"a field's name must be a text, got {next(n for n in names if not isinstance(n, str))!r}")
    fields = []
    for name in names:
        try:
            type = array([row.get(name) for row in rows]).type
        except (ValueError, TypeError, OverflowError) as error:
            raise TypeError(f"field {name!r}: {error}") from error
        fields.append((name, _settled(type, name)))
    return pa.schema(fields)


def _settled(type: pa.DataType, field: str) -> pa.DataType:
    """Returns a type into which later values fit as well."""
    is_ = pa.types
    if is_.is_null(type) or (is_.is_struct(type) and not type.num_fields):
        raise PenstockError(
            f"the first records do not show the type of their field {field!r}, as it has no value there (None, an "
            "empty list or dict); say what the columns are: schema=pyarrow.schema(...)"
        )
    if is_.is_decimal(type):
        return _DECIMAL
    if is_.is_timestamp(type):
        return pa.timestamp("us", "UTC" if type.tz else None)
    if is_.is_list(type):
        return pa.list_(_settled(type.value_type, field))
    if is_.is_struct(type):
        inner = [type.field(i) for i in range(type.num_fields)]
        return pa.struct([(each.name, _settled(each.type, f"{field}.{each.name}")) for each in inner])
    return type


def agree(directory: str, schema: pa.Schema, sink: str) -> pa.Schema:
    """Returns the schema of the table in a directory. It is this schema, unless another task was first."""
    path = os.path.join(directory, _NAME)
    mine = os.path.join(directory, f".{_NAME}-{secrets.token_hex(4)}")
    try:
        with open(mine, "xb") as file:
            file.write(schema.serialize())
            file.flush()
            os.fsync(file.fileno())
        try:
            with contextlib.suppress(FileExistsError):
                os.link(mine, path)  # as a whole, and only if there is none
        finally:
            os.unlink(mine)
        LOCAL.sync_directory(directory)
        with open(path, "rb") as file:
            return pa.ipc.read_schema(pa.py_buffer(file.read()))
    except OSError as error:
        raise failed_write(path, error, True, sink) from error


def forget(directory: str) -> None:
    """Removes the schema from the directory, because another table begins there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(directory, _NAME))
