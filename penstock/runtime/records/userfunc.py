"""Runs the user's functions over whole lists, and finds which record, operator and line has caused an error.

`apply` runs a loop in C (`list.extend(map(fn, it))`) and pays nothing for each record to handle errors. When the
function raises an error, the length hint of the list's iterator tells which record it was at. The results so far stay,
and under the policies `skip` and `dead_letter` the same iterator continues after the failed record.

A record must never be lost silently. A function that raises StopIteration, which `map` takes for the end of the input,
is an error like any other.
"""

from __future__ import annotations

import dis
import errno
import inspect
import os
import re
import sys
import sysconfig
import traceback
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import length_hint
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, Literal

from penstock.runtime.errors import FlowError, RecordError, describe, is_interrupt, shorten
from penstock.runtime.mistakes import called, nearest
from penstock.runtime.records.pickle_errors import culprit, of_main_script
from penstock.runtime.records.pickling import copied, dumps

OnError = Literal["fail", "skip", "dead_letter"]
POLICIES: tuple[OnError, ...] = ("fail", "skip", "dead_letter")
DEAD_LETTERS = "dead_letters"  # the side output of the dead_letter policy

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_APPS = os.path.join(_PACKAGE, "apps") + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


# Errors of the operating system that a record may cause by naming a file.
_OF_A_RECORD = frozenset(
    {errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP}
)

_OVER_THE_RECORD = "to continue after such records, give the operator on_error='skip' or on_error='dead_letter'"
_OVER_THE_PLACE = (
    "the records are not at fault, so do not skip them: mend what the error names; a job that has completed an "
    "epoch can then be resumed (penstock.resume(name)), and any other job can be run anew"
)


@dataclass(frozen=True)
class DeadLetter:
    """A failed record, in the stream of `stream.dead_letters()`."""

    operator: str
    record: Any
    error: str
    location: str | None

    def shortened(self) -> DeadLetter:
        """Returns the same with descriptions of limited length, for a record that cannot be sent."""
        record = self.record if isinstance(self.record, str) and len(self.record) <= 200 else shorten(self.record)
        error = self.error if len(self.error) <= 500 else f"{self.error[:450]}... ({len(self.error):,} characters)"
        return DeadLetter(self.operator, record, error, self.location)


@dataclass
class ErrorHandler:
    """Decides the fate of a record that has failed. Each stage has one handler, and so has each way to another task.

    `declared_at` is the place where the user has added the operator to the flow. `step` describes what comes before the
    operator, if the failure is there. `skipped` counts the records that the policy has skipped. `remedy` is what an
    error advises in place of the usual advice.
    """

    operator: str
    policy: OnError = "fail"
    declared_at: str | None = None
    dead_letters: list[Any] | None = None
    step: str = ""
    remedy: str | None = None
    skipped: int = field(default=0, init=False)

    def handle(self, record: Any, error: BaseException, records: int = 1) -> None:
        """Raises RecordError, or counts the record (and keeps it) and returns. `records` is the number of records that
        `record` stands for."""
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
        """Returns the error that ends the job, with the remedy if there is one. `location` is the user's line where the
        caller knows it already; otherwise it is taken from the error. Raises `error` itself when it is not a failure of
        the function."""
        if not is_failure(error):
            raise error
        location = location or user_line(error)
        where = f"\n  at {location}" if location else ""
        declared = f"\n  operator declared at {self.declared_at}" if self.declared_at else ""
        known = of_main_script(error)
        remedy = known or self.remedy or (_OVER_THE_PLACE if is_of_place(error) else remedy)
        return RecordError(
            f"operator {self.operator!r} failed{self.step}: {describe(error)}"
            f"\n  record: {shorten(record)}{where}{declared}" + (f"\n  {remedy}" if remedy else ""),
            operator=self.operator,
            record=shorten(record),
            location=location or self.declared_at,
        )

    @contextmanager
    def blamed(self, what: Any) -> Iterator[None]:
        """Turns an error that concerns no single record (of open() or close(), a full disk) into a failure of this
        operator, under any policy. `what` stands for the record."""
        try:
            yield
        except RecordError:
            raise
        except BaseException as error:
            raise self.failure(what, error) from error


def apply(loop: Callable[[Iterator[Any]], Iterable[Any]], batch: list[Any], errors: ErrorHandler) -> list[Any]:
    """Returns everything that `loop(iterator over batch)` yields, for example with loop = partial(map, fn). Failed
    records go to `errors`."""
    out: list[Any] = []
    consume(lambda records: out.extend(loop(records)), batch, errors)
    return out


