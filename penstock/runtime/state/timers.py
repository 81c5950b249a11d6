"""Timers of a keyed stage: for each key, the times at which the key wants to be called.

Times are wall-clock seconds since 1970 (time.time()), so they mean the same after a restart on another machine. Timers
are keyed state: each epoch saves them, and they are reassigned with their keys. A timer must never be called twice.
"""

from __future__ import annotations

import heapq
from typing import Any

from penstock.runtime.state.keyed import KeyedMap


class Timers:
    """See the module's docstring. `saved` is the map that snapshots contain: key -> its times, sorted."""

    def __init__(self, tracked: bool) -> None:
        self._times: dict[Any, tuple[float, ...]] = {}
        self.saved = KeyedMap(self._times, tracked)
        # (time, number, key). An entry whose key no longer has the time is skipped. The number makes comparing keys
        # unnecessary.
        self._heap: list[tuple[float, int, Any]] = []
        self._number = 0

    def __len__(self) -> int:
        return sum(map(len, self._times.values()))

    def set(self, key: Any, at: float) -> None:
        """Sets a timer for the key at this time. Setting the same time again changes nothing."""
        times = self._times.get(key, ())
        if at not in times:
            self._times[key] = tuple(sorted((*times, at)))
            self.saved.note((key,))
            self._push(key, at)

    def cancel(self, key: Any, at: float | None) -> None:
        """Cancels the key's timer of this time, or all its timers (None). It is no error if there is none."""
        times = self._times.get(key)
        if times is None:
            return
        left = () if at is None else tuple(time for time in times if time != at)
        if left:
            self._times[key] = left
        else:
            del self._times[key]
            self.saved.removed()
        self.saved.note((key,))

    def next(self) -> float | None:
        """Returns the time of the first timer, or None when there is none."""
        heap = self._heap
        while heap:
            at, _, key = heap[0]
            if at in self._times.get(key, ()):
                return at
            heapq.heappop(heap)
        return None

    def due(self, now: float) -> list[tuple[float, Any]]:
        """Returns (time, key) of all timers that are due, by time. They stay set."""
        fired = []
        while (at := self.next()) is not None and at <= now:
            _, _, key = heapq.heappop(self._heap)
            fired.append((at, key))
        return fired

    def take(self, key: Any, at: float) -> bool:
        """Removes a timer that `due` returned. Returns False when it was cancelled meanwhile."""
        if at not in self._times.get(key, ()):
            return False
        self.cancel(key, at)
        return True

    def restore(self, saved: dict[Any, tuple[float, ...]]) -> None:
        """Starts from saved timers."""
        self.saved.restore(saved)
        for key, times in saved.items():
            for at in times:
                self._push(key, at)

    def drop(self) -> None:
        """Frees the memory of all timers. They are not used any more."""
        self.saved.drop()
        self._heap.clear()

    def _push(self, key: Any, at: float) -> None:
        self._number += 1
        heapq.heappush(self._heap, (at, self._number, key))
