"""Named states of a key: values, lists and maps that a process function asks for by name, with time-to-live.

    seen = ctx.value_state("seen", ttl_s=3600)
    if seen.get() is None: ...
    ctx.list_state("last").append(record)
    ctx.map_state("by product")[record["product"]] = record

Each belongs to the key of the present record, and is saved by what has changed: an entry that is appended to a list is
saved alone. What a function reads and changes in place is saved too, because each value that can change is noted when
it is given out. An entry that lives longer than its time-to-live must never be seen again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from datetime import timedelta
from typing import Any

from penstock.runtime.errors import PenstockError
from penstock.runtime.mistakes import no_method
from penstock.runtime.state.keyed import NESTED, Delta
from penstock.runtime.state.nested import NestedMap
from penstock.runtime.units import seconds

# Values of these types cannot be changed in place.
_FIXED = (int, float, str, bytes, bool, type(None), complex, frozenset)

# The only part of a value, and the part of a list that has the number of its next entry.
_WHOLE = 0

_DEADLINES = "deadlines:"


class _Kept:
    """The entries of one named state of a task, for all keys."""

    def __init__(self, kind: str, name: str, tracked: bool, clock: Callable[[], float]) -> None:
        self.kind = kind
        self.ttl_s: float | None = None  # of entries that are written from now on
        self.asked_ttl_s: float | timedelta | None = None  # the same, as the function gives it
        self.entries = NestedMap(f"{kind}:{name}", tracked)
        self.deadlines = NestedMap(f"{_DEADLINES}{kind}:{name}", tracked)
        self._by_age: OrderedDict[tuple[Any, Any], None] = OrderedDict()  # the entry that was written first comes first
        self._clock = clock

    def of(self, key: Any) -> dict[Any, Any]:
        self.sweep()
        return self.entries.of(key)

    def given(self, key: Any, part: Any, value: Any) -> Any:
        """Returns a value, and notes that its reader may change it."""
        if not isinstance(value, _FIXED):
            self.entries.note(key, part)
        return value

    def set(self, key: Any, part: Any, value: Any) -> None:
        self.sweep()
        self.entries.set(key, part, value)
        if self.ttl_s is not None:
            place = (key, part)
            self.deadlines.set(key, part, self._clock() + self.ttl_s)
            self._by_age[place] = None
            self._by_age.move_to_end(place)

    def remove(self, key: Any, part: Any) -> None:
        if (key, part) in self._by_age:
            del self._by_age[key, part]
            self.deadlines.remove(key, part)
        self.entries.remove(key, part)

    def clear(self, key: Any) -> None:
        for part in self.entries.of(key):
            self._by_age.pop((key, part), None)
        self.deadlines.clear(key)
        self.entries.clear(key)

    def sweep(self) -> None:
        """Removes the entries whose time is over."""
        if not self._by_age:
            return
        now = self._clock()
        while self._by_age:
            key, part = next(iter(self._by_age))
            if self.deadlines.of(key)[part] > now:
                return
            self._by_age.popitem(last=False)
            self.deadlines.remove(key, part)
            self.entries.remove(key, part)

    def restore(self, entries: dict[Any, Any], deadlines: dict[Any, Any]) -> None:
        if self.kind == "list":
            entries = dict(sorted(entries.items(), key=lambda entry: entry[0][1]))
        self.entries.restore(entries)
        self.deadlines.restore(deadlines)
        self._by_age.update(dict.fromkeys(sorted(deadlines, key=deadlines.__getitem__)))

    def live_for(self, ttl_s: float) -> None:
        """Gives all entries a time-to-live from now on, also entries that have none. Entries of a savepoint may have
        had a longer one, or were written by a machine whose clock is ahead: none lives longer from now on than a new
        one."""
        if self.ttl_s is None:
            self.ttl_s = ttl_s
            later = self._clock() + ttl_s
            for key, part in self._by_age:  # the order stays: the deadlines that change all become the same
                if self.deadlines.of(key)[part] > later:
                    self.deadlines.set(key, part, later)
            for key, parts in self.entries.values.items():
                for part in parts:
                    if (key, part) not in self._by_age:
                        self.deadlines.set(key, part, later)
                        self._by_age[key, part] = None


class _State:
    """The common part of states of all kinds, which belong to the present key."""

    def __init__(self, kept: _Kept, key: Callable[[], Any]) -> None:
        self._kept, self._key = kept, key

    def clear(self) -> None:
        """Removes all that is kept for the key."""
        self._kept.clear(self._key())


class _NoMap(_State):
    """A state that is no map, and says so to a call of a map's method."""

    def __getattr__(self, name: str) -> Any:
        raise no_method(self, name, _OF_OTHERS)


_OF_OTHERS = {
    "append": "a list state has it: ctx.list_state(name).append(...)",
    "extend": "write ctx.list_state(name).append(*values)",
    **dict.fromkeys(("keys", "values", "items", "pop", "update"), "a map state has it: ctx.map_state(name)"),
}


class ValueState(_NoMap):
    """One value of the present key."""

    def get(self, default: Any = None) -> Any:
        """Returns the value, or `default` when there is none."""
        key = self._key()
        parts = self._kept.of(key)
        return self._kept.given(key, _WHOLE, parts[_WHOLE]) if parts else default

    def set(self, value: Any) -> None:
        """Sets the value."""
        self._kept.set(self._key(), _WHOLE, value)


