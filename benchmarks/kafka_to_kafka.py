"""Records from a topic of Kafka to another one: exactly once and at least once, beside a plain loop; see README.md."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import penstock as ps
from benchmarks.common import ROOT, Bench, Skipped, median, quantile
from tests.servers import packages
from tests.servers.kafka import Kafka

_number = itertools.count()
_INTERVALS_S = {"exactly once": 0.02, "at least once": 0.0}


def run(bench: Bench) -> None:
    """See the module."""
    try:
        packages.kafka_jars()
    except packages.Missing as error:
        raise Skipped(str(error)) from error
    with tempfile.TemporaryDirectory() as folder, Kafka(Path(folder) / "kafka") as kafka:
        for guarantee in _INTERVALS_S:
            _throughput(bench, kafka, guarantee)
            for rate in bench.pick((1000, 5000), (1000,)):
                _latency(bench, kafka, guarantee, rate)


def _throughput(bench: Bench, kafka: Kafka, guarantee: str) -> None:
    count = bench.pick(400_000, 20_000)
    source = _topic(kafka)
    _fill(kafka, source, count)

    def of(start: Any) -> float:
        target = _topic(kafka)
        reader = _Reader(kafka, target, count)
        with start(kafka, source, target, count, guarantee):
            reader.join()
        return (count - reader.first_count) / (reader.last_at - reader.first_at)

    results = bench.take_turns({"penstock": lambda: of(_Penstock), "plain loop": lambda: of(_Plain)})
    bench.case(
        f"records a second, {guarantee}",
        median(results["penstock"]),
        "records/s",
        peer="plain loop",
        peer_figure=median(results["plain loop"]),
        goal=">= 0.85",
        config="1 worker, 2 partitions, 100 B, epochs of 20 ms",
        runs=results["penstock"],
        peer_runs=results["plain loop"],
    )


def _latency(bench: Bench, kafka: Kafka, guarantee: str, rate: int) -> None:
    count = rate * bench.pick(20, 5)

    def of(start: Any) -> dict[str, float]:
        source, target = _topic(kafka), _topic(kafka)
        reader = _Reader(kafka, target, count)
        with start(kafka, source, target, count, guarantee):
            time.sleep(2.0)  # so that everything runs when the first record is due; it is no condition of the result
            _pace(kafka, source, count, rate)
            reader.join()
        ordered = sorted(reader.delays_ms[count // 4 :])
        return {"p50": quantile(ordered, 0.5), "p99": quantile(ordered, 0.99)}

    results = bench.take_turns({"penstock": lambda: of(_Penstock), "plain loop": lambda: of(_Plain)})
    for what in ("p50", "p99"):
        ours, theirs = ([result[what] for result in results[who]] for who in ("penstock", "plain loop"))
        bench.case(
            f"{what} at {rate}/s, {guarantee}",
            median(ours),
            "ms",
            peer="plain loop",
            peer_figure=median(theirs),
            config="1 worker, 2 partitions, 100 B, epochs of 20 ms; until poll() of a reader of committed records",
            runs=ours,
            peer_runs=theirs,
        )


class _Penstock:
    """A job that copies a topic."""

    def __init__(self, kafka: Kafka, source: str, target: str, count: int, guarantee: str) -> None:
        self._store = tempfile.TemporaryDirectory()
        flow = ps.Flow(f"bench-kafka-{next(_number)}", parallelism=1)
        read = flow.read(ps.sources.Kafka(kafka.address, source))
        read.write(ps.sinks.Kafka(kafka.address, target, value="bytes", guarantee=guarantee))
        options = {"local": True, "epoch_interval_s": 0.02, "checkpoints": self._store.name}
        self._job = ps.run(flow, workers=1, **options)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        self._job.stop()
        self._job.wait(60)
        self._store.cleanup()


class _Plain:
    """A process with a plain loop."""

    def __init__(self, kafka: Kafka, source: str, target: str, count: int, guarantee: str) -> None:
        settings = {
            "address": kafka.address,
            "source": source,
            "target": target,
            "count": count,
            "interval_s": _INTERVALS_S[guarantee],
        }
        command = [sys.executable, "-m", "benchmarks.kafka_peer", json.dumps(settings)]
        self._process = subprocess.Popen(command, cwd=ROOT)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        try:
            assert self._process.wait(60) == 0
        finally:
            self._process.kill()


class _Reader:
    """A thread that reads committed records of a topic, until it has `count`: their delays, and when it got them."""

    def __init__(self, kafka: Kafka, topic: str, count: int) -> None:
        self._settings = {
            "bootstrap.servers": kafka.address,
            "group.id": topic,
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 10,
            "log_level": 2,
        }
        self._topic, self._count = topic, count
        self.delays_ms: list[float] = []
        self.first_at = self.last_at = 0.0
        self.first_count = 0
        self._seen: set[int] = set()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

        consumer = Consumer(self._settings)
        consumer.assign([TopicPartition(self._topic, number, OFFSET_BEGINNING) for number in range(2)])
        deadline = time.monotonic() + 120
        while len(self._seen) < self._count and time.monotonic() < deadline:
            first = consumer.poll(0.1)
            messages = [] if first is None else [first, *consumer.consume(10_000, 0)]
            now = time.time()
            for message in messages:
                number, at = message.value().split(b" ", 2)[:2]
                assert int(number) not in self._seen, f"{number!r} came twice"
                self._seen.add(int(number))
                self.delays_ms.append((now - float(at)) * 1000)
            if messages:
                self.last_at = time.monotonic()
                if not self.first_at:
                    self.first_at, self.first_count = self.last_at, len(self._seen)
        consumer.close()

    def join(self) -> None:
        """Waits until all records are there."""
        self._thread.join()
        assert len(self._seen) == self._count, f"{len(self._seen)} of {self._count} records are there"


def _topic(kafka: Kafka) -> str:
    name = f"bench-{next(_number)}"
    kafka.topic(name, 2)
    return name


def _value(number: int) -> bytes:
    return f"{number} {time.time():.6f} ".ljust(100, "x").encode()


def _fill(kafka: Kafka, topic: str, count: int) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": kafka.address, "linger.ms": 20, "log_level": 2})
    for first in range(0, count, 10_000):
        messages = [{"value": _value(n), "partition": n % 2} for n in range(first, min(first + 10_000, count))]
        producer.produce_batch(topic, messages)
        producer.flush(60)


def _pace(kafka: Kafka, topic: str, count: int, rate: int) -> None:
    """Writes records at a rate; each has the time of its creation."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": kafka.address, "linger.ms": 0, "log_level": 2})
    began = time.monotonic()
    for number in range(count):
        wait = began + number / rate - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        producer.produce(topic, _value(number), partition=number % 2)
        producer.poll(0)
    producer.flush(60)
