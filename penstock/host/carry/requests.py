"""The requests of drivers to the host of a job: plain data, which travels to the host as it is.

A `Job` gives them to its JobLink, and one `match` in the host (JobRunner, or UnloadedRunner for a job whose program
cannot be loaded) answers them. A new request is a class here, a case there, and nothing between the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from penstock.host.decide.commands import JobEnd
from penstock.host.process.collected import Encoded
from penstock.host.process.linger import Driver
from penstock.runtime.status import JobStatus

T = TypeVar("T")


class Request(Generic[T]):
    """A request whose answer is a `T`."""

    #: The request in the words of users, for errors.
    verb: ClassVar[str] = ""
    #: Whether the request is repeated when another host takes the place of one that has died.
    again: ClassVar[bool] = True


# --- at any time ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome(Request[JobEnd]):
    """Wait for the end of the job. The host stays until the driver sends `Release`, or dies."""

    driver: Driver


@dataclass(frozen=True)
class Ping(Request[None]):
    """Answer, which shows the driver that the host lives, and the host that the driver lives."""

    again = False
    driver: Driver


@dataclass(frozen=True)
class Status(Request[JobStatus]):
    """Answer with the job's status. After the job's end, this is the last status."""


@dataclass(frozen=True)
class LastStatus(Request[JobStatus]):
    """Wait for the end of the job, and answer with its last status."""


@dataclass(frozen=True)
class Stop(Request[None]):
    """End the sources. The job finishes when all records that were read have come through."""

    verb = "stop"


@dataclass(frozen=True)
class Cancel(Request[None]):
    """End the job at once. Records on their way are dropped."""

    verb = "cancel"


@dataclass(frozen=True)
class Records(Request[list[Encoded]]):
    """Answer with the encoded records that a Collect sink has sent so far; with `last`, with all of them, after waiting
    for the job's end. A host that takes the place of one that has died must come to the end of the job again first."""

    channel: str
    last: bool = False


@dataclass(frozen=True)
class Lines(Request[tuple[int, list[str]]]):
    """Wait until Console sinks have sent more than `seen` lines, which the driver has printed, or until `timeout_s` is
    over. The answer is the number of lines so far, and the new lines.

    While the driver lives, no line is left out: sinks wait for it. Lines that no driver has printed are kept up to a
    limit for a driver that comes later. `seen` is None when the driver prints no more lines."""

    driver: Driver
    seen: int | None
    timeout_s: float = 0.0


@dataclass(frozen=True)
class Release(Request[None]):
    """Take note that the driver has fetched all that it wants after the job's end. The host ends after the last
    driver."""

    driver: Driver


# --- to a running job -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Savepoint(Request[None]):
    """Save the state of all tasks in a place that the user has named. The answer comes when it is written. After
    `timeout_s` seconds the host gives the savepoint up: a TimeoutError says what it has waited for."""

    verb, again = "savepoint", False
    place: str
    timeout_s: float | None = None


@dataclass(frozen=True)
class StopWithSavepoint(Request[None]):
    """End the job at an epoch, and save that epoch in a place that the user has named. The answer comes when it is
    written and the job is about to end."""

    verb = "stop with a savepoint"
    place: str


@dataclass(frozen=True)
class Rescale(Request[None]):
    """Give an operator another number of tasks. The answer comes when these tasks run."""

    verb, again = "rescale", False
    operator: str
    parallelism: int


@dataclass(frozen=True)
class Migrate(Request[None]):
    """Migrate tasks, given by name, to other workers. The answer comes when they run there."""

    verb, again = "migrate", False
    tasks: Mapping[str, int]


@dataclass(frozen=True)
class Traffic(Request[list[dict[str, Any]]]):
    """Answer with the load and the traffic of tasks, as measured last."""

    verb, again = "traffic", False
