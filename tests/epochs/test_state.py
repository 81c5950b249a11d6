"""Keyed maps and their notes of what has changed: whatever they choose to save gives the state back."""

from __future__ import annotations

from array import array
from random import Random
from threading import Lock
from typing import Any

import pytest

from penstock.runtime.epochs.snapshot import Merged, compact, encode_snapshot
from penstock.runtime.errors import RecordError, SnapshotDamaged
from penstock.runtime.operators.base import StageContext
from penstock.runtime.operators.process import ProcessContext
from penstock.runtime.program.flow import Flow
from penstock.runtime.records.batch import KeyedBatch
from penstock.runtime.records.key_groups import key_groups
from penstock.runtime.sinks import Null
from penstock.runtime.sources import Memory
from penstock.runtime.state import keyed as module
from penstock.runtime.state.aggregate import MERGEABLE, Aggregate
from penstock.runtime.state.keyed import (
    Delta,
    KeyedDelta,
    KeyedLog,
    KeyedMap,
    KeyedValues,
    KeyedWhole,
    LoggedMap,
    SavedState,
    StageState,
)
from penstock.runtime.state.timers import Timers

GROUPS = 8


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_RECORDS", 5)
    monkeypatch.setattr(module, "_BLIND_EPOCHS", 3)


def packed(delta: Delta) -> bytes:
    return b"".join(encode_snapshot({"op": (StageState({"state": delta}), (0, 0, 0, 0))}, GROUPS))


def read(snapshots: list[bytes], groups: set[int] | None = None) -> dict[Any, Any]:
    merged = Merged(GROUPS)
    merged.add_task(snapshots, groups)
    return merged.operators.get("op", SavedState()).maps.get("state", {})


def check(rng: Random, chain: list[bytes], state: dict[Any, Any]) -> None:
    """The chain gives the state, whole or by groups, also when some of it was put together."""
    assert read(chain) == state
    chosen = set(rng.sample(range(GROUPS), rng.randint(0, GROUPS)))
    of_keys = dict(zip(state, array("H", key_groups(list(state), GROUPS)), strict=True))
    assert read(chain, chosen) == {key: value for key, value in state.items() if of_keys[key] in chosen}
    first = rng.randrange(len(chain))
    last = rng.randint(first, len(chain) - 1)
    together = b"".join(compact(chain[first : last + 1], GROUPS))
    assert read([*chain[:first], together, *chain[last + 1 :]]) == state


@pytest.mark.parametrize("seed", range(40))
def test_a_keyed_map_noted_blind_or_whole(seed: int) -> None:
    rng = Random(seed)
    kept = KeyedMap({}, tracked=True)
    chain: list[bytes] = []
    entries = 0  # in the deltas of the chain
    seen = set()
    removing = 0.0
    for epoch in range(90):
        if epoch % 10 == 0:
            removing = rng.choice((0.0, 0.2))
        for _ in range(rng.choice((0, 0, 1, 4))):
            # Now and then over all keys, so that noting is given up, and taken up again.
            changed = [rng.randrange(rng.choice((3, 40))) for _ in range(rng.choice((0, 1, 30)))]
            for key in changed:
                if rng.random() < removing:
                    kept.values.pop(key, None)
                    kept.removed()
                else:
                    kept.values[key] = kept.values.get(key, 0) + 1
            kept.note(changed)
        if chain and rng.random() < 0.02:  # back to what was saved last, in another life
            kept = KeyedMap({}, tracked=True)
            kept.restore(read(chain))
            entries = 0  # a map counts what it has saved itself
        whole = not chain or rng.random() < 0.03 or kept.wants_whole
        delta = kept.delta(whole)
        seen.add(type(delta))
        assert isinstance(delta, KeyedWhole) == whole, "the task would not know that the chain may begin here"
        if isinstance(delta, KeyedWhole):
            chain, entries = [], 0
        elif isinstance(delta, KeyedDelta):
            entries += len(delta.keys) + len(delta.gone)
        chain.append(packed(delta))
        assert entries <= 2 * max(len(kept.values), 1)
        check(rng, chain, dict(kept.values))
    assert seen == {KeyedWhole, KeyedDelta, KeyedValues}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", MERGEABLE)
