"""The size of steps: how many records a task's step, or a call of `map_batches`, takes, so that it ends in time.

A step costs `fixed + each * records`. When the records are what costs, fewer records make a shorter step, and a step
is limited to `STEP_NS`. When the step itself is what costs (a request to another machine, a model that takes a batch at
the price of one record), fewer records make no step shorter, they only make more steps. So a step may take `STEP_NS`,
or several times its fixed cost if that is more.

The costs of steps of different sizes tell the two apart. There is one smoothed point for each power of two. A line
through these points, by least squares of the relative errors, begins at the fixed cost. A point that was not seen for a
long time counts for less, so that changes are learned. When all steps have had one size for a long time, the fixed cost
and the cost of records cannot be told apart. Then another size is tried, which costs one step.

This refines docs/papers.md: A1. Measuring must cost next to nothing: it happens once for each step, and most of it only
after long steps.
"""

from __future__ import annotations

# The time that a step aims at: long enough to share the fixed cost of a step (some 10 us) among many records, and short
# against the milliseconds that a record may take through the flow.
STEP_NS = 4_000_000
LIMIT_FIRST = 64
LIMIT_MAX = 8192

# The records of a step may cost this many times the fixed cost of the step. A quarter of the time is then lost to the
# fixed cost, and the other tasks of the worker wait four times as long as they have to.
_FIXED_TIMES = 3

# By this factor a point counts for less with each step of another size.
_KEPT = 0.97

# A machine that stops for a while makes single steps very long. A cost of more than this many times the smoothed cost
# of its size counts as only that much. Two such steps in a row, or two as much shorter ones, are a change, and what was
# known no longer holds.
_STRANGE = 4.0

# The weight of a step's cost in the smoothed cost of its size.
_NEWEST = 0.25

# When no points but those of the present size count for at least this much, they tell nothing, and another size is
# tried, some hundred steps after the last trial.
_ONE_SIZE = 0.02


class StepSize:
    """See the module's docstring. `limit` is the number of records that the next step may take."""

    __slots__ = ("_costs", "_fixed", "_most", "_records", "_seen", "_steps", "_strange", "limit")

    def __init__(self, most: int | None = None) -> None:
        self._most = LIMIT_MAX if most is None else most
        self.limit = min(LIMIT_FIRST, self._most)
        sizes = self._most.bit_length() + 1
        self._costs = [0.0] * sizes  # in ns, by the number of bits of the number of records; 0: unknown
        self._records = [0.0] * sizes  # the number of records of the steps with these costs
        self._seen = [0] * sizes  # the number of the last step of this size
        self._steps = 0
        self._strange = 0  # the number of steps in a row that do not fit what is known
        self._fixed = 0.0  # the fixed cost of a step in ns, as far as it is known

    def measure(self, records: int, elapsed: int, more: bool) -> None:
        """Notes the size of a step (1 or more records) and its time in ns. `more`: the limit, and not the input, ended
        the step."""
        size = min(records.bit_length(), len(self._costs) - 1)
        self._steps += 1
        self._seen[size] = self._steps
        cost = self._costs[size]
        if cost and not cost / _STRANGE < elapsed < cost * _STRANGE:
            self._strange += 1
            if self._strange > 1:
                self._costs = [0.0] * len(self._costs)
                self._fixed = cost = 0.0
        else:
            self._strange = 0
        if cost:
            cost += _NEWEST * (min(elapsed, _STRANGE * cost) - cost)
            self._records[size] += _NEWEST * (records - self._records[size])
        else:
            cost = float(elapsed)
            self._records[size] = records
        self._costs[size] = max(cost, 1.0)
        if cost < STEP_NS / 2:
            if more:
                self.limit = min(self._most, self.limit * 2)
            return
        fixed = self._fit()
        unknown = fixed is None
        if fixed is not None:
            self._fixed = fixed
        fixed = min(self._fixed, cost)
        aim = max(STEP_NS, (1 + _FIXED_TIMES) * fixed)
        if min(cost, elapsed) > 2 * aim:
            if self.limit > 1 and records > 1:
                self.limit = max(1, min(self.limit, int(records * (aim - fixed) / (cost - fixed))))
            else:
                # A step cannot have fewer records. Once in a while, try whether more records would cost more.
                self.limit = min(self._most, 2) if unknown else 1
        elif more and (2 * cost - fixed <= aim or (unknown and cost <= aim)):
            self.limit = min(self._most, self.limit * 2)
        elif more and unknown and cost > aim:
            self.limit = max(1, self.limit // 2)

    def _fit(self) -> float | None:
        """Returns the fixed cost that the known points show, or None when all of them are of one size."""
        weights = first = second = costs = products = 0.0
        least = float("inf")
        for cost, records, seen in zip(self._costs, self._records, self._seen, strict=True):
            if not cost:
                continue
            kept = _KEPT ** (self._steps - seen)
            weight = kept / (cost * cost)
            weights += weight
            first += weight * records
            second += weight * records * records
            costs += weight * cost
            products += weight * records * cost
            if kept > _ONE_SIZE:
                least = min(least, cost)
        spread = weights * second - first * first
        if spread <= _ONE_SIZE * weights * second:
            return None
        return min(max(0.0, (costs * second - products * first) / spread), least)
