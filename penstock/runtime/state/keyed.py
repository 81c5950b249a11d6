"""State that survives: what a stage gives to a snapshot, and gets back.

Keyed state is a map from keys to values; a snapshot holds only what has changed since the last one (a *delta*), or
everything (it is *whole*). There are two ways to know what has changed:

- `KeyedMap` notes the entries that a batch has changed, right behind it, while they are in the processor's caches:
  looking them up again at the barrier would stop the task for many times as long.
- `LoggedMap`, for aggregates, keeps the partials that were merged, encoded: no look-up at all. Whoever reads them back
  merges them again.

Both give up noting where much of the map changes, and save all values and no key that was saved before
(`KeyedValues`): as long as nothing is removed the keys keep their order, and the keys are most of what there is to
touch. When that builds on too little they want to be saved whole, and say so (`wants_whole`). Values may be changed in
place by their owner after a delta was taken, so whoever takes one must encode it before the stage runs again.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

from penstock.runtime.records.codec import encode
from penstock.runtime.state.aggregate import Aggregate

_GONE: Any = object()

#: A list as `codec.encode` returns it.
Encoded = tuple[int, bytes]

# Records that are encoded together by a log: enough to be quick, few enough to be in the processor's caches still.
_CHUNK_RECORDS = 4096

# Deltas since the last whole snapshot may hold so many times the entries of the map: reading a task back takes as long.
_DELTAS_MOST = 2

# As many values cost about as much as one entry, written and read.
_VALUES_COST = 16

# And as many hold the task up for about as long.
_VALUES_HOLD = 4

# Epochs for which nothing is noted of a map of which much changes, before it is tried again.
_BLIND_EPOCHS = 16


@dataclass
class KeyedDelta:
    """Changes of a keyed map: `values[i]` is now that of `keys[i]`, `gone` have none any more. `size`: how many entries
    the map has then; -1: not known."""

    keys: list[Any]
    values: list[Any]
    gone: list[Any]
    size: int = field(default=-1, compare=False)


@dataclass
class KeyedWhole:
    """All entries of a keyed map: the map itself, which must be encoded before it changes."""

    entries: dict[Any, Any]


@dataclass
class KeyedLog:
    """What was merged into a keyed map: pairs of encoded keys and encoded partials, in order. `merge` says how, for
    `aggregate.merge_of`; `size` as of KeyedDelta."""

    chunks: list[tuple[Encoded, Encoded]]
    merge: str
    size: int = field(default=-1, compare=False)


@dataclass
class KeyedValues:
    """All values of a keyed map, in its order. Its first `known` keys are those of the last snapshot of it that was
    whole or of this kind, then come `keys`. `values`: the map itself, which must be encoded before it changes."""

    known: int
    keys: list[Any]
    values: dict[Any, Any]


#: What a snapshot holds of a keyed map.
Delta = KeyedDelta | KeyedWhole | KeyedLog | KeyedValues


@dataclass
class StageState:
    """What a stage saves: keyed maps by name, and something of the task's own that must be picklable."""

    maps: dict[str, Delta] = field(default_factory=dict)
    own: Any = None


#: Of an operator in a task: records in, records out, records skipped, records late. A task also has the counters of the
#: operators that its records go to next: what was skipped on the way there.
Counters: TypeAlias = tuple[int, int, int, int]


@dataclass
class SavedState:
    """What a stage gets back: whole maps, of the keys that its task owns, and what earlier tasks saved as their own.
    `own` has one entry where the operator has as many tasks as before, else any number."""

    maps: dict[str, dict[Any, Any]] = field(default_factory=dict)
    own: list[Any] = field(default_factory=list)
    counters: Counters = (0, 0, 0, 0)


