"""Lazy names: public names of a package whose modules are loaded when a name is first used. These modules load
libraries (pyarrow, Ray) for a quarter of a second and more, which `import penstock` must never do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from sys import modules
from types import ModuleType

from penstock.runtime.mistakes import nearest


def lazy_names(
    package: str, homes: Mapping[str, str], *, also_in: Collection[ModuleType] = (), plugins: str | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Returns the `__getattr__` and the `__dir__` of a package. `homes`: by name, the module that defines it.
    `also_in`: modules whose public names are mentioned to a user who looks for one of them here. `plugins`: the group
    of entry points by which packages that are installed add names of their own."""

    @functools.cache  # it reads the metadata of all packages that are installed
    def added() -> dict[str, EntryPoint]:
        return {} if plugins is None else {one.name: one for one in entry_points(group=plugins)}

    def get(name: str) -> object:
        if name in homes:
            return getattr(import_module(homes[name]), name)
        if not name.startswith("_") and (plugin := added().get(name)) is not None:
            return plugin.load()
        for module in also_in:
            if name in module.__all__:
                raise AttributeError(f"module {package!r} has no attribute {name!r}; it is {module.__name__}.{name}")
        guess = nearest(name, names()) or f"; it has: {', '.join(modules[package].__all__)}"
        raise AttributeError(f"module {package!r} has no attribute {name!r}{guess}")

    def names() -> list[str]:
        """Returns all names, also names that are not loaded yet."""
        return sorted({*vars(modules[package]), *homes, *added()})

    return get, names
