"""The load of a task: the few counters by which the paradigm scheduler decides (docs/papers.md: D2), and what a worker
reports for placement (docs/papers.md: T12)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from penstock.runtime.transport.hop_meter import Row
from penstock.runtime.transport.hop_times import TimesReport

if TYPE_CHECKING:
    from penstock.runtime.operators.micro_batch import DivertRequest
    from penstock.runtime.worker.task import Task


class TrafficReport(NamedTuple):
    """The report of a worker for placement: the time by its clock (monotonic, in ns), what each of its tasks uses and
    sends (RunLoop.traffic), what messages cost, and when some of them were sent and had come."""

    at_ns: int
    tasks: list[dict[str, Any]]
    rows: list[Row]
    times: TimesReport


class DivertLoad(TypedDict):
    """The diversion that a task follows."""

    interval_s: float
    rows_max: int
    life: int  # of Spark


class TaskLoad(TypedDict):
    """The load of one task, as plain data."""

    number: int
    chain: int
    finished: bool
    record_by_record: bool  # while this is so, the task cannot be diverted
    queued: int  # records in its inbox, and gathered from there
    backlog: int  # records that are ready at its source and that it has not read, as far as is known
    backlog_known: bool  # False: its source cannot tell
    backlog_full: bool  # the buffers of its source are full: more records wait than `backlog` says
    under_way: int  # records in micro-batches without an answer
    begun: int  # of those that its first operator has received: how many wait for another function in the same step
    # For each chain that it sends to: (the chain's number, records made for it, records of these that were not sent,
    # for how many ns it has stood still because the chain took no more).
    sends: list[tuple[int, int, int, int]]
    # The least ages of records lately when the task took them and when it had processed them, in ns (LeastAges).
    ages: tuple[int, int] | None
    at_ns: int  # when this was so, by the task's clock
    # What it follows, while it has a diversion; None: it processes records, now or as soon as all micro-batches are
    # answered.
    divert: DivertLoad | None
    diverted: dict[str, Any] | None  # the counters of its present diversion (DiversionStats)
    diversion_failed: tuple[int, str] | None  # the last diversion that ended by itself, and why
    answered: int  # the records that Spark has answered, in all diversions of the task
    unprocessed: int  # the records that failed in Spark, and that the task has processed
    busy_ns: int
    operators: list[Any]  # (name, records in, records out)


def divert_load(divert: DivertRequest) -> DivertLoad:
    """Returns the report of a task that follows this request."""
    return {"interval_s": divert.interval_s, "rows_max": divert.rows_max, "life": divert.life}


def task_load(task: Task) -> TaskLoad:
    """Returns the task's load. It is cheap, because it is asked for several times a second, and other threads than the
    run loop's may call it."""
    diversion = task.diversion  # read once, because it may end meanwhile
    told = None if diversion is None else task.told_to_divert()
    now = task.clock()
    backlog = task.input.backlog()
    return {
        "number": task.task.number,
        "chain": task.task.chain,
        "finished": task.finished,
        "record_by_record": task.passage.record_by_record is not None,
        "queued": task.input.queued + task.gathered,
        "backlog": backlog or 0,
        "backlog_known": backlog is not None,
        "backlog_full": task.input.is_full(),
        "under_way": 0 if diversion is None else diversion.records,
        "begun": task.passage.begun,
        "sends": _sends(task, now),
        "ages": task.ages.recent(now),
        "at_ns": now,
        "divert": None if told is None else divert_load(told),
        "diverted": None if diversion is None else diversion.story.plain(),
        "diversion_failed": task.diversions.failed,
        "answered": task.diversions.answered,
        "unprocessed": task.diversions.unprocessed,
        "busy_ns": task.busy_ns,
        "operators": [(stage.context.operator.name, stage.records_in, stage.records_out) for stage in task.stages],
    }


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
