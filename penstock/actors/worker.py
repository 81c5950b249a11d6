"""Worker: one Ray actor process that runs its share of a job's tasks in one run loop.

`prepare` makes the ring, `connect` the run loop without tasks, `run` is the run loop, in the actor's main thread, and
stays pending for the life of the job (its failure tells the JobMaster that the process died). Everything else is asked
for beside it by control threads (actors/control.py says why): to make tasks, at the start and after failures, to begin
and commit epochs; status, stop and cancel. Data never passes through Ray, but for what Collect and Console sinks send
to the driver.
"""

from __future__ import annotations

import ctypes
import gc
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import ray

from penstock.actors.collected import EncodedSinkRecords
from penstock.actors.control import ControlServer
from penstock.actors.hangs import Process, watch_master
from penstock.runtime.epochs.coordinator import BuildTasks, Complete, ConnectTasks, RemoveTasks, SaveWholeState
from penstock.runtime.epochs.participant import EpochReport, Participant
from penstock.runtime.epochs.store import Store
from penstock.runtime.errors import RecordError
from penstock.runtime.exchange.output_cache import MEMORY_BYTES, OutputCaches
from penstock.runtime.operators.micro_batch import DivertRequest
from penstock.runtime.program.plan import Plan
from penstock.runtime.records.codec import encode
from penstock.runtime.records.pickling import join
from penstock.runtime.transport.shm import RING_BYTES, ShmTransport
from penstock.runtime.worker.blackbox import BlackBox, RecordByRecordMode
from penstock.runtime.worker.run_loop import MessagesLost, RunLoop
from penstock.runtime.worker.wiring import SinkRecords, Wiring

if TYPE_CHECKING:
    from penstock.actors.spark_bridge import BridgeLink

# How many reports may be under way to the JobMaster before a sink waits: bounds memory on both sides.
_REPORTS_MAX = 8

# Between two tries to write what must be written before the job can end.
_RETRY_S = 1.0

# Between the first snapshot of an epoch in a worker and its writing.
_GATHER_S = 0.005

# The longest that a barrier is put off, whatever the clocks of two nodes say.
_TRIGGER_WAIT_MAX_NS = 50_000_000

_PR_SET_TIMERSLACK = 29  # <linux/prctl.h>; the argument is in ns


@dataclass(frozen=True)
class WorkerOptions:
    """What `run()` was told that concerns a worker."""

    ring_bytes: int | None  # None: the default, and larger when records call for it
    window_bytes: int
    cache_bytes: int = MEMORY_BYTES


@dataclass(frozen=True)
class Outcome:
    """How a worker's run ended; `error` is None when all its tasks finished or it was cancelled."""

    worker: int
    error: str | None = None
    operator: str | None = None


#: What a worker tells the JobMaster.
Report: TypeAlias = EncodedSinkRecords | list[EpochReport]


