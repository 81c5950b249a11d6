"""The relays of the simulated cluster (tests/epochs/sim.py): what the JobHost commands about them is carried out, and
faults happen to them.

Each relay is a real one (runtime/relaying/relay.py) with an end of the network of its own. It takes what has come when
it is its turn, so it may be slow, and hears late what the JobHost tells it. It dies at any step: what it has written
into the memory of its node's workers stays there, and what is under way to other nodes may be lost. The JobHost hears
of the death later. Relays of a node that is lost, and those of a JobMaster that has died, go on for a while.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.host.decide.commands import KillRelay, StartRelay
from penstock.host.decide.job_host import RelayEvent
from penstock.host.decide.process_commands import TellRelay
from penstock.runtime.relaying.relay import Relay
from tests.epochs.links import Ends, Node

if TYPE_CHECKING:
    from tests.epochs.sim import EpochCluster


@dataclass(eq=False)
class RelayLife:
    """One life of a relay."""

    number: int
    node: Node
    ends: Ends
    relay: Relay
    slow: float
    told: deque[TellRelay] = field(default_factory=deque)  # on their way to it
    confirmed: int = 0  # answers on their way from it
    wanted: bool = True  # the JobHost has not heard of its death
    paused_until: float = 0.0
    ends_at: float | None = None  # when it finds out that nobody wants it


class Relays:
    """See the module's docstring."""

    def __init__(self, cluster: EpochCluster) -> None:
        self._cluster = cluster
        self.rng = random.Random(f"relays {cluster.seed}")
        self.all: list[RelayLife] = []
        self.kills = cluster.faults.relay_kills

    # --- what the JobHost commands -------------------------------------------------------------------------------

    def carry_out(self, command: StartRelay | KillRelay | TellRelay) -> None:
        """Carries out a command, sooner or later."""
        cluster = self._cluster
        if isinstance(command, StartRelay):
            cluster._after(self.rng.random() * 0.01, lambda: self._start(command))
            return
        life = next((life for life in self.all if life.number == command.number), None)
        if life is None:
            return
        if isinstance(command, TellRelay):
            life.told.append(command)
        else:
            cluster._after(self.rng.random() * 0.01, lambda: self.end(life) if life in self.all else None)

    def _start(self, command: StartRelay) -> None:
        cluster, number = self._cluster, command.number
        nodes = cluster.nodes
        node = next((node for node in nodes.usable if str(node.number) == command.node_id), None)
        reached = node is not None and nodes.hears(node) and nodes.is_heard(node)
        if node is None or not reached or self.rng.random() < cluster.faults.stillborn:
            cluster.counts["relays not started"] += 1
            self._tell_host(
                lambda relays, now: relays.relay_died(number, command.node_id, "it could not be started", now)
            )
            return
        cluster.lives += 1
        ends = Ends(cluster.network, number, cluster.lives, node, cluster.faults.capacity, self.rng, far=True)
        ends.no_room = cluster.faults.no_room
        life = RelayLife(number, node, ends, Relay(number, ends), max(node.slow, cluster.faults.slow_relays))
        self.all.append(life)
        cluster.counts["relays started"] += 1
        cluster.story.append((cluster.now, f"RELAY {number} on node {node.number}"))
        machine = str(node.number)
        info = {"number": number, "pid": ends.life, "node_id": machine, "machine": machine, "address": ends.address}

        def ready() -> None:
            if life.wanted:
                self._tell_host(lambda relays, now: relays.relay_ready(number, info, now))

        cluster._after(self.rng.random() * 0.01, ready)

    def _tell_host(self, event: RelayEvent) -> None:
        self._cluster._do(self._cluster.host.of_relays(event, self._cluster.now))

    # --- what happens to relays ----------------------------------------------------------------------------------

    def kill(self) -> None:
        """A relay dies."""
        with_streams = [life for life in self.all if life.relay._streams]
        among = with_streams if self.rng.random() < 0.8 else self.all
        if among:
            self.kills -= 1
            life = self.rng.choice(among)
            self._cluster.counts["relays killed"] += 1
            self._cluster.counts["relays killed with streams"] += life in with_streams
            self.end(life)

    def end(self, life: RelayLife, with_node: bool = False) -> None:
        """A relay ends, of which the JobHost hears later, if it still counts on it."""
        cluster = self._cluster
        self.all.remove(life)
        self._count(life)
        cluster.story.append((cluster.now, f"END relay {life.number}"))
        life.ends.inbox.dead = self.rng.random() < 0.5
        cluster.network.ended(life.ends, with_node)
        if life.wanted:
            self._tell_of_death(life, self.rng.random() * 0.02)

    def _tell_of_death(self, life: RelayLife, after_s: float) -> None:
        cluster = self._cluster
        life.wanted = False

        def died() -> None:
            self._tell_host(lambda relays, now: relays.relay_died(life.number, "its node", "it has died", now))

        cluster._after(after_s, died)

    def node_lost(self, node: Node) -> None:
        """The JobMaster has given up a node."""
        for life in self.all:
            if life.node is node and life.wanted:
                life.ends_at = self._cluster.now + self.rng.random() * self._cluster.faults.node_timeout_s
                self._tell_of_death(life, self.rng.random() * 0.005)

    def node_ended(self, node: Node) -> None:
        """All processes of a node have ended."""
        for life in [life for life in self.all if life.node is node]:
            self.end(life, with_node=True)

    def master_dies(self) -> None:
        """The JobMaster owns its relays: they end, some of them later."""
        for life in list(self.all):
            life.wanted = False
            if self.rng.random() < 0.5:
                life.ends_at = self._cluster.now + self.rng.random() * self._cluster.faults.node_timeout_s
            else:
                self.end(life)

    # --- running -------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """It is the turn of a relay. Returns whether it did something."""
        if not self.all:
            return False
        life = self.rng.choice(self.all)
        if self.rng.random() < life.slow:
            return False
        return self._step(life)

    def all_turn(self) -> bool:
        """All relays do all that they can. Returns whether any did something."""
        moved = [self._step(life, whole=True) for life in list(self.all)]
        return any(moved)

    def _step(self, life: RelayLife, whole: bool = False) -> bool:
        cluster, rng = self._cluster, self.rng
        if life.ends_at is not None and cluster.now >= life.ends_at:
            self.end(life)
            return True
        if max(life.paused_until, life.node.paused_until) > cluster.now:
            return False
        nodes = cluster.nodes
        if life.told and nodes.hears(life.node) and (whole or rng.random() < cluster.faults.hurry):
            command = life.told.popleft()
            life.relay.use(command.workers, command.relays)
            life.relay.flush()
            life.confirmed += 1
            life.ends.ring()
            return True
        heard = nodes.is_heard(life.node) and not cluster._master_paused()
        if life.confirmed and life.wanted and heard and (whole or rng.random() < cluster.faults.hurry):
            life.confirmed -= 1
            self._tell_host(lambda relays, now: relays.relay_knows(life.number, now))
            return True
        if life.ends.inbox.quiet and not whole:
            return False
        messages = life.ends.all() if whole else life.ends.receive(0)
        for sender, message in messages:
            life.relay.take(sender, message)
        before = life.relay.handed_over
        if whole or rng.random() < 0.7:
            life.relay.flush()
            life.ends.inbox.quiet = not messages and not life.relay.waiting and not life.ends.waits()
        counts = cluster.counts
        counts["messages to relays"] += len(messages)
        return bool(messages) or life.relay.handed_over > before

    def count(self) -> None:
        """Counts what relays have done, at the end."""
        for life in self.all:
            self._count(life)

    def _count(self, life: RelayLife) -> None:
        self._cluster.counts["entries forwarded"] += life.relay.forwarded
        self._cluster.counts["entries handed over"] += life.relay.handed_over

    def limit(self) -> None:
        """The trees of some worker get another limit."""
        process = self.rng.choice(self._cluster.live)
        root = process.loop.wiring.root
        if root is not None and process.paused_until <= self._cluster.now:
            self._cluster.counts["limits of trees"] += 1
            root.limit(self.rng.choice((None, 1, 2, 3)))
            process.inbox.quiet = False
