"""Objects of dataclasses that have other fields than when the objects were saved."""

from __future__ import annotations

import io
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from typing import Any, Generic, TypeVar

import pytest

from penstock.runtime.errors import CodecError
from penstock.runtime.records import class_evolution
from penstock.runtime.records.class_evolution import layout, stand_in, without_fields

T = TypeVar("T")

#: How a class may be declared, by name. Saved objects of each are to become objects of each other.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "frozen": {"frozen": True},
    "slots": {"slots": True},
    "frozen slots": {"frozen": True, "slots": True},
}

_known: dict[str, type] = {}


def _class(name: str) -> type:
    """What pickles of this test call for a class."""
    return _known[name]


class _Pickler(pickle._Pickler):  # type: ignore[name-defined,misc]
    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        for name, class_ in _known.items():
            if obj is class_:
                self.save_reduce(_class, (name,), obj=obj)
                return
        super().save(obj, save_persistent_id)


def moved(value: Any, before: dict[str, type], now: dict[str, type]) -> Any:
    """A value as a program with the classes `now` restores it, when one with the classes `before` has saved it."""
    _known.clear()
    _known.update(before)
    file = io.BytesIO()
    _Pickler(file, 5).dump(value)
    _known.clear()
    for name, class_ in now.items():
        saved = layout(before[name])
        _known[name] = class_ if saved == layout(class_) else stand_in(class_, saved)
    return pickle.loads(file.getvalue())


def declared(name: str, fields: list[Any], kind: str) -> type:
    return make_dataclass(name, fields, **KINDS[kind])


@pytest.mark.parametrize("then", KINDS)
@pytest.mark.parametrize("now", KINDS)
def test_objects_have_the_fields_of_today(then: str, now: str) -> None:
    """New ones with their defaults, wherever they stand; those that stayed with their values; no others."""
    before = declared("Acc", [("name", str), ("old", int), ("n", int)], then)
    tags = ("tags", list, field(default_factory=list))
    after = declared("Acc", [("n", int), ("zone", str, "x"), ("name", str, ""), tags], now)
    saved = [before(f"k{i}", i, -i) for i in range(3)]
    one, *others = moved([*saved, saved[0]], {"Acc": before}, {"Acc": after})
    assert [one, *others] == [after(-i, "x", f"k{i}", []) for i in (0, 1, 2, 0)]
    assert {type(found) for found in (one, *others)} == {after}
    assert others[-1] is one
    assert one.tags is not others[0].tags
    assert not hasattr(one, "old")
    assert repr(one) == "Acc(n=0, zone='x', name='k0', tags=[])"


@pytest.mark.parametrize("kind", ["frozen", "frozen slots"])
def test_keys_are_whole_before_they_are_hashed(kind: str) -> None:
    before = declared("Acc", [("name", str)], kind)
    after = declared("Acc", [("name", str), ("zone", str, "x")], kind)
    found = moved({(before("a"), 1): before("b"), before("c"): [before("d")]}, {"Acc": before}, {"Acc": after})
    assert found == {(after("a"), 1): after("b"), after("c"): [after("d")]}
    assert found[after("a", "x"), 1] == after("b")


@pytest.mark.parametrize("then", KINDS)
@pytest.mark.parametrize("now", KINDS)
def test_a_new_field_without_a_default_is_an_error(then: str, now: str) -> None:
    before = declared("Acc", [("name", str)], then)
    after = declared("Acc", [("name", str), ("must", int)], now)
    with pytest.raises(CodecError, match=r"Acc has the field 'must', which .* Give the field a default"):
        moved(before("a"), {"Acc": before}, {"Acc": after})


def test_objects_without_any_field() -> None:
    before = declared("Acc", [], "plain")
    after = declared("Acc", [("n", int, 3)], "plain")
    found = moved([before()], {"Acc": before}, {"Acc": after})
    assert found == [after(3)]
    assert type(found[0]) is after


def test_attributes_that_are_no_fields_stay() -> None:
    before = declared("Acc", [("name", str)], "plain")
    one = before("a")
    one.seen = True  # type: ignore[attr-defined]
    after = declared("Acc", [("name", str), ("n", int, 3)], "plain")
    assert vars(moved(one, {"Acc": before}, {"Acc": after})) == {"name": "a", "n": 3, "seen": True}


def test_what_a_program_does_with_its_classes_is_not_done_with_stand_ins() -> None:
    made: list[type] = []

    class Base(ABC, Generic[T]):
        def __init_subclass__(cls, /, tag: str) -> None:
            made.append(cls)

        @abstractmethod
        def total(self) -> int: ...

    @dataclass
    class Before:
        n: int

    @dataclass
    class After(Base[int], tag="after"):
        n: int
        more: int = 5

        def total(self) -> int:
            return self.n + self.more

    found, class_ = moved((Before(1), Before), {"Acc": Before}, {"Acc": After})
    assert found.total() == 6
    assert type(found) is After
    assert made == [After]
    # The class itself, where an object of the state holds it.
    assert class_ == After
    assert type(class_(2)) is After


def test_classes_that_pickle_themselves_are_left_alone() -> None:
    def method(name: str) -> Callable[..., Any]:
        return eval(f"lambda self, *_: {name!r}")

    for name in ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__"):
        assert not layout(make_dataclass("Own", ["n"], namespace={name: method(name)}))
    assert not layout(int)
    for kind, options in KINDS.items():
        assert (
            layout(make_dataclass("Own", ["n", "m"], **options))
            == kind.split(" ")[-1].replace("plain", "dict").replace("frozen", "dict") + " n m"
        )


def test_keys_whose_class_lost_a_field_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_evolution, "_lost", {})
    before = declared("Acc", [("name", str), ("zone", str)], "frozen")
    after = declared("Acc", [("name", str)], "frozen")
    assert without_fields(after("a")) is None
    key = moved((1, before("a", "x")), {"Acc": before}, {"Acc": after})
    holder = declared("Holder", [("key", Any)], "frozen")
    for one in (key, key[1], frozenset([key]), holder(key)):
        assert without_fields(one) == (after, ["zone"])
    assert without_fields((1, "a", holder(2))) is None
