"""Improves on the paper: moves and swaps tasks between places while traffic falls and the balance holds.

A `Partition` is an assignment of tasks to places, with what each place may take. `improve` goes through the pairs of
places that exchange records, and lets tasks change sides as Fiduccia and Mattheyses do: it always moves the task that
gains most, even when that is a loss, and each task once, and then goes back to the best state that it has met. So it
leaves local optima that single moves cannot leave. Since a side may have one task too many in between, tasks are
swapped as well. Gains are kept in heaps, because traffic is not a small integer. A pass costs about as much as ten
tasks for each task that exchanges records with the other side, and nothing for the others.

A partition never gets worse: it gets less overload, or the same overload and less traffic across.

Places may be the workers of several nodes. A hop between two nodes then costs more than one between two workers of a
node, and a node has limits of its own. Pairs of places are pairs of workers, on the same node or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

import numpy as np

from penstock.placement.balance import Limits
from penstock.placement.traffic import Ints, TrafficGraph

#: A pass over a pair of places ends after so many changes of side without a new best.
PATIENCE = 60

# How many tasks of a side are tried, to find one that fits.
_TOO_LARGE_MAX = 8

_EPSILON = 1e-9


class _Filling:
    """How full places are, which are workers or nodes: the CPU and the memory of their tasks, and the most of each that
    they may take."""

    __slots__ = ("cpu_most", "load", "memory_most", "used")

    def __init__(self, limits: Limits, load: list[float], used: list[float]) -> None:
        self.load = load
        self.used = used
        self.cpu_most: list[float] = (limits.cpu * (1 + _EPSILON)).tolist()
        self.memory_most: list[float] = (limits.memory * (1 + _EPSILON)).tolist()

    @property
    def overload(self) -> float:
        """Returns by how much the places exceed their limits, each as a fraction of its limit, added up."""
        return sum(map(self.excess, range(len(self.load))))

    def excess(self, place: int) -> float:
        """Returns by how much a place exceeds its limit."""
        over = 0.0
        if self.load[place] > self.cpu_most[place]:
            over += self.load[place] / (self.cpu_most[place] or _EPSILON) - 1
        if self.used[place] > self.memory_most[place]:
            over += self.used[place] / (self.memory_most[place] or _EPSILON) - 1
        return over

    def move(self, cpu: float, memory: float, source: int, target: int) -> None:
        """A task moves from one place to another."""
        self.load[source] -= cpu
        self.load[target] += cpu
        self.used[source] -= memory
        self.used[target] += memory


class Partition:
    """An assignment of tasks to places; see the module's docstring."""

    def __init__(
        self,
        graph: TrafficGraph,
        limits: Limits,
        places: Ints,
        node_of: Ints | None = None,
        nodes: Limits | None = None,
        node_cost: float = 1.0,
    ) -> None:
        """`limits`: of the places; `nodes`: the limits of their nodes. `node_of` has the node of each place.
        `node_cost`: what traffic between nodes costs, relative to traffic between places of one node. Without these
        three, all places are alike."""
        self._graph = graph
        self._near = graph.near
        self._cpu: list[float] = graph.cpu.tolist()
        self._memory: list[float] = graph.memory.tolist()
        self._allowed: list[list[bool]] | None = None if graph.allowed is None else graph.allowed.tolist()
        count = len(limits.cpu)
        self._places: list[int] = places.tolist()
        used = np.bincount(places, weights=graph.memory, minlength=count)
        self._workers = _Filling(limits, graph.loads(places, count).tolist(), used.tolist())
        self._heaviest = max(self._cpu, default=0.0)
        self.least = _EPSILON * graph.total_traffic  # a gain that may be a rounding error does not count
        self._members: list[set[int]] = [set() for _ in range(count)]
        for v, place in enumerate(self._places):
            self._members[place].add(v)
        self._node_ids = np.zeros(count, dtype=np.int64) if node_of is None else node_of
        self._node_of: list[int] = self._node_ids.tolist()
        self._node_cost = node_cost
        self._nodes: _Filling | None = None
        if nodes is not None:
            of_nodes = (
                np.bincount(self._node_ids, weights=of, minlength=len(nodes.cpu)).tolist()
                for of in (self._workers.load, self._workers.used)
            )
            self._nodes = _Filling(nodes, *of_nodes)
        self._badness: tuple[float, float] | None = None
        self._patience = PATIENCE
        self.work = 0  # the number of edges looked at so far: the cost of the search on every machine

    @property
    def places(self) -> Ints:
        """Returns the place of each task."""
        return np.array(self._places, dtype=np.int64)

    @property
    def cost(self) -> float:
        """Returns the traffic between places, in which traffic between nodes counts `node_cost` times."""
        if self._nodes is None:
            return self._graph.edge_cut(self._places)
        places = self.places
        return self._graph.hop_cost(places, self._node_ids[places], self._node_cost)

    @property
    def overload(self) -> float:
        """Returns by how much the places and nodes exceed their limits, each as a fraction of its limit, added up. The
        result 0 means balanced."""
        return self._workers.overload + (0.0 if self._nodes is None else self._nodes.overload)

    @property
    def badness(self) -> tuple[float, float]:
        """Returns the values of which a better partition has less: the overload, and of equal overload the cost."""
        if self._badness is None:
            self._badness = self.overload, self.cost
        return self._badness

    def _excess(self, place: int) -> float:
        """Returns by how much a place and its node exceed their limits."""
        over = self._workers.excess(place)
        return over if self._nodes is None else over + self._nodes.excess(self._node_of[place])

    def _room(self, source: int, target: int) -> tuple[float, float]:
        """Returns the CPU and the memory that may move from one place to another at this point of a pass, which may
        overfill a place by one task. The result is negative where nothing may move."""
        room, room_memory = self._room_in(self._workers, source, target)
        here, there = self._node_of[source], self._node_of[target]
        if self._nodes is None or here == there:
            return room, room_memory
        on_node, on_node_memory = self._room_in(self._nodes, here, there)
        return min(room, on_node), min(room_memory, on_node_memory)

    def _room_in(self, filling: _Filling, source: int, target: int) -> tuple[float, float]:
        load, most = filling.load, filling.cpu_most
        room = most[target] + self._heaviest - load[target]
        if load[target] > most[target] and load[source] <= most[source]:
            room = -1.0  # first back to where the balance holds
        return room, filling.memory_most[target] - filling.used[target]

    def improve(self, rounds: int = 10, begin: Iterable[int] | None = None, patience: int = PATIENCE) -> None:
        """Improves one pair of places after the other until nothing changes any more, in at most `rounds` rounds. It
        begins with the pairs of the places in `begin` (None: of all places). `patience`: see PATIENCE."""
        self._badness = None
        self._patience = patience
        changed = set(range(len(self._members)) if begin is None else begin)
        for _ in range(rounds):
            pairs = [(a, b) for a, b in self._pairs() if a in changed or b in changed]
            changed = set()
            for a, b in pairs:
                if self._improve_pair(a, b):
                    changed.update((a, b))
            if not changed:
                return

    def _pairs(self) -> list[tuple[int, int]]:
        """Returns the pairs of places that exchange records, or of which one is overloaded; pairs with the most traffic
        come first."""
        count = len(self._members)
        at = self.places
        a = np.repeat(at, np.diff(self._graph.starts))
        b = at[self._graph.neighbours]
        traffic = np.bincount(a * count + b, weights=self._graph.traffic, minlength=count * count)
        between = traffic.astype(np.float64, copy=False).reshape(count, count)
        if self._nodes is not None:
            # Workers on different nodes may gain from each other when one exchanges records with the other's node.
            same = self._node_ids[:, None] == self._node_ids[None, :]
            to_nodes = between @ same
            between = np.where(same, between, to_nodes + to_nodes.T)
        full = [place for place in range(count) if self._excess(place) > 0]
        pairs = [
            (-between[a, b], a, b)
            for a in range(count)
            for b in range(a + 1, count)
            if between[a, b] > 0 or a in full or b in full
        ]
        return [(a, b) for _, a, b in sorted(pairs)]

    def _improve_pair(self, a: int, b: int) -> bool:
        """Makes one pass between two places, and returns whether anything became better."""
        near, places, allowed = self._near, self._places, self._allowed
        twice = 2 * (1.0 if self._node_of[a] == self._node_of[b] else self._node_cost)
        overfull = self._excess(a) > 0 or self._excess(b) > 0
        gains: dict[int, float] = {}
        heaps: dict[int, list[tuple[float, int]]] = {a: [], b: []}
        for place, other in ((a, b), (b, a)):
            heap = heaps[place]
            for v in self._members[place]:
                if allowed is not None and not allowed[v][other]:
                    continue
                self.work += len(near[v])
                gain, border = self._gain(v, other)
                if border or overfull:
                    gains[v] = gain
                    heap.append((-gain, v))
        heapify(heaps[a])
        heapify(heaps[b])
        moved: list[int] = []
        done: set[int] = set()
        first_score = best_score = (self._excess(a) + self._excess(b), 0.0)
        best = 0
        won = 0.0
        while len(moved) - best < self._patience:
            mover = self._next(a, b, heaps, gains, done)
            if mover is None:
                break
            v = mover
            source = places[v]
            target = b if source == a else a
            won += gains.pop(v)
            done.add(v)
            self._move(v, source, target)
            moved.append(v)
            self.work += len(near[v])
            for u, traffic in near[v]:
                there = places[u]
                if (there != source and there != target) or u in done:  # noqa: PLR1714 - a tuple made for each edge costs
                    continue
                if u in gains:
                    gain = gains[u] + (twice * traffic if there == source else -twice * traffic)
                else:
                    if allowed is not None and not allowed[u][target if there == source else source]:
                        continue
                    gain, _ = self._gain(u, target if there == source else source)
                gains[u] = gain
                heappush(heaps[there], (-gain, u))
            score = (self._excess(a) + self._excess(b), -won)
            if score[0] < best_score[0] - _EPSILON or (
                score[0] <= best_score[0] + _EPSILON and score[1] < best_score[1] - self.least
            ):
                best, best_score = len(moved), score
        for v in reversed(moved[best:]):
            target = places[v]
            self._move(v, target, b if target == a else a)
        return best_score < first_score

    def _move(self, v: int, source: int, target: int) -> None:
        self._places[v] = target
        self._members[source].remove(v)
        self._members[target].add(v)
        self._workers.move(self._cpu[v], self._memory[v], source, target)
        here, there = self._node_of[source], self._node_of[target]
        if self._nodes is not None and here != there:
            self._nodes.move(self._cpu[v], self._memory[v], here, there)

    def _gain(self, v: int, other: int) -> tuple[float, bool]:
        """Returns by how much the cost would fall if a task were at another place, and whether the task exchanges
        anything with that place, or with its node if that is another one."""
        places, node_of = self._places, self._node_of
        own = places[v]
        here, there = node_of[own], node_of[other]
        gain, border = 0.0, False
        if here == there:
            for u, traffic in self._near[v]:
                place = places[u]
                if place == own:
                    gain -= traffic
                elif place == other:
                    gain += traffic
                    border = True
            return gain, border
        far, more = self._node_cost, self._node_cost - 1
        for u, traffic in self._near[v]:
            place = places[u]
            if place == own:
                gain -= far * traffic
            elif place == other:
                gain += far * traffic
                border = True
            elif node_of[place] == here:
                gain -= more * traffic
            elif node_of[place] == there:
                gain += more * traffic
                border = True
        return gain, border

    def _next(
        self,
        a: int,
        b: int,
        heaps: dict[int, list[tuple[float, int]]],
        gains: dict[int, float],
        done: set[int],
    ) -> int | None:
        """Returns the task whose change of side gains most and overfills the other side by at most one task."""
        found: list[tuple[float, int]] = []
        for source, target in ((a, b), (b, a)):
            heap = heaps[source]
            room, room_memory = self._room(source, target)
            aside: list[tuple[float, int]] = []
            while heap:
                top = heap[0]
                v = top[1]
                if v in done or gains.get(v) != -top[0] or self._places[v] != source:
                    heappop(heap)  # the task has another gain by now
                    continue
                if self._cpu[v] <= room and (self._memory[v] <= room_memory or not self._memory[v]):
                    found.append((top[0], v))
                    break
                if len(aside) >= _TOO_LARGE_MAX:
                    break
                aside.append(heappop(heap))
            for entry in aside:
                heappush(heap, entry)
        if not found:
            return None
        # When the fuller side has too much, it gives a task away, whatever the gain.
        if len(found) == 2:
            over = [self._excess(a), self._excess(b)]
            if over[0] != over[1]:
                return found[0][1] if over[0] > over[1] else found[1][1]
        return min(found)[1]
