"""A sink that brings records into the program's memory, for tests, notebooks and small results.

It must never hold more than its limit allows, and never give records of a job that has not been run.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from typing import Any

from penstock.runtime.errors import CodecError, FlowError, PenstockError, describe
from penstock.runtime.records.codec import encode
from penstock.runtime.records.userfunc import DeadLetter
from penstock.runtime.sinks.base import Sink, SinkContext, SinkWriter
from penstock.runtime.units import is_whole


class Collect(Sink):
    """Brings the records to the program.

        result = ps.sinks.Collect()
        stream.write(result)
        ps.run(flow).wait()
        print(result.records())

    `limit`: the job fails when there are more records than this. With None all records are held, however many come.

    In a job with epochs a record shows when its epoch is complete, and each record shows exactly once. The records of
    one task of the sink keep their order; the records of several tasks are mixed.

    Errors: FlowError is raised for a limit that is negative or no whole number, and by records() when this program has
    not run a job with this sink. PenstockError is raised when there are more records than the limit. A record that
    cannot be pickled, and so cannot travel to the program, is a failed record.
    """

    guarantee = "exactly once"

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and not (is_whole(limit) and limit >= 0):
            raise FlowError(f"Collect: limit must be a whole number of records, 0 or more, got {limit!r}")
        self.limit = limit
        self.channel: str = f"collect-{uuid.uuid4().hex}"
        self._fetch: Callable[[], list[Any]] | None = None

    def bind(self, fetch: Callable[[], list[Any]]) -> None:
        self._fetch = fetch

    def records(self) -> list[Any]:
        """Returns all records that have arrived so far, also while the job runs and after it has failed."""
        if self._fetch is None:
            raise FlowError(
                "Collect has no records: no job with this sink was run by this program. "
                "Keep the object that you gave to write(), run the flow, then ask it for its records()."
            )
        records = self._fetch()
        if self.limit is not None and len(records) > self.limit:
            raise _too_many(self.limit)
        return records

    def writer(self, context: SinkContext) -> SinkWriter:
        return _CollectWriter(self.channel, self.limit, context)

    def describe(self) -> str:
        return "Collect()" if self.limit is None else f"Collect(limit={self.limit})"

    def __repr__(self) -> str:
        return self.describe()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fetch": None}  # only the program's own object can fetch


class _CollectWriter(SinkWriter):
    def __init__(self, channel: str, limit: int | None, context: SinkContext) -> None:
        self._channel = channel
        self._limit: float = math.inf if limit is None else limit
        self._context = context
        self._count = 0

    def write(self, records: list[Any]) -> None:
        if self._count + len(records) > self._limit:
            records = self._able_to_travel(records)  # the others do not count
            if self._count + len(records) > self._limit:
                raise _too_many(self._limit)
        try:
            self._report(records)
        except _REFUSED:
            self._report(self._able_to_travel(records))

    def _report(self, records: list[Any]) -> None:
        if records:
            self._context.report(self._channel, list(records))
            self._count += len(records)

    def _able_to_travel(self, records: list[Any]) -> list[Any]:
        """Returns the records that can be pickled. The others have failed, but of a dead letter whose record cannot be
        pickled a description travels."""
        able = []
        for record in records:
            try:
                encode([record])
            except _REFUSED as error:
                if isinstance(record, DeadLetter):
                    able.append(record.shortened())
                else:
                    self._context.errors.handle(record, _cannot_travel(record, error.__cause__ or error))
            else:
                able.append(record)
        return able


# What pickling a record raises: a class may even call sys.exit() there.
_REFUSED = (CodecError, SystemExit)


def _cannot_travel(record: Any, error: BaseException) -> CodecError:
    return CodecError(
        f"a record of type {type(record).__qualname__} cannot be pickled, so it cannot travel to the program, which "
        f"collects it: {describe(error)}. Emit plain data in its stead (numbers, text, tuples, dicts, dataclasses), or "
        "give its class a __reduce__ method"
    )


def _too_many(limit: float) -> PenstockError:
    return PenstockError(
        f"Collect: more than limit={limit:,} records came. Raise the limit, keep fewer records, "
        "or write them to files with sinks.Files."
    )
