"""The agents of a job's nodes as Ray actors, and the JobMaster's lines to them (host/process/node_agent.py).

Only a job that spans several machines has agents: one on each of its nodes, except on the JobMaster's own machine. The
JobMaster owns them, so Ray ends them when it dies. The death of an agent is not the death of its node: it is started
again, and looks after the same processes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import ray

from penstock.actors.ray_actor import on_node
from penstock.actors.raylet import end_with_raylet
from penstock.host.process.control import End
from penstock.host.process.network import Network
from penstock.host.process.node_agent import NodeAgent, NodeLine, leave_process
from penstock.runtime.backoff import Backoff
from penstock.runtime.errors import PenstockError, first_line
from penstock.runtime.status import MachineStatus
from penstock.runtime.transport.certificates import BadCertificate

logger = logging.getLogger(__name__)

_AGAIN_FIRST_S = 0.1
_AGAIN_MAX_S = 2.0


class NotReached(PenstockError):
    """No agent could be started on a node, although Ray takes the node for alive. `node_id` says on which one."""

    def __init__(self, message: str, node_id: str) -> None:
        super().__init__(message)
        self.node_id = node_id


class Agent:
    """The Ray actor around a NodeAgent."""

    def __init__(self, job: str, network: Network) -> None:
        end_with_raylet()
        host = ray.util.get_node_ip_address()
        self._agent: NodeAgent | None = None
        try:
            self._agent = NodeAgent(job, network.ports(host), network.node_timeout_s, leave_process)
        except BadCertificate as error:  # which `end` raises: Ray would only say that this process has died
            self._error = error

    def end(self) -> End:
        """Returns where the JobMaster asks the agent."""
        if self._agent is None:
            raise self._error
        return self._agent.end

    def stay(self) -> None:
        """Does not return. The call fails when this process has died."""
        threading.Event().wait()


class NodeAgents:
    """The agents of a job's nodes. `lost` is called with the id of a node, and the reason, when the node is lost. Safe
    to use from several threads."""

    def __init__(self, job: str, network: Network, lost: Callable[[str, str], None]) -> None:
        self._job = job
        self._network = network
        self._lost = lost
        self._lock = threading.Lock()
        self._nodes: dict[str, _Node] = {}
        self._gone: dict[str, MachineStatus] = {}  # by node id: the last status of a node that is lost

    def line(self, node_id: str, name: str, timeout_s: float) -> NodeLine:
        """Returns the line to the agent of a node, which is started if there is none. Raises NotReached."""
        with self._lock:
            node = self._nodes.get(node_id)
            if node is None:
                node = self._nodes[node_id] = _Node(self._job, self._network, node_id, name, self.give_up)
        return node.line(timeout_s)

    def status(self) -> list[MachineStatus]:
        """Returns the state of each node by its heartbeats, also of nodes that are lost."""
        known = {node_id: line.status() for node_id, line in self._lines().items()}
        return [status.changed(node_id=node_id) for node_id, status in (self._gone | known).items()]

    def clocks(self) -> dict[str, int]:
        """How far the clock of each node is ahead of this machine's, in ns, by the node's id."""
        known = {node_id: line.clock() for node_id, line in self._lines().items()}
        return {node_id: offset.ahead_ns for node_id, offset in known.items() if offset is not None}

    def _lines(self) -> dict[str, NodeLine]:
        with self._lock:
            return {node_id: node.known for node_id, node in self._nodes.items() if node.known is not None}

    def close(self) -> None:
        """Ends all agents."""
        with self._lock:
            nodes, self._nodes = list(self._nodes.values()), {}
        for node in nodes:
            node.close()

    def give_up(self, node_id: str, reason: str) -> None:
        """Takes a node for lost, even if its agent answers. Does nothing to a node that is lost already."""
        with self._lock:
            node = self._nodes.pop(node_id, None)
        if node is not None:
            if node.known is not None:
                self._gone[node_id] = node.known.status().changed(state="lost")
            self._lost(node_id, reason)
            node.close()


class _Node:
    """One node, and the present life of its agent."""

    def __init__(self, job: str, network: Network, node_id: str, name: str, lost: Callable[[str, str], None]) -> None:
        self.known: NodeLine | None = None
        self._job = job
        self._network = network
        self._id = node_id
        self._name = name
        self._lost = lost
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._actor: Any = None

    def line(self, timeout_s: float) -> NodeLine:
        """Returns the line to the agent, which is started if there is none."""
        with self._lock:
            if self.known is None:
                try:
                    end = self._start(timeout_s)
                except BadCertificate as error:  # as on other nodes, probably, and waiting does not help
                    raise BadCertificate(f"on node {self._name}, {first_line(error)}") from error
                except Exception as error:  # Ray raises errors of many classes
                    raise NotReached(f"node {self._name} cannot be reached: {first_line(error)}", self._id) from error
                limit_s = self._network.node_timeout_s
                self.known = NodeLine(self._name, end, limit_s, lambda reason: self._lost(self._id, reason))
                threading.Thread(target=self._keep, name="penstock-agents", daemon=True).start()
            return self.known

    def close(self) -> None:
        """Ends the agent."""
        self._closed.set()
        if self.known is not None:
            self.known.close()
        if self._actor is not None:
            ray.kill(self._actor)

    def _start(self, timeout_s: float) -> End:
        self._actor = on_node(Agent, self._id).remote(self._job, self._network)
        end: End = ray.get(self._actor.end.remote(), timeout=timeout_s)
        return end

    def _keep(self) -> None:
        """Starts the agent again whenever its process has died, until the node is lost."""
        backoff = Backoff(_AGAIN_FIRST_S, _AGAIN_MAX_S)
        while True:
            try:
                ray.get(self._actor.stay.remote())
            except Exception as error:  # Ray raises errors of many classes
                reason = first_line(error)
            if self._closed.is_set():
                return
            try:
                end = self._start(self._network.node_timeout_s)
            except Exception as error:
                logger.info("job %s: the agent of node %s cannot be started: %s", self._job, self._name, error)
                self._closed.wait(backoff.failed())
                continue
            backoff.succeeded()
            logger.warning("job %s: the agent of node %s was started again: %s", self._job, self._name, reason)
            assert self.known is not None
            self.known.connect(end)
