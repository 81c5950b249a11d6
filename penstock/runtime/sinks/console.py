"""A sink that prints in the driver's terminal.

It must never print in the worker: lines go to the driver, which prints whole lines.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.runtime.errors import FlowError
from penstock.runtime.records.userfunc import apply
from penstock.runtime.sinks.base import Guarantee, Sink, SinkContext, SinkWriter
from penstock.runtime.units import is_whole

CHANNEL = "console"


class Console(Sink):
    """Prints records in the program that started the job, one record on each line.

        stream.write(ps.sinks.Console(limit=20))

    A str is printed as it is, any other record by its repr().

    `limit`: how many records of each task of the sink are printed. Later records are dropped. With None all records are
    printed.

    While the program that started the job prints more slowly than records come, the sink waits, as every sink does.
    When that program has gone, the last 10,000 lines are kept for a program that attaches to the job.

    Guarantee in a job with epochs: at least once. After a failure the lines since the last complete epoch may be
    printed again, and `limit` counts from the beginning again.

    Errors: FlowError is raised for a limit that is negative or no whole number. A record whose repr() raises is a
    failed record.
    """

    prints = True
    guarantee: Guarantee = "at least once"

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and not (is_whole(limit) and limit >= 0):
            raise FlowError(f"Console: limit must be a whole number of records, 0 or more, got {limit!r}")
        self.limit = limit

    def writer(self, context: SinkContext) -> SinkWriter:
        return _ConsoleWriter(self.limit, context)

    def describe(self) -> str:
        return "Console()" if self.limit is None else f"Console(limit={self.limit})"

    def __repr__(self) -> str:
        return self.describe()


class _ConsoleWriter(SinkWriter):
    def __init__(self, limit: int | None, context: SinkContext) -> None:
        self._left = limit
        self._context = context

    def write(self, records: list[Any]) -> None:
        if self._left is not None:
            records = records[: self._left]
            self._left -= len(records)
        lines = apply(partial(map, _shown), records, self._context.errors)
        if lines:
            self._context.report(CHANNEL, lines)


def _shown(record: Any) -> str:
    return record if isinstance(record, str) else repr(record)
