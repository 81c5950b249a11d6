"""Makes the calls of one task of `map_async`: coroutines on an asyncio loop, and other functions in threads.

No answer may be lost or given twice, whatever a call does.

A call whose time is over has failed at once. Its coroutine is cancelled, but may go on for a while, and is *late* until
it has really ended. A thread cannot be ended from outside, so its call gives its place up at once: a function that
never returns would otherwise stop the job, where a thread is all it costs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from inspect import isawaitable
from queue import SimpleQueue
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from penstock.runtime.forks import end_forks
from penstock.runtime.operators.call_loop import END_S, CallLoop
from penstock.runtime.records.userfunc import OwnFunction, is_users

if TYPE_CHECKING:
    from penstock.runtime.operators.calls_in_flight import Call

logger = logging.getLogger(__name__)

#: The first words of the error of a call that has not ended in time.
TOO_LATE = "the call has not ended within timeout_s="
#: The remedy for coroutines that stay late.
END_WHEN_CANCELLED = "Let the function end when it is cancelled: it must not catch asyncio.CancelledError and go on"

# When the loop has stood still for this part of a call's time, the error of the call says so.
_STILL_TOLD = 0.25

_AWAIT = "Await what takes long, or call it in a thread: await asyncio.to_thread(function, ...)"
_RETURN_BY_ITSELF = "Give what the function waits for a timeout of its own, below timeout_s, so that it returns"


class NotAwaited(TypeError):
    """A function that is not written with `async def` has returned a coroutine. That is the program's mistake, and not
    the record's."""


class Attempt:
    """One call of the function for a record. `over`: it has an answer, or nobody waits for one. `late`: it was given
    up, and has not ended."""

    __slots__ = ("call", "error", "late", "over", "place", "record", "value")

    def __init__(self, call: Call, record: Any) -> None:
        self.call = call
        self.record = record
        self.over = False
        self.late = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.place: Any = None  # the thread or the asyncio task that it runs in


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
        self._ended = threading.Condition(self._lock)  # notified when a call has ended
        self._told = False  # whether the task's thread was woken for answers that it has not taken yet
        self._closed = False
        self._process = os.getpid()

    def open(self) -> None:
        """Opens the function."""
        _refuse_coroutine(self._function.open(), "open()")

    @abstractmethod
    def begin(self, attempts: list[Attempt]) -> None:
        """Begins calls."""

    def call(self, attempt: Attempt) -> Any:
        """Makes a call while no other is under way, and waits for its result. Raises what the function raises, and
        TimeoutError."""
        self.begin([attempt])
        with self._lock:
            in_time = self._ended.wait_for(lambda: attempt.over, self.timeout_s)
        if not in_time:
            frame, still_s = self.where(attempt), self.stood_still()
            if self.abandon(attempt):
                with self._lock:  # a coroutine ends soon when it is cancelled
                    self._ended.wait_for(lambda: not attempt.late, END_S)
                raise timed_out(self.timeout_s, frame, still_s)
        self.take()
        if attempt.error is not None:
            raise attempt.error
        return attempt.value

    def stood_still(self) -> float:
        """Returns for how many seconds no call could go on while the calls that are too late were under way."""
        return 0.0

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
        """Ends an abandoned call, if that is possible. Its end must be said to `settle`."""

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
            self._ended.notify_all()
            if not self._told:
                self._told = True
                self._tell()
            return True

    def _end_late(self) -> None:
        """Gives the place of a late call back. It must be called with the lock."""
        self.late -= 1
        self._ended.notify_all()
        if not self._closed:
            self._tell()  # `_told` is only for answers: what has come now is room, and nobody takes it

    def wait_for_place(self, concurrency: int) -> None:
        """Waits in the task's thread until fewer calls than `concurrency` are late. Raises TimeoutError."""
        with self._lock:
            if not self._ended.wait_for(lambda: self.late < concurrency, self.timeout_s):
                raise timed_out(self.timeout_s, None)

    def _tell(self) -> None:
        """Wakes the task's thread."""
        self._wake()

    def _warn_of_calls_left(self, calls: int, remedy: str) -> None:
        """Says how many calls are still under way when the task has ended."""
        if calls:
            logger.warning(
                "operator %r, task %d: calls that had not ended when the task did, and are left to themselves: %d. %s",
                self._name,
                self.task,
                calls,
                remedy,
            )

    @property
    def answered(self) -> int:
        """The number of answers that were not taken."""
        return len(self._answers)

    def answer_in(self) -> float | None:
        """Returns the number of seconds until there is an answer that does not wake the task's thread."""
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
        _refuse_coroutine(self._function.close(), "close()")

    @abstractmethod
    def _end_calls(self) -> None:
        """Ends all calls and threads, as far as that is possible in a moment."""


