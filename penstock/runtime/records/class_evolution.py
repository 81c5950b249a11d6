"""Reads objects of classes that had other fields when the objects were saved.

A program that continues from the state of an earlier one may have changed its classes: dataclasses, msgspec structs and
named tuples. Pickle would not notice. It gives a dataclass the saved attributes and does nothing else: a new field
would be missing until something reads it, and in a class with slots, values would get into wrong places. Structs and
named tuples are pickled as their values in the order of the fields, so that after a change of the order each value
would become that of another field, and no error would tell.

So pickles name the fields of such a class (`layout`). When these differ, objects are unpickled through a stand-in for
the class, which gives each field the value that was saved under its name. New fields get their defaults, fields that
are gone are dropped, and a new field without a default is an error. An object belongs to the real class before anything
can hash or see it. Objects of classes whose fields are unchanged must never pay for this.

Pickles say nothing of the fields of dataclasses that can be imported. When state is read in which the name of a field
does not appear, the objects of its class are noted, and get the fields that they lack (`Noted`).

Dataclasses and structs that define how they are pickled are left alone.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import namedtuple
from collections.abc import Mapping
from types import MemberDescriptorType
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from penstock.runtime.errors import CodecError, describe, is_interrupt
from penstock.runtime.records.struct_classes import Factory, has_keywords, is_struct

_Missing = type(dataclasses.MISSING)

# The first words of layouts, and what they say of a class.
_KINDS = {
    "dict": "a dataclass",
    "slots": "a dataclass",
    "struct": "a msgspec.Struct",
    "keywords": "a msgspec.Struct",  # one that takes some of its fields by name only
    "tuple": "a named tuple",
}
_BY_POSITION = ("struct", "keywords", "tuple")  # all values of an object are there when the object is made


class _Keywords(msgspec.Struct, kw_only=True):
    one: int = 1


# The modules whose code makes objects again: that of the only `loads`, Python's own (for errors), and msgspec's.
_UNPICKLING = ("penstock.runtime.records.pickling", "pickle", _Keywords().__reduce__()[0].__module__)

# Every named tuple has this code, each in a function of its own.
_code_of_arguments: Any = namedtuple("_Some", "one").__getnewargs__.__code__  # type: ignore[attr-defined]

_layouts: WeakKeyDictionary[type, str] = WeakKeyDictionary()
_stand_ins: dict[tuple[type, str], type] = {}
_lacking: WeakKeyDictionary[type, dict[str, Any]] = WeakKeyDictionary()  # see `_may_lack`
_lost: dict[type, list[str]] = {}  # classes whose objects had more fields when they were saved, and these fields
# Classes with new fields whose values are made anew for each saved object, and may differ each time. And these fields.
_varying: dict[type, list[str]] = {}
_EQUAL_EACH_TIME = (tuple, frozenset, str, bytes, int, float, bool, complex, list, dict, set)


def layout(class_: type) -> str:
    """Returns what pickles say of a class: how its objects are pickled, and the names of its fields. Empty for classes
    of which pickles say nothing more than the name."""
    found = _layouts.get(class_)
    if found is None:
        found = _layouts[class_] = " ".join(_described(class_))
    return found


def differs(class_: type, saved: str) -> bool:
    """Whether objects that were saved with this layout must be unpickled through a stand-in for the class."""
    now = layout(class_)
    return saved != now and bool(now or saved.split(" ", 1)[0] in _BY_POSITION)


def stand_in(class_: type, saved: str) -> type:
    """Returns the stand-in through which to unpickle objects of a class that were saved with this layout."""
    found = _stand_ins.get((class_, saved))
    if found is None:
        kind, *names = saved.split(" ")
        if kind in _BY_POSITION:
            found = _taking_values(class_, kind, names)
        elif dataclasses.is_dataclass(class_):
            found = _made(class_, names)
        else:
            found = _refusing(class_, kind, names)
        _stand_ins[class_, saved] = found
    return found


class Noted:
    """The objects in a pickle whose dataclasses can be imported, and have fields that the pickle does not name."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._objects: list[Any] = []

    def class_for(self, class_: Any) -> Any:
        """Returns what the unpickler makes the objects of an imported class with."""
        if not isinstance(class_, type) or all(name.encode() in self._data for name in _may_lack(class_)):
            return class_
        if "__getstate__" in vars(class_):  # of dataclass() itself; frozen classes with slots are saved without names
            return class_

        def new(_: type, *args: Any, **kwargs: Any) -> Any:
            one = class_.__new__(class_, *args, **kwargs)
            self._objects.append(one)
            return one

        return _stand_in(class_, new)

    def complete(self) -> None:
        """Gives the objects the fields that they lack. Raises CodecError for a field without a default."""
        for one in self._objects:
            for name, field in _may_lack(type(one)).items():
                if not hasattr(one, name):
                    object.__setattr__(one, name, _default(type(one), name, field, []))


