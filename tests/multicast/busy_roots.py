"""A root whose one thread also does other work, on a scripted clock: trees that adjust themselves beside fixed ones
(docs/papers.md: W4, W5).

    python -m tests.multicast.busy_roots                       all cells of the grid
    python -m tests.multicast.busy_roots --cells 20 --seed 7   so many of them, chosen by a seed
    python -m tests.multicast.busy_roots --only 50,10,29,1.2   one cell, with its story

A cell says how long the other work for an entry takes and how long its encoding does (in us), how many relays there
are, and which part of what the best fixed tree carries is offered. The log, the root and what adjusts its limit are the
product's. Time passes only where the script says so: for other work, for an encoding, and for a copy. Links and relays
take their time as well, with jitter, and receivers grant credit in lots, as those of a job do. In the middle of a story
the source stands still for a moment, and then catches up.

The campaign fails when a tree that adjusts itself carries less than `WORST` of what the best fixed tree can carry in
the same story, or less than `MIDDLE` in the median of all cells, or when the limit changes more than `CHANGES` times
after the beginning or after the pause.
"""

from __future__ import annotations

import argparse
import heapq
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any
from unittest import mock

from penstock.runtime.exchange import log as log_module
from penstock.runtime.exchange.log import OutLog
from penstock.runtime.multicast.reach import binomial_degree
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.relaying import wire
from penstock.runtime.relaying.relay_map import RelayMap
from penstock.runtime.relaying.root import MulticastRoot
from penstock.runtime.relaying.wire import FIRST_RELAY
from penstock.runtime.transport.base import Buffer, LinkLoad
from tests.relaying.model import End

MIDDLE, WORST, CHANGES = 0.95, 0.9, 2

OTHER_US = (0, 5, 20, 50, 100)
ENCODE_US = (0, 10, 50)
RELAYS = (8, 29, 64)
LOADS = (0.5, 0.8, 0.95, 1.0, 1.2)

COPY_S = 20e-6
HOP_S = 100e-6
JITTER_S = 30e-6  # on average; one in 500 is 15 times as long
RECEIPTS_S = 1e-3  # between two receipts of a relay at least
BODY = 3_000
_HEAD = 20  # of a body
WINDOW = 18 * BODY  # of credit, as in a job with bodies of 15 KB

STORY_S = 5.5
LEARNING_S = 1.0  # at the beginning, which does not count
PAUSE_AT_S, PAUSE_S = 2.0, 0.3
_FULL_S = 0.1  # for which it is looked how much a fixed tree carries, when so long a time has filled its windows


@dataclass(frozen=True)
class Cell:
    """A cell of the grid; see the module's docstring."""

    other_us: float
    encode_us: float
    relays: int
    load: float


@dataclass(frozen=True)
class Found:
    """What came of a story. `sent`: entries a second, without the beginning. `limits`: when the limit changed, and to
    what."""

    sent: float
    limits: tuple[tuple[float, int], ...]
    story: tuple[str, ...] = ()


GRID = tuple(Cell(*cell) for cell in product(OTHER_US, ENCODE_US, RELAYS, LOADS))


