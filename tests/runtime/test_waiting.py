"""How many records wait for each operator: in a whole job in virtual time, and computed from the loads of tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import penstock as ps
from penstock.runtime.exchange.output_cache import OutputCaches
from penstock.runtime.host.status import StatusBuilder
from penstock.runtime.transport.memory import MemoryNetwork
from penstock.runtime.worker.load import TaskLoad
from penstock.runtime.worker.run_loop import RunLoop
from penstock.runtime.worker.task import Steps
from penstock.runtime.worker.waiting import WaitingRecords
from penstock.runtime.worker.wiring import build

S = 1_000_000_000
LOOK_NS = S // 4


class Job:
    """The workers of a job, which take turns in virtual time: only functions that call `takes` need any."""

    def __init__(
        self, make: Callable[[Callable[[int], None]], ps.Flow], workers: int, output_caches: OutputCaches | None = None
    ) -> None:
        self.now = 0
        self.flow = make(self._takes)
        self.plan = self.flow.plan(workers)
        network = MemoryNetwork(workers)
        self.loops = []
        for worker in range(workers):
            placed = {task.number: task.chain % workers for task in self.plan.tasks}
            transport = network.transport(worker)
            wiring = build(
                self.plan,
                placed,
                worker,
                transport,
                clock=lambda: self.now,
                report=lambda _: None,
                steps=Steps(stopwatch=lambda: self.now),
                output_caches=output_caches,
            )
            self.loops.append(RunLoop(wiring, transport, lambda: self.now))
        for loop in self.loops:
            for task in loop.tasks:
                task.open()
        self.placed = placed
        self.status = StatusBuilder(self.plan)
        self.status.place(placed, [])

    def _takes(self, ns: int) -> None:
        self.now += ns

    def looks(self, seconds: float) -> Iterator[dict[str, int]]:
        """How many records wait for each operator, at a look every quarter of a second."""
        end, next_look = self.now + int(seconds * S), self.now + LOOK_NS
        while self.now < end:
            ran = False
            for loop in self.loops:
                loop._deliver(loop.transport.receive(0))
                for task in loop.tasks:
                    if task.runnable():
                        task.step()
                        ran = True
            if not ran:
                self.now += 100_000
            if self.now >= next_look:
                next_look += LOOK_NS
                yield self.look()

    def queued(self, operator: str) -> int:
        """How many records lie in the inboxes of an operator's tasks."""
        return sum(task.queued for loop in self.loops for task in loop.tasks if task.name.startswith(operator))

    def look(self) -> dict[str, int]:
        """How many records wait for each operator."""
        reports = [
            {"index": worker, "time_ns": self.now, "tasks": loop.status(), "ring_bytes": 0}
            for worker, loop in enumerate(self.loops)
        ]
        operators = self.status.build("RUNNING", reports, self.now / S)["operators"]
        return {name: operator["waiting"] for name, operator in operators.items()}


RATE, EACH_NS = 1_000, 100_000  # records of the world a second; what each takes in the slow operator: 10,000/s at most
BURST = range(1_000, 4_000)  # from 1 s to 4 s
OF_ONE = 20  # in the burst: 20,000 records/s come to the slow operator


def slowly(takes: Callable[[int], None]) -> Callable[[Any], Any]:
    """A function that takes EACH_NS for a record, and returns it."""

    def slow(record: Any) -> Any:
        takes(EACH_NS)
        return record

    return slow


def burst_inside(takes: Callable[[int], None], apart: bool) -> ps.Flow:
    """A source that is quiet all the time; an operator that suddenly makes many records of one; a slow operator."""

    def several(i: int) -> list[str]:
        return [f"{i} {n:0100}" for n in range(OF_ONE if i in BURST else 1)]

    flow = ps.Flow("inside", parallelism=1)
    numbers = flow.read(ps.sources.Generator(lambda i: i, rate=RATE), name="numbers")
    if apart:
        numbers = numbers.rebalance()
    numbers.flat_map(several, name="several").rebalance().map(slowly(takes), name="slow").write(
        ps.sinks.Null(), name="out"
    )
    return flow


