"""What carries messages between the workers of a job.

A transport belongs to one worker and is used by its run loop alone; only `wake` may be called from other threads. A
message goes to a task of a worker; order is kept per (sending worker, receiving worker). Sending never waits: "no
room" is an answer, because a worker that waited to send could not take in what others wait to send to it
(invariant 2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from penstock.runtime.errors import PenstockError

Buffer = bytes | bytearray | memoryview


class PeerGone(PenstockError):
    """There is nobody at a worker's address any more: it has died, which whoever watches it will say, or moved."""


class Transport(ABC):
    """One worker's end; see the module's docstring."""

    #: Bytes of the largest message that can be sent as things are.
    max_message: int

    #: Bytes that a message should have: small enough for many to be under way, large enough to share its fixed cost.
    target_message: int

    @property
    def largest_message(self) -> int:
        """Bytes of the largest message that can be sent when the receiver makes room for it: `send` asks it to, and
        says that there is no room until there is."""
        return self.max_message

    def remedy(self, size: int) -> str:
        """What helps when a message of so many bytes is above `largest_message`."""
        return f"run with a larger ring: run(flow, ring_bytes={1 << (4 * size - 1).bit_length()})"

    def leave(self) -> bool:
        """This worker sends nothing more; False when there is no room now to say so."""
        return True

    @abstractmethod
    def send(self, worker: int, task: int, parts: Sequence[Buffer]) -> bool:
        """Send the parts as one message to a task of another worker; False when there is no room now."""

    @abstractmethod
    def receive(self, timeout: float | None) -> Sequence[tuple[int, Buffer]]:
        """(task, message) pairs that have arrived, waiting up to `timeout` seconds for the first (0: not at all,
        None: until something comes or `wake` is called). Messages are valid until the next call."""

    @abstractmethod
    def wake(self) -> None:
        """Make a waiting receive return, from any thread."""

    def lost(self) -> list[str]:
        """What was lost on the way in since the last call, in words: messages whose sender died while writing."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Release what is held; sends to this worker fail from now on."""
