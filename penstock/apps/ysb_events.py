"""The events of the Yahoo streaming benchmark (docs/papers.md: D7), made of nothing but a seed and their number.

Each event is a line of JSON about an advertisement that somebody has seen, clicked on or bought by. Its ids and types
are drawn by a hash of (seed, index), its time is the schedule's at that index. So the same events come in every run,
in any order, from any number of tasks, and a source that goes back to an index gives again what it gave before; how
many there are in each window does not depend on when or how quickly a job runs.

There are two forms of the same text: a list of str, and an Arrow column that is made without a Python object a row.
The constants are those of the public benchmark's own generator.
"""

from __future__ import annotations

import time
import uuid
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from random import Random
from typing import TYPE_CHECKING, Any

from penstock.apps.hashing import GOLDEN, mixed
from penstock.runtime.errors import FlowError
from penstock.runtime.sources import Source, SourceContext, Split
from penstock.runtime.sources.base import ColumnReader
from penstock.runtime.sources.pace import Schedule, Steps

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    Ints = npt.NDArray[np.int64]

CAMPAIGNS, ADS_PER_CAMPAIGN, USERS, PAGES = 100, 10, 100, 100
AD_TYPES = ("banner", "modal", "sponsored-search", "mail", "mobile")
EVENT_TYPES = ("view", "click", "purchase")
SKEW_MS = 50  # events are up to so much before or after their turn
LATE_MS = 60_000  # a few come up to so much after it
LATE_SHARE = 1 / 100_000

START_MS = 1_700_000_000_000  # of the first event, where nothing else is said; the beginning of a window
RATE = 50_000  # events a second of event time, likewise; the lowest of the published runs

_ADS = CAMPAIGNS * ADS_PER_CAMPAIGN
_KINDS = len(AD_TYPES) * len(EVENT_TYPES)
_TAIL = '", "ip_address": "1.2.3.4"}'
_INDEX_MAX = 1 << 53  # the schedule counts in doubles
_BLOCK, _BLOCK_MAX = 512, 4096  # lines made at once: few calls of numpy, and yet nobody waits long for them
_COLUMN_MAX = 4_000_000  # a column of texts of this length holds 8 million


