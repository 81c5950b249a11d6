"""The carrier of the paradigm scheduler, with workers and a Spark that are made up: what a worker is told, what becomes
of the process that holds the session, and what a user reads in the status. The decisions are tested without threads, in
tests/bridge/test_paradigm_scheduler.py; real workers and a real Spark are in tests/e2e/test_dual.py."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from penstock.actors.spark_carrier import SparkCarrier
from penstock.bridge.burst import BurstOptions
from penstock.bridge.forms import RangeForm
from penstock.bridge.paradigm_scheduler import DualOptions
from penstock.bridge.session import SparkOptions
from penstock.bridge.spark_life import RangeTrial, SparkFacts
from penstock.runtime.operators.micro_batch import DivertRequest
from penstock.runtime.program.plan import replanned
from penstock.runtime.records.codec import encode
from penstock.runtime.worker.load import TaskLoad, divert_load
from penstock.runtime.worker.sample import RecordSample, SampleRequest
from tests.bridge.scheduled_job import FACTS, TRIAL, ScheduledJob, did
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
    """Two workers that do what they are told, and what the carrier has made of Spark."""

    def __init__(self, burst: BurstOptions, cannot_start: Exception | None = None) -> None:
        self.bridges: list[MadeUpBridge] = []
        self.cannot_start = cannot_start
        self.cannot_tell: Exception | None = None
        self.refusal: str | None = None
        self.fault: Exception | None = None  # of the carrier itself
        self.told: list[tuple[int, str, tuple[Any, ...]]] = []
        self.greeted: list[tuple[int, str, str]] = []  # (worker, bridge, node)
        self.questions: list[SampleRequest] = []
        self.workers = ScheduledJob(words(parallelism=1), burst)  # only its tasks are used
        self.asked = threading.Semaphore(0)
        self.carrier = SparkCarrier(
            self.workers.plan,
            DualOptions(burst, SparkOptions()),
            60.0,
            ask=self.ask,
            tell=self.tell,
            start=self.start,
        )

    def ask(self) -> Mapping[int, Sequence[TaskLoad]]:
        self.asked.release()
        if self.cannot_tell is not None:
            raise self.cannot_tell
        return {0: list(self.workers.tasks.values())}

    def tell(
        self,
        worker: int,
        method: str,
        arguments: tuple[Any, ...],
        done: Callable[[Any], None],
        refused: Callable[[str | None], None],
    ) -> None:
        if self.fault is not None:
            raise self.fault
        if method == "greet_bridge":
            self.greeted.append((worker, *arguments))
            done(None)
            return
        if method == "take_sample":
            self.questions.append(arguments[0])
            if self.refusal is not None:
                refused(self.refusal)
            else:
                done(RecordSample(1, (encode(["a b"]),)) if len(self.questions) > 1 else None)
            return
        self.told.append((worker, method, arguments))
        if self.refusal is not None:
            refused(self.refusal)
            return
        if method == "divert":
            for task in self.workers.chains[arguments[0].chain]:
                task["divert"] = divert_load(arguments[0])
        else:
            for task in self.workers.chains[arguments[0]]:
                task["divert"] = task["diverted"] = None
        self.workers.barrier()
        done(None)

    def start(self, name: str, options: SparkOptions, forms: list[RangeForm]) -> MadeUpBridge:
        if self.cannot_start is not None:
            raise self.cannot_start
        self.bridges.append(MadeUpBridge(name, forms))
        return self.bridges[-1]

    def spark(self, number: int = 0) -> MadeUpBridge:
        """A Spark that is being prepared."""
        wait_until(lambda: len(self.bridges) > number, "Spark is started")
        return self.bridges[number]

    def looks(self) -> None:
        """Wait until the carrier has looked at the workers twice more."""
        while self.asked.acquire(blocking=False):
            pass
        for _ in range(2):
            assert self.asked.acquire(timeout=60)

    def state(self) -> str:
        return str(self.carrier.status()["ranges"][0]["state"])

    def awaits(self, state: str) -> None:
        wait_until(lambda: self.state() == state, f"the range is in {state}")


@pytest.fixture
def job() -> Iterator[Job]:
    """In it, all records go to Spark as soon as Spark is ready."""
    job = Job(BurstOptions(mode="spark-only"))
    yield job
    for bridge in job.bridges:
        bridge.stopped.cancel()
    job.carrier.close()


def test_a_worker_hears_where_its_tasks_are_to_send_their_input(job: Job) -> None:
    assert job.carrier.status()["spark"] is None
    spark = job.spark()
    job.looks()
    assert job.told == []
    spark.prepared.set_result(FACTS)
    job.awaits("OPERATION")
    job.looks()
    ((worker, method, (divert, name, node)),) = job.told
    assert (worker, method, name, node) == (0, "divert", spark.name, "here")
    assert isinstance(divert, DivertRequest)
    assert {form.chain for form in spark.forms} == {divert.chain}
    assert job.carrier.status()["spark"] == "a session"
    assert job.carrier.status()["processes"] == {"bridge": 4711, "executors": {"1": 4712}}


def test_each_worker_connects_once_when_spark_is_ready() -> None:
    """Before a range goes to Spark, so that its first micro-batch does not wait for it."""
    job = Job(BurstOptions(ahead=True))
    spark = job.spark()
    job.looks()
    assert job.greeted == []
    spark.prepared.set_result(FACTS)
    wait_until(lambda: bool(job.greeted), "the worker is told to connect")
    job.looks()
    assert job.greeted == [(0, spark.name, "here")]
    assert job.told == []
    spark.stopped.cancel()
    job.carrier.close()


def test_spark_ends_in_order_with_the_job_and_is_killed_once(job: Job) -> None:
    spark = job.spark()
    spark.prepared.set_result(FACTS)
    job.awaits("OPERATION")
    closing = threading.Thread(target=job.carrier.close, daemon=True)
    closing.start()
    wait_until(lambda: spark.did == ["stop"], "Spark is told to end")
    assert closing.is_alive(), "the job's end waits for Spark's"
    spark.stopped.set_result(None)
    closing.join(60)
    assert spark.did == ["stop", "kill"]
    job.carrier.close()
    assert spark.did == ["stop", "kill"]
    assert job.carrier.status()["spark"] == "a session", "the last status says what there was"


def test_a_spark_that_does_not_end_is_killed(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    spark = job.spark()
    spark.prepared.set_result(FACTS)
    job.awaits("OPERATION")
    spark.stopped.set_exception(TimeoutError())
    job.carrier.close()
    assert spark.did == ["stop", "kill"]
    assert "job words: Spark did not end by itself, and is killed: it did not answer in time" in caplog.text


def test_a_start_that_ends_after_the_job_leaves_nothing(job: Job) -> None:
    spark = job.spark()
    spark.stopped.set_result(None)
    job.carrier.close()
    spark.prepared.set_result(FACTS)
    assert spark.did == ["stop", "kill"]


def test_without_spark_the_user_reads_why_and_is_warned_once(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="penstock.actors.spark_carrier"):
        spark = job.spark()
        spark.prepared.set_exception(RuntimeError("there is no Java"))
        wait_until(lambda: bool(caplog.records), "the warning is there")
        job.looks()
    assert job.carrier.status()["spark"] == "not to be had: there is no Java"
    assert spark.did == ["kill"]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "job words: Spark could not be made ready (there is no Java)" in record.getMessage()
    assert job.told == []


def test_a_process_that_cannot_even_be_started_is_no_spark() -> None:
    job = Job(BurstOptions(mode="off"))
    job.carrier.close()
    assert job.bridges == [], "never needed"

    job = Job(BurstOptions(mode="spark-only"), RuntimeError("no resources"))
    wait_until(lambda: job.carrier.status()["spark"] == "not to be had: no resources", "the reason is in the status")
    job.carrier.close()


def test_a_dead_spark_is_found_when_a_micro_batch_fails_and_all_tasks_take_up_records(job: Job) -> None:
    spark = job.spark()
    spark.prepared.set_result(FACTS)
    job.awaits("OPERATION")
    task = job.workers.chains[0][0]
    job.workers.fail(task, "Lost: gone")
    wait_until(lambda: spark.did == ["check"], "Spark is asked whether it lives")
    assert job.carrier.status()["spark"] == "a session", "a question is no loss"
    spark.checked.set_exception(RuntimeError("the JVM has gone"))
    wait_until(lambda: spark.did == ["check", "kill"], "it is killed")
    job.awaits("RECORD")
    status = job.carrier.status()
    assert status["spark"].startswith("lost: Lost: gone; the JVM has gone")
    assert status["ranges"][0]["failed"] == "Lost: gone"
    assert task["divert"] is None


def test_another_plan_ends_the_spark_that_has_compiled_the_old_one(job: Job) -> None:
    first = job.spark()
    first.prepared.set_result(FACTS)
    first.stopped.set_result(None)
    job.awaits("OPERATION")
    flow = job.workers.flow
    job.workers.plan = replanned(flow.graph, job.workers.plan, "count", 2, chaining=True)
    job.workers.make_tasks()
    job.carrier.plan_changed(job.workers.plan)
    second = job.spark(1)
    wait_until(lambda: first.did == ["stop", "kill"], "the first has ended")
    assert second.name != first.name, "a name of a dead actor is not used again"
    second.prepared.set_result(FACTS)
    job.awaits("OPERATION")
    assert job.told[-1][2][1] == second.name


def test_a_worker_that_refuses_or_cannot_tell_its_load_ends_nothing(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.refusal = "worker 0: divert: no"
    spark = job.spark()
    spark.checked.set_result([])
    spark.prepared.set_result(FACTS)
    wait_until(lambda: "job words: worker 0: divert: no" in caplog.text, "the user hears of it")
    job.cannot_tell = RuntimeError("worker 0 could not answer")
    job.looks()
    assert "so no range switches now: worker 0 could not answer" in caplog.text
    job.refusal = job.cannot_tell = None
    job.awaits("OPERATION")
    assert "kill" not in spark.did


def test_a_message_that_could_not_be_sent_is_sent_again(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.fault = RuntimeError("no socket")
    spark = job.spark()
    spark.checked.set_result([])
    spark.prepared.set_result(FACTS)
    wait_until(lambda: "what the paradigm scheduler wants could not be done" in caplog.text, "the log says so")
    job.fault = None
    job.awaits("OPERATION")
    assert "kill" not in spark.did


def trying_job() -> Job:
    """A job whose Spark is ready and has nothing to try the range on, and whose tasks process records."""
    job = Job(BurstOptions(ahead=True))
    job.spark().prepared.set_result(replace(FACTS, costs={0: None}, untried=frozenset([0]), cores=2))
    wait_until(lambda: job.carrier.status()["spark"] == "a session", "Spark is ready")
    return job


def close(job: Job) -> None:
    for spark in job.bridges:
        spark.stopped.cancel()
    job.carrier.close()


def figures(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = job.carrier.status()["ranges"][0]["figures"]
    return found


def records_come(job: Job, condition: Callable[[], bool], what: str) -> None:
    """Wait until something is true, while tasks process records."""

    def more() -> bool:
        for task in job.workers.chains[0]:
            did(task, 100, busy_s=0.001)
        return condition()

    wait_until(more, what)


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
    wait_until(lambda: figures(job)["operation_measured"], "the range is tried")
    assert job.carrier.status()["ranges"][0]["way"] == "in some way"
    assert job.told == []
    close(job)


def test_a_trial_that_fails_makes_spark_doubted(caplog: pytest.LogCaptureFixture) -> None:
    job = trying_job()
    spark = job.spark()
    job.refusal = "worker 0: take_sample: the records cannot travel"
    with caplog.at_level(logging.INFO, logger="penstock.actors.spark_carrier"):
        records_come(job, lambda: "the records cannot travel" in caplog.text, "the log says why there is no sample")
    close(job)
    job = trying_job()
    spark = job.spark()
    records_come(job, lambda: bool(spark.samples), "Spark gets a sample")
    spark.tried.set_exception(RuntimeError("the process has died"))
    wait_until(lambda: spark.did == ["check"], "Spark is asked whether it lives")
    spark.checked.set_result([])
    close(job)
