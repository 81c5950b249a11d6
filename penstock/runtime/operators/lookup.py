"""The lookup join: each record gets the columns of a row of a static table (docs/papers.md: D7, the join with
campaigns).

The table travels with the flow, and every task has all of it. In the operation stream it is a broadcast join. The key
of the table must be unique, because a record must never come out more than once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

from penstock.runtime.errors import FlowError, shorten
from penstock.runtime.expressions import MissingField
from penstock.runtime.operators.base import Loop, Operator, Stage, StageContext
from penstock.runtime.operators.fields import missing
from penstock.runtime.records.key_groups import of_key
from penstock.runtime.units import choice

How = Literal["inner", "left"]


class Lookup(Operator):
    """Joins dict records with a table: rows as dicts, or a pyarrow Table. `on` is the field of both, or (the record's
    field, the table's field). `how`: "inner" drops records without a row, "left" gives them None in the columns of the
    table. When a record has a field with the name of a column, the column replaces it; if the record's fields are
    known, this is an error."""

    kind = "lookup"
    why_not_in_spark = None

    def __init__(
        self,
        table: Any,
        on: str | tuple[str, str],
        how: How = "inner",
        columns: Iterable[str] | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        what = f"lookup {self.name!r}"
        self.left, self.right = on_fields(on, how, columns, what)
        self.one_to_one = how == "left"
        self.how = how
        self.rows, self.columns = keyed_rows(table, self.right, columns, what)

    def stage(self, context: StageContext) -> Stage:
        get, left = self.rows.get, self.left
        nothing = None if self.how == "inner" else dict.fromkeys(self.columns)

        def joined(records: Iterator[Any]) -> Iterator[Any]:
            record = None
            try:
                for record in records:
                    if (row := get(record[left], nothing)) is not None:
                        yield {**record, **row}
            except Exception as error:  # of a user's record or key, for example of its __hash__
                raise missing_row(left, record, error) from error

        return Loop(context, joined)


def on_fields(on: str | tuple[str, str], how: str, columns: Any, what: str) -> tuple[str, str]:
    """Returns the record's field and the table's. Raises FlowError when they are none, or another option is wrong."""
    choice(how, f"{what}: how", get_args(How))
    if isinstance(columns, str):
        raise FlowError(f"{what}: columns={columns!r}; give a list of names")
    pair = (on, on) if isinstance(on, str) else on
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(name, str) for name in pair)):
        raise FlowError(f"{what}: on={on!r}; give a field's name, or the record's and the table's as a pair")
    return pair


def keyed_rows(
    table: Any, key_column: str, columns: Iterable[str] | None, what: str
) -> tuple[dict[Any, dict[str, Any]], list[str]]:
    """Returns the rows of a table by their keys, and the names of their columns without the key. Raises FlowError for a
    table whose key is not unique, or that has no such columns."""
    rows, known = _rows(table, what)
    if known and key_column not in known:
        raise FlowError(f"{what}: the table has no column {key_column!r}; it has: {_listed(known)}")
    wanted = [name for name in known if name != key_column] if columns is None else list(columns)
    for name in wanted:
        if known and name not in known:
            raise FlowError(f"{what}: the table has no column {name!r}; it has: {_listed(known)}")
    found: dict[Any, dict[str, Any]] = {}
    for row in rows:
        key = row.get(key_column)
        if key is None:
            continue  # as in SQL, null equals nothing
        try:
            doubled = key in found
        except TypeError as error:
            raise FlowError(f"{what}: {key_column}={key!r} in the table cannot be a key: {error}") from None
        if doubled:
            raise FlowError(f"{what}: the table has two rows for {key_column}={key!r}; its key must be unique")
        try:
            found[key] = {name: row[name] for name in wanted}
        except KeyError as error:
            raise FlowError(f"{what}: the table's row for {key!r} has no column {error}") from None
    return found, wanted


def missing_row(field: str, record: Any, error: BaseException) -> BaseException:
    """Describes the fault of a record that a lookup cannot take."""
    if not isinstance(record, Mapping):
        return TypeError(f"a lookup takes records that are dicts, not {type(record).__name__}: {shorten(record, 80)}")
    return MissingField(missing(field, record)) if field not in record else of_key(record[field], error)


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names))


def _rows(table: Any, what: str) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Returns the rows, and the names of the columns as far as they are known: an empty list of rows has no names."""
    if hasattr(table, "to_pylist"):
        return table.to_pylist(), list(table.schema.names)
    if isinstance(table, Mapping | str):
        raise FlowError(f"{what}: the table must be rows as dicts, or a pyarrow Table")
    rows = list(table)
    for row in rows:
        if not isinstance(row, Mapping):
            raise FlowError(f"{what}: the table's rows must be dicts, not {row!r}")
    return rows, list(rows[0]) if rows else []
