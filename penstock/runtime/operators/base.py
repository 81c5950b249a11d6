"""Operators and stages: what a user adds to a flow, and what runs inside a task.

An `Operator` is a plain, picklable description. Its `stage()` makes a stage for each task, which processes whole
batches. Most stages turn a batch into one batch of limited size (`run`). Others *expand* it, and yield their outputs in
pieces of limited size (`expand`), so that one record that becomes a million never takes the memory of a million. A
stage must never know tasks, channels or Ray, so that Spark and tests can run it too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from time import time
from typing import Any

from penstock.runtime.errors import FlowError
from penstock.runtime.operators.resources import needs_of, told_needs
from penstock.runtime.records.batch import Batch
from penstock.runtime.records.userfunc import DEAD_LETTERS, POLICIES, ErrorHandler, OnError, OwnFunction, apply
from penstock.runtime.sinks.base import SinkContext
from penstock.runtime.state.keyed import SavedState, StageState, StateMap
from penstock.runtime.units import choice, whole

# An expanding stage yields pieces of at most this many records. Smaller pieces cost more calls of the later stages.
# Larger pieces take more memory, and let a task run longer before it looks at its channels again.
EXPAND_RECORDS_MAX = 4096


class StageContext:
    """A stage's knowledge of the place where it runs. The task creates it."""

    def __init__(
        self,
        operator: Operator,
        index: int = 0,
        parallelism: int = 1,
        sink_context: SinkContext | None = None,
        epochs: bool = False,
        wall: Callable[[], float] = time,
    ) -> None:
        self.operator = operator
        self.wall = wall  # the clock for timers
        self.epochs = epochs  # whether the job saves state
        self.time_grain = 1  # in ms; watermarks are multiples of it
        self.event_time = False  # whether watermarks come
        self.index = index
        self.parallelism = parallelism
        self.sink_context = sink_context
        self.side: dict[str, list[Any]] = {tag: [] for tag in operator.outputs}
        self.errors = ErrorHandler(operator.name, operator.on_error, operator.declared_at, self.side.get(DEAD_LETTERS))


class Stage:
    """An operator as it runs inside one task."""

    expands = False
    timed = False  # whether it may have timers
    event_time = False  # whether it makes watermarks or waits for them
    port = 0  # the input that the next records come by, of an operator with several inputs

    def __init__(self, context: StageContext) -> None:
        self.context = context
        self.errors = context.errors
        self.records_in = 0
        self.records_out = 0
        self.late = 0  # the number of records that no window has accepted

    @property
    def left(self) -> int:
        """The number of records of a batch that `expand` has begun with, and that it has not taken up. Other threads
        may ask."""
        return 0

    def open(self) -> None:
        """Prepares the stage. The worker calls it once, before the first batch."""

    def run(self, batch: Batch) -> Batch:
        """Returns the outputs for a batch. Only for stages that do not expand."""
        raise NotImplementedError

    def expand(self, batch: Batch) -> Iterator[Batch]:
        """Yields the outputs for a batch, in pieces of at most EXPAND_RECORDS_MAX records. Only for stages that
        expand."""
        raise NotImplementedError

    def next_timer(self) -> float | None:
        """Returns the time of the first timer, as of time.time(), or None when there is none. Only for timed stages."""
        return None

    def fire(self, now: float) -> Iterator[Batch]:
        """Yields the outputs of all timers that are due. Only for timed stages."""
        return iter(())

    def advance(self, watermark: int | None) -> Iterator[Batch]:
        """Yields the outputs that a watermark releases; None: no watermark is known. Only for stages with event
        time."""
        return iter(())

    def watermark(self, watermark: int | None) -> int | None:
        """Takes a watermark, and returns the watermark that follows downstream. Only for stages with event time."""
        return watermark

    def doubts(self, greatest: int) -> bool:
        """Returns whether this time, the greatest of a micro-batch in the operation stream, may be one in another unit,
        so that the stage must see the records. Only for stages with event time."""
        return False

    def observe(self, greatest: int) -> None:
        """Notes that records up to this time have passed in the operation stream. Only for stages with event time."""

    def finish(self) -> Iterator[Batch]:
        """Yields the last outputs, after the last batch of every input."""
        return iter(())

    def flush(self) -> None:
        """Writes the records that the stage holds back for larger writes, because no more records are ready."""

    def close(self, failed: bool) -> None:
        """Closes the stage. It is called once at the end, also after an error, and must not raise when `open` was never
        called."""

    def drop_state(self) -> None:
        """Frees the memory of the keyed state, because the task was removed. It is called once, after `close`. The
        worker may have references to removed tasks for some time, and the task that comes in this one's place has the
        same state again."""

    # --- epochs, in jobs that have them ----------------------------------------------------------------------

    def wants_whole(self) -> bool:
        """Whether saving everything at the next barrier costs less than saving the changes."""
        return False

    def snapshot(self, epoch: int, whole: bool) -> StageState | None:
        """Returns the state at the barrier of `epoch`: the changes since the last snapshot, or everything. Returns None
        when the stage has no state. The caller encodes the state before the stage runs again."""
        return None

    def restore(self, epoch: int, saved: SavedState) -> None:
        """Starts from the state that was saved at a complete epoch. It is called after `open`."""

    def begin(self) -> None:
        """Called when all tasks that are built together are built, in all workers, and before the first batch."""

    def commit(self, epoch: int, *, last: bool = False) -> Future[None] | None:
        """Notes that epochs up to this one are complete. `last`: it is the last one of the job. Returns what is done
        when everything is committed, or None when it is already."""
        return None

    def cancel(self, epoch: int) -> None:
        """Notes that the job is cancelled after this complete epoch. `close` follows."""


