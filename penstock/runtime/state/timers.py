"""Timers of a keyed stage: for each key, the times at which the key wants to be called.

Times are wall-clock seconds since 1970 (time.time()), so they mean the same after a restart on another machine. Timers
are keyed state: each epoch saves them, and they are reassigned with their keys. A timer must never be called twice. A
timer that was cancelled must not take memory until it would have been due, and the work for a timer must not grow with
the number of its key's timers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator
from typing import Any

from penstock.runtime.state.keyed import Delta, KeyedMap

# A key with more timers than this keeps its times in a dict, which finds one of many at once. Few take less memory in a
# tuple.
_FEW = 8

# An agenda with fewer entries than this keeps those that are dead.
_SWEPT_LEAST = 64


class Agenda:
    """The events of later times, in the order of the times. `is_alive` says whether an entry still counts. Dead entries
    are skipped, and removed before they are more than the others were at the last removal."""

    def __init__(self, is_alive: Callable[[float, Any], bool]) -> None:
        self._is_alive = is_alive
        # (time, number, what). The number keeps the order of equal times, and makes comparing the rest unnecessary.
        self._heap: list[tuple[float, int, Any]] = []
        self._sweep_at = _SWEPT_LEAST
        self.number = 0  # the number of the entry that was added last

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, what: Any) -> None:
        """Adds an entry."""
        self.number += 1
        heapq.heappush(self._heap, (at, self.number, what))
        if len(self._heap) >= self._sweep_at:
            self._sweep()

    def first(self) -> tuple[float, int, Any] | None:
        """Returns the first entry that is alive, as (time, number, event), or None when there is none."""
        heap = self._heap
        while heap:
            at, _, what = heap[0]
            if self._is_alive(at, what):
                return heap[0]
            heapq.heappop(heap)
        return None

    def pop(self) -> None:
        """Removes the entry that `first` has returned."""
        heapq.heappop(self._heap)

    def clear(self) -> None:
        """Removes all entries."""
        self._heap.clear()

    def _sweep(self) -> None:
        alive = {(at, what): number for at, number, what in self._heap if self._is_alive(at, what)}
        self._heap = [(at, number, what) for (at, what), number in alive.items()]
        heapq.heapify(self._heap)
        self._sweep_at = max(_SWEPT_LEAST, 2 * len(self._heap))


class Timers:
    """See the module's docstring. `saved` is the map that snapshots contain: key -> its times."""

    def __init__(self, tracked: bool) -> None:
        self._times: dict[Any, tuple[float, ...] | dict[float, None]] = {}
        self.saved = KeyedMap(self._times, tracked)
        self._agenda = Agenda(lambda at, key: at in self._times.get(key, ()))

    def __len__(self) -> int:
        return sum(map(len, self._times.values()))

    def __contains__(self, key: Any) -> bool:
        return key in self._times

    def times(self, key: Any) -> Collection[float]:
        """Returns the times of a key's timers."""
        return self._times.get(key, ())

    def set(self, key: Any, at: float) -> None:
        """Sets a timer for the key at this time. Setting the same time again changes nothing."""
        times = self._times.get(key, ())
        if at in times:
            return
        if isinstance(times, dict):
            times[at] = None
        else:
            times = (*times, at)
            self._times[key] = times if len(times) <= _FEW else dict.fromkeys(times)
        self.saved.note((key,))
        self._agenda.add(at, key)

    def cancel(self, key: Any, at: float | None) -> None:
        """Cancels the key's timer of this time, or all its timers (None). It is no error if there is none."""
        times = self._times.get(key)
        if times is None or (at is not None and at not in times):
            return
        if at is None or len(times) == 1:
            del self._times[key]
            self.saved.removed()
        elif isinstance(times, dict):
            del times[at]
        else:
            self._times[key] = tuple(time for time in times if time != at)
        self.saved.note((key,))

    def next(self) -> float | None:
        """Returns the time of the first timer, or None when there is none."""
        first = self._agenda.first()
        return None if first is None else first[0]

    def due(self, now: float, set_now_before: float) -> Iterator[tuple[float, Any, bool]]:
        """Removes one timer after the other that is due, in the order of their times, and yields (time, key, whether it
        was set meanwhile). Timers that are set meanwhile take part if their time is before `set_now_before`."""
        agenda = self._agenda
        number = agenda.number
        while (first := agenda.first()) is not None and first[0] <= now:
            at, of, key = first
            if of > number and at >= set_now_before:
                return
            agenda.pop()
            self.take(key, at)
            yield at, key, of > number

    def in_order(self) -> list[tuple[float, Any]]:
        """Returns (time, key) of all timers, by time. They stay set."""
        return sorted(((at, key) for key, times in self._times.items() for at in times), key=lambda timer: timer[0])

    def take(self, key: Any, at: float) -> bool:
        """Removes a timer. Returns False when it is not set."""
        if at not in self._times.get(key, ()):
            return False
        self.cancel(key, at)
        return True

    @property
    def wants_whole(self) -> bool:
        """Whether the next delta should be whole."""
        return self.saved.wants_whole

    def delta(self, whole: bool) -> Delta:
        """Returns the changes since the last delta, or everything."""
        return self.saved.delta(whole)

    def restore(self, saved: dict[Any, tuple[float, ...] | dict[float, None]]) -> None:
        """Starts from saved timers."""
        self.saved.restore(saved)
        for key, times in saved.items():
            if isinstance(times, tuple) and len(times) > _FEW:
                self._times[key] = dict.fromkeys(times)
            for at in times:
                self._agenda.add(at, key)

    def drop(self) -> None:
        """Frees the memory of all timers. They are not used any more."""
        self.saved.drop()
        self._agenda.clear()
