"""JobRunner: runs a JobHost in a process, and gives it threads, a clock, sockets and the store. The JobMaster on Ray
has one JobRunner, and so has each local job.

One thread (`_supervise`) gives the JobHost its events, one after the other, and carries out its commands. Everything
that has to wait (for a worker's answer, for a new process, for the store) is done in other threads, which put events
into a queue. No other thread may call a method of the JobHost that changes it. A JobRunner decides nothing about the
job. It also carries the records of Collect and Console sinks to the driver.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from penstock.bridge.commands import SparkCommand
from penstock.host.carry.links import AllWorkers, Link
from penstock.host.carry.opening import STORE_RETRY_S, Opening, sinks_of
from penstock.host.carry.processes import CannotStart, ProcessDied, Processes, RelayStarter, WorkerHandle
from penstock.host.carry.relay_runner import RelayRunner
from penstock.host.carry.requests import (
    Cancel,
    LastStatus,
    Lines,
    Migrate,
    Outcome,
    Ping,
    Records,
    Release,
    Request,
    Rescale,
    Savepoint,
    Status,
    Stop,
    StopWithSavepoint,
    Traffic,
)
from penstock.host.carry.spark_runner import SparkRunner, StartBridge
from penstock.host.carry.store_keeper import NotSaved, StoreKeeper
from penstock.host.decide.alignment import ALIGN_S, Alignment, aligned_tasks
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
    KillRelay,
    MakeRoom,
    Reply,
    SaveManifest,
    StartProcess,
    StartRelay,
    TellAll,
    UndoSinkRecords,
)
from penstock.host.decide.job_host import HostOptions, JobHost
from penstock.host.decide.job_state import JobState
from penstock.host.decide.process_commands import (
    Align,
    Build,
    GetLoad,
    GetMarks,
    GetStatus,
    Halt,
    Question,
    TellRelay,
)
from penstock.host.decide.resequencer import Resequencer
from penstock.host.decide.status import StatusBuilder, hook_words, outage_words
from penstock.host.process.collected import Collected, EncodedSinkRecords
from penstock.host.process.hangs import SilenceDetector
from penstock.host.process.linger import Driver, Drivers
from penstock.host.process.machine import machine_id
from penstock.host.process.network import Network
from penstock.host.process.reporting import LinksReport, Report
from penstock.host.process.watched_process import LastWords
from penstock.host.process.worker_process import WorkerOptions
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
from penstock.runtime.program.graph import SAVEPOINT
from penstock.runtime.program.plan import Plan, packed_with_plan
from penstock.runtime.records.codec import decode
from penstock.runtime.records.pickling import Program
from penstock.runtime.status import EpochsStatus, JobStatus, PlacementStatus, RelayStatus
from penstock.runtime.storage import filesystems

if TYPE_CHECKING:
    from penstock.bridge.paradigm_scheduler import DualOptions, ParadigmScheduler
    from penstock.host.carry.notes import Note, Notes
    from penstock.host.decide.placing import Placing
    from penstock.runtime.program.flow import Flow

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How long workers may take to end after they were told to. A halted run loop ends within one step of each task, and
# after a cancel its sinks then show what is committed. A worker whose run loop does not end (because a user's function
# hangs) is killed.
_HALT_S = 5.0
# The longest wait for a worker's answer. A worker answers late when it is paused, or when a user's function or native
# code holds its interpreter.
_CONTROL_S = 5.0
# The longest wait for a worker's status. After it, the job's status shows the worker's last report, and for how long
# the worker has been silent.
_STATUS_S = 1.0
# The number of lines that Console sinks may be ahead of a driver that prints them, or that are kept when no driver
# does; the time between two looks whether such a driver lives; and the time in which the first one may begin to print.
_CONSOLE_LINES_MAX = 10_000
_CONSOLE_LOOK_S = 0.5
_CONSOLE_FIRST_S = 30.0
# The time between two looks at the spare processes, and the time that a job has run when it gets the first ones. To
# start a process takes half a second of a core, which shows in the latency of a job that uses all cores.
_SPARES_S = 1.0
_SPARES_AFTER_S = 10.0
# How long the store may take for a step of the job's end, and the store keeper to end before the job's epochs are
# deleted. A store that hangs, such as a network mount whose server is gone, must not keep the job from ending.
_KEEPER_END_S = 60.0
# After so long without an answer from the store, or in the close() of an operator, the status says so.
_STORE_SILENT_S = 10.0
_HOOK_S = 10.0


@dataclass(frozen=True)
class RunnerOptions:
    """The options of `run()` that concern every carrier."""

    workers: int
    start_timeout_s: float
    worker: WorkerOptions
    epochs: EpochOptions = field(default_factory=lambda: EpochOptions(interval_s=None))
    store: Store | None = None  # where epochs are saved; None: the job has no epochs
    flow: Flow | None = None  # of a job with epochs, so that it can be planned anew
    attempts: int = 3  # how often a record may kill its worker
    hang_timeout_s: float = 60.0  # the silence after which a process is killed
    resume: bool = False  # whether to continue from the store's last complete epoch
    savepoint: Store | None = None  # the store of the savepoint from which the job starts
    network: Network = field(default_factory=Network)  # used where processes do not share memory, or are not to
    spares: bool = True  # whether to keep a spare process on each node
    program: bytes | None = None  # the encoded flow and options, which `resume` reads from the store
    dual: DualOptions | None = None  # how the job uses Spark, or None when it does not


class Carrier(Protocol):
    """The process in which a JobRunner runs, as the runner needs it: the JobMaster, or the program of a local job."""

    #: Whether this process continues a job whose JobMaster has died.
    again: bool
    notes: Notes

    def reserve(self, cancelled: Callable[[], bool], known: str = "") -> tuple[int, Processes, Placing]:
        """Reserves room for the workers. `known`: what `Placing.known` has said of the job before. Returns the number
        of workers, what starts their processes, and what assigns tasks to them. Raises NotEnoughResources when there is
        no room, and any error when the job was cancelled."""
        ...

    def relays(self) -> RelayStarter | None:
        """Called after `reserve`. Returns what starts relays, or None when all workers share memory."""
        ...

    def waits_for(self) -> str:
        """Returns the thing for which a starting job waits, for the status."""
        ...

    def placement_status(self) -> PlacementStatus:
        """Returns the part of the status about placement."""
        ...

    def bridges(self) -> StartBridge | None:
        """Returns the starter of the process that holds Spark, or None for a job that does not use Spark."""
        ...

    def running(self, runner: JobRunner) -> None:
        """Called once, when the processes of all workers have started."""
        ...

    def migrating(self) -> None:
        """Called when a driver asks for tasks to be migrated. From then on no other task is moved without a request."""
        ...

    def traffic(self) -> list[dict[str, Any]]:
        """Returns the load and the traffic of tasks, as measured last. Raises JobError when they are not measured."""
        ...

    def driver_lives(self, driver: Driver) -> bool:
        """Returns whether a driver's process still exists."""
        ...

    def leave(self) -> None:
        """Called at the very end, when no driver needs the runner any more."""
        ...


