"""Reads objects of classes that had other fields when the objects were saved (docs/flows.md: what may change in a
class).

A program that continues from the state of an earlier one may have changed its classes: dataclasses, msgspec structs and
named tuples. Pickle would not notice. It gives a dataclass the saved attributes and does nothing else: a new field
would be missing until something reads it, and in a class with slots, values would get into wrong places. Structs and
named tuples are pickled as their values in the order of the fields, so that after a change of the order each value
would become that of another field, and no error would tell.

So pickles name the fields of such a class (`layout`), those of the main script always, and imported ones in state. When
these differ, the unpickler raises LayoutChanged, and `ByName` reads the pickle again: it is slow, and gives each field
the value that was saved under its name. New fields get their defaults, fields that are gone are dropped, and a new
field without a default is an error. An object is whole before anything can hash or see it. Pickles of classes whose
fields are unchanged must never pay for this.

Dataclasses and structs that define how they are pickled are left alone.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping
from types import MemberDescriptorType
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from penstock.runtime.errors import CodecError, describe, is_interrupt
from penstock.runtime.records.struct_classes import Factory, has_keywords, is_struct

_Missing = type(dataclasses.MISSING)

# The first words of layouts, and what they say of a class.
_KINDS = {
    "dict": "a dataclass",
    "slots": "a dataclass",
    "frozen": "a dataclass",  # with slots, too: its objects are saved as their values, in order
    "struct": "a msgspec.Struct",
    "keywords": "a msgspec.Struct",  # one that takes some of its fields by name only
    "tuple": "a named tuple",
}
_BY_POSITION = ("struct", "keywords", "tuple")  # all values of an object are there when the object is made


class _Keywords(msgspec.Struct, kw_only=True):
    one: int = 1


# What makes a struct from a class and its fields by name.
_by_keywords: Any = _Keywords().__reduce__()[0]

# Every named tuple has this code, each in a function of its own.
_code_of_arguments: Any = namedtuple("_Some", "one").__getnewargs__.__code__  # type: ignore[attr-defined]

_layouts: WeakKeyDictionary[type, str] = WeakKeyDictionary()
_other: dict[type, list[str]] = {}  # classes whose objects had other fields when they were saved, and these fields
_EQUAL_EACH_TIME = (tuple, frozenset, str, bytes, int, float, bool, complex, list, dict, set)


class LayoutChanged(CodecError):
    """A class has other fields than when objects of it were saved."""


def layout(class_: type) -> str:
    """Returns the layout of a class as pickles have it: how its objects are pickled, and the names of its fields. Empty
    for classes of which pickles say nothing more than the name."""
    found = _layouts.get(class_)
    if found is None:
        found = _layouts[class_] = " ".join(_described(class_))
    return found


def differs(class_: type, saved: str) -> bool:
    """Whether objects that were saved with this layout must be read by the names of their fields."""
    now = layout(class_)
    return saved != now and bool(now or saved.split(" ", 1)[0] in _BY_POSITION)


class _Change(NamedTuple):
    """How a class has changed: the kind and the fields that it had, and those that it has with their defaults."""

    kind: str
    names: list[str]
    now: dict[str, Any]

    @property
    def gone(self) -> list[str]:
        """The fields that the class has no more."""
        return [name for name in self.names if name not in self.now]


class ByName(pickle._Unpickler):
    """The unpickler that is written in Python, and gives fields the values that were saved under their names. `find` is
    the function by which pickles name classes with their layouts, and `named` returns the class of a name."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {**pickle._Unpickler.dispatch}

    def __init__(self, data: bytes | bytearray | memoryview, find: Any, named: Callable[..., type]) -> None:
        super().__init__(io.BytesIO(data))
        self._find = find
        self._named = named
        self._changed: dict[type, _Change] = {}

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack[-1]
        if function is self._find:
            *name, saved = arguments
            made: Any = self._named(*name)
            if saved and differs(made, saved):
                kind, *names = saved.split(" ")
                _other[made] = names
                now = {} if _kind(made) is None else _defaults(made)
                self._changed[made] = _Change(kind, names, now)
        elif function is _by_keywords and arguments[0] in self._changed:
            made = self._made(*arguments)
        elif isinstance(function, type) and function in self._changed and self._changed[function].kind == "struct":
            made = self._made(function, arguments)
        else:
            made = function(*arguments)
        self.stack[-1] = made

    dispatch[pickle.REDUCE[0]] = load_reduce

    def load_newobj(self) -> None:
        arguments = self.stack.pop()
        class_ = self.stack[-1]
        changed = class_ in self._changed
        self.stack[-1] = self._made(class_, arguments) if changed else class_.__new__(class_, *arguments)

    dispatch[pickle.NEWOBJ[0]] = load_newobj

    def load_build(self) -> None:
        one, state = self.stack[-2:]
        change = self._changed.get(type(one))
        if change is None or not dataclasses.is_dataclass(one):
            super().load_build()  # type: ignore[misc]
            return
        self.stack.pop()
        if isinstance(state, list):
            values = dict(zip(change.names, state, strict=True))
        else:
            attributes, slots = state if isinstance(state, tuple) else (state, None)
            values = {**(attributes or {}), **(slots or {})}
        gone = change.gone
        _fill(one, {name: value for name, value in values.items() if name not in gone})

    dispatch[pickle.BUILD[0]] = load_build

    def _made(self, class_: Any, values: Any) -> Any:
        """Returns an object of a changed class. `values` are those of its fields, as they were saved; those of a
        dataclass come later, and new fields have their defaults from the start."""
        kind, names, now = change = self._changed[class_]
        is_dataclass = dataclasses.is_dataclass(class_)
        if _kind(class_) is None or (kind not in _BY_POSITION and not is_dataclass):
            raise CodecError(
                f"{called_class(class_)} was {_KINDS[kind]} with the fields {', '.join(names) or 'none'} when objects "
                f"of it were saved by an earlier program, and is {_kind(class_) or 'another kind of class'} now, which "
                f"they cannot become. Keep the class {class_.__qualname__} as it was, give the new class another name "
                "and convert the objects in a function of the flow, or start the job without the savepoint"
            )
        new = {name: _default(class_, name, default, change) for name, default in now.items() if name not in names}
        if kind not in _BY_POSITION:
            one = class_.__new__(class_, *values)
            _fill(one, new)
            return one
        given = values if isinstance(values, dict) else dict(zip(names, values, strict=True))
        fields = new | {name: value for name, value in given.items() if name in now}
        if is_struct(class_):
            return class_(**fields)
        if _is_named_tuple(class_):
            return class_.__new__(class_, *map(fields.__getitem__, class_._fields))
        one = object.__new__(class_)
        _fill(one, fields)
        return one


