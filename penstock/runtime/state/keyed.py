"""Keyed state: what an operator remembers for each key, what a stage saves in a snapshot, and what it gets back.

Keyed state is a map from keys to values. A snapshot contains either only what has changed since the last one (a
*delta*), or the whole map. There are two ways to find out what has changed:

- `KeyedMap` notes the entries that a batch has changed right after the batch, while they are in the processor's caches.
  Looking them up again at the barrier would stop the task for many times as long.
- `LoggedMap`, for aggregates, keeps the partial results that were merged, encoded. Nothing is looked up. A reader
  merges them again.

When much of a map changes in each epoch, both stop noting. They save all values, and only the keys that were not saved
before (`KeyedValues`). As long as no key is removed, the keys keep their order, and the keys are the larger part of the
work. When a snapshot would build on too little, the map asks to be saved whole (`wants_whole`).

The owner of a map may change values in place after a delta was taken. So the delta must be encoded before the stage
runs again, or the snapshot would show changes that came after the barrier.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol, TypeAlias

from penstock.runtime.records.codec import encode
from penstock.runtime.state.aggregate import Aggregate

_GONE: Any = object()

#: The names of some maps begin like this. Their keys are pairs of a key and a part (runtime/state/nested.py), and the
#: key alone decides which task has the entry.
NESTED = "nested:"

#: The names of some maps begin like this. All tasks of an operator have the same entries, and the first task saves
#: them.
SHARED = "shared:"

#: A list in the form in which `codec.encode` returns it.
Encoded = tuple[int, bytes]

# The number of records that a log encodes together: enough to be fast, and few enough to be still in the processor's
# caches.
_CHUNK_RECORDS = 4096

#: A map is saved whole when the deltas since the last whole snapshot have this many times its entries, because it takes
#: as long to read them back.
DELTAS_MOST = 2

# This many values cost about as much as one entry to write and read.
_VALUES_COST = 16

# This many values hold up the task for about as long as one entry.
_VALUES_HOLD = 4

# When much of a map changes, nothing is noted for this many epochs. Then noting is tried again.
_BLIND_EPOCHS = 16


@dataclass
class KeyedDelta:
    """The changes of a keyed map. `values[i]` is the new value of `keys[i]`, and the keys in `gone` have no value any
    more. `size` is the number of entries that the map has then; -1: unknown."""

    keys: list[Any]
    values: list[Any]
    gone: list[Any]
    size: int = field(default=-1, compare=False)


@dataclass
class KeyedWhole:
    """All entries of a keyed map. This is the map itself, which must be encoded before it changes."""

    entries: dict[Any, Any]


@dataclass
class KeyedLog:
    """The merged values of a keyed map: pairs of encoded keys and encoded partial results, in order. `merge` says how
    to merge them, for `aggregate.merge_of`. `size` has the same meaning as in KeyedDelta."""

    chunks: list[tuple[Encoded, Encoded]]
    merge: str
    size: int = field(default=-1, compare=False)


@dataclass
class KeyedValues:
    """All values of a keyed map, in its order. The first `known` keys are those of its last snapshot that was whole or
    of this kind, and `keys` follow them. `values` is the map itself, which must be encoded before it changes."""

    known: int
    keys: list[Any]
    values: dict[Any, Any]


#: What a snapshot contains of a keyed map.
Delta = KeyedDelta | KeyedWhole | KeyedLog | KeyedValues


class StateMap(Protocol):
    """A keyed map as a stage saves it."""

    @property
    def wants_whole(self) -> bool:
        """Whether the next delta should be whole."""

    def delta(self, whole: bool) -> Delta:
        """Returns the changes since the last delta, or everything."""

    def restore(self, saved: dict[Any, Any]) -> None:
        """Starts from saved entries."""

    def drop(self) -> None:
        """Frees the memory of all entries. The map is not used any more."""


@dataclass
class StageState:
    """The state that a stage saves: its keyed maps by name, and anything picklable of the task's own."""

    maps: dict[str, Delta] = field(default_factory=dict)
    own: Any = None


