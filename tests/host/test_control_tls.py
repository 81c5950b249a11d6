"""Control over TLS: who has no certificate of the job is refused, and nobody in between sees what is said."""

from __future__ import annotations

import logging
import os
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from penstock.host.process import control
from penstock.host.process.control import ControlClient, ControlServer, End
from penstock.host.process.network import Network
from penstock.host.process.node_agent import NodeAgent, NodeLine
from penstock.runtime.transport import endpoint
from penstock.runtime.transport.certificates import BadCertificate, JobCertificate
from penstock.runtime.transport.endpoint import Ports
from penstock.runtime.transport.tls import TlsContexts
from tests.e2e.processes import LIMIT_S, wait_until

LOCAL = "127.0.0.1"
CLEAR = b"this is a secret record"


@pytest.fixture(scope="module")
def job() -> JobCertificate:
    return JobCertificate.make()


@pytest.fixture(scope="module")
def other() -> JobCertificate:
    return JobCertificate.make()


@pytest.fixture
def server(job: JobCertificate) -> Iterator[ControlServer]:
    made = ControlServer(lambda said: said, Ports(LOCAL, tls=job))
    yield made
    made.close()


class Tap:
    """A forwarder between a client and a server, which keeps what it sees."""

    def __init__(self, end: End) -> None:
        self.seen = bytearray()
        self._target = endpoint.host_and_port(end.address)
        self._listener = socket.create_server((LOCAL, 0))
        self.end = End(endpoint.tcp_address(*self._listener.getsockname()), end.key, end.tls)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                for one, another in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(one, another), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                self.seen += data
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _passes(tls: JobCertificate | None) -> bytes:
    """What somebody in between sees of a question and its answer."""
    server = ControlServer(lambda said: said, Ports(LOCAL, tls=tls))
    tap = Tap(server.end)
    line = ControlClient(tap.end, "line")
    assert line.ask((CLEAR, 1)).result(LIMIT_S) == (CLEAR, 1)
    for closing in (line, tap, server):
        closing.close()
    return bytes(tap.seen)


def test_nobody_in_between_sees_what_is_said(job: JobCertificate) -> None:
    assert CLEAR in _passes(None), "the tap sees what is not encrypted"
    seen = _passes(job)
    assert len(seen) > 1000
    assert CLEAR not in seen


def test_large_and_many_messages_both_ways(server: ControlServer) -> None:
    """Requests are sent while answers are read."""
    line = ControlClient(server.end, "line")
    bodies = [os.urandom(size) for size in (1, 20_000, 3_000_000)] * 20
    answers = [line.ask((body,)) for body in bodies]
    assert [answer.result(LIMIT_S) for answer in answers] == [(body,) for body in bodies]
    line.close()


@pytest.mark.parametrize("encrypted", [True, False])
def test_what_was_asked_before_there_was_a_connection_is_sent_while_answers_are_read(
    server: ControlServer, encrypted: bool
) -> None:
    """The worker sends answers that are larger than all buffers, and meanwhile takes no requests."""
    there = server if encrypted else ControlServer(lambda said: said, Ports(LOCAL))
    line = ControlClient(End(endpoint.tcp_address(LOCAL, 1), there.end.key, there.end.tls), "line")
    bodies = [os.urandom(3_000_000) for _ in range(20)]
    answers = [line.ask((body,)) for body in bodies]
    line._end = there.end
    assert [answer.result(LIMIT_S) for answer in answers] == [(body,) for body in bodies]
    line.close()
    there.close()


def test_a_connection_that_breaks_is_made_again(server: ControlServer) -> None:
    line = ControlClient(server.end, "line")
    for number in range(10):
        wait_until(lambda: line._connection is not None, "it is connected")
        assert line._connection is not None
        control._hang_up(line._connection)
        assert line.ask((number,)).result(LIMIT_S) == (number,)
    line.close()


def test_an_agent_and_its_line_speak_tls() -> None:
    network = Network(tls=True).secured()
    agent = NodeAgent("job", network.ports(LOCAL), LIMIT_S, lambda: None)
    assert agent.end.tls == network.certificate
    line = NodeLine("there", agent.end, LIMIT_S, lambda reason: None)
    assert line.wait_for_clock(LIMIT_S) is not None
    line.close()
    agent.close()


