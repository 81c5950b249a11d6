"""What tests/records/test_pickling.py runs: a main script whose classes travel to other processes and back.

python tests/records/pickling_main.py CASE DIRECTORY
"""

from __future__ import annotations

import inspect
import logging
import os
import pickle
import subprocess
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from datetime import date
from enum import Enum, Flag, IntEnum, auto
from functools import cached_property, lru_cache, partialmethod
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, NewType, ParamSpec, TypedDict, TypeVar, is_typeddict

import msgspec
import pytest

from penstock.runtime.epochs.snapshot import Merged, encode_snapshot
from penstock.runtime.records import pickling
from penstock.runtime.records.codec import PICKLE, decode, encode
from penstock.runtime.records.key_groups import key_groups
from penstock.runtime.records.userfunc import DeadLetter
from penstock.runtime.state.keyed import KeyedWhole, StageState

# What a process of the job does: it takes up the program, then answers calls of functions.
_PEER = """
import sys
from penstock.runtime.records import pickling
from penstock.runtime.records.codec import decode, encode
stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
def take():
    return stdin.read(int.from_bytes(stdin.read(8), "little"))
pickling.join(take())
while data := take():
    try:
        function, arguments = pickling.loads(data)
        answer = True, function(*arguments)
    except Exception as error:
        answer = False, f"{type(error).__name__}: {error}"
    out = pickling.dumps(answer)
    stdout.write(len(out).to_bytes(8, "little") + out)
    stdout.flush()
"""


class Peer:
    """Another process of the job."""

    def __init__(self, program: bytes, hash_seed: str = "random") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PEER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
        self._send(program)

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(len(data).to_bytes(8, "little") + data)
        self._process.stdin.flush()

    def raw(self, call: bytes) -> bytes:
        """The answer to a pickled call as it came."""
        self._send(call)
        assert self._process.stdout is not None
        return self._process.stdout.read(int.from_bytes(self._process.stdout.read(8), "little"))

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        done, answer = pickling.loads(self.raw(pickling.dumps((function, arguments))))
        assert done, answer
        return answer


class Mode(Enum):
    ON = "on"
    OFF = "off"


@dataclass(frozen=True)
class Key:
    user: str
    mode: Mode


@dataclass
class Order:
    key: Key
    amount: float
    lines: list[Order.Line] = field(default_factory=list)

    made = 0

    class Line(NamedTuple):
        number: int

    def doubled(self) -> Order:
        Order.made += 1
        return Order(self.key, 2 * self.amount, self.lines)


class Gift(Order):
    pass


_T = TypeVar("_T")


class Tick(msgspec.Struct, frozen=True, order=True):
    symbol: str
    price: float = 1.5
    venues: tuple[str, ...] = ()

    market: ClassVar[str] = "here"

    def cents(self) -> int:
        return round(self.price * 100)


class Event(msgspec.Struct, kw_only=True, tag="event", tag_field="kind", rename="camel"):
    created_ms: int
    labels: list[str] = msgspec.field(default_factory=list)
    parent: Event | None = None

    def __post_init__(self) -> None:
        if not self.labels:  # msgspec calls this when an object is unpickled, too
            self.labels.append(f"made at {self.created_ms}")


class Sale(Event, array_like=False, omit_defaults=True):
    """One that inherits fields, and makes objects of its own class."""

    ticks: list[Tick]
    note: str = msgspec.field(default="none", name="remark")

    def __post_init__(self) -> None:
        super().__post_init__()
        if "sold" not in self.labels:
            self.labels.append("sold")

    def again(self) -> Sale:
        return Sale(created_ms=self.created_ms + 1, ticks=self.ticks, parent=self)


class Box(msgspec.Struct, Generic[_T]):
    content: _T
    next: Box[_T] | None = None


def structs_made(count: int) -> list[Any]:
    found: list[Any] = [Tick(f"s{i}", i / 4) for i in range(count)]
    found += [Tick("x"), Box(1, Box("a")), Event(created_ms=3), Sale(created_ms=5, ticks=found[:2]).again()]
    return found


