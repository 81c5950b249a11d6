"""Objects of dataclasses, structs and named tuples that have other fields than when the objects were saved, and members
of Enum classes that have others."""

from __future__ import annotations

import io
import pickle
import sys
from collections import defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import field, make_dataclass
from enum import Enum, Flag, IntEnum, IntFlag
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar
from uuid import uuid4

import msgspec
import pytest

from penstock.runtime.errors import CodecError
from penstock.runtime.records import class_evolution, enum_classes, pickling
from penstock.runtime.records.class_evolution import layout, with_varying_fields, without_fields
from penstock.runtime.records.codec import PICKLE, decode, decode_map, encode, encode_map, encode_values

T = TypeVar("T")

#: How a dataclass may be declared, by name. Saved objects of each are to become objects of each other.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "frozen": {"frozen": True},
    "slots": {"slots": True},
    "frozen slots": {"frozen": True, "slots": True},
}

#: How a class may be declared whose values are saved without names. Saved objects of each are to become objects of each
#: other, and of dataclasses.
BY_POSITION: dict[str, dict[str, Any]] = {
    "struct": {},
    "array": {"array_like": True, "frozen": True},
    "keywords": {"kw_only": True, "tag": "acc", "dict": True},
    "tuple": {},
}


class _Pickler(pickle._Pickler):  # type: ignore[name-defined,misc]
    """Names these classes as the program of a job does."""

    def __init__(self, file: Any, named: dict[str, type]) -> None:
        super().__init__(file, 5)
        self.named = named

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        for name, class_ in self.named.items():
            if obj is class_:
                self.save_reduce(pickling._find, ("then", "__main__", name, 0, layout(class_)), obj=obj)
                return
        super().save(obj, save_persistent_id)


def moved(value: Any, before: dict[str, type], now: dict[str, type]) -> Any:
    """A value as a program with the classes `now` restores it, when one with the classes `before` has saved it."""
    file = io.BytesIO()
    _Pickler(file, before).dump(value)
    names = {("then", "__main__", name, 0): class_ for name, class_ in now.items()}
    try:
        pickling._classes.update(names)
        return decode(PICKLE, file.getvalue())
    finally:
        for name in names:
            del pickling._classes[name]


def declared(name: str, fields: list[Any], kind: str) -> type:
    """A class of the main script. Fields with a default are the last ones, or the class takes them by name only."""
    if kind == "tuple":
        defaults = [each[2] for each in fields if len(each) > 2]
        return namedtuple(name, [each[0] for each in fields], defaults=defaults, module="__main__")
    if kind in BY_POSITION:
        return msgspec.defstruct(name, fields, module="__main__", **BY_POSITION[kind])
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


@pytest.mark.parametrize("then", BY_POSITION)
@pytest.mark.parametrize("now", [*BY_POSITION, *KINDS])
def test_values_without_names_stay_with_their_fields(then: str, now: str) -> None:
    """Where they are pickled as a row of values, each goes to the field that had its name."""
    before = declared("Acc", [("name", str), ("old", int), ("n", int)], then)
    after = declared("Acc", [("n", int), ("name", str), ("zone", str, "x")], now)
    saved = [before(name=f"k{i}", old=i, n=-i) for i in range(3)]
    one, *others = moved([*saved, saved[0]], {"Acc": before}, {"Acc": after})
    assert [one, *others] == [after(n=-i, name=f"k{i}", zone="x") for i in (0, 1, 2, 0)]
    assert {type(found) for found in (one, *others)} == {after}
    assert others[-1] is one
    assert not hasattr(one, "old")


@pytest.mark.parametrize("kind", BY_POSITION)
def test_fields_that_change_their_order_only(kind: str) -> None:
    """No error would tell that the values have changed places."""
    before = declared("Acc", [("low", int), ("high", int)], kind)
    after = declared("Acc", [("high", int), ("low", int)], kind)
    found = moved({1: (before(low=1, high=2), [before(low=3, high=4)])}, {"Acc": before}, {"Acc": after})
    assert found == {1: (after(low=1, high=2), [after(low=3, high=4)])}


@pytest.mark.parametrize("kind", BY_POSITION)
def test_fields_of_no_object_are_left(kind: str) -> None:
    before, after = declared("Acc", [], kind), declared("Acc", [("n", int, 3)], kind)
    assert moved([before()], {"Acc": before}, {"Acc": after}) == [after(n=3)]
    assert moved([after(n=4)], {"Acc": after}, {"Acc": before}) == [before()]


