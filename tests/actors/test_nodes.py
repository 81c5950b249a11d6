"""Which nodes a job takes when one is lost, or slow at the start, on a cluster of machines that are made up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from ray.exceptions import GetTimeoutError

import penstock as ps
from penstock.actors import job_master, nodes, ray_processes
from penstock.actors.job_master import _RayCarrier
from penstock.actors.node_agents import NotReached
from penstock.actors.nodes import Nodes
from penstock.host.carry.carrier_options import CarrierOptions
from penstock.host.carry.processes import CannotStart
from penstock.host.process.worker_process import WorkerOptions
from penstock.placement.groups import Machine
from penstock.placement.options import PlacementOptions
from penstock.placement.placer import Placer
from penstock.runtime.errors import NotEnoughResources
from penstock.runtime.transport.ring import RingNoSpace

JOB = "job"


class MadeUp:
    """A cluster of machines with CPUs, on which room is reserved at once. `hears`: whether a machine answers.
    `gpus`: by the name of the machine."""

    def __init__(self, patch: pytest.MonkeyPatch, **cpus: int) -> None:
        self.cpus = cpus
        self.gpus: dict[str, int] = {}
        self.gpus_used: Counter[str] = Counter()
        self.used: Counter[str] = Counter()
        self.hears: Callable[[str], bool] = lambda name: True
        patch.setattr(nodes, "machines", self.machines)
        patch.setattr(nodes, "_here", lambda known: known[0])
        patch.setattr(nodes, "_ASKED_S", -1.0)  # an answer does not count for the next question
        patch.setattr(nodes.cluster, "answers_tcp", lambda address: self.hears(address.partition(":")[0]))
        patch.setattr(nodes.Group, "reserve", self._reserve)

    def machines(self) -> list[Machine]:
        return [
            Machine(name, name, cpus, cpus - self.used[name], 1e9, {}, self._free(name), self._all(name), name, 1)
            for name, cpus in self.cpus.items()
        ]

    def _free(self, name: str) -> dict[str, float]:
        free = {"CPU": self.cpus[name] - self.used[name], "GPU": self.gpus.get(name, 0) - self.gpus_used[name]}
        return {resource: amount for resource, amount in free.items() if amount}

    def _all(self, name: str) -> dict[str, float]:
        return {"CPU": self.cpus[name]} | ({"GPU": self.gpus[name]} if name in self.gpus else {})

    def _reserve(
        self, where: Sequence[str], *, cpus: float, resources: Sequence[dict[str, float]] | None = None, **_: Any
    ) -> Any:
        room = Counter(where)
        gpus: Counter[str] = Counter()
        for name, own in zip(where, resources or (), strict=False):
            gpus[name] += int(own.get("GPU", 0))
        self.used += room
        self.gpus_used += gpus

        def remove() -> None:
            self.used -= room
            self.gpus_used -= gpus

        return SimpleNamespace(
            where=lambda: list(where), lost=list, remove=remove, strategy=lambda bundle: (where[bundle], cpus)
        )

    def dies(self, name: str) -> None:
        del self.cpus[name]


def reserved(options: PlacementOptions, workers: int) -> Nodes:
    """The nodes of a job that has started."""
    found = Nodes(options, workers)
    found.reserve(JOB, 1.0, 60.0, lambda: False)
    return found


def spread(found: Nodes) -> list[tuple[str, int]]:
    return sorted((node.name, node.workers) for node in found.layout.nodes)


def test_who_has_asked_for_two_nodes_gets_a_fresh_one_for_a_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the node that is left has room. The second worker goes where the first one went."""
    cluster = MadeUp(monkeypatch, a=5, b=4, fresh=3, also=2)
    found = reserved(PlacementOptions(nodes=2), 4)
    assert spread(found) == [("a", 2), ("b", 2)]
    cluster.dies("b")
    found.lose("b")
    lost = [worker for worker in range(4) if found.node_id(worker) == "b"]
    assert [found.strategy(worker) for worker in lost] == [("fresh", 1.0)] * 2
    assert spread(found) == [("a", 2), ("fresh", 2)]


def with_gpus(workers: int, gpus: dict[int, float], options: PlacementOptions | None = None) -> Nodes:
    """The nodes of a job of which some workers need GPUs."""
    found = Nodes(options or PlacementOptions(), workers)
    needs = [{"GPU": gpus[worker]} if worker in gpus else {} for worker in range(workers)]
    found.reserve(JOB, 1.0, 60.0, lambda: False, None, needs)
    return found


