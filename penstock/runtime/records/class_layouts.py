"""How a class travels of which cloudpickle would make another one: with its slots and its real bases, and once.

cloudpickle makes a class empty at first, and then fills it with its members. What Python decides when it makes the
class cannot be filled in afterwards: the slots of its objects. Without them an object has a `__dict__` here and none
there, so one process cannot read what another one has pickled. So the empty class is made with the slots at once.

`typing.NamedTuple` and `typing.TypedDict` are no classes but make them, from other bases than they are given, and
NamedTuple allows no slots, which every named tuple has. So such a class is made from the classes that it really has as
bases, and a typed dict without asking its metaclass, which refuses these.

`__init_subclass__` of a base of the main script has been called in the program, with options that only the `class`
statement names. It cannot be called again in another process, so such a class is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any


def making(class_: type, arguments: tuple[Any, ...], travels: Callable[[str | None], bool]) -> tuple[Any, ...]:
    """Returns the arguments with which cloudpickle's function makes an empty class of the same layout. It gives
    `arguments`: the metaclass, the name, the bases, what is in the class from the start, and two others. `travels`
    tells whether the definitions of a module travel."""
    meta, name, bases, given, *others = arguments
    members = vars(class_)
    typed_dict = type(class_).__name__ == "_TypedDictMeta"  # of typing or of typing_extensions
    if typed_dict or (tuple in class_.__bases__ and "_fields" in members):
        bases = class_.__bases__
        given = given | {key: members[key] for key in ("__orig_bases__",) if key in members}
    if typed_dict:
        meta = partial(type.__new__, meta)
    hooked = next((base for base in class_.__mro__[1:] if "__init_subclass__" in vars(base)), object)
    if travels(hooked.__module__):
        raise TypeError(
            f"cannot send the class {class_.__qualname__} of the main script to other processes, because its base "
            f"{hooked.__qualname__} defines __init_subclass__, which would be called once more there. Define both "
            "classes in a module that you import"
        )
    if "__slots__" in members:
        given = given | {"__slots__": tuple(key for key, member in members.items() if _is_slot(class_, member))}
    return meta, name, bases, given, *others


def filling(class_: type, state: tuple[dict[str, Any], Any]) -> tuple[dict[str, Any], Any]:
    """Returns the content of the empty class: `state` without what it has already. cloudpickle takes out the members
    that have the names of slots, which misses private names and takes what has taken the place of a slot."""
    members = vars(class_)
    if "__slots__" not in members:
        return state
    filled, other = state
    declared = members["__slots__"]
    names = {declared} if isinstance(declared, str) else set(declared)
    filled = {**filled, **{key: members[key] for key in names & members.keys()}}
    return {key: member for key, member in filled.items() if not _is_slot(class_, member)}, other


def _is_slot(class_: type, member: Any) -> bool:
    """Whether a member of a class gives access to a slot of the class's own, also to `__dict__` and `__weakref__`."""
    return isinstance(member, MemberDescriptorType | GetSetDescriptorType) and member.__objclass__ is class_
