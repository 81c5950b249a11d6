"""JobMaster: the Ray actor, one for each job, in which the job's JobRunner lives.

The JobMaster owns the Workers: when it dies, Ray ends them. In a job with epochs, Ray then starts the JobMaster again,
and the job continues from the last complete epoch with new Workers. A driver that is not detached owns the JobMaster in
turn. The JobMaster handles no records, except those on their way from Collect and Console sinks to the driver. It
decides nothing: the JobHost decides (penstock/host/decide/job_host.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from penstock.actors.head_memory import HeadMemory
from penstock.actors.ray_link import OUTCOMES
from penstock.actors.raylet import end_with_raylet
from penstock.host.carry.carrier import Carrier
from penstock.host.carry.carrier_options import CarrierOptions
from penstock.host.carry.job_runner import JobRunner
from penstock.host.carry.notes import Notes
from penstock.host.carry.requests import Request
from penstock.host.carry.unloaded_runner import UnloadedRunner
from penstock.host.decide.process_commands import GetTraffic, SetClocks
from penstock.host.process.linger import Driver
from penstock.host.process.loading import load_program
from penstock.host.process.reporting import Report
from penstock.runtime.errors import JobError, NotEnoughResources, ProgramNotLoaded
from penstock.runtime.program.bound_tasks import needs_of_workers
from penstock.runtime.program.plan import Plan
from penstock.runtime.records.pickling import program
from penstock.runtime.status import PlacementStatus

if TYPE_CHECKING:
    from penstock.actors.ray_processes import RayProcesses
    from penstock.host.carry.processes import Processes, RelayStarter
    from penstock.host.carry.spark_runner import StartBridge
    from penstock.host.decide.placing import Placing

logger = logging.getLogger(__name__)


# The Ray concurrency groups, with the number of their threads. Reports are taken in one thread.
REPORTS = "reports"
CONCURRENCY_GROUPS = {REPORTS: 1, OUTCOMES: 8}

# The time after which nodes that could not be reached are asked again.
_FIND_AGAIN_S = 1.0
_look_again = threading.Event()  # never set

# The time between two looks at the clocks of a job's machines, and the change that workers are told of.
_CLOCKS_S = 1.0
_CLOCK_CHANGED_NS = 10_000

# After how long a job that replans is first asked whether its tasks send records. The time doubles with each question.
_RECORDS_FIRST_S = 0.1

# Ray puts arguments of 100 KB and more into the object store.
_PART_BYTES = 64 << 10


def in_parts(packed: bytes) -> list[bytes]:
    """Returns the arguments of a JobMaster, none of which is large. Ray would keep a large argument in the object store
    of the driver, and could not start the JobMaster again when the driver has gone."""
    return [packed[start : start + _PART_BYTES] for start in range(0, len(packed), _PART_BYTES)]


class JobMaster:
    """Hosts a job on Ray; see the module's docstring."""

    def __init__(self, name: str, *parts: bytes) -> None:
        """`name`: of the job. `parts`: those of the plan and the CarrierOptions, as `in_parts` makes them."""
        end_with_raylet()
        self._runner: JobRunner | UnloadedRunner
        plan: Plan
        options: CarrierOptions
        try:
            packed = b"".join(parts)
            plan, options = load_program(packed, "the JobMaster")
        except ProgramNotLoaded as error:
            context = ray.get_runtime_context()
            here, handle = context.get_node_id(), context.current_actor
            self._runner = UnloadedRunner(
                name, error, lambda driver: _driver_lives(driver, here), lambda: ray.kill(handle)
            )
        else:
            if options.store is not None and options.program is None:  # else the job is resumed
                options = replace(options, program=packed)
            self._runner = JobRunner(plan, options, _RayCarrier(plan, options), program())
        self._runner.start()

    def ask(self, request: Request[Any]) -> Any:
        """See JobRunner."""
        return self._runner.ask(request)

    @ray.method(concurrency_group=REPORTS)  # type: ignore[untyped-decorator]
    def report(self, worker: int, incarnation: int, number: int, item: Report) -> None:
        """Takes report number `number` of a worker's process. Calls may come in any order."""
        assert isinstance(self._runner, JobRunner), "a job whose program is not loaded has no workers"
        self._runner.report(worker, incarnation, number, item)


