"""Sources that are kept within a drift of event time, in real worker processes, and the alignment by itself."""

from __future__ import annotations

from typing import Any

import pytest

import penstock as ps
from penstock.runtime.errors import FlowError
from penstock.runtime.event_time.watermark import END_OF_TIME, IDLE
from penstock.runtime.host.alignment import Alignment, aligned_tasks

# Both sources cover the same 1,000 s of event time, and the slow one takes 5 s for them.
QUICK_STEP_MS, SLOW_STEP_MS, QUICK, SLOW, SLOW_RATE = 10, 2000, 100_000, 500, 100


class Apart(ps.ProcessFunction):
    """How far the sources are apart, at each record of the quick one."""

    def process(self, ctx: ps.ProcessContext, key: None, record: tuple[str, int]) -> list[int]:
        name, time = record
        latest = ctx.get({})
        latest[name] = time
        ctx.set(latest)
        return [time - latest.get("slow", 0)] if name == "quick" and time % 1000 == 0 else []


def apart(drift_s: float | None) -> int:
    """The greatest distance in a job whose quick source could be at its end before the slow one has begun."""
    flow = ps.Flow("apart")
    quick = flow.read(ps.sources.Generator(lambda i: ("quick", i * QUICK_STEP_MS), limit=QUICK), name="quick")
    slow = flow.read(
        ps.sources.Generator(lambda i: ("slow", i * SLOW_STEP_MS), rate=SLOW_RATE, limit=SLOW), name="slow"
    )
    marked = [
        stream.watermark(1, max_drift_s=drift_s, name=f"watermark {name}")
        for name, stream in (("quick", quick), ("slow", slow))
    ]
    sink = ps.sinks.Collect()
    marked[0].union(marked[1]).key_by(lambda record: None).process(Apart(), parallelism=1).write(sink)
    ps.run(flow, workers=2, local=True).wait()
    found: list[int] = sink.records()
    assert len(found) == QUICK * QUICK_STEP_MS // 1000, "no record may be lost"
    return max(found)


def test_a_quick_source_waits_for_a_slow_one() -> None:
    # A read may bring some thousand records, and records of the slow one may be 1 s on their way. Without a drift the
    # quick one is at its end, 1,000 s, long before.
    assert apart(10) < 300_000


def test_only_sources_that_read_are_waited_for() -> None:
    alignment = Alignment()
    assert alignment.least({1, 2}, [{1: 5000}]) == (False, 5000), "nothing is known of a task"
    assert alignment.least({1, 2}, [{2: None}]) == (False, 5000), "a task has no watermark yet"
    assert alignment.least({1, 2}, [{2: 900}]) == (True, 900)
    assert alignment.least({1, 2}, [{2: IDLE}]) == (True, 5000)
    assert alignment.least({1, 2}, []) == (True, 5000), "a worker does not answer"
    assert alignment.least({1, 2}, [{2: 700}, {1: END_OF_TIME}]) == (True, 700)
    assert alignment.least({1, 2}, [{2: END_OF_TIME}]) == (True, None)
    assert alignment.least({1, 7}, [{7: 4}]) == (True, 4), "another plan has other tasks"


def test_a_drift_is_for_watermarks_at_their_source() -> None:
    flow = ps.Flow("f")
    stream: Any = flow.read(ps.sources.Memory([(1, 2)]), parallelism=1)
    stream.rebalance().watermark(0, max_drift_s=1, parallelism=2).write(ps.sinks.Null())
    with pytest.raises(FlowError, match=r"max_drift_s holds back the source, .* directly after .read"):
        flow.plan(2)


def test_the_tasks_of_aligned_sources_are_known() -> None:
    flow = ps.Flow("f")
    for name, drift in (("a", 1), ("b", None)):
        read = flow.read(ps.sources.Memory([(1, 2)]), name=name, parallelism=2)
        read.watermark(0, max_drift_s=drift, name=f"w {name}").write(ps.sinks.Null(), name=f"sink {name}")
    plan = flow.plan(2)
    assert aligned_tasks(plan) == {task.number for task in plan.tasks if plan.chains[task.chain].name.startswith("a")}
