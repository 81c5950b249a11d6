"""What the JobMaster does about placement, without a cluster: each way of dealing tasks, pins, changed plans, moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

import penstock as ps
from penstock.actors.job_master import _RayCarrier
from penstock.actors.nodes import Nodes
from penstock.placement import placer as placer_module
from penstock.placement.adoption import AdoptionOptions
from penstock.placement.groups import Machine, NotPlaced
from penstock.placement.hop_costs import CORE_BYTES_PER_S, MESSAGE_BYTES, NODE_COST
from penstock.placement.hop_latencies import HopLatencies
from penstock.placement.monitor import RECORD_BYTES
from penstock.placement.options import METHODS, Method, PlacementOptions
from penstock.placement.placer import Placer
from penstock.placement.replanning import Look
from penstock.runtime.program.plan import Plan
from penstock.runtime.transport.hop_meter import Row, Step
from penstock.runtime.transport.hop_times import TimesReport
from penstock.runtime.worker.load import TaskLoad, TrafficReport

S = 1_000_000_000


def lanes(tasks: int = 4) -> Plan:
    """Sources, each of which feeds the one map of its number; and a sink for all of them."""
    flow = ps.Flow("lanes", chaining=False)
    records = flow.read(ps.sources.Generator(int, 10), name="in", parallelism=tasks)
    records.map(str, name="text", parallelism=tasks).write(ps.sinks.Null(), name="out", parallelism=1)
    return flow.plan(4)


def over(*counts: int, options: PlacementOptions, labels: dict[str, str] | None = None) -> Nodes:
    """Nodes with so many workers; the last has the labels."""
    nodes = Nodes(options, sum(counts))
    machine = Machine("0", "n0", 8, 8, 1e9, {}, {}, {})
    machines = [replace(machine, node_id=str(place), name=f"n{place}") for place in range(len(counts))]
    machines[-1] = replace(machines[-1], labels=labels or {})
    nodes._settle([machines[place] for place, count in enumerate(counts) for _ in range(count)])
    return nodes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("counts", [(3,), (2, 2), (1, 3)])
def test_each_task_gets_a_worker_and_each_worker_its_share(method: Method, counts: tuple[int, ...]) -> None:
    plan, options = lanes(), PlacementOptions(method)
    found = Placer(options, over(*counts, options=options)).first(plan)
    assert found.keys() == {task.number for task in plan.tasks}
    load = Counter(found.values())
    assert set(load) <= set(range(sum(counts)))
    if method != "jstorm":  # which fills some workers with what its rule keeps together
        assert max(load.values()) <= -(-len(plan.tasks) // sum(counts)) + 1, load


def test_without_pymetis_tasks_are_assigned_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pymetis", None)
    plan = lanes()
    found = [Placer(PlacementOptions(m), Nodes(PlacementOptions(m), 3)).first(plan) for m in ("metis", "round-robin")]
    assert found[0] == found[1]


@pytest.mark.parametrize("method", ["round-robin", "traffic"])
def test_pinned_tasks_are_on_the_node_that_has_what_they_need(method: Method) -> None:
    plan, options = lanes(), PlacementOptions(method, pin={"text": {"rack": "a"}})
    placer = Placer(options, over(2, 2, options=options, labels={"rack": "a"}))
    found = placer.first(plan)
    text = plan.chain_of("text").index
    assert {found[task.number] for task in plan.tasks if task.chain == text} == {2, 3}
    # A task more stays with them, and everything else where it is.
    less = {number: worker for number, worker in found.items() if number != max(found)}
    grown = placer.grown(plan, less)
    assert {**grown, **less} == grown
    assert grown.keys() == found.keys()


NOTHING = TimesReport(0, [], [], [])


def says(
    plan: Plan,
    traffic: dict[tuple[int, int], int],
    second: int,
    hops: Sequence[Row] = (),
    times: TimesReport = NOTHING,
    latency_us: int | None = None,
) -> list[TrafficReport]:
    """A worker's report: so many bytes a second from task to task."""
    tasks: list[dict[str, Any]] = [
        {
            "number": task.number,
            "generation": 1,
            "cpu_ns": second * S // 100,
            "waits_ns": 0,
            "threads_ns": 0,
            "queued": 0,
            "latency_us": {} if latency_us is None else {latency_us: 100},
            "sent": [([b], second, second * size, second) for (a, b), size in traffic.items() if a == task.number],
        }
        for task in plan.tasks
    ]
    return [TrafficReport(second * S, [TaskLoad(**task) for task in tasks], list(hops), times)]


