"""The operator `map_async`: a call of the user's function for each record, many of them under way at a time.

The function mostly waits for others: a database, a service. A coroutine function runs on one asyncio loop in one thread
for each task; any other function in threads of the task, and if it returns a coroutine, or anything else that can be
awaited, that is awaited on such a loop. `Caller` is what both have in common. The task's own thread never waits for a
call: it begins calls for the records that it gets, is woken once for many answers, and takes them.

What happens at a barrier: the snapshot contains the records whose results have not left the stage, and the calls are
made again after a restore. A call may thus be made twice, but its result leaves once. The records are saved as they
were before their calls, which may change them at any time. Results are not saved, because they need not be picklable.

More calls than `concurrency` must never be under way, nor may any be lost: each record ends as one result or one
failure, whatever its calls do. No call may stop or close the loop, which is that of all calls. A watermark must never
overtake a record that came before it.

A call whose time is over has failed at once. Its coroutine is cancelled, but may go on for a while, and is *late* until
it has really ended. It keeps its place among the `concurrency` calls, and the job continues with the other places. When
late calls have all places, no call begins, and a warning says so. A thread cannot be ended from outside, so its call
gives its place up at once: a function that never returns would otherwise stop the job, where a thread is all it costs.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from heapq import heappop, heappush
from inspect import isawaitable
from queue import SimpleQueue
from types import FrameType, TracebackType
from typing import Any

from penstock.runtime.errors import CodecError, FlowError, describe, shorten
from penstock.runtime.event_time.watermark import IDLE, Watermark
from penstock.runtime.forks import end_forks
from penstock.runtime.operators.answer_queue import Answer, AnswerQueue
from penstock.runtime.operators.base import EXPAND_RECORDS_MAX, Operator, Pending, Stage, StageContext
from penstock.runtime.operators.call_loop import END_S, CallLoop
from penstock.runtime.records.batch import Batch
from penstock.runtime.records.codec import decode, encode
from penstock.runtime.records.userfunc import (
    OwnFunction,
    check_function,
    is_coroutine_function,
    is_failure,
    is_users,
    returns_nothing,
)
from penstock.runtime.state.keyed import SavedState, StageState
from penstock.runtime.units import flag, seconds, whole

#: The errors after which `map_async` makes a call again; None: all.
RetryOn = type[BaseException] | tuple[type[BaseException], ...] | None

_WAIT_MOST_S = 60.0  # the longest wait before a retry, unless the user gives a longer one

logger = logging.getLogger(__name__)

_TOO_LATE = "the call has not ended within timeout_s="

# When the loop has stood still for this part of a call's time, the error of the call says so.
_STILL_TOLD = 0.25

# When late calls have had all places for so long, a warning says so. A coroutine that ends when it is cancelled is late
# for less, unless it takes its time to clean up.
_FULL_NS = 1_000_000_000

_END_WHEN_CANCELLED = "Let the function end when it is cancelled: it must not catch asyncio.CancelledError and go on"
_AWAIT = "Await what takes long, or call it in a thread: await asyncio.to_thread(function, ...)"
_RETURN_BY_ITSELF = "Give what the function waits for a timeout of its own, below timeout_s, so that it returns"

_REMEDY = (
    "to let calls take longer, raise timeout_s (None: no limit); to try again, raise retries; to continue after such "
    "records, give the operator on_error='skip' or on_error='dead_letter'"
)


class Attempt:
    """One call of the function for a record. `over`: it has an answer, or nobody waits for one. `late`: it was given
    up, and has not ended."""

    __slots__ = ("awaited", "call", "error", "late", "over", "place", "record", "value")

    def __init__(self, call: _Call, record: Any) -> None:
        self.call = call
        self.record = record
        self.over = False
        self.late = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.place: Any = None  # the thread or the asyncio task that it runs in
        self.awaited = False  # whether its function has returned in its thread, and what it returned is awaited


class Caller(ABC):
    """Makes the calls of one task. The task's thread calls all methods but `settle`, which is for the threads that make
    calls."""

    def __init__(self, function: OwnFunction, name: str, wake: Callable[[], None]) -> None:
        self.running = 0  # the number of attempts that have begun, and whose answers were not taken
        self.late = 0  # the number of calls that were given up and have not ended; each keeps its place
        self.task = 0  # the index of the task
        self.timeout_s: float | None = None  # of each call
        self._function = function
        self._name = name
        self._wake = wake
        self._answers: list[Attempt] = []
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)  # notified when a late call has ended
        self._told = False  # whether the task's thread was woken for answers that it has not taken yet
        self._closed = False
        self._loop: CallLoop | None = None
        # Of the calls that are coroutines, and of what calls have returned; only the loop's thread uses it.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._process = os.getpid()

    def open(self) -> None:
        """Opens the function."""
        if isinstance(opened := self._function.open(), Coroutine):
            opened.close()
            raise TypeError(
                "open() is an async function, and the function itself is none; make both plain or both async"
            )

    @abstractmethod
    def begin(self, attempts: list[Attempt]) -> None:
        """Begins calls."""

    @abstractmethod
    def call(self, record: Any, timeout_s: float | None) -> Any:
        """Makes a call, in this thread if possible, and returns its result. Raises what the function raises, and
        TimeoutError."""

    def _awaited(
        self,
        outcome: Coroutine[Any, Any, tuple[Any, BaseException | None]],
        left_s: float | None,
        timeout_s: float | None,
    ) -> Any:
        """Awaits a call for at most `left_s` seconds of its `timeout_s`, in this thread if possible. Returns its value,
        or raises its error or TimeoutError."""
        assert self._loop is not None
        try:
            value, error = self._loop.until_done(self._one(outcome, left_s, timeout_s))
        finally:
            if self.late:  # it ends only while the loop runs, and perhaps no call follows before it has ended
                self._loop.run_in_thread()
        if error is not None:
            raise error
        return value

    async def _one(
        self,
        outcome: Coroutine[Any, Any, tuple[Any, BaseException | None]],
        left_s: float | None,
        timeout_s: float | None,
    ) -> tuple[Any, BaseException | None]:
        task = asyncio.ensure_future(outcome)
        ended, _ = await asyncio.wait({task}, timeout=left_s)
        if ended:
            return task.result()
        task.cancel()
        ended, _ = await asyncio.wait({task}, timeout=END_S)
        if not ended:
            with self._lock:
                self.late += 1
            task.add_done_callback(self._record_ended)
        return None, _timed_out(timeout_s, None)

    def _busy(self) -> bool:
        return self.running + self.late > 0

    def stood_still(self) -> float:
        """Returns for how many seconds the loop has stood still while the calls that are too late were under way."""
        return 0.0 if self._loop is None or self.timeout_s is None else self._loop.stood_still(self.timeout_s)

    def _record_ended(self, _: object) -> None:
        """Notes the end of a late call that `_one` has made."""
        with self._lock:
            self._end_late()

    def where(self, attempt: Attempt) -> FrameType | None:
        """Returns the innermost frame of the user's code in which a call is now, as far as is known."""
        return None

    def abandon(self, attempt: Attempt) -> bool:
        """Gives a call up, which is late until it has ended. Returns False when it has an answer all the same."""
        with self._lock:
            if attempt.over:
                return False
            attempt.over = attempt.late = True
            self.late += 1
        self.running -= 1
        self._give_up(attempt)
        return True

    def _give_up(self, attempt: Attempt) -> None:
        """Ends a call that nobody waits for, if that is possible. Its end must be said to `settle`."""

    def settle(self, attempt: Attempt, value: Any, error: BaseException | None) -> bool:
        """Takes an answer, or the end of a late call. Returns False when nobody waits for it any more."""
        end_forks(self._process)
        with self._lock:
            if attempt.late:
                attempt.late = False
                self._end_late()
            if attempt.over or self._closed:
                return False
            attempt.over = True
            attempt.value, attempt.error = value, error
            self._answers.append(attempt)
            if not self._told:
                self._told = True
                self._tell()
            return True

    def _end_late(self) -> None:
        """Gives the place of a late call back. It must be called with the lock."""
        self.late -= 1
        self._freed.notify_all()
        if not self._closed:
            self._tell()  # `_told` is only for answers: what has come now is room, and nobody takes it

    def wait_for_place(self, concurrency: int, timeout_s: float | None) -> None:
        """Waits in the task's thread until fewer calls than `concurrency` are late. Raises TimeoutError."""
        with self._lock:
            if not self._freed.wait_for(lambda: self.late < concurrency, timeout_s):
                raise _timed_out(timeout_s, None)

    def _tell(self) -> None:
        """Wakes the task's thread."""
        self._wake()

    def _coroutines_end(self, which: str, so: str) -> bool:
        """Cancels the coroutines of all calls, and says which do not end. Returns False when one of them does not let
        the loop go on."""
        assert self._loop is not None
        left = self._loop.cancel(self._tasks)
        if left is not None:
            self._warn_of_calls_left(left, _END_WHEN_CANCELLED)
            return True
        logger.warning(
            "operator %r, task %d: %s holds up its asyncio loop without awaiting anything, %s is left to itself. %s",
            self._name,
            self.task,
            which,
            so,
            _AWAIT,
        )
        return False

    def _warn_of_calls_left(self, calls: int, remedy: str) -> None:
        """Says how many calls are still under way when the task has ended."""
        if calls:
            has, themselves = ("is", "itself") if calls == 1 else ("are", "themselves")
            logger.warning(
                "operator %r, task %d: %s had not ended when the task did, and %s left to %s. %s",
                self._name,
                self.task,
                _calls(calls),
                has,
                themselves,
                remedy,
            )

    @property
    def answered(self) -> int:
        """The number of answers that were not taken."""
        return len(self._answers)

    def answer_in(self) -> float | None:
        """Returns in how many seconds there is an answer for which nobody wakes the task's thread."""
        return None

    def take(self) -> list[Attempt]:
        """Takes the answers."""
        with self._lock:  # so that the thread was woken whenever there are answers
            taken, self._answers = self._answers, []
            self._told = False
        self.running -= len(taken)
        return taken

    def close(self) -> None:
        """Ends all calls, and closes the function."""
        with self._lock:
            self._closed = True
        self._end_calls()
        if isinstance(closed := self._function.close(), Coroutine):
            closed.close()
            raise TypeError(
                "close() is an async function, and the function itself is none; make both plain or both async"
            )

    @abstractmethod
    def _end_calls(self) -> None:
        """Ends all calls and threads, as far as that is possible in a moment."""