class ListState(_NoMap):
    """A list of the present key. Appending costs the same however long the list is."""

    def append(self, *values: Any) -> None:
        """Adds values at the end."""
        key = self._key()
        parts = self._kept.of(key)
        # Entries may have gone from the front, and none goes from the middle but by `set`.
        at = next(reversed(parts)) + 1 if parts else 0
        for i, value in enumerate(values):
            self._kept.set(key, at + i, value)

    def get(self) -> list[Any]:
        """Returns the values, in the order in which they were added."""
        key = self._key()
        return [self._kept.given(key, part, value) for part, value in self._kept.of(key).items()]

    def set(self, values: Iterable[Any]) -> None:
        """Replaces all values."""
        values = list(values)
        self._kept.clear(self._key())
        self.append(*values)

    def __len__(self) -> int:
        return len(self._kept.of(self._key()))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get())


class MapState(_State, MutableMapping[Any, Any]):
    """A map of the present key, which is used like a dict."""

    def __getitem__(self, part: Any) -> Any:
        key = self._key()
        return self._kept.given(key, part, self._kept.of(key)[part])

    def __setitem__(self, part: Any, value: Any) -> None:
        self._kept.set(self._key(), part, value)

    def __delitem__(self, part: Any) -> None:
        key = self._key()
        if part not in self._kept.of(key):
            raise KeyError(part)
        self._kept.remove(key, part)

    def __contains__(self, part: object) -> bool:
        return part in self._kept.of(self._key())

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._kept.of(self._key())))

    def __len__(self) -> int:
        return len(self._kept.of(self._key()))


_KINDS = {"value": ValueState, "list": ListState, "map": MapState}


class NamedStates:
    """The named states of a process stage. `key` tells the present key, and `clock` the time in seconds."""

    def __init__(self, operator: str, tracked: bool, key: Callable[[], Any], clock: Callable[[], float]) -> None:
        self._operator = operator
        self._tracked = tracked
        self._key = key
        self._clock = clock
        self._states: dict[str, tuple[_Kept, Any]] = {}
        self._saved: dict[str, dict[Any, Any]] = {}  # what was restored, and nobody has asked for so far

    def get(self, kind: str, name: str, ttl_s: float | timedelta | None) -> Any:
        """Returns the state of a name, which is created when it is asked for first."""
        known = self._states.get(name) or self._create(kind, name)
        kept, state = known
        if kept.kind != kind:
            raise PenstockError(
                f"operator {self._operator!r}: ctx.{kind}_state({name!r}) was a {kept.kind} before; each name is one "
                "state, so give this one another name"
            )
        if ttl_s is not None and ttl_s != kept.asked_ttl_s:
            if kept.asked_ttl_s is not None:
                raise PenstockError(
                    f"operator {self._operator!r}: ctx.{kind}_state({name!r}) had ttl_s={kept.asked_ttl_s} before, and "
                    f"has ttl_s={ttl_s} now; a state has one time-to-live"
                )
            kept.live_for(seconds(ttl_s, f"operator {self._operator!r}: ctx.{kind}_state({name!r}): ttl_s"))
            kept.asked_ttl_s = ttl_s
        return state

    def _create(self, kind: str, name: str) -> tuple[_Kept, Any]:
        if not isinstance(name, str) or not name:
            raise PenstockError(f"operator {self._operator!r}: ctx.{kind}_state({name!r}): the name must be a text")
        kept = _Kept(kind, name, self._tracked, self._clock)
        for other in _KINDS.keys() - {kind}:
            if NestedMap(f"{other}:{name}", False).title in self._saved:
                raise PenstockError(
                    f"operator {self._operator!r}: ctx.{kind}_state({name!r}): the saved state of this name is a "
                    f"{other}; give the new state another name"
                )
        entries = self._saved.pop(kept.entries.title, {})
        kept.restore(entries, self._saved.pop(kept.deadlines.title, {}))
        made = self._states[name] = (kept, _KINDS[kind](kept, self._key))
        return made

    @property
    def wants_whole(self) -> bool:
        """Whether the next delta should be whole."""
        kept = [kept for kept, _ in self._states.values()]
        return any(each.entries.wants_whole or each.deadlines.wants_whole for each in kept)

    def deltas(self, whole: bool) -> dict[str, Delta]:
        """Returns the changes since the last call, or everything, by the names of the saved maps."""
        for title in list(self._saved):  # nobody has asked for it, but it must not be lost
            kind, _, name = title.removeprefix(NESTED).removeprefix(_DEADLINES).partition(":")
            if name not in self._states:
                self._create(kind, name)
        found: dict[str, Delta] = {}
        for kept, _ in self._states.values():
            kept.sweep()
            for each in (kept.entries, kept.deadlines):
                found[each.title] = each.delta(whole)
        return found

    def restore(self, maps: dict[str, dict[Any, Any]]) -> None:
        """Starts from saved maps. Of these it takes those that are its own."""
        self._saved = {title: dict(entries) for title, entries in maps.items() if title.startswith(NESTED)}

    def drop(self) -> None:
        """Frees the memory of all states. They are not used any more."""
        self._saved.clear()
        for kept, _ in self._states.values():
            kept.entries.drop()
            kept.deadlines.drop()
