"""The best partition of few tasks, beside all partitions that there are."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from penstock.placement.balance import Limits
from penstock.placement.branch_and_bound import BranchAndBound
from penstock.placement.refinement import NodePartition, Partition
from penstock.placement.traffic import Ints, TrafficGraph
from tests.placement.random_topologies import topology

MANY = 1_000_000


def made(seed: int, *, over_nodes: bool, pinned: bool) -> tuple[Partition, list[Partition]]:
    """A partition of a random graph that is within its limits, and all partitions of the graph that are."""
    chance = random.Random(seed)
    graph = topology(chance, 6, widest=3)
    memory = np.array([chance.choice([0.0, 1.0, 2.0]) for _ in range(6)])
    allowed = None
    if pinned:
        allowed = np.array([[chance.random() < 0.8 for _ in range(4)] for _ in range(6)])
        allowed[:, chance.randrange(4)] = True
    graph = replace(graph, memory=memory, allowed=allowed)
    of_workers = np.array([chance.choice([0.4, 0.4, 0.6]) for _ in range(4)]) * graph.total_cpu
    limits = Limits(of_workers, np.array([chance.choice([3.0, 3.0, 9.0]) for _ in range(4)]))
    node_of = np.array([0, 0, 1, 1])
    nodes = Limits(np.array([0.6, 0.6]) * graph.total_cpu, np.array([6.0, chance.choice([6.0, 9.0])]))

    def at(places: Ints) -> Partition:
        if over_nodes:
            return NodePartition(graph, limits, places, node_of, nodes, 3.0)
        return Partition(graph, limits, places)

    every = (np.array(places, dtype=np.int64) for places in itertools.product(range(4), repeat=6))
    may_be = (places for places in every if allowed is None or allowed[np.arange(6), places].all())
    fit = [found for found in map(at, may_be) if not found.overload]
    return chance.choice(fit), fit


@pytest.mark.parametrize("over_nodes", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_better_than_what_is_found(seed: int, over_nodes: bool) -> None:
    known, fit = made(seed, over_nodes=over_nodes, pinned=seed % 2 == 1)
    least = min(found.cost for found in fit)
    places, proved = BranchAndBound(known, MANY).search()
    best = known if places is None else next(found for found in fit if (found.places == places).all())
    assert proved
    assert best.cost == pytest.approx(least)
    assert BranchAndBound(best, MANY).search() == (None, True)


def test_the_search_ends_after_its_steps() -> None:
    known, _ = made(3, over_nodes=True, pinned=False)
    everywhere = BranchAndBound(known, MANY).search()
    assert everywhere[1]
    assert not BranchAndBound(known, 3).search()[1]


def test_equal_places_are_not_tried_one_by_one() -> None:
    """A row of six tasks and four places that take two of them each."""
    graph = TrafficGraph.of(6, [(0, 1, 1.0), (1, 2, 1.0), (2, 3, 1.0), (3, 4, 1.0), (4, 5, 1.0)])
    limits = Limits(np.full(4, 2.0), np.full(4, np.inf))
    known = Partition(graph, limits, np.array([0, 1, 2, 0, 1, 2]))
    places, proved = BranchAndBound(known, 60).search()
    assert proved
    assert places is not None
    assert graph.edge_cut(places) == 2
