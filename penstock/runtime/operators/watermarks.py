"""The operator that makes watermarks from the times of the records that pass it.

The watermark is the greatest time that the task has seen, less the out-of-orderness that the user allows. A record may
be this much earlier than a record before it, and is not late. Where the task reads splits, and its reader says from
which one each record came, each split has a watermark of its own, and the task sends the least of those of all splits
that have not ended. A split of which no record has come yet has none, so the task has none either. So it makes no
difference to which records are late which task reads which splits, and in what order. When a task has had no input for
some time, it says that it is idle, and holds up no window. A split of an endless source may be idle as well, while
others of the task are not. A watermark must never overtake a record.
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
        what = f"watermark {self.name!r}"
        check_function(time, what)
        self.time = time
        self.out_of_orderness_ms = duration_ms(out_of_orderness, f"{what}: out_of_orderness_s", least=0)
        self.idle_ms = None if idle is None else duration_ms(idle, f"{what}: idle_s")
        self.max_drift_ms = None if max_drift is None else duration_ms(max_drift, f"{what}: max_drift_s")

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
        self._greatest_of: dict[str, int] = {}  # of each split that has begun and not ended
        self._unbegun: list[str] = []  # splits of the task; those at the end that have begun or ended are removed
        self._ended: set[str] = set()  # splits of the task
        self._split: str | None = None  # the split that the records that come now are from; None: it is not known
        self._mixed = False  # they are from several splits
        self._begun: int | None = None  # the time that the splits that have begun have reached together
        self._reached: int | None = None  # the time that all splits have reached together; it never goes back
        self._idle_s = None if operator.idle_ms is None else operator.idle_ms / 1000
        self.timed = self._idle_s is not None
        self._idle = False
        self._silent = False  # no records came for long, but perhaps the task could not read
        self._last = self._opened = 0.0  # when the last records came, and when the stage was opened
        self._last_of: dict[str, float] | None = None  # of each split; None: the splits are not idle each for itself

    def open(self) -> None:
        self._last = self._opened = self.context.wall()

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

    def reads(self, splits: Iterable[str], *, endless: bool = False) -> None:
        """Says which splits the task reads, in the order in which it begins them. Called once, before anything is
        restored. `endless`: a split of which no record comes may be idle."""
        self._unbegun = list(splits)
        if endless and self._idle_s is not None:
            self._last_of = {}

    def come_from(self, split: str | None, has_ended: Callable[[str], bool], *, mixed: bool = False) -> None:
        """Says which split the next records come from, and which splits have ended. None: it is not known, or they are
        `mixed` of several."""
        self._split, self._mixed = split, mixed
        times, unbegun = self._greatest_of, self._unbegun
        if len(times) > 1 or (times and split not in times):
            gone = {name for name in times if name != split and has_ended(name)}
            self._ended |= gone
            self._greatest_of = times = {name: time for name, time in times.items() if name not in gone}
        while unbegun and (unbegun[-1] == split or unbegun[-1] in times or self._has_gone(unbegun[-1], has_ended)):
            unbegun.pop()

    def _has_gone(self, split: str, has_ended: Callable[[str], bool]) -> bool:
        if split not in self._ended and has_ended(split):
            self._ended.add(split)
        return split in self._ended

    def observe(self, greatest: int) -> None:
        if self._greatest is None or greatest > self._greatest:
            self._greatest = greatest
        now = 0.0
        if self._idle_s is not None:
            now = self._last = self.context.wall()
            self._idle = self._silent = False
        times, split = self._greatest_of, self._split
        if split is not None:
            times[split] = max(greatest, times.get(split, greatest))
            if self._last_of is not None:
                self._last_of[split] = now
        elif times and not self._mixed:
            self._greatest_of = times = {name: max(greatest, time) for name, time in times.items()}
        waits = bool(self._unbegun) and (split is not None or self._mixed)
        if self._last_of is not None and self._idle_s is not None and split is not None:
            since = now - self._idle_s
            times = {name: time for name, time in times.items() if self._last_of.get(name, self._opened) > since}
            waits = waits and self._opened > since
        begun = min(times.values()) if times else None if self._mixed else self._greatest
        if begun is not None and (self._begun is None or begun > self._begun):
            self._begun = begun
        if begun is not None and not waits and (self._reached is None or begun > self._reached):
            self._reached = begun

    @property
    def mark(self) -> int | None:
        """How far the task has come: the watermark of the splits that have begun, not rounded. IDLE: its input is idle.
        None: no record has come."""
        if self._idle:
            return IDLE
        return None if self._begun is None else self._begun - self._out_of_orderness_ms

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
        return StageState(own=(self._reached, dict(self._greatest_of), frozenset(self._ended)))

    def restore(self, epoch: int, saved: SavedState) -> None:
        # When several tasks have saved a time, the earliest one counts, unless each split's time is known. The records
        # of this task would otherwise be late.
        known = [reached for reached, *_ in saved.own]
        self._reached = None if None in known else min(known, default=None)
        splits = set(self._unbegun)
        for _, times, ended in saved.own:
            self._ended |= splits & ended
            for name in splits & times.keys():
                self._greatest_of[name] = min(times[name], self._greatest_of.get(name, times[name]))
        found = self._greatest_of.values()
        if len(known) > 1 and found and splits == self._greatest_of.keys() | self._ended:
            self._reached = min(found)
        self._begun = min(found, default=self._reached)
        self._greatest = max(found, default=self._reached)
