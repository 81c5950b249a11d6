"""Turns records into the rows of a table: the format of the Parquet sink.

A dict, a dataclass or a msgspec.Struct has its fields as columns; a tuple or list has its items, in the order of the
schema, or in columns `_1`, `_2` and so on; anything else is one column, `value`. A row must never lose a field without
a word, nor a value its exactness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from typing import Any

import msgspec
import pyarrow as pa

from penstock.runtime.errors import FlowError
from penstock.runtime.records.userfunc import ErrorHandler, apply
from penstock.runtime.sinks.columns import column
from penstock.runtime.sinks.schema import infer
from penstock.runtime.sources.base import together


def nullable(schema: pa.Schema) -> pa.Schema:
    """Returns the schema that the files of a user-described table have: every column may hold nulls."""
    names = schema.names
    twice = sorted({name for name in names if names.count(name) > 1})
    if not names or twice:
        problem = f"has two columns of the name {twice[0]!r}" if twice else "has no columns"
        raise FlowError(f"the schema {problem}; give each column of the table once")
    return pa.schema([pa.field(field.name, field.type) for field in schema])


@lru_cache(256)
def _fields_of(cls: type) -> tuple[str, ...] | None:
    """Returns the fields of a dataclass or of msgspec's structs, and None for other classes."""
    if is_dataclass(cls):
        return tuple(field.name for field in fields(cls))
    return cls.__struct_fields__ if issubclass(cls, msgspec.Struct) else None


class Rows:
    """A Formatter that makes record batches of one schema. Without a schema (None), `agree` is called with the schema
    of the first records and returns that of the table."""

    def __init__(self, schema: pa.Schema | None, agree: Callable[[pa.Schema], pa.Schema]) -> None:
        self._agree = agree
        self._schema: pa.Schema | None = None
        self._names: list[str] = []
        self._known: frozenset[str] = frozenset()
        if schema is not None:
            self._use(schema)

    def __call__(self, records: list[Any], errors: ErrorHandler) -> Any:
        """Returns a RecordBatch, or an empty list when all records have failed."""
        try:
            rows = list(map(self._row, records))
            if self._schema is None:
                self._learn(rows)
            return self._batch(rows)
        except (ValueError, TypeError, OverflowError, AttributeError, pa.ArrowException):
            return together(apply(partial(map, partial(self._one, errors)), records, errors))

    def _one(self, errors: ErrorHandler, record: Any) -> pa.RecordBatch:
        row = self._row(record)
        if self._schema is None:
            schema = infer([row])
            try:
                self._use(self._agree(schema))
            except Exception as error:  # the disk's fault, not the record's
                raise errors.failure(record, error) from error
        return self._batch([row])

    def _learn(self, rows: list[Mapping[str, Any]]) -> None:
        self._use(self._agree(infer(rows)))

    def _use(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._names = schema.names
        self._known = frozenset(schema.names)

    def _row(self, record: Any) -> Mapping[str, Any]:
        if isinstance(record, dict):
            return record
        if isinstance(record, (tuple, list)):
            if hasattr(record, "_asdict"):
                named: dict[str, Any] = record._asdict()
                return named
            names = self._names or [f"_{i}" for i in range(1, len(record) + 1)]
            if len(names) != len(record):
                raise ValueError(f"the record has {len(record)} items, and the table the columns {', '.join(names)}")
            return dict(zip(names, record, strict=True))
        cls: type = type(record)
        fields_of_class = _fields_of(cls)
        if fields_of_class is not None:
            return {name: getattr(record, name) for name in fields_of_class}
        return {"value": record}

    def _batch(self, rows: list[Mapping[str, Any]]) -> pa.RecordBatch:
        assert self._schema is not None
        if not all(map(self._known.issuperset, rows)):
            new = next(name for row in rows for name in row if name not in self._known)
            raise ValueError(f"the table has no column {new!r}; it has: {', '.join(self._names)}")
        columns = []
        for field in self._schema:
            try:
                columns.append(column([row.get(field.name) for row in rows], field.type))
            except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
                raise ValueError(f"column {field.name!r} is {field.type}: {error}") from error
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)
