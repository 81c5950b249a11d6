"""The functions over the records of one key and window: an aggregate, or a function that sees all records.

A *window function* keeps something for each key and window, and makes results of it. `runtime/operators/windows.py`
decides which records belong to which windows and when results leave; it must never know what is kept. An aggregate
keeps one value for a window, and a function that sees all records keeps them.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from itertools import repeat
from operator import itemgetter, length_hint, ne
from typing import Any, ClassVar, Literal

from penstock.runtime.errors import FlowError, shorten
from penstock.runtime.mistakes import called
from penstock.runtime.operators.base import StageContext
from penstock.runtime.operators.side_outputs import send
from penstock.runtime.records.key_groups import of_key
from penstock.runtime.records.userfunc import ErrorHandler, OwnFunction, check_function, is_failure
from penstock.runtime.state.aggregate import Aggregate
from penstock.runtime.state.nested import NestedMap
from penstock.runtime.state.window_records import WindowRecords

#: (start, end) of a window.
WindowBounds = tuple[Any, Any]

JoinHow = Literal["inner", "left", "right", "full"]

#: A value as it comes to a window: the input that it came by, its time (None: windows of no time) and itself.
Value = tuple[int, Any, Any]


class WindowFunction(ABC):
    """Describes a function of a window. `value` takes the value from a record (None: the record itself)."""

    name: str
    inputs: ClassVar[int] = 1
    value: Callable[[Any], Any] | None = None
    rows = False  # whether a window has any number of results, which stand alone, without key and window

    @property
    def state_kind(self) -> str:
        """Describes the kind of kept values in words."""
        return self.name

    @abstractmethod
    def kept(self, context: StageContext) -> Kept:
        """Makes the object in which one task keeps values."""


class Kept(ABC):
    """The values that one task keeps, for each key and window. `maps`: all that is saved, key -> window -> something;
    the first of them has the windows."""

    user: WindowContext | None = None

    def __init__(self, *maps: NestedMap | WindowRecords) -> None:
        self.maps = maps
        self._entries: dict[Any, dict[WindowBounds, Any]] = maps[0].values

    def windows(self, key: Any) -> Iterable[WindowBounds]:
        """Returns the windows of a key for which something is kept."""
        return self._entries.get(key) or ()

    def has(self, key: Any, window: WindowBounds) -> bool:
        """Whether something is kept for a key and window."""
        return window in self._entries.get(key, ())

    def all_windows(self) -> Iterator[tuple[Any, WindowBounds]]:
        """Yields everything for which something is kept, as (key, window)."""
        return ((key, window) for key, windows in self._entries.items() for window in windows)

    def close(self, key: Any, window: WindowBounds) -> None:
        """Forgets a window."""
        for each in self.maps:
            if window in each.values.get(key, ()):
                each.remove(key, window)

    @abstractmethod
    def add(self, key: Any, window: WindowBounds, values: list[Value], records: list[Any], errors: ErrorHandler) -> int:
        """Adds values to a window. Returns how many were added; the records of the others have failed."""

    @abstractmethod
    def merge(self, key: Any, windows: list[WindowBounds], into: WindowBounds) -> None:
        """Makes one window of several, or of one with other ends. When it raises, the windows are as they were."""

    def try_out(self, key: Any, windows: list[WindowBounds], values: list[Value]) -> BaseException | None:
        """Returns the failure that there would be if values were added to one window of several. It changes nothing."""
        return None

    @abstractmethod
    def results(self, key: Any, window: WindowBounds) -> Iterator[Any]:
        """Yields the results of a window so far."""

    def open(self) -> None:
        """Opens the user's function."""

    def end(self) -> None:
        """Closes the user's function, also after an error."""


# --- aggregates ----------------------------------------------------------------------------------------------------


class Aggregating(WindowFunction):
    """An aggregate of a window's values."""

    def __init__(self, aggregate: Aggregate) -> None:
        self.aggregate = aggregate
        self.name = aggregate.name
        self.value = aggregate.selector

    @property
    def state_kind(self) -> str:
        return self.aggregate.state_kind

    def __str__(self) -> str:
        return str(self.aggregate)

    def kept(self, context: StageContext) -> Kept:
        return _Accumulated(self.aggregate, context)


