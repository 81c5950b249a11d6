"""Lookups in a table that changes: one that is loaded again and again, or one that a function is asked for row by row.

`lookup` with a static table is in runtime/operators/lookup.py. Here the row depends on when a record comes, so a record
that is processed again after a failure may get another row. A record must never wait for a table that is being loaded
again: the rows that were loaded last hold until the new ones are there.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

from penstock.runtime.errors import FlowError, describe
from penstock.runtime.mistakes import called, checks_options
from penstock.runtime.operators.base import CallingStage, Operator, Stage, StageContext
from penstock.runtime.operators.lookup import How, keyed_rows, missing_row, on_fields
from penstock.runtime.records.batch import Batch
from penstock.runtime.records.userfunc import check_function
from penstock.runtime.units import number_above_zero, seconds, whole

logger = logging.getLogger(__name__)


@checks_options
class Reloaded:
    """A table that each task of a `lookup` loads when it starts, and again `every_s` seconds after the last load.

    `load()` returns rows as dicts, or a pyarrow Table. It runs in a thread while records pass, which get the rows that
    were loaded before. So a row is at most as old as `every_s` and two loads together: the one that has brought it, and
    the one that will replace it. Records only begin a load, and only records take up its rows, so after a pause of the
    input the first records get rows from before the pause.

    When loading again fails, the rows that were loaded last hold, and the task logs a warning and tries again after
    `every_s`. A load that takes longer than `every_s` is told too: give what it asks a timeout, because no other load
    begins before it has ended. The first load must not fail: it is part of opening the operator.

    Each task loads for itself, at times of its own, so two tasks may have different versions for a while. A job that
    goes back loads again, so a record that is processed again may get a newer row."""

    def __init__(self, load: Callable[[], Any], every_s: float | timedelta) -> None:
        check_function(load, "Reloaded(load)", (), opens=True)
        self.load = load
        self.every_s = number_above_zero(seconds(every_s, "Reloaded(every_s)"), "Reloaded(every_s)")

    def __repr__(self) -> str:
        return f"Reloaded({getattr(self.load, '__qualname__', self.load)}, {self.every_s:g} s)"


class OutsideLookup(Operator):
    """Joins dict records with the rows of a Reloaded table, or with the result of fn(key): a dict, or None for no row.
    `cache_s` and `cache_rows`: for how long, and how many rows, a task keeps of what the function has returned, also
    that there is no row."""

    kind = "lookup"
    why_not_in_spark = "its table is not known before it runs"

    def __init__(
        self,
        table: Reloaded | Callable[[Any], Any],
        on: str | tuple[str, str],
        how: How = "inner",
        columns: Iterable[str] | None = None,
        cache_s: float | timedelta = 60.0,
        cache_rows: int = 10_000,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        what = f"lookup {self.name!r}"
        self.left, self.right = on_fields(on, how, columns, what)
        self.how = how
        self.columns = None if columns is None else list(columns)
        if how == "left" and self.columns is None:
            raise FlowError(
                f"{what}: how='left' gives None to records without a row, so say in which columns: columns=[...]"
            )
        if not isinstance(table, Reloaded):
            check_function(table, what, ("key",), opens=True)
        self.table = table
        self.cache_s = seconds(cache_s, f"{what}: cache_s")
        self.cache_rows = whole(cache_rows, f"{what}: cache_rows")

    def stage(self, context: StageContext) -> Stage:
        return _Reloading(context, self) if isinstance(self.table, Reloaded) else _Asking(context, self)


class _Joining(CallingStage):
    def __init__(self, context: StageContext, operator: OutsideLookup, fn: Callable[..., Any]) -> None:
        super().__init__(context, fn)
        self._operator = operator
        self._nothing = None if operator.how == "inner" else dict.fromkeys(operator.columns or ())

    def _join(self, records: list[Any], row_of: Callable[[Any], Mapping[str, Any] | None]) -> Batch:
        left, nothing, out = self._operator.left, self._nothing, []
        for record in records:
            try:
                key = record[left]
                row = row_of(key)
                if row is not None:
                    out.append({**record, **row})
                elif nothing is not None:
                    out.append({**record, **nothing})
            except BaseException as error:
                self.errors.handle(record, missing_row(left, record, error))
        return out

    def _wanted(self, row: Any) -> dict[str, Any]:
        """Returns the columns of a row that a record gets."""
        if not isinstance(row, Mapping):
            raise TypeError(f"the function returned {called(row)}; return a dict, or None for no row")
        if self._operator.columns is None:
            return {name: value for name, value in row.items() if name != self._operator.right}
        try:
            return {name: row[name] for name in self._operator.columns}
        except KeyError as error:
            has = ", ".join(map(repr, row)) or "nothing"
            raise LookupError(f"the row that the function returned has no column {error}; it has: {has}") from None


class _Reloading(_Joining):
    def __init__(self, context: StageContext, operator: OutsideLookup) -> None:
        assert isinstance(operator.table, Reloaded)
        super().__init__(context, operator, operator.table.load)
        self._every_s = operator.table.every_s
        self._rows: dict[Any, dict[str, Any]] = {}
        self._loaded: tuple[dict[Any, dict[str, Any]] | None, BaseException | None] | None = None
        self._due = 0.0
        self._loading: threading.Thread | None = None

    def open(self) -> None:
        super().open()
        self._rows = self._load_rows()
        self._due = self.context.wall() + self._every_s

    def _load_rows(self) -> dict[Any, dict[str, Any]]:
        operator = self._operator
        what = f"lookup {operator.name!r}"
        return keyed_rows(self._own.fn(), operator.right, operator.columns, what)[0]

    def run(self, batch: Batch) -> Batch:
        assert isinstance(batch, list)
        if self._loaded is not None:
            self._take()
        elif self.context.wall() < self._due:
            pass
        elif self._loading is not None:
            self._due = math.inf  # it is told once
            self._warn("loading the table again takes longer than every_s=%g", self._every_s)
        else:
            # A thread that ends with the process: a load that never returns must hold up neither records nor the end.
            self._loading = threading.Thread(target=self._load_again, name=f"load {self._operator.name}", daemon=True)
            self._loading.start()
            self._due = self.context.wall() + self._every_s
        return self._join(batch, self._rows.get)

    def _load_again(self) -> None:
        try:
            self._loaded = self._load_rows(), None
        except BaseException as error:
            self._loaded = None, error

    def _take(self) -> None:
        assert self._loaded is not None
        rows, error = self._loaded
        self._loaded = self._loading = None
        self._due = self.context.wall() + self._every_s
        if rows is not None:
            self._rows = rows
        else:
            assert error is not None
            what = "the table could not be loaded again, which is tried once more in %g s (%s)"
            self._warn(what, self._every_s, describe(error))

    def _warn(self, what: str, *args: object) -> None:
        said = f"lookup %r, task %d: {what}; until then the rows that were loaded before hold"
        logger.warning(said, self._operator.name, self.context.index, *args)


class _Asking(_Joining):
    def __init__(self, context: StageContext, operator: OutsideLookup) -> None:
        assert not isinstance(operator.table, Reloaded)
        super().__init__(context, operator, operator.table)
        # The rows, and until when each holds; the one that was used last comes last.
        self._known: OrderedDict[Any, tuple[float, dict[str, Any] | None]] = OrderedDict()

    def run(self, batch: Batch) -> Batch:
        assert isinstance(batch, list)
        return self._join(batch, self._row_of)

    def _row_of(self, key: Any) -> dict[str, Any] | None:
        known, now = self._known, self.context.wall()
        found = known.get(key)
        if found is not None and found[0] > now:
            known.move_to_end(key)
            return found[1]
        row = self._own.fn(key)
        wanted = None if row is None else self._wanted(row)
        known[key] = (now + self._operator.cache_s, wanted)
        known.move_to_end(key)
        if len(known) > self._operator.cache_rows:
            known.popitem(last=False)
        return wanted
