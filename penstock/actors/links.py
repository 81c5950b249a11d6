"""The JobMaster's side of the workers' control: commands go to each worker in order, and their answers come back as
events, so that whoever sends them never waits for a worker.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from penstock.actors.control import ControlLink, End, Refused


class Link:
    """One process of a worker. `answered(answer)` and `refused(error)` of a command are called in the link's thread;
    neither is when the worker has gone."""

    def __init__(self, worker: int, incarnation: int, end: End) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self._end = end
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"penstock-link-{worker}", daemon=True).start()

    def send(
        self,
        method: str,
        arguments: Callable[[], tuple[Any, ...]],
        answered: Callable[[Any], None] | None = None,
        refused: Callable[[Refused], None] | None = None,
        gone: Callable[[], None] | None = None,
    ) -> None:
        """Send a command behind all others; its arguments are asked for when it is its turn."""
        self._commands.put((method, arguments, answered, refused, gone))

    def close(self) -> None:
        """Send nothing more."""
        self._commands.put(None)

    def _run(self) -> None:
        connection: ControlLink | None = None
        with suppress(OSError, EOFError):  # else it has died already; who watches the process says so
            connection = ControlLink(self._end)
        lost = connection is None
        while True:
            command = self._commands.get()
            if command is None:
                if connection is not None:
                    connection.close()
                return
            method, arguments, answered, refused, gone = command
            try:
                answer = None if connection is None or lost else connection.call(method, *arguments())
            except Refused as error:
                if refused is not None:
                    refused(error)
                continue
            except (OSError, EOFError):
                lost = True  # who watches the process says so
            except Exception as error:
                if refused is not None:
                    refused(Refused(f"{method}: {type(error).__name__}: {error}", error))
                continue
            if lost:
                if gone is not None:
                    gone()
            elif answered is not None:
                answered(answer)


_Command = tuple[
    str,
    Callable[[], tuple[Any, ...]],
    Callable[[Any], None] | None,
    Callable[[Refused], None] | None,
    Callable[[], None] | None,
]


class Round:
    """Answers that are awaited from several workers, of which some may die instead."""

    def __init__(self, workers: set[int]) -> None:
        self._workers = set(workers)
        self._lock = threading.Lock()
        self._over = threading.Event()
        if not workers:
            self._over.set()

    def done(self, worker: int) -> None:
        """A worker has answered, or has gone."""
        with self._lock:
            self._workers.discard(worker)
            if not self._workers:
                self._over.set()

    def wait(self) -> None:
        """Until all have."""
        self._over.wait()
