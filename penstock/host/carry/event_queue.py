"""EventQueue: the events of a JobHost in their order, and the end of its job.

Any thread puts events, and only the supervising thread of the JobRunner takes them: no other thread may call a method
of the JobHost that changes it.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from penstock.host.decide.commands import HostCommand, JobEnd
from penstock.runtime.errors import JobError

if TYPE_CHECKING:
    from penstock.host.decide.job_host import CoordinatorEvent, JobHost, RequestEvent

T = TypeVar("T")

#: A call of a method of the JobHost, which returns the JobHost's commands.
Event: TypeAlias = "Callable[[JobHost], list[HostCommand]]"


class EventQueue:
    """See the module's docstring. `job`: the name of the job."""

    def __init__(self, job: str) -> None:
        self.job = job
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.end: JobEnd | None = None
        self.ended = threading.Event()

    def put(self, event: Event) -> None:
        """Appends an event."""
        self._events.put(event)

    def tell_requests(self, event: RequestEvent) -> None:
        """Appends an event of the job's requests."""
        self.put(lambda host: host.of_requests(event, time.monotonic()))

    def tell_coordinator(self, event: CoordinatorEvent) -> None:
        """Appends an event of the coordinator."""
        self.put(lambda host: host.of_coordinator(event, time.monotonic()))

    def get(self, timeout_s: float | None) -> Event | None:
        """Waits for the next event. Returns None when none has come in this time."""
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def finish(self, end: JobEnd) -> None:
        """Notes the job's end. Nobody takes events any more."""
        self.end = end
        self.ended.set()

    def has_ended(self) -> JobError:
        """Returns the error for a request to the job, which has ended."""
        assert self.end is not None, "only called when the job has ended"
        return JobError(self.end.words(self.job))

    def look(self, look: Callable[[JobHost], T], patience_s: float = math.inf) -> T:
        """Returns the result of `look`, which is called in the supervising thread. Raises JobError when the job has
        ended, and TimeoutError when that thread has not come to it within this time; it still does when it can."""
        found: Future[T] = Future()

        def event(host: JobHost) -> list[HostCommand]:
            try:
                found.set_result(look(host))
            except Exception as error:
                found.set_exception(error)
            return []

        self.put(event)
        return self.wait(found, time.monotonic() + patience_s)

    def wait(self, answer: Future[T], deadline: float = math.inf) -> T:
        """Waits for an answer of the JobHost. Raises JobError when the job has ended without it, and TimeoutError at
        the deadline (of time.monotonic)."""
        while not wait([answer], min(1.0, max(0.0, deadline - time.monotonic()))).done:
            if self.ended.is_set() and not answer.done():
                raise self.has_ended()
            if time.monotonic() >= deadline:
                raise TimeoutError("the job's host is busy")
        return answer.result()
