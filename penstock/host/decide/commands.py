"""The commands of a JobHost to its carrier, and how a job ends: plain data.

A carrier (the JobMaster on Ray, the runner of local processes, a simulated cluster in tests) carries out these
commands, and reports the results by the events of the JobHost. A carrier must never decide anything itself.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Literal

from penstock.bridge.commands import SparkCommand
from penstock.host.decide.process_commands import CallCommand, Cancel, Stop, TellRelay
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
    kind: Literal["failed", "resources", "cluster", "store"] = "failed"

    @classmethod
    def by_own_fault(cls, error: Exception) -> JobEnd:
        """Returns the end of a job that an unexpected error in its host has ended."""
        story = "".join(traceback.format_exception(error))
        return cls("FAILED", f"the job's host failed, by a fault of Penstock's own: {error}\n{story}")

    def words(self, name: str) -> str:
        """Returns why a job of this name can do nothing any more."""
        return f"job {name!r} has ended: {self.state.lower()}"


@dataclass(frozen=True)
class StartProcess:
    """Start a process for this worker, and let it load the plan. The answer is `process_ready` or
    `process_not_started`.

    `incarnation` distinguishes the process from all others of this worker. `ring_bytes`: the least size of its ring.
    """

    worker: int
    incarnation: int
    ring_bytes: int
    plan: Plan
    placed: dict[int, int]


@dataclass(frozen=True)
class KillProcess:
    """Kill this process of a worker, because it hangs. `process_died` reports its end, as for any other process."""

    worker: int
    incarnation: int


@dataclass(frozen=True)
class GiveUpMachine:
    """Take all processes on this machine for dead, and end them. Their successors start elsewhere, if there is room.
    `process_died` reports the end of each worker. Does nothing to a machine that is lost already."""

    machine: str
    reason: str


@dataclass(frozen=True)
class Call:
    """Let a worker do this, after all earlier calls to the same process. The answer is `answered` or `refused`."""

    worker: int
    incarnation: int
    number: int
    command: CallCommand


@dataclass(frozen=True)
class TellAll:
    """Tell each worker to stop, or to cancel, until it has confirmed. This includes workers that start later."""

    command: Stop | Cancel


@dataclass(frozen=True)
class SaveManifest:
    """Write the manifest. The answer is `saved`, `not_saved` when it is certainly not there, or `fail` when the store
    fails for good."""

    manifest: Manifest


@dataclass(frozen=True)
class FindOlder:
    """Find the newest undamaged epoch before this one, which cannot be read. The answer is `found_older`, or `fail`
    when none can be found."""

    epoch: int
    reason: str


@dataclass(frozen=True)
class MakeRoom:
    """Delete files that no epoch needs any more, because a task could not write to the store."""


@dataclass(frozen=True)
class UndoSinkRecords:
    """Drop the records that these tasks, which are built again, have sent for epochs that are not complete. Drop also
    everything from tasks that are not among `there`."""

    tasks: frozenset[int]
    generation: int
    there: frozenset[int]


@dataclass(frozen=True)
class CommitSinkRecords:
    """Commit the records that sinks have sent for this epoch, and for earlier ones."""

    epoch: int


@dataclass(frozen=True)
class CopySavepoint:
    """Copy the last complete epoch to this place, for a request of a driver. The carrier itself replies."""

    request: int
    place: str
    plan: Plan


@dataclass(frozen=True)
class CopySavepointAndStop:
    """Copy the last complete epoch to this place, because the job is to end there. The answer is `copied` or
    `not_copied`, with the same generation."""

    generation: int
    place: str
    plan: Plan


@dataclass(frozen=True)
class Reply:
    """Tell a driver that its request was carried out, or why it could not be."""

    request: int
    error: Exception | None = None


@dataclass(frozen=True)
class StartRelay:
    """Start a relay on this node. The answer is `relay_ready` or `relay_died`."""

    number: int
    node_id: str


@dataclass(frozen=True)
class KillRelay:
    """End a relay that is needed no more. No answer is expected."""

    number: int


@dataclass(frozen=True)
class EndJob:
    """End all processes, because the job is over. No more commands follow."""

    end: JobEnd


HostCommand = (
    StartProcess
    | KillProcess
    | GiveUpMachine
    | Call
    | TellAll
    | SaveManifest
    | FindOlder
    | MakeRoom
    | UndoSinkRecords
    | CommitSinkRecords
    | CopySavepoint
    | CopySavepointAndStop
    | Reply
    | StartRelay
    | KillRelay
    | TellRelay
    | SparkCommand
    | EndJob
)
