"""The operator `process`: a user's function for each key, with state and timers. It must never mix the outputs of two
keys' records, nor hold more than a piece of outputs in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from operator import length_hint
from typing import Any

from penstock.runtime.errors import FlowError
from penstock.runtime.mistakes import called
from penstock.runtime.operators.base import EXPAND_RECORDS_MAX, Operator, Stage, StageContext
from penstock.runtime.operators.process import Process, ProcessContext
from penstock.runtime.records.batch import Batch, KeyedBatch
from penstock.runtime.records.key_groups import of_key
from penstock.runtime.records.pickling import copied
from penstock.runtime.records.userfunc import (
    DEAD_LETTERS,
    check_function,
    no_list,
    of_no_list,
    user_line,
)
from penstock.runtime.state.keyed import KeyedMap, SavedState, StageState
from penstock.runtime.state.timers import Timers

_NO_LISTS = frozenset((str, bytes, dict))


class Processing(Operator):
    """The operator process(fn): a user's function with keyed state, timers and side outputs."""

    kind = "process"
    keyed = True
    why_not_in_spark = "its state and timers are the function's own"

    def __init__(
        self,
        process: Process | Callable[..., Any],
        outputs: Iterable[str] = (),
        on_timer: Callable[..., Any] | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        if not isinstance(process, Process):
            if isinstance(process, type) and issubclass(process, Process):
                raise FlowError(f"process {self.name!r} needs a Process, got {called(process)}")
            check_function(process, f"process {self.name!r}", ("ctx", "key", "record"), yields=True)
        elif type(process).process is Process.process:
            raise FlowError(
                f"process {self.name!r}: {type(process).__name__} has no method process(self, ctx, key, record)"
            )
        if on_timer is not None:
            if isinstance(process, Process):
                raise FlowError(f"process {self.name!r}: a Process has its own on_timer method; do not give another")
            check_function(on_timer, f"process {self.name!r}: on_timer", ("ctx", "key", "at"), yields=True)
        if isinstance(outputs, str):
            raise FlowError(f"process {self.name!r}: outputs={outputs!r}; give a tuple of names: ({outputs!r},)")
        outputs = tuple(outputs)
        if DEAD_LETTERS in outputs or len(set(outputs)) != len(outputs):
            raise FlowError(f"process {self.name!r}: outputs={outputs}: names must be unique, not {DEAD_LETTERS!r}")
        self.process = process
        self.on_timer = on_timer
        self.outputs = (*outputs, *self.outputs)

    def stage(self, context: StageContext) -> Stage:
        return _Processing(context, self.process, self.on_timer)


class _Processing(Stage):
    """Calls the user's function for one record after the other. Outputs leave in pieces of limited size."""

    expands = True
    timed = True

    def __init__(
        self,
        context: StageContext,
        process: Process | Callable[..., Any],
        on_timer: Callable[..., Any] | None,
    ) -> None:
        super().__init__(context)
        # A copy, because the tasks of one worker must not share what the user keeps in it, nor change the flow's own
        # object.
        self._process = copied(process) if isinstance(process, Process) else process
        self._on_timer = self._process.on_timer if isinstance(self._process, Process) else on_timer
        self._timers = Timers(context.epochs)
        self.user = ProcessContext(context.operator.name, context.index, context.parallelism, context.side)
        self.user.clock = context.wall
        if self._on_timer is not None and getattr(self._on_timer, "__func__", None) is not Process.on_timer:
            self.user.timers = self._timers
        self._map = KeyedMap(self.user.state, context.epochs)
        self._records: Iterator[Any] = iter(())  # of the present batch

    @property
    def left(self) -> int:
        return length_hint(self._records)

    def open(self) -> None:
        if isinstance(self._process, Process):
            self._process.open(self.user)

    def expand(self, batch: Batch) -> Iterator[Batch]:
        assert isinstance(batch, KeyedBatch)
        process = self._process.process if isinstance(self._process, Process) else self._process
        user = self.user
        out = user.emitted
        self._records = iter(batch.values)
        for key, record in zip(batch.keys, self._records, strict=True):
            user.key = key
            try:
                result = process(user, key, record)
                if type(result) is list or type(result) is tuple:
                    out += result
                elif result is not None:
                    yield from _taken(result, out)
            except BaseException as error:
                self.errors.handle(record, of_key(key, of_no_list(error)))
            if len(out) >= EXPAND_RECORDS_MAX:
                yield from _full_pieces(out)
        self._note(batch.keys)
        yield from _rest(out)

    def next_timer(self) -> float | None:
        return self._timers.next()

    def fire(self, now: float) -> Iterator[Batch]:
        user = self.user
        out = user.emitted
        for at, key in self._timers.due(now):
            if not self._timers.take(key, at):
                continue
            user.key = key
            assert self._on_timer is not None
            try:
                result = self._on_timer(user, key, round(at * 1000))
                if result is not None:
                    yield from _taken(result, out)
            except BaseException as error:
                self.errors.handle(("timer", key, round(at * 1000)), of_no_list(error))
            self._note((key,))
            yield from _full_pieces(out)
        yield from _rest(out)

    def _note(self, keys: Collection[Any]) -> None:
        if self.user.cleared:
            self.user.cleared = False
            self._map.removed()
        self._map.note(keys)

    def finish(self) -> Iterator[Batch]:
        yield from self.fire(math.inf)
        if not isinstance(self._process, Process):
            return
        out = self.user.emitted
        try:
            result = self._process.finish(self.user)
            if result is not None:
                yield from _taken(result, out)
        except BaseException as error:
            raise self.errors.failure("(finishing)", of_no_list(error), user_line(error)) from error
        yield from _full_pieces(out)
        yield from _rest(out)

    def wants_whole(self) -> bool:
        return self._map.wants_whole or self._timers.saved.wants_whole

    def snapshot(self, epoch: int, whole: bool) -> StageState:
        return StageState({"state": self._map.delta(whole), "timers": self._timers.saved.delta(whole)})

    def restore(self, epoch: int, saved: SavedState) -> None:
        self._map.restore(saved.maps.get("state", {}))
        self._timers.restore(saved.maps.get("timers", {}))
        if len(self._timers) and self.user.timers is None:
            raise FlowError(
                f"process {self.context.operator.name!r} continues with {len(self._timers):,} saved timers, and has no "
                "on_timer that could be called for them; give it the on_timer that it had when they were saved"
            )

    def close(self, failed: bool) -> None:
        if isinstance(self._process, Process):
            self._process.close()

    def drop_state(self) -> None:
        self._map.drop()
        self._timers.drop()


def _taken(result: Iterable[Any], out: list[Any]) -> Iterator[list[Any]]:
    """Adds what a user's function has returned to `out`, and yields full pieces meanwhile."""
    if type(result) in _NO_LISTS:  # the test of `no_list`, at a cost that is small enough for every record
        raise TypeError(no_list(result))
    outputs = iter(result)
    while more := list(islice(outputs, EXPAND_RECORDS_MAX)):
        out += more
        yield from _full_pieces(out)


def _rest(out: list[Any]) -> Iterator[list[Any]]:
    """Yields what is left in a list, less than a full piece."""
    if out:
        yield out[:]
        out.clear()


def _full_pieces(out: list[Any]) -> Iterator[list[Any]]:
    """Yields full pieces from the front of a list."""
    while len(out) >= EXPAND_RECORDS_MAX:
        yield out[:EXPAND_RECORDS_MAX]
        del out[:EXPAND_RECORDS_MAX]
