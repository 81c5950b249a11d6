"""Broadcast state: a map that all tasks of an operator have alike, because all of them get the records that change it.

The first task saves it for all tasks. A function that has records of only some keys must never change it.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from penstock.runtime.errors import PenstockError
from penstock.runtime.state.keyed import SHARED, KeyedDelta, KeyedMap, KeyedValues, KeyedWhole


class BroadcastState(MutableMapping[Any, Any]):
    """See the module's docstring. It is used like a dict."""

    title = f"{SHARED}broadcast"

    def __init__(self, operator: str) -> None:
        self.open = False  # whether it may be changed now
        self._operator = operator
        self._values: dict[Any, Any] = {}
        self._map = KeyedMap(self._values, False)

    def saved_here(self) -> None:
        """Notes that this task saves the map for all tasks."""
        self._map = KeyedMap(self._values, True)

    def __getitem__(self, key: Any) -> Any:
        return self._values[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._check()
        self._values[key] = value
        self._map.note((key,))

    def __delitem__(self, key: Any) -> None:
        self._check()
        del self._values[key]
        self._map.removed()
        self._map.note((key,))

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)

    @property
    def wants_whole(self) -> bool:
        """Whether the next delta should be whole."""
        return self._map.wants_whole

    def delta(self, whole: bool) -> KeyedDelta | KeyedWhole | KeyedValues:
        """Returns the changes since the last delta, or everything."""
        return self._map.delta(whole)

    def restore(self, saved: dict[Any, Any]) -> None:
        """Starts from the saved map."""
        self._map.restore(saved)

    def drop(self) -> None:
        """Frees the memory of all entries. The map is not used any more."""
        self._map.drop()

    def _check(self) -> None:
        if not self.open:
            raise PenstockError(
                f"operator {self._operator!r}: ctx.broadcast was changed for a record of one key, which only one task "
                "has; only process_broadcast may change it"
            )
