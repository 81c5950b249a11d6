"""The programs of relay_keyed.py, some on each of two hosts: sources, sinks, and relays that forward what goes to one
worker. No Ray, no tasks; the transports are those of jobs.

A source writes messages to the sinks in turn, as a sender does whose records go by key. It keeps to the credit window
of a job for each sink. In the form "relays" it gives its messages to the relay of its host through the ring. That relay
sends what has come from all workers of its host in one message to the relay of the other host, which hands the parts to
the rings of its workers. In the form "together" there are no relays, and a source puts up to 16 messages to a sink into
one: relays gain by sending together as well. Grants go straight to the sources in all forms.
"""

from __future__ import annotations

import json
import resource
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from penstock.runtime.exchange.channel import CREDIT_WINDOW_BYTES
from penstock.runtime.transport.base import Buffer
from penstock.runtime.transport.routed import RoutedTransport
from penstock.runtime.transport.shm import ShmTransport
from penstock.runtime.transport.tcp import TcpTransport

KEY = b"the secret of one benchmark, 32 b"
SOURCES, SINKS, RELAY_OUT, RELAY_IN = 0, 100, 1000, 1001
_STAMP = struct.Struct("<Iq")  # the source, and when the message was due; 0: the source has ended
_PART = struct.Struct("<II")  # in a message between relays, before each part: the worker, and the size of the part
_GRANT = struct.Struct("<II")  # the sink, and the number of bytes
_SEVERAL = 99  # what has this in place of a task has several parts
_AT_ONCE = 16  # a source at full load looks for grants after so many messages
_TOGETHER = 256 * 1024  # bytes of a message between relays
_NS = 1_000_000_000
_SLEEP_NS = 1_500_000  # a transport waits for whole milliseconds


class _Program:
    """What all have: a transport, and messages that wait for room."""

    def __init__(self, transport: RoutedTransport) -> None:
        self.transport = transport
        self._waiting: dict[int, deque[tuple[int, bytes]]] = {}

    def put(self, worker: int, task: int, parts: list[Buffer]) -> None:
        """Sends a message, after those that wait for room."""
        waiting = self._waiting.get(worker)
        if waiting or not self.transport.send(worker, task, parts):
            self._waiting.setdefault(worker, deque()).append((task, b"".join(parts)))

    def flush(self) -> bool:
        """Sends what has waited for room. Returns whether nothing waits any more."""
        for worker, waiting in list(self._waiting.items()):
            while waiting and self.transport.send(worker, waiting[0][0], (waiting[0][1],)):
                waiting.popleft()
            if not waiting:
                del self._waiting[worker]
        return not self._waiting

    def receive(self, wait_s: float | None) -> Any:
        """Returns what has come, and waits for the first message only a moment while something waits for room."""
        return self.transport.receive(wait_s if self.flush() else min(wait_s or 0.001, 0.001))


class _Source(_Program):
    """Sends to all sinks in turn."""

    def run(self, number: int, settings: dict[str, Any], sinks: list[int]) -> dict[str, Any]:
        through, together = settings["form"] == "relays", settings["form"] == "together"
        collected: dict[int, list[Buffer]] = {sink: [] for sink in sinks}
        size, rate = settings["bytes"], settings["rate"]
        rest = bytes(size - _STAMP.size)
        outstanding = dict.fromkeys(sinks, 0)
        started = time.monotonic_ns()
        until = started + int(settings["seconds"] * _NS)
        sent = 0
        while True:
            now = time.monotonic_ns()
            due = started + sent * _NS // rate if rate else now
            if due >= until:
                break
            sink = sinks[sent % len(sinks)]
            wait_s = 0.0
            if due > now:
                wait_s = max(0.0, (due - now - _SLEEP_NS) / _NS)
                if not wait_s:
                    time.sleep((due - now) / _NS)
            elif outstanding[sink] >= CREDIT_WINDOW_BYTES:
                wait_s = 0.1
            else:
                parts: list[Buffer] = [_STAMP.pack(number, due), rest]
                if together:
                    collected[sink] += (_PART.pack(sink, size), *parts)
                else:
                    self.put(RELAY_OUT if through else sink, sink, parts)
                outstanding[sink] += size
                sent += 1
                if sent % _AT_ONCE and not self._waiting and not rate:
                    continue
            if together:
                self._put_collected(collected)
            for _, grant in self.receive(wait_s):
                sink, granted = _GRANT.unpack(grant)
                outstanding[sink] -= granted
        self._put_collected(collected)
        for sink in sinks:
            self.put(RELAY_OUT if through else sink, sink, [_STAMP.pack(number, 0)])
        while not self.flush():
            self.transport.receive(0.001)
        return {"sent": sent}

    def _put_collected(self, collected: dict[int, list[Buffer]]) -> None:
        for sink, parts in collected.items():
            if parts:
                self.put(sink, _SEVERAL, parts)
                collected[sink] = []


