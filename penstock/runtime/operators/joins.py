"""Joins of two keyed streams by the times of their records: interval joins, and temporal joins with versions.

An *interval join* pairs each record of the first input with those of the second whose time is from `lower` to `upper`
after its own. A *temporal join* ("as of") gives each record of the first input the version that holds at its time: the
record of the second input, of the same key, that is the last one up to this time. Joins of windows are a window
function (runtime/operators/window_functions.py).

The watermark decides when nothing more can match, and what is kept is dropped then. What leaves must not depend on the
order in which records come that are not late. A record that is late goes to the side output "late". A late *version*
counts from when it comes, because the versions of slow tables are often older than everything else; it goes to "late"
when a later version holds already at the watermark, so that it could never be given to a record.

What a join emits must not be late for operators downstream, whichever record of a pair they take the time from. So an
interval join holds back its watermark by its bounds. A temporal join emits a record before the watermark passes it.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, Literal, get_args

from penstock.runtime.errors import FlowError
from penstock.runtime.event_time.watermark import IDLE, TIME_MAX, as_ms, duration_ms, held_back
from penstock.runtime.event_time.windows import GRAIN_MOST
from penstock.runtime.operators.base import Operator, Stage, StageContext
from penstock.runtime.operators.late import LATE, EventTimeStage
from penstock.runtime.operators.pieces import in_pieces
from penstock.runtime.records.batch import Batch, KeyedBatch
from penstock.runtime.records.key_groups import of_key
from penstock.runtime.records.userfunc import check_function
from penstock.runtime.state.keyed import SavedState
from penstock.runtime.state.nested import NestedMap
from penstock.runtime.units import choice

IntervalHow = Literal["inner", "left", "right", "full"]
TemporalHow = Literal["inner", "left"]

# Watermarks come at least at this part of what a record is kept for. They may come more rarely than records are
# dropped, because what is kept longer changes no result.
_GRAIN_PART = 20


class _Join(Operator):
    keyed = True
    inputs = 2
    why_not_in_spark = "it keeps the records of two inputs"
    hows: tuple[str, ...]

    def __init__(
        self,
        times: tuple[Callable[[Any], Any], Callable[[Any], Any]],
        how: str = "inner",
        fn: Callable[[Any, Any], Any] | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        choice(how, f"{self.kind} {self.name!r}: how", self.hows)
        for time in times:
            check_function(time, f"{self.kind} {self.name!r}: time")
        if fn is not None:
            check_function(fn, f"{self.kind} {self.name!r}", ("left", "right"))
        self.times = times
        self.how = how
        self.fn = fn
        self.outputs = (LATE, *self.outputs)


class IntervalJoin(_Join):
    """Pairs of records with equal keys whose times lie no further apart than the bounds. It emits (left, right), or
    fn(left, right)."""

    kind = "interval_join"
    hows = get_args(IntervalHow)

    def __init__(
        self,
        times: tuple[Callable[[Any], Any], Callable[[Any], Any]],
        lower: float | timedelta,
        upper: float | timedelta,
        how: IntervalHow = "inner",
        fn: Callable[[Any, Any], Any] | None = None,
        **common: Any,
    ) -> None:
        super().__init__(times, how, fn, **common)
        self.lower = duration_ms(lower, f"interval_join {self.name!r}: lower_s", least=-TIME_MAX)
        self.upper = duration_ms(upper, f"interval_join {self.name!r}: upper_s", least=-TIME_MAX)
        if self.lower > self.upper:
            raise FlowError(
                f"interval_join {self.name!r}: lower_s={self.lower / 1000:g} is above upper_s={self.upper / 1000:g}, "
                "so nothing would match"
            )
        self.time_grain = min(max(1, (self.upper - self.lower) // _GRAIN_PART), GRAIN_MOST)

    @property
    def state_kind(self) -> str:
        return f"interval_join from {self.lower} to {self.upper} ms"

    def stage(self, context: StageContext) -> Stage:
        return _IntervalJoining(context, self)


class TemporalJoin(_Join):
    """Each record of the first input with the version of the second that holds at its time. It emits (left, right), or
    fn(left, right), once the watermark has passed the time of the record, so in the order of the times."""

    kind = "temporal_join"
    hows = get_args(TemporalHow)
    time_grain = GRAIN_MOST

    def stage(self, context: StageContext) -> Stage:
        return _TemporalJoining(context, self)


class _Side(NestedMap):
    """The records of one input that may still match: key -> {number: [time, record, matched]}, and their times in
    order."""

    def __init__(self, name: str, tracked: bool) -> None:
        super().__init__(name, tracked)
        self.order: dict[Any, list[tuple[int, int]]] = {}  # key -> (time, number), sorted
        self._next = 0

    def add(self, key: Any, time: int, record: Any, matched: bool) -> int:
        number = self._next
        self._next += 1
        self.set(key, number, [time, record, matched])
        insort(self.order.setdefault(key, []), (time, number))
        return number

    def between(self, key: Any, first: int, last: int) -> list[tuple[int, int]]:
        """Returns (time, number) of the records of a key whose times lie from `first` to `last`."""
        order = self.order.get(key)
        return [] if order is None else order[bisect_left(order, (first, -1)) : bisect_right(order, (last, self._next))]

    def remove(self, key: Any, number: int) -> list[Any]:
        entry: list[Any] = super().remove(key, number)
        order = self.order[key]
        del order[bisect_left(order, (entry[0], number))]
        if not order:
            del self.order[key]
        return entry

    def restore(self, saved: dict[Any, Any]) -> None:
        super().restore(saved)
        for (key, number), (time, *_) in saved.items():
            self.order.setdefault(key, []).append((time, number))
            self._next = max(self._next, number + 1)
        for order in self.order.values():
            order.sort()

    def drop(self) -> None:
        super().drop()
        self.order.clear()


class _Joining(EventTimeStage):
    expands = True

    def __init__(self, context: StageContext, operator: _Join) -> None:
        super().__init__(context)
        self._times = operator.times
        self._fn = operator.fn
        self._left = _Side("left", context.epochs)
        self._right = _Side("right", context.epochs)
        self.maps = {side.title: side for side in (self._left, self._right)}
        # (time, number of the entry, port, key, number of the record): what the watermark releases, by time.
        self._until: list[tuple[int, int, int, Any, int]] = []
        self._entries = 0

    def expand(self, batch: Batch) -> Iterator[Batch]:
        assert isinstance(batch, KeyedBatch)
        return in_pieces(self._outputs(batch))

    def _outputs(self, batch: KeyedBatch) -> Iterator[Any]:
        port, take = self.port, self._times[self.port]
        for key, record in zip(batch.keys, batch.values, strict=True):
            try:
                time = as_ms(take(record))
            except BaseException as error:
                self.errors.handle((key, record), error)
                continue
            if self._watermark is not None and time < self._watermark and self._is_lost(port, key, time):
                self._leave_out([record])
                continue
            yield from self._take(port, key, time, record)

    def _is_lost(self, port: int, key: Any, time: int) -> bool:
        """Whether a record whose time is before the watermark has come too late to be joined."""
        return True

    @abstractmethod
    def _take(self, port: int, key: Any, time: int, record: Any) -> Iterator[Any]:
        """Takes a record, and yields the outputs that it makes possible."""

    @abstractmethod
    def _released(self, watermark: int) -> Iterator[Any]:
        """Yields the outputs that the watermark releases, and drops records that cannot match any more."""

    def _await(self, time: int, port: int, key: Any, number: int) -> None:
        """Notes that the watermark releases a record when it is above this time."""
        self._entries += 1
        heapq.heappush(self._until, (time, self._entries, port, key, number))

    def _joined(self, key: Any, pairs: Iterable[tuple[Any, Any]]) -> Iterator[Any]:
        if self._fn is None:
            yield from pairs
            return
        for left, right in pairs:
            try:
                yield self._fn(left, right)
            except BaseException as error:
                self.errors.handle((left, right), of_key(key, error))

    def advance(self, watermark: int | None) -> Iterator[Batch]:
        if watermark is None or watermark == IDLE:
            return iter(())
        if self._watermark is None or watermark > self._watermark:
            self._watermark = watermark
        if not self._until or self._until[0][0] >= self._watermark:
            return iter(())
        return in_pieces(self._released(self._watermark))

    def drop_state(self) -> None:
        super().drop_state()
        self._until.clear()


class _IntervalJoining(_Joining):
    def __init__(self, context: StageContext, operator: IntervalJoin) -> None:
        super().__init__(context, operator)
        lower, upper = operator.lower, operator.upper
        self._sides = (self._left, self._right)
        # For each input: the times of the other input that match, after the time of a record.
        self._reach = ((lower, upper), (-upper, -lower))
        self._keeps = (operator.how in ("left", "full"), operator.how in ("right", "full"))
        # By how much a record may be before the watermark when it is emitted, with its match or alone.
        self._hold = max(0, upper, -lower)

    def _take(self, port: int, key: Any, time: int, record: Any) -> Iterator[Any]:
        own, other = self._sides[port], self._sides[1 - port]
        first, last = self._reach[port]
        found = other.between(key, time + first, time + last)
        if found:
            entries = other.of(key)
            if self._keeps[1 - port]:
                for _, number in found:
                    if not entries[number][2]:
                        entries[number][2] = True
                        other.note(key, number)
            matches = [entries[number][1] for _, number in found]
            pairs = [(record, match) for match in matches] if port == 0 else [(match, record) for match in matches]
            yield from self._joined(key, pairs)
        if self._watermark is not None and time + last < self._watermark:
            if not found and self._keeps[port]:
                yield from self._alone(port, key, record)
            return
        number = own.add(key, time, record, bool(found))
        self._await(time + last, port, key, number)

    def watermark(self, watermark: int | None) -> int | None:
        return held_back(watermark, self._hold)

    def _alone(self, port: int, key: Any, record: Any) -> Iterator[Any]:
        return self._joined(key, [(record, None) if port == 0 else (None, record)])

    def _released(self, watermark: int) -> Iterator[Any]:
        until = self._until
        while until and until[0][0] < watermark:
            _, _, port, key, number = heapq.heappop(until)
            _, record, matched = self._sides[port].remove(key, number)
            if not matched and self._keeps[port]:
                yield from self._alone(port, key, record)

    def restore(self, epoch: int, saved: SavedState) -> None:
        super().restore(epoch, saved)
        for port, side in enumerate(self._sides):
            for key, order in side.order.items():
                for time, number in order:
                    self._await(time + self._reach[port][1], port, key, number)


class _TemporalJoining(_Joining):
    def __init__(self, context: StageContext, operator: TemporalJoin) -> None:
        super().__init__(context, operator)
        self._keeps = operator.how == "left"

    def _is_lost(self, port: int, key: Any, time: int) -> bool:
        # The records that wait, and those that come, have times from the watermark on.
        assert self._watermark is not None
        return port == 0 or bool(self._right.between(key, time + 1, self._watermark))

    def _take(self, port: int, key: Any, time: int, record: Any) -> Iterator[Any]:
        if port == 0:
            self._await(time, 0, key, self._left.add(key, time, record, False))
        else:
            self._right.add(key, time, record, False)
            self._forget_old(key)
        return iter(())

    def _forget_old(self, key: Any) -> None:
        """Drops versions that hold at no time which the watermark has left."""
        until = self._watermark
        if until is None:  # a record of any time may come
            return
        if waiting := self._left.order.get(key):
            until = min(until, waiting[0][0])
        for _, number in self._right.between(key, -(1 << 62), until)[:-1]:
            self._right.remove(key, number)

    def _released(self, watermark: int) -> Iterator[Any]:
        until = self._until
        while until and until[0][0] < watermark:
            time, _, _, key, number = heapq.heappop(until)
            record = self._left.remove(key, number)[1]
            versions = self._right.order.get(key, [])
            at = bisect_right(versions, (time, 1 << 62)) - 1
            if at >= 0:
                yield from self._joined(key, [(record, self._right.of(key)[versions[at][1]][1])])
            elif self._keeps:
                yield from self._joined(key, [(record, None)])
            if at > 0:
                self._forget_old(key)

    def restore(self, epoch: int, saved: SavedState) -> None:
        super().restore(epoch, saved)
        for key, order in self._left.order.items():
            for time, number in order:
                self._await(time, 0, key, number)
