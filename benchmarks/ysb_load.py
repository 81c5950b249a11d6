"""The load of the Yahoo benchmarks, the same for every system: its events, what must come of them, and their delays.

**Events.** `penstock.apps.ysb_events` makes line i from a seed and i alone. It is due at the start + the time that the
schedule has for i, whatever a system does. Systems are made ready first; then a file names the start.

**Delay.** A result is an update, (campaign, window, views so far), emitted at some time. The n-th view of a campaign
and window, in the order in which they are due, has its result with the first update that says n views or more; its
delay is the time of that emission minus the time at which it was due. So whatever an event waits for, its source, a
queue, a micro-batch to begin or to end, is in its delay, in every system alike, and of a system nothing is asked but
its updates. Both times are the machine's clock.

**Right.** The last update of every campaign and window must be its exact number of views. The expectation is made by
numpy from the generator's numbers, and its beginning is compared with a plain loop that parses the text.
"""

from __future__ import annotations

import os
import pickle
import time
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common import WrongResult, quantile
from penstock.apps import ysb
from penstock.apps.ysb_events import AD_TYPES, ADS_PER_CAMPAIGN, EVENT_TYPES, START_MS, EventReader, Events, EventSource
from penstock.runtime.sinks import Sink, SinkContext, SinkWriter
from penstock.runtime.sources import Reader, SourceContext, Split, TextFiles
from penstock.runtime.sources.base import ColumnReader

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

    Longs = npt.NDArray[np.int64]
    Doubles = npt.NDArray[np.float64]

NS = 1_000_000_000
_CHUNK = 1 << 20
_LOOP = 20_000  # events that the plain loop counts too
_LOOK_S = 0.02  # how often a source looks whether it may start


@dataclass(frozen=True)
class Load:
    """Steps of a rate, "5000:20s,60000:15s", played once; or, not `paced`, their first `limit` events as fast as they
    are taken."""

    steps: str
    paced: bool = True
    limit: int | None = None
    seed: int = 0

    @property
    def events(self) -> Events:
        """The generator."""
        return Events(self.seed, rate=self.steps, start_ms=START_MS)

    @property
    def number(self) -> int:
        """How many events there are."""
        return self.events.count_before(self.seconds) if self.limit is None else self.limit

    @property
    def seconds(self) -> float:
        """How long the steps take."""
        return self.times[-1][1]

    @property
    def times(self) -> list[tuple[float, float, float]]:
        """(begin, end, rate) of each step, in seconds since the start."""
        times: list[tuple[float, float, float]] = []
        for rate, seconds in self.events.schedule.steps:
            begin = times[-1][1] if times else 0.0
            times.append((begin, begin + (seconds or 0.0), rate))
        return times


def quantiles(delays: Doubles) -> dict[str, float]:
    """Their p50, p99 and greatest."""
    ordered = np.sort(delays)
    return {"p50": quantile(ordered, 0.5), "p99": quantile(ordered, 0.99), "max": float(ordered[-1])}


# --- in ------------------------------------------------------------------------------------------------------------


def start(folder: Path, after_s: float = 0.5) -> int:
    """Name the start, which is soon; in ns since 1970."""
    at = time.time_ns() + int(after_s * NS)
    partial = folder / ".start"
    partial.write_text(str(at))
    partial.rename(folder / "start")
    return at


class _Gate:
    """Opens at the start that the folder names."""

    def __init__(self, folder: str) -> None:
        self._file = Path(folder, "start")
        self.start_ns = 0  # 0: not known yet

    def is_open(self) -> bool:
        """Whether it has come."""
        if not self.start_ns and self._file.exists():
            self.start_ns = int(self._file.read_text())
        return 0 < self.start_ns <= time.time_ns()


class Gated(EventSource):
    """The events of a load, from the start on that the folder names."""

    def __init__(self, load: Load, folder: str) -> None:
        super().__init__(load.events, limit=load.number, paced=load.paced)
        self.folder = folder

    def reader(self, splits: list[Split], context: SourceContext) -> EventReader:
        return _GatedReader(self, splits)


class _GatedReader(EventReader):
    def __init__(self, source: Gated, splits: list[Split]) -> None:
        super().__init__(source, splits)
        self._gate = _Gate(source.folder)

    def read(self, limit: int) -> list[Any]:
        return super().read(limit) if self._has_started() else []

    def read_arrow(self, limit: int) -> pa.RecordBatch:
        return super().read_arrow(limit if self._has_started() else 0)

    def ready_in(self) -> float:
        return super().ready_in() if self._has_started() else _LOOK_S

    def backlog(self) -> int:
        return super().backlog() if self._has_started() else 0

    def _has_started(self) -> bool:
        is_open = self._gate.is_open()
        if self._gate.start_ns:
            later = self._gate.start_ns - self._events.start_ms * 1_000_000
            self._clock = lambda: time.time_ns() - later  # by which event 0 is due at the start
        return is_open


