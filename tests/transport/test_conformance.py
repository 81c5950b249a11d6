"""One conformance suite for every transport: what `transport/base.py` promises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.runtime.transport.base import PeerTransport
from penstock.runtime.transport.ring import RingError
from tests.transport.networks import INBOX_BYTES, LIMIT_S, NETWORKS, Network


@pytest.fixture(params=NETWORKS.values(), ids=NETWORKS.keys())
def kind(request: pytest.FixtureRequest) -> type[Network]:
    made: type[Network] = request.param
    return made


@pytest.fixture
def net(kind: type[Network]) -> Iterator[Network]:
    made = kind()
    yield made
    made.close()


@pytest.fixture
def four(kind: type[Network]) -> Iterator[Network]:
    made = kind(4)
    yield made
    made.close()


@pytest.fixture
def renewable(net: Network) -> Network:
    if not net.replaces:
        pytest.skip("its workers have no processes")
    return net


def test_messages_come_whole_in_order_and_to_their_task(net: Network) -> None:
    sent = []
    for i in range(1000):
        body = b"x" * (i % 37)
        net.send(net.a, 1, i % 5, (b"%d:" % i, body, b""))
        sent.append((i % 5, b"%d:" % i + body))
    assert net.take(net.b, 1000) == sent
    net.settle()
    assert net.a.mail == net.b.mail == []


def test_parts_may_be_any_buffers_and_may_be_changed_after(net: Network) -> None:
    part = bytearray(b"abc")
    large = bytearray(b"d" * 10_000)
    net.send(net.a, 1, 0, (b"1", part, memoryview(b"xyz")[1:]))
    net.send(net.a, 1, 1, (b"2", large))
    part[:] = b"---"
    large[:] = b"-" * 10_000
    assert net.take(net.b, 2) == [(0, b"1abcyz"), (1, b"2" + b"d" * 10_000)]


def test_an_empty_message_is_a_message(net: Network) -> None:
    net.send(net.a, 1, 3, (b"",))
    net.send(net.a, 1, 4, ())
    assert net.take(net.b, 2) == [(3, b""), (4, b"")]


def test_both_directions_are_separate(net: Network) -> None:
    net.send(net.a, 1, 0, (b"to b",))
    net.send(net.b, 0, 0, (b"to a",))
    assert net.take(net.a, 1) == [(0, b"to a")]
    assert net.take(net.b, 1) == [(0, b"to b")]


def _fill(net: Network, worker: int, size: int, first: int = 0) -> int:
    """Sends from worker 0 until there is no room. Returns the number of the next message."""
    number = first
    net.ends[worker].asleep = True
    while True:
        while net.a.transport.send(worker, 0, (b"%08d" % number, b"x" * size)):
            number += 1
            assert (number - first) * size <= net.most_under_way, "it must be full at some time"
        net.a.receive()  # for transports that send in it, too
        if not net.a.transport.send(worker, 0, (b"%08d" % number, b"x" * size)):
            net.ends[worker].asleep = False
            return number
        number += 1


@pytest.mark.parametrize("size", [20, 4000, 60_000])
def test_no_room_is_an_answer_and_room_comes_back(net: Network, size: int) -> None:
    sent = 0
    for _ in range(3):
        first, sent = sent, _fill(net, 1, size, sent)
        got = [message[:8] for _, message in net.take(net.b, sent - first)]
        assert got == [b"%08d" % i for i in range(first, sent)]
    net.send(net.a, 1, 0, (b"more",))


def test_a_full_inbox_does_not_stop_the_other_direction(net: Network) -> None:
    net.settle()
    _fill(net, 1, 1000)
    net.b.asleep = True
    net.send(net.b, 0, 0, (b"credit",))
    assert net.take(net.a, 1) == [(0, b"credit")]


def test_two_full_inboxes_become_empty(net: Network) -> None:
    """Both workers have sent all that there is room for before one of them receives anything."""
    there = _fill(net, 1, 1000)
    net.a, net.b = net.b, net.a
    back = _fill(net, 0, 1000)
    net.a, net.b = net.b, net.a
    assert [message[:8] for _, message in net.take(net.b, there)] == [b"%08d" % i for i in range(there)]
    assert [message[:8] for _, message in net.take(net.a, back)] == [b"%08d" % i for i in range(back)]
    net.settle()


def test_a_slow_receiver_holds_up_those_who_send_to_it_and_nobody_else(four: Network) -> None:
    count = _fill(four, 1, 1000)
    four.ends[1].asleep = True
    for i in range(300):
        for worker in (2, 3):
            four.send(four.a, worker, 0, (b"%d" % i,))
        four.send(four.ends[2], 3, 1, (b"%d" % i,))
        four.send(four.ends[3], 0, 2, (b"%d" % i,))
    assert four.take(four.ends[2], 300) == [(0, b"%d" % i) for i in range(300)]
    mixed = four.take(four.ends[3], 600)
    for task in (0, 1):
        assert [message for to, message in mixed if to == task] == [b"%d" % i for i in range(300)]
    assert four.take(four.ends[0], 300) == [(2, b"%d" % i) for i in range(300)]
    four.ends[1].asleep = False
    assert len(four.take(four.ends[1], count)) == count


def test_each_pair_of_workers_keeps_its_order(four: Network) -> None:
    for i in range(200):
        for sender in range(4):
            for receiver in range(4):
                if sender != receiver:
                    four.send(four.ends[sender], receiver, sender, (b"%d " % i, b"x" * (i * 37 % 5000)))
    for receiver in range(4):
        mail = four.take(four.ends[receiver], 600)
        for sender in set(range(4)) - {receiver}:
            assert [int(message.split()[0]) for task, message in mail if task == sender] == list(range(200))


def test_the_largest_message_fits_into_an_empty_inbox(net: Network) -> None:
    most = net.a.transport.max_message(1)
    assert most >= INBOX_BYTES // 4
    body = bytes(range(256)) * (most // 256) + b"e" * (most % 256)
    for _ in range(3):
        net.send(net.a, 1, 0, (body[:1000], body[1000:]))
        assert net.take(net.b, 1) == [(0, body)]
        net.b.receive()
    assert net.b.mail == []


def test_target_message_leaves_many_under_way(net: Network) -> None:
    n = 0
    while net.a.transport.send(1, 0, (b"x" * net.a.transport.target_message,)):
        n += 1
    assert n >= 16
    assert net.a.transport.target_message <= net.a.transport.max_message(1)


def test_large_messages_stay_valid_until_the_next_receive(net: Network) -> None:
    bodies = [bytes([i]) * 40_000 for i in range(3)]
    for body in bodies:
        assert net.a.transport.send(1, 0, (body,))
    net.a.receive()
    held: list[bytes] = []
    while len(held) < 3:
        messages = net.b.transport.receive(0)
        net.a.receive()
        # Whatever room there is, it must not be theirs.
        while net.a.transport.send(1, 1, (b"\xff" * 20_000,)):
            pass
        held += [bytes(message) for task, message in messages if task == 0]
    assert held == bodies


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(call()), daemon=True)
    thread.start()
    return thread, result


def test_a_wake_up_from_another_thread_ends_the_wait(net: Network) -> None:
    """Whether it comes before the wait or during it."""
    net.settle()
    for _ in range(20):
        thread, result = in_thread(lambda: len(net.b.transport.receive(None)))
        net.b.transport.wake()
        thread.join(LIMIT_S)
        assert result == [0]


def test_a_message_ends_the_wait(net: Network) -> None:
    net.settle()
    for _ in range(20):
        thread, result = in_thread(lambda: [bytes(m) for _, m in net.b.transport.receive(None)])
        assert net.a.transport.send(1, 0, (b"hello",))
        if net.sender_serves:
            net.until(lambda thread=thread: not thread.is_alive(), "the message", [net.a])
        thread.join(LIMIT_S)
        assert result == [[b"hello"]]


def test_a_time_limit_ends_the_wait(net: Network) -> None:
    assert not net.b.transport.receive(0.001)


def test_nothing_is_lost_while_nobody_died(net: Network) -> None:
    net.send(net.a, 1, 0, (b"x",))
    net.take(net.b, 1)
    assert net.b.transport.lost() == []


def test_a_closed_peer_takes_nothing_more(net: Network) -> None:
    """Its inbox is gone or stays full: a sender hears of it by False or an error, and never loses more than fits."""
    net.settle()
    net.b.transport.close()
    net.b.asleep = True
    accepted = 0
    try:
        while net.a.transport.send(1, 0, (b"x" * 1000,)):
            accepted += 1
            assert accepted * 1000 <= net.most_under_way, "a closed inbox still accepts messages"
            net.a.receive()
    except RingError:
        pass


def test_closing_twice_is_harmless(net: Network) -> None:
    net.b.transport.close()
    net.b.transport.close()


# --- workers whose processes come and go ----------------------------------------------------------------------------


def test_who_is_not_connected_gets_nothing(renewable: Network) -> None:
    assert renewable.a.transport.send(7, 0, (b"x",)) is False
    renewable.a.transport.drop([1])
    assert renewable.a.transport.send(1, 0, (b"x",)) is False


def test_a_worker_that_is_connected_stays_so(renewable: Network) -> None:
    renewable.send(renewable.a, 1, 0, (b"1",))
    renewable.a.transport.connect({1: renewable.b.transport.address})
    renewable.send(renewable.a, 1, 0, (b"2",))
    assert renewable.take(renewable.b, 2) == [(0, b"1"), (0, b"2")]


def test_the_next_process_of_a_worker_takes_its_place(renewable: Network) -> None:
    """What was sent to the process that has died does not come, and what it sent is not needed."""
    for generation in range(4):
        for i in range(200):
            renewable.send(renewable.a, 1, generation, (b"%d" % i,))
            renewable.send(renewable.b, 0, generation, (b"%d" % i,))
        assert renewable.take(renewable.b, 200) == [(generation, b"%d" % i) for i in range(200)]
        assert renewable.take(renewable.a, 200) == [(generation, b"%d" % i) for i in range(200)]
        _fill(renewable, 1, 500)
        renewable.replace(1)
        renewable.settle()
        assert renewable.b.mail == renewable.a.mail == []


def test_the_others_go_on_when_a_peer_is_forgotten(kind: type[Network]) -> None:
    if not kind.replaces:
        pytest.skip("its workers have no processes")
    net = kind(3)
    _fill(net, 1, 50)
    net.ends[1].transport.close()
    net.ends[1].asleep = True
    for end in (net.a, net.ends[2]):
        end.transport.forget([1])
        assert not end.transport.send(1, 0, (b"to nobody",))
        end.transport.forget([1])
    for i in range(100):
        net.send(net.a, 2, 0, (b"%d" % i,))
    assert net.take(net.ends[2], 100) == [(0, b"%d" % i) for i in range(100)]
    for end in (net.a, net.ends[2]):
        net.until(end.transport.leave, "to leave")
    net.close()


def test_a_process_that_was_dropped_is_not_heard(renewable: Network) -> None:
    if not renewable.refuses_dropped:
        pytest.skip("the receiver knows by the generation that a message is too old")
    renewable.settle()
    old = renewable.replace(1, old_ends=False)
    for i in range(50):
        old.transport.send(0, 9, (b"late %d" % i,))
        old.receive()
        renewable.send(renewable.b, 0, 0, (b"%d" % i,))
    assert renewable.take(renewable.a, 50) == [(0, b"%d" % i) for i in range(50)]
    renewable.settle()
    assert renewable.a.mail == old.mail == []
    old.transport.close()


def test_the_others_go_on_while_a_worker_is_replaced(kind: type[Network]) -> None:
    if not kind.replaces:
        pytest.skip("its workers have no processes")
    net = kind(3)
    for i in range(100):
        net.send(net.a, 2, 0, (b"%d" % i,))
        if i % 25 == 10:
            net.replace(1)
    assert net.take(net.ends[2], 100) == [(0, b"%d" % i) for i in range(100)]
    net.close()


def test_what_was_sent_before_leaving_arrives(renewable: Network) -> None:
    count = 100
    for i in range(count):
        renewable.send(renewable.a, 1, 0, (b"%d " % i, b"x" * 1000))
    renewable.until(renewable.a.transport.leave, "to leave")
    assert isinstance(renewable.a.transport, PeerTransport)
    renewable.a.asleep = True
    thread, _ = in_thread(renewable.a.transport.close)
    got = renewable.take(renewable.b, count)
    assert [int(message.split()[0]) for _, message in got] == list(range(count))
    renewable.until(lambda: not thread.is_alive(), "to close")
    renewable.b.receive()
    assert renewable.b.mail == []


def test_all_leave(kind: type[Network]) -> None:
    if not kind.replaces:
        pytest.skip("its workers have no processes")
    net = kind(4)
    for sender in range(4):
        for receiver in range(4):
            if sender != receiver:
                net.send(net.ends[sender], receiver, sender, (b"last",))
    for end in net.ends:
        net.until(end.transport.leave, "to leave")
    for end in net.ends:
        net.take(end, 3)
    for end in net.ends:
        end.asleep = True
        end.transport.close()
