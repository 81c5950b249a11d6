"""JobMaster: the Ray actor, one for each job, that starts and watches the job's Workers, hosts the coordinator of its
epochs, and ends the job, however it ends.

One thread (`_supervise`) takes events one after the other, and carries out the commands that the coordinator answers
them with. Everything that has to wait (for a worker's answer, for a new process, for the store) is done in other
threads, which put events into the queue.

The JobMaster owns the Workers: when it dies, Ray ends them. In a job with epochs, Ray then starts the JobMaster again,
and it goes on from the last complete epoch with new Workers. A driver that is not detached owns the JobMaster in turn.
The JobMaster handles no records, except those on their way from Collect and Console sinks to the driver.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import ray
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError

from penstock.actors.elsewhere import process_of
from penstock.actors.head_memory import HeadMemory
from penstock.actors.worker import Worker
from penstock.placement.groups import NotPlaced, PlacingCancelled
from penstock.placement.options import PlacementOptions
from penstock.runtime.epochs.coordinator import (
    BuildTasks,
    Command,
    Complete,
    ConnectTasks,
    Coordinator,
    End,
    EpochOptions,
    Fail,
    FallBack,
    RemoveTasks,
    Save,
    SaveWholeState,
    Start,
    Trigger,
    Unpark,
)
from penstock.runtime.epochs.manifest import Blob, Manifest
from penstock.runtime.epochs.participant import Declined, EpochReport, NoLongerQuiet
from penstock.runtime.epochs.restore import same_tasks
from penstock.runtime.epochs.store import Store
from penstock.runtime.errors import JobError, PenstockError, SnapshotDamaged, StoreError
from penstock.runtime.host.collected import Collected, Encoded, EncodedSinkRecords
from penstock.runtime.host.control import Refused
from penstock.runtime.host.hangs import Process, SilenceDetector
from penstock.runtime.host.linger import Driver, Drivers
from penstock.runtime.host.links import AllWorkers, Link, PendingAnswers
from penstock.runtime.host.notes import Notes
from penstock.runtime.host.reporting import Report
from penstock.runtime.host.resequencer import Resequencer
from penstock.runtime.host.status import ENDED, State, StatusBuilder
from penstock.runtime.host.store_keeper import SAVEPOINT, StoreKeeper
from penstock.runtime.host.worker_process import Outcome, WorkerOptions
from penstock.runtime.operators.ends import Write
from penstock.runtime.program.plan import Plan, fused_by_key, replanned, rescaled
from penstock.runtime.records.codec import decode
from penstock.runtime.records.pickling import Program, join, program
from penstock.runtime.storage.directory_lock import DirectoryLock, DirectoryLocked
from penstock.runtime.transport.base import PeerGone
from penstock.runtime.worker.blackbox import Crash, Suspects, Watcher, is_stopped
from penstock.runtime.worker.run_loop import LoopEnded

if TYPE_CHECKING:
    from penstock.actors.nodes import Nodes
    from penstock.actors.placer import Placer
    from penstock.actors.spark_carrier import SparkCarrier
    from penstock.bridge.paradigm_scheduler import DualOptions
    from penstock.runtime.program.flow import Flow

logger = logging.getLogger(__name__)


# The Ray concurrency groups, with the number of their threads. Reports are taken in one thread. The calls that wait for
# the job's end have threads of their own, because any number of them may wait: Ray does not take back the calls of a
# driver that has died. Calls beyond the number of threads begin at the job's end, when the others return.
REPORTS = "reports"
OUTCOMES = "outcomes"
CONCURRENCY_GROUPS = {REPORTS: 1, OUTCOMES: 8}

# A cancelled run loop ends within one step of each task; a worker that does not (a user function that hangs) is killed.
_CANCEL_S = 2.0
# The longest wait for a worker's answer. A worker answers late when it is paused, or when a user's function or native
# code holds its interpreter.
_CONTROL_S = 5.0
# The longest wait for a worker's answer to a question for its status. After it, the status shows what the worker said
# last, and for how long it has been silent.
_STATUS_S = 1.0
# All sources begin a barrier at the same instant, this long after it was decided, so that the command reaches every
# worker before. A task that has one barrier and waits for another one holds up records for the difference.
_TRIGGER_AHEAD_NS = 10_000_000
_CONSOLE_LINES_MAX = 10_000
# A process that was killed is gone within a moment, and a job that has ended stays for some seconds (linger.py).
_HOLD_S = 30.0
# The time between two tries to use a store that does not answer.
_STORE_RETRY_S = 1.0
# How long the keeper may take to end before the store is removed: as long as a store may take to answer.
_KEEPER_END_S = 60.0

# Ray puts arguments of 100 KB and more into the object store.
_PART_BYTES = 64 << 10


@dataclass(frozen=True)
class JobOptions:
    """The options of `run()`, as plain data. `store`: where epochs are saved, or None when the job has no epochs."""

    workers: int
    cpus_per_worker: float
    start_timeout_s: float
    worker: WorkerOptions
    epochs: EpochOptions = field(default_factory=lambda: EpochOptions(interval_s=None))
    store: Store | None = None
    flow: Flow | None = None  # of a job with epochs, so that it can be planned anew
    attempts: int = 3  # how often a record may kill its worker
    hang_timeout_s: float = 60.0  # the silence after which a process is killed
    resume: bool = False  # whether to go on from the store's last complete epoch
    savepoint: Store | None = None  # the store of the savepoint to go on from
    dual: DualOptions | None = None  # how the job uses Spark, or None when it does not
    placement: PlacementOptions = field(default_factory=PlacementOptions)
    program: bytes | None = None  # what `resume` starts the job with when nothing but the store is left


@dataclass
class JobEnd:
    """How a job ended. `kind` determines which error the driver raises."""

    state: State
    error: str | None = None
    operator: str | None = None
    kind: Literal["failed", "resources", "cluster"] = "failed"


def in_parts(plan: Plan, options: JobOptions, program: Program) -> list[bytes]:
    """The arguments of a JobMaster, none of them large. Ray would keep a large argument in the object store of the
    driver, and could not start the JobMaster again when the driver has gone."""
    whole = program.dumps((plan, options))
    return [whole[start : start + _PART_BYTES] for start in range(0, len(whole), _PART_BYTES)]


class JobMaster:
    """See the module's docstring."""

    def __init__(self, *parts: bytes) -> None:
        """`parts`: what `in_parts` made of the plan and the JobOptions."""
        plan: Plan
        options: JobOptions
        plan, options = join(b"".join(parts))
        self._plan = plan
        self._options = options
        self._state: State = "STARTING"
        self._end: JobEnd | None = None
        self._ended = threading.Event()
        self._removing = threading.Lock()
        self._removed = False  # whether the epochs have been removed, after the job's end
        self._locks: list[DirectoryLock | None] = []  # on places that no other job may use meanwhile
        self._locks_store = False
        self._lock = threading.Lock()
        self._stopping = False
        self._cancelling = False
        self._waits_for: str | None = "nodes with room for its workers"  # None once the job has started
        self._events: queue.SimpleQueue[Callable[[], list[Command]]] = queue.SimpleQueue()
        from penstock.actors.nodes import (
            Nodes,  # workers load this module too, to know the JobMaster by, but never plan
        )
        from penstock.actors.placer import Placer

        self._nodes: Nodes = Nodes(options.placement, options.workers)
        self._placer: Placer = Placer(options.placement, self._nodes)
        self._placed: dict[int, int] = {}  # once the nodes are known
        self._coordinator: Coordinator  # once it is known what to go on from
        # By the worker's index, all of the worker's present process. `incarnations` only grow.
        self._actors: dict[int, Any] = {}
        self._incarnations = dict.fromkeys(range(options.workers), 0)
        self._infos: dict[int, dict[str, Any]] = {}
        self._links: dict[int, Link] = {}
        self._watchers: dict[int, Watcher] = {}
        self._running: set[int] = set()  # the workers whose run() has not returned
        self._suspects = Suspects(options.attempts)
        self._processes: dict[int, Process] = {}
        # By process id: processes that were killed because they hung, with the crash that this counts as; None when
        # somebody had stopped the process.
        self._hung: dict[int, Crash | None] = {}
        self._workers = AllWorkers()
        self._cut = PendingAnswers(set())  # the answers to the last cut
        self._ring_sizes: dict[int, int] = {}  # of rings that had grown, by worker
        self._reports: Resequencer[tuple[int, int], Report] = Resequencer()  # used in the one thread of their group
        self._collected = Collected(options.store is not None)
        self._console: deque[str] = deque(maxlen=_CONSOLE_LINES_MAX)
        self._console_total = 0
        self._console_more = threading.Condition()
        self._status = StatusBuilder(plan)
        self._status_lock = threading.Lock()
        self._last_status: dict[str, Any] | None = None
        self._keeper: StoreKeeper | None = None
        if options.store is not None:
            self._keeper = StoreKeeper(
                options.store, self._collected, self._store_says, self._store_has_lost, self._keeper_failed
            )
            self._keeper.program_bytes = options.program
        self._store_trouble: str | None = None
        self._requests: deque[_Request] = deque()  # requests that wait for an epoch
        self._rescaling: list[_Request] = []  # requests that wait for the job to run again
        self._moving: deque[tuple[dict[int, int], _Request]] = deque()  # tasks that drivers want on other workers
        self._move_after = 0.0  # the monotonic time before which they are not tried to be moved again
        self._parallelism: dict[str, int] = {}  # of operators that were rescaled
        self._completed_at: float | None = None
        self._failures: list[JobEnd] = []  # what ends the job
        self._spark_carrier: SparkCarrier | None = None
        context = ray.get_runtime_context()
        self._handle = context.current_actor
        node = context.get_node_id()
        self._drivers = Drivers(lambda driver: driver.lives(node), options.hang_timeout_s)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of what Ray itself uses there
            self._born_again = bool(context.was_current_actor_reconstructed)
        self._notes = Notes(plan.name, context.get_actor_id(), HeadMemory())
        self._epochs_noted = False
        threading.Thread(target=self._supervise, name="penstock-supervise", daemon=True).start()

    # --- asked by drivers ----------------------------------------------------------------------------------

    @ray.method(concurrency_group=OUTCOMES)  # type: ignore[untyped-decorator]
    def outcome(self, driver: Driver) -> JobEnd:
        """Wait for the end of the job. This process stays until the driver calls `release`, or dies."""
        self._drivers.came(driver)
        self._ended.wait()
        assert self._end is not None
        return self._end

    def ping(self, driver: Driver) -> None:
        """Show the driver that this process lives. The driver waits for the outcome; its call of `outcome` may be
        waiting for a thread."""
        self._drivers.came(driver)

    def status(self) -> dict[str, Any]:
        """The job's status as plain data; the last one before the end once it has ended."""
        if self._last_status is not None:
            return self._last_status
        return self._build_status()

    def stop(self) -> None:
        """End the sources; the job finishes when what they read has gone through."""
        with self._lock:
            if self._state in ENDED:
                return
            self._stopping = True
        self._workers.standing_request("stop")
        self._note_standing_request("stop")

    def cancel(self) -> None:
        """End the job at once."""
        with self._lock:
            if self._state in ENDED:
                return
            self._cancelling = True
        self._events.put(list)
        self._workers.standing_request("cancel")
        self._note_standing_request("cancel")

    def release(self, driver: Driver) -> None:
        """A driver that asked for the outcome has what it wants: with the last, there is no need to linger."""
        if self._drivers.has_all(driver):
            self._remove_epochs()
            self._drivers.wake()

    def collected(self, channel: str) -> list[Encoded]:
        """The records that a Collect sink has sent, encoded."""
        return self._collected.get(channel)

    def console(self, seen: int, timeout: float) -> tuple[int, list[str]]:
        """Wait until there are lines after the first `seen` ones. Returns the number of lines so far, and those of the
        new lines that are still kept."""
        with self._console_more:
            seen = min(seen, self._console_total)  # an earlier life of this actor may have had more
            self._console_more.wait_for(lambda: self._console_total > seen or self._ended.is_set(), timeout)
            new = min(self._console_total - seen, len(self._console))
            return self._console_total, list(self._console)[len(self._console) - new :]

    # --- told by workers -----------------------------------------------------------------------------------

    @ray.method(concurrency_group=REPORTS)  # type: ignore[untyped-decorator]
    def report(self, worker: int, incarnation: int, number: int, item: Report) -> None:
        """Take report number `number` of a worker's process. Calls may come in any order."""
        for said in self._reports.take((worker, incarnation), number, item):
            if isinstance(said, EncodedSinkRecords):
                self._keep(said)
                continue
            for event in said:
                self._events.put(lambda event=event: self._acknowledged(worker, incarnation, event))  # type: ignore[misc]

    def _keep(self, sent: EncodedSinkRecords) -> None:
        if sent.channel == "console":
            lines = decode(*sent.records)
            with self._console_more:
                self._console.extend(lines)
                self._console_total += len(lines)
                self._console_more.notify_all()
            return
        self._collected.take(sent)

    def _acknowledged(self, worker: int, incarnation: int, said: EpochReport) -> list[Command]:
        if incarnation != self._incarnations[worker]:
            return []
        if isinstance(said, Declined):
            if said.may_pass and self._keeper is not None:
                self._keeper.make_room()
            return self._coordinator.declined(said.task, said.generation, said.epoch, said.reason)
        if isinstance(said, NoLongerQuiet):
            self._coordinator.moved(said.task, said.generation)
            return []
        return self._coordinator.acknowledged(
            said.task,
            said.generation,
            said.epoch,
            finished=said.finished,
            whole=said.whole,
            blob=said.blob,
            quiet=said.quiet,
            parked=said.parked,
        )

    def _store_says(self, trouble: str | None) -> None:
        self._store_trouble = trouble

    def _store_has_lost(self, names: frozenset[str], reason: str) -> None:
        self._events.put(lambda: self._coordinator.lost(names, reason, time.monotonic()))

    def _keeper_failed(self, error: Exception) -> None:
        end = _end_by_own_fault(error)
        self._events.put(lambda: self._fail(end))

    # --- the job's life ------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        try:
            end = self._begin() or self._run()
        except PenstockError as error:
            end = JobEnd("FAILED", str(error))
        except Exception as error:
            end = _end_by_own_fault(error)
        if end.state == "FINISHED":
            self._anyway(self._build_last_status)
        self._anyway(self._end_workers)
        for request in [*self._requests, *self._rescaling, *(request for _, request in self._moving)]:
            request.end(JobError(f"job {self._plan.name!r} has ended"))
        if self._keeper is not None:
            self._keeper.close()
        if end.state == "CANCELLED":
            self._note_the_end(end.state)  # a later life of this actor must not go on from its epochs
        for lock in filter(None, self._locks):
            self._anyway(lock.close)
        if self._options.store is not None and end.state == "FAILED":
            self._anyway(self._options.store.release)  # else it is removed first
        with self._lock:
            self._state = end.state
            self._end = end
        self._last_status = {
            **(self._last_status or self._status.last()),
            **self._epochs_status(),
            "state": end.state,
            "error": end.error,
        }
        self._ended.set()
        with self._console_more:
            self._console_more.notify_all()
        if self._spark_carrier is not None:
            self._anyway(self._spark_carrier.close)
        self._drivers.wait()
        self._anyway(self._remove_epochs)
        self._forget()
        ray.kill(self._handle)

    def _anyway(self, step: Callable[[], None]) -> None:
        """Do a step of the job's end. The end goes on when the step fails, because drivers wait for it without a time
        limit."""
        try:
            step()
        except Exception:
            logger.exception("job %s: a step of its end failed; the end goes on", self._plan.name)

    def _build_last_status(self) -> None:
        """Keep what a finished job has counted in the end, also when a worker is paused just now."""
        self._last_status = self._build_status(self._options.hang_timeout_s)

    def _note_the_end(self, state: str) -> None:
        if self._options.store is not None and self._locks_store:
            try:
                self._options.store.end(state)
            except StoreError as error:
                logger.warning("job %s cannot note that it is %s: %s", self._plan.name, state, error)

    def _remove_epochs(self) -> None:
        """Delete the epochs, which nobody needs any more. Before this, a later life of this actor could still answer as
        this one does."""
        with self._removing:
            end, store = self._end, self._options.store
            if store is None or not self._locks_store or self._removed or end is None or end.state == "FAILED":
                return
            self._note_the_end(end.state)
            if self._keeper is not None:
                self._keeper.wait(_KEEPER_END_S)  # it may be writing again what it misses
            try:
                store.destroy()
                store.release()
            except StoreError as error:
                logger.warning("the epochs of job %s stay in the store: %s", self._plan.name, error)
            self._removed = True

    def _note_standing_request(self, standing_request: Literal["stop", "cancel"]) -> None:
        """Whoever has asked for it may go before it is done. Until this has returned, Ray asks a later life again."""
        if self._options.store is None:  # there is none
            return
        try:
            self._notes.note(standing_request)
        except Exception as error:
            logger.warning("job %s cannot note that it is to %s: %s", self._plan.name, standing_request, _cause(error))

    def _note_epochs(self) -> None:
        """There is a complete epoch. Sinks commit it only when that is noted: a later life of this actor that finds no
        epoch in the store must know whether it may start from the beginning."""
        while not self._epochs_noted and not self._ended.is_set():
            try:
                self._notes.note("epochs")
                self._epochs_noted = True
            except Exception as error:  # Ray's head does not answer
                logger.warning("job %s cannot note that an epoch is complete: %s", self._plan.name, _cause(error))
                self._ended.wait(_STORE_RETRY_S)

    def _forget(self) -> None:
        try:
            self._notes.forget()
        except Exception as error:
            logger.warning("notes on job %s stay with Ray's head: %s", self._plan.name, _cause(error))

    def _begin(self) -> JobEnd | None:
        """Find out what to go on from, and start all workers. Returns the job's end when that fails."""
        options = self._options
        if self._born_again:
            if self._notes.noted("stop"):
                self.stop()
            if self._notes.noted("cancel"):
                self.cancel()
        if not self._hold_places():
            return JobEnd("CANCELLED")
        found = self._found_at_last()
        if found is None:
            return JobEnd("CANCELLED")
        if isinstance(found, JobEnd):
            return found
        manifest, origin, begun = found
        if manifest is not None:
            for operator, parallelism in json.loads(str(manifest.extra.get("parallelism", "{}"))).items():
                self._parallelism[operator] = parallelism
                self._plan = self._rescaled(self._plan, operator, parallelism)
            self._status = self._status.of(self._plan)
        try:
            self._nodes.reserve(
                self._plan.name, options.cpus_per_worker, options.start_timeout_s, lambda: self._cancelling
            )
            if self._nodes.workers != options.workers:
                options = self._options = replace(options, workers=self._nodes.workers)
            self._placed = self._placer.first(self._plan)
        except PlacingCancelled:
            return JobEnd("CANCELLED")
        except NotPlaced as error:
            return JobEnd("FAILED", str(error), kind="resources")
        changed = manifest is not None and (origin is not None or not same_tasks(self._plan, manifest.tasks))
        self._coordinator = Coordinator(
            self._plan, self._placed, options.workers, options.epochs, manifest, origin=origin, changed=changed
        )
        self._coordinator.begun = max(self._coordinator.begun, begun)
        if manifest is not None or self._born_again:
            # Processes of the job's earlier life may still end: nothing that they say may be taken for the new ones'.
            first = int(time.time() * 10) & 0x3FFF_FFFF
            self._coordinator.generation = max(self._coordinator.generation, first)
            self._incarnations = dict.fromkeys(self._incarnations, first)
        starts = self._coordinator.start()
        workers = [command.worker for command in starts if isinstance(command, Start)]
        for worker in workers:
            self._actors[worker] = self._new_actor(worker)
        if manifest is not None and "ring_bytes" in manifest.extra:
            self._ring_sizes = dict.fromkeys(workers, int(manifest.extra["ring_bytes"]))
        prepared = {
            self._actors[worker].prepare.remote(options.worker, self._ring_sizes.get(worker, 0)): worker
            for worker in workers
        }
        late = self._await(list(prepared), self._told_of_start)
        if late and self._cancelling:
            return JobEnd("CANCELLED")
        if late:
            return JobEnd("FAILED", self._missing(len(late)), kind="resources")
        infos: dict[int, dict[str, Any]] = {}
        dead: dict[int, str] = {}
        for reference, worker in prepared.items():
            try:
                infos[worker] = ray.get(reference)
            except ActorUnschedulableError:
                return JobEnd("FAILED", self._missing(options.workers), kind="resources")
            except RayActorError as error:
                dead[worker] = _cause(error)
            except Exception as error:
                return JobEnd("FAILED", f"a worker could not start: {_cause(error)}")
        threading.Thread(target=self._ping, name="penstock-ping", daemon=True).start()
        connected = {self._connect(info): worker for worker, info in infos.items()}
        late = self._await(list(connected), lambda late: f"{late} of {options.workers} workers load the job's program")
        if late and self._cancelling:
            return JobEnd("CANCELLED")
        self._waits_for = None
        for reference, worker in connected.items():
            if reference in late:
                dead[worker] = f"it had not loaded the job's program within {options.start_timeout_s:g} s"
                ray.kill(self._actors[worker])
                continue
            try:
                outcome = ray.get(reference)
            except RayActorError as error:
                dead[worker] = _cause(error)
            else:
                if outcome.error is not None:
                    return JobEnd("FAILED", outcome.error, outcome.operator)
        for worker, info in infos.items():
            if worker not in dead:
                self._do(self._install(info))
        for worker, reason in dead.items():
            text = f"worker {worker} died while the job started: {reason}"
            logger.warning("job %s: %s", self._plan.name, text)
            self._events.put(partial(self._lost, worker, text))
        if options.placement.replan_s is not None:
            threading.Thread(target=self._watch_traffic, name="penstock-traffic", daemon=True).start()
        if options.dual is not None:
            from penstock.actors.spark_carrier import SparkCarrier  # loads pyarrow

            self._spark_carrier = SparkCarrier(
                self._plan,
                options.dual,
                options.hang_timeout_s,
                ask=lambda: self._workers.ask("load", _CONTROL_S),
                tell=self._tell,
            )
        return None

    def _await(self, calls: list[Any], waits_for: Callable[[int], str]) -> list[Any]:
        """Wait while the job starts until these calls have ended, start_timeout_s at most. Returns those that have not
        ended, also because the job was cancelled. `waits_for` says for people what so many calls are late with."""
        late = calls
        until = time.monotonic() + self._options.start_timeout_s
        while late and time.monotonic() < until and not self._cancelling:
            self._waits_for = waits_for(len(late))
            wait_s = min(1.0, max(0.0, until - time.monotonic()))
            _, late = ray.wait(calls, num_returns=len(calls), timeout=wait_s)
        return late

    def _tell(
        self,
        worker: int,
        method: str,
        arguments: tuple[Any, ...],
        done: Callable[[], None],
        refused: Callable[[str | None], None],
    ) -> None:
        """Send a worker a message of the paradigm scheduler; see spark_carrier.Tell."""

        def not_done(error: Refused) -> None:
            refused(None if isinstance(error.error, LoopEnded) else f"worker {worker}: {error}")

        def send() -> list[Command]:
            if worker in self._running:
                self._links[worker].send(
                    method, lambda: arguments, lambda _: done(), refused=not_done, gone=lambda: refused(None)
                )
            else:
                refused(None)
            return []

        self._events.put(send)

    def _lost(self, worker: int, reason: str) -> list[Command]:
        return self._coordinator.worker_lost(worker, time.monotonic(), reason)

    def _hold_places(self) -> bool:
        """Let nobody else use the job's store, or fill the folders of its sinks. The last process that did, such as an
        earlier life of this actor that was killed, has a while to end. False: the job was cancelled meanwhile."""
        store = self._options.store
        until = time.monotonic() + _HOLD_S
        sinks = [op.sink for chain in self._plan.chains for op in chain.operators if isinstance(op, Write)]
        for place in [*([] if store is None else [store.lock]), *(sink.lock for sink in sinks)]:
            while True:
                pause_s = 0.1
                try:
                    self._locks.append(place())
                    break
                except DirectoryLocked:
                    if time.monotonic() > until:
                        raise
                except StoreError as error:
                    if not self._born_again or not error.may_pass:
                        raise
                    logger.warning("job %s waits for its store: %s", self._plan.name, error)
                    pause_s = _STORE_RETRY_S
                if self._cancelling:
                    return False
                self._ended.wait(pause_s)
            self._locks_store = store is not None
        if not (self._options.resume or self._born_again or self._options.savepoint is not None):
            # The driver has looked, but another job may have filled the folder until it let go of it.
            for sink, lock in zip(sinks, self._locks[len(self._locks) - len(sinks) :], strict=True):
                if lock is not None:
                    sink.check()
        return True

    def _found_at_last(self) -> tuple[Manifest | None, Store | None, int] | JobEnd | None:
        """What `_found` finds; a job that has been running waits for a store that is gone for a while. None: it was
        cancelled meanwhile. A JobEnd: it has ended in an earlier life."""
        while not self._cancelling:
            try:
                state = self._keeper.store.ended() if self._keeper is not None and self._born_again else None
                return self._found() if state is None else JobEnd(cast("State", state))
            except StoreError as error:
                if not self._born_again or not error.may_pass:
                    raise
                logger.warning("job %s waits for its store: %s", self._plan.name, error)
                self._ended.wait(_STORE_RETRY_S)
        return None

    def _found(self) -> tuple[Manifest | None, Store | None, int]:
        """The epoch to go on from, the store that it is in if not the job's own, and the last number that is taken."""
        options, keeper = self._options, self._keeper
        if keeper is None:
            return None, None, 0
        store = keeper.store
        manifest: Manifest | None = None
        begun = 0
        if options.resume or self._born_again:
            found = store.latest()
            if found is not None:
                manifest, passed = found
                for problem in passed:
                    logger.warning("job %s passes over a damaged epoch: %s", self._plan.name, problem)
                begun = max(store.epochs())  # of damaged ones too: a number is used once
                store.forget_after(manifest.epoch)
                keeper.go_on_from(manifest)
                self._note_epochs()
                return manifest, None, begun
            if options.resume:  # from the beginning it would delete what the job has written
                raise StoreError(
                    f"there is no epoch of job {self._plan.name!r} in {store.place} any more: it has ended meanwhile, "
                    "elsewhere, or somebody has deleted its checkpoints"
                )
            if self._notes.noted("epochs"):  # so it would write again what its sinks have committed
                raise StoreError(
                    f"the JobMaster of {self._plan.name!r} has died, and the epochs that were complete in "
                    f"{store.place} are gone: somebody has deleted or moved them. From the beginning the job would "
                    "write again what its sinks have written, so it was not started again. Put the directory back and "
                    f"call penstock.resume({self._plan.name!r}), or run the flow anew, and let its sinks write to "
                    "another place or overwrite what they have written"
                )
        else:
            store.destroy()  # what a job of this name left when it failed
            store.check()
        if options.program is not None:
            keeper.program = keeper.put_program(options.program)
        if options.savepoint is not None:
            found = options.savepoint.latest(options.savepoint.verify)
            assert found is not None, "the driver has looked"
            keeper.go_on_from(replace(found[0], program=keeper.program), options.savepoint)
            return found[0], options.savepoint, found[0].epoch
        return None, None, 0

    def _new_actor(self, worker: int) -> Any:
        return (
            ray.remote(Worker)
            .options(num_cpus=self._options.cpus_per_worker, scheduling_strategy=self._nodes.strategy(worker))
            .remote(worker)
        )

    def _connect(self, info: dict[str, Any]) -> Any:
        worker = info["index"]
        self._incarnations[worker] += 1
        return self._actors[worker].connect.remote(
            program().dumps((self._plan, self._placed, self._options.store)),
            self._handle,
            self._incarnations[worker],
            (os.getpid(), ray.get_runtime_context().get_node_id(), self._options.hang_timeout_s),
        )

    def _ask_all(self, method: str) -> list[Any]:
        return list(self._workers.ask(method, _CONTROL_S).values())

    def _install(self, info: dict[str, Any]) -> list[Command]:
        """Let a worker's process run that is ready, and connect to it."""
        worker = info["index"]
        incarnation = self._incarnations[worker]
        self._infos[worker] = info
        with self._status_lock:
            self._status.place(self._placed, [self._infos[index] for index in sorted(self._infos)])
        self._processes[worker] = process_of(info["pid"], info["node_id"], self._actors[worker])
        self._links[worker] = Link(worker, incarnation, info["control"])
        self._watchers[worker] = Watcher(info["blackbox"])
        self._workers.connect(worker, info["control"], info["pid"])
        run = self._actors[worker].run.remote()
        self._running.add(worker)
        threading.Thread(target=self._watch, args=(worker, incarnation, run), daemon=True).start()
        return self._coordinator.started(worker)

    def _watch(self, worker: int, incarnation: int, run: Any) -> None:
        """Wait until a worker's run has ended."""
        try:
            outcome: Outcome | None = ray.get(run)
            reason = ""
        except Exception as error:
            outcome, reason = None, _cause(error)
        self._events.put(lambda: self._gone(worker, incarnation, outcome, reason))

    def _ping(self) -> None:
        """Kill workers that hang. A worker whose process is stopped, or does not come back from native code, is as lost
        as a dead one, but nobody reports it. The pings also show the workers that this process lives."""
        limit = self._options.hang_timeout_s
        silence: SilenceDetector[tuple[int, int]] = SilenceDetector(limit)
        while not self._ended.wait(silence.period_s):
            for worker, pid in silence.look(self._workers.ping()):
                process = self._processes[worker]
                if process.pid == pid:  # else there is a new one
                    logger.warning("job %s: worker %d (process %d) hangs: killed", self._plan.name, worker, pid)
                    self._hung[pid] = None if is_stopped(pid) else Crash("it hung in native code and was killed", True)
                    process.kill()

    def _gone(self, worker: int, incarnation: int, outcome: Outcome | None, reason: str) -> list[Command]:
        """A worker's run has ended, or its process has died."""
        if incarnation != self._incarnations[worker]:
            return []
        self._running.discard(worker)
        if outcome is None:
            self._links[worker].close()
            self._workers.disconnect(worker)
            if self._coordinator.state == "ENDED":
                return []
            pid = self._infos[worker]["pid"]
            text = f"worker {worker} (process {pid}) died: {reason.rstrip('.')}"
            hung = pid in self._hung
            if hung:
                text = (
                    f"worker {worker} (process {pid}) did not answer for hang_timeout_s="
                    f"{self._options.hang_timeout_s:g} seconds, as it was stopped or native code kept its interpreter, "
                    "and was killed"
                )
            note, crash = self._watchers[worker].read(), self._watchers[worker].crash() or self._hung.pop(pid, None)
            self._suspects.died(note, crash)
            if note is not None and note.task in self._plan.by_number:
                text += f"; it was running {self._plan.task_name(self._plan.by_number[note.task])}"
            if not hung:  # Ray guesses at reasons; only this tells a crash from a kill
                text += f"; its own doing: {crash.what}" if crash else "; killed from outside, or for want of memory"
            stack = f"\n{crash.stack}" if crash is not None and crash.stack else ""
            logger.warning("job %s: %s%s", self._plan.name, text, stack)
            return self._lost(worker, text)
        if outcome.error is not None:
            self._failures.append(JobEnd("FAILED", outcome.error, outcome.operator))
        return []

    def _run(self) -> JobEnd:
        """Take events until the job has ended."""
        while True:
            due = self._coordinator.due()
            timeout = None if due is None else max(0.0, due - time.monotonic())
            try:
                event = self._events.get(timeout=timeout)
            except queue.Empty:
                self._do(self._coordinator.tick(time.monotonic()))
            else:
                self._do(event())
            if self._requests:
                self._do(self._serve())
            if self._moving:
                self._do(self._move())
            if self._cancelling:
                return JobEnd("CANCELLED")
            if self._failures:
                return self._first_cause()
            if not self._running and self._coordinator.state in ("RUNNING", "ENDED"):
                return JobEnd("FINISHED")

    def _first_cause(self) -> JobEnd:
        """The failure that ends the job. A neighbour often sees a death first, so the failures of the next moment,
        which may hold the cause, are waited for."""
        until = time.monotonic() + 0.1
        while all(end.operator is None for end in self._failures) and self._running:
            try:
                self._events.get(timeout=max(0.0, until - time.monotonic()))()
            except queue.Empty:
                break
        return next((end for end in self._failures if end.operator is not None), self._failures[0])

    # --- the coordinator's commands --------------------------------------------------------------------------

    def _do(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Start):
                threading.Thread(target=self._restart, args=(command, self._cut), daemon=True).start()
            elif isinstance(command, RemoveTasks):
                self._cut_all(command)
            elif isinstance(command, BuildTasks):
                if command.change is not None and command.change.placed != self._placed:
                    self._now_placed(command.change.placed)
                if command.after_s:
                    self._make_later(command)
                else:
                    self._make_all(command)
            elif isinstance(command, Save):
                assert self._keeper is not None
                self._keeper.do(partial(self._save, command.manifest))
            elif isinstance(command, FallBack):
                assert self._keeper is not None
                self._keeper.do(partial(self._fall_back, command))
            elif isinstance(command, Fail):
                self._failures.append(JobEnd("FAILED", command.reason))
            elif isinstance(command, Trigger):
                self._send_all("trigger", command.epoch, time.time_ns() + _TRIGGER_AHEAD_NS, command.parking)
            elif isinstance(command, Unpark):
                self._send_all("unpark")
            elif isinstance(command, SaveWholeState):
                self._send_all("rewrite", command)
            elif isinstance(command, ConnectTasks):
                self._join_all(command)
            elif isinstance(command, Complete):
                self._complete_all(command)
            else:
                assert isinstance(command, End)
                self._send_all("end")

    def _send_all(self, method: str, *arguments: Any) -> None:
        for worker in self._running:
            self._links[worker].send(method, lambda: arguments, refused=self._refused)

    def _refused(self, error: Refused) -> None:
        """Fail the job because a worker could not do what it was told. When the worker's loop has ended, its outcome
        says why, and nothing is done here."""
        cause = error.error
        if isinstance(cause, LoopEnded):
            return
        operator = getattr(cause, "operator", None)
        reason = str(error) if operator is None and not isinstance(cause, StoreError) else str(cause)
        self._events.put(lambda: self._fail(JobEnd("FAILED", reason, operator)))

    def _fail(self, end: JobEnd) -> list[Command]:
        self._failures.append(end)
        return []

    def _cut_all(self, command: RemoveTasks) -> None:
        self._state = "MOVING" if command.planned else "RECOVERING"
        lost = [worker for worker in range(self._options.workers) if worker not in self._running]
        answers = self._cut = PendingAnswers(self._running)
        for worker in self._running:
            link = self._links[worker]

            def answered(
                answer: dict[str, Any], worker: int = worker, info: dict[str, Any] = self._infos[worker]
            ) -> None:
                info["address"] = answer["address"]
                for dead, size in answer["rings"].items():
                    self._ring_sizes[dead] = max(size, self._ring_sizes.get(dead, 0))
                answers.done(worker)

            def gone(worker: int = worker) -> None:
                answers.done(worker)

            def refused(error: Refused, worker: int = worker) -> None:
                answers.done(worker)
                self._refused(error)

            link.send("cut", lambda: (command, lost), answered, refused, gone)

    def _restart(self, command: Start, cut: PendingAnswers) -> None:
        """Start a worker's process anew."""
        worker, limit_s = command.worker, self._options.start_timeout_s
        if self._ended.wait(command.after_s):  # the coordinator's back-off
            return
        cut.wait()
        actor = None
        try:
            actor = self._new_actor(worker)
            prepared = actor.prepare.remote(self._options.worker, self._ring_sizes.get(worker, 0))
            info = ray.get(prepared, timeout=limit_s)
            if self._ended.is_set():
                ray.kill(actor)
                return
            self._actors[worker] = actor
            outcome = ray.get(self._connect(info), timeout=limit_s)
            if outcome.error is not None:
                raise PenstockError(outcome.error)
        except NotPlaced as error:  # and never will be
            reason = f"worker {worker} could not be started again: {error}"
            self._events.put(partial(self._fail, JobEnd("FAILED", reason, kind="resources")))
            return
        except Exception as error:
            if actor is not None:
                ray.kill(actor)
            why = f"it was not ready within {limit_s:g} s" if isinstance(error, GetTimeoutError) else _cause(error)
            self._events.put(partial(self._lost, worker, f"worker {worker} could not be started again: {why}"))
            return
        self._events.put(lambda: self._install(info))

    def _now_placed(self, placed: dict[int, int]) -> None:
        before, self._placed = self._placed, dict(placed)
        moves = sum(before.get(task, worker) != worker for task, worker in placed.items())
        if moves:
            self._placer.moved(moves)
            logger.info("job %s: %d tasks run elsewhere", self._plan.name, moves)
        with self._status_lock:
            self._status.place(self._placed, [self._infos[index] for index in sorted(self._infos)])

    def _make_all(self, command: BuildTasks) -> None:
        self._collected.back(command.tasks, command.generation, frozenset(self._plan.by_number))
        answers = self._cut
        modes = {task: how for task, how in self._suspects.modes().items() if task in command.tasks}
        addresses = {worker: info["address"] for worker, info in self._infos.items()}
        for worker in sorted(self._running):

            def arguments() -> tuple[Any, ...]:
                answers.wait()
                known = {other: self._infos[other]["address"] for other in addresses}
                return command, known, modes

            def answered(_: Any, worker: int = worker) -> None:
                self._events.put(lambda: self._coordinator.made(worker, command.generation, time.monotonic()))

            def refused(error: Refused, worker: int = worker) -> None:
                why = why_not_made(worker, error.error)
                if why is None:
                    self._refused(error)
                    return
                reason, damaged = why
                self._events.put(
                    lambda: self._coordinator.not_made(worker, command.generation, reason, damaged, time.monotonic())
                )

            self._links[worker].send("make", arguments, answered, refused)

    def _make_later(self, command: BuildTasks) -> None:
        def due() -> list[Command]:
            if command.generation == self._coordinator.generation:  # else another one has come in its place
                self._make_all(command)
            return []

        later = threading.Timer(command.after_s, self._events.put, (due,))
        later.daemon = True
        later.start()

    def _join_all(self, command: ConnectTasks) -> None:
        self._send_all("join", command)
        if self._state == "STARTING":
            self._status.running()
        self._state = "RUNNING"
        for request in self._rescaling:
            request.end()
        self._rescaling.clear()

    def _complete_all(self, command: Complete) -> None:
        self._collected.commit(command.epoch)
        self._suspects.completed()
        self._completed_at = time.monotonic()
        for worker in self._running:

            def answered(ring_bytes: int, worker: int = worker) -> None:
                self._events.put(lambda: self._note_ring(worker, ring_bytes))
                if command.final:
                    self._events.put(lambda: self._coordinator.committed(worker, command.epoch))

            self._links[worker].send("complete", lambda: (command,), answered, self._refused)

    def _note_ring(self, worker: int, ring_bytes: int) -> list[Command]:
        """Remember how large a worker's ring has grown: records as large may come again when this process has died."""
        if self._keeper is not None and ring_bytes > self._ring_sizes.get(worker, 0):
            self._ring_sizes[worker] = ring_bytes
            self._keeper.extra["ring_bytes"] = max(self._ring_sizes.values())
        return []

    # --- the store -------------------------------------------------------------------------------------------

    def _save(self, manifest: Manifest) -> None:
        keeper = self._keeper
        assert keeper is not None
        epoch = manifest.epoch
        try:
            if not keeper.save(manifest):
                return
        except SnapshotDamaged as error:
            reason = str(error)
            self._events.put(lambda: self._coordinator.not_saved(epoch, reason))
            return
        except StoreError as error:
            self._events.put(partial(self._fail, JobEnd("FAILED", str(error))))
            return
        self._note_epochs()
        self._events.put(lambda: self._coordinator.saved(epoch))
        keeper.tidy(epoch, lambda *chain: self._events.put(lambda: self._replaced(*chain)))

    def _replaced(self, task: int, old: list[Blob], new: Blob) -> list[Command]:
        self._coordinator.replace_chain(task, old, new)
        return []

    def _fall_back(self, command: FallBack) -> None:
        """Find an epoch that is not damaged, because the last complete one is."""
        assert self._keeper is not None
        logger.warning("job %s goes back before epoch %d: %s", self._plan.name, command.epoch, command.reason)
        try:
            manifest = self._keeper.older(command.epoch, command.reason)
        except SnapshotDamaged as error:
            self._events.put(partial(self._fail, JobEnd("FAILED", str(error))))
            return
        if manifest is None:
            reason = f"{command.reason} There is no older epoch to go back to."
            self._events.put(partial(self._fail, JobEnd("FAILED", reason)))
        elif not self._ended.is_set():
            self._events.put(lambda: self._coordinator.rewind(manifest, time.monotonic()))

    # --- what drivers ask for that takes an epoch --------------------------------------------------------------

    def savepoint(self, url: str) -> None:
        """Save the state of all tasks in a place that the user has named."""
        self._need_epochs("a savepoint")
        Store.open(url, SAVEPOINT).check()
        request = _Request(lambda: self._copy(url, request))
        self._events.put(lambda: self._ask(request))
        request.wait(self._ended)

    def _copy(self, url: str, request: _Request) -> list[Command]:
        keeper = self._keeper
        assert keeper is not None

        def copy() -> None:
            try:
                keeper.savepoint(self._plan, url)
            except Exception as error:
                request.end(error)
            else:
                request.end()

        keeper.do(copy)
        return []

    def rescale(self, operator: str, parallelism: int) -> None:
        """Give an operator another number of tasks."""
        self._need_epochs("rescale")
        self._rescaled(self._plan, operator, parallelism)  # raises what is wrong with it
        request = _Request(lambda: self._replan(operator, parallelism, request))
        self._events.put(lambda: self._ask(request))
        request.wait(self._ended)

    def _rescaled(self, plan: Plan, operator: str, parallelism: int) -> Plan:
        plan.chain_of(operator)
        if parallelism > 1 and fused_by_key(plan, operator):
            flow = self._options.flow
            assert flow is not None
            return replanned(flow.graph, plan, operator, parallelism, flow.chaining)
        return rescaled(plan, operator, parallelism)

    def _replan(self, operator: str, parallelism: int, request: _Request) -> list[Command]:
        try:
            plan = self._rescaled(self._plan, operator, parallelism)
        except PenstockError as error:
            request.end(error)
            return []
        if plan is self._plan:
            request.end()
            return []
        placed = self._placer.grown(plan, self._placed)
        commands = self._coordinator.replan(plan, placed)
        if not commands:
            request.again()
            return []
        assert self._keeper is not None
        self._parallelism[operator] = parallelism
        self._keeper.extra["parallelism"] = json.dumps(self._parallelism)
        self._plan, self._placed = plan, placed
        if self._spark_carrier is not None:
            self._spark_carrier.plan_changed(plan)
        self._suspects.forget()  # tasks have other numbers
        self._placer.forget()
        with self._status_lock:
            self._status = self._status.of(plan)
            self._status.place(placed, [self._infos[index] for index in sorted(self._infos)])
        self._rescaling.append(request)
        return commands

    def migrate(self, tasks: dict[str, int]) -> None:
        """Move tasks, given by name, to other workers. Returns when they run there."""
        self._need_epochs("migrate")
        numbers = {self._plan.task_name(task): task.number for task in self._plan.tasks}
        if unknown := sorted(set(tasks) - set(numbers)):
            raise JobError(f"job {self._plan.name!r} has no task {unknown[0]!r}; it has: {', '.join(sorted(numbers))}")
        if beyond := [worker for worker in tasks.values() if not 0 <= worker < self._options.workers]:
            raise JobError(f"there is no worker {beyond[0]}; the job has 0 to {self._options.workers - 1}")
        request = _Request(list)
        wanted = {numbers[name]: worker for name, worker in tasks.items()}

        def ask() -> list[Command]:
            self._moving.append((wanted, request))
            return []

        self._events.put(ask)
        request.wait(self._ended)

    def traffic(self) -> list[dict[str, Any]]:
        """The load and the traffic of tasks, as last measured."""
        if self._options.placement.replan_s is None:
            raise JobError(f"job {self._plan.name!r} does not measure its traffic: give run(replan_s=...)")
        return self._placer.traffic()

    def _move(self) -> list[Command]:
        """Start the first requested migration. Called after every event until it has been carried out."""
        coordinator = self._coordinator
        now = time.monotonic()
        if coordinator.state != "RUNNING" or coordinator.migrating:
            return []
        wanted, request = self._moving[0]
        finished = coordinator.finished()
        moves = {
            task: worker for task, worker in wanted.items() if task not in finished and self._placed[task] != worker
        }
        if not moves:
            self._moving.popleft()
            ended = [self._plan.task_name(self._plan.by_number[task]) for task in sorted(wanted.keys() & finished)]
            request.end(JobError(f"{', '.join(ended)} had ended already") if ended else None)
            return []
        if now < self._move_after:
            return []
        self._move_after = now + (self._options.epochs.interval_s or 0.0)  # a store that is gone refuses each epoch
        return coordinator.migrate({**self._placed, **moves}, now)

    def _watch_traffic(self) -> None:
        """Ask the workers what their tasks send, once a period, and plan anew; in a thread of its own, as a plan of
        many tasks takes seconds."""
        period = self._options.placement.replan_s
        while not self._ended.wait(period):
            plan, placed = self._plan, self._placed
            try:
                wanted = self._placer.look(plan, placed, self._ask_all("traffic"))
            except Exception as error:  # the job is as well placed as it was
                logger.warning("job %s could not be planned anew: %s: %s", plan.name, type(error).__name__, error)
                continue
            if wanted is not None:
                self._events.put(partial(self._replace, plan, placed, wanted))

    def _replace(self, plan: Plan, placed: dict[int, int], wanted: dict[int, int]) -> list[Command]:
        """Move tasks, unless the plan or the placement has changed since the move was decided."""
        if self._plan is not plan or self._placed != placed or self._moving:
            return []
        return self._coordinator.migrate(wanted, time.monotonic())

    def _need_epochs(self, what: str) -> None:
        if self._keeper is None:
            raise JobError(
                f"{what} needs epochs, and job {self._plan.name!r} runs without: give run(epoch_interval_s=...)"
            )

    def _ask(self, request: _Request) -> list[Command]:
        self._requests.append(request)
        return []

    def _serve(self) -> list[Command]:
        """Do what drivers have asked for and what has waited for an epoch."""
        coordinator = self._coordinator
        commands: list[Command] = []
        for request in list(self._requests):
            if coordinator.state != "RUNNING":
                break
            if request.epoch is None:
                begun = coordinator.begin(time.monotonic())
                request.epoch = coordinator.begun
                commands += begun
            elif coordinator.epoch >= request.epoch:
                self._requests.remove(request)
                commands += request.do()
                if request.asked_again():
                    self._requests.append(request)
        return commands

    # -----------------------------------------------------------------------------------------------------------

    def _told_of_start(self, late: int) -> str:
        """What a job that starts waits for, in words."""
        workers = self._options.workers
        have, free = ray.cluster_resources().get("CPU", 0.0), ray.available_resources().get("CPU", 0.0)
        return (
            f"{workers - late} of {workers} workers have started, each takes {self._options.cpus_per_worker:g} CPUs; "
            f"{free:g} of the cluster's {have:g} are free"
        )

    def _missing(self, late: int, detail: str = "") -> str:
        have, free = ray.cluster_resources(), ray.available_resources()
        options = self._options
        return (
            f"{late} of {options.workers} workers could not be placed within {options.start_timeout_s:g} s. "
            f"The job asks for {options.workers} x {options.cpus_per_worker:g} CPUs on one node; the cluster has "
            f"{have.get('CPU', 0):g} CPUs, {free.get('CPU', 0):g} free. Use fewer workers, a smaller "
            f"cpus_per_worker, or stop other jobs. {detail}"
        ).strip()

    def _end_workers(self) -> None:
        """Cancel what still runs, give it a moment to close its files, and end every worker's process."""
        with suppress(PenstockError):
            self._workers.ask("cancel", _CANCEL_S)
        until = time.monotonic() + _CANCEL_S
        while self._running and time.monotonic() < until:
            try:
                self._events.get(timeout=max(0.0, until - time.monotonic()))()
            except queue.Empty:
                break
        self._workers.close()
        for worker in self._running:  # Ray would give one that is stopped seconds to end by itself
            self._processes[worker].kill()
        for link in self._links.values():
            link.close()
        for actor in self._actors.values():
            ray.kill(actor)
        self._nodes.close()

    def _build_status(self, patience_s: float = _STATUS_S) -> dict[str, Any]:
        # A worker that died just now, or is paused, answers nothing: the status shows what it last said.
        reports = list(self._workers.ask("status", patience_s).values())
        silent = self._workers.silent()
        with self._lock:
            state = "STOPPING" if self._stopping and self._state == "RUNNING" else self._state
        with self._status_lock:
            status = self._status.build(state, reports, time.time(), silent)
        dual = {} if self._spark_carrier is None else {"dual": self._spark_carrier.status()}
        starting = {} if self._waits_for is None else {"waits_for": self._waits_for}
        return {**status, **starting, **self._epochs_status(), "placement": self._placer.status(), **dual}

    def _epochs_status(self) -> dict[str, Any]:
        if self._options.store is None or not hasattr(self, "_coordinator"):
            return {}
        coordinator = self._coordinator
        epochs = {
            "complete": coordinator.epoch,
            "begun": coordinator.begun,
            "age_s": None if self._completed_at is None else time.monotonic() - self._completed_at,
            "restarts": coordinator.restarts,
            "last_failure": self._store_trouble or coordinator.last_failure,
            "damage": None if self._keeper is None else self._keeper.damage,
            "store": self._options.store.place,
        }
        return {"epochs": epochs}