def test_a_log_merges_to_the_state(name: str, seed: int) -> None:
    rng = Random(seed)
    aggregate: Aggregate = MERGEABLE[name]
    values = aggregate.new_state()
    kept = LoggedMap(values, aggregate, tracked=True)
    chain: list[bytes] = []
    seen = set()
    for _ in range(60):
        for _ in range(rng.choice((0, 1, 3))):
            count = rng.choice((1, 2, 9, 40))
            keys = [rng.choice((0, 1, "x", (2, "y"), rng.randrange(90))) for _ in range(count)]
            added = [rng.randrange(-50, 50) for _ in range(count)]
            partials = aggregate.partials(added)
            if rng.random() < 0.5:
                aggregate.add(values, iter(keys), iter(added))
                kept.log(keys, added, False)
            else:
                aggregate.merge(values, iter(keys), iter(partials))
                kept.log(keys, partials, True)
            if rng.random() < 0.03:
                kept.lose()
        if chain and rng.random() < 0.05:  # back to what was saved last, in another life
            values = aggregate.new_state()
            kept = LoggedMap(values, aggregate, tracked=True)
            kept.restore(read(chain))
        whole = not chain or rng.random() < 0.05 or kept.wants_whole
        delta = kept.delta(whole)
        assert isinstance(delta, KeyedWhole) == whole, "the task would not know that the chain may begin here"
        if whole:
            chain = []
        seen.add(type(delta))
        chain.append(packed(delta))
        assert len(chain) < 60
        check(rng, chain, dict(values))
    assert seen == {KeyedWhole, KeyedLog, KeyedValues}


def changing(entries: int) -> LoggedMap:
    """A map of counts that was saved whole, and of which most changes."""
    values = MERGEABLE["count"].new_state()
    kept = LoggedMap(values, MERGEABLE["count"], tracked=True)
    kept.values.update(dict.fromkeys(range(entries), 1))
    kept.log([], [], False)
    kept.delta(True)
    return kept


def count(kept: LoggedMap, keys: list[Any]) -> None:
    MERGEABLE["count"].add(kept.values, iter(keys), iter(keys))
    kept.log(keys, keys, False)


def test_keys_that_were_saved_are_not_saved_again() -> None:
    kept = changing(100)
    count(kept, list(range(10, 120)))
    assert not kept.wants_whole
    delta = kept.delta(False)
    assert delta == KeyedValues(100, list(range(100, 120)), kept.values)
    count(kept, list(range(119, 0, -1)))
    assert kept.delta(False) == KeyedValues(120, [], kept.values)


def test_a_map_that_has_doubled_or_was_read_back_is_saved_whole() -> None:
    kept = changing(100)
    count(kept, list(range(201)))
    assert kept.wants_whole
    kept = changing(100)
    kept.restore(dict(kept.values))
    count(kept, list(range(100)))
    assert kept.wants_whole


def blind(entries: int) -> KeyedMap:
    """A map of someone's own values that was saved whole, and of which most changes."""
    kept = KeyedMap(dict.fromkeys(range(entries), 0), tracked=True)
    kept.delta(True)
    kept.note(range(entries))
    return kept


def test_keys_of_a_map_of_ones_own_are_not_saved_again_either() -> None:
    kept = blind(100)
    kept.values["new"] = 1
    kept.note(["new"])
    assert not kept.wants_whole
    assert kept.delta(False) == KeyedValues(100, ["new"], kept.values)


def test_a_key_that_was_taken_out_and_came_back_has_another_place() -> None:
    kept = blind(100)
    del kept.values[50]
    kept.removed()
    kept.values[50] = 1
    kept.note([50])
    assert kept.wants_whole
    assert isinstance(kept.delta(True), KeyedWhole)
    kept.note(range(100))
    assert kept.delta(False) == KeyedValues(100, [], kept.values)


