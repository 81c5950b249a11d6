"""Running the user's functions over whole lists, and telling which record, operator and line was at fault.

`apply` runs a C-level loop (`list.extend(map(fn, it))`) and pays nothing per record for error handling: when the
function raises, the list iterator's own length hint says which record it was at, the results so far stay, and under
the `skip` and `dead_letter` policies the same iterator goes on behind the failing record. Invariant 7 of the design.

It must never lose a record silently: a function that raises StopIteration, which `map` would take for the end of the
input, is an error like any other.
"""

from __future__ import annotations

import dis
import errno
import inspect
import os
import sys
import sysconfig
import traceback
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import length_hint
from types import CodeType, FrameType
from typing import Any, Literal

from penstock.runtime.errors import FlowError, RecordError, is_interrupt, shorten
from penstock.runtime.mistakes import called
from penstock.runtime.records.pickle_errors import culprit
from penstock.runtime.records.pickling import copied, dumps

OnError = Literal["fail", "skip", "dead_letter"]
POLICIES: tuple[OnError, ...] = ("fail", "skip", "dead_letter")
DEAD_LETTERS = "dead_letters"  # the side output that the dead_letter policy writes to

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_APPS = os.path.join(_PACKAGE, "apps") + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


# Errors of the operating system that a record may well cause by naming a file.
_OF_A_RECORD = frozenset(
    {errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP}
)

