"""Sources: where a flow's records come from. `ps.sources.TextFiles("logs/*.txt")`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.runtime.sources.base import Reader, Source, SourceContext, Split
from penstock.runtime.sources.files import TextFiles
from penstock.runtime.sources.generator import Generator
from penstock.runtime.sources.json_lines import JsonLines
from penstock.runtime.sources.memory import Memory
from penstock.runtime.sources.pace import parse_rate
from penstock.runtime.sources.sockets import SocketLines

if TYPE_CHECKING:
    from penstock.runtime.sources.arrow import Arrow
    from penstock.runtime.sources.parquet import Parquet

__all__ = [
    "Arrow",
    "Generator",
    "JsonLines",
    "Memory",
    "Parquet",
    "Reader",
    "SocketLines",
    "Source",
    "SourceContext",
    "Split",
    "TextFiles",
    "parse_rate",
]


def __getattr__(name: str) -> object:
    """`Arrow` and `Parquet` load pyarrow, which takes a quarter of a second: only when they are used."""
    if name == "Arrow":
        from penstock.runtime.sources.arrow import Arrow

        return Arrow
    if name == "Parquet":
        from penstock.runtime.sources.parquet import Parquet

        return Parquet
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
