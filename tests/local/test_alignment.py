"""Sources that are kept within a drift of event time, in real worker processes, and the alignment by itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

import penstock as ps
from penstock.host.decide.alignment import Alignment, aligned_tasks
from penstock.runtime.errors import FlowError
from penstock.runtime.event_time.pace import Pace
from penstock.runtime.event_time.watermark import END_OF_TIME, IDLE
from penstock.runtime.transport.memory import MemoryNetwork
from penstock.runtime.worker.task import Steps, Task
from penstock.runtime.worker.wiring import build

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
    # Records of the slow one may be 1 s on their way, in which it makes 200 s. Without a drift the quick one is at its
    # end, 1,000 s, long before.
    assert apart(10) < 300_000


DRIFT_MS = 20_000


def source_task(times: Iterable[int], drift_s: float | None = DRIFT_MS / 1000) -> Task:
    """The open task of a source of records that are their times. To its clocks no step takes any time."""
    flow = ps.Flow("f")
    flow.read(ps.sources.Memory(times), name="in").watermark(lambda time: time, max_drift_s=drift_s).write(
        ps.sinks.Null()
    )
    plan = flow.plan(1)
    steps = Steps(stopwatch=lambda: 0)
    transport = MemoryNetwork(1).transport(0)
    options: dict[str, Any] = {"clock": lambda: 0, "wall": lambda: 0.0, "steps": steps, "aligned": drift_s is not None}
    wiring = build(plan, {task.number: 0 for task in plan.tasks}, 0, transport, report=lambda reported: None, **options)
    (task,) = wiring.tasks.values()
    assert task.input.is_read
    task.open()
    return task


def reads_until_held(task: Task) -> list[int]:
    """Runs the task until it is held back or at its end. Returns the numbers of records that it has read each time."""
    reads: list[int] = []
    while task.runnable():
        before = task.stages[0].records_out
        task.step()
        if task.stages[0].records_out > before:
            reads.append(task.stages[0].records_out - before)
    return reads


def furthest_ahead(task: Task, leasts: Iterable[int]) -> int:
    """How far the task's watermark gets ahead of the least one, which takes these values."""
    reads_until_held(task)
    ahead = 0
    for least in leasts:
        task.input.align(least)
        reads_until_held(task)
        mark = task.input.aligned_mark
        assert mark is not None
        if mark == END_OF_TIME:
            break
        ahead = max(ahead, mark - least)
    return ahead


def test_a_source_that_is_released_reads_up_to_its_drift() -> None:
    task = source_task(range(0, 2_000_000, 200))
    assert reads_until_held(task) == [1], "it does not know yet how far the others are"
    # Its limit of records for a step doubles with each read that the limit has ended, which would soon be 1,000 s.
    assert furthest_ahead(task, range(0, 1_900_000, 20_000)) <= DRIFT_MS + 200
    task.input.align(2_000_000)
    reads = reads_until_held(task)
    assert task.stages[0].records_out == 10_000
    assert len(reads) < 20, "it reads many records at once, up to where it is held"


def test_a_source_that_begins_to_leap_is_past_its_drift_by_one_read() -> None:
    """The times of records are not known before they are read."""
    dense, sparse = range(0, 100_000, 100), range(100_000, 2_000_000, 1000)
    task = source_task([*dense, *sparse])
    # 200 records should make 20 s, and can make 200 s.
    assert furthest_ahead(task, range(0, 100_000, 10_000)) <= DRIFT_MS + 200_000
    assert furthest_ahead(task, range(400_000, 1_900_000, 10_000)) <= DRIFT_MS + 1000


def test_leaps_between_many_records_of_equal_times_are_not_forgotten() -> None:
    task = source_task([minute * 5_000 for minute in range(100) for _ in range(500)])
    assert furthest_ahead(task, range(0, 50_000, 5_000)) <= DRIFT_MS + 5_000, "the first leaps are learned, too"
    assert furthest_ahead(task, range(50_000, 450_000, 5_000)) <= DRIFT_MS + 5_000


def test_what_is_on_its_way_to_spark_counts_for_the_drift() -> None:
    task = source_task(range(0, 2_000_000, 200))
    furthest_ahead(task, range(0, 100_000, 10_000))
    mark = task.input.aligned_mark
    assert mark is not None
    task.input.align(mark)
    taken: list[int] = []
    while task.input.has_input_to_divert():
        _, records, _ = task.input.take_to_divert(1000, columns=False)
        taken.append(records)
    assert sum(taken) <= DRIFT_MS / 200 + 1, "their times are not known before they are answered"
    for records in taken:
        task.input.take_up_diverted(records, 0)
    assert task.input.has_input_to_divert(), "what has come back is not under way any more"


def test_a_source_without_a_drift_reads_what_a_step_can_take() -> None:
    without = reads_until_held(source_task(range(0, 2_000_000, 200), drift_s=None))
    assert without[:3] == [64, 128, 256]
    alone = source_task(range(0, 2_000_000, 200))
    reads_until_held(alone)
    alone.input.align(None)
    assert reads_until_held(alone)[:2] == [64, 128], "nobody need wait"


def test_a_pace_is_known_from_the_last_reads() -> None:
    pace = Pace()
    assert pace.records_within(1e9) == 1, "nothing is known"
    for records, mark in ((1, 5000), (10, 6000)):
        pace.read(records)
        pace.learn(mark, 0)
    assert pace.each == 100
    assert pace.records_within(500) == 5
    assert pace.records_within(1e9) == 21, "twice as many as the 10.75 from which it is known"
    assert pace.records_within(0) == pace.records_within(-1e9) == 1
    pace.read(10)
    pace.learn(6000, 10)
    assert pace.each == 100, "records under way have told nothing"
    pace.learn(None, 0)
    assert pace.each < 100, "records without a watermark take no time"
    pace.read(1)
    pace.learn(16_000, 0)
    assert pace.each == 10_000, "a leap counts at once"
    pace.read(100)
    pace.learn(26_000, 0)
    assert 100 < pace.each < 200, "and for less and less"


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
