"""Reads a task's partitions by one consumer of the client library.

Its read() waits for records, so it runs in a thread of its own. An offset is changed when the records before it are
handed out, and never earlier.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from time import monotonic
from typing import TYPE_CHECKING, Any

from penstock.connectors.kafka import client
from penstock.connectors.kafka.formats import decoder
from penstock.runtime.errors import SourceError
from penstock.runtime.sources.base import Reader, SourceContext, Split

if TYPE_CHECKING:
    from penstock.connectors.kafka.source import Kafka, Partition

logger = logging.getLogger(__name__)

# How long a read waits for its first record, and how long one asks whether the brokers are there again.
_WAIT_S = 0.05
_ASK_S = 1.0
# How often the reader notes where its partitions end.
_LOOK_S = 0.25


class KafkaReader(Reader):
    """Reads partitions. Its offsets are the next offsets of Kafka; None before the first record of a partition that is
    read from its beginning."""

    blocking = True

    def __init__(self, source: Kafka, splits: list[Split], context: SourceContext) -> None:
        self._source = source
        self._errors = context.errors
        self._kafka = client.library()
        self._value, self._key = decoder(source.value), decoder(source.key)
        self._partitions: dict[tuple[str, int], Partition] = {}
        self._next: dict[tuple[str, int], int | None] = {}
        self._ended: set[str] = set()
        self._bounds: dict[tuple[str, int], tuple[int, int]] = {}  # the first offset and the end, as last seen
        self._look_at = 0.0
        self._down: str | None = None  # why no broker answers
        self._parts: list[tuple[str | None, list[Any]]] = []  # of the last read, by split
        for split in splits:
            one: Partition = split.payload
            self._partitions[one.topic, one.number] = one
            self._next[one.topic, one.number] = split.offset
            if one.stop is not None and (split.offset or 0) >= one.stop:
                self._ended.add(one.name)
        self._consumer: Any = None
        self.finished = len(self._ended) == len(self._partitions)
        if self.finished:
            return
        self._consumer = source.consumer(error_cb=self._on_error)
        try:
            self._check_identities()
            self._consumer.assign([self._position(pair) for pair in self._partitions if not self._has_ended(pair)])
        except BaseException:
            self._consumer.close()
            raise

    def read(self, limit: int) -> list[Any]:
        self._parts = []
        if self.finished:
            return []
        first = self._consumer.poll(_WAIT_S)
        if (now := monotonic()) >= self._look_at:
            self._look_at = now + _LOOK_S
            self._look()
        if first is None:
            if self._down is not None:
                self._ask()
            return []
        messages = [first]
        if limit > 1:
            messages += self._consumer.consume(limit - 1, 0)
        by_partition: dict[tuple[str, int], list[Any]] = defaultdict(list)
        told = []
        for message in messages:
            if message.error() is None:
                by_partition[message.topic(), message.partition()].append(message)
            else:
                told.append(message)
        parts = [(pair, batch, self._records(batch)) for pair, batch in self._within(by_partition)]
        for pair, batch, _ in parts:  # nothing above has changed an offset, so that a failure loses nothing
            self._next[pair] = batch[-1].offset() + 1
        self._parts = [(self._partitions[pair].name, records) for pair, _, records in parts]
        for message in told:
            self._tell(message)
        for pair, _, _ in parts:
            self._end_when_at(pair)
        self._down = None
        if len(self._parts) == 1:
            self.split = self._parts[0][0]
            return self._parts[0][1]
        self.split = None
        return [record for _, records in self._parts for record in records]

    def by_split(self, records: list[Any]) -> list[tuple[str | None, list[Any]]]:
        return self._parts

    def offsets(self) -> dict[str, Any]:
        return {self._partitions[pair].name: offset for pair, offset in self._next.items()}

    def has_ended(self, split: str) -> bool:
        return split in self._ended

    def backlog(self) -> int:
        if self.finished:
            return 0
        left = 0
        for pair, (low, high) in list(self._bounds.items()):
            position, stop = self._next[pair], self._partitions[pair].stop
            left += max(0, (high if stop is None else stop) - (low if position is None else position))
        return left

    def close(self) -> None:
        self.finished = True
        if self._consumer is not None:
            self._consumer.close()

    # --- records --------------------------------------------------------------------------------------------------

    def _within(self, by_partition: dict[tuple[str, int], list[Any]]) -> list[tuple[tuple[str, int], list[Any]]]:
        """Returns the messages of each partition that come before its stop."""
        found = []
        for pair, batch in by_partition.items():
            stop = self._partitions[pair].stop
            if stop is not None and batch[-1].offset() >= stop:
                if batch[0].offset() >= stop:
                    self._end(pair)
                else:
                    found.append((pair, [message for message in batch if message.offset() < stop]))
            else:
                found.append((pair, batch))
        return found

    def _records(self, messages: list[Any]) -> list[Any]:
        """Returns the records that messages stand for. What cannot be decoded is a failed record: its bytes."""
        value, metadata = self._value, self._source.metadata
        try:
            if metadata:
                return [self._with_metadata(message) for message in messages]
            return [None if (data := message.value()) is None else value(data) for message in messages]
        except Exception:  # of the data or of the user's function; it is found below
            pass
        records: list[Any] = []
        for message in messages:
            data = message.value()
            try:
                if metadata:
                    records.append(self._with_metadata(message))
                else:
                    records.append(None if data is None else value(data))
            except Exception as error:
                where = f"{message.topic()}-{message.partition()} at offset {message.offset()}"
                self._errors.handle(data, ValueError(f"{where}: {error}"))
        return records

    def _with_metadata(self, message: Any) -> dict[str, Any]:
        data, key = message.value(), message.key()
        return {
            "value": None if data is None else self._value(data),
            "key": None if key is None else self._key(key),
            "topic": message.topic(),
            "partition": message.partition(),
            "offset": message.offset(),
            "time_ms": message.timestamp()[1],
            "headers": message.headers() or [],
        }

    def _look(self) -> None:
        """Notes where the partitions end, from the last answers of the brokers. Only the thread that reads may ask:
        the library lets one thread at a time call a consumer, and another one waits for as long as this one polls."""
        for pair in self._partitions:
            low, high = self._consumer.get_watermark_offsets(self._kafka.TopicPartition(*pair), cached=True)
            if high >= 0:
                self._bounds[pair] = max(0, low), high

    # --- the ends of partitions, and errors -----------------------------------------------------------------------

    def _end_when_at(self, pair: tuple[str, int]) -> None:
        stop, position = self._partitions[pair].stop, self._next[pair]
        if stop is not None and position is not None and position >= stop:
            self._end(pair)

    def _end(self, pair: tuple[str, int]) -> None:
        name = self._partitions[pair].name
        if name not in self._ended:
            self._ended.add(name)
            self._consumer.incremental_unassign([self._kafka.TopicPartition(*pair)])
            self.finished = len(self._ended) == len(self._partitions)

    def _has_ended(self, pair: tuple[str, int]) -> bool:
        return self._partitions[pair].name in self._ended

    def _tell(self, message: Any) -> None:
        """Acts on a message that is no record. Raises SourceError when its partition cannot be read any more."""
        kafka, error = self._kafka, message.error()
        pair = (message.topic(), message.partition())
        code = error.code()
        if code == kafka.KafkaError._PARTITION_EOF:
            # The last offsets of a partition may be marks of transactions, which no client gets.
            stop = self._partitions[pair].stop
            if stop is not None and message.offset() >= stop:
                self._end(pair)
        elif code == kafka.KafkaError._AUTO_OFFSET_RESET:
            self._out_of_range(pair)
        elif code == kafka.KafkaError._ALL_BROKERS_DOWN:
            self._down = error.str()
        elif error.fatal() or not (error.retriable() or code == kafka.KafkaError._TRANSPORT):
            raise SourceError(f"{self._source.describe()}: reading {pair[0]}-{pair[1]} failed: {error.str()}")

    def _out_of_range(self, pair: tuple[str, int]) -> None:
        topic, number = pair
        partition = self._kafka.TopicPartition(topic, number)
        low, high = self._consumer.get_watermark_offsets(partition, timeout=client.REQUEST_S)
        wanted = self._next[pair] or 0
        lost = f"{low - wanted:,} records are gone" if wanted < low else f"{wanted - high:,} records were taken away"
        said = (
            f"{self._source.describe()}: partition {topic}-{number} should go on at offset {wanted:,}, and Kafka has "
            f"{low:,} to {high:,}, so {lost}"
        )
        if self._source.out_of_range == "fail":
            raise SourceError(
                f"{said}. Say where to go on: out_of_range='earliest' or 'latest' accepts the loss. Otherwise let the "
                "topic keep its records for longer (retention.ms)"
            )
        position = low if self._source.out_of_range == "earliest" else high
        logger.warning("%s. It goes on at offset %s, as out_of_range says", said, position)
        self._next[pair] = position
        self._consumer.incremental_unassign([partition])
        self._consumer.incremental_assign([self._position(pair)])

    def _position(self, pair: tuple[str, int]) -> Any:
        offset = self._next[pair]
        return self._kafka.TopicPartition(*pair, self._kafka.OFFSET_BEGINNING if offset is None else offset)

    def _check_identities(self) -> None:
        """Raises SourceError when a topic is not the one whose offsets were saved, but a later one of its name."""
        known = self._source.identities()
        for one in self._partitions.values():
            now = known.get(one.topic)
            if one.identity is not None and now is not None and now != one.identity:
                raise SourceError(
                    f"{self._source.describe()}: topic {one.topic!r} was deleted and made anew since the job listed "
                    "its partitions, so the saved offsets mean nothing in it. Start the job anew to read the new topic"
                )

    def _on_error(self, error: Any) -> None:
        """Takes an error of the client as a whole; the library calls it from within poll()."""
        if error.code() == self._kafka.KafkaError._ALL_BROKERS_DOWN:
            self._down = error.str()

    def _ask(self) -> None:
        """Raises ConnectionError while no broker answers."""
        try:
            self._consumer.list_topics(next(iter(self._partitions))[0], timeout=_ASK_S)
        except self._kafka.KafkaException as error:
            raise ConnectionError(f"{self._source.servers}: {client.words(error)}") from error
        self._down = None
