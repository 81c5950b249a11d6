"""Windows: which spans of event time a record belongs to.

A window is [start, end), in milliseconds since 1970, UTC. Tumbling windows follow each other; sliding ones begin every
`slide` and last `size`, so that a record belongs to several. Both are aligned to 1970 plus an offset, as everywhere.
Sessions, whose windows depend on the records, will be another kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import timedelta

from penstock.runtime.errors import FlowError
from penstock.runtime.event_time import duration_ms


class Sliding:
    """Windows of `size` seconds (or a timedelta), one beginning every `slide`, the first `offset` after 1970."""

    def __init__(self, size: float | timedelta, slide: float | timedelta, offset: float | timedelta = 0) -> None:
        name = type(self).__name__
        self.size = duration_ms(size, f"{name}(size)")
        self.slide = duration_ms(slide, f"{name}(slide)")
        self.offset = duration_ms(offset, f"{name}(offset)", least=0)
        if self.slide > self.size:
            raise FlowError(
                f"{name}: slide {self.slide} ms is above size {self.size} ms; records between windows would be lost. "
                "Filter them out before, if that is meant"
            )

    @property
    def grain(self) -> int:
        """Milliseconds of which all starts and ends are multiples."""
        return math.gcd(self.size, self.slide, self.offset)

    def last_starts(self, times: Iterable[int]) -> list[int]:
        """The start of the last window that each of these times belongs to."""
        slide, offset = self.slide, self.offset
        return [time - (time - offset) % slide for time in times]

    def starts(self, time: int) -> range:
        """The starts of all windows that a time belongs to, the last first."""
        last = time - (time - self.offset) % self.slide
        return range(last, time - self.size, -self.slide)

    def __repr__(self) -> str:
        return f"Sliding({self.size} ms, every {self.slide} ms)"


class Tumbling(Sliding):
    """Windows of `size` seconds (or a timedelta) one after the other, the first `offset` after 1970."""

    def __init__(self, size: float | timedelta, offset: float | timedelta = 0) -> None:
        super().__init__(size, size, offset)

    def __repr__(self) -> str:
        return f"Tumbling({self.size} ms)"
