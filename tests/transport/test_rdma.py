"""What only the RDMA transport does. Runs in guests with software RoCE (tests/guests/test_guests.py)."""

from __future__ import annotations

import ipaddress
import logging
import os
import select
import time
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.runtime.transport import rdma
from penstock.runtime.transport.rdma import LANDING_BYTES, NoRdma, RdmaTransport, find_port
from penstock.runtime.transport.tcp import REGION_BYTES
from tests.transport.networks import LIMIT_S, RDMA_HOST, Network

KEY = b"the secret of one job, 32 bytes."


class Growing(Network):
    """RDMA with regions that grow."""

    def make_one(self, worker: int) -> RdmaTransport:
        return RdmaTransport(worker, KEY, RDMA_HOST)


@pytest.fixture
def net() -> Iterator[Network]:
    if not RDMA_HOST:
        pytest.skip("there is no device for RDMA here; it runs in guests")
    made = Growing()
    yield made
    made.close()


def test_a_message_beyond_the_region_and_the_landing_buffer_arrives(net: Network) -> None:
    sizes = [100, LANDING_BYTES + 1, 10, 3 * REGION_BYTES // 4, 20]
    bodies = [os.urandom(100) * (size // 100 + 1) for size in sizes]
    for number, body in enumerate(bodies):
        net.send(net.a, 1, number, (body,))
    assert net.take(net.b, len(bodies)) == list(enumerate(bodies))
    net.settle()


def test_a_worker_that_has_found_no_room_need_not_wait_until_a_message_comes(net: Network) -> None:
    net.wait_for_room()


def _through(net: Network, sender: Any, worker: int, task: int) -> None:
    """Sends a message while both ends do nothing but wait for their descriptors."""
    assert sender.transport.send(worker, task, (b"hello",))
    receiver = net.ends[worker]
    waiting = select.poll()
    for end in net.ends:
        waiting.register(end.transport.fileno(), select.POLLIN)
    deadline = time.monotonic() + LIMIT_S
    while not receiver.mail:
        assert waiting.poll(1000 * LIMIT_S), "no descriptor becomes readable"
        assert time.monotonic() < deadline
        for end in net.ends:
            end.receive()
    assert receiver.mail.pop() == (task, b"hello")


def test_the_descriptors_tell_of_everything_and_rest_when_there_is_nothing(net: Network) -> None:
    net.settle()
    for number in range(50):
        _through(net, net.a, 1, number)
        _through(net, net.b, 0, number)
    net.settle()
    for end in net.ends:
        # What is left to do ends by itself: no descriptor stays readable.
        deadline = time.monotonic() + LIMIT_S
        while select.select([end.transport.fileno()], [], [], 0.2)[0]:
            assert time.monotonic() < deadline
            for other in net.ends:
                other.receive()


def test_a_stream_goes_over_tcp_when_rdma_fails_again_and_again(
    net: Network, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connect = rdma._QueuePair.connect

    def to_nobody(pair: Any, setup: tuple[Any, ...]) -> None:
        connect(pair, (setup[0], 0xFFFF, *setup[2:]))

    monkeypatch.setattr(rdma._QueuePair, "connect", to_nobody)
    monkeypatch.setattr(rdma, "_RETRIES", 1)
    sent = [(number, b"message %d" % number) for number in range(100)]
    with caplog.at_level(logging.WARNING, rdma.__name__):
        for task, body in sent:
            net.send(net.a, 1, task, (body,))
        assert net.take(net.b, len(sent)) == sent
        net.settle()
    assert net.a.transport.links().keys() == {1}
    said = sorted(record.getMessage() for record in caplog.records if record.name == rdma.__name__)
    assert said == [
        f"RDMA from worker {worker} has failed 3 times and brought nothing; it sends over TCP from now on"
        for worker in (0, 1)
    ]


def test_nothing_is_said_of_a_link_while_its_stream_goes_over_rdma(net: Network) -> None:
    """The TCP connection of the stream is idle, and what the kernel says of it says nothing of the stream."""
    net.settle()
    assert net.a.transport.sent_bytes()[1] > 0
    assert net.a.transport.links() == net.b.transport.links() == {}


def test_a_closed_transport_leaves_no_descriptor_behind(net: Network) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    net.settle()  # its own connections are all made
    before = descriptors()
    other = Growing()
    other.settle()
    assert descriptors() > before
    other.close()
    # The thread that makes connections ends soon after.
    deadline = time.monotonic() + LIMIT_S
    while descriptors() > before:
        assert time.monotonic() < deadline, f"{before} before, {descriptors()} after"


def test_a_port_is_found_by_the_address_of_its_host(net: Network) -> None:
    port = find_port(RDMA_HOST)
    assert (port.device, port.number, port.link) == ("rxe0", 1, "RoCE")
    assert ipaddress.IPv6Address(port.gid).ipv4_mapped == ipaddress.IPv4Address(RDMA_HOST)


def test_where_pyverbs_is_missing_the_error_names_the_packages() -> None:
    if RDMA_HOST:
        pytest.skip("it is installed here")
    with pytest.raises(NoRdma, match=r"python3-pyverbs ibverbs-providers|no device"):
        find_port("127.0.0.1")
