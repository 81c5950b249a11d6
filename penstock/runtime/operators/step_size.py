"""How many records a piece of work takes at a time, so that it ends in time: a task's step, a call of `map_batches`.

A step costs `fixed + each * records`. Where records are what costs, fewer of them make a shorter step, and a step is
cut to `STEP_NS`. Where the step itself is what costs (a request to another machine, a model that takes a batch at the
price of one record), fewer records make the step no shorter: they only make more steps. So a step may take `STEP_NS`,
or several times its fixed cost where that is more.

The two are told apart by the costs of steps of different sizes, smoothed, one for each power of two; a line through
these points, by least squares of the relative errors, begins at the fixed cost. Points that have not been seen for long
count for less, so that what has changed is learnt anew. Where steps have had one size for long, nothing tells fixed
cost and cost of records apart; then another size is tried, which costs one step.

It must cost next to nothing: once a step, and most of it only where a step is long.
"""

from __future__ import annotations

# A step aims at this long: long enough to share the fixed cost of a step (some 10 us) among many records, short
# against the milliseconds that a record may take through the flow.
STEP_NS = 4_000_000
LIMIT_FIRST = 64
LIMIT_MAX = 8192

# The records of a step may cost so many times what the step costs anyway: a quarter of the time is then lost to the
# fixed cost, and the other tasks of the worker wait four times as long as they must at the least.
_FIXED_TIMES = 3

# What a point counts for with each step that is not of its size.
_KEPT = 0.97

# A machine that stops for a while makes single steps very long: what is more than so many times the smoothed cost of
# its size counts as that. Two in a row, or two of as much less, are a change: what was known is void.
_STRANGE = 4.0

# How much of a step's cost goes into the smoothed cost of its size.
_NEWEST = 0.25

# Of points that count for less than this, beside those of the present size, nothing is told: another size is tried,
# some hundred steps after the last.
_ONE_SIZE = 0.02


class StepSize:
    """See the module's docstring. `limit` is how many records the next step may take."""

    __slots__ = ("_costs", "_fixed", "_most", "_records", "_seen", "_steps", "_strange", "limit")

    def __init__(self, most: int | None = None) -> None:
        self._most = LIMIT_MAX if most is None else most
        self.limit = min(LIMIT_FIRST, self._most)
        sizes = self._most.bit_length() + 1
        self._costs = [0.0] * sizes  # in ns, by the bits of the number of records; 0: not known
        self._records = [0.0] * sizes  # so many had the steps of these costs
        self._seen = [0] * sizes  # the number of the last step of this size
        self._steps = 0
        self._strange = 0  # steps in a row that do not fit to what is known
        self._fixed = 0.0  # what a step costs whatever it takes, in ns, as far as is known

    def measure(self, records: int, elapsed: int, more: bool) -> None:
        """A step took so many records (1 or more) and so many ns; `more`: the limit, not the input, bounded it."""
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
                # Fewer there cannot be. Whether more would cost more is to be found out, once in a while.
                self.limit = min(self._most, 2) if unknown else 1
        elif more and (2 * cost - fixed <= aim or (unknown and cost <= aim)):
            self.limit = min(self._most, self.limit * 2)
        elif more and unknown and cost > aim:
            self.limit = max(1, self.limit // 2)

    def _fit(self) -> float | None:
        """The fixed cost by the points that are known; None when they are of one size."""
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
