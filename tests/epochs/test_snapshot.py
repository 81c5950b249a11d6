"""Snapshots as bytes: deltas upon deltas give the state back, also when they are put together or taken by key group."""

from __future__ import annotations

import random
import sys
from array import array
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.epochs.snapshot import Merged, compact, encode_snapshot, worth_compacting
from penstock.runtime.errors import CodecError, FlowError, PenstockError, RecordError, SnapshotDamaged, StoreError
from penstock.runtime.records import codec
from penstock.runtime.records.key_groups import key_groups
from penstock.runtime.state.aggregate import MERGEABLE
from penstock.runtime.state.keyed import Delta, KeyedDelta, KeyedMap, KeyedValues, KeyedWhole, LoggedMap, StageState

GROUPS = 8
keys = st.one_of(st.integers(0, 20), st.text(max_size=2), st.tuples(st.integers(0, 3), st.booleans()))
values = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=3))
#: Between two snapshots: keys that are set, and keys that are removed.
changes = st.lists(
    st.tuples(st.dictionaries(keys, values, max_size=6), st.lists(keys, max_size=4)), min_size=1, max_size=12
)


def packed(parts: list[Any]) -> bytes:
    return b"".join(parts)


def history(steps: list[tuple[dict[Any, Any], list[Any]]], whole_at: set[int]) -> tuple[list[bytes], dict[Any, Any]]:
    """The snapshots of a map that is changed step by step, and what it is in the end."""
    kept = KeyedMap({}, tracked=True)
    snapshots = []
    for i, (new, gone) in enumerate(steps):
        kept.values.update(new)
        kept.note(list(new))
        for key in gone:
            kept.values.pop(key, None)
        kept.note(gone)
        state = StageState({"state": kept.delta(i == 0 or i in whole_at)}, own=("step", i))
        snapshots.append(packed(encode_snapshot({"op": (state, (i, 2 * i, 0, 3 * i))}, GROUPS)))
    return snapshots, kept.values


def read(snapshots: list[bytes], groups: set[int] | None = None) -> Merged:
    merged = Merged(GROUPS)
    merged.add_task(snapshots, groups)
    return merged


@given(changes, st.sets(st.integers(1, 11)))
def test_deltas_give_the_state_back(steps: list[Any], whole_at: set[int]) -> None:
    snapshots, state = history(steps, whole_at)
    op = read(snapshots).operators["op"]
    assert op.maps["state"] == state
    assert op.own == [("step", len(steps) - 1)]
    assert op.counters == (len(steps) - 1, 2 * (len(steps) - 1), 0, 3 * (len(steps) - 1))


@given(changes, st.sets(st.integers(1, 11)), st.data())
def test_putting_any_run_of_snapshots_together_changes_nothing(steps: list[Any], whole_at: set[int], data: Any) -> None:
    snapshots, state = history(steps, whole_at)
    first = data.draw(st.integers(0, len(snapshots) - 1))
    last = data.draw(st.integers(first, len(snapshots) - 1))
    together = packed(compact(snapshots[first : last + 1], GROUPS))
    op = read([*snapshots[:first], together, *snapshots[last + 1 :]]).operators["op"]
    assert op.maps["state"] == state
    assert op.own == [("step", len(steps) - 1)]


@given(changes, st.integers(1, GROUPS))
def test_tasks_that_share_the_groups_share_the_state(steps: list[Any], tasks: int) -> None:
    snapshots, state = history(steps, set())
    shares = [
        read(snapshots, {g for g in range(GROUPS) if g % tasks == t}).operators["op"].maps["state"]
        for t in range(tasks)
    ]
    assert sum(map(len, shares)) == len(state)
    for task, share in enumerate(shares):
        assert all(group % tasks == task for group in array("H", key_groups(list(share), GROUPS)))
        assert all(state[key] == value for key, value in share.items())


def test_state_of_several_tasks_comes_together() -> None:
    one, first = history([({"a": 1, "b": 2}, [])], set())
    other, second = history([({"c": 3}, []), ({"d": 4}, ["c"])], set())
    merged = Merged(GROUPS)
    merged.add_task(one, None)
    merged.add_task(other, None)
    assert merged.operators["op"].maps["state"] == {**first, **second}
    assert merged.operators["op"].own == [("step", 0), ("step", 1)]


def test_other_key_groups_are_refused_with_the_remedy() -> None:
    snapshots, _ = history([({"a": 1}, [])], set())
    with pytest.raises(StoreError, match=r"give Flow\(key_groups=8\)"):
        Merged(16).add_task(snapshots, None)


def test_what_cannot_be_pickled_says_so() -> None:
    lock = __import__("threading").Lock()
    with pytest.raises(PenstockError, match="operator 'op': its state cannot be saved"):
        encode_snapshot({"op": (StageState(own=lock), (0, 0, 0, 0))}, GROUPS)


class Nameless:
    """A key without a hash that is the same in every process."""


@pytest.mark.parametrize("whole", [True, False])
def test_keys_that_no_other_plan_could_share_out_are_refused_at_once(whole: bool) -> None:
    """Where a key_by is fused nobody has asked for their key group before."""
    nameless = Nameless()
    delta = KeyedWhole({1: 1, nameless: 2}) if whole else KeyedDelta([1, nameless], [1, 2], [])
    with pytest.raises(RecordError, match=r"operator 'op': a key of its state cannot be saved .* Nameless"):
        encode_snapshot({"op": (StageState({"state": delta}), (0, 0, 0, 0))}, GROUPS)


