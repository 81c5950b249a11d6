"""The scheduler of the paradigms, look by look: workers' loads are made up, its words are read, Spark is a fake."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

import penstock as ps
from penstock.actors import dual as dual_module
from penstock.actors.dual import Dual, DualOptions
from penstock.bridge.burst import BurstOptions, Mode, Observation
from penstock.bridge.cost import BatchCost, MicroBatch
from penstock.bridge.session import SparkOptions
from penstock.runtime.operators.micro_batch import ROWS_MAX, DiversionStats, DivertRequest, MicroBatchResult
from penstock.runtime.program.flow import Flow
from penstock.runtime.program.plan import replanned, rescaled
from penstock.runtime.worker.diversion import Diversion, _UnderWay
from penstock.runtime.worker.run_loop import _task_load
from tests.bridge.flows import fork

LOOK_S = 0.25

SESSION = {
    "session": "a session",
    "costs": {0: BatchCost(0.125, 64_000.0)},
    "bridge": 4711,
    "log": "/logs/penstock-spark-4711.log",
    "executors": {"1": 4712},
    "node": "here",
}


class Died(Exception):
    """What a call on a dead actor raises."""


class FakeBridge:
    """An actor whose calls are made when their results are asked for."""

    def __init__(self, spark: FakeSpark, forms: list[Any]) -> None:
        self.forms = forms
        self.is_alive = True
        self.calls: list[str] = []
        self._spark = spark

    def __getattr__(self, method: str) -> Any:
        def call() -> Any:
            self.calls.append(method)
            if not self.is_alive:
                raise Died("the actor is dead")
            return self._spark.answer(method)

        return SimpleNamespace(remote=lambda: call)


class FakeSpark:
    """`spark_bridge` and `ray`, as far as the scheduler uses them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bridges: list[FakeBridge] = []
        self.names: list[str] = []
        self.killed: list[FakeBridge] = []
        self.why_not: str | None = None  # Spark is not to be had
        self.takes_long = False  # to start
        self.is_up = threading.Event()
        self.stop_hangs = False
        monkeypatch.setattr(dual_module, "spark_bridge", SimpleNamespace(start=self._start))
        monkeypatch.setattr(dual_module, "ray", SimpleNamespace(get=self._get, kill=self._kill))

    def _start(self, name: str, options: SparkOptions, forms: list[Any]) -> FakeBridge:
        self.names.append(name)
        self.bridges.append(FakeBridge(self, forms))
        return self.bridges[-1]

    def _get(self, call: Callable[[], Any], timeout: float | None = None) -> Any:
        return call()

    def _kill(self, bridge: FakeBridge) -> None:
        bridge.is_alive = False
        self.killed.append(bridge)

    def answer(self, method: str) -> Any:
        if method == "prepare":
            assert self.is_up.wait(60)
            if self.why_not is not None:
                raise RuntimeError(self.why_not)
            return SESSION
        if method == "stop" and self.stop_hangs:
            raise TimeoutError("it hangs")
        return []


def story(id_: int, *recent: tuple[int, int, float], under_way: int = 0) -> dict[str, Any]:
    """What a diverted task tells: `recent` are (number, records, seconds)."""
    return DiversionStats(id_, under_way=under_way, recent=deque(recent)).plain()


class Cluster:
    """A job on two workers, and its scheduler."""

    def __init__(self, spark: FakeSpark, flow: Flow, burst: BurstOptions) -> None:
        self.spark = spark
        self.now = 100.0
        self.plan = flow.plan(1)
        self.silent: set[int] = set()  # workers
        self.told: list[tuple[int, str, tuple[Any, ...]]] = []  # at the last look
        self.seen: dict[int, list[Observation]] = {}  # chain -> what its detector was given
        self.make_tasks()
        self.dual = Dual(
            lambda: self.plan,
            DualOptions(burst, SparkOptions()),
            self.plan.name,
            self.ask,
            lambda *word: self.told.append(word),
            clock=lambda: self.now,
        )
        for range_ in self.dual._ranges:
            self._watch(range_.form.chain, range_.detector)

    def make_tasks(self) -> None:
        """The workers' tasks, as of the plan."""
        self.tasks: dict[int, dict[str, Any]] = {}
        self.chains: dict[int, list[dict[str, Any]]] = {}
        self.workers: dict[int, int] = {}
        for task in self.plan.tasks:
            load: dict[str, Any] = {
                "number": task.number,
                "chain": task.chain,
                "finished": False,
                "queued": 0,
                "diverted": None,
                "diversion_failed": None,
                "answered": 0,
                "behind": 0,
                "under_way": 0,
                "busy_ns": 0,
                "operators": [(operator.name, 0, 0) for operator in self.plan.chains[task.chain].operators],
            }
            self.tasks[task.number] = load
            self.chains.setdefault(task.chain, []).append(load)
            self.workers[task.number] = task.index % 2

    def _watch(self, chain: int, detector: Any) -> None:
        observe, seen = detector.observe, self.seen.setdefault(chain, [])

        def watched(observation: Observation) -> Any:
            seen.append(observation)
            return observe(observation)

        detector.observe = watched

    def ask(self) -> list[tuple[int, list[dict[str, Any]]]]:
        of_worker = {
            worker: [task for number, task in self.tasks.items() if self.workers[number] == worker]
            for worker in set(self.workers.values()) - self.silent
        }
        return sorted(of_worker.items())

    def look(self, times: int = 1, *, every: float = LOOK_S) -> None:
        """Some looks; a start of Spark that the last one has begun has ended, unless it is held up."""
        for _ in range(times):
            self.now += every
            self.told.clear()
            self.spark.is_up.clear()
            self.dual._look()
            starting = self.dual._starting
            if starting is not None and not self.spark.takes_long:
                self.spark.is_up.set()
                starting.join()

    def status(self, chain: int = 0) -> dict[str, Any]:
        (found,) = (
            status
            for range_, status in zip(self.dual._ranges, self.dual.status()["ranges"], strict=True)
            if range_.form.chain == chain
        )
        assert isinstance(found, dict)
        return found

    def state(self, chain: int = 0) -> str:
        return str(self.status(chain)["state"])

    def diverts(self) -> dict[tuple[int, int], DivertRequest]:
        """(worker, chain) -> what it was told at the last look; nothing twice."""
        words = [(worker, arguments[0]) for worker, method, arguments in self.told if method == "divert"]
        found = {(worker, divert.chain): divert for worker, divert in words}
        assert len(found) == len(words)
        return found

    def undiverts(self) -> set[tuple[int, int]]:
        return {(worker, arguments[0]) for worker, method, arguments in self.told if method == "undivert"}

    def divert(self, chain: int = 0, *, under_way: int = 0) -> None:
        """The tasks of a chain do what they were told."""
        for task in self.chains[chain]:
            task["diverted"] = story(1, under_way=under_way)

    def undivert(self, chain: int = 0) -> None:
        for task in self.chains[chain]:
            task["diverted"] = None

    def into_operation(self, *chains: int) -> None:
        """In spark-only."""
        for _ in range(8):
            self.look()
            for _, chain in self.diverts():
                self.divert(chain)
        assert {self.state(chain) for chain in chains or (0,)} == {"OPERATION"}


