"""Objects of dataclasses whose fields were others when the objects were saved.

A program that goes on from the state of an earlier one may have edited its dataclasses. Pickle would give the objects
the attributes that were saved and look no further: a new field would be missing until something touches it, or, in a
class with slots, values would come into wrong places. So where the fields differ, objects are unpickled through a
stand-in for the class, which completes them: new fields take their defaults, fields that are gone are dropped, and a
new field without a default is an error. A stand-in acts on each object before anything can hash or see it, and leaves
objects of the very class; objects of classes whose fields are the same must never pay for it.

Classes that say themselves how they are pickled are left alone.
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
_lost: dict[type, list[str]] = {}  # classes of which objects with more fields were unpickled here, and these fields


def layout(class_: type) -> str:
    """What pickles say of a dataclass: how it keeps its fields, and their names. Empty for other classes."""
    found = _layouts.get(class_)
    if found is None:
        found = ""
        if dataclasses.is_dataclass(class_) and not _pickles_itself(class_):
            names = (field.name for field in dataclasses.fields(class_))
            found = " ".join(["dict" if class_.__dictoffset__ else "slots", *names])
        _layouts[class_] = found
    return found


def stand_in(class_: type, saved: str) -> type:
    """What to unpickle objects of a dataclass by that were saved with this layout."""
    found = _stand_ins.get((class_, saved))
    if found is None:
        found = _stand_ins[class_, saved] = _made(class_, saved.split(" ")[1:])
    return found


def without_fields(key: Any) -> tuple[type, list[str]] | None:
    """The class of a key, or of a part of it, that has lost fields since objects of it were saved, and these fields."""
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
    # dataclass() gives classes that are frozen and have slots such methods; from 3.11 on `object` has one.
    written = [method for method in own if method not in (None, getattr(object, "__getstate__", None))]
    return (
        any(getattr(method, "__module__", None) != "dataclasses" for method in written)
        or class_.__reduce_ex__ is not object.__reduce_ex__
        or class_.__reduce__ is not object.__reduce__
    )


class _Acting(type):
    """Whatever else a pickle does with the stand-in for a class, it does with the class."""

    _class: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._class(*args, **kwargs)

    def mro(cls) -> list[type]:
        # Not a base, of which there may be but one: the stand-in must be laid out in memory as its class.
        return [cls, _Quiet, *cls.__bases__[0].__mro__]

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls._class

    def __hash__(cls) -> int:
        return hash(cls._class)


class _Quiet:
    """Keeps what a program does with each subclass of a class from being done with the stand-in."""

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
        if isinstance(state, list):  # of a class that is frozen and has slots
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
    # An object that had no fields may have no state, and then pickle sets none.
    members |= {"__setstate__": completed} if saved else {"__new__": made}
    # Not by calling the metaclass, which may do what is to be done once with each class of the program.
    found: type = type.__new__(acting, class_.__name__, (class_,), members)
    return found


def _default(class_: type, field: dataclasses.Field[Any]) -> Any:
    # A class that came from another process brought its own MISSING along.
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
