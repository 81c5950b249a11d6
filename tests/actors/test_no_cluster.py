"""What a program is told when Ray does not start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from penstock.actors import cluster, head_client
from penstock.runtime.errors import JobNotFound, NoCluster


@pytest.fixture
def unconnected(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(cluster, "_of_ray_start", lambda: None)
    monkeypatch.setattr(cluster, "_check_head", lambda address, of_ray_start: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return monkeypatch


@pytest.mark.parametrize("address", ["local", None, "10.0.0.1:6379"])
@pytest.mark.parametrize("error", [Exception("the node timed out\n during startup."), RuntimeError("no room")])
def test_whatever_ray_raises_when_it_does_not_start(
    unconnected: pytest.MonkeyPatch, error: Exception, address: str | None
) -> None:
    def init(**options: Any) -> None:
        raise error

    unconnected.setattr(ray, "init", init)
    with pytest.raises(NoCluster) as raised:
        cluster.connect(address)
    text = str(raised.value)
    assert f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}. Ray's logs are in /" in text
    assert "try again" in text
    assert raised.value.__cause__ is error
    assert cluster._LIMIT not in os.environ


def test_an_address_at_which_nothing_answers(unconnected: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        raise ConnectionError("nobody there")

    unconnected.setattr(ray, "init", init)
    with pytest.raises(NoCluster, match=r"no Ray cluster answers at 10\.0\.0\.1:6379: nobody there"):
        cluster.connect("10.0.0.1:6379")


def test_ray_has_a_standard_error_where_the_program_has_none(unconnected: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def init(**options: Any) -> None:
        seen.append(sys.stderr)
        raise ConnectionError

    unconnected.setattr(ray, "init", init)
    unconnected.setattr(sys, "stderr", None)
    with pytest.raises(NoCluster):
        cluster.connect("10.0.0.1:6379")
    assert seen[0] is not None
    assert seen[0].fileno() != 2  # that one is open, whoever has it
    seen[0].close()


@pytest.fixture
def silent() -> Iterator[str]:
    """An address that takes connections, and at which nobody says anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def saying(words: bytes) -> Iterator[str]:
    """An address at which somebody answers with these bytes, in two parts."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.recv(1)
                connection.sendall(words[:1])
                connection.sendall(words[1:])
                connection.recv(100)

        threading.Thread(target=answer, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def speaking() -> Iterator[str]:
    """An address at which somebody answers as the head of a cluster does."""
    with saying(bytes.fromhex("000006040000000000000500004000")) as address:
        yield address


@pytest.mark.parametrize("words", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"no"])
def test_another_server_is_not_taken_for_a_cluster(words: bytes, speaking: str) -> None:
    with saying(words) as address:
        assert cluster._answering([address, speaking]) == [speaking]


def test_clusters_that_were_found_and_do_not_answer_are_not_joined(
    unconnected: pytest.MonkeyPatch, silent: str, speaking: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"127.0.0.1:{server.getsockname()[1]}"
    joined: list[str] = []

    def init(address: str, **options: Any) -> None:
        joined.append(address)
        raise ConnectionError("another program's")

    unconnected.setattr(ray, "init", init)
    unconnected.setattr(cluster, "_on_this_machine", lambda: [silent, speaking, closed])
    with pytest.raises(NoCluster, match="no Ray cluster that this program can join"):
        cluster.find("job", None)
    assert joined == [speaking], "Ray would try the others for minutes"


def test_clusters_that_were_found_are_asked_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    all_asked = threading.Barrier(5)

    def speaks(address: str) -> bool:
        all_asked.wait(timeout=60.0)
        return address != "c"

    monkeypatch.setattr(cluster, "_speaks", speaks)
    assert cluster._answering("edcba") == ["e", "d", "b", "a"]


@pytest.fixture
def clusters(unconnected: pytest.MonkeyPatch) -> Callable[..., None]:
    """Clusters on this machine, by address, and the names of the jobs of each."""
    connected = ""

    def init(address: str, **_: Any) -> None:
        nonlocal connected
        connected = address

    def there_are(**jobs: list[str]) -> None:
        unconnected.setattr(cluster, "_on_this_machine", lambda: sorted(jobs))
        unconnected.setattr(cluster, "_running", lambda: jobs[connected])

    unconnected.setattr(cluster, "_connection", None)
    unconnected.setattr(cluster, "_answering", list)
    unconnected.setattr(cluster, "_init", init)
    unconnected.setattr(cluster, "_Connection", lambda own: SimpleNamespace(address=connected))
    unconnected.setattr(ray, "get_actor", lambda name, namespace: (name, connected))
    unconnected.setattr(cluster, "has_ended", lambda name: name == "over")
    return there_are


def test_the_only_job_of_all_clusters_is_found_where_it_runs(clusters: Callable[..., None]) -> None:
    clusters(a=[], b=["one"], c=[])
    assert cluster.find(None, None) == ("one", ("penstock.job.one", "b"))
    assert cluster.find("one", None) == ("one", ("penstock.job.one", "b"))


def test_a_job_that_has_ended_is_not_the_only_one_that_runs(clusters: Callable[..., None]) -> None:
    clusters(a=["one", "over"])
    assert cluster.find(None, None) == ("one", ("penstock.job.one", "a"))
    clusters(a=["over"])
    with pytest.raises(JobNotFound, match="no job runs"):
        cluster.find(None, None)


def test_jobs_of_several_clusters_are_several_jobs(clusters: Callable[..., None]) -> None:
    clusters(a=["one"], b=["two"])
    with pytest.raises(
        JobNotFound, match=r"several jobs run: one \(on the cluster at a\), two \(on the cluster at b\)"
    ):
        cluster.find(None, None)
    assert cluster.find("two", None) == ("two", ("penstock.job.two", "b"))
    clusters(a=["one", "two"])
    with pytest.raises(JobNotFound, match="several jobs run: one, two; give"):
        cluster.find(None, None)


@pytest.mark.parametrize("of_ray_start", [True, False])
def test_a_head_that_does_not_answer_is_told_before_ray_tries_for_minutes(
    monkeypatch: pytest.MonkeyPatch, silent: str, of_ray_start: bool
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("Ray must not be asked"))
    monkeypatch.setattr(cluster, "_of_ray_start", lambda: silent if of_ray_start else None)
    monkeypatch.setattr(cluster, "_FOUND_ANSWERS_S", 0.05)
    monkeypatch.setattr(cluster, "_NAMED_ANSWERS_S", 0.1)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(NoCluster, match="ray stop" if of_ray_start else f"no Ray cluster answers at {silent}"):
        cluster.connect(None if of_ray_start else silent)


def test_a_head_that_answers_and_addresses_of_other_forms_are_left_to_ray(
    monkeypatch: pytest.MonkeyPatch, speaking: str
) -> None:
    monkeypatch.setattr(cluster, "_NAMED_ANSWERS_S", 0.0)
    for address in (speaking, "auto", "ray://10.255.255.1:10001"):
        cluster._check_head(address, of_ray_start=False)


JOINS_AS_IT_ENDS = """
from penstock.actors import cluster
from penstock.runtime.errors import NoCluster

try:
    cluster._init(ADDRESS, local=True)
except NoCluster as error:
    print(error)
"""


def test_a_head_that_ends_while_a_program_joins_it() -> None:
    """Ray waits without limit, in native code, for the head of a cluster that has ended since it was found."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    script = f"ADDRESS = {address!r}\n{JOINS_AS_IT_ENDS}"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    said = f"the Ray cluster at {address} could not be joined: its head ended while this program joined it"
    assert said in told.stdout


def test_a_head_that_accepts_connections_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(head_client, "_LIMIT_S", 0.5)
    with pytest.raises(head_client.HeadGone, match="has not answered"):
        head_client._asked(never.wait, lambda: True)
    never.set()


def test_what_ray_raises_as_it_joins_is_raised() -> None:
    def fails() -> None:
        raise RuntimeError("another version")

    with pytest.raises(RuntimeError, match="another version"):
        head_client._asked(fails, lambda: True)
    assert head_client._asked(lambda: 7, lambda: True) == 7
