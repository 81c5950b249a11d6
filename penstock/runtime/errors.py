"""The errors of Penstock. This docstring names every exception class of the package, also those defined elsewhere.

The first line of each class's own docstring says more. A test compares this tree with the code.

    PenstockError
    ├── FlowError                 the flow as written cannot run; raised while it is built, nothing has started
    │   ├── SourceError           an input named in it cannot be read: missing, empty glob, no permission
    │   ├── UnfinishedFiles       a folder has unfinished files of another job, which may be needed to resume that job
    │   ├── OptionError           an option of `run` or `resume` cannot be used as it was given
    │   ├── WrongValue            a number, duration or choice that was given cannot be used (also a ValueError)
    │   └── NoSuchMethod          a stream has no method of this name (also an AttributeError)
    ├── CodecError                a record cannot be encoded, or received bytes cannot be decoded
    │   ├── BadMessage            what came from another worker is no message
    │   ├── LayoutChanged         a class has other fields than when objects of it were saved
    │   ├── CorruptGzip           a gzip file is damaged or ends early
    │   └── KeysNowEqual          keys of a map that differed when they were saved have become equal
    ├── KeyTypeError              a key has no stable hash (also a TypeError)
    ├── MissingField              a record has no field that an expression reads (also a LookupError)
    ├── EvaluationError           an expression cannot be evaluated for a record
    ├── RecordError               one record made a user function or a codec fail while the job ran
    ├── Poison                    one record has killed its worker's process several times; told to the error policy
    ├── JobError                  about a job as a whole
    │   ├── JobFailed             it ran and ended by an error; carries the first cause
    │   │   └── ClusterGone       the Ray cluster under it is no more; the job's last complete epoch is
    │   ├── JobNotFound           no job of that name runs here
    │   │   └── NoCluster         no Ray cluster runs here that could hold it
    │   ├── JobExists             a job of that name runs already
    │   └── NotEnoughResources    Ray cannot place the workers asked for
    │       └── NotPlaced         some of their nodes have died or have no room; a plan without these nodes may work
    │           └── PlacingCancelled    the job was cancelled while its workers waited for room
    ├── Infeasible                no placement of the tasks satisfies what was asked
    ├── SparkUnavailable          there is no working Spark session; names the cause and the remedy
    ├── NotAnswered               Spark has not answered a micro-batch: the tasks run it
    ├── RangeFailed               a record or a user's function has failed in Spark: the tasks run this micro-batch
    ├── NotTheSame                Spark might answer otherwise than the tasks: the tasks run this micro-batch
    ├── StoreError                the checkpoint store cannot be used as asked; trying again will not help
    │   ├── NotSaved              a manifest could not be written, and is certainly not there
    │   ├── StoreUnreachable      it did not answer or has no room; a later try may work, nothing is known to be lost
    │   └── SnapshotDamaged       what was read is not what was written; no later try mends it, an older epoch may do
    ├── DirectoryLocked           another process has locked a directory that only one may use at a time
    ├── Lost                      a transaction that was prepared outside was aborted there, so its records are lost
    ├── Refused                   a worker could not do what the JobMaster asked for
    ├── Gone                      a worker will not answer: its process has gone, or the job has ended
    ├── HostGone                  the process that hosts a job has died
    ├── ProgramNotLoaded          a process of a job cannot load the job's program; names the error and the user's line
    ├── CannotStart               a worker's process could not be started; says whether another try may help
    ├── ProcessDied               a worker's process has ended before its run did
    ├── PeerGone                  nobody is at another worker's address any more
    ├── NoPort                    no port of the range that was given for the job's processes is free
    ├── NoTransport               a machine does not have the transport that was asked for
    ├── BadCertificate            a certificate cannot be used for TLS, or a job cannot make one
    ├── BadFrame                  a peer has sent a frame that cannot be part of its stream
    ├── NoRdma                    this machine has no device for RDMA that can be used; says what is missing
    ├── NotReached                no agent could be started on a node
    ├── LoopEnded                 a run loop was asked for something after its end
    ├── RelayEnded                a relay was asked for something after its end
    ├── MessagesLost              a worker died while it wrote to this one; recovery sends the messages again
    ├── OutOfStep                 a message of a channel is missing or has come twice, and no loss is known
    └── RingError                 a ring, the shared-memory channel, cannot be made or opened as asked
        ├── RingFull              a write found no room in time; the consumer lives
        ├── ConsumerDied          a write found no room, and nobody is left to make any
        ├── MessageTooLarge       the message would not fit even into the empty ring
        ├── RingBusy              the place of the consumer or of all producers is taken by living processes
        ├── RingClosed            this handle of the ring was closed here
        ├── RingGone              there is no ring at the address any more
        ├── RingForked            this handle came through a fork: attach anew in the child
        └── RingNoSpace           the shared memory is too small for a new ring

FlowError is the user's program, RecordError the user's data or function at run time, JobError the job's life,
StoreError the place where the job's snapshots live.

These exceptions are no PenstockErrors. All but Disturbed and InvalidTransition are turned into one near
the place that raises them:

    Exception
    ├── BadPlace                  a path or URL cannot be used as it is; says what to change
    ├── DidNotStart               an attempt to start Spark has failed
    ├── _NotInSpark               a type has no exact counterpart in Spark
    ├── NotAsWritten              what has the name of a store's file is certainly not that file (FileNotFoundError)
    ├── NotAsAgreed               what a peer has sent cannot be meant for this process; it is disconnected (OSError)
    ├── NotProved                 a peer has not proved that it knows the job's key; its connection is closed (OSError)
    ├── NotAwaited                a function without `async def` has returned a coroutine (TypeError)
    ├── Disturbed                 a trial of a range in Spark was given up, and is made again later
    └── InvalidTransition         an event that a state excludes: a fault of Penstock's own (RuntimeError)

    BaseException
    └── HeadGone                  the head of a Ray cluster ended while this process joined it; becomes NoCluster
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from string import Formatter


class PenstockError(Exception):
    """Base of all of Penstock's errors."""


