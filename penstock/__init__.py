"""Penstock: a stream processor on Ray. See README.md; the public names are these."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import sinks, sources, testing
from penstock.runtime import expressions
from penstock.runtime.errors import (
    ClusterGone,
    CodecError,
    FlowError,
    JobError,
    JobExists,
    JobFailed,
    JobNotFound,
    KeyTypeError,
    NoCluster,
    NotEnoughResources,
    OptionError,
    PenstockError,
    RecordError,
    SnapshotDamaged,
    SourceError,
    StoreError,
    StoreUnreachable,
    UnfinishedFiles,
    WrongValue,
)
from penstock.runtime.event_time.windows import CountWindow, GlobalWindow, Session, Sliding, Tumbling
from penstock.runtime.expressions import (
    EvaluationError,
    Expr,
    MissingField,
    coalesce,
    col,
    concat,
    count,
    lit,
    mean,
    when,
)
from penstock.runtime.lazy_names import lazy_names
from penstock.runtime.operators.outside_lookup import Reloaded
from penstock.runtime.operators.process import (
    BroadcastProcessFunction,
    CoProcessFunction,
    ProcessContext,
    ProcessFunction,
)
from penstock.runtime.operators.window_functions import AggregateFunction, WindowContext
from penstock.runtime.program.flow import Flow, KeyedStream, Stream, WindowedStream
from penstock.runtime.records.userfunc import DeadLetter
from penstock.runtime.secrets import secret
from penstock.runtime.status import JobStatus

if TYPE_CHECKING:
    from penstock.jobs.job import Job
    from penstock.jobs.run import attach, resume, run
    from penstock.runtime.transport.certificates import Tls

__version__ = "0.1.0"

# Not in __all__: `from penstock import *` must leave Python's own max, min and sum alone.
max = expressions.max_
min = expressions.min_
sum = expressions.sum_

__all__ = [
    "AggregateFunction",
    "BroadcastProcessFunction",
    "ClusterGone",
    "CoProcessFunction",
    "CodecError",
    "CountWindow",
    "DeadLetter",
    "EvaluationError",
    "Expr",
    "Flow",
    "FlowError",
    "GlobalWindow",
    "Job",
    "JobError",
    "JobExists",
    "JobFailed",
    "JobNotFound",
    "JobStatus",
    "KeyTypeError",
    "KeyedStream",
    "MissingField",
    "NoCluster",
    "NotEnoughResources",
    "OptionError",
    "PenstockError",
    "ProcessContext",
    "ProcessFunction",
    "RecordError",
    "Reloaded",
    "Session",
    "Sliding",
    "SnapshotDamaged",
    "SourceError",
    "StoreError",
    "StoreUnreachable",
    "Stream",
    "Tls",
    "Tumbling",
    "UnfinishedFiles",
    "WindowContext",
    "WindowedStream",
    "WrongValue",
    "attach",
    "coalesce",
    "col",
    "concat",
    "count",
    "lit",
    "mean",
    "resume",
    "run",
    "secret",
    "sinks",
    "sources",
    "testing",
    "when",
]

if not TYPE_CHECKING:  # else every misspelt name would be an object to those who check types
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Job": "penstock.jobs.job",
            "Tls": "penstock.runtime.transport.certificates",
            **dict.fromkeys(("attach", "resume", "run"), "penstock.jobs.run"),
        },
        also_in=(sinks, sources),
    )