def struct_says(record: Any) -> Any:
    """What an object can, in whichever process."""
    said: list[Any] = [repr(record), msgspec.json.encode(record), str(inspect.signature(type(record)))]
    for action in (hash, lambda value: value < value, lambda value: value.cents(), lambda value: value.market):
        try:
            said.append(action(record) if action is not hash else hash(record) == hash(record))
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    try:
        record.price = 7
    except AttributeError as error:
        said.append(str(error))
    return said


def order(i: int) -> Order:
    return (Gift if i % 2 else Order)(Key(f"u{i % 3}", Mode.ON if i % 3 else Mode.OFF), i, [Order.Line(i)])


def made(count: int) -> list[Order]:
    return [order(i) for i in range(count)]


def wrong(records: list[Any]) -> list[str]:
    """What is wrong with records that `made` gave somewhere."""
    found = []
    for i, record in enumerate(records):
        if type(record) is not type(order(i)) or not isinstance(record, Order):
            found.append(f"{record!r} is no Order here")
        elif record != order(i) or {order(i).key: 1}.get(record.key) != 1:
            found.append(f"{record!r} does not equal {order(i)!r}")
        elif record.key.mode is not order(i).key.mode or not isinstance(record.lines[0], Order.Line):
            found.append(f"{record!r} has parts of other classes")
    return found


def count_up(records: list[Order]) -> int:
    for record in records:
        record.doubled()
    return Order.made


def encoded(count: int) -> tuple[int, bytes]:
    return encode(made(count))


def wrong_encoded(code: int, payload: bytes) -> list[str]:
    return wrong(decode(code, payload))


# Each line is one key, however it is written.
SAME_KEYS: list[list[Any]] = [
    [1, 1.0, True],
    [0, 0.0, -0.0, False],
    [(1, "a"), (1.0, "a"), (True, "a")],
    [Mode.ON, Mode("on")],
    [Mode.OFF],
    [Key("u", Mode.ON), Key("u", Mode("on"))],
    [Key("u", Mode.OFF)],
    [(Key("u", Mode.ON), 0), (Key("u", Mode("on")), -0.0)],
    [frozenset({Mode.ON, "a", 1}), frozenset({True, Mode.ON, "a"})],
    ["on"],
]
GROUPS = 128


def groups_of_keys() -> list[list[int]]:
    """The key groups of SAME_KEYS, for a process to find."""
    return [list(memoryview(key_groups(same, GROUPS)).cast("B").cast("H")) for same in SAME_KEYS]


def saved_keys(writing: int) -> bytes:
    """The state of a task that met each key in one way of writing it."""
    state: dict[Any, int] = {}
    for number, same in enumerate(SAME_KEYS):
        state[same[writing % len(same)]] = number
    return b"".join(encode_snapshot({"count": (StageState({"state": KeyedWhole(state)}), (0, 0, 0, 0))}, GROUPS))


def restored_keys(snapshot: bytes) -> list[set[int | None]]:
    """What a task that took that state up finds under each way of writing a key, in the groups that it owns."""
    found: list[set[int | None]] = []
    for same, groups in zip(SAME_KEYS, groups_of_keys(), strict=True):
        merged = Merged(GROUPS)
        merged.add_task([snapshot], set(groups))
        state = merged.operators["count"].maps["state"]
        found.append({state.get(key) for key in same})
    return found


class Route(msgspec.Struct, frozen=True):
    start: int
    end: int
    via: tuple[Route, ...] = ()


class Leg(NamedTuple):
    start: int
    end: int


class Long(Leg):
    """Has attributes beside its fields."""


class Colour(Enum):
    RED = auto()
    GREEN = auto()


class Rank(IntEnum):
    LOW = auto()
    HIGH = auto()


class Access(Flag):
    READ = auto()
    WRITE = auto()


