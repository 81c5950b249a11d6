"""What only the TCP transport does: connections that break, strangers, and peers that do not keep to the protocol."""

from __future__ import annotations

import logging
import os
import random
import select
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from penstock.runtime.transport import peer_links
from penstock.runtime.transport.base import SilentLink
from penstock.runtime.transport.certificates import JobCertificate
from penstock.runtime.transport.framing import ACKNOWLEDGEMENT, FRAME_HEAD
from penstock.runtime.transport.handshake import NotProved
from penstock.runtime.transport.peer_handshake import Admitting, Introducing, Process
from penstock.runtime.transport.tcp import LARGEST_BODY, TcpTransport
from penstock.runtime.transport.tls import TlsContexts
from tests.transport.certificates import Folder
from tests.transport.networks import KEY, LIMIT_S, End, Network, Tcp
from tests.transport.proxies import Proxy, host_and_port

LOCAL = "127.0.0.1"


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s: {what}"
        time.sleep(0.002)


@pytest.fixture
def net() -> Iterator[Network]:
    made = Tcp()
    made.settle()
    yield made
    made.close()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "penstock-peers"]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- connections that break -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(2))
def test_a_bad_network_loses_doubles_and_reorders_nothing(block: int) -> None:
    """Every connection goes through a proxy that splits and delays what it forwards, and cuts at any byte."""
    seeds = random.SystemRandom().sample(range(1 << 30), 4)
    assert sum(_through_bad_network(seed) for seed in seeds), f"nothing was cut in {seeds}"


