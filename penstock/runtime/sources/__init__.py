"""Sources: where a flow's records come from. `ps.sources.TextFiles("logs/*.txt")`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.runtime.mistakes import nearest
from penstock.runtime.sources.base import Reader, Source, SourceContext, Split
from penstock.runtime.sources.files import TextFiles
from penstock.runtime.sources.generator import Generator
from penstock.runtime.sources.json_lines import JsonLines
from penstock.runtime.sources.memory import Memory
from penstock.runtime.sources.pace import parse_rate
from penstock.runtime.sources.sockets import SocketLines

if TYPE_CHECKING:
    from penstock.runtime.sources.arrow import Arrow
    from penstock.runtime.sources.csv_files import Csv
    from penstock.runtime.sources.parquet import Parquet

__all__ = [
    "Arrow",
    "Csv",
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


if not TYPE_CHECKING:  # else every misspelt name would be an object to those who check types

    def __getattr__(name: str) -> object:
        """`Arrow`, `Csv` and `Parquet` load pyarrow, which takes a quarter of a second: only when they are used."""
        if name == "Arrow":
            from penstock.runtime.sources.arrow import Arrow

            return Arrow
        if name == "Csv":
            from penstock.runtime.sources.csv_files import Csv

            return Csv
        if name == "Parquet":
            from penstock.runtime.sources.parquet import Parquet

            return Parquet
        guess = nearest(name, __all__) or f"; it has: {', '.join(__all__)}"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{guess}")


def __dir__() -> list[str]:
    """All public names, also of what is not loaded yet."""
    return sorted({*__all__, *globals()})
