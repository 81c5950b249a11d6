"""Sinks: where a flow's records go. `ps.sinks.Files("counts/")`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.runtime.mistakes import nearest
from penstock.runtime.sinks.base import Sink, SinkContext, SinkWriter
from penstock.runtime.sinks.call import Call, Null
from penstock.runtime.sinks.collect import Collect
from penstock.runtime.sinks.console import Console
from penstock.runtime.sinks.files import Files

if TYPE_CHECKING:
    from penstock.runtime.sinks.parquet import Parquet

__all__ = ["Call", "Collect", "Console", "Files", "Null", "Parquet", "Sink", "SinkContext", "SinkWriter"]


if not TYPE_CHECKING:  # else every misspelt name would be an object to those who check types

    def __getattr__(name: str) -> object:
        """`Parquet` loads pyarrow, which takes a quarter of a second: only when it is used."""
        if name == "Parquet":
            from penstock.runtime.sinks.parquet import Parquet

            return Parquet
        guess = nearest(name, __all__) or f"; it has: {', '.join(__all__)}"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{guess}")


def __dir__() -> list[str]:
    """All public names, also of what is not loaded yet."""
    return sorted({*__all__, *globals()})
