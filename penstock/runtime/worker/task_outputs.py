"""The outputs of a task: take what its stages have made, and send it by the logs (docs/papers.md: A1).

A task runs no further while a log cannot send (back-pressure). Records of side outputs must be in the logs before a
watermark or barrier that follows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from penstock.runtime.exchange.channel import OutChannel
from penstock.runtime.exchange.log import OutLog
from penstock.runtime.exchange.output import Output
from penstock.runtime.records.batch import Batch, singly
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.worker.passage import Passage, may_take
from penstock.runtime.worker.record_by_record import RecordByRecord
from penstock.runtime.worker.shared_batches import SharedBatches


class TaskOutputs:
    """The outputs of the stages of a passage, and of their side outputs. `shared_batches` finds functions of an output
    (a key selector, a combiner) that change records of other tasks."""

    def __init__(self, passage: Passage, clock: Callable[[], int], shared_batches: SharedBatches | None = None) -> None:
        self.logs: list[OutLog] = []
        # The logs that wait for room or credit. Being blocked is no state of the task: it may be blocked in every
        # state.
        self.waiting: list[OutLog] = []
        self._passage = passage
        self._clock = clock
        self._shared_batches = shared_batches
        self._outputs: dict[tuple[str, str | None], list[Output]] = {}  # by (operator, side output or None)
        self._main: list[Output] = []
        self._sides: list[tuple[list[Any], list[Output]]] = []
        self._errors: list[ErrorHandler] = []  # for failures between this task and the next
        self._skipped_before: dict[str, int] = {}  # counted there until the epoch from which the task continues
        self._emitted: set[int] = set()  # the ids of the records of this piece, when changes of records are looked for

    def add(
        self, operator: str, side: str | None, output: Output, errors: ErrorHandler, instead_of: Output | None = None
    ) -> None:
        """Adds an output for an operator, or for one of its side outputs. It may replace another output. `errors`
        handles failures between this task and the next."""
        self._errors.append(errors)
        self.logs += output.logs
        outputs = self._outputs.setdefault((operator, side), [])
        if instead_of is None:
            outputs.append(output)
        else:
            outputs[outputs.index(instead_of)] = output

    def remove(self, logs: Iterable[OutLog]) -> None:
        for log in logs:
            self.logs.remove(log)

    def connect(self) -> None:
        """Completes the outputs when all of them are there."""
        stages = self._passage.stages
        self._main = self._outputs.get((stages[-1].context.operator.name, None), [])
        for stage in stages:
            for tag, records in stage.context.side.items():
                self._sides.append((records, self._outputs.get((stage.context.operator.name, tag), [])))

    def all(self) -> list[Output]:
        """Returns all outputs. Other threads may ask for them."""
        return [output for outputs in list(self._outputs.values()) for output in list(outputs)]

    @property
    def channels(self) -> list[OutChannel]:
        """The channels to all receivers. Other threads may ask for them."""
        return [channel for log in list(self.logs) for channel in log.channels]

    def emit(self, batch: Batch) -> None:
        """Takes a batch that has passed all stages. It is sent by `flush`."""
        self._emit_to(self._main, batch, len(self._passage.stages))

    def _emit_to(self, outputs: list[Output], batch: Batch, first: int) -> None:
        """Gives a batch to outputs. `first`: see `_emit_noted`."""
        noting = self._passage.record_by_record
        if noting is not None:
            self._emit_noted(noting, batch, outputs, first)
        elif self._shared_batches is not None:
            self._emit_checked(self._shared_batches, batch, outputs)
        else:
            for output in outputs:
                output.emit(batch, self._passage.stamp)

    def _emit_sides(self) -> None:
        position = len(self._passage.stages) + len(self._main)
        for records, outputs in self._sides:
            if records:
                self._emit_to(outputs, records[:], position)
                for output in outputs:
                    output.flush()
                records.clear()
            position += len(outputs)
        self._emitted.clear()

    def _emit_checked(self, shared: SharedBatches, batch: Batch, outputs: list[Output]) -> None:
        """Emits a batch, and looks for functions of an output that change its records."""
        if len(outputs) > 1:
            shared.add(batch)
        elif isinstance(batch, list) and (twice := [record for record in batch if id(record) in self._emitted]):
            shared.add(twice)  # an operator has emitted them by two of its outputs
        self._emitted |= set(map(id, batch if isinstance(batch, list) else batch.values))
        for output in outputs:
            output.emit(batch, self._passage.stamp)
            if output.errors is not None:
                shared.check(output.errors)

    def _emit_noted(self, record_by_record: RecordByRecord, batch: Batch, outputs: list[Output], first: int) -> None:
        """Emits a batch in record-by-record mode. Each record is noted before the functions of an output get it.
        `first`: the number that stands for the first of the outputs in a note, because lower numbers stand for
        operators and for other outputs."""
        for position, output in enumerate(outputs, first):
            if output.errors is None:
                output.emit(batch, self._passage.stamp)
                continue
            for one in singly(batch):
                if may_take(one, record_by_record, position, output.errors):
                    output.emit(one, self._passage.stamp)

    def flush(self) -> bool:
        """Sends the records that the logs have queued. Returns True when the task is blocked."""
        self._emit_sides()
        return self._flush(self.logs)

    def flush_combiners(self) -> None:
        for outputs in self._outputs.values():
            for output in outputs:
                output.flush()

    def retry(self) -> bool:
        """Sends the records that wait for room or credit. Returns True when the task is still blocked."""
        return self._flush(self.waiting)

    def _flush(self, logs: list[OutLog]) -> bool:
        before, self.waiting = self.waiting, [log for log in logs if not log.flush()]
        if self.waiting != before:
            now = self._clock()
            for log in before:
                log.stop_over(now)
            for log in self.waiting:
                log.stop(now)
        return bool(self.waiting)

    def watermark(self, mark: int) -> None:
        """Passes a watermark on, behind all outputs that belong before it."""
        self._emit_sides()
        for log in self.logs:
            log.watermark(mark)

    def barrier(self, epoch: int) -> None:
        for log in self.logs:
            log.barrier(epoch)
        self.flush()

    def end(self) -> None:
        for log in self.logs:
            log.end()

    def complete(self, epoch: int) -> None:
        """Drops the records that were kept for going back before this complete epoch."""
        for log in self.logs:
            log.complete(epoch)

    def restore(self, skipped: dict[str, int]) -> None:
        """Counts on from these numbers of skipped records, by the operator to which they were going."""
        self._skipped_before = skipped

    def skipped(self) -> dict[str, int]:
        """Returns the number of records that failed between this task and the next and were skipped, by the operator to
        which they were going."""
        skipped = dict(self._skipped_before)
        for errors in self._errors:
            skipped[errors.operator] = skipped.get(errors.operator, 0) + errors.skipped
        return {name: records for name, records in skipped.items() if records}