class ListSelector(ABC):
    """A selector that takes a whole list at once, which is faster than record by record."""

    @abstractmethod
    def __call__(self, record: Any) -> Any:
        """Returns the selected part of a record."""

    @abstractmethod
    def many(self, records: list[Any]) -> list[Any]:
        """Returns the selected part of each record. Raises an error when it fails for one of them."""


def each(fn: Callable[[Any], Any], records: list[Any]) -> list[Any]:
    """Returns [fn(record) ...]. Raises an error when it fails for one of the records."""
    return fn.many(records) if isinstance(fn, ListSelector) else list(map(fn, records))


def select(fn: Callable[[Any], Any], batch: list[Any], errors: ErrorHandler) -> tuple[list[Any], list[Any]]:
    """Returns the records, and [fn(record) ...], as parallel lists without the records that failed."""
    if isinstance(fn, ListSelector):
        with attempt():  # the records are taken one by one to find the one that failed
            return batch, fn.many(batch)
    out: list[Any] = []
    failed = consume(lambda records: out.extend(map(fn, records)), batch, errors)
    if failed:
        gone = set(failed)
        batch = [record for i, record in enumerate(batch) if i not in gone]
    return batch, out


def select_each(
    fn: Callable[[Any], Any],
    keys: list[Any],
    records: list[Any],
    errors: ErrorHandler,
    right: Callable[[list[Any]], bool] = lambda _: True,
    mend: Callable[[Any], Any] = lambda value: value,
) -> tuple[list[Any], set[int]]:
    """Returns [fn(record) ...] without the records that failed, and the indices of these records. When the values are
    not `right`, each of them is replaced by `mend(value)`, and a record for which this fails has failed."""
    values: list[Any] = []
    with attempt():  # the records are taken one by one to find the one that failed
        values = each(fn, records)
    if len(values) == len(records) and right(values):
        return values, set()
    values = []
    pairs = list(zip(keys, records, strict=True))
    failed = consume(lambda some: values.extend(mend(fn(record)) for _, record in some), pairs, errors)
    return values, set(failed)


def select_values(
    fn: Callable[[Any], Any], keys: list[Any], records: list[Any], errors: ErrorHandler
) -> tuple[list[Any], list[Any]]:
    """Returns the keys, and [fn(record) ...], as parallel lists without the records that failed."""
    values, failed = select_each(fn, keys, records, errors)
    return without(failed, keys), values


def without(failed: Collection[int], some: list[Any]) -> list[Any]:
    """Returns the list without the items at these indices."""
    return [one for i, one in enumerate(some) if i not in failed] if failed else some


def consume(loop: Callable[[Iterator[Any]], object], batch: list[Any], errors: ErrorHandler) -> list[int]:
    """Runs `loop(iterator over batch)` until the iterator is at its end. Returns the indices of the records that
    failed.

    When the policy allows the job to continue after an error, `loop` is called again with the same iterator, which
    stands after the failed record. So a loop must keep what it did before the error, as list.extend and dict updates
    do.
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
    """Whether a list's iterator was asked for more than it has. If it was not, although the loop over it has ended, the
    user's function has ended the loop by StopIteration, for the record that the iterator gave last."""
    # Only the pickled form of the iterator tells this: an exhausted iterator no longer refers to its list.
    return len(records.__reduce__()) == 2


def is_failure(error: BaseException) -> bool:
    """Whether an error from a user's function is a failure of the function, of any type. sys.exit() in a function is
    one: it must not end the worker's process, which the job would start again and again. Ctrl-C is not a failure, nor
    is GeneratorExit, which comes from closing a generator of ours and not from the function."""
    if isinstance(error, GeneratorExit):
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        return trace is not None and not _is_ours(trace.tb_frame.f_code.co_filename)
    return not is_interrupt(error)


class attempt:  # noqa: N801 - used like contextlib.suppress
    """A context that ignores a failure of a user's function, and ends."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return error is not None and is_failure(error)


def is_of_place(error: BaseException) -> bool:
    """Whether the cause of an error is the machine (a full disk, a server that refuses, no memory) and not the record.
    The next record would most likely fail too."""
    found: BaseException | None = error
    for _ in range(10):
        if isinstance(found, MemoryError) or (isinstance(found, OSError) and found.errno not in _OF_A_RECORD):
            return True
        if found is None:
            return False
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return False


def _is_ours(filename: str) -> bool:
    """Whether a file belongs to Penstock's own machinery. Its applications count as users."""
    return filename.startswith(_PACKAGE) and not filename.startswith(_APPS)


