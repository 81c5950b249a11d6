"""Messages for mistakes in the use of the Flow API: they name the nearest thing that exists.

This module is only for the time in which a flow is built. Nothing in it may be called for each record.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar, cast

from penstock.runtime.errors import FlowError, shorten

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])

#: What `**options` of a method stands for.
OPTIONS = ("name", "parallelism", "on_error", "num_gpus", "resources")

# The names of other libraries, and the names that they have here.
_ELSEWHERE = {
    "add_sink": ".write(sink)",
    "apply": ".map(fn)",
    "assign": ".with_columns(name=expression)",
    "assign_timestamps_and_watermarks": ".watermark(time)",
    "collect": ".write(penstock.sinks.Collect())",
    "drop_duplicates": ".key_by(...).process(fn), with the keys seen as state",
    "execute": "penstock.run(flow)",
    "flatMap": ".flat_map(fn)",
    "for_each": ".write(penstock.sinks.Call(fn))",
    "foreach": ".write(penstock.sinks.Call(fn))",
    "from_collection": ".read(penstock.sources.Memory(records))",
    "groupBy": ".key_by(selector)",
    "group_by": ".key_by(selector)",
    "groupby": ".key_by(selector)",
    "join": ".lookup(table, on=...) for a static table",
    "keyBy": ".key_by(selector)",
    "mapPartitions": ".map_batches(fn)",
    "map_partitions": ".map_batches(fn)",
    "print": ".write(penstock.sinks.Console())",
    "run": "penstock.run(flow)",
    "show": ".write(penstock.sinks.Console())",
    "sink_to": ".write(sink)",
    "take": ".write(penstock.sinks.Collect())",
    "to": ".write(sink)",
    "where": ".filter(...)",
    "withColumn": ".with_columns(name=expression)",
    "with_column": ".with_columns(name=expression)",
    "write_parquet": ".write(penstock.sinks.Parquet(folder))",
}


class NoSuchMethod(FlowError, AttributeError):
    """The object has no method of this name. This is an AttributeError too, so that hasattr() says that there is
    none."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'name'?" when a known name is similar to the word, and otherwise nothing."""
    found = get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def checks_options(cls: type[C]) -> type[C]:
    """Lets the public methods of a class refuse arguments that they do not take, and say which ones they take."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method):
            if name == "__init__":
                checks_init(cls)
            elif not name.startswith("_"):
                setattr(cls, name, refusing(method))
    return cls


def checks_init(cls: type) -> None:
    """Lets a class refuse arguments that its __init__ does not take."""
    if "__init__" in vars(cls):
        cls.__init__ = refusing(vars(cls)["__init__"], cls.__name__)  # type: ignore[misc]


def refusing(function: F, name: str | None = None) -> F:
    """Returns a function that raises FlowError for arguments that it does not take. `name` is what users call it."""
    signature = inspect.signature(function)
    parameters = [each for each in signature.parameters.values() if each.name != "self"]
    known = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    rest = [each.name for each in parameters if each.kind is each.VAR_KEYWORD]
    if rest == ["options"]:
        known += OPTIONS
    chosen = rest not in ([], ["options"])  # the user chooses the names of results
    name = name or function.__name__
    takes = ", ".join(known) or "no options"
    if chosen:
        takes += ", and any name=result"

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        for option, value in options.items():
            if option in known or (chosen and not (isinstance(value, str | int) and nearest(option, known))):
                continue
            guess = nearest(option, known) or ";"
            raise FlowError(f"{name}() has no option {option!r}{guess} it takes: {takes}")
        try:
            signature.bind(*args, **options)
        except TypeError as error:
            raise FlowError(f"{name}(): {error}; it takes: {takes}") from None
        return function(*args, **options)

    return cast(F, checked)


def no_method(owner: object, name: str, others: Mapping[str, str]) -> AttributeError:
    """Returns the error for a method that an object does not have. `others`: methods that belong elsewhere, and what to
    write instead."""
    cls = type(owner)
    if name.startswith("_"):
        return AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")
    own = [each for each in dir(cls) if not each.startswith("_")]
    if name in others:
        advice = f": {others[name]}"
    elif name in _ELSEWHERE:
        advice = f"; write {_ELSEWHERE[name]}"
    else:
        advice = nearest(name, own) or f"; it has: {', '.join(own)}"
    return NoSuchMethod(f"a {cls.__name__} has no method {name!r}{advice}")


def called(value: object) -> str:
    """Describes the object that a user gave in place of something else, and the likely mistake."""
    if isinstance(value, type):
        return f"the class {value.__name__} itself; make an object of it: {value.__name__}(...)"
    if inspect.isroutine(value):
        name = getattr(value, "__name__", "it")
        return f"the function {name} itself; is a pair of brackets missing: {name}(...)?"
    return f"{shorten(value)} of type {type(value).__name__}"
