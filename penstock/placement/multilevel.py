"""Searches for a partition on several levels, so that the cost of the search grows with the number of edges, and not
with the third power of the number of tasks.

Algorithm 1 joins tasks into parents until few are left (`placement/consolidation.py`). These parents are assigned to
the places in several ways: by Algorithm 2, and by halves that are refined. On the way back to the tasks each level is
refined (`placement/refinement.py`). Then all levels are gone through again, with parents whose tasks are at the same
place already: what could not be moved as single tasks may be moved as a parent. Where this gains nothing, the search
begins anew. No step makes the best result worse.

Levels gain nothing for few tasks. There the search ends when several beginnings have led to the same result. Otherwise
it moves groups of tasks and refines what comes of it, until this has gained nothing for some time, which finds better
partitions in less time than new beginnings do.

The search is limited by the number of edges that it looks at, not by a clock, so the same graph has the same partition
on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.placement.assignment import assign_from_each_level
from penstock.placement.balance import Limits, limits_of, pack
from penstock.placement.consolidation import consolidate_once
from penstock.placement.refinement import PATIENCE, Partition
from penstock.placement.traffic import Floats, Ints, TrafficGraph

# Levels are made until so many parents a place are left, or so many in all.
_PARENTS_A_PLACE = 15
_PARENTS_MIN = 40

# A level with more of the tasks of the one before than this is not worth having.
_SHRINKS_TO = 0.95

# A parent may have so much more than an even part of the CPU on the coarsest level.
_PARENT_MOST = 1.5

# Up to so many tasks, or as many as parents on the coarsest level, levels gain nothing. There the paper's algorithm,
# which grows with the third power of them, begins on the tasks themselves.
_FEW_TASKS = 150

# A partition that so many beginnings reach is taken for the best, unless the tasks are so few that most beginnings are
# alike.
_ENOUGH, _ALIKE = 5, 10

# So many beginnings by chance, and so many moves of a group of tasks in a row which gain nothing, for each place but
# the first; and the same for all places of a quick search. The group has up to this part of the tasks.
_BEGINNINGS, _KICKS_A_PLACE = 8, 15
_BEGINNINGS_QUICK, _KICKS_QUICK = 4, 35
_KICKED = 1 / 8

# Refining few tasks has less patience than refining many, because what it misses is found from elsewhere.
_PATIENCE_OF_FEW, _PATIENCE_QUICK = 14, 8

# The paper's algorithm divides at most so many parents, except where it begins on the tasks themselves.
_PARENTS_OF_PAPERS = 100

# On the coarsest level so many partitions are made by halves, each half in the best of so many ways.
_BISECTED = 2
_SPLITS = 2

# How often all levels are gone through again, unless that looks at too many edges (some 4 million take a second; to
# choose a task that a part grows by takes as long as so many of them).
_CYCLES = 8

# A quick search has so many cycles, and none of the beginnings of few tasks.
_CYCLES_QUICK = 2
_WORK_MAX, _WORK_A_TASK = 1_000_000, 1_000
_WORK_A_CHOICE = 50

# How often the pairs of places are gone through, on a level of up to so many tasks.
_ROUNDS_SMALL, _SMALL, _ROUNDS = 10, 2_000, 3


def partition(
    graph: TrafficGraph,
    fair: Floats,
    factor: float,
    *,
    memory: Floats | None = None,
    seed: int = 0,
    start: Ints | None = None,
    quick: bool = False,
) -> Ints:
    """Returns the place of each task, such that little traffic crosses between places and each place is within its
    limits (`limits_of`). There are as many places as shares in `fair`, which add up to 1. `memory` is the number of
    bytes that each place has. `start` is a partition from which the search begins too, so that the result is no worse.
    `quick`: takes a third of the time, and finds a little less. Raises Infeasible when a task may run nowhere, or
    memory is too small."""
    count = len(fair)
    if count == 1 or not len(graph):
        return np.zeros(len(graph), dtype=np.int64)
    room = np.full(count, np.inf) if memory is None else memory
    packed = pack(graph, fair, room)
    limits = limits_of(graph, fair, factor, room, packed)
    search = _Search(graph, fair, factor, limits, seed, lambda graph, places: Partition(graph, limits, places))
    return search.best(packed, [] if start is None else [_where_allowed(graph, start)], quick=quick)


def partition_over_nodes(
    graph: TrafficGraph,
    workers: Workers,
    factor: float,
    node_cost: float,
    *,
    seed: int,
    starts: Sequence[Ints],
) -> Ints:
    """Returns the worker of each task, such that hops cost little (`TrafficGraph.hop_cost`), and each worker and each
    node is within its limits. `starts` are partitions from which the search begins. The first of them is within the
    limits of the nodes, and its workers may keep the CPU that they have in it, because tasks cannot be divided. The
    result costs no more than any of `starts` that is within the limits."""
    if not len(graph):
        return starts[0]
    node_of, nodes = workers.node_of, workers.nodes
    count = len(node_of)
    allowed = None if graph.allowed is None else graph.allowed[:, node_of]
    spread = replace(graph, allowed=allowed)
    fair = workers.speeds / workers.speeds.sum()
    room = np.full(count, np.inf)
    packed = pack(spread, fair, room)
    even = limits_of(spread, fair, factor, room, packed)
    limits = Limits(np.maximum(even.cpu, graph.loads(starts[0], count)), room)

    def made(graph: TrafficGraph, places: Ints) -> Partition:
        return Partition(graph, limits, places, node_of, nodes, node_cost)

    return _Search(spread, fair, factor, limits, seed, made).best(packed, starts, quick=True)


def papers(graph: TrafficGraph, fair: Floats, factor: float) -> Ints:
    """Returns the paper's own placement, with the threshold of its consolidation that lets the least traffic across
    within `factor` of balance. Of equal results it takes the one with the largest threshold."""
    anywhere = graph.anywhere()
    room = np.full(len(fair), np.inf)
    limits = limits_of(anywhere, fair, factor, room, pack(anywhere, fair, room))
    plans = _papers_plans(graph, fair, factor, _PARENTS_OF_PAPERS)
    return min((Partition(anywhere, limits, places) for places in plans), key=_badness).places


def _papers_plans(graph: TrafficGraph, fair: Floats, factor: float, parents_most: int) -> Iterator[Ints]:
    """Generates the placements of the paper's algorithm for all thresholds of up to `parents_most` that make a
    difference. The factor of each split is chosen so that all splits in a row keep within `factor`."""
    return assign_from_each_level(graph, fair, _of_each_split(len(fair), factor) / 2, parents_most)


def _of_each_split(places: int, factor: float) -> float:
    """Returns by how much each split may be off, so that the splits in a row down to one place keep within `factor`."""
    return float((1 + factor) ** (1 / max(1, (places - 1).bit_length())) - 1)


@dataclass(frozen=True)
class Workers:
    """Holds the node of each worker, the limits of the nodes, and the speed of each worker."""

    node_of: Ints
    nodes: Limits
    speeds: Floats


class _Search:
    """`made` makes a partition of a graph, which is the search's own or one of its parents."""

    def __init__(
        self,
        graph: TrafficGraph,
        fair: Floats,
        factor: float,
        limits: Limits,
        seed: int,
        made: Callable[[TrafficGraph, Ints], Partition],
    ) -> None:
        self._made = made
        self._graph = graph
        self._fair = fair
        self._factor = factor
        self._limits = limits
        self._chance = random.Random(seed)
        self._work = 0
        self._patience = PATIENCE
        self._known: dict[bytes, Partition] = {}  # what a partition of few tasks was refined to
        self._parents = max(_PARENTS_MIN, _PARENTS_A_PLACE * len(fair))

    def best(self, packed: Ints, starts: Sequence[Ints], *, quick: bool = False) -> Ints:
        """Returns the best partition that the search reaches from given ones, from one within the limits, and from
        others. Of equal results it takes the one from the earliest of these beginnings. `quick`: takes
        a third of the time, and finds a little less."""
        if len(self._graph) <= max(self._parents, _FEW_TASKS):
            self._patience = _PATIENCE_QUICK if quick else _PATIENCE_OF_FEW
            return self._best_of_few(packed, starts, quick).places
        beginnings = [self._refined(self._graph, start) for start in starts]
        best = min((*beginnings, self._through_levels(None)), key=_badness)
        if best.overload > 0:
            best = min(best, self._refined(self._graph, packed), key=_badness)
        last = best
        for _ in range(_CYCLES_QUICK if quick else _CYCLES):
            if self._work > _WORK_MAX + _WORK_A_TASK * len(self._graph):
                break
            found = self._through_levels(last.places)
            better = _badness(found) < _badness(last)
            # Where nothing is left to be gained, another beginning may end elsewhere.
            last = found if better else self._through_levels(None)
            best = min(best, last, key=_badness)
        return best.places

    def _best_of_few(self, packed: Ints, starts: Sequence[Ints], quick: bool) -> Partition:
        """Returns the best partition of few tasks: one that many beginnings reach, or one that nothing improves any
        more."""
        graph, places = self._graph, len(self._fair)
        best = self._refined(graph, packed) if not starts else self._refined(graph, starts[0])
        reached = 1  # from how many beginnings
        for beginning in (*starts[1:], packed, *self._papers(graph, _FEW_TASKS)):
            best, reached = self._with(beginning, best, reached)
        for _ in range(_BEGINNINGS_QUICK if quick else _BEGINNINGS):
            if reached >= _ENOUGH and len(graph) > _ALIKE:
                return best
            best, reached = self._with(self._grown(graph, self._fair), best, reached)
        return self._kicked_until_nothing_helps(best, _KICKS_QUICK if quick else _KICKS_A_PLACE * (places - 1))

    def _with(self, beginning: Ints, best: Partition, reached: int) -> tuple[Partition, int]:
        """Returns the better one of the best partition and the one that a beginning is refined to, and from how many
        beginnings it was reached."""
        if beginning.tobytes() in self._known:
            return best, reached
        found = self._refined(self._graph, beginning)
        if _better(found, best):
            return found, 1
        return best, reached + (not _better(best, found))

    def _kicked_until_nothing_helps(self, best: Partition, most: int) -> Partition:
        """Returns the best partition that is found by moving a group of tasks and refining the result, until a number
        of these moves in a row gain nothing. A partition that is as good takes the place of the last one."""
        last, tries = best, 0
        while tries < most:
            tries += 1
            places = last.places
            kicked = self._kicked(places)
            elsewhere = kicked != places
            found = self._refined(self._graph, kicked, {*places[elsewhere].tolist(), *kicked[elsewhere].tolist()})
            if _better(found, last):
                last, tries = found, 0
            elif not _better(last, found):
                last = found
        return last if _better(last, best) else best

    def _kicked(self, places: Ints) -> Ints:
        """Returns the partition with a group of tasks, which exchange records, at another place."""
        graph = self._graph
        near = graph.near
        v = self._chance.randrange(len(graph))
        group = [v]
        for _ in range(self._chance.randint(0, max(1, int(_KICKED * len(graph))))):
            u = group[self._chance.randrange(len(group))]
            if near[u]:
                group.append(near[u][self._chance.randrange(len(near[u]))][0])
        found = places.copy()
        other = self._chance.randrange(len(self._fair) - 1)
        found[group] = other + (other >= places[v])
        return _where_allowed(graph, found)

    def _refined(self, graph: TrafficGraph, places: Ints, begin: Iterable[int] | None = None) -> Partition:
        key = places.tobytes()
        if graph is self._graph and key in self._known:
            return self._known[key]
        found = self._made(graph, places)
        found.improve(_ROUNDS_SMALL if len(graph) <= _SMALL else _ROUNDS, begin, self._patience)
        self._work += found.work
        if graph is self._graph and len(graph) <= _FEW_TASKS:
            self._known[key] = self._known[found.places.tobytes()] = found
        return found

    def _through_levels(self, places: Ints | None) -> Partition:
        """Coarsens the graph by consolidation and refines the partition on the way back, beginning with a given
        partition, or with the best one on the coarsest level."""
        graph, at = self._graph, places
        levels: list[tuple[TrafficGraph, Ints]] = []  # each level's graph, and its tasks' parents
        while len(graph) > self._parents:
            order = list(range(len(graph)))
            self._chance.shuffle(order)
            level = consolidate_once(graph, order, _PARENT_MOST * self._graph.total_cpu / self._parents, at)
            if len(level.graph) > _SHRINKS_TO * len(graph):
                break
            self._work += len(graph.neighbours)
            levels.append((graph, level.parents))
            graph = level.graph
            if at is not None:
                above = np.zeros(len(graph), dtype=np.int64)
                above[level.parents] = at
                at = above
        best = self._begun(graph) if at is None else self._refined(graph, at)
        for graph, parents in reversed(levels):
            best = self._refined(graph, best.places[parents])
        return best

    def _begun(self, graph: TrafficGraph) -> Partition:
        """Returns the best of several beginnings on the coarsest level."""
        beginnings = [*self._papers(graph, _PARENTS_OF_PAPERS), *(self._bisected(graph) for _ in range(_BISECTED))]
        best = min((self._made(graph, places) for places in beginnings), key=_badness)
        return self._refined(graph, best.places)

    def _papers(self, graph: TrafficGraph, parents_most: int) -> Iterator[Ints]:
        for places in _papers_plans(graph, self._fair, self._factor, parents_most):
            yield _where_allowed(graph, places)

    def _bisected(self, graph: TrafficGraph) -> Ints:
        """Finds places by halving: the tasks are split in two, for the first half of the places and for the rest, and
        each part again. This is Algorithm 2, but each split is refined, which is quick with two sides."""
        places = np.zeros(len(graph), dtype=np.int64)
        factor = _of_each_split(len(self._fair), self._factor)
        parts = [(np.arange(len(graph)), np.arange(len(self._fair)))]
        while parts:
            tasks, nodes = parts.pop()
            if len(nodes) == 1 or not len(tasks):
                places[tasks] = nodes[0]
                continue
            half = -(-len(nodes) // 2)
            sides = nodes[:half], nodes[half:]
            part = graph.part(tasks)
            if part.allowed is not None:
                part = replace(part, allowed=np.stack([part.allowed[:, side].any(axis=1) for side in sides], axis=1))
            fair = np.array([self._fair[side].sum() for side in sides])
            fair /= fair.sum()
            memory = np.array([self._limits.memory[side].sum() for side in sides])
            limits = Limits(fair * part.total_cpu * (1 + factor), memory)
            halves = (self._halved(part, fair, limits) for _ in range(_SPLITS))
            first = min(halves, key=_badness).places == 0
            parts += [(tasks[first], sides[0]), (tasks[~first], sides[1])]
        return _where_allowed(graph, places)

    def _halved(self, part: TrafficGraph, fair: Floats, limits: Limits) -> Partition:
        found = Partition(part, limits, self._grown(part, fair))
        found.improve(_ROUNDS_SMALL)
        self._work += found.work + _WORK_A_CHOICE * len(part)
        return found

    def _grown(self, graph: TrafficGraph, fair: Floats) -> Ints:
        """Grows places around tasks that were chosen at random. Each place takes the task that exchanges most with it,
        until it has its share. A task that may not run at its place is left to the refinement."""
        places = np.full(len(graph), -1, dtype=np.int64)
        order = list(range(len(graph)))
        self._chance.shuffle(order)
        seeds = iter(order)
        for place, share in enumerate(fair[:-1]):
            wanted, load = share * graph.total_cpu, 0.0
            ties = np.zeros(len(graph))
            while load < wanted:
                v = int(np.where(places < 0, ties, -1.0).argmax())
                if places[v] >= 0 or ties[v] <= 0:
                    fresh = next((seed for seed in seeds if places[seed] < 0), None)
                    if fresh is None:
                        break
                    v = fresh
                places[v] = place
                load += graph.cpu[v]
                row = slice(graph.starts[v], graph.starts[v + 1])
                ties[graph.neighbours[row]] += graph.traffic[row]
        places[places < 0] = len(fair) - 1
        return _where_allowed(graph, places)


def _where_allowed(graph: TrafficGraph, places: Ints) -> Ints:
    """Puts each task that may not run at its place into the first place where it may run."""
    if graph.allowed is None:
        return places
    allowed = graph.allowed[np.arange(len(graph)), places]
    return np.where(allowed, places, graph.allowed.argmax(axis=1)).astype(np.int64)


def _better(one: Partition, other: Partition) -> bool:
    """Returns whether a partition is better than another one by more than a rounding error."""
    (over, cost), (other_over, other_cost) = one.badness, other.badness
    return over < other_over or (over == other_over and cost < other_cost - one.least)


def _badness(partition: Partition) -> tuple[float, float]:
    return partition.badness
