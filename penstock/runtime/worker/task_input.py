"""The interface of the input of a task: channels (channel_input.py) or a reader (reader_input.py) (docs/papers.md: A1).

A task, and its processing, take parts of the input, barriers, and the end, and do not know where these come from. An
input must never give a record that follows a barrier before this barrier was taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from penstock.runtime.event_time.watermark import Watermarks
from penstock.runtime.exchange.channel import InChannel
from penstock.runtime.operators.step_size import StepSize
from penstock.runtime.records.batch import Batch
from penstock.runtime.state.keyed import StageState
from penstock.runtime.worker.passage import Passage
from penstock.runtime.worker.sample import Sample


class TaskInput(ABC):
    """The input of a task: it passes the records that it takes to the stages of `passage`. With `waits_for_more`,
    gathered records wait for the records that come next."""

    is_read = False  # whether it has to be looked for, because no message announces it

    def __init__(self, passage: Passage, clock: Callable[[], int], *, waits_for_more: bool) -> None:
        self.passage = passage
        self.clock = clock
        self.size = StepSize()
        self.channels: dict[int, InChannel] = {}  # that it comes from, by number
        self.marks = Watermarks()
        self.queued = 0  # the number of records that have come and were not taken
        self.sample: Sample | None = None  # what is taken is added, while somebody has asked for a sample
        # The task had ended in the epoch from which it continues, so its channels bring again what they had brought.
        self.had_ended = False
        self.taken = 0  # the number of records that the present step has taken
        self.more = False  # whether the limit of the step, and not the input, has bounded what was taken
        if waits_for_more:
            passage.has_more = self.has_more

    def connect(self) -> None:
        """Completes the input when its channels are there."""

    def step_limit(self) -> int:
        """Returns how many records a step takes. When the first stage gathers, it is enough for full calls."""
        limit, passage = self.size.limit, self.passage
        if passage.gathering and passage.gathering[0] is passage.stages[0]:
            wanted, call = passage.gathering[0].wants()
            return wanted if limit < wanted else limit - (limit - wanted) % call
        return limit if passage.pending is None else min(limit, passage.pending.room)

    @abstractmethod
    def has_input(self) -> bool:
        """Returns whether there is input for `take`."""

    @abstractmethod
    def has_more(self) -> bool:
        """Returns whether records come next."""

    @abstractmethod
    def at_end(self) -> bool:
        """Returns whether no input is left."""

    @abstractmethod
    def take(self) -> Iterator[Batch] | None:
        """Takes the next part of the input. Returns the outputs for it, or None when there is nothing."""

    def ready_in(self) -> float | None:
        """Returns in how many seconds there may be input, or None when a message or a wake-up announces it."""
        return None

    def trigger(self, epoch: int) -> None:
        """Begins the barrier of an epoch. Channels bring barriers themselves."""

    @abstractmethod
    def has_barrier(self) -> bool:
        """Returns whether a barrier comes next."""

    @abstractmethod
    def take_barrier(self) -> int:
        """Takes the next barrier. Returns its epoch."""

    def own_state(self) -> StageState | None:
        """Returns the state that the first stage has to save of the input that was taken so far: the offsets of a
        source."""
        return None

    @abstractmethod
    def has_input_to_divert(self) -> bool:
        """Returns whether there may be input for a micro-batch."""

    @abstractmethod
    def take_to_divert(self, most: int, *, columns: bool) -> tuple[Any, int, int]:
        """Returns the input of a micro-batch of limited size, the number of its records and its stamp, or a watermark
        that comes next. `columns`: raw input comes as columns of its source where this is possible."""

    def take_up_diverted(self, records: int, stamp: int) -> None:
        """Notes that the answer for this many records comes next."""
        self.passage.stamped(stamp)
        self.taken = records

    def backlog(self) -> int | None:
        """Returns how many records wait besides the queued ones, or None when the source cannot tell. Other threads may
        ask."""
        return 0

    def is_full(self) -> bool:
        """Returns whether more records wait than `backlog` can count. Other threads may ask."""
        return False

    def close(self) -> None:
        """Closes the input, also after an error."""
