"""Aggregates: partials over any partition of the records, merged in any order, give what all records give."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
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


# --- NumPy's scalars: what Python makes of the numbers that they equal ---------------------------------------------

_INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
_FLOATS = [np.float16, np.float32, np.float64, np.longdouble]


def _scalars_of(kind: Any) -> st.SearchStrategy[Any]:
    info = np.iinfo(kind)
    return st.sampled_from([int(info.min), int(info.max), 0, 1]).map(kind) | st.integers(
        int(info.min), int(info.max)
    ).map(kind)


integral = st.one_of(
    st.booleans(),
    st.booleans().map(np.bool_),
    st.integers(-(10**20), 10**20),
    *map(_scalars_of, _INTEGERS),
)
fractional = st.one_of(*[st.integers(-8000, 8000).map(lambda n, kind=kind: kind(n / 8)) for kind in [*_FLOATS, float]])


def python(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) and not isinstance(value, np.longdouble) else value


def rational(value: Any) -> Any:
    return float(value) if isinstance(value, np.longdouble) else python(value)


@pytest.mark.parametrize("aggregate", AGGREGATES, ids=lambda a: a.name)
@given(
    pairs=st.lists(st.tuples(st.sampled_from("ab"), integral), max_size=20)
    | st.lists(st.tuples(st.sampled_from("ab"), fractional), max_size=20),
    parts=st.lists(st.integers(0, 2), min_size=20, max_size=20),
)
def test_numpy_numbers_count_as_the_numbers_that_they_equal(
    aggregate: Aggregate, pairs: list[tuple[str, Any]], parts: list[int]
) -> None:
    wanted = plain(aggregate, [(key, rational(value)) for key, value in pairs])
    state = aggregate.new_state()
    for part in range(3):
        some = [pair for pair, n in zip(pairs, parts, strict=False) if n == part]
        if part == 0:  # as a log of single values
            keys = iter([key for key, _ in some])
            aggregate.merge(state, keys, iter(aggregate.partials([value for _, value in some])))
        else:
            partials = fold(aggregate, some)
            aggregate.merge(state, iter(list(partials)), iter(list(partials.values())))
    found = results(aggregate, state)
    assert found == wanted
    assert all(type(value) in (int, float, bool) for value in found.values())


@pytest.mark.parametrize("text", ["1", b"1", bytearray(b"1"), np.str_("1")])
@pytest.mark.parametrize("aggregate", [Sum(), Mean()], ids=lambda a: a.name)
def test_texts_have_no_sum(aggregate: Aggregate, text: Any) -> None:
    """A column of a CSV file that was read as text would give "123" for 6."""
    with pytest.raises(TypeError, match=r"a text cannot be added: .*make a number of it before"):
        fold(aggregate, [("a", text)])
    flow = ps.Flow("texts")
    keyed = flow.read(ps.sources.Memory([text, 2, 3])).key_by(lambda _: "a")
    summed = keyed.sum(emit="final", on_error="skip") if aggregate.name == "sum" else keyed.mean(on_error="skip")
    summed.write(ps.sinks.Null(), name="out")
    assert ps.testing.run(flow, batch_size=3)["out"] == [("a", 5 if aggregate.name == "sum" else 2.5)]


def python_key(key: Any) -> Any:
    """NumPy's own integers raise an error when they are compared with a Decimal, in a dict too."""
    return type(key)(map(python_key, key)) if isinstance(key, tuple | frozenset) else python(key)


KEYS: list[Any] = [
    *(0, 1, -1, True, False, 1.0, 0.5, 1 + 0j, None, "1", b"1", (1, "a"), (Decimal(1), "a")),
    *(Decimal(1), Decimal("-1.0"), Decimal("0.5"), Fraction(1), Fraction(1, 2), frozenset({Decimal(1)})),
    # Without longdouble: 1 equals np.longdouble(1) and Decimal(1), which do not equal each other.
    *(kind(1) for kind in [np.bool_, *_INTEGERS, *_FLOATS[:-1], np.complex64, np.complex128]),
    *(kind(0.5) for kind in _FLOATS[:-1]),
    *(np.int64(-1), np.str_("1"), np.bytes_(b"1"), (np.int64(1), np.str_("a")), frozenset({np.uint8(1)})),
    *(pd.Timestamp("2024-01-01"), pd.Timestamp("2024-01-01").to_pydatetime(), pd.Timedelta("1s")),
]
NO_KEYS: list[Any] = [
    *(float("nan"), np.float32("nan"), Decimal("nan"), Decimal("snan"), np.complex64(complex(0, float("nan")))),
    *(pd.NaT, (1, pd.NaT), np.datetime64("NaT"), np.timedelta64("NaT"), np.datetime64("2024-01-01"), pd.NA, [1]),
]


@given(
    keys=st.lists(st.sampled_from([(key, True) for key in KEYS] + [(key, False) for key in NO_KEYS]), max_size=30),
    parallelism=st.integers(1, 3),
    batch_size=st.integers(1, 30),
)
def test_equal_keys_are_one_key_and_keys_that_equal_nothing_fail_alone(
    keys: list[tuple[Any, bool]], parallelism: int, batch_size: int
) -> None:
    flow = ps.Flow("keys")
    read = flow.read(ps.sources.Memory([(key,) for key, _ in keys]))
    counted = read.key_by(0).count(emit="final", on_error="dead_letter")
    counted.write(ps.sinks.Null(), name="counts")
    counted.side_output("dead_letters").write(ps.sinks.Null(), name="failed")
    out = ps.testing.run(flow, parallelism=parallelism, batch_size=batch_size)
    good = [python_key(key) for key, good in keys if good]
    assert len(out["counts"]) == len(set(good))
    assert {python_key(key): n for key, n in out["counts"]} == Counter(good)
    assert len(out["failed"]) == len(keys) - len(good)