class LoopCaller(Caller):
    """Runs a coroutine function on an asyncio loop, in one thread."""

    def __init__(self, function: OwnFunction, name: str, wake: Callable[[], None]) -> None:
        super().__init__(function, name, wake)
        self._begun: deque[list[Attempt]] = deque()
        self._starting = False  # whether the loop was told of what is in `_begun`

    def open(self) -> None:
        self._loop = CallLoop(self._name)
        # In the loop: what the user opens may belong to the loop that runs then.
        self._loop.until_done(_called(self._function.open))

    def begin(self, attempts: list[Attempt]) -> None:
        assert self._loop is not None
        self.running += len(attempts)
        self._begun.append(attempts)
        if not self._starting:
            self._starting = True
            self._loop.call_soon(self._start)

    def _start(self) -> None:
        assert self._loop is not None
        self._starting = False  # before the attempts are taken: for what comes now it is called again
        self._loop.watch(self.timeout_s, self._busy)
        while self._begun:
            for attempt in self._begun.popleft():
                if not attempt.over:
                    attempt.place = self._loop.loop.create_task(self._run(attempt))
                    attempt.place.add_done_callback(partial(self._ended, attempt))
                    self._tasks.add(attempt.place)

    async def _run(self, attempt: Attempt) -> None:
        value, error = await _outcome(self._function.fn, attempt.record)
        self._tasks.discard(attempt.place)
        self.settle(attempt, value, error)

    def _ended(self, attempt: Attempt, task: asyncio.Task[None]) -> None:
        # `_run` does not run at all when its task is cancelled before its first step, by us or by another coroutine.
        self._tasks.discard(task)
        if attempt.late or not attempt.over:
            self.settle(attempt, None, asyncio.CancelledError("the call was cancelled before it began"))

    def _tell(self) -> None:
        # At the end of this round of the loop, so that one wake-up is enough for all calls that end in it.
        assert self._loop is not None
        self._loop.loop.call_soon(self._wake)

    def call(self, record: Any, timeout_s: float | None) -> Any:
        return self._awaited(_outcome(self._function.fn, record), timeout_s, timeout_s)

    def where(self, attempt: Attempt) -> FrameType | None:
        return None if attempt.place is None else _awaiting_frame(attempt.place)

    def _give_up(self, attempt: Attempt) -> None:
        assert self._loop is not None
        self._loop.call_soon(self._cancel_late, attempt)

    def _cancel_late(self, attempt: Attempt) -> None:
        if attempt.place is None:  # it was given up before `_start` came to it
            self.settle(attempt, None, None)
            return
        attempt.place.cancel()

    def close(self) -> None:
        if self._loop is None:
            return
        with self._lock:
            self._closed = True
        try:
            if self._coroutines_end("its function", "so close() of the function is not called, and the thread"):
                self._loop.until_done(_called(self._function.close))
        finally:
            self._end_calls()

    def _end_calls(self) -> None:
        assert self._loop is not None
        self._loop.end()


