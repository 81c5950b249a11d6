"""Running the user's functions over whole lists, and telling which record, operator and line was at fault.

`apply` runs a C-level loop (`list.extend(map(fn, it))`) and pays nothing per record for error handling: when the
function raises, the list iterator's own length hint says which record it was at, the results so far stay, and under
the `skip` and `dead_letter` policies the same iterator goes on behind the failing record. Invariant 7 of the design.

It must never lose a record silently: a function that raises StopIteration, which `map` would take for the end of the
input, is an error like any other.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import length_hint
from types import CodeType, FrameType
from typing import Any, Literal

import cloudpickle

from penstock.runtime.errors import FlowError, RecordError, shorten

OnError = Literal["fail", "skip", "dead_letter"]
POLICIES: tuple[OnError, ...] = ("fail", "skip", "dead_letter")
DEAD_LETTERS = "dead_letters"  # the side output that the dead_letter policy writes to

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_APPS = os.path.join(_PACKAGE, "apps") + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(frozen=True)
class DeadLetter:
    """A record that failed, in the stream of `stream.dead_letters()`."""

    operator: str
    record: Any
    error: str
    location: str | None

    def shortened(self) -> DeadLetter:
        """The same with descriptions of bounded length, for a record that cannot travel."""
        record = self.record if isinstance(self.record, str) and len(self.record) <= 200 else shorten(self.record)
        error = self.error if len(self.error) <= 500 else f"{self.error[:450]}... ({len(self.error):,} characters)"
        return DeadLetter(self.operator, record, error, self.location)


@dataclass
class ErrorHandler:
    """What to do with a record whose processing raised; one a stage.

    `declared_at` is where the user added the operator to the flow; `skipped` counts records that the policy let go.
    """

    operator: str
    policy: OnError = "fail"
    declared_at: str | None = None
    dead_letters: list[Any] | None = None
    skipped: int = field(default=0, init=False)

    def handle(self, record: Any, error: BaseException, records: int = 1) -> None:
        """Raise RecordError, or count (and keep) the record and return. `records`: how many `record` stands for."""
        if isinstance(error, RecordError):
            raise error
        location = user_line(error)
        if self.policy == "fail":
            raise self.failure(record, error, location) from error
        self.skipped += records
        if self.policy == "dead_letter" and self.dead_letters is not None:
            self.dead_letters.append(DeadLetter(self.operator, record, describe(error), location))

    def failure(self, record: Any, error: BaseException, location: str | None = None) -> RecordError:
        """The error that ends the job, with the remedy."""
        where = f"\n  at {location}" if location else ""
        declared = f"\n  operator declared at {self.declared_at}" if self.declared_at else ""
        return RecordError(
            f"operator {self.operator!r} failed: {describe(error)}"
            f"\n  record: {shorten(record)}{where}{declared}"
            f"\n  to go on past such records give the operator on_error='skip' or on_error='dead_letter'",
            operator=self.operator,
            record=shorten(record),
            location=location or self.declared_at,
        )


def apply(loop: Callable[[Iterator[Any]], Iterable[Any]], batch: list[Any], errors: ErrorHandler) -> list[Any]:
    """All that `loop(iterator over batch)` yields, e.g. loop = partial(map, fn); failing records go to `errors`."""
    out: list[Any] = []
    consume(lambda records: out.extend(loop(records)), batch, errors)
    return out


class ListSelector(ABC):
    """A selector that takes a whole list at once, which is quicker than its records one by one."""

    @abstractmethod
    def __call__(self, record: Any) -> Any:
        """What it takes from a record."""

    @abstractmethod
    def many(self, records: list[Any]) -> list[Any]:
        """What it takes from each of the records; raises when it fails for one of them."""


def each(fn: Callable[[Any], Any], records: list[Any]) -> list[Any]:
    """[fn(record) ...]; raises when it fails for one of them."""
    return fn.many(records) if isinstance(fn, ListSelector) else list(map(fn, records))


def select(fn: Callable[[Any], Any], batch: list[Any], errors: ErrorHandler) -> tuple[list[Any], list[Any]]:
    """(records, [fn(record) ...]) as parallel lists, without the records that failed."""
    out: list[Any] = []
    failed = consume(lambda records: out.extend(map(fn, records)), batch, errors)
    if failed:
        gone = set(failed)
        batch = [record for i, record in enumerate(batch) if i not in gone]
    return batch, out


def select_values(
    fn: Callable[[Any], Any], keys: list[Any], records: list[Any], errors: ErrorHandler
) -> tuple[list[Any], list[Any]]:
    """(keys, [fn(record) ...]) as parallel lists, without the records that failed."""
    try:
        values = each(fn, records)
        if len(values) == len(records):
            return keys, values
    except Exception:  # which one failed is found by taking them one by one
        pass
    kept, values = select(lambda pair: fn(pair[1]), list(zip(keys, records, strict=True)), errors)
    return [key for key, _ in kept], values


def consume(loop: Callable[[Iterator[Any]], object], batch: list[Any], errors: ErrorHandler) -> list[int]:
    """Run `loop(iterator over batch)` until the iterator is at its end; the indices of records that failed.

    After an error that the policy lets go, `loop` is called again with the same iterator, which stands behind the
    failing record: a loop must keep what it did before it raised, as list.extend and dict updates do.
    """
    records = iter(batch)
    failed: list[int] = []
    while True:
        try:
            loop(records)
        except Exception as error:
            failed.append(len(batch) - length_hint(records) - 1)
            errors.handle(batch[failed[-1]], error)
        else:
            if exhausted(records):
                return failed
            failed.append(len(batch) - length_hint(records) - 1)
            errors.handle(batch[failed[-1]], RuntimeError("the function raised StopIteration"))


def exhausted(records: Iterator[Any]) -> bool:
    """Whether a list's iterator was asked for more than there is. If not, though the loop over it has ended, the
    user's function ended it by a StopIteration, for the record that the iterator gave last."""
    # Only its pickled form tells: an iterator that has been asked has let go of its list.
    return len(records.__reduce__()) == 2


