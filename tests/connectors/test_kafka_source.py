"""The source of Kafka against a real broker: where it begins and ends, what is an error, and what survives kills."""

from __future__ import annotations

import json
import logging
import pickle
import threading
import time
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.connectors.kafka.source import Kafka as KafkaSource
from penstock.runtime.errors import FlowError, JobFailed, SourceError
from tests.connectors.topics import delete_before, new_topic, produce, transaction
from tests.e2e.processes import LIMIT_S, kill, wait_until
from tests.local.workers import workers_here
from tests.servers.kafka import Kafka


def collected(source: KafkaSource, **options: Any) -> list[Any]:
    """Returns all records of a source that ends, in the order of one task."""
    flow = ps.Flow(f"read-{source.topics[0]}")
    out = ps.sinks.Collect()
    flow.read(source, **options).write(out)
    ps.run(flow, workers=1, local=True).wait(LIMIT_S)
    return out.records()


def numbers(count: int, partitions: int) -> list[tuple[int, bytes]]:
    return [(number % partitions, str(number).encode()) for number in range(count)]


def test_every_record_comes_once_and_in_the_order_of_its_partition(broker: Kafka) -> None:
    topic = new_topic(broker, 3)
    produce(broker, topic, numbers(3000, 3), key="k", headers=[("h", b"1")])
    records = collected(ps.sources.Kafka(broker.address, topic, value="json", key="text", metadata=True, stop="latest"))
    assert sorted(record["value"] for record in records) == list(range(3000))
    for partition in range(3):
        of_it = [record for record in records if record["partition"] == partition]
        assert [record["offset"] for record in of_it] == list(range(1000))
        assert [record["value"] for record in of_it] == list(range(partition, 3000, 3))
    assert {(record["topic"], record["key"]) for record in records} == {(topic, "k")}
    assert records[0]["headers"] == [("h", b"1")]
    assert abs(records[0]["time_ms"] / 1000 - time.time()) < 600


def test_values_are_bytes_text_json_or_the_result_of_a_function(broker: Kafka) -> None:
    topic = new_topic(broker)
    produce(broker, topic, [(0, b'{"a": 1}'), (0, None), (0, b"2")])

    def read(value: Any) -> list[Any]:
        return collected(ps.sources.Kafka(broker.address, topic, value=value, stop="latest"))

    assert read("bytes") == [b'{"a": 1}', None, b"2"]
    assert read("text") == ['{"a": 1}', None, "2"]
    assert read("json") == [{"a": 1}, None, 2]
    assert read(len) == [8, None, 1]


def test_several_topics_are_one_source(broker: Kafka) -> None:
    topics = [new_topic(broker), new_topic(broker, 2)]
    produce(broker, topics[0], [(0, b"1")])
    produce(broker, topics[1], [(0, b"2"), (1, b"3")])
    assert sorted(collected(ps.sources.Kafka(broker.address, topics, stop="latest"))) == [b"1", b"2", b"3"]


def test_it_starts_at_a_time_at_offsets_at_the_end_or_where_a_group_is(broker: Kafka) -> None:
    from confluent_kafka import Consumer, TopicPartition

    topic = new_topic(broker, 2, **{"retention.ms": "-1"})
    produce(broker, topic, [(0, b"a"), (0, b"b"), (1, b"c")], timestamp=1_000)
    produce(broker, topic, [(0, b"d"), (1, b"e")], timestamp=2_000)

    def read(start: Any, **more: Any) -> list[bytes]:
        return sorted(collected(ps.sources.Kafka(broker.address, topic, start=start, stop="latest", **more)))

    assert read("earliest") == [b"a", b"b", b"c", b"d", b"e"]
    assert read("latest") == []
    assert read(1_001) == [b"d", b"e"]
    assert read(datetime.fromtimestamp(2, timezone.utc)) == [b"d", b"e"]
    assert read(3_000) == []
    assert read({(topic, 0): 1}) == [b"b", b"c", b"d", b"e"]
    consumer = Consumer({"bootstrap.servers": broker.address, "group.id": f"group-{topic}", "log_level": 2})
    consumer.commit(offsets=[TopicPartition(topic, 0, 2)], asynchronous=False)
    consumer.close()
    assert read("group", group=f"group-{topic}") == [b"c", b"d", b"e"]


