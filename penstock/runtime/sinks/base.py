"""The interface of sinks: a plain description that travels, and one writer a task.

`write` gets whole batches; `flush` is called when nothing more is ready, so a writer may hold records back for larger
writes but not for longer; `finish` after the last record; `close` always, with `failed` telling whether the job ended
by an error, so that a half-written output is not taken for a whole one.

In a job with epochs a sink takes part in a two-phase commit, which makes its records appear exactly once. A *writer*
prepares, and a *committer* commits what writers have prepared (docs/decisions/18). The same calls serve a transaction
of Kafka, rows beside an epoch table in PostgreSQL, or one snapshot of a lake:

    write* -> prepare(5), state() -> write* -> committed(5) -> prepare(6), state() -> ...     a writer
                          commit([what prepare(5) returned])                                  the committer, meanwhile

    commit([what all writers had prepared]), then new writers: restore(5, states) -> write* -> ...   after a failure

`prepare(n)` makes everything written since the last epoch ready to be committed, and returns a *committable*: plain
picklable data, which is saved with the epoch. It may return a future of this data instead: then the epoch waits for it,
and the worker's loop does not. When the epoch is complete, that is when every task of the job has saved its part, the
committer gets its committables, and those of earlier epochs that were not committed yet. It works beside the loop, and
in any process: also after the process that has prepared is dead, with the committables of several writers together, and
again with committables that it had before. So committing again must change nothing.

When a job goes back to an epoch, all that was prepared up to it is committed first, in all workers, also what tasks
have prepared that no longer exist. Only then writers are made, and get what `state()` of earlier writers returned. So a
new writer may fence everything that it finds. After the last record the order is finish, prepare, commit, close.

A commit that fails by an error that may pass (a database that is locked, a connection that is lost, a disk that is
full) is tried again, with waits that double, for `Sink.patience_s` or a minute; then its error ends the job. So are
`write`, `flush` and `prepare` of a writer that says `repeats_writes`. The errors of other writers end the job at once,
because nobody knows what a write that has failed has written. A writer may still have a step of its own tried again, if
the step has the same effect then: `context.patiently("connecting", connect)`, or `context.beside("flushing", flush)`,
which returns a future, for a step that takes long.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from penstock.runtime.errors import PenstockError
from penstock.runtime.mistakes import checks_init
from penstock.runtime.patience import Kinds, Patience
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.sinks.beside import Beside, InLine
from penstock.runtime.status import JobStatus
from penstock.runtime.storage.directory_lock import DirectoryLock

Guarantee = Literal["exactly once", "idempotent", "at least once"]

T = TypeVar("T")


def _at_once(function: Callable[[], None]) -> None:
    function()


def _no_report(channel: str, records: list[Any]) -> None:
    raise RuntimeError(f"no driver to report {channel!r} to")


@dataclass
class SinkContext:
    """Says where a writer or a committer runs. `report(channel, records)` carries records to the driver's side
    (Collect, Console); a record that cannot be written goes to `errors.handle(record, error)`."""

    operator: str
    index: int  # of the task; a committer may get committables of other tasks too
    parallelism: int
    report: Callable[[str, list[Any]], None] = _no_report
    epochs: bool = False  # the job has epochs: records are final when they are committed, not when `finish` is called
    restoring: bool = False  # `restore` follows: this is not the first writer of the job
    errors: ErrorHandler = field(default_factory=lambda: ErrorHandler("sink"))
    patience: Patience = field(default_factory=lambda: Patience(0.0))  # of the worker
    job: str = ""
    #: Of the job: a start, a resume and a start from a savepoint all have another one. The part before "-" stands for
    #: the checkpoint store, of which only one run at a time has the lock: others of the same store are dead.
    run: str = ""
    generation: int = 0  # of the task: a later writer of the same run has a higher one
    steps: Beside = field(default_factory=InLine)  # takes the steps of `beside`
    #: Has a function called in the loop's thread, by any thread.
    on_loop: Callable[[Callable[[], None]], object] = _at_once

    def patiently(self, what: str, step: Callable[[], T], kinds: Kinds = (), failed: BaseException | None = None) -> T:
        """Takes a step, and takes it again while its errors may pass; see the module's docstring. `kinds`: classes of
        such errors, beside those that Penstock knows. `failed`: the first try has failed with this error."""
        return self.patience.call(f"{what} of {self.operator}[{self.index}]", step, kinds, failed)

    def beside(self, what: str, step: Callable[[], T], kinds: Kinds = ()) -> Future[T]:
        """Takes a step as `patiently` does, beside the loop of the worker. The steps of a task are taken in order."""
        return self.steps.do(lambda: self.watched(what, step, kinds))

    def watched(self, what: str, step: Callable[[], T], kinds: Kinds = ()) -> T:
        """Takes a step as `patiently` does. If it takes long, the status of the job says so."""
        return self.patience.watched(f"{what} of {self.operator}[{self.index}]", step, kinds)


class SinkWriter(ABC):
    """One task's end of a sink. In a job with epochs, all methods are called in the loop of the worker, in which they
    must not wait for long."""

    #: The classes of errors of what it writes to that may pass by themselves, beside those that Penstock knows:
    #: ConnectionError, TimeoutError, what the system says of a full, busy or unreachable place, a locked SQLite.
    passing_errors: Kinds = ()

    #: Whether `write`, `flush` and `prepare` may be called again with the same after such an error, to the same effect:
    #: they write all or nothing, or what they write twice counts once. None: when the sink is "idempotent".
    repeats_writes: bool | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "commit" in cls.__dict__:  # nobody would call it
            raise TypeError(
                f"{cls.__qualname__}.commit: a writer only prepares. Let Sink.committer return a SinkCommitter, which "
                "commits what prepare() has returned"
            )

    @abstractmethod
    def write(self, records: list[Any]) -> None:
        """Write a batch of records. Must neither keep the list nor change it."""

    def flush(self) -> None:
        """Write the records that were held back."""

    def finish(self) -> None:
        """All input has ended: complete the output. Make it visible too, unless the context says that the job has
        epochs."""

    def prepare(self, epoch: int) -> Any:
        """Make everything that was written since the last `prepare` ready to be committed, so that it survives this
        process. Returns the committable, or a future of it, or None when there is nothing to commit.

        A committable is plain picklable data from which the sink's committer can commit the records in another process,
        also when this one is dead. `committed` says when it was. Epochs may be under way beside each other, and an
        epoch may be passed over; its committables are committed with the next one that is complete."""
        self.flush()
        return None

    def state(self) -> Any:
        """Returns plain picklable data that a writer needs that continues this one's work after the epoch of the last
        `prepare`, or None. Called after each `prepare`."""
        return None

    def committed(self, epoch: int) -> None:
        """Everything that was prepared for epochs up to this one is committed."""

    def restore(self, epoch: int, states: list[Any]) -> None:
        """Called on a new writer before any other method, when the job goes back to a complete epoch. Everything that
        was prepared for epochs up to it is committed.

        `states` has what this task's earlier writer returned from `state`, or what several writers returned if the
        number of tasks has changed, without None. Remove everything that was written later: prepared or not, and, if
        the sink can take it back, even if it was committed: when an epoch turns out to be damaged, the job goes back
        before it, and its records come again. Remove also the later output of tasks that no longer exist. The job may
        have had more tasks since, about which `states` says nothing, so the writer of index 0 cleans up for all indexes
        from `parallelism` on."""

    def cancel(self, epoch: int) -> None:
        """The job is cancelled after this complete epoch, and will not be resumed: make everything visible that was
        written up to this epoch, and delete what came later. What was prepared up to it is committed. Called before
        `close`, in a job with epochs only; not when the process dies before."""

    def close(self, failed: bool) -> None:
        """Release files, connections and other resources."""


@dataclass(frozen=True)
class Committable:
    """The data that a writer has prepared for one epoch."""

    epoch: int
    index: int  # of the writer's task, which may no longer exist
    data: Any


class SinkCommitter(ABC):
    """Commits the committables of writers. Its methods may be called in another thread than those of writers, one
    at a time."""

    #: The same as in SinkWriter.
    passing_errors: Kinds = ()

    @abstractmethod
    def commit(self, committables: list[Committable]) -> None:
        """Commit all of these that are not committed yet. They are of one or several writers, in the order of their
        epochs. Other processes may be committing the same ones. Commits them all, or raises an error; then they are
        committed again, with others perhaps."""

    def close(self) -> None:
        """Release connections and other resources."""


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

    #: Whether writers can remove what is committed. A job with a sink that cannot never goes back behind an epoch that
    #: was committed: if its last epoch cannot be read, the job ends in an error.
    takes_back = True

    #: The least number of seconds between two commits: the epochs between them are committed with the later one.
    commit_interval_s = 0.0

    #: For how many seconds a commit, and what `context.beside` does, is tried again. None: for a minute.
    patience_s: float | None = None

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

    def committer(self, context: SinkContext) -> SinkCommitter | None:
        """Makes the committer of a task. None: writers prepare nothing. It is called in a worker and in the thread in
        which it commits: beside a writer, or after a failure where no writer is yet."""
        return None

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
