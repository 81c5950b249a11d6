"""Steps of a sink that wait for an outside system, beside the loop of the worker.

The steps of one task of a sink are taken in order, by one thread that begins with the first of them. A step must never
begin after `close`, because somebody else may then commit in this task's place.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from penstock.runtime.calls import done
from penstock.runtime.errors import PenstockError

T = TypeVar("T")


class Beside(Protocol):
    """Takes steps in order."""

    def do(self, step: Callable[[], T]) -> Future[T]:
        """Has a step taken after all earlier ones. The future has what it returns or raises."""

    def close(self) -> Future[None]:
        """Refuses all steps that have not begun. The future is done when no step is running any more."""


class InLine:
    """Takes each step at once, in the thread that asks for it: for a loop that is nobody's but the caller's."""

    def __init__(self) -> None:
        self._closed = False

    def do(self, step: Callable[[], T]) -> Future[T]:
        """Takes the step."""
        future: Future[T] = Future()
        if self._closed:
            future.set_exception(Closed())
        else:
            _take(step, future)
        return future

    def close(self) -> Future[None]:
        """Refuses all further steps."""
        self._closed = True
        return done(None)


class BesideThread:
    """Takes steps in a thread of its own."""

    def __init__(self, name: str) -> None:
        """`name`: of the thread."""
        self._name = name
        self._steps: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._begun = False
        self._closed = False
        self._idle: Future[None] = Future()

    def do(self, step: Callable[[], T]) -> Future[T]:
        """Has the thread take a step. Only the loop's thread calls this."""
        future: Future[T] = Future()
        if self._closed:
            future.set_exception(Closed())
            return future
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        self._steps.put((step, future))
        return future

    def close(self) -> Future[None]:
        """Refuses the steps that have not begun. Only the loop's thread calls this."""
        if not self._closed:
            self._closed = True
            if self._begun:
                self._steps.put(None)
            else:
                self._idle.set_result(None)
        return self._idle

    def _run(self) -> None:
        while (asked := self._steps.get()) is not None:
            step, future = asked
            if self._closed:
                future.set_exception(Closed())
            else:
                _take(step, future)
        self._idle.set_result(None)


class Closed(PenstockError):
    """The task has been closed, so the step was not taken."""


def _take(step: Callable[[], T], future: Future[T]) -> None:
    try:
        result = step()
    except BaseException as error:  # it belongs to whoever waits for the step, even a SystemExit
        future.set_exception(error)
    else:
        future.set_result(result)
