"""Algorithm 2: the paper's split and its recursion, against all splits of all small graphs."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.placement.assignment import assign, split
from penstock.placement.traffic import TrafficGraph
from tests.placement.algorithms import check_split
from tests.placement.small import graphs


def test_a_worked_split() -> None:
    """A row of six equal tasks, 5 4 1 4 5 between them, half of which is wanted. From 0: 0, 1, 2 are gathered, and 1
    crosses. So do the others that gather a half, or worse: from 1 it is 1, 0, 2 as well."""
    graph = TrafficGraph.of(6, [(0, 1, 5.0), (1, 2, 4.0), (2, 3, 1.0), (3, 4, 4.0), (4, 5, 5.0)])
    assert split(graph, 0.5, 0.05) == {0, 1, 2}


def test_a_task_that_leads_away_from_the_target_is_passed_over() -> None:
    """Half of 10 is wanted. From 0 (3) its neighbour 1 (4) would make 7, which is farther off than 3; the next, 2 (2),
    makes 5."""
    graph = TrafficGraph.of(4, [(0, 1, 9.0), (0, 2, 1.0), (1, 3, 1.0)], cpu=[3, 4, 2, 1])
    assert split(graph, 0.5, 0.01) in ({0, 2}, {1, 3})
    assert split(TrafficGraph.of(2, [(0, 1, 1.0)], cpu=[3, 1]), 0.5, 0.1) is None, "no part is near to a half"


def test_it_begins_anew_elsewhere_when_the_graph_is_in_pieces() -> None:
    graph = TrafficGraph.of(4, [(0, 1, 1.0), (2, 3, 1.0)])
    assert split(graph, 0.75, 0.1) in ({0, 1, 2}, {2, 3, 0})


@pytest.mark.parametrize("tasks", range(1, 8))
def test_every_small_graph(tasks: int) -> None:
    """`make campaign-placement` has those of eight."""
    for pairs in graphs(tasks):
        check_split(tasks, pairs)


def test_nodes_get_what_they_can_take() -> None:
    """Twelve equal tasks in a row for nodes of 1, 2 and 3 workers: 2, 4 and 6 tasks, next to each other."""
    graph = TrafficGraph.of(12, [(v, v + 1, 1.0) for v in range(11)])
    places = assign(graph, np.array([1, 2, 3]) / 6, 0.05, 100)
    assert np.bincount(places).tolist() == [2, 4, 6]
    assert graph.edge_cut(places) == 2


def test_parents_stay_together() -> None:
    """Four pairs that talk much: with at most four parents no pair is torn apart."""
    graph = TrafficGraph.of(8, [(0, 4, 9.0), (1, 5, 9.0), (2, 6, 9.0), (3, 7, 9.0), (0, 1, 1.0), (2, 3, 1.0)])
    places = assign(graph, np.array([0.5, 0.5]), 0.1, task_num_threshold=4)
    assert graph.edge_cut(places) == 0
    assert places[:4].tolist() == places[4:].tolist()


def test_without_a_split_within_the_factor_the_nearest_is_taken() -> None:
    places = assign(TrafficGraph.of(3, [(0, 1, 1.0)], cpu=[5, 1, 1]), np.array([0.5, 0.5]), 0.1, 100)
    assert sorted(np.bincount(places, weights=[5, 1, 1]).tolist()) == [2, 5]


@pytest.mark.parametrize("tasks", [0, 1])
def test_fewer_tasks_than_nodes(tasks: int) -> None:
    places = assign(TrafficGraph.of(tasks, []), np.full(4, 0.25), 0.1, 100)
    assert len(places) == tasks
