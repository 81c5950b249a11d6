"""The commands of a paradigm scheduler: plain data, which loads neither Spark nor Arrow.

Workers get `DivertTasks`, `UndivertTasks`, `TakeSample` and `GreetBridge`. What carries out the job's other commands
starts and ends Spark (host/carry/spark_runner.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.runtime.operators.micro_batch import DivertRequest
from penstock.runtime.worker.sample import RecordSample, SampleRequest

if TYPE_CHECKING:
    from penstock.bridge.forms import RangeForm  # loads Arrow


@dataclass(frozen=True)
class PrepareSpark:
    """Start Spark, and try these ranges in it. The answer is `spark_ready` or `spark_failed`."""

    life: int
    forms: tuple[RangeForm, ...]


@dataclass(frozen=True)
class CheckSpark:
    """Ask Spark whether it lives. There is no hurry. The answer is `spark_answered` or `spark_failed`."""

    life: int


@dataclass(frozen=True)
class EndSpark:
    """Let Spark end in order, and kill it when it does not. No answer is expected."""

    life: int
    reason: str


@dataclass(frozen=True)
class KillSpark:
    """Kill the processes of Spark. No answer is expected."""

    life: int
    reason: str


@dataclass(frozen=True)
class TryRange:
    """Have Spark, also while it is starting, try the range of a chain on these records. The answer is `range_tried` or
    `trial_failed`."""

    life: int
    chain: int
    sample: RecordSample


@dataclass(frozen=True)
class GreetBridge:
    """Have all workers connect to the bridge of this name on this node, before the first micro-batch is due. No answer
    is expected: a worker that cannot connect, or that starts later, connects when its tasks are diverted."""

    bridge: str
    node: str


@dataclass(frozen=True)
class DivertTasks:
    """Have a worker divert the tasks of a chain to the bridge of this name on this node. The answer is `done` or
    `refused`."""

    worker: int
    number: int
    divert: DivertRequest
    bridge: str
    node: str


@dataclass(frozen=True)
class UndivertTasks:
    """Have a worker's tasks of a chain take up their input as records again. The answer is `done` or `refused`."""

    worker: int
    number: int
    chain: int


@dataclass(frozen=True)
class TakeSample:
    """Ask a worker for records that its tasks of a chain have taken lately. There is no hurry. The answer is `sampled`
    or `not_sampled`."""

    worker: int
    number: int
    request: SampleRequest


@dataclass(frozen=True)
class Warn:
    """Tell the user of something."""

    text: str


@dataclass(frozen=True)
class Note:
    """Write a line into the log, as of the prediction and the outcome of a switch."""

    text: str


#: What one worker is to do. It answers.
WorkerCommand = DivertTasks | UndivertTasks | TakeSample
#: What is to be done about Spark.
SparkCommand = PrepareSpark | CheckSpark | EndSpark | KillSpark | TryRange
Command = WorkerCommand | SparkCommand | GreetBridge | Warn | Note
