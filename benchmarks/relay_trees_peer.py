"""The programs of relay_trees.py and rate_steps.py, one on each host: a source worker with the root of one stream, and
relays, each with a worker that only counts. No Ray, no tasks.

A program says its transport's address, is told who else is there, and begins. The root is that of a job: an OutLog with
a channel to each worker, whose stream a MulticastRoot takes along its tree, with the credit of the receivers. The tree
has a limit that stays or changes every so often, or that adjusts itself. The thread of the root may have other work for
each body, as functions of users are.

A relay and its worker are one process here, so that the links are measured and not the processor: what the relay hands
to its worker is taken up at once, and one TcpTransport is the end of both.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

from penstock.runtime.exchange.channel import RemoteInChannel, Turn
from penstock.runtime.exchange.log import OutLog
from penstock.runtime.exchange.message import CREDIT, encode_body, read_head
from penstock.runtime.multicast import least_change
from penstock.runtime.multicast.building import sequential
from penstock.runtime.multicast.tree import Tree
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.relaying.relay import Relay
from penstock.runtime.relaying.relay_loop import RelayLoop
from penstock.runtime.relaying.relay_map import RelayMap
from penstock.runtime.relaying.root import MulticastRoot
from penstock.runtime.relaying.wire import FIRST_RELAY
from penstock.runtime.transport.base import Buffer, LinkLoad, PeerTransport
from penstock.runtime.transport.tcp import TcpTransport
from penstock.runtime.worker.processor_time import CLOCKS

KEY = b"the secret of one benchmark, 32 b"
LIFE = 1
#: The bodies by which the channels join the stream. They are not counted.
WARMING = 2
_NS = 1_000_000_000
_SLEEP_NS = 1_500_000  # a transport waits for whole milliseconds
_LIMIT_NS = 60 * _NS
_SAMPLE_NS = _NS // 10
_ERRORS = ErrorHandler("relay_trees")


class _Shared(PeerTransport):
    """A TcpTransport as the ends of the relay and of the worker of a host. Worker i, whose task has the number i, is at
    relay FIRST_RELAY + i. The root is worker 0."""

    def __init__(self, tcp: TcpTransport) -> None:
        self.tcp = tcp
        self.worker: _Worker | None = None
        self.target_message = tcp.target_message

    @property
    def address(self) -> str:
        return self.tcp.address

    @property
    def ring_bytes(self) -> int:
        return self.tcp.ring_bytes

    def connect(self, addresses: Mapping[int, str]) -> None:
        self.tcp.connect(addresses)

    def drop(self, workers: Iterable[int]) -> dict[int, int]:
        return self.tcp.drop(workers)

    def links(self) -> dict[int, LinkLoad]:
        return self.tcp.links()

    def max_message(self, worker: int) -> int:
        return self.tcp.max_message(_at(worker))

    def send(self, worker: int, task: int, parts: Sequence[Buffer]) -> bool:
        if self.worker is not None and worker == self.worker.number:
            self.worker.take(b"".join(parts))
            return True
        return self.tcp.send(_at(worker), task, parts)

    def receive(self, timeout: float | None) -> Sequence[tuple[int, Buffer]]:
        messages = self.tcp.receive(timeout)
        own = self.worker
        if own is None:
            return messages
        own.grant()
        others = []
        for task, message in messages:
            if task == own.number:
                own.take(message)
            else:
                others.append((task, message))
        return others

    def wake(self) -> None:
        self.tcp.wake()

    def close(self) -> None:
        self.tcp.close()


def _at(worker: int) -> int:
    return FIRST_RELAY + worker if 0 < worker < FIRST_RELAY else worker


class _Worker:
    """The worker of a relay's host: notes when each body came, and how old it was."""

    def __init__(self, number: int, transport: _Shared, window: int) -> None:
        self.number = number
        self.arrived: list[int] = []
        self.ages: list[int] = []
        self._due: dict[int, RemoteInChannel] = {}
        self._input = RemoteInChannel(number, 0, 0, transport, self._due, window)

    def take(self, message: Buffer) -> None:
        """Takes a message for its task, which takes it up at once."""
        head, input_ = read_head(message), self._input
        turn = input_.sort(head)
        if turn is Turn.EARLY:
            input_.hold(head.number, (head.kind, head.stamp, None, head.body_bytes))
        elif turn is Turn.NOW:
            self._has(head.stamp, head.body_bytes)
            while (following := input_.release()) is not None:
                self._has(following[1], following[3])

    def _has(self, stamp: int, size: int) -> None:
        now = time.monotonic_ns()
        self.arrived.append(now)
        self.ages.append(now - stamp)
        self._input.take(size)

    def grant(self) -> None:
        """Grants what found no room before."""
        for due in list(self._due.values()):
            due.grant()


