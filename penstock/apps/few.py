"""A sink for applications that have more results than anybody reads: it keeps the last few of each task to show.

Memory must never grow with the number of results. How many there were is in the status of the job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from penstock.apps.app import Status
from penstock.runtime.sinks import Sink, SinkContext, SinkWriter

SHOWN = 5


class Few(Sink):
    """Keeps the last `count` records of each of its tasks, and writes them to another sink when the input ends."""

    def __init__(self, sink: Sink, count: int = SHOWN) -> None:
        self.sink = sink
        self.count = count
        self.channel = sink.channel
        self.prints = sink.prints
        self.guarantee = sink.guarantee

    def bind(self, fetch: Callable[[], list[Any]]) -> None:
        self.sink.bind(fetch)

    def check(self) -> None:
        self.sink.check()

    def writer(self, context: SinkContext) -> SinkWriter:
        return _FewWriter(self.sink.writer(context), self.count)

    def describe(self) -> str:
        return f"the last {self.count} records of each task, at the end to {self.sink.describe()}"


class _FewWriter(SinkWriter):
    def __init__(self, writer: SinkWriter, count: int) -> None:
        self._writer = writer
        self._last: deque[Any] = deque(maxlen=count)

    def write(self, records: list[Any]) -> None:
        self._last.extend(records)

    def finish(self) -> None:
        self._writer.write(list(self._last))
        self._writer.finish()

    def prepare(self, epoch: int) -> Any:
        return self._writer.prepare(epoch), list(self._last)

    def commit(self, epoch: int) -> None:
        self._writer.commit(epoch)

    def restore(self, epoch: int, prepared: list[Any]) -> None:
        self._writer.restore(epoch, [inner for inner, _ in prepared if inner is not None])
        for _, last in prepared:
            self._last.extend(last)

    def close(self, failed: bool) -> None:
        self._writer.close(failed)


def told(status: Status, ran: float, operator: str, what: str) -> Iterable[str]:
    """Makes the lines about the number of records that an operator got, and their latency."""
    seen = status["operators"][operator]
    count = int(seen["records_in"])
    yield f"{count:,} {what}, {count / ran if ran else 0.0:,.0f} a second"
    latency = seen["latency_ms"]
    if latency["p50"] is not None:
        yield (
            f"latency since the last record that a result has waited for: p50 {latency['p50']:.1f} ms, "
            f"p99 {latency['p99']:.1f} ms"
        )
