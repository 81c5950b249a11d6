"""The operator that makes watermarks from the times of the records that pass it.

The watermark is the greatest time that the task has seen, less the out-of-orderness that the user allows. A record may
be this much earlier than a record before it, and is not late. Where the task reads splits, and its reader says from
which one each record came, the watermark waits for each split that has begun and not ended: splits that two tasks have
read may come to one task, which reads one after the other. A split that begins later does not take the watermark back.
When a task has had no input for some time, it says that it is idle, and holds up no window. A watermark must never
overtake a record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

from penstock.runtime.event_time.watermark import END_OF_TIME, IDLE, are_plain, as_ms, duration_ms, other_unit
from penstock.runtime.operators.base import Operator, Stage, StageContext
from penstock.runtime.records.batch import Batch
from penstock.runtime.records.userfunc import attempt, check_function, each, select
from penstock.runtime.state.keyed import SavedState, StageState


class MakeWatermarks(Operator):
    """Passes records on, and watermarks after them. `time` takes the time of a record from it."""

    kind = "watermark"
    one_to_one = True
    why_not_in_spark = None

    def __init__(
        self,
        time: Callable[[Any], Any],
        out_of_orderness: float | timedelta = 0.0,
        idle: float | timedelta | None = None,
        max_drift: float | timedelta | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        check_function(time, f"watermark {self.name!r}")
        self.time = time
        self.out_of_orderness_ms = duration_ms(
            out_of_orderness, f"watermark {self.name!r}: out_of_orderness_s", least=0
        )
        self.idle_ms = None if idle is None else duration_ms(idle, f"watermark {self.name!r}: idle_s")
        self.max_drift_ms = (
            None if max_drift is None else duration_ms(max_drift, f"watermark {self.name!r}: max_drift_s")
        )

    def stage(self, context: StageContext) -> Stage:
        return Marking(context, self)


class Marking(Stage):
    event_time = True

    def __init__(self, context: StageContext, operator: MakeWatermarks) -> None:
        super().__init__(context)
        self._time = operator.time
        self._out_of_orderness_ms = operator.out_of_orderness_ms
        self.max_drift_ms = operator.max_drift_ms
        self._grain = context.time_grain
        self._greatest: int | None = None  # the greatest time seen
        # The greatest time of each split that has begun and not ended, as far as readers say from which splits records
        # come. `_split`: the split of the records that come now.
        self._of_split: dict[str, int] = {}
        self._split: str | None = None
        self._own_splits: frozenset[str] = frozenset()
        self._reached: int | None = None  # the time that splits have reached together; it never goes back
        self._idle_s = None if operator.idle_ms is None else operator.idle_ms / 1000
        self.timed = self._idle_s is not None
        self._idle = False
        self._silent = False  # no records came for long, but perhaps the task could not read
        self._last = 0.0  # when the last records came

    def open(self) -> None:
        self._last = self.context.wall()

    def run(self, batch: Batch) -> Batch:
        assert isinstance(batch, list)
        time = self._time
        times: list[Any] = []
        with attempt():
            times = each(time, batch)
        if len(times) != len(batch) or not are_plain(times):
            # The time of some record is not a plain number. Find out which one, and whether it is wrong.
            batch, times = select(lambda record: as_ms(time(record)), batch, self.errors)
            if not times:
                return batch
        if self._greatest is None:
            self._check_unit(batch[0])
        self.observe(max(times))
        return batch

    def _check_unit(self, record: Any) -> None:
        """Fails when the first time is most likely not in milliseconds. Datetimes may be of any year."""
        first: Any = None
        with attempt():  # it has been taken before
            first = self._time(record)
        if (unit := other_unit(first)) is not None:
            error = ValueError(
                f"the time {first!r} is most likely in {unit} since 1970, and was taken for milliseconds; give "
                "milliseconds or datetimes with a time zone (by datetimes January 1970 can be said, too)"
            )
            raise self.errors.failure(record, error)

    def doubts(self, greatest: int) -> bool:
        return self._greatest is None and other_unit(greatest) is not None

    def reads(self, splits: Iterable[str]) -> None:
        """Says which splits the task reads. Called once, before anything is restored."""
        self._own_splits = frozenset(splits)

    def come_from(self, split: str | None, has_ended: Callable[[str], bool]) -> None:
        """Says which split the next records come from (None: not known), and which splits have ended."""
        self._split = split
        of_split = self._of_split
        if len(of_split) > 1 or (of_split and split not in of_split):
            self._of_split = {name: time for name, time in of_split.items() if name == split or not has_ended(name)}

    def observe(self, greatest: int) -> None:
        if self._greatest is None or greatest > self._greatest:
            self._greatest = greatest
        of_split, split = self._of_split, self._split
        if split is not None:
            of_split[split] = max(greatest, of_split.get(split, greatest))
        elif of_split:
            self._of_split = {name: max(greatest, time) for name, time in of_split.items()}
        reached = min(self._of_split.values()) if self._of_split else self._greatest
        if self._reached is None or reached > self._reached:
            self._reached = reached
        if self._idle_s is not None:
            self._last = self.context.wall()
            self._idle = self._silent = False

    @property
    def mark(self) -> int | None:
        """The watermark of the task, not rounded. IDLE: its input is idle. None: no record has come."""
        if self._idle:
            return IDLE
        return None if self._reached is None else self._reached - self._out_of_orderness_ms

    @property
    def greatest(self) -> int | None:
        """The greatest time seen."""
        return self._greatest

    def next_timer(self) -> float | None:
        return None if self._idle or self._idle_s is None else self._last + self._idle_s

    def fire(self, now: float) -> Iterator[Batch]:
        # The task is idle only at the second call. Timers and input take turns, so records that waited while the task
        # was blocked are read between the two calls.
        due = self.next_timer()
        if due is not None and due <= now:
            self._idle, self._silent = self._silent, True
        return iter(())

    def watermark(self, watermark: int | None) -> int | None:
        if watermark == END_OF_TIME:
            return END_OF_TIME
        if self._idle:
            return IDLE
        if self._reached is None:
            return None
        mark = self._reached - self._out_of_orderness_ms
        return mark - mark % self._grain

    def snapshot(self, epoch: int, whole: bool) -> StageState:
        return StageState(own=(self._reached, dict(self._of_split)))

    def restore(self, epoch: int, saved: SavedState) -> None:
        # When several tasks have saved a time, the earliest one counts, unless each split's time is known. The records
        # of this task would otherwise be late.
        known = [reached for reached, *_ in saved.own]
        self._greatest = self._reached = None if None in known else min(known, default=None)
        for _, *splits in saved.own:
            for name, time in (splits[0] if splits else {}).items():
                if name in self._own_splits:
                    self._of_split[name] = min(time, self._of_split.get(name, time))
        if self._of_split:
            self._greatest = self._reached = min(self._of_split.values())
