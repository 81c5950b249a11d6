"""How far the clock of another machine is ahead, measured by asking for its time.

The other machine has read its clock between the sending of the question and the arrival of the answer. So an offset is
known up to half of that time; `ClockOffset` never says more than it knows. Clocks also drift apart, which makes an old
measurement less certain than it was.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

# The most by which the clocks of two machines drift apart. Quartz is an order of magnitude better.
DRIFT_PPM = 100
_KEPT = 64


class Offset(NamedTuple):
    """The other clock shows `ahead_ns` more than ours, up to `uncertainty_ns` more or less."""

    ahead_ns: int
    uncertainty_ns: int


class _Sample(NamedTuple):
    ahead_ns: int
    uncertainty_ns: int
    since_ns: int  # the clocks may have drifted apart since then


class ClockOffset:
    """Keeps the newest measurements of one other clock. All times are in nanoseconds of monotonic clocks."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=_KEPT)

    def add(self, asked_ns: int, theirs_ns: int, answered_ns: int) -> None:
        """Takes a measurement: we asked at `asked_ns` and had the answer at `answered_ns`, by our clock, and the other
        machine read its clock between the two."""
        half = (answered_ns - asked_ns + 1) // 2
        self._samples.append(_Sample(theirs_ns - (asked_ns + answered_ns) // 2, half, asked_ns))

    def now(self, now_ns: int) -> Offset | None:
        """Returns the offset as well as it is known at `now_ns`, by our clock; None when nothing was measured."""
        if not self._samples:
            return None
        best = min(self._samples, key=lambda sample: _uncertainty(sample, now_ns))
        return Offset(best.ahead_ns, _uncertainty(best, now_ns))

    def forget(self) -> None:
        """Forgets all measurements, because the other machine has started again."""
        self._samples.clear()


def _uncertainty(sample: _Sample, now_ns: int) -> int:
    return sample.uncertainty_ns + 1 + max(0, now_ns - sample.since_ns) * DRIFT_PPM // 1_000_000
