"""The two phases of one task of a sink: keeps what its writer has prepared until it is committed.

A task saves with each epoch all committables that are not known to be committed. One commit is under way at a time, for
all complete epochs, beside the loop (docs/decisions/18). A committable must never be forgotten before it is committed,
nor committed before its epoch is complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from penstock.runtime.calls import done, when_done
from penstock.runtime.errors import PenstockError
from penstock.runtime.sinks.base import Committable, Sink, SinkCommitter, SinkContext

# How long a cancelled job waits for a commit that is under way.
_CANCEL_S = 4.0


@dataclass
class SavedSink:
    """The data that a task of a sink saves with an epoch: its writer's state, and all that may not be committed yet."""

    state: Any = None
    committables: list[Committable] = field(default_factory=list)


class TwoPhases:
    """See the module's docstring. `blamed(what)` is the context in which the sink's methods are called."""

    def __init__(
        self,
        sink: Sink,
        context: SinkContext,
        blamed: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.writer = sink.writer(context)
        self._sink = sink
        self._context = context
        self._blamed = blamed
        self._clock = clock
        self._committer: SinkCommitter | None = None  # made and used by the steps beside the loop
        self._held: list[tuple[int, Future[Any]]] = []  # by epoch: what is prepared and not known to be committed
        self._complete = 0  # the last complete epoch that was to be committed
        self._committed = 0
        self._next_s = clock() + sink.commit_interval_s
        self._last = False  # no further epoch will be committed, so nothing may wait for one
        self._closed = False
        self._under_way: Future[None] | None = None
        self._settled: Future[None] | None = None  # of those who wait for all commits

    def restore(self, epoch: int, saved: list[SavedSink]) -> None:
        """Continues from the states that earlier writers have saved. Their committables are committed."""
        self._complete = self._committed = epoch
        with self._blamed(f"(going back to epoch {epoch})"):
            self.writer.restore(epoch, [one.state for one in saved if one.state is not None])

    def prepare(
        self, epoch: int, patiently: Callable[[Callable[[], Any]], Any]
    ) -> SavedSink | Future[SavedSink | None] | None:
        """Returns the data that the task has to save, or None. `patiently` takes a step of the writer."""
        with self._blamed(f"(preparing epoch {epoch})"):
            made = patiently(lambda: self.writer.prepare(epoch))
            if made is not None:
                self._held.append((epoch, made if isinstance(made, Future) else done(made)))
            state = self.writer.state()
        held = list(self._held)
        if all(future.done() for _, future in held):
            return self._saved(state, held)
        answer: Future[SavedSink | None] = Future()
        when_done([future for _, future in held], partial(self._on_loop, partial(self._answer, answer, state, held)))
        return answer

    def _saved(self, state: Any, held: list[tuple[int, Future[Any]]]) -> SavedSink | None:
        found = self._committables(held)
        return SavedSink(state, found) if found or state is not None else None

    def _committables(self, held: list[tuple[int, Future[Any]]]) -> list[Committable]:
        found: list[Committable] = []
        for epoch, future in held:
            with self._blamed(f"(preparing epoch {epoch})"):
                if (data := future.result()) is not None:
                    found.append(Committable(epoch, self._context.index, data))
        return found

    def _answer(self, answer: Future[SavedSink | None], state: Any, held: list[tuple[int, Future[Any]]]) -> None:
        answer.set_result(self._saved(state, held))

    def _on_loop(self, function: Callable[[], None]) -> None:
        """Has something done in the loop's thread, unless the task was closed by then."""

        def unless_closed() -> None:
            if not self._closed:
                function()

        self._context.on_loop(unless_closed)

    def complete(self, epoch: int, *, last: bool = False) -> Future[None]:
        """Commits all epochs up to this one, or leaves them for a later commit unless this is the `last`. The future is
        done when no commit is under way or due."""
        self._complete = max(self._complete, epoch)
        self._last |= last
        self._settled = settled = self._settled or Future()
        if self._under_way is None:
            self._commit()
        return settled

    def _commit(self) -> None:
        epoch = self._complete
        due = [one for one in self._held if one[0] <= epoch]
        if due and (self._last or self._clock() >= self._next_s):
            self._next_s = self._clock() + self._sink.commit_interval_s
            committables = self._committables(due)
            self._under_way = under_way = self._context.steps.do(lambda: self._try_to_commit(committables))
            when_done([under_way], partial(self._on_loop, partial(self._has_committed, epoch, under_way)))
            return
        if not due:
            self._are_committed(epoch)
        settled, self._settled = self._settled, None
        if settled is not None:
            settled.set_result(None)

    def _try_to_commit(self, committables: list[Committable]) -> None:
        """Commits, and tries again while the errors may pass. It is called beside the loop."""
        if self._committer is None:
            self._committer = committer_of(self._sink, self._context)
        commit_patiently(self._committer, self._context, committables)

    def _has_committed(self, epoch: int, commit: Future[None]) -> None:
        self._under_way = None
        with self._blamed(f"(committing epoch {epoch})"):
            commit.result()
        self._are_committed(epoch)
        self._commit()  # epochs that are complete since, if there are any

    def _are_committed(self, epoch: int) -> None:
        if epoch > self._committed:
            self._committed = epoch
            self._held = [one for one in self._held if one[0] > epoch]
            with self._blamed(f"(committing epoch {epoch})"):
                self.writer.committed(epoch)

    def cancel(self, epoch: int) -> None:
        """Commits everything up to this complete epoch, and notes that the job will not be resumed."""
        self._context.steps.close().result(_CANCEL_S)
        due = [one for one in self._held if one[0] <= epoch]
        if due:
            self._try_to_commit(self._committables(due))
        self._are_committed(epoch)
        self.writer.cancel(epoch)

    def close(self, failed: bool) -> Future[None]:
        """Closes the writer. The future is done when the committer is closed too, which may be at work."""
        self._closed = True
        idle = self._context.steps.close()
        try:
            self.writer.close(failed)
        finally:
            closed: Future[None] = Future()
            when_done([idle], partial(self._close_committer, closed))
        return closed

    def _close_committer(self, closed: Future[None]) -> None:
        committer, self._committer = self._committer, None
        try:
            if committer is not None:
                committer.close()
        finally:
            closed.set_result(None)


def committer_of(sink: Sink, context: SinkContext) -> SinkCommitter:
    """Returns a new committer of a sink whose writers have prepared something."""
    committer = sink.committer(context)
    if committer is None:
        raise PenstockError(
            f"{sink.describe()}: a writer's prepare() has returned something to commit, and the sink has no committer()"
        )
    return committer


def commit_patiently(committer: SinkCommitter, context: SinkContext, committables: list[Committable]) -> None:
    """Commits, and tries again while the errors may pass."""
    context.watched("commit()", lambda: committer.commit(committables), committer.passing_errors)


def commit_saved(sink: Sink, context: SinkContext, saved: list[SavedSink]) -> None:
    """Commits the committables that tasks have saved, before any writer of the sink is made again."""
    committables = [one for each in saved for one in each.committables]
    if not committables:
        return
    committer = committer_of(sink, context)
    try:
        commit_patiently(committer, context, sorted(committables, key=lambda one: one.epoch))
    finally:
        committer.close()
