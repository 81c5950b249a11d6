"""The examples of the page about connectors run as printed, against real servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.connectors.kafka import client
from tests.connectors.topics import committed, produce
from tests.docs.test_examples import ON_SERVERS, ROOT, run_examples
from tests.servers.kafka import Kafka


def test_examples_of_connectors(broker: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known = client.check_servers
    monkeypatch.setattr(
        client, "check_servers", lambda servers, what: known(servers, what).replace("localhost:9092", broker.address)
    )
    broker.topic("orders", 2)
    broker.topic("orders-copy", 2)
    orders = [{"customer": "ann", "cents": 5}, {"customer": "bob", "cents": 7}, {"customer": "ann", "cents": 1}]
    produce(broker, "orders", [(number % 2, json.dumps(order).encode()) for number, order in enumerate(orders)])
    run_examples(ROOT / "docs" / ON_SERVERS, {"__name__": "__main__"}, monkeypatch)
    lines = [line.split("\t") for part in Path("spent").iterdir() for line in part.read_text().splitlines()]
    assert {customer: int(cents) for customer, cents in sorted(lines, key=lambda line: int(line[1]))} == {
        "ann": 6,
        "bob": 7,
    }
    assert sorted(json.loads(value)["cents"] for value in committed(broker, "orders-copy") if value) == [1, 5, 7]
