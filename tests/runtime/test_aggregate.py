"""Aggregates: partials over any partition of the records, merged in any order, give what all records give."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.state.aggregate import Aggregate, Count, Max, Mean, Min, Sum

numbers = st.integers(-1000, 1000) | st.fractions() | st.booleans()
records = st.lists(st.tuples(st.sampled_from("abcd"), numbers), max_size=40)


def fold(aggregate: Aggregate, pairs: list[tuple[str, Any]]) -> dict[Any, Any]:
    state = aggregate.new_state()
    aggregate.add(state, iter([key for key, _ in pairs]), iter([value for _, value in pairs]))
    return state


def results(aggregate: Aggregate, state: dict[Any, Any]) -> dict[Any, Any]:
    return {key: aggregate.result(partial) for key, partial in state.items()}


def plain(aggregate: Aggregate, pairs: list[tuple[str, Any]]) -> dict[Any, Any]:
    """What Python's own functions make of the values of each key."""
    groups: dict[str, list[Any]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    of = {
        Count: len,
        Sum: sum,
        Min: min,
        Max: max,
        Mean: lambda values: sum(values) / len(values),
    }[type(aggregate)]
    return {key: of(values) for key, values in groups.items()}


AGGREGATES = [Count(), Sum(), Min(), Max(), Mean()]


@pytest.mark.parametrize("aggregate", AGGREGATES, ids=lambda a: a.name)
@given(pairs=records)
def test_add_is_the_plain_aggregate(aggregate: Aggregate, pairs: list[tuple[str, Any]]) -> None:
    assert results(aggregate, fold(aggregate, pairs)) == plain(aggregate, pairs)


@pytest.mark.parametrize("aggregate", AGGREGATES, ids=lambda a: a.name)
@given(pairs=records, parts=st.lists(st.integers(0, 3), min_size=40, max_size=40), data=st.data())
def test_partials_of_any_partition_merge_to_the_whole(
    aggregate: Aggregate, pairs: list[tuple[str, Any]], parts: list[int], data: st.DataObject
) -> None:
    partials = [fold(aggregate, [p for p, n in zip(pairs, parts, strict=False) if n == part]) for part in range(4)]
    state = aggregate.new_state()
    for partial in data.draw(st.permutations(partials)):
        aggregate.merge(state, iter(list(partial)), iter(list(partial.values())))
    assert results(aggregate, state) == plain(aggregate, pairs)


@pytest.mark.parametrize("aggregate", AGGREGATES, ids=lambda a: a.name)
def test_identity_result_says_the_truth(aggregate: Aggregate) -> None:
    state = fold(aggregate, [("a", 2), ("a", 3)])
    assert (results(aggregate, state) == dict(state)) == aggregate.identity_result


def test_a_sum_of_booleans_is_a_number() -> None:
    assert repr(fold(Sum(), [("a", True)])["a"]) == "1"
    assert fold(Sum(), [("a", True), ("a", True)])["a"] == 2


@pytest.mark.parametrize("aggregate", [Sum(), Mean()], ids=lambda a: a.name)
def test_sums_of_fractions_stay_exact(aggregate: Aggregate) -> None:
    state = fold(aggregate, [("a", Fraction(1, 3)), ("a", Fraction(2, 3))])
    assert aggregate.result(state["a"]) in (1, Fraction(1, 2))


@pytest.mark.parametrize("make", [lambda n: [n], lambda n: Counter({n: 1})], ids=["lists", "counters"])
def test_a_sum_never_changes_the_values_it_was_given(make: Any) -> None:
    values = [make(n) for n in range(4)]
    state = fold(Sum(), [("a", value) for value in values])
    Sum().merge(state, iter("a"), iter([make(9)]))
    assert values == [make(n) for n in range(4)]


def test_add_can_be_continued_after_a_value_that_fails() -> None:
    state: dict[Any, Any] = {}
    keys, values = iter("aaa"), iter([1, "x", 3])
    with pytest.raises(TypeError):
        Sum().add(state, keys, values)
    Sum().add(state, keys, values)
    assert state == {"a": 4}
