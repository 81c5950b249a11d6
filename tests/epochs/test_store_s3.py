"""The checkpoint store on S3: a local server that moto plays, and servers that do not behave."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from penstock.runtime.epochs.manifest import Blob, Manifest
from penstock.runtime.epochs.store import Store
from penstock.runtime.errors import SnapshotDamaged, StoreError, StoreUnreachable

moto = pytest.importorskip("moto.server")

BIG = bytes(range(256)) * 40
PATIENT_S = 30.0  # far more than anything here should take, far less than what a hung request would


def manifest(epoch: int, *blobs: Blob) -> Manifest:
    return Manifest(job="job", epoch=epoch, created=1.5, final=False, key_groups=8, tasks=[], collected=list(blobs))


def place(port: int, more: str = "") -> str:
    """The URL of a store that gives up soon."""
    options = f"scheme=http&region=us-east-1&endpoint_override=127.0.0.1:{port}&connect_timeout=2&request_timeout=1"
    return f"s3://key:secret@bucket/some/prefix?{options}{more}"


@contextmanager
def serving(port: int = 0) -> Iterator[int]:
    """moto's S3 on loopback; what it stores outlives a server, as long as this process lives."""
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    try:
        yield server.get_host_and_port()[1]
    finally:
        server.stop()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request


@pytest.fixture
def bucket() -> Iterator[None]:
    """An empty bucket, in moto's memory."""
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    backend.reset()
    backend.create_bucket("bucket", "us-east-1")
    yield
    backend.reset()


def objects() -> dict[str, bytes]:
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    keys = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets["bucket"].keys
    return {name: key.value for name, key in keys.items() if not name.endswith("/")}