class Root:
    """The source worker. `limits`: of the tree, one after the other; None: it adjusts itself."""

    def __init__(
        self, transport: TcpTransport, addresses: dict[int, str], limits: Sequence[int | None], window: int
    ) -> None:
        self.switches: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self.started_ns = 0  # when the first body was due
        self.waited_ns = 0  # for how long the source had a body that it could not send
        self._limits = limits
        shared = _Shared(transport)
        self._transport = shared
        thread = threading.get_native_id()
        self._root = MulticastRoot(
            0,
            LIFE,
            shared,
            time.monotonic_ns,
            limits[0],
            stopwatch=time.thread_time_ns,
            core_wait=lambda: CLOCKS.core_wait(thread),
        )
        self._log = OutLog(shared, _ERRORS)
        self._stream = self._root.stream(self._log)
        self._log.stream = self._stream
        self._channels = {}
        for relay in addresses:
            worker = relay - FIRST_RELAY
            self._channels[worker] = self._log.channel(worker, worker, worker, local=False, credit_window=window)
        transport.connect(addresses)
        self._root.use(RelayMap(addresses, {relay - FIRST_RELAY: relay for relay in addresses}))
        self._tree = self._stream.tree
        self._switched = self._started = 0  # how many switches are over, and were when the first body was due
        self._turns = 0  # how many were begun here
        self._begun_ns = 0  # when the last one of them began

    def run(self, size: int, profile: Sequence[tuple[float, int]], switch_s: float, other_us: float) -> int:
        """Sends bodies by a profile of (seconds, bodies a second; 0: as many as it can), and returns how many when all
        relays have them. Takes the next limit each `switch_s` seconds. 0: never. `other_us`: the processor time of
        other work for each body."""
        record = [bytes(2 * size - len(b"".join(encode_body([bytes(size)], 0, _ERRORS)[1])))]
        self._warm(record)
        log = self._log
        started = begun = sampled = self._begun_ns = self.started_ns = time.monotonic_ns()
        self._tree, self._switched = self._stream.tree, self._stream.switches
        self._started = self._switched
        sent = before = 0  # `before`: what was sent before this step
        for seconds, rate in profile:
            until = begun + int(seconds * _NS)
            while True:
                now = time.monotonic_ns()
                self._look(sent, now, switch_s)
                due = begun + (sent - before) * _NS // rate if rate else now
                if now >= sampled:
                    sampled += _SAMPLE_NS
                    self.samples.append(self._sample(sent, now - started, profile))
                if due >= until:
                    break
                if log.queue:
                    if not log.flush():
                        self._take(0.005 if log.stopped_by_room or self._root.waiting else 0.1)
                        self.waited_ns += time.monotonic_ns() - now
                elif due <= now:
                    _work(other_us)
                    log.push(record, due)
                    log.flush()
                    sent += 1
                    self._take(0.0)
                elif due - now < _SLEEP_NS:
                    time.sleep((due - now) / _NS)
                    self._take(0.0)
                else:
                    self._take((min(due, sampled) - now) / _NS)
            begun, before = until, sent
        self._wait(self._all_delivered)
        return sent

    def _warm(self, record: list[bytes]) -> None:
        """Sends bodies until all channels have joined the stream."""
        destinations = len(self._channels)
        self._wait(lambda: len(self._stream.tree.destinations) == destinations)
        for _ in range(WARMING):  # a channel joins when it has sent something
            self._log.push(record, time.monotonic_ns())
            self._wait(self._all_delivered)
        assert len(self._stream.members) == destinations, self._root.status()

    def _all_delivered(self) -> bool:
        log = self._log
        return log.flush() and not log.queue and self._root.idle and all(c.next == log.cache.end for c in log.channels)

    def _look(self, sent: int, now: int, switch_s: float) -> None:
        """Notes what has become of the tree, and begins a switch if it is time."""
        root, stream = self._root, self._stream
        root.tick()
        before, after = self._tree, stream.tree
        if after is not before:
            self._tree = after
            moved = [node for node, parent in after.parent.items() if before.parent.get(node) != parent]
            led = [node for node in after.parent if _way(before, node) != _way(after, node)]
            at_s = (now - self.started_ns) / _NS
            about = {"out_degree": after.out_degree, "load": root.adjuster.status().plain()}
            self.switches.append({"at_s": at_s, "sent": sent, "moved": moved, "led": led, **about})
        if stream.switches != self._switched:
            self._switched = stream.switches
            self.switches[-1]["took_ns"] = now - self._begun_ns if switch_s else stream.switch_ns
        if switch_s and now - self._begun_ns >= switch_s * _NS and self._switched == self._started + self._turns:
            self._turns, self._begun_ns = self._turns + 1, now
            limit = self._limits[self._turns % len(self._limits)]
            assert limit is not None
            root.limit(limit)

    def _sample(self, sent: int, after_ns: int, profile: Sequence[tuple[float, int]]) -> dict[str, Any]:
        stream = self._stream
        return {
            "at_s": after_ns / _NS,
            "limit": stream.limit,
            "out_degree": stream.tree.out_degree,
            "queued": stream.queued,
            "behind": max(0, _offered(profile, after_ns / _NS) - sent),
            "copy_us": self._root.adjuster.status().copy_us or 0.0,
        }

    def _wait(self, there: Callable[[], bool]) -> None:
        until = time.monotonic_ns() + _LIMIT_NS
        while not there():
            assert time.monotonic_ns() < until, f"the relays do not answer: {self._root.status()}"
            self._root.tick()
            self._take(0.02)

    def _take(self, wait_s: float) -> None:
        for sender, message in self._transport.receive(wait_s):
            if sender >= FIRST_RELAY:
                self._root.take(sender, message)
            else:
                head = read_head(message)
                assert head.kind == CREDIT
                self._channels[head.destinations[0][0]].granted(head.stamp)


