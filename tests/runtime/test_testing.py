"""`penstock.testing.run`: a flow in this process, with the same answer every time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.runtime import task as task_module
from penstock.runtime import testing
from penstock.runtime.errors import FlowError, RecordError
from penstock.runtime.flow import Flow
from penstock.runtime.process import Process, ProcessContext
from penstock.runtime.sinks.call import Call, Null
from penstock.runtime.sources.generator import Generator
from penstock.runtime.sources.memory import Memory
from tests.runtime.random_flows import random_flow


def counting(**options: Any) -> Flow:
    flow = Flow("f", **options)
    flow.read(Memory(["unused"])).flat_map(str.split).key_by(str.lower).count().write(Null())
    return flow


def test_every_update_shows_with_one_record_at_a_time() -> None:
    assert testing.run(counting(), ["to be", "To"])["write"] == [("to", 1), ("be", 1), ("to", 2)]


def test_larger_batches_show_the_latest() -> None:
    assert testing.run(counting(), ["a a", "a"], batch_size=2)["write"] == [("a", 3)]


def test_inputs_by_name_or_by_themselves_or_none() -> None:
    flow = counting()
    assert testing.run(flow, {"read": ["x"]}) == testing.run(flow, ["x"]) == {"write": [("x", 1)]}
    assert testing.run(flow, iter(["x"])) == {"write": [("x", 1)]}
    assert testing.run(flow) == {"write": [("unused", 1)]}


def two_sources() -> Flow:
    flow = Flow("f")
    one = flow.read(Memory([1]), name="one")
    one.union(flow.read(Memory([2]), name="two")).write(Null())
    return flow


def test_several_sources_need_names() -> None:
    with pytest.raises(FlowError, match="has 2 sources; give inputs by name: one, two"):
        testing.run(two_sources(), [1])
    with pytest.raises(FlowError, match="no source 'three'; its sources: one, two"):
        testing.run(two_sources(), {"three": [1]})
    assert sorted(testing.run(two_sources(), {"two": [7, 8]})["write"]) == [1, 7, 8]


def test_an_endless_source_is_refused_unless_it_is_replaced() -> None:
    flow = Flow("f")
    flow.read(Generator(int)).write(Null())
    with pytest.raises(FlowError, match="source 'read' never ends; give its records in `inputs`"):
        testing.run(flow)
    assert testing.run(flow, [4]) == {"write": [4]}


def test_sinks_are_replaced_and_told_apart() -> None:
    flow = Flow("f")
    stream = flow.read(Memory([1, 2]))
    stream.write(Call(lambda record: 1 / 0), name="a")
    stream.filter(lambda n: n > 1).write(Null(), name="b")
    assert testing.run(flow) == {"a": [1, 2], "b": [2]}


def test_errors_are_the_users() -> None:
    flow = Flow("f")
    flow.read(Memory([])).map(lambda n: 1 // n, name="invert").write(Null())
    with pytest.raises(RecordError) as caught:
        testing.run(flow, [1, 0])
    assert caught.value.operator == "invert"
    assert caught.value.record == "0"
    assert caught.value.location is not None
    assert caught.value.location.startswith(__file__)


@pytest.mark.parametrize("parallelism", [1, 3, None])
def test_parallelism_does_not_change_what_comes(parallelism: int | None) -> None:
    out = testing.run(counting(), ["a b", "b c", "c b"], parallelism=parallelism)
    assert dict(sorted(out["write"])) == {"a": 1, "b": 3, "c": 2}


@pytest.mark.parametrize("seed", range(30))
def test_two_runs_are_equal(seed: int) -> None:
    flow = random_flow(seed).flow
    assert testing.run(flow, batch_size=5, parallelism=2) == testing.run(flow, batch_size=5, parallelism=2)


def _stopwatch(seed: int) -> Iterator[int]:
    chance = random.Random(seed)
    return itertools.accumulate(iter(lambda: chance.choice((10, 10_000_000)), None))


def test_the_time_that_steps_take_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's size follows the time that it takes, but a test must not."""

    def build() -> Flow:
        flow = Flow("f", chaining=False)
        many = flow.read(Memory([]), name="a").flat_map(lambda n: range(n, n + 200))
        other = flow.read(Memory([]), name="b").flat_map(lambda n: range(n, n + 300))
        many.union(other).key_by(lambda n: n % 3).count().write(Null())
        return flow

    outputs = []
    for seed in range(4):
        ticks = _stopwatch(seed)
        monkeypatch.setattr(task_module, "perf_counter_ns", lambda ticks=ticks: next(ticks))
        outputs.append(testing.run(build(), {"a": range(9), "b": range(7)}))
    assert all(output == outputs[0] for output in outputs)


class Numbering(Process):
    """Keeps state in itself, which it should not."""

    def __init__(self) -> None:
        self.seen = 0

    def process(self, ctx: ProcessContext, key: Any, record: Any) -> list[int]:
        self.seen += 1
        return [self.seen]


def test_a_flow_can_be_run_again_and_is_not_changed() -> None:
    flow = Flow("f")
    flow.read(Memory(["x", "y"])).key_by(str).process(Numbering()).write(Null())
    before = flow.explain()
    assert testing.run(flow) == testing.run(flow) == {"write": [1, 2]}
    assert flow.explain() == before


def test_what_cannot_run_is_refused() -> None:
    flow = Flow("f")
    flow.read(Memory([])).map(str)
    with pytest.raises(FlowError, match="not used"):
        testing.run(flow)