async def _called(function: Callable[[], Any]) -> None:
    """Calls a function, and awaits what it returns if that is possible."""
    result = function()
    if isawaitable(result):
        await result


async def _outcome(function: Callable[[Any], Any], record: Any) -> tuple[Any, BaseException | None]:
    """Makes a call, and awaits what it returns as long as that is possible. Returns its value, or its error, whatever
    that is: asyncio would let some errors end the loop."""
    try:
        value = function(record)
        while isawaitable(value):
            value = await value
    except BaseException as error:  # it is the record's failure, whatever it is; or nobody waits for it
        return None, error
    return value, None


class ThreadCaller(Caller):
    """Runs a function in threads. There are as many as calls have been under way at a time. What the function returns
    is awaited on an asyncio loop, if that is possible: a lambda or a decorated function need not say that it makes
    coroutines. The thread of the call waits for it meanwhile."""

    def __init__(self, function: OwnFunction, name: str, wake: Callable[[], None]) -> None:
        super().__init__(function, name, wake)
        self._todo: SimpleQueue[Attempt | None] = SimpleQueue()
        self._threads: set[threading.Thread] = set()  # without those that were abandoned
        self._given_up: set[threading.Thread] = set()  # those that were abandoned, and whose calls have not ended
        self._abandoned = 0
        self._awaits: set[Future[Any]] = set()  # of what calls have returned, and what is awaited

    def begin(self, attempts: list[Attempt]) -> None:
        self.running += len(attempts)
        for attempt in attempts:
            self._todo.put(attempt)
        while len(self._threads) < self.running + self.late:  # late calls are those of coroutines, and keep theirs
            thread = threading.Thread(target=self._work, name=f"{self._name} calls", daemon=True)
            self._threads.add(thread)
            thread.start()

    def _work(self) -> None:
        while (attempt := self._todo.get()) is not None:
            with self._lock:
                if attempt.over:
                    continue
                attempt.place = threading.current_thread()
            value, error = None, None
            try:
                value = self._function.fn(attempt.record)
            except BaseException as raised:  # it is the record's failure, whatever it is; or nobody waits for it
                error = raised
            if isawaitable(value):
                value, error = self._value_of(attempt, value)
            if not self.settle(attempt, value, error) and not attempt.awaited:
                self._given_up.discard(threading.current_thread())
                return  # another thread has taken this one's place
            del attempt, value, error  # what has an answer must not stay in memory until the next call

    def _value_of(self, attempt: Attempt, awaitable: Any) -> tuple[Any, BaseException | None]:
        """Awaits what a call has returned. From now on the call is one of a coroutine, which can be cancelled."""
        with self._lock:
            if attempt.over or self._closed:
                _drop(awaitable)
                return None, None
            if self._loop is None:
                self._loop = CallLoop(self._name)
            loop = self._loop
            attempt.awaited = True
        try:
            outcome = loop.submit(self._await(attempt, awaitable))
            self._awaits.add(outcome)
            try:
                return outcome.result()  # type: ignore[no-any-return]
            finally:
                self._awaits.discard(outcome)
        except BaseException as error:  # nobody waits for it any more, or the coroutine was cancelled before it began
            return None, error

    async def _await(self, attempt: Attempt, awaitable: Any) -> tuple[Any, BaseException | None]:
        task = attempt.place = asyncio.current_task()
        assert task is not None
        assert self._loop is not None
        self._loop.watch(self.timeout_s, self._busy)
        if attempt.over:  # it was given up before it began
            _drop(awaitable)
            return None, None
        self._tasks.add(task)
        try:
            return await _outcome(lambda awaited: awaited, awaitable)
        finally:
            self._tasks.discard(task)

    def call(self, record: Any, timeout_s: float | None) -> Any:
        begun = time.monotonic()
        value = self._called(record, timeout_s)
        if not isawaitable(value):
            return value
        if self._loop is None:
            self._loop = CallLoop(self._name)
        left_s = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - begun))
        return self._awaited(_outcome(lambda awaited: awaited, value), left_s, timeout_s)

    def _called(self, record: Any, timeout_s: float | None) -> Any:
        if timeout_s is None:
            return self._function.fn(record)
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                answer.set_result(self._function.fn(record))
            except BaseException as error:  # it belongs to the thread that waits
                answer.set_exception(error)

        thread = threading.Thread(target=run, name=f"{self._name} calls", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if not answer.done():
            raise _timed_out(timeout_s, _users_frame(thread))
        return answer.result()

    def where(self, attempt: Attempt) -> FrameType | None:
        place = attempt.place
        if isinstance(place, asyncio.Task):
            return _awaiting_frame(place)
        return None if place is None else _users_frame(place)

    def _give_up(self, attempt: Attempt) -> None:
        if attempt.awaited:
            assert self._loop is not None
            self._loop.call_soon(self._cancel_late, attempt)
            return
        self.settle(attempt, None, None)  # its place is free at once
        if attempt.place is None:  # a thread that gets it now will see that it is over
            return
        self._threads.discard(attempt.place)
        self._given_up.add(attempt.place)
        self._abandoned += 1
        if self._abandoned & (self._abandoned - 1) == 0:
            logger.warning(
                "operator %r, task %d: %s not ended in time so far, and %d of them %s still under way. A thread "
                "cannot be ended from outside, so each keeps its thread until its function returns, and others take "
                "their places. %s",
                self._name,
                self.task,
                f"{_calls(self._abandoned)} {'has' if self._abandoned == 1 else 'have'}",
                len(self._given_up),
                "is" if len(self._given_up) == 1 else "are",
                _RETURN_BY_ITSELF,
            )

    def _cancel_late(self, attempt: Attempt) -> None:
        if isinstance(attempt.place, asyncio.Task):  # otherwise it has not begun, and will see that it is over
            attempt.place.cancel()

    def _end_calls(self) -> None:
        if self._loop is not None:
            self._coroutines_end("a coroutine that its function has returned", "and the loop's thread")
            self._loop.end()
            for outcome in list(self._awaits):  # the threads of these calls need not wait any longer
                outcome.cancel()
        for _ in self._threads:
            self._todo.put(None)
        until = time.monotonic() + END_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        running = sum(thread.is_alive() for thread in self._threads | self._given_up)
        self._warn_of_calls_left(running, _RETURN_BY_ITSELF)


def _calls(number: int) -> str:
    return "1 call" if number == 1 else f"{number:,} calls"


def _drop(awaitable: Any) -> None:
    """Closes a coroutine that nobody will await, so that Python does not warn about it."""
    if isinstance(awaitable, Coroutine):
        awaitable.close()


def _awaiting_frame(task: asyncio.Task[Any]) -> FrameType | None:
    """Returns the innermost frame of the user's code in which a task awaits something."""
    found: FrameType | None = None
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None and is_users(frame.f_code.co_filename):
            found = frame
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return found


def _users_frame(thread: threading.Thread) -> FrameType | None:
    """Returns the innermost frame of the user's code in a thread."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _timed_out(timeout_s: float | None, frame: FrameType | None, still_s: float = 0.0) -> TimeoutError:
    """Returns the error of a call that has not ended in time, as if the user's code had raised it where it was.
    `still_s`: for how long no call went on, because the loop stood still."""
    error = TimeoutError(f"{_TOO_LATE}{timeout_s:g}")
    if timeout_s is not None and still_s > timeout_s * _STILL_TOLD:
        error = TimeoutError(
            f"{error}. Meanwhile the asyncio loop of all calls of the task stood still for {still_s:.3g} s, as when a "
            f"coroutine calls something that blocks, such as time.sleep(). {_AWAIT}"
        )
    if frame is None or frame.f_lineno is None:
        return error
    return error.with_traceback(TracebackType(None, frame, frame.f_lasti, frame.f_lineno))


def _classes(retry_on: Any, what: str) -> tuple[type[BaseException], ...]:
    """Returns the classes of the errors after which a call is made again."""
    if retry_on is None:
        return (BaseException,)
    classes = retry_on if isinstance(retry_on, tuple) else (retry_on,)
    if not classes or not all(isinstance(each, type) and issubclass(each, BaseException) for each in classes):
        raise FlowError(
            f"{what}: retry_on={shorten(retry_on)}; give a class of errors or a tuple of them, such as "
            "(ConnectionError, TimeoutError), or None for all errors"
        )
    return classes


class MapAsync(Operator):
    """One output for each record: what `fn` returns, in calls of which many are under way at a time."""

    kind = "map_async"
    one_to_one = True
    begins_chain = True
    own_can_move = True
    why_not_in_spark = "its calls are under way in the worker"

    def __init__(
        self,
        fn: Callable[[Any], Any],
        concurrency: int = 100,
        timeout_s: float | timedelta | None = None,
        ordered: bool = True,
        retries: int = 0,
        retry_wait_s: float | timedelta = 0.0,
        retry_on: RetryOn = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        what = f"map_async {self.name!r}"
        check_function(fn, what, opens=True, awaits=True)
        if returns_nothing(fn) and getattr(fn, "__name__", "") != "<lambda>":
            raise FlowError(
                f"{what}: its function never returns anything but None, so there would be a None for each record; "
                "return what is to be sent downstream, as in: return record"
            )
        self.fn = fn
        self.concurrency = whole(concurrency, f"{what}: concurrency")
        self.ordered = flag(ordered, f"{what}: ordered")
        self.retries = whole(retries, f"{what}: retries", least=0)
        self.timeout_s = None if timeout_s is None else seconds(timeout_s, f"{what}: timeout_s")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise FlowError(f"{what}: timeout_s={timeout_s}; it must be a number of seconds above 0, or None")
        self.retry_wait_s = seconds(retry_wait_s, f"{what}: retry_wait_s")
        if self.retry_wait_s == math.inf:
            raise FlowError(f"{what}: retry_wait_s={retry_wait_s}; it must be a finite number of seconds")
        self.retry_on = _classes(retry_on, what)
        if retry_on is not None and not self.retries:
            raise FlowError(
                f"{what}: retry_on says which failed calls are made again, and retries=0; give retries=1 or more"
            )
        #: Makes what makes the calls of a task. Tests give another one, to decide when calls end.
        self.caller: Callable[[OwnFunction, str, Callable[[], None]], Caller] = (
            LoopCaller if is_coroutine_function(fn) else ThreadCaller
        )

    def stage(self, context: StageContext) -> Stage:
        return _Calls(context, self)


class _Call(Answer):
    """A record whose result has not left the stage."""

    __slots__ = ("answered", "error", "place", "record", "saved", "stamp", "tries", "value")

    def __init__(self, record: Any, saved: tuple[int, bytes] | None, stamp: int) -> None:
        self.record = record
        self.saved = saved  # the record as it was before the first call
        self.stamp = stamp
        self.tries = 0
        self.place = 0  # in the queue
        self.answered = False
        self.value: Any = None
        self.error: BaseException | None = None

    def done(self) -> bool:
        return self.answered


class _Calls(Pending):
    def __init__(self, context: StageContext, operator: MapAsync) -> None:
        super().__init__(context)
        self._own = OwnFunction(operator.fn)
        self._make_caller = operator.caller
        self._caller: Caller | None = None
        self._concurrency = operator.concurrency
        self._ordered = operator.ordered
        self._retries = operator.retries
        self._timeout_s = operator.timeout_s
        self._timeout_ns = None if operator.timeout_s is None else int(operator.timeout_s * 1e9)
        self._retry_wait_s = operator.retry_wait_s
        self._retry_on = operator.retry_on
        self._saves = context.epochs or operator.retries > 0
        self._clock: Callable[[], int] = time.monotonic_ns
        self._wake: Callable[[], None] = lambda: None
        self._queue = AnswerQueue[_Call, Watermark]()
        self._finished: deque[_Call] = deque()  # answered, and not collected, if no order is wanted
        self._deadlines: OrderedDict[Attempt, int] = OrderedDict()  # of attempts under way, in the order of time
        # A heap of the calls that are tried again: when, a number that no other call has, and the call.
        self._again: list[tuple[int, int, _Call]] = []
        self._put_back = 0  # how many calls have been tried again
        self._returned: deque[tuple[int, bytes]] = deque()  # records from an epoch, that the task has not given yet
        self._mark_in: int | None = None  # the last watermark that has come
        # The last watermark that has come before the task has given all records from an epoch, which were before it.
        self._mark_behind: int | None = None
        self._mark_out: int | None = None  # the last one whose earlier records have all been collected
        self._seen = False  # whether a result was looked at
        self._full_since: int | None = None  # the time since when late calls have all places, as far as was seen
        self._warned = False  # whether a warning has said so

    # --- what the task asks --------------------------------------------------------------------------------------

    def attach(self, clock: Callable[[], int], wake: Callable[[], None]) -> None:
        self._clock, self._wake = clock, wake

    @property
    def room(self) -> int:
        if self._caller is None:
            return 0
        places = self._free - len(self._again)
        return max(0, min(places, (1 if self.alone else self._concurrency) - self._queue.waiting))

    @property
    def under_way(self) -> int:
        return self._queue.waiting + len(self._returned)

    @property
    def returned(self) -> int:
        return len(self._returned)

    def take_returned(self, most: int) -> Batch:
        taken = [self._returned.popleft() for _ in range(min(most, len(self._returned)))]
        # They are counted again when the task gives them. Not before: the next epoch may save them first.
        self.records_in -= len(taken)
        try:
            return [record for saved in taken for record in decode(*saved)]
        except CodecError as error:
            raise self.errors.failure("(a record from an epoch)", error) from error

    def ready(self) -> bool:
        if self._caller is None:
            return False
        if self._caller.answered or self._finished or self._queue.ready():
            return True
        due = self._due()
        return due is not None and due <= self._clock()

    def settled(self) -> bool:
        if self._caller is None:
            return True
        self._take_answers()  # otherwise nobody is woken for the next ones
        # Late calls that have all places will most likely end soon, and then there is room.
        full = not self._warned and self._caller.late >= self._concurrency
        return not self._again and not self._caller.running and not full

    def ready_in(self) -> float | None:
        assert self._caller is not None
        answer, due = self._caller.answer_in(), self._due()
        if due is None:
            return answer
        wait = max(0, due - self._clock()) / 1e9
        return wait if answer is None else min(wait, answer)

    def _due(self) -> int | None:
        """Returns the time of the next timeout, retry or warning."""
        due = next(iter(self._deadlines.values())) if self._deadlines else None
        # A retry without a place has to wait until a late call has ended, which wakes the task's thread.
        if self._again and self._free > 0 and (due is None or self._again[0][0] < due):
            due = self._again[0][0]
        if self._full_since is not None and (due is None or self._full_since + _FULL_NS < due):
            due = self._full_since + _FULL_NS
        return due

    @property
    def _free(self) -> int:
        """How many calls may begin."""
        assert self._caller is not None
        return self._concurrency - self._caller.running - self._caller.late

    # --- opening and closing -------------------------------------------------------------------------------------

    def open(self) -> None:
        self._caller = self._make_caller(self._own, self.context.operator.name, self._wake)
        self._caller.task, self._caller.timeout_s = self.context.index, self._timeout_s
        self._caller.open()

    def close(self, failed: bool) -> None:
        if self._caller is not None:
            self._caller.close()

    # --- calls ---------------------------------------------------------------------------------------------------

    def expand(self, batch: Batch) -> Iterator[Batch]:
        assert isinstance(batch, list)
        assert self._caller is not None
        attempts: list[Attempt] = []
        now = 0 if self._timeout_ns is None else self._clock()
        for record in batch:
            saved: tuple[int, bytes] | None = None
            if self._saves:
                try:
                    saved = encode([record])
                except CodecError as error:
                    self.errors.handle(record, error)
                    continue
            call = _Call(record, saved, self.stamp)
            if self.alone:
                yield from self._alone(call)
            else:
                call.place = self._queue.put(call)
                attempts.append(self._try(call, now))
        if attempts:
            self._caller.begin(attempts)
        if self._mark_behind is not None and not self._returned:
            self._queue.mark(Watermark(self._mark_behind))
            self._mark_behind = None

    def _try(self, call: _Call, now: int) -> Attempt:
        attempt = Attempt(call, self._record_of(call))
        if self._timeout_ns is not None:
            self._deadlines[attempt] = now + self._timeout_ns
        return attempt

    def _record_of(self, call: _Call) -> Any:
        """Returns the record for the next try, as it was before the first one."""
        call.tries += 1
        if call.tries > 1 and call.saved is not None:
            return decode(*call.saved)[0]
        return call.record

    def _alone(self, call: _Call) -> Iterator[Batch]:
        """Makes a call, waits for it, and yields its result. This thread makes it if possible, so that a record that
        ends the process is found (runtime/worker/blackbox.py)."""
        assert self._caller is not None
        while not call.answered:
            value, error = None, None
            self._see_whether_full()
            try:
                record = self._record_of(call)
                # Only a retry ever waits. It waits no longer than the call might take, because this thread has other
                # tasks too.
                self._caller.wait_for_place(self._concurrency, self._timeout_s)
                value = self._caller.call(record, self._timeout_s)
            except BaseException as raised:  # it is handled below
                error = raised
            self._see_whether_full()
            self._tried(call, value, error, 0)
            if not call.answered:
                self._again.clear()
                time.sleep(self._wait_s(call))
        self._finished.clear()
        out: list[Any] = []
        self._give(call, out)
        if out:
            yield out

    def _look(self) -> None:
        """Takes the answers that have come, and does what is due."""
        assert self._caller is not None
        now = self._take_answers()
        self._see_whether_full()
        while self._deadlines:
            attempt, due = next(iter(self._deadlines.items()))
            if due > now:
                break
            del self._deadlines[attempt]
            frame, still_s = self._caller.where(attempt), self._caller.stood_still()
            if self._caller.abandon(attempt):
                self._tried(attempt.call, None, _timed_out(self._timeout_s, frame, still_s), now)
        self._see_whether_full()
        attempts: list[Attempt] = []
        while self._again and self._again[0][0] <= now and len(attempts) < self._free:
            attempts.append(self._try(heappop(self._again)[2], now))
        if attempts:
            self._caller.begin(attempts)

    def _see_whether_full(self) -> None:
        """Notes since when late calls have all places, and warns once when they keep them."""
        assert self._caller is not None
        if self._warned or self._caller.late < self._concurrency:
            self._full_since = None
            return
        now = self._clock()
        if self._full_since is None:
            self._full_since = now
        elif now - self._full_since >= _FULL_NS:
            self._full_since, self._warned = None, True
            logger.warning(
                "operator %r, task %d: no call can begin, because all places (concurrency=%d) are taken by calls that "
                "have not ended although their time was over (timeout_s=%g). The task takes no records until one of "
                "them has ended. %s",
                self.context.operator.name,
                self.context.index,
                self._concurrency,
                self._timeout_s,
                _END_WHEN_CANCELLED,
            )

    def _take_answers(self) -> int:
        """Takes the answers that have come. Returns the time, if anything here depends on it."""
        assert self._caller is not None
        now = self._clock() if self._timeout_ns is not None or self._retries else 0
        for attempt in self._caller.take():
            self._deadlines.pop(attempt, None)
            self._tried(attempt.call, attempt.value, attempt.error, now)
        return now

    def _tried(self, call: _Call, value: Any, error: BaseException | None, now: int) -> None:
        """Takes the answer of an attempt, which may have to be made again."""
        again = isinstance(error, self._retry_on) and is_failure(error)
        if error is not None and again and call.tries <= self._retries:
            self._put_back += 1
            heappush(self._again, (now + int(self._wait_s(call) * 1e9), self._put_back, call))
            return
        call.value, call.error, call.answered = value, error, True
        if not self._ordered:
            self._finished.append(call)

    def _wait_s(self, call: _Call) -> float:
        """Returns how long to wait before the next try: twice as long as before the one before."""
        most_s = max(_WAIT_MOST_S, self._retry_wait_s)
        return min(most_s, self._retry_wait_s * 2.0 ** min(call.tries - 1, 60))

    # --- results -------------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Batch]:
        self._look()
        out: list[Any] = []
        while True:
            item = self._next()
            if isinstance(item, _Call):
                self.oldest = min(self.oldest, item.stamp) if out else item.stamp
                self._give(item, out)
                if len(out) < EXPAND_RECORDS_MAX:
                    continue
            if out:
                yield out
                out = []
            if isinstance(item, Watermark):
                self._mark_out = item.value
            if not isinstance(item, _Call):
                return

    def _next(self) -> _Call | Watermark | None:
        """Takes the next result that may leave, or the next watermark."""
        if self._finished:
            call = self._finished.popleft()
            self._queue.remove(call.place)
            return call
        return self._queue.take()

    def _give(self, call: _Call, out: list[Any]) -> None:
        """Adds the result of a call, or handles its failure."""
        if call.error is None:
            if not self._seen:
                self._seen = True
                self._check(call)
            out.append(call.value)
            return
        errors = self.errors
        before = errors.step, errors.remedy
        if call.tries > 1:
            errors.step += f" in {call.tries} tries"
        if describe(call.error).startswith(f"{TimeoutError.__name__}: {_TOO_LATE}"):
            errors.remedy = errors.remedy or _REMEDY
        try:
            errors.handle(call.record, call.error)
        finally:
            errors.step, errors.remedy = before

    def _check(self, call: _Call) -> None:
        """Fails when the first result is none. The mistake is the program's, and not this record's."""
        if isinstance(call.value, AsyncGenerator):
            slip = "an asynchronous generator, which nobody reads; read it in the function"
            raise self.errors.failure(call.record, TypeError(f"the function returned {slip}"))

    # --- watermarks ----------------------------------------------------------------------------------------------

    def watermark(self, watermark: int | None) -> int | None:
        if watermark is not None and watermark != self._mark_in:
            self._mark_in = watermark
            last = self._queue.last()
            if self._returned:
                self._mark_behind = watermark
            elif not self._queue:
                self._mark_out = watermark
            elif isinstance(last, Watermark) and IDLE not in (last.value, watermark):
                last.value = watermark  # nothing came between them
            else:
                self._queue.mark(Watermark(watermark))
        return self._mark_out

    # --- epochs --------------------------------------------------------------------------------------------------

    def snapshot(self, epoch: int, whole: bool) -> StageState:
        # Never None: the state of an earlier snapshot would still hold.
        return StageState(own=[*(call.saved for call in self._queue.answers()), *self._returned])

    def restore(self, epoch: int, saved: SavedState) -> None:
        self._returned.extend(record for own in saved.own for record in own)
