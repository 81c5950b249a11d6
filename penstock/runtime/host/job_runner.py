"""JobRunner: carries a JobHost in a process, with threads and sockets, whatever starts the worker processes. The
JobMaster on Ray and the runner of local processes each have one.

One thread (`_supervise`) gives the JobHost its events, one after the other, and carries out its commands. Everything
that has to wait (for a worker's answer, for a new process, for the store) is done in other threads, which put events
into the queue. Nothing here decides anything about the job; what a JobRunner adds to the JobHost is time, processes,
sockets, the store, and the records on their way from Collect and Console sinks to the driver.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from penstock.runtime.epochs.coordinator import EpochOptions
from penstock.runtime.epochs.manifest import Blob, Manifest
from penstock.runtime.epochs.store import Store
from penstock.runtime.errors import (
    JobError,
    NotEnoughResources,
    PenstockError,
    SnapshotDamaged,
    StoreError,
)
from penstock.runtime.host.collected import Collected, Encoded, EncodedSinkRecords
from penstock.runtime.host.commands import (
    Call,
    CommitSinkRecords,
    CopySavepoint,
    EndJob,
    FindOlder,
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
from penstock.runtime.host.hangs import SilenceDetector
from penstock.runtime.host.job_host import HostOptions, JobHost
from penstock.runtime.host.linger import Driver, Drivers
from penstock.runtime.host.links import AllWorkers, Link
from penstock.runtime.host.opening import STORE_RETRY_S, Opening
from penstock.runtime.host.processes import CannotStart, ProcessDied, Processes, WorkerHandle
from penstock.runtime.host.reporting import Report
from penstock.runtime.host.resequencer import Resequencer
from penstock.runtime.host.status import StatusBuilder
from penstock.runtime.host.store_keeper import SAVEPOINT, StoreKeeper
from penstock.runtime.host.worker_process import WorkerOptions
from penstock.runtime.program.plan import Plan
from penstock.runtime.records.codec import decode
from penstock.runtime.records.pickling import Program
from penstock.runtime.worker.blackbox import Watcher, is_stopped

if TYPE_CHECKING:
    from penstock.runtime.host.notes import Note, Notes
    from penstock.runtime.host.placing import Placing
    from penstock.runtime.program.flow import Flow

logger = logging.getLogger(__name__)

T = TypeVar("T")

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
# How long the keeper may take to end before the store is removed: as long as a store may take to answer.
_KEEPER_END_S = 60.0


@dataclass(frozen=True)
class RunnerOptions:
    """The options of `run()` that concern every carrier. `store`: where epochs are saved, or None when the job has no
    epochs."""

    workers: int
    start_timeout_s: float
    worker: WorkerOptions
    epochs: EpochOptions = field(default_factory=lambda: EpochOptions(interval_s=None))
    store: Store | None = None
    flow: Flow | None = None  # of a job with epochs, so that it can be planned anew
    attempts: int = 3  # how often a record may kill its worker
    hang_timeout_s: float = 60.0  # the silence after which a process is killed
    resume: bool = False  # whether to go on from the store's last complete epoch
    savepoint: Store | None = None  # the store of the savepoint to go on from
    program: bytes | None = None  # what `resume` starts the job with when nothing but the store is left


class Paradigms(Protocol):
    """What decides which operators run in Spark (docs/papers.md: D6), once the job runs."""

    def status(self) -> dict[str, Any]: ...

    def plan_changed(self, plan: Plan) -> None: ...

    def close(self) -> None: ...


class Carrier(Protocol):
    """What a JobRunner needs of whoever it runs in."""

    #: Whether the job has been started again, because its first host has died.
    again: bool
    notes: Notes

    def reserve(self, cancelled: Callable[[], bool]) -> tuple[int, Processes, Placing]:
        """Reserve room for the workers. Returns how many there are, and what starts and places them. Raises
        NotEnoughResources; when the job was cancelled meanwhile, anything."""
        ...

    def waits_for(self) -> str:
        """What a job that starts waits for, in words."""
        ...

    def placement_status(self) -> dict[str, Any] | None:
        """What the status says of placement; None: nothing."""
        ...

    def running(self, runner: JobRunner) -> Paradigms | None:
        """The workers have been told to start. Returns what decides about Spark, if anything."""
        ...

    def driver_lives(self, driver: Driver) -> bool:
        """Whether a driver's process is still there."""
        ...

    def leave(self) -> None:
        """Nobody needs the runner any more."""
        ...


