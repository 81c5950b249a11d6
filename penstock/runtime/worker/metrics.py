"""Counters and latency histograms that cost a few operations a batch, never any a record (invariant 8)."""

from __future__ import annotations

_SUB_BITS = 4  # 16 buckets a power of two: a value is known within 6 %
_SUB = 1 << _SUB_BITS
_BUCKETS = 64 * _SUB


class Histogram:
    """Counts of whole numbers in log-linear buckets; a whole histogram takes 8 KiB and merges by addition."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * _BUCKETS
        self.total = 0

    def add(self, value: int, times: int = 1) -> None:
        """Count `value` (below 1: as 0) `times` times."""
        if value < _SUB:
            index = max(value, 0)
        else:
            shift = value.bit_length() - _SUB_BITS - 1
            index = ((shift + 1) << _SUB_BITS) + (value >> shift) - _SUB
        self.counts[index] += times
        self.total += times

    def merge(self, other: Histogram) -> None:
        """Add another histogram's counts."""
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def quantile(self, q: float) -> float | None:
        """The middle of the bucket in which the q-quantile lies; None when nothing was counted."""
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
        """The buckets that are not empty, for the wire."""
        return {i: n for i, n in enumerate(self.counts) if n}

    @classmethod
    def from_sparse(cls, counts: dict[int, int]) -> Histogram:
        """The inverse of `sparse`."""
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


class RecentHistogram:
    """A histogram of about the last `period_ns` to twice that: two that take turns."""

    def __init__(self, period_ns: int = 5_000_000_000) -> None:
        self._period_ns = period_ns
        self._period = 0  # the number of the current one
        self._current = Histogram()
        self._last = Histogram()
        self.all = Histogram()

    def add(self, value: int, times: int, now_ns: int) -> None:
        """Count a value that was seen at `now_ns` (any monotonic clock)."""
        period = now_ns // self._period_ns
        if period != self._period:
            self.all.merge(self._current)
            self._last = self._current if period == self._period + 1 else Histogram()
            self._current = Histogram()
            self._period = period
        self._current.add(value, times)

    def recent(self) -> Histogram:
        """A copy of the recent counts."""
        merged = Histogram()
        merged.merge(self._last)
        merged.merge(self._current)
        return merged

    def whole(self) -> Histogram:
        """A copy of all counts since the start."""
        merged = Histogram()
        merged.merge(self.all)
        merged.merge(self._current)
        return merged
