"""How an Enum class travels to another process.

cloudpickle makes the class with the values of its members before the class has its methods, and leaves aliases out. So
`making` names all members, and `filling` gives each one the attributes that an `__init__` of the user's has set. A
class whose members are not made from their values (by a `__new__` of its own, or of a type like date) is refused: its
members would have wrong data.

Enum pickles members by value. In a program that was changed since, the value may be that of another member: one more
line before it is enough for `auto()`. So members of the program's classes are pickled by name (`reduced`), and
combinations of flags by the names of the flags. A member that is gone is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, EnumMeta, Flag
from types import FunctionType, new_class
from typing import Any

from penstock.runtime.errors import CodecError
from penstock.runtime.records.class_evolution import called_class

# Members of these types are made from their values.
_MADE_FROM_VALUES = (object, int, float, str, bytes, tuple)
_MAKING = (
    "__new__",
    "__new_member__",
    "_new_member_",
    "_use_args_",
)  # what Enum has put into a class for making members
_OF_ENUM = ("_value_", "_name_", "_sort_order_", "__objclass__", "_inverted_")  # attributes that Enum itself sets


def is_enum(class_: type) -> bool:
    """Whether a class is an Enum class."""
    return isinstance(class_, EnumMeta)


def making(class_: Any) -> tuple[Callable[..., type], tuple[Any, ...]]:
    """Returns a function, and its arguments, that make an Enum class with these members and without methods. Raises
    TypeError when its members are not made from their values."""
    made_by = class_._member_type_
    own = next((base for base in class_.__mro__ if isinstance(vars(base).get("__new_member__"), FunctionType)), None)
    if own is not None or made_by not in _MADE_FROM_VALUES:
        raise TypeError(
            f"cannot send the Enum class {class_.__qualname__} of the main script to other processes, because its "
            f"members are made by {'a __new__ of its own' if own is not None else f'the type {made_by.__name__}'} and "
            "not of their values. Define the class in a module that you import, or give it plain values"
        )
    members = {name: member._value_ for name, member in class_.__members__.items()}
    boundary = getattr(class_, "_boundary_", None)  # of flags, from Python 3.11 on
    options = {} if boundary is getattr(class_.__bases__[-1], "_boundary_", None) else {"boundary": boundary}
    return _make, (type(class_), class_.__name__, class_.__module__, class_.__bases__, members, options)


def filling(class_: Any, fill: Callable[..., Any], state: tuple[dict[str, Any], Any]) -> tuple[Callable[..., Any], Any]:
    """Returns a function that fills the class, and its arguments. `fill` and `state` are cloudpickle's."""
    filled, other = state
    filled = {name: value for name, value in filled.items() if name not in class_.__members__ and name not in _MAKING}
    attributes = {
        name: {key: value for key, value in vars(member).items() if key not in _OF_ENUM}
        for name, member in class_.__members__.items()
        if name == member.name
    }
    return _fill, (fill, (filled, other), attributes)


def reduced(member: Any) -> Any:
    """Returns how a member of an Enum class is found again, as `__reduce__` does. NotImplemented: pickle knows better,
    because the class defines how its members are pickled."""
    class_: Any = type(member)
    if class_.__reduce_ex__ not in (Enum.__reduce_ex__, Flag.__reduce_ex__):  # some releases of Python have both
        return NotImplemented
    if isinstance(member, Flag):
        flags = {name: one._value_ for name, one in class_.__members__.items() if _is_flag(name, one, member._value_)}
        return _flags, (class_, tuple(flags), member._value_ & ~sum(flags.values()))
    if member._name_ not in class_.__members__:  # the class has made it from a value that no member has
        return NotImplemented
    return _member, (class_, member._name_)


def _is_flag(name: str, flag: Any, of: int) -> bool:
    """Whether a flag of this name has one bit, which is in the combination `of`."""
    value = flag._value_
    return name == flag._name_ and value > 0 and not value & (value - 1) and bool(of & value)


# Their names are in what jobs have saved.
def _make(
    meta: type, name: str, module: str, bases: tuple[type, ...], members: dict[str, Any], options: dict[str, Any]
) -> type:
    def fill(namespace: dict[str, Any]) -> None:
        namespace["__module__"] = module
        for item in members.items():  # one after the other, because update() of an Enum's namespace may not note them
            namespace.__setitem__(*item)

    return new_class(name, bases, {"metaclass": meta, **options}, fill)


def _member(class_: Any, name: str) -> Any:
    if not is_enum(class_):
        raise CodecError(
            f"{called_class(class_)} was an Enum class with the member {name!r}, which an earlier program has saved, "
            f"and is none now. Keep the Enum class {class_.__qualname__} and give the new class another name, or start "
            "the job without the savepoint"
        )
    found = class_.__members__.get(name)
    if found is None:
        raise CodecError(
            f"{called_class(class_)} has no member {name!r}, which an earlier program has saved; the class has the "
            f"members {', '.join(class_.__members__)}. Members are saved by name. Keep the member; if another one "
            f"takes its place, let the old name be an alias of that one ({name} = its value, after it); or start the "
            "job without the savepoint"
        )
    return found


def _flags(class_: Any, names: tuple[str, ...], others: int) -> Any:
    """Returns the combination of the flags of these names, and of bits that have no name."""
    value = others
    for name in names:
        value |= _member(class_, name)._value_
    return class_(value)


def _fill(class_: Any, state: tuple[Callable[..., Any], Any, dict[str, dict[str, Any]]]) -> None:
    fill, members, attributes = state
    fill(class_, members)
    for name, values in attributes.items():
        vars(class_.__members__[name]).update(values)
