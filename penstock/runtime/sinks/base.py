"""The interface of sinks: a plain description that travels, and one writer a task.

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

A commit that fails by an error that may pass (a database that is locked, a connection that is lost, a disk that is
full) is called again, with waits that double, for a minute; then its error ends the job. So are `write`, `flush` and
`prepare` of a writer that says `repeats_writes`. The errors of other writers end the job at once, because nobody knows
what a write that has failed has written. A writer may still have a step of its own tried again, if the step has the
same effect then: `context.patiently("connecting", connect)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from penstock.runtime.errors import PenstockError
from penstock.runtime.mistakes import checks_init
from penstock.runtime.patience import Kinds, Patience
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.status import JobStatus
from penstock.runtime.storage.directory_lock import DirectoryLock

Guarantee = Literal["exactly once", "idempotent", "at least once"]

T = TypeVar("T")


def _no_report(channel: str, records: list[Any]) -> None:
    raise RuntimeError(f"no driver to report {channel!r} to")


@dataclass
class SinkContext:
    """Says where a writer runs. `report(channel, records)` carries records to the driver's side (Collect, Console); a
    record that cannot be written goes to `errors.handle(record, error)`."""

    operator: str
    index: int
    parallelism: int
    report: Callable[[str, list[Any]], None] = _no_report
    epochs: bool = False  # the job has epochs: records are final when `commit` says so, not when `finish` does
    restoring: bool = False  # `restore` follows: this is not the first writer of the job
    errors: ErrorHandler = field(default_factory=lambda: ErrorHandler("sink"))
    patience: Patience = field(default_factory=lambda: Patience(0.0))  # of the worker

    def patiently(self, what: str, step: Callable[[], T], kinds: Kinds = (), failed: BaseException | None = None) -> T:
        """Takes a step, and takes it again while its errors may pass; see the module's docstring. `kinds`: classes of
        such errors, beside those that Penstock knows. `failed`: the first try has failed with this error."""
        return self.patience.call(f"{what} of {self.operator}[{self.index}]", step, kinds, failed)


class SinkWriter(ABC):
    """One task's end of a sink."""

    #: The classes of errors of what it writes to that may pass by themselves, beside those that Penstock knows:
    #: ConnectionError, TimeoutError, what the system says of a full, busy or unreachable place, a locked SQLite.
    passing_errors: Kinds = ()

    #: Whether `write`, `flush` and `prepare` may be called again with the same after such an error, to the same effect:
    #: they write all or nothing, or what they write twice counts once. None: when the sink is "idempotent".
    repeats_writes: bool | None = None

    @abstractmethod
    def write(self, records: list[Any]) -> None:
        """Write a batch of records. Must neither keep the list nor change it."""

    def flush(self) -> None:
        """Write the records that were held back."""

    def finish(self) -> None:
        """All input has ended: complete the output. Make it visible too, unless the context says that the job has
        epochs."""

    def prepare(self, epoch: int) -> Any:
        """Make everything that was written so far ready for `commit(epoch)`, so that it survives this process.

        Returns plain picklable data from which `restore` can commit the records in another process, or None when there
        is nothing to commit. The data describes everything that is not known to be committed, also of earlier epochs.
        """
        self.flush()
        return None

    def commit(self, epoch: int) -> None:
        """All epochs up to this one are complete: make what was prepared for them final. May be called several times
        for one epoch."""

    def restore(self, epoch: int, prepared: list[Any]) -> None:
        """Called on a new writer before any other method, when the job goes back to a complete epoch.

        `prepared` has what this task's earlier writer returned from `prepare`, or what several writers returned if the
        number of tasks has changed. Commit whatever in it is not committed yet. Remove everything that was written
        later, even if it was committed: when an epoch turns out to be damaged, the job goes back before it, and its
        records come again. Remove also the later output of tasks that no longer exist. The job may have had more tasks
        since, about which `prepared` says nothing, so the writer of index 0 cleans up for all indexes from
        `parallelism` on."""

    def cancel(self, epoch: int) -> None:
        """The job is cancelled after this complete epoch, and will not be resumed: make everything visible that was
        prepared up to this epoch, and delete what came later. Called before `close`, in a job with epochs only; not
        when the process dies before."""

    def close(self, failed: bool) -> None:
        """Release files, connections and other resources."""


class RunningJob(Protocol):
    """The running job as a sink sees it that acts in the driver."""

    name: str

    def status(self) -> JobStatus:
        """Returns the status of the job."""

    def trouble(self, error: PenstockError) -> None:
        """Reports that the sink's work in the driver has failed while the job continues. The job's wait() raises this
        error once."""


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

    #: The directory or URL that it fills, which no other sink of the flow may have.
    fills: str | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__module__.startswith("penstock."):  # a user's own __init__ is none of ours
            checks_init(cls)

    def bind(self, fetch: Callable[[], list[Any]]) -> None:
        """Connects the sink to its job, in the driver, when the job has started. `fetch()` returns all records reported
        so far."""

    def started(self, job: RunningJob) -> None:
        """Is called in the driver when the job has started."""

    def ended(self, timeout: float | None) -> bool:
        """Is called in the driver when the job has ended. Waits until the sink's work in the driver is done too, and
        returns False when that takes longer than `timeout` seconds."""
        return True

    @abstractmethod
    def writer(self, context: SinkContext) -> SinkWriter:
        """Makes the writer of one task. It is called in the worker."""

    def check(self) -> None:
        """Raise FlowError when it can be known before the job starts that writing cannot work."""

    def lock(self) -> DirectoryLock | None:
        """Takes a lock on the directory that the sink fills, until the job ends, so that no other job fills it. It is
        called on the node of the JobMaster before the job touches anything. Raises DirectoryLocked
        while another job has the lock; returns None when there is nothing to lock."""
        return None

    def left_by_cancel(self) -> str:
        """Is called on the node of the JobMaster when a job with epochs was cancelled and its workers have ended.
        Returns what people have to know of records that are still hidden, because a worker died before its writers'
        `cancel`; empty when all is well."""
        return ""

    def describe(self) -> str:
        """Returns the text that `flow.explain()` shows."""
        return type(self).__name__