def is_users(filename: str) -> bool:
    """Whether a file is the user's own, and belongs neither to Penstock nor to a library."""
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
    function: Any,
    what: str,
    takes: tuple[str, ...] = ("record",),
    *,
    yields: bool = False,
    opens: bool = False,
    awaits: bool = False,
) -> None:
    """Raises FlowError unless `function` can be called with the arguments in `takes`, and can be sent to a worker
    process.

    `yields`: the function may be a generator function. `opens`: it may be an object with open() or close(), which are
    called. `awaits`: it may be a coroutine function (`is_coroutine_function`), whose result is awaited.
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
        _check_kind(inner, what, name, yields, awaits)
        held = [hook for hook in ("open", "close") if has_hook(function, hook)]
        if held and not opens:
            raise FlowError(
                f"{what}: {held[0]}() of a {name} would not be called here; open what it needs when it is first called"
            )
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # functions written in C raise this
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


def is_coroutine_function(function: Any) -> bool:
    """Whether a function, or the one inside partials, or that of an object's class, is written with `async def`."""
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, Constructed):
        return function.awaits
    return inspect.iscoroutinefunction(function if inspect.isroutine(function) else type(function).__call__)


def _check_kind(function: Any, what: str, name: str, yields: bool, awaits: bool) -> None:
    """Raises FlowError for a function that is not run by calling it, or, with `awaits`, by awaiting its result."""
    run = function if inspect.isroutine(function) else type(function).__call__
    if awaits and inspect.isasyncgenfunction(run):
        raise FlowError(
            f"{what}: {name} is an async generator function (it has a yield), so its result would be a generator and "
            "not a value; return the value"
        )
    if (inspect.iscoroutinefunction(run) and not awaits) or inspect.isasyncgenfunction(run):
        raise FlowError(
            f"{what}: {name} is an async function, whose coroutine nobody would await; map_async(...) awaits many at a "
            "time, or call asyncio.run(...) in a function"
        )
    if inspect.isgeneratorfunction(run) and not yields:
        raise FlowError(
            f"{what}: {name} is a generator function (it has a yield), so its result would be a generator and not a "
            "value; return the value, or give it to flat_map for any number of outputs a record"
        )


def returns_nothing(function: Any) -> bool:
    """Whether the code of a function written in Python shows that it never returns anything but None."""
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
        elif step.opname == "RETURN_VALUE":  # this may also return a value from another branch
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
    """Guesses the intended value where a value is not a function."""
    if value is None:
        return "; was the function called, f(), instead of given, f?"
    if hasattr(value, "same") and hasattr(value, "fields"):
        return "; expressions are for filter, select, with_columns, key_by and the values of aggregates"
    if isinstance(value, str) and re.search(r"\w\s*[<>=!+*/%]", value):
        return "; a condition or a calculation is an expression of columns, as in penstock.col('price') > 3"
    return ""


