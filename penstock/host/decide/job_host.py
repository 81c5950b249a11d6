"""The JobHost decides everything about a running job. A carrier (the JobMaster, the runner of local processes, a
simulated cluster in tests) tells it what has happened, and carries out the commands that it returns.

The JobHost contains the coordinator of the job's epochs, and makes all decisions around it: which process of a worker
is the present one, when a process is started, what each worker is told and what its answer means, when tasks are built
and where they run, what is done about the requests of drivers, and how the job ends. In a job that uses Spark it
contains the paradigm scheduler too, so that switches, deaths and changes of the plan have one order.

It is a state machine without threads, clock, files, sockets and Ray. Each event is a method, which gets the time if it
matters, and returns a list of commands. One thread calls it. It must never wait, and must never ask anybody anything
except by a command.

Invariants:

- A message of an earlier process of a worker has no effect (`WorkerLives`).
- No task is built, and no process is started, before all running workers have answered the last `RemoveTasks`. Only
  then are all records of the removed tasks sent or dropped, and the new addresses of rings known.
- Silence is never taken for an answer: a call without an answer stays open until the process has died.
- The plan and the placement change in one place each (`_adopt`, `_now_placed`), and every component that keeps
  something computed from them is told there.
- A fault of the paradigm scheduler never ends the job, which can do without Spark.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from penstock.bridge import commands as spark
from penstock.host.decide.broken_links import BrokenLinks, Pair, Station, all_pairs, pairs_of
from penstock.host.decide.commands import (
    Call,
    CommitSinkRecords,
    CopySavepoint,
    CopySavepointAndStop,
    EndJob,
    FindOlder,
    GiveUpMachine,
    HostCommand,
    JobEnd,
    KillProcess,
    MakeRoom,
    Reply,
    SaveManifest,
    StartProcess,
    TellAll,
    UndoSinkRecords,
)
from penstock.host.decide.driver_requests import (
    DriverRequests,
    MigrateRequest,
    RescaleRequest,
    SavepointRequest,
    StopRequest,
)
from penstock.host.decide.job_state import JobLife, JobState
from penstock.host.decide.process_commands import (
    Build,
    CallCommand,
    Cancel,
    ExpectRelay,
    Remove,
    Removed,
    Stop,
    UseRelays,
)
from penstock.host.decide.relay_keeper import Member, RelayCommand, RelayKeeper, homes
from penstock.host.decide.status import StatusBuilder
from penstock.host.decide.worker_lives import WorkerLives
from penstock.runtime.epochs import coordinator as protocol
from penstock.runtime.epochs.coordinator import Coordinator, EpochOptions
from penstock.runtime.epochs.manifest import Blob, Manifest
from penstock.runtime.epochs.participant import Declined, EpochReport, NoLongerQuiet
from penstock.runtime.epochs.restore import same_tasks
from penstock.runtime.errors import JobError, PenstockError, SnapshotDamaged, StoreError
from penstock.runtime.operators.resources import told_needs
from penstock.runtime.program.bound_tasks import check_reserved
from penstock.runtime.program.mixing import mixing, mixing_words
from penstock.runtime.program.plan import Plan, fused_by_key, replanned, rescaled
from penstock.runtime.status import DualStatus, EpochsStatus, JobStatus
from penstock.runtime.transport.base import PeerGone, SilentLink
from penstock.runtime.worker.blackbox import Crash, Note, Suspects
from penstock.runtime.worker.run_loop import LoopEnded

if TYPE_CHECKING:
    from penstock.bridge.paradigm_scheduler import ParadigmScheduler  # loads Arrow
    from penstock.bridge.spark_life import RangeTrial, SparkFacts
    from penstock.host.decide.placing import Placing
    from penstock.runtime.epochs.store import Store
    from penstock.runtime.program.flow import Flow
    from penstock.runtime.worker.load import TaskLoad

logger = logging.getLogger(__name__)

# A neighbour often notices a death first. So the failures of the next moment, which may have the cause, are waited for.
_CAUSE_S = 0.1
# All sources put a barrier into their streams at the same instant, this long after the epoch was decided, so that every
# worker has the command by then. A task that has one barrier and waits for another one holds up records meanwhile.
_TRIGGER_AHEAD_S = 0.01
# Said of a death of which nobody can tell how it came about.
_NOT_KNOWN = (
    "the agent of its node cannot say how: the machine was busy or cut off, or the agent itself has ended the process, "
    "because it had heard nothing of the JobMaster"
)
# The number of events in the story of a job, for errors and tests.
_STORY_MAX = 100


@dataclass(frozen=True)
class HostOptions:
    """The options of `run()` that concern a JobHost. Times are in seconds."""

    workers: int
    epochs: EpochOptions
    has_store: bool
    attempts: int = 3  # how many deaths a record may cause in its worker
    hang_timeout_s: float = 60.0
    flow: Flow | None = None  # the flow of a job with epochs, so that it can be planned again
    relays: bool = False  # whether workers may be on several machines, so that relays can be of use
    node_timeout_s: float = 5.0  # the silence after which a machine, or a link between machines, is given up
    ports: tuple[int, int] = (0, 0)  # the first and the last at which the processes listen; 0: any
    machine: str = ""  # the machine of the JobMaster
    again: bool = False  # whether the job runs on after the death of its JobMaster


@dataclass(frozen=True)
class Found:
    """The start of a job: an epoch, the store of this epoch if it is not the job's own, and the largest number of an
    epoch that was ever begun."""

    manifest: Manifest | None = None
    origin: Store | None = None
    begun: int = 0


class JobHost:
    """See the module's docstring."""

    def __init__(
        self,
        plan: Plan,
        options: HostOptions,
        placing: Placing,
        found: Found | None = None,
        *,
        earlier: int = 0,
        schedule: Callable[[Plan], ParadigmScheduler] | None = None,
        decided: Callable[[protocol.Command], None] | None = None,
    ) -> None:
        """`earlier`: a number that no generation and no incarnation of the job's earlier processes exceeds. `schedule`
        makes the paradigm scheduler of a job that uses Spark. `decided` is called with each command of the coordinator,
        for tests."""
        found = found or Found()
        self._options = options
        self._placing = placing
        self._decided = decided
        self.plan = plan
        self.parallelism: dict[str, int] = {}  # the parallelism of operators that were rescaled
        manifest = found.manifest
        # Whoever starts a job from a savepoint gives it a program, and what this program says holds, not what another
        # job was once asked for.
        if manifest is not None and found.origin is None:
            for operator, parallelism in json.loads(str(manifest.extra.get("parallelism", "{}"))).items():
                self.parallelism[operator] = parallelism
                self.plan = self._rescaled(operator, parallelism)
        self.placed = placing.first(self.plan)
        changed = manifest is not None and (found.origin is not None or not same_tasks(self.plan, manifest.tasks))
        self.coordinator = Coordinator(
            self.plan, self.placed, options.workers, options.epochs, manifest, origin=found.origin, changed=changed
        )
        self.coordinator.begun = max(self.coordinator.begun, found.begun)
        self.coordinator.generation = max(self.coordinator.generation, earlier)
        self.lives = WorkerLives(options.workers, earlier)
        if manifest is not None and "ring_bytes" in manifest.extra:
            for worker in range(options.workers):
                self.lives.ring_has_grown(worker, int(manifest.extra["ring_bytes"]))
        self.suspects = Suspects(options.attempts)
        self.status = StatusBuilder(self.plan)
        self.status.place(self.placed, [])
        self._relays = RelayKeeper(plan.name, earlier) if options.relays else None
        self._scheduler = None if schedule is None else schedule(self.plan)
        self._paradigms = DualStatus() if self._scheduler is None else self._scheduler.status()  # as of its last event
        self._links = BrokenLinks(options.node_timeout_s, options.hang_timeout_s, options.machine, options.ports)
        self.life = JobLife(f"job {plan.name!r}")
        self.end: JobEnd | None = None
        self._state_before_end = self.life.state
        self._store_trouble: str | None = None
        self._cancelled = False
        self._requests = DriverRequests()
        #: What placement has found last, and for which plan and places; None when this is done, or cannot be.
        self._better: tuple[Plan, dict[int, int], dict[int, int]] | None = None
        self._move_after = 0.0  # the first migration is not tried again before this time
        self._completed_at: float | None = None
        self._failures: list[JobEnd] = []  # what ends the job
        self._failed_at = 0.0  # when the first failure was noticed
        # Calls to workers, by number, that have no answer yet: the worker, and what the answer means.
        self._number = 0
        self._calls: dict[int, tuple[int, _Handler]] = {}
        # What waits for the answers to the last removal of tasks, and the workers that have not answered it.
        self._removing: set[int] = set()
        self._removal: object = None  # identifies the last removal of tasks
        # The barrier that waits until all workers know which tasks stop after it.
        self._parking: protocol.Trigger | None = None
        self._starts: list[tuple[float, int]] = []  # when, and which worker's process
        self._building: tuple[float, protocol.BuildTasks] | None = None  # the tasks to be built, and when
        self._story: deque[tuple[float, object]] = deque(maxlen=_STORY_MAX)
        self._out: list[HostCommand] = []

    # --- the job's life --------------------------------------------------------------------------------------

    def start(self, now: float) -> list[HostCommand]:
        """Begins the job."""
        self._obey(self.coordinator.start(), now)
        return self._settled(now)

    def tick(self, now: float) -> list[HostCommand]:
        """Notes the time. It must be called at the time of `due`; calling it earlier does no harm."""
        self._obey(self.coordinator.tick(now), now)
        if self._relays is not None:
            self._keep_relays(self._relays.tick(now))
        self._look_at_links(now)
        return self._settled(now)

    def due(self) -> float | None:
        """Returns when `tick` must be called, or None when this depends on the next event."""
        if self.end is not None:
            return None
        times = [self.coordinator.due(), self._links.due()]
        if self._relays is not None:
            times.append(self._relays.due())
        if not self._removing:
            times += [at for at, _ in self._starts]
            if self._building is not None:
                times.append(self._building[0])
        if self._failures:
            times.append(self._failed_at + _CAUSE_S)
        asked = self._requests.migrations or self._requests.stops
        if asked and self.coordinator.state == "RUNNING" and not self.coordinator.migrating:
            times.append(self._move_after)
        return min((at for at in times if at is not None), default=None)

    def stop(self, now: float) -> list[HostCommand]:
        """Ends the sources. The job finishes when everything that they have read is processed."""
        if not self.life.stopping and self.life.stop():
            self._out.append(TellAll(Stop()))
        return self._settled(now)

    def cancel(self, now: float) -> list[HostCommand]:
        """Ends the job at once."""
        if self.end is None and not self._cancelled:
            self._cancelled = True
            self._out.append(TellAll(Cancel(self.coordinator.epoch)))
        return self._settled(now)

    def fail(self, end: JobEnd, now: float) -> list[HostCommand]:
        """Ends the job, because of an error that the carrier has met."""
        self._fail(end, now)
        return self._settled(now)

    @property
    def running(self) -> set[int]:
        """The workers whose run loop has not ended."""
        return self.lives.running

    # --- processes of workers --------------------------------------------------------------------------------

    def process_ready(self, worker: int, incarnation: int, info: dict[str, Any], now: float) -> list[HostCommand]:
        """Notes that a worker's process has loaded the plan, and that its run loop begins. `info` is what the process
        has said of itself."""
        self._note(now, f"process {incarnation} of worker {worker} is ready")
        self.lives.ready(worker, incarnation, info)
        if self.end is None:
            self._obey(self.coordinator.started(worker), now)
        return self._settled(now)

    def process_not_started(
        self,
        worker: int,
        incarnation: int,
        reason: str,
        now: float,
        *,
        kind: Literal["resources", "program", "died"] = "died",
        operator: str | None = None,
    ) -> list[HostCommand]:
        """Notes that a worker's process could not be started. `kind` is "resources" when there is, and will be, no room
        for it, "program" when it could not load the job's program (with the operator, if known), and "died"
        otherwise."""
        self._note(now, f"process {incarnation} of worker {worker} could not be started: {reason}")
        self.lives.not_started(worker, incarnation)
        first = self.life.state == JobState.STARTING
        again = "" if first else f"worker {worker} could not be started again: "
        if kind == "resources":
            self._fail(JobEnd("FAILED", again + reason, kind="resources"), now)
        elif kind == "program" and first:
            self._fail(JobEnd("FAILED", reason, operator), now)
        elif self.end is None:
            text = again + reason if again else f"worker {worker} died while the job started: {reason}"
            logger.warning("job %s: %s", self.plan.name, text)
            self._lost(worker, text, now, "while it started and loaded the job's program")
        return self._settled(now)

    def run_ended(
        self,
        worker: int,
        incarnation: int,
        error: str | None,
        operator: str | None,
        now: float,
        *,
        status: dict[str, Any] | None = None,
    ) -> list[HostCommand]:
        """Notes that a worker's run loop has ended by itself. `error` says why if it has failed, with the operator.
        `status`: the worker's last one. Nothing more is expected of the process, and its death means nothing."""
        if not self._is_present(worker, incarnation, "end of its run", now):
            return self._settled(now)
        if status is not None:
            self.status.take(status)
        self._over(worker, now)
        if error is not None:
            self._fail(JobEnd("FAILED", error, operator), now)
        return self._settled(now)

    def process_died(
        self,
        worker: int,
        incarnation: int,
        reason: str,
        note: Note | None,
        crash: Crash | None,
        now: float,
        *,
        with_node: bool = False,
        known: bool = True,
        doing: str = "",
    ) -> list[HostCommand]:
        """Notes that a worker's process has died. `note` says what it was doing, and `crash` how it ended if it
        crashed; without `known`, nobody can say. `with_node`: its node is lost, whatever the process does. `doing`:
        what it was doing beside records, as words that follow "died"."""
        if not self._is_present(worker, incarnation, "death", now):
            return self._settled(now)
        hung, as_crash = self.lives.hung(worker, incarnation)
        pid = self.lives.pid(worker)
        if self.end is None and self.coordinator.state != "ENDED":
            crash = crash or as_crash
            self.suspects.died(note, crash)
            during = f" {doing}" if doing else ""
            text = f"worker {worker} (process {pid}) {'is lost' if with_node else 'died'}{during}: {reason.rstrip('.')}"
            if hung:
                text = (
                    f"worker {worker} (process {pid}) did not answer for hang_timeout_s="
                    f"{self._options.hang_timeout_s:g} seconds, as it was stopped or native code kept its interpreter, "
                    f"and was killed{during}"
                )
            if note is not None and note.task in self.plan.by_number:
                text += f"; it was running {self.plan.task_name(self.plan.by_number[note.task])}"
            # A carrier guesses at reasons, and only this distinguishes a crash from a kill.
            if not hung and not with_node:
                killed = "killed from outside, or for want of memory" if known else _NOT_KNOWN
                text += f"; its own doing: {crash.what}" if crash else f"; {killed}"
            stack = f"\n{crash.stack}" if crash is not None and crash.stack else ""
            logger.warning("job %s: %s%s", self.plan.name, text, stack)
            # The loss comes first: whatever waits for this worker's answer must not continue as if it had answered.
            self._over(worker, now, then=lambda: self._lost(worker, text, now, doing))
        else:
            self._over(worker, now)
        return self._settled(now)

    def process_hangs(self, worker: int, incarnation: int, stopped: bool, now: float) -> list[HostCommand]:
        """Notes that a worker's process has not answered for the limit. `stopped`: somebody has stopped the process."""
        if self._is_present(worker, incarnation, "silence", now):
            pid = self.lives.pid(worker)
            logger.warning(
                "job %s: worker %d (process %d) has not answered for %g s, and is killed",
                self.plan.name,
                worker,
                pid,
                self._options.hang_timeout_s,
            )
            crash = None if stopped else Crash("it hung in native code and was killed", True)
            self.lives.hangs(worker, incarnation, crash)
            self._out.append(KillProcess(worker, incarnation))
        return self._settled(now)

    def _is_present(self, worker: int, incarnation: int, what: str, now: float) -> bool:
        if self.lives.present(worker, incarnation):
            return True
        self._note(now, f"passed over: {what} of process {incarnation} of worker {worker}, which is an earlier one")
        return False

    def _over(self, worker: int, now: float, then: Callable[[], None] = lambda: None) -> None:
        """Notes that the worker's present process does nothing more. `then` is called before anything that waited for
        its answers."""
        self.lives.over(worker)
        self._links.over(worker)
        gone = [handler for of, handler in self._calls.values() if of == worker]
        self._calls = {number: call for number, call in self._calls.items() if call[0] != worker}
        for handler in gone:
            handler.gone(now)
        then()
        self._removing.discard(worker)
        if self._relays is not None:
            self._keep_relays(self._relays.worker_lost(worker, now))

    def _lost(self, worker: int, reason: str, now: float, doing: str) -> None:
        self._obey(self.coordinator.worker_lost(worker, now, reason, doing), now)

    # --- what workers say ------------------------------------------------------------------------------------

    def said(self, worker: int, incarnation: int, what: EpochReport, now: float) -> list[HostCommand]:
        """Takes a report of a worker's participant about the epochs of its tasks."""
        if self.end is not None or not self._is_present(worker, incarnation, type(what).__name__, now):
            return self._settled(now)
        coordinator = self.coordinator
        if isinstance(what, Declined):
            if what.may_pass and self._options.has_store:
                self._out.append(MakeRoom())
            self._obey(coordinator.declined(what.task, what.generation, what.epoch, what.reason), now)
        elif isinstance(what, NoLongerQuiet):
            coordinator.no_longer_quiet(what.task, what.generation)
        else:
            self._obey(
                coordinator.acknowledged(
                    what.task,
                    what.generation,
                    what.epoch,
                    finished=what.finished,
                    whole=what.whole,
                    blob=what.blob,
                    quiet=what.quiet,
                    parked=what.parked,
                    uncommitted=what.uncommitted,
                ),
                now,
            )
        return self._settled(now)

    def links_said(self, worker: int, incarnation: int, links: Collection[SilentLink], now: float) -> list[HostCommand]:
        """Takes which peers do not answer a worker; all others do."""
        if self.end is None and self._is_present(worker, incarnation, "word of links", now):
            stations = {
                info["index"]: Station(info["machine"], info["name"], info["host"], info["address"])
                for info in self.lives.infos()
                if info["index"] in self.running
            }
            self._links.said(worker, links, stations, now)
        return self._settled(now)

    def _look_at_links(self, now: float) -> None:
        """Gives up machines to which a link that the job needs stays silent, or lets the job fail."""
        due = self._links.due()
        if due is None or now < due or self.end is not None:
            return
        ran = self._options.again or self._completed_at is not None
        found = self._links.look(self._needed_links(), now, runs=ran)
        if isinstance(found, str):
            self._fail(JobEnd("FAILED", found), now)
            return
        for one in found:
            logger.warning("job %s: %s", self.plan.name, one.reason)
            self._note(now, one)
            self._out.append(GiveUpMachine(one.machine, one.reason))

    def _needed_links(self) -> set[Pair]:
        """Returns the machines between whose processes something goes, or may have to go."""
        machines = {info["index"]: info["machine"] for info in self.lives.infos() if info["index"] in self.running}
        if not self._options.has_store:  # at their end, the workers wait until all others have heard of it
            return all_pairs(machines.values())
        if self.coordinator.state in ("FINISHING", "ENDED"):
            return set()
        relays = set() if self._relays is None else self._relays.machines()
        return pairs_of(self.plan, self.placed, machines) | all_pairs(relays)

    def answered(self, worker: int, incarnation: int, number: int, answer: Any, now: float) -> list[HostCommand]:
        """Notes that a worker has carried out a Call."""
        if self._is_present(worker, incarnation, f"answer {number}", now) and number in self._calls:
            _, handler = self._calls.pop(number)
            if self.end is None:
                handler.answered(answer, now)
        return self._settled(now)

    def refused(
        self, worker: int, incarnation: int, number: int, error: PenstockError, now: float
    ) -> list[HostCommand]:
        """Notes that a worker could not carry out a Call. `error` is the worker's message, and its `error` what was
        raised."""
        if self._is_present(worker, incarnation, f"refusal {number}", now) and number in self._calls:
            _, handler = self._calls.pop(number)
            if self.end is None:
                handler.refused(error, now)
        return self._settled(now)

    def _call(self, worker: int, command: CallCommand, handler: _Handler) -> None:
        self._number += 1
        self._calls[self._number] = (worker, handler)
        self._out.append(Call(worker, self.lives.incarnation(worker), self._number, command))

    def _call_all(self, command: CallCommand, answered: Callable[[int, Any, float], None] | None = None) -> None:
        for worker in sorted(self.running):
            done = _nothing if answered is None else partial(answered, worker)
            self._call(worker, command, _Handler(done, self._refused))

    def _refused(self, error: PenstockError, now: float) -> None:
        """Handles that a worker could not carry out a command. When its run loop has ended, the outcome of its run says
        why."""
        cause = getattr(error, "error", None)
        if isinstance(cause, LoopEnded):
            return
        operator = getattr(cause, "operator", None)
        reason = str(error) if operator is None and not isinstance(cause, StoreError) else str(cause)
        self._fail(JobEnd("FAILED", reason, operator), now)

    # --- relays ----------------------------------------------------------------------------------------------

    def relay_ready(self, number: int, info: dict[str, Any], now: float) -> list[HostCommand]:
        """Notes that the process of a relay is there. `info` is what it has said of itself."""
        return self._of_relays(lambda relays: relays.relay_ready(number, info, now), now)

    def relay_knows(self, number: int, now: float) -> list[HostCommand]:
        """Notes that a relay has carried out a TellRelay."""
        return self._of_relays(lambda relays: relays.relay_knows(number, now), now)

    def relay_died(self, number: int, node: str, reason: str, now: float) -> list[HostCommand]:
        """Notes that a relay has died, or could not be started. `node`: its node's name, for people."""
        return self._of_relays(lambda relays: relays.relay_died(number, node, reason, now), now)

    def _of_relays(self, event: Callable[[RelayKeeper], list[RelayCommand]], now: float) -> list[HostCommand]:
        assert self._relays is not None
        if self.end is None:
            self._keep_relays(event(self._relays))
        return self._settled(now)

    def _place_relays(self, now: float) -> None:
        """Lets the machines have relays that are to, now that tasks are connected."""
        if self._relays is None:
            return
        lives = self.lives
        infos = {info["index"]: info for info in lives.infos()}
        machines = {worker: info["machine"] for worker, info in infos.items()}
        nodes = {info["machine"]: info["node_id"] for info in infos.values()}
        members = {
            worker: Member(lives.incarnation(worker), machines[worker], infos[worker]["address"])
            for worker in sorted(self.running)
        }
        wanted = {machine: nodes[machine] for machine in sorted(homes(self.plan, self.placed, machines))}
        self._keep_relays(self._relays.connected(members, wanted, now))

    def _keep_relays(self, commands: list[RelayCommand]) -> None:
        for command in commands:
            if isinstance(command, ExpectRelay):
                worker, relay = command.worker, command.relay
                done = partial(self._expects, worker, self.lives.incarnation(worker), relay)
                self._call(worker, command, _Handler(done, self._refused))
            elif isinstance(command, UseRelays):
                self._call(command.worker, command, _Handler(_nothing, self._refused))
            else:
                self._out.append(command)

    def _expects(self, worker: int, life: int, relay: int, place: str, now: float) -> None:
        assert self._relays is not None
        self._keep_relays(self._relays.worker_expects(worker, life, relay, place, now))

    # --- Spark -----------------------------------------------------------------------------------------------

    def looked(self, asked_s: float, loads: Mapping[int, Sequence[TaskLoad]], now: float) -> list[HostCommand]:
        """Takes the load of the workers that were asked for it at `asked_s` and have answered."""
        return self._of_scheduler(lambda scheduler: scheduler.looked(now, asked_s, loads), now)

    def spark_ready(self, life: int, facts: SparkFacts, now: float) -> list[HostCommand]:
        """Notes that Spark was started, and that the ranges were tried in it."""
        return self._of_scheduler(lambda scheduler: scheduler.spark_ready(now, life, facts), now)

    def spark_failed(self, life: int, why: str, now: float) -> list[HostCommand]:
        """Notes that Spark could not be started, does not work, or has died."""
        return self._of_scheduler(lambda scheduler: scheduler.spark_failed(now, life, why), now)

    def spark_answered(self, life: int, now: float) -> list[HostCommand]:
        """Notes that Spark has answered that it lives."""
        return self._of_scheduler(lambda scheduler: scheduler.spark_answered(life), now)

    def range_tried(self, life: int, chain: int, trial: RangeTrial, now: float) -> list[HostCommand]:
        """Takes the outcome of the trial of a range in Spark."""
        return self._of_scheduler(lambda scheduler: scheduler.range_tried(now, life, chain, trial), now)

    def trial_failed(self, life: int, chain: int, why: str, now: float) -> list[HostCommand]:
        """Notes that nothing came of the trial of a range in Spark."""
        return self._of_scheduler(lambda scheduler: scheduler.trial_failed(now, life, chain, why), now)

    def _of_scheduler(self, event: Callable[[ParadigmScheduler], list[spark.Command]], now: float) -> list[HostCommand]:
        if self.end is None:
            self._schedule(event, now)
        return self._settled(now)

    def _schedule(self, event: Callable[[ParadigmScheduler], list[spark.Command]], now: float) -> None:
        """Gives the paradigm scheduler an event, if there is one, and passes on its commands."""
        if self._scheduler is None:
            return
        try:
            commands = event(self._scheduler)
            self._paradigms = self._scheduler.status()
        except Exception:  # a fault of ours must not end the job, which can do without Spark
            logger.exception("job %s: the paradigm scheduler has met an error; it tries again", self.plan.name)
            return
        for command in commands:
            self._note(now, command)
            if isinstance(command, spark.WorkerCommand):
                self._call_for_scheduler(command, now)
            elif isinstance(command, spark.GreetBridge):
                for worker in sorted(self.running):
                    self._call(worker, command, _Handler(_nothing, _nothing))
            elif isinstance(command, spark.Note):
                logger.info("job %s: %s", self.plan.name, command.text)
            elif isinstance(command, spark.Warn):
                logger.warning("job %s: %s", self.plan.name, command.text)
            else:
                self._out.append(command)

    def _call_for_scheduler(self, command: spark.WorkerCommand, now: float) -> None:
        """Calls a worker for the paradigm scheduler, which hears of the answer, or that there will be none."""
        worker, number = command.worker, command.number

        def answered(answer: Any, now: float) -> None:
            if isinstance(command, spark.TakeSample):
                self._schedule(lambda scheduler: scheduler.sampled(now, number, answer), now)
            else:
                self._schedule(lambda scheduler: scheduler.done(now, number), now)

        def refused(error: PenstockError, now: float) -> None:
            ended = isinstance(getattr(error, "error", None), LoopEnded)
            self._not_done(command, None if ended else f"worker {worker}: {error}", now)

        if worker in self.running:
            self._call(worker, command, _Handler(answered, refused, partial(self._not_done, command, None)))
        else:
            self._not_done(command, None, now)

    def _not_done(self, command: spark.WorkerCommand, why: str | None, now: float) -> None:
        """Tells the paradigm scheduler why a worker has refused its command; None: the process or the run loop has
        ended."""
        number = command.number
        if not isinstance(command, spark.TakeSample):
            self._schedule(lambda scheduler: scheduler.refused(now, number, why), now)
            return
        if why is not None:
            logger.info("job %s: a range cannot be tried in Spark on the records of its tasks: %s", self.plan.name, why)
        self._schedule(lambda scheduler: scheduler.not_sampled(now, number, why), now)

    # --- the store -------------------------------------------------------------------------------------------

    def store_says(self, trouble: str | None) -> list[HostCommand]:
        """Takes the reason why the store cannot be written to, or None when it can be again."""
        self._store_trouble = trouble
        return []

    def saved(self, epoch: int, now: float) -> list[HostCommand]:
        """Notes that the manifest of an epoch is written."""
        if self.end is None:
            self._obey(self.coordinator.saved(epoch), now)
        return self._settled(now)

    def not_saved(self, epoch: int, reason: str, now: float) -> list[HostCommand]:
        """Notes that the manifest of an epoch is not written, and never will be."""
        if self.end is None:
            self._obey(self.coordinator.not_saved(epoch, reason), now)
        return self._settled(now)

    def found_older(self, manifest: Manifest | None, refused: FindOlder, now: float) -> list[HostCommand]:
        """Takes the newest epoch before the refused one that can be read; None: there is none."""
        if self.end is None:
            if manifest is None:
                # From the beginning, the job would write again what its sinks have committed.
                self._fail(JobEnd("FAILED", f"{refused.reason} There is no older epoch to go back to."), now)
            else:
                self._obey(self.coordinator.rewind(manifest, now), now)
        return self._settled(now)

    def lost(self, names: frozenset[str], reason: str, now: float) -> list[HostCommand]:
        """Notes that these files are lost from the store, and that no copy can be read."""
        if self.end is None:
            self._obey(self.coordinator.lost(names, reason, now), now)
        return self._settled(now)

    def replaced(self, task: int, old: list[Blob], new: Blob, now: float) -> list[HostCommand]:
        """Notes that consecutive snapshots of a task were compacted into one."""
        self.coordinator.replace_chain(task, old, new)
        return self._settled(now)

    # --- drivers ---------------------------------------------------------------------------------------------

    def savepoint(self, request: int, place: str, now: float) -> list[HostCommand]:
        """Takes a driver's request to copy the state of all tasks to a place, which the carrier has checked."""
        if self._may_ask(request, "a savepoint"):
            self._requests.at_epoch.append(SavepointRequest(request, place))
        return self._settled(now)

    def give_up_savepoint(self, request: int) -> str | None:
        """Forgets a savepoint that still waits for its epoch, because its driver waits no longer. Returns what it has
        waited for, or None when there is no such request any more, because its epoch is being copied."""
        coordinator = self.coordinator
        for waiting in self._requests.at_epoch:
            if waiting.number == request:
                self._requests.at_epoch.remove(waiting)
                if coordinator.state in ("FINISHING", "ENDED"):
                    return "an epoch, and none follows, because the job has only to end"
                if coordinator.state != "RUNNING":
                    return f"the tasks to run, and the job is {self.life.state}"
                return f"epoch {coordinator.begun}, which {coordinator.late(coordinator.begun)}"
        return None

    def stop_with_savepoint(self, request: int, place: str, now: float) -> list[HostCommand]:
        """Takes a driver's request to end the job at an epoch that is copied to a place, which the carrier has checked.
        The reply comes with the job's end, or when the savepoint could not be written and the job continues. A driver
        may ask again for the same place."""
        if self._may_ask(request, "a savepoint"):
            others = {other.place for other in self._requests.stops} | {self.coordinator.halted_for or place}
            if self.life.stopping:
                said = "is stopping already, without a savepoint; let it finish, or cancel it"
                self._out.append(Reply(request, JobError(f"job {self.plan.name!r} {said}")))
            elif others != {place}:
                other = next(iter(others - {place}))
                said = f"is stopping already, with a savepoint in {other!r}"
                self._out.append(Reply(request, JobError(f"job {self.plan.name!r} {said}")))
            else:
                self._requests.stops.append(StopRequest(request, place))
        return self._settled(now)

    def has_stopped_with(self, place: str) -> bool:
        """Whether the job has ended well with a savepoint in this place."""
        return self.end is not None and self.end.state == "FINISHED" and self.coordinator.halted_for == place

    def copied(self, generation: int, now: float) -> list[HostCommand]:
        """Notes that the savepoint with which the job ends is written."""
        if self.end is None:
            self._obey(self.coordinator.copied(generation), now)
        return self._settled(now)

    def not_copied(self, generation: int, error: Exception, now: float) -> list[HostCommand]:
        """Notes that the savepoint with which the job was to end could not be written: the job continues."""
        if self.end is None and (commands := self.coordinator.not_copied(generation, str(error), now)):
            self._out += [Reply(request.number, error) for request in self._requests.stops]
            self._requests.stops.clear()
            logger.warning("job %s continues, because its savepoint could not be written: %s", self.plan.name, error)
            self._obey(commands, now)
            if isinstance(commands[0], protocol.Unpark):  # otherwise connecting the tasks does this
                self.life.connected()
        return self._settled(now)

    def rescale(self, request: int, operator: str, parallelism: int, now: float) -> list[HostCommand]:
        """Takes a driver's request to give an operator another number of tasks."""
        if self._may_ask(request, "rescale"):
            try:
                plan = self._rescaled(operator, parallelism)
            except PenstockError as error:
                self._out.append(Reply(request, error))
            else:
                before = mixing(self.plan)
                words = mixing_words({mark: met for mark, met in mixing(plan).items() if mark not in before})
                if words:
                    logger.warning("job %s: after rescale(%r, %d) %s", self.plan.name, operator, parallelism, words)
                self._requests.at_epoch.append(RescaleRequest(request, operator, parallelism))
        return self._settled(now)

    def migrate(self, request: int, tasks: Mapping[str, int], now: float) -> list[HostCommand]:
        """Takes a driver's request to let tasks, given by name, migrate to other workers."""
        if self._may_ask(request, "migrate"):
            numbers = {self.plan.task_name(task): task.number for task in self.plan.tasks}
            unknown = sorted(set(tasks) - set(numbers))
            beyond = [worker for worker in tasks.values() if not 0 <= worker < self._options.workers]
            if unknown:
                known = ", ".join(sorted(numbers))
                error = JobError(f"job {self.plan.name!r} has no task {unknown[0]!r}; it has: {known}")
                self._out.append(Reply(request, error))
            elif beyond:
                last = self._options.workers - 1
                self._out.append(Reply(request, JobError(f"there is no worker {beyond[0]}; the job has 0 to {last}")))
            else:
                wanted = {numbers[name]: worker for name, worker in tasks.items()}
                if stuck := self._stuck(wanted):
                    self._out.append(Reply(request, JobError(stuck)))
                else:
                    self._requests.migrations.append(MigrateRequest(request, wanted))
        return self._settled(now)

    def _stuck(self, wanted: Mapping[int, int]) -> str | None:
        """Returns why tasks cannot all run in these workers: the first of them needs resources that another worker has
        reserved for it."""
        for task, worker in self._placing.stays(self.plan).items():
            if wanted.get(task, worker) != worker:
                place = self.plan.by_number[task]
                needs = told_needs(self.plan.chains[place.chain].needs)
                return (
                    f"task {self.plan.task_name(place)!r} stays in worker {worker}, because it needs {needs}, which "
                    "only this worker has reserved for the task"
                )
        return None

    def better_placed(
        self, plan: Plan, placed: dict[int, int], wanted: dict[int, int], now: float
    ) -> list[HostCommand]:
        """Lets tasks migrate to better workers, which placement has found for this plan and these places. Does nothing
        when the plan or the placement has changed meanwhile, or when a driver has asked for a migration. While an epoch
        is being saved, the tasks wait for its end."""
        self._better = plan, placed, wanted
        return self._settled(now)

    def _serve_better(self, now: float) -> None:
        """Lets tasks migrate as placement wants, if this is possible now."""
        assert self._better is not None
        plan, placed, wanted = self._better
        coordinator = self.coordinator
        changed = self.plan is not plan or self.placed != placed or self._requests.migrations
        if not changed and coordinator.state == "RUNNING" and not coordinator.migrating:
            self._obey(coordinator.migrate(wanted, now), now)
        if changed or coordinator.state != "RUNNING" or coordinator.migrating:
            self._better = None

    def _may_ask(self, request: int, what: str) -> bool:
        if self.end is not None:
            self._out.append(Reply(request, JobError(self.end.words(self.plan.name))))
            return False
        if not self._options.has_store:
            needs = (
                f"{what} needs epochs, and job {self.plan.name!r} runs without; run it with epochs "
                "(epoch_interval_s=1, or --epoch-interval 1 on the command line)"
            )
            self._out.append(Reply(request, JobError(needs)))
            return False
        return True

    def _serve_requests(self, now: float) -> None:
        """Carries out requests of drivers, and steps that have waited for an epoch."""
        coordinator = self.coordinator
        for request in list(self._requests.at_epoch):
            if coordinator.state != "RUNNING":
                break
            if request.epoch is None:
                begun = coordinator.begin(now)
                request.epoch = coordinator.begun
                self._obey(begun, now)
            elif coordinator.epoch >= request.epoch:
                if isinstance(request, SavepointRequest):
                    self._requests.at_epoch.remove(request)
                    self._out.append(CopySavepoint(request.number, request.place, self.plan))
                else:
                    self._replan(request, now)

    def _rescaled(self, operator: str, parallelism: int) -> Plan:
        """Returns the plan with another number of tasks for an operator."""
        self.plan.chain_of(operator)
        if parallelism > 1 and fused_by_key(self.plan, operator):
            flow = self._options.flow
            assert flow is not None
            plan = replanned(flow.graph, self.plan, operator, parallelism, flow.chaining)
        else:
            plan = rescaled(self.plan, operator, parallelism)
        if self._placing.stays(self.plan):
            check_reserved(self.plan, plan, operator)
        return plan

    def _replan(self, request: RescaleRequest, now: float) -> None:
        """Carries out a rescale, because the epoch that it has waited for is complete."""
        try:
            plan = self._rescaled(request.operator, request.parallelism)
        except PenstockError as error:
            self._requests.at_epoch.remove(request)
            self._out.append(Reply(request.number, error))
            return
        if plan is self.plan:
            self._requests.at_epoch.remove(request)
            self._out.append(Reply(request.number))
            return
        placed = self._placing.grown(plan, self.placed)
        commands = self.coordinator.replan(plan, placed)
        if not commands:  # this epoch could not be used
            request.epoch = None
            return
        self._requests.at_epoch.remove(request)
        self._requests.rescaling.append(request.number)
        self.parallelism[request.operator] = request.parallelism
        self._adopt(plan, placed, now)
        self._obey(commands, now)

    def _adopt(self, plan: Plan, placed: dict[int, int], now: float) -> None:
        """Continues with another plan. Everything that was known of tasks by their numbers is forgotten."""
        self.plan, self.placed = plan, placed
        self.suspects.forget()
        self._placing.forget()
        self.status = self.status.of(plan)
        self._schedule(lambda scheduler: scheduler.plan_changed(plan), now)

    def _serve_migrations(self, now: float) -> None:
        """Start the first requested migration. Called after every event until it has been carried out."""
        coordinator = self.coordinator
        if coordinator.state != "RUNNING" or coordinator.migrating:
            return
        request = self._requests.migrations[0]
        finished = coordinator.finished()
        moves = {
            task: worker
            for task, worker in request.wanted.items()
            if task not in finished and self.placed.get(task, worker) != worker
        }
        if not moves:
            self._requests.migrations.popleft()
            ended = [
                self.plan.task_name(self.plan.by_number[task]) for task in sorted(request.wanted.keys() & finished)
            ]
            error = JobError(f"tasks that have ended cannot migrate: {', '.join(ended)}") if ended else None
            self._out.append(Reply(request.number, error))
            return
        if now < self._move_after:
            return
        self._move_after = now + (self._options.epochs.interval_s or 0.0)  # a store that is gone refuses each epoch
        self._obey(coordinator.migrate({**self.placed, **moves}, now), now)

    def _serve_stop(self, now: float) -> None:
        """Lets the job stop with a savepoint. Called after every event until it has."""
        coordinator = self.coordinator
        if coordinator.state == "RUNNING" and not coordinator.migrating and now >= self._move_after:
            self._move_after = now + (self._options.epochs.interval_s or 0.0)  # as of migrations
            self._obey(coordinator.stop(self._requests.stops[0].place, now), now)

    # --- what the coordinator commands -----------------------------------------------------------------------

    def _obey(self, commands: list[protocol.Command], now: float) -> None:
        for command in commands:
            self._note(now, command)
            if self._decided is not None:
                self._decided(command)
            if isinstance(command, protocol.Start):
                self._starts.append((now + command.after_s, command.worker))
            elif isinstance(command, protocol.RemoveTasks):
                self._remove_tasks(command)
            elif isinstance(command, protocol.BuildTasks):
                if command.change is not None and command.change.placed != self.placed:
                    self._now_placed(command.change.placed)
                self._building = (now + command.after_s, command)
            elif isinstance(command, protocol.Save):
                extra = command.manifest.extra
                extra["parallelism"] = json.dumps(self.parallelism)
                if known := self._placing.known():
                    extra["load"] = known
                if self.lives.largest_ring:
                    extra["ring_bytes"] = self.lives.largest_ring
                self._out.append(SaveManifest(command.manifest))
            elif isinstance(command, protocol.FallBack):
                logger.warning(
                    "job %s falls back to an epoch before epoch %d: %s", self.plan.name, command.epoch, command.reason
                )
                self._out.append(FindOlder(command.epoch, command.reason))
            elif isinstance(command, protocol.Fail):
                self._fail(JobEnd("FAILED", command.reason), now)
            elif isinstance(command, protocol.Trigger):
                self._begin_barrier(now)
                self._parking = command
                if command.parking:
                    self._park(command)
                else:
                    self._begin_barrier(now)
            elif isinstance(command, protocol.Unpark | protocol.SaveWholeState):
                self._call_all(command)
            elif isinstance(command, protocol.ConnectTasks):
                self._connect_tasks(command, now)
            elif isinstance(command, protocol.Complete):
                self._complete(command, now)
                if self.coordinator.halted_for is not None and self.life.state is not JobState.STOPPING:
                    self.life.halted()
            elif isinstance(command, protocol.CopySavepointAndStop):
                if self.life.state is not JobState.STOPPING:
                    self.life.halted()
                self._out.append(CopySavepointAndStop(command.generation, command.place, self.plan))
            else:
                assert isinstance(command, protocol.End)
                self._call_all(command, self._says_last)

    def _says_last(self, worker: int, status: dict[str, Any] | None, now: float) -> None:
        """Takes the last counters of a worker whose run is about to end."""
        if status is not None:
            self.status.take(status)

    def _park(self, command: protocol.Trigger) -> None:
        """Lets tasks stop after the barrier of an epoch, and begins it when all workers know: no task may take the
        barrier before it knows. When a worker dies meanwhile, the epoch begins all the same, because the coordinator
        has begun it; that is before any task is built again, as all workers must have answered by then."""
        waiting = set(self.running)

        def knows(worker: int, now: float) -> None:
            waiting.discard(worker)
            if not waiting and self._parking is command:
                self._begin_barrier(now)

        def refused(worker: int, error: PenstockError, now: float) -> None:
            self._refused(error, now)
            knows(worker, now)

        for worker in sorted(waiting):
            done = _Handler(
                lambda answer, now, worker=worker: knows(worker, now),  # type: ignore[misc]
                partial(refused, worker),
                partial(knows, worker),
            )
            self._call(worker, protocol.Park(command.epoch, command.parking), done)

    def _begin_barrier(self, now: float) -> None:
        """Begins the barrier of the epoch that was to begin next, because the barriers of epochs keep their order."""
        trigger, self._parking = self._parking, None
        if trigger is not None:
            self._call_all(replace(trigger, begin_ns=int((now + _TRIGGER_AHEAD_S) * 1e9)))

    def _remove_tasks(self, command: protocol.RemoveTasks) -> None:
        self.life.removed(planned=command.planned)
        self._building = None  # the tasks of an earlier command are removed too, and a later command builds them
        self._removing = set(self.running)

        def answered(worker: int, answer: Removed, now: float) -> None:
            self.lives.ring_has_changed(worker, answer.address)
            for dead, size in answer.rings.items():
                self.lives.ring_has_grown(dead, size)
            if removal is self._removal:
                self._removing.discard(worker)

        removal = self._removal = object()
        dead = [worker for worker in range(self._options.workers) if worker not in self.running]
        self._call_all(Remove(command, dead), answered)

    def _build_tasks(self, command: protocol.BuildTasks) -> None:
        self._out.append(UndoSinkRecords(command.tasks, command.generation, frozenset(self.plan.by_number)))
        modes = {task: how for task, how in self.suspects.modes().items() if task in command.tasks}
        for task, how in modes.items():
            logger.warning(
                "job %s: task %s was running at two deaths, so until %s epochs have completed it takes its records one "
                "by one, to find a record that kills; meanwhile it is slower, and a map_async in it makes one call at "
                "a time",
                self.plan.name,
                self.plan.task_name(self.plan.by_number[task]),
                f"{how.epochs:,}",
            )
        addresses = self.lives.addresses()
        for worker in sorted(self.running):

            def answered(_: Any, now: float, worker: int = worker) -> None:
                self._obey(self.coordinator.built(worker, command.generation, now), now)

            def refused(error: PenstockError, now: float, worker: int = worker) -> None:
                why = why_not_built(worker, getattr(error, "error", None))
                if why is None:
                    self._refused(error, now)
                    return
                reason, damaged = why
                self._obey(self.coordinator.not_built(worker, command.generation, reason, damaged, now), now)

            self._call(worker, Build(command, addresses, modes), _Handler(answered, refused))

    def _connect_tasks(self, command: protocol.ConnectTasks, now: float) -> None:
        self._call_all(command)
        if self.life.connected():
            self.status.running()
        self._out += [Reply(request) for request in self._requests.rescaling]
        self._requests.rescaling.clear()
        self._place_relays(now)

    def _complete(self, command: protocol.Complete, now: float) -> None:
        self._out.append(CommitSinkRecords(command.epoch))
        self.suspects.completed()
        self._completed_at = now

        def answered(worker: int, ring_bytes: int, now: float) -> None:
            self.lives.ring_has_grown(worker, ring_bytes)
            if command.final:
                self._obey(self.coordinator.committed(worker, command.epoch), now)

        self._call_all(command, answered)

    def _now_placed(self, placed: dict[int, int]) -> None:
        before, self.placed = self.placed, dict(placed)
        moves = sum(before.get(task, worker) != worker for task, worker in placed.items())
        if moves:
            self._placing.moved(moves)
            logger.info("job %s: %d tasks migrate to other workers", self.plan.name, moves)

    # --- after each event ------------------------------------------------------------------------------------

    def _settled(self, now: float) -> list[HostCommand]:
        """Takes the steps that are possible now, and returns all commands since the last event."""
        if self.end is None:
            if not self._failures and not self._cancelled:
                self._release(now)
                if self._requests.at_epoch:
                    self._serve_requests(now)
                if self._requests.migrations:
                    self._serve_migrations(now)
                if self._requests.stops:
                    self._serve_stop(now)
                if self._better is not None:
                    self._serve_better(now)
            self._end_if_over(now)
        out, self._out = self._out, []
        return out

    def _release(self, now: float) -> None:
        """Starts processes, and builds tasks, when nothing holds them back any more."""
        if self._removing:
            return
        due = [(at, worker) for at, worker in self._starts if at <= now]
        self._starts = [(at, worker) for at, worker in self._starts if at > now]
        for _, worker in due:
            incarnation = self.lives.starting(worker)
            ring_bytes = self.lives.ring_bytes(worker)
            self._out.append(StartProcess(worker, incarnation, ring_bytes, self.plan, self.placed))
        if self._building is not None and self._building[0] <= now:
            (_, command), self._building = self._building, None
            self._build_tasks(command)

    def _fail(self, end: JobEnd, now: float) -> None:
        if not self._failures:
            self._failed_at = now
        self._failures.append(end)

    def _end_if_over(self, now: float) -> None:
        end: JobEnd | None = None
        if self._cancelled:
            end = JobEnd("CANCELLED")
        elif self._failures:
            cause = next((end for end in self._failures if end.operator is not None), None)
            if cause is None and self.running and now < self._failed_at + _CAUSE_S:
                return
            end = cause or self._failures[0]
        elif not self.running and self.coordinator.state == ("ENDED" if self._options.has_store else "RUNNING"):
            end = JobEnd("FINISHED")
        if end is None:
            return
        self.end = end
        self._state_before_end = self.life.state
        self.life.end(end.state)
        over, over_for = JobError(end.words(self.plan.name)), self._requests.all()
        for stop in self._requests.stops if end.state == "FINISHED" else ():
            if stop.place == self.coordinator.halted_for:
                self._out.append(Reply(stop.number))
                over_for.remove(stop.number)
        self._out += [Reply(request, over) for request in over_for]
        self._requests.clear()
        self._out.append(EndJob(end))

    # --- what others may look at -----------------------------------------------------------------------------

    def build_status(
        self, reports: list[dict[str, Any]], silent: Mapping[int, float], wall: float, now: float
    ) -> JobStatus:
        """Returns the status of the job from the newest reports of workers. `silent` has the workers that owe an
        answer, and for how many seconds they have owed it; `wall` is the wall-clock time in seconds.

        The state, the epochs and the relays are of one instant: the number of restarts never runs ahead of the state.
        """
        # A job has ended for drivers when its carrier has ended its processes and noted its end, and not before.
        state = self.life.state if self.end is None else self._state_before_end
        self.status.place(self.placed, self.lives.infos())
        # A worker whose run has ended meanwhile has said its last counts, and owes nothing.
        reports = [report for report in reports if report["index"] in self.running]
        silent = {worker: silent_s for worker, silent_s in silent.items() if worker in self.running}
        built = self.status.build(state.value, reports, wall, silent)
        return built.changed(
            epochs=self.epochs_status(now),
            relays=[] if self._relays is None else self._relays.status(),
            links=self._links.status(now),
            dual=self._paradigms,
        )

    def epochs_status(self, now: float) -> EpochsStatus:
        """Returns the status of epochs, except for the facts that the store keeper adds."""
        coordinator = self.coordinator
        return EpochsStatus(
            complete=coordinator.epoch,
            begun=coordinator.begun,
            age_s=None if self._completed_at is None else now - self._completed_at,
            restarts=coordinator.restarts,
            last_failure=self._store_trouble or coordinator.last_failure,
        )

    def story(self) -> str:
        """Returns the last events and commands, for errors and tests."""
        return "\n".join(f"{now:.4f} {what}"[:300] for now, what in self._story)

    def _note(self, now: float, what: object) -> None:
        self._story.append((now, what))


@dataclass(frozen=True)
class _Handler:
    """The functions for the answer to a call, and for the death of the process before it answers."""

    answered: Callable[[Any, float], None]
    refused: Callable[[PenstockError, float], None]
    gone: Callable[[float], None] = lambda now: None


def _nothing(answer: Any, now: float) -> None:
    """Handles an answer from which nothing follows."""


def why_not_built(worker: int, error: Exception | None) -> tuple[str, bool] | None:
    """Returns why a worker could not build its tasks, and whether their snapshots are damaged. Returns None when trying
    again would have the same result, so that the job fails."""
    if isinstance(error, SnapshotDamaged):
        return str(error), True
    if isinstance(error, StoreError) and error.may_pass:
        return f"their snapshots could not be read: {error}", False
    if isinstance(error, PeerGone):
        return f"worker {worker} cannot reach another worker: {error}", False
    return None
