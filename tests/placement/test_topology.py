"""What a plan's shape lets expect of its traffic, before anything is measured."""

from __future__ import annotations

import pytest

from penstock.placement.planner import plan as planned
from penstock.placement.topology import of_plan, with_data
from penstock.placement.traffic import Node
from penstock.runtime.program.flow import Flow
from penstock.runtime.sinks import Null
from penstock.runtime.sources import Reader, Source, SourceContext, Split
from tests.placement.exact import edges_of


class Here(Source):
    """A split for each name, whose data lies there."""

    def __init__(self, *near: str | None) -> None:
        self._near = near

    def splits(self, parallelism: int) -> list[Split]:
        return [Split(str(i), weight=1.0 + i, near=near) for i, near in enumerate(self._near)]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        raise AssertionError("nothing is read")


def test_each_source_puts_out_a_unit_and_operators_what_they_take_in() -> None:
    """in[0,1] send a half each to three tasks, of which each sends its third to all four tasks downstream."""
    flow = Flow("f", chaining=False)
    stream = flow.read(Here(None, None), name="in", parallelism=2).shuffle().map(str, name="mid", parallelism=3)
    stream.broadcast().write(Null(), name="out", parallelism=4)
    topology = of_plan(flow.plan(2))
    assert topology.names[:3] == ("in[0]", "in[1]", "mid[0]")
    assert topology.components == (0, 0, 1, 1, 1, 2, 2, 2, 2)
    assert topology.inputs == {0: (), 1: (0,), 2: (1,)}
    traffic = {(u, v): t for u, v, t in edges_of(topology.graph)}
    assert traffic[0, 2] == pytest.approx(1 / 6)
    assert traffic[2, 5] == pytest.approx(1 / 3)
    assert len(traffic) == 6 + 12


def test_sources_are_drawn_to_their_data() -> None:
    """Wherever the plan has put their splits."""
    flow = Flow("f", chaining=False)
    flow.read(Here("b", "a"), name="in", parallelism=2).write(Null(), name="out", parallelism=2)
    plan = flow.plan(2)
    topology = of_plan(plan)
    nodes = [Node("a"), Node("b")]
    graph = with_data(plan, topology, {"a": 0, "b": 1})
    assert len(graph) == 6
    wanted = [{"a": 0, "b": 1}[str(splits[0].near)] for splits in plan.chains[0].splits]
    assert planned(graph, nodes, tasks=4).node_of.tolist() == wanted * 2
    assert planned(with_data(plan, topology, {"a": 1, "b": 0}), nodes, tasks=4).node_of.tolist() == wanted[::-1] * 2
    assert with_data(plan, topology, {"c": 0}) is topology.graph


def test_splits_of_a_task_share_what_it_reads() -> None:
    flow = Flow("f", chaining=False)
    flow.read(Here("a", "b", None), name="in", parallelism=1).write(Null(), name="out", parallelism=1)
    plan = flow.plan(1)
    graph = with_data(plan, of_plan(plan), {"a": 0, "b": 1})
    assert {(u, v): t for u, v, t in edges_of(graph)} == {
        (0, 1): 1.0,
        (0, 2): pytest.approx(1 / 6),
        (0, 3): pytest.approx(2 / 6),
    }