@pytest.mark.parametrize("then", BY_POSITION)
@pytest.mark.parametrize("now", [*BY_POSITION, *KINDS])
def test_a_renamed_field_without_a_default_is_an_error(then: str, now: str) -> None:
    before = declared("Acc", [("name", str), ("old", int)], then)
    after = declared("Acc", [("name", str), ("must", int)], now)
    says = r"^Acc \(a class of module \w+\) has the field 'must', .*\(they had 'old', .*Give the field a default"
    with pytest.raises(CodecError, match=says):
        moved(before(name="a", old=1), {"Acc": before}, {"Acc": after})


def test_fields_that_are_given_by_name_from_now_on() -> None:
    """The fields are the same, and in the same order."""
    for then, now in (("struct", "keywords"), ("keywords", "struct")):
        before, after = (declared("Acc", [("name", str), ("n", int)], kind) for kind in (then, now))
        assert moved(before(name="a", n=1), {"Acc": before}, {"Acc": after}) == after(name="a", n=1)


def test_inherited_fields_and_parts_of_other_classes() -> None:
    class Part(NamedTuple):
        low: int
        high: int

    class PartNow(NamedTuple):
        high: int
        low: int
        mid: int = 5

    class Tagged(Part):
        pass

    class TaggedNow(PartNow):
        pass

    class Base(msgspec.Struct, Generic[T]):
        a: T
        b: int

    class BaseNow(msgspec.Struct, Generic[T]):
        b: int
        a: T

    class Sub(Base[int]):
        part: Any
        more: list[Any] = msgspec.field(default_factory=list)

    class SubNow(BaseNow[int], kw_only=True):
        more: list[Any] = msgspec.field(default_factory=list)
        part: Any
        new: list[int] = msgspec.field(default_factory=list)

    tagged = Tagged(1, 2)
    tagged.seen = [tagged]  # type: ignore[attr-defined]
    value = [Sub(1, 2, Part(3, 4), [Base("x", 5)]), tagged]
    before = {"Part": Part, "Tagged": Tagged, "Base": Base, "Sub": Sub}
    now = {"Part": PartNow, "Tagged": TaggedNow, "Base": BaseNow, "Sub": SubNow}
    one, other = moved(value, before, now)
    assert one == SubNow(2, 1, part=PartNow(4, 3, 5), more=[BaseNow(5, "x")], new=[])
    assert [type(one), type(one.part), type(one.more[0]), type(other)] == [SubNow, PartNow, BaseNow, TaggedNow]
    assert other == (2, 1, 5)
    assert other.seen == [other]


@pytest.mark.parametrize("kind", [*KINDS, *BY_POSITION])
def test_a_class_itself_in_the_state_is_that_of_today(kind: str) -> None:
    before = declared("Acc", [("low", int), ("high", int)], kind)
    after = declared("Acc", [("high", int), ("low", int), ("more", int, 0)], kind)
    found, one, generic = moved((before, before(low=1, high=2), list[before]), {"Acc": before}, {"Acc": after})  # type: ignore[valid-type]
    assert one == after(high=2, low=1)
    assert found is after
    assert generic == list[after]  # type: ignore[valid-type]
    made = moved(defaultdict(before), {"Acc": before}, {"Acc": declared("Acc", [("low", int, 0)], kind)})
    assert made["x"].low == 0


@pytest.mark.parametrize(
    ("then", "now", "says"),
    [
        ("plain", "struct", "was a dataclass with the fields name, n when .* and is a msgspec.Struct now"),
        ("slots", "tuple", "was a dataclass .* and is a named tuple now"),
        ("struct", None, "was a msgspec.Struct .* and is another kind of class now.* Keep the class Acc as it was"),
        ("keywords", None, "was a msgspec.Struct .* and is another kind of class now"),
        ("tuple", None, "was a named tuple .* and is another kind of class now.* start the job without the savepoint"),
    ],
)
def test_objects_that_cannot_become_those_of_another_kind_of_class(then: str, now: str | None, says: str) -> None:
    before = declared("Acc", [("name", str), ("n", int)], then)
    after = type("Acc", (), {"__module__": "__main__"}) if now is None else declared("Acc", [("name", str)], now)
    with pytest.raises(CodecError, match=f"^Acc .*{says}"):
        moved([before(name="a", n=1)], {"Acc": before}, {"Acc": after})


@pytest.mark.parametrize("kind", ["frozen", "frozen slots", "tuple"])
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
    with pytest.raises(CodecError, match=r"Acc .* has the field 'must', which .* Give the field a default"):
        moved(before("a"), {"Acc": before}, {"Acc": after})


