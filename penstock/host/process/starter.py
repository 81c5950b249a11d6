"""Starts the child processes that the kernel kills with this program.

The kernel kills such a process (PR_SET_PDEATHSIG) when the *thread* that has started it ends, not only when the program
does. A job may be started in a thread that ends before the job, as in a web server's handler. So one thread starts all
these processes, and must never end before the program.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class _Starter:
    def __init__(self) -> None:
        self._wanted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # No ThreadPoolExecutor: its threads end before the functions that a program runs at its exit.
        threading.Thread(target=self._start, name="penstock-starter", daemon=True).start()

    def ask(self, make: Callable[[], T]) -> T:
        made: Future[T] = Future()

        def start() -> None:
            try:
                made.set_result(make())
            except BaseException as error:  # raised again by the thread that waits
                made.set_exception(error)

        self._wanted.put(start)
        return made.result()

    def _start(self) -> None:
        while True:
            self._wanted.get()()


_lock = threading.Lock()
_starter: _Starter | None = None


def _forget() -> None:
    """In a fork of the program, which has none of the program's threads: lets the next call make a starter."""
    global _lock, _starter
    _lock, _starter = threading.Lock(), None  # a thread of the program may have held the lock


os.register_at_fork(after_in_child=_forget)


def started(make: Callable[[], T]) -> T:
    """Calls `make`, which starts a child process, in the thread that lives as long as the program. Returns what `make`
    returns, or raises what it raises."""
    global _starter  # noqa: PLW0603
    with _lock:
        starter = _starter = _starter or _Starter()
    return starter.ask(make)
