"""Carrier: the process in which a JobRunner runs, as the runner needs it. It is the JobMaster on Ray, or the program of
a local job."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from penstock.host.process.linger import Driver
from penstock.runtime.errors import JobError
from penstock.runtime.status import PlacementStatus

if TYPE_CHECKING:
    from penstock.host.carry.job_runner import JobRunner
    from penstock.host.carry.notes import Notes
    from penstock.host.carry.processes import Processes, RelayStarter
    from penstock.host.carry.spark_runner import StartBridge
    from penstock.host.decide.placing import Placing


class Carrier(Protocol):
    """See the module's docstring. The methods with a body do what fits a process whose workers share its machine."""

    again: bool = False  # whether this process continues a job whose JobMaster has died
    notes: Notes

    def reserve(self, cancelled: Callable[[], bool], known: str = "") -> tuple[int, Processes, Placing]:
        """Reserves room for the workers. `known`: what `Placing.known` has said of the job before. Returns the number
        of workers, what starts their processes, and what assigns tasks to them. Raises NotEnoughResources when there is
        no room, and any error when the job was cancelled."""
        ...

    def relays(self) -> RelayStarter | None:
        """Called after `reserve`. Returns what starts relays, or None when all workers share memory."""
        return None

    def waits_for(self) -> str:
        """Returns the thing for which a starting job waits, for the status."""
        return "its worker processes"

    def placement_status(self) -> PlacementStatus:
        """Returns the part of the status about placement."""
        return PlacementStatus()

    def bridges(self) -> StartBridge | None:
        """Returns the starter of the process that holds Spark, or None for a job that does not use Spark."""
        return None

    def running(self, runner: JobRunner) -> None:
        """Called once, when the processes of all workers have started."""
        return

    def migrating(self) -> None:
        """Called when a driver asks for tasks to be migrated. From then on no other task is moved without a request."""
        return

    def traffic(self) -> list[dict[str, Any]]:
        """Returns the load and the traffic of tasks, as measured last. Raises JobError when they are not measured."""
        raise JobError("only jobs on Ray measure their traffic; run the job without local=True, and with replan_s=...")

    def driver_lives(self, driver: Driver) -> bool:
        """Returns whether a driver's process still exists."""
        return driver.lives()

    def leave(self) -> None:
        """Called at the very end, when no driver needs the runner any more."""
        ...
