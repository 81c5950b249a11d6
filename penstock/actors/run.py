"""`run(flow)`: a flow becomes a running job; `attach(name)`: a running job from another driver."""

from __future__ import annotations

import copy
import json
import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import cloudpickle
import ray

from penstock.actors import cluster
from penstock.actors.dual import DualOptions
from penstock.actors.job import Job
from penstock.actors.job_master import REPORTS, JobMaster, JobOptions, in_parts
from penstock.actors.keeper import SAVEPOINT
from penstock.actors.worker import WorkerOptions
from penstock.bridge.burst import BurstOptions, Mode
from penstock.bridge.session import SparkOptions
from penstock.placement.options import Method, PlacementOptions
from penstock.runtime.channel import WINDOW_BYTES
from penstock.runtime.epochs.coordinator import EpochOptions
from penstock.runtime.epochs.restore import check
from penstock.runtime.epochs.store import Store
from penstock.runtime.errors import FlowError, JobExists, JobNotFound
from penstock.runtime.operators import Write
from penstock.runtime.rud import MEMORY_BYTES

# RayDP's executors read micro-batches from Ray's object store: several of some hundred megabytes at a time.
_DUAL_STORE_BYTES = 1 << 30

# What of BurstOptions can be set by text.
_DUAL_SETTINGS = ("delta", "k", "margin", "range_below", "smoothing_s", "interval_min_s", "interval_max_s")

if TYPE_CHECKING:
    from penstock.runtime.flow import Flow
    from penstock.runtime.plan import Plan


