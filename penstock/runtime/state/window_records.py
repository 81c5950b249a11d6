"""The records of open windows, for functions that see all of them: by key and window, saved by what was added.

A window of many records must not be saved whole because one has come. So each record is saved once, as an entry of
(key, (window, number)), and the whole window is named only when it is removed. The records of a window must never
change their order.
"""

from __future__ import annotations

from typing import Any

from penstock.runtime.state.keyed import DELTAS_MOST, NESTED, KeyedDelta, KeyedWhole


class WindowRecords:
    """key -> window -> records. It notes nothing when `tracked` is false, in a job without epochs."""

    title = f"{NESTED}window records"

    def __init__(self, tracked: bool) -> None:
        self.values: dict[Any, dict[Any, list[Any]]] = {}
        self._tracked = tracked
        self._saved: dict[tuple[Any, Any], int] = {}  # how many records of a window are saved
        self._grown: dict[tuple[Any, Any], None] = {}  # windows with records that are not saved
        self._gone: dict[tuple[Any, Any], int] = {}  # removed windows, with the number of their saved records
        self._size = 0
        self._changes = 0  # the number of changes that were saved since the last whole snapshot

    def add(self, key: Any, window: Any, records: list[Any]) -> None:
        """Adds records to a window, after the earlier ones."""
        windows = self.values.setdefault(key, {})
        if window in windows:
            windows[window] += records
        else:
            windows[window] = list(records)
        self._size += len(records)
        if self._tracked:
            self._grown[key, window] = None

    def remove(self, key: Any, window: Any) -> list[Any]:
        """Removes a window, and returns its records."""
        windows = self.values[key]
        records = windows.pop(window)
        if not windows:
            del self.values[key]
        self._size -= len(records)
        if self._tracked:
            place = (key, window)
            self._grown.pop(place, None)
            if saved := self._saved.pop(place, 0):
                self._gone[place] = saved
        return records

    def move(self, key: Any, window: Any, into: Any) -> None:
        """Adds the records of a window to another one, and removes the window."""
        records = self.remove(key, window)
        windows = self.values.setdefault(key, {})
        if into in windows:
            self.add(key, into, records)
            return
        windows[into] = records  # the list itself: a session that grows record by record must not be copied each time
        self._size += len(records)
        if self._tracked:
            self._grown[key, into] = None

    @property
    def wants_whole(self) -> bool:
        """Whether the next delta should be whole."""
        return self._changes > DELTAS_MOST * self._size and bool(self._grown or self._gone)

    def delta(self, whole: bool) -> KeyedDelta | KeyedWhole:
        """Returns the changes since the last delta, or everything."""
        grown, gone = self._grown, self._gone
        self._grown, self._gone = {}, {}
        if whole:
            self._changes = 0
            found: dict[Any, Any] = {}
            for key, windows in self.values.items():
                for window, records in windows.items():
                    self._saved[key, window] = len(records)
                    found.update(((key, (window, n)), record) for n, record in enumerate(records))
            return KeyedWhole(found)
        keys: list[Any] = []
        values: list[Any] = []
        for place in grown:
            key, window = place
            records = self.values[key][window]
            # What was saved of a removed window of the same name is replaced.
            first = self._saved.get(place, 0)
            keys += [(key, (window, n)) for n in range(first, len(records))]
            values += records[first:]
            self._saved[place] = len(records)
        removed = []
        for (key, window), saved in gone.items():
            left = len(self.values.get(key, {}).get(window, ()))
            removed += [(key, (window, n)) for n in range(left, saved)]
        self._changes += len(keys) + len(removed)
        return KeyedDelta(keys, values, removed, self._size)

    def restore(self, saved: dict[Any, Any]) -> None:
        """Starts from saved entries."""
        for (key, (window, _)), record in sorted(saved.items(), key=_number):
            self.values.setdefault(key, {}).setdefault(window, []).append(record)
        self._size = len(saved)
        if self._tracked:
            for key, windows in self.values.items():
                self._saved.update({(key, window): len(records) for window, records in windows.items()})

    def drop(self) -> None:
        """Frees the memory of all entries. The map is not used any more."""
        self.values.clear()
        for noted in (self._saved, self._grown, self._gone):
            noted.clear()


def _number(entry: tuple[Any, Any]) -> int:
    """Returns the number of a record in its window."""
    (_, (_, number)), _ = entry
    return int(number)