def test_tasks_move_back_when_records_reach_the_end_later_than_before() -> None:
    """The workers' own histograms say so; the placer's clock is the machine's, so nothing rests here."""
    flow = ps.Flow("slower", chaining=False)
    flow.read(ps.sources.Generator(int, 10), name="in", parallelism=2).write(ps.sinks.Null(), name="out", parallelism=2)
    plan = flow.plan(2)
    options = PlacementOptions(replan_s=1.0, adoption=AdoptionOptions(rest_s=0))
    placer = Placer(options, Nodes(options, 2))
    first = placed = placer.first(plan)
    crossed = {(0, 3): 2_000_000_000, (1, 2): 2_000_000_000}
    moves = []
    for second in range(12):
        buckets = 40 if placed == first else 60
        wanted = placer.look(plan, placed, says(plan, crossed, second, latency_us=buckets))
        if wanted is not None:
            moves.append(second)
            placed = wanted
            placer.moved(2)
    assert len(moves) == 2, placer.status()["last"]
    assert placed == first
    assert placer.status()["last"] == "tasks have gone back for this load and this traffic"


def test_tasks_move_to_those_that_they_talk_to_and_then_rest() -> None:
    flow = ps.Flow("crossed", chaining=False)
    flow.read(ps.sources.Generator(int, 10), name="in", parallelism=2).write(ps.sinks.Null(), name="out", parallelism=2)
    plan, options = flow.plan(2), PlacementOptions(replan_s=1.0)
    placer = Placer(options, Nodes(options, 2))
    placed = placer.first(plan)
    assert list(placed.values()) == [0, 1, 0, 1]
    crossed = {(0, 3): 2_000_000_000, (1, 2): 2_000_000_000}
    assert placer.look(plan, placed, says(plan, crossed, 0)) is None, "nothing is known yet"
    assert placer.look(plan, placed, says(plan, crossed, 1)) is None, "it may be of the time before"
    wanted = placer.look(plan, placed, says(plan, crossed, 2))
    assert wanted is not None
    assert wanted[0] == wanted[3] != wanted[1] == wanted[2]
    status = placer.status()
    assert status["between_workers"] == status["total"] > 4e9
    assert "100% less traffic crosses" in status["last"]
    placer.moved(2)
    straight = {(0, 2): 2_000_000_000, (1, 3): 2_000_000_000}
    for second in range(3, 9):
        assert placer.look(plan, wanted, says(plan, straight, 8 * second)) is None
    assert "of rest are left" in placer.status()["last"]
    assert placer.status()["moves"] == 2


def test_what_was_said_of_tasks_of_an_earlier_plan_is_not_measured() -> None:
    """The plan changes in the supervising thread while reports are being taken in another one."""
    plan, options = lanes(), PlacementOptions(replan_s=1.0)
    placer = Placer(options, Nodes(options, 2))
    placed = placer.first(plan)

    def reports() -> Iterator[TrafficReport]:
        yield from says(plan, {}, 0)
        placer.forget()
        yield from says(plan, {}, 1)

    assert placer.look(plan, placed, reports()) is None
    assert placer.look(plan, placed, says(plan, {}, 2)) is None
    assert placer.traffic() == [], "nothing is known yet of the new tasks"


def hops(far: float) -> list[Row]:
    """What a worker has measured: so many ns a byte to send to another node, 1 to do anything else, and no time for
    each message."""
    steps: list[Step] = ["encode", "send near", "send far", "receive near", "receive far", "decode"]
    sizes = ((8, 100.0, 100 * 200.0), (14, 100.0, 100 * 10_000.0))
    return [(step, *size, size[2] * (far if step.endswith("far") else 1.0)) for step in steps for size in sizes]


