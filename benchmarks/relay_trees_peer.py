"""The programs of relay_trees.py, one on each host: a root that writes one stream, and relays. No Ray, no tasks.

A program says its transport's address, is told who else is there, and begins. The root drives a RootLog as a source
worker would, and keeps to a credit window: it makes no more entries while so many have not come to all relays.
"""

from __future__ import annotations

import json
import resource
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from penstock.runtime.multicast.relay_log import Action, Connected, RootLog, Send
from penstock.runtime.multicast.tree import Tree
from penstock.runtime.relaying import wire
from penstock.runtime.relaying.relay import Relay
from penstock.runtime.relaying.relay_loop import RelayLoop
from penstock.runtime.transport.base import Buffer
from penstock.runtime.transport.tcp import TcpTransport

KEY = b"the secret of one benchmark, 32 b"
STREAM = (0, 1, 0)  # of worker 0, in its first life
_STAMP = struct.Struct("<q")
_NS = 1_000_000_000
_SLEEP_NS = 1_500_000  # a transport waits for whole milliseconds
_LIMIT_NS = 60 * _NS


class _Relay(Relay):
    """Notes when each body came, and how old it was."""

    def __init__(self, number: int, transport: TcpTransport) -> None:
        super().__init__(number, transport)
        self.arrived: list[int] = []
        self.ages: list[int] = []

    def _process(self, stream_id: Any, stream: Any, number: int, message: bytes) -> None:
        if message[0] == wire.ENTRY:
            now = time.monotonic_ns()
            self.arrived.append(now)
            self.ages.append(now - _STAMP.unpack_from(message, wire.HEAD_BYTES)[0])


class Root:
    """A RootLog with its transport."""

    def __init__(self, transport: TcpTransport, tree: Tree, addresses: dict[int, str]) -> None:
        self._transport = transport
        self._log = RootLog(tree)
        self._waiting: dict[int, deque[tuple[Buffer, ...]]] = {relay: deque() for relay in addresses}
        self._absent = set(tree.destinations)  # relays that have not said anything
        transport.connect(addresses)
        join = wire.head(wire.JOIN, STREAM, 0, 0) + wire.write_tree(tree)
        for relay in tree.destinations:
            self._put(relay, (join,))

    def run(self, size: int, seconds: float, rate: int, window: int) -> int:
        """Sends bodies for so long, `rate` a second or as many as it can, and returns when all relays have them."""
        self._wait(lambda: not self._absent)
        rest = bytes(size - _STAMP.size)
        started = time.monotonic_ns()
        until, sent = started + int(seconds * _NS), 0
        while True:
            now = time.monotonic_ns()
            due = started + sent * _NS // rate if rate else now
            if due >= until:
                break
            if due - now > 0:
                if due - now < _SLEEP_NS:
                    time.sleep((due - now) / _NS)
                    self._take(0.0)
                else:
                    self._take((due - now - _SLEEP_NS) / _NS)
            elif self._log.kept >= window:
                self._take(None)
            else:
                number = self._log.next
                self._act(self._log.append((wire.head(wire.ENTRY, STREAM, number, number), _STAMP.pack(due) + rest)))
                sent += 1
                self._take(0.0)
        self._wait(lambda: not self._log.kept)
        return sent

    def _wait(self, there: Any) -> None:
        until = time.monotonic_ns() + _LIMIT_NS
        while not there():
            assert time.monotonic_ns() < until, "the relays do not answer"
            self._take(0.1)

    def _take(self, wait_s: float | None) -> None:
        for sender, message in self._transport.receive(wait_s):
            head = wire.read(message)
            if head.kind == wire.ASK:
                self._act(self._log.asked(sender, head.number))
            elif head.kind == wire.DELIVERED:
                self._absent.discard(sender)
                self._log.receipt(sender, head.number - 1)
        for relay, waiting in self._waiting.items():
            while waiting and self._transport.send(relay, 0, waiting[0]):
                waiting.popleft()

    def _act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                assert isinstance(action.entry, tuple)
                self._put(action.to, action.entry)
            else:
                assert isinstance(action, Connected)

    def _put(self, relay: int, parts: tuple[Buffer, ...]) -> None:
        waiting = self._waiting[relay]
        if waiting or not self._transport.send(relay, 0, parts):
            waiting.append(parts)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(settings: dict[str, Any]) -> None:
    """Plays its part: "root" or "relay"."""
    number = settings["number"]
    transport = TcpTransport(number, KEY, settings["host"])
    print(json.dumps(transport.address), flush=True)
    told = json.loads(sys.stdin.readline())
    addresses = {int(peer): address for peer, address in told["addresses"].items()}
    before = _cpu_s()
    done: dict[str, Any]
    if settings["part"] == "root":
        tree = Tree.of_parents(number, [(node, parent) for node, parent in told["tree"]])
        root = Root(transport, tree, {peer: at for peer, at in addresses.items() if peer != number})
        done = {"sent": root.run(settings["bytes"], settings["seconds"], settings["rate"], settings["window"])}
    else:
        relay = _Relay(number, transport)
        relay.use({0: (addresses.pop(0), STREAM[1])}, addresses)
        loop = RelayLoop(relay, transport)

        def end() -> None:
            sys.stdin.readline()
            loop.end()

        threading.Thread(target=end, daemon=True).start()
        loop.run()
        done = {"arrived": relay.arrived, "ages": relay.ages}
    print(json.dumps({**done, "cpu_s": _cpu_s() - before}), flush=True)
    transport.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
