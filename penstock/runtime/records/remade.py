"""How objects of the main script are made again that pickle refuses, or would only name.

Pickle refuses a `functools.cached_property` because it holds a lock, up to Python 3.11. And it only names new types,
parameter specifications and functions with a cache, which no other process finds. Each of them is made anew, from what
the user has written. Caches are empty at first.

Open files are refused. cloudpickle would send a copy of what is in the file now, from which each process reads, and
into which it writes, and nobody would hear of it.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable
from functools import cached_property, lru_cache
from io import TextIOWrapper
from operator import attrgetter
from threading import RLock
from types import FunctionType
from typing import Any, Generic, NewType, ParamSpec

_Cached = type(lru_cache(lambda: None))
_OF_TYPING = (NewType, ParamSpec, getattr(typing, "TypeVarTuple", ParamSpec))  # the last one from Python 3.11 on
# In Python 3.11 each generic named tuple has this function of typing's, whose name is that of a method.
_subscribed = getattr(Generic.__class_getitem__, "__func__", None)
_STREAMS = ("stdout", "stderr", "stdin", "__stdout__", "__stderr__", "__stdin__")


def remade(obj: Any, travels: Callable[[str | None], bool]) -> Any:
    """Returns how an object is made again, as `__reduce__` does. NotImplemented: pickle knows better. `travels` tells
    whether the definitions of a module travel."""
    kind: Any = type(obj)
    if kind is TextIOWrapper:
        return _stream(obj)
    if kind is FunctionType and obj is _subscribed:
        return attrgetter("Generic.__class_getitem__.__func__"), (typing,)
    if issubclass(kind, cached_property) and "lock" in vars(obj):  # up to Python 3.11
        return _property, (kind,), {name: value for name, value in vars(obj).items() if name != "lock"}
    if kind is _Cached and travels(obj.__module__):
        return _cached, (obj.__wrapped__, obj.cache_parameters())
    if kind in _OF_TYPING and travels(obj.__module__):
        more = (obj.__supertype__,) if kind is NewType else ()
        return kind, (obj.__name__, *more), (None, {"__module__": obj.__module__})
    return NotImplemented


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
