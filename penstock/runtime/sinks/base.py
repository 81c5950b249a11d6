"""What a sink is: a plain description that travels, and one writer a task.

`write` gets whole batches; `flush` is called when nothing more is ready, so a writer may hold records back for larger
writes but not for longer; `finish` after the last record; `close` always, with `failed` telling whether the job ended
by an error, so that a half-written output is not taken for a whole one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.runtime.userfunc import ErrorHandler


def _no_report(channel: str, records: list[Any]) -> None:
    raise RuntimeError(f"no driver to report {channel!r} to")


@dataclass
class SinkContext:
    """Where a writer runs. `report(channel, records)` carries records to the driver's side (Collect, Console);
    a record that cannot be written goes to `errors.handle(record, error)`."""

    operator: str
    index: int
    parallelism: int
    report: Callable[[str, list[Any]], None] = _no_report
    errors: ErrorHandler = field(default_factory=lambda: ErrorHandler("sink"))


class SinkWriter(ABC):
    """One task's end of a sink."""

    @abstractmethod
    def write(self, records: list[Any]) -> None:
        """Take a batch; must not keep the list."""

    def flush(self) -> None:
        """Let what was held back leave."""

    def finish(self) -> None:
        """All input has ended: make the output whole and visible."""

    def close(self, failed: bool) -> None:
        """Release what is held."""


class Sink(ABC):
    """A description of an output.

    A sink whose records end at the driver sets `channel`, the name under which its writers report, and is given a way
    to fetch them by `bind`; one whose reported lines the driver prints sets `prints`.
    """

    channel: str | None = None
    prints = False

    def bind(self, fetch: Callable[[], list[Any]]) -> None:
        """On the driver, when the job has started: `fetch()` gives all records reported so far."""

    @abstractmethod
    def writer(self, context: SinkContext) -> SinkWriter:
        """The writer of one task; called in the worker."""

    def check(self) -> None:
        """Raise FlowError when it can be known before the job starts that writing cannot work."""

    def describe(self) -> str:
        """What `flow.explain()` shows."""
        return type(self).__name__
