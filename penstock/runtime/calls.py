"""Functions that other threads let the thread of a loop call, between two of its own steps.

Whoever asks gets a future. It must never wait for a loop that has ended: from then on every function is refused, also
one that was asked for at that very instant.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from penstock.runtime.errors import PenstockError

_Result = TypeVar("_Result")


class Calls:
    """See the module's docstring. `ask` is called by any thread, and everything else by that of the loop."""

    def __init__(self, wake: Callable[[], None], refusal: Callable[[], PenstockError]) -> None:
        """`wake`: wakes the loop's thread. `refusal`: makes the error of those that are refused."""
        self.waiting: deque[tuple[Callable[[], None], Future[Any]]] = deque()
        self._wake = wake
        self._refusal = refusal
        self._ended = False

    def ask(self, function: Callable[[], _Result]) -> Future[_Result]:
        """Lets the loop's thread call a function. The future has what it returns or raises."""
        future: Future[_Result] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # it belongs to the caller in the other thread, even a SystemExit
                future.set_exception(error)

        self.waiting.append((call, future))
        self._wake()
        if self._ended:  # the thread may have looked for the last time before
            self._refuse()
        return future

    def carry_out(self) -> None:
        """Calls the functions that wait."""
        while self.waiting:
            self.waiting.popleft()[0]()

    def end(self) -> None:
        """The loop has ended."""
        self._ended = True
        self._refuse()

    def _refuse(self) -> None:
        with suppress(IndexError):  # two threads may do this at the same time
            while True:
                self.waiting.popleft()[1].set_exception(self._refusal())


def done(result: _Result) -> Future[_Result]:
    """Returns a future that has this result."""
    future: Future[_Result] = Future()
    future.set_result(result)
    return future


def when_done(futures: Sequence[Future[Any]], then: Callable[[], None]) -> None:
    """Calls a function once when all of these futures are done, however they have ended: at once, or in the thread that
    ends the last one. For one future, functions are called in the order in which they were given."""
    left = [future for future in futures if not future.done()]
    if not left:
        then()
        return
    # Each future leads to the next one that is not done, so that no count has to be kept across threads.
    left[0].add_done_callback(lambda _: when_done(left[1:], then))
