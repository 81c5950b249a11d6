"""The passage of a task: how records, watermarks, timers and the end pass the stages of its chain (docs/papers.md: A1).

Each method that processes something returns its outputs piece by piece, after they have passed all later stages. The
caller decides what is processed next, and sends the outputs.

Some stages *gather* records from one step to the next, so that a call of the user's function gets more of them. The
passage lets them go when they need not wait longer. In record-by-record mode, each record is noted before an operator
gets it (record_by_record.py). A watermark must never pass an output for what came before it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import chain
from typing import Literal

from penstock.runtime.event_time.watermark import END_OF_TIME
from penstock.runtime.operators.base import Stage, run_stages
from penstock.runtime.operators.batches import Gathering
from penstock.runtime.operators.calls_in_flight import CallsInFlight
from penstock.runtime.records.batch import Batch, singly
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.state.keyed import SHARED, Counters, SavedState, StageState
from penstock.runtime.worker.blackbox import MADE, BlackBox
from penstock.runtime.worker.record_by_record import Poison, RecordByRecord

logger = logging.getLogger(__name__)

#: An operator, and which of its methods is being called.
Hook = tuple[str, Literal["open", "close", "finish"]]


class Passage:
    """See the module's docstring. `wall` is the clock for timers, in seconds since 1970."""

    def __init__(self, stages: list[Stage], clock: Callable[[], int], wall: Callable[[], float]) -> None:
        self.stages = stages
        self.timed = [stage for stage in stages if stage.timed]
        self.gathering = [stage for stage in stages if isinstance(stage, Gathering)]
        self.pending = stages[0] if isinstance(stages[0], CallsInFlight) else None
        self.marking = any(stage.event_time for stage in stages)
        self.mark: int | None = None  # the watermark after the stages
        self.stamp = 0  # of the records that pass now
        self.collected = 0  # the number of records whose outputs the last `collect` has taken from the pending stage
        self.record_by_record: RecordByRecord | None = None  # set in a task that was running at a death
        self.box: BlackBox | None = None  # notes the hook
        self._hook: Hook | None = None
        self.mark_in: int | None = None  # the watermark before the stages
        self._clock = clock
        self.wall = wall
        # Says whether more records come next, for which gathered records may wait. The input of the task sets it.
        self.has_more: Callable[[], bool] = lambda: False

    # --- the life of the stages ----------------------------------------------------------------------------------

    @property
    def hook(self) -> Hook | None:
        """The operator that is being opened, closed or finished, and which of these; other threads may ask."""
        return self._hook

    @hook.setter
    def hook(self, hook: Hook | None) -> None:
        self._hook = hook
        if self.box is not None:
            self.box.doing("" if hook is None else f"in {hook[1]}() of operator {hook[0]!r}")

    def open(self) -> None:
        """Opens the stages. Errors count as the operator's own."""
        for stage in self.stages:
            self.hook = (stage.context.operator.name, "open")
            with stage.errors.blamed("(opening)"):
                stage.open()

    def begin(self) -> None:
        """Lets the stages begin, because all tasks are built. Errors count as those of opening."""
        for stage in self.stages:
            self.hook = (stage.context.operator.name, "open")
            with stage.errors.blamed("(opening)"):
                stage.begin()
        self.hook = None

    def close(self, failed: bool) -> None:
        """Closes the stages, also after an error. Errors of closing count as the operator's own, too; the first of them
        is raised when all stages are closed."""
        first: Exception | None = None
        for stage in self.stages:
            self.hook = (stage.context.operator.name, "close")
            try:
                with stage.errors.blamed("(closing)"):
                    stage.close(failed)
            except Exception as error:  # the other stages must be closed too
                first = first or error
        if first is not None:
            raise first

    def restore(self, epoch: int, saved: dict[str, SavedState]) -> None:
        """Lets the stages start from the state that was saved at a complete epoch."""
        for stage in self.stages:
            state = saved.get(stage.context.operator.name, SavedState())
            stage.records_in, stage.records_out, stage.errors.skipped, stage.late = state.counters
            with stage.errors.blamed(f"(going back to epoch {epoch})"):
                stage.restore(epoch, state)

    def states(
        self, epoch: int, own: StageState | None, *, whole: bool, finished: bool
    ) -> dict[str, tuple[StageState | None, Counters]]:
        """Returns the state of each stage to save, by operator, and its counters. `own`: the state of the first stage,
        when the task knows it."""
        states = {}
        for stage in self.stages:
            counters = (stage.records_in, stage.records_out, stage.errors.skipped, stage.late)
            state = own if own is not None and stage is self.stages[0] else stage.snapshot(epoch, whole)
            if finished and state is not None:
                # The keys of an ended task are no longer needed, but other tasks may still need what it saves for them.
                # And the coordinator keeps only this snapshot, so it must build on no other.
                shared = {name: delta for name, delta in state.maps.items() if name.startswith(SHARED)}
                state = StageState(shared, state.own)
            states[stage.context.operator.name] = (state, counters)
        return states

    def complete(self, epoch: int, *, last: bool = False) -> list[Future[None]]:
        """Commits an epoch. Returns the commits that are under way."""
        commits = [under_way for stage in self.stages if (under_way := stage.commit(epoch, last=last)) is not None]
        if self.record_by_record is not None and not self.record_by_record.completed(epoch):
            self.record_by_record = None
        return commits

    def cancel(self, epoch: int) -> None:
        """Notes that the job is cancelled after this complete epoch. `close` follows."""
        for stage in self.stages:
            try:
                stage.cancel(epoch)
            except Exception:  # the other sinks, and the other tasks, must still do it
                logger.exception("what %s has committed may not be visible", stage.context.operator.name)

    # --- what waits in the stages --------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """The number of records that the stages have gathered. Other threads may ask."""
        return sum(stage.held for stage in self.gathering)

    @property
    def begun(self) -> int:
        """The number of records of the input that a step has begun with, and that wait for an operator's function.
        Other threads may ask."""
        first = self.stages[0]
        return round(sum(stage.left * first.records_in / max(1, stage.records_in) for stage in self.stages))

    @property
    def moved(self) -> int:
        """The number of records that the stages have taken and made so far."""
        return sum(stage.records_in + stage.records_out for stage in self.stages)

    def timer_due(self) -> bool:
        """Returns whether some stage has a timer that is due."""
        if not self.timed:
            return False
        now = self.wall()
        return any((at := stage.next_timer()) is not None and at <= now for stage in self.timed)

    def has_waited(self) -> bool:
        """Returns whether the records that some stage has gathered should wait no longer."""
        return any(stage.held and stage.waits_until <= self._clock() for stage in self.gathering)

    def ready_in(self) -> float | None:
        """Returns in how many seconds a stage has something to do without a message or a wake-up, or None when none
        will."""
        times = [] if self.pending is None else [self.pending.ready_in()]
        times += [max(0, stage.waits_until - self._clock()) / 1e9 for stage in self.gathering if stage.held]
        times += [max(0.0, at - self.wall()) for stage in self.timed if (at := stage.next_timer()) is not None]
        return min((due for due in times if due is not None), default=None)

    # --- passing -------------------------------------------------------------------------------------------------

    def stamped(self, stamp: int) -> None:
        """Notes that the next records for the stages have this stamp. Gathered records may be older."""
        self.stamp = stamp
        if self.pending is not None:
            self.pending.stamp = stamp
        for stage in self.gathering:
            stage.stamp = self.stamp
            if stage.held:
                self.stamp = min(self.stamp, stage.oldest)

    def through(self, batch: Batch) -> Iterator[Batch]:
        """Yields the outputs for a batch, and then the outputs that a watermark releases which the batch has
        brought."""
        return self._through_and_behind(batch) if self.marking or self.gathering else self.run(batch, 0)

    def _through_and_behind(self, batch: Batch) -> Iterator[Batch]:
        yield from self.run(batch, 0)
        yield from self.let_go()
        if self.marking:
            yield from self.advance()

    def run(self, batch: Batch, first: int) -> Iterator[Batch]:
        """Yields the outputs of the stages from `first` on, in pieces of limited size that are not empty."""
        record_by_record = self.record_by_record
        return (
            run_stages(self.stages, batch, first)
            if record_by_record is None
            else self._run_record_by_record(record_by_record, batch, first)
        )

    def _run_record_by_record(self, record_by_record: RecordByRecord, batch: Batch, first: int) -> Iterator[Batch]:
        """The same as `run`, but record by record. Each record is noted before an operator gets it."""
        for one in singly(batch):
            record_by_record.next(record_by_record.origin if first == 0 else MADE)
            yield from self._one_by_one(record_by_record, one, first)

    def _one_by_one(self, record_by_record: RecordByRecord, batch: Batch, position: int) -> Iterator[Batch]:
        """Yields the outputs for one record. `batch` is this record, or the outputs for it of the operators before
        `position`."""
        if position == len(self.stages):
            yield batch
            return
        stage = self.stages[position]
        for one in singly(batch):
            if not may_take(one, record_by_record, position, stage.errors):
                continue
            stage.records_in += 1
            for piece in stage.expand(one) if stage.expands else (stage.run(one),):
                if piece:
                    stage.records_out += len(piece)
                    yield from self._one_by_one(record_by_record, piece, position + 1)

    def collect(self, pending: CallsInFlight) -> Iterator[Batch]:
        """Yields the answers to earlier records, and the outputs that the watermark releases that follows them."""
        self.stamped(self._clock())
        before = pending.under_way
        for piece in pending.collect():
            self.stamped(pending.oldest)
            pending.records_out += len(piece)
            yield from self.run(piece, 1)
        self.collected = before - pending.under_way
        yield from self.let_go()
        yield from self.advance()

    def let_go(self, everything: bool = False) -> Iterator[Batch]:
        """Yields the outputs for gathered records that need not wait longer, or for all of them (`everything`)."""
        for stage in self.gathering:
            if not stage.held:
                continue
            more = self.has_more()
            overdue = (
                everything or not stage.holds or (stage.more_until if more else stage.waits_until) <= self._clock()
            )
            if overdue or not more:
                for piece in stage.let_go(1 if overdue else stage.least):
                    stage.records_out += len(piece)
                    yield from self.run(piece, self.stages.index(stage) + 1)

    def let_go_now(self, *, everything: bool = False) -> Iterator[Batch]:
        """Yields the same as `let_go`, when no other records pass in this step."""
        self.stamped(self._clock())
        return self.let_go(everything)

    def advance_to(self, mark: int | None) -> Iterator[Batch]:
        """Yields the outputs that the task's next watermark releases. The end of time comes with the task's own end,
        because a stage may emit records then."""
        self.stamped(self._clock())
        if mark != END_OF_TIME:
            self.mark_in = mark
        return self.advance()

    def advance(self) -> Iterator[Batch]:
        """Yields the outputs that the task's watermark releases."""
        mark = self.mark_in
        for i, stage in enumerate(self.stages):
            if stage.event_time or isinstance(stage, Gathering):  # a pending stage is among the first
                for piece in stage.advance(mark):
                    stage.records_out += len(piece)
                    yield from self.run(piece, i + 1)
                mark = stage.watermark(mark)
        self.mark = mark

    def fire(self) -> Iterator[Batch]:
        """Yields the outputs of timers that are due."""
        self.stamped(self._clock())
        now = self.wall()
        for stage in self.timed:
            position = self.stages.index(stage)
            for piece in stage.fire(now):
                stage.records_out += len(piece)
                yield from self.run(piece, position + 1)
        yield from self.let_go()
        if self.marking:
            yield from self.advance()

    def finish(self) -> Iterator[Batch]:
        """Yields the last outputs of every stage."""
        self.stamped(self._clock())
        for i, stage in enumerate(self.stages):
            last = chain(stage.advance(END_OF_TIME), stage.finish()) if stage.event_time else stage.finish()
            for piece in self._in_finish(stage, last):
                stage.records_out += len(piece)
                yield from self.run(piece, i + 1)

    def _in_finish(self, stage: Stage, pieces: Iterator[Batch]) -> Iterator[Batch]:
        """Yields these pieces, and notes that the stage finishes for as long as it makes one."""
        while True:
            self.hook = (stage.context.operator.name, "finish")
            piece = next(pieces, None)
            self.hook = None
            if piece is None:
                return
            yield piece


def may_take(one: Batch, record_by_record: RecordByRecord, position: int, errors: ErrorHandler) -> bool:
    """Notes that the operator or output at this position is about to get a batch of one record. Returns False when the
    record is poison there, and has failed. `errors` decides about such a record."""
    try:
        record_by_record.check(position, one)
    except Poison as poison:
        errors.handle(one[0] if isinstance(one, list) else one.values[0], poison)
        return False
    return True
