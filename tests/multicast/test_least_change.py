"""A tree is adapted to another limit or to other nodes with the fewest changes of parents."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.multicast import least_change
from penstock.runtime.multicast.building import non_blocking, sequential
from penstock.runtime.multicast.change_prices import by_prices
from penstock.runtime.multicast.change_problem import Problem
from penstock.runtime.multicast.least_change import adapted, changed_parents
from penstock.runtime.multicast.tree import Tree
from tests.multicast.brute_force import by_integer_programme, every_tree
from tests.multicast.sim import check_shape

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


def test_only_children_of_a_node_that_left_change_when_nothing_else_must() -> None:
    tree = non_blocking(0, SEVEN, 2)
    assert changes(tree, [1, 2, 4, 5, 6, 7], 2) == {6}
    assert adapted(tree, [], 2) == Tree(0, {})


def test_nothing_changes_when_nothing_must() -> None:
    for nodes in range(40):
        for limit in range(1, 6):
            tree = non_blocking(0, range(1, nodes + 1), limit)
            assert changed_parents(tree, adapted(tree, range(1, nodes + 1), limit)) == set()


def test_no_tree_of_the_right_shape_has_fewer_changes() -> None:
    """All trees of up to four nodes, from all trees: every order, every limit, every node that leaves."""
    for count in range(1, 5):
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


@pytest.mark.parametrize("seed", range(40))
def test_an_integer_programme_finds_no_fewer_changes(seed: int) -> None:
    """Trees of up to ten nodes that have been changed before."""
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
    least = by_integer_programme(tree, nodes, limit)
    assert len(changes(tree, nodes, limit)) == least, (tree, nodes, limit)
    # And what the prices say about all trees is true.
    problem = Problem.of(tree, nodes, limit)
    _, bound = by_prices(problem, problem.nodes[: problem.full], 10)
    assert bound >= len(tree.destinations & set(nodes)) - least


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
        rounds, prompt = data.draw(st.sampled_from([0, 3, 60])), data.draw(st.booleans())
        after = adapted(tree, nodes, limit, rounds=rounds, prompt=prompt)
        check_shape(after, set(nodes), limit)
        tree = after


@pytest.mark.parametrize("count", [3, 7, 12])
@pytest.mark.parametrize("limits", [(2, 3), (3, 1), (1, 2, 4)])
def test_a_prompt_answer_for_few_nodes_changes_as_few(count: int, limits: tuple[int, ...]) -> None:
    nodes = range(1, count + 1)
    tree = non_blocking(0, nodes, limits[-1])
    for limit in limits * 3:
        after, thorough = adapted(tree, nodes, limit, prompt=True), adapted(tree, nodes, limit)
        assert len(changed_parents(tree, after)) == len(changed_parents(tree, thorough))
        tree = after


@pytest.mark.parametrize("count", [15, 63, 150])
def test_a_prompt_answer_takes_little_work(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    work: list[int] = []

    def counting(problem: Problem, found: list[int], rounds: int) -> tuple[list[int], int]:
        work.append(rounds * len(problem.nodes) * problem.units)
        return by_prices(problem, found, rounds)

    monkeypatch.setattr(least_change, "by_prices", counting)
    nodes = range(1, count + 1)
    for prompt in (True, False):
        adapted(non_blocking(0, nodes, 3), nodes, 2, prompt=prompt)
    assert work[0] <= max(1_000, count * 12)  # one round at least
    assert work[1] > 4 * work[0]


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
