"""Selects fields of records by their names: `key_by("user")`, `sum("price")`, `filter(col("price") > 5)`.

Records may be dicts (any mapping), objects with attributes (dataclasses, named tuples, msgspec structs, rows of
libraries), or texts, which have the single field "value". The type of a record decides how its field is taken. For a
list of records the type of the first one decides, so that the others cost only a loop in C. The result must never
depend on which of the records in a list comes first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter, itemgetter
from typing import Any

from penstock.runtime.errors import shorten
from penstock.runtime.expressions import Expr, MissingField
from penstock.runtime.expressions.tree import Column
from penstock.runtime.mistakes import nearest
from penstock.runtime.records.pickle_errors import slots_of
from penstock.runtime.records.userfunc import ListSelector

#: The field of a record that is a text.
TEXT = "value"


class Field(ListSelector):
    """A selector of the field with a name, or of the element at an index."""

    def __init__(self, name: str | int) -> None:
        self.name = name
        self._item = itemgetter(name)
        self._attribute = attrgetter(name) if isinstance(name, str) else self._item
        self._takes: dict[type, Callable[[Any], Any]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Field, (self.name,)

    def __repr__(self) -> str:
        return repr(self.name)

    def __call__(self, record: Any) -> Any:
        cls = type(record)
        take = self._takes.get(cls) or self._how(cls)
        try:
            return take(record)
        except (AttributeError, LookupError, TypeError) as error:
            if is_missing(self.name, record):
                raise MissingField(missing(self.name, record)) from None
            raise error  # an error of the record's own code, for example of a property

    def many(self, records: list[Any]) -> list[Any]:
        if not records:
            return []
        cls = type(records[0])
        take = self._takes.get(cls) or self._how(cls)
        # Dicts have attributes too, but these are not their fields. And every object can be converted to a text.
        if (take is self._attribute or take is _itself) and set(map(type, records)) != {cls}:
            return list(map(self, records))
        return records[:] if take is _itself else list(map(take, records))

    def _how(self, cls: type) -> Callable[[Any], Any]:
        if issubclass(cls, str) and self.name == TEXT:
            take: Callable[[Any], Any] = _itself
        elif hasattr(cls, "__getitem__") and not issubclass(cls, tuple | list | str | bytes):
            take = self._item
        else:
            take = self._attribute
        self._takes[cls] = take
        return take


def _itself(text: Any) -> Any:
    return text  # not str(text), which for a member of an Enum, or of another subclass, may be a different text


class Row(dict[str, Any]):
    """The fields of a record that is not a dict, and the record itself."""

    __slots__ = ("record",)

    record: Any


class Rows:
    """Turns records into dicts for expressions, with the fields that the expressions read (`every`: with all
    fields)."""

    def __init__(self, exprs: Iterable[Expr], every: bool = False) -> None:
        columns = [node for expr in exprs for node in expr.walk() if isinstance(node, Column)]
        self._needed = list(dict.fromkeys(column.field for column in columns if not column.optional))
        self._optional = [column.field for column in columns if column.optional and column.field not in self._needed]
        self._every = every

    def many(self, records: list[Any]) -> list[Any]:
        """Returns a list of records as dicts. If they are dicts already, it returns the same list."""
        return records if not records or isinstance(records[0], Mapping) else list(map(self, records))

    def __call__(self, record: Any) -> Any:
        """Returns a record as a dict. A record without fields stays as it is."""
        if isinstance(record, Mapping):
            return record
        row = Row()
        row.record = record
        if isinstance(record, str):
            row[TEXT] = record
            return row
        known = fields_of(record)
        if known is None:
            return record
        for name in known if self._every else ():
            row[name] = getattr(record, name)
        for name in self._needed:
            if name not in known and not hasattr(record, name):
                raise MissingField(missing(name, record))
            row[name] = getattr(record, name)
        for name in self._optional:
            row[name] = getattr(record, name, None)
        return row


def record_of(row: Any) -> Any:
    """Returns the record from which a row was made."""
    return row.record if type(row) is Row else row


def is_missing(name: str | int, record: Any) -> bool:
    """Whether a record does not have this field."""
    if isinstance(record, Mapping):
        return name not in record
    if isinstance(name, int):
        try:
            record[name]
        except (IndexError, KeyError, TypeError):
            return True
        return False
    return name not in (fields_of(record) or ()) and not hasattr(type(record), name)


def missing(name: str | int, record: Any) -> str:
    """Describes a record without a field, for a message."""
    known = fields_of(record)
    kind = type(record).__name__
    if isinstance(name, int) and isinstance(record, tuple | list):
        return f"the record has no element {name}; it has {len(record)}, counted from 0"
    if known is None:
        hint = ""
        if isinstance(record, str):
            hint = f'; a text has the one field "{TEXT}"'
        elif isinstance(record, tuple | list):
            hint = "; take an element by its index, as in key_by(0)"
        return f"the record, of type {kind}, has no field {name!r}{hint}"
    names = shorten(", ".join(map(str, known)), 400)[1:-1] or "none"
    guess = nearest(name, [each for each in known if isinstance(each, str)]) if isinstance(name, str) else ""
    return f"the record has no field {name!r}{guess or ';'} it has: {names}"


def fields_of(record: Any) -> list[Any] | None:
    """Returns the names of a record's fields, or None when records of this kind have no names."""
    if isinstance(record, Mapping):
        return list(record)
    if dataclasses.is_dataclass(record):
        return [field.name for field in dataclasses.fields(record)]
    cls = type(record)
    for attribute in ("_fields", "__struct_fields__"):  # of named tuples, of msgspec structs
        names = getattr(cls, attribute, None)
        if isinstance(names, tuple):
            return list(names)
    own = [name for name in getattr(record, "__dict__", ()) if not name.startswith("_")]
    slots = [name for each in cls.__mro__ for name in slots_of(each) if not name.startswith("_")]
    return own + slots or None
