"""Aggregates for each key and window of event time (docs/papers.md: D1, D7).

The results of a window leave when the watermark reaches the window's end. Its state stays for the allowed lateness, and
every batch of late records within the lateness makes its whole results leave again. Records that come still later are
*late*: they are counted, or go to the side output "late" if the flow uses it. When senders combine, keys of closed
windows are counted instead of records.

Senders combine records before they send them, as for every aggregate. Their partial results are for each key and
window, as (start, partial result), and Spark makes the same ones in the operation stream. A record must never count in
a window whose results have left for the last time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import islice
from typing import Any, Literal, get_args

from penstock.runtime.event_time.watermark import END_OF_TIME, IDLE, are_plain, as_ms, duration_ms
from penstock.runtime.event_time.windows import Sliding
from penstock.runtime.operators.aggregated import combines
from penstock.runtime.operators.base import EXPAND_RECORDS_MAX, Operator, Stage, StageContext
from penstock.runtime.operators.late import LATE, EventTimeStage
from penstock.runtime.records.batch import Batch, KeyedBatch
from penstock.runtime.records.userfunc import ErrorHandler, check_function, select_each, without
from penstock.runtime.state.aggregate import Aggregate, add_all
from penstock.runtime.state.keyed import KeyedDelta, KeyedWhole, SavedState
from penstock.runtime.units import choice

WindowEmit = Literal["final", "latest"]


class Windowed(Aggregate):
    """An aggregate for each key and window, as a combiner: its state is by (key, start), and it sends (start, partial
    result)."""

    def __init__(self, inner: Aggregate, window: Sliding, time: Callable[[Any], Any]) -> None:
        super().__init__()
        self.name = inner.name
        self.inner = inner
        self.window = window
        self.time = time

    def new_state(self) -> dict[Any, Any]:
        return self.inner.new_state()

    def timed(
        self, keys: list[Any], records: list[Any], errors: ErrorHandler
    ) -> tuple[list[Any], list[Any], list[int]]:
        """Returns keys, records and times in parallel lists, without the records whose time cannot be taken."""
        times, failed = select_each(self.time, keys, records, errors, are_plain, as_ms)
        return without(failed, keys), without(failed, records), times

    def valued(
        self, keys: list[Any], records: list[Any], times: list[int], errors: ErrorHandler
    ) -> tuple[list[Any], list[Any], list[int]]:
        """Returns keys, selected values and times in parallel lists, without the records that fail."""
        if self.inner.selector is None:
            return keys, records, times
        values, failed = select_each(self.inner.selector, keys, records, errors)
        return without(failed, keys), values, without(failed, times)

    def assign(self, keys: list[Any], values: list[Any], times: list[int]) -> tuple[list[Any], list[int], list[Any]]:
        """Returns keys, starts of windows and values in parallel lists. A value of several windows appears several
        times."""
        window = self.window
        if window.slide == window.size:
            return keys, window.last_starts(times), values
        all_starts = list(map(window.starts, times))
        return (
            [key for key, starts in zip(keys, all_starts, strict=True) for _ in starts],
            [start for starts in all_starts for start in starts],
            [value for value, starts in zip(values, all_starts, strict=True) for _ in starts],
        )

    def prepare(self, keys: list[Any], records: list[Any], errors: ErrorHandler) -> tuple[list[Any], list[Any]]:
        keys, records, times = self.timed(keys, records, errors)
        keys, starts, values = self.assign(*self.valued(keys, records, times, errors))
        return list(zip(keys, starts, strict=True)), values

    def add(self, state: dict[Any, Any], keys: Iterator[Any], values: Iterator[Any]) -> None:
        self.inner.add(state, keys, values)

    def merge(self, state: dict[Any, Any], keys: Iterator[Any], partials: Iterator[Any]) -> None:
        raise AssertionError("partials of windows are merged by their windows")

    def shipped(self, state: dict[Any, Any]) -> tuple[list[Any], list[Any]]:
        return [key for key, _ in state], [(start, partial) for (_, start), partial in state.items()]


class WindowAggregated(Operator):
    """An aggregate for each key and window. It emits (key, start, end, result), with start and end in ms since 1970.

    `emit` says when it emits. "final" (the default): a window's results when the watermark reaches its end, and again
    after late records. "latest": after each batch, the newest result of each key and window in the batch.
    `own_time`: `time` is not how the watermark operator takes the time of a record.
    """

    keyed = True
    why_not_in_spark = "its windows stay with its tasks; Spark makes partial aggregates for them"

    def __init__(
        self,
        aggregate: Aggregate,
        window: Sliding,
        time: Callable[[Any], Any],
        lateness: float | timedelta = 0.0,
        emit: WindowEmit = "final",
        *,
        own_time: bool = False,
        **common: Any,
    ) -> None:
        self.kind = f"window_{aggregate.name}"
        super().__init__(**common)
        choice(emit, f"{self.name!r}: emit", get_args(WindowEmit), ", of windows")
        if aggregate.selector is not None:
            check_function(aggregate.selector, f"{self.kind} {self.name!r}")
        check_function(time, f"{self.kind} {self.name!r}: time")
        self.aggregate = aggregate
        self.window = window
        self.time = time
        self.emit = emit
        self.own_time = own_time
        self.lateness_ms = duration_ms(lateness, f"{self.name!r}: lateness_s", least=0)
        self.time_grain = math.gcd(window.grain, self.lateness_ms)
        self.outputs = (LATE, *self.outputs)

    @property
    def state_kind(self) -> str:
        return f"window_{self.aggregate.state_kind} in {self.window!r}"

    @property
    def windowed(self) -> Windowed:
        """The aggregate for each key and window."""
        return Windowed(self.aggregate, self.window, self.time)

    @property
    def combiner(self) -> Windowed | None:
        """Returns the aggregate that senders may apply before they send records, or None when late records must
        show."""
        return self.windowed if combines(self, self.aggregate) else None

    def stage(self, context: StageContext) -> Stage:
        return _Windowing(context, self)


class _Windowing(EventTimeStage):
    time_option = "time= of window()"

    def __init__(self, context: StageContext, operator: WindowAggregated) -> None:
        super().__init__(context, operator.own_time)
        self._inner = operator.aggregate
        self._windowed = operator.windowed
        self._size = operator.window.size
        self._lateness = operator.lateness_ms
        self._emit = operator.emit
        self._fired: int | None = None  # the results of windows that end up to this time have left
        self._map = _WindowMap(operator.aggregate, context.epochs)
        self.maps = {"windows": self._map}

    def run(self, batch: Batch) -> Batch:
        assert isinstance(batch, KeyedBatch)
        windowed = self._windowed
        keys, values = batch.keys, batch.values
        closed = None if self._watermark is None else self._watermark - self._size - self._lateness
        if batch.partial:
            starts, values = [start for start, _ in values], [partial for _, partial in values]
            self._check_unit(starts, zip(keys, values, strict=True), self._size - 1)
        else:
            keys, values, times = windowed.timed(keys, values, self.errors)
            self._check_unit(times, values)
            if closed is not None and times:
                keys, values, times = self._without_late(keys, values, times, closed)
            keys, starts, values = windowed.assign(*windowed.valued(keys, values, times, self.errors))
        if closed is not None and starts and min(starts) <= closed:
            kept = [i for i, start in enumerate(starts) if start > closed]
            if batch.partial:
                self.late += len(starts) - len(kept)
            keys, starts, values = [keys[i] for i in kept], [starts[i] for i in kept], [values[i] for i in kept]
        if not starts:
            return []
        inner, out = self._inner, []
        add = inner.merge if batch.partial else inner.add
        for start, (some, theirs) in _by_start(keys, starts, values).items():
            add_all(add, self._map.windows[start], some, theirs, self.errors)
            self._map.touch(some)
            if self._emit == "latest" or self._has_fired(start):
                out += self._results(start, _distinct(some))
        return out

    def _has_fired(self, start: int) -> bool:
        return self._fired is not None and start + self._size <= self._fired

    def _without_late(
        self, keys: list[Any], records: list[Any], times: list[int], closed: int
    ) -> tuple[list[Any], list[Any], list[int]]:
        """Leaves out the records that are late for all their windows."""
        if min(times) - self._windowed.window.slide >= closed:
            return keys, records, times
        late = {i for i, start in enumerate(self._windowed.window.last_starts(times)) if start <= closed}
        self._leave_out([records[i] for i in sorted(late)])
        return without(late, keys), without(late, records), without(late, times)

    def _results(self, start: int, keys: Iterable[Any]) -> list[Any]:
        window, result, end = self._map.windows[start], self._inner.result, start + self._size
        if self._inner.identity_result and not self.errors.skipped:
            return [(key, start, end, window[key]) for key in keys]
        out = []
        for key in keys:
            if key in window:
                try:
                    out.append((key, start, end, result(window[key])))
                except BaseException as error:
                    self.errors.handle((key, window[key]), error)
        return out

    def advance(self, watermark: int | None) -> Iterator[Batch]:
        if watermark is None or watermark == IDLE:
            return
        fired, size = self._fired, self._size
        watermark = watermark if self._watermark is None else max(watermark, self._watermark)
        if watermark == fired:
            return
        self._watermark = self._fired = watermark
        windows = self._map.windows
        if watermark != END_OF_TIME:
            pairs = (pair for window in windows.values() for pair in window.items())
            self._check_unit(windows, pairs, self._size - 1)
        for start in sorted(windows):
            if start + size > watermark:
                break
            if self._emit == "final" and (fired is None or start + size > fired):
                keys = iter(list(windows[start]))
                while part := list(islice(keys, EXPAND_RECORDS_MAX)):
                    if piece := self._results(start, part):
                        yield piece
            if start + size + self._lateness <= watermark:
                self._map.close(start)

    def watermark(self, watermark: int | None) -> int | None:
        # Results may be taken by the starts of their windows.
        return watermark if watermark in (None, IDLE, END_OF_TIME) else self._windowed.window.first_open(watermark)

    def restore(self, epoch: int, saved: SavedState) -> None:
        super().restore(epoch, saved)
        # Of several tasks, one may have had a greater watermark than another, because their channels became idle in
        # another order.
        said = [watermark for watermark, *_ in saved.own]
        self._watermark = max((watermark for watermark in said if watermark is not None), default=None)
        self._fired = None if None in said else min(said, default=None)


def _by_start(keys: list[Any], starts: list[int], values: list[Any]) -> dict[int, tuple[list[Any], list[Any]]]:
    """Divides keys and values by window."""
    if len(set(starts)) == 1:
        return {starts[0]: (keys, values)}
    parts: defaultdict[int, tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
    for key, start, value in zip(keys, starts, values, strict=True):
        part = parts[start]
        part[0].append(key)
        part[1].append(value)
    return parts


def _distinct(keys: Iterable[Any]) -> dict[Any, None]:
    """Returns the keys, each of them once, without keys that have no hash. Their records have failed already."""
    try:
        return dict.fromkeys(keys)
    except TypeError:
        found: dict[Any, None] = {}
        for key in keys:
            with suppress(TypeError):
                found[key] = None
        return found


class _WindowMap:
    """The open windows of a task, start -> key -> partial result, and the keys that have changed since the last
    snapshot. Like all keyed state it is saved by key: key -> {start: partial result}."""

    def __init__(self, aggregate: Aggregate, tracked: bool) -> None:
        self.windows: defaultdict[int, dict[Any, Any]] = defaultdict(aggregate.new_state)
        self._tracked = tracked
        self._touched: set[Any] = set()

    def touch(self, keys: Iterable[Any]) -> None:
        """Notes that something of these keys has changed."""
        if self._tracked:
            try:
                self._touched.update(keys)
            except TypeError:  # some key has no hash
                self._touched.update(_distinct(keys))

    def close(self, start: int) -> None:
        """Removes a window."""
        self.touch(self.windows.pop(start))

    @property
    def wants_whole(self) -> bool:
        """Whether the next delta should be whole."""
        return 2 * len(self._touched) > sum(map(len, self.windows.values()))

    def delta(self, whole: bool) -> KeyedDelta | KeyedWhole:
        """Returns the changes since the last delta, or everything."""
        windows = self.windows
        touched, self._touched = self._touched, set()
        keys: Iterable[Any] = dict.fromkeys(key for window in windows.values() for key in window) if whole else touched
        values = {key: {start: window[key] for start, window in windows.items() if key in window} for key in keys}
        if whole:
            return KeyedWhole(values)
        gone = [key for key, value in values.items() if not value]
        for key in gone:
            del values[key]
        return KeyedDelta(list(values), list(values.values()), gone)

    def restore(self, saved: dict[Any, dict[int, Any]]) -> None:
        """Starts from the saved state."""
        for key, starts in saved.items():
            for start, partial in starts.items():
                self.windows[start][key] = partial

    def drop(self) -> None:
        """Frees the memory of all windows. They are not used any more."""
        self.windows.clear()
        self._touched.clear()