class GatedFiles(TextFiles):
    """The lines of files, each in its order, from the start on that the folder names."""

    def __init__(self, paths: list[str], folder: str) -> None:
        super().__init__(paths, parallel=False)
        self.folder = folder

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        reader = super().reader(splits, context)
        # The bridge's trial reads a sample before the start.
        return reader if context.operator == "sample" else _GatedFilesReader(reader, self.folder)


class _GatedFilesReader(ColumnReader):
    def __init__(self, reader: ColumnReader, folder: str) -> None:
        self._reader = reader
        self._gate = _Gate(folder)

    def read(self, limit: int) -> list[Any]:
        return self._taken(self._reader.read(limit)) if self._gate.is_open() else []

    def read_arrow(self, limit: int) -> pa.RecordBatch:
        import pyarrow as pa

        if not self._gate.is_open():
            return pa.record_batch([pa.array([], pa.string())], ["value"])
        return self._taken(self._reader.read_arrow(limit))

    def _taken(self, records: Any) -> Any:
        self.finished = self._reader.finished
        return records

    def offsets(self) -> dict[str, Any]:
        return self._reader.offsets()

    def ready_in(self) -> float | None:
        return self._reader.ready_in() if self._gate.is_open() else _LOOK_S

    def close(self) -> None:
        self._reader.close()


def write_lines(events: Events, first: int, count: int, path: Path) -> None:
    """The lines of events first, first + 1, ... as a text file, which appears when it is whole."""
    import pyarrow as pa
    import pyarrow.compute as pc

    partial = path.with_name(f".{path.name}")
    with partial.open("wb") as file:
        for at in range(first, first + count, _CHUNK):
            texts = events.events_arrow(at, min(_CHUNK, first + count - at)).column(0)
            ended = pc.binary_join_element_wise(texts, pa.scalar(""), pa.scalar("\n"))
            file.write(ended.buffers()[2])  # of texts that end in a newline the data is the file
    partial.rename(path)


# --- out -----------------------------------------------------------------------------------------------------------


class Updates:
    """Notes updates as they are emitted, cheaply, and leaves them in a file."""

    def __init__(self, out: str) -> None:
        self._out = out
        self._keys: dict[tuple[str, int], int] = {}
        self._of = array("q")
        self._views = array("q")
        self._at = array("q")

    def note(self, updates: Iterable[tuple[str, int, int]]) -> None:
        """(campaign, start of the window, views) each, emitted now."""
        now = time.time_ns()
        keys = self._keys
        before = len(self._of)
        for campaign, begin, views in updates:
            self._of.append(keys.setdefault((campaign, begin), len(keys)))
            self._views.append(views)
        self._at.extend([now] * (len(self._of) - before))

    def save(self) -> None:
        """Leave the file."""
        if self._of:
            name = f"updates-{os.getpid()}-{time.monotonic_ns()}"
            Path(self._out, name).write_bytes(pickle.dumps((list(self._keys), self._of, self._views, self._at)))


class UpdateSink(Sink):
    """The store: takes (campaign, start, end, views)."""

    def __init__(self, out: str) -> None:
        self._out = out

    def writer(self, context: SinkContext) -> SinkWriter:
        return _UpdateWriter(self._out)


class _UpdateWriter(SinkWriter):
    def __init__(self, out: str) -> None:
        self._updates = Updates(out)

    def write(self, records: list[Any]) -> None:
        self._updates.note((campaign, begin, views) for campaign, begin, _, views in records)

    def close(self, failed: bool) -> None:
        self._updates.save()


# --- what came of it -----------------------------------------------------------------------------------------------