Start = Callable[..., Cluster]


@pytest.fixture
def spark(monkeypatch: pytest.MonkeyPatch) -> FakeSpark:
    return FakeSpark(monkeypatch)


@pytest.fixture
def start(spark: FakeSpark, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a job's scheduler, whose looks are made by hand."""
    monkeypatch.setattr(dual_module, "_LOOK_S", 1e6)
    started = []

    def start(flow: Flow | None = None, mode: Mode = "spark-only", **burst: Any) -> Cluster:
        started.append(Cluster(spark, words() if flow is None else flow, BurstOptions(mode=mode, **burst)))
        return started[-1]

    yield start
    spark.is_up.set()
    for cluster in started:
        cluster.dual.close()


def words(parallelism: int = 2) -> Flow:
    """One range: chain 0, two tasks."""
    flow = Flow("words", parallelism=parallelism)
    lines = flow.read(ps.sources.Memory(["x"]), name="lines").flat_map(str.split, name="words")
    lines.key_by(str.lower).count(name="count").write(ps.sinks.Null(), name="out")
    return flow


def row() -> Flow:
    """Three ranges, one behind the other: chains 0, 1 and 2."""
    flow = Flow("row", parallelism=2)
    lines = flow.read(ps.sources.Memory([]), name="read").map(str.strip, name="strip")
    upper = lines.rebalance().map(str.upper, name="upper")
    upper.rebalance().map(str.lower, name="lower").write(ps.sinks.Null(), name="out")
    return flow


def two() -> Flow:
    """Two ranges that have nothing to do with each other: two sources."""
    flow = Flow("two", parallelism=2)
    flow.read(ps.sources.Memory([]), name="one").map(str.strip, name="strip").write(ps.sinks.Null(), name="a")
    flow.read(ps.sources.Memory([]), name="other").map(str.upper, name="upper").write(ps.sinks.Null(), name="b")
    return flow


def index(cluster: Cluster, operator: str) -> int:
    """The chain that begins with an operator."""
    return next(chain.index for chain in cluster.plan.chains if chain.operators[0].name == operator)


# --- status --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "off", "spark-only", "toggle"])
@pytest.mark.parametrize("flow", [words, fork, row, two])
def test_there_is_a_status_before_anything_has_happened(start: Start, flow: Callable[[], Flow], mode: Mode) -> None:
    cluster = start(flow(), mode)
    status = json.loads(json.dumps(cluster.dual.status()))
    assert (status["mode"], status["spark"], status["processes"]) == (mode, None, {})
    covered = [one["chain"] for one in status["ranges"]]
    assert len(covered) + len(status["stays"]) == len(cluster.plan.chains)
    assert all(status["stays"].values()), "each has a reason"
    for one in status["ranges"]:
        names = [operator.name for operator in cluster.plan.chains[one["chain"]].operators]
        assert set(one["operators"]) <= set(names)
        assert (one["state"], one["paradigm"]) == ("RECORD", "record")
        assert (one["reason"], one["figures"], one["extent"], one["failed"]) == ("", {}, "", None)
        assert one["records_in_spark"] == 0


def test_status_says_what_spark_is(start: Start) -> None:
    cluster = start()
    cluster.look(2)
    status = cluster.dual.status()
    assert status["spark"] == "a session"
    assert status["processes"] == {"bridge": 4711, "executors": {"1": 4712}}
    assert status["ranges"][0]["operators"] == ["words"]
    assert status["ranges"][0]["partials"]


# --- there ---------------------------------------------------------------------------------------------------------


def test_every_worker_is_told_until_all_tasks_are_diverted(start: Start, spark: FakeSpark) -> None:
    cluster = start()
    cluster.look()
    assert cluster.state() == "PREPARING"
    assert cluster.told == []
    assert [form.chain for form in spark.bridges[0].forms] == [0]
    cluster.look()
    assert cluster.state() == "SWITCHING"
    assert cluster.status()["paradigm"] == "record"
    diverts = cluster.diverts()
    assert set(diverts) == {(0, 0), (1, 0)}
    (form,) = spark.bridges[0].forms
    assert {divert.position for divert in diverts.values()} == {form.position}
    assert {arguments[1:] for _, _, arguments in cluster.told} == {(spark.names[0], "here")}

    one, other = cluster.chains[0]
    one["diverted"] = story(1)
    cluster.look()
    assert cluster.state() == "SWITCHING"
    other["diverted"] = story(2)
    cluster.look()
    assert cluster.state() == "OPERATION"
    assert cluster.status()["paradigm"] == "operation"
    assert len(spark.bridges) == 1


def test_what_should_be_is_told_again_at_each_look(start: Start) -> None:
    """A worker that missed the word, or was started again, needs none of its own."""
    cluster = start()
    cluster.look(2)
    for _ in range(3):
        cluster.look()
        assert set(cluster.diverts()) == {(0, 0), (1, 0)}
    cluster.divert()
    cluster.look()
    assert cluster.state() == "OPERATION"
    cluster.chains[0][1]["diverted"] = None
    cluster.look()
    assert cluster.state() == "OPERATION"
    assert set(cluster.diverts()) == {(0, 0), (1, 0)}


def test_a_worker_that_does_not_answer_is_told_when_it_does(start: Start) -> None:
    cluster = start()
    cluster.silent = {1}
    cluster.look(2)
    assert set(cluster.diverts()) == {(0, 0)}
    cluster.silent = set()
    cluster.look()
    assert set(cluster.diverts()) == {(0, 0), (1, 0)}


def test_tasks_that_have_finished_are_not_waited_for(start: Start) -> None:
    cluster = start()
    one, other = cluster.chains[0]
    other["finished"] = True
    cluster.look(2)
    one["diverted"] = story(1)
    cluster.look()
    assert cluster.state() == "OPERATION"


def test_when_all_have_finished_nothing_is_switched(start: Start) -> None:
    cluster = start()
    for task in cluster.chains[0]:
        task["finished"] = True
    cluster.look(4)
    assert cluster.state() == "SWITCHING"


@pytest.mark.parametrize(
    ("parallelism", "rows"),
    [(1, 300_000), (2, 150_000), (3, 100_000), (6, 50_000), (8, 50_000)],
)
def test_all_micro_batches_under_way_at_a_time_fit_but_none_is_small(start: Start, parallelism: int, rows: int) -> None:
    cluster = start(words(parallelism))
    cluster.look(2)
    assert {divert.rows_max for divert in cluster.diverts().values()} == {rows}


def test_micro_batches_grow_with_each_task_that_finishes_up_to_what_a_task_may_hold(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start(words(4))
    cluster.look(2)
    assert {divert.rows_max for divert in cluster.diverts().values()} == {75_000}
    for task in cluster.chains[0][:2]:
        task["finished"] = True
    cluster.look()
    assert {divert.rows_max for divert in cluster.diverts().values()} == {150_000}
    monkeypatch.setattr(dual_module, "_ROWS_UNDER_WAY", 100 * ROWS_MAX)
    cluster.look()
    assert {divert.rows_max for divert in cluster.diverts().values()} == {ROWS_MAX}


def test_a_range_takes_the_chains_behind_it_along(start: Start) -> None:
    cluster = start(fork())
    few, many = index(cluster, "few"), index(cluster, "many")
    cluster.look(2)
    assert set(cluster.diverts()) == {(worker, chain) for worker in (0, 1) for chain in (0, few, many)}
    # Six tasks share what may be under way.
    assert {divert.rows_max for divert in cluster.diverts().values()} == {50_000}
    cluster.divert(0)
    cluster.divert(few)
    cluster.look()
    assert cluster.state() == "SWITCHING", "a chain's tasks are missing"
    cluster.divert(many)
    cluster.look()
    assert cluster.state() == "OPERATION"


def test_what_spark_costs_was_tried_for_all_ranges(start: Start) -> None:
    cluster = start(two())
    by_guess = cluster.dual._ranges[1].detector._batches.cost
    cluster.look(2)
    assert cluster.dual._ranges[0].detector._batches.cost == BatchCost(0.125, 64_000.0)
    assert cluster.dual._ranges[1].detector._batches.cost == by_guess, "it could not be tried on this one"


# --- and back ------------------------------------------------------------------------------------------------------


def test_a_range_comes_back_when_nobody_is_diverted_any_more(start: Start) -> None:
    cluster = start(mode="toggle", toggle_s=2.0)
    cluster.look(2)
    assert cluster.state() == "RECORD"
    assert cluster.told == [], "it is prepared, and has to wait for its turn"
    cluster.look(every=2.0)
    assert cluster.state() == "SWITCHING", "it was prepared ahead"
    cluster.divert()
    cluster.look()
    assert cluster.state() == "OPERATION"
    cluster.look(every=2.0)
    assert cluster.state() == "RETURNING"
    assert cluster.status()["paradigm"] == "operation"
    assert cluster.undiverts() == {(0, 0), (1, 0)}
    cluster.chains[0][0]["diverted"] = None
    cluster.look()
    assert cluster.state() == "RETURNING"
    assert cluster.undiverts() == {(0, 0), (1, 0)}, "one is missing yet"
    assert cluster.dual._ranges[0].parts
    cluster.undivert()
    cluster.look()
    assert cluster.state() == "RECORD"
    assert cluster.dual._ranges[0].parts == {}
    cluster.look()
    assert cluster.told == []


def test_who_is_diverted_while_he_should_not_be_is_told(start: Start) -> None:
    """As after a JobMaster's death: the next one finds tasks that its predecessor has sent to Spark."""
    cluster = start(mode="toggle")
    cluster.chains[0][1]["diverted"] = story(1)
    cluster.look()
    assert cluster.state() == "RECORD"
    assert cluster.undiverts() == {(0, 0), (1, 0)}
    cluster.undivert()
    cluster.look()
    assert cluster.told == []


# --- what the detector is told -------------------------------------------------------------------------------------


def did(task: dict[str, Any], taken: int, *, busy_s: float = 0.0, **load: int) -> None:
    """A task has taken so many more records, and is in this state now."""
    name, before, given = task["operators"][0]
    task["operators"] = [(name, before + taken, given + taken), *task["operators"][1:]]
    task["busy_ns"] += int(busy_s * 1e9)
    task.update(load)


def test_records_wait_in_the_inbox_behind_the_source_and_in_spark(start: Start) -> None:
    cluster = start(mode="auto")
    one, other = cluster.chains[0]
    did(one, 1_000, queued=10)
    did(other, 0, behind=200)
    cluster.look()
    (first,) = cluster.seen[0]
    assert (first.queue, first.arrivals, first.processed) == (210, 0, 0), "counting begins here"
    did(one, 100, busy_s=0.2, queued=5, under_way=40)
    did(other, 50, busy_s=0.1, behind=180)
    cluster.look()
    second = cluster.seen[0][-1]
    assert second.queue == 225
    assert second.arrivals == 150 + 15
    assert second.processed == 150
    assert second.busy_s == pytest.approx(0.15), "on average"
    assert second.time_s - first.time_s == LOOK_S


def test_what_spark_has_answered_is_not_the_record_tasks_merit(start: Start) -> None:
    cluster = start()
    one, other = cluster.chains[0]
    cluster.look()
    did(one, 300, answered=300)
    did(other, 20)
    one["diverted"] = story(7, (1, 100, 3.0), (2, 200, 1.0))
    cluster.look()
    seen = cluster.seen[0][-1]
    assert seen.processed == 20
    assert seen.arrivals == 320
    assert cluster.status()["records_in_spark"] == 300
    assert seen.batches == (MicroBatch(200, 1.0),), "the first of a diversion loads and compiles"
    did(one, 50, answered=350)
    one["diverted"] = story(7, (1, 100, 3.0), (2, 200, 1.0), (3, 50, 0.5))
    cluster.look()
    assert cluster.seen[0][-1].batches == (MicroBatch(50, 0.5),), "each once"
    assert cluster.status()["records_in_spark"] == 350


def test_another_diversion_counts_from_one_again(start: Start) -> None:
    cluster = start()
    one, _ = cluster.chains[0]
    one["diverted"] = story(7, *((n, 10, 1.0) for n in range(1, 6)))
    cluster.look()
    assert len(cluster.seen[0][-1].batches) == 4
    one["diverted"] = story(8)
    cluster.look()
    one["diverted"] = story(8, (1, 1_000, 9.0), (2, 2_000, 1.0))
    cluster.look()
    assert cluster.seen[0][-1].batches == (MicroBatch(2_000, 1.0),)


def test_the_last_answers_count_that_came_before_a_diversion_ended(start: Start) -> None:
    cluster = start()
    one, _ = cluster.chains[0]
    cluster.look()
    one["diverted"] = story(7)
    cluster.look()
    did(one, 500, answered=500)
    one["diverted"], one["finished"] = None, True
    cluster.look()
    assert cluster.status()["records_in_spark"] == 500
    assert cluster.seen[0][-1].processed == 0


def test_answers_to_a_task_that_was_started_again_count_from_its_start(start: Start) -> None:
    cluster = start()
    one, _ = cluster.chains[0]
    did(one, 500, answered=500)
    cluster.look()
    did(one, -100, answered=0)
    cluster.look()
    did(one, 30, answered=30)
    cluster.look()
    assert cluster.status()["records_in_spark"] == 530


def test_a_task_counts_what_was_answered_through_all_its_diversions() -> None:
    bridge: Any = None
    task: Any = SimpleNamespace(
        clock=lambda: 1, answered=100, take_up_diverted=lambda *_: None, go_on_from=lambda *_: iter(())
    )
    diversion = Diversion(task, DivertRequest(0, 1, 0.1, True), bridge, lambda: None)
    answer: Future[MicroBatchResult] = Future()
    answer.set_result(MicroBatchResult([]))
    diversion._outputs(_UnderWay([], 5, 0, answer, 0))
    assert task.answered == 105


def test_micro_batches_beside_each_other_share_spark(start: Start) -> None:
    cluster = start()
    one, other = cluster.chains[0]
    cluster.look()
    one["diverted"] = story(7, (1, 1, 1.0), (2, 600, 3.0), under_way=2)
    other["diverted"] = story(8, (1, 1, 1.0), (2, 900, 1.5), under_way=1)
    cluster.look()
    assert cluster.seen[0][-1].batches == (MicroBatch(600, 1.0), MicroBatch(900, 0.5))


def test_counters_that_go_back_are_no_records(start: Start) -> None:
    """A task that was started again begins with what was saved."""
    cluster = start(mode="auto")
    one, other = cluster.chains[0]
    did(one, 1_000, busy_s=10.0)
    did(other, 1_000, busy_s=10.0)
    cluster.look()
    did(one, -600, busy_s=-10.0, behind=600)
    did(other, 30, busy_s=0.1)
    cluster.look()
    seen = cluster.seen[0][-1]
    assert seen.processed == 30
    assert seen.busy_s == pytest.approx(0.05)
    assert seen.arrivals == 630, "what has to be read again waits again"
    did(one, 100, busy_s=0.2, behind=500)
    cluster.look()
    seen = cluster.seen[0][-1]
    assert (seen.arrivals, seen.processed) == (0, 100)
    assert seen.busy_s == pytest.approx(0.1)


def test_a_worker_that_misses_a_look_is_no_burst(start: Start) -> None:
    """All that it has done since the job began would count as done within one look."""
    cluster = start(mode="auto")
    one, other = cluster.chains[0]
    did(one, 1_000_000, busy_s=100.0)
    did(other, 1_000_000, busy_s=100.0)
    cluster.look()
    cluster.silent = {1}
    did(one, 100, busy_s=0.2)
    cluster.look()
    did(one, 100, busy_s=0.2)
    did(other, 200, busy_s=0.4)
    assert cluster.seen[0][-1].processed == 100
    cluster.silent = set()
    cluster.look()
    seen = cluster.seen[0][-1]
    assert (seen.arrivals, seen.processed) == (300, 300)
    assert seen.busy_s == pytest.approx(0.3)


# --- micro-batches that fail ---------------------------------------------------------------------------------------


def test_a_failed_micro_batch_brings_its_range_back_and_counts_once(start: Start, spark: FakeSpark) -> None:
    cluster = start(two())
    cluster.into_operation(0, index(cluster, "other"))
    detector = cluster.dual._ranges[0].detector
    task = cluster.chains[0][0]
    task["diverted"], task["diversion_failed"] = None, (1, "Lost: gone")
    cluster.look()
    assert cluster.state() == "RETURNING"
    assert cluster.status()["failed"] == "Lost: gone"
    assert cluster.undiverts() == {(0, 0), (1, 0)}
    other = index(cluster, "other")
    assert cluster.state(other) == "OPERATION", "the bridge lives"
    assert {chain for _, chain in cluster.diverts()} == {other}
    assert spark.killed == []
    cluster.undivert()
    cluster.look()
    assert cluster.state() == "RECORD"
    cluster.look(4)
    assert detector._failures.count == 1, "the task still tells of it"
    assert spark.bridges[0].calls.count("executors") == 1
    assert cluster.status(other)["failed"] is None


def test_tasks_that_notice_the_same_loss_later_do_not_make_it_another(start: Start) -> None:
    """Each would double the time until Spark is tried again."""
    cluster = start(words(4))
    cluster.into_operation()
    for n, task in enumerate(cluster.chains[0]):
        task["diversion_failed"] = (n, "Lost: gone")
        cluster.look()
    assert cluster.state() == "RETURNING"
    assert cluster.dual._ranges[0].detector._failures.count == 1
    cluster.undivert()
    cluster.look()
    assert cluster.state() == "RECORD"


def test_after_a_failure_it_goes_there_again_by_the_same_bridge(start: Start, spark: FakeSpark) -> None:
    cluster = start()
    cluster.into_operation()
    cluster.undivert()
    cluster.chains[0][0]["diversion_failed"] = (1, "Lost: gone")
    cluster.look()
    assert cluster.state() == "RECORD", "nobody is diverted any more"
    cluster.look(every=11.0)
    assert cluster.state() == "SWITCHING"
    cluster.divert()
    cluster.look()
    assert cluster.state() == "OPERATION"
    assert len(spark.bridges) == 1


def test_a_dead_bridge_is_lost_for_all_ranges(start: Start, spark: FakeSpark) -> None:
    cluster = start(two())
    other = index(cluster, "other")
    cluster.into_operation(0, other)
    spark.bridges[0].is_alive = False
    cluster.chains[0][0]["diversion_failed"] = (1, "Died: the actor is dead")
    cluster.look()
    assert (cluster.state(0), cluster.state(other)) == ("RETURNING", "RETURNING")
    assert spark.killed == spark.bridges
    assert cluster.undiverts() == {(worker, chain) for worker in (0, 1) for chain in (0, other)}
    assert cluster.dual.status()["spark"] == (
        "lost: Died: the actor is dead; what Spark wrote is in /logs/penstock-spark-4711.log"
    )
    assert cluster.dual.status()["processes"] == {}
    cluster.undivert(0)
    cluster.undivert(other)
    cluster.look(2)
    assert (cluster.state(0), cluster.state(other)) == ("RECORD", "RECORD")

    cluster.look(every=30.0)
    cluster.look()
    assert len(spark.bridges) == 2
    assert (cluster.state(0), cluster.state(other)) == ("SWITCHING", "SWITCHING")
    assert {arguments[1] for _, _, arguments in cluster.told} == {spark.names[1]}
    assert len(set(spark.names)) == 2, "a name of a dead actor is not used again"
    assert cluster.dual.status()["spark"] == "a session"


def test_a_bridge_that_died_before_anything_went_there_is_found_dead(start: Start, spark: FakeSpark) -> None:
    """Workers cannot even find it then: no task is diverted, and none tells of a micro-batch that failed."""
    cluster = start()
    cluster.look(2)
    spark.bridges[0].is_alive = False
    cluster.look(2)
    assert cluster.state() == "SWITCHING"
    cluster.look(every=11.0)
    assert cluster.state() in ("RETURNING", "RECORD")
    assert spark.killed == spark.bridges
    cluster.look()
    assert cluster.state() == "RECORD"
    cluster.look(every=11.0)
    cluster.look()
    assert len(spark.bridges) == 2
    cluster.divert()
    cluster.look()
    assert cluster.state() == "OPERATION"


def test_a_switch_that_waits_for_its_barrier_is_not_given_up(start: Start, spark: FakeSpark) -> None:
    cluster = start()
    cluster.look(2)
    cluster.look(20, every=10.0)
    assert cluster.state() == "SWITCHING"
    assert spark.killed == []
    assert set(cluster.diverts()) == {(0, 0), (1, 0)}


# --- no Spark ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flow", [words, two, fork])
def test_without_spark_the_job_goes_on_and_says_so_once(
    start: Start, spark: FakeSpark, flow: Callable[[], Flow], caplog: pytest.LogCaptureFixture
) -> None:
    spark.why_not = "there is no Java"
    cluster = start(flow())
    with caplog.at_level(logging.WARNING, logger=dual_module.__name__):
        cluster.look(50)
        cluster.look(50, every=30.0)
    assert cluster.dual.status()["spark"] == "not to be had: there is no Java"
    assert cluster.dual.status()["processes"] == {}
    assert cluster.state() in ("RECORD", "PREPARING")
    assert "there is no Java" in cluster.status()["reason"] or cluster.state() == "PREPARING"
    assert cluster.told == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "there is no Java" in caplog.text
    assert len(spark.bridges) > 1, "it is tried again"
    assert spark.killed == spark.bridges


def test_it_is_tried_again_less_and_less_often(start: Start, spark: FakeSpark) -> None:
    spark.why_not = "no"
    cluster = start()
    cluster.look(4 * 75)
    assert len(spark.bridges) == 4, "at 0, 10, 30 and 70 s"


def test_a_bridge_that_cannot_even_be_started_is_not_to_be_had(
    start: Start, spark: FakeSpark, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str, options: SparkOptions, forms: list[Any]) -> Any:
        raise RuntimeError("no resources")

    monkeypatch.setattr(dual_module, "spark_bridge", SimpleNamespace(start=fail))
    cluster = start()
    cluster.look(3)
    assert cluster.dual.status()["spark"] == "not to be had: no resources"
    assert spark.killed == []


def test_it_is_started_once_however_long_that_takes(start: Start, spark: FakeSpark) -> None:
    spark.takes_long = True
    cluster = start(two())
    cluster.look(10)
    assert len(spark.names) <= 1
    assert cluster.dual.status()["spark"] is None
    spark.takes_long = False
    cluster.look(3)
    assert len(spark.names) == 1
    assert cluster.state() == "SWITCHING"


# --- ranges that lead ----------------------------------------------------------------------------------------------


def test_a_range_that_is_led_waits_and_says_where_its_leader_is(start: Start) -> None:
    cluster = start(row())
    cluster.look(2)
    seen = len(cluster.seen[1])
    for chain in (0, 1, 2):
        cluster.divert(chain)
    cluster.look(2)
    leader = cluster.status(0)
    assert leader["state"] == "OPERATION"
    assert leader["operators"] == ["strip", "upper", "lower"]
    for chain in (1, 2):
        led = cluster.status(chain)
        assert [led[key] for key in ("state", "paradigm", "reason", "extent", "figures")] == [
            leader[key] for key in ("state", "paradigm", "reason", "extent", "figures")
        ]
        assert led["failed"] is None
    assert len(cluster.seen[1]) == seen, "its detector waits"
    assert cluster.undiverts() == set()


def test_a_range_that_was_led_does_not_go_by_itself_when_its_leader_comes_back(start: Start) -> None:
    cluster = start(row())
    cluster.look()
    for range_ in cluster.dual._ranges[1:]:  # it was about to go, too, when the one before it took its operators along
        assert range_.detector.state in ("PREPARING", "SWITCHING")
    cluster.into_operation(0, 1, 2)
    assert {range_.detector.state for range_ in cluster.dual._ranges[1:]} == {"RECORD"}


def test_a_failure_anywhere_in_a_range_brings_all_of_it_back(start: Start) -> None:
    cluster = start(row())
    cluster.into_operation(0, 1, 2)
    cluster.chains[2][1]["diversion_failed"] = (5, "Lost: gone")
    cluster.look()
    assert cluster.state(0) == "RETURNING"
    assert cluster.status(0)["failed"] == "Lost: gone"
    assert cluster.undiverts() == {(worker, chain) for worker in (0, 1) for chain in (0, 1, 2)}


def test_records_of_a_range_that_is_led_are_in_spark_too(start: Start) -> None:
    cluster = start(row(), mode="toggle", toggle_s=2.0)
    cluster.look(2)
    cluster.look(every=2.0)
    assert {chain for _, chain in cluster.diverts()} == {0, 1, 2}
    for chain in (0, 1, 2):
        cluster.divert(chain)
    seen = len(cluster.seen[1])
    task = cluster.chains[1][0]
    for n in range(1, 51):
        did(task, 100, answered=100 * n)
        task["diverted"] = story(1, *((i, 100, 0.1) for i in range(max(1, n - 31), n + 1)))
        cluster.look(every=0.01)
    assert cluster.status(1)["records_in_spark"] == 5_000
    assert len(cluster.seen[1]) == seen
    did(cluster.chains[1][1], 70, busy_s=0.1)
    cluster.look(every=2.0)
    assert cluster.state() == "RETURNING"
    for chain in (0, 1, 2):
        cluster.undivert(chain)
    cluster.look()
    assert cluster.state() == "RECORD"
    cluster.look()
    back = cluster.seen[1][seen]
    assert back.processed == 70, "Spark's records are not the record tasks' merit"
    assert back.arrivals == 5_070


def test_a_chain_has_one_leader(start: Start) -> None:
    """Else one takes its tasks back while the other sends them there, and neither ends."""
    cluster = start(row(), mode="toggle", toggle_s=2.0)
    first, second, third = cluster.dual._ranges
    first.detector.mode = "off"
    cluster.look(2)
    cluster.look(every=2.0)
    assert set(second.parts) == {1, 2}
    assert third.parts == {}
    first.detector.mode = "spark-only"
    cluster.look(3)
    assert set(first.parts) == {0}
    assert set(second.parts) == {1, 2}


# --- magnifications ------------------------------------------------------------------------------------------------


def ran(task: dict[str, Any], **counts: tuple[int, int]) -> None:
    """Operators of a task have taken and given so many more records."""
    task["operators"] = [
        (name, taken + counts.get(name, (0, 0))[0], given + counts.get(name, (0, 0))[1])
        for name, taken, given in task["operators"]
    ]


def test_counts_of_operators_are_those_of_the_last_looks(start: Start) -> None:
    cluster = start(mode="auto")
    one, other = cluster.chains[0]
    ran(one, words=(10, 40))
    ran(other, words=(20, 20))
    cluster.look()
    assert cluster.dual._counts["words"] == pytest.approx((30, 60))
    cluster.look()
    assert cluster.dual._counts["words"] == pytest.approx((0.975 * 30, 0.975 * 60))
    ran(one, words=(100, 0))
    cluster.look()
    assert cluster.dual._counts["words"] == pytest.approx((0.975**2 * 30 + 100, 0.975**2 * 60))


def test_counts_last_as_long_whatever_the_parallelism(start: Start) -> None:
    counts = []
    for parallelism in (1, 8):
        cluster = start(words(parallelism), mode="auto")
        ran(cluster.chains[0][0], words=(80, 160))
        cluster.look(21)
        counts.append(cluster.dual._counts["words"])
    assert counts[0] == pytest.approx(counts[1])
    assert counts[0] == pytest.approx((0.975**20 * 80, 0.975**20 * 160))


def test_counts_of_diverted_tasks_say_nothing(start: Start) -> None:
    """They know of their range's ends only, until the look at which they have been seen back."""
    cluster = start(mode="auto")
    one, other = cluster.chains[0]
    other["finished"] = True
    cluster.look()
    ran(one, words=(10, 40))
    cluster.look()
    before = cluster.dual._counts["words"]
    one["diverted"] = story(1)
    for _ in range(3):
        ran(one, lines=(1000, 1000), words=(0, 17))
        cluster.look()
    ran(one, lines=(1000, 1000), words=(0, 17))
    one["diverted"] = None
    cluster.look()
    taken, given = cluster.dual._counts["words"]
    assert given / taken == pytest.approx(before[1] / before[0])
    ran(one, words=(1000, 0))
    cluster.look()
    assert cluster.dual._counts["words"][0] > 1000


def test_counts_that_go_back_say_nothing(start: Start) -> None:
    cluster = start(mode="auto")
    one, _ = cluster.chains[0]
    ran(one, words=(100, 400))
    cluster.look()
    ran(one, words=(-50, -200))
    cluster.look()
    taken, given = cluster.dual._counts["words"]
    assert 90 < taken <= 100
    assert given == pytest.approx(4 * taken)
    ran(one, words=(10, 0))
    cluster.look()
    assert cluster.dual._counts["words"][0] == pytest.approx(0.975 * taken + 10)


def test_a_range_ends_where_the_magnifications_say(start: Start) -> None:
    cluster = start(fork(), range_below=1.0)
    few, many = index(cluster, "few"), index(cluster, "many")
    ran(cluster.chains[0][0], read=(10, 10), parse=(10, 10))
    ran(cluster.chains[few][0], few=(10, 1))
    ran(cluster.chains[many][0], many=(10, 100))
    cluster.look(2)
    assert {chain: divert.position for (_, chain), divert in cluster.diverts().items()} == {0: 2, few: 1, many: 1}
    assert "'number' is handed 0.1 of what came" in cluster.status()["extent"]
    assert cluster.status()["operators"] == ["parse", "few", "many"]


# --- the end -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hangs", [False, True])
def test_the_bridge_ends_with_the_job(
    start: Start, spark: FakeSpark, hangs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = start()
    cluster.look(2)
    spark.stop_hangs = hangs
    cluster.dual.close()
    assert spark.bridges[0].calls[-1] == "stop"
    assert spark.killed == spark.bridges
    assert ("Spark did not end by itself: it hangs" in caplog.text) == hangs
    cluster.dual.close()
    assert spark.killed == spark.bridges, "once"


def test_a_start_that_ends_behind_the_job_kills_its_bridge(start: Start, spark: FakeSpark) -> None:
    spark.takes_long = True
    cluster = start()
    cluster.look()
    cluster.dual.close()
    assert spark.killed == []
    spark.is_up.set()
    starting = cluster.dual._starting
    assert starting is not None
    starting.join()
    assert spark.killed == spark.bridges
    assert len(spark.bridges) == 1
    assert cluster.dual.status()["spark"] is None


def test_it_ends_when_it_was_never_needed(start: Start, spark: FakeSpark) -> None:
    cluster = start(mode="off")
    cluster.look(20)
    cluster.dual.close()
    assert spark.names == []
    assert cluster.told == []


# --- loads, which are asked for while the tasks run ----------------------------------------------------------------


class Growing(_UnderWay):
    """A micro-batch during whose counting another one leaves."""

    diversion: Diversion

    @property
    def records(self) -> int:
        self.diversion._queue.append(_UnderWay([], 5, 0, Future(), 0))
        return 5

    @records.setter
    def records(self, records: int) -> None:
        pass


def test_records_under_way_can_be_counted_while_micro_batches_leave() -> None:
    answer: Future[MicroBatchResult] = Future()
    task: Any = SimpleNamespace(clock=lambda: 1)
    bridge: Any = None
    diversion = Diversion(task, DivertRequest(0, 1, 0.1, True), bridge, lambda: None)
    growing = Growing([], 5, 0, answer, 0)
    growing.diversion = diversion
    diversion._queue.append(growing)
    assert diversion.records == 5


def test_a_load_is_made_of_a_diversion_that_ends_meanwhile() -> None:
    ends = [SimpleNamespace(story=DiversionStats(3), records=7)]

    class Ending:
        task = SimpleNamespace(number=0, chain=0)
        finished = False
        queued = busy_ns = held = 0
        diversion_failed = None
        answered = 0
        stages: tuple[Any, ...] = ()

        @property
        def diversion(self) -> Any:
            return ends.pop() if ends else None

        def behind(self) -> int:
            return 0

    task: Any = Ending()
    load = _task_load(task)
    assert load["diverted"]["id"] == 3
    assert load["under_way"] == 7


# --- all together --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["spark-only", "toggle", "auto"])
def test_whatever_happens_to_workers_tasks_and_spark(start: Start, spark: FakeSpark, mode: Mode) -> None:
    """Words get lost, workers are silent or start again, micro-batches fail, bridges die. No look fails, no two ranges
    have the same chain, what is observed is never negative, and who is left alone gets to where he should be."""
    for seed in range(12):
        print(f"seed {seed}")
        rng = random.Random(seed)
        cluster = start(rng.choice([words, fork, row, two])(), mode, toggle_s=2.0, backoff_first_s=1.0)
        ids = iter(range(1, 10**9))

        def obey(share: float, cluster: Cluster = cluster, rng: random.Random = rng, ids: Iterator[int] = ids) -> None:
            for worker, method, arguments in cluster.told:
                chain = arguments[0].chain if method == "divert" else arguments[0]
                for task in cluster.chains[chain]:
                    if cluster.workers[task["number"]] != worker or task["finished"] or rng.random() > share:
                        continue
                    if method == "undivert":
                        task["diverted"] = None
                    elif task["diverted"] is None and cluster.spark.bridges[-1].is_alive:
                        task["diverted"] = story(next(ids))

        for _ in range(150):
            for task in cluster.tasks.values():
                did(task, rng.randrange(1000), busy_s=rng.random() / 4, queued=rng.randrange(10_000))
                if task["diverted"] is not None and rng.random() < 0.02:
                    task["diversion_failed"] = (task["diverted"]["id"], "Lost: gone")
                    task["diverted"] = None
                if rng.random() < 0.01:
                    did(task, -rng.randrange(task["operators"][0][1] + 1))
                    task["diverted"] = None
            cluster.silent = {1} if rng.random() < 0.1 else set()
            if rng.random() < 0.01 and spark.bridges:
                spark.bridges[-1].is_alive = False
            spark.why_not = "no" if rng.random() < 0.1 else None
            cluster.look(every=rng.choice([LOOK_S, LOOK_S, 2.0]))
            obey(rng.choice([0.0, 0.5, 1.0]))
            taken = [chain for range_ in cluster.dual._ranges for chain in range_.parts]
            assert len(taken) == len(set(taken)), seed
            json.dumps(cluster.dual.status())
        for seen in cluster.seen.values():
            assert all(min(one.queue, one.arrivals, one.processed, one.busy_s) >= 0 for one in seen), seed
        cluster.silent, spark.why_not = set(), None
        for range_ in cluster.dual._ranges:
            range_.detector.mode = "spark-only"
        for _ in range(60):
            for task in cluster.tasks.values():
                if task["diverted"] is not None and not spark.bridges[-1].is_alive:
                    task["diversion_failed"] = (task["diverted"]["id"], "Died: the actor is dead")
                    task["diverted"] = None
            cluster.look(every=5.0)
            obey(1.0)
        assert {one["state"] for one in cluster.dual.status()["ranges"]} == {"OPERATION"}, seed
        cluster.dual.close()


# --- another plan --------------------------------------------------------------------------------------------------


def test_after_a_rescale_of_what_was_fused_no_place_of_the_old_plan_is_told(start: Start, spark: FakeSpark) -> None:
    """One task of everything becomes a chain of the source's and one of the aggregate's."""
    flow = words(parallelism=1)
    cluster = start(flow)
    cluster.into_operation(0)
    assert {divert.position for divert in cluster.diverts().values()} == {3}, "behind the key function"
    fused, old = cluster.plan, cluster.chains
    cluster.plan = replanned(flow.graph, fused, "count", 2, chaining=True)
    cluster.look()  # the workers have the old plan still
    assert not cluster.diverts()
    cluster.make_tasks()
    assert cluster.chains != old
    for _ in range(8):
        cluster.look()
        for (_, chain), divert in cluster.diverts().items():
            assert divert.position <= len(cluster.plan.chains[chain].operators)
            assert divert.operators == tuple(one.name for one in cluster.plan.chains[chain].operators)
            assert divert.position in {form.position for form in spark.bridges[-1].forms if form.chain == chain}
            cluster.divert(chain)
    assert len(spark.bridges) == 2, "the first has compiled the old plan's range"
    assert not spark.bridges[0].is_alive
    assert cluster.state(0) == "OPERATION"
    assert cluster.status(0)["operators"] == ["words"]


def test_a_rescale_that_leaves_the_chains_as_they_are_changes_nothing(start: Start, spark: FakeSpark) -> None:
    cluster = start()
    cluster.into_operation(0)
    cluster.plan = rescaled(cluster.plan, "count", 3)
    cluster.look()
    assert cluster.state() == "OPERATION"
    assert len(spark.bridges) == 1


def test_spark_that_was_started_for_an_old_plan_is_not_used(start: Start, spark: FakeSpark) -> None:
    flow = words(parallelism=1)
    cluster = start(flow)
    spark.takes_long = True
    cluster.look()
    cluster.plan = replanned(flow.graph, cluster.plan, "count", 2, chaining=True)
    cluster.make_tasks()
    cluster.look()
    spark.takes_long = False
    cluster.look()
    for _ in range(8):
        cluster.look()
        for _, chain in cluster.diverts():
            cluster.divert(chain)
    assert [bridge.is_alive for bridge in spark.bridges] == [False, True]
    assert cluster.state(0) == "OPERATION"


class Meanwhile:
    """A lock after whose first release, by a thread other than the test's, something happens before that thread goes
    on."""

    def __init__(self, happens: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._test = threading.current_thread()
        self._happens: Callable[[], None] | None = happens

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if threading.current_thread() is not self._test and self._happens is not None:
            happens, self._happens = self._happens, None
            happens()


def test_a_plan_that_changes_as_spark_is_ready_has_spark_prepared_again(start: Start, spark: FakeSpark) -> None:
    flow = words(parallelism=1)
    cluster = start(flow)

    def change() -> None:
        cluster.plan = replanned(flow.graph, cluster.plan, "count", 2, chaining=True)
        cluster.make_tasks()
        cluster.dual._look()

    cluster.dual._lock = Meanwhile(change)  # type: ignore[assignment]
    for _ in range(10):
        cluster.look()
        for _, chain in cluster.diverts():
            cluster.divert(chain)
    assert [bridge.is_alive for bridge in spark.bridges] == [False, True]
    assert cluster.state(0) == "OPERATION"


def test_a_task_of_another_plan_does_not_take_a_word_for_its_own() -> None:
    divert = DivertRequest(1, 2, 0.1, True, operators=("a", "b"))
    assert divert.concerns(1, ["a", "b"])
    assert not divert.concerns(1, ["b"])
    assert not divert.concerns(0, ["a", "b"])
    assert DivertRequest(1, 2, 0.1, True).concerns(1, ["whatever"])