#: The counters of an operator in a task: records in, records out, records skipped, records late. A task also has
#: counters for the operators that its records go to next: the records that were skipped on the way there.
Counters: TypeAlias = tuple[int, int, int, int]


@dataclass
class SavedState:
    """The state that a stage gets back: whole maps with the keys that its task owns, and what earlier tasks have saved
    as their own. `own` has one entry when the operator has as many tasks as before, and otherwise any number."""

    maps: dict[str, dict[Any, Any]] = field(default_factory=dict)
    own: list[Any] = field(default_factory=list)
    counters: Counters = (0, 0, 0, 0)


class _Saved:
    """The common part of both kinds of map: how much of a map was saved since it was last saved whole."""

    def __init__(self, values: dict[Any, Any], tracked: bool) -> None:
        self.values = values
        self._tracked = tracked
        self._saved = 0  # the number of entries in deltas since the last whole snapshot
        self._known: int | None = None  # the number of entries whose place was saved since then; None: of none

    def restore(self, saved: dict[Any, Any]) -> None:
        """Starts from saved values."""
        dict.update(self.values, saved)
        self._known = None  # only a reader of all deltas knows the order of the entries after them

    def drop(self) -> None:
        """Frees the memory of all entries. The map is not used any more."""
        dict.clear(self.values)

    @property
    def _builds_on_much(self) -> bool:
        """Whether all values, without the keys that were saved before, are worth saving."""
        entries = len(self.values)
        return self._known is not None and 2 * self._known >= entries and self._saved <= DELTAS_MOST * entries

    def _whole(self) -> KeyedWhole:
        self._saved, self._known = 0, len(self.values)
        return KeyedWhole(self.values)

    def _all_values(self) -> KeyedValues:
        assert self._known is not None
        known, self._known = self._known, len(self.values)
        self._saved += len(self.values) // _VALUES_COST
        new = list(islice(reversed(self.values), len(self.values) - known))
        return KeyedValues(known, new[::-1], self.values)


class KeyedMap(_Saved):
    """A keyed map that notes its changes. It notes nothing when `tracked` is false, in a job without epochs."""

    def __init__(self, values: dict[Any, Any], tracked: bool) -> None:
        super().__init__(values, tracked)
        self._fresh: dict[Any, Any] | None = {} if tracked else None  # None: everything may have changed
        self._any_gone = False  # whether keys among the noted ones were removed
        self._noted = 0  # the number of changes since the last delta; a key may count several times
        self._blind = 0  # for this many more epochs nothing is noted

    def note(self, keys: Collection[Any]) -> None:
        """Notes that these keys may have new values, or may have been removed. For removed keys, `removed` was called
        already."""
        if not self._tracked:
            return
        self._noted += len(keys)
        fresh, values = self._fresh, self.values
        if fresh is None:
            return
        try:
            fresh.update(zip(keys, map(values.__getitem__, keys), strict=True))
        except (KeyError, TypeError):  # some key has no value, or cannot be hashed
            self._any_gone = True
            for key in keys:
                with suppress(TypeError):
                    fresh[key] = values.get(key, _GONE)
        worth = _VALUES_HOLD if self._builds_on_much else 2
        if len(fresh) > _CHUNK_RECORDS and worth * len(fresh) > len(self.values):
            self._fresh, self._blind = None, _BLIND_EPOCHS

    def drop(self) -> None:
        super().drop()
        self._fresh = None

    def removed(self) -> None:
        """Notes that some key was removed. If it comes back, it gets another place, so the order that was saved no
        longer holds."""
        self._known = None

    @property
    def wants_whole(self) -> bool:
        """Whether the next delta should be whole."""
        if self._fresh is None:
            return self._noted > 0 and not self._builds_on_much
        return self._saved + len(self._fresh) > DELTAS_MOST * len(self.values)

    def delta(self, whole: bool) -> KeyedDelta | KeyedWhole | KeyedValues:
        """Returns the changes since the last delta, or everything."""
        assert self._tracked
        values, fresh, noted = self.values, self._fresh, self._noted
        if fresh is None:
            whole = whole or self.wants_whole
            self._blind -= 1
            if self._blind <= 0 or 4 * noted < len(values):
                self._fresh = {}
        else:
            self._fresh = {}
        any_gone, self._any_gone, self._noted = self._any_gone, False, 0
        if whole:
            return self._whole()
        if fresh is None and noted:
            return self._all_values()
        if not fresh:
            return KeyedDelta([], [], [], len(values))
        self._saved += len(fresh)
        if not any_gone:
            return KeyedDelta(list(fresh), list(fresh.values()), [], len(values))
        gone = [key for key, value in fresh.items() if value is _GONE]
        for key in gone:
            del fresh[key]
        return KeyedDelta(list(fresh), list(fresh.values()), gone, len(values))