def run(
    flow: Flow,
    *,
    workers: int | None = None,
    parallelism: int | None = None,
    detached: bool = False,
    address: str | None = None,
    ring_bytes: int | None = None,
    window_bytes: int = WINDOW_BYTES,
    cache_bytes: int = MEMORY_BYTES,
    cpus_per_worker: float = 1.0,
    start_timeout_s: float = 60.0,
    epoch_interval_s: float | None = 1.0,
    epoch_timeout_s: float = 60.0,
    checkpoints: str | os.PathLike[str] | None = None,
    max_restarts: int = 10,
    max_attempts: int = 3,
    hang_timeout_s: float = 60.0,
    savepoint: str | os.PathLike[str] | None = None,
    dual: str | BurstOptions = "off",
    spark: SparkOptions | None = None,
    placement: Method | PlacementOptions = "round-robin",
    nodes: int | None = None,
    replan_s: float | None = None,
) -> Job:
    """Start `flow` as a job on Ray and return at once.

    `workers` is the number of worker processes (default: 1). `parallelism` replaces the flow's own default. A
    `detached` job outlives this process; any other ends with it. `address` is a Ray cluster's; by default the one
    that runs here is joined, or one is started for this process. `ring_bytes` is the size of each worker's inbox, a
    power of two: no record may be larger than about half of it. By default it is 2 MiB, and grows with the records
    that come. `window_bytes` bounds what is under way from one task to another; `cache_bytes` what a worker keeps in
    memory of what it has sent since the last complete epoch: more goes to a file below TMPDIR.

    Every `epoch_interval_s` seconds (more rarely while no record moves) the state of all tasks is saved as one
    consistent *epoch*, to which the job goes back when a process dies, without losing or doubling a record; None: the
    job saves nothing, and any death ends it.
    An epoch that does not complete within `epoch_timeout_s` is given up for the next. `checkpoints` is where epochs
    are saved, a directory or a URL such as s3://bucket/prefix (default: penstock/ below XDG_STATE_HOME or
    ~/.local/state); what is saved is removed when the job has finished or was cancelled, and stays when it failed,
    for `resume`. `max_restarts`: how many deaths within ten minutes the job bears. `max_attempts`: a record that
    has killed its worker's process as often is from then on a failed record, by its operator's `on_error` (two deaths
    more are needed to find out which record it is).
    `hang_timeout_s`: after so long a worker whose process does not answer is killed, and counts as dead.
    `savepoint`: start from what `job.savepoint` has saved there; the flow may have other parallelism and other
    operators, but those that have state must be there under their names.

    `dual`: "off" runs all records one by one; "on" sends the input of operators whose queues grow to Spark in
    micro-batches and takes it back when the burst is over (Spark is started with the job, and kept warm);
    "spark-only" sends all there as soon as Spark is ready; "toggle:3" there and back every 3 seconds. `spark`: the
    session to start (penstock.bridge.session.SparkOptions). Behind a comma `dual` takes settings of the detector, as in
    "on,delta=0.3"; penstock.bridge.burst.BurstOptions, which may stand for the text, says what they mean.
    Without Java or Spark the job goes on with records, and says so once.

    `placement` deals tasks to workers: "round-robin", in turn; "traffic", such that little crosses between nodes and
    between workers (by the paper's algorithms and refinement); "turbostream", "t-storm", "jstorm" and "metis" as others
    would. `nodes`: over how many nodes of the cluster the workers are spread, with room reserved on each; by default
    they are where the JobMaster is. `replan_s`: measure what tasks use and send, and every so many seconds move some
    to other workers where that is worth it; penstock.placement.options.PlacementOptions, which may stand for the text,
    says when.

    Raises FlowError or SourceError for a flow that cannot run, StoreError where `checkpoints` cannot be used, JobExists
    while a job of this name runs, NoCluster for a detached job where no cluster outlives this process; what goes wrong
    later is raised by `job.wait()`.
    """
    workers = 1 if workers is None else workers
    if workers < 1:
        raise FlowError(f"workers={workers}; it must be 1 or more")
    if epoch_interval_s is not None and not epoch_interval_s > 0:
        raise FlowError(f"epoch_interval_s={epoch_interval_s}; it must be above 0, or None for a job without epochs")
    if cache_bytes < 1:
        raise FlowError(f"cache_bytes={cache_bytes}; it must be 1 or more")
    if not epoch_timeout_s > 0 or not hang_timeout_s > 0 or max_restarts < 0 or max_attempts < 1:
        raise FlowError(
            f"epoch_timeout_s={epoch_timeout_s} and hang_timeout_s={hang_timeout_s} must be above 0, "
            f"max_restarts={max_restarts} at least 0, max_attempts={max_attempts} at least 1"
        )
    both = dual_options(dual, spark, epoch_interval_s)
    if not isinstance(placement, PlacementOptions):
        placement = PlacementOptions(placement, nodes, replan_s)
    where = placement.checked(workers, list(flow.graph.operators), epochs=epoch_interval_s is not None)
    flow = copy.copy(flow)
    if parallelism is not None:
        flow.parallelism = parallelism
    plan = flow.plan(workers, check_sinks=savepoint is None)
    store = origin = None
    if epoch_interval_s is not None:
        store = Store.open(checkpoints or default_checkpoints(), flow.name)
        store.check()
    if savepoint is not None:
        origin = _savepoint(savepoint, plan, store)
    options = JobOptions(
        workers,
        cpus_per_worker,
        start_timeout_s,
        WorkerOptions(ring_bytes, window_bytes, cache_bytes),
        EpochOptions(epoch_interval_s, epoch_timeout_s, max_restarts),
        store,
        flow if store is not None else None,
        attempts=max_attempts,
        hang_timeout_s=hang_timeout_s,
        savepoint=origin,
        dual=both,
        placement=where,
    )
    if store is not None:
        options = replace(options, program=cloudpickle.dumps((flow, options)))
    _connect(address, workers, both, detached)
    return _start(flow, plan, options, detached)


def dual_options(
    dual: str | BurstOptions, spark: SparkOptions | None, epoch_interval_s: float | None
) -> DualOptions | None:
    """What `run(dual=, spark=)` says; FlowError for anything else."""
    if isinstance(dual, BurstOptions):
        return DualOptions(replace(dual, epoch_s=epoch_interval_s), spark or SparkOptions())
    mode, *settings = dual.split(",")
    mode, _, seconds = mode.partition(":")
    modes: dict[str, Mode] = {"on": "auto", "spark-only": "spark-only", "toggle": "toggle"}
    if dual == "off":
        return None
    try:
        if mode not in modes or (seconds and mode != "toggle"):
            raise ValueError("what is before the first comma is none of the modes")
        numbers = {name: float(value) for name, _, value in (setting.partition("=") for setting in settings)}
        if unknown := sorted(set(numbers) - set(_DUAL_SETTINGS)):
            raise ValueError(f"there is no setting {unknown[0]!r}")
        if mode == "toggle":
            numbers["toggle_s"] = float(seconds or "nan")
        if not all(map(math.isfinite, numbers.values())):
            raise ValueError("a number is not finite")
        burst = BurstOptions(mode=modes[mode], epoch_s=epoch_interval_s, ahead=True, **numbers)
    except ValueError as error:
        raise FlowError(
            f"dual={dual!r}: {error}; use 'off', 'on', 'spark-only' or 'toggle:SECONDS', and behind a comma settings "
            f"such as delta=0.3, of {', '.join(_DUAL_SETTINGS)}"
        ) from None
    return DualOptions(burst, spark or SparkOptions())


