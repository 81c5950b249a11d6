"""The operators of sources and sinks, where records enter a flow and leave it. An error of a sink must
never be lost: it becomes a failure of its operator.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

from penstock.runtime.errors import FlowError
from penstock.runtime.forks import end_forks
from penstock.runtime.mistakes import called
from penstock.runtime.operators.base import Operator, Stage, StageContext
from penstock.runtime.records.batch import Batch
from penstock.runtime.sinks.base import Sink, SinkContext, SinkWriter
from penstock.runtime.sinks.two_phases import TwoPhases
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
        return Writing(context, self.sink)


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


class Writing(Stage):
    """Writes to a sink. In a job that continues, the writer is made only when all tasks are connected: by then, what
    earlier writers had prepared is committed, wherever they were."""

    def __init__(self, context: StageContext, sink: Sink) -> None:
        super().__init__(context)
        self.sink = sink
        self.closed: Future[None] | None = None  # done when nothing of the sink is at work any more
        self.phases: TwoPhases | None = None
        self._sink_context = context.sink_context or SinkContext(
            context.operator.name, context.index, context.parallelism
        )
        self._saved: tuple[int, list[Any]] | None = None  # the epoch that the task goes back to, and what it has
        self._repeats = False  # whether what has failed may be written again
        self._process = os.getpid()

    def open(self) -> None:
        context = self._sink_context
        context.errors = self.errors
        context.patience = context.patience.part(self.sink.patience_s)
        if not context.restoring:
            self._make_writer()

    def _make_writer(self) -> SinkWriter:
        self.phases = TwoPhases(self.sink, self._sink_context, self.errors.blamed)
        writer = self.phases.writer
        repeats = writer.repeats_writes
        self._repeats = self.sink.guarantee == "idempotent" if repeats is None else repeats
        return writer

    def _patiently(self, what: str, step: Callable[[], Any]) -> Any:
        """Takes a step of the writer, again and again while its errors may pass, if it may be repeated."""
        if not self._repeats:
            return step()
        assert self.phases is not None
        return self._sink_context.patiently(what, step, self.phases.writer.passing_errors)

    def run(self, batch: Batch) -> Batch:
        assert isinstance(batch, list)
        assert self.phases is not None
        end_forks(self._process)
        with self.errors.blamed(batch):
            if self._repeats:
                writer = self.phases.writer
                self._patiently("write()", lambda: writer.write(batch))
            else:
                self.phases.writer.write(batch)
        return []

    def flush(self) -> None:
        if self.phases is not None:
            with self.errors.blamed("(flushing)"):
                self._patiently("flush()", self.phases.writer.flush)

    def finish(self) -> Iterator[Batch]:
        if self.phases is not None:
            with self.errors.blamed("(finishing)"):
                self.phases.writer.finish()
        return iter(())

    def snapshot(self, epoch: int, whole: bool) -> StageState:
        assert self.phases is not None
        return StageState(own=self.phases.prepare(epoch, partial(self._patiently, "prepare()")))

    def restore(self, epoch: int, saved: SavedState) -> None:
        self._saved = epoch, saved.own

    def begin(self) -> None:
        if self.phases is None:
            self._make_writer()
        if self._saved is not None:
            assert self.phases is not None
            saved, self._saved = self._saved, None
            self.phases.restore(*saved)

    def commit(self, epoch: int, *, last: bool = False) -> Future[None] | None:
        return None if self.phases is None else self.phases.complete(epoch, last=last)

    def cancel(self, epoch: int) -> None:
        if self.phases is not None:
            self.phases.cancel(epoch)

    def close(self, failed: bool) -> None:
        self._sink_context.patience.give_up()
        if self.phases is not None:
            self.closed = self.phases.close(failed)
