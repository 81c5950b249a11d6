"""A bad network between two workers: a proxy that delays, splits, cuts and resets connections by chance."""

from __future__ import annotations

import random
import selectors
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Any

_PIECE_BYTES = 65536


class _Way:
    """One direction of a connection."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source = source
        self.target = target
        self.waiting = b""
        self.not_before = 0.0


class Proxy:
    """Listens in the place of a worker, and forwards to it.

    `cut_share`: of the forwarded pieces, so many are the last ones of their connection, and are forwarded in part.
    """

    def __init__(self, target: tuple[str, int], seed: int, cut_share: float = 0.02, delay_s: float = 0.002) -> None:
        self.rng = random.Random(seed)
        self._target = target
        self.cut_share = cut_share
        self._delay_s = delay_s
        self.cuts = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._ways: list[_Way] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def address(self, of: str) -> str:
        """The address of a worker, by way of this proxy."""
        return f"tcp://127.0.0.1:{self.port}/{of.rpartition('/')[2]}"

    def close(self) -> None:
        """Ends the proxy and its connections."""
        self._closed = True
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(0.002 if any(way.waiting for way in self._ways) else 0.02):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._ways:
                    self._read(key.data)
            for way in self._ways[:]:
                if way in self._ways and way.waiting and time.monotonic() >= way.not_before:
                    self._write(way)
        for way in self._ways[:]:
            self._cut(way)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            one, _ = self._listener.accept()
            try:
                other = socket.create_connection(self._target)
            except OSError:
                one.close()
                return
            for end in (one, other):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for way in (_Way(one, other), _Way(other, one)):
                self._ways.append(way)
                self._selector.register(way.source, selectors.EVENT_READ, way)

    def _read(self, way: _Way) -> None:
        if way.waiting:
            return
        rng = self.rng
        try:
            data = way.source.recv(rng.choice((1, 20, 1000, _PIECE_BYTES, _PIECE_BYTES)))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._cut(way)
            return
        way.waiting = data
        self._selector.unregister(way.source)
        way.not_before = time.monotonic() + (rng.random() * self._delay_s if rng.random() < 0.2 else 0)

    def _write(self, way: _Way) -> None:
        rng = self.rng
        last = rng.random() < self.cut_share
        piece = way.waiting[: rng.randint(0, len(way.waiting))] if last else way.waiting
        try:
            sent = way.target.send(piece) if piece else 0
        except BlockingIOError:
            return
        except OSError:
            self._cut(way)
            return
        if last:
            self.cuts += 1
            self._cut(way)
            return
        way.waiting = way.waiting[sent:]
        if not way.waiting:
            self._selector.register(way.source, selectors.EVENT_READ, way)

    def _cut(self, way: _Way) -> None:
        reset = self.rng.random() < 0.5
        for one in [one for one in self._ways if {one.source, one.target} == {way.source, way.target}]:
            self._ways.remove(one)
            with suppress(KeyError, ValueError):
                self._selector.unregister(one.source)
        for end in (way.source, way.target):
            with suppress(OSError):
                if reset:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.close()


def host_and_port(transport: Any) -> tuple[str, int]:
    """Where a worker listens."""
    host, _, port = transport.address.removeprefix("tcp://").partition("/")[0].rpartition(":")
    return host, int(port)
