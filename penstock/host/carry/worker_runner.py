"""WorkerRunner: carries out a JobHost's commands about workers: starts their processes, calls them, and looks whether
they answer. It decides nothing.

What happens to a process becomes an event of the JobHost. The commands come from the supervising thread of the
JobRunner, and everything that waits is done in threads.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from penstock.host.carry.carrier_options import CarrierOptions
from penstock.host.carry.event_queue import EventQueue
from penstock.host.carry.links import AllWorkers, Link
from penstock.host.carry.processes import CannotStart, ProcessDied, Processes, WorkerHandle
from penstock.host.decide.commands import Call, GiveUpMachine, HostCommand, KillProcess, StartProcess
from penstock.host.decide.death import Death
from penstock.host.decide.job_host import JobHost
from penstock.host.decide.process_commands import Build
from penstock.host.process.hangs import SilenceDetector
from penstock.host.process.watched_process import LastWords
from penstock.runtime.epochs.store import Store
from penstock.runtime.errors import PenstockError, first_line
from penstock.runtime.program.plan import Plan, packed_with_plan
from penstock.runtime.records.pickling import Program

logger = logging.getLogger(__name__)

WorkerCommand = Call | StartProcess | KillProcess | GiveUpMachine

# The time between two looks at the spare processes, and the time that a job has run when it gets the first ones. To
# start a process takes half a second of a core, which shows in the latency of a job that uses all cores.
_SPARES_S = 1.0
_SPARES_AFTER_S = 10.0


class WorkerRunner:
    """See the module's docstring. `workers`: the questions to all workers, which this class connects and disconnects.
    `program`: of the driver, from which the plan's classes come."""

    def __init__(
        self,
        processes: Processes,
        workers: AllWorkers,
        events: EventQueue,
        options: CarrierOptions,
        program: Program,
    ) -> None:
        self._job = events.job
        self._processes = processes
        self._workers = workers
        self._events = events
        self._options = options
        self._program = program
        # What belongs to the present process of each worker. Only the supervising thread changes the two.
        self._handles: dict[int, WorkerHandle] = {}
        self._links: dict[int, Link] = {}
        self._run_name = _run_name(options.store)
        self._packed: tuple[Plan, dict[int, int], bytes] | None = None  # the last program that was packed for workers

    def carry_out(self, command: WorkerCommand) -> None:
        """Carries out a command. Waits for nothing."""
        if isinstance(command, Call):
            self._call(command)
        elif isinstance(command, StartProcess):
            packed = self._pack(command.plan, command.placed)
            threading.Thread(target=self._start, args=(command, packed), name="penstock-start", daemon=True).start()
        elif isinstance(command, KillProcess):
            self._handles[command.worker].kill()
        else:
            arguments = (command.machine, command.reason)
            target = self._processes.give_up
            threading.Thread(target=target, args=arguments, name="penstock-give-up", daemon=True).start()

    def watch(self) -> None:
        """Pings the workers, and tells the JobHost about each worker that has been silent for too long. A worker whose
        process is stopped, or does not return from native code, is lost like a dead one, but no other sign tells so.
        The pings also show the workers that this process lives. Returns at the job's end."""
        silence: SilenceDetector[tuple[int, int]] = SilenceDetector(self._options.hang_timeout_s)
        while not self._events.ended.wait(silence.period_s):
            for worker, incarnation in silence.look(self._workers.ping()):
                self._hangs(worker, incarnation, self._handles[worker].process.is_stopped())

    def keep_spares(self, runs: Callable[[], bool]) -> None:
        """Keeps spare processes, from which dead workers are replaced at once, while the job `runs`. A job that has run
        for a moment only has none, so that short jobs do not pay for them. Returns at the job's end."""
        running_s = 0.0
        while not self._events.ended.wait(_SPARES_S):
            running_s = running_s + _SPARES_S if runs() else 0.0
            if running_s < _SPARES_AFTER_S or self._packed is None:
                continue
            try:
                self._processes.keep_spares(self._packed[2])
            except Exception as error:  # the job runs without spare processes too
                logger.warning("job %s: no spare processes can be kept: %s", self._job, first_line(error))
                return

    def spares(self) -> int:
        """Returns the number of spare processes that are ready."""
        return self._processes.spares()

    def close(self, running: Iterable[int]) -> None:
        """Ends the processes of all workers, of which these still run."""
        self._workers.close()
        # `close` below may wait seconds for a process to end by itself, in vain for one that is stopped (SIGSTOP).
        for worker in running:
            self._handles[worker].kill()
        for link in self._links.values():
            link.close()
        self._processes.close()

    def _call(self, call: Call) -> None:
        """Calls a worker. The answer becomes an event."""
        worker, incarnation, number, command = call.worker, call.incarnation, call.number, call.command
        if isinstance(command, Build):
            command = replace(command, ahead_ns=self._processes.clocks())

        def answered(answer: Any) -> None:
            self._events.put(lambda host: host.answered(worker, incarnation, number, answer, time.monotonic()))

        def refused(error: PenstockError) -> None:
            self._events.put(lambda host: host.refused(worker, incarnation, number, error, time.monotonic()))

        self._links[worker].send(command, answered, refused)

    def _pack(self, plan: Plan, placed: dict[int, int]) -> bytes:
        """Returns the bytes that a worker's process loads: the plan, the worker of each task, the store, and the
        run's name."""
        last = self._packed
        if last is None or last[0] is not plan or last[1] != placed:
            data = packed_with_plan(self._program, plan, (plan, placed, self._options.store, self._run_name))
            last = self._packed = (plan, dict(placed), data)
        return last[2]

    def _start(self, command: StartProcess, packed: bytes) -> None:
        """Starts a worker's process, and waits until its run has ended. Runs in a thread of its own."""
        worker, incarnation = command.worker, command.incarnation
        deadline = time.monotonic() + self._options.start_timeout_s
        try:
            handle = self._processes.start(worker, incarnation, command.ring_bytes, packed, deadline)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            failed = error if isinstance(error, CannotStart) else CannotStart(text, "died")
            self._events.put(
                lambda host: host.process_not_started(
                    worker, incarnation, str(failed), time.monotonic(), kind=failed.kind, operator=failed.operator
                )
            )
            return
        if self._events.ended.is_set():
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
        death = Death(str(died), note, crash, died.with_node, words is not None, doing)
        return host.process_died(worker, incarnation, death, time.monotonic())

    def _hangs(self, worker: int, incarnation: int, stopped: bool) -> None:
        self._events.put(lambda host: host.process_hangs(worker, incarnation, stopped, time.monotonic()))


def _run_name(store: Store | None) -> str:
    """Returns the name of this run of the job for its sinks; see SinkContext."""
    lineage = "" if store is None else hashlib.sha256(store.place.encode()).hexdigest()[:12]
    return f"{lineage}-{uuid.uuid4().hex}"