@pytest.mark.parametrize("now", ["plain", "struct"])
def test_a_default_factory_that_raises_is_named(now: str) -> None:
    made: Any = msgspec.field if now == "struct" else field
    before = declared("Acc", [("name", str)], "struct")
    after = declared("Acc", [("name", str), ("n", float, made(default_factory=lambda: 1 / 0))], now)
    says = r"^Acc .* has the field 'n', .* its default_factory has raised an error: ZeroDivisionError: division by zero"
    with pytest.raises(CodecError, match=says):
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


@pytest.mark.parametrize("now", ["slots", "frozen slots"])
@pytest.mark.parametrize("more", [[], [("n", int, 3)]])
def test_attributes_that_are_no_fields_are_dropped_where_a_class_with_slots_has_no_place(now: str, more: Any) -> None:
    before = declared("Acc", [("name", str)], "plain")
    one = before("a")
    one.seen, one.kept = True, 5  # type: ignore[attr-defined]
    made = declared("Acc", [("name", str), *more], now)
    after = type("Acc", (made,), {"__slots__": ("kept",)})
    assert moved(one, {"Acc": before}, {"Acc": made}) == made("a")
    found = moved(one, {"Acc": before}, {"Acc": after})
    assert (found.name, found.kept) == ("a", 5)
    assert not hasattr(found, "seen")


def test_objects_whose_class_has_become_frozen_only() -> None:
    """Frozen classes with slots are saved as rows of values, others with slots as dicts."""
    for then in KINDS:
        for now in KINDS:
            before, after = (declared("Acc", [("low", int), ("high", int)], kind) for kind in (then, now))
            assert moved([before(1, 2)], {"Acc": before}, {"Acc": after}) == [after(1, 2)], (then, now)


def test_classes_that_pickle_themselves_are_left_alone() -> None:
    def method(name: str) -> Callable[..., Any]:
        return eval(f"lambda self, *_: {name!r}")

    class Named(NamedTuple):
        n: int

    for name in ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__"):
        assert not layout(make_dataclass("Own", ["n"], namespace={name: method(name)}))
        assert "__reduce" not in name or not layout(type("Own", (Named,), {name: method(name)}))
    assert not layout(type("Own", (Named,), {"__getnewargs__": method("")}))
    assert not layout(type("Own", (msgspec.Struct,), {"__reduce__": method("")}))
    assert layout(type("Own", (Named,), {})) == layout(Named) == "tuple n"
    assert not layout(int)
    for kind, options in KINDS.items():
        kept = {"plain": "dict", "frozen": "dict", "frozen slots": "frozen"}.get(kind, kind)
        assert layout(make_dataclass("Own", ["n", "m"], **options)) == f"{kept} n m"


@pytest.mark.parametrize("kind", ["frozen", "tuple", "array"])
def test_keys_whose_class_lost_a_field_are_known(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_evolution, "_other", {})
    before = declared("Acc", [("name", str), ("zone", str)], kind)
    after = declared("Acc", [("name", str)], kind)
    assert without_fields(after("a")) is None
    key = moved((1, before("a", "x")), {"Acc": before}, {"Acc": after})
    holder, struct = (declared("Holder", [("key", Any)], kind) for kind in ("frozen", "array"))
    for one in (key, key[1], frozenset([key]), holder(key), struct(key)):
        assert without_fields(one) == (after, ["zone"])
    assert without_fields((1, "a", holder(2))) is None