def lacks_field(error: BaseException) -> str | None:
    """Explains the error of an object that has no value for a field of its class. None: it is another error."""
    if not isinstance(error, AttributeError):
        return None
    one, name = error.obj, error.name
    if isinstance(one, type) or name not in _may_lack(type(one)):
        return None
    return (
        f"the object lacks a field of {called_class(type(one))}. If it was saved before the class had the field: move "
        f"the class to the main script, whose saved objects get the defaults of new fields, or use getattr(..., "
        f"{name!r}, ...)"
    )


def _may_lack(class_: type) -> dict[str, Any]:
    """Returns the fields that saved objects of a class may lack: their class itself has no value for them."""
    found = _lacking.get(class_)
    if found is None:
        found = _lacking[class_] = {}
        if dataclasses.is_dataclass(class_) and not _pickles_itself(class_):
            for field in dataclasses.fields(class_):
                has_default = not (isinstance(field.default, _Missing) and isinstance(field.default_factory, _Missing))
                in_class = field.name in vars(class_) and not isinstance(vars(class_)[field.name], MemberDescriptorType)
                if not in_class and (field.init or has_default):
                    found[field.name] = field
    return found


def without_fields(key: Any) -> tuple[type, list[str]] | None:
    """Returns the class of a key, or of a part of the key, that has lost fields since objects of it were saved, with
    these fields."""
    return _part_of(_lost, key)


def with_varying_fields(key: Any) -> tuple[type, list[str]] | None:
    """Returns the class of a key, or of a part of the key, that has got fields since objects of it were saved which
    make one saved key unequal to itself when it is read twice, with these fields."""
    return _part_of(_varying, key)


def _part_of(classes: dict[type, list[str]], key: Any) -> tuple[type, list[str]] | None:
    if not classes:
        return None
    if (fields := classes.get(type(key))) is not None:
        return type(key), fields
    parts: Any = ()
    if isinstance(key, tuple | frozenset):
        parts = key
    elif dataclasses.is_dataclass(key):
        parts = (getattr(key, field.name) for field in dataclasses.fields(key))
    elif is_struct(type(key)):  # a key of a map of a key's own
        parts = (getattr(key, name) for name in key.__struct_fields__)
    return next((found for part in parts if (found := _part_of(classes, part)) is not None), None)


def called_class(class_: type) -> str:
    """Names a class for an error."""
    return f"{class_.__qualname__} (a class of module {class_.__module__})"


def _described(class_: Any) -> list[str]:
    kept = "dict" if class_.__dictoffset__ else "slots"
    if dataclasses.is_dataclass(class_):
        if _pickles_itself(class_):
            return []
        names = (field.name for field in dataclasses.fields(class_))
        return [kept, *names]
    if class_.__reduce_ex__ is not object.__reduce_ex__:
        return []
    if is_struct(class_) and class_.__reduce__ is msgspec.Struct.__reduce__:
        return ["keywords" if has_keywords(class_) else "struct", *class_.__struct_fields__]
    if _is_named_tuple(class_) and class_.__reduce__ is object.__reduce__:
        own = getattr(class_.__getnewargs__, "__code__", None) != _code_of_arguments
        return [] if own or hasattr(class_, "__getnewargs_ex__") else ["tuple", *class_._fields]
    return []


def _is_named_tuple(class_: Any) -> bool:
    return issubclass(class_, tuple) and isinstance(getattr(class_, "_field_defaults", None), Mapping)


def _pickles_itself(class_: Any) -> bool:
    own = [getattr(class_, name, None) for name in ("__getstate__", "__setstate__")]
    # dataclass() adds such methods to classes that are frozen and have slots. From 3.11 on, `object` has one too.
    written = [method for method in own if method not in (None, getattr(object, "__getstate__", None))]
    return (
        any(getattr(method, "__module__", None) != "dataclasses" for method in written)
        or class_.__reduce_ex__ is not object.__reduce_ex__
        or class_.__reduce__ is not object.__reduce__
    )


