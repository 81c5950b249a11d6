"""Named states against plain dicts: whatever is done to them, they are the same after each snapshot and restore."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.epochs.snapshot import Merged, encode_snapshot
from penstock.runtime.errors import PenstockError
from penstock.runtime.state.keyed import StageState
from penstock.runtime.state.named import NamedStates

GROUPS = 4


class Place:
    """Named states whose present key and time the test sets."""

    def __init__(self) -> None:
        self.key: Any = None
        self.now = 1000.0
        self.blobs: list[bytes] = []
        self.states = self._made()

    def _made(self) -> NamedStates:
        return NamedStates("op", True, lambda: self.key, lambda: self.now)

    def save(self, whole: bool = False) -> None:
        state = StageState(dict(self.states.deltas(whole)))
        data = b"".join(encode_snapshot({"op": (state, (0, 0, 0, 0))}, GROUPS))
        self.blobs = [data] if whole or not self.blobs else [*self.blobs, data]

    def go_back(self, tasks: int = 1) -> None:
        """Continues from what was saved, through `tasks` tasks that each had some of the key groups."""
        maps: dict[str, dict[Any, Any]] = {}
        for task in range(tasks):
            merged = Merged(GROUPS)
            groups = None if tasks == 1 else {group for group in range(GROUPS) if group % tasks == task}
            merged.add_task(self.blobs, groups)
            for title, entries in merged.operators["op"].maps.items():
                assert not maps.get(title, {}).keys() & entries.keys()
                maps.setdefault(title, {}).update(entries)
        self.states = self._made()
        self.states.restore(maps)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from("ab"), st.integers(0, 9)),
        st.tuples(st.just("put"), st.sampled_from("ab"), st.tuples(st.integers(0, 3), st.integers(0, 9))),
        st.tuples(st.just("drop"), st.sampled_from("ab"), st.integers(0, 3)),
        st.tuples(st.just("value"), st.sampled_from("ab"), st.integers(0, 9)),
        st.tuples(st.just("grow"), st.sampled_from("ab"), st.integers(0, 9)),
        st.tuples(st.just("replace"), st.sampled_from("ab"), st.lists(st.integers(0, 9), max_size=3)),
        st.tuples(st.just("clear"), st.sampled_from("ab"), st.sampled_from(("list", "map", "value", "box"))),
        st.tuples(st.just("save"), st.just(""), st.booleans()),
        st.tuples(st.just("back"), st.just(""), st.sampled_from((1, 2, 3))),
    ),
    max_size=40,
)


@given(actions)
def test_named_states_are_what_was_saved(steps: list[tuple[str, str, Any]]) -> None:
    place = Place()
    place.save(whole=True)
    model: dict[str, dict[str, Any]] = {key: {"list": [], "map": {}, "value": None, "box": None} for key in "ab"}
    saved = repr(model)
    for what, key, argument in steps:
        place.key = key
        states = place.states
        if what == "append":
            states.get("list", "l", None).append(argument)
            model[key]["list"].append(argument)
        elif what == "replace":
            states.get("list", "l", None).set(argument)
            model[key]["list"] = list(argument)
        elif what == "put":
            states.get("map", "m", None)[argument[0]] = argument[1]
            model[key]["map"][argument[0]] = argument[1]
        elif what == "drop":
            if argument in model[key]["map"]:
                del model[key]["map"][argument]
                del states.get("map", "m", None)[argument]
            else:
                with pytest.raises(KeyError):
                    del states.get("map", "m", None)[argument]
        elif what == "value":
            states.get("value", "v", None).set(argument)
            model[key]["value"] = argument
        elif what == "grow":  # a list that is read and changed in place
            box = states.get("value", "box", None)
            if box.get() is None:
                box.set([])
                model[key]["box"] = []
            box.get().append(argument)
            model[key]["box"].append(argument)
        elif what == "clear":
            name = {"list": "l", "map": "m", "value": "v", "box": "box"}[argument]
            states.get("value" if argument == "box" else argument, name, None).clear()
            model[key][argument] = {"list": [], "map": {}}.get(argument)
        elif what == "save":
            place.save(argument)
            saved = repr(model)
        else:
            place.go_back(argument)
            model = eval(saved)
            place.save(whole=True)
    for key in "ab":
        place.key = key
        assert place.states.get("list", "l", None).get() == model[key]["list"]
        assert dict(place.states.get("map", "m", None)) == model[key]["map"]
        assert place.states.get("value", "v", None).get() == model[key]["value"]
        assert place.states.get("value", "box", None).get() == model[key]["box"]


def test_entries_live_as_long_as_they_may_also_after_a_restore() -> None:
    place = Place()
    place.key = "a"
    last = place.states.get("list", "last", 10)
    seen = place.states.get("value", "seen", 10)
    seen.set(1)
    for i in range(3):
        last.append(i)
        place.now += 4
    place.save(whole=True)
    assert (last.get(), seen.get()) == ([1, 2], None)
    place.go_back()
    assert place.states.get("list", "last", 10).get() == [1, 2]
    place.now += 3
    assert place.states.get("list", "last", 10).get() == [2]
    place.states.get("list", "last", 10).append(7)
    place.now += 5
    assert place.states.get("list", "last", 10).get() == [7]
    place.now += 60
    place.save()
    place.go_back()
    assert len(place.states.get("list", "last", 10)) == 0


def test_state_that_nobody_asks_for_is_saved_again() -> None:
    place = Place()
    place.key = "a"
    place.states.get("map", "m", 100)["x"] = 1
    place.save(whole=True)
    place.go_back()
    place.save(whole=True)
    place.go_back()
    assert dict(place.states.get("map", "m", None)) == {"x": 1}
    place.now += 101
    assert dict(place.states.get("map", "m", None)) == {}


def test_a_name_is_of_one_kind() -> None:
    place = Place()
    place.key = "a"
    place.states.get("value", "x", None).set(1)
    with pytest.raises(PenstockError, match=r"ctx.list_state\('x'\) was a value before; .* another name"):
        place.states.get("list", "x", None)
    place.save(whole=True)
    place.go_back()
    with pytest.raises(PenstockError, match="the saved state of this name is a value"):
        place.states.get("map", "x", None)


def test_a_state_says_where_methods_of_other_states_are_and_has_one_time_to_live() -> None:
    place = Place()
    place.key = "a"
    value = place.states.get("value", "last", 5)
    assert place.states.get("value", "last", 5) is value
    with pytest.raises(PenstockError, match=r"had ttl_s=5 before, and has ttl_s=6 now"):
        place.states.get("value", "last", 6)
    with pytest.raises(AttributeError, match=r"a list state has it: ctx\.list_state\(name\)\.append"):
        value.append(1)
    with pytest.raises(AttributeError, match=r"has no method 'items': a map state has it"):
        place.states.get("list", "all", None).items()
    with pytest.raises(AttributeError, match=r"did you mean 'clear'"):
        value.claer()


@pytest.mark.parametrize(("clock_s", "ttl_s"), [(0.0, 5.0), (-3600.0, 100.0)], ids=["shorter", "of a clock behind"])
def test_entries_of_a_savepoint_live_no_longer_than_new_ones(clock_s: float, ttl_s: float) -> None:
    place = Place()
    for place.key in ("a", "b"):
        place.states.get("map", "m", 100.0)["old"] = 1
        place.now += 1.0
    place.save(whole=True)
    place.go_back()
    place.now += clock_s
    state = place.states.get("map", "m", ttl_s)
    for place.key in ("a", "b"):
        assert dict(state) == {"old": 1}
        state["new"] = 2
    place.now += ttl_s + 0.1
    for place.key in ("a", "b"):
        assert dict(state) == {}
