"""The diversion of a task: its input goes to Spark in micro-batches, and the answers come back in order
(docs/papers.md: D1, D4, D5).

A *range* consists of the first operators of a task's chain, up to a *position*. While a task is diverted, its input
does not pass the range. It goes to the bridge as Arrow columns, one micro-batch for each interval, and several are
under way at the same time. An answer is what the range would have produced: records, or partial results for the state
downstream. It continues at the position, through the rest of the chain and the task's usual channels, in the order of
the micro-batches. The task processes the records that Spark could not process, from the position before which they
failed (docs/papers.md: D5).

So nothing else changes. Barriers and watermarks keep their places among the micro-batches. An epoch's barrier passes
the task when all micro-batches before it are answered, and recovery does not know about paradigms. When the bridge
cannot answer a micro-batch, for whatever reason (an executor or the bridge has died, a record makes the user's function
fail in Spark), the task processes it as records, by the error policies of its operators, and returns to the record
paradigm. Nothing may be lost or doubled. A micro-batch is kept until it is answered, and so is the input cache of its
interval.

Memory is limited by the number of micro-batches under way and their greatest size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.runtime.event_time.watermark import Watermark
from penstock.runtime.operators.micro_batch import (
    UNDER_WAY_MAX,
    Bridge,
    DiversionStats,
    DivertRequest,
    MicroBatchResult,
)
from penstock.runtime.records.batch import Batch
from penstock.runtime.worker.task_state import TaskState

if TYPE_CHECKING:
    from penstock.runtime.state.keyed import StageState
    from penstock.runtime.worker.task import Task

# The first micro-batch after a switch has this share of the most records, so that the first answer comes soon although
# many records wait.
_FIRST_SHARE = 8

# When Spark could not process more than this share of a diversion's records, and more than so many, the task returns to
# records: Spark most likely lacks what the function of the user needs.
_UNPROCESSED_MAX = 0.5
_UNPROCESSED_LEAST = 100


@dataclass
class _UnderWay:
    """A micro-batch without an answer."""

    input: Any
    records: int
    stamp: int
    answer: Future[MicroBatchResult]
    since: int


@dataclass
class _Barrier:
    """The barrier of an epoch among the micro-batches, with the offsets of what was read before it."""

    epoch: int
    own: StageState | None = field(default=None)


class Diversion:
    """The diverted input of one task; see the module's docstring. Only the loop's thread uses it, except for
    `records`."""

    def __init__(self, task: Task, divert: DivertRequest, bridge: Bridge, wake: Callable[[], None]) -> None:
        self.task = task
        self.divert = divert
        self.story = DiversionStats(task.clock())
        self._bridge = bridge
        self._wake = wake
        self._queue: deque[_UnderWay | _Barrier | Watermark] = deque()
        self._begun = False  # a micro-batch has left
        self._due = 0  # in ns; the time at which the next micro-batch leaves

    @property
    def records(self) -> int:
        """The number of records under way. Other threads may ask for it."""
        return sum(item.records for item in tuple(self._queue) if isinstance(item, _UnderWay))

    @property
    def leaving(self) -> bool:
        """Whether the task takes no more input, and continues with records when everything is answered."""
        return self.task.state is TaskState.RETURNING

    def runnable(self) -> bool:
        """Whether `begin` would do something."""
        if self._queue:
            head = self._queue[0]
            if not isinstance(head, _UnderWay) or head.answer.done():
                return True
        elif self._is_over() or self.task.has_timer_due():
            return True
        task = self.task
        if task.has_barrier_to_take():
            return True
        if self.leaving or self.story.under_way >= UNDER_WAY_MAX or not task.has_input_to_divert():
            return False
        return task.clock() >= self._due

    def ready_in(self) -> float | None:
        """Returns in how many seconds the next micro-batch leaves, or None when that does not depend on the time."""
        if self.leaving or self.story.under_way >= UNDER_WAY_MAX:
            return None
        return max(0.0, (self._due - self.task.clock()) / 1e9)

    def begin(self) -> Iterator[Batch] | None:
        """Takes the next step. Returns the outputs to send, if there are any."""
        while True:
            if self._queue:
                head = self._queue[0]
                if isinstance(head, _Barrier):
                    self._queue.popleft()
                    self.task.pass_diverted_barrier(head.epoch, head.own)
                    return None
                if isinstance(head, Watermark):
                    self._queue.popleft()
                    return self.task.advance_to(head.value)
                if head.answer.done():
                    self._queue.popleft()
                    self.story.under_way -= 1
                    return self._outputs(head)
            elif self._is_over():
                self.task.all_answered()
                return None
            elif self.task.has_timer_due():
                return self.task.fire()
            if not self._take():
                return None

    def _is_over(self) -> bool:
        return not self._queue and (self.leaving or self.task.at_diverted_end())

    def _take(self) -> bool:
        """Takes a barrier, a watermark or a micro-batch from the input. Returns False when there is none."""
        task = self.task
        if task.has_barrier_to_take():
            self._queue.append(_Barrier(*task.take_barrier()))
            return True
        if self.leaving or self.story.under_way >= UNDER_WAY_MAX or not task.has_input_to_divert():
            return False
        now = task.clock()
        if now < self._due:
            return False
        most = self.divert.rows_max if self._begun else max(1, self.divert.rows_max // _FIRST_SHARE)
        input_, records, stamp = task.take_to_divert(most, columns=self.divert.columns)
        if isinstance(input_, Watermark):
            self._queue.append(input_)
            return True
        full = records >= most
        self._due = now if full else now + int(self.divert.interval_s * 1e9)
        if not records:
            return False
        self._begun = True
        answer = self._bridge.submit(self.divert.chain, self.divert.position, input_)
        self._queue.append(_UnderWay(input_, records, stamp, answer, now))
        self.story.under_way += 1
        answer.add_done_callback(lambda _: self._wake())
        return True

    def _outputs(self, item: _UnderWay) -> Iterator[Batch]:
        task = self.task
        task.take_up_diverted(item.records, item.stamp)
        try:
            answer = item.answer.result()
        except Exception as error:  # of Spark, Ray or the bridge: in any case the task processes the records itself
            self.story.failed = f"{type(error).__name__}: {error}"
            task.diversion_failed = (self.story.id, self.story.failed)
            task.undivert()
            return task.run_diverted(item.input)
        story = self.story
        if unprocessed := answer.unprocessed:
            failed = sum(map(len, unprocessed))
            story.unprocessed += failed
            task.unprocessed += failed
            story.failed = unprocessed[0].why
            given = story.records + item.records
            if story.unprocessed > max(_UNPROCESSED_LEAST, _UNPROCESSED_MAX * given):
                why = f"{story.unprocessed:,} of {given:,} records failed in Spark, the last ones by: {story.failed}"
                task.diversion_failed = (story.id, why)
                task.undivert()
        story.batches += 1
        story.records += item.records
        task.answered += item.records
        story.recent.append((story.batches, item.records, (task.clock() - item.since) / 1e9, answer.spark_s))
        return task.continue_from(self.divert.position, answer, item.records)
