"""Keyed aggregates: how each one combines records before they are sent, and merges the results into a task's state.

An aggregate works in two phases. The sender adds a list of records to an empty state, which gives at most one partial
result for each key. `merge` adds these partial results to the state of the task that owns the keys. When no exchange
stands between, records are added to the state directly. The user sees what `result` makes of a value of the state.

The two phases change the order of additions. So sums of floats may differ in the last digit between runs, as in any
parallel aggregation. An aggregate must never add a record to the state twice, also when another record fails.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import date, datetime
from operator import add, length_hint, lt
from typing import Any

from penstock.runtime.errors import StoreError, shorten
from penstock.runtime.expressions.aggregates import Adder, merge_function
from penstock.runtime.records.key_groups import of_key
from penstock.runtime.records.userfunc import ErrorHandler, select_values
from penstock.runtime.scalars import python_number


class Aggregate(ABC):
    """One aggregate over the values of a key. `selector` takes the value from a record; None takes the record
    itself."""

    name: str
    merging = ""  # how partial results merge, for `merge_of`; "": only this aggregate can merge them
    identity_result = True  # whether `result` returns the value of the state unchanged
    combinable = True  # whether senders may combine records before they send them
    total = False  # whether it accepts all values, so that neither adding nor merging can fail

    def __init__(self, selector: Callable[[Any], Any] | None = None) -> None:
        self.selector = selector

    def __str__(self) -> str:
        return self.name

    @property
    def state_kind(self) -> str:
        """Describes the kind of the state in words. State of one kind is never given to an operator of another kind."""
        return self.name

    def new_state(self) -> dict[Any, Any]:
        """Returns an empty state: key -> partial result."""
        return {}

    def prepare(self, keys: list[Any], records: list[Any], errors: ErrorHandler) -> tuple[list[Any], list[Any]]:
        """Returns the keys and values to add for keyed records. Records that fail go to `errors`."""
        return (keys, records) if self.selector is None else select_values(self.selector, keys, records, errors)

    def shipped(self, state: dict[Any, Any]) -> tuple[list[Any], list[Any]]:
        """Returns the keys and the partial results of a state, in the form in which they are sent."""
        return list(state), list(state.values())

    @abstractmethod
    def add(self, state: dict[Any, Any], keys: Iterator[Any], values: Iterator[Any]) -> None:
        """Adds records to the state. The two iterators give the key and the selected value of each record.

        When a record raises an error, the iterators stand after this record, and the records before it are in the
        state. So the caller knows which record failed, and can continue with the same iterators.
        """

    @abstractmethod
    def merge(self, state: dict[Any, Any], keys: Iterator[Any], partials: Iterator[Any]) -> None:
        """Adds partial results, which `add` has made in another process, to the state."""

    def partials(self, values: list[Any]) -> list[Any]:
        """Returns the selected values of records as partial results. Merging these has the same effect as adding the
        records."""
        return values

    def result(self, partial: Any) -> Any:
        """Returns the user's view of a value of the state."""
        return partial


class Count(Aggregate):
    """The number of records of a key. `selector` is not used."""

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
    """Returns the error of adding a value. For a whole record, it says what to do instead."""
    if isinstance(value, dict):
        return TypeError(f'{error}: whole records cannot be added; say what of them, as in sum("price")')
    return error


# Values of these types can be compared with values of their own type.
_PLAIN = frozenset({int, float, bool, str, bytes, date, datetime})


def _comparable(value: Any) -> Any:
    """Returns the comparable part of a value of another type. A null that came first would become the result, and each
    good value after it would fail: so a value is compared with itself."""
    number = python_number(value)
    lt(number, number)
    return number


