"""Transports: what carries messages between the workers of a job (docs/papers.md: T1, W7).

A transport belongs to one worker. Only the worker's run loop uses it, except for `wake`, which any thread may call. A
message goes to a task of a worker, and the order of messages is kept for each pair of a sending and a receiving worker.
Sending must never wait. "No room" is an answer: a worker that waited to send could not receive what others wait to send
to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.runtime.errors import PenstockError
from penstock.runtime.transport.hop_meter import HopMeter
from penstock.runtime.transport.hop_times import HopTimes

Buffer = bytes | bytearray | memoryview


class PeerGone(PenstockError):
    """The address of a worker is no longer in use. The worker has died, which its watcher will report, or its ring has
    been replaced."""


@dataclass(frozen=True)
class LinkLoad:
    """The system's figures of the connection to a peer of another machine. `acknowledged`: how many bytes the peer's
    system has received over this connection. `rate`: how many it received in a second, as last measured. `full`:
    whether bytes wait, and the sender has sent as much as the network takes. `held_s`: for how long they have waited
    for room at the peer so far."""

    acknowledged: int
    rate: float
    full: bool
    held_s: float


@dataclass(frozen=True)
class SilentLink:
    """A peer that does not answer over the network. `process`: a part of the peer's address that no other process has.
    `at`: where the peer listens, as host:port. `worked`: the peer has answered before. `refused`: nobody listens there,
    as when the process has died. `for_s`: the time since the peer's machine was last heard."""

    peer: int
    process: str
    at: str
    worked: bool
    refused: bool
    for_s: float = field(compare=False)


class Transport(ABC):
    """The end of one worker; see the module's docstring."""

    #: The number of bytes that a message should have: small enough for many messages to be under way, and large enough
    #: to share the fixed cost.
    target_message: int

    #: Measures what messages cost. None: nobody has asked for it yet.
    meter: HopMeter | None = None

    #: Notes how long hops take. None: nobody has asked for it yet.
    times: HopTimes | None = None

    def measure(self) -> None:
        """Measures hops from now on. Any thread may call this."""
        if self.meter is None:
            self.meter = HopMeter()
        if self.times is None:
            self.times = HopTimes()

    @abstractmethod
    def max_message(self, worker: int) -> int:
        """Returns the number of bytes of the largest message that can be sent to a worker at present."""

    def largest_message(self, worker: int) -> int:
        """Returns the number of bytes of the largest message that can be sent to a worker at all. When the receiver has
        no room for it yet, `send` asks the receiver to make room, and returns that there is none meanwhile."""
        return self.max_message(worker)

    def remedy(self, size: int) -> str:
        """Returns the advice to users for a message of this size, which exceeds `largest_message`."""
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


class PeerTransport(Transport):
    """A transport between processes, whose peers come and go: a worker that has died is dropped, and its next process
    is connected under another address."""

    @property
    @abstractmethod
    def address(self) -> str:
        """The address at which others connect while this process lives. It changes only when a `receive` has run, and
        an earlier address stays valid for the peers that have connected to it."""

    @property
    @abstractmethod
    def ring_bytes(self) -> int:
        """The present number of bytes of this worker's inbox."""

    @abstractmethod
    def connect(self, addresses: Mapping[int, str]) -> None:
        """Connects to other workers, by worker index. A worker that is connected already stays so. Raises PeerGone when
        one has died since its address was known; the workers before it are connected then."""

    @abstractmethod
    def drop(self, workers: Iterable[int]) -> dict[int, int]:
        """Forgets workers that have died. Returns the sizes of their inboxes as far as they are known, by worker index,
        because messages may have been made for them."""

    def forget(self, peers: Iterable[int]) -> None:
        """Drops peers that have no successors, such as relays, each life of which has a number of its own."""
        self.drop(peers)

    def excuse(self, pid: int) -> None:
        """Reports no loss of the message that this process of the same machine was writing when it died."""

    def reasons(self) -> dict[int, str]:
        """Returns, for each connected worker, a sentence about the transport that carries its messages, and the reason;
        empty when there was no choice. Any thread may call this."""
        return {}

    def sent_bytes(self) -> dict[int, int]:
        """Returns the number of bytes sent over a network to each connected peer, with the heads of frames and without
        repetitions after a broken connection. Any thread may call this."""
        return {}

    def links(self) -> dict[int, LinkLoad]:
        """Returns the system's figures of the connections to peers of other machines, as far as it has any."""
        return {}

    def silent_links(self) -> list[SilentLink]:
        """Returns the connected peers that do not answer over a network. A peer whose process is stopped or busy is not
        among them, because its machine answers. Any thread may call this."""
        return []


class NetworkTransport(PeerTransport):
    """A transport between machines. A thread can wait for its messages while the run loop sleeps elsewhere."""

    #: The last `receive` found something to do, even if no message came of it.
    worked = False

    @abstractmethod
    def fileno(self) -> int:
        """Returns a descriptor that is readable when `receive(0)` would return messages, or has something to do."""
