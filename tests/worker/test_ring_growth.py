"""T8: an inbox moves to a larger ring when records call for it, keeping order and losing nothing."""

from __future__ import annotations

import itertools
import random
import threading
import time

import pytest

from penstock.runtime.program.flow import Flow
from penstock.runtime.sinks.call import Null
from penstock.runtime.sinks.collect import Collect
from penstock.runtime.sources.memory import Memory
from penstock.runtime.transport import shm
from penstock.runtime.transport.ring import Ring, RingNoSpace, recommended_capacity
from penstock.runtime.transport.shm import RING_BYTES, ShmTransport
from penstock.runtime.worker.run_loop import RunLoop
from penstock.runtime.worker.wiring import build


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


@pytest.mark.parametrize("seed", range(4))
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
    assert "and could not grow" in caplog.text
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


# --- single messages that are too large for the ring ---------------------------------------------------------------


def send_one(transports: list[ShmTransport], sender: int, receiver: int, message: bytes) -> None:
    """Until it has arrived, all doing what a loop does."""
    is_sent, got = False, []
    for _ in range(1000):
        is_sent = is_sent or transports[sender].send(receiver, 7, (b"head", message))
        for number, transport in enumerate(transports):
            arrived = [(task, bytes(body)) for task, body in transport.receive(0)]
            got += arrived if number == receiver else []
        if got:
            break
    assert got == [(7, b"head" + message)]


@pytest.mark.parametrize("workers", [2, 4])
def test_the_first_message_may_be_larger_than_the_ring(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "_LOOK_EVERY", 10**6)  # not because such messages come often
    transports = connected(workers)
    message = random.Random(1).randbytes(5_000_000)
    assert transports[0].max_message(1) < len(message) <= transports[0].largest_message(1)
    send_one(transports, 0, 1, message)
    assert [transport.ring_bytes for transport in transports[2:]] == [RING_BYTES] * (workers - 2)
    assert transports[1].ring_bytes == 16 << 20
    send_one(transports, 0, 1, message)
    assert transports[1].ring_bytes == 16 << 20, "it stays"
    send_one(transports, 0, 1, message * 4)
    assert transports[1].ring_bytes == 64 << 20
    send_one(transports, 1, 0, message)
    exchange(transports, 1000, 20, 1)
    for transport in transports:
        transport.close()


@pytest.mark.parametrize("seed", range(3))
def test_very_large_messages_among_small_ones_keep_the_order(seed: int) -> None:
    transports = connected(3)
    exchange(transports, 3_000_000 + 1_000_000 * seed, 6, seed)
    for transport in transports:
        transport.close()


def test_a_worker_that_has_left_is_not_waited_for() -> None:
    transports = connected(3)
    assert transports[2].leave()
    transports[1].receive(0)
    send_one(transports[:2], 0, 1, bytes(5_000_000))
    assert transports[1].ring_bytes > RING_BYTES
    for transport in transports:
        transport.close()


def test_a_worker_that_leaves_while_an_inbox_moves_is_not_waited_for() -> None:
    transports = connected(3)
    assert not transports[0].send(1, 7, (bytes(5_000_000),))
    transports[1].receive(0)
    transports[1].receive(0)
    assert transports[1]._next is not None
    assert transports[2].leave()
    send_one(transports[:2], 0, 1, bytes(5_000_000))
    send_one(transports[:2], 0, 1, bytes(60_000_000))
    for transport in transports:
        transport.close()


def test_a_peer_that_dies_while_it_moves_is_asked_again() -> None:
    transports = connected(2)
    assert not transports[0].send(1, 7, (bytes(5_000_000),))
    transports[1].close()
    transports[0].drop([1])
    assert not transports[0].send(1, 7, (bytes(5_000_000),))
    again = ShmTransport(1)
    again.connect({0: transports[0].address})
    transports[0].connect({1: again.address})
    send_one([transports[0], again], 0, 1, bytes(5_000_000))
    for transport in (transports[0], again):
        transport.close()


