"""Sinks that keep something of their records, and write it to another sink when the input ends.

What a task keeps is saved with every epoch as a whole, so it must stay small.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from penstock.runtime.sinks import Sink, SinkCommitter, SinkContext, SinkWriter

_PIECE = 4096


@dataclass(frozen=True)
class Kept:
    """The values that one task keeps: a container that can be copied, how it takes records (and its own copy), and what
    of it is written."""

    container: Any
    take: Callable[[Any], None]
    written: Callable[[], Iterable[Any]]


class AtEnd(Sink):
    """See the module's docstring. `sink` gets what is kept."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.channel = sink.channel
        self.prints = sink.prints
        self.guarantee = sink.guarantee
        self.takes_back = sink.takes_back
        self.commit_interval_s = sink.commit_interval_s
        self.patience_s = sink.patience_s

    @abstractmethod
    def kept(self) -> Kept:
        """Makes the object in which one task keeps values."""

    def bind(self, fetch: Callable[[], list[Any]]) -> None:
        self.sink.bind(fetch)

    def check(self) -> None:
        self.sink.check()

    def committer(self, context: SinkContext) -> SinkCommitter | None:
        return self.sink.committer(context)

    def writer(self, context: SinkContext) -> SinkWriter:
        return _AtEndWriter(self.sink.writer(context), self.kept())


class _AtEndWriter(SinkWriter):
    def __init__(self, writer: SinkWriter, kept: Kept) -> None:
        self._writer = writer
        self._kept = kept

    def write(self, records: list[Any]) -> None:
        self._kept.take(records)

    def finish(self) -> None:
        records = iter(self._kept.written())
        while piece := list(islice(records, _PIECE)):
            self._writer.write(piece)
        self._writer.finish()

    def prepare(self, epoch: int) -> Any:
        return self._writer.prepare(epoch)

    def state(self) -> Any:
        return self._writer.state(), self._kept.container.copy()

    def committed(self, epoch: int) -> None:
        self._writer.committed(epoch)

    def restore(self, epoch: int, states: list[Any]) -> None:
        self._writer.restore(epoch, [inner for inner, _ in states if inner is not None])
        for _, before in states:
            self._kept.take(before)

    def close(self, failed: bool) -> None:
        self._writer.close(failed)
