"""Transports: what carries messages between the workers of a job.

A transport belongs to one worker. Only the worker's run loop uses it, except for `wake`, which any thread may call. A
message goes to a task of a worker, and the order of messages is kept for each pair of a sending and a receiving worker.
Sending must never wait. "No room" is an answer: a worker that waited to send could not receive what others wait to send
to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from penstock.runtime.errors import PenstockError

Buffer = bytes | bytearray | memoryview


class PeerGone(PenstockError):
    """Nobody is at the address of a worker any more. The worker has died, which its watcher will report, or its ring
    has been replaced."""


class Transport(ABC):
    """The end of one worker; see the module's docstring."""

    #: The number of bytes of the largest message that can be sent at present.
    max_message: int

    #: The number of bytes that a message should have: small enough for many messages to be under way, and large enough
    #: to share the fixed cost.
    target_message: int

    @property
    def largest_message(self) -> int:
        """The number of bytes of the largest message that can be sent at all. When the receiver has no room for it yet,
        `send` asks the receiver to make room, and returns that there is none meanwhile."""
        return self.max_message

    def remedy(self, size: int) -> str:
        """Returns what a user can do when a message of this size exceeds `largest_message`."""
        enough = 1 << (4 * size - 1).bit_length()
        return f"run with a larger ring: run(flow, ring_bytes={enough}), or --ring-bytes {enough} on the command line"

    def leave(self) -> bool:
        """Tells all peers that this worker sends nothing more. Returns False when there is no room to say so now."""
        return True

    @abstractmethod
    def send(self, worker: int, task: int, parts: Sequence[Buffer]) -> bool:
        """Sends the parts as one message to a task of another worker. Returns False when there is no room now."""

    @abstractmethod
    def receive(self, timeout: float | None) -> Sequence[tuple[int, Buffer]]:
        """Returns (task, message) pairs that have arrived. Waits up to `timeout` seconds for the first one (0: not at
        all, None: until one arrives or `wake` is called). The messages are valid until the next call."""

    @abstractmethod
    def wake(self) -> None:
        """Makes a `receive` that waits return. Any thread may call this."""

    def lost(self) -> list[str]:
        """Describes the messages that were lost since the last call, because their senders died while writing them."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Releases everything. From now on, sending to this worker fails."""
