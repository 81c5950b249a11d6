"""Runs work that is given up when it takes too long, so that starting, testing and stopping Spark have time limits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as TooLate
from typing import TypeVar

T = TypeVar("T")
_GIVE_UP_SECONDS = 3.0


def in_time(
    seconds: float,
    work: Callable[[], T],
    give_up: Callable[[], None] = lambda: None,
    undo: Callable[[T], None] = lambda _: None,
) -> T:
    """Returns work(), which runs in a thread of its own. Raises TooLate after `seconds`. Then `give_up` is called,
    which should make the work fail. If the work succeeds all the same, `undo` is called with its result."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            value = work()
        except BaseException as error:  # it is the caller's, in the other thread
            with contextlib.suppress(InvalidStateError):
                outcome.set_exception(error)
            return
        try:
            outcome.set_result(value)
        except InvalidStateError:
            undo(value)

    thread = threading.Thread(target=run, name="penstock-spark", daemon=True)
    thread.start()
    try:
        return outcome.result(seconds)
    except TooLate:
        if not outcome.cancel():  # it has just ended
            return outcome.result()
        give_up()
        thread.join(_GIVE_UP_SECONDS)  # what it takes away itself is gone, as a rule, when the caller tries again
        raise
