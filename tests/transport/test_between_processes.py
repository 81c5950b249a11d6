"""Transports between two processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.runtime.transport.base import PeerTransport
from tests.transport.networks import LIMIT_S, NETWORKS, Network

KINDS = {name: kind for name, kind in NETWORKS.items() if kind.replaces}


def _echo(name: str, address: str, answer: Any) -> None:
    """The other process: sends back every message to the task it came for, until one says "end"."""
    own = NETWORKS[name].make_one(NETWORKS[name], 1)  # type: ignore[arg-type]
    assert isinstance(own, PeerTransport)
    own.connect({0: address})
    answer.send(own.address)
    waiting: list[tuple[int, bytes]] = []
    end = False
    while waiting or not end:
        for task, message in own.receive(0.001 if waiting else None):
            end = end or bytes(message) == b"end"
            waiting.append((task, bytes(message)))
        while waiting and own.send(0, waiting[0][0], (waiting[0][1],)):
            waiting.pop(0)
    answer.recv()
    own.close()


@pytest.fixture(params=KINDS)
def other(request: pytest.FixtureRequest) -> Iterator[tuple[PeerTransport, Any]]:
    """This process's end, connected to a process of its own that echoes."""
    kind: type[Network] = KINDS[request.param]
    context = multiprocessing.get_context("spawn")
    mine: Any = kind.make_one(kind, 0)  # type: ignore[arg-type]
    here, there = context.Pipe()
    process = context.Process(target=_echo, args=(request.param, mine.address, there), daemon=True)
    process.start()
    assert here.poll(LIMIT_S), "the other process did not come up"
    mine.connect({1: here.recv()})
    yield mine, here
    process.join(LIMIT_S)
    assert process.exitcode == 0
    mine.close()


def test_two_processes_exchange_messages_of_all_sizes_in_order(other: tuple[PeerTransport, Any]) -> None:
    mine, pipe = other
    sizes = [0, 1, 100, 5000, 20_000, 70_000]
    sent = [(i % 3, b"%d " % i + b"x" * sizes[i % 6]) for i in range(600)] + [(0, b"end")]
    to_send = list(reversed(sent))
    got: list[tuple[int, bytes]] = []
    refused = 0
    while len(got) < len(sent):
        while to_send:
            task, message = to_send[-1]
            if not mine.send(1, task, (message[:1], message[1:])):
                refused += 1
                break
            to_send.pop()
        got += [(task, bytes(message)) for task, message in mine.receive(0.001 if to_send else None)]
    assert got == sent
    assert refused, "there was always room, so this shows too little"
    pipe.send("done")
