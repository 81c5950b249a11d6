"""The writers of a Kafka topic, and the committer of their transactions.

Nothing in the loop of a worker waits for a broker, but for room in the client library's queue when this is full.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.connectors.kafka import client
from penstock.connectors.kafka.formats import encoder
from penstock.connectors.kafka.transactions import Transaction
from penstock.runtime.calls import done
from penstock.runtime.errors import PenstockError
from penstock.runtime.sinks.base import Committable, SinkCommitter, SinkContext, SinkWriter

if TYPE_CHECKING:
    from penstock.connectors.kafka.sink import Kafka

# For how long a full queue is waited for.
_FULL_S = 60.0
# The most messages in the client's queue, which would take more, and in one list that it is given.
_QUEUE, _BATCH = 90_000, 1_000
_QUEUE_BYTES = 256 << 20

#: The producers of this process that have a flushed transaction, by its transactional id, and the ids of those that
#: have failed and cannot be used again.
_flushed: dict[str, Any] = {}
_failed: set[str] = set()


class KafkaWriter(SinkWriter):
    """Writes records that are visible at once."""

    def __init__(self, sink: Kafka, context: SinkContext) -> None:
        self._encoder = Encoder(sink, context)
        self._outgoing = Outgoing(sink)
        self._context = context
        self._producer = sink.producer()

    def write(self, records: list[Any]) -> None:
        self._outgoing.produce(self._producer, self._encoder.encoded(records))

    def finish(self) -> None:
        if not self._context.epochs:
            self._outgoing.flush(self._producer)

    def prepare(self, epoch: int) -> Future[None]:
        return self._context.beside("flushing", lambda: self._outgoing.flush(self._producer))

    def close(self, failed: bool) -> None:
        self._producer.purge(blocking=False)


class Encoder:
    """Makes the messages for the records of one task."""

    def __init__(self, sink: Kafka, context: SinkContext) -> None:
        self._value = encoder(sink.value)
        self._key = _key_of(sink.key)
        self._headers = sink.headers
        self._errors = context.errors

    def encoded(self, records: list[Any]) -> list[dict[str, Any]]:
        """Returns the messages for records. A record that cannot be encoded is a failed one."""
        value, key, headers = self._value, self._key, self._headers
        out: list[dict[str, Any]] = []
        for record in records:
            try:
                message: dict[str, Any] = {"value": None if record is None else value(record)}
                if key is not None:
                    message["key"] = key(record)
                if headers is not None:
                    message["headers"] = headers(record)
            except Exception as error:  # of the record or of the user's function
                self._errors.handle(record, error)
                continue
            out.append(message)
        return out


class Outgoing:
    """Hands messages to a producer. `last` has the offset of the last record of which a report was asked for, by
    (topic, partition)."""

    def __init__(self, sink: Kafka) -> None:
        self._topic = sink.topic
        self._what = sink.describe()
        self._has_headers = sink.headers is not None
        self._purged = client.library().KafkaError._PURGE_QUEUE
        self._failure: str | None = None
        self._handed = 0  # bytes that the producer was given since its queue was empty
        self.last: dict[tuple[str, int], int] = {}

    def produce(self, producer: Any, messages: list[dict[str, Any]]) -> None:
        """Hands messages to a producer. Waits while its queue is full."""
        self._raise_failure()
        if not messages:
            return
        if self._has_headers:
            for message in messages:
                self._wait_for_room(producer, _QUEUE - 1, _size(message))
                producer.produce(self._topic, on_delivery=self._reported, **message)
        else:
            # The report about one record of each list is enough to find the transaction by it.
            messages[-1]["callback"] = self._reported
            self._produce_batch(producer, messages)
        producer.poll(0)

    def _produce_batch(self, producer: Any, messages: list[dict[str, Any]]) -> None:
        for first in range(0, len(messages), _BATCH):
            part = messages[first : first + _BATCH]
            # A queue that is full in the middle of a list would take later messages before earlier ones.
            self._wait_for_room(producer, _QUEUE - len(part), sum(map(_size, part)))
            producer.produce_batch(self._topic, part, on_delivery=self._failed)
            refused = next((message["_error"] for message in part if "_error" in message), None)
            if refused is not None:
                raise PenstockError(f"{self._what}: the client does not take a record: {refused}")

    def _wait_for_room(self, producer: Any, most: int, size: int) -> None:
        """Waits until the queue of a producer has at most `most` messages, and room for `size` bytes."""
        deadline = time.monotonic() + _FULL_S
        if not len(producer):
            self._handed = 0
        elif self._handed + size > _QUEUE_BYTES:
            most = 0
        while len(producer) > most:
            producer.poll(0.05)
            self._raise_failure()
            if time.monotonic() > deadline:
                raise PenstockError(f"{self._what}: the brokers have taken no records for {_FULL_S:g} s")
        self._handed = size + (self._handed if most else 0)

    def flush(self, producer: Any) -> None:
        """Waits until the brokers have all records. Raises ConnectionError when they have not taken them yet."""
        try:
            left = producer.flush(client.REQUEST_S)
        except SystemError as error:  # the library has called a report while an error of its own was set
            self._raise_failure()
            raise PenstockError(f"{self._what}: the client could not write: {error.__cause__ or error}") from error
        self._raise_failure()
        if left:
            raise ConnectionError(f"{self._what}: the brokers have not taken {left:,} records yet")

    def _reported(self, error: Any, message: Any) -> None:
        if error is None:
            self.last[message.topic(), message.partition()] = message.offset()
        else:
            self._failed(error, message)

    def _failed(self, error: Any, message: Any) -> None:
        if error is not None and error.code() != self._purged:
            self._failure = error.str()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise PenstockError(f"{self._what}: a record could not be written: {self._failure}")


def _size(message: dict[str, Any]) -> int:
    return len(message["value"] or b"") + len(message.get("key") or b"")


def _key_of(key: Any) -> Callable[[Any], bytes | None] | None:
    """Returns the function that gives the bytes of a record's key."""
    if key is None:
        return None
    take = key if callable(key) else lambda record: record[key]

    def encoded(record: Any) -> bytes | None:
        found = take(record)
        if found is None or isinstance(found, bytes):
            return found
        return found.encode() if isinstance(found, str) else msgspec.json.encode(found)

    return encoded


