"""What a plan's shape lets expect of its traffic, before anything is measured."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.apps import sol, throughput
from penstock.apps.rides import topology as rides
from penstock.placement.baselines import round_robin
from penstock.placement.hop_costs import NODE_COST
from penstock.placement.monitor import Monitor
from penstock.placement.placement import Placement
from penstock.placement.planner import plan as planned
from penstock.placement.topology import of_plan, with_data
from penstock.placement.traffic import Node
from penstock.runtime.program.flow import Flow
from penstock.runtime.sinks import Null
from penstock.runtime.sources import Generator, Reader, Source, SourceContext, Split
from penstock.runtime.transport.base import Buffer
from penstock.runtime.transport.memory import MemoryNetwork, MemoryTransport
from penstock.runtime.worker.run_loop import RunLoop
from penstock.runtime.worker.wiring import build
from tests.placement.exact import edges_of

S = 1_000_000_000


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
    assert len(traffic) == 6
    assert [one.tasks for one in topology.graph.shared] == [(sender, 5, 6, 7, 8) for sender in (2, 3, 4)]
    assert [one.traffic for one in topology.graph.shared] == pytest.approx([1 / 3] * 3)
    assert topology.graph.edge_cut([0, 0, 0, 0, 0, 1, 1, 2, 2]) == pytest.approx(2), "a copy to each of two places"


def text(number: int) -> bytes:
    return random.Random(number).randbytes(20_000)


class Counted(MemoryTransport):
    """Counts the bytes that go to other workers."""

    sent = 0

    def send(self, worker: int, task: int, parts: Sequence[Buffer]) -> bool:
        done = super().send(worker, task, parts)
        self.sent += sum(map(len, parts)) if done else 0
        return done


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(2, 4), st.data())
def test_planned_measured_and_sent_bytes_of_a_broadcast_agree(
    senders: int, receivers: int, workers: int, data: st.DataObject
) -> None:
    """Wherever the tasks are. Before, each task counted as if it got a copy of its own."""
    flow = Flow("copies", chaining=False)
    stream = flow.read(Generator(text, rate=30), name="in", parallelism=senders)
    stream.broadcast().write(Null(), name="out", parallelism=receivers)
    plan = flow.plan(workers)
    at = [data.draw(st.integers(0, workers - 1)) for _ in plan.tasks]
    placed = {task.number: worker for task, worker in zip(plan.tasks, at, strict=True)}
    now = [0]
    network, monitor = MemoryNetwork(workers), Monitor(half_life_s=1)
    transports = [Counted(network, worker) for worker in range(workers)]
    loops = [
        RunLoop(
            build(plan, placed, worker, transport, clock=lambda: now[0], report=lambda _: None),
            transport,
            lambda: now[0],
        )
        for worker, transport in enumerate(transports)
    ]
    for loop in loops:
        for task in loop.tasks:
            task.open()
        monitor.take(0, loop.load())
    for _ in range(200):
        now[0] += S // 100
        for loop in loops:
            loop.deliver(loop.transport.receive(0))
            for task in loop.tasks:
                if task.runnable():
                    task.step()
    for loop in loops:
        monitor.take(now[0], loop.load())
    seconds = now[0] / S
    placement = Placement(tuple(Node(str(worker)) for worker in range(workers)), tuple(range(workers)), tuple(at))
    sent = sum(transport.sent for transport in transports) / seconds
    made = sum(log.bytes for loop in loops for task in loop.tasks for log in task.logs) / seconds
    assert made > 0
    assert placement.between_nodes(of_plan(plan).graph) * made == pytest.approx(sent, rel=0.05, abs=200)
    assert placement.between_nodes(monitor.topology(plan).graph) == pytest.approx(sent, rel=0.05, abs=200)


def planned_apps() -> dict[str, Flow]:
    numbers = Generator(int, 1)
    return {
        "sol": sol.topology(numbers, levels=5, tasks=5),
        "throughput": throughput.topology(numbers),
        "rides": rides.topology(numbers, numbers, Null()),
    }


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("name", ["sol", "throughput", "rides"])
def test_no_more_crosses_four_hosts_than_with_tasks_in_turn(name: str, slots: int) -> None:
    topology = of_plan(planned_apps()[name].plan(4 * slots))
    nodes = [Node(str(host), slots) for host in range(4)]
    found, turns = planned(topology.graph, nodes), round_robin(topology, nodes)
    assert found.between_nodes(topology.graph) <= turns.between_nodes(topology.graph) + 1e-9


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 3), st.integers(1, 2))
def test_a_plan_with_a_broadcast_costs_no_more_than_tasks_in_turn(
    senders: int, receivers: int, hosts: int, slots: int
) -> None:
    flow = Flow("copies", chaining=False)
    asked = flow.read(Here(*[None] * senders), name="asked", parallelism=senders)
    located = flow.read(Here(*[None] * receivers), name="located", parallelism=receivers)
    both = located.union(asked.broadcast()).map(str, name="both", parallelism=receivers)
    both.write(Null(), name="out", parallelism=receivers)
    topology = of_plan(flow.plan(hosts * slots))
    nodes = [Node(str(host), slots) for host in range(hosts)]
    found, turns = planned(topology.graph, nodes), round_robin(topology, nodes)
    if found.imbalance(topology.graph) >= turns.imbalance(topology.graph) - 1e-9:
        costs = [topology.graph.hop_cost(at.worker_of, at.node_of, NODE_COST) for at in (found, turns)]
        assert costs[0] <= costs[1] + 1e-9


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
