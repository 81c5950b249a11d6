"""Sources: where a flow's records come from. `ps.sources.TextFiles("logs/*.txt")`.

For a source of your own, derive from `Source` and `Reader`; `Split` and `SourceContext` are what they are given.
docs/flows.md has an example.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.runtime.lazy_names import lazy_names
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
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Arrow": "penstock.runtime.sources.arrow",
            "Csv": "penstock.runtime.sources.csv_files",
            "Parquet": "penstock.runtime.sources.parquet",
        },
        plugins="penstock.sources",
    )