def test_only_committed_records_are_read_and_marks_of_transactions_do_not_keep_it_from_its_end(broker: Kafka) -> None:
    topic = new_topic(broker)
    transaction(broker, topic, [(0, b"1"), (0, b"2")], commit=True)
    transaction(broker, topic, [(0, b"no")], commit=False)
    assert collected(ps.sources.Kafka(broker.address, topic, stop="latest")) == [b"1", b"2"]
    settings = {"isolation.level": "read_uncommitted"}
    everything = collected(ps.sources.Kafka(broker.address, topic, stop="latest", settings=settings))
    assert everything == [b"1", b"2", b"no"]


def test_a_topic_without_records_and_more_tasks_than_partitions_end(broker: Kafka) -> None:
    topic = new_topic(broker, 2)
    assert collected(ps.sources.Kafka(broker.address, topic, stop="latest"), parallelism=3) == []
    produce(broker, topic, numbers(10, 2))
    assert len(collected(ps.sources.Kafka(broker.address, topic, stop="latest"), parallelism=3)) == 10


def test_bytes_that_are_no_json_are_one_failed_record(broker: Kafka) -> None:
    topic = new_topic(broker)
    produce(broker, topic, [(0, b"1"), (0, b"{"), (0, b"3")])
    source = ps.sources.Kafka(broker.address, topic, value="json", stop="latest")
    assert collected(source, on_error="skip") == [1, 3]
    with pytest.raises(JobFailed, match=rf"{topic}-0 at offset 1"):
        collected(source)


def test_a_watermark_waits_for_each_partition(broker: Kafka) -> None:
    # One partition has been written for an hour longer than the other one, which must not make records late.
    topic = new_topic(broker, 2)
    hour = 3_600_000
    produce(broker, topic, [(0, json.dumps({"t": hour + i, "p": 0}).encode()) for i in range(1000)])
    produce(broker, topic, [(1, json.dumps({"t": i, "p": 1}).encode()) for i in range(1000)])
    flow = ps.Flow("kafka-time")
    out = ps.sinks.Collect()
    source = ps.sources.Kafka(broker.address, topic, value="json", stop="latest")
    stamped = flow.read(source).watermark("t", out_of_orderness_s=0)
    stamped.key_by("p").window(ps.Tumbling(1.0)).agg(n=ps.count()).write(out)
    job = ps.run(flow, workers=1, local=True)
    job.wait(LIMIT_S)
    counts: Counter[int] = Counter()
    for partition, _, _, count in out.records():
        counts[partition] += count["n"]
    assert counts == {0: 1000, 1: 1000}


def endless(broker: Kafka, topic: str, folder: Path, **options: Any) -> ps.Flow:
    flow = ps.Flow(f"endless-{topic}")
    source = ps.sources.Kafka(broker.address, topic, value="text", **options)
    flow.read(source, parallelism=2).write(ps.sinks.Files(folder))
    return flow


def lines(folder: Path) -> list[int]:
    return sorted(int(line) for path in folder.glob("*") if path.is_file() for line in path.read_text().split())


def test_killed_workers_lose_and_double_nothing(broker: Kafka, tmp_path: Path) -> None:
    topic = new_topic(broker, 4)
    count = 40_000
    writer = threading.Thread(target=produce, args=(broker, topic, numbers(count, 4)))
    flow = endless(broker, topic, tmp_path / "out")
    job = ps.run(flow, workers=2, local=True, epoch_interval_s=0.1, checkpoints=tmp_path / "store")
    writer.start()
    for _ in range(2):
        job.wait_for(lambda status: status["epochs"]["complete"] >= 2, LIMIT_S)
        kill(workers_here()[0])
        wait_until(lambda: len(workers_here()) == 2 and job.status()["state"] == "RUNNING", "the worker is there again")
    writer.join()
    wait_until(lambda: len(lines(tmp_path / "out")) >= count, "all records are written")
    job.stop()
    job.wait(LIMIT_S)
    assert lines(tmp_path / "out") == list(range(count))


def test_a_broker_that_dies_and_comes_back_costs_no_record_and_no_restart(mortal_broker: Kafka, tmp_path: Path) -> None:
    topic = new_topic(mortal_broker, 2)
    produce(mortal_broker, topic, numbers(1000, 2))
    flow = endless(mortal_broker, topic, tmp_path / "out")
    job = ps.run(flow, workers=1, local=True, epoch_interval_s=0.1, checkpoints=tmp_path / "store")
    wait_until(lambda: len(lines(tmp_path / "out")) == 1000, "the first records are there")
    [worker] = workers_here()
    mortal_broker.brokers[0].end()
    status = job.wait_for(lambda status: "failed for" in str(status["waits_for"]), LIMIT_S)
    assert mortal_broker.address in status["waits_for"]
    mortal_broker.start()
    produce(mortal_broker, topic, [(part, str(1000 + n).encode()) for n, (part, _) in enumerate(numbers(1000, 2))])
    wait_until(lambda: len(lines(tmp_path / "out")) == 2000, "the records after the outage are there")
    assert worker in workers_here()
    job.stop()
    job.wait(LIMIT_S)
    assert lines(tmp_path / "out") == list(range(2000))