def shapes() -> list[Any]:
    """Objects that pickle would save without the names of their fields, and members without their names."""
    long = Long(end=2, start=1)
    long.name = "long"  # type: ignore[attr-defined]
    route = Route(start=1, end=2, via=(Route(start=3, end=4),))
    members = [Colour.RED, Colour.GREEN, Rank.HIGH, Access.READ | Access.WRITE, Access.WRITE, Access(0)]
    return [route, Leg(start=5, end=6), {"long": [long]}, *members, {Colour.GREEN: 1, (Rank.LOW, Leg(7, end=8)): 2}]


FUNCTIONS = (shapes, made, wrong, count_up, encoded, wrong_encoded, groups_of_keys, saved_keys, restored_keys)


def program() -> tuple[pickling.Program, bytes]:
    travelling = pickling.Program()
    return travelling, travelling.dumps(FUNCTIONS)


UserId = NewType("UserId", str)


@lru_cache(maxsize=3)
def squared(n: int) -> int:
    return n * n


class Outer:
    class Inner(NamedTuple):
        user: UserId


def named(n: int) -> tuple[str, int]:
    return Outer.Inner.__qualname__, squared(UserId and n)


def named_objects(directory: Path) -> None:
    """New types and functions with a cache, which pickle would only name, travel; classes keep their whole names."""
    kept = pickling.Program()
    peer = Peer(kept.dumps([named, Outer]))
    assert peer.call(named, 3) == ("Outer.Inner", 9)
    assert peer.call(squared, 4) == 16
    assert peer.call(lambda: squared.cache_parameters()["maxsize"]) == 3
    assert kept is not None


class Point:
    __slots__ = ("x",)

    def __init__(self, x: int) -> None:
        self.x = x


class Named(Point):
    """Has slots of its own, one of them with a private name."""

    __slots__ = ("__secret", "name")

    def __init__(self, x: int) -> None:
        super().__init__(x)
        self.name = f"n{x}"
        self.__secret = -x

    def secret(self) -> int:
        return self.__secret


class Again(Point):
    __slots__ = Point.__slots__  # a second slot of the same name


class Open(Named):
    """Has no slots, and so a `__dict__` beside those that it inherits."""

    def __init__(self, x: int) -> None:
        super().__init__(x)
        self.more = [x]


class Both:
    __slots__ = ("__dict__", "__weakref__", "x")

    def __init__(self, x: int) -> None:
        self.x, self.y = x, x + 1


class Text:
    __slots__ = "x"  # noqa: PLC0205

    def __init__(self, x: int) -> None:
        self.x = x


class Described:
    __slots__ = {"x": "a number", "y": "its square"}

    def __init__(self, x: int) -> None:
        self.x, self.y = x, x * x


class Packed:
    __slots__ = ("x",)

    def __init__(self, x: int) -> None:
        self.x = x

    def __getstate__(self) -> Any:
        return f"packed {self.x}"

    def __setstate__(self, state: str) -> None:
        self.x = int(state.removeprefix("packed "))


class Abstract(ABC):
    __slots__ = ()

    @abstractmethod
    def value(self) -> int: ...


class Holding(Abstract, Generic[_T]):
    __slots__ = ("content",)

    def __init__(self, content: _T) -> None:
        self.content = content

    def value(self) -> int:
        return 3


class Pair(tuple[int, int]):
    __slots__ = ()


@dataclass(slots=True)
class Slotted:
    x: int
    more: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Wide(Slotted):
    y: int = 5


@dataclass(frozen=True, slots=True)
class Frozen:
    x: int
    y: int = 5


class Row(NamedTuple):
    x: int
    y: str = "y"


def slotted_made(i: int) -> list[Any]:
    kinds = (Point, Named, Again, Open, Both, Text, Described, Packed, Holding, Slotted, Wide, Frozen, Row)
    return [kind(i) for kind in kinds] + [Pair((i, i))]


