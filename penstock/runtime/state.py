"""State that survives: what a stage gives to a snapshot, and gets back.

Keyed state is a map from keys to values in which a stage notes the keys that it touches, so that a snapshot holds only
what has changed since the last one (a *delta*); a snapshot with everything is *whole*. Values may be changed in place
by their owner after the delta was taken, so whoever takes a delta must encode it before the stage runs again.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat
from operator import is_
from typing import Any

_GONE: Any = object()


@dataclass
class KeyedDelta:
    """Changes of a keyed map: `values[i]` is now that of `keys[i]`, `gone` have none any more. `whole`: there are no
    other keys."""

    keys: list[Any]
    values: list[Any]
    gone: list[Any]
    whole: bool


@dataclass
class StageState:
    """What a stage saves: keyed maps by name, and something of the task's own that must be picklable."""

    maps: dict[str, KeyedDelta] = field(default_factory=dict)
    own: Any = None


@dataclass
class SavedState:
    """What a stage gets back: whole maps, of the keys that its task owns, and what earlier tasks saved as their own.
    `own` has one entry where the operator has as many tasks as before, else any number."""

    maps: dict[str, dict[Any, Any]] = field(default_factory=dict)
    own: list[Any] = field(default_factory=list)
    counters: tuple[int, int, int] = (0, 0, 0)  # records in, records out, records skipped


class KeyedMap:
    """A keyed map with note of what was touched. Without `tracked` (a job without epochs) it notes nothing."""

    def __init__(self, values: dict[Any, Any], tracked: bool) -> None:
        self.values = values
        self._touched: set[Any] | None = set() if tracked else None

    def touch(self, keys: Iterable[Any]) -> None:
        """These keys may have changed."""
        touched = self._touched
        if touched is None:
            return
        try:
            touched.update(keys)
        except TypeError:  # some key has no hash, and so no value either
            for key in keys:
                with suppress(TypeError):
                    touched.add(key)

    def delta(self, whole: bool) -> KeyedDelta:
        """The changes since the last delta, or everything."""
        values = self.values
        assert self._touched is not None
        touched, self._touched = self._touched, set()
        if whole:
            return KeyedDelta(list(values), list(values.values()), [], True)
        keys = list(touched)
        found = list(map(values.get, keys, repeat(_GONE)))  # one lookup a key: each misses the caches
        if not any(map(is_, found, repeat(_GONE))):
            return KeyedDelta(keys, found, [], False)
        kept = [(key, value) for key, value in zip(keys, found, strict=True) if value is not _GONE]
        gone = [key for key, value in zip(keys, found, strict=True) if value is _GONE]
        return KeyedDelta([key for key, _ in kept], [value for _, value in kept], gone, False)

    def restore(self, saved: dict[Any, Any]) -> None:
        """Start from saved values."""
        dict.update(self.values, saved)
