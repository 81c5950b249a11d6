"""`run(flow)`: a flow becomes a running job; `attach(name)`: a running job from another driver."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from penstock.host.carry.job_options import JobOptions
from penstock.host.process.network import (
    NODE_TIMEOUT_S,
    TRANSPORTS,
    Network,
    TransportName,
    checked_node_timeout,
    checked_ports,
    checked_tls,
)
from penstock.host.process.worker_process import WorkerOptions
from penstock.jobs import farewell
from penstock.jobs.job import Job, known_job, local_jobs, silent_status
from penstock.placement.options import Method, PlacementOptions
from penstock.runtime.epochs.coordinator import EpochOptions
from penstock.runtime.epochs.restore import check
from penstock.runtime.epochs.store import Store
from penstock.runtime.errors import (
    FlowError,
    JobExists,
    JobNotFound,
    OptionError,
    PenstockError,
    StoreError,
    UnfinishedFiles,
    describe,
    shorten,
)
from penstock.runtime.exchange.channel import CREDIT_WINDOW_BYTES
from penstock.runtime.exchange.output_cache import MEMORY_BYTES
from penstock.runtime.mistakes import refusing
from penstock.runtime.operators.ends import Write
from penstock.runtime.operators.resources import told_needs
from penstock.runtime.program.flow import check_flow
from penstock.runtime.program.graph import SAVEPOINT
from penstock.runtime.program.mixing import mixing, mixing_words
from penstock.runtime.program.plan import packed_with_plan
from penstock.runtime.records.pickling import Program
from penstock.runtime.records.userfunc import user_line
from penstock.runtime.relaying.tree_options import TreeOptions
from penstock.runtime.transport.ring import MAX_CAPACITY, MIN_CAPACITY
from penstock.runtime.units import above_zero, any_seconds, flag, number, whole

logger = logging.getLogger(__name__)

# Below it every message would wait for the credit of the one before.
_LEAST_WINDOW_BYTES = 1024

# What of BurstOptions can be set by text.
_DUAL_SETTINGS = ("delta", "k", "margin", "range_below", "smoothing_s", "interval_min_s", "interval_max_s")

if TYPE_CHECKING:
    from penstock.bridge.burst import BurstOptions, Mode
    from penstock.bridge.paradigm_scheduler import DualOptions
    from penstock.bridge.session import SparkOptions
    from penstock.host.carry.job_link import JobLink
    from penstock.runtime.program.flow import Flow
    from penstock.runtime.program.plan import Plan
    from penstock.runtime.transport.certificates import Tls


@refusing
def run(
    flow: Flow,
    *,
    workers: int | None = None,
    parallelism: int | None = None,
    local: bool = False,
    detached: bool = False,
    address: str | None = None,
    ring_bytes: int | None = None,
    window_bytes: int = CREDIT_WINDOW_BYTES,
    cache_bytes: int = MEMORY_BYTES,
    check_shared: bool = False,
    cpus_per_worker: float = 1.0,
    start_timeout_s: float | timedelta = 60.0,
    epoch_interval_s: float | timedelta | None = 1.0,
    epoch_timeout_s: float | timedelta = 60.0,
    checkpoints: str | os.PathLike[str] | None = None,
    max_restarts: int = 10,
    max_attempts: int = 3,
    hang_timeout_s: float | timedelta = 60.0,
    savepoint: str | os.PathLike[str] | None = None,
    dual: str | BurstOptions = "off",
    spark: SparkOptions | None = None,
    placement: Method | PlacementOptions = "auto",
    nodes: int | None = None,
    replan_s: float | timedelta | Literal["auto"] | None = None,
    spares: bool = True,
    transport: TransportName = "auto",
    ports: tuple[int, int] | None = None,
    tls: bool | Tls = False,
    node_timeout_s: float | timedelta = NODE_TIMEOUT_S,
    trees: int | str = "auto",
) -> Job:
    """Start `flow` as a job, on Ray or in processes of this program, and return at once.

    Durations (parameters whose names end in `_s`) are seconds or timedeltas. docs/running.md describes all parameters.

    Processes and memory:

    `workers`: the number of worker processes (default: 1). `parallelism`: replaces the flow's own default.
    `local`: the workers are child processes of this program, without Ray, and end with it; all that needs Ray is
    refused. `detached`: the job outlives this process; otherwise it ends with this process. `address`: the address of a
    Ray cluster. By default `run` joins the cluster of this machine, or starts one for this process. `cpus_per_worker`:
    the CPUs that Ray reserves for each worker. `start_timeout_s`: the time within which all workers must have started,
    after Ray itself has started. `ring_bytes`: the size of each worker's inbox, a power of two; no record may be larger
    than about half of it. By default it is 2 MiB, and grows for larger records. `window_bytes`: how much may be on its
    way from one task to another. `cache_bytes`: how much a worker keeps in memory of what it has sent since the last
    complete epoch; the rest goes to a file in TMPDIR. `check_shared`: for debugging; a function that changes a record
    which other tasks have too, in another branch of the stream or behind broadcast(), fails the job. It makes such jobs
    much slower.

    Recovery:

    `epoch_interval_s`: the time between epochs (longer while no record moves). In each epoch the state of all tasks is
    saved as one consistent *epoch*. When a process dies, the job goes back to the last complete epoch, without losing
    or doubling a record. With None the job saves nothing, and any death of a process ends it. `epoch_timeout_s`: when
    an epoch does not complete within this time, the next one begins beside it. `checkpoints`: where epochs are saved, a
    directory or a URL such as s3://bucket/prefix (default: penstock/ below XDG_STATE_HOME or ~/.local/state). Saved
    epochs are deleted when the job has finished or was cancelled. They stay when it failed, for `resume`.
    `max_restarts`: the number of deaths of workers within ten minutes that the job survives. `max_attempts`: a record
    that has crashed its worker's process this many times becomes a failed record, and its operator's `on_error`
    decides. (Two further deaths are needed to find out which record it is. A death by a signal from outside, or for
    lack of memory, counts half, and only until an epoch completes.) `hang_timeout_s`: a worker or JobMaster whose
    process does not answer for this time is killed, and counts as dead. It must be longer than any call into native
    code that keeps the interpreter. `spares`: keep a spare process on each node, which takes the place of a worker that
    has died. It is started when the job has run for some seconds. `savepoint`: start from what `job.savepoint` has
    saved there. The flow may have other parallelism and other operators, but it must have all operators with state,
    under the same names.

    Spark:

    `dual`: "off" processes all records in the job's own tasks. "on" sends the input of operators with growing queues to
    Spark in micro-batches until the burst is over; Spark starts with the job and is kept ready. "spark-only" sends all
    input as soon as Spark is ready. "toggle:3" changes the side every 3 seconds. Settings follow a comma, as in
    "on,delta=0.3"; penstock.bridge.burst.BurstOptions describes them and may replace the text. `spark`: the session to
    start (penstock.bridge.session.SparkOptions). Without Java or Spark the job processes all records itself, and says
    so once.

    Placement:

    `placement`: how tasks are assigned to workers. "auto": by the plan that `penstock plan` shows. "round-robin": in
    turn. "traffic": with little traffic between nodes and between workers, as if all tasks cost the same.
    "turbostream", "t-storm", "jstorm" and "metis": as other systems do. `nodes`: the number of cluster nodes over which
    the workers are spread, with room reserved on each (default: the JobMaster's node if it has enough CPUs, else the
    fewest nodes that have).
    `replan_s`: how often to measure load and traffic, and to move tasks when that is worth it (default: never). "auto":
    every 10 seconds in a job that has epochs and several workers and does not use Spark.
    penstock.placement.options.PlacementOptions has further settings and may replace the text.

    Several machines:

    `transport`: what carries records between machines. "auto": the best that both machines have. "tcp", "rdma": also
    between the workers of one machine. `ports`: the first and the last port at which the job's processes may listen
    (default: any). `tls`: encrypt what the job's processes send to other machines, by a certificate that the job makes,
    or by files of your own (penstock.Tls). docs/cluster.md says what Ray itself sends. `node_timeout_s`: a machine that
    has not answered for this time is lost, and its tasks continue on other machines; a shorter cut of the network is a
    pause. `trees`: to how many relays a node of a multicast tree sends, at most. "auto": the number follows the load.
    A number stays. "toggle:1" has the trees switch every second, for tests.

    Errors: FlowError or SourceError for a flow that cannot run, StoreError when `checkpoints` cannot be used, JobExists
    while a job of this name runs, NoCluster for a detached job when no cluster outlives this process. `job.wait()`
    raises all later errors, among them StoreError when a machine of the job cannot use the store.
    """
    check_flow(flow, "run()")
    workers = 1 if workers is None else whole(workers, "workers")
    ring_bytes = None if ring_bytes is None else _ring_bytes(ring_bytes)
    window_bytes = whole(window_bytes, "window_bytes", _LEAST_WINDOW_BYTES)
    cache_bytes = whole(cache_bytes, "cache_bytes")
    check_shared = flag(check_shared, "check_shared")
    cpus_per_worker = number(cpus_per_worker, "cpus_per_worker")
    max_restarts = whole(max_restarts, "max_restarts", 0)
    max_attempts = whole(max_attempts, "max_attempts")
    start_timeout_s = above_zero(start_timeout_s, "start_timeout_s")
    epoch_timeout_s = above_zero(epoch_timeout_s, "epoch_timeout_s")
    hang_timeout_s = above_zero(hang_timeout_s, "hang_timeout_s")
    if epoch_interval_s is not None:
        epoch_interval_s = above_zero(epoch_interval_s, "epoch_interval_s", ", or None for a job without epochs")
    replan: float | Literal["auto"] | None = "auto"
    if replan_s != "auto":
        found = None if replan_s is None else any_seconds(replan_s, "replan_s")
        replan = found if isinstance(replan_s, timedelta) else replan_s  # errors show it as given
    network = _network(transport, ports, tls, node_timeout_s)
    _check_places(checkpoints=checkpoints, savepoint=savepoint)
    _check_where(address, detached)
    if flag(local, "local"):
        _refuse_what_needs_ray(
            detached=detached,
            address=address,
            cpus_per_worker=None if cpus_per_worker == 1.0 else cpus_per_worker,
            dual=None if dual == "off" else dual,
            spark=spark,
            placement=None if placement in ("auto", "round-robin") else placement,
            nodes=nodes,
            replan_s=replan,
            ports=ports,
            node_timeout_s=None if node_timeout_s == NODE_TIMEOUT_S else node_timeout_s,
            trees=None if trees == "auto" else trees,
        )
    both = dual_options(dual, spark, epoch_interval_s)
    where = _placement(placement, nodes, replan).checked(
        workers, list(flow.graph.operators), epoch_interval_s is not None, spark=both is not None
    )
    flow = copy.copy(flow)
    if parallelism is not None:
        flow.parallelism = parallelism
    try:
        plan = flow.plan(workers, check_sinks=savepoint is None)
    except UnfinishedFiles as error:
        raise whether_resumable(error, flow.name, checkpoints) from None
    _check_needs(plan, where)
    _tell_of_mixing(plan)
    store = origin = None
    if epoch_interval_s is not None:
        store = Store.open(checkpoints or default_checkpoints(), flow.name)
        store.check_format()
        store.check()
    if savepoint is not None:
        origin = _savepoint(savepoint, plan, store)
    options = JobOptions(
        workers,
        start_timeout_s,
        WorkerOptions(ring_bytes, window_bytes, cache_bytes, check_shared=check_shared, trees=_trees(trees)),
        EpochOptions(epoch_interval_s, epoch_timeout_s, max_restarts),
        store,
        flow if store is not None else None,
        attempts=max_attempts,
        hang_timeout_s=hang_timeout_s,
        spares=flag(spares, "spares"),
        savepoint=origin,
        cpus_per_worker=cpus_per_worker,
        network=network,
        dual=both,
        placement=where,
    )
    program = Program()
    try:
        if store is not None:
            options = replace(options, program=packed_with_plan(program, plan, (flow, options)))
        if local:
            return _start_local(flow, plan, options, program)
        from penstock.actors import on_ray

        on_ray.connect(address, workers, cpus_per_worker, both, detached)
        return _job(flow, on_ray.start(flow.name, plan, options, detached, program), program, detached)
    except BaseException:
        if store is not None:
            with suppress(StoreError):  # the first error tells more
                store.tidy()
        raise


def _tell_of_mixing(plan: Plan) -> None:
    """Warns of a plan in which a task that is behind makes its records late."""
    if said := mixing_words(mixing(plan)):
        logger.warning("job %r: %s", plan.name, said)


def whether_resumable(error: UnfinishedFiles, job: str, checkpoints: str | os.PathLike[str] | None) -> UnfinishedFiles:
    """Returns the error, and whether a job of this name can be resumed from this checkpoint store."""
    try:
        store = Store.open(checkpoints or default_checkpoints(), job)
        there = bool(store.epochs())
    except StoreError:
        return error
    if there:
        said = f"{store.place} has epochs of a job {job!r}, which penstock.resume({job!r}) continues."
    else:
        said = f"{store.place} has no epoch of a job {job!r}, so there is nothing to resume under this name."
    return UnfinishedFiles(f"{error} {said}")


def _refuse_what_needs_ray(**given: object) -> None:
    for name, value in given.items():
        if value not in (None, False):
            raise OptionError(
                f"{{{name}=}} is not for local jobs, which run in processes of this program, without Ray; leave out "
                f"{{{name}}} or {{local=}}",
                {name: value, "local": True},
            )


def _without_ray(options: JobOptions, job: str) -> JobOptions:
    """Returns the options of a job that ran on Ray for its run without Ray, and says what is left out. The saved
    options stay, so the job has all of them again when it is resumed on Ray."""
    left_out = []
    if options.dual is not None:
        left_out.append("dual")
    here = PlacementOptions("round-robin" if options.placement.method == "round-robin" else "auto")
    if options.placement != here:
        left_out.append("placement")
    if left_out:
        logger.warning(
            "the job %r continues without its option%s %s, because a local job runs without Ray; a job that is resumed "
            "on Ray has %s again",
            job,
            "s" if len(left_out) > 1 else "",
            " and ".join(left_out),
            "them" if len(left_out) > 1 else "the option",
        )
    return replace(options, dual=None, placement=here)


def _check_needs(plan: Plan, where: PlacementOptions) -> None:
    """Raises OptionError for options of placement that do not fit tasks which need resources of their worker."""
    needing = [chain for chain in plan.chains if chain.needs]
    if not needing:
        return
    options = {
        "replan_s": where.period_s,
        "pin": dict(where.pin) or None,
        "at_least": where.at_least,
        "grow": where.grow or None,
    }
    for name, value in options.items():
        if value is not None:
            raise OptionError(
                f"{{{name}=}} is not for this flow: each task of {{operator}} needs {{needs}}, which one worker "
                f"reserves for it from the start to the end; leave out {{{name}}}",
                {name: value},
                operator=repr(needing[0].name),
                needs=told_needs(needing[0].needs),
            )


def _start_local(flow: Flow, plan: Plan, options: JobOptions, program: Program) -> Job:
    """Start a job in processes of this program."""
    from penstock.local.local_job import LocalJob

    for job in local_jobs():
        if job.name == flow.name:
            raise JobExists(
                f"a job named {flow.name!r} is running in this program; stop that job (job.stop() or job.cancel(), "
                "then job.wait()) or give the flow another name"
            )
    if options.store is not None and options.store.is_locked():
        raise JobExists(options.store.locked_by_another())
    return _job(
        flow,
        LocalJob(plan, options, program, in_turn=options.placement.method == "round-robin"),
        program,
        detached=False,
    )


def _job(flow: Flow, link: JobLink, program: Program, detached: bool) -> Job:
    """Returns the handle of a job that has just been started."""
    sinks = {name: op.sink for name, op in flow.graph.operators.items() if isinstance(op, Write)}
    job = Job(flow.name, link, sinks, program)
    if not detached:
        farewell.remember(job)
    return job


def _ring_bytes(given: int) -> int:
    size = whole(given, "ring_bytes")
    if size & (size - 1) or not MIN_CAPACITY <= size <= MAX_CAPACITY:
        near = min(max(1 << size.bit_length(), MIN_CAPACITY), MAX_CAPACITY)
        raise OptionError(
            f"{{ring_bytes=}}; it must be a power of two, {MIN_CAPACITY:,} to {MAX_CAPACITY:,}, such as {near}",
            {"ring_bytes": size},
        )
    return size


def _check_places(**places: object) -> None:
    for name, place in places.items():
        if place is not None and not isinstance(place, str | os.PathLike):
            raise FlowError(f"{name}={shorten(place)}; it must be a directory, or a URL such as s3://bucket/prefix")


def _check_where(address: object, detached: object) -> None:
    flag(detached, "detached")
    if address is not None and not isinstance(address, str):
        raise FlowError(f"address={shorten(address)}; it must be the text of a Ray cluster's address, or 'local'")


def _network(transport: object, ports: object, tls: object, node_timeout_s: float | timedelta) -> Network:
    if transport not in TRANSPORTS:
        raise OptionError(
            "{transport=}; it must be one of {names}", {"transport": transport}, names=", ".join(TRANSPORTS)
        )
    first, last = checked_ports(ports)
    timeout_s = checked_node_timeout(node_timeout_s)
    return Network(transport, first, last, timeout_s, checked_tls(tls, transport))


def _trees(trees: object) -> TreeOptions:
    if trees == "auto":
        return TreeOptions()
    if isinstance(trees, int) and not isinstance(trees, bool) and trees >= 1:
        return TreeOptions(limit=trees)
    name, _, text = trees.partition(":") if isinstance(trees, str) else ("", "", "")
    try:
        every_s = float(text) if name == "toggle" else 0.0
    except ValueError:
        every_s = 0.0
    if not 0 < every_s < math.inf:
        raise FlowError(f"trees={shorten(trees)}; it must be 'auto', a number of 1 or more, or 'toggle:SECONDS'")
    return TreeOptions(toggle_s=every_s)


def _placement(
    placement: Method | PlacementOptions, nodes: int | None, replan_s: float | Literal["auto"] | None
) -> PlacementOptions:
    if not isinstance(placement, PlacementOptions):
        return PlacementOptions(placement, nodes, replan_s)
    beside = {} if nodes is None else {"nodes": str(nodes)}
    if replan_s is not None:
        beside["replan_s"] = '"auto"' if replan_s == "auto" else f"{replan_s:g}"
    if beside:
        given = ", ".join(f"{name}={value}" for name, value in beside.items())
        raise FlowError(
            f"run() got both placement=PlacementOptions(...) and {given}, which PlacementOptions has itself; write "
            f"placement=PlacementOptions(..., {given}) and leave out {' and '.join(beside)} of run()"
        )
    return placement


def dual_options(
    dual: str | BurstOptions, spark: SparkOptions | None, epoch_interval_s: float | None
) -> DualOptions | None:
    """Returns what `run(dual=, spark=)` asks for. Raises FlowError for values that mean nothing."""
    if isinstance(dual, str) and dual == "off" and spark is None:
        return None
    from penstock.bridge.burst import BurstOptions  # a job without Spark starts sooner without these
    from penstock.bridge.session import SparkOptions

    if not isinstance(dual, str | BurstOptions):
        raise FlowError(f"dual={shorten(dual)}; it must be text such as 'on', or penstock.bridge.burst.BurstOptions")
    if spark is not None and not isinstance(spark, SparkOptions):
        raise FlowError(f"spark={shorten(spark)}; it must be penstock.bridge.session.SparkOptions(...), or None")
    if dual == "off":
        raise OptionError(
            "{spark} starts no Spark with {dual=}; give {dual} as 'on', 'spark-only' or 'toggle:SECONDS', or leave out "
            "{spark}",
            {"dual": dual},
        )
    from penstock.bridge.paradigm_scheduler import DualOptions  # loads pyarrow

    if isinstance(dual, BurstOptions):
        return DualOptions(replace(dual, epoch_s=epoch_interval_s), spark or SparkOptions())
    try:
        mode, numbers = _dual_settings(dual)
        burst = BurstOptions(mode=mode, epoch_s=epoch_interval_s, ahead=True, **numbers)
    except ValueError as error:
        raise OptionError(
            "{dual=}: {problem}; use 'off', 'on', 'spark-only' or 'toggle:SECONDS'. Settings follow a comma, as in "
            "'on,delta=0.3'; the settings are {settings}",
            {"dual": dual},
            problem=error,
            settings=", ".join(_DUAL_SETTINGS),
        ) from None
    return DualOptions(burst, spark or SparkOptions())


def _dual_settings(dual: str) -> tuple[Mode, dict[str, float]]:
    """Returns the mode and the settings of a text such as "on,delta=0.3". Raises ValueError with what is wrong."""
    first, *settings = dual.split(",")
    name, colon, duration = first.partition(":")
    modes: dict[str, Mode] = {"on": "auto", "spark-only": "spark-only", "toggle": "toggle"}
    if first == "off":
        raise ValueError("'off' takes no settings")
    if name not in modes or (colon and name != "toggle"):
        raise ValueError(f"{first!r} is not a mode")
    numbers: dict[str, float] = {}
    if name == "toggle":
        if not duration:
            raise ValueError("the seconds are missing, as in 'toggle:3'")
        numbers["toggle_s"] = _finite(duration, first)
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in _DUAL_SETTINGS:
            raise ValueError(f"{key!r} is not a setting")
        if key in numbers:
            raise ValueError(f"{key!r} is given twice")
        if not value:
            raise ValueError(f"{key!r} has no value")
        numbers[key] = _finite(value, setting)
    return modes[name], numbers


def _finite(text: str, where: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"{text!r} in {where!r} is not a finite number")
    return found


@refusing
def resume(
    name: str,
    *,
    checkpoints: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    local: bool = False,
    detached: bool = False,
    address: str | None = None,
) -> Job:
    """Start a job again from its last complete epoch, after it has failed or its cluster or program has gone.

    Only the store at `checkpoints` is needed: the flow and its options are saved there too. `workers`: a new number of
    workers (default: as before). `local`: as of `run`; the job may have run on Ray before, and the other way round. A
    local job runs without Spark and without a placement, whatever the job had on Ray.
    Raises JobNotFound when the store has no epoch of that job, and JobExists while the job runs.
    """
    if not isinstance(name, str):
        raise FlowError(f"name={shorten(name)}; it must be the name of a job, which is that of its flow")
    workers = None if workers is None else whole(workers, "workers")
    _check_places(checkpoints=checkpoints)
    _check_where(address, detached)
    if flag(local, "local"):
        _refuse_what_needs_ray(detached=detached, address=address)
    store = Store.open(checkpoints or default_checkpoints(), name)
    store.check_format()  # an older epoch of another format must stay too
    found = store.latest() if store.ended() is None else None
    if found is None or found[0].program is None:
        raise JobNotFound(
            f"there is no epoch of a job {name!r} in {store.place}: the job has finished, was cancelled, was never "
            "run with this checkpoint store, ran without epochs (epoch_interval_s=None), or failed before its first "
            "epoch was complete. Give the name and the checkpoint store with which the job was run, or run the job "
            "anew; if it was started from a savepoint, run it with that savepoint again (savepoint=..., or --savepoint)"
        )
    try:
        program, (flow, options) = Program.loads(store.get(found[0].program))
    except PenstockError:
        raise
    except (Exception, SystemExit) as error:  # a user's module may raise anything when it is imported
        raise StoreError(
            f"job {name!r} cannot be resumed here, because {_not_loaded(error)}. The epochs in the store stay as they "
            "are"
        ) from error
    program.prefer_own()
    options = replace(
        options,
        workers=workers or options.workers,
        store=store,
        resume=True,
        savepoint=None,
        program=store.get(found[0].program),
    )
    plan = flow.plan(options.workers, list_splits=False, check_sinks=False)
    _tell_of_mixing(plan)
    if local:
        options = _without_ray(options, name)
    else:
        from penstock.actors import on_ray

        on_ray.connect(address, options.workers, options.cpus_per_worker, options.dual, detached)
        on_ray.wait_for_store(name, store)
    if store.ended() is not None or store.latest() is None:
        raise JobNotFound(f"the job {name!r} of {store.place} has ended just now, so there is nothing to resume")
    if local:
        return _start_local(flow, plan, options, program)
    return _job(flow, on_ray.start(flow.name, plan, options, detached, program), program, detached)


def _not_loaded(error: BaseException) -> str:
    """Says why a saved program cannot be loaded: in which file, and what to do."""
    if isinstance(error, ModuleNotFoundError):
        remedy = "Install the module, or add the directory that has the module to PYTHONPATH"
        return f"a module of its program cannot be imported: {error}. {remedy}"
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}"
        return f"a module of its program cannot be imported: {describe(error)} ({where}). Correct the file"
    here = error.__traceback__  # the lines that follow are of the loading, and then of the program
    line = user_line(error.with_traceback(None if here is None else here.tb_next))
    if line is None:  # nothing of the program has run; a name that the program had is not there
        return (
            f"what its program refers to has changed since: {describe(error)}. Put back what is missing under its old "
            "name, or run the flow anew"
        )
    return (
        f"a module of its program fails when it is imported: {describe(error)} ({line}). Correct what the module does "
        "when it is imported"
    )


def _savepoint(url: str | os.PathLike[str], plan: Plan, store: Store | None) -> Store:
    """The store of a savepoint, whose state fits this plan."""
    if store is None:
        raise OptionError(
            "a job that starts from a savepoint needs epochs, and {epoch_interval_s=} turns epochs off; leave out "
            "{epoch_interval_s} or {savepoint}",
            {"epoch_interval_s": None},
        )
    origin = Store.open(url, SAVEPOINT)
    found = origin.latest()
    if found is None:
        raise JobNotFound(
            f"there is no savepoint in {os.fspath(url)!r}; give the place that a job's savepoint was saved in"
        )
    manifest, _ = found
    check(plan, json.loads(str(manifest.extra["kinds"])), manifest.key_groups)
    return origin


def default_checkpoints() -> str:
    """Where epochs are saved when nothing is said: a directory of this machine."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "penstock")


