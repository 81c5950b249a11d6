"""The requests of drivers that are not carried out yet: savepoints, rescales, migrations, and a stop with a savepoint.

A savepoint or a rescale is done when an epoch that was begun for it is complete. A request's number is its carrier's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass
class SavepointRequest:
    """Copy the state of all tasks to a place. `epoch`: the one to wait for; None while none has been begun for it."""

    number: int
    place: str
    epoch: int | None = None


@dataclass
class RescaleRequest:
    """Give an operator another number of tasks. `epoch`: as of a savepoint."""

    number: int
    operator: str
    parallelism: int
    epoch: int | None = None


@dataclass
class MigrateRequest:
    """Let tasks, by number, run on these workers."""

    number: int
    wanted: dict[int, int]


@dataclass
class StopRequest:
    """End the job with a savepoint in this place."""

    number: int
    place: str


@dataclass
class DriverRequests:
    """All open requests of a job's drivers."""

    at_epoch: list[SavepointRequest | RescaleRequest] = field(default_factory=list)  # oldest first
    rescaling: list[int] = field(default_factory=list)  # rescales that are done when the job runs again
    migrations: deque[MigrateRequest] = field(default_factory=deque)  # one after the other, the oldest first
    stops: list[StopRequest] = field(default_factory=list)  # all for the same place

    def all(self) -> list[int]:
        """The numbers of all open requests."""
        return [
            *(request.number for request in self.at_epoch),
            *self.rescaling,
            *(request.number for request in self.migrations),
            *(request.number for request in self.stops),
        ]

    def clear(self) -> None:
        """Forget all requests, because the job has ended."""
        self.at_epoch.clear()
        self.rescaling.clear()
        self.migrations.clear()
        self.stops.clear()
