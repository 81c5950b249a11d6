"""Transactions of Kafka that a process commits which has not begun them, against a real broker."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from penstock.connectors.kafka.transactions import Lost, Transaction, Transactions
from tests.connectors.topics import committed, delete_before, new_topic, producer_of, transaction
from tests.servers.kafka import Kafka

# Begins a transaction, writes records, waits until the broker has them, and dies.
PROGRAM = """
import json, os, signal, sys
from confluent_kafka import Producer
servers, id_, topic, count, timeout_ms = sys.argv[1:]
settings = {"bootstrap.servers": servers, "transactional.id": id_, "transaction.timeout.ms": int(timeout_ms)}
producer = Producer({**settings, "log_level": 2})
producer.init_transactions(60)
producer.begin_transaction()
at = {}
def reported(error, message):
    assert error is None, error
    at[message.partition()] = message.offset()
for number in range(int(count)):
    producer.produce(topic, str(number), partition=number % 2, on_delivery=reported)
assert producer.flush(60) == 0
print(json.dumps(at), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def transactions(broker: Kafka) -> Iterator[Transactions]:
    made = Transactions(broker.address, {}, "the sink")
    yield made
    made.close()


def of_dead_process(
    broker: Kafka, transactions: Transactions, topic: str, count: int = 10, timeout_ms: int = 60_000
) -> Transaction:
    """Returns a transaction that a process has flushed that was killed then."""
    id_ = f"dead-{uuid.uuid4().hex}"
    command = [sys.executable, "-c", PROGRAM, broker.address, id_, topic, str(count), str(timeout_ms)]
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert told.stdout, told.stderr
    records = {(topic, int(number)): offset for number, offset in json.loads(told.stdout).items()}
    return Transaction(id_, *transactions.identity(id_), records)


def test_another_process_commits_a_transaction_and_again_to_no_effect(
    broker: Kafka, transactions: Transactions
) -> None:
    topic = new_topic(broker, 2)
    dead = of_dead_process(broker, transactions, topic)
    assert committed(broker, topic) == []
    transactions.commit(dead)
    assert sorted(committed(broker, topic)) == sorted(str(number).encode() for number in range(10))
    transactions.commit(dead)
    assert len(committed(broker, topic)) == 10


def test_a_transaction_that_is_committed_is_told_from_a_later_one_of_its_producer(
    broker: Kafka, transactions: Transactions
) -> None:
    topic = new_topic(broker, 2)
    id_ = uuid.uuid4().hex
    producer = producer_of(broker, id_)
    at: dict[tuple[str, int], int] = {}
    producer.begin_transaction()
    producer.produce(
        topic, b"1", partition=0, on_delivery=lambda error, message: at.update({(topic, 0): message.offset()})
    )
    producer.flush(60)
    first = Transaction(id_, *transactions.identity(id_), at)
    producer.commit_transaction(60)
    producer.begin_transaction()
    producer.produce(topic, b"2", partition=0)
    producer.flush(60)
    transactions.commit(first)  # it is committed; the one that is open must stay open
    assert committed(broker, topic) == [b"1"]
    producer.commit_transaction(60)
    assert committed(broker, topic) == [b"1", b"2"]


def test_a_transaction_that_was_fenced_before_is_lost_and_named(broker: Kafka, transactions: Transactions) -> None:
    topic = new_topic(broker, 2)
    dead = of_dead_process(broker, transactions, topic)
    assert dead.id in transactions.open_ids()
    transactions.fence(dead.id)
    assert dead.id not in transactions.open_ids()
    with pytest.raises(Lost, match=rf"aborted transaction '{dead.id}' \(records in {topic}-0 at offset 4"):
        transactions.commit(dead)
    assert committed(broker, topic) == []


def test_a_transaction_that_kafka_aborted_after_its_time_is_lost(broker: Kafka, transactions: Transactions) -> None:
    topic = new_topic(broker, 2)
    dead = of_dead_process(broker, transactions, topic, timeout_ms=3_000)
    assert dead.id in transactions.open_ids()
    committed(broker, topic, until=lambda: dead.id not in transactions.open_ids())
    with pytest.raises(Lost):
        transactions.commit(dead)


def test_a_committed_transaction_stays_committed_when_its_id_is_fenced_then(
    broker: Kafka, transactions: Transactions
) -> None:
    topic = new_topic(broker, 2)
    dead = of_dead_process(broker, transactions, topic)
    transactions.commit(dead)
    transactions.fence(dead.id)
    transactions.commit(dead)
    assert len(committed(broker, topic)) == 10


def test_a_commit_does_not_wait_for_the_open_transactions_of_others(broker: Kafka, transactions: Transactions) -> None:
    # A reader of committed records stops before the first open transaction, which may wait for this very commit.
    topic = new_topic(broker, 2)
    other = producer_of(broker, uuid.uuid4().hex)
    other.begin_transaction()
    for partition in range(2):
        other.produce(topic, b"other", partition=partition)
    other.flush(60)
    dead = of_dead_process(broker, transactions, topic)
    transactions.commit(dead)
    transactions.commit(dead)
    assert committed(broker, topic) == []
    other.abort_transaction(60)
    assert len(committed(broker, topic)) == 10
    transactions.commit(dead)


def test_an_outcome_that_cannot_be_known_is_an_error(broker: Kafka, transactions: Transactions) -> None:
    topic = new_topic(broker, 2)
    transaction(broker, topic, [(0, b"1")], commit=True)
    id_ = uuid.uuid4().hex
    producer_of(broker, id_)
    producer_id, epoch = transactions.identity(id_)
    delete_before(broker, topic, 2)
    with pytest.raises(Lost, match="cannot be known"):
        transactions.commit(Transaction(id_, producer_id, epoch + 1, {(topic, 0): 0}))