def _addend(value: Any) -> Any:
    """Returns the addable part of a value that is no int and no float. Texts have no sum: what is meant is a number
    that nobody has read from the text, as from a column of a CSV file."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, str | bytes | bytearray):
        raise TypeError(
            f"a text cannot be added: {shorten(value, 80)} ({type(value).__name__}); make a number of it before, as in "
            "sum(lambda record: float(record[...])), or join texts with reduce(fn)"
        )
    number = python_number(value)
    return int(number) if isinstance(number, bool) else number


class Sum(Aggregate):
    """The sum of the selected values: numbers, or what else supports +, starting from the first value. Texts have no
    sum."""

    name = merging = "sum"

    def add(self, state: dict[Any, Any], keys: Iterator[Any], values: Iterator[Any]) -> None:
        value = None
        try:
            for key, value in zip(keys, values, strict=True):
                kind = value.__class__
                addend = value if kind is int or kind is float else _addend(value)
                if key in state:
                    # Not +=, because the sum so far may be a list that somebody else refers to.
                    state[key] = state[key] + addend
                else:
                    # A null that came first would become the sum, and each good value after it would fail.
                    if kind is not int and kind is not float:
                        add(addend, addend)
                    state[key] = addend
        except TypeError as error:
            raise _of_record(value, error) from error

    def merge(self, state: dict[Any, Any], keys: Iterator[Any], partials: Iterator[Any]) -> None:
        self.add(state, keys, partials)


class Min(Aggregate):
    """The least selected value."""

    name = merging = "min"

    def add(self, state: dict[Any, Any], keys: Iterator[Any], values: Iterator[Any]) -> None:
        for key, given in zip(keys, values, strict=True):
            value = given if given.__class__ in _PLAIN else _comparable(given)
            if key not in state or value < state[key]:
                state[key] = value

    def merge(self, state: dict[Any, Any], keys: Iterator[Any], partials: Iterator[Any]) -> None:
        self.add(state, keys, partials)


class Max(Aggregate):
    """The greatest selected value."""

    name = merging = "max"

    def add(self, state: dict[Any, Any], keys: Iterator[Any], values: Iterator[Any]) -> None:
        for key, given in zip(keys, values, strict=True):
            value = given if given.__class__ in _PLAIN else _comparable(given)
            if key not in state or value > state[key]:
                state[key] = value

    def merge(self, state: dict[Any, Any], keys: Iterator[Any], partials: Iterator[Any]) -> None:
        self.add(state, keys, partials)


class Mean(Aggregate):
    """The mean of the selected values. A partial result is (sum, number)."""

    name = merging = "mean"
    identity_result = False

    def add(self, state: dict[Any, Any], keys: Iterator[Any], values: Iterator[Any]) -> None:
        value = None
        try:
            for key, value in zip(keys, values, strict=True):
                kind = value.__class__
                total, n = state.get(key, (0, 0))
                state[key] = (total + (value if kind is int or kind is float else _addend(value)), n + 1)
        except TypeError as error:
            raise _of_record(value, error) from error

    def merge(self, state: dict[Any, Any], keys: Iterator[Any], partials: Iterator[Any]) -> None:
        for key, (more, m) in zip(keys, partials, strict=True):
            total, n = state.get(key, (0, 0))
            state[key] = (total + _addend(more), n + m)

    def partials(self, values: list[Any]) -> list[Any]:
        return [(value, 1) for value in values]

    def result(self, partial: Any) -> Any:
        total, n = partial
        return total / n


#: The aggregates of one value of each record, by name.
MERGEABLE: dict[str, Aggregate] = {aggregate.name: aggregate() for aggregate in (Count, Sum, Min, Max, Mean)}

_PARTS = "agg of "


def merging_parts(parts: Iterable[str]) -> str:
    """Says how tuples of these parts merge (`expressions.aggregates`), for `merge_of`."""
    return _PARTS + ",".join(parts)


def merge_of(merging: str) -> Adder:
    """Returns the function that merges partial results, from the `merging` of their aggregate. Snapshots contain
    `merging`, so that they can be read without the flow."""
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
    """Calls add(state, keys, values) for whole lists. Records that fail go to `errors`, and all others are added.

    `records` are the records that the values were taken from, and name what has failed. When they are missing, or are
    not as many as the values, the values are named instead.
    """
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
