"""A transport that is made of shared memory and networks: it chooses for each peer, and sleeps in the ring only."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from penstock.placement.hop_costs import HopCosts
from penstock.runtime.transport.base import Buffer, Transport
from penstock.runtime.transport.choose import Abilities, Kind
from penstock.runtime.transport.framing import HEAD_BYTES
from penstock.runtime.transport.hop_meter import EVERY, HopMeter, Step
from penstock.runtime.transport.routed import RoutedTransport, WorkerPlace
from penstock.runtime.transport.shm import ShmTransport
from penstock.runtime.transport.tcp import TcpTransport
from tests.e2e.processes import wait_until
from tests.transport.networks import KEY, LIMIT_S

DEVICE = Abilities("rxe0 port 1", "", "RoCE")
NOTHING = Abilities("", "b has no RDMA: there is no device")


def made(worker: int, machine: str, abilities: Abilities) -> RoutedTransport:
    """A worker whose transport for RDMA, where its machine has a device, is a second one over TCP."""
    kinds: list[Kind] = ["rdma", "tcp"] if abilities.rdma else ["tcp"]
    networks = {kind: TcpTransport(worker, KEY, "127.0.0.1") for kind in kinds}
    return RoutedTransport(ShmTransport(worker), networks, machine, abilities)


@pytest.fixture
def four() -> Iterator[list[RoutedTransport]]:
    """Two workers on machine a, one on c, which have devices, and one on b, which has none."""
    places = [("a", DEVICE), ("a", DEVICE), ("c", DEVICE), ("b", NOTHING)]
    transports = [made(worker, machine, abilities) for worker, (machine, abilities) in enumerate(places)]
    addresses = {worker: transport.address for worker, transport in enumerate(transports)}
    for own, transport in enumerate(transports):
        transport.connect({worker: address for worker, address in addresses.items() if worker != own})
    yield transports
    for transport in transports:
        transport.close()
        transport.close()


def test_an_address_names_a_place() -> None:
    place = WorkerPlace("machine", "/proc/1/fd/3", {"tcp": "tcp://10.0.0.1:5/ab"}, DEVICE)
    assert WorkerPlace.of(place.address) == place


def test_each_peer_has_the_best_that_both_machines_have(four: list[RoutedTransport]) -> None:
    assert four[0].reasons() == {
        1: "Shared memory, because both workers run on one machine.",
        2: "RDMA, because both machines have an active device (rxe0 port 1).",
        3: "TCP, because b has no RDMA: there is no device.",
    }
    assert four[3].reasons()[0] == four[0].reasons()[3], "both ends choose the same"
    four[0].drop([2, 3])
    assert set(four[0].reasons()) == {1}
    assert not four[0].send(2, 0, (b"to nobody",))


def test_what_goes_over_the_network_is_counted_with_the_heads_of_frames(four: list[RoutedTransport]) -> None:
    assert four[0].sent_bytes() == {}
    for peer in (1, 2, 3, 3):
        assert four[0].send(peer, 0, (b"head", bytes(1000 * peer)))
    assert four[0].sent_bytes() == {2: 2004 + HEAD_BYTES, 3: 2 * (3004 + HEAD_BYTES)}


@pytest.mark.parametrize("sender", [1, 2, 3], ids=["shared memory", "rdma", "tcp"])
def test_a_message_wakes_a_worker_that_sleeps_for_good(four: list[RoutedTransport], sender: int) -> None:
    """Again and again, because the thread that waits for the networks must be armed each time."""
    for number in range(50):
        found: list[bytes] = []

        def sleep(found: list[bytes] = found) -> None:
            while not found:
                found += [bytes(message) for _, message in four[0].receive(None)]

        sleeper = threading.Thread(target=sleep, daemon=True)
        sleeper.start()
        while not four[sender].send(0, 7, (b"%d" % number,)):
            four[sender].receive(0.01)
        wait_until(lambda at=sleeper: four[sender].receive(0.01) or not at.is_alive(), "it is awake")  # type: ignore[misc]
        assert found == [b"%d" % number]


def test_a_wake_up_ends_a_sleep_without_a_message(four: list[RoutedTransport]) -> None:
    sleeper = threading.Thread(target=four[0].receive, args=(None,), daemon=True)
    sleeper.start()
    four[0].wake()
    sleeper.join(LIMIT_S)
    assert not sleeper.is_alive()


def test_what_hops_cost_is_measured_where_they_happen(four: list[RoutedTransport]) -> None:
    """On a clock that a message of the ring advances by 1 ns a byte, and one of a network by 5."""
    now = [0]

    def slow(transport: Transport, ns: int) -> None:
        send, receive = transport.send, transport.receive

        def slow_send(worker: int, task: int, parts: Sequence[Buffer]) -> bool:
            now[0] += ns * sum(map(len, parts))
            return send(worker, task, parts)

        def slow_receive(timeout: float | None) -> Sequence[tuple[int, Buffer]]:
            messages = receive(timeout)
            now[0] += ns * sum(len(message) for _, message in messages)
            return messages

        transport.send, transport.receive = slow_send, slow_receive  # type: ignore[method-assign]

    for transport in four:
        transport.meter = HopMeter(lambda: now[0])
        slow(transport._near, 1)
        for far in transport._far:
            slow(far, 5)
    by_hand = HopMeter(lambda: now[0])
    steps: list[Step] = ["encode", "decode"]
    for step in steps:
        for turn in range(100):
            size = 3_000 if turn % 2 else 300
            begun_ns, now[0] = now[0], now[0] + 2 * size
            by_hand.note(step, 1, size, begun_ns)
    # Worker 0 receives from its node and from the others, until each of them has sent enough to be measured.
    for sender in (1, 3):
        for turn in range(25 * EVERY):
            while not four[sender].send(0, 7, (bytes(3_000 if turn % 2 else 300),)):
                four[sender].receive(0.01)
            wait_until(lambda at=sender: four[at].receive(0) or four[0].receive(0.01), "it has come")  # type: ignore[misc]
    costs = HopCosts.of([by_hand.report(), *(transport.meter.report() for transport in four)])
    assert costs is not None
    assert costs.node is not None
    assert costs.network is not None
    assert (costs.node - costs.worker).byte_ns == pytest.approx(1 + 1 + 2)
    assert (costs.network - costs.worker).byte_ns == pytest.approx(5 + 5 + 2)
    assert (costs.network - costs.worker).message_ns == pytest.approx((costs.node - costs.worker).message_ns)