class _Accumulated(Kept):
    """One accumulated value for each key and window."""

    def __init__(self, aggregate: Aggregate, context: StageContext) -> None:
        self._aggregate = aggregate
        self._map = NestedMap("windows", context.epochs)
        super().__init__(self._map)

    def add(self, key: Any, window: WindowBounds, values: list[Value], records: list[Any], errors: ErrorHandler) -> int:
        aggregate = self._aggregate
        state = aggregate.new_state()
        known = self._map.of(key)
        if window in known:
            state[window] = known[window]
        left = map(itemgetter(2), values)
        taken = iter(list(left))
        failed = 0
        while True:
            try:
                aggregate.add(state, repeat(window, length_hint(taken)), taken)
            except BaseException as error:
                failed += 1
                errors.handle((key, records[len(values) - length_hint(taken) - 1]), of_key(key, error))
            else:
                break
        if window in state:
            self._map.set(key, window, state[window])
        return len(values) - failed

    def merge(self, key: Any, windows: list[WindowBounds], into: WindowBounds) -> None:
        state = self._aggregate.new_state()
        known = self._map.of(key)
        partials = [known[window] for window in windows]
        if len(partials) > 1 and isinstance(self._aggregate, OwnAggregate):
            partials[0] = deepcopy(partials[0])  # the user's merge may change it, and fail then
        self._aggregate.merge(state, repeat(into, len(partials)), iter(partials))
        for window in windows:
            self._map.remove(key, window)
        self._map.set(key, into, state[into])

    def try_out(self, key: Any, windows: list[WindowBounds], values: list[Value]) -> BaseException | None:
        aggregate, known = self._aggregate, self._map.of(key)
        state = aggregate.new_state()
        partials = [known[window] for window in windows]
        if isinstance(aggregate, OwnAggregate):
            partials = deepcopy(partials)  # the user's functions may change them
        try:
            aggregate.merge(state, repeat(None, len(partials)), iter(partials))
            aggregate.add(state, repeat(None, len(values)), map(itemgetter(2), values))
        except BaseException as error:  # the caller handles it
            if not is_failure(error):
                raise
            return error
        return None

    def results(self, key: Any, window: WindowBounds) -> Iterator[Any]:
        yield self._aggregate.result(self._map.of(key)[window])


# --- functions that see all records --------------------------------------------------------------------------------


class _Buffered(Kept):
    """All values of each key and window."""

    def __init__(self, context: StageContext, *more: NestedMap) -> None:
        self._records = WindowRecords(context.epochs)
        super().__init__(self._records, *more)

    def add(self, key: Any, window: WindowBounds, values: list[Value], records: list[Any], errors: ErrorHandler) -> int:
        self._records.add(key, window, values)
        return len(values)

    def merge(self, key: Any, windows: list[WindowBounds], into: WindowBounds) -> None:
        for window in windows:
            self._records.move(key, window, into)

    def values(self, key: Any, window: WindowBounds) -> list[Value]:
        """Returns the values of a window by their times, and in the order in which they came where these are equal."""
        values = self._records.values[key][window]
        return values if values[0][1] is None else sorted(values, key=itemgetter(1))

    def results(self, key: Any, window: WindowBounds) -> Iterator[Any]:
        yield [record for _, _, record in self.values(key, window)]


class Collected(WindowFunction):
    """The records of a window, as a list."""

    name = "collect"

    def kept(self, context: StageContext) -> Kept:
        return _Buffered(context)