class _StandIn(type):
    """The type of all stand-ins. The program may have saved the class itself, and gets the stand-in in its place, which
    is to be the class in all that Python asks."""

    _class: type

    def __eq__(cls, other: object) -> bool:
        return _real(other) is cls._class

    def __hash__(cls) -> int:
        return hash(cls._class)

    def __getitem__(cls, parameters: Any) -> Any:
        return cls._class[parameters]  # type: ignore[index]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls._class)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(_real(subclass), cls._class)


def _real(class_: Any) -> Any:
    """Returns the class for which a stand-in stands, or what else it was given."""
    return class_._class if isinstance(class_, _StandIn) else class_


class _Acting(_StandIn):
    """Passes to the class everything else that a pickle does with the stand-in."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._class(*args, **kwargs)

    def mro(cls) -> list[type]:
        # The class cannot be a second base, because the stand-in must have the same layout in memory as the class.
        return [cls, _Quiet, *cls.__bases__[0].__mro__]


class _Quiet:
    """Keeps `__init_subclass__` of the program from being called for the stand-in."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        pass


def _made(class_: type, saved: list[str]) -> type:
    now = _defaults(class_)
    gone = _changed(class_, saved, now)

    def completed(one: Any, state: Any) -> None:
        object.__setattr__(one, "__class__", class_)
        if isinstance(state, list):  # from a class that is frozen and has slots
            values = dict(zip(saved, state, strict=True))
        else:
            attributes, slots = state if isinstance(state, tuple) else (state, None)
            values = {**(attributes or {}), **(slots or {})}
        _fill(one, _fitting(class_, values, now, gone))

    def made(_: type, *args: Any, **kwargs: Any) -> Any:
        one = class_.__new__(class_, *args, **kwargs)
        completed(one, {})
        return one

    kind = type(class_)
    acting: Any = type("Acting", (_Acting,) if kind is type else (_Acting, kind), {})
    members: dict[str, Any] = {"__slots__": (), "_class": class_, "__doc__": class_.__doc__}
    members |= {"__module__": class_.__module__, "__qualname__": class_.__qualname__}
    # An object without fields may have no state, and then pickle does not call __setstate__.
    members |= {"__setstate__": completed} if saved else {"__new__": made}
    # The metaclass is not called, because it may do something that the program wants once for each class.
    found: type = type.__new__(acting, class_.__name__, (class_,), members)
    return found


def _fill(one: Any, values: dict[str, Any]) -> None:
    """Gives the fields and other attributes of an object of a dataclass their values. Drops attributes for which the
    class has no place."""
    class_: Any = type(one)
    attributes = getattr(one, "__dict__", None)
    for name, value in values.items():
        if isinstance(getattr(class_, name, None), MemberDescriptorType):
            object.__setattr__(one, name, value)
        elif attributes is not None:
            attributes[name] = value
        elif name in class_.__dataclass_fields__:
            object.__setattr__(one, name, value)


