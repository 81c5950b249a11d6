"""Computes the progress of a job's tasks since the last look. A switch is decided from these measurements
(docs/papers.md: D2, D3). They are differences of the tasks' counters, which only grow, except that the counters of a
task that was built again begin anew."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.bridge.burst import Observation
from penstock.bridge.cost import MicroBatch
from penstock.runtime.operators.micro_batch import UNDER_WAY_MAX
from penstock.runtime.worker.load import TaskLoad

# The weight of an operator's earlier counts at the next look: magnifications are those of the last ten seconds or so.
_KEPT = 0.975


class OperatorCounts:
    """How many records each operator has received and emitted lately, as far as it ran record by record."""

    def __init__(self) -> None:
        self.lately: dict[str, tuple[float, float]] = {}
        self._last: dict[tuple[int, str], tuple[int, int, bool]] = {}  # by the last look; whether it was diverted

    def take(self, loads: Iterable[TaskLoad]) -> None:
        """Adds the counts since the last look. Diverted tasks are left out, because their operators count only the
        records at the ends of the range."""
        found: dict[str, tuple[int, int]] = {}
        for task in loads:
            diverted = task.diverted is not None
            for name, taken, given in ((of.name, of.records_in, of.records_out) for of in task.operators):
                at = (task.number, name)
                taken_before, given_before, was_diverted = self._last.get(at, (0, 0, False))
                self._last[at] = (taken, given, diverted)
                if not (diverted or was_diverted) and taken >= taken_before and given >= given_before:
                    so_far = found.get(name, (0, 0))
                    found[name] = (so_far[0] + taken - taken_before, so_far[1] + given - given_before)
        for name, (taken, given) in found.items():
            kept = self.lately.get(name, (0.0, 0.0))
            self.lately[name] = (_KEPT * kept[0] + taken, _KEPT * kept[1] + given)

    def forget_tasks(self) -> None:
        """Forgets the numbers of tasks, because tasks have other numbers from now on. Recent counts remain."""
        self._last.clear()


def way_between(senders: Iterable[TaskLoad], receivers: Iterable[TaskLoad]) -> float | None:
    """Returns the seconds that a record without any wait is on its way between tasks (t_dt), or None when they are not
    known. By the least ages of records: the youngest that a receiver has taken are of the youngest that the senders
    have processed."""
    processed = [task.ages[1] for task in senders if task.ages is not None]
    taken = [task.ages[0] for task in receivers if task.ages is not None]
    return max(0, min(taken) - min(processed)) / 1e9 if processed and taken else None


def _more(counts: dict[int, int], number: int, count: int) -> int:
    """Returns by how much a task's counter has grown since the last time, and notes it. A task that was built again
    counts from 0."""
    before = counts.get(number, 0)
    counts[number] = count
    return count - before if count >= before else count


class RangeMeter:
    """Measures one range: the tasks whose input waits before it."""

    def __init__(self) -> None:
        self.records_in_spark = 0  # that Spark has answered
        self.unprocessed = 0  # that failed in Spark, and that the tasks have processed
        self._observed = 0  # of these, by the last observation
        # Of each task by the last observation: records taken in both paradigms, records that waited, ns busy.
        self._done: dict[int, tuple[int, int, int]] = {}
        self._held_back: int | None = None  # by the last observation
        self._answered: dict[int, int] = {}  # of each task: records that Spark has answered
        self._unprocessed: dict[int, int] = {}  # of each task: records that failed in Spark
        self._seen: dict[int, tuple[int, int]] = {}  # of each task: its diversion, and the last micro-batch

    def observe(
        self,
        tasks: Sequence[TaskLoad],
        now: float,
        held_back: int = 0,
        held_up: int = 0,
        receivers: Sequence[TaskLoad] = (),
    ) -> Observation:
        """Returns the work of the tasks since the last observation. `held_back` is what senders hold back for them, and
        `held_up` what waits because other chains take no more (runtime/worker/waiting.py). `receivers` are the tasks
        that they send to."""
        batches = self.take_answers(tasks)
        in_spark, self._observed = self.records_in_spark - self._observed, self.records_in_spark
        more = busy_ns = 0
        waiting, arrivals = held_back, held_back - (held_back if self._held_back is None else self._held_back)
        self._held_back = held_back
        for task in tasks:
            taken, busy = task.operators[0].records_in - task.begun, task.busy_ns
            # What is under way in Spark waits too: it counts as taken when it is answered.
            queue = task.queued + task.backlog + task.under_way + task.begun
            waiting += queue
            # Task by task: one whose worker has missed a look, or was started again, counts from where it was.
            taken_before, queue_before, busy_before = self._done.get(task.number, (taken, queue, busy))
            self._done[task.number] = (taken, queue, busy)
            more += max(0, taken - taken_before)
            arrivals += max(0, taken - taken_before) + queue - queue_before
            busy_ns += max(0, busy - busy_before)
        return Observation(
            now,
            float(waiting),
            held_up=float(min(held_up, waiting)),
            arrivals=float(max(0, arrivals)),
            processed=float(max(0, more - in_spark)),
            busy_s=busy_ns / 1e9 / len(tasks),
            batches=batches,
            way_s=way_between(tasks, receivers),
            answered=float(in_spark),
            full=any(task.backlog_full for task in tasks),
        )

    def take_answers(self, tasks: Iterable[TaskLoad]) -> tuple[MicroBatch, ...]:
        """Counts the records that Spark has answered. Returns the micro-batches by which Spark is measured."""
        tasks = list(tasks)
        batches: list[MicroBatch] = []
        # Tasks share Spark's cores: the micro-batches of each take as much longer, and all together no less. Those of
        # one task have divided the time among them already (runtime/worker/answer_times.py).
        beside = max(1, sum(task.diverted["under_way"] > 0 for task in tasks if task.diverted is not None))
        for task in tasks:
            self.records_in_spark += _more(self._answered, task.number, task.answered)
            self.unprocessed += _more(self._unprocessed, task.number, task.unprocessed)
            story = task.diverted
            if story is None:
                continue
            diversion, last = self._seen.get(task.number, (story["id"], 0))
            if diversion != story["id"]:
                last = 0
            for number, records, seconds, spark_s in story["recent"]:
                if number > last:
                    self._seen[task.number] = (story["id"], number)
                    if number > UNDER_WAY_MAX:  # the first loads and compiles, and others wait with it
                        way_s = None if spark_s is None else max(0.0, seconds - spark_s) / beside
                        batches.append(MicroBatch(records, seconds / beside, way_s))
        return tuple(batches)
