"""Nested state: for each key a map of parts to values, which is saved part by part.

A list or a map of a key that grows to thousands of entries must not be saved whole because one entry has changed. So a
snapshot has entries of (key, part), and the name of its map begins with NESTED: a reader then finds the key group of an
entry by the key alone (runtime/epochs/snapshot.py). An entry must never be lost because the owner has changed a value
in place: whoever gives out a value that can change notes it (`note`).
"""

from __future__ import annotations

from typing import Any

from penstock.runtime.state.keyed import DELTAS_MOST, NESTED, KeyedDelta, KeyedWhole


class NestedMap:
    """key -> {part: value}. It notes nothing when `tracked` is false, in a job without epochs."""

    def __init__(self, name: str, tracked: bool) -> None:
        self.title = NESTED + name
        self.values: dict[Any, dict[Any, Any]] = {}
        self._tracked = tracked
        self._changed: dict[tuple[Any, Any], None] = {}
        self._size = 0  # the number of entries
        self._saved = 0  # the number of changes that were saved since the last whole snapshot

    def of(self, key: Any) -> dict[Any, Any]:
        """Returns the parts of a key, for reading."""
        return self.values.get(key) or {}

    def set(self, key: Any, part: Any, value: Any) -> None:
        """Sets a part of a key."""
        parts = self.values.get(key)
        if parts is None:
            parts = self.values[key] = {}
        if part not in parts:
            self._size += 1
        parts[part] = value
        if self._tracked:
            self._changed[key, part] = None

    def note(self, key: Any, part: Any) -> None:
        """Notes that the value of a part may have been changed in place."""
        if self._tracked:
            self._changed[key, part] = None

    def remove(self, key: Any, part: Any) -> Any:
        """Removes a part, which must be there, and returns its value."""
        parts = self.values[key]
        value = parts.pop(part)
        if not parts:
            del self.values[key]
        self._size -= 1
        if self._tracked:
            self._changed[key, part] = None
        return value

    def clear(self, key: Any) -> None:
        """Removes all parts of a key."""
        parts = self.values.pop(key, None)
        if parts is None:
            return
        self._size -= len(parts)
        if self._tracked:
            self._changed.update(dict.fromkeys((key, part) for part in parts))

    @property
    def wants_whole(self) -> bool:
        """Whether the next delta should be whole."""
        return self._saved + len(self._changed) > DELTAS_MOST * self._size and bool(self._changed)

    def delta(self, whole: bool) -> KeyedDelta | KeyedWhole:
        """Returns the changes since the last delta, or everything."""
        changed, self._changed = self._changed, {}
        if whole:
            self._saved = 0
            return KeyedWhole(
                {(key, part): value for key, parts in self.values.items() for part, value in parts.items()}
            )
        self._saved += len(changed)
        keys, values, gone = [], [], []
        for place in changed:
            key, part = place
            parts = self.values.get(key)
            if parts is not None and part in parts:
                keys.append(place)
                values.append(parts[part])
            else:
                gone.append(place)
        return KeyedDelta(keys, values, gone, self._size)

    def restore(self, saved: dict[Any, Any]) -> None:
        """Starts from saved entries."""
        for (key, part), value in saved.items():
            self.values.setdefault(key, {})[part] = value
        self._size += len(saved)

    def drop(self) -> None:
        """Frees the memory of all entries. The map is not used any more."""
        self.values.clear()
        self._changed.clear()
