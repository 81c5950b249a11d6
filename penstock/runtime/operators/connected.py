"""The operator `a.connect(b).process(...)`: a user's function with two inputs, told apart, and one keyed state.

Both inputs are keyed, or the second one goes to all tasks (broadcast). Order is kept for each sender, as everywhere; in
what order records of the two inputs come is not determined. The operator must never let the state that tasks share
depend on records that only some of them have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from penstock.runtime.errors import FlowError
from penstock.runtime.mistakes import called
from penstock.runtime.operators.base import EXPAND_RECORDS_MAX, Stage, StageContext
from penstock.runtime.operators.process import NO_KEY, BroadcastProcessFunction, CoProcessFunction, ProcessFunction
from penstock.runtime.operators.processing import Processing, ProcessStage, full_pieces, rest, taken
from penstock.runtime.records.batch import Batch, KeyedBatch
from penstock.runtime.records.userfunc import check_function, of_no_list
from penstock.runtime.state.keyed import SavedState
from penstock.runtime.units import whole


class Connected(Processing):
    """Two inputs, both keyed, or with `broadcast` one keyed and one that goes to all tasks. `process` is a
    CoProcessFunction or a BroadcastProcessFunction, or a function for each input (`process` and `second`). With a
    `batch_size`, it takes lists of at most so many records of the first input."""

    kind = "connect"
    inputs = 2

    def __init__(
        self,
        process: ProcessFunction | Callable[..., Any],
        second: Callable[..., Any] | None = None,
        *,
        broadcast: bool,
        batch_size: int | None = None,
        **common: Any,
    ) -> None:
        self.broadcast = self.shares = broadcast
        self.second = second
        self.batch_size = None if batch_size is None else whole(batch_size, "process_batches: batch_size")
        if broadcast:
            self.methods = ("process" if batch_size is None else "process_batch", "process_broadcast")
        else:
            self.methods = ("process1", "process2")
        super().__init__(process, **common)

    def _check(self, process: Any) -> None:
        base: type[ProcessFunction] = BroadcastProcessFunction if self.broadcast else CoProcessFunction
        what = f"connect {self.name!r}"
        if isinstance(process, type) and issubclass(process, ProcessFunction):
            raise FlowError(f"{what} needs a {base.__name__}, got {called(process)}")
        if not isinstance(process, ProcessFunction):
            first = ("ctx", "key", "record") if self.batch_size is None else ("ctx", "records")
            check_function(process, what, first, yields=True)
            if self.second is None:
                method = "process" if self.batch_size is None else "process_batches"
                raise FlowError(
                    f"{what}: {method}() got one function; give two, one for each input, or a penstock.{base.__name__}"
                )
            takes = ("ctx", "record") if self.broadcast else ("ctx", "key", "record")
            check_function(self.second, f"{what}: the second function", takes, yields=True)
            return
        if self.second is not None:
            raise FlowError(f"{what}: a {type(process).__name__} has functions for both inputs; do not give another")
        if not isinstance(process, base):
            raise FlowError(
                f"{what}: the second input {'goes to all tasks' if self.broadcast else 'is keyed'}, so process() takes "
                f"a penstock.{base.__name__}; {type(process).__name__} is none"
            )
        self._check_methods(process)

    def functions(self, process: Any) -> tuple[Callable[..., Any], ...]:
        return super().functions(process) if self.second is None else (process, self.second)

    def stage(self, context: StageContext) -> Stage:
        return _BroadcastStage(context, self) if self.broadcast else ProcessStage(context, self)


class _BroadcastStage(ProcessStage):
    """The second input goes to all tasks, and has no keys."""

    def __init__(self, context: StageContext, operator: Connected) -> None:
        super().__init__(context, operator)
        self._shared = self.user.broadcast
        if context.epochs and context.index == 0:
            self._shared.saved_here()
            self.maps[self._shared.title] = self._shared
        self._batch_size = operator.batch_size

    def expand(self, batch: Batch) -> Iterator[Batch]:
        if self.port == 0:
            yield from super().expand(batch) if self._batch_size is None else self._batches(batch, self._batch_size)
            return
        assert isinstance(batch, list)
        process = self._functions[1]
        user, shared = self.user, self._shared
        out = user.emitted
        user.key = NO_KEY
        self._records = iter(batch)
        for record in self._records:
            shared.open = True
            try:
                result = process(user, record)
                if result is not None:
                    yield from taken(result, out)
            except BaseException as error:
                self.errors.handle(record, of_no_list(error))
            finally:
                shared.open = False
            if len(out) >= EXPAND_RECORDS_MAX:
                yield from full_pieces(out)
        yield from rest(out)

    def _batches(self, batch: Batch, size: int) -> Iterator[Batch]:
        """Calls the function with lists of records. When a call fails, all of its records do."""
        assert isinstance(batch, KeyedBatch)
        process, user, records = self._functions[0], self.user, batch.values
        user.key = NO_KEY
        out = user.emitted
        for at in range(0, len(records), size):
            some = records[at : at + size]
            self._records = iter(records[at + size :])
            try:
                result = process(user, some)
                if result is not None:
                    yield from taken(result, out)
            except BaseException as error:
                self.errors.handle(some, of_no_list(error), len(some))
            yield from full_pieces(out)
        yield from rest(out)

    def restore(self, epoch: int, saved: SavedState) -> None:
        super().restore(epoch, saved)
        self._shared.restore(saved.maps.get(self._shared.title, {}))

    def drop_state(self) -> None:
        super().drop_state()
        self._shared.drop()
