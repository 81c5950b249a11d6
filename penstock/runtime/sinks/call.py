"""The user's own function as a sink, and no sink at all.

Call must never let a function see, and keep, a list that the runtime still uses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from penstock.runtime.records.userfunc import ErrorHandler, check_function, consume
from penstock.runtime.sinks.base import Guarantee, Sink, SinkContext, SinkWriter


class Call(Sink):
    """Calls a function for every record, in the worker, and ignores the function's result.

        stream.write(ps.sinks.Call(send_alert))
        stream.write(ps.sinks.Call(insert_rows, batches=True))
        stream.write(ps.sinks.Call(upsert, idempotent=True))

    `fn`: the function. It is called with one record. With `batches=True` it is called with a list of the records that
    are ready; the list has at least one record, and the function may keep it.
    `idempotent`: True declares that a second call with the same record does no harm, for example because the function
    sets the value of a key. Penstock does not check this.

    Guarantee in a job with epochs: at least once. After a failure the function is called again with all records since
    the last complete epoch, including records that it has already had. With `batches=True` these records may be divided
    into other lists than before. With `idempotent=True` the guarantee is "idempotent", which is as good as exactly once
    if the declaration is true.

    Errors: FlowError is raised when the function cannot travel to a worker. A record for which the function raises is a
    failed record. With `batches=True` the whole list is one failed record, because nobody knows how far the function
    came. With `idempotent=True` the function is first called again, for a minute, after an error that may pass, such as
    ConnectionError or TimeoutError; without it, that might do the same twice.
    """

    def __init__(self, fn: Callable[[Any], Any], *, batches: bool = False, idempotent: bool = False) -> None:
        check_function(fn, "Call")
        self.fn = fn
        self.batches = batches
        self.guarantee: Guarantee = "idempotent" if idempotent else "at least once"

    def writer(self, context: SinkContext) -> SinkWriter:
        errors = _Again(context, self.fn) if self.guarantee == "idempotent" else context.errors
        kind = _BatchWriter if self.batches else _RecordWriter
        return kind(self.fn, errors)

    def describe(self) -> str:
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        batches = ", batches=True" if self.batches else ""
        idempotent = ", idempotent=True" if self.guarantee == "idempotent" else ""
        return f"Call({name}{batches}{idempotent})"

    def __repr__(self) -> str:
        return self.describe()


class _Again(ErrorHandler):
    """Calls the function again with a record for which it has failed, if the error may pass."""

    def __init__(self, context: SinkContext, fn: Callable[[Any], Any]) -> None:
        super().__init__(context.operator)
        self._context = context
        self._fn = fn

    def handle(self, record: Any, error: BaseException, records: int = 1) -> None:
        """See ErrorHandler."""
        try:
            self._context.patiently("the function", lambda: self._fn(record), failed=error)
        except BaseException as last:  # of the user's function; the policy decides
            self._context.errors.handle(record, last, records)


class _RecordWriter(SinkWriter):
    repeats_writes = False  # the function is called again for each record by itself

    def __init__(self, fn: Callable[[Any], Any], errors: ErrorHandler) -> None:
        self._fn = fn
        self._errors = errors

    def write(self, records: list[Any]) -> None:
        consume(lambda it: deque(map(self._fn, it), maxlen=0), records, self._errors)


class _BatchWriter(SinkWriter):
    repeats_writes = False  # as above

    def __init__(self, fn: Callable[[Any], Any], errors: ErrorHandler) -> None:
        self._fn = fn
        self._errors = errors

    def write(self, records: list[Any]) -> None:
        if not records:
            return
        try:
            self._fn(list(records))
        except BaseException as error:
            self._errors.handle(records[:], error, len(records))


class Null(Sink):
    """Drops all records, to measure the operators before it.

        stream.write(ps.sinks.Null())

    Guarantee in a job with epochs: idempotent. After a failure records are dropped once more, with the same effect.
    """

    guarantee: Guarantee = "idempotent"

    def writer(self, context: SinkContext) -> SinkWriter:
        return _NullWriter()

    def describe(self) -> str:
        return "Null()"

    def __repr__(self) -> str:
        return self.describe()


class _NullWriter(SinkWriter):
    def write(self, records: list[Any]) -> None:
        pass
