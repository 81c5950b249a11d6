"""The run loop of a worker: takes in what has arrived, runs tasks in turn, sleeps when there is nothing to do.

One thread runs it. In every pass the loop first empties the transport's inbox into the tasks' inboxes (bounded by
credit, see runtime/channel.py, so this never has to stop), then gives each runnable task one step, in the order of
the plan, so that a lone record passes all stages of a worker in one pass; a task with nothing to do lets its sinks
write what they hold. With nothing runnable the loop waits for a message, a wake-up or the next due source. It never
waits for room: a task that cannot send is passed over (invariants 1, 2, 6).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.runtime.build import Wiring
from penstock.runtime.channel import CREDIT, DATA, decode_batch
from penstock.runtime.errors import PenstockError
from penstock.runtime.task import SourceTask, Task
from penstock.runtime.transport.base import Transport

# While another worker's inbox is full nothing tells us when it has room again, so the loop looks again after this
# long, doubling up to the maximum. The receiver is busy with our messages meanwhile: looking costs it nothing.
_ROOM_WAIT_FIRST_S = 0.0001
_ROOM_WAIT_MAX_S = 0.002


class MessagesLost(PenstockError):
    """A worker died while it wrote to this one: what it was sending is gone, and recovery must replay it."""


class RunLoop:
    """Runs the tasks of one worker; `run` returns when all have finished, `cancel` was called, or raises."""

    def __init__(self, wiring: Wiring, transport: Transport, clock: Callable[[], int]) -> None:
        self.wiring = wiring
        self.transport = transport
        self.clock = clock
        self.tasks: list[Task] = list(wiring.tasks.values())
        self.cancelled = False
        self.passes = 0
        self._sources = [task for task in self.tasks if isinstance(task, SourceTask)]
        self._room_wait = 0.0

    # --- called from other threads -----------------------------------------------------------------------------

    def cancel(self) -> None:
        """End as soon as possible, without finishing."""
        self.cancelled = True
        self.transport.wake()

    def stop(self) -> None:
        """End the sources; what they have read goes through all the way."""
        for source in self._sources:
            source.stop()
            source.wake()
        self.transport.wake()

    def status(self) -> list[dict[str, Any]]:
        """One plain dict a task: counters since the start, queue lengths, latency in us (sparse histograms)."""
        return [_task_status(task) for task in self.tasks]

    # --- the loop ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """See the class. Tasks are opened at the start and closed at the end, also after an error."""
        opened: list[Task] = []
        failed = True
        try:
            for task in self.tasks:
                opened.append(task)
                task.open()
            self._loop()
            failed = self.cancelled
        finally:
            _close(opened, failed)

    def _loop(self) -> None:
        tasks = self.tasks
        receive, deliver = self.transport.receive, self._deliver
        while not self.cancelled:
            deliver(receive(0))
            ran = False
            for task in tasks:
                if task.runnable():
                    task.step()
                    ran = True
                else:
                    task.idle()
            self.passes += 1
            if ran:
                self._room_wait = 0.0
                continue
            if all(task.finished for task in tasks):
                # A worker with nothing left still takes in messages until the job ends: it has none to expect.
                return
            deliver(receive(self._wait()))

    def _deliver(self, messages: Any) -> None:
        tasks = self.wiring.tasks
        for number, message in messages:
            kind, channel, stamp, batch = decode_batch(message)
            if kind == DATA:
                assert batch is not None
                tasks[number].receive(channel, batch, stamp, len(message))
            elif kind == CREDIT:
                self.wiring.remote_out[channel].outstanding -= stamp
            else:
                tasks[number].receive_end(channel)
        if self.wiring.grants_due:
            for due in list(self.wiring.grants_due.values()):
                due.grant()
        lost = self.transport.lost()
        if lost:
            raise MessagesLost("; ".join(lost))

    def _wait(self) -> float | None:
        """Seconds to wait for a message; None: until one comes."""
        wait: float | None = None
        for source in self._sources:
            ready = source.ready_in()
            if ready is not None and (wait is None or ready < wait):
                wait = ready
        if self.wiring.grants_due or any(
            channel.stopped_by_room for task in self.tasks if task.blocked for channel in task.channels
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
        except Exception as error:
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
        }
        for stage in task.stages
    ]
    return {
        "number": task.task.number,
        "name": task.name,
        "finished": task.finished,
        "blocked": task.blocked,
        "queued": task.queued,
        "unsent": sum(channel.queued() for channel in task.channels),
        "busy_ns": task.busy_ns,
        "operators": operators,
        "skipped_on_the_way": sum(errors.skipped for errors in task.edge_errors),
        "latency_us": task.latency.recent().sparse(),
        "latency_all_us": task.latency.whole().sparse(),
    }
