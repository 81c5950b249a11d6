"""Writes records into topics of a real broker, and reads them, without Penstock."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
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
    from confluent_kafka import Producer

    settings = {"bootstrap.servers": kafka.address, "transactional.id": uuid.uuid4().hex, "log_level": 2}
    producer = Producer(settings)
    producer.init_transactions(60)
    producer.begin_transaction()
    for partition, value in records:
        producer.produce(topic, value, partition=partition)
    producer.flush(60)
    producer.commit_transaction(60) if commit else producer.abort_transaction(60)
