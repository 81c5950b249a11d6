"""Stable hashes, key groups and the split of a list by key."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import tracemalloc
from array import array
from collections import Counter, namedtuple
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, Flag, IntEnum
from fractions import Fraction
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.errors import FlowError, KeyTypeError
from penstock.runtime.records.key_groups import KeyGroups, canonical_key, key_groups, partition, stable_hash


class Colour(Enum):
    RED = "r"
    GREEN = "g"


class Level(IntEnum):
    LOW = 1


class Name(str, Enum):
    ANN = "ann"


class Price(Decimal, Enum):
    ONE = "1"


class Right(Flag):
    READ = 1
    WRITE = 2


Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Place:
    town: str
    number: int
    note: str = field(default="", compare=False)


@dataclass
class Loose:
    town: str


class Word(str):
    __slots__ = ()


EAST = timezone(timedelta(hours=5, minutes=30))

# Written down once: a change here would strand the state of every saved job.
GOLDEN: list[tuple[Any, int]] = [
    ("", 0x63E5E715C9CEC80E),
    ("a", 0xBB750D9464531293),
    ("ab", 0xCA2721AC1CCA5549),
    ("abcd", 0x6216D0BEC62D0C7E),
    ("penstock", 0xC2CA502FD73E611D),
    ("the quick brown fox", 0x4F55E99C819A00D6),
    ("sixteen bytes ok", 0x21334A3D40A60D00),
    ("x" * 100, 0x4710FC67F5475335),
    ("\u00e9", 0xF3C6936B0B906C3E),
    ("\u4e2d\u6587", 0x04705C9070804B78),
    ("\U0001f600", 0x8299119EBC362D6F),
    ("\ud800", 0x2C087986277646A6),
    (b"", 0x8E8A187E80C49AB1),
    (b"a", 0x43164F6F69A1D959),
    (bytes(range(64)), 0x0C9A064424A69517),
    (0, 0x0403EF87E81C060D),
    (1, 0x03419F2C6952958D),
    (-1, 0x4361593185FCE806),
    (2**63, 0x7B34E306B9D5305C),
    (2**64, 0xC7C5D55B3F136387),
    (10**30, 0x11C89B29F0994C51),
    (0.5, 0x9D7873F97A1923B1),
    (-1e300, 0x3E6E2A2B86D04A06),
    (math.inf, 0x5213004C39CC85CC),
    (None, 0xD442338FBCDBF425),
    ((), 0x60231EB36F85649B),
    (("a", 1), 0x5D99B600AE1D27CE),
    (("a", ("b", None)), 0xB5D81C25C528D081),
    (frozenset(), 0x1A1B7344C5967296),
    (frozenset({"a", "b", 3}), 0x83D600189F72E031),
    (Decimal("1.1"), 0x0404ECDF8CDFD969),
    (Fraction(1, 3), 0x7C1FA796019EDA91),
    (2 + 1j, 0x53B7F8C40D8C8AE3),
    (date(2024, 2, 29), 0x034D230BF1F09C15),
    (datetime(2024, 2, 29, 12, 30, 15, 7), 0x80DE7B472F3C562E),
    (datetime(2024, 2, 29, 12, tzinfo=timezone.utc), 0xDD619DE1FC1726B4),
    (time(23, 59), 0x1DFEF8A0C13450D0),
    (timedelta(days=-1, microseconds=1), 0x92A747EE27186CB0),
    (UUID(int=1), 0x8B9FDEA01CD850C5),
    (Colour.RED, 0x83F788ABBCA58E24),
    (Place("Rye", 3), 0x0255AC59A46B38E1),
]


@pytest.mark.parametrize(("key", "expected"), GOLDEN, ids=lambda value: type(value).__name__)
def test_hashes_never_change(key: object, expected: int) -> None:
    assert stable_hash(key) == expected


def test_other_processes_agree_whatever_their_hash_seed() -> None:
    program = (
        "import datetime, decimal, enum, uuid\n"
        "from penstock.runtime.records.key_groups import stable_hash as h\n"
        "E = enum.Enum('E', 'A B')\n"
        "print([h(k) for k in ('word', b'word', 7, 2.5, None, ('a', 1, ('b',)), frozenset('abcdefgh'),"
        " decimal.Decimal('1.5'), datetime.date(2024, 5, 6), uuid.UUID(int=9), E.A, -0.0)])"
    )
    path = os.pathsep.join(filter(None, sys.path))
    answers = set()
    for seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        run = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
        )
        answers.add(run.stdout)
    assert len(answers) == 1


EQUAL_KEYS: list[tuple[Any, ...]] = [
    (
        1,
        1.0,
        True,
        Decimal(1),
        Decimal("1.00"),
        Fraction(1),
        1 + 0j,
        np.int8(1),
        np.uint64(1),
        np.float32(1),
        np.bool_(True),
        np.longdouble(1),
        np.complex64(1),
        Level.LOW,
        Price.ONE,
    ),
    (0, 0.0, -0.0, False, Decimal("-0")),
    (0.5, Decimal("0.5"), Fraction(1, 2), np.float16(0.5), 0.5 + 0j),
    (2**70, float(2**70), Decimal(2**70)),
    (math.inf, Decimal("inf"), np.float64(math.inf)),
    ("ann", Name.ANN, Word("ann"), np.str_("ann")),
    (b"ann", np.bytes_(b"ann")),
    ((1, "a"), Point(1, "a"), (1.0, Name.ANN.value[0])),
    (frozenset({1, 2, "x"}), frozenset({"x", 2.0, True})),
    (datetime(2024, 1, 1, 12, tzinfo=timezone.utc), datetime(2024, 1, 1, 17, 30, tzinfo=EAST)),
    (datetime(2024, 1, 1, 12), datetime(2024, 1, 1, 12, fold=1)),
    (time(12, 0, tzinfo=timezone.utc), time(17, 30, tzinfo=EAST)),
    (timedelta(days=1), timedelta(hours=24)),
    (Place("Rye", 3, "a"), Place("Rye", 3.0, "b")),  # type: ignore[arg-type]
    (Right.READ | Right.WRITE, Right.WRITE | Right.READ),
]


@pytest.mark.parametrize("keys", EQUAL_KEYS, ids=lambda keys: type(keys[0]).__name__)
def test_equal_keys_hash_alike(keys: tuple[Any, ...]) -> None:
    assert all(key == keys[0] for key in keys)
    assert len({stable_hash(key) for key in keys}) == 1


def test_different_keys_differ() -> None:
    keys: list[Any] = ["", "a", "aa", "aaa", b"", b"a", b"aa", 0, 1, 97, 0.5, 2 + 1j, None]
    keys += ["\ud800", "\udfff", "\u00e9", "e\u0301", "\U0001f600"]
    keys += [(), (None,), ("a",), ("a", "b"), ("b", "a"), (("a",), "b"), ("a", ("b",))]
    keys += [frozenset(), frozenset("a"), frozenset("ab")]
    keys += [date(2024, 1, 1), datetime(2024, 1, 1), datetime(2024, 1, 1, tzinfo=timezone.utc)]
    keys += [time(0), time(0, tzinfo=timezone.utc), timedelta(0), UUID(int=0)]
    keys += [Colour.RED, Colour.GREEN, Right.READ, Place("Rye", 3), Place("Rye", 4)]
    assert len({stable_hash(key) for key in keys}) == len(keys)


@pytest.mark.parametrize(
    "key",
    [
        *(float("nan"), -math.nan, np.float64("nan"), np.float32("nan"), Decimal("nan"), Decimal("snan")),
        *(complex(1, math.nan), np.complex64(math.nan), ("a", math.nan), frozenset({math.nan}), Place("Rye", math.nan)),
    ],
    ids=repr,
)
def test_nan_is_no_key(key: Any) -> None:
    with pytest.raises(KeyTypeError, match="a key is NaN, or has NaN in it") as caught:
        key_groups([1.5, key], 128)
    assert caught.value.index == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("key", [pd.NaT, ("a", pd.NaT), Place("Rye", pd.NaT)], ids=repr)
def test_a_time_that_is_none_is_no_key(key: Any) -> None:
    with pytest.raises(KeyTypeError, match="a key is NaT, or has NaT in it") as caught:
        key_groups([1.5, key], 128)
    assert caught.value.index == 1  # type: ignore[attr-defined]


class Broken(tzinfo):
    def utcoffset(self, _: datetime | None) -> timedelta:
        raise LookupError("no such zone")


def test_a_key_whose_class_raises_an_error_is_a_bad_key() -> None:
    with pytest.raises(KeyTypeError, match=r"type datetime cannot be hashed: LookupError: .*no such zone") as caught:
        key_groups([1.5, datetime(2024, 1, 1, tzinfo=Broken())], 128)
    assert caught.value.index == 1  # type: ignore[attr-defined]


@given(st.text(alphabet=st.characters(codec=None, exclude_categories=())))
def test_text_is_hashed_by_its_characters_not_by_how_it_is_stored(text: str) -> None:
    wide = (text + "\U0001f600")[:-1]
    assert stable_hash(wide) == stable_hash(text) == stable_hash("".join(list(text)))


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ([1], "tuple(key)"),
        ({1}, "frozenset(key)"),
        ({"a": 1}, "sorted(key.items())"),
        (bytearray(b"x"), "bytes(key)"),
        (Loose("Rye"), "frozen=True"),
        (np.array([1]), "tolist"),
        (np.datetime64("2024-01-01"), "item"),
        (np.timedelta64(1, "s"), "item"),
        (object(), "key function"),
        (int, "key function"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_key_without_a_stable_hash_says_what_to_do(key: object, words: str) -> None:
    with pytest.raises(KeyTypeError, match=type(key).__qualname__) as caught:
        stable_hash(key)
    assert words in str(caught.value)
    with pytest.raises(TypeError):
        stable_hash(("nested", (key,)))


def test_a_key_nested_without_end_is_an_error_not_a_crash() -> None:
    key: Any = ()
    for _ in range(100_000):
        key = (key,)
    with pytest.raises(RecursionError):
        stable_hash(key)
    while key:
        key = key[0]


def test_a_stand_in_is_what_the_native_hash_knows() -> None:
    assert canonical_key(Decimal(7)) == 7
    assert canonical_key(UUID(int=1)) == ("uuid", UUID(int=1).bytes)


# ---- distribution ----

KEYS: dict[str, list[Any]] = {
    "sequential": list(range(100_000)),
    "strides": [i * 4096 for i in range(100_000)],
    "floats": [i / 16 for i in range(100_000)],
    "words": [f"word{i}" for i in range(100_000)],
    "padded": [f"{i:012d}" for i in range(100_000)],
    "long": ["common/prefix/" * 4 + str(i) + "/common/suffix" * 4 for i in range(100_000)],
    "wide": ["\u4e2d\u6587" + str(i) for i in range(100_000)],
    "bytes": [i.to_bytes(8, "big") for i in range(100_000)],
    "pairs": [(i % 300, i // 300) for i in range(100_000)],
    "sets": [frozenset((i, i + 1)) for i in range(100_000)],
}


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("n_groups", [128, 100])
def test_regular_keys_spread_evenly_over_groups(name: str, n_groups: int) -> None:
    keys = KEYS[name]
    counts = Counter(array("H", key_groups(keys, n_groups)))
    expected = len(keys) / n_groups
    chi_square = sum((counts[group] - expected) ** 2 / expected for group in range(n_groups))
    freedom = n_groups - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)
    assert max(counts.values()) < 1.2 * expected


# ---- key groups and tables ----


@given(st.integers(1, 300), st.data())
def test_tables_are_contiguous_even_and_leave_no_task_without_a_group(n_groups: int, data: st.DataObject) -> None:
    parallelism = data.draw(st.integers(1, n_groups))
    groups = KeyGroups(n_groups)
    table = list(array("H", groups.table(parallelism)))
    assert table == [group * parallelism // n_groups for group in range(n_groups)]
    sizes = Counter(table)
    assert sorted(sizes) == list(range(parallelism))
    assert max(sizes.values()) - min(sizes.values()) <= 1


@given(st.integers(1, 200), st.data())
def test_rescaling_moves_no_more_groups_than_it_must(n_groups: int, data: st.DataObject) -> None:
    before, after = (data.draw(st.integers(1, n_groups)) for _ in range(2))
    groups = KeyGroups(n_groups)
    old = array("H", groups.table(before))
    new = array("H", groups.rescaled(old.tobytes(), after))
    held, shares = Counter(old), Counter(new)
    assert sorted(shares) == list(range(after))
    assert max(shares.values()) - min(shares.values()) <= 1
    # Moves that cannot be spared: what lies on tasks that end, and what is above an even share.
    most_kept = sum(sorted((min(held[task], shares[task]) for task in range(after)), reverse=True))
    kept = sum(a == b for a, b in zip(old, new, strict=True))
    assert kept == most_kept
    if after >= before:
        assert n_groups - kept <= math.ceil(n_groups / after) * (after - before)
    assert groups.rescaled(new.tobytes(), after) == new.tobytes()


def test_one_task_more_moves_few_groups() -> None:
    groups = KeyGroups(128)
    table = groups.table(8)
    moved = sum(a != b for a, b in zip(array("H", table), array("H", groups.rescaled(table, 9)), strict=True))
    assert moved == 128 // 9
    # The plain tables keep neighbouring ranges, which costs about half of all groups.
    plain = sum(a != b for a, b in zip(array("H", table), array("H", groups.table(9)), strict=True))
    assert plain <= 64


def test_limits_are_named() -> None:
    with pytest.raises(FlowError, match=r"parallelism 9 .*key_groups, which is 8.*key_groups=9"):
        KeyGroups(8).table(9)
    with pytest.raises(FlowError, match="parallelism=0"):
        KeyGroups(8).table(0)
    with pytest.raises(FlowError, match="key_groups=0"):
        KeyGroups(0)
    with pytest.raises(FlowError, match="key_groups=65537"):
        KeyGroups(65_537)
    with pytest.raises(ValueError, match="4 groups, not 8"):
        KeyGroups(8).rescaled(KeyGroups(4).table(2), 2)


# ---- partition ----

SCALAR_KEYS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.dates(),
    st.decimals(allow_nan=False),
)
ANY_KEYS = st.recursive(
    SCALAR_KEYS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4
)


def slow_partition(
    keys: list[Any], columns: tuple[list[Any], ...], table: bytes, n_tasks: int
) -> list[tuple[list[Any], ...]]:
    tasks = array("H", table)
    parts: list[tuple[list[Any], ...]] = [tuple([] for _ in range(1 + len(columns))) for _ in range(n_tasks)]
    for row in zip(keys, *columns, strict=True):
        part = parts[tasks[stable_hash(row[0]) % len(tasks)]]
        for column, value in zip(part, row, strict=True):
            column.append(value)
    return parts


@given(st.lists(ANY_KEYS, max_size=60), st.integers(1, 150), st.integers(0, 3), st.data())
def test_partition_equals_the_slow_model(keys: list[Any], n_groups: int, width: int, data: st.DataObject) -> None:
    parallelism = data.draw(st.integers(1, n_groups))
    columns = tuple([object() for _ in keys] for _ in range(width))
    table = KeyGroups(n_groups).table(parallelism)
    parts = partition(keys, columns, table, parallelism)
    expected = slow_partition(keys, columns, table, parallelism)
    assert [tuple(map(len, part)) for part in parts] == [tuple(map(len, part)) for part in expected]
    for part, wanted in zip(parts, expected, strict=True):
        for column, values in zip(part, wanted, strict=True):
            assert all(a is b for a, b in zip(column, values, strict=True))
    assert list(array("H", key_groups(keys, n_groups))) == [stable_hash(key) % n_groups for key in keys]


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 20_000])
@pytest.mark.parametrize("parallelism", [1, 2, 63, 64, 65, 500])
def test_partition_at_the_edges_of_its_buffers(size: int, parallelism: int) -> None:
    keys = [f"k{i}" for i in range(size)]
    values = list(range(size))
    table = KeyGroups(500).table(parallelism)
    expected = slow_partition(keys, (values,), table, parallelism)
    assert partition(keys, (values,), table, parallelism) == expected


def test_tables_may_be_any_buffer() -> None:
    keys = list("abcdef")
    table = KeyGroups(16).table(3)
    shifted = memoryview(b"x" + table)[1:]
    expected = partition(keys, (), table, 3)
    assert partition(keys, (), array("H", table), 3) == partition(keys, (), shifted, 3) == expected


@pytest.mark.parametrize("keys", [["a", "b", ["c"], "d"], ["a", ("b",), ("c", {}), []]])
def test_a_failing_key_is_told_by_its_index(keys: list[Any]) -> None:
    with pytest.raises(KeyTypeError) as caught:
        partition(keys, (), KeyGroups(4).table(2), 2)
    assert caught.value.index == 2  # type: ignore[attr-defined]
    with pytest.raises(KeyTypeError) as caught:
        key_groups(keys, 4)
    assert caught.value.index == 2  # type: ignore[attr-defined]


def test_wrong_arguments_are_refused() -> None:
    table = KeyGroups(4).table(2)
    for arguments, error in [
        (((), (), table, 2), "keys must be a list"),
        ((["a"], [["b"]], table, 2), "columns must be a tuple"),
        ((["a"], ("b",), table, 2), "each of columns must be a list"),
        ((["a"], (), 7, 2), "bytes-like"),
        ((["a"], (), table), "takes 4 arguments, not 3"),
        ((["a"], (), table, "2"), "integer"),
    ]:
        with pytest.raises(TypeError, match=error):
            partition(*arguments)  # type: ignore[arg-type]
    for arguments, error in [
        ((["a"], ([],), table, 2), "column 0 has 0 records for 1 keys"),
        ((["a"], (), b"", 2), "does not hold"),
        ((["a"], (), b"abc", 2), "does not hold"),
        ((["a"], (), array("H", [5, 5]), 2), "task 5 of 2"),
        ((["a"], (), table, 0), "n_tasks is 0"),
        ((["a"], (), table, 65_537), "n_tasks is 65537"),
    ]:
        with pytest.raises(ValueError, match=error):
            partition(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="n_groups is 0"):
        key_groups(["a"], 0)


def test_keys_that_change_the_lists_while_they_are_hashed() -> None:
    keys: list[Any] = ["a"] * 100
    column: list[Any] = [0] * 100

    class Treacherous(tzinfo):
        def __init__(self, victim: list[Any]) -> None:
            self.victim = victim

        def utcoffset(self, _: datetime | None) -> timedelta:
            self.victim.clear()
            return timedelta(0)

    for victim in (keys, column):
        keys[:] = ["a"] * 50 + [datetime(2024, 1, 1, tzinfo=Treacherous(victim))] + ["a"] * 49
        column[:] = [0] * 100
        with pytest.raises((RuntimeError, ValueError), match=r"changed while|column 0 has 0 records"):
            partition(keys, (column,), KeyGroups(4).table(2), 2)


# ---- references ----


def test_references_are_counted_right() -> None:
    keys = [f"key {i}" for i in range(1000)]
    values = [object() for _ in keys]
    table = KeyGroups(128).table(7)
    before = [sys.getrefcount(thing) for thing in (*keys, *values)]
    parts = partition(keys, (values,), table, 7)
    assert [sys.getrefcount(thing) for thing in (*keys, *values)] == [count + 1 for count in before]
    del parts
    assert [sys.getrefcount(thing) for thing in (*keys, *values)] == before


def test_nothing_leaks() -> None:
    good: list[Any] = [f"key {i}" for i in range(600)]
    good += [("t", 1.5), frozenset({1}), "\u4e2d" * 300, Decimal(3), Colour.RED, date(2024, 1, 1)]
    bad = [*good, ("x", [object()])]
    values = [object() for _ in bad]
    table = KeyGroups(128).table(70)

    def exercise() -> None:
        partition(good, (values[: len(good)],), table, 70)
        key_groups(good, 128)
        stable_hash(tuple(good))
        for wrong in (
            lambda: partition(bad, (values,), table, 70),
            lambda: key_groups(bad, 128),
            lambda: stable_hash(frozenset([object])),
            lambda: partition(good, (values,), table, 70),
            lambda: partition(good, (), table, 3),
        ):
            with pytest.raises((TypeError, ValueError)):
                wrong()

    def kept() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    counts = [sys.getrefcount(thing) for thing in (*bad, *values, table)]
    tracemalloc.start()
    try:
        for _ in range(5):
            exercise()
        before = kept()
        for _ in range(40):
            exercise()
        grown = kept() - before
    finally:
        tracemalloc.stop()
    assert grown < 4_000
    assert [sys.getrefcount(thing) for thing in (*bad, *values, table)] == counts
