"""One task of a sink in a job with epochs, as a test drives it: its writer, and what the runtime does for it."""

from __future__ import annotations

from typing import Any

from penstock.runtime.sinks.base import Sink, SinkContext
from penstock.runtime.sinks.two_phases import SavedSink, TwoPhases, commit_saved


class OneTask:
    """Writes, prepares, commits and goes back. All else that it is asked for is the writer's."""

    def __init__(self, sink: Sink, context: SinkContext) -> None:
        self.__dict__.update(sink=sink, context=context, phases=TwoPhases(sink, context))

    @property
    def writer(self) -> Any:
        return self.phases.writer

    def prepare(self, epoch: int) -> SavedSink:
        saved = self.phases.prepare(epoch, lambda step: step())
        assert isinstance(saved, SavedSink)
        return saved

    def commit(self, epoch: int) -> None:
        assert self.phases.complete(epoch).done()

    def restore(self, epoch: int, saved: list[SavedSink]) -> None:
        """Goes back as a job of one task does."""
        commit_saved(self.sink, self.context, saved)
        self.phases.restore(epoch, saved)

    def cancel(self, epoch: int) -> None:
        self.phases.cancel(epoch)

    def close(self, failed: bool) -> None:
        self.phases.close(failed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.writer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.writer, name, value)
