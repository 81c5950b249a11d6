"""Sources and sinks of the Penstock contestants that leave stamps; see stamps.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import penstock as ps
from benchmarks.pacing import Latencies, Pacer
from benchmarks.stamps import Counts, FirstRead, Lines
from penstock.runtime.sinks import SinkContext, SinkWriter
from penstock.runtime.sources import Reader, SourceContext, Split


class StampedText(ps.sources.TextFiles):
    """Text files, with the time of the first read."""

    def __init__(self, paths: list[str], out: str) -> None:
        super().__init__(paths)
        self._out = out

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:  # type: ignore[override]
        return _StampedReader(super().reader(splits, context), FirstRead(self._out))


class _StampedReader(Reader):
    def __init__(self, reader: Reader, first: FirstRead) -> None:
        self._reader = reader
        self._first = first

    @property
    def finished(self) -> bool:  # type: ignore[override]
        return self._reader.finished

    def read(self, limit: int) -> list[Any]:
        self._first.now()
        return self._reader.read(limit)

    def offsets(self) -> dict[str, Any]:
        return self._reader.offsets()

    def ready_in(self) -> float | None:
        return self._reader.ready_in()

    def close(self) -> None:
        self._reader.close()
        self._first.save()


class StampedSink(ps.sinks.Sink):
    """`make(out)` (Counts, Lines) takes the records and leaves a file at the end."""

    def __init__(self, make: Callable[[str], Counts | Lines], out: str) -> None:
        self._make = make
        self._out = out

    def writer(self, context: SinkContext) -> SinkWriter:
        return _StampedWriter(self._make(self._out))


class _StampedWriter(SinkWriter):
    def __init__(self, end: Counts | Lines) -> None:
        self._end = end
        self.write = end.write  # type: ignore[method-assign]

    def write(self, records: list[Any]) -> None:
        raise AssertionError("replaced in __init__")

    def close(self, failed: bool) -> None:
        self._end.save()


class Paced(ps.sources.Source):
    """What a Pacer makes, in one task."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer

    def splits(self, parallelism: int) -> list[Split]:
        return [Split("paced")]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        return _PacedReader(self._pacer if splits else None)


class _PacedReader(Reader):
    def __init__(self, pacer: Pacer | None) -> None:
        self._pacer = pacer
        self.finished = pacer is None

    def read(self, limit: int) -> list[Any]:
        assert self._pacer is not None
        records = self._pacer.due(limit)
        if records:
            self.stamp_ns = records[0][0]
        self.finished = self._pacer.finished
        return records

    def ready_in(self) -> float:
        assert self._pacer is not None
        return self._pacer.next_in_ns() / 1e9

    def offsets(self) -> dict[str, Any]:
        return {}


class LatencySink(ps.sinks.Sink):
    """Calls the user's function for every record, as Call does, and lets it leave its file at the end."""

    def __init__(self, latencies: Latencies) -> None:
        self._latencies = latencies

    def writer(self, context: SinkContext) -> SinkWriter:
        return _LatencyWriter(self._latencies)


class _LatencyWriter(SinkWriter):
    def __init__(self, latencies: Latencies) -> None:
        self._latencies = latencies
        latencies.open()

    def write(self, records: list[Any]) -> None:
        deque(map(self._latencies.record, records), maxlen=0)

    def close(self, failed: bool) -> None:
        self._latencies.save()
