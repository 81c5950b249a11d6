"""The input of a source's task: reads the splits of its reader, step by step, and begins the barriers of epochs
(docs/papers.md: A1).

The offsets that an epoch saves must never include a record that follows the barrier of the epoch.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from penstock.runtime.errors import PenstockError, SourceError, shorten
from penstock.runtime.event_time.pace import Pace
from penstock.runtime.event_time.watermark import END_OF_TIME, IDLE, TIME_MAX
from penstock.runtime.exchange.output_cache import OutputCaches
from penstock.runtime.operators.ends import Read
from penstock.runtime.operators.micro_batch import BYTES_MAX
from penstock.runtime.operators.watermarks import Marking
from penstock.runtime.patience import Patience
from penstock.runtime.records.batch import Batch
from penstock.runtime.sources.base import ColumnReader, Reader, Split, bytes_of, together
from penstock.runtime.sources.threaded import ThreadReader
from penstock.runtime.state.keyed import StageState
from penstock.runtime.worker.blackbox import SOURCE
from penstock.runtime.worker.passage import Passage
from penstock.runtime.worker.task_input import TaskInput

logger = logging.getLogger(__name__)

_LONG_READ_S = 0.5


class ReaderInput(TaskInput):
    """The input of a task that reads from a source; see the module's docstring. Methods that a comment does not explain
    are those of TaskInput."""

    is_read = True

    def __init__(
        self,
        passage: Passage,
        clock: Callable[[], int],
        splits: list[Split],
        open_reader: Callable[[list[Split], Callable[[], None]], Reader],
        output_caches: OutputCaches | None,
        *,
        waits_for_more: bool = True,
    ) -> None:
        """`splits` gives the inputs, and the offsets at which reading begins. `open_reader` makes a reader for them;
        its second argument wakes this input. `output_caches` are the caches of the worker's channels; the source waits
        while they are full."""
        super().__init__(passage, clock, waits_for_more=waits_for_more)
        stages = passage.stages
        self.stopping = False
        self.splits = {split.name: split for split in splits}
        self.output_caches = output_caches
        self.patience = Patience(0.0)  # of the worker
        self._triggers: deque[int] = deque()
        self._has_passed = False  # a barrier has passed since the last read
        self._has_told = False  # of a long read
        self._failed_read = False  # the last read has failed, and is to be repeated at this clock time in seconds
        self._has_failed = False  # since it has last had records
        self._retry_at = 0.0
        self._reading = f"read() of {stages[0].context.operator.name}[{stages[0].context.index}]"
        self._due: float = 0.0  # clock time in seconds at which the reader wants to be read again
        self._read_some = False  # whether the last read gave records
        # What holds the task back when it is ahead of other sources, if something does (host/decide/alignment.py).
        self._marking_stage = next(
            (stage for stage in stages if isinstance(stage, Marking) and stage.max_drift_ms is not None), None
        )
        self.reads_until: int | None = None  # the watermark up to which it may read; None: any
        self._pace = Pace()
        self._splits_stages = [stage for stage in stages if isinstance(stage, Marking)]  # they need to know splits
        head = stages[0].context.operator
        for stage in self._splits_stages:
            stage.reads(self.splits, endless=isinstance(head, Read) and not head.source.bounded)
        self._gathered_of: str | None = None  # the split of the records that were read last
        self._has_told_of_splits = False  # that the reader does not name them
        # For what was read for micro-batches that are not answered: the number of records and their split.
        self._diverted_splits: deque[tuple[int, str | None]] = deque()
        self._takes_turns = False  # the reader takes turns among splits, so a micro-batch is what one read gives
        self._diverted = 0  # the number of records in micro-batches that are not answered
        marking = 0 if self._marking_stage is None else stages.index(self._marking_stage)
        self._gathering_first = [stage for stage in passage.gathering if stages.index(stage) < marking]
        self._woken = True
        try:
            self.reader = open_reader(splits, self.wake)
        except PenstockError:
            raise
        except BaseException as error:  # of the source, which may also have called sys.exit()
            raise stages[0].errors.failure("(opening)", error) from error
        # The readers of Penstock know their own failures.
        self._may_repeat = not type(self.reader).__module__.startswith("penstock.")

    def stop(self) -> None:
        """Ends the stream at the next step. What was read already is still processed."""
        self.stopping = True

    def trigger(self, epoch: int) -> None:
        self._triggers.append(epoch)

    def await_alignment(self) -> None:
        """Reads nothing after the first record, until it hears how far the other sources are."""
        if self._marking_stage is not None:
            self.reads_until = -TIME_MAX

    def align(self, least: int | None) -> None:
        """Takes the least watermark of all aligned sources. None: nobody need wait."""
        if self._marking_stage is not None:
            assert self._marking_stage.max_drift_ms is not None
            self.reads_until = None if least is None else least + self._marking_stage.max_drift_ms
            self.wake()

    @property
    def is_aligned(self) -> bool:
        return self._marking_stage is not None

    @property
    def aligned_mark(self) -> int | None:
        """The watermark that others wait for. END_OF_TIME: it reads no more. None: it has none yet."""
        assert self._marking_stage is not None
        return END_OF_TIME if self.had_ended or self.at_end() else self._marking_stage.mark

    @property
    def _is_ahead(self) -> bool:
        """Whether it must not read before other sources have come nearer."""
        if self.reads_until is None or self._marking_stage is None:
            return False
        mark = self._marking_stage.mark
        if mark is None or mark == IDLE:
            return False
        if not (self._diverted or self._gathering_first):
            return mark > self.reads_until
        # What is under way tells its times late, and the task would meanwhile read more and more.
        return mark + self._pace.each * self._under_way > self.reads_until

    @property
    def _under_way(self) -> int:
        """The number of records that were read and are not where watermarks are made."""
        return self._diverted + sum(stage.held for stage in self._gathering_first)

    def _within_drift(self, most: int) -> int:
        """Returns how many of up to `most` records should keep it within its drift."""
        marking = self._marking_stage
        if marking is None:
            return most
        mark, under_way = marking.mark, self._under_way
        if mark == IDLE:
            mark = None
        self._pace.learn(mark, under_way)
        if self.reads_until is None:
            return most
        # Without a watermark nobody knows where the source is. A filter before the watermarks can make this last for
        # long, so the reads must not stay as small as they would be for a source that is ahead.
        assert marking.max_drift_ms is not None
        room = marking.max_drift_ms if mark is None else self.reads_until - mark - self._pace.each * under_way
        return min(most, self._pace.records_within(room))

    def wake(self) -> None:
        """Notes that the reader may have records."""
        self._woken = True

    def ready_in(self) -> float | None:
        at = self._retry_at if self._failed_read else self._due
        return None if at == float("inf") or self._is_ahead else max(0.0, at - self.clock() / 1e9)

    def close(self) -> None:
        try:
            self.reader.close()
        except PenstockError:
            raise
        except BaseException as error:
            raise self.passage.stages[0].errors.failure("(closing)", error) from error

    def take_barrier(self) -> int:
        self._has_passed = True
        return self._triggers.popleft()

    def backlog(self) -> int | None:
        return 0 if self.at_end() else self.reader.backlog()

    def is_full(self) -> bool:
        return not self.at_end() and self.reader.is_full()

    def has_input_to_divert(self) -> bool:
        if self._is_ahead:
            return False
        return not self.at_end() and not (self.output_caches is not None and self.output_caches.full)

    def take_to_divert(self, most: int, *, columns: bool) -> tuple[Any, int, int]:
        self._has_passed = False
        most = self._within_drift(most)
        reader, stage = self.reader, self.passage.stages[0]
        columns = columns and isinstance(reader, ColumnReader)
        parts: list[Any] = []
        splits: list[tuple[int, str | None]] = []
        records = size = 0
        stamp: int | None = None
        try:
            # A reader returns the records that it has at hand, which may be few of those that are ready.
            while records < most and size < BYTES_MAX:
                part = reader.read_arrow(most - records) if isinstance(reader, ColumnReader) and columns else None
                if part is None:
                    part = self._read(most - records)
                if not len(part):
                    break
                parts.append(part)
                splits.append((len(part), reader.split or None))
                records += len(part)
                size += bytes_of(part)
                stamp = stamp or reader.stamp_ns
                if self._splits_stages and len(splits) > 1 and (before := splits[-2][1]) not in (None, splits[-1][1]):
                    self._takes_turns |= not reader.has_ended(before)
                if self._takes_turns or reader.finished or (wait := reader.ready_in()) is None or wait > 0:
                    break
        except SourceError as error:
            raise stage.errors.failure("(reading)", error) from error
        except BaseException as error:
            stage.errors.handle("(reading)", error)
            self.stopping = True
        if self._marking_stage is not None:
            self._pace.read(records)
            self._diverted += records
        if self._splits_stages:
            self._diverted_splits += splits
        input_ = together(parts) if columns else [record for part in parts for record in part]
        return input_, records, stamp or self.clock()

    def take_up_diverted(self, records: int, stamp: int) -> None:
        super().take_up_diverted(records, stamp)
        if self._marking_stage is not None:
            self._diverted -= records
        if not self._splits_stages:
            return
        came_from: set[str | None] = set()
        while records > 0:
            count, split = self._diverted_splits.popleft()
            came_from.add(split)
            records -= count
        under_way = {name for _, name in self._diverted_splits}

        def has_ended(name: str) -> bool:
            return name not in under_way and self.reader.has_ended(name)

        # A micro-batch has one greatest time. When it is of several splits, nobody knows whose time it is.
        mixed = len(came_from) > 1
        for stage in self._splits_stages:
            stage.come_from(None if mixed else next(iter(came_from), None), has_ended, mixed=mixed)

    def _read(self, limit: int) -> list[Any]:
        """Reads, and says so when it took so long that the other tasks of the worker had to wait. When the reader fails
        by an error that may pass, it has no records, and is read again later."""
        began = self.clock()
        reader = self.reader
        before = self._offsets() if self._may_repeat else None
        try:
            records = reader.read(limit)
        except Exception as error:  # of the source; it counts unless it may pass
            wait_s = self._waits_after(error, before)
            if wait_s is None:
                raise
            self._failed_read = self._has_failed = True
            self._retry_at = self.clock() / 1e9 + wait_s
            return []
        self._failed_read = False
        # A reader in a thread of its own may be reading again just now.
        if self._has_failed and (records or not isinstance(reader, ThreadReader)):
            self._has_failed = False
            self.patience.passed(self._reading)
        took = (self.clock() - began) / 1e9
        if took >= _LONG_READ_S and not self._has_told:
            self._has_told = True
            logger.warning(
                "read() of the %s of source %r took %.1f s in task %d, and no other task of its worker ran meanwhile. "
                "Let it return what is there, or set blocking = True in the reader's class, so that it runs in a "
                "thread of its own. This is said once.",
                type(self.reader).__name__,
                self.passage.stages[0].context.operator.name,
                took,
                self.passage.stages[0].context.index,
            )
        return records

    def _waits_after(self, error: Exception, before: dict[str, Any] | None) -> float | None:
        """Returns after how many seconds the reader is to be read again, or None when its error counts. Whoever has
        changed an offset may have left out records."""
        reader = self.reader
        if isinstance(reader, ThreadReader):
            repeats = reader.repeats
        else:
            repeats = before is not None and before == self._offsets()
        return self.patience.failed(self._reading, error, reader.passing_errors) if repeats else None

    def _offsets(self) -> dict[str, Any] | None:
        """Returns where the reader is, or None when it does not say so: a job without epochs never asks."""
        try:
            return dict(self.reader.offsets())
        except Exception:  # of the source; its failure counts when an epoch asks
            return None

    def has_barrier(self) -> bool:
        # The source reads, or ends, between two barriers. Epochs that follow each other faster than the worker can
        # process them would otherwise stop the job.
        return bool(self._triggers) and not (self._has_passed and (self.at_end() or self.has_input()))

    def has_input(self) -> bool:
        if self.at_end() or (self.output_caches is not None and self.output_caches.full) or self._is_ahead:
            return False
        if self._failed_read:
            return self.clock() / 1e9 >= self._retry_at
        return self._woken or self.clock() / 1e9 >= self._due

    def has_more(self) -> bool:
        # If a barrier was asked for, it comes next.
        if not self._read_some or self._triggers or not self.has_input():
            return False
        wait = self.reader.ready_in()
        return wait is not None and wait <= 0

    def at_end(self) -> bool:
        return self.stopping or self.reader.finished

    def own_state(self) -> StageState:
        # Saves the splits themselves, each with the offset after the last record that was read, because a later run may
        # list other splits.
        offsets = self.reader.offsets()
        return StageState(own=[split.at(offsets.get(name, split.offset)) for name, split in self.splits.items()])

    def take(self) -> Iterator[Batch] | None:
        self._has_passed = False
        if self._is_ahead:
            return None
        self._woken = False
        if self.passage.record_by_record is not None:
            self.passage.record_by_record.origin = SOURCE
        stage = self.passage.stages[0]
        try:
            most = self.size.limit
            limit = self._within_drift(most)
            records: Any = self._read(limit)  # which is a user's
            if not isinstance(records, list):
                reader = type(self.reader).__name__
                raise SourceError(f"read() of a {reader} must return a list, and it returned {shorten(records)}")
        except SourceError as error:
            # The input is gone, so no error policy allows the job to continue.
            raise stage.errors.failure("(reading)", error) from error
        except BaseException as error:
            stage.errors.handle("(reading)", error)
            self.stopping = True  # the error policy lets the job continue without the rest of this reader's input
            return None
        self._due = 0.0
        self.more = len(records) >= most  # a step that the drift has bounded does not say that more would fit into it
        if len(records) < limit:
            wait = self.reader.ready_in()
            self._due = float("inf") if wait is None else self.clock() / 1e9 + wait
        self._read_some = bool(records)
        if not records:
            return None
        if (sample := self.sample) is not None:  # read once, because another thread may take it
            sample.add(records, self.clock())
        if self._marking_stage is not None:
            self._pace.read(len(records))
        self.taken = len(records)
        if self._splits_stages and len(self.splits) > 1:
            return self._by_split(records)
        self.passage.stamped(self.reader.stamp_ns or self.clock())
        return self.passage.through(records)

    def _by_split(self, records: list[Any]) -> Iterator[Batch]:
        """Yields the outputs for records, split by split. What was gathered of another one is processed before."""
        stamp = self.reader.stamp_ns or self.clock()
        parts = self.reader.by_split(records)
        left = {split for split, _ in parts}

        def has_ended(split: str) -> bool:
            return split not in left and self.reader.has_ended(split)

        for split, part in parts:
            left.discard(split)
            if split is None:
                self._tell_of_splits()
            elif split:
                if split != self._gathered_of and self.passage.held:
                    yield from self.passage.let_go(everything=True)
                self._gathered_of = split
                for stage in self._splits_stages:
                    stage.come_from(split, has_ended)
            self.passage.stamped(stamp)
            yield from self.passage.through(part)

    def _tell_of_splits(self) -> None:
        if not self._has_told_of_splits:
            self._has_told_of_splits = True
            logger.warning(
                "source %r: the reader of task %d has %d splits and does not say from which one its records come, so "
                "records of a split that is behind the others may be late. Let it read from one split at a time, set "
                "`split`, and answer `has_ended` (see help(penstock.sources.Reader)). Or give the source a task for "
                "each split: flow.read(..., parallelism=%d). This is said once.",
                self.passage.stages[0].context.operator.name,
                self.passage.stages[0].context.index,
                len(self.splits),
                len(self.splits),
            )
