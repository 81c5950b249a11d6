"""A task: one parallel instance of a chain of operators, with its inbox and its outputs.

A task never waits and never runs for long: `step` takes up a bounded part of what is ready, runs the chain over the
list, lets the outputs leave, and returns. While a channel cannot take what the task has made the task is not run
(back-pressure); its worker goes on with others. The size of a step adapts so that it takes a few milliseconds at most,
whatever a record costs, so that tasks of a worker stall each other no longer than that (invariant 2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import Any

from penstock.runtime.batch import Batch, concat, split
from penstock.runtime.channel import InChannel, OutChannel
from penstock.runtime.errors import SourceError
from penstock.runtime.metrics import RecentHistogram
from penstock.runtime.operators import Stage
from penstock.runtime.output import Output
from penstock.runtime.plan import TaskId
from penstock.runtime.sources.base import Reader
from penstock.runtime.userfunc import ErrorHandler

# A step aims at this long: long enough to share the fixed cost of a step (some 10 us) among many records, short
# against the milliseconds that a record may take through the flow.
STEP_NS = 4_000_000
_LIMIT_FIRST = 64
_LIMIT_MAX = 8192


class Task:
    """A task fed by channels; see the module's docstring. `outputs` are by (operator, side output or None)."""

    def __init__(self, task: TaskId, name: str, stages: list[Stage], clock: Callable[[], int]) -> None:
        self.task = task
        self.name = name
        self.stages = stages
        self.clock = clock
        self.inputs: dict[int, InChannel] = {}
        self.outputs: dict[tuple[str, str | None], list[Output]] = {}
        self.channels: list[OutChannel] = []
        self.stopwatch: Callable[[], int] = perf_counter_ns  # what a step takes, in ns; decides how large steps are
        self.finished = False
        self.queued = 0  # records in the inbox
        self.busy_ns = 0
        self.latency = RecentHistogram()
        self.edge_errors: list[ErrorHandler] = []  # of what fails between this task and the next
        self._inbox: deque[tuple[int, Batch, int, int]] = deque()
        self._open_inputs = 0
        self._stamp = 0
        self._work: Iterator[Batch] | None = None
        self._work_records = 0
        self._work_ns = 0  # spent in earlier steps on the same work
        self._more = False  # the step's limit, not the input, bounded the work
        self._ending = False
        self._waiting: list[OutChannel] = []
        self._limit = _LIMIT_FIRST
        self._unflushed = False
        self._main: list[Output] = []
        self._sides: list[tuple[list[Any], list[Output]]] = []

    def connect(self) -> None:
        """To be called when inputs and outputs are complete."""
        self._open_inputs = len(self.inputs)
        self._main = self.outputs.get((self.stages[-1].context.operator.name, None), [])
        for stage in self.stages:
            for tag, records in stage.context.side.items():
                self._sides.append((records, self.outputs.get((stage.context.operator.name, tag), [])))

    def open(self) -> None:
        """Open the stages; errors are the operator's own."""
        for stage in self.stages:
            try:
                stage.open()
            except Exception as error:
                raise stage.errors.failure("(opening)", error) from error

    def close(self, failed: bool) -> None:
        """Close the stages, also after an error."""
        first: Exception | None = None
        for stage in self.stages:
            try:
                stage.close(failed)
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    # --- inputs, called by channels and the run loop -----------------------------------------------------------

    def receive(self, channel: int, batch: Batch, stamp: int, cost: int) -> None:
        """Take a batch into the inbox; `cost` bytes of the channel's window are used until it is taken up."""
        self.queued += len(batch)
        self._inbox.append((channel, batch, stamp, cost))

    def receive_end(self, channel: int) -> None:
        """Nothing more comes by this channel."""
        entry = self.inputs[channel]
        assert not entry.ended, f"channel {channel} ended twice"
        entry.ended = True
        self._open_inputs -= 1

    # --- running -----------------------------------------------------------------------------------------------

    @property
    def blocked(self) -> bool:
        """Made what a channel cannot take now."""
        return bool(self._waiting)

    def runnable(self) -> bool:
        """Whether a step would do something."""
        if self.finished:
            return False
        if self._waiting:
            self._waiting = [channel for channel in self._waiting if not channel.flush()]
            if self._waiting:
                return False
        return self._work is not None or self._has_input() or self._at_end()

    def step(self) -> None:
        """Do a bounded part of what is ready; to be called only when runnable."""
        started = self.stopwatch()
        if self._work is None:
            if self._ending:
                self._end()
                return
            if not self._begin():
                return
        assert self._work is not None
        for out in self._work:
            for output in self._main:
                output.emit(out, self._stamp)
            if self._flush_channels() or self.stopwatch() - started > 2 * STEP_NS:
                elapsed = self.stopwatch() - started
                self.busy_ns += elapsed
                self._work_ns += elapsed
                return
        self._work = None
        self._flush_outputs()
        self._flush_channels()
        self._unflushed = True
        elapsed = self.stopwatch() - started
        self.busy_ns += elapsed
        if self._work_records:
            self._measure(self._work_ns + elapsed)
        self._work_ns = 0

    def idle(self) -> None:
        """The task has nothing to do: let sinks write what they hold back."""
        if self._unflushed:
            self._unflushed = False
            for stage in self.stages:
                stage.flush()

    def ready_in(self) -> float | None:
        """Seconds until there may be work without a message or a wake-up; None: never."""
        return None

    def _has_input(self) -> bool:
        return bool(self._inbox)

    def _at_end(self) -> bool:
        return self._open_inputs == 0

    def _begin(self) -> bool:
        """Start on the next part of the input, or on the end; False when there is nothing."""
        if self._inbox:
            batch = self._take()
            self._work_records = len(batch)
            self._work = self._run(batch, 0)
            return True
        if self._at_end():
            self._work_records = 0
            self._work = self._finish()
            self._ending = True
            return True
        return False

    def _take(self) -> Batch:
        """Up to a step's worth of records from the inbox."""
        inbox = self._inbox
        limit = self._limit
        channel, batch, self._stamp, cost = inbox.popleft()
        count = len(batch)
        batches = [batch]
        self.inputs[channel].take(cost)
        while inbox and count + len(inbox[0][1]) <= limit:
            channel, batch, stamp, cost = inbox.popleft()
            self.inputs[channel].take(cost)
            batches.append(batch)
            count += len(batch)
            self._stamp = min(self._stamp, stamp)
        batch = concat(batches)
        if count > limit:
            # The rest goes back without cost: its credit is granted, at most one message above the window.
            batch, rest = split(batch, limit)
            inbox.appendleft((channel, rest, self._stamp, 0))
            count = limit
        self.queued -= count
        self._more = bool(inbox)
        return batch

    def _run(self, batch: Batch, first: int) -> Iterator[Batch]:
        """The outputs of the stages from `first` on, in bounded pieces, none empty."""
        stages = self.stages
        for i in range(first, len(stages)):
            stage = stages[i]
            stage.records_in += len(batch)
            if stage.expands:
                for piece in stage.expand(batch):
                    stage.records_out += len(piece)
                    yield from self._run(piece, i + 1)
                return
            batch = stage.run(batch)
            if not batch:
                return
            stage.records_out += len(batch)
        yield batch

    def _finish(self) -> Iterator[Batch]:
        """The last outputs of every stage, through the stages behind it."""
        self._stamp = self.clock()
        for i, stage in enumerate(self.stages):
            for piece in stage.finish():
                stage.records_out += len(piece)
                yield from self._run(piece, i + 1)

    def _end(self) -> None:
        """All outputs are made: tell the receivers, and be finished when that is on its way."""
        for channel in self.channels:
            channel.end()
        if not self._flush_channels():
            self.finished = True

    def _flush_outputs(self) -> None:
        for outputs in self.outputs.values():
            for output in outputs:
                output.flush()

    def _flush_channels(self) -> bool:
        """Send; True when the task is blocked."""
        for records, outputs in self._sides:
            if records:
                for output in outputs:
                    output.emit(records[:], self._stamp)
                    output.flush()
                records.clear()
        self._waiting = [channel for channel in self.channels if not channel.flush()]
        return bool(self._waiting)

    def _measure(self, elapsed: int) -> None:
        records = self._work_records
        now = self.clock()
        self.latency.add((now - self._stamp) // 1000, records, now)
        if elapsed > 2 * STEP_NS:
            self._limit = max(1, min(records, self._limit) * STEP_NS // elapsed)
        elif elapsed < STEP_NS // 2 and self._more:
            self._limit = min(_LIMIT_MAX, self._limit * 2)


class SourceTask(Task):
    """A task whose input is a reader."""

    reader: Reader  # set before the first step

    def __init__(self, task: TaskId, name: str, stages: list[Stage], clock: Callable[[], int]) -> None:
        super().__init__(task, name, stages, clock)
        self.stopping = False
        self._due: float = 0.0  # clock seconds; when the reader asked to be read again
        self._woken = True

    def stop(self) -> None:
        """End the stream at the next step; what was read goes through."""
        self.stopping = True

    def wake(self) -> None:
        """The reader may have records now."""
        self._woken = True

    def ready_in(self) -> float | None:
        if self.finished or self.blocked or self._due == float("inf"):
            return None
        return max(0.0, self._due - self.clock() / 1e9)

    def close(self, failed: bool) -> None:
        try:
            self.reader.close()
        finally:
            super().close(failed)

    def _has_input(self) -> bool:
        if self._at_end():
            return False
        return self._woken or self.clock() / 1e9 >= self._due

    def _at_end(self) -> bool:
        return self.stopping or self.reader.finished

    def _begin(self) -> bool:
        if self._at_end():
            return super()._begin()
        self._woken = False
        stage = self.stages[0]
        try:
            records = self.reader.read(self._limit)
        except SourceError as error:
            raise stage.errors.failure("(reading)", error) from error  # the input is gone: no policy lets that go
        except Exception as error:
            stage.errors.handle("(reading)", error)
            self.stopping = True  # the policy lets the job go on, without the rest of this reader's input
            return False
        self._due = 0.0
        if len(records) < self._limit:
            wait = self.reader.ready_in()
            self._due = float("inf") if wait is None else self.clock() / 1e9 + wait
        if not records:
            return False
        self._stamp = self.reader.stamp_ns or self.clock()
        self._work_records = len(records)
        self._more = len(records) >= self._limit
        self._work = self._run(records, 0)
        return True