def _work(microseconds: float) -> None:
    """Takes so much processor time."""
    until = time.thread_time_ns() + int(microseconds * 1000)
    while time.thread_time_ns() < until:
        pass


def _way(tree: Tree, node: int) -> list[int]:
    """The nodes through which a node gets its entries."""
    way = [node]
    while (parent := tree.parent.get(way[-1])) is not None:
        way.append(parent)
    return way


def _offered(profile: Sequence[tuple[float, int]], at_s: float) -> int:
    """How many bodies are due before a time."""
    offered = 0.0
    for seconds, rate in profile:
        offered += max(0.0, min(at_s, seconds)) * rate
        at_s -= seconds
    return int(offered)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _as_root(transport: TcpTransport, addresses: dict[int, str], settings: dict[str, Any]) -> dict[str, Any]:
    root = Root(transport, addresses, settings["limits"], settings["window"])
    sent = root.run(settings["bytes"], settings["profile"], settings["switch_s"], settings["other_us"])
    found = {"sent": sent, "started_ns": root.started_ns, "waited_ns": root.waited_ns}
    return {**found, "switches": root.switches, "samples": root.samples}


def _as_relay(transport: TcpTransport, addresses: dict[int, str], settings: dict[str, Any]) -> dict[str, Any]:
    number = settings["number"]
    shared = _Shared(transport)
    worker = shared.worker = _Worker(number - FIRST_RELAY, shared, settings["window"])
    relay = Relay(number, shared)
    loop = RelayLoop(relay, shared)
    relay.use({0: (addresses.pop(0), LIFE)}, addresses)

    def end() -> None:
        sys.stdin.readline()
        loop.end()

    threading.Thread(target=end, daemon=True).start()
    loop.run()
    return {"arrived": worker.arrived[WARMING:], "ages": worker.ages[WARMING:], "forwarded": relay.forwarded}


def main(settings: dict[str, Any]) -> None:
    """Plays its part: "root" or "relay"."""
    number = settings["number"]
    transport = TcpTransport(number, KEY, settings["host"])
    print(json.dumps(transport.address), flush=True)
    told = json.loads(sys.stdin.readline())
    addresses = {int(peer): address for peer, address in told["addresses"].items() if int(peer) != number}
    before = _cpu_s()
    play = _as_relay if number else _as_root
    if settings["one_layer"]:
        with patch.object(least_change, "adapted", lambda before, nodes, _: sequential(before.root, nodes)):
            done = play(transport, addresses, settings)
    else:
        done = play(transport, addresses, settings)
    print(json.dumps({**done, "cpu_s": _cpu_s() - before}), flush=True)
    transport.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
