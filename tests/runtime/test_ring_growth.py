"""T8: an inbox moves to a larger ring when records call for it, keeping order and losing nothing."""

from __future__ import annotations

import itertools
import random

import pytest

from penstock.runtime.ring import Ring, RingNoSpace, recommended_capacity
from penstock.runtime.transport import shm
from penstock.runtime.transport.shm import RING_BYTES, ShmTransport


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "_LOOK_EVERY", 3)


def connected(workers: int, ring_bytes: int | None = None) -> list[ShmTransport]:
    transports = [ShmTransport(worker, ring_bytes) for worker in range(workers)]
    addresses = {worker: transport.address for worker, transport in enumerate(transports)}
    for worker, transport in enumerate(transports):
        transport.connect({w: address for w, address in addresses.items() if w != worker})
    return transports


def exchange(transports: list[ShmTransport], size: int, rounds: int, seed: int) -> None:
    """Everybody sends numbered messages to everybody, in a random order of steps; all arrive once and in order."""
    chance = random.Random(seed)
    pairs = list(itertools.permutations(range(len(transports)), 2))
    sent = dict.fromkeys(pairs, 0)
    got = dict.fromkeys(pairs, 0)
    while min(got.values()) < rounds:
        if chance.random() < 0.5:
            sender, receiver = pair = chance.choice(pairs)
            head = sender.to_bytes(2, "little") + sent[pair].to_bytes(4, "little")
            body = bytes(chance.choice((10, size)))
            if sent[pair] < rounds and transports[sender].send(receiver, 7, (head, body)):
                sent[pair] += 1
        else:
            receiver = chance.randrange(len(transports))
            for task, message in transports[receiver].receive(0):
                assert task == 7
                pair = (int.from_bytes(message[:2], "little"), receiver)
                assert int.from_bytes(message[2:6], "little") == got[pair], "order and no loss"
                assert len(message) - 6 in (10, size)
                got[pair] += 1
    assert got == sent


@pytest.mark.parametrize("seed", range(10))
def test_inboxes_grow_with_the_messages(seed: int) -> None:
    transports = connected(3)
    size = 200_000
    exchange(transports, size, 60, seed)
    assert all(transport.ring_bytes > RING_BYTES for transport in transports)
    assert all(transport.ring_bytes <= recommended_capacity(size) for transport in transports)
    exchange(transports, 3_000_000, 10, seed)  # larger than half of the first ring: would not have fitted
    for transport in transports:
        transport.close()


def test_small_messages_and_given_sizes_stay() -> None:
    transports = connected(2)
    exchange(transports, 1000, 100, 1)
    assert [transport.ring_bytes for transport in transports] == [RING_BYTES] * 2
    fixed = connected(2, 1 << 20)
    exchange(fixed, 100_000, 50, 1)
    assert [transport.ring_bytes for transport in fixed] == [1 << 20] * 2
    for transport in transports + fixed:
        transport.close()


def test_no_room_for_a_larger_ring_keeps_the_old(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transports = connected(2)

    def full(capacity: int) -> Ring:
        raise RingNoSpace(f"no room for {capacity}")

    monkeypatch.setattr(Ring, "create", full)
    exchange(transports, 100_000, 60, 1)
    assert [transport.ring_bytes for transport in transports] == [RING_BYTES] * 2
    assert "the ring stays at" in caplog.text
    for transport in transports:
        transport.close()


def test_what_was_lost_in_the_old_ring_is_told_once() -> None:
    (transport,) = connected(1)
    transport._lost = ["a message"]
    transport._switch(Ring.create(RING_BYTES))
    assert transport.lost() == ["a message"]
    assert transport.lost() == []
    transport.close()


def test_large_messages_that_come_many_at_once_soon_make_a_ring_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hundred, received in few calls, which alone would not let it look."""
    monkeypatch.setattr(shm, "_LOOK_EVERY", 512)
    sender, receiver = connected(2)
    sent = got = 0
    while got < 100 or receiver.ring_bytes == RING_BYTES:
        while sent < 100 and sender.send(1, 7, (bytes(150_000),)):
            sent += 1
        got += len(receiver.receive(0))
        sender.receive(0)
        assert got < 100 or receiver._next is not None or receiver.ring_bytes > RING_BYTES, "it has not looked"
    for transport in (sender, receiver):
        transport.close()
