"""What is remembered of a job's load and traffic for its next start."""

from __future__ import annotations

from collections import Counter

import pytest

from penstock.placement.known_load import KnownLoad
from penstock.placement.monitor import AT_REST, Monitor
from penstock.runtime.program.flow import Flow
from penstock.runtime.program.plan import Plan
from penstock.runtime.sinks.call import Null
from penstock.runtime.sources.memory import Memory
from penstock.runtime.worker.load import TaskLoad

S = 1_000_000_000


def flow(parallelism: int, name: str = "next") -> Plan:
    flow = Flow("known", chaining=False)
    records = flow.read(Memory([1]), name="in", parallelism=2).rebalance()
    records.map(str, name=name, parallelism=parallelism).rebalance().write(Null(), name="out", parallelism=1)
    return flow.plan(2)


def watched(plan: Plan) -> KnownLoad:
    """The sources send 1,000 bytes a second to each task of the next chain, and each of these 10 to the sink."""
    chains = [{task.number for task in plan.tasks if task.chain == chain} for chain in range(3)]
    monitor = Monitor(half_life_s=1)
    for second in range(2):
        tasks = []
        for chain, numbers in enumerate(chains):
            targets = chains[chain + 1] if chain < 2 else set()
            tasks += [
                TaskLoad(
                    number=number,
                    generation=1,
                    cpu_ns=second * S * (chain + 1) // 10,
                    sent=[([target], 0, second * (1_000 if chain == 0 else 10), 0) for target in targets],
                )
                for number in numbers
            ]
        monitor.take(second * S, tasks)
    return KnownLoad.of(plan, monitor.topology(plan))


def test_what_was_measured_comes_back_for_another_parallelism() -> None:
    before = watched(flow(2))
    assert KnownLoad.loads(before.dumps()) == before
    plan = flow(4)
    found = before.topology(plan)
    assert found is not None
    chain = [task.chain for task in plan.tasks]
    assert found.graph.cpu.tolist() == pytest.approx([AT_REST + [0.1, 0.1, 0.3][c] for c in chain])
    assert found.graph.total_traffic == pytest.approx(4 * 1_000 + 2 * 10)
    assert found.graph.edge_cut(chain) == pytest.approx(4 * 1_000 + 2 * 10)
    assert found.graph.edge_cut([c == 2 for c in chain]) == pytest.approx(20)
    assert Counter(found.graph.traffic.tolist()).keys() == {500.0, 5.0}


def test_another_flow_is_not_known() -> None:
    assert watched(flow(2)).topology(flow(2, "other")) is None
    assert KnownLoad.loads("") is None
