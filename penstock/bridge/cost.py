"""The measured cost of a range of operators in either paradigm, and the time for which a micro-batch should gather.

Burst detection (`burst.py`; docs/papers.md: D2) compares two speeds. The paper (DO, ICPP 2018, section 4.2) takes both
as known averages; here they are measured while the job runs:

- `SustainedSpeed`: the records/s that the record tasks sustain as the job runs, the paper's PD (D: data stream). This
  is what they process per second while records wait before them, whatever holds them up: their own work, tasks of the
  same thread, or the operators that follow and take no more.
- `RecordSpeed`: what the record tasks could do alone, which is records over busy seconds. This stands for PD until a
  queue has been seen.
- `ShownSpeed`: the most that the record tasks have processed in a second of the last minutes. This tells what they
  could process again, when they last were slow.
- `BatchSpeed`: Spark. A micro-batch of n records takes

      t(n) = fixed_s + n / rate

  and the two are kept apart, as the paper's Eq. 5 does: `rate` is its PO (O: operation stream), `fixed_s` stands for
  t_s + t_ot, schedule and transmission, which a batch of one record pays as much as a large one. One averaged speed
  would be wrong for every size but the one it was measured at.
- The way of micro-batches to Spark and back is fitted by itself in the same way: the time of a batch of one record is
  t_ot, and what remains of `fixed_s` is t_s.
- `interval`: how long to gather. The paper fixes T at 1 s; here it is the shortest with which Spark keeps up.

Before anything is measured a `Calibration` from an earlier run or a trial stands in; without one, and until batches of
two clearly different sizes have been seen, there is no answer (None), never a guess.

Nothing here reads a clock or knows of Spark.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

# Busy time after which a measurement weighs 1/e: long enough that one slow second (a garbage collection) does not
# decide, short enough that records that become heavier are noticed before the burst they cause is over.
RECORD_MEMORY_S = 5.0

# The same for what the record tasks process while records wait, in seconds of the queue. What an earlier queue has
# shown does not count in the next one.
SUSTAINED_MEMORY_S = 2.0

# The most that the record tasks have shown is averaged over so long, and believed for so long after: then they may have
# other records to process.
SHOWN_OVER_S = 1.0
SHOWN_MEMORY_S = 600.0

# What the record tasks do per busy second counts only of periods in which they were busy for this share: with little to
# do they take batches of one record, which costs more a record than what they do under load.
BUSY_SHARE_MIN = 0.5

# Batches kept of each power of two of sizes. The median of nine is not moved by four slow ones; more would only make
# the answer follow a change later.
BATCHES_A_SIZE = 9

# A size class that has had no batch for so many is forgotten: what Spark took for it then may be true no more.
FORGET_AFTER = 1_000

# The largest size seen must be so many times the smallest to tell the fixed cost from that of the records: with sizes
# nearer to each other a few milliseconds of noise at one of them turn into any slope.
SPREAD_MIN = 3.0

# At least this share of the largest batch's time is put down to its records. Below some size Spark takes as long for
# many as for few; the slope found there is noise, and with it a burst of ten times the size would be promised for
# nothing. With a tenth it is promised for no less than nearly twice the time.
RECORDS_SHARE_MIN = 0.1

# A batch that took less was not processed, or the clock stood.
CLOCK_S = 1e-6

# The share of an interval that a micro-batch leaves to spare, and the time in which a backlog is to be worked off.
_HEADROOM = 0.2
_CATCH_UP_S = 10.0

# Batches that it takes to go by the fit instead of by the calibration.
FIT_AFTER = 4


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch that Spark has processed.

    `seconds`: from its being handed over until its results are there. The first batch after Spark's start, which loads
    and compiles, takes seconds more and is not to be reported. `way_s`: of these, on its way to Spark and back.
    """

    records: float
    seconds: float
    way_s: float | None = None