def attach(name: str | None = None, *, address: str | None = None) -> Job:
    """The handle of the running job of this name, which another program may have started; without a name, of the only
    running job.

    Within one program, a running job has one handle: a second call returns the handle of the first call, or of `run`.
    A local job (`run(local=True)`) can only be reached by its own program. Any other job is looked for on the cluster
    to which this program is connected, otherwise on the cluster of `address` or RAY_ADDRESS, otherwise on all clusters
    with a node on this machine. Raises JobNotFound when there is no such job, and without a name also when several jobs
    run.
    """
    here = [job for job in local_jobs() if name in (None, job.name)] if address is None else []
    if len(here) > 1:
        raise JobNotFound(f"several jobs run: {', '.join(job.name for job in here)}; give the name of one")
    if here:
        return here[0]
    from penstock.actors import on_ray

    try:
        name, host, link = on_ray.find(name, address)
        return known_job(name, host) or Job(name, link(), {})
    except JobNotFound as error:
        if name is not None and Store.open(default_checkpoints(), name).is_locked():
            raise JobNotFound(
                f"no job {name!r} runs on a cluster that this program can reach, but a job of this name is using its "
                f"checkpoint store. A local job (local=True, --local) belongs to the program that runs it, and only "
                "that program can reach it: use its Job there, or press Ctrl-C in its terminal"
            ) from error
        raise


def jobs(*, address: str | None = None) -> list[dict[str, Any]]:
    """The status of each running job, on the clusters where `attach` looks; "cluster" is the address of its cluster.

    The list is empty when there is no cluster. When a JobMaster does not answer within seconds, the entry is what
    `Job.status()` knows in this program. If that is nothing, the entry has the state UNKNOWN, and zeros."""
    from penstock.actors import on_ray

    here = [{**job.status(), "cluster": "this program"} for job in local_jobs()]
    return here + on_ray.jobs(address, silent_status)
