"""What follows when the raylet of a machine ends: its processes end, and programs are told that the cluster has gone.

The raylet and the head are stand-ins here. tests/e2e/test_clusters.py lets a real raylet end.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.actors import cluster, raylet
from tests.e2e.processes import LIMIT_S, alive, wait_gone, wait_until

ACTOR = """
import sys, threading
from penstock.actors.raylet import end_with_raylet
end_with_raylet()
print("ready", flush=True)
threading.Event().wait()  # as a JobMaster, which is in a call for the life of its job
"""


def test_an_actor_ends_with_its_raylet() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as raylet_:
        environment = {**os.environ, "RAY_RAYLET_PID": str(raylet_.pid)}
        actor = subprocess.Popen([sys.executable, "-c", ACTOR], env=environment, stdout=subprocess.PIPE, text=True)
        assert actor.stdout is not None
        assert actor.stdout.readline() == "ready\n"
        assert alive(actor.pid)
        raylet_.kill()
        wait_gone([actor.pid], LIMIT_S)
        actor.communicate()
        assert actor.returncode == 1


def test_a_process_that_no_raylet_has_started_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_RAYLET_PID", raising=False)
    before = threading.active_count()
    raylet.end_with_raylet()
    assert threading.active_count() == before


class StandIns:
    """A head and a raylet that accept connections, and what the head says of this machine."""

    def __init__(self, folder: Path) -> None:
        self.alive = True
        self.head = socket.create_server(("127.0.0.1", 0))
        self.raylet = socket.socket(socket.AF_UNIX)
        self.path = str(folder / "raylet")
        self.raylet.bind(self.path)
        self.raylet.listen()
        self.accepted: list[socket.socket] = []
        for listener in (self.head, self.raylet):
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                self.accepted.append(listener.accept()[0])
            except OSError:
                return

    def check_alive(self, nodes: list[Any], timeout: float) -> list[bool]:
        return [self.alive for _ in nodes]

    def end_raylet(self) -> None:
        self.raylet.shutdown(socket.SHUT_RDWR)
        self.raylet.close()
        for one in self.accepted:
            one.close()


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIns]:
    made = StandIns(tmp_path)
    context = SimpleNamespace(
        gcs_address=f"127.0.0.1:{made.head.getsockname()[1]}",
        get_node_id=lambda: "00" * 28,
        get_worker_id=lambda: "worker",
    )
    monkeypatch.setattr(cluster.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: True)
    worker = cluster.ray._private.worker
    monkeypatch.setattr(worker, "_global_node", SimpleNamespace(raylet_socket_name=made.path))
    monkeypatch.setattr(worker.global_worker, "gcs_client", made, raising=False)
    monkeypatch.setattr(cluster, "_LOOK_S", 0.05)
    monkeypatch.setattr(cluster, "_ENDED_S", 0.15)
    yield made
    context.get_worker_id = lambda: "nobody"  # the connection's thread ends
    made.head.close()


def test_a_raylet_that_has_ended_is_noticed_though_the_head_lives(stand_ins: StandIns) -> None:
    connection = cluster._Connection(own=False)
    assert connection.lost() is None
    stand_ins.end_raylet()
    wait_until(lambda: connection.gone is not None, "the connection's thread has noticed")
    assert "has gone: its raylet on this machine has ended. Start a cluster again" in str(connection.gone)


def test_a_raylet_that_leaves_before_it_ends_is_noticed_when_an_actor_has_died(stand_ins: StandIns) -> None:
    connection = cluster._Connection(own=True)
    assert connection.lost() is None
    stand_ins.alive = False
    gone = connection.lost()
    assert gone is connection.gone
    assert "that this program had started has gone: this machine is no part of it any more" in str(gone)
