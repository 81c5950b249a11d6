"""Control: every answer belongs to its question, however late; a worker that was silent is asked again; a standing
request reaches every worker; and whoever else connects to a worker's socket holds up nobody."""

from __future__ import annotations

import os
import pickle
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import tracemalloc
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.host.carry.links import AllWorkers, Link
from penstock.host.decide.process_commands import GetLoad, GetStatus, Halt, Ping, Stop
from penstock.host.process import control
from penstock.host.process.control import (
    ControlClient,
    ControlServer,
    ControlSession,
    End,
    Gone,
    OpenRequests,
    Refused,
    _hang_up,
)
from penstock.host.process.hangs import SilenceDetector
from penstock.runtime.errors import PenstockError
from penstock.runtime.transport import endpoint, handshake
from penstock.runtime.transport.endpoint import Ports
from tests.e2e.processes import LIMIT_S, wait_until


def asked(workers: AllWorkers, question: object) -> dict[int, Any]:
    """All answers, however long they take."""
    return workers.ask(question, LIMIT_S)


@pytest.fixture
def workers() -> Iterator[AllWorkers]:
    made = AllWorkers()
    yield made
    made.close()


NAMES: dict[type, str] = {GetStatus: "status", GetLoad: "load", Stop: "stop", Ping: "ping"}


class Busy:
    """A worker that answers when it may."""

    def __init__(self, number: int) -> None:
        self.free = threading.Event()
        self.free.set()
        self.calls: Counter[str] = Counter()
        self._number = number
        self.server = ControlServer(self._obey)

    def _obey(self, command: object) -> tuple[int, str, int]:
        assert self.free.wait(LIMIT_S)
        name = NAMES[type(command)]
        self.calls[name] += 1
        return self._number, name, self.calls[name]


# --- answers belong to questions ------------------------------------------------------------------------------------


def fail(command: object) -> int:
    if isinstance(command, Stop):
        return 10
    raise ValueError("no status")


def test_a_failing_answer_leaves_no_answer_for_the_next_question(workers: AllWorkers) -> None:
    servers = [ControlServer(fail)]
    servers += [ControlServer(lambda command, i=i: 10 + i if isinstance(command, Stop) else i) for i in (1, 2)]
    for i, server in enumerate(servers):
        workers.connect(i, server.end, os.getpid())
    for _ in range(20):
        with pytest.raises(PenstockError, match="worker 0 could not answer GetStatus: ValueError: no status"):
            asked(workers, GetStatus())
        assert asked(workers, Stop()) == {0: 10, 1: 11, 2: 12}


def test_a_worker_that_answers_late_is_asked_again(workers: AllWorkers) -> None:
    late, prompt = Busy(0), Busy(1)
    workers.connect(0, late.server.end, 100)
    workers.connect(1, prompt.server.end, 101)
    assert asked(workers, GetStatus()) == {0: (0, "status", 1), 1: (1, "status", 1)}
    late.free.clear()
    for _ in range(28):
        assert 0 not in workers.ask(GetStatus(), 0.01)
    assert set(workers.silent()) == {0}
    late.free.set()
    assert asked(workers, GetLoad()) == {0: (0, "load", 1), 1: (1, "load", 1)}
    wait_until(lambda: not workers.silent(), "the late answer has come")
    assert asked(workers, GetStatus())[0] == (0, "status", 3), "29 questions were one, of which the answer was not lost"


def test_nobody_waits_for_a_worker_that_is_silent_for_long(
    workers: AllWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int] = []

    def note(futures: list[Future[Any]], timeout: float) -> Any:
        waited.append(len(futures))
        return wait(futures, timeout)

    monkeypatch.setattr("penstock.host.carry.links.wait", note)
    silent = Busy(0)
    silent.free.clear()
    workers.connect(0, silent.server.end, 100)
    for _ in range(50):
        assert workers.ask(GetStatus(), 0.01) == {}
    assert sum(waited) < 50 / 2, waited
    silent.free.set()


