"""The name of a job that has ended is free again when the driver that wanted its outcome has died on another machine.

Real are: how a driver starts a job, what it tells of itself, the runner of the job, how long that stays, and what it
asks Ray about drivers of other machines. Ray itself is made up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import penstock as ps
from penstock.actors import cluster, job_master, on_ray, ray_link
from penstock.actors.job_master import _RayCarrier
from penstock.host.carry.carrier_options import CarrierOptions
from penstock.host.carry.job_runner import JobRunner
from penstock.host.carry.notes import Notes
from penstock.host.carry.requests import Outcome, Ping, Release, Request
from penstock.host.process import linger
from penstock.host.process.worker_process import WorkerOptions
from penstock.runtime.errors import NotEnoughResources
from penstock.runtime.program.plan import Plan
from penstock.runtime.records.pickling import Program
from penstock.runtime.status import PlacementStatus

LIMIT_S = 60.0
#: How often the runner asks Ray about the driver before Ray knows that the driver has died, and how often a driver
#: finds the name taken at most.
ASKED, TRIES = 3, 600


class Carrier(_RayCarrier):
    """A JobMaster's carrier on the node "here", in a cluster without room."""

    def __init__(self, plan: Plan, options: CarrierOptions, handle: Any) -> None:
        self._plan, self._options, self._handle, self._node = plan, options, handle, "here"
        self.again = False
        self.notes = Notes(plan.name, "actor", {})

    def reserve(self, cancelled: Callable[[], bool], known: str = "") -> Any:
        raise NotEnoughResources("there is no room")

    def placement_status(self) -> PlacementStatus:
        return PlacementStatus()


class Handle:
    """The handle of a JobMaster."""

    def __init__(self, ray: MadeUp, plan: Plan) -> None:
        options = CarrierOptions(1, 60.0, WorkerOptions(None, 1 << 20, 1 << 20))
        self._actor_id = str(len(ray.made))
        self.runner = JobRunner(plan, options, Carrier(plan, options, self), Program())
        self.ask = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._asked))

    def _asked(self, request: Request[Any]) -> Any:
        if isinstance(request, Outcome):
            self.driver = request.driver
            self.runner.ask(Ping(request.driver))
            return self.runner.start()
        return self.runner.ask(request)


class MadeUp:
    """A Ray that has actors with names, and knows the programs that have ended."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.made: list[Handle] = []
        self.names: dict[str, Handle] = {}
        self.program, self.node = "", ""  # of the driver that runs now
        self.asked = self.tries = 0
        self.util = SimpleNamespace(list_named_actors=lambda all_namespaces: self._named())
        self._private = SimpleNamespace(state=SimpleNamespace(jobs=self._programs))

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: self.node, get_job_id=lambda: self.program)

    def remote(self, **_: Any) -> Callable[[type], Any]:
        return lambda actor: SimpleNamespace(
            options=lambda name, **_: SimpleNamespace(remote=lambda *_: self._make(name))
        )

    def _make(self, name: str) -> Handle:
        if name in self.names:
            self.tries += 1
            assert self.tries < TRIES, "the name is not freed"
            raise ValueError("the name is taken")
        self.names[name] = Handle(self, self.plan)
        self.made.append(self.names[name])
        return self.names[name]

    def kill(self, handle: Handle) -> None:
        self.names = {name: other for name, other in self.names.items() if other is not handle}

    def get_actor(self, name: str, namespace: str) -> Handle:
        if name not in self.names:
            raise ValueError("no such actor")
        return self.names[name]

    def get(self, answer: Any, timeout: float) -> Any:
        return answer

    def _named(self) -> list[dict[str, str]]:
        return [{"name": name, "namespace": cluster.NAMESPACE} for name in self.names]

    def _programs(self) -> list[dict[str, Any]]:
        """The driver of the first job dies some time after the job has ended."""
        if self.made[0].runner.ended.is_set():
            self.asked += 1
        first = {"JobID": "01", "IsDead": self.asked >= ASKED}
        return [first, {"JobID": "02", "IsDead": False}]


def supervisors() -> set[threading.Thread]:
    """The threads of this process that run jobs to their end."""
    return {thread for thread in threading.enumerate() if thread.name == "penstock-supervise"}


def test_the_name_is_freed_when_the_driver_has_died_on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = ps.Flow("job")
    flow.read(ps.sources.Memory([1])).write(ps.sinks.Null())
    plan = flow.plan(1)
    before = supervisors()
    ray = MadeUp(plan)
    for module in (on_ray, cluster, ray_link, job_master):
        monkeypatch.setattr(module, "ray", ray)
    monkeypatch.setattr(on_ray, "_check_node_timeout", lambda node_timeout_s: None)
    monkeypatch.setattr(on_ray, "_masters_node", lambda detached: "ab" * 28)
    monkeypatch.setattr(linger, "_LINGER_S", 0.0)
    monkeypatch.setattr(linger, "_LOOK_S", 0.01)
    options = CarrierOptions(1, 60.0, WorkerOptions(None, 1 << 20, 1 << 20))
    packed = Program().dumps((plan, options))

    ray.program, ray.node = "01", "elsewhere"
    on_ray.start(flow.name, packed, options, True)
    (first,) = ray.made
    assert first.runner.ended.wait(LIMIT_S)
    assert first.runner.status()["state"] == "FAILED"

    ray.program, ray.node = "02", "here"
    on_ray.start(flow.name, packed, options, True)
    _, second = ray.made
    assert ray.names == {cluster.master_name("job"): second}
    assert ray.asked >= ASKED, "as long as the driver lives, its job keeps its name"

    # Its threads must not outlive the made-up Ray: the next thing that they ask would start a cluster of the real one.
    assert second.runner.ended.wait(LIMIT_S)
    second.runner.ask(Release(second.driver))
    for thread in supervisors() - before:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert not ray.names