def test_records_that_are_gone_end_the_job_or_are_passed_over_as_asked(
    broker: Kafka, caplog: pytest.LogCaptureFixture
) -> None:
    topic = new_topic(broker)
    produce(broker, topic, numbers(100, 1))
    delete_before(broker, topic, 40)

    def read(**options: Any) -> list[bytes]:
        return collected(ps.sources.Kafka(broker.address, topic, start={(topic, 0): 10}, stop="latest", **options))

    with pytest.raises(JobFailed, match=r"should go on at offset 10, and Kafka has 40 to 100, so 30 records are gone"):
        read()
    assert read(out_of_range="earliest") == [str(number).encode() for number in range(40, 100)]
    assert read(out_of_range="latest") == []
    assert len(collected(ps.sources.Kafka(broker.address, topic, stop="latest"))) == 60  # the earliest there is


def test_a_topic_that_was_made_anew_is_refused_by_a_job_that_goes_on(broker: Kafka, tmp_path: Path) -> None:
    from confluent_kafka.admin import AdminClient

    topic = new_topic(broker)
    produce(broker, topic, numbers(10, 1))
    flow = endless(broker, topic, tmp_path / "out")
    job = ps.run(flow, workers=1, local=True, epoch_interval_s=0.1, checkpoints=tmp_path / "store")
    wait_until(lambda: len(lines(tmp_path / "out")) == 10, "the records are there")
    job.stop(savepoint=tmp_path / "savepoint")
    admin = AdminClient({"bootstrap.servers": broker.address, "log_level": 2})
    admin.delete_topics([topic], operation_timeout=30)[topic].result(60)
    wait_until(lambda: topic not in admin.list_topics(timeout=10).topics, "the topic is gone")
    broker.topic(topic)
    produce(broker, topic, numbers(100, 1))
    with pytest.raises(JobFailed, match="was deleted and made anew"):
        ps.run(flow, workers=1, local=True, checkpoints=tmp_path / "store", savepoint=tmp_path / "savepoint").wait(
            LIMIT_S
        )


def test_mistakes_are_told_before_the_job_starts(broker: Kafka) -> None:
    for arguments, message in [
        ((5, "a"), "servers=5"),
        (("b:1", []), r"topics=\[\]"),
        (("b:1", ["a", "a"]), "different names"),
    ]:
        with pytest.raises(FlowError, match=message):
            KafkaSource(*arguments)
    for options, message in [
        ({"value": "avro"}, "value='avro'; it must be 'bytes'"),
        ({"start": "newest"}, "start='newest'"),
        ({"start": "group"}, "needs the name of a consumer group"),
        ({"start": datetime(2026, 1, 1)}, "time zone"),
        ({"start": {("b", 0): 1}}, r"keys are \(topic, partition\)"),
        ({"settings": {"group.id": "x"}}, "it is the argument `group`"),
    ]:
        with pytest.raises(FlowError, match=message):
            KafkaSource("b:1", "a", **options)
    topic = new_topic(broker)
    with pytest.raises(SourceError, match="create it first"):
        KafkaSource(broker.address, "nowhere").splits(1)
    with pytest.raises(FlowError, match=r"fetch.wait.max.sm.*did you mean 'fetch.wait.max.ms'"):
        KafkaSource(broker.address, topic, settings={"fetch.wait.max.sm": 5}).splits(1)


def test_a_password_is_in_no_message_and_no_pickle(
    broker: Kafka, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", "correct horse")
    settings = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "me",
        "sasl.password": ps.secret("ENV:KAFKA_PASSWORD"),
        "socket.connection.setup.timeout.ms": 1000,
    }
    source = KafkaSource(broker.address, "a", settings=settings)
    assert b"correct horse" not in pickle.dumps(source)
    assert "correct horse" not in repr(source.settings)
    with caplog.at_level(logging.DEBUG), pytest.raises(SourceError) as caught:  # the broker takes no passwords
        source.splits(1)
    assert "correct horse" not in str(caught.value) + caplog.text
    monkeypatch.delenv("KAFKA_PASSWORD")
    with pytest.raises(FlowError, match="the environment variable KAFKA_PASSWORD is not set"):
        source.splits(1)