def test_a_timer_that_fired_voids_the_order() -> None:
    timers = Timers(tracked=True)
    for key in range(50):
        timers.set(key, 1.0)
    timers.saved.delta(True)
    assert timers.take(3, 1.0)
    timers.set(3, 2.0)
    for key in range(50):
        timers.set(key, 3.0)
    assert timers.saved.wants_whole


def test_a_state_that_was_cleared_and_set_again_voids_the_order() -> None:
    """In one batch, so that only the function's call tells of it."""

    def again(ctx: ProcessContext, key: int, clear: bool) -> None:
        if clear:
            ctx.clear()
        ctx.set(ctx.get(0) + 1)

    flow = Flow("cleared")
    flow.read(Memory([])).key_by(lambda key: key).process(again).write(Null())
    (operator,) = (each for chain in flow.plan(1).chains for each in chain.operators if each.kind == "process")
    stage = operator.stage(StageContext(operator, epochs=True))
    keys = list(range(50))
    list(stage.expand(KeyedBatch(keys, [False] * 50)))
    chain = [packed(stage.snapshot(1, True).maps["state"])]
    list(stage.expand(KeyedBatch(keys, [False] * 50)))
    assert not stage.wants_whole()
    chain.append(packed(stage.snapshot(2, False).maps["state"]))
    assert read(chain) == dict.fromkeys(keys, 2)
    list(stage.expand(KeyedBatch(keys, [key == 7 for key in keys])))
    assert stage.wants_whole()
    assert read([packed(stage.snapshot(3, True).maps["state"])]) == {key: 1 if key == 7 else 3 for key in keys}


def test_values_that_do_not_fit_the_keys_before_them_are_damage() -> None:
    def values(known: int, keys: list[Any], *values: int) -> bytes:
        return packed(KeyedValues(known, keys, dict(enumerate(values))))

    whole = packed(KeyedWhole({"a": 1, "b": 2}))
    for later in (values(3, [], 1, 2, 3), values(2, ["c"], 1, 2), values(2, [], 1, 2, 3)):
        with pytest.raises(SnapshotDamaged, match="values"):
            read([whole, later])
        with pytest.raises(SnapshotDamaged, match="values"):
            list(compact([whole, later], GROUPS))
    with pytest.raises(SnapshotDamaged, match="builds on 2 keys, where 3 were saved"):
        list(compact([values(2, ["c"], 1, 2, 3), values(2, [], 1, 2)], GROUPS))


def test_a_value_that_cannot_be_saved_beside_keys_that_were_is_shown() -> None:
    with pytest.raises(RecordError, match=r"the state of key .*lock"):
        packed(KeyedValues(1, [], {"a": Lock()}))


def test_a_quiet_map_saves_nothing_even_after_it_was_blind() -> None:
    kept = KeyedMap({i: i for i in range(100)}, tracked=True)
    kept.delta(True)
    kept.note(range(90))
    assert isinstance(kept.delta(False), KeyedValues)
    kept.note(range(90))
    whole = kept.delta(True)
    assert isinstance(whole, KeyedWhole)
    assert len(whole.entries) == 100
    assert not kept.wants_whole
    assert kept.delta(False) == KeyedDelta([], [], [])
    kept.note([7])
    assert kept.delta(False) == KeyedDelta([7], [7], [])


def test_partials_that_cannot_be_encoded_are_found_by_who_saves_everything() -> None:
    kept = LoggedMap({}, MERGEABLE["sum"], tracked=True)
    kept.delta(True)
    kept.log(["a"] * 5, [Lock()] * 5, True)
    assert kept.wants_whole


def test_untracked_maps_note_nothing() -> None:
    """A job without epochs pays nothing."""
    noted, logged = KeyedMap({}, tracked=False), LoggedMap({}, MERGEABLE["count"], tracked=False)
    noted.values.update({1: 1})
    noted.note([1])
    logged.log([1], [1], False)
    assert not logged._keys
    assert noted._fresh is None
