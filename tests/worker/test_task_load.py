"""The load of a task, which is asked for while the task runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

import penstock as ps
from penstock.apps.ysb_events import START_MS, Events, EventSource
from penstock.bridge.range_load import way_between
from penstock.runtime.event_time.watermark import IDLE
from penstock.runtime.operators.micro_batch import Bridge, DiversionStats, DivertRequest, MicroBatchResult
from penstock.runtime.sources.base import SourceContext
from penstock.runtime.transport.memory import MemoryNetwork
from penstock.runtime.worker.diversion import DiversionTotals, Diverted
from penstock.runtime.worker.load import DivertLoad, task_load
from penstock.runtime.worker.metrics import LeastAges, RecentHistogram
from penstock.runtime.worker.run_loop import RunLoop
from penstock.runtime.worker.task_state import TaskState
from penstock.runtime.worker.wiring import build
from tests.runtime.timed_job import Job


class Silent(Bridge):
    """A bridge that keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[Future[MicroBatchResult]] = []

    def submit(self, chain: int, position: int, input_: Any) -> Future[MicroBatchResult]:
        self.given.append(Future())
        return self.given[-1]


class DivertedTask:
    """As much of a task, and of its input, as a diversion uses: `left` more micro-batches, of so many records each."""

    is_read = False
    park_at = None

    def __init__(self, records: int) -> None:
        self.records = records
        self.left = 1
        self.now = 0
        self.passage = SimpleNamespace(timer_due=lambda: False, stages=[], held=0, marking=False)
        self.life = SimpleNamespace(state=TaskState.DIVERTED)
        self.diversions = DiversionTotals(answered=100)
        self.input = self

    def clock(self) -> int:
        self.now += 10**9
        return self.now

    def has_barrier(self) -> bool:
        return False

    def own_state(self) -> None:
        return None

    def at_end(self) -> bool:
        return False

    def has_input_to_divert(self) -> bool:
        return self.left > 0

    def take_to_divert(self, most: int, *, columns: bool) -> tuple[list[Any], int, int]:
        self.left -= 1
        return [], self.records, 0

    def take_up_diverted(self, records: int, stamp: int) -> None:
        pass

    def stopwatch(self) -> int:
        return 0


def divert(task: DivertedTask, bridge: Silent) -> Diverted:
    any_task: Any = task
    return Diverted(any_task, DivertRequest(0, 1, 0.1, True), bridge, lambda: None)


def test_records_under_way_can_be_counted_while_micro_batches_leave() -> None:
    class Growing(int):
        """A number during whose adding up another micro-batch leaves."""

        def __radd__(self, other: int) -> int:
            task.left = 1
            diversion.begin()
            return other + int(self)

    bridge = Silent()
    task = DivertedTask(5)
    diversion = divert(task, bridge)
    diversion.begin()
    assert len(bridge.given) == 1
    (first,) = diversion._queue
    first.records = Growing(5)  # type: ignore[union-attr]
    assert diversion.records == 5
    assert len(bridge.given) == 2
    assert diversion.records == 10


def test_a_task_counts_what_was_answered_through_all_its_diversions() -> None:
    bridge, task = Silent(), DivertedTask(5)
    diversion = divert(task, bridge)
    diversion.begin()
    bridge.given[0].set_result(MicroBatchResult([]))
    diversion.begin()
    assert task.diversions.answered == 105


def test_a_load_is_made_of_a_diversion_that_ends_meanwhile() -> None:
    ends = [SimpleNamespace(story=DiversionStats(3), records=7)]

    class Ending:
        task = SimpleNamespace(number=0, chain=0)
        finished = blocked = False
        busy_ns = cpu_ns = waits_ns = threads_ns = gathered = generation = 0
        input = SimpleNamespace(queued=0, backlog=lambda: 0, is_full=lambda: False, marks=SimpleNamespace(current=IDLE))
        logs: tuple[Any, ...] = ()
        latency = RecentHistogram()
        diversions = DiversionTotals()
        passage = SimpleNamespace(begun=0, record_by_record=None)
        ages = LeastAges()
        stages: tuple[Any, ...] = ()
        outputs = SimpleNamespace(all=list, skipped=dict)

        def clock(self) -> int:
            return 0

        @property
        def diversion(self) -> Any:
            return ends.pop() if ends else None

        def told_to_divert(self) -> DivertRequest | None:
            return None

    task: Any = Ending()
    load = task_load(task, lambda channel: None)
    assert load["diverted"] is not None
    assert load["diverted"]["id"] == 3
    assert load["under_way"] == 7


def test_a_load_tells_what_a_task_follows() -> None:
    flow = ps.Flow("words")
    flow.read(ps.sources.Memory(["x"]), name="lines").map(str.upper).write(ps.sinks.Null())
    plan = flow.plan(1)
    transport = MemoryNetwork(1).transport(0)
    placed = {task.number: 0 for task in plan.tasks}
    clock = time.monotonic_ns
    loop = RunLoop(build(plan, placed, 0, transport, clock=clock, report=lambda _: None), transport, clock)
    (load,) = loop.load()
    assert (load["divert"], load["diverted"]) == (None, None)
    for task in loop.tasks:
        task.open()
    loop.divert(DivertRequest(0, 1, 0.5, True, 10), Silent())
    (load,) = loop.load()
    assert load["divert"] == DivertLoad(0.5, 10, 0)
    assert load["diverted"] is not None, "without epochs at once"
    loop.divert(DivertRequest(0, 1, 0.25, True, 20), Silent())
    assert loop.load()[0]["divert"] == DivertLoad(0.25, 20, 0)
    loop.undivert(0)
    (load,) = loop.load()
    assert load["divert"] is None
    assert load["diverted"] is not None, "until all micro-batches are answered"


