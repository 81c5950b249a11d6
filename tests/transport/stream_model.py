"""One stream between two workers over connections that are cut at any byte, without sockets and without a clock.

The real ends of a stream (`Outgoing` and `Incoming` of the TCP transport) run over pipes that this module cuts,
splits, delays and replaces by chance. One seed is one run:

    python -m tests.transport.stream_model --seeds 10000 --seed 1
"""

from __future__ import annotations

import argparse
import random
import select
from collections import deque
from typing import Any
from unittest import mock

from penstock.runtime.transport import tcp
from penstock.runtime.transport.base import Buffer
from penstock.runtime.transport.framing import HEAD_BYTES, LARGEST_BODY, FrameDecoder
from penstock.runtime.transport.peer_handshake import Process
from penstock.runtime.transport.peer_links import Link
from penstock.runtime.transport.send_stream import SendStream

_ENDING = 2_000  # steps after which a run without faults must have ended


class Pipe:
    """A connection: bytes under way in both directions, each with a limit, until it is cut."""

    def __init__(self, rng: random.Random, limit: int) -> None:
        self.rng = rng
        self.there = bytearray()
        self.back = bytearray()
        self.limit = limit or rng.choice((10, 100, 1000, 100_000))
        self.cut = False

    def take(self, queue: bytearray, data: Any) -> int:
        """Takes some of the bytes that are sent."""
        if self.cut:
            raise ConnectionResetError
        size = min(len(data), self.limit - len(queue))
        if size <= 0:
            raise BlockingIOError
        size = self.rng.choice((size, size, self.rng.randint(1, size)))
        queue += bytes(data[:size])
        return size

    def give(self, queue: bytearray, most: int) -> bytes:
        """Gives some of the bytes that have come."""
        if not queue:
            if self.cut:
                if self.rng.random() < 0.5:
                    raise ConnectionResetError
                return b""
            raise BlockingIOError
        size = min(most, len(queue))
        size = self.rng.choice((size, size, self.rng.randint(1, size)))
        data = bytes(queue[:size])
        del queue[:size]
        return data

    def break_(self) -> None:
        """Cuts the connection. Of the bytes under way, some still arrive."""
        if not self.cut:
            self.cut = True
            for queue in (self.there, self.back):
                del queue[self.rng.randint(0, len(queue)) :]


class SenderSide:
    """A pipe as the socket of the sender."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe

    def send(self, data: Any) -> int:
        return self.pipe.take(self.pipe.there, data)

    def sendmsg(self, parts: Any) -> int:
        return self.pipe.take(self.pipe.there, b"".join(parts))

    def recv(self, size: int) -> bytes:
        return self.pipe.give(self.pipe.back, size)


class ReceiverSide:
    """A pipe as the socket of the receiver."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe

    def send(self, data: Any) -> int:
        return self.pipe.take(self.pipe.back, data)

    def recv_into(self, view: memoryview) -> int:
        data = self.pipe.give(self.pipe.there, len(view))
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self.pipe.break_()


class Owner:
    """What a TcpTransport does for its streams."""

    def watch(self, connection: Any, events: int, handler: Any) -> None:
        """The model calls the handlers when it likes."""

    def watch_also(self, connection: Any, events: int) -> None:
        """As for `watch`."""

    def unwatch(self, connection: Any) -> None:
        connection.pipe.break_()

    def lost_connection(self, worker: int, connection: Any, useful: bool) -> None:
        """The model connects again when it likes."""

    def stop_connecting(self, worker: int) -> None:
        raise AssertionError("the receiver has closed its inbox")

    def has_room(self) -> None:
        """The model looks for room by itself."""

    def where(self, worker: int) -> str:
        raise AssertionError("an end does not follow the protocol")

    def read_again(self, incoming: Any) -> None:
        raise AssertionError("this is not TLS")