class _Saved:
    """What both kinds of map have in common: what of a map was saved since it was last saved whole."""

    def __init__(self, values: dict[Any, Any], tracked: bool) -> None:
        self.values = values
        self._tracked = tracked
        self._saved = 0  # entries in deltas since the last whole one
        self._known: int | None = None  # entries whose place was saved since this began; None: none were

    def restore(self, saved: dict[Any, Any]) -> None:
        """Start from saved values."""
        dict.update(self.values, saved)
        self._known = None  # of what is behind deltas, only who reads them all knows the order

    @property
    def _builds_on_much(self) -> bool:
        """All values, without the keys that were saved before, are worth saving."""
        entries = len(self.values)
        return self._known is not None and 2 * self._known >= entries and self._saved <= _DELTAS_MOST * entries

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
    """A keyed map with note of what has changed. Without `tracked` (a job without epochs) it notes nothing."""

    def __init__(self, values: dict[Any, Any], tracked: bool) -> None:
        super().__init__(values, tracked)
        self._fresh: dict[Any, Any] | None = {} if tracked else None  # None: everything may have changed
        self._any_gone = False  # among those
        self._noted = 0  # changes since the last delta; a key may come several times
        self._blind = 0  # epochs to come in which nothing is noted

    def note(self, keys: Collection[Any]) -> None:
        """These keys may have new values, or none any more; of those removed, `removed` has been told too."""
        if not self._tracked:
            return
        self._noted += len(keys)
        fresh, values = self._fresh, self.values
        if fresh is None:
            return
        try:
            fresh.update(zip(keys, map(values.__getitem__, keys), strict=True))
        except (KeyError, TypeError):  # some key has no value, or not even a hash
            self._any_gone = True
            for key in keys:
                with suppress(TypeError):
                    fresh[key] = values.get(key, _GONE)
        worth = _VALUES_HOLD if self._builds_on_much else 2
        if len(fresh) > _CHUNK_RECORDS and worth * len(fresh) > len(self.values):
            self._fresh, self._blind = None, _BLIND_EPOCHS

    def removed(self) -> None:
        """Some key was taken out. When it comes back it has another place, so the order that was saved is void."""
        self._known = None

    @property
    def wants_whole(self) -> bool:
        """The next delta had better be whole."""
        if self._fresh is None:
            return self._noted > 0 and not self._builds_on_much
        return self._saved + len(self._fresh) > _DELTAS_MOST * len(self.values)

    def delta(self, whole: bool) -> KeyedDelta | KeyedWhole | KeyedValues:
        """The changes since the last delta, or everything."""
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
    """The keyed map of an aggregate, with a log of what was merged into it. Without `tracked` it logs nothing."""

    def __init__(self, values: dict[Any, Any], aggregate: Aggregate, tracked: bool) -> None:
        super().__init__(values, tracked)
        self._aggregate = aggregate
        self._logging = tracked
        self._spoiled = False  # the values have changed otherwise than by what was logged
        self._keys: list[Any] = []  # not yet encoded
        self._partials: list[Any] = []
        self._chunks: list[tuple[Encoded, Encoded]] = []
        self._merged = 0  # records since the last delta
        self._blind = 0  # epochs to come in which nothing is logged

    def log(self, keys: list[Any], values: list[Any], partial: bool) -> None:
        """These values have been added to those of these keys, or merged when they are partials; all of them."""
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

    def lose(self) -> None:
        """The values have changed in a way that cannot be logged: the next delta will be whole."""
        self._spoiled = True
        self._stop()

    @property
    def wants_whole(self) -> bool:
        """The next delta had better be whole."""
        if self._logging:
            return self._saved + self._merged > _DELTAS_MOST * max(_CHUNK_RECORDS, len(self.values))
        return self._spoiled or (self._merged > 0 and not self._builds_on_much)

    def delta(self, whole: bool) -> Delta:
        """The changes since the last delta, or everything."""
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
            self._chunks.append((encode(self._keys), encode(self._partials)))
        except Exception:  # who saves the map whole finds out which value it is
            self.lose()
        else:
            self._keys, self._partials = [], []

    def _stop(self) -> None:
        self._logging = False
        self._keys, self._partials, self._chunks = [], [], []
