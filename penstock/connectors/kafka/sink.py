"""Writes to a topic of Apache Kafka, exactly once by a transaction for each epoch.

A writer goes on writing while earlier epochs wait for their commit, so it has several producers, each with a
transactional id of its own. An id is used again only when its last transaction is committed, and no epoch that the job
may go back to lists the transaction as one to be committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.connectors.kafka import client
from penstock.connectors.kafka.formats import Format, check
from penstock.runtime.errors import FlowError, SourceError, shorten
from penstock.runtime.sinks.base import Guarantee, Sink, SinkCommitter, SinkContext, SinkWriter
from penstock.runtime.units import choice, seconds

if TYPE_CHECKING:
    from penstock.connectors.kafka.transactions import Transactions

Key = str | Callable[[Any], Any] | None


class Kafka(Sink):
    """Writes records to a topic of Apache Kafka. Needs the extra "kafka", and brokers from version 3.0 on.

        orders.write(ps.sinks.Kafka("localhost:9092", "orders", value="json", key="customer"))

    `servers`: brokers, as "host:9092" or a list of such texts. `topic`: its name. `value`: how a record becomes bytes:
    "json", "text", "bytes", or a function that takes the record; a record that is None, and a function that returns
    None, is a tombstone. `key`: the name of a field of the records, or a function that takes the record, or None.
    A key that is no str and no bytes is written as JSON. `headers`: a function that takes the record and returns
    pairs of a name and bytes. Records of one key go to one partition, by the hash that Kafka's own clients use.

    `guarantee`: "exactly once" (the default): the records of an epoch are one transaction of each task, which is
    committed when the epoch is complete, so that readers of committed records see each record once and after at most
    about one `epoch_interval_s`. "at least once": records are visible at once, and those since the last epoch come
    again after a failure. "idempotent": the same, for topics in which the last record of a key counts. A job without
    epochs writes at least once.

    `transaction_timeout_s`: after this time Kafka aborts a transaction that was prepared and not committed, and its
    records are lost, which ends the job by an error. It is also the time for which a job that died and is not resumed
    may hold up readers of committed records. It must be longer than the longest recovery, and not above the brokers'
    transaction.max.timeout.ms. `settings`: further settings of the client library (librdkafka).

    Errors: FlowError for arguments that are not right and topics that are not there; JobFailed when a transaction was
    lost, or a record is too large. While no broker answers, writing is tried again for a minute.
    """

    takes_back = False

    def __init__(
        self,
        servers: str | list[str],
        topic: str,
        *,
        value: Format = "json",
        key: Key = None,
        headers: Callable[[Any], list[tuple[str, bytes]]] | None = None,
        guarantee: Guarantee = "exactly once",
        transaction_timeout_s: float = 600.0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.servers = client.check_servers(servers, "sinks.Kafka")
        if not isinstance(topic, str) or not topic:
            raise FlowError(f"sinks.Kafka: topic={shorten(topic)}; give the name of a topic")
        self.topic = topic
        check(value, "sinks.Kafka: value")
        self.value = value
        if key is not None and not callable(key) and not isinstance(key, str):
            raise FlowError(f"sinks.Kafka: key={shorten(key)}; it must be the name of a field, a function, or None")
        self.key = key
        if headers is not None and not callable(headers):
            raise FlowError(f"sinks.Kafka: headers={shorten(headers)}; it must be a function that takes a record")
        self.headers = headers
        choice(guarantee, "sinks.Kafka: guarantee", ("exactly once", "idempotent", "at least once"))
        if guarantee == "idempotent" and key is None:
            raise FlowError("sinks.Kafka: guarantee='idempotent' needs a key, because the last record of a key counts")
        self.guarantee = guarantee
        self.transaction_timeout_s = seconds(transaction_timeout_s, "sinks.Kafka: transaction_timeout_s")
        self.settings = client.check_settings(settings, "sinks.Kafka")

    def writer(self, context: SinkContext) -> SinkWriter:
        from penstock.connectors.kafka.writer import KafkaWriter, TransactionalWriter

        transactional = context.epochs and self.guarantee == "exactly once"
        return (TransactionalWriter if transactional else KafkaWriter)(self, context)

    def committer(self, context: SinkContext) -> SinkCommitter:
        from penstock.connectors.kafka.writer import TransactionCommitter

        return TransactionCommitter(self)

    def check(self) -> None:
        admin = client.make("AdminClient", self.servers, self.settings, self.describe())
        try:
            client.partitions(admin, [self.topic], self.describe())
        except SourceError as error:
            raise FlowError(str(error)) from error

    def producer(self, **more: Any) -> Any:
        """Makes a producer of the client library."""
        settings = {
            "enable.idempotence": True,
            "linger.ms": 1,
            "partitioner": "murmur2_random",
            **self.settings,
            **more,
        }
        return client.make("Producer", self.servers, settings, self.describe())

    def transactions(self) -> Transactions:
        """Makes the view of the cluster's transactions; the caller closes it."""
        from penstock.connectors.kafka.transactions import Transactions

        return Transactions(self.servers, self.settings, self.describe())

    def describe(self) -> str:
        return f"Kafka({self.servers!r}, {self.topic!r})"

    def __repr__(self) -> str:
        return self.describe()
