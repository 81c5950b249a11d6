"""The operators of sources and sinks, where records enter a flow and leave it. An error of a sink must
never be lost: it becomes a failure of its operator.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from penstock.runtime.errors import FlowError
from penstock.runtime.forks import end_forks
from penstock.runtime.mistakes import called
from penstock.runtime.operators.base import Operator, Stage, StageContext
from penstock.runtime.records.batch import Batch
from penstock.runtime.sinks.base import Sink, SinkContext, SinkWriter
from penstock.runtime.sources.base import Source
from penstock.runtime.state.keyed import SavedState, StageState


class Read(Operator):
    """A source at the head of a flow. Its stage passes on what the source task reads."""

    kind = "read"
    one_to_one = True
    why_not_in_spark = "it reads; its raw input goes to Spark"

    def __init__(self, source: Source, **common: Any) -> None:
        super().__init__(**common)
        if not isinstance(source, Source):
            raise FlowError(f"flow.read() needs a source such as {_source_for(source)}, got {called(source)}")
        self.source = source

    def stage(self, context: StageContext) -> Stage:
        return _Pass(context)


class _Pass(Stage):
    def run(self, batch: Batch) -> Batch:
        return batch


class Write(Operator):
    """A sink at the end of a flow."""

    kind = "write"
    is_sink = True
    why_not_in_spark = "it writes, by epochs"

    def __init__(self, sink: Sink, **common: Any) -> None:
        super().__init__(**common)
        if not isinstance(sink, Sink):
            raise FlowError(f"write() needs a sink such as {_sink_for(sink)}, got {called(sink)}")
        self.sink = sink

    def stage(self, context: StageContext) -> Stage:
        return _Writing(context, self.sink)


def _is_one(given: object, *of: object) -> bool:
    return any(given is each for each in of)  # an array compares each of its elements


def _source_for(given: object) -> str:
    """Says which source somebody meant who gave something else to `read`."""
    if isinstance(given, str | bytes | os.PathLike):
        return "penstock.sources.TextFiles(path), for the lines of files"
    if isinstance(given, Generator) or inspect.isgeneratorfunction(given):
        return "penstock.sources.Memory(list(records)), for what a generator yields and ends"
    if isinstance(given, Iterable) or _is_one(given, list, tuple, set, dict, range):
        return "penstock.sources.Memory(records), for records that the program has"
    return "penstock.sources.TextFiles(...) or penstock.sources.Memory(records)"


def _sink_for(given: object) -> str:
    """Says which sink somebody meant who gave something else to `write`."""
    if _is_one(given, print, sys.stdout, sys.stderr):
        return "penstock.sinks.Console(), which prints records, or penstock.sinks.Call(fn), which calls a function"
    if isinstance(given, str | bytes | os.PathLike):
        return "penstock.sinks.Files(folder), which writes files"
    if isinstance(given, list | set | deque) or _is_one(given, list, set, deque):
        return "penstock.sinks.Collect(), whose records() the program gets"
    if isinstance(given, type) and issubclass(given, Sink):
        return "penstock.sinks.Files(...)"
    if callable(given):
        return "penstock.sinks.Call(fn), which calls a function for each record"
    return "penstock.sinks.Files(...), penstock.sinks.Call(fn) or penstock.sinks.Console()"


class _Writing(Stage):
    def __init__(self, context: StageContext, sink: Sink) -> None:
        super().__init__(context)
        self._sink = sink
        self._writer: SinkWriter | None = None
        self._sink_context: SinkContext | None = None
        self._repeats = False  # whether what has failed may be written again
        self._process = os.getpid()

    def open(self) -> None:
        context = self.context.sink_context
        if context is None:
            context = SinkContext(self.context.operator.name, self.context.index, self.context.parallelism)
        context.errors = self.errors
        self._sink_context = context
        self._writer = self._sink.writer(context)
        repeats = self._writer.repeats_writes
        self._repeats = self._sink.guarantee == "idempotent" if repeats is None else repeats

    def _patiently(self, what: str, step: Callable[[], Any], *, repeats: bool = True) -> Any:
        """Takes a step of the writer, again and again while its errors may pass, if it may be repeated."""
        if not repeats:
            return step()
        assert self._sink_context is not None
        assert self._writer is not None
        return self._sink_context.patiently(what, step, self._writer.passing_errors)

    def run(self, batch: Batch) -> Batch:
        assert isinstance(batch, list)
        assert self._writer is not None
        end_forks(self._process)
        with self.errors.blamed(batch):
            if self._repeats:
                writer = self._writer
                self._patiently("write()", lambda: writer.write(batch))
            else:
                self._writer.write(batch)
        return []

    def flush(self) -> None:
        if self._writer is not None:
            with self.errors.blamed("(flushing)"):
                self._patiently("flush()", self._writer.flush, repeats=self._repeats)

    def finish(self) -> Iterator[Batch]:
        if self._writer is not None:
            with self.errors.blamed("(finishing)"):
                self._writer.finish()
        return iter(())

    def snapshot(self, epoch: int, whole: bool) -> StageState:
        writer = self._writer
        assert writer is not None
        with self.errors.blamed(f"(preparing epoch {epoch})"):
            return StageState(own=self._patiently("prepare()", lambda: writer.prepare(epoch), repeats=self._repeats))

    def restore(self, epoch: int, saved: SavedState) -> None:
        assert self._writer is not None
        with self.errors.blamed(f"(going back to epoch {epoch})"):
            self._writer.restore(epoch, saved.own)

    def commit(self, epoch: int) -> None:
        writer = self._writer
        if writer is not None:
            with self.errors.blamed(f"(committing epoch {epoch})"):
                self._patiently("commit()", lambda: writer.commit(epoch))

    def cancel(self, epoch: int) -> None:
        if self._writer is not None:
            self._writer.cancel(epoch)

    def close(self, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close(failed)
