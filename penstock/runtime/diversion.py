"""The operation stream as a task sees it: its input leaves in micro-batches and comes back as answers, in order
(docs/papers.md: D1, D4, D5).

A *range* is the first operators of a task's chain, up to a *position*. While a task is diverted, its input is not run
through the range but handed to the bridge as Arrow columns, a micro-batch an interval, several under way at a time. An
answer is what the range would have made: records, or partial aggregates for the state behind it. It goes on from the
position, through the rest of the chain and the same channels as ever, in the order of the micro-batches.

So nothing else changes: barriers and watermarks keep their places among the micro-batches, an epoch is passed on when
all micro-batches before it are answered, and recovery knows nothing of paradigms. A micro-batch that the bridge cannot
answer, whatever the reason (an executor or the bridge has died, a record makes the user's function fail there), is run
here, as records, by the operators' own error policy: nothing is lost or doubled, and the task goes back to the record
paradigm. The input cache of an interval is the micro-batch itself, kept until it is answered.

Memory is bounded by the micro-batches under way and their greatest size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.runtime.batch import Batch
from penstock.runtime.event_time import Watermark
from penstock.runtime.pickling import dumps, loads

if TYPE_CHECKING:
    from penstock.runtime.state import StageState
    from penstock.runtime.task import Task

# What a micro-batch holds at most: Spark's fixed cost of some tenths of a second is small against that many records.
ROWS_MAX = 500_000

# Micro-batches of a task that are under way at a time: while Spark works on one the next is on its way.
UNDER_WAY_MAX = 2

# Micro-batches of which a task remembers how long they took, for who looks a few times a second.
_RECENT = 32


@dataclass
class Answer:
    """What the range has made of a micro-batch: batches in order, the greatest time that its watermark operator has
    seen, and how many seconds Spark took."""

    batches: list[Batch]
    greatest: int | None = None
    seconds: float = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray carries answers from the bridge to workers, and would pickle records by other means.
        return _answer, (dumps((self.batches, self.greatest, self.seconds)),)


def _answer(data: bytes) -> Answer:
    return Answer(*loads(data))


@dataclass(frozen=True)
class Divert:
    """A range of a chain goes to the operation stream: operators before stage `position`. `interval_s` is that of the
    micro-batches; `columns`: raw input is handed over as columns of its source where that can. `operators`: those of
    the chain, by name, so that nobody with another plan takes it for his; empty: there is one plan only."""

    chain: int
    position: int
    interval_s: float
    columns: bool
    rows_max: int = ROWS_MAX
    operators: tuple[str, ...] = ()

    def concerns(self, chain: int, operators: Iterable[str]) -> bool:
        """Whether a task of this chain, of these operators, is meant."""
        return chain == self.chain and self.operators in ((), tuple(operators))


class Bridge(ABC):
    """What a worker knows of the bridge."""

    @abstractmethod
    def submit(self, chain: int, position: int, input_: Any) -> Future[Answer]:
        """Have a micro-batch of the range before a position answered: a pyarrow RecordBatch of the source's columns, or
        a list of records."""


@dataclass
class Story:
    """What a diverted task has to tell: for status and for decisions."""

    id: int  # tells it from the task's other diversions
    batches: int = 0
    records: int = 0
    under_way: int = 0  # micro-batches, now
    spark_ns: int = 0  # the bridge's own time for them
    waited_ns: int = 0  # from the hand-over to the answer
    failed: str | None = None  # why the last micro-batch had to be run here
    recent: deque[tuple[int, int, float]] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def plain(self) -> dict[str, Any]:
        """As plain data; `recent`: (number, records, seconds from the hand-over to the answer) of each micro-batch."""
        return {**vars(self), "recent": list(self.recent)}


@dataclass
class _UnderWay:
    """A micro-batch."""

    input: Any
    records: int
    stamp: int
    answer: Future[Answer]
    since: int


@dataclass
class _Barrier:
    """The barrier of an epoch among the micro-batches, with what was read before it."""

    epoch: int
    own: StageState | None = field(default=None)


class Diversion:
    """The diverted input of one task; see the module's docstring. Used by the loop's thread, but for `records`."""

    def __init__(self, task: Task, divert: Divert, bridge: Bridge, wake: Callable[[], None]) -> None:
        self.task = task
        self.divert = divert
        self.leaving = False
        self.story = Story(task.clock())
        self._bridge = bridge
        self._wake = wake
        self._queue: deque[_UnderWay | _Barrier | Watermark] = deque()
        self._due = 0  # ns; when the next micro-batch leaves

    @property
    def records(self) -> int:
        """Records under way; other threads may ask."""
        return sum(item.records for item in tuple(self._queue) if isinstance(item, _UnderWay))

    def leave(self) -> None:
        """Take nothing more up; the task goes on with records when all is answered."""
        self.leaving = True

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
        """Seconds until the next micro-batch leaves; None: not because of the time."""
        if self.leaving or self.story.under_way >= UNDER_WAY_MAX:
            return None
        return max(0.0, (self._due - self.task.clock()) / 1e9)

    def begin(self) -> Iterator[Batch] | None:
        """Take the next step; the outputs to send, when there are some."""
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
                self.task.diversion = None
                return None
            elif self.task.has_timer_due():
                return self.task.fire()
            if not self._take():
                return None

    def _is_over(self) -> bool:
        return not self._queue and (self.leaving or self.task.at_diverted_end())

    def _take(self) -> bool:
        """Take up a barrier, a watermark or a micro-batch; False when there is none."""
        task = self.task
        if task.has_barrier_to_take():
            self._queue.append(_Barrier(*task.take_barrier()))
            return True
        if self.leaving or self.story.under_way >= UNDER_WAY_MAX or not task.has_input_to_divert():
            return False
        now = task.clock()
        if now < self._due:
            return False
        input_, records, stamp = task.take_to_divert(self.divert)
        if isinstance(input_, Watermark):
            self._queue.append(input_)
            return True
        full = records >= self.divert.rows_max
        self._due = now if full else now + int(self.divert.interval_s * 1e9)
        if not records:
            return False
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
        except Exception as error:
            self.story.failed = f"{type(error).__name__}: {error}"
            task.diversion_failed = (self.story.id, self.story.failed)
            self.leave()
            return task.run_diverted(item.input)
        story = self.story
        story.batches += 1
        story.records += item.records
        task.answered += item.records
        story.spark_ns += int(answer.seconds * 1e9)
        waited = task.clock() - item.since
        story.waited_ns += waited
        story.recent.append((story.batches, item.records, waited / 1e9))
        return task.go_on_from(self.divert.position, answer, item.records)
