"""Finds the best assignment of few tasks to places, by trying every one that may be better than the best one known.

Tasks are placed one after the other, each after those that it exchanges records with. What the hops between placed
tasks cost, and what those of each other task to them will cost at least, is a lower bound for all assignments that
begin like this. Those that cannot be better than the best one known are left out, and so are those that differ from
another one only by the names of equal places.

The time grows exponentially with the number of tasks, so the search ends after a number of steps, and not by a clock:
the same graph has the same result on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.placement.refinement import Partition
from penstock.placement.traffic import Ints, TrafficGraph


class BranchAndBound:
    """Looks for a partition that costs less than a given one; see the module's docstring."""

    def __init__(self, known: Partition, steps: int) -> None:
        """`known` is within its limits. `steps`: after how many steps the search ends."""
        graph = known.graph
        self._places = len(known.workers.load)
        self._order = _order(graph)
        self._near = graph.near
        self._cpu: list[float] = graph.cpu.tolist()
        self._memory: list[float] = graph.memory.tolist()
        self._workers, self._nodes, self._node_of = known.workers, known.nodes, known.node_of
        places = range(self._places)
        self._costs = [[known.cost_of_a_hop(a, b) if a != b else 0.0 for b in places] for a in places]
        self._allowed = known.allowed
        self._alike = self._which_are_alike()
        self._enough = known.least
        self._steps = steps
        self._at = [-1] * len(graph)
        self._to: list[list[float]] = [[0.0] * self._places for _ in range(len(graph))]
        self._load, self._used = [0.0] * self._places, [0.0] * self._places
        count = len(self._nodes.load)
        self._node_load, self._node_used = [0.0] * count, [0.0] * count
        self._tasks_at = [0] * self._places
        self._tasks_on = [0] * count
        self._best = known.cost
        self._found: list[int] | None = None

    def search(self) -> tuple[Ints | None, bool]:
        """Returns the place of each task in the best partition that is better than the known one (None: there is
        none), and whether all partitions were considered."""
        self._from(0, 0.0, 0.0)
        found = None if self._found is None else np.array(self._found, dtype=np.int64)
        return found, self._steps > 0

    def _which_are_alike(self) -> list[tuple[int, int]]:
        """Returns, for each place, numbers of its kind: equal places of a node have the same second number, and equal
        nodes have the same first number."""
        columns: Sequence[object] = [None] * self._places
        if self._allowed is not None:
            columns = list(zip(*self._allowed, strict=True))
        kinds: dict[object, int] = {}
        of_places = [
            kinds.setdefault((self._workers.cpu_most[w], self._workers.memory_most[w], columns[w]), len(kinds))
            for w in range(self._places)
        ]
        of_nodes = [
            kinds.setdefault(
                (
                    self._nodes.cpu_most[node],
                    self._nodes.memory_most[node],
                    tuple(of_places[w] for w in range(self._places) if self._node_of[w] == node),
                ),
                len(kinds),
            )
            for node in range(len(self._nodes.load))
        ]
        return [(of_nodes[self._node_of[w]], of_places[w]) for w in range(self._places)]

    def _from(self, depth: int, cost: float, rest: float) -> None:
        """Tries all places for the task at this depth. `rest`: what the hops of the tasks that are not placed yet to
        those that are will cost at least."""
        if depth == len(self._order):
            self._best, self._found = cost, list(self._at)
            return
        v = self._order[depth]
        to = self._to[v]
        rest -= min(to)
        for w in sorted(self._choices(v), key=to.__getitem__):
            if cost + to[w] + rest >= self._best - self._enough:
                return
            self._steps -= 1
            if self._steps <= 0:
                return
            self._put(v, w, 1)
            before: list[tuple[int, list[float]]] = []
            more = rest
            of_hop = self._costs[w]
            for u, traffic in self._near[v]:
                if self._at[u] < 0:
                    was = self._to[u]
                    before.append((u, was))
                    self._to[u] = now = [c + traffic * hop for c, hop in zip(was, of_hop, strict=True)]
                    more += min(now) - min(was)
            if cost + to[w] + more < self._best - self._enough:
                self._from(depth + 1, cost + to[w], more)
            for u, was in before:
                self._to[u] = was
            self._put(v, w, -1)

    def _choices(self, v: int) -> list[int]:
        """Returns the places where a task has room and may run. Of equal places without tasks there is only one."""
        cpu, memory = self._cpu[v], self._memory[v]
        empty: set[tuple[int, int, int]] = set()
        found = []
        for w in range(self._places):
            node = self._node_of[w]
            if not self._tasks_at[w]:
                of_node, of_place = self._alike[w]
                # Workers of a node that has tasks are equal to each other only; nodes without tasks all are.
                kind = (node if self._tasks_on[node] else -1, of_node, of_place)
                if kind in empty:
                    continue
                empty.add(kind)
            if (
                self._load[w] + cpu <= self._workers.cpu_most[w]
                and self._node_load[node] + cpu <= self._nodes.cpu_most[node]
                and self._used[w] + memory <= self._workers.memory_most[w]
                and self._node_used[node] + memory <= self._nodes.memory_most[node]
                and (self._allowed is None or self._allowed[v][w])
            ):
                found.append(w)
        return found

    def _put(self, v: int, w: int, sign: int) -> None:
        """Puts a task at a place (1), or takes it away again (-1)."""
        node = self._node_of[w]
        self._at[v] = w if sign > 0 else -1
        self._load[w] += sign * self._cpu[v]
        self._used[w] += sign * self._memory[v]
        self._node_load[node] += sign * self._cpu[v]
        self._node_used[node] += sign * self._memory[v]
        self._tasks_at[w] += sign
        self._tasks_on[node] += sign


def _order(graph: TrafficGraph) -> list[int]:
    """Returns the tasks in the order in which they are placed: each time the one that exchanges most with those before
    it, and of equal ones the one that exchanges most in all."""
    near = graph.near
    inside = [0.0] * len(graph)
    total = [sum(traffic for _, traffic in of) for of in near]
    left = set(range(len(graph)))
    found = []
    while left:
        v = max(left, key=lambda v: (inside[v], total[v], -v))
        left.remove(v)
        found.append(v)
        for u, traffic in near[v]:
            inside[u] += traffic
    return found