@pytest.mark.parametrize("cut", [0, 3, 4, 20, -1])
def test_a_shortened_snapshot_is_damaged(cut: int) -> None:
    (snapshot,), _ = history([({"a": 1, "b": "x" * 100}, [])], set())
    with pytest.raises((SnapshotDamaged, PenstockError)):
        read([snapshot[:cut]])


def test_each_byte_is_compacted_only_a_few_times() -> None:
    """However many snapshots come, a task has few, and the work stays near that of writing them."""
    rng = random.Random(5)
    for base in (0, 1_000_000):
        sizes, written, given = [base], 0, base
        for _ in range(5000):
            size = rng.choice((100, 5_000, 20_000))
            given += size
            sizes.append(size)
            first = worth_compacting(sizes)
            if first is not None:
                whole = sum(sizes[first:])
                written += whole
                sizes[first:] = [whole]
            assert len(sizes) < 40
        assert written < 12 * given


# --- keys whose class was edited ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Zoned:
    """A key of a module that was edited since: its zone does not count any more once it was saved."""

    name: str
    zone: str = ""

    def __reduce__(self) -> Any:
        return Zoned, (self.name,)


def _restored(*deltas: Delta) -> dict[Any, Any]:
    """What a task continues with that has saved these one after the other."""
    merged = Merged(GROUPS)
    states = [{"count": (StageState({"state": delta}), (0, 0, 0, 0))} for delta in deltas]
    merged.add_task((b"".join(encode_snapshot(state, GROUPS)) for state in states), None)
    return merged.operators["count"].maps["state"]


def _edited(how: str, second: str) -> list[Delta]:
    """Saved by a real map, with a key of another name (`second`) or of the same."""
    first: dict[Any, Any] = {Zoned("a", "x"): 1, Zoned("b"): 2}
    later = {Zoned(second, "y"): 3}
    if how == "log":
        logged = LoggedMap(dict(first), MERGEABLE["sum"], True)
        whole = KeyedWhole(dict(first))
        logged.delta(True)
        logged.values.update(later)
        logged.log(list(later), list(later.values()), True)
        return [whole, logged.delta(False)]
    kept = KeyedMap(dict(first), True)
    if how == "whole":
        kept.values.update(later)
        return [kept.delta(True)]
    whole = KeyedWhole(dict(first))
    kept.delta(True)
    kept.values.update(later)
    if how == "values":
        return [whole, KeyedValues(2, list(later), kept.values)]
    kept.note(list(later))
    return [whole, kept.delta(False)]


@pytest.mark.parametrize("frames", [False, True])
@pytest.mark.parametrize("how", ["whole", "delta", "values", "log"])
def test_keys_of_one_task_that_have_become_equal_are_refused(
    how: str, frames: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two states one would be lost in silence."""
    if frames:
        monkeypatch.setattr(codec, "_FIRST_RECORDS", 1)
    assert _restored(*_edited(how, "c")) == {Zoned("a"): 1, Zoned("b"): 2, Zoned("c"): 3}
    with pytest.raises(FlowError, match=r"operator 'count': several keys that were saved are now equal, to .*Zoned\("):
        _restored(*_edited(how, "a"))


def test_keys_that_a_compaction_has_read_are_counted_too() -> None:
    whole, delta = _edited("delta", "a")
    states = [
        {"count": (StageState({"state": one}), (0, 0, 0, 0))} for one in (whole, delta, KeyedDelta([], [], [], 3))
    ]
    parts = [b"".join(encode_snapshot(state, GROUPS)) for state in states]
    merged = Merged(GROUPS)
    with pytest.raises(FlowError, match="now equal"):
        merged.add_task([parts[0], b"".join(compact(parts[1:], GROUPS))], None)


class _Narrow:
    __slots__ = ("n", "old")

    def __init__(self) -> None:
        self.n, self.old = 1, 2


@pytest.mark.parametrize("where", ["own", "whole", "changes", "values"])
def test_saved_objects_that_cannot_be_read_are_named_with_their_operator(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with their class, so that somebody can mend it."""
    one = _Narrow()
    maps: dict[str, Any] = {
        "own": {},
        "whole": {"nested:value:last": KeyedWhole({(1, 2): one})},
        "changes": {"nested:value:last": KeyedDelta([(1, 2)], [one], [])},
        "values": {"nested:value:last": KeyedValues(0, [(1, 2)], {(1, 2): one})},
    }
    state = StageState(maps[where], own=one if where == "own" else None)
    snapshot = packed(encode_snapshot({"remember": (state, (0, 0, 0, 0))}, GROUPS))
    now = type("_Narrow", (), {"__slots__": ("n",), "__module__": __name__})
    monkeypatch.setattr(sys.modules[__name__], "_Narrow", now)
    within = "" if where == "own" else ", in 'value:last'"
    says = f"operator 'remember': its saved state{within} cannot be read: .*AttributeError: .*_Narrow.*'old'"
    with pytest.raises(CodecError, match=f"{says}.*__setstate__"):
        read([snapshot])
