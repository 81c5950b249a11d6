"""Trees: what is one, the three ways to build one, and how many nodes it reaches in which time."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.multicast.building import binomial, non_blocking, sequential
from penstock.runtime.multicast.reach import binomial_degree, reach, reaches, units_to_reach
from penstock.runtime.multicast.tree import Tree
from tests.multicast.sim import reached_in

SEVEN = range(1, 8)


def test_the_trees_of_the_paper() -> None:
    """Nodes are numbered in the order in which they join; the first is the paper's Fig. 6."""
    assert non_blocking(0, SEVEN, 2).children == {0: (1, 2), 1: (3, 4), 2: (5, 7), 3: (6,)}
    assert non_blocking(0, SEVEN, 3).children == {0: (1, 2, 4), 1: (3, 5), 2: (6,), 3: (7,)}
    assert binomial(0, SEVEN) == non_blocking(0, SEVEN, 3)
    assert sequential(0, SEVEN).children == {0: (1, 2, 3, 4, 5, 6, 7)}
    assert non_blocking(0, SEVEN, 1).children == {node: (node + 1,) for node in range(7)}
    assert non_blocking(0, [], 2) == Tree(0, {})


def test_layers_are_times_and_depths_are_links() -> None:
    """In Fig. 6 the root sends to 1 in the first unit and to 2 in the second, in which 1 already sends to 3."""
    tree = non_blocking(0, SEVEN, 2)
    assert tree.layer == {0: 0, 1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 3, 7: 4}
    assert tree.depth == {0: 0, 1: 1, 2: 1, 3: 2, 4: 2, 5: 2, 7: 2, 6: 3}
    assert (tree.last_layer, tree.out_degree, len(tree)) == (4, 2, 8)
    assert sequential(0, SEVEN).last_layer == 7
    assert Tree(0, {}).last_layer == Tree(0, {}).out_degree == 0


def test_the_root_s_share_of_its_link() -> None:
    """A link of 100 Mbit/s carries each entry once for each child of the root."""
    trees = [sequential(0, SEVEN), binomial(0, SEVEN), non_blocking(0, SEVEN, 2), non_blocking(0, SEVEN, 1)]
    assert [round(100 / tree.out_degree, 1) for tree in trees] == [14.3, 33.3, 50, 100]


@pytest.mark.parametrize(
    ("limit", "reached"), [(1, [1, 2, 3, 4, 5]), (2, [1, 2, 4, 7, 12, 20, 33]), (3, [1, 2, 4, 8, 15, 28, 52])]
)
def test_the_recurrence(limit: int, reached: list[int]) -> None:
    assert list(islice(reaches(limit), len(reached))) == reached
    assert [reach(units, limit) for units in range(len(reached))] == reached
    assert reach(-1, limit) == 0


def test_the_root_s_degree_is_the_limit_or_that_of_a_binomial_tree() -> None:
    assert [binomial_degree(nodes) for nodes in (0, 1, 2, 3, 4, 7, 8, 480)] == [0, 1, 2, 2, 3, 3, 4, 9]
    for nodes in range(1, 70):
        for limit in range(1, 9):
            tree = non_blocking(0, range(1, nodes + 1), limit)
            assert len(tree.of(0)) == tree.out_degree == min(limit, binomial_degree(nodes))


@given(nodes=st.integers(0, 300), limit=st.integers(1, 12))
def test_a_tree_spans_keeps_its_limit_and_reaches_what_the_recurrence_says(nodes: int, limit: int) -> None:
    tree = non_blocking(0, range(1, nodes + 1), limit)
    assert tree.destinations == set(range(1, nodes + 1))
    assert tree.out_degree <= limit
    assert tree.last_layer == units_to_reach(nodes, limit)
    for units in range(tree.last_layer + 1):
        assert reached_in(tree, units) == min(reach(units, limit), nodes + 1)


@given(nodes=st.integers(1, 200), limit=st.integers(1, 8))
def test_a_higher_limit_never_reaches_the_last_node_later(nodes: int, limit: int) -> None:
    assert units_to_reach(nodes, limit + 1) <= units_to_reach(nodes, limit)


@pytest.mark.parametrize(
    "children",
    [
        {0: (1, 1)},  # two links between the same nodes
        {0: (1, 2), 1: (2,)},  # two parents
        {0: (1,), 1: (0,)},  # a root with a parent
        {0: (1,), 2: (3,)},  # nodes that the root does not reach
        {0: (1,), 2: (3,), 3: (2,)},  # and a circle of them
    ],
)
def test_what_is_no_tree_cannot_be_made(children: dict[int, tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"two parents|does not reach"):
        Tree(0, children)


def test_a_limit_below_1_is_refused() -> None:
    with pytest.raises(ValueError, match="below 1"):
        non_blocking(0, SEVEN, 0)
    with pytest.raises(ValueError, match="below 1"):
        next(reaches(0))