@dataclass(frozen=True)
class BatchCost:
    """A micro-batch of n records takes `fixed_s` + n / `rate` seconds."""

    fixed_s: float
    rate: float

    def __post_init__(self) -> None:
        if not (self.fixed_s >= 0 and self.rate > 0 and math.isfinite(self.fixed_s)):
            raise ValueError(f"fixed_s={self.fixed_s}, rate={self.rate}: fixed_s must be 0 or more, and rate above 0")

    def seconds(self, records: float) -> float:
        """Returns the time of a batch."""
        return self.fixed_s + records / self.rate

    def capacity(self, interval_s: float) -> float:
        """Returns the most records/s that batches gathered for `interval_s` can carry: the n / T of fixed_s + n / rate
        = T."""
        return self.rate * max(0.0, 1.0 - self.fixed_s / interval_s)


@dataclass(frozen=True)
class Calibration:
    """The assumptions before the job has measured anything, or the measurements of a trial in Spark."""

    record_rate: float | None = None  # records/s of the record tasks: the paper's PD
    batch: BatchCost | None = None  # the paper's PO, t_s + t_ot
    prepare_s: float = 60.0  # a Spark session and the trial of a range, on two cores; measured from then on
    switch_s: float = 1.0  # from the barrier until the range runs in the other paradigm: about one epoch

    def __post_init__(self) -> None:
        if self.record_rate is not None and not self.record_rate > 0:
            raise ValueError(f"record_rate={self.record_rate}: it must be above 0; None says that it is not known")
        if self.prepare_s < 0 or self.switch_s < 0:
            raise ValueError(f"prepare_s={self.prepare_s}, switch_s={self.switch_s}: they must be 0 or more")


class RecordSpeed:
    """Records per busy second of a range's record tasks. `prior`: the speed to assume until there are measurements."""

    def __init__(self, prior: float | None = None) -> None:
        self._busy_s = 0.0 if prior is None else 1.0  # a prior weighs as much as a second of work
        self._records = 0.0 if prior is None else prior
        self._idle: float | None = None  # of a period with little to do: better than nothing

    def add(self, records: float, busy_s: float, period_s: float) -> None:
        """Adds the work of the tasks in a period: the records of all tasks, and for how long a task was busy on
        average."""
        if records <= 0 or busy_s <= 0 or period_s <= 0:
            return
        if busy_s < BUSY_SHARE_MIN * period_s:
            self._idle = records / busy_s
            return
        keep = math.exp(-busy_s / RECORD_MEMORY_S)
        self._records = self._records * keep + records
        self._busy_s = self._busy_s * keep + busy_s

    @property
    def rate(self) -> float | None:
        """Returns records/s, or None when nothing is known."""
        return self._records / self._busy_s if self._busy_s > 0 else self._idle


class SustainedSpeed:
    """Records per second of a range's record tasks while records wait before them.

    A period counts when more was waiting at its beginning than was processed in it: so the tasks were never without
    work. Periods with less waiting only tell how many records came. This is what the tasks sustain at least: a job that
    was slow for a moment when it began would count as slow until the next queue.
    """

    def __init__(self) -> None:
        self.rate: float | None = None  # None: no queue has been seen
        self.alone: float | None = None  # the same per busy second
        self._period_s = 0.0  # of periods with a queue in which nothing was processed yet
        self._period_busy_s = 0.0  # of these, busy
        self._measured_s = 0.0  # for how long, with weights
        self._busy_s = 0.0  # of this, busy
        self._without: tuple[float, float] = (0.0, 0.0)  # (records, seconds) since there was a queue, with weights

    def add(self, records: float, waiting: float, period_s: float, busy_s: float = 0.0) -> None:
        """Adds a period: the records that were processed, the records that waited when the period began, and for how
        long a task was busy on average."""
        if records >= waiting:
            self._period_s = self._measured_s = self._period_busy_s = self._busy_s = 0.0
            kept = math.exp(-period_s / SUSTAINED_MEMORY_S)
            self._without = self._without[0] * kept + records, self._without[1] * kept + period_s
            if self.rate is not None and self._without[1] >= SHOWN_OVER_S:
                self.rate = max(self.rate, self._without[0] / self._without[1])
            return
        self._without = (0.0, 0.0)
        self._period_s += period_s
        self._period_busy_s += busy_s
        if records <= 0 or self._period_s <= 0:
            return  # a pause, as for a barrier: it counts with what is processed after it
        kept = math.exp(-self._period_s / SUSTAINED_MEMORY_S)
        kept_s = self._measured_s * kept
        self._measured_s = kept_s + self._period_s
        self._busy_s = self._busy_s * kept + self._period_busy_s
        self.rate = ((self.rate or 0.0) * kept_s + records) / self._measured_s
        if self._busy_s > 0:
            self.alone = self.rate * self._measured_s / self._busy_s
        self._period_s = self._period_busy_s = 0.0