def _connect(address: str | None, workers: int, dual: DualOptions | None, detached: bool) -> None:
    """Connect to Ray; a cluster of our own has room for the job, and for Spark's executors and their micro-batches."""
    if dual is None:
        cluster.connect(address, cpus=workers + 1, lasting=detached)
        return
    cpus = workers + 1 + dual.spark.executors * dual.spark.cores
    cluster.connect(address, cpus=cpus, lasting=detached, store_bytes=_DUAL_STORE_BYTES)


def resume(
    name: str,
    *,
    checkpoints: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    detached: bool = False,
    address: str | None = None,
) -> Job:
    """Start a job again that has failed, or whose cluster has gone, from its last complete epoch.

    Nothing but what the job saved in `checkpoints` is needed: the flow and its options are there too. `workers`:
    another number than before. Raises JobNotFound when there is nothing of that name to go on from, JobExists while it
    runs.
    """
    store = Store.open(checkpoints or default_checkpoints(), name)
    found = store.latest() if store.ended() is None else None
    if found is None or found[0].program is None:
        raise JobNotFound(
            f"there is no epoch of a job {name!r} in {store.place}: it has finished, was never run with epochs saved "
            "there, or failed before its first epoch was complete"
        )
    flow, options = cloudpickle.loads(store.get(found[0].program))
    options = replace(
        options,
        workers=workers or options.workers,
        store=store,
        resume=True,
        savepoint=None,
        program=store.get(found[0].program),
    )
    plan = flow.plan(options.workers, list_splits=False, check_sinks=False)
    _connect(address, options.workers, options.dual, detached)
    return _start(flow, plan, options, detached)


def _savepoint(url: str | os.PathLike[str], plan: Plan, store: Store | None) -> Store:
    """The store of a savepoint that this plan can go on from."""
    if store is None:
        raise FlowError("a job that starts from a savepoint needs epochs: give run(epoch_interval_s=...)")
    origin = Store.open(url, SAVEPOINT)
    found = origin.latest()
    if found is None:
        raise JobNotFound(f"there is no savepoint in {os.fspath(url)!r}")
    manifest, _ = found
    check(plan, json.loads(str(manifest.extra["kinds"])), manifest.key_groups)
    return origin


def _start(flow: Flow, plan: Plan, options: JobOptions, detached: bool) -> Job:
    restarts = -1 if options.store is not None and options.epochs.max_restarts else 0
    actor = ray.remote(concurrency_groups={REPORTS: 1})(JobMaster).options(
        name=cluster.master_name(flow.name),
        namespace=cluster.NAMESPACE,
        lifetime="detached" if detached else None,
        num_cpus=0,
        max_concurrency=64,
        max_restarts=restarts,
        max_task_retries=-1 if restarts else 0,
    )
    while True:
        try:
            master = actor.remote(*in_parts(plan, options))
            break
        except ValueError as error:
            if not cluster.is_ending(flow.name):
                raise JobExists(
                    f"a job named {flow.name!r} is running; stop it (penstock.attach({flow.name!r}).stop()) or give "
                    "the flow another name"
                ) from error
    sinks = {name: op.sink for name, op in flow.graph.operators.items() if isinstance(op, Write)}
    return Job(flow.name, master, sinks)


def default_checkpoints() -> str:
    """Where epochs are saved when nothing is said: a directory of this machine."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "penstock")


def attach(name: str, *, address: str | None = None) -> Job:
    """The running job of this name, started by another driver; raises JobNotFound when there is none."""
    cluster.connect(address, lasting=not ray.is_initialized())
    return Job(name, cluster.find_master(name), {})
