"""Certificates and TLS: which files can be used, what is told of the others, and that private keys stay private."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.host.process.network import Network
from penstock.runtime.transport.certificates import BadCertificate, JobCertificate, Tls
from penstock.runtime.transport.handshake import NotProved, admit, bound, introduce
from penstock.runtime.transport.peer_handshake import Admitting, Introducing, Process
from penstock.runtime.transport.tls import TlsContexts, TlsStream
from tests.transport.certificates import Folder
from tests.transport.networks import KEY, LIMIT_S


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    made = Folder(tmp_path_factory.mktemp("certificates"))
    made.authority("own")
    made.authority("other")
    made.sign("good", "own")
    made.sign("old", "own", expired=True)
    made.sign("server", "own", use="serverAuth")
    made.openssl("ec -in good.key -out locked.key -aes128 -passout pass:word")
    shutil.copy(made.path / "good.pem", made.path / "locked.pem")
    shutil.copy(made.path / "good.pem", made.path / "mixed.pem")
    shutil.copy(made.path / "old.key", made.path / "mixed.key")
    (made.path / "empty.pem").write_text("nothing\n")
    shutil.copy(made.path / "good.key", made.path / "empty.key")
    return made


def pair(one: TlsContexts, other: TlsContexts) -> tuple[TlsStream, TlsStream]:
    """Two ends, connecting and accepting, that have shaken hands."""
    client, server = socket.socketpair()
    ends = one.stream(client, server=False), other.stream(server, server=True)
    failed: list[Exception] = []

    def shake() -> None:
        try:
            ends[1].shake_hands(time.monotonic() + LIMIT_S)
        except (OSError, EOFError) as error:
            failed.append(error)
            server.close()

    thread = threading.Thread(target=shake)
    thread.start()
    try:
        ends[0].shake_hands(time.monotonic() + LIMIT_S)
    except BaseException:
        client.close()
        raise
    finally:
        thread.join()
    if failed:
        raise failed[0]
    for end in ends:
        end.settimeout(LIMIT_S)
    return ends


@pytest.fixture(scope="module")
def own() -> JobCertificate:
    return JobCertificate.make()


@pytest.fixture
def ends(own: JobCertificate) -> Iterator[tuple[TlsStream, TlsStream]]:
    contexts = TlsContexts(own)
    made = pair(contexts, contexts)
    yield made
    for end in made:
        end._plain.close()


# --- a certificate of the job -----------------------------------------------------------------------------------------


def test_a_job_accepts_its_own_certificate_and_no_other_one(own: JobCertificate) -> None:
    for end in pair(TlsContexts(own), TlsContexts(own)):
        end._plain.close()
    other = TlsContexts(JobCertificate.make())
    with pytest.raises(ssl.SSLCertVerificationError):
        pair(other, TlsContexts(own))
    with pytest.raises(ssl.SSLCertVerificationError):
        pair(TlsContexts(own), other)


def test_a_certificate_of_the_job_signs_no_other_one(own: JobCertificate, tmp_path: Path) -> None:
    """Who has found out the key has everything; but nobody can be given a part of it."""
    made = Folder(tmp_path)
    (tmp_path / "job.pem").write_text(own.certificate)
    (tmp_path / "job.key").write_text(own.key)
    made.sign("below", "job")
    with pytest.raises(BadCertificate, match="cannot be used"):
        TlsContexts(made.tls("below", "job"))


def test_the_clock_of_a_machine_does_not_matter(folder: Folder) -> None:
    """The certificate of a job is pinned, so its dates say nothing."""
    past = TlsContexts(JobCertificate(*((folder.path / f"old.{kind}").read_text() for kind in ("key", "pem"))))
    for end in pair(past, past):
        end._plain.close()


def test_private_keys_are_in_no_repr_and_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    network = Network(tls=True).secured()
    made = network.certificate
    assert made is not None
    TlsContexts(made)
    line = made.key.splitlines()[1]
    assert line not in repr(network)
    assert line not in repr(made)
    assert line not in repr(network.ports("127.0.0.1"))
    assert not list(tmp_path.iterdir())
    assert pickle.loads(pickle.dumps(network)) == network


def test_what_a_job_saves_has_no_certificate_and_no_secret() -> None:
    saved = Network(tls=True)
    saved.secured()
    assert saved == Network(tls=True)
    assert b"PRIVATE" not in pickle.dumps(saved)
    with pytest.raises(ValueError, match="before it is secured"):
        saved.ports("127.0.0.1")


def test_each_start_of_a_job_makes_another_certificate() -> None:
    one, other = Network(tls=True).secured(), Network(tls=True).secured()
    assert one.certificate != other.certificate
    assert Network().secured().certificate is None


def test_a_machine_without_openssl_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BadCertificate, match=r"openssl.*Install openssl there, or give certificates"):
        Network(tls=True).secured()


# --- files of the user ------------------------------------------------------------------------------------------------


def test_files_that_fit_together_are_used(folder: Folder) -> None:
    contexts = TlsContexts(folder.tls("good", "own"))
    for end in pair(contexts, contexts):
        end._plain.close()


@pytest.mark.parametrize(
    ("name", "authority", "message"),
    [
        ("none", "own", "the certificate '.*/none.pem' cannot be read: No such file"),
        ("good", "none", "the authority '.*/none.pem' cannot be read: No such file"),
        ("empty", "own", "the certificate '.*/empty.pem' contains no certificate in PEM format"),
        ("mixed", "own", "the key '.*/mixed.key' is not that of the certificate '.*/mixed.pem'"),
        ("locked", "own", "the key '.*/locked.key' is encrypted with a password"),
        (
            "good",
            "other",
            "the certificate '.*/good.pem' cannot be used: the authority '.*/other.pem' has not signed it",
        ),
        ("old", "own", "the certificate '.*/old.pem' cannot be used: TLS: certificate has expired"),
        ("server", "own", "the certificate '.*/server.pem' cannot be used: it is not for both ends"),
    ],
)
def test_files_that_cannot_be_used_are_told(folder: Folder, name: str, authority: str, message: str) -> None:
    with pytest.raises(BadCertificate, match=message):
        TlsContexts(folder.tls(name, authority))


def test_files_that_are_replaced_are_read_again(
    folder: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def put(name: str) -> None:
        for kind in ("pem", "key"):
            shutil.copy(folder.path / f"{name}.{kind}", tmp_path / f"new.{kind}")
            os.replace(tmp_path / f"new.{kind}", tmp_path / f"mine.{kind}")

    put("good")
    contexts = TlsContexts(Tls(tmp_path / "mine.pem", tmp_path / "mine.key", folder.path / "own.pem"))
    before = contexts.context(server=True)
    assert contexts.context(server=True) is before
    put("old")
    with caplog.at_level(logging.WARNING):
        assert contexts.context(server=True) is before
    assert "certificate has expired" in caplog.text
    folder.sign("new", "own")
    put("new")
    after = contexts.context(server=True)
    assert after is not before
    one, other = pair(contexts, contexts)
    shown = ssl.PEM_cert_to_DER_cert((folder.path / "new.pem").read_text())
    assert one._tls.getpeercert(True) == shown
    for end in (one, other):
        end._plain.close()


# --- the connection ---------------------------------------------------------------------------------------------------


def test_a_stream_carries_frames_of_all_sizes_both_ways_at_once(ends: tuple[TlsStream, TlsStream]) -> None:
    sizes = [0, 1, 1000, 16_384, 70_000, 5_000_000]
    sent = [os.urandom(size) for size in sizes]
    got: dict[int, list[bytes]] = {0: [], 1: []}

    def write(end: TlsStream) -> None:
        for data in sent * 3:
            end.sendall(data)

    def read(number: int) -> None:
        for data in sent * 3:
            view = memoryview(bytearray(len(data)))
            at = 0
            while at < len(view):
                at += ends[number].recv_into(view[at:])
            got[number].append(bytes(view))

    threads = [threading.Thread(target=write, args=(end,)) for end in ends]
    threads += [threading.Thread(target=read, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {0: sent * 3, 1: sent * 3}


def test_a_stream_ends_with_its_peer(ends: tuple[TlsStream, TlsStream]) -> None:
    ends[0].sendall(b"last")
    ends[0].shutdown(socket.SHUT_RDWR)
    assert ends[1].recv(100) == b"last"
    assert ends[1].recv(100) == b""


def test_a_handshake_has_one_deadline(own: JobCertificate) -> None:
    one, other = socket.socketpair()
    with one, other, pytest.raises(TimeoutError):
        TlsContexts(own).stream(one, server=True).shake_hands(time.monotonic() + 0.05)


# --- somebody in between ----------------------------------------------------------------------------------------------


def _prove(contexts: TlsContexts, key: Callable[[TlsStream], bytes]) -> None:
    """Both ends prove over TLS that they know the secret."""
    one, other = pair(contexts, contexts)
    failed: list[Exception] = []

    def server() -> None:
        try:
            admit(other, key(other), LIMIT_S)
        except (OSError, EOFError) as error:
            failed.append(error)
            other._plain.close()

    thread = threading.Thread(target=server)
    thread.start()
    try:
        introduce(one, key(one), LIMIT_S)
    except (OSError, EOFError) as error:
        failed.append(error)
    one._plain.close()
    thread.join()
    other._plain.close()
    if failed:
        raise NotProved from failed[0]


def test_proofs_of_one_connection_are_worth_nothing_on_another_one(own: JobCertificate) -> None:
    """So somebody with a certificate of the same authority cannot pass them on, and read what follows."""
    contexts = TlsContexts(own)
    _prove(contexts, lambda end: bound(KEY, end.binding))
    elsewhere = iter((b"one connection", b"another one"))
    with pytest.raises(NotProved):
        _prove(contexts, lambda end: bound(KEY, next(elsewhere)))
    a, b = Process(0, b"a" * 16), Process(1, b"b" * 16)
    introducing, admitting = Introducing(KEY, a, b, 1, 4096), Admitting(KEY, b)
    introducing.bind(b"one connection")
    admitting.bind(b"another one")
    with pytest.raises(NotProved):
        admitting.take(introducing.output)
