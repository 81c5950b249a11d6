"""A spare process of a job on Ray that does not answer is not waited for. The actors are stand-ins."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError

from penstock.actors import ray_processes
from penstock.actors.ray_processes import RayProcesses


class Actor:
    def __init__(self, fails: Exception | None = None) -> None:
        self.answer = SimpleNamespace(remote=lambda: fails)


@pytest.mark.parametrize("fails", [GetTimeoutError("stopped"), RayActorError(), None])
def test_a_spare_process_that_does_not_answer_is_replaced(
    fails: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[Any] = []
    made: list[Actor] = []

    def get(answer: Exception | None, timeout: float) -> None:
        assert timeout <= 10.0, "nobody waits for it for as long as for a process that starts"
        if answer is not None:
            raise answer

    def make(**options: Any) -> Any:
        made.append(Actor())
        return SimpleNamespace(remote=lambda: made[-1])

    remote = lambda actor: SimpleNamespace(options=make)
    monkeypatch.setattr(ray_processes, "ray", SimpleNamespace(get=get, kill=killed.append, remote=remote))
    processes = RayProcesses.__new__(RayProcesses)
    processes._lock = threading.Lock()
    processes._closed, processes._cpus = False, 1.0
    processes._actors, processes._starting = {}, {}
    spare = Actor(fails)
    processes._spares = {"node": spare}
    processes._nodes = SimpleNamespace(  # type: ignore[assignment]
        strategy=lambda worker: None, node_id=lambda worker: "node", needs=lambda worker: {}, is_lost=lambda node: False
    )
    monkeypatch.setattr(processes, "_started", lambda actor, *rest: actor)
    started: Any = processes.start(0, 1, 0, b"", 0.0)
    assert (started is spare) is (fails is None)
    assert killed == ([] if fails is None else [spare])
    assert made == ([] if fails is None else [started])
