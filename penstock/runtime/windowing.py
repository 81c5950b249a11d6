"""Aggregates per key and window of event time (PAPERS rows D1, D7).

A window's results leave when the watermark has reached its end; its state is kept for the allowed lateness longer, and
every batch of late records that it still takes makes its results leave again, whole. What comes later still is *late*:
counted, or sent to the side output "late" where the flow uses that.

Senders combine before records travel, as for every aggregate: their partials are per key and window, (start, partial).
Spark makes the same partials in the operation stream.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import islice
from typing import Any, Literal, get_args

from penstock.runtime.aggregate import Aggregate
from penstock.runtime.batch import Batch, KeyedBatch
from penstock.runtime.errors import FlowError
from penstock.runtime.event_time import IDLE, as_ms, duration_ms
from penstock.runtime.operators import EXPAND_RECORDS_MAX, Operator, Stage, StageContext, add_all
from penstock.runtime.state import KeyedDelta, SavedState, StageState
from penstock.runtime.userfunc import ErrorHandler, check_function, select_values
from penstock.runtime.windows import Sliding

#: The side output of records that no window takes any more.
LATE = "late"

WindowEmit = Literal["final", "latest"]


class Windowed(Aggregate):
    """An aggregate per key and window, as a combiner: its state is by (key, start), what it ships (start, partial)."""

    def __init__(self, inner: Aggregate, window: Sliding, time: Callable[[Any], Any]) -> None:
        super().__init__()
        self.name = inner.name
        self.inner = inner
        self.window = window
        self.time = time

    def new_state(self) -> dict[Any, Any]:
        return self.inner.new_state()

    def assign(
        self, keys: list[Any], records: list[Any], errors: ErrorHandler
    ) -> tuple[list[Any], list[int], list[Any]]:
        """(keys, window starts, records) in parallel; a record of several windows comes several times."""
        keys, records, times = self._times(keys, records, errors)
        window = self.window
        if window.slide == window.size:
            return keys, window.last_starts(times), records
        all_starts = list(map(window.starts, times))
        return (
            [key for key, starts in zip(keys, all_starts, strict=True) for _ in starts],
            [start for starts in all_starts for start in starts],
            [record for record, starts in zip(records, all_starts, strict=True) for _ in starts],
        )

    def _times(
        self, keys: list[Any], records: list[Any], errors: ErrorHandler
    ) -> tuple[list[Any], list[Any], list[int]]:
        times: list[Any] = []
        time = self.time
        try:
            times = list(map(time, records))
        except Exception:
            times = []
        if len(times) == len(records) and set(map(type, times)) == {int}:
            return keys, records, times
        (keys, records), times = _both(lambda record: as_ms(time(record)), keys, records, errors)
        return keys, records, times

    def prepare(self, keys: list[Any], records: list[Any], errors: ErrorHandler) -> tuple[list[Any], list[Any]]:
        keys, starts, records = self.assign(keys, records, errors)
        return self.inner.prepare(list(zip(keys, starts, strict=True)), records, errors)

    def add(self, state: dict[Any, Any], keys: Iterator[Any], values: Iterator[Any]) -> None:
        self.inner.add(state, keys, values)

    def merge(self, state: dict[Any, Any], keys: Iterator[Any], partials: Iterator[Any]) -> None:
        raise AssertionError("partials of windows are merged by their windows")

    def shipped(self, state: dict[Any, Any]) -> tuple[list[Any], list[Any]]:
        return [key for key, _ in state], [(start, partial) for (_, start), partial in state.items()]


def _both(
    fn: Callable[[Any], Any], keys: list[Any], records: list[Any], errors: ErrorHandler
) -> tuple[tuple[list[Any], list[Any]], list[Any]]:
    """((keys, records), [fn(record) ...]) without the records that failed."""
    pairs = list(zip(keys, records, strict=True))
    kept, values = select_values(lambda pair: fn(pair[1]), pairs, pairs, errors)
    return ([key for key, _ in kept], [record for _, record in kept]), values


class WindowAggregated(Operator):
    """An aggregate per key and window; emits (key, start, end, result), start and end in ms since 1970.

    `emit`: "final" (default) a window's results when the watermark reaches its end, and again after late records;
    "latest" the newest result of each key and window that a batch touched, once a batch.
    """

    keyed = True

    def __init__(
        self,
        aggregate: Aggregate,
        window: Sliding,
        time: Callable[[Any], Any],
        lateness: float | timedelta = 0.0,
        emit: WindowEmit = "final",
        **common: Any,
    ) -> None:
        self.kind = f"window_{aggregate.name}"
        super().__init__(**common)
        if emit not in get_args(WindowEmit):
            raise FlowError(f"{self.name!r}: emit={emit!r}; of windows use 'final' or 'latest'")
        if aggregate.selector is not None:
            check_function(aggregate.selector, f"{self.kind} {self.name!r}")
        check_function(time, f"{self.kind} {self.name!r}: time")
        self.aggregate = aggregate
        self.window = window
        self.time = time
        self.emit = emit
        self.lateness_ms = duration_ms(lateness, f"{self.name!r}: lateness_s", least=0)
        self.time_grain = math.gcd(window.grain, self.lateness_ms)
        self.outputs = (LATE, *self.outputs)

    @property
    def combiner(self) -> Windowed:
        """What senders may apply before records travel; not when late records must be shown."""
        return Windowed(self.aggregate, self.window, self.time)

    def stage(self, context: StageContext) -> Stage:
        return _Windowing(context, self)


class _Windowing(Stage):
    event_time = True

    def __init__(self, context: StageContext, operator: WindowAggregated) -> None:
        super().__init__(context)
        self._inner = operator.aggregate
        self._windowed = operator.combiner
        self._size = operator.window.size
        self._lateness = operator.lateness_ms
        self._emit = operator.emit
        self._watermark: int | None = None  # the greatest that has come
        self._map = _WindowMap(operator.aggregate, context.epochs)

    def run(self, batch: Batch) -> Batch:
        assert isinstance(batch, KeyedBatch)
        keys: list[Any]
        starts: list[int]
        values: list[Any]
        if batch.partial:
            keys, values = batch.keys, [partial for _, partial in batch.values]
            starts = [start for start, _ in batch.values]
        else:
            keys, starts, values = self._windowed.assign(batch.keys, batch.values, self.errors)
        if self._watermark is not None and starts:
            closed = self._watermark - self._size - self._lateness
            if min(starts) <= closed:
                keys, starts, values = self._without_late(keys, starts, values, closed, batch.partial)
        if not starts:
            return []
        inner, out = self._inner, []
        add = inner.merge if batch.partial else inner.add
        for start, (some, theirs) in _by_start(keys, starts, values).items():
            if not batch.partial:
                some, theirs = inner.prepare(some, theirs, self.errors)  # noqa: PLW2901
            add_all(add, self._map.windows[start], some, theirs, self.errors)
            self._map.touch(some)
            if self._emit == "latest" or self._has_ended(start):
                out += self._results(start, dict.fromkeys(some))
        return out

    def _has_ended(self, start: int) -> bool:
        return self._watermark is not None and start + self._size <= self._watermark

    def _without_late(
        self, keys: list[Any], starts: list[int], values: list[Any], closed: int, partial: bool
    ) -> tuple[list[Any], list[int], list[Any]]:
        kept = [i for i, start in enumerate(starts) if start > closed]
        if partial:
            self.late += len(starts) - len(kept)
        else:
            # A record of several windows is late when the last of them, which stands first, is.
            size, time = self._size, self._windowed
            late = [
                values[i]
                for i, start in enumerate(starts)
                if start <= closed and (time.window.slide == size or self._is_last(values[i], start))
            ]
            self.late += len(late)
            side = self.context.side.get(LATE)
            if side is not None:
                side += late
        return [keys[i] for i in kept], [starts[i] for i in kept], [values[i] for i in kept]

    def _is_last(self, record: Any, start: int) -> bool:
        return bool(self._windowed.window.starts(as_ms(self._windowed.time(record)))[0] == start)

    def _results(self, start: int, keys: Iterable[Any]) -> list[Any]:
        window, result, end = self._map.windows[start], self._inner.result, start + self._size
        if self._inner.identity_result and not self.errors.skipped:
            return [(key, start, end, window[key]) for key in keys]
        out = []
        for key in keys:
            if key in window:
                try:
                    out.append((key, start, end, result(window[key])))
                except Exception as error:
                    self.errors.handle((key, window[key]), error)
        return out

    def advance(self, watermark: int | None) -> Iterator[Batch]:
        before = self._watermark
        if watermark is None or watermark == IDLE or (before is not None and watermark <= before):
            return
        windows = self._map.windows
        self._watermark = watermark
        for start in sorted(windows):
            if start + self._size > watermark:
                break
            fired = before is not None and start + self._size <= before
            if not fired and self._emit == "final":
                keys = iter(list(windows[start]))
                while part := list(islice(keys, EXPAND_RECORDS_MAX)):
                    if piece := self._results(start, part):
                        yield piece
            if start + self._size + self._lateness <= watermark:
                self._map.close(start)

    def watermark(self, watermark: int | None) -> int | None:
        # Results are of the time of their window's end, which the watermark has reached: they are late by themselves.
        return watermark

    def wants_whole(self) -> bool:
        return self._map.wants_whole

    def snapshot(self, epoch: int, whole: bool) -> StageState:
        return StageState(
            {"windows": self._map.delta(whole)}, own=(self._watermark, self.late, self.context.parallelism)
        )

    def restore(self, epoch: int, saved: SavedState) -> None:
        self._map.restore(saved.maps.get("windows", {}))
        # At a barrier all tasks have taken the same watermarks.
        known = [watermark for watermark, _, _ in saved.own if watermark is not None]
        self._watermark = max(known) if known else None
        context = self.context
        if context.index == 0 or any(parallelism == context.parallelism for _, _, parallelism in saved.own):
            self.late = sum(late for _, late, _ in saved.own)


def _by_start(keys: list[Any], starts: list[int], values: list[Any]) -> dict[int, tuple[list[Any], list[Any]]]:
    """Keys and values by window."""
    if len(set(starts)) == 1:
        return {starts[0]: (keys, values)}
    parts: defaultdict[int, tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
    for key, start, value in zip(keys, starts, values, strict=True):
        part = parts[start]
        part[0].append(key)
        part[1].append(value)
    return parts


class _WindowMap:
    """The open windows of a task, start -> key -> partial, and which keys have changed since the last snapshot. Saved
    by key, as all keyed state: key -> {start: partial}."""

    def __init__(self, aggregate: Aggregate, tracked: bool) -> None:
        self.windows: defaultdict[int, dict[Any, Any]] = defaultdict(aggregate.new_state)
        self._tracked = tracked
        self._touched: set[Any] = set()

    def touch(self, keys: Iterable[Any]) -> None:
        """Something of these keys has changed."""
        if self._tracked:
            try:
                self._touched.update(keys)
            except TypeError:  # some key has no hash: its record has been handled
                for key in keys:
                    if getattr(key, "__hash__", None) is not None:
                        self._touched.add(key)

    def close(self, start: int) -> None:
        """Forget a window."""
        self.touch(self.windows.pop(start))

    @property
    def wants_whole(self) -> bool:
        """The next delta had better be whole."""
        return 2 * len(self._touched) > sum(map(len, self.windows.values()))

    def delta(self, whole: bool) -> KeyedDelta:
        """The changes since the last delta, or everything."""
        windows = self.windows
        touched, self._touched = self._touched, set()
        keys: Iterable[Any] = dict.fromkeys(key for window in windows.values() for key in window) if whole else touched
        values = {key: {start: window[key] for start, window in windows.items() if key in window} for key in keys}
        gone = [key for key, value in values.items() if not value]
        for key in gone:
            del values[key]
        return KeyedDelta(list(values), list(values.values()), gone, whole)

    def restore(self, saved: dict[Any, dict[int, Any]]) -> None:
        """Go on from what was saved."""
        for key, starts in saved.items():
            for start, partial in starts.items():
                self.windows[start][key] = partial
