"""The physical plan: what is fused, what is exchanged, and which plans cannot run."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import pytest

from penstock.runtime import testing
from penstock.runtime.errors import FlowError
from penstock.runtime.program.flow import Flow, Stream
from penstock.runtime.program.plan import Plan
from penstock.runtime.sinks.base import Sink, SinkContext, SinkWriter
from penstock.runtime.sinks.call import Null
from penstock.runtime.sources.memory import Memory
from tests.program.random_flows import random_flow


def start(**options: Any) -> tuple[Flow, Stream]:
    flow = Flow("f", **options)
    return flow, flow.read(Memory([1, 2, 3, 0]), parallelism=1)


def chains(flow: Flow, workers: int = 1) -> list[str]:
    return [f"{chain.name} x{chain.parallelism}" for chain in flow.plan(workers).chains]


def exchanges(plan: Plan) -> list[str]:
    return [
        f"{plan.chains[e.source].name} -> {plan.chains[e.target].name}: {e.grouping.name}"
        + (f" of {e.output}" if e.output else "")
        + (f" with {e.combiner.name}" if e.combiner else "")
        for e in plan.exchanges
    ]


# --- chaining ---------------------------------------------------------------------------------------------------


def test_forward_edges_of_equal_parallelism_are_fused() -> None:
    flow, stream = start()
    stream.map(str, parallelism=1).filter(bool, parallelism=1).forward().write(Null(), parallelism=1)
    assert chains(flow) == ["read > map > filter > write x1"]
    assert flow.plan(1).exchanges == []


def test_nothing_is_fused_without_chaining() -> None:
    flow, stream = start(chaining=False)
    stream.map(str, parallelism=1).write(Null(), parallelism=1)
    assert chains(flow) == ["read x1", "map x1", "write x1"]
    assert exchanges(flow.plan(1)) == ["read -> map: forward", "map -> write: forward"]


def test_another_parallelism_is_an_exchange() -> None:
    flow, stream = start()
    stream.map(str, parallelism=2).write(Null(), parallelism=2)
    assert exchanges(flow.plan(1)) == ["read -> map > write: rebalance"]


@pytest.mark.parametrize("how", ["rebalance", "shuffle", "broadcast", "to_first"])
def test_a_grouping_is_an_exchange_even_between_single_tasks(how: str) -> None:
    flow, stream = start()
    getattr(stream, how)().write(Null(), parallelism=1)
    assert chains(flow) == ["read x1", "write x1"]


def test_keys_between_single_tasks_are_fused() -> None:
    flow, stream = start()
    stream.key_by(str).count(parallelism=1).write(Null(), parallelism=1)
    assert chains(flow) == ["read > count.key_by > count > write x1"]


def test_keys_between_more_tasks_are_exchanged_and_combined() -> None:
    flow, stream = start()
    keyed = stream.map(str, parallelism=2).key_by(str)
    keyed.count(parallelism=2).write(Null(), name="a", parallelism=2)
    keyed.count(emit="every", parallelism=1, name="every").write(Null(), name="b", parallelism=1)
    keyed.reduce(max, parallelism=2).write(Null(), name="c", parallelism=2)
    assert exchanges(flow.plan(1)) == [
        "read -> map: rebalance",
        "map -> count > a: key with count",
        "map -> every > b: key",
        "map -> reduce > c: key",
    ]


def test_a_stream_used_twice_and_a_union_are_not_fused() -> None:
    flow, stream = start()
    stream.map(str, parallelism=1).write(Null(), name="a", parallelism=1)
    other = flow.read(Memory([]), name="other", parallelism=1)
    stream.union(other).write(Null(), name="b", parallelism=1)
    assert chains(flow) == ["read x1", "other x1", "map > a x1", "b x1"]


def test_side_outputs_and_dead_letters_are_exchanges_and_do_not_stop_fusing() -> None:
    flow, stream = start()
    checked = stream.map(str, on_error="dead_letter", parallelism=1)
    checked.write(Null(), parallelism=1)
    checked.dead_letters().write(Null(), name="letters", parallelism=1)
    assert chains(flow) == ["read > map > write x1", "letters x1"]
    assert exchanges(flow.plan(1)) == ["read > map > write -> letters: forward of dead_letters"]


def test_parallelism_falls_back_to_the_flow_s_and_then_to_the_workers() -> None:
    flow = Flow("f")
    flow.read(Memory([1, 2, 3])).map(str, parallelism=2).write(Null())
    assert chains(flow, 3) == ["read x3", "map x2", "write x3"]
    flow.parallelism = 2
    assert chains(flow, 3) == ["read > map > write x2"]


# --- dead letters on the way to an operator ---------------------------------------------------------------------


def inverted(letters_grouping: str) -> Flow:
    """Key functions that fail, whose dead letters are used with some grouping."""
    flow, stream = start()
    counted = stream.rebalance().key_by(lambda n: 6 // n).count(on_error="dead_letter", parallelism=2)
    counted.write(Null(), name="counts")
    letters = counted.dead_letters()
    if letters_grouping == "key_by":
        letters = letters.key_by(lambda letter: letter.operator).count(emit="final", parallelism=2)
    elif letters_grouping == "broadcast":
        letters = letters.broadcast()
    letters.write(Null(), name="letters", parallelism=2)
    return flow


def test_letters_from_the_sender_come_by_the_grouping_of_the_others() -> None:
    assert testing.run(inverted("key_by"))["letters"] == [("count", 1)]
    assert len(testing.run(inverted("broadcast"))["letters"]) == 2
    assert len(testing.run(inverted("default"))["letters"]) == 1


def test_a_letter_comes_once_though_an_operator_is_fed_twice_by_another() -> None:
    """By its main output and by a side output of it, which are united."""
    flow, stream = start()
    work = lambda ctx, key, n: ctx.output("side", n) or [n]
    both = stream.key_by(str).process(work, outputs=("side",), parallelism=1)
    chosen = both.union(both.side_output("side")).partition_by(lambda n, tasks: 6 // n % tasks)
    checked = chosen.map(str, on_error="dead_letter", parallelism=2)
    checked.write(Null())
    checked.dead_letters().write(Null(), name="letters")
    out = testing.run(flow)
    assert sorted(out["write"]) == ["1", "1", "2", "2", "3", "3"]
    assert [letter.record for letter in out["letters"]] == [0, 0]


# --- numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_tasks_and_channels_are_numbered_without_clashes(seed: int) -> None:
    plan = random_flow(seed).flow.plan(3)
    assert [task.number for task in plan.tasks] == list(range(len(plan.tasks)))
    for chain in plan.chains:
        for index in range(chain.parallelism):
            task = plan.task(chain.index, index)
            assert (task.chain, task.index) == (chain.index, index)
    channels: list[int] = []
    for exchange in plan.exchanges:
        pairs = [(s, r) for s in range(exchange.senders) for r in exchange.targets(s)]
        assert pairs == sorted((s, r) for r in range(exchange.receivers) for s in exchange.origins(r))
        channels += [exchange.channel(s, r) for s, r in pairs]
    assert len(set(channels)) == len(channels)
    operators = [operator for chain in plan.chains for operator in chain.operators]
    fused = [operator.name for operator in operators if operator.kind not in ("key_by", "fork")]
    assert sorted(fused) == sorted(random_flow(seed).flow.graph.operators), "every operator is in one chain"


def test_the_same_flow_gives_the_same_plan_and_is_not_changed() -> None:
    flow = random_flow(3).flow
    before = cloudpickle.dumps(flow.explain(2))
    assert cloudpickle.dumps(flow.explain(2)) == before
    plan = pickle.loads(cloudpickle.dumps(flow.plan(2)))
    assert exchanges(plan) == exchanges(flow.plan(2))


# --- what cannot run --------------------------------------------------------------------------------------------


class Full(Sink):
    def writer(self, context: SinkContext) -> SinkWriter:
        raise NotImplementedError

    def check(self) -> None:
        raise FlowError("disk full")


def test_forward_needs_equal_parallelism() -> None:
    flow, stream = start()
    stream.forward().map(str, parallelism=2).write(Null())
    with pytest.raises(FlowError, match=r"forward from 'read' \(1 tasks\) to 'map' \(2 tasks\).* use rebalance"):
        flow.plan(1)


def test_keyed_operators_need_a_key_group_for_every_task() -> None:
    flow, stream = start(key_groups=2)
    stream.key_by(str).count(parallelism=3).write(Null())
    with pytest.raises(FlowError, match="operator 'count': parallelism 3 is above the flow's key_groups=2"):
        flow.plan(1)


def test_a_dangling_stream_an_empty_flow_and_no_worker_are_refused() -> None:
    flow, stream = start()
    stream.map(str)
    with pytest.raises(FlowError, match="nothing uses the main output of operator 'map'"):
        flow.plan(1)
    with pytest.raises(FlowError, match="reads nothing"):
        Flow("empty").plan(1)
    stream.write(Null())
    with pytest.raises(FlowError, match="nothing uses"):
        flow.plan(1)


def test_no_workers_and_sinks_that_cannot_write_are_refused() -> None:
    flow, stream = start()
    stream.write(Full())
    with pytest.raises(FlowError, match="disk full"):
        flow.plan(1)
    flow, stream = start()
    stream.write(Null())
    with pytest.raises(FlowError, match="workers=0"):
        flow.plan(0)