class JobRunner:
    """Runs a JobHost; see the module's docstring. Every public method may be called from any thread."""

    def __init__(self, plan: Plan, options: RunnerOptions, carrier: Carrier, program: Program) -> None:
        """`program`: the program of the driver, from which the plan's classes come."""
        self.options = options
        self._name = plan.name
        self._first_plan = plan
        self._program = program
        self._carrier = carrier
        self._host: JobHost | None = None  # from `_open` on; only the supervising thread gives it events
        self._end: JobEnd | None = None
        self.ended = threading.Event()
        self._events: queue.SimpleQueue[Callable[[JobHost], list[HostCommand]]] = queue.SimpleQueue()
        self._stopping = False
        self._cancelling = False
        self._waits = True  # whether the processes of some workers have not started yet
        self._processes: Processes | None = None
        self._workers = AllWorkers()
        self._relays: RelayRunner | None = None
        # What belongs to the present process of each worker. Only the supervising thread changes the two.
        self._handles: dict[int, WorkerHandle] = {}
        self._links: dict[int, Link] = {}
        self._packed: tuple[Plan, dict[int, int], bytes] | None = None  # the last program that was packed for workers
        self._requests: dict[int, _Request] = {}
        self._request_numbers = 0
        self._lock = threading.Lock()  # of `_requests` and `_request_numbers`
        self._reports: Resequencer[tuple[int, int], Report] = Resequencer()  # used in `report` only
        self._collected = Collected(options.store is not None)
        self._console: deque[str] = deque()  # lines, the newest last
        self._printed: dict[Driver, int] = {}  # how many lines each driver that prints them has printed
        self._has_printed = False  # whether a driver has ever asked for lines
        self._console_total = 0
        self._console_more = threading.Condition()
        self._early = StatusBuilder(plan)  # builds the status while there is no JobHost
        self._early_lock = threading.Lock()
        self._last_status: JobStatus | None = None
        self._relays_said: dict[int, RelayStatus] = {}  # by number: what each relay has said last of itself
        self._removing = threading.Lock()
        self._removed = False  # whether the epochs have been removed, after the job's end
        self._keeper: StoreKeeper | None = None
        if options.store is not None:
            self._keeper = StoreKeeper(
                options.store,
                self._collected,
                self._store_says,
                self._store_has_lost,
                self._keeper_failed,
                classes_of=program,
            )
            self._keeper.program_bytes = options.program
        self._spark: SparkRunner | None = None
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
        """Starts the supervising thread, which runs the job to its end."""
        threading.Thread(target=self._supervise, name="penstock-supervise", daemon=True).start()

    # --- asked by drivers ----------------------------------------------------------------------------------

    def ask(self, request: Request[Any]) -> Any:
        """Returns the answer to a driver's request."""
        match request:
            case Status():
                return self.status()
            case Ping(driver):
                self._drivers.came(driver)
            case Outcome(driver):
                self._drivers.came(driver)
                self.ended.wait()
                return self._end
            case LastStatus():
                self.ended.wait()
                return self._last_status
            case Records(channel, last):
                if last:
                    self.ended.wait()
                return self._collected.get(channel)
            case Lines(driver, seen, timeout_s):
                return self._lines(driver, seen, timeout_s)
            case Stop():
                self._stop()
            case Cancel():
                self._cancel()
            case Savepoint(place, timeout_s):
                self._savepoint(place, timeout_s)
            case StopWithSavepoint(place):
                self._stop_with_savepoint(place)
            case Rescale(operator, parallelism):
                self._ask(lambda host, number: host.rescale(number, operator, parallelism, time.monotonic()))
            case Migrate(tasks):
                self._carrier.migrating()
                self._ask(lambda host, number: host.migrate(number, tasks, time.monotonic()))
            case Traffic():
                return self._carrier.traffic()
            case Release(driver):
                self._release(driver)
        return None

    def status(self) -> JobStatus:
        """Returns the job's status. After the job's end, this is the last status."""
        if self._last_status is not None:
            return self._last_status
        return self._build_status()

    def _stop(self) -> None:
        if self.ended.is_set():
            return
        self._stopping = True
        self._events.put(lambda host: host.stop(time.monotonic()))
        self._note("stop")

    def _cancel(self) -> None:
        if self.ended.is_set():
            return
        self._cancelling = True
        self._events.put(lambda host: host.cancel(time.monotonic()))
        self._note("cancel")

    def _release(self, driver: Driver) -> None:
        """A runner that was started again comes to the end of the job first: the driver must not go on before."""
        self.ended.wait()
        if self._drivers.has_all(driver):
            self._remove_epochs()
            self._drivers.wake()

    def _lines(self, driver: Driver, seen: int | None, timeout_s: float) -> tuple[int, list[str]]:
        with self._console_more:
            self._has_printed = True
            if seen is None:
                self._printed.pop(driver, None)
                self._console_more.notify_all()
                return self._console_total, []
            # A driver may have seen more lines than there are, from a JobMaster that has died.
            seen = self._printed[driver] = min(seen, self._console_total)
            self._console_more.notify_all()
            self._console_more.wait_for(lambda: self._console_total > seen or self.ended.is_set(), timeout_s)
            new = min(self._console_total - seen, len(self._console))
            return self._console_total, list(self._console)[len(self._console) - new :]

    def _savepoint(self, url: str, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        place_answers = threading.Event()

        def begin() -> None:
            try:
                if self._keeper is not None:  # else the JobHost refuses the request, because the job has no epochs
                    Store.open(url, SAVEPOINT).check()
            except Exception as error:  # the driver waits for a reply, whatever the error
                self._reply(number, error)
                return
            with self._lock:
                if number in self._requests:  # otherwise it was given up meanwhile
                    place_answers.set()
                    self._events.put(lambda host: host.savepoint(number, url, time.monotonic()))

        with self._request() as (number, request):
            # In a thread of its own, because the place may not answer.
            threading.Thread(target=begin, name="penstock-savepoint", daemon=True).start()
            if request.wait(self.ended, self._has_ended, deadline):
                return
            with self._lock:  # from here on it is not wanted any more, and no reply comes
                self._requests.pop(number, None)
            if request.wait(self.ended, self._has_ended, deadline):  # it has come just now
                return
            place = filesystems.named(url)
            waited_for = f"an answer of {place}" if not place_answers.is_set() else self._give_up(number, place)
        raise TimeoutError(
            f"job {self._name!r} has made no savepoint in {place} within {timeout_s:g} s. It waits for {waited_for}. "
            f"{self._what_is_wrong()}The savepoint is given up, and the job goes on."
        )

    def _stop_with_savepoint(self, url: str) -> None:

        def begin() -> None:
            try:
                if self._keeper is not None:
                    Store.open(url, SAVEPOINT).check()
            except Exception as error:  # the driver waits for a reply, whatever the error
                self._reply(number, error)
            else:
                self._events.put(lambda host: host.stop_with_savepoint(number, url, time.monotonic()))

        with self._request() as (number, request):
            threading.Thread(target=begin, name="penstock-savepoint", daemon=True).start()
            try:
                request.wait(self.ended, self._has_ended)
            except JobError:
                host = self._host  # an earlier call may have ended the job, and its driver may not have heard of it
                if not (self.ended.is_set() and host is not None and host.has_stopped_with(url)):
                    raise

    def _give_up(self, number: int, place: str) -> str:
        """Gives up a savepoint, and returns the thing for which it has waited."""
        try:
            # While the job starts, this event comes after the one that asks for the savepoint.
            waited_for = self._of_host(
                lambda host: host.give_up_savepoint(number), 0.0 if self._host is None else _CONTROL_S
            )
        except TimeoutError:
            return "the job to start" if self._host is None else "the job to end"
        return waited_for or (
            f"its files to be copied to {place}. Until the last of them is written, no epoch of the job completes, and "
            "what is there is no savepoint"
        )

    def _what_is_wrong(self) -> str:
        """Returns the troubles that the status shows, as sentences, or an empty text."""
        with suppress(PenstockError):  # the job has just ended
            status = self.status()
            failure, waits_for = status.epochs.last_failure, status.waits_for
            said = [failure, f"the job waits for {waits_for}" if waits_for else None]
            return "".join(f"The status says: {one.rstrip('.')}. " for one in said if one)
        return ""

    def _ask(self, ask: Callable[[JobHost, int], list[HostCommand]]) -> None:
        """Gives a driver's request to the JobHost, and waits for the JobHost's reply."""
        with self._request() as (number, request):
            self._events.put(lambda host: ask(host, number))
            request.wait(self.ended, self._has_ended)

    @contextmanager
    def _request(self) -> Iterator[tuple[int, _Request]]:
        """Yields a new request of a driver, with its number. A reply can come until the end of the block."""
        request = _Request()
        with self._lock:
            self._request_numbers += 1
            number = self._request_numbers
            self._requests[number] = request
        try:
            yield number, request
        finally:
            with self._lock:
                self._requests.pop(number, None)

    def _is_wanted(self, number: int) -> bool:
        """Returns whether a driver still waits for the reply to this request."""
        with self._lock:
            return number in self._requests

    def _has_ended(self) -> JobError:
        assert self._end is not None, "only called when the job has ended"
        return JobError(self._end.words(self._name))

    def _reply(self, number: int, error: Exception | None) -> None:
        with self._lock:
            request = self._requests.get(number)
            if request is not None:
                request.end(error)

    # --- for placement ---------------------------------------------------------------------------------------

    def ask_all(self, question: Question) -> dict[int, Any]:
        """Asks all workers. Returns the answers that come within a few seconds, by worker."""
        return self._workers.ask(question, _CONTROL_S)

    def tell_all(self, notice: Question) -> None:
        """Tells this to all workers that are not silent. Waits for nothing."""
        self._workers.tell(notice)

    @property
    def plan(self) -> Plan:
        """The plan of the tasks that run now."""
        return self._first_plan if self._host is None else self._host.plan

    def placed(self) -> tuple[Plan, dict[int, int]]:
        """Returns the plan of the tasks that run now, and the worker of each task."""

        def look(host: JobHost) -> tuple[Plan, dict[int, int]]:
            return host.plan, host.placed

        return self._of_host(look)

    def better_placed(self, plan: Plan, placed: dict[int, int], wanted: dict[int, int]) -> None:
        """Asks for tasks to be moved to the workers in `wanted`. The JobHost ignores this when the job's plan, or the
        workers of its tasks, are not `plan` and `placed` any more."""
        self._events.put(lambda host: host.better_placed(plan, placed, wanted, time.monotonic()))

    def _of_host(self, look: Callable[[JobHost], T], patience_s: float = math.inf) -> T:
        """Returns the result of `look`, which is called in the supervising thread. Raises JobError when the job has
        ended, and TimeoutError when that thread has not come to it within so many seconds; it still does when it
        can."""
        until = time.monotonic() + patience_s
        found: Future[T] = Future()

        def event(host: JobHost) -> list[HostCommand]:
            try:
                found.set_result(look(host))
            except Exception as error:
                found.set_exception(error)
            return []

        self._events.put(event)
        while not wait([found], min(1.0, max(0.0, until - time.monotonic()))).done:
            if self.ended.is_set() and not found.done():
                raise self._has_ended()
            if time.monotonic() >= until:
                raise TimeoutError("the job's host is busy")
        return found.result()

    # --- told by workers -----------------------------------------------------------------------------------

    def report(self, worker: int, incarnation: int, number: int, item: Report) -> None:
        """Takes report number `number` of a worker's process. Reports may come in any order, but only one thread at a
        time may call this."""
        for said in self._reports.take((worker, incarnation), number, item):
            if isinstance(said, EncodedSinkRecords):
                self._keep(said)
                continue
            if isinstance(said, LinksReport):
                links = said.links
                self._events.put(
                    lambda host, links=links: host.links_said(worker, incarnation, links, time.monotonic())  # type: ignore[misc]
                )
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
                # Reports are taken one after the other, so that the sinks of all workers wait.
                until = None if self._has_printed else time.monotonic() + _CONSOLE_FIRST_S
                while not self.ended.is_set() and (unprinted := self._unprinted(until)) > _CONSOLE_LINES_MAX:
                    self._console_more.wait(_CONSOLE_LOOK_S)
                if not self.ended.is_set():
                    for _ in range(len(self._console) - max(_CONSOLE_LINES_MAX, unprinted)):
                        self._console.popleft()
            return
        self._collected.take(sent)

    def _unprinted(self, until: float | None) -> int:
        """Returns how many lines the slowest driver that prints has yet to print; 0 when no driver prints. Before the
        first driver has asked, which it may do `until` this time, it has yet to print all lines."""
        if not self._has_printed:
            return self._console_total if until is not None and time.monotonic() < until else 0
        late = {d for d, seen in self._printed.items() if self._console_total - seen > _CONSOLE_LINES_MAX}
        for driver in late:
            if not self._drivers.lives(driver):
                del self._printed[driver]
        return max((self._console_total - seen for seen in self._printed.values()), default=0)

    # --- the job's life ------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        """Runs the job to its end, and then stays until no driver needs the runner. This is the supervising thread."""
        end = self._until_the_end()
        self._anyway(lambda: self._end_workers(end))
        if self._keeper is not None:
            self._keeper.close()
        if end.state == "CANCELLED":
            # A JobMaster that Ray starts again must not continue from these epochs.
            self._in_time("note that the job has ended", lambda: self._note_the_end(end.state))
            self._anyway(self._tell_of_hidden_files)
        for lock in self._opening.locks:
            self._anyway(lock.close)
        if self.options.store is not None and end.state == "FAILED":
            self._anyway(self._remove_vain_start)
            self._in_time(
                "release its lock", self.options.store.release
            )  # in the other states `_remove_epochs` does it
        self._end = end
        status = self._last_status or self._last_built()
        known = status.epochs if self._host is None else self._host.epochs_status(time.monotonic())
        self._last_status = status.changed(
            epochs=self._with_store(known), state=end.state, error=end.error, waits_for=None
        )
        self.ended.set()
        with self._console_more:
            self._console_more.notify_all()
        if self._spark is not None:
            self._anyway(self._spark.close)
        self._drivers.wait()
        self._anyway(self._remove_epochs)
        self._forget()
        self._anyway(self._carrier.leave)

    def _tell_of_hidden_files(self) -> None:
        """Warns of files that a worker could not name at a cancel. The folders are still locked for this job."""
        if self.options.store is None or self._host is None:  # nothing was hidden, or the job never ran
            return
        for sink in sinks_of(self.plan):
            if left := sink.left_by_cancel():
                logger.warning("job %s is cancelled. %s", self._name, left)

    def _until_the_end(self) -> JobEnd:
        """Opens the job and runs it. Returns its end, whatever error comes."""
        try:
            return self._open() or self._run()
        except NotEnoughResources as error:
            return JobEnd("CANCELLED") if self._cancelling else JobEnd("FAILED", str(error), kind="resources")
        except StoreError as error:
            return JobEnd("FAILED", str(error), kind="store")
        except PenstockError as error:
            return JobEnd("FAILED", str(error))
        except Exception as error:  # a fault of Penstock's own: the job must end, and tell what led to it
            if self._host is not None:
                logger.error("job %s failed by a fault of Penstock. Its story:\n%s", self._name, self._host.story())
            return _end_by_own_fault(error)

    def _open(self) -> JobEnd | None:
        """Finds the epoch or savepoint to start from, reserves room for the workers, and creates the JobHost. Returns
        the job's end if the job is over before it has begun, else None."""
        options, opening, carrier = self.options, self._opening, self._carrier
        if carrier.again:
            if carrier.notes.noted("ended"):
                return JobEnd("FINISHED")
            if carrier.notes.noted("stop"):
                self._stop()
            if carrier.notes.noted("cancel"):
                self._cancel()
        if not opening.lock_places():
            return JobEnd("CANCELLED")
        found = opening.find()
        if found is None:
            return JobEnd("CANCELLED")
        if isinstance(found, JobEnd):
            return found
        if found.manifest is not None and found.origin is None:
            self._note_epochs()
        known = "" if found.manifest is None else str(found.manifest.extra.get("load", ""))
        workers, processes, placing = carrier.reserve(lambda: self._cancelling, known)
        self._processes = processes
        starter = carrier.relays()
        if starter is not None:
            node_timeout_s = options.network.node_timeout_s
            self._relays = RelayRunner(starter, self._events.put, options.start_timeout_s, node_timeout_s)
        # Processes that an earlier JobMaster has started may still run. Incarnations therefore start at a number that
        # is higher than theirs, so that nothing that such a process reports is taken for the report of a new one.
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
                starter is not None,
                options.network.node_timeout_s,
                (options.network.first_port, options.network.last_port),
                machine_id(),
                carrier.again,
            ),
            placing,
            found,
            earlier=int(time.time() * 10) & 0x3FFF_FFFF if again else 0,
            schedule=self._prepare_for_spark(),
        )
        return None

    def _prepare_for_spark(self) -> Callable[[Plan], ParadigmScheduler] | None:
        """Returns the maker of the paradigm scheduler (docs/papers.md: D6), or None for a job without Spark."""
        dual, start, hang_timeout_s = self.options.dual, self._carrier.bridges(), self.options.hang_timeout_s
        if dual is None or start is None:
            return None
        from penstock.bridge.paradigm_scheduler import ParadigmScheduler  # loads Arrow

        self._spark = SparkRunner(self._name, dual.spark, start, lambda: self.ask_all(GetLoad()), self._events.put)
        return lambda plan: ParadigmScheduler(plan, dual, hang_timeout_s)

    def _run(self) -> JobEnd:
        """Gives the JobHost its events until the job is over."""
        host = self._host
        assert host is not None
        self._carry(host, host.start(time.monotonic()))
        threading.Thread(target=self._ping, name="penstock-ping", daemon=True).start()
        if self.options.store is not None and self.options.spares:
            threading.Thread(target=self._keep_spares, name="penstock-spares", daemon=True).start()
        if aligned_tasks(host.plan):
            threading.Thread(target=self._align_sources, name="penstock-align", daemon=True).start()
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
                self._carrier.running(self)
                if self._spark is not None:
                    self._spark.look()
        return host.end

    def _anyway(self, step: Callable[[], None]) -> None:
        """Does a step of the job's end. An error in the step must not keep the job from ending, because drivers wait
        for the end without a time limit."""
        try:
            step()
        except Exception:
            logger.exception("job %s: a step of ending the job failed; the other steps follow", self._name)

    def _in_time(self, what: str, step: Callable[[], None]) -> None:
        """Lets the store do a step of the job's end, and goes on when the store does not answer in time."""
        thread = threading.Thread(target=self._anyway, args=(step,), name="penstock-store-end", daemon=True)
        thread.start()
        thread.join(_KEEPER_END_S)
        if thread.is_alive():
            logger.warning(
                "job %s: the checkpoint store %s has not answered for %.0f s, and did not %s. Look whether it is up "
                "and can be reached from this node.",
                self._name,
                None if self.options.store is None else self.options.store.place,
                _KEEPER_END_S,
                what,
            )

    def _end_workers(self, end: JobEnd) -> None:
        """Halts the workers that still run, gives them a moment to close their files, and ends every worker's
        process."""
        host = self._host
        if host is not None and end.state != "CANCELLED":  # they were told to cancel, which has to come first
            with suppress(PenstockError):
                self._workers.ask(Halt(), _HALT_S, host.running)
        until = time.monotonic() + _HALT_S
        while host is not None and host.running and time.monotonic() < until:
            try:
                self._events.get(timeout=max(0.0, until - time.monotonic()))(host)
            except queue.Empty:
                break
        if host is not None and host.end is not None:
            self._anyway(self._build_last_status)
        self._workers.close()
        if host is not None:
            # `close` below may wait seconds for a process to end by itself, in vain for one that is stopped (SIGSTOP).
            for worker in host.running:
                self._handles[worker].kill()
        for link in self._links.values():
            link.close()
        if self._relays is not None:
            self._relays.close()
        if self._processes is not None:
            self._processes.close()

    # --- carrying out commands -----------------------------------------------------------------------------

    def _carry(self, host: JobHost, commands: list[HostCommand]) -> None:
        """Carries out the JobHost's commands in their order. Never waits: what takes time continues in another
        thread."""
        for command in commands:
            if isinstance(command, Call):
                self._call(command)
            elif isinstance(command, StartProcess):
                packed = self._pack(command.plan, command.placed)
                threading.Thread(target=self._start, args=(command, packed), name="penstock-start", daemon=True).start()
            elif isinstance(command, KillProcess):
                self._handles[command.worker].kill()
            elif isinstance(command, GiveUpMachine):
                assert self._processes is not None
                arguments = (command.machine, command.reason)
                target = self._processes.give_up
                threading.Thread(target=target, args=arguments, name="penstock-give-up", daemon=True).start()
            elif isinstance(command, TellAll):
                self._workers.standing_request(command.command)
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
            elif isinstance(command, CopySavepointAndStop):
                self._keep_store().do(partial(self._copy_and_stop, command))
            elif isinstance(command, Reply):
                self._reply(command.request, command.error)
            elif isinstance(command, StartRelay | KillRelay | TellRelay):
                assert self._relays is not None
                self._relays.carry_out(command)
            elif isinstance(command, SparkCommand):
                assert self._spark is not None
                self._spark.carry_out(command)
            else:
                assert isinstance(command, EndJob)

    def _call(self, call: Call) -> None:
        """Calls a worker. The answer becomes an event."""
        worker, incarnation, number, command = call.worker, call.incarnation, call.number, call.command
        if isinstance(command, Build):
            assert self._processes is not None
            command = replace(command, ahead_ns=self._processes.clocks())

        def answered(answer: Any) -> None:
            self._events.put(lambda host: host.answered(worker, incarnation, number, answer, time.monotonic()))

        def refused(error: PenstockError) -> None:
            self._events.put(lambda host: host.refused(worker, incarnation, number, error, time.monotonic()))

        self._links[worker].send(command, answered, refused)

    def _pack(self, plan: Plan, placed: dict[int, int]) -> bytes:
        """Returns the bytes that a worker's process loads: the plan, the worker of each task, and the store."""
        last = self._packed
        if last is None or last[0] is not plan or last[1] != placed:
            data = packed_with_plan(self._program, plan, (plan, placed, self.options.store))
            last = self._packed = (plan, dict(placed), data)
        return last[2]

    def _start(self, command: StartProcess, packed: bytes) -> None:
        """Starts a worker's process, and waits until its run has ended. Runs in a thread of its own."""
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
        self._events.put(lambda host: self._ready(host, worker, incarnation, handle))
        try:
            outcome = handle.run()
        except Exception as error:  # ProcessDied, or whatever else the carrier raises when the process is not there
            died = error if isinstance(error, ProcessDied) else ProcessDied(f"{type(error).__name__}: {error}")
            words = LastWords() if died.with_node else handle.process.last_words()
            self._events.put(lambda host: self._died(host, worker, incarnation, died, words))
            return
        self._events.put(
            lambda host: host.run_ended(
                worker, incarnation, outcome.error, outcome.operator, time.monotonic(), status=outcome.status
            )
        )

    def _not_started(self, worker: int, incarnation: int, error: CannotStart) -> None:
        self._events.put(
            lambda host: host.process_not_started(
                worker, incarnation, str(error), time.monotonic(), kind=error.kind, operator=error.operator
            )
        )

    def _ready(self, host: JobHost, worker: int, incarnation: int, handle: WorkerHandle) -> list[HostCommand]:
        """Connects to a worker's process that is ready, and tells the JobHost."""
        self._handles[worker] = handle
        self._links[worker] = Link(worker, handle.info["control"], self._program)
        self._workers.connect(worker, handle.info["control"], incarnation)
        return host.process_ready(worker, incarnation, handle.info, time.monotonic())

    def _died(
        self, host: JobHost, worker: int, incarnation: int, died: ProcessDied, words: LastWords | None
    ) -> list[HostCommand]:
        """Disconnects from a process that has died, and tells the JobHost, with the note of the black box."""
        self._links[worker].close()
        self._workers.disconnect(worker)
        note, crash, doing = words or LastWords()
        return host.process_died(
            worker,
            incarnation,
            str(died),
            note,
            crash,
            time.monotonic(),
            with_node=died.with_node,
            known=words is not None,
            doing=doing,
        )

    def _ping(self) -> None:
        """Pings the workers, and tells the JobHost about each worker that has been silent for too long. A worker whose
        process is stopped, or does not return from native code, is lost like a dead one, but no other sign tells so.
        The pings also show the workers that this process lives."""
        silence: SilenceDetector[tuple[int, int]] = SilenceDetector(self.options.hang_timeout_s)
        while not self.ended.wait(silence.period_s):
            for worker, incarnation in silence.look(self._workers.ping()):
                stopped = self._handles[worker].process.is_stopped()
                self._events.put(partial(self._hangs, worker=worker, incarnation=incarnation, stopped=stopped))

    def _align_sources(self) -> None:
        """Tells the sources how far all of them are, again and again."""
        alignment = Alignment()
        while not self.ended.wait(ALIGN_S):
            with suppress(PenstockError):  # a worker is dying, and its tasks begin elsewhere
                known, least = alignment.least(aligned_tasks(self.plan), self.ask_all(GetMarks()).values())
                if known:  # otherwise some source has no record yet, and the others wait for it
                    self.tell_all(Align(least))

    def _keep_spares(self) -> None:
        """Keeps spare processes, from which dead workers are replaced at once. A job that has run for a moment only has
        none, so that short jobs do not pay for them."""
        running_s = 0.0
        while not self.ended.wait(_SPARES_S):
            host = self._host
            assert host is not None
            running_s = running_s + _SPARES_S if host.life.state == JobState.RUNNING else 0.0
            if running_s < _SPARES_AFTER_S or self._packed is None or host.end is not None:
                continue
            assert self._processes is not None
            try:
                self._processes.keep_spares(self._packed[2])
            except Exception as error:  # the job runs without spare processes too
                logger.warning("job %s: no spare processes can be kept: %s", self._name, first_line(error))
                return

    def _hangs(self, host: JobHost, worker: int, incarnation: int, stopped: bool) -> list[HostCommand]:
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
        except (SnapshotDamaged, NotSaved) as error:
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
        """Looks for an older epoch that can be read, because the last complete one is damaged. Tells the JobHost."""
        keeper = self._keep_store()
        try:
            manifest = keeper.older(command.epoch, command.reason)
        except SnapshotDamaged as error:
            self._fail(error)
            return
        self._events.put(lambda host: host.found_older(manifest, command, time.monotonic()))

    def _copy(self, command: CopySavepoint) -> None:
        """Copies an epoch to the place of a savepoint, and replies to the driver."""
        try:
            self._keep_store().savepoint(command.plan, command.place, lambda: self._is_wanted(command.request))
        except Exception as error:  # the driver waits for a reply, whatever the error
            self._reply(command.request, error)
        else:
            self._reply(command.request, None)

    def _copy_and_stop(self, command: CopySavepointAndStop) -> None:
        """Copies the epoch at which the job is to end, and tells the JobHost."""
        generation = command.generation
        try:
            self._keep_store().savepoint(command.plan, command.place)
        except Exception as error:  # the job continues, whatever the error
            failed = error
            self._events.put(lambda host: host.not_copied(generation, failed, time.monotonic()))
        else:
            self._events.put(lambda host: host.copied(generation, time.monotonic()))

    def _note_the_end(self, state: str) -> None:
        if self.options.store is not None and self._opening.locks_store:
            try:
                self.options.store.end(state)
            except StoreError as error:
                logger.warning("job %s: the store cannot note that the job is %s: %s", self._name, state, error)

    def _remove_epochs(self) -> None:
        """Deletes the epochs of a job that did not fail. This must come after drivers have what they want: if this
        process dies earlier, a JobMaster that Ray starts again needs the epochs to answer in its stead."""
        with self._removing:
            end, store = self._end, self.options.store
            if store is None or not self._opening.locks_store or self._removed or end is None or end.state == "FAILED":
                return
            self._note("ended")
            self._in_time("note that the job has ended", lambda: self._note_the_end(end.state))
            if self._keeper is not None:
                self._keeper.wait(_KEEPER_END_S)  # it may still be writing
            self._in_time("delete the job's epochs", lambda: self._destroy_epochs(store))
            self._removed = True

    def _destroy_epochs(self, store: Store) -> None:
        try:
            store.destroy()
            store.release()
        except StoreError as error:
            logger.warning("job %s: its epochs could not be deleted, and stay in the store: %s", self._name, error)

    def _remove_vain_start(self) -> None:
        """Deletes the files that a job that has failed before its first epoch has written to its store, because no job
        can continue from them. The store must still be locked, so that the files are not those of the next job."""
        store = self.options.store
        if store is None or not self._opening.begins_anew or self._epochs_noted:
            return
        if self._keeper is not None:
            self._keeper.wait(_KEEPER_END_S)  # it may still be writing

        def destroy() -> None:
            if not store.epochs():
                store.destroy()

        self._in_time("delete what the job has begun to write", destroy)

    def _note(self, what: Note) -> None:
        """Makes a note where a JobMaster that Ray starts again finds it. A driver that has asked for something may have
        gone by then. Until this has returned, the driver repeats its request when the JobMaster dies."""
        if self.options.store is None:  # the job ends with its JobMaster
            return
        try:
            self._carrier.notes.note(what)
        except Exception as error:  # whatever the carrier's store of notes raises
            logger.warning(
                "job %s: the note %r could not be made, and is missing if the JobMaster dies now: %s",
                self._name,
                what,
                first_line(error),
            )

    def _note_epochs(self) -> None:
        """Notes that the job has a complete epoch, and tries until it is noted. Sinks commit the first epoch only after
        this: a JobMaster that Ray starts again, and that finds no epoch in the store, may start from the beginning only
        when nothing has been committed."""
        while not self._epochs_noted and not self.ended.is_set():
            try:
                self._carrier.notes.note("epochs")
                self._epochs_noted = True
            except Exception as error:  # whatever the carrier's store of notes raises
                logger.warning(
                    "job %s: its first complete epoch cannot be noted, so sinks do not commit; trying again: %s",
                    self._name,
                    first_line(error),
                )
                self.ended.wait(STORE_RETRY_S)

    def _forget(self) -> None:
        """Deletes the notes on this job."""
        try:
            self._carrier.notes.forget()
        except Exception as error:  # whatever the carrier's store of notes raises
            logger.warning("job %s: its notes could not be deleted: %s", self._name, first_line(error))

    # --- status ------------------------------------------------------------------------------------------------

    def _build_last_status(self) -> None:
        """Keeps the status with the final counts of the job."""
        self._last_status = self._build_status()

    def _build_status(self) -> JobStatus:
        # A worker that is paused, or died just now, does not answer. The status then shows its last report. One whose
        # run has ended has said its last counts, and may be dead since.
        host = self._host
        reports = [] if host is None else list(self._workers.ask(GetStatus(), _STATUS_S, host.running).values())
        silent = self._workers.silent()
        if host is None:
            with self._early_lock:
                status = self._early.build("STARTING", reports, time.time(), silent)
        elif host.end is not None:  # the supervising thread gives the JobHost no more events
            status = host.build_status(reports, silent, time.time(), time.monotonic())
        else:
            try:
                status = self._of_host(lambda host: host.build_status(reports, silent, time.time(), time.monotonic()))
            except JobError:
                if self._last_status is None:
                    raise
                return self._last_status
        return status.changed(
            waits_for=self._waiting() or outage_words(reports) or hook_words(reports, status.workers, _HOOK_S),
            epochs=self._with_store(status.epochs),
            placement=self._carrier.placement_status(),
            relays=self._relays_status(status.relays),
            spares=0 if self._processes is None else self._processes.spares(),
        )

    def _relays_status(self, known: list[RelayStatus]) -> list[RelayStatus]:
        """Returns the relays, each with its own last report."""
        said = self._relays.status(_STATUS_S) if self._relays is not None and known else {}
        said = {**self._relays_said, **said}
        self._relays_said = {relay.number: said.get(relay.number, relay) for relay in known}
        return [
            self._relays_said[relay.number].changed(node_id=relay.node_id, state=relay.state, pid=relay.pid)
            for relay in known
        ]

    def _waiting(self) -> str | None:
        return self._opening.waits_for or self._carrier.waits_for() if self._waits else None

    def _last_built(self) -> JobStatus:
        if self._host is not None:
            return self._host.status.last()
        with self._early_lock:
            return self._early.last()

    def _with_store(self, known: EpochsStatus) -> EpochsStatus:
        """Returns the status of epochs (`known`), with the facts that the store keeper adds."""
        if self.options.store is None:
            return known
        silent_s = 0.0 if self._keeper is None else self._keeper.silent_s()
        if silent_s > _STORE_SILENT_S:
            known = known.changed(
                last_failure=f"the checkpoint store {self.options.store.place} has not answered for {silent_s:.0f} s, "
                "and no epoch completes until it does. Look whether it is up and can be reached from this node."
            )
        damage = None if self._keeper is None else self._keeper.damage
        return known.changed(damage=damage, store=self.options.store.place)


def _end_by_own_fault(error: Exception) -> JobEnd:
    """Returns the end of a job that an unexpected error in its host has ended."""
    return JobEnd(
        "FAILED",
        f"the job's host failed, by a fault of Penstock's own: {error}\n{''.join(traceback.format_exception(error))}",
    )


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or of its cause's text, without tracebacks."""
    cause = getattr(error, "cause", None) or error
    text = str(cause).strip()
    return text.splitlines()[0] if text else type(cause).__name__


class _Request:
    """A driver's wait for the reply to its request."""

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._over = threading.Event()

    def end(self, error: Exception | None) -> None:
        """Ends the wait, with an error if the request could not be fulfilled."""
        self._error = error
        self._over.set()

    def wait(self, ended: threading.Event, error: Callable[[], Exception], deadline: float | None = None) -> bool:
        """Waits for the reply. Raises the reply's error, if there is one, and `error()` when the job has ended. Returns
        whether there was a reply before the deadline (None: there is none)."""
        until = math.inf if deadline is None else deadline
        while not self._over.wait(min(1.0, max(0.0, until - time.monotonic()))):
            if ended.is_set():
                raise error()
            if time.monotonic() >= until:
                return False
        if self._error is not None:
            raise self._error
        return True
