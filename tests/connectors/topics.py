"""Writes records into topics of a real broker, and reads them, without Penstock."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from tests.servers.kafka import Kafka


def new_topic(kafka: Kafka, partitions: int = 1, **settings: str) -> str:
    """Makes a topic of a name of its own, and returns the name."""
    name = f"topic-{uuid.uuid4().hex[:12]}"
    kafka.topic(name, partitions, **settings)
    return name


def produce(kafka: Kafka, topic: str, records: Iterable[tuple[int, bytes | None]], **more: Any) -> None:
    """Writes values into partitions, in order; returns when the broker has them. `more` goes to each record."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": kafka.address, "linger.ms": 5, "log_level": 2})
    for number, (partition, value) in enumerate(records):
        producer.produce(topic, value, partition=partition, **more)
        if number % 1000 == 0:
            producer.poll(0)
    assert producer.flush(60) == 0


def transaction(kafka: Kafka, topic: str, records: Iterable[tuple[int, bytes]], *, commit: bool) -> None:
    """Writes values into partitions in one transaction."""
    producer = producer_of(kafka, uuid.uuid4().hex)
    producer.begin_transaction()
    for partition, value in records:
        producer.produce(topic, value, partition=partition)
    producer.flush(60)
    producer.commit_transaction(60) if commit else producer.abort_transaction(60)


def producer_of(kafka: Kafka, id_: str) -> Any:
    """Makes a producer with a transactional id, which fences earlier ones."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": kafka.address, "transactional.id": id_, "log_level": 2})
    producer.init_transactions(60)
    return producer


def committed(
    kafka: Kafka, topic: str, until: Callable[[], bool] = lambda: True, limit_s: float = 180.0
) -> list[bytes | None]:
    """Returns the values that a reader of committed records sees in a topic, partition by partition, in order. It reads
    until it is at the end and a condition holds."""
    return [message.value() for message in committed_messages(kafka, topic, until, limit_s)]


def committed_messages(
    kafka: Kafka, topic: str, until: Callable[[], bool] = lambda: True, limit_s: float = 180.0
) -> list[Any]:
    """Returns the messages that a reader of committed records sees in a topic; as `committed`."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

    consumer = Consumer(
        {
            "bootstrap.servers": kafka.address,
            "group.id": uuid.uuid4().hex,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "log_level": 2,
        }
    )
    deadline = time.monotonic() + limit_s
    try:
        numbers = sorted(consumer.list_topics(topic, timeout=30).topics[topic].partitions)
        while True:
            holds = until()
            found: dict[int, list[Any]] = {number: [] for number in numbers}
            consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in numbers])
            reading = set(numbers)
            while reading:
                for message in consumer.consume(1000, 0.2):
                    if message.error() is None:
                        found[message.partition()].append(message)
                    elif message.error().code() == KafkaError._PARTITION_EOF:
                        reading.discard(message.partition())
                assert time.monotonic() < deadline, f"the end of {topic} is not reached"
            if holds:
                return [message for number in numbers for message in found[number]]
            time.sleep(0.05)
    finally:
        consumer.close()


def delete_before(broker: Kafka, topic: str, offset: int) -> None:
    """Deletes the records of partition 0 before an offset."""
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": broker.address, "log_level": 2})
    for answer in admin.delete_records([TopicPartition(topic, 0, offset)]).values():
        answer.result(60)