class _RayCarrier(Carrier):
    """Gives a JobRunner Ray's part of a job: nodes, actors, and notes that outlive the JobMaster."""

    def __init__(self, plan: Plan, options: CarrierOptions) -> None:
        # Workers load this module too, to know the JobMaster by, but never plan.
        from penstock.actors.nodes import Nodes
        from penstock.placement.placer import Placer

        context = ray.get_runtime_context()
        self._plan = plan
        self._options = options
        self._handle = context.current_actor
        self._node = context.get_node_id()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of what Ray itself uses there
            self.again = bool(context.was_current_actor_reconstructed)
        self.notes = Notes(plan.name, context.get_actor_id(), HeadMemory())
        self._nodes = Nodes(options.placement, options.workers, continues=self.again or options.resume)
        self.placer = Placer(options.placement, self._nodes)
        self._processes: RayProcesses | None = None

    def reserve(self, cancelled: Callable[[], bool], known: str = "") -> tuple[int, Processes, Placing]:
        """See Carrier. Ray may take a node for alive that was cut off before this JobMaster has started. Such a node is
        lost, and nodes are chosen again. When the others are not enough, the lost ones may just have been slow, and are
        asked again until `start_timeout_s` has passed."""
        from penstock.actors import cluster
        from penstock.actors.node_agents import NotReached

        until = time.monotonic() + self._options.start_timeout_s
        self.placer.remember(known)
        unreached: NotReached | None = None
        while True:
            try:
                found = self._reserve(cancelled)
                cluster.leave_without_head(found[1].kill_all)
                return found
            except NotReached as error:
                logger.warning("job %s: %s; other nodes are chosen", self._plan.name, error)
                self._give_back()
                self._nodes.lose(error.node_id)
                unreached = error
            except NotEnoughResources as error:
                self._give_back()
                if unreached is None or cancelled():
                    raise
                if time.monotonic() >= until:
                    raise NotEnoughResources(f"{error}. Besides, {unreached}") from error
                self._nodes.find_again()
                _look_again.wait(_FIND_AGAIN_S)
            except BaseException:  # as of a store that some machine does not see
                self._give_back()
                raise

    def _give_back(self) -> None:
        """Ends the started processes, and gives back the reserved room."""
        if self._processes is not None:
            self._processes.close()
            self._processes = None
        else:
            self._nodes.close()

    def _reserve(self, cancelled: Callable[[], bool]) -> tuple[int, RayProcesses, Placing]:
        from penstock.actors.ray_processes import RayProcesses  # knows placement, as Nodes does
        from penstock.host.carry.shared_directories import check_shared

        options, nodes = self._options, self._nodes
        share = self.placer.share(self._plan)
        needs = needs_of_workers(self._plan, nodes.workers)
        nodes.reserve(self._plan.name, options.cpus_per_worker, options.start_timeout_s, cancelled, share, needs)
        worker = options.worker
        if nodes.spans_machines() or options.network.everywhere:
            worker = replace(worker, network=options.network.secured())
        self._processes = RayProcesses(self._plan.name, nodes, self._handle, replace(options, worker=worker))
        lines = self._processes.connect_nodes()
        if lines:
            store = None if options.store is None or options.store.remote else options.store.place
            check_shared(self._plan, store, lines)
        return nodes.workers, self._processes, self.placer

    def relays(self) -> RelayStarter | None:
        return self._processes if self._processes is not None and self._processes.has_relays else None

    def waits_for(self) -> str:
        return "nodes with room for its workers" if self._processes is None else self._processes.waits_for()

    def placement_status(self) -> PlacementStatus:
        found = self.placer.status()
        if self._processes is None:  # nothing is reserved yet
            return found.changed(nodes=[], node_ids=[])
        return found.changed(machines=self._processes.nodes_status())

    def bridges(self) -> StartBridge | None:
        if self._options.dual is None:
            return None
        from penstock.actors import spark_bridge  # loads pyarrow

        return spark_bridge.start

    def running(self, runner: JobRunner) -> None:
        options = self._options
        if self._nodes.spans_machines():
            threading.Thread(target=self._tell_clocks, args=(runner,), name="penstock-clocks", daemon=True).start()
            if options.network.tls and os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
                logger.warning(
                    "job %s: what its processes send each other is encrypted, but what Ray carries for them is not: "
                    "the job's program and secret, and what comes back to the driver. Set RAY_USE_TLS=1 and Ray's own "
                    "certificates on all machines; see docs/cluster.md",
                    self._plan.name,
                )
        if options.placement.period_s is not None:
            arguments = (runner, options.placement.period_s)
            threading.Thread(target=self._watch_traffic, args=arguments, name="penstock-traffic", daemon=True).start()

    def migrating(self) -> None:
        self.placer.leave()

    def traffic(self) -> list[dict[str, Any]]:
        if self._options.placement.period_s is None:
            raise JobError(
                f"job {self._plan.name!r} does not measure its traffic; run it with replan_s=... (--replan on the "
                "command line)"
            )
        return self.placer.traffic()

    def _tell_clocks(self, runner: JobRunner) -> None:
        """Tells the workers, once a second, how far the clocks of their machines are apart: what was measured when this
        changed last. A worker that was silent then hears of it the next time."""
        assert self._processes is not None
        told: dict[int, int] = {}
        while not runner.ended.wait(_CLOCKS_S):
            known = self._processes.clocks()
            if told.keys() != known.keys() or any(abs(known[w] - told[w]) > _CLOCK_CHANGED_NS for w in known):
                told = known
            runner.tell_all(SetClocks(told))

    def _watch_traffic(self, runner: JobRunner, period_s: float) -> None:
        """Asks the workers once in each period for the traffic of their tasks, and computes a new placement. Runs in a
        thread of its own, because computing a placement of many tasks takes seconds."""
        self._await_records(runner, period_s)
        wait_s = 0.0  # what is counted from now on belongs to the first period
        while not runner.ended.wait(wait_s):
            wait_s = period_s
            try:
                plan, placed = runner.placed()
                wanted = self.placer.look(plan, placed, runner.ask_all(GetTraffic()).values())
            except Exception as error:  # the job is as well placed as it was
                logger.warning(
                    "job %s: no new placement could be computed, so its tasks stay where they are: %s: %s",
                    self._plan.name,
                    type(error).__name__,
                    error,
                )
                continue
            if wanted is not None:
                runner.better_placed(plan, placed, wanted)

    def _await_records(self, runner: JobRunner, most_s: float) -> None:
        """Returns when tasks send each other records, or after `most_s` seconds. In a period that begins before, a part
        of what the job does is missing, so that the next period would look like a change."""
        wait_s, waited_s = 0.0, 0.0
        while waited_s < most_s and not runner.ended.wait(wait_s):
            waited_s += wait_s
            wait_s = min(max(2 * wait_s, _RECORDS_FIRST_S), most_s)
            with contextlib.suppress(Exception):  # a worker that cannot say so now is asked again
                reports = runner.ask_all(GetTraffic()).values()
                if any(counts[1] for report in reports for task in report.tasks for counts in task["sent"]):
                    return

    def driver_lives(self, driver: Driver) -> bool:
        return _driver_lives(driver, self._node)

    def leave(self) -> None:
        ray.kill(self._handle)


def _driver_lives(driver: Driver, here: str) -> bool:
    """Returns whether a driver's process still exists, asked on the node `here`."""
    from penstock.actors import cluster

    if driver.node == here:
        return driver.lives()
    try:
        return not cluster.program_has_ended(driver.program)
    except Exception:  # Ray does not answer, so nothing is known of a process on another node
        return True