class ShownSpeed:
    """The most records per second that a range's record tasks have processed lately, whether records waited or not."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._lately = 0.0

    def add(self, records: float, period_s: float) -> None:
        """Adds a period in which the tasks processed a number of records."""
        rate = records / period_s
        self._lately = rate + (self._lately - rate) * math.exp(-period_s / SHOWN_OVER_S)
        self.rate = max(self.rate * math.exp(-period_s / SHOWN_MEMORY_S), self._lately)


class BatchSpeed:
    """`BatchCost` from measured micro-batches; a robust fit that follows changes.

    Batches are kept by size class (powers of two), the last few of each; of each class only the medians count, so a
    pause of the JVM does not; a line through these is found by least squares, in which errors are relative (a tenth of
    a second is much for a batch of 0.1 s, and nothing for one of 2 s). Under a steady load all batches are of one size:
    because the other classes keep what they have, the fit does not forget what small and large batches cost.
    """

    def __init__(self, prior: BatchCost | None = None) -> None:
        self._prior = prior
        self._classes: dict[int, deque[MicroBatch]] = {}
        self._fed: dict[int, int] = {}  # class -> the number of its last batch
        self._number = 0
        self._fit = prior

    def add(self, batches: Iterable[MicroBatch]) -> None:
        """Adds a micro-batch that Spark has processed. Empty batches are ignored."""
        before = self._number
        for batch in batches:
            if batch.records < 1 or batch.seconds < CLOCK_S:
                continue
            self._number += 1
            size = math.frexp(batch.records)[1]
            self._classes.setdefault(size, deque(maxlen=BATCHES_A_SIZE)).append(batch)
            self._fed[size] = self._number
        if self._number == before:
            return
        for size in [size for size, last in self._fed.items() if self._number - last > FORGET_AFTER]:
            del self._classes[size], self._fed[size]
        self._fit = self._fitted()

    @property
    def measured(self) -> bool:
        """Whether a batch has been measured."""
        return self._number > 0

    @property
    def cost(self) -> BatchCost | None:
        """Returns the cost of a batch, or None when it is not known."""
        return self._fit

    def _fitted(self) -> BatchCost | None:
        points = [
            (median(batch.records for batch in kept), median(batch.seconds for batch in kept), len(kept))
            for kept in self._classes.values()
        ]
        n_max, t_max, _ = max(points)
        enough = sum(count for *_, count in points) >= (2 if self._prior is None else FIT_AFTER)
        if not enough or n_max < SPREAD_MIN * min(points)[0]:
            return self._scaled(points)
        weights = [count / t**2 for _, t, count in points]
        total = sum(weights)
        n_mean = sum(w * n for w, (n, _, _) in zip(weights, points, strict=True)) / total
        t_mean = sum(w * t for w, (_, t, _) in zip(weights, points, strict=True)) / total
        spread = sum(w * (n - n_mean) ** 2 for w, (n, _, _) in zip(weights, points, strict=True))
        rise = sum(w * (n - n_mean) * (t - t_mean) for w, (n, t, _) in zip(weights, points, strict=True))
        a_record = max(rise / spread, RECORDS_SHARE_MIN * t_max / n_max)
        fixed_s = t_mean - a_record * n_mean
        if fixed_s < 0:  # no fixed cost can be seen: the line goes through the origin
            fixed_s = 0.0
            a_record = sum(w * n * t for w, (n, t, _) in zip(weights, points, strict=True)) / sum(
                w * n**2 for w, (n, _, _) in zip(weights, points, strict=True)
            )
        return BatchCost(fixed_s, 1.0 / a_record)

    def _scaled(self, points: list[tuple[float, float, int]]) -> BatchCost | None:
        """Returns the prior's costs, both multiplied by the factor by which the measured batches differ from the prior.
        Batches of one size cannot distinguish the two costs."""
        if self._prior is None:
            return None
        times = median(t / self._prior.seconds(n) for n, t, _ in points)
        return BatchCost(self._prior.fixed_s * times, self._prior.rate / times)


def interval(
    arrival_rate: float,
    cost: BatchCost | None,
    *,
    backlog: float = 0.0,
    shortest_s: float = 0.2,
    longest_s: float = 2.0,
    epoch_s: float | None = 1.0,
) -> float:
    """Returns the shortest interval T in which Spark keeps up with `arrival_rate` (V).

    The V*T records that gather in T must be processed before the next batch is there, with a share h (_HEADROOM) of T
    to spare, or a batch that is a little slow makes all later batches late:

        fixed_s + V*T / rate <= (1 - h) * T        so        T >= fixed_s / ((1 - h) - V / rate)

    The fixed cost is what makes T long: at V near 0 it is fixed_s / (1 - h), and it grows without bound as V comes near
    (1 - h) * rate, from where on no interval is long enough: then the longest is taken, at which Spark carries most.
    Shorter is better, as a record waits T/2 on average. A backlog is to be worked off within _CATCH_UP_S, so it
    counts as V + backlog / _CATCH_UP_S.

    `epoch_s`: a micro-batch must not straddle an epoch's barrier more often than it has to, as the barrier waits for
    its end. So T is the epoch interval divided by a whole number, or, if that is too short, a multiple of it: then the
    barriers between wait for the batch's end, and these epochs complete late, but well. The bounds: below 0.2 s Spark's
    fixed cost is all there is; above 2 s its answers are no answer to somebody who asked for a stream.
    """
    if not 0 < shortest_s <= longest_s:
        raise ValueError(f"shortest_s={shortest_s}, longest_s={longest_s}: they must be above 0, and in order")
    allowed = _aligned(shortest_s, longest_s, epoch_s)
    if cost is None:  # the paper's second, or the nearest to it
        return min(allowed, key=lambda s: abs(s - 1.0))
    to_spare = (1.0 - _HEADROOM) - (arrival_rate + backlog / _CATCH_UP_S) / cost.rate
    if to_spare <= 0:
        return allowed[-1]
    needed = cost.fixed_s / to_spare
    return next((seconds for seconds in allowed if seconds >= needed * (1 - 1e-9)), allowed[-1])


def _aligned(shortest_s: float, longest_s: float, epoch_s: float | None) -> list[float]:
    """Returns the intervals between the bounds that agree with the epochs, shortest first, or the bounds alone when
    none does."""
    low, high = shortest_s * (1 - 1e-9), longest_s * (1 + 1e-9)
    fine = 20  # without epochs: steps of a twentieth of the range are fine enough
    if epoch_s is None:
        return [shortest_s + (longest_s - shortest_s) * i / fine for i in range(fine + 1)]
    if not epoch_s > 0:
        raise ValueError(f"epoch_s={epoch_s}: it must be above 0; None says that there are no epochs")
    parts = [epoch_s / k for k in range(max(1, math.floor(epoch_s / high)), math.ceil(epoch_s / low) + 1)]
    multiples = [epoch_s * k for k in range(max(2, math.floor(low / epoch_s)), math.ceil(high / epoch_s) + 1)]
    return sorted(s for s in (*parts, *multiples) if low <= s <= high) or [shortest_s, longest_s]
