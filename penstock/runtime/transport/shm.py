"""Between the workers of one node: each worker's inbox is an OSRBuffer ring, written by all the others (PAPERS T1-T8).

A message is copied once, by its sender into the ring; small ones are copied out, large ones are decoded in place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from penstock.runtime.ring import Message, Producer, Ring, Wait
from penstock.runtime.transport.base import Buffer, Transport

#: T8: a ring works best at 50 to 100 times the message size, so messages aim at this share of the ring.
MESSAGES_PER_RING = 64

_DRAIN_MESSAGES = 256


class ShmTransport(Transport):
    """One worker's end: its own ring, and a producer on the ring of each peer it sends to."""

    def __init__(self, ring_bytes: int, wait: Wait = Wait.DEFAULT) -> None:
        self._ring = Ring.create(ring_bytes)
        self._consumer = self._ring.consumer(wait=wait)
        self._peers: dict[int, tuple[Ring, Producer]] = {}
        self.max_message = self._ring.max_message
        self.target_message = max(256, self._ring.capacity // MESSAGES_PER_RING)
        self._lent: list[tuple[memoryview, Message]] = []  # large messages of the last receive, still in the ring

    @property
    def address(self) -> str:
        """Where others attach, while this process lives."""
        return self._ring.address

    def connect(self, addresses: Mapping[int, str]) -> None:
        """Attach to the rings of other workers, by worker index."""
        for worker, address in addresses.items():
            ring = Ring.attach(address)
            self._peers[worker] = (ring, ring.producer())
            self.max_message = min(self.max_message, ring.max_message)

    def send(self, worker: int, task: int, parts: Sequence[Buffer]) -> bool:
        return self._peers[worker][1].try_write_parts(task, parts)

    def receive(self, timeout: float | None) -> Sequence[tuple[int, Buffer]]:
        for view, message in self._lent:
            view.release()
            message.release()
        self._lent.clear()
        return [
            (task, payload if isinstance(payload, bytes) else self._lend(payload))
            for task, payload in self._consumer.drain(_DRAIN_MESSAGES, timeout)
        ]

    def _lend(self, message: Message) -> memoryview:
        view = message.view()
        self._lent.append((view, message))
        return view

    def wake(self) -> None:
        self._ring.wake()

    def lost(self) -> list[str]:
        return [
            f"process {skip.producer_pid} died while it wrote {skip.bytes:,} bytes to process {os.getpid()}"
            for skip in self._consumer.skips()
        ]

    def close(self) -> None:
        for ring, producer in self._peers.values():
            producer.close()
            ring.close()
        self._consumer.close()
        self._ring.close()
