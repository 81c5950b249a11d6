"""The sink of Kafka against a real broker: what readers of committed records see, whatever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.connectors.kafka.sink import Kafka as KafkaSink
from penstock.connectors.kafka.transactions import Transactions
from penstock.runtime.errors import FlowError, JobFailed
from tests.connectors.topics import committed, committed_messages, new_topic, produce, producer_of
from tests.e2e.processes import LIMIT_S, kill, wait_until
from tests.servers.kafka import Kafka

INTERVAL_S = 0.1


def written(broker: Kafka, records: list[Any], epochs: bool = True, **options: Any) -> list[Any]:
    """Returns the messages that readers of committed records see after a job has written these records."""
    topic = new_topic(broker, 2)
    flow = ps.Flow(f"write-{topic}")
    on_error = options.pop("on_error", "fail")
    flow.read(ps.sources.Memory(records)).write(KafkaSink(broker.address, topic, **options), on_error=on_error)
    more = {"epoch_interval_s": INTERVAL_S} if epochs else {"epoch_interval_s": None}
    ps.run(flow, workers=1, local=True, **more).wait(LIMIT_S)
    return committed_messages(broker, topic)


@pytest.mark.parametrize("guarantee", ["exactly once", "at least once"])
def test_records_become_values_keys_and_headers(broker: Kafka, guarantee: Any) -> None:
    records = [{"user": "ann", "n": 1}, {"user": "bob", "n": 2}, {"user": "ann", "n": 3}, None]
    key = lambda record: None if record is None else record["user"]
    messages = written(broker, records, key=key, headers=lambda record: [("h", b"1")], guarantee=guarantee)
    found = sorted((m.key() or b"", m.value() and json.loads(m.value())["n"]) for m in messages if m.value())
    assert found == [(b"ann", 1), (b"ann", 3), (b"bob", 2)]
    assert [m.headers() for m in messages] == [[("h", b"1")]] * 4
    assert len({m.partition() for m in messages if m.key() == b"ann"}) == 1
    assert [m.value() for m in messages if m.key() is None] == [None]


def test_formats_of_values_and_keys(broker: Kafka) -> None:
    assert sorted(m.value() for m in written(broker, [b"a", "b"], value="bytes")) == [b"a", b"b"]
    assert [m.value() for m in written(broker, [1], value=lambda n: b"x" * n)] == [b"x"]
    [message] = written(broker, [{"k": [1, 2]}], key="k")
    assert message.key() == b"[1,2]"


@pytest.mark.parametrize("guarantee", ["exactly once", "at least once"])
def test_a_job_without_epochs_writes_when_its_input_ends(broker: Kafka, guarantee: Any) -> None:
    assert len(written(broker, list(range(1000)), epochs=False, guarantee=guarantee)) == 1000


def test_a_record_that_cannot_be_encoded_is_a_failed_one(broker: Kafka) -> None:
    records = [1, {1, 2}.__iter__, 3]
    assert sorted(m.value() for m in written(broker, records, on_error="skip")) == [b"1", b"3"]
    with pytest.raises(JobFailed, match="operator 'write' failed"):
        written(broker, records)


def copying(broker: Kafka | NamedBroker, source: str, target: str, **options: Any) -> ps.Flow:
    """Returns a flow that copies numbers from a topic to another one, by their key."""
    flow = ps.Flow(f"copy-{target}")
    read = flow.read(ps.sources.Kafka(broker.address, source, value="json"), parallelism=2)
    read.key_by(lambda n: n % 16).process(lambda context, key, n: [n], parallelism=2).write(
        KafkaSink(broker.address, target, key=lambda n: str(n % 16), **options), parallelism=2
    )
    return flow


def numbers(count: int, first: int = 0) -> list[tuple[int, bytes]]:
    """Numbers that go to one partition by their key, of 16 keys."""
    return [(number % 16 % 4, str(number).encode()) for number in range(first, first + count)]


def assert_each_once_and_in_order(broker: Kafka, topic: str, count: int) -> None:
    messages = committed_messages(broker, topic)
    values = [int(message.value()) for message in messages]
    assert sorted(values) == list(range(count))
    for key in range(16):
        of_key = [int(message.value()) for message in messages if message.key() == str(key).encode()]
        assert of_key == list(range(key, count, 16))


def wait_for_records(broker: Kafka, topic: str, count: int) -> None:
    wait_until(lambda: len(committed(broker, topic)) >= count, f"{count} committed records are in {topic}")


def wait_for_restart(job: ps.Job, before: int) -> None:
    job.wait_for(lambda status: status["epochs"]["restarts"] > before and status["state"] == "RUNNING", LIMIT_S)


def open_transactions(broker: Kafka, job: str) -> list[str]:
    transactions = Transactions(broker.address, {}, "test")
    try:
        return [one for one in transactions.open_ids() if f"/{job}/" in one]
    finally:
        transactions.close()


def test_killed_workers_lose_and_double_nothing(broker: Kafka, tmp_path: Path) -> None:
    source, target = new_topic(broker, 4), new_topic(broker, 4)
    count = 20_000
    flow = copying(broker, source, target)
    job = ps.run(flow, workers=2, local=True, epoch_interval_s=INTERVAL_S, checkpoints=tmp_path / "store")
    writer = threading.Thread(target=produce, args=(broker, source, numbers(count)))
    writer.start()
    for killed in range(4):
        epoch = job.status()["epochs"]["complete"]
        job.wait_for(lambda status, epoch=epoch: status["epochs"]["complete"] >= epoch + 2, LIMIT_S)
        pid = job.status()["workers"][killed % 2]["pid"]
        kill(pid)
        job.wait_for(
            lambda status, n=killed: status["epochs"]["restarts"] > n and status["state"] == "RUNNING", LIMIT_S
        )
    writer.join()
    wait_for_records(broker, target, count)
    job.stop()
    job.wait(LIMIT_S)
    assert_each_once_and_in_order(broker, target, count)
    assert open_transactions(broker, f"copy-{target}") == []


# Runs a job, and dies with it at a random instant.
PROGRAM = """
import os, random, signal, sys, time
import penstock as ps
from tests.connectors.test_kafka_sink import INTERVAL_S, NamedBroker, copying
address, source, target, store = sys.argv[1:]
flow = copying(NamedBroker(address), source, target)
job = ps.run(flow, workers=2, local=True, epoch_interval_s=INTERVAL_S, checkpoints=store)
job.wait_for(lambda status: status["epochs"]["complete"] >= 3)
time.sleep(random.random() * 2 * INTERVAL_S)
os.kill(os.getpid(), signal.SIGKILL)
"""


@dataclass
class NamedBroker:
    """A broker of another process."""

    address: str


def test_a_job_that_died_is_resumed_and_what_it_had_prepared_is_there(broker: Kafka, tmp_path: Path) -> None:
    source, target = new_topic(broker, 4), new_topic(broker, 4)
    produce(broker, source, numbers(4000))
    store = tmp_path / "store"
    command = [sys.executable, "-c", PROGRAM, broker.address, source, target, str(store)]
    killed = subprocess.Popen(command, cwd=Path(__file__).resolve().parents[2])
    try:
        assert killed.wait(LIMIT_S) == -signal.SIGKILL
    finally:
        killed.kill()
    produce(broker, source, numbers(4000, 4000))
    job = ps.resume(f"copy-{target}", checkpoints=store, local=True)
    wait_for_records(broker, target, 8000)
    job.stop()
    job.wait(LIMIT_S)
    assert_each_once_and_in_order(broker, target, 8000)
    assert open_transactions(broker, f"copy-{target}") == []


def test_a_job_that_is_rescaled_commits_for_the_tasks_that_go(broker: Kafka, tmp_path: Path) -> None:
    source, target = new_topic(broker, 4), new_topic(broker, 1)  # one partition, in which all transactions meet
    count = 30_000
    flow = copying(broker, source, target)
    job = ps.run(flow, workers=2, local=True, epoch_interval_s=INTERVAL_S, checkpoints=tmp_path / "store")
    writer = threading.Thread(target=produce, args=(broker, source, numbers(count)))
    writer.start()
    for parallelism in (1, 3, 2):
        epoch = job.status()["epochs"]["complete"]
        job.wait_for(lambda status, epoch=epoch: status["epochs"]["complete"] >= epoch + 2, LIMIT_S)
        job.rescale("process", parallelism)
    writer.join()
    wait_for_records(broker, target, count)
    job.stop()
    job.wait(LIMIT_S)
    assert_each_once_and_in_order(broker, target, count)
    assert open_transactions(broker, flow.name) == []


def test_a_broker_that_dies_and_comes_back_costs_no_record_and_no_restart(mortal_broker: Kafka, tmp_path: Path) -> None:
    source, target = new_topic(mortal_broker, 4), new_topic(mortal_broker, 4)
    produce(mortal_broker, source, numbers(2000))
    flow = copying(mortal_broker, source, target)
    job = ps.run(flow, workers=2, local=True, epoch_interval_s=INTERVAL_S, checkpoints=tmp_path / "store")
    wait_for_records(mortal_broker, target, 2000)
    mortal_broker.brokers[0].end()
    job.wait_for(lambda status: "failed for" in str(status["waits_for"]), LIMIT_S)
    mortal_broker.start()
    produce(mortal_broker, source, numbers(2000, 2000))
    wait_for_records(mortal_broker, target, 4000)
    assert job.status()["epochs"]["restarts"] == 0
    job.stop()
    job.wait(LIMIT_S)
    assert_each_once_and_in_order(mortal_broker, target, 4000)


def test_a_transaction_whose_time_has_passed_ends_the_job_by_an_error_that_names_it(
    broker: Kafka, tmp_path: Path
) -> None:
    source, target = new_topic(broker, 4), new_topic(broker, 4)
    flow = copying(broker, source, target, transaction_timeout_s=2)
    job = ps.run(flow, workers=1, local=True, epoch_interval_s=0.02, checkpoints=tmp_path / "store", hang_timeout_s=60)
    produce(broker, source, numbers(2000))
    job.wait_for(lambda status: status["records_written"] > 0, LIMIT_S)
    writer = threading.Thread(target=produce, args=(broker, source, numbers(20_000, 2000)))
    writer.start()
    pid = job.status()["workers"][0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: not open_transactions(broker, flow.name), "Kafka has aborted the transactions")
    finally:
        os.kill(pid, signal.SIGCONT)
    writer.join()
    # The worker may have been stopped while no transaction was prepared: then the records come again.
    end = job.wait_for(lambda status: status["state"] == "FAILED" or len(committed(broker, target)) >= 22_000, LIMIT_S)
    if end["state"] == "FAILED":
        assert "aborted transaction" in end["error"] or "fenced" in end["error"].lower(), end["error"]
    else:
        job.stop()
        job.wait(LIMIT_S)
        assert_each_once_and_in_order(broker, target, 22_000)


def test_open_transactions_of_other_jobs_and_live_writers_are_not_fenced(broker: Kafka, tmp_path: Path) -> None:
    topic = new_topic(broker, 1)
    other = f"penstock/another-job/write/{uuid.uuid4().hex}/0/0/0"
    producer = producer_of(broker, other)
    producer.begin_transaction()
    producer.produce(topic, b"other")
    producer.flush(60)
    source, target = new_topic(broker, 4), new_topic(broker, 4)
    produce(broker, source, numbers(1000))
    flow = copying(broker, source, target)
    job = ps.run(flow, workers=2, local=True, epoch_interval_s=INTERVAL_S, checkpoints=tmp_path / "store")
    wait_for_records(broker, target, 1000)
    kill(job.status()["workers"][0]["pid"])
    wait_for_restart(job, 0)
    produce(broker, source, numbers(1000, 1000))
    wait_for_records(broker, target, 2000)
    job.stop()
    job.wait(LIMIT_S)
    producer.commit_transaction(60)
    assert committed(broker, topic) == [b"other"]


def test_a_job_that_starts_from_a_savepoint_leaves_the_job_alone_that_wrote_it(broker: Kafka, tmp_path: Path) -> None:
    source, target = new_topic(broker, 4), new_topic(broker, 4)
    produce(broker, source, numbers(2000))
    options = {"workers": 1, "local": True, "epoch_interval_s": INTERVAL_S}
    first = ps.run(copying(broker, source, target), checkpoints=tmp_path / "first", **options)
    wait_for_records(broker, target, 2000)
    first.savepoint(tmp_path / "savepoint")
    again = ps.Flow(f"again-{target}")
    read = again.read(ps.sources.Kafka(broker.address, source, value="json"), parallelism=2)
    read.key_by(lambda n: n % 16).process(lambda context, key, n: [n], parallelism=2).write(
        KafkaSink(broker.address, target, key=lambda n: str(n % 16)), parallelism=2
    )
    second = ps.run(again, checkpoints=tmp_path / "second", savepoint=tmp_path / "savepoint", **options)
    second.wait_for(lambda status: status["epochs"]["complete"] >= 1, LIMIT_S)
    produce(broker, source, numbers(2000, 2000))
    wait_for_records(broker, target, 6000)
    for job in (first, second):
        assert job.status()["epochs"]["restarts"] == 0
        job.stop()
        job.wait(LIMIT_S)
    counts = Counter(int(value) for value in committed(broker, target) if value is not None)
    assert counts == {**dict.fromkeys(range(2000), 1), **dict.fromkeys(range(2000, 4000), 2)}


def test_mistakes_are_told_before_the_job_starts(broker: Kafka) -> None:
    for options, message in [
        ({"value": "avro"}, "value='avro'"),
        ({"key": 5}, "key=5"),
        ({"headers": "h"}, "headers='h'"),
        ({"guarantee": "exactly"}, "guarantee='exactly'"),
        ({"guarantee": "idempotent"}, "needs a key"),
        ({"settings": {"transactional.id": "x"}}, "the sink has a pool of them"),
    ]:
        with pytest.raises(FlowError, match=message):
            KafkaSink("b:1", "a", **options)
    flow = ps.Flow("mistaken")
    flow.read(ps.sources.Memory([1])).write(KafkaSink(broker.address, "nowhere"))
    with pytest.raises(FlowError, match="create it first"):
        ps.run(flow, local=True)
