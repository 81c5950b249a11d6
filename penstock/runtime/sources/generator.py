"""A source of generated records at a given pace: load for benchmarks, tests and demonstrations.

The load is open: records are due at times fixed beforehand, whatever the job does, and a job that falls
behind has to catch up, with the delay in its latencies. It must never wait inside read(), and never make an
index twice or leave one out, whatever the number of tasks. A reader of several splits must give all indexes up to
some index before it gives a greater one, unless gaps are random: times mostly grow with the index, and where the splits
have no watermark each, they share one.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from penstock.runtime.errors import FlowError, shorten
from penstock.runtime.records.userfunc import ErrorHandler, apply, check_function
from penstock.runtime.sources.base import Reader, Source, SourceContext, Split, T_co
from penstock.runtime.sources.pace import Schedule, Steps
from penstock.runtime.units import flag, is_whole, seconds, whole

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Arrivals = Literal["constant", "poisson"]
_AHEAD = 4096  # due times computed at once
_SLACK_NS = 100_000_000  # with catch_up=False: how late a reader may be before its schedule is shifted


class Generator(Source[T_co]):
    """Generates the records fn(0), fn(1), fn(2), ..., as fast as possible or at a rate.

        flow.read(ps.sources.Generator(lambda i: {"id": i}, rate=10_000, duration_s=60))
        flow.read(ps.sources.Generator(make_order, rate="5000:10s,60000:10s", arrivals="poisson"))

    `fn`: makes the record of an index; called once for each index.
    `rate`: records a second over all tasks together; None: no limit; steps [(rate, seconds), ...] or the same
    as a text (see `parse_rate`), repeated for ever unless the last step's seconds are None.
    `limit`: the number of records in all. `duration_s`: seconds of the schedule (or a timedelta), after which no
    record is due (without a rate: seconds from the first read, again after a recovery). Without either the source never
    ends.
    `arrivals`: "constant" spaces records evenly, "poisson" gives them random exponential gaps of the same
    mean.
    `seed`: the seed of the gaps, which are the same in every run with the same seed and number of splits.
    `splits`: how many tasks can share the work (None: all tasks of the source); task t makes the indexes t, t +
    splits, ...
    `catch_up`: False lets a task that is more than 0.1 s late shift the rest of its schedule by the delay,
    instead of making all that is due at once. A task that has gone back to an epoch is not late: see Offset.
    `clock`: nanoseconds, in place of the job's clock.

    Latency counts from the time when a record was due, so it includes the time by which the job was late for
    it.

    Errors: FlowError for arguments that make no sense; a record for which fn raises is a failed record (its
    index).

    Offset: the number of records that the split made; a restarted source continues with the next one, which is
    then due at once; the later ones follow at their usual distances, with `catch_up` or without. So a task that
    goes back to an epoch while others continue stays behind them for good, by that epoch and the recovery. A task
    that continues several splits first makes what some of them are behind.
    """

    def __init__(
        self,
        fn: Callable[[int], T_co],
        rate: float | str | Steps | None = None,
        *,
        limit: int | None = None,
        duration_s: float | timedelta | None = None,
        arrivals: Arrivals = "constant",
        seed: int = 0,
        splits: int | None = None,
        catch_up: bool = True,
        clock: Callable[[], int] | None = None,
    ) -> None:
        check_function(fn, "Generator", ("i",))
        if arrivals not in ("constant", "poisson"):
            raise FlowError(f"Generator: arrivals must be 'constant' or 'poisson', got {arrivals!r}")
        if limit is not None and not (is_whole(limit) and limit >= 0):
            raise FlowError(f"Generator: limit must be a whole number of records, 0 or more, got {limit!r}")
        duration_s = None if duration_s is None else seconds(duration_s, "Generator: duration_s")
        if duration_s is not None and not 0 < duration_s < math.inf:
            raise FlowError(
                f"Generator: duration_s must be above 0 seconds, got {duration_s:g}; leave it out for a source without "
                "end"
            )
        if splits is not None and not (is_whole(splits) and splits >= 1):
            raise FlowError(f"Generator: splits must be a whole number, 1 or more, got {splits!r}")
        if clock is not None and not callable(clock):
            raise FlowError(f"Generator: clock must be a function that returns nanoseconds, got {shorten(clock)}")
        self.fn = fn
        self.schedule = None if rate is None else Schedule(rate)
        self.limit = limit
        self.duration_ns = None if duration_s is None else round(duration_s * 1e9)
        self.poisson = arrivals == "poisson"
        self.seed = whole(seed, "Generator: seed", 0)
        self.count = splits
        self.catch_up = flag(catch_up, "Generator: catch_up")
        self.clock = clock
        self.bounded = limit is not None or duration_s is not None

    def paced(self, rate: float | str | Steps | None, duration_s: float | None) -> Generator:
        """Returns a generator of the same records at another rate ("max": as fast as possible; None: unchanged) and for
        so many seconds (0: without end, but for `limit`; None: unchanged)."""
        other = copy.copy(self)
        if rate is not None:
            other.schedule = None if rate == "max" else Schedule(rate)
        if duration_s is not None:
            other.duration_ns = round(duration_s * 1e9) or None
        other.bounded = other.limit is not None or other.duration_ns is not None
        return other

    def splits(self, parallelism: int) -> list[Split]:
        count = self.count or max(1, parallelism)
        return [Split(f"{t} of {count}", (t, count)) for t in range(count)]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        return _GeneratorReader(self, splits, context.errors, self.clock or context.clock)

    def describe(self) -> str:
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        parts = [name]
        if self.schedule is not None:
            steps = self.schedule.steps
            if len(steps) == 1 and steps[0][1] is None:
                parts.append(f"{steps[0][0]:,.6g}/s")
            else:
                parts.append(", ".join(f"{r:,.6g}/s" + ("" if s is None else f" for {s:g} s") for r, s in steps))
            if self.poisson:
                parts.append("poisson")
        if self.limit is not None:
            parts.append(f"limit={self.limit:,}")
        if self.duration_ns is not None:
            parts.append(f"duration={self.duration_ns / 1e9:g} s")
        return f"Generator({', '.join(parts)})"


class _Track:
    """Holds one split's position in its sequence, and its due times."""

    def __init__(self, source: Generator, split: Split) -> None:
        import numpy as np

        self.name = split.name
        self.first: int
        self.stride: int
        self.first, self.stride = split.payload
        self.made: int = split.offset or 0
        self.ended = False
        self._schedule = source.schedule
        self._duration_ns = source.duration_ns
        self._catch_up = source.catch_up
        self._most: int | None = None
        if source.limit is not None:
            self._most = max(0, -(-(source.limit - self.first) // self.stride))
        self._random = np.random.default_rng((source.seed, self.first, self.stride)) if source.poisson else None
        self._gaps = 0.0  # the sum of the exponential gaps drawn
        self._due: npt.NDArray[np.int64] = np.empty(0, np.int64)  # of the records from self._due_first on
        self._due_first = 0
        self.start: int | None = None  # the clock's time at which the schedule began

    @property
    def next_index(self) -> int:
        """The index that comes next."""
        return self.first + self.made * self.stride

    def below(self, index: int) -> int:
        """Returns how many of the indices that come next are less than this one."""
        return max(0, -(-(index - self.next_index) // self.stride))

    def next_due_after_start(self) -> int:
        """Returns how long after the start of the schedule the next record is due."""
        self._fill()
        return int(self._due[self.made - self._due_first])

    def take(self, now: int, limit: int) -> tuple[range, int | None]:
        """Returns the indices that are due, at most `limit`, and when the first of them was due."""
        if self._most is not None:
            limit = min(limit, self._most - self.made)
        count = max(0, limit)
        stamp: int | None = None
        if self._schedule is None:
            if self.start is None:
                self.start = now
            if self._duration_ns is not None and now - self.start >= self._duration_ns:
                self.ended = True
                count = 0
        else:
            count = self._count_due(now, count)
            if count:
                stamp = self._next_due()
        first = self.first + self.made * self.stride
        self.made += count
        if self._most is not None and self.made >= self._most:
            self.ended = True
        return range(first, first + count * self.stride, self.stride), stamp

    def backlog(self, now: int) -> int:
        """Returns how many records are due that have not been made. With random gaps it is an estimate."""
        if self.ended:
            return 0
        if self._schedule is None or self.start is None:
            return 0 if self._most is None else self._most - self.made
        passed = now - self.start
        if self._duration_ns is not None:
            passed = min(passed, self._duration_ns - 1)
        low, step = self.made, 1
        while self._is_due(low + step, passed):  # doubling, then halving: a schedule knows times of counts only
            low, step = low + step, 2 * step
        while step > 1:
            step //= 2
            if self._is_due(low + step, passed):
                low += step
        due = low - self.made + self._is_due(low, passed)
        return due if self._most is None else min(due, self._most - self.made)

    def _is_due(self, number: int, passed: int) -> bool:
        import numpy as np

        assert self._schedule is not None
        return bool(self._schedule.due_ns(np.array([self.first + float(number) * self.stride]))[0] <= passed)

    def next_due(self) -> int | None:
        """Returns when the next record is due. None means: whenever it is asked for."""
        return None if self._schedule is None else self._next_due()

    def _next_due(self) -> int:
        assert self.start is not None, "take() sets the start"
        return self.start + self.next_due_after_start()

    def _count_due(self, now: int, limit: int) -> int:
        self._fill()
        at = self.made - self._due_first
        if self.start is None:
            self.start = now - (int(self._due[at]) if self.made else 0)
        if not self._catch_up:
            late = now - self._next_due()
            if late > _SLACK_NS:
                self.start += late
        due = self._due[at : at + limit]
        count = int(due.searchsorted(now - self.start, side="right"))
        if self._duration_ns is not None:
            left = int(due.searchsorted(self._duration_ns, side="left"))
            self.ended = at < len(self._due) and int(self._due[at]) >= self._duration_ns
            count = min(count, left)
        return count

    def _fill(self) -> None:
        """Prepares the due time of the next record."""
        import numpy as np

        while self.made >= self._due_first + len(self._due):
            self._due_first += len(self._due)
            if self._random is None:
                self._due_first = self.made
                numbers = np.arange(self.made, self.made + _AHEAD, dtype=np.float64)
                counts = self.first + numbers * self.stride
            else:
                gaps = self._gaps + np.cumsum(self._random.standard_exponential(_AHEAD))
                self._gaps = float(gaps[-1])
                counts = gaps * self.stride
            assert self._schedule is not None
            self._due = self._schedule.due_ns(counts)


class _GeneratorReader(Reader):
    def __init__(self, source: Generator, splits: list[Split], errors: ErrorHandler, clock: Callable[[], int]) -> None:
        self._tracks = [_Track(source, split) for split in splits]
        self._active = list(self._tracks)
        self._loop = partial(map, source.fn)
        self._clock = clock
        self._errors = errors
        self._turn = itertools.count()
        self._parts: list[tuple[str, int]] = []  # of the last read: the splits, and how many records are of each
        self._random = source.poisson
        # Several tasks may have made the splits until now, each of them as far as it came.
        self._apart = source.schedule is not None and len(splits) > 1 and any(track.made for track in self._tracks)
        self.finished = not splits

    def read(self, limit: int) -> list[Any]:
        self.stamp_ns = None
        now = self._clock()
        if self._apart:
            self._apart = False
            # The record of the split that is furthest is due now, and what the others are behind was due before.
            start = now - max(track.next_due_after_start() for track in self._active if track.made)
            for track in self._active:
                track.start = start
        out: list[Any] = []
        self._parts = []
        end = self._end_of_read(limit) if self._in_order else None
        turn = next(self._turn) % max(1, len(self._active))  # so that no track always comes last
        for track in self._active[turn:] + self._active[:turn]:
            most = limit - len(out)
            indices, stamp = track.take(now, most if end is None else min(most, track.below(end)))
            if stamp is not None and (self.stamp_ns is None or stamp < self.stamp_ns):
                self.stamp_ns = stamp
            if indices:
                made = apply(self._loop, list(indices), self._errors)
                self._parts.append((track.name, len(made)))
                out = out + made if out else made
        if any(track.ended for track in self._active):
            self._active = [track for track in self._active if not track.ended]
            self.finished = not self._active
        return out

    def by_split(self, records: list[Any]) -> list[tuple[str | None, list[Any]]]:
        rest = iter(records)
        return [(name, list(itertools.islice(rest, count))) for name, count in self._parts]

    def has_ended(self, split: str) -> bool:
        return all(track.name != split for track in self._active)

    @property
    def _in_order(self) -> bool:
        """Whether indexes come in order. Random gaps make them due in another order."""
        return len(self._active) > 1 and not self._random

    def _end_of_read(self, limit: int) -> int:
        """Returns the index before which all splits together have at most `limit` records, but at least one."""
        least = min(track.next_index for track in self._active)
        low, high = least + 1, least + limit * max(track.stride for track in self._active)
        while low < high:
            middle = (low + high + 1) // 2
            if sum(track.below(middle) for track in self._active) <= limit:
                low = middle
            else:
                high = middle - 1
        return low

    def ready_in(self) -> float:
        # The least index is due first, and no other one may come before it.
        active = [min(self._active, key=attrgetter("next_index"))] if self._in_order else self._active
        due = [track.next_due() for track in active]
        if not due or None in due:
            return 0.0
        return max(0, min(time for time in due if time is not None) - self._clock()) / 1e9

    def backlog(self) -> int:
        now = self._clock()
        return sum(track.backlog(now) for track in self._active)

    def offsets(self) -> dict[str, Any]:
        return {track.name: track.made for track in self._tracks}

    def close(self) -> None:
        self._active = []
        self.finished = True
