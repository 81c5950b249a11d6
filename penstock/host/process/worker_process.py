"""WorkerProcess: what a worker's process does for its job, whatever has started the process (Ray, or the program
itself).

`prepare` creates the ring, and `connect` the run loop without tasks. `run` is the run loop, in the main thread of the
process, and lasts until the job has ended. Control threads ask for everything else beside it (control.py says why): to
build tasks, at the start and after failures, to begin and commit epochs, and for status, stop, cancel and halt. Records
travel through the rings, except those that Collect and Console sinks send to the driver.

A call that is asked for twice must never be carried out twice, which control.py ensures.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.bridge.commands import DivertTasks, GreetBridge, TakeSample, UndivertTasks
from penstock.host.decide.process_commands import (
    Align,
    Build,
    CallCommand,
    Cancel,
    ExpectRelay,
    GetLoad,
    GetMarks,
    GetStatus,
    GetTraffic,
    Halt,
    Ping,
    Question,
    Remove,
    Removed,
    SetClocks,
    Stop,
    UseRelays,
)
from penstock.host.process.control import ControlServer
from penstock.host.process.hangs import Process, watch_master
from penstock.host.process.link_watch import watch_links
from penstock.host.process.loading import load_program
from penstock.host.process.loop_thread import prepare_loop_thread
from penstock.host.process.machine import machine_id
from penstock.host.process.network import Network, make_transport
from penstock.host.process.reporting import LinksReport, Reporter, ReportSender, SnapshotWriter
from penstock.runtime.epochs.coordinator import Complete, End, ParticipantCommand, Trigger
from penstock.runtime.epochs.participant import Participant
from penstock.runtime.epochs.store import Store
from penstock.runtime.errors import ProgramNotLoaded, RecordError, describe
from penstock.runtime.exchange.delivery import MessagesLost
from penstock.runtime.exchange.output_cache import MEMORY_BYTES, OutputCaches
from penstock.runtime.operators.micro_batch import Bridge
from penstock.runtime.patience import Patience
from penstock.runtime.program.plan import Plan
from penstock.runtime.relaying.relay_map import RelayMap
from penstock.runtime.relaying.root import MulticastRoot
from penstock.runtime.relaying.tree_options import TreeOptions
from penstock.runtime.sinks.beside import BesideThread
from penstock.runtime.transport.base import PeerGone, PeerTransport
from penstock.runtime.transport.hop_meter import Row
from penstock.runtime.transport.hop_times import TimesReport
from penstock.runtime.transport.shm import RING_BYTES
from penstock.runtime.worker.blackbox import BlackBox
from penstock.runtime.worker.load import TrafficReport
from penstock.runtime.worker.processor_time import CLOCKS, ProcessorTime, present_threads
from penstock.runtime.worker.run_loop import RunLoop
from penstock.runtime.worker.wiring import Wiring, WiringOptions

# The longest time for which a barrier is delayed, whatever the clocks of two machines say.
_TRIGGER_WAIT_MAX_NS = 50_000_000


@dataclass(frozen=True)
class WorkerOptions:
    """The options of `run()` that concern a worker."""

    ring_bytes: int | None  # None: the default size, and larger when records need it
    window_bytes: int
    cache_bytes: int = MEMORY_BYTES
    network: Network | None = None  # None: all processes of the job share memory
    check_shared: bool = False
    trees: TreeOptions = field(default_factory=TreeOptions)


@dataclass(frozen=True)
class Outcome:
    """How a worker's run has ended. `error` is None when all its tasks have finished, or when it was halted. `status`:
    the worker's last status, as the process may die before it is asked for one."""

    worker: int
    error: str | None = None
    operator: str | None = None
    status: dict[str, Any] | None = None


@dataclass(frozen=True)
class Watched:
    """A JobMaster that is killed after this many seconds of silence, because its process may hang."""

    process: Process
    limit_s: float


