"""The reports of a worker: one record of what is measured of each of its tasks, whoever asks (the status, the paradigm
scheduler, placement), made in one place (docs/papers.md: D2, T12)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import field

from penstock.runtime.event_time.watermark import END_OF_TIME, IDLE
from penstock.runtime.status import Part
from penstock.runtime.transport.hop_meter import Row
from penstock.runtime.transport.hop_times import TimesReport

if TYPE_CHECKING:
    from penstock.runtime.operators.micro_batch import DivertRequest
    from penstock.runtime.worker.task import Task


class DivertLoad(Part, frozen=True):
    """The diversion that a task follows."""

    interval_s: float
    rows_max: int
    life: int  # of Spark


class OperatorReport(Part, frozen=True):
    """The counters of an operator in one task."""

    name: str
    records_in: int = 0
    records_out: int = 0
    skipped: int = 0  # by the error policy
    late: int = 0


class TaskLoad(Part, frozen=True, kw_only=True):
    """The measurements of one task. Counters count since the task was built, or go on from those of its epoch."""

    number: int
    chain: int = 0
    generation: int = 0
    finished: bool = False
    blocked: bool = False
    record_by_record: bool = False  # while this is so, the task cannot be diverted
    queued: int = 0  # records in its inbox, and gathered from there
    backlog: int = 0  # records that are ready at its source and that it has not read, as far as is known
    backlog_known: bool = True  # False: its source cannot tell
    backlog_full: bool = False  # the buffers of its source are full: more records wait than `backlog` says
    under_way: int = 0  # records in micro-batches without an answer
    begun: int = 0  # of those that its first operator has received: how many wait for another function in the same step
    unsent: int = 0  # records in its logs that receivers have not got yet
    # For each chain that it sends to: (the chain's number, records made for it, records of these that were not sent,
    # for how many ns it has stood still because the chain took no more).
    sends: list[tuple[int, int, int, int]] = field(default_factory=list)
    # Of each of its logs: (receiving tasks, records, bytes, messages), counted once, however many tasks receive it.
    sent: list[tuple[list[int | None], int, int, int]] = field(default_factory=list)
    # The least ages of records lately when the task took them and when it had processed them, in ns (LeastAges).
    ages: tuple[int, int] | None = None
    at_ns: int = 0  # when this was so, by the task's clock
    # What it follows, while it has a diversion; None: it processes records, now or as soon as all micro-batches are
    # answered.
    divert: DivertLoad | None = None
    diverted: dict[str, Any] | None = None  # the counters of its present diversion (DiversionStats)
    diversion_failed: tuple[int, str] | None = None  # the last diversion that ended by itself, and why
    answered: int = 0  # the records that Spark has answered, in all diversions of the task
    unprocessed: int = 0  # the records that failed in Spark, and that the task has processed
    busy_ns: int = 0  # for which its steps ran
    cpu_ns: int = 0  # the processor time of its steps
    waits_ns: int = 0  # for which its functions have waited, and not for a core
    threads_ns: int = 0  # the processor time of threads that its functions have started
    operators: list[OperatorReport] = field(default_factory=list)
    skipped_on_the_way: dict[str, int] = field(default_factory=dict)  # by operator to which the records were going
    watermark_ms: int | None = None
    latency_us: dict[int, int] = field(
        default_factory=dict
    )  # the ages of processed records in the last seconds, as a sparse histogram
    latency_all_us: dict[int, int] = field(default_factory=dict)  # the same since the start


class TrafficReport(NamedTuple):
    """The report of a worker for placement: the time by its clock (monotonic, in ns), its tasks, what messages cost,
    and when some of them were sent and had come."""

    at_ns: int
    tasks: list[TaskLoad]
    rows: list[Row]
    times: TimesReport


def divert_load(divert: DivertRequest) -> DivertLoad:
    """Returns the report of a task that follows this request."""
    return DivertLoad(divert.interval_s, divert.rows_max, divert.life)


def task_load(task: Task, target_of: Callable[[int], int | None]) -> TaskLoad:
    """Returns the measurements of a task. It is cheap, because it is asked for several times a second, and other
    threads than the run loop's may call it. `target_of` gives the task at the other end of a channel."""
    diversion = task.diversion  # read once, because it may end meanwhile
    told = None if diversion is None else task.told_to_divert()
    now = task.clock()
    backlog = task.input.backlog()
    logs = list(task.logs)
    mark = task.input.marks.current  # read once, because the loop's thread may change it meanwhile
    return TaskLoad(
        number=task.task.number,
        chain=task.task.chain,
        generation=task.generation,
        finished=task.finished,
        blocked=task.blocked,
        record_by_record=task.passage.record_by_record is not None,
        queued=task.input.queued + task.gathered,
        backlog=backlog or 0,
        backlog_known=backlog is not None,
        backlog_full=task.input.is_full(),
        under_way=0 if diversion is None else diversion.records,
        begun=task.passage.begun,
        unsent=sum(log.unsent(channel) for log in logs for channel in log.channels),
        sends=_sends(task, now),
        sent=[
            ([target_of(channel.number) for channel in log.channels], log.records, log.bytes, log.cache.end)
            for log in logs
        ],
        ages=task.ages.recent(now),
        at_ns=now,
        divert=None if told is None else divert_load(told),
        diverted=None if diversion is None else diversion.story.plain(),
        diversion_failed=task.diversions.failed,
        answered=task.diversions.answered,
        unprocessed=task.diversions.unprocessed,
        busy_ns=task.busy_ns,
        cpu_ns=task.cpu_ns,
        waits_ns=task.waits_ns,
        threads_ns=task.threads_ns,
        operators=[
            OperatorReport(
                stage.context.operator.name, stage.records_in, stage.records_out, stage.errors.skipped, stage.late
            )
            for stage in task.stages
        ],
        skipped_on_the_way=task.outputs.skipped(),
        watermark_ms=None if mark in (IDLE, END_OF_TIME) else mark,
        latency_us=task.latency.recent().sparse(),
        latency_all_us=task.latency.whole().sparse(),
    )


def _sends(task: Task, now: int) -> list[tuple[int, int, int, int]]:
    """Returns the sends of a task, for TaskLoad. Of an exchange to all, each receiver's copy counts."""
    found: dict[int, tuple[int, int, int]] = {}
    for output in task.outputs.all():
        made, held, stopped = found.get(output.target, (0, 0, 0))
        for log in output.logs:
            queued = log.queued()
            made += (log.records + queued) * len(log.channels)
            held += queued * len(log.channels)
            held += sum(log.cache.unsent_records(channel.next) for channel in log.channels)
            stopped = max(stopped, log.stopped(now))
        found[output.target] = made, held, stopped
    return [(chain, *counts) for chain, counts in found.items()]
