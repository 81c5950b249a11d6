"""JobRunner: runs a JobHost in a process, and gives it threads, a clock, sockets and the store. The JobMaster on Ray
has one JobRunner, and so has each local job.

One thread (`_supervise`) gives the JobHost its events, one after the other, and carries out its commands. Everything
that has to wait (for a worker's answer, for a new process, for the store) is done in other threads, which put events
into a queue. No other thread may call a method of the JobHost that changes it. A JobRunner decides nothing about the
job. It also carries the records of Collect and Console sinks to the driver.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from penstock.bridge.commands import SparkCommand
from penstock.host.carry import requests
from penstock.host.carry.carrier import Carrier
from penstock.host.carry.carrier_options import CarrierOptions
from penstock.host.carry.console import Console
from penstock.host.carry.event_queue import EventQueue
from penstock.host.carry.last_steps import anyway
from penstock.host.carry.links import AllWorkers
from penstock.host.carry.opening import Opening, sinks_of
from penstock.host.carry.pending_requests import PendingRequests
from penstock.host.carry.relay_runner import RelayRunner
from penstock.host.carry.requests import Request
from penstock.host.carry.savepoints import Savepoints
from penstock.host.carry.spark_runner import SparkRunner
from penstock.host.carry.store_runner import StoreCommand, StoreRunner
from penstock.host.carry.worker_runner import WorkerCommand, WorkerRunner
from penstock.host.decide.alignment import ALIGN_S, Alignment, aligned_tasks
from penstock.host.decide.commands import (
    CommitSinkRecords,
    EndJob,
    HostCommand,
    JobEnd,
    KillRelay,
    Reply,
    StartRelay,
    TellAll,
    UndoSinkRecords,
)
from penstock.host.decide.job_host import HostOptions, JobHost
from penstock.host.decide.job_state import JobState
from penstock.host.decide.process_commands import Align, GetLoad, GetMarks, GetStatus, Halt, Question, TellRelay
from penstock.host.decide.resequencer import Resequencer
from penstock.host.decide.status import StatusBuilder, hook_words, stall_words, stalls_of
from penstock.host.process.collected import Collected, EncodedSinkRecords
from penstock.host.process.linger import Driver, Drivers
from penstock.host.process.machine import machine_id
from penstock.host.process.reporting import LinksReport, Report
from penstock.runtime.epochs.restore import cannot_take_back
from penstock.runtime.errors import JobError, NotEnoughResources, PenstockError, StoreError
from penstock.runtime.program.plan import Plan
from penstock.runtime.records.codec import decode
from penstock.runtime.records.pickling import Program
from penstock.runtime.status import EpochsStatus, JobStatus, RelayStatus

if TYPE_CHECKING:
    from penstock.bridge.paradigm_scheduler import ParadigmScheduler

logger = logging.getLogger(__name__)

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
# After so long in the close() of an operator, the status says so.
_HOOK_S = 10.0


class JobRunner:
    """Runs a JobHost; see the module's docstring. Every public method may be called from any thread."""

    def __init__(self, plan: Plan, options: CarrierOptions, carrier: Carrier, program: Program) -> None:
        """`program`: the program of the driver, from which the plan's classes come."""
        self.options = options
        self._name = plan.name
        self._first_plan = plan
        self._program = program
        self._carrier = carrier
        self._host: JobHost | None = None  # from `_open` on; only the supervising thread gives it events
        self._events = EventQueue(plan.name)
        self.ended = self._events.ended
        self._cancelling = False
        self._waits = True  # whether the processes of some workers have not started yet
        self._workers = AllWorkers()
        self._processes: WorkerRunner | None = None
        self._relays: RelayRunner | None = None
        self._spark: SparkRunner | None = None
        self._reports: Resequencer[tuple[int, int], Report] = Resequencer()  # used in `report` only
        self._collected = Collected(options.store is not None)
        self._drivers = Drivers(carrier.driver_lives, options.hang_timeout_s)
        self._console = Console(self._drivers, self.ended)
        self._early = StatusBuilder(plan)  # builds the status while there is no JobHost
        self._early_lock = threading.Lock()
        self._last_status: JobStatus | None = None
        self._relays_said: dict[int, RelayStatus] = {}  # by number: what each relay has said last of itself
        self._requests = PendingRequests(self._events)
        self._store: StoreRunner | None = None
        if options.store is not None:
            self._store = StoreRunner(
                options.store,
                self._collected,
                carrier.notes,
                self._events,
                self._requests,
                program,
                options.program,
                cannot_take_back(plan),
            )
        has_store = self._store is not None
        self._savepoints = Savepoints(has_store, self._events, self._requests, lambda: self._host, self._what_is_wrong)
        self._opening = Opening(
            plan,
            self._store,
            again=carrier.again,
            resume=options.resume,
            savepoint=options.savepoint,
            cancelled=lambda: self._cancelling,
        )

    def start(self) -> None:
        """Starts the supervising thread, which runs the job to its end."""
        threading.Thread(target=self._supervise, name="penstock-supervise", daemon=True).start()

    # --- asked by drivers ----------------------------------------------------------------------------------

    def ask(self, request: Request[Any]) -> Any:
        """Returns the answer to a driver's request."""
        match request:
            case requests.Status():
                return self.status()
            case requests.Ping(driver):
                self._drivers.came(driver)
            case requests.Outcome(driver):
                self._drivers.came(driver)
                self.ended.wait()
                return self._events.end
            case requests.LastStatus():
                self.ended.wait()
                return self._last_status
            case requests.Records(channel, last):
                if last:
                    self.ended.wait()
                return self._collected.get(channel)
            case requests.Lines(driver, seen, timeout_s):
                return self._console.lines(driver, seen, timeout_s)
            case requests.Stop():
                self._stop()
            case requests.Cancel():
                self._cancel()
            case requests.Savepoint(place, timeout_s):
                self._savepoints.make(place, timeout_s)
            case requests.StopWithSavepoint(place):
                self._savepoints.stop_with(place)
            case requests.Rescale(operator, parallelism):
                self._requests.ask(lambda requests, number: requests.rescale(number, operator, parallelism))
            case requests.Migrate(tasks):
                self._carrier.migrating()
                self._requests.ask(lambda requests, number: requests.migrate(number, tasks))
            case requests.Traffic():
                return self._carrier.traffic()
            case requests.Release(driver):
                self._release(driver)
        return None

    def status(self) -> JobStatus:
        """Returns the job's status. After the job's end, this is the last status."""
        if self._last_status is not None:
            return self._last_status
        return self._build_status()

    def _stop(self) -> None:
        if not self.ended.is_set():
            self._events.put(lambda host: host.stop(time.monotonic()))
            if self._store is not None:  # otherwise the job ends with its JobMaster
                self._store.note("stop")

    def _cancel(self) -> None:
        if not self.ended.is_set():
            self._cancelling = True
            self._events.put(lambda host: host.cancel(time.monotonic()))
            if self._store is not None:
                self._store.note("cancel")

    def _release(self, driver: Driver) -> None:
        """A runner that was started again comes to the end of the job first: the driver must not go on before."""
        self.ended.wait()
        if self._drivers.has_all(driver):
            self._remove_epochs()
            self._drivers.wake()

    def _remove_epochs(self) -> None:
        if self._store is not None and self._events.end is not None:
            self._store.remove_epochs(self._events.end)

    def _what_is_wrong(self) -> str:
        """Returns the troubles that the status shows, as sentences, or an empty text."""
        with suppress(PenstockError):  # the job has just ended
            status = self.status()
            failure, waits_for = status.epochs.last_failure, status.waits_for
            said = [failure, f"the job waits for {waits_for}" if waits_for else None]
            return "".join(f"The status says: {one.rstrip('.')}. " for one in said if one)
        return ""

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
        return self._first_plan if self._host is None else self._host.present.plan

    def placed(self) -> tuple[Plan, dict[int, int]]:
        """Returns the plan of the tasks that run now, and the worker of each task."""
        return self._events.look(lambda host: (host.present.plan, host.present.placed))

    def better_placed(self, plan: Plan, placed: dict[int, int], wanted: dict[int, int]) -> None:
        """Asks for tasks to be moved to the workers in `wanted`. The JobHost ignores this when the job's plan, or the
        workers of its tasks, are not `plan` and `placed` any more."""
        self._events.tell_requests(lambda requests, _: requests.better_placed(plan, placed, wanted))

    # --- told by workers -----------------------------------------------------------------------------------

    def report(self, worker: int, incarnation: int, number: int, item: Report) -> None:
        """Takes report number `number` of a worker's process. Reports may come in any order, but only one thread at a
        time may call this."""
        for said in self._reports.take((worker, incarnation), number, item):
            if isinstance(said, EncodedSinkRecords):
                if said.channel == "console":
                    # Reports are taken one after the other, so that the sinks of all workers wait.
                    self._console.take(decode(*said.records))
                else:
                    self._collected.take(said)
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

    # --- the job's life ------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        """Runs the job to its end, and then stays until no driver needs the runner. This is the supervising thread."""
        end = self._until_the_end()
        store = self._store
        anyway(self._name, lambda: self._end_workers(end))
        if store is not None:
            store.keeper.close()
        if end.state == "CANCELLED":
            if store is not None:
                store.note_the_end(end.state)
            anyway(self._name, self._tell_of_hidden_files)
        for lock in self._opening.locks:
            anyway(self._name, lock.close)
        if store is not None and end.state == "FAILED":
            store.leave_failed()
        status = self._last_status or self._last_built()
        known = status.epochs if self._host is None else self._host.epochs_status(time.monotonic())
        self._last_status = status.changed(
            epochs=self._with_store(known), state=end.state, error=end.error, waits_for=None, stalled=[]
        )
        self._events.finish(end)
        self._console.wake()
        if self._spark is not None:
            anyway(self._name, self._spark.close)
        self._drivers.wait()
        anyway(self._name, self._remove_epochs)
        if store is not None:
            store.forget()
        anyway(self._name, self._carrier.leave)

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
            return JobEnd.by_own_fault(error)

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
        if self._store is not None and found.manifest is not None and found.origin is None:
            self._store.note_epochs()
        known = "" if found.manifest is None else str(found.manifest.extra.get("load", ""))
        workers, processes, placing = carrier.reserve(lambda: self._cancelling, known)
        self._processes = WorkerRunner(processes, self._workers, self._events, options, self._program)
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
        host, processes = self._host, self._processes
        assert host is not None
        assert processes is not None
        self._carry(host, host.start(time.monotonic()))
        threading.Thread(target=processes.watch, name="penstock-ping", daemon=True).start()
        if self.options.store is not None and self.options.spares:
            arguments = (lambda: host.life.state == JobState.RUNNING,)
            threading.Thread(target=processes.keep_spares, args=arguments, name="penstock-spares", daemon=True).start()
        if aligned_tasks(host.present.plan):
            threading.Thread(target=self._align_sources, name="penstock-align", daemon=True).start()
        while host.end is None:
            due = host.due()
            event = self._events.get(None if due is None else max(0.0, due - time.monotonic()))
            commands = host.tick(time.monotonic()) if event is None else event(host)
            self._carry(host, commands)
            if self._waits and host.lives.all_have_started:
                self._waits = False
                self._carrier.running(self)
                if self._spark is not None:
                    self._spark.look()
        return host.end

    def _end_workers(self, end: JobEnd) -> None:
        """Halts the workers that still run, gives them a moment to close their files, and ends every worker's
        process."""
        host = self._host
        if host is not None and end.state != "CANCELLED":  # they were told to cancel, which has to come first
            with suppress(PenstockError):
                self._workers.ask(Halt(), _HALT_S, host.lives.running)
        until = time.monotonic() + _HALT_S
        while host is not None and host.lives.running and (left_s := until - time.monotonic()) > 0:
            if (event := self._events.get(left_s)) is not None:
                event(host)
        if host is not None and host.end is not None:
            anyway(self._name, self._build_last_status)
        if self._relays is not None:
            self._relays.close()
        if self._processes is not None:
            self._processes.close(() if host is None else host.lives.running)

    # --- carrying out commands -----------------------------------------------------------------------------

    def _carry(self, host: JobHost, commands: list[HostCommand]) -> None:
        """Carries out the JobHost's commands in their order. Never waits: what takes time continues in another
        thread."""
        for command in commands:
            if isinstance(command, WorkerCommand):
                assert self._processes is not None
                self._processes.carry_out(command)
            elif isinstance(command, TellAll):
                self._workers.standing_request(command.command)
            elif isinstance(command, StoreCommand):
                assert self._store is not None, "the job has no epochs"
                self._store.carry_out(command)
            elif isinstance(command, UndoSinkRecords):
                self._collected.back(command.tasks, command.generation, command.there)
            elif isinstance(command, CommitSinkRecords):
                self._collected.commit(command.epoch)
            elif isinstance(command, Reply):
                self._requests.reply(command.request, command.error)
            elif isinstance(command, StartRelay | KillRelay | TellRelay):
                assert self._relays is not None
                self._relays.carry_out(command)
            elif isinstance(command, SparkCommand):
                assert self._spark is not None
                self._spark.carry_out(command)
            else:
                assert isinstance(command, EndJob)

    def _align_sources(self) -> None:
        """Tells the sources how far all of them are, again and again."""
        alignment = Alignment()
        while not self.ended.wait(ALIGN_S):
            with suppress(PenstockError):  # a worker is dying, and its tasks begin elsewhere
                known, least = alignment.least(aligned_tasks(self.plan), self.ask_all(GetMarks()).values())
                if known:  # otherwise some source has no record yet, and the others wait for it
                    self.tell_all(Align(least))

    # --- status ------------------------------------------------------------------------------------------------

    def _build_last_status(self) -> None:
        """Keeps the status with the final counts of the job."""
        self._last_status = self._build_status()

    def _build_status(self) -> JobStatus:
        # A worker that is paused, or died just now, does not answer. The status then shows its last report. One whose
        # run has ended has said its last counts, and may be dead since.
        host = self._host
        reports = [] if host is None else list(self._workers.ask(GetStatus(), _STATUS_S, host.lives.running).values())
        silent = self._workers.silent()
        if host is None:
            with self._early_lock:
                status = self._early.build("STARTING", reports, time.time(), silent)
        elif host.end is not None:  # the supervising thread gives the JobHost no more events
            status = host.build_status(reports, silent, time.time(), time.monotonic())
        else:
            try:
                status = self._events.look(
                    lambda host: host.build_status(reports, silent, time.time(), time.monotonic())
                )
            except JobError:
                if self._last_status is None:
                    raise
                return self._last_status
        stalled = stalls_of(reports)
        return status.changed(
            state="STALLED" if stalled and status.state == JobState.RUNNING else status.state,
            stalled=stalled,
            waits_for=self._waiting() or stall_words(stalled) or hook_words(reports, status.workers, _HOOK_S),
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
        return known if self._store is None else self._store.status(known)