class _Taking(_StandIn):
    """The type of stand-ins that get all values of an object at once. Everything else that is done with the stand-in is
    done with the class."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        # So pickle makes structs. But the program may have saved the class itself, and then calls it as it is today.
        if sys._getframe(1).f_globals.get("__name__") in _UNPICKLING:
            made: Any = cls.__new__
            return made(cls, *args, **kwargs)
        return cls._class(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls._class, name)


def _taking_values(class_: type, kind: str, saved: list[str]) -> type:
    """Returns the stand-in for objects that were saved as their values, in the order of these fields."""
    if _kind(class_) is None:
        return _refusing(class_, kind, saved)
    now = _defaults(class_)
    gone = _changed(class_, saved, now)

    def new(_: type, *args: Any, **kwargs: Any) -> Any:
        values = kwargs or dict(zip(saved, args, strict=True))
        return _built(class_, _fitting(class_, values, now, gone))

    return _stand_in(class_, new)


def _built(class_: Any, values: dict[str, Any]) -> Any:
    """Returns an object of a class whose fields have these values."""
    if is_struct(class_):
        return class_(**values)
    if _is_named_tuple(class_):
        return class_.__new__(class_, *map(values.__getitem__, class_._fields))
    one = object.__new__(class_)
    _fill(one, values)
    return one


def _refusing(class_: type, kind: str, saved: list[str]) -> type:
    """Returns the stand-in for objects of which the class of today cannot be made."""

    def new(_: type, *args: Any, **kwargs: Any) -> Any:
        raise CodecError(
            f"{called_class(class_)} was {_KINDS[kind]} with the fields {', '.join(saved) or 'none'} when objects of "
            f"it were saved by an earlier program, and is {_kind(class_) or 'another kind of class'} now, which they "
            f"cannot become. Keep the class {class_.__qualname__} as it was, give the new class another name and "
            "convert the objects in a function of the flow, or start the job without the savepoint"
        )

    return _stand_in(class_, new)


def _stand_in(class_: type, new: Any) -> type:
    members = {"_class": class_, "__new__": new, "__module__": class_.__module__, "__qualname__": class_.__qualname__}
    return _Taking(class_.__name__, (), members)


def _kind(class_: type) -> str | None:
    """Says what kind of class with fields a class is."""
    if dataclasses.is_dataclass(class_):
        return _KINDS["dict"]
    if is_struct(class_):
        return _KINDS["struct"]
    return _KINDS["tuple"] if _is_named_tuple(class_) else None


def _defaults(class_: Any) -> dict[str, Any]:
    """Returns the fields of a class, and what their defaults are or are made from; MISSING: there is none."""
    if is_struct(class_):
        names, defaults = class_.__struct_fields__, class_.__struct_defaults__
        found = dict.fromkeys(names, dataclasses.MISSING)
        behind = zip(names[len(names) - len(defaults) :], defaults, strict=True)
        return found | {name: default for name, default in behind if default is not msgspec.NODEFAULT}
    if _is_named_tuple(class_):
        return {name: class_._field_defaults.get(name, dataclasses.MISSING) for name in class_._fields}
    return {field.name: field for field in dataclasses.fields(class_)}


def _changed(class_: type, saved: list[str], now: dict[str, Any]) -> list[str]:
    """Returns the fields that a class has no more. Notes them, and new ones that a key must not have."""
    gone = [name for name in saved if name not in now]
    if gone:
        _lost[class_] = gone
    varying = [name for name, default in now.items() if name not in saved and _varies(default)]
    if varying:
        _varying[class_] = varying
    return gone


def _varies(default: Any) -> bool:
    """Whether objects with this default may be unequal for no other reason."""
    if isinstance(default, Factory):
        return default.factory not in _EQUAL_EACH_TIME
    if not isinstance(default, dataclasses.Field) or not default.compare:
        return False
    return not isinstance(default.default_factory, _Missing) and default.default_factory not in _EQUAL_EACH_TIME


def _fitting(class_: type, values: dict[str, Any], now: dict[str, Any], gone: list[str]) -> dict[str, Any]:
    """Returns the saved values without those of fields that are gone, and with defaults for new fields."""
    values = {name: value for name, value in values.items() if name not in gone}
    for name, default in now.items():
        if name not in values:
            values[name] = _default(class_, name, default, gone)
    return values


def _default(class_: type, name: str, default: Any, gone: list[str]) -> Any:
    if isinstance(default, Factory):  # of a struct
        return _from_factory(class_, name, default.factory)
    # A class that came from another process has brought its own MISSING.
    if not isinstance(default, dataclasses.Field):
        if not isinstance(default, _Missing):
            return default
    elif not isinstance(default.default, _Missing):
        return default.default
    elif not isinstance(default.default_factory, _Missing):
        return _from_factory(class_, name, default.default_factory)
    lost = f" (they had {', '.join(map(repr, gone))}, which the class has no more)" if gone else ""
    raise CodecError(
        f"{called_class(class_)} has the field {name!r}, which objects of that class did not have when they were saved "
        f"by an earlier program{lost}. Give the field a default, which these objects then take, or keep the class as "
        "it was. For other values, keep the class, give the new one another name and convert the objects in a function "
        "of the flow"
    )


def _from_factory(class_: type, name: str, factory: Any) -> Any:
    try:
        return factory()
    except BaseException as error:  # it is the program's, and may raise anything
        if is_interrupt(error):
            raise
        raise CodecError(
            f"{called_class(class_)} has the field {name!r}, which objects of that class did not have when they were "
            f"saved by an earlier program, and its default_factory has raised an error: {describe(error)}"
        ) from error
