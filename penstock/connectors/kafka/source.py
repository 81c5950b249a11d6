"""Reads topics of Apache Kafka: each partition is a split, and its offset is the next record's offset in Kafka.

The offsets belong to the epochs of the job, and Kafka's consumer groups do not divide the partitions. A record must
never be skipped in silence: an offset that Kafka no longer has, or a topic that was made anew, is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from penstock.connectors.kafka import client
from penstock.connectors.kafka.formats import Format, check
from penstock.runtime.errors import FlowError, SourceError, shorten
from penstock.runtime.event_time.watermark import as_ms
from penstock.runtime.sources.base import Reader, Source, SourceContext, Split
from penstock.runtime.units import choice, flag, is_whole

Start = Literal["earliest", "latest", "group"] | int | datetime | Mapping[tuple[str, int], int]


@dataclass(frozen=True)
class Partition:
    """The payload of a split. `identity` is Kafka's id of the topic (None: the broker gives none), which tells a topic
    from a later one of the same name. The split ends before the offset `stop` (None: it is endless)."""

    topic: str
    number: int
    identity: str | None
    stop: int | None

    @property
    def name(self) -> str:
        """The name of the split."""
        return f"{self.topic}-{self.number}"


class Kafka(Source[Any]):
    """Reads topics of Apache Kafka, from version 0.11 on. Needs the extra "kafka".

        flow.read(ps.sources.Kafka("localhost:9092", "orders", value="json"))

    `servers`: brokers, as "host:9092" or a list of such texts. `topics`: one name, or a list of names. `value`, `key`:
    how bytes become objects: "bytes", "text" (UTF-8), "json", or a function that takes the bytes. A record of the flow
    is the value, and None for a tombstone. With `metadata` it is a dict with the fields value, key, topic, partition,
    offset, time_ms, and headers (a list of pairs of a name and bytes).

    `start`: where a job begins that has no epoch to go on from: "earliest"; "latest"; a time (a datetime with a time
    zone, or milliseconds since 1970), for the first records of that time or later; {(topic, partition): offset}, where
    partitions without an offset begin at the earliest record; or "group", for what the consumer group `group` has
    committed, where a partition without a commit begins at the earliest record. `stop`: None for an endless source, or
    "latest" for one that ends before the records that are written after the start of the job.

    `out_of_range`: what happens when Kafka no longer has the record at a saved offset: "fail" ends the job by an
    error that names the records that are missing; "earliest" and "latest" go on there, with a warning.
    `settings`: further settings of the client library (librdkafka), such as "security.protocol"; a password is
    ps.secret("ENV:NAME"). Unless it is set here, only committed records are read (isolation.level=read_committed).

    Exactly once: offsets are saved in the job's epochs. A watermark waits for each partition that it reads. The backlog
    in the job's status is the number of records between the last one read and the end of the partitions.

    Errors: FlowError for arguments that are not right; SourceError when a topic is not there, is made anew while
    the job reads it, or an offset is out of range. While no broker answers, reading is tried again for a minute, which
    the status and the log say.
    """

    bounded = False

    def __init__(
        self,
        servers: str | Sequence[str],
        topics: str | Sequence[str],
        *,
        value: Format = "bytes",
        key: Format = "bytes",
        metadata: bool = False,
        start: Start = "earliest",
        stop: Literal["latest"] | None = None,
        group: str | None = None,
        out_of_range: Literal["fail", "earliest", "latest"] = "fail",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.servers = client.check_servers(servers, "sources.Kafka")
        names = [topics] if isinstance(topics, str) else list(topics)
        if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
            raise FlowError(f"sources.Kafka: topics={shorten(topics)}; give one name, or a list of different names")
        self.topics = names
        check(value, "sources.Kafka: value")
        check(key, "sources.Kafka: key")
        self.value, self.key = value, key
        self.metadata = flag(metadata, "sources.Kafka: metadata")
        self.start = _checked_start(start, names)
        if stop is not None:
            choice(stop, "sources.Kafka: stop", ("latest",))
        self.stop = stop
        self.bounded = stop is not None
        if group is not None and (not isinstance(group, str) or not group):
            raise FlowError(f"sources.Kafka: group={shorten(group)}; it must be the name of a consumer group")
        if start == "group" and group is None:
            raise FlowError("sources.Kafka: start='group' needs the name of a consumer group: group='name'")
        self.group = group
        choice(out_of_range, "sources.Kafka: out_of_range", ("fail", "earliest", "latest"))
        self.out_of_range = out_of_range
        self.settings = client.check_settings(settings, "sources.Kafka")

    def splits(self, parallelism: int) -> list[Split]:
        kafka = client.library()
        consumer = self.consumer()
        try:
            known = client.partitions(consumer, self.topics, self.describe())
            identities = self.identities()
            pairs = [(topic, number) for topic in self.topics for number in known[topic]]
            starts = self._starts(kafka, consumer, pairs)
            ends = dict.fromkeys(pairs, None) if self.stop is None else self._ends(kafka, consumer, pairs)
        except kafka.KafkaException as error:
            raise SourceError(f"{self.describe()}: the brokers do not answer: {client.words(error)}") from error
        finally:
            consumer.close()
        found = []
        for topic, number in pairs:
            one = Partition(topic, number, identities.get(topic), ends[topic, number])
            found.append(Split(one.name, one, starts[topic, number]))
        return found

    def _starts(self, kafka: Any, consumer: Any, pairs: list[tuple[str, int]]) -> dict[tuple[str, int], int | None]:
        """Returns where each partition begins; None is its earliest record."""
        start = self.start
        if isinstance(start, Mapping):
            strange = [pair for pair in start if pair not in pairs]
            if strange:
                raise SourceError(f"{self.describe()}: start names a partition that is not there: {strange[0]}")
            return {pair: start.get(pair) for pair in pairs}
        if start == "latest":
            return dict(self._ends(kafka, consumer, pairs))
        if start == "group":
            asked = [kafka.TopicPartition(*pair) for pair in pairs]
            committed = consumer.committed(asked, timeout=client.REQUEST_S)
            return {(one.topic, one.partition): one.offset if one.offset >= 0 else None for one in committed}
        if isinstance(start, int):
            asked = [kafka.TopicPartition(*pair, start) for pair in pairs]
            found = consumer.offsets_for_times(asked, timeout=client.REQUEST_S)
            ends = self._ends(kafka, consumer, pairs)
            return {
                (one.topic, one.partition): one.offset if one.offset >= 0 else ends[one.topic, one.partition]
                for one in found
            }
        return dict.fromkeys(pairs, None)

    @staticmethod
    def _ends(kafka: Any, consumer: Any, pairs: list[tuple[str, int]]) -> dict[tuple[str, int], int]:
        asked = {pair: kafka.TopicPartition(*pair) for pair in pairs}
        return {pair: consumer.get_watermark_offsets(one, timeout=client.REQUEST_S)[1] for pair, one in asked.items()}

    def identities(self) -> dict[str, str]:
        """Returns Kafka's id of each topic, where the brokers give one."""
        kafka = client.library()
        admin = client.make("AdminClient", self.servers, self.settings, self.describe())
        found = {}
        asked = admin.describe_topics(kafka.TopicCollection(self.topics), request_timeout=client.REQUEST_S)
        for topic, answer in asked.items():
            try:
                found[topic] = str(answer.result(2 * client.REQUEST_S).topic_id)
            except kafka.KafkaException:
                continue  # an old broker; a topic that is not there is found by its partitions
        return found

    def consumer(self, **more: Any) -> Any:
        """Makes a consumer of the client library."""
        if self.group is not None:
            more["group.id"] = self.group
        return client.consumer(self.servers, self.settings, self.describe(), ends=self.stop is not None, **more)

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        from penstock.connectors.kafka.reader import KafkaReader

        return KafkaReader(self, splits, context)

    def describe(self) -> str:
        return f"Kafka({self.servers!r}, {self.topics[0] if len(self.topics) == 1 else self.topics!r})"

    def __repr__(self) -> str:
        return self.describe()


def _checked_start(start: object, topics: list[str]) -> Any:
    """Returns where to start, a time in milliseconds. Raises FlowError for anything that is no start."""
    if isinstance(start, Mapping):
        for pair, offset in start.items():
            if not (isinstance(pair, tuple) and len(pair) == 2 and pair[0] in topics and is_whole(pair[1])):
                raise FlowError(f"sources.Kafka: start has the key {shorten(pair)}; keys are (topic, partition)")
            if not is_whole(offset) or offset < 0:
                raise FlowError(f"sources.Kafka: start[{pair}]={shorten(offset)}; it must be an offset, 0 or more")
        return {(topic, int(number)): int(offset) for (topic, number), offset in start.items()}
    if isinstance(start, datetime) or is_whole(start):
        try:
            return as_ms(start)
        except TypeError as error:
            raise FlowError(f"sources.Kafka: start={shorten(start)}; a datetime must have a time zone") from error
    choice(start, "sources.Kafka: start", ("earliest", "latest", "group"), ", a time, or offsets")
    return start
