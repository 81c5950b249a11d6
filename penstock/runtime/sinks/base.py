"""What a sink is: a plain description that travels, and one writer a task.

`write` gets whole batches; `flush` is called when nothing more is ready, so a writer may hold records back for larger
writes but not for longer; `finish` after the last record; `close` always, with `failed` telling whether the job ended
by an error, so that a half-written output is not taken for a whole one.

In a job with epochs a writer takes part in a two-phase commit, which is what makes its records appear exactly once
(the same calls serve a transaction of Kafka, or rows beside an
epoch table in PostgreSQL):

    write* -> prepare(5) -> write* -> commit(5) -> prepare(6) -> ...        the job runs
    a new writer: restore(5, [what prepare(5) returned]) -> write* -> ...   after a failure, back at epoch 5

`prepare(n)` makes everything written so far ready to be committed and returns what another process would need to commit
it: that is saved with the epoch. `commit(n)` follows when the epoch is complete, that is when every task of the job has
saved its part; only then may the records be seen as final. An epoch may be passed over (its saving failed): then
commit(n + 1) is for both. After the last record the order is finish, prepare, commit, close.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from penstock.runtime.errors import PenstockError
from penstock.runtime.userfunc import ErrorHandler

Guarantee = Literal["exactly once", "idempotent", "at least once"]


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
    epochs: bool = False  # the job has epochs: records are final when `commit` says so, not when `finish` does
    restoring: bool = False  # `restore` follows: this is not the first writer of the job
    errors: ErrorHandler = field(default_factory=lambda: ErrorHandler("sink"))


class SinkWriter(ABC):
    """One task's end of a sink."""

    @abstractmethod
    def write(self, records: list[Any]) -> None:
        """Take a batch; must neither keep the list nor change it."""

    def flush(self) -> None:
        """Let what was held back leave."""

    def finish(self) -> None:
        """All input has ended: make the output whole, and visible unless the context says that the job has epochs."""

    def prepare(self, epoch: int) -> Any:
        """Make all that was written so far ready for `commit(epoch)`, so that it survives this process.

        Returns plain picklable data from which `restore` in another process can commit it; None: nothing to commit.
        It describes everything that is not known to be committed, also of earlier epochs.
        """
        self.flush()
        return None

    def commit(self, epoch: int) -> None:
        """Epochs up to this one are complete: make what was prepared for them final. Called at least once, maybe
        more often."""

    def restore(self, epoch: int, prepared: list[Any]) -> None:
        """Called on a new writer before anything else when the job goes back to a complete epoch: commit what
        `prepared` (returned by this task's earlier writer, or by several where the number of tasks has changed)
        holds and is not committed yet, and remove what was written after it, committed or not: an epoch that turns out
        to be damaged is passed over, and its records come again. Also what other tasks have written that there are no
        more: the job may have had more of them since, of which `prepared` says nothing. So the writer of index 0 looks
        after all indexes from `parallelism` on."""

    def close(self, failed: bool) -> None:
        """Release what is held."""


class RunningJob(Protocol):
    """What a sink that has something to do on the driver sees of its job there."""

    name: str

    def status(self) -> dict[str, Any]:
        """What the job does now; see actors/status.py."""

    def trouble(self, error: PenstockError) -> None:
        """What the sink does on the driver has failed, and the job goes on: the job's wait() raises this once."""


class Sink(ABC):
    """A description of an output.

    A sink whose records end at the driver sets `channel`, the name under which its writers report, and is given a way
    to fetch them by `bind`; one whose reported lines the driver prints sets `prints`.
    """

    channel: str | None = None
    prints = False

    #: What a failure can do to the records of this sink in a job with epochs. "exactly once": nothing is lost or
    #: doubled; "idempotent": records may be written again, to the same effect; "at least once": records of the last
    #: seconds may be written twice.
    guarantee: Guarantee = "at least once"

    def bind(self, fetch: Callable[[], list[Any]]) -> None:
        """On the driver, when the job has started: `fetch()` gives all records reported so far."""

    def started(self, job: RunningJob) -> None:
        """On the driver, when the job has started."""

    def ended(self, timeout: float | None) -> bool:
        """On the driver, when the job has ended: wait until what the sink does there is done, too; False when it is not
        within `timeout` seconds."""
        return True

    @abstractmethod
    def writer(self, context: SinkContext) -> SinkWriter:
        """The writer of one task; called in the worker."""

    def check(self) -> None:
        """Raise FlowError when it can be known before the job starts that writing cannot work."""

    def describe(self) -> str:
        """What `flow.explain()` shows."""
        return type(self).__name__
