"""How objects of the main script are made again that pickle refuses, or would only name.

Pickle refuses what holds locks and weak references, also where these are nothing but the inside of something that is
easily made again: a `functools.cached_property`, a `functools.singledispatch` function, a dict with weak keys. And it
only names new types, parameter specifications and functions with a cache, which no other process finds. Each of them
is made anew, from what the user has written. Caches are empty at first.

Open files are refused. cloudpickle would send a copy of what is in the file now, from which each process reads, and
into which it writes, and nobody would hear of it.

What a function or a class refers to may refer to it. So what is pickled as a part of an object (its functions, its
items) is filled in when the object exists.
"""

from __future__ import annotations

import functools
import operator
import sys
import typing
from collections.abc import Callable
from functools import cached_property, lru_cache, singledispatch
from io import TextIOWrapper
from threading import RLock
from types import FunctionType
from typing import Any, Generic, NewType, ParamSpec
from weakref import WeakKeyDictionary, WeakValueDictionary

_Cached = type(lru_cache(lambda: None))
_TypeVarTuple: Any = getattr(typing, "TypeVarTuple", None)  # from Python 3.11 on

# In Python 3.11 each generic named tuple has this function of typing's, whose name is that of a method.
_subscribed = getattr(Generic.__class_getitem__, "__func__", None)

_code_of_dispatching = singledispatch(lambda _: None).__code__  # type: ignore[attr-defined]
_STREAMS = ("stdout", "stderr", "stdin", "__stdout__", "__stderr__", "__stdin__")
_OF_PARAMETERS = ("bound", "covariant", "contravariant")  # of a ParamSpec
_OF_DISPATCHING = ("register", "dispatch", "registry", "_clear_cache")  # attributes that singledispatch itself sets


def remade(obj: Any, travels: Callable[[str | None], bool]) -> Any:
    """Returns how an object is made again, as `__reduce__` does. NotImplemented: pickle knows better. `travels` tells
    whether the definitions of a module travel."""
    kind: Any = type(obj)
    if kind is TextIOWrapper:
        return _stream(obj)
    if issubclass(kind, cached_property) and "lock" in vars(obj):  # up to Python 3.11
        return _property, (kind,), {name: value for name, value in vars(obj).items() if name != "lock"}
    if kind is WeakKeyDictionary or kind is WeakValueDictionary:
        return kind, (), None, None, iter(list(obj.items()))
    if kind is not _Cached and kind is not NewType and kind is not ParamSpec and kind is not _TypeVarTuple:
        return NotImplemented
    module = getattr(obj, "__module__", None)
    if not travels(module):
        return NotImplemented
    if kind is _Cached:
        return _cached, (obj.__wrapped__, obj.cache_parameters())
    found_there = None, {"__module__": module}
    if kind is NewType:
        return NewType, (obj.__name__, obj.__supertype__), found_there
    options = {name: getattr(obj, f"__{name}__") for name in _OF_PARAMETERS if kind is ParamSpec}
    return functools.partial(kind, **options), (obj.__name__,), found_there


def remade_function(function: Any, reduced: Any) -> Any:
    """Returns how a function is made again: as in `reduced`, unless that would send the code of a function of
    `functools.singledispatch` or of typing."""
    if not isinstance(function, FunctionType) or not isinstance(reduced, tuple):
        return reduced
    if function is _subscribed:
        return operator.attrgetter("Generic.__class_getitem__.__func__"), (typing,)
    if function.__code__ is not _code_of_dispatching:
        return reduced
    dispatching: Any = function
    said = {name: getattr(function, name) for name in functools.WRAPPER_ASSIGNMENTS if hasattr(function, name)}
    attributes = {name: value for name, value in vars(function).items() if name not in _OF_DISPATCHING}
    state = said, attributes, dict(dispatching.registry)
    return _dispatching, (function.__name__,), state, None, None, _fill_dispatching


def _stream(file: TextIOWrapper) -> Any:
    """Returns how a standard stream is found in another process. Raises TypeError for other open files."""
    for name in _STREAMS:
        if file is getattr(sys, name):
            return getattr, (sys, name)
    raise TypeError(
        f"cannot pickle the open file {getattr(file, 'name', '')!r}: a worker would read and write a copy of what is "
        "in it now. Open it in the worker: in the function, or in open() or __init__ of a class of which each task "
        "makes an object"
    )


# --- what pickles call: the names of these functions are in what jobs have saved ---------------------------------


def _property(kind: type) -> Any:
    """Returns a cached property without its function, with a lock of its own."""
    made: Any = object.__new__(kind)
    made.lock = RLock()
    return made


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """Returns a function with a cache, which is empty at first."""
    return lru_cache(**parameters)(function)


def _dispatching(name: str) -> Any:
    """Returns a function for which nothing is registered yet."""

    def empty(_: Any) -> None:
        raise NotImplementedError

    empty.__name__ = name  # for errors
    return singledispatch(empty)


def _fill_dispatching(function: Any, state: tuple[dict[str, Any], dict[str, Any], dict[type, Any]]) -> None:
    said, attributes, registered = state
    for class_, implementation in registered.items():
        function.register(class_, implementation)
    for name, value in said.items():
        setattr(function, name, value)
    vars(function).update(attributes)