class _Wire(End):
    """Carries what the root sends: each copy takes the root's thread `COPY_S`, and then its way through the relays."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def links(self) -> dict[int, LinkLoad]:
        return {}

    def send(self, worker: int, task: int, parts: Sequence[Buffer]) -> bool:
        self._source.carry(worker, wire.read(parts[0]) if worker >= FIRST_RELAY else None)
        return True


class Source:
    """The worker with the root. `limit`: of its tree; None: it adjusts itself."""

    def __init__(self, cell: Cell, limit: int | None, seed: int = 0) -> None:
        self.now_s, self.used_s = 1.0, 0.0  # the time, and the processor time of the thread
        self._cell = cell
        self._chance = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._receipts: dict[int, float] = {}  # by child of the root: when its relays say what they have
        self._newest: dict[int, int] = {}  # by child of the root: the last entry that it was sent
        self._latest: dict[int, float] = {}  # by relay: when its last receipt comes
        self._owed: dict[int, int] = {}
        ends = _Wire(self)
        self.root = MulticastRoot(0, 1, ends, self._clock, limit, stopwatch=self.thread_ns)
        self.log = OutLog(ends, ErrorHandler("test"))
        self.stream = self.root.stream(self.log)
        self.log.stream = self.stream
        relays = {worker: FIRST_RELAY + worker for worker in range(1, cell.relays + 1)}
        self._relays = relays
        self._channels = {
            FIRST_RELAY + worker: self.log.channel(worker, worker, worker, local=False, credit_window=WINDOW)
            for worker in relays
        }
        self._taken = dict.fromkeys(self._channels, 0)
        encode = self.log._encode

        def encoded(batch: Any, stamp: int) -> Any:
            self._work(cell.encode_us * 1e-6)
            return encode(batch, stamp)

        self.log._encode = encoded  # type: ignore[method-assign]
        self.root.use(RelayMap(dict.fromkeys(relays.values(), ""), relays))

    def _clock(self) -> int:
        return round(self.now_s * 1e9)

    def thread_ns(self) -> int:
        return round(self.used_s * 1e9)

    def _work(self, seconds: float) -> None:
        self.now_s += seconds
        self.used_s += seconds

    def _at(self, at_s: float, do: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (at_s, self._count, do))

    def _hop_s(self) -> float:
        jitter = self._chance.expovariate(1 / JITTER_S)
        return HOP_S + (15 * jitter if self._chance.random() < 0.002 else jitter)

    # --- what relays do ------------------------------------------------------------------------------------------

    def carry(self, to: int, head: wire.Head | None) -> None:
        """Takes a message of the root. `head`: of what is for a relay."""
        stream = self.stream.id
        if head is None or head.kind in wire.ENTRIES:
            self._work(COPY_S)
        if head is None:
            # It goes straight to a worker, which takes it up.
            channel = self._channels[FIRST_RELAY + to]
            self._at(self.now_s + HOP_S, lambda: channel.granted(channel.outstanding))
        elif head.kind in wire.ENTRIES:
            self._newest[to] = head.number
            if to not in self._receipts:
                self._receipts[to] = 0.0
            if self._receipts[to] >= self.now_s:
                return  # the next receipts say so too
            last = self._receipts[to]
            at_s = self._receipts[to] = max(self.now_s, last + RECEIPTS_S)
            self._at(at_s, lambda: self._pass_on(to, at_s))
        elif head.kind == wire.CONNECT:
            parent, version = head.number, head.place
            answer = wire.head(wire.CONNECTED, stream, to, version)
            if parent == 0:
                self._at(
                    self.now_s + 2 * HOP_S, lambda: self.root.take(to, wire.head(wire.CONNECTING, stream, 0, version))
                )
            else:
                self._at(self.now_s + 3 * HOP_S, lambda: self.root.take(parent, answer))
        elif head.kind == wire.JOIN:
            number = head.number

            def joined() -> None:
                self.root.take(to, wire.head(wire.DELIVERED, stream, number, number))
                if self.stream.tree.parent.get(to) == 0:
                    self.root.take(to, wire.head(wire.ASK, stream, number))

            self._at(self.now_s + 2 * HOP_S, joined)

    def _pass_on(self, child: int, at_s: float) -> None:
        """Lets the newest entry of a child pass through the relays behind it."""
        tree, number = self.stream.tree, self._newest[child]
        ways = [(child, at_s + self._hop_s())]
        while ways:
            relay, there_s = ways.pop()
            said_s = self._latest[relay] = max(self._latest.get(relay, 0.0), there_s + self._hop_s())
            self._at(said_s, lambda relay=relay: self._has(relay, number))  # type: ignore[misc]
            for place, below in enumerate(tree.of(relay), 1):
                ways.append((below, there_s + place * COPY_S + self._hop_s()))

    def _has(self, relay: int, number: int) -> None:
        """A relay and its worker have all up to an entry."""
        before = self._taken[relay]
        if number < before:
            return
        self._taken[relay] = number + 1
        self.root.take(relay, wire.head(wire.DELIVERED, self.stream.id, number + 1, number + 1))
        channel = self._channels[relay]
        owed = self._owed.get(relay, 0) + (number + 1 - before) * BODY
        owed = min(owed, channel.outstanding)
        if 2 * owed >= WINDOW:
            channel.granted(owed)
            owed = 0
        self._owed[relay] = owed

    # --- what the source does ------------------------------------------------------------------------------------

    def _pass(self) -> None:
        """Takes what has come, as the run loop does."""
        events = self._events
        while events and events[0][0] <= self.now_s:
            heapq.heappop(events)[2]()
        self.root.tick()

    def begin(self) -> None:
        """Lets all channels join the stream."""
        for _ in range(4):
            self.log.push([bytes(BODY - _HEAD)], 0)
            until_s = self.now_s + 0.02
            while self.now_s < until_s:
                self.log.flush()
                self._pass()
                self.now_s += 0.0005
        assert len(self.stream.members) == self._cell.relays, self.stream.status()
        self._owed.clear()
        for channel in self._channels.values():
            channel.granted(channel.outstanding)

    def run(
        self,
        rate: float,
        seconds: float,
        learning_s: float = LEARNING_S,
        pause_at_s: float | None = None,
        tell: bool = False,
    ) -> Found:
        """Offers so many entries a second. They have random distances."""
        record, log, other_s = [bytes(BODY - _HEAD)], self.log, self._cell.other_us * 1e-6
        begun_s = self.now_s
        due_s, sent, counted = begun_s, 0, 0
        limits, story, limit, told_s = [], [], self.stream.limit, begun_s
        paused_s = None if pause_at_s is None else begun_s + pause_at_s
        while self.now_s < begun_s + seconds:
            self._pass()
            if self.stream.limit != limit:
                limit = self.stream.limit
                verdict = self.root.adjuster.verdict
                limits.append((self.now_s - begun_s, limit))
                if tell:
                    story.append(f"{self.now_s - begun_s:.2f} s: limit {limit}: {verdict and verdict.reason}")
            if tell and self.now_s >= told_s:
                told_s += 0.5
                status = self.root.adjuster.status()
                story.append(
                    f"{self.now_s - begun_s:.2f} s: sent {sent}, behind {(self.now_s - due_s) * rate:.0f}, {status}"
                )
            if paused_s is not None and self.now_s >= paused_s:
                self.now_s += PAUSE_S
                paused_s = None
                continue
            if log.queue and not log.flush():
                self.now_s = max(self.now_s, self._events[0][0]) if self._events else self.now_s + 0.0005
            elif due_s <= self.now_s:
                self._work(other_s)
                log.push(record, 0)
                log.flush()
                sent += 1
                counted += self.now_s - begun_s >= learning_s
                due_s += self._chance.expovariate(rate)
            else:
                self.now_s = min(due_s, self._events[0][0] if self._events else due_s)
        return Found(counted / (seconds - learning_s), tuple(limits), tuple(story))


def played(cell: Cell, limit: int | None, rate: float, seconds: float = STORY_S, **more: Any) -> Found:
    """Plays a story."""
    source = Source(cell, limit)
    with mock.patch.object(log_module, "thread_time_ns", source.thread_ns):
        source.begin()
        return source.run(rate, seconds, **more)


@cache
def carried(cell: Cell) -> dict[int, float]:
    """What each fixed tree carries when more is offered than it can carry."""
    most = binomial_degree(cell.relays)
    return {limit: played(cell, limit, 1e6, 2 * _FULL_S, learning_s=_FULL_S).sent for limit in range(1, most + 1)}


@dataclass(frozen=True)
class Outcome:
    """What a tree that adjusts itself did in a cell, and the best fixed one."""

    cell: Cell
    best: int
    fixed: float
    own: Found

    @property
    def part(self) -> float:
        """Which part it carried of what the best fixed tree did."""
        return self.own.sent / self.fixed

    @property
    def changes(self) -> int:
        """How often the limit changed, after the beginning or after the pause: whichever is more."""
        early = sum(at_s < PAUSE_AT_S for at_s, _ in self.own.limits)
        return max(early, len(self.own.limits) - early)

    @property
    def failed(self) -> bool:
        """Whether it is worse than it may be."""
        return self.part < WORST or self.changes > CHANGES


def outcome(cell: Cell, tell: bool = False) -> Outcome:
    """Plays a cell."""
    rates = carried(replace(cell, load=1.0))
    best = max(rates, key=lambda limit: rates[limit])
    rate = cell.load * rates[best]
    counted_s = STORY_S - LEARNING_S
    fixed = min(rate, rates[best] * (counted_s - PAUSE_S) / counted_s)
    return Outcome(cell, best, fixed, played(cell, None, rate, pause_at_s=PAUSE_AT_S, tell=tell))


def told(found: Outcome) -> str:
    """Says what came of a cell, in a line."""
    cell = found.cell
    limits = ", ".join(f"{limit} at {at_s:.2f} s" for at_s, limit in found.own.limits)
    return (
        f"{'FAILED ' if found.failed else ''}{cell.other_us:g},{cell.encode_us:g},{cell.relays},{cell.load:g}: "
        f"{found.part:.3f} of {found.fixed:,.0f}/s, which trees of {found.best} carry; "
        f"limits: {limits or 'as at first'}"
    )


def campaign(cells: Iterable[Cell], jobs: int) -> int:
    """Plays cells, and returns how many failed. The median counts as one."""
    parts, changes = [], []
    failed = 0
    with ProcessPoolExecutor(jobs) as pool:
        for found in pool.map(outcome, cells):
            print(told(found), flush=True)
            parts.append(found.part)
            changes.append(found.changes)
            failed += found.failed
    middle = statistics.median(parts)
    most = max(changes)
    print(
        f"{len(parts)} cells: median {middle:.3f}, worst {min(parts):.3f}, at most {most} changes of a limit at a time"
    )
    return failed + (middle < MIDDLE)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.multicast.busy_roots", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=len(GRID), help="how many of the grid's (all)")
    parser.add_argument("--seed", type=int, default=1, help="which of them (1)")
    parser.add_argument("--only", metavar="OTHER_US,ENCODE_US,RELAYS,LOAD", help="play one cell, and tell its story")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="at a time (one a core)")
    options = parser.parse_args()
    started = time.monotonic()
    if options.only is not None:
        other, encode, relays, load = options.only.split(",")
        found = outcome(Cell(float(other), float(encode), int(relays), float(load)), tell=True)
        print(carried(replace(found.cell, load=1.0)), *found.own.story, told(found), sep="\n")
        return int(found.failed)
    failed = campaign(random.Random(options.seed).sample(GRID, options.cells), options.jobs)
    print(f"{failed or 'nothing'} failed in {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