def test_a_paused_process_answers_again_and_gets_what_was_wished(workers: AllWorkers) -> None:
    code = (
        "import sys, threading; from penstock.host.process.control import ControlServer; stopped = []\n"
        "from penstock.host.decide.process_commands import Stop\n"
        "s = ControlServer(lambda command: stopped.append(1) if isinstance(command, Stop) else len(stopped))\n"
        "print(repr((s.end.address, s.end.key)), flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        end = End(*eval(process.stdout.readline()))
        workers.connect(0, end, process.pid)
        assert asked(workers, GetStatus()) == {0: 0}
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)  # until it has stopped
        assert workers.ask(GetStatus(), 0.05) == {}
        workers.standing_request(Stop())
        # Nor does a worker that is connected to while it is paused hold anybody up.
        workers.connect(1, end, process.pid)
        assert workers.ask(GetStatus(), 0.05) == {}
        assert set(workers.silent()) == {0, 1}
        os.kill(process.pid, signal.SIGCONT)
        wait_until(lambda: asked(workers, GetStatus()) == {0: 2, 1: 2}, "it was told to stop, once as each of the two")
    finally:
        process.kill()
        process.communicate()


def test_a_connection_that_breaks_is_made_again_and_nothing_is_done_twice() -> None:
    busy = Busy(0)
    line = ControlClient(busy.server.end, "line")
    try:
        for n in range(1, 20):
            busy.free.clear()
            future = line.ask(Stop())
            if n % 3:
                wait_until(lambda: line._connection is not None, "it is connected")
                assert line._connection is not None
                _hang_up(line._connection)
            if n % 2:
                busy.free.set()
                assert future.result(LIMIT_S) == (0, "stop", n)
            busy.free.set()
            assert future.result(LIMIT_S) == (0, "stop", n)
    finally:
        line.close()


def test_what_a_worker_that_has_gone_was_asked_ends() -> None:
    """Whoever watches the process says that it has gone; until then it may be one that cannot be reached for now."""
    gone = End("\0penstock-nobody-" + os.urandom(8).hex(), b"key")
    before = set(threading.enumerate())
    link = Link(0, gone)
    told: list[str] = []
    for command in (Stop(), Halt()):
        link.send(command, lambda _: told.append("answered"), lambda _: told.append("refused"))
    link.close()
    wait_until(lambda: not set(threading.enumerate()) - before, "the link's threads have ended")
    assert told == []
    workers = AllWorkers()
    workers.connect(0, gone, 100)
    assert workers.ask(GetStatus(), 0.01) == {}
    workers.disconnect(0)
    assert asked(workers, GetStatus()) == {}
    line = ControlClient(gone, "line")
    line.close()
    with pytest.raises(Gone):
        line.ask(GetStatus()).result(0)


def test_what_somebody_said_who_has_gone_is_not_done() -> None:
    """A worker is paused while its JobMaster dies, and must not do what that one wanted when it continues."""
    before = set(threading.enumerate())
    busy = Busy(0)
    busy.free.clear()
    line = ControlClient(busy.server.end, "line")
    line.ask(GetStatus())
    line.ask(Stop())
    wait_until(lambda: busy.server.heard == 1, "it is at the first")
    line.close()
    busy.free.set()
    busy.server.close()
    wait_until(lambda: not set(threading.enumerate()) - before, "the worker has seen that it has gone")
    assert busy.calls == {"status": 1}


def test_commands_keep_their_order_and_refusals_their_errors() -> None:
    done: list[int] = []

    def do(number: int) -> int:
        done.append(number)
        if number == 3:
            raise KeyError(number)
        return 2 * number

    server = ControlServer(do)
    link = Link(0, server.end)
    came: list[object] = []
    over = threading.Event()
    for number in range(6):
        link.send(number, came.append, came.append)
    cannot_travel = threading.Lock()
    link.send(cannot_travel, came.append, lambda error: (came.append(error), over.set()))  # type: ignore[func-returns-value]
    assert over.wait(LIMIT_S)
    link.close()
    assert done == list(range(6))
    assert came[:3] + came[4:6] == [0, 2, 4, 8, 10]
    assert isinstance(came[3], Refused)
    assert isinstance(came[3].error, KeyError)
    assert isinstance(came[6], Refused)
    assert isinstance(came[6].error, TypeError)


