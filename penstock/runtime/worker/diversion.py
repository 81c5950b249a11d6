"""The diversion of a task: its input goes to Spark in micro-batches, and the answers come back in order
(docs/papers.md: D1, D4, D5).

A *range* consists of the first operators of a task's chain, up to a *position*. While a task is diverted, its input
does not pass the range. It goes to the bridge as Arrow columns, one micro-batch for each interval, and several are
under way at the same time. An answer is what the range would have produced: records, or partial results for the state
downstream. It continues at the position, through the rest of the chain and the task's usual channels, in the order of
the micro-batches. The task processes the records that Spark could not process, from the position of the operator that
failed: it begins with what this operator got, and the operators before it do nothing twice (docs/papers.md: D5).

Between two micro-batches the task *gathers* its input for the next one. What lies in an inbox is limited by credit, to
some thousand records for each channel, and so are the buffers of a source. If all of an interval's records had to wait
there, a micro-batch would have no more of them, however large the burst.

So nothing else changes. Barriers keep their places among the micro-batches. What was gathered from channels before a
barrier leaves before it. What was gathered from a source leaves after it, because the offsets that are saved are those
before it: so a micro-batch can gather for longer than an epoch. A watermark follows what was gathered before it, and
may follow later records too, which is as if it had come later. An epoch's barrier passes the task when all
micro-batches before it are answered, and recovery does not know about paradigms. When the bridge cannot answer a
micro-batch, for whatever reason (an executor or the bridge has died, a record makes the user's function fail in Spark),
the task processes it as records, by the error policies of its operators, and returns to the record paradigm. What is
gathered when a task returns is processed as records too. Nothing may be lost or doubled. A micro-batch is kept until it
is answered, and so is the input cache of its interval.

Memory is limited by the number of micro-batches under way, the one that is gathered, and their greatest size in records
and bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from penstock.runtime.event_time.watermark import IDLE, Watermark
from penstock.runtime.operators.answer_queue import Answer, AnswerQueue
from penstock.runtime.operators.micro_batch import (
    BYTES_MAX,
    UNDER_WAY_MAX,
    Bridge,
    DiversionStats,
    DivertRequest,
    MicroBatchResult,
    Unprocessed,
)
from penstock.runtime.operators.step_size import StepSize
from penstock.runtime.records.batch import Batch, split
from penstock.runtime.sources.base import bytes_of, rows_of, together
from penstock.runtime.worker.answer_times import AnswerTimes
from penstock.runtime.worker.direct import Barrier, Owner
from penstock.runtime.worker.task_state import TaskState

if TYPE_CHECKING:
    from penstock.runtime.state.keyed import StageState

# The first micro-batch after a switch has this share of the most records, so that the first answer comes soon although
# many records wait.
_FIRST_SHARE = 8

# A source is read so many times in an interval: what its buffers hold is all that comes between two reads.
_READS = 8

# When Spark could not process more than this share of what a diversion's records became, and so more than as many
# records, the task returns to records: Spark most likely lacks what the function of the user needs.
_UNPROCESSED_MAX = 0.5
_UNPROCESSED_LEAST = 100


@dataclass
class _UnderWay(Answer):
    """A micro-batch without an answer. `answer` is None when the task processes it itself, because it returns."""

    input: Any
    records: int
    stamp: int
    answer: Future[MicroBatchResult] | None
    since: int

    def done(self) -> bool:
        return self.answer is None or self.answer.done()


@dataclass
class DiversionTotals:
    """The results of all diversions of a task."""

    failed: tuple[int, str] | None = None  # the last diversion that ended by itself, and why
    answered: int = 0  # the number of records of the task's input that Spark has answered
    unprocessed: int = 0  # of the records sent to Spark, the number of those that failed there


class DivertedOwner(Owner, Protocol):
    """A task, as far as its diversion knows it. `park_at`: the epoch after whose barrier it must stop."""

    clock: Callable[[], int]
    stopwatch: Callable[[], int]
    park_at: int | None
    diversions: DiversionTotals

    def all_answered(self) -> None:
        """Continues with records, because all micro-batches are answered and no more are sent."""


class _Gathered:
    """The records that were taken from the input for the next micro-batch, and the watermarks that follow it."""

    def __init__(self) -> None:
        self.records = 0
        self.bytes = 0
        self.stamp = 0
        self.marks: list[Watermark] = []
        self._parts: list[Any] = []  # one list of records, or several RecordBatches

    def add(self, part: Any, records: int, stamp: int) -> None:
        """Adds a list of records, or a RecordBatch of them. Nobody may have changed the list when this returns, nor is
        it changed here."""
        is_list = isinstance(part, list)
        if self._parts and is_list != isinstance(self._parts[0], list):  # the source has changed its mind
            if is_list:
                self._parts = [[record for columns in self._parts for record in rows_of(columns)]]
            else:
                part, is_list = rows_of(part), True
        if is_list and self._parts:
            self._parts[0] += part
        else:
            self._parts.append(part[:] if is_list else part)
        self.stamp = min(self.stamp, stamp) if self.records else stamp
        self.bytes += bytes_of(part)
        self.records += records

    def mark(self, mark: Watermark) -> None:
        """Adds a watermark. A later one takes the place of the earlier ones, but when all channels are idle, the last
        one still holds."""
        if mark.value != IDLE:
            self.marks = [mark]
        elif not self.marks or self.marks[-1].value != IDLE:
            self.marks.append(mark)

    def input(self) -> Any:
        """Returns everything, as one micro-batch."""
        return self._parts[0] if isinstance(self._parts[0], list) else together(self._parts)


class Diverted:
    """Processes the input of a task in Spark; see the module's docstring. Only the loop's thread uses it, except for
    `records` and `gathered`."""

    def __init__(self, task: DivertedOwner, divert: DivertRequest, bridge: Bridge, wake: Callable[[], None]) -> None:
        self.divert = divert
        self.story = DiversionStats(task.clock())
        self._task = task
        self._input = task.input
        self._passage = task.passage
        self._clock = task.clock
        self._bridge = bridge
        self._wake = wake
        self._queue = AnswerQueue[_UnderWay, Barrier | Watermark]()
        self._next = _Gathered()
        self._before: StageState | None = None  # the offsets of a source before what is gathered
        self._begun = False  # a micro-batch has left
        self._barrier: int | None = None  # the epoch of the last barrier that was taken
        self._times = AnswerTimes()
        self._given_back = 0  # the number of records of a micro-batch that wait for their step
        self._lost = 0.0  # the number of records that would have made all that Spark could not process
        self._due = 0  # in ns; the time at which the next micro-batch leaves
        self._read_at = 0  # in ns; the time at which a source is read again

    @property
    def records(self) -> int:
        """The number of records under way. Other threads may ask for it."""
        return sum(item.records for item in self._queue.answers())

    @property
    def gathered(self) -> int:
        """The number of records that wait for the next micro-batch to leave, or for their step because the task has to
        process them after all. Other threads may ask for it."""
        return self._next.records + self._given_back

    @property
    def stops(self) -> bool:
        """Whether the barrier was taken after which the task is to stop. Nothing is taken or sent after it."""
        return self._barrier is not None and self._barrier == self._task.park_at

    @property
    def leaving(self) -> bool:
        """Whether the task takes no more input, and continues with records when everything is answered."""
        return self._task.life.state is TaskState.RETURNING

    def runnable(self) -> bool:
        if self._passage.held:
            return True
        if self._queue:
            if self._queue.ready():
                return True
        elif not self.stops and (self._is_over() or self._passage.timer_due()):
            return True
        return not self.stops and (self._can_take_barrier() or self._can_leave() or self._can_gather())

    def ready_in(self) -> float | None:
        """Returns in how many seconds the next micro-batch leaves, a source is to be read, or a stage has something to
        do, or None when that does not depend on the time."""
        if self.stops:
            return None
        due = self._passage.ready_in()
        if self.leaving:
            return due
        times = []
        if self._next.records and self._has_room:
            times.append(self._due)
        if self._input.is_read and not self._is_full and not self._input.at_end():
            times.append(self._read_at)
        own = max(0.0, (min(times) - self._clock()) / 1e9) if times else None
        return own if due is None else due if own is None else min(due, own)

    def begin(self) -> Iterator[Batch] | Barrier | None:
        """Takes the next step. Returns the outputs to send, which may be none, or a barrier."""
        if self._passage.held:
            return self._passage.let_go_now(everything=True)
        return self._begin() or iter(())

    def measure(self, records: int, elapsed_ns: int, *, more: bool) -> None:
        """Notes nothing, because the steps of micro-batches are measured one by one."""

    def _begin(self) -> Iterator[Batch] | Barrier | None:
        while True:
            if self._queue:
                head = self._queue.take()
                if isinstance(head, Barrier):
                    return head
                if isinstance(head, Watermark):
                    return self._passage.advance_to(head.value)
                if head is not None:
                    return self._outputs(head)
            elif self.stops:
                return None
            elif self._is_over():
                self._task.all_answered()
                return None
            elif self._passage.timer_due():
                return self._passage.fire()
            if self.stops or not self._take():
                return None

    def _is_over(self) -> bool:
        return not self._queue and not self._next.records and (self.leaving or self._input.at_end())

    @property
    def _rows_max(self) -> int:
        return self.divert.rows_max if self._begun else max(1, self.divert.rows_max // _FIRST_SHARE)

    @property
    def _is_full(self) -> bool:
        return self._next.records >= self._rows_max or self._next.bytes >= BYTES_MAX

    @property
    def _has_room(self) -> bool:
        """Whether one more micro-batch may be under way."""
        return self.story.under_way < UNDER_WAY_MAX

    def _can_take_barrier(self) -> bool:
        return self._input.has_barrier() and (self._input.is_read or not self._next.records)

    def _can_leave(self) -> bool:
        """Whether the gathered records are a micro-batch now."""
        if not self._next.records:
            return False
        if self.leaving:
            return True
        input_ = self._input
        barrier = input_.has_barrier() and not input_.is_read
        return self._has_room and (self._is_full or self._clock() >= self._due or barrier or input_.at_end())

    def _can_gather(self) -> bool:
        input_ = self._input
        if self.leaving or self._is_full or input_.has_barrier() or not input_.has_input_to_divert():
            return False
        return not input_.is_read or self._clock() >= self._read_at

    def _take(self) -> bool:
        """Takes a barrier, or input, or has a micro-batch leave. Returns False when there is nothing to do."""
        if self._can_leave():
            self._leave()
        elif self._can_take_barrier():
            own = self._before if self._next.records else self._input.own_state()
            self._barrier = self._input.take_barrier()
            self._queue.mark(Barrier(self._barrier, own))
        elif self._can_gather():
            self._gather()
        else:
            return False
        return True

    def _gather(self) -> None:
        following = self._next
        most = self._rows_max - following.records
        if not following.records:
            self._before = self._input.own_state()
        input_, records, stamp = self._input.take_to_divert(most, columns=self.divert.columns)
        self._read_at = self._clock() + int(self.divert.interval_s / _READS * 1e9)
        if isinstance(input_, Watermark):
            if following.records:
                following.mark(input_)
            else:
                self._queue.mark(input_)
        elif records:
            following.add(input_, records, stamp)

    def _leave(self) -> None:
        """Puts the gathered records behind the micro-batches under way."""
        following, now = self._next, self._clock()
        input_ = following.input()
        item = _UnderWay(input_, following.records, following.stamp, None, now)
        if not self.leaving:
            self._due = now + int(self.divert.interval_s * 1e9)
            if self._is_full:  # more waits
                self._due = self._read_at = now
            self._times.submitted(now)
            item.answer = self._bridge.submit(self.divert.chain, self.divert.position, input_)
            self._begun = True
            self.story.under_way += 1
        self._queue.put(item)
        self._next = _Gathered()
        for mark in following.marks:
            self._queue.mark(mark)
        if item.answer is not None:
            item.answer.add_done_callback(lambda _: self._wake())

    def _outputs(self, item: _UnderWay) -> Iterator[Batch]:
        totals = self._task.diversions
        self._input.take_up_diverted(item.records, item.stamp)
        if item.answer is None:
            return self.run_as_records(item.input)
        self.story.under_way -= 1
        try:
            answer = item.answer.result()
        except Exception as error:  # of Spark, Ray or the bridge: in any case the task processes the records itself
            self._times.answered(self._clock(), item.records, item.since, None, alone=True)
            self.story.failed = f"{type(error).__name__}: {error}"
            self._give_up(self.story.failed)
            return self.run_as_records(item.input)
        if self.doubts(answer):
            self._times.answered(self._clock(), item.records, item.since, None, alone=True)
            return self.run_as_records(item.input)
        story = self.story
        if unprocessed := answer.unprocessed:
            failed = sum(map(len, unprocessed))
            story.unprocessed += failed
            totals.unprocessed += failed
            story.failed = unprocessed[0].why
            given = story.records + item.records
            self._lost += lost_share(answer, item.records) * item.records
            if self._lost > max(_UNPROCESSED_LEAST, _UNPROCESSED_MAX * given):
                why = f"{self._lost:,.0f} of {given:,} records failed in Spark, the last ones by: {story.failed}"
                self._give_up(why)
        story.batches += 1
        story.records += item.records
        totals.answered += item.records
        first = story.batches == 1  # it may load and compile, which the next ones do not
        cost = self._times.answered(self._clock(), item.records, item.since, answer.spark_s, alone=first)
        if cost is not None:
            story.recent.append((story.batches, *cost))
        return self._continue_from(answer, item.records)

    def _give_up(self, why: str) -> None:
        """Has the task return to records, because Spark fails."""
        self._task.diversions.failed = (self.story.id, why)
        self._task.life.move("undivert")

    def run_as_records(self, input_: Any) -> Iterator[Batch]:
        """Yields the outputs of a micro-batch that the task had to process itself."""
        return self._in_steps(input_ if isinstance(input_, list) else rows_of(input_), 0)

    def _in_steps(self, batch: Batch, first: int) -> Iterator[Batch]:
        """Yields the outputs of the stages from `first` on for a batch that is larger than the task would take for one
        step. After each part of a step's size comes an empty output, so that the other tasks have their turn."""
        passage, stopwatch = self._passage, self._task.stopwatch
        if first == len(passage.stages):
            yield batch
            return
        # The limit of steps is for all stages. What the last ones can do in a step is not known.
        size = self._input.size
        if first:
            size = StepSize()
            size.limit = 1
        while batch:
            part, batch = split(batch, size.limit if first else self._input.step_limit())
            self._given_back = 0 if first else len(batch)
            outputs = passage.run(part, first) if first else passage.through(part)
            took = 0
            while True:
                began = stopwatch()
                out = next(outputs, None)
                took += stopwatch() - began
                if out is None:
                    break
                yield out
            if first or not passage.gathering:
                size.measure(len(part), took, bool(batch))
            yield []

    def doubts(self, answer: MicroBatchResult) -> bool:
        """Returns whether the task must process the records of an answer itself, to find out the meaning of their
        times."""
        greatest = answer.greatest
        stages = self._passage.stages[: self.divert.position]
        return greatest is not None and any(stage.doubts(greatest) for stage in stages)

    def _continue_from(self, answer: MicroBatchResult, records: int) -> Iterator[Batch]:
        """Yields the outputs of an answer, after they have passed the stages after the range."""
        passage, position = self._passage, self.divert.position
        stages = passage.stages[:position]
        one_to_one = [stage.context.operator.one_to_one for stage in stages]
        for stage, (taken, given) in zip(stages, answer.counted(one_to_one, records), strict=False):
            stage.records_in += taken
            stage.records_out += given
        for batch in answer.batches:
            if isinstance(batch, Unprocessed):  # the stages count these records themselves
                yield from self._in_steps(batch.records, batch.position)
            else:
                yield from self._in_steps(batch, position)
        if answer.greatest is not None:
            for stage in stages:
                stage.observe(answer.greatest)
        if passage.marking:
            yield from passage.advance()


def lost_share(answer: MicroBatchResult, records: int) -> float:
    """Returns the share of a micro-batch that Spark could not process to the end. An operator may make many records of
    one, or one of many, so what came back from each position counts by its share of all that had come there."""
    came_back = Counter[int]()
    for batch in answer.unprocessed:
        came_back[batch.position] += len(batch)
    passed = 1.0
    for position, back in came_back.items():
        if position in answer.counts:
            reached = answer.counts[position][0] + back
        elif position - 1 in answer.counts:
            reached = answer.counts[position - 1][1]
        else:
            reached = records
        passed *= 1.0 - min(1.0, back / max(1, reached))
    return 1.0 - passed
