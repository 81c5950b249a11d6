"""How many records wait for each operator: in a whole job in virtual time, and computed from the loads of tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import penstock as ps
from penstock.runtime.exchange.output_cache import OutputCaches
from penstock.runtime.worker.load import TaskLoad
from penstock.runtime.worker.waiting import WaitingRecords
from tests.runtime.timed_job import EACH_NS, OF_ONE, RATE, Job, S, burst_inside, slowly


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


def test_the_rest_of_a_bounded_source_waits_for_the_operator_that_is_slow() -> None:
    def make(takes: Callable[[int], None]) -> ps.Flow:
        flow = ps.Flow("bounded", parallelism=1)
        texts = flow.read(ps.sources.Memory([f"{i:0100}" for i in range(50_000)]), name="texts")
        texts.rebalance().map(slowly(takes), name="slow").write(ps.sinks.Null())
        return flow

    job = Job(make, 1)
    taken_a_second = S / EACH_NS
    for waiting in job.looks(2):
        left = 50_000 - job.now / S * taken_a_second
        assert waiting["texts"] < left
    assert waiting["slow"] == pytest.approx(left, rel=0.1), "the rest at the source waits for it too"


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
        while task.runnable() and not task.blocked and not (task in makers and task.input.queued == 0):
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
    return TaskLoad(number=number, chain=chain, at_ns=int(at_s * S), **values)


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


def test_what_waits_because_of_a_chain_further_down_is_held_up() -> None:
    """Be it stopped by that chain itself, or by one between the two. A short stop is not yet one."""
    waiting = WaitingRecords()
    stopped_s = 0.0
    for look in range(13):
        at_s = 1 + look / 4
        stopped_s += 0.05 if look == 1 else 0.25 if look > 6 else 0.0
        waiting.look(sender(1, at_s, 0, 0, stopped_s=stopped_s, backlog=1_000, under_way=50), 0)
        waiting.look(load(2, 1, at_s, queued=200, sends=[(2, 0, 0, int(stopped_s * S))]), 0)
        waiting.look(load(3, 2, at_s, queued=10), 0)
        if look == 1:
            assert 0 < waiting.held_up(0, {1}) < 700
        elif look == 6:
            assert waiting.held_up(0, {1}) < 50, "the stop is long ago"
    assert waiting.held_up(0, {1}) == 1_000, "what is in Spark waits for nobody else"
    assert waiting.held_up(0, {2}) == 1_000
    assert waiting.held_up(0, {7}) == 0, "it could not go to Spark"
    assert waiting.held_up(1, {2}) == 200 + waiting.held_back(1)
    assert waiting.held_up(2, {1, 2}) == 0


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
    for log in source.logs:
        for channel in log.channels:
            log.disconnect(channel)
    source.step()
    ((chain, made, held, stopped),) = loop.load()[0]["sends"]
    assert (chain, made, held, stopped) == (1, 60, 60, 0), "each receiver's copy; it holds up nobody"