class _Open:
    """The transaction of the epoch that is being written. Its producer may not be ready yet; until then its messages
    are held."""

    def __init__(self, producer: Future[tuple[str, Any]], outgoing: Outgoing) -> None:
        self.producer = producer
        self.outgoing = outgoing
        self.held: list[list[dict[str, Any]]] = []

    def hand_over(self) -> None:
        """Hands the held messages to the producer, which is ready."""
        _, producer = self.producer.result()
        while self.held:
            self.outgoing.produce(producer, self.held[0])
            del self.held[0]


def _begun(producer: Any) -> Any:
    producer.begin_transaction()
    return producer


class TransactionalWriter(SinkWriter):
    """Writes the records of each epoch in a transaction of its own."""

    def __init__(self, sink: Kafka, context: SinkContext) -> None:
        self._sink = sink
        self._context = context
        self._begin = f"penstock/{context.job}/{context.operator}/"
        self._made = 0  # transactional ids of this writer so far
        self._free: deque[tuple[str, Any]] = deque()
        self._flushing: dict[int, str] = {}  # by epoch: the id of the transaction that was prepared for it
        self._cooling: deque[tuple[int, str]] = deque()  # committed; may be listed by the epochs up to this one
        self._producers: dict[str, tuple[Any, int, int]] = {}  # by id: the producer with its own id and epoch
        self._prepared = 0
        self._open: _Open | None = None
        self._flush_before: Future[Transaction] | None = None
        self._encoder = Encoder(sink, context)
        if context.index == 0 or context.generation > 1:
            context.beside("ending earlier transactions", self._fence)

    # --- writing ----------------------------------------------------------------------------------------------------

    def write(self, records: list[Any]) -> None:
        messages = self._encoder.encoded(records)
        if not messages:
            return
        if self._open is None:
            self._open = _Open(self._begin_transaction(), Outgoing(self._sink))
        self._open.held.append(messages)
        self.flush()

    def flush(self) -> None:
        if self._open is not None and self._open.producer.done():
            self._open.hand_over()

    def _begin_transaction(self) -> Future[tuple[str, Any]]:
        """Begins the transaction of the next epoch. Its producer is ready when the one before is flushed: else the
        records of the later epoch might come first in their partition."""
        if not self._free:
            return self._context.beside("beginning a transaction", self._make)
        id_, producer = self._free.popleft()
        if self._flush_before is None or self._flush_before.done():
            return done((id_, _begun(producer)))
        return self._context.beside("beginning a transaction", lambda: (id_, _begun(producer)))

    def _make(self) -> tuple[str, Any]:
        """Makes a producer, and begins its transaction. It is called beside the loop. Each try has an id of its own,
        because the producer of a try that has failed may still be asking for its id, which would lock out the next."""
        sink, context = self._sink, self._context
        id_ = f"{self._begin}{context.run}/{context.index}/{context.generation}/{self._made}"
        self._made += 1
        timeout_ms = int(sink.transaction_timeout_s * 1000)
        producer = sink.producer(**{"transactional.id": id_, "transaction.timeout.ms": timeout_ms})
        try:
            producer.init_transactions(client.REQUEST_S)
        except client.library().KafkaException as error:
            raise _outside(sink.describe(), error) from error
        with closing(sink.transactions()) as transactions:
            self._producers[id_] = (producer, *transactions.identity(id_))
        return id_, _begun(producer)

    # --- the two phases ---------------------------------------------------------------------------------------------

    def prepare(self, epoch: int) -> Future[Transaction] | None:
        self._prepared = epoch
        writing, self._open = self._open, None
        if writing is None:
            return None
        self._flush_before = self._context.beside("flushing", lambda: self._flush(epoch, writing))
        return self._flush_before

    def _flush(self, epoch: int, writing: _Open) -> Transaction:
        """Has the brokers take the records of a transaction. It is called beside the loop."""
        id_, producer = writing.producer.result()
        writing.hand_over()
        writing.outgoing.flush(producer)
        if not writing.outgoing.last:
            raise PenstockError(f"{self._sink.describe()}: the client did not report where records are")
        _, producer_id, producer_epoch = self._producers[id_]
        _flushed[id_] = producer
        self._flushing[epoch] = id_
        return Transaction(id_, producer_id, producer_epoch, dict(writing.outgoing.last))

    def committed(self, epoch: int) -> None:
        for one in sorted(number for number in self._flushing if number <= epoch):
            # The epochs that are prepared from now on do not list it.
            self._cooling.append((self._prepared, self._flushing.pop(one)))
        while self._cooling and self._cooling[0][0] < epoch:
            _, id_ = self._cooling.popleft()
            if id_ not in _failed:
                self._free.append((id_, self._producers[id_][0]))

    def _fence(self) -> None:
        """Ends the open transactions of earlier writers of this task, and of tasks and runs that are gone, so that they
        hold up no reader. What they had prepared is committed by now, or was given up."""
        context = self._context
        store = context.run.partition("-")[0]  # a run with another store may be alive
        with closing(self._sink.transactions()) as transactions:
            for id_ in transactions.open_ids():
                if not id_.startswith(f"{self._begin}{store}-"):
                    continue
                run, index, generation, _ = id_[len(self._begin) :].split("/")
                earlier = int(index) == context.index and int(generation) < context.generation
                removed = context.index == 0 and int(index) >= context.parallelism
                if earlier or removed if run == context.run else context.index == 0:
                    transactions.fence(id_)

    def close(self, failed: bool) -> None:
        for id_, (producer, _, _) in self._producers.items():
            _flushed.pop(id_, None)
            _failed.discard(id_)
            producer.purge(blocking=False)  # what was not prepared is written again


