"""Windows: the periods of event time that a record belongs to.

A window is [start, end), in milliseconds since 1970, UTC. Tumbling windows follow each other. Sliding windows begin
every `slide` and last for `size`, so a record belongs to several of them. Both are aligned to 1970 plus an offset, as
in other systems. Session windows, which depend on the records, would be another kind. Whether a record belongs to a
window must depend on nothing but its time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import timedelta

from penstock.runtime.errors import FlowError
from penstock.runtime.event_time.watermark import duration_ms
from penstock.runtime.mistakes import checks_options
from penstock.runtime.units import renamed


@checks_options
class Sliding:
    """Windows of `size_s` seconds, of which one begins every `slide_s` seconds, aligned to `offset_s` after 1970. All
    three are seconds or timedeltas. The starts and ends of windows are in milliseconds since 1970, like all times."""

    @renamed(size="size_s", slide="slide_s", offset="offset_s")
    def __init__(self, size_s: float | timedelta, slide_s: float | timedelta, offset_s: float | timedelta = 0) -> None:
        name = type(self).__name__
        # All in milliseconds.
        self.size = duration_ms(size_s, f"{name}(size_s)")
        self.slide = duration_ms(slide_s, f"{name}(slide_s)")
        self.offset = duration_ms(offset_s, f"{name}(offset_s)", least=0)
        if self.slide > self.size:
            raise FlowError(
                f"{name}: slide {self.slide} ms is above size {self.size} ms; records between windows would be lost. "
                "If you want that, remove these records with filter() first"
            )

    @property
    def grain(self) -> int:
        """The number of milliseconds of which all starts and ends are multiples."""
        return math.gcd(self.size, self.slide, self.offset)

    def last_starts(self, times: Iterable[int]) -> list[int]:
        """Returns for each of these times the start of the last window that it belongs to."""
        slide, offset = self.slide, self.offset
        return [time - (time - offset) % slide for time in times]

    def starts(self, time: int) -> range:
        """Returns the starts of all windows that a time belongs to, the last one first."""
        last = time - (time - self.offset) % self.slide
        return range(last, time - self.size, -self.slide)

    def __repr__(self) -> str:
        return f"Sliding({self.size} ms, every {self.slide} ms)"


@checks_options
class Tumbling(Sliding):
    """Windows of `size_s` seconds (or a timedelta), one after the other, aligned to `offset_s` after 1970."""

    @renamed(size="size_s", offset="offset_s")
    def __init__(self, size_s: float | timedelta, offset_s: float | timedelta = 0) -> None:
        super().__init__(size_s, size_s, offset_s)

    def __repr__(self) -> str:
        return f"Tumbling({self.size} ms)"