# --- whatever is late, and whatever breaks ----------------------------------------------------------------------------


def torment(seed: int, steps: int = 60, limit_s: float = LIMIT_S) -> None:
    """Workers are busy for a while, connections break, processes are replaced; somebody asks, and wishes."""
    rng = random.Random(seed)
    lives = [Busy(i) for i in range(3)]
    everyone = list(lives)
    workers = AllWorkers()
    for worker, life in enumerate(lives):
        workers.connect(worker, life.server.end, 100 + worker)
    wished = False
    try:
        for _ in range(steps):
            worker = rng.randrange(3)
            what = rng.choice(("ask", "ask", "ask", "busy", "free", "break", "replace", "wish"))
            if what == "ask":
                question = rng.choice((GetStatus(), GetLoad()))
                for answered, (number, name, _) in workers.ask(question, 0.002).items():
                    assert (number, name) == (answered, NAMES[type(question)]), "an answer to another question"
            elif what == "busy":
                lives[worker].free.clear()
            elif what == "free":
                lives[worker].free.set()
            elif what == "break":
                connection = workers._workers[worker]._line._connection
                if connection is not None:
                    _hang_up(connection)
            elif what == "replace" and rng.random() < 0.3:
                lives[worker].free.set()
                lives[worker] = Busy(worker)
                everyone.append(lives[worker])
                workers.connect(worker, lives[worker].server.end, 100 + worker)
            elif what == "wish" and rng.random() < 0.3 and not wished:
                wished = True
                workers.standing_request(Stop())
        if not wished:
            workers.standing_request(Stop())
        for life in lives:
            life.free.set()
        wait_until(lambda: all(life.calls["stop"] for life in lives), "each worker was told to stop", limit_s)
        assert set(asked(workers, GetStatus())) == {0, 1, 2}, "each worker is still asked"
        assert all(life.calls["stop"] <= 1 for life in everyone)
    finally:
        for life in everyone:
            life.free.set()
            life.server.close()
        workers.close()


@pytest.mark.parametrize("seed", range(8))
def test_every_worker_is_asked_and_told_whatever_is_late(seed: int) -> None:
    torment(seed)


def _drop_the_late(self: AllWorkers, question: object, patience_s: float) -> dict[int, Any]:
    """A worker that does not answer in time is not asked again."""
    answers = _ask(self, question, patience_s)
    for worker in self.silent():
        self.disconnect(worker)
    return answers


def _tell_once(self: AllWorkers, request: object) -> None:
    """Those who come later, or are not connected just now, are not told."""
    for questions in self._all():
        questions.ask(request)


_ask = AllWorkers.ask


