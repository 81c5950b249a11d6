"""The event time that a source's records take, which determines how many records fit into the rest of its drift.

A source is told how far it may read as a time, but a reader is asked for a number of records, and nobody knows their
times before they are read. So the source learns what a record has taken so far. One that was held back would otherwise
read as many records as a step can process, and be far ahead before anybody could look at their times.
"""

from __future__ import annotations

# By this factor earlier reads count for less with each read. So a few reads teach a new pace, and the leaps of a source
# are not forgotten while records of equal times come between them.
_KEPT = 0.75

# A read has at most this many times the records from which the pace is known. The first reads are small, because a
# record may be hours after the one before it.
_BOLD = 2


class Pace:
    """`each` is the event time of a record, in ms, as far as it is known: the mean of the last reads, or that of the
    very last one when that is more, because a source that has begun to leap must slow down at once."""

    __slots__ = ("_mark", "_records", "_span", "_uncounted", "each")

    def __init__(self) -> None:
        self.each = 0.0
        self._mark: int | None = None  # the last watermark that was known
        self._uncounted = 0  # the number of records that were read and are in no mean yet
        self._records = self._span = 0.0  # of the last reads: their records, and the event time that these took

    def read(self, records: int) -> None:
        """Notes that a number of records were read."""
        self._uncounted += records

    def learn(self, mark: int | None, under_way: int) -> None:
        """Takes the watermark of all records read so far, except the records that are still `under_way` to the operator
        that makes watermarks. None: it is not known."""
        passed = self._uncounted - under_way
        if passed <= 0:
            return
        self._uncounted = under_way
        span = 0
        if mark is not None:
            span = 0 if self._mark is None else max(0, mark - self._mark)
            self._mark = mark
        self._records = _KEPT * self._records + passed
        self._span = _KEPT * self._span + span
        self.each = max(span / passed, self._span / self._records)

    def records_within(self, room: float) -> int:
        """Returns the number of records that should take no more than the given ms of event time. It is at least one,
        because nothing else could tell where the next record is."""
        records = _BOLD * self._records
        if self.each:
            records = min(records, room / self.each)
        return max(1, int(records))