def late_at(seconds: float) -> float:
    """How many records are late at the slow operator, by the burst."""
    return max(0.0, min(seconds - 1, 3) * (RATE * OF_ONE - S / EACH_NS) - max(0, seconds - 4) * (S / EACH_NS - RATE))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("apart", [False, True], ids=["fused with the source", "apart"])
def test_a_burst_inside_a_flow_is_seen_at_the_operator_behind_it(workers: int, apart: bool) -> None:
    """Although credit lets only some thousand records into its inbox, and the source is quiet."""
    job = Job(lambda takes: burst_inside(takes, apart), workers)
    for waiting in job.looks(1):
        assert waiting["slow"] < 500, "all is quiet"
    most_queued = 0
    for look, waiting in enumerate(job.looks(2.75), 1):
        seconds = job.now / S
        assert waiting["slow"] == pytest.approx(late_at(seconds), rel=0.3 if look < 4 else 0.1), f"after {seconds} s"
        assert waiting["slow"] > 5 * waiting["numbers"] + 5 * waiting["several"]
        assert waiting["out"] == 0, "fused with the slow operator"
        most_queued = max(most_queued, job.queued("slow"))
    assert most_queued < 10_000 < waiting["slow"] - 10_000, "credit caps the inbox"
    for waiting in job.looks(4.5):
        seconds = job.now / S
        # What waits at the source may all become as much as what came last.
        assert 0.9 * late_at(seconds) - 500 <= waiting["slow"] <= late_at(seconds) + OF_ONE * RATE * (seconds - 3.5)
    assert waiting["slow"] < 500, "it is over"


def test_a_burst_of_the_world_waits_at_its_source() -> None:
    """The operators downstream are quick enough."""

    def make(takes: Callable[[int], None]) -> ps.Flow:
        flow = ps.Flow("outside", parallelism=1)
        numbers = flow.read(ps.sources.Generator(lambda i: i, rate="1000:1s,15000:2s,1000:9s"), name="numbers")
        numbers.map(slowly(takes), name="slow").rebalance().map(str, name="text").write(ps.sinks.Null())
        return flow

    job = Job(make, 1)
    seen = list(job.looks(5))
    assert max(waiting["numbers"] for waiting in seen) == pytest.approx(10_000, rel=0.1)
    assert max(waiting["text"] for waiting in seen) < 1_000
    assert seen[-1]["numbers"] < 500, "it is over"


def test_a_bounded_source_at_full_speed_is_no_burst() -> None:
    def make(takes: Callable[[int], None]) -> ps.Flow:
        flow = ps.Flow("bounded", parallelism=1)
        texts = flow.read(ps.sources.Memory([f"{i:0100}" for i in range(50_000)]), name="texts")
        texts.rebalance().map(slowly(takes), name="slow").write(ps.sinks.Null())
        return flow

    job = Job(make, 1)
    for waiting in job.looks(2):
        assert waiting["texts"] == 0
        assert waiting["slow"] < 25_000, "what was read, in steps of some thousand"


def test_what_a_step_has_not_taken_up_waits() -> None:
    """An operator that makes many records of one is stopped within the step."""

    def several(i: int) -> list[str]:
        return [f"{i} {n:0100}" for n in range(1_000)]

    def make(takes: Callable[[int], None]) -> ps.Flow:
        flow = ps.Flow("steps", parallelism=1)
        numbers = flow.read(ps.sources.Memory(range(2_000)), name="numbers").rebalance()
        plain = numbers.map(str, name="text").filter(lambda i: int(i) % 2, name="odd").flat_map(several, name="plain")
        plain.rebalance().write(ps.sinks.Null())
        keyed = numbers.key_by(lambda i: i).process(lambda ctx, key, i: several(i), name="keyed")
        keyed.rebalance().write(ps.sinks.Null())
        return flow

    job = Job(make, 1)
    (loop,) = job.loops
    makers = [task for task in loop.tasks if task.stages[-1].expands]
    assert len(makers) == 2
    for task in [loop.tasks[0], *makers, *makers]:
        while task.runnable() and not task.blocked and not (task in makers and task.queued == 0):
            task.step()
    for maker in makers:
        assert maker.blocked, "it was stopped within a step"
        (load,) = [load for load in loop.load() if load["number"] == maker.task.number]
        stage = maker.stages[-1]
        left = stage.records_in - stage.records_out / 1_000
        assert left > 20, "or the test shows nothing"
        # The function's outputs for a record leave in several pieces.
        assert load["begun"] == pytest.approx(left * maker.stages[0].records_in / stage.records_in, abs=8)