@pytest.mark.parametrize(
    ("name", "bug"), [("ask", _drop_the_late), ("standing_request", _tell_once)], ids=["drop late", "once"]
)
def test_a_planted_bug_of_whoever_asks_is_found(name: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lets a job that was stopped run for ever."""
    monkeypatch.setattr(AllWorkers, name, bug)

    def found(seed: int) -> bool:
        try:
            torment(seed, limit_s=2.0)
        except (AssertionError, KeyError):
            return True
        return False

    assert any(found(seed) for seed in range(20))


def _once(self: OpenRequests) -> list[bytes]:
    """What was asked over a connection that broke is not asked again."""
    return []


def _again(self: ControlSession, message: bytes, do: Callable[[bytes], bytes]) -> bytes:
    """What was done already is done again."""
    (number, _) = struct.unpack_from("<QQ", message)
    with self._lock:
        return struct.pack("<Q", number) + do(message[16:])


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [(OpenRequests, "again", _once), (ControlSession, "take", _again)],
    ids=["once", "again"],
)
def test_a_planted_bug_of_the_memories_is_found(
    owner: Any, name: str, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug)

    def found(seed: int) -> bool:
        try:
            model(random.Random(seed))
        except AssertionError:
            return True
        return False

    assert any(found(seed) for seed in range(200))


def model(rng: random.Random) -> None:
    """Both ends' memories over connections that deliver late, and break with what is under way in each direction."""
    asked_, session = OpenRequests(), ControlSession()
    done: list[int] = []
    futures: list[Future[Any]] = []

    def do(body: bytes) -> bytes:
        done.append(int(body))
        return body

    class Connection:
        def __init__(self) -> None:
            self.there: deque[bytes] = deque(asked_.again())
            self.back: deque[bytes] = deque()

    connections = [Connection()]  # the last is the asking end's; the others broke, and are still read by the worker
    for step in range(200):
        ending = step > 150
        what = rng.choice(("work", "read") if ending else ("ask", "work", "work", "read", "read", "break"))
        current = connections[-1]
        if what == "ask":
            future: Future[Any] = Future()
            current.there.append(asked_.add("do", b"%d" % len(futures), future))
            futures.append(future)
        elif what == "work":
            some = rng.choice(connections)
            if some.there:
                answer = session.take(some.there.popleft(), do)
                if answer is not None:
                    some.back.append(answer)
        elif what == "read" and current.back:
            message = current.back.popleft()
            found = asked_.answered(struct.unpack_from("<Q", message)[0])
            if found is not None:
                found[1].set_result(int(message[8:]))
        elif what == "break":
            connections.append(Connection())
    current = connections[-1]
    while current.there or current.back:
        if current.there and (answer := session.take(current.there.popleft(), do)) is not None:
            current.back.append(answer)
        if current.back:
            message = current.back.popleft()
            found = asked_.answered(struct.unpack_from("<Q", message)[0])
            if found is not None:
                found[1].set_result(int(message[8:]))
    assert [future.result(0) if future.done() else None for future in futures] == list(range(len(futures)))
    assert done == list(range(len(futures))), "each once, in order"
    assert not session._answers or len(session._answers) <= len(futures)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_each_request_is_done_once_in_order_whatever_breaks(seed: int) -> None:
    model(random.Random(seed))


# --- strangers --------------------------------------------------------------------------------------------------------


everywhere = pytest.mark.parametrize("ports", [None, Ports("127.0.0.1"), Ports("::1")], ids=["unix", "ipv4", "ipv6"])


def stranger(server: ControlServer) -> socket.socket:
    made = endpoint.new_socket(server.end.address)
    if made.family == socket.AF_UNIX:
        made.connect(server.end.address)  # waits for room in the backlog, which with a time limit it does not
    else:
        made.connect(endpoint.host_and_port(server.end.address))
    made.settimeout(LIMIT_S)
    return made


@everywhere
def test_a_stranger_who_says_nothing_holds_up_nobody(ports: Ports | None) -> None:
    server = ControlServer(lambda command: 7, ports)
    silent = [stranger(server) for _ in range(control._STRANGERS_MAX * 3)]
    line = ControlClient(server.end, "line")
    assert line.ask(GetStatus()).result(LIMIT_S) == 7
    wait_until(lambda: len(server._strangers) <= control._STRANGERS_MAX, "those beyond the bound are hung up")
    for one in silent:
        one.close()
    line.close()
    wait_until(lambda: not server._strangers, "all are forgotten")


@everywhere
def test_a_peer_that_does_not_prove_itself_in_time_is_hung_up(
    ports: Ports | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_HANDSHAKE_S", 0.2)
    server = ControlServer(lambda command: None, ports)
    slow = stranger(server)
    assert len(slow.recv(1000)) == 32
    slow.send(b"x")
    assert slow.recv(1000) == b"", "the deadline is one for all bytes"


@everywhere
def test_nothing_is_decoded_before_the_peer_has_proved_itself(
    ports: Ports | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[bytes] = []
    monkeypatch.setattr(control, "loads", decoded.append)
    server = ControlServer(lambda command: None, ports)
    with stranger(server) as one:
        assert len(one.recv(1000)) == 32
        one.sendall(bytes(64) + pickle.dumps(("status", ())) * 100)
        with suppress(ConnectionResetError):  # what follows its proof is not even read
            assert one.recv(1000) == b""
    assert decoded == []


class _Peer:
    """As much of a socket as is asked for the user of its peer."""

    def __init__(self, user: int, family: int = socket.AF_UNIX) -> None:
        self.family = family
        self._user = user

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return struct.pack("3i", 4711, self._user, 4711)[:size]


@pytest.mark.parametrize(("user", "in_"), [(0, True), (1000, True), (1001, False), (65534, False)])
def test_only_processes_of_the_same_user_and_of_root_may_knock(
    user: int, in_: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake.os, "geteuid", lambda: 1000)
    assert handshake.of_this_user(_Peer(user)) is in_  # type: ignore[arg-type]
    assert handshake.of_this_user(_Peer(user, socket.AF_INET)) is True  # type: ignore[arg-type]


def test_the_user_of_a_peer_is_known() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert handshake.of_this_user(one)


def test_a_user_who_may_not_knock_is_hung_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "of_this_user", lambda connection: False)
    server = ControlServer(lambda command: None)
    with stranger(server) as one:
        assert one.recv(1000) == b""
    assert not server._strangers


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
def test_both_ends_prove_that_they_know_the_key(family: socket.AddressFamily) -> None:
    """Whatever the sockets' family."""

    def meet(servers: bytes, clients: bytes) -> list[str]:
        if family == socket.AF_UNIX:
            one, other = socket.socketpair(family)
        else:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                other = socket.create_connection(listener.getsockname())
                one, _ = listener.accept()
        outcomes = ["", ""]

        def server() -> None:
            with one:
                try:
                    handshake.admit(one, servers, LIMIT_S)
                    outcomes[0] = "proved"
                except (OSError, EOFError) as error:
                    outcomes[0] = type(error).__name__

        thread = threading.Thread(target=server)
        thread.start()
        with other:
            try:
                handshake.introduce(other, clients, LIMIT_S)
                outcomes[1] = "proved"
            except (OSError, EOFError) as error:
                outcomes[1] = type(error).__name__
        thread.join()
        return outcomes

    assert meet(b"key", b"key") == ["proved", "proved"]
    assert meet(b"key", b"another")[0] == "NotProved"
    assert meet(b"key", b"another")[1] in ("EOFError", "ConnectionResetError")


def test_a_server_that_does_not_know_the_key_is_told_nothing() -> None:
    """Who answers in the worker's place, with its own words sent back, has not proved anything."""
    one, other = socket.socketpair()
    with one, other:
        one.sendall(bytes(32))
        failed: list[Exception] = []

        def client() -> None:
            try:
                handshake.introduce(other, b"key", LIMIT_S)
            except OSError as error:
                failed.append(error)

        thread = threading.Thread(target=client)
        thread.start()
        said = one.recv(1000)
        assert len(said) == 64
        one.sendall(said[32:])
        thread.join()
        assert isinstance(failed[0], handshake.NotProved)


@pytest.mark.parametrize("ports", [None, Ports("127.0.0.1")], ids=["unix", "ipv4"])
def test_strangers_of_every_kind_let_a_client_through(ports: Ports | None) -> None:
    """Random bytes, half of a handshake, very long messages, connections that are closed at once, and silence."""
    server = ControlServer(lambda command: 7, ports)
    over = threading.Event()
    came: Counter[str] = Counter()

    def annoy(seed: int) -> None:
        rng = random.Random(seed)
        kept: list[socket.socket] = []
        while not over.is_set():
            kind = rng.choice(("random", "half", "long", "close", "silent", "drip"))
            try:
                one = stranger(server)
                if kind == "random":
                    one.sendall(rng.randbytes(rng.randrange(1, 300)))
                elif kind == "half":
                    nonce = one.recv(rng.randrange(1, 40))
                    one.sendall(nonce)
                elif kind == "long":
                    one.setblocking(False)
                    one.send(struct.pack("<Q", 1 << 62) + bytes(1 << 20))
                elif kind == "drip":
                    one.send(b"\xff")
                if kind in ("silent", "drip"):
                    kept.append(one)
                    if len(kept) > 200:
                        kept.pop(0).close()
                else:
                    one.close()
                came[kind] += 1
            except OSError:
                came["refused"] += 1
        for one in kept:
            one.close()

    annoying = [threading.Thread(target=annoy, args=(seed,)) for seed in range(3)]
    for thread in annoying:
        thread.start()
    try:
        for _ in range(20):
            line = ControlClient(server.end, "line")
            for _ in range(5):
                assert line.ask(GetStatus()).result(LIMIT_S) == 7
            line.close()
        wait_until(lambda: len(came - Counter(refused=came["refused"])) == 6, "strangers of each kind have come")
    finally:
        over.set()
        for thread in annoying:
            thread.join()
    line = ControlClient(server.end, "line")
    assert line.ask(GetStatus()).result(LIMIT_S) == 7
    line.close()
    server.close()


def test_strangers_of_another_machine_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    server = ControlServer(lambda command: 7, Ports("127.0.0.1"))
    for said in (b"", b"GET / HTTP/1.1\r\n" * 20, bytes(64)):
        with stranger(server) as one, suppress(OSError):
            one.sendall(said)
            one.shutdown(socket.SHUT_WR)
            while one.recv(1000):
                pass
    wait_until(lambda: not server._strangers, "all are forgotten")
    (told,) = [record.getMessage() for record in caplog.records]
    assert "127.0.0.1" in told
    assert server.end.address in told
    server.close()


def test_a_stranger_that_has_gone_is_told_by_its_address(caplog: pytest.LogCaptureFixture) -> None:
    """A port scanner resets its connection at once."""
    server = ControlServer(lambda command: 7, Ports("127.0.0.1"))
    with stranger(server) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: caplog.records != [], "it is told")
    assert "a process of 127.0.0.1 has connected" in caplog.text
    assert "was gone or silent before it had proved" in caplog.text
    server.close()


def test_a_stranger_that_does_not_know_the_key_is_told_as_refused(caplog: pytest.LogCaptureFixture) -> None:
    server = ControlServer(lambda command: 7, Ports("127.0.0.1"))
    with stranger(server) as one:
        one.sendall(bytes(64))
        wait_until(lambda: caplog.records != [], "it is told")
    assert "was refused, because it has not proved that it belongs to the job" in caplog.text
    server.close()


def test_a_recorded_handshake_lets_nobody_in() -> None:
    """What a client has said is of no use to somebody who has listened: the server asks for another proof."""
    server = ControlServer(lambda command: 7, Ports("127.0.0.1"))
    said: list[bytes] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        line = ControlClient(End(endpoint.tcp_address(*listener.getsockname()), server.end.key), "line")
        asked = line.ask(GetStatus())
        client, _ = listener.accept()
        with client, stranger(server) as through:  # the listener between the two
            client.sendall(through.recv(32))
            said.append(client.recv(64, socket.MSG_WAITALL))
            through.sendall(said[0])
            client.sendall(through.recv(32, socket.MSG_WAITALL))
            said.append(client.recv(8 + 16, socket.MSG_WAITALL))
            said.append(client.recv(1 << 16))
            through.sendall(said[1] + said[2])
            client.sendall(through.recv(1 << 16))
            assert asked.result(LIMIT_S) == 7
    line.close()
    heard = server.heard
    with stranger(server) as one, suppress(ConnectionResetError):
        one.recv(32, socket.MSG_WAITALL)
        one.sendall(b"".join(said))
        assert one.recv(1000) == b""
    assert server.heard == heard
    server.close()


def test_the_key_of_a_server_is_in_no_repr() -> None:
    server = ControlServer(lambda command: None)
    assert repr(server.end.key) not in repr(server.end)
    assert server.end.key.hex() not in repr(server.end)
    server.close()


def test_a_range_of_ports_is_kept_to_and_may_be_used_up() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    only = Ports("127.0.0.1", port, port)
    server = ControlServer(lambda command: 7, only)
    assert endpoint.host_and_port(server.end.address) == ("127.0.0.1", port)
    with pytest.raises(endpoint.NoPort, match="give a wider range"):
        ControlServer(lambda command: None, only)
    line = ControlClient(server.end, "line")
    assert line.ask(GetStatus()).result(LIMIT_S) == 7
    line.close()
    server.close()


def test_an_accept_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with too many open files, or no room for a thread."""
    server = ControlServer(lambda command: 7)
    let_in, failures = server._let_in, [RuntimeError("can't start new thread"), OSError(24, "Too many open files")]

    def fails_first(connection: socket.socket, address: object) -> None:
        if failures:
            raise failures.pop()
        let_in(connection, address)

    monkeypatch.setattr(server, "_let_in", fails_first)
    line = ControlClient(server.end, "line")
    assert line.ask(GetStatus()).result(LIMIT_S) == 7
    assert not failures
    line.close()


# --- who has hung -----------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_silence_is_counted_from_the_first_look_and_forgotten_with_a_word() -> None:
    clock = Clock()
    silence: SilenceDetector[str] = SilenceDetector(8.0, clock)
    assert silence.period_s == 2.0
    for silent, hung in [("a", ""), ("ab", ""), ("b", ""), ("ab", ""), ("ab", "b"), ("a", ""), ("a", "a"), ("", "")]:
        clock.now += 2.0
        assert silence.look(silent) == list(hung)


def test_the_own_pause_is_not_taken_for_the_others() -> None:
    clock = Clock()
    silence: SilenceDetector[str] = SilenceDetector(8.0, clock)
    clock.now += 2.0
    assert silence.look(["a"]) == []
    clock.now += 3600.0  # with the whole machine: what "a" has said meanwhile is not read yet
    assert silence.look(["a"]) == []
    clock.now += 2.0
    assert silence.look([]) == []


def test_only_those_who_owe_an_answer_to_the_ping_before_are_silent(workers: AllWorkers) -> None:
    busy, prompt = Busy(0), Busy(1)
    workers.connect(0, busy.server.end, 100)
    workers.connect(1, prompt.server.end, 101)
    busy.free.clear()
    assert workers.ping() == []
    wait_until(lambda: set(workers.silent()) == {0}, "the other has answered")
    assert workers.ping() == [(0, 100)]
    busy.free.set()
    wait_until(lambda: not workers.silent(), "it answers")
    assert workers.ping() == []


# --- what can be no message ------------------------------------------------------------------------------------------


def proved(server: ControlServer) -> socket.socket:
    """A connection of a process that has proved itself."""
    connection = endpoint.new_socket(server.end.address)
    endpoint.connect(connection, server.end.address)
    handshake.introduce(connection, server.end.key, LIMIT_S)
    connection.settimeout(LIMIT_S)
    handshake.send_frame(connection, b"s" * 16)
    return connection


def claims(size: int) -> bytes:
    """The head of a frame, without its bytes."""
    return struct.pack("<Q", size)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (claims(3) + b"abc", "a request of 3 bytes came, and its head alone has 16"),
        (claims(0), "a request of 0 bytes came"),
        (claims(1 << 62), r"a frame claims 4,611,686,018,427,387,904 bytes; the most is 2,147,483,648"),
    ],
    ids=["short", "empty", "large"],
)
def test_what_can_be_no_request_is_told_and_ends_the_connection(
    sent: bytes, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = ControlServer(lambda command: "pong")
    with proved(server) as connection:
        connection.sendall(sent)
        assert connection.recv(1) == b"", "it is closed"
    wait_until(lambda: said in caplog.text, "it is told")
    assert "Traceback" not in caplog.text
    server.close()


def test_memory_is_taken_as_bytes_come() -> None:
    """Not as they are claimed."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(claims(handshake.LARGEST_FRAME) + bytes(1000))
        ours.shutdown(socket.SHUT_WR)
        tracemalloc.start()
        try:
            with pytest.raises(EOFError):
                handshake.receive_frame(theirs)
            assert tracemalloc.get_traced_memory()[1] < 10 << 20
        finally:
            tracemalloc.stop()


def test_an_answer_that_is_too_short_costs_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is sent again over the next one."""
    send = handshake.send_frame
    cut = [True]

    def short(connection: Any, *parts: bytes) -> None:
        send(connection, *([b"abc"] if threading.current_thread().name == "penstock-control" and cut.pop() else parts))
        cut.append(False)

    monkeypatch.setattr(control, "send_frame", short)
    server = ControlServer(lambda command: "pong")
    client = ControlClient(server.end, "asks")
    assert client.ask(Ping()).result(LIMIT_S) == "pong"
    client.close()
    server.close()
