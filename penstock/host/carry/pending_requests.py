"""The requests of drivers to the JobHost whose replies have not come yet. Each has a number, by which the JobHost
replies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.host.carry.event_queue import EventQueue

if TYPE_CHECKING:
    from penstock.host.decide.driver_requests import DriverRequests
    from penstock.host.decide.job_host import RequestEvent


class PendingRequests:
    """See the module's docstring. Safe to use from several threads."""

    def __init__(self, events: EventQueue) -> None:
        self._events = events
        self._replies: dict[int, Future[None]] = {}
        self._numbers = 0
        self._lock = threading.Lock()

    def ask(self, ask: Callable[[DriverRequests, int], None]) -> None:
        """Gives a driver's request to the JobHost, and waits for the JobHost's reply."""
        with self.open() as (number, reply):
            self._events.tell_requests(lambda requests, _: ask(requests, number))
            self._events.wait(reply)

    @contextmanager
    def open(self) -> Iterator[tuple[int, Future[None]]]:
        """Yields the number of a new request, and its reply, which can come until the end of the block."""
        reply: Future[None] = Future()
        with self._lock:
            self._numbers += 1
            number = self._numbers
            self._replies[number] = reply
        try:
            yield number, reply
        finally:
            self.give_up(number)

    def tell_if_wanted(self, number: int, event: RequestEvent) -> bool:
        """Gives an event to the JobHost while a driver waits for the reply to this request. Returns whether one
        does."""
        with self._lock:
            wanted = number in self._replies
            if wanted:
                self._events.tell_requests(event)
            return wanted

    def is_wanted(self, number: int) -> bool:
        """Returns whether a driver still waits for the reply to this request."""
        return number in self._replies

    def give_up(self, number: int) -> None:
        """Takes no reply to this request any more."""
        with self._lock:
            self._replies.pop(number, None)

    def reply(self, number: int, error: Exception | None) -> None:
        """Gives a driver the reply to its request: that it is fulfilled, or why not."""
        with self._lock:
            reply = self._replies.pop(number, None)
        if reply is not None:
            reply.set_exception(error) if error is not None else reply.set_result(None)