def _through_bad_network(seed: int) -> int:
    """Returns the number of connections that were cut."""
    rng = random.Random(seed)
    first = rng.choice((0, (1 << 64) - rng.randint(1, 100_000)))
    region = rng.choice((8192, 65536, 1 << 20))
    ends = [End(TcpTransport(i, KEY, LOCAL, region_bytes=region, first=first)) for i in range(2)]
    proxies = [Proxy(host_and_port(end.transport), seed + i) for i, end in enumerate(ends)]
    try:
        for i, end in enumerate(ends):
            end.transport.connect({1 - i: proxies[1 - i].address(ends[1 - i].transport.address)})
        bodies = [
            [b"%d " % n + rng.randbytes(rng.choice((0, 10, 2000, region // 4))) for n in range(150)] for _ in ends
        ]
        to_send = [list(enumerate(some)) for some in bodies]
        deadline = time.monotonic() + LIMIT_S
        while any(len(end.mail) < 150 for end in ends):
            assert time.monotonic() < deadline, f"seed {seed}: {[len(end.mail) for end in ends]} of 150 came"
            for i, end in enumerate(ends):
                end.receive()
                for _ in range(rng.randint(0, 5)):
                    if to_send[i] and end.transport.send(1 - i, to_send[i][0][0], (to_send[i][0][1],)):
                        to_send[i].pop(0)
            if sum(proxy.cuts for proxy in proxies) >= 30:
                for proxy in proxies:
                    proxy.cut_share = 0.0
        for i, end in enumerate(ends):
            assert end.mail == list(enumerate(bodies[1 - i])), f"seed {seed}"
            assert end.transport.lost() == []
        return sum(proxy.cuts for proxy in proxies)
    finally:
        for proxy in proxies:
            proxy.close()
        for end in ends:
            end.transport.close()


def test_a_send_to_a_peer_that_cannot_be_reached_waits_in_the_region() -> None:
    a, b = (End(TcpTransport(i, KEY, LOCAL, region_bytes=8192)) for i in range(2))
    proxy = Proxy(host_and_port(b.transport), 1, cut_share=1.0)
    a.transport.connect({1: proxy.address(b.transport.address)})
    b.transport.connect({0: a.transport.address})
    sent = 0
    while a.transport.send(1, sent, (b"x" * 100,)):
        a.receive()
        sent += 1
    assert 50 < sent < 100
    told: list[SilentLink] = []
    wait_until(lambda: told.extend(a.transport.silent_links()) or told, "it is known to be silent")
    (silent,) = told
    assert (silent.peer, silent.worked, silent.refused) == (1, False, False)
    assert silent.process in b.transport.address
    assert not a.transport.send(1, sent, (b"x" * 100,))
    assert b.mail == []
    proxy.cut_share = 0.0
    while len(b.mail) < sent:
        a.receive()
        b.receive()
    assert [task for task, _ in b.mail] == list(range(sent))
    wait_until(lambda: not a.transport.silent_links(), "it answers")
    proxy.close()
    a.transport.close()
    b.transport.close()


def test_a_region_grows_for_a_larger_message() -> None:
    ends = [End(TcpTransport(i, KEY, LOCAL)) for i in range(2)]
    a, b = ends
    for i, end in enumerate(ends):
        end.transport.connect({1 - i: ends[1 - i].transport.address})
    assert a.transport.largest_message(1) == LARGEST_BODY
    body = random.randbytes(3 * a.transport.max_message(1))
    sent = [(0, b"before"), (1, body), (2, b"after")]
    for task, message in sent:
        assert a.transport.send(1, task, (message,))
    while len(b.mail) < 3:
        a.receive()
        b.receive()
    assert b.mail == sent
    assert a.transport.max_message(1) >= len(body)
    with pytest.raises(ValueError, match="the most is 134,217,728"):
        a.transport.send(1, 0, (memoryview(bytearray(LARGEST_BODY + 1)),))
    # Messages have been made for this size, so the next process's region has it at once.
    a.transport.drop([1])
    next_b = TcpTransport(1, KEY, LOCAL)
    a.transport.connect({1: next_b.address})
    assert a.transport.max_message(1) >= len(body)
    for transport in (a.transport, b.transport, next_b):
        transport.close()


def test_the_descriptor_is_readable_when_there_is_something_to_do(net: Network) -> None:
    poll = select.poll()
    poll.register(net.b.transport.fileno(), select.POLLIN)
    net.b.receive()
    assert not poll.poll(0)
    for i in range(3):
        assert net.a.transport.send(1, i, (b"hello",))
        assert poll.poll(LIMIT_S * 1000)
        assert net.take(net.b, 1) == [(i, b"hello")]
        assert not poll.poll(0)
    net.b.transport.wake()
    assert poll.poll(0)
    net.b.receive()
    assert not poll.poll(0)


def test_a_worker_that_has_found_no_room_need_not_wait_until_a_message_comes(net: Network) -> None:
    net.wait_for_room()


def test_a_peer_that_was_only_held_up_keeps_its_connection(net: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first look a probe has had no answer for long. At the next one, beside the new connection, it has."""
    net.settle()
    before = [end.transport._out[1 - number].connection for number, end in enumerate(net.ends)]
    looks: Counter[int] = Counter()
    honest = peer_links._TCP_INFO

    class Info:
        size = honest.size

        def unpack_from(self, info: bytes) -> tuple[Any, ...]:
            looks[threading.get_ident()] += 1
            return (0, 1, 5000, 5000, 100) if looks[threading.get_ident()] == 1 else honest.unpack_from(info)

    monkeypatch.setattr(peer_links, "_TCP_INFO", Info())
    net.until(lambda: len(looks) == 2 and min(looks.values()) > 2, "both have looked again")
    net.settle()
    assert [end.transport._out[1 - number].connection for number, end in enumerate(net.ends)] == before


def test_an_idle_connection_sends_nothing(net: Network) -> None:
    """The kernel probes it; neither run loop has anything to do."""
    poll = select.poll()
    for end in net.ends:
        end.receive()
        poll.register(end.transport.fileno(), select.POLLIN)
    assert not poll.poll(1200)
    assert [end.transport.silent_links() for end in net.ends] == [[], []]


def test_the_system_tells_what_a_connection_carries_and_for_how_long_its_peer_had_no_room(net: Network) -> None:
    body = b"x" * 1000
    assert net.a.transport.send(1, 0, (body,))
    assert net.take(net.b, 1) == [(0, body)]
    sent = net.a.transport.sent_bytes()[1]
    wait_until(lambda: net.a.transport.links()[1].acknowledged >= sent, "what was sent is acknowledged")
    assert net.a.transport.links().keys() == {1}
    idle = net.a.transport.links()[1]
    assert not idle.full
    assert not idle.held_s
    assert idle.rate > 0
    net.b.asleep = True
    while net.a.transport.send(1, 0, (body,)):
        net.a.receive()
    wait_until(lambda: net.a.transport.links()[1].held_s > 0.05, "the bytes wait for the peer")
    assert net.a.transport.links()[1].acknowledged < net.a.transport.sent_bytes()[1]


class _Restricted(socket.socket):
    """A socket of a user who may choose no congestion control."""

    def setsockopt(self, level: int, option: int, *value: object) -> None:
        if (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION):
            raise PermissionError
        super().setsockopt(level, option, *value)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("kind", "of_the_machine", "used"),
    [(socket.socket, "bbr", "cubic"), (socket.socket, "reno", "reno"), (_Restricted, "bbr", "bbr")],
)
def test_connections_do_not_pause_under_bbr_where_the_system_lets_them_choose(
    kind: type[socket.socket], of_the_machine: str, used: str
) -> None:
    with kind(socket.AF_INET, socket.SOCK_STREAM) as connection:
        for wanted in (used, of_the_machine):
            try:
                socket.socket.setsockopt(connection, socket.IPPROTO_TCP, socket.TCP_CONGESTION, wanted.encode())
            except OSError as error:
                pytest.skip(f"this machine does not let us use {wanted}: {error}")
        peer_links.prepare(connection)
        chosen = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert chosen.rstrip(b"\0").decode() == used


def test_nothing_is_left_after_closing() -> None:
    before = descriptors(), threads()
    net = Tcp(3)
    net.settle()
    net.replace(1)
    net.settle()
    net.close()
    assert (descriptors(), threads()) == before


def test_a_fork_that_closes_leaves_the_connections_alone(net: Network) -> None:
    """As when a user's function makes a fork, which ends with all that it has inherited."""
    child = os.fork()
    if not child:
        try:
            net.close()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    connections = [end.transport._out[1 - i].connection for i, end in enumerate(net.ends)]
    net.settle()
    assert [end.transport._out[1 - i].connection for i, end in enumerate(net.ends)] == connections


def test_a_transport_that_was_never_used_closes() -> None:
    before = descriptors()
    transport = TcpTransport(0, KEY, LOCAL)
    transport.connect({1: "tcp://127.0.0.1:9/" + "00" * 16})
    transport.close()
    transport.wake()
    assert descriptors() == before


def test_a_connection_that_comes_before_its_worker_is_known_waits() -> None:
    """A peer may be told of this worker earlier than this worker of the peer."""
    a, b = (End(TcpTransport(i, KEY, LOCAL)) for i in range(2))
    a.transport.connect({1: b.transport.address})
    assert a.transport.send(1, 5, (b"early",))
    wait_until(lambda: b.receive() or b.transport._parked, "the connection has come")
    assert b.mail == []
    b.transport.connect({0: a.transport.address})
    while not b.mail:
        a.receive()
        b.receive()
    assert b.mail == [(5, b"early")]
    a.transport.close()
    b.transport.close()


def test_ipv6() -> None:
    try:
        a, b = (End(TcpTransport(i, KEY, "::1")) for i in range(2))
    except OSError:
        pytest.skip("this machine has no IPv6")
    assert a.transport.address.startswith("tcp://[::1]:")
    a.transport.connect({1: b.transport.address})
    b.transport.connect({0: a.transport.address})
    assert a.transport.send(1, 0, (b"6",))
    while not b.mail:
        a.receive()
        b.receive()
    a.transport.close()
    b.transport.close()


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Two authorities. Who uses "both" accepts what one of them has signed."""
    folder = Folder(tmp_path_factory.mktemp("certificates"))
    folder.authority("job")
    folder.authority("other")
    (folder.path / "both.pem").write_text(
        (folder.path / "job.pem").read_text() + (folder.path / "other.pem").read_text()
    )
    return folder


def _tls(folder: Folder, name: str, authority: str = "job") -> TlsContexts:
    return TlsContexts(folder.tls(name, authority))


def test_messages_of_all_sizes_over_tls(certificates: Folder) -> None:
    ends = [End(TcpTransport(i, KEY, LOCAL, tls=_tls(certificates, "job"))) for i in range(2)]
    for i, end in enumerate(ends):
        end.transport.connect({1 - i: ends[1 - i].transport.address})
    sizes = [0, 1, 100, 5000, 70_000, 3_000_000]
    sent = [(i, b"%d " % i + os.urandom(sizes[i % 6])) for i in range(120)]
    to_send = sent[:]
    a, b = ends
    while len(b.mail) < len(sent):
        while to_send and a.transport.send(1, to_send[0][0], (to_send[0][1],)):
            to_send.pop(0)
        a.receive()
        b.receive()
    assert b.mail == sent
    for end in ends:
        end.transport.close()


@pytest.mark.parametrize("certificate", ["other", "none"])
def test_who_has_no_certificate_of_the_job_is_refused(certificates: Folder, certificate: str) -> None:
    """Though it knows the key."""
    a = End(TcpTransport(0, KEY, LOCAL, tls=None if certificate == "none" else _tls(certificates, "other", "both")))
    b = End(TcpTransport(1, KEY, LOCAL, tls=_tls(certificates, "job")))
    a.transport.connect({1: b.transport.address})
    b.transport.connect({0: a.transport.address})
    a.transport.send(1, 0, (b"let me in",))
    wait_until(lambda: b.transport._links._told._at, "it was refused")
    a.receive()
    b.receive()
    assert b.mail == []
    assert b.transport._in[0].connection is None
    a.transport.close()
    b.transport.close()


# --- the handshake ----------------------------------------------------------------------------------------------------

A, B = Process(0, b"a" * 16), Process(1, b"b" * 16)


def _meet(one: Introducing, other: Admitting) -> bytes:
    """Both ends talk; what the connecting end said."""
    said = one.output
    other.take(one.output)
    one.take(other.output)
    said += one.output
    other.take(one.output)
    assert (one.need, other.need) == (0, 0)
    return said


def test_two_processes_of_the_job_know_each_other() -> None:
    admitting = Admitting(KEY, B)
    _meet(Introducing(KEY, A, B, 7, 4096), admitting)
    assert (admitting.peer, admitting.number, admitting.capacity) == (A, 7, 4096)


@pytest.mark.parametrize("wrong", ["key of one", "key of other", "process meant", "sender"])
def test_a_handshake_with_something_wrong_proves_nothing(wrong: str) -> None:
    one = Introducing(KEY if wrong != "key of one" else b"?" * 32, A, B, 7, 4096)
    other = Admitting(
        KEY if wrong != "key of other" else b"?" * 32, B if wrong != "process meant" else Process(1, b"?" * 16)
    )
    if wrong == "sender":  # somebody between them changes who it comes from
        one.output = one.output.replace(A.incarnation, b"c" * 16)
    with pytest.raises((NotProved, EOFError)):
        _meet(one, other)
    assert other.need


def test_what_was_said_once_proves_nothing_later_or_to_its_sender() -> None:
    said = _meet(Introducing(KEY, A, B, 7, 4096), Admitting(KEY, B))
    replayed = Admitting(KEY, B)
    size = replayed.need
    replayed.take(said[:size])
    with pytest.raises(NotProved):
        replayed.take(said[size:])
    victim = Introducing(KEY, A, B, 8, 4096)
    with pytest.raises(NotProved):
        victim.take(said[: victim.need])
    # A peer that is asked to prove itself by its own words, at its own port.
    victim, itself = Introducing(KEY, A, B, 9, 4096), Admitting(KEY, A)
    with pytest.raises(EOFError):
        itself.take(victim.output)


# --- strangers --------------------------------------------------------------------------------------------------------


def _connect(net: Network) -> socket.socket:
    return socket.create_connection(host_and_port(net.b.transport))


def _refused(stranger: socket.socket) -> None:
    """Waits until the other end has hung up."""
    stranger.settimeout(LIMIT_S)
    try:
        while stranger.recv(1000):
            pass
    except ConnectionError:
        pass
    stranger.close()


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def _port_scan(net: Network) -> None:
    for _ in range(25):  # both scans together are fewer than the strangers that may wait at once
        _connect(net).close()


def _random_bytes(net: Network) -> None:
    for size in (1, 10, 127, 128, 129, 1000, 100_000):
        stranger = _connect(net)
        try:
            stranger.sendall(os.urandom(size))
            stranger.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        _refused(stranger)


def _four_gigabytes(net: Network) -> None:
    stranger = _connect(net)
    stranger.sendall(FRAME_HEAD.pack(0xFFFF_FFFF, 0, 0) * 20)
    _refused(stranger)


def _wrong_secret(net: Network) -> None:
    stranger = TcpTransport(0, b"another secret, of 32 bytes too.", LOCAL)
    stranger.connect({1: net.b.transport.address})
    wait_until(lambda: net.b.transport._links._told._at, "it was refused")
    stranger.close()


def _replay(net: Network) -> None:
    """What a real peer has said, said again to the same process."""
    own, key = net.b.transport._own, KEY
    talk = Introducing(key, net.a.transport._own, own, 99, 4096)
    recorded = talk.output
    with _connect(net) as peer:
        peer.sendall(talk.output)
        talk.take(peer.recv(talk.need, socket.MSG_WAITALL))
        recorded += talk.output
    with _connect(net) as stranger:
        stranger.sendall(recorded)
        _refused(stranger)


@pytest.mark.parametrize(
    ("attack", "why"),
    [
        (_port_scan, "was gone or silent before it had proved"),
        (_random_bytes, "has connected"),
        (_four_gigabytes, "was refused, because it has not proved"),
        (_wrong_secret, "was refused, because it has not proved"),
        (_replay, "was refused, because it has not proved"),
    ],
)
def test_strangers_are_refused_and_told_once(
    net: Network, attack: Callable[[Network], None], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = descriptors()
    attack(net)
    attack(net)
    wait_until(lambda: not net.b.transport._links._strangers, "all strangers are gone")
    wait_until(lambda: descriptors() == before, "their descriptors are closed")
    wait_until(lambda: _told(caplog), "it is told")
    net.settle()
    told = [message for message in _told(caplog) if "worker 1" in message]
    assert len(told) == 1
    assert "a process of 127.0.0.1 has connected to worker 1" in told[0]
    assert why in told[0]
    net.settle()
    assert net.a.mail == net.b.mail == []


def test_a_peer_that_leaves_in_the_middle_of_tls_is_no_stranger(caplog: pytest.LogCaptureFixture) -> None:
    """Before it hangs up, it says who it is, for which TLS must have begun."""
    tls = TlsContexts(JobCertificate.make())
    a, b = (TcpTransport(worker, KEY, LOCAL, tls=tls) for worker in range(2))
    with socket.create_server((LOCAL, 0)) as door:
        a.connect({1: f"tcp://{LOCAL}:{door.getsockname()[1]}/{b.address.rpartition('/')[2]}"})
        here = door.accept()[0]
        assert here.recv(1, socket.MSG_PEEK), "its first words of TLS"
        a.forget([1])
        wait_until(lambda: not a._links._targets, "it wants no connection any more")
        with here, socket.create_connection(host_and_port(b)) as there:
            _pass_on(here, there)
    wait_until(lambda: not b._links._strangers, "the connection is over")
    a.close()
    b.close()
    assert _told(caplog) == []


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    """Passes on what comes, until one end has hung up."""
    with selectors.DefaultSelector() as ready:  # not select(), whose file descriptors must be below 1024
        ready.register(one, selectors.EVENT_READ, other)
        ready.register(other, selectors.EVENT_READ, one)
        while True:
            for source, _ in ready.select(LIMIT_S):
                data = source.fileobj.recv(65536)  # type: ignore[union-attr]
                if not data:
                    return
                source.data.sendall(data)


def test_who_says_nothing_or_little_is_shown_out(net: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_links, "_HANDSHAKE_S", 0.2)
    silent, slow = _connect(net), _connect(net)
    try:
        for _ in range(1000):
            slow.send(b"p")
            time.sleep(0.005)
        pytest.fail("it may send as slowly as it likes")
    except ConnectionError:
        slow.close()
    _refused(silent)
    net.settle()


def test_a_thousand_strangers_hold_up_nobody(net: Network) -> None:
    """They stay connected and say nothing. A worker's next process connects in between."""
    strangers: list[socket.socket] = []
    most = 0
    for i in range(1000):
        strangers.append(_connect(net))
        most = max(most, len(net.b.transport._links._strangers))
        if i % 100 == 50:
            net.settle()
        if i == 500:
            net.replace(0)
    net.settle()
    assert most <= 65
    wait_until(lambda: len(net.b.transport._links._strangers) <= 64, "most are refused")
    for stranger in strangers:
        stranger.close()


# --- peers that do not keep to the protocol ---------------------------------------------------------------------------


class BadPeer:
    """Worker 0, played by the test: it knows the key."""

    def __init__(self, transport: TcpTransport) -> None:
        self.process = Process(0, os.urandom(16))
        self.transport = transport
        self.listener = socket.create_server((LOCAL, 0))
        self.number = 0
        transport.connect({0: f"tcp://{LOCAL}:{self.listener.getsockname()[1]}/{self.process.incarnation.hex()}"})

    def connect(self) -> socket.socket:
        """Connects as a sender that has proved itself."""
        self.number += 1
        talk = Introducing(KEY, self.process, self.transport._own, self.number, 4096)
        connection = socket.create_connection(host_and_port(self.transport))
        connection.settimeout(LIMIT_S)
        connection.sendall(talk.output)
        talk.take(connection.recv(talk.need, socket.MSG_WAITALL))
        connection.sendall(talk.output)
        return connection

    def accept(self) -> socket.socket:
        """Is connected to, as a receiver that has proved itself. Of the connections that are tried at the same time,
        the transport ends all but one."""
        while True:
            connection, _ = self.listener.accept()
            connection.settimeout(LIMIT_S)
            talk = Admitting(KEY, self.process)
            with suppress(ConnectionError):
                while talk.need:
                    said = connection.recv(talk.need, socket.MSG_WAITALL)
                    if len(said) < talk.need:
                        break
                    talk.take(said)
                    if talk.need:
                        connection.sendall(talk.output)
            if not talk.need:
                return connection
            connection.close()


@pytest.fixture
def bad() -> Iterator[BadPeer]:
    peer = BadPeer(TcpTransport(1, KEY, LOCAL))
    yield peer
    peer.listener.close()
    peer.transport.close()


@pytest.mark.parametrize(
    "head", [FRAME_HEAD.pack(0xFFFF_FFFF, 0, 1), FRAME_HEAD.pack(0, 0, 0), FRAME_HEAD.pack(0, 0, 2), b"\xff" * 16]
)
def test_a_peer_with_a_wrong_head_is_disconnected_and_told_once(
    bad: BadPeer, head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Also a peer that has proved itself. What it had sent before stays received."""
    got: list[tuple[int, bytes]] = []
    for attempt in range(3):
        connection = bad.connect()
        data = b"" if attempt else FRAME_HEAD.pack(4, 3, 0) + b"good"
        connection.sendall(data + head)
        connection.settimeout(0.001)
        answer = b""
        deadline = time.monotonic() + LIMIT_S
        while True:
            assert time.monotonic() < deadline, "it stays connected"
            got += [(task, bytes(body)) for task, body in bad.transport.receive(0)]
            try:
                more = connection.recv(100)
            except TimeoutError:
                continue
            except ConnectionError:
                break
            if not more:
                break
            answer += more
        position = ACKNOWLEDGEMENT.unpack_from(answer)[0]
        assert position == (20 if attempt else 0)
        connection.close()
    assert got == [(3, b"good")]
    told = [message for message in _told(caplog) if "does not follow the protocol" in message]
    assert len(told) == 1
    assert "worker 0 at tcp://127.0.0.1:" in told[0]
    assert bad.transport._in[0]._buffer is bad.transport._in[0]._usual


@pytest.mark.parametrize("answer", [ACKNOWLEDGEMENT.pack(1 << 40, 0), ACKNOWLEDGEMENT.pack(0, 9), b"\1" * 16])
def test_a_peer_with_a_wrong_acknowledgement_frees_nothing(
    bad: BadPeer, answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert bad.transport.send(0, 0, (b"x" * 100,))
    for _ in range(3):
        connection = bad.accept()
        connection.sendall(answer)
        wait_until(lambda c=connection: bad.transport.receive(0.001) or _gone(c), "it is disconnected")
        connection.close()
    assert bad.transport._out[0].stream.region.outstanding == 116
    assert len([message for message in _told(caplog) if "does not follow the protocol" in message]) == 1


def test_a_peer_that_is_of_no_use_is_not_asked_without_end(bad: BadPeer) -> None:
    """The pauses between its connections grow: they last 0.01, 0.02, 0.04, 0.08 and 0.16 s after the first ones."""
    started = time.monotonic()
    for _ in range(9):
        connection = bad.accept()
        connection.sendall(b"\1" * 16)
        wait_until(lambda c=connection: bad.transport.receive(0.001) or _gone(c), "it is disconnected")
        connection.close()
    assert time.monotonic() - started >= 0.31


def _gone(connection: socket.socket) -> bool:
    connection.settimeout(0.001)
    try:
        return not connection.recv(1000)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_late_connection_of_a_process_that_was_dropped_is_closed(bad: BadPeer) -> None:
    """It has proved that it belongs to the job, but the worker has another process now."""
    bad.transport.drop([0])
    next_one = TcpTransport(0, KEY, LOCAL)
    bad.transport.connect({0: next_one.address})
    connection = bad.connect()
    connection.sendall(FRAME_HEAD.pack(4, 3, 0) + b"late")
    connection.settimeout(0.001)
    deadline = time.monotonic() + LIMIT_S
    while True:
        assert time.monotonic() < deadline, "it stays connected"
        assert not bad.transport.receive(0)
        try:
            assert not connection.recv(100), "it is answered"
            break
        except TimeoutError:
            continue
        except ConnectionError:
            break
    connection.close()
    next_one.close()


def test_a_key_has_some_length() -> None:
    with pytest.raises(ValueError, match="at least 16 bytes"):
        TcpTransport(0, b"short", LOCAL)


def test_a_peer_whose_process_is_stopped_does_not_look_like_one_that_is_cut_off() -> None:
    """Its kernel takes connections, and nobody answers them."""
    a = TcpTransport(0, KEY, LOCAL)
    with socket.create_server((LOCAL, 0)) as stopped:
        a.connect({1: f"tcp://{LOCAL}:{stopped.getsockname()[1]}/{bytes(16).hex()}"})
        held = [stopped.accept()[0]]
        (target,) = a._links._targets.values()
        while time.monotonic() - target.heard_at < 2 * peer_links._TOLD_S:
            held.append(stopped.accept()[0])
            assert a.silent_links() == []
        for connection in held:
            connection.close()
    wait_until(lambda: any(link.refused for link in a.silent_links()), "nobody takes connections any more")
    a.close()
