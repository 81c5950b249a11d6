"""Every error that Penstock raises, in one tree.

    PenstockError
    ├── FlowError            the flow as written cannot run; raised while it is built, nothing has started
    │   └── SourceError      an input named in it cannot be read: missing, empty glob, no permission
    ├── CodecError           a record cannot be encoded, or received bytes cannot be decoded
    ├── KeyTypeError         a key has no stable hash (also a TypeError)
    ├── MissingField         a record has no field that an expression reads (also a LookupError)
    ├── EvaluationError      an expression cannot be evaluated for a record
    ├── RecordError          one record made a user function or a codec fail while the job ran
    ├── JobError             about a job as a whole
    │   ├── JobFailed        it ran and ended by an error; carries the first cause
    │   │   └── ClusterGone  the Ray cluster under it is no more; the job's last complete epoch is
    │   ├── JobNotFound      no job of that name runs here
    │   │   └── NoCluster    no Ray cluster runs here that could hold it
    │   ├── JobExists        a job of that name runs already
    │   └── NotEnoughResources  Ray cannot place the workers asked for
    ├── StoreError           the checkpoint store cannot be used as asked; trying again will not help
    │   ├── StoreUnreachable it did not answer or has no room; a later try may work, and nothing is known to be lost
    │   └── SnapshotDamaged  what was read is not what was written; no later try will mend it, an older epoch may do
    └── RingError            see runtime/ring.py: the shared-memory channel

FlowError is the user's program, RecordError the user's data or function at run time, JobError the job's life,
StoreError the place where the job's snapshots live.
"""

from __future__ import annotations

import signal


class PenstockError(Exception):
    """Base of all of Penstock's errors."""


class FlowError(PenstockError):
    """The flow cannot run as written; the message names the operator and the remedy."""


class SourceError(FlowError):
    """An input cannot be read; raised before the job starts wherever that can be known."""


class CodecError(PenstockError):
    """A record cannot be turned into bytes, or bytes cannot be turned back."""


class KeyTypeError(PenstockError, TypeError):
    """A key is of a type whose hash differs between processes (the message lists the types that work), or is NaN."""


class RecordError(PenstockError):
    """A record failed in an operator and the policy was to fail.

    `operator` is its name, `record` the record's shortened repr, `location` the user's own line
    ("file.py:12 in parse") or None when no user code was on the stack.
    """

    def __init__(self, message: str, *, operator: str, record: str, location: str | None) -> None:
        super().__init__(message)
        self.operator = operator
        self.record = record
        self.location = location

    def __reduce__(self) -> tuple[object, ...]:
        return (_record_error, (str(self), self.operator, self.record, self.location))


def _record_error(message: str, operator: str, record: str, location: str | None) -> RecordError:
    return RecordError(message, operator=operator, record=record, location=location)


class JobError(PenstockError):
    """About a job as a whole."""


class JobFailed(JobError):
    """The job ended by an error. The message tells where; `operator` names the operator when one is to blame."""

    def __init__(self, message: str, operator: str | None = None) -> None:
        super().__init__(message)
        self.operator = operator

    def __reduce__(self) -> tuple[object, ...]:
        return (JobFailed, (str(self), self.operator))


class ClusterGone(JobFailed):
    """The Ray cluster that this process was connected to has gone, and what ran there; the message has its address."""

    def __reduce__(self) -> tuple[object, ...]:
        return (ClusterGone, (str(self), self.operator))


class JobNotFound(JobError):
    """No running job has this name on this cluster."""


class JobExists(JobError):
    """A job of this name is running on this cluster, or uses the same checkpoint store; give the flow another name or
    stop that job."""


class NoCluster(JobNotFound):
    """There is no Ray cluster on which a job could be found, run, or go on without this process."""


class NotEnoughResources(JobError):
    """Ray could not place the workers in time; the message says what is missing."""


class StoreError(PenstockError):
    """The checkpoint store cannot be used as asked: a bad URL, a missing library, no permission.

    Raised as itself it calls for somebody to change something; of its two kinds, the first may pass by waiting and the
    second is dealt with by an older epoch.
    """


class StoreUnreachable(StoreError):
    """The file system did not answer, or refused for now (full, over quota, throttled): a later try may work.

    It says nothing about what is stored. What was being written may be there, or come to be there later: an epoch
    number that was tried is used up. Never take this for a missing snapshot.
    """


class SnapshotDamaged(StoreError):
    """The file system answered, and what it gave is not what was written: missing, cut short, bits changed.

    The epoch that needs it cannot be used any more; others are not affected.
    """


def is_interrupt(error: BaseException) -> bool:
    """Whether somebody has pressed Ctrl-C. In a worker nobody has: SIGINT ends it without an exception."""
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def shorten(value: object, limit: int = 200) -> str:
    """repr(value), cut to `limit` characters; raises nothing but Ctrl-C, whatever the object's own repr does."""
    try:
        text = str.__str__(repr(value))  # a plain str, also of a class derived from it
    except BaseException as error:  # a repr may call sys.exit(), too
        if is_interrupt(error):
            raise
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    if len(text) <= limit:
        return text
    return f"{text[: limit - 30]}... ({len(text):,} characters)"