def slotted_says(record: Any) -> Any:
    """What an object has and can, in whichever process."""
    kind = type(record)
    names = {name for one in kind.__mro__ for name in vars(one) if not name.startswith("_abc")}
    names -= {"__slotnames__", "__weakref__"}  # the second may be there without use, in dataclasses of Python 3.10
    said = [
        kind.__name__,
        [(name, repr(getattr(record, name, None))) for name in ("x", "y", "name", "more", "content")],
    ]
    said += [
        kind.__basicsize__,
        kind.__dictoffset__,
        kind.__weakrefoffset__,
        getattr(record, "__dict__", None),
        sorted(names),
    ]
    said += [kind.__slots__, record.secret() if isinstance(record, Named) else None]
    try:
        record.another = 1
        del record.another
    except (AttributeError, TypeError) as error:  # a TypeError of frozen dataclasses with slots, before Python 3.14
        said.append(str(error))
    try:
        said.append(weakref.ref(record)() is record)
    except TypeError as error:
        said.append(str(error))
    return said


def slots(directory: Path) -> None:
    """Classes have the slots in all processes that they have here, and no others, and objects have what is in them."""
    kept = pickling.Program()
    peer = Peer(kept.dumps([slotted_made, slotted_says]))
    for record, other in zip(slotted_made(7), peer.call(slotted_made, 7), strict=True):
        assert type(other) is type(record)
        assert slotted_says(other) == slotted_says(record)
        assert peer.call(slotted_says, record) == slotted_says(record)
        kind, payload = encode([record, record])
        assert slotted_says(decode(kind, payload)[1]) == slotted_says(record)

    class Stray(Point):
        __slots__ = ("y",)

    assert peer.call(lambda: slotted_says(Stray(3))) == slotted_says(Stray(3))


class Planet(Enum):
    """Members get attributes from __init__."""

    EARTH = (5.0, 2.0)
    MARS = (3.0, 1.0)
    HOME = EARTH  # an alias

    def __init__(self, mass: float, radius: float) -> None:
        self.mass, self.radius = mass, radius
        self.neighbours: list[Any] = []

    def gravity(self) -> float:
        return self.mass / self.radius

    @classmethod
    def smallest(cls) -> Planet:
        return cls.MARS


Planet.EARTH.neighbours.append(Planet.MARS)
Planet.MARS.neighbours.append(Planet.EARTH)


class Parts(tuple[int, ...], Enum):
    NONE = ()
    TWO = (1, 2)


class Level(IntEnum):
    LOW = 1
    HIGH = 2

    @classmethod
    def _missing_(cls, value: object) -> Level:
        return cls.HIGH


class Lazy(Enum):
    def _generate_next_value_(name: str, *_: Any) -> Any:  # type: ignore[misc,override]  # noqa: N805
        return name.lower()

    A = auto()
    B = auto()


class Right(Flag):
    READ = 1
    WRITE = 2
    BOTH = 3

    def letters(self) -> str:
        return "".join(right.name[0] for right in (Right.READ, Right.WRITE) if right in self)  # type: ignore[index]


def enums_say() -> list[Any]:
    """What Enum classes and their members can, in whichever process."""
    said: list[Any] = [
        [sorted(planet.__dict__) for planet in Planet],
        [(planet.mass, planet.gravity(), planet.neighbours[0].name) for planet in Planet],
        [
            Planet["HOME"] is Planet.EARTH,
            Planet.HOME is Planet((5.0, 2.0)),
            Planet.smallest(),
            list(Planet.__members__),
        ],
        [(tuple(one), one.value, Parts(one.value) is one) for one in Parts],
        [Level(1), Level(77), Level.LOW < 2, Level.HIGH + 1],
        [Lazy.A.value, Lazy("b"), len(Lazy)],
        [Right.BOTH.letters(), Right.READ | Right.WRITE == Right.BOTH, Right.BOTH & ~Right.READ, Right(0)],
        [Right["BOTH"].value, repr(Right.READ), str(Right.WRITE)],
    ]
    kinds = (Planet, Parts, Level, Lazy, Right)
    return said + [sorted(vars(kind).keys() - {"__doc__", "_generate_next_value_"}) for kind in kinds]


