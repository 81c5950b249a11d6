"""Processing-time timers of a keyed stage: for each key the times at which it wants to be called.

Times are seconds since 1970 (time.time()), so that they mean the same after a restart on another machine. Timers are
part of the keyed state: they are saved with each epoch and move with their keys. A timer that is due fires once.
"""

from __future__ import annotations

import heapq
from typing import Any

from penstock.runtime.state.keyed import KeyedMap


class Timers:
    """See the module's docstring. `saved` is the map that goes into snapshots: key -> its times, sorted."""

    def __init__(self, tracked: bool) -> None:
        self._times: dict[Any, tuple[float, ...]] = {}
        self.saved = KeyedMap(self._times, tracked)
        # (time, number, key); a key that has no such time any more is passed over. The number spares keys a comparison.
        self._heap: list[tuple[float, int, Any]] = []
        self._number = 0

    def __len__(self) -> int:
        return sum(map(len, self._times.values()))

    def set(self, key: Any, at: float) -> None:
        """Fire for the key at this time; setting the same time again changes nothing."""
        times = self._times.get(key, ())
        if at not in times:
            self._times[key] = tuple(sorted((*times, at)))
            self.saved.note((key,))
            self._push(key, at)

    def cancel(self, key: Any, at: float | None) -> None:
        """Forget the key's timer of this time (None: all of its timers); one that is not set is no error."""
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
        """When the first timer is due; None: there is none."""
        heap = self._heap
        while heap:
            at, _, key = heap[0]
            if at in self._times.get(key, ()):
                return at
            heapq.heappop(heap)
        return None

    def due(self, now: float) -> list[tuple[float, Any]]:
        """The (time, key) of all timers due, in order of time; they are still set."""
        fired = []
        while (at := self.next()) is not None and at <= now:
            _, _, key = heapq.heappop(self._heap)
            fired.append((at, key))
        return fired

    def take(self, key: Any, at: float) -> bool:
        """Unset a timer that `due` gave; False when it was cancelled since."""
        if at not in self._times.get(key, ()):
            return False
        self.cancel(key, at)
        return True

    def restore(self, saved: dict[Any, tuple[float, ...]]) -> None:
        """Go on from saved timers."""
        self.saved.restore(saved)
        for key, times in saved.items():
            for at in times:
                self._push(key, at)

    def _push(self, key: Any, at: float) -> None:
        self._number += 1
        heapq.heappush(self._heap, (at, self._number, key))
