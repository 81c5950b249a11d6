"""The calls to workers that have no answer yet, each with the consequences of its answer.

An answer counts once, and only if it comes from the process that was called. When the process dies before, the call is
over, and what waited for it hears so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.host.decide.commands import Call, HostCommand
from penstock.host.decide.process_commands import CallCommand
from penstock.host.decide.worker_lives import WorkerLives
from penstock.runtime.errors import PenstockError


def nothing(answer: Any, now: float) -> None:
    """Handles an answer, or a refusal, from which nothing follows."""


@dataclass(frozen=True)
class Handler:
    """The functions for the answer to a call, for a refusal, and for the death of the process before either."""

    answered: Callable[[Any, float], None]
    refused: Callable[[PenstockError, float], None]
    gone: Callable[[float], None] = lambda now: None


class WorkerCalls:
    """See the module's docstring."""

    def __init__(
        self, lives: WorkerLives, out: list[HostCommand], refused: Callable[[PenstockError, float], None]
    ) -> None:
        """`out`: the list of the host's commands. `refused` handles the refusals of calls that have no handler of their
        own."""
        self.refused = refused
        self._lives = lives
        self._out = out
        self._number = 0
        self._open: dict[int, tuple[int, Handler]] = {}  # by number: the worker, and what its answer means

    def call(self, worker: int, command: CallCommand, handler: Handler) -> None:
        """Calls a worker."""
        self._number += 1
        self._open[self._number] = (worker, handler)
        self._out.append(Call(worker, self._lives.incarnation(worker), self._number, command))

    def call_all(self, command: CallCommand, answered: Callable[[int, Any, float], None] | None = None) -> None:
        """Calls all workers that run. `answered` gets the worker too."""
        for worker in sorted(self._lives.running):
            done = nothing if answered is None else partial(answered, worker)
            self.call(worker, command, Handler(done, self.refused))

    def take(self, number: int) -> Handler | None:
        """Returns the handler of a call that has its answer now, or None when there is no such call any more."""
        _, handler = self._open.pop(number, (0, None))
        return handler

    def over(self, worker: int, now: float) -> None:
        """Ends all calls to a worker, whose process does nothing more."""
        gone = [handler for of, handler in self._open.values() if of == worker]
        self._open = {number: call for number, call in self._open.items() if call[0] != worker}
        for handler in gone:
            handler.gone(now)