@pytest.mark.parametrize(
    ("then", "now"),
    [(then, now) for then in ("array", "tuple") for now in ("frozen", "frozen slots", "array")]
    + [("frozen", "frozen"), ("frozen slots", "frozen")],
)
def test_keys_whose_class_got_a_field_that_differs_each_time_are_known(
    then: str, now: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(class_evolution, "_other", {})
    made: Any = msgspec.field if now == "array" else field
    before = declared("Acc", [("name", str)], then)
    for new in (("zone", str, "x"), ("zone", tuple, made(default_factory=tuple))):
        assert (
            with_varying_fields(
                moved(before("a"), {"Acc": before}, {"Acc": declared("Acc", [("name", str), new], now)})
            )
            is None
        )
    if now != "array":
        new = ("at", str, field(default_factory=lambda: str(uuid4()), compare=False))
        after = declared("Acc", [("name", str), new], now)
        assert with_varying_fields(moved(before("a"), {"Acc": before}, {"Acc": after})) is None
    after = declared("Acc", [("name", str), ("tag", str, made(default_factory=lambda: str(uuid4())))], now)
    key = moved((1, before("a")), {"Acc": before}, {"Acc": after})
    holder = declared("Holder", [("key", Any)], "frozen")
    for one in (key, key[1], frozenset([key]), holder(key)):
        assert with_varying_fields(one) == (after, ["tag"])
    assert with_varying_fields((1, "a", holder(2))) is None


@pytest.mark.parametrize("kind", [Enum, IntEnum, Flag, IntFlag])
def test_members_are_those_of_the_same_name(kind: Any) -> None:
    """Pickle would take those of the same value."""
    before = kind("Kind", {"A": 1, "B": 2, "C": 4})
    after = kind("Kind", {"B": 1, "C": 2, "NEW": 4, "A": 4})  # A has become an alias
    for member in before:
        make, (class_, *named) = enum_classes.reduced(member)
        assert class_ is before
        assert make(after, *named) is after[member.name]
        if member.name != "B":
            says = (
                f"^Kind .a class of module .* has no member '{member.name}', .*the class has the members B, X. .*alias"
            )
            with pytest.raises(CodecError, match=says):
                make(kind("Kind", {"B": 1, "X": 2}), *named)
        with pytest.raises(CodecError, match=r"^Kind .* was an Enum class with the member .*, and is none now"):
            make(type("Kind", (), {}), *named)
    if issubclass(kind, Flag):
        make, (_, *named) = enum_classes.reduced(before.A | before.B)
        assert make(after, *named) == after.A | after.B
        make, (_, *named) = enum_classes.reduced(before(0))
        assert make(after, *named) == after(0)


def test_members_that_pickle_themselves_are_left_alone() -> None:
    class Own(Enum):
        A = 1

        def __reduce_ex__(self, _: Any) -> Any:
            return getattr, (type(self), self.name)

    assert enum_classes.reduced(Own.A) is NotImplemented


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that all processes can import."""
    found = ModuleType("imported_accounts")
    monkeypatch.setitem(sys.modules, found.__name__, found)
    return found


def define(module: ModuleType, found: Any) -> Any:
    found.__module__ = module.__name__
    found.__qualname__ = found.__name__
    setattr(module, found.__name__, found)
    return found


@pytest.mark.parametrize("kind", [*KINDS, *BY_POSITION])
@pytest.mark.parametrize("way", ["records", "map", "values"])
def test_objects_of_imported_classes_have_the_fields_of_today(kind: str, way: str, module: ModuleType) -> None:
    """State says of them what it says of those of the main script; records that are sent only name them."""
    before = define(module, declared("Account", [("owner", str), ("old", int), ("n", int)], kind))
    one = before(owner="a", old=1, n=2)
    ((code, data),) = {
        "records": lambda: [encode([one, [one], before], saved=True)],
        "map": lambda: encode_map({"k": [one, [one], before]}),
        "values": lambda: encode_values({"k": [one, [one], before]}),
    }[way]()
    sent = encode([one])
    assert decode(*sent) == [one]
    assert len(sent[1]) == len(pickle.dumps([one], 5))
    after = define(module, declared("Account", [("n", int), ("owner", str), ("zone", str, "x")], kind))
    found, [same], class_ = {
        "records": lambda: decode(code, data, saved=True),
        "map": lambda: decode_map(code, data)["k"],
        "values": lambda: decode(code, data, saved=True)[0],
    }[way]()
    assert found == after(n=2, owner="a", zone="x")
    assert type(found) is after
    assert same is found
    assert class_ is after
    define(module, declared("Account", [("owner", str), ("must", int)], kind))
    with pytest.raises(CodecError, match=r"Account .* has the field 'must', .*Give the field a default"):
        decode_map(code, data) if way == "map" else decode(code, data, saved=True)
    del module.Account
    with pytest.raises(CodecError, match=r"there is no class Account in module imported_accounts"):
        decode_map(code, data) if way == "map" else decode(code, data, saved=True)


@pytest.mark.parametrize("kind", [Enum, IntEnum, Flag, IntFlag])
def test_members_of_imported_classes_are_saved_by_name(kind: Any, module: ModuleType) -> None:
    before = define(module, kind("Colour", {"RED": 1, "GREEN": 2}))
    data = encode([before.RED, {before.GREEN: before.RED}], saved=True)
    after = define(module, kind("Colour", {"PINK": 1, "RED": 2, "GREEN": 4}))
    assert decode(*data, saved=True) == [after.RED, {after.GREEN: after.RED}]
    define(module, kind("Colour", {"PINK": 1}))
    with pytest.raises(CodecError, match=r"Colour .* has no member 'RED', .*the class has the members PINK"):
        decode(*data, saved=True)
