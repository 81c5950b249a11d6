"""Algorithm 1: the paper's procedure on a worked example, and what must hold of every result."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.placement.consolidation import consolidate, consolidate_once, expand
from penstock.placement.shape import TrafficEdge
from penstock.placement.traffic import TrafficGraph
from tests.placement.algorithms import check_consolidation
from tests.placement.exact import edges_of
from tests.placement.small import graphs

# Seven operators of one task each, as in the paper's Fig. 7:
#
#     0 --10-- 1 --3-- 2 --8-- 3
#              |       |
#              4       5
#              |       |
#              4 --6-- 5 --1-- 6
EXAMPLE = [(0, 1, 10.0), (1, 2, 3.0), (2, 3, 8.0), (1, 4, 4.0), (2, 5, 5.0), (4, 5, 6.0), (5, 6, 1.0)]


def test_the_procedure_of_fig_7() -> None:
    """0 takes 1, its only neighbour; 1 is taken. 2 takes 3 (8), not 5 (5) or 1 (taken). 4 takes 5 (6). 6 has only 5,
    which is taken: it is left alone. Between the parents A = {0, 1}, B = {2, 3}, C = {4, 5}, D = {6}: A-B 3, A-C 4,
    B-C 5, C-D 1. Once more: A takes C (4), B's neighbours are taken, and so are D's."""
    graph = TrafficGraph.of(7, EXAMPLE)
    first = consolidate_once(graph)
    assert first.parents.tolist() == [0, 0, 1, 1, 2, 2, 3]
    between = {(u, v): traffic for u, v, traffic in edges_of(first.graph)}
    assert between == {(0, 1): 3.0, (0, 2): 4.0, (1, 2): 5.0, (2, 3): 1.0}
    levels = consolidate(graph, 3)
    assert [level.parents.tolist() for level in levels] == [[0, 0, 1, 1, 2, 2, 3], [0, 1, 0, 2]]
    assert expand(levels, np.array([7, 8, 9])).tolist() == [7, 7, 8, 8, 7, 7, 9]


def test_of_equal_neighbours_the_first_is_taken() -> None:
    graph = TrafficGraph.of(3, [(0, 2, 1.0), (0, 1, 1.0)])
    assert consolidate_once(graph).parents.tolist() == [0, 0, 1]


def test_it_ends_when_nobody_talks() -> None:
    assert consolidate(TrafficGraph.of(5, []), 2) == []
    levels = consolidate(TrafficGraph.of(5, [(0, 1, 1.0)]), 1)
    assert [len(level.graph) for level in levels] == [4]


@pytest.mark.parametrize("tasks", range(1, 8))
def test_every_small_graph(tasks: int) -> None:
    """`make campaign-placement` has those of eight."""
    for pairs in graphs(tasks):
        check_consolidation(tasks, pairs)


EDGES = st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19), st.floats(0, 9)), max_size=60)


@given(EDGES, st.integers(1, 20))
def test_levels_end_at_the_threshold_or_where_nothing_can_be_joined(edges: list[TrafficEdge], threshold: int) -> None:
    graph = TrafficGraph.of(20, edges)
    levels = consolidate(graph, threshold)
    sizes = [20, *(len(level.graph) for level in levels)]
    assert all(after < before <= 2 * after for before, after in itertools.pairwise(sizes))
    assert all(size > threshold for size in sizes[:-1])
    last = levels[-1].graph if levels else graph
    assert sizes[-1] <= threshold or len(last.neighbours) == 0


def test_what_may_not_be_together_is_not() -> None:
    apart = np.array([[True, False], [False, True], [True, True]])
    graph = TrafficGraph.of(3, [(0, 1, 9.0), (0, 2, 1.0)], allowed=apart)
    assert consolidate_once(graph).parents.tolist() == [0, 1, 0]


def test_beyond_the_paper_it_minds_weight_places_and_order() -> None:
    graph = TrafficGraph.of(4, [(0, 1, 9.0), (1, 2, 5.0), (2, 3, 9.0)], cpu=[3, 3, 1, 1])
    assert consolidate_once(graph, most_cpu=4).parents.tolist() == [0, 1, 1, 2]
    assert consolidate_once(graph, only_in=np.array([0, 1, 1, 0])).parents.tolist() == [0, 1, 1, 2]
    assert consolidate_once(graph, order=[1, 0, 2, 3]).parents.tolist() == [0, 0, 1, 1]
    assert consolidate_once(graph, order=[3, 2, 1, 0]).parents.tolist() == [1, 1, 0, 0]