def test_workers_that_need_gpus_get_the_nodes_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others join them there while there is room, so that the job has few nodes."""
    cluster = MadeUp(monkeypatch, here=4, small=2, large=4)
    cluster.gpus = {"small": 1, "large": 2}
    found = with_gpus(6, {1: 2, 4: 1})
    assert (found.node_id(1), found.node_id(4)) == ("large", "small")
    assert Counter(found.node_id(worker) for worker in range(6)) == {"large": 4, "small": 2}
    assert (found.needs(1), found.needs(0)) == ({"GPU": 2}, {})
    with pytest.raises(NotEnoughResources, match=r"need .*1 x \(1 CPU and 3 GPUs\).*large .* has 4 CPU and 2 GPUs in"):
        with_gpus(6, {1: 3})


def test_workers_that_need_gpus_are_spread_over_as_many_nodes_as_the_job_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = MadeUp(monkeypatch, here=8, one=8, two=8)
    cluster.gpus = {"one": 4, "two": 4}
    found = with_gpus(4, {0: 1, 1: 1}, PlacementOptions(nodes=2))
    assert {found.node_id(worker) for worker in range(4)} == {"one", "two"}
    assert found.node_id(0) != found.node_id(1)


def test_a_worker_that_needs_a_gpu_waits_for_one_that_another_job_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is placed where the GPU will be, although other nodes have more free CPUs."""
    cluster = MadeUp(monkeypatch, here=8, gpus=2)
    cluster.gpus = {"gpus": 1}
    with_gpus(1, {0: 1})
    assert with_gpus(1, {0: 1}).node_id(0) == "gpus"


def test_a_lost_node_is_replaced_by_one_that_has_what_its_worker_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = MadeUp(monkeypatch, here=8, one=2, two=2)
    cluster.gpus = {"one": 1, "two": 1}
    found = with_gpus(2, {1: 1})
    (gone,) = {found.node_id(1)}
    cluster.dies(gone)
    found.lose(gone)
    assert found.strategy(1)[0] == ({"one", "two"} - {gone}).pop()


def test_who_has_not_asked_for_nodes_gets_room_on_those_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = MadeUp(monkeypatch, a=4, b=4, fresh=2)
    found = reserved(PlacementOptions(), 6)
    assert spread(found) == [("a", 4), ("b", 2)]
    cluster.dies("a")
    cluster.cpus["also"] = 8  # there is more room on nodes that the job does not have
    found.lose("a")
    lost = [worker for worker in range(6) if found.node_id(worker) == "a"]
    assert [found.strategy(worker)[0] for worker in lost[:2]] == ["b", "b"]


def test_a_plan_says_how_many_workers_each_node_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is reserved. The layout is made once."""
    cluster = MadeUp(monkeypatch, a=4, b=4)
    made: list[Any] = []
    layout = nodes.Layout.of
    monkeypatch.setattr(nodes.Layout, "of", lambda at: made.append(at) or layout(at))
    asked: list[Any] = []

    def share(even: Sequence[int], rooms: Sequence[int], speeds: Sequence[float]) -> list[int]:
        asked.append((list(even), list(rooms), list(speeds)))
        assert not cluster.used
        return [3, 1]

    found = Nodes(PlacementOptions(nodes=2), 4)
    found.reserve(JOB, 1.0, 60.0, lambda: False, share)
    assert asked == [([2, 2], [4, 4], [1.0, 1.0])]
    assert spread(found) == [("a", 3), ("b", 1)]
    assert len(made) == 1


def carrier(found: Nodes, workers: int) -> _RayCarrier:
    """A JobMaster's carrier on these nodes, without Ray."""
    flow = ps.Flow(JOB)
    flow.read(ps.sources.Memory([1])).write(ps.sinks.Null())
    made = _RayCarrier.__new__(_RayCarrier)
    made._plan, made._handle, made._nodes, made._processes = flow.plan(workers), None, found, None
    made._options = CarrierOptions(workers, 60.0, WorkerOptions(None, 1 << 20, 1 << 20))
    made.placer = Placer(PlacementOptions(), found)
    return made