@pytest.mark.parametrize("accepts", [True, False])
def test_a_node_whose_certificate_is_of_another_authority_is_told_as_that(
    job: JobCertificate, other: JobCertificate, accepts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent does not accept the JobMaster's certificate, and the JobMaster accepts the agent's, or does not."""
    agent = NodeAgent("job", Ports(LOCAL, tls=other), LIMIT_S, lambda: None)
    if accepts:
        contexts = TlsContexts(job)
        contexts.context(server=False).load_verify_locations(cadata=other.certificate)
        monkeypatch.setattr(control, "_contexts", lambda credentials: contexts)
    said: list[str] = []
    lost = threading.Event()

    def take(reason: str) -> None:
        said.append(reason)
        lost.set()

    line = NodeLine("there", End(agent.end.address, agent.end.key, job), 3.0, take)
    why = "node there cannot be asked for anything, because the certificates do not fit together .TLS: "
    with pytest.raises(BadCertificate, match=why):
        line.wait_for_clock(LIMIT_S)
    assert lost.wait(LIMIT_S)
    assert re.match(why, said[0])
    line.close()
    agent.close()


# --- strangers --------------------------------------------------------------------------------------------------------


def _told(caplog: pytest.LogCaptureFixture) -> str:
    wait_until(lambda: "has connected to" in caplog.text, "the stranger is told")
    return caplog.text


def _is_refused(server: ControlServer, tls: JobCertificate | None, caplog: pytest.LogCaptureFixture) -> ControlClient:
    """Somebody who knows the key is not let in. Returns the stranger."""
    line = ControlClient(End(server.end.address, server.end.key, tls), "stranger")
    asked = line.ask((1,))
    _told(caplog)
    assert not asked.done()
    assert server.heard == 0
    return line


def test_who_does_not_speak_tls_is_refused_though_it_knows_the_key(
    server: ControlServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits until the server has said something, as a control client does; so it has a deadline."""
    monkeypatch.setattr(control, "_HANDSHAKE_S", 0.3)
    _is_refused(server, None, caplog).close()


def test_who_has_another_certificate_is_refused_and_both_are_told(
    server: ControlServer, other: JobCertificate, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        line = _is_refused(server, other, caplog)
        wait_until(lambda: "cannot be asked for anything: TLS: self-signed certificate" in caplog.text, "it is told")
    line.close()


def test_who_accepts_the_job_and_shows_another_certificate_is_refused(
    server: ControlServer, job: JobCertificate, other: JobCertificate, caplog: pytest.LogCaptureFixture
) -> None:
    context = TlsContexts(other).context(server=False)
    context.load_verify_locations(cadata=job.certificate)
    _knock(server, context)
    assert "TLS: self-signed certificate" in _told(caplog)


def test_who_shows_no_certificate_is_refused(
    server: ControlServer, job: JobCertificate, caplog: pytest.LogCaptureFixture
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    _knock(server, context)
    assert "TLS: peer did not return a certificate" in _told(caplog)


def _knock(server: ControlServer, context: ssl.SSLContext) -> None:
    """Connects with a context of its own. Nothing but a refusal comes."""
    plain = socket.create_connection(endpoint.host_and_port(server.end.address), LIMIT_S)
    with context.wrap_socket(plain) as stream, suppress(OSError):
        assert stream.recv(100) == b"", "the server has said something"


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\x16\x03\x01\xff\xff" + os.urandom(70_000)])
def test_who_sends_anything_else_is_refused_and_holds_up_nobody(
    server: ControlServer, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(endpoint.host_and_port(server.end.address), LIMIT_S) as one, suppress(OSError):
        one.sendall(said)
        one.shutdown(socket.SHUT_WR)
        while one.recv(1000):
            pass
    assert "127.0.0.1 has connected to" in _told(caplog)
    line = ControlClient(server.end, "line")
    assert line.ask((1,)).result(LIMIT_S) == (1,)
    line.close()


def test_who_begins_a_handshake_and_says_nothing_more_is_shown_out(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_HANDSHAKE_S", 0.3)
    with socket.create_connection(endpoint.host_and_port(server.end.address), LIMIT_S) as one:
        one.sendall(b"\x16\x03\x01\x10\x00")  # the head of a long message
        with suppress(ConnectionResetError):
            assert one.recv(100) == b""
    wait_until(lambda: not server._strangers, "it is forgotten")
