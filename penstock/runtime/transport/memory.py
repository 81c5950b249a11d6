"""A transport between run loops of one process, for tests and for running a flow without Ray.

The inboxes have a limited number of bytes, as a ring has, so that back-pressure is the same as in a job.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from penstock.runtime.transport.base import Buffer, Transport


class _Inbox:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.messages: deque[tuple[int, bytes]] = deque()
        self.changed = threading.Condition()
        self.woken = False


class MemoryNetwork:
    """The inboxes of `workers` workers, with `capacity` bytes each."""

    def __init__(self, workers: int, capacity: int = 2 * 1024 * 1024) -> None:
        self.inboxes = [_Inbox(capacity) for _ in range(workers)]

    def transport(self, worker: int) -> MemoryTransport:
        """Returns the end of one worker."""
        return MemoryTransport(self, worker)


class MemoryTransport(Transport):
    """The end of one worker in a MemoryNetwork."""

    def __init__(self, network: MemoryNetwork, worker: int) -> None:
        self._network = network
        self._inbox = network.inboxes[worker]
        self.target_message = max(1, self._inbox.capacity // 64)

    def max_message(self, worker: int) -> int:
        return self._network.inboxes[worker].capacity // 2

    def send(self, worker: int, task: int, parts: Sequence[Buffer]) -> bool:
        inbox = self._network.inboxes[worker]
        message = b"".join(parts)
        with inbox.changed:
            if inbox.used + len(message) > inbox.capacity:
                return False
            inbox.used += len(message)
            inbox.messages.append((task, message))
            inbox.changed.notify()
        return True

    def receive(self, timeout: float | None) -> Sequence[tuple[int, Buffer]]:
        inbox = self._inbox
        with inbox.changed:
            if timeout != 0:
                inbox.changed.wait_for(lambda: inbox.messages or inbox.woken, timeout)
            inbox.woken = False
            messages = list(inbox.messages)
            inbox.messages.clear()
            inbox.used = 0
        return messages

    def wake(self) -> None:
        with self._inbox.changed:
            self._inbox.woken = True
            self._inbox.changed.notify()

    def close(self) -> None:
        self._inbox.messages.clear()
