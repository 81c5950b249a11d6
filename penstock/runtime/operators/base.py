"""Operators: what the user adds to a flow (plain, picklable data), and the stage each becomes inside a task.

An `Operator` describes; `stage()` makes the running form, one a task, which works on whole batches. A stage either
maps a batch to one batch of bounded size (`run`) or *expands* it, yielding outputs in bounded pieces (`expand`), so
that a record that becomes a million never takes memory for a million (invariant 1). Stages know nothing of tasks,
channels, Ray or time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import time
from typing import Any

from penstock.runtime.errors import FlowError
from penstock.runtime.records.batch import Batch
from penstock.runtime.records.userfunc import (
    DEAD_LETTERS,
    POLICIES,
    ErrorHandler,
    OnError,
    apply,
)
from penstock.runtime.sinks.base import SinkContext
from penstock.runtime.state.keyed import SavedState, StageState

# An expanding stage yields pieces of at most this many records. Smaller pieces cost a call into each later stage per
# piece; larger ones hold more memory and let a task run longer before it looks at its channels again.
EXPAND_RECORDS_MAX = 4096


class StageContext:
    """What a stage knows of where it runs; made by the task that hosts it."""

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
        self.wall = wall  # the time for timers
        self.epochs = epochs  # the job saves state
        self.time_grain = 1  # ms: watermarks are multiples of it
        self.index = index
        self.parallelism = parallelism
        self.sink_context = sink_context
        self.side: dict[str, list[Any]] = {tag: [] for tag in operator.outputs}
        self.errors = ErrorHandler(operator.name, operator.on_error, operator.declared_at, self.side.get(DEAD_LETTERS))


class Stage:
    """The running form of one operator in one task."""

    expands = False
    timed = False  # it may have timers
    event_time = False  # it makes watermarks or waits for them

    def __init__(self, context: StageContext) -> None:
        self.context = context
        self.errors = context.errors
        self.records_in = 0
        self.records_out = 0
        self.late = 0  # records that no window took

    def open(self) -> None:
        """Called once, in the worker, before the first batch."""

    def run(self, batch: Batch) -> Batch:
        """The outputs for a batch; only for stages that do not expand."""
        raise NotImplementedError

    def expand(self, batch: Batch) -> Iterator[Batch]:
        """The outputs for a batch in pieces of at most EXPAND_RECORDS_MAX; only for stages that expand."""
        raise NotImplementedError

    def next_timer(self) -> float | None:
        """When the first timer is due, in time.time(); None: there is none. Only for stages that are timed."""
        return None

    def fire(self, now: float) -> Iterator[Batch]:
        """The outputs of all timers that are due; only for stages that are timed."""
        return iter(())

    def advance(self, watermark: int | None) -> Iterator[Batch]:
        """The outputs that a watermark lets go; None: none is known. Only for stages with event time."""
        return iter(())

    def watermark(self, watermark: int | None) -> int | None:
        """What goes on behind the stage, once it has taken a watermark. Only for stages with event time."""
        return watermark

    def observe(self, greatest: int) -> None:
        """Records up to this time have passed in the operation stream. Only for stages with event time."""

    def finish(self) -> Iterator[Batch]:
        """The last outputs, after the last batch of every input."""
        return iter(())

    def flush(self) -> None:
        """Nothing more is ready now: what was held back for larger writes should leave."""

    def close(self, failed: bool) -> None:
        """Called once at the end, also after an error; must not raise for what open() never made."""

    # --- epochs, in jobs that have them ----------------------------------------------------------------------

    def wants_whole(self) -> bool:
        """It costs less to save everything at the next barrier than what has changed."""
        return False

    def snapshot(self, epoch: int, whole: bool) -> StageState | None:
        """The state at the barrier of `epoch`: what has changed since the last snapshot, or everything. None: the
        stage has no state. The caller encodes it before the stage runs again."""
        return None

    def restore(self, epoch: int, saved: SavedState) -> None:
        """Called behind open(): go on from what was saved at a complete epoch."""

    def commit(self, epoch: int) -> None:
        """Epochs up to this one are complete."""


def run_stages(stages: Sequence[Stage], batch: Batch, first: int) -> Iterator[Batch]:
    """The outputs of the stages from `first` on for a batch that is not empty: in bounded pieces, none empty."""
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
    """What an operator is: kind, name, parallelism (None: the flow's), the policy for records that fail."""

    kind: str
    keyed = False  # takes KeyedBatch
    is_sink = False
    stays: str | None = "it has no batch form"  # why it cannot run in the operation stream; None: it can
    time_grain: int | None = None  # ms of which all times are multiples at which it waits for a watermark

    def __init__(self, name: str | None = None, parallelism: int | None = None, on_error: OnError = "fail") -> None:
        if name is not None and (not isinstance(name, str) or not name):
            raise FlowError(f"an operator's name must be a text, not {name!r}")
        if on_error not in POLICIES:
            raise FlowError(f"on_error={on_error!r}: the policies are {', '.join(map(repr, POLICIES))}")
        if parallelism is not None and (
            not isinstance(parallelism, int) or isinstance(parallelism, bool) or parallelism < 1
        ):
            raise FlowError(f"operator {name or self.kind!r}: parallelism={parallelism!r}; it must be 1 or more")
        self.name = name or self.kind
        self.explicit_name = name is not None
        self.parallelism = parallelism
        self.on_error = on_error
        self.declared_at: str | None = None
        self.outputs: tuple[str, ...] = (DEAD_LETTERS,) if on_error == "dead_letter" else ()

    @property
    def state_kind(self) -> str:
        """What its state is, in words: only an operator of the same goes on with what it has saved."""
        return self.kind

    @abstractmethod
    def stage(self, context: StageContext) -> Stage:
        """The running form for one task."""


class Loop(Stage):
    """A stage that is one C-level loop over the batch."""

    def __init__(self, context: StageContext, loop: Callable[[Iterator[Any]], Iterable[Any]]) -> None:
        super().__init__(context)
        self._loop = loop

    def run(self, batch: Batch) -> Batch:
        assert isinstance(batch, list)
        return apply(self._loop, batch, self.errors)


class Gathering(Stage):
    """A stage that may hold records from one batch to the next, so that a call of the user's function gets more of
    them. Its task says when it must let them go; without one (in Spark) it holds nothing."""

    holds = False  # whether what is too little for a call stays when `expand` ends
    stamp = 0  # of the records that come next
    oldest = 0  # the least stamp of the records held
    waits_until = 0  # by the clock; when the first record held should wait no longer
    more_until = 0  # the same while more records come: they make the call worth more
    least = 1  # records that a call should get at least

    @abstractmethod
    def gather(self, clock: Callable[[], int], stopwatch: Callable[[], int]) -> None:
        """It is part of a task: with its clocks, in ns."""

    @property
    @abstractmethod
    def held(self) -> int:
        """The number of records that it holds."""

    @abstractmethod
    def wants(self) -> tuple[int, int]:
        """(records that make the next call full, records of a full call)."""

    @abstractmethod
    def let_go(self, least: int) -> Iterator[Batch]:
        """The outputs for what is held, if that is so many records or more."""
