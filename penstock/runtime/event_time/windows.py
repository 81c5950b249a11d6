"""Windows: what parts of a key's records are taken together.

A window of event time is [start, end), in milliseconds since 1970, UTC. Tumbling windows follow each other. Sliding
windows begin every `slide` and last for `size`, so a record belongs to several of them. Both are aligned to 1970 plus
an offset, as in other systems, and whether a record belongs to one must depend on nothing but its time. A session is as
long as records of its key come at intervals below a gap. Count windows have a number of a key's records, in the order
in which they come, and the global window has all of them: these two know no time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.runtime.errors import FlowError
from penstock.runtime.event_time.watermark import duration_ms
from penstock.runtime.mistakes import checks_options
from penstock.runtime.units import whole

# The start and the end of a window: numbers of ms or of records. Only the global window has None.
if TYPE_CHECKING:
    from typing_extensions import TypeVar as WithDefault

    Bound_co = WithDefault("Bound_co", covariant=True, default=Any)
else:
    Bound_co = TypeVar("Bound_co", covariant=True)


class Window(Generic[Bound_co]):
    """The common part of all kinds of windows."""

    in_event_time = True  # whether its windows end at a time, when the watermark has reached it

    @property
    def grain(self) -> int | None:
        """The number of milliseconds of which all times are multiples at which windows end. None: they end at none."""
        return None


@checks_options
class Sliding(Window[int]):
    """Windows of `size_s` seconds, of which one begins every `slide_s` seconds, aligned to `offset_s` after 1970. All
    three are seconds or timedeltas. The starts and ends of windows are in milliseconds since 1970, like all times."""

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

    def first_open(self, watermark: int) -> int:
        """Returns the start of the first window that ends after a watermark."""
        return self.last_starts([watermark - self.size])[0] + self.slide

    def starts(self, time: int) -> range:
        """Returns the starts of all windows that a time belongs to, the last one first."""
        last = time - (time - self.offset) % self.slide
        return range(last, time - self.size, -self.slide)

    def __repr__(self) -> str:
        return f"Sliding({self.size} ms, every {self.slide} ms{self._told_offset()})"

    def _told_offset(self) -> str:
        return f", {self.offset} ms after 1970" if self.offset else ""


@checks_options
class Tumbling(Sliding):
    """Windows of `size_s` seconds (or a timedelta), one after the other, aligned to `offset_s` after 1970."""

    def __init__(self, size_s: float | timedelta, offset_s: float | timedelta = 0) -> None:
        super().__init__(size_s, size_s, offset_s)

    def __repr__(self) -> str:
        return f"Tumbling({self.size} ms{self._told_offset()})"


#: Where results may be due at any millisecond, watermarks come at most this many milliseconds later.
GRAIN_MOST = 5

# Watermarks close sessions at most this part of the gap later.
_GAP_PART = 100


@checks_options
class Session(Window[int]):
    """Sessions of a key: a session ends when no record has come whose time is less than `gap_s` seconds (or a
    timedelta) after the one before. It is the window [first time, last time + gap)."""

    def __init__(self, gap_s: float | timedelta) -> None:
        self.gap = duration_ms(gap_s, "Session(gap_s)")

    @property
    def grain(self) -> int:
        return min(max(1, self.gap // _GAP_PART), GRAIN_MOST)

    def __repr__(self) -> str:
        return f"Session({self.gap} ms)"


@checks_options
class CountWindow(Window[int]):
    """Windows of `size` records of a key, of which one begins every `slide` records (None: one after the other). The
    records count in the order in which they come. Windows that are not full when the input ends have no result."""

    in_event_time = False

    def __init__(self, size: int, slide: int | None = None) -> None:
        self.size = whole(size, "CountWindow(size)")
        self.slide = self.size if slide is None else whole(slide, "CountWindow(slide)")
        if self.slide > self.size:
            raise FlowError(
                f"CountWindow: slide {self.slide} is above size {self.size}; records between windows would be lost. "
                "If you want that, remove these records with filter() first"
            )

    def of(self, number: int) -> list[tuple[int, int]]:
        """Returns the windows to which the record of this number belongs, counted from 0, the first window first."""
        last = number // self.slide
        first = max(0, (number - self.size) // self.slide + 1)
        return [(i * self.slide, i * self.slide + self.size) for i in range(first, last + 1)]

    def __repr__(self) -> str:
        return f"CountWindow({self.size} records, every {self.slide})"


@checks_options
class GlobalWindow(Window[None]):
    """One window of all records of a key. It has a result when the input ends, and before that early ones: give
    window() `early_s` or `early_count`."""

    in_event_time = False

    def __repr__(self) -> str:
        return "GlobalWindow()"