@contextmanager
def takes_less_than(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


@pytest.mark.usefixtures("bucket")
def test_the_life_of_a_store() -> None:
    with serving() as port:
        store = Store.open(place(port), "job")
        assert store.place == "s3://bucket/some/prefix/job"
        store.check()
        assert objects() == {}
        assert store.latest() is None
        assert store.collect(1) == 0
        blobs = {}
        for epoch in range(1, 5):
            blobs[epoch] = store.put(f"snapshots/{epoch:06d}-1-0", [BIG, bytearray(b"more")])
            store.write_manifest(manifest(epoch, blobs[1], blobs[epoch]))
            store.write_manifest(manifest(epoch, blobs[1], blobs[epoch]))
        assert store.get(blobs[2]) == BIG + b"more"
        assert store.epochs() == [4, 3, 2, 1]
        assert store.latest(store.verify) == (manifest(4, blobs[1], blobs[4]), [])
        assert store.collect(2) == 5
        assert set(objects()) == {
            f"some/prefix/job/{name}"
            for name in (
                "snapshots/000001-1-0",
                "snapshots/000003-1-0",
                "snapshots/000004-1-0",
                "manifests/0000000003.json",
                "manifests/0000000004.json",
                "copies/0000000003.json",
                "copies/0000000004.json",
            )
        }
        assert store.epochs() == [4, 3]
        with pytest.raises(StoreError, match="Two runs"):
            store.write_manifest(manifest(4))
        assert store.latest(store.verify) == (manifest(4, blobs[1], blobs[4]), [])
        store._files.write("snapshots/000004-1-0", [memoryview(BIG)], False)
        found = store.latest(store.verify)
        assert found is not None
        assert found[0].epoch == 3
        assert "000004-1-0 has 10,240 bytes; 10,244 were written" in found[1][0]
        assert store.mend(blobs[1], store.sizes()) is None
        store._files.delete("snapshots/000001-1-0")
        with pytest.raises(SnapshotDamaged, match=r"none of the 2 epochs.*000001-1-0 is missing"):
            store.latest(store.verify)
        other = Store.open(place(port), "other")
        other.check()
        store.destroy()
        store.destroy()
        assert objects() == {}
        assert store.latest() is None


@pytest.mark.usefixtures("bucket")
def test_only_the_job_s_own_objects_are_destroyed() -> None:
    with serving() as port:
        store = Store.open(place(port), "job")
        store.write_manifest(manifest(1, store.put("snapshots/000001-1-0", [BIG])))
        store._files.write("snapshots/mine.txt", [memoryview(b"mine")], False)
        store.destroy()
        assert objects() == {"some/prefix/job/snapshots/mine.txt": b"mine"}


@pytest.mark.usefixtures("bucket")
def test_a_large_blob_in_parts() -> None:
    with serving() as port:
        store = Store.open(place(port), "job")
        blob = store.put("snapshots/000001-1-0", [BIG * 1000, b"end"])
        assert len(objects()["some/prefix/job/snapshots/000001-1-0"]) == blob.size == 10_240_003
        assert store.get(blob) == BIG * 1000 + b"end"


@pytest.mark.usefixtures("bucket")
def test_a_large_blob_in_pieces() -> None:
    """So large that the client uploads it in several requests."""
    data = BIG * 1200
    with serving() as port:
        store = Store.open(place(port), "job")
        blob = store.put_pieces(
            "snapshots/000001-1-0", (data[at : at + 999_999] for at in range(0, len(data), 999_999))
        )
        assert objects() == {"some/prefix/job/snapshots/000001-1-0": data}
        assert b"".join(store.pieces(blob)) == data
        store._files.write("snapshots/000001-1-0", [data[::-1]], False)
        with pytest.raises(SnapshotDamaged, match=r"snapshots/000001-1-0 has changed since it was written"):
            next(store.pieces(blob))


@pytest.mark.usefixtures("bucket")
def test_a_server_that_goes_away_and_comes_back() -> None:
    with serving() as port:
        store = Store.open(place(port), "job")
        blob = store.put("snapshots/000001-1-0", [BIG])
        store.write_manifest(manifest(1, blob))
    for action in (
        lambda: store.put("snapshots/000002-1-0", [BIG]),
        lambda: store.put("snapshots/000002-1-0", [BIG * 1000]),
        lambda: store.get(blob),
        lambda: store.write_manifest(manifest(2, blob)),
        lambda: store.read_manifest(1),
        store.epochs,
        lambda: store.latest(store.verify),
        store.check,
        store.destroy,
        lambda: Store.open(place(port), "job"),
    ):
        with takes_less_than(PATIENT_S), pytest.raises(StoreUnreachable, match="s3://bucket/some/prefix/job") as caught:
            action()  # type: ignore[no-untyped-call]
        assert "can be reached from this node; a later try may work" in str(caught.value)
        assert "secret" not in str(caught.value)
    assert store.collect(1) == 0
    with serving(port):
        assert store.latest(store.verify) == (manifest(1, blob), [])
        store.write_manifest(manifest(2, blob))
        assert store.epochs() == [2, 1]


@pytest.mark.usefixtures("bucket")
def test_a_server_that_goes_away_in_the_middle() -> None:
    """Writers and a reader are at work when it stops: each gets its answer or StoreUnreachable, and then continues."""
    finished: list[str] = []
    wrong: list[BaseException] = []
    blobs: dict[str, Blob] = {}
    halt = threading.Event()
    lost = threading.Semaphore(0)

    def work(store: Store, number: int) -> None:
        count = 0
        try:
            while not halt.is_set():
                count += 1
                name = f"snapshots/{count:06d}-{number}-0"
                try:
                    blob = store.put(name, [BIG * number])
                    blobs[name] = blob
                    assert store.get(blob) == BIG * number
                except StoreUnreachable:
                    lost.release()
            finished.append(f"{number}")
        except BaseException as error:
            wrong.append(error)

    with serving() as port:
        store = Store.open(place(port), "job")
        threads = [threading.Thread(target=work, args=(store, number), daemon=True) for number in (1, 2, 3)]
        for thread in threads:
            thread.start()
        while len(blobs) < 10 and not wrong:
            time.sleep(0.01)
    for _ in threads:
        assert lost.acquire(timeout=PATIENT_S)
    with serving(port):
        before = len(blobs)
        deadline = time.monotonic() + PATIENT_S
        while len(blobs) < before + 6 and not wrong and time.monotonic() < deadline:
            time.sleep(0.01)
        halt.set()
        for thread in threads:
            thread.join(PATIENT_S)
        assert wrong == []
        assert sorted(finished) == ["1", "2", "3"]
        assert len(blobs) >= before + 6
        for blob in blobs.values():
            store.get(blob)


def test_a_bucket_that_is_not_there() -> None:
    with serving() as port, pytest.raises(StoreError, match="there is no bucket 'bucket'; make it") as caught:
        Store.open(place(port), "job")
    assert type(caught.value) is StoreError


def test_a_server_that_takes_connections_and_says_nothing() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(50)
        url = place(listener.getsockname()[1], "&attempts=1")
        with takes_less_than(PATIENT_S), pytest.raises(StoreUnreachable, match=r"(?i)timeout"):
            Store.open(url, "job")


@pytest.mark.usefixtures("bucket")
def test_a_server_that_falls_silent() -> None:
    with serving() as port:
        store = Store.open(place(port, "&attempts=1"), "job")
        blob = store.put("snapshots/000001-1-0", [BIG])
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(50)
        for action in (lambda: store.get(blob), lambda: store.put("snapshots/000001-2-0", [BIG]), store.epochs):
            with takes_less_than(PATIENT_S), pytest.raises(StoreUnreachable):
                action()  # type: ignore[no-untyped-call]


@contextmanager
def answering(status: int, code: str) -> Iterator[int]:
    """A server that has one answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = f"<Error><Code>{code}</Code><Message>so it is</Message></Error>".encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer  # noqa: N815

        def log_message(self, *ignored: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("code", ["AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "Strange"])
def test_keys_that_may_not(code: str) -> None:
    with answering(403, code) as port:
        store = Store.open(place(port), "job")  # keys may be good for the prefix and not for the bucket
        blob = Blob("snapshots/000001-1-0", 9999, 1)
        for action in (store.check, store.latest, lambda: store.get(blob), lambda: store.put(blob.name, [BIG])):
            with takes_less_than(PATIENT_S), pytest.raises(StoreError, match="the keys that run the job") as caught:
                action()  # type: ignore[no-untyped-call]
            assert type(caught.value) is StoreError


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (500, "InternalError")])
def test_a_server_that_cannot_now(status: int, code: str) -> None:
    with answering(status, code) as port, takes_less_than(PATIENT_S), pytest.raises(StoreUnreachable):
        Store.open(place(port, "&attempts=1"), "job")


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize("last", ["", "start()", "start(); time.sleep(0.1)"], ids=["idle", "starting", "busy"])
def test_a_process_that_used_s3_ends_well(last: str) -> None:
    """pyarrow's S3 has threads of its own, and has to be shut down before the process ends: it sees to that at exit."""
    program = f"""
import sys, threading, time
from penstock.runtime.epochs.store import Store
store = Store.open(sys.argv[1], "job")
store.get(store.put("snapshots/000001-1-0", [b"x" * 9999]))
def work():
    while True:
        store.get(store.put("snapshots/000001-1-1", [b"x" * 999999]))
def start():
    threading.Thread(target=work, daemon=True).start()
{last}
print("at the end")
"""
    with serving() as port:
        child = subprocess.run(
            [sys.executable, "-c", program, place(port)], capture_output=True, text=True, timeout=60, check=False
        )
    assert (child.returncode, child.stdout) == (0, "at the end\n"), child.stderr
