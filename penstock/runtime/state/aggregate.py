"""Keyed aggregates: how each one combines records before they travel, and merges into a task's state.

An aggregate is mergeable (two-phase aggregation): the sender adds a list of records to an empty state, which makes at
most one partial a key, and `merge` adds those partials to the state of the task that owns the keys. When no exchange
stands between, records are added to the state itself. What `result` makes of a state value is what the user sees.

Addition is re-associated by that, so float sums may differ in the last digit between runs, as they do in any
parallel aggregation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from operator import add, gt, length_hint, lt
from typing import Any

from penstock.runtime.errors import StoreError
from penstock.runtime.expressions.aggregates import Adder, merge_function
from penstock.runtime.records.key_groups import of_key
from penstock.runtime.records.userfunc import ErrorHandler, select_values


class Aggregate(ABC):
    """One aggregate over the values of a key; `selector` picks the value from a record, None takes the record."""

    name: str
    merging = ""  # how partials merge, for `merge_of`; "": only the aggregate itself can
    identity_result = True  # result() returns the state value itself
    total = False  # whether it takes any values, so that neither adding nor merging ever fails

    def __init__(self, selector: Callable[[Any], Any] | None = None) -> None:
        self.selector = selector

    def __str__(self) -> str:
        return self.name

    @property
    def state_kind(self) -> str:
        """What its state is, in words: what one kind has saved, no other goes on with."""
        return self.name

    def new_state(self) -> dict[Any, Any]:
        """An empty state: key -> partial."""
        return {}

    def prepare(self, keys: list[Any], records: list[Any], errors: ErrorHandler) -> tuple[list[Any], list[Any]]:
        """Keys and values to add for keyed records; records that fail go to `errors`."""
        return (keys, records) if self.selector is None else select_values(self.selector, keys, records, errors)

    def shipped(self, state: dict[Any, Any]) -> tuple[list[Any], list[Any]]:
        """(keys, partials) of a state, as they travel."""
        return list(state), list(state.values())

    @abstractmethod
    def add(self, state: dict[Any, Any], keys: Iterator[Any], values: Iterator[Any]) -> None:
        """Add records to the state: the parallel iterators give key and selected value of each.

        When one raises, the iterators stand behind that record and the records before it are in the state,
        so the caller can tell which it was and go on with the same iterators.
        """

    @abstractmethod
    def merge(self, state: dict[Any, Any], keys: Iterator[Any], partials: Iterator[Any]) -> None:
        """Add partials, as `add` made them in another process, to the state."""

    def partials(self, values: list[Any]) -> list[Any]:
        """Selected values of records as partials: to merge these does what adding the records does."""
        return values

    def result(self, partial: Any) -> Any:
        """What the user sees of a state value."""
        return partial


class Count(Aggregate):
    """How many records a key has had; `selector` is not used."""

    name = merging = "count"
    total = True

    def new_state(self) -> dict[Any, Any]:
        return Counter()

    def add(self, state: dict[Any, Any], keys: Iterator[Any], values: Iterator[Any]) -> None:
        assert isinstance(state, Counter)
        state.update(keys)  # counts in C

    def merge(self, state: dict[Any, Any], keys: Iterator[Any], partials: Iterator[Any]) -> None:
        get = state.get
        for key, n in zip(keys, partials, strict=True):
            state[key] = get(key, 0) + n

    def partials(self, values: list[Any]) -> list[Any]:
        return [1] * len(values)


def _of_record(value: Any, error: TypeError) -> TypeError:
    """The error of adding; of a whole record, what to say instead."""
    if isinstance(value, dict):
        return TypeError(f'{error}: whole records cannot be added; say what of them, as in sum("price")')
    return error


# Values of these types can be added to, and compared with, a value of their own type: a key's first value of another
# type is tried. Otherwise a null that came first would be the result, and each good value behind it would fail.
_PLAIN = frozenset({int, float, bool, str, bytes})


class Sum(Aggregate):
    """The sum of the selected values, which must be numbers (or support +, starting from their first value)."""

    name = merging = "sum"

    def add(self, state: dict[Any, Any], keys: Iterator[Any], values: Iterator[Any]) -> None:
        value = None
        try:
            for key, value in zip(keys, values, strict=True):
                if key in state:
                    state[key] = state[key] + value  # not +=: the sum so far may be a list that somebody holds
                else:
                    if type(value) not in _PLAIN:
                        add(value, value)
                    state[key] = value + 0 if isinstance(value, bool) else value
        except TypeError as error:
            raise _of_record(value, error) from error

    def merge(self, state: dict[Any, Any], keys: Iterator[Any], partials: Iterator[Any]) -> None:
        self.add(state, keys, partials)


class Min(Aggregate):
    """The least of the selected values."""

    name = merging = "min"

    def add(self, state: dict[Any, Any], keys: Iterator[Any], values: Iterator[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            if key not in state:
                if type(value) not in _PLAIN:
                    lt(value, value)
                state[key] = value
            elif value < state[key]:
                state[key] = value

    def merge(self, state: dict[Any, Any], keys: Iterator[Any], partials: Iterator[Any]) -> None:
        self.add(state, keys, partials)


class Max(Aggregate):
    """The greatest of the selected values."""

    name = merging = "max"

    def add(self, state: dict[Any, Any], keys: Iterator[Any], values: Iterator[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            if key not in state:
                if type(value) not in _PLAIN:
                    gt(value, value)
                state[key] = value
            elif value > state[key]:
                state[key] = value

    def merge(self, state: dict[Any, Any], keys: Iterator[Any], partials: Iterator[Any]) -> None:
        self.add(state, keys, partials)


class Mean(Aggregate):
    """The mean of the selected values; its partial is (sum, number)."""

    name = merging = "mean"
    identity_result = False

    def add(self, state: dict[Any, Any], keys: Iterator[Any], values: Iterator[Any]) -> None:
        value = None
        try:
            for key, value in zip(keys, values, strict=True):
                total, n = state.get(key, (0, 0))
                state[key] = (total + value, n + 1)
        except TypeError as error:
            raise _of_record(value, error) from error

    def merge(self, state: dict[Any, Any], keys: Iterator[Any], partials: Iterator[Any]) -> None:
        for key, (more, m) in zip(keys, partials, strict=True):
            total, n = state.get(key, (0, 0))
            state[key] = (total + more, n + m)

    def partials(self, values: list[Any]) -> list[Any]:
        return [(value, 1) for value in values]

    def result(self, partial: Any) -> Any:
        total, n = partial
        return total / n


#: The aggregates of one value a record, by name.
MERGEABLE: dict[str, Aggregate] = {aggregate.name: aggregate() for aggregate in (Count, Sum, Min, Max, Mean)}

_PARTS = "agg of "


def merging_parts(parts: Iterable[str]) -> str:
    """How tuples of such parts merge (`expressions.aggregates`), for `merge_of`."""
    return _PARTS + ",".join(parts)


def merge_of(merging: str) -> Adder:
    """What merges partials, by what `merging` of their aggregate says: snapshots name it, and whoever reads them has
    nothing else of the flow."""
    if merging.startswith(_PARTS):
        return merge_function(tuple(merging.removeprefix(_PARTS).split(",")))
    if merging not in MERGEABLE:
        raise StoreError(
            f"saved state is to be merged as {merging!r}, and this release of Penstock merges "
            f"{', '.join(map(repr, MERGEABLE))} and {_PARTS!r} of them. Run the job with the release that saved it"
        )
    return MERGEABLE[merging].merge


def add_all(
    add: Callable[[dict[Any, Any], Iterator[Any], Iterator[Any]], None],
    state: dict[Any, Any],
    keys: list[Any],
    values: list[Any],
    errors: ErrorHandler,
    records: list[Any] | None = None,
) -> None:
    """add(state, keys, values) over whole lists; records that fail go to `errors`, the others are added.

    `records`: what the values were taken from, to name what has failed; without them, or when they are not as many as
    the values, the values are named."""
    named = values if records is None or len(records) != len(values) else records
    key_iterator, value_iterator = iter(keys), iter(values)
    while True:
        try:
            add(state, key_iterator, value_iterator)
        except BaseException as error:
            failed = len(keys) - length_hint(key_iterator) - 1
            errors.handle((keys[failed], named[failed]), of_key(keys[failed], error))
        else:
            return
