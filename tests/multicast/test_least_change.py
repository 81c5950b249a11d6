"""A tree is adapted to another limit or to other nodes with few changes of parents."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.multicast.building import non_blocking, sequential
from penstock.runtime.multicast.least_change import adapted
from penstock.runtime.multicast.tree import Tree
from tests.multicast.brute_force import by_integer_programme, every_tree
from tests.multicast.sim import changed_parents, check_shape

SEVEN = range(1, 8)


def changes(tree: Tree, nodes: list[int], limit: int) -> frozenset[int]:
    after = adapted(tree, nodes, limit)
    check_shape(after, set(nodes), limit)
    return changed_parents(tree, after)


def test_the_scale_down_of_the_paper() -> None:
    """Fig. 8a: T3-1, which is node 4, leaves the root for T2-1, which is node 2."""
    tree = non_blocking(0, SEVEN, 3)
    after = adapted(tree, SEVEN, 2)
    assert changed_parents(tree, after) == {4}
    assert after.parent[4] == 2
    assert after.children == {0: (1, 2), 1: (3, 5), 2: (6, 4), 3: (7,)}


def test_the_scale_up_of_the_paper() -> None:
    """Fig. 8b: T4-1, which is node 7, leaves T2-1 for the root."""
    tree = non_blocking(0, SEVEN, 2)
    after = adapted(tree, SEVEN, 3)
    assert changed_parents(tree, after) == {7}
    assert after.parent[7] == 0


def test_nodes_join_at_the_first_places_with_room() -> None:
    tree = adapted(non_blocking(0, SEVEN, 2), range(1, 11), 2)
    assert changed_parents(non_blocking(0, SEVEN, 2), tree) == set()
    assert [tree.layer[node] for node in (8, 9, 10)] == [4, 4, 4]
    assert adapted(Tree(0, {}), SEVEN, 2).layer == non_blocking(0, SEVEN, 2).layer


def test_a_leaf_of_the_last_layer_leaves_without_a_change() -> None:
    assert changes(non_blocking(0, SEVEN, 2), [1, 2, 3, 4, 5, 6], 2) == set()
    # The layer above stays full: the last node takes the place of one that leaves it.
    assert changes(non_blocking(0, SEVEN, 2), [1, 2, 3, 4, 5, 7], 2) == {7}


def test_children_of_a_node_that_left_change() -> None:
    tree = non_blocking(0, SEVEN, 2)
    assert changes(tree, [1, 2, 4, 5, 6, 7], 2) == {6, 7}  # the seventh in vain
    assert adapted(tree, [], 2) == Tree(0, {})


def test_nothing_changes_when_nothing_must() -> None:
    for nodes in range(40):
        for limit in range(1, 6):
            tree = non_blocking(0, range(1, nodes + 1), limit)
            assert changed_parents(tree, adapted(tree, range(1, nodes + 1), limit)) == set()


def test_no_tree_of_the_right_shape_has_fewer_changes() -> None:
    """All trees of up to three nodes, from all trees: every order, every limit, every node that leaves."""
    for count in range(1, 4):
        nodes = list(range(1, count + 1))
        there = {limit: list(every_tree(0, nodes, limit)) for limit in (1, 2, 3)}
        fewer = {limit: list(every_tree(0, nodes[1:], limit)) for limit in (1, 2, 3)} if count > 1 else {}
        for trees in there.values():
            for tree in trees[:: max(1, len(trees) // 6)]:
                for limit, others in there.items():
                    least = min(len(changed_parents(tree, other)) for other in others)
                    assert len(changes(tree, nodes, limit)) == least, (tree, limit)
                for limit, others in fewer.items():
                    least = min(len(changed_parents(tree, other)) for other in others)
                    assert len(changes(tree, nodes[1:], limit)) == least, (tree, limit)


def test_few_more_nodes_change_than_must() -> None:
    """Trees of up to ten nodes that have been changed before, beside an integer programme."""
    changed = least = 0
    for seed in range(40):
        chance = random.Random(seed)
        nodes = list(range(1, chance.randint(5, 10) + 1))
        tree = non_blocking(0, nodes, chance.randint(1, 4))
        for _ in range(chance.randint(0, 2)):
            tree = adapted(tree, nodes, chance.randint(1, 4))
        if chance.random() < 0.5:
            nodes.remove(chance.choice(nodes))
        if chance.random() < 0.2:
            nodes.append(99)
        limit = chance.randint(1, 4)
        changed += len(changes(tree, nodes, limit))
        least += by_integer_programme(tree, nodes, limit)
    assert least <= changed <= 1.3 * least, (changed, least)


@given(data=st.data())
def test_a_tree_has_the_right_shape_after_any_changes(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 40))
    nodes = list(range(1, count + 1))
    tree = data.draw(st.sampled_from([sequential(0, nodes), non_blocking(0, nodes, 2)]))
    for step in range(data.draw(st.integers(1, 4))):
        gone = data.draw(st.sets(st.sampled_from(nodes), max_size=3)) if nodes else set()
        nodes = [node for node in nodes if node not in gone]
        nodes += range(100 * step + 100, 100 * step + 100 + data.draw(st.integers(0, 3)))
        limit = data.draw(st.integers(1, 6))
        after = adapted(tree, nodes, limit)
        check_shape(after, set(nodes), limit)
        tree = after


def test_a_large_tree_is_adapted_too() -> None:
    nodes = range(1, 5001)
    tree = non_blocking(0, nodes, 3)
    after = adapted(tree, nodes, 2)
    check_shape(after, set(nodes), 2)
    assert len(changed_parents(tree, after)) < 2000


def test_nodes_that_are_named_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        adapted(Tree(0, {}), [1, 1], 2)
    with pytest.raises(ValueError, match="the root"):
        adapted(Tree(0, {}), [0, 1], 2)