class Expected:
    """What must come of a load. `of` makes it once for each."""

    def __init__(self, load: Load) -> None:
        self.load = load
        events, number = load.events, load.number
        campaigns = list(dict.fromkeys(row["campaign_id"] for row in events.campaigns()))
        keys, dues = [], []
        for first in range(0, number, _CHUNK):
            indices = np.arange(first, min(number, first + _CHUNK), dtype=np.int64)
            _, kinds, times = events._draw(indices)
            views = kinds % len(EVENT_TYPES) == EVENT_TYPES.index("view")
            ads = kinds[views] // (len(AD_TYPES) * len(EVENT_TYPES))
            windows = times[views] // ysb.WINDOW_MS
            keys.append(windows * len(campaigns) + ads // ADS_PER_CAMPAIGN)
            dues.append(events.due_ns(indices[views]) - START_MS * 1_000_000)
        key, due = np.concatenate(keys), np.concatenate(dues)
        self.views = len(key)
        order = np.argsort(key, kind="stable")
        found, begins = np.unique(key[order], return_index=True)
        parts = np.split(due[order], begins[1:])
        #: (campaign, start of the window) -> when its views are due, in ns since the start, in order
        self.due: dict[tuple[str, int], Longs] = {
            (campaigns[number % len(campaigns)], number // len(campaigns) * ysb.WINDOW_MS): part
            for number, part in zip(found.tolist(), parts, strict=True)
        }
        if number > _LOOP:
            _compare_with_loop(load)
        elif self.counts() != ysb.recount(events, number):
            raise WrongResult("the expected counts are not those of a plain loop")

    @staticmethod
    @lru_cache(maxsize=4)
    def of(load: Load) -> Expected:
        """What must come of this load."""
        return Expected(load)

    def counts(self) -> dict[tuple[str, int], int]:
        """The views of each campaign and window."""
        return {key: len(due) for key, due in self.due.items()}


def _compare_with_loop(load: Load) -> None:
    Expected(Load(load.steps, load.paced, _LOOP, load.seed))


class Results:
    """The updates of a run, checked. Takes them out of the folder."""

    def __init__(self, load: Load, out: Path, start_ns: int, who: str) -> None:
        self.expected = Expected.of(load)
        self._updates: dict[tuple[str, int], tuple[Longs, Longs]] = {}  # views, and when, in ns since the start
        for path in sorted(out.glob("updates-*")):
            keys, *columns = pickle.loads(path.read_bytes())
            path.unlink()
            of, views, at = (np.frombuffer(column, np.int64) for column in columns)
            order = np.argsort(of, kind="stable")
            begins = np.searchsorted(of[order], np.arange(1, len(keys)))
            for key, mine in zip(keys, np.split(order, begins), strict=True):
                if key in self._updates:
                    raise WrongResult(f"{who}: two sinks got the same campaign and window")
                self._updates[key] = views[mine], at[mine] - start_ns
        counts = {key: int(views[-1]) for key, (views, _) in self._updates.items()}
        right = self.expected.counts()
        if counts != right:
            wrong = [key for key in counts.keys() | right.keys() if counts.get(key, 0) != right.get(key, 0)]
            raise WrongResult(
                f"{who}: {len(wrong)} of {len(right)} counts are wrong, such as {wrong[0]}: "
                f"{counts.get(wrong[0], 0)}, and {right.get(wrong[0], 0)} would be right"
            )

    def delays(self) -> tuple[Doubles, Doubles]:
        """(seconds since the start at which it was due, delay in ms) of each view, in the order of the due times."""
        dues, delays = [], []
        for key, due in self.expected.due.items():
            views, at = self._updates[key]
            first = np.searchsorted(np.maximum.accumulate(views), np.arange(1, len(due) + 1))
            dues.append(due)
            delays.append(at[first] - due)
        due, delay = np.concatenate(dues), np.concatenate(delays)
        order = np.argsort(due, kind="stable")
        return due[order] / NS, delay[order] / 1e6

    @property
    def seconds(self) -> float:
        """From the start to the last update."""
        return max(int(at[-1]) for _, at in self._updates.values()) / NS

    def steady_rate(self) -> float:
        """Events a second of an unpaced run whose counts leave when their window has ended: from the last result of one
        window to that of the last but one, without the first half, as Spark compiles what it runs for millions of
        events."""
        ended: dict[int, int] = {}  # window -> when the first results of all campaigns had come
        sizes: Counter[int] = Counter()
        for (_, begin), (_, at) in self._updates.items():
            ended[begin] = max(ended.get(begin, 0), int(at[0]))
        for (_, begin), due in self.expected.due.items():
            sizes[begin] += len(due)
        # Before the first window are only late events; the last one is cut short by the input's end.
        windows = sorted(begin for begin in ended if begin >= START_MS)[:-1]
        at = np.maximum.accumulate([ended[window] for window in windows])
        views = np.cumsum([sizes[window] for window in windows])
        # Windows that end in one micro-batch come together: begin with the last of those.
        first = int(np.searchsorted(at, at[len(at) // 2] + NS // 20)) - 1
        if at[-1] <= at[first]:
            raise WrongResult("the run is too short to have a steady rate")
        share = (views[-1] - views[first]) / self.expected.views
        return float(share * self.expected.load.number / ((at[-1] - at[first]) / NS))
