"""Reads objects of dataclasses that had other fields when the objects were saved.

A program that continues from the state of an earlier one may have changed its dataclasses. Pickle would give the
objects the saved attributes and do nothing else: a new field would be missing until something reads it, and in a class
with slots, values would get into wrong places. So when the fields differ, objects are unpickled through a stand-in for
the class, which completes them. New fields get their defaults, fields that are gone are dropped, and a new field
without a default is an error. A stand-in completes each object before anything can hash or see it, and the objects
belong to the real class afterwards. Objects of classes whose fields are unchanged must never pay for this.

Classes that define how they are pickled are left alone.
"""

from __future__ import annotations

import dataclasses
from types import MemberDescriptorType
from typing import Any
from weakref import WeakKeyDictionary

from penstock.runtime.errors import CodecError

_Missing = type(dataclasses.MISSING)

_layouts: WeakKeyDictionary[type, str] = WeakKeyDictionary()
_stand_ins: dict[tuple[type, str], type] = {}
_lost: dict[type, list[str]] = {}  # classes whose objects had more fields when they were saved, and these fields


def layout(class_: type) -> str:
    """Returns what pickles say of a dataclass: how it keeps its fields, and their names. Empty for other classes."""
    found = _layouts.get(class_)
    if found is None:
        found = ""
        if dataclasses.is_dataclass(class_) and not _pickles_itself(class_):
            names = (field.name for field in dataclasses.fields(class_))
            found = " ".join(["dict" if class_.__dictoffset__ else "slots", *names])
        _layouts[class_] = found
    return found


def stand_in(class_: type, saved: str) -> type:
    """Returns the stand-in through which to unpickle objects of a dataclass that were saved with this layout."""
    found = _stand_ins.get((class_, saved))
    if found is None:
        found = _stand_ins[class_, saved] = _made(class_, saved.split(" ")[1:])
    return found


def without_fields(key: Any) -> tuple[type, list[str]] | None:
    """Returns the class of a key, or of a part of the key, that has lost fields since objects of it were saved, with
    these fields."""
    if not _lost:
        return None
    if (gone := _lost.get(type(key))) is not None:
        return type(key), gone
    parts: Any = ()
    if isinstance(key, tuple | frozenset):
        parts = key
    elif dataclasses.is_dataclass(key):
        parts = (getattr(key, field.name) for field in dataclasses.fields(key))
    return next((found for part in parts if (found := without_fields(part)) is not None), None)


def _pickles_itself(class_: Any) -> bool:
    own = [getattr(class_, name, None) for name in ("__getstate__", "__setstate__")]
    # dataclass() adds such methods to classes that are frozen and have slots. From 3.11 on, `object` has one too.
    written = [method for method in own if method not in (None, getattr(object, "__getstate__", None))]
    return (
        any(getattr(method, "__module__", None) != "dataclasses" for method in written)
        or class_.__reduce_ex__ is not object.__reduce_ex__
        or class_.__reduce__ is not object.__reduce__
    )


class _Acting(type):
    """Passes to the class everything else that a pickle does with the stand-in."""

    _class: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._class(*args, **kwargs)

    def mro(cls) -> list[type]:
        # The class cannot be a second base, because the stand-in must have the same layout in memory as the class.
        return [cls, _Quiet, *cls.__bases__[0].__mro__]

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls._class

    def __hash__(cls) -> int:
        return hash(cls._class)


class _Quiet:
    """Keeps `__init_subclass__` of the program from being called for the stand-in."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        pass


def _made(class_: type, saved: list[str]) -> type:
    now = {field.name for field in dataclasses.fields(class_)}
    gone = [name for name in saved if name not in now]
    if gone:
        _lost[class_] = gone

    def completed(one: Any, state: Any) -> None:
        object.__setattr__(one, "__class__", class_)
        if isinstance(state, list):  # from a class that is frozen and has slots
            values = dict(zip(saved, state, strict=True))
        else:
            attributes, slots = state if isinstance(state, tuple) else (state, None)
            values = {**(attributes or {}), **(slots or {})}
        for name in gone:
            values.pop(name, None)
        for field in dataclasses.fields(class_):
            if field.name not in values:
                values[field.name] = _default(class_, field)
        attributes = getattr(one, "__dict__", None)
        for name, value in values.items():
            if attributes is None or isinstance(getattr(class_, name, None), MemberDescriptorType):
                object.__setattr__(one, name, value)
            else:
                attributes[name] = value

    def made(_: type, *args: Any, **kwargs: Any) -> Any:
        one = class_.__new__(class_, *args, **kwargs)
        completed(one, {})
        return one

    kind = type(class_)
    acting: Any = type("Acting", (_Acting,) if kind is type else (_Acting, kind), {})
    members: dict[str, Any] = {"__slots__": (), "_class": class_}
    members |= {"__module__": class_.__module__, "__qualname__": class_.__qualname__}
    # An object without fields may have no state, and then pickle does not call __setstate__.
    members |= {"__setstate__": completed} if saved else {"__new__": made}
    # The metaclass is not called, because it may do something that the program wants once for each class.
    found: type = type.__new__(acting, class_.__name__, (class_,), members)
    return found


def _default(class_: type, field: dataclasses.Field[Any]) -> Any:
    # A class that came from another process has brought its own MISSING.
    if not isinstance(field.default, _Missing):
        return field.default
    factory: Any = field.default_factory
    if not isinstance(factory, _Missing):
        return factory()
    raise CodecError(
        f"{class_.__qualname__} has the field {field.name!r}, which objects of that class did not have when they were "
        f"saved by an earlier program. Give the field a default, which these objects then take, or keep the class as "
        "it was"
    )
