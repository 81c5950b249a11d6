"""The JobHost decides everything about a running job. A carrier (the JobMaster, the runner of local processes, a
simulated cluster in tests) tells it what has happened, and carries out the commands that it returns.

The JobHost contains the coordinator of the job's epochs, and makes all decisions around it: which process of a worker
is the present one, when a process is started, what each worker is told and what its answer means, when tasks are built
and where they run, what is done about the requests of drivers, and how the job ends. In a job that uses Spark it
contains the paradigm scheduler too, so that switches, deaths and changes of the plan have one order.

It is a state machine without threads, clock, files, sockets and Ray. Each event is a method, which gets the time if it
matters, and returns a list of commands. An event that concerns one part alone comes by `of_coordinator`, `of_relays`,
`of_scheduler` or `of_requests`. One thread calls it. It must never wait, and must never ask anybody anything except by
a command.

Invariants:

- A message of an earlier process of a worker has no effect (`WorkerLives`).
- No task is built, and no process is started, before all running workers have answered the last removal
  (`Generations`).
- Silence is never taken for an answer: a call without an answer stays open until the process has died.
- The plan and the placement change in one place (`PresentPlan`), and every component that keeps something computed
  from the plan is told in `_adopt`.
- A fault of the paradigm scheduler never ends the job, which can do without Spark (`Paradigms`).
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from penstock.host.decide.barriers import Barriers
from penstock.host.decide.broken_links import BrokenLinks, Pair, Station, all_pairs, pairs_of
from penstock.host.decide.commands import (
    CommitSinkRecords,
    CopySavepointAndStop,
    EndJob,
    FindOlder,
    GiveUpMachine,
    HostCommand,
    JobEnd,
    KillProcess,
    MakeRoom,
    SaveManifest,
    TellAll,
)
from penstock.host.decide.death import Death
from penstock.host.decide.driver_requests import DriverRequests
from penstock.host.decide.generations import Generations
from penstock.host.decide.job_state import JobLife, JobState
from penstock.host.decide.paradigms import Paradigms, SparkEvent
from penstock.host.decide.present_plan import PresentPlan
from penstock.host.decide.process_commands import (
    Cancel,
    ExpectRelay,
    Stop,
    UseRelays,
)
from penstock.host.decide.relay_keeper import Member, RelayCommand, RelayKeeper, homes
from penstock.host.decide.status import StatusBuilder
from penstock.host.decide.suspects import Suspects
from penstock.host.decide.worker_calls import Handler, WorkerCalls, nothing
from penstock.host.decide.worker_lives import WorkerLives
from penstock.runtime.epochs import coordinator as protocol
from penstock.runtime.epochs.coordinator import Coordinator, EpochOptions
from penstock.runtime.epochs.manifest import Manifest
from penstock.runtime.epochs.participant import Declined, EpochReport, NoLongerQuiet
from penstock.runtime.epochs.restore import same_tasks
from penstock.runtime.errors import PenstockError, StoreError
from penstock.runtime.program.plan import Plan
from penstock.runtime.status import DualStatus, EpochsStatus, JobStatus
from penstock.runtime.transport.base import SilentLink
from penstock.runtime.worker.blackbox import Crash
from penstock.runtime.worker.run_loop import LoopEnded

if TYPE_CHECKING:
    from penstock.bridge.paradigm_scheduler import ParadigmScheduler  # loads Arrow
    from penstock.host.decide.placing import Placing
    from penstock.runtime.epochs.store import Store
    from penstock.runtime.program.flow import Flow

logger = logging.getLogger(__name__)

# A neighbour often notices a death first. So the failures of the next moment, which may have the cause, are waited for.
_CAUSE_S = 0.1
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


#: Events of parts of the host, which get the time.
RelayEvent: TypeAlias = Callable[[RelayKeeper, float], list[RelayCommand]]
RequestEvent: TypeAlias = Callable[[DriverRequests, float], None]
CoordinatorEvent: TypeAlias = Callable[[Coordinator, float], list[protocol.Command] | None]


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
        self._decided = decided
        manifest = found.manifest
        # Whoever starts a job from a savepoint gives it a program, and what this program says holds, not what another
        # job was once asked for.
        own = manifest if found.origin is None else None
        self.present = PresentPlan(plan, placing, options.flow, own)
        plan, placed = self.present.plan, self.present.placed
        changed = manifest is not None and (found.origin is not None or not same_tasks(plan, manifest.tasks))
        self.coordinator = Coordinator(
            plan, placed, options.workers, options.epochs, manifest, origin=found.origin, changed=changed
        )
        self.coordinator.begun = max(self.coordinator.begun, found.begun)
        self.coordinator.generation = max(self.coordinator.generation, earlier)
        self.lives = WorkerLives(options.workers, earlier)
        if manifest is not None and "ring_bytes" in manifest.extra:
            for worker in range(options.workers):
                self.lives.ring_has_grown(worker, int(manifest.extra["ring_bytes"]))
        self.suspects = Suspects(options.attempts)
        self.status = StatusBuilder(plan)
        self.status.place(placed, [])
        self.life = JobLife(f"job {plan.name!r}")
        self._out: list[HostCommand] = []
        self._story: deque[tuple[float, object]] = deque(maxlen=_STORY_MAX)
        self._calls = WorkerCalls(self.lives, self._out, self._refused)
        self._barriers = Barriers(self._calls, self.lives)
        self._generations = Generations(
            self._calls, self.lives, self.life, self.present, self.suspects, self.coordinator, self._out, self._obey
        )
        self.requests = DriverRequests(
            self.coordinator,
            self.present,
            self.life,
            self._out,
            self._obey,
            self._adopt,
            workers=options.workers,
            interval_s=options.epochs.interval_s if options.has_store else None,
        )
        self._relays = RelayKeeper(plan.name, earlier) if options.relays else None
        self._paradigms: Paradigms | None = None
        if schedule is not None:
            self._paradigms = Paradigms(plan.name, schedule(plan), self._calls, self.lives, self._out, self._note)
        self._links = BrokenLinks(options.node_timeout_s, options.hang_timeout_s, options.machine, options.ports)
        self.end: JobEnd | None = None
        self._state_before_end = self.life.state
        self._store_trouble: str | None = None
        self._cancelled = False
        self._completed_at: float | None = None
        self._failures: list[JobEnd] = []  # what ends the job
        self._failed_at = 0.0  # when the first failure was noticed

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
        times = [self.coordinator.due(), self._links.due(), self.requests.due(), *self._generations.due()]
        if self._relays is not None:
            times.append(self._relays.due())
        if self._failures:
            times.append(self._failed_at + _CAUSE_S)
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
            logger.warning("job %s: %s", self.present.plan.name, text)
            doing = "while it started and loaded the job's program"
            self._obey(self.coordinator.worker_lost(worker, now, text, doing), now)
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

    def process_died(self, worker: int, incarnation: int, death: Death, now: float) -> list[HostCommand]:
        """Notes that a worker's process has died."""
        if not self._is_present(worker, incarnation, "death", now):
            return self._settled(now)
        hung, as_crash = self.lives.hung(worker, incarnation)
        if self.end is None and self.coordinator.state != "ENDED":
            plan, crash, note = self.present.plan, death.crash or as_crash, death.note
            self.suspects.died(note, crash)
            task = plan.by_number.get(note.task) if note is not None else None
            words = death.words(
                f"worker {worker} (process {self.lives.pid(worker)})",
                None if task is None else plan.task_name(task),
                self._options.hang_timeout_s if hung else None,
            )
            stack = f"\n{crash.stack}" if crash is not None and crash.stack else ""
            logger.warning("job %s: %s%s", plan.name, words, stack)
            # The loss comes first: whatever waits for this worker's answer must not continue as if it had answered.
            self._over(
                worker, now, lambda: self._obey(self.coordinator.worker_lost(worker, now, words, death.doing), now)
            )
        else:
            self._over(worker, now)
        return self._settled(now)

    def process_hangs(self, worker: int, incarnation: int, stopped: bool, now: float) -> list[HostCommand]:
        """Notes that a worker's process has not answered for the limit. `stopped`: somebody has stopped the process."""
        if self._is_present(worker, incarnation, "silence", now):
            pid = self.lives.pid(worker)
            logger.warning(
                "job %s: worker %d (process %d) has not answered for %g s, and is killed",
                self.present.plan.name,
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
        """Notes that the worker's present process does nothing more. `then` is called before tasks are built, or
        processes started, that have waited for this worker."""
        self.lives.over(worker)
        self._links.over(worker)
        self._calls.over(worker, now)
        then()
        self._generations.over(worker)
        if self._relays is not None:
            self._keep_relays(self._relays.worker_lost(worker, now))

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
                if info["index"] in self.lives.running
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
            logger.warning("job %s: %s", self.present.plan.name, one.reason)
            self._note(now, one)
            self._out.append(GiveUpMachine(one.machine, one.reason))

    def _needed_links(self) -> set[Pair]:
        """Returns the machines between whose processes something goes, or may have to go."""
        running = self.lives.running
        machines = {info["index"]: info["machine"] for info in self.lives.infos() if info["index"] in running}
        if not self._options.has_store:  # at their end, the workers wait until all others have heard of it
            return all_pairs(machines.values())
        if self.coordinator.state in ("FINISHING", "ENDED"):
            return set()
        relays = set() if self._relays is None else self._relays.machines()
        return pairs_of(self.present.plan, self.present.placed, machines) | all_pairs(relays)

    def answered(self, worker: int, incarnation: int, number: int, answer: Any, now: float) -> list[HostCommand]:
        """Notes that a worker has carried out a Call."""
        present = self._is_present(worker, incarnation, f"answer {number}", now)
        if present and (handler := self._calls.take(number)) is not None and self.end is None:
            handler.answered(answer, now)
        return self._settled(now)

    def refused(
        self, worker: int, incarnation: int, number: int, error: PenstockError, now: float
    ) -> list[HostCommand]:
        """Notes that a worker could not carry out a Call. `error` is the worker's message, and its `error` what was
        raised."""
        present = self._is_present(worker, incarnation, f"refusal {number}", now)
        if present and (handler := self._calls.take(number)) is not None and self.end is None:
            handler.refused(error, now)
        return self._settled(now)

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

    def of_relays(self, event: RelayEvent, now: float) -> list[HostCommand]:
        """Gives the relay keeper an event of a relay."""
        assert self._relays is not None
        if self.end is None:
            self._keep_relays(event(self._relays, now))
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
            for worker in sorted(self.lives.running)
        }
        present = self.present
        wanted = {machine: nodes[machine] for machine in sorted(homes(present.plan, present.placed, machines))}
        self._keep_relays(self._relays.connected(members, wanted, now))

    def _keep_relays(self, commands: list[RelayCommand]) -> None:
        for command in commands:
            if isinstance(command, ExpectRelay):
                worker, relay = command.worker, command.relay
                done = partial(self._expects, worker, self.lives.incarnation(worker), relay)
                self._calls.call(worker, command, Handler(done, self._refused))
            elif isinstance(command, UseRelays):
                self._calls.call(command.worker, command, Handler(nothing, self._refused))
            else:
                self._out.append(command)

    def _expects(self, worker: int, life: int, relay: int, place: str, now: float) -> None:
        assert self._relays is not None
        self._keep_relays(self._relays.worker_expects(worker, life, relay, place, now))

    # --- Spark -----------------------------------------------------------------------------------------------

    def of_scheduler(self, event: SparkEvent, now: float) -> list[HostCommand]:
        """Gives the paradigm scheduler an event of Spark, or a look at the load of workers."""
        if self.end is None and self._paradigms is not None:
            self._paradigms.take(event, now)
        return self._settled(now)

    # --- the store -------------------------------------------------------------------------------------------

    def store_says(self, trouble: str | None) -> list[HostCommand]:
        """Takes the reason why the store cannot be written to, or None when it can be again."""
        self._store_trouble = trouble
        return []

    def of_coordinator(self, event: CoordinatorEvent, now: float) -> list[HostCommand]:
        """Gives the coordinator an event of the store."""
        if self.end is None:
            self._obey(event(self.coordinator, now) or [], now)
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

    # --- drivers ---------------------------------------------------------------------------------------------

    def of_requests(self, event: RequestEvent, now: float) -> list[HostCommand]:
        """Takes a request of a driver or of placement, or an outcome of one."""
        event(self.requests, now)
        return self._settled(now)

    def _adopt(self, plan: Plan, placed: dict[int, int], now: float) -> None:
        """Continues with another plan. Everything that was known of tasks by their numbers is forgotten."""
        self.present.adopt(plan, placed)
        self.suspects.forget()
        self.status = self.status.of(plan)
        if self._paradigms is not None:
            self._paradigms.take(lambda scheduler, now: scheduler.plan_changed(plan), now)

    # --- what the coordinator commands -----------------------------------------------------------------------

    def _obey(self, commands: list[protocol.Command], now: float) -> None:
        for command in commands:
            self._note(now, command)
            if self._decided is not None:
                self._decided(command)
            if isinstance(command, protocol.Start):
                self._generations.start(command, now)
            elif isinstance(command, protocol.RemoveTasks):
                self._generations.remove(command)
            elif isinstance(command, protocol.BuildTasks):
                self._generations.build(command, now)
            elif isinstance(command, protocol.Save):
                extra = command.manifest.extra
                extra["parallelism"] = json.dumps(self.present.parallelism)
                if known := self.present.known_load():
                    extra["load"] = known
                if self.lives.largest_ring:
                    extra["ring_bytes"] = self.lives.largest_ring
                self._out.append(SaveManifest(command.manifest))
            elif isinstance(command, protocol.FallBack):
                name = self.present.plan.name
                logger.warning("job %s falls back to an epoch before epoch %d: %s", name, command.epoch, command.reason)
                self._out.append(FindOlder(command.epoch, command.reason))
            elif isinstance(command, protocol.Fail):
                self._fail(JobEnd("FAILED", command.reason), now)
            elif isinstance(command, protocol.Trigger):
                self._barriers.trigger(command, now)
            elif isinstance(command, protocol.Unpark | protocol.SaveWholeState):
                self._calls.call_all(command)
            elif isinstance(command, protocol.ConnectTasks):
                self._connect_tasks(command, now)
            elif isinstance(command, protocol.Complete):
                self._complete(command, now)
                if self.coordinator.halted_for is not None and self.life.state is not JobState.STOPPING:
                    self.life.halted()
            elif isinstance(command, protocol.CopySavepointAndStop):
                if self.life.state is not JobState.STOPPING:
                    self.life.halted()
                self._out.append(CopySavepointAndStop(command.generation, command.place, self.present.plan))
            else:
                assert isinstance(command, protocol.End)
                self._calls.call_all(command, self._says_last)

    def _says_last(self, worker: int, status: dict[str, Any] | None, now: float) -> None:
        """Takes the last counters of a worker whose run is about to end."""
        if status is not None:
            self.status.take(status)

    def _connect_tasks(self, command: protocol.ConnectTasks, now: float) -> None:
        self._calls.call_all(command)
        if self.life.connected():
            self.status.running()
        self.requests.connected()
        self._place_relays(now)

    def _complete(self, command: protocol.Complete, now: float) -> None:
        self._out.append(CommitSinkRecords(command.epoch))
        self.suspects.completed()
        self._completed_at = now

        def answered(worker: int, ring_bytes: int, now: float) -> None:
            self.lives.ring_has_grown(worker, ring_bytes)
            if command.final:
                self._obey(self.coordinator.committed(worker, command.epoch), now)

        self._calls.call_all(command, answered)

    # --- after each event ------------------------------------------------------------------------------------

    def _settled(self, now: float) -> list[HostCommand]:
        """Takes the steps that are possible now, and returns all commands since the last event."""
        if self.end is None:
            if not self._failures and not self._cancelled:
                self._generations.release(now)
                self.requests.serve(now)
            self._end_if_over(now)
        out = list(self._out)
        self._out.clear()
        return out

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
            if cause is None and self.lives.running and now < self._failed_at + _CAUSE_S:
                return
            end = cause or self._failures[0]
        elif not self.lives.running and self.coordinator.state == ("ENDED" if self._options.has_store else "RUNNING"):
            end = JobEnd("FINISHED")
        if end is None:
            return
        self.end = end
        self._state_before_end = self.life.state
        self.life.end(end.state)
        self.requests.end(end)
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
        self.status.place(self.present.placed, self.lives.infos())
        # A worker whose run has ended meanwhile has said its last counts, and owes nothing.
        reports = [report for report in reports if report["index"] in self.lives.running]
        silent = {worker: silent_s for worker, silent_s in silent.items() if worker in self.lives.running}
        built = self.status.build(state.value, reports, wall, silent)
        return built.changed(
            epochs=self.epochs_status(now),
            relays=[] if self._relays is None else self._relays.status(),
            links=self._links.status(now),
            dual=DualStatus() if self._paradigms is None else self._paradigms.status,
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
