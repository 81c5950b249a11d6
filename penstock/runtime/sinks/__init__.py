"""Sinks: where a flow's records go. `ps.sinks.Files("counts/")`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.runtime.lazy_names import lazy_names
from penstock.runtime.sinks.base import Committable, Sink, SinkCommitter, SinkContext, SinkWriter
from penstock.runtime.sinks.call import Call, Null
from penstock.runtime.sinks.collect import Collect
from penstock.runtime.sinks.console import Console
from penstock.runtime.sinks.files import Files

if TYPE_CHECKING:
    from penstock.runtime.sinks.parquet import Parquet

__all__ = [
    "Call",
    "Collect",
    "Committable",
    "Console",
    "Files",
    "Null",
    "Parquet",
    "Sink",
    "SinkCommitter",
    "SinkContext",
    "SinkWriter",
]

if not TYPE_CHECKING:  # else every misspelt name would be an object to those who check types
    __getattr__, __dir__ = lazy_names(__name__, {"Parquet": "penstock.runtime.sinks.parquet"}, plugins="penstock.sinks")