class _Sink(_Program):
    """Takes what comes, and grants credit in lots of half a credit window."""

    def run(self, number: int, settings: dict[str, Any]) -> dict[str, Any]:
        owed = dict.fromkeys(range(settings["workers"]), 0)
        ended = 0
        arrived: list[int] = []
        ages: list[int] = []
        while ended < len(owed):
            for message in _singly(self.receive(None)):
                source, due = _STAMP.unpack_from(message)
                if not due:
                    ended += 1
                    continue
                now = time.monotonic_ns()
                arrived.append(now)
                ages.append(now - due)
                owed[source] += len(message)
                if 2 * owed[source] >= CREDIT_WINDOW_BYTES:
                    self.put(source, source, [_GRANT.pack(number, owed[source])])
                    owed[source] = 0
        while not self.flush():
            self.transport.receive(0.001)
        every = max(1, len(ages) // 20_000)
        return {"arrived": len(arrived), "first": arrived[0], "last": arrived[-1], "ages": ages[::every]}


class _RelayOut(_Program):
    """Sends what comes from the workers of its host to the other relay, together."""

    def step(self) -> None:
        """Takes what has come, and forwards it."""
        parts: list[Buffer] = []
        size = 0
        for worker, message in self.receive(None):
            parts += (_PART.pack(worker, len(message)), message)
            size += len(message)
            if size >= _TOGETHER:
                self.put(RELAY_IN, 0, parts)
                parts, size = [], 0
        if parts:
            self.put(RELAY_IN, 0, parts)


class _RelayIn(_Program):
    """Hands what comes to the workers of its host."""

    def step(self) -> None:
        """Takes what has come, and hands it over."""
        for _, message in self.receive(None):
            for worker, part in _parts(message):
                self.put(worker, 0, [part])


def _parts(message: Buffer) -> Iterator[tuple[int, memoryview]]:
    """The parts of a message, each with its worker."""
    view, at = memoryview(message), 0
    while at < len(view):
        worker, size = _PART.unpack_from(view, at)
        at += _PART.size
        yield worker, view[at : at + size]
        at += size


def _singly(messages: Any) -> Iterator[Buffer]:
    for task, message in messages:
        if task == _SEVERAL:
            for _, part in _parts(message):
                yield part
        else:
            yield message


def _relay(relay: _RelayOut | _RelayIn) -> None:
    over = threading.Event()

    def end() -> None:
        sys.stdin.readline()
        over.set()
        relay.transport.wake()

    threading.Thread(target=end, daemon=True).start()
    while not over.is_set():
        relay.step()


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(settings: dict[str, Any]) -> None:
    """Plays the part that its number says."""
    number, host = settings["number"], settings["host"]
    transport = RoutedTransport(ShmTransport(number), {"tcp": TcpTransport(number, KEY, host)}, host)
    print(json.dumps(transport.address), flush=True)
    addresses = {int(peer): address for peer, address in json.loads(sys.stdin.readline()).items()}
    transport.connect({peer: address for peer, address in addresses.items() if peer != number})
    print(json.dumps("connected"), flush=True)
    sys.stdin.readline()
    before = _cpu_s()
    done: dict[str, Any] = {}
    if number == RELAY_OUT:
        _relay(_RelayOut(transport))
    elif number == RELAY_IN:
        _relay(_RelayIn(transport))
    elif number >= SINKS:
        done = _Sink(transport).run(number, settings)
    else:
        done = _Source(transport).run(number, settings, [peer for peer in addresses if SINKS <= peer < RELAY_OUT])
    print(json.dumps({**done, "cpu_s": _cpu_s() - before}), flush=True)
    sys.stdin.readline()
    transport.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
