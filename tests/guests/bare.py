"""Makes the package importable in a guest, which has neither its libraries nor its native core. To be imported first.

The package itself names everything that users need, so it stands here without its names. Modules that need nothing but
the standard library and pyverbs work then.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType


class _NativeCore(ModuleType):
    """The ring's Python part names classes of the native core when it is loaded. Nothing in a guest uses a ring."""

    def __getattr__(self, name: str) -> type[Exception]:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {})


def _make_bare() -> None:
    found = importlib.util.find_spec("penstock")
    assert found is not None
    bare = ModuleType("penstock")
    bare.__path__ = list(found.submodule_search_locations or ())
    sys.modules["penstock"] = bare
    sys.modules["penstock.runtime._native"] = _NativeCore("penstock.runtime._native")


if "penstock" not in sys.modules:
    _make_bare()
