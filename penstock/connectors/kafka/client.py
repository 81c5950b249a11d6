"""Makes the Kafka clients of a job: loads the library, checks the settings, and puts errors into words.

A setting that is a secret is read here, where a client is made, and must never be in a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.runtime.errors import FlowError, SourceError, shorten
from penstock.runtime.mistakes import nearest
from penstock.runtime.secrets import resolved

if TYPE_CHECKING:
    import confluent_kafka

# The library logs every try of a connection. The errors that count are returned to its callers.
_QUIET = {"log_level": 2, "log.connection.close": False}
#: For how long one request to a broker may take.
REQUEST_S = 10.0

#: Settings of the client that Penstock decides about, with the reason that a user is told.
_OURS = {
    "bootstrap.servers": "it is the argument `servers`",
    "group.id": "it is the argument `group`",
    "enable.auto.commit": "the offsets belong to the epochs of the job",
    "enable.auto.offset.store": "the offsets belong to the epochs of the job",
    "auto.offset.reset": "it is the argument `out_of_range`",
    "enable.partition.eof": "it follows from the argument `stop`",
    "transactional.id": "the sink has a pool of them",
    "enable.idempotence": "it follows from the argument `guarantee`",
}
#: The settings that users need most, to name the nearest one to a misspelt one.
_KNOWN = """
security.protocol sasl.mechanism sasl.mechanisms sasl.username sasl.password ssl.ca.location ssl.certificate.location
ssl.key.location ssl.key.password ssl.endpoint.identification.algorithm client.id isolation.level fetch.wait.max.ms
fetch.min.bytes fetch.max.bytes max.partition.fetch.bytes queued.max.messages.kbytes queued.min.messages
session.timeout.ms socket.timeout.ms compression.type compression.codec linger.ms batch.size batch.num.messages
message.max.bytes acks request.required.acks queue.buffering.max.kbytes queue.buffering.max.messages
message.timeout.ms delivery.timeout.ms transaction.timeout.ms partitioner client.rack metadata.max.age.ms
reconnect.backoff.ms reconnect.backoff.max.ms statistics.interval.ms debug check.crcs broker.address.family
socket.keepalive.enable
"""


def library() -> Any:
    """Returns the client library. Raises FlowError with the line that installs it."""
    try:
        import confluent_kafka
    except ImportError as error:
        raise FlowError(
            "Kafka needs the client library confluent-kafka: pip install 'penstock-streaming[kafka]'"
        ) from error
    return confluent_kafka


def check_servers(servers: object, what: str) -> str:
    """Returns the brokers as one text. Raises FlowError unless they are a text like "host:9092,host:9092"."""
    if isinstance(servers, list | tuple) and servers and all(isinstance(one, str) for one in servers):
        servers = ",".join(servers)
    if not isinstance(servers, str) or not servers.strip():
        raise FlowError(f"{what}: servers={shorten(servers)}; give the brokers as 'host:9092' or a list of such texts")
    return servers


def check_settings(settings: Mapping[str, Any] | None, what: str) -> dict[str, Any]:
    """Returns the settings that a user gave. Raises FlowError for a setting that Penstock decides about. Names that the
    library does not know are refused when a client is made."""
    settings = dict(settings or {})
    for name in settings:
        if name in _OURS:
            raise FlowError(f"{what}: the setting {name!r} cannot be given, because {_OURS[name]}")
    return settings


def make(kind: str, servers: str, settings: Mapping[str, Any], what: str) -> Any:
    """Makes a client: a Consumer, a Producer, or an AdminClient. Raises FlowError for a setting that the library does
    not take."""
    kafka = library()
    if kind == "AdminClient":
        import confluent_kafka.admin

        made = confluent_kafka.admin.AdminClient
    else:
        made = getattr(kafka, kind)
    try:
        return made({"bootstrap.servers": servers, **_QUIET, **resolved(settings)})
    except kafka.KafkaException as error:
        told = error.args[0].str() if error.args else str(error)
        unknown = told.partition('No such configuration property: "')[2].rstrip('"')
        guess = nearest(unknown, _KNOWN.split()) if unknown else ""
        raise FlowError(f"{what}: the settings of its client are not right: {told}{guess}") from error


def consumer(servers: str, settings: Mapping[str, Any], what: str, *, ends: bool, **more: Any) -> Any:
    """Makes a consumer that is given its partitions and offsets. `ends`: it tells where a partition ends. `more` counts
    before the settings of the user."""
    return make(
        "Consumer",
        servers,
        {
            "group.id": "penstock",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
            "enable.partition.eof": ends,
            "fetch.wait.max.ms": 50,
            "queued.max.messages.kbytes": 16_384,
            **settings,
            **more,
        },
        what,
    )


def partitions(client: Any, topics: list[str], what: str) -> dict[str, list[int]]:
    """Returns the partitions of each topic. Raises SourceError when a topic is not there or the brokers are silent."""
    kafka = library()
    found: dict[str, list[int]] = {}
    for topic in topics:
        try:
            known = client.list_topics(topic, timeout=REQUEST_S).topics[topic]
        except kafka.KafkaException as error:
            raise SourceError(f"{what}: the brokers do not answer: {words(error)}") from error
        if known.error is not None:
            raise SourceError(f"{what}: topic {topic!r}: {known.error.str()}; create it first, or correct its name")
        found[topic] = sorted(known.partitions)
    return found


def words(error: confluent_kafka.KafkaException | Any) -> str:
    """Returns an error of the library in words, without its numbers."""
    inner = error.args[0] if getattr(error, "args", None) else error
    return inner.str() if hasattr(inner, "str") else str(inner)