class TransactionCommitter(SinkCommitter):
    """Commits transactions: by the producer that has flushed it, if it is in this process, and else by its ids."""

    def __init__(self, sink: Kafka) -> None:
        self._what = sink.describe()
        self._transactions = sink.transactions()

    def commit(self, committables: list[Committable]) -> None:
        for one in committables:
            transaction: Transaction = one.data
            producer = _flushed.get(transaction.id)
            if producer is None:
                self._transactions.commit(transaction)
            else:
                self._commit_by(producer, transaction)

    def _commit_by(self, producer: Any, transaction: Transaction) -> None:
        try:
            producer.commit_transaction(client.REQUEST_S)
        except client.library().KafkaException as error:
            inner = error.args[0]
            if inner.retriable():
                raise ConnectionError(f"{self._what}: {client.words(error)}") from error
            _failed.add(transaction.id)
            self._transactions.commit(transaction)
        _flushed.pop(transaction.id, None)

    def close(self) -> None:
        self._transactions.close()


def _outside(what: str, error: Any) -> Exception:
    """Returns the error for one of the library: one that may pass, or a failure."""
    inner = error.args[0]
    if inner.retriable() or not inner.fatal():
        return ConnectionError(f"{what}: {client.words(error)}")
    return PenstockError(f"{what}: {client.words(error)}")
