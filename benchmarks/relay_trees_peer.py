"""The programs of relay_trees.py, one on each host: a root that writes one stream, and relays. No Ray, no tasks.

A program says its transport's address, is told who else is there, and begins. The root drives a RootLog as a source
worker would, and keeps to a credit window: it makes no more entries while so many have not come to all relays. It can
also change from one tree to the other again and again.
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
from penstock.runtime.multicast.tree_switch import SwitchProgress, TreeSwitch
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
    """A RootLog with its transport. `trees`: the first is the one to begin with."""

    def __init__(self, transport: TcpTransport, trees: list[Tree], addresses: dict[int, str]) -> None:
        tree = trees[0]
        self.switches: list[dict[str, Any]] = []
        self._trees = trees
        self._version = 0
        self._switching: SwitchProgress | None = None
        self._begun = 0  # when the present or the last switch began
        self._announced: int | None = None
        self._transport = transport
        self._log = RootLog(tree)
        self._waiting: dict[int, deque[tuple[Buffer, ...]]] = {relay: deque() for relay in addresses}
        self._absent = set(tree.destinations)  # relays that have not said anything
        transport.connect(addresses)
        join = wire.head(wire.JOIN, STREAM, 0, 0) + wire.write_tree(tree)
        for relay in tree.destinations:
            self._put(relay, (join,))

    def run(self, size: int, seconds: float, rate: int, window: int, switch_s: float) -> int:
        """Sends bodies for so long, `rate` a second or as many as it can, and returns when all relays have them. Begins
        a switch each `switch_s` seconds. 0: never."""
        self._wait(lambda: not self._absent)
        rest = bytes(size - _STAMP.size)
        started = self._begun = time.monotonic_ns()
        until, sent = started + int(seconds * _NS), 0
        while True:
            now = time.monotonic_ns()
            if self._switching is not None:
                self._continue(now, sent)
            elif switch_s and now - self._begun >= switch_s * _NS:
                self._begin_switch(now)
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

    def _begin_switch(self, now: int) -> None:
        before, after = self._trees[self._version % 2], self._trees[(self._version + 1) % 2]
        self._version += 1
        self._begun = now
        head = wire.head(wire.TREE, STREAM, 0, self._version)
        switch = TreeSwitch(before, wire.Announced(self._version, after, head + wire.write_tree(after)))
        self._switching, self._announced = SwitchProgress(switch, [0]), None
        for node in switch.connecting:
            self._put(node, (wire.head(wire.CONNECT, STREAM, after.parent[node], self._version),))

    def _continue(self, now: int, sent: int) -> None:
        progress = self._switching
        assert progress is not None
        if self._announced is None and progress.connected:
            announced = self._announced = self._log.next
            head = wire.head(wire.TREE, STREAM, announced, self._version)
            tree = progress.switch.after
            self._act(self._log.append(wire.Announced(self._version, tree, head + wire.write_tree(tree))))
            progress.announced({0: announced})
            moved = [handover.node for handover in progress.switch.handovers]
            self.switches.append({"sent": sent, "moved": moved, "connected_ns": now - self._begun})
        elif self._announced is not None and progress.over:
            self._log.settle(self._announced)
            for relay in self._waiting:
                self._put(relay, (wire.head(wire.SETTLE, STREAM, self._announced),))
            self.switches[-1]["took_ns"] = now - self._begun
            self._switching = None

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
                if self._switching is not None:
                    self._switching.receipt(sender, 0, head.number - 1)
            elif head.kind == wire.CONNECTING:
                self._act(self._log.connected(sender, head.place))
            elif head.kind == wire.CONNECTED and self._switching is not None:
                self._switching.connection(head.number, 0, head.place)
        for relay, waiting in self._waiting.items():
            while waiting and self._transport.send(relay, 0, waiting[0]):
                waiting.popleft()

    def _act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                entry = action.entry
                self._put(action.to, (entry.message,) if isinstance(entry, wire.Announced) else entry)
            elif isinstance(action, Connected) and self._switching is not None:
                self._switching.connection(action.child, 0, action.version)

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
        trees = [Tree.of_parents(number, [(node, parent) for node, parent in pairs]) for pairs in told["trees"]]
        root = Root(transport, trees, {peer: at for peer, at in addresses.items() if peer != number})
        sent = root.run(*(settings[name] for name in ("bytes", "seconds", "rate", "window", "switch_s")))
        done = {"sent": sent, "switches": root.switches}
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