@pytest.mark.parametrize(
    ("given", "found", "bytes_per_s"),
    [
        (AdoptionOptions(), [NODE_COST, 3.0, 3.0], [CORE_BYTES_PER_S, 1e9 / 3, 1e9 / 3]),
        (AdoptionOptions(node_cost=7.0, core_bytes_per_s=5e8), [7.0, 7.0, 7.0], [5e8, 5e8, 5e8]),
    ],
)
def test_plans_are_made_with_what_hops_cost_as_measured(
    given: AdoptionOptions, found: list[float], bytes_per_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then with an assumption. The workers of a lost node take their measurements with them."""
    used: list[tuple[float, float]] = []
    plan, options = lanes(), PlacementOptions(replan_s=1.0, adoption=given)
    placer = Placer(options, over(2, 2, options=options))
    look = placer._replanner.look

    def watched(now_s: float, seen: Look) -> Any:
        used.append((seen.node_cost, seen.core_bytes_per_s))
        return look(now_s, seen)

    monkeypatch.setattr(placer._replanner, "look", watched)
    placed = placer.first(plan)
    placer.look(plan, placed, says(plan, {}, 0))
    told = []
    for second, measured in ((1, []), (2, hops(4.0)), (3, [])):
        placer.look(plan, placed, says(plan, {}, second, measured))
        told.append((placer.status()["node_cost"], placer.status()["hop_ns_per_kib"]))
    assert used == [(cost, pytest.approx(each)) for cost, each in zip(found, bytes_per_s, strict=True)]
    assert [cost for cost, _ in told] == found
    assert told[0][1] is None
    expected = {"worker": 1024.0, "node": 4096.0, "network": 10240.0}
    assert told[1][1] == told[2][1] == pytest.approx(expected)
    nothing = {"worker": 0.0, "node": 0.0, "network": 0.0}
    assert placer.status()["hop_ns_per_message"] == pytest.approx(nothing, abs=1e-3)


def test_hops_count_for_as_long_as_they_take() -> None:
    """Each kind as it was measured last, also when some workers have died since."""
    used: list[HopLatencies | None] = []
    plan, options = lanes(), PlacementOptions(replan_s=1.0)
    placer = Placer(options, over(2, 2, options=options))
    look = placer._replanner.look

    def watched(now_s: float, seen: Look) -> Any:
        used.append(seen.hops)
        return look(now_s, seen)

    placer._replanner.look = watched  # type: ignore[method-assign]
    placed = placer.first(plan)
    sent = [(channel, 1, 16 * number, 0) for channel in (1, 2) for number in range(20)]
    near = [(1, 1, 16 * number, 400_000) for number in range(20)]
    far = [(2, 1, 16 * number, 900_000) for number in range(20)]
    assert placer.status()["hop_us"] == {"worker": None, "node": None, "network": None}
    placer.look(plan, placed, says(plan, {}, 0))
    first = [
        *says(plan, {}, 1, times=TimesReport(0, sent, [], [2_000] * 20)),
        TrafficReport(S, [], [], TimesReport(1, [], near, [])),
        TrafficReport(S, [], [], TimesReport(2, [], far, [])),
    ]
    placer.look(plan, placed, first)
    placer.look(plan, placed, says(plan, {}, 2))
    assert used == [HopLatencies(2e-6, 4e-4, 9e-4)] * 2
    assert placer.status()["hop_us"] == pytest.approx({"worker": 2.0, "node": 400.0, "network": 900.0})


def test_messages_count_in_plans() -> None:
    """Source 0 sends as many bytes and records to its map as to the sink, but each of them alone."""
    used: list[Look] = []
    plan, options = lanes(2), PlacementOptions(replan_s=1.0)
    placer = Placer(options, over(1, 1, options=options))
    look = placer._replanner.look

    def watched(now_s: float, seen: Look) -> Any:
        used.append(seen)
        return look(now_s, seen)

    placer._replanner.look = watched  # type: ignore[method-assign]
    placed = placer.first(plan)
    for second in range(2):
        (report,) = says(plan, {}, second)
        report.tasks[0] = report.tasks[0].changed(
            sent=[([2], 100 * second, 9_000 * second, 100 * second), ([4], 100 * second, 9_000 * second, 1)]
        )
        placer.look(plan, placed, [report])
    (seen,) = used
    costs = seen.now.costs(seen.message_bytes)
    expected = {2: 9_000 + 100 * RECORD_BYTES + 100 * MESSAGE_BYTES, 4: 9_000 + 100 * RECORD_BYTES}
    assert dict(costs.near[0]) == pytest.approx(expected)


def test_a_node_says_how_fast_it_is() -> None:
    """The slow node gets half as many tasks of a plan by traffic, and its time counts half as much work."""
    plan, options = lanes(6), PlacementOptions("traffic", replan_s=1.0)
    nodes = over(1, 1, options=options, labels={"penstock/speed": "0.5"})
    placer = Placer(options, nodes)
    assert [node["speed"] for node in placer.status()["nodes"]] == [1.0, 0.5]
    placed = placer.first(plan)
    load = Counter(placed.values())
    assert load[1] <= round(1.1 * 13 / 3) < load[0]
    given: list[Any] = []
    monitor = placer._monitor
    topology = monitor.topology

    def seen(*arguments: Any, **more: Any) -> Any:
        given.append(topology(*arguments, **more))
        return given[-1]

    monitor.topology = seen  # type: ignore[method-assign]
    for second in (0, 1):
        reports = says(plan, {}, second)
        for report in reports:
            report.tasks[:] = [task.changed(cpu_ns=second * S // 10) for task in report.tasks]
        placer.look(plan, placed, reports)
    cores = given[-1].graph.cpu
    assert cores.tolist() == pytest.approx([0.11 if placed[task.number] == 0 else 0.06 for task in plan.tasks])


@pytest.mark.parametrize("speed", ["fast", "0", "-1", "inf", "nan"])
def test_a_speed_that_is_none(speed: str) -> None:
    options = PlacementOptions()
    with pytest.raises(NotPlaced, match=f"penstock/speed={speed}; it must be a number above 0"):
        over(1, 1, options=options, labels={"penstock/speed": speed})


def test_the_next_plan_uses_the_nodes_that_there_are_now() -> None:
    """A node is lost. One of its workers goes to another node of the job, and one to a node that has come."""
    plan, options = lanes(2), PlacementOptions(replan_s=1.0)
    nodes = over(2, 2, options=options)
    a, b = nodes.layout.machines
    nodes._settle([a, a, b, b])
    placer = Placer(options, nodes)
    placed = {task.number: worker for task, worker in zip(plan.tasks, (0, 2, 1, 3, 2), strict=True)}
    keys = placer.status().keys()
    assert placer.status()["between_nodes"] is None, "nothing is measured yet"
    # Source 0 and map 2 talk, on workers 0 and 1 of node a; source 1 and map 3, on workers 2 and 3 of node b.
    traffic = {(0, 2): 2_000_000_000, (1, 3): 1_000_000_000}
    placer.look(plan, placed, says(plan, traffic, 0))
    placer.look(plan, placed, says(plan, traffic, 1))
    assert placer.status()["between_nodes"] == 0
    c = replace(b, node_id="2", name="n2")
    nodes._settle([a, a, a, c])
    placer.look(plan, placed, says(plan, traffic, 2))
    status = placer.status()
    assert status.keys() == keys
    assert status["nodes"] == [
        {"name": "n0", "workers": 3, "speed": 1.0},
        {"name": "n2", "workers": 1, "speed": 1.0},
    ]
    assert status["between_nodes"] == pytest.approx(1_000_000_100), "worker 2 is on node a now, and worker 3 on node c"
    wanted = placer.look(plan, placed, says(plan, traffic, 3))
    assert wanted is not None
    node_of = nodes.layout.node_of_workers()
    assert node_of[wanted[0]] == node_of[wanted[2]]
    assert node_of[wanted[1]] == node_of[wanted[3]]


def test_a_plan_is_for_the_nodes_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that finds a node for the workers of a lost one changes them while another thread plans."""
    plan = lanes(2)
    options = PlacementOptions(replan_s=1.0, pin={"text": {"rack": "a"}}, adoption=AdoptionOptions(rest_s=0.0))
    nodes = over(2, 2, options=options, labels={"rack": "a"})
    placer = Placer(options, nodes)
    placed = placer.first(plan)
    a, b = nodes.layout.machines
    bound = placer_module._bound

    def late(*arguments: Any) -> Any:
        nodes._settle([replace(a, node_id="2"), a, b, b])
        return bound(*arguments)

    traffic = {(task.number, task.number + 2): 2_000_000_000 for task in plan.tasks[:2]}
    placer.look(plan, placed, says(plan, traffic, 0))
    monkeypatch.setattr(placer_module, "_bound", late)
    placer.look(plan, placed, says(plan, traffic, 1))
    crosses = [size for (one, other), size in traffic.items() if (placed[one] < 2) != (placed[other] < 2)]
    assert placer.status()["between_nodes"] == pytest.approx(sum(crosses), rel=1e-6)
    assert len(nodes.layout.nodes) == 3


def test_somebody_who_moves_tasks_is_not_overruled() -> None:
    plan, options = lanes(), PlacementOptions(replan_s=1.0)
    placer = Placer(options, over(2, 2, options=options))
    placed = placer.first(plan)
    traffic = {(task.number, (task.number + 1) % 4 + 4): 1_000_000_000 for task in plan.tasks[:4]}
    placer.leave()
    for second in range(4):
        assert placer.look(plan, placed, says(plan, traffic, second)) is None
    assert placer.status()["last"] == "tasks run where job.migrate has put them"


def test_a_job_that_is_resumed_begins_with_the_plan_for_what_was_measured() -> None:
    """All traffic is between the sources and the tasks two places on, which the shape of the flow does not show. The
    workers that share a node are those that exchange most."""
    plan, options = lanes(), PlacementOptions(replan_s=1.0)
    before = Placer(options, over(2, 2, options=options))
    assert before.share(plan) is None, "nothing is known of the job"
    assert before.known() == ""
    placed = before.first(plan)
    traffic = {(task.number, task.number + 4): 1_000_000 for task in plan.tasks[:4]}
    for second in range(2):
        before.look(plan, placed, says(plan, traffic, second))
    nodes = over(2, 2, options=options)
    resumed = Placer(options, nodes)
    resumed.remember(before.known())
    assert resumed.known() == before.known(), "also when it dies before anything is measured"
    found = resumed.first(plan)
    node_of = nodes.layout.node_of_workers()
    assert all(node_of[found[number]] == node_of[found[number + 4]] for number in range(4))
    share = resumed.share(plan)
    assert share is not None
    assert sum(share([2, 2], [4, 4], [1.0, 1.0])) == 4
    resumed.remember("{}")
    assert Placer(PlacementOptions(replan_s=None), nodes).share(plan) is None


@pytest.mark.parametrize(
    ("workers", "epochs", "spark", "period_s"),
    [(2, True, False, 10.0), (1, True, False, None), (2, False, False, None), (2, True, True, None)],
)
def test_who_replans_when_it_is_left_to_penstock(
    workers: int, epochs: bool, spark: bool, period_s: float | None
) -> None:
    assert PlacementOptions(replan_s="auto").checked(workers, [], epochs, spark=spark).period_s == period_s
    assert PlacementOptions().checked(workers, [], epochs, spark=spark).period_s is None


def test_the_status_shows_no_nodes_before_they_are_reserved() -> None:
    options = PlacementOptions(nodes=2)
    carrier = _RayCarrier.__new__(_RayCarrier)
    carrier.placer, carrier._processes = Placer(options, Nodes(options, 2)), None
    known = carrier.placement_status()
    assert (known["nodes"], known["node_ids"], known["machines"]) == ([], [], [])