class Worker:
    """See the module's docstring. Calls come in the order prepare, connect, run."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._loop: RunLoop | None = None
        self._transport: ShmTransport | None = None
        self._participant: Participant | None = None
        self._bridge: tuple[str, BridgeLink] | None = None
        self._cancelled = False
        self._stopped = False
        self._made = False

    def prepare(self, options: WorkerOptions, ring_at_least: int = 0) -> dict[str, Any]:
        """Make the ring; where this worker is. `ring_at_least`: messages have been made for a ring of this size."""
        self._options = options
        self._box = BlackBox()
        self._transport = ShmTransport(self._index, options.ring_bytes, at_least=max(ring_at_least, RING_BYTES))
        self._control = ControlServer(
            {
                "ping": lambda: None,
                "status": self.status,
                "load": self.load,
                "traffic": self.traffic,
                "stop": self.stop,
                "cancel": self.cancel,
                "cut": self.cut,
                "make": self.make,
                "join": self.join,
                "trigger": self.trigger,
                "unpark": self.unpark,
                "rewrite": self.rewrite,
                "complete": self.complete,
                "end": self.end,
                "divert": self.divert,
                "undivert": self.undivert,
            }
        )
        context = ray.get_runtime_context()
        return {
            "index": self._index,
            "pid": os.getpid(),
            "node_id": context.get_node_id(),
            "address": self._transport.address,
            "control": (self._control.address, self._control.key),
            "blackbox": self._box.address,
        }

    def connect(self, program: bytes, master: Any, incarnation: int, watched: tuple[int, str, float]) -> Outcome:
        """Make the run loop. `program`: the plan, which worker has which task, and the store; without one the job has
        no epochs. `incarnation` tells this process from others of its index; `watched`: the JobMaster's process and
        node, and after how many seconds of silence it is killed."""
        assert self._transport is not None
        try:
            plan: Plan
            placed: dict[int, int]
            store: Store | None
            plan, placed, store = join(program)
            self._reporter = _Reporter(master, self._index, incarnation)
            writer = _SnapshotWriter(self._reporter.send)
            self._participant = Participant(store, plan.key_groups, writer.say, writer.do)
            wiring = Wiring(
                plan,
                placed,
                self._index,
                self._transport,
                clock=time.monotonic_ns,
                report=self._reporter.report,
                window=self._options.window_bytes,
                output_caches=OutputCaches(self._options.cache_bytes) if store is not None else None,
                on_snapshot=self._participant.on_snapshot if store is not None else None,
                on_motion=self._participant.on_motion if store is not None else None,
            )
            self._loop = self._participant.loop = RunLoop(
                wiring, self._transport, time.monotonic_ns, self._box if store is not None else None
            )
            pid, node, hang_timeout_s = watched
            watch_master(Process(pid, node, master), lambda: self._control.heard, hang_timeout_s, plan.name)
        except Exception as error:
            return self._outcome(error)
        return Outcome(self._index)

    def run(self) -> Outcome:
        """The run loop, until the job has ended or this worker has failed."""
        assert self._loop is not None
        _end_by_signals()
        self._box.watch_this_process()
        _wake_on_time()
        # How long the control thread waits for the interpreter beside a busy loop, several times a call.
        sys.setswitchinterval(0.001)
        if self._cancelled:
            self._loop.cancel()
        if self._stopped:
            self._loop.stop()
        try:
            self._loop.run()
            self._reporter.drain()
        except BaseException as error:  # Ray would end the process for SystemExit, and the job start it again
            return self._outcome(error)
        return Outcome(self._index)

    # --- answered by control threads ---------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Counters of this worker's tasks."""
        tasks = self._loop.status() if self._loop is not None else []
        ring_bytes = self._transport.ring_bytes if self._transport is not None else 0
        return {"index": self._index, "time_ns": time.monotonic_ns(), "tasks": tasks, "ring_bytes": ring_bytes}

    def load(self) -> tuple[int, list[dict[str, Any]]]:
        """This worker's index and what its tasks have to do."""
        return self._index, self._loop.load() if self._loop is not None else []

    def traffic(self) -> tuple[int, list[dict[str, Any]]]:
        """When it is (monotonic ns), and what this worker's tasks have sent to whom."""
        return time.monotonic_ns(), self._loop.traffic() if self._loop is not None else []

    def stop(self) -> None:
        """End the sources; what they have read goes through."""
        self._stopped = True
        if self._loop is not None:
            self._loop.stop()

    def cancel(self) -> None:
        """End at once."""
        self._cancelled = True
        if self._loop is not None:
            self._loop.cancel()

    def cut(self, command: RemoveTasks, lost: list[int]) -> dict[str, Any]:
        """Take out tasks, and let go of workers that have died; how others reach this worker, and how large the rings
        of the dead were."""
        assert self._loop is not None
        assert self._participant is not None
        transport = self._transport
        assert transport is not None
        sizes = self._loop.call(lambda: transport.drop(lost)).result()
        self._participant.cut(command).result()
        return {"address": transport.address, "rings": sizes}

    def make(self, command: BuildTasks, addresses: dict[int, str], modes: dict[int, RecordByRecordMode]) -> None:
        """Attach to the other workers, and make this worker's tasks, of which some run record by record."""
        assert self._loop is not None
        assert self._participant is not None
        transport = self._transport
        assert transport is not None
        others = {worker: address for worker, address in addresses.items() if worker != self._index}
        self._loop.call(lambda: transport.connect(others)).result()
        self._participant.make(command).result()
        if modes:
            loop = self._loop
            loop.call(lambda: loop.run_record_by_record(modes)).result()
        if not self._made:
            self._made = True
            self._loop.call(_keep_all).result()

    def join(self, command: ConnectTasks) -> None:
        """Tasks are there again."""
        assert self._participant is not None
        self._participant.join(command).result()

    def trigger(self, epoch: int, at_ns: int, parking: frozenset[int]) -> None:
        """Begin an epoch's barrier, at this wall-clock time if it is near; tasks of `parking` stop behind it."""
        assert self._participant is not None
        if parking:
            self._participant.park(epoch, parking).result()
        time.sleep(min(max(0, at_ns - time.time_ns()), _TRIGGER_WAIT_MAX_NS) / 1e9)
        self._participant.trigger(epoch).result()

    def unpark(self) -> None:
        """No task is to move any more."""
        assert self._participant is not None
        self._participant.unpark().result()

    def rewrite(self, command: SaveWholeState) -> None:
        """What tasks have saved is lost: they save everything anew."""
        assert self._participant is not None
        self._participant.rewrite(command).result()

    def complete(self, command: Complete) -> int:
        """Commit an epoch; how large this worker's ring is now."""
        assert self._participant is not None
        assert self._transport is not None
        self._participant.complete(command).result()
        if command.final:
            self._reporter.drain()
        return self._transport.ring_bytes

    def end(self) -> None:
        """The job has ended well."""
        assert self._participant is not None
        self._participant.end().result()

    def divert(self, divert: DivertRequest, bridge: str, node: str) -> None:
        """Send the input of a chain's tasks through the bridge of this name, on this node."""
        from penstock.actors.spark_bridge import BridgeLink  # loads pyarrow

        if self._bridge is None or self._bridge[0] != bridge:
            self._bridge = (bridge, BridgeLink(bridge, node))
        assert self._loop is not None
        loop, link = self._loop, self._bridge[1]
        loop.call(lambda: loop.divert(divert, link)).result()

    def undivert(self, chain: int) -> None:
        """Take the input of a chain's tasks up as records again."""
        assert self._loop is not None
        loop = self._loop
        loop.call(lambda: loop.undivert(chain)).result()

    def _outcome(self, error: BaseException) -> Outcome:
        if isinstance(error, RecordError):
            return Outcome(self._index, str(error), error.operator)
        if isinstance(error, MessagesLost):
            return Outcome(self._index, str(error))
        text = "".join(traceback.format_exception(error))
        return Outcome(self._index, f"worker {self._index} failed: {type(error).__name__}: {error}\n{text}")


