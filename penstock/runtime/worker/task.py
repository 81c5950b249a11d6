"""A task: one parallel instance of a chain of operators, with its inbox and its outputs.

A task never waits and never runs for long: `step` takes up a bounded part of what is ready, runs the chain over the
list, lets the outputs leave, and returns. While a channel cannot take what the task has made the task is not run
(back-pressure); its worker goes on with others. The size of a step adapts so that it takes a few milliseconds at most,
whatever a record costs, so that tasks of a worker stall each other no longer than that (invariant 2); or a few times
what it costs whatever its size (runtime/operators/step_size.py).

Some stages *gather* records from one step to the next, so that a call of the user's function gets more of them. What
they hold goes before anything but records: a barrier, a watermark, the end, the operation stream.

In a job with epochs a task saves its state when its inbox is aligned on a barrier, and once more when it ends, between
two steps: a snapshot is never taken of a step that is half done. It tells `on_snapshot`, which must encode the states
before it returns.

The table `TASK` (runtime/worker/task_state.py; docs/states.md draws it) has the states of a task's life: `step` and
`runnable` go by them, and a command that is impossible in a state is refused.

In a job with event time a task also passes on watermarks (runtime/event_time/watermark.py), behind all outputs of
what it had taken up before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from time import perf_counter_ns, time
from typing import Any

from penstock.runtime.errors import RecordError
from penstock.runtime.event_time.watermark import END_OF_TIME, Watermark, Watermarks
from penstock.runtime.exchange.channel import InChannel, OutChannel
from penstock.runtime.exchange.inbox import Inbox
from penstock.runtime.exchange.output import Output
from penstock.runtime.lifecycle import Machine
from penstock.runtime.operators.base import Gathering, Stage, run_stages
from penstock.runtime.operators.micro_batch import Bridge, DivertRequest, MicroBatchResult
from penstock.runtime.operators.step_size import STEP_NS, StepSize
from penstock.runtime.program.plan import TaskId
from penstock.runtime.records.batch import Batch, concat, singly, split
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.sources.base import rows_of
from penstock.runtime.state.keyed import Counters, SavedState, StageState
from penstock.runtime.worker.blackbox import MADE, Poison, RecordByRecord
from penstock.runtime.worker.diversion import Diversion
from penstock.runtime.worker.metrics import RecentHistogram
from penstock.runtime.worker.task_state import AT_END, AT_REST, TASK, TaskState

# Members of an Enum are slow to look up in some releases of Python.
_MADE, _READY, _RUNNING, _PARKED = TaskState.MADE, TaskState.READY, TaskState.RUNNING, TaskState.PARKED
_ENDING, _DRAINING, _FINISHED, _CLOSED = TaskState.ENDING, TaskState.DRAINING, TaskState.FINISHED, TaskState.CLOSED


@dataclass
class Snapshot:
    """What a task saves at a barrier or, `finished`, at its end: each operator's state (None: it has none) and
    counters; at its end without keyed maps. `whole`: the states do not build on those saved before. `quiet`: no record
    has moved since then. `parked`: the task has stopped behind the barrier."""

    task: TaskId
    generation: int
    epoch: int
    finished: bool
    whole: bool
    quiet: bool
    parked: bool
    states: dict[str, tuple[StageState | None, Counters]]


@dataclass(frozen=True)
class Steps:
    """How a task divides its work. `stopwatch`: what a step takes, in ns, which decides how large steps are (None: this
    process's performance counter). `waits_for_more`: records that stages gather wait for the records that come next.
    `barriers_let_go`: gathered records do not wait for what comes after a barrier."""

    stopwatch: Callable[[], int] | None = None
    waits_for_more: bool = True
    barriers_let_go: bool = True


@dataclass(frozen=True)
class TaskOptions:
    """How a task fits into its job. `generation`: of the recovery that made it. `epoch`: the last complete one then.
    `event_time`: the job's tasks pass on watermarks. `on_snapshot`: takes what the task saves (None: the job has no
    epochs). `on_motion`: is told, with the generation, of the first record after a quiet snapshot. `wall`: the clock of
    timers, in seconds since 1970."""

    generation: int = 0
    epoch: int = 0
    event_time: bool = False
    on_snapshot: Callable[[Snapshot], None] | None = None
    on_motion: Callable[[TaskId, int], None] | None = None
    wall: Callable[[], float] = time
    steps: Steps = Steps()


class Task:
    """A task fed by channels; see the module's docstring. `outputs` are by (operator, side output or None)."""

    def __init__(
        self, task: TaskId, name: str, stages: list[Stage], clock: Callable[[], int], options: TaskOptions
    ) -> None:
        self.task = task
        self.name = name
        self.stages = stages
        self.clock = clock
        self.inputs: dict[int, InChannel] = {}
        self.outputs: dict[tuple[str, str | None], list[Output]] = {}
        self.channels: list[OutChannel] = []
        self._stopwatch = options.steps.stopwatch or perf_counter_ns
        self._waits_for_more = options.steps.waits_for_more
        self._barriers_let_go = options.steps.barriers_let_go
        self._life = Machine(TASK, f"task {name}")
        self.queued = 0  # records in the inbox
        self.busy_ns = 0
        self.latency = RecentHistogram()
        self.edge_errors: list[ErrorHandler] = []  # of what fails between this task and the next
        self._skipped_before: dict[str, int] = {}  # there, until the epoch that it goes on from
        self.inbox = Inbox()
        self.on_snapshot = options.on_snapshot
        self.on_motion = options.on_motion
        self.generation = options.generation
        self.epoch = options.epoch  # of the last barrier that it passed on
        self.whole_next = True  # the next snapshot must hold everything
        self.wall = options.wall
        self.timed: list[Stage] = [stage for stage in stages if stage.timed]
        self.event_time = options.event_time
        self.marks = Watermarks()
        self._marking = any(stage.event_time for stage in stages)
        self.gathering = [stage for stage in stages if isinstance(stage, Gathering)]
        self._mark_in: int | None = None  # the watermark before the stages
        self._mark_out: int | None = None  # and behind them
        self._mark_sent: int | None = None
        self.diversion: Diversion | None = None  # set when DIVERTED or RETURNING
        self.diversion_failed: tuple[int, str] | None = None  # the last diversion that ended by itself, and why
        self.answered = 0  # records of its input, by the operation stream
        self._own_diverted: StageState | None = None  # what a source had read at a barrier that is passed on later
        self._divert: tuple[DivertRequest, Bridge, Callable[[], None]] | None = None  # from the next barrier on
        self.record_by_record: RecordByRecord | None = None  # set in a task that has died in a step before
        self._has_fired = False  # timers, and has taken up nothing since
        self._stamp = 0
        self._work: Iterator[Batch] | None = None
        self._work_records = 0
        self._work_ns = 0  # spent in earlier steps on the same work
        self._held_before = 0  # by stages that gather, when the work began
        self._gathered = (0, 0)  # records that were only gathered, by earlier works, and the ns that these took
        self._more = False  # the step's limit, not the input, bounded the work
        self._moved = -1  # records at the last snapshot
        self.park_at: int | None = None  # the epoch behind whose barrier the task is to stop, as it is to move
        self._rested = False  # the last snapshot was quiet: epochs are rare until the next record is told of
        # Channels that wait for room or credit. This is no state: a task may be blocked in every state.
        self._waiting: list[OutChannel] = []
        self._size = StepSize()
        self._unflushed = False
        self._main: list[Output] = []
        self._sides: list[tuple[list[Any], list[Output]]] = []

    def connect(self) -> None:
        """To be called when inputs and outputs are complete."""
        self.inbox.open = {number for number, channel in self.inputs.items() if not channel.ended}
        self._main = self.outputs.get((self.stages[-1].context.operator.name, None), [])
        for stage in self.stages:
            for tag, records in stage.context.side.items():
                self._sides.append((records, self.outputs.get((stage.context.operator.name, tag), [])))
        for stage in self.gathering:
            stage.gather(self.clock, self._stopwatch)

    def add_input(self, channel: InChannel) -> None:
        """Receive by this channel, instead of one of the same number if there is one."""
        self.inputs[channel.number] = channel

    def add_output(
        self, operator: str, side: str | None, output: Output, errors: ErrorHandler, instead_of: Output | None = None
    ) -> None:
        """Send what an operator gives, or one of its side outputs, by this output too, or instead of another one.
        `errors`: of what fails between this task and the next."""
        self.edge_errors.append(errors)
        self.channels += output.channels
        outputs = self.outputs.setdefault((operator, side), [])
        if instead_of is None:
            outputs.append(output)
        else:
            outputs[outputs.index(instead_of)] = output

    def remove_channels(self, channels: Iterable[OutChannel]) -> None:
        """Send nothing more by these channels."""
        for channel in channels:
            self.channels.remove(channel)

    def replace_channel(self, old: OutChannel, new: OutChannel) -> None:
        """Send by another channel from now on what went by this one."""
        self.channels[self.channels.index(old)] = new
        for output in (output for outputs in self.outputs.values() for output in outputs):
            output.channels[:] = [new if channel is old else channel for channel in output.channels]

    def channels_changed(self) -> None:
        """To be called when channels were replaced."""
        self._waiting = [channel for channel in self.channels if not channel.flush()]

    def open(self) -> None:
        """Open the stages; errors are the operator's own."""
        self._life.move("open")
        for stage in self.stages:
            try:
                stage.open()
            except BaseException as error:
                raise stage.errors.failure("(opening)", error) from error

    def close(self, failed: bool) -> None:
        """Close the stages, also after an error."""
        self._life.move("close")
        first: Exception | None = None
        for stage in self.stages:
            try:
                stage.close(failed)
            except BaseException as error:
                first = first or (error if isinstance(error, Exception) else stage.errors.failure("(closing)", error))
        if first is not None:
            raise first

    # --- inputs, called by channels and the run loop -----------------------------------------------------------

    def receive(self, channel: int, batch: Batch, stamp: int, cost: int) -> None:
        """Take a batch into the inbox; `cost` bytes of the channel's window are used until it is taken up."""
        self.queued += len(batch)
        self.inbox.put(channel, batch, stamp, cost)

    def receive_barrier(self, channel: int, epoch: int) -> None:
        """What comes after this by the channel belongs to the next epoch."""
        self.inbox.put_barrier(channel, epoch)

    def receive_watermark(self, channel: int, value: int) -> None:
        """What comes after this by the channel is of this time or late; IDLE: of any time."""
        if self._life.state not in AT_END:  # one that had ended before it was made again hears what it has heard
            self.inbox.put(channel, Watermark(value), 0, 0)

    def receive_end(self, channel: int) -> None:
        """Nothing more comes by this channel."""
        self.inputs[channel].ended = True
        if self.event_time and self._life.state not in AT_END:
            self.inbox.put(channel, Watermark(END_OF_TIME), 0, 0)
        self.inbox.put_end(channel)

    # --- running -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> TaskState:
        """What the task does; other threads may ask."""
        return self._life.state

    @property
    def opened(self) -> bool:
        """Whether its operators were opened, and are to be closed."""
        return self._life.state is not _MADE

    @property
    def finished(self) -> bool:
        """Whether all that it has made has been sent; other threads may ask."""
        return self._life.state is _FINISHED

    @property
    def blocked(self) -> bool:
        """Made what a channel cannot take now."""
        return bool(self._waiting)

    def runnable(self) -> bool:
        """Whether a step would do something."""
        state = self._life.state
        if state is _FINISHED or state is _CLOSED:
            return False
        if self._waiting:
            self._waiting = [channel for channel in self._waiting if not channel.flush()]
            if self._waiting:
                return False
        if state is not _RUNNING and state is not _READY:
            return self._runnable_otherwise(state)
        return (
            self._work is not None
            or self._has_input()
            or self._has_barrier()
            or self._at_end()
            or (bool(self.timed) and self._timer_due())
            or (bool(self.gathering) and self._has_waited())
        )

    def _runnable_otherwise(self, state: TaskState) -> bool:
        """As `runnable`, of a task that does not take up its input as records."""
        if state is _PARKED or state is _MADE:
            return False
        if self.diversion is None:  # it has its end to say
            return True
        return self._work is not None or self.held > 0 or self.diversion.runnable()

    @property
    def held(self) -> int:
        """Records that its stages have gathered; other threads may ask."""
        return sum(stage.held for stage in self.gathering)

    def step(self) -> None:
        """Do a bounded part of what is ready; to be called only when runnable."""
        started = self._stopwatch()
        if self._work is None:
            state = self._life.state
            if state is _READY:
                self._life.move("start")
            elif state is _ENDING or state is _DRAINING:
                self._end()
                return
            if self.gathering:
                self._held_before = self.held
                for stage in self.gathering:
                    stage.holds = self.record_by_record is None
            barrier = self._barriers_let_go and self._has_barrier()
            if self._held_before and (self.diversion is not None or barrier):
                self._work_records = 0
                self._stamped(self.clock())
                self._work = self._let_go(everything=True)
            elif self.diversion is not None:
                self._work_records = 0
                self._work = self.diversion.begin()
                if self._work is None:
                    self.busy_ns += self._stopwatch() - started
                    return
            elif self._has_barrier():
                self._pass_barrier()
                self.busy_ns += self._stopwatch() - started
                return
            elif not self._begin():
                return
        assert self._work is not None
        for out in self._work:
            for output in self._main:
                output.emit(out, self._stamp)
            if self._flush_channels() or self._stopwatch() - started > 2 * STEP_NS:
                elapsed = self._stopwatch() - started
                self.busy_ns += elapsed
                self._work_ns += elapsed
                return
        self._work = None
        self._flush_outputs()
        if self._mark_out != self._mark_sent and self.event_time:
            self._send_mark()
        self._flush_channels()
        self._unflushed = True
        elapsed = self._stopwatch() - started
        self.busy_ns += elapsed
        if self._work_records or self._held_before:
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
        if self._waiting or self._life.state in AT_REST:
            return None
        due = None if self.diversion is None else self.diversion.ready_in()
        for stage in self.gathering:
            if stage.held:
                waits = max(0, stage.waits_until - self.clock()) / 1e9
                due = waits if due is None else min(due, waits)
        if not self.timed:
            return due
        first = min((at for stage in self.timed if (at := stage.next_timer()) is not None), default=None)
        if first is None:
            return due
        timer = max(0.0, first - self.wall())
        return timer if due is None else min(due, timer)

    def _timer_due(self) -> bool:
        now = self.wall()
        return any((at := stage.next_timer()) is not None and at <= now for stage in self.timed)

    def _timers_turn(self) -> bool:
        # In turn with the input: one that is set for now whenever it fires must not stop the job. At the end all fire.
        if not self.timed or self._at_end() or (self._has_fired and self._has_input()):
            return False
        return self._timer_due()

    def _has_waited(self) -> bool:
        """What some stage has gathered should wait no longer."""
        return any(stage.held and stage.waits_until <= self.clock() for stage in self.gathering)

    def _has_input(self) -> bool:
        return bool(self.inbox.ready)

    def _has_more(self) -> bool:
        """Records come next."""
        inbox = self.inbox.ready
        return bool(inbox) and not isinstance(inbox[0][1], Watermark)

    def _has_barrier(self) -> bool:
        return self.inbox.aligned

    def _at_end(self) -> bool:
        return self.inbox.at_end

    def _begin(self) -> bool:
        """Start on the next part of the input, or on the end; False when there is nothing."""
        if self._timers_turn():
            self._has_fired = True
            self._work_records = 0
            self._work = self.fire()
            return True
        self._has_fired = False
        if self.event_time and self._take_marks():
            self._work_records = 0
            self._work = self.advance_to(self.marks.current)
            return True
        if self.inbox.ready:
            batch = self._take(self._step_limit())
            self._work_records = len(batch)
            self._stamped(self._stamp)
            self._work = self._through(batch)
            return True
        if self._at_end():
            self._work_records = 0
            self._work = self._finish()
            self._life.move("input ended")
            return True
        return self._begin_to_let_go()

    def _begin_to_let_go(self) -> bool:
        """Nothing comes to what stages have gathered: let go what need not wait for more."""
        if not self._held_before:
            return False
        self._work_records = 0
        self._stamped(self.clock())
        self._work = self._let_go()
        return True

    def _stamped(self, stamp: int) -> None:
        """What comes to the stages now has this stamp; what they gathered before may be older."""
        self._stamp = stamp
        for stage in self.gathering:
            stage.stamp = self._stamp
            if stage.held:
                self._stamp = min(self._stamp, stage.oldest)

    def _step_limit(self) -> int:
        """How many records a step takes up: where they are gathered first of all, so many that the calls are full."""
        limit = self._size.limit
        if self.gathering and self.gathering[0] is self.stages[0]:
            wanted, call = self.gathering[0].wants()
            return wanted if limit < wanted else limit - (limit - wanted) % call
        return limit

    def _take(self, limit: int) -> Batch:
        """Up to so many records from the inbox."""
        inbox = self.inbox.ready
        channel, first, stamp, cost = inbox.popleft()
        most = limit
        if self.record_by_record is not None:
            self.record_by_record.origin, most = channel, 0  # the records of one channel at a time
        assert not isinstance(first, Watermark)
        self._stamp = stamp
        count = len(first)
        batches = [first]
        self.inputs[channel].take(cost)
        while inbox and count < most and not isinstance(following := inbox[0][1], Watermark):
            if count + len(following) > most and not self.gathering:
                break  # what is split costs more than a step that is not full
            channel, _, stamp, cost = inbox.popleft()
            self.inputs[channel].take(cost)
            batches.append(following)
            count += len(following)
            self._stamp = min(self._stamp, stamp)
        batch = concat(batches)
        if count > limit:
            # The rest goes back without cost: its credit is granted, at most one message above the window.
            batch, rest = split(batch, limit)
            inbox.appendleft((channel, rest, stamp, 0))
            count = limit
        self.queued -= count
        self._more = bool(inbox)
        return batch

    def _take_marks(self) -> bool:
        """Take the watermarks that are next in the inbox; True when the task's own has changed."""
        inbox = self.inbox.ready
        changed = False
        while inbox and isinstance(mark := inbox[0][1], Watermark):
            changed |= self.marks.take(inbox[0][0], mark.value, self.inputs)
            if self.marks.again:
                break
            inbox.popleft()
        return changed

    def advance_to(self, mark: int | None) -> Iterator[Batch]:
        """The outputs that the task's next watermark lets go. The end of time comes with the task's own end: some stage
        may have records to say there."""
        self._stamped(self.clock())
        if mark != END_OF_TIME:
            self._mark_in = mark
        return self._advance()

    def _advance(self) -> Iterator[Batch]:
        """The outputs that the task's watermark lets go, through the stages behind."""
        mark = self._mark_in
        for i, stage in enumerate(self.stages):
            if stage.event_time or isinstance(stage, Gathering):
                for piece in stage.advance(mark):
                    stage.records_out += len(piece)
                    yield from self._run(piece, i + 1)
                mark = stage.watermark(mark)
        self._mark_out = mark

    def _send_mark(self) -> None:
        """Pass the watermark on; to be called when all outputs that belong before it are in the channels."""
        self._mark_sent = self._mark_out
        assert self._mark_out is not None
        self._emit_sides()
        for channel in self.channels:
            channel.watermark(self._mark_out)

    def _through(self, batch: Batch) -> Iterator[Batch]:
        """The outputs for a batch, and those that a watermark lets go which it has brought."""
        return self._through_and_behind(batch) if self._marking or self.gathering else self._run(batch, 0)

    def _through_and_behind(self, batch: Batch) -> Iterator[Batch]:
        yield from self._run(batch, 0)
        yield from self._let_go()
        if self._marking:
            yield from self._advance()

    def _let_go(self, everything: bool = False) -> Iterator[Batch]:
        """The outputs for records that stages have gathered and need not, or must not (`everything`), hold longer."""
        for stage in self.gathering:
            if not stage.held:
                continue
            more = self._waits_for_more and self._has_more()
            overdue = everything or not stage.holds or (stage.more_until if more else stage.waits_until) <= self.clock()
            if overdue or not more:
                for piece in stage.let_go(1 if overdue else stage.least):
                    stage.records_out += len(piece)
                    yield from self._run(piece, self.stages.index(stage) + 1)

    def _run(self, batch: Batch, first: int) -> Iterator[Batch]:
        """The outputs of the stages from `first` on, in bounded pieces, none empty."""
        record_by_record = self.record_by_record
        return (
            run_stages(self.stages, batch, first)
            if record_by_record is None
            else self._run_record_by_record(record_by_record, batch, first)
        )

    def _run_record_by_record(self, record_by_record: RecordByRecord, batch: Batch, first: int) -> Iterator[Batch]:
        """As `_run`, but record by record, each noted before an operator gets it (runtime/worker/blackbox.py)."""
        for one in singly(batch):
            record_by_record.next(record_by_record.origin if first == 0 else MADE)
            yield from self._one_by_one(record_by_record, one, first)

    def _one_by_one(self, record_by_record: RecordByRecord, batch: Batch, position: int) -> Iterator[Batch]:
        """What comes of one record: `batch` is that record, or what the operators before `position` made of it."""
        if position == len(self.stages):
            yield batch
            return
        stage = self.stages[position]
        for one in singly(batch):
            try:
                record_by_record.check(position, one)
            except Poison as poison:
                stage.errors.handle(one[0] if isinstance(one, list) else one.values[0], poison)
                continue
            stage.records_in += 1
            for piece in stage.expand(one) if stage.expands else (stage.run(one),):
                if piece:
                    stage.records_out += len(piece)
                    yield from self._one_by_one(record_by_record, piece, position + 1)

    def fire(self) -> Iterator[Batch]:
        """The outputs of timers that are due, through the stages behind."""
        self._stamped(self.clock())
        now = self.wall()
        for stage in self.timed:
            position = self.stages.index(stage)
            for piece in stage.fire(now):
                stage.records_out += len(piece)
                yield from self._run(piece, position + 1)
        yield from self._let_go()
        if self._marking:
            yield from self._advance()

    def _finish(self) -> Iterator[Batch]:
        """The last outputs of every stage, through the stages behind it."""
        self._stamped(self.clock())
        for i, stage in enumerate(self.stages):
            last = chain(stage.advance(END_OF_TIME), stage.finish()) if stage.event_time else stage.finish()
            for piece in last:
                stage.records_out += len(piece)
                yield from self._run(piece, i + 1)

    def _end(self) -> None:
        """All outputs are made: tell the receivers, and be finished when that is on its way."""
        if self._life.state is _ENDING:
            self._life.move("say the end")
            for channel in self.channels:
                channel.end()
            if self.on_snapshot is not None:
                self._save(self.epoch + 1, finished=True)
        if not self._flush_channels():
            self._life.move("sent")

    # --- epochs ------------------------------------------------------------------------------------------------

    def restore(self, epoch: int, saved: dict[str, SavedState], *, finished: bool, whole_next: bool) -> None:
        """Go on from what was saved at a complete epoch; to be called once, behind open(). `finished`: the task had
        ended then."""
        self._life.move("restore its end" if finished else "restore")
        self.epoch = epoch
        self.whole_next = whole_next
        own = {stage.context.operator.name for stage in self.stages}
        self._skipped_before = {name: state.counters[2] for name, state in saved.items() if name not in own}
        for stage in self.stages:
            state = saved.get(stage.context.operator.name, SavedState())
            stage.records_in, stage.records_out, stage.errors.skipped, stage.late = state.counters
            try:
                stage.restore(epoch, state)
            except RecordError:
                raise
            except BaseException as error:
                raise stage.errors.failure(f"(going back to epoch {epoch})", error) from error
        if self._marking:
            self._work_records = 0
            self._work = self._advance()  # those behind it learn the watermark, also when no record comes

    def complete(self, epoch: int) -> None:
        """An epoch is complete: commit it, and keep nothing for going back before it."""
        for channel in self.channels:
            channel.complete(epoch)
        for stage in self.stages:
            stage.commit(epoch)
        if self.record_by_record is not None and not self.record_by_record.completed(epoch):
            self.record_by_record = None

    def park(self, epoch: int) -> None:
        """Stop behind this epoch's barrier, as the task is to move; without effect when the barrier has passed."""
        if self._life.move("ask to park"):
            self.park_at = epoch

    def save_whole(self) -> None:
        """Let the next snapshot hold everything, as an earlier one cannot be read."""
        self.whole_next = True

    def run_record_by_record(self, record_by_record: RecordByRecord) -> None:
        """Take records one by one, each noted before an operator gets it; to be called before the first step."""
        if self._life.move("take records one by one"):
            self.record_by_record = record_by_record

    def unpark(self) -> None:
        """The task does not move: go on."""
        self._life.move("unpark")
        self.park_at = None  # also when the barrier has not come yet

    def _pass_barrier(self) -> None:
        epoch = self.inbox.epoch
        self._save(epoch, finished=False)
        self.inbox.go_on()
        self._switch()

    # --- the operation stream ----------------------------------------------------------------------------------

    def divert(self, divert: DivertRequest, bridge: Bridge, wake: Callable[[], None], *, at_once: bool) -> None:
        """Send the input through the operation stream: from the next barrier on, or at once."""
        if not self._life.move("ask to divert"):
            return
        if self.diversion is not None:
            # Answers are under way that go on from where the range ended when it left.
            self.diversion.divert = replace(divert, position=self.diversion.divert.position)
        elif self.record_by_record is None:  # in which each record has to be noted
            self._divert = (divert, bridge, wake)
            if at_once:
                self._switch()

    def undivert(self) -> None:
        """Take the input up as records again, as soon as all micro-batches are answered."""
        self._divert = None  # also when the next barrier has not come yet
        self._life.move("undivert")

    def all_answered(self) -> None:
        """All micro-batches are answered, and no more are to be sent: go on with records."""
        self.diversion = None
        self._life.move("answered")

    def told_to_divert(self) -> DivertRequest | None:
        """The diversion that the input follows, or will follow from the next barrier on. None: the input is processed
        as records, or will be when all micro-batches are answered. Other threads may ask."""
        # In this order, because each changes before those after it, and a request becomes a diversion.
        returning, waiting, diversion = self._life.state is TaskState.RETURNING, self._divert, self.diversion
        if diversion is not None:
            return None if returning else diversion.divert
        return None if waiting is None else waiting[0]

    def _switch(self) -> None:
        """Send the input through the operation stream from here on, if that was asked for."""
        if self._divert is not None and self.diversion is None:
            self._life.move("divert")
            self.diversion = Diversion(self, *self._divert)
        self._divert = None

    def backlog(self) -> int:
        """Records that wait outside of the inbox, as far as is known."""
        return 0

    def has_barrier_to_take(self) -> bool:
        """The next barrier could take its place behind the micro-batches."""
        return self._has_barrier()

    def take_barrier(self) -> tuple[int, StageState | None]:
        """Take the next barrier out of the way of what follows it: (epoch, what the first stage has to save)."""
        epoch = self.inbox.epoch
        self.inbox.go_on()
        return epoch, None

    def pass_diverted_barrier(self, epoch: int, own: StageState | None) -> None:
        """All micro-batches before a barrier are answered: save the state and pass it on."""
        self._own_diverted = own
        self._save(epoch, finished=False)
        self._own_diverted = None

    def has_input_to_divert(self) -> bool:
        """There may be input for a micro-batch."""
        return bool(self.inbox.ready)

    def at_diverted_end(self) -> bool:
        """No input is left."""
        return self._at_end()

    def take_to_divert(self, divert: DivertRequest) -> tuple[Any, int, int]:
        """(input of a micro-batch, its records, its stamp), or a watermark that is next."""
        inbox = self.inbox.ready
        if isinstance(inbox[0][1], Watermark):
            self._take_marks()
            current = self.marks.current
            return (Watermark(current), 0, 0) if current is not None else ([], 0, 0)
        batch = self._take(divert.rows_max)
        assert isinstance(batch, list), "a range never begins behind a key grouping"
        return batch, len(batch), self._stamp

    def take_up_diverted(self, records: int, stamp: int) -> None:
        """The answer to so many records is next."""
        self._stamped(stamp)
        self._work_records = records

    def has_timer_due(self) -> bool:
        """Some stage has a timer that is due."""
        return bool(self.timed) and self._timer_due()

    def run_diverted(self, input_: Any) -> Iterator[Batch]:
        """The outputs of a micro-batch that had to be run here."""
        return self._through(input_ if isinstance(input_, list) else rows_of(input_))

    def go_on_from(self, position: int, answer: MicroBatchResult, records: int) -> Iterator[Batch]:
        """The outputs of an answer through the stages behind the range."""
        self.stages[0].records_in += records
        if position > 1:
            self.stages[0].records_out += records
        for batch in answer.batches:
            self.stages[position - 1].records_out += len(batch)
            yield from self._run(batch, position)
        if answer.greatest is not None:
            for stage in self.stages[:position]:
                stage.observe(answer.greatest)
        if self._marking:
            yield from self._advance()

    def _save(self, epoch: int, finished: bool) -> None:
        """Save the state as of now, and pass the barrier on."""
        assert self.on_snapshot is not None
        self.epoch = epoch
        if self.record_by_record is not None:
            self.record_by_record.passed(epoch)
        whole = self.whole_next or finished or any(stage.wants_whole() for stage in self.stages)
        self.whole_next = False
        states = {}
        for stage in self.stages:
            counters = (stage.records_in, stage.records_out, stage.errors.skipped, stage.late)
            state = self._state_of(stage, epoch, whole)
            if finished and state is not None:
                # Its keys are done with. And the coordinator keeps this snapshot alone: it must build on no other.
                state = StageState(own=state.own)
            states[stage.context.operator.name] = (state, counters)
        for name, skipped in self.skipped_on_the_way().items():
            states[name] = (None, (0, 0, skipped, 0))
        moved = sum(stage.records_in + stage.records_out for stage in self.stages)
        quiet, self._moved = moved == self._moved, moved
        self._rested = quiet and not finished
        # What goes to the operation stream is answered behind the barrier too: it cannot stop there.
        parked = self.park_at == epoch and self._life.state is _RUNNING and self._divert is None
        if parked:
            self._life.move("park", f"epoch {epoch}")
        self.on_snapshot(Snapshot(self.task, self.generation, epoch, finished, whole, quiet, parked, states))
        if not finished:
            for channel in self.channels:
                channel.barrier(epoch)
            self._flush_channels()

    def skipped_on_the_way(self) -> dict[str, int]:
        """Records that failed between this task and the next and were let go, by the operator that they were to go
        to."""
        skipped = dict(self._skipped_before)
        for errors in self.edge_errors:
            skipped[errors.operator] = skipped.get(errors.operator, 0) + errors.skipped
        return {name: records for name, records in skipped.items() if records}

    def _state_of(self, stage: Stage, epoch: int, whole: bool) -> StageState | None:
        return stage.snapshot(epoch, whole)

    def _flush_outputs(self) -> None:
        for outputs in self.outputs.values():
            for output in outputs:
                output.flush()

    def _flush_channels(self) -> bool:
        """Send; True when the task is blocked."""
        self._emit_sides()
        self._waiting = [channel for channel in self.channels if not channel.flush()]
        return bool(self._waiting)

    def _emit_sides(self) -> None:
        for records, outputs in self._sides:
            if records:
                for output in outputs:
                    output.emit(records[:], self._stamp)
                    output.flush()
                records.clear()

    def _measure(self, elapsed: int) -> None:
        if self._rested:
            self._rested = False
            if self.on_motion is not None:
                self.on_motion(self.task, self.generation)
        records = self._work_records
        gone = records
        if self.gathering:
            gone += self._held_before - self.held
            # Steps that gather cost nothing; one that calls the user's function costs what it does for all of them.
            records, elapsed = records + self._gathered[0], elapsed + self._gathered[1]
            self._gathered = (records, elapsed) if gone <= 0 else (0, 0)
        if gone > 0:
            now = self.clock()
            self.latency.add((now - self._stamp) // 1000, gone, now)
            if records:
                self._size.measure(records, elapsed, self._more)
