"""Penstock: a stream processor on Ray. See README.md; the public names are these."""

from __future__ import annotations

from penstock.runtime import sinks, sources, testing
from penstock.runtime.errors import (
    CodecError,
    FlowError,
    JobError,
    JobExists,
    JobFailed,
    JobNotFound,
    KeyTypeError,
    NoCluster,
    NotEnoughResources,
    PenstockError,
    RecordError,
    SnapshotDamaged,
    SourceError,
    StoreError,
    StoreUnreachable,
)
from penstock.runtime.expressions import Expr, coalesce, col, concat, count, lit, mean, when
from penstock.runtime.expressions import max_ as max
from penstock.runtime.expressions import min_ as min
from penstock.runtime.expressions import sum_ as sum
from penstock.runtime.flow import Flow, KeyedStream, Stream, WindowedStream
from penstock.runtime.process import Process, ProcessContext
from penstock.runtime.userfunc import DeadLetter
from penstock.runtime.windows import Sliding, Tumbling

__version__ = "0.1.0"

__all__ = [
    "CodecError",
    "DeadLetter",
    "Expr",
    "Flow",
    "FlowError",
    "Job",
    "JobError",
    "JobExists",
    "JobFailed",
    "JobNotFound",
    "KeyTypeError",
    "KeyedStream",
    "NoCluster",
    "NotEnoughResources",
    "PenstockError",
    "Process",
    "ProcessContext",
    "RecordError",
    "Sliding",
    "SnapshotDamaged",
    "SourceError",
    "StoreError",
    "StoreUnreachable",
    "Stream",
    "Tumbling",
    "WindowedStream",
    "attach",
    "coalesce",
    "col",
    "concat",
    "count",
    "lit",
    "max",
    "mean",
    "min",
    "resume",
    "run",
    "sinks",
    "sources",
    "sum",
    "testing",
    "when",
]


def __getattr__(name: str) -> object:
    """`run`, `resume`, `attach` and `Job` load Ray, which takes a second or more: only when they are used."""
    if name in ("Job", "attach", "resume", "run"):
        from penstock import actors

        return getattr(actors, name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