class WorkerProcess:
    """See the module's docstring. The calls come in the order warm (for a spare process only), prepare, connect,
    run."""

    def __init__(self, connect_bridge: Callable[[str, str], Bridge] | None = None) -> None:
        """`connect_bridge` connects to the bridge to Spark with this name on this node. None: there is no Spark."""
        self._index = -1
        self._own_threads = present_threads()  # before there are any of the job's program
        self._connect_bridge = connect_bridge
        self._loop: RunLoop | None = None
        self._transport: PeerTransport | None = None
        self._participant: Participant | None = None
        self._bridge: tuple[str, Bridge] | None = None
        self._over = threading.Event()  # the run loop has ended
        self._halted = False
        self._cancelled_after: int | None = None
        self._stopped = False
        self._made = False
        self._relays: set[int] = set()  # those that this worker expects or uses; only the run loop's thread uses it
        self._ahead_ns: Mapping[int, int] = {}  # by worker: how far its machine's clock is ahead of the JobMaster's

    def warm(self, program: bytes) -> None:
        """Loads the modules of a program ahead, for a spare process that may become any worker of the job."""
        load_program(program, "a spare process")

    def prepare(self, index: int, options: WorkerOptions, ring_at_least: int, node: str, host: str) -> dict[str, Any]:
        """Becomes the worker of this index: creates the ring, and returns where this worker can be reached.
        `ring_at_least`: messages have been made for a ring of this size. `node`: the node on which this process runs.
        `host`: the numeric address of its machine."""
        self._index = index
        self._options = options
        self._box = BlackBox()
        network = options.network
        ring_bytes = max(ring_at_least, RING_BYTES)
        self._transport = make_transport(self._index, options.ring_bytes, ring_bytes, network, host)
        self._control = ControlServer(self.obey, None if network is None else network.ports(host))
        return {
            "index": self._index,
            "pid": os.getpid(),
            "node_id": node,
            "machine": machine_id(),
            "name": platform.node(),
            "host": host,
            "address": self._transport.address,
            "control": self._control.end,
            "blackbox": self._box.address,
        }

    def connect(self, program: bytes, reports: ReportSender, incarnation: int, master: Watched | None) -> Outcome:
        """Creates the run loop. `program` contains the plan, the worker of each task, the store (without one the job
        has no epochs), and the name of the run. `reports` carries what this worker tells the JobMaster. `incarnation`
        distinguishes this process from others of its index. `master` is the JobMaster to watch; None when this process
        ends with it in any case, and nobody could start it again, or when it runs on another machine, of which this
        process cannot tell whether it hangs or is cut off."""
        assert self._transport is not None
        try:
            plan: Plan
            placed: dict[int, int]
            store: Store | None
            run: str
            plan, placed, store, run = load_program(program, f"worker {self._index}")
            self._reporter = Reporter(reports, self._index, incarnation)
            writer = SnapshotWriter(self._reporter.send)
            self._participant = Participant(store, plan.key_groups, writer.say, writer.do)
            options = WiringOptions(
                time.monotonic_ns,
                self._reporter.report,
                credit_window=self._options.window_bytes,
                output_caches=OutputCaches(self._options.cache_bytes) if store is not None else None,
                on_snapshot=self._participant.on_snapshot if store is not None else None,
                on_motion=self._participant.on_motion if store is not None else None,
                root=None if self._options.network is None else self._root(incarnation),
                check_shared=self._options.check_shared,
                aligned=True,
                run=run,
            )
            wiring = Wiring(plan, placed, self._index, self._transport, options)
            self._loop = self._participant.loop = RunLoop(
                wiring,
                self._transport,
                time.monotonic_ns,
                self._box if store is not None else None,
                ProcessorTime(self._own_threads),
                Patience(),
                BesideThread,
            )
            if self._options.network is not None:
                send = self._reporter.send
                watch_links(self._transport.silent_links, lambda links: send(LinksReport(links)), self._over)
            if master is not None:
                watch_master(master.process, lambda: self._control.heard, master.limit_s, plan.name)
        except Exception as error:
            return self._outcome(error)
        return Outcome(self._index)

    def _root(self, life: int) -> MulticastRoot:
        assert self._transport is not None
        trees = self._options.trees
        return MulticastRoot(
            self._index,
            life,
            self._transport,
            time.monotonic_ns,
            trees.limit,
            trees.adjuster(),
            stopwatch=time.thread_time_ns,
            core_wait=lambda: CLOCKS.core_wait(threading.get_native_id()),  # the root asks in its own thread
        )

    def run(self) -> Outcome:
        """Runs the run loop until the job has ended or this worker has failed."""
        assert self._loop is not None
        prepare_loop_thread()
        self._box.watch_this_process()
        if self._halted:
            self._loop.halt(self._cancelled_after)
        if self._stopped:
            self._loop.stop()
        try:
            self._loop.run()
            self._reporter.drain()
        except BaseException as error:  # SystemExit would end the process, and the job would start it again
            outcome = self._outcome(error)
        else:
            outcome = Outcome(self._index)
        self._over.set()
        return replace(outcome, status=self.status())

    # --- commands, in control threads --------------------------------------------------------------------------

    def obey(self, command: CallCommand | Question) -> Any:
        """Carries out a command of the JobHost or of its carrier. Returns its answer."""
        loop = self._loop
        match command:
            case Ping():
                return None
            case GetStatus():
                return self.status()
            case GetTraffic():
                return self._traffic()
            case Stop():
                self._stopped = True
                if loop is not None:
                    loop.stop()
                return None
            case Cancel(epoch):
                self._cancelled_after = epoch
                return self._halt()
            case Halt():
                return self._halt()
            case GetLoad():
                return loop.load() if loop is not None else []
            case GetMarks():
                return loop.marks() if loop is not None else {}
            case TakeSample(_, _, request):  # does not wait for the loop, which a function of the user's may hold up
                return loop.take_sample(request) if loop is not None else None
            case GreetBridge(bridge, node):
                return self._greet(bridge, node)
        if loop is None:  # a notice that has come too early; nobody waits for it
            return None
        match command:
            case Align(least):
                loop.call(lambda: loop.align(least))
            case SetClocks(ahead_ns):
                self._set_clocks(ahead_ns)
            case Remove():
                return self._remove_tasks(command)
            case Build():
                self._build_tasks(command)
            case ExpectRelay():
                return self._expect_relay(command.relay)
            case UseRelays():
                self._use_relays(command.relays)
            case DivertTasks():
                link = self._link(command.bridge, command.node)
                loop.call(lambda: loop.divert(command.divert, link)).result()
            case UndivertTasks():
                loop.call(lambda: loop.undivert(command.chain)).result()
            case _:
                return self._take_part(command)
        return None

    def _take_part(self, command: ParticipantCommand) -> Any:
        """Carries out a command of the coordinator."""
        assert self._participant is not None
        assert self._transport is not None
        if isinstance(command, Trigger):
            wait_ns = command.begin_ns + self._ahead_ns.get(self._index, 0) - time.monotonic_ns()
            time.sleep(min(max(0, wait_ns), _TRIGGER_WAIT_MAX_NS) / 1e9)
        self._participant.obey(command).result()
        if isinstance(command, Complete):
            if command.final:
                self._reporter.drain()
            return self._transport.ring_bytes
        # The last counters: the close() of an operator may take long, and the process may die meanwhile.
        return self.status() if isinstance(command, End) else None

    def status(self) -> dict[str, Any]:
        """Returns the counters of this worker's tasks."""
        tasks = self._loop.load() if self._loop is not None else []
        transport = self._transport
        cpu = None if self._loop is None else self._loop.cpu
        return {
            "index": self._index,
            "time_ns": time.monotonic_ns(),
            "loop_ns": 0 if cpu is None else cpu.loop_ns,
            "core_wait_ns": 0 if cpu is None else cpu.core_wait_ns,
            "threads_ns": 0 if cpu is None else cpu.threads_ns,
            "tasks": tasks,
            "hook": None if self._loop is None else self._loop.hook(),
            "outages": [] if self._loop is None else self._loop.patience.told(),
            "ring_bytes": 0 if transport is None else transport.ring_bytes,
            "transports": {} if transport is None else transport.reasons(),
            "sent_bytes": {} if transport is None else transport.sent_bytes(),
            "streams": self._loop.streams() if self._loop is not None else [],
        }

    def _traffic(self) -> TrafficReport:
        """Returns the measurements of this worker's tasks and hops for placement. Hops are measured from the first call
        on, so that a job whose tasks stay where they are does not pay for it."""
        transport = self._transport
        rows: list[Row] = []
        times = TimesReport(self._index, [], [], [])
        if transport is not None:
            transport.measure()
            rows = [] if transport.meter is None else transport.meter.report()
            times = times if transport.times is None else transport.times.report(self._index)
        return TrafficReport(time.monotonic_ns(), self._loop.load() if self._loop is not None else [], rows, times)

    def _halt(self) -> None:
        self._halted = True
        if self._loop is not None:
            self._loop.halt(self._cancelled_after)

    def _remove_tasks(self, command: Remove) -> Removed:
        """Removes tasks, and drops the rings of workers that have died."""
        assert self._loop is not None
        assert self._participant is not None
        transport = self._transport
        assert transport is not None
        sizes = self._loop.call(lambda: transport.drop(command.dead)).result()
        self._participant.obey(command.tasks).result()
        return Removed(transport.address, sizes)

    def _build_tasks(self, command: Build) -> None:
        """Attaches to the other workers, and builds this worker's tasks, of which some run record by record."""
        assert self._loop is not None
        self._set_clocks(command.ahead_ns)
        assert self._participant is not None
        transport = self._transport
        assert transport is not None
        others = {worker: address for worker, address in command.addresses.items() if worker != self._index}
        self._loop.call(lambda: transport.connect(others)).result()
        if self._made:
            _give_memory_back()
        self._participant.obey(command.tasks).result()
        if command.modes:
            loop = self._loop
            loop.call(lambda: loop.run_record_by_record(command.modes)).result()
        if not self._made:
            self._made = True
            self._loop.call(_keep_all).result()

    def _set_clocks(self, ahead_ns: Mapping[int, int]) -> None:
        """Takes how far the clock of each worker's machine is ahead of the JobMaster's."""
        if ahead_ns == self._ahead_ns:
            return
        self._ahead_ns = ahead_ns
        assert self._loop is not None
        wiring = self._loop.wiring
        own_ns = ahead_ns.get(self._index, 0)
        others = {worker: ahead - own_ns for worker, ahead in ahead_ns.items()}
        self._loop.call(lambda: wiring.delivery.clocks(others))

    def _expect_relay(self, number: int) -> str:
        """Keeps this worker's inbox where it is until `use_relays` names this relay or does not. Returns the address at
        which the relay finds it."""
        loop, transport = self._loop, self._transport
        assert loop is not None
        assert transport is not None

        def expect() -> str:
            self._relays.add(number)
            transport.drop([number])
            return transport.address

        return loop.call(expect).result()

    def _use_relays(self, relays: RelayMap) -> None:
        """Knows these relays, and no others."""
        loop, transport = self._loop, self._transport
        assert loop is not None
        assert transport is not None

        def use() -> None:
            transport.forget(self._relays - relays.addresses.keys())
            self._relays = set(relays.addresses)
            for number, address in relays.addresses.items():
                with suppress(PeerGone):  # it has died, which the JobMaster will say
                    transport.connect({number: address})
            own = relays.of_worker.get(self._index)
            if own is not None:
                # What it half writes into this inbox when it dies comes again, straight from the roots.
                transport.excuse(relays.pids[own])
            if loop.wiring.root is not None:
                loop.wiring.root.use(relays)

        loop.call(use).result()

    def _greet(self, bridge: str, node: str) -> None:
        """Connects to the bridge of this name, before a micro-batch goes there. Does not wait for it."""

        def greet() -> None:
            with suppress(Exception):  # whoever sends a micro-batch there hears what is wrong with it
                self._link(bridge, node).greet()

        threading.Thread(target=greet, name="penstock-greet", daemon=True).start()

    def _link(self, bridge: str, node: str) -> Bridge:
        if self._bridge is None or self._bridge[0] != bridge:
            assert self._connect_bridge is not None
            self._bridge = (bridge, self._connect_bridge(bridge, node))
        return self._bridge[1]

    def _outcome(self, error: BaseException) -> Outcome:
        if isinstance(error, RecordError):
            return Outcome(self._index, str(error), error.operator)
        if isinstance(error, MessagesLost | ProgramNotLoaded):
            return Outcome(self._index, str(error))
        text = "".join(traceback.format_exception(error))
        return Outcome(self._index, f"worker {self._index} failed: {describe(error)}\n{text}")


def _keep_all() -> None:
    """Keeps all present objects out of garbage collection, because they live as long as the job. Otherwise each full
    collection visits all of them, which shows as pauses of tens of milliseconds in the latency of every record."""
    gc.collect()
    gc.freeze()


def _give_memory_back() -> None:
    """Gives the memory that the removed tasks had back to the operating system. The C library keeps freed memory for
    the thread that asked for it, the run loop's, and another thread reads the state of the new tasks. Without this, the
    worker would need the memory of its state twice."""
    with suppress(OSError, AttributeError):  # other C libraries have no such function
        ctypes.CDLL(None).malloc_trim(0)