class FlowError(PenstockError):
    """The flow cannot run as written; the message names the operator and the remedy."""


class SourceError(FlowError):
    """An input cannot be read; raised before the job starts wherever that can be known."""


class ProgramNotLoaded(PenstockError):
    """A process of a job cannot load the job's program, because a module of the user's cannot be imported there."""


class UnfinishedFiles(FlowError):
    """A folder has unfinished files of another job; which of them are needed depends on its checkpoint store."""


class OptionError(FlowError):
    """An option of `run` or `resume` cannot be used as it was given, or not together with another one.

    The message spells the options as in Python, and `spelled` as in another language, such as the options of the
    `penstock` command. In `template`, {name} is an option's name, {name=} the option with its value in `given`, and all
    other names are those of `words`.
    """

    def __init__(self, template: str, given: Mapping[str, object] | None = None, **words: object) -> None:
        self._parts = template, dict(given or {}), words
        super().__init__(self.spelled(_in_python))

    def spelled(self, spell: Callable[..., str]) -> str:
        """Returns the message with the words of `spell(option)` for an option's name, and the words of `spell(option,
        value)` for an option with its value."""
        template, given, words = self._parts
        found: dict[str, object] = dict(words)
        for _, name, _, _ in Formatter().parse(template):
            if name is not None and name not in words:
                option = name.removesuffix("=")
                found[name] = spell(option) if name == option else spell(option, given[option])
        return template.format_map(found)

    def __reduce__(self) -> tuple[object, ...]:
        template, given, words = self._parts
        return (partial(OptionError, template, given, **words), ())


class WrongValue(FlowError, ValueError):
    """A number, duration or choice cannot be used; the message names it and says which values can be given."""


def _in_python(option: str, *value: object) -> str:
    return f"{option}={shorten(value[0])}" if value else option


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
        made = partial(RecordError, operator=self.operator, record=self.record, location=self.location)
        return (made, (str(self),))


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
    """The Ray cluster that this process was connected to has gone, with all that ran there; the message has its
    address."""

    def __reduce__(self) -> tuple[object, ...]:
        return (ClusterGone, (str(self), self.operator))


class JobNotFound(JobError):
    """No running job has this name on this cluster."""


class JobExists(JobError):
    """A job of this name is running on this cluster, or uses the same checkpoint store; give the flow another name or
    stop that job."""


class NoCluster(JobNotFound):
    """There is no Ray cluster on which a job could be found or run, or continue after this process has ended."""


class NotEnoughResources(JobError):
    """Ray could not place the workers in time; the message names the missing resources."""


