"""Counters and latency histograms. They cost a few operations for each batch, and must
never cost any for each record.
"""

from __future__ import annotations

_SUB_BITS = 4  # 16 buckets for each power of two: a value is known to within 6 %
_SUB = 1 << _SUB_BITS
_BUCKETS = 64 * _SUB

# Greater than every age.
_NEVER = 1 << 63


class Histogram:
    """Counts of whole numbers in buckets of logarithmic size, each divided linearly. A histogram takes 8 KiB, and two
    are merged by addition."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * _BUCKETS
        self.total = 0

    def add(self, value: int, times: int = 1) -> None:
        """Counts `value` (below 1: as 0) `times` times."""
        if value < _SUB:
            index = max(value, 0)
        else:
            shift = value.bit_length() - _SUB_BITS - 1
            index = ((shift + 1) << _SUB_BITS) + (value >> shift) - _SUB
        self.counts[index] += times
        self.total += times

    def merge(self, other: Histogram) -> None:
        """Adds the counts of another histogram."""
        if not other.total:
            return
        if self.total:
            self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        else:
            self.counts = list(other.counts)
        self.total += other.total

    def quantile(self, q: float) -> float | None:
        """Returns the middle of the bucket in which the q-quantile lies, or None when nothing was counted."""
        if not self.total:
            return None
        rank = q * self.total
        seen = 0
        for index, count in enumerate(self.counts):
            seen += count
            if count and seen >= rank:
                return _middle(index)
        raise AssertionError("counts and total disagree")

    def sparse(self) -> dict[int, int]:
        """Returns the buckets that are not empty, for sending."""
        return {i: n for i, n in enumerate(self.counts) if n}

    @classmethod
    def from_sparse(cls, counts: dict[int, int]) -> Histogram:
        """Makes a histogram from the result of `sparse`."""
        histogram = cls()
        for index, n in counts.items():
            histogram.counts[index] = n
            histogram.total += n
        return histogram


def _middle(index: int) -> float:
    if index < _SUB:
        return float(index)
    shift = (index >> _SUB_BITS) - 1
    low = (_SUB + (index & (_SUB - 1))) << shift
    return low + ((1 << shift) - 1) / 2


class LeastAges:
    """The least ages of records when a task took them and when it had processed them, over a recent time, between
    `period_ns` and twice that. The youngest records waited for nobody.

    The task lowers `taken` and `done` in each step, which must cost next to nothing. Who asks begins a new period when
    one is over. That may be another thread, and the ages of one step may then be lost."""

    __slots__ = ("_last", "_period_ns", "_since_ns", "done", "taken")

    def __init__(self, period_ns: int = 1_000_000_000) -> None:
        self._period_ns = period_ns
        self._since_ns = 0
        self.taken = self.done = _NEVER  # of this period
        self._last = (_NEVER, _NEVER)  # of the period before

    def recent(self, now_ns: int) -> tuple[int, int] | None:
        """Returns the least age of records when they were taken, and the least age when they were processed, by any
        monotonic clock. Returns None when no record was processed since the period before."""
        last = self._last
        taken, done = min(self.taken, last[0]), min(self.done, last[1])
        if now_ns - self._since_ns >= self._period_ns:
            self._last = (self.taken, self.done)
            self.taken = self.done = _NEVER
            self._since_ns = now_ns
        return None if _NEVER in (taken, done) else (taken, done)


class RecentHistogram:
    """A histogram of the values of a recent time, between `period_ns` and twice that. It consists of two histograms
    that take turns."""

    def __init__(self, period_ns: int = 5_000_000_000) -> None:
        self._period_ns = period_ns
        self._period = 0  # the number of the current period
        self._current = Histogram()
        self._last = Histogram()
        self.all = Histogram()

    def add(self, value: int, times: int, now_ns: int) -> None:
        """Counts a value that was seen at `now_ns`, by any monotonic clock."""
        period = now_ns // self._period_ns
        if period != self._period:
            self.all.merge(self._current)
            self._last = self._current if period == self._period + 1 else Histogram()
            self._current = Histogram()
            self._period = period
        self._current.add(value, times)

    def recent(self) -> Histogram:
        """Returns a copy of the recent counts."""
        return _sum(self._last, self._current)

    def whole(self) -> Histogram:
        return _sum(self.all, self._current)


def _sum(one: Histogram, other: Histogram) -> Histogram:
    merged = Histogram()
    merged.merge(one)
    merged.merge(other)
    return merged
