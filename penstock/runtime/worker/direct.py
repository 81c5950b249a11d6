"""The direct way in which a task processes its input: by its own stages (docs/papers.md: A1).

`Processing` is what a task asks of each of its two ways; the other way leads through Spark (diversion.py). A task has
one way at a time. A barrier must come after everything that was taken before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from penstock.runtime.operators.step_size import StepSize
from penstock.runtime.records.batch import Batch

if TYPE_CHECKING:
    from penstock.runtime.worker.task import Task


class Processing(Protocol):
    """The way in which a task processes its input."""

    @property
    def gathered(self) -> int:
        """The number of records that were taken from the input and wait for a step. Other threads may ask."""
        ...

    def runnable(self) -> bool:
        """Returns whether `begin` would do something."""
        ...

    def begin(self) -> Iterator[Batch] | None:
        """Begins a step: with a part of the input, a barrier, timers, or the end. Returns the outputs to send, or None
        when there are none."""
        ...

    def ready_in(self) -> float | None:
        """Returns in how many seconds it will be runnable without a message or a wake-up; None: it will not."""
        ...

    def measure(self, records: int, elapsed_ns: int, *, more: bool) -> None:
        """Notes how long the steps for these records took. `more`: the size of the step was the limit, not the
        input."""


class Direct:
    """Processes the input by the stages of the task. With `barriers_let_go`, gathered records do not wait for the
    records that follow a barrier."""

    gathered = 0

    def __init__(self, task: Task, size: StepSize, *, barriers_let_go: bool) -> None:
        self._task = task
        self._passage = task.passage
        self._size = size
        self._barriers_let_go = barriers_let_go
        self._has_fired = False  # whether timers were called after the last input

    def runnable(self) -> bool:
        """Returns whether `begin` would do something."""
        task, passage = self._task, self._passage
        pending = passage.pending
        return (
            task.has_input()
            or task.has_barrier()
            or task.at_end()
            or (bool(passage.timed) and passage.timer_due())
            or (bool(passage.gathering) and passage.has_waited())
            or (pending is not None and pending.ready())
        )

    def begin(self) -> Iterator[Batch] | None:
        """Begins a step, and returns its outputs."""
        task, passage = self._task, self._passage
        held = passage.held if passage.gathering else 0
        if task.has_barrier():
            if held and self._barriers_let_go:
                return passage.let_go_now(everything=True)
            started = task.stopwatch()
            task.pass_barrier(task.take_barrier())
            task.busy_ns += task.stopwatch() - started
            return None
        if self._timers_turn():
            self._has_fired = True
            return passage.fire()
        self._has_fired = False
        if task.at_end():
            task.input_ended()
            return passage.finish()
        work = task.take_input()
        # Gathered records need not wait for more, because no input comes next.
        return passage.let_go_now() if work is None and held else work

    def _timers_turn(self) -> bool:
        # Timers take turns with the input: a timer that sets itself again for now must not stop the job. At the end all
        # timers are called.
        task = self._task
        if not self._passage.timed or task.at_end() or (self._has_fired and task.has_input()):
            return False
        return self._passage.timer_due()

    def ready_in(self) -> float | None:
        """Returns in how many seconds a stage has something to do. The input says by itself when it is ready."""
        return self._passage.ready_in()

    def measure(self, records: int, elapsed_ns: int, *, more: bool) -> None:
        """Adapts the size of steps."""
        self._size.measure(records, elapsed_ns, more)