def test_a_diverted_task_comes_back_when_it_is_to_go_to_another_spark() -> None:
    flow = ps.Flow("words")
    flow.read(ps.sources.Memory(["x"]), name="lines").map(str.upper).write(ps.sinks.Null())
    plan = flow.plan(1)
    transport = MemoryNetwork(1).transport(0)
    placed = {task.number: 0 for task in plan.tasks}
    clock = time.monotonic_ns
    loop = RunLoop(build(plan, placed, 0, transport, clock=clock, report=lambda _: None), transport, clock)
    (task,) = loop.tasks
    task.open()
    loop.divert(DivertRequest(0, 1, 0.5, True, 10, life=1), Silent())
    loop.divert(DivertRequest(0, 1, 0.5, True, 10, life=2), Silent())
    (load,) = loop.load()
    assert load["divert"] is None, "a request for the other one follows when it has come back"
    assert load["diverted"] is not None
    task.step()
    assert loop.load()[0]["diverted"] is None
    loop.divert(DivertRequest(0, 1, 0.5, True, 10, life=2), Silent())
    assert loop.load()[0]["divert"] == DivertLoad(0.5, 10, 2)


def test_a_task_of_another_plan_does_not_take_a_message_for_its_own() -> None:
    divert = DivertRequest(1, 2, 0.1, True, operators=("a", "b"))
    assert divert.concerns(1, ["a", "b"])
    assert not divert.concerns(1, ["b"])
    assert not divert.concerns(0, ["a", "b"])
    assert DivertRequest(1, 2, 0.1, True).concerns(1, ["whatever"])


class Left(ps.sources.Reader):
    """A reader that knows of 70 more records, and says nothing of its pace."""

    def read(self, limit: int) -> list[Any]:
        return []

    def offsets(self) -> dict[str, Any]:
        return {}

    def backlog(self) -> int:
        return 70


class World(ps.sources.Source):
    """The source of `Left`; or of the records of another source, which come at a pace of their own."""

    bounded = False

    def __init__(self, other: ps.sources.Source | None = None) -> None:
        self.other = other

    def splits(self, parallelism: int) -> list[ps.sources.Split]:
        return [ps.sources.Split("all")] if self.other is None else self.other.splits(parallelism)

    def reader(self, splits: list[ps.sources.Split], context: SourceContext) -> ps.sources.Reader:
        return Left() if self.other is None else self.other.reader(splits, context)


def _number(i: int) -> int:
    return i


@pytest.mark.parametrize(
    ("source", "backlog"),
    [
        (ps.sources.Memory(range(100)), 100),
        (ps.sources.Generator(_number, limit=100), 100),
        (EventSource(Events(1), limit=100), 100),
        (ps.sources.Generator(_number), 0),
        (ps.sources.Generator(_number, rate=1_000), 501),
        (EventSource(Events(1, rate=1_000), paced=True, clock=lambda: START_MS * 1_000_000 + 500_000_000), 501),
        (World(), 70),
        (World(ps.sources.Memory(range(100))), 100),
    ],
    ids=["memory", "bounded", "bounded events", "unbounded", "paced", "paced events", "of a user's", "paced by a user"],
)
def test_the_rest_of_a_bounded_source_waits(source: ps.sources.Source, backlog: int) -> None:
    """So it may go to Spark where Spark is quicker."""
    now = [10**9]
    flow = ps.Flow("pace")
    flow.read(source, name="read", parallelism=1).write(ps.sinks.Null())
    plan = flow.plan(1)
    transport = MemoryNetwork(1).transport(0)
    placed = {task.number: 0 for task in plan.tasks}
    loop = RunLoop(
        build(plan, placed, 0, transport, clock=lambda: now[0], report=lambda _: None), transport, lambda: now[0]
    )
    (task,) = loop.tasks
    task.open()
    if isinstance(source, ps.sources.Generator):  # whose schedule begins at the first read
        task.input.reader.read(0)  # type: ignore[attr-defined]
        now[0] += 500_000_000
    assert loop.load()[0]["backlog"] == backlog
    loop.stop()
    assert loop.load()[0]["backlog"] == 0, "nothing more is read"


def test_the_way_between_two_tasks_is_known_by_the_youngest_records() -> None:
    """A record takes 2 ms at the first operator, then 7 ms until the next worker looks, and 3 ms at the second one.
    Records of the first batch have waited 50 ms for that worker."""
    ms = 1_000_000

    def make(takes: Callable[[int], None]) -> ps.Flow:
        def slow(milliseconds: int) -> Callable[[int], int]:
            def call(number: int) -> int:
                takes(milliseconds * ms)
                return number

            return call

        flow = ps.Flow("hop", parallelism=1)
        numbers = flow.read(ps.sources.Generator(_number, rate=10.0), name="numbers").map(slow(2), name="first")
        numbers.rebalance().map(slow(3), name="second").write(ps.sinks.Null(), name="out")
        return flow

    job = Job(make, 2)
    sender, receiver = job.loops
    assert way_between(sender.load(), receiver.load()) is None, "it is not known yet"

    def run(loop: RunLoop) -> None:
        loop.deliver(loop.transport.receive(0))
        for task in loop.tasks:
            while task.runnable():
                task.step()

    for due, wait_ms in enumerate((50, 7, 7, 30)):
        job.now = 10**9 + due * 10**8
        run(sender)
        job.now += wait_ms * ms
        run(receiver)
    assert way_between(sender.load(), receiver.load()) == pytest.approx(0.007)
    for _ in range(3):
        job.now += 2 * 10**9
        sender.load(), receiver.load()
    assert way_between(sender.load(), receiver.load()) is None, "nothing was on its way lately"