def _keep_all() -> None:
    """What exists now lives as long as the job: without this each full collection walks all of it, which shows as
    pauses of tens of milliseconds in every record's latency."""
    gc.collect()
    gc.freeze()


def _end_by_signals() -> None:
    """Let SIGTERM and SIGINT end this process, as SIGKILL does, and the job recover. As the exceptions that Ray and
    Python make of them they would come out of whatever function of the user is running, and be taken for its error."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def _wake_on_time() -> None:
    """Let this thread's timed waits end when they are due: by default the kernel adds up to 50 us, which shows in the
    latency of every paced record."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)


class _Reporter:
    """Carries what goes to the JobMaster, numbered: sinks' records, of which a bounded number of calls is under way,
    and what epochs have to say."""

    def __init__(self, master: Any, worker: int, incarnation: int) -> None:
        self._master = master
        self._worker = worker
        self._incarnation = incarnation
        self._number = 0
        self._lock = threading.Lock()
        self._pending: deque[Any] = deque()

    def report(self, reported: SinkRecords) -> None:
        """Carry a sink's records."""
        channel, task, generation, epoch = reported.channel, reported.task, reported.generation, reported.epoch
        self._pending.append(self.send(EncodedSinkRecords(channel, encode(reported.records), task, generation, epoch)))
        if len(self._pending) > _REPORTS_MAX:
            ray.get(self._pending.popleft())  # the oldest: later ones wait for it at the other end

    def send(self, item: Report) -> Any:
        """Carry something, behind all before it; the call's reference."""
        with self._lock:
            number = self._number
            self._number += 1
            return self._master.report.remote(self._worker, self._incarnation, number, item)

    def drain(self) -> None:
        """Wait until all records have been taken."""
        ray.get(list(self._pending))
        self._pending.clear()


class _SnapshotWriter:
    """A thread that does pieces of work one after the other, and one again that returns False; what the participant
    has to say meanwhile goes to the JobMaster in one call, which costs more than to write a small snapshot."""

    def __init__(self, send: Callable[[list[EpochReport]], None]) -> None:
        self._send = send
        self._work: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._said: list[EpochReport] = []
        self._never = threading.Event()
        threading.Thread(target=self._run, name="penstock-snapshots", daemon=True).start()

    def do(self, work: Callable[[], bool]) -> None:
        """Do a piece of work soon."""
        self._work.put(work)

    def say(self, event: EpochReport) -> None:
        """Tell the JobMaster, when the work that there is has been done; for pieces of work."""
        self._said.append(event)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            # The other tasks of the worker save their part of the same epoch, and what came in meanwhile is processed,
            # before this thread takes time from the loop's.
            self._never.wait(_GATHER_S)
            while True:
                while not work():
                    self._tell()
                    self._never.wait(_RETRY_S)
                try:
                    work = self._work.get_nowait()
                except queue.Empty:
                    break
            self._tell()

    def _tell(self) -> None:
        said, self._said = self._said, []
        if said:
            self._send(said)
