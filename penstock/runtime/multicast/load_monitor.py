"""Measures the load of a root: how many records arrive, what they cost, and how many wait (docs/papers.md: W5).

The relay counts anyway: records that arrived, copies and encodings with the time that they took, and the length of its
queue. It hands the counters in at each look, with the time. The monitor smooths what it sees: a new figure is alpha
times the past and 1 - alpha times the last interval, so an alpha close to 1 remembers long. A look that comes late
weighs as much as the looks that were left out, and a look that comes early weighs less.

The thread of a root does *other work* as well, such as the functions of users. Its processor time, less what copies and
encodings took of it, is the other work. A thread without idle time takes in no more than it can, so what it counts then
is no load that is offered, but what comes through. Whether a thread is idle says the time that it has neither had a
processor nor waited for one. The *calm rate* is that of the times in which the thread was idle now and then, and
nothing waited to be sent: a load that is known. It is remembered while there are no such times.

A smoothed rate is late: with an alpha of 0.8, it takes ten looks to come within a tenth of a step. So a load also has
the *last rate*, for decisions that cannot wait, and the highest last rate of some seconds, for decisions that a burst
must not undo (self_adjustment.py). So that a pause undoes nothing either, the highest smoothed rate of half this time
is remembered, too. The last rate is that of the last interval. An early look is made because the queue grows, and its
interval may have begun long before that. Its last rate is the rate since the queue was short, for which the relay
*glances* at its queue between two looks.

A relay looks and glances before it takes a batch in, not after: a batch that has just come whole is no queue that
grows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from penstock.runtime.multicast.queue_model import Cost

# How many glances are kept: those of about twice the least time between two looks.
_GLANCES = 8
# A calm rate that is lower than what is remembered takes its place as slowly as that.
_CALM_HALF_LIFE_S = 10.0
# A thread that has had no processor at all says nothing of what it can do.
_LEAST_PACE = 0.01


@dataclass(frozen=True)
class Counters:
    """The counts of a relay since it began. All counts are in one unit: records, or messages of a fixed size."""

    arrived: int = 0
    copies: int = 0
    copying_s: float = 0.0
    encoded: int = 0
    encoding_s: float = 0.0
    thread_s: float = 0.0  # the processor time of the thread. 0: nobody measures it
    core_wait_s: float = 0.0  # for which the thread has waited for a processor

    def went_back(self, before: Counters) -> bool:
        """Whether something here is less than before: the relay is a new one, or a task that was counted was removed.
        The difference says nothing then."""
        counts = ("arrived", "copies", "copying_s", "encoded", "encoding_s")
        return any(getattr(self, name) < getattr(before, name) for name in counts)


@dataclass(frozen=True)
class Load:
    """The load of a root at a look. `queued_before` is the queue at the look before. `highest_rate` is the highest last
    rate that the monitor remembers, and `highest_smoothed` the same of smoothed rates, for half the time. `busy`: the
    part of the last interval in which the thread was not idle. `long_busy`, `long_rate`: the same of a longer time, and
    the rate in it; 0 until it is over. `pace`: the part of the time for which the thread gets a processor when it wants
    one. `calm_rate`: see the module's docstring. `outgrown`: whether the tree has been too narrow for the load for
    long, as the monitor's user says."""

    rate: float
    cost: Cost
    queued: int
    queued_before: int
    last_rate: float = 0.0
    highest_rate: float = 0.0
    busy: float = 0.0
    long_busy: float = 0.0
    long_rate: float = 0.0
    pace: float = 1.0
    calm_rate: float = 0.0
    highest_smoothed: float = 0.0
    outgrown: bool = False


