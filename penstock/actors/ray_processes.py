"""Runs the processes of a job's workers and relays as Ray actors, on the nodes that were reserved for them.

On another machine than the JobMaster's, the agent of the node looks after a worker (actors/node_agents.py). When a node
has been silent for the limit, its workers are dead to the job, whatever Ray still knows of them: `run` of each raises
ProcessDied, and the next process of the worker starts on another node.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError

from penstock.actors.node_agents import NodeAgents, NotReached
from penstock.actors.nodes import Nodes
from penstock.actors.ray_actor import RayActor, on_node
from penstock.actors.relays import Relay
from penstock.actors.worker import Worker
from penstock.host.carry.carrier_options import CarrierOptions
from penstock.host.carry.processes import CannotStart, Processes, RelayStarter
from penstock.host.process.machine import machine_id
from penstock.host.process.node_agent import NodeLine
from penstock.host.process.watched_process import ProcessHere, WatchedProcess
from penstock.placement.groups import NotPlaced
from penstock.runtime.errors import first_line
from penstock.runtime.operators.resources import GPU
from penstock.runtime.status import MachineStatus
from penstock.runtime.transport.certificates import BadCertificate

logger = logging.getLogger(__name__)

# A node on which no agent has started within this time cannot be reached, whatever Ray knows of it.
_AGENT_S = 20.0
# A spare process that has not answered within this time may be stopped. Another process is started in its place.
_SPARE_S = 5.0


class RayProcesses(Processes, RelayStarter):
    """Starts the workers and relays of a job as actors. `master`: the handle of the JobMaster's actor."""

    def __init__(self, job: str, nodes: Nodes, master: Any, options: CarrierOptions) -> None:
        self._nodes = nodes
        self._master = master
        self._workers = nodes.workers
        self._cpus = options.cpus_per_worker
        self._options = options.worker
        network = options.worker.network
        self._agents = None if network is None else NodeAgents(job, network, self._node_lost)
        #: Whether relays can be started: processes of the job may be on several machines. What a relay has given to a
        #: worker must survive the relay, which holds for shared memory alone.
        self.has_relays = network is not None and not network.everywhere
        self._job = job
        self._handles: dict[int, RayActor] = {}  # of the present processes of workers
        self._relays: dict[int, RayActor] = {}
        self._start_timeout_s = options.start_timeout_s
        self._hang_timeout_s = options.hang_timeout_s
        self._machine = machine_id()
        self._lock = threading.Lock()
        self._closed = False
        self._actors: dict[int, Any] = {}
        self._relay_actors: list[Any] = []
        self._starting: dict[int, str] = {}  # by worker: the node on which its process starts
        self._spares: dict[str, Any] = {}  # actors that are no worker yet, by node id
        self._spares_failed = False
        # Workers that have never had a process that was there, and those whose first process loads the program.
        self._not_there = set(range(nodes.workers))
        self._loading: set[int] = set()

    def start(self, worker: int, incarnation: int, ring_bytes: int, program: bytes, deadline: float) -> RayActor:
        """See Processes. A process whose node is lost while it starts is started on another node."""
        while True:
            try:
                strategy = self._nodes.strategy(worker)
            except NotPlaced as error:  # and never will be
                raise CannotStart(str(error), "resources") from error
            node_id = self._nodes.node_id(worker)
            needs = self._nodes.needs(worker)
            # Ray tells a process which GPUs it has when it makes the actor, and a spare process has none.
            actor = None if needs else self._spare(worker, node_id)
            spare = actor is not None
            if not spare:
                own = {name: amount for name, amount in needs.items() if name != GPU}
                options = {"num_cpus": self._cpus, "num_gpus": needs.get(GPU), "resources": own or None}
                actor = ray.remote(Worker).options(**options, scheduling_strategy=strategy).remote()
                self._keep(worker, actor)
            try:
                with self._starting_on(worker, node_id):
                    if spare:
                        self._check_spare(actor)
                    return self._started(actor, worker, incarnation, ring_bytes, program, deadline)
            except CannotStart as error:
                ray.kill(actor)
                if (spare and error.kind == "died") or self._nodes.is_lost(node_id):
                    continue
                raise

    @contextlib.contextmanager
    def _starting_on(self, worker: int, node_id: str) -> Iterator[None]:
        """Notes the node on which a worker's process starts, so that the process is given up when the node is lost."""
        with self._lock:
            self._starting[worker] = node_id
        try:
            if self._nodes.is_lost(node_id):
                raise CannotStart("its node is lost", "died")
            yield
        finally:
            with self._lock:
                del self._starting[worker]

    def _spare(self, worker: int, node_id: str) -> Any:
        """Returns the spare process of the node on which a worker is to run, if there is one. The worker's CPUs stay
        reserved for the job, although Ray does not count the process."""
        with self._lock:
            spare = self._spares.pop(node_id, None)
        if spare is not None:
            self._keep(worker, spare)
        return spare

    @staticmethod
    def _check_spare(spare: Any) -> None:
        """Raises CannotStart when a spare process does not answer soon."""
        try:
            ray.get(spare.answer.remote(), timeout=_SPARE_S)
        except (GetTimeoutError, RayActorError) as error:
            raise CannotStart(f"the spare process does not answer: {first_line(error)}", "died") from error

    def keep_spares(self, program: bytes) -> None:
        wanted = {self._nodes.node_id(worker) for worker in range(self._workers)}
        for node_id in wanted - self._spares.keys():
            spare = on_node(Worker, node_id).remote()
            try:
                ray.get(spare.warm.remote(program), timeout=self._start_timeout_s)
            except Exception as error:  # whatever Ray, or a user's module, raises
                ray.kill(spare)
                if not self._spares_failed:
                    logger.info(
                        "no spare process could be started on node %s: %s", self._nodes.name(node_id), first_line(error)
                    )
                self._spares_failed = True
                continue
            with self._lock:
                self._spares[node_id] = spare
                closed = self._closed
            if closed:  # the job has ended meanwhile
                ray.kill(spare)

    def spares(self) -> int:
        return len(self._spares)

    def _keep(self, worker: int, actor: Any) -> None:
        """Notes the actor of a worker, which ends with the job."""
        with self._lock:
            self._actors[worker] = actor
            closed = self._closed
        if closed:  # the job has ended meanwhile
            ray.kill(actor)

    def _started(
        self, actor: Any, worker: int, incarnation: int, ring_bytes: int, program: bytes, deadline: float
    ) -> RayActor:
        first = worker in self._not_there
        try:
            info = _get(actor.prepare.remote(worker, self._options, ring_bytes), deadline)
        except GetTimeoutError as error:
            if first:
                with self._lock:
                    late = len(self._not_there)
                raise CannotStart(self._too_slow(late), "resources") from error
            raise CannotStart(
                f"its process was not ready within start_timeout_s={self._start_timeout_s:g} seconds", "died"
            ) from error
        except ActorUnschedulableError as error:
            raise CannotStart(self._missing(self._workers), "resources") from error
        except RayActorError as error:
            raise CannotStart(first_line(error), "died") from error
        except Exception as error:  # of the worker's own
            where = self._nodes.name(self._nodes.node_id(worker))
            raise CannotStart(f"a worker could not start on node {where}: {first_line(error)}", "program") from error
        with self._lock:
            if first:
                self._loading.add(worker)
            self._not_there.discard(worker)
        process = self._watched(info, deadline)
        watched = (os.getpid(), self._machine, self._hang_timeout_s)
        try:
            outcome = _get(actor.connect.remote(program, self._master, incarnation, watched), deadline)
        except GetTimeoutError as error:
            text = (
                f"its process had not loaded the job's program within start_timeout_s={self._start_timeout_s:g} seconds"
            )
            raise CannotStart(text, "died") from error
        except RayActorError as error:
            raise CannotStart(first_line(error), "died") from error
        finally:
            with self._lock:
                self._loading.discard(worker)
        if outcome.error is not None:
            raise CannotStart(outcome.error, "program", outcome.operator)
        handle = RayActor(actor, info, process)
        with self._lock:
            self._handles[worker] = handle
        return handle

    def start_relay(self, number: int, node_id: str, deadline: float) -> RayActor:
        network = self._options.network
        actor = on_node(Relay, node_id).remote()
        with self._lock:
            self._relay_actors.append(actor)
        try:
            if self._closed:
                raise RuntimeError("the job has ended")
            info = _get(actor.prepare.remote(number, self._job, network, self._options.ring_bytes), deadline)
            handle = RayActor(actor, info, self._watched(info, deadline), stays=True)
        except Exception:
            ray.kill(actor)
            raise
        with self._lock:
            self._relays[number] = handle
        return handle

    def node_name(self, node_id: str) -> str:
        return self._nodes.name(node_id)

    def _all(self) -> list[RayActor]:
        return [*self._handles.values(), *self._relays.values()]

    def _watched(self, info: dict[str, Any], deadline: float) -> WatchedProcess:
        if info["machine"] == self._machine:
            return ProcessHere(info["pid"], info["blackbox"])
        assert self._agents is not None, "a job on one machine has no workers elsewhere"
        left_s = max(0.0, deadline - time.monotonic())
        try:
            line = self._agents.line(info["node_id"], self._nodes.name(info["node_id"]), left_s)
        except NotReached as error:
            raise CannotStart(str(error), "died") from error
        process = line.process(info["pid"], info["blackbox"])
        try:
            line.wait_for_clock(left_s)
        except BadCertificate as error:
            raise CannotStart(str(error), "program") from error
        return process

    def _node_lost(self, node_id: str, reason: str) -> None:
        """Takes all workers of a node for dead."""
        self._nodes.lose(node_id)
        with self._lock:
            lost = [handle for handle in self._all() if handle.info["node_id"] == node_id]
            starting = [self._actors[worker] for worker, at in self._starting.items() if at == node_id]
            if (spare := self._spares.pop(node_id, None)) is not None:
                starting.append(spare)
        for actor in starting:  # Ray itself would wait until it knows that the node is dead
            ray.kill(actor)
        for handle in lost:
            handle.lose(reason)
            # Where the node still answers, also a process ends that is stopped, for which Ray would wait.
            handle.kill()

    def give_up(self, machine: str, reason: str) -> None:
        with self._lock:
            nodes = {handle.info["node_id"] for handle in self._handles.values() if handle.info["machine"] == machine}
        assert self._agents is not None, "a job on one machine has no links that could be cut"
        for node_id in sorted(nodes):
            self._agents.give_up(node_id, reason)

    def kill_all(self) -> None:
        """Kills all present workers and relays, without Ray."""
        with self._lock:
            handles = self._all()
        for handle in handles:
            handle.process.kill()

    def connect_nodes(self) -> dict[str, NodeLine]:
        """Starts the agents of all nodes on other machines. Returns the lines to them by node id. Raises NotReached,
        and BadCertificate when a node and this one refuse each other."""
        if self._agents is None:
            return {}
        limit_s = min(self._start_timeout_s, _AGENT_S)
        lines = {
            machine.node_id: self._agents.line(machine.node_id, str(machine), limit_s)
            for machine in self._nodes.elsewhere()
        }
        for line in lines.values():
            line.wait_for_clock(limit_s)
        return lines

    def nodes_status(self) -> list[MachineStatus]:
        """Returns the state of the nodes on other machines by their heartbeats."""
        return [] if self._agents is None else self._agents.status()

    def clocks(self) -> dict[int, int]:
        if self._agents is None:
            return {}
        ahead_ns = self._agents.clocks()
        with self._lock:
            nodes = {worker: handle.info["node_id"] for worker, handle in self._handles.items()}
        return {worker: ahead_ns.get(node_id, 0) for worker, node_id in nodes.items()}

    def waits_for(self) -> str:
        """Returns the reason for which the job waits while its first processes start, for the status."""
        with self._lock:
            late, loading = len(self._not_there), len(self._loading)
        if not late:
            return f"{loading} of {self._workers} workers load the job's program"
        have, free = _cpus()
        return (
            f"{self._workers - late} of {self._workers} workers have started, each takes {self._cpus:g} CPUs; "
            f"{free:g} of the cluster's {have:g} are free"
        )

    def _too_slow(self, late: int) -> str:
        have, free = _cpus()
        if free < late * self._cpus:
            return self._missing(late)
        return (
            f"{late} of {self._workers} workers had not started within start_timeout_s={self._start_timeout_s:g} "
            f"seconds, although the cluster has room for them ({free:g} of its {have:g} CPUs are free). Processes "
            "start slowly on a machine that is busy: give more seconds. Otherwise Ray's logs say why."
        )

    def _missing(self, late: int) -> str:
        have, free = _cpus()
        return (
            f"{late} of {self._workers} workers could not be placed within {self._start_timeout_s:g} s. "
            f"The job asks for {self._workers} x {self._cpus:g} CPUs; the cluster has "
            f"{have:g} CPUs, {free:g} free. Use fewer workers or a smaller cpus_per_worker, or stop other jobs."
        )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            actors = [*self._actors.values(), *self._spares.values(), *self._relay_actors]
        for actor in actors:
            ray.kill(actor)
        if self._agents is not None:
            self._agents.close()
        self._nodes.close()


def _get(call: Any, deadline: float) -> Any:
    return ray.get(call, timeout=max(0.0, deadline - time.monotonic()))


def _cpus() -> tuple[float, float]:
    """Returns the number of CPUs of the cluster, and how many of them are free."""
    return ray.cluster_resources().get("CPU", 0.0), ray.available_resources().get("CPU", 0.0)