class Run:
    """One run; see the module's docstring."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        first = rng.choice((0, 0, (1 << 64) - rng.randint(1, 5000)))
        self.capacity = rng.choice((4096, 16_384))
        owner: Any = Owner()
        self.out = tcp.Outgoing(owner, 1, SendStream(self.capacity, first, first))
        self.incoming = tcp.Incoming(owner, 0, FrameDecoder(LARGEST_BODY, first, first))
        self.links = 0
        self.waiting: deque[Link] = deque()  # connections that the receiver has not taken over yet
        self.sent: list[tuple[int, bytes]] = []
        self.got: list[tuple[int, bytes]] = []
        self.connect()

    def connect(self, limit: int = 0) -> None:
        """A new connection has been made. The ends take it over when they come to it."""
        pipe = Pipe(self.rng, limit)
        self.links += 1
        self.waiting.append(Link(Process(0, b""), ReceiverSide(pipe), True, self.links, self.capacity))  # type: ignore[arg-type]
        self.out.adopt(SenderSide(pipe))  # type: ignore[arg-type]

    def send(self) -> None:
        """The sender sends a message, if there is room."""
        rng = self.rng
        size = rng.choice((0, 1, rng.randint(0, 200), rng.randint(0, 2000), self.capacity // 2 - HEAD_BYTES))
        body = rng.randbytes(size)
        task = len(self.sent) % 1000
        cut = rng.randint(0, size)
        parts = (body[:cut], body[cut:])
        if self.out.writable and rng.random() < 0.5 and self.out.send_now(task, parts, size):
            self.sent.append((task, body))
        elif self.out.stream.put(task, parts, size):
            self.sent.append((task, body))
            if self.out.writable:
                self.out.write()
        elif rng.random() < 0.01:
            self.out.stream.region.grow(2 * self.out.stream.region.capacity)

    def read(self) -> None:
        """The receiver reads. It sometimes takes over a connection first."""
        if self.waiting and self.rng.random() < 0.3:
            if self.rng.random() < 0.1:
                self.waiting.reverse()  # an older connection may be handed over later
            self.incoming.adopt(self.waiting.popleft())
        messages: list[tuple[int, Buffer]] = []
        self.incoming.read(self.rng.choice((select.EPOLLIN, select.EPOLLIN | select.EPOLLOUT)), messages)
        self.got += [(task, bytes(body)) for task, body in messages]
        assert self.got == self.sent[: len(self.got)], f"message {len(self.got)} is wrong"

    def events(self) -> None:
        """The sender takes acknowledgements, and writes."""
        self.out.on_event(self.rng.choice((select.EPOLLIN, select.EPOLLOUT, select.EPOLLIN | select.EPOLLOUT)), [])

    def cut(self) -> None:
        """The present connection is cut, or one of those that nobody has taken over yet."""
        connections = [self.out.connection, self.incoming.connection, *(link.connection for link in self.waiting)]
        found: list[Any] = [one for one in connections if one is not None]
        if found:
            self.rng.choice(found).pipe.break_()

    def run(self, steps: int) -> None:
        """Does so many steps by chance, then goes on without faults until everything has come."""
        kinds = (self.send, self.read, self.events, self.cut, self.connect)
        weights = (self.rng.choice((2, 10)), self.rng.choice((2, 10)), 5, self.rng.choice((0.05, 0.5)), 0.2)
        for step in self.rng.choices(kinds, weights, k=steps):
            step()
        self.connect(100_000)
        for _ in range(_ENDING):
            self.out.stream.ask()
            if self.out.writable:
                self.out.write()
            if self.out.connection is None or self.out.connection.pipe.cut:  # type: ignore[union-attr]
                self.connect(100_000)
            self.read()
            self.events()
            if len(self.got) == len(self.sent) and not self.out.stream.region.outstanding:
                return
        raise AssertionError(f"{len(self.got)} of {len(self.sent)} messages came; {self.out.stream.region.outstanding}")


def check(seed: int, steps: int = 400) -> None:
    """Runs one seed."""
    # Buffers are small here, so that messages need one of their own.
    with mock.patch.object(tcp, "_BUFFER_BYTES", 1024), mock.patch.object(tcp, "_MOVED_AT_ONCE", 64):
        try:
            Run(seed).run(steps)
        except Exception as error:
            raise AssertionError(
                f"seed {seed}: {error}; repeat: python -m tests.transport.stream_model --seeds 1 --seed {seed}"
            ) from error


def main() -> None:
    """Runs many seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for seed in range(options.seed, options.seed + options.seeds):
        check(seed)
    print(f"{options.seeds} runs from seed {options.seed}: every message came once and in order")


if __name__ == "__main__":
    main()
