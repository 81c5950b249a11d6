"""The servers of the tests of connectors: one broker of Kafka for all tests of a process that do not end it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import packages
from tests.servers.kafka import Kafka


@pytest.fixture(scope="session")
def kafka_jars() -> Path:
    """Skips the test where Kafka's server cannot be had, and says so."""
    pytest.importorskip("confluent_kafka")
    try:
        return packages.kafka_jars()
    except packages.Missing as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def broker(kafka_jars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """A cluster of one broker that no test may end."""
    with Kafka(tmp_path_factory.mktemp("kafka")) as kafka:
        yield kafka


@pytest.fixture
def mortal_broker(kafka_jars: Path, tmp_path: Path) -> Iterator[Kafka]:
    """A cluster of one broker of the test's own, which it may end."""
    with Kafka(tmp_path / "kafka") as kafka:
        yield kafka