class StoreError(PenstockError):
    """The checkpoint store cannot be used as asked: a bad URL, a missing library, no permission.

    Raised as itself it calls for somebody to change something; of its two kinds, the first may pass by waiting and the
    second one is repaired by using an older epoch.

    `may_pass`: it is the file system that fails or refuses: a disk that is full or read-only for a while may come back,
    and rights that were taken away may be given again. To a job that has long been running it matters.
    """

    def __init__(self, message: str = "", *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass

    def __reduce__(self) -> tuple[object, ...]:
        return (_store_error, (type(self), str(self), self.may_pass))


def _store_error(kind: type[StoreError], message: str, may_pass: bool) -> StoreError:
    error = kind(message)
    error.may_pass = may_pass
    return error


class StoreUnreachable(StoreError):
    """The file system did not answer, or refused for now (full, over quota, throttled): a later try may work.

    It says nothing about what is stored. What was being written may be there, or come to be there later: an epoch
    number that was tried is used up. Never take this for a missing snapshot.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(message, may_pass=True)


class SnapshotDamaged(StoreError):
    """The file system answered with other bytes than were written: missing, too short, or with changed bits.

    The epoch that needs it cannot be used any more; others are not affected.
    """


def is_interrupt(error: BaseException) -> bool:
    """Whether somebody has pressed Ctrl-C. In a worker nobody has: SIGINT ends it without an exception."""
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler


# How much of a repr is made at most, to tell how long it is.
_WRITTEN_MOST = 20_000
_BRACKETS: dict[type, tuple[str, str]] = {list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}"), set: ("{", "}")}


def _written(value: object, most: int, inside: tuple[int, ...] = ()) -> Iterator[str]:
    """Yields the pieces of repr(value). Of a text only so much is taken that its repr has more than `most` characters.
    `inside`: the containers, by their ids, that this value is in. Python's own repr writes all of a container before
    anyone can cut it."""
    kind = type(value)
    if kind in (str, bytes, bytearray) and len(value) > most:  # type: ignore[arg-type]
        yield repr(value[: most + 1])  # type: ignore[index]
    elif kind in _BRACKETS and value:
        opening, closing = _BRACKETS[kind]
        if id(value) in inside:
            yield f"{opening}...{closing}"
            return
        inside = (*inside, id(value))
        yield opening
        between = ""
        for item in value:  # type: ignore[attr-defined]
            yield between
            between = ", "
            yield from _written(item, most, inside)
            if kind is dict:
                yield ": "
                yield from _written(value[item], most, inside)  # type: ignore[index]
        yield f",{closing}" if kind is tuple and len(value) == 1 else closing  # type: ignore[arg-type]
    else:
        yield str.__str__(repr(value))  # a plain str, also of a class derived from it


def shorten(value: object, limit: int = 200) -> str:
    """repr(value), shortened to `limit` characters; raises nothing but Ctrl-C, even if the object's own repr fails.
    Texts, bytes and containers of any size cost no more than a long text does."""
    most = max(limit, _WRITTEN_MOST)
    text = ""
    try:
        for piece in _written(value, most):
            text += piece
            if len(text) > most:
                return f"{text[: limit - 36]}... (more than {most:,} characters)"
    except BaseException as error:  # a repr may call sys.exit(), too
        if is_interrupt(error):
            raise
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    if len(text) <= limit:
        return text
    return f"{text[: limit - 30]}... ({len(text):,} characters)"


# Of an error's own message, so many characters are told. Dead letters keep it, and so does the job's end.
_MESSAGE_MAX = 5_000


def describe(error: BaseException) -> str:
    """Returns an error's type and message, which is cut if it is very long. Raises nothing but Ctrl-C, whatever the
    error's own __str__ does."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({'' if error.code is None else shorten(error.code)})"
    try:
        text = f"{type(error).__name__}: {error}"
        return text if len(text) <= _MESSAGE_MAX else f"{text[:_MESSAGE_MAX]}... ({len(text):,} characters)"
    except BaseException as another:  # a __str__ may call sys.exit() too
        if is_interrupt(another):
            raise
        return f"{type(error).__name__} (its text cannot be shown: its __str__ raises {type(another).__name__})"


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or of its cause's text, without tracebacks."""
    cause = getattr(error, "cause", None) or error
    text = str(cause).strip()
    return text.splitlines()[0] if text else type(cause).__name__