class LoopCaller(Caller):
    """Runs a coroutine function on an asyncio loop, in one thread."""

    def __init__(self, function: OwnFunction, name: str, wake: Callable[[], None]) -> None:
        super().__init__(function, name, wake)
        self._begun: deque[list[Attempt]] = deque()
        self._starting = False  # whether the loop was told of what is in `_begun`
        self._loop = CallLoop(name)
        self._tasks: set[asyncio.Task[Any]] = set()  # only the loop's thread uses it

    def open(self) -> None:
        # In the loop: what the user opens may belong to the loop that runs then.
        self._loop.submit(_called(self._function.open)).result()

    def begin(self, attempts: list[Attempt]) -> None:
        self.running += len(attempts)
        self._begun.append(attempts)
        if not self._starting:
            self._starting = True
            self._loop.call_soon(self._start)

    def _start(self) -> None:
        self._starting = False  # before the attempts are taken: for what comes now it is called again
        self._loop.watch(self.timeout_s, lambda: self.running + self.late > 0)
        while self._begun:
            for attempt in self._begun.popleft():
                if not attempt.over:
                    attempt.place = self._loop.loop.create_task(_outcome(self._function.fn, attempt.record))
                    attempt.place.add_done_callback(partial(self._done, attempt))
                    self._tasks.add(attempt.place)

    def _done(self, attempt: Attempt, task: asyncio.Task[tuple[Any, BaseException | None]]) -> None:
        self._tasks.discard(task)
        if task.cancelled():  # before its first step, by us or by another coroutine
            self.settle(attempt, None, asyncio.CancelledError("the call was cancelled before it began"))
        else:
            self.settle(attempt, *task.result())

    def _tell(self) -> None:
        # At the end of this round of the loop, so that one wake-up is enough for all calls that end in it.
        self._loop.loop.call_soon(self._wake)

    def stood_still(self) -> float:
        return 0.0 if self.timeout_s is None else self._loop.stood_still(self.timeout_s)

    def where(self, attempt: Attempt) -> FrameType | None:
        return None if attempt.place is None else _awaiting_frame(attempt.place)

    def _give_up(self, attempt: Attempt) -> None:
        self._loop.call_soon(self._cancel_late, attempt)

    def _cancel_late(self, attempt: Attempt) -> None:
        if attempt.place is None:  # it was given up before `_start` came to it
            self.settle(attempt, None, None)
            return
        attempt.place.cancel()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        try:
            left = self._loop.cancel(self._tasks)
            if left is not None:
                self._warn_of_calls_left(left, END_WHEN_CANCELLED)
                self._loop.submit(_called(self._function.close)).result()
            else:
                logger.warning(
                    "operator %r, task %d: its function holds up its asyncio loop without awaiting anything, so "
                    "close() of the function is not called, and the thread is left to itself. %s",
                    self._name,
                    self.task,
                    _AWAIT,
                )
        finally:
            self._end_calls()

    def _end_calls(self) -> None:
        self._loop.end()


async def _called(function: Callable[[], Any]) -> None:
    """Calls a function, and awaits its result if that is possible."""
    result = function()
    if isawaitable(result):
        await result