# --- from the loads of tasks --------------------------------------------------------------------------------------


def load(number: int, chain: int, at_s: float, **values: Any) -> TaskLoad:
    """A task's load after some seconds; what is not given is 0."""
    known: Any = {"number": number, "chain": chain, "at_ns": int(at_s * S), "sends": []}
    return {**dict.fromkeys(("queued", "backlog", "under_way", "begun"), 0), **known, **values}  # type: ignore[return-value]


def sender(
    number: int, at_s: float, taken: int, made: int, *, held: int = 0, stopped_s: float = 0.0, **more: int
) -> TaskLoad:
    """The load of a task of chain 0, which sends to chain 1."""
    return load(number, 0, at_s, sends=[(1, made, held, int(stopped_s * S))], **more)


def test_what_tasks_have_waits_for_them() -> None:
    waiting = WaitingRecords()
    waiting.look(load(7, 2, 1.0, queued=1, backlog=20, under_way=300, begun=4_000), 9_000)
    waiting.look(load(8, 2, 1.0, queued=50_000), 0)
    waiting.look(load(9, 1, 1.0, queued=600_000), 0)
    assert (waiting.of_chain(2), waiting.held_back(2)) == (54_321, 0)
    assert waiting.of_chain(0) == 0


def test_what_senders_have_not_sent_waits_for_the_receiver() -> None:
    waiting = WaitingRecords()
    waiting.look(sender(1, 1.0, 10, 100, held=70), 10)
    waiting.look(sender(2, 1.0, 10, 100, held=7), 10)
    assert (waiting.of_chain(1), waiting.of_chain(0)) == (77, 0)
    waiting.look(sender(1, 1.25, 20, 200, held=0), 20)
    assert waiting.of_chain(1) == 7, "of the other, whose worker was silent, it is what it was"


@pytest.mark.parametrize(("stopped_s", "counts"), [(0.0, 0.0), (0.025, 0.5), (0.05, 1.0), (0.25, 1.0)])
def test_what_waits_for_a_sender_waits_for_whoever_stops_it(stopped_s: float, counts: float) -> None:
    waiting = WaitingRecords()
    waiting.look(sender(1, 1.0, 0, 0, backlog=900), 0)
    assert waiting.held_back(1) == 0, "it is not known whether it stands still"
    waiting.look(sender(1, 1.25, 0, 300, stopped_s=stopped_s, backlog=1_000, under_way=50), 100)
    assert waiting.held_back(1) == round(counts * 3 * 1_000), "what went to Spark is stopped by nobody"
    assert waiting.of_chain(0) == 1_050, "there too"


def test_magnifications_are_those_of_the_last_moments() -> None:
    waiting = WaitingRecords()
    for look in range(1, 41):
        waiting.look(sender(1, look / 4, 0, 500 * look, stopped_s=look / 4, backlog=100), 500 * look)
    assert waiting.held_back(1) == 100
    for look in range(41, 45):
        made = 500 * 40 + 5_000 * (look - 40)
        waiting.look(sender(1, look / 4, 0, made, stopped_s=look / 4, backlog=100), 500 * look)
    assert waiting.held_back(1) == pytest.approx(1_000, rel=0.05), "within a second"
    for look in range(45, 1_000):
        waiting.look(sender(1, look / 4, 0, made, stopped_s=look / 4, backlog=100), 500 * 44)
    assert waiting.held_back(1) == pytest.approx(1_000, rel=0.05), "it stays while nothing comes"


def test_records_that_wait_within_a_step_are_not_taken_yet() -> None:
    """A step that is stopped by its first record's outputs would make the magnification small."""
    waiting = WaitingRecords()
    waiting.look(sender(1, 1.0, 0, 0), 0)
    waiting.look(sender(1, 2.0, 0, 1_000, stopped_s=1.0, begun=900), 1_000)
    assert waiting.held_back(1) == 900 * 10
    assert waiting.of_chain(0) == 900


