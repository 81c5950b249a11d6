"""Commits and fences transactions of Kafka in a process that has not begun them.

A transaction that a producer has flushed can be committed by any process that knows its transactional id, its producer
id and epoch. Kafka's answers to a commit do not tell a transaction that was committed before from one that was aborted.
The coordinator tells this of the last transaction, and the records of an earlier one do: those that a reader of
committed records gets are committed. Such a reader stops at the first open transaction of the partition, which may wait
for this very commit, so a commit must not wait for readers where the coordinator knows. A transaction must never be
committed by its ids alone, because another transaction may have begun under the same ids since.

confluent-kafka has no request for this, so kafka-python sends these few requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.connectors.kafka import client
from penstock.runtime.errors import FlowError, PenstockError
from penstock.runtime.secrets import resolved

# How the settings of librdkafka are called in kafka-python.
_NAMES = {
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
    "ssl.ca.location": "ssl_cafile",
    "ssl.certificate.location": "ssl_certfile",
    "ssl.key.location": "ssl_keyfile",
    "ssl.key.password": "ssl_password",
}
#: For how long Kafka may take to make the outcome of a transaction visible.
_OUTCOME_S = 10.0


@dataclass(frozen=True)
class Transaction:
    """A flushed transaction, as another process needs it to commit it. `records` has the offsets of one of its records
    in each of some partitions, by (topic, partition); it is never empty."""

    id: str
    producer_id: int
    producer_epoch: int
    records: dict[tuple[str, int], int]

    def __str__(self) -> str:
        where = ", ".join(f"{topic}-{number} at offset {at:,}" for (topic, number), at in sorted(self.records.items()))
        return f"transaction {self.id!r} (records in {where})"


class Lost(PenstockError):
    """The records of a transaction that was prepared are lost, because Kafka has aborted it."""


class Transactions:
    """The transactions of a cluster. Only one thread at a time may call this. `what` begins all messages."""

    def __init__(self, servers: str, settings: Mapping[str, Any], what: str) -> None:
        self._servers = servers
        self._settings = settings
        self._what = what
        self._admin: Any = None

    def close(self) -> None:
        """Closes the connections."""
        admin, self._admin = self._admin, None
        if admin is not None:
            admin.close()

    def commit(self, transaction: Transaction) -> None:
        """Commits a transaction, unless it is committed. Raises Lost when it was aborted, and ConnectionError when
        Kafka does not say."""
        deadline = time.monotonic() + _OUTCOME_S
        while True:
            known = self._known(transaction)
            if known == "open":
                if self._end(transaction):
                    return
            else:
                # The coordinator knows the last transaction of the ids only. Its records tell of an earlier one, once
                # no transaction is open that began before them in their partition.
                outcome = known or self._outcome(transaction)
                if outcome == "committed":
                    return
                if outcome == "aborted":
                    raise Lost(
                        f"{self._what}: Kafka has aborted {transaction}, although it was prepared, so its records are "
                        "lost. The job was away for longer than transaction_timeout_s, or another producer used its "
                        "transactional id"
                    )
            if time.monotonic() > deadline:
                raise ConnectionError(f"{self._what}: Kafka does not say whether {transaction} is committed")
            time.sleep(0.02)

    def identity(self, id_: str) -> tuple[int, int]:
        """Returns the producer id and epoch that a transactional id has now."""
        found = self._ask(lambda admin: admin.describe_transactions([id_]))[id_]
        return found.producer_id, found.producer_epoch

    def open_ids(self) -> list[str]:
        """Returns the transactional ids with an open transaction, of all producers that this user may see."""

        def ask(admin: Any) -> Any:
            brokers = [broker["broker_id"] for broker in admin.describe_cluster()["brokers"]]
            return admin.list_transactions(broker_ids=brokers, state_filters=["Ongoing"])

        return [row.transactional_id for of_broker in self._ask(ask).values() for row in of_broker]

    def fence(self, id_: str) -> None:
        """Ends the open transaction of a transactional id by aborting it, and locks out the producer that began it."""
        producer = client.make("Producer", self._servers, {**self._settings, "transactional.id": id_}, self._what)
        try:
            producer.init_transactions(client.REQUEST_S)
        except client.library().KafkaException as error:
            raise ConnectionError(f"{self._what}: {id_!r} cannot be fenced: {client.words(error)}") from error

    # --- what Kafka knows -----------------------------------------------------------------------------------------

    def _outcome(self, transaction: Transaction) -> str:
        """Returns "committed" or "aborted", or "open" when readers of committed records cannot know yet."""
        deleted = []
        for (topic, number), offset in transaction.records.items():
            if self._stable_end(topic, number) <= offset:
                continue
            found = self._next_committed(topic, number, offset)
            if found is not None:
                return "committed" if found == offset else "aborted"
            deleted.append(f"{topic}-{number}")
        if len(deleted) < len(transaction.records):
            return "open"
        raise Lost(
            f"{self._what}: it cannot be known whether Kafka has committed {transaction}, because the records are "
            f"deleted in {', '.join(deleted)}"
        )

    def _stable_end(self, topic: str, number: int) -> int:
        """Returns the offset of the first record of a partition whose outcome is not known yet, or its end."""
        from confluent_kafka.admin import OffsetSpec

        kafka = client.library()
        admin = client.make("AdminClient", self._servers, self._settings, self._what)
        partition = kafka.TopicPartition(topic, number)
        try:
            [answer] = admin.list_offsets(
                {partition: OffsetSpec.latest()},
                isolation_level=kafka.IsolationLevel.READ_COMMITTED,
                request_timeout=client.REQUEST_S,
            ).values()
            return int(answer.result(2 * client.REQUEST_S).offset)
        except kafka.KafkaException as error:
            raise ConnectionError(f"{self._what}: Kafka does not answer: {client.words(error)}") from error

    def _next_committed(self, topic: str, number: int, offset: int) -> int | None:
        """Returns the offset of the first committed record of a partition from this offset on, or its end. None: Kafka
        has deleted records after this offset."""
        kafka = client.library()
        consumer = client.consumer(self._servers, self._settings, self._what, ends=True)
        try:
            consumer.assign([kafka.TopicPartition(topic, number, offset)])
            message = consumer.poll(client.REQUEST_S)
        finally:
            consumer.close()
        error = None if message is None else message.error()
        if message is not None and (error is None or error.code() == kafka.KafkaError._PARTITION_EOF):
            return int(message.offset())
        if error is not None and error.code() == kafka.KafkaError._AUTO_OFFSET_RESET:
            return None
        said = "it does not answer" if error is None else error.str()
        raise ConnectionError(f"{self._what}: partition {topic}-{number} cannot be read: {said}")

    def _known(self, transaction: Transaction) -> str | None:
        """Returns "open" or "committed" if the coordinator knows. Nobody aborts a transaction of a writer without
        giving its producer a new epoch, so a producer with the same epoch has committed."""
        from kafka.errors import TransactionalIdNotFoundError

        def describe(admin: Any) -> Any:
            try:
                return admin.describe_transactions([transaction.id])[transaction.id]
            except TransactionalIdNotFoundError:
                return None  # it is forgotten after a week

        found = self._ask(describe)
        if found is None:
            return None
        if (found.producer_id, found.producer_epoch) != (transaction.producer_id, transaction.producer_epoch):
            return None
        state = found.state.value
        if state == "Ongoing":
            return "open" if self._is_open(transaction) else "committed"
        return "committed" if state in ("PrepareCommit", "CompleteCommit") else None

    def _is_open(self, transaction: Transaction) -> bool:
        """Returns whether the open transaction of this producer is this one, and not a later one."""
        from kafka import TopicPartition

        (topic, number), offset = next(iter(transaction.records.items()))
        partition = TopicPartition(topic, number)
        state = self._ask(lambda admin: admin.describe_producers([partition]))[partition]
        return any(
            one.producer_id == transaction.producer_id
            and one.producer_epoch == transaction.producer_epoch
            and 0 <= one.current_transaction_start_offset <= offset
            for one in state.active_producers
        )

    def _end(self, transaction: Transaction) -> bool:
        """Asks the coordinator to commit an open transaction. Returns whether it has done so."""
        from kafka.errors import for_code
        from kafka.protocol.metadata import CoordinatorType
        from kafka.protocol.producer.transaction import EndTxnRequest

        async def end(admin: Any) -> Any:
            node = await admin._find_coordinator_id(transaction.id, key_type=CoordinatorType.TRANSACTION)
            request = EndTxnRequest(
                transactional_id=transaction.id,
                producer_id=transaction.producer_id,
                producer_epoch=transaction.producer_epoch,
                committed=True,
                max_version=4,  # from version 5 on, the epoch of the producer would change
            )
            return await admin._manager.send(request, node_id=node)

        def ask(admin: Any) -> int:
            code = int(admin._manager.run(end, admin).error_code)
            if code and getattr(for_code(code), "retriable", False):
                raise for_code(code)()
            return code

        return bool(self._ask(ask) == 0)

    def _ask(self, question: Any) -> Any:
        """Returns the answer to a question to kafka-python's client. Raises ConnectionError when there is none."""
        from kafka.errors import KafkaError

        try:
            if self._admin is None:
                self._admin = self._connect()
            return question(self._admin)
        except KafkaError as error:
            self.close()  # it remembers where coordinators were
            raise ConnectionError(f"{self._what}: Kafka does not answer: {type(error).__name__} {error}") from error

    def _connect(self) -> Any:
        try:
            from kafka import KafkaAdminClient
        except ImportError as error:
            raise FlowError(
                f"{self._what}: writing exactly once needs the client library kafka-python beside confluent-kafka: "
                "pip install 'penstock-streaming[kafka]'"
            ) from error
        logging.getLogger("kafka").setLevel(logging.CRITICAL)  # the errors that count are raised
        settings = resolved(self._settings)
        known = {_NAMES[name]: value for name, value in settings.items() if name in _NAMES}
        if settings.get("ssl.endpoint.identification.algorithm") == "none":
            known["ssl_check_hostname"] = False
        return KafkaAdminClient(
            bootstrap_servers=self._servers.split(","), request_timeout_ms=int(client.REQUEST_S * 1000), **known
        )