class JobRunner:
    """See the module's docstring. Safe to use from several threads."""

    def __init__(self, plan: Plan, options: RunnerOptions, carrier: Carrier, program: Program) -> None:
        """`program`: the program that the plan belongs to."""
        self.options = options
        self._name = plan.name
        self._first_plan = plan
        self._program = program
        self._carrier = carrier
        self._host: JobHost | None = None  # once it is known what to go on from; only `_supervise` calls its events
        self._end: JobEnd | None = None
        self.ended = threading.Event()
        self._events: queue.SimpleQueue[Callable[[JobHost], list[HostCommand]]] = queue.SimpleQueue()
        self._stopping = False
        self._cancelling = False
        self._waits = True  # whether the job has not begun yet
        self._processes: Processes | None = None
        self._workers = AllWorkers()
        # By worker, of its present process; used in the supervising thread, but for `_handles` after the end.
        self._handles: dict[int, WorkerHandle] = {}
        self._links: dict[int, Link] = {}
        self._watchers: dict[int, Watcher] = {}
        self._packed: tuple[Plan, dict[int, int], bytes] | None = None  # the last program that was packed for workers
        self._requests: dict[int, _Request] = {}
        self._request_numbers = 0
        self._lock = threading.Lock()  # of the two above
        self._reports: Resequencer[tuple[int, int], Report] = Resequencer()  # used in one thread
        self._collected = Collected(options.store is not None)
        self._console: deque[str] = deque(maxlen=_CONSOLE_LINES_MAX)
        self._console_total = 0
        self._console_more = threading.Condition()
        self._early = StatusBuilder(plan)  # for the status before there is a JobHost
        self._early_lock = threading.Lock()
        self._last_status: dict[str, Any] | None = None
        self._removing = threading.Lock()
        self._removed = False  # whether the epochs have been removed, after the job's end
        self._keeper: StoreKeeper | None = None
        if options.store is not None:
            self._keeper = StoreKeeper(
                options.store, self._collected, self._store_says, self._store_has_lost, self._keeper_failed
            )
            self._keeper.program_bytes = options.program
        self._paradigms: Paradigms | None = None
        self._paradigms_plan = plan  # the plan that the paradigms know
        self._drivers = Drivers(carrier.driver_lives, options.hang_timeout_s)
        self._epochs_noted = False
        self._opening = Opening(
            plan,
            self._keeper,
            carrier.notes,
            again=carrier.again,
            resume=options.resume,
            savepoint=options.savepoint,
            program=options.program,
            cancelled=lambda: self._cancelling,
        )

    def start(self) -> None:
        """Begin the job."""
        threading.Thread(target=self._supervise, name="penstock-supervise", daemon=True).start()

    # --- asked by drivers ----------------------------------------------------------------------------------

    def outcome(self, driver: Driver) -> JobEnd:
        """Wait for the end of the job. The runner stays until the driver calls `release`, or dies."""
        self._drivers.came(driver)
        self.ended.wait()
        assert self._end is not None
        return self._end

    def ping(self, driver: Driver) -> None:
        """Show the driver that this process lives."""
        self._drivers.came(driver)

    def status(self) -> dict[str, Any]:
        """The job's status as plain data; the last one before the end once it has ended."""
        if self._last_status is not None:
            return self._last_status
        return self._build_status(_STATUS_S)

    def stop(self) -> None:
        """End the sources; the job finishes when what they read has gone through."""
        if self.ended.is_set():
            return
        self._stopping = True
        self._events.put(lambda host: host.stop(time.monotonic()))
        self._note("stop")

    def cancel(self) -> None:
        """End the job at once."""
        if self.ended.is_set():
            return
        self._cancelling = True
        self._events.put(lambda host: host.cancel(time.monotonic()))
        self._note("cancel")

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
            seen = min(seen, self._console_total)  # an earlier life of this job's host may have had more
            self._console_more.wait_for(lambda: self._console_total > seen or self.ended.is_set(), timeout)
            new = min(self._console_total - seen, len(self._console))
            return self._console_total, list(self._console)[len(self._console) - new :]

    def savepoint(self, url: str) -> None:
        """Save the state of all tasks in a place that the user has named. Waits until it is done."""
        if self._keeper is not None:  # else the JobHost says what is wrong
            Store.open(url, SAVEPOINT).check()
        self._ask(lambda host, number: host.savepoint(number, url, time.monotonic()))

    def rescale(self, operator: str, parallelism: int) -> None:
        """Give an operator another number of tasks. Waits until they run."""
        self._ask(lambda host, number: host.rescale(number, operator, parallelism, time.monotonic()))

    def migrate(self, tasks: dict[str, int]) -> None:
        """Move tasks, given by name, to other workers. Waits until they run there."""
        self._ask(lambda host, number: host.migrate(number, tasks, time.monotonic()))

    def _ask(self, ask: Callable[[JobHost, int], list[HostCommand]]) -> None:
        """Put a driver's request to the JobHost, and wait for its reply."""
        request = _Request()
        with self._lock:
            self._request_numbers += 1
            number = self._request_numbers
            self._requests[number] = request
        self._events.put(lambda host: ask(host, number))
        try:
            request.wait(self.ended)
        finally:
            with self._lock:
                self._requests.pop(number, None)

    def _reply(self, number: int, error: Exception | None) -> None:
        with self._lock:
            request = self._requests.get(number)
        if request is not None:
            request.end(error)

    # --- for whoever measures and decides beside the JobHost ------------------------------------------------

    def ask_all(self, method: str) -> dict[int, Any]:
        """The answers of the workers that answer within a few seconds, by worker."""
        return self._workers.ask(method, _CONTROL_S)

    def tell(
        self,
        worker: int,
        method: str,
        arguments: tuple[Any, ...],
        done: Callable[[], None],
        refused: Callable[[str | None], None],
    ) -> None:
        """Call a worker for the paradigm scheduler. Calls `done` when the worker has done it; `refused` with the
        worker's reason, or with None when the worker's process, or its run loop, has ended."""
        self._events.put(lambda host: host.call(worker, method, arguments, done, refused))

    @property
    def plan(self) -> Plan:
        """The job's present plan."""
        return self._first_plan if self._host is None else self._host.plan

    def placed(self) -> tuple[Plan, dict[int, int]]:
        """The job's present plan, and the worker of each task."""

        def look(host: JobHost) -> tuple[Plan, dict[int, int]]:
            return host.plan, host.placed

        return self._of_host(look)

    def better_placed(self, plan: Plan, placed: dict[int, int], wanted: dict[int, int]) -> None:
        """Tasks of this plan, placed like this, should run on other workers."""
        self._events.put(lambda host: host.better_placed(plan, placed, wanted, time.monotonic()))

    def _of_host(self, look: Callable[[JobHost], T]) -> T:
        """What `look` returns, called in the supervising thread. Raises JobError when the job has ended."""
        found: Future[T] = Future()

        def event(host: JobHost) -> list[HostCommand]:
            try:
                found.set_result(look(host))
            except Exception as error:
                found.set_exception(error)
            return []

        self._events.put(event)
        while True:
            with suppress(TimeoutError):
                return found.result(1.0)
            if self.ended.is_set() and not found.done():
                raise JobError("the job has ended")

    # --- told by workers -----------------------------------------------------------------------------------

    def report(self, worker: int, incarnation: int, number: int, item: Report) -> None:
        """Take report number `number` of a worker's process. Calls may come in any order, but one at a time."""
        for said in self._reports.take((worker, incarnation), number, item):
            if isinstance(said, EncodedSinkRecords):
                self._keep(said)
                continue
            for event in said:
                self._events.put(
                    lambda host, event=event: host.said(worker, incarnation, event, time.monotonic())  # type: ignore[misc]
                )

    def _keep(self, sent: EncodedSinkRecords) -> None:
        if sent.channel == "console":
            lines = decode(*sent.records)
            with self._console_more:
                self._console.extend(lines)
                self._console_total += len(lines)
                self._console_more.notify_all()
            return
        self._collected.take(sent)

    # --- the job's life ------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        end = self._until_the_end()
        if end.state == "FINISHED":
            self._anyway(self._build_last_status)
        self._anyway(self._end_workers)
        if self._keeper is not None:
            self._keeper.close()
        if end.state == "CANCELLED":
            self._note_the_end(end.state)  # a later life of this host must not go on from its epochs
        for lock in self._opening.locks:
            self._anyway(lock.close)
        if self.options.store is not None and end.state == "FAILED":
            self._anyway(self.options.store.release)  # else it is removed first
        self._end = end
        self._last_status = {
            **(self._last_status or self._last_built()),
            **self._epochs_status(),
            "state": end.state,
            "error": end.error,
        }
        self.ended.set()
        with self._console_more:
            self._console_more.notify_all()
        if self._paradigms is not None:
            self._anyway(self._paradigms.close)
        self._drivers.wait()
        self._anyway(self._remove_epochs)
        self._forget()
        self._anyway(self._carrier.leave)

    def _until_the_end(self) -> JobEnd:
        try:
            return self._open() or self._run()
        except NotEnoughResources as error:
            return JobEnd("CANCELLED") if self._cancelling else JobEnd("FAILED", str(error), kind="resources")
        except PenstockError as error:
            return JobEnd("FAILED", str(error))
        except Exception as error:  # a fault of Penstock's own: the job must end, and say what led there
            if self._host is not None:
                logger.error("job %s: what led to the end of its host:\n%s", self._name, self._host.story())
            return _end_by_own_fault(error)

    def _open(self) -> JobEnd | None:
        """Find out what to go on from, reserve room, and make the JobHost. Returns the job's end when it is over."""
        options, opening, carrier = self.options, self._opening, self._carrier
        if carrier.again:
            if carrier.notes.noted("stop"):
                self.stop()
            if carrier.notes.noted("cancel"):
                self.cancel()
        if not opening.lock_places():
            return JobEnd("CANCELLED")
        found = opening.find()
        if found is None:
            return JobEnd("CANCELLED")
        if isinstance(found, JobEnd):
            return found
        if found.manifest is not None and found.origin is None:
            self._note_epochs()
        workers, processes, placing = carrier.reserve(lambda: self._cancelling)
        self._processes = processes
        # Processes of the job's earlier life may still end: nothing that they say may be taken for the new ones'.
        again = found.manifest is not None or carrier.again
        self._host = JobHost(
            self._first_plan,
            HostOptions(
                workers,
                options.epochs,
                options.store is not None,
                options.attempts,
                options.hang_timeout_s,
                options.flow,
            ),
            placing,
            found,
            earlier=int(time.time() * 10) & 0x3FFF_FFFF if again else 0,
        )
        return None

    def _run(self) -> JobEnd:
        """Give the JobHost its events until the job is over."""
        host = self._host
        assert host is not None
        self._carry(host, host.start(time.monotonic()))
        threading.Thread(target=self._ping, name="penstock-ping", daemon=True).start()
        while host.end is None:
            due = host.due()
            timeout = None if due is None else max(0.0, due - time.monotonic())
            try:
                event = self._events.get(timeout=timeout)
            except queue.Empty:
                commands = host.tick(time.monotonic())
            else:
                commands = event(host)
            self._carry(host, commands)
            if self._waits and host.lives.all_have_started:
                self._waits = False
                self._paradigms = self._carrier.running(self)
            if host.plan is not self._paradigms_plan:
                self._paradigms_plan = host.plan
                if self._paradigms is not None:
                    self._paradigms.plan_changed(host.plan)
        return host.end

    def _anyway(self, step: Callable[[], None]) -> None:
        """Do a step of the job's end. The end goes on when the step fails, because drivers wait for it without a time
        limit."""
        try:
            step()
        except Exception:
            logger.exception("job %s: a step of its end failed; the end goes on", self._name)

    def _end_workers(self) -> None:
        """Cancel what still runs, give it a moment to close its files, and end every worker's process."""
        with suppress(PenstockError):
            self._workers.ask("cancel", _CANCEL_S)
        host = self._host
        until = time.monotonic() + _CANCEL_S
        while host is not None and host.running and time.monotonic() < until:
            try:
                self._events.get(timeout=max(0.0, until - time.monotonic()))(host)
            except queue.Empty:
                break
        self._workers.close()
        if host is not None:
            for worker in host.running:  # a carrier might give one that is stopped seconds to end by itself
                self._handles[worker].kill()
        for link in self._links.values():
            link.close()
        if self._processes is not None:
            self._processes.close()

    # --- carrying out commands -----------------------------------------------------------------------------

    def _carry(self, host: JobHost, commands: list[HostCommand]) -> None:
        begin_ns = time.time_ns() + _TRIGGER_AHEAD_NS
        for command in commands:
            if isinstance(command, Call):
                self._call(command, begin_ns)
            elif isinstance(command, StartProcess):
                packed = self._pack(command.plan, command.placed)
                threading.Thread(target=self._start, args=(command, packed), name="penstock-start", daemon=True).start()
            elif isinstance(command, KillProcess):
                self._handles[command.worker].kill()
            elif isinstance(command, TellAll):
                self._workers.standing_request(command.what)
            elif isinstance(command, SaveManifest):
                self._keep_store().do(partial(self._save, command.manifest))
            elif isinstance(command, FindOlder):
                self._keep_store().do(partial(self._find_older, command))
            elif isinstance(command, MakeRoom):
                self._keep_store().make_room()
            elif isinstance(command, UndoSinkRecords):
                self._collected.back(command.tasks, command.generation, command.there)
            elif isinstance(command, CommitSinkRecords):
                self._collected.commit(command.epoch)
            elif isinstance(command, CopySavepoint):
                self._keep_store().do(partial(self._copy, command))
            elif isinstance(command, Reply):
                self._reply(command.request, command.error)
            else:
                assert isinstance(command, EndJob)

    def _call(self, call: Call, begin_ns: int) -> None:
        worker, incarnation, number = call.worker, call.incarnation, call.number
        arguments = call.arguments
        if call.method == "trigger":
            epoch, parking = arguments
            arguments = (epoch, begin_ns, parking)

        def answered(answer: Any) -> None:
            self._events.put(lambda host: host.answered(worker, incarnation, number, answer, time.monotonic()))

        def refused(error: PenstockError) -> None:
            self._events.put(lambda host: host.refused(worker, incarnation, number, error, time.monotonic()))

        self._links[worker].send(call.method, arguments, answered, refused)

    def _pack(self, plan: Plan, placed: dict[int, int]) -> bytes:
        """What a worker's process loads: the plan, the worker of each task, and the store."""
        last = self._packed
        if last is None or last[0] is not plan or last[1] != placed:
            last = self._packed = (plan, dict(placed), self._program.dumps((plan, placed, self.options.store)))
        return last[2]

    def _start(self, command: StartProcess, packed: bytes) -> None:
        """Start a worker's process, and wait until its run has ended; in a thread of its own."""
        worker, incarnation = command.worker, command.incarnation
        assert self._processes is not None
        deadline = time.monotonic() + self.options.start_timeout_s
        try:
            handle = self._processes.start(worker, incarnation, command.ring_bytes, packed, deadline)
        except CannotStart as error:
            self._not_started(worker, incarnation, error)
            return
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self._not_started(worker, incarnation, CannotStart(text, "died"))
            return
        if self.ended.is_set():
            handle.kill()
            return
        watcher = Watcher(handle.info["blackbox"])
        self._events.put(lambda host: self._ready(host, worker, incarnation, handle, watcher))
        try:
            outcome = handle.run()
        except Exception as error:  # most of all ProcessDied: there is no process any more that could do anything
            reason = str(error) if isinstance(error, ProcessDied) else f"{type(error).__name__}: {error}"
            self._events.put(lambda host: self._died(host, worker, incarnation, reason, watcher))
            return
        self._events.put(
            lambda host: host.run_ended(worker, incarnation, outcome.error, outcome.operator, time.monotonic())
        )

    def _not_started(self, worker: int, incarnation: int, error: CannotStart) -> None:
        self._events.put(
            lambda host: host.process_not_started(
                worker, incarnation, str(error), time.monotonic(), kind=error.kind, operator=error.operator
            )
        )

    def _ready(
        self, host: JobHost, worker: int, incarnation: int, handle: WorkerHandle, watcher: Watcher
    ) -> list[HostCommand]:
        """A process is ready: connect to it."""
        self._handles[worker] = handle
        self._watchers[worker] = watcher
        self._links[worker] = Link(worker, handle.info["control"], self._program)
        self._workers.connect(worker, handle.info["control"], incarnation)
        return host.process_ready(worker, incarnation, handle.info, time.monotonic())

    def _died(self, host: JobHost, worker: int, incarnation: int, reason: str, watcher: Watcher) -> list[HostCommand]:
        self._links[worker].close()
        self._workers.disconnect(worker)
        return host.process_died(worker, incarnation, reason, watcher.read(), watcher.crash(), time.monotonic())

    def _ping(self) -> None:
        """Find workers that hang. A worker whose process is stopped, or does not come back from native code, is as lost
        as a dead one, but nobody reports it. The pings also show the workers that this process lives."""
        silence: SilenceDetector[tuple[int, int]] = SilenceDetector(self.options.hang_timeout_s)
        while not self.ended.wait(silence.period_s):
            for worker, incarnation in silence.look(self._workers.ping()):
                self._events.put(partial(self._hangs, worker=worker, incarnation=incarnation))

    def _hangs(self, host: JobHost, worker: int, incarnation: int) -> list[HostCommand]:
        stopped = is_stopped(self._handles[worker].info["pid"])
        return host.process_hangs(worker, incarnation, stopped, time.monotonic())

    # --- the store -------------------------------------------------------------------------------------------

    def _keep_store(self) -> StoreKeeper:
        assert self._keeper is not None, "the job has no epochs"
        return self._keeper

    def _store_says(self, trouble: str | None) -> None:
        self._events.put(lambda host: host.store_says(trouble))

    def _store_has_lost(self, names: frozenset[str], reason: str) -> None:
        self._events.put(lambda host: host.lost(names, reason, time.monotonic()))

    def _keeper_failed(self, error: Exception) -> None:
        end = _end_by_own_fault(error)
        self._events.put(lambda host: host.fail(end, time.monotonic()))

    def _fail(self, error: Exception) -> None:
        end = JobEnd("FAILED", str(error))
        self._events.put(lambda host: host.fail(end, time.monotonic()))

    def _save(self, manifest: Manifest) -> None:
        keeper, epoch = self._keep_store(), manifest.epoch
        try:
            if not keeper.save(manifest):
                return
        except SnapshotDamaged as error:
            reason = str(error)
            self._events.put(lambda host: host.not_saved(epoch, reason, time.monotonic()))
            return
        except StoreError as error:
            self._fail(error)
            return
        self._note_epochs()
        self._events.put(lambda host: host.saved(epoch, time.monotonic()))

        def replaced(task: int, old: list[Blob], new: Blob) -> None:
            self._events.put(lambda host: host.replaced(task, old, new, time.monotonic()))

        keeper.tidy(epoch, replaced)

    def _find_older(self, command: FindOlder) -> None:
        """Find an epoch that is not damaged, because the last complete one is."""
        keeper = self._keep_store()
        try:
            manifest = keeper.older(command.epoch, command.reason)
        except SnapshotDamaged as error:
            self._fail(error)
            return
        self._events.put(lambda host: host.found_older(manifest, command, time.monotonic()))

    def _copy(self, command: CopySavepoint) -> None:
        try:
            self._keep_store().savepoint(command.plan, command.place)
        except Exception as error:  # whatever it is, the driver is told
            self._reply(command.request, error)
        else:
            self._reply(command.request, None)

    def _note_the_end(self, state: str) -> None:
        if self.options.store is not None and self._opening.locks_store:
            try:
                self.options.store.end(state)
            except StoreError as error:
                logger.warning("job %s cannot note that it is %s: %s", self._name, state, error)

    def _remove_epochs(self) -> None:
        """Delete the epochs, which nobody needs any more. Before this, a later life of this host could still answer as
        this one does."""
        with self._removing:
            end, store = self._end, self.options.store
            if store is None or not self._opening.locks_store or self._removed or end is None or end.state == "FAILED":
                return
            self._note_the_end(end.state)
            if self._keeper is not None:
                self._keeper.wait(_KEEPER_END_S)  # it may be writing again what it misses
            try:
                store.destroy()
                store.release()
            except StoreError as error:
                logger.warning("the epochs of job %s stay in the store: %s", self._name, error)
            self._removed = True

    def _note(self, standing_request: Note) -> None:
        """Whoever has asked for it may go before it is done. Until this has returned, a later life is asked again."""
        if self.options.store is None:  # there is none
            return
        try:
            self._carrier.notes.note(standing_request)
        except Exception as error:  # whatever the memory of notes raises
            logger.warning("job %s cannot note that it is to %s: %s", self._name, standing_request, first_line(error))

    def _note_epochs(self) -> None:
        """There is a complete epoch. Sinks commit it only when that is noted: a later life of this host that finds no
        epoch in the store must know whether it may start from the beginning."""
        while not self._epochs_noted and not self.ended.is_set():
            try:
                self._carrier.notes.note("epochs")
                self._epochs_noted = True
            except Exception as error:  # the memory of notes does not answer
                logger.warning("job %s cannot note that an epoch is complete: %s", self._name, first_line(error))
                self.ended.wait(STORE_RETRY_S)

    def _forget(self) -> None:
        try:
            self._carrier.notes.forget()
        except Exception as error:  # the memory of notes does not answer
            logger.warning("notes on job %s stay: %s", self._name, first_line(error))

    # --- status ------------------------------------------------------------------------------------------------

    def _build_last_status(self) -> None:
        """Keep what a finished job has counted in the end, also when a worker is paused just now."""
        self._last_status = self._build_status(self.options.hang_timeout_s)

    def _build_status(self, patience_s: float) -> dict[str, Any]:
        # A worker that died just now, or is paused, answers nothing: the status shows what it last said.
        reports = list(self._workers.ask("status", patience_s).values())
        silent = self._workers.silent()
        host = self._host
        if host is None:
            with self._early_lock:
                status = self._early.build("STARTING", reports, time.time(), silent)
        elif host.end is not None:  # nobody else calls the JobHost any more
            status = host.build_status(reports, silent, time.time())
        else:
            try:
                status = self._of_host(lambda host: host.build_status(reports, silent, time.time()))
            except JobError:
                if self._last_status is None:
                    raise
                return self._last_status
        return {**status, **self._waiting(), **self._epochs_status(), **self._placement(), **self._spark()}

    def _waiting(self) -> dict[str, Any]:
        return {"waits_for": self._opening.waits_for or self._carrier.waits_for()} if self._waits else {}

    def _placement(self) -> dict[str, Any]:
        found = self._carrier.placement_status()
        return {} if found is None else {"placement": found}

    def _spark(self) -> dict[str, Any]:
        return {} if self._paradigms is None else {"dual": self._paradigms.status()}

    def _last_built(self) -> dict[str, Any]:
        if self._host is not None:
            return self._host.status.last()
        with self._early_lock:
            return self._early.last()

    def _epochs_status(self) -> dict[str, Any]:
        if self.options.store is None or self._host is None:
            return {}
        epochs = self._host.epochs_status(time.monotonic())
        return {
            "epochs": {
                **epochs,
                "damage": None if self._keeper is None else self._keeper.damage,
                "store": self.options.store.place,
            }
        }


def _end_by_own_fault(error: Exception) -> JobEnd:
    """The end of a job whose host has met an error that nobody has thought of."""
    return JobEnd("FAILED", f"JobMaster failed: {error}\n{''.join(traceback.format_exception(error))}")


def first_line(error: BaseException) -> str:
    """What went wrong, in a line, without the traceback of the place where it was noticed."""
    cause = getattr(error, "cause", None) or error
    text = str(cause).strip()
    return text.splitlines()[0] if text else type(cause).__name__


class _Request:
    """A driver's wait for the reply to its request."""

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._over = threading.Event()

    def end(self, error: Exception | None) -> None:
        """Note that it is done, or the error because of which it cannot be done."""
        self._error = error
        self._over.set()

    def wait(self, ended: threading.Event) -> None:
        """Wait until it is done. Raises the error because of which it could not be done."""
        while not self._over.wait(1.0):
            if ended.is_set():
                raise JobError("the job has ended")
        if self._error is not None:
            raise self._error
