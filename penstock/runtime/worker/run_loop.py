"""The run loop of a worker: receives messages, gives each task a step in turn, and sleeps when there is nothing to do.

One thread runs the loop. In each pass, the loop first moves all messages from the transport's inbox into the inboxes of
the tasks. It never has to stop there, because credit bounds the inboxes of the tasks (runtime/exchange/channel.py).
Then each runnable task gets one step, in the order of the plan, so a single record passes all stages of a worker in one
pass. When a task has nothing to do, its sinks write the records that they hold back. When no task is runnable, the loop
waits for a message, a wake-up, or the time at which a source is due. The loop must never wait for room: it skips a task
that cannot send.

The commands of the coordinator (runtime/epochs/) are carried out between two passes: begin a barrier, commit an epoch,
remove and build tasks. Other threads pass them to the loop with `call`.

A step takes a batch of what is ready (docs/papers.md: A1).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from penstock.runtime.calls import Calls
from penstock.runtime.errors import PenstockError, describe
from penstock.runtime.forks import end_forks
from penstock.runtime.operators.ends import Writing
from penstock.runtime.operators.micro_batch import Bridge, DivertRequest
from penstock.runtime.patience import Patience
from penstock.runtime.sinks.beside import Beside
from penstock.runtime.sources.base import Split
from penstock.runtime.state.keyed import SavedState
from penstock.runtime.status import StreamStatus
from penstock.runtime.transport.base import Buffer, Transport
from penstock.runtime.worker.blackbox import BlackBox
from penstock.runtime.worker.load import TaskLoad, task_load
from penstock.runtime.worker.processor_time import EVERY, ProcessorTime
from penstock.runtime.worker.reader_input import ReaderInput
from penstock.runtime.worker.record_by_record import RecordByRecord, RecordByRecordMode
from penstock.runtime.worker.sample import RecordSample, Sample, SampleRequest
from penstock.runtime.worker.task import Task
from penstock.runtime.worker.wiring import Wiring

# While the inbox of another worker is full, no message tells this worker when there is room again. So the loop tries
# again after this time, which doubles up to the maximum. The receiver is busy with this worker's messages meanwhile, so
# trying costs it nothing.
_ROOM_WAIT_FIRST_S = 0.0001
_ROOM_WAIT_MAX_S = 0.002


class LoopEnded(PenstockError):
    """The run loop was asked for something after its end."""


Result = TypeVar("Result")

#: The saved state from which a task continues: the state of each operator, whether the task had ended, whether its next
#: snapshot must be whole, and the splits of a source.
Saved = tuple[dict[str, SavedState], bool, bool, "list[Split] | None"]


class RunLoop:
    """Runs the tasks of one worker. `run` returns when `halt` was called, or when all tasks have finished; in a job
    with epochs, when the last epoch is committed too. It raises an error when a task has failed."""

    def __init__(
        self,
        wiring: Wiring,
        transport: Transport,
        clock: Callable[[], int],
        box: BlackBox | None = None,
        cpu: ProcessorTime | None = None,
        patience: Patience | None = None,
        beside: Callable[[str], Beside] | None = None,
    ) -> None:
        """`cpu` measures the processor time of the tasks (None: it stays unknown). `patience`: with errors of sources
        and sinks that may pass (None: they count at once). `beside` makes what takes the steps of a sink that may take
        long, under a name (None: the loop takes them)."""
        self.wiring = wiring
        self.box = box
        self.cpu = cpu
        self.patience = patience or Patience(0.0)
        self._beside = beside
        self._fault: BaseException | None = None  # of what was done beside the loop
        self.transport = transport
        self.clock = clock
        self.tasks: list[Task] = list(wiring.tasks.values())
        self.halted = False
        self._cancelled_after: int | None = None
        self.passes = 0
        self._stopping = False
        self._over = False
        self._in_hook: tuple[Task, int] | None = None  # the task that is being opened or closed, and since when
        self._failure: BaseException | None = None  # why `run` ends, before the tasks are closed
        self._begun = bool(wiring.tasks)  # if there are no tasks yet, they are built later
        self._calls = Calls(transport.wake, lambda: LoopEnded("the run loop has ended"))
        self._room_wait = 0.0
        self._renew_tasks()

    # --- called from other threads -----------------------------------------------------------------------------

    def halt(self, cancelled_after: int | None = None) -> None:
        """Ends the loop as soon as possible, without finishing the tasks. `cancelled_after`: the job is cancelled after
        this complete epoch, and nobody will resume it; None: somebody may."""
        self._cancelled_after = cancelled_after
        self.halted = True
        self.patience.give_up()
        self.transport.wake()

    def stop(self) -> None:
        """Ends the sources. The records that they have read are still processed by all tasks."""
        self._stopping = True
        for _, reader in self._sources:
            reader.stop()
            reader.wake()
        self.transport.wake()

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Runs a function in the loop's thread, between two passes. The future raises LoopEnded when the loop ends
        before."""
        return self._calls.ask(function)

    def call_or_fail(self, function: Callable[[], None]) -> None:
        """Runs a function in the loop's thread, between two passes. Its error ends the loop."""

        def guarded() -> None:
            try:
                function()
            except BaseException as error:  # `run` raises it
                self._fault = error

        self.call(guarded)

    def do_calls(self) -> None:
        """Runs the functions that other threads have passed to `call`. Only the loop's thread calls this."""
        self._calls.carry_out()

    def load(self) -> list[TaskLoad]:
        """Returns the measurements of each task. Drops samples that nobody takes."""
        if self.cpu is not None:
            self.cpu.divide(list(self.tasks))
        for task in self.tasks:
            if (sample := task.input.sample) is not None and sample.is_old(self.clock()):
                task.input.sample = None
        return [task_load(task, self.wiring.target_of) for task in self.tasks]

    def streams(self) -> list[StreamStatus]:
        """Returns the state of each stream through relays: its tree, who has joined, and its switches."""
        root = self.wiring.root
        return [] if root is None else root.status()

    def hook(self) -> dict[str, Any] | None:
        """Returns which operator is being opened or closed, which of the two ("open", "close"), for how many seconds
        its task has been opened or closed, and which failure it was that ends the run, if there was one. Returns None
        when nothing is being opened or closed. A user's open() or close() may never return."""
        if self._in_hook is None:
            return None
        task, since = self._in_hook
        if task.passage.hook is None:
            return None
        operator, name = task.passage.hook
        failure = None if self._failure is None else describe(self._failure).partition("\n")[0]
        return {"operator": operator, "name": name, "for_s": (self.clock() - since) / 1e9, "failure": failure}

    def marks(self) -> dict[int, int | None]:
        """Returns the watermarks of the source tasks that are aligned, by task number."""
        return {task.task.number: reader.aligned_mark for task, reader in self._sources if reader.is_aligned}

    def align(self, least: int | None) -> None:
        for _, reader in self._sources:
            reader.align(least)

    def take_sample(self, request: SampleRequest) -> RecordSample | None:
        """Returns records that the tasks of a chain have taken since they were asked first, or None when there are too
        few so far. Raises what the class of a record raises when it cannot travel."""
        tasks = [
            task
            for task in self.tasks
            if request.concerns(task.task.chain, (stage.context.operator.name for stage in task.stages))
        ]
        sample = next((task.input.sample for task in tasks if task.input.sample is not None), None) or Sample()
        found = sample.taken(request.least)
        is_over = found is not None or sample.failure is not None
        for task in tasks:
            task.input.sample = None if is_over else sample
        if found is None and sample.failure is not None:
            raise sample.failure
        if found is None:
            return None
        records = sum(task.stages[0].records_in for task in tasks)
        return replace(found, each_s=sum(task.busy_ns for task in tasks) / 1e9 / max(1, records))

    # --- the loop ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs the tasks, as the class describes. It opens the tasks at the start, and closes them at the end, also
        after an error."""
        failed = True
        process = os.getpid()
        if self.cpu is not None:
            self.cpu.begin()
        try:
            for task in self.tasks:
                if not task.opened:
                    self._open(task)
            self._loop()
            failed = self.halted
            if self.halted and self._cancelled_after is not None:
                for task in self.wiring.tasks.values():
                    if task.opened:
                        task.passage.cancel(self._cancelled_after)
        except BaseException as error:
            self._failure = error
            raise
        finally:
            end_forks(process)  # what is closed below belongs to the worker
            self._calls.end()
            self._close_all([task for task in self.wiring.tasks.values() if task.opened], failed)

    def _loop(self) -> None:
        receive, deliver = self.transport.receive, self.deliver
        epochs = self.wiring.epochs
        root = self.wiring.root
        calls = self._calls.waiting
        box = self.box
        cpu = self.cpu
        while not self.halted:
            deliver(receive(0))
            if calls:
                self.do_calls()
                if self._fault is not None:
                    raise self._fault
            if root is not None:
                root.tick()
            ran = False
            measured = cpu is not None and not self.passes % EVERY
            for task in self.tasks:
                if task.runnable():
                    if box is not None:
                        box.note(task.task.number)
                    if measured:
                        self._step_measured(task)
                    else:
                        task.step()
                    ran = True
                else:
                    task.idle()
            if box is not None:
                self._note_rest(box)
            if self.wiring.catching_up:
                self._catch_up()
            self.passes += 1
            if ran:
                self._room_wait = 0.0
                continue
            if self._over if epochs else self._begun and all(task.finished for task in self.tasks):
                # A worker whose tasks have all ended still receives messages until the job ends, although no records
                # come. Other workers may replace their rings by larger ones, and then wait for this worker's reply.
                if epochs:
                    return
                if not self.wiring.catching_up and (root is None or root.idle) and self.transport.leave():
                    return
                deliver(receive(_ROOM_WAIT_MAX_S))
                continue
            deliver(receive(self._wait()))

    def _note_rest(self, box: BlackBox) -> None:
        """Notes that no step is running. If the process dies now, a task whose calls are under way may be the cause."""
        for task in self._calling:
            if task.pending is not None and task.pending.under_way:
                box.note(task.task.number)
                return
        box.rest()

    def _step_measured(self, task: Task) -> None:
        assert self.cpu is not None
        busy_ns, cpu_ns = task.busy_ns, self.cpu.clock()
        task.step()
        self.cpu.note(task, task.busy_ns - busy_ns, self.cpu.clock() - cpu_ns)

    def deliver(self, messages: Iterable[tuple[int, Buffer]]) -> None:
        self.wiring.delivery.deliver(messages)

    def _catch_up(self) -> None:
        catching_up = self.wiring.catching_up
        for number, (log, channel) in list(catching_up.items()):
            if log.flush() and not channel.catching_up:
                del catching_up[number]

    # --- epochs; called in the loop's thread, between two passes -----------------------------------------------

    def trigger(self, epoch: int, tasks: Container[int] | None = None) -> None:
        """Makes the sources (None: all) begin the barrier of an epoch."""
        for task, _ in self._sources:
            if tasks is None or task.task.number in tasks:
                task.trigger(epoch)

    def park(self, epoch: int, tasks: Container[int]) -> None:
        """Makes these tasks stop after the barrier of an epoch, unless the barrier has passed them already."""
        for task in self.tasks:
            if task.task.number in tasks:
                task.park(epoch)

    def unpark(self) -> None:
        """Lets all parked tasks continue, because no task migrates any more."""
        for task in self.tasks:
            task.unpark()

    def complete(self, epoch: int, *, last: bool = False) -> list[Future[None]]:
        """Tells all tasks that an epoch is complete. Returns the commits that are under way."""
        return [commit for task in self.tasks for commit in task.complete(epoch, last=last)]

    def divert(self, divert: DivertRequest, bridge: Bridge) -> None:
        """Sends the input of a chain's tasks to the operation stream."""
        self._due = self.tasks
        for task in self.tasks:
            if divert.concerns(task.task.chain, (stage.context.operator.name for stage in task.stages)):
                task.divert(divert, bridge, self.transport.wake)

    def undivert(self, chain: int) -> None:
        """Lets the tasks of a chain process their input as records again."""
        for task in self.tasks:
            if task.task.chain == chain:
                task.undivert()

    def end(self) -> None:
        """Makes `run` return, because the job has ended."""
        self._over = True

    def remove_tasks(self, numbers: set[int], epoch: int) -> list[Future[None]]:
        """Removes the given tasks that run here. They go back to a complete epoch. The other tasks stay. What this
        returns is done when nothing of the removed tasks is at work any more."""
        gone = self.wiring.remove_tasks(numbers)
        self._renew_tasks()
        self.unpark()
        for task in gone:
            with suppress(Exception):  # what this task has done since the epoch is undone anyway
                self._close(task, True)
            # References to the task may live on: of garbage collection, of channels, of this loop.
            for stage in task.stages:
                stage.drop_state()
        if self.cpu is not None:
            self.cpu.forget(gone)
        for task in self.tasks:
            task.complete(epoch)
        stages = [stage for task in gone for stage in task.stages if isinstance(stage, Writing)]
        return [stage.closed for stage in stages if stage.closed is not None]

    def build_tasks(self, numbers: set[int], generation: int, epoch: int, saved: dict[int, Saved]) -> None:
        """Builds the given tasks that run here, from their saved state. They run after `connect_tasks`."""
        splits = {number: given for number, (_, _, _, given) in saved.items() if given is not None}
        made = self.wiring.build_tasks(numbers, generation=generation, epoch=epoch, splits=splits)
        for task in made:
            self._open(task)
            if generation > 1:  # not when the job's tasks are built for the first time
                states, finished, whole_next, _ = saved[task.task.number]
                task.restore(epoch, states, finished=finished, whole_next=whole_next)
                states.clear()  # the tasks have taken over the maps, so those of the next task are not in memory twice

    def run_record_by_record(self, modes: dict[int, RecordByRecordMode]) -> None:
        """Puts these tasks, by number, into record-by-record mode. They have just been built and have received no
        record yet, because the places of records are counted from here."""
        for number, how in modes.items():
            task = self.wiring.tasks.get(number)
            if task is not None and self.box is not None:
                task.run_record_by_record(RecordByRecord(self.box, number, how, task.epoch))

    def connect_tasks(self, numbers: set[int], generation: int) -> None:
        """Lets these tasks run from now on. All of them have been built again, also in other workers."""
        for number in sorted(numbers):
            task = self.wiring.tasks.get(number)
            if task is not None:
                self._in_hook = task, self.clock()
                try:
                    task.passage.begin()
                finally:
                    self._in_hook = task.passage.hook = None
        self.wiring.connect_tasks(numbers, generation)
        self.wiring.delivery.recovered()
        self._renew_tasks()
        self._begun = True

    def _renew_tasks(self) -> None:
        self.tasks = list(self.wiring.tasks.values())
        self._sources = [(task, task.input) for task in self.tasks if isinstance(task.input, ReaderInput)]
        self._calling = [task for task in self.tasks if task.pending is not None]
        # The tasks that can run without a message.
        self._due = [task for task in self.tasks if task.timed or task.gathering or task.input.is_read]
        # `stop`, in another thread, sets its flag before it reads the list of sources, so no source is missed.
        if self._stopping:
            for _, reader in self._sources:
                reader.stop()

    # -----------------------------------------------------------------------------------------------------------

    def _open(self, task: Task) -> None:
        self._in_hook = task, self.clock()
        task.passage.box = self.box
        for stage in task.stages:
            if isinstance(stage, Writing) and (context := stage.context.sink_context) is not None:
                context.patience = self.patience
                if self._beside is not None:
                    context.steps = self._beside(f"penstock-{context.operator}-{context.index}")
                    context.on_loop = self.call_or_fail
        if isinstance(task.input, ReaderInput):
            task.input.patience = self.patience
        try:
            task.open()
        finally:
            self._in_hook = task.passage.hook = None

    def _close(self, task: Task, failed: bool) -> None:
        # A source closes its reader before its stages.
        task.passage.hook = (task.stages[0].context.operator.name, "close")
        self._in_hook = task, self.clock()
        try:
            task.close(failed)
        finally:
            self._in_hook = task.passage.hook = None

    def _close_all(self, tasks: list[Task], failed: bool) -> None:
        """Closes all tasks. The first error of closing is raised only when nothing had failed before."""
        first: Exception | None = None
        for task in tasks:
            try:
                self._close(task, failed)
            except Exception as error:  # the other tasks must be closed too
                first = first or error
        if first is not None and not failed:
            raise first

    def _wait(self) -> float | None:
        """Returns for how many seconds to wait for a message; None: until a message comes."""
        wait: float | None = None
        for task in self._due:
            ready = task.ready_in()
            if ready is not None and (wait is None or ready < wait):
                wait = ready
        if self.wiring.root is not None and (due := self.wiring.root.due_s()) is not None:
            wait = due if wait is None else min(wait, due)
        if (
            self.wiring.delivery.grants_due
            or (self.wiring.root is not None and self.wiring.root.waiting)
            or any(log.stopped_by_room for task in self.tasks if task.blocked for log in task.logs)
            or any(log.stopped_by_room for log, _ in self.wiring.catching_up.values())
        ):
            self._room_wait = min(_ROOM_WAIT_MAX_S, 2 * self._room_wait or _ROOM_WAIT_FIRST_S)
            wait = self._room_wait if wait is None else min(wait, self._room_wait)
        return wait