async def _outcome(function: Callable[[Any], Any], record: Any) -> tuple[Any, BaseException | None]:
    """Makes a call, and awaits its result as long as that is possible. Returns its value, or its error, whatever that
    is: asyncio would let some errors end the loop."""
    try:
        value = function(record)
        while isawaitable(value):
            value = await value
    except BaseException as error:  # it is the record's failure, whatever it is; or nobody waits for it
        return None, error
    return value, None


class ThreadCaller(Caller):
    """Runs a function in threads. There are as many as calls have been under way at a time."""

    def __init__(self, function: OwnFunction, name: str, wake: Callable[[], None]) -> None:
        super().__init__(function, name, wake)
        self._todo: SimpleQueue[Attempt | None] = SimpleQueue()
        self._threads: set[threading.Thread] = set()  # without those that were abandoned
        self._given_up: set[threading.Thread] = set()  # those that were abandoned, and whose calls have not ended
        self._abandoned = 0

    def begin(self, attempts: list[Attempt]) -> None:
        self.running += len(attempts)
        for attempt in attempts:
            self._todo.put(attempt)
        while len(self._threads) < self.running:
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
                value = self._result(attempt.record)
            except BaseException as raised:  # it is the record's failure, whatever it is; or nobody waits for it
                error = raised
            if not self.settle(attempt, value, error):
                self._given_up.discard(threading.current_thread())
                return  # another thread has taken this one's place
            del attempt, value, error  # what has an answer must not stay in memory until the next call

    def _result(self, record: Any) -> Any:
        """Makes a call. Raises NotAwaited when it returns a coroutine."""
        value = self._function.fn(record)
        if isawaitable(value):
            called = type(value).__name__
            if isinstance(value, Coroutine):
                value.close()  # so that Python does not warn about it
            raise NotAwaited(
                f"the function returned an object of type {called}, which must be awaited, and is not written with "
                "`async def`; write it so: async def ask(record): return await client.get(record)"
            )
        return value

    def where(self, attempt: Attempt) -> FrameType | None:
        return None if attempt.place is None else _users_frame(attempt.place)

    def _give_up(self, attempt: Attempt) -> None:
        self.settle(attempt, None, None)  # its place is free at once
        if attempt.place is None:  # a thread that gets it now will see that it is over
            return
        self._threads.discard(attempt.place)
        self._given_up.add(attempt.place)
        self._abandoned += 1
        if self._abandoned & (self._abandoned - 1) == 0:
            logger.warning(
                "operator %r, task %d: calls that have not ended in time so far: %d, and %d of them still go on. "
                "A thread cannot be ended from outside, so each keeps its thread until its function returns, and "
                "others take their places. %s",
                self._name,
                self.task,
                self._abandoned,
                len(self._given_up),
                _RETURN_BY_ITSELF,
            )

    def _end_calls(self) -> None:
        for _ in self._threads:
            self._todo.put(None)
        until = time.monotonic() + END_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        running = sum(thread.is_alive() for thread in self._threads | self._given_up)
        self._warn_of_calls_left(running, _RETURN_BY_ITSELF)


def timed_out(timeout_s: float | None, frame: FrameType | None, still_s: float = 0.0) -> TimeoutError:
    """Returns the error of a call that has not ended in time, as if the user's code had raised it where it was.
    `still_s`: for how long no call went on, because the loop stood still."""
    error = TimeoutError(f"{TOO_LATE}{timeout_s:g}")
    if timeout_s is not None and still_s > timeout_s * _STILL_TOLD:
        error = TimeoutError(
            f"{error}. Meanwhile the asyncio loop of all calls of the task stood still for {still_s:.3g} s, as when a "
            f"coroutine calls something that blocks, such as time.sleep(). {_AWAIT}"
        )
    if frame is None or frame.f_lineno is None:
        return error
    return error.with_traceback(TracebackType(None, frame, frame.f_lasti, frame.f_lineno))


def _refuse_coroutine(returned: Any, method: str) -> None:
    if isinstance(returned, Coroutine):
        returned.close()
        raise TypeError(
            f"{method} is an async function, and the function itself is none; make both plain or both async"
        )


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