class Constructed:
    """A class whose object is the function. Each task makes its own object, once, so that it loads a model once
    (the convention of Ray Data: `__init__`, `__call__`, `fn_constructor_args`, `fn_constructor_kwargs`)."""

    def __init__(self, cls: type, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
        self._cls = cls
        self._args = tuple(args)
        self._kwargs = dict(kwargs)
        self._made: Any = None
        self.__qualname__ = cls.__qualname__

    @property
    def awaits(self) -> bool:
        """Whether the calls of the object are coroutines."""
        return inspect.iscoroutinefunction(self._cls.__call__)

    def open(self) -> Any:
        """Makes the object. Returns what its open() has returned."""
        self._made = self._cls(*self._args, **self._kwargs)
        return self._made.open() if has_hook(self._made, "open") else None

    def __call__(self, record: Any) -> Any:
        return self._made(record)

    def close(self) -> Any:
        """Closes the object, if it has a close(). Returns what that has returned."""
        return self._made.close() if self._made is not None and has_hook(self._made, "close") else None


def constructed(
    fn: Any, args: Iterable[Any] | None, kwargs: Mapping[str, Any] | None, what: str, takes: str = "record"
) -> Any:
    """Returns a function, or for a class the function that makes its object in each task. Raises FlowError when the
    class cannot be called with these arguments, or its object with one argument. For the name of an argument that the
    class does not take, the error says which ones it takes."""
    if not isinstance(fn, type) or not any("__call__" in vars(cls) for cls in fn.__mro__):
        if args or kwargs:
            raise FlowError(
                f"{what}: fn_constructor_args and fn_constructor_kwargs are for a class, whose object is the function; "
                f"got {called(fn)}"
            )
        return fn
    made = Constructed(fn, args or (), kwargs or {})
    with suppress(ValueError):  # classes written in C may not say what they take
        _check_names(fn, made._kwargs, what)
        for callable_, given, named in (
            (fn, made._args, made._kwargs),
            (fn.__call__, (None, takes), {}),
        ):
            try:
                inspect.signature(callable_).bind(*given, **named)
            except TypeError as error:
                part = "__init__" if callable_ is fn else "__call__"
                raise FlowError(f"{what}: {fn.__qualname__}.{part}: {error}") from None
    return made


def may_keep(fn: Any) -> bool:
    """Whether a function is an object of a user's class, or a method of one, which may keep something from one call to
    the next."""
    if isinstance(fn, partial):
        return may_keep(fn.func)
    if isinstance(fn, MethodType):
        return not isinstance(fn.__self__, type)
    return isinstance(fn, Constructed) or isinstance(inspect.getattr_static(type(fn), "__call__", None), FunctionType)


def _check_names(cls: type, kwargs: Mapping[str, Any], what: str) -> None:
    parameters = inspect.signature(cls).parameters.values()
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    unknown = next((str(name) for name in kwargs if name not in names), None)
    if unknown is not None and not any(each.kind is each.VAR_KEYWORD for each in parameters):
        raise FlowError(
            f"{what}: fn_constructor_kwargs: {cls.__qualname__} has no parameter {unknown!r}"
            f"{nearest(unknown, names) or ';'} it takes: {', '.join(names) or 'nothing'}"
        )


class OwnFunction:
    """A user's function in one task. When it is an object with open() or close(), the task has a copy of it, because
    the tasks of a worker must not share what is opened, nor change the flow's own object."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._hooks = has_hook(function, "open") or has_hook(function, "close")
        self.fn: Any = copied(function) if self._hooks else function
        self._opened = False

    def open(self) -> Any:
        """Opens the function before the first record. Returns what its open() has returned."""
        self._opened = True
        return self.fn.open() if self._hooks and has_hook(self.fn, "open") else None

    def close(self) -> Any:
        """Closes the function at the end, also after an error. Returns what its close() has returned."""
        return self.fn.close() if self._hooks and self._opened and has_hook(self.fn, "close") else None


def no_value(result: Any) -> str | None:
    """Explains why the result of a function is not a record. None: it may be one."""
    if isinstance(result, Coroutine):
        result.close()  # otherwise Python warns about it too
        return (
            "the function returned a coroutine, which nobody awaits; map_async awaits functions that are written with "
            "`async def`, or call asyncio.run(...) in the function"
        )
    if isinstance(result, AsyncGenerator):
        return "the function returned an asynchronous generator, which nobody reads; read it in the function"
    return None


def no_list(result: Any) -> str | None:
    """Explains why the result of a function is not a list of records. None: it may be one."""
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
    """Whether a function is an object of a user's class with a method of this name."""
    return not (isinstance(function, type | partial | ListSelector) or inspect.isroutine(function)) and callable(
        getattr(function, hook, None)
    )


def check_picklable(value: Any, what: str) -> None:
    """Raises FlowError unless `value` can be sent to a worker process."""
    try:
        dumps(value)
    except Exception as error:  # the classes of what it refers to decide what pickling them raises
        code = getattr(value, "__code__", None)
        place = f" defined at {code.co_filename}:{code.co_firstlineno}" if code else ""
        part = culprit(value, dumps)
        raise FlowError(
            f"{what}: {shorten(value)}{place} cannot be pickled, so it cannot travel to a worker"
            + (f": {part}" if part else "")
            + f" ({describe(error)}). Make what cannot travel (locks, files, connections, sessions, "
            "context variables) inside the function, in open() of a ProcessFunction or of an object that is called "
            "like a function, or in another module, where the function finds it as module.name"
        ) from error


def of_no_list(error: BaseException) -> BaseException:
    """Returns the error of a function that should return several records. Where Python says only that something is not
    iterable, the error says what was returned."""
    words = describe(error) if isinstance(error, TypeError) else ""
    if words.endswith(" object is not iterable") and user_line(error) is None:
        name = words.split("'")[1]
        return TypeError(
            no_list(None) if name == "NoneType" else f"the function returned one {name}, not a list of outputs"
        )
    return error
