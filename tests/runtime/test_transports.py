"""One conformance suite for every transport: what `transport/base.py` promises, in one process and between two."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.runtime.transport.base import Transport
from penstock.runtime.transport.memory import MemoryNetwork
from penstock.runtime.transport.ring import RingError
from penstock.runtime.transport.shm import ShmTransport

RING = 256 * 1024
WATCHDOG_S = 60  # a test that takes so long hangs


@dataclass
class Pair:
    """Two workers' ends; a is worker 0, b is worker 1."""

    a: Transport
    b: Transport


def memory() -> Pair:
    network = MemoryNetwork(2, RING)
    return Pair(network.transport(0), network.transport(1))


def shared() -> Pair:
    a, b = ShmTransport(0, RING), ShmTransport(1, RING)
    a.connect({1: b.address})
    b.connect({0: a.address})
    return Pair(a, b)


@pytest.fixture(params=[memory, shared], ids=["memory", "shm"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made: Pair = request.param()
    yield made
    made.a.close()
    made.b.close()


def drain(transport: Transport) -> list[tuple[int, bytes]]:
    """All that has arrived, copied."""
    got: list[tuple[int, bytes]] = []
    while messages := transport.receive(0):
        got += [(task, bytes(message)) for task, message in messages]
    return got


def test_messages_come_whole_in_order_and_to_their_task(pair: Pair) -> None:
    sent = []
    for i in range(1000):
        body = b"x" * (i % 37)
        assert pair.a.send(1, i % 5, (b"%d:" % i, body, b""))
        sent.append((i % 5, b"%d:" % i + body))
    assert drain(pair.b) == sent
    assert pair.a.receive(0) in ([], ())


def test_parts_may_be_any_buffers_and_may_be_changed_after(pair: Pair) -> None:
    part = bytearray(b"abc")
    assert pair.a.send(1, 0, (b"1", part, memoryview(b"xyz")[1:]))
    part[:] = b"---"
    assert drain(pair.b) == [(0, b"1abcyz")]


def test_an_empty_message_is_a_message(pair: Pair) -> None:
    assert pair.a.send(1, 3, (b"",))
    assert drain(pair.b) == [(3, b"")]


def test_both_directions_are_separate(pair: Pair) -> None:
    assert pair.a.send(1, 0, (b"to b",))
    assert pair.b.send(0, 0, (b"to a",))
    assert drain(pair.a) == [(0, b"to a")]
    assert drain(pair.b) == [(0, b"to b")]


@pytest.mark.parametrize("size", [20, 4000, 60_000])
def test_no_room_is_an_answer_and_room_comes_back(pair: Pair, size: int) -> None:
    sent = 0
    for _ in range(5):
        while pair.a.send(1, 0, (b"%08d" % sent, b"x" * size)):
            sent += 1
            assert sent * size < 5 * 64 * RING, "it must be full at some time"
        got = [message[:8] for _, message in drain(pair.b)]
        assert got
        assert got == [b"%08d" % i for i in range(sent - len(got), sent)]
        drain(pair.b)  # what was lent is given back by the next receive
    assert pair.a.send(1, 0, (b"more",))


def test_a_full_inbox_does_not_stop_the_other_direction(pair: Pair) -> None:
    while pair.a.send(1, 0, (b"x" * 1000,)):
        pass
    assert pair.b.send(0, 0, (b"credit",))
    assert drain(pair.a) == [(0, b"credit")]


def test_the_largest_message_fits_into_an_empty_inbox(pair: Pair) -> None:
    body = bytes(range(256)) * (pair.a.max_message(1) // 256) + b"e" * (pair.a.max_message(1) % 256)
    for _ in range(3):
        assert pair.a.send(1, 0, (body,))
        assert drain(pair.b) == [(0, body)]
        assert not pair.b.receive(0)


def test_target_message_leaves_many_under_way(pair: Pair) -> None:
    n = 0
    while pair.a.send(1, 0, (b"x" * pair.a.target_message,)):
        n += 1
    assert n >= 16
    assert pair.a.target_message <= pair.a.max_message(1)


def test_large_messages_stay_valid_until_the_next_receive(pair: Pair) -> None:
    bodies = [bytes([i]) * 40_000 for i in range(3)]
    for body in bodies:
        assert pair.a.send(1, 0, (body,))
    messages = pair.b.receive(0)
    while pair.a.send(1, 0, (b"\xff" * 20_000,)):
        pass  # whatever room there is, it must not be theirs
    assert [bytes(message) for _, message in messages] == bodies[: len(messages)]
    rest = [message for _, message in drain(pair.b)]
    assert rest[: 3 - len(messages)] == bodies[len(messages) :]


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(call()), daemon=True)
    thread.start()
    return thread, result


def test_a_wake_up_from_another_thread_ends_the_wait(pair: Pair) -> None:
    """Whether it comes before the wait or during it."""
    for _ in range(20):
        thread, result = in_thread(lambda: len(pair.b.receive(None)))
        pair.b.wake()
        thread.join(WATCHDOG_S)
        assert result == [0]


def test_a_message_ends_the_wait(pair: Pair) -> None:
    for _ in range(20):
        thread, result = in_thread(lambda: [bytes(m) for _, m in pair.b.receive(None)])
        assert pair.a.send(1, 0, (b"hello",))
        thread.join(WATCHDOG_S)
        assert result == [[b"hello"]]


def test_a_time_limit_ends_the_wait(pair: Pair) -> None:
    assert not pair.b.receive(0.001)


def test_nothing_is_lost_while_nobody_died(pair: Pair) -> None:
    assert pair.a.send(1, 0, (b"x",))
    drain(pair.b)
    assert pair.b.lost() == []


def test_a_closed_peer_takes_nothing_more(pair: Pair) -> None:
    """Its inbox is gone or stays full: a sender hears of it by False or an error, and never loses more than fits."""
    pair.b.close()
    accepted = 0
    try:
        while pair.a.send(1, 0, (b"x" * 1000,)):
            accepted += 1
            assert accepted <= 2 * RING // 1000, "a closed inbox still accepts messages"
    except RingError:
        pass


def test_closing_twice_is_harmless(pair: Pair) -> None:
    pair.b.close()
    pair.b.close()


# --- shared memory between two processes ----------------------------------------------------------------------------


def _echo(address: str, answer: Any) -> None:
    """The other process: sends back every message to the task it came for, until one says "end"."""
    own = ShmTransport(1, RING)
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


@pytest.fixture
def other() -> Iterator[tuple[ShmTransport, Any]]:
    """This process's end, connected to a process of its own that echoes."""
    context = multiprocessing.get_context("spawn")
    mine = ShmTransport(0, RING)
    here, there = context.Pipe()
    process = context.Process(target=_echo, args=(mine.address, there), daemon=True)
    process.start()
    assert here.poll(WATCHDOG_S), "the other process did not come up"
    mine.connect({1: here.recv()})
    yield mine, here
    process.join(WATCHDOG_S)
    assert process.exitcode == 0
    mine.close()


def test_two_processes_exchange_messages_of_all_sizes_in_order(other: tuple[ShmTransport, Any]) -> None:
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
    assert refused, "the ring was never full, so this shows too little"
    pipe.send("done")
