"""Explains why a value cannot be pickled: which variable, attribute or element in it is the cause.

Picklers name the type that they do not know ("cannot pickle '_thread.lock' object"), but not the place. This module
finds the place by pickling every part of the value, for the message of an error. It must never raise an error itself,
nor take minutes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MappingProxyType, MethodType
from typing import Any

from penstock.runtime.errors import describe, shorten

_DEPTH_MAX = 10
_PARTS_MAX = 10_000  # of one value: an error must not take minutes


def culprit(value: object, dumps: Callable[[Any], bytes]) -> str | None:
    """Describes the innermost part of `value` that `dumps` refuses, with its place. None: the value itself is the
    cause."""
    places: list[str] = []
    seen = {id(value)}
    while len(places) < _DEPTH_MAX:
        for n, (place, part) in enumerate(_parts(value)):
            if n >= _PARTS_MAX or id(part) in seen:
                continue
            if not _pickles(part, dumps):
                seen.add(id(part))
                places.append(place)
                value = part
                break
        else:
            break
    if not places:
        return None
    return f"{' of '.join(reversed(places))} is {shorten(value, 100)} of type {type(value).__qualname__}"


def of_main_script(error: BaseException) -> str | None:
    """Explains the error of plain pickle for a function or class of the main script. None: it is another error."""
    if type(error).__name__ not in ("PicklingError", "AttributeError"):
        return None
    words = describe(error)
    if "pickle" not in words or "__main__" not in words:
        return None
    return (
        "pickle finds functions and classes by their module, and in a worker the main script is no module. So what a "
        "process pool (multiprocessing, concurrent.futures) is to run must be in a module of its own, which the main "
        "script imports; or use threads, or a higher parallelism of the operator, in place of the pool"
    )


def slots_of(cls: type) -> tuple[str, ...]:
    """Returns the names in a class's own `__slots__`, which may also be a single text."""
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _pickles(value: object, dumps: Callable[[Any], bytes]) -> bool:
    try:
        dumps(value)
    except Exception:  # the value's class decides what pickling it raises
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the parts of a value, with words for the place of each."""
    if isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, MethodType):
        yield "the object whose method it is", value.__self__
    elif isinstance(value, functools.partial):
        yield "the function of the partial", value.func
        for i, argument in enumerate(value.args, 1):
            yield f"argument {i} of the partial", argument
        for name, argument in value.keywords.items():
            yield f"the argument {name!r} of the partial", argument
    elif isinstance(value, dict):
        for key, element in value.items():
            yield f"the key {shorten(key, 60)}", key
            yield f"the value at {shorten(key, 60)}", element
    elif isinstance(value, list | tuple | set | frozenset):
        for i, element in enumerate(value):
            yield f"element {i}", element
    if isinstance(value, type):
        for name, attribute in list(vars(value).items()):
            if not (name.startswith("__") and name.endswith("__")) or isinstance(attribute, FunctionType):
                yield f"the class attribute {name!r}", attribute
        for base in value.__bases__:
            yield f"the base class {base.__qualname__}", base
    else:
        yield from _attributes(value)


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    registry = getattr(function, "registry", None)
    if isinstance(registry, MappingProxyType):  # of functools.singledispatch
        for class_, implementation in registry.items():
            yield f"the function that is registered for {getattr(class_, '__qualname__', class_)}", implementation
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"the variable {name!r} that it closes over", cell.cell_contents
        except ValueError:  # the variable has no value yet
            continue
    for name in sorted(_names(function.__code__)):
        if name in function.__globals__:
            yield f"the global variable {name!r} that it uses", function.__globals__[name]
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield "the default of a parameter", default
    for name, attribute in list(vars(function).items()):
        yield f"the attribute {name!r}", attribute


def _names(code: CodeType) -> set[str]:
    """Returns the global names that code uses, also in inner functions. They cannot be told apart from names of
    attributes."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of an object whose class is written in Python."""
    if isinstance(value, FunctionType | MethodType):
        return
    for name, attribute in list(getattr(value, "__dict__", {}).items()):
        yield f"the attribute {name!r}", attribute
    for cls in type(value).__mro__:
        for name in slots_of(cls):
            if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                yield f"the attribute {name!r}", getattr(value, name)
    if type(value).__module__ != "builtins":
        yield f"its class {type(value).__qualname__}", type(value)