class Events:
    """Gives all events of a seed, by index.

        events = Events(seed=1, rate="5000:10s,60000:10s")
        events.events(0, 1000)                  # the first thousand lines
        events.events_arrow(10**9, 65536)       # a record batch with the column "value"

    `rate`: events a second, or steps, as of `sources.Generator`: what the events' times follow. `start_ms`: the time
    of event 0. `skew`: times are up to SKEW_MS before or after the schedule. `late_share`: so many of all events are
    up to LATE_MS after it. `Events` travels to workers as these few values.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        rate: float | str | Steps = RATE,
        start_ms: int = START_MS,
        skew: bool = True,
        late_share: float = LATE_SHARE,
    ) -> None:
        if not 0 <= late_share <= 1:
            raise FlowError(f"Events: late_share must be between 0 and 1, got {late_share}")
        if start_ms < 0:
            raise FlowError(f"Events: start_ms must not be negative, got {start_ms}")
        self.seed = seed
        self.schedule = Schedule(rate)
        self.start_ms = start_ms
        self.skew = skew
        self.late_share = late_share

    def campaigns(self) -> list[dict[str, str]]:
        """Returns the table of the join: a row {"ad_id": ..., "campaign_id": ...} for each advertisement."""
        ids = _tables(self.seed)
        return [
            {"ad_id": ad, "campaign_id": ids.campaigns[number // ADS_PER_CAMPAIGN]} for number, ad in enumerate(ids.ads)
        ]

    def events(self, first: int, count: int, step: int = 1) -> list[str]:
        """Returns the lines of the events first, first + step, ..., `count` of them."""
        return self.lines_of(_range(first, count, step))

    def events_arrow(self, first: int, count: int, step: int = 1) -> pa.RecordBatch:
        """Returns the same lines as a record batch with one column, "value". It has at most 8 million rows, because a
        column holds 2 GiB."""
        return self.arrow_of(_range(first, count, step))

    def lines_of(self, indices: Ints) -> list[str]:
        """Returns the lines of the events of these indices."""
        visits, ads, times = self._draw(indices)
        tables = _tables(self.seed)
        heads, middles = tables.heads_array[visits], tables.middles_array[ads]
        return [f"{head}{middle}{ms}{_TAIL}" for head, middle, ms in zip(heads, middles, times.tolist(), strict=True)]

    def arrow_of(self, indices: Ints) -> pa.RecordBatch:
        """Returns the lines of the events of these indices as a record batch."""
        import pyarrow as pa
        import pyarrow.compute as pc

        visits, ads, times = self._draw(indices)
        tables = _tables(self.seed)
        value = pc.binary_join_element_wise(
            tables.heads_arrow.take(pa.array(visits)),
            tables.middles_arrow.take(pa.array(ads)),
            pc.cast(pa.array(times), pa.string()),
            pa.scalar(_TAIL),
            pa.scalar(""),
        )
        return pa.record_batch([value], names=["value"])

    def times_of(self, indices: Ints) -> Ints:
        """Returns the events' own times, in milliseconds since 1970."""
        return self._draw(indices)[2]

    def due_ns(self, indices: Ints) -> Ints:
        """Returns when the events are due by the schedule, in nanoseconds since 1970."""
        import numpy as np

        return self.schedule.due_ns(indices.astype(np.float64)) + self.start_ms * 1_000_000

    def count_before(self, seconds: float) -> int:
        """Returns how many events the schedule has in its first seconds."""
        return self.count_due(round(seconds * 1e9) - 1)

    def count_due(self, passed_ns: int, least: int = 0) -> int:
        """Returns how many events are due so long after the start, and at least `least`. The call is quick when few
        events beyond `least` are due."""
        import numpy as np

        def due(index: int) -> int:
            return int(self.schedule.due_ns(np.array([float(index)]))[0])

        step = 1
        while due(least + step - 1) <= passed_ns:
            step *= 2
        return bisect_right(range(least + step - 1), passed_ns, lo=min(least + step // 2, least + step - 1), key=due)

    def _draw(self, indices: Ints) -> tuple[Ints, Ints, Ints]:
        """Draws, for each event, an index into all (user, page), an index into all (ad, ad type, event type), and the
        time."""
        import numpy as np

        low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
        key = np.uint64(mixed(self.seed * GOLDEN + GOLDEN))
        # Two words of an index: the steps 2i + 1 and 2i + 2 of a SplitMix64 that began at the key.
        steps = indices.astype(np.uint64) * np.uint64(2)
        one = _mix((steps + np.uint64(1)) * np.uint64(GOLDEN) + key)
        two = _mix((steps + np.uint64(2)) * np.uint64(GOLDEN) + key)
        visits = ((one >> half) * np.uint64(USERS * PAGES) >> half).astype(np.int64)
        ads = ((one & low) * np.uint64(_ADS * _KINDS) >> half).astype(np.int64)
        times = self.due_ns(indices) // 1_000_000
        if self.skew:
            times += SKEW_MS - ((two >> half) * np.uint64(2 * SKEW_MS) >> half).astype(np.int64)
        late = np.flatnonzero((two & low) < np.uint64(round(self.late_share * (1 << 32))))
        if len(late):
            by = _mix(two[late] + np.uint64(GOLDEN)) >> half
            times[late] -= (by * np.uint64(LATE_MS) >> half).astype(np.int64)
        return visits, ads, times


@dataclass(frozen=True)
class _Tables:
    """Holds the ids of a seed, and the pieces of text from which lines are put together."""

    campaigns: list[str]
    ads: list[str]
    heads: list[str]  # of each (user, page): from the line's beginning to the ad's id
    middles: list[str]  # of each (ad, ad type, event type): from the ad's id to the time

    @cached_property
    def heads_array(self) -> npt.NDArray[np.object_]:
        return _objects(self.heads)

    @cached_property
    def middles_array(self) -> npt.NDArray[np.object_]:
        return _objects(self.middles)

    @cached_property
    def heads_arrow(self) -> pa.Array:
        import pyarrow as pa

        return pa.array(self.heads)

    @cached_property
    def middles_arrow(self) -> pa.Array:
        import pyarrow as pa

        return pa.array(self.middles)


@lru_cache(maxsize=4)
def _tables(seed: int) -> _Tables:
    random = Random(seed)

    def ids(count: int) -> list[str]:
        return [str(uuid.UUID(int=random.getrandbits(128), version=4)) for _ in range(count)]

    campaigns, ads, users, pages = ids(CAMPAIGNS), ids(_ADS), ids(USERS), ids(PAGES)
    heads = [f'{{"user_id": "{user}", "page_id": "{page}", "ad_id": "' for user in users for page in pages]
    middles = [
        f'{ad}", "ad_type": "{ad_type}", "event_type": "{event_type}", "event_time": "'
        for ad in ads
        for ad_type in AD_TYPES
        for event_type in EVENT_TYPES
    ]
    return _Tables(campaigns, ads, heads, middles)


def _objects(texts: list[str]) -> npt.NDArray[np.object_]:
    import numpy as np

    return np.array(texts, dtype=object)


def _range(first: int, count: int, step: int) -> Ints:
    import numpy as np

    return np.arange(first, first + count * step, step, dtype=np.int64)


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The output function of SplitMix64, in place: every bit of a word depends on all of it."""
    import numpy as np

    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


# --- the source ------------------------------------------------------------------------------------------------


class EventSource(Source):
    """A source of the lines of `events`, each line at its time, or all as fast as possible.

    `limit`: how many events; `duration_s`: so many seconds of the schedule instead. Without either it never ends.
    `paced`: event i comes when the clock says `events.start_ms` and its time in the schedule. That is an appointment: a
    job that starts later, or continues after a failure, finds waiting what was due meanwhile, as in a message queue.
    `splits`: how many tasks can share the work (None: all of the source's); split t has every index t, t + splits, ...
    `clock`: nanoseconds since 1970, for tests.

    Latency counts from the time when an event was due. A task of several splits gives their events in order of index,
    so that the times of its events are in order too, however far apart the splits were when it got them.

    Offset: the number of events that the split gave.
    """

    hands_columns = True

    def __init__(
        self,
        events: Events,
        *,
        limit: int | None = None,
        duration_s: float | None = None,
        paced: bool = False,
        splits: int | None = None,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        if limit is not None and duration_s is not None:
            raise FlowError("EventSource: limit and duration_s both say when to end; give one of them")
        if limit is not None and limit < 0:
            raise FlowError(f"EventSource: limit must not be negative, got {limit}")
        if duration_s is not None and duration_s <= 0:
            raise FlowError(f"EventSource: duration_s must be above 0 seconds, got {duration_s}")
        if splits is not None and splits < 1:
            raise FlowError(f"EventSource needs at least one split, got splits={splits}")
        self.events = events
        self.limit = limit if duration_s is None else events.count_before(duration_s)
        self.paced = paced
        self.count = splits
        self.clock = clock
        self.bounded = self.limit is not None

    def splits(self, parallelism: int) -> list[Split]:
        count = self.count or max(1, parallelism)
        return [Split(f"{t} of {count}", (t, count)) for t in range(count)]

    def reader(self, splits: list[Split], context: SourceContext) -> EventReader:
        return EventReader(self, splits)

    def sample(self, rows: int) -> pa.RecordBatch:
        """Returns the first events, whether they are due or not; see Source.sample."""
        return self.events.events_arrow(0, rows if self.limit is None else min(rows, self.limit))

    def describe(self) -> str:
        steps = self.events.schedule.steps
        parts = [", ".join(f"{rate:,.6g}/s" + ("" if s is None else f" for {s:g} s") for rate, s in steps)]
        if not self.paced:
            parts.append("of event time")
        if self.limit is not None:
            parts.append(f"limit={self.limit:,}")
        return f"EventSource({', '.join(parts)})"


class EventReader(ColumnReader):
    """Reads its splits as one sequence, in order of index."""

    split = ""

    def __init__(self, source: EventSource, splits: list[Split]) -> None:
        import numpy as np

        self._events = source.events
        self._clock = source.clock
        self.paced = source.paced
        self._limit = _INDEX_MAX if source.limit is None else source.limit
        self._names = [split.name for split in splits]
        self._first = np.array([split.payload[0] for split in splits], dtype=np.int64)
        self._stride = np.array([split.payload[1] for split in splits], dtype=np.int64)
        self._made = np.array([split.offset or 0 for split in splits], dtype=np.int64)
        self._ahead = self._made.copy()  # of each split, after the last event of the block
        # A block of the next events that nobody has had yet: their indices, which of the splits they are of, when they
        # are due, their lines once the first of them is wanted; and how many are gone.
        self._indices = self._split = self._due = np.empty(0, np.int64)
        self._lines: list[str] = []
        self._at = 0
        self._fill(0)

    def read(self, limit: int) -> list[Any]:
        out: list[str] = []
        self.stamp_ns = None
        now = self._clock()
        while count := self._ready(now, limit - len(out)):
            if not self._lines:
                self._lines = self._events.lines_of(self._indices)
            lines = self._lines[self._at : self._at + count]
            self._hand_out(count, now)
            if self._at == len(self._indices):
                self._fill(limit)
            out = out + lines if out else lines
        return out

    def read_arrow(self, limit: int) -> pa.RecordBatch:
        import numpy as np

        limit = min(limit, _COLUMN_MAX)
        parts = []
        self.stamp_ns = None
        now = self._clock()
        while count := self._ready(now, limit):
            parts.append(self._indices[self._at : self._at + count])
            limit -= count
            self._hand_out(count, now)
            if self._at == len(self._indices):
                self._fill(limit)
        return self._events.arrow_of(np.concatenate(parts) if parts else np.empty(0, np.int64))

    def ready_in(self) -> float:
        if not self.paced or self.finished:
            return 0.0
        return max(0, int(self._due[self._at]) - self._clock()) / 1e9

    def backlog(self) -> int:
        if self.finished or (not self.paced and self._limit == _INDEX_MAX):
            return 0
        made = self._made
        upto = self._limit
        if self.paced:
            passed = self._clock() - self._events.start_ms * 1_000_000
            upto = min(upto, self._events.count_due(passed, int((self._first + made * self._stride).min())))
        all_of_them = -((self._first - upto) // self._stride)  # each split's below that index
        return int((all_of_them - made).clip(0).sum())

    def offsets(self) -> dict[str, Any]:
        return dict(zip(self._names, self._made.tolist(), strict=True))

    def close(self) -> None:
        self.finished = True
        self._lines = []

    def _ready(self, now: int, limit: int) -> int:
        """Returns how many events of the block may leave now."""
        if self.finished:
            return 0
        if not self.paced:
            return min(limit, len(self._indices) - self._at)
        return int(self._due[self._at : self._at + limit].searchsorted(now, side="right"))

    def _hand_out(self, count: int, now: int) -> None:
        import numpy as np

        if self.paced and self.stamp_ns is None:
            self.stamp_ns = time.monotonic_ns() - (now - int(self._due[self._at]))
        if len(self._names) == 1:
            self._made += count
        else:
            self._made += np.bincount(self._split[self._at : self._at + count], minlength=len(self._names))
        self._at += count

    def _fill(self, wanted: int) -> None:
        """Prepares a block of the next events. The reader is finished when there are none."""
        import numpy as np

        size = min(max(wanted, _BLOCK), _BLOCK_MAX)
        if len(self._names) == 1:
            numbers = self._ahead + np.arange(size)
            indices = self._first + numbers * self._stride
            split = np.zeros(size, np.int64)
        else:
            numbers = self._ahead[:, None] + np.arange(size)
            table = self._first[:, None] + numbers * self._stride[:, None]
            order = np.argsort(table, axis=None, kind="stable")[:size]
            indices, split = table.reshape(-1)[order], order // size
        count = int(indices.searchsorted(self._limit))
        self._indices, self._split = indices[:count], split[:count]
        self._due = self._events.due_ns(self._indices) if self.paced else self._indices
        self._lines = []
        self._at = 0
        self._ahead += np.bincount(self._split, minlength=len(self._names))
        self.finished = count == 0
