"""The operator `process`: a user's function for each key, with state and timers. It must never mix the outputs of two
keys' records, nor hold more than a piece of outputs in memory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import timedelta
from inspect import signature
from itertools import islice
from operator import length_hint
from typing import Any

from penstock.runtime.errors import FlowError, PenstockError
from penstock.runtime.event_time.watermark import END_OF_TIME, IDLE, duration_ms, held_back
from penstock.runtime.mistakes import called
from penstock.runtime.operators.base import EXPAND_RECORDS_MAX, KeyedStage, Operator, Stage, StageContext
from penstock.runtime.operators.process import (
    NO_KEY,
    BroadcastProcessFunction,
    CoProcessFunction,
    ProcessContext,
    ProcessFunction,
)
from penstock.runtime.operators.side_outputs import declared
from penstock.runtime.records.batch import Batch, KeyedBatch
from penstock.runtime.records.key_groups import of_key
from penstock.runtime.records.pickling import copied
from penstock.runtime.records.userfunc import DEAD_LETTERS, check_function, no_list, of_no_list, user_line
from penstock.runtime.state.keyed import KeyedMap, SavedState, StageState
from penstock.runtime.state.timers import Timers

logger = logging.getLogger(__name__)

_NO_LISTS = frozenset((str, bytes, dict))

# A key whose timers set timers that are due at once this many times in a row does so for ever.
_CHAINED_MOST = 1_000_000

# Watermarks are multiples of this number of milliseconds where nothing but ctx.watermark() asks for them.
_GRAIN_MS = 100


class Processing(Operator):
    """The operator process(fn): a user's function with keyed state, timers and side outputs."""

    kind = "process"
    keyed = True
    why_not_in_spark = "its state and timers are the function's own"
    methods: tuple[str, ...] = ("process",)  # of a ProcessFunction, for each input the one that takes its records

    def __init__(
        self,
        process: ProcessFunction | Callable[..., Any],
        outputs: Iterable[str] = (),
        on_timer: Callable[..., Any] | None = None,
        on_event_timer: Callable[..., Any] | None = None,
        hold_s: float | timedelta = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.hold_ms = duration_ms(hold_s, f"{self.kind} {self.name!r}: hold_s", least=0)
        self._check(process)
        for name, callback in (("on_timer", on_timer), ("on_event_timer", on_event_timer)):
            if callback is None:
                continue
            if isinstance(process, ProcessFunction):
                raise FlowError(
                    f"{self.kind} {self.name!r}: a {type(process).__name__} has its own {name} method; do not give "
                    "another"
                )
            check_function(callback, f"{self.kind} {self.name!r}: {name}", ("ctx", "key", "at"), yields=True)
        self.process = process
        self.on_timer = _own(process, "on_timer", on_timer)
        self.on_event_timer = _own(process, "on_event_timer", on_event_timer)
        self.outputs = (*declared(outputs, (DEAD_LETTERS,), f"{self.kind} {self.name!r}"), *self.outputs)
        self.time_grain = 1 if self.on_event_timer is not None else _GRAIN_MS

    def _check(self, process: Any) -> None:
        """Raises FlowError unless this is something that can be called for records."""
        if not isinstance(process, ProcessFunction):
            if isinstance(process, type) and issubclass(process, ProcessFunction):
                raise FlowError(f"process {self.name!r} needs a ProcessFunction, got {called(process)}")
            check_function(process, f"process {self.name!r}", ("ctx", "key", "record"), yields=True)
            return
        self._check_methods(process)
        if isinstance(process, CoProcessFunction | BroadcastProcessFunction):
            base = CoProcessFunction if isinstance(process, CoProcessFunction) else BroadcastProcessFunction
            raise FlowError(
                f"process {self.name!r}: {type(process).__name__} is a {base.__name__}, which takes two inputs: "
                "a.connect(b).process(...)"
            )

    def _check_methods(self, process: ProcessFunction) -> None:
        for method in self.methods:
            function = getattr(type(process), method)
            if function.__module__ == ProcessFunction.__module__:  # the user's class has not replaced it
                takes = ", ".join(signature(function).parameters)
                raise FlowError(f"{self.kind} {self.name!r}: {type(process).__name__} has no method {method}({takes})")

    def functions(self, process: Any) -> tuple[Callable[..., Any], ...]:
        """Returns for each input the function to call for its records. `process` is the task's own copy."""
        if isinstance(process, ProcessFunction):
            return tuple(getattr(process, method) for method in self.methods)
        return (process,)

    def stage(self, context: StageContext) -> Stage:
        return ProcessStage(context, self)


def _own(process: Any, name: str, given: Callable[..., Any] | None) -> Callable[..., Any] | str | None:
    """Returns the function to call for timers: a function, the name of a method of the process, or None."""
    if not isinstance(process, ProcessFunction):
        return given
    return None if getattr(type(process), name) is getattr(ProcessFunction, name) else name


class ProcessStage(KeyedStage):
    """Calls the user's function for one record after the other. Outputs leave in pieces of limited size."""

    expands = True
    timed = True

    def __init__(self, context: StageContext, operator: Processing) -> None:
        super().__init__(context)
        # A copy, because the tasks of one worker must not share what the user keeps in it, nor change the flow's own
        # object.
        process = operator.process
        self._process = copied(process) if isinstance(process, ProcessFunction) else process
        self._functions = operator.functions(self._process)
        self._on_timer = self._callback(operator.on_timer)
        self._on_event_timer = self._callback(operator.on_event_timer)
        self._timers = Timers(context.epochs)
        self._event_timers = Timers(context.epochs)
        self.user = ProcessContext(
            context.operator.name, context.index, context.parallelism, context.side, context.epochs
        )
        self.user.clock = context.wall
        if self._on_timer is not None:
            self.user.timers = self._timers
        if self._on_event_timer is not None:
            self.user.event_timers = self._event_timers
        self._map = KeyedMap(self.user.state, context.epochs)
        self.maps = {"state": self._map, "timers": self._timers}
        if self._on_event_timer is not None:
            self.maps["event timers"] = self._event_timers
        self._hold_ms = operator.hold_ms
        self._records: Iterator[Any] = iter(())  # of the present batch
        self.event_time = context.event_time

    def _callback(self, given: Callable[..., Any] | str | None) -> Callable[..., Any] | None:
        return getattr(self._process, given) if isinstance(given, str) else given

    @property
    def left(self) -> int:
        return length_hint(self._records)

    def open(self) -> None:
        if isinstance(self._process, ProcessFunction):
            self._process.open(self.user)

    def expand(self, batch: Batch) -> Iterator[Batch]:
        assert isinstance(batch, KeyedBatch)
        process = self._functions[self.port]
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
                    yield from taken(result, out)
            except BaseException as error:
                self.errors.handle(record, of_key(key, of_no_list(error)))
            if len(out) >= EXPAND_RECORDS_MAX:
                yield from full_pieces(out)
        self.note(batch.keys)
        yield from rest(out)

    def next_timer(self) -> float | None:
        return self._timers.next()

    def fire(self, now: float) -> Iterator[Batch]:
        # A timer that is set meanwhile for the present millisecond fires when the input has had its turn, so that one
        # which sets itself again for now does not stop the job.
        return self._call_timers(self._timers.due(now, math.floor(now * 1000) / 1000), self._on_timer, 1000)

    def advance(self, watermark: int | None) -> Iterator[Batch]:
        user = self.user
        if watermark is not None and watermark != IDLE and (user.mark is None or watermark > user.mark):
            user.mark = watermark
        due = self._event_timers.next()
        if due is None or user.mark is None or due > user.mark:
            return iter(())
        return self._call_timers(self._event_timers.due(user.mark, math.inf), self._on_event_timer, 1)

    def watermark(self, watermark: int | None) -> int | None:
        return held_back(watermark, self._hold_ms)

    def _last(self) -> Iterator[tuple[float, Any, bool]]:
        """Removes the timers one after the other at the end of the input, as `Timers.due` does. Those that are set
        meanwhile take part if the clock has reached their time."""
        timers = self._timers
        now = self.context.wall()
        yield from timers.due(now, math.inf)
        for at, key in timers.in_order():
            if timers.take(key, at):
                yield at, key, False
            yield from timers.due(now, math.inf)

    def _call_timers(
        self, due: Iterator[tuple[float, Any, bool]], call: Callable[..., Any] | None, a_second: int
    ) -> Iterator[Batch]:
        """Yields the outputs of timers. Times are given to the user in ms."""
        user = self.user
        out = user.emitted
        in_a_row: dict[Any, int] = {}  # how many timers of a key were set by timers
        for at, key, is_chained in due:
            user.key = key
            at_ms = round(at * a_second)
            if is_chained:
                in_a_row[key] = in_a_row.get(key, 0) + 1
                if in_a_row[key] > _CHAINED_MOST:
                    raise self.errors.failure(("timer", key, at_ms), _for_ever(key, at_ms, user.mark == END_OF_TIME))
            assert call is not None
            try:
                result = call(user, key, at_ms)
                if result is not None:
                    yield from taken(result, out)
            except BaseException as error:
                self.errors.handle(("timer", key, at_ms), of_no_list(error))
            self.note((key,))
            yield from full_pieces(out)
        yield from rest(out)

    def note(self, keys: Collection[Any]) -> None:
        """Notes that the state of these keys may have changed."""
        if self.user.cleared:
            self.user.cleared = False
            self._map.removed()
        self._map.note(keys)

    def finish(self) -> Iterator[Batch]:
        yield from self.advance(END_OF_TIME)
        yield from self._call_timers(self._last(), self._on_timer, 1000)
        yield from self.advance(END_OF_TIME)  # of event timers that the others have set
        if dropped := len(self._timers):
            logger.warning(
                "process %r: on_timer has set %d timers after the end of the input, for times that the clock has not "
                "reached. They do not fire",
                self.context.operator.name,
                dropped,
            )
        self.user.key = NO_KEY
        if not isinstance(self._process, ProcessFunction):
            return
        out = self.user.emitted
        try:
            result = self._process.finish(self.user)
            if result is not None:
                yield from taken(result, out)
        except BaseException as error:
            raise self.errors.failure("(finishing)", of_no_list(error), user_line(error)) from error
        yield from full_pieces(out)
        yield from rest(out)

    def wants_whole(self) -> bool:
        return super().wants_whole() or self.user.named.wants_whole

    def own_state(self) -> Any:
        return (self.user.mark,)

    def snapshot(self, epoch: int, whole: bool) -> StageState:
        state = super().snapshot(epoch, whole)
        state.maps.update(self.user.named.deltas(whole))
        return state

    def restore(self, epoch: int, saved: SavedState) -> None:
        super().restore(epoch, saved)
        self.user.named.restore(saved.maps)
        self.user.mark = max((mark for mark, *_ in saved.own if mark is not None), default=None)
        for title, call, what in (
            ("timers", self._on_timer, "on_timer"),
            ("event timers", self._on_event_timer, "on_event_timer"),
        ):
            if call is None and (timers := sum(map(len, saved.maps.get(title, {}).values()))):
                raise FlowError(
                    f"{self.context.operator.kind} {self.context.operator.name!r} continues with {timers:,} saved "
                    f"timers, and has no {what} that could be called for them; give it the {what} that it had when "
                    "they were saved"
                )

    def close(self, failed: bool) -> None:
        if isinstance(self._process, ProcessFunction):
            self._process.close()

    def drop_state(self) -> None:
        super().drop_state()
        self.user.named.drop()


def _for_ever(key: Any, at_ms: int, has_ended: bool) -> PenstockError:
    """The error for a key whose timers set timers that are due at once, again and again."""
    remedy = (
        "all input has ended, so every event timer is due: set no other one when ctx.watermark() is later than any "
        "time of your records"
        if has_ended
        else "let each timer set a later one, or none"
    )
    return PenstockError(
        f"timers of key {key!r} have set {_CHAINED_MOST:,} timers in a row that were due at once, the last one for "
        f"{at_ms} ms; {remedy}"
    )


def taken(result: Iterable[Any], out: list[Any]) -> Iterator[list[Any]]:
    """Adds the results of a user's function to `out`, and yields full pieces meanwhile."""
    if type(result) in _NO_LISTS:  # the test of `no_list`, at a cost that is small enough for every record
        raise TypeError(no_list(result))
    outputs = iter(result)
    while more := list(islice(outputs, EXPAND_RECORDS_MAX)):
        out += more
        yield from full_pieces(out)


def rest(out: list[Any]) -> Iterator[list[Any]]:
    """Yields the rest of a list, less than a full piece."""
    if out:
        yield out[:]
        out.clear()


def full_pieces(out: list[Any]) -> Iterator[list[Any]]:
    """Yields full pieces from the front of a list."""
    while len(out) >= EXPAND_RECORDS_MAX:
        yield out[:EXPAND_RECORDS_MAX]
        del out[:EXPAND_RECORDS_MAX]
