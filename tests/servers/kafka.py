"""A server of Apache Kafka for tests: one broker, or several, in a folder of their own on free ports.

A broker is started, killed, stopped and started again by its process id. Its records stay in the folder, so that a
broker that was killed comes back as a real one does.
"""

from __future__ import annotations

import base64
import signal
import subprocess
import time
import uuid
from pathlib import Path
from types import TracebackType

from benchmarks.common import free_ports
from tests.servers import packages

# Small, and quick to start; the compiler that starts quickly is as quick as the other one for tests.
_JAVA = ("-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_START_S = 120.0

_PROPERTIES = """
process.roles=broker,controller
node.id={node}
controller.quorum.voters={voters}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{advertised}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
inter.broker.listener.name=PLAINTEXT
log.dirs={folder}/data
offsets.topic.replication.factor={copies}
offsets.topic.num.partitions=4
transaction.state.log.replication.factor={copies}
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor={copies}
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
broker.session.timeout.ms=2000
broker.heartbeat.interval.ms=400
num.network.threads=2
num.io.threads=2
auto.create.topics.enable=false
transaction.abort.timed.out.transaction.cleanup.interval.ms=500
"""

_LOGGING = """
status=error
rootLogger.level=warn
rootLogger.appenderRef.f.ref=F
appender.f.type=File
appender.f.name=F
appender.f.fileName={folder}/server.log
appender.f.layout.type=PatternLayout
appender.f.layout.pattern=%d %p %m (%c)%n
"""


class Broker:
    """One process of the server, which may be dead."""

    def __init__(self, folder: Path, properties: str) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._properties = folder / "server.properties"
        self._properties.write_text(properties)
        (folder / "log4j2.properties").write_text(_LOGGING.format(folder=folder))
        self._process: subprocess.Popen[bytes] | None = None

    def format(self, cluster: str) -> None:
        """Prepares the folder for the records of a cluster."""
        tool = ["kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(self._properties)]
        subprocess.run(self._java(*tool), check=True, capture_output=True, timeout=_START_S)

    def start(self) -> None:
        """Starts the process, without waiting for it."""
        with (self.folder / "console.log").open("ab") as console:
            command = self._java("kafka.Kafka", str(self._properties))
            self._process = subprocess.Popen(command, stdout=console, stderr=console, stdin=subprocess.DEVNULL)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process, such as SIGSTOP and SIGCONT."""
        assert self._process is not None
        self._process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Ends the process by a signal, and waits until it has ended."""
        if self._process is None:
            return
        self._process.send_signal(number)
        if number is not signal.SIGKILL:
            self._process.send_signal(signal.SIGCONT)
        self._process.wait(_START_S)
        self._process = None

    def complaint(self) -> str:
        """Returns why the process has ended by itself; empty while it runs."""
        if self._process is None or self._process.poll() is None:
            return ""
        return f"the broker has ended ({self._process.returncode}): {(self.folder / 'console.log').read_text()[-2000:]}"

    def _java(self, *command: str) -> list[str]:
        logging = f"-Dlog4j2.configurationFile={self.folder / 'log4j2.properties'}"
        return ["java", *_JAVA, logging, "-cp", f"{packages.kafka_jars()}/*", *command]


class Kafka:
    """A cluster of brokers, which runs between `with` and its end. `address` is for clients: `host:port`, or several of
    them. `advertised` (of one broker only) is the port to which clients are sent on: that of a proxy."""

    def __init__(self, folder: Path, brokers: int = 1, advertised: int | None = None) -> None:
        ports = free_ports(2 * brokers)
        listening, controllers = ports[:brokers], ports[brokers:]
        voters = ",".join(f"{node + 1}@127.0.0.1:{port}" for node, port in enumerate(controllers))
        self.ports = listening
        self.address = ",".join(f"127.0.0.1:{port}" for port in listening)
        cluster = base64.b64encode(uuid.uuid4().bytes, altchars=b"AB").decode().rstrip("=")
        self.brokers = []
        for node in range(brokers):
            place = folder / f"broker-{node + 1}"
            properties = _PROPERTIES.format(
                node=node + 1,
                voters=voters,
                port=listening[node],
                controller=controllers[node],
                advertised=advertised or listening[node],
                folder=place,
                copies=min(3, brokers),
            )
            self.brokers.append(Broker(place, properties))
            self.brokers[-1].format(cluster)

    def __enter__(self) -> Kafka:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for broker in self.brokers:
            broker.end()

    def start(self) -> None:
        """Starts all brokers, and waits until each one answers."""
        for broker in self.brokers:
            broker.start()
        self.wait()

    def wait(self) -> None:
        """Waits until each broker answers, and topics can be made."""
        from confluent_kafka.admin import AdminClient

        deadline = time.monotonic() + _START_S
        admin = AdminClient({"bootstrap.servers": self.address, "log_level": 2})
        while True:
            try:
                if len(admin.list_topics(timeout=1.0).brokers) == len(self.brokers):
                    return
            except Exception as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the brokers do not answer: {error}") from error
            for broker in self.brokers:
                if broker.complaint():
                    raise RuntimeError(broker.complaint())
            if time.monotonic() > deadline:
                raise TimeoutError("the brokers do not answer")
            time.sleep(0.05)

    def topic(self, name: str, partitions: int = 1, **settings: str) -> None:
        """Makes a topic, and waits until it is there."""
        from confluent_kafka.admin import AdminClient, NewTopic

        admin = AdminClient({"bootstrap.servers": self.address, "log_level": 2})
        copies = min(3, len(self.brokers))
        new = NewTopic(name, partitions, copies, config=settings)
        admin.create_topics([new], operation_timeout=30)[name].result(60)
        deadline = time.monotonic() + 60
        while len(admin.list_topics(name, timeout=10).topics[name].partitions) < partitions:
            assert time.monotonic() < deadline, f"the topic {name} does not appear"
            time.sleep(0.02)
