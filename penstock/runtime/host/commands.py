"""What a JobHost tells its carrier to do, and how a job ends: plain data.

A carrier (the JobMaster on Ray, the runner of local processes, a test's simulated cluster) carries out these commands
and reports by the events of the JobHost. It decides nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from penstock.runtime.epochs.manifest import Manifest
from penstock.runtime.program.plan import Plan

#: How a job can end.
EndState = Literal["FINISHED", "CANCELLED", "FAILED"]


@dataclass
class JobEnd:
    """How a job ended. `kind` determines which error the driver raises."""

    state: EndState
    error: str | None = None
    operator: str | None = None
    kind: Literal["failed", "resources", "cluster"] = "failed"


@dataclass(frozen=True)
class StartProcess:
    """Start a process for this worker, and let it load the plan; then `process_ready` or `process_not_started`.

    `incarnation` tells the process from all others of this worker. `ring_bytes`: its ring is to be at least so large.
    """

    worker: int
    incarnation: int
    ring_bytes: int
    plan: Plan
    placed: dict[int, int]


@dataclass(frozen=True)
class KillProcess:
    """Kill this process of a worker, because it hangs. Its end is told by `process_died`, as any other."""

    worker: int
    incarnation: int


@dataclass(frozen=True)
class Call:
    """Let a worker do this, behind all earlier calls to the same process; then `answered` or `refused`."""

    worker: int
    incarnation: int
    number: int
    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class TellAll:
    """Tell each worker to stop, or to cancel, until it has confirmed; also each worker that starts later."""

    what: Literal["stop", "cancel"]


@dataclass(frozen=True)
class SaveManifest:
    """Write the manifest; then `saved`, `not_saved` when it is sure that it is not there, or `store_failed`."""

    manifest: Manifest


@dataclass(frozen=True)
class FindOlder:
    """The epoch cannot be read: find the newest one before it that is whole; then `found_older` or `store_failed`."""

    epoch: int
    reason: str


@dataclass(frozen=True)
class MakeRoom:
    """A task could not write to the store: delete what no epoch needs any more."""


@dataclass(frozen=True)
class UndoSinkRecords:
    """These tasks are being built again: what they have sent for epochs that are not complete is void, and so is what
    tasks sent that are not among `there`."""

    tasks: frozenset[int]
    generation: int
    there: frozenset[int]


@dataclass(frozen=True)
class CommitSinkRecords:
    """The records that sinks have sent for this epoch, and for those before, are final."""

    epoch: int


@dataclass(frozen=True)
class CopySavepoint:
    """Copy the last complete epoch to this place, for a driver's request; the carrier itself replies."""

    request: int
    place: str
    plan: Plan


@dataclass(frozen=True)
class Reply:
    """A driver's request has been carried out, or could not be."""

    request: int
    error: Exception | None = None


@dataclass(frozen=True)
class EndJob:
    """The job is over: end all processes. No more commands follow."""

    end: JobEnd


HostCommand = (
    StartProcess
    | KillProcess
    | Call
    | TellAll
    | SaveManifest
    | FindOlder
    | MakeRoom
    | UndoSinkRecords
    | CommitSinkRecords
    | CopySavepoint
    | Reply
    | EndJob
)
