"""Savepoints: fulfils drivers' requests for a savepoint, and for a stop with a savepoint.

The place of a savepoint may not answer, so it is looked at in a thread of its own before the JobHost is asked. A
savepoint that is given up must leave the job as it was.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.host.carry.event_queue import EventQueue
from penstock.host.carry.pending_requests import PendingRequests
from penstock.runtime.epochs.store import Store
from penstock.runtime.errors import JobError
from penstock.runtime.program.graph import SAVEPOINT
from penstock.runtime.storage import filesystems

if TYPE_CHECKING:
    from penstock.host.decide.job_host import JobHost, RequestEvent

# How long the JobHost may take to say for what a savepoint has waited.
_GIVE_UP_S = 5.0


class Savepoints:
    """See the module's docstring. `has_store`: otherwise the JobHost refuses each savepoint, because the job has no
    epochs. `host`: returns the JobHost, or None while the job opens. `troubles`: returns what the job's status says is
    wrong, as sentences."""

    def __init__(
        self,
        has_store: bool,
        events: EventQueue,
        requests: PendingRequests,
        host: Callable[[], JobHost | None],
        troubles: Callable[[], str],
    ) -> None:
        self._job = events.job
        self._has_store = has_store
        self._events = events
        self._requests = requests
        self._host = host
        self._troubles = troubles

    def make(self, url: str, timeout_s: float | None) -> None:
        """Returns when the savepoint is written. After `timeout_s` seconds it gives the savepoint up, and raises
        TimeoutError, which says what it has waited for."""
        deadline = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        with self._requests.open() as (number, reply):
            place_answers = self._begin(number, url, lambda requests, _: requests.savepoint(number, url))
            try:
                return self._events.wait(reply, deadline)
            except TimeoutError:
                self._requests.give_up(number)
                if reply.done():  # it has come just now, or is this error
                    return reply.result()
            place = filesystems.named(url)
            waited_for = self._given_up(number, place) if place_answers.is_set() else f"an answer of {place}"
        raise TimeoutError(
            f"job {self._job!r} has made no savepoint in {place} within {timeout_s:g} s. It waits for {waited_for}. "
            f"{self._troubles()}The savepoint is given up, and the job goes on."
        )

    def stop_with(self, url: str) -> None:
        """Returns when the savepoint is written and the job is about to end. A driver may call this again when the host
        of the job has died since."""
        with self._requests.open() as (number, reply):
            self._begin(number, url, lambda requests, _: requests.stop_with_savepoint(number, url))
            try:
                self._events.wait(reply)
            except JobError:
                host = self._host()  # an earlier call may have ended the job, and its driver may not have heard of it
                if not (self._events.ended.is_set() and host is not None and host.requests.has_stopped_with(url)):
                    raise

    def _begin(self, number: int, url: str, event: RequestEvent) -> threading.Event:
        """Asks the JobHost when the place has answered, in a thread. Returns what is set then."""
        answers = threading.Event()

        def begin() -> None:
            try:
                if self._has_store:
                    Store.open(url, SAVEPOINT).check()
            except Exception as error:  # the driver waits for a reply, whatever the error
                self._requests.reply(number, error)
                return
            if self._requests.tell_if_wanted(number, event):
                answers.set()

        threading.Thread(target=begin, name="penstock-savepoint", daemon=True).start()
        return answers

    def _given_up(self, number: int, place: str) -> str:
        """Gives up a savepoint, and returns the thing for which it has waited."""
        opening = self._host() is None
        try:
            # While the job starts, this event comes after the one that asks for the savepoint.
            patience_s = 0.0 if opening else _GIVE_UP_S
            waited_for = self._events.look(lambda host: host.requests.give_up_savepoint(number), patience_s)
        except TimeoutError:
            return "the job to start" if opening else "the job to end"
        return waited_for or (
            f"its files to be copied to {place}. Until the last of them is written, no epoch of the job completes, and "
            "what is there is no savepoint"
        )
