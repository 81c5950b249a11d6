"""What carries out a JobHost's commands about Spark, with a worker and a Spark that are made up: what a worker is told,
what becomes of the process that holds the session, and what a user reads in the status. The decisions are tested
without threads, in tests/bridge/test_paradigm_scheduler.py; real workers and a real Spark are in
tests/e2e/test_dual.py."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from penstock.bridge.burst import BurstOptions
from penstock.bridge.commands import (
    DivertTasks,
    EndSpark,
    GreetBridge,
    PrepareSpark,
    SparkCommand,
    TakeSample,
    UndivertTasks,
    WorkerCommand,
)
from penstock.bridge.forms import RangeForm
from penstock.bridge.paradigm_scheduler import DualOptions, ParadigmScheduler
from penstock.bridge.session import SparkOptions
from penstock.bridge.spark_life import RangeTrial, SparkFacts
from penstock.host.carry.spark_runner import SparkRunner
from penstock.host.decide.commands import Call, HostCommand, StartProcess
from penstock.host.decide.job_host import HostOptions, JobHost
from penstock.host.decide.job_state import JobState
from penstock.local.placing import LocalPlacing
from penstock.runtime.epochs.coordinator import EpochOptions
from penstock.runtime.errors import PenstockError
from penstock.runtime.records.codec import encode
from penstock.runtime.status import DualStatus
from penstock.runtime.worker.load import TaskLoad, divert_load
from penstock.runtime.worker.sample import RecordSample, SampleRequest
from tests.bridge.scheduled_job import FACTS, TRIAL, ScheduledJob, did, reported
from tests.bridge.test_paradigm_scheduler import words
from tests.e2e.processes import wait_until


class MadeUpBridge:
    """A process that holds a session; the test answers its calls."""

    def __init__(self, name: str, forms: list[RangeForm]) -> None:
        self.name = name
        self.forms = forms
        self.did: list[str] = []
        self.prepared: Future[SparkFacts] = Future()
        self.checked: Future[Any] = Future()
        self.stopped: Future[Any] = Future()
        self.samples: list[tuple[int, RecordSample]] = []  # (chain, sample)
        self.tried: Future[RangeTrial] = Future()

    def prepare(self) -> Future[SparkFacts]:
        return self.prepared

    def try_range(self, chain: int, sample: RecordSample) -> Future[RangeTrial]:
        self.samples.append((chain, sample))
        return self.tried

    def check(self) -> Future[Any]:
        self.did.append("check")
        return self.checked

    def stop(self) -> Future[Any]:
        self.did.append("stop")
        return self.stopped

    def kill(self) -> None:
        self.did.append("kill")


class Job:
    """A JobHost with a worker that does what it is told, and the runner of its Spark. `turn` carries out what waits."""

    def __init__(self, burst: BurstOptions, cannot_start: Exception | None = None) -> None:
        self.bridges: list[MadeUpBridge] = []
        self.cannot_start = cannot_start
        self.cannot_tell: Exception | None = None
        self.refusal: str | None = None
        self.told: list[DivertTasks | UndivertTasks] = []
        self.greeted: list[tuple[int, str, str]] = []  # (worker, bridge, node)
        self.questions: list[SampleRequest] = []
        self.workers = ScheduledJob(words(parallelism=1), burst)  # only its tasks are used
        self.asked = 0
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        dual = DualOptions(burst, SparkOptions())
        self.runner = SparkRunner("words", dual.spark, self.start, self.ask, self.events.put)
        self.host = JobHost(
            self.workers.plan,
            HostOptions(1, EpochOptions(interval_s=None), has_store=False),
            LocalPlacing(1, in_turn=True),
            schedule=lambda plan: ParadigmScheduler(plan, dual, 60.0),
        )
        self.carry_out(self.host.start(0.0))
        self.until(lambda: self.host.life.state == JobState.RUNNING, "the job runs")
        self.runner.look()

    def ask(self) -> Mapping[int, Sequence[TaskLoad]]:
        self.asked += 1
        if self.cannot_tell is not None:
            raise self.cannot_tell
        return {0: [reported(task) for task in self.workers.tasks.values()]}

    def carry_out(self, commands: list[HostCommand]) -> None:
        for command in commands:
            if isinstance(command, StartProcess):
                info = {"index": 0, "machine": "one", "node_id": "one", "name": "one", "host": "", "address": "a ring"}
                ready = partial(self.host.process_ready, 0, command.incarnation, {**info, "pid": 4710})
                self.events.put(lambda host, ready=ready: ready(time.monotonic()))
            elif isinstance(command, Call):
                self.call(command)
            elif isinstance(command, SparkCommand):
                self.runner.carry_out(command)

    def call(self, call: Call) -> None:
        answer: Any = None
        command = call.command
        if isinstance(command, GreetBridge):
            self.greeted.append((call.worker, command.bridge, command.node))
        elif isinstance(command, WorkerCommand):
            if self.refusal is not None:
                refusal = PenstockError(self.refusal)
                self.answer(lambda now: self.host.refused(call.worker, call.incarnation, call.number, refusal, now))
                return
            if isinstance(command, TakeSample):
                self.questions.append(command.request)
                answer = RecordSample(1, (encode(["a b"]),)) if len(self.questions) > 1 else None
            else:
                self.obey(command)
        self.answer(lambda now: self.host.answered(call.worker, call.incarnation, call.number, answer, now))

    def answer(self, event: Callable[[float], list[HostCommand]]) -> None:
        self.events.put(lambda host: event(time.monotonic()))

    def obey(self, command: DivertTasks | UndivertTasks) -> None:
        self.told.append(command)
        if isinstance(command, DivertTasks):
            for task in self.workers.chains[command.divert.chain]:
                task["divert"] = divert_load(command.divert)
        else:
            for task in self.workers.chains[command.chain]:
                task["divert"] = task["diverted"] = None
        self.workers.barrier()

    def start(self, name: str, options: SparkOptions, forms: list[RangeForm]) -> MadeUpBridge:
        if self.cannot_start is not None:
            raise self.cannot_start
        self.bridges.append(MadeUpBridge(name, forms))
        return self.bridges[-1]

    def turn(self) -> None:
        """Gives the JobHost the events that wait, and carries out its commands."""
        while not self.events.empty():
            self.carry_out(self.events.get()(self.host))

    def until(self, condition: Callable[[], bool], what: str) -> None:
        def has_come() -> bool:
            self.turn()
            return condition()

        wait_until(has_come, what)

    def ready(self, number: int = 0) -> MadeUpBridge:
        """A Spark that is ready."""
        spark = self.spark(number)
        spark.prepared.set_result(replace(FACTS, name=spark.name))
        return spark

    def spark(self, number: int = 0) -> MadeUpBridge:
        """A Spark that is being prepared."""
        self.until(lambda: len(self.bridges) > number, "Spark is started")
        return self.bridges[number]

    def looks(self) -> None:
        """Wait until the runner has looked at the worker twice more."""
        before = self.asked
        self.until(lambda: self.asked >= before + 2, "the worker is asked")

    def status(self) -> DualStatus:
        return self.host.build_status([], {}, 0.0, time.monotonic()).dual

    def state(self) -> str:
        return self.status().ranges[0].state

    def awaits(self, state: str) -> None:
        self.until(lambda: self.state() == state, f"the range is in {state}")


@pytest.fixture
def job() -> Iterator[Job]:
    """In it, all records go to Spark as soon as Spark is ready."""
    job = Job(BurstOptions(mode="spark-only"))
    yield job
    for bridge in job.bridges:
        bridge.stopped.cancel()
    job.runner.close()


def test_a_worker_hears_where_its_tasks_are_to_send_their_input(job: Job) -> None:
    assert job.status()["spark"] is None
    spark = job.spark()
    job.looks()
    assert job.told == []
    job.ready()
    job.awaits("OPERATION")
    job.looks()
    (told,) = job.told
    assert isinstance(told, DivertTasks)
    assert (told.worker, told.bridge, told.node) == (0, spark.name, "here")
    assert {form.chain for form in spark.forms} == {told.divert.chain}
    assert job.status()["spark"] == "a session"
    assert job.status()["processes"] == {"bridge": 4711, "executors": {"1": 4712}}


def test_each_worker_connects_once_when_spark_is_ready() -> None:
    """Before a range goes to Spark, so that its first micro-batch does not wait for it."""
    job = Job(BurstOptions(ahead=True))
    spark = job.spark()
    job.looks()
    assert job.greeted == []
    job.ready()
    job.until(lambda: bool(job.greeted), "the worker is told to connect")
    job.looks()
    assert job.greeted == [(0, spark.name, "here")]
    assert job.told == []
    spark.stopped.cancel()
    job.runner.close()


def test_spark_ends_in_order_with_the_job_and_is_killed_once(job: Job) -> None:
    spark = job.spark()
    job.ready()
    job.awaits("OPERATION")
    closing = threading.Thread(target=job.runner.close, daemon=True)
    closing.start()
    job.until(lambda: spark.did == ["stop"], "Spark is told to end")
    assert closing.is_alive(), "the job's end waits for Spark's"
    spark.stopped.set_result(None)
    closing.join(60)
    assert spark.did == ["stop", "kill"]
    job.runner.close()
    assert spark.did == ["stop", "kill"]
    assert job.status()["spark"] == "a session", "the last status says what there was"


def test_a_spark_that_does_not_end_is_killed(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    spark = job.spark()
    job.ready()
    job.awaits("OPERATION")
    spark.stopped.set_exception(TimeoutError())
    job.runner.close()
    assert spark.did == ["stop", "kill"]
    assert "job words: Spark did not end by itself, and is killed: it did not answer in time" in caplog.text


def test_a_start_that_ends_after_the_job_leaves_nothing(job: Job) -> None:
    spark = job.spark()
    spark.stopped.set_result(None)
    job.runner.close()
    job.ready()
    assert spark.did == ["stop", "kill"]


def test_without_spark_the_user_reads_why_and_is_warned_once(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="penstock.host.carry.spark_runner"):
        spark = job.spark()
        spark.prepared.set_exception(RuntimeError("there is no Java"))
        job.until(lambda: bool(caplog.records), "the warning is there")
        job.looks()
    assert job.status()["spark"] == "not to be had: there is no Java"
    assert spark.did == ["kill"]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "job words: Spark could not be made ready (there is no Java)" in record.getMessage()
    assert job.told == []


def test_a_process_that_cannot_even_be_started_is_no_spark() -> None:
    job = Job(BurstOptions(mode="off"))
    job.runner.close()
    assert job.bridges == [], "never needed"

    job = Job(BurstOptions(mode="spark-only"), RuntimeError("no resources"))
    job.until(lambda: job.status()["spark"] == "not to be had: no resources", "the reason is in the status")
    job.runner.close()


def test_a_dead_spark_is_found_when_a_micro_batch_fails_and_all_tasks_take_up_records(job: Job) -> None:
    spark = job.spark()
    job.ready()
    job.awaits("OPERATION")
    task = job.workers.chains[0][0]
    job.workers.fail(task, "Lost: gone")
    job.until(lambda: spark.did == ["check"], "Spark is asked whether it lives")
    assert job.status()["spark"] == "a session", "a question is no loss"
    spark.checked.set_exception(RuntimeError("the JVM has gone"))
    job.until(lambda: spark.did == ["check", "kill"], "it is killed")
    job.awaits("RECORD")
    status = job.status()
    assert status["spark"].startswith("lost: Lost: gone; the JVM has gone")
    assert status["ranges"][0]["failed"] == "Lost: gone"
    assert task["divert"] is None


def test_a_spark_that_is_ended_makes_room_for_another_one(job: Job) -> None:
    first = job.ready()
    first.stopped.set_result(None)
    job.awaits("OPERATION")
    forms = tuple(first.forms)
    job.runner.carry_out(EndSpark(1, "the job's operators were divided among its tasks anew"))
    job.runner.carry_out(PrepareSpark(2, forms))
    second = job.spark(1)
    job.until(lambda: first.did == ["stop", "kill"], "the first has ended")
    assert second.name != first.name, "a name of a dead actor is not used again"
    second.stopped.set_result(None)


def test_a_worker_that_refuses_or_cannot_tell_its_load_ends_nothing(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.refusal = "DivertTasks: no"
    spark = job.spark()
    spark.checked.set_result([])
    job.ready()
    job.until(lambda: "job words: worker 0: DivertTasks: no" in caplog.text, "the user hears of it")
    job.cannot_tell = RuntimeError("worker 0 could not answer")
    job.looks()
    assert "so no range switches now: worker 0 could not answer" in caplog.text
    job.refusal = job.cannot_tell = None
    job.awaits("OPERATION")
    assert "kill" not in spark.did


def test_a_fault_of_the_scheduler_does_not_end_the_job(
    job: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark = job.ready()
    with monkeypatch.context() as patched:
        patched.setattr(ParadigmScheduler, "looked", lambda self, *told: 1 / 0)
        job.until(lambda: "the paradigm scheduler has met an error; it tries again" in caplog.text, "the log says so")
    job.awaits("OPERATION")
    assert job.host.end is None
    assert "kill" not in spark.did


def trying_job() -> Job:
    """A job whose Spark is ready and has nothing to try the range on, and whose tasks process records."""
    job = Job(BurstOptions(ahead=True))
    job.spark().prepared.set_result(replace(FACTS, costs={0: None}, untried=frozenset([0]), cores=2))
    job.until(lambda: job.status()["spark"] == "a session", "Spark is ready")
    return job


def close(job: Job) -> None:
    for spark in job.bridges:
        spark.stopped.cancel()
    job.runner.close()


def figures(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = job.status()["ranges"][0]["figures"]
    return found


def records_come(job: Job, condition: Callable[[], bool], what: str) -> None:
    """Wait until something is true, while tasks process records."""

    def more() -> bool:
        for task in job.workers.chains[0]:
            did(task, 100, busy_s=0.001)
        return condition()

    job.until(more, what)


def test_a_range_without_a_sample_is_tried_on_records_of_its_tasks() -> None:
    job = trying_job()
    spark = job.spark()
    job.looks()
    assert job.questions == [], "no records have come"
    records_come(job, lambda: bool(spark.samples), "Spark gets a sample")
    ((chain, sample),) = spark.samples
    assert (chain, sample.records()) == (0, ["a b"])
    assert not figures(job)["operation_measured"]
    spark.tried.set_result(TRIAL)
    job.until(lambda: figures(job)["operation_measured"], "the range is tried")
    assert job.status()["ranges"][0]["way"] == "in some way"
    assert job.told == []
    close(job)


def test_a_trial_that_fails_makes_spark_doubted(caplog: pytest.LogCaptureFixture) -> None:
    job = trying_job()
    spark = job.spark()
    job.refusal = "take_sample: the records cannot travel"
    with caplog.at_level(logging.INFO, logger="penstock.host.decide.paradigms"):
        records_come(job, lambda: "the records cannot travel" in caplog.text, "the log says why there is no sample")
    close(job)
    job = trying_job()
    spark = job.spark()
    records_come(job, lambda: bool(spark.samples), "Spark gets a sample")
    spark.tried.set_exception(RuntimeError("the process has died"))
    job.until(lambda: spark.did == ["check"], "Spark is asked whether it lives")
    spark.checked.set_result([])
    close(job)