def classes_changed() -> bool:
    """Returns whether this process has read objects of classes that had other fields when they were saved."""
    return bool(_other)


def with_other_fields(key: Any) -> tuple[type, list[str]] | None:
    """Returns the class of a key, or of a part of the key, that had other fields when objects of it were saved, with
    these fields."""
    return _part_of(key, lambda class_, saved: saved)


def without_fields(key: Any) -> tuple[type, list[str]] | None:
    """Returns the class of a key, or of a part of the key, that has lost fields since objects of it were saved, with
    these fields."""
    return _part_of(key, lambda class_, saved: [name for name in saved if name not in _defaults(class_)])


def with_varying_fields(key: Any) -> tuple[type, list[str]] | None:
    """Returns the class of a key, or of a part of the key, that has got fields since objects of it were saved which
    make one saved key unequal to itself when it is read twice, with these fields."""
    return _part_of(
        key,
        lambda class_, saved: [
            name for name, default in _defaults(class_).items() if name not in saved and _varies(default)
        ],
    )


def _part_of(key: Any, fields_of: Callable[[type, list[str]], list[str]]) -> tuple[type, list[str]] | None:
    """Returns the class of a key, or of a part of the key, that has changed in a way which `fields_of` tells."""
    if not _other:
        return None
    class_ = type(key)
    if (saved := _other.get(class_)) is not None and (fields := fields_of(class_, saved)):
        return class_, fields
    parts: Iterable[Any] = ()
    if isinstance(key, tuple | frozenset):
        parts = key
    elif _kind(class_) is not None:
        parts = (getattr(key, name) for name in _defaults(class_))
    return next((found for part in parts if (found := _part_of(part, fields_of)) is not None), None)


def called_class(class_: type) -> str:
    """Names a class for an error."""
    return f"{class_.__qualname__} (a class of module {class_.__module__})"


def _described(class_: Any) -> list[str]:
    has_dict = class_.__dictoffset__ != 0
    if dataclasses.is_dataclass(class_):
        if _pickles_itself(class_):
            return []
        listed = getattr(getattr(class_, "__setstate__", None), "__module__", None) == "dataclasses"
        kept = "frozen" if listed else "dict" if has_dict else "slots"
        return [kept, *(field.name for field in dataclasses.fields(class_))]
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


def _kind(class_: type) -> str | None:
    """Returns the kind of a class with fields."""
    if dataclasses.is_dataclass(class_):
        return _KINDS["dict"]
    if is_struct(class_):
        return _KINDS["struct"]
    return _KINDS["tuple"] if _is_named_tuple(class_) else None


def _defaults(class_: Any) -> dict[str, Any]:
    """Returns the fields of a class, and their defaults or the functions that make them; MISSING: there is none."""
    if is_struct(class_):
        names, defaults = class_.__struct_fields__, class_.__struct_defaults__
        found = dict.fromkeys(names, dataclasses.MISSING)
        last = zip(names[len(names) - len(defaults) :], defaults, strict=True)
        return found | {name: default for name, default in last if default is not msgspec.NODEFAULT}
    if _is_named_tuple(class_):
        return {name: class_._field_defaults.get(name, dataclasses.MISSING) for name in class_._fields}
    return {field.name: field for field in dataclasses.fields(class_)}


def _varies(default: Any) -> bool:
    """Whether objects with this default may be unequal for no other reason."""
    if isinstance(default, Factory):
        return default.factory not in _EQUAL_EACH_TIME
    if not isinstance(default, dataclasses.Field) or not default.compare:
        return False
    return not isinstance(default.default_factory, _Missing) and default.default_factory not in _EQUAL_EACH_TIME


def _default(class_: type, name: str, default: Any, change: _Change) -> Any:
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
    gone = ", ".join(map(repr, change.gone))
    lost = f" (they had {gone}, which the class has no more)" if gone else ""
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
