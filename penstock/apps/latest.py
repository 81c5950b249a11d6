"""A sink that keeps the newest value of each key: running results come in, and one line for each key goes out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from penstock.runtime.sinks import Sink, SinkContext, SinkWriter

_PIECE = 4096


class Latest(Sink):
    """Keeps the newest value of each key of (key, value) records, and writes these values to another sink when the
    input ends.

    An aggregate that emits every update keeps its latency low and measurable, and yet what is left at the end is one
    record a key. Memory is that of one value a key, as in the aggregate itself,
    and all of it is saved with every epoch. Needs all records of a key in one
    task, as they come from a keyed operator of the same parallelism.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.channel = sink.channel
        self.prints = sink.prints
        self.guarantee = sink.guarantee

    def bind(self, fetch: Callable[[], list[Any]]) -> None:
        self.sink.bind(fetch)

    def check(self) -> None:
        self.sink.check()

    def writer(self, context: SinkContext) -> SinkWriter:
        return _LatestWriter(self.sink.writer(context))

    def describe(self) -> str:
        return f"newest value of each key, at the end to {self.sink.describe()}"


class _LatestWriter(SinkWriter):
    def __init__(self, writer: SinkWriter) -> None:
        self._writer = writer
        self._newest: dict[Any, Any] = {}

    def write(self, records: list[Any]) -> None:
        self._newest.update(records)

    def finish(self) -> None:
        items = iter(self._newest.items())
        while piece := list(islice(items, _PIECE)):
            self._writer.write(piece)
        self._writer.finish()

    def prepare(self, epoch: int) -> Any:
        return self._writer.prepare(epoch), self._newest.copy()

    def commit(self, epoch: int) -> None:
        self._writer.commit(epoch)

    def restore(self, epoch: int, prepared: list[Any]) -> None:
        self._writer.restore(epoch, [inner for inner, _ in prepared if inner is not None])
        for _, newest in prepared:
            self._newest.update(newest)

    def close(self, failed: bool) -> None:
        self._writer.close(failed)
