"""What tasks are measured to use and send, and when a job moves to another placement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.placement.adoption import AdoptionOptions, cost, decide, overload, resting
from penstock.placement.known_load import KnownLoad
from penstock.placement.monitor import RECORD_BYTES, Monitor
from penstock.placement.placement import Placement, workers_of
from penstock.placement.planner import plan as planned
from penstock.placement.relabel import relabelled
from penstock.placement.traffic import Node, TrafficGraph
from penstock.runtime.program.flow import Flow
from penstock.runtime.program.plan import Plan
from penstock.runtime.sinks import Null
from penstock.runtime.sources import Memory
from penstock.runtime.worker.load import TaskLoad

S = 1_000_000_000


def two_lanes() -> Plan:
    """Tasks 0 and 1, which send to 2 and 3."""
    flow = Flow("lanes", chaining=False)
    flow.read(Memory([1]), name="in", parallelism=2).write(Null(), name="out", parallelism=2)
    return flow.plan(2)


def says(number: int, cpu_s: float = 0.0, sent: dict[int, tuple[int, int]] | None = None, **more: Any) -> TaskLoad:
    return TaskLoad(
        **{"generation": 1, **more},
        number=number,
        cpu_ns=int(cpu_s * S),
        sent=[([target], *counts, counts[0] // 10) for target, counts in (sent or {}).items()],
    )


def test_rates_are_what_changed_between_two_looks() -> None:
    plan, monitor = two_lanes(), Monitor(half_life_s=5)
    monitor.take(10 * S, [says(0, 1.0, {2: (100, 5_000), 3: (7, 7)}), says(1), says(2), says(3)])
    assert not monitor.ready(plan)
    monitor.take(12 * S, [says(0, 2.0, {2: (300, 9_000), 3: (7, 7)}), says(1), says(2), says(3)])
    assert monitor.ready(plan)
    graph = monitor.topology(plan).graph
    assert graph.cpu.tolist() == pytest.approx([0.51, 0.01, 0.01, 0.01]), "cores, and what any task weighs"
    assert graph.total_traffic == pytest.approx(2_000 + RECORD_BYTES * 100)
    assert graph.edge_cut([0, 1, 0, 1]) == pytest.approx(0)


def test_what_goes_to_all_tasks_is_measured_once() -> None:
    flow = Flow("all", chaining=False)
    flow.read(Memory([1]), name="in", parallelism=1).broadcast().write(Null(), name="out", parallelism=3)
    plan, monitor = flow.plan(2), Monitor(half_life_s=5)
    for second in range(2):
        sent = [([1, 2, 3], second, second * 900, second)]
        monitor.take(second * S, [says(0).changed(sent=sent), says(1), says(2), says(3)])
    graph = monitor.topology(plan).graph
    assert graph.edge_cut([0, 1, 1, 1]) == pytest.approx(1_000), "one copy to the other node"
    assert graph.edge_cut([0, 0, 1, 2]) == pytest.approx(2_000)
    assert graph.total_traffic == pytest.approx(3_000)
    assert set(monitor.told(plan)[0]["sent"]) == {"out[0]", "out[1]", "out[2]"}
    known = KnownLoad.of(plan, monitor.topology(plan))
    assert KnownLoad.loads(known.dumps()) == known
    again = known.topology(plan)
    assert again is not None
    assert again.graph.edge_cut([0, 1, 1, 1]) == pytest.approx(1_000)


def test_messages_are_counted_apart_from_records() -> None:
    plan, monitor = two_lanes(), Monitor(half_life_s=5)
    for second in range(2):
        monitor.take(
            second * S,
            [says(0, sent={2: (100 * second, 5_000 * second)}), says(1, sent={3: (7, 7)}), says(2), says(3)],
        )
    assert monitor.messages(plan).total_traffic == 10
    assert monitor.records(plan).total_traffic == 100
    assert monitor.size(plan) == 5_000


def test_what_lasts_is_most_of_the_figure_after_two_half_lives() -> None:
    plan, monitor = two_lanes(), Monitor(half_life_s=5)
    others = [says(1), says(2), says(3)]
    monitor.take(0, [says(0, sent={2: (0, 0)}), *others])
    for second in range(1, 11):
        monitor.take(second * S, [says(0, sent={2: (0, 1_000 * second)}), *others])
    assert monitor.topology(plan).graph.total_traffic == pytest.approx(1_000)
    for second in range(11, 21):
        monitor.take(second * S, [says(0, sent={2: (0, 10_000), 3: (0, 1_000 * (second - 10))}), *others])
    graph = monitor.topology(plan).graph
    assert graph.edge_cut([0, 1, 0, 1]) == pytest.approx(750), "to 3"
    assert graph.total_traffic == pytest.approx(1_000)


def test_counters_begin_anew_when_a_task_is_made_again() -> None:
    plan, monitor = two_lanes(), Monitor(half_life_s=1)
    others = [says(1), says(2), says(3)]
    monitor.take(0, [says(0, 0.0, {2: (0, 0)}), *others])
    monitor.take(1 * S, [says(0, 0.5, {2: (10, 1_000)}), *others])
    before = monitor.topology(plan).graph
    monitor.take(2 * S, [says(0, 0.0, {2: (0, 0)}, generation=2), *others])
    after = monitor.topology(plan).graph
    assert after.cpu.tolist() == before.cpu.tolist(), "nothing is known of this second"
    assert after.total_traffic == before.total_traffic
    monitor.take(3 * S, [says(0, 0.5, {2: (10, 1_000)}, generation=2), *others])
    assert monitor.topology(plan).graph.total_traffic == pytest.approx(before.total_traffic)


def test_a_channel_that_was_replaced_counts_from_nothing() -> None:
    plan, monitor = two_lanes(), Monitor(half_life_s=1)
    others = [says(1), says(2), says(3)]
    monitor.take(0, [says(0, sent={2: (1_000, 100_000)}), *others])
    monitor.take(1 * S, [says(0, sent={2: (10, 1_000)}), *others])
    assert monitor.topology(plan).graph.total_traffic == pytest.approx(1_000 + 10 * RECORD_BYTES)


def test_tasks_that_have_gone_are_forgotten() -> None:
    plan, monitor = two_lanes(), Monitor(half_life_s=1)
    monitor.take(0, [says(9)])
    monitor.forget(plan)
    assert 9 not in monitor._seen


def test_what_waits_takes_the_thread_of_its_worker_and_no_core() -> None:
    """A function that waits for its own threads is no more load than these threads. Waits are as long on each node."""
    plan, monitor = two_lanes(), Monitor(half_life_s=1)
    for second in range(2):
        monitor.take(
            second * S,
            [
                says(0, 0.2 * second, waits_ns=second * S // 2),
                says(1, 0.2 * second, waits_ns=second * S // 2, threads_ns=second * S * 6 // 10),
                says(2, 0.2 * second, threads_ns=second * S * 3),
                says(3),
            ],
        )
    assert monitor.topology(plan).graph.cpu.tolist() == pytest.approx([0.71, 0.81, 3.21, 0.01])
    slow = monitor.topology(plan, np.array([0.5, 0.5, 0.5, 1.0])).graph
    assert slow.cpu.tolist() == pytest.approx([0.61, 0.61, 1.61, 0.01])


def test_it_tells_people_what_it_has_measured() -> None:
    plan, monitor = two_lanes(), Monitor(half_life_s=1)
    for second in range(2):
        monitor.take(second * S, [says(0, 0.5 * second, {2: (10 * second, 900 * second)}, queued=4), says(2)])
    assert monitor.told(plan) == [
        {
            "name": "in[0]",
            "cores": 0.5,
            "waits": 0.0,
            "threads": 0.0,
            "queued": 4.0,
            "sent": {"out[0]": {"records_per_s": 10.0, "bytes_per_s": 900.0, "messages_per_s": 1.0}},
        },
        {"name": "out[0]", "cores": 0.0, "waits": 0.0, "threads": 0.0, "queued": 0.0, "sent": {}},
    ]


# --- adoption ------------------------------------------------------------------------------------------------------

NODES = (Node("a", 2), Node("b", 2))
OPTIONS = AdoptionOptions()
HOT = 2e9  # bytes a second: two cores' worth of passing on


def placed(*tasks: int, nodes: tuple[Node, ...] = NODES) -> Placement:
    return Placement(nodes, workers_of(nodes), tasks)


def lanes(first: float, second: float, cpu: float = 0.1) -> TrafficGraph:
    """Tasks 0 and 1; the traffic of 0 with 2, and with 3."""
    return TrafficGraph.of(4, [(0, 2, first), (0, 3, second)], cpu=[cpu] * 4)


def test_a_plan_that_saves_enough_is_adopted() -> None:
    verdict = decide(placed(0, 1, 2, 3), placed(2, 1, 2, 3), lanes(HOT, 0), OPTIONS)
    assert verdict.adopt
    assert verdict.moves == 1
    assert "100% less traffic crosses" in verdict.reason


def test_what_crosses_nodes_is_dearer() -> None:
    assert cost(placed(0, 1, 1, 3), lanes(1, 0), 3.5) == 1
    assert cost(placed(0, 1, 2, 3), lanes(1, 0), 3.5) == 3.5


@pytest.mark.parametrize(
    ("new", "graph", "reason"),
    [
        (placed(0, 1, 2, 3), lanes(HOT, 0), "run where they should"),
        (placed(1, 1, 2, 3), lanes(HOT, 0), "no less traffic would cross by the new plan"),
        (placed(2, 1, 2, 3), lanes(1e3, 0), "1 moves would cost 0.1 s and save"),
        (placed(2, 1, 2, 2), lanes(HOT, 0, cpu=0.4), "load a worker too much"),
    ],
)
def test_reasons_to_stay(new: Placement, graph: TrafficGraph, reason: str) -> None:
    verdict = decide(placed(0, 1, 2, 3), new, graph, OPTIONS)
    assert not verdict.adopt
    assert reason in verdict.reason


def test_what_a_hop_costs_decides_whether_a_move_pays() -> None:
    """3 MB/s that no longer cross take 0.18 s of a core in a minute at 1e9 bytes a second, and a move takes 0.05 s."""
    better = placed(0, 1, 2, 3), placed(2, 1, 2, 3), lanes(3e6 / 3.5, 0), OPTIONS, 3.5
    assert decide(*better, 1e9).adopt
    assert not decide(*better, 4e9).adopt


def test_a_job_rests_after_a_move() -> None:
    assert resting(None, OPTIONS) is None
    rest = resting(5.0, OPTIONS)
    assert rest is not None
    assert (rest.adopt, rest.reason) == (False, "15 s of rest are left after the last move")
    assert resting(20.0, OPTIONS) is None


def test_a_worker_with_too_much_gives_even_if_more_crosses() -> None:
    graph = TrafficGraph.of(2, [(0, 1, 1e6)], cpu=[0.5, 0.5])
    nodes = (Node("a", 2),)
    together, apart = placed(0, 0, nodes=nodes), placed(0, 1, nodes=nodes)
    assert overload(together, graph, OPTIONS) == pytest.approx(0.4)
    assert decide(together, apart, graph, OPTIONS).adopt
    at_ease = TrafficGraph.of(2, [(0, 1, 1e6)], cpu=[0.2, 0.2])
    assert overload(together, at_ease, OPTIONS) == 0
    assert not decide(together, apart, at_ease, OPTIONS).adopt


def test_a_slow_node_is_full_sooner() -> None:
    """The work of half a core takes a whole core of a node that is half as fast."""
    graph = TrafficGraph.of(3, [(0, 1, 1e3)], cpu=[0.25, 0.25, 0.3])
    nodes = (Node("slow", speed=0.5), Node("fast", speed=1.5))
    slow, fast = placed(0, 0, 1, nodes=nodes), placed(1, 1, 0, nodes=nodes)
    assert overload(slow, graph, OPTIONS) == pytest.approx(1 - 1.2 * 0.4)
    assert overload(fast, graph, OPTIONS) == 0
    assert decide(slow, fast, graph, OPTIONS).adopt
    assert not decide(fast, slow, graph, OPTIONS).adopt


def test_a_move_of_many_tasks_must_bring_more() -> None:
    graph = TrafficGraph.of(40, [(2 * i, 2 * i + 1, 4e5) for i in range(20)], cpu=[0.01] * 40)
    nodes = (Node("a", 2),)
    apart, together = placed(*[0, 1] * 20, nodes=nodes), placed(*[0, 0, 1, 1] * 10, nodes=nodes)
    assert not decide(apart, together, graph, OPTIONS).adopt, "20 moves, 1 s of pauses, for 0.5 s a minute"
    assert decide(apart, together, graph, replace(OPTIONS, horizon_s=3600)).adopt


# --- names of workers ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), min_size=8, max_size=8), st.permutations(range(2)), st.permutations(range(2)))
def test_the_same_plan_by_other_names_moves_nothing(tasks: list[int], node: list[int], worker: list[int]) -> None:
    """Workers 0, 1 are on node a, 2, 3 on node b: the nodes change places, and the workers on each."""
    renamed = [2 * node[w // 2] + worker[w % 2] for w in tasks]
    assert relabelled(placed(*tasks), placed(*renamed)).tasks == tuple(tasks)


@given(st.lists(st.integers(0, 3), min_size=8, max_size=8), st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_names_change_and_nothing_else(running: list[int], new: list[int]) -> None:
    found = relabelled(placed(*running), placed(*new))
    for one in range(8):
        for other in range(8):
            assert (found.tasks[one] == found.tasks[other]) == (new[one] == new[other])
            assert (found.node_of[one] == found.node_of[other]) == (new[one] // 2 == new[other] // 2)


def test_nodes_that_are_not_alike_keep_their_names() -> None:
    nodes = (Node("small", 1), Node("large", 2))
    found = relabelled(placed(0, 0, 1, 2, nodes=nodes), placed(2, 1, 0, 0, nodes=nodes))
    assert sorted(found.tasks[:2]) == [1, 2]
    assert relabelled(placed(0, 0, 2, 2), placed(2, 2, 0, 0), keep_nodes=True).tasks[0] in (2, 3)


def test_a_plan_beside_one_that_runs_moves_what_it_must() -> None:
    """Two pairs on two nodes; one pair begins to talk to the other's place."""
    nodes = [Node("a"), Node("b")]
    running = placed(0, 0, 1, 1, nodes=tuple(nodes))
    same = planned(TrafficGraph.of(4, [(0, 1, 5.0), (2, 3, 5.0)]), nodes, running=running)
    assert same.tasks == running.tasks
    changed = planned(TrafficGraph.of(4, [(0, 2, 5.0), (1, 3, 5.0)]), nodes, running=running)
    assert (changed.worker_of != running.worker_of).sum() == 2
    assert changed.between_nodes(TrafficGraph.of(4, [(0, 2, 5.0), (1, 3, 5.0)])) == 0
