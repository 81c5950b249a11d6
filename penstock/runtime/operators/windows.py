"""Windows of all kinds: sessions, count windows and the global window; early results; functions that see all records;
window joins. Mergeable aggregates of tumbling and sliding windows have a quicker operator of their own
(runtime/operators/windowing.py).

The results of a window of event time leave when the watermark reaches its end. Its state stays for the allowed
lateness, and late records within the lateness make its results leave again. Records that come still later are late:
they go to the side output "late". Before its end a window may have *early* results: after so many records, or so long
after the first record that no result shows. With `updates="retract"` each result has a sign: what was said before is
taken back, with -1, when the result has changed.

A record must never count in a window whose results have left for the last time, and what leaves must not depend on the
order in which records that are not late come, unless the function itself depends on it. Results must not be late for a
window downstream that takes them by the start of their window: the watermark downstream is held back to the start of
the first window that has no last result yet. What leaves again because of late records is not waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import timedelta
from typing import Any, Literal, get_args

from penstock.runtime.errors import FlowError
from penstock.runtime.event_time.watermark import END_OF_TIME, IDLE, are_plain, as_ms, duration_ms
from penstock.runtime.event_time.windows import CountWindow, GlobalWindow, Session, Sliding, Window
from penstock.runtime.operators.base import Operator, Stage, StageContext
from penstock.runtime.operators.late import LATE, EventTimeStage
from penstock.runtime.operators.pieces import in_pieces
from penstock.runtime.operators.side_outputs import declared
from penstock.runtime.operators.window_functions import Aggregating, OwnAggregate, WindowBounds, WindowFunction
from penstock.runtime.records.batch import Batch, KeyedBatch
from penstock.runtime.records.key_groups import of_key
from penstock.runtime.records.userfunc import DEAD_LETTERS, check_function, of_no_list, select_each, without
from penstock.runtime.state.keyed import SavedState
from penstock.runtime.state.nested import NestedMap
from penstock.runtime.state.timers import Agenda, Timers
from penstock.runtime.units import choice, seconds, whole

Updates = Literal["replace", "retract"]


class Windows(Operator):
    """A window function over windows of a kind. It emits (key, start, end, result), and with `updates="retract"` (key,
    start, end, result, sign); functions that make rows emit these as they are."""

    keyed = True
    why_not_in_spark = "its windows stay with its tasks"

    def __init__(
        self,
        function: WindowFunction,
        window: Window,
        times: tuple[Callable[[Any], Any], ...],
        lateness: float | timedelta = 0.0,
        *,
        early_s: float | timedelta | None = None,
        early_count: int | None = None,
        updates: Updates = "replace",
        own_time: bool = False,
        outputs: Iterable[str] = (),
        **common: Any,
    ) -> None:
        self.kind = "window_join" if function.inputs > 1 else f"window_{function.name}"
        super().__init__(**common)
        what = f"{self.kind} {self.name!r}"
        self.inputs = function.inputs
        self.function = function
        self.window = window
        self.times = times
        self.own_time = own_time
        for time in times:
            check_function(time, f"{what}: time")
        if function.value is not None:
            check_function(function.value, what)
        self.lateness_ms = duration_ms(lateness, f"{what}: lateness_s", least=0)
        self.early_s = None if early_s is None else seconds(early_s, f"{what}: early_s")
        self.early_count = None if early_count is None else whole(early_count, f"{what}: early_count")
        choice(updates, f"{what}: updates", get_args(Updates))
        self.retracts = updates == "retract"
        if not window.in_event_time and self.lateness_ms:
            raise FlowError(f"{what}: {window!r} knows no time, so no record is late; leave lateness_s out")
        if isinstance(window, CountWindow) and self.is_early:
            raise FlowError(f"{what}: {window!r} has no early results; use GlobalWindow() with early_count")
        if function.rows and self.retracts:
            raise FlowError(f"{what}: rows of a {function.name} cannot be taken back; leave updates out")
        if function.inputs > 1 and self.is_early:
            raise FlowError(f"{what}: a join has no early results")
        if isinstance(function, Aggregating) and isinstance(window, Session):
            aggregate = function.aggregate
            if isinstance(aggregate, OwnAggregate) and not aggregate.combinable:
                raise FlowError(
                    f"{what}: two sessions may become one, so the AggregateFunction needs a method merge(self, a, b)"
                )
        if (grain := window.grain) is not None:
            self.time_grain = math.gcd(grain, self.lateness_ms)
        own = (LATE,) if window.in_event_time else ()
        self.outputs = (*own, *declared(outputs, (DEAD_LETTERS, *own), what), *self.outputs)

    @property
    def is_early(self) -> bool:
        """Whether windows have results before their end."""
        return self.early_s is not None or self.early_count is not None

    @property
    def state_kind(self) -> str:
        return f"windows of {self.function.state_kind} in {self.window!r}"

    def stage(self, context: StageContext) -> Stage:
        return _Windows(context, self)


class _Windows(EventTimeStage):
    expands = True

    def __init__(self, context: StageContext, operator: Windows) -> None:
        super().__init__(context, operator.own_time)
        self._window = operator.window
        self._times = operator.times
        self._in_event_time = operator.window.in_event_time
        self._value = operator.function.value
        self._lateness = operator.lateness_ms
        self._early_s = operator.early_s
        self._early_count = operator.early_count
        self._retracts = operator.retracts
        self._rows = operator.function.rows
        self._kept = operator.function.kept(context)
        self.event_time = self._in_event_time
        self.timed = self._early_s is not None
        # The windows that the watermark is to close, as (key, window). Sessions that were merged or have other ends now
        # are dead entries.
        self._ends = Agenda(lambda _, window: self._kept.has(*window))
        # The starts of sessions, as (key, start), of which those are alive that have no last result yet.
        self._starts = Agenda(lambda _, begun: self._is_open(*begun))
        # Of windows that have had results: [whether the watermark has reached the end, the records since the last
        # result, the last result, if it may have to be taken back].
        self._said = NestedMap("said", context.epochs)
        self._counts = NestedMap("counts", context.epochs)  # of count windows: the number of a key's records
        self.maps = {each.title: each for each in (*self._kept.maps, self._said, self._counts)}
        self._due = Timers(False)  # of (key, window): when it is to have an early result

    def open(self) -> None:
        self._kept.open()

    def close(self, failed: bool) -> None:
        self._kept.end()

    # --- records -----------------------------------------------------------------------------------------------

    def expand(self, batch: Batch) -> Iterator[Batch]:
        assert isinstance(batch, KeyedBatch)
        return in_pieces(self._outputs(batch))

    def _outputs(self, batch: KeyedBatch) -> Iterator[Any]:
        by_key: dict[Any, list[tuple[Any, Any, Any]]] = {}
        for key, entry in self._entries(batch):
            by_key.setdefault(key, []).append(entry)
        for key, entries in by_key.items():
            if isinstance(self._window, Sliding):
                changed = self._add_by_time(key, entries)
            elif isinstance(self._window, Session):
                changed = self._add_to_sessions(key, entries)
            elif isinstance(self._window, CountWindow):
                changed = self._add_by_count(key, entries)
            else:
                changed = self._add(key, (None, None), entries)
            yield from changed

    def _entries(self, batch: KeyedBatch) -> Iterator[tuple[Any, tuple[Any, Any, Any]]]:
        """Yields for each record its key and (time, value, record), without the records that fail."""
        keys, records = batch.keys, batch.values
        times: list[Any] = [None] * len(records)
        if self._in_event_time:
            times, failed = select_each(self._times[self.port], keys, records, self.errors, are_plain, as_ms)
            keys, records = without(failed, keys), without(failed, records)
            self._check_unit(times, records)
        values = records
        if self._value is not None:
            values, failed = select_each(self._value, keys, records, self.errors)
            keys, records, times = without(failed, keys), without(failed, records), without(failed, times)
        return zip(keys, zip(times, values, records, strict=True), strict=True)

    def _is_over(self, end: int) -> bool:
        """Whether the results of a window with this end have left for the last time."""
        return self._watermark is not None and end + self._lateness <= self._watermark

    def _late(self, entries: list[tuple[Any, Any, Any]]) -> None:
        self._leave_out([record for _, _, record in entries])

    def _add_by_time(self, key: Any, entries: list[tuple[Any, Any, Any]]) -> Iterator[Any]:
        window = self._window
        assert isinstance(window, Sliding)
        size, slide = window.size, window.slide
        # Windows that start here or before are over.
        over = IDLE if self._watermark is None else self._watermark - self._lateness - size
        by_start: dict[int, list[tuple[Any, Any, Any]]] = {}
        late = []
        for entry, last in zip(entries, window.last_starts(map(_time, entries)), strict=True):
            if last <= over:
                late.append(entry)
            for start in range(last, max(over, entry[0] - size), -slide):
                by_start.setdefault(start, []).append(entry)
        if late:
            self._late(late)
        for start, some in by_start.items():
            yield from self._add(key, (start, start + window.size), some)

    def _add_to_sessions(self, key: Any, entries: list[tuple[Any, Any, Any]]) -> Iterator[Any]:
        window = self._window
        assert isinstance(window, Session)
        if self._early_count is not None:  # a result holds the records that have come before it, and has their bounds
            for entry in entries:
                yield from self._add_run(key, [entry], window.gap)
            return
        entries.sort(key=_time)
        runs: list[list[tuple[Any, Any, Any]]] = [[entries[0]]]
        for entry in entries[1:]:
            if entry[0] - runs[-1][-1][0] < window.gap:
                runs[-1].append(entry)
            else:
                runs.append([entry])
        for run in runs:
            yield from self._add_run(key, run, window.gap)

    def _add_run(self, key: Any, run: list[tuple[Any, Any, Any]], gap: int) -> Iterator[Any]:
        """Adds records that follow each other within the gap to a session, which is a new one, or takes up others."""
        start, end = run[0][0], run[-1][0] + gap
        merged = [known for known in self._kept.windows(key) if known[0] < end and start < known[1]]
        place = (min([start, *(known[0] for known in merged)]), max([end, *(known[1] for known in merged)]))
        if self._is_over(place[1]):
            self._late(run)
            return
        if merged != [place]:
            # A record that cannot be added must not make a session longer, nor two of them one.
            values = [(self.port, time, value) for time, value, _ in run]
            error = None if self.errors.policy == "fail" else self._kept.try_out(key, merged, values)
            if error is not None:
                if len(run) == 1:
                    self.errors.handle((key, run[0][2]), of_key(key, error))
                else:  # only some of them may fail
                    for entry in run:
                        yield from self._add_run(key, [entry], gap)
                return
            if merged:
                try:
                    self._kept.merge(key, merged, place)
                except BaseException as raised:  # it was tried out, unless it ends the job
                    self.errors.handle((key, run[0][2]), of_key(key, raised))
                    return
                yield from self._merged(key, merged, place)
        yield from self._add(key, place, run)

    def _merged(self, key: Any, merged: list[WindowBounds], into: WindowBounds) -> Iterator[Any]:
        """Yields the results of sessions that have become one, to take them back."""
        said = self._said.of(key)
        since, fired = 0, False
        due: list[float] = []
        for window in merged:
            if window in said:
                was_fired, records, result = self._said.remove(key, window)
                since += records
                if result is not None and self._retracts:
                    yield (key, *window, result[0], -1)
                fired |= was_fired and window[1] == into[1]
            due += self._due.times((key, window))
            self._due.cancel((key, window), None)
        if since or fired:
            self._said.set(key, into, (fired, since, None))
        if due and not fired:  # the first record that no result shows does not wait anew
            self._due.set((key, into), min(due))
        self._await_end(key, into, {place[0] for place in merged})

    def _add_by_count(self, key: Any, entries: list[tuple[Any, Any, Any]]) -> Iterator[Any]:
        window = self._window
        assert isinstance(window, CountWindow)
        number = self._counts.of(key).get(0, 0)
        for entry in entries:
            for place in window.of(number):
                self._kept.add(key, place, [(self.port, None, entry[1])], [entry[2]], self.errors)
                if place[1] == number + 1 and self._kept.has(key, place):
                    yield from self._results(key, place)
                    self._forget(key, place)
            number += 1
        self._counts.set(key, 0, number)

    def _add(self, key: Any, place: WindowBounds, entries: list[tuple[Any, Any, Any]]) -> Iterator[Any]:
        """Adds records to a window, and yields the results that this makes leave."""
        fired, since, result = self._said.of(key).get(place, (False, 0, None))
        at = 0
        while at < len(entries):
            # Sessions that have become one may have more records that no result shows than an early result waits for.
            most = len(entries) if self._early_count is None or fired else at + max(1, self._early_count - since)
            some = entries[at:most]
            at += len(some)
            known = self._kept.has(key, place)
            values = [(self.port, time, value) for time, value, _ in some]
            added = self._kept.add(key, place, values, [record for _, _, record in some], self.errors)
            since += added
            if not self._kept.has(key, place):
                continue
            if not known and place[1] is not None:
                self._await_end(key, place)
            if fired or (self._early_count is not None and since >= self._early_count):
                since = 0
                self._due.cancel((key, place), None)
                self._said.set(key, place, (fired, 0, result))
                yield from self._results(key, place)
                result = self._said.of(key).get(place, (fired, 0, None))[2]
        if self._early_count is not None and since and not fired:
            self._said.set(key, place, (fired, since, result))
        if self._early_s is not None and since and (key, place) not in self._due:
            self._due.set((key, place), self.context.wall() + self._early_s)

    def _await_end(self, key: Any, place: WindowBounds, begun: Collection[int | None] = ()) -> None:
        """Notes when a window ends. `begun`: where the sessions began that it was made of."""
        start, end = place
        assert start is not None
        assert end is not None
        self._ends.add(end, (key, place))
        if isinstance(self._window, Session) and start not in begun:
            self._starts.add(start, (key, start))

    def _is_open(self, key: Any, start: int) -> bool:
        """Whether a session of the key that begins here waits for its end."""
        said = self._said.of(key)
        return any(place[0] == start and not said.get(place, (False,))[0] for place in self._kept.windows(key))

    # --- results -----------------------------------------------------------------------------------------------

    def _results(self, key: Any, place: WindowBounds) -> Iterator[Any]:
        """Yields the results of a window, and takes back results that have changed."""
        if self._kept.user is not None:
            self._kept.user.mark = self._watermark
        try:
            results = self._kept.results(key, place)
            if self._rows:
                yield from results
                return
            for result in results:
                if not self._retracts:
                    yield (key, *place, result)
                    continue
                fired, since, said = self._said.of(key).get(place, (False, 0, None))
                if said is not None:
                    if said[0] == result:
                        continue
                    yield (key, *place, said[0], -1)
                self._said.set(key, place, (fired, since, (result,)))
                yield (key, *place, result, 1)
        except BaseException as error:
            self.errors.handle((key, place), of_key(key, of_no_list(error)))

    def advance(self, watermark: int | None) -> Iterator[Batch]:
        if watermark is None or watermark == IDLE:
            return iter(())
        if self._watermark is None or watermark > self._watermark:
            self._watermark = watermark
        if (first := self._ends.first()) is None or first[0] > self._watermark:
            return iter(())
        return in_pieces(self._ended(self._watermark))

    def watermark(self, watermark: int | None) -> int | None:
        # Results, and records of rows and pairs, may be taken by times from the starts of their windows on.
        if watermark is None or watermark in (IDLE, END_OF_TIME):
            return watermark
        window = self._window
        if isinstance(window, Sliding):
            return window.first_open(watermark)
        if isinstance(window, Session):
            first = self._starts.first()
            new = watermark - window.gap + 1  # a record of an earlier time would be in a session that has ended
            return new if first is None else min(new, int(first[0]))
        return watermark

    def _ended(self, watermark: int) -> Iterator[Any]:
        ends = self._ends
        while (first := ends.first()) is not None and first[0] <= watermark:
            at, _, (key, place) = first
            ends.pop()
            fired, _, said = self._said.of(key).get(place, (False, 0, None))
            if not fired and place[1] <= watermark:
                fired = True
                self._due.cancel((key, place), None)
                self._said.set(key, place, (True, 0, said))
                yield from self._results(key, place)
            if place[1] + self._lateness <= watermark:
                self._forget(key, place)
            elif at < place[1] + self._lateness:
                ends.add(place[1] + self._lateness, (key, place))

    def _forget(self, key: Any, place: WindowBounds) -> None:
        self._kept.close(key, place)
        if place in self._said.of(key):
            self._said.remove(key, place)

    def next_timer(self) -> float | None:
        return self._due.next()

    def fire(self, now: float) -> Iterator[Batch]:
        return in_pieces(self._early(now))

    def _early(self, now: float) -> Iterator[Any]:
        for _, (key, place), _ in self._due.due(now, math.inf):
            fired, since, said = self._said.of(key).get(place, (False, 0, None))
            if since:
                self._said.set(key, place, (fired, 0, said))
            if self._kept.has(key, place):
                yield from self._results(key, place)

    def finish(self) -> Iterator[Batch]:
        if isinstance(self._window, GlobalWindow):
            places = [(key, place) for key, place in self._kept.all_windows() if self._has_more_to_say(key, place)]
            self._due.drop()
            yield from in_pieces(result for key, place in places for result in self._results(key, place))

    def _has_more_to_say(self, key: Any, place: WindowBounds) -> bool:
        """Whether something has come since the last early result."""
        if self._early_count is not None:
            return bool(self._said.of(key).get(place, (False, 0, None))[1])
        return self._early_s is None or (key, place) in self._due

    # --- epochs ------------------------------------------------------------------------------------------------

    def restore(self, epoch: int, saved: SavedState) -> None:
        super().restore(epoch, saved)
        due = None if self._early_s is None else self.context.wall() + self._early_s
        for key, place in self._kept.all_windows():
            fired = self._said.of(key).get(place, (False, 0, None))[0]
            if place[1] is not None and self._in_event_time:
                self._ends.add(place[1] + (self._lateness if fired else 0), (key, place))
                if isinstance(self._window, Session) and not fired:
                    self._starts.add(place[0], (key, place[0]))
            if due is not None and not fired:
                self._due.set((key, place), due)

    def drop_state(self) -> None:
        super().drop_state()
        self._ends.clear()
        self._starts.clear()
        self._due.drop()


def _time(entry: tuple[Any, Any, Any]) -> Any:
    return entry[0]
