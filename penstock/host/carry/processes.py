"""The interface of the classes that start a job's workers: Ray's actors, or child processes of the program."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from penstock.host.process.watched_process import WatchedProcess
from penstock.host.process.worker_process import Outcome
from penstock.runtime.errors import PenstockError


class CannotStart(PenstockError):
    """A worker's process could not be started. `kind`: "resources" when there is and will be no room for it, "program"
    when the job's program cannot be loaded (then the job fails), "died" when it ended or was not ready in time."""

    def __init__(
        self, message: str, kind: Literal["resources", "program", "died"], operator: str | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.operator = operator


class ProcessDied(PenstockError):
    """A worker's process has ended before its run did, or is lost with its node. The text is what is known of the
    reason. `with_node`: the node is lost, which says nothing against what the process was doing."""

    def __init__(self, message: str, *, with_node: bool = False) -> None:
        super().__init__(message)
        self.with_node = with_node


class WorkerHandle(Protocol):
    """One life of a worker's process, which is ready to run."""

    #: What WorkerProcess.prepare returned: index, pid, node_id, machine, address, control, blackbox.
    info: dict[str, Any]
    process: WatchedProcess

    def run(self) -> Outcome:
        """Begin the run loop, and wait until it has ended. Raises ProcessDied."""
        ...

    def kill(self) -> None:
        """End the process at once. Returns without waiting for its end."""
        ...


class RelayHandle(Protocol):
    """A relay whose process is ready to run."""

    #: What RelayProcess.prepare returned.
    info: dict[str, Any]
    process: WatchedProcess

    def run(self) -> Any:
        """Let the relay run, and wait until it has ended. Raises ProcessDied."""
        ...

    def kill(self) -> None:
        """End the process at once. Returns without waiting for its end."""
        ...


class RelayStarter(Protocol):
    """Starts the relays of a job that may span several machines. Safe to use from several threads."""

    def start_relay(self, number: int, node_id: str, deadline: float) -> RelayHandle:
        """Start a relay of this number on a node; waits until `deadline` (of time.monotonic) at most. Raises any
        error."""
        ...

    def node_name(self, node_id: str) -> str:
        """Returns the name of a node, for people."""
        ...


class Processes(Protocol):
    """Starts the processes of a job's workers. Safe to use from several threads."""

    def start(self, worker: int, incarnation: int, ring_bytes: int, program: bytes, deadline: float) -> WorkerHandle:
        """Start a process and make it ready to run; waits until `deadline` (of time.monotonic) at most. `ring_bytes`:
        messages have been made for a ring of this size. `program`: see WorkerProcess.connect. Raises CannotStart."""
        ...

    def keep_spares(self, program: bytes) -> None:
        """Makes sure that each node of the job has a spare process, which has loaded the program and waits to become a
        worker. Waits until the spare processes are ready. Raises nothing: without a spare process, a worker that has
        died just takes longer to come back."""
        ...

    def give_up(self, machine: str, reason: str) -> None:
        """Takes all processes on a machine for dead, and ends them: `run` of each raises ProcessDied with the reason.
        Their successors start elsewhere, if there is room. Only a job with several machines gives one up."""
        raise AssertionError(f"a job on one machine gives up machine {machine}: {reason}")

    def clocks(self) -> dict[int, int]:
        """Returns how far the clock of each worker's machine is ahead of this machine's, in ns, by worker. A worker
        that is missing is on this machine, or its clock is not known yet."""
        return {}

    def spares(self) -> int:
        """Returns the number of spare processes that are ready."""
        ...

    def close(self) -> None:
        """Ends all processes, and gives back their reservations."""
        ...