class LoggedMap(_Saved):
    """The keyed map of an aggregate, with a log of the merged values. It logs nothing when `tracked` is false."""

    def __init__(self, values: dict[Any, Any], aggregate: Aggregate, tracked: bool) -> None:
        super().__init__(values, tracked)
        self._aggregate = aggregate
        self._logging = tracked
        self._spoiled = False  # the values have changed in a way that the log does not show
        self._keys: list[Any] = []  # not encoded yet
        self._partials: list[Any] = []
        self._chunks: list[tuple[Encoded, Encoded]] = []
        self._merged = 0  # the number of records since the last delta
        self._blind = 0  # for this many more epochs nothing is logged

    def log(self, keys: list[Any], values: list[Any], partial: bool) -> None:
        """Logs that all these values were added to the values of these keys, or merged when they are partial
        results."""
        if not self._tracked:
            return
        self._merged += len(keys)
        if not self._logging:
            return
        if self._merged > max(_CHUNK_RECORDS, len(self.values) // 2):
            self._stop()
            self._blind = _BLIND_EPOCHS
            return
        self._keys += keys
        self._partials += values if partial else self._aggregate.partials(values)
        if len(self._keys) >= _CHUNK_RECORDS:
            self._encode()

    def drop(self) -> None:
        super().drop()
        self._stop()

    def lose(self) -> None:
        """Notes that the values have changed in a way that cannot be logged. The next delta will be whole."""
        self._spoiled = True
        self._stop()

    @property
    def wants_whole(self) -> bool:
        """Whether the next delta should be whole."""
        if self._logging:
            return self._saved + self._merged > DELTAS_MOST * max(_CHUNK_RECORDS, len(self.values))
        return self._spoiled or (self._merged > 0 and not self._builds_on_much)

    def delta(self, whole: bool) -> Delta:
        """Returns the changes since the last delta, or everything."""
        assert self._tracked
        if self._keys and not whole:
            self._encode()
        logged = self._logging
        whole = whole or (not logged and self.wants_whole)
        chunks, merged = self._chunks, self._merged
        self._stop()
        self._blind = max(0, self._blind - 1)
        self._logging = not self._blind or 4 * merged < len(self.values)
        self._spoiled, self._merged = False, 0
        if whole:
            return self._whole()
        if logged or not merged:
            self._saved += merged
            return KeyedLog(chunks, self._aggregate.merging, len(self.values))
        return self._all_values()

    def _encode(self) -> None:
        try:
            self._chunks.append((encode(self._keys, saved=True), encode(self._partials, saved=True)))
        except Exception:  # whoever saves the map whole finds out which value it is
            self.lose()
        else:
            self._keys, self._partials = [], []

    def _stop(self) -> None:
        self._logging = False
        self._keys, self._partials, self._chunks = [], [], []
