"""The commands to a process of a job, a worker's or a relay's: plain data, which travels to the process as it is.

The JobHost decides the first group, and each process gets it in order (`Call`). The second group are questions and
notices of whatever carries the JobHost. A worker also gets the commands of the coordinator (ParticipantCommand) and of
the paradigm scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.bridge.commands import GreetBridge, WorkerCommand
from penstock.runtime.epochs.coordinator import BuildTasks, ParticipantCommand, RemoveTasks
from penstock.runtime.relaying.relay_map import RelayMap
from penstock.runtime.worker.record_by_record import RecordByRecordMode

# --- of the JobHost ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Remove:
    """Remove tasks, and drop the rings of dead workers. The answer is a `Removed`."""

    tasks: RemoveTasks
    dead: Sequence[int]


@dataclass(frozen=True)
class Removed:
    """The address of the ring of a worker that has removed tasks, and the sizes of the rings that it has dropped."""

    address: str
    rings: Mapping[int, int]


@dataclass(frozen=True)
class Build:
    """Attach to the other workers, at these addresses, and build tasks, some of them in the mode for killing records.
    The carrier fills `ahead_ns`, see `SetClocks`."""

    tasks: BuildTasks
    addresses: Mapping[int, str]
    modes: dict[int, RecordByRecordMode]
    ahead_ns: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ExpectRelay:
    """Let a worker keep its inbox where it is, until `UseRelays` names this relay or does not. The answer is the
    address at which the relay finds the inbox."""

    worker: int
    relay: int


@dataclass(frozen=True)
class UseRelays:
    """Let a worker know these relays, and no others. No answer is expected."""

    worker: int
    relays: RelayMap


@dataclass(frozen=True)
class TellRelay:
    """Connect a relay to these workers, with the address and the process number of each, and to the other relays. A
    relay gets these commands in their order. The answer is `relay_knows`."""

    number: int
    workers: Mapping[int, tuple[str, int]]
    relays: Mapping[int, str]


# --- of its carrier ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ping:
    """Answer, which shows that the process lives."""


@dataclass(frozen=True)
class GetStatus:
    """Answer with the counters of the process."""


@dataclass(frozen=True)
class GetLoad:
    """Answer with the load of the worker's tasks."""


@dataclass(frozen=True)
class GetTraffic:
    """Answer with the TrafficReport of the worker. Its hops are measured from the first question on."""


@dataclass(frozen=True)
class GetMarks:
    """Answer with the watermarks of the worker's sources that are aligned."""


@dataclass(frozen=True)
class Align:
    """Let the worker's sources know how far all sources are."""

    least: int | None


@dataclass(frozen=True)
class SetClocks:
    """Take how far the clock of each worker's machine is ahead of the JobMaster's, in ns."""

    ahead_ns: Mapping[int, int]


@dataclass(frozen=True)
class Stop:
    """End the sources. The records that they have read are still processed."""


@dataclass(frozen=True)
class Cancel:
    """End at once. The job is cancelled after this complete epoch, and is never resumed."""

    epoch: int


@dataclass(frozen=True)
class Halt:
    """End at once. Unless the job is cancelled, a user may resume it."""


#: The commands that a worker's process gets one after the other.
CallCommand = ParticipantCommand | Remove | Build | ExpectRelay | UseRelays | WorkerCommand | GreetBridge
#: The commands that a worker's process gets beside them.
Question = Ping | GetStatus | GetLoad | GetTraffic | GetMarks | Align | SetClocks | Stop | Cancel | Halt