class WindowContext:
    """The methods that the function of a window may use during a call. It must never keep the context for later
    calls."""

    def __init__(self, operator: str, side: dict[str, list[Any]], state: NestedMap) -> None:
        self.operator = operator
        self.key: Any = None
        self.window: WindowBounds = (None, None)
        self.mark: int | None = None
        self._side = side
        self._state = state

    def watermark(self) -> int | None:
        """The watermark, in milliseconds since 1970, or None."""
        return self.mark

    def get(self, default: Any = None) -> Any:
        """Returns the value that an earlier call for this window has set, or `default`."""
        parts = self._state.of(self.key)
        if self.window not in parts:
            return default
        self._state.note(self.key, self.window)
        return parts[self.window]

    def set(self, value: Any) -> None:
        """Sets something that the next call for this window gets. It is forgotten with the window."""
        self._state.set(self.key, self.window, value)

    def output(self, tag: str, *records: Any) -> None:
        """Sends records to a side output. The tag must be one of the operator's `outputs`."""
        send(self._side, tag, records, self.operator)


class Processed(WindowFunction):
    """A user's function of all records of a window: fn(ctx, key, window, records) -> outputs."""

    name = "process"
    rows = True

    def __init__(self, fn: Callable[..., Iterable[Any] | None], what: str) -> None:
        check_function(fn, what, ("ctx", "key", "window", "records"), yields=True, opens=True)
        self.fn = fn

    def kept(self, context: StageContext) -> Kept:
        return _Processed(self, context)


class _Processed(_Buffered):
    def __init__(self, function: Processed, context: StageContext) -> None:
        self._own = OwnFunction(function.fn)
        self._state = NestedMap("window state", context.epochs)
        super().__init__(context, self._state)
        self.user: WindowContext = WindowContext(context.operator.name, context.side, self._state)

    def open(self) -> None:
        self._own.open()

    def end(self) -> None:
        self._own.close()

    def results(self, key: Any, window: WindowBounds) -> Iterator[Any]:
        self.user.key, self.user.window = key, window
        outputs = self._own.fn(self.user, key, window, [record for _, _, record in self.values(key, window)])
        return iter(() if outputs is None else outputs)

    def merge(self, key: Any, windows: list[WindowBounds], into: WindowBounds) -> None:
        super().merge(key, windows, into)
        for window in windows:  # of several sessions that become one, the state of the last one is kept
            if window in self._state.of(key):
                self._state.set(key, into, self._state.remove(key, window))


class Joined(WindowFunction):
    """All pairs of a record of the first input and one of the second, with equal keys in one window."""

    name = "join"
    inputs = 2
    rows = True

    def __init__(self, how: JoinHow, fn: Callable[[Any, Any], Any] | None) -> None:
        self.how = how
        self.fn = fn

    def kept(self, context: StageContext) -> Kept:
        return _Joined(self, context)


class _Joined(_Buffered):
    def __init__(self, function: Joined, context: StageContext) -> None:
        super().__init__(context)
        self._fn = function.fn
        self._keep_left = function.how in ("left", "full")
        self._keep_right = function.how in ("right", "full")

    def results(self, key: Any, window: WindowBounds) -> Iterator[Any]:
        values = self.values(key, window)
        lefts = [record for port, _, record in values if port == 0]
        rights = [record for port, _, record in values if port == 1]
        pairs: Iterator[tuple[Any, Any]]
        if lefts and rights:
            pairs = ((left, right) for left in lefts for right in rights)
        elif lefts:
            pairs = ((left, None) for left in lefts) if self._keep_left else iter(())
        else:
            pairs = ((None, right) for right in rights) if self._keep_right else iter(())
        fn = self._fn
        return pairs if fn is None else (fn(left, right) for left, right in pairs)


# --- aggregates of the user's, and the best of a window --------------------------------------------------------------


class AggregateFunction:
    """Base class of a user's own aggregate: `keyed.aggregate(MyAggregator())`, also of windows.

    An accumulator is whatever `create` returns; it is saved with epochs, so it must be picklable. `add` and `merge`
    must return the accumulator: the one that they got, which they may change, or another one. With `merge`, senders add
    up their records before they send anything, unless each record must show (`emit="every"`, early results, late
    records that the flow uses, an `on_error` that skips records). So merging two accumulators must give what adding all
    their records to one would give. Each sender's records are added in their order. Results are copied
    (`copy.deepcopy`), unless they are numbers or texts, so that a later change of the accumulator changes no result
    that was emitted.
    """

    def create(self) -> Any:
        """Returns the accumulator of no records."""
        raise NotImplementedError

    def add(self, accumulator: Any, record: Any) -> Any:
        """Returns the accumulator with one more record."""
        raise NotImplementedError

    def merge(self, a: Any, b: Any) -> Any:
        """Returns one accumulator of two. It is optional. Senders combine records only if it is there, and sessions
        need it, because two of them may become one."""
        raise NotImplementedError

    def result(self, accumulator: Any) -> Any:
        """Returns the result of an accumulator. By default it is the accumulator itself."""
        return accumulator