def enums(directory: Path) -> None:
    """Members of Enum classes have their data, attributes and aliases in all processes."""
    kept = pickling.Program()
    peer = Peer(kept.dumps([enums_say]))
    for here, there in zip(enums_say(), peer.call(enums_say), strict=True):
        assert here == there
    members = [Planet.HOME, Parts.TWO, Level.LOW, Lazy.B, Right.READ | Right.WRITE, Right.READ]
    assert all(one is other for one, other in zip(members, peer.call(same, members), strict=True))


class Coordinate(bytes, Enum):
    """Members are made of other data than their values by __new__."""

    X = (1, "km")
    Y = (2, "m")

    def __new__(cls, value: int, unit: str) -> Coordinate:
        made = bytes.__new__(cls, [value])
        made._value_ = value
        made.unit = unit  # type: ignore[attr-defined]
        return made


class Day(date, Enum):
    FIRST = 2020, 1, 1


class Plugin:
    """Registers its subclasses, which have to say under which key."""

    known: ClassVar[dict[str, type[Plugin]]] = {}

    def __init_subclass__(cls, *, key: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        assert key not in Plugin.known
        Plugin.known[key] = cls


class Reading(Plugin, key="read"):
    pass


def refused(directory: Path) -> None:
    """Classes that another process would make in another way do not travel, and the error says what to do."""
    for class_, words in (
        (Coordinate, "its members are made by a __new__ of its own"),
        (Day, "its members are made by the type date"),
        (Reading, "its base Plugin defines __init_subclass__"),
    ):
        says = rf"class {class_.__name__} of the main script .* {words}.* in a module that you import"
        for dumps in (pickling.dumps, pickling.Program().dumps):
            with pytest.raises(TypeError, match=says):
                dumps([class_])
    assert Plugin.known == {"read": Reading}


class Circle:
    def __init__(self, radius: int) -> None:
        self.radius = radius

    @cached_property
    def area(self) -> int:
        """How large it is."""
        return 3 * self.radius**2

    twice = partialmethod(lambda self, factor: factor * self.radius, 2)


class Ring(Circle):
    class Noted(cached_property):  # type: ignore[type-arg]
        def __get__(self, *arguments: Any) -> Any:
            return "noted", super().__get__(*arguments)

    @Noted
    def area(self) -> int:  # type: ignore[override]
        return 1


class Movie(TypedDict, total=False):
    name: str


class Sequel(Movie):
    part: int
    earlier: list[Movie]


_log = logging.getLogger("pickling_main")
_here = (sys.stdout, sys.stderr, sys.__stderr__, sys.stdin)


def streams_say() -> list[Any]:
    _log.info("found")
    there = (sys.stdout, sys.stderr, sys.__stderr__, sys.stdin)
    return [_log is logging.getLogger("pickling_main"), [one is other for one, other in zip(_here, there, strict=True)]]


def streams(directory: Path) -> None:
    """Loggers and the standard streams are those of each process."""
    _log.addHandler(logging.StreamHandler())
    _log.addHandler(logging.FileHandler(directory / "log"))
    kept = pickling.Program()
    assert Peer(kept.dumps([streams_say])).call(streams_say) == [True, [True] * 4] == streams_say()


_P = ParamSpec("_P")


def traced(function: Callable[_P, _T]) -> Callable[_P, _T]:
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return function(*args, **kwargs)

    call.__annotations__ = {"function": Callable[_P, _T]}
    return call


@traced
def added(one: int, other: int = 2) -> int:
    return one + other


if sys.version_info >= (3, 11):
    from typing import TypeVarTuple, Unpack

    _Ts = TypeVarTuple("_Ts")

    class Entry(NamedTuple, Generic[_T]):
        left: _T
        right: int = 5

        def both(self) -> list[Any]:
            return [self.left, self.right]

    class Arguments(Generic[Unpack[_Ts]]):
        pass

    def newer_say() -> list[Any]:
        """The same of what Python 3.10 does not have."""
        entry = Entry[int](5)
        return [
            [entry, entry.both(), Entry.__parameters__ == (_T,), repr(Entry[int]), Entry._fields],
            [Arguments[int, str].__args__, str(Arguments.__parameters__)],
        ]
else:

    def newer_say() -> list[Any]:
        return []


def remade_say() -> list[Any]:
    """What objects can that pickle would refuse or only name, in whichever process."""
    circle = Circle(2)
    said: list[Any] = [
        [circle.area, circle.twice(), Circle.area.__doc__, vars(circle), Ring(3).area],
        [Sequel(name="x", part=2), Sequel.__required_keys__, Sequel.__optional_keys__, is_typeddict(Sequel)],
        [added(1), str(_P), _P.__module__, UserId.__module__],
    ]
    return said + newer_say()


def remade(directory: Path) -> None:
    """Definitions travel that pickle would refuse or only name."""
    kept = pickling.Program()
    peer = Peer(
        kept.dumps([remade_say, UserId, *[globals()[name] for name in ("Entry", "Arguments") if name in globals()]])
    )
    for here, there in zip(remade_say(), peer.call(remade_say), strict=True):
        assert here == there
    # The other process sends them on.
    sent = peer.raw(pickling.dumps((lambda: lambda: (remade_say(), UserId(3), Circle), ())))
    assert peer.call(lambda data: pickling.loads(data)[1]()[0], sent) == remade_say()


def structs(directory: Path) -> None:
    """Classes of msgspec structs have their fields, options and methods in all processes."""
    kept = pickling.Program()
    peer = Peer(kept.dumps([structs_made, struct_says, Tick, Event, Sale, Box, Box[int]]))
    for record, other in zip(structs_made(3), peer.call(structs_made, 3), strict=True):
        assert type(other) is type(record)
        assert other == record, (other, record)
        assert peer.call(struct_says, record) == struct_says(other)
        kind, payload = encode([record, record])
        assert decode(kind, payload) == [other, other]
    assert b"_begin" not in peer.raw(pickling.dumps((structs_made, (3,))))  # it has one class of each name

    sale = Sale(created_ms=5, ticks=[Tick("x")])
    assert peer.call(lambda data: msgspec.json.decode(data, type=Sale), msgspec.json.encode(sale)) == sale

    class Stray(msgspec.Struct):
        number: int
        double: float = 0.0

        def __post_init__(self) -> None:
            self.double = 2.0 * self.number

    assert peer.call(lambda: Stray(3).double) == 6.0


def agree(directory: Path) -> None:
    """Each process takes the records of each other for its own."""
    kept, data = program()
    one, other = Peer(data), Peer(data)
    records = one.call(made, 10)
    assert not wrong(records)
    assert not other.call(wrong, records)
    assert not one.call(wrong, made(10))
    code, payload = one.call(encoded, 10)
    assert code == PICKLE
    assert not wrong_encoded(code, payload)
    assert not other.call(wrong_encoded, code, payload)
    assert kept is not None


def no_code(directory: Path) -> None:
    """Records of a process of the job take no code along, and a class that comes back stays as it is."""
    kept, data = program()
    one, other = Peer(data), Peer(data)
    code, payload = one.call(encoded, 10)
    small = len(pickle.dumps(made(10), 5))
    assert len(payload) < small + 600, f"{len(payload)} bytes where plain pickle takes {small}"
    own = Order.doubled
    Order.made = 5
    assert not wrong(decode(code, payload))
    assert Order.doubled is own
    assert Order.made == 5
    for n in (1, 2, 3):
        assert other.call(count_up, other.call(made, 1)) == n
    assert kept is not None


def own_process(directory: Path) -> None:
    """What is copied in the process that defines a class has this very class, with its own methods."""
    own = Order.doubled
    again = pickling.copied(made(4))
    assert not wrong(again)
    assert Order.doubled is own
    assert own.__globals__ is globals()


def keys(directory: Path) -> None:
    """Equal keys go to one task, whichever process asks, and find their state where another process has saved it."""
    kept, data = program()
    one, other = Peer(data, "1"), Peer(data, "4242")
    groups = one.call(groups_of_keys)
    assert all(len(set(same)) == 1 for same in groups), groups
    assert other.call(groups_of_keys) == groups
    assert groups_of_keys() == groups
    right = [{number} for number in range(len(SAME_KEYS))]
    for writing in range(4):
        assert other.call(restored_keys, one.call(saved_keys, writing)) == right
        assert one.call(restored_keys, other.call(saved_keys, writing)) == right
    assert kept is not None


def save(directory: Path) -> None:
    """For another life: state of this program, saved by a process of the job."""
    kept, data = program()
    (directory / "shapes").write_bytes(Peer(data).raw(pickling.dumps((shapes, ()))))
    (directory / "state").write_bytes(Peer(data).raw(pickling.dumps((made, (10,)))))
    (directory / "program").write_bytes(data)
    assert kept is not None


def load(directory: Path) -> None:
    """State of an earlier life is of this program's classes."""
    kept, data = program()
    peer = Peer(data)
    state = (directory / "state").read_bytes()
    done, found = peer.call(pickling.loads, state)
    assert done
    assert not wrong(found)
    assert not peer.call(wrong, found)
    assert kept is not None


def resume(directory: Path) -> None:
    """A program that is taken up again runs with its own classes, and what it brings is of this script's."""
    old, functions = pickling.Program.loads((directory / "program").read_bytes())
    functions = functions[1:]
    assert functions[0] is not made
    assert type(functions[0](1)[0]) is not Order
    old.prefer_own()
    peer = Peer(old.dumps(functions))
    done, records = pickling.loads((directory / "state").read_bytes())
    assert done
    assert not wrong(records)
    done, records = pickling.loads(peer.raw(pickling.dumps((functions[0], (10,)))))
    assert done, records
    assert not wrong(records)
    # What this program writes again, as a compaction does, has the classes of the job's program for its processes.
    check = next(function for function in functions if function.__name__ == "wrong")
    with pickling.belonging_to(old):
        again = pickling.dumps((check, (records,)))
    done, problems = pickling.loads(peer.raw(again))
    assert done, problems
    assert problems == []


def gone(directory: Path) -> None:
    """State of a class that the program does not have any more."""
    travelling = pickling.Program()
    peer = Peer(travelling.dumps(len))
    call = pickling.dumps((pickling.loads, ((directory / "state").read_bytes(),)))
    done, error = pickling.loads(peer.raw(call))
    assert not done
    assert "CodecError: there is no class " in error
    assert " of module __main__ in this program" in error


def edited(directory: Path) -> None:
    """The script was changed: Order and Key have more fields, with defaults (tests/records/test_pickling.py)."""
    kept, data = program()
    peer = Peer(data)
    done, found = peer.call(pickling.loads, (directory / "state").read_bytes())
    assert done
    assert not wrong(found)
    assert not peer.call(wrong, found)
    assert [(one.amount, one.note, one.tags, one.key.zone) for one in found] == [
        (i, "none", [], "x") for i in range(10)
    ]
    assert kept is not None


def reordered(directory: Path) -> None:
    """The script was changed: Route, Leg and the Enum classes have other fields and members before theirs."""
    kept, data = program()
    peer = Peer(data)
    done, found = peer.call(pickling.loads, (directory / "shapes").read_bytes())
    assert done
    assert found == shapes(), (found, shapes())
    assert found[2]["long"][0].name == "long"
    assert [one is other for one, other in zip(found[3:9], shapes()[3:9], strict=True)] == [True] * 6
    assert peer.call(lambda there: there == shapes(), found)
    assert peer.call(shapes) == shapes()
    assert kept is not None


def without(directory: Path) -> None:
    """The script was changed: Colour has no RED."""
    data = program()[1]
    call = pickling.dumps((pickling.loads, ((directory / "shapes").read_bytes(),)))
    done, error = pickling.loads(Peer(data).raw(call))
    assert not done
    says = "CodecError: Colour (a class of module __main__) has no member 'RED', which an earlier program has saved; "
    assert error.startswith(says + "the class has the members PINK, GREEN. Members are saved by name"), error


def required(directory: Path) -> None:
    """The script was changed: Order has a field more, without a default."""
    kept, data = program()
    call = pickling.dumps((pickling.loads, ((directory / "state").read_bytes(),)))
    done, error = pickling.loads(Peer(data).raw(call))
    assert not done
    assert error.startswith("CodecError: Order (a class of module __main__) has the field 'note', "), error
    assert kept is not None


def strays(directory: Path) -> None:
    """A class that a function makes in a process of the job takes its code along, and is one class elsewhere."""
    kept, data = program()
    one, other = Peer(data), Peer(data)
    first, second = one.call(pair, 1), one.call(pair, 1)
    assert first != second  # made by two calls: two classes there, too
    assert type(first[0]) is type(first[1])
    once, again = one.call(keep, 1), one.call(keep, 2)
    assert type(once) is type(again)
    assert type(other.call(same, once)) is type(once)
    assert type(once).__name__ == "Kept"
    assert isinstance(once.order, Order)
    assert kept is not None


def pair(value: int) -> list[Any]:
    class_ = make_dataclass("Pair", ["value"])
    return [class_(value), class_(value)]


def keep(value: int) -> Any:
    import penstock

    class_ = getattr(penstock, "_kept_by_a_test", None) or make_dataclass("Kept", ["order"])
    penstock._kept_by_a_test = class_  # type: ignore[attr-defined]
    return class_(order(value))


def same(value: Any) -> Any:
    return value


def namesakes(directory: Path) -> None:
    """Classes of one name that a function makes in the main script are told apart, also by a later life."""

    def local(value: int) -> tuple[type, Callable[[], Any]]:
        @dataclass
        class Local:
            number: int = value

        def make() -> Local:
            return Local()

        return Local, make

    (first, make_first), (second, make_second) = local(1), local(2)
    travelling = pickling.Program()
    data = travelling.dumps((make_first, make_second))
    one, other = Peer(data), Peer(data)
    assert type(one.call(make_first)) is first
    assert type(one.call(make_second)) is second
    later = pickling.Program()
    again = Peer(later.dumps((make_first, make_second)))
    state = one.raw(pickling.dumps((make_second, ())))
    assert isinstance(other.call(pickling.loads, state)[1], second)
    assert isinstance(again.call(pickling.loads, state)[1], second)


def redefined(directory: Path) -> None:
    """A notebook's cell is run again: what runs from then on has the new class, what ran before the old one."""
    cell = "class Cell:\n    def __init__(self, value): self.value = value\n    version = {}\n"
    exec(cell.format(1), globals())
    make = eval("lambda value: Cell(value)", globals())
    before = pickling.Program()
    old = Peer(before.dumps(make))
    first = globals()["Cell"]
    assert type(old.call(make, 1)) is first
    exec(cell.format(2), globals())
    after = pickling.Program()
    new = Peer(after.dumps(make))
    second = globals()["Cell"]
    assert second is not first
    assert type(new.call(make, 1)) is second
    call = pickling.dumps(
        (eval, ("__import__('penstock').runtime.records.pickling._here.find(('', '__main__', 'Cell', 0)).version",))
    )
    assert [pickling.loads(peer.raw(call)) for peer in (old, new)] == [(True, 1), (True, 2)]


def importable(directory: Path) -> None:
    """Records of classes that can be imported are pickled as plainly as can be."""
    kept, data = program()
    letters = [DeadLetter("o", i, "e", None) for i in range(10)]
    assert Peer(data).call(pickling.dumps, letters) == pickle.dumps(letters, 5)
    assert kept is not None


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