def test_stops_pass_on_upstream() -> None:
    """Chain 0 makes 2 of one, chain 1 makes 5, and chain 2 is slow."""
    waiting = WaitingRecords()
    for at_s in (1.0, 2.0):
        n = int(at_s)
        waiting.look(load(1, 0, at_s, backlog=100, sends=[(1, 2_000 * n, 6, n * S)]), 1_000 * n)
        waiting.look(load(2, 1, at_s, queued=40, sends=[(2, 10_000 * n, 3, n * S)]), 2_000 * n)
        waiting.look(load(3, 2, at_s, queued=8), 10_000 * n)
    assert waiting.of_chain(0) == 100
    assert waiting.of_chain(1) == 40 + 6 + 2 * 100
    assert waiting.of_chain(2) == 8 + 3 + 5 * (40 + 6 + 2 * 100)


def test_a_task_that_was_built_again_begins_anew() -> None:
    waiting = WaitingRecords()
    waiting.look(sender(1, 5.0, 0, 10_000, stopped_s=2.0, backlog=10), 1_000)
    waiting.look(sender(1, 6.0, 0, 20_000, stopped_s=3.0, backlog=10), 2_000)
    assert waiting.held_back(1) == 100
    waiting.look(sender(1, 7.0, 0, 300, stopped_s=0.0, backlog=10), 100)
    assert waiting.held_back(1) == 30, "it stood still, and most likely does again"
    waiting.look(sender(1, 8.0, 0, 600, stopped_s=0.0, backlog=10), 200)
    assert waiting.held_back(1) == 0
    waiting.look(sender(1, 8.5, 0, 800, stopped_s=0.4, backlog=10), 300)
    waiting.look(sender(1, 9.0, 0, 400, stopped_s=0.0, backlog=10), 400)
    assert waiting.held_back(1) == 10, "its outputs were repartitioned"


def test_a_task_that_has_migrated_has_another_clock() -> None:
    waiting = WaitingRecords()
    waiting.look(sender(1, 5_000.0, 0, 10_000, stopped_s=1.0, backlog=10), 1_000)
    waiting.look(sender(1, 5_001.0, 0, 20_000, stopped_s=2.0, backlog=10), 2_000)
    assert waiting.held_back(1) == 100
    waiting.look(sender(1, 1.0, 0, 24_000, stopped_s=2.5, backlog=10), 3_000)
    assert waiting.held_back(1) == 80
    waiting.look(sender(1, 2.0, 0, 32_000, stopped_s=2.5, backlog=10), 4_000)
    assert waiting.held_back(1) == 0


def test_looks_that_follow_each_other_closely_tell_nothing_of_stops() -> None:
    waiting = WaitingRecords()
    waiting.look(sender(1, 1.0, 0, 0, backlog=10), 0)
    waiting.look(sender(1, 2.0, 0, 1_000, stopped_s=0.5, backlog=10), 1_000)
    for look in range(1, 10):
        waiting.look(sender(1, 2.0 + look / 100, 0, 1_000, stopped_s=0.5, backlog=10), 1_000)
        waiting.look(sender(1, 2.0 + look / 100, 0, 1_000, stopped_s=0.5, backlog=10), 1_000)
        assert waiting.held_back(1) == 10
    waiting.look(sender(1, 2.11, 0, 1_000, stopped_s=0.5, backlog=10), 1_000)
    assert waiting.held_back(1) == 0, "it has not been stopped for a tenth of a second"


def test_what_a_receiver_has_missed_waits_at_its_sender() -> None:
    """In a job with epochs, while the receiver is built again."""
    flow = ps.Flow("missed", parallelism=2)
    flow.read(ps.sources.Memory(range(30)), name="numbers", parallelism=1).broadcast().write(ps.sinks.Null())
    job = Job(lambda takes: flow, 1, OutputCaches())
    (loop,) = job.loops
    source = loop.tasks[0]
    for channel in source.channels:
        channel.disconnect()
    source.step()
    ((chain, made, held, stopped),) = loop.load()[0]["sends"]
    assert (chain, made, held, stopped) == (1, 60, 60, 0), "each receiver's copy; it holds up nobody"
