"""How a class travels of which cloudpickle would make another one: with its slots and its real bases, and once.

cloudpickle makes a class empty at first, and then fills it with its members. What Python decides when it makes the
class cannot be filled in afterwards: the slots of its objects. Without them an object has a `__dict__` here and none
there, so one process cannot read what another one has pickled. So the empty class is made with the slots at once.

`typing.NamedTuple` and `typing.TypedDict` are no classes but make them, from other bases than they are given, and
NamedTuple allows no slots, which every named tuple has. So such a class is made from the classes that it really has as
bases, and a typed dict without asking its metaclass, which refuses these.

`__init_subclass__` of a base of the main script has been called in the program, with the options that only the
`class` statement names. What it has done there travels: the attributes of the class, and the registry of the base. So
it is not called again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import get_ident
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any


def making(class_: type, arguments: tuple[Any, ...], travels: Callable[[str | None], bool]) -> tuple[Any, ...]:
    """Returns with what cloudpickle's function makes an empty class of the same layout. It gives `arguments`: the
    metaclass, the name, the bases, what is in the class from the start, and two others. `travels` tells whether the
    definitions of a module travel."""
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
        meta = partial(_make_without_hook, meta, hooked)
    if "__slots__" in members:
        given = given | {"__slots__": tuple(key for key, member in members.items() if _is_slot(class_, member))}
    return meta, name, bases, given, *others


def filling(class_: type, state: tuple[dict[str, Any], Any]) -> tuple[dict[str, Any], Any]:
    """Returns what the empty class is filled with: `state` without what it has already. cloudpickle takes out the
    members that have the names of slots, which misses private names and takes what has taken the place of a slot."""
    members = vars(class_)
    if "__slots__" not in members:
        return state
    filled, other = state
    declared = members["__slots__"]
    names = {declared} if isinstance(declared, str) else set(declared)
    filled = {**filled, **{key: members[key] for key in names & members.keys()}}
    return {key: member for key, member in filled.items() if not _is_slot(class_, member)}, other


# Its name is in what jobs have saved.
def _make_without_hook(meta: Any, hooked: Any, name: str, bases: tuple[type, ...], given: dict[str, Any]) -> Any:
    """Makes a class without calling the `__init_subclass__` of its base `hooked`."""
    namespace = meta.__prepare__(name, bases) if isinstance(meta, type) else {}
    namespace.update(given)
    hook = vars(hooked).get("__init_subclass__")
    if hook is None:  # the base is not filled yet
        return meta(name, bases, namespace)
    here = get_ident()

    def hook_of_others(made: Any, /, **options: Any) -> None:
        if get_ident() != here:  # another thread makes a class of its own
            hook.__get__(None, made)(**options)

    hooked.__init_subclass__ = classmethod(hook_of_others)
    try:
        return meta(name, bases, namespace)
    finally:
        hooked.__init_subclass__ = hook


def _is_slot(class_: type, member: Any) -> bool:
    """Whether a member of a class gives access to a slot of the class's own, also to `__dict__` and `__weakref__`."""
    return isinstance(member, MemberDescriptorType | GetSetDescriptorType) and member.__objclass__ is class_
