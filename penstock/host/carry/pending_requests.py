"""The requests of drivers to the JobHost whose replies have not come yet. Each has a number, by which the JobHost
replies."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.host.carry.event_queue import EventQueue

if TYPE_CHECKING:
    from penstock.host.decide.commands import HostCommand
    from penstock.host.decide.job_host import JobHost


class PendingRequest:
    """A driver's wait for the reply to its request."""

    def __init__(self, number: int, events: EventQueue) -> None:
        self.number = number
        self._events = events
        self._error: Exception | None = None
        self._over = threading.Event()

    def end(self, error: Exception | None) -> None:
        """Ends the wait, with an error if the request could not be fulfilled."""
        self._error = error
        self._over.set()

    def wait(self, deadline: float | None = None) -> bool:
        """Waits for the reply. Raises the reply's error, if there is one, and JobError when the job has ended. Returns
        whether there was a reply before the deadline (None: there is none)."""
        until = math.inf if deadline is None else deadline
        while not self._over.wait(min(1.0, max(0.0, until - time.monotonic()))):
            if self._events.ended.is_set():
                raise self._events.has_ended()
            if time.monotonic() >= until:
                return False
        if self._error is not None:
            raise self._error
        return True


class PendingRequests:
    """See the module's docstring. Safe to use from several threads."""

    def __init__(self, events: EventQueue) -> None:
        self._events = events
        self._requests: dict[int, PendingRequest] = {}
        self._numbers = 0
        self._lock = threading.Lock()

    def ask(self, ask: Callable[[JobHost, int], list[HostCommand]]) -> None:
        """Gives a driver's request to the JobHost, and waits for the JobHost's reply."""
        with self.open() as request:
            self._events.put(lambda host: ask(host, request.number))
            request.wait()

    @contextmanager
    def open(self) -> Iterator[PendingRequest]:
        """Yields a new request of a driver. A reply can come until the end of the block."""
        with self._lock:
            self._numbers += 1
            request = self._requests[self._numbers] = PendingRequest(self._numbers, self._events)
        try:
            yield request
        finally:
            self.give_up(request.number)

    def put_if_wanted(self, number: int, event: Callable[[JobHost], list[HostCommand]]) -> bool:
        """Gives an event to the JobHost while a driver waits for the reply to this request. Returns whether one
        does."""
        with self._lock:
            wanted = number in self._requests
            if wanted:
                self._events.put(event)
            return wanted

    def is_wanted(self, number: int) -> bool:
        """Returns whether a driver still waits for the reply to this request."""
        with self._lock:
            return number in self._requests

    def give_up(self, number: int) -> None:
        """Takes no reply to this request any more."""
        with self._lock:
            self._requests.pop(number, None)

    def reply(self, number: int, error: Exception | None) -> None:
        """Gives a driver the reply to its request."""
        with self._lock:
            request = self._requests.get(number)
            if request is not None:
                request.end(error)
