"""A plain loop from topic to topic with confluent-kafka: the peer of kafka_to_kafka. It ends after `count` records."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def copy(settings: dict[str, Any]) -> None:
    """Reads a topic, and writes each record to another one: in transactions of `interval_s` seconds, or without any."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition

    source, target, left = settings["source"], settings["target"], settings["count"]
    every_s = settings["interval_s"]
    servers = {"bootstrap.servers": settings["address"], "log_level": 2}
    reading = {"group.id": target, "enable.auto.commit": False, "isolation.level": "read_committed"}
    consumer = Consumer({**servers, **reading, "fetch.wait.max.ms": 50})
    writing: dict[str, Any] = {"linger.ms": 1, "enable.idempotence": True}
    if every_s:
        writing["transactional.id"] = target
    producer = Producer({**servers, **writing})
    if every_s:
        producer.init_transactions(30)
        producer.begin_transaction()
    numbers = sorted(consumer.list_topics(source, timeout=30).topics[source].partitions)
    consumer.assign([TopicPartition(source, number, OFFSET_BEGINNING) for number in numbers])
    next_: dict[int, int] = {}
    commit_at = time.monotonic() + every_s
    while left:
        first = consumer.poll(0.005)
        if first is not None:
            messages = [first, *consumer.consume(9_999, 0)]
            producer.produce_batch(target, [{"value": message.value()} for message in messages])
            left -= len(messages)
            for message in messages:
                next_[message.partition()] = message.offset() + 1
        producer.poll(0)
        if len(producer) > 50_000:
            producer.flush(30)
        if every_s and next_ and (not left or time.monotonic() >= commit_at):
            offsets = [TopicPartition(source, number, offset) for number, offset in next_.items()]
            producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), 30)
            producer.commit_transaction(30)
            producer.begin_transaction()
            next_.clear()
            commit_at = time.monotonic() + every_s
    producer.flush(30)


if __name__ == "__main__":
    copy(json.loads(sys.argv[1]))