def test_an_inbox_grows_again_when_a_dead_peer_is_forgotten() -> None:
    transports = connected(3)
    transports[2].close()
    for transport in transports[:2]:
        transport.drop([2])
    assert not transports[0].send(1, 7, (bytes(5_000_000),))
    for _ in range(2):
        transports[1].receive(0)
    assert transports[1]._next is None, "the next process of the peer is to find the ring where it is"
    for transport in transports[:2]:
        transport.forget([2])
    send_one(transports[:2], 0, 1, bytes(5_000_000))
    for transport in transports:
        transport.close()


def test_a_peer_that_is_forgotten_while_an_inbox_grows_is_not_waited_for() -> None:
    transports = connected(3)
    assert not transports[0].send(1, 7, (bytes(5_000_000),))
    for _ in range(2):
        transports[1].receive(0)
    assert transports[1]._next is not None
    transports[2].close()
    for transport in transports[:2]:
        transport.forget([2])
    send_one(transports[:2], 0, 1, bytes(5_000_000))
    for transport in transports:
        transport.close()


def test_an_inbox_that_keeps_its_size_lets_those_of_peers_grow() -> None:
    """A peer finds the ring at its address, however late it comes."""
    transports = [ShmTransport(0, keeps_size=True), ShmTransport(1)]
    transports[0].connect({1: transports[1].address})
    transports[1].connect({0: transports[0].address})
    address = transports[0].address
    send_one(transports, 0, 1, bytes(5_000_000))
    exchange(transports, 100_000, 60, 1)
    assert transports[0].address == address
    assert transports[1].ring_bytes > transports[0].ring_bytes == RING_BYTES
    for transport in transports:
        transport.close()


def test_without_room_in_shared_memory_the_sender_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transports = connected(2)
    create = Ring.create

    def full(capacity: int) -> Ring:
        raise RingNoSpace(f"no room for {capacity}")

    monkeypatch.setattr(shm, "_ROOM_RETRY_S", 0.0)
    monkeypatch.setattr(Ring, "create", full)
    for _ in range(5):
        assert not transports[0].send(1, 7, (bytes(5_000_000),))
        assert not transports[1].receive(0)
    assert "and could not grow" in caplog.text
    monkeypatch.setattr(Ring, "create", create)
    send_one(transports, 0, 1, bytes(5_000_000))
    for transport in transports:
        transport.close()


def test_a_ring_of_a_given_size_stays_and_says_what_helps() -> None:
    transports = connected(2, 1 << 20)
    assert transports[0].largest_message(1) == transports[0].max_message(1)
    assert "ring_bytes=" in transports[0].remedy(5_000_000)
    for transport in transports:
        transport.close()


@pytest.mark.parametrize("window", [1, 1 << 18])
def test_a_flow_passes_records_larger_than_ring_and_window(window: int) -> None:
    """From worker to worker and back; one worker has nothing to do and has left long before."""
    flow = Flow("large", chaining=False)
    sink = Collect()
    sizes = [5_000_000, 10, 10, 3_000_000, 20_000_000, 10]
    read = flow.read(Memory([bytes([i]) * size for i, size in enumerate(sizes)]), parallelism=1)
    read.map(lambda record: record, parallelism=1).write(sink, parallelism=1)
    flow.read(Memory([1]), name="little", parallelism=1).write(Null(), name="nothing", parallelism=1)
    plan = flow.plan(3)
    placed = {
        task.number: {"map": 1, "little": 2, "nothing": 2}.get(plan.chains[task.chain].operators[0].name, 0)
        for task in plan.tasks
    }
    transports = connected(3)
    out: list[bytes] = []
    loops = []
    for worker, transport in enumerate(transports):
        wiring = build(
            plan,
            placed,
            worker,
            transport,
            clock=time.monotonic_ns,
            report=lambda reported: out.extend(reported.records),
            credit_window=window,
        )
        loops.append(RunLoop(wiring, transport, time.monotonic_ns))
    threads = [threading.Thread(target=loop.run, daemon=True) for loop in loops]
    threads[2].start()
    threads[2].join(60)
    for thread in threads[:2]:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert [(record[0], len(record)) for record in out] == list(enumerate(sizes))
    for transport in transports:
        transport.close()