class CallingStage(Stage):
    """A stage that calls a user's function, which it opens and closes."""

    def __init__(self, context: StageContext, fn: Callable[..., Any]) -> None:
        super().__init__(context)
        self._own = OwnFunction(fn)

    def open(self) -> None:
        self._own.open()

    def close(self, failed: bool) -> None:
        self._own.close()


class KeyedStage(Stage):
    """A stage with keyed state, which it saves map by map."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self.maps: dict[str, StateMap] = {}  # by the names under which they are saved

    def own_state(self) -> Any:
        """Returns the part of the state that belongs to the task itself, and to no key."""
        return None

    def wants_whole(self) -> bool:
        return any(each.wants_whole for each in self.maps.values())

    def snapshot(self, epoch: int, whole: bool) -> StageState:
        return StageState({title: each.delta(whole) for title, each in self.maps.items()}, own=self.own_state())

    def restore(self, epoch: int, saved: SavedState) -> None:
        for title, each in self.maps.items():
            each.restore(saved.maps.get(title, {}))

    def drop_state(self) -> None:
        for each in self.maps.values():
            each.drop()


def run_stages(stages: Sequence[Stage], batch: Batch, first: int) -> Iterator[Batch]:
    """Yields the outputs of the stages from `first` on, for a batch that is not empty. The pieces are of limited size,
    and none is empty."""
    for i in range(first, len(stages)):
        stage = stages[i]
        stage.records_in += len(batch)
        if stage.expands:
            for piece in stage.expand(batch):
                stage.records_out += len(piece)
                yield from run_stages(stages, piece, i + 1)
            return
        batch = stage.run(batch)
        if not batch:
            return
        stage.records_out += len(batch)
    yield batch


class Operator(ABC):
    """The common part of all operators: kind, name, parallelism (None: that of the flow), the policy for records that
    fail, and the resources that each task needs."""

    kind: str
    keyed = False  # whether it takes KeyedBatch, at each input to which records are grouped by key
    inputs = 1  # the number of its inputs, or ports; an operator with several begins a chain
    begins_chain = False  # whether it is the first operator of its chain, whatever comes before it
    # Whether what its tasks save as their own is a list for each, which any task of another plan can take over.
    own_can_move = False
    shares = False  # whether its tasks have maps in common, which the first of them saves
    is_sink = False
    one_to_one = False  # whether it emits one record for each that it receives and that does not fail
    why_not_in_spark: str | None = "it has no batch form"  # why it cannot run in Spark; None: it can
    time_grain: int | None = None  # in ms; all times at which it waits for a watermark are multiples of it

    def __init__(
        self,
        name: str | None = None,
        parallelism: int | None = None,
        on_error: OnError = "fail",
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
    ) -> None:
        if name is not None and (not isinstance(name, str) or not name):
            raise FlowError(f"an operator's name must be a text, not {name!r}")
        self.name = name or self.kind
        choice(on_error, f"operator {self.name!r}: on_error", POLICIES)
        self.explicit_name = name is not None
        self.parallelism = None if parallelism is None else whole(parallelism, f"operator {self.name!r}: parallelism")
        self.on_error = on_error
        self.needs = needs_of(num_gpus, resources, self.name)  # what each task needs of its worker beside CPU time
        if self.needs:
            self.why_not_in_spark = f"each of its tasks needs {told_needs(self.needs)}, which Spark does not reserve"
        self.declared_at: str | None = None
        self.outputs: tuple[str, ...] = (DEAD_LETTERS,) if on_error == "dead_letter" else ()

    @property
    def state_kind(self) -> str:
        """Describes the kind of the operator's state in words. When a job continues from saved state, the operator of
        the same name must have the same kind of state."""
        return self.kind

    @abstractmethod
    def stage(self, context: StageContext) -> Stage:
        """Makes the stage for one task."""


class Loop(Stage):
    """A stage that is one C-level loop over the batch."""

    def __init__(self, context: StageContext, loop: Callable[[Iterator[Any]], Iterable[Any]]) -> None:
        super().__init__(context)
        self._loop = loop

    def run(self, batch: Batch) -> Batch:
        assert isinstance(batch, list)
        return apply(self._loop, batch, self.errors)
