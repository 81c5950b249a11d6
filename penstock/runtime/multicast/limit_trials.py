"""Remembers which changes of an out-degree limit were for the worse, so that they are undone once, and not tried again
(docs/papers.md: W5).

What a limit costs is a model's answer, and models leave out what nobody measures: the processors of relays, or a link
that says nothing of itself. So a change is on trial for some time. When the sources wait although the load is no lower,
and fewer entries come through than before the change, then the tree gets its former limit back. The limit that failed
is *refused* at such a rate, until it is forgotten because the job may have changed. A load that grows fails no limit,
because then more entries come through than before, and not fewer.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class _Change:
    at_s: float
    before: int
    after: int
    rate: float
    through: float


class LimitTrials:
    """See the module's docstring. `trial_s`: how long a change is on trial; `memory_s`: how long a limit is refused;
    `chance`: the part by which rates differ by chance. Times are in seconds."""

    def __init__(self, trial_s: float, memory_s: float, chance: float) -> None:
        self._trial_s = trial_s
        self._memory_s = memory_s
        self._part = 1 - chance
        self._change: _Change | None = None
        self._failed: dict[int, tuple[float, float]] = {}  # by limit: when it failed, and the rate that it had to carry

    def changed(self, now_s: float, before: int, after: int, rate: float, pace: float = 1.0) -> None:
        """The tree gets another limit, at a rate of entries. `pace`: the part of the time for which the thread has a
        processor when it wants one."""
        self._change = _Change(now_s, before, after, rate, rate / pace)

    def undone(self, now_s: float, limit: int, rate: float, pace: float = 1.0) -> int | None:
        """Returns the limit to go back to, or None. Called when sources wait, with the present limit and the rate that
        comes through."""
        change = self._change
        if change is None or change.after != limit or now_s - change.at_s > self._trial_s:
            return None
        if rate / pace >= self._part * change.through:
            return None
        self._change = None  # to go back is no trial
        self._failed[limit] = now_s, change.rate
        return change.before

    def refused(self, now_s: float, rate: float) -> set[int]:
        """Returns the limits that have failed at such a rate, or at a lower one."""
        self._failed = {limit: failed for limit, failed in self._failed.items() if now_s - failed[0] <= self._memory_s}
        return {limit for limit, (_, carried) in self._failed.items() if rate >= self._part * carried}
