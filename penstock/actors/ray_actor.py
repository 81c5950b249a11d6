"""Actors that run in one call for the life of their process, whose failure tells that the process has died."""

from __future__ import annotations

import threading
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.host.carry.processes import ProcessDied, WorkerHandle
from penstock.host.process.watched_process import WatchedProcess
from penstock.runtime.errors import first_line


def on_node(actor: type, node_id: str) -> Any:
    """Returns the class of an actor that takes no CPU, for this node and no other."""
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(actor).options(num_cpus=0, scheduling_strategy=where)


class RayActor(WorkerHandle):
    """An actor that is ready for its call of `run`: a worker, or a relay."""

    def __init__(self, actor: Any, info: dict[str, Any], process: WatchedProcess, *, stays: bool = False) -> None:
        """`stays`: the process may live on after its call has returned."""
        self.info = info
        self._stays = stays
        self.process = process
        self._actor = actor
        self._over = threading.Event()
        self._lost: str | None = None

    def run(self) -> Any:
        """Lets the actor run, and returns the result of its call. Raises ProcessDied."""
        run = self._actor.run.remote()
        run.future().add_done_callback(lambda _: self._over.set())
        self._over.wait()
        if self._lost is not None:
            raise ProcessDied(self._lost, with_node=True)
        try:
            return ray.get(run)
        except Exception as error:  # whatever Ray makes of a process's end
            raise ProcessDied(first_line(error)) from error

    def kill(self) -> None:
        self.process.kill()
        if self._stays:
            ray.kill(self._actor)

    def lose(self, reason: str) -> None:
        """Takes the process for dead, because its node is lost. Ray ends the process as soon as it can."""
        self._lost = reason
        self._over.set()
        ray.kill(self._actor)
