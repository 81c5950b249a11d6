"""The paper's scheduler on the paper's topologies: its threshold is searched, and so consolidation does something."""

from __future__ import annotations

import random

import numpy as np
import pytest

from penstock.placement.assignment import assign, assign_from_each_level
from penstock.placement.balance import limits_of, pack
from penstock.placement.baselines import round_robin, turbostream
from penstock.placement.consolidation import consolidate
from penstock.placement.multilevel import papers
from penstock.placement.placement import shares
from penstock.placement.traffic import TrafficGraph
from tests.placement import random_topologies
from tests.placement.exact import fits
from tests.placement.papers_topologies import DEPLOYMENTS, TOPOLOGIES, machines, topology

# Where the deployment leaves something to gain. With one node nothing crosses; and the halves of SOL on two nodes, and
# of a Throughput test of four tasks, are as good without consolidation.
GAINS = {
    *(("SOL", nodes, workers) for nodes, workers in ((8, 8), (4, 8), (4, 4))),
    *(("Throughput", nodes, workers) for nodes, workers in ((8, 8), (4, 8), (2, 8), (4, 4), (2, 4))),
}


@pytest.mark.parametrize(("nodes", "workers"), DEPLOYMENTS)
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_papers_scheduler_lets_no_more_across_than_round_robin(name: str, nodes: int, workers: int) -> None:
    """And no node gets more than with round-robin, or than the factor allows."""
    job, at = topology(name, workers), machines(nodes, workers)
    found, turns = turbostream(job, at), round_robin(job, at)
    assert found.between_nodes(job.graph) <= turns.between_nodes(job.graph) + 1e-9
    assert found.imbalance(job.graph) <= max(0.1, turns.imbalance(job.graph)) + 1e-9


@pytest.mark.parametrize(("nodes", "workers"), DEPLOYMENTS)
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_consolidation_is_not_idle(name: str, nodes: int, workers: int) -> None:
    """These topologies have at most 26 tasks: a threshold of 100 would leave all of them as they are."""
    graph, fair = topology(name, workers).graph, shares(machines(nodes, workers))
    assert consolidate(graph, 100) == []
    splits = max(1, (nodes - 1).bit_length())  # in a row, which keep within the factor together
    without = graph.edge_cut(assign(graph, fair, (1.1 ** (1 / splits) - 1) / 2, len(graph)))
    found = graph.edge_cut(papers(graph, fair, 0.1))
    assert found <= without + 1e-9
    assert (found < without - 1e-9) == ((name, nodes, workers) in GAINS)


def test_all_thresholds_that_make_a_difference_are_tried() -> None:
    for seed in range(10):
        graph = random_topologies.topology(random.Random(seed), 40)
        fair = np.full(3, 1 / 3)
        found = {tuple(at.tolist()) for at in assign_from_each_level(graph, fair, 0.05, 30)}
        thresholds = [number for number in range(3, 31) if len(consolidate(graph, number)[-1].graph) >= 3]
        wanted = {tuple(assign(graph, fair, 0.05, threshold).tolist()) for threshold in thresholds}
        assert found == wanted, seed


def test_the_best_of_the_thresholds_is_taken() -> None:
    for seed in range(10):
        graph = random_topologies.topology(random.Random(seed), 30)
        fair = np.full(2, 0.5)
        room = np.full(2, np.inf)
        bounds = limits_of(graph, fair, 0.1, room, pack(graph, fair, room))
        all_of_them = [assign(graph, fair, 0.05, threshold) for threshold in range(2, 31)]
        least = min((graph.edge_cut(at) for at in all_of_them if fits(graph, at, bounds)), default=None)
        found = papers(graph, fair, 0.1)
        if least is not None:
            assert fits(graph, found, bounds)
            assert graph.edge_cut(found) == pytest.approx(least), seed


def test_there_is_a_plan_where_nothing_can_be_joined() -> None:
    """More tasks than the threshold may have parents, and fewer tasks than nodes."""
    silent = TrafficGraph.of(120, [])
    assert np.bincount(papers(silent, np.full(4, 0.25), 0.1), minlength=4).max() <= 33
    assert len(papers(TrafficGraph.of(2, [(0, 1, 1.0)]), np.full(4, 0.25), 0.1)) == 2
