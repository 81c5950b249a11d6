"""The direct way in which a task processes its input: by its own stages (docs/papers.md: A1).

`Processing` is what a task asks of each of its two ways; the other way leads through Spark (diversion.py). A task has
one way at a time. A barrier must come after everything that was taken before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from penstock.runtime.lifecycle import StateMachine
from penstock.runtime.records.batch import Batch
from penstock.runtime.state.keyed import StageState
from penstock.runtime.worker.passage import Passage
from penstock.runtime.worker.task_input import TaskInput
from penstock.runtime.worker.task_state import TaskEvent, TaskState


@dataclass(frozen=True)
class Barrier:
    """The task saves its state, and passes the barrier of this epoch on. `own`: what the first stage saves of the input
    (None: of all that was taken)."""

    epoch: int
    own: StageState | None = None


class Owner(Protocol):
    """A task, as far as its processing knows it."""

    input: TaskInput
    passage: Passage
    life: StateMachine[TaskState, TaskEvent]


class Processing(Protocol):
    """The way in which a task processes its input."""

    @property
    def gathered(self) -> int:
        """The number of records that were taken from the input and wait for a step. Other threads may ask."""
        ...

    def runnable(self) -> bool:
        """Returns whether `begin` would do something."""
        ...

    def begin(self) -> Iterator[Batch] | Barrier | None:
        """Begins a step: with a part of the input, a barrier, timers, or the end. Returns the outputs to send, or the
        barrier that is to be passed on, or None when there is nothing."""
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

    def __init__(self, task: Owner, *, barriers_let_go: bool) -> None:
        self._input = task.input
        self._passage = task.passage
        self._life = task.life
        self._barriers_let_go = barriers_let_go
        self._has_fired = False  # whether timers were called after the last input

    def runnable(self) -> bool:
        """Returns whether `begin` would do something."""
        input_, passage = self._input, self._passage
        pending = passage.pending
        return (
            input_.has_input()
            or input_.has_barrier()
            or input_.at_end()
            or (bool(passage.timed) and passage.timer_due())
            or (bool(passage.gathering) and passage.has_waited())
            or (pending is not None and pending.ready())
        )

    def begin(self) -> Iterator[Batch] | Barrier | None:
        """Begins a step, and returns its outputs or a barrier."""
        input_, passage = self._input, self._passage
        held = passage.held if passage.gathering else 0
        if input_.has_barrier():
            if held and self._barriers_let_go:
                return passage.let_go_now(everything=True)
            return Barrier(input_.take_barrier())
        if self._timers_turn():
            self._has_fired = True
            return passage.fire()
        self._has_fired = False
        if input_.at_end():
            self._life.move("input ended")
            return passage.finish()
        work = input_.take()
        # Gathered records need not wait for more, because no input comes next.
        return passage.let_go_now() if work is None and held else work

    def _timers_turn(self) -> bool:
        # Timers take turns with the input: a timer that sets itself again for now must not stop the job. At the end all
        # timers are called.
        input_ = self._input
        if not self._passage.timed or input_.at_end() or (self._has_fired and input_.has_input()):
            return False
        return self._passage.timer_due()

    def ready_in(self) -> float | None:
        """Returns in how many seconds the input or a stage has something to do."""
        due, stages_due = self._input.ready_in(), self._passage.ready_in()
        return stages_due if due is None else due if stages_due is None else min(due, stages_due)

    def measure(self, records: int, elapsed_ns: int, *, more: bool) -> None:
        self._input.size.measure(records, elapsed_ns, more)
