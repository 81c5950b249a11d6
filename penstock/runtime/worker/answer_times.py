"""Measures the cost of micro-batches that Spark has at the same time (docs/papers.md: D2).

While Spark works on one micro-batch, the next one is on its way or waits for it, so the time until its answer is not
what it costs: a small one would cost as much as the large one before it. Therefore all micro-batches that were under
way together count as several of the same size, which have divided the time among them. This holds whether Spark takes
them one after the other or all at once, because their fixed costs and their records are the same in sum.
"""

from __future__ import annotations

# After so many micro-batches the time is divided although others are under way: with a long queue some always are.
TOGETHER_MAX = 4


class AnswerTimes:
    """The times of a task's micro-batches; see the module's docstring. All times are in ns."""

    def __init__(self) -> None:
        self._under_way = 0
        self._since = 0  # when Spark began to work on those that are under way, or that were answered since
        self._number = self._records = 0  # of the micro-batches that were answered since
        self._way = 0
        self._way_known = True

    def submitted(self, now: int) -> None:
        if not self._under_way:
            self._since = now
        self._under_way += 1

    def answered(
        self, now: int, records: int, since: int, spark_s: float | None, *, alone: bool = False
    ) -> tuple[int, float, float | None] | None:
        """Notes the answer to a micro-batch that left at `since`. Returns (records, seconds, of these in Spark) of the
        micro-batches that have divided the time until now, on average, or None when more are to come. `alone`: this one
        is to be left out of what others cost."""
        self._under_way -= 1
        self._number += 1
        self._records += records
        if spark_s is None:
            self._way_known = False
        else:
            self._way += max(0, now - since - round(spark_s * 1e9))
        if self._under_way and self._number < TOGETHER_MAX and not alone:
            return None
        number, cost = self._number, (now - self._since) / 1e9 / self._number
        of_spark = max(0.0, cost - self._way / 1e9 / number) if self._way_known else None
        found = round(self._records / number), cost, of_spark
        self._since, self._number, self._records, self._way, self._way_known = now, 0, 0, 0, True
        return found