class _Highest:
    """The highest rate of the last `memory_s` seconds."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._rates: deque[tuple[float, float]] = deque()  # with the time of each; later ones are lower

    def of(self, now_s: float, rate: float) -> float:
        """Takes in a rate, and returns the highest one."""
        rates = self._rates
        while rates and rates[0][0] <= now_s - self._memory_s:
            rates.popleft()
        while rates and rates[-1][1] <= rate:
            rates.pop()
        rates.append((now_s, rate))
        return rates[0][1]


class LoadMonitor:
    """See the module's docstring."""

    def __init__(
        self,
        interval_s: float,
        alpha: float,
        early: float = 0.1,
        memory_s: float = 2.0,
        long_s: float = 0.5,
        busy: float = 0.95,
    ) -> None:
        """`interval_s`: the time between two looks. `alpha`: the weight of the past, from 0 to below 1. `early`: the
        part of the interval that is the least time between two looks. `memory_s`: for how long the highest rate is
        remembered. `long_s`: of what time `long_busy` is. `busy`: the part of its time from which on a thread has no
        idle time."""
        if not (interval_s > 0 and 0 <= alpha < 1):
            raise ValueError(f"interval_s={interval_s} must be above 0, and alpha={alpha} from 0 to below 1")
        self._interval_s = interval_s
        self._alpha = alpha
        self.early_s = early * interval_s
        self._highest = _Highest(memory_s)
        self._highest_smoothed = _Highest(memory_s / 2)  # a smoothed rate is late anyway
        self._long_s = long_s
        self._busy = busy
        self._calm_rate = 0.0
        self._looks: deque[tuple[float, Counters]] = deque()  # of the longer time, and the last one before it
        self._seen: tuple[float, Counters, int] | None = None
        self._glances: deque[tuple[float, int, int]] = deque(maxlen=_GLANCES)  # (time, arrived, queued)
        self._rate: float | None = None
        self._copy_s: float | None = None
        self._encode_s: float | None = None
        self._other_s: float | None = None

    @property
    def seen(self) -> tuple[float, int] | None:
        """The time of the last look, and the queue at this look. None before the first look."""
        return None if self._seen is None else (self._seen[0], self._seen[2])

    def glance_is_due(self, now_s: float) -> bool:
        """Returns whether the last glance or look was more than a moment ago."""
        return not self._glances or now_s - self._glances[-1][0] >= self.early_s / 4

    def glance(self, now_s: float, arrived: int, queued: int) -> None:
        """Notes how many records have arrived and how many wait, unless the last glance was a moment ago."""
        if self.glance_is_due(now_s):
            self._glances.append((now_s, arrived, queued))

    def begin_anew(self) -> None:
        """Begins a new longer time, because the tree is another one."""
        while len(self._looks) > 1:
            self._looks.popleft()

    def look(self, now_s: float, counters: Counters, queued: int, waiting: bool = False) -> Load | None:
        """Takes the counters of a relay. `waiting`: whether something waits to be sent. Returns the load, or None while
        an arriving record's cost is not yet known, and when no time has passed."""
        before = self._seen
        if before is not None and now_s <= before[0]:
            return None
        self._seen = (now_s, counters, queued)
        glances = self._glances
        self._glances = deque([(now_s, counters.arrived, queued)], maxlen=_GLANCES)
        if before is None or counters.went_back(before[1]):
            self._looks.clear()
            self._looks.append((now_s, counters))
            return None
        then_s, then, queued_before = before
        elapsed_s = now_s - then_s
        past = self._alpha ** (elapsed_s / self._interval_s)
        last_rate = (counters.arrived - then.arrived) / elapsed_s
        self._rate = _smooth(self._rate, last_rate, past)
        if elapsed_s < self._interval_s:
            grown_from_s, arrived = self._grown_from(glances, now_s, queued)
            last_rate = (counters.arrived - arrived) / (now_s - grown_from_s)
        highest_rate = self._highest.of(now_s, last_rate)
        highest_smoothed = self._highest_smoothed.of(now_s, self._rate)
        copies, encoded = counters.copies - then.copies, counters.encoded - then.encoded
        copying_s, encoding_s = counters.copying_s - then.copying_s, counters.encoding_s - then.encoding_s
        # An interval without copies says nothing of their cost.
        if copies > 0:
            self._copy_s = _smooth(self._copy_s, copying_s / copies, past)
        if encoded > 0:
            self._encode_s = _smooth(self._encode_s, encoding_s / encoded, past)
        if (arrived := counters.arrived - then.arrived) > 0:
            other_s = counters.thread_s - then.thread_s - copying_s - encoding_s
            self._other_s = _smooth(self._other_s, max(0.0, other_s) / arrived, past)
        busy = _wanted_s(then, counters) / elapsed_s
        if busy < self._busy and not waiting:
            smoothed = _smooth(self._calm_rate, arrived / elapsed_s, past)
            self._calm_rate = max(smoothed, self._calm_rate * 0.5 ** (elapsed_s / _CALM_HALF_LIFE_S))
        first_s, first = self._longer(now_s, counters)
        if not self._copy_s:
            return None
        cost = Cost(self._copy_s, self._encode_s or 0.0, self._other_s or 0.0)
        load = Load(self._rate, cost, queued, queued_before, last_rate, highest_rate, busy)
        load = replace(load, calm_rate=self._calm_rate, highest_smoothed=highest_smoothed)
        wanted_s, long_s = _wanted_s(first, counters), now_s - first_s
        if wanted_s > 0:
            load = replace(load, pace=max(_LEAST_PACE, (counters.thread_s - first.thread_s) / wanted_s))
        if long_s >= self._long_s:
            load = replace(load, long_busy=wanted_s / long_s, long_rate=(counters.arrived - first.arrived) / long_s)
        return load

    def _longer(self, now_s: float, counters: Counters) -> tuple[float, Counters]:
        """Notes a look, and returns the one with which the longer time begins."""
        looks = self._looks
        looks.append((now_s, counters))
        while looks[1][0] <= now_s - self._long_s:
            looks.popleft()
        return looks[0]

    def _grown_from(self, glances: deque[tuple[float, int, int]], now_s: float, queued: int) -> tuple[float, int]:
        """Returns when the queue was short for the last time, and how many records had arrived then. A rate of less
        than half the time between two looks would say little."""
        first_s, first, _ = glances[0]
        latest_s = now_s - self.early_s / 2
        return next(
            (
                (at_s, arrived)
                for at_s, arrived, length in reversed(glances)
                if at_s <= latest_s and length <= queued / 4
            ),
            (first_s, first),
        )


def _wanted_s(then: Counters, now: Counters) -> float:
    """For how long the thread has had a processor or has waited for one."""
    return now.thread_s - then.thread_s + now.core_wait_s - then.core_wait_s


def _smooth(past: float | None, new: float, weight: float) -> float:
    """The weighted mean of the past and a new figure. The first figure has no past."""
    return new if past is None else weight * past + (1 - weight) * new
