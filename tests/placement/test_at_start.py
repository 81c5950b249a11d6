"""Where tasks begin by default: the plan that `penstock plan` prints, never with more between nodes than tasks in turn,
and on one node with operators as even as in turn."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.apps import sol, throughput
from penstock.apps.cli import main
from penstock.apps.rides import topology as rides
from penstock.host.carry.carrier_options import CarrierOptions
from penstock.host.process.worker_process import WorkerOptions
from penstock.jobs.prepare import without_ray
from penstock.local.placing import LocalPlacing
from penstock.placement.at_start import plan_at_start
from penstock.placement.baselines import in_turn
from penstock.placement.even import PAIRS_MOST, over_workers
from penstock.placement.even import in_turn as turns_of
from penstock.placement.options import PlacementOptions
from penstock.placement.placement import Placement
from penstock.placement.placer import Placer
from penstock.placement.shape import shape_of
from penstock.placement.topology import of_plan
from penstock.placement.traffic import Node, TrafficGraph
from penstock.runtime.program.flow import Flow
from penstock.runtime.program.plan import Plan
from penstock.runtime.sinks import Null
from penstock.runtime.sources import Generator
from penstock.runtime.transport.base import Buffer
from penstock.runtime.transport.memory import MemoryNetwork, MemoryTransport
from penstock.runtime.worker.run_loop import RunLoop
from penstock.runtime.worker.wiring import build
from tests.placement.test_placer import over

S = 1_000_000_000


def digits(number: int) -> str:
    return f"{number:0100}"


def apps() -> dict[str, Callable[[], Flow]]:
    return {
        "sol": lambda: sol.topology(Generator(digits, 200), levels=5, tasks=5),
        "throughput": lambda: throughput.topology(Generator(lambda i: (str(i), digits(i)), 200)),
        "rides": lambda: rides.topology(
            Generator(lambda i: (f"driver {i % 50}", 8.5, 47.4, i), 400),
            Generator(lambda i: (f"request {i}", 8.5, 47.4, i), 20),
            Null(),
            radius_m=100,
        ),
    }


def hosts(count: int, slots: int) -> list[Node]:
    return [Node(f"node {number}", slots) for number in range(1, count + 1)]


def named(plan: Plan, workers: Sequence[int]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for task, worker in zip(plan.tasks, workers, strict=True):
        found.setdefault(worker, []).append(plan.task_name(task))
    return found


@pytest.mark.parametrize(("count", "slots"), [(4, 1), (4, 2), (2, 2), (1, 3)])
def test_a_job_runs_by_the_plan_that_the_command_prints(
    count: int, slots: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, `run` assigned tasks in turn unless it was told otherwise."""
    assert main(["plan", "sol", "--nodes", str(count), "--slots", str(slots)]) == 0
    printed: dict[int, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("  worker "):
            worker, _, listed = line.removeprefix("  worker ").partition(": ")
            printed[int(worker)] = [
                f"{name.partition('[')[0]}[{index}]"
                for name in listed.split(", ")
                for index in name.partition("[")[2].rstrip("]").split(",")
            ]
    flow = sol.topology(Generator(int, 1), levels=5, tasks=5)
    plan = flow.plan(count * slots)
    options = PlacementOptions()
    placer = Placer(options, over(*[slots] * count, options=options))
    placed = placer.first(plan)
    assert named(plan, [placed[task.number] for task in plan.tasks]) == printed
    if count == 1:
        local = LocalPlacing(slots, in_turn=False).first(plan)
        assert local == placed


class Counted(MemoryTransport):
    """Counts the bytes that go to workers of other nodes."""

    node_of: Sequence[int] = ()
    sent = 0

    def send(self, worker: int, task: int, parts: Sequence[Buffer]) -> bool:
        done = super().send(worker, task, parts)
        if done and self.node_of[worker] != self.node_of[self.worker]:
            self.sent += sum(map(len, parts))
        return done


def bytes_between_nodes(plan: Plan, placed: Placement) -> int:
    """What crosses between nodes while the job runs for two seconds of a clock of its own."""
    workers = len(placed.workers)
    at = {task.number: worker for task, worker in zip(plan.tasks, placed.tasks, strict=True)}
    now = [0]
    network = MemoryNetwork(workers)
    transports = [Counted(network, worker) for worker in range(workers)]
    loops = []
    for worker, transport in enumerate(transports):
        transport.node_of = placed.workers
        transport.worker = worker
        wiring = build(plan, at, worker, transport, clock=lambda: now[0], report=lambda _: None)
        loops.append(RunLoop(wiring, transport, lambda: now[0]))
    for loop in loops:
        for task in loop.tasks:
            task.open()
    for _ in range(200):
        now[0] += S // 100
        for loop in loops:
            loop.deliver(loop.transport.receive(0))
            for task in loop.tasks:
                if task.runnable():
                    task.step()
    return sum(transport.sent for transport in transports)


@pytest.mark.parametrize("name", ["sol", "throughput", "rides"])
def test_no_more_bytes_cross_four_hosts_than_with_tasks_in_turn(name: str) -> None:
    """The records that really cross, of which the plan knows the way and not the number."""
    plan = apps()[name]().plan(4)
    nodes = hosts(4, 1)
    found = bytes_between_nodes(plan, plan_at_start(shape_of(plan), nodes))
    turns = bytes_between_nodes(plan, in_turn(len(plan.tasks), nodes))
    assert found <= 1.05 * turns  # messages have other sizes in each run
    if name == "sol":
        assert found < 0.75 * turns


@st.composite
def flows(draw: st.DrawFn) -> Flow:
    """Operators of up to five tasks, each of which reads one or two of the operators before it."""
    flow = Flow("drawn", chaining=draw(st.booleans()))
    streams = [flow.read(Generator(int, 1), name="in", parallelism=draw(st.integers(1, 5)))]
    for number in range(draw(st.integers(1, 5))):
        fed = streams[draw(st.integers(0, len(streams) - 1))]
        if draw(st.booleans()):
            fed = fed.union(streams[draw(st.integers(0, len(streams) - 1))].map(int, name=f"more-{number}"))
        way = draw(st.sampled_from(["forward", "shuffle", "broadcast"]))
        if way != "forward":
            fed = fed.shuffle() if way == "shuffle" else fed.broadcast()
        streams.append(fed.map(int, name=f"map-{number}", parallelism=draw(st.integers(1, 5))))
    for number, stream in enumerate(streams):
        stream.write(Null(), name=f"out-{number}", parallelism=draw(st.integers(1, 3)))
    return flow


@settings(deadline=None, max_examples=20)
@given(flows(), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_no_exchange_lets_more_across_than_with_tasks_in_turn(flow: Flow, slots: list[int]) -> None:
    plan = flow.plan(sum(slots))
    shape = shape_of(plan)
    nodes = [Node(str(number), count) for number, count in enumerate(slots)]
    found, turns = plan_at_start(shape, nodes), in_turn(len(plan.tasks), nodes)
    for exchange in shape.exchanges:
        graph = TrafficGraph.of(len(plan.tasks), exchange.edges, shared=exchange.shared)
        assert found.between_nodes(graph) <= turns.between_nodes(graph) + 1e-9
    graph = of_plan(plan).graph
    if len(nodes) == 1:
        assert found.between_workers(graph) <= turns.between_workers(graph) + 1e-9


@settings(deadline=None, max_examples=60)
@given(flows(), st.integers(1, 6))
def test_on_one_node_each_operator_is_as_even_as_in_turn(flow: Flow, workers: int) -> None:
    """An operator that costs more than all others has as many workers as it would have had."""
    plan = flow.plan(workers)
    placed = LocalPlacing(workers, in_turn=False).first(plan)
    assert placed == LocalPlacing(workers, in_turn=False).first(plan)
    tasks = Counter(placed.values())
    assert max(tasks[worker] for worker in range(workers)) - min(tasks[worker] for worker in range(workers)) <= 1
    for chain in plan.chains:
        of = Counter(placed[task.number] for task in plan.tasks if task.chain == chain.index)
        assert max(of[worker] for worker in range(workers)) - min(of[worker] for worker in range(workers)) <= 1


def lanes(tasks: int, workers: int) -> Plan:
    """Three operators whose tasks exchange records one to one, after a source that shifts them."""
    flow = Flow("lanes", chaining=False)
    records = flow.read(Generator(int, 1), name="in", parallelism=tasks)
    for number in range(2):
        records = records.map(int, name=f"map-{number}", parallelism=tasks)
    records.write(Null(), name="out", parallelism=tasks)
    return flow.plan(workers)


def test_local_tasks_that_exchange_records_are_on_one_worker() -> None:
    """In turn, each of the records would go to the other worker at each step."""
    plan = lanes(3, 2)
    shape = shape_of(plan)
    turns = turns_of(len(plan.tasks), 2)

    def crossing(workers: Sequence[int]) -> float:
        return sum(traffic for one, other, traffic in shape.edges if workers[one] != workers[other])

    assert crossing(turns) == pytest.approx(3)
    assert crossing(over_workers(shape, 2)) <= 1.0 + 1e-9


def test_a_large_job_is_not_planned() -> None:
    flow = sol.topology(Generator(int, 1), levels=3, tasks=60)
    plan = flow.plan(4)
    assert len(shape_of(plan).edges) > PAIRS_MOST
    nodes = hosts(2, 2)
    found, turns = plan_at_start(shape_of(plan), nodes), in_turn(len(plan.tasks), nodes)
    assert found.node_of.tolist() == turns.node_of.tolist()


def test_a_job_that_ran_in_turn_does_so_when_it_is_resumed_as_a_local_job(caplog: pytest.LogCaptureFixture) -> None:
    for method, then in (("round-robin", "round-robin"), ("auto", "auto")):
        options = CarrierOptions(2, 60.0, WorkerOptions(None, 1, 1), placement=PlacementOptions(method))  # type: ignore[arg-type]
        assert without_ray(options, "job").placement == PlacementOptions(then)  # type: ignore[arg-type]
    assert not caplog.records
    options = CarrierOptions(2, 60.0, WorkerOptions(None, 1, 1), placement=PlacementOptions("traffic", nodes=2))
    assert without_ray(options, "job").placement == PlacementOptions()
    assert "without its option placement" in caplog.text


def test_pinned_tasks_are_assigned_as_before() -> None:
    """Tasks in turn, and then where they must be."""
    plan = lanes(3, 4)
    found = []
    for method in ("auto", "round-robin"):
        options = PlacementOptions(method, pin={"in": {"rack": "a"}})  # type: ignore[arg-type]
        found.append(Placer(options, over(2, 2, options=options, labels={"rack": "a"})).first(plan))
    assert found[0] == found[1]


def test_the_program_of_a_local_job_loads_no_numpy() -> None:
    """It takes longer than the plan."""
    code = "import sys, penstock.local.placing; print('numpy' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_the_default_of_run_is_the_plan() -> None:
    assert PlacementOptions().method == "auto"
    assert inspect.signature(ps.run).parameters["placement"].default == "auto"