def describe(error: BaseException) -> str:
    """An error's type and words; never raises, whatever the error's own __str__ does."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__} (whose __str__ raises)"


def _is_ours(filename: str) -> bool:
    """Whether a file is Penstock's own machinery; its applications are users of it."""
    return filename.startswith(_PACKAGE) and not filename.startswith(_APPS)


def user_line(error: BaseException) -> str | None:
    """ "file.py:12 in parse": the deepest frame of the user's own code; None when there is none."""
    library: str | None = None
    own: str | None = None
    for frame in traceback.extract_tb(error.__traceback__):
        if _is_ours(frame.filename):
            continue
        line = f"{frame.filename}:{frame.lineno} in {frame.name}"
        if frame.filename.startswith(_LIBRARIES) or frame.filename.startswith("<frozen"):
            library = line
        else:
            own = line + (f": {frame.line}" if frame.line else "")
    return own or library


def caller_line() -> str | None:
    """ "file.py:12" of the nearest caller outside Penstock: where an operator is declared."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code: CodeType = frame.f_code
        if not _is_ours(code.co_filename):
            return f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def check_function(function: Any, what: str) -> None:
    """Raise FlowError unless `function` can be called and can travel to a worker process."""
    if not callable(function):
        raise FlowError(f"{what} needs a function, got {shorten(function)} of type {type(function).__name__}")
    check_picklable(function, what)


def check_picklable(value: Any, what: str) -> None:
    """Raise FlowError unless `value` can travel to a worker process."""
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        code = getattr(value, "__code__", None)
        place = f" defined at {code.co_filename}:{code.co_firstlineno}" if code else ""
        raise FlowError(
            f"{what}: {shorten(value)}{place} cannot be pickled, so it cannot travel to a worker "
            f"({type(error).__name__}: {error}). Make what it closes over (locks, files, connections, sessions) "
            "inside the function, or in open() of a Process."
        ) from error
