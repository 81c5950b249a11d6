"""A sink for applications that have more results than anybody reads: it keeps the last few of each task to show.

Memory must never grow with the number of results. How many there were is in the status of the job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from penstock.apps.at_end import AtEnd, Kept
from penstock.runtime.sinks import Sink
from penstock.runtime.status import JobStatus

SHOWN = 5


class Few(AtEnd):
    """Keeps the last `count` records of each of its tasks, and writes them to another sink when the input ends."""

    def __init__(self, sink: Sink, count: int = SHOWN) -> None:
        super().__init__(sink)
        self.count = count

    def kept(self) -> Kept:
        last: deque[Any] = deque(maxlen=self.count)
        return Kept(last, last.extend, lambda: last)

    def describe(self) -> str:
        return f"the last {self.count} records of each task, at the end to {self.sink.describe()}"


def told(status: JobStatus, ran: float, operator: str, what: str) -> Iterable[str]:
    """Makes the lines about the number of records that an operator got, and their latency."""
    seen = status.operators[operator]
    count = int(seen["records_in"])
    yield f"{count:,} {what}, {count / ran if ran else 0.0:,.0f} a second"
    latency = seen["latency_ms"]
    if latency["p50"] is not None:
        yield (
            f"latency since the last record that a result has waited for: p50 {latency['p50']:.1f} ms, "
            f"p99 {latency['p99']:.1f} ms"
        )