class Processes:
    """Starts an agent on each node that answers when it is asked the first time."""

    def __init__(self, job: str, found: Nodes, *_: Any) -> None:
        self.nodes = found

    def connect_nodes(self) -> dict[str, Any]:
        for machine in self.nodes.elsewhere():
            if not nodes.cluster.answers_tcp(f"{machine.address}:{machine.port}"):
                raise NotReached(f"node {machine} cannot be reached", machine.node_id)
        return {}

    def close(self) -> None:
        self.nodes.close()

    def kill_all(self) -> None: ...


class Clock:
    """The time of a wait that passes as soon as somebody waits."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        patch.setattr(job_master, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        patch.setattr(job_master, "_look_again", self)

    def wait(self, timeout_s: float) -> None:
        self.now_s += timeout_s


@pytest.mark.parametrize("answers_at_s", [0.5, 5.0, None])
def test_a_node_that_was_slow_at_the_start_is_asked_again(
    answers_at_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers when nodes are chosen, and not when its agent is started. Then the others are not enough."""
    cluster = MadeUp(monkeypatch, here=2, slow=2)
    clock = Clock(monkeypatch)
    asked: list[float] = []

    def hears(name: str) -> bool:
        asked.append(clock.now_s)
        return len(asked) == 1 or (answers_at_s is not None and clock.now_s >= answers_at_s)

    cluster.hears = hears
    monkeypatch.setattr(ray_processes, "RayProcesses", Processes)
    monkeypatch.setattr(nodes.cluster, "leave_without_head", lambda before: None)
    found = Nodes(PlacementOptions(nodes=2), 4)
    starting = carrier(found, 4)
    if answers_at_s is None:
        with pytest.raises(NotEnoughResources, match=r"the cluster has 1\..* Besides, node slow .* cannot be reached"):
            starting.reserve(lambda: False)
        assert 60.0 <= clock.now_s <= 61.0
        assert not cluster.used, "what was reserved is given back"
        return
    workers, _, _ = starting.reserve(lambda: False)
    assert workers == 4
    assert spread(found) == [("here", 2), ("slow", 2)]
    assert not found.is_lost("slow")
    assert clock.now_s <= answers_at_s + 2.0


def test_a_worker_that_cannot_start_is_told_with_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise RingNoSpace("/dev/shm has 0 free")

    MadeUp(monkeypatch, a=1, b=4)
    monkeypatch.setattr(ray_processes, "_get", full)
    actor = MagicMock()
    monkeypatch.setattr(ray_processes.ray, "remote", lambda _: actor)
    monkeypatch.setattr(ray_processes.ray, "kill", lambda _: None)
    found = reserved(PlacementOptions(nodes=2), 2)
    processes = ray_processes.RayProcesses(JOB, found, None, CarrierOptions(2, 60.0, WorkerOptions(None, 1024)))
    worker = next(worker for worker in range(2) if found.node_id(worker) == "b")
    with pytest.raises(CannotStart, match=r"could not start on node b \(b\): .*/dev/shm has 0 free"):
        processes.start(worker, 0, 0, b"", 1e9)


@pytest.mark.parametrize(
    ("free", "words"),
    [
        (0.0, r"1 of 2 workers could not be placed within 60 s\. .* 0 free\. Use fewer workers"),
        (15.0, r"1 of 2 workers had not started within start_timeout_s=60 seconds, although .*\(15 of its 16 CPUs are"),
    ],
)
def test_a_worker_that_starts_too_slowly_is_not_called_one_without_room(
    free: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: Any) -> Any:
        raise GetTimeoutError

    MadeUp(monkeypatch, a=2)
    monkeypatch.setattr(ray_processes, "_get", late)
    monkeypatch.setattr(ray_processes, "_cpus", lambda: (16.0, free))
    monkeypatch.setattr(ray_processes.ray, "remote", lambda _: MagicMock())
    monkeypatch.setattr(ray_processes.ray, "kill", lambda _: None)
    found = reserved(PlacementOptions(nodes=1), 2)
    processes = ray_processes.RayProcesses(JOB, found, None, CarrierOptions(2, 60.0, WorkerOptions(None, 1024)))
    processes._not_there = {1}
    with pytest.raises(CannotStart, match=words):
        processes.start(1, 0, 0, b"", 1e9)