class OwnAggregate(Aggregate):
    """A user's AggregateFunction. Senders combine records for it if it has a `merge`."""

    name = "aggregate"
    identity_result = False

    def __init__(self, aggregator: AggregateFunction, what: str) -> None:
        super().__init__()
        if not isinstance(aggregator, AggregateFunction):
            raise FlowError(f"{what} needs a penstock.AggregateFunction, got {called(aggregator)}")
        for method in ("create", "add"):
            if getattr(type(aggregator), method) is getattr(AggregateFunction, method):
                raise FlowError(f"{what}: {type(aggregator).__name__} has no method {method}")
        self._aggregator = aggregator
        self.combinable = type(aggregator).merge is not AggregateFunction.merge

    def __str__(self) -> str:
        return f"aggregate {type(self._aggregator).__name__}"

    def add(self, state: dict[Any, Any], keys: Iterator[Any], values: Iterator[Any]) -> None:
        aggregator = self._aggregator
        for key, value in zip(keys, values, strict=True):
            state[key] = aggregator.add(state[key] if key in state else aggregator.create(), value)

    def merge(self, state: dict[Any, Any], keys: Iterator[Any], partials: Iterator[Any]) -> None:
        for key, partial in zip(keys, partials, strict=True):
            state[key] = self._aggregator.merge(state[key], partial) if key in state else partial

    def result(self, partial: Any) -> Any:
        found = self._aggregator.result(partial)
        # It may be the accumulator, or a part of it, which the next record changes.
        return found if type(found) in _UNCHANGING else deepcopy(found)


_UNCHANGING = frozenset({type(None), bool, int, float, complex, str, bytes})


class Top(Aggregate):
    """The `n` records with the greatest, or least, values. Of equal values the records that came first are kept. A
    record whose value is NaN, or a tuple with a NaN in it, fails: a NaN is neither above nor below another value, so
    which records were kept would depend on the order in which they come."""

    name = "top"
    identity_result = False

    def __init__(self, n: int, by: Callable[[Any], Any] | None, largest: bool) -> None:
        super().__init__()
        self._n = n
        self._by = by
        self._largest = largest

    def __str__(self) -> str:
        return f"{'greatest' if self._largest else 'least'} {self._n}"

    def _best(self, several: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        best = heapq.nlargest if self._largest else heapq.nsmallest
        return best(self._n, several, key=itemgetter(0))

    def add(self, state: dict[Any, Any], keys: Iterator[Any], values: Iterator[Any]) -> None:
        by = self._by
        for key, record in zip(keys, values, strict=True):
            value = record if by is None else by(record)
            if value != value or (isinstance(value, tuple) and any(map(ne, value, value))):  # noqa: PLR0124
                raise ValueError(f"top: the value {shorten(value)} cannot be ordered, because it is or has a NaN")
            kept = state.get(key)
            if kept is None:
                _ = (value > value) if self._largest else (value < value)  # noqa: PLR0124  a value that has no order fails
                state[key] = [(value, record)]
            elif len(kept) < self._n or (value > kept[-1][0] if self._largest else value < kept[-1][0]):
                state[key] = self._best([*kept, (value, record)])

    def merge(self, state: dict[Any, Any], keys: Iterator[Any], partials: Iterator[Any]) -> None:
        for key, partial in zip(keys, partials, strict=True):
            state[key] = self._best([*state[key], *partial]) if key in state else partial

    def result(self, partial: Any) -> list[Any]:
        return [record for _, record in partial]