_OVER_THE_RECORD = "to go on past such records give the operator on_error='skip' or on_error='dead_letter'"
_OVER_THE_PLACE = (
    "the records are not at fault, so do not skip them: mend what the error names; a job with epochs then goes on from "
    "its last one by penstock.resume(name)"
)


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
    """What to do with a record whose processing raised; one a stage, and one for each way to another task.

    `declared_at` is where the user added the operator to the flow; `step` says in words what comes before the operator
    itself, where that has failed; `skipped` counts records that the policy let go.
    """

    operator: str
    policy: OnError = "fail"
    declared_at: str | None = None
    dead_letters: list[Any] | None = None
    step: str = ""
    skipped: int = field(default=0, init=False)

    def handle(self, record: Any, error: BaseException, records: int = 1) -> None:
        """Raise RecordError, or count (and keep) the record and return. `records`: how many `record` stands for."""
        if isinstance(error, RecordError) or not is_failure(error):
            raise error
        location = user_line(error)
        if self.policy == "fail":
            raise self.failure(record, error, location, _OVER_THE_RECORD) from error
        self.skipped += records
        if self.policy == "dead_letter" and self.dead_letters is not None:
            self.dead_letters.append(DeadLetter(self.operator, record, describe(error), location))

    def failure(
        self, record: Any, error: BaseException, location: str | None = None, remedy: str | None = None
    ) -> RecordError:
        """The error that ends the job, with the remedy, where there is one; raises `error` itself when it is no failure
        of the function."""
        if not is_failure(error):
            raise error
        where = f"\n  at {location}" if location else ""
        declared = f"\n  operator declared at {self.declared_at}" if self.declared_at else ""
        remedy = _OVER_THE_PLACE if is_of_place(error) else remedy
        return RecordError(
            f"operator {self.operator!r} failed{self.step}: {describe(error)}"
            f"\n  record: {shorten(record)}{where}{declared}" + (f"\n  {remedy}" if remedy else ""),
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
    if isinstance(fn, ListSelector):
        with attempt():  # which one failed is found by taking them one by one
            return batch, fn.many(batch)
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
    except BaseException as error:  # which one failed is found by taking them one by one
        if not is_failure(error):
            raise
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
        except BaseException as error:
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


def is_failure(error: BaseException) -> bool:
    """Whether what came out of a user's function is a failure of it, whatever its type: sys.exit() in a function must
    not end a worker's process, which the job would start again and again. It is not when somebody has pressed Ctrl-C,
    or when a generator of ours is closed: then GeneratorExit comes from a `yield` of ours, not from the function."""
    if isinstance(error, GeneratorExit):
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        return trace is not None and not _is_ours(trace.tb_frame.f_code.co_filename)
    return not is_interrupt(error)


class attempt:  # noqa: N801 - used like contextlib.suppress
    """A context that a failure of a user's function ends silently."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return error is not None and is_failure(error)


def is_of_place(error: BaseException) -> bool:
    """Whether the place is at fault where the function ran (a full disk, a server that refuses, memory), and not the
    record: the next record would most likely fail as well."""
    found: BaseException | None = error
    for _ in range(10):
        if isinstance(found, MemoryError) or (isinstance(found, OSError) and found.errno not in _OF_A_RECORD):
            return True
        if found is None:
            return False
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return False


def describe(error: BaseException) -> str:
    """An error's type and words; raises nothing but Ctrl-C, whatever the error's own __str__ does."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({'' if error.code is None else shorten(error.code)})"
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as another:  # a __str__ may call sys.exit(), too
        if is_interrupt(another):
            raise
        return f"{type(error).__name__} (whose __str__ raises)"


def _is_ours(filename: str) -> bool:
    """Whether a file is Penstock's own machinery; its applications are users of it."""
    return filename.startswith(_PACKAGE) and not filename.startswith(_APPS)


def is_users(filename: str) -> bool:
    """Whether a file is the user's own: not Penstock's, nor a library's."""
    return not (_is_ours(filename) or filename.startswith(_LIBRARIES) or filename.startswith("<frozen"))


def user_line(error: BaseException) -> str | None:
    """ "file.py:12 in parse": the deepest frame of the user's own code; None when there is none."""
    library: str | None = None
    own: str | None = None
    for frame in traceback.extract_tb(error.__traceback__):
        line = f"{frame.filename}:{frame.lineno} in {frame.name}"
        if is_users(frame.filename):
            own = line + (f": {frame.line}" if frame.line else "")
        elif not _is_ours(frame.filename):
            library = line
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


def check_function(
    function: Any, what: str, takes: tuple[str, ...] = ("record",), *, yields: bool = False, opens: bool = False
) -> None:
    """Raise FlowError unless `function` can be called with arguments as in `takes` and can travel to a worker process.

    `yields`: it may be a generator function. `opens`: it may be an object with open() or close(), which are called.
    """
    if not callable(function):
        raise FlowError(f"{what} needs a function, got {called(function)}{_slip(function)}")
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    if isinstance(function, type):
        if any("__call__" in vars(cls) for cls in function.__mro__):
            raise FlowError(
                f"{what} got the class {name} itself, whose objects are functions: give it one, {name}(...)"
            )
    else:
        _check_kind(inner, what, name, yields)
        held = [hook for hook in ("open", "close") if has_hook(function, hook)]
        if held and not opens:
            raise FlowError(
                f"{what}: {held[0]}() of a {name} would not be called here; open what it needs when it is first called"
            )
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # of functions written in C
        signature = None
    if signature is not None:
        try:
            signature.bind(*takes)
        except TypeError as error:
            has = ", ".join(str(each.replace(annotation=each.empty)) for each in signature.parameters.values())
            raise FlowError(
                f"{what} calls its function with ({', '.join(takes)}), which {name}({has}) does not take: {error}"
            ) from None
    check_picklable(function, what)


def _check_kind(function: Any, what: str, name: str, yields: bool) -> None:
    """Raise FlowError for a function whose call does not run it."""
    run = function if inspect.isroutine(function) else type(function).__call__
    if inspect.iscoroutinefunction(run) or inspect.isasyncgenfunction(run):
        raise FlowError(
            f"{what}: {name} is an async function, whose coroutine nobody would await; call asyncio.run(...) in a "
            "function, best in one of map_batches for many records at a time"
        )
    if inspect.isgeneratorfunction(run) and not yields:
        raise FlowError(
            f"{what}: {name} is a generator function (it has a yield), so its result would be a generator and not a "
            "value; return the value, or give it to flat_map for any number of outputs a record"
        )


def returns_nothing(function: Any) -> bool:
    """Whether a function written in Python returns, and never anything but None, as its code shows."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if not isinstance(code, CodeType) or code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE):
        return False
    before: dis.Instruction | None = None
    returns = 0
    for step in dis.get_instructions(code):
        if step.opname == "RETURN_CONST":
            nothing = step.argval is None
        elif step.opname == "RETURN_VALUE":  # also of what another way than the one before it may have brought
            loaded = before is not None and before.opname == "LOAD_CONST" and before.argval is None
            nothing = loaded and not step.is_jump_target
        else:
            before = step
            continue
        if not nothing:
            return False
        returns += 1
    return returns > 0


def _slip(value: Any) -> str:
    """What a value that is no function may have been meant for."""
    if value is None:
        return "; was the function called, f(), instead of given, f?"
    if hasattr(value, "same") and hasattr(value, "fields"):
        return "; expressions are for filter, select, with_columns, key_by and the values of aggregates"
    return ""


class OwnFunction:
    """A function of the user's in one task. Of an object with open() or close() the task has a copy of its own, as
    tasks of one worker must not share what is opened, nor change the flow's."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._hooks = has_hook(function, "open") or has_hook(function, "close")
        self.fn: Any = copied(function) if self._hooks else function
        self._opened = False

    def open(self) -> None:
        """Before the first record."""
        self._opened = True
        if self._hooks and has_hook(self.fn, "open"):
            self.fn.open()

    def close(self) -> None:
        """At the end, also after an error."""
        if self._hooks and self._opened and has_hook(self.fn, "close"):
            self.fn.close()


def no_value(result: Any) -> str | None:
    """Why what a function returned is no record; None: it may be one."""
    if isinstance(result, Coroutine):
        result.close()  # else Python warns of it, too
        return "the function returned a coroutine, which nobody awaits; call asyncio.run(...) in it"
    if isinstance(result, AsyncGenerator):
        return "the function returned an asynchronous generator, which nobody reads; read it in the function"
    return None


def no_list(result: Any) -> str | None:
    """Why what a function returned is no list of records; None: it may be one."""
    if result is None:
        return "the function returned None; return the list of outputs (it may be empty)"
    if isinstance(result, Coroutine | AsyncGenerator):
        return no_value(result)
    name = type(result).__name__
    if isinstance(result, str | bytes):
        return f"the function returned a {name}, whose characters would each be a record; return a list of records"
    if isinstance(result, Mapping):
        return f"the function returned a {name}, whose keys would be the records; return a list of records"
    if hasattr(result, "columns") and hasattr(result, "shape"):
        return (
            f"the function returned a {name}, whose columns would be the records; return a list of its rows, or of "
            "map_batches with batch_format='arrow' a pyarrow Table"
        )
    return None


def has_hook(function: Any, hook: str) -> bool:
    """Whether a function is an object of a class of the user's with a method of this name."""
    return not (isinstance(function, type | partial | ListSelector) or inspect.isroutine(function)) and callable(
        getattr(function, hook, None)
    )


def check_picklable(value: Any, what: str) -> None:
    """Raise FlowError unless `value` can travel to a worker process."""
    try:
        dumps(value)
    except Exception as error:  # the classes of what it refers to decide what pickling them raises
        code = getattr(value, "__code__", None)
        place = f" defined at {code.co_filename}:{code.co_firstlineno}" if code else ""
        part = culprit(value, dumps)
        raise FlowError(
            f"{what}: {shorten(value)}{place} cannot be pickled, so it cannot travel to a worker"
            + (f": {part}" if part else "")
            + f" ({type(error).__name__}: {error}). Make what cannot travel (locks, files, connections, sessions) "
            "inside the function, or in open() of a Process or of an object that is called like a function"
        ) from error


def of_no_list(error: BaseException) -> BaseException:
    """The error of a function that is to return several records: where Python only says that something is not
    iterable, what that was."""
    words = describe(error) if isinstance(error, TypeError) else ""
    if words.endswith(" object is not iterable") and user_line(error) is None:
        name = words.split("'")[1]
        return TypeError(
            no_list(None) if name == "NoneType" else f"the function returned one {name}, not a list of outputs"
        )
    return error
