"""The nodes of the simulated cluster (tests/epochs/sim.py): which process is where, and what happens to nodes.

The JobMaster is on a node too. A node that cannot answer it for `node_timeout_s`, because a line between the two is cut
or the node is paused, is lost: its workers are dead to the JobHost, whatever they do. They find out by themselves,
sooner or later than the JobMaster, that they hear nothing any more, and end. Until then they go on, and reach whom they
can. A shorter cut is a pause.

A line between two other nodes may be cut for any time, and for good. The processes tell the JobHost, which may give up
a node, but only when it has heard of the cut for as long, without a pause of its own, and of nothing else since.

A node may also die, with all its processes, the JobMaster among them. The workers of a node that is lost or dead start
on other nodes, or on one that is added.

A cluster of one node has none of all this.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from penstock.runtime.transport.base import SilentLink
from tests.epochs.links import TOLD_SHARE, Network, Node

if TYPE_CHECKING:
    from tests.epochs.sim import EpochCluster, Process


class Nodes:
    """See the module's docstring."""

    def __init__(self, cluster: EpochCluster, network: Network) -> None:
        self._cluster = cluster
        self._network = network
        self._faults = faults = cluster.faults
        self.rng = random.Random(f"nodes {cluster.seed}")
        self.several = faults.nodes > 1
        self._numbers = 0
        self.usable: list[Node] = []  # those that are neither lost nor dead
        for _ in range(faults.nodes):
            self._add()
        self.master = self.usable[0]  # where the JobMaster is
        self.dead: set[Node] = set()
        self._of: dict[int, Node] = {}  # by worker
        self._silent_since: dict[Node, float] = {}
        self.cuts, self.breaks = faults.cuts, faults.breaks  # how many there will be
        self.kills, self.pauses = faults.node_kills, faults.node_pauses
        self.partial_cuts = faults.partial_cuts
        self._cutting = random.Random(f"partial cuts {cluster.seed}")
        self._telling = False  # whether processes look at their links
        self._tell_until = 0.0
        self._told: dict[Process, list[SilentLink]] = {}  # what each has told last
        self._heard: dict[Process, list[SilentLink]] = {}  # what the JobHost has heard last
        #: The nodes between which a link is silent, by what the JobHost has heard, and for how long it has known this
        #: while it was not paused.
        self._known_s: dict[frozenset[Node], float] = {}
        self._counted_at = 0.0
        for worker in range(faults.workers):
            self._of[worker] = self.usable[worker % faults.nodes] if faults.evenly else self.rng.choice(self.usable)

    def _add(self) -> Node:
        apart_ns = int(self._faults.apart_s * 1e9)
        ahead_ns = self.rng.randrange(apart_ns + 1)  # clocks count from the start of their machine
        slow = self.rng.choice((0.5, 0.8)) if self.rng.random() < self._faults.slow_nodes else 0.0
        node = Node(self._numbers, ahead_ns, slow)
        self._numbers += 1
        self.usable.append(node)
        return node

    # --- where processes are -------------------------------------------------------------------------------------

    def place(self, worker: int) -> Node | None:
        """The node on which the next process of a worker starts; None: it must wait until the node is reached."""
        node = self._of[worker]
        if node not in self.usable:
            if self.rng.random() < 0.2:
                node = self._add()
                self._cluster.counts["nodes added"] += 1
            else:
                node = self.rng.choice(self.usable)
            self._of[worker] = node
        return node if self.hears(node) and self.is_heard(node) else None

    def clocks(self) -> dict[int, int]:
        """How far the clock of each worker's node is ahead of the JobMaster's."""
        processes = self._cluster.processes.values()
        return {process.worker: process.node.ahead_ns - self.master.ahead_ns for process in processes}

    # --- who hears whom ------------------------------------------------------------------------------------------

    def hears(self, node: Node) -> bool:
        """Whether a node hears the JobMaster now."""
        return not self._network.is_cut(self.master, node)

    def is_heard(self, node: Node) -> bool:
        """Whether the JobMaster hears a node now."""
        return not self._network.is_cut(node, self.master)

    def _answers(self, node: Node) -> bool:
        return self.hears(node) and self.is_heard(node) and node.paused_until <= self._cluster.now

    def _watch(self, node: Node) -> None:
        """Something keeps a node from answering: it is lost when this lasts."""
        cluster = self._cluster
        if node is self.master or node not in self.usable or self._answers(node):
            return
        since = self._silent_since.setdefault(node, cluster.now)
        limit_s = self._faults.node_timeout_s

        def notices() -> None:
            if self._silent_since.get(node) != since or node not in self.usable or node is self.master:
                return
            if self._answers(node):
                del self._silent_since[node]
            else:
                self._lose(node)

        def leaves() -> None:
            silent = self._silent_since.get(node) == since and not self._answers(node)
            if silent and node in self.usable and node is not self.master and not self.hears(node):
                self._leave(node)

        cluster._after(limit_s * (1 + 0.1 * self.rng.random()), notices)
        cluster._after(limit_s * (1 + 0.1 * self.rng.random()), leaves, masters=False)

    def _answers_again(self, node: Node) -> None:
        if node in self._silent_since and self._answers(node):
            del self._silent_since[node]

    # --- what happens --------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Something may happen."""
        rng, faults = self.rng, self._faults
        if self.cuts and rng.random() < faults.cut_rate:
            self._cut()
        if self.partial_cuts and self._cutting.random() < faults.cut_rate:
            self._cut_two()
        if self.breaks and rng.random() < faults.cut_rate and self._network.break_some():
            self.breaks -= 1
        if self.kills and rng.random() < faults.cut_rate / 4:
            self.kill(rng.choice(self.usable))
        if self.pauses and rng.random() < faults.cut_rate:
            self._pause()

    def _cut(self) -> None:
        """Lines are cut for a while: between one node and all others, or between two, in one direction or both."""
        rng, cluster, network = self.rng, self._cluster, self._network
        self.cuts -= 1
        seconds = rng.random() ** 2 * self._faults.cut_s
        node = rng.choice(self.usable)
        others = [other for other in self.usable if other is not node]
        if not others:
            return
        if rng.random() < 0.4:
            others = [rng.choice(others)]
        ways = rng.choice(("both", "both", "to", "from"))
        for other in others:
            if ways != "from":
                network.cut(other, node, cluster.now + seconds)
            if ways != "to":
                network.cut(node, other, cluster.now + seconds)
        cluster.counts["cuts" if ways == "both" else "one-way cuts"] += 1
        told = [other.number for other in others]
        cluster.story.append((cluster.now, f"CUT node {node.number} and {told} for {seconds:.4f}, ways: {ways}"))
        self._watch_all(seconds)

    def _cut_two(self) -> None:
        """Two nodes do not reach each other any more, while both reach the JobMaster, or only one of them does not
        reach the other: for a while, or for good."""
        rng, cluster, network = self._cutting, self._cluster, self._network
        used = {process.node for process in cluster.live} - {self.master}
        if len(used) < 2:
            return
        self.partial_cuts -= 1
        a, b = rng.sample(sorted(used, key=lambda node: node.number), 2)
        seconds = rng.choice((math.inf, rng.random() * 4 * self._faults.node_timeout_s))
        ways = rng.choice(("both", "both", "there"))
        for one, other in ((a, b), (b, a)) if ways == "both" else ((a, b),):
            network.cut(one, other, cluster.now + seconds)
        cluster.counts["partial cuts for good" if seconds == math.inf else "partial cuts"] += 1
        cluster.story.append((cluster.now, f"CUT nodes {a.number} and {b.number} for {seconds:.4f}, ways: {ways}"))
        self._watch_all(seconds)

    # --- links that are silent -----------------------------------------------------------------------------------

    def look_at_links(self) -> None:
        """Links may be silent: processes look for a while, and for as long as something is cut for a while."""
        limit_s = self._faults.node_timeout_s
        self._tell_until = max(self._tell_until, self._cluster.now + 3 * TOLD_SHARE * limit_s)
        if not self._telling:
            self._telling = True
            self._cluster._after(limit_s / 10, self._look_at_links, masters=False)

    def _look_at_links(self) -> None:
        """The processes look at their links, and tell what has changed."""
        cluster = self._cluster
        self._telling = False
        changing = any(cluster.now < line.cut_until < math.inf for line in self._network.lines())
        for process in cluster.live:
            if process.paused_until > cluster.now:
                changing = True
                continue
            found = process.transport.silent_links()
            if found == self._told.get(process, []):
                continue
            changing = True
            self._told[process] = found
            process.inbox.quiet = False
            cluster.counts["words of links"] += 1
            process.said.append(lambda process=process, found=found: cluster.hears_of_links(process, found))  # type: ignore[misc]
        if changing:
            self.look_at_links()
        elif cluster.now < self._tell_until:
            self._telling = True
            cluster._after(self._faults.node_timeout_s / 10, self._look_at_links, masters=False)

    def heard(self, process: Process, links: list[SilentLink]) -> None:
        """The JobHost hears what a process tells of its links."""
        self.count_time()
        self._heard[process] = links
        self._keep_known()

    def died(self, process: Process) -> None:
        """The JobHost hears of the death of a process."""
        self.count_time()
        self._heard.pop(process, None)
        self._told.pop(process, None)
        self._keep_known()

    def _keep_known(self) -> None:
        present = {process.transport.address: process.node for process in self._heard}
        present |= {process.transport.address: process.node for process in self._cluster.live}
        pairs = {
            frozenset((process.node, present[link.process]))
            for process, links in self._heard.items()
            for link in links
            if link.process in present
        }
        self._known_s = {pair: self._known_s.get(pair, 0.0) for pair in pairs}

    def count_time(self) -> None:
        """The time until now counts, except for pauses of the JobHost."""
        passed = self._cluster.now - self._counted_at
        if passed > 0:
            self._counted_at = self._cluster.now
            self._known_s = {pair: known_s + passed for pair, known_s in self._known_s.items()}

    def master_pauses(self, until: float) -> None:
        """The JobHost is paused. When it looks late, it counts what it would count if it were not late: an eighth."""
        self.count_time()
        self._counted_at = until
        look_s = self._faults.node_timeout_s / 8
        self._known_s = {pair: known_s + look_s for pair, known_s in self._known_s.items()}

    def give_up(self, machine: str, reason: str) -> None:
        """The JobHost gives up a node because of its links."""
        cluster = self._cluster
        self.count_time()
        node = next((node for node in self.usable if str(node.number) == machine), None)
        if node is None:  # it is lost already, or dead, which the JobHost is about to hear
            return
        assert node is not self.master, f"the node of the JobMaster is given up: {reason}"
        known_s = max((known_s for pair, known_s in self._known_s.items() if node in pair), default=0.0)
        least_s = 0.99 * self._faults.node_timeout_s
        assert known_s >= least_s, f"node {machine} is given up after {known_s:.4f} s of a silent link: {reason}"
        cluster.counts["nodes given up"] += 1
        cluster.story.append((cluster.now, f"GIVE UP node {machine}: {reason}"))

        def lose() -> None:
            if node in self.usable and node is not self.master:
                self._lose(node)

        cluster._after(self._cutting.random() * 0.005, lose)

    # --- lost nodes ----------------------------------------------------------------------------------------------

    def _watch_all(self, seconds: float) -> None:
        self.look_at_links()
        for node in list(self.usable):
            self._watch(node)

        def over() -> None:
            for node in list(self._silent_since):
                self._answers_again(node)
            for node in list(self.usable):
                self._watch(node)

        self._network.at(self._cluster.now + seconds, over)

    def _pause(self) -> None:
        """A node does nothing for a while."""
        self.pauses -= 1
        cluster = self._cluster
        node = self.rng.choice(self.usable)
        if node is self.master:
            return
        seconds = self.rng.random() ** 2 * self._faults.cut_s
        node.paused_until = max(node.paused_until, cluster.now + seconds)
        cluster.counts["pauses of nodes"] += 1
        cluster.story.append((cluster.now, f"PAUSE node {node.number} for {seconds:.4f}"))
        for process in cluster.everybody():
            if process.node is node:
                process.paused_until = max(process.paused_until, node.paused_until)
        cluster._after(seconds, cluster._tell_to_stop, masters=False)
        self._watch_all(seconds)

    def _lose(self, node: Node) -> None:
        """The JobMaster gives up a node. What runs there goes on until it finds out."""
        cluster = self._cluster
        self.usable.remove(node)
        self._silent_since.pop(node, None)
        cluster.counts["nodes lost"] += 1
        cluster.story.append((cluster.now, f"LOST node {node.number}"))
        cluster.relays.node_lost(node)
        for process in list(cluster.live):
            if process.node is node:
                wakes = max(cluster.now, process.paused_until)
                cluster.cut_off(process, wakes + self.rng.random() * self._faults.node_timeout_s)

    def _leave(self, node: Node) -> None:
        """The processes of a node have heard nothing for too long, and end."""
        cluster = self._cluster
        gone = [process for process in cluster.everybody() if process.node is node]
        cluster.counts["workers that have left"] += len(gone)
        if gone:
            cluster.story.append((cluster.now, f"LEAVE node {node.number}"))
        for process in gone:
            cluster.ends_by_itself(process)
        cluster.relays.node_ended(node)

    def kill(self, node: Node) -> None:
        """A node dies with all that it runs."""
        cluster = self._cluster
        self.kills = max(0, self.kills - 1)
        self.usable.remove(node)
        self.dead.add(node)
        node.died_at = self._cluster.now
        self.look_at_links()
        self._silent_since.pop(node, None)
        if not self.usable:
            self._add()
        cluster.counts["nodes killed"] += 1
        cluster.counts[f"nodes killed while {cluster.coordinator.state}"] += 1
        cluster.story.append((cluster.now, f"KILL node {node.number}"))
        cluster.relays.node_ended(node)
        for process in cluster.everybody():
            if process.node is node:
                cluster.dies_with_node(process)
        if node is self.master:
            cluster.counts["nodes killed with the JobMaster"] += 1
            cluster.master_dies()

    def new_master(self) -> None:
        """Another JobMaster begins: it knows nothing of lost nodes."""
        if not self.several:
            return
        self._telling = False
        self._told.clear()
        self._heard.clear()
        self._known_s.clear()
        self._counted_at = self._cluster.now  # the one before may have been paused for longer
        known = {*self._of.values(), *self.usable} - self.dead
        self.usable = sorted(known, key=lambda node: node.number)
        self.master = self.rng.choice(self.usable)
        self._silent_since.clear()
        for node in list(self.usable):
            self._watch(node)
        until = max((line.cut_until for line in self._network.lines()), default=0.0)
        if until > self._cluster.now:
            self._watch_all(until - self._cluster.now)
