"""How the barriers of epochs begin: at all workers at the same instant, one epoch after the other.

Before a barrier after which tasks stop, all workers must know which tasks these are: no task may take the barrier
before its worker knows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from penstock.host.decide.worker_calls import Handler, WorkerCalls
from penstock.host.decide.worker_lives import WorkerLives
from penstock.runtime.epochs.coordinator import Park, Trigger
from penstock.runtime.errors import PenstockError

# All sources put a barrier into their streams at the same instant, this long after the epoch was decided, so that every
# worker has the command by then. A task that has one barrier and waits for another one holds up records meanwhile.
_TRIGGER_AHEAD_S = 0.01


class Barriers:
    """See the module's docstring."""

    def __init__(self, calls: WorkerCalls, lives: WorkerLives) -> None:
        self._calls = calls
        self._lives = lives
        self._next: Trigger | None = None  # waits until all workers know which tasks stop after it

    def trigger(self, command: Trigger, now: float) -> None:
        """Begins the barrier of an epoch, as soon as all workers know which tasks stop after it."""
        self._begin(now)  # that of the epoch before, because the barriers of epochs keep their order
        self._next = command
        if command.parking:
            self._park(command)
        else:
            self._begin(now)

    def _park(self, command: Trigger) -> None:
        """Lets tasks stop after the barrier of an epoch, and begins it when all workers know. When a worker dies
        meanwhile, the epoch begins all the same, because the coordinator has begun it; that is before any task is built
        again, as all workers must have answered by then."""
        waiting = set(self._lives.running)

        def knows(worker: int, answer: Any, now: float) -> None:
            waiting.discard(worker)
            if not waiting and self._next is command:
                self._begin(now)

        def refused(worker: int, error: PenstockError, now: float) -> None:
            self._calls.refused(error, now)
            knows(worker, None, now)

        for worker in sorted(waiting):
            done = Handler(partial(knows, worker), partial(refused, worker), partial(knows, worker, None))
            self._calls.call(worker, Park(command.epoch, command.parking), done)

    def _begin(self, now: float) -> None:
        trigger, self._next = self._next, None
        if trigger is not None:
            self._calls.call_all(replace(trigger, begin_ns=int((now + _TRIGGER_AHEAD_S) * 1e9)))