def _end_by_own_fault(error: Exception) -> JobEnd:
    """The end of a job whose JobMaster has met an error that nobody has thought of."""
    return JobEnd("FAILED", f"JobMaster failed: {error}\n{''.join(traceback.format_exception(error))}")


def why_not_made(worker: int, error: Exception | None) -> tuple[str, bool] | None:
    """Why a worker could not make its tasks, and whether what they had saved is damaged; None: trying again would end
    alike, so the job fails."""
    if isinstance(error, SnapshotDamaged):
        return str(error), True
    if isinstance(error, StoreError) and error.may_pass:
        return f"what they had saved could not be read: {error}", False
    if isinstance(error, PeerGone):
        return f"worker {worker} cannot reach another: {error}", False
    return None


def _cause(error: Exception) -> str:
    """What went wrong, without Ray's traceback of the place where it was noticed."""
    cause = getattr(error, "cause", None) or error
    text = str(cause).strip()
    return text.splitlines()[0] if text else type(cause).__name__


class _Request:
    """Something that a driver has asked for, and that is done when an epoch that was begun for it is complete."""

    def __init__(self, do: Callable[[], list[Command]]) -> None:
        self.do = do
        self.epoch: int | None = None  # to wait for; None: still to be begun
        self._error: Exception | None = None
        self._over = threading.Event()

    def end(self, error: Exception | None = None) -> None:
        """Note that it is done, or the error because of which it cannot be done."""
        self._error = error
        self._over.set()

    def again(self) -> None:
        """Wait for another epoch, because it could not be done with this one."""
        self.epoch = None

    def asked_again(self) -> bool:
        """Whether `again` was called since the epoch was begun."""
        return self.epoch is None

    def wait(self, ended: threading.Event) -> None:
        """Wait until it is done. Raises the error because of which it could not be done."""
        while not self._over.wait(1.0):
            if ended.is_set():
                raise JobError("the job has ended")
        if self._error is not None:
            raise self._error
