"""The run loop of a worker: takes in what has arrived, runs tasks in turn, sleeps when there is nothing to do.

One thread runs it. In every pass the loop first empties the transport's inbox into the tasks' inboxes (bounded by
credit, see runtime/exchange/channel.py, so this never has to stop), then gives each runnable task one step, in the
order of the plan, so that a lone record passes all stages of a worker in one pass; a task with nothing to do lets its
sinks write what they hold. With nothing runnable the loop waits for a message, a wake-up or the next due source. It
never waits for room: a task that cannot send is passed over (invariants 1, 2, 6).

What the coordinator of a job's epochs wants of a worker (runtime/epochs/) is done here between two passes: begin a
barrier, commit an epoch, take tasks back. Other threads ask for it with `call`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from penstock.runtime.errors import PenstockError
from penstock.runtime.event_time.watermark import END_OF_TIME, IDLE
from penstock.runtime.exchange.message import BARRIER, CREDIT, DATA, WATERMARK, decode_batch
from penstock.runtime.operators.micro_batch import Bridge, DivertRequest
from penstock.runtime.sources.base import Split
from penstock.runtime.state.keyed import SavedState
from penstock.runtime.transport.base import Transport
from penstock.runtime.worker.blackbox import BlackBox, RecordByRecord, RecordByRecordMode
from penstock.runtime.worker.load import TaskLoad, task_load
from penstock.runtime.worker.source_task import SourceTask
from penstock.runtime.worker.task import Task
from penstock.runtime.worker.wiring import Wiring

# While another worker's inbox is full nothing tells us when it has room again, so the loop looks again after this
# long, doubling up to the maximum. The receiver is busy with our messages meanwhile: looking costs it nothing.
_ROOM_WAIT_FIRST_S = 0.0001
_ROOM_WAIT_MAX_S = 0.002


class LoopEnded(PenstockError):
    """What was asked of a run loop came after its end."""


class MessagesLost(PenstockError):
    """A worker died while it wrote to this one: what it was sending is gone, and recovery must replay it."""


Result = TypeVar("Result")

#: What a task goes on from: each operator's state, whether the task had ended, and whether its next snapshot must be
#: whole; and the splits of a source.
Saved = tuple[dict[str, SavedState], bool, bool, "list[Split] | None"]


class RunLoop:
    """Runs the tasks of one worker. `run` returns when `cancel` was called or all tasks have finished (in a job with
    epochs: and the last one is committed), or raises."""

    def __init__(
        self, wiring: Wiring, transport: Transport, clock: Callable[[], int], box: BlackBox | None = None
    ) -> None:
        self.wiring = wiring
        self.box = box
        self.transport = transport
        self.clock = clock
        self.tasks: list[Task] = list(wiring.tasks.values())
        self.cancelled = False
        self.passes = 0
        self.lost: list[str] = []  # messages that were, with their senders; recovery sends them again
        self._stopping = False
        self._over = False
        self._begun = bool(wiring.tasks)  # else the tasks are still to be made
        self._ended = False
        self._calls: deque[tuple[Callable[[], None], Future[Any]]] = deque()
        self._room_wait = 0.0
        self._renew_tasks()

    # --- called from other threads -----------------------------------------------------------------------------

    def cancel(self) -> None:
        """End as soon as possible, without finishing."""
        self.cancelled = True
        self.transport.wake()

    def stop(self) -> None:
        """End the sources; what they have read goes through all the way."""
        self._stopping = True
        for source in self._sources:
            source.stop()
            source.wake()
        self.transport.wake()

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Run a function between two passes; LoopEnded when the loop ends before."""
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # it is the caller's, in the other thread, also when it is a SystemExit
                future.set_exception(error)

        self._calls.append((run, future))
        self.transport.wake()
        if self._ended:
            self._refuse_calls()
        return future

    def do_calls(self) -> None:
        """Do what other threads have asked for; for the loop's thread."""
        while self._calls:
            self._calls.popleft()[0]()

    def _refuse_calls(self) -> None:
        with suppress(IndexError):
            while True:
                self._calls.popleft()[1].set_exception(LoopEnded("the run loop has ended"))

    def status(self) -> list[dict[str, Any]]:
        """One plain dict a task: counters since the start, queue lengths, latency in us (sparse histograms)."""
        return [_task_status(task) for task in self.tasks]

    def load(self) -> list[TaskLoad]:
        """The part of status() by which the paradigm scheduler decides."""
        return [task_load(task) for task in self.tasks]

    def traffic(self) -> list[dict[str, Any]]:
        """What planning goes by, counted since each task was made: how long it ran, what waits for it, and what it has
        sent to each other task, as (task, records, bytes)."""
        return [
            {
                "number": task.task.number,
                "generation": task.generation,
                "busy_ns": task.busy_ns,
                "queued": task.queued + task.held,
                "sent": [
                    (self.wiring.target_of(channel.number), channel.records, channel.bytes)
                    for channel in list(task.channels)
                ],
            }
            for task in self.tasks
            if not task.finished
        ]

    # --- the loop ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """See the class. Tasks are opened at the start and closed at the end, also after an error."""
        failed = True
        try:
            for task in self.tasks:
                if not task.opened:
                    task.open()
            self._loop()
            failed = self.cancelled
        finally:
            self._ended = True
            self._refuse_calls()
            _close([task for task in self.wiring.tasks.values() if task.opened], failed)

    def _loop(self) -> None:
        receive, deliver = self.transport.receive, self._deliver
        epochs = self.wiring.epochs
        calls = self._calls
        box = self.box
        while not self.cancelled:
            deliver(receive(0))
            if calls:
                self.do_calls()
            ran = False
            for task in self.tasks:
                if task.runnable():
                    if box is not None:
                        box.note(task.task.number)
                    task.step()
                    ran = True
                else:
                    task.idle()
            if box is not None:
                box.rest()
            if self.wiring.catching_up:
                self._catch_up()
            self.passes += 1
            if ran:
                self._room_wait = 0.0
                continue
            if self._over if epochs else self._begun and all(task.finished for task in self.tasks):
                # A worker with nothing left still takes in messages until the job ends: it has none to expect. Others
                # may want to move their inboxes, for which they would wait for its word.
                if epochs or self.transport.leave():
                    return
                deliver(receive(_ROOM_WAIT_MAX_S))
                continue
            deliver(receive(self._wait()))

    def _deliver(self, messages: Any) -> None:
        wiring = self.wiring
        tasks = wiring.tasks
        for number, message in messages:
            kind, channel, stamp, generation, batch = decode_batch(message)
            if kind == CREDIT:
                out = wiring.remote_out.get(channel)
                if out is not None and out.generation == generation:
                    out.granted(stamp)
                continue
            task = tasks.get(number)
            input_ = None if task is None else task.inputs.get(channel)
            if task is None or input_ is None or input_.generation != generation:
                continue  # of a task or a sender that was taken back since, or of a plan that has changed
            if kind == DATA:
                assert batch is not None
                task.receive(channel, batch, stamp, len(message))
            elif kind == BARRIER:
                task.receive_barrier(channel, stamp)
            elif kind == WATERMARK:
                task.receive_watermark(channel, stamp)
            else:
                task.receive_end(channel)
        if wiring.grants_due:
            for due in list(wiring.grants_due.values()):
                due.grant()
        lost = self.transport.lost()
        if lost:
            if not wiring.epochs:
                raise MessagesLost("; ".join(lost))
            self.lost += lost

    def _catch_up(self) -> None:
        catching_up = self.wiring.catching_up
        for number, channel in list(catching_up.items()):
            if channel.flush() and not channel.catching_up:
                del catching_up[number]

    # --- epochs; called in the loop's thread, between two passes -----------------------------------------------

    def trigger(self, epoch: int, tasks: Container[int] | None = None) -> None:
        """Let the sources (None: all) begin an epoch's barrier."""
        for source in self._sources:
            if tasks is None or source.task.number in tasks:
                source.trigger(epoch)

    def park(self, epoch: int, tasks: Container[int]) -> None:
        """These tasks stop behind an epoch's barrier, if they have not passed it yet."""
        for task in self.tasks:
            if task.task.number in tasks:
                task.park(epoch)

    def unpark(self) -> None:
        """No task is to move any more."""
        for task in self.tasks:
            task.unpark()

    def complete(self, epoch: int) -> None:
        """An epoch is complete."""
        for task in self.tasks:
            task.complete(epoch)

    def divert(self, divert: DivertRequest, bridge: Bridge) -> None:
        """The tasks of a chain send their input through the operation stream, from the next barrier on."""
        self._due = self.tasks
        for task in self.tasks:
            if divert.concerns(task.task.chain, (stage.context.operator.name for stage in task.stages)):
                task.divert(divert, bridge, self.transport.wake, at_once=not self.wiring.epochs)

    def undivert(self, chain: int) -> None:
        """The tasks of a chain take up their input as records again."""
        for task in self.tasks:
            if task.task.chain == chain:
                task.undivert()

    def end(self) -> None:
        """The job has ended: `run` returns."""
        self._over = True

    def remove_tasks(self, numbers: set[int], epoch: int) -> None:
        """These tasks of the job go back to a complete epoch, the others stay."""
        gone = self.wiring.remove_tasks(numbers)
        self._renew_tasks()
        self.unpark()
        for task in gone:
            with suppress(Exception):  # what it did is undone anyway
                task.close(True)
        for task in self.tasks:
            task.complete(epoch)

    def build_tasks(self, numbers: set[int], generation: int, epoch: int, saved: dict[int, Saved]) -> None:
        """Make those of the tasks that run here, from what was saved; they run when they are joined."""
        splits = {number: given for number, (_, _, _, given) in saved.items() if given is not None}
        made = self.wiring.build_tasks(numbers, generation=generation, epoch=epoch, splits=splits)
        for task in made:
            task.open()
            if generation > 1:  # not the first time that the job's tasks are made
                states, finished, whole_next, _ = saved[task.task.number]
                task.restore(epoch, states, finished=finished, whole_next=whole_next)
                states.clear()  # the maps were taken over: not to have those of the next task twice as well

    def run_record_by_record(self, modes: dict[int, RecordByRecordMode]) -> None:
        """These tasks, by number, take records one by one. They have just been made, and have got none yet: places are
        counted from there."""
        for number, how in modes.items():
            task = self.wiring.tasks.get(number)
            if task is not None and self.box is not None:
                task.run_record_by_record(RecordByRecord(self.box, number, how, task.epoch))

    def connect_tasks(self, numbers: set[int], generation: int) -> None:
        """All of these tasks are there again: from now on they run."""
        self.wiring.connect_tasks(numbers, generation)
        self._renew_tasks()
        self._begun = True

    def _renew_tasks(self) -> None:
        self.tasks = list(self.wiring.tasks.values())
        self._sources = [task for task in self.tasks if isinstance(task, SourceTask)]
        # Those that run without a message.
        self._due = [task for task in self.tasks if task.timed or task.gathering or isinstance(task, SourceTask)]
        # Another thread that calls `stop` sets the flag before it reads the list of sources, so no source is missed.
        if self._stopping:
            for source in self._sources:
                source.stop()

    # -----------------------------------------------------------------------------------------------------------

    def _wait(self) -> float | None:
        """Seconds to wait for a message; None: until one comes."""
        wait: float | None = None
        for task in self._due:
            ready = task.ready_in()
            if ready is not None and (wait is None or ready < wait):
                wait = ready
        if (
            self.wiring.grants_due
            or any(channel.stopped_by_room for task in self.tasks if task.blocked for channel in task.channels)
            or any(channel.stopped_by_room for channel in self.wiring.catching_up.values())
        ):
            self._room_wait = min(_ROOM_WAIT_MAX_S, 2 * self._room_wait or _ROOM_WAIT_FIRST_S)
            wait = self._room_wait if wait is None else min(wait, self._room_wait)
        return wait


def _close(tasks: list[Task], failed: bool) -> None:
    """Close all tasks; the first error is raised when nothing else went wrong before."""
    first: Exception | None = None
    for task in tasks:
        try:
            task.close(failed)
        except Exception as error:  # the other tasks are to be closed whatever this one raises
            first = first or error
    if first is not None and not failed:
        raise first


def _task_status(task: Task) -> dict[str, Any]:
    operators = [
        {
            "name": stage.context.operator.name,
            "records_in": stage.records_in,
            "records_out": stage.records_out,
            "skipped": stage.errors.skipped,
            "late": stage.late,
        }
        for stage in task.stages
    ]
    mark = task.marks.current  # once: this is another thread than the loop's
    return {
        **task_load(task),
        "name": task.name,
        "blocked": task.blocked,
        "unsent": sum(channel.queued() for channel in task.channels),
        "operators": operators,
        "skipped_on_the_way": task.skipped_on_the_way(),
        "watermark_ms": None if mark in (IDLE, END_OF_TIME) else mark,
        "latency_us": task.latency.recent().sparse(),
        "latency_all_us": task.latency.whole().sparse(),
    }
