"""A task: one parallel instance of a chain of operators, with its input and its outputs (docs/papers.md: A1).

A task never waits, and never runs for long. `step` takes a limited part of what is ready, runs the chain over the list,
sends the outputs, and returns. While a channel cannot take the outputs, the task is not run (back-pressure), and its
worker runs the others. The size of a step adapts, so that a step takes at most a few milliseconds, whatever a record
costs, or a few times its fixed cost (runtime/operators/step_size.py). So the tasks of a worker delay each other no
longer than that.

The task decides about nothing but its life, and puts its parts together: an input (task_input.py), a way of processing
it (direct.py, diversion.py), the passage of the chain's stages (passage.py), and outputs (task_outputs.py). Records
that stages have gathered are processed before anything else than records: a barrier, a watermark, the end, the
operation stream.

A stage may be *pending*: its work goes on outside of the task's thread. Then the task takes up only as many records as
there is room for, collects what has come of earlier ones, and has not ended before nothing is under way. A barrier does
not wait for what is under way, because the stage saves it.

In a job with epochs, a task saves its state when a barrier comes next in its input, and once more when it ends. This
happens between two steps, because a snapshot must never show a step that is half done. The task passes the snapshot to
`on_snapshot`, which must encode the states before it returns.

The table `TASK` (runtime/worker/task_state.py; docs/states.md draws it) has the states of a task's life. `step` and
`runnable` depend on them, and a command that is impossible in a state is refused.

In a job with event time, a task also passes on watermarks (runtime/event_time/watermark.py), after all outputs for what
it had taken before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from time import perf_counter_ns

from penstock.runtime.lifecycle import StateMachine
from penstock.runtime.operators.micro_batch import Bridge, DivertRequest
from penstock.runtime.operators.step_size import STEP_NS
from penstock.runtime.program.plan import TaskId
from penstock.runtime.records.batch import Batch
from penstock.runtime.state.keyed import Counters, SavedState, StageState
from penstock.runtime.worker.direct import Barrier, Direct, Processing
from penstock.runtime.worker.diversion import DiversionTotals, Diverted
from penstock.runtime.worker.metrics import LeastAges, RecentHistogram
from penstock.runtime.worker.record_by_record import RecordByRecord
from penstock.runtime.worker.shared_batches import SharedBatches
from penstock.runtime.worker.task_input import TaskInput
from penstock.runtime.worker.task_outputs import TaskOutputs
from penstock.runtime.worker.task_state import AT_REST, TASK, TaskState

# In some releases of Python, looking up the members of an Enum is slow.
_MADE, _READY, _RUNNING, _PARKED = TaskState.MADE, TaskState.READY, TaskState.RUNNING, TaskState.PARKED
_ENDING, _DRAINING, _FINISHED, _CLOSED = TaskState.ENDING, TaskState.DRAINING, TaskState.FINISHED, TaskState.CLOSED


@dataclass
class Snapshot:
    """The state that a task saves at a barrier, or at its end (`finished`): the state of each operator (None: it has
    none) and the counters. At its end it saves no keyed maps. `whole`: the states do not build on earlier snapshots.
    `quiet`: no record has come since the last snapshot. `parked`: the task has stopped after the barrier."""

    task: TaskId
    generation: int
    epoch: int
    finished: bool
    whole: bool
    quiet: bool
    parked: bool
    states: dict[str, tuple[StageState | None, Counters]]
    uncommitted: tuple[str, ...] = ()  # the sinks whose state has committables; whoever encodes it finds out


@dataclass(frozen=True)
class Steps:
    """How a task divides its work. `stopwatch` measures steps in ns, which decides how large steps are (None: this
    process's performance counter). `waits_for_more`: gathered records wait for the records that come next.
    `barriers_let_go`: gathered records do not wait for what follows a barrier."""

    stopwatch: Callable[[], int] | None = None
    waits_for_more: bool = True
    barriers_let_go: bool = True


@dataclass(frozen=True)
class TaskOptions:
    """How the tasks of a worker fit into their job. `event_time`: the tasks pass on watermarks. `on_snapshot` takes
    what a task saves (None: the job has no epochs). `on_motion` is called with the generation at the first record after
    a quiet snapshot. `wake`, which any thread may call, makes the run loop look whether a task is runnable.
    `shared_batches` finds functions that change records of other tasks."""

    event_time: bool = False
    on_snapshot: Callable[[Snapshot], None] | None = None
    on_motion: Callable[[TaskId, int], None] | None = None
    steps: Steps = Steps()
    wake: Callable[[], None] = lambda: None
    shared_batches: SharedBatches | None = None


class Task:
    """A task; see the module's docstring. `input_` knows the passage of the task's stages. `generation` is that of the
    recovery that built it, and `epoch` the last complete epoch at that time."""

    def __init__(
        self, task: TaskId, name: str, input_: TaskInput, options: TaskOptions, generation: int = 0, epoch: int = 0
    ) -> None:
        self.task = task
        self.name = name
        self.input = input_
        self.passage = passage = input_.passage
        self.stages = passage.stages
        self.clock = input_.clock
        self.timed, self.gathering, self.pending = passage.timed, passage.gathering, passage.pending
        self.outputs = TaskOutputs(passage, self.clock, options.shared_batches)
        self.logs = self.outputs.logs
        self.stopwatch = options.steps.stopwatch or perf_counter_ns
        self.life = StateMachine(TASK, f"task {name}")
        self.busy_ns = 0  # for which its steps have run
        # ProcessorTime sets these: the time of the worker's thread, the time for which functions have waited, and not
        # for a core, and the time of threads that functions have started.
        self.cpu_ns = self.waits_ns = self.threads_ns = 0
        self.latency = RecentHistogram()
        self.ages = LeastAges()
        self.on_snapshot = options.on_snapshot
        self.on_motion = options.on_motion
        self.generation = generation
        self.epoch = epoch  # the epoch of the last barrier that it has passed on
        self.whole_next = True  # whether the next snapshot must be whole
        self.event_time = options.event_time
        self.diversions = DiversionTotals()
        self.park_at: int | None = None  # the epoch after whose barrier the task must stop, because it migrates
        self._wake = options.wake
        self._mark_sent: int | None = None
        self._work: Iterator[Batch] | None = None
        self._work_ns = 0  # in earlier steps of the same work
        self._held_before = 0  # the number of gathered records when the work began
        # By earlier works: the number of records that were only gathered, and the time for that in ns.
        self._gathered = (0, 0)
        self._records_at_snapshot = -1  # the number of records at the last snapshot
        # Whether the last snapshot was quiet; epochs are then rare until the next record is reported.
        self._rested = False
        self._direct = Direct(self, barriers_let_go=options.steps.barriers_let_go)
        self.processing: Processing = self._direct
        self._unflushed = False

    def connect(self) -> None:
        self.input.connect()
        self.outputs.connect()
        for stage in self.gathering:
            stage.gather(self.clock, self.stopwatch)
        if self.pending is not None:
            self.pending.attach(self.clock, self._wake)

    def open(self) -> None:
        self.life.move("open")
        self.passage.open()

    def close(self, failed: bool) -> None:
        """Closes the input and the stages, also after an error."""
        self.life.move("close")
        try:
            self.input.close()
        finally:
            self.passage.close(failed)

    # --- running -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> TaskState:
        """The state of the task. Other threads may ask for it."""
        return self.life.state

    @property
    def opened(self) -> bool:
        return self.life.state is not _MADE

    @property
    def finished(self) -> bool:
        """Whether all of its outputs were sent. Other threads may ask."""
        return self.life.state is _FINISHED

    @property
    def blocked(self) -> bool:
        return bool(self.outputs.waiting)

    def runnable(self) -> bool:
        """Whether a step would do something."""
        state = self.life.state
        if state is _FINISHED or state is _CLOSED:
            return False
        if self.outputs.waiting and self.outputs.retry():
            return False
        if self._work is not None or state is _ENDING or state is _DRAINING:
            return True
        return state is not _PARKED and state is not _MADE and self.processing.runnable()

    @property
    def gathered(self) -> int:
        """The number of records that its stages have gathered, or its diversion for the next micro-batch, or that wait
        for their step because the task has to process them after all, or that are under way in its pending stage. Other
        threads may ask for it."""
        under_way = 0 if self.pending is None else self.pending.under_way
        return self.passage.held + under_way + self.processing.gathered

    def step(self) -> None:
        """Processes a limited part of the records that are ready. It must be called only when the task is runnable."""
        started = self.stopwatch()
        passage, outputs, work = self.passage, self.outputs, self._work
        if work is None:
            state = self.life.state
            if state is _READY:
                self.life.move("start")
            elif state is _ENDING or state is _DRAINING:
                self._end()
                return
            if self.gathering:
                self._held_before = passage.held
                for stage in self.gathering:
                    stage.holds = passage.record_by_record is None
            if self.pending is not None:
                passage.collected = 0
                self.pending.alone = passage.record_by_record is not None
            self.input.taken = 0
            begun = self.processing.begin()
            if begun is None:
                return
            if isinstance(begun, Barrier):
                self._save(begun.epoch, begun.own, finished=False)
                outputs.barrier(begun.epoch)
                self.busy_ns += self.stopwatch() - started
                return
            self._work = work = begun
        for out in work:
            if out:
                outputs.emit(out)
            if outputs.flush() or self.stopwatch() - started > 2 * STEP_NS:
                elapsed = self.stopwatch() - started
                self.busy_ns += elapsed
                self._work_ns += elapsed
                return
        self._work = None
        outputs.flush_combiners()
        if passage.mark != self._mark_sent and self.event_time:
            assert passage.mark is not None
            self._mark_sent = passage.mark
            outputs.watermark(passage.mark)
        outputs.flush()
        self._unflushed = True
        elapsed = self.stopwatch() - started
        self.busy_ns += elapsed
        if self.input.taken or self._held_before or passage.collected:
            self._measure(self._work_ns + elapsed)
        self._work_ns = 0

    def idle(self) -> None:
        """Lets sinks write the records that they hold back, because the task has nothing to do."""
        if self._unflushed:
            self._unflushed = False
            for stage in self.stages:
                stage.flush()

    def ready_in(self) -> float | None:
        """Returns in how many seconds there may be work without a message or a wake-up, or None when there will be
        none."""
        return None if self.outputs.waiting or self.life.state in AT_REST else self.processing.ready_in()

    def _end(self) -> None:
        """Tells the receivers that all outputs were made. The task is finished when this was sent."""
        if self.life.state is _ENDING:
            self.life.move("say the end")
            self.outputs.end()
            if self.on_snapshot is not None:
                self._save(self.epoch + 1, finished=True)
        if not self.outputs.flush():
            self.life.move("sent")

    # --- epochs ------------------------------------------------------------------------------------------------

    def restore(self, epoch: int, saved: dict[str, SavedState], *, finished: bool, whole_next: bool) -> None:
        """Starts from the state that was saved at a complete epoch. It is called once, after `open`. `finished`: the
        task had ended by then."""
        self.life.move("restore its end" if finished else "restore")
        self.input.had_ended = finished
        self.epoch = epoch
        self.whole_next = whole_next
        own = {stage.context.operator.name for stage in self.stages}
        self.outputs.restore({name: state.counters[2] for name, state in saved.items() if name not in own})
        self.passage.restore(epoch, saved)
        if self.passage.marking:
            self.input.taken = 0
            self._work = self.passage.advance()  # the receivers learn the watermark even if no record comes

    def trigger(self, epoch: int) -> None:
        """Makes a source begin the barrier of an epoch. One that has ended has sent its end already."""
        if self.life.move("trigger"):
            self.input.trigger(epoch)

    def complete(self, epoch: int, *, last: bool = False) -> list[Future[None]]:
        """Notes that an epoch is complete: commits it, and drops what was kept for going back before it. Returns the
        commits that are under way."""
        self.outputs.complete(epoch)
        return self.passage.complete(epoch, last=last)

    def park(self, epoch: int) -> None:
        """Makes the task stop after the barrier of this epoch, because it migrates. It has no effect when the barrier
        has passed."""
        if self.life.move("ask to park"):
            self.park_at = epoch

    def save_whole(self) -> None:
        self.whole_next = True

    def run_record_by_record(self, record_by_record: RecordByRecord) -> None:
        """Puts the task into record-by-record mode. It must be called before the first step."""
        if self.life.move("take records one by one"):
            self.passage.record_by_record = record_by_record

    def unpark(self) -> None:
        self.life.move("unpark")
        self.park_at = None  # also when the barrier has not come yet

    # --- the operation stream ----------------------------------------------------------------------------------

    def divert(self, divert: DivertRequest, bridge: Bridge, wake: Callable[[], None]) -> None:
        """Sends the records that the task has not begun to process to the operation stream. This needs no barrier: a
        range has no state of its own, and the outputs of what the task has begun leave before the answer to the first
        micro-batch. And a burst delays the next barrier most of all."""
        if (
            self.passage.record_by_record is not None or self.input.at_end()
        ):  # in record-by-record mode each record must be noted
            return
        if not self.life.move("divert"):
            return
        if self.diversion is None:
            self.processing = Diverted(self, divert, bridge, wake)
        elif self.diversion.divert.life != divert.life:
            self.undivert()  # from a Spark that was given up; to go to the other one is asked for again
        else:
            # Answers are still under way that continue at the end of the range as it was.
            self.diversion.divert = replace(divert, position=self.diversion.divert.position)

    def undivert(self) -> None:
        """Lets the task process its input as records again, as soon as all micro-batches are answered."""
        self.life.move("undivert")

    def all_answered(self) -> None:
        """Continues with records, because all micro-batches are answered and no more are sent."""
        self.processing = self._direct
        self.life.move("answered")

    @property
    def diversion(self) -> Diverted | None:
        """Its processing, when DIVERTED or RETURNING. Other threads may ask."""
        processing = self.processing
        return processing if isinstance(processing, Diverted) else None

    def told_to_divert(self) -> DivertRequest | None:
        """The diversion that the input follows. None: the input is processed as records, or will be when all
        micro-batches are answered. Other threads may ask."""
        # Read in this order: a task is RETURNING until it has no diversion any more.
        returning, diversion = self.life.state is TaskState.RETURNING, self.diversion
        return None if returning or diversion is None else diversion.divert

    def _save(self, epoch: int, own: StageState | None = None, *, finished: bool) -> None:
        assert self.on_snapshot is not None
        self.epoch = epoch
        if self.passage.record_by_record is not None:
            self.passage.record_by_record.passed(epoch)
        whole = self.whole_next or finished or any(stage.wants_whole() for stage in self.stages)
        self.whole_next = False
        states = self.passage.states(epoch, own or self.input.own_state(), whole=whole, finished=finished)
        for name, skipped in self.outputs.skipped().items():
            states[name] = (None, (0, 0, skipped, 0))
        moved = self.passage.moved
        quiet, self._records_at_snapshot = moved == self._records_at_snapshot, moved
        self._rested = quiet and not finished
        # A diverted task keeps its state, and its diversion stops.
        parked = self.park_at == epoch and (self.life.state is _RUNNING or self.diversion is not None)
        if parked and self.diversion is None:
            self.life.move("park", f"epoch {epoch}")
        self.on_snapshot(Snapshot(self.task, self.generation, epoch, finished, whole, quiet, parked, states))

    def _measure(self, elapsed: int) -> None:
        if self._rested:
            self._rested = False
            if self.on_motion is not None:
                self.on_motion(self.task, self.generation)
        records = self.input.taken
        # What a pending stage has taken is not through before it is collected.
        gone = records if self.pending is None else self.passage.collected
        if self.gathering:
            gone += self._held_before - self.passage.held
            # Steps that only gather cost nothing. A step that calls the user's function has the cost for all of them.
            records, elapsed = records + self._gathered[0], elapsed + self._gathered[1]
            self._gathered = (records, elapsed) if gone <= 0 else (0, 0)
        if gone > 0:
            now = self.clock()
            age = now - self.passage.stamp
            self.latency.add(age // 1000, gone, now)
            if not self.gathering and self.pending is None:
                ages = self.ages
                if age < ages.done:  # noqa: PLR1730  a call of min takes three times as long
                    ages.done = age
                if age - elapsed < ages.taken:  # noqa: PLR1730
                    ages.taken = age - elapsed
        if records and (gone > 0 or self.pending is not None):
            self.processing.measure(records, elapsed, more=self.input.more)
