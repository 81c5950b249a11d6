"""The logical graph: names, order, cycles, and what cannot run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.errors import FlowError
from penstock.runtime.operators.ends import Read, Write
from penstock.runtime.operators.stateless import Map
from penstock.runtime.program.graph import Edge, Graph
from penstock.runtime.sinks.call import Null
from penstock.runtime.sources.memory import Memory


def graph(*edges: str) -> Graph:
    """Maps named a to f, with edges such as "ab"."""
    made = Graph("g")
    for name in "abcdef":
        made.add(Map(str, name=name))
    for source, target in edges:
        made.connect(Edge(source, target))
    return made


def test_default_names_get_numbers_and_own_names_must_be_free() -> None:
    made = Graph("g")
    for operator in (Map(str), Map(str, name="map_2"), Map(str), Map(str)):
        operator.declared_at = "flow.py:7"
        made.add(operator)
    assert list(made.operators) == ["map", "map_2", "map_3", "map_4"]
    with pytest.raises(FlowError, match=r"two operators are named 'map_2' \(the first at flow\.py:7\)"):
        made.add(Map(str, name="map_2"))


def test_a_cycle_is_refused_with_its_path() -> None:
    made = graph("ab", "bc", "cd", "ad")
    with pytest.raises(FlowError, match="makes a cycle: b -> c -> d -> b"):
        made.connect(Edge("d", "b"))
    with pytest.raises(FlowError, match="a -> a"):
        made.connect(Edge("a", "a"))
    made.connect(Edge("d", "e"))
    assert len(made.edges) == 5, "a refused edge must not stay"


def test_an_unknown_operator_is_refused_with_those_there_are() -> None:
    with pytest.raises(FlowError, match="no operator 'x'; it has: a, b, c, d, e, f"):
        graph().connect(Edge("a", "x"))


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from("abcdef")), max_size=15, unique=True))
def test_the_order_has_each_operator_after_those_that_feed_it(pairs: list[tuple[str, str]]) -> None:
    made = graph()
    reachable: dict[str, set[str]] = {name: {name} for name in "abcdef"}
    for source, target in pairs:
        edge = Edge(source, target)
        if source in reachable[target]:
            with pytest.raises(FlowError, match="cycle"):
                made.connect(edge)
        else:
            made.connect(edge)
            for known in reachable.values():
                if source in known:
                    known.update(reachable[target])
    order = made.ordered()
    assert sorted(order) == list("abcdef")
    for edge in made.edges:
        assert order.index(edge.source) < order.index(edge.target)


def test_what_cannot_run_is_refused() -> None:
    made = Graph("g")
    with pytest.raises(FlowError, match=r"'g' reads nothing; start it with flow\.read"):
        made.validate()
    made.add(Read(Memory([])))
    with pytest.raises(FlowError, match="nothing uses the main output of operator 'read'"):
        made.validate()
    made.add(Write(Null()))
    with pytest.raises(FlowError, match="operator 'write' has no input"):
        made.validate()
    made.connect(Edge("read", "write"))
    made.validate()


def test_a_main_output_is_used_only_by_those_who_take_it() -> None:
    """Who takes dead letters alone would lose the records that did not fail."""
    made = Graph("g")
    made.add(Read(Memory([])))
    made.add(Map(str, on_error="dead_letter"))
    made.add(Write(Null()))
    made.connect(Edge("read", "map"))
    made.connect(Edge("map", "write", output="dead_letters"))
    with pytest.raises(FlowError, match="nothing uses the main output of operator 'map'"):
        made.validate()
